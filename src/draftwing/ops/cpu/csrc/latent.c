/* What latent attention does beside attention: each head's product with a matrix of its own, vectors of which the end is
   turned, and rows that go to the pool. The references are in ops/rope/spec.py and kv/pool.py.

   Matrices lie as `HeadGemm` of ops/gemm/cpu_heads.py packs them: panels of 64 outputs, in them inputs, in them the outputs.
   Inputs are summed in their order in float32, so a row has the same bits among any number of rows; with products that
   are fused with the sum. */

#include "cpu.h"

#define PANEL 64 /* outputs */
#define TALL 6   /* rows whose sums registers have room for */
#if PART == 16
#define PARTS(rows) 4 /* registers of outputs: of 32, or 16, one part is not for sums */
#elif PART == 8
#define PARTS(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#else
#define PARTS(rows) ((rows) <= 3 ? 4 : 2)
#endif

/* -- products of heads --------------------------------------------------------------------------------------------- */

typedef struct {
    const char *x, *weight;
    char *out;
    int64_t rows, heads, inputs, outputs, row_stride, head_stride; /* strides: elements of x */
    int64_t half, panels, next;                                    /* panels: of a head */
} HeadProduct;

INLINE pf widened_part(const void *p, const int half) {
    if (!half) return part_at(p);
    ph some;
    memcpy(&some, p, sizeof some);
    return (pf)(wider(some) << 16);
}

/* Outputs [0, 64) of a panel for `rows` rows of x; of these `left` are stored. */
INLINE void panel_rows(const HeadProduct *p, const char *x, const char *weight, char *out, int64_t left, const int half,
                       const int rows, const int parts) {
    const int64_t width = half ? 2 : 4;
    float sums[TALL][PANEL];
    for (int c = 0; c < PANEL; c += parts * PART) {
        pf sum[TALL][8];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < parts; i++) sum[r][i] = (pf){0};
        for (int64_t i = 0; i < p->inputs; i++) {
            pf w[8];
#pragma GCC unroll 8
            for (int v = 0; v < parts; v++)
                w[v] = widened_part(weight + (i * PANEL + c + v * PART) * width, half);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const char *at = x + (r * p->row_stride + i) * width;
                float one;
                if (half) {
                    uint16_t bits;
                    memcpy(&bits, at, 2);
                    const uint32_t wide = (uint32_t)bits << 16;
                    memcpy(&one, &wide, 4);
                } else memcpy(&one, at, 4);
                const pf all = one - (pf){0};
#pragma GCC unroll 8
                for (int v = 0; v < parts; v++) sum[r][v] = fused(all, w[v], sum[r][v]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < parts; v++) memcpy(sums[r] + c + v * PART, &sum[r][v], sizeof sum[r][v]);
    }
    for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < left && c < PANEL; c += LANES)
            store(out + r * p->heads * p->outputs * width, c, left - c, half, loadf(sums[r] + c));
}
INLINE void panel(const HeadProduct *p, int64_t head, int64_t number, const int half) {
    const int64_t width = half ? 2 : 4, left = p->outputs - number * PANEL;
    const char *weight = p->weight + (head * p->panels + number) * PANEL * p->inputs * width;
    const int64_t turns = (p->rows + TALL - 1) / TALL;
    for (int64_t turn = 0, row = 0; turn < turns; turn++) {
        const int64_t rows = (p->rows - row + turns - turn - 1) / (turns - turn);
        const char *x = p->x + (row * p->row_stride + head * p->head_stride) * width;
        char *out = p->out + ((row * p->heads + head) * p->outputs + number * PANEL) * width;
        switch (rows) {
            case 1: panel_rows(p, x, weight, out, left, half, 1, PARTS(1)); break;
            case 2: panel_rows(p, x, weight, out, left, half, 2, PARTS(2)); break;
            case 3: panel_rows(p, x, weight, out, left, half, 3, PARTS(3)); break;
            case 4: panel_rows(p, x, weight, out, left, half, 4, PARTS(4)); break;
            case 5: panel_rows(p, x, weight, out, left, half, 5, PARTS(5)); break;
            default: panel_rows(p, x, weight, out, left, half, 6, PARTS(6));
        }
        row += rows;
    }
}
static void panel_float(const HeadProduct *p, int64_t head, int64_t number) { panel(p, head, number, 0); }
static void panel_half(const HeadProduct *p, int64_t head, int64_t number) { panel(p, head, number, 1); }

static void some_panels(void *data) {
    HeadProduct *p = data;
    for (int64_t unit; (unit = take(&p->next, 1)) < p->heads * p->panels;)
        (p->half ? panel_half : panel_float)(p, unit / p->panels, unit % p->panels);
}

/* out [rows, heads, outputs], x [rows, heads, inputs], packed weights, rows, heads, inputs, outputs, strides of x's rows
   and heads, half, workers */
static PyObject *py_head_products(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[11];
    if (!numbers(args, given, 11, n)) return NULL;
    HeadProduct p = {.out = POINTER(n[0]),
                     .x = POINTER(n[1]),
                     .weight = POINTER(n[2]),
                     .rows = n[3],
                     .heads = n[4],
                     .inputs = n[5],
                     .outputs = n[6],
                     .row_stride = n[7],
                     .head_stride = n[8],
                     .half = n[9],
                     .panels = (n[6] + PANEL - 1) / PANEL};
    RELEASE_GIL
    run(some_panels, &p, POINTER(n[10]), p.rows * p.heads * p.inputs * p.outputs / 30000);
    TAKE_GIL
    Py_RETURN_NONE;
}

/* -- the same with weights in blocks ------------------------------------------------------------------------------- */

#define UNIT 16 /* outputs that are not shared, as in block_gemm.c */
#define TAKES 8 /* times that a thread takes units of few rows, whose weights it reads on end */

typedef struct {
    Team team;
    Product product; /* its outputs are those of all heads */
    const char *x;
    char *spare;
    int64_t heads, outputs, row_stride, head_stride; /* outputs: of a head; strides: elements of x */
} HeadBlocks;

static Rounded of_head(const HeadBlocks *j, int64_t head) {
    const int64_t rows = j->product.rows, inputs = j->product.inputs;
    return rounded_at(j->spare + head * rounded_size(rows, inputs), rows, inputs);
}
static void some_head_blocks(void *data) {
    HeadBlocks *j = data;
    const Member me = join(&j->team);
    const int64_t rows = j->product.rows, inputs = j->product.inputs, width = j->product.half ? 2 : 4;
    for (int64_t i = share(&me, rows * j->heads, 0); i < share(&me, rows * j->heads, 1); i++) {
        const int64_t row = i / j->heads, head = i % j->heads;
        const Rounded to = of_head(j, head);
        /* It takes rows to lie next to each other. */
        const char *x = j->x + (row * j->row_stride + head * j->head_stride - row * inputs) * width;
        round_part(&to, x, row, 0, inputs, j->product.half);
    }
    Ahead nothing = {0};
    meet(&me, &nothing);
    const int64_t of_one = j->outputs / UNIT, units = j->heads * of_one;
    const int64_t some = rows < UNIT ? units / (me.size * TAKES) + 1 : 1;
    for (int64_t first; (first = take(&j->product.next, some)) < units;) {
        const int64_t last = first + some < units ? first + some : units;
        for (int64_t from = first, to; from < last; from = to) { /* of one head */
            to = (from / of_one + 1) * of_one;
            if (to > last) to = last;
            Product p = j->product;
            p.rounded = of_head(j, from / of_one);
            multiply_blocks(&p, from * UNIT, to * UNIT);
        }
    }
}

/* out [rows, heads, outputs], x [rows, heads, inputs], blocks of all heads' outputs, rows, heads, inputs, outputs, a
   multiple of 16, strides of x's rows and heads, half, spare [heads, rounded_size], workers */
static PyObject *py_head_blocks(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[12];
    if (!numbers(args, given, 12, n)) return NULL;
    HeadBlocks j = {.product = {.out = POINTER(n[0]),
                                .blocks = POINTER(n[2]),
                                .rows = n[3],
                                .inputs = n[5],
                                .outputs = n[4] * n[6],
                                .half = n[9]},
                    .x = POINTER(n[1]),
                    .spare = POINTER(n[10]),
                    .heads = n[4],
                    .outputs = n[6],
                    .row_stride = n[7],
                    .head_stride = n[8]};
    RELEASE_GIL
    run_team(some_head_blocks, &j, &j.team, POINTER(n[11]));
    TAKE_GIL
    Py_RETURN_NONE;
}

/* -- vectors of which the end is turned ---------------------------------------------------------------------------- */

typedef struct {
    const char *plain, *turned, *cos, *sin;
    char *out;
    int64_t rows, heads, same, dim, half, next; /* same: elements that are not turned; dim: those that are */
    int64_t plain_row, plain_head, turned_row, turned_head, rope_row; /* strides, elements */
    float factor;
} Turning;

INLINE void turn_row(const Turning *t, int64_t row, const int half) {
    const int64_t mid = t->dim / 2, width = half ? 2 : 4, rope = row * t->rope_row;
    const vf factor = splat(t->factor);
    for (int64_t h = 0; h < t->heads; h++) {
        const char *plain = t->plain + (row * t->plain_row + h * t->plain_head) * width;
        const char *from = t->turned + (row * t->turned_row + h * t->turned_head) * width;
        char *out = t->out + (row * t->heads + h) * (t->same + t->dim) * width, *to = out + t->same * width;
        if (t->factor == 1) memcpy(out, plain, (size_t)(t->same * width));
        else
            for (int64_t c = 0; c < t->same; c += LANES)
                store(out, c, t->same - c, half, load(plain, c, t->same - c, half) * factor);
        for (int64_t c = 0; c < mid; c += LANES) {
            const int64_t n = mid - c;
            const vf a = load(from, c, n, half), b = load(from, mid + c, n, half);
            vf lower = rounded(a * load(t->cos, rope + c, n, half), half);
            vf upper = rounded(b * load(t->cos, rope + mid + c, n, half), half);
            lower += b * load(t->sin, rope + c, n, half);
            upper += a * load(t->sin, rope + mid + c, n, half);
            store(to, c, n, half, rounded(lower, half) * factor);
            store(to, mid + c, n, half, rounded(upper, half) * factor);
        }
    }
}
static void turn_some(void *data) {
    Turning *t = data;
    for (int64_t row; (row = take(&t->next, 1)) < t->rows;)
        if (t->half) turn_row(t, row, 1);
        else turn_row(t, row, 0);
}

/* out [rows, heads, same + dim], plain [rows, heads, same], turned [rows, heads, dim], cos, sin, rows, heads, same, dim,
   strides of plain's rows and heads, of turned's, of cos and sin, half, workers; factor */
static PyObject *py_concat_rope(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[16];
    if (!numbers(args, given - 1, 16, n)) return NULL;
    Turning t = {.out = POINTER(n[0]),
                 .plain = POINTER(n[1]),
                 .turned = POINTER(n[2]),
                 .cos = POINTER(n[3]),
                 .sin = POINTER(n[4]),
                 .rows = n[5],
                 .heads = n[6],
                 .same = n[7],
                 .dim = n[8],
                 .plain_row = n[9],
                 .plain_head = n[10],
                 .turned_row = n[11],
                 .turned_head = n[12],
                 .rope_row = n[13],
                 .half = n[14],
                 .factor = (float)PyFloat_AsDouble(args[16])};
    if (PyErr_Occurred()) return NULL;
    RELEASE_GIL
    run(turn_some, &t, POINTER(n[15]), t.rows * t.heads * (t.same + t.dim) / 2000);
    TAKE_GIL
    Py_RETURN_NONE;
}

/* -- rows to the pool ---------------------------------------------------------------------------------------------- */

/* pool [slots, size], slots, x [rows, size], rows, size, half of x, half of the pool */
static PyObject *py_keep_rows(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[7];
    if (!numbers(args, given, 7, n)) return NULL;
    const int64_t *slots = POINTER(n[1]), size = n[4];
    for (int64_t i = 0; i < n[3]; i++)
        for (int64_t c = 0; c < size; c += LANES)
            store(POINTER(n[0]), slots[i] * size + c, size - c, (int)n[6],
                  load(POINTER(n[2]), i * size + c, size - c, (int)n[5]));
    Py_RETURN_NONE;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}
PyMethodDef latent_methods[] = {
    METHOD(head_products), METHOD(head_blocks), METHOD(concat_rope), METHOD(keep_rows), {NULL, NULL, 0, NULL},
};
