/* fast.h - what the files of aiozc._fast share: the part of the loop that runs once an event.
 *
 * aiozc._fast is a CPython extension beside the cffi module: it calls the same reactor through the
 * function table azc_api, and does in C what Python would do for every event, write and callback.
 * It has no policy: whatever is not the common case is a call of the Python method that knows.
 * Files: module.c (names, errors), transport.c (base type of the transports, write), turn.c (one
 * turn of the loop, the walk over its events), schedule.c (call_soon), operation.c (what an
 * operation knows), parts.c (buffers locked for it), slot.c (a pool's buffer).
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
    X(_debug)                                                                                      \
    X(_closed)                                                                                     \
    X(context)                                                                                     \
    X(_stopping)                                                                                   \
    X(_scheduled)                                                                                  \
    X(_ready)                                                                                      \
    X(_timer_cancelled_count)                                                                      \
    X(_clock_resolution)                                                                           \
    X(_cancelled)                                                                                  \
    X(_when)                                                                                       \
    X(_run)                                                                                        \
    X(time)                                                                                        \
    X(append)                                                                                      \
    X(popleft)                                                                                     \
    X(_fired)                                                                                      \
    X(data_received)                                                                               \
    X(get_buffer)                                                                                  \
    X(buffer_updated)                                                                              \
    X(_fatal_error)                                                                                \
    X(_on_recv)                                                                                    \
    X(_hold_at)                                                                                    \
    X(_on_write)                                                                                   \
    X(_on_accept)                                                                                  \
    X(_on_datagram)                                                                                \
    X(_on_sent)                                                                                    \
    X(_look)                                                                                       \
    X(_wake)                                                                                       \
    X(_loop)                                                                                       \
    X(_reactor)                                                                                    \
    X(_zc_write)                                                                                   \
    X(release)                                                                                     \
    X(checked)                                                                                     \
    X(_zc_sendto)                                                                                  \
    X(addr)                                                                                        \
    X(segment_size)                                                                                \
    X(_maybe_pause_protocol)                                                                       \
    X(_write)
#define DECLARE(name) extern PyObject *n_##name;
NAMES(DECLARE)
#undef DECLARE

/* The exception that is set, normalized and with its traceback; nothing is set any more. */
PyObject *take_exception(void);
/* Is SystemExit or KeyboardInterrupt set? Those end the run. */
int must_leave(void);
PyObject *call1(PyObject *self, PyObject *name, PyObject *arg);
PyObject *call_ints(PyObject *self, PyObject *name, long a, long b);

/* ---- transport.c ---- */

/* What receiving may do without asking Python: `_fast` of a transport. */
#define FAST_DATA 1   /* protocol.data_received */
#define FAST_BUFFER 2 /* protocol.get_buffer and buffer_updated */

#define OPEN_STREAM 1   /* write() and zc_write() may queue */
#define OPEN_DATAGRAM 2 /* zc_sendto() may */

struct fields { /* of a transport, behind the slots of asyncio's classes */
    azc_conn *conn;
    PyObject *protocol, *context;
    PyObject *held; /* the reactor's, by token: who keeps what locked */
    PyObject
        *names; /* of a datagram socket: sockaddr by address; None: where a call without one goes */
    unsigned char fast; /* FAST_*, or 0: see stream.py's _review */
    unsigned char open; /* OPEN_*, or 0: the call has to ask Python */
    char closing;       /* close() or abort() was called */
};

struct fields *fields_of(PyObject *transport);
azc_conn *conn_of_transport(PyObject *transport); /* NULL: an exception is set */
PyObject *transport_base(PyObject *module, PyObject *bases);
PyObject *zc_sendto_method(PyObject *module, PyObject *kind);

/* ---- operation.c ---- */

extern PyTypeObject *operation_base;
extern PyObject *operation_class; /* aiozc.Operation */
extern PyType_Spec operation_spec;
PyObject *operation_new(PyObject *type, PyObject *loop, PyObject *reactor, PyObject *keep);
void operation_start(PyObject *op, azc_conn *conn, azc_op *native);
int operation_finish(PyObject *op, int error, int path);

/* ---- turn.c, parts.c ---- */

size_t parts_bytes(PyObject *parts);
azc_op *parts_queue(PyObject *parts, azc_conn *conn);
azc_op *parts_queue_datagram(PyObject *parts, azc_conn *conn, PyObject *name, int segment);
int hold(PyObject *held, const azc_conn *conn, PyObject *data);

extern PyObject *frozen_type; /* buffers.Frozen */
extern PyObject *refuse;      /* buffers.refuse(obj, exc): raises what tells the remedy */
/* checked.Checked, whose instance stands for the Parts that it holds and is called at the release.
 * NULL: no loop of this process ever wanted that. */
extern PyObject *checked_type;
static inline int is_checked(PyObject *keep)
{
    return checked_type && keep && (PyObject *)Py_TYPE(keep) == checked_type;
}
extern PyType_Spec core_spec, parts_spec, scheduler_spec, slot_spec;

/* Is the attribute true? -1: an exception. */
int attr_true(PyObject *o, PyObject *name);

/* ---- schedule.c ---- */

/* asyncio's Handle and TimerHandle, and Handle._run as it was at import: somebody may have put
 * another in its place. */
extern PyTypeObject *handle_type, *timer_type;
extern PyObject *handle_run;
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
PyObject *handle_slot(PyObject *handle, int slot); /* borrowed */
PyObject *bind_handle(PyObject *module, PyObject *args);

extern PyTypeObject *core_type, *parts_type;

#endif
