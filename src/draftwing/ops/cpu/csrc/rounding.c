/* Rows in 8 bits, as GEMMs with weights in blocks read them: each block of 32 inputs has a scale of its own. */

#include "blocks.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define SMALLEST 0x1p-126f /* scale that rows are divided by: 1 / a smaller one may be infinite */

typedef int8_t byte_half __attribute__((vector_size(LANES)));
typedef int32_t four __attribute__((vector_size(16)));
typedef union {
    vi all;
    four parts[LANES / 4];
} Fours;

/* Of 16 numbers, twice: the largest. Of 16: the sum; all of them, which fit, as bytes. */
INLINE four larger_four(four a, four b) {
    const four first = a > b;
    return (first & a) | (~first & b);
}
INLINE int32_t largest_of(vi v, vi w) {
#if PART == 16
    return _mm512_reduce_max_epi32(_mm512_max_epi32((__m512i)v, (__m512i)w));
#else
    const Fours x = {.all = v}, y = {.all = w};
    four most = larger_four(larger_four(x.parts[0], x.parts[1]), larger_four(x.parts[2], x.parts[3]));
    most = larger_four(most, larger_four(larger_four(y.parts[0], y.parts[1]), larger_four(y.parts[2], y.parts[3])));
    most = larger_four(most, __builtin_shufflevector(most, most, 2, 3, 0, 1));
    return larger_four(most, __builtin_shufflevector(most, most, 1, 0, 3, 2))[0];
#endif
}
INLINE int32_t sum_of(vi v) {
#if PART == 16
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    const Fours x = {.all = v};
    four sum = (x.parts[0] + x.parts[1]) + (x.parts[2] + x.parts[3]);
    sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1);
    return sum[0] + sum[1];
#endif
}
INLINE byte_half bytes_of(vi v) {
#if PART == 16
    return (byte_half)_mm512_cvtepi32_epi8((__m512i)v);
#elif defined(__SSE2__)
    const Fours x = {.all = v};
    const __m128i low = _mm_packs_epi32((__m128i)x.parts[0], (__m128i)x.parts[1]);
    return (byte_half)_mm_packs_epi16(low, _mm_packs_epi32((__m128i)x.parts[2], (__m128i)x.parts[3]));
#else
    return __builtin_convertvector(v, byte_half);
#endif
}

int64_t rounded_size(int64_t rows, int64_t inputs) { return rows * (inputs + inputs / BLOCK * 20); }
Rounded rounded_at(void *memory, int64_t rows, int64_t inputs) {
    const int64_t blocks = rows * (inputs / BLOCK);
    char *at = memory;
    return (Rounded){.bytes = (int8_t *)at,
                     .scales = (float *)(at + blocks * BLOCK),
                     .sums = (float *)(at + blocks * (BLOCK + 4)),
                     .less = (int32_t *)(at + blocks * (BLOCK + 8)),
                     .rows = rows,
                     .inputs = inputs};
}

/* Sizes are compared as whole numbers, as which floats above 0 have the same order, and what is infinite or no number
   comes last. It must not get lost: a block with it has no number as its scale. */
INLINE void round_blocks(const Rounded *to, const void *x, int64_t row, int64_t from, int64_t end, const int half) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number, in the low bits */
    for (int64_t b = from / BLOCK; b < end / BLOCK; b++) {
        const int64_t at = row * to->inputs + b * BLOCK, place = b * to->rows + row;
        const vf low = load(x, at, LANES, half), high = load(x, at + LANES, LANES, half);
        const int32_t size = largest_of((vi)low & 0x7fffffff, (vi)high & 0x7fffffff);
        float most;
        memcpy(&most, &size, sizeof most);
        const int lost = size >= 0x7f800000;
        const float scale = lost ? NAN : most / 127, inverse = scale >= SMALLEST ? 1 / scale : 0;
        vi a = (vi)(low * splat(inverse) + magic) - (vi)magic, c = (vi)(high * splat(inverse) + magic) - (vi)magic;
        if (lost) a = c = (vi){0};
        const byte_half bytes = bytes_of(a), others = bytes_of(c);
        memcpy(to->bytes + place * BLOCK, &bytes, sizeof bytes);
        memcpy(to->bytes + place * BLOCK + LANES, &others, sizeof others);
        const int32_t first = sum_of(a), second = sum_of(c);
        to->scales[place] = scale;
        to->sums[place] = scale * (float)(first + second);
        to->less[3 * place] = -first;
        to->less[3 * place + 1] = -second;
        to->less[3 * place + 2] = -(first + second);
    }
}
void round_part(const Rounded *to, const void *x, int64_t row, int64_t from, int64_t end, int64_t half) {
    if (half) round_blocks(to, x, row, from, end, 1);
    else round_blocks(to, x, row, from, end, 0);
}
