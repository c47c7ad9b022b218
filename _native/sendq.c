/* sendq.c - one socket's send queue: gather, split, account. Knows no backend.
 *
 * Owns: the order of the bytes. Used by: write.c (push), optable.c (consume), the backends
 * (gather). Rules:
 *  1. One FIFO for copied, referenced and zero-copy parts; bytes leave in call order.
 *  2. At most one request that is not yet sent; it reads the first `in_request` parts, which nobody
 *     moves, merges or extends until its first completion.
 *  3. A request takes at most max_parts parts and max_request bytes. A larger part stays at the
 * head and is consumed from its front, so any length works.
 *  4. What the kernel did not accept stays at the head: a short result needs no special case.
 *  5. `copy_left` bytes at the head go by copying (they met ENOMEM or ENOBUFS); then zero-copy
 * resumes.
 *  6. MSG_EOR on the request that completes each zc_eor_bytes (64 KiB) of a zero-copy stream, else
 * the kernel stacks notifications without end (measured: 0 of 11,328 within 3 s).
 *
 * Never: touch memory of a part, or decide that a part is released (optable.c does).
 */
#include "internal.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

void sendq_queued(struct conn *c, uint64_t n)
{
    struct azc_reactor *r = c->r;
    c->pub.unsent += n;
    c->pub.queued_pos += n;
    r->stats.queued_bytes += n;
    r->stats.bytes += n;
    if (r->stats.queued_bytes > r->stats.queued_peak)
        r->stats.queued_peak = r->stats.queued_bytes;
}

void sendq_unqueued(struct conn *c, uint64_t n)
{
    c->pub.unsent -= n;
    c->r->stats.queued_bytes -= n;
}

static int grow(struct sendq *q)
{
    uint32_t cap = q->cap ? q->cap * 2 : 8;
    struct part *more = malloc(cap * sizeof *more);
    if (!more)
        return -ENOMEM;
    for (uint32_t i = 0; i < q->count; i++)
        more[i] = *sendq_at(q, i);
    free(q->parts);
    q->parts = more;
    q->cap = cap;
    q->head = 0;
    return 0;
}

static void count_zc(struct sendq *q, const azc_op *op, int by)
{
    if (op->kind == OP_USER)
        q->zc_parts += (uint32_t)by;
    else if (op->kind == OP_AUTO)
        q->auto_parts += (uint32_t)by;
}

int sendq_push(struct conn *c, const char *base, size_t len, azc_op *op)
{
    struct sendq *q = &c->q;
    if (q->count == q->cap && grow(q) < 0)
        return -ENOMEM;
    *sendq_at(q, q->count) = (struct part){base, len, op};
    q->count++;
    op->parts++;
    count_zc(q, op, 1);
    sendq_queued(c, len);
    return 0;
}

/* All parts of one operation that are not empty: all of them, or -ENOMEM and none. */
int sendq_push_all(struct conn *c, const azc_iov *parts, size_t n, azc_op *op)
{
    struct sendq *q = &c->q;
    uint32_t before = q->count;
    while (q->cap - q->count < n)
        if (grow(q) < 0)
            return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        if (parts[i].len)
            *sendq_at(q, q->count++) = (struct part){parts[i].base, parts[i].len, op};
    op->parts += q->count - before;
    count_zc(q, op, (int)(q->count - before));
    sendq_queued(c, op->nbytes);
    return 0;
}

/* Copy into the chunk at the tail, and into new ones: many small writes become one part. */
int sendq_copy(struct conn *c, const char *base, size_t len)
{
    struct sendq *q = &c->q;
    size_t hint = len;
    if (q->count) {
        struct part *tail = sendq_at(q, q->count - 1);
        if (tail->op->kind == OP_CHUNK) {
            struct chunk *k = (struct chunk *)tail->op;
            size_t room = k->cap - k->used;
            if (room >= len && q->count > q->in_request) {
                memcpy(k->data + k->used, base, len);
                k->used += len;
                tail->len += len;
                sendq_queued(c, len);
                return 0;
            }
            /* A second small write in one turn: expect more of them. */
            hint = len > k->cap * 4 ? len : k->cap * 4;
            if (hint > COPY_MAX * 4)
                hint = len > COPY_MAX * 4 ? len : COPY_MAX * 4;
        }
    }
    struct chunk *k = chunk_new(c->r, hint);
    if (!k)
        return -ENOMEM;
    memcpy(k->data, base, len);
    k->used = len;
    int rc = sendq_push(c, k->data, len, &k->op);
    if (rc < 0)
        chunk_free(c->r, k);
    return rc;
}

static int reserve_iov(struct sendq *q, uint32_t want)
{
    if (q->iov_cap >= want)
        return 0;
    uint32_t cap = want <= 16 ? 16 : want <= 128 ? 128 : 1024;
    struct iovec *more = realloc(q->iov, cap * sizeof *more);
    if (!more)
        return -ENOMEM;
    q->iov = more;
    q->iov_cap = cap;
    return 0;
}

static bool has_room(struct azc_reactor *r, uint64_t bytes)
{
    uint64_t wears = bytes / SHORT_WEARS + 1;
    r->zc_short = r->zc_short > wears ? r->zc_short - wears : 0;
    return r->stats.pinned_bytes + bytes <= r->cfg.zc_loop_cap - r->zc_short;
}

/* The kernel refused a request, which is not pinned any more. After ENOMEM: what still is, is what
 * there was room for. */
void fell_back(struct azc_reactor *r, int reason)
{
    uint64_t cap = r->cfg.zc_loop_cap, fits = r->stats.pinned_bytes;
    r->stats.fallbacks[reason]++;
    if (reason != AZC_FALLBACK_ENOMEM)
        return;
    if (fits < cap / CAP_LEAST)
        fits = cap / CAP_LEAST;
    if (fits < cap && r->zc_short < cap - fits)
        r->zc_short = cap - fits;
}

bool zc_allowed(struct conn *c, uint64_t zc_bytes, const struct gathered *g)
{
    struct azc_reactor *r = c->r;
    uint64_t bytes = g->bytes;
    if (!zc_bytes || !c->pub.zc_ok || zc_bytes < c->pub.zc_threshold)
        return false;
    if (c->pub.zc_threshold && bytes / g->parts < ZC_PART_MIN)
        return false;
    if (c->zc_full && c->notifs) {
        r->stats.fallbacks[AZC_FALLBACK_ENOBUFS]++;
        return false;
    }
    if (c->pub.adaptive && c->path_copies) {
        if (c->pub.sent_pos < c->probe_at) {
            r->stats.fallbacks[AZC_FALLBACK_PATH]++;
            return false;
        }
        c->probe_at = c->pub.sent_pos + c->probe_gap;
    }
    /* The loop's cap is a share of what may be locked; a region was locked when it was registered.
     */
    if (c->pub.pinned + bytes > c->pub.zc_cap || (!g->region.id && !has_room(r, bytes))) {
        r->stats.fallbacks[AZC_FALLBACK_CAP]++;
        return false;
    }
    return true;
}

/* Does the request lie in one region, or enough of its front that it is cut there? */
static void match_region(struct conn *c, struct gathered *g, uint64_t *zc_bytes)
{
    struct sendq *q = &c->q;
    struct region found;
    uint64_t bytes = 0, zc = 0;
    uint32_t n, most = g->parts;
    if (most > c->r->cfg.fixed_parts) {
        most = c->r->cfg.fixed_parts;
        if (q->iov[0].iov_len < REGION_CUT)
            return; /* one part a request: only large ones are worth it */
    }
    n = regions_prefix(q->iov, most, &found);
    if (n == g->parts) { /* mostly: all of it */
        g->region = found;
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        bytes += q->iov[i].iov_len;
        if (wants_zc(sendq_at(q, i)->op))
            zc += q->iov[i].iov_len;
    }
    if (bytes < REGION_CUT)
        return;
    g->parts = n;
    g->bytes = bytes;
    g->region = found;
    *zc_bytes = zc;
}

/* `plain`: for a copying system call whatever the parts are. */
static int gather(struct conn *c, struct gathered *g, bool plain)
{
    struct sendq *q = &c->q;
    uint64_t limit = c->r->cfg.max_request, zc_bytes = 0, bytes = 0;
    uint32_t max = q->count < c->r->cfg.max_parts ? q->count : c->r->cfg.max_parts, n = 0;
    if (q->copy_left && q->copy_left < limit)
        limit = q->copy_left;
    if (!plain && (q->zc_parts || q->auto_parts) && !may_wait(c) && limit > UNSURE_MAX << c->sure)
        limit = UNSURE_MAX << c->sure;
    int rc = reserve_iov(q, max);
    if (rc < 0)
        return rc;
    for (; n < max && bytes < limit; n++) {
        struct part *p = sendq_at(q, n);
        uint64_t take = p->len < limit - bytes ? p->len : limit - bytes;
        q->iov[n] = (struct iovec){(void *)p->base, take};
        bytes += take;
        if (wants_zc(p->op))
            zc_bytes += take;
    }
    *g = (struct gathered){.parts = n, .bytes = bytes};
    if (!plain && zc_bytes && c->pub.zc_ok && c->r->cfg.fixed_parts && !q->copy_left &&
        regions_any())
        match_region(c, g, &zc_bytes);
    if (!plain && !q->copy_left)
        g->zc = zc_allowed(c, zc_bytes, g);
    if (g->zc) {
        uint64_t stack = c->r->cfg.zc_eor_bytes;
        q->since_eor += g->bytes;
        /* A request whose report decides must not share its skb with another one. */
        g->eor = (stack && q->since_eor >= stack) ||
                 (c->pub.adaptive && (c->path_copies || c->reports < COPIED_REPORTS));
        if (g->eor)
            q->since_eor = 0;
    }
    memset(&q->msg, 0, sizeof q->msg);
    q->msg.msg_iov = q->iov;
    q->msg.msg_iovlen = g->parts;
    return 0;
}

/* Put the next request into q->iov. 0: filled; -ENOMEM. Call only when sendq_ready. */
int sendq_gather(struct conn *c, struct gathered *g)
{
    return gather(c, g, false);
}

int sendq_gather_plain(struct conn *c, struct gathered *g)
{
    return gather(c, g, true);
}

/* A report that can be trusted came: does this path copy? */
void adapt(struct conn *c, bool copied)
{
    if (c->reports < COPIED_REPORTS)
        c->reports++;
    if (!copied) {
        c->path_copies = false;
        c->copied_in_row = 0;
        c->probe_gap = 0;
        return;
    }
    if (!c->path_copies && ++c->copied_in_row < COPIED_REPORTS)
        return;
    c->path_copies = true;
    c->probe_gap = c->probe_gap ? c->probe_gap * 2 : PROBE_GAP;
    if (c->probe_gap > PROBE_GAP_MAX)
        c->probe_gap = PROBE_GAP_MAX;
    c->probe_at = c->pub.sent_pos + c->probe_gap;
}

/* The first parts, all of one operation, are sent. */
static void pop(struct conn *c, azc_op *op, uint32_t n)
{
    struct sendq *q = &c->q;
    q->head = (q->head + n) & (q->cap - 1);
    q->count -= n;
    count_zc(q, op, -(int)n);
    op->parts -= n;
    op_check(c->r, op);
}

void sendq_consume(struct conn *c, uint64_t bytes)
{
    struct sendq *q = &c->q;
    sendq_unqueued(c, bytes);
    c->pub.sent_pos += bytes;
    q->copy_left = q->copy_left > bytes ? q->copy_left - bytes : 0;
    while (bytes) {
        azc_op *op = sendq_at(q, 0)->op;
        uint32_t whole = 0;
        struct part *p;
        if (op->kind == OP_USER && op->nbytes - op->sent <= bytes) { /* no need to look at each */
            bytes -= op->nbytes - op->sent;
            op->sent = op->nbytes;
            pop(c, op, op->parts);
            continue;
        }
        while (bytes && whole < q->count && (p = sendq_at(q, whole))->op == op) {
            uint64_t n = p->len < bytes ? p->len : bytes;
            op->sent += n;
            p->base += n;
            p->len -= n;
            bytes -= n;
            if (p->len)
                break;
            whole++;
        }
        if (whole)
            pop(c, op, whole);
    }
}

/* Everything that no request reads is dropped; its operations fail with `error`. */
void sendq_drop(struct conn *c, int error)
{
    struct sendq *q = &c->q;
    while (q->count > q->in_request) {
        struct part *p = sendq_at(q, q->count - 1);
        azc_op *op = p->op;
        sendq_unqueued(c, p->len);
        q->count--;
        count_zc(q, op, -1);
        op->error = error;
        op->parts--;
        op_check(c->r, op);
    }
    for (uint32_t i = 0; i < q->count; i++)
        sendq_at(q, i)->op->error = error;
    q->copy_left = 0;
}

/* Take all parts of an operation out, if none of them was ever issued. */
bool sendq_remove(struct conn *c, azc_op *op)
{
    struct sendq *q = &c->q;
    if (op->state != AZC_QUEUED || !op->parts)
        return false;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < q->count; i++) {
        struct part p = *sendq_at(q, i);
        if (p.op == op) {
            sendq_unqueued(c, p.len);
            c->pub.queued_pos -= p.len;
            c->r->stats.bytes -= p.len;
            op->parts--;
            q->zc_parts--;
        } else {
            *sendq_at(q, kept++) = p;
        }
    }
    q->count = kept;
    return true;
}

void sendq_destroy(struct conn *c)
{
    free(c->q.parts);
    free(c->q.iov);
    memset(&c->q, 0, sizeof c->q);
}
