/* stall.c - peers that stop reading: zc_timeout.
 *
 * Owns: the looks at connections that hold unsent or pinned bytes, several in each timeout, and the
 * verdict. Called by: reactor.c, once each azc_wait and only where somebody set a timeout. One
 * clock a reactor: it bounds the wait while anything is outstanding, and nothing runs otherwise.
 *
 * Progress is a byte accepted by the kernel (sent_pos) or acknowledged by the peer. SIOCOUTQ alone
 * need not tell: a full send buffer takes as much as was acknowledged, and may look the same each
 * time. So TCP is asked for bytes_acked, too, which only grows. Time counts while the loop runs: a
 * loop that was blocked did not give its sockets anything either.
 *
 * Never: look at a connection that is closed (azc_linger does) or whose sending is over.
 */
#include "internal.h"

#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h> /* bytes_acked: not in the C library's netinet/tcp.h */
#include <netinet/in.h>
#include <sys/ioctl.h>

#define LOOKS 8 /* within one timeout */
#define TICK_MIN 1000000u

/* ns: 0 switches it off. */
void azc_conn_timeout(azc_conn *pub, uint64_t ns)
{
    struct conn *c = (struct conn *)((char *)pub - offsetof(struct conn, pub));
    struct stall *s = &c->r->stall;
    uint64_t tick = ns / LOOKS > TICK_MIN ? ns / LOOKS : TICK_MIN;
    c->timeout_ns = ns;
    if (ns && (!s->tick || tick < s->tick))
        s->tick = tick;
}

static bool progressed(struct conn *c)
{
    struct tcp_info info = {0};
    socklen_t n = sizeof info;
    int unacked = 0;
    (void)getsockopt(c->pub.fd, IPPROTO_TCP, TCP_INFO, &info, &n);
    (void)ioctl(c->pub.fd, SIOCOUTQ, &unacked);
    if (c->seen_sent == c->pub.sent_pos && c->seen_acked == info.tcpi_bytes_acked &&
        c->kept_unacked == unacked)
        return false;
    c->seen_sent = c->pub.sent_pos;
    c->seen_acked = info.tcpi_bytes_acked;
    c->kept_unacked = unacked;
    return true;
}

/* As zc_reset: with linger 0, closing ends the pins. What is pinned fails when it is released. */
static void give_up(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct linger none = {.l_onoff = 1};
    (void)setsockopt(c->pub.fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    for (uint32_t i = 0; i < table_slots(&r->reqs); i++) {
        struct req *q = table_at(&r->reqs, i);
        if (!q || q->conn != c)
            continue;
        for (uint32_t j = 0; j < q->n_ops; j++) {
            q->ops[j]->error = -ETIMEDOUT;
            if (q->ops[j]->state == AZC_SENT)
                q->ops[j]->state = AZC_FAILED;
        }
    }
    r->stats.timeouts++;
    conn_send_failed(c, -ETIMEDOUT);
}

static void look(struct conn *c)
{
    struct stall *s = &c->r->stall;
    if (c->closed || !c->timeout_ns || c->pub.error || (!c->pub.unsent && !c->pub.pinned))
        return;
    /* Not looked at the last time: it had nothing outstanding then. */
    bool anew = c->seen_pass + 1 != s->pass;
    c->seen_pass = s->pass;
    if (progressed(c) || anew)
        c->kept_since = s->clock;
    else if (s->clock - c->kept_since >= c->timeout_ns)
        give_up(c);
}

/* Before a wait of timeout_ns: look, if it is time; the answer is how long to wait at most. */
int64_t stall_watch(struct azc_reactor *r, int64_t timeout_ns)
{
    struct stall *s = &r->stall;
    if (!r->stats.queued_bytes && !r->stats.pinned_bytes) {
        s->watching = false;
        return timeout_ns;
    }
    uint64_t now = now_ns();
    if (!s->watching) {
        s->watching = true;
        s->last = now;
        s->pass++; /* no connection was looked at in between */
    }
    uint64_t gone = now - s->last;
    if (gone >= s->tick) {
        s->clock += gone < 2 * s->tick ? gone : 2 * s->tick;
        s->pass++;
        s->last = now;
        for (uint32_t i = 0; i < table_slots(&r->conns); i++) {
            struct conn *c = table_at(&r->conns, i);
            if (c)
                look(c);
        }
        gone = 0;
    }
    int64_t left = (int64_t)(s->tick - gone);
    return timeout_ns < 0 || timeout_ns > left ? left : timeout_ns;
}
