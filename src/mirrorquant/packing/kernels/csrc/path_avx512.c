/* Processors with AVX-512 F, BW, VL, DQ and VPOPCNTDQ; or any, with the instructions emulated, as a test. */
#if (defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) &&                \
     defined(__AVX512VPOPCNTDQ__)) ||                                                                                  \
    defined(MQ_EMULATED_AVX512)
#define PATH(name) name##_avx512
#define VECTOR_LANES 16
#include "float_lookup.inc.h"
#include "byte_lookup.inc.h"
#include "binary_popcount.inc.h"
#else
typedef int mq_nothing_for_avx512;
#endif
