/* aiozc.h - the whole ABI of the native reactor: C header and cffi cdef in one.
 *
 * Owned by: nobody at run time. Read by: every file in _native/ as a header, and by build.py, which
 * hands everything between the two "cdef" marks to cffi. So between the marks: only declarations
 * and "#define NAME integer"; no include, no macro with arguments, no inline code.
 *
 * Rules that every caller keeps:
 *  - All calls on one reactor come from the thread that runs the loop. Nothing here takes a lock.
 *  - Errors are negative errno values. No call raises, logs or calls back.
 *  - Pointers passed to azc_write, azc_submit and azc_zc_sendto are read until the event that gives
 * them back (AZC_EV_RELEASED, or the token in azc_reactor.released), whatever happens to the
 * socket.
 */
#ifndef AIOZC_H
#define AIOZC_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */

/* Backends. */
#define AZC_URING 1
#define AZC_EPOLL 2

/* What a connection object watches. */
#define AZC_STREAM 1
#define AZC_LISTEN 2
#define AZC_POLL 3 /* a selector's descriptor: AZC_FIRED_POLL */
#define AZC_DATAGRAM 5
#define AZC_WAKE 4    /* the loop's wake-up descriptor: AZC_FIRED_WAKE */
#define AZC_CONNECT 6 /* a socket that is connecting: AZC_NOTIFY_WRITABLE, once */

/* Kinds of event; `token` names a connection for the first three, an operation for the others. */
#define AZC_EV_RECV 1     /* res > 0: bytes in receive buffer `arg`; 0: end of file; < 0: errno */
#define AZC_EV_ACCEPT 2   /* res >= 0: a new descriptor, non-blocking; < 0: errno, disarmed */
#define AZC_EV_WRITE 3    /* `arg`: AZC_NOTIFY_*; res < 0: the errno that ended sending */
#define AZC_EV_SENT 4     /* operation: last byte accepted (only when want_sent is set) */
#define AZC_EV_RELEASED 5 /* operation: its memory is free; the azc_op is valid until next wait */
/* Like RECV; the buffer begins with an azc_datagram and its address. Or a datagram was refused by
 * the kernel with res < 0, and dropped. */
#define AZC_EV_DATAGRAM 6
/* A stream that azc_conn_direct was called for has something: azc_recv. It is told again as long as
 * there is. */
#define AZC_EV_READABLE 7

/* What azc_wait answers: a number of events (low 16 bits), and these. */
#define AZC_FIRED_EVENTS 65535
#define AZC_FIRED_POLL 65536      /* readable; watched again by the next azc_wait */
#define AZC_FIRED_WAKE 131072     /* likewise */
#define AZC_FIRED_RELEASED 262144 /* azc_take_released has tokens */

/* azc_conn_notify: asked for once, told once, also when it is true already. */
#define AZC_NOTIFY_LOW 1     /* unsent <= low */
#define AZC_NOTIFY_DRAINED 2 /* unsent == 0 */
#define AZC_NOTIFY_ZC_LOW 4  /* azc_conn_outstanding <= zc_low */
#define AZC_NOTIFY_MARK 8    /* sent_pos >= mark */
#define AZC_NOTIFY_ERROR 16  /* sending failed; everything queued was dropped */
#define AZC_NOTIFY_WRITABLE 32

/* azc_op.path: what became of the bytes, as far as the kernel told. */
#define AZC_PATH_ZC 1
#define AZC_PATH_COPIED 2
#define AZC_PATH_UNKNOWN 4

/* When plain writes go zero-copy by themselves: never; where the path was not seen to copy; always.
 */
#define AZC_WRITE_OFF 0
#define AZC_WRITE_AUTO 1
#define AZC_WRITE_ALWAYS 2

/* azc_op.state. RELEASED and FAILED are told by the event; see sendq.c for the table. */
#define AZC_QUEUED 0
#define AZC_ISSUED 1
#define AZC_SENT 2
#define AZC_RELEASED 3
#define AZC_WITHDRAWN 4
#define AZC_FAILED 5

/* Numbers of the fall-back reasons in azc_stats.fallbacks. */
#define AZC_FALLBACK_ENOMEM 0
#define AZC_FALLBACK_ENOBUFS 1
#define AZC_FALLBACK_EOPNOTSUPP 2
#define AZC_FALLBACK_CAP 3
#define AZC_FALLBACK_PATH 4 /* adaptive: the path copies anyway */
#define AZC_FALLBACK_KINDS 5

/* Features found by azc_probe, by bit. */
#define AZC_HAS_URING 1
#define AZC_HAS_SEND_ZC 2
#define AZC_HAS_SENDMSG_ZC 4
#define AZC_HAS_RECV_MULTISHOT 8
#define AZC_HAS_ACCEPT_MULTISHOT 16
#define AZC_HAS_BUF_RING 32
#define AZC_HAS_DEFER_TASKRUN 64
#define AZC_HAS_SENDMSG_ZC_FIXED 128
#define AZC_HAS_REQUESTS 256 /* every plain request that uring_submit.c makes */

#define AZC_EVENTS 4096
#define AZC_REGIONS_MAX 1024        /* in the process */
#define AZC_REGION_BYTES 1073741824 /* the kernel's limit of one */

/* azc_stats.release: bucket n counts n microseconds below 8; above, each power of two has 8
 * buckets, the n-th beginning at (8 + n % 8) << (n / 8 - 1). The last holds whatever is longer. */
#define AZC_RELEASE_BUCKETS 256

typedef struct azc_reactor azc_reactor;

typedef struct azc_iov {
    const void *base;
    size_t len;
} azc_iov;

/* 16 bytes, read by Python as struct "=QiHH". */
typedef struct azc_event {
    uint64_t token;
    int32_t res;
    uint16_t kind;
    uint16_t arg;
} azc_event;

/* How a received datagram lies in its buffer: as the kernel's multishot recvmsg writes it. The
 * address has AZC_NAME_MAX bytes of room, the payload follows it. */
#define AZC_NAME_MAX 128
typedef struct azc_datagram {
    uint32_t namelen;
    uint32_t controllen;
    uint32_t payloadlen;
    uint32_t flags;
} azc_datagram;

/* One zero-copy operation as its caller sees it; written by the reactor, except want_sent. */
typedef struct azc_op {
    uint64_t token;
    uint64_t nbytes;
    uint64_t sent;  /* bytes that the kernel accepted */
    uint32_t parts; /* parts still in a queue */
    uint32_t pins;  /* requests that may still read its memory */
    int32_t error;  /* negative errno once it failed */
    uint8_t state;
    uint8_t path;
    uint8_t want_sent;
    uint8_t kind;
} azc_op;

/* One watched descriptor. The caller may set high, low, zc_low, mark,
 * zc_threshold, zc_cap and adaptive; and zc_ok after azc_conn_open, where it was opened with family
 * 0 to leave the socket's options alone. */
typedef struct azc_conn {
    uint64_t token;
    uint64_t unsent; /* bytes queued, or in the request that is not yet sent */
    uint64_t pinned; /* bytes issued zero-copy and not released */
    uint64_t high;   /* azc_write answers 1 while unsent is above it */
    uint64_t low;
    uint64_t zc_low;
    uint64_t zc_cap;
    uint64_t zc_threshold;
    uint64_t queued_pos; /* stream position behind the last byte queued */
    uint64_t sent_pos;   /* and behind the last byte that the kernel accepted */
    uint64_t mark;
    uint64_t ref_token; /* after azc_write answered 1: not 0 = hold the buffer under this token */
    uint32_t notify;
    int32_t fd;
    int32_t error; /* negative errno: sending is over, what was queued is dropped */
    uint8_t zc_ok; /* the socket can send zero-copy at all */
    uint8_t path;  /* AZC_PATH_* of the last report that could be trusted */
    uint8_t kind;
    uint8_t adaptive; /* may be set: leave zero-copy where the path copies */
    uint8_t shared;   /* may be set: other processes may listen on it, too */
    void *owner;      /* the caller's, for azc_api.owner; not read otherwise */
    uint64_t address; /* its own, for aiozc._fast */
} azc_conn;

typedef struct azc_stats {
    uint64_t operations;
    uint64_t operations_live;
    uint64_t bytes;
    uint64_t requests;
    uint64_t zc_requests;
    uint64_t fixed_requests; /* of them, from registered memory */
    uint64_t parts;
    uint64_t notifications;
    uint64_t notifications_outstanding;
    uint64_t copied_reports;
    uint64_t fallbacks[5];
    uint64_t queued_bytes;
    uint64_t queued_peak;
    uint64_t pinned_bytes;
    uint64_t pinned_peak;
    uint64_t cq_overflows;
    uint64_t enters;
    uint64_t connections;
    uint64_t enobufs;
    uint64_t stacks;             /* requests that closed a stack: they carried MSG_EOR */
    uint64_t notification_turns; /* harvests that brought a notification */
    uint64_t direct_receives;    /* by azc_recv */
    uint64_t timeouts;           /* connections given up after zc_timeout */
    uint64_t release_max_ns;
    uint64_t release[256]; /* requests by the time from issue to notification */
} azc_stats;

typedef struct azc_config {
    uint32_t backend;
    uint32_t sq_entries; /* 0: default */
    uint32_t cq_entries;
    uint32_t recv_buffers; /* a power of two */
    uint32_t zerocopy;     /* 0: everything goes by copying */
    uint32_t msg_zerocopy; /* the same where azc_fall_back leads */
    uint32_t adaptive;
    uint32_t auto_write; /* AZC_WRITE_*: plain writes that nobody can change */
    uint32_t max_parts;
    uint32_t fixed_parts; /* that one request may gather out of registered memory; 0: none */
    uint64_t max_request; /* bytes: bounds what one request pins */
    uint64_t zc_threshold;
    uint64_t zc_low_water;
    uint64_t zc_transport_cap;
    uint64_t zc_loop_cap;
    uint64_t zc_eor_bytes;  /* a stack is closed each so many bytes; 0: never */
    uint64_t zc_timeout_ns; /* azc_conn_timeout of each new stream */
} azc_config;

/* Library-wide. */
int azc_probe(uint32_t *features);
int azc_probe_msg_zerocopy(void);
const char *azc_liburing_built(void);
int azc_liburing_runtime(void);

/* A reactor: made anywhere, attached by the thread that runs, detached when a run ends. */
azc_reactor *azc_open(const azc_config *cfg, int *err);
int azc_attach(azc_reactor *r);
int azc_fall_back(azc_reactor *r);
int azc_wait(azc_reactor *r, int64_t timeout_ns);
int azc_idle(azc_reactor *r); /* azc_wait(r, 0) would find nothing to do */
int azc_detach(azc_reactor *r);
int azc_drain(azc_reactor *r, int64_t timeout_ns);

/* For a loop that is not ours, which has no azc_wait to sleep in: a descriptor that is readable
 * when azc_wait has something to do, valid until a new ring is made or the reactor closed. A ring's
 * is an eventfd, to be read before azc_wait. azc_more: another azc_wait would do something at once.
 */
int azc_wake_fd(azc_reactor *r);
int azc_more(azc_reactor *r);
int azc_take_events(azc_reactor *r);
int azc_close(azc_reactor *r);

/* Fixed views of the reactor's memory, valid until azc_close. */
azc_event *azc_events(azc_reactor *r);
char *azc_recv_memory(azc_reactor *r, size_t *bytes, size_t *stride);
azc_stats *azc_stats_of(azc_reactor *r);

/* Plain parts held by reference whose memory is free again: tokens, taken by the caller. */
size_t azc_take_released(azc_reactor *r, uint64_t *tokens, size_t max);

/* Connections. azc_conn_close ends everything that the kernel does for it, at once; it answers 1 if
 * memory stays pinned, and azc_linger is to be called from time to time. */
azc_conn *azc_conn_open(azc_reactor *r, int fd, int kind, int family);
int azc_conn_start(azc_conn *c);
int azc_conn_stop(azc_conn *c);
/* On: what arrives on a stream is not received, but told by AZC_EV_READABLE, and azc_recv receives
 * it: the bytes, 0 at the end of the stream, -EAGAIN: nothing, or not wanted now, another -errno:
 * the end of receiving. Events of before may still come. */
void azc_conn_direct(azc_conn *c, int on);
int azc_recv(azc_conn *c, char *p, size_t n);
int azc_conn_quiesce(azc_conn *c);
void azc_conn_notify(azc_conn *c, uint32_t what);
uint64_t azc_conn_outstanding(azc_conn *c);
int azc_conn_drained(azc_conn *c);
void azc_conn_ask_low(azc_conn *c); /* AZC_NOTIFY_ZC_LOW at the loop's zc_low_water */
void azc_conn_flush(azc_conn *c);
void azc_conn_hold(azc_conn *c, int on); /* while on, what is queued waits: other bytes go first */
int azc_conn_abort(azc_conn *c, int error);
int azc_conn_close(azc_conn *c, int error);
void azc_conn_leave(azc_conn *c);
int azc_linger(azc_reactor *r, int64_t limit_ns);

/* A stream whose unsent or pinned bytes make no progress for so long (0: never) gets
 * AZC_NOTIFY_ERROR with -ETIMEDOUT, as do its operations; closing it then sends RST. */
void azc_conn_timeout(azc_conn *c, uint64_t ns);

/* Sending. azc_write's `by_reference`: nobody changes it; AZC_KEEP: and it may go zero-copy. */
#define AZC_KEEP 1
#define AZC_KEEP_COPIED 2
int azc_write(azc_conn *c, const char *p, size_t n, int by_reference);
int azc_sendto(azc_conn *c, const char *p, size_t n, const char *name, size_t namelen);
azc_op *azc_submit(azc_conn *c, const azc_iov *parts, size_t n);
azc_op *azc_submit_one(azc_conn *c, const char *p, size_t n);
azc_op *azc_zc_sendto(azc_conn *c, const azc_iov *parts, size_t n, const char *name, size_t namelen,
                      int segment);
int azc_withdraw(azc_conn *c, azc_op *op);

/* Memory that rings register when they first meet it; see regions.c. azc_region_register does it
 * now: 0, or the errno that this ring's kernel gave; -ENXIO: there is no ring of this thread. */
uint64_t azc_region_add(const char *base, size_t len);
int azc_region_drop(uint64_t id);
int azc_region_register(azc_reactor *r, uint64_t id);

/* Memory of a pool; see pages.c. */
char *azc_map(size_t len, int huge);
void azc_unmap(char *base, size_t len, int huge);

/* What aiozc._fast calls, for it is another shared object. `owner`: what the caller put into the
 * connection of that token, NULL: it is closed. */
typedef struct azc_api {
    int (*wait)(azc_reactor *r, int64_t timeout_ns);
    int (*write)(azc_conn *c, const char *p, size_t n, int by_reference);
    azc_op *(*submit)(azc_conn *c, const azc_iov *parts, size_t n);
    size_t (*take_released)(azc_reactor *r, uint64_t *tokens, size_t max);
    void *(*owner)(azc_reactor *r, uint64_t token);
    int (*withdraw)(azc_conn *c, azc_op *op);
    int (*idle)(azc_reactor *r);
    int (*drained)(azc_conn *c);
    void (*ask_low)(azc_conn *c);
    int (*sendto)(azc_conn *c, const char *p, size_t n, const char *name, size_t namelen);
    int (*copy_now)(azc_conn *c);
    azc_op *(*zc_sendto)(azc_conn *c, const azc_iov *parts, size_t n, const char *name,
                         size_t namelen, int segment);
    azc_conn *(*conn_open)(azc_reactor *r, int fd, int kind, int family);
    int (*conn_start)(azc_conn *c);
    int (*conn_stop)(azc_conn *c);
    void (*conn_notify)(azc_conn *c, uint32_t what);
    int (*conn_close)(azc_conn *c, int error);
    void (*conn_leave)(azc_conn *c);
    void (*direct)(azc_conn *c, int on);
    int (*recv)(azc_conn *c, char *p, size_t n);
} azc_api;
const azc_api *azc_api_table(void);

/* cdef end */

#endif
