/* What attention.c and attention_int8.c share: a tile of queries with one head of keys, and how its keys are turned. */

#pragma once
#include "sums.h"

#define CHUNK 256      /* positions that have one maximum */
#define BLOCK 64       /* keys that are turned together */
#define TILE_ROWS 192  /* query heads of a tile, unless one query has more; measured: 96 to 384 */
#define FEW_ROWS 12    /* a tile has so many at least where units are too few */
#define UNITS 4        /* of a thread, so that all end at about the same time */
#define TICKETS 1024   /* tiles that may be several units */
#define BLOCK_LINES 48 /* of what is read next, fetched with a block of keys */
#define PREFETCH_ROWS 24 /* query heads: a tile of so many or less waits for memory; measured: 3 to 16 */
#define PREFETCH_BYTES 512 /* a head's key and value: shorter ones CPUs bring by themselves; measured: 256, 512, 1024 */
#define PREFETCH_CHUNKS 4 /* of a tile, on average: the first of a unit is fetched by nobody; not swept */
#define LD (CHUNK + LANES) /* between rows of scores: powers of two would have them share a few cache lines */
#define NONE (-INFINITY)

/* Registers of values in a sum, as of keys (sums.h); lines that are prefetched while words are turned, and in a turn of
   values. */
#if PART == 16
#define VALUE_PARTS(rows) 4
#define STAGE_LINES 8
#define VALUE_LINES 4
#elif PART == 8
#define VALUE_PARTS(rows) ((rows) <= 3 ? 4 : 2)
#define STAGE_LINES 2
#define VALUE_LINES 1
#else
#define VALUE_PARTS(rows) 4
#define STAGE_LINES 1
#define VALUE_LINES 1
#endif

/* What chunks of a tile come to: of each row its maximum (-inf: it has no key there), the sum of its weights, and of
   its values. */
typedef struct {
    float *tops, *sums, *values; /* [rows, up to 16s], the same, [rows, padded] */
} Parts;

typedef struct {
    const Attention *a;
    Prefetch *prefetch;
    int prefetched;              /* whether this chunk was fetched so */
    const char *fetched;         /* the piece that was last */
    const int64_t *table, *path; /* path: of the first query; NULL: all keys come by the table */
    int64_t head, group, queries, rows, query; /* rows: query heads; query: the first one's number in the batch */
    int64_t prefix, end;                       /* keys that all queries may see, and most that one sees */
    int64_t *counts, *lows;                    /* of rows */
    int late;                                  /* see `fused_late` */
    float scale;                               /* of scores, for exp2; in q already, unless keys are in bfloat16 */
    float *q, *keys, *staged, *scores, *beside; /* beside: scores of a tree's nodes, [rows, BLOCK] */
    const char **at, **after, **here;           /* keys of a chunk, of the next, of a block */
    float *keep, *join;                         /* of rows: factors of two parts that are joined */
    float *q_scales, *key_scales, *value_scales, *factors; /* of 8 bits: of rows, a block, a chunk; of rows' weights */
    Parts whole, part;
} Tile;

/* Shuffles of two vectors, in each 128 bits: words one by one, or two by two; of the first half or the second. */
#if PART == 16
#define EACH_128(i, j, k, l) \
    i, j, k, l, 4 + i, 4 + j, 4 + k, 4 + l, 8 + i, 8 + j, 8 + k, 8 + l, 12 + i, 12 + j, 12 + k, 12 + l
#elif PART == 8
#define EACH_128(i, j, k, l) i, j, k, l, 4 + i, 4 + j, 4 + k, 4 + l
#else
#define EACH_128(i, j, k, l) i, j, k, l
#endif
#define ZIP(a, b, half) \
    __builtin_shufflevector(a, b, EACH_128(2 * half, PART + 2 * half, 2 * half + 1, PART + 2 * half + 1))
#define PAIRS(a, b, half) \
    __builtin_shufflevector(a, b, EACH_128(2 * half, 2 * half + 1, PART + 2 * half, PART + 2 * half + 1))
/* Two of the 128 bits of each. */
#define OF_128(i) 4 * (i), 4 * (i) + 1, 4 * (i) + 2, 4 * (i) + 3
#if PART == 16
#define JOINED_128(a, b, i, j) __builtin_shufflevector(a, b, OF_128(i), OF_128(j), OF_128(4 + i), OF_128(4 + j))
#elif PART == 8
#define JOINED_128(a, b, i) __builtin_shufflevector(a, b, OF_128(i), OF_128(2 + i))
#endif

/* to[i] = word i of PART keys, of as many words from `byte` on. Each line of a key is read once: keys often lie so that
   the first cache has room for a few of them only. */
INLINE void turn_words(pu *to, const char *const *at, int64_t byte) {
    pu v[PART], zipped[PART];
    EACH(j, PART) memcpy(&v[j], at[j] + byte, sizeof v[j]);
#pragma GCC unroll 8
    for (int j = 0; j < PART; j += 2) zipped[j] = ZIP(v[j], v[j + 1], 0), zipped[j + 1] = ZIP(v[j], v[j + 1], 1);
#pragma GCC unroll 4
    for (int j = 0; j < PART; j += 4) {
        v[j] = PAIRS(zipped[j], zipped[j + 2], 0), v[j + 1] = PAIRS(zipped[j], zipped[j + 2], 1);
        v[j + 2] = PAIRS(zipped[j + 1], zipped[j + 3], 0), v[j + 3] = PAIRS(zipped[j + 1], zipped[j + 3], 1);
    }
    EACH(i, 4) {
#if PART == 16
        const pu a = JOINED_128(v[i], v[4 + i], 0, 1), b = JOINED_128(v[i], v[4 + i], 2, 3);
        const pu c = JOINED_128(v[8 + i], v[12 + i], 0, 1), d = JOINED_128(v[8 + i], v[12 + i], 2, 3);
        to[i] = JOINED_128(a, c, 0, 2), to[4 + i] = JOINED_128(a, c, 1, 3);
        to[8 + i] = JOINED_128(b, d, 0, 2), to[12 + i] = JOINED_128(b, d, 1, 3);
#elif PART == 8
        to[i] = JOINED_128(v[i], v[4 + i], 0), to[4 + i] = JOINED_128(v[i], v[4 + i], 1);
#else
        to[i] = v[i];
#endif
    }
}
INLINE void bring(const char *at, int64_t bytes) {
    for (int64_t c = 0; c < bytes; c += 64) __builtin_prefetch(at + c, 0, 2);
}
/* Of a key or a value. */
INLINE int64_t row_bytes(const Attention *a) {
    return a->kv_type == INT8 ? a->dim + SCALE_BYTES : a->dim * (a->kv_type == HALF ? 2 : 4);
}

/* How far behind a key its value is. */
INLINE int64_t value_behind(const Attention *a) { return a->parts > 1 ? row_bytes(a) : 0; }

INLINE int in_pairs(const Attention *a) { return HAS_PAIRS && a->kv_type == HALF; }

/* Where the key of a page table's entry is. */
INLINE const char *key_at(const Tile *t, int64_t entry) {
    const Attention *a = t->a;
    return (const char *)a->kv + (t->table[entry] * a->kv_heads + t->head) * a->parts * row_bytes(a);
}
INLINE const int64_t *path_of(const Tile *t, int64_t query) { return t->path + query * t->a->batch.depth; }

/* 2^x of x of about 0 or less, as `exp2_16` but with fused products; coarse: to 3e-6, for what becomes bfloat16. */
INLINE pf exp2_part(pf x, const int coarse) {
    const pf magic = 12582912.0f - (pf){0};
    const pi normal = (pi)(x >= -126.0f);
    const pf r = x + magic, f = x - (r - magic);
    pf p;
    if (coarse) {
        p = fused(f, 9.582814644e-3f - (pf){0}, 5.590636021e-2f - (pf){0}); /* 1 at 0, else the least error */
        p = fused(p, f, 2.402409887e-1f - (pf){0});
        p = fused(p, f, 6.931242010e-1f - (pf){0});
    } else {
        p = fused(f, 1.525273380e-5f - (pf){0}, 1.540353039e-4f - (pf){0});
        p = fused(p, f, 1.333355815e-3f - (pf){0});
        p = fused(p, f, 9.618129108e-3f - (pf){0});
        p = fused(p, f, 5.550410866e-2f - (pf){0});
        p = fused(p, f, 2.402265070e-1f - (pf){0});
        p = fused(p, f, 6.931471806e-1f - (pf){0});
    }
    p = fused(p, f, 1.0f - (pf){0});
    return (pf)((pi)((pu)p + ((pu)r << 23)) & normal); /* of magic's bits none stays; unsigned, for it wraps */
}
/* The greater of each lane; y where x is no number, or both are zeros. */
INLINE pf greater(pf x, pf y) {
#if PART == 16
    return (pf)_mm512_max_ps((__m512)x, (__m512)y);
#elif PART == 8
    return (pf)_mm256_max_ps((__m256)x, (__m256)y);
#else
    const pi above = (pi)(x > y);
    return (pf)((above & (pi)x) | (~above & (pi)y));
#endif
}
INLINE pi greater_int(pi x, pi y) {
#if PART == 16
    return (pi)_mm512_max_epi32((__m512i)x, (__m512i)y);
#elif PART == 8
    return (pi)_mm256_max_epi32((__m256i)x, (__m256i)y);
#else
    const pi above = (pi)(x > y);
    return (above & x) | (~above & y);
#endif
}
INLINE int any_lane(pi v) {
#if PART == 16
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif PART == 8
    return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
    return (v[0] | v[1] | v[2] | v[3]) != 0;
#endif
}
/* Of numbers, the greatest. */
INLINE float greatest_lane(const Parted *x) {
    float s[4];
#if PART == 16
    const __m512 v = (__m512)x->f;
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#elif PART == 8
    const __m256 half = (__m256)greater(x->floats[0], x->floats[1]);
#endif
#if PART > 4
    const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    const pf quarter = greater(greater(x->floats[0], x->floats[2]), greater(x->floats[1], x->floats[3]));
#endif
    memcpy(s, &quarter, sizeof s);
    const float one = s[0] > s[2] ? s[0] : s[2], other = s[1] > s[3] ? s[1] : s[3];
    return one > other ? one : other;
}

/* Weights that are in bfloat16 as words of two, the first as the upper half, for that is added first. */
INLINE void store_pairs(float *to, pf weights) {
#if HAS_PAIRS
    _mm256_storeu_si256((void *)to, _mm256_rol_epi32((__m256i)_mm512_cvtneps_pbh((__m512)weights), 16));
#endif
}

/* Scores [low, count) to weights exp2(score - maximum), and zeros around them up to whole vectors. Returns their sum,
   which 16 lanes have in the order of positions; no number where one of the scores is none. half: scores are times
   `scale`, and weights in bfloat16, the greater of two that are as near; in words of two where there are pairs. */
INLINE float softmax(float *s, int64_t low, int64_t count, float *top, float scale, const int half) {
    const int64_t from = low / LANES * LANES, end = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = from; j < low; j++) s[j] = NONE;
    for (int64_t j = count; j < end; j++) s[j] = NONE;
    Parted greatest = {.f = loadf(s + from)}, sum = {0};
    pf parts[REGISTERS];
    pi lost[REGISTERS];
    EACH_REGISTER parts[c] = greatest.floats[c];
    EACH_REGISTER lost[c] = (pi)(parts[c] != parts[c]);
    for (int64_t j = from + LANES; j < end; j += LANES) {
        EACH_REGISTER {
            const pf x = part_at(s + j + c * PART);
            lost[c] |= (pi)(x != x);
            parts[c] = greater(x, parts[c]);
        }
    }
    EACH_REGISTER greatest.floats[c] = parts[c];
    int any = 0;
    EACH_REGISTER any |= any_lane(lost[c]);
    const float highest = greatest_lane(&greatest) * (half ? scale : 1);
    const pf max = highest - (pf){0}, factor = scale - (pf){0};
    EACH_REGISTER parts[c] = (pf){0};
    for (int64_t j = from; j < end; j += LANES) {
        EACH_REGISTER {
            pf x = part_at(s + j + c * PART);
            x = half ? exp2_part(fused(x, factor, -max), 1) : exp2_part(x - max, 0);
            if (half) x = (pf)(((pi)x + 0x8000) & (int32_t)0xffff0000);
            parts[c] += x;
            if (HAS_PAIRS && half) store_pairs(s + j / 2, x);
            else memcpy(s + j + c * PART, &x, sizeof x);
        }
    }
    EACH_REGISTER sum.floats[c] = parts[c];
    *top = any ? 0 : highest;
    return any ? NAN : sum_lanes(sum.f);
}

/* By types of the pool: attention_float.c, attention_int8.c. */

/* Turns PART keys, the block's from `first` on, to t->keys. */
HIDDEN void stage_keys_float(const Tile *t, int64_t first, const char *const *at);
HIDDEN void stage_keys_8(const Tile *t, int64_t first, const char *const *at);
/* Scores of rows [from, end) with the block's keys: scores + row * ld, of `count` or more, up to BLOCK. */
HIDDEN int64_t chunk_lines(const Attention *a, int64_t rows);
HIDDEN void score_block_float(const Tile *t, int64_t from, int64_t end, float *scores, int64_t ld, int64_t count);
HIDDEN void score_block_8(const Tile *t, int64_t from, int64_t end, float *scores, int64_t ld, int64_t count);
/* Adds the values of positions [from, end), weighted, to the sums of rows [r, last). at: addresses of their keys, of
   position `chunk` the first; after: of keys that are read next, or NULL. */
HIDDEN void add_values_float(const Tile *t, const char *const *at, const char *const *after, int64_t chunk,
                             int64_t from, int64_t end, int64_t r, int64_t last);
HIDDEN void add_values_8(const Tile *t, const char *const *at, const char *const *after, int64_t chunk, int64_t from,
                         int64_t end, int64_t r, int64_t last);
HIDDEN void halve_queries(const Tile *t); /* where keys are in bfloat16 */
/* In 8 bits alone; see there. */
HIDDEN void round_queries(const Tile *t);
HIDDEN void value_scales(const Tile *t, int64_t count);
HIDDEN void round_weights(const Tile *t, int64_t r, int64_t chunk, int64_t low, int64_t count, int64_t alike);
HIDDEN void values_to_floats(const Tile *t);
