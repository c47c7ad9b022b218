/* faults.h - what a build for tests (AIOZC_FAULTS=1) pretends that the kernel, or the memory, does.
 *
 * Included by internal.h. In any other build every hook below is a constant: no code, no field, no
 * name in the ABI. Between the marks: declarations for cffi, as in aiozc.h, read in such a build
 * only.
 */
#ifndef AZC_FAULTS_H
#define AZC_FAULTS_H

#include "aiozc.h"

#include <stdbool.h>
#include <sys/socket.h>

/* cdef begin */

/* Every n-th time that `kind` could happen it does; 0: never. A reactor of NULL: as each reactor
 * made from now on begins, and what azc_probe finds. */
int azc_fault(azc_reactor *r, int kind, uint32_t every);
uint64_t azc_fault_fired(int kind);   /* how often, in this process */
const char *azc_fault_name(int kind); /* kinds count from 0; NULL: no more of them */

/* cdef end */

/* clang-format off */
#define AZC_FAULTS(X) \
    /* a zero-copy request ends with this error, before a byte of it was sent */ \
    X(ZC_ENOMEM, zc_enomem) X(ZC_ENOBUFS, zc_enobufs) \
    /* the system call of a datagram of azc_zc_sendto that goes by copying */ \
    X(COPY_ENOBUFS, copy_enobufs) \
    /* any request, or system call, that sends */ \
    X(EAGAIN, eagain) X(ECANCELED, ecanceled) X(SHORT_SEND, short_send) \
    /* entering the ring: half of what is prepared is taken, or nothing */ \
    X(SHORT_SUBMIT, short_submit) X(EINTR, eintr) X(EBUSY, ebusy) \
    /* the wake-up descriptor, or the selector's, fired, and nobody is told */ \
    X(LOST_WAKE, lost_wake) \
    /* notifications: some harvests later than they came; told twice */ \
    X(LATE_NOTIF, late_notif) X(TWICE_NOTIF, twice_notif) \
    /* a reactor made with queues of 2 and 4 entries, or with 2 receive buffers (any n) */ \
    X(CQ_OVERFLOW, cq_overflow) X(RECV_ENOBUFS, recv_enobufs) \
    /* no memory for a request; for an operation or the copy of a write */ \
    X(REQ_NOMEM, req_nomem) X(OP_NOMEM, op_nomem) \
    /* the probe does not find it (any n) */ \
    X(NO_SEND_ZC, no_send_zc) X(NO_SENDMSG_ZC, no_sendmsg_zc) \
    X(NO_RECV_MULTISHOT, no_recv_multishot) X(NO_ACCEPT_MULTISHOT, no_accept_multishot) \
    X(NO_BUF_RING, no_buf_ring) X(NO_SENDMSG_ZC_FIXED, no_sendmsg_zc_fixed) \
    X(NO_NOP, no_nop) X(NO_POLL, no_poll) X(NO_CANCEL, no_cancel) X(NO_RECV, no_recv) \
    X(NO_RECVMSG, no_recvmsg) X(NO_SEND, no_send) X(NO_SENDMSG, no_sendmsg) X(NO_ACCEPT, no_accept)
/* clang-format on */

#define AZC_FAULT_MEMBER(kind, name) AZC_FAULT_##kind,
enum fault_kind { AZC_FAULTS(AZC_FAULT_MEMBER) AZC_FAULT_KINDS };

struct conn;
struct req;
struct io_uring;
struct io_uring_sqe;

#ifdef AIOZC_FAULTS

#define FAULTS_BUILT 1
#define LATE_NOTIFS 256

struct late_notif {
    uint64_t token;
    bool copied;
    uint32_t turns; /* harvests until it is told */
};

struct faults {
    uint32_t every[AZC_FAULT_KINDS], count[AZC_FAULT_KINDS];
    struct late_notif late[LATE_NOTIFS];
    uint32_t n_late;
};

/* The hooks. `fault`: should it happen now? r NULL: to the probe. */
bool fault(azc_reactor *r, enum fault_kind kind);
void faults_open(azc_reactor *r);
void faults_close(azc_reactor *r);
ssize_t faults_sendmsg(struct conn *c, const struct msghdr *m, int flags);
void faults_request(struct conn *c, struct req *q, struct io_uring_sqe *sqe);
int32_t faults_answer(const struct req *q, int32_t res);
bool faults_enter(azc_reactor *r, struct io_uring *ring, int *rc);
bool faults_notif(azc_reactor *r, uint64_t token, bool copied); /* true: not now */
void faults_harvest(azc_reactor *r, bool all);
int64_t faults_wait(azc_reactor *r, int64_t ns);

#else

#define FAULTS_BUILT 0
#define fault(r, kind) ((void)(r), false)
#define faults_open(r) ((void)(r))
#define faults_close(r) ((void)(r))
#define faults_sendmsg(c, m, flags) sendmsg((c)->pub.fd, m, flags)
#define faults_request(c, q, sqe) ((void)(sqe))
#define faults_answer(q, res) (res)
#define faults_enter(r, ring, rc) ((void)(rc), false)
#define faults_notif(r, token, copied) false
#define faults_harvest(r, all) ((void)(r))
#define faults_wait(r, ns) (ns)

#endif
#endif
