/* Attention over keys and values in float32 and bfloat16, computed in float32. A score is one sum in the order of
   head_dim, a value one in the order of positions, with products that are fused with them. */

#include "attention.h"

/* -- scores -------------------------------------------------------------------------------------------------------- */

INLINE void put(float *to, pu bits) { memcpy(to, &bits, sizeof bits); }

/* to[c][j] = element c of key j, of PART keys; zeros or anything from head_dim on. */
INLINE void turn(float *to, const char *const *at, int64_t words, const int half) {
    for (int64_t first = 0; first < words; first += PART) {
        pu word[PART];
        turn_words(word, at, 4 * first);
#pragma GCC unroll 16
        for (int i = 0; i < PART; i++)
            if (i >= words - first) break;
            else if (half) {
                put(to + (first + i) * 2 * BLOCK, word[i] << 16);
                put(to + ((first + i) * 2 + 1) * BLOCK, word[i] & 0xffff0000u);
            } else put(to + (first + i) * BLOCK, word[i]);
    }
}
void stage_keys_float(const Tile *t, int64_t first, const char *const *at) {
    const int64_t words = (row_bytes(t->a) + 3) / 4;
    if (t->a->kv_type == HALF) turn(t->keys + first, at, words, 1);
    else turn(t->keys + first, at, words, 0);
}

/* scores[r][j] = q[r] . key j: `rows` rows, `parts` registers of keys. */
INLINE void score_part(const float *q, int64_t padded, const float *keys, int64_t dim, float *scores, int64_t ld,
                       const int rows, const int parts) {
    pf sum[TALL][8];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < parts; c++) sum[r][c] = (pf){0};
    for (int64_t i = 0; i < dim; i++) {
        pf key[8];
#pragma GCC unroll 8
        for (int c = 0; c < parts; c++) key[c] = part_at(keys + i * BLOCK + c * PART);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const pf x = q[r * padded + i] - (pf){0};
#pragma GCC unroll 8
            for (int c = 0; c < parts; c++) sum[r][c] = fused(x, key[c], sum[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < parts; c++) memcpy(scores + r * ld + c * PART, &sum[r][c], sizeof sum[r][c]);
}
/* Of `count` keys, up to whole registers, perhaps several. */
INLINE void score_rows(const float *q, int64_t padded, const float *keys, int64_t dim, float *scores, int64_t ld,
                       int64_t count, const int rows) {
    int64_t j = 0;
    for (; count - j > LANES; j += SCORE_PARTS(rows) * PART)
        score_part(q, padded, keys + j, dim, scores + j, ld, rows, SCORE_PARTS(rows));
    for (; j < count; j += LANES) score_part(q, padded, keys + j, dim, scores + j, ld, rows, REGISTERS);
}
void score_block_float(const Tile *t, int64_t from, int64_t end, float *scores, int64_t ld, int64_t count) {
    const int64_t padded = t->a->padded, dim = t->a->dim, turns = (end - from + TALL - 1) / TALL;
    for (int64_t turn = 0, r = from; turn < turns; turn++) {
        const int64_t rows = (end - r + turns - turn - 1) / (turns - turn);
        const float *q = t->q + r * padded;
        float *to = scores + r * ld;
        if (rows == 6) score_rows(q, padded, t->keys, dim, to, ld, count, 6);
        else if (rows == 5) score_rows(q, padded, t->keys, dim, to, ld, count, 5);
        else if (rows == 4) score_rows(q, padded, t->keys, dim, to, ld, count, 4);
        else if (rows == 3) score_rows(q, padded, t->keys, dim, to, ld, count, 3);
        else if (rows == 2) score_rows(q, padded, t->keys, dim, to, ld, count, 2);
        else score_rows(q, padded, t->keys, dim, to, ld, count, 1);
        r += rows;
    }
}

/* -- values -------------------------------------------------------------------------------------------------------- */

INLINE pf elements(const char *row, int64_t c, const int half) {
    if (!half) return part_at((const float *)row + c);
    ph some;
    memcpy(&some, row + 2 * c, sizeof some);
    return (pf)(wider(some) << 16);
}
/* Where values are: in the pool, behind their keys, or staged as floats. What is read next is fetched meanwhile. */
typedef struct {
    const char *const *at, *const *after; /* after: or NULL */
    int64_t byte, bytes;                  /* bytes: of a key in the pool */
    int half;
} Values;
/* to[r] += weights[r][j] * value j for j in [from, end), one by one: `rows` rows, `parts` registers of each. */
INLINE void value_part(float *to, int64_t padded, const float *weights, const Values *v, int64_t from, int64_t end,
                       int64_t c, const int half, const int rows, const int parts) {
    const char *const *after = c ? NULL : v->after;
    pf sum[TALL][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < parts; i++) sum[r][i] = part_at(to + r * padded + c + i * PART);
    for (int64_t j = from; j < end; j++) {
        pf value[4];
#pragma GCC unroll 4
        for (int i = 0; i < parts; i++) value[i] = elements(v->at[j] + v->byte, c + i * PART, half);
        if (after) bring(after[j], v->bytes);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const pf x = weights[r * LD + j] - (pf){0};
#pragma GCC unroll 4
            for (int i = 0; i < parts; i++) sum[r][i] = fused(x, value[i], sum[r][i]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < parts; i++) memcpy(to + r * padded + c + i * PART, &sum[r][i], sizeof sum[r][i]);
}
INLINE void value_rows(float *to, int64_t padded, const float *weights, const Values *v, int64_t from, int64_t end,
                       const int half, const int rows) {
    int64_t c = 0;
    for (; c + VALUE_PARTS(rows) * PART <= padded; c += VALUE_PARTS(rows) * PART)
        value_part(to, padded, weights, v, from, end, c, half, rows, VALUE_PARTS(rows));
    for (; c < padded; c += PART) value_part(to, padded, weights, v, from, end, c, half, rows, 1);
}
static void value_sized(float *to, int64_t padded, const float *weights, const Values *v, int64_t from, int64_t end,
                        int64_t rows) {
#define CASE(n) \
    if (rows == n && v->half) value_rows(to, padded, weights, v, from, end, 1, n); \
    else if (rows == n) value_rows(to, padded, weights, v, from, end, 0, n);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
}

/* Values of keys [from, end) for rows [r, r + rows); weights and addresses start at `chunk`. Of a few queries next to
   each other most keys are seen by all; the others are each one's own, for a weight of 0 would not keep out a NaN. */
static void value_turn(const Tile *t, const Values *v, int64_t chunk, int64_t from, int64_t end, int64_t r,
                       int64_t rows) {
    const int64_t padded = t->a->padded;
    float *to = t->part.values + r * padded;
    const float *weights = t->scores + r * LD;
    int64_t low = from, high = end;
    for (int64_t i = r; i < r + rows; i++) low = most(low, t->lows[i]), high = least(high, t->counts[i]);
    if (high < low) high = low;
    for (int64_t i = r; i < r + rows; i++) {
        const int64_t first = most(from, t->lows[i]) - chunk, last = least(least(low, t->counts[i]), end) - chunk;
        if (first < last)
            value_sized(to + (i - r) * padded, padded, weights + (i - r) * LD, v, first, last, 1);
    }
    if (low < high) value_sized(to, padded, weights, v, low - chunk, high - chunk, rows);
    for (int64_t i = r; i < r + rows; i++) {
        const int64_t first = most(high, t->lows[i]) - chunk, last = least(t->counts[i], end) - chunk;
        if (first < last)
            value_sized(to + (i - r) * padded, padded, weights + (i - r) * LD, v, first, last, 1);
    }
}
/* Many rows read values as floats that lie together. */
void add_values_float(const Tile *t, const char *const *at, const char *const *after, int64_t chunk, int64_t from,
                       int64_t end, int64_t r, int64_t last) {
    const Attention *a = t->a;
    const int64_t bytes = row_bytes(a), behind = value_behind(a), turns = (last - r + TALL - 1) / TALL;
    const int stage = turns > 1 || a->dim % LANES;
    Values v = {at, after, behind, bytes, (int)a->kv_type};
    if (stage) v = (Values){.at = t->here};
    for (int64_t block = from, next; block < end; block = next) {
        next = stage ? least(block + BLOCK, end) : end;
        for (int64_t j = block; j < next && stage; j++) {
            float *row = t->staged + (j - block) * a->padded;
            to_floats(row, at[j - chunk] + behind, a->dim, (int)a->kv_type);
            for (int64_t c = a->dim; c < a->padded; c++) row[c] = 0;
            t->here[j - chunk] = (const char *)row;
            if (after) bring(after[j - chunk], bytes);
        }
        for (int64_t turn = 0, first = r; turn < turns; turn++) {
            const int64_t rows = (last - first + turns - turn - 1) / (turns - turn);
            value_turn(t, &v, chunk, block, next, first, rows);
            first += rows;
        }
    }
}
