/* Float activations, a template. Define before: PATH(name), and VECTOR_LANES = 4, 8 or 16.
 *
 * LANES output pixels are computed side by side. Four input channels at one kernel position make a table of 16 entries,
 * one a combination of signs, each the signed sum for these pixels. Then an output channel costs one load and add of
 * LANES floats for 4 x LANES products, and the nibble of its weights is the address:
 *
 *     acc[o] += table[nibble[o]]        (a 32-byte load for 32 products: what the load ports can do is the limit)
 *
 * Tables must stay in the first-level cache, so the sum over channels goes in blocks. A lane has a rectangle of output
 * pixels. Within a block of channels its input rows are visited from top to bottom, and their columns from left to
 * right: the tables of an input pixel serve all kernel positions (ky, kx) that meet it. What a row of the kernel adds
 * starts from zero and is then added to the pixel's sum: shorter chains of roundings.
 */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#if VECTOR_LANES > 4
#include <immintrin.h>
#endif

enum {
    LANES = VECTOR_LANES == 8 ? 8 : 16,
    PARTS = LANES / VECTOR_LANES,       /* vectors that hold the lanes */
    TILE = 16 / PARTS,                  /* output channels whose sums are in registers at a time */
    BLOCKS = TILE > 8 ? TILE / 8 : 1,   /* blocks of 8 channels that a tile takes from */
    TABLE = 16 * LANES,                 /* floats of a table */
    TABLES_IN_CACHE = 24 * 256 / TABLE, /* 24 KiB, in a first-level cache of 32 or 48 KiB */
    SUMS_IN_CACHE = 256 * 1024,         /* bytes of sums that go to and fro between two blocks */
    BUILD_COST = 40,                    /* look-ups that take as long as to make a table */
};

typedef float vec __attribute__((vector_size(4 * VECTOR_LANES)));
/* A damaged weight, whose byte is not a nibble << 3, looks between the entries or into what follows the table; there is
 * room for it. SSE cannot read between them: there the bits are masked out. */
typedef float entry __attribute__((vector_size(4 * VECTOR_LANES), aligned(VECTOR_LANES == 4 ? 16 : 4)));

/* How an image is cut into the rectangles of the lanes. */
typedef struct {
    const mq_call *call;
    int64_t height, width;  /* of a rectangle */
    int64_t down, across;   /* rectangles in an image */
    int64_t ring;           /* columns of tables that are kept: (kw - 1) * dx + 1 */
    int64_t quads_in_block; /* of channels that tables are made for */
    int64_t chunks;         /* threads that share a set by output channels, each with tables of its own */
    const float *zeros;     /* what a padded position reads, channels of a group */
} plan;

typedef struct {
    int64_t n[LANES];           /* the image, -1 for a lane without one */
    int64_t y[LANES], x[LANES]; /* the first output pixel */
    const float *row[LANES];    /* the input row that is being visited, NULL in the padding */
} lanes_t;

/* Tables and sums of one thread. */
typedef struct {
    float *tables, *sums;
    int64_t *owner;     /* the column whose tables are in a slot of the ring */
    int64_t *meets;     /* the output row for which the visited row meets kernel row ky, -1 for none */
    const float **base; /* the tables of each kernel column, planes one after the other */
} workspace;

#if VECTOR_LANES > 4
/* Rows to columns of an 8x8 matrix, in three rounds of pairs. */
static inline void PATH(transpose8)(__m256 a[8]) {
    __m256 b[8];
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
        b[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) a[i] = b[i];
}

/* table[i] = sum of +-x_j over j < 4, plus where bit j of i is set, for eight lanes. */
static inline void PATH(entries)(float *restrict table, const __m256 x[4]) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 sum01 = _mm256_add_ps(x[0], x[1]), gap01 = _mm256_sub_ps(x[0], x[1]);
    const __m256 sum23 = _mm256_add_ps(x[2], x[3]), gap23 = _mm256_sub_ps(x[2], x[3]);
    const __m256 low[4] = {_mm256_xor_ps(sum01, sign), gap01, _mm256_xor_ps(gap01, sign), sum01};
    const __m256 high[4] = {_mm256_xor_ps(sum23, sign), gap23, _mm256_xor_ps(gap23, sign), sum23};
    for (int i = 0; i < 16; i++) _mm256_store_ps(table + i * LANES, _mm256_add_ps(low[i & 3], high[i >> 2]));
}

/* The tables of 16 channels, which are a cache line: pixels that lie a power of two apart evict each other's. */
static inline void PATH(build4)(float *restrict table, const float *const *pixel, int64_t offset) {
    for (int half = 0; half < LANES; half += 8)
        for (int two = 0; two < 4; two += 2) {
            __m256 x[8];
            for (int i = 0; i < 8; i++) x[i] = _mm256_loadu_ps(pixel[half + i] + offset + 4 * two);
            PATH(transpose8)(x);
            PATH(entries)(table + two * TABLE + half, x);
            PATH(entries)(table + (two + 1) * TABLE + half, x + 4);
        }
}

/* A table of up to four channels. */
static inline void PATH(build)(float *restrict table, const float *const *pixel, int64_t offset, int64_t channels) {
    const __m128i real = _mm_cmpgt_epi32(_mm_set1_epi32((int)mq_min(channels, 4)), _mm_setr_epi32(0, 1, 2, 3));
    for (int half = 0; half < LANES; half += 8) {
        __m256 x[8];
        for (int i = 0; i < 8; i++) x[i] = _mm256_castps128_ps256(_mm_maskload_ps(pixel[half + i] + offset, real));
        PATH(transpose8)(x);
        PATH(entries)(table + half, x);
    }
}
#else
static inline void PATH(build)(float *restrict table, const float *const *pixel, int64_t offset, int64_t channels) {
    float x[4][LANES] = {{0}};
    for (int64_t i = 0; i < mq_min(channels, 4); i++)
        for (int lane = 0; lane < LANES; lane++) x[i][lane] = pixel[lane][offset + i];
    for (int i = 0; i < 16; i++)
        for (int lane = 0; lane < LANES; lane++) {
            const float low = (i & 1 ? x[0][lane] : -x[0][lane]) + (i & 2 ? x[1][lane] : -x[1][lane]);
            const float high = (i & 4 ? x[2][lane] : -x[2][lane]) + (i & 8 ? x[3][lane] : -x[3][lane]);
            table[i * LANES + lane] = low + high;
        }
}
#endif

/* The two lowest bytes, and their removal: three instructions, of which GCC would make six. */
#if defined(__x86_64__)
#define FIRST_BYTE(from, to) __asm__("movzbl %b1, %k0" : "=r"(to) : "Q"(from))
#define SECOND_BYTE(from, to) __asm__("movzbl %h1, %k0" : "=R"(to) : "Q"(from))
#define DROP_TWO(from) __asm__("shrq $16, %0" : "+Q"(from) : : "cc")
#else
#define FIRST_BYTE(from, to) ((to) = (from) & 255)
#define SECOND_BYTE(from, to) ((to) = (from) >> 8 & 255)
#define DROP_TWO(from) ((from) >>= 16)
#endif

/* sums[tile][LANES] (+)= the look-ups of so many output channels in all tables of a block of channels; base has one
 * table a step (plane, kx), the next quad's follows it. Inlined with constant steps for the usual kernels. The code is
 * short on purpose: a busy neighbour on the same core leaves little room for instructions. */
static inline __attribute__((always_inline)) void PATH(look_up)(float *restrict sums, const float *const *base,
                                                                int64_t steps, int64_t quads, const uint8_t *weights,
                                                                int64_t block_bytes, int tile, int add) {
    vec acc[TILE][PARTS];
#pragma GCC unroll 16
    for (int o = 0; o < tile; o++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) acc[o][part] = (vec){0};
    const char *near[3]; /* in registers, unlike base itself */
#pragma GCC unroll 3
    for (int64_t step = 0; step < mq_min(steps, 3); step++) near[step] = (const char *)base[step];
    const int together = tile < 8 ? tile : 8; /* channels whose nibbles come in one load: load ports are scarce */
#pragma GCC unroll 2
    for (int64_t quad = 0; quad < quads; quad++)
#pragma GCC unroll 3
        for (int64_t step = 0; step < steps; step++, weights += 8) {
            const char *table = steps <= 3 ? near[step] : (const char *)(base[step] + quad * TABLE);
            if (steps <= 3) near[step] += TABLE * sizeof(float);
#pragma GCC unroll 2
            for (int first = 0; first < tile; first += together) {
                uint64_t nibbles = 0;
                memcpy(&nibbles, weights + first / 8 * block_bytes, (size_t)together);
                if (VECTOR_LANES == 4) nibbles &= UINT64_C(0x7878787878787878);
#pragma GCC unroll 4
                for (int o = first; o < first + together; o += 2) {
                    size_t one, two; /* nibble << 3; an entry has 4 * LANES bytes */
                    FIRST_BYTE(nibbles, one);
                    SECOND_BYTE(nibbles, two);
                    if (o < first + together - 2) DROP_TWO(nibbles);
#pragma GCC unroll 4
                    for (int part = 0; part < PARTS; part++)
                        acc[o][part] += ((const entry *)(table + LANES / 2 * one))[part];
#pragma GCC unroll 4
                    for (int part = 0; part < PARTS; part++)
                        acc[o + 1][part] += ((const entry *)(table + LANES / 2 * two))[part];
                }
            }
            __asm__ volatile("" ::: "memory"); /* else GCC sums channel by channel, and spills all the indices */
        }
    vec *out = (vec *)sums;
#pragma GCC unroll 16
    for (int o = 0; o < tile; o++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++)
            out[o * PARTS + part] = add ? out[o * PARTS + part] + acc[o][part] : acc[o][part];
}

/* The same for all blocks of 8 channels of a column; block_bytes from one block's weights to the next. */
static void PATH(look_up_blocks)(float *sums, const float *const *base, int64_t steps, int64_t quads,
                                 const uint8_t *weights, int64_t block_bytes, int64_t blocks, int add) {
    for (; blocks >= BLOCKS; blocks -= BLOCKS, weights += BLOCKS * block_bytes) {
        for (int block = BLOCKS; block < 2 * BLOCKS; block++)
            for (int line = 0; line < 3; line++) __builtin_prefetch(weights + block * block_bytes + 64 * line);
        for (int o = 0; o < 8 * BLOCKS; o += TILE, sums += TILE * LANES)
            if (steps == 3)
                PATH(look_up)(sums, base, 3, quads, weights + o, block_bytes, TILE, add);
            else if (steps == 1)
                PATH(look_up)(sums, base, 1, quads, weights + o, block_bytes, TILE, add);
            else
                PATH(look_up)(sums, base, steps, quads, weights + o, block_bytes, TILE, add);
    }
    if (BLOCKS > 1 && blocks) PATH(look_up)(sums, base, steps, quads, weights, block_bytes, 8, add);
}

/* The tables of an input column of the visited row, for the quads [quad, end). */
static void PATH(build_column)(const plan *p, const lanes_t *lanes, int64_t quad, int64_t end, int64_t column,
                               float *table) {
    const mq_call *call = p->call;
    const mq_layer *is = &call->is;
    const float *pixel[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t x = lanes->x[lane] * is->sx - is->px + column;
        pixel[lane] = lanes->row[lane] && x >= 0 && x < is->w ? lanes->row[lane] + x * is->c : p->zeros;
        for (int64_t channel = 4 * quad; channel < 4 * end; channel += 16) /* of the next column */
            __builtin_prefetch(pixel[lane] + is->c + channel);
    }
#if VECTOR_LANES > 4
    for (; quad + 4 <= end && 4 * quad + 16 <= call->cg; quad += 4, table += 4 * TABLE)
        PATH(build4)(table, pixel, 4 * quad);
#endif
    for (; quad < end; quad++, table += TABLE) PATH(build)(table, pixel, 4 * quad, call->cg - 4 * quad);
}

/* The sums of 8 output channels, finished and written to the pixels at the offsets; -1 for none. */
#if VECTOR_LANES > 4
static inline void PATH(write8)(const mq_call *call, const int64_t *offsets, int64_t o, const float *scale,
                                const float *shift, const float *restrict sums) {
    const __m256 s = _mm256_loadu_ps(scale), t = _mm256_loadu_ps(shift), zero = _mm256_setzero_ps();
    for (int half = 0; half < LANES; half += 8) {
        __m256 b[8];
        for (int i = 0; i < 8; i++) b[i] = _mm256_load_ps(sums + i * LANES + half);
        PATH(transpose8)(b);
        for (int i = 0; i < 8; i++) {
            const int64_t at = offsets[half + i] + o;
            if (offsets[half + i] < 0) continue;
            __m256 value = _mm256_add_ps(_mm256_mul_ps(b[i], s), t);
            if (call->residual) value = _mm256_add_ps(value, _mm256_loadu_ps(call->residual + at));
            if (call->is.relu) value = _mm256_max_ps(zero, value); /* keeps a NaN */
            _mm256_storeu_ps(call->y + at, value);
        }
    }
}
#endif

/* The pixels at (row, column) of the rectangles, all blocks from `block` on. */
static void PATH(write_pixels)(const mq_call *call, const lanes_t *lanes, int64_t group, int64_t row, int64_t column,
                               int64_t block, int64_t blocks, const float *sums) {
    const mq_layer *is = &call->is;
    int64_t offsets[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t y = lanes->y[lane] + row, x = lanes->x[lane] + column;
        const int real = lanes->n[lane] >= 0 && y < is->oh && x < is->ow;
        offsets[lane] = real ? ((lanes->n[lane] * is->oh + y) * is->ow + x) * is->o + group * call->og : -1;
    }
    for (int64_t b = 0; b < blocks; b++, sums += 8 * LANES) {
        const int64_t o = (block + b) * 8, count = mq_min(8, call->og - o);
        const float *scale = call->scale + group * call->blocks64 * 64 + o;
        const float *shift = call->shift + group * call->blocks64 * 64 + o;
#if VECTOR_LANES > 4
        if (count == 8) {
            PATH(write8)(call, offsets, o, scale, shift, sums);
            continue;
        }
#endif
        for (int lane = 0; lane < LANES; lane++)
            for (int64_t i = 0; offsets[lane] >= 0 && i < count; i++) {
                const int64_t at = offsets[lane] + o + i;
                call->y[at] = mq_finish(sums[i * LANES + lane], scale[i], shift[i],
                                        call->residual ? call->residual + at : NULL, is->relu);
            }
    }
}

/* The first input row of the rectangles after `row` that a kernel row meets, -1 for none; they may be far apart. */
static int64_t next_row(const plan *p, int64_t row) {
    const mq_layer *is = &p->call->is;
    int64_t next = -1;
    for (int64_t ky = 0; ky < is->kh; ky++) {
        const int64_t top = ky * is->dy, out = row < top ? 0 : (row - top) / is->sy + 1, at = top + out * is->sy;
        if (out < p->height && (next < 0 || at < next)) next = at;
    }
    return next;
}

/* Goes to an input row of the rectangles: where its pixels are, and which output rows it adds to. */
static void PATH(visit)(const plan *p, const workspace *work, lanes_t *lanes, int64_t group, int64_t row) {
    const mq_call *call = p->call;
    const mq_layer *is = &call->is;
    for (int64_t ky = 0; ky < is->kh; ky++) {
        const int64_t from_top = row - ky * is->dy, out = from_top / is->sy;
        work->meets[ky] = from_top >= 0 && from_top % is->sy == 0 && out < p->height ? out : -1;
    }
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t y = lanes->y[lane] * is->sy - is->py + row;
        const int inside = lanes->n[lane] >= 0 && y >= 0 && y < is->h;
        lanes->row[lane] = inside ? call->x + (lanes->n[lane] * is->h + y) * is->w * is->c + group * call->cg : NULL;
    }
}

/* One set of lanes, the blocks of 8 output channels [block, end) of a group. */
static void PATH(run_set)(const plan *p, workspace *work, int64_t group, int64_t set, int64_t block, int64_t end) {
    const mq_call *call = p->call;
    const mq_layer *is = &call->is;
    lanes_t lanes;
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t at = set * LANES + lane, n = at / (p->down * p->across);
        lanes.n[lane] = n < is->n ? n : -1;
        lanes.y[lane] = at / p->across % p->down * p->height;
        lanes.x[lane] = at % p->across * p->width;
    }
    const int64_t steps = call->planes * is->kw, blocks = end - block, pixel = blocks * 8 * LANES;
    const int64_t block_bytes = is->kh * call->quads * steps * 8;
    const uint8_t *weights = call->by_pixel + (group * call->blocks8 + block) * block_bytes;
    for (int64_t quad = 0; quad < call->quads; quad += p->quads_in_block) {
        const int64_t count = mq_min(p->quads_in_block, call->quads - quad);
        for (int64_t row = 0; row >= 0; row = next_row(p, row)) {
            PATH(visit)(p, work, &lanes, group, row);
            for (int64_t slot = 0; slot < p->ring; slot++) work->owner[slot] = -1;
            for (int64_t column = 0; column < p->width; column++) {
                for (int64_t kx = 0; kx < is->kw; kx++) {
                    const int64_t input = column * is->sx + kx * is->dx, slot = input % p->ring;
                    float *table = work->tables + slot * p->quads_in_block * TABLE;
                    if (work->owner[slot] != input) {
                        PATH(build_column)(p, &lanes, quad, quad + count, input, table);
                        work->owner[slot] = input;
                    }
                    for (int64_t plane = 0; plane < call->planes; plane++) work->base[plane * is->kw + kx] = table;
                }
                for (int64_t ky = 0; ky < is->kh; ky++) {
                    const int64_t out = work->meets[ky];
                    if (out < 0) continue;
                    float *sums = work->sums + (out * p->width + column) * pixel;
                    PATH(look_up_blocks)(sums, work->base, steps, count,
                                         weights + (ky * call->quads + quad) * steps * 8, block_bytes, blocks,
                                         quad + ky > 0);
                    if (ky == is->kh - 1 && quad + count == call->quads)
                        PATH(write_pixels)(call, &lanes, group, out, column, block, blocks, sums);
                }
            }
        }
    }
}

/* Rows (or columns) of the input whose tables are made for so many of the output. */
static int64_t input_rows(int64_t rows, int64_t stride, int64_t kernel, int64_t dilation) {
    return mq_min((rows - 1) * stride + (kernel - 1) * dilation + 1, rows * kernel);
}

/* The rectangle with the least work for the busiest thread: small ones fill the lanes, large ones make fewer tables.
 * Threads take whole sets, or where these do not come out even, each its output channels of every set. */
static void choose_rectangle(plan *p) {
    const mq_layer *is = &p->call->is;
    const int64_t all = mq_min(is->threads, p->call->blocks8);
    double least = 0;
    for (int64_t height = 1; height <= mq_min(is->oh, 16); height++)
        for (int64_t across = 1, last = 0; across <= mq_min(is->ow, 64); across++) {
            const int64_t width = mq_ceil_div(is->ow, across), down = mq_ceil_div(is->oh, height);
            if (width == last) continue; /* the same with lanes to spare */
            last = width;
            const int64_t sets = mq_ceil_div(is->n * down * across, LANES) * is->groups;
            const int64_t tables =
                input_rows(height, is->sy, is->kh, is->dy) * input_rows(width, is->sx, is->kw, is->dx);
            for (int64_t chunks = 1; chunks <= all; chunks += mq_max(all - 1, 1)) {
                const int64_t channels = mq_ceil_div(p->call->blocks8, chunks) * 8;
                const int64_t look_ups = height * width * p->call->taps * p->call->planes * channels;
                double cost = (double)(look_ups + tables * BUILD_COST) * mq_ceil_div(sets * chunks, is->threads);
                if (height * width * channels * LANES * 4 > SUMS_IN_CACHE) cost *= 1.05;
                if (least == 0 || cost < least) {
                    least = cost;
                    p->height = height, p->width = width, p->down = down, p->across = across, p->chunks = chunks;
                }
            }
        }
}

int PATH(mq_float)(const mq_call *call) {
    const mq_layer *is = &call->is;
    plan p = {.call = call, .ring = (is->kw - 1) * is->dx + 1};
    choose_rectangle(&p);
    p.quads_in_block = mq_min(mq_max(1, TABLES_IN_CACHE / p.ring), call->quads);
    const int64_t sets = mq_ceil_div(is->n * p.down * p.across, LANES), items = sets * is->groups;
    const int64_t chunks = p.chunks, blocks = mq_ceil_div(call->blocks8, chunks);
    const int64_t zero_floats = mq_ceil_div(call->cg, 16) * 16;
    /* Two tables more, into which a damaged weight may look: its byte is up to 255, not 15 << 3. */
    const int64_t table_floats = (p.ring * p.quads_in_block + 2) * TABLE;
    const int64_t sum_floats = p.height * p.width * blocks * 8 * LANES,
                  extra = (p.ring + is->kh + call->planes * is->kw + 8) / 8 * 64;
    const int64_t each = (table_floats + sum_floats) * (int64_t)sizeof(float) + extra;
    const int64_t threads = mq_min(is->threads, items * chunks);
    char *memory = mq_scratch(zero_floats * (int64_t)sizeof(float) + threads * each);
    if (!memory) return MQ_NO_MEMORY;
    memset(memory, 0, (size_t)zero_floats * sizeof(float));
    p.zeros = (const float *)memory;
    char *shared_out = memory + zero_floats * (int64_t)sizeof(float);
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        char *own = shared_out + thread * each;
        workspace work;
        work.tables = (float *)own;
        work.sums = work.tables + table_floats;
        work.owner = (int64_t *)(work.sums + sum_floats);
        work.meets = work.owner + p.ring;
        work.base = (const float **)(work.meets + is->kh);
        const int64_t from = items * chunks * thread / threads, to = items * chunks * (thread + 1) / threads;
        for (int64_t item = from; item < to; item++) {
            const int64_t chunk = item % chunks, set = item / chunks % sets, group = item / chunks / sets;
            const int64_t first = chunk * blocks, last = mq_min(call->blocks8, first + blocks);
            if (first < last) PATH(run_set)(&p, &work, group, set, first, last);
        }
    }
    free(memory);
    return MQ_OK;
}
