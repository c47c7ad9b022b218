/* reactor.c - the life of a reactor, its turns and its events: the ABI of aiozc.h over the two
 * backends.
 *
 * Owns: the reactor and the event array; connections are conn.c's, what they send write.c's. Called
 * by: Python through cffi, and _fast, from the loop's thread only. Events gather in `pending` and
 * are handed out in batches by azc_wait, so a synchronous harvest (closing one connection, the end
 * of a run) loses nothing and may come while Python still walks the batch before. The batch's
 * receive buffers and released operations are given back by the next azc_wait: until then Python
 * may read them. Never: call back, block outside azc_wait/azc_close, or free what the kernel may
 * read.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- events ---- */

void emit(struct azc_reactor *r, uint64_t token, int kind, int32_t res, unsigned arg)
{
    if (r->n_pending == r->cap_pending) {
        uint32_t cap = r->cap_pending ? r->cap_pending * 2 : AZC_EVENTS;
        azc_event *more = realloc(r->pending, cap * sizeof *more);
        if (!more)
            abort(); /* an event that is lost is a connection that hangs, or memory freed early */
        r->pending = more;
        r->cap_pending = cap;
    }
    r->pending[r->n_pending++] = (azc_event){token, res, (uint16_t)kind, (uint16_t)arg};
}

/* Python has read the last batch: what it described may be used again. */
static void retire_batch(struct azc_reactor *r)
{
    for (uint32_t i = 0; i < r->n_out; i++) {
        azc_event *e = &r->out[i];
        if (holds_buffer(e)) {
            spare_buffer(r, e->arg);
        } else if (e->kind == AZC_EV_RELEASED) {
            struct op *o = table_get(&r->ops, e->token);
            if (o)
                op_forget(r, &o->pub);
        }
    }
    r->n_out = 0;
}

static int hand_out(struct azc_reactor *r)
{
    uint32_t n = r->n_pending < AZC_EVENTS ? r->n_pending : AZC_EVENTS;
    if (!n)
        return 0;
    memcpy(r->out, r->pending, n * sizeof *r->out);
    r->n_pending -= n;
    if (r->n_pending)
        memmove(r->pending, r->pending + n, r->n_pending * sizeof *r->out);
    r->n_out = n;
    return (int)n;
}

/* ---- life of a reactor ---- */

static int map_buffers(struct azc_reactor *r)
{
    r->n_bufs = r->cfg.recv_buffers;
    r->buf_size = (64u << 10) + 512; /* the largest datagram, with its header and address */
    /* Not a power of two apart: buffers that start in the same cache sets evict each other. */
    r->buf_stride = r->buf_size + 2048;
    r->bufs_bytes = r->n_bufs * r->buf_stride;
    r->bufs = mmap(NULL, r->bufs_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r->bufs == MAP_FAILED)
        return -ENOMEM;
    r->spare = calloc(r->n_bufs, sizeof *r->spare);
    if (r->spare)
        return 0;
    munmap(r->bufs, r->bufs_bytes);
    return -ENOMEM;
}

static bool named(const azc_event *ev, uint32_t n, uint32_t buffer)
{
    for (uint32_t i = 0; i < n; i++)
        if (holds_buffer(&ev[i]) && ev[i].arg == buffer)
            return true;
    return false;
}

/* For a backend that begins anew: every buffer that no event still names. */
void collect_spare(struct azc_reactor *r)
{
    r->n_spare = 0;
    for (uint32_t i = r->n_bufs; i-- > 0;)
        if (!named(r->pending, r->n_pending, i) && !named(r->out, r->n_out, i))
            spare_buffer(r, i);
}

azc_reactor *azc_open(const azc_config *cfg, int *err)
{
    struct azc_reactor *r = calloc(1, sizeof *r);
    *err = -ENOMEM;
    if (!r)
        return NULL;
    r->cfg = *cfg;
    faults_open(r);
    if (!r->cfg.recv_buffers)
        r->cfg.recv_buffers = 128;
    if (!r->cfg.sq_entries)
        r->cfg.sq_entries = 1024;
    if (!r->cfg.cq_entries)
        r->cfg.cq_entries = 8192;
    if (!r->cfg.max_parts || r->cfg.max_parts > 1024)
        r->cfg.max_parts = 1024;
    if (!r->cfg.max_request || r->cfg.max_request > (1u << 30))
        r->cfg.max_request = 1u << 20;
    if (r->cfg.recv_buffers & (r->cfg.recv_buffers - 1) || r->cfg.recv_buffers > 32768 ||
        (cfg->backend != AZC_URING && cfg->backend != AZC_EPOLL)) {
        *err = -EINVAL;
        free(r);
        return NULL;
    }
    table_init(&r->ops, sizeof(struct op));
    table_init(&r->reqs, sizeof(struct req));
    table_init(&r->conns, sizeof(struct conn));
    r->be = cfg->backend == AZC_URING ? &uring_backend : &epoll_backend;
    r->pid = getpid();
    *err = map_buffers(r);
    if (*err < 0) {
        free(r);
        return NULL;
    }
    return r;
}

/* In a forked child nothing of the parent's is in flight for us: its requests, and the bytes that
 * they carry, are the parent's to send. */
static void forget_parent(struct azc_reactor *r)
{
    for (uint32_t i = 0; i < table_slots(&r->reqs); i++) {
        struct req *q = table_at(&r->reqs, i);
        if (!q)
            continue;
        if (q->first_seen) {
            req_notif(q, false, false);
        } else {
            q->notif_seen = true;
            req_first(q, -ECANCELED, false);
        }
    }
    for (uint32_t i = 0; i < table_slots(&r->conns); i++) {
        struct conn *c = table_at(&r->conns, i);
        if (!c)
            continue;
        c->armed = c->cancelling = c->out_armed = false;
        c->ep_mask = 0;
        if (c->zc_on) { /* the ids of this socket are the parent's */
            errq_destroy(&c->eq);
            c->zc_on = false;
            c->pub.zc_ok = 0;
        }
        c->pub.shared = 1; /* if it listens */
        dgramq_drop(c, -ECANCELED);
        c->want_out = false;
        if (c->pub.unsent)
            conn_send_failed(c, -ECANCELED);
        mark_dirty(c);
        conn_maybe_free(c);
    }
}

static void end_of_parent(azc_reactor *r)
{
    if (!of_parent(r))
        return;
    if (r->be_data)
        r->be->destroy(r); /* knows that the ring is the parent's */
    forget_parent(r);
    r->pid = getpid();
}

int azc_attach(azc_reactor *r)
{
    r->detaching = false;
    end_of_parent(r);
    int rc = r->be->attach(r);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < table_slots(&r->conns); i++) {
        struct conn *c = table_at(&r->conns, i);
        if (c && !c->closed)
            mark_dirty(c);
    }
    return 0;
}

/* After azc_attach failed: there is no ring to be had, so go on as if AZC_EPOLL had been asked for.
 * -EBUSY: the kernel may still read memory for an earlier ring, which only uring_orphans.c can
 * follow. */
int azc_fall_back(azc_reactor *r)
{
    if (r->be_data || r->reqs.live)
        return -EBUSY;
    r->be = &epoll_backend;
    r->cfg.backend = AZC_EPOLL;
    r->cfg.zerocopy = r->cfg.msg_zerocopy;
    r->cfg.fixed_parts = 0;
    for (uint32_t i = 0; i < table_slots(&r->conns); i++) {
        struct conn *c = table_at(&r->conns, i);
        if (c && !r->cfg.zerocopy)
            c->pub.zc_ok = 0;
    }
    return 0;
}

/* One turn: ended by an event, the timeout (< 0: none) or a signal. The answer: AZC_FIRED_* and the
 * number of events; -EINTR for a signal; another -errno for a backend that is beyond repair. */
int azc_wait(azc_reactor *r, int64_t timeout_ns)
{
    r->turns++;
    retire_batch(r);
    if (r->stall.tick)
        timeout_ns = stall_watch(r, timeout_ns);
    int rc = r->be->wait(r, anything(r) ? 0 : timeout_ns);
    return anything(r) || rc >= 0 ? azc_take_events(r) : rc;
}

/* Is there nothing to ask of the kernel? Then that was a turn, too. */
int azc_idle(azc_reactor *r)
{
    bool idle =
        !r->n_out && !r->stall.tick && !r->dirty && !anything(r) && r->be_data && r->be->idle(r);
    r->turns += idle;
    return idle;
}

/* Hand out what is there, without entering the kernel. */
int azc_take_events(azc_reactor *r)
{
    retire_batch(r);
    int fired = r->fired | (r->n_rel ? AZC_FIRED_RELEASED : 0);
    r->fired = 0;
    return hand_out(r) | fired;
}

int azc_detach(azc_reactor *r)
{
    r->detaching = true;
    return r->be->detach(r);
}

/* Wait, at most so long, for notifications. The answer: how many requests the kernel still reads.
 */
int azc_drain(azc_reactor *r, int64_t timeout_ns)
{
    end_of_parent(r); /* a child that closes the loop without having run it */
    if (r->stats.notifications_outstanding && r->be_data)
        r->be->drain(r, timeout_ns);
    return (int)r->reqs.live;
}

/* 0: everything is given back. Else the number of requests that the kernel may still read: then the
 * memory of copied bytes and the tables are kept for good; Python keeps what it holds likewise. */
int azc_close(azc_reactor *r)
{
    r->detaching = true;
    faults_close(r);
    int left = (int)r->reqs.live;
    if (r->be_data)
        r->be->destroy(r);
    for (uint32_t i = 0; i < table_slots(&r->conns); i++) {
        struct conn *c = table_at(&r->conns, i);
        if (!c)
            continue;
        if (c->kept_fd >= 0)
            close(c->kept_fd);
        if (left)
            continue;
        sendq_drop(c, -ECONNABORTED);
        dgramq_drop(c, -ECONNABORTED);
        sendq_destroy(c);
        errq_destroy(&c->eq);
    }
    for (uint32_t i = 0; i < table_slots(&r->reqs); i++)
        if (table_at(&r->reqs, i))
            req_leave_grave(table_at(&r->reqs, i));
    if (left)
        return left;
    slab_destroy(&r->slab);
    table_destroy(&r->ops);
    table_destroy(&r->reqs);
    table_destroy(&r->conns);
    munmap(r->bufs, r->bufs_bytes);
    free(r->spare);
    free(r->pending);
    free(r->rel);
    free(r);
    return 0;
}

int azc_wake_fd(azc_reactor *r)
{
    return r->be_data ? r->be->wake_fd(r) : -ENOTCONN;
}

int azc_region_register(azc_reactor *r, uint64_t id)
{
    return r->be->region(r, id);
}

int azc_more(azc_reactor *r)
{
    return r->dirty != NULL || anything(r);
}

azc_event *azc_events(azc_reactor *r)
{
    return r->out;
}

char *azc_recv_memory(azc_reactor *r, size_t *bytes, size_t *stride)
{
    *bytes = r->bufs_bytes;
    *stride = r->buf_stride;
    return r->bufs;
}

azc_stats *azc_stats_of(azc_reactor *r)
{
    return &r->stats;
}

size_t azc_take_released(azc_reactor *r, uint64_t *tokens, size_t max)
{
    size_t n = r->n_rel < max ? r->n_rel : max;
    if (!n)
        return 0;
    r->n_rel -= n;
    memcpy(tokens, r->rel + r->n_rel, n * sizeof *tokens);
    return n;
}

/* ---- the table for _fast ---- */

static void *owner(azc_reactor *r, uint64_t token)
{
    struct conn *c = table_get(&r->conns, token);
    return c && !c->closed ? c->pub.owner : NULL;
}

const azc_api *azc_api_table(void)
{
    static const azc_api table = {
        azc_wait,        azc_write,      azc_submit,       azc_take_released, owner,
        azc_withdraw,    azc_idle,       azc_conn_drained, azc_conn_ask_low,  azc_sendto,
        conn_copy_now,   azc_zc_sendto,  azc_conn_open,    azc_conn_start,    azc_conn_stop,
        azc_conn_notify, azc_conn_close, azc_conn_leave,   azc_conn_direct,   azc_recv};
    return &table;
}
