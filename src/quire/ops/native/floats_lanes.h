/* The kernel of `floats.c` for x86 and vectors of LANES numbers, under the name TILES. Included once for each kind of CPU. A tile
   has 16 outputs; as many rows are taken together as registers have room for their sums. */

#define VECTORS (FLOAT_TILE / LANES)
#define AT_ONCE (LANES / 2) /* rows */
#define vec NAMED(vec)
#define load NAMED(load)
#define run_tile NAMED(run_tile)

typedef float vec __attribute__((vector_size(LANES * 4)));

INLINE vec load(const float *from) { vec v; __builtin_memcpy(&v, from, sizeof v); return v; }

INLINE void run_tile(int rows, const Matrix *m, int64_t tile, const float *x, float *y) {
    const float *w = (const float *)(m->tiles + tile * m->tile_bytes);
    vec sums[AT_ONCE][VECTORS] = {{{0}}};
    for (int64_t k = 0; k < m->inputs; k++, w += FLOAT_TILE) {
        vec taken[VECTORS];
        for (int i = 0; i < VECTORS; i++) taken[i] = load(w + i * LANES);
        __builtin_prefetch((const char *)w + AHEAD);
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

static void TILES(const Matrix *m, const float *x, int64_t rows, float *y, int64_t tile, int64_t end) {
    for (; tile < end; tile++)
        for (int64_t row = 0; row < rows; row += AT_ONCE) {
            const float *some = x + row * m->inputs;
            float *to = y + row * m->outputs;
            switch (rows - row) { /* a number that is known is worth a copy of the code */
                case 1: run_tile(1, m, tile, some, to); break;
                case 2: run_tile(2, m, tile, some, to); break;
                case 3: run_tile(3, m, tile, some, to); break;
#if AT_ONCE == 4
                default: run_tile(4, m, tile, some, to);
#else
                case 4: run_tile(4, m, tile, some, to); break;
                case 5: run_tile(5, m, tile, some, to); break;
                case 6: run_tile(6, m, tile, some, to); break;
                case 7: run_tile(7, m, tile, some, to); break;
                default: run_tile(8, m, tile, some, to);
#endif
            }
        }
}

#undef VECTORS
#undef AT_ONCE
#undef vec
#undef load
#undef run_tile
