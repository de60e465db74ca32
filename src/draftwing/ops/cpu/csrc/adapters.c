/* What adapters of low rank add to the result of a product: y += up * (scale * (down * x)), each row by its own adapter.
   The reference is `AdapterOps` (ops/adapters/spec.py). Sums are in float32, each in an order of its own: over the inputs
   by lanes, over the rank from the first on. So a row has the same bits whatever rows are beside it. */

#include "cpu.h"

#define ROWS 16    /* of x that are worked on together */
#define OUTPUTS 64 /* that a thread takes at a time */
#define FEW (1 << 16) /* multiplications that are one thread's; not swept */
#define WIDE 4 /* vectors of outputs that are made together */
#if PART == 16
#define DOTS 8 /* sums that are kept in registers */
#else
#define DOTS 4
#endif

/* Of one matrix; `down` to `rank` as in `AdapterWeights`. */
static Adapted adapted_of(const int64_t *n) {
    return (Adapted){.down = POINTER(n[0]),
                     .up = POINTER(n[1]),
                     .ranks = POINTER(n[2]),
                     .scales = POINTER(n[3]),
                     .ends = POINTER(n[4]),
                     .slices = n[5],
                     .rank = n[6],
                     .small = n[7],
                     .inputs = n[8],
                     .outputs = n[9]};
}

typedef struct {
    Team team;
    Adapted of;
    char *y;
    const char *x;
    const int64_t *slots; /* of rows; 0: of nobody */
    float *between; /* [rows, slices, rank] */
    int64_t y_stride, x_stride, rows, half, parts;
    int64_t *taken;
} Adapters;

/* Sums of a row with `count` rows of `down`, from row `at` on. */
INLINE void dots(const Adapted *a, const void *x, int64_t x_at, int64_t at, const int count, float scale, float *to,
                 const int half, const int small) {
    pf sums[DOTS][REGISTERS] = {0};
    const int64_t inputs = a->inputs;
    for (int64_t k = 0; k < inputs; k += LANES) {
        const int64_t n = inputs - k;
        const Parted value = {.f = load(x, x_at + k, n, half)};
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            const Parted w = {.f = load(a->down, (at + i) * inputs + k, n, small)};
            EACH_REGISTER sums[i][c] = fused(value.floats[c], w.floats[c], sums[i][c]);
        }
    }
    for (int i = 0; i < count; i++) {
        Parted sum;
        EACH_REGISTER sum.floats[c] = sums[i][c];
        to[i] = scale * sum_lanes(sum.f);
    }
}
INLINE void any_dots(const Adapted *a, const void *x, int64_t x_at, int64_t at, int64_t count, float scale, float *to,
                     const int half, const int small) {
    if (count == DOTS) dots(a, x, x_at, at, DOTS, scale, to, half, small);
    else
        for (int64_t i = 0; i < count; i++) dots(a, x, x_at, at + i, 1, scale, to + i, half, small);
}
/* Of a row of a slot, rows [first, first + DOTS) of `down` of a slice. */
static void some_dots(const Adapted *a, const void *x, int64_t x_at, int64_t slot, int64_t slice, int64_t first,
                      int64_t half, float *between) {
    const int64_t mine = slot * a->slices + slice, left = a->ranks[mine] - first, at = mine * a->rank + first;
    if (left <= 0) return;
    const int64_t count = left < DOTS ? left : DOTS;
    float *to = between + slice * a->rank + first;
    if (half) any_dots(a, x, x_at, at, count, a->scales[mine], to, 1, 1);
    else if (a->small) any_dots(a, x, x_at, at, count, a->scales[mine], to, 0, 1);
    else any_dots(a, x, x_at, at, count, a->scales[mine], to, 0, 0);
}

/* `vectors` of outputs, from `o` on, of which `n` are there. */
INLINE void add_vectors(const Adapted *a, void *y, int64_t y_at, int64_t slot, const float *u, int64_t rank, int64_t o,
                        int64_t n, const int vectors, const int half, const int small) {
    pf sums[WIDE][REGISTERS] = {0};
    for (int64_t i = 0; i < rank; i++) {
        const Parted by = {.f = splat(u[i])};
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const int64_t at = v * LANES;
            const Parted w = {.f = load(a->up, (slot * a->rank + i) * a->outputs + o + at, n - at, small)};
            EACH_REGISTER sums[v][c] = fused(by.floats[c], w.floats[c], sums[v][c]);
        }
    }
    for (int v = 0; v < vectors; v++) {
        const int64_t at = y_at + o + v * LANES, left = n - v * LANES;
        Parted sum;
        EACH_REGISTER sum.floats[c] = sums[v][c];
        store(y, at, left, half, load(y, at, left, half) + sum.f);
    }
}
INLINE void add(const Adapted *a, void *y, int64_t y_at, int64_t slot, int64_t slice, const float *between,
                int64_t from, int64_t end, const int half, const int small) {
    const float *u = between + slice * a->rank;
    const int64_t rank = a->ranks[slot * a->slices + slice];
    int64_t o = from;
    if (!rank) return;
    for (; o + WIDE * LANES <= end; o += WIDE * LANES)
        add_vectors(a, y, y_at, slot, u, rank, o, WIDE * LANES, WIDE, half, small);
    for (; o < end; o += LANES) add_vectors(a, y, y_at, slot, u, rank, o, end - o, 1, half, small);
}
/* Outputs [first, last) of a row of a slot. */
static void add_some(const Adapted *a, void *y, int64_t y_at, int64_t slot, const float *between, int64_t first,
                     int64_t last, int64_t half) {
    for (int64_t slice = 0, begin = 0; slice < a->slices; begin = a->ends[slice++]) {
        const int64_t end = last < a->ends[slice] ? last : a->ends[slice], from = first > begin ? first : begin;
        if (from >= end) continue;
        if (half) add(a, y, y_at, slot, slice, between, from, end, 1, 1);
        else if (a->small) add(a, y, y_at, slot, slice, between, from, end, 0, 1);
        else add(a, y, y_at, slot, slice, between, from, end, 0, 0);
    }
}

int64_t adapter_floats(const int64_t *n) { return n ? n[5] * n[6] : 0; }
void adapter_down(const int64_t *n, const int64_t *slots, const void *x, int64_t rows, int64_t half, float *between) {
    if (!n) return;
    const Adapted a = adapted_of(n);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t slice = 0; slots[row] && slice < a.slices; slice++)
            for (int64_t first = 0; first < a.rank; first += DOTS)
                some_dots(&a, x, row * a.inputs, slots[row] - 1, slice, first, half, between + row * a.slices * a.rank);
}
void adapter_up(const int64_t *n, const int64_t *slots, void *y, int64_t rows, int64_t half, const float *between,
                int64_t from, int64_t to) {
    if (!n) return;
    const Adapted a = adapted_of(n);
    for (int64_t row = 0; row < rows; row++)
        if (slots[row])
            add_some(&a, y, row * a.outputs, slots[row] - 1, between + row * a.slices * a.rank, from, to, half);
}

/* Unit: some rows of `down` with some rows of x. */
static void down_unit(const Adapters *j, int64_t unit) {
    const Adapted *a = &j->of;
    const int64_t groups = (a->rank + DOTS - 1) / DOTS, each = a->slices * groups;
    const int64_t block = unit / each, slice = unit % each / groups, first = unit % groups * DOTS;
    for (int64_t row = block * ROWS; row < (block + 1) * ROWS && row < j->rows; row++)
        if (j->slots[row])
            some_dots(a, j->x, row * j->x_stride, j->slots[row] - 1, slice, first, j->half,
                      j->between + row * a->slices * a->rank);
}
/* Unit: some outputs of some rows. */
static void up_unit(const Adapters *j, int64_t unit) {
    const Adapted *a = &j->of;
    const int64_t each = (a->outputs + OUTPUTS - 1) / OUTPUTS, block = unit / each, first = unit % each * OUTPUTS;
    const int64_t last = first + OUTPUTS < a->outputs ? first + OUTPUTS : a->outputs;
    for (int64_t row = block * ROWS; row < (block + 1) * ROWS && row < j->rows; row++)
        if (j->slots[row])
            add_some(a, j->y, row * j->y_stride, j->slots[row] - 1, j->between + row * a->slices * a->rank, first, last,
                     j->half);
}

static void some_adapters(void *data) {
    Adapters *j = data;
    const Member me = join(&j->team);
    const int64_t blocks = (j->rows + ROWS - 1) / ROWS;
    Ahead nothing = {0};
    if (j->parts & 1) {
        const int64_t units = blocks * j->of.slices * ((j->of.rank + DOTS - 1) / DOTS);
        for (Shares s = shares_of(&me, units, j->taken); take_units(&s);)
            for (int64_t unit = s.from; unit < s.to; unit++) down_unit(j, unit);
        meet(&me, &nothing);
    }
    if (j->parts & 2) {
        const int64_t units = blocks * ((j->of.outputs + OUTPUTS - 1) / OUTPUTS);
        for (Shares s = shares_of(&me, units, j->taken + me.size * TAKEN); take_units(&s);)
            for (int64_t unit = s.from; unit < s.to; unit++) up_unit(j, unit);
    }
}

/* y, its stride, x, its stride, slots, rows, half of x and y, between, parts (1: down, 2: up, 3: both), workers; numbers
   of the matrix: see `adapted_of` */
static PyObject *py_adapters(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[20];
    if (!numbers(args, given, 20, n)) return NULL;
    Workers *workers = POINTER(n[9]);
    int64_t taken[2 * workers->most * TAKEN];
    memset(taken, 0, sizeof taken);
    Adapters j = {.of = adapted_of(n + 10),
                  .y = POINTER(n[0]),
                  .y_stride = n[1],
                  .x = POINTER(n[2]),
                  .x_stride = n[3],
                  .slots = POINTER(n[4]),
                  .rows = n[5],
                  .half = n[6],
                  .between = POINTER(n[7]),
                  .parts = n[8],
                  .taken = taken};
    const int64_t work = j.rows * j.of.rank * (j.of.slices * j.of.inputs + j.of.outputs);
    RELEASE_GIL
    run_team(some_adapters, &j, &j.team, work < FEW ? NULL : workers);
    TAKE_GIL
    Py_RETURN_NONE;
}

/* out [rows * each], table, rows, count, each: the table's number of each row, so many times */
static PyObject *py_row_numbers(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[5];
    if (!numbers(args, given, 5, n)) return NULL;
    int64_t *out = POINTER(n[0]);
    const int64_t *table = POINTER(n[1]), *rows = POINTER(n[2]);
    for (int64_t row = 0; row < n[3]; row++)
        for (int64_t i = 0; i < n[4]; i++) *out++ = table[rows[row]];
    Py_RETURN_NONE;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}
PyMethodDef adapter_methods[] = {METHOD(adapters), METHOD(row_numbers), {NULL, NULL, 0, NULL}};
