/* gather.c - what the kernel allows: registered memory gathered by io_uring, and nothing else.
 *
 * Started by `python -m aiozc bench send --path sink --ceiling` (aiozc/cli/bench/ceiling.py), which
 * compiles it. Arguments: address, bytes of a part, parts of a request, buffers, bytes outstanding,
 * seconds, and, to see what that does, `huge`: memory of huge pages, `huge+`: and one small page.
 * It goes round its buffers, which lie as a pool's do, has one request unsent and so many bytes
 * unreleased at most, MSG_EOR once 64 KiB went, and prints one JSON object when the last buffer was
 * released. No loop, no objects, no errors but fatal ones.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <liburing.h>
#include <linux/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

#define PORT 9100
#define EOR_BYTES 65536
#define FIXED (1u << 2) /* IORING_RECVSEND_FIXED_BUF */
#define PARTS_MOST 1024
#define HUGE_BYTES ((size_t)2 << 20)

static struct io_uring ring;
static struct iovec parts[PARTS_MOST];
static struct msghdr message = {.msg_iov = parts};
static long size, count, buffers, window;
static long line, group, span; /* as in a pool: none touches more pages than it must */
static long bytes, requests, notifications, unreleased;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double seconds_of(struct timeval t)
{
    return (double)t.tv_sec + (double)t.tv_usec / 1e6;
}

static int connected(const char *address)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(PORT)};
    int v4 = inet_pton(AF_INET, address, &in.sin_addr) == 1, on = 1;
    if (!v4 && inet_pton(AF_INET6, address, &in6.sin6_addr) != 1)
        fail(address);
    int fd = socket(v4 ? AF_INET : AF_INET6, SOCK_STREAM, 0);
    if (connect(fd, v4 ? (void *)&in : (void *)&in6, v4 ? sizeof in : sizeof in6) < 0)
        fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

static void submit(char *memory)
{
    static long at, since_eor;
    for (long i = 0; i < count; i++, at = (at + 1) % buffers)
        parts[i] = (struct iovec){memory + at / group * span + at % group * line, (size_t)size};
    message.msg_iovlen = (size_t)count;
    since_eor += size * count;
    int flags = MSG_WAITALL | MSG_NOSIGNAL | (since_eor >= EOR_BYTES ? MSG_EOR : 0);
    if (flags & MSG_EOR)
        since_eor = 0;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
    io_uring_prep_sendmsg_zc(sqe, 0, &message, (unsigned)flags);
    sqe->flags |= IOSQE_FIXED_FILE;
    sqe->ioprio |= FIXED;
    sqe->buf_index = 0;
    unreleased += size * count;
}

/* Is the request that was submitted last accepted? */
static int harvest(void)
{
    struct io_uring_cqe *cqe;
    unsigned head, n = 0;
    int accepted = 0;
    io_uring_for_each_cqe(&ring, head, cqe)
    {
        n++;
        if (cqe->flags & IORING_CQE_F_NOTIF) {
            notifications++;
            unreleased -= size * count;
            continue;
        }
        if (cqe->res != size * count) {
            fprintf(stderr, "a request was answered %d\n", cqe->res);
            exit(1);
        }
        accepted = 1;
        bytes += cqe->res;
        requests++;
    }
    io_uring_cq_advance(&ring, n);
    return accepted;
}

/* Makes `all` larger where it must be. */
static char *buffers_of(size_t *all, const char *kind)
{
    size_t huge = kind[0] ? (*all + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES : 0;
    size_t room = huge + *all + 2 * HUGE_BYTES;
    char *p = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        fail("mmap");
    p += -(size_t)p % HUGE_BYTES;
    if (huge && madvise(p, huge, MADV_HUGEPAGE) < 0)
        fail("huge pages");
    if (huge)
        *all = huge + (kind[4] ? 4096 : 0);
    madvise(p + huge, *all - huge, MADV_NOHUGEPAGE);
    memset(p, 1, *all);
    return p;
}

int main(int argc, char **argv)
{
    if (argc != 7 && argc != 8)
        return 2;
    size = atol(argv[2]);
    count = atol(argv[3]);
    buffers = atol(argv[4]);
    window = atol(argv[5]);
    line = (size + 63) / 64 * 64;
    group = line <= 4096 ? 4096 / line : 1;
    span = (line + 4095) / 4096 * 4096;
    if (count < 1 || count > PARTS_MOST)
        return 2;
    int fd = connected(argv[1]), unsent = 0;
    size_t all = (size_t)((buffers + group - 1) / group * span);
    char *memory = buffers_of(&all, argv[7] ? argv[7] : "");
    struct io_uring_params p = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
                                         IORING_SETUP_CQSIZE | IORING_SETUP_SUBMIT_ALL,
                                .cq_entries = 16384};
    struct iovec region = {memory, all};
    if (io_uring_queue_init_params(64, &ring, &p) < 0 ||
        io_uring_register_files(&ring, &fd, 1) < 0 || io_uring_register_ring_fd(&ring) != 1 ||
        io_uring_register_buffers(&ring, &region, 1) < 0)
        fail("io_uring");
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    double start = now(), end = start + atof(argv[6]);
    while (unreleased || now() < end) {
        if (!unsent && unreleased < window && now() < end) {
            submit(memory);
            unsent = 1;
        }
        io_uring_submit_and_wait(&ring, 1);
        if (harvest())
            unsent = 0;
    }
    double took = now() - start;
    getrusage(RUSAGE_SELF, &after);
    struct tcp_info info;
    socklen_t n = sizeof info;
    memset(&info, 0, sizeof info);
    getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &n);
    printf("{\"nbytes\": %ld, \"requests\": %ld, \"notifications\": %ld, \"seconds\": %f, "
           "\"user\": %f, \"system\": %f, \"arrived\": %llu, \"segments\": %u}\n",
           bytes, requests, notifications, took,
           seconds_of(after.ru_utime) - seconds_of(before.ru_utime),
           seconds_of(after.ru_stime) - seconds_of(before.ru_stime),
           (unsigned long long)info.tcpi_bytes_acked - 1, info.tcpi_data_segs_out);
    return 0;
}
