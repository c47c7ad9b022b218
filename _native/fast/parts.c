/* parts.c - the buffers of one zero-copy operation, locked until it is dropped.
 *
 * Owns: a reference to each buffer's exporter, and its addresses. Made by stream.py's zc_write,
 * kept by the Operation until its release. Locking a part is what many small parts cost most, so
 * it is a reference alone wherever the exporter has nothing to release (bytes, views of bytes, of
 * an array, of a pool); everything else (bytearray, mmap, array) gets a memoryview of our own,
 * which forbids resizing and closing. Either way the caller may release his own view at once.
 * The collector does not know of it: it would look at each part again and again, and a cycle
 * through it ends with the release, which lets go of the parts.
 *
 * Never: copies; lets go of anything before it dies.
 */
#include "fast.h"

#include <structmember.h>

typedef struct {
    PyObject_VAR_HEAD size_t bytes;
    azc_iov iov[]; /* as many, then as many references */
} Parts;

PyObject *frozen_type, *refuse, *checked_type;

static PyObject **refs_of(Parts *self)
{
    return (PyObject **)(self->iov + Py_SIZE(self));
}

static int plain_exporter(PyObject *o)
{
    PyBufferProcs *b = Py_TYPE(o)->tp_as_buffer;
    return b && !b->bf_releasebuffer;
}

/* The lock and where the bytes lie. NULL: not a buffer, or not contiguous. */
static PyObject *lock(PyObject *o, azc_iov *iov)
{
    if (PyBytes_CheckExact(o)) {
        *iov = (azc_iov){PyBytes_AS_STRING(o), (size_t)PyBytes_GET_SIZE(o)};
        return Py_NewRef(o);
    }
    if (PyMemoryView_Check(o)) {
        Py_buffer *b = PyMemoryView_GET_BUFFER(o);
        /* The flag first: a released view does not hold b->obj any more. */
        int flags = ((PyMemoryViewObject *)o)->flags;
        if (!(flags & _Py_MEMORYVIEW_RELEASED) && flags & _Py_MEMORYVIEW_C && b->obj &&
            plain_exporter(b->obj)) {
            *iov = (azc_iov){b->buf, (size_t)b->len};
            return Py_NewRef(b->obj);
        }
    } else if (plain_exporter(o)) {
        Py_buffer b;
        if (PyObject_GetBuffer(o, &b, PyBUF_SIMPLE) < 0)
            return NULL;
        if (b.obj && plain_exporter(b.obj)) {
            *iov = (azc_iov){b.buf, (size_t)b.len};
            return b.obj; /* the reference is ours now: nothing else is there to release */
        }
        PyBuffer_Release(&b);
    }
    PyObject *view = PyMemoryView_FromObject(o);
    if (!view)
        return NULL;
    Py_buffer *b = PyMemoryView_GET_BUFFER(view);
    if (!PyBuffer_IsContiguous(b, 'C')) {
        Py_DECREF(view);
        PyErr_SetString(PyExc_BufferError, "not C-contiguous");
        return NULL;
    }
    *iov = (azc_iov){b->buf, (size_t)b->len};
    return view;
}

/* Of a list, or of one buffer; `frozen` objects stand for what they hold. */
static int lock_one(Parts *self, Py_ssize_t i, PyObject *o)
{
    PyObject *inner = NULL;
    if ((PyObject *)Py_TYPE(o) == frozen_type) {
        inner = PyObject_GetAttrString(o, "obj");
        if (!inner)
            return -1;
        o = inner;
    }
    PyObject *ref = lock(o, &self->iov[i]);
    if (!ref && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyObject *exc = take_exception();
        PyObject *rc = PyObject_CallFunctionObjArgs(refuse, o, exc, NULL);
        Py_XDECREF(rc);
        Py_XDECREF(exc);
    }
    Py_XDECREF(inner);
    if (!ref)
        return -1;
    refs_of(self)[i] = ref;
    self->bytes += self->iov[i].len;
    return 0;
}

static PyObject *make(PyTypeObject *type, PyObject *data)
{
    int many = PyList_CheckExact(data) || PyTuple_CheckExact(data);
    Py_ssize_t n = many ? PySequence_Fast_GET_SIZE(data) : 1;
    Parts *self = PyObject_NewVar(Parts, type, n);
    if (!self)
        return NULL;
    self->bytes = 0;
    memset(refs_of(self), 0, (size_t)n * sizeof(PyObject *));
    for (Py_ssize_t i = 0; i < n; i++) {
        if (many && i >= PySequence_Fast_GET_SIZE(data)) {
            /* An exporter's own code shortened the list. */
            memset(self->iov + i, 0, (size_t)(n - i) * sizeof(azc_iov));
            break;
        }
        PyObject *o = Py_NewRef(many ? PySequence_Fast_GET_ITEM(data, i) : data);
        int rc = lock_one(self, i, o);
        Py_DECREF(o);
        if (rc < 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static PyObject *parts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *data;
    if (kwargs && PyDict_GET_SIZE(kwargs))
        return PyErr_Format(PyExc_TypeError, "Parts() takes no keyword arguments");
    return PyArg_ParseTuple(args, "O:Parts", &data) ? make(type, data) : NULL;
}

PyObject *parts_make(PyObject *data)
{
    return make(parts_type, data);
}

static void parts_dealloc(Parts *self)
{
    PyTypeObject *type = Py_TYPE(self);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++)
        Py_XDECREF(refs_of(self)[i]);
    type->tp_free(self);
    Py_DECREF(type);
}

size_t parts_bytes(PyObject *parts)
{
    return ((Parts *)parts)->bytes;
}

azc_op *parts_queue(PyObject *parts, azc_conn *conn)
{
    return api->submit(conn, ((Parts *)parts)->iov, (size_t)Py_SIZE(parts));
}

/* One datagram, or with `segment` several: bytes of the sockaddr, b"" on a connected socket. */
azc_op *parts_queue_datagram(PyObject *parts, azc_conn *conn, PyObject *name, int segment)
{
    return api->zc_sendto(conn, ((Parts *)parts)->iov, (size_t)Py_SIZE(parts),
                          PyBytes_AS_STRING(name), (size_t)PyBytes_GET_SIZE(name), segment);
}

/* After a write: what the native side reads from now on is held. In the call that queued it, before
 * the next line of Python runs, for a signal handler may raise there. */
int hold(PyObject *held, const azc_conn *conn, PyObject *data)
{
    if (!conn->ref_token)
        return 0;
    PyObject *token = PyLong_FromUnsignedLongLong(conn->ref_token);
    int rc = token ? PyDict_SetItem(held, token, data) : -1;
    Py_XDECREF(token);
    if (rc < 0)
        Py_INCREF(data); /* kept for good: better than read after it is freed */
    return rc;
}

/* submit_to(address of an azc_conn) -> address of the azc_op, 0: no memory, nothing queued. For a
 * connection without a transport. */
static PyObject *parts_submit_to(Parts *self, PyObject *address)
{
    azc_conn *conn = PyLong_AsVoidPtr(address);
    if (!conn)
        return PyErr_Occurred() ? NULL : (PyErr_SetString(PyExc_ValueError, "no connection"), NULL);
    return PyLong_FromVoidPtr(api->submit(conn, self->iov, (size_t)Py_SIZE(self)));
}

/* azc_write answered -ENOMEM. */
PyObject *no_memory_to_write(void)
{
    return PyErr_Format(PyExc_MemoryError, "aiozc: no memory to queue a write; nothing of it was");
}

/* write_to(address of an azc_conn, reactor.held, by_reference): azc_write of one locked buffer.
 * True: there is something to look at. */
static PyObject *parts_write_to(Parts *self, PyObject *args)
{
    unsigned long long address;
    PyObject *held;
    int by_reference, rc;
    if (!PyArg_ParseTuple(args, "KO!p:write_to", &address, &PyDict_Type, &held, &by_reference))
        return NULL;
    azc_conn *conn = (azc_conn *)(uintptr_t)address;
    Py_BEGIN_ALLOW_THREADS;
    rc = api->write(conn, self->iov->base, self->iov->len, by_reference);
    Py_END_ALLOW_THREADS;
    if (rc < 0)
        return no_memory_to_write();
    if (rc && hold(held, conn, (PyObject *)self) < 0)
        return NULL;
    return PyBool_FromLong(rc);
}

static PyObject *parts_copies(Parts *self, PyObject *ignored)
{
    (void)ignored;
    PyObject *copies = PyList_New(0);
    for (Py_ssize_t i = 0; copies && i < Py_SIZE(self); i++) {
        if (!self->iov[i].len)
            continue;
        PyObject *one = PyBytes_FromStringAndSize(self->iov[i].base, (Py_ssize_t)self->iov[i].len);
        if (!one || PyList_Append(copies, one) < 0)
            Py_CLEAR(copies);
        Py_XDECREF(one);
    }
    return copies;
}

/* each(function): function(view) of each part. The view is released afterwards, for it has no
 * reference to what it shows. */
static PyObject *parts_each(Parts *self, PyObject *function)
{
    PyObject *answers = PyList_New(0);
    for (Py_ssize_t i = 0; answers && i < Py_SIZE(self); i++) {
        char *p = self->iov[i].len ? (char *)(uintptr_t)self->iov[i].base : (char *)"";
        PyObject *view = PyMemoryView_FromMemory(p, (Py_ssize_t)self->iov[i].len, PyBUF_READ);
        PyObject *one = view ? PyObject_CallOneArg(function, view) : NULL;
        PyObject *exc = one ? NULL : take_exception();
        PyObject *gone = view ? PyObject_CallMethodNoArgs(view, n_release) : NULL;
        if (exc)
            restore_exception(exc);
        if (!one || !gone || PyList_Append(answers, one) < 0)
            Py_CLEAR(answers);
        Py_XDECREF(gone);
        Py_XDECREF(one);
        Py_XDECREF(view);
    }
    return answers;
}

static Py_ssize_t parts_len(Parts *self)
{
    return Py_SIZE(self);
}

static PyMethodDef parts_methods[] = {
    {"submit_to", (PyCFunction)parts_submit_to, METH_O,
     "Queue them on the azc_conn of that address as one operation; the address of its azc_op, or "
     "0: "
     "no memory, nothing queued."},
    {"write_to", (PyCFunction)parts_write_to, METH_VARARGS,
     "(address of an azc_conn, reactor.held, by_reference): queue one buffer as a plain write."},
    {"copies", (PyCFunction)parts_copies, METH_NOARGS, "Of each part that is not empty, as bytes."},
    {"each", (PyCFunction)parts_each, METH_O,
     "(function): a list of what it answers to a memoryview of each part, valid in that call "
     "only."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef parts_members[] = {
    {"nbytes", T_PYSSIZET, offsetof(Parts, bytes), READONLY, "Bytes in all parts together."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot parts_slots[] = {
    {Py_tp_new, parts_new},         {Py_tp_dealloc, parts_dealloc}, {Py_tp_methods, parts_methods},
    {Py_tp_members, parts_members}, {Py_sq_length, parts_len},      {0, NULL},
};

PyType_Spec parts_spec = {
    .name = "aiozc._fast.Parts",
    .basicsize = sizeof(Parts),
    .itemsize = sizeof(azc_iov) + sizeof(PyObject *),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = parts_slots,
};
