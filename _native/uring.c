/* uring.c - the io_uring backend: one enter a turn.
 *
 * Owns: the ring and the provided-buffer ring. Called by: reactor.c through `struct backend`.
 * Rules, each measured or from the man pages:
 *  1. SINGLE_ISSUER|DEFER_TASKRUN: only the thread that made the ring enters it. Another thread
 * gets a new ring; what the old one still owes is then learned from SIOCOUTQ (an orphan, see
 * below).
 *  2. wait_nr is 1: with notifications outstanding a larger one hung (kernel ef42b85a5609).
 *  3. EINTR goes back to Python, which runs its signal handlers.
 *  4. A queued SQE is submitted before its descriptor is closed, and harvested, else the peer gets
 * no FIN and a reused descriptor number is hit.
 *  5. A receive is armed again only after its last completion was seen.
 *  6. Only TCP is received by multishot. On a Unix socket a multishot receive may lose the end of
 * the stream where it comes right behind data (6.18.44; axboe/liburing#1549): nothing wakes it any
 * more.
 *
 * Orphans: a notification that belongs to a ring whose thread is gone will never be seen. All bytes
 * up to the request's end being acknowledged by the peer proves that no later change of the memory
 * can reach it: a retransmission of them would be dropped. That is what releases an orphan, or the
 * end of its connection (TCP_CLOSE): there is nothing left to retransmit. After close, reactor.c's
 * duplicate of the descriptor answers for it.
 *
 * A datagram has no acknowledgement, and SIOCOUTQ stops counting it when it is forwarded. But the
 * kernel takes a ring apart only after its last notification, and only then closes what was
 * registered with it. So a run that ends with datagrams pinned registers the write end of a pipe:
 * its read end, the grave, tells when the ring is really gone.
 *
 * Half-closed peers: a request that waits for room polls for it, and the kernel adds POLLRDHUP to
 * what it polls for. Once the peer has closed its side, that poll is always ready: the request is
 * retried 128 times, and then a SEND sleeps in a worker thread of the kernel (one a connection),
 * while a SENDMSG comes back with -EAGAIN (measured, 6.18). So from its end of file on, or from an
 * -EAGAIN, a connection's requests carry MSG_DONTWAIT and room is awaited by a multishot poll,
 * whose edges are real but for the first; likewise while no receive would see the end of
 * file.
 *
 * Quiet requests: a completion of a small send ends the wait that its own enter began, only to be
 * read and waited behind again: two enters a message on a loop with one busy connection
 * (bench/peers.py, rows x1). So where nobody is to be told of its end, it asks for none
 * (CQE_SKIP_SUCCESS). MSG_DONTWAIT lets the kernel do it while it takes it, or not at all, and with
 * MSG_WAITALL less than all of it is a failure, which has a completion, with the bytes that went.
 * So what the kernel took, and no completion tells of, went whole. Kernels that have DEFER_TASKRUN
 * (6.1) do all that.
 *
 * Never: link requests, touch the ring of another thread or of a parent process.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Newer than liburing 2.3's header; the kernel refuses what it does not know. */
#define ZC_REPORT_USAGE (1u << 3) /* IORING_SEND_ZC_REPORT_USAGE, 6.2 */
#define ZC_COPIED (1u << 31)      /* IORING_NOTIF_USAGE_ZC_COPIED */
#define ZC_FIXED (1u << 2)        /* IORING_RECVSEND_FIXED_BUF */

#define UD_CONN 1u
#define UD_REQ 2u
#define UD_CANCEL 3u
#define UD_OUT 4u
#define UD_TYPE(ud) ((unsigned)((ud) >> 56))
#define UD_TOKEN(ud) ((ud) & (((uint64_t)1 << 56) - 1))

#define QUIET 64         /* quiet requests in one enter */
#define RING_REGIONS 256 /* that one ring registers */
#define ORPHAN_POLL_NS 10000000
/* The smallest rings that are tried, three pages in all, as the probe's are; and how long. */
#define SQ_MIN 8
#define CQ_MIN 64
#define NAPS 10
#define NAP_NS 10000000
/* Who found no place in the queue, or no memory, is served again after so long at most. */
#define RETRY_NS 1000000
/* Receive buffers that the kernel has at least; the number doubles when they do not suffice, and is
 * looked at after so many harvests. */
#define GIVEN_MIN 8
#define GIVEN_WINDOW 1024
#define GIVEN_BYTES (768u << 10)

/* glibc has a function for it from 2.30 on only, and wheels are to run with older ones. */
static pid_t thread_id(void)
{
    return (pid_t)syscall(SYS_gettid);
}

struct ring_region {
    uint64_t id; /* 0: free */
    int error;   /* why the kernel refused it */
};

struct quiet {
    uint64_t token;
    uint32_t place; /* in the submission queue */
};

struct uring {
    struct io_uring ring;
    struct quiet quiet[QUIET]; /* in the order of their places */
    uint32_t n_quiet;
    bool may_be_quiet; /* the kernel is new enough */
    /* What is registered at which place of the ring's table of buffers. */
    struct ring_region regions[RING_REGIONS];
    int table;               /* 0: not made; 1: made; < 0: cannot be */
    uint32_t n_regions, hot; /* places used so far; the one that was used last */
    uint64_t epoch;
    struct io_uring_buf_ring *br;
    size_t br_bytes;
    pid_t tid;
    uint32_t inflight; /* completions owed, notifications not counted */
    uint32_t orphans;
    bool no_send;
    bool quick; /* the thread has the ring's descriptor registered */
    int grave;  /* -1: none */
    int evfd;   /* for another loop's epoll, likewise */
    /* Receive buffers that the kernel has; how many it should have, and the most that one harvest
     * took since that was looked at. */
    uint32_t given, wanted, peak, harvests;
    uint64_t received; /* bytes in the buffers of this harvest */
};

static struct uring *uring_of(struct azc_reactor *r)
{
    return r->be_data;
}

static struct __kernel_timespec timespec_of(int64_t ns)
{
    return (struct __kernel_timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
}

/* ---- set-up ---- */

static int ring_init(struct uring *u, uint32_t sq_entries, uint32_t cq_entries)
{
    static const unsigned flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG |
            IORING_SETUP_SUBMIT_ALL,
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_SUBMIT_ALL,
        IORING_SETUP_SUBMIT_ALL,
        0,
    };
    int rc = -EINVAL;
    for (size_t i = 0; i < sizeof flags / sizeof *flags && rc == -EINVAL; i++) {
        struct io_uring_params p = {.flags = flags[i] | IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP,
                                    .cq_entries = cq_entries};
        rc = io_uring_queue_init_params(sq_entries, &u->ring, &p);
        u->may_be_quiet =
            !rc && p.flags & IORING_SETUP_DEFER_TASKRUN && p.features & IORING_FEAT_CQE_SKIP;
    }
    return rc;
}

static int buf_ring_init(struct azc_reactor *r, struct uring *u)
{
    u->br_bytes = r->n_bufs * sizeof(struct io_uring_buf);
    u->br = mmap(NULL, u->br_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (u->br == MAP_FAILED)
        return -ENOMEM;
    struct io_uring_buf_reg reg = {.ring_addr = (uintptr_t)u->br, .ring_entries = r->n_bufs};
    int rc = io_uring_register_buf_ring(&u->ring, &reg, 0);
    if (rc < 0) {
        munmap(u->br, u->br_bytes);
        return rc;
    }
    io_uring_buf_ring_init(u->br);
    collect_spare(r);
    u->wanted = GIVEN_MIN;
    return 0;
}

static int rings_init(struct azc_reactor *r, struct uring *u, uint32_t sq, uint32_t cq)
{
    int rc = ring_init(u, sq, cq);
    if (rc < 0)
        return rc;
    rc = buf_ring_init(r, u);
    if (rc < 0)
        io_uring_queue_exit(&u->ring);
    return rc;
}

/* Without CAP_IPC_LOCK kernels before 5.12 and from 6.14 on charge a ring to RLIMIT_MEMLOCK, of the
 * user, some 200 KiB with our default sizes; many systems allow 64 KiB. So where it does not fit it
 * is made smaller: queues that are full are handled anyway. What a closed ring, or one that could
 * not be made, was charged comes back after an RCU grace period, so the last size is tried for a
 * while. */
static int rings_that_fit(struct azc_reactor *r, struct uring *u)
{
    uint32_t sq = r->cfg.sq_entries, cq = r->cfg.cq_entries;
    int naps = 0;
    for (;;) {
        int rc = rings_init(r, u, sq, cq);
        if (rc != -ENOMEM)
            return rc;
        if (sq > SQ_MIN || cq > CQ_MIN) {
            sq = sq / 8 > SQ_MIN ? sq / 8 : sq < SQ_MIN ? sq : SQ_MIN;
            cq = cq / 8 > CQ_MIN ? cq / 8 : cq < CQ_MIN ? cq : CQ_MIN;
        } else if (naps++ < NAPS) {
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        } else {
            return rc;
        }
    }
}

/* The kernel takes buffers in the order in which it was given them. So it is given no more than are
 * used, and those that were used last: they lie in the cache. */
static void give_buffers(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    int mask = io_uring_buf_ring_mask(r->n_bufs), added = 0;
    while (u->given < u->wanted && r->n_spare) {
        uint16_t i = r->spare[--r->n_spare];
        io_uring_buf_ring_add(u->br, r->bufs + i * r->buf_stride, (unsigned)r->buf_size, i, mask,
                              added++);
        u->given++;
    }
    if (added)
        io_uring_buf_ring_advance(u->br, added);
}

static void adjust_buffers(struct azc_reactor *r, uint32_t taken, bool refused)
{
    struct uring *u = uring_of(r);
    u->given -= taken;
    if (taken > u->peak)
        u->peak = taken;
    if (refused && u->wanted < r->n_bufs && u->received < GIVEN_BYTES)
        u->wanted *= 2;
    u->received = 0;
    if (++u->harvests < GIVEN_WINDOW)
        return;
    if (u->peak * 2 < u->wanted)
        u->wanted = u->peak * 2 > GIVEN_MIN ? u->peak * 2 : GIVEN_MIN;
    u->harvests = u->peak = 0;
}

static void uring_destroy(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    if (r->pid != getpid()) {
        close(u->ring.ring_fd); /* the mapping was not inherited (ring_dontfork) */
    } else {
        io_uring_queue_exit(&u->ring);
        munmap(u->br, u->br_bytes);
    }
    if (u->grave >= 0)
        close(u->grave);
    if (u->evfd >= 0)
        close(u->evfd);
    free(u);
    r->be_data = NULL;
}

static unsigned harvest(struct azc_reactor *r);

/* The ring's thread is not ours: read what it left in the completion queue, orphan the rest. */
static void retire(struct azc_reactor *r)
{
    uint32_t n = 0;
    harvest(r);
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

static uint32_t count_orphans(struct azc_reactor *r)
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

static void reap_orphans(struct azc_reactor *r)
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

/* A registered descriptor is a number in this thread's table: liburing, closing the ring in another
 * thread, would take that thread's own away. It also keeps the ring until this thread ends. */
static void unregister_fd(struct uring *u)
{
    if (u->quick && io_uring_unregister_ring_fd(&u->ring) == 1)
        u->quick = false;
}

/* The run ends; if another thread has the next one, it must learn when datagrams are free. */
static void dig_grave(struct azc_reactor *r)
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

static int uring_attach(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    if (u && u->tid == thread_id()) {
        u->no_send = false;
        if (!u->quick)
            u->quick = io_uring_register_ring_fd(&u->ring) == 1;
        return 0;
    }
    if (u)
        retire(r);
    u = calloc(1, sizeof *u);
    if (!u)
        return -ENOMEM;
    u->grave = u->evfd = -1;
    int rc = rings_that_fit(r, u);
    if (rc < 0) {
        free(u);
        return rc;
    }
    u->tid = thread_id();
    (void)io_uring_ring_dontfork(&u->ring); /* a child that entered it would get -EEXIST */
    u->quick = io_uring_register_ring_fd(&u->ring) == 1; /* saves a look-up an enter; optional */
    r->be_data = u;
    u->orphans = count_orphans(r);
    return 0;
}

/* ---- entering ---- */

static unsigned sq_flags(struct uring *u)
{
    return __atomic_load_n(u->ring.sq.kflags, __ATOMIC_ACQUIRE);
}

static int enter_now(struct azc_reactor *r)
{
    int rc;
    r->stats.enters++;
    if (faults_enter(r, &uring_of(r)->ring, &rc))
        return rc;
    return io_uring_submit_and_get_events(&uring_of(r)->ring);
}

/* Submit, and sleep until one completion or the time is over (< 0: no limit, and no timer to set).
 */
static int enter_wait(struct azc_reactor *r, int64_t ns)
{
    int rc;
    ns = faults_wait(r, ns);
    struct __kernel_timespec ts = timespec_of(ns);
    struct io_uring_cqe *cqe;
    r->stats.enters++;
    if (faults_enter(r, &uring_of(r)->ring, &rc))
        return rc;
    if (ns < 0)
        return io_uring_submit_and_wait(&uring_of(r)->ring, 1);
    return io_uring_submit_and_wait_timeout(&uring_of(r)->ring, &cqe, 1, &ts, NULL);
}

static struct io_uring_sqe *get_sqe(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    int rc;
    if (sqe)
        return sqe;
    r->stats.enters++;
    if (!faults_enter(r, &u->ring, &rc))
        io_uring_submit(&u->ring); /* the queue is full; what stays in it is submitted later */
    return io_uring_get_sqe(&u->ring);
}

/* ---- completions ---- */

static void on_stream(struct conn *c, int32_t res, unsigned flags)
{
    struct azc_reactor *r = c->r;
    uint64_t token = c->pub.token;
    if (res > 0) {
        emit(r, token, AZC_EV_RECV, res, flags >> IORING_CQE_BUFFER_SHIFT);
        return;
    }
    if (flags & IORING_CQE_F_BUFFER)
        spare_buffer(r, flags >> IORING_CQE_BUFFER_SHIFT);
    if (res == -ENOBUFS) {
        r->stats.enobufs++;
    } else if (res == 0) {
        c->eof = c->half_closed = true;
        mark_dirty(c);
        emit(r, token, AZC_EV_RECV, 0, 0);
    } else if (res != -ECANCELED && res != -EINTR && res != -EAGAIN) {
        c->want_recv = false;
        emit(r, token, AZC_EV_RECV, res, 0);
    }
}

/* The reader takes it out himself (azc_recv); the poll is made anew after that. */
static void on_readable(struct conn *c, int32_t res)
{
    if (res < 0)
        return; /* it was cancelled */
    c->half_closed |= (res & (POLLRDHUP | POLLHUP)) != 0;
    emit(c->r, c->pub.token, AZC_EV_READABLE, 0, 0);
}

/* A datagram, header and all; an error ends neither the socket nor, in the end, its receiving. */
static void on_datagram(struct conn *c, int32_t res, unsigned flags)
{
    struct azc_reactor *r = c->r;
    if (res >= (int32_t)sizeof(struct io_uring_recvmsg_out) && flags & IORING_CQE_F_BUFFER) {
        emit(r, c->pub.token, AZC_EV_DATAGRAM, res, flags >> IORING_CQE_BUFFER_SHIFT);
        return;
    }
    if (flags & IORING_CQE_F_BUFFER)
        spare_buffer(r, flags >> IORING_CQE_BUFFER_SHIFT);
    if (res == -ENOBUFS)
        r->stats.enobufs++;
    else if (res < 0 && res != -ECANCELED && res != -EINTR && res != -EAGAIN)
        emit(r, c->pub.token, AZC_EV_DATAGRAM, res, 0);
}

static void on_listen(struct conn *c, int32_t res)
{
    if (c->pub.shared && res > 0) {
        accept_some(c);
        return;
    }
    if (res == -ECANCELED || res == -EAGAIN || res == -EINTR || res == -ECONNABORTED)
        return;
    if (res < 0)
        c->want_recv = false; /* the caller starts it again after a pause */
    emit(c->r, c->pub.token, AZC_EV_ACCEPT, res, 0);
}

static void on_conn(struct azc_reactor *r, uint64_t token, int32_t res, unsigned flags)
{
    struct uring *u = uring_of(r);
    struct conn *c = table_get(&r->conns, token);
    if (!(flags & IORING_CQE_F_MORE))
        u->inflight--;
    if (!c || c->closed) {
        if (flags & IORING_CQE_F_BUFFER)
            spare_buffer(r, flags >> IORING_CQE_BUFFER_SHIFT);
        else if (c && c->pub.kind == AZC_LISTEN && !c->pub.shared && res >= 0)
            close(res); /* accepted for a listener that is gone */
        if (c && !(flags & IORING_CQE_F_MORE))
            c->armed = false;
        if (c)
            conn_maybe_free(c);
        return;
    }
    if (!(flags & IORING_CQE_F_MORE))
        c->armed = c->cancelling = false;
    if (c->pub.kind == AZC_STREAM && c->polled)
        on_readable(c, res);
    else if (c->pub.kind == AZC_STREAM)
        on_stream(c, res, flags);
    else if (c->pub.kind == AZC_DATAGRAM)
        on_datagram(c, res, flags);
    else if (c->pub.kind == AZC_LISTEN)
        on_listen(c, res);
    else if (c->pub.kind == AZC_CONNECT && res != -ECANCELED)
        connected(c); /* or not: SO_ERROR tells */
    else if (res > 0)
        poll_fired(c);
    if (!c->armed && c->want_recv && !c->eof)
        mark_dirty(c);
}

/* A socket that was full is writable again; or it is not, and the next send says so. */
static void on_out(struct azc_reactor *r, uint64_t token, unsigned flags)
{
    struct conn *c = table_get(&r->conns, token);
    if (!(flags & IORING_CQE_F_MORE))
        uring_of(r)->inflight--;
    if (!c)
        return;
    if (!(flags & IORING_CQE_F_MORE))
        c->out_armed = false;
    c->want_out = false;
    if (c->closed)
        conn_maybe_free(c);
    else
        mark_dirty(c);
}

static void on_req(struct azc_reactor *r, uint64_t token, int32_t res, unsigned flags)
{
    struct req *q = table_get(&r->reqs, token);
    if (!(flags & IORING_CQE_F_NOTIF))
        uring_of(r)->inflight--;
    if (!q)
        return; /* a stray notification of an earlier use of the slot */
    if (flags & IORING_CQE_F_NOTIF) {
        bool copied = (uint32_t)res & ZC_COPIED;
        if (!faults_notif(r, token, copied))
            req_notif(q, true, copied);
        return;
    }
    res = faults_answer(q, res);
    struct conn *c = q->conn;
    if (q->dgram) {
        req_first(q, res, flags & IORING_CQE_F_MORE);
        return;
    }
    bool whole = res >= 0 && (uint64_t)res >= q->bytes;
    c->loud = q->quiet || (c->loud && !whole);
    if (q->quiet) {
        ; /* the rest goes by a request that waits for room */
    } else if (res == -EAGAIN || (!c->rq_waits && res >= 0 && !whole)) {
        c->half_closed |= c->rq_waits;
        c->want_out = true;
        mark_dirty(c);
    }
    req_first(q, res, flags & IORING_CQE_F_MORE);
}

/* A request that is cancelled until it ends. -ENOENT: it was just between two attempts. -EALREADY:
 * a worker thread has it, and was woken; if it had sent something by then it goes on with the rest
 * (io_wq_submit_work takes its -EAGAIN as "again"). */
static void on_cancel(struct azc_reactor *r, uint64_t about, int32_t res)
{
    struct conn *c = about && res < 0 ? table_get(&r->conns, about) : NULL;
    if (!c || !c->rq)
        return;
    c->cancel_rq_sent = false;
    mark_dirty(c);
}

/* What the kernel took, and no completion told of, went whole. */
static void settle_quiet(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    uint32_t taken = __atomic_load_n(u->ring.sq.khead, __ATOMIC_ACQUIRE), n = 0;
    while (n < u->n_quiet && (int32_t)(taken - u->quiet[n].place) > 0) {
        struct req *q = table_get(&r->reqs, u->quiet[n++].token);
        if (!q)
            continue; /* it was told of */
        u->inflight--;
        req_first(q, (int32_t)q->bytes, false);
    }
    u->n_quiet -= n;
    memmove(u->quiet, u->quiet + n, u->n_quiet * sizeof *u->quiet);
}

static unsigned harvest(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    struct io_uring_cqe *cqe;
    unsigned head, n = 0;
    uint32_t taken = 0;
    uint64_t refused = r->stats.enobufs, told = r->stats.notifications;
    r->turn = 0;
    faults_harvest(r, false);
    bool overflow = sq_flags(u) & IORING_SQ_CQ_OVERFLOW; /* then some are not in the queue yet */
    r->stats.cq_overflows += overflow;
    io_uring_for_each_cqe(&u->ring, head, cqe)
    {
        n++;
        if (cqe->flags & IORING_CQE_F_BUFFER) {
            taken++;
            u->received += cqe->res > 0 ? (uint32_t)cqe->res : 0;
        }
        if (UD_TYPE(cqe->user_data) == UD_CONN)
            on_conn(r, UD_TOKEN(cqe->user_data), cqe->res, cqe->flags);
        else if (UD_TYPE(cqe->user_data) == UD_REQ)
            on_req(r, UD_TOKEN(cqe->user_data), cqe->res, cqe->flags);
        else if (UD_TYPE(cqe->user_data) == UD_OUT)
            on_out(r, UD_TOKEN(cqe->user_data), cqe->flags);
        else if (UD_TYPE(cqe->user_data) == UD_CANCEL)
            on_cancel(r, UD_TOKEN(cqe->user_data), cqe->res);
    }
    io_uring_cq_advance(&u->ring, n);
    if (u->n_quiet && !overflow)
        settle_quiet(r);
    r->stats.notification_turns += r->stats.notifications != told;
    adjust_buffers(r, taken, r->stats.enobufs != refused);
    return n;
}

/* ---- regions ---- */

static int put_region(struct uring *u, uint32_t at, const char *base, size_t len)
{
    struct iovec iov = {(void *)base, len};
    __u64 tag = 0;
    int rc = io_uring_register_buffers_update_tag(&u->ring, at, &iov, &tag, 1);
    return rc < 0 ? rc : 0;
}

/* Regions that were dropped give their memory back to the system: nobody will send from them. Not
 * while a prepared request may name a place of the table: the kernel looks it up when it takes the
 * request. Numbers are never used again, so a place that is still taken harms nobody. */
static void sweep_regions(struct uring *u)
{
    struct region found;
    if (u->epoch == regions_epoch() || io_uring_sq_ready(&u->ring))
        return;
    u->epoch = regions_epoch();
    for (uint32_t i = 0; i < u->n_regions; i++) {
        if (!u->regions[i].id || region_by_id(u->regions[i].id, &found))
            continue;
        if (!u->regions[i].error)
            put_region(u, i, NULL, 0);
        u->regions[i].id = 0;
    }
}

static int free_place(struct uring *u)
{
    for (uint32_t i = 0; i < u->n_regions; i++)
        if (!u->regions[i].id)
            return (int)i;
    return u->n_regions < RING_REGIONS ? (int)u->n_regions++ : -1;
}

/* Where the region lies in the ring's table, registered now if it was not; or -errno. */
static int region_index(struct uring *u, const struct region *g)
{
    uint32_t at = u->hot;
    if (u->regions[at].id != g->id)
        for (at = 0; at < u->n_regions && u->regions[at].id != g->id; at++)
            ;
    if (at < u->n_regions) {
        u->hot = at;
        return u->regions[at].error ? u->regions[at].error : (int)at;
    }
    if (!u->table) {
        int rc = io_uring_register_buffers_sparse(&u->ring, RING_REGIONS);
        u->table = rc < 0 ? rc : 1;
    }
    if (u->table < 0)
        return u->table;
    int place = free_place(u);
    if (place < 0)
        return -ENOSPC;
    int rc = put_region(u, (uint32_t)place, g->base, g->len);
    u->regions[place] = (struct ring_region){g->id, rc};
    return rc < 0 ? rc : place;
}

/* The request sends registered memory: no page is looked up and pinned for it. */
static void from_region(struct azc_reactor *r, struct io_uring_sqe *sqe, const struct region *g)
{
    int index = region_index(uring_of(r), g);
    if (index < 0)
        return;
    sqe->ioprio |= ZC_FIXED;
    sqe->buf_index = (uint16_t)index;
    r->stats.fixed_requests++;
}

/* Asked for by name: a refusal of before may have been of a limit that was raised since. */
static int uring_region(struct azc_reactor *r, uint64_t id)
{
    struct uring *u = uring_of(r);
    struct region g;
    if (!u || u->tid != thread_id())
        return -ENXIO;
    if (!region_by_id(id, &g))
        return -ENOENT;
    sweep_regions(u);
    for (uint32_t i = 0; i < u->n_regions; i++)
        if (u->regions[i].id == id && u->regions[i].error)
            u->regions[i].id = 0;
    int rc = region_index(u, &g);
    return rc < 0 ? rc : 0;
}

/* ---- requests ---- */

static void set_ud(struct io_uring_sqe *sqe, unsigned type, uint64_t token)
{
    sqe->user_data = (uint64_t)type << 56 | token;
}

/* `about`: the connection to be told if the request runs on, or 0. */
static bool cancel(struct azc_reactor *r, unsigned type, uint64_t token, uint64_t about)
{
    struct io_uring_sqe *sqe = get_sqe(r);
    if (!sqe)
        return false;
    io_uring_prep_cancel64(sqe, (uint64_t)type << 56 | token, 0);
    set_ud(sqe, UD_CANCEL, about);
    return true;
}

static bool arm(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct io_uring_sqe *sqe = get_sqe(r);
    if (!sqe)
        return false;
    switch (c->pub.kind) {
    case AZC_STREAM:
        c->polled = c->announce;
        if (c->polled) {
            io_uring_prep_poll_add(sqe, c->pub.fd, POLLIN | POLLRDHUP);
            break;
        }
        if (c->single)
            io_uring_prep_recv(sqe, c->pub.fd, NULL, 0, 0);
        else
            io_uring_prep_recv_multishot(sqe, c->pub.fd, NULL, 0, 0);
        sqe->flags |= IOSQE_BUFFER_SELECT;
        sqe->buf_group = 0;
        break;
    case AZC_DATAGRAM:
        io_uring_prep_recvmsg_multishot(sqe, c->pub.fd, &c->dq.recv_msg, 0);
        sqe->flags |= IOSQE_BUFFER_SELECT;
        sqe->buf_group = 0;
        break;
    case AZC_LISTEN:
        if (c->pub.shared) {
            /* The kernel queues accepts as exclusive waiters, and one that stays armed is always
             * the first: one process would get every connection, however busy it is. A poll wakes
             * all. */
            io_uring_prep_poll_add(sqe, c->pub.fd, POLLIN);
            break;
        }
        io_uring_prep_multishot_accept(sqe, c->pub.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        break;
    case AZC_CONNECT:
        io_uring_prep_poll_add(sqe, c->pub.fd, POLLOUT);
        break;
    default:
        io_uring_prep_poll_add(sqe, c->pub.fd, POLLIN);
    }
    set_ud(sqe, UD_CONN, c->pub.token);
    c->armed = true;
    uring_of(r)->inflight++;
    return true;
}

/* It cannot be given back: let it do nothing. */
static void give_up_sqe(struct io_uring_sqe *sqe)
{
    if (!sqe)
        return;
    io_uring_prep_nop(sqe);
    set_ud(sqe, UD_CANCEL, 0);
}

/* One copy that is all there is to send, and nobody waits to be told that it went. */
static bool goes_quietly(struct conn *c, const struct gathered *g)
{
    struct uring *u = uring_of(c->r);
    return u->may_be_quiet && u->n_quiet < QUIET && g->parts == 1 && !g->zc && !c->loud &&
           c->pub.kind == AZC_STREAM && !c->pub.notify && c->q.count == 1 && may_wait(c) &&
           sendq_at(&c->q, 0)->op->kind == OP_CHUNK && g->bytes == c->pub.unsent;
}

static void ask_quietly(struct uring *u, struct req *q, struct io_uring_sqe *sqe)
{
    q->quiet = true;
    sqe->flags |= IOSQE_CQE_SKIP_SUCCESS;
    u->quiet[u->n_quiet++] = (struct quiet){q->slot.token, u->ring.sq.sqe_tail - 1};
}

static bool send_request(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct sendq *sq = &c->q;
    struct gathered g;
    struct io_uring_sqe *sqe = get_sqe(r);
    if (!sqe || sendq_gather(c, &g) < 0)
        goto later;
    struct req *q = req_new(c, &g);
    if (!q)
        goto later;
    bool quiet = goes_quietly(c, &g);
    c->rq_waits = may_wait(c) && !quiet;
    int flags = MSG_NOSIGNAL | (c->rq_waits ? MSG_WAITALL : MSG_DONTWAIT) | (g.eor ? MSG_EOR : 0);
    if (quiet)
        flags |= MSG_WAITALL;
    if (g.parts == 1 && g.zc)
        io_uring_prep_send_zc(sqe, c->pub.fd, sq->iov->iov_base, sq->iov->iov_len, flags, 0);
    else if (g.parts == 1)
        io_uring_prep_send(sqe, c->pub.fd, sq->iov->iov_base, sq->iov->iov_len, flags);
    else if (g.zc)
        io_uring_prep_sendmsg_zc(sqe, c->pub.fd, &sq->msg, (unsigned)flags);
    else
        io_uring_prep_sendmsg(sqe, c->pub.fd, &sq->msg, (unsigned)flags);
    if (g.zc)
        sqe->ioprio |= ZC_REPORT_USAGE;
    if (g.zc && g.region.id)
        from_region(r, sqe, &g.region);
    set_ud(sqe, UD_REQ, q->slot.token);
    faults_request(c, q, sqe);
    if (quiet && sqe->opcode == IORING_OP_SEND && sqe->len == g.bytes) /* no fault's */
        ask_quietly(uring_of(r), q, sqe);
    uring_of(r)->inflight++;
    return true;
later:
    give_up_sqe(sqe);
    return false;
}

/* Zero-copy datagrams, one request each, as far as the socket's buffer surely takes them: were one
 * of them refused (MSG_DONTWAIT), the next might overtake it. False: try again. */
static bool send_datagrams(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct dgram_turn turn = {0};
    for (struct dgram *d = c->dq.head; d && dgramq_goes_zc(c, d); d = d->next) {
        if (!dgramq_fits(c, d, &turn, 1))
            break;
        struct io_uring_sqe *sqe = get_sqe(r);
        struct req *q = sqe ? req_new_dgram(c, d) : NULL;
        if (!q) {
            give_up_sqe(sqe);
            return false;
        }
        struct msghdr *m = &zdgram_of(d)->msg;
        int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
        if (m->msg_iovlen == 1 && !m->msg_control) { /* cheaper by some 0.1 us */
            io_uring_prep_send_zc(sqe, c->pub.fd, m->msg_iov->iov_base, m->msg_iov->iov_len, flags,
                                  0);
            if (m->msg_name)
                io_uring_prep_send_set_addr(sqe, m->msg_name, (uint16_t)m->msg_namelen);
        } else {
            io_uring_prep_sendmsg_zc(sqe, c->pub.fd, m, (unsigned)flags);
        }
        sqe->ioprio |= ZC_REPORT_USAGE;
        struct region region;
        if (m->msg_iovlen && m->msg_iovlen <= r->cfg.fixed_parts && regions_any() &&
            regions_prefix(m->msg_iov, (uint32_t)m->msg_iovlen, &region) == m->msg_iovlen)
            from_region(r, sqe, &region);
        set_ud(sqe, UD_REQ, q->slot.token);
        faults_request(c, q, sqe);
        uring_of(r)->inflight++;
    }
    return true;
}

/* Bring one connection from what is wanted to what is asked of the kernel. False: try again. */
static bool bring_up(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct uring *u = uring_of(r);
    bool blind = c->rq_waits && !may_wait(c);
    if ((c->cancel_rq || blind) && c->rq && !c->cancel_rq_sent) {
        if (!cancel(r, UD_REQ, c->rq->slot.token, c->pub.token))
            return false;
        c->cancel_rq_sent = true;
    }
    if (c->want_recv && !c->armed && !c->eof && !r->detaching) {
        if (!arm(c))
            return false;
    } else if (c->armed && !c->cancelling && (!c->want_recv || c->polled != c->announce)) {
        if (!cancel(r, UD_CONN, c->pub.token, 0))
            return false;
        c->cancelling = true;
    }
    if (c->dq.head)
        dgramq_flush(c);
    if (dgramq_ready(c) && !u->no_send && !send_datagrams(c))
        return false;
    if (c->out_armed && !c->want_out && may_wait(c))
        cancel(r, UD_OUT, c->pub.token, 0);
    if (c->want_out && !c->out_armed && !u->no_send) {
        struct io_uring_sqe *sqe = get_sqe(r);
        if (!sqe)
            return false;
        if (c->pub.kind == AZC_STREAM)
            io_uring_prep_poll_multishot(sqe, c->pub.fd, POLLOUT);
        else
            io_uring_prep_poll_add(sqe, c->pub.fd, POLLOUT);
        set_ud(sqe, UD_OUT, c->pub.token);
        c->out_armed = true;
        u->inflight++;
    }
    return !sendq_ready(c) || u->no_send || send_request(c);
}

static void flush(struct azc_reactor *r)
{
    struct conn *c = r->dirty, *next;
    r->turn = 0;
    give_buffers(r);
    sweep_regions(uring_of(r));
    r->dirty = NULL;
    for (; c; c = next) {
        next = c->dirty_next;
        c->dirty = false;
        if (c->closed)
            conn_maybe_free(c);
        else if (!bring_up(c))
            mark_dirty(c);
    }
}

/* ---- turns ---- */

/* EAGAIN and EBUSY: the kernel could not take more before completions are read. */
static int relieve(struct azc_reactor *r)
{
    r->stats.enters++;
    io_uring_get_events(&uring_of(r)->ring);
    if (!harvest(r))
        usleep(500);
    return 0;
}

static int turn(struct azc_reactor *r, int64_t timeout_ns)
{
    struct uring *u = uring_of(r);
    uint64_t deadline = timeout_ns > 0 ? now_ns() + (uint64_t)timeout_ns : 0;
    for (int round = 0;; round++) {
        /* A quiet request that an earlier enter did not take: by now somebody may wait for its end,
         * which no completion tells. */
        bool unsettled = u->n_quiet;
        flush(r);
        int64_t ns = timeout_ns;
        if (u->orphans) {
            reap_orphans(r);
            if (ns < 0 || ns > ORPHAN_POLL_NS)
                ns = ORPHAN_POLL_NS;
        }
        if (r->dirty && (ns < 0 || ns > RETRY_NS))
            ns = RETRY_NS;
        if (anything(r) || unsettled)
            ns = 0;
        int rc = 0;
        if (ns)
            rc = enter_wait(r, ns);
        else if (io_uring_sq_ready(&u->ring) ||
                 sq_flags(u) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW))
            rc = enter_now(r);
        bool nothing = !harvest(r);
        if (rc == -EAGAIN || rc == -EBUSY)
            rc = relieve(r);
        if (anything(r) || rc == -EINTR)
            return rc == -EINTR ? rc : 0;
        if (rc < 0 && rc != -ETIME)
            return rc;
        if (ns && nothing) /* the time is over, or a signal came: an enter that also submitted */
            return 0;      /* does not answer EINTR. Python looks after both */
        if (!timeout_ns) {
            if (!r->dirty || round >= 4)
                return 0; /* Python has work: the rest of a long send goes on next turn */
        } else if (timeout_ns > 0) {
            uint64_t now = now_ns();
            if (now >= deadline)
                return 0;
            timeout_ns = (int64_t)(deadline - now);
        }
    }
}

static bool uring_idle(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    return !u->orphans && !io_uring_sq_ready(&u->ring) && !io_uring_cq_ready(&u->ring) &&
           !(sq_flags(u) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW));
}

/* On a loop that is not ours: what a turn itself completes is not to wake that loop once more. The
 * kernel says that work came before it looks whether to signal, so what came in between is seen.
 * Nothing else would tell of a request that the kernel did not take. */
static int uring_wait(struct azc_reactor *r, int64_t timeout_ns)
{
    struct uring *u = uring_of(r);
    if (u->evfd < 0)
        return turn(r, timeout_ns);
    io_uring_cq_eventfd_toggle(&u->ring, false);
    int rc = turn(r, timeout_ns);
    io_uring_cq_eventfd_toggle(&u->ring, true);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (io_uring_cq_ready(&u->ring) || io_uring_sq_ready(&u->ring) ||
        sq_flags(u) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW))
        (void)eventfd_write(u->evfd, 1);
    return rc;
}

/* A writer that would be paused is spared a turn of the loop if the socket takes it all at once. */
static void uring_send_now(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct uring *u = uring_of(r);
    if (!u || u->no_send || !sendq_ready(c) || u->tid != thread_id())
        return; /* also when the socket is full: it tells when it is not any more */
    if (!bring_up(c))
        mark_dirty(c);
    enter_now(r);
    harvest(r);
}

static bool any_sendable(struct azc_reactor *r)
{
    for (struct conn *c = r->dirty; c; c = c->dirty_next)
        if (sendq_ready(c) || dgramq_ready(c))
            return true;
    return false;
}

/* The end of a run: what is queued goes out as far as the sockets take it, then all but
 * notifications is cancelled and harvested; the rest of each queue is exact and waits for the next
 * run. */
static int uring_detach(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    if (!u || u->tid != thread_id())
        return 0;
    for (int i = 0; i < 1000 && (i == 0 || any_sendable(r)); i++) {
        flush(r);
        if (io_uring_sq_ready(&u->ring) || i == 0)
            enter_now(r);
        harvest(r);
    }
    u->no_send = true;
    for (int i = 0; i < 1000 && u->inflight; i++) {
        if (i % 8 == 0) {
            struct io_uring_sqe *sqe = get_sqe(r);
            if (sqe) {
                io_uring_prep_cancel64(sqe, 0, IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL);
                set_ud(sqe, UD_CANCEL, 0);
            }
        }
        if (i < 4)
            enter_now(r);
        else
            enter_wait(r, 1000000);
        harvest(r);
    }
    enter_now(r);
    harvest(r);
    unregister_fd(u);
    dig_grave(r);
    return u->inflight ? -EBUSY : 0;
}

static bool with_kernel(const struct conn *c)
{
    return c->armed || c->rq || c->out_armed || c->dq.issued;
}

static int uring_quiesce(struct conn *c)
{
    struct azc_reactor *r = c->r;
    struct uring *u = uring_of(r);
    if (!u || !with_kernel(c))
        return 0;
    if (u->tid != thread_id())
        return -EXDEV; /* cannot happen while detach did its work; never close blindly */
    for (int i = 0; i < 1000 && with_kernel(c); i++) {
        if (c->out_armed && i % 8 == 0)
            cancel(r, UD_OUT, c->pub.token, 0);
        if (c->armed && (!c->cancelling || i % 8 == 7))
            c->cancelling = cancel(r, UD_CONN, c->pub.token, 0);
        if (c->rq && (!c->cancel_rq_sent || i % 8 == 7))
            c->cancel_rq_sent = cancel(r, UD_REQ, c->rq->slot.token, 0);
        if (i < 4)
            enter_now(r);
        else
            enter_wait(r, 1000000);
        harvest(r);
    }
    return with_kernel(c) ? -EBUSY : 0;
}

static int uring_drain(struct azc_reactor *r, int64_t timeout_ns)
{
    uint64_t deadline = now_ns() + (uint64_t)(timeout_ns > 0 ? timeout_ns : 0);
    struct uring *u = uring_of(r);
    bool mine = u->tid == thread_id();
    if (!mine) {
        int rc =
            uring_attach(r); /* a ring of our own, to wait in; the old one's debts are orphans */
        if (rc < 0)
            return rc;
        u = uring_of(r);
    }
    while (r->stats.notifications_outstanding) {
        uint64_t now = now_ns();
        if (u->orphans)
            reap_orphans(r);
        int64_t left = now < deadline ? (int64_t)(deadline - now) : 0;
        enter_wait(r, left > ORPHAN_POLL_NS ? ORPHAN_POLL_NS : left);
        harvest(r);
        if (!left)
            break;
    }
    if (!mine)
        unregister_fd(u);
    return 0;
}

/* The descriptor of a ring with DEFER_TASKRUN does not wake an epoll: its completions are only made
 * by entering it. The eventfd is signalled when work for that is there. */
static int uring_wake_fd(struct azc_reactor *r)
{
    struct uring *u = uring_of(r);
    if (u->evfd >= 0)
        return u->evfd;
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0)
        return -errno;
    int rc = io_uring_register_eventfd(&u->ring, fd);
    if (rc < 0) {
        close(fd);
        return rc;
    }
    return u->evfd = fd;
}

const struct backend uring_backend = {
    .attach = uring_attach,
    .wait = uring_wait,
    .idle = uring_idle,
    .detach = uring_detach,
    .quiesce = uring_quiesce,
    .drain = uring_drain,
    .send_now = uring_send_now,
    .region = uring_region,
    .wake_fd = uring_wake_fd,
    .destroy = uring_destroy,
};
