/* What heads for whole blocks do besides GEMMs and attention: convolutions along the rows of a block, and scores of pairs
   of a token and a candidate for the next. The references are spec.py of ops/elementwise and ops/expansion. */

#include "cpu.h"

typedef struct {
    void *out;
    const void *x, *factors, *base, *residual; /* residual: or NULL */
    int64_t count, rows, size, taps, groups, side, half; /* count: rows of all blocks; rows: of a block */
    Workers *workers;
    int64_t next;
} Convolution;

/* base + factor of the channels from c on. */
INLINE vf factor_of(const Convolution *j, int64_t row, int64_t tap, int64_t c, const int half) {
    const int64_t at = j->side * j->taps + tap, each = j->size / j->groups, n = j->size - c;
    const int64_t from = (row * 2 * j->taps + at) * j->groups;
    const vf own = load(j->base, at * j->size + c, n, half);
    if (each % LANES == 0) return own + splat(load(j->factors, from + c / each, 1, half)[0]);
    float shared[LANES] = {0};
    for (int64_t lane = 0; lane < LANES && lane < n; lane++)
        shared[lane] = load(j->factors, from + (c + lane) / each, 1, half)[0];
    return own + loadf(shared);
}
INLINE void convolve_row(const Convolution *j, int64_t row, const int half) {
    const int64_t back = row % j->rows;
    for (int64_t c = 0; c < j->size; c += LANES) {
        const int64_t n = j->size - c, at = row * j->size + c;
        vf sum = j->residual ? load(j->residual, at, n, half) : splat(0.0f);
        for (int64_t tap = 0; tap < j->taps && tap <= back; tap++)
            sum += factor_of(j, row, tap, c, half) * load(j->x, at - tap * j->size, n, half);
        store(j->out, at, n, half, sum);
    }
}
static void some_rows(void *data) {
    Convolution *j = data;
    for (int64_t row; (row = take(&j->next, 1)) < j->count;)
        BY_HALF(j->half, convolve_row, j, row);
}

static void block_conv(int64_t *n) {
    Convolution *j = (Convolution *)n;
    run_unlocked(some_rows, j, j->workers, j->count * j->size * j->taps / 4000);
}

/* ln of the sum of exp of some of the first `count`. */
static float log_sum(const float *x, int64_t count) {
    float most = x[0], total = 0.0f;
    for (int64_t i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < count; i++) total += exp2_16(splat((x[i] - most) * 1.44269504f))[0];
    return most + log16(splat(total))[0];
}

/* ids, log p [nodes, chosen]; candidates' ids [batch, count] and log p, above [nodes], gates [batch, rank], before,
   after [.., rank], half, nodes, batch, count, rank, chosen, scratch [count + rank] float: the best candidates of
   each node, nodes / batch of a row */
static void pairs(int64_t *n) {
    int64_t *ids = POINTER(n[0]);
    float *best = POINTER(n[1]), *scores = POINTER(n[14]);
    const int half = (int)n[8];
    const int64_t nodes = n[9], each = n[9] / n[10], count = n[11], rank = n[12], chosen = n[13], *above = POINTER(n[4]);
    float *gated = scores + count;
    RELEASE_GIL
    for (int64_t node = 0; node < nodes; node++, ids += chosen, best += chosen) {
        const int64_t row = node / each, *known = (const int64_t *)POINTER(n[2]) + row * count;
        const float *likely = (const float *)POINTER(n[3]) + row * count;
        for (int64_t r = 0; r < rank; r += LANES) {
            const vf gate = load(POINTER(n[5]), row * rank + r, rank - r, half);
            store(gated, r, rank - r, 0, load(POINTER(n[6]), above[node] * rank + r, rank - r, half) * gate);
        }
        for (int64_t i = 0; i < count; i++)
            scores[i] = likely[i] + dot_of(gated, 0, 0, POINTER(n[7]), known[i] * rank, half, rank);
        const float shift = log_sum(likely, count) - log_sum(scores, count);
        best_first(scores, count, chosen, ids);
        for (int64_t k = 0; k < chosen; k++) best[k] = scores[ids[k]] + shift, ids[k] = known[ids[k]];
    }
    TAKE_GIL
}

Function pair_functions[] = {
    {"block_conv", block_conv, UP_TO(Convolution, next), sizeof(Convolution)},
    {"pairs", pairs, 15},
    {0},
};
