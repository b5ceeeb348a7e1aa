/* Attention of tokens that are alone in their rows, over a paged cache in float32. `one_query.py` says what it is given.

   A unit is one row and one head of its keys, with the group of query heads that share it. Keys are taken in blocks; what was
   summed before is corrected when a block has a greater score. Units have nothing in common, so their numbers do not depend on
   who runs beside them, on how many threads. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define STEP 16            /* components of a head are taken by so many */
#define BLOCK 32           /* keys */
#define FEW 16             /* values */
#define TILE 4             /* keys, and at most so many queries, that are multiplied together */
#define MOST_COMPONENTS 512

typedef float quad __attribute__((vector_size(16)));
typedef int32_t places __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

typedef struct {                                    /* a layer; strides are in numbers */
    const float *queries, *keys, *values;           /* of the tokens; no keys: they are in the cache already, and queries ready */
    float *out, *cached_keys, *cached_values;
    const float *cosines, *sines, *query_norm, *key_norm; /* any may be missing */
    int64_t query_stride, out_stride, page_stride, head_stride;
    int64_t group, kv_heads, head_dim, half_turned, page_size, window;
    double scale, eps;
} Layer;

typedef struct {
    const int32_t *tables, *lengths;
    int64_t table_stride;
} Rows;

#define JOINED(a, b) a##_##b
#define SUFFIXED(a, b) JOINED(a, b)
#define NAMED(name) SUFFIXED(name, LANES)
#define UNITS NAMED(run_units)

#define LANES 4 /* every CPU has them */
#include "one_query.h"
#undef LANES

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define LANES 8
#include "one_query.h"
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512")
#define LANES 16
#include "one_query.h"
#undef LANES
#pragma GCC pop_options

static void run_units(const Layer *l, const Rows *r, int64_t first, int64_t last) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        run_units_16(l, r, first, last);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        run_units_8(l, r, first, last);
    else
        run_units_4(l, r, first, last);
}
#else
#define run_units run_units_4
#endif

static PyObject *run(PyObject *self, PyObject *args) {
    Py_buffer layer, rows;
    long long first, last;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*LL", &layer, &rows, &first, &last)) return NULL;
    int fits = layer.len == sizeof(Layer) && rows.len == sizeof(Rows);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        run_units(layer.buf, rows.buf, first, last);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&layer);
    PyBuffer_Release(&rows);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "a layer or rows of another release");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"run", run, METH_VARARGS, "run(layer, rows, first unit, end)"}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_one_query", NULL, 0, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__one_query(void) { return PyModule_Create(&module); }
