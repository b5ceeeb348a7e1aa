/* Operators on rows of float32 values, each row for itself. */

#pragma once
#include <stdint.h>

void norm_row(const float *x, const float *weight, float eps, int64_t columns, float *out);
void add_row(const float *a, const float *b, int64_t columns, float *out);
void multiply_row(const float *a, const float *b, int64_t columns, float *out);
/* What an adapter adds to a row's outputs: a product by narrow matrices. `entry`: address of down [inputs][ranks] and the ranks of
   all parts, then of each part the address of up [rank][columns], its rank, its first output and their number. 0 ranks = nothing. */
void add_low_rank_row(const int64_t *entry, int64_t parts, const float *x, int64_t inputs, float *out);
/* weight and bias may be NULL */
void layer_norm_row(const float *x, const float *weight, const float *bias, float eps, int64_t columns, float *out);
void silu_row(const float *x, int64_t columns, float *out);
void gelu_row(const float *x, int64_t columns, float *out);
void gelu_tanh_row(const float *x, int64_t columns, float *out);
