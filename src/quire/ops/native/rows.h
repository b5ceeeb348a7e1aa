/* Operators on rows of float32 numbers, each row for itself. */

#pragma once
#include <stdint.h>

void norm_row(const float *x, const float *weight, float eps, int64_t columns, float *out);
void add_row(const float *a, const float *b, int64_t columns, float *out);
void multiply_row(const float *a, const float *b, int64_t columns, float *out);
void silu_row(const float *x, int64_t columns, float *out);
void gelu_row(const float *x, int64_t columns, float *out);
void gelu_tanh_row(const float *x, int64_t columns, float *out);
