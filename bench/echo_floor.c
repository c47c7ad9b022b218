/*
 * The floor of the echo rows: the least that an echo server on epoll can do, in C and without an
 * event loop's comforts. What a loop costs beyond it is the loop's own.
 *
 *     echo_floor stream|datagram
 *
 * As the contestants do, it prints "port N" and runs until SIGTERM.
 */
#define _GNU_SOURCE
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS 256
#define BACKLOG 1024

/* One client. Nothing more is received from it until all that came is sent back. */
struct client {
    int fd;
    size_t left; /* to be sent, from `rest` on */
    unsigned char *rest, *memory;
};

static int server;

static void end(int signal)
{
    (void)signal;
    _exit(0);
}

static void accept_all(void)
{
    int fd, on = 1;
    while ((fd = accept4(server, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct client *client = allocate(1, sizeof *client);
        client->fd = fd;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        watch(EPOLL_CTL_ADD, fd, EPOLLIN, client);
    }
    if (errno != EAGAIN)
        die("accept4: %s", strerror(errno));
}

static void drop(struct client *client)
{
    close(client->fd);
    free(client->memory);
    free(client);
}

/* False when the client is gone. */
static bool send_back(struct client *client, const unsigned char *data, size_t n)
{
    ssize_t sent = send(client->fd, data, n, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN)
        return false;
    size_t done = sent < 0 ? 0 : (size_t)sent;
    if (done < n && !client->left) {
        if (!client->memory)
            client->memory = allocate(RECEIVE_SIZE, 1);
        memcpy(client->memory, data + done, n - done);
        client->rest = client->memory;
        client->left = n - done;
        watch(EPOLL_CTL_MOD, client->fd, EPOLLOUT, client);
    } else if (client->left) {
        client->rest += done;
        client->left -= done;
        if (!client->left)
            watch(EPOLL_CTL_MOD, client->fd, EPOLLIN, client);
    }
    return true;
}

static void serve(struct client *client)
{
    bool alive;
    if (client->left) {
        alive = send_back(client, client->rest, client->left);
    } else {
        ssize_t n = recv(client->fd, received_bytes, RECEIVE_SIZE, 0);
        if (n < 0 && errno == EAGAIN)
            return;
        alive = n > 0 && send_back(client, received_bytes, (size_t)n);
    }
    if (!alive)
        drop(client);
}

static void serve_datagrams(void)
{
    struct sockaddr_in from;
    socklen_t length = sizeof from;
    ssize_t n;
    while ((n = recvfrom(server, received_bytes, RECEIVE_SIZE, 0, (struct sockaddr *)&from,
                         &length)) >= 0) {
        sendto(server, received_bytes, (size_t)n, 0, (struct sockaddr *)&from, length);
        length = sizeof from;
    }
}

static unsigned listen_on(int type)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    server = socket(AF_INET, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (server < 0 || bind(server, (struct sockaddr *)&address, sizeof address) ||
        (type == SOCK_STREAM && listen(server, BACKLOG)) ||
        getsockname(server, (struct sockaddr *)&address, &length))
        die("cannot serve: %s", strerror(errno));
    return ntohs(address.sin_port);
}

int main(int argc, char **argv)
{
    bool stream = argc == 2 && !strcmp(argv[1], "stream");
    struct epoll_event events[EVENTS];
    if (!stream && (argc != 2 || strcmp(argv[1], "datagram")))
        die("usage: echo_floor stream|datagram");
    end_with_parent();
    signal(SIGTERM, end);
    open_epoll();
    unsigned port = listen_on(stream ? SOCK_STREAM : SOCK_DGRAM);
    watch(EPOLL_CTL_ADD, server, EPOLLIN, NULL);
    printf("port %u\n", port);
    fflush(stdout);
    for (;;) {
        int n = epoll_wait(epoll, events, EVENTS, -1);
        if (n < 0 && errno != EINTR)
            die("epoll_wait: %s", strerror(errno));
        for (int i = 0; i < n; i++) {
            struct client *client = events[i].data.ptr;
            if (client)
                serve(client);
            else if (stream)
                accept_all();
            else
                serve_datagrams();
        }
    }
}
