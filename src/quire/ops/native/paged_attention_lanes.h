/* The kernel of `paged_attention.c` for vectors of LANES values, under the name UNIT. Included once for each kind of CPU, for what
   a compiler makes of vectors is settled where a function is written. */

#define WIDE (LANES == 8 ? 2 : 4) /* vectors of values: as many as registers have room for their sums */
#define COLUMNS (LANES == 4 ? 4 : 2) /* vectors of keys */
#define vec NAMED(vec)
#define ivec NAMED(ivec)
#define load NAMED(load)
#define store NAMED(store)
#define where NAMED(where)
#define greater NAMED(greater)
#define fold NAMED(fold)
#define sums_of NAMED(sums_of)
#define more NAMED(more)
#define greatest_of NAMED(greatest_of)
#define raise NAMED(raise)
#define power NAMED(power)
#define cap_scores NAMED(cap_scores)
#define turned_by NAMED(turned_by)
#define prepare NAMED(prepare)
#define score NAMED(score)
#define turn NAMED(turn)
#define sum_lane NAMED(sum_lane)
#define score_columns NAMED(score_columns)
#define score_turned NAMED(score_turned)
#define weigh NAMED(weigh)
#define add NAMED(add)
#define gather NAMED(gather)
#define visit NAMED(visit)
#define attend NAMED(attend)
#define place NAMED(place)
#define seen NAMED(seen)
#define find NAMED(find)
#define address NAMED(address)
#define lowest NAMED(lowest)
#define least NAMED(least)

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

INLINE vec load(const float *from) { vec v; __builtin_memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, vec v) { __builtin_memcpy(to, &v, sizeof v); }
INLINE vec where(ivec mask, vec v) { return (vec)(mask & (ivec)v); }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* the first key that a token sees */
INLINE int64_t lowest(const Layer *l, int64_t position) {
    return l->window && position >= l->window ? position - l->window + 1 : 0;
}

INLINE int64_t address(const Layer *l, const Rows *r, const Unit *unit, int64_t token) {
    int64_t page = r->tables[unit->row * r->table_stride + token / l->page_size];
    return page * l->page_stride + unit->head * l->head_stride + token % l->page_size * l->head_dim;
}

/* the block that a token is in, as far as the last one */
INLINE Block find(const Layer *l, const Rows *r, const Unit *unit, int64_t token, int64_t last) {
    int64_t offset = token % l->page_size / BLOCK * BLOCK, begin = token - token % l->page_size + offset;
    Block found = {begin, least(least(l->page_size - offset, BLOCK), last + 1 - begin), address(l, r, unit, begin), 0};
    found.after = begin + found.count > last ? found.at : address(l, r, unit, begin + found.count);
    return found;
}

INLINE Span seen(const Layer *l, const Block *block, int64_t position) {
    int64_t begin = lowest(l, position) - block->token, end = position + 1 - block->token;
    return (Span){begin > 0 ? begin : 0, least(end, block->count)};
}

/* b where a is not a number */
INLINE vec greater(vec a, vec b) { return (vec)(((a > b) & (ivec)a) | (~(a > b) & (ivec)b)); }

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

INLINE quad more(quad a, quad b) { return (quad)(((a > b) & (places)a) | (~(a > b) & (places)b)); }

/* the greatest of each of four */
INLINE quad greatest_of(const vec *v) {
    quad parts[4][LANES / 4];
    __builtin_memcpy(parts, v, sizeof parts);
    for (int g = 0; g < 4; g++)
        for (int i = 1; i < LANES / 4; i++) parts[g][0] = more(parts[g][0], parts[g][i]);
    quad a = parts[0][0], b = parts[1][0], c = parts[2][0], d = parts[3][0];
    quad ab = more(SHUFFLE(a, b, 0, 4, 2, 6), SHUFFLE(a, b, 1, 5, 3, 7));
    quad cd = more(SHUFFLE(c, d, 0, 4, 2, 6), SHUFFLE(c, d, 1, 5, 3, 7));
    return more(SHUFFLE(ab, cd, 0, 1, 4, 5), SHUFFLE(ab, cd, 2, 3, 6, 7));
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

/* the row of cosines and sines of one of a unit's tokens */
INLINE int64_t turned_by(const Rows *r, const Unit *unit, int64_t token) {
    return r->turned ? r->turned[unit->token + token] : unit->position + token;
}

/* a head of a token, normed, scaled and turned */
INLINE void prepare(const Layer *l, const float *from, float *to, const float *norm, int64_t turned, float scale) {
    int64_t dim = l->head_dim, half = l->half_turned;
    float squares = 0;
    for (int64_t d = 0; norm && d < dim; d++) squares += from[d] * from[d];
    float factor = norm ? scale / sqrtf(squares / (float)dim + (float)l->eps) : scale;
    for (int64_t d = 0; d < dim; d++) to[d] = from[d] * factor * (norm ? norm[d] : 1.f);
    for (int64_t d = 0; d < half; d++) {
        float cosine = l->cosines[turned * half + d], sine = l->sines[turned * half + d];
        float first = to[d], second = to[half + d];
        to[d] = first * cosine - second * sine;
        to[half + d] = second * cosine + first * sine;
    }
}

/* queries [queries, dim] by keys [count, dim] -> scores [queries, BLOCK] */
INLINE void score(int queries, const float *q, const float *keys, const float *ahead, int64_t count, int64_t dim, float *scores) {
    for (int64_t t = 0; t < count; t += TILE) {
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
        }
    }
}

/* keys [count, dim] -> turned [dim, BLOCK] */
INLINE void turn(const float *keys, int64_t count, int64_t dim, float *turned) {
    for (int64_t t = 0; t < (count + LANES - 1) / LANES * LANES; t += 4) {
        const float *key[4];
        for (int i = 0; i < 4; i++) key[i] = keys + least(t + i, count - 1) * dim;
        for (int64_t d = 0; d < dim; d += 4) {
            quad v[4];
            TURN(v, key, d);
            for (int i = 0; i < 4; i++) __builtin_memcpy(turned + (d + i) * BLOCK + t, &v[i], sizeof v[i]);
        }
    }
}

/* queries by some vectors of turned keys: the products that `score` sums in one of four lanes, in its order */
INLINE void sum_lane(int lane, int queries, int vectors, const float *q, const float *turned, int64_t dim, vec sums[TILE][COLUMNS]) {
#pragma GCC unroll 4
    for (int part = 0; part < LANES / 4; part++) {
        vec some[TILE][COLUMNS] = {{{0}}};
        for (int64_t d = lane + 4 * part; d < dim; d += LANES)
            for (int g = 0; g < queries; g++)
                for (int i = 0; i < vectors; i++) some[g][i] += q[g * dim + d] * load(turned + d * BLOCK + i * LANES);
        for (int g = 0; g < queries; g++)
            for (int i = 0; i < vectors; i++) sums[g][i] = part ? sums[g][i] + some[g][i] : some[g][i];
    }
}

INLINE void score_columns(int queries, int vectors, const float *q, const float *turned, int64_t dim, float *scores) {
    vec lanes[4][TILE][COLUMNS];
    sum_lane(0, queries, vectors, q, turned, dim, lanes[0]);
    sum_lane(1, queries, vectors, q, turned, dim, lanes[1]);
    sum_lane(2, queries, vectors, q, turned, dim, lanes[2]);
    sum_lane(3, queries, vectors, q, turned, dim, lanes[3]);
    for (int g = 0; g < queries; g++)
        for (int i = 0; i < vectors; i++)
            store(scores + g * BLOCK + i * LANES, (lanes[0][g][i] + lanes[1][g][i]) + (lanes[2][g][i] + lanes[3][g][i]));
}

INLINE void score_turned(int queries, const float *q, const float *turned, int64_t count, int64_t dim, float *scores) {
    int64_t t = 0;
    for (; t + (COLUMNS - 1) * LANES < count; t += COLUMNS * LANES) score_columns(queries, COLUMNS, q, turned + t, dim, scores + t);
    for (; t < count; t += LANES) score_columns(queries, 1, q, turned + t, dim, scores + t);
}

/* scores [queries, BLOCK] become weights, and what was summed before is corrected by the new maximum */
INLINE void weigh(int queries, float *scores, int64_t count, int64_t dim, State *states, float *out) {
    vec tops[TILE], sums[TILE] = {{0}};
    float top[TILE], total[TILE];
    for (int g = 0; g < queries; g++) tops[g] = (vec){0} + states[g].greatest;
    for (int g = queries; g < TILE; g++) tops[g] = tops[0];
    for (int64_t t = 0; t < count; t += LANES)
        for (int g = 0; g < queries; g++) tops[g] = greater(load(scores + g * BLOCK + t), tops[g]);
    quad all = greatest_of(tops);
    __builtin_memcpy(top, &all, sizeof all);
    for (int64_t t = 0; t < count; t += LANES)
        for (int g = 0; g < queries; g++) { /* side by side, for each is a long chain of operations */
            vec weights = power(load(scores + g * BLOCK + t) - top[g]);
            store(scores + g * BLOCK + t, weights);
            sums[g] += weights;
        }
    all = sums_of(sums);
    __builtin_memcpy(total, &all, sizeof all);
    for (int g = 0; g < queries; g++) {
        float correction = states[g].greatest == top[g] ? 1.f : expf(states[g].greatest - top[g]);
        states[g] = (State){top[g], states[g].total * correction + total[g]};
        for (int64_t d = 0; correction != 1.f && d < dim; d++) out[g * dim + d] *= correction;
    }
}

/* some columns of: out [queries, dim] += weights [queries, BLOCK] by values [begin ... end, dim] */
INLINE void add(int queries, int vectors, const float *weights, const float *values, const float *ahead, int64_t begin, int64_t end, int64_t dim, float *out) {
    vec sums[TILE][WIDE];
    for (int g = 0; g < queries; g++)
        for (int i = 0; i < vectors; i++) sums[g][i] = load(out + g * dim + i * LANES);
    for (int64_t t = begin; t < end; t++) {
        vec taken[WIDE];
        for (int i = 0; ahead && i < vectors * LANES; i += LINE) __builtin_prefetch(ahead + t * dim + i);
        for (int i = 0; i < vectors; i++) taken[i] = load(values + t * dim + i * LANES);
        for (int g = 0; g < queries; g++)
            for (int i = 0; i < vectors; i++) sums[g][i] += taken[i] * weights[g * BLOCK + t];
    }
    for (int g = 0; g < queries; g++)
        for (int i = 0; i < vectors; i++) store(out + g * dim + i * LANES, sums[g][i]);
}

/* the same for all columns; values are read nearly in order */
INLINE void gather(int queries, const float *weights, const float *values, const float *ahead, int64_t begin, int64_t end, int64_t dim, float *out) {
    for (int64_t t = begin, next; t < end; t = next) {
        int64_t d = 0;
        next = least(t + FEW, end);
        for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
            add(queries, WIDE, weights, values + d, ahead ? ahead + d : ahead, t, next, dim, out + d);
        for (; d < dim; d += LANES) add(queries, 1, weights, values + d, ahead ? ahead + d : ahead, t, next, dim, out + d);
    }
}

/* queries of which each sees its own span of a block */
INLINE void visit(int queries, const Layer *l, const Block *b, const float *turned, const Span *spans, const float *q, State *states, float *out) {
    float scores[TILE * BLOCK];
    int64_t dim = l->head_dim, whole = (b->count + LANES - 1) / LANES * LANES, begin = 0, end = b->count;
    if (turned) score_turned(queries, q, turned, b->count, dim, scores);
    else score(queries, q, l->cached_keys + b->at, l->cached_values + b->at, b->count, dim, scores);
    for (int g = 0; g < queries; g++) {
        float *mine = scores + g * BLOCK;
        if (l->soft_cap != 0) cap_scores(mine, whole, (float)l->soft_cap);
        for (int64_t t = 0; t < least(spans[g].begin, whole); t++) mine[t] = -INFINITY;
        for (int64_t t = spans[g].end > 0 ? spans[g].end : 0; t < whole; t++) mine[t] = -INFINITY;
        if (spans[g].begin > begin) begin = spans[g].begin;
        end = least(end, spans[g].end);
    }
    weigh(queries, scores, whole, dim, states, out);
    const float *values = l->cached_values + b->at, *ahead = turned ? NULL : l->cached_keys + b->after;
    if (begin >= end) begin = end = b->count;
    for (int g = 0; g < queries; g++) gather(1, scores + g * BLOCK, values, ahead, spans[g].begin, least(begin, spans[g].end), dim, out + g * dim);
    gather(queries, scores, values, ahead, begin, end, dim, out);
    for (int g = 0; g < queries; g++) gather(1, scores + g * BLOCK, values, ahead, end, spans[g].end, dim, out + g * dim);
}

/* `count` of a unit's queries, which are [tokens, group] */
INLINE void attend(const Layer *l, const Rows *r, const Unit *unit, int64_t first, int64_t count, const float *q, float *out) {
    float turned[BLOCK * MAX_COMPONENTS];
    State states[MAX_QUERIES];
    int64_t dim = l->head_dim, last = unit->position + (first + count - 1) / l->group, from = lowest(l, unit->position + first / l->group);
    for (int64_t i = 0; i < count; i++) states[i] = (State){-INFINITY, 0};
    __builtin_memset(out, 0, (size_t)(count * dim) * sizeof(float));
    for (Block block = {from, 0, 0, 0}; block.token + block.count <= last;) {
        block = find(l, r, unit, block.token + block.count, last);
        if (count >= TURNED_FROM) turn(l->cached_keys + block.at, block.count, dim, turned);
        for (int64_t i = 0; i < count; i += TILE) {
            int64_t queries = least(count - i, TILE);
            Span spans[TILE];
            for (int64_t g = 0; g < queries; g++) spans[g] = seen(l, &block, unit->position + (first + i + g) / l->group);
            const float *keys = count >= TURNED_FROM ? turned : NULL;
            switch (queries) { /* a number that is known is worth a copy of the code */
                case 1: visit(1, l, &block, keys, spans, q + i * dim, states + i, out + i * dim); break;
                case 2: visit(2, l, &block, keys, spans, q + i * dim, states + i, out + i * dim); break;
                case 3: visit(3, l, &block, keys, spans, q + i * dim, states + i, out + i * dim); break;
                default: visit(4, l, &block, keys, spans, q + i * dim, states + i, out + i * dim);
            }
        }
    }
    for (int64_t i = 0; i < count; i++) {
        float part = 1.f / states[i].total;
        for (int64_t d = 0; d < dim; d++) out[i * dim + d] *= part;
    }
}

INLINE void place(const Layer *l, const Rows *r, const Unit *unit, int64_t token) {
    int64_t position = unit->position + token, from = (unit->token + token) * l->query_stride + unit->head * l->head_dim;
    int64_t at = address(l, r, unit, position);
    prepare(l, l->keys + from, l->cached_keys + at, l->key_norm, turned_by(r, unit, token), 1.f);
    __builtin_memcpy(l->cached_values + at, l->values + from, (size_t)l->head_dim * sizeof(float));
}

static void UNIT(const Layer *l, const Rows *r, const Unit *unit) {
    float q[HELD], out[HELD], scale = (float)(l->soft_cap != 0 ? l->scale / l->soft_cap : l->scale);
    int64_t dim = l->head_dim, all = unit->count * l->group, at_once = least(HELD / dim, MAX_QUERIES);
    for (int64_t token = 0; l->keys && token < unit->count; token++) place(l, r, unit, token);
    for (int64_t first = 0, count; l->out && first < all; first += count) {
        count = least(all - first, at_once);
        for (int64_t i = 0; i < count; i++) {
            int64_t token = (first + i) / l->group, column = (unit->head * l->group + (first + i) % l->group) * dim;
            const float *from = l->queries + (unit->token + token) * l->query_stride + column;
            prepare(l, from, q + i * dim, l->query_norm, turned_by(r, unit, token), scale);
        }
        attend(l, r, unit, first, count, q, out);
        for (int64_t i = 0; i < count; i++) {
            int64_t token = (first + i) / l->group, column = (unit->head * l->group + (first + i) % l->group) * dim;
            __builtin_memcpy(l->out + (unit->token + token) * l->out_stride + column, out + i * dim, (size_t)dim * sizeof(float));
        }
    }
}

#undef WIDE
#undef COLUMNS
#undef vec
#undef ivec
#undef load
#undef store
#undef where
#undef greater
#undef fold
#undef sums_of
#undef more
#undef greatest_of
#undef raise
#undef power
#undef cap_scores
#undef turned_by
#undef prepare
#undef score
#undef turn
#undef sum_lane
#undef score_columns
#undef score_turned
#undef weigh
#undef add
#undef gather
#undef visit
#undef attend
#undef place
#undef seen
#undef find
#undef address
#undef lowest
#undef least
