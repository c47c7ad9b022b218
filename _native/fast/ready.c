/* ready.c - the loop's ready queue: a ring of handles, first in, first out.
 *
 * Owns: a reference to each handle in it. Is what asyncio knows as loop._ready, and answers as the
 * deque that asyncio would have there as far as anybody uses that. schedule.c and turn.c reach the
 * ring itself (ready_push, ready_pop).
 *
 * Never: runs Python code while the ring is between two states; every call is atomic under the GIL,
 * which call_soon_threadsafe relies on.
 */
#include "fast.h"

PyTypeObject *ready_type;

static int grow(Ready *self)
{
    size_t cap = self->ring ? (self->mask + 1) * 2 : 64;
    PyObject **more = PyMem_New(PyObject *, cap);
    if (!more) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->count; i++)
        more[i] = self->ring[(self->head + i) & self->mask];
    PyMem_Free(self->ring);
    self->ring = more;
    self->mask = cap - 1;
    self->head = 0;
    return 0;
}

/* The handle becomes the queue's own reference. -1: no memory, and it is still the caller's. */
int ready_push(Ready *self, PyObject *handle)
{
    if ((!self->ring || self->count > self->mask) && grow(self) < 0)
        return -1;
    self->ring[(self->head + self->count++) & self->mask] = handle;
    return 0;
}

PyObject *ready_pop(Ready *self)
{
    PyObject *handle = self->ring[self->head];
    self->head = (self->head + 1) & self->mask;
    self->count--;
    return handle;
}

/* ---- as a deque ---- */

static PyObject *append(Ready *self, PyObject *handle)
{
    if (ready_push(self, Py_NewRef(handle)) < 0) {
        Py_DECREF(handle);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *appendleft(Ready *self, PyObject *handle)
{
    if ((!self->ring || self->count > self->mask) && grow(self) < 0)
        return NULL;
    self->head = (self->head - 1) & self->mask;
    self->ring[self->head] = Py_NewRef(handle);
    self->count++;
    Py_RETURN_NONE;
}

/* Whoever takes one out of here is not the turn: the collector is to know of it. */
static PyObject *popleft(Ready *self, PyObject *ignored)
{
    (void)ignored;
    if (!self->count) {
        PyErr_SetString(PyExc_IndexError, "pop from an empty ready queue");
        return NULL;
    }
    PyObject *handle = ready_pop(self);
    handle_track(handle);
    return handle;
}

static int clear(Ready *self)
{
    while (self->count) {
        PyObject *handle = ready_pop(self);
        handle_track(handle);
        Py_DECREF(handle); /* may run code that puts another one in */
    }
    return 0;
}

static PyObject *clear_method(Ready *self, PyObject *ignored)
{
    (void)ignored;
    clear(self);
    Py_RETURN_NONE;
}

static PyObject *extend(Ready *self, PyObject *handles)
{
    PyObject *all = PySequence_Tuple(handles); /* it may be this one */
    for (Py_ssize_t i = 0; all && i < PyTuple_GET_SIZE(all); i++) {
        PyObject *rc = append(self, PyTuple_GET_ITEM(all, i));
        if (!rc)
            Py_CLEAR(all);
        Py_XDECREF(rc);
    }
    if (!all)
        return NULL;
    Py_DECREF(all);
    Py_RETURN_NONE;
}

static PyObject *remove_one(Ready *self, PyObject *handle)
{
    Py_ssize_t at = PySequence_Index((PyObject *)self, handle);
    if (at < 0)
        return NULL;
    if ((size_t)at >= self->count) { /* comparing runs code */
        PyErr_SetString(PyExc_IndexError, "the ready queue changed");
        return NULL;
    }
    PyObject *gone = self->ring[(self->head + (size_t)at) & self->mask];
    for (size_t i = (size_t)at; i + 1 < self->count; i++)
        self->ring[(self->head + i) & self->mask] = self->ring[(self->head + i + 1) & self->mask];
    self->count--;
    handle_track(gone);
    Py_DECREF(gone);
    Py_RETURN_NONE;
}

static Py_ssize_t length(Ready *self)
{
    return (Py_ssize_t)self->count;
}

static PyObject *item(Ready *self, Py_ssize_t i)
{
    if (i < 0 || (size_t)i >= self->count) {
        PyErr_SetString(PyExc_IndexError, "ready queue index out of range");
        return NULL;
    }
    return Py_NewRef(self->ring[(self->head + (size_t)i) & self->mask]);
}

/* ---- the type ---- */

static int traverse(Ready *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (size_t i = 0; i < self->count; i++)
        Py_VISIT(self->ring[(self->head + i) & self->mask]);
    return 0;
}

static void dealloc(Ready *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    PyMem_Free(self->ring);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"append", (PyCFunction)append, METH_O, "Behind the last."},
    {"appendleft", (PyCFunction)appendleft, METH_O, "Before the first."},
    {"popleft", (PyCFunction)popleft, METH_NOARGS, "The first; IndexError: there is none."},
    {"extend", (PyCFunction)extend, METH_O, "All of an iterable behind the last."},
    {"remove", (PyCFunction)remove_one, METH_O, "The first that is equal; ValueError: none is."},
    {"clear", (PyCFunction)clear_method, METH_NOARGS, "Drop all."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_sq_length, length},
    {Py_sq_item, item},
    {0, NULL},
};

PyType_Spec ready_spec = {
    .name = "aiozc._fast.Ready",
    .basicsize = sizeof(Ready),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
