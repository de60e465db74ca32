/* Products whose sums stay in registers: of some rows, with some registers of columns beside each other. */

#pragma once
#include "cpu.h"

#define TALL 6 /* rows whose sums registers have room for */
#if defined(__AVX512BF16__)
#define HAS_PAIRS 1 /* whether an instruction adds the two products of pairs of bfloat16 */
#else
#define HAS_PAIRS 0
#endif

/* Registers of columns: of 32 registers, or 16, one part is not for sums. Lines that are prefetched in a turn: about as
   many as memory has meanwhile. */
#if PART == 16
#define SCORE_PARTS(rows) 4
#define SCORE_LINES 2
#elif PART == 8
#define SCORE_PARTS(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#define SCORE_LINES 1
#else
#define SCORE_PARTS(rows) ((rows) <= 3 ? 8 : 4)
#define SCORE_LINES 1
#endif

/* DO(rows), of 1 to 6 rows as a constant. */
#define BY_ROWS(rows, DO) \
    switch (rows) { \
    case 1: DO(1); break; \
    case 2: DO(2); break; \
    case 3: DO(3); break; \
    case 4: DO(4); break; \
    case 5: DO(5); break; \
    default: DO(6); \
    }
/* Goes through rows [from, end), up to TALL at a time: `rows` from `row` on, all about as many. */
#define EACH_ROWS(row, rows, from, end) \
    for (int64_t row = from, turns = (end - row + TALL - 1) / TALL, rows; \
         turns && (rows = (end - row + turns - 1) / turns); row += rows, turns--)

/* What the next chunk reads where it lies in one piece, keys and values of all heads: it is fetched from beginning to
   end while this chunk is computed, some of it in each turn of the innermost loops. CPUs drop fetches of which too many
   are on their way, and a head's own pieces, which others lie between, are read at a third of the speed. */
typedef struct {
    const char *at, *end;
    int64_t step, lines; /* step: bytes from a line to the next; lines: that were, which tells the next step */
} Prefetch;
/* In a turn: where the next one goes on. */
INLINE const char *prefetch_turn(const char *at, const Prefetch *p, const int lines) {
    EACH(i, lines) __builtin_prefetch(at + 64 * i, 0, 2);
    return at < p->end ? at + lines * p->step : at;
}

enum { ONE, TWO, LATE }; /* products that are added at once, TWO of bfloat16; LATE: one, by `fused_late` */

/* sum + the two products of bfloat16 in each lane. */
INLINE pf fused_pairs(pf x, pf y, pf sum) {
#if HAS_PAIRS
    return (pf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
    return sum; /* nothing calls it */
#endif
}
/* x * y + z with zeros for numbers that are small when they are rounded. Of numbers 2^60 times as large none is: 2^-66
   is what becomes 2^-126. */
INLINE pf fused_late(pf x, pf y, pf z) {
#if defined(__aarch64__)
    const pf up = 0x1p30f - (pf){0}, sum = fused(x, y, z), large = fused(x * up, y * up, z * up * up);
    const pi least = (pi)(((pu)large & 0x7fffffff) == 61u << 23);
    return (pf)((least & (pi)((pu)large - (60u << 23))) | (~least & (pi)sum));
#else
    return fused(x, y, z);
#endif
}
INLINE pf added(pf x, pf y, pf sum, const int how) {
    return how == TWO ? fused_pairs(x, y, sum) : how == LATE ? fused_late(x, y, sum) : fused(x, y, sum);
}

/* A word in all lanes, of floats or of two in bfloat16. */
INLINE pf splat_word(const float *p) {
#if HAS_PAIRS
    return (pf)_mm512_set1_ps(*p);
#else
    return *p - (pf){0};
#endif
}
/* A bfloat16 in all lanes; some of them in turn. */
INLINE pf splat_half(const uint16_t *p) {
    const uint32_t word = (uint32_t)*p << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return splat_word(&x);
}
INLINE pf halves_at(const void *p) {
    ph some;
    memcpy(&some, p, sizeof some);
    return (pf)(wider(some) << 16);
}

/* sum[r][c] = x[r] . w[c], of `rows` rows of x, x_stride apart, and `parts` registers of columns of w [steps, w_stride].
   half: x and w are in bfloat16. next: what is fetched meanwhile, if `fetches`. */
INLINE void sum_products(pf (*sum)[8], const void *x, int64_t x_stride, const void *w, int64_t w_stride, int64_t steps,
                         const int how, const int half, const int rows, const int parts, Prefetch *next,
                         const int fetches) {
    const char *ahead = fetches ? next->at : NULL;
    EACH(r, rows) EACH(c, parts) sum[r][c] = (pf){0};
    for (int64_t i = 0; i < steps; i++) {
        pf column[8];
        if (fetches) ahead = prefetch_turn(ahead, next, SCORE_LINES);
        EACH(c, parts) {
            const int64_t at = i * w_stride + c * PART;
            column[c] = half ? halves_at((const uint16_t *)w + at) : part_at((const float *)w + at);
        }
        EACH(r, rows) {
            const int64_t at = r * x_stride + i;
            const pf factor = half ? splat_half((const uint16_t *)x + at) : splat_word((const float *)x + at);
            EACH(c, parts) sum[r][c] = added(factor, column[c], sum[r][c], how);
        }
    }
    if (!fetches) return;
    next->at = ahead;
    next->lines += SCORE_LINES * steps;
}
