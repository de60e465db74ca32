/* What lies between the GEMMs of a decoder on the CPU: norm, rotary embedding, gated MLP.

   As torch operations these cost more in calls than in arithmetic when a step has few rows. Storage is float32 or
   bfloat16 (`half` below), arithmetic float32. A row's result has the same bits whatever other rows there are: every
   sum runs in an order that the row alone decides, over 16 fixed lanes where it is a vector's. */

#include "cpu.h"

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
static void norm_float(const Rows *r, int64_t i) { norm_row(r, i, 0); }
static void norm_half(const Rows *r, int64_t i) { norm_row(r, i, 1); }
void norm_part(const Rows *r, int64_t i) { (r->half ? norm_half : norm_float)(r, i); }

/* cap * tanh(x / cap) = cap - 2 * cap / (1 + exp(2x / cap)). What is no number stays so: `sample` reports it. */
INLINE void cap_row(const Rows *r, int64_t i, const int half) {
    const float cap = (float)r->cap;
    for (int64_t c = 0; c < r->size; c += LANES) {
        const vf x = load(r->x, i * r->size + c, r->size - c, half);
        vf power = x * splat(2.88539008f / cap);
        power = select_f(above(power, splat(126.0f)), splat(126.0f), power);
        const vf capped = cap - 2 * cap / (1.0f + exp2_16(power));
        store(r->out, i * r->size + c, r->size - c, half, select_f(at_least(x, splat(-INFINITY)), capped, x));
    }
}
static void cap_float(const Rows *r, int64_t i) { cap_row(r, i, 0); }
static void cap_half(const Rows *r, int64_t i) { cap_row(r, i, 1); }

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
static void scaled_float(const Rows *r, int64_t i) { scaled_row(r, i, 0); }
static void scaled_half(const Rows *r, int64_t i) { scaled_row(r, i, 1); }

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

/* GELU, by tanh as above, or as it is: x times the normal distribution's share below it. For t = 1 / (1 + |x| / sqrt(8))
   the share beyond |x| is t / 2 * exp(P(t) - x^2 / 2), P by least squares, to 1e-7 of it. */
INLINE vf gelu_16(const vf x, const int exact) {
    const vf zero = {0};
    if (!exact) {
        vf power = x * (splat(-2.30220819f) - x * x * splat(0.102943240f));
        return x / (1.0f + exp2_16(select_f(above(power, splat(126.0f)), splat(126.0f), power)));
    }
    const vf size = select_f(above(zero, x), -x, x), t = 1.0f / (1.0f + size * splat(0.353553391f));
    vf p = splat(0.206196205f);
    p = p * t + splat(-0.966409563f);
    p = p * t + splat(1.63145094f);
    p = p * t + splat(-0.954544767f);
    p = p * t + splat(-0.157303727f);
    p = p * t + splat(0.023973153f);
    p = p * t + splat(0.0423512881f);
    p = p * t + splat(0.559396797f);
    p = p * t + splat(1.44053605f);
    p = p * t + splat(-1.82564631f);
    const vf beyond = splat(0.5f) * t * exp2_16(p - x * x * splat(0.721347520f));
    return x * select_f(above(x, zero), 1.0f - beyond, beyond);
}

/* The square of ReLU, GELU, or with a weight xIELU by it: rise, fall, beta, eps. What is no number stays so. */
INLINE void ungated_row(const Rows *r, int64_t i, const int half) {
    const float *how = r->weight;
    const vf zero = {0};
    const vf rise = splat(how ? how[0] : 0), fall = splat(how ? how[1] : 0), beta = splat(how ? how[2] : 0);
    const vf eps = splat(how ? how[3] : 0);
    for (int64_t c = 0, at = i * r->size; c < r->size; c += LANES) {
        const vf x = load(r->x, at + c, r->size - c, half);
        if (r->gelu) {
            store(r->out, at + c, r->size - c, half, gelu_16(x, r->gelu == 2));
            continue;
        }
        const vf least = select_f(above(x, eps), eps, x);
        const vf falling = (exp2_16(least * splat(1.44269504f)) - 1.0f - x) * fall;
        const vf rising = x * x * rise;
        const vf made = how ? select_f(above(x, zero), rising, falling) + beta * x : select_f(above(zero, x), zero, x * x);
        store(r->out, at + c, r->size - c, half, made);
    }
}
static void ungated_float(const Rows *r, int64_t i) { ungated_row(r, i, 0); }
static void ungated_half(const Rows *r, int64_t i) { ungated_row(r, i, 1); }

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
    for (int64_t h = from_head > turned ? from_head : turned; h < to_head; h++) {
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

/* -- the module: pointers and sizes as integers, unchecked; the classes of ops/cpu know the tensors ---------------- */

static PyObject *go(Rows *r, void *workers, int64_t elements) {
    RELEASE_GIL
    run(some_rows, r, workers, elements / 2000);
    TAKE_GIL
    Py_RETURN_NONE;
}

/* out, x, weight, rows, size, half, workers, wide, centred, bias or 0; eps */
static PyObject *py_rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[10];
    if (!numbers(args, given - 1, 10, n)) return NULL;
    Rows r = {.row = n[5] ? norm_half : norm_float,
              .out = POINTER(n[0]),
              .x = POINTER(n[1]),
              .weight = POINTER(n[2]),
              .rows = n[3],
              .size = n[4],
              .wide = n[7],
              .centred = n[8],
              .y = POINTER(n[9]),
              .eps = PyFloat_AsDouble(args[10])};
    return PyErr_Occurred() ? NULL : go(&r, POINTER(n[6]), n[3] * n[4]);
}

/* out, x, rows, size, half, workers, gelu */
static PyObject *py_silu_mul(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[7];
    if (!numbers(args, given, 7, n)) return NULL;
    Rows r = {
        .row = n[4] ? silu_half : silu_float, .out = POINTER(n[0]), .x = POINTER(n[1]), .rows = n[2], .size = n[3],
        .gelu = n[6]};
    return go(&r, POINTER(n[5]), 2 * n[2] * n[3]);
}

/* out, x, four numbers of xIELU or 0, rows, size, half, workers, gelu: 0, 1 by tanh, or 2 */
static PyObject *py_ungated(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[8];
    if (!numbers(args, given, 8, n)) return NULL;
    Rows r = {.row = n[5] ? ungated_half : ungated_float,
              .out = POINTER(n[0]),
              .x = POINTER(n[1]),
              .weight = POINTER(n[2]),
              .rows = n[3],
              .size = n[4],
              .gelu = n[7]};
    return go(&r, POINTER(n[6]), 2 * n[3] * n[4]);
}

/* out, x, rows, size, half, workers; cap */
static PyObject *py_soft_cap(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[6];
    if (!numbers(args, given - 1, 6, n)) return NULL;
    Rows r = {.row = n[4] ? cap_half : cap_float,
              .out = POINTER(n[0]),
              .x = POINTER(n[1]),
              .rows = n[2],
              .size = n[3],
              .cap = PyFloat_AsDouble(args[6])};
    return PyErr_Occurred() ? NULL : go(&r, POINTER(n[5]), 2 * n[2] * n[3]);
}

/* out, x, y or 0, rows, size, half, workers, scale of their type or 0; scale where it is 0 */
static PyObject *py_add_scaled(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[8];
    if (!numbers(args, given - 1, 8, n)) return NULL;
    Rows r = {.row = n[5] ? scaled_half : scaled_float,
              .out = POINTER(n[0]),
              .x = POINTER(n[1]),
              .y = POINTER(n[2]),
              .rows = n[3],
              .size = n[4],
              .scale = n[7] ? load(POINTER(n[7]), 0, 1, (int)n[5])[0] : PyFloat_AsDouble(args[8])};
    return PyErr_Occurred() ? NULL : go(&r, POINTER(n[6]), n[3] * n[4]);
}

/* qkv, kv, slots, cos, sin, rows, heads, kv_heads, dim, stride of qkv, stride of cos and sin, half, type of kv, norms
   of the heads of q and k or zeros, workers, whether these norms are wide, whether heads of v are normed, whether those of
   q and k are after they are turned; eps */
static PyObject *py_rope_write(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[19];
    if (!numbers(args, given - 1, 19, n)) return NULL;
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
              .kv_type = n[12],
              .q_norm = POINTER(n[13]),
              .k_norm = POINTER(n[14]),
              .wide = n[16],
              .v_norm = n[17],
              .after = n[18],
              .eps = PyFloat_AsDouble(args[19])};
    return PyErr_Occurred() ? NULL : go(&r, POINTER(n[15]), n[5] * (n[6] + 2 * n[7]) * n[8]);
}

static PyMethodDef methods[] = {
    {"rms_norm", (PyCFunction)(void (*)(void))py_rms_norm, METH_FASTCALL, NULL},
    {"silu_mul", (PyCFunction)(void (*)(void))py_silu_mul, METH_FASTCALL, NULL},
    {"ungated", (PyCFunction)(void (*)(void))py_ungated, METH_FASTCALL, NULL},
    {"soft_cap", (PyCFunction)(void (*)(void))py_soft_cap, METH_FASTCALL, NULL},
    {"add_scaled", (PyCFunction)(void (*)(void))py_add_scaled, METH_FASTCALL, NULL},
    {"rope_write", (PyCFunction)(void (*)(void))py_rope_write, METH_FASTCALL, NULL},
    {"layers_spare", (PyCFunction)(void (*)(void))py_layers_spare, METH_FASTCALL, NULL},
    {"layers", (PyCFunction)(void (*)(void))py_layers, METH_FASTCALL, NULL},
    {"experts_spare", (PyCFunction)(void (*)(void))py_experts_spare, METH_FASTCALL, NULL},
    {"experts", (PyCFunction)(void (*)(void))py_experts, METH_FASTCALL, NULL},
    {"replay", (PyCFunction)(void (*)(void))py_replay, METH_FASTCALL, NULL},
    {"product", (PyCFunction)(void (*)(void))py_product, METH_FASTCALL, NULL},
    {"block_gemm", (PyCFunction)(void (*)(void))py_block_gemm, METH_FASTCALL, NULL},
    {"block_pack", (PyCFunction)(void (*)(void))py_block_pack, METH_FASTCALL, NULL},
    {"block_quantize", (PyCFunction)(void (*)(void))py_block_quantize, METH_FASTCALL, NULL},
    {"block_rows", (PyCFunction)(void (*)(void))py_block_rows, METH_FASTCALL, NULL},
    {"panel_bytes", (PyCFunction)(void (*)(void))py_panel_bytes, METH_FASTCALL, NULL},
    {"sampling_rows", (PyCFunction)(void (*)(void))py_sampling_rows, METH_FASTCALL, NULL},
    {"draw", (PyCFunction)(void (*)(void))py_draw, METH_FASTCALL, NULL},
    {"edit_logits", (PyCFunction)(void (*)(void))py_edit_logits, METH_FASTCALL, NULL},
    {"descend", (PyCFunction)(void (*)(void))py_descend, METH_FASTCALL, NULL},
    {"heaviest", (PyCFunction)(void (*)(void))py_heaviest, METH_FASTCALL, NULL},
    {"gumbel", (PyCFunction)(void (*)(void))py_gumbel, METH_FASTCALL, NULL},
    {"top_tokens", (PyCFunction)(void (*)(void))py_top_tokens, METH_FASTCALL, NULL},
    {"following", (PyCFunction)(void (*)(void))py_following, METH_FASTCALL, NULL},
    {"simulate", (PyCFunction)(void (*)(void))py_simulate, METH_FASTCALL, NULL},
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
    find_threads();
    PyObject *made = PyModule_Create(&module);
    if (made &&
        (PyModule_AddFunctions(made, tree_methods) || PyModule_AddFunctions(made, assign_methods) ||
         PyModule_AddFunctions(made, ngram_methods) || PyModule_AddFunctions(made, merge_methods) ||
         PyModule_AddFunctions(made, suffix_methods) || PyModule_AddFunctions(made, head_methods) ||
         PyModule_AddFunctions(made, pair_methods) ||
         PyModule_AddFunctions(made, delta_methods) || PyModule_AddFunctions(made, conv_methods) ||
         PyModule_AddFunctions(made, attention_methods) || PyModule_AddFunctions(made, latent_methods) ||
         PyModule_AddFunctions(made, adapter_methods) || PyModule_AddFunctions(made, index_methods) ||
         PyModule_AddIntConstant(made, "has_product", has_product) ||
         PyModule_AddIntConstant(made, "has_openmp", has_openmp()) ||
         PyModule_AddIntConstant(made, "can_adapt", can_adapt()) ||
         PyModule_AddIntConstant(made, "interface", INTERFACE)))
        Py_CLEAR(made);
    return made;
}
