/* Attention over keys and values in 8 bits, each row of a head with a scale of its own.

   Queries, and the weights of a chunk, are rounded to 16 bits: to 32767 times the greatest of their row. What is summed
   are integers, and so the order of sums changes no bit, nor does a weight of 0 let anything in. A register has room
   for twice as many products as of floats. */

#include "attention.h"

#define CODES 32767.0f /* of queries and weights; times 127, CHUNK times, they stay below 2^31 */

typedef int16_t pw __attribute__((vector_size(4 * PART)));

/* sum + the two products of 16 bits in each lane. */
INLINE pi dot(pi a, pi b, pi sum) {
#if PART == 16
    return (pi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (pi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif PART == 8 && defined(__AVX2__)
    return sum + (pi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return sum + (pi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return sum + (a >> 16) * (b >> 16) + (((a << 16) >> 16) * ((b << 16) >> 16));
#endif
}
INLINE pi splat_part(int32_t x) { return x - (pi){0}; }
INLINE pi ints_at(const int32_t *p) {
    pi v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The greatest size of x[0, count), a multiple of 16; no number where one is none. */
static float greatest(const float *x, int64_t count) {
    pi most = {0};
    for (int64_t c = 0; c < count; c += PART) most = greater_int((pi)part_at(x + c) & 0x7fffffff, most);
    int32_t lanes[PART];
    memcpy(lanes, &most, sizeof most);
    for (int half = PART / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] = lanes[l] > lanes[l + half] ? lanes[l] : lanes[l + half];
    float value;
    memcpy(&value, lanes, 4);
    return value;
}
/* What x is multiplied with to lie within -codes and codes, and what the codes are multiplied with to be x again: no
   number where x has something that is not finite. */
INLINE float steps(float greatest, float codes, float *scale) {
    const int finite = greatest < INFINITY;
    *scale = finite ? greatest / codes : NAN;
    return finite && greatest >= 1e-30f ? codes / greatest : 0.0f;
}

void round_row(char *to, const float *x, int64_t dim) {
    float padded[MOST_DIM], scale;
    memcpy(padded, x, (size_t)dim * 4);
    for (int64_t c = dim; c % LANES; c++) padded[c] = 0;
    const float step = steps(greatest(padded, dim), 127.0f, &scale);
    for (int64_t c = 0; c < dim; c += LANES) {
        const vi codes = nearest(loadf(padded + c) * splat(step));
        for (int64_t i = 0; i < LANES && c + i < dim; i++) to[c + i] = (char)codes[i];
    }
    memcpy(to + dim, &scale, SCALE_BYTES);
}

/* -- scores -------------------------------------------------------------------------------------------------------- */

/* Rows of q where they lie, to pairs of elements (0, 2), (1, 3), (4, 6), .. as the keys' are. */
void round_queries(const Tile *t) {
    const int64_t padded = t->a->padded;
    for (int64_t r = 0; r < t->rows; r++) {
        float *q = t->q + r * padded;
        const float step = steps(greatest(q, padded), CODES, t->q_scales + r);
        int32_t *pairs = (int32_t *)q;
        for (int64_t c = 0; c < padded; c += LANES, pairs += LANES / 2) {
            const vi codes = nearest(loadf(q + c) * splat(step));
            for (int i = 0; i < LANES / 2; i++) {
                const int first = i / 2 * 4 + i % 2;
                pairs[i] = (codes[first] & 0xffff) | (int32_t)((uint32_t)codes[first + 2] << 16);
            }
        }
    }
}

void stage_keys_8(const Tile *t, int64_t first, const char *const *at) {
    const int64_t words = t->a->padded / 4, dim = t->a->dim;
    int32_t *to = (int32_t *)t->keys + first;
    for (int64_t from = 0; from < words; from += PART) {
        pu word[PART];
        turn_words(word, at, 4 * from);
        EACH(i, PART) {
            if (i >= words - from) break;
            const pw odd = (pw)word[i] >> 8, even = (pw)((pw)word[i] << 8) >> 8;
            memcpy(to + (from + i) * 2 * BLOCK, &even, sizeof even);
            memcpy(to + ((from + i) * 2 + 1) * BLOCK, &odd, sizeof odd);
        }
    }
    for (int64_t j = 0; j < PART; j++) memcpy(t->key_scales + first + j, at[j] + dim, SCALE_BYTES);
}

INLINE void score_part(const Tile *t, int64_t r, int64_t j, float *scores, int64_t ld, const int rows,
                       const int parts) {
    const int64_t padded = t->a->padded;
    const int32_t *q = (const int32_t *)t->q + r * padded, *keys = (const int32_t *)t->keys + j;
    pi sum[TALL][8];
    EACH(i, rows) EACH(c, parts) sum[i][c] = (pi){0};
    for (int64_t pair = 0; pair < padded / 2; pair++) {
        pi key[8];
        EACH(c, parts) key[c] = ints_at(keys + pair * BLOCK + c * PART);
        EACH(i, rows) {
            const pi x = splat_part(q[i * padded + pair]);
            EACH(c, parts) sum[i][c] = dot(x, key[c], sum[i][c]);
        }
    }
    EACH(i, rows) EACH(c, parts) {
        const pf scale = part_at(t->key_scales + j + c * PART) * (t->q_scales[r + i] - (pf){0});
        const pf score = __builtin_convertvector(sum[i][c], pf) * scale;
        memcpy(scores + i * ld + j + c * PART, &score, sizeof score);
    }
}
INLINE void score_rows(const Tile *t, int64_t r, float *scores, int64_t ld, int64_t count, const int rows) {
    int64_t j = 0;
    for (; count - j > LANES; j += SCORE_PARTS(rows) * PART)
        score_part(t, r, j, scores, ld, rows, SCORE_PARTS(rows));
    for (; j < count; j += LANES) score_part(t, r, j, scores, ld, rows, REGISTERS);
}
void score_block_8(const Tile *t, int64_t from, int64_t end, float *scores, int64_t ld, int64_t count) {
    EACH_ROWS(r, rows, from, end) {
        float *to = scores + r * ld;
#define SCORE_ROWS(n) score_rows(t, r, to, ld, count, n)
        BY_ROWS(rows, SCORE_ROWS)
    }
}

/* -- values -------------------------------------------------------------------------------------------------------- */

static float value_scale(const Tile *t, const char *key) {
    float scale;
    memcpy(&scale, key + value_behind(t->a) + t->a->dim, SCALE_BYTES);
    return scale;
}
/* Of the chunk's first `count` keys, which all queries have by the table. */
void value_scales(const Tile *t, int64_t count) {
    for (int64_t j = 0; j < count; j++) t->value_scales[j] = value_scale(t, t->at[j]);
}

/* 16 products with step to 16 bits. */
INLINE void to_codes(int16_t *to, const float *x, float step) {
    const vi codes = nearest(loadf(x) * splat(step));
#if PART == 16
    const __m256i some = _mm512_cvtepi32_epi16((__m512i)codes);
    memcpy(to, &some, sizeof some);
#elif PART == 8 && defined(__AVX2__)
    const Parted x8 = {.i = codes};
    const __m256i some = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x8.ints[0], (__m256i)x8.ints[1]), 0xd8);
    memcpy(to, &some, sizeof some);
#else
    int16_t some[LANES];
    for (int i = 0; i < LANES; i++) some[i] = (int16_t)codes[i];
    memcpy(to, some, sizeof some);
#endif
}

/* Weights [low, count) of row r, times the scales of their values, to 16 bits where they lie, and zeros around them.
   Positions before `alike` are all queries'. */
void round_weights(const Tile *t, int64_t r, int64_t chunk, int64_t low, int64_t count, int64_t alike) {
    float *weights = t->scores + r * LD;
    int16_t *codes = (int16_t *)weights;
    t->factors[r] = 0;
    if (low >= count) {
        memset(codes, 0, LD * sizeof *codes);
        return;
    }
    const int64_t from = (low - chunk) / LANES * LANES, end = round_up(count - chunk, LANES);
    for (int64_t p = most(low, alike); p < count; p++) {
        const int64_t entry = t->prefix + path_of(t, r / t->group)[p - t->prefix];
        t->value_scales[p - chunk] = value_scale(t, key_at(t, entry));
    }
    for (int64_t j = from; j < end; j += LANES) storef(weights + j, loadf(weights + j) * loadf(t->value_scales + j));
    for (int64_t j = from; j < low - chunk; j++) weights[j] = 0; /* whatever their scales are */
    for (int64_t j = count - chunk; j < end; j++) weights[j] = 0;
    const float step = steps(greatest(weights + from, end - from), CODES, t->factors + r);
    for (int64_t j = from; j < end; j += LANES) to_codes(codes + j, weights + j, step);
    memset(codes, 0, (size_t)(low - chunk) * sizeof *codes);
    memset(codes + (count - chunk), 0, (size_t)(LD - (count - chunk)) * sizeof *codes);
}

/* 16 codes as integers. */
INLINE vi bytes_at(const char *p) {
    Parted x;
    EACH_REGISTER x.ints[c] = from_signed(p + PART * c);
    return x.i;
}
/* Values of two keys next to each other as pairs, [elements]; second: or NULL, zeros. */
INLINE void stage_pair(int32_t *to, const char *first, const char *second, int64_t padded) {
    for (int64_t c = 0; c < padded; c += LANES) {
        const vi pair = (bytes_at(first + c) & 0xffff) | (second ? bytes_at(second + c) << 16 : (vi){0});
        memcpy(to + c, &pair, sizeof pair);
    }
}
INLINE void value_part(int32_t *to, int64_t padded, const int16_t *codes, const int32_t *values, int64_t pairs,
                       const int rows, const int parts) {
    pi sum[TALL][4];
    EACH(r, rows) EACH(i, parts) sum[r][i] = ints_at(to + r * padded + i * PART);
    for (int64_t j = 0; j < pairs; j++) {
        pi value[4];
        EACH(i, parts) value[i] = ints_at(values + j * padded + i * PART);
        EACH(r, rows) {
            int32_t pair;
            memcpy(&pair, codes + r * 2 * LD + 2 * j, sizeof pair);
            const pi x = splat_part(pair);
            EACH(i, parts) sum[r][i] = dot(x, value[i], sum[r][i]);
        }
    }
    EACH(r, rows) EACH(i, parts) memcpy(to + r * padded + i * PART, &sum[r][i], sizeof sum[r][i]);
}
INLINE void value_rows(int32_t *to, int64_t padded, const int16_t *codes, const int32_t *values, int64_t pairs,
                       const int rows) {
    int64_t c = 0;
    for (; c + VALUE_PARTS(rows) * PART <= padded; c += VALUE_PARTS(rows) * PART)
        value_part(to + c, padded, codes, values + c, pairs, rows, VALUE_PARTS(rows));
    for (; c < padded; c += PART) value_part(to + c, padded, codes, values + c, pairs, rows, 1);
}
/* To the integers that `part` has of these rows meanwhile. */
void add_values_8(const Tile *t, const char *const *at, const char *const *after, int64_t chunk, int64_t from,
                  int64_t end, int64_t r, int64_t last) {
    const int64_t bytes = row_bytes(t->a), behind = value_behind(t->a), padded = t->a->padded;
    int32_t *staged = (int32_t *)t->staged;
    for (int64_t block = from; block < end; block += BLOCK) {
        const int64_t next = least(block + BLOCK, end), pairs = (next - block + 1) / 2;
        for (int64_t j = 0; j < pairs; j++) {
            const int64_t first = block + 2 * j - chunk, second = first + 1 < end - chunk ? first + 1 : first;
            const char *other = second > first ? at[second] + behind : NULL; /* what follows is others' */
            stage_pair(staged + j * padded, at[first] + behind, other, padded);
            if (after) bring(after[first], bytes), bring(after[second], bytes);
        }
        EACH_ROWS(row, rows, r, last) {
            int32_t *to = (int32_t *)t->part.values + row * padded;
            const int16_t *codes = (const int16_t *)(t->scores + row * LD) + (block - chunk);
#define VALUE_ROWS(n) value_rows(to, padded, codes, staged, pairs, n)
            BY_ROWS(rows, VALUE_ROWS)
        }
    }
}
void values_to_floats(const Tile *t) {
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t c = 0; c < t->a->padded; c += PART) {
            float *at = t->part.values + r * t->a->padded + c;
            const pf value = __builtin_convertvector(ints_at((const int32_t *)at), pf) * (t->factors[r] - (pf){0});
            memcpy(at, &value, sizeof value);
        }
}
