/* uring_ring.c - a ring is made, in the size that fits, and taken apart.
 *
 * Owns: how large the ring is, and which thread may enter it. Called by: reactor.c through `struct
 * backend` when a run begins or the loop is closed; uring.c where a wait needs a ring of this
 * thread. Never: reuse the ring of another thread or of a parent process, which would be entered
 * by who may not.
 */
#define _GNU_SOURCE
#include "uring.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

/* The smallest rings that are tried, three pages in all, as the probe's are; and how long. */
#define SQ_MIN 8
#define CQ_MIN 64
#define NAPS 10
#define NAP_NS 10000000

static int ring_init(struct uring *u, uint32_t sq_entries, uint32_t cq_entries)
{
    static const unsigned flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG |
            IORING_SETUP_SUBMIT_ALL,
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_SUBMIT_ALL,
        IORING_SETUP_SUBMIT_ALL,
        0,
    };
    int rc = -EINVAL;
    for (size_t i = 0; i < sizeof flags / sizeof *flags && rc == -EINVAL; i++) {
        struct io_uring_params p = {.flags = flags[i] | IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP,
                                    .cq_entries = cq_entries};
        rc = io_uring_queue_init_params(sq_entries, &u->ring, &p);
        u->may_be_quiet =
            !rc && p.flags & IORING_SETUP_DEFER_TASKRUN && p.features & IORING_FEAT_CQE_SKIP;
    }
    return rc;
}

static int rings_init(struct azc_reactor *r, struct uring *u, uint32_t sq, uint32_t cq)
{
    int rc = ring_init(u, sq, cq);
    if (rc < 0)
        return rc;
    rc = uring_buf_ring_init(r, u);
    if (rc < 0)
        io_uring_queue_exit(&u->ring);
    return rc;
}

/* Without CAP_IPC_LOCK kernels before 5.12 and from 6.14 on charge a ring to RLIMIT_MEMLOCK, of the
 * user, some 200 KiB with our default sizes; many systems allow 64 KiB. So where it does not fit it
 * is made smaller: queues that are full are handled anyway. What a closed ring, or one that could
 * not be made, was charged comes back after an RCU grace period, so the last size is tried for a
 * while. */
static int rings_that_fit(struct azc_reactor *r, struct uring *u)
{
    uint32_t sq = r->cfg.sq_entries, cq = r->cfg.cq_entries;
    int naps = 0;
    for (;;) {
        int rc = rings_init(r, u, sq, cq);
        if (rc != -ENOMEM)
            return rc;
        if (sq > SQ_MIN || cq > CQ_MIN) {
            sq = sq / 8 > SQ_MIN ? sq / 8 : sq < SQ_MIN ? sq : SQ_MIN;
            cq = cq / 8 > CQ_MIN ? cq / 8 : cq < CQ_MIN ? cq : CQ_MIN;
        } else if (naps++ < NAPS) {
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        } else {
            return rc;
        }
    }
}

void uring_destroy(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    if (of_parent(r)) {
        close(u->ring.ring_fd); /* the mapping was not inherited (ring_dontfork) */
    } else {
        io_uring_queue_exit(&u->ring);
        munmap(u->br, u->br_bytes);
    }
    if (u->grave >= 0)
        close(u->grave);
    if (u->evfd >= 0)
        close(u->evfd);
    free(u);
    r->be_data = NULL;
}

/* A registered descriptor is a number in this thread's table: liburing, closing the ring in another
 * thread, would take that thread's own away. It also keeps the ring until this thread ends. */
void uring_unregister_fd(struct uring *u)
{
    if (u->quick && io_uring_unregister_ring_fd(&u->ring) == 1)
        u->quick = false;
}

int uring_attach(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    if (u && u->tid == thread_id()) {
        u->no_send = false;
        if (!u->quick)
            u->quick = io_uring_register_ring_fd(&u->ring) == 1;
        return 0;
    }
    if (u)
        uring_retire(r);
    u = calloc(1, sizeof *u);
    if (!u)
        return -ENOMEM;
    u->grave = u->evfd = -1;
    int rc = rings_that_fit(r, u);
    if (rc < 0) {
        free(u);
        return rc;
    }
    u->tid = thread_id();
    (void)io_uring_ring_dontfork(&u->ring); /* a child that entered it would get -EEXIST */
    u->quick = io_uring_register_ring_fd(&u->ring) == 1; /* saves a look-up an enter; optional */
    r->be_data = u;
    u->orphans = uring_count_orphans(r);
    return 0;
}
