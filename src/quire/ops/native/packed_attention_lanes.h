/* The kernel of `packed_attention.c` for vectors of LANES elements, under the name ATTEND_UNIT. Included once for each kind of CPU. */

#define VECTORS 2                      /* of keys, or of values, that are multiplied together */
#define QUERIES (LANES == 8 ? 4 : 8)   /* as many as registers have room for their sums */
#define vec NAMED(packed_vec)
#define ivec NAMED(packed_ivec)
#define load NAMED(packed_load)
#define store NAMED(packed_store)
#define greater NAMED(packed_greater)
#define sum_of NAMED(packed_sum)
#define greatest_of NAMED(packed_greatest)
#define raise NAMED(packed_raise)
#define power NAMED(packed_power)
#define rotate NAMED(packed_rotate)
#define copy_keys NAMED(packed_copy_keys)
#define copy_values NAMED(packed_copy_values)
#define score NAMED(packed_score)
#define adjust NAMED(packed_adjust)
#define sees_a_key NAMED(packed_sees_a_key)
#define weigh NAMED(packed_weigh)
#define add_values NAMED(packed_add_values)

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

INLINE vec load(const float *from) { vec v; __builtin_memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, vec v) { __builtin_memcpy(to, &v, sizeof v); }

/* b where a is not a number */
INLINE vec greater(vec a, vec b) { return (vec)(((a > b) & (ivec)a) | (~(a > b) & (ivec)b)); }

INLINE float sum_of(vec v) {
    quad parts[LANES / 4];
    __builtin_memcpy(parts, &v, sizeof v);
    for (int i = 1; i < LANES / 4; i++) parts[0] += parts[i];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

INLINE float greatest_of(vec v) {
    quad parts[LANES / 4];
    __builtin_memcpy(parts, &v, sizeof v);
    for (int i = 1; i < LANES / 4; i++)
        parts[0] = (quad)(((parts[0] > parts[i]) & (places)parts[0]) | (~(parts[0] > parts[i]) & (places)parts[i]));
    float a = parts[0][0] > parts[0][1] ? parts[0][0] : parts[0][1], b = parts[0][2] > parts[0][3] ? parts[0][2] : parts[0][3];
    return a > b ? a : b;
}

#include "power.h"

/* A head of a token, rotated, times `factor`, and padded to `width`. */
INLINE void rotate(const PackedLayer *l, const float *from, int64_t position, float factor, int64_t width, float *to) {
    int64_t dim = l->head_dim, half = l->cosines ? l->half_rotated : 0;
    const float *cosines = l->cosines + position * half, *sines = l->sines + position * half;
    for (int64_t d = 0; d < half; d++) {
        float a = from[d], b = from[half + d];
        to[d] = (a * cosines[d] - b * sines[d]) * factor;
        to[half + d] = (b * cosines[d] + a * sines[d]) * factor;
    }
    for (int64_t d = 2 * half; d < dim; d++) to[d] = from[d] * factor;
    for (int64_t d = dim; d < width; d++) to[d] = 0.f;
}

/* keys first ... first + count of the sequence -> [width, KEYS]; keys beyond the last are copies of it, up to whole vectors */
INLINE void copy_keys(const PackedLayer *l, const PackedUnit *unit, int64_t first, int64_t count, int64_t width, float *turned) {
    float held[4][MAX_PACKED_HEAD_DIM];
    const float *rows[4] = {held[0], held[1], held[2], held[3]};
    const int64_t step = VECTORS * LANES;
    for (int64_t t = 0; t < (count + step - 1) / step * step; t += 4) {
        for (int64_t i = 0; i < 4; i++) {
            int64_t key = first + (t + i < count ? t + i : count - 1);
            rotate(l, l->keys + (unit->start + key) * l->stride + unit->head * l->head_dim, key, 1.f, width, held[i]);
        }
        for (int64_t d = 0; d < width; d += 4) {
            quad v[4];
            TURN(v, rows, d);
            for (int i = 0; i < 4; i++) __builtin_memcpy(turned + (d + i) * KEYS + t, &v[i], sizeof v[i]);
        }
    }
}

INLINE void copy_values(const PackedLayer *l, const PackedUnit *unit, int64_t first, int64_t count, int64_t width, float *values) {
    const float *from = l->values + (unit->start + first) * l->stride + unit->head * l->head_dim;
    for (int64_t t = 0; t < count; t++, values += width, from += l->stride) {
        int64_t d = 0;
        for (; d + LANES <= l->head_dim; d += LANES) store(values + d, load(from + d));
        for (; d < l->head_dim; d++) values[d] = from[d];
        for (; d < width; d++) values[d] = 0.f;
    }
}

/* queries [QUERIES, width] by keys [width, KEYS] -> scores [QUERIES, KEYS] of the first `count` keys, up to whole vectors */
INLINE void score(const float *queries, const float *turned, int64_t count, int64_t width, float *scores) {
    for (int64_t t = 0; t < count; t += VECTORS * LANES) {
        vec sums[QUERIES][VECTORS] = {{{0}}};
        for (int64_t d = 0; d < width; d++) {
            vec keys[VECTORS];
            for (int i = 0; i < VECTORS; i++) keys[i] = load(turned + d * KEYS + t + i * LANES);
            for (int q = 0; q < QUERIES; q++)
                for (int i = 0; i < VECTORS; i++) sums[q][i] += queries[q * width + d] * keys[i];
        }
        for (int q = 0; q < QUERIES; q++)
            for (int i = 0; i < VECTORS; i++) store(scores + q * KEYS + t + i * LANES, sums[q][i]);
    }
}

/* Add the bias of a query's scores, and hide keys that it does not see. `first`: the first key of the block. */
INLINE void adjust(const PackedLayer *l, const PackedUnit *unit, int64_t query, int64_t first, int64_t count, int64_t whole, float *scores) {
    if (l->bias) {
        const float *bias = l->bias + unit->head * (2 * l->reach + 1) + l->reach + first - query;
        for (int64_t t = 0; t < count; t++) scores[t] += bias[t];
    }
    for (int64_t t = count; t < whole; t++) scores[t] = -INFINITY;
    if (l->window < 0) return;
    int64_t begin = query - l->window - first, end = query + l->window + 1 - first;
    for (int64_t t = 0; t < (begin < count ? begin : count); t++) scores[t] = -INFINITY;
    for (int64_t t = end > 0 ? end : 0; t < count; t++) scores[t] = -INFINITY;
}

INLINE int sees_a_key(const PackedLayer *l, const PackedUnit *unit, int64_t query) {
    return unit->keys > 0 && (l->window < 0 || query - l->window < unit->keys);
}

/* Scores [QUERIES, KEYS] become weights. Sums of earlier blocks are rescaled to the greatest score so far. */
INLINE void weigh(float *scores, int64_t whole, int64_t width, float *greatest, float *total, float *out) {
    for (int q = 0; q < QUERIES; q++, scores += KEYS, out += width) {
        vec top = (vec){0} + greatest[q], sums = {0};
        for (int64_t t = 0; t < whole; t += LANES) top = greater(load(scores + t), top);
        float now = greatest_of(top);
        for (int64_t t = 0; t < whole; t += LANES) {
            vec weights = power(load(scores + t) - now);
            store(scores + t, weights);
            sums += weights;
        }
        float correction = greatest[q] == now ? 1.f : expf(greatest[q] - now);
        if (correction != 1.f)
            for (int64_t d = 0; d < width; d++) out[d] *= correction;
        total[q] = total[q] * correction + sum_of(sums);
        greatest[q] = now;
    }
}

/* out [QUERIES, width] += weights [QUERIES, KEYS] by values [count, width] */
INLINE void add_values(const float *weights, const float *values, int64_t count, int64_t width, float *out) {
    int64_t d = 0;
    for (; d + VECTORS * LANES <= width; d += VECTORS * LANES) {
        vec sums[QUERIES][VECTORS];
        for (int q = 0; q < QUERIES; q++)
            for (int i = 0; i < VECTORS; i++) sums[q][i] = load(out + q * width + d + i * LANES);
        for (int64_t t = 0; t < count; t++) {
            vec some[VECTORS];
            for (int i = 0; i < VECTORS; i++) some[i] = load(values + t * width + d + i * LANES);
            for (int q = 0; q < QUERIES; q++)
                for (int i = 0; i < VECTORS; i++) sums[q][i] += weights[q * KEYS + t] * some[i];
        }
        for (int q = 0; q < QUERIES; q++)
            for (int i = 0; i < VECTORS; i++) store(out + q * width + d + i * LANES, sums[q][i]);
    }
    for (; d < width; d += LANES)
        for (int q = 0; q < QUERIES; q++) {
            vec sum = load(out + q * width + d);
            for (int64_t t = 0; t < count; t++) sum += weights[q * KEYS + t] * load(values + t * width + d);
            store(out + q * width + d, sum);
        }
}

static void ATTEND_UNIT(const PackedLayer *l, const PackedUnit *unit) {
    float turned[MAX_PACKED_HEAD_DIM * KEYS], values[MAX_PACKED_HEAD_DIM * KEYS], scores[QUERIES * KEYS];
    float queries[UNIT_QUERIES * MAX_PACKED_HEAD_DIM], out[UNIT_QUERIES * MAX_PACKED_HEAD_DIM];
    float greatest[UNIT_QUERIES], total[UNIT_QUERIES];
    const int64_t width = (l->head_dim + PADDING - 1) / PADDING * PADDING, tiles = (unit->queries + QUERIES - 1) / QUERIES;
    for (int64_t i = 0; i < tiles * QUERIES; i++) { /* copies of the last query fill the last tile */
        int64_t query = unit->first + (i < unit->queries ? i : unit->queries - 1);
        const float *from = l->queries + (unit->start + query) * l->stride + unit->head * l->head_dim;
        rotate(l, from, query, (float)l->scale, width, queries + i * width);
        greatest[i] = -INFINITY, total[i] = 0.f;
    }
    __builtin_memset(out, 0, (size_t)(tiles * QUERIES * width) * sizeof(float));
    int64_t begin = 0, end = unit->keys;
    if (l->window >= 0) {
        begin = unit->first - l->window > 0 ? (unit->first - l->window) / KEYS * KEYS : 0;
        end = unit->first + unit->queries + l->window < end ? unit->first + unit->queries + l->window : end;
    }
    for (int64_t first = begin; first < end; first += KEYS) {
        int64_t count = unit->keys - first < KEYS ? unit->keys - first : KEYS;
        int64_t whole = (count + LANES - 1) / LANES * LANES;
        copy_keys(l, unit, first, count, width, turned);
        copy_values(l, unit, first, count, width, values);
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t at = tile * QUERIES;
            score(queries + at * width, turned, count, width, scores);
            for (int64_t q = 0; q < QUERIES; q++) {
                int64_t query = unit->first + (at + q < unit->queries ? at + q : unit->queries - 1);
                adjust(l, unit, query, first, count, whole, scores + q * KEYS);
            }
            weigh(scores, whole, width, greatest + at, total + at, out + at * width);
            add_values(scores, values, count, width, out + at * width);
        }
    }
    for (int64_t i = 0; i < unit->queries; i++) {
        float part = sees_a_key(l, unit, unit->first + i) ? 1.f / total[i] : 0.f, *to = l->out + (unit->start + unit->first + i) * l->out_stride + unit->head * l->head_dim;
        for (int64_t d = 0; d < l->head_dim; d++) to[d] = out[i * width + d] * part;
    }
}

#undef VECTORS
#undef QUERIES
#undef vec
#undef ivec
#undef load
#undef store
#undef greater
#undef sum_of
#undef greatest_of
#undef raise
#undef power
#undef rotate
#undef copy_keys
#undef copy_values
#undef score
#undef adjust
#undef sees_a_key
#undef weigh
#undef add_values
