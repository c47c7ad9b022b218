/* check.h - what the programs of tests/native/ share: checks that end the program, and a generator
 * of numbers that is the same everywhere. */
#ifndef CHECK_H
#define CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t check_step, check_seed; /* told with what broke; 0 where nothing is random */

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            fprintf(stderr, "%s:%d: not true: %s (seed %llu, step %llu)\n", __func__, __LINE__,    \
                    #x, (unsigned long long)check_seed, (unsigned long long)check_step);           \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Below n. */
static inline uint32_t draw(uint32_t n)
{
    static uint64_t state;
    if (!state)
        state = check_seed * 0x9e3779b97f4a7c15u + 1;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32) % n;
}

/* The arguments of a random program: [steps [seed]]. */
static inline uint64_t check_args(int argc, char **argv, uint64_t steps)
{
    check_seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    return argc > 1 ? strtoull(argv[1], NULL, 10) : steps;
}

#endif
