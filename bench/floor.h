/*
 * What the floors share: a listening socket on loopback, the loop over epoll, and the dialogue of a
 * contestant (prints "port N", runs until SIGTERM). Each *_floor.c is one program, compiled
 * together with floor.c and load.c; what it does with a connection is its own.
 */
#ifndef AIOZC_BENCH_FLOOR_H
#define AIOZC_BENCH_FLOOR_H

#include <stdint.h>

extern int server;

/* A connection that waits, as a descriptor that neither blocks nor delays; -1: none does. */
int accept_one(void);
/* `type` of the socket; `at_server`: it is readable; `serve`: an event of what watch() was given.
 */
__attribute__((noreturn)) void run_floor(int type, void (*at_server)(void),
                                         void (*serve)(void *data, uint32_t events));

#endif
