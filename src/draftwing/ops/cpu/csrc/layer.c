/* Decoder layers for few rows in bfloat16, all of a model's in one call.

   Their parts are the functions that are called one by one for more rows, so the bits are the same. A part takes some
   microseconds to a few dozen, of which a call from Python, or the start of threads, is a large share. What is done
   with the outputs of a GEMM one by one is done by the thread that has them in its cache, and each thread norms all
   rows for itself, which takes as long as to wait for one that does.

   A GEMM takes as long as its weight takes to read. So that memory is never idle, a thread that attends, norms or
   waits for others fetches the beginning of its share of the next weight into its cache. */

#include "cpu.h"

#define MOST_AHEAD (384 << 10) /* bytes of a weight that wait in a thread's cache */
#define ROW_LINES 32           /* that are fetched while a row is normed */

typedef struct {
    const void *attn_norm, *mlp_norm; /* attn_norm: NULL where the input comes normed */
    int64_t hidden, ffn;
    Product qkv, o, gate_up, down;
} Layer;

/* weight, bias, inputs, outputs, block, scales, offsets */
static Product product_of(const int64_t *n) {
    return (Product){.weight = POINTER(n[0]),
                     .bias = POINTER(n[1]),
                     .inputs = n[2],
                     .outputs = n[3],
                     .block = n[4],
                     .scales = POINTER(n[5]),
                     .offsets = POINTER(n[6])};
}
/* attn_norm, mlp_norm, hidden, ffn; the four GEMMs, 7 numbers each */
static Layer layer_of(const int64_t *n) {
    return (Layer){.attn_norm = POINTER(n[0]),
                   .mlp_norm = POINTER(n[1]),
                   .hidden = n[2],
                   .ffn = n[3],
                   .qkv = product_of(n + 4),
                   .o = product_of(n + 11),
                   .gate_up = product_of(n + 18),
                   .down = product_of(n + 25)};
}

/* The share of a GEMM's outputs that a thread has, in units of `size` outputs each. */
typedef struct {
    int64_t from, to;
} Range;
static Range range_of(const Member *me, int64_t units, int64_t size) {
    return (Range){share(me, units, 0) * size, share(me, units, 1) * size};
}
static Ahead weight_of(const Product *p, Range outputs) {
    const int64_t bytes = p->inputs * (p->scales ? 1 : 2), most = MOST_AHEAD;
    const char *at = (const char *)p->weight + outputs.from * bytes,
               *end = (const char *)p->weight + outputs.to * bytes;
    return (Ahead){at, end - at < most ? end : at + most, NULL, NULL};
}
static Ahead both(Ahead first, Ahead then) { return (Ahead){first.at, first.end, then.at, then.end}; }
static void product(Product p, Range outputs, void *out, const void *x, const void *residual, int64_t rows) {
    p.out = out;
    p.x = x;
    p.residual = residual;
    p.rows = rows;
    multiply_part(&p, outputs.from, outputs.to);
}

typedef struct {
    Team team;
    int64_t count, rows;                    /* count: of layers */
    const int64_t *layers, *pools, *places; /* addresses of their numbers and of their keys and values; see py_layers */
    const uint16_t *x, *normed;
    uint16_t *outs, *spare;
    Rows rope;
    Attention attention;
    double eps;
} Layers;

static void norm(const Layers *j, uint16_t *out, const void *x, const void *weight, int64_t size, Ahead *next) {
    const Rows r = {.out = out, .x = x, .weight = weight, .size = size, .eps = j->eps};
    for (int64_t i = 0; i < j->rows; i++) {
        fetch(next, ROW_LINES);
        norm_half(&r, i);
    }
}

static void some_of_layers(void *data) {
    Layers *j = data;
    const Member me = join(&j->team);
    const int64_t rows = j->rows;
    Attention a = j->attention;
    float *scratch = a.scratch + me.number * a.scratch_size;
    const uint16_t *x = j->x;
    Ahead next = {0};
    for (int64_t l = 0; l < j->count; l++) {
        const Layer layer = layer_of(POINTER(j->layers[l]));
        const int64_t hidden = layer.hidden, ffn = layer.ffn;
        uint16_t *qkv = j->spare, *attended = qkv + rows * layer.qkv.outputs;
        uint16_t *middle = attended + rows * layer.o.inputs, *gate_up = middle + rows * hidden;
        uint16_t *gated = gate_up + rows * 2 * ffn, *normed = gated + rows * ffn + me.number * rows * hidden;
        uint16_t *out = j->outs + j->places[l] * rows * hidden;
        Rows rope = j->rope;
        rope.out = qkv;
        rope.stride = layer.qkv.outputs;
        rope.kv = POINTER(j->pools[l]);
        const Rows silu = {.out = gated, .x = gate_up, .size = ffn};
        const Range heads = range_of(&me, a.heads + 2 * a.kv_heads, 1), blocks = range_of(&me, ffn / 32, 32);
        const Range turned = {heads.from * a.dim, heads.to * a.dim}, halves = range_of(&me, hidden / 32, 32);

        if (!j->normed) norm(j, normed, x, layer.attn_norm, hidden, &next);
        if (!me.number) j->attention.next = 0; /* nobody attends now */
        product(layer.qkv, turned, qkv, j->normed ? j->normed : normed, NULL, rows);
        for (int64_t i = 0; i < rows; i++) rope_part(&rope, i, heads.from, heads.to);
        next = both(weight_of(&layer.o, halves), weight_of(&layer.gate_up, blocks));
        meet(&me, &next);

        a.q = qkv;
        a.q_stride = layer.qkv.outputs;
        a.out = attended;
        a.kv = rope.kv;
        for (int64_t i; (i = take(&j->attention.next, 1)) < a.items;) attend_item(&a, a.items - 1 - i, scratch, &next);
        meet(&me, &next);

        product(layer.o, halves, middle, attended, x, rows);
        meet(&me, &next);

        norm(j, normed, middle, layer.mlp_norm, hidden, &next);
        product(layer.gate_up, blocks, gate_up, normed, NULL, rows);
        product(layer.gate_up, (Range){ffn + blocks.from, ffn + blocks.to}, gate_up, normed, NULL, rows);
        for (int64_t i = 0; i < rows; i++) silu_part(&silu, i, blocks.from, blocks.to);
        next = weight_of(&layer.down, halves);
        meet(&me, &next);

        product(layer.down, halves, out, gated, middle, rows);
        x = out;
        if (l + 1 == j->count) break;
        const Layer following = layer_of(POINTER(j->layers[l + 1]));
        next = weight_of(&following.qkv, turned);
        meet(&me, &next);
    }
}

/* x, normed (0: each layer norms its input; otherwise there is one layer), outs [.., rows, hidden], layers, addresses
   of their numbers, of their keys and values, and which of outs each writes; spare [rows * (qkv + attended + hidden +
   2 * ffn + ffn + threads * hidden)], slots, cos, sin, their stride, rows; numbers of attention, whose out, q and kv
   are set here; eps. The layers are of one size. The size of a head and of the MLP are multiples of 32. */
PyObject *py_layers(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[13 + ATTENTION];
    if (!numbers(args, given - 1, 13 + ATTENTION, n)) return NULL;
    const double eps = PyFloat_AsDouble(args[13 + ATTENTION]);
    if (PyErr_Occurred()) return NULL;
    const Attention a = attention_of(n + 13);
    Layers job = {.x = POINTER(n[0]),
                  .normed = POINTER(n[1]),
                  .outs = POINTER(n[2]),
                  .count = n[3],
                  .layers = POINTER(n[4]),
                  .pools = POINTER(n[5]),
                  .places = POINTER(n[6]),
                  .spare = POINTER(n[7]),
                  .rows = n[12],
                  .attention = a,
                  .eps = eps,
                  .rope = {.slots = POINTER(n[8]),
                           .cos = POINTER(n[9]),
                           .sin = POINTER(n[10]),
                           .rope_stride = n[11],
                           .heads = a.heads,
                           .kv_heads = a.kv_heads,
                           .dim = a.dim}};
    Py_BEGIN_ALLOW_THREADS
    run_team(some_of_layers, &job, &job.team, a.threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
