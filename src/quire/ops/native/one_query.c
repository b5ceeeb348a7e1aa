/* A unit is one row and one head of its keys, with the group of query heads that share it. Keys are taken in blocks; what was
   summed before is corrected when a block has a greater score. Units have nothing in common, so their numbers do not depend on
   who runs beside them, on how many threads. */

#include "one_query.h"

#include <math.h>
#include <stddef.h>

#include "thread_pool.h"

#define INLINE static inline __attribute__((always_inline))
#define STEP 16            /* components of a head are taken by so many */
#define BLOCK 32           /* keys */
#define FEW 16             /* values */
#define TILE 4             /* keys, and at most so many queries, that are multiplied together */
#define MOST_COMPONENTS 512
#define LINE 16            /* numbers that a cache fetches together */
#define SHARES 8           /* of the units for each worker: who is faster takes more */
#define SPREAD_FROM 2048   /* pairs of a query head and a key: for fewer, another worker is not worth it */

typedef float quad __attribute__((vector_size(16)));
typedef int32_t places __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

#define JOINED(a, b) a##_##b
#define SUFFIXED(a, b) JOINED(a, b)
#define NAMED(name) SUFFIXED(name, LANES)
#define UNITS NAMED(run_units)

#define LANES 4 /* every CPU has them */
#include "one_query_lanes.h"
#undef LANES

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define LANES 8
#include "one_query_lanes.h"
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512")
#define LANES 16
#include "one_query_lanes.h"
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

typedef struct {
    const Layer *layer;
    const Rows *rows;
    int64_t units;
    Meeting meeting;
} Run;

static void work(void *context, int workers) {
    Run *run = context;
    int64_t share = run->units / (workers * SHARES) + 1;
    for (int64_t first, end; (end = take(&run->meeting, run->units, share, &first));)
        run_units(run->layer, run->rows, first, end);
}

void attend_rows(const Layer *layer, const Rows *rows, int workers) {
    Run run = {layer, rows, rows->count * layer->kv_heads, {0}};
    int64_t pairs = 0;
    for (int64_t row = 0; row < rows->count; row++) pairs += rows->lengths[row] * layer->kv_heads * layer->group;
    run_together(work, &run, pairs < SPREAD_FROM ? 1 : workers);
}
