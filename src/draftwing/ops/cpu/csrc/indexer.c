/* Picks of an indexer: of the tokens on a query's path the `topk` with the best scores, in order of positions. The
   reference is ops/indexer/spec.py, which sums in another order: near ties may be decided otherwise.

   A score is the sum over heads of weight * relu(q . key). Heads are lanes: a key's elements are multiplied with those
   of all heads one after the other, fused, and heads are summed 16 at a time. So a score's bits follow from query and
   key alone. What is not finite counts as 0, and of equal scores the earlier token is picked. */

#include "sums.h"

#define BLOCK 256 /* keys of a unit of work */
#define TOGETHER 4 /* keys that meet elements of heads which are in registers */
#define PARTS 4    /* registers of heads, at a time: with so many keys they have room in 32, or in 16 */
#if PART == 16
#define KEYS TOGETHER
#else
#define KEYS 2
#endif

typedef struct {
    const int64_t *table, *path; /* path: or NULL */
    int64_t prefix, length;      /* length: tokens on the path */
} Query;
/* Up to the batch, what `pick` is given. */
typedef struct {
    int64_t *slots, *last; /* of each query `topk` slots, and how many there are but one */
    const char *q;
    const float *weights;
    const char *kept; /* keys of the pool */
    int64_t queries, heads, size, topk, half, kept_half;
    Query *of;
    int64_t room; /* floats of scores: for one query at least, in whole blocks */
    Workers *workers;
    Batch batch;
    float *scores;
    char *threads; /* scratch of each */
    int64_t worker, next, first, end, units; /* [first, end): queries whose turn it is */
} Pick;

INLINE int64_t lanes_of(int64_t n) { return round_up(n, LANES); }
/* Bytes of scratch that a thread needs: a query's heads, element by element; keys; their products with heads. */
INLINE int64_t thread_size(int64_t heads, int64_t size) {
    return 4 * (lanes_of(heads) * (size + TOGETHER + 1) + TOGETHER * lanes_of(size));
}
INLINE int64_t slot_at(const Query *q, int64_t position) {
    return q->table[position < q->prefix ? position : q->prefix + q->path[position - q->prefix]];
}
INLINE int64_t blocks_of(const Pick *j, int64_t query) {
    return j->of[query].length > j->topk ? (j->of[query].length + BLOCK - 1) / BLOCK : 0;
}

static void find_queries(const Pick *j) {
    const Batch *b = &j->batch;
    for (int64_t number = 0; number < b->count; number++) {
        const Item item = item_of(b, number);
        for (int64_t i = item.first; i < item.first + item.queries; i++) {
            const int64_t seen = item.span ? item.span[2] + i - item.first + 1 : b->prefix[number];
            const int64_t *path = item.span ? NULL : b->path + i * b->depth;
            j->of[i] = (Query){item.table, path, seen, seen + (item.span ? 0 : b->path_len[i])};
        }
    }
}

/* Products of `keys` keys [keys, size] with heads, of which some registers are in turn. made [keys, heads] */
INLINE void multiply(const float *key, const float *q, float *made, int64_t heads, int64_t size, const int keys,
                     const int parts) {
    pf sum[TOGETHER][8];
    sum_products(sum, key, lanes_of(size), q, heads, size, ONE, 0, keys, parts, NULL, 0);
    EACH(k, keys) EACH(p, parts) memcpy(made + k * heads + p * PART, &sum[k][p], sizeof sum[k][p]);
}
INLINE void multiply_all(const float *key, const float *q, float *made, int64_t heads, int64_t size, const int keys) {
    int64_t h = 0;
    for (; h + PARTS * PART <= heads; h += PARTS * PART) multiply(key, q + h, made + h, heads, size, keys, PARTS);
    for (; h < heads; h += PART) multiply(key, q + h, made + h, heads, size, keys, 1);
}

static void score_block(const Pick *j, int64_t query, int64_t block, float *scores, const float *q, float *space) {
    const Query *of = j->of + query;
    const int64_t heads = lanes_of(j->heads), wide = lanes_of(j->size), bytes = j->size * (j->kept_half ? 2 : 4);
    const int64_t end = least((block + 1) * BLOCK, of->length);
    float *made = space, *keys = made + TOGETHER * heads;
    const float *weights = q + heads * j->size;
    for (int64_t at = block * BLOCK; at < end; at += KEYS) {
        const int64_t n = least(end - at, KEYS);
        for (int64_t k = 0; k < n; k++)
            to_floats(keys + k * wide, j->kept + slot_at(of, at + k) * bytes, j->size, (int)j->kept_half);
        if (n == KEYS) multiply_all(keys, q, made, heads, j->size, KEYS);
        else
            for (int64_t k = 0; k < n; k++) multiply_all(keys + k * wide, q, made + k * heads, heads, j->size, 1);
        for (int64_t k = 0; k < n; k++) {
            vf sum = {0};
            for (int64_t h = 0; h < heads; h += LANES) {
                const vf dot = loadf(made + k * heads + h);
                /* What is no number stays so: the sum is none. */
                sum += select_f(above(splat(0.0f), dot), splat(0.0f), dot) * loadf(weights + h);
            }
            const float score = sum_lanes(sum);
            scores[at + k] = fabsf(score) < INFINITY ? score : 0.0f;
        }
    }
}

/* The query's heads [size, heads], and behind them their weights; zeros for lanes that are none. */
static void turn_heads(const Pick *j, int64_t query, float *q, float *row) {
    const int64_t heads = lanes_of(j->heads), bytes = j->half ? 2 : 4;
    memset(q, 0, (size_t)(heads * (j->size + 1)) * 4);
    for (int64_t h = 0; h < j->heads; h++) {
        to_floats(row, j->q + (query * j->heads + h) * j->size * bytes, j->size, (int)j->half);
        for (int64_t i = 0; i < j->size; i++) q[i * heads + h] = row[i];
    }
    memcpy(q + heads * j->size, j->weights + query * j->heads, (size_t)j->heads * 4);
}

/* Where the scores of each query in turn lie follows from the lengths of those before it. */
static void score_some(void *data) {
    Pick *j = data;
    const int64_t heads = lanes_of(j->heads), mine = take(&j->worker, 1);
    float *q = (float *)(j->threads + mine * thread_size(j->heads, j->size)), *space = q + heads * (j->size + 1);
    int64_t query = j->first, before = 0, turned = -1;
    float *scores = j->scores;
    for (int64_t unit; (unit = take(&j->next, 1)) < j->units;) {
        for (; unit >= before + blocks_of(j, query); query++) {
            const int64_t blocks = blocks_of(j, query);
            before += blocks;
            scores += blocks * BLOCK;
        }
        if (turned != query) turn_heads(j, query, q, space + TOGETHER * heads);
        turned = query;
        score_block(j, query, unit - before, scores, q, space);
    }
}

/* A score's bits in the order of scores. */
INLINE uint32_t rank_of(float score) {
    uint32_t bits;
    score += 0.0f; /* of both zeros one */
    memcpy(&bits, &score, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The least rank that is picked, from its upper bits on; above: how many are greater. */
static uint32_t least_rank(const float *scores, int64_t length, int64_t topk, int64_t *above) {
    uint32_t found = 0;
    *above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0};
        for (int64_t i = 0; i < length; i++) {
            const uint32_t rank = rank_of(scores[i]);
            if (shift == 24 || rank >> (shift + 8) == found >> (shift + 8)) counts[(rank >> shift) & 255]++;
        }
        int digit = 255;
        for (; *above + counts[digit] < topk; digit--) *above += counts[digit];
        found |= (uint32_t)digit << shift;
    }
    return found;
}
static void pick_some(void *data) {
    Pick *j = data;
    float *scores = j->scores;
    int64_t query = j->first;
    for (int64_t i; (i = j->first + take(&j->next, 1)) < j->end;) {
        for (; query < i; query++) scores += blocks_of(j, query) * BLOCK;
        const Query *of = j->of + i;
        int64_t *slots = j->slots + i * j->topk, count = 0;
        if (of->length <= j->topk) {
            for (; count < of->length; count++) slots[count] = slot_at(of, count);
        } else {
            int64_t greater;
            const uint32_t least = least_rank(scores, of->length, j->topk, &greater);
            int64_t equal = j->topk - greater;
            for (int64_t at = 0; at < of->length; at++) {
                const uint32_t rank = rank_of(scores[at]);
                if (rank > least || (rank == least && equal-- > 0)) slots[count++] = slot_at(of, at);
            }
        }
        j->last[i] = count ? count - 1 : 0; /* of a node that is none */
        for (; count < j->topk; count++) slots[count] = 0;
    }
}

/* heads, size of a key, threads, queries -> bytes of scratch beside the scores */
static int64_t pick_scratch(int64_t *n) {
    return n[3] * (int64_t)sizeof(Query) + n[2] * thread_size(n[0], n[1]);
}

static void pick(int64_t *n) {
    Pick *j = (Pick *)n;
    j->threads = (char *)(j->of + j->queries);
    j->scores = (float *)(j->threads + j->workers->most * thread_size(j->heads, j->size));
    RELEASE_GIL
    find_queries(j);
    for (; j->first < j->queries; j->first = j->end) {
        for (j->units = 0, j->end = j->first; j->end < j->queries; j->end++) {
            if (j->end > j->first && (j->units + blocks_of(j, j->end)) * BLOCK > j->room) break;
            j->units += blocks_of(j, j->end);
        }
        j->worker = j->next = 0;
        if (j->units) run(score_some, j, j->workers, j->units * BLOCK * j->heads * j->size / 16384);
        j->next = 0;
        run(pick_some, j, j->workers, (j->units * BLOCK + (j->end - j->first) * j->topk) / 512);
    }
    TAKE_GIL
}

/* -- logits of heads ------------------------------------------------------------------------------------------------- */

#define OUTPUTS 8 /* that a row is multiplied with together */

typedef struct {
    float *out;    /* [rows, outputs] */
    const char *x; /* [rows, size] */
    const float *weight; /* [outputs, size] */
    int64_t rows, size, outputs, half; /* half: of x */
    Workers *workers;
    int64_t next;
} Logits;

static void some_logits(void *data) {
    Logits *j = data;
    for (int64_t unit, each = (j->outputs + OUTPUTS - 1) / OUTPUTS; (unit = take(&j->next, 1)) < j->rows * each;) {
        const int64_t row = unit / each, first = unit % each * OUTPUTS;
        const int64_t n = least(j->outputs - first, OUTPUTS);
        vf sums[OUTPUTS] = {0};
        for (int64_t c = 0; c < j->size; c += LANES) {
            const vf x = load(j->x, row * j->size + c, j->size - c, (int)j->half);
            for (int64_t i = 0; i < n; i++)
                sums[i] += x * load(j->weight, (first + i) * j->size + c, j->size - c, 0);
        }
        for (int64_t i = 0; i < n; i++) j->out[row * j->outputs + first + i] = sum_lanes(sums[i]);
    }
}

static void every_logit(int64_t *n) {
    Logits *j = (Logits *)n;
    run_unlocked(some_logits, j, j->workers, j->rows * j->size * j->outputs / 8000);
}

Function index_functions[] = {
    {"pick_scratch", .count = pick_scratch, .given = 4},
    {"pick", pick, UP_TO(Pick, scores), sizeof(Pick)},
    {"every_logit", every_logit, UP_TO(Logits, next), sizeof(Logits)},
    {0},
};
