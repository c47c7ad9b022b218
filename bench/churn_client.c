/*
 * Load of the churn row: connect, one echo, end; N at a time. A request is over when the server has
 * ended its half too, so that all work for it is done. Run as load.h says.
 */
#define _GNU_SOURCE
#include "load.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

/* Ports stay in TIME_WAIT for a minute: connections come from this many addresses in turn. */
#define SOURCES 64

struct visit {
    int fd;
    unsigned index;
    uint64_t offset;   /* of its bytes in the pattern: each visit brings others */
    uint64_t received; /* of options.size */
};

static struct visit *visits;

static void begin(unsigned request)
{
    static unsigned turn;
    struct visit *v = &visits[request];
    v->received = 0;
    v->offset += options.size;
    v->fd = connect_to_server(SOCK_STREAM, v->index, 1 + turn++ % SOURCES);
    watch(EPOLL_CTL_ADD, v->fd, EPOLLIN, v);
    if (send(v->fd, pattern_at(v->offset), options.size, MSG_NOSIGNAL) != (ssize_t)options.size)
        die("connection %u: send: %s", v->index, strerror(errno));
}

static int event(void *data, uint32_t events)
{
    struct visit *v = data;
    (void)events;
    if (v->received == options.size) {
        end_stream(v->fd, v->index);
        return (int)v->index;
    }
    size_t n = receive_some(v->fd, v->index, v->received);
    if (!n)
        return -1;
    if (v->received + n > options.size)
        die("connection %u: more bytes came back than were sent", v->index);
    compare(v->index, v->received, received_bytes, pattern_at(v->offset + v->received), n);
    v->received += n;
    if (v->received == options.size)
        shutdown(v->fd, SHUT_WR);
    return -1;
}

static void finish(void) {}

int main(int argc, char **argv)
{
    load_options(argc, argv);
    visits = allocate(options.connections, sizeof *visits);
    for (unsigned i = 0; i < options.connections; i++) {
        visits[i].index = i;
        visits[i].offset = (uint64_t)i * 4099;
    }
    struct load load = {options.connections, begin, event, finish};
    return load_main(&load);
}
