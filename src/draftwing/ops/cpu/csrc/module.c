/* The module: its functions, and how they are called. */

#include "cpu.h"

#ifndef ISA /* the instruction set that it is compiled for: see ops/cpu/isa.py */
#define ISA plain
#endif
#ifndef INTERFACE /* what the functions take and give: see ops/cpu/isa.py */
#define INTERFACE 0
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define JOINED_OF(a, b) a##b
#define JOINED(a, b) JOINED_OF(a, b)

/* self: the `Function`. */
static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    const Function *f = PyCapsule_GetPointer(self, NULL);
    const int64_t least = f->given + f->doubles, most = least + f->more;
    int64_t n[f->size ? f->size / (int64_t)sizeof(int64_t) : most];
    if (given != least && given != most)
        return PyErr_Format(PyExc_TypeError, "%s: expected %lld numbers, found %zd", f->name, (long long)least, given);
    memset(n, 0, sizeof n);
    for (int64_t i = 0; i < given; i++) {
        if (i < f->given || i >= least) n[i] = PyLong_AsLongLong(args[i]);
        else {
            const double value = PyFloat_AsDouble(args[i]);
            memcpy(n + i, &value, sizeof value);
        }
    }
    if (PyErr_Occurred()) return NULL;
    if (f->count) return PyLong_FromLongLong(f->count(n));
    f->call(n);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
const Function *function_of(PyObject *function) {
    if (!PyCFunction_Check(function)) return NULL;
    if (PyCFunction_GetFunction(function) != (PyCFunction)(void (*)(void))call) return NULL;
    return PyCapsule_GetPointer(PyCFunction_GetSelf(function), NULL);
}

#define LISTED(name) name##_functions,
static Function *const all[] = {EACH_LIST(LISTED)};
static int add_functions(PyObject *module) {
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (Function *f = all[i]; f->name; f++) {
            f->method = (PyMethodDef){f->name, (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL};
            PyObject *self = PyCapsule_New(f, NULL, NULL);
            PyObject *made = self ? PyCFunction_NewEx(&f->method, self, NULL) : NULL;
            const int failed = PyModule_AddObjectRef(module, f->name, made);
            Py_XDECREF(made);
            Py_XDECREF(self);
            if (failed) return -1;
        }
    return 0;
}

static PyMethodDef methods[] = {
    {"replay", (PyCFunction)(void (*)(void))py_replay, METH_FASTCALL, NULL},
    {"cpu_features", (PyCFunction)(void (*)(void))py_cpu_features, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_" TEXT(ISA), .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC JOINED(PyInit__, ISA)(void) {
    find_threads();
    PyObject *made = PyModule_Create(&module);
    if (made && (add_functions(made) || PyModule_AddIntConstant(made, "has_product", has_product) ||
                 PyModule_AddIntConstant(made, "has_openmp", has_openmp()) ||
                 PyModule_AddIntConstant(made, "can_adapt", can_adapt()) ||
                 PyModule_AddIntConstant(made, "interface", INTERFACE)))
        Py_CLEAR(made);
    return made;
}
