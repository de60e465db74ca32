/* Decoder layers, all of a model's in one call: in bfloat16 for few rows, with weights in blocks for any number.

   Their parts are the functions that are called one by one otherwise, so the bits are the same. A part takes some
   microseconds to a few dozen, of which a call from Python, or the start of threads, is a large share. What is done
   with the outputs of a GEMM one by one is done by the thread that has them in its cache; that includes rounding to 8
   bits what the next GEMM reads. Of few rows each thread norms all for itself, which takes as long as to wait for one
   that does.

   A GEMM takes as long as its weight takes to read. So that memory is never idle, a thread that attends, norms or
   waits for others fetches the beginning of its share of the next weight into its cache. */

#include "blocks.h"

#define MOST_AHEAD (384 << 10) /* bytes of a weight that wait in a thread's cache */
#define ROW_LINES 32           /* that are fetched while a row is normed */
#define OWN_ROWS 8             /* up to so many each thread norms for itself */
#define UNIT 32                /* outputs of a GEMM that threads take at a time */
enum { QKV, O, GATE_UP, DOWN, GEMMS };

/* Of its numbers: those up to the GEMMs, numbers of these, and of each the address of its `Adapted`, or 0. */
typedef struct {
    const void *attn_norm, *mlp_norm; /* attn_norm: NULL where the input comes normed */
    const void *q_norm, *k_norm;      /* or NULL */
    int64_t hidden, ffn, window;
    const float *sinks;
    int64_t scalar; /* window, sinks, scalar: as in `Attention` */
    Product qkv, o, gate_up, down;
    const Adapted *adapted[GEMMS]; /* what adapters add to each, or NULL */
} Layer;
static Layer layer_of(const int64_t *n, int64_t half) {
    const int64_t *gemms = n + UP_TO(Layer, qkv), *adapted = gemms + GEMMS * GEMM;
    Layer l;
    Product *const products[] = {&l.qkv, &l.o, &l.gate_up, &l.down};
    memcpy(&l, n, offsetof(Layer, qkv));
    for (int i = 0; i < GEMMS; i++) *products[i] = product_of(gemms + i * GEMM, half);
    memcpy(l.adapted, adapted, sizeof l.adapted);
    return l;
}

/* A thread's share of them, in units of `size`. */
static Range range_of(const Member *me, int64_t units, int64_t size) {
    return (Range){share(me, units, 0) * size, share(me, units, 1) * size};
}
static Range taken_of(const Shares *s, int64_t size) { return (Range){s->from * size, s->to * size}; }
Ahead weight_of(const Product *p, Range outputs) {
    const char *at = NULL, *end = NULL;
    for (int64_t i = 0; p->blocks && i < p->blocks[0]; i++) {
        const Part part = part_of(p->blocks, i);
        if (outputs.from < part.first || outputs.from >= part.first + part.outputs) continue;
        const int64_t bytes = panel_bytes(kind_of(part.type), p->inputs) / PANEL_OUTPUTS;
        const int64_t last = least(outputs.to - part.first, part.outputs);
        at = (const char *)part.panels + (outputs.from - part.first) * bytes;
        end = (const char *)part.panels + last * bytes;
    }
    if (!p->blocks) {
        at = (const char *)p->weight + outputs.from * p->inputs * 2;
        end = (const char *)p->weight + outputs.to * p->inputs * 2;
    }
    return (Ahead){at, end - at < MOST_AHEAD ? end : at + MOST_AHEAD, NULL, NULL};
}
/* first: what adapters read, or nothing. */
static Ahead all_of(Ahead first, Ahead second, Ahead third) {
    if (!first.at) return (Ahead){second.at, second.end, third.at, third.end};
    return (Ahead){first.at, first.end, second.at, second.end, third.at, third.end};
}
static void product(Product p, Range outputs, void *out, const void *x, const Rounded *rounded, const void *residual,
                    int64_t rows) {
    p.out = out;
    p.x = x;
    p.rounded = *rounded;
    p.residual = residual;
    p.rows = rows;
    multiply_part(&p, outputs.from, outputs.to);
}

/* Up to eps, what `layers` is given: layers of one size, whose heads and MLP are multiples of 32. */
typedef struct {
    const char *x, *normed; /* normed: NULL where layers norm their inputs; otherwise there is one layer */
    char *outs;             /* [.., rows, hidden] */
    int64_t count;
    const int64_t *layers, *pools; /* addresses of their numbers, and of their keys and values */
    const int64_t *places;         /* which of outs each writes */
    char *spare;
    int64_t width; /* most inputs of a normed row */
    const int64_t *slots;
    const void *cos, *sin;
    int64_t rope_stride, rows, half;
    int64_t attention[ATTENTION]; /* out, q, kv, window, sinks and scalar are set here */
    const int64_t *adapters;      /* slots of rows' adapters, or NULL: they have none */
    double eps;
    Team team;
    int64_t threads; /* at most */
} Layers;

/* Memory of all that a layer computes on its way; what is normed, of few rows, is of a thread's own. */
typedef struct {
    char *qkv, *attended, *middle, *gate_up, *gated, *normed;
    Rounded attended_8, gated_8, normed_8; /* normed_8: of `hidden` or `width` inputs */
    char *normed_bytes;
    char *between;  /* of adapters */
    int64_t *taken; /* of each GEMM's units: see `Shares` */
    int64_t end;    /* bytes */
} Spare;
/* Behind the units of GEMMs: those of their adapters' first products that were taken, and that are done. */
#define COUNTERS (2 * GEMMS)
static int64_t taken_bytes(const Layers *j) {
    return (int64_t)sizeof(int64_t) * TAKEN * (GEMMS * j->threads + COUNTERS);
}
static int64_t between_bytes(const Layer *l, int64_t rows) {
    int64_t bytes = 0;
    for (int i = 0; i < GEMMS; i++) bytes = most(bytes, adapter_bytes(l->adapted[i], rows));
    return bytes;
}
static Spare spare_of(const Layers *j, const Layer *l, int64_t number) {
    const int64_t rows = j->rows, bytes = rows * (j->half ? 2 : 4), blocks = l->o.blocks ? 1 : 0;
    const int64_t member = rows > OWN_ROWS ? 0 : number;
    const int64_t own = bytes * l->hidden + blocks * rounded_size(rows, j->width);
    Spare s = {.taken = (int64_t *)j->spare, .qkv = j->spare + taken_bytes(j)};
    s.attended = s.qkv + bytes * l->qkv.outputs;
    s.middle = s.attended + bytes * l->o.inputs;
    s.gate_up = s.middle + bytes * l->hidden;
    s.gated = s.gate_up + bytes * 2 * l->ffn;
    char *at = s.gated + bytes * l->ffn;
    if (blocks) {
        s.attended_8 = rounded_at(at, rows, l->o.inputs);
        at += rounded_size(rows, l->o.inputs);
        s.gated_8 = rounded_at(at, rows, l->ffn);
        at += rounded_size(rows, l->ffn);
    }
    s.normed = at + member * own;
    s.normed_bytes = s.normed + bytes * l->hidden;
    s.end = s.normed + own - j->spare;
    if (j->adapters) { /* behind what any thread has */
        const char *last = at + (rows > OWN_ROWS ? 1 : j->threads) * own;
        s.between = (char *)j->spare + (last - j->spare + 63) / 64 * 64;
        s.end = s.between + between_bytes(l, rows) - j->spare;
    }
    return s;
}

/* Rows of x under a norm (weight NULL: as they are) where a GEMM reads them: all, or of many rows a thread's share. */
static const char *norm(const Layers *j, const Member *me, Spare *s, const Product *p, const void *x,
                        const void *weight, Ahead *next) {
    const int own = j->rows <= OWN_ROWS;
    const int64_t from = own ? 0 : share(me, j->rows, 0), to = own ? j->rows : share(me, j->rows, 1);
    const Rows r = {.out = s->normed, .x = x, .weight = weight, .size = p->inputs, .eps = j->eps, .half = j->half};
    if (p->blocks) s->normed_8 = rounded_at(s->normed_bytes, j->rows, p->inputs);
    for (int64_t i = from; i < to; i++) {
        fetch(next, ROW_LINES);
        if (weight) norm_part(&r, i);
        if (p->blocks) round_part(&s->normed_8, weight ? s->normed : x, i, 0, p->inputs, j->half);
    }
    if (!own) meet(me, next);
    return weight ? s->normed : x;
}

/* Of a GEMM's adapters: how much of the first product was taken, and TAKEN behind it how much is done. */
static int64_t *counters_of(const Layers *j, const Spare *s, int64_t gemm) {
    return s->taken + (GEMMS * j->threads + 2 * gemm) * TAKEN;
}
/* The units of a layer's GEMM. Those of the GEMM before begin anew: all have met since, and will before it comes. */
static Shares units_of(const Layers *j, const Member *me, const Spare *s, int gemm, int64_t units) {
    const int64_t before = (gemm + GEMMS - 1) % GEMMS;
    s->taken[(before * j->threads + me->number) * TAKEN] = 0;
    if (!me->number) memset(counters_of(j, s, before), 0, sizeof(int64_t) * 2 * TAKEN);
    return shares_of(me, units, s->taken + gemm * j->threads * TAKEN);
}
/* What adapters add to a GEMM. Threads share the first product, and none waits for it before its outputs want it. */
static Adapting adapt_inputs(const Layers *j, const Layer *l, int gemm, const void *x, const Rounded *small,
                             const Spare *s) {
    const Adapting a = {j->adapters, x, small, s->between, j->rows, j->half};
    if (!j->adapters) return a;
    int64_t *taken = counters_of(j, s, gemm), units = adapter_units(l->adapted[gemm]);
    for (int64_t unit; (unit = take(taken, 1)) < units;) {
        adapter_down(l->adapted[gemm], &a, unit);
        __atomic_add_fetch(taken + TAKEN, 1, __ATOMIC_RELEASE);
    }
    return a;
}
static Ahead factors_ahead(const Layers *j, const Layer *l, int gemm, const Member *me) {
    const Ahead all = j->adapters ? adapter_ahead(l->adapted[gemm], j->adapters, j->rows, me) : (Ahead){0};
    return (Ahead){all.at, all.end - all.at < MOST_AHEAD ? all.end : all.at + MOST_AHEAD};
}
/* The last of what is fetched, or what is left of it. */
static Ahead last_of(Ahead a) {
    if (a.third) return (Ahead){a.third, a.final};
    return a.later ? (Ahead){a.later, a.last} : a;
}
static void adapt_outputs(const Layers *j, const Layer *l, int gemm, void *y, const Adapting *a, const Spare *s,
                          Range outputs) {
    Ahead nothing = {0};
    if (!j->adapters) return;
    await_count(counters_of(j, s, gemm) + TAKEN, adapter_units(l->adapted[gemm]), &nothing);
    adapter_up(l->adapted[gemm], a, y, outputs.from, outputs.to);
}
static void some_of_layers(void *data) {
    Layers *j = data;
    const Member me = join(&j->team);
    const int64_t rows = j->rows, width = j->half ? 2 : 4;
    Attention a = attention_of(j->attention);
    const char *x = j->x;
    Ahead next = {0};
    for (int64_t l = 0; l < j->count; l++) {
        const Layer layer = layer_of(POINTER(j->layers[l]), j->half);
        const int64_t hidden = layer.hidden, ffn = layer.ffn, all_heads = a.heads + 2 * a.kv_heads;
        Spare s = spare_of(j, &layer, me.number);
        char *out = j->outs + j->places[l] * rows * hidden * width;
        const Rows rope = {.out = s.qkv,
                           .kv = POINTER(j->pools[l]),
                           .slots = j->slots,
                           .cos = j->cos,
                           .sin = j->sin,
                           .heads = a.heads,
                           .kv_heads = a.kv_heads,
                           .dim = a.dim,
                           .stride = layer.qkv.outputs,
                           .rope_stride = j->rope_stride,
                           .half = j->half,
                           .kv_type = a.kv_type,
                           .q_norm = layer.q_norm,
                           .k_norm = layer.k_norm,
                           .eps = j->eps};
        const Rows silu = {.out = s.gated, .x = s.gate_up, .size = ffn, .half = j->half};
        const Range halves = range_of(&me, hidden / UNIT, UNIT);

        const void *weight = j->normed ? NULL : layer.attn_norm;
        const char *input = norm(j, &me, &s, &layer.qkv, j->normed ? j->normed : x, weight, &next);
        if (!me.number) attend_anew(&a); /* nobody attends now */
        Adapting adapting = adapt_inputs(j, &layer, QKV, input, &s.normed_8, &s);
        for (Shares heads = units_of(j, &me, &s, QKV, all_heads); take_units(&heads);) {
            const Range mine = taken_of(&heads, a.dim);
            product(layer.qkv, mine, s.qkv, input, &s.normed_8, NULL, rows);
            adapt_outputs(j, &layer, QKV, s.qkv, &adapting, &s, mine);
            for (int64_t i = 0; i < rows; i++) rope_part(&rope, i, heads.from, heads.to);
        }
        next = all_of(factors_ahead(j, &layer, O, &me), weight_of(&layer.o, halves),
                      weight_of(&layer.gate_up, range_of(&me, ffn / UNIT, UNIT)));
        meet(&me, &next);

        a.q = s.qkv;
        a.q_stride = layer.qkv.outputs;
        a.out = s.attended;
        a.rounded = layer.o.blocks ? &s.attended_8 : NULL;
        a.kv = rope.kv;
        a.window = layer.window;
        a.sinks = layer.sinks;
        a.scalar = layer.scalar;
        attend_units(&a, me.number, &next);
        meet(&me, &next);

        adapting = adapt_inputs(j, &layer, O, s.attended, &s.attended_8, &s);
        for (Shares units = units_of(j, &me, &s, O, hidden / UNIT); take_units(&units);) {
            product(layer.o, taken_of(&units, UNIT), s.middle, s.attended, &s.attended_8, x, rows);
            adapt_outputs(j, &layer, O, s.middle, &adapting, &s, taken_of(&units, UNIT));
        }
        if (j->adapters) next = all_of(factors_ahead(j, &layer, GATE_UP, &me), last_of(next), (Ahead){0});
        meet(&me, &next);

        input = norm(j, &me, &s, &layer.gate_up, s.middle, layer.mlp_norm, &next);
        adapting = adapt_inputs(j, &layer, GATE_UP, input, &s.normed_8, &s);
        for (Shares units = units_of(j, &me, &s, GATE_UP, ffn / UNIT); take_units(&units);) {
            const Range gate = taken_of(&units, UNIT), up = {ffn + gate.from, ffn + gate.to};
            product(layer.gate_up, gate, s.gate_up, input, &s.normed_8, NULL, rows);
            product(layer.gate_up, up, s.gate_up, input, &s.normed_8, NULL, rows);
            adapt_outputs(j, &layer, GATE_UP, s.gate_up, &adapting, &s, gate);
            adapt_outputs(j, &layer, GATE_UP, s.gate_up, &adapting, &s, up);
            for (int64_t i = 0; i < rows; i++) {
                silu_part(&silu, i, gate.from, gate.to);
                if (layer.down.blocks) round_part(&s.gated_8, s.gated, i, gate.from, gate.to, j->half);
            }
        }
        next = all_of(factors_ahead(j, &layer, DOWN, &me), weight_of(&layer.down, halves), (Ahead){0});
        meet(&me, &next);

        adapting = adapt_inputs(j, &layer, DOWN, s.gated, &s.gated_8, &s);
        for (Shares units = units_of(j, &me, &s, DOWN, hidden / UNIT); take_units(&units);) {
            product(layer.down, taken_of(&units, UNIT), out, s.gated, &s.gated_8, s.middle, rows);
            adapt_outputs(j, &layer, DOWN, out, &adapting, &s, taken_of(&units, UNIT));
        }
        x = out;
        if (l + 1 == j->count) break;
        const Layer following = layer_of(POINTER(j->layers[l + 1]), j->half);
        const Range turned = range_of(&me, all_heads, a.dim);
        next = all_of(factors_ahead(j, &following, QKV, &me), weight_of(&following.qkv, turned), (Ahead){0});
        meet(&me, &next);
    }
}

/* rows, half, numbers of a layer, most inputs of a normed row, threads, whether there are adapters -> bytes of `spare` */
static int64_t layers_spare(int64_t *n) {
    const Layers j = {.rows = n[0], .half = n[1], .width = n[3], .threads = n[4], .adapters = n[5] ? n : NULL};
    const Layer layer = layer_of(POINTER(n[2]), n[1]);
    return spare_of(&j, &layer, n[4] - 1).end;
}

static void layers(int64_t *n) {
    Layers *j = (Layers *)n;
    Workers *workers = attention_of(j->attention).workers;
    j->threads = workers->most;
    memset(j->spare, 0, (size_t)taken_bytes(j));
    /* Many layers take as long as several turns: others of Python would wait for all of them. */
    PyThreadState *released = j->count > 1 ? PyEval_SaveThread() : release_gil();
    run_team(some_of_layers, j, &j->team, workers);
    take_gil(released);
}

Function layer_functions[] = {
    {"layers_spare", .count = layers_spare, .given = 6},
    {"layers", layers, UP_TO(Layers, eps), sizeof(Layers), .doubles = 1},
    {0},
};
