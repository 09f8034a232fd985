/* The AVX-512 instructions that the kernels use, in plain C: with -include and -DMQ_EMULATED_AVX512 path_avx512.c runs
 * on any processor with AVX2, under sanitizers. Only their results are emulated; what they cost is another matter.
 */
#ifndef AVX512_EMULATED_H
#define AVX512_EMULATED_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* There are no registers that wide to keep values in. */
#define KEEP(a, b) ((void)0)
#define KEEP_ORDER(a, b) ((void)0)

typedef union {
    __m512i all;
    __m512 floats;
    uint8_t u8[64];
    uint16_t u16[32];
    int16_t s16[32];
    uint32_t u32[16];
    int32_t s32[16];
    uint64_t u64[8];
    float f32[16];
} lanes512;

/* One result a lane, of the lanes of a and b, and n. */
#define EMULATE(name, type, part, arguments, take, expression)                                                         \
    static inline __attribute__((always_inline)) type emulated_##name arguments {                                      \
        lanes512 a, b, r;                                                                                              \
        take;                                                                                                          \
        (void)a, (void)b;                                                                                              \
        for (unsigned i = 0; i < sizeof r / sizeof r.part[0]; i++) r.part[i] = (expression);                           \
        return *(type *)&r;                                                                                            \
    }
#define TWO (__m512i a_, __m512i b_), (a.all = a_, b.all = b_)
#define ONE_N (__m512i a_, unsigned n), (a.all = a_, b.all = a_)
#define TWO_FLOATS (__m512 a_, __m512 b_), (a.floats = a_, b.floats = b_)
#define NONE(type) (type n), (memset(&a, 0, sizeof a), memset(&b, 0, sizeof b))
#define EMULATE_(...) EMULATE(__VA_ARGS__)

EMULATE_(set1_epi8, __m512i, u8, NONE(char), (uint8_t)n)
EMULATE_(set1_epi16, __m512i, u16, NONE(short), (uint16_t)n)
EMULATE_(set1_epi32, __m512i, u32, NONE(int), (uint32_t)n)
EMULATE_(set1_ps, __m512, f32, NONE(float), n)
EMULATE_(add_epi8, __m512i, u8, TWO, (uint8_t)(a.u8[i] + b.u8[i]))
EMULATE_(add_epi16, __m512i, u16, TWO, (uint16_t)(a.u16[i] + b.u16[i]))
EMULATE_(add_epi32, __m512i, u32, TWO, a.u32[i] + b.u32[i])
EMULATE_(sub_epi16, __m512i, u16, TWO, (uint16_t)(a.u16[i] - b.u16[i]))
EMULATE_(sub_epi32, __m512i, u32, TWO, a.u32[i] - b.u32[i])
EMULATE_(and_si512, __m512i, u64, TWO, a.u64[i] & b.u64[i])
EMULATE_(xor_si512, __m512i, u64, TWO, a.u64[i] ^ b.u64[i])
EMULATE_(andnot_si512, __m512i, u64, TWO, ~a.u64[i] & b.u64[i])
EMULATE_(slli_epi16, __m512i, u16, ONE_N, (uint16_t)(n > 15 ? 0 : a.u16[i] << n))
EMULATE_(srli_epi16, __m512i, u16, ONE_N, (uint16_t)(n > 15 ? 0 : a.u16[i] >> n))
EMULATE_(slli_epi32, __m512i, u32, ONE_N, n > 31 ? 0 : a.u32[i] << n)
EMULATE_(slli_epi64, __m512i, u64, ONE_N, n > 63 ? 0 : a.u64[i] << n)
EMULATE_(ror_epi32, __m512i, u32, ONE_N, a.u32[i] >> n % 32 | a.u32[i] << (32 - n % 32) % 32)
EMULATE_(popcnt_epi32, __m512i, u32, (__m512i a_), (a.all = a_, b.all = a_), (uint32_t)__builtin_popcount(a.u32[i]))
EMULATE_(shuffle_epi8, __m512i, u8, TWO, b.u8[i] & 128 ? 0 : a.u8[(i & 48) + (b.u8[i] & 15)])
EMULATE_(unpacklo_epi16, __m512i, u16, TWO, (i % 2 ? b : a).u16[i / 8 * 8 + i % 8 / 2])
EMULATE_(unpackhi_epi16, __m512i, u16, TWO, (i % 2 ? b : a).u16[i / 8 * 8 + 4 + i % 8 / 2])
EMULATE_(madd_epi16, __m512i, u32, TWO,
         (uint32_t)(a.s16[2 * i] * b.s16[2 * i]) + (uint32_t)(a.s16[2 * i + 1] * b.s16[2 * i + 1]))
EMULATE_(cvtepi32_ps, __m512, f32, (__m512i a_), (a.all = a_, b.all = a_), (float)a.s32[i])
EMULATE_(add_ps, __m512, f32, TWO_FLOATS, a.f32[i] + b.f32[i])
EMULATE_(mul_ps, __m512, f32, TWO_FLOATS, a.f32[i] * b.f32[i])
EMULATE_(max_ps, __m512, f32, TWO_FLOATS, a.f32[i] > b.f32[i] ? a.f32[i] : b.f32[i])
EMULATE_(permutexvar_ps, __m512, f32, (__m512i a_, __m512 b_), (a.all = a_, b.floats = b_), b.f32[a.u32[i] & 15])
EMULATE_(broadcast_i32x4, __m512i, u8, (__m128i n), (memcpy(a.u8, &n, 16), b = a), a.u8[i % 16])

static inline __attribute__((always_inline)) __m512i emulated_ternarylogic_epi32(__m512i a_, __m512i b_, __m512i c_,
                                                                                  int table) {
    lanes512 a = {a_}, b = {b_}, c = {c_}, r;
    memset(&r, 0, sizeof r);
    for (unsigned entry = 0; entry < 8; entry++) /* of the table: what a, b and c are there */
        for (int i = 0; table >> entry & 1 && i < 8; i++)
            r.u64[i] |= (entry & 4 ? a.u64[i] : ~a.u64[i]) & (entry & 2 ? b.u64[i] : ~b.u64[i]) &
                        (entry & 1 ? c.u64[i] : ~c.u64[i]);
    return r.all;
}

/* Lanes that a mask leaves out are neither read nor written, as sanitizers check. */
static inline __m512 emulated_maskz_loadu_ps(__mmask16 mask, const void *p) {
    lanes512 r;
    memset(&r, 0, sizeof r);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) memcpy(&r.f32[i], (const float *)p + i, sizeof(float));
    return r.floats;
}

static inline void emulated_mask_storeu_ps(void *p, __mmask16 mask, __m512 v) {
    lanes512 a;
    a.floats = v;
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) memcpy((float *)p + i, &a.f32[i], sizeof(float));
}

static inline __mmask16 emulated_mask_cmp_ps_mask(__mmask16 mask, __m512 a_, __m512 b_, int how) {
    lanes512 a, b;
    a.floats = a_, b.floats = b_;
    unsigned r = 0;
    for (int i = 0; i < 16; i++) r |= (unsigned)(how == _CMP_GE_OQ && a.f32[i] >= b.f32[i]) << i; /* only this one */
    return (__mmask16)(r & mask);
}

static inline __m512i emulated_loadu_si512(const void *p) {
    lanes512 r;
    memcpy(&r, p, sizeof r);
    return r.all;
}

static inline __m512 emulated_loadu_ps(const void *p) {
    lanes512 r;
    memcpy(&r, p, sizeof r);
    return r.floats;
}

static inline void emulated_storeu_si512(void *p, __m512i v) { memcpy(p, &v, sizeof v); }
static inline void emulated_storeu_ps(void *p, __m512 v) { memcpy(p, &v, sizeof v); }

#undef _mm512_ternarylogic_epi32
#undef _mm512_cmp_ps_mask
#undef _mm512_mask_cmp_ps_mask
#undef _mm512_slli_epi16
#undef _mm512_srli_epi16
#undef _mm512_slli_epi32
#undef _mm512_slli_epi64
#undef _mm512_ror_epi32
#define _mm512_add_epi16 emulated_add_epi16
#define _mm512_add_epi32 emulated_add_epi32
#define _mm512_add_epi8 emulated_add_epi8
#define _mm512_add_ps emulated_add_ps
#define _mm512_and_si512 emulated_and_si512
#define _mm512_andnot_si512 emulated_andnot_si512
#define _mm512_broadcast_i32x4 emulated_broadcast_i32x4
#define _mm512_cmp_ps_mask(a, b, how) emulated_mask_cmp_ps_mask(0xffff, a, b, how)
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_loadu_ps emulated_loadu_ps
#define _mm512_loadu_si512 emulated_loadu_si512
#define _mm512_madd_epi16 emulated_madd_epi16
#define _mm512_mask_cmp_ps_mask emulated_mask_cmp_ps_mask
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_max_ps emulated_max_ps
#define _mm512_mul_ps emulated_mul_ps
#define _mm512_permutexvar_ps emulated_permutexvar_ps
#define _mm512_popcnt_epi32 emulated_popcnt_epi32
#define _mm512_ror_epi32 emulated_ror_epi32
#define _mm512_set1_epi16 emulated_set1_epi16
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_set1_epi8 emulated_set1_epi8
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_setzero_ps() emulated_set1_ps(0)
#define _mm512_setzero_si512() emulated_set1_epi32(0)
#define _mm512_shuffle_epi8 emulated_shuffle_epi8
#define _mm512_slli_epi16 emulated_slli_epi16
#define _mm512_slli_epi32 emulated_slli_epi32
#define _mm512_slli_epi64 emulated_slli_epi64
#define _mm512_srli_epi16 emulated_srli_epi16
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_storeu_si512 emulated_storeu_si512
#define _mm512_sub_epi16 emulated_sub_epi16
#define _mm512_sub_epi32 emulated_sub_epi32
#define _mm512_ternarylogic_epi32 emulated_ternarylogic_epi32
#define _mm512_unpackhi_epi16 emulated_unpackhi_epi16
#define _mm512_unpacklo_epi16 emulated_unpacklo_epi16
#define _mm512_xor_si512 emulated_xor_si512

#endif
