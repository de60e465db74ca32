/* The suffix drafter on the CPU: insert, grow, emit. The reference is ops/suffix/spec.py, whose tensors these
   functions share and whose terms they use.

   One thread, and the GIL is kept: a row takes microseconds. What takes time is the memory of the table, so buckets are
   fetched before they are needed. */

#include "cpu.h"

#define WAYS 8
#define TOKEN_BITS 22
#define NAME_BITS 53
#define TOKEN ((INT64_C(1) << TOKEN_BITS) - 1)
#define CHECK ((INT64_C(1) << (NAME_BITS - TOKEN_BITS)) - 1)
#define NAME ((INT64_C(1) << NAME_BITS) - 1)
#define MOST ((INT64_C(1) << (63 - NAME_BITS)) - 1)
#define BASE UINT64_C(0x9E3779B97F4A7C15)
#define FIRST UINT64_C(0xBF58476D1CE4E5B9)
#define SECOND UINT64_C(0x94D049BB133111EB)
#define WIDTH 32 /* tokens of the longest context, at most */
#define MOST_LENGTHS 11
#define BACK 3                  /* contexts that a node's children come from */
#define AHEAD 4                 /* tokens whose buckets are fetched early */
#define GRADE (LOOKUP * LEVELS) /* of a node of level 0 */
#define SCORE_BITS 12

typedef struct {
    const int64_t *tokens;
    int64_t context; /* tokens of a row */
    const int64_t *owner, *lengths;
    int64_t count; /* of lengths */
    int64_t *table;
    int64_t buckets, rows; /* of each length; without the dummy */
    int64_t image;         /* the token that stands for one, which follows nothing; -1: none does */
} Trie;

typedef struct {
    int64_t *ways, check;
} Bucket;

/* First way of the bucket of a context, and the check of its ways. */
INLINE int64_t *bucket_of(const Trie *t, int64_t length, uint64_t key, int64_t *check) {
    key *= FIRST;
    key = (key ^ (key >> 32)) * SECOND;
    key ^= key >> 29;
    *check = (int64_t)key & CHECK;
    return t->table +
           (length * t->buckets + (int64_t)(key >> (NAME_BITS - TOKEN_BITS) & (uint64_t)(t->buckets - 1))) * WAYS;
}

/* -- insert: SuffixIndex.insert -------------------------------------------------------------------------------------- */

/* The token moves to the front; what followed the context instead counts half. */
static void learn(const Bucket *bucket, int64_t token) {
    const int64_t check = bucket->check, name = check << TOKEN_BITS | token;
    int64_t *ways = bucket->ways, at = 0, count = 1;
    while (at < WAYS - 1 && (ways[at] & NAME) != name) at++;
    if ((ways[at] & NAME) == name) count = least((ways[at] >> NAME_BITS) + 1, MOST);
    for (; at; at--) ways[at] = ways[at - 1];
    for (int64_t i = 1; i < WAYS; i++)
        if ((ways[i] >> TOKEN_BITS & CHECK) == check)
            ways[i] = ((ways[i] >> NAME_BITS) + 1) / 2 << NAME_BITS | (ways[i] & NAME);
    ways[0] = count << NAME_BITS | name;
}

/* The contexts of one length that end before a token, of a row's own text and of its salt. */
typedef struct {
    uint64_t hash, oldest;     /* oldest: BASE ^ (length - 1), the factor of its first token */
    Bucket next[AHEAD + 1][2]; /* by token, in turn */
} Window;

static void insert_row(const Trie *t, int64_t row, int64_t prefix, int64_t count, int64_t shared, Window *windows) {
    const int64_t *text = t->tokens + row * t->context, *owner = t->owner + 2 * row;
    const int64_t end = least(prefix + 1 + count, t->context);
    for (int64_t w = 0; w < t->count; w++) {
        Window *window = windows + w;
        uint64_t factor = 1, hash = 0;
        for (int64_t k = 0; k < t->lengths[w]; k++, factor *= BASE) {
            window->oldest = factor;
            if (prefix - k >= 0) hash += (uint64_t)(text[prefix - k] + 1) * factor;
        }
        window->hash = hash; /* of the context that ends at `prefix` */
    }
    for (int64_t at = prefix + 1; at < end + AHEAD; at++) { /* at: whose buckets are fetched; `now` is AHEAD behind */
        for (int64_t w = 0; w < t->count && at < end; w++) {
            Window *window = windows + w;
            const int64_t gone = at - t->lengths[w];
            for (int64_t s = 0; s <= shared && gone >= 0; s++) {
                Bucket *bucket = &window->next[at % (AHEAD + 1)][s];
                bucket->ways = bucket_of(t, w, window->hash + (uint64_t)owner[s], &bucket->check);
                __builtin_prefetch(bucket->ways, 1, 2);
            }
            const uint64_t first = gone < 0 ? 0 : (uint64_t)(text[gone] + 1);
            window->hash = (window->hash - first * window->oldest) * BASE + (uint64_t)(text[at] + 1);
        }
        const int64_t now = at - AHEAD;
        if (now <= prefix || now >= end || text[now] == t->image) continue;
        for (int64_t w = 0; w < t->count && t->lengths[w] <= now; w++)
            for (int64_t s = 0; s <= shared; s++) learn(&windows[w].next[now % (AHEAD + 1)][s], text[now]);
    }
}

/* -- grow: SuffixIndex.confidence ------------------------------------------------------------------------------------ */

typedef struct {
    float path;
    int64_t token, parent, grade;
} Child;

typedef struct {
    int64_t context[WIDTH]; /* ids + 1, the newest last */
    int64_t depth, reach;   /* reach: lengths that may be tried for what follows its children */
    float path;
} Node;

typedef struct {
    const float *escape, *starts;
    int64_t depth, nodes, width;
    float min_prob;
    Node *node;      /* [nodes] */
    Child *children; /* [nodes * WAYS], the best first, of equals the first that came; `waiting` of them */
    int64_t waiting;
} Growth;

/* What follows a node waits, in its order. No more can be chosen than nodes are missing. */
static void wait_for(Growth *g, const Child *child, int64_t missing) {
    if (missing <= 0) return;
    if (g->waiting >= missing) {
        g->waiting = missing;
        if (!(child->path > g->children[missing - 1].path)) return;
        g->waiting--;
    }
    int64_t at = g->waiting++;
    for (; at > 0 && g->children[at - 1].path < child->path; at--) g->children[at] = g->children[at - 1];
    g->children[at] = *child;
}

/* What is known of the contexts that end with a node: the longest first, of two of one length the row's own. */
typedef struct {
    uint64_t hashes[MOST_LENGTHS];
    int64_t pair, check; /* pair: 2 * length + 1 for the row's own; of the bucket that was found last */
} Search;

static Search search_from(const Trie *t, const Growth *g, const int64_t *owner, int64_t behind, int64_t most,
                          const Node *node) {
    Search s;
    uint64_t hash = 0, factor = 1;
    int64_t lengths = 0;
    for (int64_t k = 0; lengths < most && t->lengths[lengths] <= behind;) {
        hash += (uint64_t)node->context[g->width - 1 - k] * factor;
        factor *= BASE;
        if (++k < t->lengths[lengths]) continue;
        for (int64_t i = 0; i < 2; i++) { /* all that may be looked at; each is a line somewhere else */
            int64_t check;
            __builtin_prefetch(bucket_of(t, lengths, hash + (uint64_t)owner[i], &check), 0, 2);
        }
        s.hashes[lengths++] = hash;
    }
    s.pair = 2 * lengths;
    return s;
}

static const int64_t *next_known(const Trie *t, const int64_t *owner, Search *s) {
    while (--s->pair >= 0) {
        const int64_t length = s->pair / 2;
        const int64_t *ways = bucket_of(t, length, s->hashes[length] + (uint64_t)owner[!(s->pair % 2)], &s->check);
        for (int64_t i = 0; i < WAYS; i++)
            if (ways[i] > 0 && (ways[i] >> TOKEN_BITS & CHECK) == s->check) return ways;
    }
    return NULL;
}

/* The tokens of a bucket that are not among the `count` seen; returns the sum of what they counted. */
static float unseen(const int64_t *ways, int64_t check, const int64_t *seen, int64_t count, uint8_t *fresh,
                    int64_t *tokens) {
    float total = 0;
    *tokens = 0;
    for (int64_t i = 0; i < WAYS; i++) {
        fresh[i] = ways[i] > 0 && (ways[i] >> TOKEN_BITS & CHECK) == check;
        for (int64_t j = 0; j < count && fresh[i]; j++) fresh[i] = seen[j] != (ways[i] & TOKEN);
        if (fresh[i]) total += (float)(ways[i] >> NAME_BITS), ++*tokens;
    }
    return total;
}

static void open_node(const Trie *t, Growth *g, const int64_t *owner, int64_t behind, int64_t most, int64_t n) {
    Node *node = g->node + n;
    if (node->depth >= g->depth) return;
    Search search = search_from(t, g, owner, behind + node->depth, most, node);
    int64_t seen[BACK * WAYS], count = 0;
    float left = 1; /* of the probability, for what the contexts so far have not seen */
    for (int64_t b = 0; b < BACK && node->path * left >= g->min_prob; b++) {
        const int64_t *ways = next_known(t, owner, &search);
        if (!ways) return;
        uint8_t fresh[WAYS];
        int64_t tokens;
        if (!b) node->reach = search.pair / 2 + 2 < t->count ? search.pair / 2 + 2 : t->count;
        const float sum = unseen(ways, search.check, seen, count, fresh, &tokens);
        const float escape = g->escape[(search.pair ^ 1) * (WAYS + 1) + tokens], total = sum + escape;
        if (!tokens) continue;
        for (int64_t i = 0; i < WAYS; i++) {
            if (!fresh[i]) continue;
            const float single = left * ((float)(ways[i] >> NAME_BITS) / total);
            Child child = {node->path * single, ways[i] & TOKEN, n, GRADE};
            seen[count++] = child.token;
            if (!(child.path >= g->min_prob)) continue;
            while (child.grade < GRADE + LEVELS - 1 && single >= g->starts[child.grade - GRADE]) child.grade++;
            wait_for(g, &child, g->nodes - 1 - n);
        }
        left *= escape / total;
    }
}

/* total: probabilities of the nodes; found: whether there is any. */
INLINE int64_t confidence_of(int64_t total, int64_t found, int64_t max_confidence) {
    const int64_t score = (total + (1 << (SCORE_BITS - 1))) >> SCORE_BITS;
    return score < found ? found : score < max_confidence ? score : max_confidence;
}

/* Writes the row's token, parent, depth and grade, which lie `pitch` apart; returns the confidence. *whole: whether all
   of the tree is wanted; else it grows no further than to where no more nodes could change the confidence, for most
   trees are never proposed. Says whether it is the whole tree then. */
static int64_t grow_row(const Trie *t, Growth *g, int64_t row, int64_t newest, int64_t max_confidence, int64_t *grown,
                        int64_t pitch, int64_t *whole) {
    const int64_t wanted = *whole;
    *whole = 1;
    const int64_t *text = t->tokens + row * t->context, *owner = t->owner + 2 * row, behind = newest + 1;
    for (int64_t i = 0; i < 4; i++) memset(grown + i * pitch, 0, (size_t)g->nodes * sizeof *grown);
    if (row >= t->rows) return 0;
    g->waiting = 0;
    g->node[0].depth = 0, g->node[0].path = 1;
    for (int64_t k = 0; k < g->width; k++)
        g->node[0].context[g->width - 1 - k] = text[newest - k < 0 ? 0 : newest - k] + 1;
    open_node(t, g, owner, behind, t->count, 0);
    const int64_t found = g->waiting > 0;
    int64_t total = 0;
    for (int64_t n = 1; n < g->nodes && g->waiting; n++) {
        const Child child = g->children[0];
        const int64_t most = total + (g->nodes - n) * (int64_t)(child.path * (1 << SCORE_BITS)); /* none is better */
        if (!wanted &&
            confidence_of(total, found, max_confidence) == confidence_of(most, found, max_confidence)) {
            *whole = 0;
            break;
        }
        memmove(g->children, g->children + 1, (size_t)--g->waiting * sizeof child);
        const Node *parent = g->node + child.parent;
        Node *node = g->node + n;
        memcpy(node->context, parent->context + 1, (size_t)(g->width - 1) * sizeof *node->context);
        node->context[g->width - 1] = child.token + 1;
        node->depth = parent->depth + 1, node->path = child.path;
        grown[n] = child.token, grown[pitch + n] = child.parent;
        grown[2 * pitch + n] = node->depth, grown[3 * pitch + n] = child.grade;
        total += (int64_t)(child.path * (1 << SCORE_BITS));
        open_node(t, g, owner, behind, parent->reach, n);
    }
    return confidence_of(total, found, max_confidence);
}

/* -- emit: SuffixIndex.emit ------------------------------------------------------------------------------------------ */

/* grown: of a row, as above, with `kept` nodes; place [kept]: of each in the draft. */
static void emit_row(const int64_t *grown, int64_t pitch, int64_t kept, int64_t depth, int64_t nodes, int64_t last,
                     int64_t *place, int64_t *tokens, int64_t *parent, uint8_t *alive, int64_t *grade) {
    int64_t found = 1;
    place[0] = 0;
    for (int64_t n = 1; n < kept && found < nodes && grown[2 * pitch + n] > 0; n++) {
        place[n] = 0;
        if (grown[2 * pitch + n] > depth) continue;
        place[n] = found;
        tokens[found] = grown[n], parent[found] = place[grown[pitch + n]], alive[found] = 1;
        grade[found] = grown[3 * pitch + n];
        found++;
    }
    for (int64_t n = 0; n < nodes; n++)
        if (!n || n >= found) { tokens[n] = last, parent[n] = grade[n] = 0, alive[n] = !n; }
}

/* -- the module; ops/suffix/cpu.py knows the tensors ----------------------------------------------------------------- */

#define TRIE 9 /* numbers of a `Trie` */

/* trie; rows, B, prefix_len, count, shared */
static void insert(int64_t *n) {
    const Trie t = *(const Trie *)n;
    const int64_t *rows = POINTER(n[TRIE]), *prefix = POINTER(n[TRIE + 2]), *count = POINTER(n[TRIE + 3]);
    Window windows[MOST_LENGTHS];
    for (int64_t b = 0; b < n[TRIE + 1]; b++)
        if (rows[b] < t.rows) insert_row(&t, rows[b], prefix[b], count[b], n[TRIE + 4], windows);
}

/* trie; rows, B, kv_len, escape, starts, depth, nodes, width, address of min_prob, most confidence, grown, whole, out, its
   stride. Without `out` it grows those trees whole that are not. */
static void grow(int64_t *n) {
    const Trie t = *(const Trie *)n;
    const int64_t *m = n + TRIE, *rows = POINTER(m[0]), *kv_len = POINTER(m[2]);
    Growth g = {.escape = POINTER(m[3]),
                .starts = POINTER(m[4]),
                .depth = m[5],
                .nodes = m[6],
                .width = m[7],
                .min_prob = *(const float *)POINTER(m[8])};
    const size_t nodes = (size_t)g.nodes * sizeof *g.node;
    char *scratch = PyMem_Malloc(nodes + (size_t)(g.nodes + 1) * sizeof *g.children);
    if (!scratch) return (void)PyErr_NoMemory();
    g.node = (void *)scratch, g.children = (void *)(scratch + nodes);
    int64_t *grown = POINTER(m[10]), *whole = POINTER(m[11]), *out = POINTER(m[12]);
    const int64_t pitch = (t.rows + 1) * g.nodes;
    for (int64_t b = 0; b < m[1]; b++) {
        const int64_t row = rows[b];
        if (!out && whole[row]) continue;
        whole[row] = !out;
        const int64_t confidence = grow_row(&t, &g, row, kv_len[row], m[9], grown + row * g.nodes, pitch, whole + row);
        if (out) out[b * m[13]] = confidence;
    }
    PyMem_Free(scratch);
}

/* rows, B, grown, rows of it, nodes of it, last, depth, nodes, tokens, parent, alive, grade. depth is above 0
   and nodes above 1 */
static void emit(int64_t *n) {
    const int64_t *rows = POINTER(n[0]), *grown = POINTER(n[2]), *last = POINTER(n[5]), kept = n[4], nodes = n[7];
    int64_t *tokens = POINTER(n[8]), *parent = POINTER(n[9]), *grade = POINTER(n[11]);
    uint8_t *alive = POINTER(n[10]);
    int64_t *place = PyMem_Malloc((size_t)kept * sizeof *place);
    if (!place) return (void)PyErr_NoMemory();
    for (int64_t b = 0; b < n[1]; b++)
        emit_row(grown + rows[b] * kept, n[3] * kept, kept, n[6], nodes, last[rows[b]], place, tokens + b * nodes,
                 parent + b * nodes, alive + b * nodes, grade + b * nodes);
    PyMem_Free(place);
}

Function suffix_functions[] = {
    {"suffix_insert", insert, TRIE + 5},
    {"suffix_grow", grow, TRIE + 14},
    {"suffix_emit", emit, 12},
    {0},
};
