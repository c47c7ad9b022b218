/* timers.c - the heap of timers: the list that asyncio knows as loop._scheduled.
 *
 * Owns: nothing; the list is the loop's. The heap is heapq's, step by step, so timers of one
 * deadline fire in the order in which asyncio would fire them, and asyncio's own code (in debug
 * mode) goes on with what lies here and the other way round. Two timers of ours are compared by
 * their deadlines; whatever else is in the list, as Python compares it.
 *
 * Never: keeps a borrowed reference over a comparison that may run Python code.
 */
#include "fast.h"

#include <math.h>

/* Is a before b? -1: an exception, or the list changed while Python compared. */
static inline int before(PyObject *list, PyObject *a, PyObject *b)
{
    if (Py_IS_TYPE(a, our_timer) && Py_IS_TYPE(b, our_timer))
        return timer_due(a) < timer_due(b);
    Py_ssize_t n = PyList_GET_SIZE(list);
    Py_INCREF(a);
    Py_INCREF(b);
    int is = PyObject_RichCompareBool(a, b, Py_LT);
    Py_DECREF(a);
    Py_DECREF(b);
    if (is >= 0 && n != PyList_GET_SIZE(list)) {
        PyErr_SetString(PyExc_RuntimeError, "the loop's timers changed while they were compared");
        return -1;
    }
    return is;
}

static void swap(PyObject *list, Py_ssize_t i, Py_ssize_t j)
{
    PyObject *other = PyList_GET_ITEM(list, i);
    PyList_SET_ITEM(list, i, PyList_GET_ITEM(list, j));
    PyList_SET_ITEM(list, j, other);
}

static int towards_root(PyObject *list, Py_ssize_t root, Py_ssize_t i)
{
    while (i > root) {
        Py_ssize_t parent = (i - 1) >> 1;
        int is = before(list, PyList_GET_ITEM(list, i), PyList_GET_ITEM(list, parent));
        if (is <= 0)
            return is;
        swap(list, i, parent);
        i = parent;
    }
    return 0;
}

static int towards_leaf(PyObject *list, Py_ssize_t i)
{
    Py_ssize_t root = i, n = PyList_GET_SIZE(list);
    while (i < n >> 1) {
        Py_ssize_t child = 2 * i + 1;
        if (child + 1 < n) {
            int is = before(list, PyList_GET_ITEM(list, child), PyList_GET_ITEM(list, child + 1));
            if (is < 0)
                return -1;
            child += !is;
        }
        swap(list, i, child);
        i = child;
    }
    return towards_root(list, root, i);
}

int timers_push(PyObject *list, PyObject *timer)
{
    if (PyList_Append(list, timer) < 0)
        return -1;
    return towards_root(list, 0, PyList_GET_SIZE(list) - 1);
}

/* The first one leaves the heap: a new reference, no longer scheduled. */
static PyObject *pop(PyObject *list)
{
    Py_ssize_t n = PyList_GET_SIZE(list);
    PyObject *timer = PyList_GET_ITEM(list, n - 1); /* the list's reference is ours now */
    Py_SET_SIZE(list, n - 1);
    if (n > 1) {
        PyObject *first = PyList_GET_ITEM(list, 0);
        PyList_SET_ITEM(list, 0, timer);
        timer = first;
        if (towards_leaf(list, 0) < 0) {
            Py_DECREF(timer);
            return NULL;
        }
    }
    return timer;
}

static int unschedule(PyObject *timer)
{
    if (!Py_IS_TYPE(timer, our_timer))
        return PyObject_SetAttr(timer, n__scheduled, Py_False);
    timer_set_scheduled(timer, 0);
    return 0;
}

static int is_cancelled(PyObject *timer)
{
    if (Py_IS_TYPE(timer, our_timer))
        return handle_slot(timer, HANDLE_CANCELLED) != Py_False;
    return attr_true(timer, n__cancelled);
}

/* What left heap and loop, and is still held, is the collector's again. */
static void let_go(PyObject *timer)
{
    if (Py_REFCNT(timer) > 1)
        handle_track(timer);
    Py_DECREF(timer);
}

/* Cancelled ones at the head are dropped, as asyncio does. */
static int drop_head(struct scheduler *s, PyObject *list)
{
    while (PyList_GET_SIZE(list)) {
        int is = is_cancelled(PyList_GET_ITEM(list, 0));
        if (is <= 0)
            return is;
        s->timers_cancelled--;
        PyObject *timer = pop(list);
        if (!timer)
            return -1;
        int rc = unschedule(timer);
        let_go(timer);
        if (rc < 0)
            return -1;
    }
    return 0;
}

/* More than half of them are cancelled: a new list of the others. */
static int drop_all(struct scheduler *s, PyObject *list)
{
    PyObject *left = PyList_New(0);
    if (!left)
        return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *timer = PyList_GET_ITEM(list, i);
        int is = is_cancelled(timer);
        if (is < 0 || (!is && PyList_Append(left, timer) < 0) || (is && unschedule(timer) < 0)) {
            Py_DECREF(left);
            return -1;
        }
        if (is && Py_REFCNT(timer) > 1)
            handle_track(timer);
    }
    for (Py_ssize_t i = PyList_GET_SIZE(left) / 2 - 1; i >= 0; i--)
        if (towards_leaf(left, i) < 0) {
            Py_DECREF(left);
            return -1;
        }
    s->timers_cancelled = 0;
    Py_SETREF(s->scheduled, left);
    return 0;
}

int timers_drop_cancelled(struct scheduler *s, Py_ssize_t many)
{
    PyObject *list = s->scheduled;
    if (!PyList_GET_SIZE(list))
        return 0;
    Py_INCREF(list);
    int rc = PyList_GET_SIZE(list) > many && 2 * s->timers_cancelled > PyList_GET_SIZE(list)
                 ? drop_all(s, list)
                 : drop_head(s, list);
    Py_DECREF(list);
    return rc;
}

static int due_of(PyObject *timer, double *due)
{
    if (Py_IS_TYPE(timer, our_timer)) {
        *due = timer_due(timer);
        return 0;
    }
    PyObject *v = PyObject_GetAttr(timer, n__when);
    *due = v ? PyFloat_AsDouble(v) : -1.0;
    Py_XDECREF(v);
    return *due == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int loop_time(struct scheduler *s, double *now)
{
    PyObject *v = PyObject_CallMethodNoArgs((PyObject *)s, n_time);
    *now = v ? PyFloat_AsDouble(v) : -1.0;
    Py_XDECREF(v);
    return *now == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* Nanoseconds until the first is due, `longest` seconds at most. */
int timers_wait(struct scheduler *s, double longest, int64_t *ns)
{
    double due, now;
    if (due_of(PyList_GET_ITEM(s->scheduled, 0), &due) < 0 || loop_time(s, &now) < 0)
        return -1;
    double left = due - now;
    if (left > longest)
        left = longest;
    *ns = left > 0 ? (int64_t)(left * 1e9) + 1 : 0;
    return 0;
}

/* Those that are due become ready. */
int timers_ripe(struct scheduler *s)
{
    double now, due;
    if (loop_time(s, &now) < 0)
        return -1;
    double ulp = nextafter(now, INFINITY) - now;
    double end = now + (s->resolution > ulp ? s->resolution : ulp);
    PyObject *list = Py_NewRef(s->scheduled);
    int rc = 0;
    while (rc == 0 && PyList_GET_SIZE(list)) {
        rc = due_of(PyList_GET_ITEM(list, 0), &due);
        if (rc < 0 || due >= end)
            break;
        PyObject *timer = pop(list);
        rc = timer ? unschedule(timer) : -1;
        if (rc == 0)
            rc = ready_push(s->ready, timer);
        if (rc < 0)
            Py_XDECREF(timer);
    }
    Py_DECREF(list);
    return rc;
}
