/* What heads that draft do besides GEMMs: gates and memories of the tokens above a node, page tables of layers with a
   window, and logits of the tokens of a few clusters. Small, so one thread, with the GIL. The references are
   spec.py of ops/elementwise, ops/lm_head and ops/expansion. */

#include "cpu.h"

INLINE vf tangent(vf x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

/* out, rows; address, stride and size in bytes of up to three parts, zeros for none */
static void beside(int64_t *n) {
    char *out = POINTER(n[0]);
    for (int64_t i = 0; i < n[1]; i++)
        for (const int64_t *part = n + 2; part < n + 11; out += part[2], part += 3)
            if (part[2]) memcpy(out, (const char *)POINTER(part[0]) + i * part[1], (size_t)part[2]);
}

INLINE vf share_of(vf x, const int64_t soft) { return soft ? softplus(x) : sigmoid(x); }

/* out, gate, x, rows, their size, whether a row has one gate, half, whether gates are softplus */
static void gate(int64_t *n) {
    const int64_t size = n[4], one = n[5], soft = n[7];
    const int half = (int)n[6];
    for (int64_t i = 0; i < n[3]; i++) {
        const vf same = share_of(splat(one ? load(POINTER(n[1]), i, 1, half)[0] : 0), soft);
        for (int64_t c = 0; c < size; c += LANES) {
            const int64_t at = i * size + c, left = size - c;
            const vf gate = one ? same : share_of(load(POINTER(n[1]), at, left, half), soft);
            store(POINTER(n[0]), at, left, half, gate * load(POINTER(n[2]), at, left, half));
        }
    }
}

/* out, next state, made [rows, 3 * size], state [rows, size], rows, size, half */
static void recur(int64_t *n) {
    const int64_t size = n[5];
    const int half = (int)n[6];
    for (int64_t i = 0; i < n[4]; i++)
        for (int64_t c = 0; c < size; c += LANES) {
            const int64_t from = 3 * i * size + c, at = i * size + c, left = size - c;
            const vf keep = sigmoid(load(POINTER(n[2]), from, left, half));
            const vf fresh = tangent(load(POINTER(n[2]), from + size, left, half));
            store(POINTER(n[0]), at, left, half, tangent(load(POINTER(n[2]), from + 2 * size, left, half)));
            store(POINTER(n[1]), at, left, half, keep * load(POINTER(n[3]), at, left, half) + (1.0f - keep) * fresh);
        }
}

/* next state, read, kept [rows, 3 * size], state [rows, size], rows, size, half */
static void gru(int64_t *n) {
    const void *read = POINTER(n[1]), *kept = POINTER(n[2]);
    const int64_t size = n[5];
    const int half = (int)n[6];
    for (int64_t i = 0; i < n[4]; i++)
        for (int64_t c = 0; c < size; c += LANES) {
            const int64_t from = 3 * i * size + c, at = i * size + c, left = size - c;
            const vf reset = sigmoid(load(read, from, left, half) + load(kept, from, left, half));
            const vf stay = sigmoid(load(read, from + size, left, half) + load(kept, from + size, left, half));
            const vf old = load(kept, from + 2 * size, left, half);
            const vf fresh = tangent(load(read, from + 2 * size, left, half) + reset * old);
            store(POINTER(n[0]), at, left, half, (1.0f - stay) * fresh + stay * load(POINTER(n[3]), at, left, half));
        }
}

/* prefix_len's and the table's result [rows, width]; table [.., length], its length, rows, prefix_len, how many, window,
   width: of each row's table the entries from window - 1 before prefix_len on */
static void windowed(int64_t *n) {
    int64_t *left = POINTER(n[0]), *out = POINTER(n[1]);
    const int64_t *table = POINTER(n[2]), length = n[3], *rows = POINTER(n[4]), *prefix = POINTER(n[5]), most = n[7] - 1;
    for (int64_t b = 0; b < n[6]; b++) {
        left[b] = prefix[b] < most ? prefix[b] : most;
        for (int64_t i = 0; i < n[8]; i++) {
            const int64_t at = prefix[b] - left[b] + i;
            out[b * n[8] + i] = table[rows[b] * length + (at < length ? at : length - 1)];
        }
    }
}

/* out [rows, chosen * each]; scores [rows, count], half, rows, count, chosen, ordering [count, each], each, scratch
   [count] float: the tokens of the clusters with the best scores, best first, of equals the lower number */
static void cluster_tokens(int64_t *n) {
    const int64_t half = n[2], rows = n[3], count = n[4], chosen = n[5], *ordering = POINTER(n[6]), each = n[7];
    float *scores = POINTER(n[8]);
    int64_t *which = POINTER(n[0]); /* numbers of clusters lie where their tokens will: the first of them */
    for (int64_t i = 0; i < rows; i++, which += chosen * each) {
        to_floats(scores, (const char *)POINTER(n[1]) + i * count * (half ? 2 : 4), count, (int)half);
        best_first(scores, count, chosen, which);
        for (int64_t k = chosen; k--;) memcpy(which + k * each, ordering + which[k] * each, (size_t)each * 8);
    }
}

/* out [rows, vocab], half; found [rows, count] float, ids, rows, count, vocab: what is found of ids, 1 below the least
   of it for others */
static void spread_logits(int64_t *n) {
    const int half = (int)n[1];
    const float *found = POINTER(n[2]);
    const int64_t *ids = POINTER(n[3]), count = n[5], vocab = n[6];
    RELEASE_GIL
    for (int64_t i = 0; i < n[4]; i++, found += count, ids += count) {
        float least = found[0];
        for (int64_t j = 1; j < count; j++) least = found[j] < least ? found[j] : least;
        char *const out = (char *)POINTER(n[0]) + i * vocab * (half ? 2 : 4);
        store(out, 0, 1, half, (vf){0} + least); /* rounded, as it is subtracted from */
        const vf low = (vf){0} + (load(out, 0, 1, half)[0] - 1.0f);
        for (int64_t c = 0; c < vocab; c += LANES) store(out, c, vocab - c, half, low);
        for (int64_t j = 0; j < count; j++) store(out, ids[j], 1, half, (vf){0} + found[j]);
    }
    TAKE_GIL
}

Function head_functions[] = {
    {"beside", beside, 11},
    {"gate", gate, 8},
    {"recur", recur, 7},
    {"gru", gru, 7},
    {"windowed", windowed, 9},
    {"cluster_tokens", cluster_tokens, 9},
    {"spread_logits", spread_logits, 7},
    {0},
};
