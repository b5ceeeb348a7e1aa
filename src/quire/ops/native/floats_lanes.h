/* The kernel of `floats.c` for x86 and vectors of LANES values, under the name TILES. Included once for each kind of CPU. A tile
   has 16 outputs; as many rows are taken together as registers have room for their sums. */

#define VECTORS (FLOAT_TILE / LANES)
#define AT_ONCE (LANES / 2) /* rows */
#define PAIRED 12           /* rows that two tiles are multiplied by together */
#define NEAR 144            /* inputs of two tiles that the nearest cache has room for */
#define vec NAMED(vec)
#define load NAMED(load)
#define run_pair NAMED(run_pair)
#define run_two NAMED(run_two)
#define run_tile NAMED(run_tile)

typedef float vec __attribute__((vector_size(LANES * 4)));

INLINE vec load(const float *from) { vec v; __builtin_memcpy(&v, from, sizeof v); return v; }

/* the outputs of one tile */
INLINE void run_tile(int rows, const Matrix *m, int64_t tile, const float *x, float *y) {
    const float *w = (const float *)(m->tiles + tile * m->tile_bytes);
    vec sums[AT_ONCE][VECTORS] = {{{0}}};
    for (int64_t k = 0; k < m->inputs; k++, w += FLOAT_TILE) {
        vec taken[VECTORS];
        for (int i = 0; i < VECTORS; i++) taken[i] = load(w + i * LANES);
        if (rows <= 2) __builtin_prefetch((const char *)w + AHEAD);
        for (int r = 0; r < rows; r++) {
            float one = x[r / 4 * 4 * m->inputs + 4 * k + r % 4];
            for (int i = 0; i < VECTORS; i++) sums[r][i] += taken[i] * one;
        }
    }
    int64_t first = tile * FLOAT_TILE, count = m->outputs - first < FLOAT_TILE ? m->outputs - first : FLOAT_TILE;
    for (int r = 0; r < rows; r++) {
        float out[FLOAT_TILE];
        __builtin_memcpy(out, sums[r], sizeof out);
        for (int64_t i = 0; m->bias && i < FLOAT_TILE; i++) out[i] += m->bias[first + i];
        __builtin_memcpy(y + r * m->outputs + first, out, (size_t)count * sizeof(float));
    }
}

/* What `rows` rows add to the sums of two whole tiles, from input `from` to `to`. The sums wait among the results. */
INLINE void run_pair(int rows, const Matrix *m, int64_t tile, const float *x, int64_t from, int64_t to, int ahead, float *y) {
    const float *w = (const float *)(m->tiles + tile * m->tile_bytes), *other = w + m->inputs * FLOAT_TILE;
    vec sums[PAIRED][2 * VECTORS] = {{{0}}};
    for (int r = 0; from && r < rows; r++)
        for (int i = 0; i < 2 * VECTORS; i++) sums[r][i] = load(y + r * m->outputs + i * LANES);
#pragma GCC unroll 4
    for (int64_t k = from; k < to; k++) {
        vec taken[2 * VECTORS];
        for (int i = 0; i < 2 * VECTORS; i++) taken[i] = load((i < VECTORS ? w : other) + k * FLOAT_TILE + i % VECTORS * LANES);
        if (ahead) { /* what comes next */
            __builtin_prefetch(w + (k + NEAR) * FLOAT_TILE);
            __builtin_prefetch(other + (k + NEAR) * FLOAT_TILE);
        }
        for (int r = 0; r < rows; r++) {
            float one = x[r / 4 * 4 * m->inputs + 4 * k + r % 4];
            for (int i = 0; i < 2 * VECTORS; i++) sums[r][i] += taken[i] * one;
        }
    }
    const float *bias = m->bias && to == m->inputs ? m->bias + tile * FLOAT_TILE : 0;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2 * VECTORS; i++) {
            vec sum = bias ? sums[r][i] + load(bias + i * LANES) : sums[r][i];
            __builtin_memcpy(y + r * m->outputs + i * LANES, &sum, sizeof sum);
        }
}

/* Two whole tiles, which have twice the products for each number of a row that is fetched. Inputs are taken by so many that both
   tiles stay near while all rows go by, which are a multiple of four; sums are in the same order as alone. */
INLINE void run_two(const Matrix *m, int64_t tile, const float *x, int64_t rows, float *y) {
    for (int64_t from = 0, to; from < m->inputs; from = to) {
        to = from + NEAR < m->inputs ? from + NEAR : m->inputs;
        for (int64_t row = 0, some; row < rows; row += some) {
            const float *taken = x + row * m->inputs;
            float *out = y + row * m->outputs + tile * FLOAT_TILE;
            some = rows - row < PAIRED ? rows - row : PAIRED;
            if (some == PAIRED && row) run_pair(PAIRED, m, tile, taken, from, to, 0, out);
            else if (some == PAIRED) run_pair(PAIRED, m, tile, taken, from, to, 1, out);
            else if (some == 8) run_pair(8, m, tile, taken, from, to, !row, out);
            else run_pair(4, m, tile, taken, from, to, !row, out);
        }
    }
}

static void TILES(const Matrix *m, const float *x, int64_t rows, float *y, int64_t tile, int64_t end) {
    for (int64_t some; tile < end; tile += some) {
        /* registers of other CPUs have no room for two */
        int64_t done = LANES == 16 && tile + 2 <= end && (tile + 2) * FLOAT_TILE <= m->outputs ? rows - rows % 4 : 0;
        if (done) run_two(m, tile, x, done, y);
        some = done ? 2 : 1;
        for (int64_t t = tile; t < tile + some; t++)
            for (int64_t row = done; row < rows; row += AT_ONCE) {
                const float *from = x + row * m->inputs;
                float *to = y + row * m->outputs;
                switch (rows - row) { /* a number that is known is worth a copy of the code */
                    case 1: run_tile(1, m, t, from, to); break;
                    case 2: run_tile(2, m, t, from, to); break;
                    case 3: run_tile(3, m, t, from, to); break;
#if LANES == 8
                    default: run_tile(4, m, t, from, to);
#else
                    case 4: run_tile(4, m, t, from, to); break;
                    case 5: run_tile(5, m, t, from, to); break;
                    case 6: run_tile(6, m, t, from, to); break;
                    case 7: run_tile(7, m, t, from, to); break;
                    default: run_tile(8, m, t, from, to);
#endif
                }
            }
    }
}

#undef VECTORS
#undef AT_ONCE
#undef NEAR
#undef PAIRED
#undef vec
#undef load
#undef run_tile
#undef run_pair
#undef run_two
