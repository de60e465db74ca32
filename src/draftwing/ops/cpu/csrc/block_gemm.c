/* GEMMs with weights in quantised blocks, for any number of rows.

   Rows are rounded to 8 bits, each block of 32 by a scale of its own. The sum of a block's products is a whole number,
   so it does not matter how it is made; the sums over blocks are made in float32, one block after the other, without
   contraction. So the bits of a row's result depend on the row and the weight alone: not on how many rows there are,
   nor on threads, nor on the instruction set.

   A block's weights are unpacked once for up to TILE rows. What differs between instruction sets is how many outputs
   are computed together, and `dots`. */

#include "dots.h"
#include "tiles.h"

#define TILE 32
/* Bytes before they are needed that are fetched to the first cache, and to the second: a core waits for some 24 lines of
   the first, which is less than memory needs, and hardware does not see past a page's end. Types with further bits take
   the longest to unpack, so that of few rows they have no time for it. Swept: 2, 3, 4, 6 KB with 8 and 16 KB, or none. */
#define AHEAD (4 << 10)
#define FAR_AHEAD (16 << 10)
#define FEW_ROWS 2

/* -- one panel ------------------------------------------------------------------------------------------------------ */

/* The 8 groups of a block's q, for the outputs from `o` on. */
INLINE void unpack(const Kind k, vb *w, const uint8_t *at, int64_t o) {
    at += 4 * o;
    if (k.wide) {
        for (int g = 0; g < 8; g++) w[g] = WIDE_IS_SIGNED ? bytes_at(at + 64 * g) ^ 128 : bytes_at(at + 64 * g);
        return;
    }
    for (int g = 0; g < 4; g++) {
        const vb both = bytes_at(at + 64 * g);
        w[g] = k.mx ? mx_values(both & 15) : both & 15;
        w[g + 4] = k.mx ? mx_values(both >> 4 & 15) : both >> 4 & 15;
    }
    if (k.high == 1) {
        const vb bits = bytes_at(at + 256);
        for (int g = 0; g < 8; g++) w[g] |= g < 4 ? (bits << (4 - g)) & 16 : (bits >> (g - 4)) & 16;
    }
    for (int half = 0; half < 2 && k.high == 2; half++) {
        const vb bits = bytes_at(at + 256 + 64 * half);
        w[4 * half] |= (bits << 4) & 48;
        w[4 * half + 1] |= (bits << 2) & 48;
        w[4 * half + 2] |= bits & 48;
        w[4 * half + 3] |= (bits >> 2) & 48;
    }
}

/* WIDE parts of a panel's block: q, and what the sums of its products are multiplied with. */
typedef struct {
    vb w[WIDE][8];
    pf scale[WIDE], second[WIDE]; /* second: scales of the second half, or mins */
} Weights;
/* What a super-block begins with. */
typedef struct {
    pf scale[PANEL_OUTPUTS / PART], min[PANEL_OUTPUTS / PART];
} Super;

INLINE void super_of(const Kind k, Super *to, const uint8_t *at) {
    for (int c = 0; c < PANEL_OUTPUTS / PART; c++) {
        to->scale[c] = from_halves(at + 2 * PART * c);
        if (k.min) to->min[c] = from_halves(at + 32 + 2 * PART * c);
    }
}
INLINE void weights_of(const Kind k, Weights *to, const uint8_t *at, const Super *super, int part) {
    const uint8_t *values = at + q_bytes(k);
    for (int i = 0; i < WIDE; i++) {
        const int c = part + i, o = PART * c;
        unpack(k, to->w[i], at, o);
        if (k.mx) {
            to->scale[i] = from_exponents(values + o);
        } else if (!k.super) {
            to->scale[i] = from_halves(values + 2 * o);
            if (k.min) to->second[i] = from_halves(values + 32 + 2 * o);
        } else if (k.halves) {
            to->scale[i] = super->scale[c] * floats_of(from_signed(values + o));
            to->second[i] = super->scale[c] * floats_of(from_signed(values + 16 + o));
        } else {
            to->scale[i] = super->scale[c] * floats_of(from_bytes(values + o));
            to->second[i] = -(super->min[c] * floats_of(from_bytes(values + 16 + o)));
        }
    }
}

/* A block of rows, from one of them on. */
typedef struct {
    const int8_t *bytes;
    const float *scales, *sums;
    const int32_t *less;
} Block;
INLINE Block block_of(const Rounded *x, int64_t block, int64_t row) {
    const int64_t at = block * x->rows + row;
    return (Block){x->bytes + at * BLOCK, x->scales + at, x->sums + at, x->less + 3 * at};
}

/* Adds a row's products with a block, times their scales, to `sum` [PART]. */
INLINE void add_value(const Kind k, float *sum, pf value, pf second, Block x, int64_t r) {
    pf y = part_at(sum) + value * every_float(x.scales[r]);
    if (k.min) y += second * every_float(x.sums[r]);
    memcpy(sum, &y, sizeof y);
}
/* The sums of q times x, without `Kind.zero`: of half a block where each has a scale, else of all of it. */
INLINE void products_of(const Kind k, const vb (*w)[8], Block x, const int half, const int rows, vn (*whole)[WIDE]) {
    const int takes_zero = k.zero && !(k.wide && WIDE_IS_SIGNED), all = k.halves ? half : 2;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < WIDE; c++) whole[r][c] = takes_zero ? every(x.less[3 * r + all]) << k.zero : (vn){0};
    dots(k, w, x.bytes, 4 * half, k.halves ? 4 * half + 4 : 8, rows, whole);
}
/* Adds a block's products to sums[row][16] of `rows` rows, up to MANY, for WIDE parts from where `sums` begins. */
INLINE void add_rows(const Kind k, const vb (*w)[8], const Weights *of, Block x, const int rows,
                     float (*sums)[PANEL_OUTPUTS]) {
    vn whole[MANY][WIDE];
    pf value[MANY][WIDE];
    products_of(k, w, x, 0, rows, whole);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < WIDE; c++) value[r][c] = floats_of(whole[r][c]) * of->scale[c];
    if (k.halves) {
        products_of(k, w, x, 1, rows, whole);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < WIDE; c++) value[r][c] += floats_of(whole[r][c]) * of->second[c];
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < WIDE; c++) add_value(k, sums[r] + PART * c, value[r][c], of->second[c], x, r);
}

#define ADD_ROWS(count) add_rows(k, w, &weights, block_of(x, b, row + r), count, (void *)(sums[r] + PART * c))
INLINE void fetch_block(const Kind k, const uint8_t *at, int64_t size, int64_t rows) {
    for (int64_t c = 0; c < size; c += 64) {
        __builtin_prefetch(at + AHEAD + c);
        if (!k.high || rows > FEW_ROWS) __builtin_prefetch(at + FAR_AHEAD + c, 0, 2);
    }
}
/* sums[row][16] of rows [row, row + rows) with a panel. */
INLINE void panel_of(const int64_t type, const Rounded *x, const uint8_t *at, int64_t row, int64_t rows,
                     float (*sums)[PANEL_OUTPUTS]) {
    const Kind k = kind_of(type);
    const int64_t blocks = x->inputs / BLOCK, size = block_bytes(k);
    Super super = {0};
    for (int64_t b = 0; b < blocks; b++, at += size) {
        if (k.super && b % SUPER == 0) {
            super_of(k, &super, at);
            at += head_bytes(k);
        }
        fetch_block(k, at, size, rows);
        for (int c = 0; c < PANEL_OUTPUTS / PART; c += WIDE) {
            Weights weights;
            weights_of(k, &weights, at, &super, c);
            const vb(*w)[8] = weights.w;
            IN_MEMORY(w, weights.w);
            int64_t r = 0;
            for (; r + MANY <= rows; r += MANY) ADD_ROWS(MANY);
            switch (rows - r) {
#if MANY > 4
            case 7: ADD_ROWS(7); break;
            case 6: ADD_ROWS(6); break;
            case 5: ADD_ROWS(5); break;
            case 4: ADD_ROWS(4); break;
#endif
#if MANY > 2
            case 3: ADD_ROWS(3); break;
            case 2: ADD_ROWS(2); break;
#endif
#if MANY > 1
            case 1: ADD_ROWS(1); break;
#endif
            }
        }
    }
}

static void put(const Product *p, float (*sums)[PANEL_OUTPUTS], int64_t row, int64_t rows, int64_t output,
                int64_t count) {
    const int half = (int)p->half;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (row + r) * p->outputs + output;
        vf y = loadf(sums[r]);
        if (p->bias) y += load(p->bias, output, count, half);
        if (p->residual) y += load(p->residual, at, count, half);
        store(p->out, at, count, half, y);
    }
}
/* Outputs [output, end) of a part. */
INLINE void panels(const int64_t type, const Product *p, const Part part, int64_t output, int64_t end) {
    const int64_t bytes = panel_bytes(kind_of(type), p->inputs);
    for (; output < end; output += PANEL_OUTPUTS)
        for (int64_t row = 0; row < p->rows; row += TILE) {
            const int64_t rows = least(p->rows - row, TILE);
            float sums[TILE][PANEL_OUTPUTS];
            memset(sums, 0, (size_t)rows * sizeof *sums);
            panel_of(type, &p->rounded, part.panels + (output - part.first) / PANEL_OUTPUTS * bytes, row, rows, sums);
            put(p, sums, row, rows, output, least(end - output, PANEL_OUTPUTS));
        }
}

#if HAS_TILES
/* -- panels by tiles ------------------------------------------------------------------------------------------------ */

#define PRODUCTS 4 /* of a chunk */

/* Some blocks of a panel, and the rows that they are multiplied with. */
typedef struct {
    int64_t first, count; /* blocks; 0: none */
    int64_t output, outputs, row, rows;
    int64_t done; /* of the rows, by another chunk */
    int last;     /* of the panel */
} Chunk;
/* Chunks go through stages, block by block among those of others: in one turn they are unpacked, in the next multiplied,
   and two turns later their scales are applied. So nobody waits: neither a tile for what is stored right before, nor a
   store for a product, nor a load for a store. */
typedef struct {
    Chunk chunks[4];
    Weights weights[4][PRODUCTS];
    int32_t whole[3][PRODUCTS][TILE_ROWS][PANEL_OUTPUTS];
    int32_t (*made[SUM_TILES])[PANEL_OUTPUTS]; /* where what tiles have belongs; NULL: they have nothing */
    int64_t products;                          /* so far */
    float sums[TILE_ROWS][PANEL_OUTPUTS]; /* of the panel whose scales are applied */
} Belt;
INLINE int64_t blocks_of(const Kind k) { return k.halves ? PRODUCTS / 2 : PRODUCTS; }

/* Adds a chunk's blocks to the sums of `rows` rows, of which its row `r` is the first. */
INLINE void scale_rows(const Kind k, float (*sums)[PANEL_OUTPUTS], const Chunk *c, const Weights *weights,
                       int32_t (*whole)[TILE_ROWS][PANEL_OUTPUTS], const Rounded *x, int64_t r, const int rows) {
    pf y[8];
    for (int i = 0; i < rows; i++) y[i] = c->first ? part_at(sums[r + i]) : (pf){0};
    for (int64_t b = 0; b < c->count; b++) {
        const pf scale = weights[b].scale[0], second = weights[b].second[0];
        const int32_t (*first)[PANEL_OUTPUTS] = whole[k.halves ? 2 * b : b] + r;
        const Block of = block_of(x, c->first + b, c->row + r);
        __asm__("" : "+r"(first)); /* else GCC 12 computes the addresses of all rows before */
        for (int i = 0; i < rows; i++) {
            vn sum[2];
            memcpy(&sum[0], first[i], sizeof *sum);
            if (k.halves) memcpy(&sum[1], first[TILE_ROWS + i], sizeof *sum);
            pf value = floats_of(sum[0]) * scale;
            if (k.halves) value += floats_of(sum[1]) * second;
            y[i] += value * every_float(of.scales[i]);
            if (k.min) y[i] += second * every_float(of.sums[i]);
        }
    }
    for (int i = 0; i < rows; i++) memcpy(sums[r + i], &y[i], sizeof y[i]);
}
#define SCALE_ROWS(count) \
    scale_rows(k, belt->sums, scaled, belt->weights[(turn + 1) % 4], old, &p->rounded, r, count), r += count
/* Brings the chunks one turn further, of which chunks[turn % 4] is new. Returns where the next one's blocks are. */
INLINE const uint8_t *advance(const Kind k, Belt *belt, int64_t turn, const Product *p, const uint8_t *at, Super *super) {
    const Chunk *unpacked = &belt->chunks[turn % 4], *multiplied = &belt->chunks[(turn + 3) % 4];
    const Chunk *scaled = &belt->chunks[(turn + 1) % 4];
    const int64_t blocks = blocks_of(k);
    int32_t (*new)[TILE_ROWS][PANEL_OUTPUTS] = belt->whole[turn % 3];
    int32_t (*old)[TILE_ROWS][PANEL_OUTPUTS] = belt->whole[(turn + 1) % 3];
    for (int64_t i = 0; i < blocks; i++) {
        if (scaled->count && 2 * i % blocks == 0) { /* eight rows among the first blocks, others among the last */
            const int64_t end = least(scaled->rows, 16 * i / blocks + 8);
            int64_t r = scaled->done > 16 * i / blocks ? scaled->done : 16 * i / blocks;
            if (r + 8 == end) SCALE_ROWS(8);
            if (r + 4 <= end) SCALE_ROWS(4);
            if (r + 2 <= end) SCALE_ROWS(2);
            if (r < end) SCALE_ROWS(1);
        }
        if (i < unpacked->count) {
            Weights *to = &belt->weights[turn % 4][i];
            if (k.super && (unpacked->first + i) % SUPER == 0) {
                super_of(k, super, at);
                at += head_bytes(k);
            }
            fetch_block(k, at, block_bytes(k), unpacked->rows);
            weights_of(k, to, at, super, 0);
            for (int g = 0; g < 8 && k.zero; g++) to->w[0][g] -= (uint8_t)(1 << k.zero);
            at += block_bytes(k);
        }
        if (i >= multiplied->count) continue;
        const vb *w = belt->weights[(turn + 3) % 4][i].w[0];
        const int8_t *x = block_of(&p->rounded, multiplied->first + i, multiplied->row).bytes;
        for (int half = 0; half < 1 + k.halves; half++) {
            int32_t (**made)[PANEL_OUTPUTS] = &belt->made[belt->products % SUM_TILES];
            multiply_tile((int)(belt->products++ % 6), w + 4 * half, x + BLOCK / 2 * half, *made);
            *made = new[k.halves ? 2 * i + half : i];
        }
    }
    for (int i = 0; i < SUM_TILES && multiplied->count < SUM_TILES; i++) { /* the next chunk may be the last but one */
        store_tile(i, belt->made[i]);
        belt->made[i] = NULL;
    }
    if (scaled->count && scaled->last)
        put(p, belt->sums + scaled->done, scaled->row + scaled->done, scaled->rows - scaled->done, scaled->output,
            scaled->outputs);
    return at;
}
/* As `panels`. */
INLINE void panels_by_tiles(const int64_t type, const Product *p, const Part part, int64_t output, int64_t end,
                            Tiles *t) {
    const Kind k = kind_of(type);
    const int64_t blocks = p->inputs / BLOCK, bytes = panel_bytes(k, p->inputs), rows = least(p->rows, TILE_ROWS);
    const uint8_t *at = NULL;
    Super super = {0};
    Belt belt;
    memset(belt.chunks, 0, sizeof belt.chunks);
    memset(belt.made, 0, sizeof belt.made);
    belt.products = 0;
    size_tiles(t, rows, k.halves ? 4 : 8);
    Chunk c = {.output = output, .rows = rows};
    for (int64_t turn = 0, rest = 0; rest < 3; turn++) {
        c.count = least(blocks - c.first, blocks_of(k));
        if (c.output >= end) c.count = 0, rest++;
        else if (!c.first) at = part.panels + (c.output - part.first) / PANEL_OUTPUTS * bytes;
        c.outputs = least(end - c.output, PANEL_OUTPUTS);
        c.last = c.first + c.count == blocks;
        belt.chunks[turn % 4] = c;
        at = advance(k, &belt, turn, p, at, &super);
        c.first += c.count;
        if (!c.last) continue;
        c.first = 0;
        c.row += rows;
        c.done = 0;
        if (c.row >= p->rows) {
            c.row = 0;
            c.output += PANEL_OUTPUTS;
        } else if (c.row + rows > p->rows) {
            c.done = c.row + rows - p->rows;
            c.row = p->rows - rows;
        }
    }
}
#define BY_TILES(type)                                  \
    if (p->rows >= FEWEST) {                            \
        panels_by_tiles(type, p, part, output, end, t); \
        return;                                         \
    }
#else
#define BY_TILES(type)
#endif

/* -- shares of the work ---------------------------------------------------------------------------------------------- */

#define OF_TYPE(type)                                                                               \
    static void panels_##type(const Product *p, Part part, int64_t output, int64_t end, Tiles *t) { \
        BY_TILES(type)                                                                              \
        panels(type, p, part, output, end);                                                         \
    }
OF_TYPE(Q4_0)
OF_TYPE(Q4_1)
OF_TYPE(Q5_0)
OF_TYPE(Q5_1)
OF_TYPE(Q8_0)
OF_TYPE(Q4_K)
OF_TYPE(Q5_K)
OF_TYPE(Q6_K)
OF_TYPE(MXFP4)
void multiply_blocks(const Product *p, int64_t from, int64_t to) {
    const int64_t *blocks = p->blocks;
    Tiles tiles = {0}, *t = &tiles;
    for (int64_t i = 0; i < blocks[0]; i++) {
        const Part part = part_of(blocks, i);
        const int64_t output = from > part.first ? from : part.first, end = least(to, part.first + part.outputs);
        if (output >= end) continue;
        switch (part.type) {
        case Q4_0: panels_Q4_0(p, part, output, end, t); break;
        case Q4_1: panels_Q4_1(p, part, output, end, t); break;
        case Q5_0: panels_Q5_0(p, part, output, end, t); break;
        case Q5_1: panels_Q5_1(p, part, output, end, t); break;
        case Q8_0: panels_Q8_0(p, part, output, end, t); break;
        case Q4_K: panels_Q4_K(p, part, output, end, t); break;
        case Q5_K: panels_Q5_K(p, part, output, end, t); break;
        case Q6_K: panels_Q6_K(p, part, output, end, t); break;
        case MXFP4: panels_MXFP4(p, part, output, end, t); break;
        }
    }
    release_tiles(t);
}

typedef struct {
    Team team;
    Product product;
    int64_t unit;   /* outputs that are not shared */
    int64_t *taken; /* see `Shares` */
} BlockCall;

static void some_blocks(void *data) {
    BlockCall *j = data;
    const Member me = join(&j->team);
    Product *p = &j->product;
    Ahead nothing = {0};
    for (int64_t i = share(&me, p->rows, 0); i < share(&me, p->rows, 1); i++)
        round_part(&p->rounded, p->x, i, 0, p->inputs, p->half);
    meet(&me, &nothing);
    for (Shares s = shares_of(&me, (p->outputs + j->unit - 1) / j->unit, j->taken); take_units(&s);)
        multiply_blocks(p, s.from * j->unit, s.to * j->unit);
}

/* out [rows, outputs], x [rows, inputs], residual [rows, outputs] or 0, rows; of the GEMM: 0, bias [outputs] or 0,
   inputs, outputs, 0, blocks; half, outputs that must not be shared (all, or 16), spare [rounded_size], workers */
PyObject *py_block_gemm(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[8 + GEMM];
    if (!numbers(args, given, 8 + GEMM, n)) return NULL;
    const int64_t *more = n + 4 + GEMM;
    Workers *workers = POINTER(more[3]);
    int64_t taken[workers->most * TAKEN];
    memset(taken, 0, sizeof taken);
    BlockCall job = {.product = product_of(n + 4, more[0]), .unit = more[1], .taken = taken};
    Product *p = &job.product;
    p->out = POINTER(n[0]);
    p->x = POINTER(n[1]);
    p->residual = POINTER(n[2]);
    p->rows = n[3];
    p->rounded = rounded_at(POINTER(more[2]), p->rows, p->inputs);
    RELEASE_GIL
    run_team(some_blocks, &job, &job.team, p->rows * p->inputs * p->outputs < SMALL ? NULL : workers);
    TAKE_GIL
    Py_RETURN_NONE;
}
