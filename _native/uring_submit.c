/* uring_submit.c - requests: from what a connection wants to what is asked of the kernel.
 *
 * Owns: which request is made and with which flags. Called by: uring.c, which walks the dirty
 * connections before each enter. Never: enter the kernel (but where the submission queue is full),
 * or make a second request of a kind that a connection already has there.
 *
 * Only TCP is received by multishot. On a Unix socket a multishot receive may lose the end of the
 * stream where it comes right behind data (6.18.44; axboe/liburing#1549): nothing wakes it any
 * more.
 *
 * Half-closed peers: a request that waits for room polls for it, and the kernel adds POLLRDHUP to
 * what it polls for. Once the peer has closed its side, that poll is always ready: the request is
 * retried 128 times, and then a SEND sleeps in a worker thread of the kernel (one a connection),
 * while a SENDMSG comes back with -EAGAIN (measured, 6.18). So from its end of file on, or from an
 * -EAGAIN, a connection's requests carry MSG_DONTWAIT and room is awaited by a multishot poll,
 * whose edges are real but for the first; likewise while no receive would see the end of
 * file.
 *
 * Quiet requests: a completion of a small send ends the wait that its own enter began, only to be
 * read and waited behind again: two enters a message on a loop with one busy connection
 * (bench/peers.py, rows x1). So where nobody is to be told of its end, it asks for none
 * (CQE_SKIP_SUCCESS). MSG_DONTWAIT lets the kernel do it while it takes it, or not at all, and with
 * MSG_WAITALL less than all of it is a failure, which has a completion, with the bytes that went.
 * So what the kernel took, and no completion told of, went whole (settle_quiet, uring_reap.c).
 * Kernels that have DEFER_TASKRUN (6.1) do all that.
 */
#define _GNU_SOURCE
#include "uring.h"

#include <poll.h>

#define ZC_REPORT_USAGE (1u << 3) /* IORING_SEND_ZC_REPORT_USAGE, 6.2; not in liburing 2.3 */

struct io_uring_sqe *uring_get_sqe(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    int rc;
    if (sqe)
        return sqe;
    r->stats.enters++;
    if (!faults_enter(r, &u->ring, &rc))
        io_uring_submit(&u->ring); /* the queue is full; what stays in it is submitted later */
    return io_uring_get_sqe(&u->ring);
}

/* `about`: the connection to be told if the request runs on, or 0. */
bool uring_cancel(struct azc_reactor *r, unsigned type, uint64_t token, uint64_t about)
{
    struct io_uring_sqe *sqe = uring_get_sqe(r);
    if (!sqe)
        return false;
    io_uring_prep_cancel64(sqe, (uint64_t)type << 56 | token, 0);
    set_ud(sqe, UD_CANCEL, about);
    return true;
}

static bool arm(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct io_uring_sqe *sqe = uring_get_sqe(r);
    if (!sqe)
        return false;
    switch (c->pub.kind) {
    case AZC_STREAM:
        c->polled = c->announce;
        if (c->polled) {
            io_uring_prep_poll_add(sqe, c->pub.fd, POLLIN | POLLRDHUP);
            break;
        }
        if (c->single)
            io_uring_prep_recv(sqe, c->pub.fd, NULL, 0, 0);
        else
            io_uring_prep_recv_multishot(sqe, c->pub.fd, NULL, 0, 0);
        sqe->flags |= IOSQE_BUFFER_SELECT;
        sqe->buf_group = 0;
        break;
    case AZC_DATAGRAM:
        io_uring_prep_recvmsg_multishot(sqe, c->pub.fd, &c->dq.recv_msg, 0);
        sqe->flags |= IOSQE_BUFFER_SELECT;
        sqe->buf_group = 0;
        break;
    case AZC_LISTEN:
        if (c->pub.shared) {
            /* The kernel queues accepts as exclusive waiters, and one that stays armed is always
             * the first: one process would get every connection, however busy it is. A poll wakes
             * all. */
            io_uring_prep_poll_add(sqe, c->pub.fd, POLLIN);
            break;
        }
        io_uring_prep_multishot_accept(sqe, c->pub.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        break;
    case AZC_CONNECT:
        io_uring_prep_poll_add(sqe, c->pub.fd, POLLOUT);
        break;
    default:
        io_uring_prep_poll_add(sqe, c->pub.fd, POLLIN);
    }
    set_ud(sqe, UD_CONN, c->pub.token);
    c->armed = true;
    uring_of(r)->inflight++;
    return true;
}

/* It cannot be given back: let it do nothing. */
static void give_up_sqe(struct io_uring_sqe *sqe)
{
    if (!sqe)
        return;
    io_uring_prep_nop(sqe);
    set_ud(sqe, UD_CANCEL, 0);
}

/* One copy that is all there is to send, and nobody waits to be told that it went. */
static bool goes_quietly(struct conn *c, const struct gathered *g)
{
    struct uring *u = uring_of(c->r);
    return u->may_be_quiet && u->n_quiet < QUIET && g->parts == 1 && !g->zc && !c->loud &&
           c->pub.kind == AZC_STREAM && !c->pub.notify && c->q.count == 1 && may_wait(c) &&
           sendq_at(&c->q, 0)->op->kind == OP_CHUNK && g->bytes == c->pub.unsent;
}

static void ask_quietly(struct uring *u, struct req *q, struct io_uring_sqe *sqe)
{
    q->quiet = true;
    sqe->flags |= IOSQE_CQE_SKIP_SUCCESS;
    u->quiet[u->n_quiet++] = (struct quiet){q->slot.token, u->ring.sq.sqe_tail - 1};
}

static bool send_request(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct sendq *sq = &c->q;
    struct gathered g;
    struct io_uring_sqe *sqe = uring_get_sqe(r);
    if (!sqe || sendq_gather(c, &g) < 0)
        goto later;
    struct req *q = req_new(c, &g);
    if (!q)
        goto later;
    bool quiet = goes_quietly(c, &g);
    c->rq_waits = may_wait(c) && !quiet;
    int flags = MSG_NOSIGNAL | (c->rq_waits ? MSG_WAITALL : MSG_DONTWAIT) | (g.eor ? MSG_EOR : 0);
    if (quiet)
        flags |= MSG_WAITALL;
    if (g.parts == 1 && g.zc)
        io_uring_prep_send_zc(sqe, c->pub.fd, sq->iov->iov_base, sq->iov->iov_len, flags, 0);
    else if (g.parts == 1)
        io_uring_prep_send(sqe, c->pub.fd, sq->iov->iov_base, sq->iov->iov_len, flags);
    else if (g.zc)
        io_uring_prep_sendmsg_zc(sqe, c->pub.fd, &sq->msg, (unsigned)flags);
    else
        io_uring_prep_sendmsg(sqe, c->pub.fd, &sq->msg, (unsigned)flags);
    if (g.zc)
        sqe->ioprio |= ZC_REPORT_USAGE;
    if (g.zc && g.region.id)
        uring_from_region(r, sqe, &g.region);
    set_ud(sqe, UD_REQ, q->slot.token);
    faults_request(c, q, sqe);
    if (quiet && sqe->opcode == IORING_OP_SEND && sqe->len == g.bytes) /* no fault's */
        ask_quietly(uring_of(r), q, sqe);
    uring_of(r)->inflight++;
    return true;
later:
    give_up_sqe(sqe);
    return false;
}

/* Zero-copy datagrams, one request each, as far as the socket's buffer surely takes them: were one
 * of them refused (MSG_DONTWAIT), the next might overtake it. False: try again. */
static bool send_datagrams(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct dgram_turn turn = {0};
    for (struct dgram *d = c->dq.head; d && dgramq_goes_zc(c, d); d = d->next) {
        if (!dgramq_fits(c, d, &turn, 1))
            break;
        struct io_uring_sqe *sqe = uring_get_sqe(r);
        struct req *q = sqe ? req_new_dgram(c, d) : NULL;
        if (!q) {
            give_up_sqe(sqe);
            return false;
        }
        struct msghdr *m = &zdgram_of(d)->msg;
        int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
        if (m->msg_iovlen == 1 && !m->msg_control) { /* cheaper by some 0.1 us */
            io_uring_prep_send_zc(sqe, c->pub.fd, m->msg_iov->iov_base, m->msg_iov->iov_len, flags,
                                  0);
            if (m->msg_name)
                io_uring_prep_send_set_addr(sqe, m->msg_name, (uint16_t)m->msg_namelen);
        } else {
            io_uring_prep_sendmsg_zc(sqe, c->pub.fd, m, (unsigned)flags);
        }
        sqe->ioprio |= ZC_REPORT_USAGE;
        struct region region;
        if (m->msg_iovlen && m->msg_iovlen <= r->cfg.fixed_parts && regions_any() &&
            regions_prefix(m->msg_iov, (uint32_t)m->msg_iovlen, &region) == m->msg_iovlen)
            uring_from_region(r, sqe, &region);
        set_ud(sqe, UD_REQ, q->slot.token);
        faults_request(c, q, sqe);
        uring_of(r)->inflight++;
    }
    return true;
}

/* Bring one connection from what is wanted to what is asked of the kernel. False: try again. */
bool uring_bring_up(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct uring *u = uring_of(r);
    bool blind = c->rq_waits && !may_wait(c);
    if ((c->cancel_rq || blind) && c->rq && !c->cancel_rq_sent) {
        if (!uring_cancel(r, UD_REQ, c->rq->slot.token, c->pub.token))
            return false;
        c->cancel_rq_sent = true;
    }
    if (c->want_recv && !c->armed && !c->eof && !r->detaching) {
        if (!arm(c))
            return false;
    } else if (c->armed && !c->cancelling && (!c->want_recv || c->polled != c->announce)) {
        if (!uring_cancel(r, UD_CONN, c->pub.token, 0))
            return false;
        c->cancelling = true;
    }
    if (c->dq.head)
        dgramq_flush(c);
    if (dgramq_ready(c) && !u->no_send && !send_datagrams(c))
        return false;
    if (c->out_armed && !c->want_out && may_wait(c))
        uring_cancel(r, UD_OUT, c->pub.token, 0);
    if (c->want_out && !c->out_armed && !u->no_send) {
        struct io_uring_sqe *sqe = uring_get_sqe(r);
        if (!sqe)
            return false;
        if (c->pub.kind == AZC_STREAM)
            io_uring_prep_poll_multishot(sqe, c->pub.fd, POLLOUT);
        else
            io_uring_prep_poll_add(sqe, c->pub.fd, POLLOUT);
        set_ud(sqe, UD_OUT, c->pub.token);
        c->out_armed = true;
        u->inflight++;
    }
    return !sendq_ready(c) || u->no_send || send_request(c);
}

void uring_flush(struct azc_reactor *r)
{
    struct conn *c = r->dirty, *next;
    r->turn = 0;
    uring_give_buffers(r);
    uring_sweep_regions(uring_of(r));
    r->dirty = NULL;
    for (; c; c = next) {
        next = c->dirty_next;
        c->dirty = false;
        if (c->closed)
            conn_maybe_free(c);
        else if (!uring_bring_up(c))
            mark_dirty(c);
    }
}
