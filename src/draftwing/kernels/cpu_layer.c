/* A whole decoder layer for few rows in bfloat16, in one call.

   Its parts are the functions that are called one by one for more rows, so the bits are the same. A part takes some
   microseconds to a few dozen, of which a call from Python is a large share. What is done with the outputs of a product
   one by one is done by the thread that has them in its cache. */

#include "cpu.h"

typedef struct {
    const void *attn_norm, *mlp_norm; /* attn_norm: NULL where the input comes normed */
    int64_t hidden, ffn;
    Product qkv, o, gate_up, down;
} Layer;

/* weight, bias, inputs, outputs, block, scales, offsets */
static Product product_of(const int64_t *n) {
    return (Product){.weight = POINTER(n[0]), .bias = POINTER(n[1]), .inputs = n[2], .outputs = n[3], .block = n[4],
                     .scales = POINTER(n[5]), .offsets = POINTER(n[6])};
}
/* attn_norm, mlp_norm, hidden, ffn; the four products, 7 numbers each */
static Layer layer_of(const int64_t *n) {
    return (Layer){.attn_norm = POINTER(n[0]), .mlp_norm = POINTER(n[1]), .hidden = n[2], .ffn = n[3],
                   .qkv = product_of(n + 4), .o = product_of(n + 11), .gate_up = product_of(n + 18),
                   .down = product_of(n + 25)};
}

static void norm(void *out, const void *x, const void *weight, int64_t rows, int64_t size, double eps) {
    const Rows r = {.out = out, .x = x, .weight = weight, .size = size, .eps = eps};
    for (int64_t i = 0; i < rows; i++) norm_half(&r, i);
}
static void product(Product p, void *out, const void *x, const void *residual, int64_t rows, int64_t threads) {
    p.out = out;
    p.x = x;
    p.residual = residual;
    p.rows = rows;
    multiply(&p, threads);
}

/* A product and what is done with its outputs, by the thread that has them at hand. */
typedef struct {
    Product product;
    Rows then;
    int64_t units, size, shares, next; /* of a thread's share: heads, or blocks of the MLP; outputs of a unit */
} Joined;

static void turned_some(void *data) {
    Joined *j = data;
    for (int64_t share; (share = take(&j->next, 1)) < j->shares;) {
        const int64_t from = share * j->units / j->shares, to = (share + 1) * j->units / j->shares;
        multiply_part(&j->product, from * j->size, to * j->size);
        for (int64_t i = 0; i < j->product.rows; i++) rope_part(&j->then, i, from, to);
    }
}
static void gated_some(void *data) {
    Joined *j = data;
    for (int64_t share; (share = take(&j->next, 1)) < j->shares;) {
        const int64_t from = share * j->units / j->shares * j->size, to = (share + 1) * j->units / j->shares * j->size;
        const int64_t ffn = j->then.size;
        multiply_part(&j->product, from, to);
        multiply_part(&j->product, ffn + from, ffn + to);
        for (int64_t i = 0; i < j->product.rows; i++) silu_part(&j->then, i, from, to);
    }
}
static void joined(void (*work)(void *), Product p, void *out, const void *x, Rows then, int64_t units, int64_t size,
                   int64_t rows, int64_t threads) {
    p.out = out;
    p.x = x;
    p.rows = rows;
    Joined j = {.product = p, .then = then, .units = units, .size = size, .shares = threads};
    run(work, &j, threads, p.inputs * p.outputs / 20000);
}

/* x, normed (0: x is normed here), out, spare [rows * (hidden + qkv + attended + hidden + 2 * ffn + ffn)], slots, cos,
   sin, their stride, rows; numbers of the layer; those of attention, whose out and q are set here; eps. The size of a
   head and of the MLP are multiples of 32. */
PyObject *py_layer(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[10 + ATTENTION];
    if (!numbers(args, given - 1, 10 + ATTENTION, n)) return NULL;
    const double eps = PyFloat_AsDouble(args[10 + ATTENTION]);
    if (PyErr_Occurred()) return NULL;
    Layer layer = layer_of(POINTER(n[9]));
    Attention a = attention_of(n + 10);
    const int64_t rows = n[8], threads = a.threads, hidden = layer.hidden, ffn = layer.ffn;
    const uint16_t *x = POINTER(n[0]);
    uint16_t *normed = POINTER(n[3]), *qkv = normed + rows * hidden, *attended = qkv + rows * layer.qkv.outputs;
    uint16_t *middle = attended + rows * layer.o.inputs, *gate_up = middle + rows * hidden;
    uint16_t *gated = gate_up + rows * 2 * ffn;
    const Rows rope = {.out = qkv, .kv = (void *)a.kv, .slots = POINTER(n[4]), .cos = POINTER(n[5]),
                       .sin = POINTER(n[6]), .rope_stride = n[7], .heads = a.heads, .kv_heads = a.kv_heads,
                       .dim = a.dim, .stride = layer.qkv.outputs};
    const Rows silu = {.out = gated, .x = gate_up, .size = ffn};
    a.q = qkv;
    a.q_stride = layer.qkv.outputs;
    a.out = attended;
    Py_BEGIN_ALLOW_THREADS
    if (!n[1]) norm(normed, x, layer.attn_norm, rows, hidden, eps);
    joined(turned_some, layer.qkv, qkv, n[1] ? POINTER(n[1]) : normed, rope, a.heads + 2 * a.kv_heads,
           a.dim, rows, threads);
    attend(&a);
    product(layer.o, middle, attended, x, rows, threads);
    norm(normed, middle, layer.mlp_norm, rows, hidden, eps);
    joined(gated_some, layer.gate_up, gate_up, normed, silu, ffn / 32, 32, rows, threads);
    product(layer.down, POINTER(n[2]), gated, middle, rows, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
