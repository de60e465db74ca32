/* The MLP of a layer as a mixture of experts, in one call: router, the GEMMs of those who were chosen, the gates between
   them, and the weighted sums. Weights of experts are in blocks.

   A row with one of its choices is a pair. Pairs lie in the order of their experts, so those of one are the rows of its
   GEMMs, which read its weights once. What a pair gets depends on its row and expert alone, and a row's pairs are summed
   in the order of its choices: so a row has the same bits in any batch. Logits and shares have other ones than by
   operations of their own; a caller may have the shares alone. */

#include "blocks.h"

#define UNIT 32      /* outputs that a thread takes at least */
#define TURNS 8      /* that a thread takes some of a GEMM in, where there are as many units */
#define OWN_ROUTES 8 /* up to so many rows are routed by one thread, when all have made their logits */
#define AT_ONCE 4    /* logits of a row: each sum waits for its own last instruction */
#define PRIME 1000003
#define SPREAD 618033 /* both as in ops/experts/spec.py, and this: */
#define TINY 1e-20f /* joins the sum of shares, which may be 0 */
enum { SILU, GELU, RELU2 }; /* what is done to gates, or, without gates, to what would be ups */

typedef struct {
    int64_t expert, first, rows; /* pairs [first, first + rows) */
    Rounded x, gated;
} Group;

/* Up to limit and scale, what `experts` is given. */
typedef struct {
    void *out;
    const void *x, *residual; /* [rows, hidden]; residual: or NULL */
    int64_t rows, half;       /* half: of these */
    const int32_t *scatter;   /* not 0: rows choose anything; or NULL */
    const void *router, *router_bias; /* [count, by_size]; [count] or NULL */
    int64_t router_half;              /* of the router and its logits; it is in float32 else */
    const float *correction;          /* of each expert: joins its score in the choice; NULL: that is by logits */
    int64_t count, top_k, renormalise, expert_groups, top_groups, hidden, ffn; /* hidden and ffn: multiples of 32 */
    const int64_t *weights; /* of each expert: blocks and bias of gates and ups, blocks and bias of down */
    char *spare;
    Workers *workers;
    const void *by;      /* what the router reads, mostly x */
    const float *scales; /* of each expert: what its shares are multiplied with, or NULL */
    int64_t activation, sigmoids, by_size; /* sigmoids: scores are these, not a softmax; by_size: of a row of `by` */
    int64_t *chosen_to; /* and shares: [rows, top_k], for a caller that wants these alone; or NULL */
    float *share_to;
    double limit, scale; /* of gates and ups, 0: none, and silu; of shares */
    Team team;
    /* On the way; pairs by row and choice: */
    int64_t *chosen, *place; /* the expert; where the pair lies */
    float *share;
    /* as they lie: */
    int64_t *source; /* the row */
    char *gate_up, *gated, *outs, *x_8, *gated_8;
    Group *groups;
    int64_t *first; /* where each expert begins */
    float *logits, *scores; /* scores: of each thread */
    int64_t used, next_up, next_down; /* used: groups */
} Mixture;

/* -- router -------------------------------------------------------------------------------------------------------- */

/* Logits of row i for experts [from, to), rounded to the storage. */
INLINE void logits_of(const Mixture *j, int64_t i, int64_t from, int64_t to, const int half, const int router_half) {
    const int64_t n = j->by_size;
    for (int64_t e = from; e < to; e += AT_ONCE) {
        const int64_t count = least(to - e, AT_ONCE);
        vf sums[AT_ONCE] = {{0}};
        for (int64_t c = 0; c < n; c += LANES) {
            const vf x = load(j->by, i * n + c, LANES, half);
            for (int l = 0; l < AT_ONCE; l++)
                sums[l] += x * load(j->router, (e + (l < count ? l : 0)) * n + c, LANES, router_half);
        }
        for (int64_t l = 0; l < count; l++) {
            const float bias = j->router_bias ? load(j->router_bias, e + l, 1, router_half)[0] : 0;
            j->logits[i * j->count + e + l] = rounded(splat(sum_lanes(sums[l]) + bias), router_half)[0];
        }
    }
}
static void make_logits(const Mixture *j, int64_t i, int64_t from, int64_t to) {
    if (j->router_half) logits_of(j, i, from, to, 1, 1);
    else if (j->half) logits_of(j, i, from, to, 1, 0);
    else logits_of(j, i, from, to, 0, 0);
}

INLINE int64_t scores_size(int64_t count) { return 4 * round_up(count, LANES); }

/* Whether a is chosen before b: the larger one, what is no number first. */
INLINE int before(float a, float b) { return a > b || (a != a && b == b); }

/* The first of the best of `n` that are not taken; -1: all are. */
INLINE int64_t best_of(const float *scores, const char *taken, int64_t n) {
    int64_t most = -1;
    for (int64_t e = 0; e < n; e++)
        if (!taken[e] && (most < 0 || before(scores[e], scores[most]))) most = e;
    return most;
}

/* exp(x - top) of n numbers, of which none is above `top`; what is past the last is anything. Returns their sum. */
static float exponentials(const float *x, float top, int64_t n, float *to) {
    float sum = 0;
    for (int64_t c = 0; c < n; c += LANES) {
        const vf below = (loadf(x + c) - splat(top)) * splat(1.44269504f);
        storef(to + c, exp2_16(select_f(above(below, splat(0.0f)), splat(0.0f), below)));
        for (int64_t l = c; l < c + LANES && l < n; l++) sum += to[l];
    }
    return sum;
}

/* Makes scores of logits, sigmoids or a softmax, and of the logits, in their place, what experts are chosen by. */
static void make_scores(float *logits, float *scores, const float *correction, int64_t n, int64_t sigmoids) {
    float top = logits[0];
    for (int64_t e = 1; e < n; e++) top = before(logits[e], top) ? logits[e] : top;
    const float sum = sigmoids ? 1 : exponentials(logits, top, n, scores);
    for (int64_t c = 0; c < n && sigmoids; c += LANES) {
        const vf x = loadf(logits + c);
        storef(scores + c, select_f(at_least(x, x), sigmoid(x), x));
    }
    for (int64_t e = 0; e < n; e++) {
        if (!sigmoids) scores[e] /= sum; /* of what is no number none is */
        logits[e] = scores[e] + (correction ? correction[e] : 0);
    }
}

/* Takes out the experts of all groups but those with the largest sums of their two best, or of logits with the largest
   best. sums: of each group. */
static void leave_groups(const Mixture *j, const float *scores, float *sums, char *taken) {
    const int64_t size = j->count / j->expert_groups;
    for (int64_t g = 0; g < j->expert_groups; g++) {
        char *const of = taken + g * size;
        const int64_t first = best_of(scores + g * size, of, size);
        of[first] = 1;
        const int64_t second = j->sigmoids ? best_of(scores + g * size, of, size) : -1;
        sums[g] = scores[g * size + first] + (second < 0 ? 0 : scores[g * size + second]);
    }
    memset(taken, 1, (size_t)j->count);
    for (int64_t c = 0; c < j->top_groups; c++) {
        int64_t most = -1;
        for (int64_t g = 0; g < j->expert_groups; g++)
            if (taken[g * size] && (most < 0 || before(sums[g], sums[most]))) most = g;
        memset(taken + most * size, 0, (size_t)size);
    }
}

INLINE float scale_of(const Mixture *j, int64_t expert) {
    return (float)j->scale * (j->scales ? j->scales[expert] : 1);
}

/* Of row i the experts with the largest scores, the lower one of equals, and their shares. Scores are logits, and shares
   those of the softmax of all, or of those chosen; or sigmoids or a softmax, which corrections join in the choice alone. Experts
   are different ones whatever the logits are. */
static void route(const Mixture *j, int64_t i, float *scores) {
    const int64_t count = j->count, k = j->top_k;
    int64_t *chosen = j->chosen + i * k;
    float *share = j->share + i * k, *best = scores + round_up(count, LANES), *of = best + round_up(count, LANES);
    char *taken = memset(of + round_up(count, LANES), 0, (size_t)count);
    const int scattered = j->scatter && *j->scatter;
    memcpy(scores, j->logits + i * count, (size_t)count * 4);
    for (int64_t e = 0; scattered && e < count; e++) {
        const int64_t at = i * count + e;
        scores[e] = (float)(at * at % PRIME * SPREAD % PRIME) / PRIME;
    }
    if (j->correction) make_scores(scores, of, scattered ? NULL : j->correction, count, j->sigmoids);
    if (j->expert_groups > 1) leave_groups(j, scores, best, taken);
    for (int64_t c = 0; c < k; c++) {
        const int64_t most = best_of(scores, taken, count);
        taken[most] = 1;
        chosen[c] = most;
        best[c] = scores[most];
    }
    float sum = 0;
    if (j->correction) {
        for (int64_t c = 0; c < k; c++) sum += best[c] = of[chosen[c]];
        sum = j->renormalise ? sum + TINY : 1;
        for (int64_t c = 0; c < k; c++) share[c] = best[c] / sum * scale_of(j, chosen[c]);
        return;
    }
    const float top = best[0];
    sum = exponentials(j->renormalise ? best : scores, top, j->renormalise ? k : count, of);
    if (!(fabsf(top) < INFINITY)) sum = NAN;
    for (int64_t c = 0; c < k; c++) share[c] = of[j->renormalise ? c : chosen[c]] / sum * scale_of(j, chosen[c]);
}

/* Puts pairs in the order of their experts, and of rows. */
static void group(Mixture *j) {
    const int64_t pairs = j->rows * j->top_k, *chosen = j->chosen;
    int64_t *first = j->first;
    memset(first, 0, (size_t)(j->count + 1) * sizeof *first);
    for (int64_t p = 0; p < pairs; p++) first[chosen[p] + 1]++;
    j->used = 0;
    for (int64_t e = 0; e < j->count; e++) {
        const int64_t rows = first[e + 1], from = first[e];
        first[e + 1] += from;
        if (!rows) continue;
        j->groups[j->used++] =
            (Group){.expert = e,
                    .first = from,
                    .rows = rows,
                    .x = rounded_at(j->x_8 + rounded_size(j->rows > 1 ? from : 0, j->hidden), rows, j->hidden),
                    .gated = rounded_at(j->gated_8 + rounded_size(from, j->ffn), rows, j->ffn)};
    }
    for (int64_t p = 0; p < pairs; p++) {
        j->place[p] = first[chosen[p]]++;
        j->source[j->place[p]] = p / j->top_k;
    }
}

/* -- what is done to pairs ------------------------------------------------------------------------------------------ */

static Product product_with(const Mixture *j, const int64_t *weight, const Rounded *x, void *out, int64_t outputs) {
    return (Product){.blocks = POINTER(weight[0]),
                     .bias = POINTER(weight[1]),
                     .rounded = *x,
                     .out = out,
                     .rows = x->rows,
                     .inputs = x->inputs,
                     .outputs = outputs,
                     .half = j->half};
}
/* Inner elements [from, to) of an expert's pairs, multiples of UNIT. */
static void up_part(const Mixture *j, const Group *g, int64_t from, int64_t to) {
    const int has_gates = j->activation != RELU2;
    const int64_t ffn = j->ffn, outputs = has_gates ? 2 * ffn : ffn, width = j->half ? 2 : 4;
    char *made = j->gate_up + g->first * outputs * width, *gated = j->gated + g->first * ffn * width;
    const Product p = product_with(j, j->weights + 4 * g->expert, &g->x, made, outputs);
    const Rows rows = {.out = gated, .x = made, .size = ffn, .half = j->half, .gelu = j->activation == GELU, .cap = j->limit};
    multiply_blocks(&p, from, to);
    if (has_gates) multiply_blocks(&p, ffn + from, ffn + to);
    for (int64_t i = 0; i < g->rows; i++) {
        (has_gates ? silu_part : ungated_part)(&rows, i, from, to);
        round_part(&g->gated, gated, i, from, to, j->half);
    }
}
static void down_part(const Mixture *j, const Group *g, int64_t from, int64_t to) {
    char *out = j->outs + g->first * j->hidden * (j->half ? 2 : 4);
    const Product p = product_with(j, j->weights + 4 * g->expert + 2, &g->gated, out, j->hidden);
    multiply_blocks(&p, from, to);
}
/* The sum of row i's pairs, elements [from, to). */
static void mix(const Mixture *j, int64_t i, int64_t from, int64_t to) {
    const int64_t n = j->hidden, k = j->top_k, *place = j->place + i * k;
    const float *share = j->share + i * k;
    const int half = (int)j->half;
    for (int64_t c = from; c < to; c += LANES) {
        vf sum = load(j->outs, place[0] * n + c, to - c, half) * splat(share[0]);
        for (int64_t p = 1; p < k; p++) sum += load(j->outs, place[p] * n + c, to - c, half) * splat(share[p]);
        if (j->residual) sum += load(j->residual, i * n + c, to - c, half);
        store(j->out, i * n + c, to - c, half, sum);
    }
}

/* -- shares of the work ---------------------------------------------------------------------------------------------- */

/* `size` outputs of each group, in units, some at a time until all are taken. */
static void each_unit(const Mixture *j, const Member *me, int64_t *next, int64_t size,
                      void (*part)(const Mixture *, const Group *, int64_t, int64_t)) {
    const int64_t units = size / UNIT, all = j->used * units, step = most(all / (TURNS * me->size), 1);
    for (int64_t from; (from = take(next, step)) < all;) {
        const int64_t end = least(from + step, all);
        for (int64_t to; from < end; from = to) { /* of one group at a time */
            const int64_t g = from / units;
            to = least((g + 1) * units, end);
            part(j, j->groups + g, (from - g * units) * UNIT, (to - g * units) * UNIT);
        }
    }
}

static void some_of_mixture(void *data) {
    Mixture *j = data;
    const Member me = join(&j->team);
    Ahead nothing = {0};
    const int64_t rows = j->rows, hidden = j->hidden, width = j->half ? 2 : 4, few = rows <= OWN_ROUTES;
    float *scores = j->scores + me.number * scores_size(j->count);
    if (few) {
        for (int64_t i = 0; i < rows; i++) make_logits(j, i, share(&me, j->count, 0), share(&me, j->count, 1));
    } else {
        for (int64_t i = share(&me, rows, 0); i < share(&me, rows, 1); i++) {
            make_logits(j, i, 0, j->count);
            route(j, i, scores);
        }
    }
    meet(&me, &nothing);
    if (!me.number) {
        for (int64_t i = 0; few && i < rows; i++) route(j, i, scores);
        group(j);
        if (rows == 1) round_part(&j->groups->x, j->x, 0, 0, hidden, j->half); /* which all of them read */
    }
    meet(&me, &nothing);
    if (j->chosen_to) return;
    if (rows > 1) {
        const int64_t pairs = rows * j->top_k, to = share(&me, pairs, 1);
        const Group *g = j->groups;
        for (int64_t p = share(&me, pairs, 0); p < to; p++) {
            while (p >= g->first + g->rows) g++;
            const int64_t row = p - g->first; /* of the group: what is read is moved, so that it is its row, too */
            round_part(&g->x, (const char *)j->x + (j->source[p] - row) * hidden * width, row, 0, hidden, j->half);
        }
        meet(&me, &nothing);
    }
    each_unit(j, &me, &j->next_up, j->ffn, up_part);
    meet(&me, &nothing);
    each_unit(j, &me, &j->next_down, hidden, down_part);
    meet(&me, &nothing);
    const int64_t units = hidden / UNIT;
    for (int64_t u = share(&me, rows * units, 0); u < share(&me, rows * units, 1); u++)
        mix(j, u / units, u % units * UNIT, (u % units + 1) * UNIT);
}

/* Where all of it lies; what is larger than a register's alignment first. -> bytes */
static int64_t place_at(Mixture *j, char *at, int64_t threads) {
    const int64_t pairs = j->rows * j->top_k, width = j->half ? 2 : 4, most = pairs < j->count ? pairs : j->count;
    char *const begin = at;
#define PLACE(name, bytes) j->name = (void *)at, at += ((bytes) + 63) / 64 * 64
    PLACE(groups, most * (int64_t)sizeof(Group));
    PLACE(chosen, pairs * 8);
    PLACE(place, pairs * 8);
    PLACE(source, pairs * 8);
    PLACE(first, (j->count + 1) * 8);
    PLACE(share, pairs * 4);
    PLACE(logits, j->rows * j->count * 4);
    PLACE(scores, threads * scores_size(j->count) * 4);
    PLACE(x_8, rounded_size(j->rows > 1 ? pairs : 1, j->hidden));
    PLACE(gated_8, rounded_size(pairs, j->ffn));
    PLACE(gate_up, pairs * 2 * j->ffn * width);
    PLACE(gated, pairs * j->ffn * width);
    PLACE(outs, pairs * j->hidden * width);
#undef PLACE
    return at - begin;
}

/* rows, half, count, top_k, hidden, ffn, threads -> bytes of `spare` */
static int64_t experts_spare(int64_t *n) {
    Mixture j = {.rows = n[0], .half = n[1], .count = n[2], .top_k = n[3], .hidden = n[4], .ffn = n[5]};
    return place_at(&j, NULL, n[6]);
}

static void experts(int64_t *n) {
    Mixture *j = (Mixture *)n;
    place_at(j, j->spare, j->workers->most);
    if (j->chosen_to) j->chosen = j->chosen_to, j->share = j->share_to;
    run_team_unlocked(some_of_mixture, j, &j->team, j->workers);
}

Function expert_functions[] = {
    {"experts_spare", .count = experts_spare, .given = 7},
    {"experts", experts, UP_TO(Mixture, limit), sizeof(Mixture), .doubles = 2},
    {0},
};
