/* handle.c - what call_soon, call_later and call_soon_threadsafe answer: subclasses of asyncio's
 * Handle, TimerHandle and (from 3.14 on) _ThreadSafeHandle.
 *
 * Owns: the offsets of asyncio's slots, which are looked up once, and a short list of dead handles
 * that are used again. Everything that asyncio keeps in a handle lies in asyncio's own slots, so
 * its methods (repr, _run, comparison) are used as they are; behind them a single argument without
 * a tuple, and the deadline as a double.
 *
 * The collector is told of a handle only when somebody may hold it who is not reachable from the
 * running loop: see handle_track. A batch of ten thousand callbacks costs a third more otherwise
 * (bench/peers.py, row call-soon).
 */
#include "fast.h"

#include <descrobject.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#define FREE_MAX 0
#else
#define FREE_MAX 16384
#endif

PyTypeObject *handle_type, *timer_type, *our_handle, *our_timer, *our_safe; /* NULL before 3.14 */
static PyObject *asyncios_cancel[2];
static PyObject *new_lock; /* threading.RLock */

/* A `_run` as it was at import: somebody may put another there. */
struct known {
    PyTypeObject *type;
    PyObject *run;
    unsigned int version; /* of the type, when it was looked at last */
};
static struct known known_run[2]; /* Handle's and, where there is one, _ThreadSafeHandle's */

enum { WHEN, SCHEDULED, TIMER_SLOTS };
static const char *const slot_names[] = {"_callback",         "_args", "_cancelled", "_loop",
                                         "_source_traceback", "_repr", "_context"};
static const char *const timer_names[] = {"_when", "_scheduled"};
Py_ssize_t handle_at[HANDLE_SLOTS], timer_due_at;
static Py_ssize_t timer_at[TIMER_SLOTS], lock_at;

struct more {      /* behind asyncio's slots */
    PyObject *arg; /* of a callback with one argument, as long as _args is empty */
    double due;
};

enum kind { PLAIN, TIMER, SAFE, KINDS };
static Py_ssize_t more_at[KINDS];
static PyObject *free_list[KINDS][FREE_MAX ? FREE_MAX : 1];
static int n_free[KINDS];

static int is_timer(PyObject *h)
{
    return Py_IS_TYPE(h, our_timer);
}

static enum kind kind_of(PyObject *h)
{
    return is_timer(h) ? TIMER : Py_IS_TYPE(h, our_handle) ? PLAIN : SAFE;
}

static struct more *more_of(PyObject *h)
{
    return (struct more *)((char *)h + more_at[kind_of(h)]);
}

static PyObject **slot(PyObject *h, Py_ssize_t offset)
{
    return (PyObject **)((char *)h + offset);
}

void timer_set_scheduled(PyObject *h, int is)
{
    PyObject **p = slot(h, timer_at[SCHEDULED]), *old = *p;
    *p = Py_NewRef(is ? Py_True : Py_False);
    Py_XDECREF(old);
}

/* A handle in the queue or the heap of a running loop is alive whoever else holds it, for a frame
 * of run_forever holds the loop; so the collector need not know of it. It must once the handle has
 * left them and is still held, or the run ends. Idempotent; other objects know themselves. */
void handle_track(PyObject *h)
{
    if (handle_is_ours(h) && !PyObject_GC_IsTracked(h))
        PyObject_GC_Track(h);
}

/* ---- made ---- */

static PyObject *blank(enum kind kind)
{
    if (n_free[kind]) {
        PyObject *h = free_list[kind][--n_free[kind]];
        _Py_NewReference(h);
        return h;
    }
    PyTypeObject *type = kind == TIMER ? our_timer : kind == SAFE ? our_safe : our_handle;
    PyObject *h = PyObject_GC_New(PyObject, type);
    if (h)
        memset((char *)h + sizeof(PyObject), 0, (size_t)type->tp_basicsize - sizeof(PyObject));
    return h;
}

/* callback(*args) in `context`, or in a copy of the current one: a new handle, untracked. */
static PyObject *made(enum kind kind, PyObject *loop, PyObject *context, PyObject *callback,
                      PyObject *const *args, Py_ssize_t n)
{
    PyObject *rest = NULL;
    if (n > 1 && !(rest = PyTuple_New(n)))
        return NULL;
    context = context && context != Py_None ? Py_NewRef(context) : PyContext_CopyCurrent();
    PyObject *h = context ? blank(kind) : NULL;
    if (!h) {
        Py_XDECREF(rest);
        Py_XDECREF(context);
        return NULL;
    }
    if (rest)
        for (Py_ssize_t i = 0; i < n; i++)
            PyTuple_SET_ITEM(rest, i, Py_NewRef(args[i]));
    else if (n)
        more_of(h)->arg = Py_NewRef(args[0]);
    *slot(h, handle_at[HANDLE_CALLBACK]) = Py_NewRef(callback);
    *slot(h, handle_at[HANDLE_ARGS]) = rest;
    *slot(h, handle_at[HANDLE_CANCELLED]) = Py_NewRef(Py_False);
    *slot(h, handle_at[HANDLE_LOOP]) = Py_NewRef(loop);
    *slot(h, handle_at[HANDLE_TRACEBACK]) = Py_NewRef(Py_None);
    *slot(h, handle_at[HANDLE_REPR]) = Py_NewRef(Py_None);
    *slot(h, handle_at[HANDLE_CONTEXT]) = context;
    return h;
}

PyObject *handle_new(PyObject *loop, PyObject *context, PyObject *callback, PyObject *const *args,
                     Py_ssize_t n)
{
    return made(PLAIN, loop, context, callback, args, n);
}

/* One that may be cancelled in another thread: asyncio's cancel() waits there until a callback that
 * runs has ended. Where asyncio has no such handle, an ordinary one. */
PyObject *handle_new_safe(PyObject *loop, PyObject *context, PyObject *callback,
                          PyObject *const *args, Py_ssize_t n)
{
    if (!our_safe)
        return handle_new(loop, context, callback, args, n);
    PyObject *lock = PyObject_CallNoArgs(new_lock);
    PyObject *h = lock ? made(SAFE, loop, context, callback, args, n) : NULL;
    if (h)
        *slot(h, lock_at) = lock;
    else
        Py_XDECREF(lock);
    return h;
}

/* `when`: what the caller gave, of which `due` is the value. */
PyObject *timer_new(PyObject *loop, PyObject *context, PyObject *when, double due,
                    PyObject *callback, PyObject *const *args, Py_ssize_t n)
{
    PyObject *h = made(TIMER, loop, context, callback, args, n);
    if (!h)
        return NULL;
    *slot(h, timer_at[WHEN]) = Py_NewRef(when);
    *slot(h, timer_at[SCHEDULED]) = Py_NewRef(Py_False);
    more_of(h)->due = due;
    return h;
}

/* ---- run ---- */

/* Are Handle._run and _ThreadSafeHandle._run asyncio's own? Then they need not be called by name.
 */
int handle_run_is_known(void)
{
    for (int i = 0; i < 2; i++) {
        struct known *k = &known_run[i];
        if (!k->type || (k->version && k->type->tp_version_tag == k->version))
            continue;
        if (PyDict_GetItemWithError(k->type->tp_dict, n__run) != k->run)
            return 0;
        k->version = k->type->tp_version_tag;
    }
    return 1;
}

/* May handle_call run it? Its slots are what asyncio, or we, put there. */
int handle_is_plain(PyObject *h)
{
    int ours = handle_is_ours(h);
    if (!ours && !Py_IS_TYPE(h, handle_type) && !Py_IS_TYPE(h, timer_type))
        return 0;
    PyObject *args = handle_slot(h, HANDLE_ARGS), *context = handle_slot(h, HANDLE_CONTEXT);
    return handle_slot(h, HANDLE_CALLBACK) && context && PyContext_CheckExact(context) &&
           (args ? PyTuple_CheckExact(args) : ours);
}

static PyObject *call_in_context(PyObject *h)
{
    PyObject *context = Py_NewRef(handle_slot(h, HANDLE_CONTEXT));
    PyObject *callback = Py_NewRef(handle_slot(h, HANDLE_CALLBACK));
    PyObject *args = Py_XNewRef(handle_slot(h, HANDLE_ARGS)), *rc = NULL;
    PyObject *only = args ? NULL : Py_XNewRef(more_of(h)->arg);
    if (PyContext_Enter(context) == 0) {
        if (args)
            rc = PyObject_Vectorcall(callback, &PyTuple_GET_ITEM(args, 0),
                                     (size_t)PyTuple_GET_SIZE(args), NULL);
        else if (only)
            rc = PyObject_CallOneArg(callback, only);
        else
            rc = PyObject_CallNoArgs(callback);
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(rc);
    }
    Py_DECREF(callback);
    Py_XDECREF(args);
    Py_XDECREF(only);
    Py_DECREF(context);
    return rc;
}

/* As _ThreadSafeHandle._run: it may have been cancelled before the lock was had. */
static PyObject *call_locked(PyObject *h)
{
    PyObject *lock = Py_XNewRef(*slot(h, lock_at)), *rc = NULL;
    PyObject *got = lock ? PyObject_CallMethodNoArgs(lock, n_acquire) : NULL;
    if (!lock)
        PyErr_SetString(PyExc_AttributeError, "_lock");
    if (got) {
        Py_DECREF(got);
        int cancelled = handle_slot(h, HANDLE_CANCELLED) == Py_True;
        rc = cancelled ? Py_NewRef(Py_None) : call_in_context(h);
        PyObject *failed = rc ? NULL : take_exception();
        PyObject *freed = PyObject_CallMethodNoArgs(lock, n_release);
        if (!freed)
            Py_CLEAR(rc);
        if (failed) /* tells more than one of release() */
            restore_exception(failed);
        Py_XDECREF(freed);
    }
    Py_XDECREF(lock);
    return rc;
}

PyObject *handle_call(PyObject *h)
{
    return our_safe && Py_IS_TYPE(h, our_safe) ? call_locked(h) : call_in_context(h);
}

/* ---- as asyncio knows it ---- */

static PyObject *get_args(PyObject *h, void *closure)
{
    (void)closure;
    PyObject **args = slot(h, handle_at[HANDLE_ARGS]), *only = more_of(h)->arg;
    if (!*args) {
        PyObject *tuple = only ? PyTuple_Pack(1, only) : PyTuple_New(0);
        if (!tuple)
            return NULL;
        *args = tuple;
        Py_CLEAR(more_of(h)->arg);
    }
    return Py_NewRef(*args);
}

static int set_args(PyObject *h, PyObject *value, void *closure)
{
    (void)closure;
    Py_XSETREF(*slot(h, handle_at[HANDLE_ARGS]), Py_NewRef(value ? value : Py_None));
    Py_CLEAR(more_of(h)->arg);
    return 0;
}

static PyObject *get_when(PyObject *h, void *closure)
{
    (void)closure;
    return Py_NewRef(*slot(h, timer_at[WHEN]));
}

static int set_when(PyObject *h, PyObject *value, void *closure)
{
    (void)closure;
    double due = value ? PyFloat_AsDouble(value) : -1.0;
    if (!value)
        PyErr_SetString(PyExc_TypeError, "a timer's _when cannot be deleted");
    if (due == -1.0 && PyErr_Occurred())
        return -1;
    Py_XSETREF(*slot(h, timer_at[WHEN]), Py_NewRef(value));
    more_of(h)->due = due;
    return 0;
}

static PyObject *cancelled(PyObject *h, PyObject *ignored)
{
    (void)ignored;
    return Py_NewRef(handle_slot(h, HANDLE_CANCELLED));
}

static PyObject *cancel(PyObject *h, PyObject *ignored)
{
    (void)ignored;
    if (handle_slot(h, HANDLE_CANCELLED) != Py_False)
        Py_RETURN_NONE;
    struct scheduler *s = scheduler_of(handle_slot(h, HANDLE_LOOP));
    if (!s || s->debug != Py_False) /* keeps its repr */
        return PyObject_CallOneArg(asyncios_cancel[is_timer(h)], h);
    if (is_timer(h) && *slot(h, timer_at[SCHEDULED]) == Py_True)
        s->timers_cancelled++;
    Py_SETREF(*slot(h, handle_at[HANDLE_CANCELLED]), Py_NewRef(Py_True));
    PyObject *callback = handle_slot(h, HANDLE_CALLBACK), *args = handle_slot(h, HANDLE_ARGS);
    PyObject *only = more_of(h)->arg;
    *slot(h, handle_at[HANDLE_CALLBACK]) = Py_NewRef(Py_None);
    *slot(h, handle_at[HANDLE_ARGS]) = Py_NewRef(Py_None);
    more_of(h)->arg = NULL;
    Py_XDECREF(callback); /* may run code: the handle is whole */
    Py_XDECREF(args);
    Py_XDECREF(only);
    Py_RETURN_NONE;
}

/* ---- the types ---- */

static int traverse(PyObject *h, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(h));
    for (int i = 0; i < HANDLE_SLOTS; i++)
        Py_VISIT(*slot(h, handle_at[i]));
    if (is_timer(h))
        Py_VISIT(*slot(h, timer_at[WHEN]));
    if (kind_of(h) == SAFE)
        Py_VISIT(*slot(h, lock_at));
    Py_VISIT(more_of(h)->arg);
    return 0;
}

/* The slots are emptied in asyncio's way: None, which its methods can meet. */
static int clear(PyObject *h)
{
    Py_CLEAR(more_of(h)->arg);
    for (int i = 0; i < HANDLE_SLOTS; i++)
        if (i != HANDLE_CANCELLED && i != HANDLE_LOOP)
            Py_XSETREF(*slot(h, handle_at[i]), Py_NewRef(Py_None));
    return 0;
}

static void empty(PyObject *h)
{
    for (int i = 0; i < HANDLE_SLOTS; i++)
        Py_CLEAR(*slot(h, handle_at[i]));
    if (is_timer(h)) {
        Py_CLEAR(*slot(h, timer_at[WHEN]));
        Py_CLEAR(*slot(h, timer_at[SCHEDULED]));
    }
    if (kind_of(h) == SAFE)
        Py_CLEAR(*slot(h, lock_at));
    Py_CLEAR(more_of(h)->arg);
}

static void dealloc(PyObject *h)
{
    PyTypeObject *type = Py_TYPE(h);
    enum kind kind = kind_of(h);
    PyObject_GC_UnTrack(h);
#ifdef Py_TRASHCAN_BEGIN
    Py_TRASHCAN_BEGIN(h, dealloc);
#endif
    PyObject_ClearWeakRefs(h);
    empty(h);
    if (n_free[kind] < FREE_MAX) {
        free_list[kind][n_free[kind]++] = h; /* with its reference to the type */
    } else {
        PyObject_GC_Del(h);
        Py_DECREF(type);
    }
#ifdef Py_TRASHCAN_BEGIN
    Py_TRASHCAN_END
#endif
}

static PyMethodDef methods[] = {
    {"cancel", cancel, METH_NOARGS, "As asyncio's: the callback will not run, and is let go of."},
    {"cancelled", cancelled, METH_NOARGS, "Was cancel() called?"},
    {NULL, NULL, 0, NULL},
};

/* _ThreadSafeHandle's own lock, and then call Handle's: they find what they need in the slots. */
static PyMethodDef no_methods[] = {
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef handle_getset[] = {
    {"_args", get_args, set_args, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyGetSetDef timer_getset[] = {
    {"_args", get_args, set_args, NULL, NULL},
    {"_when", get_when, set_when, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject *derived(PyTypeObject *base, const char *name, PyMethodDef *own,
                             PyGetSetDef *getset, Py_ssize_t *more_offset)
{
    PyType_Slot slots[] = {
        {Py_tp_traverse, traverse}, {Py_tp_clear, clear},   {Py_tp_dealloc, dealloc},
        {Py_tp_methods, own},       {Py_tp_getset, getset}, {0, NULL},
    };
    size_t unit = _Alignof(struct more);
    size_t size = ((size_t)base->tp_basicsize + unit - 1) / unit * unit;
    PyType_Spec spec = {
        .name = name,
        .basicsize = (int)(size + sizeof(struct more)),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    *more_offset = (Py_ssize_t)size;
    PyObject *bases = PyTuple_Pack(1, base);
    PyObject *type = bases ? PyType_FromSpecWithBases(&spec, bases) : NULL;
    Py_XDECREF(bases);
    return (PyTypeObject *)type;
}

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

/* asyncio's own _run of the class. */
static int learn_run(struct known *k, PyTypeObject *type)
{
    PyObject *run = PyDict_GetItemWithError(type->tp_dict, n__run);
    if (!run) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "asyncio's %s has no _run", type->tp_name);
        return -1;
    }
    k->run = Py_NewRef(run);
    k->type = (PyTypeObject *)Py_NewRef(type);
    return 0;
}

static PyTypeObject *added(PyObject *module, PyTypeObject *type)
{
    return type && PyModule_AddType(module, type) == 0 ? type : NULL;
}

static int bind_safe(PyObject *module, PyTypeObject *type)
{
    PyObject *threading = PyImport_ImportModule("threading");
    new_lock = threading ? PyObject_GetAttrString(threading, "RLock") : NULL;
    Py_XDECREF(threading);
    if (!new_lock || slot_offset(type, "_lock", &lock_at) < 0 || learn_run(&known_run[1], type) < 0)
        return -1;
    our_safe = added(module, derived(type, "aiozc._fast._ThreadSafeHandle", no_methods,
                                     handle_getset, &more_at[SAFE]));
    return our_safe ? 0 : -1;
}

/* Called once, at import; `safe` may be NULL. The others derive from Handle and have its slots
 * where that has them. */
int handle_bind(PyObject *module, PyTypeObject *type, PyTypeObject *timer, PyTypeObject *safe)
{
    Py_ssize_t found[HANDLE_SLOTS], found_timer[TIMER_SLOTS];
    for (int i = 0; i < HANDLE_SLOTS; i++)
        if (slot_offset(type, slot_names[i], &found[i]) < 0)
            return -1;
    for (int i = 0; i < TIMER_SLOTS; i++)
        if (slot_offset(timer, timer_names[i], &found_timer[i]) < 0)
            return -1;
    if (learn_run(&known_run[0], type) < 0)
        return -1;
    asyncios_cancel[0] = PyObject_GetAttrString((PyObject *)type, "cancel");
    asyncios_cancel[1] = PyObject_GetAttrString((PyObject *)timer, "cancel");
    if (!asyncios_cancel[0] || !asyncios_cancel[1])
        return -1;
    memcpy(handle_at, found, sizeof handle_at);
    memcpy(timer_at, found_timer, sizeof timer_at);
    handle_type = (PyTypeObject *)Py_NewRef(type);
    timer_type = (PyTypeObject *)Py_NewRef(timer);
    our_handle =
        added(module, derived(type, "aiozc._fast.Handle", methods, handle_getset, &more_at[PLAIN]));
    our_timer = added(
        module, derived(timer, "aiozc._fast.TimerHandle", methods, timer_getset, &more_at[TIMER]));
    if (!our_handle || !our_timer)
        return -1;
    timer_due_at = more_at[TIMER] + (Py_ssize_t)offsetof(struct more, due);
    return safe ? bind_safe(module, safe) : 0;
}
