/* Binary activations where the processor counts bits (AVX-512 with VPOPCNTDQ). Define before: PATH(name).
 *
 * 32 input channels are a word, set bits being +1; 16 output channels are a vector of words. The signs of x and w differ
 * where x ^ w is set, so the set bits of all words are to be counted. Word by word that takes three operations: xor,
 * count, add. Two words at a time take five, since only carries are counted. With `ones` the bits' sums modulo 2,
 *
 *     next  = ones ^ (x0 ^ x1) ^ (w0 ^ w1)              one vpternlog, for both brackets are known beforehand
 *     carry = ones ^ next ? ones : x0 ^ w0              the majority of ones, x0 ^ w0 and x1 ^ w1: where the latter two
 *     twos += count(carry), ones = next                 differ it is ones, else either of them
 *
 * The words of a kernel row are one run, in the weights and in the input: pairs, and a single word where they are odd.
 * Where kernel columns are dilated, an input row is stored as one phase after the other, columns c % dx == 0 first, so
 * that they are neighbours still. A padded position is a word of zeros, which counts as -1; pads undo that.
 */
#include "kernels.h"

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

enum {
    WORD = 32,        /* channels of a word */
    OUTPUTS = 32,     /* output channels of a block of weights: two vectors */
    TILE_PIXELS = 4,  /* by two vectors: 16 sums in registers, 4 vectors of weights, and room to work */
    PACKED_AHEAD = 8, /* words that may be read behind a row */
};

/* Two vectors that stay in registers, computed up to here: GCC 12 would otherwise reorder the work and spill. */
#if !defined(KEEP)
#define KEEP(a, b) __asm__ volatile("" : "+v"(a), "+v"(b))
#endif

/* The signs of the input: [group][n][padded row][phase][column][word], each a word and its xor with the one after it,
 * which is the next column's where it is the last of its own. */
typedef struct {
    uint32_t *words;
    int64_t rows;           /* with the padding */
    int64_t phases, phase;  /* dx where it matters, else 1; columns of a phase, with the padding */
    int64_t row, row_words; /* 32-bit numbers from a row to the next; its words, of two numbers each */
} bit_image;

/* The numbers of a column's words within a row. */
static inline int64_t bits_of_column(const mq_call *call, const bit_image *in, int64_t column) {
    const int64_t at = in->phases == 1 ? column : column % in->phases * in->phase + column / in->phases;
    return 2 * call->words * at;
}

/* The signs of one pixel's channels, to every second number; missing channels are -1, in the weights too. */
static inline void PATH(sign_words)(const float *x, int64_t channels, uint32_t *out) {
    const __m512 zero = _mm512_setzero_ps();
    for (; channels >= WORD; channels -= WORD, x += WORD, out += 2) {
        const uint32_t low = _mm512_cmp_ps_mask(_mm512_loadu_ps(x), zero, _CMP_GE_OQ);
        const uint32_t high = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + 16), zero, _CMP_GE_OQ);
        *out = low | high << 16;
    }
    if (channels <= 0) return;
    const uint32_t real = (UINT32_C(1) << channels) - 1;
    const __mmask16 first = (__mmask16)real, second = (__mmask16)(real >> 16);
    const uint32_t low = _mm512_mask_cmp_ps_mask(first, _mm512_maskz_loadu_ps(first, x), zero, _CMP_GE_OQ);
    uint32_t high = 0;
    if (second) high = _mm512_mask_cmp_ps_mask(second, _mm512_maskz_loadu_ps(second, x + 16), zero, _CMP_GE_OQ);
    *out = low | high << 16;
}

static void PATH(pack_row)(const mq_call *call, const bit_image *in, int64_t index) {
    const mq_layer *is = &call->is;
    const int64_t group = index / (is->n * in->rows), n = index / in->rows % is->n, y = index % in->rows - is->py;
    uint32_t *row = in->words + index * in->row;
    memset(row, 0, (size_t)in->row * sizeof *row);
    if (y < 0 || y >= is->h) return;
    const float *x = call->x + (n * is->h + y) * is->w * is->c + group * call->cg;
    for (int64_t column = 0; column < is->w; column++, x += is->c)
        PATH(sign_words)(x, call->cg, row + bits_of_column(call, in, column + is->px));
    for (int64_t i = 0; i < in->row_words; i += 8) { /* what was not reached yet has zeros for its second numbers */
        const __m512i here = _mm512_loadu_si512(row + 2 * i), after = _mm512_loadu_si512(row + 2 * i + 2);
        const __m512i both = _mm512_slli_epi64(_mm512_xor_si512(here, after), 32);
        _mm512_storeu_si512(row + 2 * i, _mm512_xor_si512(here, both));
    }
}

/* Sums of the pixels of a tile, and the vectors of a block. */
typedef struct {
    __m512i ones[TILE_PIXELS][2], twos[TILE_PIXELS][2];
} bit_sums;

/* The words of all runs; pixel[p] is where the window of the tile's pixel p begins in the input. Pixels and vectors are
 * constants where this is inlined: then all sums are in registers. */
static inline __attribute__((always_inline)) void PATH(count_bits)(const mq_call *call, const bit_image *in,
                                                                   const uint32_t *const *pixel, const uint8_t *weights,
                                                                   int pixels, int vectors, bit_sums *sums) {
    const mq_layer *is = &call->is;
    const int64_t run = is->kw * call->words;
#pragma GCC unroll 4
    for (int p = 0; p < pixels; p++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) sums->ones[p][v] = sums->twos[p][v] = _mm512_setzero_si512();
    for (int64_t plane = 0; plane < call->planes; plane++)
        for (int64_t ky = 0; ky < is->kh; ky++) {
            const int64_t offset = ky * is->dy * in->row;
            int64_t i = 0;
            for (; i + 2 <= run; i += 2, weights += 2 * OUTPUTS * 4) {
                __m512i w[2], both[2];
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++) {
                    w[v] = _mm512_loadu_si512(weights + v * 64);
                    both[v] = _mm512_loadu_si512(weights + OUTPUTS * 4 + v * 64);
                    KEEP(w[v], both[v]);
                }
#pragma GCC unroll 4
                for (int p = 0; p < pixels; p++) {
                    const uint32_t *at = pixel[p] + offset + 2 * i;
                    __m512i x = _mm512_set1_epi32((int)at[0]), x_both = _mm512_set1_epi32((int)at[1]);
                    KEEP(x, x_both);
#pragma GCC unroll 2
                    for (int v = 0; v < vectors; v++) {
                        const __m512i ones = sums->ones[p][v], differ = _mm512_xor_si512(x, w[v]);
                        const __m512i next = _mm512_ternarylogic_epi32(x_both, both[v], ones, 0x96);
                        const __m512i carry = _mm512_ternarylogic_epi32(ones, next, differ, 0xb2);
                        sums->ones[p][v] = next;
                        sums->twos[p][v] = _mm512_add_epi32(sums->twos[p][v], _mm512_popcnt_epi32(carry));
                        KEEP(sums->ones[p][v], sums->twos[p][v]);
                    }
                }
            }
            if (i == run) continue;
#pragma GCC unroll 4
            for (int p = 0; p < pixels; p++)
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++) {
                    const __m512i ones = sums->ones[p][v], w = _mm512_loadu_si512(weights + v * 64);
                    const __m512i x = _mm512_set1_epi32((int)pixel[p][offset + 2 * i]);
                    const __m512i next = _mm512_ternarylogic_epi32(x, w, ones, 0x96);
                    const __m512i carry = _mm512_andnot_si512(next, ones);
                    sums->ones[p][v] = next;
                    sums->twos[p][v] = _mm512_add_epi32(sums->twos[p][v], _mm512_popcnt_epi32(carry));
                }
            weights += OUTPUTS * 4;
        }
}

/* An output pixel, from which one steps to the next. */
typedef struct {
    int64_t n, y, x;
} place;

static inline void next_place(const mq_layer *is, place *at) {
    if (++at->x < is->ow) return;
    at->x = 0;
    if (++at->y < is->oh) return;
    at->y = 0;
    at->n++;
}

/* sum[v] += what the padded positions of a pixel's window were counted too low. */
static inline void PATH(undo_pads)(const mq_call *call, const place *at, int64_t block, int vectors, __m512i *sum) {
    const mq_layer *is = &call->is;
    const int64_t y = at->y * is->sy - is->py, x = at->x * is->sx - is->px;
    if (y >= 0 && x >= 0 && y + (is->kh - 1) * is->dy < is->h && x + (is->kw - 1) * is->dx < is->w) return;
    const uint8_t *pads = call->pads + block * call->taps * OUTPUTS * 4;
    for (int64_t ky = 0; ky < is->kh; ky++) {
        const int inside = y + ky * is->dy >= 0 && y + ky * is->dy < is->h;
        for (int64_t kx = 0; kx < is->kw; kx++, pads += OUTPUTS * 4)
            if (!inside || x + kx * is->dx < 0 || x + kx * is->dx >= is->w)
                for (int v = 0; v < vectors; v++)
                    sum[v] = _mm512_add_epi32(sum[v], _mm512_loadu_si512(pads + v * 64));
    }
}

/* 16 output channels of a pixel, finished and written: channel `first` of `group` and those after it. */
static inline void PATH(finish16)(const mq_call *call, int64_t pixel, int64_t group, int64_t first, __m512 value) {
    const mq_layer *is = &call->is;
    const int64_t at = pixel * is->o + group * call->og + first, constants = group * call->blocks64 * 64 + first;
    const int whole = first + 16 <= call->og;
    const __mmask16 real = (__mmask16)(whole ? 0xffff : (1u << (call->og - first)) - 1);
    value = _mm512_mul_ps(value, _mm512_loadu_ps(call->scale + constants));
    value = _mm512_add_ps(value, _mm512_loadu_ps(call->shift + constants));
    if (call->residual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(real, call->residual + at));
    if (is->relu) value = _mm512_max_ps(_mm512_setzero_ps(), value); /* keeps a NaN */
    if (whole)
        _mm512_storeu_ps(call->y + at, value);
    else
        _mm512_mask_storeu_ps(call->y + at, real, value);
}

/* Output pixels from `from` on, and one block of channels. */
static inline __attribute__((always_inline)) void PATH(bit_tile)(const mq_call *call, const bit_image *in,
                                                                 int64_t block, place *from, int pixels, int vectors) {
    const mq_layer *is = &call->is;
    const int64_t group = block / call->blocks32, first = block % call->blocks32 * OUTPUTS;
    const uint32_t *pixel[TILE_PIXELS];
    place places[TILE_PIXELS];
#pragma GCC unroll 4
    for (int p = 0; p < pixels; p++, next_place(is, from)) {
        places[p] = *from;
        const int64_t row = (group * is->n + from->n) * in->rows + from->y * is->sy;
        pixel[p] = in->words + row * in->row + bits_of_column(call, in, from->x * is->sx);
    }
    bit_sums sums;
    PATH(count_bits)(call, in, pixel, call->by_word + block * call->block_bytes, pixels, vectors, &sums);
    const __m512i products = _mm512_set1_epi32((int)(call->planes * call->taps * call->cg));
#pragma GCC unroll 4
    for (int p = 0; p < pixels; p++) {
        const place *at = &places[p];
        __m512i sum[2]; /* products - 2 * differences */
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            const __m512i ones = _mm512_popcnt_epi32(sums.ones[p][v]), twos = sums.twos[p][v];
            const __m512i differ = _mm512_add_epi32(ones, _mm512_slli_epi32(twos, 1));
            sum[v] = _mm512_sub_epi32(products, _mm512_slli_epi32(differ, 1));
        }
        PATH(undo_pads)(call, at, block, vectors, sum);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            PATH(finish16)(call, (at->n * is->oh + at->y) * is->ow + at->x, group, first + 16 * v,
                           _mm512_cvtepi32_ps(sum[v]));
    }
}

/* The items [first, end) of all [block][output pixel]. A block's weights stay in the first-level cache meanwhile. */
static void PATH(bit_items)(const mq_call *call, const bit_image *in, int64_t first, int64_t end) {
    const mq_layer *is = &call->is;
    const int64_t pixels = is->n * is->oh * is->ow;
    while (first < end) {
        const int64_t block = first / pixels, index = first % pixels, last = mq_min(end, (block + 1) * pixels);
        const int64_t channels = call->og - block % call->blocks32 * OUTPUTS;
        place at = {index / is->ow / is->oh, index / is->ow % is->oh, index % is->ow};
        for (; first < last; first += TILE_PIXELS)
            switch (mq_min(TILE_PIXELS, last - first) * 2 + (channels > 16)) {
            case 2: PATH(bit_tile)(call, in, block, &at, 1, 1); break;
            case 3: PATH(bit_tile)(call, in, block, &at, 1, 2); break;
            case 4: PATH(bit_tile)(call, in, block, &at, 2, 1); break;
            case 5: PATH(bit_tile)(call, in, block, &at, 2, 2); break;
            case 6: PATH(bit_tile)(call, in, block, &at, 3, 1); break;
            case 7: PATH(bit_tile)(call, in, block, &at, 3, 2); break;
            case 8: PATH(bit_tile)(call, in, block, &at, 4, 1); break;
            default: PATH(bit_tile)(call, in, block, &at, 4, 2); break;
            }
        first = last;
    }
}

int PATH(mq_binary)(const mq_call *call) {
    const mq_layer *is = &call->is;
    bit_image in = {.rows = is->h + 2 * is->py, .phases = is->kw > 1 ? is->dx : 1};
    in.phase = mq_ceil_div(is->w + 2 * is->px, in.phases);
    in.row_words = in.phases * in.phase * call->words;
    in.row = 2 * (mq_ceil_div(in.row_words, 8) * 8 + PACKED_AHEAD);
    const int64_t rows = is->groups * is->n * in.rows;
    const int64_t items = is->groups * call->blocks32 * is->n * is->oh * is->ow;
    const int64_t threads = mq_min(is->threads, mq_ceil_div(items, TILE_PIXELS));
    in.words = mq_scratch(rows * in.row * (int64_t)sizeof *in.words);
    if (!in.words) return MQ_NO_MEMORY;
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) PATH(pack_row)(call, &in, row);
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++)
        PATH(bit_items)(call, &in, items * thread / threads, items * (thread + 1) / threads);
    free(in.words);
    return MQ_OK;
}
