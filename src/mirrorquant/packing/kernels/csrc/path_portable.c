/* Any processor: plain C, with the compiler's own vectors of four floats. */
#define PATH(name) name##_portable
#define VECTOR_LANES 4
#include "float_lookup.inc.h"

/* Few rows leave most lanes empty, which is still less work than as many products. */
int mq_float_rows_portable(const mq_call *call) { return mq_float_portable(call); }

enum { CHANNELS = 64, RUN = 63 /* quads whose counts fit a byte */ };

/* The nibbles of sign(x) of one pixel's channels; a set bit is +1, as it is for the weights. */
static void sign_nibbles(const float *x, int64_t channels, uint8_t *nibble) {
    for (int64_t quad = 0; quad < mq_ceil_div(channels, 4); quad++) {
        unsigned bits = 0;
        for (int64_t i = 0; i < 4 && quad * 4 + i < channels; i++) bits |= (unsigned)(x[quad * 4 + i] >= 0) << i;
        nibble[quad] = (uint8_t)bits;
    }
}

/* counts[o] += the number of channels whose signs differ, for 64 output channels. Bits are counted side by side in
 * bytes. */
static void count_differences(const uint8_t *restrict weights, int64_t pointwise, const uint8_t *restrict nibble,
                              int64_t quads, int32_t *restrict counts) {
    for (int64_t start = 0; start < quads; start += RUN) {
        uint8_t sums[CHANNELS] = {0};
        for (int64_t quad = start; quad < mq_min(quads, start + RUN); quad++) {
            const uint8_t *w = weights + (pointwise ? quad / 2 : quad) * CHANNELS;
            const int shift = pointwise && quad % 2 ? 4 : 0; /* a pointwise layer has two nibbles a byte */
            for (int o = 0; o < CHANNELS; o++) {
                const uint8_t differ = (w[o] >> shift & 15) ^ nibble[quad];
                const uint8_t twos = (uint8_t)(differ - (differ >> 1 & 5));
                sums[o] = (uint8_t)(sums[o] + (twos & 3) + (twos >> 2));
            }
        }
        for (int o = 0; o < CHANNELS; o++) counts[o] += sums[o];
    }
}

int mq_binary_portable(const mq_call *call) {
    const mq_layer *is = &call->is;
    const int64_t pixels = is->n * is->h * is->w, row = is->groups * call->quads;
    uint8_t *nibbles = mq_scratch(pixels * row);
    if (!nibbles) return MQ_NO_MEMORY;
#pragma omp parallel for num_threads((int)is->threads) schedule(static) if (is->threads > 1)
    for (int64_t pixel = 0; pixel < pixels; pixel++)
        for (int64_t group = 0; group < is->groups; group++)
            sign_nibbles(call->x + pixel * is->c + group * call->cg, call->cg,
                         nibbles + pixel * row + group * call->quads);

    const int64_t outputs = is->n * is->oh * is->ow, blocks = is->groups * call->blocks64;
#pragma omp parallel for num_threads((int)is->threads) schedule(static) if (is->threads > 1)
    for (int64_t item = 0; item < outputs * blocks; item++) {
        const int64_t block = item / outputs, pixel = item % outputs, group = block / call->blocks64;
        const int64_t x = pixel % is->ow, y = pixel / is->ow % is->oh, n = pixel / is->ow / is->oh;
        int32_t counts[CHANNELS] = {0};
        int64_t products = 0; /* a position in the padding has none */
        for (int64_t plane = 0; plane < call->planes; plane++)
            for (int64_t tap = 0; tap < call->taps; tap++) {
                const int64_t iy = y * is->sy - is->py + tap / is->kw * is->dy;
                const int64_t ix = x * is->sx - is->px + tap % is->kw * is->dx;
                if (iy < 0 || iy >= is->h || ix < 0 || ix >= is->w) continue;
                const int64_t at = (block * call->planes + plane) * call->plane_bytes + tap * call->quads * CHANNELS;
                const uint8_t *nibble = nibbles + ((n * is->h + iy) * is->w + ix) * row + group * call->quads;
                count_differences(call->by_channel + at, call->pointwise, nibble, call->quads, counts);
                products += call->cg;
            }
        const int64_t first = block % call->blocks64 * CHANNELS, place = pixel * is->o + group * call->og + first;
        for (int64_t o = 0; o < mq_min(CHANNELS, call->og - first); o++)
            call->y[place + o] = mq_finish((float)(products - 2 * counts[o]), call->scale[block * CHANNELS + o],
                                           call->shift[block * CHANNELS + o],
                                           call->residual ? call->residual + place + o : NULL, is->relu);
    }
    free(nibbles);
    return MQ_OK;
}

int mq_int8_portable(const mq_call *call) {
    const mq_layer *is = &call->is;
    const int64_t rows = call->rows;
    int32_t *quantized = mq_scratch(rows * call->quads * 4 * (int64_t)sizeof(int32_t));
    float *steps = mq_scratch(rows * (int64_t)sizeof(float));
    if (!quantized || !steps) {
        free(quantized);
        free(steps);
        return MQ_NO_MEMORY;
    }
    for (int64_t n = 0; n < rows; n++)
        steps[n] = mq_quantize_row(call->x + n * call->cg, call->cg, quantized + n * call->quads * 4);
#pragma omp parallel for num_threads((int)is->threads) schedule(static) if (is->threads > 1)
    for (int64_t block = 0; block < call->blocks64; block++)
        for (int64_t n = 0; n < rows; n++) {
            int32_t sums[CHANNELS] = {0};
            for (int64_t at = 0; at < call->planes * call->quads; at++) {
                const int64_t plane = at / call->quads, quad = at % call->quads;
                const int32_t *q = quantized + (n * call->quads + quad) * 4;
                const uint8_t *weights =
                    call->by_channel + (block * call->planes + plane) * call->plane_bytes + quad / 2 * CHANNELS;
                for (int o = 0; o < CHANNELS; o++) {
                    const int32_t w = weights[o] >> 4 * (quad % 2) & 15;
                    sums[o] += (2 * (w & 1) - 1) * q[0] + ((w & 2) - 1) * q[1] + ((w & 4) / 2 - 1) * q[2] +
                               ((w & 8) / 4 - 1) * q[3];
                }
            }
            const int64_t place = n * is->o + block * CHANNELS;
            for (int64_t o = 0; o < mq_min(CHANNELS, call->og - block * CHANNELS); o++)
                call->y[place + o] = mq_finish((float)sums[o] * steps[n], call->scale[block * CHANNELS + o],
                                               call->shift[block * CHANNELS + o],
                                               call->residual ? call->residual + place + o : NULL, is->relu);
        }
    free(quantized);
    free(steps);
    return MQ_OK;
}
