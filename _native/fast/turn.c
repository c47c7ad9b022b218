/* turn.c - one turn of the loop, and the walk over its events.
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
#include <math.h>
#include <structmember.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD azc_reactor *r;
    azc_event *events;
    char *memory;
    size_t stride;
    PyObject *conns, *held; /* dictionaries of the Reactor, by token */
    PyObject *handle;       /* asyncio's handle for dispatch() */
    PyObject *report;       /* report(handle, exc): as Handle._run tells an exception */
    PyObject *heappop;
    double longest; /* seconds that one turn may sleep */
    int n, i;       /* the batch, and what of it was handed out */
    char running;
} Core;

/* ---- events ---- */

/* Call `method` with what it needs in the transport's context. 0, or -1 with SystemExit or
 * KeyboardInterrupt set; other exceptions end the transport, as asyncio does. */
static int told(PyObject *owner, PyObject *rc, const char *method)
{
    if (rc) {
        Py_DECREF(rc);
        return 0;
    }
    if (must_leave())
        return -1;
    PyObject *exc = take_exception();
    PyObject *text = PyUnicode_FromFormat("Fatal error: protocol.%s() call failed.", method);
    PyObject *args[] = {owner, exc, text};
    PyObject *done = text ? PyObject_VectorcallMethod(n__fatal_error, args,
                                                      3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL)
                          : NULL;
    Py_XDECREF(text);
    Py_XDECREF(exc);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int deliver_bytes(PyObject *owner, PyObject *protocol, PyObject *context, const char *p,
                         Py_ssize_t n)
{
    PyObject *data = PyBytes_FromStringAndSize(p, n), *rc = NULL;
    if (data && PyContext_Enter(context) == 0) {
        rc = call1(protocol, n_data_received, data);
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(rc);
    }
    Py_XDECREF(data);
    return told(owner, rc, "data_received");
}

/* One buffer of the protocol is filled and told; `took` says how much of p it has. 0, or -1: an
 * exception, and `name` says of which method. */
static int fill_buffer(PyObject *protocol, const char *p, Py_ssize_t n, Py_ssize_t *took,
                       const char **name)
{
    Py_buffer view;
    PyObject *hint = PyLong_FromLong(-1);
    *name = "get_buffer";
    PyObject *buffer = hint ? call1(protocol, n_get_buffer, hint) : NULL;
    Py_XDECREF(hint);
    if (!buffer)
        return -1;
    int bad = PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE);
    Py_DECREF(buffer);
    if (bad)
        return -1;
    Py_ssize_t room = view.len;
    if (room > n)
        room = n;
    memcpy(view.buf, p, (size_t)room);
    PyBuffer_Release(&view);
    if (!room) {
        PyErr_SetString(PyExc_RuntimeError, "get_buffer() returned an empty buffer");
        return -1;
    }
    *took = room;
    *name = "buffer_updated";
    PyObject *count = PyLong_FromSsize_t(room);
    PyObject *rc = count ? call1(protocol, n_buffer_updated, count) : NULL;
    Py_XDECREF(count);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

/* What did not fit into the protocol's first buffer is Python's: between two buffers it may pause,
 * close, or be replaced. An exception that ends the run must not lose it. */
static int deliver_buffer(PyObject *owner, PyObject *protocol, PyObject *context, const char *p,
                          Py_ssize_t n, size_t start)
{
    const char *name = "get_buffer";
    Py_ssize_t took = 0;
    int rc = PyContext_Enter(context);
    if (rc == 0) {
        rc = fill_buffer(protocol, p, n, &took, &name);
        if (PyContext_Exit(context) < 0)
            rc = -1;
    }
    long left = (long)(n - took), at = (long)(start + (size_t)took);
    PyObject *done = NULL;
    if (rc == 0) {
        if (!left)
            return 0;
        done = call_ints(owner, n__on_recv, left, at);
    } else if (!left || !must_leave()) {
        return told(owner, NULL, name);
    } else {
        PyObject *exc = take_exception();
        Py_XDECREF(call_ints(owner, n__hold_at, left, at));
        PyErr_SetObject((PyObject *)Py_TYPE(exc), exc);
        Py_DECREF(exc);
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The value of a token in `where`, a new reference; NULL without an exception: it is not there. */
static PyObject *look_up(PyObject *where, uint64_t token, int take)
{
    PyObject *key = PyLong_FromUnsignedLongLong(token);
    if (!key)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(where, key);
    Py_XINCREF(found);
    if (found && take && PyDict_DelItem(where, key) < 0)
        Py_CLEAR(found);
    Py_DECREF(key);
    return found;
}

static int received(Core *self, const azc_event *e)
{
    PyObject *transport = api->owner(self->r, e->token);
    PyObject *owner = transport ? Py_NewRef(transport) : look_up(self->conns, e->token, 0);
    if (!owner) /* closed */
        return PyErr_Occurred() ? -1 : 0;
    struct fields *f = transport ? fields_of(transport) : NULL;
    size_t start = e->arg * self->stride;
    int rc;
    if (e->res > 0 && f && f->fast) {
        PyObject *protocol = Py_NewRef(f->protocol), *context = Py_NewRef(f->context);
        const char *p = self->memory + start;
        rc = f->fast == FAST_DATA ? deliver_bytes(owner, protocol, context, p, e->res)
                                  : deliver_buffer(owner, protocol, context, p, e->res, start);
        Py_DECREF(protocol);
        Py_DECREF(context);
    } else {
        PyObject *done = call_ints(owner, n__on_recv, e->res, (long)start);
        Py_XDECREF(done);
        rc = done ? 0 : -1;
    }
    Py_DECREF(owner);
    return rc;
}

static PyObject *hand_out(Core *self, const azc_event *e, PyObject *to)
{
    switch (e->kind) {
    case AZC_EV_WRITE:
        return call_ints(to, n__on_write, e->res, e->arg);
    case AZC_EV_DATAGRAM:
        return call_ints(to, n__on_datagram, e->res, (long)(e->arg * self->stride));
    case AZC_EV_SENT:
        return PyObject_CallMethodNoArgs(to, n__on_sent);
    default: {
        PyObject *fd = PyLong_FromLong(e->res), *rc = fd ? call1(to, n__on_accept, fd) : NULL;
        Py_XDECREF(fd);
        return rc;
    }
    }
}

static int happened(Core *self, const azc_event *e)
{
    if (e->kind == AZC_EV_RECV)
        return received(self, e);
    int of_op = e->kind == AZC_EV_SENT || e->kind == AZC_EV_RELEASED;
    PyObject *to = look_up(of_op ? self->held : self->conns, e->token, e->kind == AZC_EV_RELEASED);
    if (!to) {
        if (PyErr_Occurred())
            return -1;
        if (e->kind == AZC_EV_ACCEPT && e->res >= 0)
            close(e->res); /* accepted for a listener that is gone */
        return 0;
    }
    if (e->kind == AZC_EV_RELEASED) { /* of an operation: plain writes have no event */
        int ended = operation_finish(to, e->res, e->arg);
        Py_DECREF(to);
        return ended;
    }
    PyObject *rc = hand_out(self, e, to);
    Py_DECREF(to);
    Py_XDECREF(rc);
    return rc ? 0 : -1;
}

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
    while (self->i < self->n) {
        azc_event e = self->events[self->i++];
        if (happened(self, &e) < 0 && reported(self, self->handle) < 0)
            return -1;
    }
    self->n = self->i = 0;
    return 0;
}

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
    self->n = (int)n;
    self->i = 0;
    Py_RETURN_NONE;
}

static PyObject *core_pending(Core *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(self->i < self->n);
}

/* Plain writes held by reference whose memory is free: nobody waits for them. An exception out of
 * what looks at them (checked.py) leaves only when all of them were let go. */
static int drop_released(Core *self)
{
    uint64_t tokens[256];
    size_t n;
    PyObject *exc = NULL;
    while ((n = api->take_released(self->r, tokens, 256)))
        for (size_t i = 0; i < n; i++) {
            PyObject *held = look_up(self->held, tokens[i], 1);
            if (is_checked(held)) {
                PyObject *rc = PyObject_CallNoArgs(held);
                Py_XDECREF(rc);
            }
            Py_XDECREF(held);
            if (PyErr_Occurred())
                Py_XSETREF(exc, take_exception());
        }
    if (!exc)
        return 0;
    PyErr_SetObject((PyObject *)Py_TYPE(exc), exc);
    Py_DECREF(exc);
    return -1;
}

static PyObject *core_drop_released(Core *self, PyObject *ignored)
{
    (void)ignored;
    if (drop_released(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- handles ---- */

static int call_handle(Core *self, PyObject *handle)
{
    PyObject *context = Py_XNewRef(handle_slot(handle, HANDLE_CONTEXT));
    PyObject *callback = Py_XNewRef(handle_slot(handle, HANDLE_CALLBACK));
    PyObject *args = Py_XNewRef(handle_slot(handle, HANDLE_ARGS));
    PyObject *rc = NULL;
    if (PyContext_Enter(context) == 0) {
        rc = PyObject_Vectorcall(callback, &PyTuple_GET_ITEM(args, 0),
                                 (size_t)PyTuple_GET_SIZE(args), NULL);
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(rc);
    }
    int done = rc ? 0 : reported(self, handle);
    Py_XDECREF(callback);
    Py_XDECREF(args);
    Py_XDECREF(context);
    Py_XDECREF(rc);
    return done;
}

/* As Handle._run does, where the handle is asyncio's own and its _run is, too. */
static int run_handle(Core *self, PyObject *handle, int known)
{
    if (known && (Py_IS_TYPE(handle, handle_type) || Py_IS_TYPE(handle, timer_type))) {
        if (handle_slot(handle, HANDLE_CANCELLED) == Py_True)
            return 0;
        PyObject *args = handle_slot(handle, HANDLE_ARGS);
        if (args && PyTuple_CheckExact(args) && handle_slot(handle, HANDLE_CALLBACK) &&
            handle_slot(handle, HANDLE_CONTEXT) &&
            PyContext_CheckExact(handle_slot(handle, HANDLE_CONTEXT)))
            return call_handle(self, handle);
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

static int run_ready(Core *self, PyObject *ready, Py_ssize_t n)
{
    if (!n)
        return 0;
    int known = PyDict_GetItemWithError(handle_type->tp_dict, n__run) == handle_run;
    if (!known && PyErr_Occurred())
        return -1;
    while (n-- > 0) {
        PyObject *handle = PyObject_CallMethodNoArgs(ready, n_popleft);
        int rc = handle ? run_handle(self, handle, known) : -1;
        Py_XDECREF(handle);
        if (rc < 0)
            return -1;
    }
    return 0;
}

/* ---- timers ---- */

int attr_true(PyObject *o, PyObject *name)
{
    PyObject *v = PyObject_GetAttr(o, name);
    int is = v == Py_True ? 1 : v == Py_False ? 0 : v ? PyObject_IsTrue(v) : -1;
    Py_XDECREF(v);
    return is;
}

static int attr_double(PyObject *o, PyObject *name, double *value)
{
    PyObject *v = PyObject_GetAttr(o, name);
    *value = v ? PyFloat_AsDouble(v) : -1.0;
    Py_XDECREF(v);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int loop_time(PyObject *loop, double *now)
{
    PyObject *v = PyObject_CallMethodNoArgs(loop, n_time);
    *now = v ? PyFloat_AsDouble(v) : -1.0;
    Py_XDECREF(v);
    return *now == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* The next timer leaves the heap: a new reference. */
static PyObject *pop_timer(Core *self, PyObject *scheduled)
{
    PyObject *h = PyObject_CallOneArg(self->heappop, scheduled);
    if (h && PyObject_SetAttr(h, n__scheduled, Py_False) < 0)
        Py_CLEAR(h);
    return h;
}

/* Cancelled timers at the head of the heap are dropped, as asyncio does. */
static int drop_cancelled(Core *self, PyObject *loop, PyObject *scheduled)
{
    while (PyList_GET_SIZE(scheduled)) {
        int is = attr_true(PyList_GET_ITEM(scheduled, 0), n__cancelled);
        if (is <= 0)
            return is;
        PyObject *h = pop_timer(self, scheduled);
        PyObject *count = h ? PyObject_GetAttr(loop, n__timer_cancelled_count) : NULL;
        Py_XDECREF(h);
        if (!count)
            return -1;
        PyObject *less = PyLong_FromLong(PyLong_AsLong(count) - 1);
        Py_DECREF(count);
        int rc = less ? PyObject_SetAttr(loop, n__timer_cancelled_count, less) : -1;
        Py_XDECREF(less);
        if (rc < 0)
            return -1;
    }
    return 0;
}

static int until_next(Core *self, PyObject *loop, PyObject *scheduled, int64_t *ns)
{
    double when, now;
    if (attr_double(PyList_GET_ITEM(scheduled, 0), n__when, &when) < 0 || loop_time(loop, &now) < 0)
        return -1;
    double left = when - now;
    if (left > self->longest)
        left = self->longest;
    *ns = left > 0 ? (int64_t)(left * 1e9) + 1 : 0;
    return 0;
}

static int ripe_timers(Core *self, PyObject *loop, PyObject *scheduled, PyObject *ready)
{
    double now, when, resolution;
    if (loop_time(loop, &now) < 0 || attr_double(loop, n__clock_resolution, &resolution) < 0)
        return -1;
    double ulp = nextafter(now, INFINITY) - now;
    double end = now + (resolution > ulp ? resolution : ulp);
    while (PyList_GET_SIZE(scheduled)) {
        if (attr_double(PyList_GET_ITEM(scheduled, 0), n__when, &when) < 0)
            return -1;
        if (when >= end)
            return 0;
        PyObject *h = pop_timer(self, scheduled);
        PyObject *rc = h ? call1(ready, n_append, h) : NULL;
        Py_XDECREF(h);
        Py_XDECREF(rc);
        if (!rc)
            return -1;
    }
    return 0;
}

/* ---- the turn ---- */

static int wait_for(Core *self, int64_t ns)
{
    int fired;
    Py_BEGIN_ALLOW_THREADS;
    fired = api->wait(self->r, ns);
    Py_END_ALLOW_THREADS;
    return fired;
}

/* Something fired: run plain events now, leave the rest to loop._fired. */
static int after_wait(Core *self, PyObject *loop, PyObject *ready, int fired)
{
    if (fired > 0 && !(fired & ~(AZC_FIRED_EVENTS | AZC_FIRED_RELEASED))) {
        self->n = fired & AZC_FIRED_EVENTS; /* first: the batch survives whatever happens */
        self->i = 0;
        if (fired & AZC_FIRED_RELEASED && drop_released(self) < 0)
            return -1;
        if (PyErr_CheckSignals() < 0)
            return -1; /* the batch waits for the next run */
        if (!self->n || !PyObject_Size(ready))
            return dispatch(self);
        PyObject *rc = call1(ready, n_append, self->handle);
        Py_XDECREF(rc);
        return rc ? 0 : -1;
    }
    if (PyErr_CheckSignals() < 0 && fired <= 0)
        return -1;
    PyObject *exc = PyErr_Occurred() ? take_exception() : NULL; /* first keep what fired */
    PyObject *n = PyLong_FromLong(fired), *kept = n ? call1(loop, n__fired, n) : NULL;
    int rc = kept && !exc ? 0 : -1;
    if (kept && exc)
        PyErr_SetObject((PyObject *)Py_TYPE(exc), exc);
    Py_XDECREF(n);
    Py_XDECREF(kept);
    Py_XDECREF(exc);
    return rc;
}

static int turn(Core *self, PyObject *loop, PyObject *scheduled, PyObject *ready)
{
    if (PyList_GET_SIZE(scheduled) && drop_cancelled(self, loop, scheduled) < 0)
        return -1;
    int64_t ns = -1;
    int stopping = attr_true(loop, n__stopping);
    if (stopping < 0)
        return -1;
    if (stopping || PyObject_Size(ready))
        ns = 0;
    else if (PyList_GET_SIZE(scheduled) && until_next(self, loop, scheduled, &ns) < 0)
        return -1;
    int fired = wait_for(self, ns);
    if (fired ? after_wait(self, loop, ready, fired) < 0 : PyErr_CheckSignals() < 0)
        return -1;
    if (PyList_GET_SIZE(scheduled) && ripe_timers(self, loop, scheduled, ready) < 0)
        return -1;
    return run_ready(self, ready, PyObject_Size(ready));
}

/* May this turn be native? 1: no, asyncio's own _run_once is to do it; -1: an exception. */
static int not_ours(Core *self, PyObject *loop, PyObject *scheduled, PyObject *min_scheduled)
{
    int debug = attr_true(loop, n__debug); /* callbacks are timed */
    if (debug)
        return debug;
    if (self->i < self->n) /* an exception left a batch half walked */
        return 1;
    if (!PyList_CheckExact(scheduled))
        return 1;
    Py_ssize_t n = PyList_GET_SIZE(scheduled);
    if (n <= PyLong_AsLong(min_scheduled))
        return 0;
    PyObject *count = PyObject_GetAttr(loop, n__timer_cancelled_count);
    long cancelled = count ? PyLong_AsLong(count) : -1;
    Py_XDECREF(count);
    return !count ? -1 : 2 * cancelled > n; /* the heap of timers is to be cleared */
}

/* turn(loop, MIN_SCHEDULED) -> bool: one turn, or within run_forever (`running`) turns until the
 * loop is to stop. False: the next one is asyncio's own _run_once's. */
static PyObject *core_turn(Core *self, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2)
        return PyErr_Format(PyExc_TypeError, "turn(loop, min_scheduled)");
    PyObject *loop = args[0];
    for (;;) {
        PyObject *scheduled = PyObject_GetAttr(loop, n__scheduled);
        PyObject *ready = PyObject_GetAttr(loop, n__ready);
        int rc = scheduled && ready ? not_ours(self, loop, scheduled, args[1]) : -1;
        if (!rc)
            rc = turn(self, loop, scheduled, ready);
        Py_XDECREF(scheduled);
        Py_XDECREF(ready);
        if (rc < 0)
            return NULL;
        if (rc)
            Py_RETURN_FALSE;
        if (!self->running)
            Py_RETURN_TRUE;
        int stopping = attr_true(loop, n__stopping);
        if (stopping)
            return stopping < 0 ? NULL : Py_NewRef(Py_True);
    }
}

/* ---- the type ---- */

static int core_init(Core *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"reactor", "events", "memory",  "stride",  "conns",
                            "held",    "report", "heappop", "longest", NULL};
    unsigned long long r, events, memory, stride;
    PyObject *conns, *held, *report, *heappop;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKKO!O!OOd", names, &r, &events, &memory,
                                     &stride, &PyDict_Type, &conns, &PyDict_Type, &held, &report,
                                     &heappop, &self->longest))
        return -1;
    self->r = (azc_reactor *)(uintptr_t)r;
    self->events = (azc_event *)(uintptr_t)events;
    self->memory = (char *)(uintptr_t)memory;
    self->stride = (size_t)stride;
    Py_XSETREF(self->conns, Py_NewRef(conns));
    Py_XSETREF(self->held, Py_NewRef(held));
    Py_XSETREF(self->report, Py_NewRef(report));
    Py_XSETREF(self->heappop, Py_NewRef(heappop));
    return 0;
}

static int core_traverse(Core *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->conns);
    Py_VISIT(self->held);
    Py_VISIT(self->handle);
    Py_VISIT(self->report);
    Py_VISIT(self->heappop);
    return 0;
}

/* `held` is what it is elsewhere, too: a plain reference. What keeps its memory alive is the extra
 * reference of reactor.py. */
static int core_clear(Core *self)
{
    Py_CLEAR(self->conns);
    Py_CLEAR(self->held);
    Py_CLEAR(self->handle);
    Py_CLEAR(self->report);
    Py_CLEAR(self->heappop);
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
    {"running", T_BOOL, offsetof(Core, running), 0,
     "run_forever runs: turn() goes on until it stops."},
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
