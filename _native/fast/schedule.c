/* schedule.c - call_soon, as a mixin class of the loop.
 *
 * Owns: nothing; makes asyncio's own Handle objects by setting their slots, which is what its
 * __init__ does outside debug mode, and puts them into the loop's ready queue. Whatever is not that
 * (debug mode, a closed loop, wrong arguments) is asyncio's own call_soon. Futures, tasks and users
 * call it for every step (bench/peers.py, row call-soon).
 */
#include "fast.h"

#include <descrobject.h>
#include <structmember.h>

PyTypeObject *handle_type, *timer_type;
PyObject *handle_run;
static PyObject *asyncios; /* BaseEventLoop.call_soon */

static const char *const slot_names[] = {"_callback",         "_args", "_cancelled", "_loop",
                                         "_source_traceback", "_repr", "_context"};
static Py_ssize_t at[HANDLE_SLOTS];

/* The offset of a slot of a Python class. */
static int slot_offset(PyTypeObject *type, const char *name, Py_ssize_t *offset)
{
    PyObject *d = PyObject_GetAttrString((PyObject *)type, name);
    int is = d && Py_IS_TYPE(d, &PyMemberDescr_Type);
    if (is)
        *offset = ((PyMemberDescrObject *)d)->d_member->offset;
    else if (d)
        PyErr_Format(PyExc_TypeError, "%s.%s is not a slot", type->tp_name, name);
    Py_XDECREF(d);
    return is ? 0 : -1;
}

/* bind_handle(Handle, TimerHandle, BaseEventLoop.call_soon): called once, at import. TimerHandle
 * derives from Handle and has its slots where that has them. */
PyObject *bind_handle(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *type, *timer, *call_soon;
    Py_ssize_t found[HANDLE_SLOTS];
    if (!PyArg_ParseTuple(args, "O!O!O:bind_handle", &PyType_Type, &type, &PyType_Type, &timer,
                          &call_soon))
        return NULL;
    for (int i = 0; i < HANDLE_SLOTS; i++)
        if (slot_offset((PyTypeObject *)type, slot_names[i], &found[i]) < 0)
            return NULL;
    PyObject *run = PyDict_GetItemWithError(((PyTypeObject *)type)->tp_dict, n__run);
    if (!run) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "asyncio's Handle has no _run");
        return NULL;
    }
    memcpy(at, found, sizeof at);
    Py_XSETREF(handle_run, Py_NewRef(run));
    Py_XSETREF(handle_type, (PyTypeObject *)Py_NewRef(type));
    Py_XSETREF(timer_type, (PyTypeObject *)Py_NewRef(timer));
    Py_XSETREF(asyncios, Py_NewRef(call_soon));
    Py_RETURN_NONE;
}

PyObject *handle_slot(PyObject *handle, int slot)
{
    return *(PyObject **)((char *)handle + at[slot]);
}

static void set_slot(PyObject *handle, int slot, PyObject *value)
{
    *(PyObject **)((char *)handle + at[slot]) = value;
}

static PyObject *new_handle(PyObject *loop, PyObject *context, PyObject *const *args, Py_ssize_t n)
{
    PyObject *rest = PyTuple_New(n - 1);
    context = context && context != Py_None ? Py_NewRef(context) : PyContext_CopyCurrent();
    PyObject *handle = rest && context ? handle_type->tp_alloc(handle_type, 0) : NULL;
    if (!handle) {
        Py_XDECREF(rest);
        Py_XDECREF(context);
        return NULL;
    }
    for (Py_ssize_t i = 1; i < n; i++)
        PyTuple_SET_ITEM(rest, i - 1, Py_NewRef(args[i]));
    set_slot(handle, HANDLE_CALLBACK, Py_NewRef(args[0]));
    set_slot(handle, HANDLE_ARGS, rest);
    set_slot(handle, HANDLE_CANCELLED, Py_NewRef(Py_False));
    set_slot(handle, HANDLE_LOOP, Py_NewRef(loop));
    set_slot(handle, HANDLE_TRACEBACK, Py_NewRef(Py_None));
    set_slot(handle, HANDLE_REPR, Py_NewRef(Py_None));
    set_slot(handle, HANDLE_CONTEXT, context);
    return handle;
}

static PyObject *by_asyncio(PyObject *loop, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    Py_ssize_t all = n + (names ? PyTuple_GET_SIZE(names) : 0);
    PyObject **with_loop = PyMem_Malloc((size_t)(all + 1) * sizeof *with_loop);
    if (!with_loop)
        return PyErr_NoMemory();
    with_loop[0] = loop;
    for (Py_ssize_t i = 0; i < all; i++)
        with_loop[i + 1] = args[i];
    PyObject *rc = PyObject_Vectorcall(asyncios, with_loop, (size_t)n + 1, names);
    PyMem_Free(with_loop);
    return rc;
}

static PyObject *call_soon(PyObject *loop, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *context = NULL;
    int plain = n > 0 && (!names || PyTuple_GET_SIZE(names) == 1);
    if (plain && names) {
        plain = PyUnicode_Compare(PyTuple_GET_ITEM(names, 0), n_context) == 0;
        context = args[n];
    }
    int closed = plain ? attr_true(loop, n__closed) : 1;
    int debug = closed ? closed : attr_true(loop, n__debug);
    if (debug < 0)
        return NULL;
    if (debug)
        return by_asyncio(loop, args, n, names);
    PyObject *handle = new_handle(loop, context, args, n);
    PyObject *ready = handle ? PyObject_GetAttr(loop, n__ready) : NULL;
    PyObject *rc = ready ? call1(ready, n_append, handle) : NULL;
    Py_XDECREF(ready);
    if (!rc)
        Py_CLEAR(handle);
    Py_XDECREF(rc);
    return handle;
}

static PyMethodDef methods[] = {
    {"call_soon", (PyCFunction)(void (*)(void))call_soon, METH_FASTCALL | METH_KEYWORDS,
     "call_soon($self, callback, /, *args, context=None)\n--\n\n"
     "As asyncio's: the callback runs once, in the order of the calls, in the next turn."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {{Py_tp_methods, methods}, {0, NULL}};

PyType_Spec scheduler_spec = {
    .name = "aiozc._fast.Scheduler",
    .basicsize = sizeof(PyObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
