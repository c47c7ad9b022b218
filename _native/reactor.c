/* reactor.c - the ABI of aiozc.h over the two backends.
 *
 * Owns: the reactor, the event array, connections and their lists. Called by: Python through cffi,
 * from the loop's thread only. Events gather in `pending` and are handed out in batches by
 * azc_wait, so a synchronous harvest (closing one connection, the end of a run) loses nothing and
 * may come while Python still walks the batch before. The batch's receive buffers and released
 * operations are given back by the next azc_wait: until then Python may read them. Never: call
 * back, block outside azc_wait/azc_close, or free what the kernel may read.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* What copy_now sends at most: parts in one call, bytes of one connection in a turn. */
#define DIRECT_PARTS 64
#define DIRECT_BYTES (4u << 20)

#define container(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))

static struct conn *conn_of(azc_conn *c)
{
    return container(c, struct conn, pub);
}

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

void mark_dirty(struct conn *c)
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

void conn_maybe_free(struct conn *c)
{
    if (!c->closed || c->dirty || c->rq || c->dq.issued || c->armed || c->out_armed || c->notifs ||
        c->reading)
        return; /* while it is in the dirty list, flush calls again */
    if (c->kept_fd >= 0) {
        if (c->r->be->keep && c->r->be_data)
            c->r->be->keep(c, false);
        close(c->kept_fd);
    }
    sendq_destroy(c);
    errq_destroy(&c->eq);
    table_free(&c->r->conns, c);
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

int azc_attach(azc_reactor *r)
{
    bool child = r->pid != getpid();
    r->detaching = false;
    if (child && r->be_data)
        r->be->destroy(r); /* knows by r->pid that the ring is the parent's */
    if (child) {
        forget_parent(r);
        r->pid = getpid();
    }
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
 * -EBUSY: the kernel may still read memory for an earlier ring, which only uring.c can follow. */
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

int azc_idle(azc_reactor *r)
{
    return !r->n_out && !r->stall.tick && !r->dirty && !anything(r) && r->be_data && r->be->idle(r);
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

/* ---- connections ---- */

/* family: of the socket, AF_*, or 0: it is borrowed. A TCP socket gets TCP_NODELAY, as asyncio's
 * transports have it. */
azc_conn *azc_conn_open(azc_reactor *r, int fd, int kind, int family)
{
    struct conn *c = table_new(&r->conns);
    if (!c)
        return NULL;
    c->r = r;
    c->kept_fd = -1;
    c->pub.token = c->slot.token;
    c->pub.fd = fd;
    c->pub.address = (uintptr_t)&c->pub;
    c->pub.kind = (uint8_t)kind;
    c->pub.high = HIGH_WATER;
    c->pub.low = LOW_WATER;
    c->pub.zc_low = r->cfg.zc_low_water;
    c->pub.adaptive = r->cfg.adaptive != 0;
    c->pub.zc_threshold = r->cfg.zc_threshold;
    c->pub.zc_cap = r->cfg.zc_transport_cap;
    c->dq.recv_msg.msg_namelen = AZC_NAME_MAX;
    bool tcp = family == AF_INET || family == AF_INET6; /* or UDP */
    if (kind == AZC_STREAM || kind == AZC_DATAGRAM)
        c->pub.zc_ok = tcp && r->cfg.zerocopy;
    c->borrowed = !family;
    c->single = !tcp;
    if (kind == AZC_STREAM) {
        azc_conn_timeout(&c->pub, r->cfg.zc_timeout_ns);
        r->stats.connections++;
        int on = 1;
        if (tcp)
            (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on,
                             sizeof on); /* not for MPTCP, SCTP */
    }
    return &c->pub;
}

void accept_some(struct conn *c)
{
    int burst = c->pub.shared ? SHARED_BURST : ACCEPT_BURST;
    for (int i = 0; i < burst; i++) {
        int fd = accept4(c->pub.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            emit(c->r, c->pub.token, AZC_EV_ACCEPT, fd, 0);
        } else {
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
                c->want_recv = false;
                emit(c->r, c->pub.token, AZC_EV_ACCEPT, -errno, 0);
                mark_dirty(c);
            }
            return;
        }
    }
}

/* Receive, accept or poll from the next azc_wait on. */
int azc_conn_start(azc_conn *pub)
{
    struct conn *c = conn_of(pub);
    if (c->eof || c->closed)
        return 0;
    c->want_recv = true;
    mark_dirty(c);
    return 0;
}

/* Stop it. What arrived already still comes as events. */
int azc_conn_stop(azc_conn *pub)
{
    struct conn *c = conn_of(pub);
    c->want_recv = false;
    mark_dirty(c);
    return 0;
}

void azc_conn_direct(azc_conn *pub, int on)
{
    struct conn *c = conn_of(pub);
    c->announce = on != 0;
    mark_dirty(c);
}

int azc_recv(azc_conn *pub, char *p, size_t n)
{
    struct conn *c = conn_of(pub);
    /* An AZC_EV_READABLE of before azc_conn_direct(c, 0) may be late: by now an event behind it may
     * have what comes first. */
    if (!c->announce || !c->want_recv || c->eof || c->closed)
        return -EAGAIN;
    ssize_t rc = recv(pub->fd, p, n, MSG_DONTWAIT);
    if (rc > 0) {
        c->r->stats.direct_receives++;
        return (int)rc;
    }
    if (rc < 0 && (errno == EAGAIN || errno == EINTR))
        return -EAGAIN;
    if (rc == 0)
        c->eof = c->half_closed = true;
    else
        c->want_recv = false;
    mark_dirty(c);
    return rc < 0 ? -errno : 0;
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

static size_t send_now(struct conn *c, const char *extra, size_t n);

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

void azc_conn_hold(azc_conn *pub, int on)
{
    struct conn *c = conn_of(pub);
    c->held = on != 0;
    mark_dirty(c);
}

/* At once: nothing of this descriptor is with the kernel afterwards but notifications. */
int azc_conn_quiesce(azc_conn *pub)
{
    struct conn *c = conn_of(pub);
    c->want_recv = false;
    return c->r->be->quiesce(c);
}

/* Drop what is unsent; a request in the kernel is cancelled by the next azc_wait or close. */
int azc_conn_abort(azc_conn *pub, int error)
{
    struct conn *c = conn_of(pub);
    c->want_recv = false;
    if (!c->pub.error)
        c->pub.error = error;
    c->cancel_rq = c->rq != NULL;
    sendq_drop(c, c->pub.error);
    dgramq_drop(c, c->pub.error);
    mark_dirty(c);
    return 0;
}

/* An RST at once, with everything unsent dropped, whoever else holds the socket: what close() does
 * where linger is 0, here without closing. */
static void reset(int fd)
{
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    (void)connect(fd, &none, sizeof none);
}

/* What closing the descriptor would send, with a duplicate kept: it tells of acknowledgements when
 * the notifications are lost with their ring (uring.c, orphans), and ends the pins of a peer that
 * stopped reading. Nobody else may hold the socket: what close() leaves to others, this ends. */
static void keep_descriptor(struct conn *c)
{
    struct linger linger = {0};
    socklen_t n = sizeof linger;
    int unread = 0, fd = fcntl(c->pub.fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return; /* no descriptor is free: its pins last as long as the peer likes, or the loop */
    c->kept_since = now_ns();
    c->kept_fd = fd;
    if (c->pub.kind != AZC_STREAM)
        return;
    (void)getsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, &n);
    (void)ioctl(fd, SIOCINQ, &unread);
    if (unread || (linger.l_onoff && !linger.l_linger))
        reset(fd);
    else
        (void)shutdown(fd, SHUT_RDWR);
    (void)ioctl(fd, SIOCOUTQ, &c->kept_unacked);
}

/* Closed connections whose memory the kernel still reads: one whose peer acknowledged nothing for
 * so long is reset, and that frees it. The answer: how many there are. */
int azc_linger(azc_reactor *r, int64_t limit_ns)
{
    int n = 0;
    uint64_t now = now_ns();
    for (uint32_t i = 0; i < table_slots(&r->conns); i++) {
        struct conn *c = table_at(&r->conns, i);
        int unacked = 0;
        if (!c || !c->closed || c->kept_fd < 0)
            continue;
        n++;
        if (ioctl(c->kept_fd, SIOCOUTQ, &unacked) == 0 && unacked != c->kept_unacked) {
            c->kept_unacked = unacked;
            c->kept_since = now;
        } else if (c->pub.kind == AZC_STREAM && now - c->kept_since >= (uint64_t)limit_ns) {
            reset(c->kept_fd);
        }
        if (r->be->look)
            r->be->look(c);
    }
    return n;
}

/* Afterwards the caller closes the descriptor and never uses `pub` again. 1: memory is pinned. */
int azc_conn_close(azc_conn *pub, int error)
{
    struct conn *c = conn_of(pub);
    int rc = 0;
    azc_conn_abort(pub, error);
    if (c->r->be_data)
        rc = c->r->be->quiesce(c);
    if (pub->kind == AZC_STREAM)
        c->r->stats.connections--;
    pub->notify = 0;
    /* A ring tells about datagrams without a duplicate, which would keep their port: their pins end
     * with no peer's help. An error queue is read by a descriptor. */
    if (c->notifs && (pub->kind == AZC_STREAM || c->zc_on)) {
        keep_descriptor(c);
        if (c->r->be->keep && c->r->be_data)
            c->r->be->keep(c, true);
    }
    bool pinned = c->notifs && c->kept_fd >= 0;
    if (!c->notifs)
        msgzc_end(c);
    c->closed = true;
    conn_maybe_free(c);
    return rc < 0 ? rc : pinned;
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
    ssize_t rc = faults_sendmsg(c, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
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

/* Nothing is gained by waiting for a turn where the path is known to copy: send what is queued with
 * a system call, if it is not much and nothing is before it. 1: some of it went. */
static int copy_now(azc_conn *pub)
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
        sendq_at(q, i)->op->path |= AZC_PATH_COPIED;
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
    if (!small && !zc && !c->q.auto_parts) {
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

int azc_region_register(azc_reactor *r, uint64_t id)
{
    return r->be->region(r, id);
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
        copy_now,        azc_zc_sendto,  azc_conn_open,    azc_conn_start,    azc_conn_stop,
        azc_conn_notify, azc_conn_close, azc_conn_direct,  azc_recv};
    return &table;
}
