/* A row of operators on matrices of float32 values, with a row for each token. `program.py` writes it. */

#pragma once
#include "product.h"

enum { NORM, ADD_NORM, ADD, MULTIPLY, SILU, GELU, GELU_TANH, COPY, ROUND, GATHER, PRODUCT, LOW_RANK, LAYER_NORM };

typedef struct {
    int64_t kind, columns;  /* of the result; for ROUND and GATHER, of what is taken */
    const float *a, *b;     /* inputs; strides are in values */
    int64_t a_stride, b_stride;
    const void *weight;     /* of a norm (b: bias of LAYER_NORM, may be NULL); of LOW_RANK: inputs, parts, and the address of entries by place (`rows.h`), all int64_t */
    float *out, *total;     /* total: of ADD_NORM, before the norm */
    void *taken;            /* rows as a product wants them: what ROUND or GATHER writes, and PRODUCT reads */
    const Matrix *matrix;   /* of PRODUCT */
    double eps;
} Op;

void run_program(const Op *ops, int64_t count, int64_t rows, int workers);
