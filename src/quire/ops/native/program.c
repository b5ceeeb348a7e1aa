#include "program.h"

#include <stddef.h>

#include "thread_pool.h"
#include "rows.h"

#define QUAD 4          /* rows that are rounded together */
#define SHARES 8        /* of a product for each worker: who is faster takes more */
#define FEWEST 32       /* outputs in a share */

typedef struct {
    const Op *ops;
    int64_t count, rows;
    Meeting meeting;
} Run;

static void run_row(const Op *op, int64_t row) {
    const float *a = op->a + row * op->a_stride, *b = op->b + row * op->b_stride;
    float *out = op->out + row * op->columns, *total = op->total + row * op->columns;
    switch (op->kind) {
        case NORM: norm_row(a, op->weight, (float)op->eps, op->columns, out); break;
        case ADD_NORM:
            add_row(a, b, op->columns, total);
            norm_row(total, op->weight, (float)op->eps, op->columns, out);
            break;
        case LAYER_NORM: layer_norm_row(a, op->weight, op->b, (float)op->eps, op->columns, out); break;
        case ADD: add_row(a, b, op->columns, out); break;
        case MULTIPLY: multiply_row(a, b, op->columns, out); break;
        case SILU: silu_row(a, op->columns, out); break;
        case GELU: gelu_row(a, op->columns, out); break;
        case GELU_TANH: gelu_tanh_row(a, op->columns, out); break;
        case LOW_RANK: /* a: what was multiplied, b: the place of the row's adapter, out: the product, which is added to */
            if (b[0] > 0) {
                const int64_t *table = op->weight, parts = table[1];
                add_low_rank_row((const int64_t *)table[2] + (int64_t)b[0] * (2 + 4 * parts), parts, a, table[0], out);
            }
            break;
        case COPY: __builtin_memcpy(out, a, (size_t)op->columns * sizeof(float)); break;
    }
}

/* Operators on rows up to the next product. A quad of rows goes through all of them. */
static void run_rows(Run *run, int64_t first, int64_t last) {
    for (int64_t row, end; (end = take(&run->meeting, run->rows, QUAD, &row));)
        for (const Op *op = run->ops + first; op < run->ops + last; op++) {
            if (op->kind == ROUND)
                round_rows(op->a, op->a_stride, row, end, op->columns / GROUP, op->taken);
            else if (op->kind == GATHER)
                gather_rows(op->a, op->a_stride, row, end, op->columns, op->taken);
            else
                for (int64_t i = row; i < end; i++) run_row(op, i);
        }
}

static void run_product(Run *run, const Op *op, int workers) {
    const int floats = op->matrix->kind == FLOATS, width = floats ? FLOAT_TILE : TILE;
    int64_t tiles = (op->columns + width - 1) / width, share = tiles / (workers * SHARES);
    share = (share / (FEWEST / width) + 1) * (FEWEST / width); /* whole pairs: two tiles are multiplied together */
    for (int64_t tile, end; (end = take(&run->meeting, tiles, share, &tile));)
        (floats ? multiply_float_tiles(op->matrix, op->taken, run->rows, op->out, tile, end)
                : multiply_tiles(op->matrix, op->taken, run->rows, op->out, tile, end));
}

static void work(void *context, int workers) {
    Run *run = context;
    for (int64_t i = 0, next; i < run->count; i = next) {
        next = i + 1;
        if (run->ops[i].kind == PRODUCT) {
            run_product(run, run->ops + i, workers);
        } else {
            while (next < run->count && run->ops[next].kind != PRODUCT) next++;
            run_rows(run, i, next);
        }
        meet(&run->meeting, workers);
    }
}

void run_program(const Op *ops, int64_t count, int64_t rows, int workers) {
    Run run = {ops, count, rows, {0}};
    run_together(work, &run, workers);
}
