/* errqueue.c - which request a range of MSG_ZEROCOPY's notification ids is about. Makes no system
 * call.
 *
 * Owns: one socket's outstanding ids. Called by: msgzc.c. The kernel numbers the zero-copy sends of
 * a socket that it accepted 0, 1, 2, ... in 32 bits, and tells ranges of numbers whose memory is
 * free: of one send or of many, in any order, each number once. A send that failed has no number
 * (a datagram's may have one all the same: errq_skip).
 *
 * Ids from `base` on are kept in a ring; those released in the middle are 0 there until all before
 * them are. Every comparison is of differences, so the numbers may wrap around.
 *
 * Never: believe a range. What was never issued, or was released before, is nothing.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* More sends than that outstanding on one socket go by copying (optmem_max allows far fewer). */
#define IDS_MAX (1u << 20)

static uint64_t *at(const struct errq *e, uint32_t i)
{
    return &e->tokens[(e->head + i) & (e->cap - 1)];
}

/* Room for one more id: asked for before the send, for afterwards it is too late to refuse. */
int errq_reserve(struct errq *e)
{
    if (e->count < e->cap)
        return 0;
    uint32_t cap = e->cap ? e->cap * 2 : 16;
    uint64_t *more = cap > IDS_MAX ? NULL : malloc(cap * sizeof *more);
    if (!more)
        return -ENOMEM;
    for (uint32_t i = 0; i < e->count; i++)
        more[i] = *at(e, i);
    free(e->tokens);
    e->tokens = more;
    e->cap = cap;
    e->head = 0;
    return 0;
}

/* The kernel accepted a send for this request. There is room (errq_reserve). */
void errq_issued(struct errq *e, uint64_t token)
{
    *at(e, e->count++) = token;
}

/* What of a range [lo, hi] is outstanding here; and how far it goes beyond the last id issued. */
struct errq_range errq_clip(const struct errq *e, uint32_t lo, uint32_t hi)
{
    struct errq_range found = {.first = lo};
    if (hi - lo > INT32_MAX)
        return found;
    int64_t from = (int32_t)(lo - e->base), to = from + (hi - lo), end = e->count;
    if (to >= end)
        found.beyond = (uint32_t)(to - end) + 1;
    if (from < 0)
        from = 0;
    if (to >= end)
        to = end - 1;
    found.first = e->base + (uint32_t)from;
    found.n = to >= from ? (uint32_t)(to - from) + 1 : 0;
    return found;
}

/* The request of an id that errq_clip found: once, then 0. */
uint64_t errq_take(struct errq *e, uint32_t id)
{
    uint32_t i = id - e->base;
    if (i >= e->count)
        return 0;
    uint64_t token = *at(e, i);
    *at(e, i) = 0;
    while (e->count && !*at(e, 0)) {
        e->head = (e->head + 1) & (e->cap - 1);
        e->base++;
        e->count--;
    }
    return token;
}

/* So many ids behind the last one went to sends that are nobody's, and are released already. False:
 * they cannot be counted, so no more may be issued. */
bool errq_skip(struct errq *e, uint32_t n)
{
    if (!e->count) {
        e->base += n;
        return true;
    }
    for (; n; n--) {
        if (errq_reserve(e) < 0)
            return false;
        errq_issued(e, 0);
    }
    return true;
}

void errq_destroy(struct errq *e)
{
    free(e->tokens);
    memset(e, 0, sizeof *e);
}
