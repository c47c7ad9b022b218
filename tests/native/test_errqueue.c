/* test_errqueue.c - the bookkeeping of MSG_ZEROCOPY's ids, without a socket.
 *
 * Compiled and run by tests/test_native.py with the sources in _native/. The oracle is an array
 * with one byte an id: outstanding, or released. "Fails when" names the line of errqueue.c whose
 * removal is seen.
 */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            fprintf(stderr, "%s:%d: not true: %s\n", __func__, __LINE__, #x);                      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Tokens are the ids themselves, with a bit set so that none is 0. */
#define TOKEN(id) ((uint64_t)1 << 40 | (id))

static void issue(struct errq *e, uint32_t n)
{
    while (n--) {
        CHECK(errq_reserve(e) == 0);
        errq_issued(e, TOKEN(e->base + e->count));
    }
}

/* Release what a range names; how many requests that were. */
static uint32_t release(struct errq *e, uint32_t lo, uint32_t hi)
{
    uint32_t found = 0;
    struct errq_range g = errq_clip(e, lo, hi);
    for (uint32_t i = 0; i < g.n; i++) {
        uint64_t token = errq_take(e, g.first + i);
        CHECK(!token || token == TOKEN(g.first + i));
        found += token != 0;
    }
    return found;
}

static struct errq starting_at(uint32_t id)
{
    return (struct errq){.base = id};
}

/* Fails when: an id is released by its place in the row and not by its number. */
static void ranges_in_any_order(uint32_t start)
{
    struct errq e = starting_at(start);
    issue(&e, 10);
    CHECK(release(&e, start + 4, start + 6) == 3);
    CHECK(e.base == start && e.count == 10);
    CHECK(release(&e, start + 9, start + 9) == 1);
    CHECK(release(&e, start, start + 3) == 4);
    CHECK(e.base == start + 7 && e.count == 3);
    issue(&e, 100); /* the ring grows with a hole in it */
    CHECK(release(&e, start + 7, start + 8) == 2);
    CHECK(e.base == start + 10 && e.count == 100);
    CHECK(release(&e, start + 10, start + 109) == 100);
    CHECK(!e.count && e.base == start + 110);
    errq_destroy(&e);
}

/* Fails when: errq_take does not empty its place; errq_clip does not cut a range's front. */
static void each_id_once(uint32_t start)
{
    struct errq e = starting_at(start);
    issue(&e, 8);
    CHECK(release(&e, start + 2, start + 3) == 2);
    CHECK(release(&e, start + 2, start + 3) == 0);
    CHECK(release(&e, start + 1, start + 4) == 2);
    CHECK(release(&e, start, start + 7) == 4);
    CHECK(release(&e, start, start + 7) == 0 && !e.count);
    issue(&e, 2);
    CHECK(release(&e, start, start + 8) == 1); /* the front was released long ago */
    CHECK(e.count == 1);
    errq_destroy(&e);
}

/* Fails when: errq_clip does not cut a range's end, or says nothing of what it cut. */
static void what_was_never_issued(uint32_t start)
{
    struct errq e = starting_at(start);
    CHECK(errq_clip(&e, start, start).n == 0 && errq_clip(&e, start, start).beyond == 1);
    issue(&e, 3);
    struct errq_range g = errq_clip(&e, start + 1, start + 6);
    CHECK(g.first == start + 1 && g.n == 2 && g.beyond == 4);
    g = errq_clip(&e, start + 5, start + 6);
    CHECK(g.n == 0 && g.beyond == 4);
    g = errq_clip(&e, start + 2, start + 1); /* no range at all */
    CHECK(g.n == 0 && g.beyond == 0);
    g = errq_clip(&e, start - 5, start - 2);
    CHECK(g.n == 0 && g.beyond == 0);
    CHECK(release(&e, start - 100, start + 100) == 3 && !e.count);
    errq_destroy(&e);
}

/* A datagram that failed has an id: the next one's is behind it. Fails when: errq_skip does not
 * count them, with ids outstanding or without. */
static void ids_of_sends_that_failed(uint32_t start)
{
    struct errq e = starting_at(start);
    CHECK(errq_skip(&e, 3) && e.base == start + 3 && !e.count);
    issue(&e, 2); /* 3, 4 */
    CHECK(errq_skip(&e, 2) && e.count == 4);
    issue(&e, 1); /* 7 */
    CHECK(release(&e, start + 5, start + 6) == 0);
    CHECK(release(&e, start + 7, start + 7) == 1 && e.count == 2 + 2 + 1);
    CHECK(release(&e, start + 3, start + 4) == 2);
    CHECK(!e.count && e.base == start + 8);
    errq_destroy(&e);
}

/* Fails when: there is no bound. */
static void a_bounded_number_is_outstanding(void)
{
    struct errq e = starting_at(0);
    uint32_t n = 0;
    for (; n < (1u << 22) && errq_reserve(&e) == 0; n++)
        errq_issued(&e, TOKEN(n));
    CHECK(n == 1u << 20 && !errq_skip(&e, 1));
    CHECK(release(&e, 0, 0) == 1 && errq_skip(&e, 1) && !errq_skip(&e, 1));
    CHECK(release(&e, 0, UINT32_MAX) == 0); /* longer than any range that there can be */
    CHECK(release(&e, 0, n) == n - 1 && !e.count);
    errq_destroy(&e);
}

static uint64_t seed = 88172645463325252u;

static uint32_t random_below(uint32_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 11) % n;
}

/* Everything at once, against the oracle, round the end of 32 bits. */
static void at_random(uint32_t start)
{
    enum { TOTAL = 100000 };
    static char outstanding[TOTAL];
    struct errq e = starting_at(start);
    uint32_t issued = 0, released = 0, skipped = 0;
    memset(outstanding, 0, sizeof outstanding);
    while (issued < TOTAL || e.count) {
        uint32_t n = random_below(20);
        if (random_below(3) && issued + n < TOTAL) {
            memset(outstanding + issued, 1, n);
            issue(&e, n);
            issued += n;
        } else if (!random_below(20) && issued + n < TOTAL) {
            CHECK(errq_skip(&e, n));
            issued += n;
            skipped += n;
        } else if (issued + 20 > TOTAL && !e.count) {
            break;
        } else {
            uint32_t window = issued < 60 ? issued : 60, at = window ? random_below(window) : 0;
            uint32_t lo = issued - window + at, hi = lo + random_below(12), expected = 0;
            if (issued + 20 > TOTAL)
                lo = 0, hi = issued - 1;
            else if (e.count > 200)
                lo = e.base - start, hi = lo + 100;
            for (uint32_t i = lo; i <= hi && i < issued; i++) {
                expected += (uint32_t)outstanding[i];
                outstanding[i] = 0;
            }
            CHECK(release(&e, start + lo, start + hi) == expected);
            released += expected;
        }
        CHECK(e.base + e.count == start + issued);
        CHECK(!e.count || outstanding[e.base - start]);
    }
    CHECK(released + skipped == issued && released > TOTAL / 2);
    errq_destroy(&e);
}

int main(void)
{
    static const uint32_t starts[] = {
        0, 1, 1000, UINT32_MAX - 5, UINT32_MAX - 50000, INT32_MAX - 3};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        ranges_in_any_order(starts[i]);
        each_id_once(starts[i]);
        what_was_never_issued(starts[i]);
        ids_of_sends_that_failed(starts[i]);
        at_random(starts[i]);
    }
    a_bounded_number_is_outstanding();
    return 0;
}
