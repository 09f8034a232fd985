/* Binary activations (AVX2 alone), int8 ones, and float ones in few rows: a template. Define before: PATH(name), and
 * VECTOR_LANES = 8 (AVX2) or 16 (AVX-512).
 *
 * The 16 signed sums of four inputs are bytes here, and the table of them is a register. One byte shuffle looks it up
 * for as many output channels as a vector has bytes, the nibbles of their weights being the indices.
 */
#include "kernels.h"

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#if VECTOR_LANES == 16
typedef __m512i bytes;
typedef __m512 floats;
enum { BYTES = 64 };
static inline bytes load(const void *p) { return _mm512_loadu_si512(p); }
static inline void store(void *p, bytes v) { _mm512_storeu_si512(p, v); }
static inline bytes repeat16(const void *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(p)); }
static inline bytes shuffle(bytes table, bytes index) { return _mm512_shuffle_epi8(table, index); }
static inline bytes set8(int v) { return _mm512_set1_epi8((char)v); }
static inline bytes set16(int v) { return _mm512_set1_epi16((short)v); }
static inline bytes set32(int v) { return _mm512_set1_epi32(v); }
static inline bytes add8(bytes a, bytes b) { return _mm512_add_epi8(a, b); }
static inline bytes add16(bytes a, bytes b) { return _mm512_add_epi16(a, b); }
static inline bytes sub16(bytes a, bytes b) { return _mm512_sub_epi16(a, b); }
static inline bytes add32(bytes a, bytes b) { return _mm512_add_epi32(a, b); }
static inline bytes and_(bytes a, bytes b) { return _mm512_and_si512(a, b); }
static inline bytes left16(bytes a, int by) { return _mm512_slli_epi16(a, (unsigned)by); }
static inline bytes right16(bytes a, int by) { return _mm512_srli_epi16(a, (unsigned)by); }
static inline bytes interleave_low(bytes a, bytes b) { return _mm512_unpacklo_epi16(a, b); }
static inline bytes interleave_high(bytes a, bytes b) { return _mm512_unpackhi_epi16(a, b); }
static inline bytes multiply_pairs(bytes a, bytes b) { return _mm512_madd_epi16(a, b); }
static inline floats to_floats(bytes a) { return _mm512_cvtepi32_ps(a); }
static inline floats fsplat(float v) { return _mm512_set1_ps(v); }
static inline floats fload(const float *p) { return _mm512_loadu_ps(p); }
static inline void fstore(float *p, floats v) { _mm512_storeu_ps(p, v); }
static inline floats fadd(floats a, floats b) { return _mm512_add_ps(a, b); }
static inline floats fmul(floats a, floats b) { return _mm512_mul_ps(a, b); }
static inline floats positive(floats a) { return _mm512_max_ps(_mm512_setzero_ps(), a); } /* keeps a NaN */
#else
typedef __m256i bytes;
typedef __m256 floats;
enum { BYTES = 32 };
static inline bytes load(const void *p) { return _mm256_loadu_si256(p); }
static inline void store(void *p, bytes v) { _mm256_storeu_si256(p, v); }
static inline bytes repeat16(const void *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(p)); }
static inline bytes shuffle(bytes table, bytes index) { return _mm256_shuffle_epi8(table, index); }
static inline bytes set8(int v) { return _mm256_set1_epi8((char)v); }
static inline bytes set16(int v) { return _mm256_set1_epi16((short)v); }
static inline bytes set32(int v) { return _mm256_set1_epi32(v); }
static inline bytes add8(bytes a, bytes b) { return _mm256_add_epi8(a, b); }
static inline bytes add16(bytes a, bytes b) { return _mm256_add_epi16(a, b); }
static inline bytes sub16(bytes a, bytes b) { return _mm256_sub_epi16(a, b); }
static inline bytes add32(bytes a, bytes b) { return _mm256_add_epi32(a, b); }
static inline bytes and_(bytes a, bytes b) { return _mm256_and_si256(a, b); }
static inline bytes left16(bytes a, int by) { return _mm256_slli_epi16(a, by); }
static inline bytes right16(bytes a, int by) { return _mm256_srli_epi16(a, by); }
static inline bytes interleave_low(bytes a, bytes b) { return _mm256_unpacklo_epi16(a, b); }
static inline bytes interleave_high(bytes a, bytes b) { return _mm256_unpackhi_epi16(a, b); }
static inline bytes multiply_pairs(bytes a, bytes b) { return _mm256_madd_epi16(a, b); }
static inline floats to_floats(bytes a) { return _mm256_cvtepi32_ps(a); }
static inline floats fsplat(float v) { return _mm256_set1_ps(v); }
static inline floats fload(const float *p) { return _mm256_loadu_ps(p); }
static inline void fstore(float *p, floats v) { _mm256_storeu_ps(p, v); }
static inline floats fadd(floats a, floats b) { return _mm256_add_ps(a, b); }
static inline floats fmul(floats a, floats b) { return _mm256_mul_ps(a, b); }
static inline floats positive(floats a) { return _mm256_max_ps(_mm256_setzero_ps(), a); } /* keeps a NaN */
#endif

enum {
    BLOCK = 64, /* output channels of a block of weights */
    VECTORS = BLOCK / BYTES,
    WORDS = BYTES / 2,   /* 16-bit numbers in a vector */
    NUMBERS = BYTES / 4, /* 32-bit numbers in a vector */
};

/* Two sums that stay in registers, computed up to here: GCC 12 would otherwise reorder the loop's work and spill them.
 */
#if !defined(KEEP_ORDER)
#define KEEP_ORDER(a, b) __asm__ volatile("" : "+v"(a), "+v"(b) : : "memory")
#endif

/* Values of up to 64 output channels of a pixel, finished and written. */
static inline void finish_block(const mq_call *call, int64_t pixel, int64_t block, const float *values) {
    const mq_layer *is = &call->is;
    const int64_t group = block / call->blocks64, first = block % call->blocks64 * BLOCK;
    const int64_t count = mq_min(BLOCK, call->og - first), at = pixel * is->o + group * call->og + first;
    const float *scale = call->scale + block * BLOCK, *shift = call->shift + block * BLOCK;
    const float *residual = call->residual ? call->residual + at : NULL;
    int64_t o = 0;
    for (; o + NUMBERS <= count; o += NUMBERS) {
        floats v = fadd(fmul(fload(values + o), fload(scale + o)), fload(shift + o));
        if (residual) v = fadd(v, fload(residual + o));
        fstore(call->y + at + o, is->relu ? positive(v) : v);
    }
    for (; o < count; o++)
        call->y[at + o] = mq_finish(values[o], scale[o], shift[o], residual ? residual + o : NULL, is->relu);
}

/* ---- Binary activations ------------------------------------------------------------------------------------------
 *
 * The table of four signs counts how many differ from the four weights: 0 to 4, which takes half a byte. So one table
 * serves two pixels, the first in the low halves and the second in the high ones. Three look-ups are added up before
 * the halves would overflow (3 * 4 < 16). Then, in bytes and modulo 256,
 *
 *     all += sum;  moved += sum >> 4        (the shift is one of 16-bit words)
 *
 * for at most 63 look-ups, whose counts fit a byte (63 * 4 < 256). With L and H the counts of the two pixels, even and
 * odd channels being the bytes of a word, all = L + 16 H in each byte; moved = H in the odd one, and H + 16 L(odd) in
 * the even one, into which the shift moved its neighbour's low half. So H(odd), L(odd), H(even) and L(even) follow.
 *
 * A padded position contributes nothing if it differs in half of its signs: its table holds 2 everywhere. That is the
 * 17th sign nibble, so tables are numbered 17 * first + second.
 */
#if VECTOR_LANES == 8 /* AVX-512 has better: binary_popcount.inc.h */
enum { PADDING = 16, NIBBLES = 17, PAIR_TABLES = NIBBLES * NIBBLES, RUN = 63, SPARE = 16 };
enum { PIXEL_PAIRS = 2, PIXELS = 2 * PIXEL_PAIRS };

/* How many signs differ, for every nibble of signs and of weights. */
static void make_single_tables(uint8_t single[NIBBLES][16]) {
    for (int nibble = 0; nibble < NIBBLES; nibble++)
        for (int w = 0; w < 16; w++) {
            const int differ = nibble ^ w;
            const int count = (differ & 1) + (differ >> 1 & 1) + (differ >> 2 & 1) + (differ >> 3 & 1);
            single[nibble][w] = (uint8_t)(nibble == PADDING ? 2 : count);
        }
}

static void make_pair_tables(uint8_t *tables) {
    uint8_t single[NIBBLES][16];
    make_single_tables(single);
    for (int first = 0; first < NIBBLES; first++)
        for (int second = 0; second < NIBBLES; second++) {
            const __m128i low = _mm_loadu_si128((const __m128i *)single[first]);
            const __m128i high = _mm_slli_epi16(_mm_loadu_si128((const __m128i *)single[second]), 4);
            _mm_storeu_si128((__m128i *)(tables + 16 * (NIBBLES * first + second)), _mm_add_epi8(low, high));
        }
}

/* The nibbles of sign(x), a set bit for x >= 0; missing channels count as -1, in the weights too. */
static inline void PATH(sign_nibbles)(const float *x, int64_t channels, uint8_t *nibble) {
    const __m256 zero = _mm256_setzero_ps();
    for (; channels >= 32; channels -= 32, x += 32, nibble += 8) {
        uint64_t bits = 0;
        for (int i = 0; i < 4; i++) {
            const __m256 positive = _mm256_cmp_ps(_mm256_loadu_ps(x + 8 * i), zero, _CMP_GE_OQ);
            bits |= (uint64_t)(unsigned)_mm256_movemask_ps(positive) << 8 * i;
        }
        bits = (bits | bits << 16) & UINT64_C(0x0000ffff0000ffff); /* one nibble a byte */
        bits = (bits | bits << 8) & UINT64_C(0x00ff00ff00ff00ff);
        bits = (bits | bits << 4) & UINT64_C(0x0f0f0f0f0f0f0f0f);
        memcpy(nibble, &bits, 8);
    }
    for (; channels > 0; channels -= 4, x += 4, nibble++) {
        unsigned bits = 0;
        for (int i = 0; i < 4 && i < channels; i++) bits |= (unsigned)(x[i] >= 0) << i;
        *nibble = (uint8_t)bits;
    }
}

/* The input as offsets of pair tables: [group][n][padded row][padded column][quad], each for the pixel there and the
 * one that the next output pixel sees in its place, one stride to the right. */
typedef struct {
    uint16_t *offsets;
    int64_t rows, columns; /* with the padding */
} signs;

static void PATH(make_row)(const mq_call *call, const signs *in, int64_t index, uint8_t *restrict nibbles) {
    const mq_layer *is = &call->is;
    const int64_t group = index / (is->n * in->rows), n = index / in->rows % is->n, y = index % in->rows - is->py;
    uint16_t *restrict offsets = in->offsets + index * in->columns * call->quads;
    memset(nibbles, PADDING, (size_t)((in->columns + is->sx) * call->quads));
    if (y >= 0 && y < is->h)
        for (int64_t x = 0; x < is->w; x++)
            PATH(sign_nibbles)(call->x + ((n * is->h + y) * is->w + x) * is->c + group * call->cg, call->cg,
                               nibbles + (x + is->px) * call->quads);
    const uint8_t *partner = nibbles + is->sx * call->quads;
    for (int64_t i = 0; i < in->columns * call->quads; i++)
        offsets[i] = (uint16_t)(16 * (NIBBLES * nibbles[i] + partner[i]));
}

/* Counts of differing signs, for the pixels of a tile and the channels of a block, in 16-bit words. */
typedef struct {
    bytes even[PIXELS][VECTORS], odd[PIXELS][VECTORS];
} word_counts;

/* Adds a run of at most RUN quads. */
static inline __attribute__((always_inline)) void PATH(count_run)(const uint8_t *tables, const uint16_t *const *at,
                                                                  int64_t start, int64_t length, const uint8_t *weights,
                                                                  word_counts *counts) {
    bytes all[PIXEL_PAIRS][VECTORS], moved[PIXEL_PAIRS][VECTORS];
#pragma GCC unroll 4
    for (int pair = 0; pair < PIXEL_PAIRS; pair++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) all[pair][v] = moved[pair][v] = set8(0);
    int64_t i = start;
    for (; i + 3 <= start + length; i += 3, weights += 3 * BLOCK) {
#pragma GCC unroll 4
        for (int pair = 0; pair < PIXEL_PAIRS; pair++) {
            uint64_t three; /* offsets, and a fourth that is not used: one load, for load ports are scarce */
            memcpy(&three, at[pair] + i, sizeof three);
            const bytes t0 = repeat16(tables + (three & 0xffff)), t1 = repeat16(tables + (three >> 16 & 0xffff)),
                        t2 = repeat16(tables + (three >> 32 & 0xffff));
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                const uint8_t *w = weights + v * BYTES;
                const bytes two = add8(shuffle(t0, load(w)), shuffle(t1, load(w + BLOCK)));
                const bytes sum = add8(two, shuffle(t2, load(w + 2 * BLOCK)));
                all[pair][v] = add8(all[pair][v], sum);
                moved[pair][v] = add8(moved[pair][v], right16(sum, 4));
                KEEP_ORDER(all[pair][v], moved[pair][v]);
            }
        }
    }
    for (; i < start + length; i++, weights += BLOCK)
#pragma GCC unroll 4
        for (int pair = 0; pair < PIXEL_PAIRS; pair++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                const bytes sum = shuffle(repeat16(tables + at[pair][i]), load(weights + v * BYTES));
                all[pair][v] = add8(all[pair][v], sum);
                moved[pair][v] = add8(moved[pair][v], right16(sum, 4));
            }
#pragma GCC unroll 4
    for (int pair = 0; pair < PIXEL_PAIRS; pair++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            const bytes low_byte = set16(255);
            const bytes high_odd = right16(moved[pair][v], 8);
            const bytes low_odd = and_(sub16(right16(all[pair][v], 8), left16(high_odd, 4)), low_byte);
            const bytes high_even = and_(sub16(moved[pair][v], left16(low_odd, 4)), low_byte);
            const bytes low_even = and_(sub16(all[pair][v], left16(high_even, 4)), low_byte);
            counts->even[2 * pair][v] = add16(counts->even[2 * pair][v], low_even);
            counts->odd[2 * pair][v] = add16(counts->odd[2 * pair][v], low_odd);
            counts->even[2 * pair + 1][v] = add16(counts->even[2 * pair + 1][v], high_even);
            counts->odd[2 * pair + 1][v] = add16(counts->odd[2 * pair + 1][v], high_odd);
        }
}

/* The counts of a pixel, in the order of the channels. */
static inline void PATH(in_order)(const word_counts *counts, int pixel, uint16_t *out) {
    for (int v = 0; v < VECTORS; v++) {
        const bytes even = counts->even[pixel][v], odd = counts->odd[pixel][v];
        uint16_t half[2][WORDS]; /* interleaving works within 16 bytes: channels 16 q .. 16 q + 7, and the next eight */
        store(half[0], interleave_low(even, odd));
        store(half[1], interleave_high(even, odd));
        for (int eight = 0; eight < BYTES / 8; eight++)
            memcpy(out + v * BYTES + eight * 8, half[eight % 2] + eight / 2 * 8, 16);
    }
}

/* y = (products - 2 * counts), finished, for up to 64 channels of a pixel; more are counts beyond 16 bits, or NULL. */
static inline void PATH(finish_counts)(const mq_call *call, int64_t pixel, int64_t block, int64_t products,
                                       const uint16_t *counts, const int32_t *more) {
    const mq_layer *is = &call->is;
    const int64_t group = block / call->blocks64, first = block % call->blocks64 * BLOCK;
    const int64_t channels = mq_min(BLOCK, call->og - first), at = pixel * is->o + group * call->og + first;
    const float *scale = call->scale + block * BLOCK, *shift = call->shift + block * BLOCK;
    const float *residual = call->residual ? call->residual + at : NULL;
    for (int64_t o = 0; o < channels; o += 8) {
        __m256i differ = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(counts + o)));
        if (more) differ = _mm256_add_epi32(differ, _mm256_loadu_si256((const __m256i *)(more + o)));
        const __m256i sum = _mm256_sub_epi32(_mm256_set1_epi32((int)products), _mm256_slli_epi32(differ, 1));
        __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(scale + o));
        value = _mm256_add_ps(value, _mm256_loadu_ps(shift + o));
        const int whole = o + 8 <= channels;
        const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i real = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(channels - o)), number);
        if (residual)
            value =
                _mm256_add_ps(value, whole ? _mm256_loadu_ps(residual + o) : _mm256_maskload_ps(residual + o, real));
        if (is->relu) value = _mm256_max_ps(_mm256_setzero_ps(), value); /* keeps a NaN */
        if (whole)
            _mm256_storeu_ps(call->y + at + o, value);
        else
            _mm256_maskstore_ps(call->y + at + o, real, value);
    }
}

/* The kernel positions that an output pixel sees inside the image. */
static int64_t positions_inside(const mq_layer *is, int64_t y, int64_t x) {
    int64_t rows = 0, columns = 0;
    for (int64_t ky = 0; ky < is->kh; ky++) {
        const int64_t at = y * is->sy + ky * is->dy - is->py;
        rows += at >= 0 && at < is->h;
    }
    for (int64_t kx = 0; kx < is->kw; kx++) {
        const int64_t at = x * is->sx + kx * is->dx - is->px;
        columns += at >= 0 && at < is->w;
    }
    return rows * columns;
}

/* A pair of output pixels, from which one steps to the next. */
typedef struct {
    int64_t n, y, x;
} pair_place;

static inline void next_pair(const mq_layer *is, pair_place *at) {
    at->x += 2;
    if (at->x < is->ow) return;
    at->x = 0;
    if (++at->y < is->oh) return;
    at->y = 0;
    at->n++;
}

/* PIXEL_PAIRS pairs of output pixels from `place` on, and one block of channels; there are `pairs` or more to do. */
static void PATH(binary_tile)(const mq_call *call, const uint8_t *tables, const signs *in, const uint8_t *weights,
                              int64_t block, pair_place *place, int64_t pairs) {
    const mq_layer *is = &call->is;
    const int64_t group = block / call->blocks64;
    const uint16_t *base[PIXEL_PAIRS], *at[PIXEL_PAIRS];
    pair_place places[PIXEL_PAIRS];
    for (int pair = 0; pair < PIXEL_PAIRS; pair++) {
        places[pair] = pair < pairs ? *place : places[0];
        if (pair < pairs) next_pair(is, place);
        const int64_t row = (group * is->n + places[pair].n) * in->rows + places[pair].y * is->sy;
        base[pair] = in->offsets + (row * in->columns + places[pair].x * is->sx) * call->quads;
    }
    /* Kernel columns are side by side in the input if they are not dilated: one run a kernel row. */
    const int joined = is->dx == 1;
    const int64_t length = joined ? is->kw * call->quads : call->quads, runs = joined ? is->kh : call->taps;
    const int64_t pieces = mq_ceil_div(length, RUN),
                  piece = mq_min(RUN, mq_ceil_div(mq_ceil_div(length, pieces), 3) * 3);
    const int64_t signs_in_all = 4 * call->quads * call->taps * call->planes;
    const int large = signs_in_all > UINT16_MAX; /* then counts move to 32 bits before they overflow */
    word_counts counts;
    uint16_t ordered[BLOCK];
    int32_t totals[PIXELS][BLOCK];
    memset(&counts, 0, sizeof counts);
    if (large) memset(totals, 0, sizeof totals);
    int64_t counted = 0;
    for (int64_t plane = 0; plane < call->planes; plane++)
        for (int64_t run = 0; run < runs; run++) {
            const int64_t ky = joined ? run : run / is->kw, kx = joined ? 0 : run % is->kw;
            for (int pair = 0; pair < PIXEL_PAIRS; pair++)
                at[pair] = base[pair] + (ky * is->dy * in->columns + kx * is->dx) * call->quads;
            for (int64_t start = 0; start < length; start += piece) {
                const int64_t count = mq_min(piece, length - start);
                if (large && counted + 4 * count > UINT16_MAX) {
                    for (int pixel = 0; pixel < PIXELS; pixel++) {
                        PATH(in_order)(&counts, pixel, ordered);
                        for (int o = 0; o < BLOCK; o++) totals[pixel][o] += ordered[o];
                    }
                    memset(&counts, 0, sizeof counts);
                    counted = 0;
                }
                PATH(count_run)(tables, at, start, count, weights, &counts);
                weights += count * BLOCK;
                counted += 4 * count;
            }
        }
    const int64_t missing = 4 * call->quads - call->cg;
    for (int pixel = 0; pixel < PIXELS && pixel / 2 < pairs; pixel++) {
        const pair_place *here = &places[pixel / 2];
        const int64_t x = here->x + pixel % 2;
        if (x >= is->ow) continue;
        /* Channels that are not there agree with their weights, at every position but a padded one. */
        const int64_t seen = missing ? missing * call->planes * positions_inside(is, here->y, x) : 0;
        PATH(in_order)(&counts, pixel, ordered);
        PATH(finish_counts)(call, (here->n * is->oh + here->y) * is->ow + x, block, signs_in_all - seen, ordered,
                            large ? totals[pixel] : NULL);
    }
}

/* The nibbles of a pointwise layer's block, one a byte. */
static void PATH(spread_block)(const mq_call *call, const uint8_t *weights, uint8_t *out) {
    const bytes low_half = set8(15);
    for (int64_t plane = 0; plane < call->planes; plane++, weights += call->plane_bytes)
        for (int64_t quad = 0; quad < call->quads; quad += 2)
            for (int v = 0; v < BLOCK; v += BYTES) {
                const bytes two = load(weights + quad / 2 * BLOCK + v);
                uint8_t *to = out + (plane * call->quads + quad) * BLOCK + v;
                store(to, and_(two, low_half));
                if (quad + 1 < call->quads) store(to + BLOCK, and_(right16(two, 4), low_half));
            }
}

/* The pairs [first, end) of all blocks, counted block by block; nibbles has room for a pointwise layer's block. */
static void PATH(binary_pairs)(const mq_call *call, const uint8_t *tables, const signs *in, int64_t first, int64_t end,
                               uint8_t *nibbles) {
    const mq_layer *is = &call->is;
    const int64_t in_row = mq_ceil_div(is->ow, 2), in_block = is->n * is->oh * in_row;
    while (first < end) {
        const int64_t block = first / in_block, index = first % in_block, last = mq_min(end, (block + 1) * in_block);
        const uint8_t *weights = call->by_channel + block * call->planes * call->plane_bytes;
        if (call->pointwise) PATH(spread_block)(call, weights, nibbles);
        pair_place place = {index / in_row / is->oh, index / in_row % is->oh, index % in_row * 2};
        for (; first < last; first += PIXEL_PAIRS)
            PATH(binary_tile)(call, tables, in, call->pointwise ? nibbles : weights, block, &place, last - first);
        first = last;
    }
}

/* Few rows of a linear layer: with weights that are read once there is no use in spreading their nibbles, nor in pairs
 * of rows. A look-up counts up to 4, so that bytes hold the sum of BYTE_RUN times two of them. */
enum { BINARY_ROWS = 3, BYTE_RUN = 31 };

static void PATH(binary_row)(const mq_call *call, uint8_t single[NIBBLES][16], int64_t row, const uint8_t *nibbles,
                             int64_t block) {
    const bytes low_half = set8(15), low_byte = set16(255);
    const uint8_t *weights = call->by_channel + block * call->planes * call->plane_bytes;
    const int64_t bytes_of_plane = mq_ceil_div(call->quads, 2);
    word_counts counts;
    memset(&counts, 0, sizeof counts);
    for (int64_t plane = 0; plane < call->planes; plane++)
        for (int64_t start = 0; start < bytes_of_plane; start += BYTE_RUN) {
            bytes sum[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[v] = set8(0);
            for (int64_t i = start; i < mq_min(bytes_of_plane, start + BYTE_RUN); i++, weights += BLOCK) {
                const bytes first = repeat16(single[nibbles[2 * i]]), second = repeat16(single[nibbles[2 * i + 1]]);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) {
                    const bytes two = load(weights + v * BYTES);
                    sum[v] = add8(sum[v], shuffle(first, and_(two, low_half)));
                    sum[v] = add8(sum[v], shuffle(second, and_(right16(two, 4), low_half)));
                }
                KEEP_ORDER(sum[0], sum[1]);
            }
            for (int v = 0; v < VECTORS; v++) {
                counts.even[0][v] = add16(counts.even[0][v], and_(sum[v], low_byte));
                counts.odd[0][v] = add16(counts.odd[0][v], right16(sum[v], 8));
            }
        }
    uint16_t ordered[BLOCK];
    PATH(in_order)(&counts, 0, ordered);
    PATH(finish_counts)(call, row, block, call->cg * call->planes, ordered, NULL);
}

static int PATH(binary_rows)(const mq_call *call) {
    const mq_layer *is = &call->is;
    const int64_t rows = call->rows, even = mq_ceil_div(call->quads, 2) * 2;
    uint8_t single[NIBBLES][16], *nibbles = mq_scratch(rows * even);
    if (!nibbles) return MQ_NO_MEMORY;
    make_single_tables(single);
    memset(nibbles, 0, (size_t)(rows * even)); /* what is missing agrees with its weights, which are 0 as well */
    for (int64_t row = 0; row < rows; row++)
        PATH(sign_nibbles)(call->x + row * call->cg, call->cg, nibbles + row * even);
#pragma omp parallel for num_threads((int)is->threads) schedule(static) if (is->threads > 1)
    for (int64_t block = 0; block < call->blocks64; block++)
        for (int64_t row = 0; row < rows; row++)
            PATH(binary_row)(call, single, row, nibbles + row * even, block);
    free(nibbles);
    return MQ_OK;
}

int PATH(mq_binary)(const mq_call *call) {
    const mq_layer *is = &call->is;
    if (call->rows && call->rows <= BINARY_ROWS && 4 * call->quads * call->planes <= UINT16_MAX)
        return PATH(binary_rows)(call);
    signs in = {NULL, is->h + 2 * is->py, is->w + 2 * is->px};
    const int64_t rows = is->groups * is->n * in.rows, row = mq_ceil_div((in.columns + is->sx) * call->quads, 64) * 64;
    const int64_t pairs = is->groups * call->blocks64 * is->n * is->oh * mq_ceil_div(is->ow, 2);
    const int64_t threads = mq_min(is->threads, mq_ceil_div(pairs, PIXEL_PAIRS));
    const int64_t table_bytes = mq_ceil_div(16 * PAIR_TABLES, 64) * 64;
    const int64_t spread = call->pointwise ? call->planes * call->quads * BLOCK : 0, own = row + spread;
    uint8_t *memory = mq_scratch(table_bytes + threads * own + rows * in.columns * call->quads * 2 + SPARE);
    if (!memory) return MQ_NO_MEMORY;
    make_pair_tables(memory);
    in.offsets = (uint16_t *)(memory + table_bytes + threads * own);
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t i = rows * thread / threads; i < rows * (thread + 1) / threads; i++)
            PATH(make_row)(call, &in, i, memory + table_bytes + thread * own);
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++)
        PATH(binary_pairs)(call, memory, &in, pairs * thread / threads, pairs * (thread + 1) / threads,
                           memory + table_bytes + thread * own + row);
    free(memory);
    return MQ_OK;
}
#endif

/* ---- Rows of integers --------------------------------------------------------------------------------------------
 *
 * 16-bit sums of byte look-ups in two vectors: all (of words that hold two neighbours, modulo 2^16) and odd (the upper
 * neighbours); then the lower ones are all - 256 * odd. Sums of 32 bits come out of interleaving in the order
 *
 *     vector 0: channels 16 q + 2 k      vector 1: 16 q + 8 + 2 k      vectors 2, 3: the same + 1      (q = lane of 16,
 * k < 4)
 */
static inline int64_t channel_of(int vector, int number) {
    return number / 4 * 16 + number % 4 * 2 + (vector & 1) * 8 + (vector >> 1);
}

/* a + factor * b in 32 bits, for 16-bit a and b below 2^15, in the order above. */
static inline void combine(bytes out[4], bytes even_a, bytes odd_a, bytes even_b, bytes odd_b, int factor) {
    const bytes factors = set32(1 + 65536 * factor);
    out[0] = multiply_pairs(interleave_low(even_a, even_b), factors);
    out[1] = multiply_pairs(interleave_high(even_a, even_b), factors);
    out[2] = multiply_pairs(interleave_low(odd_a, odd_b), factors);
    out[3] = multiply_pairs(interleave_high(odd_a, odd_b), factors);
}

/* int8: a sum of four is -508..508; plus 512 it is two digits, of 7 and of 3 bits, in a byte each: two look-ups of the
 * lower one fit a byte, and 36 of the upper one. */
enum { INT8_RUN = 36, INT8_OFFSET = 512, INT8_BITS = 7 };

static void int8_tables(const int32_t *q, int64_t quads, uint8_t *tables) {
    const __m256i sign0 = _mm256_setr_epi16(-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1);
    const __m256i sign1 = _mm256_setr_epi16(-1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1);
    const __m256i sign2 = _mm256_setr_epi16(-1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1);
    const __m256i sign3 = _mm256_setr_epi16(-1, -1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1);
    for (int64_t quad = 0; quad < quads; quad++, q += 4, tables += 32) {
        const __m256i a = _mm256_add_epi16(_mm256_sign_epi16(_mm256_set1_epi16((short)q[0]), sign0),
                                           _mm256_sign_epi16(_mm256_set1_epi16((short)q[1]), sign1));
        const __m256i b = _mm256_add_epi16(_mm256_sign_epi16(_mm256_set1_epi16((short)q[2]), sign2),
                                           _mm256_sign_epi16(_mm256_set1_epi16((short)q[3]), sign3));
        const __m256i sum = _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(INT8_OFFSET));
        const __m256i lower = _mm256_and_si256(sum, _mm256_set1_epi16((1 << INT8_BITS) - 1));
        const __m256i upper = _mm256_srli_epi16(sum, INT8_BITS);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(lower, upper), 0xd8);
        _mm256_storeu_si256((__m256i *)tables, packed);
    }
}

/* The sums of a row with a block of channels. There are tables for an even number of quads. */
static void PATH(int8_dot)(const mq_call *call, const uint8_t *tables, const uint8_t *weights, int32_t *sums) {
    const bytes low_byte = set16(255), low_half = set8(15);
    bytes total[VECTORS][4];
    memset(total, 0, sizeof total);
    for (int64_t plane = 0; plane < call->planes; plane++, weights += call->plane_bytes)
        for (int64_t start = 0; start < call->quads; start += INT8_RUN) {
            bytes all[VECTORS], odd[VECTORS], upper[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) all[v] = odd[v] = upper[v] = set8(0);
            for (int64_t quad = start; quad < mq_min(call->quads, start + INT8_RUN); quad += 2) {
                const uint8_t *table = tables + quad * 32;
                const bytes lower0 = repeat16(table), upper0 = repeat16(table + 16);
                const bytes lower1 = repeat16(table + 32), upper1 = repeat16(table + 48);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) {
                    const bytes two = load(weights + quad / 2 * BLOCK + v * BYTES);
                    const bytes first = and_(two, low_half), second = and_(right16(two, 4), low_half);
                    const bytes sum = add8(shuffle(lower0, first), shuffle(lower1, second));
                    all[v] = add16(all[v], sum);
                    odd[v] = add16(odd[v], right16(sum, 8));
                    upper[v] = add8(upper[v], add8(shuffle(upper0, first), shuffle(upper1, second)));
                    KEEP_ORDER(all[v], odd[v]);
                }
            }
            for (int v = 0; v < VECTORS; v++) {
                bytes part[4];
                combine(part, sub16(all[v], left16(odd[v], 8)), odd[v], and_(upper[v], low_byte), right16(upper[v], 8),
                        1 << INT8_BITS);
                for (int i = 0; i < 4; i++) total[v][i] = add32(total[v][i], part[i]);
            }
        }
    for (int v = 0; v < VECTORS; v++)
        for (int i = 0; i < 4; i++) {
            int32_t numbers[NUMBERS];
            store(numbers, total[v][i]);
            for (int j = 0; j < NUMBERS; j++)
                sums[v * BYTES + channel_of(i, j)] = numbers[j] - (int32_t)(INT8_OFFSET * call->planes * call->quads);
        }
}

int PATH(mq_int8)(const mq_call *call) {
    const mq_layer *is = &call->is;
    const int64_t row = mq_ceil_div(call->quads, 2) * 64, rows = call->rows;
    uint8_t *tables = mq_scratch(rows * row);
    int32_t *q = mq_scratch(call->quads * 16);
    float *steps = mq_scratch(rows * (int64_t)sizeof(float));
    const int ready = tables && q && steps;
    for (int64_t n = 0; ready && n < rows; n++) {
        steps[n] = mq_quantize_row(call->x + n * call->cg, call->cg, q);
        int8_tables(q, call->quads, tables + n * row);
        memset(tables + n * row + call->quads * 32, 0, (size_t)(row - call->quads * 32));
    }
    if (ready) {
#pragma omp parallel for num_threads((int)is->threads) schedule(static) if (is->threads > 1)
        for (int64_t block = 0; block < call->blocks64; block++)
            for (int64_t n = 0; n < rows; n++) {
                int32_t sums[BLOCK];
                float values[BLOCK];
                PATH(int8_dot)(call, tables + n * row, call->by_channel + block * call->planes * call->plane_bytes,
                               sums);
                for (int o = 0; o < BLOCK; o++) values[o] = (float)sums[o] * steps[n];
                finish_block(call, n, block, values);
            }
    }
    free(tables);
    free(q);
    free(steps);
    return ready ? MQ_OK : MQ_NO_MEMORY;
}

/* ---- Few rows of floats ------------------------------------------------------------------------------------------
 *
 * With one row there are no 16 pixels to put side by side. Instead stretches of 256 inputs become integers of 25 bits
 * and a sign, in steps of a power of two: exact for inputs of the largest one's size, and off by at most 2^-25 of it
 * for small ones, which is less than adding floats loses. A sum of four plus 2^27 is four digits of 7 bits, and each
 * digit has a byte table. Two look-ups of a digit fit a byte before they are widened.
 */
enum { STRETCH = 64, DIGITS = 4, DIGIT_BITS = 7, INTEGER_BITS = 25, DIGITS_OFFSET = 1 << 27 };
#define SMALLEST 1e-25f /* below, the step would not be a normal float */

/* table[digit][w] of four integers. */
static inline void digits_of(const int32_t *q, uint8_t *table) {
    /* Signs of q[0..3] in entry w, for w < 8; q[3] is negative there and positive in the other half. */
    const __m256i sign0 = _mm256_setr_epi32(-1, 1, -1, 1, -1, 1, -1, 1);
    const __m256i sign1 = _mm256_setr_epi32(-1, -1, 1, 1, -1, -1, 1, 1);
    const __m256i sign2 = _mm256_setr_epi32(-1, -1, -1, -1, 1, 1, 1, 1);
    __m256i sum = _mm256_add_epi32(_mm256_sign_epi32(_mm256_set1_epi32(q[0]), sign0),
                                   _mm256_sign_epi32(_mm256_set1_epi32(q[1]), sign1));
    sum = _mm256_add_epi32(sum, _mm256_sign_epi32(_mm256_set1_epi32(q[2]), sign2));
    sum = _mm256_add_epi32(sum, _mm256_set1_epi32(DIGITS_OFFSET));
    const __m256i fourth = _mm256_set1_epi32(q[3]), mask = _mm256_set1_epi32((1 << DIGIT_BITS) - 1);
    __m256i low = _mm256_sub_epi32(sum, fourth), high = _mm256_add_epi32(sum, fourth);
    for (int digit = 0; digit < DIGITS; digit++) {
        __m256i words = _mm256_packus_epi32(_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
        words = _mm256_permute4x64_epi64(words, 0xd8); /* packing works within 16 bytes */
        const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)(table + digit * 16), packed);
        low = _mm256_srli_epi32(low, DIGIT_BITS);
        high = _mm256_srli_epi32(high, DIGIT_BITS);
    }
}

/* Tables [quad][digit][16] and the step of each stretch; false for inputs that are not finite, or all tiny. */
static int digit_tables(const float *x, int64_t count, int64_t quads, uint8_t *tables, float *steps) {
    for (int64_t quad = 0; quad < quads; quad += STRETCH) {
        const int64_t first = quad * 4, here = mq_min(STRETCH * 4, count - first);
        float largest = 0, check = 0;
        for (int64_t i = 0; i < here; i++) {
            const float size = fabsf(x[first + i]);
            largest = size > largest ? size : largest;
            check += size * 0.0f; /* a NaN for what is not finite */
        }
        if (check != 0 || (largest > 0 && largest < SMALLEST)) return 0;
        int exponent; /* largest < 2^exponent */
        frexpf(largest, &exponent);
        const float step = ldexpf(1, exponent - INTEGER_BITS), inverse = ldexpf(1, INTEGER_BITS - exponent);
        *steps++ = step;
        int32_t q[STRETCH * 4] = {0};
        for (int64_t i = 0; i < here; i++) q[i] = (int32_t)rintf(x[first + i] * inverse);
        for (int64_t i = 0; i < mq_min(STRETCH, quads - quad); i++, tables += DIGITS * 16) digits_of(q + 4 * i, tables);
    }
    return 1;
}

/* sums (in the order of combine) += one stretch of a row with one vector of channels. The weights that come next are
 * `ahead` bytes on: too far for the processor to guess. */
static inline __attribute__((always_inline)) void PATH(float_stretch)(const uint8_t *table, float step,
                                                                      const uint8_t *weights, int64_t ahead,
                                                                      int64_t length, float *sums) {
    bytes all[DIGITS], odd[DIGITS];
#pragma GCC unroll 4
    for (int digit = 0; digit < DIGITS; digit++) all[digit] = odd[digit] = set8(0);
    const bytes low_half = set8(15);
    int64_t i = 0;
    for (; i + 2 <= length; i += 2, weights += BLOCK, table += 2 * DIGITS * 16) {
        const bytes two = load(weights), first = and_(two, low_half), second = and_(right16(two, 4), low_half);
        _mm_prefetch((const char *)weights + ahead, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int digit = 0; digit < DIGITS; digit++) {
            const bytes sum = add8(shuffle(repeat16(table + digit * 16), first),
                                   shuffle(repeat16(table + (DIGITS + digit) * 16), second));
            all[digit] = add16(all[digit], sum);
            odd[digit] = add16(odd[digit], right16(sum, 8));
            KEEP_ORDER(all[digit], odd[digit]);
        }
    }
    for (; i < length; i++, weights += BLOCK, table += DIGITS * 16)
#pragma GCC unroll 4
        for (int digit = 0; digit < DIGITS; digit++) {
            const bytes sum = shuffle(repeat16(table + digit * 16), and_(load(weights), low_half));
            all[digit] = add16(all[digit], sum);
            odd[digit] = add16(odd[digit], right16(sum, 8));
        }
    bytes low[4], high[4], even[DIGITS];
    for (int digit = 0; digit < DIGITS; digit++) even[digit] = sub16(all[digit], left16(odd[digit], 8));
    combine(low, even[0], odd[0], even[1], odd[1], 1 << DIGIT_BITS);
    combine(high, even[2], odd[2], even[3], odd[3], 1 << DIGIT_BITS);
    /* The offset is a whole number of the upper two digits' units, so that it leaves without a rounding. */
    const bytes offset = set32((int)(-(DIGITS_OFFSET >> 2 * DIGIT_BITS) * length));
    const floats unit = fsplat((float)(1 << 2 * DIGIT_BITS)), steps = fsplat(step);
    for (int j = 0; j < 4; j++) {
        const floats sum = fadd(fmul(to_floats(add32(high[j], offset)), unit), to_floats(low[j]));
        fstore(sums + j * NUMBERS, fadd(fload(sums + j * NUMBERS), fmul(sum, steps)));
    }
}

/* A row with the channels of the blocks [block, end): stretch by stretch, whose tables then stay in the first-level
 * cache. */
static void PATH(float_row)(const mq_call *call, int64_t row, const uint8_t *tables, const float *steps, int64_t block,
                            int64_t end, float *sums) {
    memset(sums, 0, (size_t)((end - block) * BLOCK) * sizeof(float));
    for (int64_t start = 0; start < call->quads; start += STRETCH)
        for (int64_t b = block; b < end; b++)
            for (int64_t plane = 0; plane < call->planes; plane++) {
                const uint8_t *weights =
                    call->by_channel + (b * call->planes + plane) * call->plane_bytes + start / 2 * BLOCK;
                for (int v = 0; v < VECTORS; v++)
                    PATH(float_stretch)(tables + start * DIGITS * 16, steps[start / STRETCH], weights + v * BYTES,
                                        call->plane_bytes, mq_min(STRETCH, call->quads - start),
                                        sums + (b - block) * BLOCK + v * BYTES);
            }
    for (int64_t b = block; b < end; b++, sums += BLOCK) {
        float values[BLOCK];
        for (int v = 0; v < VECTORS; v++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < NUMBERS; j++)
                    values[v * BYTES + channel_of(i, j)] = sums[v * BYTES + i * NUMBERS + j];
        finish_block(call, row, b, values);
    }
}

int PATH(mq_float_rows)(const mq_call *call) {
    const mq_layer *is = &call->is;
    const int64_t rows = call->rows, threads = mq_min(is->threads, call->blocks64);
    const int64_t row = call->quads * DIGITS * 16, stretches = mq_ceil_div(call->quads, STRETCH);
    uint8_t *tables = mq_scratch(rows * row);
    float *steps = mq_scratch(rows * stretches * (int64_t)sizeof(float));
    float *sums = mq_scratch(call->blocks64 * BLOCK * (int64_t)sizeof(float));
    const int ready = tables && steps && sums;
    int fit = 1;
    for (int64_t n = 0; ready && fit && n < rows; n++)
        fit = digit_tables(call->x + n * call->cg, call->cg, call->quads, tables + n * row, steps + n * stretches);
    if (ready && fit) {
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
        for (int64_t thread = 0; thread < threads; thread++) {
            const int64_t block = call->blocks64 * thread / threads, end = call->blocks64 * (thread + 1) / threads;
            for (int64_t n = 0; n < rows; n++)
                PATH(float_row)(call, n, tables + n * row, steps + n * stretches, block, end, sums + block * BLOCK);
        }
    }
    free(tables);
    free(steps);
    free(sums);
    if (!ready) return MQ_NO_MEMORY;
    return fit ? MQ_OK : PATH(mq_float)(call);
}
