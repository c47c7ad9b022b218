/* test_unix_eof.c - on a Unix socket the end of the stream comes, whatever the peer sent just
 * before.
 *
 * Compiled and run by tests/test_native.py; argument: [4 times the number of connections]. With a
 * ring: where none can be made there is nothing to test. A multishot receive loses the end on some
 * kernels (6.18.44: of connections like these 12 in 30,000, with liburing alone;
 * axboe/liburing#1549), so the ring is asked for one receive after the other. In Python a
 * connection takes too long for the race to be met.
 */
#include "internal.h"

#include "check.h"

#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#define SENDS 200

static sem_t go, gone;
static int theirs;

static void *peer(void *rounds)
{
    for (uint64_t n = *(uint64_t *)rounds; n--;) {
        sem_wait(&go);
        for (int i = 0; i < SENDS; i++)
            CHECK(send(theirs, "xy", 2, MSG_NOSIGNAL) == 2);
        close(theirs);
        sem_post(&gone);
    }
    return NULL;
}

/* Bytes until the end of the stream; -1: it did not come. */
static int64_t receive(azc_reactor *r)
{
    int64_t bytes = 0;
    for (int quiet = 0; quiet < 2;) {
        int fired = azc_wait(r, 500000000);
        CHECK(fired >= 0);
        quiet += !(fired & AZC_FIRED_EVENTS);
        for (int i = 0; i < (fired & AZC_FIRED_EVENTS); i++) {
            azc_event *e = &azc_events(r)[i];
            CHECK(e->kind == AZC_EV_RECV && e->res >= 0);
            if (!e->res)
                return bytes;
            bytes += e->res;
            quiet = 0;
        }
    }
    return -1;
}

int main(int argc, char **argv)
{
    uint64_t rounds = check_args(argc, argv, 20000) / 4;
    azc_config cfg = {.backend = AZC_URING, .max_request = 1 << 20};
    int err;
    azc_reactor *r = azc_open(&cfg, &err);
    CHECK(r);
    if (azc_attach(r) < 0) {
        puts("no ring here");
        azc_close(r);
        return 0;
    }
    pthread_t thread;
    sem_init(&go, 0, 0);
    sem_init(&gone, 0, 0);
    CHECK(pthread_create(&thread, NULL, peer, &rounds) == 0);
    for (check_step = 1; check_step <= rounds; check_step++) {
        int s[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0);
        theirs = s[1];
        azc_conn *c = azc_conn_open(r, s[0], AZC_STREAM, AF_UNIX);
        CHECK(c && azc_conn_start(c) == 0);
        (void)azc_wait(r, 0); /* armed */
        sem_post(&go);
        int64_t bytes = receive(r);
        sem_wait(&gone);
        CHECK(bytes == 2 * SENDS); /* -1: the end was lost */
        CHECK(azc_conn_close(c, 0) == 0);
        close(s[0]);
    }
    pthread_join(thread, NULL);
    CHECK(azc_detach(r) == 0 && azc_close(r) == 0);
    return 0;
}
