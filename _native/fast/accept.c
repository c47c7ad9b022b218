/* accept.c - from an accepted descriptor to a protocol with its transport.
 *
 * Owns: nothing but the fields of a listener that each connection reads; base type of listener.py's
 * Listener. No socket object, no dictionary of addresses and no weak reference is made for a
 * connection: transport.c and base.py make them for who asks. The peer's address is read at once,
 * for it is gone with the connection.
 */
#include "fast.h"

#include <errno.h>
#include <structmember.h>
#include <sys/socket.h>
#include <unistd.h>

PyTypeObject *acceptor_type;

struct acceptor {
    PyObject_HEAD PyObject *loop, *reactor, *factory, *server, *context;
    PyObject *transport; /* class; None: Python makes it (TLS) */
    PyObject *made_of;   /* (family, type, proto) */
    PyObject *here;      /* its sockaddr, where all connections have it */
    int family;
    char same_here;
};

/* A sockaddr as bytes. NULL without an exception: the kernel does not tell it (any more). */
static PyObject *name_of(int (*ask)(int, struct sockaddr *, socklen_t *), int fd)
{
    struct sockaddr_storage name;
    socklen_t n = sizeof name;
    if (ask(fd, (struct sockaddr *)&name, &n) < 0)
        return NULL;
    return PyBytes_FromStringAndSize((char *)&name, n < sizeof name ? n : sizeof name);
}

static PyObject *own_name(struct acceptor *a, int fd)
{
    if (a->here)
        return Py_NewRef(a->here);
    PyObject *name = name_of(getsockname, fd);
    if (name && a->same_here)
        a->here = Py_NewRef(name);
    return name;
}

static int put(PyObject *where, PyObject *key, PyObject *value)
{
    int rc = where && key ? PyObject_SetItem(where, key, value) : -1;
    Py_XDECREF(key);
    return rc;
}

/* Everybody who has to know the transport is told. */
static int introduce(struct batch *b, struct acceptor *a, PyObject *self, struct fields *f)
{
    if (put(b->conns, PyLong_FromUnsignedLongLong(f->conn->token), self) < 0)
        return -1;
    PyObject *all = PyObject_GetAttr(a->loop, n__transports);
    int rc = put(all, PyLong_FromLong(f->fd), self);
    Py_XDECREF(all);
    if (rc < 0 || !a->server || a->server == Py_None)
        return rc;
    if (server_told(a->server, n__attach, self) < 0)
        return -1;
    f->server = Py_NewRef(a->server);
    return 0;
}

/* Takes the descriptor, also where it fails. */
static PyObject *make(struct batch *b, struct acceptor *a, PyObject *protocol, PyObject *context,
                      int fd)
{
    PyTypeObject *type = (PyTypeObject *)a->transport;
    int buffered = protocol_is_buffered(protocol);
    PyObject *self = buffered < 0 ? NULL : type->tp_alloc(type, 0);
    if (!self) {
        close(fd);
        return NULL;
    }
    struct fields *f = fields_of(self);
    f->fd = fd;
    f->owns_fd = 1;
    f->protocol = Py_NewRef(protocol);
    f->context = Py_NewRef(context);
    f->loop = Py_NewRef(a->loop);
    f->reactor = Py_NewRef(a->reactor);
    f->made_of = Py_NewRef(a->made_of);
    f->held = Py_NewRef(b->held);
    f->peer = name_of(getpeername, fd);
    f->here = own_name(a, fd);
    f->buffered = buffered != 0;
    f->conn = PyErr_Occurred() ? NULL : api->conn_open(b->r, fd, AZC_STREAM, a->family);
    if (!f->conn && !PyErr_Occurred())
        PyErr_SetString(PyExc_MemoryError, "aiozc: no memory for a connection");
    if (f->conn) {
        f->conn->owner = self; /* borrowed: reactor.conns holds the transport as long */
        f->fast = buffered ? FAST_BUFFER : FAST_DATA;
        f->open = OPEN_STREAM;
        if (introduce(b, a, self, f) == 0)
            return self;
    }
    PyObject *exc = take_exception();
    f->closing = 1;
    transport_undo(self);
    Py_DECREF(self);
    restore_exception(exc);
    return NULL;
}

static int serve(struct batch *b, struct acceptor *a, PyObject *context, int fd)
{
    PyObject *factory = Py_NewRef(a->factory);
    PyObject *protocol = PyObject_CallNoArgs(factory), *transport = NULL;
    Py_DECREF(factory);
    if (protocol)
        transport = make(b, a, protocol, context, fd);
    else
        close(fd);
    Py_XDECREF(protocol);
    if (!transport)
        return told_by((PyObject *)a, n__failed);
    int rc = transport_begin(transport);
    if (rc < 0)
        rc = told_by(transport, n__not_begun);
    Py_DECREF(transport);
    return rc;
}

/* A connection for a listener: 0; -1: an exception; 1: Python is to do it. */
int accepted(struct batch *b, PyObject *listener, int fd)
{
    if (!PyObject_TypeCheck(listener, acceptor_type))
        return 1;
    struct acceptor *a = (struct acceptor *)listener;
    if (!a->transport || !PyType_Check(a->transport) || !a->context || !a->made_of ||
        !PyType_IsSubtype((PyTypeObject *)a->transport, transport_type))
        return 1;
    /* What a protocol factory sets in its context is that connection's. */
    PyObject *context = PyContext_Copy(a->context);
    if (!context || PyContext_Enter(context) < 0) {
        Py_XDECREF(context);
        close(fd);
        return -1;
    }
    int rc = serve(b, a, context, fd);
    if (PyContext_Exit(context) < 0)
        rc = -1;
    Py_DECREF(context);
    return rc;
}

/* ---- the type ---- */

static int traverse(struct acceptor *a, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(a));
    Py_VISIT(a->loop);
    Py_VISIT(a->reactor);
    Py_VISIT(a->factory);
    Py_VISIT(a->server);
    Py_VISIT(a->context);
    Py_VISIT(a->transport);
    Py_VISIT(a->made_of);
    Py_VISIT(a->here);
    return 0;
}

static int clear(struct acceptor *a)
{
    Py_CLEAR(a->loop);
    Py_CLEAR(a->reactor);
    Py_CLEAR(a->factory);
    Py_CLEAR(a->server);
    Py_CLEAR(a->context);
    Py_CLEAR(a->transport);
    Py_CLEAR(a->made_of);
    Py_CLEAR(a->here);
    return 0;
}

static void dealloc(struct acceptor *a)
{
    PyTypeObject *type = Py_TYPE(a);
    PyObject_GC_UnTrack(a);
    clear(a);
    type->tp_free(a);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"_loop", T_OBJECT, offsetof(struct acceptor, loop), 0, NULL},
    {"_reactor", T_OBJECT, offsetof(struct acceptor, reactor), 0, NULL},
    {"_factory", T_OBJECT, offsetof(struct acceptor, factory), 0, NULL},
    {"_server", T_OBJECT, offsetof(struct acceptor, server), 0, NULL},
    {"_context", T_OBJECT, offsetof(struct acceptor, context), 0, NULL},
    {"_transport", T_OBJECT, offsetof(struct acceptor, transport), 0, NULL},
    {"_made_of", T_OBJECT, offsetof(struct acceptor, made_of), 0, NULL},
    {"_family", T_INT, offsetof(struct acceptor, family), 0, NULL},
    {"_same_here", T_BOOL, offsetof(struct acceptor, same_here), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_traverse, traverse}, {Py_tp_clear, clear},           {Py_tp_dealloc, dealloc},
    {Py_tp_members, members},   {Py_tp_new, PyType_GenericNew}, {0, NULL},
};

PyType_Spec acceptor_spec = {
    .name = "aiozc._fast.Acceptor",
    .basicsize = sizeof(struct acceptor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
