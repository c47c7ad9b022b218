/* regions.c - memory that rings may register, found by address. One list for the process.
 *
 * Owns: which ranges are regions, and their numbers, which are never used again. A region is told
 * by Python (pool.py) and is used by whoever sends memory that lies in it; each ring registers it
 * when it first meets it (uring_regions.c), for a region is of no ring. So loops in several threads
 * read the list while Python changes it: it has a lock, taken once a request and only while there
 * are regions.
 *
 * Never: touches the memory, or decides how long it lives. A dropped region is not found any more;
 * what the kernel still reads of it is kept by the operations that sent it.
 */
#include "internal.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct region list[AZC_REGIONS_MAX]; /* by address */
static uint32_t count;
static uint64_t last_id, epoch;

static void lock(void)
{
    pthread_mutex_lock(&mutex);
}

static void unlock(void)
{
    pthread_mutex_unlock(&mutex);
}

/* Another thread may hold the lock when this one forks. */
__attribute__((constructor)) static void survive_fork(void)
{
    pthread_atfork(lock, unlock, unlock);
}

/* The first region that begins behind `p`. */
static uint32_t behind(const char *p)
{
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (list[middle].base <= p)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The number of the new region; 0: there are too many. */
uint64_t azc_region_add(const char *base, size_t len)
{
    uint64_t id = 0;
    lock();
    if (count < AZC_REGIONS_MAX) {
        uint32_t at = behind(base);
        memmove(&list[at + 1], &list[at], (count - at) * sizeof *list);
        id = ++last_id;
        list[at] = (struct region){base, len, id};
        __atomic_store_n(&count, count + 1, __ATOMIC_RELEASE);
    }
    unlock();
    return id;
}

static uint32_t index_of(uint64_t id)
{
    uint32_t i = 0;
    while (i < count && list[i].id != id)
        i++;
    return i;
}

int azc_region_drop(uint64_t id)
{
    int rc = -ENOENT;
    lock();
    uint32_t at = index_of(id);
    if (at < count) {
        memmove(&list[at], &list[at + 1], (count - at - 1) * sizeof *list);
        __atomic_store_n(&count, count - 1, __ATOMIC_RELEASE);
        __atomic_store_n(&epoch, epoch + 1, __ATOMIC_RELEASE);
        rc = 0;
    }
    unlock();
    return rc;
}

bool regions_any(void)
{
    return __atomic_load_n(&count, __ATOMIC_ACQUIRE) != 0;
}

/* Changes whenever a region is dropped. */
uint64_t regions_epoch(void)
{
    return __atomic_load_n(&epoch, __ATOMIC_ACQUIRE);
}

bool region_by_id(uint64_t id, struct region *found)
{
    lock();
    uint32_t at = index_of(id);
    bool is = at < count;
    if (is)
        *found = list[at];
    unlock();
    return is;
}

/* The region that has all of [p, p + n) in it. */
bool region_find(const void *p, size_t n, struct region *found)
{
    lock();
    uint32_t at = behind(p);
    bool is = at && region_holds(&list[at - 1], p, n);
    if (is)
        *found = list[at - 1];
    unlock();
    return is;
}

/* How many of the first parts lie in one region, which is told. */
uint32_t regions_prefix(const struct iovec *iov, uint32_t n, struct region *found)
{
    if (!n || !region_find(iov->iov_base, iov->iov_len, found))
        return 0;
    uint32_t i = 1;
    while (i < n && region_holds(found, iov[i].iov_base, iov[i].iov_len))
        i++;
    return i;
}
