/* What lies between the GEMMs of a decoder on the CPU: norm, rotary embedding, gated MLP.

   As torch operations these cost more in calls than in arithmetic when a step has few rows. Storage is float32 or
   bfloat16 (`half` below), arithmetic float32. A row's result has the same bits whatever other rows there are: every
   sum runs in an order that the row alone decides, over 16 fixed lanes where it is a vector's. */

#include "cpu.h"

#define ALPHA 1.702f /* as in ops/experts/spec.py */

/* -- row by row: norm, gated MLP, rotary embedding ---------------------------------------------------------------- */

static void some_rows(void *data) {
    Rows *r = data;
    for (int64_t first; (first = take(&r->next, 8)) < r->rows;)
        for (int64_t i = first; i < first + 8 && i < r->rows; i++) r->row(r, i);
}

/* x / sqrt(mean(x^2) + eps), rounded to the storage, times weight: rounded twice, as in transformers; once where the
   weight is wide. Where it is centred, a multiple of 16 values, the mean is taken from x first, perhaps y added last, and
   that is rounded once, too. */
INLINE void norm_row(const Rows *r, int64_t i, const int half) {
    const int64_t n = r->size, at = i * n;
    const int thin = half && !r->wide; /* whether weights are in bfloat16 */
    vf squares = {0}, total = {0};
    for (int64_t c = 0; r->centred && c < n; c += LANES) total += load(r->x, at + c, n - c, half);
    const vf mean = splat(r->centred ? sum_lanes(total) / (float)n : 0.0f);
    for (int64_t c = 0; c < n; c += LANES) {
        vf x = load(r->x, at + c, n - c, half);
        if (r->centred) x -= mean;
        squares += x * x;
    }
    const vf factor = splat(1.0f / sqrtf(sum_lanes(squares) / (float)n + (float)r->eps));
    for (int64_t c = 0; c < n; c += LANES) {
        vf x = load(r->x, at + c, n - c, half);
        x = (r->centred ? x - mean : x) * factor;
        if (!r->weight) {}
        else if (r->centred) x *= load(r->weight, c, n - c, thin);
        else if (half && r->wide) x *= load(r->weight, c, n - c, 0);
        else x = rounded(x, half) * load(r->weight, c, n - c, half);
        if (r->centred && r->y) x += load(r->y, c, n - c, thin);
        store(r->out, at + c, n - c, half, x);
    }
}
void norm_part(const Rows *r, int64_t i) { BY_HALF(r->half, norm_row, r, i); }

INLINE void cap_row(const Rows *r, int64_t i, const int half) {
    const float cap = (float)r->cap;
    for (int64_t c = 0, at = i * r->size; c < r->size; c += LANES)
        store(r->out, at + c, r->size - c, half,
              soft_capped(load(r->x, at + c, r->size - c, half), cap, 2.88539008f / cap));
}
static void cap_any(const Rows *r, int64_t i) { BY_HALF(r->half, cap_row, r, i); }

/* (x + y) * scale, the sum rounded before; x * scale where there is no y. */
INLINE void scaled_row(const Rows *r, int64_t i, const int half) {
    const vf scale = splat((float)r->scale);
    for (int64_t c = 0, at = i * r->size; c < r->size; c += LANES) {
        const int64_t left = r->size - c;
        vf x = load(r->x, at + c, left, half);
        if (r->y) x = rounded(x + load(r->y, at + c, left, half), half);
        store(r->out, at + c, left, half, x * scale);
    }
}
static void scaled_any(const Rows *r, int64_t i) { BY_HALF(r->half, scaled_row, r, i); }

/* silu(gate) * up of a row [gate, up], elements [from, to); silu(x) = x / (1 + exp(-x)), rounded before it is
   multiplied, as in torch. Or gelu(gate), by tanh: x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y)),
   y = sqrt(2 / pi) * (x + 0.044715 x^3). Or with a cap gate * sigmoid(ALPHA * gate) * (up + 1), of gates of at most that
   and ups within it. */
INLINE void silu_row(const Rows *r, int64_t i, int64_t from, int64_t to, const int half) {
    const int64_t n = r->size;
    const vf most = splat((float)r->cap);
    for (int64_t c = from; c < to; c += LANES) {
        vf gate = load(r->x, 2 * i * n + c, to - c, half), up = load(r->x, (2 * i + 1) * n + c, to - c, half);
        if (r->cap != 0) {
            gate = select_f(above(gate, most), most, gate);
            up = select_f(above(up, most), most, up);
            up = select_f(above(-most, up), -most, up);
            const vf share = over_exp2(splat(1.0f), gate * splat(-1.44269504f * ALPHA));
            store(r->out, i * n + c, to - c, half, gate * share * (up + 1.0f));
            continue;
        }
        store(r->out, i * n + c, to - c, half, rounded(r->gelu ? gelu_by_tanh(gate) : silu(gate), half) * up);
    }
}
void silu_part(const Rows *r, int64_t i, int64_t from, int64_t to) { BY_HALF(r->half, silu_row, r, i, from, to); }
static void silu_any(const Rows *r, int64_t i) { silu_part(r, i, 0, r->size); }

/* GELU, by tanh as above, or as it is: x times the normal distribution's share below it. For t = 1 / (1 + |x| / sqrt(8))
   the share beyond |x| is t / 2 * exp(P(t) - x^2 / 2), P by least squares, to 1e-7 of it. */
INLINE vf gelu_16(const vf x, const int exact) {
    const vf zero = {0};
    if (!exact) return gelu_by_tanh(x);
    const vf size = select_f(above(zero, x), -x, x), t = 1.0f / (1.0f + size * splat(0.353553391f));
    const vf p = POLYNOMIAL(t, 0.206196205f, -0.966409563f, 1.63145094f, -0.954544767f, -0.157303727f, 0.023973153f,
                            0.0423512881f, 0.559396797f, 1.44053605f, -1.82564631f);
    const vf beyond = splat(0.5f) * t * exp2_16(p - x * x * splat(0.721347520f));
    return x * select_f(above(x, zero), 1.0f - beyond, beyond);
}

/* The square of ReLU, GELU, or with a weight xIELU by it: rise, fall, beta, eps, of elements [from, to). What is no number
   stays so. */
INLINE void ungated_row(const Rows *r, int64_t i, int64_t from, int64_t to, const int half) {
    const float *how = r->weight;
    const vf zero = {0};
    const vf rise = splat(how ? how[0] : 0), fall = splat(how ? how[1] : 0), beta = splat(how ? how[2] : 0);
    const vf eps = splat(how ? how[3] : 0);
    for (int64_t c = from, at = i * r->size; c < to; c += LANES) {
        const vf x = load(r->x, at + c, to - c, half);
        if (r->gelu) {
            store(r->out, at + c, to - c, half, gelu_16(x, r->gelu == 2));
            continue;
        }
        const vf least = select_f(above(x, eps), eps, x);
        const vf falling = (exp2_16(least * splat(1.44269504f)) - 1.0f - x) * fall;
        const vf rising = x * x * rise;
        const vf made = how ? select_f(above(x, zero), rising, falling) + beta * x : select_f(above(zero, x), zero, x * x);
        store(r->out, at + c, to - c, half, made);
    }
}
void ungated_part(const Rows *r, int64_t i, int64_t from, int64_t to) { BY_HALF(r->half, ungated_row, r, i, from, to); }
static void ungated_any(const Rows *r, int64_t i) { ungated_part(r, i, 0, r->size); }

/* A head to its place in the pool. wide: memory for what is rounded to 8 bits. */
INLINE void keep_row(char *to, const char *from, float *wide, int64_t dim, const int half, const int kv_type) {
    void *stored = kv_type == INT8 ? (char *)wide : to;
    for (int64_t c = 0; c < dim; c += LANES)
        store(stored, c, dim - c, kv_type == HALF, load(from, c, dim - c, half));
    if (kv_type == INT8) round_row(to, wide, dim);
}

/* Turns the queries of a row [q, k, v] where they stand; turned keys, and values, go to their slot in the pool. Of
   heads [from, to), perhaps normed before, or after, and then keys are turned where they stand, too. The sine comes with its sign (rope_table); rounded as `rotate` does. */
INLINE void rope_row(const Rows *r, int64_t i, int64_t from_head, int64_t to_head, const int half, const int kv_type) {
    const int64_t dim = r->dim, mid = dim / 2, width = half ? 2 : 4, rope = i * r->rope_stride;
    const int64_t bytes = kv_type == INT8 ? dim + SCALE_BYTES : dim * (kv_type == HALF ? 2 : 4);
    char *row = (char *)r->out + i * r->stride * width;
    char *slot = (char *)r->kv + r->slots[i] * r->kv_heads * 2 * bytes;
    const int64_t turned = r->heads + r->kv_heads;
    float wide[kv_type == INT8 ? MOST_DIM : 1];
    for (int64_t h = from_head; h < to_head && h < turned; h++) {
        char *from = row + h * dim * width, *key = slot + (h - r->heads) * 2 * bytes;
        const int is_key = h >= r->heads, stays = !is_key || r->after, round = !stays && kv_type == INT8;
        void *to = stays ? from : round ? (char *)wide : key;
        const int to_half = stays ? half : kv_type == HALF;
        const void *weight = is_key ? r->k_norm : r->q_norm;
        const Rows norm = {.out = from, .x = from, .weight = weight, .size = dim, .wide = r->wide, .eps = r->eps};
        if (weight && !r->after) norm_row(&norm, 0, half);
        for (int64_t c = 0; c < mid; c += LANES) {
            const int64_t n = mid - c;
            vf a = load(from, c, n, half), b = load(from, mid + c, n, half);
            vf lower = rounded(a * load(r->cos, rope + c, n, half), half);
            vf upper = rounded(b * load(r->cos, rope + mid + c, n, half), half);
            lower += b * load(r->sin, rope + c, n, half);
            upper += a * load(r->sin, rope + mid + c, n, half);
            store(to, c, n, to_half, round ? rounded(lower, half) : lower);
            store(to, mid + c, n, to_half, round ? rounded(upper, half) : upper);
        }
        if (round) round_row(key, wide, dim);
        if (!r->after) continue;
        norm_row(&norm, 0, half);
        if (is_key) keep_row(key, from, wide, dim, half, kv_type);
    }
    for (int64_t h = most(from_head, turned); h < to_head; h++) {
        char *value = slot + (2 * (h - turned) + 1) * bytes, *from = row + h * dim * width;
        if (r->v_norm) {
            const Rows norm = {.out = from, .x = from, .size = dim, .eps = r->eps};
            norm_row(&norm, 0, half);
        }
        keep_row(value, from, wide, dim, half, kv_type);
    }
}
void rope_part(const Rows *r, int64_t i, int64_t from, int64_t to) {
    if (r->kv_type == INT8 && r->half) rope_row(r, i, from, to, 1, INT8);
    else if (r->kv_type == INT8) rope_row(r, i, from, to, 0, INT8);
    else if (r->half) rope_row(r, i, from, to, 1, HALF);
    else if (r->kv_type == HALF) rope_row(r, i, from, to, 0, HALF);
    else rope_row(r, i, from, to, 0, FLOAT);
}
static void rope_all(const Rows *r, int64_t i) { rope_part(r, i, 0, r->heads + 2 * r->kv_heads); }

/* -- the module ---------------------------------------------------------------------------------------------------- */

/* Of out and x, the first of n, and from `at` on rows, size, half, workers. */
static void go(Rows r, const int64_t *n, int64_t at, void (*row)(const Rows *, int64_t), int64_t times) {
    r.row = row;
    r.out = POINTER(n[0]), r.x = POINTER(n[1]), r.rows = n[at], r.size = n[at + 1], r.half = n[at + 2];
    run_unlocked(some_rows, &r, POINTER(n[at + 3]), times * r.rows * r.size / 2000);
}
static double double_at(const int64_t *n) {
    double value;
    memcpy(&value, n, sizeof value);
    return value;
}

/* out, x, weight, rows, size, half, workers, wide, centred, bias or 0; eps */
static void rms_norm(int64_t *n) {
    const Rows r = {.weight = POINTER(n[2]), .wide = n[7], .centred = n[8], .y = POINTER(n[9]), .eps = double_at(n + 10)};
    go(r, n, 3, norm_part, 1);
}

/* out, x, rows, size, half, workers, gelu; cap */
static void silu_mul(int64_t *n) { go((Rows){.gelu = n[6], .cap = double_at(n + 7)}, n, 2, silu_any, 2); }

/* out, x, four numbers of xIELU or 0, rows, size, half, workers, gelu: 0, 1 by tanh, or 2 */
static void ungated(int64_t *n) {
    go((Rows){.weight = POINTER(n[2]), .gelu = n[7]}, n, 3, ungated_any, 2);
}

/* out, x, rows, size, half, workers; cap */
static void soft_cap(int64_t *n) { go((Rows){.cap = double_at(n + 6)}, n, 2, cap_any, 2); }

/* out, x, y or 0, rows, size, half, workers, scale of their type or 0; scale where it is 0 */
static void add_scaled(int64_t *n) {
    const double scale = n[7] ? load(POINTER(n[7]), 0, 1, (int)n[5])[0] : double_at(n + 8);
    go((Rows){.y = POINTER(n[2]), .scale = scale}, n, 3, scaled_any, 1);
}

static void rope_write(int64_t *n) {
    Rows *r = (Rows *)n;
    r->row = rope_all;
    run_unlocked(some_rows, r, r->workers, r->rows * (r->heads + 2 * r->kv_heads) * r->dim / 2000);
}

Function row_functions[] = {
    {"rms_norm", rms_norm, 10, .doubles = 1},
    {"silu_mul", silu_mul, 7, .doubles = 1},
    {"ungated", ungated, 8},
    {"soft_cap", soft_cap, 6, .doubles = 1},
    {"add_scaled", add_scaled, 8, .doubles = 1},
    {"rope_write", rope_write, UP_TO(Rows, eps), sizeof(Rows), .doubles = 1},
    {0},
};
