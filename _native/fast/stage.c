/* stage.c - `op.sent` and `op.released`: what is awaited of an operation.
 *
 * Owns: nothing but a reference to the operation. A loop that sends many datagrams awaits one a
 * call, mostly of an operation that has ended: then there is no generator and no new Result, for
 * one that says the same is there. Whoever really waits does so in Python (operation.py, _waited).
 */
#include "fast.h"

PyTypeObject *stage_type, *answer_type;

/* ---- the answer: an iterator that ends at once ---- */

typedef struct {
    PyObject_HEAD PyObject *result;
} Answer;

static PyObject *answer_new(PyObject *result)
{
    if (!result)
        return NULL;
    Answer *self = PyObject_New(Answer, answer_type);
    if (!self)
        Py_DECREF(result);
    else
        self->result = result;
    return (PyObject *)self;
}

static PyObject *answer_next(Answer *self)
{
    if (self->result)
        PyErr_SetObject(PyExc_StopIteration, self->result);
    Py_CLEAR(self->result);
    return NULL;
}

static void answer_dealloc(Answer *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_CLEAR(self->result);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot answer_slots[] = {
    {Py_tp_dealloc, answer_dealloc},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, answer_next},
    {0, NULL},
};

PyType_Spec answer_spec = {
    .name = "aiozc._fast.Answer",
    .basicsize = sizeof(Answer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = answer_slots,
};

/* What __await__ gives: of an operation that has come so far, or of one that has not. */
PyObject *stage_await(PyObject *op, int is_sent)
{
    if (operation_done(op, is_sent))
        return answer_new(operation_outcome(op, is_sent));
    return call1(op, n__waited, is_sent ? Py_True : Py_False);
}

/* ---- the stage ---- */

typedef struct {
    PyObject_HEAD PyObject *op;
    int is_sent;
} Stage;

static PyObject *stage_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *op;
    int is_sent;
    if (kwargs && PyDict_GET_SIZE(kwargs))
        return PyErr_Format(PyExc_TypeError, "Stage() takes no keyword arguments");
    if (!PyArg_ParseTuple(args, "O!p:Stage", operation_base, &op, &is_sent))
        return NULL;
    Stage *self = (Stage *)type->tp_alloc(type, 0);
    if (self) {
        self->op = Py_NewRef(op);
        self->is_sent = is_sent;
    }
    return (PyObject *)self;
}

static PyObject *await_stage(Stage *self)
{
    return stage_await(self->op, self->is_sent);
}

static PyObject *stage_done(Stage *self, PyObject *ignored)
{
    (void)ignored;
    return PyBool_FromLong(operation_done(self->op, self->is_sent));
}

static PyObject *stage_repr(Stage *self)
{
    return PyUnicode_FromFormat("<%s of %R: %s>", self->is_sent ? "sent" : "released", self->op,
                                operation_done(self->op, self->is_sent) ? "done" : "pending");
}

static int stage_traverse(Stage *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->op);
    return 0;
}

static int stage_clear(Stage *self)
{
    Py_CLEAR(self->op);
    return 0;
}

static void stage_dealloc(Stage *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    stage_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef stage_methods[] = {
    {"done", (PyCFunction)stage_done, METH_NOARGS, "Whether awaiting it would not wait."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot stage_slots[] = {
    {Py_tp_new, stage_new},
    {Py_tp_repr, stage_repr},
    {Py_tp_traverse, stage_traverse},
    {Py_tp_clear, stage_clear},
    {Py_tp_dealloc, stage_dealloc},
    {Py_tp_methods, stage_methods},
    {Py_am_await, await_stage},
    {Py_tp_doc, "`op.sent` or `op.released`: any number of tasks may await it; cancelling one "
                "touches no other."},
    {0, NULL},
};

PyType_Spec stage_spec = {
    .name = "aiozc._fast.Stage",
    .basicsize = sizeof(Stage),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = stage_slots,
};
