/* schedule.c - what schedules callbacks, as a mixin class of the loop.
 *
 * Owns: the ready queue and the fields of the loop that every callback reads. asyncio finds them
 * under its own names (_ready, _scheduled, _debug, ...). Whatever is not the plain case (debug
 * mode, a closed loop, wrong arguments) is asyncio's own method. Futures, tasks and users call
 * these for every step (bench/peers.py, rows call-soon to threadsafe).
 */
#include "fast.h"

#include <structmember.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static PyTypeObject *scheduler_type;
static PyObject *tasks_module, *futures_module;

enum { CALL_SOON, CALL_SOON_THREADSAFE, CALL_LATER, CALL_AT, CREATE_TASK, METHODS };
static const char *const method_names[] = {"call_soon", "call_soon_threadsafe", "call_later",
                                           "call_at", "create_task"};
static PyObject *asyncios[METHODS];

PyObject *bind_asyncio(PyObject *module, PyObject *args)
{
    PyObject *handle, *timer, *safe, *loop;
    if (!PyArg_ParseTuple(args, "O!O!OO:bind_asyncio", &PyType_Type, &handle, &PyType_Type, &timer,
                          &safe, &loop))
        return NULL;
    if (handle_bind(module, (PyTypeObject *)handle, (PyTypeObject *)timer,
                    PyType_Check(safe) ? (PyTypeObject *)safe : NULL) < 0)
        return NULL;
    for (int i = 0; i < METHODS; i++)
        if (!(asyncios[i] = PyObject_GetAttrString(loop, method_names[i])))
            return NULL;
    tasks_module = PyImport_ImportModule("asyncio.tasks");
    futures_module = tasks_module ? PyImport_ImportModule("asyncio.futures") : NULL;
    if (!futures_module)
        return NULL;
    Py_RETURN_NONE;
}

/* NULL: a loop that is not ours. */
struct scheduler *scheduler_of(PyObject *loop)
{
    return loop && PyObject_TypeCheck(loop, scheduler_type) ? (struct scheduler *)loop : NULL;
}

static PyObject *by_asyncio(int which, struct scheduler *s, PyObject *const *args, Py_ssize_t n,
                            PyObject *names)
{
    Py_ssize_t all = n + (names ? PyTuple_GET_SIZE(names) : 0);
    PyObject **with_loop = PyMem_Malloc((size_t)(all + 1) * sizeof *with_loop);
    if (!with_loop)
        return PyErr_NoMemory();
    with_loop[0] = (PyObject *)s;
    for (Py_ssize_t i = 0; i < all; i++)
        with_loop[i + 1] = args[i];
    PyObject *rc = PyObject_Vectorcall(asyncios[which], with_loop, (size_t)n + 1, names);
    PyMem_Free(with_loop);
    return rc;
}

/* Is the call the plain case, with at least so many arguments? Then its context, or NULL. */
static int plain(struct scheduler *s, PyObject *const *args, Py_ssize_t n, Py_ssize_t least,
                 PyObject *names, PyObject **context)
{
    *context = NULL;
    if (n < least || s->closed != Py_False || s->debug != Py_False || !s->ready)
        return 0;
    if (names) {
        if (PyTuple_GET_SIZE(names) != 1)
            return 0;
        PyObject *name = PyTuple_GET_ITEM(names, 0);
        if (name != n_context && PyUnicode_Compare(name, n_context))
            return 0;
        *context = args[n];
    }
    return 1;
}

/* The new handle is in the queue, and a reference to it the caller's. */
static PyObject *queued(struct scheduler *s, PyObject *handle)
{
    if (!handle)
        return NULL;
    if (!s->running)
        handle_track(handle);
    if (ready_push(s->ready, handle) < 0) {
        Py_DECREF(handle);
        return NULL;
    }
    return Py_NewRef(handle);
}

static PyObject *call_soon(struct scheduler *s, PyObject *const *args, Py_ssize_t n,
                           PyObject *names)
{
    PyObject *context;
    if (!plain(s, args, n, 1, names, &context))
        return by_asyncio(CALL_SOON, s, args, n, names);
    return queued(s, handle_new((PyObject *)s, context, args[0], args + 1, n - 1));
}

/* ---- waking ----
 *
 * Threads ring a bell, an eventfd: that is cheaper than a byte in asyncio's wake-up socket, which
 * is for signals and debug mode. One ringing is enough for any number of callbacks. `woken` is
 * cleared after the bell was read (before, the ringing of the next caller could be read too, and
 * the flag stay set for ever), and the ready queue is looked at after that: who found it set has
 * put his callback there. The GIL is kept for these calls, which never sleep: whoever is woken
 * waits for it.
 */

static PyObject *set_wake(struct scheduler *s, PyObject *args)
{
    if (!PyArg_ParseTuple(args, "ii:_set_wake", &s->wake_in, &s->bell))
        return NULL;
    s->wakes = s->wake_in >= 0;
    Py_RETURN_NONE;
}

static int wake(struct scheduler *s)
{
    const uint64_t one = 1;
    if (s->wakes && write(s->bell, &one, sizeof one) == sizeof one) {
        s->woken = 1;
        return 0;
    }
    PyObject *rc =
        PyObject_CallMethodNoArgs((PyObject *)s, n__write_to_self); /* tells what it is */
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* Did somebody ring? */
static int read_bell(struct scheduler *s)
{
    uint64_t count;
    return read(s->bell, &count, sizeof count) == sizeof count;
}

/* In debug mode, where asyncio empties the socket. */
static PyObject *silence(struct scheduler *s, PyObject *ignored)
{
    (void)ignored;
    if (s->wakes)
        read_bell(s);
    s->woken = 0;
    Py_RETURN_NONE;
}

/* The bell rang, or the wake-up socket is readable; if both, the next turn tells of the socket
 * again. What signals wrote into it is asyncio's, behind what is ready. */
int scheduler_woken(struct scheduler *s)
{
    char bytes[4096];
    ssize_t n;
    if (read_bell(s)) {
        s->woken = 0;
        return 0;
    }
    do {
        n = recv(s->wake_in, bytes, sizeof bytes, MSG_DONTWAIT);
        ssize_t i = 0;
        while (i < n && !bytes[i])
            i++;
        if (i >= n)
            continue;
        PyObject *told = PyObject_GetAttrString((PyObject *)s, "_process_self_data");
        PyObject *all[] = {told, told ? PyBytes_FromStringAndSize(bytes, n) : NULL};
        PyObject *rc = all[1] ? call_soon(s, all, 2, NULL) : NULL;
        Py_XDECREF(all[0]);
        Py_XDECREF(all[1]);
        Py_XDECREF(rc);
        if (!rc)
            return -1;
    } while (n == sizeof bytes);
    s->woken = 0;
    return 0;
}

static PyObject *call_soon_threadsafe(struct scheduler *s, PyObject *const *args, Py_ssize_t n,
                                      PyObject *names)
{
    PyObject *context;
    if (!plain(s, args, n, 1, names, &context))
        return by_asyncio(CALL_SOON_THREADSAFE, s, args, n, names);
    PyObject *handle = queued(s, handle_new_safe((PyObject *)s, context, args[0], args + 1, n - 1));
    if (handle && !s->woken && wake(s) < 0)
        Py_CLEAR(handle);
    return handle;
}

static PyObject *at(struct scheduler *s, PyObject *when, PyObject *context, PyObject *const *args,
                    Py_ssize_t n)
{
    double due = PyFloat_AsDouble(when);
    if (due == -1.0 && PyErr_Occurred())
        return NULL;
    PyObject *timer = timer_new((PyObject *)s, context, when, due, args[0], args + 1, n - 1);
    if (!timer)
        return NULL;
    if (!s->running)
        handle_track(timer);
    if (timers_push(s->scheduled, timer) < 0) {
        handle_track(timer);
        Py_DECREF(timer);
        return NULL;
    }
    timer_set_scheduled(timer, 1);
    return timer;
}

static int is_number(PyObject *o)
{
    return PyFloat_CheckExact(o) || PyLong_CheckExact(o);
}

static PyObject *call_at(struct scheduler *s, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *context;
    if (!plain(s, args, n, 2, names, &context) || !is_number(args[0]) ||
        !PyList_CheckExact(s->scheduled))
        return by_asyncio(CALL_AT, s, args, n, names);
    return at(s, args[0], context, args + 1, n - 1);
}

/* asyncio's call_later goes by call_at, which a class derived from the loop may have replaced. */
static int own_call_at(struct scheduler *s)
{
    PyTypeObject *type = Py_TYPE(s);
    if (s->seen_version && s->seen_version == type->tp_version_tag)
        return s->own_call_at;
    PyObject *own = PyObject_GetAttr((PyObject *)scheduler_type, n_call_at);
    PyObject *its = PyObject_GetAttr((PyObject *)type, n_call_at);
    s->own_call_at = own && own == its;
    s->seen_version = type->tp_version_tag;
    Py_XDECREF(own);
    Py_XDECREF(its);
    PyErr_Clear();
    return s->own_call_at;
}

static PyObject *call_later(struct scheduler *s, PyObject *const *args, Py_ssize_t n,
                            PyObject *names)
{
    PyObject *context;
    if (!plain(s, args, n, 2, names, &context) || !is_number(args[0]) ||
        !PyList_CheckExact(s->scheduled) || !own_call_at(s))
        return by_asyncio(CALL_LATER, s, args, n, names);
    PyObject *now = PyObject_CallMethodNoArgs((PyObject *)s, n_time);
    PyObject *when = now ? PyNumber_Add(now, args[0]) : NULL;
    PyObject *timer = when ? at(s, when, context, args + 1, n - 1) : NULL;
    Py_XDECREF(now);
    Py_XDECREF(when);
    return timer;
}

static PyObject *loop_time(struct scheduler *s, PyObject *ignored)
{
    (void)s, (void)ignored;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    int64_t ns = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    return PyFloat_FromDouble((double)ns / 1e9); /* as time.monotonic() rounds it */
}

static PyObject *get_debug(struct scheduler *s, PyObject *ignored)
{
    (void)ignored;
    return Py_NewRef(s->debug ? s->debug : Py_False);
}

/* ---- tasks and futures ---- */

static PyObject *create_task(struct scheduler *s, PyObject *const *args, Py_ssize_t n,
                             PyObject *names)
{
    Py_ssize_t more = names ? PyTuple_GET_SIZE(names) : 0;
    int is = n == 1 && more <= 2 && s->closed == Py_False && s->debug == Py_False;
    for (Py_ssize_t i = 0; is && i < more; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        is = name == n_name || name == n_context;
    }
    PyObject *factory = is ? PyObject_GetAttr((PyObject *)s, n__task_factory) : NULL;
    if (is && !factory)
        return NULL;
    Py_XDECREF(factory);
    if (!is || factory != Py_None)
        return by_asyncio(CREATE_TASK, s, args, n, names);
    PyObject *task = PyObject_GetAttr(tasks_module, n_Task), *keywords = PyTuple_New(1 + more);
    PyObject *made = NULL, *all[4] = {args[0], (PyObject *)s};
    if (task && keywords) {
        PyTuple_SET_ITEM(keywords, 0, Py_NewRef(n_loop));
        for (Py_ssize_t i = 0; i < more; i++) {
            PyTuple_SET_ITEM(keywords, 1 + i, Py_NewRef(PyTuple_GET_ITEM(names, i)));
            all[2 + i] = args[1 + i];
        }
        made = PyObject_Vectorcall(task, all, 1, keywords);
    }
    Py_XDECREF(task);
    Py_XDECREF(keywords);
    return made;
}

static PyObject *create_future(struct scheduler *s, PyObject *ignored)
{
    (void)ignored;
    PyObject *future = PyObject_GetAttr(futures_module, n_Future), *all[] = {(PyObject *)s};
    PyObject *made = future ? PyObject_Vectorcall(future, all, 0, only_loop) : NULL;
    Py_XDECREF(future);
    return made;
}

/* ---- runs ---- */

/* run_forever begins: turns are native, and handles that this loop holds are not the collector's.
 */
static PyObject *begin_run(struct scheduler *s, PyObject *ignored)
{
    (void)ignored;
    s->running = 1;
    s->thread = PyThread_get_thread_ident();
    s->woken = 0; /* in a forked child the byte may be the parent's */
    Py_RETURN_NONE;
}

/* Does another thread run the loop? It may be in a wait, and has given up the GIL for that: what
 * the wait reads must be left alone. */
int scheduler_elsewhere(PyObject *loop)
{
    struct scheduler *s = scheduler_of(loop);
    return s && s->running && s->thread != PyThread_get_thread_ident();
}

static PyObject *elsewhere(PyObject *loop, PyObject *ignored)
{
    (void)ignored;
    return PyBool_FromLong(scheduler_elsewhere(loop));
}

/* All that waits is the collector's from now on. */
void scheduler_track(struct scheduler *s)
{
    for (size_t i = 0; i < s->ready->count; i++)
        handle_track(s->ready->ring[(s->ready->head + i) & s->ready->mask]);
    if (PyList_CheckExact(s->scheduled))
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(s->scheduled); i++)
            handle_track(PyList_GET_ITEM(s->scheduled, i));
}

static PyObject *end_run(struct scheduler *s, PyObject *ignored)
{
    (void)ignored;
    s->running = 0;
    scheduler_track(s);
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static PyObject *get_ready(struct scheduler *s, void *closure)
{
    (void)closure;
    if (!s->ready) {
        PyErr_SetString(PyExc_AttributeError, "_ready");
        return NULL;
    }
    return Py_NewRef((PyObject *)s->ready);
}

/* asyncio sets a deque: the queue takes what is in it. */
static int set_ready(struct scheduler *s, PyObject *handles, void *closure)
{
    (void)closure;
    PyObject *queue = handles ? PyObject_CallNoArgs((PyObject *)ready_type) : NULL;
    PyObject *rc = queue ? PyObject_CallMethod(queue, "extend", "O", handles) : NULL;
    if (!rc) {
        if (!handles)
            PyErr_SetString(PyExc_TypeError, "_ready cannot be deleted");
        Py_XDECREF(queue);
        return -1;
    }
    Py_DECREF(rc);
    Py_XSETREF(s->ready, (Ready *)queue);
    return 0;
}

static int traverse(struct scheduler *s, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(s));
    Py_VISIT(s->debug);
    Py_VISIT(s->closed);
    Py_VISIT(s->stopping);
    Py_VISIT(s->scheduled);
    Py_VISIT(s->ready);
    return 0;
}

/* The flags stay: finalizers ask the loop whether it is closed. */
static int clear(struct scheduler *s)
{
    if (s->scheduled && PyList_CheckExact(s->scheduled) &&
        PyList_SetSlice(s->scheduled, 0, PyList_GET_SIZE(s->scheduled), NULL) < 0)
        PyErr_Clear();
    if (s->ready)
        Py_TYPE(s->ready)->tp_clear((PyObject *)s->ready);
    return 0;
}

static void dealloc(struct scheduler *s)
{
    PyTypeObject *type = Py_TYPE(s);
    PyObject_GC_UnTrack(s);
    Py_CLEAR(s->debug);
    Py_CLEAR(s->closed);
    Py_CLEAR(s->stopping);
    Py_CLEAR(s->scheduled);
    Py_CLEAR(s->ready);
    type->tp_free(s);
    Py_DECREF(type);
}

#define FAST (METH_FASTCALL | METH_KEYWORDS)
static PyMethodDef methods[] = {
    {"call_soon", (PyCFunction)(void (*)(void))call_soon, FAST,
     "call_soon($self, callback, /, *args, context=None)\n--\n\n"
     "As asyncio's: the callback runs once, in the order of the calls, in the next turn."},
    {"call_soon_threadsafe", (PyCFunction)(void (*)(void))call_soon_threadsafe, FAST,
     "call_soon_threadsafe($self, callback, /, *args, context=None)\n--\n\n"
     "As call_soon(), from any thread or a signal handler; it wakes the loop."},
    {"call_later", (PyCFunction)(void (*)(void))call_later, FAST,
     "call_later($self, delay, callback, /, *args, context=None)\n--\n\n"
     "As asyncio's: the callback runs once, `delay` seconds from now; a TimerHandle."},
    {"call_at", (PyCFunction)(void (*)(void))call_at, FAST,
     "call_at($self, when, callback, /, *args, context=None)\n--\n\n"
     "As asyncio's: call_later by the clock of loop.time()."},
    {"time", (PyCFunction)loop_time, METH_NOARGS, "time($self, /)\n--\n\nAs time.monotonic()."},
    {"get_debug", (PyCFunction)get_debug, METH_NOARGS,
     "get_debug($self, /)\n--\n\nIs the loop in debug mode?"},
    {"create_task", (PyCFunction)(void (*)(void))create_task, FAST,
     "create_task($self, coro, /, **kwargs)\n--\n\nAs asyncio's: schedules a coroutine; its Task."},
    {"create_future", (PyCFunction)create_future, METH_NOARGS,
     "create_future($self, /)\n--\n\nA Future of this loop."},
    {"_set_wake", (PyCFunction)set_wake, METH_VARARGS,
     "(of the wake-up socket's end to read, of the bell): descriptors; -1, -1: they are closed."},
    {"_silence", (PyCFunction)silence, METH_NOARGS, "Whoever woke the loop was heard."},
    {"_elsewhere", elsewhere, METH_NOARGS, "Does another thread run it now?"},
    {"_begin_run", (PyCFunction)begin_run, METH_NOARGS, NULL},
    {"_end_run", (PyCFunction)end_run, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

#define FIELD(name, field)                                                                         \
    {                                                                                              \
        name, T_OBJECT_EX, offsetof(struct scheduler, field), 0, NULL                              \
    }
static PyMemberDef members[] = {
    FIELD("_debug", debug),
    FIELD("_closed", closed),
    FIELD("_stopping", stopping),
    FIELD("_scheduled", scheduled),
    {"_timer_cancelled_count", T_PYSSIZET, offsetof(struct scheduler, timers_cancelled), 0, NULL},
    {"_clock_resolution", T_DOUBLE, offsetof(struct scheduler, resolution), 0, NULL},
    {"_woken", T_BOOL, offsetof(struct scheduler, woken), 0,
     "There is a byte in the wake-up socket."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"_ready", (getter)get_ready, (setter)set_ready, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},           {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},       {Py_tp_members, members},
    {Py_tp_getset, getset},         {0, NULL},
};

static PyType_Spec spec = {
    .name = "aiozc._fast.Scheduler",
    .basicsize = sizeof(struct scheduler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

PyTypeObject *scheduler_new_type(void)
{
    return scheduler_type = (PyTypeObject *)PyType_FromSpec(&spec);
}
