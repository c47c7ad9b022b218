/* slot.c - one buffer of a pool: the exporter that all views of it, and all locks on it, refer to.
 *
 * Owns: the moment at which a pool's memory is free again, its own death. Made by pool.py. That is
 * in tp_dealloc, and not in a finalizer: the collector runs finalizers of garbage that may still be
 * saved by another one, and then a view would be alive on memory that is given out anew.
 */
#include "fast.h"

typedef struct {
    PyObject_HEAD char *base;
    Py_ssize_t size;
    PyObject *give_back; /* called without arguments; keeps the memory, too */
} Slot;

static PyObject *slot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned long long base;
    Py_ssize_t size;
    PyObject *give_back;
    if (kwargs && PyDict_GET_SIZE(kwargs))
        return PyErr_Format(PyExc_TypeError, "Slot() takes no keyword arguments");
    if (!PyArg_ParseTuple(args, "KnO:Slot", &base, &size, &give_back))
        return NULL;
    Slot *self = (Slot *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->base = (char *)(uintptr_t)base;
    self->size = size;
    self->give_back = Py_NewRef(give_back);
    return (PyObject *)self;
}

static int slot_getbuffer(Slot *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->base, self->size, 0, flags);
}

static void slot_dealloc(Slot *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject *kind, *value, *tb;
    PyErr_Fetch(&kind, &value, &tb); /* an exception may be on its way through here */
    if (self->give_back) {
        PyObject *rc = PyObject_CallNoArgs(self->give_back);
        if (!rc)
            PyErr_WriteUnraisable(self->give_back); /* the memory is not given out again */
        Py_XDECREF(rc);
        Py_CLEAR(self->give_back);
    }
    PyErr_Restore(kind, value, tb);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot slot_slots[] = {
    {Py_tp_new, slot_new},
    {Py_tp_dealloc, slot_dealloc},
    {Py_bf_getbuffer, slot_getbuffer},
    {0, NULL},
};

PyType_Spec slot_spec = {
    .name = "aiozc._fast.Slot",
    .basicsize = sizeof(Slot),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slot_slots,
};
