/* write.c - what Python sends on a connection, and what it asked to be told of that.
 *
 * Owns: which way bytes go: copied, held by reference, by a system call at once, or left to the
 * backend. Called by: Python through cffi, and _fast, from the loop's thread; optable.c and the
 * backends where something was sent or failed. Never: send what would overtake a request or a part
 * that is before it, or block.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>

/* What conn_copy_now sends at most: parts in one call, bytes of one connection in a turn. */
#define DIRECT_PARTS 64
#define DIRECT_BYTES (4u << 20)

/* ---- what a writer is told ---- */

/* Unsent and pinned bytes together. What a request pins before it is sent is both: counted once. */
static uint64_t outstanding(const struct conn *c)
{
    uint64_t both = c->rq && c->rq->zc ? c->rq->bytes : 0;
    return c->pub.unsent + c->pub.pinned - both;
}

uint64_t azc_conn_outstanding(azc_conn *pub)
{
    return outstanding(conn_of(pub));
}

/* Is it at most what the loop's zc_low_water says? */
int azc_conn_drained(azc_conn *pub)
{
    struct conn *c = conn_of(pub);
    return outstanding(c) <= c->r->cfg.zc_low_water;
}

/* Tell Python what it asked to be told, once. */
void conn_notify(struct conn *c)
{
    uint32_t due = 0, want = c->pub.notify;
    if (!want || c->closed)
        return;
    if ((want & AZC_NOTIFY_LOW) && c->pub.unsent <= c->pub.low)
        due |= AZC_NOTIFY_LOW;
    if ((want & AZC_NOTIFY_DRAINED) && !c->pub.unsent && !c->dq.head) /* it may have no bytes */
        due |= AZC_NOTIFY_DRAINED;
    if ((want & AZC_NOTIFY_ZC_LOW) && outstanding(c) <= c->pub.zc_low)
        due |= AZC_NOTIFY_ZC_LOW;
    if ((want & AZC_NOTIFY_MARK) && c->pub.sent_pos >= c->pub.mark)
        due |= AZC_NOTIFY_MARK;
    if (!due)
        return;
    c->pub.notify = want & ~due;
    emit(c->r, c->pub.token, AZC_EV_WRITE, 0, due);
}

void conn_send_failed(struct conn *c, int error)
{
    if (c->pub.error)
        return;
    c->pub.error = error;
    sendq_drop(c, error);
    emit(c->r, c->pub.token, AZC_EV_WRITE, error, AZC_NOTIFY_ERROR);
}

void azc_conn_notify(azc_conn *pub, uint32_t what)
{
    pub->notify |= what;
    conn_notify(conn_of(pub));
}

void azc_conn_ask_low(azc_conn *pub)
{
    pub->zc_low = conn_of(pub)->r->cfg.zc_low_water;
    azc_conn_notify(pub, AZC_NOTIFY_ZC_LOW);
}

/* ---- sending ---- */

/* Send plain bytes with a system call now: what is queued, and `extra` behind it. Answers how many
 * bytes of `extra` went. Only where nothing is in the kernel before them. */
static size_t send_now(struct conn *c, const char *extra, size_t n)
{
    struct sendq *q = &c->q;
    struct gathered g = {0};
    if (c->rq || c->want_out || c->held || q->zc_parts || c->pub.error || c->closed)
        return 0;
    if (q->count && (sendq_gather_plain(c, &g) < 0 || g.bytes < c->pub.unsent))
        return 0; /* more than one request's worth: leave it to the backend, in order */
    struct iovec iov[65];
    if (g.parts > 64)
        return 0;
    if (g.parts)
        memcpy(iov, q->iov, g.parts * sizeof *iov);
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = g.parts};
    if (n)
        iov[m.msg_iovlen++] = (struct iovec){(void *)extra, n};
    int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    ssize_t rc =
        g.parts || FAULTS_BUILT ? faults_sendmsg(c, &m, flags) : send(c->pub.fd, extra, n, flags);
    c->r->stats.requests++;
    c->r->stats.parts += m.msg_iovlen;
    if (rc < 0) {
        if (errno != EAGAIN && errno != EINTR && errno != ENOBUFS && errno != ENOMEM)
            conn_send_failed(c, -errno);
        return 0;
    }
    size_t mine = (uint64_t)rc < g.bytes ? (size_t)rc : g.bytes;
    sendq_consume(c, mine);
    c->pub.sent_pos += (size_t)rc - mine;
    c->pub.queued_pos += (size_t)rc - mine;
    c->r->stats.bytes += (size_t)rc - mine;
    conn_notify(c);
    return (size_t)rc - mine;
}

/* Plain bytes and datagrams queued in this turn go as far as the socket takes them: before an
 * abort, for asyncio's own write() and sendto() would have sent them in the call. */
void azc_conn_flush(azc_conn *pub)
{
    struct conn *c = conn_of(pub);
    if (pub->kind == AZC_DATAGRAM)
        dgramq_flush(c);
    else if (c->q.count)
        send_now(c, NULL, 0);
}

/* Nothing is gained by waiting for a turn where the path is known to copy: send what is queued with
 * a system call, if it is not much and nothing is before it. 1: some of it went. */
int conn_copy_now(azc_conn *pub)
{
    struct conn *c = conn_of(pub);
    struct sendq *q = &c->q;
    struct iovec iov[DIRECT_PARTS];
    if (!pub->adaptive || !c->path_copies || pub->sent_pos >= c->probe_at || c->rq || c->want_out ||
        c->held || pub->error || c->closed || q->count > DIRECT_PARTS)
        return 0;
    if (c->direct_turn != c->r->turns)
        c->direct = 0;
    c->direct_turn = c->r->turns;
    if (c->direct >= DIRECT_BYTES)
        return 0; /* others have their turn */
    for (uint32_t i = 0; i < q->count; i++) {
        struct part *p = sendq_at(q, i);
        iov[i] = (struct iovec){(void *)p->base, p->len};
    }
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = q->count};
    ssize_t rc = faults_sendmsg(c, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
    c->r->stats.requests++;
    c->r->stats.parts += m.msg_iovlen;
    c->r->stats.fallbacks[AZC_FALLBACK_PATH]++;
    if (rc < 0)
        return 0; /* whatever it is: the backend meets it, too */
    c->direct += (uint64_t)rc;
    uint64_t went = 0;
    for (uint32_t i = 0; i < q->count && went < (uint64_t)rc; i++) {
        azc_op *op = sendq_at(q, i)->op;
        op->path |= AZC_PATH_COPIED;
        if (op->state == AZC_QUEUED)
            op->state = AZC_ISSUED; /* if it went in part only: not to be withdrawn */
        went += sendq_at(q, i)->len;
    }
    sendq_consume(c, (uint64_t)rc);
    conn_notify(c);
    return 1;
}

/* Loopback, or an address of this machine: such a path copies. */
static bool is_local(struct conn *c)
{
    struct sockaddr_storage me, peer;
    socklen_t n = sizeof me, m = sizeof peer;
    if (c->local)
        return c->local > 0;
    c->local = -1;
    if (getsockname(c->pub.fd, (struct sockaddr *)&me, &n) < 0 ||
        getpeername(c->pub.fd, (struct sockaddr *)&peer, &m) < 0)
        return false;
    bool same = false;
    if (me.ss_family == AF_INET) {
        struct sockaddr_in *a = (struct sockaddr_in *)&me, *b = (struct sockaddr_in *)&peer;
        same = a->sin_addr.s_addr == b->sin_addr.s_addr || ntohl(b->sin_addr.s_addr) >> 24 == 127;
    } else if (me.ss_family == AF_INET6) {
        struct sockaddr_in6 *a = (struct sockaddr_in6 *)&me, *b = (struct sockaddr_in6 *)&peer;
        same = !memcmp(&a->sin6_addr, &b->sin6_addr, sizeof a->sin6_addr);
    }
    c->local = same ? 1 : -1;
    return same;
}

/* Should a plain write of n bytes, which nobody can change, go zero-copy by itself? Where the path
 * was seen not to copy, or to find out: but not on one that is known to. */
static bool auto_zc(struct conn *c, size_t n)
{
    if (!c->pub.zc_ok || !c->r->cfg.auto_write || n < c->pub.zc_threshold)
        return false;
    if (c->r->cfg.auto_write == AZC_WRITE_ALWAYS || c->pub.path == AZC_PATH_ZC)
        return true;
    if (c->path_copies)
        return c->pub.adaptive && c->pub.sent_pos >= c->probe_at;
    return !is_local(c);
}

static uint64_t send_at(const azc_conn *pub)
{
    return pub->high < SEND_NOW ? SEND_NOW : pub->high > SEND_NOW_MAX ? SEND_NOW_MAX : pub->high;
}

static int look(struct conn *c)
{
    return c->pub.ref_token || c->pub.unsent > c->pub.high || c->pub.error;
}

/* No memory to queue the rest of a write. Behind a part of it that went nothing may follow. */
static int not_queued(struct conn *c, bool part_went)
{
    if (!part_went)
        return -ENOMEM;
    conn_send_failed(c, -ENOMEM);
    return 1;
}

/* Is it worth a system call to copy it no more than the kernel does? Once a turn: what follows in
 * the same turn is gathered. */
static bool goes_at_once(struct conn *c, size_t n)
{
    if (n < AT_ONCE || c->at_once == c->r->turns)
        return false;
    c->at_once = c->r->turns;
    return true;
}

/* 0: done. 1: look at error, at ref_token (hold the buffer) and at unsent (above high). -ENOMEM:
 * nothing of it went or was queued. By copying where that is cheap, else sent at once, and what
 * remains by reference (`by_reference`, AZC_KEEP*: nobody changes it) or as a snapshot. */
int azc_write(azc_conn *pub, const char *p, size_t n, int by_reference)
{
    struct conn *c = conn_of(pub);
    uint64_t token = 0;
    size_t whole = n;
    pub->ref_token = 0;
    if (c->pub.error || c->closed)
        return 1; /* nothing is queued any more: asyncio's write() drops, too */
    bool small = n <= COPY_MAX && (!by_reference || pub->unsent < COPY_BACKLOG || n < 512);
    bool zc = !small && by_reference == AZC_KEEP && auto_zc(c, n);
    if ((!small || goes_at_once(c, n)) && !zc && !c->q.auto_parts) {
        size_t sent = send_now(c, p, n);
        if (c->pub.error)
            return 1;
        p += sent;
        n -= sent;
    }
    if (n && !small && by_reference) {
        azc_op *op = op_new(c->r, zc ? OP_AUTO : OP_REF, n);
        if (!op)
            return not_queued(c, n < whole);
        if (sendq_push(c, p, n, op) < 0) {
            op_forget(c->r, op);
            return not_queued(c, n < whole);
        }
        token = op->token;
        if (zc && pub->unsent > pub->high)
            c->r->be->send_now(c);
    } else if (n) {
        if (sendq_copy(c, p, n) < 0)
            return not_queued(c, n < whole);
        if (small && pub->unsent >= send_at(pub) && !c->q.auto_parts)
            send_now(c, NULL, 0);
    }
    if (c->q.count)
        mark_dirty(c);
    pub->ref_token = token;
    return look(c);
}

/* Queue a copy of one datagram; they go out together when the turn ends, or from 64 on. 0, -ENOMEM,
 * or 1: unsent is above high. */
int azc_sendto(azc_conn *pub, const char *p, size_t n, const char *name, size_t namelen)
{
    struct conn *c = conn_of(pub);
    if (c->pub.error || c->closed)
        return 0;
    int rc = dgramq_push(c, p, n, name, namelen);
    if (rc < 0)
        return rc;
    if (c->dq.count >= 64 || pub->unsent >= SEND_NOW)
        dgramq_flush(c);
    mark_dirty(c);
    return pub->unsent > pub->high;
}

azc_op *azc_submit(azc_conn *pub, const azc_iov *parts, size_t n)
{
    struct conn *c = conn_of(pub);
    uint64_t total = 0;
    for (size_t i = 0; i < n; i++)
        total += parts[i].len;
    azc_op *op = op_new(c->r, OP_USER, total);
    if (!op)
        return NULL;
    if (sendq_push_all(c, parts, n, op) < 0) {
        c->r->stats.operations_live--;
        op_forget(c->r, op);
        return NULL;
    }
    mark_dirty(c);
    return op;
}

azc_op *azc_submit_one(azc_conn *pub, const char *p, size_t n)
{
    azc_iov one = {p, n};
    return azc_submit(pub, &one, 1);
}

/* Queue one datagram without copying it; `segment` > 0: many, each of so many bytes but the last
 * one. It leaves when the turn ends, in call order with those of azc_sendto. NULL: no memory. */
azc_op *azc_zc_sendto(azc_conn *pub, const azc_iov *parts, size_t n, const char *name,
                      size_t namelen, int segment)
{
    struct conn *c = conn_of(pub);
    azc_op *op = dgramq_submit(c, parts, n, name, namelen, (uint16_t)segment);
    if (op)
        mark_dirty(c);
    return op;
}

/* 1: it is out of the queue, no byte of it left, and its slot is free. 0: too late. */
int azc_withdraw(azc_conn *pub, azc_op *op)
{
    struct conn *c = conn_of(pub);
    bool datagram = pub->kind == AZC_DATAGRAM;
    if (op->kind != OP_USER || !(datagram ? dgramq_remove(c, op) : sendq_remove(c, op)))
        return 0;
    c->r->stats.operations_live--;
    op_forget(c->r, op);
    conn_notify(c);
    return 1;
}
