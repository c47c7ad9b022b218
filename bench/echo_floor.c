/*
 * The floor of the echo rows: the least that an echo server on epoll can do, in C and without an
 * event loop's comforts. What a loop costs beyond it is the loop's own.
 *
 *     echo_floor stream|datagram
 */
#define _GNU_SOURCE
#include "floor.h"
#include "load.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

/* One client. Nothing more is received from it until all that came is sent back. */
struct client {
    int fd;
    size_t left; /* to be sent, from `rest` on */
    unsigned char *rest, *memory;
};

static void accept_all(void)
{
    int fd;
    while ((fd = accept_one()) >= 0) {
        struct client *client = allocate(1, sizeof *client);
        client->fd = fd;
        watch(EPOLL_CTL_ADD, fd, EPOLLIN, client);
    }
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

static void serve(void *data, uint32_t events)
{
    struct client *client = data;
    bool alive;
    (void)events;
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

int main(int argc, char **argv)
{
    bool stream = argc == 2 && !strcmp(argv[1], "stream");
    if (!stream && (argc != 2 || strcmp(argv[1], "datagram")))
        die("usage: echo_floor stream|datagram");
    run_floor(stream ? SOCK_STREAM : SOCK_DGRAM, stream ? accept_all : serve_datagrams, serve);
}
