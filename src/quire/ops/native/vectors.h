/* Vectors of four values as every CPU has them, and names for code that is compiled for several widths. */

#pragma once
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define JOINED(a, b) a##_##b
#define SUFFIXED(a, b) JOINED(a, b)
#define NAMED(name) SUFFIXED(name, LANES)

/* Does the CPU have all that the code for 8 lanes (arch=haswell) and 16 lanes (arch=skylake-avx512) is compiled for? A virtual
   machine may hide any of it. */
#define HAS_8_LANES                                                                                                           \
    (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2"))
#define HAS_16_LANES                                                                                                          \
    (HAS_8_LANES && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&                                \
     __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))

typedef float quad __attribute__((vector_size(16)));
typedef int32_t places __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* four values from k on of each of four rows -> v[i]: the rows' values k + i */
#define TURN(v, rows, k)                                                                                         \
    do {                                                                                                         \
        quad low, high, later_low, later_high;                                                                   \
        for (int i = 0; i < 4; i++) __builtin_memcpy(&v[i], rows[i] + k, sizeof v[i]);                           \
        low = SHUFFLE(v[0], v[1], 0, 4, 1, 5), high = SHUFFLE(v[0], v[1], 2, 6, 3, 7);                           \
        later_low = SHUFFLE(v[2], v[3], 0, 4, 1, 5), later_high = SHUFFLE(v[2], v[3], 2, 6, 3, 7);               \
        v[0] = SHUFFLE(low, later_low, 0, 1, 4, 5), v[1] = SHUFFLE(low, later_low, 2, 3, 6, 7);                  \
        v[2] = SHUFFLE(high, later_high, 0, 1, 4, 5), v[3] = SHUFFLE(high, later_high, 2, 3, 6, 7);              \
    } while (0)
