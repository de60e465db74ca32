/* Penalties and biases of requests: what sampling/edits.py describes, of single tokens. A text has few of the
   vocabulary's tokens, so its counts are made once for all nodes of a row, and a node of the target adds those of its
   own path. */

#include "cpu.h"

/* In a token's count: */
#define SEEN (1 << 30)   /* the text has it */
#define BIASED (1 << 29) /* it has a bias */
#define MARK 23          /* from this bit on: tokens of the longest repetition that it would go on with */
#define MARKS (63 << MARK)
#define TIMES ((1 << MARK) - 1)

INLINE const float *penalties_of(const Edits *e, int64_t b) { return e->penalties + e->rows[b] * 3; }
INLINE const float *biases_of(const Edits *e, int64_t b) { return e->bias_values + e->rows[b] * e->biases; }
INLINE const int64_t *biased_ids(const Edits *e, int64_t b) { return e->bias_ids + e->rows[b] * e->biases; }
INLINE const int64_t *text_of(const Edits *e, int64_t b) { return e->text + e->rows[b] * e->length; }

/* Where the logits have a token; -1: not among those that are edited. */
INLINE int64_t place_of(const Edits *e, int64_t id) {
    const int64_t place = e->draft_ids ? e->draft_ids[id] : id;
    return place >= e->from && place < e->to ? place : -1;
}

int is_edited(const Edits *e, int64_t b) {
    const float *p = penalties_of(e, b), *value = biases_of(e, b);
    int found = p[0] != 0.0f || p[1] != 0.0f || p[2] != 1.0f;
    for (int64_t k = 0; !found && k < e->biases; k++) found = value[k] != 0.0f;
    return found;
}

INLINE const float *costs_of(const Edits *e, int64_t b) { return e->costs + e->rows[b] * (e->longest + 1); }
int repeats_cost(const Edits *e, int64_t b) { return costs_of(e, b)[e->longest] > 0.0f; }

int64_t count_text(const Edits *e, int64_t b, int64_t newest, int32_t *counts, int32_t *found) {
    const int64_t *text = text_of(e, b), *ids = biased_ids(e, b), answer = e->prompt_len[e->rows[b]];
    const float *value = biases_of(e, b);
    int64_t distinct = 0;
    for (int64_t i = 0; i <= newest; i++) {
        const int64_t id = place_of(e, text[i]);
        if (id < 0) continue;
        if (!counts[id]) found[distinct++] = (int32_t)id;
        counts[id] = (counts[id] | SEEN) + (i >= answer);
    }
    for (int64_t k = 0; k < e->biases; k++) {
        const int64_t id = value[k] == 0.0f ? -1 : place_of(e, ids[k]);
        if (id < 0) continue;
        if (!counts[id]) found[distinct++] = (int32_t)id;
        counts[id] |= BIASED;
    }
    return distinct;
}

INLINE int64_t on_path(const Edits *e, int64_t b, int64_t node, int64_t k) {
    return e->tokens[b * e->nodes + e->path[(b * e->nodes + node) * e->width + k]];
}

/* -- repetitions --------------------------------------------------------------------------------------------------- */

typedef struct {
    const int64_t *text, *drafted; /* of the answer, and what goes on from it */
    int64_t before, end;           /* how many of the first there are, and where the newest of all is */
    int64_t longest;
    const float *costs;
} Answer;
INLINE int64_t said(const Answer *a, int64_t i) { return i < a->before ? a->text[i] : a->drafted[i - a->before]; }

/* newest: position of the root in the row's text; drafted [count]: tokens below it, down to a node. */
INLINE Answer answer_of(const Edits *e, int64_t b, int64_t newest, const int64_t *drafted, int64_t count) {
    const int64_t first = e->prompt_len[e->rows[b]], before = most(newest + 1 - first, 0);
    return (Answer){text_of(e, b) + first, drafted, before, before + count - 1, e->longest, costs_of(e, b)};
}

/* How many tokens of the answer's end stand up to i, if as many cost something. */
INLINE int64_t repeated(const Answer *a, int64_t i) {
    if (said(a, i) != said(a, a->end)) return 0;
    int64_t n = 1;
    while (n < a->longest && n <= i && said(a, i - n) == said(a, a->end - n)) n++;
    return a->costs[n] == 0.0f ? 0 : n;
}

/* Marks each token that followed where the answer's end has been before with how many tokens of that end were there, or
   takes such marks away. */
static void mark_repeats(const Edits *e, int64_t b, int64_t node, int64_t newest, int32_t *counts, int on) {
    const int64_t count = e->path_len[b * e->nodes + node] - 1;
    int64_t drafted[count + 1];
    for (int64_t k = 0; k < count; k++) drafted[k] = on_path(e, b, node, k + 1);
    const Answer a = answer_of(e, b, newest, drafted, count);
    for (int64_t i = 0; i < a.end; i++) {
        const int64_t n = repeated(&a, i);
        if (!n) continue;
        int32_t *found = &counts[said(&a, i + 1)];
        const int32_t mark = (int32_t)n << MARK, had = *found & MARKS;
        *found = (*found & ~MARKS) | (on ? (mark > had ? mark : had) : 0);
    }
}

void count_path(const Edits *e, int64_t b, int64_t node, int64_t newest, int32_t *counts, int32_t *before) {
    for (int64_t k = 1; k < e->path_len[b * e->nodes + node]; k++) {
        int32_t *count = &counts[on_path(e, b, node, k)];
        before[k] = *count;
        *count = (*count | SEEN) + 1;
    }
    if (repeats_cost(e, b)) mark_repeats(e, b, node, newest, counts, 1);
}
void forget_path(const Edits *e, int64_t b, int64_t node, int64_t newest, int32_t *counts, const int32_t *before) {
    if (repeats_cost(e, b)) mark_repeats(e, b, node, newest, counts, 0);
    for (int64_t k = e->path_len[b * e->nodes + node] - 1; k > 0; k--) counts[on_path(e, b, node, k)] = before[k];
}

Edit edit_of(const Edits *e, int64_t b, const int32_t *counts, int64_t id) {
    const int32_t found = counts[id], count = found & TIMES;
    if (!found) return (Edit){1.0f, 0.0f};
    const float *p = penalties_of(e, b), *value = biases_of(e, b);
    const int64_t *ids = biased_ids(e, b);
    const float present = (count ? 1.0f : 0.0f) * p[1], times = (float)count * p[0];
    float bias = 0.0f;
    for (int64_t k = 0; found & BIASED && k < e->biases; k++)
        if (place_of(e, ids[k]) == id) bias += value[k];
    float delta = bias - (present + times);
    if (found & MARKS) delta -= costs_of(e, b)[(found & MARKS) >> MARK];
    return (Edit){found & SEEN ? p[2] : 1.0f, delta};
}

/* Of the logits as they were, so that it may be done twice. */
INLINE void edit_one(const Edits *e, int64_t b, const int32_t *counts, const void *logits, int half, int64_t id,
                     float *x) {
    float one;
    to_floats(&one, (const char *)logits + id * (half ? 2 : 4), 1, half);
    x[id] = edited(one, edit_of(e, b, counts, id));
}
void edit_node(const Edits *e, int64_t b, int64_t node, const int32_t *found, int64_t distinct, const int32_t *counts,
               const void *logits, int half, float *x) {
    for (int64_t i = 0; i < distinct; i++) edit_one(e, b, counts, logits, half, found[i], x);
    for (int64_t k = 1; k < e->path_len[b * e->nodes + node]; k++)
        edit_one(e, b, counts, logits, half, on_path(e, b, node, k), x);
}

/* -- logits of drafts ---------------------------------------------------------------------------------------------- */

INLINE void add_to(void *logits, int64_t at, int half, float value) {
    store(logits, at, 1, half, splat(load(logits, at, 1, half)[0] + value));
}

/* Takes from a node's logits what repetitions cost. counts are zeros, before and after. */
static void take_repeats(const Edits *e, int64_t b, int64_t node, void *logits, int half, int32_t *counts,
                         int32_t *found) {
    const Answer a = answer_of(e, b, e->kv_len[e->rows[b]], e->tokens + node * e->width, e->width);
    int64_t distinct = 0;
    for (int64_t i = 0; i < a.end; i++) {
        const int64_t n = repeated(&a, i), id = n ? place_of(e, said(&a, i + 1)) : -1;
        if (id < 0) continue;
        if (!counts[id]) found[distinct++] = (int32_t)id;
        if (n > counts[id]) counts[id] = (int32_t)n;
    }
    for (int64_t i = 0; i < distinct; i++) {
        add_to(logits, found[i], half, -a.costs[counts[found[i]]]);
        counts[found[i]] = 0;
    }
}

void edit_logits(const Edits *e, int64_t b, void *logits, int64_t nodes, int64_t stride, int half, int32_t *counts,
                 int32_t *found) {
    const int repeats = e->width >= 0 && repeats_cost(e, b), edits = is_edited(e, b);
    if (!repeats && !edits) return;
    memset(counts + e->from, 0, (size_t)(e->to - e->from) * 4);
    found += e->from;
    const int64_t distinct = edits ? count_text(e, b, e->kv_len[e->rows[b]], counts, found) : 0;
    for (int64_t i = 0; i < distinct; i++) {
        const Edit edit = edit_of(e, b, counts, found[i]);
        for (int64_t node = 0; node < nodes; node++) {
            const int64_t at = node * stride + found[i];
            store(logits, at, 1, half, splat(edited(load(logits, at, 1, half)[0], edit)));
        }
    }
    for (int64_t i = 0; i < distinct; i++) counts[found[i]] = 0;
    for (int64_t node = 0; repeats && node < nodes; node++)
        take_repeats(e, b, b * nodes + node, (char *)logits + node * stride * (half ? 2 : 4), half, counts, found);
}

/* out [batch * nodes, width + 1]: tokens from below the root down to each node of a level; above [batch * nodes, width]:
   the same of the level above it; ids, parents [batch, nodes]: of the level, parents in the one above */
static void descend(int64_t *n) {
    int64_t *out = POINTER(n[0]);
    const int64_t *above = POINTER(n[1]), *ids = POINTER(n[3]), *parents = POINTER(n[4]), nodes = n[6];
    for (int64_t i = 0; i < n[5] * nodes; i++) {
        for (int64_t k = 0; k < n[2]; k++) *out++ = above[(i / nodes * nodes + parents[i]) * n[2] + k];
        *out++ = ids[i];
    }
}

typedef struct {
    char *logits; /* [rows * nodes, vocab] */
    int64_t half, rows, nodes, stride, vocab;
    int32_t *scratch; /* [threads, 2 * vocab] */
    Workers *workers;
    int64_t numbers[DRAFT_EDITS]; /* of `Edits` */
    Edits edits;
    int64_t next, worker;
} Editing;

static void edit_some(void *data) {
    Editing *d = data;
    int32_t *counts = d->scratch + take(&d->worker, 1) * 2 * d->vocab;
    for (int64_t row; (row = take(&d->next, 1)) < d->rows;)
        edit_logits(&d->edits, row, d->logits + row * d->nodes * d->stride * (d->half ? 2 : 4), d->nodes, d->stride,
                    (int)d->half, counts, counts + d->vocab);
}

static void edit_drafts(int64_t *n) {
    Editing *d = (Editing *)n;
    d->edits = edits_of(d->numbers, DRAFT_EDITS);
    d->edits.to = d->vocab;
    run_unlocked(edit_some, d, d->rows > 1 ? d->workers : NULL, d->rows * d->vocab / 20000);
}

Function edit_functions[] = {
    {"edit_logits", edit_drafts, UP_TO(Editing, edits), sizeof(Editing)},
    {"descend", descend, 7},
    {0},
};
