/* uring_regions.c - which place of the ring's table of buffers a region of registered memory has.
 *
 * Owns: that table. Called by: uring_submit.c for a request whose memory lies in a region, and
 * before each walk; reactor.c through `struct backend` where a region is asked for by name. Never:
 * empty a place that a prepared request may name.
 */
#define _GNU_SOURCE
#include "uring.h"

#include <errno.h>

/* Newer than liburing 2.3's header; the kernel refuses what it does not know. */
#define ZC_FIXED (1u << 2) /* IORING_RECVSEND_FIXED_BUF */

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
void uring_sweep_regions(struct uring *u)
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
void uring_from_region(struct azc_reactor *r, struct io_uring_sqe *sqe, const struct region *g)
{
    int index = region_index(uring_of(r), g);
    if (index < 0)
        return;
    sqe->ioprio |= ZC_FIXED;
    sqe->buf_index = (uint16_t)index;
    r->stats.fixed_requests++;
}

/* Asked for by name: a refusal of before may have been of a limit that was raised since. */
int uring_region(struct azc_reactor *r, uint64_t id)
{
    struct uring *u = uring_of(r);
    struct region g;
    if (!u || u->tid != thread_id())
        return -ENXIO;
    if (!region_by_id(id, &g))
        return -ENOENT;
    uring_sweep_regions(u);
    for (uint32_t i = 0; i < u->n_regions; i++)
        if (u->regions[i].id == id && u->regions[i].error)
            u->regions[i].id = 0;
    int rc = region_index(u, &g);
    return rc < 0 ? rc : 0;
}
