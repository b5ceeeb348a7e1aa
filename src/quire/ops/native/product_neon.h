/* `product.c` for ARM's dot products of 4 times 4 values of 8 bits. */

#if !defined(__clang__)
#pragma GCC optimize("no-schedule-insns") /* it would line up what can run side by side */
#endif

/* 32 values of a row -> one of four places of a block. Their sum is that of the rounded values: an offset then errs with its
   values, which are together smaller than either. */
INLINE void round_group(const float *x, Block *block, int place) {
    float32x4_t v[8], most;
    for (int i = 0; i < 8; i++) v[i] = vld1q_f32(x + 4 * i);
    most = vabsq_f32(v[0]);
    for (int i = 1; i < 8; i++) most = vmaxq_f32(most, vabsq_f32(v[i]));
    float greatest = vmaxvq_f32(most), inverse = greatest > 0 ? 127.f / greatest : 0.f;
    int32x4_t sum = vdupq_n_s32(0);
    for (int i = 0; i < 8; i += 2) {
        int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(v[i], inverse)), high = vcvtnq_s32_f32(vmulq_n_f32(v[i + 1], inverse));
        int8x8_t both = vmovn_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high)));
        vst1_lane_s32((int32_t *)block->values[i] + place, vreinterpret_s32_s8(both), 0);
        vst1_lane_s32((int32_t *)block->values[i + 1] + place, vreinterpret_s32_s8(both), 1);
        sum = vaddq_s32(sum, vaddq_s32(low, high));
    }
    block->scale[place] = greatest / 127.f;
    block->sum[place] = block->scale[place] * (float)vaddvq_s32(sum);
}

INLINE float32x4_t four(const uint8_t *from, int wide) {
    if (wide) return vld1q_f32((const float *)from);
    return vcvt_f32_f16(vld1_f16((const float16_t *)from));
}

INLINE void keep(float32x4_t sums, float unit, const Matrix *m, int64_t first, float *y) {
    if (unit != 1.f) sums = vmulq_n_f32(sums, unit);
    if (m->bias) sums = vaddq_f32(sums, vld1q_f32(m->bias + first));
    if (m->outputs - first >= TILE) {
        vst1q_f32(y + first, sums);
        return;
    }
    float some[TILE];
    vst1q_f32(some, sums);
    for (int64_t i = first; i < m->outputs; i++) y[i] = some[i - first];
}

#define MAGIC 0x4B400000 /* 1.5 * 2^23: integers that are added to its bits are added to the float */

/* Rows are written out one by one: a compiler does not keep an array in registers. */
#define ROWS(DO) DO(0, x0, 0) DO(1, x0, 1) DO(2, x0, 2) DO(3, x0, 3) DO(4, x1, 0) DO(5, x1, 1) DO(6, x1, 2) DO(7, x1, 3)
#define DECLARE(r, x, lane) float32x4_t out##r = vdupq_n_f32(0);
/* by a load, for the units that calculate are busy */
#define BEGIN(r, x, lane) int32x4_t sum##r; if (rows > r) __asm__ volatile("ldr %q0, %1" : "=w"(sum##r) : "Q"(magic));
#define DOT(r, x, lane) if (rows > r) sum##r = vdotq_laneq_s32(sum##r, values, x, lane);
#define SCALE(r, x, lane) \
    if (rows > r) out##r = vfmaq_f32(out##r, vsubq_f32(vreinterpretq_f32_s32(sum##r), begun), vmulq_laneq_f32(scale, scale_##x, lane));
#define SHIFT(r, x, lane) if (rows > r) out##r = vfmaq_laneq_f32(out##r, offset, sum_##x, lane);
#define KEEP(r, x, lane) if (rows > r) keep(out##r, unit, m, tile * TILE, y + r * m->outputs);

/* the outputs of one tile, for up to 8 rows */
INLINE void run_tile(int bits, int offsets, int wide, int rows, const Matrix *m, int64_t tile, const Block *x, float *y) {
    static const int32_t magic[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
    const float32x4_t begun = vreinterpretq_f32_s32(vdupq_n_s32(MAGIC));
    const uint8_t *w = m->tiles + tile * m->tile_bytes;
    const int64_t groups = m->inputs / GROUP;
    const Block *other = x + (rows > 4 ? groups : 0), *end = x + groups;
    const float unit = bits == 4 && !offsets ? 1.f / 16 : 1.f; /* signed values stand in the upper halves of bytes */
    ROWS(DECLARE)
    for (; x < end; x++, other++) {
        for (int i = 0; i < 16 * bits; i += 64) __builtin_prefetch(w + AHEAD + i);
        ROWS(BEGIN)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i += bits == 4 ? 2 : 1, w += 16) {
            uint8x16_t taken = vld1q_u8(w);
            int8x16_t values, x0, x1;
            if (bits == 8) {
                values = vreinterpretq_s8_u8(taken), x0 = vld1q_s8(x->values[i]), x1 = vld1q_s8(other->values[i]);
                ROWS(DOT)
                continue;
            }
            values = vreinterpretq_s8_u8(offsets ? vandq_u8(taken, vdupq_n_u8(15)) : vshlq_n_u8(taken, 4));
            x0 = vld1q_s8(x->values[i]), x1 = vld1q_s8(other->values[i]);
            ROWS(DOT)
            values = vreinterpretq_s8_u8(offsets ? vshrq_n_u8(taken, 4) : vandq_u8(taken, vdupq_n_u8(0xF0)));
            x0 = vld1q_s8(x->values[i + 1]), x1 = vld1q_s8(other->values[i + 1]);
            ROWS(DOT)
        }
        const int size = wide ? 16 : 8;
        float32x4_t scale = four(w, wide), scale_x0 = vld1q_f32(x->scale), scale_x1 = vld1q_f32(other->scale);
        w += size;
        if (offsets) {
            float32x4_t offset = four(w, wide), sum_x0 = vld1q_f32(x->sum), sum_x1 = vld1q_f32(other->sum);
            ROWS(SHIFT)
            w += size;
        }
        ROWS(SCALE)
    }
    ROWS(KEEP)
}
