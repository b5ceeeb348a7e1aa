/* The kernel of `one_query.c` for vectors of LANES numbers, under the name UNITS. Included once for each kind of CPU, for what a
   compiler makes of vectors is settled where a function is written. */

#define VECTORS (STEP / LANES)
#define vec NAMED(vec)
#define ivec NAMED(ivec)
#define load NAMED(load)
#define store NAMED(store)
#define all NAMED(all)
#define where NAMED(where)
#define least NAMED(least)
#define greater NAMED(greater)
#define fold NAMED(fold)
#define sums_of NAMED(sums_of)
#define sum NAMED(sum)
#define raise NAMED(raise)
#define power NAMED(power)
#define cap_scores NAMED(cap_scores)
#define prepare NAMED(prepare)
#define score NAMED(score)
#define weigh NAMED(weigh)
#define gather NAMED(gather)
#define find NAMED(find)
#define attend NAMED(attend)
#define place NAMED(place)

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

INLINE vec load(const float *from) { vec v; __builtin_memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, vec v) { __builtin_memcpy(to, &v, sizeof v); }
INLINE vec all(float x) { vec v = {0}; return v + x; }
INLINE vec where(ivec mask, vec v) { return (vec)(mask & (ivec)v); }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vec greater(vec a, vec b) { return where(a > b, a) + where(~(a > b), b); }

INLINE quad fold(vec v) {
    quad parts[LANES / 4], total;
    __builtin_memcpy(parts, &v, sizeof v);
    total = parts[0];
    for (int i = 1; i < LANES / 4; i++) total += parts[i];
    return total;
}

/* the sum of each of four */
INLINE quad sums_of(const vec *v) {
    quad a = fold(v[0]), b = fold(v[1]), c = fold(v[2]), d = fold(v[3]);
    quad ab = SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7);
    quad cd = SHUFFLE(c, d, 0, 4, 2, 6) + SHUFFLE(c, d, 1, 5, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

INLINE float sum(vec v) {
    quad q = fold(v);
    return (q[0] + q[1]) + (q[2] + q[3]);
}

#include "power.h"

/* scores, which are divided by the cap already, within the cap: cap * tanh(score). What is not a number stays so. */
INLINE void cap_scores(float *scores, int64_t count, float cap) {
    for (int64_t t = 0; t < count; t += LANES) {
        vec x = load(scores + t), size = (vec)((ivec)x & 0x7FFFFFFF), e = power(-2.f * size);
        ivec within = (ivec)(cap * (1.f - e) / (1.f + e)) | ((ivec)x & (int32_t)0x80000000);
        store(scores + t, where(x == x, (vec)within) + where(x != x, x));
    }
}

/* a head of a token, normed, scaled and turned */
INLINE void prepare(const Layer *l, const float *from, float *to, const float *norm, int64_t position, float scale) {
    int64_t dim = l->head_dim, half = l->half_turned;
    float squares = 0;
    for (int64_t d = 0; norm && d < dim; d++) squares += from[d] * from[d];
    float factor = norm ? scale / sqrtf(squares / (float)dim + (float)l->eps) : scale;
    for (int64_t d = 0; d < dim; d++) to[d] = from[d] * factor * (norm ? norm[d] : 1.f);
    for (int64_t d = 0; d < half; d++) {
        float cosine = l->cosines[position * half + d], sine = l->sines[position * half + d];
        float first = to[d], second = to[half + d];
        to[d] = first * cosine - second * sine;
        to[half + d] = second * cosine + first * sine;
    }
}

/* queries [queries, dim] by keys [count, dim] -> scores [queries, BLOCK], filled up with such as weigh nothing */
INLINE void score(int queries, const float *q, const float *keys, const float *ahead, int64_t count, int64_t dim, float *scores) {
    for (int64_t t = 0; t < BLOCK && t < (count + LANES - 1) / LANES * LANES; t += TILE) {
        if (t >= count) {
            for (int g = 0; g < queries; g++)
                for (int i = 0; i < TILE; i++) scores[g * BLOCK + t + i] = -INFINITY;
            continue;
        }
        vec sums[TILE][TILE] = {{{0}}};
        const float *key[TILE];
        for (int i = 0; i < TILE; i++) key[i] = keys + least(t + i, count - 1) * dim;
        for (int64_t d = 0; d < TILE * dim; d += LINE) __builtin_prefetch(ahead + t * dim + d);
        for (int64_t d = 0; d < dim; d += LANES) {
            vec taken[TILE];
            for (int i = 0; i < TILE; i++) taken[i] = load(key[i] + d);
            for (int g = 0; g < queries; g++) {
                vec query = load(q + g * dim + d);
                for (int i = 0; i < TILE; i++) sums[g][i] += query * taken[i];
            }
        }
        for (int g = 0; g < queries; g++) {
            quad four = sums_of(sums[g]);
            __builtin_memcpy(scores + g * BLOCK + t, &four, sizeof four);
            for (int64_t i = count; i < t + TILE; i++) scores[g * BLOCK + i] = -INFINITY;
        }
    }
}

/* scores become weights; -> by what has to be multiplied what was summed before */
INLINE float weigh(float *scores, int64_t count, float *greatest, float *total) {
    float before = *greatest, top = before;
    vec tops = load(scores), sums = {0};
    for (int64_t t = LANES; t < count; t += LANES) tops = greater(load(scores + t), tops);
    for (int i = 0; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    int64_t t = 0;
    for (; t + 4 * LANES <= count; t += 4 * LANES) { /* side by side, for each is a long chain of operations */
        vec a = power(load(scores + t) - top), b = power(load(scores + t + LANES) - top);
        vec c = power(load(scores + t + 2 * LANES) - top), d = power(load(scores + t + 3 * LANES) - top);
        store(scores + t, a), store(scores + t + LANES, b), store(scores + t + 2 * LANES, c), store(scores + t + 3 * LANES, d);
        sums += a, sums += b, sums += c, sums += d;
    }
    for (; t < count; t += LANES) {
        vec weights = power(load(scores + t) - top);
        store(scores + t, weights);
        sums += weights;
    }
    float correction = before == top ? 1.f : expf(before - top);
    *greatest = top;
    *total = *total * correction + sum(sums);
    return correction;
}

/* out [queries, dim] += weights [queries, BLOCK] by values [count, dim], which are read nearly in order */
INLINE void gather(int queries, const float *weights, const float *values, const float *ahead, int64_t count, int64_t dim, float *out) {
    for (int64_t begin = 0, end; begin < count; begin = end) {
        end = least(begin + FEW, count);
        for (int64_t d = 0; d < dim; d += STEP) {
            vec sums[TILE][VECTORS];
            for (int g = 0; g < queries; g++)
                for (int i = 0; i < VECTORS; i++) sums[g][i] = load(out + g * dim + d + i * LANES);
            for (int64_t t = begin; t < end; t++) {
                vec taken[VECTORS];
                __builtin_prefetch(ahead + t * dim + d);
                for (int i = 0; i < VECTORS; i++) taken[i] = load(values + t * dim + d + i * LANES);
                for (int g = 0; g < queries; g++)
                    for (int i = 0; i < VECTORS; i++) sums[g][i] += taken[i] * weights[g * BLOCK + t];
            }
            for (int g = 0; g < queries; g++)
                for (int i = 0; i < VECTORS; i++) store(out + g * dim + d + i * LANES, sums[g][i]);
        }
    }
}

/* where the keys and values of a row begin, from one of its tokens on, and how many follow each other there */
INLINE int64_t find(const Layer *l, const Rows *r, int64_t row, int64_t head, int64_t token, int64_t *count) {
    int64_t page = r->tables[row * r->table_stride + token / l->page_size], offset = token % l->page_size;
    *count = least(least(l->page_size - offset, r->lengths[row] - token), BLOCK);
    return page * l->page_stride + head * l->head_stride + offset * l->head_dim;
}

INLINE void attend(const Layer *l, const Rows *r, int queries, const float *q, float *out, int64_t row, int64_t head) {
    float scores[TILE * BLOCK], greatest[TILE], total[TILE];
    int64_t dim = l->head_dim, length = r->lengths[row], first = l->window && length > l->window ? length - l->window : 0;
    for (int g = 0; g < queries; g++) greatest[g] = -INFINITY, total[g] = 0;
    __builtin_memset(out, 0, (size_t)(queries * dim) * sizeof(float));
    for (int64_t t = first, count; t < length; t += count) {
        int64_t at = find(l, r, row, head, t, &count), after = at, rest;
        if (t + count < length) after = find(l, r, row, head, t + count, &rest);
        score(queries, q, l->cached_keys + at, l->cached_values + at, count, dim, scores);
        for (int g = 0; g < queries; g++) {
            int64_t whole = (count + LANES - 1) / LANES * LANES;
            if (l->soft_cap != 0) {
                cap_scores(scores + g * BLOCK, whole, (float)l->soft_cap);
                for (int64_t i = count; i < whole; i++) scores[g * BLOCK + i] = -INFINITY;
            }
            float correction = weigh(scores + g * BLOCK, whole, &greatest[g], &total[g]);
            for (int64_t d = 0; correction != 1.f && d < dim; d++) out[g * dim + d] *= correction;
        }
        gather(queries, scores, l->cached_values + at, l->cached_keys + after, count, dim, out);
    }
    for (int g = 0; g < queries; g++) {
        float part = 1.f / total[g];
        for (int64_t d = 0; d < dim; d++) out[g * dim + d] *= part;
    }
}

INLINE void place(const Layer *l, const Rows *r, int64_t row, int64_t head, int64_t position) {
    int64_t page = r->tables[row * r->table_stride + position / l->page_size], from = row * l->query_stride + head * l->head_dim;
    int64_t at = page * l->page_stride + head * l->head_stride + position % l->page_size * l->head_dim;
    prepare(l, l->keys + from, l->cached_keys + at, l->key_norm, position, 1.f);
    __builtin_memcpy(l->cached_values + at, l->values + from, (size_t)l->head_dim * sizeof(float));
}

static void UNITS(const Layer *l, const Rows *r, int64_t first, int64_t last) {
    float q[TILE * MOST_COMPONENTS], scale = (float)(l->soft_cap != 0 ? l->scale / l->soft_cap : l->scale);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t row = unit / l->kv_heads, head = unit % l->kv_heads, dim = l->head_dim, position = r->lengths[row] - 1;
        if (l->keys) place(l, r, row, head, position);
        if (!l->out) continue;
        for (int64_t g = 0; g < l->group; g += TILE) {
            int64_t column = (head * l->group + g) * dim, count = least(l->group - g, TILE);
            const float *from = l->queries + row * l->query_stride + column;
            float *out = l->out + row * l->out_stride + column;
            for (int64_t i = 0; i < count; i++) prepare(l, from + i * dim, q + i * dim, l->query_norm, position, scale);
            switch (count) { /* a number that is known is worth a copy of the code */
                case 1: attend(l, r, 1, q, out, row, head); break;
                case 2: attend(l, r, 2, q, out, row, head); break;
                case 3: attend(l, r, 3, q, out, row, head); break;
                default: attend(l, r, 4, q, out, row, head);
            }
        }
    }
}

#undef VECTORS
#undef vec
#undef ivec
#undef load
#undef store
#undef all
#undef where
#undef least
#undef greater
#undef fold
#undef sums_of
#undef sum
#undef raise
#undef power
#undef cap_scores
#undef prepare
#undef score
#undef weigh
#undef gather
#undef find
#undef attend
#undef place
