/* Calls that were noted, made again in threads that stay for all of them: see ops/cpu/tape.py.

   A step of a model whose layers are not one call has hundreds, most of them GEMMs that read a weight for some dozen
   microseconds. Threads that wait, because another one is behind or does alone what is small, fetch their shares of the
   next weight meanwhile. */

#include "cpu.h"

#define FEWEST_CALLS 8 /* fewer start threads by themselves, if they need any */
#define PANEL 16       /* outputs that threads share: see blocks.h */

Ahead weight_ahead(const int64_t *gemm, const Member *me) {
    const Product p = product_of(gemm, 0);
    const int64_t panels = (p.outputs + PANEL - 1) / PANEL;
    return weight_of(&p, (Range){share(me, panels, 0) * PANEL, share(me, panels, 1) * PANEL});
}

typedef struct {
    PyObject *calls; /* a list of (function, numbers) */
    Py_ssize_t count;
} Replay;

/* Whether call i is a GEMM that threads share, and its numbers. */
static int reads_weight(const Replay *r, Py_ssize_t i, int64_t *gemm) {
    PyObject *call = PyList_GetItem(r->calls, i);
    const Function *function = function_of(PyTuple_GetItem(call, 0));
    PyObject *given = PyTuple_GetItem(call, 1);
    if (function != block_gemm_functions) return 0;
    const int64_t rows = PyLong_AsLongLong(PyTuple_GetItem(given, 3));
    for (int c = 0; c < GEMM; c++) gemm[c] = PyLong_AsLongLong(PyTuple_GetItem(given, 4 + c));
    return rows * gemm[2] * gemm[3] >= SMALL;
}
static void make_calls(void *data) {
    const Replay *r = data;
    int64_t gemms[2][GEMM], *coming = gemms[0]; /* two: threads may still look at the one before */
    for (Py_ssize_t i = 0, next = 0; i < r->count; i++) {
        if (next <= i) {
            coming = coming == gemms[0] ? gemms[1] : gemms[0];
            for (next = i + 1; next < r->count && !reads_weight(r, next, coming);) next++;
            tell_weight(next < r->count ? coming : NULL);
        }
        PyObject *call = PyList_GetItem(r->calls, i);
        PyObject *out = PyObject_Call(PyTuple_GetItem(call, 0), PyTuple_GetItem(call, 1), NULL);
        if (!out) return;
        Py_DecRef(out);
    }
}

/* calls, workers */
PyObject *py_replay(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    if (given != 2) return PyErr_Format(PyExc_TypeError, "replay: expected calls and workers, found %zd", given);
    Workers *workers = POINTER(PyLong_AsLongLong(args[1]));
    Replay r = {args[0], PyList_Size(args[0])};
    if (PyErr_Occurred()) return NULL;
    if (r.count < FEWEST_CALLS) make_calls(&r);
    else run_together(make_calls, &r, workers);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
