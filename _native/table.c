/* table.c - slots with generations.
 *
 * Owns: the memory of operations, requests and connections. Used by: conn.c, optable.c, the
 * backends. A token is slot | generation << 32, so a completion that comes after its slot was given
 * to somebody else finds nothing (liburing#1462). Never: move an element; Python and the kernel
 * hold addresses.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK 256u
#define NONE UINT32_MAX
#define GENERATIONS 0xffffffu /* 24 bits: the width that fits beside a type in a user_data */

void table_init(struct table *t, size_t size)
{
    memset(t, 0, sizeof *t);
    t->size = (size + 63) & ~(size_t)63;
    t->free_head = NONE;
}

static struct slot *slot_at(const struct table *t, uint32_t i)
{
    return (struct slot *)(t->chunks[i / CHUNK] + (size_t)(i % CHUNK) * t->size);
}

static int grow(struct table *t)
{
    char **more = realloc(t->chunks, (t->n_chunks + 1) * sizeof *more);
    if (!more)
        return -1;
    t->chunks = more;
    char *mem = aligned_alloc(64, CHUNK * t->size);
    if (!mem)
        return -1;
    memset(mem, 0, CHUNK * t->size);
    t->chunks[t->n_chunks++] = mem;
    for (uint32_t i = CHUNK; i-- > 0;) {
        uint32_t n = (t->n_chunks - 1) * CHUNK + i;
        struct slot *s = slot_at(t, n);
        s->token = n | (uint64_t)1 << 32;
        s->next_free = t->free_head;
        t->free_head = n;
    }
    return 0;
}

void *table_new(struct table *t)
{
    if (t->free_head == NONE && grow(t) < 0)
        return NULL;
    struct slot *s = slot_at(t, t->free_head);
    t->free_head = s->next_free;
    memset(s + 1, 0, t->size - sizeof *s);
    s->used = 1;
    t->live++;
    return s;
}

void table_free(struct table *t, void *element)
{
    struct slot *s = element;
    uint64_t gen = ((s->token >> 32) + 1) & GENERATIONS;
    s->token = (uint32_t)s->token | (gen ? gen : 1) << 32;
    s->used = 0;
    s->next_free = t->free_head;
    t->free_head = (uint32_t)s->token;
    t->live--;
}

void *table_get(const struct table *t, uint64_t token)
{
    uint32_t i = (uint32_t)token;
    if (i >= t->n_chunks * CHUNK)
        return NULL;
    struct slot *s = slot_at(t, i);
    return s->used && s->token == token ? s : NULL;
}

void *table_at(const struct table *t, uint32_t i)
{
    struct slot *s = slot_at(t, i);
    return s->used ? s : NULL;
}

uint32_t table_slots(const struct table *t)
{
    return t->n_chunks * CHUNK;
}

void table_destroy(struct table *t)
{
    for (uint32_t i = 0; i < t->n_chunks; i++)
        free(t->chunks[i]);
    free(t->chunks);
    memset(t, 0, sizeof *t);
    t->free_head = NONE;
}
