/* Gated delta nets over chunks and trees. The reference is ops/delta_net/spec.py; what states and records are is in
   kv/pool.py.

   A token's bits are those of the plain recurrence over its ancestors. Of a value head, with S [key_dim, value_dim] as
   the token before left it: d = beta (v - g S^T k); o = g S^T q + (q k) d; S <- g S + k d^T. Each column of S is summed
   by itself, in the order of key_dim, with products that are fused with the sums: so neither vectors nor threads nor
   the tokens around it change them. Where no token goes on from an S, it is not made: at the leaves of a tree.

   Of a state-space layer d = dt v, and o gets D v besides; what norms it is `ssm_norm`, for a norm is over all heads of
   a group.

   Where each channel of the key has its g, keys and queries are multiplied with it before they meet S: the sums over S
   are those above with g k and g q for k and q, and 1 for g; only S itself goes on by g of its row.

   A unit of work is some value heads of one key head. It takes the tokens of a tree, or some of a chunk, in an order in
   which mostly each follows the one before: S is then written, and summed for the next token, in one go. It does so for
   as many columns as registers have room for, whose S stays in the first cache. A thread runs its units one after the
   other, and of a chunk so many tokens at a time that their inputs are in its cache for all of them.

   A state is read from memory once in a step, and written there once, past the caches: else its lines would be read
   before they are written. Tokens that go on from it have it in a buffer. */

#include "cpu.h"

#define MOST_TAPS 8
#define AT_ONCE 64 /* tokens of a chunk that are made ready together */
#define WIDE 4     /* registers of columns at a time */
#define COLUMNS (WIDE * PART)
#define AHEAD 6                   /* tokens whose inputs are fetched meanwhile */
#define ROW_LINES 2               /* of the state that is needed next, fetched with a row of this one */
#define FIRST_LINES 1024          /* of a thread's first state, which nothing is there to be fetched with */
#define UNIT_EPS 1e-6f            /* as L2_EPS */
enum { READ = -1, NOWHERE = -2 }; /* where a state is, beside the buffers 0, 1, .. */
enum { KEEP = 1, WRITE = 2 };     /* where a new one goes: to a buffer, to memory, or both */
enum { KEYS = 1, QUERIES = 2 };   /* what sums over a state are with */
enum { SPACE, DELTA, CHANNELS };  /* kinds: a state-space layer, one g of a head, or of each channel of the key */

typedef struct {
    const void *taps[MOST_TAPS]; /* what went into the convolution, of this token the last */
    int64_t query;               /* of the batch, or -1: run again */
    float *gates;                /* its record, or NULL: read where it is run again, else written */
    char *input;                 /* the rest of a record that is written */
    int64_t from, to;            /* the state before it, and the buffer that the one after it goes to, or NOWHERE */
    int64_t writes;              /* whether that is the row's next state, and goes to memory, too */
    int64_t save;                /* another state slot that this goes to, or -1 */
} Token;

/* Up to the batch, what `delta_scratch` is given, and up to eps `delta_net`. */
typedef struct {
    int64_t key_heads, value_heads, key_dim, value_dim, width, tiled; /* width: of the convolution */
    int64_t corrects;           /* what beta is below, 0: nothing is corrected */
    int64_t by_channel;         /* whether g is of channels */
    int64_t nodes, group, half; /* group: value heads of a unit, of one key head */
    Workers *workers;
    Batch batch;
    const int64_t *slots;
    const int64_t *saves; /* of each chunk where its pairs of (tokens, state slot) begin, where the last ones end; these */
    void *out;
    const void *qkv, *z, *b, *a;
    int64_t qkv_stride, z_stride, b_stride, a_stride;
    const float *conv; /* [width, channels] */
    const float *decay, *dt_bias, *norm, *conv_bias, *skip;
    float *state;
    char *windows, *inputs; /* `LayerStates.conv` and `.inputs` */
    float *gates;
    const int64_t *read, *write, *page, *length;
    int64_t *node_slots;
    char *scratch;
    int64_t scratch_size, queries; /* scratch_size: of a thread */
    double floor, eps;             /* floor: of log decays by sigmoids, below 0; 0: they are made by softplus */
    int64_t channels, bytes, pieces, next, worker; /* bytes: of an input; pieces: of an item's units */
    int64_t decays, record;                        /* how many g a head has, and a record */
} Net;

/* What a thread computes on its way; of tokens in the order in which they run. */
typedef struct {
    Token *tokens;
    int64_t *parent, *child, *sibling, *place, *at; /* of a tree's queries; at: by node */
    float *q, *k, *v, *o, *g, *beta, *dot, *buffers;
    float *gq, *gk; /* of a head: queries and keys by g, which is of channels */
    int64_t end;    /* bytes */
} Spare;

INLINE int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }
INLINE char *piece(char **at, int64_t bytes) {
    char *here = *at;
    *at += lines(bytes);
    return here;
}
static int64_t most_tokens(const Net *j) { return j->batch.spans ? AT_ONCE : j->batch.nodes + j->nodes; }
static Spare spare_of(const Net *j, char *memory) {
    const int64_t most = round_up(most_tokens(j), LANES), queries = j->batch.spans ? 0 : j->batch.nodes;
    const int64_t dk = j->key_dim, dv = j->value_dim, group = j->group;
    const int64_t levels = j->batch.spans ? 0 : dk * COLUMNS * j->batch.depth;
    const int64_t heads = (j->value_heads / group + j->pieces - 1) / j->pieces * group, whole = heads * dk * dv;
    char *at = memory;
    Spare s;
    s.tokens = (Token *)piece(&at, most * (int64_t)sizeof(Token));
    s.parent = (int64_t *)piece(&at, queries * 8);
    s.child = (int64_t *)piece(&at, queries * 8);
    s.sibling = (int64_t *)piece(&at, queries * 8);
    s.place = (int64_t *)piece(&at, queries * 8);
    s.at = (int64_t *)piece(&at, j->nodes * 8);
    s.q = (float *)piece(&at, most * dk * 4);
    s.k = (float *)piece(&at, most * dk * 4);
    s.v = (float *)piece(&at, most * group * dv * 4);
    s.o = (float *)piece(&at, most * dv * 4);
    s.g = (float *)piece(&at, most * j->decays * 4);
    s.gq = j->by_channel ? (float *)piece(&at, most * dk * 4) : s.q;
    s.gk = j->by_channel ? (float *)piece(&at, most * dk * 4) : s.k;
    s.beta = (float *)piece(&at, most * 4);
    s.dot = (float *)piece(&at, most * 4);
    s.buffers = (float *)piece(&at, (levels > whole ? levels : whole) * 4);
    s.end = at - memory;
    return s;
}

/* -- which tokens, and where their states are ---------------------------------------------------------------------- */

static void follow(const Net *j, Token *token, const void *const *taps, const void *input) {
    for (int64_t t = 0; t + 1 < j->width; t++) token->taps[t] = taps[t + 1];
    token->taps[j->width - 1] = input;
}
static void first_taps(const Net *j, int64_t slot, const void **taps) {
    for (int64_t t = 1; t < j->width; t++)
        taps[t] = j->windows + (slot * (j->width - 1) + t - 1) * j->channels * j->bytes;
}
INLINE const void *input_of(const Net *j, int64_t query) {
    return (const char *)j->qkv + query * j->qkv_stride * j->bytes;
}

/* The tokens that a row's tree accepted since its state was written, by their records. */
static int64_t run_again(const Net *j, const Spare *s, int64_t row, int64_t prefix) {
    const int64_t page = row * 2 + 1 - j->page[row], length = j->length[row], *slots = j->node_slots + page * j->nodes;
    const int64_t count = least(most(prefix - length, 0), j->nodes); /* no more: of a row that nobody reads */
    const void *first[MOST_TAPS];
    first_taps(j, j->read[row], first);
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = j->batch.table[row * j->batch.table_stride + length + i];
        int64_t node = 0;
        while (node + 1 < j->nodes && slots[node] != slot) node++;
        const int64_t record = page * j->nodes + node;
        s->tokens[i] = (Token){.query = -1, .from = i ? 0 : READ, .to = 0, .save = -1};
        s->tokens[i].gates = j->gates + record * j->record;
        follow(j, &s->tokens[i], i ? s->tokens[i - 1].taps : first, j->inputs + record * j->channels * j->bytes);
    }
    return count;
}

/* Children of each query as lists: those without children first. */
static void find_children(const Spare *s, int64_t n) {
    for (int64_t q = 0; q < n; q++) s->child[q] = -1;
    for (int64_t q = 1; q < n; q++)
        if (s->parent[q] >= 0) s->child[s->parent[q]] = q; /* that it has some */
    for (int64_t q = 0; q < n; q++) s->place[q] = s->child[q];
    for (int64_t q = 0; q < n; q++) s->child[q] = -1;
    for (int leaves = 0; leaves < 2; leaves++)
        for (int64_t q = n - 1; q >= 0; q--)
            if (s->parent[q] >= 0 && (s->place[q] < 0) == leaves) {
                s->sibling[q] = s->child[s->parent[q]];
                s->child[s->parent[q]] = q;
            }
}

INLINE int64_t node_of(const Net *j, int64_t query) {
    return j->batch.path[query * j->batch.depth + j->batch.path_len[query] - 1];
}

/* A tree's tokens: those to run again, and each node after its parent. */
static int64_t tree_tokens(const Net *j, const Spare *s, int64_t tree) {
    const Item item = item_of(&j->batch, tree);
    const int64_t row = item.row, page = row * 2 + j->page[row], offset = item.first, n = item.queries;
    if (n <= 0) return 0;
    int64_t count = run_again(j, s, row, j->batch.prefix[tree]);
    for (int64_t q = 0; q < n; q++) {
        const int64_t *path = j->batch.path + (offset + q) * j->batch.depth, above = j->batch.path_len[offset + q] - 2;
        s->at[path[above + 1]] = q;
        s->parent[q] = above < 0 ? -1 : s->at[path[above]];
        s->sibling[q] = -1;
    }
    find_children(s, n);
    const void *first[MOST_TAPS];
    first_taps(j, j->read[row], first);
    for (int64_t q = 0; q >= 0;) {
        Token *token = &s->tokens[count];
        const int64_t parent = s->parent[q], record = page * j->nodes + node_of(j, offset + q);
        *token = (Token){.query = offset + q, .from = count ? 0 : READ, .writes = parent < 0, .save = -1};
        token->gates = j->gates + record * j->record;
        token->input = j->inputs + record * j->channels * j->bytes;
        const void *const *taps = count ? s->tokens[count - 1].taps : first;
        if (parent >= 0) {
            taps = s->tokens[s->place[parent]].taps;
            token->from = s->tokens[s->place[parent]].to;
            token->to = token->from + (s->sibling[q] >= 0); /* the last that goes on from it does so in its place */
        }
        if (s->child[q] < 0) token->to = NOWHERE;
        follow(j, token, taps, input_of(j, offset + q));
        s->place[q] = count++;
        if (s->child[q] >= 0) q = s->child[q];
        else {
            while (q >= 0 && s->sibling[q] < 0) q = s->parent[q];
            if (q >= 0) q = s->sibling[q];
        }
    }
    return count;
}

/* Tokens [done, done + AT_ONCE) of a chunk. */
static int64_t chunk_tokens(const Net *j, const Spare *s, int64_t chunk, int64_t done) {
    const Item item = item_of(&j->batch, chunk);
    const int64_t *span = item.span, row = item.row, last = span[3] - 1;
    const int64_t count = least(span[3] - done, AT_ONCE), *save = j->saves + j->saves[chunk];
    const int64_t *end = j->saves + j->saves[chunk + 1];
    const void *taps[MOST_TAPS];
    first_taps(j, j->read[row], taps);
    if (done) memcpy(taps, s->tokens[AT_ONCE - 1].taps, sizeof taps);
    while (save < end && save[0] <= done) save += 2;
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = done + i;
        s->tokens[i] = (Token){.query = span[1] + at, .from = at ? 0 : READ, .writes = at == last, .save = -1};
        follow(j, &s->tokens[i], i ? s->tokens[i - 1].taps : taps, input_of(j, span[1] + at));
        if (save < end && save[0] == at + 1) {
            s->tokens[i].save = save[1];
            save += 2;
        }
    }
    return count;
}

/* -- convolution, gates -------------------------------------------------------------------------------------------- */

INLINE void convolve(const Token *token, const float *taps, const float *bias, int64_t stride, int64_t first,
                     int64_t count, float *to, const int64_t width, const int half) {
    for (int64_t c = 0; c < count; c += LANES) {
        vf sum = load(token->taps[0], first + c, LANES, half) * loadf(taps + c);
        for (int64_t t = 1; t < width; t++)
            sum += load(token->taps[t], first + c, LANES, half) * loadf(taps + t * stride + c);
        storef(to + c, silu(bias ? sum + loadf(bias + c) : sum));
    }
}
static void convolved(const Net *j, const Token *token, int64_t first, int64_t count, float *to) {
    const float *taps = j->conv + first, *bias = j->conv_bias ? j->conv_bias + first : NULL;
    if (j->half && j->width == 4) convolve(token, taps, bias, j->channels, first, count, to, 4, 1);
    else if (j->half) convolve(token, taps, bias, j->channels, first, count, to, j->width, 1);
    else convolve(token, taps, bias, j->channels, first, count, to, j->width, 0);
}
static void scale_unit(float *x, int64_t size, float scale) {
    vf squares = {0};
    for (int64_t c = 0; c < size; c += LANES) squares += loadf(x + c) * loadf(x + c);
    const vf factor = splat(scale / sqrtf(sum_lanes(squares) + UNIT_EPS));
    for (int64_t c = 0; c < size; c += LANES) storef(x + c, loadf(x + c) * factor);
}

/* -- one unit ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int64_t row, key, part; /* key head, and which of the groups of its value heads */
    int64_t count, kept;    /* of tokens; heads whose states are before its own in `buffers`, of a chunk */
    Ahead next;             /* the state that is read after these */
} Unit;
INLINE int64_t head_of(const Net *j, const Unit *u, int64_t h) {
    h += u->part * j->group;
    return j->tiled ? u->key + h * j->key_heads : u->key * (j->value_heads / j->key_heads) + h;
}

/* What a unit does with channels, stretch by stretch: those of its key head's queries and keys, and of its values. */
typedef struct {
    int64_t first, size;
} Stretch;
INLINE Stretch stretch_of(const Net *j, const Unit *u, int64_t i) {
    const int64_t dk = j->key_dim, dv = j->value_dim, keys = j->key_heads * dk;
    if (i < 2) return (Stretch){i * keys + u->key * dk, dk};
    return (Stretch){2 * keys + head_of(j, u, i - 2) * dv, dv};
}

/* No hardware foresees what lies a row of all heads further on. */
INLINE void bring(const void *at, int64_t bytes) {
    for (int64_t c = 0; c < bytes; c += 64) __builtin_prefetch((const char *)at + c);
}

static void make_ready(const Net *j, const Spare *s, const Unit *u) {
    const int64_t dk = j->key_dim, dv = j->value_dim;
    const float scale = 1.0f / sqrtf((float)dk);
    for (int64_t i = 0; i < u->count; i++) {
        const Token *token = &s->tokens[i];
        float *q = s->q + i * dk, *k = s->k + i * dk;
        for (int64_t part = token->query < 0; part < 2 + j->group; part++) {
            const Stretch of = stretch_of(j, u, part);
            float *to = part == 0 ? q : part == 1 ? k : s->v + (i * j->group + part - 2) * dv;
            if (i + AHEAD < u->count) {
                const void *later = s->tokens[i + AHEAD].taps[j->width - 1];
                bring((const char *)later + of.first * j->bytes, of.size * j->bytes);
            }
            convolved(j, token, of.first, of.size, to);
        }
        if (j->corrects) scale_unit(k, dk, 1.0f);
        if (token->query < 0) continue;
        if (j->corrects) scale_unit(q, dk, scale);
        vf dot = {0};
        for (int64_t c = 0; c < dk; c += LANES) dot += loadf(q + c) * loadf(k + c);
        s->dot[i] = sum_lanes(dot);
    }
}

/* The same where each channel of the key has its g. */
static void make_gates_by_channel(const Net *j, const Spare *s, int64_t head, int64_t count) {
    const int half = (int)j->half;
    const float reach = (float)j->corrects;
    const int64_t dk = j->key_dim, first = head * dk;
    for (int64_t i = 0; i < count; i++) {
        const int64_t query = s->tokens[i].query;
        float *record = s->tokens[i].gates, *g = s->g + i * dk;
        if (query < 0) s->beta[i] = record[j->value_heads * dk + head];
        else s->beta[i] = reach * sigmoid(splat(load(j->b, query * j->b_stride + head, 1, half)[0]))[0];
        if (query >= 0 && record) record[j->value_heads * dk + head] = s->beta[i];
        for (int64_t c = 0; c < dk; c += LANES) {
            vf log;
            if (query < 0) log = loadf(record + first + c);
            else {
                const vf a = load(j->a, query * j->a_stride + first + c, LANES, half);
                const vf x = a + loadf(j->dt_bias + first + c), decay = splat(j->decay[head]);
                log = j->floor < 0 ? splat((float)j->floor) * sigmoid(-(x * decay)) : softplus(x) * decay;
                if (record) storef(record + first + c, log);
            }
            const vf decay = exponential(log);
            storef(g + c, decay);
            storef(s->gk + i * dk + c, decay * loadf(s->k + i * dk + c));
            if (query >= 0) storef(s->gq + i * dk + c, decay * loadf(s->q + i * dk + c));
        }
    }
}

/* What S of a head is multiplied with, and beta, or dt, by each token; and their records: log decay and the other. */
static void make_gates(const Net *j, const Spare *s, int64_t head, int64_t count) {
    const int half = (int)j->half;
    if (j->by_channel) {
        make_gates_by_channel(j, s, head, count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t query = s->tokens[i].query;
        s->g[i] = query < 0 ? 0 : load(j->a, query * j->a_stride + head, 1, half)[0];
        s->beta[i] = query < 0 || !j->corrects ? 0 : load(j->b, query * j->b_stride + head, 1, half)[0];
    }
    for (int64_t i = 0; i < count; i += LANES) {
        const vf dt = softplus(loadf(s->g + i) + splat(j->dt_bias[head]));
        storef(s->g + i, dt * splat(j->decay[head]));
        storef(s->beta + i, j->corrects ? splat((float)j->corrects) * sigmoid(loadf(s->beta + i)) : dt);
    }
    for (int64_t i = 0; i < count; i++) {
        float *record = s->tokens[i].gates, *beta = record + j->value_heads;
        if (!record) continue;
        if (s->tokens[i].query < 0) s->g[i] = record[head], s->beta[i] = beta[head];
        else record[head] = s->g[i], beta[head] = s->beta[i];
    }
    for (int64_t i = 0; i < count; i += LANES) storef(s->g + i, exponential(loadf(s->g + i)));
}

/* Records of inputs, and the convolution's inputs of states that are written. */
static void write_inputs(const Net *j, const Spare *s, const Unit *u) {
    const int64_t before = j->width - 1;
    for (int64_t i = 0; i < u->count; i++) {
        const Token *t = &s->tokens[i];
        for (int64_t part = u->part ? 2 : 0; part < 2 + j->group; part++) {
            const Stretch of = stretch_of(j, u, part);
            const int64_t at = of.first * j->bytes;
            const size_t size = (size_t)(of.size * j->bytes);
            if (t->input) memcpy(t->input + at, (const char *)t->taps[before] + at, size);
            for (int save = 0; save < 2; save++) {
                const int64_t slot = save ? t->save : t->writes ? j->write[u->row] : -1;
                char *to = j->windows + slot * before * j->channels * j->bytes + at;
                for (int64_t w = 0; slot >= 0 && w < before; w++)
                    memmove(to + w * j->channels * j->bytes, (const char *)t->taps[w + 1] + at, size);
            }
        }
    }
}

typedef struct {
    float *at;
    int64_t stride;
} Matrix; /* some columns of S */

/* `parts` registers of columns: S goes from `from` to `to`, `out` or both by g, k and d (update: 0, KEEP, WRITE), and
   sums over it and the keys, and queries, of the token after are taken (sums: those of `KEYS` and `QUERIES`). g: of
   all rows of S, or of each (by_channel). */
INLINE void step(Matrix from, Matrix to, Matrix out, int64_t key_dim, const float *g, const float *k, const float *d,
                 const float *next_k, const float *next_q, float *sum_k, float *sum_q, Ahead *next, const int parts,
                 const int update, const int sums, const int by_channel) {
    pf keys[WIDE], queries[WIDE], change[WIDE];
    const float whole = update && !by_channel ? g[0] : 0;
    for (int c = 0; c < parts; c++) {
        keys[c] = queries[c] = (pf){0};
        if (update) change[c] = part_at(d + c * PART);
    }
    for (int64_t i = 0; i < key_dim; i++) {
        const pf key = (update ? k[i] : 0) - (pf){0}, next_key = (sums & KEYS ? next_k[i] : 0) - (pf){0};
        const pf query = (sums & QUERIES ? next_q[i] : 0) - (pf){0};
        const float *row = from.at + i * from.stride;
        fetch(next, ROW_LINES);
        for (int c = 0; c < parts; c++) {
            pf s = part_at(row + c * PART);
            if (update) {
                s = fused(key, change[c], s * (by_channel ? g[i] : whole));
                if (update & KEEP) memcpy(to.at + i * to.stride + c * PART, &s, sizeof s);
                if (update & WRITE) store_past(out.at + i * out.stride + c * PART, s);
            }
            if (sums & KEYS) keys[c] = fused(s, next_key, keys[c]);
            if (sums & QUERIES) queries[c] = fused(s, query, queries[c]);
        }
    }
    for (int c = 0; c < parts; c++) {
        if (sums & KEYS) memcpy(sum_k + c * PART, &keys[c], sizeof keys[c]);
        if (sums & QUERIES) memcpy(sum_q + c * PART, &queries[c], sizeof queries[c]);
    }
}

/* Columns [c, c + parts * PART) of head h of the unit, all tokens. */
INLINE void run_columns(const Net *j, const Spare *s, Unit *u, int64_t h, int64_t c, const int parts, const int kind) {
    const int corrects = kind != SPACE, of_keys = corrects ? KEYS : 0, by_channel = kind == CHANNELS;
    const int64_t dk = j->key_dim, dv = j->value_dim, columns = parts * PART, head = head_of(j, u, h);
    const int64_t size = dk * dv, kept = j->batch.spans ? ((u->kept + h) * dv + c) * dk : 0;
    float *state = j->state + head * size + c, sum_k[COLUMNS], sum_q[COLUMNS], d[COLUMNS];
#define SLOT(slot) ((Matrix){state + (slot) * j->value_heads * size, dv})
#define PLACE(where) \
    ((where) == READ ? SLOT(j->read[u->row]) : (Matrix){s->buffers + kept + (where) * dk * columns, columns})
    const Token *tokens = s->tokens;
    const Matrix out = SLOT(j->write[u->row]);
#define SUM(n, m, update, from, to)                                                                                \
    step(from, to, out, dk, g, k, d, s->gk + (n) * dk, s->gq + (n) * dk, sum_k, sum_q, &u->next, parts, update, m, \
         by_channel)
    const float *k = NULL, *g = NULL;
    const Matrix first = PLACE(tokens[0].from);
    if (tokens[0].query < 0) SUM(0, of_keys, 0, first, first);
    else SUM(0, of_keys | QUERIES, 0, first, first);
    for (int64_t i = 0; i < u->count; i++) {
        const Token *t = &tokens[i];
        const float *v = s->v + (i * j->group + h) * dv + c, beta = s->beta[i];
        g = s->g + (by_channel ? i * dk : i);
        k = s->k + i * dk;
        const float of_sums = by_channel ? 1 : g[0];
        for (int64_t l = 0; l < columns; l++) d[l] = beta * (corrects ? v[l] - of_sums * sum_k[l] : v[l]);
        for (int64_t l = 0; l < columns && t->query >= 0; l++) {
            const float o = of_sums * sum_q[l] + s->dot[i] * d[l];
            s->o[i * dv + c + l] = corrects ? o : o + j->skip[head] * v[l];
        }
        const int more = i + 1 < u->count, again = more && t[1].query < 0;
        const Matrix from = PLACE(t->from);
        if (t->to == NOWHERE) {
            const Matrix next = more ? PLACE(t[1].from) : from;
            if (t->writes) SUM(0, 0, WRITE, from, out);
            else if (more) SUM(i + 1, of_keys | QUERIES, 0, next, next);
            continue;
        }
        const Matrix to = PLACE(t->to);
        if (!more && t->writes) SUM(0, 0, KEEP | WRITE, from, to);
        else if (!more) SUM(0, 0, KEEP, from, to);
        else if (again) SUM(i + 1, of_keys, KEEP, from, to);
        else if (t->writes) SUM(i + 1, of_keys | QUERIES, KEEP | WRITE, from, to);
        else SUM(i + 1, of_keys | QUERIES, KEEP, from, to);
        for (int64_t r = 0; r < dk && t->save >= 0; r++)
            memcpy(SLOT(t->save).at + r * dv, to.at + r * to.stride, (size_t)columns * 4);
    }
}
INLINE void run_kind(const Net *j, const Spare *s, Unit *u, int64_t h, int64_t c, const int parts) {
    if (j->by_channel) run_columns(j, s, u, h, c, parts, CHANNELS);
    else if (j->corrects) run_columns(j, s, u, h, c, parts, DELTA);
    else run_columns(j, s, u, h, c, parts, SPACE);
}
static void run_wide(const Net *j, const Spare *s, Unit *u, int64_t h, int64_t c) { run_kind(j, s, u, h, c, WIDE); }
static void run_narrow(const Net *j, const Spare *s, Unit *u, int64_t h, int64_t c) { run_kind(j, s, u, h, c, 1); }

INLINE void give_of(const Net *j, const Spare *s, int64_t head, int64_t count, const int half) {
    const int64_t dv = j->value_dim;
    for (int64_t i = 0; i < count; i++) {
        const int64_t query = s->tokens[i].query, z = query * j->z_stride + head * dv;
        const float *o = s->o + i * dv;
        if (query < 0) continue;
        if (i + AHEAD < count && s->tokens[i + AHEAD].query >= 0) {
            const int64_t later = s->tokens[i + AHEAD].query;
            bring((const char *)j->z + (later * j->z_stride + head * dv) * j->bytes, dv * j->bytes);
            bring((const char *)j->out + (later * j->value_heads + head) * dv * j->bytes, dv * j->bytes);
        }
        vf squares = {0};
        for (int64_t c = 0; c < dv; c += LANES) squares += loadf(o + c) * loadf(o + c);
        const vf factor = splat(1.0f / sqrtf(sum_lanes(squares) / (float)dv + (float)j->eps));
        for (int64_t c = 0; c < dv; c += LANES) {
            const vf gate = load(j->z, z + c, LANES, half);
            store(j->out, (query * j->value_heads + head) * dv + c, LANES, half,
                  loadf(o + c) * factor * loadf(j->norm + c) * (j->by_channel ? sigmoid(gate) : silu(gate)));
        }
    }
}

/* A head's tokens, normed and gated; of a state-space layer as they are, in float. */
static void give(const Net *j, const Spare *s, int64_t head, int64_t count) {
    const int64_t dv = j->value_dim;
    for (int64_t i = 0; i < count && !j->corrects; i++) {
        const int64_t query = s->tokens[i].query;
        if (query >= 0)
            memcpy((float *)j->out + (query * j->value_heads + head) * dv, s->o + i * dv, (size_t)dv * sizeof(float));
    }
    if (!j->corrects) return;
    BY_HALF(j->half, give_of, j, s, head, count);
}

/* The state that head h of a unit reads. */
static Ahead states_of(const Net *j, const Unit *u, int64_t h) {
    const int64_t size = j->key_dim * j->value_dim, head = head_of(j, u, h);
    const char *read = (const char *)(j->state + (j->read[u->row] * j->value_heads + head) * size);
    return (Ahead){read, read + size * 4, NULL, NULL};
}
static void run_tokens(const Net *j, const Spare *s, Unit *u, const Unit *then) {
    const int64_t dv = j->value_dim;
    make_ready(j, s, u);
    write_inputs(j, s, u);
    for (int64_t h = 0; h < j->group; h++) {
        const int64_t head = head_of(j, u, h);
        make_gates(j, s, head, u->count);
        if (h + 1 < j->group) u->next = states_of(j, u, h + 1);
        else if (then) u->next = states_of(j, then, 0);
        int64_t c = 0;
        for (; c + COLUMNS <= dv; c += COLUMNS) run_wide(j, s, u, h, c);
        for (; c < dv; c += PART) run_narrow(j, s, u, h, c);
        give(j, s, head, u->count);
    }
}

/* Dead nodes, which are no root and have no parent: zeros. */
static void leave_out(const Net *j, const Spare *s, int64_t tree) {
    const Item item = item_of(&j->batch, tree);
    const int64_t size = j->value_heads * j->value_dim * (j->corrects ? j->bytes : 4);
    for (int64_t q = 1; q < item.queries; q++)
        if (s->parent[q] < 0) memset((char *)j->out + (item.first + q) * size, 0, (size_t)size);
}

/* The units [from, end) of a tree's or chunk's tokens, which are made ready. */
static void run_units(const Net *j, const Spare *s, int64_t row, int64_t from, int64_t end, int64_t count) {
    const int64_t parts = j->value_heads / j->key_heads / j->group;
    Unit next = {.row = row, .key = from / parts, .part = from % parts, .count = count};
    next.next = states_of(j, &next, 0);
    fetch(&next.next, j->batch.spans ? 0 : FIRST_LINES);
    for (int64_t unit = from; unit < end; unit++) {
        Unit u = next;
        u.kept = (unit - from) * j->group;
        next.key = (unit + 1) / parts;
        next.part = (unit + 1) % parts;
        run_tokens(j, s, &u, unit + 1 < end && !j->batch.spans ? &next : NULL);
    }
    all_past();
}

static void run_piece(const Net *j, const Spare *s, int64_t item, int64_t from, int64_t end) {
    const Item of = item_of(&j->batch, item);
    const int64_t row = of.row;
    if (of.span) {
        for (int64_t done = 0; done < of.queries; done += AT_ONCE)
            run_units(j, s, row, from, end, chunk_tokens(j, s, item, done));
        return;
    }
    const int64_t count = tree_tokens(j, s, item);
    if (!count) return;
    run_units(j, s, row, from, end, count);
    if (from) return;
    leave_out(j, s, item);
    int64_t *slots = j->node_slots + (row * 2 + j->page[row]) * j->nodes; /* 0: of no record */
    memset(slots, 0, (size_t)j->nodes * 8);
    for (int64_t i = 0; i < count; i++) {
        const int64_t query = s->tokens[i].query;
        if (query >= 0) slots[node_of(j, query)] = j->slots[query];
    }
}

/* Results of a state-space layer: gates, and a norm over each group behind or before them, or none. */
typedef struct {
    void *out;
    float *o; /* as the net gave it, and overwritten */
    const void *z;
    int64_t z_stride;
    const float *norm;                       /* or NULL */
    int64_t rows, groups, size, first, half; /* size: values of a group; first: gates come first */
    Workers *workers;
    double eps;
    int64_t next;
} Norm;
INLINE void norm_group(const Norm *j, int64_t row, int64_t group, const int half) {
    const int64_t at = (row * j->groups + group) * j->size, z = row * j->z_stride + group * j->size;
    vf squares = {0};
    for (int64_t c = 0; c < j->size; c += LANES) {
        vf x = loadf(j->o + at + c);
        if (j->first) storef(j->o + at + c, x = x * silu(load(j->z, z + c, LANES, half)));
        squares += x * x;
    }
    const vf factor = splat(1.0f / sqrtf(sum_lanes(squares) / (float)j->size + (float)j->eps));
    for (int64_t c = 0; c < j->size; c += LANES) {
        vf x = loadf(j->o + at + c);
        if (j->norm) x = x * factor * loadf(j->norm + group * j->size + c);
        store(j->out, at + c, LANES, half, j->first ? x : x * silu(load(j->z, z + c, LANES, half)));
    }
}
static void some_groups(void *data) {
    Norm *j = data;
    for (int64_t i; (i = take(&j->next, 1)) < j->rows * j->groups;)
        BY_HALF(j->half, norm_group, j, i / j->groups, i % j->groups);
}

static void some_pieces(void *data) {
    Net *j = data;
    const Spare s = spare_of(j, j->scratch + take(&j->worker, 1) * j->scratch_size);
    const int64_t units = j->value_heads / j->group, pieces = j->pieces;
    for (int64_t i; (i = take(&j->next, 1)) < j->batch.count * pieces;)
        run_piece(j, &s, i / pieces, i % pieces * units / pieces, (i % pieces + 1) * units / pieces);
}

/* -- the module ---------------------------------------------------------------------------------------------------- */

static void set_sizes(Net *j) {
    const int64_t units = j->value_heads / j->group;
    j->pieces = least(units, j->workers->most);
    j->channels = 2 * j->key_heads * j->key_dim + j->value_heads * j->value_dim;
    j->bytes = j->half ? 2 : 4;
    j->decays = j->by_channel ? j->key_dim : 1;
    j->record = j->value_heads * (j->decays + 1);
}

/* -> bytes of scratch that a thread needs */
static int64_t delta_scratch(int64_t *n) {
    Net *j = (Net *)n;
    set_sizes(j);
    return spare_of(j, NULL).end;
}

static void delta_net(int64_t *n) {
    Net *j = (Net *)n;
    set_sizes(j);
    run_unlocked(some_pieces, j, j->batch.count * j->pieces > 1 ? j->workers : NULL,
        j->queries * j->value_heads * j->key_dim * j->value_dim / 16384);
}

static void ssm_norm(int64_t *n) {
    Norm *j = (Norm *)n;
    run_unlocked(some_groups, j, j->workers, j->rows * j->groups * j->size / 2000);
}

/* read, write, page, length, node_slots, nodes, rows, their count, length of each, and what it is more */
static void delta_advance(int64_t *n) {
    int64_t *read = POINTER(n[0]), *write = POINTER(n[1]), *page = POINTER(n[2]), *length = POINTER(n[3]);
    int64_t *node_slots = POINTER(n[4]);
    const int64_t nodes = n[5], *rows = POINTER(n[6]), *to = POINTER(n[8]);
    for (int64_t i = 0; i < n[7]; i++) {
        const int64_t row = rows[i], was = read[row];
        read[row] = write[row];
        write[row] = was;
        page[row] = 1 - page[row];
        length[row] = to[i] + n[9];
        memset(node_slots + (row * 2 + page[row]) * nodes, 0, (size_t)nodes * 8); /* records of the step before last */
    }
}

Function delta_functions[] = {
    {"delta_scratch", .count = delta_scratch, .given = UP_TO(Net, slots), .size = sizeof(Net)},
    {"delta_net", delta_net, UP_TO(Net, floor), sizeof(Net), .doubles = 2},
    {"ssm_norm", ssm_norm, UP_TO(Norm, eps), sizeof(Norm), .doubles = 1},
    {"delta_advance", delta_advance, 10},
    {0},
};
