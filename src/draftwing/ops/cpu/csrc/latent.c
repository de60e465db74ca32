/* What latent attention does beside attention: each head's product with a matrix of its own, vectors of which the end is
   turned, and rows that go to the pool. The references are in ops/rope/spec.py and kv/pool.py.

   Matrices lie as `HeadGemm` of ops/gemm/cpu_heads.py packs them: panels of 64 outputs, in them inputs, in them the outputs.
   Inputs are summed in their order in float32, so a row has the same bits among any number of rows; with products that
   are fused with the sum. */

#include "sums.h"

#define PANEL 64 /* outputs */
#define PARTS(rows) (PART == 4 ? SCORE_PARTS(rows) / 2 : SCORE_PARTS(rows)) /* registers of them in a sum */

/* -- products of heads --------------------------------------------------------------------------------------------- */

typedef struct {
    char *out;                                       /* [rows, heads, outputs] */
    const char *x, *weight;                          /* [rows, heads, inputs]; packed */
    int64_t rows, heads, inputs, outputs, row_stride, head_stride, half; /* strides: elements of x */
    Workers *workers;
    int64_t panels, next; /* panels: of a head */
} HeadProduct;

/* Outputs [0, 64) of a panel for `rows` rows of x; of these `left` are stored. */
INLINE void panel_rows(const HeadProduct *p, const char *x, const char *weight, char *out, int64_t left, const int half,
                       const int rows, const int parts) {
    const int64_t width = half ? 2 : 4;
    float sums[TALL][PANEL];
    for (int c = 0; c < PANEL; c += parts * PART) {
        pf sum[TALL][8];
        sum_products(sum, x, p->row_stride, weight + c * width, PANEL, p->inputs, ONE, half, rows, parts, NULL, 0);
        EACH(r, rows) EACH(v, parts) memcpy(sums[r] + c + v * PART, &sum[r][v], sizeof sum[r][v]);
    }
    for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < left && c < PANEL; c += LANES)
            store(out + r * p->heads * p->outputs * width, c, left - c, half, loadf(sums[r] + c));
}
INLINE void panel(const HeadProduct *p, int64_t head, int64_t number, const int half) {
    const int64_t width = half ? 2 : 4, left = p->outputs - number * PANEL;
    const char *weight = p->weight + (head * p->panels + number) * PANEL * p->inputs * width;
    EACH_ROWS(row, rows, 0, p->rows) {
        const char *x = p->x + (row * p->row_stride + head * p->head_stride) * width;
        char *out = p->out + ((row * p->heads + head) * p->outputs + number * PANEL) * width;
#define PANEL_ROWS(n) panel_rows(p, x, weight, out, left, half, n, PARTS(n))
        BY_ROWS(rows, PANEL_ROWS)
    }
}
static void some_panels(void *data) {
    HeadProduct *p = data;
    for (int64_t unit; (unit = take(&p->next, 1)) < p->heads * p->panels;)
        BY_HALF(p->half, panel, p, unit / p->panels, unit % p->panels);
}

static void head_products(int64_t *n) {
    HeadProduct *p = (HeadProduct *)n;
    p->panels = (p->outputs + PANEL - 1) / PANEL;
    run_unlocked(some_panels, p, p->workers, p->rows * p->heads * p->inputs * p->outputs / 30000);
}

/* -- the same with weights in blocks ------------------------------------------------------------------------------- */

#define UNIT 16 /* outputs that are not shared, as in block_gemm.c */
#define TAKES 8 /* times that a thread takes units of few rows, whose weights it reads on end */

typedef struct {
    void *out;                                                           /* [rows, heads, outputs] */
    const char *x;                                                       /* [rows, heads, inputs] */
    const int64_t *blocks;                                               /* of all heads' outputs */
    int64_t rows, heads, inputs, outputs, row_stride, head_stride, half; /* outputs: of a head, a multiple of 16 */
    char *spare;                                                         /* [heads, rounded_size] */
    Workers *workers;
    Team team;
    int64_t next;
} HeadBlocks;

static Rounded of_head(const HeadBlocks *j, int64_t head) {
    return rounded_at(j->spare + head * rounded_size(j->rows, j->inputs), j->rows, j->inputs);
}
static void some_head_blocks(void *data) {
    HeadBlocks *j = data;
    const Member me = join(&j->team);
    const int64_t rows = j->rows, inputs = j->inputs, width = j->half ? 2 : 4;
    for (int64_t i = share(&me, rows * j->heads, 0); i < share(&me, rows * j->heads, 1); i++) {
        const int64_t row = i / j->heads, head = i % j->heads;
        const Rounded to = of_head(j, head);
        /* It takes rows to lie next to each other. */
        const char *x = j->x + (row * j->row_stride + head * j->head_stride - row * inputs) * width;
        round_part(&to, x, row, 0, inputs, j->half);
    }
    Ahead nothing = {0};
    meet(&me, &nothing);
    const int64_t of_one = j->outputs / UNIT, units = j->heads * of_one;
    const int64_t some = rows < UNIT ? units / (me.size * TAKES) + 1 : 1;
    for (int64_t first; (first = take(&j->next, some)) < units;) {
        const int64_t last = least(first + some, units);
        for (int64_t from = first, to; from < last; from = to) { /* of one head */
            to = least((from / of_one + 1) * of_one, last);
            const Product p = {.inputs = inputs, .outputs = j->heads * j->outputs, .blocks = j->blocks, .out = j->out,
                               .rounded = of_head(j, from / of_one), .rows = rows, .half = j->half};
            multiply_blocks(&p, from * UNIT, to * UNIT);
        }
    }
}

static void head_blocks(int64_t *n) {
    HeadBlocks *j = (HeadBlocks *)n;
    run_team_unlocked(some_head_blocks, j, &j->team, j->workers);
}

/* -- vectors of which the end is turned ---------------------------------------------------------------------------- */

/* Up to factor, what `concat_rope` is given. */
typedef struct {
    char *out;                                                             /* [rows, heads, same + dim] */
    const char *plain, *turned, *cos, *sin;                                /* [rows, heads, same]; [rows, heads, dim] */
    int64_t rows, heads, same, dim; /* same: elements that are not turned; dim: those that are */
    int64_t plain_row, plain_head, turned_row, turned_head, rope_row, half; /* strides, elements */
    Workers *workers;
    double factor;
    int64_t next;
} Turning;

INLINE void turn_row(const Turning *t, int64_t row, const int half) {
    const int64_t mid = t->dim / 2, width = half ? 2 : 4, rope = row * t->rope_row;
    const vf factor = splat((float)t->factor);
    for (int64_t h = 0; h < t->heads; h++) {
        const char *plain = t->plain + (row * t->plain_row + h * t->plain_head) * width;
        const char *from = t->turned + (row * t->turned_row + h * t->turned_head) * width;
        char *out = t->out + (row * t->heads + h) * (t->same + t->dim) * width, *to = out + t->same * width;
        if ((float)t->factor == 1) memcpy(out, plain, (size_t)(t->same * width));
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
        BY_HALF(t->half, turn_row, t, row);
}

static void concat_rope(int64_t *n) {
    Turning *t = (Turning *)n;
    run_unlocked(turn_some, t, t->workers, t->rows * t->heads * (t->same + t->dim) / 2000);
}

/* -- rows to the pool ---------------------------------------------------------------------------------------------- */

/* pool [slots, size], slots, x [rows, size], rows, size, half of x, half of the pool */
static void keep_rows(int64_t *n) {
    const int64_t *slots = POINTER(n[1]), size = n[4];
    for (int64_t i = 0; i < n[3]; i++)
        for (int64_t c = 0; c < size; c += LANES)
            store(POINTER(n[0]), slots[i] * size + c, size - c, (int)n[6],
                  load(POINTER(n[2]), i * size + c, size - c, (int)n[5]));
}

Function latent_functions[] = {
    {"head_products", head_products, UP_TO(HeadProduct, panels), sizeof(HeadProduct)},
    {"head_blocks", head_blocks, UP_TO(HeadBlocks, team), sizeof(HeadBlocks)},
    {"concat_rope", concat_rope, UP_TO(Turning, factor), sizeof(Turning), .doubles = 1},
    {"keep_rows", keep_rows, 7},
    {0},
};
