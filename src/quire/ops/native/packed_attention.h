/* Bidirectional attention over packed sequences in float32, without a KV cache: encoders. `packed_attention.py` describes it. */

#pragma once
#include <stdint.h>

#define MAX_PACKED_HEAD_DIM 256

typedef struct {                                /* a layer; strides are in elements */
    const float *queries, *keys, *values;       /* of the first token of the batch */
    float *out;
    const float *cosines, *sines;               /* [positions, half_rotated], by halves; may be NULL */
    const float *bias;                          /* [heads, 2 * reach + 1], column reach + key - query; may be NULL */
    int64_t stride, out_stride, heads, head_dim, half_rotated, reach;
    int64_t window;                             /* largest distance between a query and a key that it sees; -1: no limit */
    double scale;
} PackedLayer;

/* starts: of each sequence, and the end of the last one, `count` + 1 entries.
   keys: of each sequence, how many of its tokens, from the first one, are keys; `count` entries */
void attend_sequences(const PackedLayer *layer, const int32_t *starts, const int32_t *keys, int64_t count, int workers);
