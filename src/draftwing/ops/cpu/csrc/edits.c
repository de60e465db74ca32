/* Penalties and biases of requests: what sampling/edits.py describes, of single tokens. A text has few of the
   vocabulary's tokens, so its counts are made once for all nodes of a row, and a node adds those of its own path. */

#include "cpu.h"

/* In a token's count: */
#define SEEN (1 << 30)   /* the text has it */
#define BIASED (1 << 29) /* it has a bias */
#define TIMES (BIASED - 1)

INLINE const float *penalties_of(const Edits *e, int64_t b) { return e->penalties + e->rows[b] * 3; }
INLINE const float *biases_of(const Edits *e, int64_t b) { return e->bias_values + e->rows[b] * e->biases; }
INLINE const int64_t *biased_ids(const Edits *e, int64_t b) { return e->bias_ids + e->rows[b] * e->biases; }
INLINE const int64_t *text_of(const Edits *e, int64_t b) { return e->text + e->rows[b] * e->length; }

int is_edited(const Edits *e, int64_t b) {
    const float *p = penalties_of(e, b), *value = biases_of(e, b);
    int found = p[0] != 0.0f || p[1] != 0.0f || p[2] != 1.0f;
    for (int64_t k = 0; !found && k < e->biases; k++) found = value[k] != 0.0f;
    return found;
}

int64_t count_text(const Edits *e, int64_t b, int64_t newest, int32_t *counts, int32_t *found) {
    const int64_t *text = text_of(e, b), *ids = biased_ids(e, b), answer = e->prompt_len[e->rows[b]];
    const float *value = biases_of(e, b);
    int64_t distinct = 0;
    for (int64_t i = 0; i <= newest; i++) {
        if (!counts[text[i]]) found[distinct++] = (int32_t)text[i];
        counts[text[i]] = (counts[text[i]] | SEEN) + (i >= answer);
    }
    for (int64_t k = 0; k < e->biases; k++) {
        if (value[k] == 0.0f) continue;
        if (!counts[ids[k]]) found[distinct++] = (int32_t)ids[k];
        counts[ids[k]] |= BIASED;
    }
    return distinct;
}

INLINE int64_t on_path(const Edits *e, int64_t b, int64_t node, int64_t k) {
    return e->tokens[b * e->nodes + e->path[(b * e->nodes + node) * e->width + k]];
}
void count_path(const Edits *e, int64_t b, int64_t node, int32_t *counts, int32_t *before) {
    for (int64_t k = 1; k < e->path_len[b * e->nodes + node]; k++) {
        int32_t *count = &counts[on_path(e, b, node, k)];
        before[k] = *count;
        *count = (*count | SEEN) + 1;
    }
}
void forget_path(const Edits *e, int64_t b, int64_t node, int32_t *counts, const int32_t *before) {
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
        if (ids[k] == id) bias += value[k];
    return (Edit){found & SEEN ? p[2] : 1.0f, bias - (present + times)};
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
