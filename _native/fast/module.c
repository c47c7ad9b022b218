/* module.c - aiozc._fast: its names, its types, the function table.
 *
 * Owns: what is set once for the process. Imported by aiozc/reactor.py, which calls bind() with the
 * address of the cffi module's azc_api before anything else here is used. One interpreter only, as
 * cffi's own module.
 */
#include "fast.h"

const azc_api *api;
PyTypeObject *core_type, *parts_type;
PyObject *only_loop, *only_context;

#define DEFINE(name) PyObject *n_##name;
NAMES(DEFINE)
#undef DEFINE

PyObject *take_exception(void)
{
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *tb;
    PyErr_Fetch(&type, &value, &tb);
    PyErr_NormalizeException(&type, &value, &tb);
    if (tb)
        PyException_SetTraceback(value, tb);
    Py_XDECREF(type);
    Py_XDECREF(tb);
    return value;
#endif
}

void restore_exception(PyObject *exception)
{
#if PY_VERSION_HEX >= 0x030c0000
    PyErr_SetRaisedException(exception);
#else
    PyErr_Restore(Py_NewRef(Py_TYPE(exception)), exception, PyException_GetTraceback(exception));
#endif
}

int must_leave(void)
{
    return PyErr_ExceptionMatches(PyExc_SystemExit) ||
           PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
}

/* The exception that is set is told by a method of Python's, but one that ends the run. */
int told_by(PyObject *who, PyObject *method)
{
    if (must_leave())
        return -1;
    PyObject *exc = take_exception(), *rc = call1(who, method, exc);
    Py_DECREF(exc);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

PyObject *call1(PyObject *self, PyObject *name, PyObject *arg)
{
    PyObject *args[] = {self, arg};
    return PyObject_VectorcallMethod(name, args, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

PyObject *call_ints(PyObject *self, PyObject *name, long a, long b)
{
    PyObject *x = PyLong_FromLong(a), *y = PyLong_FromLong(b), *rc = NULL;
    PyObject *args[] = {self, x, y};
    if (x && y)
        rc = PyObject_VectorcallMethod(name, args, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_XDECREF(x);
    Py_XDECREF(y);
    return rc;
}

static PyObject *bind(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long address;
    PyObject *frozen, *refusing, *operation;
    if (!PyArg_ParseTuple(args, "KOOO!:bind", &address, &frozen, &refusing, &PyType_Type,
                          &operation))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)operation, operation_base))
        return PyErr_Format(PyExc_TypeError, "Operation must derive from _fast.Operation");
    api = (const azc_api *)(uintptr_t)address;
    Py_XSETREF(operation_class, Py_NewRef(operation));
    Py_XSETREF(frozen_type, Py_NewRef(frozen));
    Py_XSETREF(refuse, Py_NewRef(refusing));
    Py_RETURN_NONE;
}

/* check_by(checked.Checked): from now on ask the reactor of every operation. For good: what was
 * queued so is called at its release. */
static PyObject *check_by(PyObject *module, PyObject *type)
{
    (void)module;
    Py_XSETREF(checked_type, Py_NewRef(type));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS,
     "The address of azc_api, buffers.Frozen, buffers.refuse, aiozc.Operation. Called once, at "
     "import."},
    {"bind_asyncio", bind_asyncio, METH_VARARGS,
     "asyncio's Handle, TimerHandle, _ThreadSafeHandle (or None) and BaseEventLoop. Called once, "
     "at import."},
    {"bind_streams", bind_streams, METH_VARARGS,
     "asyncio's StreamReaderProtocol and StreamReader, if they are as feed.c knows them. Called "
     "once, at import."},
    {"check_by", check_by, METH_O,
     "checked.Checked: some loop compares the memory of its operations at the release."},
    {"transport_base", transport_base, METH_O,
     "A class with the given bases and the native fields of a transport."},
    {"is_buffered", is_buffered, METH_O, "Is the protocol served as a BufferedProtocol?"},
    {"servers_take_transport", servers_take_transport, METH_O,
     "Do Server._attach and _detach take the transport? Called once, at import."},
    {"zc_sendto_method", zc_sendto_method, METH_O,
     "zc_sendto for a class of transports, given the class of its operations."},
    {"datagram_sendto", datagram_sendto, METH_NOARGS,
     "The method sendto() for a datagram transport's class."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "aiozc._fast",
    "What runs once an event.",
    -1,
    functions,
    NULL,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__fast(void);

PyMODINIT_FUNC PyInit__fast(void)
{
#define INTERN(name)                                                                               \
    if (!n_##name && !(n_##name = PyUnicode_InternFromString(#name)))                              \
        return NULL;
    NAMES(INTERN)
#undef INTERN
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    core_type = (PyTypeObject *)PyType_FromSpec(&core_spec);
    parts_type = (PyTypeObject *)PyType_FromSpec(&parts_spec);
    ready_type = (PyTypeObject *)PyType_FromSpec(&ready_spec);
    operation_base = (PyTypeObject *)PyType_FromSpec(&operation_spec);
    acceptor_type = (PyTypeObject *)PyType_FromSpec(&acceptor_spec);
    stage_type = (PyTypeObject *)PyType_FromSpec(&stage_spec);
    answer_type = (PyTypeObject *)PyType_FromSpec(&answer_spec);
    only_loop = PyTuple_Pack(1, n_loop);
    only_context = PyTuple_Pack(1, n_context);
    PyTypeObject *slot = (PyTypeObject *)PyType_FromSpec(&slot_spec);
    PyTypeObject *types[] = {core_type,  parts_type,     ready_type,
                             slot,       operation_base, acceptor_type,
                             stage_type, answer_type,    scheduler_new_type()};
    int ok = module && only_loop && only_context;
    for (size_t i = 0; ok && i < sizeof types / sizeof *types; i++)
        ok = types[i] && PyModule_AddType(module, types[i]) == 0;
    if (!ok) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
