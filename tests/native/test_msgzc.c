/* test_msgzc.c - what the error queue tells of MSG_ZEROCOPY's sends, with a kernel that the test
 * plays: `sendmsg` accepts everything, `recvmmsg` hands out entries that the test made.
 *
 * Compiled and run by tests/test_native.py with the sources in _native/. Which ids a range names
 * is test_errqueue.c; here it is what a range says: the copied flag of entries that met in the
 * queue and became one, entries that say nothing of memory, and entries of somebody else.
 */
#define _GNU_SOURCE
#include "internal.h"

#include "check.h"

#include <errno.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct entry {
    int level, type;
    uint32_t cut; /* so many bytes of it are missing */
    struct sock_extended_err e;
};

static struct entry waiting[64];
static unsigned n_waiting, n_given;

ssize_t sendmsg(int fd, const struct msghdr *m, int flags)
{
    size_t n = 0;
    (void)fd, (void)flags;
    for (size_t i = 0; i < m->msg_iovlen; i++)
        n += m->msg_iov[i].iov_len;
    return (ssize_t)n;
}

int recvmmsg(int fd, struct mmsghdr *m, unsigned count, int flags, struct timespec *timeout)
{
    unsigned n = 0;
    (void)fd, (void)timeout;
    CHECK(flags & MSG_ERRQUEUE && flags & MSG_DONTWAIT);
    for (; n < count && n_given < n_waiting; n++, n_given++) {
        struct entry *w = &waiting[n_given];
        struct cmsghdr *cm = CMSG_FIRSTHDR(&m[n].msg_hdr);
        CHECK(cm);
        cm->cmsg_level = w->level;
        cm->cmsg_type = w->type;
        cm->cmsg_len = CMSG_LEN(sizeof w->e) - w->cut;
        memcpy(CMSG_DATA(cm), &w->e, sizeof w->e - w->cut);
        m[n].msg_hdr.msg_controllen = CMSG_SPACE(sizeof w->e);
    }
    if (n)
        return (int)n;
    errno = EAGAIN;
    return -1;
}

static void tell(uint32_t lo, uint32_t hi, unsigned code)
{
    struct entry *w = &waiting[n_waiting++];
    *w = (struct entry){.level = SOL_IP, .type = IP_RECVERR};
    w->e = (struct sock_extended_err){
        .ee_origin = SO_EE_ORIGIN_ZEROCOPY, .ee_code = (uint8_t)code, .ee_info = lo, .ee_data = hi};
}

static void read_all(struct conn *c)
{
    unsigned n = n_waiting;
    CHECK(msgzc_read(c) == n && n_given == n_waiting);
    n_waiting = n_given = 0;
}

static char memory[4096];
enum { SIZE = 1000, OPS = 40 };
static azc_op *ops[OPS];

/* A connection with `n` sends outstanding, of one operation each. */
static struct conn *sent(uint32_t n, int adaptive)
{
    int err;
    azc_config cfg = {.backend = AZC_EPOLL,
                      .zerocopy = 1,
                      .adaptive = (uint32_t)adaptive,
                      .max_request = SIZE,
                      .zc_transport_cap = 1 << 20,
                      .zc_loop_cap = 1 << 20};
    azc_reactor *r = azc_open(&cfg, &err);
    CHECK(r);
    azc_conn *pub = azc_conn_open(r, socket(AF_INET, SOCK_STREAM, 0), AZC_STREAM, 0);
    CHECK(pub && pub->fd >= 0);
    pub->zc_ok = 1;
    pub->zc_threshold = 0;
    struct conn *c = (struct conn *)((char *)pub - offsetof(struct conn, pub));
    CHECK(msgzc_ready(c) && n <= OPS);
    for (uint32_t i = 0; i < n; i++) {
        struct gathered g;
        ops[i] = azc_submit_one(pub, memory, SIZE);
        CHECK(ops[i] && sendq_gather(c, &g) == 0 && g.zc);
        struct req *q = req_new(c, &g);
        CHECK(q && msgzc_send(q, &c->q.msg) == SIZE);
        req_first(q, SIZE, true);
        CHECK(ops[i]->state == AZC_SENT);
    }
    CHECK(c->pub.pinned == n * SIZE && c->eq.count == n);
    return c;
}

static void over(struct conn *c)
{
    azc_reactor *r = c->r;
    int fd = c->pub.fd;
    CHECK(!c->pub.pinned && !r->stats.notifications_outstanding && !c->eq.count);
    azc_conn_close(&c->pub, ECONNABORTED);
    close(fd);
    CHECK(azc_close(r) == 0);
}

static void are(uint32_t from, uint32_t to, unsigned state, unsigned path)
{
    for (uint32_t i = from; i < to; i++)
        CHECK(ops[i]->state == state && ops[i]->path == path);
}

/* Fails when: only the first of a range is released, or is told how it went; or the flag is not
 * read. */
static void one_range_speaks_for_all_of_it(unsigned code, unsigned path)
{
    struct conn *c = sent(10, 0);
    tell(2, 6, code);
    read_all(c);
    are(0, 2, AZC_SENT, 0);
    are(2, 7, AZC_RELEASED, path);
    are(7, 10, AZC_SENT, 0);
    CHECK(c->pub.path == path && c->pub.pinned == 5 * SIZE);
    CHECK(c->r->stats.copied_reports == (path == AZC_PATH_COPIED ? 5 : 0));
    tell(7, 9, 0); /* another entry, another flag */
    tell(0, 1, SO_EE_CODE_ZEROCOPY_COPIED);
    read_all(c);
    are(2, 7, AZC_RELEASED, path);
    are(7, 10, AZC_RELEASED, AZC_PATH_ZC);
    are(0, 2, AZC_RELEASED, AZC_PATH_COPIED);
    over(c);
}

/* Two in a row decide, also where they come as one entry. Fails when: a range counts once. */
static void a_range_is_as_many_reports(void)
{
    struct conn *c = sent(2, 1);
    tell(0, 0, SO_EE_CODE_ZEROCOPY_COPIED);
    read_all(c);
    CHECK(!c->path_copies);
    tell(1, 1, 0);
    read_all(c);
    CHECK(!c->path_copies);
    over(c);
    c = sent(2, 1);
    tell(0, 1, SO_EE_CODE_ZEROCOPY_COPIED);
    read_all(c);
    CHECK(c->path_copies);
    over(c);
}

/* More entries than one call fetches, over both families. Fails when: it is read once. */
static void the_queue_is_read_until_it_is_empty(void)
{
    struct conn *c = sent(OPS, 0);
    for (uint32_t i = OPS; i-- > 0;) {
        tell(i, i, i % 2 ? SO_EE_CODE_ZEROCOPY_COPIED : 0);
        if (i % 3) {
            waiting[n_waiting - 1].level = SOL_IPV6;
            waiting[n_waiting - 1].type = IPV6_RECVERR;
        }
    }
    read_all(c);
    for (uint32_t i = 0; i < OPS; i++)
        are(i, i + 1, AZC_RELEASED, i % 2 ? AZC_PATH_COPIED : AZC_PATH_ZC);
    over(c);
}

/* Fails when: one_entry does not look at the origin, the error, the level, or the length. */
static void what_is_no_notification_releases_nothing(void)
{
    struct conn *c = sent(3, 0);
    tell(0, 2, 0);
    waiting[0].e.ee_origin = SO_EE_ORIGIN_ICMP;
    tell(0, 2, 0);
    waiting[1].e.ee_errno = ENOMSG;
    tell(0, 2, 0);
    waiting[2].type = IP_PKTINFO;
    tell(0, 2, 0);
    waiting[3].cut = 4;
    tell(0, 2, 0);
    waiting[4].level = SOL_SOCKET;
    read_all(c);
    are(0, 3, AZC_SENT, 0);
    CHECK(c->pub.pinned == 3 * SIZE && c->pub.zc_ok);
    tell(0, 2, 0);
    read_all(c);
    are(0, 3, AZC_RELEASED, AZC_PATH_ZC);
    over(c);
}

/* Somebody else sends zero-copy on the socket. Fails when: range_is_free goes on. */
static void an_id_that_was_never_given_out_ends_zero_copy(void)
{
    struct conn *c = sent(3, 0);
    tell(1, 4, SO_EE_CODE_ZEROCOPY_COPIED);
    read_all(c);
    are(0, 1, AZC_SENT, 0);
    are(1, 3, AZC_RELEASED, AZC_PATH_COPIED);
    CHECK(!c->pub.zc_ok);
    tell(0, 0, 0);
    read_all(c);
    are(0, 1, AZC_RELEASED, AZC_PATH_ZC);
    c->eq.count = 0; /* the stranger's */
    over(c);
}

int main(void)
{
    one_range_speaks_for_all_of_it(SO_EE_CODE_ZEROCOPY_COPIED, AZC_PATH_COPIED);
    one_range_speaks_for_all_of_it(0, AZC_PATH_ZC);
    a_range_is_as_many_reports();
    the_queue_is_read_until_it_is_empty();
    what_is_no_notification_releases_nothing();
    an_id_that_was_never_given_out_ends_zero_copy();
    return 0;
}
