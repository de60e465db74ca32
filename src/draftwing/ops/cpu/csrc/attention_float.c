/* Attention over keys and values in float32 and bfloat16, computed in float32. A score is one sum in the order of
   head_dim, a value one in the order of positions, with products that are fused with them.

   Where keys and values are in bfloat16, queries and weights are, too, and vdpbf16ps does two products at once: it adds
   that of the upper halves of two words, then that of the lower ones, rounds twice, and takes numbers below the normal
   ones for zeros. Two fused products with `flush_small` have the same bits, so sets without it do these. Of a score the
   second element of two is in the upper half, for so keys lie in the pool. Of a value the first position of two is, so
   that positions are added in their order, and one alone is added as it is beside another.

   A sum just below 2^-126 may be rounded to it. x86 looks whether a number is small after it has rounded, aarch64
   before. So there a chunk in which something was taken for zero is computed again, by `fused_late`. */

#include "attention.h"

/* -- scores -------------------------------------------------------------------------------------------------------- */

INLINE void put(float *to, pu bits) { memcpy(to, &bits, sizeof bits); }

/* Words of a row of queries or keys. */
INLINE int64_t words_of(const Attention *a) { return (row_bytes(a) + 3) / 4; }
/* Whether halves of words are staged as floats. */
INLINE int one_by_one(const Attention *a) { return a->kv_type == HALF && !HAS_PAIRS; }

/* Queries as keys are staged: in bfloat16, two in a word, or the second of two before the first. */
void halve_queries(const Tile *t) {
    const int64_t padded = t->a->padded;
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t c = 0; c < padded; c += LANES) {
            float *q = t->q + r * padded;
            const vh halves = narrow(loadf(q + c));
            if (HAS_PAIRS) memcpy(q + c / 2, &halves, sizeof halves);
            else {
                Parted x = {.f = widen(halves)};
                for (int i = 0; i < LANES; i++) q[c + i] = x.f[i ^ 1];
            }
        }
}

/* to[c][j] = element c of key j, of PART keys, or pair c; halves: the second of two before the first. Anything from
   head_dim on, but zeros beside the last of an odd number. */
INLINE void turn(Prefetch *next, float *to, const char *const *at, int64_t words, int64_t bytes, const int halves) {
    for (int64_t first = 0; first < words; first += PART) {
        pu word[PART];
        if (next->end) {
            next->at = prefetch_turn(next->at, next, STAGE_LINES);
            next->lines += STAGE_LINES;
        }
        turn_words(word, at, 4 * first);
        EACH(i, PART)
            if (i >= words - first) break;
            else if (halves) {
                put(to + (first + i) * 2 * BLOCK, word[i] & 0xffff0000u);
                put(to + ((first + i) * 2 + 1) * BLOCK, word[i] << 16);
            } else put(to + (first + i) * BLOCK, word[i]);
    }
    if (bytes % 4) {
        float *last = to + (words - 1) * (halves ? 2 : 1) * BLOCK;
        put(last, (pu)part_at(last) & (halves ? 0 : 0xffff));
    }
}
void stage_keys_float(const Tile *t, int64_t first, const char *const *at) {
    const int64_t words = words_of(t->a), bytes = row_bytes(t->a);
    if (one_by_one(t->a)) turn(t->prefetch, t->keys + first, at, words, bytes, 1);
    else turn(t->prefetch, t->keys + first, at, words, bytes, 0);
}

/* scores[r][j] = q[r] . key j: `rows` rows, `parts` registers of keys. */
INLINE void score_part(Prefetch *next, const float *q, int64_t padded, const float *keys, int64_t steps, float *scores,
                       int64_t ld, const int how, const int rows, const int parts) {
    pf sum[TALL][8];
    sum_products(sum, q, padded, keys, BLOCK, steps, how, 0, rows, parts, next, 1);
    EACH(r, rows) EACH(c, parts) memcpy(scores + r * ld + c * PART, &sum[r][c], sizeof sum[r][c]);
}
/* Of `count` keys, up to whole registers, perhaps several. */
INLINE void score_rows(Prefetch *next, const float *q, int64_t padded, const float *keys, int64_t steps, float *scores,
                       int64_t ld, int64_t count, const int how, const int rows) {
    int64_t j = 0;
    for (; count - j > LANES; j += SCORE_PARTS(rows) * PART)
        score_part(next, q, padded, keys + j, steps, scores + j, ld, how, rows, SCORE_PARTS(rows));
    for (; j < count; j += LANES) score_part(next, q, padded, keys + j, steps, scores + j, ld, how, rows, REGISTERS);
}
void score_block_float(const Tile *t, int64_t from, int64_t end, float *scores, int64_t ld, int64_t count) {
    const int64_t padded = t->a->padded, steps = words_of(t->a) * (one_by_one(t->a) ? 2 : 1);
    const int pairs = in_pairs(t->a);
    for (int64_t r = from; t->late && r < end; r++)
        score_rows(t->prefetch, t->q + r * padded, padded, t->keys, steps, scores + r * ld, ld, count, LATE, 1);
    if (t->late) return;
    EACH_ROWS(r, rows, from, end) {
        const float *q = t->q + r * padded;
        float *to = scores + r * ld;
#define SCORE_ROWS(n) \
    if (pairs) score_rows(t->prefetch, q, padded, t->keys, steps, to, ld, count, TWO, n); \
    else score_rows(t->prefetch, q, padded, t->keys, steps, to, ld, count, ONE, n)
        BY_ROWS(rows, SCORE_ROWS)
    }
}

/* -- values -------------------------------------------------------------------------------------------------------- */

/* How values are read: as floats, in bfloat16, or two positions' in bfloat16 as words, the first as the upper half;
   floats and words from the pool or as they were staged, one behind the other. */
enum { FLOATS, HALVES, STAGED, PAIRS, STAGED_PAIRS };
INLINE int is_staged(int kind) { return kind == STAGED || kind == STAGED_PAIRS; }

/* Elements of two rows as words. */
INLINE pf pairs_at(const char *first, const char *second, int64_t c) {
#if HAS_PAIRS
    const __m512i lanes = (__m512i)(vi){0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                        0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    const __m256i upper = _mm256_loadu_si256((const void *)(first + 2 * c));
    const __m256i lower = _mm256_loadu_si256((const void *)(second + 2 * c));
    return (pf)_mm512_permutexvar_epi16(lanes, _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1));
#else
    return (pf){0};
#endif
}
/* Where values are: in the pool, behind their keys, or staged. What is read next is fetched meanwhile. */
typedef struct {
    const char *const *at, *const *after; /* after: or NULL */
    Prefetch *prefetch;
    int64_t byte, bytes;                  /* bytes: of a key in the pool */
    int kind, late;
    const float *staged; /* of position, or pair, 0, which need not be there */
} Values;
/* Elements of position, or pair, j; row: of it where they are staged. */
INLINE pf elements(const Values *v, const float *row, int64_t j, int64_t c, const int kind) {
    if (is_staged(kind)) return part_at(row + c);
    if (kind == PAIRS) return pairs_at(v->at[2 * j] + v->byte, v->at[2 * j + 1] + v->byte, c);
    if (kind == HALVES) return halves_at(v->at[j] + v->byte + 2 * c);
    return part_at((const float *)(v->at[j] + v->byte) + c);
}
/* to[r] += weights[r][j] * value j for j in [from, end), one by one or pair by pair: `rows` rows, `parts` registers of
   each. */
INLINE void value_part(float *to, int64_t padded, const float *weights, const Values *v, int64_t from, int64_t end,
                       int64_t c, const int kind, const int how, const int rows, const int parts) {
    const char *const *after = c ? NULL : v->after;
    Prefetch *prefetch = v->prefetch;
    const char *ahead = prefetch->at;
    pf sum[TALL][4];
    EACH(r, rows) EACH(i, parts) sum[r][i] = part_at(to + r * padded + c + i * PART);
    const float *row = v->staged + from * padded, *weight_at = weights + from;
    for (int64_t j = from; j < end; j++, row += padded, weight_at++) {
        ahead = prefetch_turn(ahead, prefetch, VALUE_LINES);
        if (is_staged(kind) || !after) {}
        else if (kind == PAIRS) bring(after[2 * j], v->bytes), bring(after[2 * j + 1], v->bytes);
        else bring(after[j], v->bytes);
        if (rows <= parts) { /* the fewer of the two stay in registers */
            pf weight[4];
            EACH(r, rows) weight[r] = splat_word(weight_at + r * LD);
            EACH(i, parts) {
                const pf value = elements(v, row, j, c + i * PART, kind);
                EACH(r, rows) sum[r][i] = added(weight[r], value, sum[r][i], how);
            }
            continue;
        }
        pf value[4];
        EACH(i, parts) value[i] = elements(v, row, j, c + i * PART, kind);
        EACH(r, rows) {
            const pf x = splat_word(weight_at + r * LD);
            EACH(i, parts) sum[r][i] = added(x, value[i], sum[r][i], how);
        }
    }
    prefetch->at = ahead;
    prefetch->lines += VALUE_LINES * (end - from);
    EACH(r, rows) EACH(i, parts) memcpy(to + r * padded + c + i * PART, &sum[r][i], sizeof sum[r][i]);
}
INLINE void value_rows(float *to, int64_t padded, const float *weights, const Values *v, int64_t from, int64_t end,
                       const int kind, const int how, const int rows) {
    int64_t c = 0;
    for (; c + VALUE_PARTS(rows) * PART <= padded; c += VALUE_PARTS(rows) * PART)
        value_part(to, padded, weights, v, from, end, c, kind, how, rows, VALUE_PARTS(rows));
    for (; c < padded; c += PART) value_part(to, padded, weights, v, from, end, c, kind, how, rows, 1);
}
static void value_sized(float *to, int64_t padded, const float *weights, const Values *v, int64_t from, int64_t end,
                        int64_t rows) {
    if (from >= end) return;
    for (int64_t r = 0; v->late && r < rows; r++, to += padded, weights += LD)
        if (v->kind == FLOATS) value_rows(to, padded, weights, v, from, end, FLOATS, LATE, 1);
        else if (v->kind == STAGED) value_rows(to, padded, weights, v, from, end, STAGED, LATE, 1);
        else value_rows(to, padded, weights, v, from, end, HALVES, LATE, 1);
    if (v->late) return;
#define KINDS(n) \
    if (v->kind == FLOATS) value_rows(to, padded, weights, v, from, end, FLOATS, ONE, n); \
    else if (v->kind == STAGED) value_rows(to, padded, weights, v, from, end, STAGED, ONE, n); \
    else if (HAS_PAIRS && v->kind == PAIRS) value_rows(to, padded, weights, v, from, end, PAIRS, TWO, n); \
    else if (HAS_PAIRS) value_rows(to, padded, weights, v, from, end, STAGED_PAIRS, TWO, n); \
    else value_rows(to, padded, weights, v, from, end, HALVES, ONE, n)
    BY_ROWS(rows, KINDS)
}
/* One of a pair's positions; what the other has, which may be no number, is left out. */
static void half_pair(float *to, int64_t padded, const float *weights, const Values *v, int64_t pair, uint32_t half) {
    const pf x = (pf)((pu)splat_word(weights + pair) & half);
    for (int64_t c = 0; c < padded; c += PART) {
        pf value = v->kind == PAIRS ? elements(v, NULL, pair, c, PAIRS) : part_at(v->staged + pair * padded + c);
        value = fused_pairs(x, (pf)((pu)value & half), part_at(to + c));
        memcpy(to + c, &value, sizeof value);
    }
}
/* Positions [from, end) of one row. */
static void value_alone(float *to, int64_t padded, const float *weights, const Values *v, int64_t from, int64_t end) {
    if (from >= end) return;
    if (!HAS_PAIRS || v->kind < PAIRS) {
        value_sized(to, padded, weights, v, from, end, 1);
        return;
    }
    if (from % 2) half_pair(to, padded, weights, v, from++ / 2, 0xffff);
    value_sized(to, padded, weights, v, from / 2, end / 2, 1);
    if (end % 2 && from < end) half_pair(to, padded, weights, v, end / 2, 0xffff0000u);
}

/* Values of keys [from, end) for rows [r, r + rows); weights and addresses start at `chunk`. Of a few queries next to
   each other most keys are seen by all; the others are each one's own, for a weight of 0 would not keep out a NaN. */
static void value_turn(const Tile *t, const Values *v, int64_t chunk, int64_t from, int64_t end, int64_t r,
                       int64_t rows) {
    const int64_t padded = t->a->padded, step = v->kind >= PAIRS ? 2 : 1;
    float *to = t->part.values + r * padded;
    const float *weights = t->scores + r * LD;
    int64_t low = from, high = end;
    for (int64_t i = r; i < r + rows; i++) low = most(low, t->lows[i]), high = least(high, t->counts[i]);
    low = round_up(low - chunk, step), high = most(high - chunk, 0) / step * step;
    if (high < low) high = low;
    for (int64_t i = r; i < r + rows; i++) {
        const int64_t first = most(from, t->lows[i]) - chunk, last = least(t->counts[i], end) - chunk;
        value_alone(to + (i - r) * padded, padded, weights + (i - r) * LD, v, first, least(low, last));
    }
    value_sized(to, padded, weights, v, low / step, high / step, rows);
    for (int64_t i = r; i < r + rows; i++) {
        const int64_t first = most(high, t->lows[i] - chunk), last = least(t->counts[i], end) - chunk;
        value_alone(to + (i - r) * padded, padded, weights + (i - r) * LD, v, first, last);
    }
}
/* A head's elements of two rows as words. */
INLINE void stage_pairs(float *to, const char *first, const char *second, int64_t dim) {
    int64_t c = 0;
    for (; c + PART <= dim; c += PART) {
        const pf words = pairs_at(first, second, c);
        memcpy(to + c, &words, sizeof words);
    }
    for (; c < dim; c++) {
        const uint32_t word = (uint32_t)((const uint16_t *)first)[c] << 16 | ((const uint16_t *)second)[c];
        memcpy(to + c, &word, sizeof word);
    }
}
/* Stages values [from, end), of addresses from `chunk` on, as floats or pairs. */
static void stage_values(const Tile *t, const char *const *at, const char *const *after, int64_t chunk, int64_t from,
                         int64_t end) {
    const Attention *a = t->a;
    const int64_t bytes = row_bytes(a), behind = value_behind(a), dim = a->dim, step = in_pairs(a) ? 2 : 1;
    float *row = t->staged;
    for (int64_t j = (from - chunk) / step * step; j < end - chunk; j += step, row += a->padded) {
        if (after) bring(after[j], bytes);
        if (step == 1) to_floats(row, at[j] + behind, dim, (int)a->kv_type);
        else {
            if (after) bring(after[j + 1], bytes);
            stage_pairs(row, at[j] + behind, at[j + 1] + behind, dim);
        }
        for (int64_t c = dim; c < a->padded; c++) row[c] = 0;
    }
}
/* Many rows read values that were staged, and lie together. */
void add_values_float(const Tile *t, const char *const *at, const char *const *after, int64_t chunk, int64_t from,
                       int64_t end, int64_t r, int64_t last) {
    const Attention *a = t->a;
    const int stage = last - r > TALL || a->dim % LANES, pairs = in_pairs(a);
    const int kind = pairs ? PAIRS : a->kv_type == HALF ? HALVES : FLOATS;
    Values v = {at, after, t->prefetch, value_behind(a), row_bytes(a), kind};
    if (stage) v = (Values){.prefetch = t->prefetch, .kind = pairs ? STAGED_PAIRS : STAGED};
    v.late = t->late;
    for (int64_t block = from, next; block < end; block = next) {
        next = stage ? least(block / 2 * 2 + (pairs ? 2 : 1) * BLOCK, end) : end;
        if (stage) stage_values(t, at, after, chunk, block, next);
        v.staged = t->staged - (block - chunk) / (pairs ? 2 : 1) * a->padded;
        EACH_ROWS(first, rows, r, last) value_turn(t, &v, chunk, block, next, first, rows);
    }
}

/* Lines that the innermost loops fetch in a chunk of one head of keys, with so many rows. */
int64_t chunk_lines(const Attention *a, int64_t rows) {
    const int64_t passes = (rows + TALL - 1) / TALL, positions = CHUNK / (in_pairs(a) ? 2 : 1);
    const int64_t keys = SCORE_PARTS((rows + passes - 1) / passes) * PART;     /* that a turn scores */
    const int64_t elements = VALUE_PARTS((rows + passes - 1) / passes) * PART; /* of a value that a turn adds */
    const int64_t scores = CHUNK / keys * words_of(a) * (one_by_one(a) ? 2 : 1);
    const int64_t values = positions * (a->padded / elements + a->padded % elements / PART);
    const int64_t staged = CHUNK / PART * ((words_of(a) + PART - 1) / PART);
    return STAGE_LINES * staged + passes * (SCORE_LINES * scores + VALUE_LINES * values);
}
