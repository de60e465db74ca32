/* The choice of tokens on the CPU: bans aside, what ops/sampling/spec.py describes, in one pass over a row's logits.

   Nearly all of a vocabulary cannot be chosen. A token's noise is bounded from the hash's bits alone, tightly and
   without a logarithm, and only where logit + temperature * bound passes the worst of the best so far is the noise
   itself computed. So the pass costs about what the hash does.

   A row's result depends on that row alone: one thread works on it, in order of the ids. NaN counts as -inf, which is
   never chosen while there is anything else. */

#include "cpu.h"
#include <stdlib.h>

#define MOST 16   /* candidates of a row */
#define VECTORS 4 /* that are looked at together: a block */
#define GROUP 64  /* tokens of a set whose maximum is looked at */
#define APART __attribute__((noinline))
#define ALL 0x7fffffff   /* no limit: the pattern of every gap, NaN included, is at most this */
#define MASS_ONE 0x1p40f /* fixed-point 1.0, as in ops/sampling/spec.py */
#define LOG2E 1.44269504f
#define LN2 0.693147181f

/* -- noise: ops/noise/spec.py ------------------------------------------------------------------------------------- */

#define TOKEN_MUL 0x9E3779B1u
/* 31 bits of 16 tokens, from their ids times TOKEN_MUL. */
INLINE vi bits_of(vu ids, Key key) {
    vu h = (ids ^ ids >> 16) ^ key.word[0];
    h = h * 0x7FEB352Du + key.word[1];
    h = (h ^ h >> 15) * 0x846CA68Bu;
    return (vi)h ^ (vi)h >> 16; /* arithmetic: clears the sign */
}
INLINE vu ids_from(int64_t first) {
    const vu lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (lane + (uint32_t)first) * TOKEN_MUL;
}

/* log16 of one number, in place of libm's, which rounds in one way or another depending on what the CPU has. */
static APART float log_of(float x) { return log16(splat(x))[0]; }

/* Standard Gumbel noise -log(-log1p(-u)) of hashed bits. The roundings of u are the reference's, whose product with
   2^-31 * (1 - 2^-24) is the float below, scaled; log1p by the log of what is left of 1 - u, corrected for what
   rounding took from u (Kahan; Goldberg 1991, theorem 4). */
INLINE vf gumbel16(vi bits) {
    vi below = (vi)__builtin_convertvector(bits, vf);
    below += more(below, splat_int(0)); /* a true comparison is -1 */
    vf u = (vf)below * 0x1p-31f + 0x1p-32f, rest = 1.0f - u, taken = 1.0f - rest;
    vi none = same(taken, splat(0.0f));
    vf log1p = log16(rest) * (u / select_f(none, splat(1.0f), taken));
    return -log16(select_f(none, u, -log1p));
}

typedef struct {
    vf noise, z;
} Scored;
static APART void score(const vf *x, const vi *bits, float temperature, Scored *to) {
    to->noise = gumbel16(*bits) * temperature;
    to->z = *x + to->noise;
}

/* At least the noise, in units of ln(2) * 2^-23: u <= -log1p(-u), and of log2(u) the pattern of a float is the integer
   part with a fraction that is never too large. 2^10 units are more than all roundings here and in `gumbel16`. */
INLINE vf bound16(vi bits) {
    const int32_t one = ((127 + 31) << 23) + (1 << 10);
    return __builtin_convertvector(one - (vi)__builtin_convertvector(bits, vf), vf);
}
#define BOUND_UNIT (LN2 * 0x1p-23f)

/* -- the best few ------------------------------------------------------------------------------------------------- */

typedef struct {
    float z[MOST], noise[MOST], worst; /* z of the last, or -inf */
    int64_t id[MOST], count, held;
    vf cutoff; /* nothing that is bounded by this can enter */
} Best;

static void begin(Best *b, int64_t count) {
    b->count = count;
    b->held = 0;
    b->worst = -INFINITY;
    b->cutoff = splat(-INFINITY);
}
/* Ids come in ascending order, so of equals those that are held stay. */
static void enter_best(Best *b, int64_t id, float z, float noise, float temperature) {
    int64_t at = b->held < b->count ? b->held++ : b->count - 1;
    for (; at > 0 && b->z[at - 1] < z; at--) {
        b->z[at] = b->z[at - 1];
        b->noise[at] = b->noise[at - 1];
        b->id[at] = b->id[at - 1];
    }
    b->z[at] = z;
    b->noise[at] = noise;
    b->id[at] = id;
    if (b->held < b->count) return;
    b->worst = b->z[b->count - 1];
    /* A bound is rounded as z is, but perhaps in one step where that took two. */
    b->cutoff = splat(b->worst - 0x1p-22f * (fabsf(b->worst) + 32.0f * temperature));
}
/* In ascending order of id; ids that are not held, with noise -inf, where there were too few. */
static void finish(Best *b, int64_t *ids, float *noise) {
    for (int64_t id = 0; b->held < b->count; id++) {
        int64_t at = 0;
        while (at < b->held && b->id[at] != id) at++;
        if (at == b->held) enter_best(b, id, -INFINITY, -INFINITY, 0.0f);
    }
    for (int64_t i = 0; i < b->count; i++) {
        int64_t at = i;
        for (; at > 0 && ids[at - 1] > b->id[i]; at--) {
            ids[at] = ids[at - 1];
            noise[at] = noise[at - 1];
        }
        ids[at] = b->id[i];
        noise[at] = b->noise[i];
    }
}

INLINE int any(vi mask) {
    int64_t w[8];
    memcpy(w, &mask, sizeof w);
    return ((w[0] | w[1]) | (w[2] | w[3]) | (w[4] | w[5]) | (w[6] | w[7])) != 0;
}

/* -- a row -------------------------------------------------------------------------------------------------------- */

/* Up to workers what `draw` is given, and up to edit where logits are edited. */
typedef struct {
    int64_t *ids; /* [rows, count]: the best of each row, by ascending id */
    float *noise; /* the same */
    int64_t count;
    const void *logits;
    int64_t half, rows, nodes, vocab;
    const int64_t *positions, *depth, *seed;
    const float *temperature; /* NULL: all are 0 */
    const int64_t *filtered;  /* rows with filters; NULL: those whose values say so */
    const int64_t *top_k;
    const float *top_p, *min_p; /* NULL: no filters */
    const int64_t *ban_until, *ban_ids; /* [batch], [batch, bans]; NULL: none */
    int64_t bans;
    uint32_t *scratch; /* [threads, 5 * padded + width of paths]: two parts for filters, then a row's own logits,
                          counts, the tokens that have some, and counts before its path; less without edits */
    Workers *workers;
    int64_t numbers[EDITS]; /* of `Edits`; zeros: none */
    Edit *edit;             /* of the best, where there are edits: factor and summand */
    const Edits *edits;     /* NULL: none */
    int64_t next, worker, padded; /* padded: vocab up to 16s */
} Draw;
/* What a thread keeps between the nodes of a row. */
typedef struct {
    uint32_t *scratch;
    int64_t row;      /* of the batch, whose text is counted; -1: none */
    int64_t distinct; /* tokens of it, and those with a bias */
    int cleared;      /* whether the counts are zeros, but for these */
} Drawer;

typedef struct {
    int64_t at; /* of its logits */
    Key key;
    float temperature, top;
    int32_t limit; /* pattern of the largest gap to the top that filters leave; ALL: there are none */
} Row;

/* Logits [c, c + 16) of a row at `at`, -inf from `end` on. */
INLINE vf logits_before(const void *logits, int64_t at, int64_t c, int64_t end, const int half) {
    const int64_t left = end - c;
    if (left >= LANES) return load(logits, at + c, LANES, half);
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return select_f(more(splat_int((int32_t)left), lane), load(logits, at + c, left, half), splat(-INFINITY));
}
INLINE vf logits_of(const Draw *d, int64_t at, int64_t c, const int half) {
    return logits_before(d->logits, at, c, d->vocab, half);
}

INLINE void scan_block(const Draw *d, const Row *r, Best *b, int64_t first, const int vectors, const int half,
                       const int noisy, const int filtered) {
    vf x[VECTORS], bound[VECTORS];
    vi bits[VECTORS], kept = {0}, over = {0};
    for (int v = 0; v < vectors; v++) {
        x[v] = logits_of(d, r->at, first + v * LANES, half);
        if (filtered) {
            vi stays = ~more((vi)(r->top - x[v]), splat_int(r->limit));
            x[v] = select_f(stays, x[v], splat(-INFINITY));
            kept |= stays;
        }
    }
    if (filtered && !any(kept)) return;
    const float unit = r->temperature * BOUND_UNIT;
    for (int v = 0; v < vectors; v++) {
        if (noisy) bits[v] = bits_of(ids_from(first + v * LANES), r->key);
        bound[v] = noisy ? x[v] + bound16(bits[v]) * unit : x[v];
        over |= above(bound[v], b->cutoff);
    }
    if (!any(over)) return;
    for (int v = 0; v < vectors; v++) {
        if (!any(above(bound[v], b->cutoff))) continue;
        Scored s = {.noise = {0}, .z = x[v]};
        if (noisy) score(&x[v], &bits[v], r->temperature, &s);
        for (int l = 0; l < LANES; l++)
            if (s.z[l] > b->worst) enter_best(b, first + v * LANES + l, s.z[l], s.noise[l], r->temperature);
    }
}
INLINE void scan(const Draw *d, const Row *r, Best *b, const int half, const int noisy, const int filtered) {
    int64_t c = 0;
    for (; c + VECTORS * LANES <= d->vocab; c += VECTORS * LANES)
        scan_block(d, r, b, c, VECTORS, half, noisy, filtered);
    for (; c < d->vocab; c += LANES) scan_block(d, r, b, c, 1, half, noisy, filtered);
}

/* -- filters: ops/sampling/spec.py --------------------------------------------------------------------------------- */

/* exp(-gap / temperature) in fixed point. In one place, so that parts of a sum and the sum agree. */
static APART void masses(const vf *gap, float scale, vl *to) {
    *to = __builtin_convertvector(exp2_16(*gap * scale) * MASS_ONE, vl);
}

/* The largest logit. Also the largest of each of the 16 * ceil(vectors / GROUP) sets that the vocabulary is cut in. */
INLINE float row_top(const Draw *d, int64_t at, float *sets, const int half) {
    vf most = splat(-INFINITY);
    for (int64_t c = 0; c < d->vocab; sets += LANES) {
        vf part = splat(-INFINITY);
        for (int64_t end = c + GROUP * LANES; c < end && c < d->vocab; c += LANES) {
            vf x = logits_of(d, at, c, half);
            part = larger(x, part);
        }
        storef(sets, part);
        most = larger(part, most);
    }
    return top_lane(most);
}
INLINE int64_t total_mass(const Draw *d, const Row *r, float scale, const int half) {
    vl sum = {0}, part;
    for (int64_t c = 0; c < d->vocab; c += LANES) {
        vf gap = r->top - logits_of(d, r->at, c, half);
        if (!any(gap * scale > -40.5f)) continue; /* none */
        masses(&gap, scale, &part);
        sum += part;
    }
    int64_t total = 0;
    for (int l = 0; l < LANES; l++) total += sum[l];
    return total;
}
INLINE int64_t gaps_up_to(const Draw *d, const Row *r, float cut, uint32_t *list, const int half) {
    int64_t n = 0;
    for (int64_t c = 0; c < d->vocab; c += LANES) {
        vf gap = r->top - logits_of(d, r->at, c, half);
        if (!any(gap <= cut)) continue;
        const int64_t lanes = least(d->vocab - c, LANES);
        for (int64_t l = 0; l < lanes; l++) {
            const float one = gap[l];
            if (one <= cut) memcpy(&list[n++], &one, 4);
        }
    }
    return n;
}

/* Sorts numbers in place, one byte after the other; spare holds n. */
static void sort(uint32_t *list, uint32_t *spare, int64_t n) {
    for (int shift = 0; shift < 32; shift += 8) {
        int32_t place[256] = {0};
        for (int64_t i = 0; i < n; i++) place[list[i] >> shift & 255]++;
        for (int32_t digit = 0, sum = 0, count; digit < 256; digit++, sum += count) {
            count = place[digit];
            place[digit] = sum;
        }
        for (int64_t i = 0; i < n; i++) spare[place[list[i] >> shift & 255]++] = list[i];
        uint32_t *swap = list; /* an even number of times */
        list = spare;
        spare = swap;
    }
}

/* A gap up to which there are at least k tokens, and not many more: the k-th smallest of those of the sets' maxima. */
static float gap_of_sets(const Draw *d, const Row *r, int64_t k, uint32_t *sets, uint32_t *spare) {
    const int64_t n = (d->vocab + GROUP * LANES - 1) / (GROUP * LANES) * LANES;
    if (k > n) return INFINITY;
    for (int64_t i = 0; i < n; i += LANES) storef((float *)sets + i, r->top - loadf((float *)sets + i));
    sort(sets, spare, n);
    float cut;
    memcpy(&cut, sets + k - 1, 4);
    return cut;
}

/* Where the sum of the masses of sorted gaps reaches `wanted`; the last one if it does not. total: of all n. */
static uint32_t crossing(const uint32_t *list, int64_t n, float scale, int64_t wanted, int64_t *total) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        vf gap = splat(INFINITY);
        vl part;
        const int64_t lanes = least(n - i, LANES);
        memcpy(&gap, list + i, (size_t)lanes * 4);
        masses(&gap, scale, &part);
        for (int64_t l = 0; l < lanes; l++)
            if ((sum += part[l]) >= wanted) return list[i + l];
    }
    *total = sum;
    return list[n - 1];
}

/* Sets the row's top and limit. */
INLINE void limit_row(const Draw *d, Row *r, int64_t k, float top_p, float min_p, uint32_t *scratch, const int half) {
    uint32_t *list = scratch, *spare = scratch + d->padded;
    r->top = row_top(d, r->at, (float *)list, half) + 0.0f; /* never -0.0, whose gaps would sort last */
    if (!(r->top - r->top == 0.0f)) return;                 /* all are -inf, or one is inf */
    const float scale = -LOG2E / r->temperature;
    const int by_rank = k > 0 && k < d->vocab;
    if (by_rank || top_p < 1.0f) {
        /* Past the cut of top-p, all tokens together have less than the mass that it drops: a third of it. */
        const float cut = by_rank ? gap_of_sets(d, r, k, list, spare)
                                  : r->temperature * (log_of((float)d->vocab / (1.0f - top_p)) + 1.0f);
        int64_t n = gaps_up_to(d, r, cut, list, half), kept = n, total = 0;
        sort(list, spare, n);
        if (by_rank && k <= n) {
            r->limit = (int32_t)list[k - 1];
            for (kept = k; kept < n && list[kept] == list[k - 1];) kept++;
        }
        if (top_p < 1.0f) {
            if (by_rank) crossing(list, kept, scale, INT64_MAX, &total);
            else total = total_mass(d, r, scale, half);
            int64_t wanted = (int64_t)ceil((double)total * (double)top_p);
            wanted = wanted < 1 ? 1 : wanted > total ? total : wanted;
            const int32_t last = (int32_t)crossing(list, kept, scale, wanted, &total);
            r->limit = last < r->limit ? last : r->limit;
        }
    }
    if (min_p > 0.0f) { /* p >= min_p * max(p) */
        const float widest = fmaxf(-r->temperature * log_of(min_p), 0.0f) + 0.0f;
        int32_t pattern;
        memcpy(&pattern, &widest, 4);
        r->limit = pattern < r->limit ? pattern : r->limit;
    }
}

/* -- rows and threads --------------------------------------------------------------------------------------------- */

INLINE int has_filters(const Draw *d, int64_t row) {
    if (!d->top_p) return 0;
    if (d->filtered) return d->filtered[row] != 0;
    return d->top_k[row] > 0 || d->top_p[row] < 1.0f || d->min_p[row] > 0.0f;
}
/* at: where the node's logits begin */
INLINE void draw_row(const Draw *d, int64_t i, int64_t at, uint32_t *scratch, const int half) {
    const int64_t row = i / d->nodes;
    Row r = {.at = at, .limit = ALL, .temperature = d->temperature ? d->temperature[row] : 0.0f};
    const int noisy = r.temperature > 0.0f, filtered = noisy && has_filters(d, row);
    Best best;
    begin(&best, d->count);
    if (noisy) r.key = key_of(d->seed[row], d->positions[row * d->nodes] + d->depth[i] + 1);
    if (filtered) limit_row(d, &r, d->top_k[row], d->top_p[row], d->min_p[row], scratch, half);
    if (r.limit != ALL) scan(d, &r, &best, half, 1, 1);
    else if (noisy) scan(d, &r, &best, half, 1, 0);
    else scan(d, &r, &best, half, 0, 0);
    const int bad = !best.held || !(best.z[0] - best.z[0] == 0.0f);
    finish(&best, d->ids + i * d->count, d->noise + i * d->count);
    if (bad && d->count == 1) d->ids[i] |= NOT_FINITE; /* of several, `heaviest` sees it */
}
static APART void draw_node(const Draw *d, int64_t i, int64_t at, uint32_t *scratch, int64_t half) {
    BY_HALF(half, draw_row, d, i, at, scratch);
}

/* -- logits of a row's own: with penalties and biases, then without what is banned ---------------------------------- */

INLINE int32_t *counts_of(const Draw *d, const Drawer *who) { return (int32_t *)who->scratch + 3 * d->padded; }
INLINE int32_t *found_of(const Draw *d, const Drawer *who) { return (int32_t *)who->scratch + 4 * d->padded; }
INLINE int64_t newest_of(const Draw *d, int64_t row) { return d->positions[row * d->nodes]; }

/* Counts the text of another row. */
static void turn_to(const Draw *d, Drawer *who, int64_t row) {
    int32_t *counts = counts_of(d, who), *found = found_of(d, who);
    if (who->row == row) return;
    for (int64_t i = 0; i < who->distinct; i++) counts[found[i]] = 0;
    who->row = row;
    if (!who->cleared) memset(counts, 0, (size_t)d->padded * 4);
    who->cleared = 1;
    who->distinct = count_text(d->edits, row, newest_of(d, row), counts, found);
}

static void draw_own(const Draw *d, int64_t i, Drawer *who, int is_banned, int has_edits) {
    const int64_t row = i / d->nodes, node = i % d->nodes, half = d->half;
    const char *logits = (const char *)d->logits + i * d->vocab * (half ? 2 : 4);
    Draw own = *d;
    float *x = (float *)who->scratch + 2 * d->padded;
    int32_t *counts = counts_of(d, who), *found = found_of(d, who), *before = found + d->padded;
    own.logits = x;
    to_floats(x, logits, d->vocab, (int)half);
    if (has_edits) {
        turn_to(d, who, row);
        count_path(d->edits, row, node, newest_of(d, row), counts, before);
        edit_node(d->edits, row, node, found, who->distinct, counts, logits, (int)half, x);
    }
    for (int64_t k = 0; is_banned && k < d->bans; k++)
        if (d->ban_ids[row * d->bans + k] >= 0) x[d->ban_ids[row * d->bans + k]] = -INFINITY;
    draw_node(&own, i, 0, who->scratch, 0);
    if (!has_edits) return;
    for (int64_t j = i * d->count; j < (i + 1) * d->count; j++)
        d->edit[j] = edit_of(d->edits, row, counts, d->ids[j] & TOKEN_PART);
    forget_path(d->edits, row, node, newest_of(d, row), counts, before);
}

static void draw_some(void *data) {
    Draw *d = data;
    const int64_t width = d->edits ? 5 * d->padded + d->edits->width : 4 * d->padded;
    Drawer who = {.scratch = d->scratch + take(&d->worker, 1) * width, .row = -1};
    for (int64_t i; (i = take(&d->next, 1)) < d->rows;) {
        const int64_t row = i / d->nodes;
        const int is_banned = d->ban_until && d->positions[i] + 1 < d->ban_until[row];
        const int has_edits = d->edits && (is_edited(d->edits, row) || repeats_cost(d->edits, row));
        for (int64_t j = i * d->count; d->edits && j < (i + 1) * d->count; j++) d->edit[j] = (Edit){1.0f, 0.0f};
        if (is_banned || has_edits) draw_own(d, i, &who, is_banned, has_edits);
        else draw_node(d, i, i * d->vocab, who.scratch, d->half);
    }
}

/* rows, batch; seed, kv_len, floats [R, 3], top_k, ban_until, ban_ids [R, bans], bans; ahead; seed, position (kv_len +
   ahead), top_k, ban_until [batch] and ban_ids [batch, bans] one after the other; temperature, top_p, min_p [batch] one
   after the other */
static void sampling_rows(int64_t *n) {
    const int64_t *rows = POINTER(n[0]), batch = n[1], bans = n[8];
    int64_t *to = POINTER(n[10]);
    float *floats = POINTER(n[11]);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t row = rows[b];
        to[b] = ((int64_t *)POINTER(n[2]))[row];
        to[batch + b] = ((int64_t *)POINTER(n[3]))[row] + n[9];
        to[2 * batch + b] = ((int64_t *)POINTER(n[5]))[row];
        to[3 * batch + b] = ((int64_t *)POINTER(n[6]))[row];
        memcpy(to + 4 * batch + b * bans, (int64_t *)POINTER(n[7]) + row * bans, (size_t)bans * 8);
        for (int64_t k = 0; k < 3; k++) floats[k * batch + b] = ((float *)POINTER(n[4]))[row * 3 + k];
    }
}

static void draw(int64_t *n) {
    Draw *d = (Draw *)n;
    Edits edits = edits_of(d->numbers, EDITS);
    edits.to = d->vocab;
    d->edits = edits.rows ? &edits : NULL;
    d->padded = round_up(d->vocab, LANES);
    run_unlocked(draw_some, d, d->rows > 1 ? d->workers : NULL, d->rows * d->vocab / (d->temperature ? 5000 : 10000));
}

/* tokens [rows], ids, noise, logits [rows, count], rows, count; edit [rows, count] or 0: of each row the id with the
   largest noise + edited logit, the first of equals, or the first that is NaN; NOT_FINITE where that sum is not */
static void heaviest(int64_t *n) {
    const int64_t *ids = POINTER(n[1]), count = n[5];
    const float *noise = POINTER(n[2]), *logits = POINTER(n[3]);
    const Edit *edit = POINTER(n[6]);
    for (int64_t row = 0; row < n[4]; row++, ids += count, noise += count, logits += count, edit += edit ? count : 0) {
        int64_t at = 0;
        float most = noise[0] + (edit ? edited(logits[0], edit[0]) : logits[0]);
        for (int64_t i = 1; i < count && most == most; i++) {
            const float z = noise[i] + (edit ? edited(logits[i], edit[i]) : logits[i]);
            if (!(z <= most)) {
                most = z;
                at = i;
            }
        }
        ((int64_t *)POINTER(n[0]))[row] = ids[at] | (most - most == 0.0f ? 0 : NOT_FINITE);
    }
}

typedef struct {
    float *out;                      /* [rows, size] */
    const int64_t *seed, *positions; /* positions [rows] */
    const int64_t *ids;              /* NULL: 0, 1, .. */
    int64_t rows, nodes, size;       /* nodes: rows of a seed */
    int64_t stride;                  /* of ids: 0 where all rows have the same */
    Workers *workers;
    int64_t next;
} Noise;

/* To noise, what it adds to logits [from, to) of a row. ids: what it takes them for, NULL: 0, 1, ..; room: floats that
   may be written, to + 15 at most. */
static void row_noise(Key key, float temperature, const int64_t *ids, int64_t from, int64_t to, int64_t room,
                      float *noise) {
    const vf zero = {0};
    for (int64_t c = from; c < to; c += LANES) {
        vl some = {0};
        if (ids) memcpy(&some, ids + c, (size_t)least(to - c, LANES) * 8);
        const vi bits = bits_of(ids ? __builtin_convertvector(some, vu) * TOKEN_MUL : ids_from(c), key);
        Scored s;
        score(&zero, &bits, temperature, &s);
        store(noise, c, room - c, 0, s.noise);
    }
}
static void noise_some(void *data) {
    Noise *n = data;
    for (int64_t i; (i = take(&n->next, 1)) < n->rows;)
        row_noise(key_of(n->seed[i / n->nodes], n->positions[i]), 1.0f, n->ids ? n->ids + i * n->stride : NULL, 0,
                  n->size, n->size, n->out + i * n->size);
}

static void gumbel(int64_t *n) {
    Noise *noise = (Noise *)n;
    run_unlocked(noise_some, noise, noise->rows > 1 ? noise->workers : NULL, noise->rows * noise->size / 800);
}

/* -- drafts: ops/expansion/spec.py top_tokens, with the noise of sampling ----------------------------------------- */

typedef struct {
    int64_t *ids; /* [rows, nodes, count]: best first */
    float *logp;  /* the same */
    int64_t count;
    const void *logits;
    int64_t half, rows, nodes, vocab;
    const int64_t *seed, *positions; /* of each row */
    const float *temperature;        /* and top_p, min_p, each of all rows; NULL: no noise */
    const int64_t *target;           /* token ids of the logits, NULL: 0, 1, .. */
    float *scratch;                  /* [threads, padded]: a row's noise */
    Workers *workers;
    int64_t padded, next, worker;
} Top;

/* How far below the largest logit min-p lets the target draw. A head's logits are about the target's, so what is further
   below loses as much again as it lies below that; a ban would leave out too much of trees. */
#define NO_MIN_P 1e30f
static float reach_of(float temperature, float min_p) {
    return min_p > 0.0f ? fmaxf(-temperature * log_of(min_p), 0.0f) : NO_MIN_P;
}
INLINE vf unlikely(vf x, float top, float reach) { return larger(top - x - reach, splat(0.0f)); }
INLINE float largest_of(const void *logits, int64_t at, int64_t from, int64_t to, const int half) {
    vf most = splat(-INFINITY);
    for (int64_t c = from; c < to; c += LANES) most = larger(logits_before(logits, at, c, to, half), most);
    return top_lane(most);
}

typedef struct {
    float largest; /* of the logits as they are; where there is min-p */
    float top, total;
    Best best;
} Found;
typedef struct {
    const float *noise; /* NULL: none */
    float largest, reach;
} Noised;
INLINE vf noised(const Noised *n, const void *logits, int64_t at, int64_t c, int64_t end, const int half) {
    const vf x = logits_before(logits, at, c, end, half);
    if (!n->noise) return x;
    return x + (loadf(n->noise + c) - (n->reach < NO_MIN_P ? unlikely(x, n->largest, n->reach) : splat(0.0f)));
}
INLINE void best_in(const void *logits, int64_t at, int64_t from, int64_t to, const Noised *noise, Found *found,
                    int64_t count, const int half) {
    vf most = splat(-INFINITY), sum = {0};
    begin(&found->best, count);
    for (int64_t c = from; c < to; c += LANES) {
        const vf x = noised(noise, logits, at, c, to, half);
        most = larger(x, most);
        if (!any(x > found->best.cutoff)) continue;
        for (int l = 0; l < LANES; l++)
            if (x[l] > found->best.worst) enter_best(&found->best, c + l, x[l], 0.0f, 0.0f);
    }
    found->top = top_lane(most);
    for (int64_t c = from; c < to; c += LANES)
        sum += exp2_16((noised(noise, logits, at, c, to, half) - found->top) * LOG2E);
    found->total = sum[0];
    for (int l = 1; l < LANES; l++) found->total += sum[l];
}
/* Of a row's logits, which begin at `at`, those of [from, to). */
static void best_of(const void *logits, int64_t at, int64_t half, int64_t from, int64_t to, const Noised *noise,
                    Found *found, int64_t count) {
    BY_HALF(half, best_in, logits, at, from, to, noise, found, count);
}
/* names: as of `Following`. total: log of the sum of all. Fewer are held where all else is -inf. */
static void give(const Best *best, int64_t count, float total, const int64_t *names, int64_t *ids, float *logp) {
    for (int64_t j = 0; j < count; j++) {
        const int64_t id = j < best->held ? best->id[j] : 0;
        ids[j] = names ? names[id] : id;
        logp[j] = j < best->held ? best->z[j] - total : -INFINITY;
    }
}

static void top_some(void *data) {
    Top *t = data;
    float *noise = t->scratch + take(&t->worker, 1) * t->padded;
    for (int64_t row; (row = take(&t->next, 1)) < t->rows;) {
        const int noisy = t->temperature && t->temperature[row] > 0.0f;
        const float reach = noisy ? reach_of(t->temperature[row], t->temperature[2 * t->rows + row]) : NO_MIN_P;
        if (noisy)
            row_noise(key_of(t->seed[row], t->positions[row]), t->temperature[row], t->target, 0, t->vocab, t->padded,
                      noise);
        for (int64_t i = row * t->nodes; i < (row + 1) * t->nodes; i++) {
            const int64_t at = i * t->vocab;
            const float largest = reach < NO_MIN_P ? largest_of(t->logits, at, 0, t->vocab, (int)t->half) : 0.0f;
            const Noised how = {noisy ? noise : NULL, largest, reach};
            Found found;
            best_of(t->logits, at, t->half, 0, t->vocab, &how, &found, t->count);
            give(&found.best, t->count, found.top + log_of(found.total), NULL, t->ids + i * t->count,
                 t->logp + i * t->count);
        }
    }
}

/* Of states that a GEMM makes logits of, perhaps normed before: each thread looks for the best among
   the outputs that it has made, which are in its cache. Up to eps, what `following` is given, and then what edits the
   logits, if anything does. */
typedef struct {
    int64_t *ids; /* [.., count]: best first */
    float *logp;  /* the same */
    const void *states;
    int64_t stride;
    const int64_t *places, *names; /* of each row in states, ids and logp, or NULL: 0, 1, ..; target ids, or NULL */
    int64_t count;
    const void *norm; /* weight, or NULL */
    int64_t half, rows, gemm[GEMM]; /* outputs of the GEMM: a multiple of 32 */
    /* Of the row that is looked at [outputs]; behind it, with edits, counts [2 * outputs], then logits [rows, outputs],
       and of each thread rows [rows, inputs], which are rounded to 8 bits behind that if the weight is in blocks. */
    float *noise;
    Workers *workers;
    const int64_t *seed, *positions; /* of each group of `nodes` rows, whose noise is the same */
    const float *temperature;        /* and top_p, min_p, each of all groups; NULL: no noise */
    int64_t nodes;
    double eps;
    int64_t numbers[DRAFT_EDITS]; /* of `Edits`; zeros: none */
    Team team;
    Product product; /* its x is that of thread 0, its out the logits */
    const Edits *edits; /* NULL: none */
    int32_t *counts;    /* for these */
    char *spare;        /* of threads */
    Found *found;       /* [threads, rows] */
} Following;

/* What the threads, whose outputs ascend, have found of a row. */
static void join_found(const Following *f, int64_t row, int64_t threads) {
    const int64_t rows = f->product.rows;
    float top = -INFINITY, total = 0.0f;
    Best best;
    begin(&best, f->count);
    for (int64_t t = 0; t < threads; t++) {
        const Found *part = f->found + t * rows + row;
        if (part->top > top) top = part->top;
        for (int64_t j = 0; j < part->best.held; j++)
            if (part->best.z[j] > best.worst) enter_best(&best, part->best.id[j], part->best.z[j], 0.0f, 0.0f);
    }
    for (int64_t t = 0; t < threads; t++)
        total += f->found[t * rows + row].total * exp2_16(splat((f->found[t * rows + row].top - top) * LOG2E))[0];
    const int64_t at = (f->places ? f->places[row] : row) * f->count;
    give(&best, f->count, top + log_of(total), f->names, f->ids + at, f->logp + at);
}

INLINE float group_reach(const Following *f, int64_t group) {
    const int64_t groups = f->product.rows / f->nodes;
    if (!f->temperature || !(f->temperature[group] > 0.0f)) return NO_MIN_P;
    return reach_of(f->temperature[group], f->temperature[2 * groups + group]);
}
static int some_reach(const Following *f) {
    int found = 0;
    for (int64_t g = 0; g < f->product.rows / f->nodes; g++) found |= group_reach(f, g) < NO_MIN_P;
    return found;
}

static void some_following(void *data) {
    Following *f = data;
    const Member me = join(&f->team);
    Product p = f->product;
    const int64_t width = p.half ? 2 : 4, bytes = p.rows * p.inputs * width;
    char *x = f->spare + me.number * (bytes + (p.blocks ? rounded_size(p.rows, p.inputs) : 0));
    const int64_t from = share(&me, p.outputs / 32, 0) * 32, to = share(&me, p.outputs / 32, 1) * 32;
    Ahead nothing = {0};
    if (p.blocks) p.rounded = rounded_at(x + bytes, p.rows, p.inputs);
    for (int64_t i = 0; i < p.rows; i++) {
        const char *state = (const char *)f->states + (f->places ? f->places[i] : i) * f->stride * width;
        char *to_row = x + i * p.inputs * width;
        const Rows r = {.out = to_row, .x = state, .weight = f->norm, .size = p.inputs, .eps = f->eps, .half = p.half};
        if (f->norm) norm_part(&r, 0);
        else memcpy(to_row, state, (size_t)(p.inputs * width));
        if (p.blocks) round_part(&p.rounded, x, i, 0, p.inputs, p.half);
    }
    p.x = x;
    multiply_part(&p, from, to);
    Edits edits = f->edits ? *f->edits : (Edits){0};
    edits.from = from;
    edits.to = to;
    for (int64_t i = 0; f->edits && i < p.rows; i += f->nodes)
        edit_logits(&edits, i / f->nodes, (char *)p.out + i * p.outputs * width, f->nodes, p.outputs, (int)p.half,
                    f->counts, f->counts + p.outputs);
    Found *found = f->found + me.number * p.rows;
    const int limited = some_reach(f);
    for (int64_t i = 0; limited && i < p.rows; i++)
        found[i].largest = largest_of(p.out, i * p.outputs, from, to, (int)p.half);
    if (limited) meet(&me, &nothing);
    for (int64_t i = 0; i < p.rows; i++) {
        const int64_t group = i / f->nodes;
        const float reach = group_reach(f, group);
        const int noisy = f->temperature && f->temperature[group] > 0.0f;
        if (noisy && i % f->nodes == 0)
            row_noise(key_of(f->seed[group], f->positions[group]), f->temperature[group], f->names, from, to, to,
                      f->noise);
        float largest = -INFINITY;
        for (int64_t t = 0; limited && t < me.size; t++)
            largest = fmaxf(largest, f->found[t * p.rows + i].largest);
        const Noised noise = {noisy ? f->noise : NULL, largest, reach};
        best_of(p.out, i * p.outputs, p.half, from, to, &noise, found + i, f->count);
    }
    meet(&me, &nothing);
    for (int64_t i = me.number; i < p.rows; i += me.size) join_found(f, i, me.size);
}

static void following(int64_t *n) {
    Following *f = (Following *)n;
    const Edits edits = edits_of(f->numbers, DRAFT_EDITS);
    f->edits = edits.rows ? &edits : NULL;
    f->product = product_of(f->gemm, f->half);
    f->product.rows = f->rows;
    f->counts = (int32_t *)f->noise + f->product.outputs;
    f->product.out = f->noise + f->product.outputs * (f->edits ? 3 : 1);
    f->spare = (char *)f->product.out + f->rows * f->product.outputs * (f->half ? 2 : 4);
    f->found = aligned_alloc(sizeof(vf), sizeof(Found) * (size_t)(f->workers->most * f->rows));
    if (!f->found) return (void)PyErr_NoMemory();
    run_team_unlocked(some_following, f, &f->team, f->workers);
    free(f->found);
}

static void top_tokens(int64_t *n) {
    Top *t = (Top *)n;
    t->padded = round_up(t->vocab, LANES);
    const int64_t passes = t->nodes + (t->temperature ? 3 : 0);
    run_unlocked(top_some, t, t->rows > 1 ? t->workers : NULL, t->rows * passes * t->vocab / 3000);
}

Function sampling_functions[] = {
    {"sampling_rows", sampling_rows, 12},
    {"draw", draw, UP_TO(Draw, numbers), sizeof(Draw), .more = EDITS + 1},
    {"heaviest", heaviest, 7},
    {"gumbel", gumbel, UP_TO(Noise, next), sizeof(Noise)},
    {"top_tokens", top_tokens, UP_TO(Top, padded), sizeof(Top)},
    {"following", following, UP_TO(Following, eps), sizeof(Following), .doubles = 1, .more = DRAFT_EDITS},
    {0},
};
