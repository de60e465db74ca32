/* GEMMs with weights in quantised blocks, for any number of rows.

   Rows are rounded to 8 bits, each block of 32 by a scale of its own. The sum of a block's products is a whole number,
   so it does not matter how it is made; the sums over blocks are made in float32, one block after the other, without
   contraction. So the bits of a row's result depend on the row and the weight alone: not on how many rows there are,
   nor on threads, nor on the instruction set.

   A block's weights are unpacked once for up to TILE rows. What differs between instruction sets is how many outputs
   are computed together, and `dot`. */

#include "blocks.h"

#define TILE 32
#define SMALLEST 0x1p-126f /* scale that rows are divided by: 1 / a smaller one may be infinite */
#define AHEAD (4 << 10)    /* bytes that are fetched before they are needed; hardware does not see past a page's end */

/* -- what an instruction set has: PART outputs at once, 4 bytes of each ---------------------------------------------- */

#if PART == 16 && !defined(__AVX512VNNI__) || PART == 8 && !defined(__AVX2__)
#error "dot has no instructions for this set: see isa.py"
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <immintrin.h>
#endif

typedef uint8_t vb __attribute__((vector_size(4 * PART)));
typedef int32_t vn __attribute__((vector_size(4 * PART)));
typedef uint8_t few_bytes __attribute__((vector_size(PART)));
typedef int8_t few_signed __attribute__((vector_size(PART)));

INLINE vb bytes_at(const uint8_t *p) {
    vb v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE pf floats_of(vn v) { return __builtin_convertvector(v, pf); }
/* PART bytes as whole numbers. GCC 12 would move them one by one for `__builtin_convertvector`. */
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
INLINE vn from_signed(const uint8_t *p) {
#if PART == 16
    return (vn)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p));
#elif defined(__AVX2__)
    return (vn)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p));
#else
    few_signed v;
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

/* sum over `count` groups of four inputs: w, not below 0 and at most 255 (less of narrow kinds), times x. */
INLINE vn dot(const Kind k, const vb *w, const int8_t *x, const int count) {
#if PART == 16
    vn sums[2] = {{0}, {0}}; /* two: each waits for its own last instruction */
    for (int g = 0; g < count; g++) {
        int32_t four;
        memcpy(&four, x + 4 * g, 4);
        sums[g % 2] = (vn)_mm512_dpbusd_epi32((__m512i)sums[g % 2], (__m512i)w[g], _mm512_set1_epi32(four));
    }
    return sums[0] + sums[1];
#elif defined(__AVXVNNI__)
    vn sums[2] = {{0}, {0}};
    for (int g = 0; g < count; g++) {
        int32_t four;
        memcpy(&four, x + 4 * g, 4);
        sums[g % 2] = (vn)_mm256_dpbusd_avx_epi32((__m256i)sums[g % 2], (__m256i)w[g], _mm256_set1_epi32(four));
    }
    return sums[0] + sums[1];
#elif defined(__AVX2__)
    /* Pairs are summed in 16 bits, as many as fit: 8 of 15 * 127 * 2, 4 of 31, 2 of 63. Of 8 bits no pair fits, but of
       numbers with a sign it does: -128 to 127, whose sign goes to x. */
    const int most = k.wide ? 1 : k.high == 2 ? 2 : k.high || k.mx ? 4 : 8;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    for (int first = 0; first < count; first += most) {
        __m256i pairs = _mm256_setzero_si256();
        for (int g = first; g < first + most && g < count; g++) {
            int32_t four;
            memcpy(&four, x + 4 * g, 4);
            __m256i y = _mm256_set1_epi32(four), v = (__m256i)w[g];
            if (k.wide) {
                y = _mm256_sign_epi8(y, v);
                v = _mm256_abs_epi8(v);
            }
            const __m256i both = _mm256_maddubs_epi16(v, y);
            pairs = g == first ? both : _mm256_add_epi16(pairs, both);
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
    return (vn)sum;
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sum = vdupq_n_s32(0);
    for (int g = 0; g < count; g += 4) {
        const int8x16_t y = vld1q_s8(x + 4 * g), *v = (const int8x16_t *)(w + g);
        sum = vdotq_laneq_s32(sum, v[0], y, 0);
        sum = vdotq_laneq_s32(sum, v[1], y, 1);
        sum = vdotq_laneq_s32(sum, v[2], y, 2);
        sum = vdotq_laneq_s32(sum, v[3], y, 3);
    }
    return (vn)sum;
#elif defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128();
    __m128i low = zero, high = zero; /* two halves of each output's sum */
    for (int g = 0; g < count; g++) {
        int32_t four;
        memcpy(&four, x + 4 * g, 4);
        const __m128i v = (__m128i)w[g], y = _mm_set1_epi32(four), wide = _mm_srai_epi16(_mm_unpacklo_epi8(y, y), 8);
        const __m128i a = k.wide ? _mm_srai_epi16(_mm_unpacklo_epi8(v, v), 8) : _mm_unpacklo_epi8(v, zero);
        const __m128i b = k.wide ? _mm_srai_epi16(_mm_unpackhi_epi8(v, v), 8) : _mm_unpackhi_epi8(v, zero);
        low = _mm_add_epi32(low, _mm_madd_epi16(a, wide));
        high = _mm_add_epi32(high, _mm_madd_epi16(b, wide));
    }
    const __m128 even = _mm_shuffle_ps((__m128)low, (__m128)high, 0x88);
    return (vn)even + (vn)_mm_shuffle_ps((__m128)low, (__m128)high, 0xdd);
#else
    vn sum = {0};
    for (int g = 0; g < count; g++)
        for (int o = 0; o < PART; o++)
            for (int i = 0; i < 4; i++) {
                const int q = k.wide ? (int8_t)w[g][4 * o + i] : w[g][4 * o + i];
                sum[o] += q * x[4 * g + i];
            }
    return sum;
#endif
}
#if PART == 16 || defined(__AVXVNNI__)
#define WIDE_IS_SIGNED 0 /* which `dot` takes 8 bits as they are stored, plus 128 */
#else
#define WIDE_IS_SIGNED 1
#endif

/* -- one panel ------------------------------------------------------------------------------------------------------ */

/* The 8 groups of a block's q, for the outputs from `o` on. */
INLINE void unpack(const Kind k, vb *w, const uint8_t *at, int64_t o) {
    at += 4 * o;
    if (k.wide) {
        for (int g = 0; g < 8; g++) w[g] = WIDE_IS_SIGNED ? bytes_at(at + 64 * g) ^ 128 : bytes_at(at + 64 * g);
        return;
    }
    for (int g = 0; g < 4; g++) {
        const vb both = bytes_at(at + 64 * g);
        w[g] = k.mx ? mx_values(both & 15) : both & 15;
        w[g + 4] = k.mx ? mx_values(both >> 4 & 15) : both >> 4 & 15;
    }
    if (k.high == 1) {
        const vb bits = bytes_at(at + 256);
        for (int g = 0; g < 8; g++) w[g] |= g < 4 ? (bits << (4 - g)) & 16 : (bits >> (g - 4)) & 16;
    }
    for (int half = 0; half < 2 && k.high == 2; half++) {
        const vb bits = bytes_at(at + 256 + 64 * half);
        w[4 * half] |= (bits << 4) & 48;
        w[4 * half + 1] |= (bits << 2) & 48;
        w[4 * half + 2] |= bits & 48;
        w[4 * half + 3] |= (bits >> 2) & 48;
    }
}

/* sums[row][16] of rows [row, row + rows) with a panel. */
INLINE void panel_of(const int64_t type, const Rounded *x, const uint8_t *at, int64_t row, int64_t rows,
                     float (*sums)[PANEL_OUTPUTS]) {
    const Kind k = kind_of(type);
    const int64_t blocks = x->inputs / BLOCK, size = block_bytes(k);
    const int takes_zero = k.zero && !(k.wide && WIDE_IS_SIGNED);
    pf units[PANEL_OUTPUTS / PART] = {0}, bases[PANEL_OUTPUTS / PART] = {0};
    for (int64_t b = 0; b < blocks; b++, at += size) {
        if (k.super && b % SUPER == 0) {
            for (int c = 0; c < PANEL_OUTPUTS / PART; c++) {
                units[c] = from_halves(at + 2 * PART * c);
                if (k.min) bases[c] = from_halves(at + 32 + 2 * PART * c);
            }
            at += head_bytes(k);
        }
        const int64_t first = b * x->rows + row;
        const int8_t *bytes = x->bytes + first * BLOCK;
        const float *scales = x->scales + first, *weighted = x->sums + first;
        const int32_t *halves = x->halves + 2 * first;
        for (int64_t c = 0; c < size; c += 64) __builtin_prefetch(at + AHEAD + c);
        for (int c = 0; c < PANEL_OUTPUTS / PART; c++) {
            const uint8_t *values = at + q_bytes(k);
            vb w[8];
            unpack(k, w, at, PART * c);
            vn one = {0}, two = {0};
            pf scale = {0}, min = {0};
            if (k.mx) {
                scale = from_exponents(values + PART * c);
            } else if (!k.super) {
                scale = from_halves(values + 2 * PART * c);
                if (k.min) min = from_halves(values + 32 + 2 * PART * c);
            } else if (k.halves) {
                scale = units[c];
                one = from_signed(values + PART * c);
                two = from_signed(values + 16 + PART * c);
            } else {
                scale = units[c] * floats_of(from_bytes(values + PART * c));
                min = -(bases[c] * floats_of(from_bytes(values + 16 + PART * c)));
            }
            for (int64_t r = 0; r < rows; r++) {
                vn whole;
                if (k.halves) {
                    const vn first_half = dot(k, w, bytes + r * BLOCK, 4) - (every(halves[2 * r]) << k.zero);
                    const vn second_half =
                        dot(k, w + 4, bytes + r * BLOCK + BLOCK / 2, 4) - (every(halves[2 * r + 1]) << k.zero);
                    whole = first_half * one + second_half * two;
                } else {
                    whole = dot(k, w, bytes + r * BLOCK, 8);
                    if (takes_zero) whole -= every(halves[2 * r] + halves[2 * r + 1]) << k.zero;
                }
                pf sum = part_at(sums[r] + PART * c);
                sum += floats_of(whole) * scale * every_float(scales[r]);
                if (k.min) sum += min * every_float(weighted[r]);
                memcpy(sums[r] + PART * c, &sum, sizeof sum);
            }
        }
    }
}
#define OF_TYPE(type)                                                                        \
    static void panel_##type(const Rounded *x, const uint8_t *at, int64_t row, int64_t rows, \
                             float (*sums)[PANEL_OUTPUTS]) {                                 \
        panel_of(type, x, at, row, rows, sums);                                              \
    }
OF_TYPE(Q4_0)
OF_TYPE(Q4_1)
OF_TYPE(Q5_0)
OF_TYPE(Q5_1)
OF_TYPE(Q8_0)
OF_TYPE(Q4_K)
OF_TYPE(Q5_K)
OF_TYPE(Q6_K)
OF_TYPE(MXFP4)
static void panel(int64_t type, const Rounded *x, const uint8_t *at, int64_t row, int64_t rows,
                  float (*sums)[PANEL_OUTPUTS]) {
    switch (type) {
    case Q4_0: panel_Q4_0(x, at, row, rows, sums); break;
    case Q4_1: panel_Q4_1(x, at, row, rows, sums); break;
    case Q5_0: panel_Q5_0(x, at, row, rows, sums); break;
    case Q5_1: panel_Q5_1(x, at, row, rows, sums); break;
    case Q8_0: panel_Q8_0(x, at, row, rows, sums); break;
    case Q4_K: panel_Q4_K(x, at, row, rows, sums); break;
    case Q5_K: panel_Q5_K(x, at, row, rows, sums); break;
    case Q6_K: panel_Q6_K(x, at, row, rows, sums); break;
    case MXFP4: panel_MXFP4(x, at, row, rows, sums); break;
    }
}

/* -- rows in 8 bits -------------------------------------------------------------------------------------------------- */

typedef int8_t byte_half __attribute__((vector_size(LANES)));
typedef int32_t four __attribute__((vector_size(16)));
typedef union {
    vi all;
    four parts[LANES / 4];
} Fours;

/* Of 16 numbers: the largest; the sum; all of them, which fit, as bytes. */
INLINE four larger_four(four a, four b) {
    const four first = a > b;
    return (first & a) | (~first & b);
}
INLINE int32_t largest_of(vi v) {
    const Fours x = {.all = v};
    four most = larger_four(larger_four(x.parts[0], x.parts[1]), larger_four(x.parts[2], x.parts[3]));
    most = larger_four(most, __builtin_shufflevector(most, most, 2, 3, 0, 1));
    return larger_four(most, __builtin_shufflevector(most, most, 1, 0, 3, 2))[0];
}
INLINE int32_t sum_of(vi v) {
    const Fours x = {.all = v};
    four sum = (x.parts[0] + x.parts[1]) + (x.parts[2] + x.parts[3]);
    sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1);
    return sum[0] + sum[1];
}
INLINE byte_half bytes_of(vi v) {
#if PART < 16 && defined(__SSE2__)
    const Fours x = {.all = v};
    const __m128i low = _mm_packs_epi32((__m128i)x.parts[0], (__m128i)x.parts[1]);
    return (byte_half)_mm_packs_epi16(low, _mm_packs_epi32((__m128i)x.parts[2], (__m128i)x.parts[3]));
#else
    return __builtin_convertvector(v, byte_half);
#endif
}

int64_t rounded_size(int64_t rows, int64_t inputs) { return rows * (inputs + inputs / BLOCK * 16); }
Rounded rounded_at(void *memory, int64_t rows, int64_t inputs) {
    const int64_t blocks = rows * (inputs / BLOCK);
    char *at = memory;
    return (Rounded){.bytes = (int8_t *)at,
                     .scales = (float *)(at + blocks * BLOCK),
                     .sums = (float *)(at + blocks * (BLOCK + 4)),
                     .halves = (int32_t *)(at + blocks * (BLOCK + 8)),
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
        const int32_t one = largest_of((vi)low & 0x7fffffff), other = largest_of((vi)high & 0x7fffffff);
        const int32_t size = one > other ? one : other;
        float most;
        memcpy(&most, &size, sizeof most);
        const int lost = size >= 0x7f800000;
        const float scale = lost ? NAN : most / 127, inverse = scale >= SMALLEST ? 1 / scale : 0;
        vi a = (vi)(low * splat(inverse) + magic) - (vi)magic, c = (vi)(high * splat(inverse) + magic) - (vi)magic;
        if (lost) a = c = (vi){0};
        const byte_half bytes[2] = {bytes_of(a), bytes_of(c)};
        memcpy(to->bytes + place * BLOCK, bytes, sizeof bytes);
        const int32_t first = sum_of(a), second = sum_of(c);
        to->scales[place] = scale;
        to->sums[place] = scale * (float)(first + second);
        to->halves[2 * place] = first;
        to->halves[2 * place + 1] = second;
    }
}
void round_part(const Rounded *to, const void *x, int64_t row, int64_t from, int64_t end, int64_t half) {
    if (half) round_blocks(to, x, row, from, end, 1);
    else round_blocks(to, x, row, from, end, 0);
}

/* -- shares of the work ---------------------------------------------------------------------------------------------- */

static void put(const Product *p, float (*sums)[PANEL_OUTPUTS], int64_t row, int64_t rows, int64_t output,
                int64_t count) {
    const int half = (int)p->half;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (row + r) * p->outputs + output;
        vf y = loadf(sums[r]);
        if (p->bias) y += load(p->bias, output, count, half);
        if (p->residual) y += load(p->residual, at, count, half);
        store(p->out, at, count, half, y);
    }
}
void multiply_blocks(const Product *p, int64_t from, int64_t to) {
    const int64_t *blocks = p->blocks;
    for (int64_t i = 0; i < blocks[0]; i++) {
        const Part part = part_of(blocks, i);
        const int64_t bytes = panel_bytes(kind_of(part.type), p->inputs), end = part.first + part.outputs;
        int64_t output = from > part.first ? from : part.first;
        for (; output < to && output < end; output += PANEL_OUTPUTS) {
            const uint8_t *at = part.panels + (output - part.first) / PANEL_OUTPUTS * bytes;
            const int64_t count = end - output < PANEL_OUTPUTS ? end - output : PANEL_OUTPUTS;
            for (int64_t row = 0; row < p->rows; row += TILE) {
                const int64_t rows = p->rows - row < TILE ? p->rows - row : TILE;
                float sums[TILE][PANEL_OUTPUTS];
                memset(sums, 0, (size_t)rows * sizeof *sums);
                panel(part.type, &p->rounded, at, row, rows, sums);
                put(p, sums, row, rows, output, count);
            }
        }
    }
}

typedef struct {
    Team team;
    Product product;
    int64_t unit; /* outputs that are not shared */
} BlockCall;

static void some_blocks(void *data) {
    BlockCall *j = data;
    const Member me = join(&j->team);
    Product *p = &j->product;
    Ahead nothing = {0};
    for (int64_t i = share(&me, p->rows, 0); i < share(&me, p->rows, 1); i++)
        round_part(&p->rounded, p->x, i, 0, p->inputs, p->half);
    meet(&me, &nothing);
    const int64_t units = (p->outputs + j->unit - 1) / j->unit;
    if (p->rows <= TILE) multiply_blocks(p, share(&me, units, 0) * j->unit, share(&me, units, 1) * j->unit);
    else
        for (int64_t i; (i = take(&p->next, 1)) < units;) multiply_blocks(p, i * j->unit, (i + 1) * j->unit);
}

/* out [rows, outputs], x [rows, inputs], residual [rows, outputs] or 0, rows; of the GEMM: 0, bias [outputs] or 0,
   inputs, outputs, 0, blocks; half, outputs that must not be shared (all, or 16), spare [rounded_size], workers */
PyObject *py_block_gemm(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[8 + GEMM];
    if (!numbers(args, given, 8 + GEMM, n)) return NULL;
    const int64_t *more = n + 4 + GEMM;
    BlockCall job = {.product = product_of(n + 4, more[0]), .unit = more[1]};
    Product *p = &job.product;
    p->out = POINTER(n[0]);
    p->x = POINTER(n[1]);
    p->residual = POINTER(n[2]);
    p->rows = n[3];
    p->rounded = rounded_at(POINTER(more[2]), p->rows, p->inputs);
    Py_BEGIN_ALLOW_THREADS
    run_team(some_blocks, &job, &job.team, POINTER(more[3]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
