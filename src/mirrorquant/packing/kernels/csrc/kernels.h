/* Layers with weights of two or three levels, for one processor family after another.
 *
 * A weight is a sum of sign planes: one plane for {-1, +1}; for {-1, 0, +1} two, w = (s0 + s1) / 2. Most kernels look
 * four products up at once: four inputs have only 16 signed sums, so these are tabulated, and four weights (a "nibble")
 * say which one is needed. What is tabulated and what lies side by side in a vector differs:
 *
 *   float activations   a table entry holds the sum for 16 output pixels; one nibble adds 16 x 4 products
 *                       (float_lookup.inc.h)
 *   binary and int8     a table is one register of bytes; one shuffle reads it for 32 or 64 output channels
 *                       (byte_lookup.inc.h)
 *   binary, AVX-512     no tables: the processor counts the bits that differ, for 16 output channels and 32 inputs
 *                       (binary_popcount.inc.h)
 *
 * Images are NHWC. A linear layer is a 1x1 convolution of an image one pixel high, as wide as the batch has rows.
 */
#ifndef MIRRORQUANT_KERNELS_H
#define MIRRORQUANT_KERNELS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define MQ_API __declspec(dllexport)
#else
#define MQ_API __attribute__((visibility("default")))
#endif

enum mq_path { MQ_PORTABLE = 1, MQ_AVX2 = 2, MQ_AVX512 = 3 };
enum mq_activation { MQ_FLOAT = 0, MQ_BINARY = 1, MQ_INT8 = 2 };
enum mq_status {
    MQ_OK = 0,
    MQ_BAD_PROBLEM = 1, /* the numbers of the layer contradict each other, or are too large */
    MQ_BAD_WEIGHT = 2,  /* the prepared weight is damaged, or was made for another layer */
    MQ_NO_MEMORY = 3,
    MQ_NO_PATH = 4, /* this processor, or this build, does not have the path */
};

/* A layer and its input; Python fills it as an array of 64-bit numbers, in this order. */
typedef struct {
    int64_t n, h, w, c;             /* input, all groups' channels */
    int64_t o, kh, kw, groups;      /* output channels, kernel */
    int64_t oh, ow;                 /* output */
    int64_t sy, sx, py, px, dy, dx; /* stride, padding, dilation */
    int64_t levels;                 /* 2 or 3 */
    int64_t activation, relu;
    int64_t path, threads;
} mq_layer;

/* What a kernel is called with: a checked layer, the parts of its weight, and the tensors. */
typedef struct {
    mq_layer is;
    int64_t planes;            /* sign planes: 1 or 2 */
    int64_t cg, og;            /* channels of one group, in and out */
    int64_t quads;             /* nibbles that hold the channels of one group: ceil(cg / 4) */
    int64_t taps;              /* kh * kw */
    int64_t pointwise;         /* whether this is a linear layer or a 1x1 convolution, in one group */
    int64_t rows;              /* of a linear layer's input; 0 for other layers */
    int64_t plane_bytes;       /* from one plane of a block to the next, in by_channel */
    int64_t words;             /* of 32 bits that hold the channels of one group: ceil(cg / 32) */
    int64_t block_bytes;       /* from one block to the next, in by_word */
    int64_t blocks8, blocks32, blocks64; /* blocks of output channels of one group, in the three layouts */
    const uint8_t *by_pixel;   /* float layout  [group][blocks8][ky * quads + quad][plane * kw + kx][8], nibble << 3 */
    const uint8_t *by_channel; /* byte layout   [group][blocks64][plane][ky][kx][quad][64], one nibble a byte; a
                                  pointwise layer [blocks64][plane][ceil(quads / 2)][64], two: it streams its weights */
    const uint8_t *by_word;    /* word layout   [group][blocks32][plane][ky][kx * words + word][32], 32-bit numbers; the
                                  second of two words in a kernel row is kept as its xor with the first */
    const uint8_t *pads;       /* [group][blocks32][ky][kx][32], 32-bit: the sum of the position's weights, all planes */
    const float *x, *scale, *shift, *residual; /* scale and shift have entries for whole blocks of 64 channels */
    float *y;
} mq_call;

/* One set of entry points a path. Each returns MQ_OK or MQ_NO_MEMORY. */
#define MQ_DECLARE_PATH(name)                                                                                          \
    int mq_float_##name(const mq_call *call);                                                                          \
    int mq_float_rows_##name(const mq_call *call);                                                                     \
    int mq_binary_##name(const mq_call *call);                                                                         \
    int mq_int8_##name(const mq_call *call);
MQ_DECLARE_PATH(portable)
MQ_DECLARE_PATH(avx2)
MQ_DECLARE_PATH(avx512)

static inline int64_t mq_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t mq_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t mq_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* 64-byte aligned memory, or NULL; freed with free(). */
void *mq_scratch(int64_t bytes);

/* relu?(value * scale + shift + residual): one rounding an operation, in this order, on every path. */
static inline float mq_finish(float value, float scale, float shift, const float *residual, int64_t relu) {
    value = value * scale;
    value = value + shift;
    if (residual) value = value + *residual;
    return relu && !(value > 0) ? (value != value ? value : 0.0f) : value;
}

/* x = step * q about, with q in -127..127: step = max|x| / 127, q = round(x / step). Returns the step; the entries of q
 * up to a multiple of four are filled with zeros. A row that is not finite has zeros for q and NaN for its step, which
 * makes all of its results NaN. Sizes are compared as integers, which have NaN above infinity above all numbers. */
static inline float mq_quantize_row(const float *x, int64_t count, int32_t *q) {
    const uint32_t infinite = UINT32_C(0x7f800000);
    uint32_t bits, largest = 0;
    for (int64_t i = 0; i < count; i++) {
        memcpy(&bits, x + i, sizeof bits);
        bits &= UINT32_C(0x7fffffff);
        largest = bits > largest ? bits : largest;
    }
    float step;
    memcpy(&step, &largest, sizeof step);
    step = largest >= infinite ? NAN : step / 127;
    for (int64_t i = 0; i < count; i++) {
        const float value = step > 0 ? rintf(x[i] / step) : 0;
        q[i] = (int32_t)(value > 127 ? 127 : value < -127 ? -127 : value); /* finite: a NaN step is not above 0 */
    }
    for (int64_t i = count; i < mq_ceil_div(count, 4) * 4; i++) q[i] = 0;
    return step;
}

#endif
