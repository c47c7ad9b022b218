/*
 * Load of the rows in which the server pushes: a byte on the first connection asks for SIZE bytes
 * on every connection, and the request is over when all of them have arrived. The stream repeats
 * after CYCLE bytes. Run as load.h says.
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
    uint64_t due; /* what was asked for until now */
    uint64_t received;
};

static struct connection *connections;
static unsigned missing; /* connections to which the current request still owes bytes */

static void begin(unsigned request)
{
    (void)request;
    for (unsigned i = 0; i < options.connections; i++)
        connections[i].due += options.size;
    missing = options.connections;
    if (send(connections[0].fd, "", 1, MSG_NOSIGNAL) != 1)
        die("send: %s", strerror(errno));
}

static int event(void *data, uint32_t events)
{
    struct connection *c = data;
    (void)events;
    size_t n = receive_some(c->fd, c->index, c->received);
    if (!n)
        return -1;
    if (c->received + n > c->due)
        die("connection %u: more bytes came than were asked for", c->index);
    for (size_t seen = 0; seen < n;) {
        uint64_t place = (c->received + seen) % options.cycle;
        size_t part = options.cycle - place < n - seen ? options.cycle - place : n - seen;
        compare(c->index, c->received + seen, received_bytes + seen, pattern_at(place), part);
        seen += part;
    }
    c->received += n;
    return c->received == c->due && !--missing ? 0 : -1;
}

static void finish(void)
{
    for (unsigned i = 0; i < options.connections; i++)
        end_stream(connections[i].fd, i);
}

int main(int argc, char **argv)
{
    load_options(argc, argv);
    if (!options.cycle)
        die("CYCLE must be at least 1");
    connections = allocate(options.connections, sizeof *connections);
    for (unsigned i = 0; i < options.connections; i++) {
        connections[i].index = i;
        connections[i].fd = connect_to_server(SOCK_STREAM, i, 1);
        watch(EPOLL_CTL_ADD, connections[i].fd, EPOLLIN, &connections[i]);
    }
    struct load load = {1, begin, event, finish};
    return load_main(&load);
}
