/* What an instruction set has for GEMMs with weights in blocks: PART outputs at once, 4 bytes of each, and `dots`. Its
   sums are whole numbers, so it does not matter in which order they are made. */

#pragma once
#include "blocks.h"

#if PART == 16 && !defined(__AVX512VNNI__) || PART == 8 && !defined(__AVX2__)
#error "dot has no instructions for this set: see isa.py"
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <immintrin.h>
#endif

typedef uint8_t vb __attribute__((vector_size(4 * PART)));
typedef pi vn;
typedef uint8_t few_bytes __attribute__((vector_size(PART)));

INLINE vb bytes_at(const uint8_t *p) {
    vb v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE pf floats_of(vn v) { return __builtin_convertvector(v, pf); }
/* PART bytes as whole numbers, as `from_signed`. */
INLINE vn from_bytes(const uint8_t *p) {
#if PART == 16
    return (vn)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
#elif defined(__AVX2__)
    return (vn)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
#else
    few_bytes v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vn);
#endif
}
INLINE pf from_halves(const uint8_t *p) {
#if PART == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#elif defined(__aarch64__)
    float16x4_t h;
    memcpy(&h, p, sizeof h);
    return vcvt_f32_f16(h);
#else
    uint16_t h[PART];
    pf v;
    memcpy(h, p, sizeof h);
    for (int i = 0; i < PART; i++) v[i] = from_half(h[i]);
    return v;
#endif
}
INLINE pf from_exponents(const uint8_t *p) {
    const vn e = from_bytes(p), small = e < 2;
    return (pf)((small & (e + 1) << 21) | (~small & (e - 1) << 23));
}
/* Twice the values of MXFP4's codes, plus 16. */
INLINE vb mx_values(vb codes) {
#if PART == 16
    const __m128i values = _mm_add_epi8(_mm_setr_epi8(MX_VALUES), _mm_set1_epi8(16));
    return (vb)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
#elif defined(__AVX2__)
    const __m128i values = _mm_add_epi8(_mm_setr_epi8(MX_VALUES), _mm_set1_epi8(16));
    return (vb)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
#elif defined(__aarch64__)
    const int8x16_t values = {MX_VALUES};
    return (vb)vreinterpretq_u8_s8(vaddq_s8(vqtbl1q_s8(values, (uint8x16_t)codes), vdupq_n_s8(16)));
#else
    const vb size = codes & 7, five = (vb)(size > 4), six = (vb)(size > 5), seven = (vb)(size > 6);
    const vb value = size + (five & 1) + (six & 1) + (seven & 3), minus = (vb)(codes > 7);
    return ((value ^ minus) - minus) + 16;
#endif
}
INLINE vn every(int32_t x) { return x - (vn){0}; }
INLINE pf every_float(float x) { return x - (pf){0}; }
INLINE int32_t four_at(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return four;
}

/* Rows, and parts of a panel, that `dots` sums side by side: what is loaded serves several sums, and each waits for its
   own last instruction. Swept by GEMMs of 8 and 16 rows: 1 to 4 rows, with vectors of 64 bytes 8, too. */
#if PART == 16
#define MANY 8
#define WIDE 1
#elif PART == 8
#define MANY 4
#define WIDE 2
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define MANY 2
#define WIDE 1
#else
#define MANY 1
#define WIDE 1
#endif

/* Of 16 registers, weights leave none to sums: they wait in memory, and sums stay where they are. */
#if PART == 8
#define IN_MEMORY(pointer, array) __asm__("" : "+r"(pointer), "+m"(array))
#define IN_REGISTER(sum) __asm__("" : "+x"(sum))
#else
#define IN_MEMORY(pointer, array)
#define IN_REGISTER(sum)
#endif

#if defined(__AVX2__) && PART == 8 && !defined(__AVXVNNI__)
/* Of 8 bits no pair fits into 16, but of numbers with a sign it does: -128 to 127, whose sign goes to x. */
INLINE __m256i products(const Kind k, vb w, const int8_t *x) {
    const __m256i v = (__m256i)w, y = _mm256_set1_epi32(four_at(x));
    return k.wide ? _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(y, v)) : _mm256_maddubs_epi16(v, y);
}
#elif defined(__ARM_FEATURE_DOTPROD)
INLINE int32x4_t of_one_row(int32x4_t sum, const vb *w, const int8_t *x) {
    const int8x16_t y = vld1q_s8(x), *v = (const int8x16_t *)w;
    sum = vdotq_laneq_s32(sum, v[0], y, 0);
    sum = vdotq_laneq_s32(sum, v[1], y, 1);
    sum = vdotq_laneq_s32(sum, v[2], y, 2);
    return vdotq_laneq_s32(sum, v[3], y, 3);
}
#endif

/* Whether `dots` takes 8 bits with their sign; else as they are stored, plus 128. */
#if PART == 16 || defined(__AVXVNNI__)
#define WIDE_IS_SIGNED 0
#else
#define WIDE_IS_SIGNED 1
#endif

/* Adds to sums[row][part] the products of groups [from, to) of four inputs: w[part], not below 0 and at most 255 (less
   of narrow kinds), times x of `rows` rows, up to MANY. */
INLINE void dots(const Kind k, const vb (*w)[8], const int8_t *x, const int from, const int to, const int rows,
                 vn (*sums)[WIDE]) {
#if PART == 16
#pragma GCC unroll 8
    for (int g = from; g < to; g++)
        for (int r = 0; r < rows; r++) {
            const __m512i y = _mm512_set1_epi32(four_at(x + BLOCK * r + 4 * g));
            sums[r][0] = (vn)_mm512_dpbusd_epi32((__m512i)sums[r][0], (__m512i)w[0][g], y);
        }
#elif defined(__AVXVNNI__)
#pragma GCC unroll 8
    for (int g = from; g < to; g++)
        for (int r = 0; r < rows; r++) {
            const __m256i y = _mm256_set1_epi32(four_at(x + BLOCK * r + 4 * g));
            for (int c = 0; c < WIDE; c++) {
                sums[r][c] = (vn)_mm256_dpbusd_avx_epi32((__m256i)sums[r][c], (__m256i)w[c][g], y);
                IN_REGISTER(sums[r][c]);
            }
        }
#elif defined(__AVX2__)
    /* Sums of pairs in 16 bits, of as many as fit: 8 of 15 * 127 * 2, 4 of 31, 2 of 63. */
    const int fit = k.wide ? 1 : k.high == 2 ? 2 : k.high || k.mx ? 4 : 8, most = fit < to - from ? fit : to - from;
    for (int first = from; first < to; first += most) {
        __m256i pairs[MANY][WIDE];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < WIDE; c++) pairs[r][c] = products(k, w[c][first], x + BLOCK * r + 4 * first);
#pragma GCC unroll 8
        for (int g = first + 1; g < first + most; g++)
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < WIDE; c++) {
                    const __m256i more = products(k, w[c][g], x + BLOCK * r + 4 * g);
                    pairs[r][c] = _mm256_add_epi16(pairs[r][c], more);
                    IN_REGISTER(pairs[r][c]);
                }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < WIDE; c++) sums[r][c] += (vn)_mm256_madd_epi16(pairs[r][c], _mm256_set1_epi16(1));
    }
#elif defined(__ARM_FEATURE_DOTPROD)
#if MANY == 2
    if (rows == 2) { /* two rows with two outputs each, of 8 inputs */
        const int64x2_t one = (int64x2_t)sums[0][0], other = (int64x2_t)sums[1][0];
        int32x4_t left = (int32x4_t)vzip1q_s64(one, other), right = (int32x4_t)vzip2q_s64(one, other);
        for (int g = from; g < to; g += 4) {
            const int64x2_t a = (int64x2_t)vld1q_s8(x + 4 * g), b = (int64x2_t)vld1q_s8(x + BLOCK + 4 * g);
            const int8x16_t y[2] = {(int8x16_t)vzip1q_s64(a, b), (int8x16_t)vzip2q_s64(a, b)};
            for (int i = 0; i < 2; i++) {
                const int32x4_t u = (int32x4_t)w[0][g + 2 * i], v = (int32x4_t)w[0][g + 2 * i + 1];
                left = vmmlaq_s32(left, y[i], (int8x16_t)vzip1q_s32(u, v));
                right = vmmlaq_s32(right, y[i], (int8x16_t)vzip2q_s32(u, v));
            }
        }
        sums[0][0] = (vn)vzip1q_s64((int64x2_t)left, (int64x2_t)right);
        sums[1][0] = (vn)vzip2q_s64((int64x2_t)left, (int64x2_t)right);
        return;
    }
#endif
    for (int g = from; g < to; g += 4) sums[0][0] = (vn)of_one_row((int32x4_t)sums[0][0], w[0] + g, x + 4 * g);
#elif defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128();
    __m128i low = zero, high = zero; /* two halves of each output's sum */
    for (int g = from; g < to; g++) {
        const __m128i v = (__m128i)w[0][g], y = _mm_set1_epi32(four_at(x + 4 * g));
        const __m128i wide = _mm_srai_epi16(_mm_unpacklo_epi8(y, y), 8);
        const __m128i a = k.wide ? _mm_srai_epi16(_mm_unpacklo_epi8(v, v), 8) : _mm_unpacklo_epi8(v, zero);
        const __m128i b = k.wide ? _mm_srai_epi16(_mm_unpackhi_epi8(v, v), 8) : _mm_unpackhi_epi8(v, zero);
        low = _mm_add_epi32(low, _mm_madd_epi16(a, wide));
        high = _mm_add_epi32(high, _mm_madd_epi16(b, wide));
    }
    const __m128 even = _mm_shuffle_ps((__m128)low, (__m128)high, 0x88);
    sums[0][0] += (vn)even + (vn)_mm_shuffle_ps((__m128)low, (__m128)high, 0xdd);
#else
    for (int g = from; g < to; g++)
        for (int o = 0; o < PART; o++)
            for (int i = 0; i < 4; i++) {
                const int q = k.wide ? (int8_t)w[0][g][4 * o + i] : w[0][g][4 * o + i];
                sums[0][0][o] += q * x[4 * g + i];
            }
#endif
}

/* -- numbers to 8 bits ------------------------------------------------------------------------------------------------ */

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
/* Scale of numbers whose largest has these bits, and what they are multiplied with to be at most 127; returns whether one
   of them is infinite or no number, which a scale that is none tells. */
INLINE int scale_of(int32_t largest, float *scale, float *inverse) {
    float most;
    memcpy(&most, &largest, sizeof most);
    const int lost = largest >= 0x7f800000;
    *scale = lost ? NAN : most / 127;
    *inverse = *scale >= SMALLEST ? 1 / *scale : 0;
    return lost;
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
