/* What adapters of low rank add to the result of a product: y += up * (scale * (down * x)), each row by its own adapter.
   The reference is `AdapterOps` (ops/adapters/spec.py). Sums are in float32, each in an order of its own: over the inputs
   by lanes, over the rank from the first on. So a row has the same bits whatever rows are beside it. Factors in 8 bits:
   adapters_8.c. */

#include "blocks.h"

#define ROWS 32    /* of x that are worked on together */
#define OUTPUTS 64 /* that a thread takes at a time */
#define FEW (1 << 16) /* multiplications that are one thread's; not swept */
#define WIDE 4 /* vectors of outputs that are made together */
#if PART == 16
#define DOTS 8 /* sums that are kept in registers */
#else
#define DOTS 4
#endif

/* Up to `of`, what `adapters` is given. */
typedef struct {
    char *y;
    int64_t y_stride;
    const char *x;
    int64_t x_stride;
    const int64_t *slots; /* of rows; 0: of nobody */
    int64_t rows, half;   /* half: of x and y */
    float *between;       /* [rows, slices, rank]; in 8 bits not of both parts */
    int64_t parts;        /* 1: down, 2: up, 3: both */
    Workers *workers;
    Sixteen *small; /* in 8 bits: [slices, rank / 16, rows], and behind them `rounded` */
    Adapted of;
    Team team;
    Rounded rounded; /* x */
    Adapting with;
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
        EACH(i, count) {
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
    const int64_t count = least(left, DOTS);
    float *to = between + slice * a->rank + first;
    BY_HALVES(half, a->type, any_dots, a, x, x_at, at, count, a->scales[mine], to);
}

/* `vectors` of outputs, from `o` on, of which `n` are there. */
INLINE void add_vectors(const Adapted *a, void *y, int64_t y_at, int64_t slot, const float *u, int64_t rank, int64_t o,
                        int64_t n, const int vectors, const int half, const int small) {
    pf sums[WIDE][REGISTERS] = {0};
    for (int64_t i = 0; i < rank; i++) {
        const Parted by = {.f = splat(u[i])};
        EACH(v, vectors) {
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
        const int64_t end = least(last, a->ends[slice]), from = most(first, begin);
        if (from >= end) continue;
        BY_HALVES(half, a->type, add, a, y, y_at, slot, slice, between, from, end);
    }
}

int64_t adapter_units(const Adapted *a) {
    return a ? a->slices * (a->type == IN_8_BITS ? a->rank / 16 : (a->rank + DOTS - 1) / DOTS) : 0;
}
/* Unit `unit` of them, of rows from `from` on, up to ROWS. sums: see `down_8_bits`. */
static void down_rows(const Adapted *a, const Adapting *of, int64_t x_stride, int64_t unit, int64_t from, float *sums) {
    const int64_t groups = (a->rank + DOTS - 1) / DOTS, to = least(from + ROWS, of->rows);
    if (a->type == IN_8_BITS) down_8_bits(a, of->slots, of->small, unit, from, to, sums, of->between);
    for (int64_t row = from; row < to && a->type != IN_8_BITS; row++)
        if (of->slots[row])
            some_dots(a, of->x, row * x_stride, of->slots[row] - 1, unit / groups, unit % groups * DOTS, of->half,
                      (float *)of->between + row * a->slices * a->rank);
}
/* Outputs [first, last) of rows from `from` on, up to ROWS. */
static void up_rows(const Adapted *a, const Adapting *of, void *y, int64_t y_stride, int64_t from, int64_t first,
                    int64_t last) {
    const int64_t to = least(from + ROWS, of->rows);
    if (a->type == IN_8_BITS)
        up_8_bits(a, of->slots, of->between, of->rows, from, to, first, last, y, y_stride, of->half);
    for (int64_t row = from; row < to && a->type != IN_8_BITS; row++)
        if (of->slots[row])
            add_some(a, y, row * y_stride, of->slots[row] - 1, (float *)of->between + row * a->slices * a->rank, first,
                     last, of->half);
}

int64_t adapter_bytes(const Adapted *a, int64_t rows) {
    const int64_t size = a && a->type == IN_8_BITS ? (int64_t)sizeof(Sixteen) / 16 : (int64_t)sizeof(float);
    return a ? rows * a->slices * a->rank * size : 0;
}
/* Only where the adapter has all the factors that there is room for: else most of them may be zeros that nobody reads. */
Ahead adapter_ahead(const Adapted *a, const int64_t *slots, int64_t rows, const Member *me) {
    int64_t row = 0, bytes = 0;
    while (row < rows && !slots[row]) row++;
    if (!a || row == rows) return (Ahead){0};
    for (int64_t slice = 0; slice < a->slices; slice++)
        if (a->ranks[(slots[row] - 1) * a->slices + slice] < a->rank) return (Ahead){0};
    if (a->type == IN_8_BITS) bytes = adapter_units(a) * panel_bytes(kind_of(Q8_0), a->inputs);
    else bytes = a->slices * a->rank * a->inputs * (a->type == IN_HALF ? 2 : 4);
    const char *at = (const char *)a->down + (slots[row] - 1) * bytes;
    return (Ahead){at + share(me, bytes / 64, 0) * 64, at + share(me, bytes / 64, 1) * 64};
}
void adapter_down(const Adapted *a, const Adapting *of, int64_t unit) {
    for (int64_t row = 0; row < of->rows; row += ROWS) down_rows(a, of, a->inputs, unit, row, NULL);
}
void adapter_up(const Adapted *a, const Adapting *of, void *y, int64_t from, int64_t to) {
    for (int64_t row = 0; a && row < of->rows; row += ROWS) up_rows(a, of, y, a->outputs, row, from, to);
}

/* Unit: some rows of `down` with some rows of x. */
static void some_down(const Adapters *j, int64_t number) {
    const int64_t each = adapter_units(&j->of);
    down_rows(&j->of, &j->with, j->x_stride, number % each, number / each * ROWS, j->parts & 2 ? NULL : j->between);
}
/* Unit: some outputs of some rows. */
static void some_up(const Adapters *j, int64_t unit) {
    const int64_t outputs = j->of.outputs, each = (outputs + OUTPUTS - 1) / OUTPUTS, first = unit % each * OUTPUTS;
    up_rows(&j->of, &j->with, j->y, j->y_stride, unit / each * ROWS, first, least(first + OUTPUTS, outputs));
}
/* A thread's share of the rows in 8 bits: x, or what lies between the products. */
static void round_rows(const Adapters *j, const Member *me, Ahead *next) {
    const Adapted *a = &j->of;
    for (int64_t row = share(me, j->rows, 0); row < share(me, j->rows, 1); row++) {
        const char *x = j->x + row * (j->x_stride - a->inputs) * (j->half ? 2 : 4);
        if (j->parts & 1) round_part(&j->rounded, x, row, 0, a->inputs, j->half);
        for (int64_t i = 0; !(j->parts & 1) && i < adapter_units(a); i++)
            round_sums(j->small + i * j->rows + row, j->between + (row * adapter_units(a) + i) * 16);
    }
    meet(me, next);
}

static void some_adapters(void *data) {
    Adapters *j = data;
    const Member me = join(&j->team);
    const int64_t blocks = (j->rows + ROWS - 1) / ROWS;
    Ahead nothing = {0};
    if (j->of.type == IN_8_BITS) round_rows(j, &me, &nothing);
    if (j->parts & 1) {
        for (Shares s = shares_of(&me, blocks * adapter_units(&j->of), j->taken); take_units(&s);)
            for (int64_t unit = s.from; unit < s.to; unit++) some_down(j, unit);
        meet(&me, &nothing);
    }
    if (j->parts & 2) {
        const int64_t units = blocks * ((j->of.outputs + OUTPUTS - 1) / OUTPUTS);
        for (Shares s = shares_of(&me, units, j->taken + me.size * TAKEN); take_units(&s);)
            for (int64_t unit = s.from; unit < s.to; unit++) some_up(j, unit);
    }
}

static void adapters(int64_t *n) {
    Adapters *j = (Adapters *)n;
    const Adapted *of = &j->of;
    int64_t taken[2 * j->workers->most * TAKEN];
    memset(taken, 0, sizeof taken);
    j->taken = taken;
    void *between = of->type == IN_8_BITS ? (void *)j->small : j->between;
    j->with = (Adapting){j->slots, j->x, &j->rounded, between, j->rows, j->half};
    if (of->type == IN_8_BITS)
        j->rounded = rounded_at((char *)j->small + adapter_bytes(of, j->rows), j->rows, of->inputs);
    const int64_t work = j->rows * of->rank * (of->slices * of->inputs + of->outputs);
    run_team_unlocked(some_adapters, j, &j->team, work < FEW ? NULL : j->workers);
}

Function adapter_functions[] = {
    {"adapters", adapters, UP_TO(Adapters, team), sizeof(Adapters)},
    {0},
};
