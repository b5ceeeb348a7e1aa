#include "rows.h"

#include <math.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 4

typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));

#include "power.h"

INLINE vec load(const float *from) { vec v; __builtin_memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, vec v) { __builtin_memcpy(to, &v, sizeof v); }
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
INLINE vec size_of(vec x) { return (vec)((ivec)x & 0x7FFFFFFF); }

/* a / b, where b is 1 or more, but not beyond all bounds */
INLINE vec divide(vec a, vec b) {
#if defined(__aarch64__) /* a guess made better twice, which is exact but for the last bit and several times as fast */
    vec guess = vrecpeq_f32(b);
    guess = vrecpsq_f32(b, guess) * guess;
    guess = vrecpsq_f32(b, guess) * guess;
    return a * guess;
#else
    return a / b;
#endif
}

INLINE vec within(vec x) { /* 80 either way: what is beyond makes no difference to a silu */
#if defined(__aarch64__)
    return vminq_f32(vmaxq_f32(x, vdupq_n_f32(-80.f)), vdupq_n_f32(80.f));
#else
    x = choose(x > 80.f, x * 0.f + 80.f, x);
    return choose(x < -80.f, x * 0.f - 80.f, x);
#endif
}

INLINE vec silu(vec x) { return divide(x, raise(within(-x)) + 1.f); }

INLINE vec gelu_tanh(vec x) {
    vec inner = (x + x * x * x * 0.044715f) * 0.79788456f, e = power(-2.f * size_of(inner));
    vec tanh = divide(1.f - e, e + 1.f);
    return 0.5f * x * (1.f + choose(inner < 0.f, -tanh, tanh));
}

/* four vectors at a time, for one is a long chain of operations; then what is left of the row */
#define EACH(f)                                                                                                     \
    int64_t i = 0;                                                                                                  \
    for (; i + 4 * LANES <= columns; i += 4 * LANES) {                                                              \
        vec a = load(x + i), b = load(x + i + LANES), c = load(x + i + 2 * LANES), d = load(x + i + 3 * LANES);     \
        a = f(a), b = f(b), c = f(c), d = f(d);                                                                     \
        store(out + i, a), store(out + i + LANES, b), store(out + i + 2 * LANES, c), store(out + i + 3 * LANES, d); \
    }                                                                                                               \
    for (; i < columns; i++) { vec one = {x[i]}; out[i] = f(one)[0]; }

void silu_row(const float *x, int64_t columns, float *out) { EACH(silu) }
void gelu_tanh_row(const float *x, int64_t columns, float *out) { EACH(gelu_tanh) }

void add_row(const float *a, const float *b, int64_t columns, float *out) {
    for (int64_t i = 0; i < columns; i++) out[i] = a[i] + b[i];
}

void multiply_row(const float *a, const float *b, int64_t columns, float *out) {
    for (int64_t i = 0; i < columns; i++) out[i] = a[i] * b[i];
}

void norm_row(const float *x, const float *weight, float eps, int64_t columns, float *out) {
    vec sums[4] = {{0}};
    float squares = 0;
    int64_t i = 0;
    for (; i + 4 * LANES <= columns; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            vec v = load(x + i + j * LANES);
            sums[j] += v * v;
        }
    for (; i < columns; i++) squares += x[i] * x[i];
    vec all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    squares += (all[0] + all[1]) + (all[2] + all[3]);
    float factor = 1.f / sqrtf(squares / (float)columns + eps);
    for (i = 0; i < columns; i++) out[i] = x[i] * factor * weight[i];
}

#define RANKS 16 /* that are summed together */

/* sums of up to RANKS columns of down, whose rows are `stride` apart, in the order of the inputs */
INLINE void shrink(const float *x, int64_t inputs, const float *down, int64_t stride, int64_t ranks, float *sums) {
    if (ranks == RANKS) {
        vec a = {0}, b = {0}, c = {0}, d = {0};
        for (int64_t k = 0; k < inputs; k++, down += stride) {
            a += x[k] * load(down), b += x[k] * load(down + LANES);
            c += x[k] * load(down + 2 * LANES), d += x[k] * load(down + 3 * LANES);
        }
        store(sums, a), store(sums + LANES, b), store(sums + 2 * LANES, c), store(sums + 3 * LANES, d);
        return;
    }
    int64_t r = 0;
    for (; r + 2 * LANES <= ranks; r += 2 * LANES) {
        vec a = {0}, b = {0};
        const float *from = down + r;
        for (int64_t k = 0; k < inputs; k++, from += stride) a += x[k] * load(from), b += x[k] * load(from + LANES);
        store(sums + r, a), store(sums + r + LANES, b);
    }
    for (; r < ranks; r++) {
        float sum = 0;
        for (int64_t k = 0; k < inputs; k++) sum += x[k] * down[k * stride + r];
        sums[r] = sum;
    }
}

INLINE void expand(const float *sums, int64_t ranks, const float *up, int64_t columns, float *out) {
    int64_t i = 0;
    for (; i + 4 * LANES <= columns; i += 4 * LANES) {
        vec a = load(out + i), b = load(out + i + LANES), c = load(out + i + 2 * LANES), d = load(out + i + 3 * LANES);
        const float *from = up + i;
        for (int64_t r = 0; r < ranks; r++, from += columns) {
            a += sums[r] * load(from), b += sums[r] * load(from + LANES);
            c += sums[r] * load(from + 2 * LANES), d += sums[r] * load(from + 3 * LANES);
        }
        store(out + i, a), store(out + i + LANES, b), store(out + i + 2 * LANES, c), store(out + i + 3 * LANES, d);
    }
    for (; i < columns; i++)
        for (int64_t r = 0; r < ranks; r++) out[i] += sums[r] * up[r * columns + i];
}

void add_low_rank_row(const int64_t *entry, int64_t parts, const float *x, int64_t inputs, float *out) {
    const float *down = (const float *)entry[0];
    const int64_t stride = entry[1];
    if (!stride) return;
    for (const int64_t *part = entry + 2; part < entry + 2 + 4 * parts; part += 4)
        for (int64_t r = 0; r < part[1]; r += RANKS) {
            const int64_t some = part[1] - r < RANKS ? part[1] - r : RANKS;
            float sums[RANKS];
            shrink(x, inputs, down, stride, some, sums);
            expand(sums, some, (const float *)part[0] + r * part[3], part[3], out + part[2]);
            down += some;
        }
}
