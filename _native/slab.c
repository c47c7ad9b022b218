/* slab.c - memory for bytes that write() copies.
 *
 * Owns: the blocks and their free lists. Used by: sendq.c (take), optable.c (give back).
 * Our own memory and not malloc's: a heap that a batch of writes fills and empties each turn is
 * trimmed and faulted in again by glibc, measured 3.4 minor faults and 8 us a 16 KiB request. Last
 * in, first out, so the next write finds warm cache lines. Never: give a chunk back while a request
 * may read it; that is op_check's decision alone.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define BLOCK (256u << 10)

static size_t class_bytes(int k)
{
    return (size_t)512 << k;
}

static struct chunk *carve(struct slab *s, size_t bytes)
{
    if (s->fresh_left < bytes) {
        void **more = realloc(s->blocks, (s->n_blocks + 1) * sizeof *more);
        if (!more)
            return NULL;
        s->blocks = more;
        void *mem = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mem == MAP_FAILED)
            return NULL;
        s->blocks[s->n_blocks++] = mem;
        s->fresh = mem;
        s->fresh_left = BLOCK;
    }
    struct chunk *k = (struct chunk *)s->fresh;
    s->fresh += bytes;
    s->fresh_left -= bytes;
    return k;
}

struct chunk *chunk_new(struct azc_reactor *r, size_t want)
{
    if (fault(r, AZC_FAULT_OP_NOMEM))
        return NULL;
    size_t need = want + sizeof(struct chunk);
    int k = 0;
    while (k < SLAB_CLASSES && class_bytes(k) < need)
        k++;
    struct chunk *c;
    size_t total;
    if (k == SLAB_CLASSES) {
        total = need;
        c = malloc(total);
        k = -1;
    } else {
        total = class_bytes(k);
        c = r->slab.free[k];
        if (c)
            r->slab.free[k] = c->next;
        else
            c = carve(&r->slab, total);
    }
    if (!c)
        return NULL;
    memset(&c->op, 0, sizeof c->op);
    c->op.kind = OP_CHUNK;
    c->next = NULL;
    c->cap = total - sizeof *c;
    c->used = 0;
    c->size_class = k;
    return c;
}

void chunk_free(struct azc_reactor *r, struct chunk *c)
{
    if (c->size_class < 0) {
        free(c);
        return;
    }
    c->next = r->slab.free[c->size_class];
    r->slab.free[c->size_class] = c;
}

void slab_destroy(struct slab *s)
{
    for (size_t i = 0; i < s->n_blocks; i++)
        munmap(s->blocks[i], BLOCK);
    free(s->blocks);
    memset(s, 0, sizeof *s);
}
