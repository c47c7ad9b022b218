/* faults.c - fault knobs, in builds with AIOZC_FAULTS alone.
 *
 * Owns: the knobs, and how often each fired. Called by: the hooks in reactor.c, write.c, uring*.c,
 * epoll.c, optable.c, slab.c, dgramq.c and probe.c; and by Python (aiozc/faults.py).
 *
 * A fault is one that the kernel could have shown: a request that shall fail is handed to it as a
 * NOP, so that no byte leaves and its completion comes as any other. Where the kernel promises more
 * than that, nothing is pretended: a full socket is one that will be told to have room, so it is
 * not pretended while a poll for room is with the kernel (it told of the room that there is), nor
 * where poll() tells of none; completions are never lost (IORING_FEAT_NODROP).
 *
 * Never: used by a build that anybody installs.
 */
#include "internal.h"

#ifdef AIOZC_FAULTS

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <string.h>

#ifndef MSG_ZEROCOPY
#define MSG_ZEROCOPY 0x4000000
#endif

#define LATE_WAIT_NS 1000000

#define NAME(kind, name) #name,
static const char *const names[] = {AZC_FAULTS(NAME)};

/* Loops in several threads read and count. */
static uint32_t defaults[AZC_FAULT_KINDS];
static uint64_t fired[AZC_FAULT_KINDS];

static void hit(enum fault_kind kind, uint64_t n)
{
    __atomic_fetch_add(&fired[kind], n, __ATOMIC_RELAXED);
}

bool fault(azc_reactor *r, enum fault_kind kind)
{
    uint32_t every = r ? r->faults.every[kind] : __atomic_load_n(&defaults[kind], __ATOMIC_RELAXED);
    if (!every || (r && ++r->faults.count[kind] % every))
        return false;
    hit(kind, 1);
    return true;
}

/* Those that are sizes: before the reactor's first run. */
static void resize(azc_reactor *r)
{
    if (r->faults.every[AZC_FAULT_CQ_OVERFLOW]) {
        r->cfg.sq_entries = 2;
        r->cfg.cq_entries = 4;
    }
    if (r->faults.every[AZC_FAULT_RECV_ENOBUFS])
        r->cfg.recv_buffers = 2;
}

int azc_fault(azc_reactor *r, int kind, uint32_t every)
{
    if (kind < 0 || kind >= AZC_FAULT_KINDS)
        return -EINVAL;
    if (!r) {
        __atomic_store_n(&defaults[kind], every, __ATOMIC_RELAXED);
        return 0;
    }
    r->faults.every[kind] = every;
    r->faults.count[kind] = 0;
    return 0;
}

uint64_t azc_fault_fired(int kind)
{
    return kind < 0 || kind >= AZC_FAULT_KINDS ? 0
                                               : __atomic_load_n(&fired[kind], __ATOMIC_RELAXED);
}

const char *azc_fault_name(int kind)
{
    return kind < 0 || kind >= AZC_FAULT_KINDS ? NULL : names[kind];
}

void faults_open(azc_reactor *r)
{
    for (int kind = 0; kind < AZC_FAULT_KINDS; kind++)
        r->faults.every[kind] = __atomic_load_n(&defaults[kind], __ATOMIC_RELAXED);
    resize(r);
}

/* The kernel's own doing, which the sizes brought about. */
void faults_close(azc_reactor *r)
{
    if (r->faults.every[AZC_FAULT_CQ_OVERFLOW])
        hit(AZC_FAULT_CQ_OVERFLOW, r->stats.cq_overflows);
    if (r->faults.every[AZC_FAULT_RECV_ENOBUFS])
        hit(AZC_FAULT_RECV_ENOBUFS, r->stats.enobufs);
}

/* ---- sending ---- */

/* About half of it, at least a byte, at most all but one. False: it has no two bytes. */
static bool halve(struct msghdr *m, struct iovec *part)
{
    if (m->msg_iovlen > 1) {
        m->msg_iovlen = (m->msg_iovlen + 1) / 2;
        return true;
    }
    if (!m->msg_iovlen || m->msg_iov->iov_len < 2)
        return false;
    *part = (struct iovec){m->msg_iov->iov_base, m->msg_iov->iov_len / 2};
    m->msg_iov = part;
    return true;
}

/* Were it full, would somebody hear when it is not? */
static bool may_be_full(const struct conn *c)
{
    struct pollfd p = {.fd = c->pub.fd, .events = POLLOUT};
    return !c->out_armed && poll(&p, 1, 0) == 1;
}

ssize_t faults_sendmsg(struct conn *c, const struct msghdr *m, int flags)
{
    azc_reactor *r = c->r;
    struct msghdr cut = *m;
    struct iovec part;
    bool stream = c->pub.kind == AZC_STREAM; /* of a datagram dgramq.c asks, and it goes whole */
    bool zc = stream && flags & MSG_ZEROCOPY;
    int error = 0;
    if (zc && fault(r, AZC_FAULT_ZC_ENOMEM))
        error = ENOMEM;
    else if (zc && fault(r, AZC_FAULT_ZC_ENOBUFS))
        error = ENOBUFS;
    else if (may_be_full(c) && fault(r, AZC_FAULT_EAGAIN))
        error = EAGAIN;
    if (error) {
        errno = error;
        return -1;
    }
    if (stream && may_be_full(c) && halve(&cut, &part) && fault(r, AZC_FAULT_SHORT_SEND))
        m = &cut;
    return sendmsg(c->pub.fd, m, flags);
}

/* The request is prepared. */
void faults_request(struct conn *c, struct req *q, struct io_uring_sqe *sqe)
{
    azc_reactor *r = c->r;
    bool zc = q->zc && !q->dgram; /* of a datagram dgramq.c asks, before there is a request */
    if (zc && fault(r, AZC_FAULT_ZC_ENOMEM))
        q->fault = -ENOMEM;
    else if (zc && fault(r, AZC_FAULT_ZC_ENOBUFS))
        q->fault = -ENOBUFS;
    else if (fault(r, AZC_FAULT_ECANCELED))
        q->fault = -ECANCELED;
    else if (may_be_full(c) && fault(r, AZC_FAULT_EAGAIN))
        q->fault = -EAGAIN;
    if (q->fault) {
        uint64_t ud = sqe->user_data;
        io_uring_prep_nop(sqe);
        sqe->user_data = ud;
        return;
    }
    if (q->dgram || (!c->rq_waits && !may_be_full(c)))
        return;
    bool vector = sqe->opcode == IORING_OP_SENDMSG || sqe->opcode == IORING_OP_SENDMSG_ZC;
    if (!vector && sqe->len > 1 && fault(r, AZC_FAULT_SHORT_SEND))
        sqe->len /= 2;
    else if (vector && fault(r, AZC_FAULT_SHORT_SEND))
        halve(&c->q.msg, c->q.iov);
}

int32_t faults_answer(const struct req *q, int32_t res)
{
    return q->fault ? q->fault : res;
}

/* ---- the ring ---- */

/* In place of entering: true, and what it answers. */
bool faults_enter(azc_reactor *r, struct io_uring *ring, int *rc)
{
    if (fault(r, AZC_FAULT_EINTR)) {
        *rc = -EINTR;
        return true;
    }
    if (fault(r, AZC_FAULT_EBUSY)) {
        *rc = -EBUSY;
        return true;
    }
    unsigned ready = io_uring_sq_ready(ring);
    if (!ready || !fault(r, AZC_FAULT_SHORT_SUBMIT))
        return false;
    /* The kernel, too, does not wait, nor runs deferred work, when it took less than it was given.
     */
    unsigned kept = ready - ready / 2;
    ring->sq.sqe_tail -= kept;
    *rc = io_uring_submit(ring);
    ring->sq.sqe_tail += kept;
    return true;
}

bool faults_notif(azc_reactor *r, uint64_t token, bool copied)
{
    struct faults *f = &r->faults;
    bool later = f->n_late < LATE_NOTIFS && fault(r, AZC_FAULT_LATE_NOTIF);
    bool again = !later && f->n_late < LATE_NOTIFS && fault(r, AZC_FAULT_TWICE_NOTIF);
    if (later || again)
        f->late[f->n_late++] =
            (struct late_notif){token, copied, 1 + r->faults.count[AZC_FAULT_LATE_NOTIF] % 7};
    return later;
}

/* Completions are about to be read: tell the notifications that were held back so long, or all. */
void faults_harvest(azc_reactor *r, bool all)
{
    struct faults *f = &r->faults;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < f->n_late; i++) {
        struct late_notif late = f->late[i];
        struct req *q = table_get(&r->reqs, late.token);
        if (!all && --late.turns) {
            f->late[kept++] = late;
        } else if (q) {
            req_notif(q, true, late.copied);
        }
    }
    f->n_late = kept;
}

/* Nobody sleeps while a notification is held back. */
int64_t faults_wait(azc_reactor *r, int64_t ns)
{
    return r->faults.n_late && (ns < 0 || ns > LATE_WAIT_NS) ? LATE_WAIT_NS : ns;
}

#endif
