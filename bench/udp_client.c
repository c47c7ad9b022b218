/*
 * Load of the UDP row: one datagram in flight from each of N sockets; what comes back must be the
 * one that went out, whole. A datagram that is lost ends the measurement: on loopback, with so few
 * in flight, only the server can have lost it. Run as load.h says.
 */
#define _GNU_SOURCE
#include "load.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

struct endpoint {
    int fd;
    unsigned index;
    uint64_t offset; /* of the datagram in flight; no two of one socket hold the same bytes */
};

static struct endpoint *endpoints;

static const unsigned char *contents(const struct endpoint *e)
{
    return pattern_at((uint64_t)e->index * 4099 + e->offset);
}

static void begin(unsigned request)
{
    struct endpoint *e = &endpoints[request];
    if (send(e->fd, contents(e), options.size, MSG_DONTWAIT) != (ssize_t)options.size)
        die("socket %u: send: %s", e->index, strerror(errno));
}

static int event(void *data, uint32_t events)
{
    struct endpoint *e = data;
    (void)events;
    ssize_t n = recv(e->fd, received_bytes, RECEIVE_SIZE, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return -1;
    if (n < 0)
        die("socket %u: recv: %s", e->index, strerror(errno));
    if (n != (ssize_t)options.size)
        die("socket %u: a datagram of %zd bytes instead of %zu", e->index, n, options.size);
    compare(e->index, e->offset, received_bytes, contents(e), (size_t)n);
    e->offset += options.size;
    return (int)e->index;
}

static void finish(void)
{
    for (unsigned i = 0; i < options.connections; i++)
        if (recv(endpoints[i].fd, received_bytes, 1, MSG_DONTWAIT) >= 0)
            die("socket %u: a surplus datagram at the end", i);
}

int main(int argc, char **argv)
{
    load_options(argc, argv);
    endpoints = allocate(options.connections, sizeof *endpoints);
    for (unsigned i = 0; i < options.connections; i++) {
        endpoints[i].index = i;
        endpoints[i].fd = connect_to_server(SOCK_DGRAM, i, 1);
        watch(EPOLL_CTL_ADD, endpoints[i].fd, EPOLLIN, &endpoints[i]);
    }
    struct load load = {options.connections, begin, event, finish};
    return load_main(&load);
}
