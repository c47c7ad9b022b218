/*
 * Load of the echo rows: one message in flight on each of N connections; every byte that comes back
 * is compared with the one that went out. Run as load.h says.
 */
#define _GNU_SOURCE
#include "load.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

struct connection {
    int fd;
    unsigned index;
    uint64_t due;      /* end of the current message, counted from the first byte of the stream */
    uint64_t sent;     /* <= due */
    uint64_t received; /* <= due */
    bool wants_out;    /* EPOLLOUT is armed: the socket was full */
};

static struct connection *connections;

/* What the stream of this connection holds from `offset` on: each connection begins elsewhere. */
static const unsigned char *expected_at(const struct connection *c, uint64_t offset)
{
    return pattern_at((uint64_t)c->index * 4099 + offset);
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
        watch(EPOLL_CTL_MOD, c->fd, EPOLLIN | (full ? EPOLLOUT : 0), c);
    }
}

static void begin(unsigned request)
{
    connections[request].due += options.size;
    send_rest(&connections[request]);
}

static int event(void *data, uint32_t events)
{
    struct connection *c = data;
    if (events & EPOLLOUT)
        send_rest(c);
    if (!(events & ~(uint32_t)EPOLLOUT))
        return -1;
    size_t n = receive_some(c->fd, c->index, c->received);
    if (!n)
        return -1;
    if (c->received + n > c->sent)
        die("connection %u: more bytes came back than were sent", c->index);
    compare(c->index, c->received, received_bytes, expected_at(c, c->received), n);
    c->received += n;
    return c->received == c->due ? (int)c->index : -1;
}

static void finish(void)
{
    for (unsigned i = 0; i < options.connections; i++)
        end_stream(connections[i].fd, i);
}

int main(int argc, char **argv)
{
    load_options(argc, argv);
    connections = allocate(options.connections, sizeof *connections);
    for (unsigned i = 0; i < options.connections; i++) {
        connections[i].index = i;
        connections[i].fd = connect_to_server(SOCK_STREAM, i, 1);
        watch(EPOLL_CTL_ADD, connections[i].fd, EPOLLIN, &connections[i]);
    }
    struct load load = {options.connections, begin, event, finish};
    return load_main(&load);
}
