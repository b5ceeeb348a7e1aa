/* Operators on rows that need many instructions per element, compiled for each width of vectors. */

#include <math.h>
#include <stddef.h>

#include "rows.h"
#include "vectors.h"

#define LANES 4
#include "wide_rows_lanes.h"
#undef LANES

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define LANES 8
#include "wide_rows_lanes.h"
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512,prefer-vector-width=512")
#define LANES 16
#include "wide_rows_lanes.h"
#undef LANES
#pragma GCC pop_options

#define RUN(name, ...)                            \
    if (HAS_16_LANES) name##_16(__VA_ARGS__);     \
    else if (HAS_8_LANES) name##_8(__VA_ARGS__);  \
    else name##_4(__VA_ARGS__)
#else
#define RUN(name, ...) name##_4(__VA_ARGS__)
#endif

void gelu_row(const float *x, int64_t columns, float *out) { RUN(gelu_wide, x, columns, out); }

void layer_norm_row(const float *x, const float *weight, const float *bias, float eps, int64_t columns, float *out) {
    RUN(layer_norm_wide, x, weight, bias, eps, columns, out);
}
