/* A tree step on the CPU, between the GEMMs: geometry, acceptance, expansion, a head's input, candidates' logits.

   All of it is small: a few hundred integers. As torch operations it is a hundred calls of some microseconds each, here
   it is one call for each place where Python has to come in between. One thread, with the GIL. Arrays are contiguous
   int64 (alive: bytes, scores: float32) unless stated otherwise. The references are ops/tree/spec.py and
   ops/expansion/spec.py. */

#include "cpu.h"

#define ROOM "row %lld: expected room for %lld entries past %lld, found %lld in all"

static int has_room(int64_t row, int64_t from, int64_t wanted, int64_t length) {
    if (from >= 0 && from + wanted <= length) return 1;
    PyErr_Format(PyExc_IndexError, ROOM, (long long)row, (long long)wanted, (long long)from, (long long)length);
    return 0;
}

/* -- what a tree means for the target ----------------------------------------------------------------------------- */

/* Depth, path and path length of a tree's nodes; a dead node stands alone. width: of a path, the depth's bound + 1. */
static int derive_row(const int64_t *parent, const uint8_t *alive, int64_t nodes, int64_t width, int64_t *depth,
                      int64_t *path, int64_t *path_len) {
    for (int64_t i = 0; i < nodes; i++, path += width) {
        depth[i] = 0;
        if (i && alive[i]) {
            const int64_t above = parent[i];
            if (above < 0 || above >= i || depth[above] + 1 >= width) {
                PyErr_Format(PyExc_ValueError, "node %lld: expected a parent before it, at a depth below %lld",
                             (long long)i, (long long)(width - 1));
                return 0;
            }
            depth[i] = depth[above] + 1;
            memcpy(path, path + (above - i) * width, (size_t)depth[i] * 8);
        }
        for (int64_t j = depth[i]; j < width; j++) path[j] = i;
        path_len[i] = depth[i] + 1;
    }
    return 1;
}

/* parent, alive, batch, nodes, depth's bound; depth, path, path_len; rows, table, kv_len, length; positions,
   write_slots, prefix_len */
static void target_inputs(int64_t *n) {
    const int64_t *parent = POINTER(n[0]), *rows = POINTER(n[8]), *table = POINTER(n[9]), *kv_len = POINTER(n[10]);
    const uint8_t *alive = POINTER(n[1]);
    const int64_t batch = n[2], nodes = n[3], width = n[4] + 1, length = n[11];
    int64_t *depth = POINTER(n[5]), *path = POINTER(n[6]), *path_len = POINTER(n[7]), *positions = POINTER(n[12]),
            *slots = POINTER(n[13]), *prefix = POINTER(n[14]);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t row = rows[b], from = kv_len[row], first = b * nodes;
        if (!has_room(row, from, nodes, length)) return;
        if (!derive_row(parent + first, alive + first, nodes, width, depth + first, path + first * width,
                        path_len + first))
            return;
        for (int64_t i = first; i < first + nodes; i++) positions[i] = from + depth[i];
        memcpy(slots + first, table + row * length + from, (size_t)nodes * 8);
        prefix[b] = from;
    }
}

/* -- acceptance and commit ---------------------------------------------------------------------------------------- */

#define HEAD 2 /* columns of a packed result before the tokens: confidence, count */

/* What `commit` is given. */
typedef struct {
    const int64_t *tokens, *parent;
    const uint8_t *alive;
    const int64_t *mark, *target, *rows;
    int64_t batch, nodes, depth; /* depth: its bound, one less than the tokens that are committed at most */
    int64_t *table, *text, *kv_len, *last;
    int64_t length, dummy, confidence;
    int64_t *packed, *committed, *count;
    int64_t *path_ids, *path_positions, *path_slots, *path_nodes; /* or NULL */
    const int64_t *grade;                                         /* or NULL */
    float *seen, *accepted;                                       /* what is learnt of grades, or NULL */
} Commit;

/* From the root to a child while it equals the target's token at its parent, which NOT_FINITE never does; the tokens go to `committed`, the nodes
   to the front of `order`, followed by all others. Returns how many there are. */
static int64_t walk(const Commit *s, int64_t first, int64_t *committed, int64_t *order) {
    const int64_t *tokens = s->tokens + first, *parent = s->parent + first, *target = s->target + first;
    const uint8_t *alive = s->alive + first;
    const int64_t n = s->nodes;
    int64_t count = 0;
    memset(committed, 0, (size_t)(s->depth + 1) * 8);
    for (int64_t node = 0; node < n && count <= s->depth;) {
        const int64_t want = committed[count] = target[node], here = order[count++] = node;
        for (node++; node < n; node++)
            if (alive[node] && parent[node] == here && tokens[node] == want) break;
    }
    for (int64_t i = 0, k = 0, place = count; i < n; i++)
        if (k < count && order[k] == i) k++;
        else order[place++] = i;
    return count;
}

/* The verified nodes whose parent was accepted, and which of them were, too; order: the nodes, `count` accepted ones
   first. */
static void learn(const Commit *s, int64_t first, int64_t count, const int64_t *order) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t i = order[k] + 1; i < s->nodes; i++)
            if (s->alive[first + i] && s->parent[first + i] == order[k]) {
                const int64_t grade = s->grade ? s->grade[first + i] : 0;
                const int64_t cell = cell_of(grade, s->mark[first + i] & MARK_DEPTH);
                s->seen[cell] += 1;
                s->accepted[cell] += k + 1 < count && order[k + 1] == i;
            }
}

/* moved: scratch of a tree's size */
static int commit_row(const Commit *s, int64_t b, int64_t *moved) {
    const int64_t n = s->nodes, width = s->depth + 1, first = b * n, row = s->rows[b], from = s->kv_len[row];
    if (!has_room(row, from, n > width + 1 ? n : width + 1, s->length)) return 0;
    int64_t *packed = s->packed + b * (HEAD + width + 2 * n), *order = packed + HEAD + width;
    int64_t *table = s->table + row * s->length + from, *text = s->text + row * s->length + from;
    const int64_t count = walk(s, first, packed + HEAD, order);
    packed[0] = s->confidence;
    packed[1] = s->count[b] = count;
    memcpy(order + n, s->mark + first, (size_t)n * 8);
    int64_t *committed = s->committed + b * width;
    for (int64_t i = 0; i < width; i++) committed[i] = packed[HEAD + i] & TOKEN_PART;
    if (row != s->dummy) { /* which stays as it is */
        memcpy(moved, table, (size_t)n * 8);
        for (int64_t i = 0; i < n; i++) table[i] = moved[order[i]];
        memcpy(text + 1, committed, (size_t)width * 8); /* past the count: overwritten before anybody reads it */
        s->kv_len[row] = from + count;
        s->last[row] = committed[count - 1];
        if (s->seen) learn(s, first, count, order);
    }
    if (!s->path_ids) return 1;
    memcpy(s->path_ids + b * width, text, (size_t)width * 8);
    memcpy(s->path_slots + b * width, table, (size_t)width * 8);
    for (int64_t i = 0; i < width; i++) {
        s->path_positions[b * width + i] = from + i;
        s->path_nodes[b * width + i] = first + (i < n ? order[i] : 0);
    }
    return 1;
}

static void commit(int64_t *n) {
    const Commit *s = (const Commit *)n;
    int64_t *moved = PyMem_Malloc((size_t)s->nodes * 8);
    if (!moved) return (void)PyErr_NoMemory();
    for (int64_t b = 0; b < s->batch && commit_row(s, b, moved); b++) {}
    PyMem_Free(moved);
}

/* -- expansion: ops/expansion/spec.py ---------------------------------------------------------------------------- */

void best_first(const float *score, int64_t n, int64_t count, int64_t *places) {
    int64_t held = 0;
    for (int64_t i = 0; i < n; i++) {
        if (held == count && !(count && score[i] > score[places[count - 1]])) continue;
        int64_t at = held < count ? held++ : count - 1;
        for (; at && score[i] > score[places[at - 1]]; at--) places[at] = places[at - 1];
        places[at] = i;
    }
}

/* Candidates of all levels, [batch, size]: those of level 1, then topk * topk of each level. Beside them the nodes of
   the level that was chosen last, [batch, topk]: their candidate numbers and scores. 7 numbers. */
typedef struct {
    int64_t size, topk;
    int64_t *ids, *above; /* the candidate that it follows, -1 the root */
    float *score;
    int64_t *number;
    float *node_score;
} Growth;
INLINE int64_t first_of(const Growth *g, int64_t level) { /* of the candidates that a level's nodes are chosen from */
    return level > 1 ? g->topk + (level - 2) * g->topk * g->topk : 0;
}

/* expansion (7); first ids, first logp (float32), their stride; rows, batch; ids, parent [batch, topk] of level 1;
   kv_len, root_at [batch] */
static void first_level(int64_t *n) {
    const Growth g = *(const Growth *)n;
    const int64_t *rows = POINTER(n[10]), *kv_len = POINTER(n[14]);
    int64_t *ids = POINTER(n[12]), *parent = POINTER(n[13]), *root_at = POINTER(n[15]);
    for (int64_t b = 0; b < n[11]; b++) {
        const int64_t *first = (int64_t *)POINTER(n[7]) + rows[b] * n[9];
        const float *logp = (float *)POINTER(n[8]) + rows[b] * n[9];
        for (int64_t k = 0, at = b * g.topk, to = b * g.size; k < g.topk; k++, at++, to++) {
            ids[at] = g.ids[to] = first[k];
            g.node_score[at] = g.score[to] = logp[k];
            g.number[at] = k;
            g.above[to] = -1;
            parent[at] = 0;
        }
        root_at[b] = kv_len[rows[b]];
    }
}

/* expansion (7); level, following ids, logp (float32) [batch, topk, topk] of its nodes, batch */
static void add(int64_t *n) {
    const Growth g = *(const Growth *)n;
    const int64_t *ids = POINTER(n[8]), square = g.topk * g.topk;
    const float *logp = POINTER(n[9]);
    for (int64_t b = 0; b < n[10]; b++)
        for (int64_t i = 0, to = b * g.size + first_of(&g, n[7] + 1); i < square; i++, to++) {
            const int64_t node = b * g.topk + i / g.topk;
            g.ids[to] = ids[b * square + i];
            g.score[to] = g.node_score[node] + logp[b * square + i];
            g.above[to] = g.number[node];
        }
}

/* expansion (7); level, at least 2, batch; ids, parent [batch, topk] of the nodes chosen for it */
static void next_level(int64_t *n) {
    const Growth g = *(const Growth *)n;
    const int64_t from = first_of(&g, n[7]);
    for (int64_t b = 0; b < n[8]; b++) {
        const int64_t base = b * g.size + from, at = b * g.topk;
        int64_t *ids = (int64_t *)POINTER(n[9]) + at, *parent = (int64_t *)POINTER(n[10]) + at;
        best_first(g.score + base, g.topk * g.topk, g.topk, parent);
        for (int64_t k = 0; k < g.topk; k++) {
            ids[k] = g.ids[base + parent[k]];
            g.node_score[at + k] = g.score[base + parent[k]];
            g.number[at + k] = from + parent[k];
            parent[k] /= g.topk;
        }
    }
}

/* level, batch, topk, tail, lookahead; rows, root_at, table, length; parent, path of the level above; positions,
   write_slots, path_len [batch, topk], path [batch, topk, tail + level] */
static void level_rows(int64_t *n) {
    const int64_t level = n[0], topk = n[2], tail = n[3], width = tail + level, length = n[8];
    const int64_t *rows = POINTER(n[5]), *root_at = POINTER(n[6]), *table = POINTER(n[7]), *parent = POINTER(n[9]),
                  *above = POINTER(n[10]);
    int64_t *positions = POINTER(n[11]), *slots = POINTER(n[12]), *path_len = POINTER(n[13]), *path = POINTER(n[14]);
    for (int64_t b = 0; b < n[1]; b++) {
        if (!has_room(rows[b], root_at[b], tail + level * topk, length)) return;
        for (int64_t k = 0, at = b * topk; k < topk; k++, at++, path += width) {
            const int64_t own = tail + (level - 1) * topk + k; /* page-table entry past kv_len */
            positions[at] = root_at[b] + level - n[4];
            slots[at] = table[rows[b] * length + root_at[b] + own];
            path_len[at] = width;
            if (level > 1) memcpy(path, above + (b * topk + parent[at]) * (width - 1), (size_t)(width - 1) * 8);
            else if (tail) path[0] = 0; /* the root's */
            path[width - 1] = own;
        }
    }
}

/* out; source, its stride in bytes, bytes of a row; rows or 0, parent, batch, topk: of each node the source's row
   rows[b], or else that of its parent in b */
static void features(int64_t *n) {
    char *out = POINTER(n[0]);
    const int64_t *rows = POINTER(n[4]), *parent = POINTER(n[5]), topk = n[7];
    for (int64_t i = 0; i < n[6] * topk; i++)
        memcpy(out + i * n[3], (char *)POINTER(n[1]) + (rows ? rows[i / topk] : i / topk * topk + parent[i]) * n[2],
               (size_t)n[3]);
}

/* expansion (7); batch, nodes; rows, last; tokens, parent, alive, grade [batch, nodes] */
static void draft(int64_t *n) {
    const Growth g = *(const Growth *)n;
    const int64_t nodes = n[8], *rows = POINTER(n[9]), *last = POINTER(n[10]);
    memset(POINTER(n[13]), 1, (size_t)(n[7] * nodes));
    int64_t *place = PyMem_Malloc((size_t)(g.size + nodes) * 8), *best = place + g.size; /* of a candidate, its node */
    if (!place) return (void)PyErr_NoMemory();
    for (int64_t b = 0; b < n[7]; b++) {
        const int64_t base = b * g.size;
        int64_t *tokens = (int64_t *)POINTER(n[11]) + b * nodes, *parent = (int64_t *)POINTER(n[12]) + b * nodes;
        int64_t *grade = (int64_t *)POINTER(n[14]) + b * nodes;
        memset(place, 0, (size_t)g.size * 8);
        best_first(g.score + base, g.size, nodes - 1, best);
        for (int64_t i = 0; i < nodes - 1; i++) place[best[i]] = 1;
        *tokens++ = last[rows[b]];
        *parent++ = *grade++ = 0;
        for (int64_t i = 0, node = 1; i < g.size; i++) /* in order of the candidates: parents before children */
            if (place[i]) {
                const int64_t above = g.above[base + i];
                *tokens++ = g.ids[base + i];
                *parent++ = above < 0 ? 0 : place[above];
                *grade++ = LEVELS * MODEL + level_of(g.score[base + i] - (above < 0 ? 0 : g.score[base + above]));
                place[i] = node++;
            }
    }
    PyMem_Free(place);
}

/* -- committed text ----------------------------------------------------------------------------------------------- */

/* out, hidden, its stride in bytes, bytes of a row; count, lookahead, queries of a row, rows, batch; kept [R, size] or
   0: the query that each row's newest token is in */
static void newest(int64_t *n) {
    const int64_t *count = POINTER(n[4]), *rows = POINTER(n[7]);
    for (int64_t b = 0; b < n[8]; b++) {
        const char *from = (char *)POINTER(n[1]) + (b * n[6] + count[b] - n[5]) * n[2];
        memcpy((char *)POINTER(n[0]) + b * n[3], from, (size_t)n[3]);
        if (n[9]) memcpy((char *)POINTER(n[9]) + rows[b] * n[3], from, (size_t)n[3]);
    }
}

/* ids, logp (float32) [batch, topk], batch, topk; rows; first ids, first logp [R, topk] */
static void keep_first(int64_t *n) {
    const int64_t *rows = POINTER(n[4]), topk = n[3];
    for (int64_t b = 0; b < n[2]; b++) {
        memcpy((int64_t *)POINTER(n[5]) + rows[b] * topk, (int64_t *)POINTER(n[0]) + b * topk, (size_t)topk * 8);
        memcpy((float *)POINTER(n[6]) + rows[b] * topk, (float *)POINTER(n[1]) + b * topk, (size_t)topk * 4);
    }
}

/* text, table [R, length], length, kv_len, last; rows, batch, width, mask; ids, positions, write_slots [batch, width],
   prefix [batch], path [batch, width, width], path_len [batch, width]: `width` positions of each row. With a text, a
   chain of its tokens from `prefix` on; without, a block of the newest token and masks, all of which see each other.
   Of one position path and path_len may be write_slots, and prefix positions, where nobody asks for them */
static void line(int64_t *n) {
    const int64_t *text = POINTER(n[0]), *table = POINTER(n[1]), *kv_len = POINTER(n[3]), *last = POINTER(n[4]),
                  *rows = POINTER(n[5]), length = n[2], width = n[7], mask = n[8];
    int64_t *ids = POINTER(n[9]), *positions = POINTER(n[10]), *slots = POINTER(n[11]), *prefix = POINTER(n[12]),
            *path = POINTER(n[13]), *path_len = POINTER(n[14]);
    for (int64_t b = 0, at = 0; b < n[6]; b++) {
        const int64_t row = rows[b], from = text ? prefix[b] : kv_len[row], in_row = row * length + from;
        if (!has_room(row, from, width, length)) return;
        if (!text) prefix[b] = from;
        for (int64_t i = 0; i < width; i++, at++) {
            path_len[at] = text ? i + 1 : width;
            for (int64_t j = 0; j < width; j++) *path++ = j;
            ids[at] = text ? text[in_row + i] : i ? mask : last[row];
            positions[at] = from + i;
            slots[at] = table[in_row + i];
        }
    }
}

/* out [count, bytes]; source [rows, bytes], rows, bytes; index [count], count: the rows of these numbers */
static void take_rows(int64_t *n) {
    const int64_t *index = POINTER(n[4]);
    for (int64_t i = 0; i < n[5]; i++) {
        if (index[i] < 0 || index[i] >= n[2])
            return (void)PyErr_Format(PyExc_IndexError, "expected rows below %lld, found %lld", (long long)n[2],
                                      (long long)index[i]);
        memcpy((char *)POINTER(n[0]) + i * n[3], (char *)POINTER(n[1]) + index[i] * n[3], (size_t)n[3]);
    }
}

/* out [count * each]; table; rows [count], count, each; added [count * each] or 0: the table's number of each row, so
   many times, with what is added; out may be rows */
static void row_numbers(int64_t *n) {
    int64_t *out = POINTER(n[0]);
    const int64_t *table = POINTER(n[1]), *rows = POINTER(n[2]), *added = POINTER(n[5]);
    for (int64_t i = 0; i < n[3] * n[4]; i++) out[i] = table[rows[i / n[4]]] + (added ? added[i] : 0);
}

/* -- the input of a draft head's first GEMM ----------------------------------------------------------------------- */

/* A row of x, normed where it has a weight; NULL: zeros. */
static void fuse_row(void *out, const void *x, const void *weight, int64_t size, double eps, int64_t half) {
    const Rows r = {.out = out, .x = out, .weight = weight, .size = size, .eps = eps, .half = half};
    if (x) memcpy(out, x, (size_t)(size * (half ? 2 : 4)));
    else memset(out, 0, (size_t)(size * (half ? 2 : 4)));
    if (weight) norm_part(&r, 0);
}

/* grade's result; grade, parent, tokens [batch, nodes], batch, nodes; hidden [levels, batch, size], levels, size, half;
   weight [size], what tokens add [vocab], both float32; scratch [levels * batch + 2 * nodes] float32 */
static void confident(int64_t *n) {
    const int64_t batch = n[4], nodes = n[5], size = n[8], half = n[9];
    const float *weight = POINTER(n[10]), *added = POINTER(n[11]);
    float *odds = POINTER(n[12]), *depth = odds + n[7] * batch, *best = depth + nodes;
    for (int64_t i = 0; i < n[7] * batch; i++) odds[i] = dot_of(POINTER(n[6]), i * size, (int)half, weight, 0, 0, size);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t first = b * nodes, *parent = (int64_t *)POINTER(n[2]) + first;
        const int64_t *grade = (int64_t *)POINTER(n[1]) + first, *tokens = (int64_t *)POINTER(n[3]) + first;
        int64_t *out = (int64_t *)POINTER(n[0]) + first;
        out[0] = 0;
        depth[0] = 0;
        for (int64_t i = 0; i < nodes; i++) best[i] = 0; /* grade of a child */
        for (int64_t i = 1; i < nodes; i++)
            if (best[parent[i]] < (float)(grade[i] % LEVELS)) best[parent[i]] = (float)(grade[i] % LEVELS);
        for (int64_t i = 1; i < nodes; i++) {
            depth[i] = depth[parent[i]] + 1;
            float here = odds[((int64_t)depth[i] - 1) * batch + b] + added[tokens[parent[i]]];
            here = here < -40 ? -40 : here > 40 ? 40 : here; /* far past the ends, whatever it is */
            const int64_t level = (int64_t)floorf(SLOPE * here + MIDDLE + 0.5f), own = grade[i] % LEVELS;
            const int64_t inside = level < 0 ? 0 : level < LEVELS ? level : LEVELS - 1;
            const int64_t moved = own + (int64_t)floorf((float)(inside - (int64_t)best[parent[i]]) / 3 + 0.5f);
            out[i] = grade[i] - own + (moved < 0 ? 0 : moved < LEVELS ? moved : LEVELS - 1);
        }
    }
}

/* out [rows, 2 * size], ids, table [vocab, size], feature, its stride, weights of the token's and the feature's norm or
   zeros, positions or 0 (a token at position 0 counts as zeros), rows, size, half, whether the feature comes first;
   eps */
static void fuse(int64_t *n) {
    const int64_t *ids = POINTER(n[1]), *positions = POINTER(n[7]), size = n[9], half = n[10], bytes = size * (half ? 2 : 4);
    char *out = POINTER(n[0]), *token = out + (n[11] ? bytes : 0), *feature = out + (n[11] ? 0 : bytes);
    double eps;
    memcpy(&eps, n + 12, sizeof eps);
    for (int64_t i = 0; i < n[8]; i++, token += 2 * bytes, feature += 2 * bytes) {
        const char *known = positions && !positions[i] ? NULL : (char *)POINTER(n[2]) + ids[i] * bytes;
        fuse_row(token, known, POINTER(n[5]), size, eps, half);
        fuse_row(feature, (char *)POINTER(n[3]) + i * n[4] * (half ? 2 : 4), POINTER(n[6]), size, eps, half);
    }
}

/* -- the logits of a few candidates -------------------------------------------------------------------------------- */

#define AHEAD 3 /* rows that are fetched before they are needed: they lie anywhere */

/* out [rows, count], hidden [rows, size], weight [vocab, size], ids [rows, count], rows, count, size, half */
static void exact_logits(int64_t *n) {
    const int64_t *ids = POINTER(n[3]), all = n[4] * n[5], size = n[6], bytes = size * (n[7] ? 2 : 4);
    float *out = POINTER(n[0]);
    RELEASE_GIL
    for (int64_t i = -AHEAD; i < all; i++) {
        if (i + AHEAD < all)
            for (int64_t c = 0; c < bytes; c += 64)
                __builtin_prefetch((char *)POINTER(n[2]) + ids[i + AHEAD] * bytes + c);
        if (i < 0) continue;
        const int64_t x_at = i / n[5] * size, w_at = ids[i] * size;
        out[i] = n[7] ? dot_of(POINTER(n[1]), x_at, 1, POINTER(n[2]), w_at, 1, size)
                      : dot_of(POINTER(n[1]), x_at, 0, POINTER(n[2]), w_at, 0, size);
    }
    TAKE_GIL
}

/* behind, kept, its places, bytes of one; rows, batch, prefix_len, count; hidden or 0, its stride in bytes; nodes or 0,
   steps: of each row the queries nodes[b, 0 .. steps), or query b, go to the places of its positions from prefix_len
   on */
static void keep_unseen(int64_t *n) {
    int64_t *behind = POINTER(n[0]);
    char *kept = POINTER(n[1]);
    const int64_t places = n[2], bytes = n[3], *rows = POINTER(n[4]), *prefix = POINTER(n[6]), *count = POINTER(n[7]),
                  *nodes = POINTER(n[10]), steps = n[11];
    for (int64_t b = 0; b < n[5]; b++) {
        behind[rows[b]] += count[b];
        for (int64_t j = 0; n[8] && j < steps; j++) {
            const int64_t node = nodes ? nodes[b * steps + j] : b;
            memcpy(kept + (rows[b] * places + (prefix[b] + j) % places) * bytes, (char *)POINTER(n[8]) + node * n[9],
                   (size_t)bytes);
        }
    }
}

Function tree_functions[] = {
    {"target_inputs", target_inputs, 15},
    {"commit", commit, sizeof(Commit) / 8},
    {"first_level", first_level, 16},
    {"add", add, 11},
    {"next_level", next_level, 11},
    {"level_rows", level_rows, 15},
    {"features", features, 8},
    {"draft", draft, 15},
    {"newest", newest, 10},
    {"keep_first", keep_first, 7},
    {"line", line, 15},
    {"confident", confident, 13},
    {"take_rows", take_rows, 6},
    {"row_numbers", row_numbers, 6},
    {"fuse", fuse, 12, .doubles = 1},
    {"exact_logits", exact_logits, 8},
    {"keep_unseen", keep_unseen, 12},
    {0},
};
