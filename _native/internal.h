/* internal.h - what the native files share behind the ABI of aiozc.h.
 *
 * Nothing here is seen by Python. The layering, from the bottom:
 *   slab.c      memory of copied bytes        table.c   slots with generations
 *   optable.c   operations and requests       sendq.c   one FIFO a socket, knows no backend
 *   errqueue.c  ids of MSG_ZEROCOPY sends    msgzc.c   those sends, and their notifications
 *   sockids.c   ids of a borrowed socket
 *   uring*.c (uring.h), epoll.c  the two backends
 *   conn.c, write.c, reactor.c   the ABI over them: connections, sending, turns and events
 *   stall.c     peers that stop reading       faults.c   what a build for tests pretends
 */
#ifndef AIOZC_INTERNAL_H
#define AIOZC_INTERNAL_H

#include "aiozc.h"
#include "faults.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* Copying a small write costs less than holding it: no event, no reference. Above it, what the
 * socket does not take at once is held by reference. */
#define COPY_MAX 16384u
/* From here on the first write of a turn goes without that copy, if the socket takes it: the call
 * costs less (bench/peers.py, rows echo-10KiB-x64 and 16KiB). Below it gathering is cheaper. */
#define AT_ONCE 8192u
/* A slow reader's backlog is not copied any further: references cost it less memory. */
#define COPY_BACKLOG (256u << 10)
/* Plain bytes queued in one turn are sent at once from the high-water mark on, within these bounds:
 * one system call for many writes, and a writer is not paused while the socket has room. */
#define SEND_NOW (64u << 10)
#define SEND_NOW_MAX (1u << 20)
/* asyncio's limits of a write buffer, where nobody set others. */
#define HIGH_WATER (64u << 10)
#define LOW_WATER (16u << 10)
/* Received bytes that one turn hands out, at least: more of them would not be in the cache any more
 * when their protocol reads them (bench/peers.py, row echo-64KiB-x64). */
#define TURN_BYTES (256u << 10)
/* A request that may not wait for room may end short, and then without closing its stack. So it
 * gathers no more than this where it pins, and twice as much after each that did not end short
 * (without that, 16 entries of the kernel a MiB on other loops: bench/serving.py, "uvloop submit").
 */
#define UNSURE_MAX (64u << 10)
#define SURE_MAX 4
/* Parts smaller than this on average are copied: each is charged a page at the receiver, whose
 * window collapses (measured on loopback, 1,500 parts of 64 B to a 16 KiB receive buffer: 49.5 s,
 * 1 ms by copying). Not where a threshold of 0 forces zero-copy. */
#define ZC_PART_MIN 1024u
/* So many bytes out of one region are worth a request of their own, where other parts follow. */
#define REGION_CUT (32u << 10)
/* ENOMEM teaches what may really be pinned, for other processes of the user lock memory, too. What
 * was learnt wears off: a refusal costs a failed request, and one in so many may meet it. Not below
 * a share of the cap, for the limit is not the only cause of ENOMEM. */
#define SHORT_WEARS 256u
#define CAP_LEAST 64u
/* Adaptive: so many trusted reports in a row decide that the path copies; it is probed again by one
 * request after so many bytes, then after twice as many, and so on (a capture ends, a route
 * changes). */
#define COPIED_REPORTS 2
#define PROBE_GAP (16u << 20)
#define PROBE_GAP_MAX (1u << 30)

/* ---- table.c: fixed-size slots, addressed by slot number and generation ---- */

struct slot { /* head of every element */
    uint64_t token;
    uint32_t next_free;
    uint32_t used;
};

struct table {
    size_t size;
    char **chunks;
    uint32_t n_chunks;
    uint32_t free_head;
    uint32_t live;
};

void table_init(struct table *t, size_t size);
void *table_new(struct table *t);
void table_free(struct table *t, void *element);
void *table_get(const struct table *t, uint64_t token); /* NULL: stale or unknown */
void *table_at(const struct table *t, uint32_t slot);   /* NULL: free */
uint32_t table_slots(const struct table *t);
void table_destroy(struct table *t);

/* ---- slab.c: memory for copied bytes, reused last in, first out ---- */

#define SLAB_CLASSES 8 /* 512 B .. 64 KiB, header included */

struct chunk;
struct slab {
    struct chunk *free[SLAB_CLASSES];
    char *fresh;
    size_t fresh_left;
    void **blocks;
    size_t n_blocks;
};

/* ---- optable.c ---- */

/* OP_REF, OP_AUTO: a plain write held by reference; OP_AUTO goes zero-copy where it may. */
enum op_kind { OP_USER = 1, OP_REF = 2, OP_CHUNK = 3, OP_AUTO = 4 };

struct op { /* azc_op first: Python reads it in place */
    struct slot slot;
    azc_op pub;
};

struct chunk { /* copied bytes; its op is not in the table, nobody outside sees it */
    azc_op op;
    struct chunk *next;
    size_t cap, used;
    int size_class;           /* -1: from malloc */
    _Alignas(16) char data[]; /* a datagram's header may lie here */
};

struct conn;
struct dgram;

struct grave { /* of a ring whose thread is gone: `fd` hangs up when the kernel is done with it */
    int fd;
    uint32_t orphans;
};

#define REQ_INLINE_OPS 4

struct req { /* one request: alive from its SQE to its last completion */
    struct slot slot;
    struct conn *conn;
    uint64_t bytes;   /* issued; after the first completion: accepted */
    uint64_t end_pos; /* stream position behind its last byte */
    uint64_t issued;  /* turn_ns of then, if zc */
    azc_op **ops;
    azc_op *inline_ops[REQ_INLINE_OPS];
    struct dgram *dgram; /* of a datagram: what it sends, until the first completion */
    struct grave *grave; /* of an orphan: its ring's */
    uint32_t n_ops, cap_ops;
    bool zc, fresh, first_seen, notif_seen, orphan;
    bool quiet; /* uring: no completion tells of its success */
#ifdef AIOZC_FAULTS
    int32_t fault; /* what it ends with, whatever the kernel answers */
#endif
};

/* ---- regions.c ---- */

struct region {
    const char *base;
    size_t len;
    uint64_t id;
};

bool regions_any(void);
uint64_t regions_epoch(void);
bool region_by_id(uint64_t id, struct region *found);
bool region_find(const void *p, size_t n, struct region *found);
uint32_t regions_prefix(const struct iovec *iov, uint32_t n, struct region *found);

static inline bool region_holds(const struct region *r, const void *p, size_t n)
{
    const char *at = p;
    return at >= r->base && n <= r->len && (size_t)(at - r->base) <= r->len - n;
}

/* ---- sendq.c ---- */

struct part {
    const char *base;
    size_t len;
    azc_op *op;
};

struct sendq {
    struct part *parts; /* ring, a power of two */
    uint32_t cap, head, count;
    uint32_t in_request; /* parts at the head that the unsent request reads */
    uint32_t zc_parts;   /* queued parts of operations */
    uint32_t auto_parts; /* and of plain writes that may go zero-copy */
    uint64_t copy_left;  /* bytes at the head that must go by copying (fell back) */
    uint64_t since_eor;
    struct iovec *iov; /* lives until the first completion of the request */
    uint32_t iov_cap;
    struct msghdr msg;
};

struct gathered {
    uint32_t parts;
    uint64_t bytes;
    bool zc, eor;
    struct region region; /* that has all of it; id 0: none */
};

void adapt(struct conn *c, bool copied);
void fell_back(struct azc_reactor *r, int reason);
bool zc_allowed(struct conn *c, uint64_t zc_bytes, const struct gathered *g);

/* ---- errqueue.c ---- */

struct errq {
    uint64_t *tokens; /* ring, a power of two: the request of each id from base on; 0: released */
    uint32_t cap, head, count;
    uint32_t base; /* the oldest id that is not released; base + count is the next one */
};

struct errq_range {
    uint32_t first, n; /* ids that may be outstanding */
    uint32_t beyond;   /* so many were never issued here */
};

int errq_reserve(struct errq *e);
void errq_issued(struct errq *e, uint64_t token);
struct errq_range errq_clip(const struct errq *e, uint32_t lo, uint32_t hi);
uint64_t errq_take(struct errq *e, uint32_t id);
bool errq_skip(struct errq *e, uint32_t n);
void errq_destroy(struct errq *e);

/* ---- dgramq.c ---- */

struct dgram { /* lies in a chunk: one datagram, its address, its bytes or (op) a struct zdgram */
    struct chunk *chunk;
    struct dgram *next;
    size_t len;
    azc_op *op; /* of azc_zc_sendto; NULL: a copy */
    uint32_t namelen;
    char name[AZC_NAME_MAX];
    _Alignas(16) char data[];
};

enum way { WAY_OPEN, WAY_ZC, WAY_COPY };

struct zdgram { /* what the kernel reads until the first completion */
    struct msghdr msg;
    uint32_t pages;  /* that its memory touches */
    int32_t suspect; /* -errno met; it may be an earlier datagram's */
    uint32_t tries;  /* with a suspect */
    enum way way;
    bool issued;
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(uint16_t))];
    struct iovec iov[];
};

struct dgram_turn { /* what one turn has tried */
    uint32_t n;
    int64_t room, taken;
};

struct dgramq {
    struct dgram *head, *tail;
    uint32_t count;
    uint32_t issued;        /* zero-copy, without a first completion; no other is sent meanwhile */
    struct msghdr recv_msg; /* for the multishot recvmsg: only its lengths are read */
};

struct conn {
    struct slot slot;
    azc_conn pub;
    struct azc_reactor *r;
    struct sendq q;
    struct dgramq dq;
    struct req *rq;  /* the one request that is not yet sent */
    uint32_t notifs; /* requests not yet released */
    struct conn *dirty_next;
    bool dirty;
    bool want_recv, armed, cancelling, eof;
    bool single;   /* uring: one receive after the other, no multishot */
    bool announce; /* azc_conn_direct: tell that it is readable, do not receive */
    bool polled;   /* uring: what is armed only polls */
    bool cancel_rq, cancel_rq_sent;
    bool rq_waits;    /* uring: the request waits for room in the kernel */
    uint8_t sure;     /* requests in a row that did not end short, SURE_MAX at most */
    bool loud;        /* uring: the last quiet request did not do it all; the next one is none */
    bool half_closed; /* the peer will send nothing more; why that matters: uring_submit.c */
    bool last_eor;
    /* Adaptive: what trusted reports said, and the stream position of the next probe. */
    bool path_copies;
    int8_t local; /* is the peer on this machine? 0: not looked at yet; -1: no */
    uint8_t copied_in_row, reports;
    uint64_t probe_at, probe_gap;
    uint64_t direct, direct_turn; /* bytes that conn_copy_now sent in that turn */
    uint64_t at_once;             /* the turn in which a small write last went at once */
    bool held;                    /* azc_conn_hold */
    bool want_out;                /* the socket was full: wait until it is writable */
    bool out_armed;               /* uring: a poll for that is with the kernel */
    uint32_t ep_mask;
    struct errq eq; /* epoll: requests by the ids of their sends */
    bool edges;     /* epoll: its error queue is another's to read, so no levels */
    bool zc_on;     /* the socket has SO_ZEROCOPY from us */
    bool borrowed;  /* the socket is somebody else's, and may outlive this */
    bool zc_full;   /* no room for more notifications: copy until one came */
    bool settling;  /* ids of sends that failed may be in the error queue */
    bool reading;   /* the error queue is being read */
    bool closed;
    /* Closed with memory still pinned: a duplicate of the descriptor (or itself, azc_conn_leave),
     * what was unacknowledged when azc_linger last looked, and since when. */
    int kept_fd;
    int kept_unacked;
    uint64_t kept_since;
    /* Open: zc_timeout, and what stall.c saw when it last looked (with the two above). */
    uint64_t timeout_ns, seen_sent, seen_acked;
    uint32_t seen_pass;
};

/* ---- reactor.c ---- */

struct backend {
    int (*attach)(struct azc_reactor *r);
    int (*wait)(struct azc_reactor *r, int64_t timeout_ns);
    bool (*idle)(struct azc_reactor *r); /* nothing to ask of the kernel, or to hear from it */
    int (*detach)(struct azc_reactor *r);
    int (*quiesce)(struct conn *c); /* nothing of it is in the kernel but notifications */
    int (*drain)(struct azc_reactor *r, int64_t timeout_ns);
    void (*send_now)(struct conn *c);                  /* what is queued, within the call */
    int (*region)(struct azc_reactor *r, uint64_t id); /* register it now */
    int (*wake_fd)(struct azc_reactor *r);
    /* Of a connection that is closed with memory pinned; NULL where the ring tells anyway. */
    void (*keep)(struct conn *c, bool on); /* watch its duplicate, or no longer */
    void (*look)(struct conn *c);          /* now and then; it may be gone afterwards */
    void (*destroy)(struct azc_reactor *r);
};
extern const struct backend uring_backend, epoll_backend;

/* ---- msgzc.c ---- */

bool msgzc_ready(struct conn *c);
int32_t msgzc_send(struct req *q, const struct msghdr *m);
unsigned msgzc_read(struct conn *c);
void msgzc_look(struct conn *c);
void msgzc_end(struct conn *c);

/* ---- sockids.c ---- */

void sockids_put(int fd, uint32_t next);
bool sockids_take(int fd, uint32_t *next);

/* ---- stall.c ---- */

struct stall {
    uint64_t tick;  /* nanoseconds between two looks; 0: no timeout was ever set */
    uint64_t clock; /* runs while the loop does */
    uint64_t last;
    uint32_t pass;
    bool watching;
};
int64_t stall_watch(struct azc_reactor *r, int64_t timeout_ns);

struct azc_reactor {
    azc_event out[AZC_EVENTS];
    uint32_t n_out;
    azc_event *pending;
    uint32_t n_pending, cap_pending;
    int fired; /* AZC_FIRED_POLL, AZC_FIRED_WAKE */
    uint64_t *rel;
    size_t n_rel, cap_rel;
    azc_config cfg;
    azc_stats stats;
    uint64_t zc_short; /* of zc_loop_cap: what ENOMEM showed not to be there */
    const struct backend *be;
    void *be_data;
    struct table ops, reqs, conns;
    struct slab slab;
    struct conn *dirty, *dirty_tail; /* first in, first out: who was refused is served first */
    char *bufs;
    size_t bufs_bytes, buf_size, buf_stride;
    uint32_t n_bufs;
    /* Receive buffers that neither an event names nor the kernel has, last in first out: what was
     * used last lies in the cache. */
    uint16_t *spare;
    uint32_t n_spare;
    bool detaching;
    struct stall stall;
    uint64_t turn; /* what turn_ns read in this turn; 0: not yet */
    uint64_t turns;
    pid_t pid;
#ifdef AIOZC_FAULTS
    struct faults faults;
#endif
};

void emit(struct azc_reactor *r, uint64_t token, int kind, int32_t res, unsigned arg);
void conn_notify(struct conn *c);
void conn_send_failed(struct conn *c, int error);
void conn_maybe_free(struct conn *c);
int conn_copy_now(azc_conn *pub);
uint64_t now_ns(void);
void collect_spare(struct azc_reactor *r);

struct chunk *chunk_new(struct azc_reactor *r, size_t want);
void chunk_free(struct azc_reactor *r, struct chunk *k);
void slab_destroy(struct slab *s);

azc_op *op_new(struct azc_reactor *r, enum op_kind kind, uint64_t nbytes);
void op_check(struct azc_reactor *r, azc_op *op);
void op_forget(struct azc_reactor *r, azc_op *op);
struct req *req_new(struct conn *c, const struct gathered *g);
struct req *req_new_dgram(struct conn *c, struct dgram *d);
int fallback_reason(int error);
void req_first(struct req *q, int32_t res, bool more);
void req_notif(struct req *q, bool reported, bool copied);
void req_drop(struct req *q);
void req_leave_grave(struct req *q);

void sendq_queued(struct conn *c, uint64_t n);
void sendq_unqueued(struct conn *c, uint64_t n);
int sendq_push(struct conn *c, const char *base, size_t len, azc_op *op);
int sendq_push_all(struct conn *c, const azc_iov *parts, size_t n, azc_op *op);
int sendq_copy(struct conn *c, const char *base, size_t len);
int sendq_gather(struct conn *c, struct gathered *g);
int sendq_gather_plain(struct conn *c, struct gathered *g);
void sendq_consume(struct conn *c, uint64_t bytes);
void sendq_drop(struct conn *c, int error);
bool sendq_remove(struct conn *c, azc_op *op);
void sendq_destroy(struct conn *c);

int dgramq_push(struct conn *c, const char *p, size_t n, const char *name, size_t namelen);
azc_op *dgramq_submit(struct conn *c, const azc_iov *parts, size_t n, const char *name,
                      size_t namelen, uint16_t segment);
void dgramq_flush(struct conn *c);
bool dgramq_goes_zc(struct conn *c, struct dgram *d);
bool dgramq_fits(struct conn *c, struct dgram *d, struct dgram_turn *t, int share);
void dgramq_answered(struct conn *c, struct dgram *d, int32_t res);
bool dgramq_remove(struct conn *c, azc_op *op);
void dgramq_drop(struct conn *c, int error);

static inline struct conn *conn_of(azc_conn *c)
{
    return (struct conn *)((char *)c - offsetof(struct conn, pub));
}
/* A forked child that has not run the loop yet: ring, epoll set and error queues are its parent's,
 * who goes on with them. */
static inline bool of_parent(const struct azc_reactor *r)
{
    return r->pid != getpid();
}

static inline void mark_dirty(struct conn *c)
{
    if (c->dirty)
        return;
    c->dirty = true;
    c->dirty_next = NULL;
    if (c->r->dirty)
        c->r->dirty_tail->dirty_next = c;
    else
        c->r->dirty = c;
    c->r->dirty_tail = c;
}
static inline bool holds_buffer(const azc_event *e)
{
    return (e->kind == AZC_EV_RECV || e->kind == AZC_EV_DATAGRAM) && e->res > 0;
}
static inline struct zdgram *zdgram_of(struct dgram *d)
{
    return (struct zdgram *)d->data;
}
static inline void spare_buffer(struct azc_reactor *r, unsigned buffer)
{
    r->spare[r->n_spare++] = (uint16_t)buffer;
}
/* Has the turn something for Python? */
static inline bool anything(const struct azc_reactor *r)
{
    return r->n_pending || r->n_rel || r->fired;
}
#define ACCEPT_BURST 128 /* connections taken from one listener a turn */
#define SHARED_BURST 16  /* where other processes want some of them */

/* By readiness: of the epoll backend, and of sockets on which other processes listen, too. */
void accept_some(struct conn *c);

static inline void connected(struct conn *c)
{
    c->want_recv = false;
    emit(c->r, c->pub.token, AZC_EV_WRITE, 0, AZC_NOTIFY_WRITABLE);
}
static inline void poll_fired(struct conn *c)
{
    if (fault(c->r, AZC_FAULT_LOST_WAKE))
        return;
    c->r->fired |= c->pub.kind == AZC_WAKE ? AZC_FIRED_WAKE : AZC_FIRED_POLL;
}
static inline bool wants_zc(const azc_op *op)
{
    return op->kind == OP_USER || op->kind == OP_AUTO;
}
/* The clock as of this turn: read once, and only if somebody asks. */
static inline uint64_t turn_ns(struct azc_reactor *r)
{
    if (!r->turn)
        r->turn = now_ns();
    return r->turn;
}
static inline struct part *sendq_at(struct sendq *q, uint32_t i)
{
    return &q->parts[(q->head + i) & (q->cap - 1)];
}
/* May a request wait for room in the kernel? */
static inline bool may_wait(const struct conn *c)
{
    return !c->half_closed && c->want_recv;
}
static inline bool dgramq_ready(const struct conn *c)
{
    return c->dq.head && !c->dq.issued && !c->want_out && !c->pub.error && !c->closed;
}
static inline bool sendq_ready(const struct conn *c)
{
    return c->q.count && !c->rq && !c->want_out && !c->held && !c->pub.error && !c->closed;
}

#endif
