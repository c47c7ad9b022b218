/*
 * The floor of the rows in which the server pushes: what a C program on epoll gets that asks the
 * kernel for GATHER bytes in each system call, from pieces of PIECE bytes. What it costs is the
 * kernel's; what a loop costs beyond it is the loop's own.
 *
 *     push_floor CONNECTIONS SIZE PIECE CYCLE GATHER
 *
 * A byte on any connection asks for SIZE bytes on every one: see sink_client.c.
 */
#define _GNU_SOURCE
#include "floor.h"
#include "load.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define PARTS 1024

struct member {
    int fd;
    uint64_t owed, sent; /* bytes, from the first of the stream */
    bool full;           /* EPOLLOUT is armed */
};

static unsigned expected, joined, requests;
static size_t piece, cycle, gather;
static const unsigned char *contents; /* `cycle` bytes: as much memory as a contestant sends from */
static struct member *members;

/* What one call is to send, piece by piece, as a loop has it in its queue. */
static size_t fill(const struct member *m, struct iovec *parts)
{
    size_t n = 0;
    uint64_t at = m->sent, most = m->owed - at < gather ? m->owed - at : gather;
    while (most && n < PARTS) {
        size_t part = piece - at % piece;
        if (part > most)
            part = most;
        parts[n++] = (struct iovec){(void *)(contents + at % cycle), part};
        at += part;
        most -= part;
    }
    return n;
}

static void push(struct member *m)
{
    struct iovec parts[PARTS];
    bool full = false;
    while (m->sent < m->owed && !full) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = fill(m, parts)};
        ssize_t n = sendmsg(m->fd, &message, MSG_NOSIGNAL);
        if (n >= 0)
            m->sent += (uint64_t)n;
        else if (errno == EAGAIN)
            full = true;
        else
            die("sendmsg: %s", strerror(errno));
    }
    if (full != m->full) {
        m->full = full;
        watch(EPOLL_CTL_MOD, m->fd, EPOLLIN | (full ? EPOLLOUT : 0), m);
    }
}

/* The first request waits until all connections are there, as in contestant/pushing.py. */
static void answer(void)
{
    if (joined < expected)
        return;
    for (; requests; requests--)
        for (unsigned i = 0; i < joined; i++) {
            members[i].owed += options.size;
            push(&members[i]);
        }
}

static void accept_all(void)
{
    int fd;
    while (joined < expected && (fd = accept_one()) >= 0) {
        members[joined].fd = fd;
        watch(EPOLL_CTL_ADD, fd, EPOLLIN, &members[joined++]);
    }
    answer();
}

static void serve(void *data, uint32_t events)
{
    struct member *m = data;
    if (events & EPOLLOUT)
        push(m);
    if (!(events & ~(uint32_t)EPOLLOUT))
        return;
    ssize_t n = recv(m->fd, received_bytes, RECEIVE_SIZE, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN))
        close(m->fd);
    if (n > 0) {
        requests += (unsigned)n;
        answer();
    }
}

int main(int argc, char **argv)
{
    if (argc != 6)
        die("usage: push_floor CONNECTIONS SIZE PIECE CYCLE GATHER");
    expected = (unsigned)strtoul(argv[1], NULL, 10);
    options.size = strtoul(argv[2], NULL, 10);
    piece = strtoul(argv[3], NULL, 10);
    cycle = strtoul(argv[4], NULL, 10);
    gather = strtoul(argv[5], NULL, 10);
    if (!expected || !options.size || !piece || cycle % piece || gather < piece)
        die("CYCLE is a multiple of PIECE, and GATHER at least PIECE");
    make_pattern(cycle);
    contents = pattern_at(0);
    members = allocate(expected, sizeof *members);
    run_floor(SOCK_STREAM, accept_all, serve);
}
