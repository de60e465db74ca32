/* The n-gram drafter on the CPU: insert, confidence, build. The reference is ops/ngram/spec.py,
   whose tensors these functions share and whose terms they use.

   One thread: a row takes microseconds, less than to wake another. The GIL is kept for the same reason. Rows of the
   dummy are left alone; it has nothing to propose. */

#include "cpu.h"

#define OWN 8   /* matches kept from the row's own history */
#define WAYS 4  /* places of a bucket */
#define FOUND 8 /* places of the buckets of all hashed lengths */
#define KEPT (OWN + FOUND)
#define MOST_WINDOW 31 /* MAX_CONFIDENCE */
#define BLOCK 32       /* positions of the history that are looked at together */

/* Matches are ranked by a key, the least first: 4 * (window - length) + kind above, below it the gap or the number of
   a shared one. Kind 0 goes on where the row was copying from, 1 is any other of its own, 2 of the shared memory. */
#define LEVEL 32
#define LOW ((INT64_C(1) << LEVEL) - 1)
enum { CONTINUED, ELSEWHERE, SHARED };

#define ID ((INT64_C(1) << 22) - 1) /* of a cell: 1 + token id */
#define INSERT (INT64_C(1) << 32)   /* a table value is the number of the insert above, the cell below */
#define CELL (INSERT - 1)
enum { BASE, TAG, QUOTA, CURSOR, NEWEST, COLUMNS }; /* of the memory's row table */

#define TIE 1e-9

typedef struct {
    const int64_t *rows;
    int64_t batch;
    const int64_t *tokens;        /* of the row table */
    int64_t context, size;        /* of tokens: of a row, of all */
    int64_t *state, *log, *table; /* of the memory, as are the factors */
    const int64_t *factors;
    int64_t mask, window, image; /* image: the token that stands for one, -1: none does */
} Memory;
#define MEMORY 12 /* numbers of it */

static int64_t clamped(int64_t x, int64_t end) { return x < 0 ? 0 : x < end ? x : end - 1; }

/* First entry of the bucket of the i-th hashed length. Sums wrap around, as torch's do. */
static int64_t bucket(const Memory *m, const int64_t *cells, int64_t i) {
    uint64_t mixed = 0;
    for (int64_t k = 0; k < m->window; k++) mixed += (uint64_t)cells[k] * (uint64_t)m->factors[i * m->window + k];
    return (int64_t)(mixed >> 24) & m->mask;
}

/* -- insert: NGramMemory.insert, count <= limit ------------------------------------------------------------------ */

static void insert_row(const Memory *m, int64_t row, int64_t prefix, int64_t count, int64_t limit, int64_t ring,
                       int64_t clock) {
    int64_t *state = m->state + row * COLUMNS, cells[MOST_WINDOW];
    if (!state[QUOTA]) return;
    const int64_t first = row * m->context + prefix, place = state[NEWEST] + 2 * (state[CURSOR] != prefix);
    state[CURSOR] = prefix + count;
    state[NEWEST] = place + count;
    int64_t where = place % ring;
    for (int64_t ahead = 0; ahead < limit + 2; ahead++) { /* empty cells follow the newest token */
        const int64_t cell = m->tokens[clamped(first + ahead, m->size)] + state[TAG];
        m->log[state[BASE] + where] = ahead <= count && cell != m->image + state[TAG] ? cell : 0;
        if (ahead < count) { /* the token after this one is stored */
            for (int64_t k = 0; k < m->window; k++)
                cells[k] = m->tokens[clamped(first + ahead - m->window + 1 + k, m->size)] + state[TAG];
            const int64_t at = state[BASE] + where;
            for (int64_t i = 0; i < FOUND / WAYS; i++) {
                int64_t *entry = m->table + bucket(m, cells, i) + at % WAYS;
                *entry = *entry > clock + at ? *entry : clock + at; /* within one insert the last cell wins */
            }
        }
        if (++where == ring) where = 0;
    }
}

/* -- confidence: NGramIndex.confidence ----------------------------------------------------------------------------- */

typedef struct {
    int64_t key[KEPT];
    int64_t count;
} Best;

static void enter(Best *b, int64_t most, int64_t key) {
    int64_t i = b->count < most ? b->count++ : most - 1;
    for (; i > 0 && b->key[i - 1] > key; i--) b->key[i] = b->key[i - 1];
    b->key[i] = key;
}

/* Tokens that agree, backwards from `end` and from the newest one. */
static int64_t match_length(const int64_t *text, int64_t newest, int64_t end, int64_t window) {
    int64_t length = 0;
    while (length < window && length <= end && text[end - length] == text[newest - length]) length++;
    return length;
}

/* The OWN best matches of a row's own history, from the most recent on. Of two of one length the more recent is the
   better, so once OWN are found another one has to be longer than the worst of them: what is compared first, a block of
   positions at a time, are the newest token and the one that would make the match long enough. Before an image is
   nothing to copy. */
static void search(const int64_t *text, int64_t newest, int64_t source, int64_t window, int64_t image, Best *best) {
    const int64_t known = source < 0 ? -1 : newest - 1 - source; /* ranks before others of its length, so comes first */
    if (known >= 0 && text[known + 1] != image) {
        const int64_t length = match_length(text, newest, known, window);
        if (length) enter(best, OWN, (4 * (window - length) + CONTINUED) << LEVEL | source);
    }
    int64_t enough = 0; /* length of the worst of OWN matches */
    for (int64_t end = newest - 1; end >= enough && enough < window;) {
        const int64_t last = text[newest], early = text[newest - enough];
        int64_t stop = end - BLOCK, hit = 0;
        if (stop >= enough - 1) {
            const int64_t *p = text + stop + 1, *q = p - enough;
            for (int64_t i = 0; i < BLOCK; i++) hit |= (p[i] == last) & (q[i] == early);
            if (!hit) {
                end = stop;
                continue;
            }
        } else {
            stop = enough - 1;
        }
        for (; end > stop && end >= enough && enough < window; end--) {
            if (text[end] != last || text[end - enough] != text[newest - enough] || end == known || text[end + 1] == image)
                continue;
            const int64_t length = match_length(text, newest, end, window);
            if (length <= enough) continue;
            enter(best, OWN, (4 * (window - length) + ELSEWHERE) << LEVEL | (newest - 1 - end));
            if (best->count == OWN) enough = window - (best->key[OWN - 1] >> LEVEL) / 4;
        }
    }
}

/* NGramMemory.lookup: enters what it finds. places [FOUND]: cell of the last token of each match. */
static void lookup(const Memory *m, const int64_t *text, int64_t newest, int64_t tag, int64_t *places, Best *best) {
    int64_t cells[MOST_WINDOW];
    for (int64_t k = 0; k < m->window; k++) {
        const int64_t at = newest - m->window + 1 + k;
        cells[k] = text[at < 0 ? 0 : at] + tag;
    }
    for (int64_t i = 0; i < FOUND / WAYS; i++) {
        const int64_t *entries = m->table + bucket(m, cells, i);
        for (int64_t j = 0; j < WAYS; j++) places[i * WAYS + j] = entries[j] & CELL;
    }
    for (int64_t j = 0; j < FOUND; j++) {
        const int64_t *place = m->log + places[j];
        if (!places[j] || !place[1]) continue; /* never used, or overwritten by the end of another stretch */
        int64_t length = 0;
        while (length < m->window && place[-length] == cells[m->window - 1 - length]) length++;
        if (length) enter(best, KEPT, (4 * (m->window - length) + SHARED) << LEVEL | j);
    }
}

/* What follows a match: of the row's own the text after it up to an image, which repeats itself where it runs into the
   newest token; of a shared one the log up to the end of the stretch. Then -1. */
static void copy_own(const int64_t *text, int64_t newest, int64_t gap, int64_t image, int64_t branch, int64_t *to) {
    const int64_t *from = text + newest - gap;
    int64_t d = 0;
    for (int64_t step = 0; d < branch && from[step] != image; d++, step = step == gap ? 0 : step + 1)
        to[d * KEPT] = from[step];
    for (; d < branch; d++) to[d * KEPT] = -1;
}
static void copy_shared(const int64_t *place, int64_t branch, int64_t *to) {
    int64_t d = 0, id;
    for (; d < branch && (id = place[1 + d] & ID); d++) to[d * KEPT] = id - 1;
    for (; d < branch; d++) to[d * KEPT] = -1;
}

/* newest: position of the row's; the table's rows of candidates [branch, KEPT], match [KEPT] and gap. Past the last
   match, candidates stay as they are: their match is 0. Returns the confidence. */
static int64_t confidence_row(const Memory *m, int64_t row, int64_t newest, int64_t branch, int64_t min_window,
                              int64_t steady, int64_t max_confidence, int64_t *candidates, int64_t *match,
                              int64_t *gap) {
    const int64_t *state = m->state + row * COLUMNS, *text = m->tokens + row * m->context;
    if (!state[QUOTA]) return 0;
    Best best = {.count = 0};
    int64_t places[FOUND], confidence = 0;
    search(text, newest, *gap, m->window, m->image, &best);
    if (best.count && best.key[0] >> LEVEL < 4 * (m->window - steady) + SHARED) *gap = best.key[0] & LOW;
    lookup(m, text, newest, state[TAG], places, &best);
    for (int64_t r = 0; r < best.count; r++) {
        const int64_t level = best.key[r] >> LEVEL, low = best.key[r] & LOW, length = m->window - level / 4;
        if (level % 4 == SHARED) copy_shared(m->log + places[low], branch, candidates + r);
        else copy_own(text, newest, low, m->image, branch, candidates + r);
        match[r] = length >= min_window ? length : 0;
        if (!r && match[r]) confidence = least(level % 4 == CONTINUED ? length + m->window : length, max_confidence);
    }
    for (int64_t r = best.count; r < KEPT; r++) match[r] = 0;
    return confidence;
}

/* -- build: TreeBuilder.build ------------------------------------------------------------------------------------- */

typedef struct {
    const int64_t *candidates, *match; /* of a row: [depth, KEPT], [KEPT] */
    const double *weight;              /* [matches, matches, KEPT, branch] */
    int64_t matches, branch, depth, nodes, last;
    double *key;                      /* [nodes] of the best nodes, best first */
    int64_t *best;                    /* [nodes] their numbers, d * KEPT + c */
    int64_t (*owner)[KEPT];           /* [depth] first candidate with the same prefix, leads its node */
    int64_t (*place)[KEPT];           /* [depth] in the tree, 0 = not there */
    int64_t *tokens, *parent, *grade; /* of a row: [nodes] */
    uint8_t *alive;
} Build;

/* The owners and scores of level d, from the owners above. live: candidates that have not ended, by their number. */
static void level(const Build *b, int64_t d, const int64_t *live, int64_t count, double *score) {
    const int64_t *token = b->candidates + d * KEPT;
    for (int64_t i = 0; i < count; i++) {
        const int64_t c = live[i];
        int64_t j = 0;
        while (token[live[j]] != token[c] || (d && b->owner[d - 1][live[j]] != b->owner[d - 1][c])) j++;
        const int64_t owner = b->owner[d][c] = live[j];
        if (owner == c) score[c] = 0;
        score[owner] += b->weight[((b->match[0] * b->matches + b->match[c]) * KEPT + c) * b->branch + d];
    }
}

/* Of a node that candidate `rank` leads, as in ops/ngram/spec.py. */
static int64_t grade_of(int64_t rank, int64_t match) {
    const int64_t most = rank ? 3 : LEVELS - 1, level = rank ? match / 3 : match + 3;
    return LEVELS * LOOKUP + (level < most ? level : most);
}

static void build_row(const Build *b) {
    int64_t live[KEPT], count = 0, chosen = 0, levels = 0;
    double score[KEPT];
    while (count < KEPT && b->match[count] > 0) live[count] = count, count++;
    for (int64_t d = 0, entered = 1; d < b->depth && entered; d++) { /* no node is better than the one above it */
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++)
            if (b->candidates[d * KEPT + live[i]] >= 0) live[left++] = live[i];
        count = left;
        level(b, d, live, count, score);
        entered = 0;
        memset(b->place[d], 0, sizeof b->place[d]);
        levels = d + 1;
        for (int64_t i = 0; i < count; i++) {
            const int64_t c = live[i], number = d * KEPT + c;
            if (b->owner[d][c] != c) continue;
            const double key = score[c] - (double)number * TIE;
            if (!(key > 0) || (chosen == b->nodes - 1 && !(key > b->key[chosen - 1]))) continue;
            int64_t at = chosen < b->nodes - 1 ? chosen++ : chosen - 1;
            for (; at > 0 && b->key[at - 1] < key; at--) b->key[at] = b->key[at - 1], b->best[at] = b->best[at - 1];
            b->key[at] = key, b->best[at] = number;
            entered = 1;
        }
    }
    for (int64_t i = 0; i < chosen; i++) b->place[b->best[i] / KEPT][b->best[i] % KEPT] = 1;
    int64_t node = 1;
    for (int64_t d = 0; d < levels; d++)
        for (int64_t c = 0; c < KEPT; c++) {
            if (!b->place[d][c]) continue;
            b->place[d][c] = node;
            b->tokens[node] = b->candidates[d * KEPT + c];
            b->grade[node] = grade_of(c, b->match[c]);
            b->parent[node++] = d ? b->place[d - 1][b->owner[d - 1][c]] : 0;
        }
    for (int64_t i = 0; i < b->nodes; i++) {
        b->alive[i] = i < node;
        if (i == 0 || i >= node) b->tokens[i] = b->last, b->parent[i] = b->grade[i] = 0;
    }
}

/* -- the module; ops/ngram/cpu.py knows the tensors ------------------------------------------------------------- */

/* memory; prefix_len, count, limit, cells of a ring, clock */
static void insert(int64_t *n) {
    const Memory m = *(const Memory *)n;
    const int64_t *prefix = POINTER(n[12]), *count = POINTER(n[13]);
    int64_t *clock = POINTER(n[16]);
    *clock += INSERT;
    for (int64_t b = 0; b < m.batch; b++) insert_row(&m, m.rows[b], prefix[b], count[b], n[14], n[15], *clock);
}

/* memory; kv_len, candidates, match, gap, branch, min_window, steady, max_confidence, out, its stride */
static void ngram_confidence(int64_t *n) {
    const Memory m = *(const Memory *)n;
    const int64_t *kv_len = POINTER(n[12]);
    int64_t *candidates = POINTER(n[13]), *match = POINTER(n[14]), *gap = POINTER(n[15]), *out = POINTER(n[20]);
    for (int64_t b = 0; b < m.batch; b++) {
        const int64_t row = m.rows[b];
        out[b * n[21]] = confidence_row(&m, row, kv_len[row], n[16], n[17], n[18], n[19], candidates + row * n[16] * KEPT,
                                        match + row * KEPT, gap + row);
    }
}

/* rows, B, candidates, match, last, weight, matches, branch, depth, nodes, tokens, parent, alive, grade. depth is above
   0 and nodes above 1 */
static void build(int64_t *n) {
    const int64_t *rows = POINTER(n[0]), *candidates = POINTER(n[2]), *match = POINTER(n[3]), *last = POINTER(n[4]);
    int64_t *tokens = POINTER(n[10]), *parent = POINTER(n[11]), *grade = POINTER(n[13]);
    uint8_t *alive = POINTER(n[12]);
    Build b = {.weight = POINTER(n[5]), .matches = n[6], .branch = n[7], .depth = n[8], .nodes = n[9]};
    const size_t levels = (size_t)b.depth * sizeof *b.owner, best = (size_t)b.nodes * 8;
    char *scratch = PyMem_Malloc(2 * levels + 2 * best);
    if (!scratch) return (void)PyErr_NoMemory();
    b.owner = (void *)scratch, b.place = (void *)(scratch + levels);
    b.key = (void *)(scratch + 2 * levels), b.best = (void *)(scratch + 2 * levels + best);
    for (int64_t i = 0; i < n[1]; i++) {
        b.candidates = candidates + rows[i] * b.branch * KEPT, b.match = match + rows[i] * KEPT, b.last = last[rows[i]];
        b.tokens = tokens + i * b.nodes, b.parent = parent + i * b.nodes, b.alive = alive + i * b.nodes;
        b.grade = grade + i * b.nodes;
        build_row(&b);
    }
    PyMem_Free(scratch);
}

Function ngram_functions[] = {
    {"ngram_insert", insert, MEMORY + 5},
    {"ngram_confidence", ngram_confidence, MEMORY + 10},
    {"ngram_build", build, 14},
    {0},
};
