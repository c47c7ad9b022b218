/* probe.c - what this kernel offers, found by trying it.
 *
 * Called by: aiozc/capabilities.py, once a process. Makes a small ring and closes it again.
 * Never: prints, keeps a descriptor, or trusts a version number.
 */
#define _GNU_SOURCE
#include "aiozc.h"
#include "faults.h"

#include <dlfcn.h>
#include <errno.h>
#include <liburing.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef SO_ZEROCOPY
#define SO_ZEROCOPY 60
#endif
#ifndef MSG_ZEROCOPY
#define MSG_ZEROCOPY 0x4000000
#endif

#define XSTR(s) STR(s)
#define STR(s) #s

#ifndef AZC_LIBURING_VERSION
#define AZC_LIBURING_VERSION unknown
#endif

const char *azc_liburing_built(void)
{
    return XSTR(AZC_LIBURING_VERSION);
}

/* major << 8 | minor of the shared library in use; 0: older than 2.4, which cannot tell; -1: none,
 * it was linked in (and what dlsym finds would be somebody else's). */
int azc_liburing_runtime(void)
{
#ifdef AZC_LIBURING_STATIC
    return -1;
#endif
    int (*major)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "io_uring_major_version");
    int (*minor)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "io_uring_minor_version");
    return major && minor ? major() << 8 | minor() : 0;
}

/* One byte through a multishot receive into a provided buffer. `buf_ring`: 0, or why there is none.
 */
static bool try_multishot(struct io_uring *ring, int *buf_ring)
{
    int s[2];
    bool ok = false;
    char byte = 1, room[64];
    struct io_uring_buf_reg reg = {.ring_entries = 1};
    struct io_uring_cqe *cqe;
    struct __kernel_timespec ts = {.tv_sec = 1};
    *buf_ring = -ENOMEM;
    void *br = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (br == MAP_FAILED)
        return false;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, s) < 0) {
        *buf_ring = -errno;
        munmap(br, 4096);
        return false;
    }
    reg.ring_addr = (uintptr_t)br;
    *buf_ring = io_uring_register_buf_ring(ring, &reg, 0);
    if (*buf_ring == 0) {
        io_uring_buf_ring_init(br);
        io_uring_buf_ring_add(br, room, sizeof room, 0, io_uring_buf_ring_mask(1), 0);
        io_uring_buf_ring_advance(br, 1);
        struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
        io_uring_prep_recv_multishot(sqe, s[0], NULL, 0, 0);
        sqe->flags |= IOSQE_BUFFER_SELECT;
        if (write(s[1], &byte, 1) == 1 &&
            io_uring_submit_and_wait_timeout(ring, &cqe, 1, &ts, NULL) >= 0 && cqe) {
            ok = cqe->res == 1 && cqe->flags & IORING_CQE_F_MORE;
            io_uring_cqe_seen(ring, cqe);
        }
    }
    close(s[0]);
    close(s[1]);
    /* The ring goes first: it may still hold the receive that uses `room` and `br`. */
    io_uring_queue_exit(ring);
    munmap(br, 4096);
    return ok;
}

/* May SENDMSG_ZC gather from registered memory (6.15)? An older kernel says EINVAL before it looks
 * at the socket; a newer one that the socket is not connected. */
static bool try_gather_fixed(struct io_uring *ring)
{
    static char page[4096];
    struct iovec memory = {page, sizeof page}, part = {page, 16};
    struct msghdr msg = {.msg_iov = &part, .msg_iovlen = 1};
    struct __kernel_timespec ts = {.tv_sec = 1};
    struct io_uring_cqe *cqe;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), res = -EINVAL;
    if (fd < 0)
        return false;
    if (io_uring_register_buffers(ring, &memory, 1) == 0) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
        io_uring_prep_sendmsg_zc(sqe, fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        sqe->ioprio |= 1u << 2; /* IORING_RECVSEND_FIXED_BUF */
        sqe->buf_index = 0;
        bool more = true;
        for (int first = 1; more; first = 0) {
            if (io_uring_submit_and_wait_timeout(ring, &cqe, 1, &ts, NULL) < 0 || !cqe)
                break;
            if (first)
                res = cqe->res;
            more = cqe->flags & IORING_CQE_F_MORE;
            io_uring_cqe_seen(ring, cqe);
        }
        io_uring_unregister_buffers(ring);
    }
    close(fd);
    return res != -EINVAL && res != -EOPNOTSUPP;
}

/* One byte by MSG_ZEROCOPY over loopback, and its notification. Where loopback is down the option
 * alone is believed. */
static int try_msg_zerocopy(int listener, int out)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof to;
    char control[256];
    struct msghdr m = {.msg_control = control, .msg_controllen = sizeof control};
    struct pollfd told = {.fd = out};
    int on = 1;
    if (setsockopt(out, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) < 0)
        return -errno;
    if (bind(listener, (struct sockaddr *)&to, sizeof to) < 0 || listen(listener, 1) < 0 ||
        getsockname(listener, (struct sockaddr *)&to, &n) < 0 ||
        connect(out, (struct sockaddr *)&to, sizeof to) < 0)
        return 0;
    if (send(out, "", 1, MSG_ZEROCOPY | MSG_NOSIGNAL) != 1)
        return -errno;
    if (poll(&told, 1, 1000) != 1 || recvmsg(out, &m, MSG_ERRQUEUE | MSG_DONTWAIT) < 0)
        return -EOPNOTSUPP;
    return 0;
}

/* 0, or why sends cannot go zero-copy without io_uring. */
int azc_probe_msg_zerocopy(void)
{
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int rc = listener < 0 || out < 0 ? -errno : try_msg_zerocopy(listener, out);
    if (listener >= 0)
        close(listener);
    if (out >= 0)
        close(out);
    return rc;
}

/* A seccomp filter may answer with SIGSYS, which would end the process: the call fails instead. */
static void on_sigsys(int sig, siginfo_t *info, void *context)
{
    (void)sig, (void)info;
    ucontext_t *u = context;
#if defined(__x86_64__)
    u->uc_mcontext.gregs[REG_RAX] = -ENOSYS;
#elif defined(__aarch64__)
    u->uc_mcontext.regs[0] = (unsigned long long)-ENOSYS;
#else
    (void)u; /* what the call answers is the kernel's number of it: not 0, and no ring */
#endif
}

/* Every request that uring_submit.c makes, beside those that have a feature of their own. */
static bool plain_requests(struct io_uring_probe *p)
{
    static const struct {
        int op;
        enum fault_kind missing;
    } needed[] = {
        {IORING_OP_NOP, AZC_FAULT_NO_NOP},
        {IORING_OP_POLL_ADD, AZC_FAULT_NO_POLL},
        {IORING_OP_ASYNC_CANCEL, AZC_FAULT_NO_CANCEL},
        {IORING_OP_RECV, AZC_FAULT_NO_RECV},
        {IORING_OP_RECVMSG, AZC_FAULT_NO_RECVMSG},
        {IORING_OP_SEND, AZC_FAULT_NO_SEND},
        {IORING_OP_SENDMSG, AZC_FAULT_NO_SENDMSG},
        {IORING_OP_ACCEPT, AZC_FAULT_NO_ACCEPT},
    };
    bool all = true;
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        all &= io_uring_opcode_supported(p, needed[i].op) && !fault(NULL, needed[i].missing);
    return all;
}

static int probe(uint32_t *features)
{
    struct io_uring ring;
    struct io_uring_params p = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    *features = 0;
    int rc = io_uring_queue_init_params(8, &ring, &p);
    if (rc == 0)
        *features |= AZC_HAS_DEFER_TASKRUN;
    else
        rc = io_uring_queue_init(8, &ring, 0);
    if (rc < 0)
        return rc;
    *features |= AZC_HAS_URING;
    struct io_uring_probe *probe = io_uring_get_probe_ring(&ring);
    if (probe) {
        if (plain_requests(probe))
            *features |= AZC_HAS_REQUESTS;
        if (io_uring_opcode_supported(probe, IORING_OP_SEND_ZC) &&
            !fault(NULL, AZC_FAULT_NO_SEND_ZC))
            *features |= AZC_HAS_SEND_ZC;
        if (io_uring_opcode_supported(probe, IORING_OP_SENDMSG_ZC) &&
            !fault(NULL, AZC_FAULT_NO_SENDMSG_ZC))
            *features |= AZC_HAS_SENDMSG_ZC;
        if (io_uring_opcode_supported(probe, IORING_OP_SOCKET) && /* 5.19, as multishot accept */
            !fault(NULL, AZC_FAULT_NO_ACCEPT_MULTISHOT))
            *features |= AZC_HAS_ACCEPT_MULTISHOT;
        io_uring_free_probe(probe);
    }
    if (try_gather_fixed(&ring) && !fault(NULL, AZC_FAULT_NO_SENDMSG_ZC_FIXED))
        *features |= AZC_HAS_SENDMSG_ZC_FIXED;
    int buf_ring;
    if (try_multishot(&ring, &buf_ring) && !fault(NULL, AZC_FAULT_NO_RECV_MULTISHOT))
        *features |= AZC_HAS_RECV_MULTISHOT;
    if (buf_ring == 0 && !fault(NULL, AZC_FAULT_NO_BUF_RING))
        *features |= AZC_HAS_BUF_RING;
    /* A limit that leaves no page for it, and no old kernel (EINVAL). */
    return buf_ring == -ENOMEM || buf_ring == -EMFILE ? buf_ring : 0;
}

/* 0 and the features, or the errno that forbids io_uring (EPERM, ENOSYS, ...). */
int azc_probe(uint32_t *features)
{
    struct sigaction trap = {.sa_sigaction = on_sigsys, .sa_flags = SA_SIGINFO}, before;
    bool guarded = sigaction(SIGSYS, &trap, &before) == 0;
    int rc = probe(features);
    if (guarded)
        sigaction(SIGSYS, &before, NULL);
    return rc;
}
