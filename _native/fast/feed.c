/* feed.c - bytes into an asyncio.StreamReader without asyncio's four Python frames a message:
 * StreamReaderProtocol.data_received, ._stream_reader, StreamReader.feed_data, ._wakeup_waiter.
 *
 * Owns: what is known of these two classes since import (hooks.py: only if their functions are the
 * ones that this file was written after). Called by events.c. Does the plain case alone, and says
 * so before anything has changed; whatever is not plain is asyncio's own data_received: a derived
 * class, a method that somebody replaced (on the class or on the object), end of file, a buffer
 * that is exported or would exceed the limit, so that reading has to be paused.
 *
 * Never: leaves a state in between that asyncio's code would not.
 */
#include "fast.h"

enum { PROTOCOL, READER, CLASSES };
#define METHODS 2
#define ATTRIBUTES 4

/* A class, its methods as they were, and the attributes that its objects have in their own
 * dictionary alone. */
static struct {
    PyTypeObject *type; /* NULL: not the asyncio that is known */
    PyObject *was[METHODS];
    unsigned int version; /* of the class, when it was compared last */
    int same;
} known[CLASSES];

static PyObject *const *const methods[CLASSES][METHODS] = {
    {&n_data_received, &n__stream_reader},
    {&n_feed_data, &n__wakeup_waiter},
};
static PyObject *const *const attributes[CLASSES][ATTRIBUTES] = {
    {&n__stream_reader_wr},
    {&n__buffer, &n__waiter, &n__eof, &n__limit},
};

PyObject *bind_streams(PyObject *module, PyObject *args)
{
    PyObject *types[CLASSES];
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!:bind_streams", &PyType_Type, &types[PROTOCOL], &PyType_Type,
                          &types[READER]))
        return NULL;
    for (int k = 0; k < CLASSES; k++)
        for (int i = 0; i < METHODS; i++)
            if (!(known[k].was[i] = PyObject_GetAttr(types[k], *methods[k][i])))
                return NULL;
    for (int k = 0; k < CLASSES; k++)
        known[k].type = (PyTypeObject *)Py_NewRef(types[k]);
    Py_RETURN_NONE;
}

/* Is the class as it was? */
static int compare(int k)
{
    PyObject *type = (PyObject *)known[k].type;
    int same = known[k].type->tp_getattro == PyObject_GenericGetAttr &&
               known[k].type->tp_setattro == PyObject_GenericSetAttr;
    for (int i = 0; same && i < METHODS; i++) {
        PyObject *now = PyObject_GetAttr(type, *methods[k][i]);
        same = now == known[k].was[i];
        Py_XDECREF(now);
    }
    for (int i = 0; same && i < ATTRIBUTES && attributes[k][i]; i++)
        same = !PyObject_HasAttr(type, *attributes[k][i]);
    PyErr_Clear();
    return same;
}

/* An object of the very class, and the class as it was. */
static int is_known(int k, PyObject *o)
{
    PyTypeObject *type = known[k].type;
    if (!type || !Py_IS_TYPE(o, type))
        return 0;
    if (!known[k].version || known[k].version != type->tp_version_tag) {
        known[k].same = compare(k);
        known[k].version = type->tp_version_tag;
    }
    return known[k].same;
}

/* The object's own dictionary, unless it has one of the methods: a new reference, or NULL. */
static PyObject *plain_dict(int k, PyObject *o, PyObject *method, PyObject *other)
{
    PyObject *own = is_known(k, o) ? PyObject_GenericGetDict(o, NULL) : NULL;
    if (own && (!PyDict_CheckExact(own) || PyDict_GetItemWithError(own, method) ||
                (other && PyDict_GetItemWithError(own, other))))
        Py_CLEAR(own);
    PyErr_Clear();
    return own;
}

/* The StreamReader, a new reference, or NULL. */
static PyObject *reader_of(PyObject *protocol)
{
    PyObject *own = plain_dict(PROTOCOL, protocol, n_data_received, NULL), *reader = NULL;
    PyObject *weak = own ? PyDict_GetItemWithError(own, n__stream_reader_wr) : NULL;
    if (weak && PyWeakref_CheckRefExact(weak)) {
#if PY_VERSION_HEX >= 0x030D0000
        (void)PyWeakref_GetRef(weak, &reader);
#else
        reader = Py_NewRef(PyWeakref_GET_OBJECT(weak));
#endif
    }
    Py_XDECREF(own);
    return reader;
}

/* Has the reader room for so many bytes more, without a pause? Then its buffer, a new reference: a
 * look-up may run code, where somebody put odd keys into that dictionary. */
static PyObject *room_for(PyObject *own, Py_ssize_t n)
{
    PyObject *limit = PyDict_GetItemWithError(own, n__limit);
    Py_ssize_t most = limit && PyLong_CheckExact(limit) ? PyLong_AsSsize_t(limit) : -1;
    if (most < 0 || PyDict_GetItemWithError(own, n__eof) != Py_False) {
        PyErr_Clear(); /* too large a number */
        return NULL;
    }
    PyObject *buffer = PyDict_GetItemWithError(own, n__buffer);
    if (!buffer || !PyByteArray_CheckExact(buffer) || ((PyByteArrayObject *)buffer)->ob_exports ||
        (PyByteArray_GET_SIZE(buffer) + n + 1) / 2 > most)
        return NULL;
    return Py_NewRef(buffer);
}

static int append(PyObject *buffer, const char *p, Py_ssize_t n)
{
    Py_ssize_t had = PyByteArray_GET_SIZE(buffer);
    if (PyByteArray_Resize(buffer, had + n) < 0)
        return -1;
    memcpy(PyByteArray_AS_STRING(buffer) + had, p, (size_t)n);
    return 0;
}

static int wake(PyObject *waiter)
{
    PyObject *cancelled = PyObject_CallMethodNoArgs(waiter, n_cancelled);
    int is = cancelled ? PyObject_IsTrue(cancelled) : -1;
    Py_XDECREF(cancelled);
    if (is)
        return is < 0 ? -1 : 0;
    PyObject *rc = call1(waiter, n_set_result, Py_None);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* 1: the reader has the bytes, and who waits for some is woken. 0: nothing happened, it is
 * data_received's. -1: an exception, as out of data_received. */
int stream_feed(PyObject *protocol, PyObject *context, const char *p, Py_ssize_t n)
{
    if (!Py_IS_TYPE(protocol, known[PROTOCOL].type))
        return 0;
    PyObject *reader = reader_of(protocol);
    PyObject *own = reader ? plain_dict(READER, reader, n_feed_data, n__wakeup_waiter) : NULL;
    PyObject *buffer = own ? room_for(own, n) : NULL;
    PyObject *waiter = buffer ? PyDict_GetItemWithError(own, n__waiter) : NULL;
    int rc = 0;
    if (waiter) {
        Py_INCREF(waiter);
        rc = append(buffer, p, n);
        if (rc == 0 && waiter != Py_None) {
            rc = PyDict_SetItem(own, n__waiter, Py_None);
            if (rc == 0 && (rc = PyContext_Enter(context)) == 0) {
                rc = wake(waiter);
                if (PyContext_Exit(context) < 0)
                    rc = -1;
            }
        }
        rc = rc < 0 ? -1 : 1;
        Py_DECREF(waiter);
    }
    Py_XDECREF(buffer);
    Py_XDECREF(own);
    Py_XDECREF(reader);
    if (!rc)
        PyErr_Clear(); /* of a look-up: data_received looks, too, and meets it or not */
    return rc;
}
