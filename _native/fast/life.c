/* life.c - how a transport begins and ends: connection_made, end of file, close, connection_lost.
 *
 * Owns: the order of these, which is asyncio's, and the descriptor of a connection for which nobody
 * asked for a socket object. Called by accept.c and events.c, and as methods of the transport. A
 * short connection spends most of its time here (bench/peers.py, row churn). What few connections
 * meet is a method of base.py or stream.py.
 *
 * Never: closes a descriptor before azc_conn_close; nothing of it is with the kernel afterwards.
 */
#include "fast.h"

#include <errno.h>
#include <unistd.h>

static PyObject *base_protocol, *stream_protocol, *buffered_protocol; /* asyncio's */
static int attach_takes_transport;                                    /* Server._attach, _detach */

int life_bind(void)
{
    PyObject *protocols = PyImport_ImportModule("asyncio.protocols");
    if (!protocols)
        return -1;
    Py_XSETREF(base_protocol, PyObject_GetAttrString(protocols, "BaseProtocol"));
    Py_XSETREF(stream_protocol, PyObject_GetAttrString(protocols, "Protocol"));
    Py_XSETREF(buffered_protocol, PyObject_GetAttrString(protocols, "BufferedProtocol"));
    Py_DECREF(protocols);
    return base_protocol && stream_protocol && buffered_protocol ? 0 : -1;
}

/* uvloop's rule: a BaseProtocol that has the methods is a BufferedProtocol, too. -1: an exception.
 */
int protocol_is_buffered(PyObject *protocol)
{
    int is = PyObject_IsInstance(protocol, buffered_protocol);
    if (is)
        return is;
    if ((is = PyObject_IsInstance(protocol, base_protocol)) <= 0)
        return is;
    if ((is = PyObject_IsInstance(protocol, stream_protocol)))
        return is < 0 ? -1 : 0;
    return PyObject_HasAttr(protocol, n_get_buffer);
}

PyObject *is_buffered(PyObject *module, PyObject *protocol)
{
    (void)module;
    int is = protocol_is_buffered(protocol);
    return is < 0 ? NULL : PyBool_FromLong(is);
}

/* ---- the server that it belongs to ---- */

PyObject *servers_take_transport(PyObject *module, PyObject *says)
{
    (void)module;
    attach_takes_transport = PyObject_IsTrue(says);
    Py_RETURN_NONE;
}

int server_told(PyObject *server, PyObject *method, PyObject *transport)
{
    PyObject *rc = attach_takes_transport ? call1(server, method, transport)
                                          : PyObject_CallMethodNoArgs(server, method);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* ---- the beginning ---- */

/* connection_made, then data: also after an error in it, as asyncio. -1: that error. */
int transport_begin(PyObject *self)
{
    struct fields *f = fields_of(self);
    PyObject *protocol = f->protocol ? Py_NewRef(f->protocol) : Py_NewRef(Py_None);
    PyObject *rc = call1(protocol, n_connection_made, self);
    Py_DECREF(protocol);
    f->started = 1;
    if (f->conn)
        (f->closing || f->paused ? api->conn_stop : api->conn_start)(f->conn);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

static PyObject *tr_begin(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    if (transport_begin(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- the end of file ---- */

/* The peer sends nothing more, and nothing waits before that. -1: an exception of eof_received. */
int transport_eof(PyObject *self)
{
    struct fields *f = fields_of(self);
    f->eof_seen = 1;
    PyObject *protocol = Py_NewRef(f->protocol);
    PyObject *keep = PyObject_CallMethodNoArgs(protocol, n_eof_received);
    Py_DECREF(protocol);
    int open = keep ? PyObject_IsTrue(keep) : -1;
    Py_XDECREF(keep);
    if (open)
        return open < 0 ? -1 : 0;
    PyObject *rc = PyObject_CallMethodNoArgs(self, n_close);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* ---- closing ---- */

static void lose(struct fields *f)
{
    f->lost++;
    f->open = 0;
}

static PyObject *lost_soon(PyObject *self, struct fields *f)
{
    PyObject *method = PyObject_GetAttr(self, n__call_connection_lost);
    if (!method)
        return NULL;
    PyObject *args[] = {f->loop, method, Py_None, f->context};
    PyObject *handle = PyObject_VectorcallMethod(n_call_soon, args,
                                                 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, only_context);
    Py_DECREF(method);
    Py_XDECREF(handle);
    if (!handle)
        return NULL;
    Py_RETURN_NONE;
}

/* The collector runs in any thread, and what it collects closes: StreamWriter.__del__, a
 * coroutine's `finally`. */
static PyObject *close_by_loop(PyObject *self, struct fields *f)
{
    PyObject *loop = Py_NewRef(f->loop), *method = PyObject_GetAttr(self, n_close);
    PyObject *handle = method ? call1(loop, n_call_soon_threadsafe, method) : NULL;
    Py_XDECREF(method);
    Py_DECREF(loop);
    if (!handle)
        return NULL;
    Py_DECREF(handle);
    Py_RETURN_NONE;
}

static PyObject *tr_close(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct fields *f = fields_of(self);
    if (f->closing)
        Py_RETURN_NONE;
    if (scheduler_elsewhere(f->loop))
        return close_by_loop(self, f);
    if (f->open != OPEN_STREAM || !f->conn || !f->loop || !f->context)
        return PyObject_CallMethodNoArgs(self, n__close);
    f->closing = 1;
    f->fast = 0;
    Py_CLEAR(f->waiting);
    api->conn_stop(f->conn);
    if (f->conn->unsent || f->protocol_paused) {
        /* A paused protocol may write once more when it is resumed: TLS keeps its last records. */
        api->conn_notify(f->conn, AZC_NOTIFY_DRAINED);
        Py_RETURN_NONE;
    }
    lose(f);
    return lost_soon(self, f);
}

/* All is sent. 1: Python is to look; -1: an exception. */
int transport_drained(PyObject *self)
{
    struct fields *f = fields_of(self);
    if (!f->closing || f->open != OPEN_STREAM || !f->conn || f->conn->unsent || f->lost)
        return 1;
    lose(f);
    PyObject *context = Py_NewRef(f->context), *rc = NULL;
    if (PyContext_Enter(context) == 0) {
        rc = call1(self, n__call_connection_lost, Py_None);
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(rc);
    }
    Py_DECREF(context);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* ---- the end ---- */

/* loop._transports has the transport by descriptor; asyncio's sendfile takes it out, too. */
static int unlist(PyObject *self, struct fields *f)
{
    PyObject *all = PyObject_GetAttr(f->loop, n__transports), *fd = PyLong_FromLong(f->fd);
    int rc = all && fd ? 0 : -1;
    if (rc == 0 && PyDict_CheckExact(all) && PyDict_GetItemWithError(all, fd) == self)
        rc = PyDict_DelItem(all, fd);
    Py_XDECREF(fd);
    Py_XDECREF(all);
    return PyErr_Occurred() ? -1 : rc;
}

static int forget(PyObject *where, uint64_t token)
{
    PyObject *key = PyLong_FromUnsignedLongLong(token);
    int rc = key ? PyDict_DelItem(where, key) : -1;
    Py_XDECREF(key);
    if (rc < 0 && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
        rc = 0;
    }
    return rc;
}

/* The native connection, and with it the descriptor if nobody else has it. `left`: the reactor has
 * it now, and whoever else has it is to let go of it. */
static int close_native(struct fields *f, int *left)
{
    azc_conn *conn = f->conn;
    int fd = f->owns_fd ? f->fd : -1, has_fd = fd >= 0 || f->sock, rc = 0;
    f->conn = NULL;
    f->fast = f->open = f->owns_fd = 0;
    Py_CLEAR(f->view);
    PyObject *conns = PyObject_GetAttr(f->reactor, n_conns);
    if (conn)
        conn->owner = NULL;
    int known = conns && conn && PyDict_Check(conns) ? forget(conns, conn->token) : 0;
    Py_XDECREF(conns);
    Py_BEGIN_ALLOW_THREADS;
    if (conn)
        rc = api->conn_close(conn, -ECONNABORTED);
    *left = rc < 0 && has_fd;
    if (*left)
        api->conn_leave(conn);
    else if (fd >= 0)
        close(fd); /* an error says nothing that anybody could do something about */
    Py_END_ALLOW_THREADS;
    if (!rc || !conns || known < 0)
        return conns ? known : -1;
    PyObject *told = PyLong_FromLong(rc), *done = told ? call1(f->reactor, n__pinned, told) : NULL;
    Py_XDECREF(told);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int give_up_socket(struct fields *f, PyObject *method)
{
    PyObject *sock = f->sock;
    if (!sock)
        return 0;
    f->sock = NULL;
    PyObject *rc = PyObject_CallMethodNoArgs(sock, method);
    Py_DECREF(sock);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* Does somebody wait for what will not come any more? */
static int somebody_waits(struct fields *f)
{
    PyObject *const who[] = {f->sink, f->waiters, f->turns, f->marks, f->empty_waiter};
    for (size_t i = 0; i < sizeof who / sizeof *who; i++)
        if (who[i] && who[i] != Py_None)
            return 1;
    return 0;
}

static int told_ended(PyObject *self)
{
    PyObject *rc = PyObject_CallMethodNoArgs(self, n__ended);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* As `finally`: what was raised last is told, and what came before is its context. */
static void raised(PyObject **error, int rc)
{
    if (rc >= 0)
        return;
    PyObject *exc = take_exception();
    if (exc == *error)
        Py_DECREF(exc);
    else if (*error)
        PyException_SetContext(exc, *error);
    *error = exc;
}

/* After connection_lost, whatever that did, and each step whatever the one before it did. */
static void end(PyObject *self, struct fields *f, PyObject **error)
{
    int left = 0;
    if (f->reactor)
        raised(error, close_native(f, &left));
    if (f->loop)
        raised(error, unlist(self, f));
    raised(error, give_up_socket(f, left ? n_detach : n_close));
    Py_CLEAR(f->protocol);
    if (somebody_waits(f))
        raised(error, told_ended(self));
    Py_CLEAR(f->loop);
    PyObject *server = f->server;
    f->server = NULL;
    if (server && server != Py_None)
        raised(error, server_told(server, n__detach, self));
    Py_XDECREF(server);
}

/* One that was not made to the end: as if it had never been. */
void transport_undo(PyObject *self)
{
    struct fields *f = fields_of(self);
    PyObject *error = NULL;
    lose(f);
    Py_CLEAR(f->server);
    end(self, f, &error);
    if (error) {
        restore_exception(error);
        PyErr_WriteUnraisable(self);
    }
}

/* _call_connection_lost(exc), once, as asyncio's. */
static PyObject *tr_call_connection_lost(PyObject *self, PyObject *exc)
{
    struct fields *f = fields_of(self);
    PyObject *protocol = f->protocol ? Py_NewRef(f->protocol) : NULL, *error = NULL;
    if (protocol && protocol != Py_None) {
        PyObject *rc = call1(protocol, n_connection_lost, exc);
        raised(&error, rc ? 0 : -1);
        Py_XDECREF(rc);
    }
    Py_XDECREF(protocol);
    end(self, f, &error);
    if (!error)
        Py_RETURN_NONE;
    restore_exception(error);
    return NULL;
}

/* A transport that nobody closed. */
void transport_finalize(PyObject *self)
{
    struct fields *f = fields_of(self);
    if (!f->sock && !f->owns_fd)
        return;
    PyObject *exc = PyErr_Occurred() ? take_exception() : NULL;
    PyObject *rc = PyObject_CallMethodNoArgs(self, n__unclosed);
    if (!rc)
        PyErr_WriteUnraisable(self);
    Py_XDECREF(rc);
    if (exc)
        restore_exception(exc);
}

/* Asked for each drain() of a StreamWriter. */
static PyObject *tr_is_closing(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    return PyBool_FromLong(fields_of(self)->closing);
}

PyMethodDef life_methods[] = {
    {"close", tr_close, METH_NOARGS, "Flushes what is queued, in order, then closes. Idempotent."},
    {"is_closing", tr_is_closing, METH_NOARGS, "Was close() or abort() called, or is it lost?"},
    {"_begin", tr_begin, METH_NOARGS, "connection_made, and from then on data."},
    {"_call_connection_lost", tr_call_connection_lost, METH_O,
     "connection_lost(exc), then the end of connection and socket."},
    {NULL, NULL, 0, NULL},
};
