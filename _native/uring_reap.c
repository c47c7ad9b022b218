/* uring_reap.c - completions become events, and the kernel gets receive buffers again.
 *
 * Owns: how many receive buffers the kernel has, and what a completion means. Called by: uring.c
 * after each enter, uring_orphans.c for what a ring of another thread left in its queue,
 * uring_ring.c for a new ring. Never: enter the kernel, or ask it for anything: a connection that
 * wants something more is marked dirty.
 */
#define _GNU_SOURCE
#include "uring.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>

#define ZC_COPIED (1u << 31) /* IORING_NOTIF_USAGE_ZC_COPIED, newer than liburing 2.3's header */

/* Receive buffers that the kernel has at least; the number doubles when they do not suffice, and is
 * looked at after so many harvests. */
#define GIVEN_MIN 8
#define GIVEN_WINDOW 1024
#define GIVEN_BYTES (768u << 10)

int uring_buf_ring_init(struct azc_reactor *r, struct uring *u)
{
    u->br_bytes = r->n_bufs * sizeof(struct io_uring_buf);
    u->br = mmap(NULL, u->br_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (u->br == MAP_FAILED)
        return -ENOMEM;
    struct io_uring_buf_reg reg = {.ring_addr = (uintptr_t)u->br, .ring_entries = r->n_bufs};
    int rc = io_uring_register_buf_ring(&u->ring, &reg, 0);
    if (rc < 0) {
        munmap(u->br, u->br_bytes);
        return rc;
    }
    io_uring_buf_ring_init(u->br);
    collect_spare(r);
    u->wanted = GIVEN_MIN;
    return 0;
}

/* The kernel takes buffers in the order in which it was given them. So it is given no more than are
 * used, and those that were used last: they lie in the cache. */
void uring_give_buffers(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    int mask = io_uring_buf_ring_mask(r->n_bufs), added = 0;
    while (u->given < u->wanted && r->n_spare) {
        uint16_t i = r->spare[--r->n_spare];
        io_uring_buf_ring_add(u->br, r->bufs + i * r->buf_stride, (unsigned)r->buf_size, i, mask,
                              added++);
        u->given++;
    }
    if (added)
        io_uring_buf_ring_advance(u->br, added);
}

static void adjust_buffers(struct azc_reactor *r, uint32_t taken, bool refused)
{
    struct uring *u = uring_of(r);
    u->given -= taken;
    if (taken > u->peak)
        u->peak = taken;
    if (refused && u->wanted < r->n_bufs && u->received < GIVEN_BYTES)
        u->wanted *= 2;
    u->received = 0;
    if (++u->harvests < GIVEN_WINDOW)
        return;
    if (u->peak * 2 < u->wanted)
        u->wanted = u->peak * 2 > GIVEN_MIN ? u->peak * 2 : GIVEN_MIN;
    u->harvests = u->peak = 0;
}

static void on_stream(struct conn *c, int32_t res, unsigned flags)
{
    struct azc_reactor *r = c->r;
    uint64_t token = c->pub.token;
    if (res > 0) {
        emit(r, token, AZC_EV_RECV, res, flags >> IORING_CQE_BUFFER_SHIFT);
        return;
    }
    if (flags & IORING_CQE_F_BUFFER)
        spare_buffer(r, flags >> IORING_CQE_BUFFER_SHIFT);
    if (res == -ENOBUFS) {
        r->stats.enobufs++;
    } else if (res == 0) {
        c->eof = c->half_closed = true;
        mark_dirty(c);
        emit(r, token, AZC_EV_RECV, 0, 0);
    } else if (res != -ECANCELED && res != -EINTR && res != -EAGAIN) {
        c->want_recv = false;
        emit(r, token, AZC_EV_RECV, res, 0);
    }
}

/* The reader takes it out himself (azc_recv); the poll is made anew after that. */
static void on_readable(struct conn *c, int32_t res)
{
    if (res < 0)
        return; /* it was cancelled */
    c->half_closed |= (res & (POLLRDHUP | POLLHUP)) != 0;
    emit(c->r, c->pub.token, AZC_EV_READABLE, 0, 0);
}

/* A datagram, header and all; an error ends neither the socket nor, in the end, its receiving. */
static void on_datagram(struct conn *c, int32_t res, unsigned flags)
{
    struct azc_reactor *r = c->r;
    if (res >= (int32_t)sizeof(struct io_uring_recvmsg_out) && flags & IORING_CQE_F_BUFFER) {
        emit(r, c->pub.token, AZC_EV_DATAGRAM, res, flags >> IORING_CQE_BUFFER_SHIFT);
        return;
    }
    if (flags & IORING_CQE_F_BUFFER)
        spare_buffer(r, flags >> IORING_CQE_BUFFER_SHIFT);
    if (res == -ENOBUFS)
        r->stats.enobufs++;
    else if (res < 0 && res != -ECANCELED && res != -EINTR && res != -EAGAIN)
        emit(r, c->pub.token, AZC_EV_DATAGRAM, res, 0);
}

static void on_listen(struct conn *c, int32_t res)
{
    if (c->pub.shared && res > 0) {
        accept_some(c);
        return;
    }
    if (res == -ECANCELED || res == -EAGAIN || res == -EINTR || res == -ECONNABORTED)
        return;
    if (res < 0)
        c->want_recv = false; /* the caller starts it again after a pause */
    emit(c->r, c->pub.token, AZC_EV_ACCEPT, res, 0);
}

static void on_conn(struct azc_reactor *r, uint64_t token, int32_t res, unsigned flags)
{
    struct uring *u = uring_of(r);
    struct conn *c = table_get(&r->conns, token);
    if (!(flags & IORING_CQE_F_MORE))
        u->inflight--;
    if (!c || c->closed) {
        if (flags & IORING_CQE_F_BUFFER)
            spare_buffer(r, flags >> IORING_CQE_BUFFER_SHIFT);
        else if (c && c->pub.kind == AZC_LISTEN && !c->pub.shared && res >= 0)
            close(res); /* accepted for a listener that is gone */
        if (c && !(flags & IORING_CQE_F_MORE))
            c->armed = false;
        if (c)
            conn_maybe_free(c);
        return;
    }
    if (!(flags & IORING_CQE_F_MORE))
        c->armed = c->cancelling = false;
    if (c->pub.kind == AZC_STREAM && c->polled)
        on_readable(c, res);
    else if (c->pub.kind == AZC_STREAM)
        on_stream(c, res, flags);
    else if (c->pub.kind == AZC_DATAGRAM)
        on_datagram(c, res, flags);
    else if (c->pub.kind == AZC_LISTEN)
        on_listen(c, res);
    else if (c->pub.kind == AZC_CONNECT && res != -ECANCELED)
        connected(c); /* or not: SO_ERROR tells */
    else if (res > 0)
        poll_fired(c);
    if (!c->armed && c->want_recv && !c->eof)
        mark_dirty(c);
}

/* A socket that was full is writable again; or it is not, and the next send says so. */
static void on_out(struct azc_reactor *r, uint64_t token, unsigned flags)
{
    struct conn *c = table_get(&r->conns, token);
    if (!(flags & IORING_CQE_F_MORE))
        uring_of(r)->inflight--;
    if (!c)
        return;
    if (!(flags & IORING_CQE_F_MORE))
        c->out_armed = false;
    c->want_out = false;
    if (c->closed)
        conn_maybe_free(c);
    else
        mark_dirty(c);
}

static void on_req(struct azc_reactor *r, uint64_t token, int32_t res, unsigned flags)
{
    struct req *q = table_get(&r->reqs, token);
    if (!(flags & IORING_CQE_F_NOTIF))
        uring_of(r)->inflight--;
    if (!q)
        return; /* a stray notification of an earlier use of the slot */
    if (flags & IORING_CQE_F_NOTIF) {
        bool copied = (uint32_t)res & ZC_COPIED;
        if (!faults_notif(r, token, copied))
            req_notif(q, true, copied);
        return;
    }
    res = faults_answer(q, res);
    struct conn *c = q->conn;
    if (q->dgram) {
        req_first(q, res, flags & IORING_CQE_F_MORE);
        return;
    }
    bool whole = res >= 0 && (uint64_t)res >= q->bytes;
    c->loud = q->quiet || (c->loud && !whole);
    if (q->quiet) {
        ; /* the rest goes by a request that waits for room */
    } else if (res == -EAGAIN || (!c->rq_waits && res >= 0 && !whole)) {
        c->half_closed |= c->rq_waits;
        c->want_out = true;
        mark_dirty(c);
    }
    req_first(q, res, flags & IORING_CQE_F_MORE);
}

/* A request that is cancelled until it ends. -ENOENT: it was just between two attempts. -EALREADY:
 * a worker thread has it, and was woken; if it had sent something by then it goes on with the rest
 * (io_wq_submit_work takes its -EAGAIN as "again"). */
static void on_cancel(struct azc_reactor *r, uint64_t about, int32_t res)
{
    struct conn *c = about && res < 0 ? table_get(&r->conns, about) : NULL;
    if (!c || !c->rq)
        return;
    c->cancel_rq_sent = false;
    mark_dirty(c);
}

/* What the kernel took, and no completion told of, went whole. */
static void settle_quiet(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    uint32_t taken = __atomic_load_n(u->ring.sq.khead, __ATOMIC_ACQUIRE), n = 0;
    while (n < u->n_quiet && (int32_t)(taken - u->quiet[n].place) > 0) {
        struct req *q = table_get(&r->reqs, u->quiet[n++].token);
        if (!q)
            continue; /* it was told of */
        u->inflight--;
        req_first(q, (int32_t)q->bytes, false);
    }
    u->n_quiet -= n;
    memmove(u->quiet, u->quiet + n, u->n_quiet * sizeof *u->quiet);
}

unsigned uring_harvest(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    struct io_uring_cqe *cqe;
    unsigned head, n = 0;
    uint32_t taken = 0;
    uint64_t refused = r->stats.enobufs, told = r->stats.notifications;
    r->turn = 0;
    faults_harvest(r, false);
    bool overflow = sq_flags(u) & IORING_SQ_CQ_OVERFLOW; /* then some are not in the queue yet */
    r->stats.cq_overflows += overflow;
    io_uring_for_each_cqe(&u->ring, head, cqe)
    {
        n++;
        if (cqe->flags & IORING_CQE_F_BUFFER) {
            taken++;
            u->received += cqe->res > 0 ? (uint32_t)cqe->res : 0;
        }
        if (UD_TYPE(cqe->user_data) == UD_CONN)
            on_conn(r, UD_TOKEN(cqe->user_data), cqe->res, cqe->flags);
        else if (UD_TYPE(cqe->user_data) == UD_REQ)
            on_req(r, UD_TOKEN(cqe->user_data), cqe->res, cqe->flags);
        else if (UD_TYPE(cqe->user_data) == UD_OUT)
            on_out(r, UD_TOKEN(cqe->user_data), cqe->flags);
        else if (UD_TYPE(cqe->user_data) == UD_CANCEL)
            on_cancel(r, UD_TOKEN(cqe->user_data), cqe->res);
    }
    io_uring_cq_advance(&u->ring, n);
    if (u->n_quiet && !overflow)
        settle_quiet(r);
    r->stats.notification_turns += r->stats.notifications != told;
    adjust_buffers(r, taken, r->stats.enobufs != refused);
    return n;
}
