/* What adapters of low rank add to the result of a product: y += up * (scale * (down * x)), each row by its own adapter.
   The reference is `AdapterOps` (ops/adapters/spec.py). Sums are in float32, each in an order of its own: over the inputs
   by lanes, over the rank from the first on. So a row has the same bits whatever rows are beside it. */

#include "cpu.h"

#define ROWS 16    /* of x that are worked on together */
#define OUTPUTS 64 /* that a thread takes at a time */
#define FEW (1 << 16) /* multiplications that are one thread's; not swept */
#if PART == 16
#define DOTS 8 /* sums that are kept in registers */
#else
#define DOTS 4
#endif

typedef struct {
    Team team;
    char *y;
    const char *x;
    const int64_t *slots; /* of rows; 0: of nobody */
    const void *down, *up; /* [S, slices, rank, inputs], [S, rank, outputs] */
    const int64_t *ranks, *ends; /* [S, slices]; [slices] */
    const float *scales; /* [S, slices] */
    float *between; /* [rows, slices, rank] */
    int64_t y_stride, x_stride, rows, inputs, outputs, slices, rank, half, small, parts;
    int64_t *taken;
} Adapters;

/* Sums of a row with the rows [first, first + count) of a slice. */
INLINE void dots(const Adapters *j, int64_t row, int64_t at, int64_t count, float scale, float *to, const int half,
                 const int small) {
    Parted sums[DOTS];
    for (int i = 0; i < DOTS; i++) sums[i].f = (vf){0};
    const int64_t inputs = j->inputs;
    for (int64_t k = 0; k < inputs; k += LANES) {
        const int64_t n = inputs - k;
        const Parted x = {.f = load(j->x, row * j->x_stride + k, n, half)};
#pragma GCC unroll 8
        for (int i = 0; i < DOTS; i++) {
            if (i >= count) break;
            const Parted w = {.f = load(j->down, (at + i) * inputs + k, n, small)};
            EACH_REGISTER sums[i].floats[c] = fused(x.floats[c], w.floats[c], sums[i].floats[c]);
        }
    }
    for (int64_t i = 0; i < count; i++) to[i] = scale * sum_lanes(sums[i].f);
}

/* Unit: some rows of `down` with some rows of x. */
static void down_unit(const Adapters *j, int64_t unit) {
    const int64_t groups = (j->rank + DOTS - 1) / DOTS, each = j->slices * groups;
    const int64_t block = unit / each, slice = unit % each / groups, first = unit % groups * DOTS;
    for (int64_t row = block * ROWS; row < (block + 1) * ROWS && row < j->rows; row++) {
        const int64_t slot = j->slots[row] - 1;
        if (slot < 0) continue;
        const int64_t mine = slot * j->slices + slice, left = j->ranks[mine] - first;
        if (left <= 0) continue;
        const int64_t count = left < DOTS ? left : DOTS, at = mine * j->rank + first;
        float *to = j->between + (row * j->slices + slice) * j->rank + first;
        if (j->half) dots(j, row, at, count, j->scales[mine], to, 1, 1);
        else if (j->small) dots(j, row, at, count, j->scales[mine], to, 0, 1);
        else dots(j, row, at, count, j->scales[mine], to, 0, 0);
    }
}

INLINE void add(const Adapters *j, int64_t row, int64_t slot, int64_t slice, int64_t from, int64_t end, const int half,
                const int small) {
    const float *u = j->between + (row * j->slices + slice) * j->rank;
    const int64_t rank = j->ranks[slot * j->slices + slice];
    if (!rank) return;
    for (int64_t o = from; o < end; o += LANES) {
        Parted sum = {.f = (vf){0}};
        for (int64_t i = 0; i < rank; i++) {
            const Parted w = {.f = load(j->up, (slot * j->rank + i) * j->outputs + o, end - o, small)}, by = {.f = splat(u[i])};
            EACH_REGISTER sum.floats[c] = fused(by.floats[c], w.floats[c], sum.floats[c]);
        }
        store(j->y, row * j->y_stride + o, end - o, half, load(j->y, row * j->y_stride + o, end - o, half) + sum.f);
    }
}

/* Unit: some outputs of some rows. */
static void up_unit(const Adapters *j, int64_t unit) {
    const int64_t each = (j->outputs + OUTPUTS - 1) / OUTPUTS, block = unit / each, first = unit % each * OUTPUTS;
    for (int64_t row = block * ROWS; row < (block + 1) * ROWS && row < j->rows; row++) {
        const int64_t slot = j->slots[row] - 1;
        if (slot < 0) continue;
        for (int64_t slice = 0, begin = 0; slice < j->slices; begin = j->ends[slice++]) {
            const int64_t last = first + OUTPUTS < j->ends[slice] ? first + OUTPUTS : j->ends[slice];
            const int64_t from = first > begin ? first : begin;
            if (from >= last) continue;
            if (j->half) add(j, row, slot, slice, from, last, 1, 1);
            else if (j->small) add(j, row, slot, slice, from, last, 0, 1);
            else add(j, row, slot, slice, from, last, 0, 0);
        }
    }
}

static void some_adapters(void *data) {
    Adapters *j = data;
    const Member me = join(&j->team);
    const int64_t blocks = (j->rows + ROWS - 1) / ROWS;
    Ahead nothing = {0};
    if (j->parts & 1) {
        const int64_t units = blocks * j->slices * ((j->rank + DOTS - 1) / DOTS);
        for (Shares s = shares_of(&me, units, j->taken); take_units(&s);)
            for (int64_t unit = s.from; unit < s.to; unit++) down_unit(j, unit);
        meet(&me, &nothing);
    }
    if (j->parts & 2) {
        const int64_t units = blocks * ((j->outputs + OUTPUTS - 1) / OUTPUTS);
        for (Shares s = shares_of(&me, units, j->taken + me.size * TAKEN); take_units(&s);)
            for (int64_t unit = s.from; unit < s.to; unit++) up_unit(j, unit);
    }
}

/* y, its stride, x, its stride, slots, rows, inputs, outputs, down, up, ranks, scales, ends, slices, rank, half of x and
   y, half of weights, between, parts (1: down, 2: up, 3: both), workers */
static PyObject *py_adapters(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[20];
    if (!numbers(args, given, 20, n)) return NULL;
    Workers *workers = POINTER(n[19]);
    int64_t taken[2 * workers->most * TAKEN];
    memset(taken, 0, sizeof taken);
    Adapters j = {.y = POINTER(n[0]),
                  .y_stride = n[1],
                  .x = POINTER(n[2]),
                  .x_stride = n[3],
                  .slots = POINTER(n[4]),
                  .rows = n[5],
                  .inputs = n[6],
                  .outputs = n[7],
                  .down = POINTER(n[8]),
                  .up = POINTER(n[9]),
                  .ranks = POINTER(n[10]),
                  .scales = POINTER(n[11]),
                  .ends = POINTER(n[12]),
                  .slices = n[13],
                  .rank = n[14],
                  .half = n[15],
                  .small = n[16],
                  .between = POINTER(n[17]),
                  .parts = n[18],
                  .taken = taken};
    const int64_t work = j.rows * j.rank * (j.slices * j.inputs + j.outputs);
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
