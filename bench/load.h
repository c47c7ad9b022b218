/*
 * What the load generators of the benchmarks share: the command line, the dialogue with the caller,
 * the loop that keeps requests in flight, latencies, and the bytes that streams are made of.
 *
 * Each *_client.c is one program, compiled together with load.c and run by harness/measure.py, one
 * process for each measurement:
 *
 *     CLIENT PORT CONNECTIONS SIZE SECONDS WARMUP CYCLE
 *
 * Its standard streams are a dialogue, so that the caller can read the server's counters while
 * nothing is in flight and the server sleeps:
 *
 *     client: "ready"                                   caller: newline (begin to measure)
 *     client: "REQUESTS ELAPSED_NS P50_NS P99_NS"       caller: newline (finish)
 *
 * A client must never report a measurement in which a byte was wrong, missing or surplus: it says
 * what it saw and exits with status 1 instead. Status 2: the measurement stands, but a connection
 * was not ended as it should.
 */
#ifndef AIOZC_BENCH_LOAD_H
#define AIOZC_BENCH_LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RECEIVE_SIZE (256 * 1024)
#define STALL_MS 10000 /* without an answer: the server hangs */
#define END_MS 3000    /* for a server to end a connection after us */

struct options {
    uint16_t port;
    unsigned connections;
    size_t size; /* bytes of a request */
    double seconds, warmup;
    uint64_t cycle; /* of what a server pushes: its bytes repeat after so many */
};

/* What a client does; requests are numbered from 0, and each is begun again when it has ended. */
struct load {
    unsigned requests; /* in flight together */
    void (*begin)(unsigned request);
    /* Take what one event of epoll brings; the number of the request that it ended, or -1. */
    int (*event)(void *data, uint32_t events);
    /* Nothing is in flight and nothing more is wanted: see that the server agrees. */
    void (*finish)(void);
};

extern struct options options;
extern int epoll;
extern unsigned char received_bytes[RECEIVE_SIZE];

__attribute__((noreturn, format(printf, 1, 2))) void die(const char *format, ...);
__attribute__((noreturn, format(printf, 1, 2))) void die_at_the_end(const char *format, ...);
void *allocate(size_t count, size_t size);
/* A benchmark that is killed leaves no process behind. */
void end_with_parent(void);
/* Options, pattern and epoll; before anything else. */
void load_options(int argc, char **argv);
int load_main(const struct load *load);

/* The pattern, so that `slice` bytes of it are in one piece wherever they begin. */
void make_pattern(size_t slice);
/* At least options.size and RECEIVE_SIZE bytes of the endless pattern, from `offset` on. The same
 * pattern is made by contestant/pattern.py. */
const unsigned char *pattern_at(uint64_t offset);
/* `got` is what came at `offset` of the stream of a connection. */
void compare(unsigned connection, uint64_t offset, const void *got, const void *expected, size_t n);
/* One receive into received_bytes that does not wait; 0 when nothing is there. The end of the
 * stream and errors end the program. */
size_t receive_some(int fd, unsigned connection, uint64_t offset);

void open_epoll(void);
/* EPOLL_CTL_ADD or _MOD; `data` is handed to load.event. */
void watch(int operation, int fd, uint32_t events, void *data);
/* To the server on loopback, from 127.0.0.`source`: more addresses have more ports. */
int connect_to_server(int type, unsigned connection, unsigned source);
/* Ends our half and waits for the server's: shows surplus bytes, and connections left hanging. */
void end_stream(int fd, unsigned connection);

#endif
