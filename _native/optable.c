/* optable.c - operations and requests: who still reads what.
 *
 * Owns: the counting of parts and pins, the moment of release. Used by: sendq.c and both backends.
 * An operation is one zc_submit, one write held by reference, or one chunk of copied bytes. A
 * request is one SQE (or one sendmsg). Each operation of a request is pinned from issue until the
 * request's last completion; it is released when it has no queued part and no pin left.
 * Notifications come out of order and sometimes unannounced (no F_MORE before them), so they are
 * found by slot and generation.
 *
 *   state      entered when                          event
 *   QUEUED     op_new                                -
 *   ISSUED     a part of it is in a request          -
 *   SENT       its last byte was accepted            AZC_EV_SENT, if want_sent and still pinned
 *   RELEASED   parts == 0 and pins == 0              AZC_EV_RELEASED
 *   WITHDRAWN  azc_withdraw while QUEUED             none: the caller did it
 *   FAILED     its queue was dropped                 AZC_EV_SENT with res < 0 if want_sent and
 * pinned, then AZC_EV_RELEASED once pins == 0. Also, by stall.c,
 * one that was SENT and is still pinned when its peer is given up
 *
 * Never: release on a first completion with F_MORE, on cancel, on close, or on an error alone.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct op *op_of(azc_op *op)
{
    return (struct op *)((char *)op - offsetof(struct op, pub));
}

azc_op *op_new(struct azc_reactor *r, enum op_kind kind, uint64_t nbytes)
{
    struct op *o = fault(r, AZC_FAULT_OP_NOMEM) ? NULL : table_new(&r->ops);
    if (!o)
        return NULL;
    o->pub.token = o->slot.token;
    o->pub.nbytes = nbytes;
    o->pub.kind = (uint8_t)kind;
    if (kind == OP_USER) {
        r->stats.operations++;
        r->stats.operations_live++;
    }
    return &o->pub;
}

/* Its slot is free. `operations_live` was counted down when it ended, before anybody is told. */
void op_forget(struct azc_reactor *r, azc_op *op)
{
    table_free(&r->ops, op_of(op));
}

static void push_released(struct azc_reactor *r, uint64_t token)
{
    if (r->n_rel == r->cap_rel) {
        size_t cap = r->cap_rel ? r->cap_rel * 2 : 256;
        uint64_t *more = realloc(r->rel, cap * sizeof *more);
        if (!more)
            return; /* the buffer stays held: a leak, never an early release */
        r->rel = more;
        r->cap_rel = cap;
    }
    r->rel[r->n_rel++] = token;
}

void op_check(struct azc_reactor *r, azc_op *op)
{
    if (op->parts)
        return;
    if (op->state < AZC_SENT) {
        op->state = op->error ? AZC_FAILED : AZC_SENT;
        if (op->pins && op->want_sent)
            emit(r, op->token, AZC_EV_SENT, op->error, 0);
    }
    if (op->pins)
        return;
    if (op->state == AZC_SENT)
        op->state = AZC_RELEASED;
    switch (op->kind) {
    case OP_CHUNK:
        chunk_free(r, (struct chunk *)op);
        break;
    case OP_REF:
    case OP_AUTO:
        push_released(r, op->token);
        op_forget(r, op);
        break;
    default: /* its slot is freed by the azc_wait after the caller has read the event */
        r->stats.operations_live--;
        emit(r, op->token, AZC_EV_RELEASED, op->error, op->path);
    }
}

static int req_add(struct req *q, azc_op *op)
{
    if (q->n_ops == q->cap_ops) {
        uint32_t cap = q->cap_ops * 4;
        azc_op **more = q->ops == q->inline_ops ? malloc(cap * sizeof *more)
                                                : realloc(q->ops, cap * sizeof *more);
        if (!more)
            return -ENOMEM;
        if (q->ops == q->inline_ops)
            memcpy(more, q->ops, q->n_ops * sizeof *more);
        q->ops = more;
        q->cap_ops = cap;
    }
    q->ops[q->n_ops++] = op;
    return 0;
}

static void pin_bytes(struct req *q)
{
    struct azc_reactor *r = q->conn->r;
    q->issued = turn_ns(r);
    r->stats.zc_requests++;
    q->conn->pub.pinned += q->bytes;
    r->stats.pinned_bytes += q->bytes;
    if (r->stats.pinned_bytes > r->stats.pinned_peak)
        r->stats.pinned_peak = r->stats.pinned_bytes;
}

/* The request for what sendq_gather put into the queue's iovec. NULL: no memory, nothing changed.
 */
struct req *req_new(struct conn *c, const struct gathered *g)
{
    struct azc_reactor *r = c->r;
    struct req *q = fault(r, AZC_FAULT_REQ_NOMEM) ? NULL : table_new(&r->reqs);
    if (!q)
        return NULL;
    q->conn = c;
    q->bytes = g->bytes;
    q->zc = g->zc;
    q->ops = q->inline_ops;
    q->cap_ops = REQ_INLINE_OPS;
    for (uint32_t i = 0; i < g->parts; i += sendq_at(&c->q, i)->op->parts) {
        /* What is queued of an operation lies together. */
        if (req_add(q, sendq_at(&c->q, i)->op) < 0) {
            if (q->ops != q->inline_ops)
                free(q->ops);
            table_free(&r->reqs, q);
            return NULL;
        }
    }
    for (uint32_t i = 0; i < q->n_ops; i++) {
        q->ops[i]->pins++;
        if (q->ops[i]->state == AZC_QUEUED)
            q->ops[i]->state = AZC_ISSUED;
    }
    c->q.in_request = g->parts;
    c->rq = q;
    r->stats.requests++;
    r->stats.parts += g->parts;
    if (g->zc) {
        /* A report is believed only of a request that begins its own stack: not behind another one
         * whose skb was still open (measured: the others always say "copied"). */
        q->fresh = c->last_eor || c->notifs == 0;
        c->last_eor = g->eor;
        r->stats.stacks += g->eor;
        pin_bytes(q);
    }
    return q;
}

/* The request for one zero-copy datagram, of which a socket may have many. A datagram has its own
 * skb: its report can be believed. NULL: no memory, nothing changed. */
struct req *req_new_dgram(struct conn *c, struct dgram *d)
{
    struct req *q = fault(c->r, AZC_FAULT_REQ_NOMEM) ? NULL : table_new(&c->r->reqs);
    if (!q)
        return NULL;
    q->conn = c;
    q->bytes = d->len;
    q->dgram = d;
    q->zc = q->fresh = true;
    q->ops = q->inline_ops;
    q->cap_ops = REQ_INLINE_OPS;
    q->n_ops = 1;
    q->ops[0] = d->op;
    d->op->pins++;
    d->op->state = AZC_ISSUED;
    zdgram_of(d)->issued = true;
    c->dq.issued++;
    c->r->stats.requests++;
    c->r->stats.parts += zdgram_of(d)->msg.msg_iovlen;
    pin_bytes(q);
    return q;
}

static void unpin_bytes(struct req *q, uint64_t n)
{
    q->conn->pub.pinned -= n;
    q->conn->r->stats.pinned_bytes -= n;
}

static void count_release(struct azc_reactor *r, uint64_t issued)
{
    uint64_t now = turn_ns(r), ns = now > issued ? now - issued : 0, us = ns / 1000;
    if (ns > r->stats.release_max_ns)
        r->stats.release_max_ns = ns;
    unsigned n = (unsigned)us;
    if (us >= 8) {
        unsigned power = 63u - (unsigned)__builtin_clzll(us);
        n = (power - 2) * 8 + (unsigned)(us >> (power - 3) & 7);
    }
    r->stats.release[n < AZC_RELEASE_BUCKETS ? n : AZC_RELEASE_BUCKETS - 1]++;
}

void req_leave_grave(struct req *q)
{
    struct grave *g = q->grave;
    q->grave = NULL;
    if (g && !--g->orphans) {
        close(g->fd);
        free(g);
    }
}

/* Its last completion was seen: nothing of it is with the kernel any more. */
static void req_finish(struct req *q)
{
    struct conn *c = q->conn;
    struct azc_reactor *r = c->r;
    if (q->zc)
        unpin_bytes(q, q->bytes);
    if (q->zc && q->notif_seen && q->bytes)
        count_release(r, q->issued);
    req_leave_grave(q);
    azc_op **ops = q->ops;
    uint32_t n = q->n_ops;
    azc_op *few[REQ_INLINE_OPS];
    if (ops == q->inline_ops) {
        memcpy(few, ops, n * sizeof *few);
        ops = few;
    }
    table_free(&r->reqs, q);
    for (uint32_t i = 0; i < n; i++) {
        ops[i]->pins--;
        op_check(r, ops[i]);
    }
    if (ops != few)
        free(ops);
}

/* Which errors mean that only zero-copy failed. */
int fallback_reason(int error)
{
    switch (error) {
    case ENOMEM:
        return AZC_FALLBACK_ENOMEM;
    case ENOBUFS:
        return AZC_FALLBACK_ENOBUFS;
    case EOPNOTSUPP:
        return AZC_FALLBACK_EOPNOTSUPP;
    default:
        return -1;
    }
}

static void first_done(struct req *q, bool more)
{
    if (more && q->zc && !q->notif_seen) {
        q->conn->notifs++;
        q->conn->r->stats.notifications_outstanding++;
    } else {
        req_finish(q);
    }
}

/* A datagram goes whole or not at all. */
static void first_of_dgram(struct req *q, int32_t res, bool more)
{
    struct conn *c = q->conn;
    struct dgram *d = q->dgram;
    uint64_t accepted = res < 0 ? 0 : q->bytes;
    q->dgram = NULL;
    q->first_seen = true;
    unpin_bytes(q, q->bytes - accepted);
    q->bytes = accepted;
    dgramq_answered(c, d, res);
    first_done(q, more);
    if (c->dq.head && !c->dq.issued)
        mark_dirty(c);
    conn_notify(c);
    conn_maybe_free(c);
}

/* The first completion: res bytes were accepted, or -errno. `more`: a notification follows. */
void req_first(struct req *q, int32_t res, bool more)
{
    if (q->dgram) {
        first_of_dgram(q, res, more);
        return;
    }
    struct conn *c = q->conn;
    struct azc_reactor *r = c->r;
    uint64_t accepted = res > 0 ? (uint64_t)res : 0;
    uint64_t issued = q->bytes;
    if (accepted > issued)
        accepted = issued;
    c->rq = NULL;
    c->cancel_rq = c->cancel_rq_sent = false;
    c->sure = accepted < issued ? 0 : c->sure < SURE_MAX ? c->sure + 1 : SURE_MAX;
    c->q.in_request = 0;
    q->first_seen = true;
    if (q->zc)
        unpin_bytes(q, issued - accepted);
    q->bytes = accepted;
    if (!q->zc && accepted)
        for (uint32_t i = 0; i < q->n_ops; i++)
            q->ops[i]->path |= AZC_PATH_COPIED;
    sendq_consume(c, accepted);
    q->end_pos = c->pub.sent_pos;
    int reason = res < 0 ? fallback_reason(-res) : -1;
    if (q->zc && reason >= 0) {
        fell_back(r, reason);
        if (reason == AZC_FALLBACK_EOPNOTSUPP)
            c->pub.zc_ok = 0;
        else
            c->q.copy_left = issued;
    } else if (res < 0 && res != -ECANCELED && res != -EAGAIN && res != -EINTR) {
        conn_send_failed(c, res);
    }
    if (c->pub.error && c->q.count)
        sendq_drop(c, c->pub.error); /* what an aborted request left in the queue */
    first_done(q, more);
    if (sendq_ready(c))
        mark_dirty(c);
    conn_notify(c);
    conn_maybe_free(c);
}

/* The notification: the pages are free. It may come before the first completion. */
void req_notif(struct req *q, bool reported, bool copied)
{
    struct conn *c = q->conn;
    struct azc_reactor *r = c->r;
    r->stats.notifications++;
    unsigned path = !reported ? AZC_PATH_UNKNOWN
                    : !copied ? AZC_PATH_ZC
                              : (q->fresh ? AZC_PATH_COPIED : AZC_PATH_UNKNOWN);
    if (reported && copied)
        r->stats.copied_reports++;
    if (q->bytes || !q->first_seen)
        for (uint32_t i = 0; i < q->n_ops; i++)
            q->ops[i]->path |= (uint8_t)path;
    if (path != AZC_PATH_UNKNOWN && q->bytes) {
        c->pub.path = (uint8_t)path;
        adapt(c, path == AZC_PATH_COPIED);
    }
    q->notif_seen = true;
    if (!q->first_seen)
        return;
    c->notifs--;
    r->stats.notifications_outstanding--;
    req_finish(q);
    conn_notify(c);
    conn_maybe_free(c);
}

/* A request that never reached the kernel: undo req_new, the bytes stay queued. */
void req_drop(struct req *q)
{
    req_first(q, -ECANCELED, false);
}
