/* Attention over the pool, for trees and chunks.

   Queries come in spans: a row's tree, or a chunk. A query sees `count` keys in position order: the page table's
   entries [0, prefix), then those of its path (trees), or the positions up to its own, or as many as path_len says
   (chunks: tokens of an image that see each other; of a later query no fewer). With a window its first
   key is `low`.

   A query's bits follow from its own keys and their positions. A score is summed in the order of head_dim. Positions go
   in chunks of CHUNK: each has a maximum of its own, weights exp2(score - maximum), the sum of these over 16 lanes, and
   the sums of the values in the order of positions, all with products that are fused with the sums, and of keys and
   values in bfloat16 with zeros for numbers below the normal ones. What the chunks have is joined in their order. So
   neither vectors nor threads, nor the queries that share a tile, change anything.

   A tile is some queries of a span, with the heads that share one head of keys. Keys are turned, so that vectors go
   over keys and no vector is ever summed; all rows of the tile take them from the cache. A unit of work is some
   chunks of a tile. Where threads wait for memory it is one chunk of the tiles of all heads of keys, so that a token's
   keys and values are read in one piece; each thread goes through a share of its own, and fetches the chunk behind the
   one that it computes; all chunks are stored. Else a tile that is one unit is joined as it goes, and of one of several
   units the chunks are stored. The thread that ends the last unit joins them. */

#include "attention.h"

/* -- sizes and shares ---------------------------------------------------------------------------------------------- */

INLINE int64_t group_of(const Attention *a) { return a->heads / a->kv_heads; }
INLINE int64_t rows_of(const Attention *a) { return most(TILE_ROWS / group_of(a), 1) * group_of(a); }
INLINE int64_t parts_size(int64_t rows, int64_t padded) { return 2 * round_up(rows, LANES) + rows * padded; }
static float *parts_at(Parts *p, float *memory, int64_t rows, int64_t padded) {
    const int64_t aligned = round_up(rows, LANES);
    *p = (Parts){memory, memory + aligned, memory + 2 * aligned};
    return p->values + rows * padded;
}
/* Lays out what a thread computes on its way. Returns its end. */
static float *scratch_of(Tile *t, const Attention *a, float *memory) {
    const int64_t rows = rows_of(a), aligned = round_up(rows, LANES), padded = a->padded;
    t->at = (const char **)memory;
    t->after = t->at + CHUNK + LANES;
    t->here = t->after + CHUNK + LANES;
    t->counts = (int64_t *)(t->here + CHUNK + LANES);
    t->lows = t->counts + aligned;
    t->keep = (float *)(t->lows + aligned);
    t->join = t->keep + aligned;
    t->q_scales = t->join + aligned;
    t->factors = t->q_scales + aligned;
    t->key_scales = t->factors + aligned;
    t->value_scales = t->key_scales + BLOCK;
    t->q = t->value_scales + CHUNK;
    t->keys = t->q + rows * padded;
    t->staged = t->keys + BLOCK * padded;
    t->scores = t->staged + BLOCK * padded;
    t->beside = t->scores + rows * LD;
    return parts_at(&t->part, parts_at(&t->whole, t->beside + rows * BLOCK, rows, padded), rows, padded);
}
static int64_t thread_floats(const Attention *a) {
    Tile t;
    return round_up(scratch_of(&t, a, NULL) - (float *)NULL, LANES);
}

/* Of all the call's work: queries of a tile, tiles of the longest span, chunks of a unit, its heads of keys (one, or
   all), floats of a chunk's parts; units of all. */
typedef struct {
    int64_t tile, tiles, per, heads, size, units;
} Plan;
/* Tile `tile` of a span: its queries and chunks. There may be none. */
typedef struct {
    int64_t offset, first, queries, from, end; /* first: query of the span whose first one is `offset`; chunks */
} Reach;
/* Of a query of a chunk. */
INLINE int64_t keys_of(const Attention *a, const int64_t *span, int64_t query) {
    return a->batch.path_len ? a->batch.path_len[span[1] + query] : span[2] + query + 1;
}
static Reach reach_of(const Attention *a, const Plan *p, int64_t span, int64_t tile) {
    const Item item = item_of(&a->batch, span);
    Reach r = {.offset = item.first, .first = tile * p->tile};
    r.queries = least(item.queries - r.first, p->tile);
    if (r.queries <= 0) return (Reach){0};
    /* Keys of a query, at least: */
    const int64_t fewest = (item.span ? item.span[2] + r.first : a->batch.prefix[span]) + 1;
    const int64_t last = item.span ? keys_of(a, item.span, r.first + r.queries - 1) : fewest + a->batch.depth - 1;
    r.from = a->window ? most(fewest - a->window, 0) / CHUNK : 0;
    r.end = (last + CHUNK - 1) / CHUNK;
    return r;
}

/* Goes through tiles, the longest of chunks first, and numbers their units. */
typedef struct {
    Plan plan;
    int64_t tile, unit, units; /* tile: of all, counted from the last; its first unit, and how many it has */
    int64_t span, head, split, stored; /* head: the first one; tiles before it that are stored, and chunks of these */
    Reach reach;
} Cursor;
static int is_stored(const Cursor *c) { return c->units > 1 || (c->units && c->plan.heads > 1); }
static int next_tile(const Attention *a, Cursor *c) {
    const int64_t parts = a->kv_heads / c->plan.heads, tiles = a->batch.count * c->plan.tiles * parts;
    if (is_stored(c)) c->split++, c->stored += (c->reach.end - c->reach.from) * c->plan.heads;
    c->unit += c->units;
    if (++c->tile >= tiles) return 0;
    const int64_t from_first = tiles - 1 - c->tile;
    c->head = from_first % parts;
    c->span = from_first / parts / c->plan.tiles;
    c->reach = reach_of(a, &c->plan, c->span, from_first / parts % c->plan.tiles);
    c->units = (c->reach.end - c->reach.from + c->plan.per - 1) / c->plan.per;
    return 1;
}
static Cursor cursor_of(Plan plan) { return (Cursor){.plan = plan, .tile = -1}; }

static int64_t chunks_of(const Attention *a, const Plan *p) {
    int64_t chunks = 0;
    for (int64_t span = 0; span < a->batch.count; span++)
        for (int64_t tile = 0; tile < p->tiles; tile++) {
            const Reach r = reach_of(a, p, span, tile);
            chunks += r.end - r.from;
        }
    return chunks * a->kv_heads;
}
/* Tiles are large, for they share keys, and as many units as all threads like to have; no bit follows from either. */
static Plan plan_of(const Attention *a) {
    const int64_t threads = a->workers->most, wanted = threads > 1 ? UNITS * threads : 1, group = group_of(a);
    Plan p = {.tile = rows_of(a) / group};
    int64_t chunks;
    while (1) {
        p.tiles = (a->batch.nodes + p.tile - 1) / p.tile;
        p.tile = (a->batch.nodes + p.tiles - 1) / p.tiles; /* all alike */
        chunks = chunks_of(a, &p);
        if (chunks >= wanted || p.tile * group <= FEW_ROWS || p.tile == 1) break;
        p.tile = (p.tile + 1) / 2;
    }
    const int64_t fewest = most(2 * wanted, PREFETCH_CHUNKS * a->batch.count * p.tiles); /* of a head */
    /* One head of keys lies in one piece by itself. Turns that fetch fewer lines than a chunk has would leave some out,
       which takes longer than not to prefetch. */
    const int64_t piece = a->parts * row_bytes(a);
    const int prefetches = a->kv_heads > 1 && a->kv_type != INT8 && p.tile * group <= PREFETCH_ROWS &&
                           chunks >= fewest * a->kv_heads && piece >= PREFETCH_BYTES &&
                           64 * chunk_lines(a, p.tile * group) >= CHUNK * piece;
    p.size = parts_size(p.tile * group, a->padded);
    p.heads = prefetches ? a->kv_heads : 1;
    p.per = prefetches ? 1 : most((chunks + wanted - 1) / wanted, 1);
    while (1) { /* until what is stored has room */
        Cursor c = cursor_of(p);
        while (next_tile(a, &c)) {}
        p.units = c.unit;
        if (c.split <= TICKETS && c.stored * p.size <= a->stored_size) return p;
        p.per *= p.heads > 1 ? most((chunks + wanted - 1) / wanted, 1) : 2; /* each of one head: some tiles are one */
        p.heads = 1;
    }
}

/* -- scores and values, by the pool's type ------------------------------------------------------------------------- */

/* Turns `count` keys; there are more addresses, up to 16s. Their values are read next, and the keys of `after`, which
   are fetched but where a prefetch did it. */
static void stage_keys(const Tile *t, const char *const *at, int64_t count, const char *const *after, int64_t more) {
    const int64_t bytes = row_bytes(t->a), behind = value_behind(t->a);
    for (int64_t j = 0; j < count; j += PART) {
        for (int64_t i = j; i < least(j + PART, count) && !t->prefetched; i++) {
            bring(at[i] + behind, bytes);
            if (i < more) bring(after[i], bytes);
        }
        if (t->a->kv_type == INT8) stage_keys_8(t, j, at + j);
        else stage_keys_float(t, j, at + j);
    }
}

static void score_block(const Tile *t, int64_t from, int64_t end, float *scores, int64_t ld, int64_t count) {
    (t->a->kv_type == INT8 ? score_block_8 : score_block_float)(t, from, end, scores, ld, count);
}
/* Scores, times `scale` for exp2; before `low` they are anybody's. */
static void cap_scores(float *s, int64_t low, int64_t count, float scale, float cap) {
    const float factor = 2.88539008f * scale / cap;
    for (int64_t j = low / LANES * LANES; j < count; j += LANES) storef(s + j, soft_capped(loadf(s + j), cap, factor));
}
static float weigh(const Tile *t, float *scores, int64_t low, int64_t count, float *top) {
    const int half = t->a->kv_type == HALF;
    float scale = half ? t->scale : 1;
    if (t->a->cap) {
        cap_scores(scores, low, count, scale, (float)t->a->cap * 1.44269504f);
        scale = 1;
    }
    return half ? softmax(scores, low, count, top, scale, 1) : softmax(scores, low, count, top, 1, 0);
}
static void add_values(const Tile *t, const char *const *at, const char *const *after, int64_t chunk, int64_t from,
                       int64_t end, int64_t r, int64_t last) {
    (t->a->kv_type == INT8 ? add_values_8 : add_values_float)(t, at, after, chunk, from, end, r, last);
}

/* Addresses of keys [from, end) of one or all queries, and more of the last, up to 16s. Two loops: of one with a choice
   in it compilers make loads with a mask, of addresses that are none, which CPUs are slow to leave out. */
static void addresses(const Tile *t, const char **to, int64_t from, int64_t end, const int64_t *path) {
    const Attention *a = t->a;
    const int64_t *table = t->table, size = a->parts * row_bytes(a), stride = a->kv_heads * size;
    const int64_t shared = path ? least(most(t->prefix, from), end) : end;
    const char *base = (const char *)a->kv + t->head * size;
    for (int64_t j = from; j < shared; j++) *to++ = base + table[j] * stride;
    for (int64_t j = shared; j < end; j++) *to++ = base + table[t->prefix + path[j - t->prefix]] * stride;
    for (int64_t j = end; j % LANES; j++, to++) to[0] = to[-1];
}

/* Scores of a tree's nodes for all its queries, and from these each query's path. */
static void score_paths(const Tile *t, int64_t from, int64_t end) {
    int64_t first = INT64_MAX, last = -1;
    for (int64_t i = 0; i < t->queries; i++)
        for (int64_t p = most(t->prefix, from); p < least(t->counts[i * t->group], end); p++) {
            const int64_t entry = path_of(t, i)[p - t->prefix];
            first = least(first, entry), last = most(last, entry);
        }
    for (int64_t block = first; block <= last; block += BLOCK) {
        const int64_t count = least(last + 1 - block, BLOCK);
        for (int64_t j = 0; j < round_up(count, LANES); j++)
            t->here[j] = key_at(t, t->prefix + block + least(j, count - 1));
        stage_keys(t, t->here, count, NULL, 0);
        score_block(t, 0, t->rows, t->beside, BLOCK, count);
        for (int64_t r = 0; r < t->rows; r++)
            for (int64_t p = most(t->prefix, from); p < least(t->counts[r], end); p++) {
                const int64_t entry = path_of(t, r / t->group)[p - t->prefix] - block;
                if (entry >= 0 && entry < BLOCK) t->scores[r * LD + p - from] = t->beside[r * BLOCK + entry];
            }
    }
}

/* -- chunks and tiles ---------------------------------------------------------------------------------------------- */

/* Chunk `number` of the tile to `part`; last: of the unit. */
static void run_chunk(Tile *t, int64_t number, int last_one, Ahead *next) {
    const Attention *a = t->a;
    const int64_t from = number * CHUNK, end = least(from + CHUNK, t->end);
    const int64_t alike = t->queries == 1 ? end : least(end, t->prefix); /* keys before it are the same for all */
    const Parts *part = &t->part;
    if (alike > from) addresses(t, t->at, from, alike, t->path);
    for (int64_t block = from; block < alike; block += BLOCK) {
        const int64_t count = least(alike - block, BLOCK);
        const char *const *here = t->at + (block - from);
        int64_t first = 0, last = t->rows; /* rows that see some of it */
        while (first < last && (t->counts[first] <= block || t->lows[first] >= block + count)) first++;
        while (last > first && (t->counts[last - 1] <= block || t->lows[last - 1] >= block + count)) last--;
        if (first == last) continue;
        stage_keys(t, here, count, here + BLOCK, alike - block - BLOCK);
        fetch(next, BLOCK_LINES);
        score_block(t, first, last, t->scores + (block - from), LD, count);
    }
    if (end > alike) score_paths(t, from, end);
    if (a->kv_type == INT8 && alike > from) value_scales(t, alike - from);
    memset(part->values, 0, (size_t)(t->rows * a->padded) * 4);
    for (int64_t r = 0; r < t->rows; r++) {
        const int64_t low = most(t->lows[r], from), count = least(t->counts[r], end);
        part->tops[r] = NONE, part->sums[r] = 0;
        if (low < count) part->sums[r] = weigh(t, t->scores + r * LD, low - from, count - from, part->tops + r);
        if (a->kv_type == INT8) round_weights(t, r, from, low, count, alike);
    }
    const int64_t following = least(from + 2 * CHUNK, t->queries == 1 ? t->end : t->prefix) - from - CHUNK;
    const int64_t after = last_one || t->prefetch->end ? 0 : following;
    if (after > 0) { /* where it has fewer keys, the last again */
        addresses(t, t->after, from + CHUNK, from + CHUNK + after, t->path);
        for (int64_t j = after; j < CHUNK; j++) t->after[j] = t->after[after - 1];
    }
    if (alike > from) add_values(t, t->at, after > 0 ? t->after : NULL, from, from, alike, 0, t->rows);
    for (int64_t i = 0; i < t->queries && end > alike; i++) {
        const int64_t first = most(from, t->prefix), last = least(t->counts[i * t->group], end);
        if (first >= last) continue;
        addresses(t, t->at + (first - from), first, last, path_of(t, i));
        add_values(t, t->at, NULL, from, first, last, i * t->group, (i + 1) * t->group);
    }
    if (a->kv_type == INT8) values_to_floats(t);
}

/* Joins what a chunk has to the chunks before it. */
static void join_parts(const Tile *t, const Parts *whole, const Parts *part) {
    const int64_t padded = t->a->padded;
    for (int64_t r = 0; r < t->rows; r += LANES) {
        const vf before = loadf(whole->tops + r), own = loadf(part->tops + r), top = larger(own, before);
        const vi some = above(own, splat(NONE));
        const vf keep = select_f(some, exp2_16(before - top), splat(1.0f));
        const vf join = select_f(some, exp2_16(own - top), splat(0.0f));
        storef(whole->tops + r, select_f(some, top, before));
        storef(whole->sums + r, loadf(whole->sums + r) * keep + loadf(part->sums + r) * join);
        storef(t->keep + r, keep);
        storef(t->join + r, join);
    }
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t c = 0; c < padded; c += LANES) {
            float *to = whole->values + r * padded + c;
            storef(to, loadf(to) * splat(t->keep[r]) + loadf(part->values + r * padded + c) * splat(t->join[r]));
        }
}
static void begin(const Tile *t) {
    for (int64_t r = 0; r < t->rows; r += LANES) {
        storef(t->whole.tops + r, splat(NONE));
        storef(t->whole.sums + r, splat(0.0f));
    }
    memset(t->whole.values, 0, (size_t)(t->rows * t->a->padded) * 4);
}
/* The sink joins last, as a key without a value. */
static void finish(const Tile *t) {
    const Attention *a = t->a;
    for (int64_t r = 0; r < t->rows; r++) {
        const int64_t head = t->head * t->group + r % t->group, query = t->query + r / t->group;
        vf keep = splat(1.0f), sum = splat(t->whole.sums[r]);
        if (a->sinks) {
            const vf before = splat(t->whole.tops[r]), own = splat(a->sinks[head] * 1.44269504f);
            const vf top = larger(own, before);
            keep = exp2_16(before - top);
            sum = sum * keep + exp2_16(own - top);
        }
        for (int64_t c = 0; c < a->values; c += LANES)
            store(a->out, (query * a->heads + head) * a->values + c, a->values - c, (int)a->half,
                  loadf(t->whole.values + r * a->padded + c) * keep / sum + splat(0.0f)); /* no -0 */
    }
    const int64_t size = t->group * a->values;
    for (int64_t i = 0; i < t->queries && a->rounded; i++)
        round_part(a->rounded, a->out, t->query + i, t->head * size, (t->head + 1) * size, a->half);
}

/* The cursor's tile with one of its heads of keys, over scratch of this thread. */
static void prepare(Tile *t, const Attention *a, const Cursor *c, int64_t head_of_keys) {
    const Reach *reach = &c->reach;
    const Item item = item_of(&a->batch, c->span);
    const int64_t *spans = item.span;
    const float scale = 1.44269504f / sqrtf((float)(a->scalar ? a->scalar : a->dim)); /* for exp2 */
    const float in_q = a->kv_type == HALF ? 1.0f : scale; /* what is in bfloat16 stays as it is */
    t->scale = scale;
    t->head = head_of_keys;
    t->group = group_of(a);
    t->queries = reach->queries;
    t->rows = t->queries * t->group;
    t->query = reach->offset + reach->first;
    t->table = item.table;
    t->path = spans ? NULL : a->batch.path + t->query * a->batch.depth;
    t->prefix = spans ? keys_of(a, spans, reach->first + t->queries - 1) : a->batch.prefix[c->span];
    t->end = 0;
    for (int64_t r = 0; r < t->rows; r++) {
        const int64_t i = r / t->group, head = t->head * t->group + r % t->group;
        const int64_t count = spans ? keys_of(a, spans, reach->first + i) : t->prefix + a->batch.path_len[t->query + i];
        const int64_t own = spans ? spans[2] + reach->first + i + 1 : count; /* up to its own position */
        t->counts[r] = count;
        t->lows[r] = a->window && own > a->window ? own - a->window : 0;
        t->end = most(t->end, count);
        for (int64_t c = 0; c < a->padded; c += LANES)
            storef(t->q + r * a->padded + c,
                   load(a->q, (t->query + i) * a->q_stride + head * a->dim + c, a->dim - c, (int)a->half) * in_q);
    }
    if (a->kv_type == HALF) halve_queries(t);
    if (a->kv_type == INT8) round_queries(t);
}

/* Numbers below the normal ones are zeros from here on, as they always are to vdpbf16ps. Returns what was before. */
static uint64_t flush_small(void) {
    uint64_t mode = 0;
#if defined(__SSE2__)
    mode = _mm_getcsr();
    _mm_setcsr((uint32_t)mode | 0x8040);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | 1 << 24));
    __asm__ volatile("msr fpsr, xzr");
#endif
    __asm__ volatile("" : : : "memory"); /* nothing is computed earlier */
    return mode;
}
/* Whether a number was taken for zero since, where that may be another one than with x86. */
static int lost_small(void) {
    uint64_t status = 0;
#if defined(__aarch64__)
    __asm__ volatile("mrs %0, fpsr" : "=r"(status) : : "memory");
#endif
    return status >> 3 & 1;
}
static void restore_small(uint64_t mode) {
    __asm__ volatile("" : : : "memory");
#if defined(__SSE2__)
    _mm_setcsr((uint32_t)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#endif
    __asm__ volatile("" : : : "memory");
}

static void run_chunk_of(Tile *t, int64_t number, int last_one, Ahead *next) {
    if (t->a->kv_type != HALF) {
        run_chunk(t, number, last_one, next);
        return;
    }
    const uint64_t mode = flush_small();
    run_chunk(t, number, last_one, next);
    t->late = lost_small();
    if (t->late) run_chunk(t, number, last_one, next);
    t->late = 0;
    restore_small(mode);
}

/* Where a stored chunk's parts of a head are. */
static float *stored_at(const Attention *a, const Cursor *c, int64_t head, int64_t chunk) {
    const int64_t number = (chunk - c->reach.from) * c->plan.heads + head - c->head;
    return a->stored + (c->stored + number) * c->plan.size;
}
/* So many units of the cursor's tile have ended. Joins its chunks, of each of its heads, where all have. */
static void join_stored(Tile *t, const Cursor *c, int64_t units) {
    const Attention *a = t->a;
    int64_t *ended = a->tickets + c->split;
    if (__atomic_add_fetch(ended, units, __ATOMIC_ACQ_REL) < c->units) return;
    __atomic_store_n(ended, 0, __ATOMIC_RELAXED); /* for the next call */
    for (int64_t head = c->head; head < c->head + c->plan.heads; head++) {
        prepare(t, a, c, head);
        begin(t);
        for (int64_t chunk = c->reach.from; chunk < c->reach.end; chunk++) {
            Parts part;
            parts_at(&part, stored_at(a, c, head, chunk), t->rows, a->padded);
            join_parts(t, &t->whole, &part);
        }
        finish(t);
    }
}

/* Positions [from, from + CHUNK) where all queries see them and their slots lie one after the other, else NULL. */
static const char *piece_at(const Tile *t, int64_t from) {
    const Attention *a = t->a;
    const int64_t *slots = t->table + from;
    int64_t apart = from + CHUNK > t->prefix;
    for (int64_t i = 1; i < CHUNK && !apart; i++) apart = slots[i] != slots[0] + i;
    return apart ? NULL : (const char *)a->kv + slots[0] * a->kv_heads * a->parts * row_bytes(a);
}
/* Chunks [from, end) of the cursor's tile with all heads of keys, chunk by chunk, each a unit. The one behind them is
   fetched, too: it is likely the next of this thread. */
static void run_swept(Tile *t, const Attention *a, const Cursor *c, int64_t from, int64_t end, Ahead *next) {
    const int64_t share = CHUNK * a->parts * row_bytes(a); /* of a piece, while one head is computed */
    Prefetch prefetch = {.step = 64};
    t->prefetch = &prefetch;
    prepare(t, a, c, c->head);
    t->prefetched = t->fetched == piece_at(t, from * CHUNK) && t->fetched;
    for (int64_t chunk = from; chunk < end; chunk++) {
        const char *piece = chunk + 1 < c->reach.end ? piece_at(t, (chunk + 1) * CHUNK) : NULL;
        for (int64_t head = 0; head < a->kv_heads; head++) {
            prepare(t, a, c, head);
            prefetch.at = piece ? piece + head * share : (const char *)t->q;
            prefetch.end = piece ? prefetch.at + share : NULL;
            prefetch.lines = 0;
            parts_at(&t->part, stored_at(a, c, head, chunk), t->rows, a->padded);
            run_chunk_of(t, chunk, chunk + 1 == end, next);
            if (prefetch.lines) prefetch.step = least(share / prefetch.lines + 1, 64);
        }
        t->prefetched = piece != NULL;
        t->fetched = piece;
    }
    t->prefetched = 0;
    join_stored(t, c, end - from);
}
/* Chunks [from, end) of the cursor's tile with one head of keys, one of its units. */
static void run_unit(Tile *t, const Attention *a, const Cursor *c, int64_t from, int64_t end, Ahead *next) {
    Prefetch nothing = {.at = (const char *)t->q};
    const Parts own = t->part;
    prepare(t, a, c, c->head);
    t->prefetch = &nothing;
    if (!is_stored(c)) begin(t);
    for (int64_t chunk = from; chunk < end; chunk++) {
        if (is_stored(c)) parts_at(&t->part, stored_at(a, c, c->head, chunk), t->rows, a->padded);
        run_chunk_of(t, chunk, chunk + 1 == end, next);
        if (!is_stored(c)) join_parts(t, &t->whole, &t->part);
    }
    t->part = own;
    if (is_stored(c)) join_stored(t, c, 1);
    else finish(t);
}

void attend_anew(const Attention *a) { memset(a->taken, 0, (size_t)(a->workers->most * TAKEN) * sizeof *a->taken); }
/* Of all, in order, or of this thread's share. */
static int next_units(const Plan *p, Shares *s) {
    if (p->heads > 1) return take_units(s);
    s->from = take(s->taken, 1);
    s->to = s->from + 1;
    return s->from < p->units;
}
void attend_units(const Attention *a, int64_t thread, Ahead *next) {
    const Plan plan = plan_of(a);
    const Member me = {.number = thread, .size = a->workers->most};
    Shares some = shares_of(&me, plan.units, a->taken);
    Cursor c = cursor_of(plan);
    Tile t = {.a = a};
    scratch_of(&t, a, a->scratch + thread * thread_floats(a));
    while (next_units(&plan, &some))
        for (int64_t unit = some.from, end; unit < some.to; unit = end) {
            if (unit < c.unit) c = cursor_of(plan); /* of some other thread's share */
            while (unit >= c.unit + c.units) next_tile(a, &c);
            end = least(some.to, c.unit + c.units);
            const int64_t from = c.reach.from + (unit - c.unit) * plan.per;
            const int64_t to = least(c.reach.from + (end - c.unit) * plan.per, c.reach.end);
            (plan.heads > 1 ? run_swept : run_unit)(&t, a, &c, from, to, next);
        }
}

static void some_units(void *data) {
    Attention *a = data;
    Ahead nothing = {0};
    attend_units(a, take(&a->worker, 1), &nothing);
}

/* -- the module ---------------------------------------------------------------------------------------------------- */

/* Floats for the chunks of tiles that are split. Once so many, for the process takes no page before it is written: a
   size that follows what comes would grow for as long as a server runs. */
#define STORED (8 << 20)

/* heads, kv_heads, dim, threads -> floats of scratch, zeros at first: tickets, each thread's, and what is stored */
static int64_t scratch_size(int64_t *n) {
    const Attention a = {.heads = n[0], .kv_heads = n[1], .dim = n[2], .padded = round_up(n[2], LANES)};
    return 2 * (TICKETS + n[3] * TAKEN) + n[3] * thread_floats(&a) + STORED;
}

static void lay_out(Attention *a) {
    if (!a->values) a->values = a->dim;
    a->padded = round_up(a->dim, LANES);
    a->taken = a->tickets + TICKETS;
    a->scratch = (float *)(a->taken + a->workers->most * TAKEN);
    a->stored = a->scratch + a->workers->most * thread_floats(a);
    a->stored_size = (float *)a->tickets + a->scratch_size - a->stored;
}
Attention attention_of(const int64_t *n) {
    Attention a = {0};
    memcpy(&a, n, ATTENTION * sizeof *n);
    lay_out(&a);
    return a;
}
static void attend(int64_t *n) {
    Attention *a = (Attention *)n;
    const Batch *b = &a->batch;
    int64_t pairs = 0; /* of queries and keys */
    lay_out(a);
    attend_anew(a);
    for (int64_t i = 0; i < b->count; i++)
        pairs += b->spans ? b->spans[4 * i + 3] * (b->spans[4 * i + 2] + b->spans[4 * i + 3] / 2)
                          : b->nodes * (b->prefix[i] + b->depth / 2);
    run_unlocked(some_units, a, a->workers, pairs * a->heads * a->padded / 14000);
}

Function attention_functions[] = {
    {"scratch_size", .count = scratch_size, .given = 4},
    {"attend", attend, ATTENTION, sizeof(Attention), .doubles = 1},
    {0},
};
