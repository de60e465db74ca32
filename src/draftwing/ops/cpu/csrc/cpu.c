/* What lies between the GEMMs of a decoder on the CPU: norm, rotary embedding, paged attention, gated MLP.

   As torch operations these cost more in calls than in arithmetic when a step has few rows. Storage is float32 or
   bfloat16 (`half` below), arithmetic float32. A row's result has the same bits whatever other rows there are: every
   sum runs in an order that the row alone decides, over 16 fixed lanes where it is a vector's. */

#include "cpu.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

/* glibc 2.34 gave these new versions. By their first ones, which it keeps, a module that is built there runs from glibc
   2.27 on. */
#if defined(__GLIBC__) && defined(__x86_64__)
#define FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FIRST_GLIBC "GLIBC_2.17"
#endif
#ifdef FIRST_GLIBC
__asm__(".symver dlopen, dlopen@" FIRST_GLIBC);
__asm__(".symver dlsym, dlsym@" FIRST_GLIBC);
__asm__(".symver pthread_create, pthread_create@" FIRST_GLIBC);
__asm__(".symver pthread_join, pthread_join@" FIRST_GLIBC);
#endif

#define MAX_THREADS 256
#define SPIN 20000 /* looks for the others, some 30 us, before a thread lets some other run, which may be one of them */
#define BLOCK_LINES 48 /* of what is read next, fetched with a block of keys or values */
/* Sums that registers have room for: of keys, and parts of each of four rows. */
#define KEYS (PART == 16 ? 16 : 8)
#define PARTS (PART == 16 ? 4 : 2)
#define TILE_ROWS 32 /* query heads that share what is staged of a block of keys */

#define FOLD(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
/* The sums of 16 vectors, in their order. Each is summed in the order of `sum_lanes`: its upper half to the lower one,
   and so on. */
#if PART == 16
INLINE void sums16(const float (*v)[LANES], float *to) {
    pf a[8], b[4], c[2], d;
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const pf x = part_at(v[j]), y = part_at(v[j + 8]);
        a[j] = FOLD(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               FOLD(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        b[j] = FOLD(a[j], a[j + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               FOLD(a[j], a[j + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
        c[j] = FOLD(b[j], b[j + 2], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               FOLD(b[j], b[j + 2], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    d = FOLD(c[0], c[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
        FOLD(c[0], c[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    d = FOLD(d, d, 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
    memcpy(to, &d, sizeof d);
}
#elif PART == 8
INLINE void sums16(const float (*v)[LANES], float *to) {
    pf a[16], b[8], c[4], d[2];
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) a[j] = part_at(v[j]) + part_at(v[j] + 8);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
        b[j] = FOLD(a[j], a[j + 8], 0, 1, 2, 3, 8, 9, 10, 11) + FOLD(a[j], a[j + 8], 4, 5, 6, 7, 12, 13, 14, 15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        c[j] = FOLD(b[j], b[j + 4], 0, 1, 8, 9, 4, 5, 12, 13) + FOLD(b[j], b[j + 4], 2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
        d[j] = FOLD(c[j], c[j + 2], 0, 2, 8, 10, 4, 6, 12, 14) + FOLD(c[j], c[j + 2], 1, 3, 9, 11, 5, 7, 13, 15);
    const pf low = FOLD(d[0], d[1], 0, 8, 2, 10, 1, 9, 3, 11), high = FOLD(d[0], d[1], 4, 12, 6, 14, 5, 13, 7, 15);
    memcpy(to, &low, sizeof low);
    memcpy(to + 8, &high, sizeof high);
}
#else
INLINE void sums16(const float (*v)[LANES], float *to) {
    pf a[16], b[8];
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++)
        a[j] = (part_at(v[j]) + part_at(v[j] + 8)) + (part_at(v[j] + 4) + part_at(v[j] + 12));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) b[j] = FOLD(a[j], a[j + 8], 0, 1, 4, 5) + FOLD(a[j], a[j + 8], 2, 3, 6, 7);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const pf c = FOLD(b[j], b[j + 4], 0, 2, 4, 6) + FOLD(b[j], b[j + 4], 1, 3, 5, 7);
        to[j] = c[0], to[j + 8] = c[1], to[j + 4] = c[2], to[j + 12] = c[3];
    }
}
#endif

/* -- threads ------------------------------------------------------------------------------------------------------ */

/* torch's own OpenMP threads where they are GNU's: they are warm, and threads of another pool would have to wait for
   cores on which these spin. Otherwise threads are made for the call, for which the work must be larger. */
static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*gomp_threads)(void); /* of the team that the caller is in */

static void *enter(void *job) {
    void **pair = job;
    ((void (*)(void *))pair[0])(pair[1]);
    return NULL;
}
/* size: told how many threads there are, before the calling one works. */
static void run_threads(void (*work)(void *), void *data, int64_t threads, int64_t *size) {
    pthread_t made[MAX_THREADS];
    int count = 0;
    void *job[2] = {(void *)work, data};
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    while (count < threads - 1 && !pthread_create(&made[count], NULL, enter, job)) count++;
    __atomic_store_n(size, count + 1, __ATOMIC_RELEASE);
    work(data);
    while (count) pthread_join(made[--count], NULL);
}
void run(void (*work)(void *), void *data, int64_t threads, int64_t cost) {
    int64_t size;
    if (threads <= 1 || cost < (gomp_parallel ? 8 : 200)) work(data);
    else if (gomp_parallel) gomp_parallel(work, data, (unsigned)threads, 0);
    else run_threads(work, data, threads, &size);
}

void run_team(void (*work)(void *), void *data, Team *team, int64_t threads) {
    if (threads > 1 && gomp_parallel) gomp_parallel(work, data, (unsigned)threads, 0); /* or fewer: see `join` */
    else run_threads(work, data, threads, &team->size);
}
Member join(Team *team) {
    Member me = {.team = team, .number = take(&team->entered, 1)};
    while (!(me.size = __atomic_load_n(&team->size, __ATOMIC_ACQUIRE)))
        if (gomp_parallel) __atomic_store_n(&team->size, gomp_threads(), __ATOMIC_RELEASE);
        else sched_yield();
    return me;
}
void meet(const Member *me, Ahead *next) {
    Team *team = me->team;
    const int64_t round = __atomic_load_n(&team->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == me->size) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int64_t turn = 0; __atomic_load_n(&team->round, __ATOMIC_ACQUIRE) == round; turn++) {
        fetch(next, 2);
        if (turn > SPIN) sched_yield();
    }
}

/* -- row by row: norm, gated MLP, rotary embedding ---------------------------------------------------------------- */

static void some_rows(void *data) {
    Rows *r = data;
    for (int64_t first; (first = take(&r->next, 8)) < r->rows;)
        for (int64_t i = first; i < first + 8 && i < r->rows; i++) r->row(r, i);
}

/* x / sqrt(mean(x^2) + eps), rounded to the storage, times weight: rounded twice, as in transformers; once where the
   weight is wide. */
INLINE void norm_row(const Rows *r, int64_t i, const int half) {
    const int64_t n = r->size, at = i * n;
    vf squares = {0};
    for (int64_t c = 0; c < n; c += LANES) {
        vf x = load(r->x, at + c, n - c, half);
        squares += x * x;
    }
    const vf factor = splat(1.0f / sqrtf(sum_lanes(squares) / (float)n + (float)r->eps));
    for (int64_t c = 0; c < n; c += LANES) {
        vf x = load(r->x, at + c, n - c, half) * factor;
        if (half && r->wide) x *= load(r->weight, c, n - c, 0);
        else x = rounded(x, half) * load(r->weight, c, n - c, half);
        store(r->out, at + c, n - c, half, x);
    }
}
static void norm_float(const Rows *r, int64_t i) { norm_row(r, i, 0); }
static void norm_half(const Rows *r, int64_t i) { norm_row(r, i, 1); }
void norm_part(const Rows *r, int64_t i) { (r->half ? norm_half : norm_float)(r, i); }

/* silu(gate) * up of a row [gate, up], elements [from, to); silu(x) = x / (1 + exp(-x)), rounded before it is
   multiplied, as in torch. Or gelu(gate), by tanh: x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y)),
   y = sqrt(2 / pi) * (x + 0.044715 x^3). */
INLINE void silu_row(const Rows *r, int64_t i, int64_t from, int64_t to, const int half) {
    const int64_t n = r->size;
    for (int64_t c = from; c < to; c += LANES) {
        vf gate = load(r->x, 2 * i * n + c, to - c, half), up = load(r->x, (2 * i + 1) * n + c, to - c, half);
        vf power = gate * splat(-1.44269504f);
        if (r->gelu) power = gate * (splat(-2.30220819f) - gate * gate * splat(0.102943240f));
        power = select_f(above(power, splat(126.0f)), splat(126.0f), power);
        store(r->out, i * n + c, to - c, half, rounded(gate / (1.0f + exp2_16(power)), half) * up);
    }
}
static void silu_float(const Rows *r, int64_t i) { silu_row(r, i, 0, r->size, 0); }
static void silu_half(const Rows *r, int64_t i) { silu_row(r, i, 0, r->size, 1); }
void silu_part(const Rows *r, int64_t i, int64_t from, int64_t to) {
    if (r->half) silu_row(r, i, from, to, 1);
    else silu_row(r, i, from, to, 0);
}

/* Turns the queries of a row [q, k, v] where they stand; turned keys, and values, go to their slot in the pool. Of
   heads [from, to), perhaps normed before. The sine comes with its sign (rope_table); rounded as `rotate` does. */
INLINE void rope_row(const Rows *r, int64_t i, int64_t from_head, int64_t to_head, const int half, const int kv_half) {
    const int64_t dim = r->dim, mid = dim / 2, width = half ? 2 : 4, kv_width = kv_half ? 2 : 4;
    const int64_t rope = i * r->rope_stride;
    char *row = (char *)r->out + i * r->stride * width;
    char *slot = (char *)r->kv + r->slots[i] * r->kv_heads * 2 * dim * kv_width;
    const int64_t turned = r->heads + r->kv_heads;
    for (int64_t h = from_head; h < to_head && h < turned; h++) {
        char *from = row + h * dim * width;
        char *to = h < r->heads ? from : slot + (h - r->heads) * 2 * dim * kv_width;
        const int to_half = h < r->heads ? half : kv_half;
        const void *weight = h < r->heads ? r->q_norm : r->k_norm;
        if (weight) {
            const Rows norm = {.out = from, .x = from, .weight = weight, .size = dim, .wide = r->wide, .eps = r->eps};
            norm_row(&norm, 0, half);
        }
        for (int64_t c = 0; c < mid; c += LANES) {
            const int64_t n = mid - c;
            vf a = load(from, c, n, half), b = load(from, mid + c, n, half);
            vf lower = rounded(a * load(r->cos, rope + c, n, half), half);
            vf upper = rounded(b * load(r->cos, rope + mid + c, n, half), half);
            lower += b * load(r->sin, rope + c, n, half);
            upper += a * load(r->sin, rope + mid + c, n, half);
            store(to, c, n, to_half, lower);
            store(to, mid + c, n, to_half, upper);
        }
    }
    for (int64_t h = from_head > turned ? from_head : turned; h < to_head; h++) {
        char *to = slot + (2 * (h - turned) + 1) * dim * kv_width;
        for (int64_t c = 0; c < dim; c += LANES)
            store(to, c, dim - c, kv_half, load(row + h * dim * width, c, dim - c, half));
    }
}
void rope_part(const Rows *r, int64_t i, int64_t from, int64_t to) {
    if (r->half) rope_row(r, i, from, to, 1, 1);
    else if (r->kv_half) rope_row(r, i, from, to, 0, 1);
    else rope_row(r, i, from, to, 0, 0);
}
static void rope_all(const Rows *r, int64_t i) { rope_part(r, i, 0, r->heads + 2 * r->kv_heads); }

/* -- attention ---------------------------------------------------------------------------------------------------- */

/* Queries come in spans: a row's tree, or a chunk. A query sees `count` keys in position order: the page table's
   entries [0, prefix), then those of its path (trees), or the positions up to its own (chunks). Keys go in blocks of
   16 absolute positions. A tile of a span's queries shares the blocks that look the same to all of them: the whole
   ones before a tree, all of a chunk's. With a window a query's first key is low, and of the block that it lies in
   those before have weight 0. */

/* The keys (values: which = 1) of 16 places from `first` on, as floats [16][padded]; zeros from `end` on. */
INLINE void stage_of(const Attention *a, float *to, const int64_t *table, int64_t prefix, const int64_t *path,
                     int64_t first, int64_t end, int64_t head, int which, const int half) {
    const int64_t dim = a->dim, width = half ? 2 : 4;
    for (int64_t j = first; j < first + LANES; j++, to += a->padded) {
        if (j + LANES < prefix) { /* slots lie anywhere: no hardware foresees the next block's; values follow keys */
            const int64_t at = ((table[j + LANES] * a->kv_heads + head) * 2 + which) * dim;
            const char *ahead = (const char *)a->kv + at * width;
            for (int64_t c = 0; c < (2 - which) * dim * width; c += 64) __builtin_prefetch(ahead + c);
        }
        if (j >= end) {
            memset(to, 0, (size_t)a->padded * 4);
            continue;
        }
        const int64_t slot = table[j < prefix ? j : prefix + path[j - prefix]];
        const int64_t at = ((slot * a->kv_heads + head) * 2 + which) * dim;
        to_floats(to, (const char *)a->kv + at * width, dim, half);
        for (int64_t c = dim; c < a->padded; c++) to[c] = 0;
    }
}
static void stage(const Attention *a, float *to, const int64_t *table, int64_t prefix, const int64_t *path,
                  int64_t first, int64_t end, int64_t head, int which) {
    if (a->kv_half) stage_of(a, to, table, prefix, path, first, end, head, which, 1);
    else stage_of(a, to, table, prefix, path, first, end, head, which, 0);
}

/* scores[16] = q . keys: sums of 16 lanes each, KEYS at a time, and of those the sums. */
INLINE void score_sized(const float *q, const float *keys, const int64_t padded, float *scores) {
    float lanes[LANES][LANES];
    for (int first = 0; first < LANES; first += KEYS)
        for (int part = 0; part < LANES; part += PART) {
            pf sum[KEYS];
            for (int j = 0; j < KEYS; j++) sum[j] = (pf){0};
            for (int64_t c = part; c < padded; c += LANES) {
                const pf x = part_at(q + c);
                for (int j = 0; j < KEYS; j++) sum[j] += x * part_at(keys + (first + j) * padded + c);
            }
            for (int j = 0; j < KEYS; j++) memcpy(lanes[first + j] + part, sum + j, sizeof sum[j]);
        }
    sums16(lanes, scores);
}
static void score_block(const float *q, const float *keys, int64_t padded, float *scores) {
    if (padded == 64) score_sized(q, keys, 64, scores); /* constant strides: half the time */
    else if (padded == 128) score_sized(q, keys, 128, scores);
    else score_sized(q, keys, padded, scores);
}

/* acc[r] += weights[r][j] * values[j], one j after the other: `rows` rows, `parts` parts of each. */
INLINE void value_part(float *acc, const float *weights, int64_t ld, const float *values, int64_t padded, int64_t count,
                       const int rows, const int parts) {
    pf sum[4][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < parts; c++) sum[r][c] = part_at(acc + r * padded + c * PART);
    for (int64_t j = 0; j < count; j++)
        for (int c = 0; c < parts; c++) {
            const pf value = part_at(values + j * padded + c * PART);
            for (int r = 0; r < rows; r++) sum[r][c] += (weights[r * ld + j] - (pf){0}) * value;
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < parts; c++) memcpy(acc + r * padded + c * PART, &sum[r][c], sizeof sum[r][c]);
}
INLINE void value_rows(float *acc, const float *weights, int64_t ld, const float *values, int64_t padded, int64_t count,
                       const int rows) {
    int64_t c = 0;
    for (; c + PARTS * PART <= padded; c += PARTS * PART)
        value_part(acc + c, weights, ld, values + c, padded, count, rows, PARTS);
    for (; c < padded; c += PART) value_part(acc + c, weights, ld, values + c, padded, count, rows, 1);
}
static void value_block(float *acc, const float *weights, int64_t ld, const float *values, int64_t padded,
                        int64_t count, int64_t rows) {
    for (; rows >= 4; rows -= 4, acc += 4 * padded, weights += 4 * ld)
        value_rows(acc, weights, ld, values, padded, count, 4);
    if (rows == 3) value_rows(acc, weights, ld, values, padded, count, 3);
    if (rows == 2) value_rows(acc, weights, ld, values, padded, count, 2);
    if (rows == 1) value_rows(acc, weights, ld, values, padded, count, 1);
}

/* Scores to weights exp2(score - max) of keys [low, count), and their sum: 16 lanes, each in position order, and then
   the sink's, a score without a key (or NULL). */
static float softmax(float *s, int64_t low, int64_t count, const float *sink) {
    const int64_t from = low / LANES * LANES, last = (count - 1) / LANES * LANES;
    for (int64_t j = from; j < low; j++) s[j] = -INFINITY;
    for (int64_t j = count; j < last + LANES; j++) s[j] = -INFINITY;
    const float joins = sink ? *sink * 1.44269504f : -INFINITY;
    vf most = loadf(s + from), sum = {0};
    for (int64_t j = from + LANES; j <= last; j += LANES) {
        most = larger(loadf(s + j), most);
    }
    float max = most[0];
    for (int l = 1; l < LANES; l++) max = most[l] > max ? most[l] : max;
    max = joins > max ? joins : max;
    for (int64_t j = from; j <= last; j += LANES) {
        vf x = exp2_16(loadf(s + j) - splat(max));
        sum += x;
        storef(s + j, x);
    }
    const vf weight = exp2_16(splat(joins) - splat(max));
    return sum_lanes(sum) + weight[0];
}

void attend_item(const Attention *a, int64_t item, float *scratch, Ahead *next) {
    const int64_t head = item % a->kv_heads, tile = item / a->kv_heads % a->tiles;
    const int64_t span = item / a->kv_heads / a->tiles, group = a->heads / a->kv_heads, padded = a->padded;
    const int64_t *spans = a->spans ? a->spans + 4 * span : NULL;
    const int64_t row = spans ? spans[0] : span;
    const int64_t offset = spans ? spans[1] : a->starts ? a->starts[span] : span * a->nodes, first = tile * a->tile;
    const int64_t length = spans ? spans[3] : a->starts ? a->starts[span + 1] - offset : a->nodes;
    const int64_t n = length - first < a->tile ? length - first : a->tile;
    if (n <= 0) return;
    const int64_t *table = a->table + a->rows[row] * a->table_stride, *path = NULL;
    const int64_t prefix = spans ? spans[2] + first + n : a->prefix[row];
    const int64_t shared = spans ? (prefix + LANES - 1) / LANES : prefix / LANES, ld = a->keys;
    float *q = scratch, *acc = q + n * group * padded, *staged = acc + n * group * padded;
    float *scores = staged + LANES * padded;
    int64_t counts[TILE_ROWS], lows[TILE_ROWS], lowest = INT64_MAX;
    const float scale = 1.44269504f / sqrtf((float)(a->scalar ? a->scalar : a->dim)); /* for exp2 */
    for (int64_t i = 0; i < n; i++) {
        counts[i] = spans ? spans[2] + first + i + 1 : prefix + a->path_len[offset + first + i];
        lows[i] = a->window && counts[i] > a->window ? counts[i] - a->window : 0;
        lowest = lows[i] < lowest ? lows[i] : lowest;
        for (int64_t g = 0; g < group; g++)
            for (int64_t c = 0; c < padded; c += LANES) {
                const int64_t at = (offset + first + i) * a->q_stride + (head * group + g) * a->dim + c;
                storef(q + (i * group + g) * padded + c, load(a->q, at, a->dim - c, (int)a->half) * scale);
            }
    }
    memset(acc, 0, (size_t)(n * group * padded) * 4);
    for (int which = 0; which < 2; which++) { /* 0: scores from the keys, 1: sums of the values */
        for (int64_t block = lowest / LANES; block < shared; block++) {
            const int64_t at = block * LANES;
            stage(a, staged, table, prefix, NULL, at, prefix, head, which);
            fetch(next, BLOCK_LINES);
            for (int64_t i = 0; i < n; i++) {
                const int64_t left = counts[i] - at, mine = i * group;
                if (left <= 0 || at + LANES <= lows[i]) continue;
                if (which)
                    value_block(acc + mine * padded, scores + mine * ld + at, ld, staged, padded,
                                left < LANES ? left : LANES, group);
                else
                    for (int64_t r = mine; r < mine + group; r++)
                        score_block(q + r * padded, staged, padded, scores + r * ld + at);
            }
        }
        for (int64_t i = 0; i < n && !spans; i++) { /* a tree's last blocks, which differ from node to node */
            path = a->path + (offset + first + i) * a->depth;
            const int64_t from = lows[i] / LANES > shared ? lows[i] / LANES : shared;
            for (int64_t at = from * LANES; at < counts[i]; at += LANES) {
                const int64_t left = counts[i] - at, mine = i * group;
                stage(a, staged, table, prefix, path, at, counts[i], head, which);
                fetch(next, BLOCK_LINES);
                if (which)
                    value_block(acc + mine * padded, scores + mine * ld + at, ld, staged, padded,
                                left < LANES ? left : LANES, group);
                else
                    for (int64_t r = mine; r < mine + group; r++)
                        score_block(q + r * padded, staged, padded, scores + r * ld + at);
            }
        }
        for (int64_t r = 0; r < n * group && !which; r++) /* q is done with: its place takes the sum */
            q[r * padded] = softmax(scores + r * ld, lows[r / group], counts[r / group],
                                    a->sinks ? a->sinks + head * group + r % group : NULL);
    }
    for (int64_t r = 0; r < n * group; r++)
        for (int64_t c = 0; c < a->dim; c += LANES) {
            const int64_t at = ((offset + first + r / group) * a->heads + head * group + r % group) * a->dim + c;
            store(a->out, at, a->dim - c, (int)a->half, loadf(acc + r * padded + c) / q[r * padded]);
        }
    for (int64_t i = 0; i < n && a->rounded; i++)
        round_part(a->rounded, a->out, offset + first + i, head * group * a->dim, (head + 1) * group * a->dim, a->half);
}

static void some_tiles(void *data) {
    Attention *a = data;
    float *scratch = a->scratch + take(&a->worker, 1) * a->scratch_size;
    Ahead nothing = {0};
    for (int64_t i; (i = take(&a->next, 1)) < a->items;) /* longest first */
        attend_item(a, a->items - 1 - i, scratch, &nothing);
}

/* -- the module: pointers and sizes as integers, unchecked; the classes of ops/cpu know the tensors ---------------- */

static PyObject *go(Rows *r, int64_t threads, int64_t elements) {
    Py_BEGIN_ALLOW_THREADS
    run(some_rows, r, threads, elements / 2000);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* out, x, weight, rows, size, half, threads, wide; eps */
static PyObject *py_rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[8];
    if (!numbers(args, given - 1, 8, n)) return NULL;
    Rows r = {.row = n[5] ? norm_half : norm_float,
              .out = POINTER(n[0]),
              .x = POINTER(n[1]),
              .weight = POINTER(n[2]),
              .rows = n[3],
              .size = n[4],
              .wide = n[7],
              .eps = PyFloat_AsDouble(args[8])};
    return PyErr_Occurred() ? NULL : go(&r, n[6], n[3] * n[4]);
}

/* out, x, rows, size, half, threads, gelu */
static PyObject *py_silu_mul(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[7];
    if (!numbers(args, given, 7, n)) return NULL;
    Rows r = {
        .row = n[4] ? silu_half : silu_float, .out = POINTER(n[0]), .x = POINTER(n[1]), .rows = n[2], .size = n[3],
        .gelu = n[6]};
    return go(&r, n[5], 2 * n[2] * n[3]);
}

/* qkv, kv, slots, cos, sin, rows, heads, kv_heads, dim, stride of qkv, stride of cos and sin, half, half of kv, norms
   of the heads of q and k or zeros, threads, whether these norms are wide; eps */
static PyObject *py_rope_write(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[17];
    if (!numbers(args, given - 1, 17, n)) return NULL;
    Rows r = {.row = rope_all,
              .out = POINTER(n[0]),
              .kv = POINTER(n[1]),
              .slots = POINTER(n[2]),
              .cos = POINTER(n[3]),
              .sin = POINTER(n[4]),
              .rows = n[5],
              .heads = n[6],
              .kv_heads = n[7],
              .dim = n[8],
              .stride = n[9],
              .rope_stride = n[10],
              .half = n[11],
              .kv_half = n[12],
              .q_norm = POINTER(n[13]),
              .k_norm = POINTER(n[14]),
              .wide = n[16],
              .eps = PyFloat_AsDouble(args[17])};
    return PyErr_Occurred() ? NULL : go(&r, n[15], n[5] * (n[6] + 2 * n[7]) * n[8]);
}

/* Scores of a query: full vectors, and one more, for powers of two would have all queries share a few cache lines. */
INLINE int64_t keys_of(int64_t most) { return (most + LANES - 1) / LANES * LANES + LANES; }
INLINE int64_t tile_of(int64_t group) { return group < TILE_ROWS ? TILE_ROWS / group : 1; }

/* heads, kv_heads, dim, most keys of a query -> floats of scratch that a thread needs */
static PyObject *py_scratch_size(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[4];
    if (!numbers(args, given, 4, n)) return NULL;
    const int64_t padded = (n[2] + LANES - 1) / LANES * LANES, rows = n[0] / n[1] * tile_of(n[0] / n[1]);
    return PyLong_FromLongLong(rows * (2 * padded + keys_of(n[3])) + LANES * padded);
}

Attention attention_of(const int64_t *n) {
    Attention a = {.out = POINTER(n[0]),
                   .q = POINTER(n[1]),
                   .kv = POINTER(n[2]),
                   .q_stride = n[3],
                   .heads = n[4],
                   .kv_heads = n[5],
                   .dim = n[6],
                   .half = n[7],
                   .kv_half = n[8],
                   .rows = POINTER(n[9]),
                   .table = POINTER(n[10]),
                   .table_stride = n[11],
                   .prefix = POINTER(n[12]),
                   .path = POINTER(n[13]),
                   .path_len = POINTER(n[14]),
                   .spans = POINTER(n[15]),
                   .starts = POINTER(n[16]),
                   .count = n[17],
                   .nodes = n[18],
                   .depth = n[19],
                   .scratch = POINTER(n[20]),
                   .scratch_size = n[21],
                   .threads = n[22],
                   .window = n[24],
                   .sinks = POINTER(n[25]),
                   .scalar = n[26]};
    a.padded = (a.dim + LANES - 1) / LANES * LANES;
    a.tile = tile_of(a.heads / a.kv_heads);
    a.tiles = (a.nodes + a.tile - 1) / a.tile;
    a.tile = (a.nodes + a.tiles - 1) / a.tiles; /* all alike */
    a.keys = keys_of(n[23]);
    a.items = a.count * a.tiles * a.kv_heads;
    return a;
}
static void attend(Attention *a) {
    int64_t pairs = 0; /* of queries and keys */
    for (int64_t i = 0; i < a->count; i++)
        pairs += a->spans ? a->spans[4 * i + 3] * (a->spans[4 * i + 2] + a->spans[4 * i + 3] / 2)
                          : a->nodes * (a->prefix[i] + a->depth / 2);
    run(some_tiles, a, a->items > 1 ? a->threads : 1, pairs * a->heads * a->padded / 14000);
}
static PyObject *py_attend(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[ATTENTION];
    if (!numbers(args, given, ATTENTION, n)) return NULL;
    Attention a = attention_of(n);
    Py_BEGIN_ALLOW_THREADS
    attend(&a);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"rms_norm", (PyCFunction)(void (*)(void))py_rms_norm, METH_FASTCALL, NULL},
    {"silu_mul", (PyCFunction)(void (*)(void))py_silu_mul, METH_FASTCALL, NULL},
    {"rope_write", (PyCFunction)(void (*)(void))py_rope_write, METH_FASTCALL, NULL},
    {"scratch_size", (PyCFunction)(void (*)(void))py_scratch_size, METH_FASTCALL, NULL},
    {"attend", (PyCFunction)(void (*)(void))py_attend, METH_FASTCALL, NULL},
    {"layers_spare", (PyCFunction)(void (*)(void))py_layers_spare, METH_FASTCALL, NULL},
    {"layers", (PyCFunction)(void (*)(void))py_layers, METH_FASTCALL, NULL},
    {"experts_spare", (PyCFunction)(void (*)(void))py_experts_spare, METH_FASTCALL, NULL},
    {"experts", (PyCFunction)(void (*)(void))py_experts, METH_FASTCALL, NULL},
    {"product", (PyCFunction)(void (*)(void))py_product, METH_FASTCALL, NULL},
    {"block_gemm", (PyCFunction)(void (*)(void))py_block_gemm, METH_FASTCALL, NULL},
    {"block_pack", (PyCFunction)(void (*)(void))py_block_pack, METH_FASTCALL, NULL},
    {"block_quantize", (PyCFunction)(void (*)(void))py_block_quantize, METH_FASTCALL, NULL},
    {"block_rows", (PyCFunction)(void (*)(void))py_block_rows, METH_FASTCALL, NULL},
    {"panel_bytes", (PyCFunction)(void (*)(void))py_panel_bytes, METH_FASTCALL, NULL},
    {"sampling_rows", (PyCFunction)(void (*)(void))py_sampling_rows, METH_FASTCALL, NULL},
    {"draw", (PyCFunction)(void (*)(void))py_draw, METH_FASTCALL, NULL},
    {"heaviest", (PyCFunction)(void (*)(void))py_heaviest, METH_FASTCALL, NULL},
    {"gumbel", (PyCFunction)(void (*)(void))py_gumbel, METH_FASTCALL, NULL},
    {"top_tokens", (PyCFunction)(void (*)(void))py_top_tokens, METH_FASTCALL, NULL},
    {"following", (PyCFunction)(void (*)(void))py_following, METH_FASTCALL, NULL},
    {"cpu_features", (PyCFunction)(void (*)(void))py_cpu_features, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
#ifndef ISA /* the instruction set that it is compiled for: see ops/cpu/isa.py */
#define ISA plain
#endif
#ifndef INTERFACE /* what the functions take and give: see ops/cpu/isa.py */
#define INTERFACE 0
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define JOINED_OF(a, b) a##b
#define JOINED(a, b) JOINED_OF(a, b)
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_" TEXT(ISA), .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC JOINED(PyInit__, ISA)(void) {
    void *gomp = dlopen("libgomp.so.1", RTLD_NOLOAD | RTLD_LAZY); /* only if torch has brought it */
    if (gomp) *(void **)&gomp_threads = dlsym(gomp, "omp_get_num_threads");
    if (gomp_threads) *(void **)&gomp_parallel = dlsym(gomp, "GOMP_parallel");
    PyObject *made = PyModule_Create(&module);
    if (made &&
        (PyModule_AddFunctions(made, tree_methods) || PyModule_AddFunctions(made, assign_methods) ||
         PyModule_AddFunctions(made, ngram_methods) || PyModule_AddFunctions(made, merge_methods) ||
         PyModule_AddFunctions(made, suffix_methods) || PyModule_AddFunctions(made, head_methods) ||
         PyModule_AddFunctions(made, delta_methods) || PyModule_AddFunctions(made, conv_methods) ||
         PyModule_AddIntConstant(made, "has_product", has_product) ||
         PyModule_AddIntConstant(made, "interface", INTERFACE)))
        Py_CLEAR(made);
    return made;
}
