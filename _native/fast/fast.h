/* fast.h - what the files of aiozc._fast share: the part of the loop that runs once an event.
 *
 * aiozc._fast is a CPython extension beside the cffi module: it calls the same reactor through the
 * function table azc_api, and does in C what Python would do for every event, write and callback.
 * It has no policy: whatever is not the common case is a call of the Python method that knows.
 * Files: module.c (names, errors); turn.c (one turn of the loop), events.c (what an event does),
 * feed.c (bytes into a StreamReader),
 * schedule.c (call_soon and the like), handle.c, ready.c and timers.c (what they make, and where it
 * waits); transport.c (base type of the transports, write), life.c (how a transport begins and
 * ends), accept.c (the transport of an accepted connection), operation.c (what an operation knows),
 * parts.c (buffers locked for it), slot.c (a pool's buffer).
 *
 * Never: keeps a borrowed reference over a call into Python; lets an exception pass but SystemExit
 * and KeyboardInterrupt (turn.c reports the others as asyncio does).
 */
#ifndef AIOZC_FAST_H
#define AIOZC_FAST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "aiozc.h"

/* ---- module.c ---- */

extern const azc_api *api; /* the reactor's functions; set once by bind() */

/* Interned names of attributes and methods. */
#define NAMES(X)                                                                                   \
    X(context)                                                                                     \
    X(_scheduled)                                                                                  \
    X(_cancelled)                                                                                  \
    X(_when)                                                                                       \
    X(_run)                                                                                        \
    X(time)                                                                                        \
    X(call_at)                                                                                     \
    X(loop)                                                                                        \
    X(name)                                                                                        \
    X(Task)                                                                                        \
    X(Future)                                                                                      \
    X(_task_factory)                                                                               \
    X(_write_to_self)                                                                              \
    X(_fired)                                                                                      \
    X(data_received)                                                                               \
    X(get_buffer)                                                                                  \
    X(buffer_updated)                                                                              \
    X(_fatal_error)                                                                                \
    X(_on_recv)                                                                                    \
    X(_hold_at)                                                                                    \
    X(_sink)                                                                                       \
    X(_on_write)                                                                                   \
    X(_on_accept)                                                                                  \
    X(_on_datagram)                                                                                \
    X(_datagram_failed)                                                                            \
    X(datagram_received)                                                                           \
    X(_low_waiter)                                                                                 \
    X(_turns)                                                                                      \
    X(create_future)                                                                               \
    X(done)                                                                                        \
    X(set_result)                                                                                  \
    X(_learn)                                                                                      \
    X(_sendto)                                                                                     \
    X(_on_sent)                                                                                    \
    X(_look)                                                                                       \
    X(_wake)                                                                                       \
    X(_waited)                                                                                     \
    X(_outcome)                                                                                    \
    X(_loop)                                                                                       \
    X(_reactor)                                                                                    \
    X(_zc_write)                                                                                   \
    X(release)                                                                                     \
    X(checked)                                                                                     \
    X(_zc_sendto)                                                                                  \
    X(addr)                                                                                        \
    X(segment_size)                                                                                \
    X(_maybe_pause_protocol)                                                                       \
    X(conns)                                                                                       \
    X(call_soon)                                                                                   \
    X(call_soon_threadsafe)                                                                        \
    X(close)                                                                                       \
    X(detach)                                                                                      \
    X(connection_made)                                                                             \
    X(connection_lost)                                                                             \
    X(eof_received)                                                                                \
    X(_attach)                                                                                     \
    X(_call_connection_lost)                                                                       \
    X(_close)                                                                                      \
    X(_detach)                                                                                     \
    X(_ended)                                                                                      \
    X(_failed)                                                                                     \
    X(_not_begun)                                                                                  \
    X(_own_socket)                                                                                 \
    X(_pinned)                                                                                     \
    X(_transports)                                                                                 \
    X(_unclosed)                                                                                   \
    X(_view)                                                                                       \
    X(_stream_reader)                                                                              \
    X(_stream_reader_wr)                                                                           \
    X(feed_data)                                                                                   \
    X(_wakeup_waiter)                                                                              \
    X(_buffer)                                                                                     \
    X(_waiter)                                                                                     \
    X(_eof)                                                                                        \
    X(_limit)                                                                                      \
    X(cancelled)                                                                                   \
    X(acquire)                                                                                     \
    X(_write)
#define DECLARE(name) extern PyObject *n_##name;
NAMES(DECLARE)
#undef DECLARE

/* The exception that is set, normalized and with its traceback; nothing is set any more. */
PyObject *take_exception(void);
void restore_exception(PyObject *exception); /* takes the reference; drops what is set */
/* Is SystemExit or KeyboardInterrupt set? Those end the run. */
int must_leave(void);
int told_by(PyObject *who, PyObject *method);
PyObject *call1(PyObject *self, PyObject *name, PyObject *arg);
PyObject *call_ints(PyObject *self, PyObject *name, long a, long b);

/* ---- transport.c ---- */

/* What receiving may do without asking Python: `_fast` of a transport. */
#define FAST_DATA 1   /* protocol.data_received */
#define FAST_BUFFER 2 /* protocol.get_buffer and buffer_updated */
#define FAST_DGRAM 3  /* protocol.datagram_received */
#define FAST_SINK 4   /* large receives alone: get_buffer and buffer_updated of `_sink` */

#define OPEN_STREAM 1   /* write() and zc_write() may queue */
#define OPEN_DATAGRAM 2 /* zc_sendto() may */

struct fields { /* of a transport, behind the slots of asyncio's classes */
    azc_conn *conn;
    PyObject *protocol, *context, *loop, *reactor, *server;
    PyObject *held;    /* the reactor's, by token: who keeps what locked */
    PyObject *waiters; /* of zc_drain(): a list of futures, or NULL */
    PyObject *names;   /* of a datagram socket: sockaddr by address; None: of a call without one */
    PyObject *addresses;   /* and the other way round */
    PyObject *view;        /* conn as Python sees it; made when it asks */
    PyObject *sock;        /* NULL: closed; or made when Python asks (owns_fd) */
    PyObject *made_of;     /* then: (family, type, proto) */
    PyObject *info;        /* of get_extra_info; NULL: made when Python asks, of the next two */
    PyObject *here, *peer; /* sockaddr, as bytes; NULL: it could not be told */
    /* What few transports have, else NULL or false: see stream.py. */
    PyObject *waiting, *sink, *marks, *turns, *empty_waiter;
    int fd, lost;
    unsigned char fast; /* FAST_*, or 0: see stream.py's _review */
    unsigned char open; /* OPEN_*, or 0: the call has to ask Python */
    char closing;       /* close() or abort() was called */
    char paused, protocol_paused, started, buffered, eof, eof_seen;
    char owns_fd;        /* no socket object has it */
    unsigned char large; /* how receives were of late, by size: see events.c */
    unsigned char full;  /* and how direct ones were */
};

struct fields *fields_of(PyObject *transport);
PyObject *transport_base(PyObject *module, PyObject *bases);
int transport_low(PyObject *transport);
extern PyTypeObject *transport_type;
PyObject *datagram_sendto(PyObject *module, PyObject *ignored);
PyObject *zc_sendto_method(PyObject *module, PyObject *kind);

/* ---- life.c ---- */

extern PyMethodDef life_methods[];
int life_bind(void);
void transport_finalize(PyObject *transport);
int protocol_is_buffered(PyObject *protocol);
PyObject *is_buffered(PyObject *module, PyObject *protocol);
PyObject *servers_take_transport(PyObject *module, PyObject *says);
int server_told(PyObject *server, PyObject *method, PyObject *transport);
void transport_undo(PyObject *transport);
int transport_begin(PyObject *transport);
int transport_eof(PyObject *transport);
int transport_drained(PyObject *transport);

/* ---- accept.c ---- */

extern PyTypeObject *acceptor_type;
extern PyType_Spec acceptor_spec;
struct batch;
int accepted(struct batch *b, PyObject *listener, int fd);

/* ---- operation.c ---- */

extern PyTypeObject *operation_base;
extern PyObject *operation_class; /* aiozc.Operation */
extern PyType_Spec operation_spec;
PyObject *operation_new(PyObject *type, PyObject *loop, PyObject *reactor, PyObject *keep);
void operation_start(PyObject *op, azc_conn *conn, azc_op *native);
int operation_finish(PyObject *op, int error, int path);
int operation_settle(PyObject *op, PyObject *held);
int operation_done(PyObject *op, int of_sent);
PyObject *operation_outcome(PyObject *op, int of_sent);

/* ---- stage.c ---- */

extern PyTypeObject *stage_type, *answer_type;
extern PyType_Spec stage_spec, answer_spec;
PyObject *stage_await(PyObject *op, int is_sent);

/* ---- parts.c ---- */

PyObject *parts_make(PyObject *data);
size_t parts_bytes(PyObject *parts);
azc_op *parts_queue(PyObject *parts, azc_conn *conn);
azc_op *parts_queue_datagram(PyObject *parts, azc_conn *conn, PyObject *name, int segment);
int hold(PyObject *held, const azc_conn *conn, PyObject *data);
PyObject *no_memory_to_write(void);

extern PyObject *frozen_type; /* buffers.Frozen */
extern PyObject *refuse;      /* buffers.refuse(obj, exc): raises what tells the remedy */
/* checked.Checked, whose instance stands for the Parts that it holds and is called at the release.
 * NULL: no loop of this process ever wanted that. */
extern PyObject *checked_type;
static inline int is_checked(PyObject *keep)
{
    return checked_type && keep && (PyObject *)Py_TYPE(keep) == checked_type;
}

/* ---- ready.c ---- */

typedef struct {
    PyObject_HEAD PyObject **ring; /* a power of two */
    size_t mask, head, count;
} Ready;

int ready_push(Ready *self, PyObject *handle);
PyObject *ready_pop(Ready *self); /* of one that is not empty */

/* ---- handle.c ---- */

/* asyncio's Handle and TimerHandle, and our subclasses of them and of _ThreadSafeHandle (or NULL).
 */
extern PyTypeObject *handle_type, *timer_type, *our_handle, *our_timer, *our_safe;
enum {
    HANDLE_CALLBACK,
    HANDLE_ARGS,
    HANDLE_CANCELLED,
    HANDLE_LOOP,
    HANDLE_TRACEBACK,
    HANDLE_REPR,
    HANDLE_CONTEXT,
    HANDLE_SLOTS
};
int handle_bind(PyObject *module, PyTypeObject *handle, PyTypeObject *timer, PyTypeObject *safe);
extern Py_ssize_t handle_at[HANDLE_SLOTS], timer_due_at;
/* Borrowed; of one of these types. */
static inline PyObject *handle_slot(PyObject *handle, int slot)
{
    return *(PyObject **)((char *)handle + handle_at[slot]);
}
static inline int handle_is_ours(PyObject *handle)
{
    return Py_IS_TYPE(handle, our_handle) || Py_IS_TYPE(handle, our_timer) ||
           Py_IS_TYPE(handle, our_safe);
}
/* Of a timer of ours: its deadline. */
static inline double timer_due(PyObject *timer)
{
    return *(double *)((char *)timer + timer_due_at);
}
int handle_is_plain(PyObject *handle);
int handle_run_is_known(void);
PyObject *handle_call(PyObject *handle);
void handle_track(PyObject *handle);
PyObject *handle_new(PyObject *loop, PyObject *context, PyObject *callback, PyObject *const *args,
                     Py_ssize_t n);
PyObject *handle_new_safe(PyObject *loop, PyObject *context, PyObject *callback,
                          PyObject *const *args, Py_ssize_t n);
PyObject *timer_new(PyObject *loop, PyObject *context, PyObject *when, double due,
                    PyObject *callback, PyObject *const *args, Py_ssize_t n);
void timer_set_scheduled(PyObject *timer, int is);

/* ---- schedule.c ---- */

struct scheduler { /* of the loop: in front of what its Python classes add */
    PyObject_HEAD PyObject *debug, *closed, *stopping;
    PyObject *scheduled; /* a list, the heap of timers */
    Ready *ready;
    Py_ssize_t timers_cancelled; /* of those in the heap */
    double resolution;           /* of the clock, seconds */
    unsigned int seen_version;   /* of the loop's class, when own_call_at was found out */
    char own_call_at;
    char running;         /* run_forever runs */
    unsigned long thread; /* in this one */
    char woken;           /* the bell rang, or there is a byte in the wake-up socket */
    char wakes;           /* these two are open */
    int wake_in, bell;
};
struct scheduler *scheduler_of(PyObject *loop);
void scheduler_track(struct scheduler *s);
int scheduler_woken(struct scheduler *s);
int scheduler_elsewhere(PyObject *loop);
PyObject *bind_asyncio(PyObject *module, PyObject *args);
PyTypeObject *scheduler_new_type(void);

/* ---- timers.c ---- */

int timers_push(PyObject *list, PyObject *timer);
int timers_drop_cancelled(struct scheduler *s, Py_ssize_t many);
int timers_wait(struct scheduler *s, double longest, int64_t *ns);
int timers_ripe(struct scheduler *s);

/* ---- feed.c ---- */

PyObject *bind_streams(PyObject *module, PyObject *args);
int stream_feed(PyObject *protocol, PyObject *context, const char *p, Py_ssize_t n);

/* ---- events.c ---- */

struct batch { /* events of one azc_wait, and what of them was handed out */
    azc_reactor *r;
    azc_event *events;
    char *memory;
    size_t stride;
    PyObject *conns, *held; /* dictionaries of the Reactor, by token */
    int n, i;
};
int event_happened(struct batch *b, const azc_event *e);
int drop_released(struct batch *b);

/* Is the attribute true? -1: an exception. */
int attr_true(PyObject *o, PyObject *name);

extern PyTypeObject *core_type, *parts_type, *ready_type;
extern PyType_Spec core_spec, parts_spec, slot_spec, ready_spec;
extern PyObject *only_loop, *only_context; /* ("loop",), ("context",) */

#endif
