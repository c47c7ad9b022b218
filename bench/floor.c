#define _GNU_SOURCE
#include "floor.h"

#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS 256
#define BACKLOG 1024

int server;

static void end(int signal)
{
    (void)signal;
    _exit(0);
}

int accept_one(void)
{
    int on = 1, fd = accept4(server, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    else if (errno != EAGAIN)
        die("accept4: %s", strerror(errno));
    return fd;
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

void run_floor(int type, void (*at_server)(void), void (*serve)(void *data, uint32_t events))
{
    struct epoll_event events[EVENTS];
    end_with_parent();
    signal(SIGTERM, end);
    open_epoll();
    unsigned port = listen_on(type);
    watch(EPOLL_CTL_ADD, server, EPOLLIN, NULL);
    printf("port %u\n", port);
    fflush(stdout);
    for (;;) {
        int n = epoll_wait(epoll, events, EVENTS, -1);
        if (n < 0 && errno != EINTR)
            die("epoll_wait: %s", strerror(errno));
        for (int i = 0; i < n; i++)
            if (events[i].data.ptr)
                serve(events[i].data.ptr, events[i].events);
            else
                at_server();
    }
}
