/* See load.h. */
#define _GNU_SOURCE
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* A prime, so that no message or buffer size falls into step with the pattern. */
#define PERIOD 65521
#define EVENTS 256

/* Latencies in buckets of 1/64 of their value: constant memory, however long the run. */
struct histogram {
    uint64_t count;
    uint64_t buckets[64 * 64];
};

struct options options;
int epoll;
unsigned char received_bytes[RECEIVE_SIZE];

static unsigned char *pattern; /* PERIOD bytes, and the beginning of the next period */

__attribute__((noreturn)) static void leave(int status, const char *format, va_list arguments)
{
    fprintf(stderr, "%s: ", program_invocation_short_name);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    exit(status);
}

void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    leave(1, format, arguments);
}

void die_at_the_end(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    leave(2, format, arguments);
}

void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count, size);
    if (!memory)
        die("out of memory");
    return memory;
}

void end_with_parent(void)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == 1)
        die("the benchmark is gone");
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* -- latencies -- */

static void record(struct histogram *h, uint64_t value)
{
    unsigned shift = value < 64 ? 0 : 57 - (unsigned)__builtin_clzll(value);
    h->buckets[shift * 64 + (value >> shift)]++;
    h->count++;
}

static uint64_t percentile(const struct histogram *h, double share)
{
    uint64_t wanted = (uint64_t)((double)h->count * share), seen = 0;
    for (size_t i = 0; i < sizeof h->buckets / sizeof *h->buckets; i++) {
        seen += h->buckets[i];
        if (seen > wanted) {
            if (i < 128)
                return i;
            size_t shift = i / 64 - 1;
            return ((uint64_t)(i - shift * 64) << shift) + (UINT64_C(1) << shift) / 2;
        }
    }
    return 0;
}

/* -- bytes -- */

void make_pattern(size_t slice)
{
    pattern = allocate(PERIOD + slice, 1);
    uint32_t state = 2463534242;
    for (size_t i = 0; i < PERIOD; i++) {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        pattern[i] = (unsigned char)(state >> 24);
    }
    for (size_t i = 0; i < slice; i++)
        pattern[PERIOD + i] = pattern[i];
}

const unsigned char *pattern_at(uint64_t offset)
{
    return pattern + offset % PERIOD;
}

void compare(unsigned connection, uint64_t offset, const void *got, const void *expected, size_t n)
{
    const unsigned char *a = got, *b = expected;
    if (!memcmp(a, b, n))
        return;
    size_t i = 0;
    while (a[i] == b[i])
        i++;
    die("connection %u: wrong byte at offset %" PRIu64 ": 0x%02x instead of 0x%02x", connection,
        offset + i, a[i], b[i]);
}

size_t receive_some(int fd, unsigned connection, uint64_t offset)
{
    ssize_t n = recv(fd, received_bytes, RECEIVE_SIZE, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n < 0)
        die("connection %u: recv: %s", connection, strerror(errno));
    if (n == 0)
        die("connection %u: ended by the server at offset %" PRIu64, connection, offset);
    return (size_t)n;
}

/* -- sockets -- */

void open_epoll(void)
{
    epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0)
        die("epoll_create1: %s", strerror(errno));
}

void watch(int operation, int fd, uint32_t events, void *data)
{
    struct epoll_event event = {.events = events, .data.ptr = data};
    if (epoll_ctl(epoll, operation, fd, &event))
        die("epoll_ctl: %s", strerror(errno));
}

int connect_to_server(int type, unsigned connection, unsigned source)
{
    struct sockaddr_in address = {.sin_family = AF_INET}, own = {.sin_family = AF_INET};
    address.sin_port = htons(options.port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    own.sin_addr.s_addr = htonl((INADDR_LOOPBACK & ~UINT32_C(255)) | source);
    int on = 1, fd = socket(AF_INET, type | SOCK_CLOEXEC, 0);
    if (fd < 0)
        die("connection %u: socket: %s", connection, strerror(errno));
    /* The port is then chosen by connect, which may take one that is in use with another server. */
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&own, sizeof own))
        die("connection %u: bind: %s", connection, strerror(errno));
    if (connect(fd, (struct sockaddr *)&address, sizeof address))
        die("connection %u: connect: %s", connection, strerror(errno));
    if (type == SOCK_STREAM)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

void end_stream(int fd, unsigned connection)
{
    struct timeval limit = {.tv_sec = END_MS / 1000};
    shutdown(fd, SHUT_WR);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ssize_t n = recv(fd, received_bytes, RECEIVE_SIZE, 0);
    if (n > 0)
        die("connection %u: surplus bytes at the end", connection);
    if (n < 0 && errno == EAGAIN)
        die_at_the_end("connection %u: not ended by the server %d s after us", connection,
                       END_MS / 1000);
    if (n < 0)
        die_at_the_end("connection %u: waiting for the end: %s", connection, strerror(errno));
    close(fd);
}

/* -- the run -- */

/* Requests go round for `seconds`; those in flight at the end are waited for and counted. */
static void run(const struct load *load, double seconds, int64_t *began, struct histogram *h)
{
    struct epoll_event events[EVENTS];
    int64_t stop = now_ns() + (int64_t)(seconds * 1e9);
    unsigned busy = load->requests;
    for (unsigned i = 0; i < load->requests; i++) {
        began[i] = now_ns();
        load->begin(i);
    }
    while (busy) {
        int n = epoll_wait(epoll, events, EVENTS, STALL_MS);
        if (n < 0 && errno != EINTR)
            die("epoll_wait: %s", strerror(errno));
        if (n == 0)
            die("nothing came back for %d s with %u requests in flight", STALL_MS / 1000, busy);
        for (int i = 0; i < n; i++) {
            int request = load->event(events[i].data.ptr, events[i].events);
            if (request < 0)
                continue;
            int64_t now = now_ns();
            record(h, (uint64_t)(now - began[request]));
            if (now < stop) {
                began[request] = now;
                load->begin((unsigned)request);
            } else {
                busy--;
            }
        }
    }
}

static void wait_for_caller(void)
{
    fflush(stdout);
    if (getchar() != '\n')
        die("the caller is gone");
}

void load_options(int argc, char **argv)
{
    end_with_parent();
    if (argc != 7)
        die("usage: %s PORT CONNECTIONS SIZE SECONDS WARMUP CYCLE", argv[0]);
    options.port = (uint16_t)strtoul(argv[1], NULL, 10);
    options.connections = (unsigned)strtoul(argv[2], NULL, 10);
    options.size = strtoul(argv[3], NULL, 10);
    options.seconds = strtod(argv[4], NULL);
    options.warmup = strtod(argv[5], NULL);
    options.cycle = strtoull(argv[6], NULL, 10);
    if (!options.connections || !options.size)
        die("CONNECTIONS and SIZE must be at least 1");
    make_pattern(options.size > RECEIVE_SIZE ? options.size : RECEIVE_SIZE);
    open_epoll();
}

int load_main(const struct load *load)
{
    static struct histogram warm, measured;
    int64_t *began = allocate(load->requests, sizeof *began);
    run(load, options.warmup, began, &warm);
    puts("ready");
    wait_for_caller();
    int64_t start = now_ns();
    run(load, options.seconds, began, &measured);
    int64_t elapsed = now_ns() - start;
    printf("%" PRIu64 " %" PRId64 " %" PRIu64 " %" PRIu64 "\n", measured.count, elapsed,
           percentile(&measured, 0.50), percentile(&measured, 0.99));
    wait_for_caller();
    load->finish();
    return 0;
}
