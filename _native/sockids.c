/* sockids.c - where a socket's numbering of zero-copy sends stands, between two connections on it.
 *
 * Owns: one list of the process. Called by: msgzc.c. The kernel never begins the ids of a socket
 * anew, and tells nobody how far they are. A connection on a duplicate of somebody's socket
 * (bare.py, foreign.py) lives only while it sends; the next one goes on counting where it stopped.
 * While one counts, the socket is not in the list, so a second one beside it (another loop's) finds
 * nothing and copies; so does a forked child, whose parent may be counting.
 *
 * Bounded: what is put in place of another is forgotten, and then that one's socket copies.
 *
 * Never: believed for a socket that has another cookie. The kernel gives each once.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#ifndef SO_COOKIE
#define SO_COOKIE 57
#endif

#define PLACES 8192u

static struct {
    uint64_t cookie; /* 0: free */
    uint32_t next;
} places[PLACES];
static pid_t owner;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

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

static uint64_t cookie_of(int fd)
{
    uint64_t cookie = 0;
    socklen_t n = sizeof cookie;
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &n) == 0 ? cookie : 0;
}

static uint32_t enter(uint64_t cookie)
{
    lock();
    if (owner != getpid()) {
        memset(places, 0, sizeof places);
        owner = getpid();
    }
    return (uint32_t)(cookie % PLACES);
}

/* This socket's next send has the id `next`. */
void sockids_put(int fd, uint32_t next)
{
    uint64_t cookie = cookie_of(fd);
    uint32_t at = enter(cookie);
    places[at].cookie = cookie;
    places[at].next = next;
    unlock();
}

/* Whether that is known. It is not any more afterwards. */
bool sockids_take(int fd, uint32_t *next)
{
    uint64_t cookie = cookie_of(fd);
    uint32_t at = enter(cookie);
    bool found = cookie && places[at].cookie == cookie;
    if (found) {
        *next = places[at].next;
        places[at].cookie = 0;
    }
    unlock();
    return found;
}
