/* msgzc.c - zero-copy sends without a ring: MSG_ZEROCOPY and the socket's error queue.
 *
 * Owns: SO_ZEROCOPY, the sends that carry the flag, and what the kernel answers about their memory.
 * Called by: epoll.c, which knows when. A send that the kernel accepted in part or whole is a
 * request like a ring's: optable.c counts its pins, and the notification that errqueue.c finds it
 * by is its last completion. Rules, from Documentation/networking/msg_zerocopy.rst and measured:
 *  1. The option is set with the first request that wants it: a socket that never sends zero-copy
 *     is as it was, and has an empty error queue.
 *  2. One owner of the error queue. Where it is somebody's already (SO_ZEROCOPY, IP_RECVERR,
 *     timestamps), or another process has the socket, sends are copied.
 *  3. A send that failed consumes no id. But a datagram that failed behind the IP layer (a
 *     firewall's EPERM, a full device queue) does, and its notification is in the queue when the
 *     call returns (measured, 6.18). So that is read before anything else is sent.
 *  4. ENOBUFS: the socket may not have more notifications outstanding (net.core.optmem_max), or the
 *     user may not lock more. The notifications that wait hold that room: they are read, and the
 *     send tried again. If none wait the request is copied, and so are those behind it until one
 *     came; where nothing is outstanding each tries for itself. So nothing ever waits.
 *  5. Notifications that meet in the error queue become one, with the copied flag of the first one.
 *     It is believed of all of them: a path seldom changes between two.
 *
 * An entry in the error queue is no error of the socket: it shows as EPOLLERR until it is read.
 *
 * Never: wait, or take an id for another process's request.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <linux/errqueue.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/ioctl.h>

#ifndef SO_ZEROCOPY
#define SO_ZEROCOPY 60
#endif
#ifndef MSG_ZEROCOPY
#define MSG_ZEROCOPY 0x4000000
#endif

#define ENTRIES 16  /* of the error queue, by one call */
#define CONTROL 512 /* timestamps of two kinds may stand before what tells the range */

static bool is_set(int fd, int level, int name)
{
    int on = 0;
    socklen_t n = sizeof on;
    return getsockopt(fd, level, name, &on, &n) == 0 && on;
}

/* May this connection's next send carry the flag? */
bool msgzc_ready(struct conn *c)
{
    int fd = c->pub.fd, on = 1;
    if (c->zc_on)
        return true;
    bool taken = is_set(fd, SOL_SOCKET, SO_TIMESTAMPING) || is_set(fd, IPPROTO_IP, IP_RECVERR) ||
                 is_set(fd, IPPROTO_IPV6, IPV6_RECVERR);
    if (!taken && is_set(fd, SOL_SOCKET, SO_ZEROCOPY))
        taken = !sockids_take(fd, &c->eq.base); /* else it was ours before */
    if (!taken && setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0)
        return c->zc_on = true;
    c->pub.zc_ok = 0;
    c->r->stats.fallbacks[AZC_FALLBACK_EOPNOTSUPP]++;
    return false;
}

/* The connection ends, with nothing of it pinned. */
void msgzc_end(struct conn *c)
{
    if (c->zc_on && c->borrowed && !c->eq.count)
        sockids_put(c->pub.fd, c->eq.base);
    errq_destroy(&c->eq);
}

/* Send what `m` describes for this request: bytes accepted, for which a notification follows; or
 * -errno. -EINTR: there is room now, try again. */
int32_t msgzc_send(struct req *q, const struct msghdr *m)
{
    struct conn *c = q->conn;
    int error = ENOBUFS;
    if (errq_reserve(&c->eq) == 0) {
        ssize_t rc = faults_sendmsg(c, m, MSG_DONTWAIT | MSG_NOSIGNAL | MSG_ZEROCOPY);
        if (rc > 0) {
            q->fresh = true;
            errq_issued(&c->eq, q->slot.token);
            return (int32_t)rc;
        }
        error = rc < 0 ? errno : 0;
    }
    if (error == EAGAIN || !error)
        return -error;
    c->settling = c->pub.kind == AZC_DATAGRAM;
    unsigned found = c->settling || error == ENOBUFS ? msgzc_read(c) : 0;
    c->settling = false;
    if (error == ENOBUFS && found)
        return -EINTR;
    c->zc_full = error == ENOBUFS;
    return -error;
}

static void range_is_free(struct conn *c, uint32_t lo, uint32_t hi, bool copied)
{
    struct errq_range range = errq_clip(&c->eq, lo, hi);
    for (uint32_t i = 0; i < range.n; i++) {
        uint64_t token = errq_take(&c->eq, range.first + i);
        struct req *q = token ? table_get(&c->r->reqs, token) : NULL;
        if (q && !faults_notif(c->r, token, copied))
            req_notif(q, true, copied);
    }
    /* Not a send of ours that failed: somebody else sends on the socket. Whose ids are whose? */
    if (range.beyond && (!errq_skip(&c->eq, range.beyond) || !c->settling))
        c->pub.zc_ok = 0;
}

/* Where somebody set IP_RECVERR later on. Reading the entry has taken it from SO_ERROR. */
static bool is_network_error(const struct sock_extended_err *e)
{
    return e->ee_errno && (e->ee_origin == SO_EE_ORIGIN_LOCAL ||
                           e->ee_origin == SO_EE_ORIGIN_ICMP || e->ee_origin == SO_EE_ORIGIN_ICMP6);
}

static void one_entry(struct conn *c, struct msghdr *m)
{
    struct sock_extended_err e;
    for (struct cmsghdr *cm = CMSG_FIRSTHDR(m); cm; cm = CMSG_NXTHDR(m, cm)) {
        bool mine = (cm->cmsg_level == SOL_IP && cm->cmsg_type == IP_RECVERR) ||
                    (cm->cmsg_level == SOL_IPV6 && cm->cmsg_type == IPV6_RECVERR);
        if (!mine || cm->cmsg_len < CMSG_LEN(sizeof e))
            continue;
        memcpy(&e, CMSG_DATA(cm), sizeof e);
        if (e.ee_origin == SO_EE_ORIGIN_ZEROCOPY && !e.ee_errno)
            range_is_free(c, e.ee_info, e.ee_data, e.ee_code & SO_EE_CODE_ZEROCOPY_COPIED);
        else if (is_network_error(&e) && c->pub.kind == AZC_DATAGRAM && !c->closed)
            emit(c->r, c->pub.token, AZC_EV_DATAGRAM, -(int32_t)e.ee_errno, 0);
    }
}

/* Read the error queue until it is empty. The answer: how many entries it had. A closed connection
 * may be gone afterwards. */
unsigned msgzc_read(struct conn *c)
{
    union {
        struct cmsghdr align;
        char room[CONTROL];
    } control[ENTRIES];
    struct mmsghdr m[ENTRIES];
    unsigned total = 0;
    int n, fd = c->kept_fd >= 0 ? c->kept_fd : c->pub.fd;
    if (!c->zc_on || c->reading || (c->closed && c->kept_fd < 0))
        return 0;
    c->reading = true; /* it is not freed meanwhile */
    do {
        memset(m, 0, sizeof m);
        for (int i = 0; i < ENTRIES; i++) {
            m[i].msg_hdr.msg_control = &control[i];
            m[i].msg_hdr.msg_controllen = sizeof control[i];
        }
        n = recvmmsg(fd, m, ENTRIES, MSG_ERRQUEUE | MSG_DONTWAIT, NULL);
        for (int i = 0; i < n; i++)
            one_entry(c, &m[i].msg_hdr);
        total += n > 0 ? (unsigned)n : 0;
    } while (n == ENTRIES);
    if (total)
        c->zc_full = false;
    c->reading = false;
    conn_maybe_free(c);
    return total;
}

static bool acknowledged(const struct req *q, int fd)
{
    struct tcp_info info;
    socklen_t n = sizeof info;
    int unacked = 0;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &n) == 0 && info.tcpi_state == TCP_CLOSE)
        return true;
    return ioctl(fd, SIOCOUTQ, &unacked) == 0 &&
           (int64_t)(q->conn->pub.sent_pos - q->end_pos) >= unacked;
}

/* A connection that is closed, or whose loop is: also what has no notification (something took the
 * socket over that copies without telling) ends, by the rule of uring_orphans.c. */
void msgzc_look(struct conn *c)
{
    struct azc_reactor *r = c->r;
    uint64_t token = c->pub.token;
    msgzc_read(c);
    for (uint32_t i = 0; i < table_slots(&r->reqs); i++) {
        struct req *q = table_at(&r->reqs, i);
        if (table_get(&r->conns, token) != c || !c->notifs || c->pub.kind != AZC_STREAM)
            return;
        int fd = c->kept_fd >= 0 ? c->kept_fd : c->closed ? -1 : c->pub.fd;
        if (q && q->conn == c && q->first_seen && fd >= 0 && acknowledged(q, fd))
            req_notif(q, false, false);
    }
}
