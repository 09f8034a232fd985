/* Random layers through every native path that mq_paths() knows, with buffers of exactly the size they need: for
 * sanitizers (make sanitize, which emulates AVX-512) and for processors that are new to us. Some weights have random
 * bytes behind their header. Where weights are good, binary and int8 results must be equal on all paths, float ones
 * close, and all of them the same for another number of threads. An int8 row that is not finite must give NaN.
 *
 *     kernels_fuzz [layers] [seed]
 */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int mq_paths(void);
int64_t mq_prepared_bytes(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
int mq_prepare(const uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, uint8_t *, int64_t);
int mq_decode(const uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, uint8_t *);
int mq_run(const mq_layer *, const float *, const uint8_t *, int64_t, const float *, const float *, const float *,
           float *);

static int64_t from(int64_t low, int64_t high) { return low + rand() % (high - low + 1); }

static float *numbers(int64_t count) {
    float *x = malloc((size_t)(count ? count : 1) * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = (float)from(-1000, 1000) / 128;
    return x;
}

static void fail(const char *what, const mq_layer *is) {
    const int64_t *number = &is->n;
    fprintf(stderr, "%s:", what);
    for (int i = 0; i < (int)(sizeof *is / sizeof *number); i++) fprintf(stderr, " %ld", (long)number[i]);
    fprintf(stderr, "\n");
    exit(1);
}

static void one_layer(void) {
    mq_layer is = {
        .n = from(0, 3), .groups = from(0, 4) ? 1 : from(2, 3), .levels = from(2, 3), .activation = from(0, 2)};
    is.kh = from(1, 4), is.kw = from(1, 5), is.sy = from(1, 3), is.sx = from(1, 3), is.dy = from(1, 2),
    is.dx = from(1, 3);
    is.py = from(0, 3), is.px = from(0, 3), is.h = from(1, 12), is.w = from(1, 40), is.relu = from(0, 1);
    is.c = is.groups * from(1, 70), is.o = is.groups * from(1, 140), is.threads = from(1, 3);
    if (!from(0, 5)) { /* a small image of many channels */
        is.h = from(1, 5), is.w = from(1, 6), is.kh = is.kw = 3, is.py = is.px = from(0, 1);
        is.c = is.groups * (from(0, 1) ? 32 * from(1, 9) : from(70, 300));
    }
    if (is.activation == MQ_INT8 || !from(0, 4)) { /* a linear layer */
        is.groups = is.kh = is.kw = is.sy = is.sx = is.dy = is.dx = is.h = 1;
        is.py = is.px = 0;
        is.c = from(1, 1500);
        if (from(0, 1)) is.n = 1, is.w = from(1, 4); /* few rows have kernels of their own */
    }
    const int64_t rows = is.h + 2 * is.py - is.dy * (is.kh - 1) - 1,
                  columns = is.w + 2 * is.px - is.dx * (is.kw - 1) - 1;
    if (rows < 0 || columns < 0) return;
    is.oh = rows / is.sy + 1, is.ow = columns / is.sx + 1;
    const int64_t cg = is.c / is.groups, weights = is.o * cg * is.kh * is.kw, outputs = is.n * is.oh * is.ow * is.o;
    uint8_t *codes = malloc((size_t)weights), *decoded = malloc((size_t)weights);
    for (int64_t i = 0; i < weights; i++) codes[i] = (uint8_t)from(0, is.levels - 1);
    const int64_t bytes = mq_prepared_bytes(is.o, cg, is.kh, is.kw, is.groups, is.levels);
    uint8_t *prepared = malloc((size_t)bytes);
    if (mq_prepare(codes, is.o, cg, is.kh, is.kw, is.groups, is.levels, prepared, bytes)) fail("prepare", &is);
    if (mq_decode(prepared, bytes, is.o, cg, is.kh, is.kw, is.groups, is.levels, decoded)) fail("decode", &is);
    if (memcmp(codes, decoded, (size_t)weights)) fail("decoded differently", &is);
    const int damaged = !from(0, 5);
    for (int64_t i = 64; damaged && i < bytes; i++) prepared[i] = (uint8_t)rand();
    float *x = numbers(is.n * is.h * is.w * is.c), *scale = from(0, 1) ? numbers(is.o) : NULL;
    float *shift = from(0, 1) ? numbers(is.o) : NULL, *residual = from(0, 1) ? numbers(outputs) : NULL;
    float *y = numbers(outputs), *expected = numbers(outputs);
    int64_t bad_row = -1;
    if (is.activation == MQ_INT8 && is.n && !from(0, 2)) {
        bad_row = from(0, is.n * is.h * is.w - 1);
        x[bad_row * is.c + from(0, is.c - 1)] = from(0, 1) ? NAN : from(0, 1) ? INFINITY : -INFINITY;
    }
    for (is.path = MQ_PORTABLE; is.path <= MQ_AVX512; is.path++) {
        if (!(mq_paths() >> is.path & 1)) continue;
        float *out = is.path == MQ_PORTABLE ? expected : y;
        if (mq_run(&is, x, prepared, bytes, scale, shift, residual, out)) fail("run", &is);
        if (mq_run(&is, x, prepared, bytes - 1, scale, shift, residual, out) != MQ_BAD_WEIGHT)
            fail("short weight", &is);
        mq_layer again = is;
        again.threads = from(1, 5);
        float *same = numbers(outputs);
        if (mq_run(&again, x, prepared, bytes, scale, shift, residual, same)) fail("run again", &again);
        if (!damaged && memcmp(same, out, (size_t)outputs * sizeof *out)) fail("differs by threads", &again);
        free(same);
        for (int64_t i = 0; !damaged && i < outputs; i++) {
            if ((i / is.o == bad_row) != !!isnan(out[i])) fail("NaN in the wrong place", &is);
            if (i / is.o == bad_row) continue;
            const float gap = fabsf(out[i] - expected[i]);
            if (is.activation == MQ_FLOAT ? gap > 1e-2f + 1e-4f * fabsf(expected[i]) : gap != 0) fail("differs", &is);
        }
    }
    free(codes), free(decoded), free(prepared), free(x), free(scale), free(shift), free(residual), free(y),
        free(expected);
}

int main(int argc, char **argv) {
    const int layers = argc > 1 ? atoi(argv[1]) : 1000;
    srand(argc > 2 ? (unsigned)atoi(argv[2]) : 0);
    for (int i = 0; i < layers; i++) one_layer();
    printf("%d layers on paths %#x: no error\n", layers, mq_paths());
    return 0;
}
