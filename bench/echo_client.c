/*
 * Load generator of the echo benchmark. Keeps one message in flight on each of N connections, and
 * compares every byte that comes back with the byte that went out.
 *
 * Run by echo.py, one process for each measurement:
 *
 *     echo_client PORT CONNECTIONS SIZE SECONDS WARMUP
 *
 * Its standard streams are a dialogue, so that the caller can read the server's counters while
 * nothing is in flight and the server sleeps:
 *
 *     client: "ready"                                   caller: newline (begin to measure)
 *     client: "REQUESTS ELAPSED_NS P50_NS P99_NS"       caller: newline (finish)
 *
 * It then ends every connection and wants to see the server do the same. It must never report a
 * measurement in which a byte was wrong, missing or surplus: it exits with status 1 instead.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* A prime, so that no message or buffer size falls into step with the pattern. */
#define PERIOD 65521
#define RECEIVE_SIZE (256 * 1024)
#define EVENTS 256
#define STALL_MS 10000

struct connection {
    int fd;
    unsigned index;
    uint64_t due;      /* end of the current message, counted from the first byte of the stream */
    uint64_t sent;     /* <= due */
    uint64_t received; /* <= due */
    int64_t began;     /* when the current message was handed to the kernel */
    bool wants_out;    /* EPOLLOUT is armed: the socket was full */
};

/* Latencies in buckets of 1/64 of their value: constant memory, however long the run. */
struct histogram {
    uint64_t count;
    uint64_t buckets[64 * 64];
};

static int epoll;
static size_t message_size;
static unsigned char *pattern; /* PERIOD bytes, and the beginning of the next period */
static unsigned char received_bytes[RECEIVE_SIZE];

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("echo_client: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

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

static void make_pattern(void)
{
    size_t slice = message_size > RECEIVE_SIZE ? message_size : RECEIVE_SIZE;
    pattern = malloc(PERIOD + slice);
    if (!pattern)
        die("out of memory");
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

/* What the stream of this connection holds from `offset` on: each connection begins elsewhere. */
static const unsigned char *expected_at(const struct connection *c, uint64_t offset)
{
    return pattern + ((uint64_t)c->index * 4099 + offset) % PERIOD;
}

static void watch(struct connection *c, int operation)
{
    struct epoll_event event = {.events = EPOLLIN | (c->wants_out ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll, operation, c->fd, &event))
        die("epoll_ctl: %s", strerror(errno));
}

static void send_rest(struct connection *c)
{
    bool full = false;
    while (c->sent < c->due && !full) {
        ssize_t n =
            send(c->fd, expected_at(c, c->sent), c->due - c->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n >= 0)
            c->sent += (uint64_t)n;
        else if (errno == EAGAIN)
            full = true;
        else if (errno != EINTR)
            die("connection %u: send: %s", c->index, strerror(errno));
    }
    if (full != c->wants_out) {
        c->wants_out = full;
        watch(c, EPOLL_CTL_MOD);
    }
}

static void begin_message(struct connection *c, int64_t now)
{
    c->began = now;
    c->due += message_size;
    send_rest(c);
}

static void compare(const struct connection *c, size_t n)
{
    const unsigned char *expected = expected_at(c, c->received);
    if (!memcmp(received_bytes, expected, n))
        return;
    size_t i = 0;
    while (received_bytes[i] == expected[i])
        i++;
    die("connection %u: wrong byte at offset %" PRIu64 ": 0x%02x instead of 0x%02x", c->index,
        c->received + i, received_bytes[i], expected[i]);
}

/* True when the whole message is back. */
static bool receive(struct connection *c)
{
    ssize_t n = recv(c->fd, received_bytes, RECEIVE_SIZE, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n < 0)
        die("connection %u: recv: %s", c->index, strerror(errno));
    if (n == 0)
        die("connection %u: ended by the server at offset %" PRIu64, c->index, c->received);
    if (c->received + (uint64_t)n > c->sent)
        die("connection %u: more bytes came back than were sent", c->index);
    compare(c, (size_t)n);
    c->received += (uint64_t)n;
    return c->received == c->due;
}

/* Messages go round for `seconds`; those in flight at the end are waited for and counted. */
static void run(struct connection *connections, unsigned count, double seconds, struct histogram *h)
{
    struct epoll_event events[EVENTS];
    int64_t stop = now_ns() + (int64_t)(seconds * 1e9);
    unsigned busy = count;
    for (unsigned i = 0; i < count; i++)
        begin_message(&connections[i], now_ns());
    while (busy) {
        int n = epoll_wait(epoll, events, EVENTS, STALL_MS);
        if (n < 0 && errno != EINTR)
            die("epoll_wait: %s", strerror(errno));
        if (n == 0)
            die("nothing came back for %d s with %u messages in flight", STALL_MS / 1000, busy);
        for (int i = 0; i < n; i++) {
            struct connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT)
                send_rest(c);
            if (!(events[i].events & ~(uint32_t)EPOLLOUT) || !receive(c))
                continue;
            int64_t now = now_ns();
            record(h, (uint64_t)(now - c->began));
            if (now < stop)
                begin_message(c, now);
            else
                busy--;
        }
    }
}

static struct connection *connect_all(unsigned count, uint16_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct connection *connections = calloc(count, sizeof *connections);
    if (!connections)
        die("out of memory");
    for (unsigned i = 0; i < count; i++) {
        struct connection *c = &connections[i];
        int on = 1;
        c->index = i;
        c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address))
            die("connection %u: connect: %s", i, strerror(errno));
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        watch(c, EPOLL_CTL_ADD);
    }
    return connections;
}

/* Ends our half and waits for the server's: shows surplus bytes, and connections left hanging. */
static void finish(struct connection *connections, unsigned count)
{
    struct timeval limit = {.tv_sec = STALL_MS / 1000};
    for (unsigned i = 0; i < count; i++) {
        int fd = connections[i].fd;
        shutdown(fd, SHUT_WR);
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        ssize_t n = recv(fd, received_bytes, RECEIVE_SIZE, 0);
        if (n > 0)
            die("connection %u: surplus bytes at the end", i);
        if (n < 0)
            die("connection %u: waiting for the end: %s", i, strerror(errno));
        close(fd);
    }
}

static void wait_for_caller(void)
{
    fflush(stdout);
    if (getchar() != '\n')
        die("the caller is gone");
}

int main(int argc, char **argv)
{
    if (argc != 6)
        die("usage: echo_client PORT CONNECTIONS SIZE SECONDS WARMUP");
    static struct histogram warm, measured;
    unsigned count = (unsigned)strtoul(argv[2], NULL, 10);
    message_size = strtoul(argv[3], NULL, 10);
    double seconds = strtod(argv[4], NULL), warmup = strtod(argv[5], NULL);
    if (!count || !message_size)
        die("CONNECTIONS and SIZE must be at least 1");
    epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0)
        die("epoll_create1: %s", strerror(errno));
    make_pattern();
    struct connection *connections = connect_all(count, (uint16_t)strtoul(argv[1], NULL, 10));

    run(connections, count, warmup, &warm);
    puts("ready");
    wait_for_caller();
    int64_t began = now_ns();
    run(connections, count, seconds, &measured);
    int64_t elapsed = now_ns() - began;
    printf("%" PRIu64 " %" PRId64 " %" PRIu64 " %" PRIu64 "\n", measured.count, elapsed,
           percentile(&measured, 0.50), percentile(&measured, 0.99));
    wait_for_caller();
    finish(connections, count);
    return 0;
}
