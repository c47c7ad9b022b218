/* transport.c - the base type of the transports: the fields that every event reads, and write().
 *
 * Owns: the native connection's pointer of a transport, from _bind to _unbind. The type is made at
 * import on asyncio's own classes (base.py), whose instances are slots only; its fields lie behind
 * them. So isinstance(transport, asyncio.Transport) holds, and a message costs no look-up.
 *
 * Never: uses the connection after _unbind, which comes before azc_conn_close.
 */
#include "fast.h"

#include <structmember.h>

#define COPY_NOW 65536  /* smaller ones are worth gathering */
#define GIL_BYTES 16384 /* azc_write copies smaller writes; larger ones may be a system call */
/* A smaller one that only the caller refers to is memory that his next one would use again, from
 * the cache. Pinned, each needs new memory, and the heap grows and is trimmed: 32 page faults for
 * 128 KiB. */
#define ONCE_BYTES (256 << 10)
/* Of one call of zc_sendto; datagram.py says why. */
#define MAX_SEGMENT 65507
#define MAX_SEGMENTS 128

static Py_ssize_t base_size;
PyTypeObject *transport_type;

struct fields *fields_of(PyObject *transport)
{
    return (struct fields *)((char *)transport + base_size);
}

/* NULL: an exception is set. */
static azc_conn *conn_of_transport(PyObject *transport)
{
    azc_conn *conn = fields_of(transport)->conn;
    if (!conn)
        PyErr_SetString(PyExc_ConnectionResetError, "the transport is closed");
    return conn;
}

/* The slots of asyncio's classes: their own traverse cannot be called from here (it begins at the
 * object's type again). */
static PyObject **slots_of(PyObject *self)
{
    return (PyObject **)((char *)self + sizeof(PyObject));
}

static Py_ssize_t slot_count(void)
{
    return (base_size - (Py_ssize_t)sizeof(PyObject)) / (Py_ssize_t)sizeof(PyObject *);
}

static const size_t references[] = {
    offsetof(struct fields, protocol),  offsetof(struct fields, context),
    offsetof(struct fields, loop),      offsetof(struct fields, reactor),
    offsetof(struct fields, server),    offsetof(struct fields, held),
    offsetof(struct fields, waiters),   offsetof(struct fields, names),
    offsetof(struct fields, addresses), offsetof(struct fields, view),
    offsetof(struct fields, sock),      offsetof(struct fields, made_of),
    offsetof(struct fields, info),      offsetof(struct fields, here),
    offsetof(struct fields, peer),      offsetof(struct fields, waiting),
    offsetof(struct fields, sink),      offsetof(struct fields, marks),
    offsetof(struct fields, turns),     offsetof(struct fields, empty_waiter),
};
#define REFERENCES (sizeof references / sizeof *references)

static PyObject **reference(PyObject *self, size_t i)
{
    return (PyObject **)((char *)fields_of(self) + references[i]);
}

static int traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (size_t i = 0; i < REFERENCES; i++)
        Py_VISIT(*reference(self, i));
    for (Py_ssize_t i = 0; i < slot_count(); i++)
        Py_VISIT(slots_of(self)[i]);
    return 0;
}

static int clear(PyObject *self)
{
    for (size_t i = 0; i < REFERENCES; i++)
        Py_CLEAR(*reference(self, i));
    for (Py_ssize_t i = 0; i < slot_count(); i++)
        Py_CLEAR(slots_of(self)[i]);
    return 0;
}

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Is the protocol paused, and is the end of that asked for (base.py)? Then there is nothing to do
 * about a queue that is over high water. */
static int is_paused(const azc_conn *conn)
{
    return (conn->notify & AZC_NOTIFY_LOW) != 0;
}

/* From 3.14 on a local variable may be all that refers to what its function calls us with. */
static int only_the_call_has(PyObject *data)
{
#if PY_VERSION_HEX >= 0x030E0000
    return PyUnstable_Object_IsUniqueReferencedTemporary(data);
#else
    return Py_REFCNT(data) == 1;
#endif
}

/* write(data): what nearly every call is, bytes on an open transport, is queued here. */
static PyObject *tr_write(PyObject *self, PyObject *data)
{
    struct fields *f = fields_of(self);
    if (f->open != OPEN_STREAM || !f->conn || !PyBytes_CheckExact(data))
        return call1(self, n__write, data);
    Py_ssize_t n = PyBytes_GET_SIZE(data);
    int rc, keep = AZC_KEEP;
    if (n < ONCE_BYTES && only_the_call_has(data))
        keep = AZC_KEEP_COPIED;
    if (n > GIL_BYTES) {
        azc_conn *conn = f->conn;
        Py_BEGIN_ALLOW_THREADS;
        rc = api->write(conn, PyBytes_AS_STRING(data), (size_t)n, keep);
        Py_END_ALLOW_THREADS;
    } else {
        rc = api->write(f->conn, PyBytes_AS_STRING(data), (size_t)n, keep);
    }
    if (!rc)
        Py_RETURN_NONE;
    if (rc < 0)
        return no_memory_to_write();
    if (f->conn && hold(f->held, f->conn, data) < 0)
        return NULL;
    if (rc > 0 && f->conn && !f->conn->error && f->conn->unsent > f->conn->high &&
        is_paused(f->conn))
        Py_RETURN_NONE;
    return call1(self, n__look, data);
}

/* An Operation of `class` for locked buffers, not queued yet. Where they are checked that runs
 * Python (reactor.checked): look at the transport afterwards. */
static PyObject *prepare(PyObject *self, PyObject *class, PyObject *parts)
{
    struct fields *f = fields_of(self);
    if (!f->loop || !f->reactor)
        return PyErr_Format(PyExc_AttributeError, "the transport has no loop");
    PyObject *loop = Py_NewRef(f->loop), *reactor = Py_NewRef(f->reactor);
    PyObject *keep = checked_type ? call1(reactor, n_checked, parts) : Py_NewRef(parts);
    PyObject *op = keep ? operation_new(class, loop, reactor, keep) : NULL;
    Py_XDECREF(keep);
    Py_XDECREF(loop);
    Py_XDECREF(reactor);
    return op;
}

/* The native one was queued (NULL: no memory for it): `op` is held before any line of Python runs.
 * Takes the reference to `op`. NULL: an exception, and nothing is queued. */
static PyObject *admit(struct fields *f, PyObject *op, azc_op *native)
{
    PyObject *token = native ? PyLong_FromUnsignedLongLong(native->token) : NULL;
    if (!token || PyDict_SetItem(f->held, token, op) < 0) {
        if (native)
            api->withdraw(f->conn, native);
        PyErr_Clear();
        PyErr_SetString(PyExc_MemoryError, "aiozc: no memory for an operation; nothing was queued");
        Py_XDECREF(token);
        Py_DECREF(op);
        return NULL;
    }
    Py_DECREF(token);
    operation_start(op, f->conn, native);
    return op;
}

/* Pause the protocol where the queue is over high water now. Takes and gives the reference to `op`.
 */
static PyObject *review_queue(PyObject *self, struct fields *f, PyObject *op)
{
    if (op && f->conn && f->conn->unsent > f->conn->high && !is_paused(f->conn)) {
        PyObject *rc = PyObject_CallMethodNoArgs(self, n__maybe_pause_protocol);
        if (!rc)
            Py_CLEAR(op);
        Py_XDECREF(rc);
    }
    return op;
}

/* zc_write(data): a buffer or a list of buffers on an open transport. */
static PyObject *tr_zc_write(PyObject *self, PyObject *data)
{
    struct fields *f = fields_of(self);
    if (f->open != OPEN_STREAM || f->closing || !f->conn)
        return call1(self, n__zc_write, data);
    PyObject *parts = Py_IS_TYPE(data, parts_type) ? Py_NewRef(data) : parts_make(data);
    if (!parts)
        return NULL;
    PyObject *op = prepare(self, operation_class, parts);
    /* Locking may have run code of the buffers' owners. */
    int usual = parts_bytes(parts) && f->open == OPEN_STREAM && !f->closing && f->conn;
    if (op && usual)
        op = admit(f, op, parts_queue(parts, f->conn));
    else if (op)
        Py_SETREF(op, call1(self, n__zc_write, parts));
    Py_DECREF(parts);
    return review_queue(self, f, op);
}

/* _send_now(op): who waits for the release of what he just queued, and cannot withdraw it, gains
 * nothing by a turn of the loop where the path copies, as far as anybody knows. It is held by now,
 * so the GIL may be given up. */
static PyObject *tr_send_now(PyObject *self, PyObject *op)
{
    struct fields *f = fields_of(self);
    azc_conn *conn = f->conn;
    if (!PyObject_TypeCheck(op, operation_base))
        return PyErr_Format(PyExc_TypeError, "an operation is needed");
    if (!conn || conn->path != AZC_PATH_COPIED || !conn->adaptive || conn->unsent < COPY_NOW)
        Py_RETURN_NONE;
    int went;
    Py_BEGIN_ALLOW_THREADS;
    went = api->copy_now(conn);
    Py_END_ALLOW_THREADS;
    if (went && operation_settle(op, f->held) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- datagrams ---- */

static PyObject *datagram_operation; /* the class */

static PyObject *queue_datagram(PyObject *self, PyObject *parts, PyObject *name, int segment)
{
    PyObject *op = prepare(self, datagram_operation, parts);
    azc_conn *conn = op ? conn_of_transport(self) : NULL; /* that, or locking, may have closed it */
    struct fields *f = fields_of(self);
    if (conn)
        op = admit(f, op, parts_queue_datagram(parts, conn, name, segment));
    else
        Py_CLEAR(op);
    return review_queue(self, f, op);
}

/* _zc_datagram(parts, sockaddr, segment): for what zc_sendto leaves to Python. */
static PyObject *tr_zc_datagram(PyObject *self, PyObject *args)
{
    PyObject *parts, *name;
    int segment;
    if (!PyArg_ParseTuple(args, "O!Si:_zc_datagram", parts_type, &parts, &name, &segment))
        return NULL;
    return queue_datagram(self, parts, name, segment);
}

/* The sockaddr of an address that was sent to before; borrowed. NULL: Python has to look. */
static PyObject *known_name(struct fields *f, PyObject *addr)
{
    if (f->open != OPEN_DATAGRAM || f->closing || !f->conn || !f->names ||
        !PyDict_CheckExact(f->names) || (addr != Py_None && !PyTuple_CheckExact(addr)))
        return NULL;
    PyObject *name = PyDict_GetItemWithError(f->names, addr);
    if (!name)
        PyErr_Clear(); /* an address that cannot be hashed */
    return name && PyBytes_CheckExact(name) ? name : NULL;
}

/* segment_size where it is what it should be, 0: none; -1: Python has to look. Of a socket that
 * sends zero-copy it is known that it is UDP's. */
static int known_segment(struct fields *f, PyObject *segment)
{
    if (segment == Py_None)
        return 0;
    if (!PyLong_CheckExact(segment) || !f->conn || !f->conn->zc_ok)
        return -1;
    long n = PyLong_AsLong(segment);
    if (n < 1 || n > MAX_SEGMENT) {
        PyErr_Clear();
        return -1;
    }
    return (int)n;
}

/* zc_sendto(data, addr=None, segment_size=None): one buffer to a known address is queued here. */
static PyObject *zc_sendto(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    PyObject *data = n ? args[0] : NULL, *addr = n > 1 ? args[1] : Py_None;
    PyObject *asked = n > 2 ? args[2] : Py_None, *name = NULL, *op = NULL;
    int odd = n < 1 || n > 3, segment = 0;
    for (Py_ssize_t i = 0; kwnames && i < PyTuple_GET_SIZE(kwnames); i++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, i);
        if (key == n_addr && n < 2)
            addr = args[n + i];
        else if (key == n_segment_size && n < 3)
            asked = args[n + i];
        else
            odd = 1;
    }
    if (!odd && !PyList_CheckExact(data) && !PyTuple_CheckExact(data) &&
        (segment = known_segment(fields_of(self), asked)) >= 0)
        name = Py_XNewRef(known_name(fields_of(self), addr));
    if (name) {
        PyObject *parts = parts_make(data);
        int fits = parts && (!segment || parts_bytes(parts) <= (size_t)segment * MAX_SEGMENTS);
        if (fits)
            op = queue_datagram(self, parts, name, segment);
        Py_XDECREF(parts);
        Py_DECREF(name);
        if (fits || !parts)
            return op;
    }
    PyObject *method = PyObject_GetAttr(self, n__zc_sendto);
    op = method ? PyObject_Vectorcall(method, args, (size_t)n, kwnames) : NULL;
    Py_XDECREF(method);
    return op;
}

static PyMethodDef zc_sendto_def = {
    "zc_sendto", (PyCFunction)(void (*)(void))zc_sendto, METH_FASTCALL | METH_KEYWORDS,
    "zc_sendto($self, data, addr=None, segment_size=None)\n--\n\n"
    "Queue one datagram zero-copy: a buffer, or a list of buffers that it is gathered from.\n\n"
    "segment_size: UDP GSO. `data` becomes datagrams of so many bytes each, the last one may be\n"
    "shorter; at most 65507 bytes a call (65527 over IPv6). It is one operation: whole, or not at\n"
    "all.\n"
    "Never waits. It leaves in call order with what `sendto` queued. The memory stays locked, and\n"
    "must not be changed, until `released`. An error of sending (EMSGSIZE, EPERM, no route) fails\n"
    "the operation, and `error_received` is not called for it. What the network reports "
    "afterwards\n"
    "(ICMP) names no datagram: it reaches `error_received`, and costs no other operation its\n"
    "datagram.\n\n"
    "TypeError, BufferError: as zc_write. ValueError: the address is missing, not the connected\n"
    "one, or not numeric; segment_size is out of range, asks for more than 128 segments, or the\n"
    "socket is not UDP; more than 1024 buffers. ConnectionResetError: the transport is closing.\n"
    "Nothing is queued then."};

/* zc_sendto as a method of datagram transports alone; `kind` is the class of its operations. */
PyObject *zc_sendto_method(PyObject *module, PyObject *kind)
{
    (void)module;
    if (!PyType_Check(kind) || !PyType_IsSubtype((PyTypeObject *)kind, operation_base))
        return PyErr_Format(PyExc_TypeError, "a class of operations is needed");
    Py_XSETREF(datagram_operation, Py_NewRef(kind));
    return PyDescr_NewMethod(transport_type, &zc_sendto_def);
}

/* ---- zc_drain ---- */

/* Does broadcast wait for levels of its own? Then Python decides about all. */
static int has_turns(PyObject *self)
{
    return attr_true(self, n__turns);
}

/* _zc_wait(): None, or a future for when unsent and pinned bytes are at most zc_low_water. */
static PyObject *tr_zc_wait(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct fields *f = fields_of(self);
    if (f->open && f->conn && api->drained(f->conn))
        Py_RETURN_NONE;
    int turns = f->open && f->conn ? has_turns(self) : 1;
    if (turns)
        return turns < 0 ? NULL : PyObject_CallMethodNoArgs(self, n__low_waiter);
    if (!f->waiters || !PyList_CheckExact(f->waiters)) {
        PyObject *none_yet = PyList_New(0);
        if (!none_yet)
            return NULL;
        Py_XSETREF(f->waiters, none_yet);
    }
    PyObject *loop = PyObject_GetAttr(self, n__loop);
    PyObject *future = loop ? PyObject_CallMethodNoArgs(loop, n_create_future) : NULL;
    Py_XDECREF(loop);
    if (!future || PyList_Append(f->waiters, future) < 0) {
        Py_XDECREF(future);
        return NULL;
    }
    if (f->conn)
        api->ask_low(f->conn);
    return future;
}

/* The level is reached, and nothing else happened. 1: Python is to look; -1: an exception. */
int transport_low(PyObject *self)
{
    struct fields *f = fields_of(self);
    if (!f->open || !f->conn || !f->waiters || !PyList_CheckExact(f->waiters))
        return 1;
    int turns = has_turns(self);
    if (turns)
        return turns;
    if (!api->drained(f->conn)) { /* more was submitted meanwhile */
        api->ask_low(f->conn);
        return 0;
    }
    PyObject *waiters = f->waiters;
    f->waiters = NULL;
    int rc = 0;
    for (Py_ssize_t i = 0; rc == 0 && i < PyList_GET_SIZE(waiters); i++) {
        PyObject *waiter = PyList_GET_ITEM(waiters, i), *done;
        done = PyObject_CallMethodNoArgs(waiter, n_done); /* cancelled */
        rc = done ? 0 : -1;
        if (done == Py_False) {
            PyObject *set = call1(waiter, n_set_result, Py_None);
            rc = set ? 0 : -1;
            Py_XDECREF(set);
        }
        Py_XDECREF(done);
    }
    Py_DECREF(waiters);
    return rc;
}

static PyObject *tr_bind(PyObject *self, PyObject *args)
{
    unsigned long long address;
    PyObject *held;
    if (!PyArg_ParseTuple(args, "KO!:_bind", &address, &PyDict_Type, &held))
        return NULL;
    struct fields *f = fields_of(self);
    f->conn = (azc_conn *)(uintptr_t)address;
    Py_XSETREF(f->held, Py_NewRef(held));
    f->conn->owner = self; /* borrowed: reactor.conns holds the transport as long */
    Py_RETURN_NONE;
}

static PyObject *tr_unbind(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct fields *f = fields_of(self);
    if (f->conn)
        f->conn->owner = NULL;
    f->conn = NULL;
    f->open = f->fast = 0;
    Py_CLEAR(f->view);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"write", tr_write, METH_O,
     "Queue bytes, a bytearray, a memoryview, or aiozc.frozen(obj), behind what was written "
     "before.\n\n"
     "What the caller changes afterwards is never seen by the peer. RuntimeError: after "
     "write_eof().\n"
     "TypeError: not bytes-like. On a lost connection it does nothing, as asyncio's."},
    {"zc_write", tr_zc_write, METH_O,
     "Queue a buffer, or a list of buffers, zero-copy; its Operation. See StreamWriter.zc_submit."},
    {"_zc_wait", tr_zc_wait, METH_NOARGS,
     "None: unsent and pinned bytes are at most zc_low_water; else a future for when they are."},
    {"_send_now", tr_send_now, METH_O,
     "(operation that was just queued): see StreamWriter.zc_send."},
    {"_zc_datagram", tr_zc_datagram, METH_VARARGS,
     "(Parts, sockaddr, bytes of a segment or 0): queue it; its operation."},
    {"_bind", tr_bind, METH_VARARGS, "(address of the transport's azc_conn, reactor.held)"},
    {"_unbind", tr_unbind, METH_NOARGS, "The connection is about to be closed. Idempotent."},
    {NULL, NULL, 0, NULL},
};

/* ---- datagrams ---- */

/* sendto(data, addr=None): bytes to an address that was seen before are queued here. */
static PyObject *dg_sendto(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    struct fields *f = fields_of(self);
    PyObject *to = NULL;
    if (!names && n && n <= 2 && PyBytes_CheckExact(args[0]))
        to = known_name(f, n == 2 ? args[1] : Py_None);
    if (!to || !f->conn) { /* hashing an address may run code */
        PyObject *method = PyObject_GetAttr(self, n__sendto);
        PyObject *rc = method ? PyObject_Vectorcall(method, args, (size_t)n, names) : NULL;
        Py_XDECREF(method);
        return rc;
    }
    int rc = api->sendto(f->conn, PyBytes_AS_STRING(args[0]), (size_t)PyBytes_GET_SIZE(args[0]),
                         PyBytes_AS_STRING(to), (size_t)PyBytes_GET_SIZE(to));
    if (rc < 0)
        return PyErr_Format(PyExc_MemoryError, "aiozc: no memory to queue a datagram");
    if (rc && !is_paused(f->conn))
        return PyObject_CallMethodNoArgs(self, n__maybe_pause_protocol);
    Py_RETURN_NONE;
}

/* Not in the base type: streams have none. */
PyObject *datagram_sendto(PyObject *module, PyObject *ignored)
{
    (void)module, (void)ignored;
    static PyMethodDef method = {
        "sendto", (PyCFunction)(void (*)(void))dg_sendto, METH_FASTCALL | METH_KEYWORDS,
        "sendto($self, /, data, addr=None)\n--\n\n"
        "Queue a copy of one datagram; those of one turn leave together, in call order.\n\n"
        "addr: where the socket is not connected. TypeError: not bytes-like. ValueError: another "
        "address than\nthe connected one. Errors of sending reach error_received."};
    return PyDescr_NewMethod(transport_type, &method);
}

/* ---- the type ---- */

/* The native connection as Python sees it, or after its end what stands for it. */
static PyObject *get_view(PyObject *self, void *closure)
{
    (void)closure;
    struct fields *f = fields_of(self);
    if (!f->view) {
        PyObject *at = PyLong_FromUnsignedLongLong((uintptr_t)f->conn);
        PyObject *view = at ? call1(self, n__view, at) : NULL;
        Py_XDECREF(at);
        if (!view)
            return NULL;
        Py_XSETREF(f->view, view);
    }
    return Py_NewRef(f->view);
}

/* Few ask for the socket of an accepted connection. From then on the descriptor is the socket's. */
static PyObject *get_sock(PyObject *self, void *closure)
{
    (void)closure;
    struct fields *f = fields_of(self);
    if (!f->sock && f->owns_fd) {
        PyObject *sock = PyObject_CallMethodNoArgs(self, n__own_socket);
        if (!sock)
            return NULL;
        if (!f->owns_fd) { /* another thread asked meanwhile, or it was closed */
            PyObject *rc = PyObject_CallMethodNoArgs(sock, n_detach);
            Py_DECREF(sock);
            if (!rc)
                return NULL;
            Py_DECREF(rc);
            return Py_NewRef(f->sock ? f->sock : Py_None);
        }
        f->owns_fd = 0;
        f->sock = sock;
    }
    return Py_NewRef(f->sock ? f->sock : Py_None);
}

static int set_sock(PyObject *self, PyObject *sock, void *closure)
{
    (void)closure;
    struct fields *f = fields_of(self);
    f->owns_fd = 0;
    Py_XSETREF(f->sock, sock && sock != Py_None ? Py_NewRef(sock) : NULL);
    return 0;
}

static PyObject *get_is_open(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(fields_of(self)->sock || fields_of(self)->owns_fd);
}

static PyGetSetDef made_when_asked[] = {
    {"_conn", get_view, NULL, "The azc_conn.", NULL},
    {"_sock", get_sock, set_sock, "The socket; None once it is closed.", NULL},
    {"_has_socket", get_is_open, NULL, "Is the socket not closed?", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Offsets are those in struct fields, until the size of the base is known. */
#define FIELD(name, type, field)                                                                   \
    {                                                                                              \
        name, type, (Py_ssize_t)offsetof(struct fields, field), 0, NULL                            \
    }
static const PyMemberDef fields[] = {
    FIELD("_protocol", T_OBJECT, protocol),
    FIELD("_context", T_OBJECT, context),
    FIELD("_loop", T_OBJECT, loop),
    FIELD("_reactor", T_OBJECT, reactor),
    FIELD("_server", T_OBJECT, server),
    FIELD("_names", T_OBJECT, names),
    FIELD("_addresses", T_OBJECT, addresses),
    FIELD("_zc_waiters", T_OBJECT, waiters),
    FIELD("_made_of", T_OBJECT, made_of),
    FIELD("_info", T_OBJECT, info),
    FIELD("_here", T_OBJECT, here),
    FIELD("_peer", T_OBJECT, peer),
    FIELD("_held", T_OBJECT, waiting),
    FIELD("_sink", T_OBJECT, sink),
    FIELD("_marks", T_OBJECT, marks),
    FIELD("_turns", T_OBJECT, turns),
    FIELD("_empty_waiter", T_OBJECT, empty_waiter),
    FIELD("_sock_fd", T_INT, fd),
    FIELD("_conn_lost", T_INT, lost),
    FIELD("_fast", T_UBYTE, fast),
    FIELD("_open", T_UBYTE, open),
    FIELD("_closing", T_BOOL, closing),
    FIELD("_paused", T_BOOL, paused),
    FIELD("_protocol_paused", T_BOOL, protocol_paused),
    FIELD("_started", T_BOOL, started),
    FIELD("_buffered", T_BOOL, buffered),
    FIELD("_eof", T_BOOL, eof),
    FIELD("_eof_seen", T_BOOL, eof_seen),
    {NULL, 0, 0, 0, NULL},
};
#define MEMBERS (sizeof fields / sizeof *fields - 1)

/* The methods of this file and of life.c. */
static PyMethodDef *all_methods(void)
{
    static PyMethodDef all[32];
    size_t n = 0;
    PyMethodDef *const tables[] = {methods, life_methods};
    for (size_t i = 0; i < 2; i++)
        for (PyMethodDef *m = tables[i]; m->ml_name; m++)
            all[n++] = *m;
    return all;
}

PyObject *transport_base(PyObject *module, PyObject *bases)
{
    (void)module;
    static PyMemberDef members[MEMBERS + 1];
    if (!PyTuple_Check(bases) || !PyTuple_GET_SIZE(bases) ||
        !PyType_Check(PyTuple_GET_ITEM(bases, 0))) {
        PyErr_SetString(PyExc_TypeError, "a tuple of classes is needed");
        return NULL;
    }
    base_size = ((PyTypeObject *)PyTuple_GET_ITEM(bases, 0))->tp_basicsize;
    memcpy(members, fields, sizeof members);
    for (size_t i = 0; i < MEMBERS; i++)
        members[i].offset += base_size;
    PyType_Slot slots[] = {
        {Py_tp_traverse, traverse},
        {Py_tp_clear, clear},
        {Py_tp_dealloc, dealloc},
        {Py_tp_methods, all_methods()},
        {Py_tp_members, members},
        {Py_tp_getset, made_when_asked},
        {Py_tp_finalize, transport_finalize},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "aiozc._fast.Transport",
        .basicsize = (int)(base_size + (Py_ssize_t)sizeof(struct fields)),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
        .slots = slots,
    };
    if (life_bind() < 0)
        return NULL;
    transport_type = (PyTypeObject *)PyType_FromSpecWithBases(&spec, bases);
    return Py_XNewRef((PyObject *)transport_type);
}
