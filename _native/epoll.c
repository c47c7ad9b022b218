/* epoll.c - the same events where io_uring is not allowed: readiness and system calls in one turn.
 *
 * Owns: the epoll descriptor. Called by: reactor.c through
 * `struct backend`. Level-triggered; a descriptor that wants nothing is taken out of the set, since
 * EPOLLHUP and EPOLLERR cannot be masked and would spin. Sends go out when a turn begins, so writes
 * of one turn are gathered; EPOLLOUT is asked for only once a socket was full. Everything is copied
 * here: a request ends with its system call, and nothing is pinned.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BATCH 256
#define ACCEPT_BURST 128      /* connections taken from one listener a turn */
#define DATAGRAM_BURST 32     /* datagrams read from one socket a turn */
#define SEND_BURST (4u << 20) /* bytes one socket sends a turn before others have theirs */

struct ep {
    int fd;
    bool no_pwait2;
    /* What epoll_wait told and this turn has not come to: the next turn goes on there, so nobody
     * is passed over. */
    struct epoll_event ev[BATCH];
    int n, i;
    size_t received; /* bytes of streams, this turn */
};

static struct ep *ep_of(struct azc_reactor *r)
{
    return r->be_data;
}

static void epoll_destroy(struct azc_reactor *r)
{
    struct ep *e = ep_of(r);
    close(e->fd);
    free(e);
    r->be_data = NULL;
}

static int epoll_attach(struct azc_reactor *r)
{
    if (r->be_data)
        return 0;
    struct ep *e = calloc(1, sizeof *e);
    if (!e)
        return -ENOMEM;
    e->fd = epoll_create1(EPOLL_CLOEXEC);
    if (e->fd < 0) {
        int err = -errno;
        free(e);
        return err;
    }
    collect_spare(r);
    r->be_data = e;
    return 0;
}

/* ---- sending ---- */

static void send_some(struct conn *c)
{
    uint64_t budget = SEND_BURST;
    while (sendq_ready(c) && budget) {
        struct gathered g;
        if (sendq_gather(c, &g) < 0)
            return;
        g.zc = false;
        struct req *q = req_new(c, &g);
        if (!q)
            return;
        ssize_t rc = faults_sendmsg(c, &c->q.msg, MSG_DONTWAIT | MSG_NOSIGNAL);
        int32_t res = rc < 0 ? -errno : (int32_t)rc;
        c->want_out = res == -EAGAIN || (res >= 0 && (uint64_t)res < g.bytes);
        req_first(q, res, false);
        budget = budget > g.bytes ? budget - g.bytes : 0;
    }
}

/* ---- readiness ---- */

static void set_mask(struct conn *c)
{
    struct ep *e = ep_of(c->r);
    uint32_t in = c->pub.kind == AZC_CONNECT ? EPOLLOUT : EPOLLIN;
    uint32_t mask = (c->want_recv && !c->eof ? in : 0u) | (c->want_out ? EPOLLOUT : 0u);
    if (mask == c->ep_mask)
        return;
    struct epoll_event ev = {.events = mask, .data.u64 = c->pub.token};
    int op = !c->ep_mask ? EPOLL_CTL_ADD : !mask ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
    if (epoll_ctl(e->fd, op, c->pub.fd, &ev) < 0 && op != EPOLL_CTL_DEL) {
        int error = -errno;
        c->want_recv = false;
        if (c->pub.kind == AZC_LISTEN)
            emit(c->r, c->pub.token, AZC_EV_ACCEPT, error, 0);
        else if (c->pub.kind == AZC_DATAGRAM)
            emit(c->r, c->pub.token, AZC_EV_DATAGRAM, error, 0);
        else if (c->pub.kind == AZC_CONNECT)
            connected(c);
        else
            emit(c->r, c->pub.token, AZC_EV_RECV, error, 0);
        return;
    }
    c->ep_mask = mask;
}

static void flush(struct azc_reactor *r)
{
    struct conn *c = r->dirty, *next;
    r->dirty = NULL;
    for (; c; c = next) {
        next = c->dirty_next;
        c->dirty = false;
        if (c->closed) {
            conn_maybe_free(c);
            continue;
        }
        send_some(c);
        if (c->dq.head)
            dgramq_flush(c);
        if (sendq_ready(c))
            mark_dirty(c); /* there was no memory for a request, or others have their turn first */
        set_mask(c);
    }
}

static void receive(struct conn *c)
{
    struct azc_reactor *r = c->r;
    if (!r->n_spare)
        return; /* level-triggered: it is told again next turn */
    uint16_t buffer = r->spare[r->n_spare - 1];
    ssize_t n = recv(c->pub.fd, r->bufs + buffer * r->buf_stride, r->buf_size, MSG_DONTWAIT);
    if (n > 0) {
        r->n_spare--;
        ep_of(r)->received += (size_t)n;
        emit(r, c->pub.token, AZC_EV_RECV, (int32_t)n, buffer);
    } else if (n == 0) {
        c->eof = true;
        emit(r, c->pub.token, AZC_EV_RECV, 0, 0);
        mark_dirty(c);
    } else if (errno != EAGAIN && errno != EINTR) {
        c->want_recv = false;
        emit(r, c->pub.token, AZC_EV_RECV, -errno, 0);
        mark_dirty(c);
    }
}

/* Lay them out as the kernel's multishot recvmsg does. */
static void receive_datagrams(struct conn *c)
{
    struct azc_reactor *r = c->r;
    for (int i = 0; i < DATAGRAM_BURST && r->n_spare && c->want_recv; i++) {
        uint16_t buffer = r->spare[r->n_spare - 1];
        char *at = r->bufs + buffer * r->buf_stride;
        size_t head = sizeof(azc_datagram) + AZC_NAME_MAX;
        struct iovec iov = {at + head, r->buf_size - head};
        struct msghdr m = {.msg_name = at + sizeof(azc_datagram),
                           .msg_namelen = AZC_NAME_MAX,
                           .msg_iov = &iov,
                           .msg_iovlen = 1};
        ssize_t n = recvmsg(c->pub.fd, &m, MSG_DONTWAIT);
        if (n < 0) {
            if (errno != EAGAIN && errno != EINTR)
                emit(r, c->pub.token, AZC_EV_DATAGRAM, -errno, 0);
            return;
        }
        azc_datagram d = {.namelen = m.msg_namelen, .payloadlen = (uint32_t)n};
        memcpy(at, &d, sizeof d);
        r->n_spare--;
        emit(r, c->pub.token, AZC_EV_DATAGRAM, (int32_t)(head + (size_t)n), buffer);
    }
}

static void accept_some(struct conn *c)
{
    for (int i = 0; i < ACCEPT_BURST; i++) {
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

static void ready(struct azc_reactor *r, const struct epoll_event *ev)
{
    struct conn *c = table_get(&r->conns, ev->data.u64);
    if (!c || c->closed)
        return;
    bool broken = ev->events & (EPOLLERR | EPOLLHUP);
    if (c->want_out && (broken || ev->events & EPOLLOUT)) {
        c->want_out = false;
        send_some(c);
        if (c->dq.head)
            dgramq_flush(c);
        mark_dirty(c);
    }
    if (c->pub.kind == AZC_CONNECT && c->want_recv) {
        connected(c); /* or not: SO_ERROR tells */
        mark_dirty(c);
        return;
    }
    if (!c->want_recv || c->eof || !(broken || ev->events & EPOLLIN))
        return;
    if (c->pub.kind == AZC_STREAM)
        receive(c);
    else if (c->pub.kind == AZC_DATAGRAM)
        receive_datagrams(c);
    else if (c->pub.kind == AZC_LISTEN)
        accept_some(c);
    else
        poll_fired(c);
}

static int wait_ready(struct azc_reactor *r, int64_t ns)
{
    struct ep *e = ep_of(r);
    r->stats.enters++;
#ifdef SYS_epoll_pwait2
    if (!e->no_pwait2) { /* 5.11: nanoseconds, as the ring has them */
        struct timespec ts = {ns / 1000000000, ns % 1000000000};
        long n = syscall(SYS_epoll_pwait2, e->fd, e->ev, BATCH, ns < 0 ? NULL : &ts, NULL, 0);
        if (n >= 0 || errno != ENOSYS)
            return n < 0 ? -errno : (int)n;
        e->no_pwait2 = true;
    }
#endif
    int64_t ms = ns < 0 ? -1 : (ns + 999999) / 1000000;
    int n = epoll_wait(e->fd, e->ev, BATCH, ms > 86400000 ? 86400000 : (int)ms);
    return n < 0 ? -errno : n;
}

static int epoll_wait_turn(struct azc_reactor *r, int64_t timeout_ns)
{
    struct ep *e = ep_of(r);
    struct timespec t0, t1;
    bool sleeping = timeout_ns > 0;
    if (sleeping)
        clock_gettime(CLOCK_MONOTONIC, &t0);
    for (;;) {
        flush(r);
        int64_t ns = anything(r) || r->dirty ? 0 : timeout_ns;
        if (e->i == e->n) {
            int n = wait_ready(r, ns);
            if (n < 0)
                return n;
            e->n = n;
            e->i = 0;
        }
        e->received = 0;
        while (e->i < e->n && e->received < TURN_BYTES)
            ready(r, &e->ev[e->i++]);
        if (anything(r) || !timeout_ns)
            return 0;
        if (sleeping) {
            clock_gettime(CLOCK_MONOTONIC, &t1);
            timeout_ns -= (t1.tv_sec - t0.tv_sec) * 1000000000 + t1.tv_nsec - t0.tv_nsec;
            t0 = t1;
            if (timeout_ns <= 0)
                return 0;
        }
    }
}

/* The kernel holds nothing of ours between two turns: only what is queued is tried once more. */
static int epoll_detach(struct azc_reactor *r)
{
    for (struct conn *c = r->dirty; c; c = c->dirty_next)
        if (!c->closed) {
            send_some(c);
            dgramq_flush(c);
        }
    return 0;
}

static int epoll_quiesce(struct conn *c)
{
    struct ep *e = ep_of(c->r);
    if (e && c->ep_mask) {
        struct epoll_event ev = {0};
        epoll_ctl(e->fd, EPOLL_CTL_DEL, c->pub.fd, &ev);
        c->ep_mask = 0;
    }
    return 0;
}

static int epoll_drain(struct azc_reactor *r, int64_t timeout_ns)
{
    (void)r, (void)timeout_ns;
    return 0;
}

/* Plain writes went in their own call (reactor.c); others wait for the turn. */
static void epoll_send_now(struct conn *c)
{
    (void)c;
}

/* Everything is copied: there is nothing to register with. */
static int epoll_region(struct azc_reactor *r, uint64_t id)
{
    (void)r, (void)id;
    return 0;
}

static int epoll_wake_fd(struct azc_reactor *r)
{
    return ep_of(r)->fd;
}

const struct backend epoll_backend = {
    .attach = epoll_attach,
    .wait = epoll_wait_turn,
    .detach = epoll_detach,
    .quiesce = epoll_quiesce,
    .drain = epoll_drain,
    .send_now = epoll_send_now,
    .region = epoll_region,
    .wake_fd = epoll_wake_fd,
    .destroy = epoll_destroy,
};
