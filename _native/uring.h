/* uring.h - what the files of the io_uring backend share: the ring's state, and how a request is
 * named.
 *
 *   uring.c          turns, and the ends of a run, of a connection; the backend's table
 *   uring_ring.c     a ring is made, its thread found out, and taken apart
 *   uring_submit.c   requests: from what a connection wants to what is asked of the kernel
 *   uring_reap.c     completions, and the receive buffers that come with them
 *   uring_regions.c  registered memory: which place of the ring's table it has
 *   uring_orphans.c  notifications that a ring owed whose thread is gone
 *
 * Rules, each measured or from the man pages:
 *  1. SINGLE_ISSUER|DEFER_TASKRUN: only the thread that made the ring enters it. Another thread
 * gets a new ring; what the old one still owes is then learned in another way (an orphan).
 *  2. wait_nr is 1: with notifications outstanding a larger one hung (kernel ef42b85a5609).
 *  3. EINTR goes back to Python, which runs its signal handlers.
 *  4. A queued SQE is submitted before its descriptor is closed, and harvested, else the peer gets
 * no FIN and a reused descriptor number is hit.
 *  5. A receive is armed again only after its last completion was seen.
 *
 * Never: link requests, touch the ring of another thread or of a parent process.
 */
#ifndef AIOZC_URING_H
#define AIOZC_URING_H

#include "internal.h"

#include <liburing.h>
#include <sys/syscall.h>
#include <unistd.h>

#define UD_CONN 1u
#define UD_REQ 2u
#define UD_CANCEL 3u
#define UD_OUT 4u
#define UD_TYPE(ud) ((unsigned)((ud) >> 56))
#define UD_TOKEN(ud) ((ud) & (((uint64_t)1 << 56) - 1))

#define QUIET 64         /* quiet requests in one enter (uring_submit.c) */
#define RING_REGIONS 256 /* that one ring registers */

struct ring_region {
    uint64_t id; /* 0: free */
    int error;   /* why the kernel refused it */
};

struct quiet {
    uint64_t token;
    uint32_t place; /* in the submission queue */
};

struct uring {
    struct io_uring ring;
    struct quiet quiet[QUIET]; /* in the order of their places */
    uint32_t n_quiet;
    bool may_be_quiet; /* the kernel is new enough */
    /* What is registered at which place of the ring's table of buffers. */
    struct ring_region regions[RING_REGIONS];
    int table;               /* 0: not made; 1: made; < 0: cannot be */
    uint32_t n_regions, hot; /* places used so far; the one that was used last */
    uint64_t epoch;
    struct io_uring_buf_ring *br;
    size_t br_bytes;
    pid_t tid;
    uint32_t inflight; /* completions owed, notifications not counted */
    uint32_t orphans;
    bool no_send;
    bool quick; /* the thread has the ring's descriptor registered */
    int grave;  /* -1: none */
    int evfd;   /* for another loop's epoll, likewise */
    /* Receive buffers that the kernel has; how many it should have, and the most that one harvest
     * took since that was looked at. */
    uint32_t given, wanted, peak, harvests;
    uint64_t received; /* bytes in the buffers of this harvest */
};

/* ---- uring_ring.c ---- */

int uring_attach(struct azc_reactor *r);
void uring_destroy(struct azc_reactor *r);
void uring_unregister_fd(struct uring *u);

/* ---- uring_submit.c ---- */

struct io_uring_sqe *uring_get_sqe(struct azc_reactor *r);
bool uring_cancel(struct azc_reactor *r, unsigned type, uint64_t token, uint64_t about);
bool uring_bring_up(struct conn *c);
void uring_flush(struct azc_reactor *r);

/* ---- uring_reap.c ---- */

int uring_buf_ring_init(struct azc_reactor *r, struct uring *u);
void uring_give_buffers(struct azc_reactor *r);
unsigned uring_harvest(struct azc_reactor *r);

/* ---- uring_regions.c ---- */

void uring_sweep_regions(struct uring *u);
void uring_from_region(struct azc_reactor *r, struct io_uring_sqe *sqe, const struct region *g);
int uring_region(struct azc_reactor *r, uint64_t id);

/* ---- uring_orphans.c ---- */

void uring_retire(struct azc_reactor *r);
uint32_t uring_count_orphans(struct azc_reactor *r);
void uring_reap_orphans(struct azc_reactor *r);
void uring_dig_grave(struct azc_reactor *r);

static inline struct uring *uring_of(struct azc_reactor *r)
{
    return r->be_data;
}

/* glibc has a function for it from 2.30 on only, and wheels are to run with older ones. */
static inline pid_t thread_id(void)
{
    return (pid_t)syscall(SYS_gettid);
}

static inline unsigned sq_flags(struct uring *u)
{
    return __atomic_load_n(u->ring.sq.kflags, __ATOMIC_ACQUIRE);
}

static inline void set_ud(struct io_uring_sqe *sqe, unsigned type, uint64_t token)
{
    sqe->user_data = (uint64_t)type << 56 | token;
}

#endif
