/* conn.c - the life of a connection: opened, receiving or not, closed, kept while memory is pinned.
 *
 * Owns: what a connection wants received, and the duplicate of a closed one's descriptor. Called
 * by: Python through cffi, and _fast, from the loop's thread; the backends (accept_some,
 * conn_maybe_free). Never: close the caller's descriptor, or free a connection that the kernel or
 * the dirty list still has.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <unistd.h>

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
    return of_parent(c->r) ? 0 : c->r->be->quiesce(c);
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

/* Afterwards the caller closes the descriptor and never uses `pub` again. 1: memory is pinned.
 * Negative: the kernel, or the submission queue, still has requests that name the descriptor; in
 * another's hands its number would get them. See azc_conn_leave. */
int azc_conn_close(azc_conn *pub, int error)
{
    struct conn *c = conn_of(pub);
    int rc = 0;
    bool mine = !of_parent(c->r);
    azc_conn_abort(pub, error);
    if (c->r->be_data && mine)
        rc = c->r->be->quiesce(c);
    if (pub->kind == AZC_STREAM)
        c->r->stats.connections--;
    pub->notify = 0;
    /* A ring tells about datagrams without a duplicate, which would keep their port: their pins end
     * with no peer's help. An error queue is read by a descriptor. */
    if (c->notifs && mine && (pub->kind == AZC_STREAM || c->zc_on)) {
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

/* azc_conn_close just answered an error: the descriptor is the reactor's, to be closed behind the
 * last completion. The peer sees the end now, and that ends what is on its way, too. */
void azc_conn_leave(azc_conn *pub)
{
    struct conn *c = conn_of(pub);
    if (c->kept_fd >= 0)
        close(c->kept_fd);
    c->kept_fd = pub->fd;
    c->kept_since = now_ns();
    if (pub->kind == AZC_STREAM)
        (void)shutdown(pub->fd, SHUT_RDWR);
}
