/* operation.c - the fields of one zero-copy operation, and its two ends that cost: made and
 * released.
 *
 * Owns: the base type of aiozc.Operation, which adds everything that a user awaits or asks
 * (operation.py, with the state table). While `native` is set the truth is there; it is taken over
 * when the event that ends the operation comes, for the slot goes to somebody else.
 *
 * Never: lets go of `keep`, the locked buffers, but in operation_finish and _withdraw; not in
 * tp_clear either: a pinned operation is in the reactor's `held`, which the collector never takes
 * apart, and this does not rely on it.
 */
#include "fast.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD azc_op *native; /* NULL: ended, or it never had one */
    azc_conn *conn;               /* of it; valid while it is QUEUED */
    PyObject *loop, *reactor, *keep;
    PyObject *waiters; /* a list, or None */
    unsigned long long nbytes, sent;
    int error;
    unsigned char path, state;
    char free; /* the kernel reads the memory no more */
} Op;

#define RESULTS 61 /* that are kept */

PyTypeObject *operation_base;
PyObject *operation_class; /* aiozc.Operation */

static void take_over(Op *self)
{
    if (!self->native)
        return;
    self->sent = self->native->sent;
    self->error = -self->native->error;
    self->path = self->native->path;
    self->state = self->native->state;
    self->native = NULL;
    self->conn = NULL;
}

/* ---- made ---- */

/* An Operation without a native one yet: the caller queues it, and calls operation_start. `class`
 * is aiozc.Operation or a subclass that adds nothing to it. */
PyObject *operation_new(PyObject *class, PyObject *loop, PyObject *reactor, PyObject *keep)
{
    PyTypeObject *type = (PyTypeObject *)class;
    Op *self = (Op *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->loop = Py_NewRef(loop);
    self->reactor = Py_NewRef(reactor);
    self->keep = Py_NewRef(keep);
    return (PyObject *)self;
}

void operation_start(PyObject *o, azc_conn *conn, azc_op *native)
{
    Op *self = (Op *)o;
    self->conn = conn;
    self->native = native;
    self->nbytes = native->nbytes;
}

static PyObject *op_start(Op *self, PyObject *args)
{
    unsigned long long conn, native;
    PyObject *loop, *reactor, *keep;
    if (!PyArg_ParseTuple(args, "OOKKO", &loop, &reactor, &conn, &native, &keep))
        return NULL;
    Py_XSETREF(self->loop, Py_NewRef(loop));
    Py_XSETREF(self->reactor, Py_NewRef(reactor));
    Py_XSETREF(self->keep, Py_NewRef(keep));
    operation_start((PyObject *)self, (azc_conn *)(uintptr_t)conn, (azc_op *)(uintptr_t)native);
    Py_RETURN_NONE;
}

/* ---- released ---- */

/* Nobody tells the waiters another time: the exception of a signal handler, which may come in the
 * first line of _wake, does not keep it from being called again. */
static int wake(PyObject *o)
{
    PyObject *rc = call1(o, n__wake, Py_False);
    if (!rc && must_leave()) {
        PyObject *exc = take_exception();
        for (int i = 0; !rc && i < 8; i++) {
            PyErr_Clear();
            rc = call1(o, n__wake, Py_False);
        }
        restore_exception(exc);
        Py_CLEAR(rc);
    }
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* The memory is free: give the locks back. */
int operation_finish(PyObject *o, int error, int path)
{
    Op *self = (Op *)o;
    if (error) {
        take_over(self);
    } else {
        self->sent = self->nbytes;
        self->path = (unsigned char)path;
        self->state = AZC_RELEASED;
        self->native = NULL;
        self->conn = NULL;
    }
    PyObject *exc = NULL;
    if (is_checked(self->keep)) {
        PyObject *rc = PyObject_CallOneArg(self->keep, o);
        exc = rc ? NULL : take_exception(); /* the release goes on all the same */
        Py_XDECREF(rc);
    }
    self->free = 1;
    Py_CLEAR(self->reactor);
    Py_CLEAR(self->keep); /* may run code of the buffers' owners */
    int done = 0;
    if (self->waiters && self->waiters != Py_None)
        done = wake(o);
    if (exc) {
        restore_exception(exc);
        done = -1;
    }
    return done;
}

/* If it was released within the call that queued it: give the locks back now. Its event comes, too,
 * and finds nobody. */
int operation_settle(PyObject *o, PyObject *held)
{
    Op *self = (Op *)o;
    if (!self->native || self->native->state != AZC_RELEASED)
        return 0;
    PyObject *token = PyLong_FromUnsignedLongLong(self->native->token);
    int rc = token ? PyDict_DelItem(held, token) : -1;
    Py_XDECREF(token);
    if (rc < 0) {
        PyErr_Clear(); /* then the event does it */
        return 0;
    }
    return operation_finish(o, 0, self->native->path);
}

static PyObject *op_part(Op *self, PyObject *ignored)
{
    (void)ignored;
    take_over(self);
    Py_CLEAR(self->reactor);
    Py_RETURN_NONE;
}

static PyObject *op_withdraw(Op *self, PyObject *ignored)
{
    (void)ignored;
    if (!self->native || !api->withdraw(self->conn, self->native))
        Py_RETURN_FALSE;
    take_over(self); /* the slot is free, and nobody had it since */
    self->state = AZC_WITHDRAWN;
    self->free = 1;
    Py_CLEAR(self->reactor);
    Py_CLEAR(self->keep);
    Py_RETURN_TRUE;
}

static PyObject *op_want_sent(Op *self, PyObject *ignored)
{
    (void)ignored;
    if (self->native)
        self->native->want_sent = 1;
    Py_RETURN_NONE;
}

/* ---- what it says ---- */

static PyObject *get_code(Op *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(self->native ? self->native->state : self->state);
}

static PyObject *get_sent(Op *self, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(self->native ? self->native->sent : self->sent);
}

static PyObject *get_error(Op *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(self->native ? -self->native->error : self->error);
}

static PyObject *get_path(Op *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(self->native ? self->native->path : self->path);
}

static PyObject *get_token(Op *self, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(self->native ? self->native->token : 0);
}

/* ---- what is awaited ---- */

int operation_done(PyObject *o, int of_sent)
{
    Op *self = (Op *)o;
    if (!of_sent)
        return self->free;
    return (self->native ? self->native->state : self->state) >= AZC_SENT;
}

/* The Result, or the exception. Those of operations without an error are kept, by what they say. */
PyObject *operation_outcome(PyObject *o, int of_sent)
{
    static struct {
        PyObject *result;
        unsigned long long sent;
        int path;
    } known[RESULTS];
    Op *self = (Op *)o;
    const azc_op *n = self->native;
    unsigned long long sent = n ? n->sent : self->sent;
    int path = n ? n->path : self->path, state = n ? n->state : self->state;
    PyObject *of = of_sent ? Py_True : Py_False;
    if ((n ? n->error : self->error) || (state != AZC_SENT && state != AZC_RELEASED))
        return call1(o, n__outcome, of);
    size_t at = (size_t)(sent * 31 + (unsigned)path) % RESULTS;
    if (known[at].result && known[at].sent == sent && known[at].path == path)
        return Py_NewRef(known[at].result);
    PyObject *result = call1(o, n__outcome, of);
    if (result) {
        known[at].sent = sent;
        known[at].path = path;
        Py_XSETREF(known[at].result, Py_NewRef(result));
    }
    return result;
}

static PyObject *op_await(PyObject *self)
{
    return stage_await(self, 0);
}

/* ---- the type ---- */

static int op_traverse(Op *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->loop);
    Py_VISIT(self->reactor);
    Py_VISIT(self->keep);
    Py_VISIT(self->waiters);
    return 0;
}

static int op_clear(Op *self)
{
    Py_CLEAR(self->loop);
    Py_CLEAR(self->reactor);
    Py_CLEAR(self->waiters);
    return 0;
}

static void op_dealloc(Op *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    op_clear(self);
    Py_CLEAR(self->keep);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef op_methods[] = {
    {"_start", (PyCFunction)op_start, METH_VARARGS,
     "(loop, reactor, address of the azc_conn, of the azc_op, what keeps the buffers locked)"},
    {"_part_from_native", (PyCFunction)op_part, METH_NOARGS,
     "Take over what the native side knows; its slot goes to somebody else."},
    {"_withdraw", (PyCFunction)op_withdraw, METH_NOARGS,
     "True: it is out of the queue, and ended."},
    {"_want_sent", (PyCFunction)op_want_sent, METH_NOARGS, "Ask for the event SENT."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef op_members[] = {
    {"_loop", T_OBJECT, offsetof(Op, loop), 0, NULL},
    {"_reactor", T_OBJECT, offsetof(Op, reactor), READONLY, NULL},
    {"_waiters", T_OBJECT, offsetof(Op, waiters), 0, NULL},
    {"_free", T_BOOL, offsetof(Op, free), 0, "The kernel reads the memory no more."},
    {"nbytes", T_ULONGLONG, offsetof(Op, nbytes), 0, "Bytes submitted."},
    {"_sent_bytes", T_ULONGLONG, offsetof(Op, sent), 0, "Once it has no native side."},
    {"_error", T_INT, offsetof(Op, error), 0, "Likewise: an errno, or 0."},
    {"_path", T_UBYTE, offsetof(Op, path), 0, "Likewise: AZC_PATH_* bits."},
    {"_state", T_UBYTE, offsetof(Op, state), 0, "Likewise."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef op_getset[] = {
    {"bytes_sent", (getter)get_sent, NULL,
     "Bytes that the kernel accepted so far; stays readable after a failure.", NULL},
    {"_state_now", (getter)get_code, NULL, NULL, NULL},
    {"_error_now", (getter)get_error, NULL, NULL, NULL},
    {"_path_now", (getter)get_path, NULL, NULL, NULL},
    {"_token", (getter)get_token, NULL, "0: it has no native side.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot op_slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_traverse, op_traverse}, {Py_am_await, op_await},
    {Py_tp_clear, op_clear},        {Py_tp_dealloc, op_dealloc},   {Py_tp_methods, op_methods},
    {Py_tp_members, op_members},    {Py_tp_getset, op_getset},     {0, NULL},
};

PyType_Spec operation_spec = {
    .name = "aiozc._fast.Operation",
    .basicsize = sizeof(Op),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = op_slots,
};
