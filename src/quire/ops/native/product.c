/* Products of float32 rows by a matrix of 4- or 8-bit values in groups of 32, each with a scale and, if need be, an offset.
   `tiles.py` lays the matrix out. Rows are quantized to 8 bits in the same groups first. Sums within a group are integers
   and the sums of groups are always added in the same order, so a row's result does not depend on the other rows. */

#include "product.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#define KERNEL "product_neon.h"

int can_multiply(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) >> 20) & 1; /* asimddp */
#else
    return 1; /* of Apple's all have it */
#endif
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#elif defined(__x86_64__)
#include <immintrin.h>
#define KERNEL "product_vnni.h"

int can_multiply(void) {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")
#endif
#endif

#if defined(KERNEL)
#define INLINE static inline __attribute__((always_inline))
#define AHEAD 1024 /* bytes of a matrix that are fetched before they are wanted */

#include KERNEL

void round_rows(const float *x, int64_t stride, int64_t first, int64_t end, int64_t groups, Block *out) {
    for (int64_t row = first; row < end; row++)
        for (int64_t g = 0; g < groups; g++)
            round_group(x + row * stride + g * GROUP, out + row / 4 * groups + g, (int)(row % 4));
}

INLINE void run_tiles(int bits, int offsets, int wide, const Matrix *m, const Block *x, int64_t rows, float *y, int64_t tile, int64_t end) {
    for (; tile < end; tile++)
        for (int64_t row = 0; row < rows; row += 8) {
            const Block *some = x + row / 4 * (m->inputs / GROUP);
            float *to = y + row * m->outputs;
            switch (rows - row) { /* a number that is known is worth a copy of the code */
                case 1: run_tile(bits, offsets, wide, 1, m, tile, some, to); break;
                case 2: run_tile(bits, offsets, wide, 2, m, tile, some, to); break;
                case 3: run_tile(bits, offsets, wide, 3, m, tile, some, to); break;
                case 4: run_tile(bits, offsets, wide, 4, m, tile, some, to); break;
                case 5: run_tile(bits, offsets, wide, 5, m, tile, some, to); break;
                case 6: run_tile(bits, offsets, wide, 6, m, tile, some, to); break;
                case 7: run_tile(bits, offsets, wide, 7, m, tile, some, to); break;
                default: run_tile(bits, offsets, wide, 8, m, tile, some, to);
            }
        }
}

void multiply_tiles(const Matrix *m, const Block *x, int64_t rows, float *y, int64_t first, int64_t end) {
    switch (m->kind) {
        case NIBBLES: run_tiles(4, 0, 0, m, x, rows, y, first, end); break;
        case NIBBLES_OFFSET: run_tiles(4, 1, 0, m, x, rows, y, first, end); break;
        case NIBBLES_WIDE: run_tiles(4, 0, 1, m, x, rows, y, first, end); break;
        case NIBBLES_OFFSET_WIDE: run_tiles(4, 1, 1, m, x, rows, y, first, end); break;
        case BYTES: run_tiles(8, 0, 0, m, x, rows, y, first, end); break;
        case BYTES_OFFSET: run_tiles(8, 1, 0, m, x, rows, y, first, end); break;
        case BYTES_WIDE: run_tiles(8, 0, 1, m, x, rows, y, first, end); break;
        case BYTES_OFFSET_WIDE: run_tiles(8, 1, 1, m, x, rows, y, first, end); break;
    }
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
int can_multiply(void) { return 0; }
void round_rows(const float *x, int64_t stride, int64_t first, int64_t end, int64_t groups, Block *out) {
    (void)x, (void)stride, (void)first, (void)end, (void)groups, (void)out;
}
void multiply_tiles(const Matrix *m, const Block *x, int64_t rows, float *y, int64_t first, int64_t end) {
    (void)m, (void)x, (void)rows, (void)y, (void)first, (void)end;
}
#endif
