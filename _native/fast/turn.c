/* turn.c - one turn of the loop.
 *
 * Owns: the batch of events (which of them were handed out), one Core a loop. Made by reactor.py;
 * turn() is called by loop.py's _run_once, dispatch() by the handle that runs events behind what
 * was ready. The order is asyncio's: what was ready and descriptors, the reactor's events, timers.
 *
 * A batch survives any exception: what SystemExit from one callback left in it, the next dispatch()
 * goes on with, and turn() does not wait before it is used up.
 */
#include "fast.h"

#include <errno.h>
#include <structmember.h>

/* Turns in a row that may keep the GIL: what runs in them may be native code alone, which never
 * looks whether another thread waits for it. */
#define KEEP_GIL 64

typedef struct {
    PyObject_HEAD struct batch b;
    PyObject *handle; /* asyncio's handle for dispatch() */
    PyObject *report; /* report(handle, exc): as Handle._run tells an exception */
    double longest;   /* seconds that one turn may sleep */
    int kept;         /* turns since the GIL was given up */
} Core;

/* ---- events ---- */

/* 0: the exception that is set was told to the loop's handler. -1: it ends the run. */
static int reported(Core *self, PyObject *handle)
{
    if (must_leave() || !handle)
        return -1;
    PyObject *exc = take_exception();
    PyObject *rc = PyObject_CallFunctionObjArgs(self->report, handle, exc, NULL);
    Py_XDECREF(exc);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

static int dispatch(Core *self)
{
    struct batch *b = &self->b;
    while (b->i < b->n) {
        azc_event e = b->events[b->i++];
        if (event_happened(b, &e) < 0 && reported(self, self->handle) < 0)
            return -1;
    }
    b->n = b->i = 0;
    return 0;
}

/* ---- handles ---- */

/* As Handle._run does, where that is asyncio's own; else by it. */
static int run_handle(Core *self, PyObject *handle, int known)
{
    if (handle == self->handle)
        return dispatch(self);
    if (handle_is_ours(handle) && handle_slot(handle, HANDLE_CANCELLED) == Py_True)
        return 0;
    if (known && handle_is_plain(handle)) {
        if (handle_slot(handle, HANDLE_CANCELLED) == Py_True)
            return 0;
        PyObject *rc = handle_call(handle);
        if (!rc)
            return reported(self, handle);
        Py_DECREF(rc);
        return 0;
    }
    PyObject *cancelled = PyObject_GetAttr(handle, n__cancelled);
    int is = cancelled ? PyObject_IsTrue(cancelled) : -1;
    Py_XDECREF(cancelled);
    if (is)
        return is < 0 ? -1 : 0;
    PyObject *rc = PyObject_CallMethodNoArgs(handle, n__run);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* What is ready now, and nothing that it makes ready. */
static int run_ready(Core *self, struct scheduler *s)
{
    size_t n = s->ready->count;
    if (!n)
        return 0;
    int known = handle_run_is_known();
    if (!known && PyErr_Occurred())
        return -1;
    while (n-- > 0 && s->ready->count) {
        PyObject *handle = ready_pop(s->ready);
        int rc = run_handle(self, handle, known);
        if (Py_REFCNT(handle) > 1)
            handle_track(handle);
        Py_DECREF(handle);
        if (rc < 0)
            return -1;
    }
    return 0;
}

int attr_true(PyObject *o, PyObject *name)
{
    PyObject *v = PyObject_GetAttr(o, name);
    int is = v == Py_True ? 1 : v == Py_False ? 0 : v ? PyObject_IsTrue(v) : -1;
    Py_XDECREF(v);
    return is;
}

/* ---- the turn ---- */

static int wait_for(Core *self, int64_t ns)
{
    int fired;
    if (!ns && self->kept < KEEP_GIL && api->idle(self->b.r)) {
        self->kept++;
        return 0;
    }
    self->kept = 0;
    Py_BEGIN_ALLOW_THREADS;
    fired = api->wait(self->b.r, ns);
    Py_END_ALLOW_THREADS;
    return fired;
}

/* Something fired: run plain events now, leave the rest to loop._fired. */
static int after_wait(Core *self, struct scheduler *s, int fired)
{
    if (fired > 0 && fired & AZC_FIRED_WAKE && s->wakes && scheduler_woken(s) == 0 &&
        !(fired &= ~AZC_FIRED_WAKE))
        return PyErr_CheckSignals();
    if (fired > 0 && !PyErr_Occurred() && !(fired & ~(AZC_FIRED_EVENTS | AZC_FIRED_RELEASED))) {
        self->b.n = fired & AZC_FIRED_EVENTS; /* first: the batch survives whatever happens */
        self->b.i = 0;
        if (fired & AZC_FIRED_RELEASED && drop_released(&self->b) < 0)
            return -1;
        if (PyErr_CheckSignals() < 0)
            return -1; /* the batch waits for the next run */
        if (!self->b.n || !s->ready->count)
            return dispatch(self);
        if (ready_push(s->ready, self->handle) < 0)
            return -1;
        Py_INCREF(self->handle);
        return 0;
    }
    if (!PyErr_Occurred() && PyErr_CheckSignals() < 0 && fired <= 0)
        return -1;
    PyObject *exc = PyErr_Occurred() ? take_exception() : NULL; /* first keep what fired */
    PyObject *n = PyLong_FromLong(fired), *kept = n ? call1((PyObject *)s, n__fired, n) : NULL;
    int rc = kept && !exc ? 0 : -1;
    if (kept && exc)
        restore_exception(Py_NewRef(exc));
    Py_XDECREF(n);
    Py_XDECREF(kept);
    Py_XDECREF(exc);
    return rc;
}

static int is_stopping(struct scheduler *s)
{
    if (s->stopping == Py_False)
        return 0;
    return s->stopping == Py_True || (s->stopping && PyObject_IsTrue(s->stopping));
}

static int turn(Core *self, struct scheduler *s, Py_ssize_t many)
{
    int64_t ns = -1;
    if (timers_drop_cancelled(s, many) < 0)
        return -1;
    int stopping = is_stopping(s);
    if (stopping < 0)
        return -1;
    if (stopping || s->ready->count)
        ns = 0;
    else if (PyList_GET_SIZE(s->scheduled) && timers_wait(s, self->longest, &ns) < 0)
        return -1;
    int fired = wait_for(self, ns);
    if (fired ? after_wait(self, s, fired) < 0 : PyErr_CheckSignals() < 0)
        return -1;
    if (PyList_GET_SIZE(s->scheduled) && timers_ripe(s) < 0)
        return -1;
    return run_ready(self, s);
}

/* Must asyncio's own _run_once do it? In debug mode callbacks are timed. */
static int not_ours(Core *self, struct scheduler *s)
{
    if (s->debug == Py_False && self->b.i == self->b.n && PyList_CheckExact(s->scheduled))
        return 0;
    scheduler_track(s); /* it takes handles out unseen */
    return 1;
}

/* turn(loop, MIN_SCHEDULED) -> bool: one turn, or within run_forever turns until the loop is to
 * stop. False: the next one is asyncio's own _run_once's. */
static PyObject *core_turn(Core *self, PyObject *const *args, Py_ssize_t n_args)
{
    struct scheduler *s = n_args == 2 ? scheduler_of(args[0]) : NULL;
    Py_ssize_t many = s ? PyLong_AsSsize_t(args[1]) : -1;
    if (!s || !s->ready || !s->scheduled || PyErr_Occurred())
        return PyErr_Format(PyExc_TypeError, "turn(loop, min_scheduled)");
    do {
        if (not_ours(self, s))
            Py_RETURN_FALSE;
        if (turn(self, s, many) < 0)
            return NULL;
    } while (s->running && !is_stopping(s));
    Py_RETURN_TRUE;
}

/* ---- the type ---- */

static PyObject *core_dispatch(Core *self, PyObject *ignored)
{
    (void)ignored;
    if (dispatch(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *core_begin(Core *self, PyObject *count)
{
    long n = PyLong_AsLong(count);
    if (n == -1 && PyErr_Occurred())
        return NULL;
    self->b.n = (int)n;
    self->b.i = 0;
    Py_RETURN_NONE;
}

static PyObject *core_pending(Core *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(self->b.i < self->b.n);
}

static PyObject *core_drop_released(Core *self, PyObject *ignored)
{
    (void)ignored;
    if (drop_released(&self->b) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static int core_init(Core *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"reactor", "events", "memory",  "stride", "conns",
                            "held",    "report", "longest", NULL};
    unsigned long long r, events, memory, stride;
    PyObject *conns, *held, *report;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKKO!O!Od", names, &r, &events, &memory,
                                     &stride, &PyDict_Type, &conns, &PyDict_Type, &held, &report,
                                     &self->longest))
        return -1;
    self->b.r = (azc_reactor *)(uintptr_t)r;
    self->b.events = (azc_event *)(uintptr_t)events;
    self->b.memory = (char *)(uintptr_t)memory;
    self->b.stride = (size_t)stride;
    Py_XSETREF(self->b.conns, Py_NewRef(conns));
    Py_XSETREF(self->b.held, Py_NewRef(held));
    Py_XSETREF(self->report, Py_NewRef(report));
    return 0;
}

static int core_traverse(Core *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->b.conns);
    Py_VISIT(self->b.held);
    Py_VISIT(self->handle);
    Py_VISIT(self->report);
    return 0;
}

/* `held` is what it is elsewhere, too: a plain reference. What keeps its memory alive is the extra
 * reference of reactor.py. */
static int core_clear(Core *self)
{
    Py_CLEAR(self->b.conns);
    Py_CLEAR(self->b.held);
    Py_CLEAR(self->handle);
    Py_CLEAR(self->report);
    return 0;
}

static void core_dealloc(Core *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    core_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef core_methods[] = {
    {"begin", (PyCFunction)core_begin, METH_O, "azc_wait answered so many events."},
    {"dispatch", (PyCFunction)core_dispatch, METH_NOARGS,
     "Run the callbacks of the batch. Only SystemExit and KeyboardInterrupt leave it."},
    {"drop_released", (PyCFunction)core_drop_released, METH_NOARGS,
     "Let go of plain writes whose memory is free."},
    {"turn", (PyCFunction)(void (*)(void))core_turn, METH_FASTCALL,
     "One turn of the loop; False: asyncio's own _run_once is to do it."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef core_members[] = {
    {"handle", T_OBJECT, offsetof(Core, handle), 0, "asyncio's handle that runs dispatch()."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef core_getset[] = {
    {"pending", (getter)core_pending, NULL, "Is a batch not walked to its end?", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot core_slots[] = {
    {Py_tp_init, core_init},       {Py_tp_traverse, core_traverse}, {Py_tp_clear, core_clear},
    {Py_tp_dealloc, core_dealloc}, {Py_tp_methods, core_methods},   {Py_tp_members, core_members},
    {Py_tp_getset, core_getset},   {Py_tp_new, PyType_GenericNew},  {0, NULL},
};

PyType_Spec core_spec = {
    .name = "aiozc._fast.Core",
    .basicsize = sizeof(Core),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = core_slots,
};
