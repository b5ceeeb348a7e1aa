/* `product.c` for AVX-512's dot products of 16 times 4 values of 8 bits, of which the first are not signed: what is signed in a
   matrix is raised by 8 or 128, and the sum of the row's values takes that off again. */

/* 32 values of a row -> one of four places of a block */
INLINE void round_group(const float *x, Block *block, int place) {
    __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    float greatest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    __m512 inverse = _mm512_set1_ps(greatest > 0 ? 127.f / greatest : 0.f);
    __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    int32_t fours[8];
    _mm_storeu_si128((__m128i *)fours, _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(fours + 4), _mm512_cvtepi32_epi8(second));
    for (int i = 0; i < 8; i++) __builtin_memcpy(block->values[i] + 4 * place, &fours[i], 4);
    block->scale[place] = greatest / 127.f;
    block->sum[place] = block->scale[place] * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
}

INLINE __m512 sixteen(const uint8_t *from, int wide) {
    return wide ? _mm512_loadu_ps((const float *)from) : _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

INLINE void keep(__m512 sums, const Matrix *m, int64_t first, float *y) {
    if (m->bias) sums = _mm512_add_ps(sums, _mm512_loadu_ps(m->bias + first));
    int64_t count = m->outputs - first < TILE ? m->outputs - first : TILE;
    _mm512_mask_storeu_ps(y + first, (__mmask16)((1 << count) - 1), sums);
}

/* Rows are written out one by one: a compiler does not keep an array in registers. */
#define ROWS(DO) DO(0, x, 0) DO(1, x, 1) DO(2, x, 2) DO(3, x, 3) DO(4, other, 0) DO(5, other, 1) DO(6, other, 2) DO(7, other, 3)
#define DECLARE(r, block, lane) __m512 out##r = _mm512_setzero_ps();
#define BEGIN(r, block, lane) __m512i sum##r = _mm512_setzero_si512();
#define DOT(r, block, lane) \
    if (rows > r) sum##r = _mm512_dpbusd_epi32(sum##r, values, _mm512_set1_epi32(((const int32_t *)block->values[at])[lane]));
#define SCALE(r, block, lane)                                                                                                    \
    if (rows > r) {                                                                                                              \
        out##r = _mm512_fmadd_ps(offset, _mm512_set1_ps(block->sum[lane]), out##r);                                              \
        out##r = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum##r), _mm512_mul_ps(scale, _mm512_set1_ps(block->scale[lane])), out##r);  \
    }
#define KEEP(r, block, lane) if (rows > r) keep(out##r, m, tile * TILE, y + r * m->outputs);

/* the outputs of one tile, for up to 8 rows */
INLINE void run_tile(int bits, int offsets, int wide, int rows, const Matrix *m, int64_t tile, const Block *x, float *y) {
    const __m512i nibble = _mm512_set1_epi8(15), raise = _mm512_set1_epi8(bits == 8 ? (char)128 : (char)0x88);
    const __m512 raised = _mm512_set1_ps(bits == 8 ? -128.f : -8.f);
    const uint8_t *w = m->tiles + tile * m->tile_bytes;
    const int64_t groups = m->inputs / GROUP;
    const int size = TILE * (wide ? 4 : 2);
    const Block *other = x + (rows > 4 ? groups : 0), *end = x + groups;
    ROWS(DECLARE)
    for (; x < end; x++, other++) {
        for (int i = 0; i < 4 * TILE * bits; i += 64) _mm_prefetch((const char *)w + AHEAD + i, _MM_HINT_T0);
        ROWS(BEGIN)
#pragma GCC unroll 8
        for (int at = 0; at < 8; at++) {
            __m512i values = _mm512_loadu_si512(w + (bits == 8 ? at : at / 2) * 64);
            if (bits == 8 || !offsets) values = _mm512_xor_si512(values, raise);
            if (bits == 4) values = _mm512_and_si512(at % 2 ? _mm512_srli_epi16(values, 4) : values, nibble);
            ROWS(DOT)
        }
        w += 4 * TILE * bits;
        __m512 scale = sixteen(w, wide), offset = offsets ? sixteen(w + size, wide) : _mm512_setzero_ps();
        if (bits == 8 || !offsets) offset = _mm512_fmadd_ps(scale, raised, offset);
        w += size * (1 + offsets);
        ROWS(SCALE)
    }
    ROWS(KEEP)
}
