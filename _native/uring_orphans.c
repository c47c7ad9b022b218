/* uring_orphans.c - notifications that a ring owed whose thread is gone.
 *
 * Owns: when memory is free that such a ring still reads. Called by: uring_ring.c when another
 * thread runs the loop, uring.c each turn while there are orphans and when a run ends. Never:
 * release what one of the rules below does not prove to be read no more.
 *
 * Orphans: a notification that belongs to a ring whose thread is gone will never be seen. All bytes
 * up to the request's end being acknowledged by the peer (SIOCOUTQ) proves that no later change of
 * the memory can reach it: a retransmission of them would be dropped. That is what releases an
 * orphan, or the end of its connection (TCP_CLOSE): there is nothing left to retransmit. After
 * close, conn.c's duplicate of the descriptor answers for it.
 *
 * A datagram has no acknowledgement, and SIOCOUTQ stops counting it when it is forwarded. But the
 * kernel takes a ring apart only after its last notification, and only then closes what was
 * registered with it. So a run that ends with datagrams pinned registers the write end of a pipe:
 * its read end, the grave, tells when the ring is really gone.
 */
#define _GNU_SOURCE
#include "uring.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>

/* The ring's thread is not ours: read what it left in the completion queue, orphan the rest. */
void uring_retire(struct azc_reactor *r)
{
    uint32_t n = 0;
    uring_harvest(r);
    faults_harvest(r, true);
    struct uring *u = uring_of(r);
    struct grave *g = u->grave >= 0 ? malloc(sizeof *g) : NULL;
    if (g) {
        *g = (struct grave){.fd = u->grave};
        u->grave = -1;
    }
    for (uint32_t i = 0; i < table_slots(&r->reqs); i++) {
        struct req *q = table_at(&r->reqs, i);
        if (!q)
            continue;
        n++;
        if (q->orphan)
            continue;
        q->orphan = true;
        q->grave = g;
        if (g)
            g->orphans++;
    }
    for (uint32_t i = 0; i < table_slots(&r->conns); i++) {
        struct conn *c = table_at(&r->conns, i);
        if (c) /* a loop that is not ours ends no run: such a poll ends with its ring */
            c->out_armed = false;
    }
    if (g && !g->orphans) {
        close(g->fd);
        free(g);
    }
    uring_destroy(r);
    r->stats.notifications_outstanding = n;
}

uint32_t uring_count_orphans(struct azc_reactor *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < table_slots(&r->reqs); i++) {
        struct req *q = table_at(&r->reqs, i);
        n += q && q->orphan;
    }
    return n;
}

static bool ended(int fd)
{
    struct tcp_info info;
    socklen_t n = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &n) == 0 && info.tcpi_state == TCP_CLOSE;
}

static bool unread(struct req *q)
{
    int fd = q->conn->closed ? q->conn->kept_fd : q->conn->pub.fd, unacked = 0;
    struct pollfd gone = {.fd = q->grave ? q->grave->fd : -1};
    if (q->grave && poll(&gone, 1, 0) == 1) /* POLLHUP is always asked for */
        return true;
    if (fd < 0 || q->conn->pub.kind != AZC_STREAM)
        return false;
    return ended(fd) || (ioctl(fd, SIOCOUTQ, &unacked) == 0 &&
                         (int64_t)(q->conn->pub.sent_pos - q->end_pos) >= unacked);
}

void uring_reap_orphans(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    for (uint32_t i = 0; i < table_slots(&r->reqs); i++) {
        struct req *q = table_at(&r->reqs, i);
        if (!q || !q->orphan || !unread(q))
            continue;
        u->orphans--;
        req_notif(q, false, false);
    }
}

/* The run ends; if another thread has the next one, it must learn when datagrams are free. */
void uring_dig_grave(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    bool needed = false;
    int ends[2];
    if (!r->stats.notifications_outstanding)
        return;
    for (uint32_t i = 0; i < table_slots(&r->reqs) && !needed; i++) {
        struct req *q = table_at(&r->reqs, i);
        needed = q && !q->orphan && q->conn->pub.kind == AZC_DATAGRAM;
    }
    if (!needed)
        return;
    if (u->grave >= 0 || pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
        return; /* without one they are kept until the loop is closed, and then for good */
    if (io_uring_register_files(&u->ring, &ends[1], 1) == 0)
        u->grave = ends[0];
    else
        close(ends[0]);
    close(ends[1]);
}
