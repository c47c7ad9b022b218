/* events.c - what one event of the reactor does: bytes to a protocol, a finished operation, a
 * connection.
 *
 * Owns: nothing. Called by turn.c's walk over a batch. The common case of receiving is here; all
 * else is a method of the transport, listener or operation.
 */
#include "fast.h"

#include <errno.h>
#include <unistd.h>

/* Call `method` with what it needs in the transport's context. 0, or -1 with SystemExit or
 * KeyboardInterrupt set; other exceptions end the transport, as asyncio does. */
static int told(PyObject *owner, PyObject *rc, const char *method)
{
    if (rc) {
        Py_DECREF(rc);
        return 0;
    }
    if (must_leave())
        return -1;
    PyObject *exc = take_exception();
    PyObject *text = PyUnicode_FromFormat("Fatal error: protocol.%s() call failed.", method);
    PyObject *args[] = {owner, exc, text};
    PyObject *done = text ? PyObject_VectorcallMethod(n__fatal_error, args,
                                                      3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL)
                          : NULL;
    Py_XDECREF(text);
    Py_XDECREF(exc);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Takes `data`; NULL: an exception. */
static int deliver_bytes(PyObject *owner, PyObject *protocol, PyObject *context, PyObject *data)
{
    PyObject *rc = NULL;
    if (data && PyContext_Enter(context) == 0) {
        rc = call1(protocol, n_data_received, data);
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(rc);
    }
    Py_XDECREF(data);
    return told(owner, rc, "data_received");
}

static int deliver_copy(PyObject *owner, PyObject *protocol, PyObject *context, const char *p,
                        Py_ssize_t n)
{
    int fed = stream_feed(protocol, context, p, n);
    if (!fed)
        return deliver_bytes(owner, protocol, context, PyBytes_FromStringAndSize(p, n));
    return fed < 0 ? told(owner, NULL, "data_received") : 0;
}

static int get_buffer(PyObject *protocol, Py_buffer *view)
{
    PyObject *hint = PyLong_FromLong(-1);
    PyObject *buffer = hint ? call1(protocol, n_get_buffer, hint) : NULL;
    Py_XDECREF(hint);
    int rc = buffer ? PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE) : -1;
    Py_XDECREF(buffer);
    return rc;
}

static int buffer_updated(PyObject *protocol, Py_ssize_t n)
{
    PyObject *count = PyLong_FromSsize_t(n);
    PyObject *rc = count ? call1(protocol, n_buffer_updated, count) : NULL;
    Py_XDECREF(count);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* One buffer of the protocol is filled and told; `took` says how much of p it has. 0, or -1: an
 * exception, and `name` says of which method. */
static int fill_buffer(PyObject *protocol, const char *p, Py_ssize_t n, Py_ssize_t *took,
                       const char **name)
{
    Py_buffer view;
    *name = "get_buffer";
    if (get_buffer(protocol, &view) < 0)
        return -1;
    Py_ssize_t room = view.len;
    if (room > n)
        room = n;
    memcpy(view.buf, p, (size_t)room);
    PyBuffer_Release(&view);
    if (!room) {
        PyErr_SetString(PyExc_RuntimeError, "get_buffer() returned an empty buffer");
        return -1;
    }
    *took = room;
    *name = "buffer_updated";
    return buffer_updated(protocol, room);
}

/* What did not fit into the protocol's first buffer is Python's: between two buffers it may pause,
 * close, or be replaced. An exception that ends the run must not lose it. */
static int deliver_buffer(PyObject *owner, PyObject *protocol, PyObject *context, const char *p,
                          Py_ssize_t n, size_t start)
{
    const char *name = "get_buffer";
    Py_ssize_t took = 0;
    int rc = PyContext_Enter(context);
    if (rc == 0) {
        rc = fill_buffer(protocol, p, n, &took, &name);
        if (PyContext_Exit(context) < 0)
            rc = -1;
    }
    long left = (long)(n - took), at = (long)(start + (size_t)took);
    PyObject *done = NULL;
    if (rc == 0) {
        if (!left)
            return 0;
        done = call_ints(owner, n__on_recv, left, at);
    } else if (!left || !must_leave()) {
        return told(owner, NULL, name);
    } else {
        PyObject *exc = take_exception();
        Py_XDECREF(call_ints(owner, n__hold_at, left, at));
        restore_exception(exc);
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int deliver_eof(PyObject *owner, struct fields *f)
{
    PyObject *context = Py_NewRef(f->context);
    int rc = PyContext_Enter(context);
    if (rc == 0) {
        rc = transport_eof(owner);
        if (PyContext_Exit(context) < 0)
            rc = -1;
    }
    Py_DECREF(context);
    return rc < 0 ? told(owner, NULL, "eof_received") : 0;
}

/* In debug mode asyncio logs more. */
static int is_quiet(PyObject *loop)
{
    struct scheduler *s = scheduler_of(loop);
    return s && s->debug == Py_False;
}

/* The value of a token in `where`, a new reference; NULL without an exception: it is not there. */
static PyObject *look_up(PyObject *where, uint64_t token, int take)
{
    PyObject *key = PyLong_FromUnsignedLongLong(token);
    if (!key)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(where, key);
    Py_XINCREF(found);
    if (found && take && PyDict_DelItem(where, key) < 0)
        Py_CLEAR(found);
    Py_DECREF(key);
    return found;
}

/* ---- large receives ----
 *
 * They go straight into the bytes, or into the buffer, that the protocol gets: what would be copied
 * out of the reactor's buffers is not, and memory that was just used is used again. A connection
 * comes to that by some large ones in a row, and leaves it after some small ones. */

#define LARGE 12288 /* smaller ones lose: a poll and a call more cost what a copy does */
#define ENOUGH 3    /* large ones in a row */
#define SMALL 8192
#define PATIENCE 4    /* small ones in a row */
#define RECEIVE 66048 /* bytes asked for at once: a message of 64 KiB is seen to be all */
#define RECEIVE_MOST (256 << 10) /* after one that was filled, until some in a row were less */
#define A_TURN (256 << 10)       /* of one connection, where more waits; or a little more */

static void learn_size(struct fields *f, int n)
{
    if (f->large >= ENOUGH)
        return; /* it had arrived before */
    f->large = n < LARGE ? 0 : f->large + 1;
    if (f->large < ENOUGH)
        return;
    f->large = ENOUGH + PATIENCE - 1;
    api->direct(f->conn, 1);
}

static void leave_direct(struct fields *f)
{
    f->large = 0;
    api->direct(f->conn, 0);
}

static void learn_again(struct fields *f, int n)
{
    if (n >= SMALL)
        f->large = ENOUGH + PATIENCE - 1;
    else if (f->large > ENOUGH)
        f->large--;
    else
        leave_direct(f);
}

static void learn_room(struct fields *f, int n)
{
    if (n >= RECEIVE)
        f->full = PATIENCE;
    else if (f->full)
        f->full--;
}

/* What azc_recv answers; -EAGAIN also if there is an exception. */
static int into_bytes(PyObject *self, struct fields *f, int asked)
{
    PyObject *data = PyBytes_FromStringAndSize(NULL, asked);
    if (!data)
        return -EAGAIN;
    int n = api->recv(f->conn, PyBytes_AS_STRING(data), (size_t)asked);
    if (n <= 0) {
        Py_DECREF(data);
        return n;
    }
    learn_again(f, n);
    learn_room(f, n);
    if (n < asked)
        _PyBytes_Resize(&data, n);
    PyObject *protocol = Py_NewRef(f->protocol), *context = Py_NewRef(f->context);
    int rc = deliver_bytes(self, protocol, context, data);
    Py_DECREF(protocol);
    Py_DECREF(context);
    return rc < 0 ? -EAGAIN : n;
}

/* In the transport's context. `name`: the method that raised. */
static int fill_direct(struct fields *f, PyObject *protocol, const char **name)
{
    unsigned char fast = f->fast;
    Py_buffer view;
    *name = "get_buffer";
    if (get_buffer(protocol, &view) < 0)
        return -EAGAIN;
    int n = -EAGAIN;
    if (!view.len && fast != FAST_SINK) /* a full sink is taken away in the next turn */
        PyErr_SetString(PyExc_RuntimeError, "get_buffer() returned an empty buffer");
    else if (view.len && f->conn && f->fast == fast) /* else get_buffer() paused it, or closed it */
        n = api->recv(f->conn, view.buf, view.len < A_TURN ? (size_t)view.len : A_TURN);
    PyBuffer_Release(&view);
    if (n <= 0)
        return n;
    learn_again(f, n);
    *name = "buffer_updated";
    return buffer_updated(protocol, n) < 0 ? -EAGAIN : n;
}

static int into_buffer(PyObject *self, struct fields *f)
{
    PyObject *protocol =
        f->fast == FAST_SINK ? PyObject_GetAttr(self, n__sink) : Py_NewRef(f->protocol);
    PyObject *context = Py_NewRef(f->context);
    const char *name = "get_buffer";
    int n = -EAGAIN;
    if (protocol && PyContext_Enter(context) == 0) {
        n = fill_direct(f, protocol, &name);
        if (PyContext_Exit(context) < 0)
            n = -EAGAIN;
    }
    Py_XDECREF(protocol);
    Py_DECREF(context);
    if (PyErr_Occurred() && told(self, NULL, name) < 0)
        return -EAGAIN;
    return n;
}

/* Until the protocol paused, or closed it: the rest waits in the kernel. */
static int into_many(PyObject *self, struct fields *f)
{
    int n, asked, got = 0;
    do {
        asked = f->full ? RECEIVE_MOST : RECEIVE;
        n = into_bytes(self, f, asked);
        got += n;
    } while (n == asked && got < A_TURN && f->conn && f->fast == FAST_DATA);
    return n;
}

/* AZC_EV_READABLE. Whatever cannot be received in this way comes by events again. */
static int readable(struct batch *self, const azc_event *e)
{
    PyObject *transport = api->owner(self->r, e->token);
    if (!transport)
        return 0; /* closed */
    struct fields *f = fields_of(transport);
    int n = -EAGAIN;
    Py_INCREF(transport);
    if (f->fast == FAST_BUFFER || f->fast == FAST_SINK)
        n = into_buffer(transport, f);
    else if (f->fast == FAST_DATA)
        n = into_many(transport, f);
    else
        leave_direct(f);
    if (n <= 0 && n != -EAGAIN) {
        PyObject *done = call_ints(transport, n__on_recv, n, 0);
        Py_XDECREF(done);
    }
    Py_DECREF(transport);
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- */

static int received(struct batch *self, const azc_event *e)
{
    PyObject *transport = api->owner(self->r, e->token);
    PyObject *owner = transport ? Py_NewRef(transport) : look_up(self->conns, e->token, 0);
    if (!owner) /* closed */
        return PyErr_Occurred() ? -1 : 0;
    struct fields *f = transport ? fields_of(transport) : NULL;
    size_t start = e->arg * self->stride;
    int rc;
    if (e->res > 0 && f && f->fast)
        learn_size(f, e->res);
    if (e->res > 0 && f && (f->fast == FAST_DATA || f->fast == FAST_BUFFER)) {
        PyObject *protocol = Py_NewRef(f->protocol), *context = Py_NewRef(f->context);
        const char *p = self->memory + start;
        rc = f->fast == FAST_DATA ? deliver_copy(owner, protocol, context, p, e->res)
                                  : deliver_buffer(owner, protocol, context, p, e->res, start);
        Py_DECREF(protocol);
        Py_DECREF(context);
    } else if (e->res == 0 && f && f->fast && f->fast != FAST_SINK && is_quiet(f->loop)) {
        rc = deliver_eof(owner, f);
    } else {
        PyObject *done = call_ints(owner, n__on_recv, e->res, (long)start);
        Py_XDECREF(done);
        rc = done ? 0 : -1;
    }
    Py_DECREF(owner);
    return rc;
}

/* The address of a sockaddr, as socket.recvfrom gives it: a new reference. */
static PyObject *address_of(PyObject *owner, struct fields *f, const char *name, Py_ssize_t n)
{
    PyObject *key = PyBytes_FromStringAndSize(name, n);
    PyObject *found = key && f->addresses ? PyDict_GetItemWithError(f->addresses, key) : NULL;
    Py_XINCREF(found);
    if (key && !found && !PyErr_Occurred())
        found = call1(owner, n__learn, key);
    Py_XDECREF(key);
    return found;
}

/* An exception of the protocol is told, and the transport goes on: as asyncio. */
static int deliver_datagram(struct batch *self, const azc_event *e, PyObject *owner)
{
    struct fields *f = fields_of(owner);
    const char *p = self->memory + e->arg * self->stride;
    azc_datagram head;
    memcpy(&head, p, sizeof head);
    PyObject *protocol = Py_NewRef(f->protocol), *context = Py_NewRef(f->context), *rc = NULL;
    PyObject *address = address_of(owner, f, p + sizeof head, head.namelen);
    PyObject *data = PyBytes_FromStringAndSize(p + sizeof head + AZC_NAME_MAX, head.payloadlen);
    if (address && data && PyContext_Enter(context) == 0) {
        PyObject *args[] = {protocol, data, address};
        rc = PyObject_VectorcallMethod(n_datagram_received, args,
                                       3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(rc);
    }
    Py_XDECREF(address);
    Py_XDECREF(data);
    Py_DECREF(context);
    Py_DECREF(protocol);
    if (!rc)
        return told_by(owner, n__datagram_failed);
    Py_DECREF(rc);
    return 0;
}

static PyObject *hand_out(struct batch *self, const azc_event *e, PyObject *to)
{
    switch (e->kind) {
    case AZC_EV_WRITE:
        return call_ints(to, n__on_write, e->res, e->arg);
    case AZC_EV_DATAGRAM:
        return call_ints(to, n__on_datagram, e->res, (long)(e->arg * self->stride));
    case AZC_EV_SENT:
        return PyObject_CallMethodNoArgs(to, n__on_sent);
    default: {
        PyObject *fd = PyLong_FromLong(e->res), *rc = fd ? call1(to, n__on_accept, fd) : NULL;
        Py_XDECREF(fd);
        return rc;
    }
    }
}

/* What a transport does natively. 1: Python is to do it. */
static int by_transport(struct batch *self, const azc_event *e)
{
    PyObject *transport = api->owner(self->r, e->token);
    int rc = 1;
    if (!transport)
        return 1;
    Py_INCREF(transport);
    if (e->kind == AZC_EV_WRITE && e->arg == AZC_NOTIFY_ZC_LOW)
        rc = transport_low(transport);
    else if (e->kind == AZC_EV_WRITE && e->arg == AZC_NOTIFY_DRAINED)
        rc = transport_drained(transport);
    else if (e->kind == AZC_EV_DATAGRAM && fields_of(transport)->fast == FAST_DGRAM)
        rc = deliver_datagram(self, e, transport);
    Py_DECREF(transport);
    return rc;
}

int event_happened(struct batch *self, const azc_event *e)
{
    if (e->kind == AZC_EV_RECV)
        return received(self, e);
    if (e->kind == AZC_EV_READABLE)
        return readable(self, e);
    if (e->res >= 0 && (e->kind == AZC_EV_DATAGRAM || e->kind == AZC_EV_WRITE)) {
        int done = by_transport(self, e);
        if (done <= 0)
            return done;
    }
    int of_op = e->kind == AZC_EV_SENT || e->kind == AZC_EV_RELEASED;
    PyObject *to = look_up(of_op ? self->held : self->conns, e->token, e->kind == AZC_EV_RELEASED);
    if (!to) {
        if (PyErr_Occurred())
            return -1;
        if (e->kind == AZC_EV_ACCEPT && e->res >= 0)
            close(e->res); /* accepted for a listener that is gone */
        return 0;
    }
    if (e->kind == AZC_EV_RELEASED) { /* of an operation: plain writes have no event */
        int ended = operation_finish(to, e->res, e->arg);
        Py_DECREF(to);
        return ended;
    }
    if (e->kind == AZC_EV_ACCEPT && e->res >= 0) {
        int done = accepted(self, to, e->res);
        if (done <= 0) {
            Py_DECREF(to);
            return done;
        }
    }
    PyObject *rc = hand_out(self, e, to);
    Py_DECREF(to);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* Plain writes held by reference whose memory is free: nobody waits for them. An exception out of
 * what looks at them (checked.py) leaves only when all of them were let go. */
int drop_released(struct batch *self)
{
    uint64_t tokens[256];
    size_t n;
    PyObject *exc = NULL;
    while ((n = api->take_released(self->r, tokens, 256)))
        for (size_t i = 0; i < n; i++) {
            PyObject *held = look_up(self->held, tokens[i], 1);
            if (is_checked(held)) {
                PyObject *rc = PyObject_CallNoArgs(held);
                Py_XDECREF(rc);
            }
            Py_XDECREF(held);
            if (PyErr_Occurred())
                Py_XSETREF(exc, take_exception());
        }
    if (!exc)
        return 0;
    restore_exception(exc);
    return -1;
}
