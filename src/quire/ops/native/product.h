#pragma once
#include <stdint.h>

#define GROUP 32
/* outputs that lie together */
#if defined(__x86_64__)
#define TILE 16
#define FLOAT_TILE 16
#else
#define TILE 4
#define FLOAT_TILE 12
#endif

enum { NIBBLES, NIBBLES_OFFSET, NIBBLES_WIDE, NIBBLES_OFFSET_WIDE, BYTES, BYTES_OFFSET, BYTES_WIDE, BYTES_OFFSET_WIDE, FLOATS };

typedef struct {
    const uint8_t *tiles;
    const float *bias; /* of whole tiles; may be missing */
    int64_t kind, inputs, outputs, tile_bytes;
} Matrix;

/* a group of four rows, rounded: values [8][4 rows][4], so that what is multiplied together lies together */
typedef struct {
    int8_t values[8][16];
    float scale[4], sum[4];
} Block;

/* does this CPU have the instructions? */
int can_multiply(void);
int can_multiply_floats(void);

/* rows first ... end of x, which are `stride` values apart; places in `out` are counted from row 0 */
void round_rows(const float *x, int64_t stride, int64_t first, int64_t end, int64_t groups, Block *out);
void gather_rows(const float *x, int64_t stride, int64_t first, int64_t end, int64_t inputs, float *out);

void multiply_tiles(const Matrix *m, const Block *x, int64_t rows, float *y, int64_t first, int64_t end);
void multiply_float_tiles(const Matrix *m, const float *x, int64_t rows, float *y, int64_t first, int64_t end);
