/* A unit is some tokens of one row that follow each other, and one head of its keys, with the group of query heads that share it.
   Keys are taken in blocks; what was summed before is corrected when a block has a greater score. Where blocks begin depends on
   the pages alone, and each query has its own sums, in an order that is the same for one query and for many. Units have nothing
   in common either. So a token's result does not depend on other tokens, on how its row is cut or on the number of threads. */

#include "paged_attention.h"

#include <math.h>
#include <stddef.h>

#include "thread_pool.h"
#include "vectors.h"

#define BLOCK 32           /* keys */
#define FEW 16             /* values */
#define TILE 4             /* keys, and the maximum of queries, that are multiplied together */
#define TURNED_FROM 8      /* queries from which on keys are transposed before they are multiplied */
#define MAX_QUERIES 64     /* that are multiplied by a block while it is in the cache */
#define MAX_COMPONENTS 512
#define HELD (16 * 1024)   /* values of the queries that are processed at once */
#define LINE 16            /* values of a cache line */
#define SHARES 32          /* of the units for each worker; a faster worker takes more */
#define SPREAD_FROM 2048   /* pairs of a query head and a key: for fewer, another worker is not worth it */

typedef struct {
    int64_t row, head, token, position, count; /* token and position of the first */
} Unit;

typedef struct {
    int64_t token, count, at, after; /* its first token; where its keys and values are, and those of the next block */
} Block;

typedef struct {
    int64_t begin, end; /* of what a query sees of a block */
} Span;

typedef struct {
    float greatest, total;
} State;

#define UNIT NAMED(run_unit)

#define LANES 4 /* every CPU has them */
#include "paged_attention_lanes.h"
#undef LANES

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define LANES 8
#include "paged_attention_lanes.h"
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512")
#define LANES 16
#include "paged_attention_lanes.h"
#undef LANES
#pragma GCC pop_options

static void run_unit(const Layer *l, const Rows *r, const Unit *unit) {
    if (HAS_16_LANES)
        run_unit_16(l, r, unit);
    else if (HAS_8_LANES)
        run_unit_8(l, r, unit);
    else
        run_unit_4(l, r, unit);
}
#else
#define run_unit run_unit_4
#endif

typedef struct {
    const Layer *layer;
    const Rows *rows;
    int64_t tokens, units; /* tokens: of a unit, at most */
    Meeting meeting;
} Run;

static int64_t pieces(const Run *run, int64_t row) {
    const int32_t *starts = run->rows->starts + row;
    return (starts[1] - starts[0] + run->tokens - 1) / run->tokens;
}

static Unit unit_of(const Run *run, int64_t row, int64_t number) {
    const Rows *r = run->rows;
    int64_t count = r->starts[row + 1] - r->starts[row], first = number % pieces(run, row) * run->tokens;
    return (Unit){row, number / pieces(run, row), r->starts[row] + first, r->lengths[row] - count + first, count - first < run->tokens ? count - first : run->tokens};
}

static void work(void *context, int workers) {
    Run *run = context;
    int64_t share = run->units / (workers * SHARES) + 1, row = 0, before = 0; /* units of the rows before this one */
    for (int64_t number, end; (end = take(&run->meeting, run->units, share, &number));)
        for (; number < end; number++) {
            for (int64_t own; number >= before + (own = pieces(run, row) * run->layer->kv_heads); row++) before += own;
            Unit unit = unit_of(run, row, number - before);
            run_unit(run->layer, run->rows, &unit);
        }
}

void attend_rows(const Layer *layer, const Rows *rows, int workers) {
    Run run = {layer, rows, layer->group < MAX_QUERIES ? MAX_QUERIES / layer->group : 1, 0, {0}};
    int64_t pairs = 0;
    for (int64_t row = 0; row < rows->count; row++) {
        int64_t count = rows->starts[row + 1] - rows->starts[row];
        run.units += pieces(&run, row) * layer->kv_heads;
        pairs += count * rows->lengths[row] * layer->kv_heads * layer->group;
    }
    run_together(work, &run, pairs < SPREAD_FROM ? 1 : workers);
}
