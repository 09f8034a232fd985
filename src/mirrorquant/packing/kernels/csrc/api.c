/* What Python calls: which paths there are, lay a weight out, read it back, run a layer. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

enum { HEADER_BYTES = 64, NATIVE_LAYOUT = 1 };
static const char MAGIC[8] = "MQKERN1";

/* The first 64 bytes of a prepared weight (prepared.py writes and documents them). */
typedef struct {
    char magic[8];
    int32_t layout, levels;
    int64_t o, cg, kh, kw, groups, total;
} header;

/* Byte offsets of the parts of a prepared weight. */
typedef struct {
    int64_t by_pixel, by_channel, by_word, pads, total;
} parts;

void *mq_scratch(int64_t bytes) {
    void *memory = NULL;
    if (bytes < 0 || posix_memalign(&memory, 64, (size_t)mq_max(bytes, 64))) return NULL;
    return memory;
}

/* Changes with these functions and with mq_layer, so that Python notices a library of another version. */
MQ_API int mq_abi(void) { return 2; }

/* Bit p is set where path p was compiled and this processor runs it. */
MQ_API int mq_paths(void) {
    int paths = 1 << MQ_PORTABLE;
#if defined(MQ_HAVE_AVX2)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) paths |= 1 << MQ_AVX2;
#endif
#if defined(MQ_EMULATED_AVX512)
    paths |= 1 << MQ_AVX512; /* a test, which any processor runs */
#elif defined(MQ_HAVE_AVX512)
    /* Without the last of them, which counts bits, AVX2 it is. */
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("avx512vpopcntdq"))
        paths |= 1 << MQ_AVX512;
#endif
    return paths;
}

/* Fills what follows from the shape alone; false where the shape is impossible. */
static int derive(mq_call *call, int64_t o, int64_t cg, int64_t kh, int64_t kw, int64_t groups, int64_t levels) {
    const int64_t many = INT64_C(1) << 40;
    if (o < 1 || cg < 1 || kh < 1 || kw < 1 || groups < 1 || o % groups || levels < 2 || levels > 3) return 0;
    if (o > many || cg > many || kh > many / kw || kh * kw > many / cg || kh * kw * cg > many / o) return 0;
    call->planes = levels - 1;
    call->cg = cg;
    call->og = o / groups;
    call->quads = mq_ceil_div(cg, 4);
    call->taps = kh * kw;
    call->pointwise = call->taps == 1 && groups == 1;
    call->plane_bytes = 64 * (call->pointwise ? mq_ceil_div(call->quads, 2) : call->taps * call->quads);
    call->words = mq_ceil_div(cg, 32);
    call->block_bytes = call->planes * call->taps * call->words * 32 * 4;
    call->blocks8 = mq_ceil_div(call->og, 8);
    call->blocks32 = mq_ceil_div(call->og, 32);
    call->blocks64 = mq_ceil_div(call->og, 64);
    return 1;
}

static parts parts_of(const mq_call *call, int64_t groups) {
    const int64_t nibbles = call->planes * call->taps * call->quads;
    parts at;
    at.by_pixel = HEADER_BYTES;
    at.by_channel = at.by_pixel + groups * call->blocks8 * nibbles * 8;
    const int64_t nibbles_end = at.by_channel + groups * call->blocks64 * call->planes * call->plane_bytes;
    at.by_word = mq_ceil_div(nibbles_end, 64) * 64; /* where a cache line begins */
    at.pads = at.by_word + groups * call->blocks32 * call->block_bytes;
    at.total = at.pads + groups * call->blocks32 * call->taps * 32 * 4;
    return at;
}

/* Bytes of a prepared weight, 0 where the shape is impossible. */
MQ_API int64_t mq_prepared_bytes(int64_t o, int64_t cg, int64_t kh, int64_t kw, int64_t groups, int64_t levels) {
    mq_call call;
    if (!derive(&call, o, cg, kh, kw, groups, levels)) return 0;
    return parts_of(&call, groups).total;
}

/* Positions of a nibble in the layouts of nibbles. */
static int64_t at_pixel(const mq_call *call, int64_t kw, int64_t kh, int64_t group, int64_t o, int64_t plane,
                        int64_t ky, int64_t kx, int64_t quad) {
    const int64_t step = plane * kw + kx, pair = ky * call->quads + quad;
    const int64_t block = group * call->blocks8 + o / 8;
    return ((block * kh * call->quads + pair) * call->planes * kw + step) * 8 + o % 8;
}

static int64_t at_channel(const mq_call *call, int64_t group, int64_t o, int64_t plane, int64_t tap, int64_t quad) {
    const int64_t block = group * call->blocks64 + o / 64, step = call->pointwise ? quad / 2 : tap * call->quads + quad;
    return (block * call->planes + plane) * call->plane_bytes + step * 64 + o % 64;
}

/* Bits by which a nibble is shifted in its byte of the byte layout. */
static int at_bit(const mq_call *call, int64_t quad) { return call->pointwise && quad % 2 ? 4 : 0; }

/* One output channel in the word layout; its codes are [C/groups, kh, kw]. */
static void prepare_words(const mq_call *call, int64_t kw, const uint8_t *codes, int64_t block, int64_t o,
                          uint8_t *by_word, uint8_t *pads) {
    by_word += block * call->block_bytes + o * 4;
    pads += block * call->taps * 32 * 4 + o * 4;
    uint32_t first = 0; /* of two words */
    for (int64_t step = 0; step < call->planes * call->taps; step++) {
        const int64_t plane = step / call->taps, tap = step % call->taps;
        uint32_t sum;
        memcpy(&sum, pads + tap * 32 * 4, sizeof sum);
        for (int64_t i = 0; i < call->words; i++, by_word += 32 * 4) {
            uint32_t word = 0;
            for (int64_t c = i * 32; c < mq_min(call->cg, i * 32 + 32); c++) {
                const uint32_t set = codes[c * call->taps + tap] > plane;
                word |= set << c % 32;
                sum += 2 * set - 1;
            }
            const int is_second = (tap % kw * call->words + i) % 2 == 1;
            const uint32_t kept = is_second ? first ^ word : word;
            memcpy(by_word, &kept, sizeof kept);
            first = word;
        }
        memcpy(pads + tap * 32 * 4, &sum, sizeof sum);
    }
}

/* Level indices [O, C/groups, kh, kw] to a prepared weight of mq_prepared_bytes. A set bit is +1; the planes of {-1, 0,
 * +1} are "at least 0" and "+1". */
MQ_API int mq_prepare(const uint8_t *codes, int64_t o, int64_t cg, int64_t kh, int64_t kw, int64_t groups,
                      int64_t levels, uint8_t *prepared, int64_t bytes) {
    mq_call call;
    if (!derive(&call, o, cg, kh, kw, groups, levels)) return MQ_BAD_PROBLEM;
    const parts at = parts_of(&call, groups);
    if (at.total != bytes) return MQ_BAD_PROBLEM;
    memset(prepared, 0, (size_t)bytes);
    header head = {{0}, NATIVE_LAYOUT, (int32_t)levels, o, cg, kh, kw, groups, bytes};
    memcpy(head.magic, MAGIC, sizeof head.magic);
    memcpy(prepared, &head, sizeof head);
    for (int64_t out = 0; out < o; out++) {
        const int64_t group = out / call.og, in_group = out % call.og;
        prepare_words(&call, kw, codes + out * cg * call.taps, group * call.blocks32 + in_group / 32, in_group % 32,
                      prepared + at.by_word, prepared + at.pads);
        for (int64_t plane = 0; plane < call.planes; plane++)
            for (int64_t tap = 0; tap < call.taps; tap++) {
                const uint8_t *code = codes + out * cg * call.taps + tap;
                for (int64_t quad = 0; quad < call.quads; quad++) {
                    unsigned nibble = 0;
                    for (int64_t i = 0; i < 4 && quad * 4 + i < cg; i++)
                        nibble |= (unsigned)(code[(quad * 4 + i) * call.taps] > plane) << i;
                    prepared[at.by_pixel + at_pixel(&call, kw, kh, group, in_group, plane, tap / kw, tap % kw, quad)] =
                        (uint8_t)(nibble << 3);
                    prepared[at.by_channel + at_channel(&call, group, in_group, plane, tap, quad)] |=
                        (uint8_t)(nibble << at_bit(&call, quad));
                }
            }
    }
    return MQ_OK;
}

/* Whether a prepared weight says that it is of this shape, and has the bytes for it. */
static int header_fits(const uint8_t *prepared, int64_t bytes, int64_t o, int64_t cg, int64_t kh, int64_t kw,
                       int64_t groups, int64_t levels, int64_t total) {
    header head;
    if (bytes < HEADER_BYTES || bytes != total) return 0;
    memcpy(&head, prepared, sizeof head);
    return !memcmp(head.magic, MAGIC, sizeof head.magic) && head.layout == NATIVE_LAYOUT && head.levels == levels &&
           head.o == o && head.cg == cg && head.kh == kh && head.kw == kw && head.groups == groups &&
           head.total == bytes;
}

/* A prepared weight back to level indices. */
MQ_API int mq_decode(const uint8_t *prepared, int64_t bytes, int64_t o, int64_t cg, int64_t kh, int64_t kw,
                     int64_t groups, int64_t levels, uint8_t *codes) {
    mq_call call;
    if (!derive(&call, o, cg, kh, kw, groups, levels)) return MQ_BAD_PROBLEM;
    const parts at = parts_of(&call, groups);
    if (!header_fits(prepared, bytes, o, cg, kh, kw, groups, levels, at.total)) return MQ_BAD_WEIGHT;
    for (int64_t out = 0; out < o; out++)
        for (int64_t in = 0; in < cg; in++)
            for (int64_t tap = 0; tap < call.taps; tap++) {
                uint8_t code = 0;
                for (int64_t plane = 0; plane < call.planes; plane++) {
                    const int64_t place = at_channel(&call, out / call.og, out % call.og, plane, tap, in / 4);
                    code =
                        (uint8_t)(code + ((prepared[at.by_channel + place] >> (in % 4 + at_bit(&call, in / 4))) & 1));
                }
                codes[(out * cg + in) * call.taps + tap] = code;
            }
    return MQ_OK;
}

static int64_t output_size(int64_t in, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
    const int64_t reach = in + 2 * padding - dilation * (kernel - 1) - 1;
    return reach < 0 ? 0 : reach / stride + 1;
}

/* Whether the numbers of a layer agree, and are small enough for 64-bit offsets. */
static int layer_is_sane(const mq_layer *is) {
    const int64_t many = INT64_C(1) << 31;
    const int64_t *number = &is->n;
    for (int i = 0; i < 16; i++)
        if (number[i] < 0 || number[i] >= many) return 0;
    if (is->c < 1 || is->h < 1 || is->w < 1 || is->sy < 1 || is->sx < 1 || is->dy < 1 || is->dx < 1 || is->threads < 1)
        return 0;
    if (is->groups < 1 || is->c % is->groups || is->oh < 1 || is->ow < 1) return 0;
    if (is->oh != output_size(is->h, is->kh, is->sy, is->py, is->dy)) return 0;
    if (is->ow != output_size(is->w, is->kw, is->sx, is->px, is->dx)) return 0;
    const double rows = (double)is->h + 2 * (double)is->py, columns = (double)is->w + 2 * (double)is->px;
    const double inputs = (double)(is->n + 1) * rows * (columns + (double)is->sx) * (double)is->c;
    const double outputs = (double)is->n * (double)is->oh * (double)is->ow * (double)is->o;
    return inputs < 1e15 && outputs < 1e15 && is->activation >= MQ_FLOAT && is->activation <= MQ_INT8;
}

/* Rows of a batch that one pass of the float kernel handles at once cost about as much as seven rows one by one. */
enum { FEW_ROWS = 7 };

static int run(const mq_call *call) {
    const mq_layer *is = &call->is;
    const int few = call->rows && call->rows <= FEW_ROWS;
    if (is->activation == MQ_INT8 && !call->rows) return MQ_BAD_PROBLEM;
#define RUN(name)                                                                                                      \
    switch (is->activation) {                                                                                          \
    case MQ_FLOAT: return few ? mq_float_rows_##name(call) : mq_float_##name(call);                                    \
    case MQ_BINARY: return mq_binary_##name(call);                                                                     \
    default: return mq_int8_##name(call);                                                                              \
    }
    switch (is->path) {
    case MQ_PORTABLE: RUN(portable)
#if defined(MQ_HAVE_AVX2)
    case MQ_AVX2: RUN(avx2)
#endif
#if defined(MQ_HAVE_AVX512)
    case MQ_AVX512: RUN(avx512)
#endif
    default: return MQ_NO_PATH;
    }
#undef RUN
}

/* y = relu?(scale[o] * (W * act(x)) + shift[o] + residual). Any of scale, shift and residual may be NULL. */
MQ_API int mq_run(const mq_layer *is, const float *x, const uint8_t *prepared, int64_t bytes, const float *scale,
                  const float *shift, const float *residual, float *y) {
    mq_call call;
    if (!layer_is_sane(is) || !derive(&call, is->o, is->c / is->groups, is->kh, is->kw, is->groups, is->levels))
        return MQ_BAD_PROBLEM;
    const parts at = parts_of(&call, is->groups);
    if (!header_fits(prepared, bytes, is->o, call.cg, is->kh, is->kw, is->groups, is->levels, at.total))
        return MQ_BAD_WEIGHT;
    if (is->path < MQ_PORTABLE || is->path > MQ_AVX512 || !(mq_paths() >> is->path & 1)) return MQ_NO_PATH;
    if (is->n == 0) return MQ_OK;

    /* Scale and shift for whole blocks of channels, so that kernels need no tails; planes are averaged by the scale. */
    const int64_t in_group = call.blocks64 * 64, padded = is->groups * in_group;
    float *constants = mq_scratch(2 * padded * (int64_t)sizeof(float));
    if (!constants) return MQ_NO_MEMORY;
    const float mean = call.planes == 2 ? 0.5f : 1.0f;
    for (int64_t group = 0; group < is->groups; group++)
        for (int64_t i = 0; i < in_group; i++) {
            const int64_t o = group * call.og + i;
            const int real = i < call.og;
            constants[group * in_group + i] = mean * (scale && real ? scale[o] : 1.0f);
            constants[padded + group * in_group + i] = shift && real ? shift[o] : 0.0f;
        }
    call.is = *is;
    const int is_linear = call.pointwise && is->oh == is->h && is->ow == is->w && !is->py && !is->px;
    call.rows = is_linear ? is->n * is->h * is->w : 0;
    call.by_pixel = prepared + at.by_pixel;
    call.by_channel = prepared + at.by_channel;
    call.by_word = prepared + at.by_word;
    call.pads = prepared + at.pads;
    call.x = x;
    call.scale = constants;
    call.shift = constants + padded;
    call.residual = residual;
    call.y = y;
    const int status = run(&call);
    free(constants);
    return status;
}
