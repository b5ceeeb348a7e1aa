/* A unit is one head of up to UNIT_QUERIES neighbouring queries of one sequence. Keys are taken in blocks that begin at multiples
   of KEYS in the sequence: each block is copied, its keys transposed, and all queries of the unit visit it. Sums of earlier blocks
   are rescaled when a block has a greater score. Each query has its own sums, in an order that depends on its sequence only, so the
   result of a token does not depend on the other sequences or on the number of threads. */

#include "packed_attention.h"

#include <math.h>
#include <stddef.h>

#include "thread_pool.h"
#include "vectors.h"

#define KEYS 128                /* in a block */
#define UNIT_QUERIES 128
#define PADDING 16              /* head_dim is padded to a multiple with zeros */
#define SHARES 16               /* of the units for each worker */
#define SPREAD_FROM 65536       /* multiplications: for fewer, a second worker is not worth its start */

typedef struct {
    int64_t start, keys, head, first, queries; /* start and keys: of the sequence; first: of the queries, within it */
} PackedUnit;

#define ATTEND_UNIT NAMED(attend_packed_unit)

#define LANES 4
#include "packed_attention_lanes.h"
#undef LANES

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define LANES 8
#include "packed_attention_lanes.h"
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512,prefer-vector-width=512")
#define LANES 16
#include "packed_attention_lanes.h"
#undef LANES
#pragma GCC pop_options

static void attend_packed_unit(const PackedLayer *l, const PackedUnit *unit) {
    if (HAS_16_LANES)
        attend_packed_unit_16(l, unit);
    else if (HAS_8_LANES)
        attend_packed_unit_8(l, unit);
    else
        attend_packed_unit_4(l, unit);
}
#else
#define attend_packed_unit attend_packed_unit_4
#endif

typedef struct {
    const PackedLayer *layer;
    const int32_t *starts, *keys;
    int64_t count, units;
    Meeting meeting;
} PackedRun;

static int64_t units_of(const PackedRun *run, int64_t sequence) {
    int64_t queries = run->starts[sequence + 1] - run->starts[sequence];
    return (queries + UNIT_QUERIES - 1) / UNIT_QUERIES * run->layer->heads;
}

static void attend_share(void *context, int workers) {
    PackedRun *run = context;
    int64_t share = run->units / (workers * SHARES) + 1, sequence = 0, before = 0; /* units of the sequences before this one */
    for (int64_t number, end; (end = take(&run->meeting, run->units, share, &number));)
        for (; number < end; number++) {
            for (int64_t own; number >= before + (own = units_of(run, sequence)); sequence++) before += own;
            int64_t start = run->starts[sequence], count = run->starts[sequence + 1] - start;
            int64_t pieces = (count + UNIT_QUERIES - 1) / UNIT_QUERIES, first = (number - before) % pieces * UNIT_QUERIES;
            int64_t queries = count - first < UNIT_QUERIES ? count - first : UNIT_QUERIES;
            PackedUnit unit = {start, run->keys[sequence], (number - before) / pieces, first, queries};
            attend_packed_unit(run->layer, &unit);
        }
}

void attend_sequences(const PackedLayer *layer, const int32_t *starts, const int32_t *keys, int64_t count, int workers) {
    PackedRun run = {layer, starts, keys, count, 0, {0}};
    int64_t work = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t tokens = starts[i + 1] - starts[i];
        run.units += units_of(&run, i);
        work += tokens * tokens * layer->heads * layer->head_dim;
    }
    run_together(attend_share, &run, work < SPREAD_FROM ? 1 : workers);
}
