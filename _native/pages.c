/* pages.c - the memory of pools.
 *
 * Owns: how a mapping must look so that sending from it, registered, is cheap. Used by: pool.py.
 *
 * A registered region that consists of nothing but pages larger than 4 KiB is one piece a large
 * page to the kernel, which then charges a socket for each part it sends not the part, but all that
 * lies before it in its page, up to 2 MiB (io_sg_from_iter, 6.18): two parts of 4,000 bytes fill
 * the send buffer, and CPU time a byte is 10 to 25 times as much. So plain memory is never made of
 * transparent huge pages, and huge pages that were asked for have one small page behind them in the
 * same region: then the kernel leaves the pages as they are.
 */
#include "aiozc.h"

#include <sys/mman.h>
#include <unistd.h>

#define HUGE_BYTES ((size_t)2 << 20)
#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif

static size_t page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static char *map_at(char *at, size_t len, int flags)
{
    char *p = mmap(at, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static char *map_huge(size_t len)
{
    size_t room = len + page() + HUGE_BYTES;
    char *whole = map_at(NULL, room, MAP_NORESERVE);
    if (!whole)
        return NULL;
    size_t before = -(size_t)whole % HUGE_BYTES, end = before + len + page();
    char *base = map_at(whole + before, len, MAP_FIXED | MAP_HUGETLB | MAP_HUGE_2MB);
    if (!base) {
        munmap(whole, room);
        return NULL;
    }
    if (before)
        munmap(whole, before);
    if (end < room)
        munmap(whole + end, room - end);
    (void)madvise(base + len, page(), MADV_NOHUGEPAGE);
    return base;
}

/* `huge`: `len` is a multiple of 2 MiB, and the region to register is a page longer. NULL: errno.
 */
char *azc_map(size_t len, int huge)
{
    if (huge)
        return map_huge(len);
    char *base = map_at(NULL, len, 0);
    if (base)
        (void)madvise(base, len, MADV_NOHUGEPAGE); /* EINVAL: this kernel has none */
    return base;
}

void azc_unmap(char *base, size_t len, int huge)
{
    munmap(base, len);
    if (huge)
        munmap(base + len, page());
}
