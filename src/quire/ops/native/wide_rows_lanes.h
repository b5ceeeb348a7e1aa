/* The operators of `wide_rows.c` for vectors of LANES elements. Included once for each kind of CPU. */

#define vec NAMED(row_vec)
#define ivec NAMED(row_ivec)
#define load NAMED(row_load)
#define store NAMED(row_store)
#define load_some NAMED(row_load_some)
#define choose NAMED(row_choose)
#define gelu NAMED(row_gelu)
#define raise NAMED(row_raise)
#define power NAMED(row_power)

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

INLINE vec load(const float *from) { vec v; __builtin_memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, vec v) { __builtin_memcpy(to, &v, sizeof v); }
INLINE vec load_some(const float *from, int64_t count) {
    vec v = {0};
    __builtin_memcpy(&v, from, (size_t)count * sizeof(float));
    return v;
}
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

#include "power.h"

/* x * (1 + erf(x / sqrt(2))) / 2. With a = |x| / sqrt(2): erf(a) = a * P(a^2) below 1, erfc(a) = exp(-Q(a)) from 1 to 4; the
   polynomials were fitted to errors of 4e-8 and 2e-11. */
INLINE vec gelu(vec x) {
    vec a = (vec)((ivec)x & 0x7FFFFFFF) * 0.70710678f, s = a * a;
    ivec far = a > 4.f, near = a < 1.f;
    a = choose(far, a * 0.f + 4.f, a);
    vec p = s * -0.000566015301f + 0.00492478896f;
    p = p * s + -0.0267177069f;
    p = p * s + 0.112804116f;
    p = p * s + -0.376123557f;
    p = p * s + 1.12837913f;
    p = p * a;
    vec q = a * 2.168685e-05f + -0.000441336377f;
    q = q * a + 0.00420456188f;
    q = q * a + -0.0252082567f;
    q = q * a + 0.108418577f;
    q = q * a + 0.633219893f;
    q = q * a + 1.12957842f;
    q = q * a + -0.000188040229f;
    vec rest = choose(near, 1.f - p, (vec)(~far & (ivec)raise(-q))); /* erfc(a) */
    return 0.5f * x * choose(x < 0.f, rest, 2.f - rest);
}

static void NAMED(gelu_wide)(const float *x, int64_t columns, float *out) {
    int64_t i = 0;
    for (; i + 2 * LANES <= columns; i += 2 * LANES) {
        vec a = gelu(load(x + i)), b = gelu(load(x + i + LANES));
        store(out + i, a), store(out + i + LANES, b);
    }
    for (int64_t some; i < columns; i += some) {
        some = columns - i < LANES ? columns - i : LANES;
        vec a = gelu(load_some(x + i, some));
        __builtin_memcpy(out + i, &a, (size_t)some * sizeof(float));
    }
}

static void NAMED(layer_norm_wide)(const float *x, const float *weight, const float *bias, float eps, int64_t columns, float *out) {
    vec sums[2] = {{0}}, squares[2] = {{0}};
    float sum = 0, square = 0;
    int64_t i = 0;
    for (; i + 2 * LANES <= columns; i += 2 * LANES) sums[0] += load(x + i), sums[1] += load(x + i + LANES);
    for (; i < columns; i++) sum += x[i];
    sums[0] += sums[1];
    for (int j = 0; j < LANES; j++) sum += sums[0][j];
    float mean = sum / (float)columns;
    for (i = 0; i + 2 * LANES <= columns; i += 2 * LANES) {
        vec a = load(x + i) - mean, b = load(x + i + LANES) - mean;
        squares[0] += a * a, squares[1] += b * b;
    }
    for (; i < columns; i++) square += (x[i] - mean) * (x[i] - mean);
    squares[0] += squares[1];
    for (int j = 0; j < LANES; j++) square += squares[0][j];
    float factor = 1.f / sqrtf(square / (float)columns + eps);
    if (weight && bias)
        for (i = 0; i < columns; i++) out[i] = (x[i] - mean) * factor * weight[i] + bias[i];
    else
        for (i = 0; i < columns; i++) out[i] = (x[i] - mean) * factor * (weight ? weight[i] : 1.f) + (bias ? bias[i] : 0.f);
}

#undef vec
#undef ivec
#undef load
#undef store
#undef load_some
#undef choose
#undef gelu
#undef raise
#undef power
