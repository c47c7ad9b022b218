/* test_queue.c - the send queue and the operation table without a kernel: the test is the backend.
 *
 * Compiled and run by tests/test_native.py with the sources in _native/. Each check prints what
 * broke and ends the program with 1. A fake backend takes requests by hand, so results can come in
 * any order.
 */
#include "internal.h"

#include "check.h"

#include <errno.h>
#include <string.h>

static azc_reactor *made[64];
static int n_made;

static azc_reactor *make(uint64_t max_request)
{
    int err;
    azc_config cfg = {.backend = AZC_EPOLL,
                      .zerocopy = 1,
                      .max_request = max_request,
                      .zc_eor_bytes = 64 << 10,
                      .zc_transport_cap = UINT64_MAX / 4,
                      .zc_loop_cap = UINT64_MAX / 4};
    azc_reactor *r = azc_open(&cfg, &err);
    CHECK(r && n_made < 64);
    return made[n_made++] = r;
}

static struct conn *connection(azc_reactor *r)
{
    azc_conn *pub = azc_conn_open(r, -1, AZC_STREAM, 0);
    CHECK(pub);
    pub->zc_ok = 1;
    pub->zc_threshold = 0;
    struct conn *c = (struct conn *)((char *)pub - offsetof(struct conn, pub));
    c->want_recv = true;
    return c;
}

static struct req *issue(struct conn *c)
{
    struct gathered g;
    CHECK(sendq_ready(c));
    CHECK(sendq_gather(c, &g) == 0);
    struct req *q = req_new(c, &g);
    CHECK(q && c->rq == q);
    return q;
}

static char memory[1 << 20];

static uint32_t released_events(azc_reactor *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_pending; i++)
        n += r->pending[i].kind == AZC_EV_RELEASED;
    return n;
}

/* A notification before, instead of, and long after the completion it belongs to. */
static void notifications_in_any_order(void)
{
    azc_reactor *r = make(1000);
    struct conn *c = connection(r);
    azc_op *a = azc_submit_one(&c->pub, memory, 1000);
    azc_op *b = azc_submit_one(&c->pub, memory, 1000);
    CHECK(a->state == AZC_QUEUED && c->pub.unsent == 2000);
    struct req *qa = issue(c);
    uint64_t token_a = qa->slot.token;
    CHECK(a->state == AZC_ISSUED && b->state == AZC_QUEUED && c->pub.pinned == 1000);
    req_first(qa, 1000, true);
    CHECK(a->state == AZC_SENT && c->pub.unsent == 1000 && c->pub.pinned == 1000);
    struct req *qb = issue(c);
    req_notif(qb, true, false); /* unannounced: before its first completion */
    CHECK(b->state == AZC_ISSUED && released_events(r) == 0);
    req_first(qb, 1000, true);
    CHECK(b->state == AZC_RELEASED && a->state == AZC_SENT && released_events(r) == 1);
    CHECK(c->pub.pinned == 1000);
    /* The slot of b's request is used again: its late duplicate must find nothing. */
    azc_op *d = azc_submit_one(&c->pub, memory, 10);
    struct req *qd = issue(c);
    CHECK(qd->slot.token != token_a && table_get(&r->reqs, token_a) == qa);
    req_notif(qa, true, true);
    CHECK(a->state == AZC_RELEASED && a->path == AZC_PATH_COPIED);
    CHECK(table_get(&r->reqs, token_a) == NULL);
    CHECK(d->state == AZC_ISSUED && c->pub.pinned == 10);
    req_first(qd, 10, true);
    req_notif(qd, true, false);
    CHECK(c->pub.pinned == 0 && r->reqs.live == 0 && r->stats.notifications_outstanding == 0);
    CHECK(released_events(r) == 3);
}

static void short_results_stay_at_the_head(void)
{
    azc_reactor *r = make(1 << 20);
    struct conn *c = connection(r);
    azc_op *op = azc_submit_one(&c->pub, memory, 5000);
    CHECK(sendq_copy(c, "tail", 4) == 0);
    struct req *q = issue(c);
    CHECK(c->q.in_request == 2);
    req_first(q, 1234, true);
    CHECK(op->sent == 1234 && c->pub.unsent == 5004 - 1234 && c->pub.pinned == 1234);
    CHECK(sendq_at(&c->q, 0)->base == memory + 1234);
    struct req *rest = issue(c);
    req_notif(q, true, false);
    CHECK(op->state == AZC_ISSUED); /* the second request still reads it */
    req_first(rest, 5004 - 1234, true);
    CHECK(op->state == AZC_SENT && c->pub.unsent == 0 && c->q.count == 0);
    req_notif(rest, true, false);
    CHECK(op->state == AZC_RELEASED && c->pub.pinned == 0);
}

static void what_fell_back_goes_by_copying_then_zero_copy_resumes(void)
{
    azc_reactor *r = make(1000);
    struct conn *c = connection(r);
    azc_op *op = azc_submit_one(&c->pub, memory, 3000);
    req_first(issue(c), -ENOMEM, true); /* an error may carry F_MORE: a notification follows */
    CHECK(r->stats.fallbacks[AZC_FALLBACK_ENOMEM] == 1 && op->sent == 0 && c->pub.unsent == 3000);
    struct req *copy = issue(c);
    CHECK(!copy->zc && copy->bytes == 1000 && c->pub.pinned == 0);
    req_first(copy, 1000, false);
    CHECK(op->sent == 1000);
    struct req *again = issue(c);
    CHECK(again->zc && c->pub.pinned == 1000);
    req_first(again, -EOPNOTSUPP, false);
    CHECK(!c->pub.zc_ok && c->pub.pinned == 0);
    req_first(issue(c), 1000, false);
    req_first(issue(c), 1000, false);
    CHECK(op->sent == 3000);
    CHECK(op->state == AZC_SENT); /* the failed first request's notification is still owed */
    CHECK(released_events(r) == 0);
}

static void an_error_fails_once_and_releases_last(void)
{
    azc_reactor *r = make(1000);
    struct conn *c = connection(r);
    azc_op *a = azc_submit_one(&c->pub, memory, 1500);
    azc_op *b = azc_submit_one(&c->pub, memory, 10);
    a->want_sent = b->want_sent = 1;
    struct req *first = issue(c);
    req_first(first, 1000, true);
    struct req *second = issue(c);
    req_first(second, -EPIPE, true);
    CHECK(c->pub.error == -EPIPE && c->pub.unsent == 0 && c->q.count == 0);
    CHECK(a->state == AZC_FAILED && a->error == -EPIPE && a->sent == 1000);
    CHECK(b->state == AZC_FAILED && b->sent == 0);
    CHECK(released_events(r) ==
          0); /* the second request covered both, and its notification is owed */
    req_notif(second, true, false);
    CHECK(released_events(r) == 1 && b->pins == 0 && a->pins == 1);
    req_notif(first, true, false);
    CHECK(released_events(r) == 2 && c->pub.pinned == 0 && r->stats.pinned_bytes == 0);
    CHECK(r->stats.queued_bytes == 0);
}

static void withdraw_only_what_was_never_issued(void)
{
    azc_reactor *r = make(1000);
    struct conn *c = connection(r);
    azc_op *a = azc_submit_one(&c->pub, memory, 1500);
    azc_op *b = azc_submit_one(&c->pub, memory, 700);
    azc_op *d = azc_submit_one(&c->pub, memory, 300);
    struct req *q = issue(c);
    CHECK(!azc_withdraw(&c->pub, a));
    CHECK(azc_withdraw(&c->pub, b));
    CHECK(c->pub.unsent == 1800 && r->stats.queued_bytes == 1800);
    req_first(q, 1000, false);
    struct req *rest = issue(c);
    CHECK(rest->bytes == 800 && rest->n_ops == 2 && rest->ops[0] == a && rest->ops[1] == d);
    req_first(rest, 800, false);
    CHECK(released_events(r) == 2 && c->pub.unsent == 0);
}

static void small_writes_become_one_part_but_never_within_a_request(void)
{
    azc_reactor *r = make(1 << 20);
    struct conn *c = connection(r);
    for (int i = 0; i < 10; i++)
        CHECK(sendq_copy(c, memory, 20) == 0);
    CHECK(c->q.count == 1 && sendq_at(&c->q, 0)->len == 200);
    struct req *q = issue(c);
    CHECK(sendq_copy(c, memory, 20) == 0);
    CHECK(c->q.count == 2 && sendq_at(&c->q, 0)->len == 200 && c->q.in_request == 1);
    req_first(q, 200, false);
    CHECK(c->q.count == 1 && c->pub.unsent == 20);
    for (int i = 0; i < 3000; i++)
        CHECK(sendq_copy(c, memory, 100) == 0);
    CHECK(c->q.count < 40 && c->pub.unsent == 20 + 300000);
    while (c->q.count) {
        struct req *next = issue(c);
        req_first(next, (int32_t)next->bytes, false);
    }
    CHECK(r->stats.queued_bytes == 0);
}

static void a_path_that_copies_is_left_and_probed_again(void)
{
    azc_reactor *r = make(1 << 20);
    struct conn *c = connection(r);
    c->pub.adaptive = 1;
    for (int i = 0; i < COPIED_REPORTS; i++) {
        azc_submit_one(&c->pub, memory, 1 << 20);
        struct req *q = issue(c);
        CHECK(q->zc && q->fresh && c->last_eor);
        req_first(q, 1 << 20, true);
        req_notif(q, true, true);
    }
    uint64_t copied = 0;
    struct req *q;
    for (;;) { /* now by copying, until the next probe is due */
        azc_submit_one(&c->pub, memory, 1 << 20);
        q = issue(c);
        if (q->zc)
            break;
        req_first(q, 1 << 20, false);
        copied += 1 << 20;
    }
    CHECK(copied == PROBE_GAP);
    CHECK(r->stats.fallbacks[AZC_FALLBACK_PATH] == copied >> 20);
    req_first(q, 1 << 20, true);
    req_notif(q, true, false); /* the path does not copy any more */
    for (int i = 0; i < 20; i++) {
        azc_submit_one(&c->pub, memory, 1 << 20);
        q = issue(c);
        CHECK(q->zc);
        req_first(q, 1 << 20, true);
    }
    CHECK(c->pub.path == AZC_PATH_ZC);
}

static void tiny_parts_are_copied_unless_zero_copy_is_forced(void)
{
    azc_reactor *r = make(1 << 20);
    struct conn *c = connection(r);
    azc_iov parts[100];
    for (int i = 0; i < 100; i++)
        parts[i] = (azc_iov){memory, ZC_PART_MIN - 1};
    for (uint64_t threshold = 0; threshold < 2; threshold++) {
        c->pub.zc_threshold = threshold;
        CHECK(azc_submit(&c->pub, parts, 100));
        struct req *q = issue(c);
        CHECK(q->zc == !threshold);
        req_first(q, (int32_t)q->bytes, false);
    }
    for (int i = 0; i < 100; i++)
        parts[i].len = ZC_PART_MIN;
    CHECK(azc_submit(&c->pub, parts, 100));
    struct req *q = issue(c);
    CHECK(q->zc);
    req_first(q, (int32_t)q->bytes, false);
}

/* Fails when: it does not grow, or does not begin anew after one that ended short. */
static void a_request_that_may_not_wait_is_small_where_it_pins(void)
{
    azc_reactor *r = make(1 << 20);
    struct conn *c = connection(r);
    for (int half_closed = 0; half_closed < 2; half_closed++) {
        c->want_recv = half_closed;
        c->half_closed = half_closed;
        azc_submit_one(&c->pub, memory, 1 << 20);
        c->sure = 0;
        static const uint32_t wanted[] = {1, 2, 4, 1, 2}; /* the third one ends short */
        for (int i = 0; i < 5; i++) {
            struct req *q = issue(c);
            CHECK(q->zc && q->bytes == wanted[i] * UNSURE_MAX && c->last_eor);
            req_first(q, (int32_t)q->bytes - (i == 2), false);
        }
        while (c->q.count) {
            struct req *q = issue(c);
            req_first(q, (int32_t)q->bytes, false);
        }
        CHECK(sendq_push(c, memory, 1 << 20, op_new(r, OP_REF, 1 << 20)) == 0);
        struct req *q = issue(c);
        CHECK(!q->zc && q->bytes == 1 << 20);
        req_first(q, (int32_t)q->bytes, false);
    }
}

static void one_unsent_request_a_socket(void)
{
    azc_reactor *r = make(1000);
    struct conn *c = connection(r);
    azc_submit_one(&c->pub, memory, 5000);
    struct req *q = issue(c);
    CHECK(!sendq_ready(c));
    CHECK(sendq_copy(c, "more", 4) == 0);
    CHECK(!sendq_ready(c));
    req_first(q, 1000, true);
    CHECK(sendq_ready(c)); /* notifications outstanding do not hold the stream back */
    q = issue(c);
    CHECK(!sendq_ready(c) && c->pub.pinned == 2000);
}

static void end_of_record_each_so_many_bytes(uint64_t every)
{
    azc_reactor *r = make(1 << 20);
    r->cfg.zc_eor_bytes = every;
    struct conn *c = connection(r);
    uint64_t since = 0, stacks = 0;
    for (int i = 0; i < 200; i++) {
        struct gathered g;
        azc_submit_one(&c->pub, memory, 4000);
        CHECK(sendq_gather(c, &g) == 0 && g.zc);
        since += g.bytes;
        CHECK(g.eor == (every && since >= every));
        if (g.eor)
            since = 0;
        stacks += g.eor;
        req_first(req_new(c, &g), 4000, false);
    }
    CHECK(r->stats.stacks == stacks && (every ? stacks >= 10 : !stacks));
}

static uint32_t bucket_of(azc_reactor *r, struct conn *c, uint64_t ns)
{
    memset(r->stats.release, 0, sizeof r->stats.release);
    azc_submit_one(&c->pub, memory, 4000);
    r->turn = 1000;
    struct req *q = issue(c);
    CHECK(q->zc);
    req_first(q, 4000, true);
    r->turn = 1000 + ns;
    req_notif(q, false, false);
    uint32_t found = AZC_RELEASE_BUCKETS;
    for (uint32_t i = 0; i < AZC_RELEASE_BUCKETS; i++)
        if (r->stats.release[i]) {
            CHECK(r->stats.release[i] == 1 && found == AZC_RELEASE_BUCKETS);
            found = i;
        }
    CHECK(found < AZC_RELEASE_BUCKETS);
    return found;
}

/* Each bucket begins where the header says, and none is skipped. */
static void release_times_fall_into_their_buckets(void)
{
    azc_reactor *r = make(1 << 20);
    struct conn *c = connection(r);
    for (uint32_t n = 0; n < AZC_RELEASE_BUCKETS; n++) {
        uint64_t us = n < 8 ? n : (uint64_t)(8 + n % 8) << (n / 8 - 1);
        CHECK(bucket_of(r, c, us * 1000) == n);
        if (n)
            CHECK(bucket_of(r, c, us * 1000 - 1) == n - 1);
    }
    CHECK(bucket_of(r, c, UINT64_MAX / 2) == AZC_RELEASE_BUCKETS - 1);
    CHECK(r->stats.release_max_ns == UINT64_MAX / 2);
}

static void only_what_a_notification_released_is_timed(void)
{
    azc_reactor *r = make(1 << 20);
    struct conn *c = connection(r);
    uint64_t n = 0;
    azc_submit_one(&c->pub, memory, 4000);
    req_first(issue(c), 1000, false); /* an error's end, without a notification */
    req_drop(issue(c));
    struct req *q = issue(c);
    req_notif(q, true, false); /* it may come first */
    req_first(q, 3000, true);
    for (uint32_t i = 0; i < AZC_RELEASE_BUCKETS; i++)
        n += r->stats.release[i];
    CHECK(n == 1);
}

static void looks(azc_reactor *r, int n)
{
    for (int i = 0; i < n; i++) {
        (void)stall_watch(r, -1);
        r->stall.last -= r->stall.tick; /* as if so much time had gone by */
    }
}

/* Between two looks everything was withdrawn, which is no progress that could be seen. */
static void a_timeout_begins_anew_with_what_is_queued_anew(void)
{
    azc_reactor *r = make(1 << 20);
    struct conn *c = connection(r), *other = connection(r);
    azc_conn_timeout(&c->pub, 8000000000u);
    azc_submit_one(&other->pub, memory, 1000); /* outstanding all the time */
    for (int i = 0; i < 3; i++) {
        azc_op *op = azc_submit_one(&c->pub, memory, 1000);
        looks(r, 6);
        CHECK(!c->pub.error && azc_withdraw(&c->pub, op) == 1);
        looks(r, 20);
    }
    azc_submit_one(&c->pub, memory, 1000);
    looks(r, 6);
    CHECK(!c->pub.error);
    looks(r, 6);
    CHECK(c->pub.error == -ETIMEDOUT && !other->pub.error && r->stats.timeouts == 1);
}

/* Another process has locked what we counted on. Fails when: fell_back learns nothing, or what was
 * learnt does not wear off. */
static void memory_that_is_not_there_lowers_the_cap_for_a_while(void)
{
    azc_reactor *r = make(1000);
    struct conn *c[4];
    struct req *q[4];
    r->cfg.zc_loop_cap = 4000;
    for (int i = 0; i < 4; i++) {
        c[i] = connection(r);
        azc_submit_one(&c[i]->pub, memory, 1000);
        q[i] = issue(c[i]);
        CHECK(q[i]->zc);
    }
    for (int i = 0; i < 3; i++)
        req_first(q[i], 1000, true);
    req_first(q[3], -ENOMEM, true); /* 3000 fit */
    req_notif(q[3], false, false);
    q[3] = issue(c[3]);
    CHECK(!q[3]->zc);
    req_first(q[3], 1000, false);
    azc_submit_one(&c[3]->pub, memory, 1000);
    q[3] = issue(c[3]);
    CHECK(!q[3]->zc && r->stats.fallbacks[AZC_FALLBACK_CAP] == 1);
    req_first(q[3], 1000, false);
    req_notif(q[0], true, false);
    azc_submit_one(&c[0]->pub, memory, 1000);
    q[0] = issue(c[0]);
    CHECK(q[0]->zc && r->stats.pinned_bytes == 3000); /* as much as was there goes on */
    req_first(q[0], 1000, true);
    int copied = 0;
    for (; copied < 1000; copied++) {
        azc_submit_one(&c[3]->pub, memory, 1000);
        q[3] = issue(c[3]);
        if (q[3]->zc)
            break;
        req_first(q[3], 1000, false);
    }
    CHECK(copied > 100 && copied < 300 && r->stats.pinned_bytes == 4000);
    for (int i = 0; i < 3; i++)
        req_notif(q[i], true, false);
    req_first(q[3], -ENOMEM, false); /* not a byte is left: it is tried again all the same */
    CHECK(r->stats.pinned_bytes == 0);
    req_first(issue(c[3]), 1000, false);
    azc_submit_one(&c[0]->pub, memory, 4000 / CAP_LEAST);
    q[0] = issue(c[0]);
    CHECK(q[0]->zc);
}

static void tokens_of_freed_slots_are_stale(void)
{
    struct table t;
    table_init(&t, 128);
    void *held[1000];
    uint64_t tokens[1000];
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 1000; i++) {
            held[i] = table_new(&t);
            tokens[i] = ((struct slot *)held[i])->token;
            CHECK(tokens[i] && tokens[i] >> 56 == 0 && table_get(&t, tokens[i]) == held[i]);
        }
        for (int i = 0; i < 1000; i++) {
            table_free(&t, held[i]);
            CHECK(table_get(&t, tokens[i]) == NULL);
        }
    }
    CHECK(t.live == 0 && table_get(&t, 12345678) == NULL);
    table_destroy(&t);
}

/* What the tests left with the fake kernel ends, and then nothing may be left of anything. */
static void everything_is_given_back(void)
{
    for (int n = 0; n < n_made; n++) {
        azc_reactor *r = made[n];
        for (uint32_t i = 0; i < table_slots(&r->reqs); i++) {
            struct req *q = table_at(&r->reqs, i);
            if (q && !q->first_seen)
                req_first(q, -ECANCELED, false);
            else if (q)
                req_notif(q, false, false);
        }
        CHECK(!r->stats.pinned_bytes && !r->stats.notifications_outstanding);
        CHECK(azc_close(r) == 0);
    }
}

int main(void)
{
    memset(memory, 7, sizeof memory);
    notifications_in_any_order();
    short_results_stay_at_the_head();
    what_fell_back_goes_by_copying_then_zero_copy_resumes();
    an_error_fails_once_and_releases_last();
    withdraw_only_what_was_never_issued();
    small_writes_become_one_part_but_never_within_a_request();
    a_path_that_copies_is_left_and_probed_again();
    tiny_parts_are_copied_unless_zero_copy_is_forced();
    a_request_that_may_not_wait_is_small_where_it_pins();
    one_unsent_request_a_socket();
    end_of_record_each_so_many_bytes(64 << 10);
    end_of_record_each_so_many_bytes(10000);
    end_of_record_each_so_many_bytes(1);
    end_of_record_each_so_many_bytes(0);
    release_times_fall_into_their_buckets();
    only_what_a_notification_released_is_timed();
    a_timeout_begins_anew_with_what_is_queued_anew();
    memory_that_is_not_there_lowers_the_cap_for_a_while();
    tokens_of_freed_slots_are_stale();
    everything_is_given_back();
    return 0;
}
