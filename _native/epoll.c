/* epoll.c - the same events where io_uring is not allowed: readiness and system calls in one turn.
 *
 * Owns: the epoll descriptor. Called by: reactor.c through
 * `struct backend`. Level-triggered; a descriptor that wants nothing is taken out of the set, since
 * EPOLLHUP and EPOLLERR cannot be masked and would spin. Sends go out when a turn begins, so writes
 * of one turn are gathered; EPOLLOUT is asked for only once a socket was full.
 *
 * A request ends with its system call, unless it was sent by MSG_ZEROCOPY (msgzc.c): then its
 * notification comes by the error queue, which shows as EPOLLERR whatever else is asked for. The
 * queue is read at once and until it is empty, so that level goes away in the turn in which it
 * came. A connection that wants nothing and has memory pinned is watched by edges, and so is the
 * duplicate of one that is closed. Error queues belong to no thread: a loop that another thread
 * runs reads on. An EPOLLERR that nothing here explains (a forked child sees its parent's queue) is
 * no error either: from then on that connection is watched by edges, and armed anew after
 * each receive that found something.
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
#define DATAGRAM_BURST 32 /* datagrams read from one socket a turn */
#define QUIET_LOOKS 64
#define QUIET_NS 50000
#define SEND_BURST (4u << 20) /* bytes one socket sends a turn before others have theirs */
#define DRAIN_NAP_NS 1000000

struct ep {
    int fd;
    bool no_pwait2;
    /* What epoll_wait told and this turn has not come to: the next turn goes on there, so nobody
     * is passed over. */
    struct epoll_event ev[BATCH];
    int n, i;
    size_t received; /* bytes of streams, this turn */
    uint32_t quiet;  /* looks in a row, without waiting, that found nothing */
    uint64_t looked; /* when, once there were many */
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
    if (r->be_data) {
        ep_of(r)->quiet = 0;
        return 0;
    }
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

static int32_t send_copy(struct conn *c, uint32_t parts)
{
    const struct iovec *first = c->q.iov;
    int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    ssize_t rc = parts == 1 && !FAULTS_BUILT
                     ? send(c->pub.fd, first->iov_base, first->iov_len, flags)
                     : faults_sendmsg(c, &c->q.msg, flags);
    return rc < 0 ? -errno : (int32_t)rc;
}

static void send_some(struct conn *c)
{
    uint64_t budget = SEND_BURST;
    while (sendq_ready(c) && budget) {
        struct gathered g;
        if (sendq_gather(c, &g) < 0)
            return;
        g.zc = g.zc && msgzc_ready(c);
        g.eor = false; /* the kernel ends its own stacks, after 512 KiB */
        struct req *q = req_new(c, &g);
        if (!q)
            return;
        int32_t res = g.zc ? msgzc_send(q, &c->q.msg) : send_copy(c, g.parts);
        c->want_out = res == -EAGAIN || (res >= 0 && (uint64_t)res < g.bytes);
        req_first(q, res, g.zc && res > 0);
        budget = budget > g.bytes ? budget - g.bytes : 0;
    }
}

/* No more zero-copy ones a turn than half of the socket's buffer takes: a receiver on this machine,
 * whose buffer is charged whole pages for them, may run in the same loop. */
static void send_datagrams(struct conn *c)
{
    struct dgram_turn turn = {0};
    while (c->dq.head) {
        dgramq_flush(c); /* what goes by copying */
        struct dgram *d = c->dq.head;
        if (!dgramq_ready(c) || !dgramq_goes_zc(c, d))
            return;
        if (!msgzc_ready(c))
            continue; /* then by copying */
        if (!dgramq_fits(c, d, &turn, 2)) {
            mark_dirty(c);
            return;
        }
        struct req *q = req_new_dgram(c, d);
        if (!q)
            return;
        int32_t res = msgzc_send(q, &zdgram_of(d)->msg);
        req_first(q, res, res >= 0);
    }
}

/* ---- readiness ---- */

static void set_mask(struct conn *c)
{
    struct ep *e = ep_of(c->r);
    uint32_t in = c->pub.kind == AZC_CONNECT ? EPOLLOUT : EPOLLIN;
    uint32_t mask = (c->want_recv && !c->eof ? in : 0u) | (c->want_out ? EPOLLOUT : 0u);
    if (c->edges ? mask : c->notifs && !mask)
        mask |= EPOLLET; /* EPOLLERR and EPOLLHUP come unasked */
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
    r->turn = 0;
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
            send_datagrams(c);
        if (sendq_ready(c))
            mark_dirty(c); /* there was no memory for a request, or others have their turn first */
        set_mask(c);
    }
}

/* False: there was nothing. */
static bool receive(struct conn *c)
{
    struct azc_reactor *r = c->r;
    if (!r->n_spare)
        return true; /* level-triggered, or armed anew: it is told again next turn */
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
    } else {
        return errno == EINTR;
    }
    return true;
}

/* One call for as many as there are; laid out as the kernel's multishot recvmsg does. False: there
 * was nothing. */
static bool receive_datagrams(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct mmsghdr m[DATAGRAM_BURST];
    struct iovec iov[DATAGRAM_BURST];
    size_t head = sizeof(azc_datagram) + AZC_NAME_MAX;
    unsigned want = r->n_spare < DATAGRAM_BURST ? r->n_spare : DATAGRAM_BURST;
    for (unsigned i = 0; i < want; i++) {
        char *at = r->bufs + r->spare[r->n_spare - 1 - i] * r->buf_stride;
        iov[i] = (struct iovec){at + head, r->buf_size - head};
        m[i].msg_hdr = (struct msghdr){.msg_name = at + sizeof(azc_datagram),
                                       .msg_namelen = AZC_NAME_MAX,
                                       .msg_iov = &iov[i],
                                       .msg_iovlen = 1};
    }
    int n = want ? recvmmsg(c->pub.fd, m, want, MSG_DONTWAIT, NULL) : 0;
    if (n < 0 && errno == EAGAIN)
        return false;
    if (n < 0 && errno != EINTR)
        emit(r, c->pub.token, AZC_EV_DATAGRAM, -errno, 0);
    for (int i = 0; i < n; i++) {
        uint16_t buffer = r->spare[--r->n_spare];
        azc_datagram d = {.namelen = m[i].msg_hdr.msg_namelen, .payloadlen = m[i].msg_len};
        memcpy(r->bufs + buffer * r->buf_stride, &d, sizeof d);
        emit(r, c->pub.token, AZC_EV_DATAGRAM, (int32_t)(head + m[i].msg_len), buffer);
    }
    return true;
}

/* By what `events` said, which may have been an error that is none. */
static void receive_some(struct conn *c, uint32_t events)
{
    bool found = true;
    if (c->announce && events & EPOLLIN)
        emit(c->r, c->pub.token, AZC_EV_READABLE, 0, 0);
    else
        found = c->pub.kind == AZC_STREAM ? receive(c) : receive_datagrams(c);
    if (found && c->edges) {
        c->ep_mask &= ~(uint32_t)EPOLLET; /* not as it is wanted: set_mask arms it anew */
        mark_dirty(c);
    } else if (!found && !c->edges && !c->zc_on && events == EPOLLERR) {
        c->edges = true;
        mark_dirty(c);
    }
}

static void ready(struct azc_reactor *r, const struct epoll_event *ev)
{
    struct conn *c = table_get(&r->conns, ev->data.u64);
    uint32_t events = ev->events;
    if (!c)
        return;
    if (c->closed) {
        msgzc_read(c);
        return;
    }
    if (events & EPOLLERR && c->zc_on && msgzc_read(c)) {
        events &= ~(uint32_t)EPOLLERR; /* an error of the socket is told again */
        if (!c->notifs && !c->want_recv)
            mark_dirty(c);
    }
    bool broken = events & (EPOLLERR | EPOLLHUP);
    if (c->want_out && (broken || events & EPOLLOUT)) {
        c->want_out = false;
        send_some(c);
        if (c->dq.head)
            send_datagrams(c);
        mark_dirty(c);
    }
    if (c->pub.kind == AZC_CONNECT && c->want_recv) {
        connected(c); /* or not: SO_ERROR tells */
        mark_dirty(c);
        return;
    }
    if (!c->want_recv || c->eof || !(broken || events & EPOLLIN))
        return;
    if (c->pub.kind == AZC_STREAM || c->pub.kind == AZC_DATAGRAM)
        receive_some(c, events);
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
        int64_t ns = anything(r) || r->dirty ? 0 : faults_wait(r, timeout_ns);
        if (e->i == e->n) {
            int n = wait_ready(r, ns);
            if (n < 0)
                return n;
            e->n = n;
            e->i = 0;
        }
        e->received = 0;
        r->turn = 0;
        uint64_t told = r->stats.notifications;
        faults_harvest(r, false);
        while (e->i < e->n && e->received < TURN_BYTES)
            ready(r, &e->ev[e->i++]);
        r->stats.notification_turns += r->stats.notifications != told;
        e->quiet = anything(r) || timeout_ns ? 0 : e->quiet + 1;
        if (e->quiet > QUIET_LOOKS)
            e->looked = now_ns();
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

/* A program that only runs its own callbacks is not charged a system call for each turn of them:
 * once many looks in a row found nothing, the next is a little later. A few turns always look. */
static bool epoll_idle(struct azc_reactor *r)
{
    struct ep *e = ep_of(r);
    return e->quiet > QUIET_LOOKS && e->i == e->n && now_ns() - e->looked < QUIET_NS;
}

/* Between two turns the kernel holds nothing of ours but what is pinned: only what is queued is
 * tried once more. */
static int epoll_detach(struct azc_reactor *r)
{
    for (struct conn *c = r->dirty; c; c = c->dirty_next)
        if (!c->closed) {
            send_some(c);
            for (int i = 0; i < 1000 && dgramq_ready(c); i++)
                send_datagrams(c);
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
    msgzc_read(c); /* the less remains pinned by a connection that closes */
    return 0;
}

static void epoll_keep(struct conn *c, bool on)
{
    struct epoll_event ev = {.events = EPOLLET, .data.u64 = c->pub.token};
    int fd = ep_of(c->r)->fd;
    if (!on) { /* somebody else may hold the socket: then closing ends no watch */
        epoll_ctl(fd, EPOLL_CTL_DEL, c->kept_fd, &ev);
        return;
    }
    msgzc_read(c); /* a reset has ended all pins */
    if (c->notifs) /* if it cannot be watched, azc_linger still looks */
        epoll_ctl(fd, EPOLL_CTL_ADD, c->kept_fd, &ev);
}

/* By naps: what waits in the epoll set is for the next run. */
static int epoll_drain(struct azc_reactor *r, int64_t timeout_ns)
{
    uint64_t end = now_ns() + (uint64_t)(timeout_ns > 0 ? timeout_ns : 0);
    for (bool over = false; r->stats.notifications_outstanding && !over;) {
        over = now_ns() >= end;
        for (uint32_t i = 0; i < table_slots(&r->conns); i++) {
            struct conn *c = table_at(&r->conns, i);
            if (c && c->notifs)
                over ? msgzc_look(c) : (void)msgzc_read(c);
        }
        if (r->stats.notifications_outstanding && !over)
            nanosleep(&(struct timespec){.tv_nsec = DRAIN_NAP_NS}, NULL);
    }
    return 0;
}

/* Plain writes went in their own call (write.c). Those that go zero-copy would pause their writer
 * if they waited for the turn. */
static void epoll_send_now(struct conn *c)
{
    if (!ep_of(c->r))
        return;
    c->r->turn = 0;
    send_some(c);
    mark_dirty(c);
}

/* There is nothing to register with. */
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
    .idle = epoll_idle,
    .detach = epoll_detach,
    .quiesce = epoll_quiesce,
    .drain = epoll_drain,
    .send_now = epoll_send_now,
    .region = epoll_region,
    .wake_fd = epoll_wake_fd,
    .keep = epoll_keep,
    .look = msgzc_look,
    .destroy = epoll_destroy,
};
