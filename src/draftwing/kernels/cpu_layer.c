/* A whole decoder layer for few rows in bfloat16, in one call.

   Its seven parts are the functions that are called one by one for more rows, so the bits are the same. A part takes some
   microseconds to a few dozen, of which a call from Python is a large share. */

#include "cpu.h"

typedef struct {
    const void *attn_norm, *mlp_norm; /* attn_norm: NULL where the input comes normed */
    int64_t hidden, ffn;
    Product qkv, o, gate_up, down;
} Layer;

/* weight, bias, inputs, outputs, block */
static Product product_of(const int64_t *n) {
    return (Product){.weight = POINTER(n[0]), .bias = POINTER(n[1]), .inputs = n[2], .outputs = n[3], .block = n[4]};
}
/* attn_norm, mlp_norm, hidden, ffn; the four products, 5 numbers each */
static Layer layer_of(const int64_t *n) {
    return (Layer){.attn_norm = POINTER(n[0]), .mlp_norm = POINTER(n[1]), .hidden = n[2], .ffn = n[3],
                   .qkv = product_of(n + 4), .o = product_of(n + 9), .gate_up = product_of(n + 14),
                   .down = product_of(n + 19)};
}

static void norm(void *out, const void *x, const void *weight, int64_t rows, int64_t size, double eps) {
    Rows r = {.row = norm_half, .out = out, .x = x, .weight = weight, .rows = rows, .size = size, .eps = eps};
    some_rows(&r);
}
static void product(Product p, void *out, const void *x, const void *residual, int64_t rows, int64_t threads) {
    p.out = out;
    p.x = x;
    p.residual = residual;
    p.rows = rows;
    multiply(&p, threads);
}

/* x, normed (0: x is normed here), out, spare [rows * (hidden + qkv + attended + hidden + 2 * ffn + ffn)], slots, cos,
   sin, their stride, rows; numbers of the layer; those of attention, whose out and q are set here; eps */
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
    Rows rope = {.row = rope_half, .out = qkv, .kv = (void *)a.kv, .slots = POINTER(n[4]), .cos = POINTER(n[5]),
                 .sin = POINTER(n[6]), .rope_stride = n[7], .rows = rows, .heads = a.heads, .kv_heads = a.kv_heads,
                 .dim = a.dim, .stride = layer.qkv.outputs};
    Rows silu = {.row = silu_half, .out = gated, .x = gate_up, .rows = rows, .size = ffn};
    a.q = qkv;
    a.q_stride = layer.qkv.outputs;
    a.out = attended;
    Py_BEGIN_ALLOW_THREADS
    if (!n[1]) norm(normed, x, layer.attn_norm, rows, hidden, eps);
    product(layer.qkv, qkv, n[1] ? POINTER(n[1]) : normed, NULL, rows, threads);
    some_rows(&rope);
    attend(&a);
    product(layer.o, middle, attended, x, rows, threads);
    norm(normed, middle, layer.mlp_norm, rows, hidden, eps);
    product(layer.gate_up, gate_up, normed, NULL, rows, threads);
    some_rows(&silu);
    product(layer.down, POINTER(n[2]), gated, middle, rows, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
