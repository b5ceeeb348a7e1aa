/* Attention of rows of tokens over a paged cache in float32. `paged_attention.py` says what it is given. */

#pragma once
#include <stdint.h>

typedef struct {                                    /* a layer; strides are in values */
    const float *queries, *keys, *values;           /* of the tokens; no keys: they are in the cache already */
    float *out, *cached_keys, *cached_values;       /* no out: keys and values go to the cache, and no attention is computed */
    const float *cosines, *sines, *query_norm, *key_norm; /* any may be missing */
    int64_t query_stride, out_stride, page_stride, head_stride;
    int64_t group, kv_heads, head_dim, half_turned, page_size, window;
    double scale, eps, soft_cap;                    /* soft_cap: 0 = none */
} Layer;

typedef struct {
    const int32_t *tables, *lengths, *starts;       /* starts: of each row's tokens, and where the last one ends */
    int64_t table_stride, count;
    const int64_t *turned;                          /* each token's row of cosines and sines; none: its position. It may be left out */
} Rows;

void attend_rows(const Layer *layer, const Rows *rows, int workers);
