/* uring.c - the io_uring backend: one enter a turn.
 *
 * Owns: when the kernel is entered, and how long a turn sleeps. Called by: reactor.c through
 * `struct backend`. Never: end a run, or let a descriptor be closed, while the kernel has more of
 * it than notifications. The backend's rules, and its other files, are in uring.h.
 */
#define _GNU_SOURCE
#include "uring.h"

#include <errno.h>
#include <sys/eventfd.h>

#define ORPHAN_POLL_NS 10000000

/* Who found no place in the queue, or no memory, is served again after so long at most. */
#define RETRY_NS 1000000

/* ---- entering ---- */

static struct __kernel_timespec timespec_of(int64_t ns)
{
    return (struct __kernel_timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
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

/* ---- turns ---- */

/* EAGAIN and EBUSY: the kernel could not take more before completions are read. */
static int relieve(struct azc_reactor *r)
{
    r->stats.enters++;
    io_uring_get_events(&uring_of(r)->ring);
    if (!uring_harvest(r))
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
        uring_flush(r);
        int64_t ns = timeout_ns;
        if (u->orphans) {
            uring_reap_orphans(r);
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
        bool nothing = !uring_harvest(r);
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
    if (!uring_bring_up(c))
        mark_dirty(c);
    enter_now(r);
    uring_harvest(r);
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
        uring_flush(r);
        if (io_uring_sq_ready(&u->ring) || i == 0)
            enter_now(r);
        uring_harvest(r);
    }
    u->no_send = true;
    for (int i = 0; i < 1000 && u->inflight; i++) {
        if (i % 8 == 0) {
            struct io_uring_sqe *sqe = uring_get_sqe(r);
            if (sqe) {
                io_uring_prep_cancel64(sqe, 0, IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL);
                set_ud(sqe, UD_CANCEL, 0);
            }
        }
        if (i < 4)
            enter_now(r);
        else
            enter_wait(r, 1000000);
        uring_harvest(r);
    }
    enter_now(r);
    uring_harvest(r);
    uring_unregister_fd(u);
    uring_dig_grave(r);
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
            uring_cancel(r, UD_OUT, c->pub.token, 0);
        if (c->armed && (!c->cancelling || i % 8 == 7))
            c->cancelling = uring_cancel(r, UD_CONN, c->pub.token, 0);
        if (c->rq && (!c->cancel_rq_sent || i % 8 == 7))
            c->cancel_rq_sent = uring_cancel(r, UD_REQ, c->rq->slot.token, 0);
        if (i < 4)
            enter_now(r);
        else
            enter_wait(r, 1000000);
        uring_harvest(r);
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
            uring_reap_orphans(r);
        int64_t left = now < deadline ? (int64_t)(deadline - now) : 0;
        enter_wait(r, left > ORPHAN_POLL_NS ? ORPHAN_POLL_NS : left);
        uring_harvest(r);
        if (!left)
            break;
    }
    if (!mine)
        uring_unregister_fd(u);
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
