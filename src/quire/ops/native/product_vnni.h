/* `product.c` for AVX-512's dot products of 16 times 4 numbers of 8 bits, of which the first are not signed: what is signed in a
   matrix is raised by 8 or 128, and the sum of the row's numbers takes that off again. Four sums of a tile, each of every fourth
   four inputs, lie side by side until the end. */

/* 32 numbers of a row -> one of four places of a block */
INLINE void round_group(const float *x, Block *block, int place) {
    __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    float greatest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    __m512 inverse = _mm512_set1_ps(greatest > 0 ? 127.f / greatest : 0.f);
    __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    int32_t fours[8];
    _mm_storeu_si128((__m128i *)fours, _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(fours + 4), _mm512_cvtepi32_epi8(second));
    for (int i = 0; i < 8; i++) __builtin_memcpy(block->numbers[i] + 4 * place, &fours[i], 4);
    block->scale[place] = greatest / 127.f;
    block->sum[place] = block->scale[place] * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
}

INLINE __m128 four(const uint8_t *from, int wide) {
    return wide ? _mm_loadu_ps((const float *)from) : _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)from));
}

INLINE void keep(__m512 sums, __m128 shift, const Matrix *m, int64_t first, float *y) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    __m128 all = _mm_add_ps(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)), shift);
    if (m->bias) all = _mm_add_ps(all, _mm_loadu_ps(m->bias + first));
    int64_t count = m->outputs - first < TILE ? m->outputs - first : TILE;
    _mm_mask_storeu_ps(y + first, (__mmask8)((1 << count) - 1), all);
}

/* Rows are written out one by one: a compiler does not keep an array in registers. */
#define ROWS(DO) DO(0, x, 0) DO(1, x, 1) DO(2, x, 2) DO(3, x, 3) DO(4, other, 0) DO(5, other, 1) DO(6, other, 2) DO(7, other, 3)
#define DECLARE(r, block, lane) __m512 out##r = _mm512_setzero_ps(); __m128 shift##r = _mm_setzero_ps();
#define DOT(r, block, lane)                                                                                              \
    if (rows > r) {                                                                                                      \
        __m512i sum = _mm512_dpbusd_epi32(zero, some, _mm512_shuffle_epi32(some_of_##block, lane * 0x55));               \
        sum = _mm512_dpbusd_epi32(sum, rest, _mm512_shuffle_epi32(rest_of_##block, lane * 0x55));                        \
        out##r = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scales, _mm512_set1_ps(block->scale[lane])), out##r); \
        shift##r = _mm_fmadd_ps(offset, _mm_set1_ps(block->sum[lane]), shift##r);                                        \
    }
#define KEEP(r, block, lane) if (rows > r) keep(out##r, shift##r, m, tile * TILE, y + r * m->outputs);

/* the outputs of one tile, for up to 8 rows */
INLINE void run_tile(int bits, int offsets, int wide, int rows, const Matrix *m, int64_t tile, const Block *x, float *y) {
    const __m512i zero = _mm512_setzero_si512(), nibble = _mm512_set1_epi8(15);
    const __m512i raise = _mm512_set1_epi8(bits == 8 ? (char)128 : (char)0x88);
    const __m128 raised = _mm_set1_ps(bits == 8 ? -128.f : -8.f);
    const uint8_t *w = m->tiles + tile * m->tile_bytes;
    const int64_t groups = m->inputs / GROUP;
    const int size = wide ? 16 : 8;
    const Block *other = x + (rows > 4 ? groups : 0), *end = x + groups;
    ROWS(DECLARE)
    for (; x < end; x++, other++) {
        for (int i = 0; i < 16 * bits; i += 64) _mm_prefetch((const char *)w + AHEAD + i, _MM_HINT_T0);
        __m512i some = _mm512_loadu_si512(w), rest, some_of_x = _mm512_loadu_si512(x->numbers[0]), rest_of_x = _mm512_loadu_si512(x->numbers[4]);
        __m512i some_of_other = _mm512_loadu_si512(other->numbers[0]), rest_of_other = _mm512_loadu_si512(other->numbers[4]);
        if (bits == 8) {
            some = _mm512_xor_si512(some, raise), rest = _mm512_xor_si512(_mm512_loadu_si512(w + 64), raise);
        } else { /* every second four inputs, then the others */
            if (!offsets) some = _mm512_xor_si512(some, raise);
            rest = _mm512_and_si512(_mm512_srli_epi16(some, 4), nibble), some = _mm512_and_si512(some, nibble);
            __m512i first = some_of_x, first_of_other = some_of_other;
            some_of_x = _mm512_shuffle_i64x2(first, rest_of_x, 0x88), rest_of_x = _mm512_shuffle_i64x2(first, rest_of_x, 0xDD);
            some_of_other = _mm512_shuffle_i64x2(first_of_other, rest_of_other, 0x88);
            rest_of_other = _mm512_shuffle_i64x2(first_of_other, rest_of_other, 0xDD);
        }
        w += 16 * bits;
        __m128 scale = four(w, wide), offset = offsets ? four(w + size, wide) : _mm_setzero_ps();
        if (bits == 8 || !offsets) offset = _mm_fmadd_ps(scale, raised, offset);
        __m512 scales = _mm512_broadcast_f32x4(scale);
        w += size * (1 + offsets);
        ROWS(DOT)
    }
    ROWS(KEEP)
}
