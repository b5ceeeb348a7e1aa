/* The functions that Python calls. Addresses come as integers in structures that Python packs; the caller keeps the memory. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <string.h>

#include "packed_attention.h"
#include "paged_attention.h"
#include "program.h"

#define VERSION 4 /* of the structures, as in `native.py` */

static PyObject *refuse(void) {
    PyErr_SetString(PyExc_ValueError, "a structure of another release");
    return NULL;
}

static PyObject *attend(PyObject *self, PyObject *args) {
    Py_buffer layer, rows;
    int workers;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*i", &layer, &rows, &workers)) return NULL;
    int fits = layer.len == sizeof(Layer) && (rows.len == sizeof(Rows) || rows.len == offsetof(Rows, turned));
    if (fits) {
        Rows given = {0};
        memcpy(&given, rows.buf, (size_t)rows.len);
        Py_BEGIN_ALLOW_THREADS
        attend_rows(layer.buf, &given, workers);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&layer);
    PyBuffer_Release(&rows);
    if (!fits) return refuse();
    Py_RETURN_NONE;
}

static PyObject *attend_packed(PyObject *self, PyObject *args) {
    Py_buffer layer, starts, keys;
    int workers;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*i", &layer, &starts, &keys, &workers)) return NULL;
    int64_t count = keys.len / (Py_ssize_t)sizeof(int32_t);
    int fits = layer.len == sizeof(PackedLayer) && starts.len == (Py_ssize_t)sizeof(int32_t) * (count + 1);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        attend_sequences(layer.buf, starts.buf, keys.buf, count, workers);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&layer);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&keys);
    if (!fits) return refuse();
    Py_RETURN_NONE;
}

static PyObject *run(PyObject *self, PyObject *args) {
    Py_buffer ops;
    long long rows;
    int workers;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*Li", &ops, &rows, &workers)) return NULL;
    int fits = ops.len % sizeof(Op) == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        run_program(ops.buf, ops.len / sizeof(Op), rows, workers);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&ops);
    if (!fits) return refuse();
    Py_RETURN_NONE;
}

static PyObject *multiplies(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    return PyBool_FromLong(can_multiply());
}

static PyObject *multiplies_floats(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    return PyBool_FromLong(can_multiply_floats());
}

static PyMethodDef methods[] = {
    {"attend", attend, METH_VARARGS, "attend(layer, rows, workers)"},
    {"attend_packed", attend_packed, METH_VARARGS, "attend_packed(layer, starts, keys, workers)"},
    {"run", run, METH_VARARGS, "run(operators, rows, workers)"},
    {"multiplies", multiplies, METH_NOARGS, "multiplies() -> does this CPU support 4- and 8-bit GEMMs?"},
    {"multiplies_floats", multiplies_floats, METH_NOARGS, "multiplies_floats() -> the same for float32"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module);
    int failed = made && (PyModule_AddIntConstant(made, "TILE", TILE) != 0 || PyModule_AddIntConstant(made, "FLOAT_TILE", FLOAT_TILE) != 0 ||
                          PyModule_AddIntConstant(made, "VERSION", VERSION) != 0 || PyModule_AddIntConstant(made, "ADAPTS", 1) != 0 || PyModule_AddIntConstant(made, "ENCODES", 1) != 0);
    if (failed) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
