/* Products of float32 rows by a float32 matrix, which lies in tiles of FLOAT_TILE outputs: [inputs][FLOAT_TILE]. Four rows lie
   together, too: [inputs][4]. An output is a sum in the order of the inputs and does not depend on the other rows. */

#include "product.h"

#include <stddef.h>

#include "vectors.h"

#define AHEAD 1024 /* bytes of a matrix that are fetched before they are wanted */

void gather_rows(const float *x, int64_t stride, int64_t first, int64_t end, int64_t inputs, float *out) {
    for (int64_t row = first; row < end; row += 4) {
        const float *from[4];
        for (int64_t r = 0; r < 4; r++) from[r] = x + (row + r < end ? row + r : row) * stride; /* rows after the end are not read */
        float *to = out + row * inputs;
        int64_t k = 0;
        for (; k + 4 <= inputs; k += 4) {
            quad turned[4];
            TURN(turned, from, k);
            __builtin_memcpy(to + 4 * k, turned, sizeof turned);
        }
        for (; k < inputs; k++)
            for (int64_t r = 0; r < 4; r++) to[4 * k + r] = from[r][k];
    }
}

#if defined(__aarch64__)
#include <arm_neon.h>

#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("no-schedule-insns") /* it would line up what can run side by side */
#endif

int can_multiply_floats(void) { return 1; }

INLINE void keep(float32x4_t sums, const Matrix *m, int64_t first, float *y) {
    if (m->bias) sums = vaddq_f32(sums, vld1q_f32(m->bias + first));
    if (first + 4 <= m->outputs)
        vst1q_f32(y + first, sums);
    else
        for (int64_t i = 0; first + i < m->outputs; i++) y[first + i] = sums[i];
}

/* Written out one by one: a compiler does not keep an array in registers. */
#define ROWS(DO) DO(0, x0, 0) DO(1, x0, 1) DO(2, x0, 2) DO(3, x0, 3) DO(4, x1, 0) DO(5, x1, 1) DO(6, x1, 2) DO(7, x1, 3)
#define DECLARE(r, x, lane) float32x4_t a##r = vdupq_n_f32(0), b##r = a##r, c##r = a##r;
#define ADD(r, x, lane)                                  \
    if (rows > r) {                                      \
        a##r = vfmaq_laneq_f32(a##r, w0, x, lane);       \
        b##r = vfmaq_laneq_f32(b##r, w1, x, lane);       \
        c##r = vfmaq_laneq_f32(c##r, w2, x, lane);       \
    }
#define KEEP(r, x, lane)                                 \
    if (rows > r) {                                      \
        keep(a##r, m, first, y + r * m->outputs);        \
        keep(b##r, m, first + 4, y + r * m->outputs);    \
        keep(c##r, m, first + 8, y + r * m->outputs);    \
    }

/* the outputs of one tile, for up to 8 rows; `ahead`, in steps of so many bytes, is fetched along the way */
INLINE void run_tile(int rows, const Matrix *m, int64_t tile, const float *x, float *y, const uint8_t *ahead, int64_t step) {
    const float *w = (const float *)(m->tiles + tile * m->tile_bytes);
    const float *end = x + 4 * m->inputs, *other = rows > 4 ? end : x;
    int64_t first = tile * FLOAT_TILE;
    ROWS(DECLARE)
#pragma GCC unroll 4
    for (; x < end; x += 4, other += 4, w += FLOAT_TILE, ahead += step) {
        __builtin_prefetch(ahead);
        float32x4_t w0 = vld1q_f32(w), w1 = vld1q_f32(w + 4), w2 = vld1q_f32(w + 8), x0 = vld1q_f32(x), x1 = vld1q_f32(other);
        ROWS(ADD)
    }
    ROWS(KEEP)
}

/* Many rows go by several times. Each time a part of the next tile is fetched, so that memory is as busy all the time. */
void multiply_float_tiles(const Matrix *m, const float *x, int64_t rows, float *y, int64_t tile, int64_t end) {
    const int64_t times = (rows + 7) / 8, step = m->tile_bytes / m->inputs / times;
    for (; tile < end; tile++)
        for (int64_t row = 0; row < rows; row += 8) {
            const uint8_t *here = m->tiles + tile * m->tile_bytes;
            const uint8_t *ahead = times == 1 ? here + AHEAD : here + m->tile_bytes + row / 8 * step * m->inputs;
            const float *some = x + row * m->inputs;
            float *to = y + row * m->outputs;
            switch (rows - row) { /* a number that is known is worth a copy of the code */
                case 1: run_tile(1, m, tile, some, to, ahead, step); break;
                case 2: run_tile(2, m, tile, some, to, ahead, step); break;
                case 3: run_tile(3, m, tile, some, to, ahead, step); break;
                case 4: run_tile(4, m, tile, some, to, ahead, step); break;
                case 5: run_tile(5, m, tile, some, to, ahead, step); break;
                case 6: run_tile(6, m, tile, some, to, ahead, step); break;
                case 7: run_tile(7, m, tile, some, to, ahead, step); break;
                default: run_tile(8, m, tile, some, to, ahead, step);
            }
        }
}

#if !defined(__clang__)
#pragma GCC pop_options
#endif
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TILES NAMED(multiply_tiles_of_floats)

#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define LANES 8
#include "floats_lanes.h"
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512,prefer-vector-width=512")
#define LANES 16
#include "floats_lanes.h"
#undef LANES
#pragma GCC pop_options

int can_multiply_floats(void) { return HAS_8_LANES; }

void multiply_float_tiles(const Matrix *m, const float *x, int64_t rows, float *y, int64_t first, int64_t end) {
    if (HAS_16_LANES)
        multiply_tiles_of_floats_16(m, x, rows, y, first, end);
    else
        multiply_tiles_of_floats_8(m, x, rows, y, first, end);
}
#else
int can_multiply_floats(void) { return 0; }
void multiply_float_tiles(const Matrix *m, const float *x, int64_t rows, float *y, int64_t first, int64_t end) {
    (void)m, (void)x, (void)rows, (void)y, (void)first, (void)end;
}
#endif
