/* Processors with AVX2 and FMA. */
#if defined(__AVX2__) && defined(__FMA__)
#define PATH(name) name##_avx2
#define VECTOR_LANES 8
#include "float_lookup.inc.h"
#include "byte_lookup.inc.h"
#else
typedef int mq_nothing_for_avx2;
#endif
