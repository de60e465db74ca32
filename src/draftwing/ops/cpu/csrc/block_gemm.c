/* GEMMs with weights in quantised blocks, for any number of rows.

   Rows are rounded to 8 bits, each block of 32 by a scale of its own. The sum of a block's products is a whole number,
   so it does not matter how it is made; the sums over blocks are made in float32, one block after the other, without
   contraction. So the bits of a row's result depend on the row and the weight alone: not on how many rows there are,
   nor on threads, nor on the instruction set.

   A block's weights are unpacked once for up to TILE rows. What differs between instruction sets is how many outputs
   are computed together, and `dots`. */

#include "dots.h"

#define TILE 32
/* Bytes before they are needed that are fetched to the first cache, and to the second: a core waits for some 24 lines of
   the first, which is less than memory needs, and hardware does not see past a page's end. Swept: 2, 3, 4, 6, 8 KB with
   8, 16 and 32 KB, or none. */
#define AHEAD (4 << 10)
#define FAR_AHEAD (16 << 10)

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

/* A block's sum times its scale. With vectors of 64 bytes a sum begins with the bits of 1.5 * 2^23, so what it comes to are
   those of that float plus the sum. Nothing converts it then: the product with 1.5 * 2^23 is a float itself, and is taken
   off before anything is rounded. Not so of MXFP4, whose scales may be too large, and of blocks with two scales, where it
   takes longer on Zen 4. An infinite scale, which no sound file has, gives NaN here and perhaps infinity elsewhere. */
#if PART == 16
#define FROM(k) ((k).mx || (k).halves ? 0 : 0x4b400000)
INLINE pf value_of(const Kind k, vn sum, pf scale) {
    if (!FROM(k)) return floats_of(sum) * scale;
    return (pf)_mm512_fmadd_ps((__m512)sum, scale, scale * -12582912.0f);
}
#else
#define FROM(k) 0
INLINE pf value_of(const Kind k, vn sum, pf scale) { return floats_of(sum) * scale; }
#endif
/* Adds a row's products with a block, times their scales, to `sum` [PART]. */
INLINE void add_value(const Kind k, float *sum, pf value, pf second, Block x, int64_t r) {
    pf y = part_at(sum) + value * every_float(x.scales[r]);
    if (k.min) y += second * every_float(x.sums[r]);
    memcpy(sum, &y, sizeof y);
}
/* The sums of q times x, without `Kind.zero`: of half a block where each has a scale of its own, else of all of it. They
   begin with FROM (see `value_of`). */
INLINE void products_of(const Kind k, const vb (*w)[8], Block x, const int half, const int rows, vn (*whole)[WIDE]) {
    const int takes_zero = k.zero && !(k.wide && WIDE_IS_SIGNED), all = k.halves ? half : 2;
    for (int r = 0; r < rows; r++) {
        const int32_t less = takes_zero ? x.less[3 * r + all] : 0;
        for (int c = 0; c < WIDE; c++)
            whole[r][c] = FROM(k) ? every(FROM(k) + less * (1 << k.zero)) : every(less) << k.zero;
    }
    dots(k, w, x.bytes, 4 * half, k.halves ? 4 * half + 4 : 8, rows, whole);
}
/* Adds a block's products to sums[row][16] of `rows` rows, up to MANY, for WIDE parts from where `sums` begins. */
INLINE void add_rows(const Kind k, const vb (*w)[8], const Weights *of, Block x, const int rows,
                     float (*sums)[PANEL_OUTPUTS]) {
    vn whole[MANY][WIDE];
    pf value[MANY][WIDE];
    products_of(k, w, x, 0, rows, whole);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < WIDE; c++) value[r][c] = value_of(k, whole[r][c], of->scale[c]);
    if (k.halves) {
        products_of(k, w, x, 1, rows, whole);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < WIDE; c++) value[r][c] += value_of(k, whole[r][c], of->second[c]);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < WIDE; c++) add_value(k, sums[r] + PART * c, value[r][c], of->second[c], x, r);
}

#define ADD_ROWS(count) add_rows(k, w, &weights, block_of(x, b, row + r), count, (void *)(sums[r] + PART * c))
#define REST(count)                        \
    case count:                            \
        if (many > count) ADD_ROWS(count); \
        break
INLINE void fetch_block(const uint8_t *at, int64_t size) {
    for (int64_t c = 0; c < size; c += 64) {
        __builtin_prefetch(at + AHEAD + c);
        __builtin_prefetch(at + FAR_AHEAD + c, 0, 2);
    }
}
/* sums[row][16] of rows [row, row + rows) with a panel. */
INLINE void panel_of(const int64_t type, const Rounded *x, const uint8_t *at, int64_t row, int64_t rows,
                     float (*sums)[PANEL_OUTPUTS]) {
    const Kind k = kind_of(type);
    const int64_t blocks = x->inputs / BLOCK, size = block_bytes(k);
    const int many = k.halves && MANY > 4 ? 4 : MANY; /* sums of halves leave no registers for more */
    Super super = {0};
    for (int64_t b = 0; b < blocks; b++, at += size) {
        if (k.super && b % SUPER == 0) {
            super_of(k, &super, at);
            at += head_bytes(k);
        }
        fetch_block(at, size);
        for (int c = 0; c < PANEL_OUTPUTS / PART; c += WIDE) {
            Weights weights;
            weights_of(k, &weights, at, &super, c);
            const vb(*w)[8] = weights.w;
            IN_MEMORY(w, weights.w);
            int64_t r = 0;
            for (; r + many <= rows; r += many) ADD_ROWS(many);
            switch (rows - r) {
#if MANY > 4
                REST(7);
                REST(6);
                REST(5);
                REST(4);
#endif
#if MANY > 2
                REST(3);
                REST(2);
#endif
#if MANY > 1
                REST(1);
#endif
            }
        }
    }
}

#define OF_TYPE(type)                                                                        \
    static void panel_##type(const Rounded *x, const uint8_t *at, int64_t row, int64_t rows, \
                             float (*sums)[PANEL_OUTPUTS]) {                                 \
        panel_of(type, x, at, row, rows, sums);                                              \
    }
EACH_TYPE(OF_TYPE)
void multiply_panel(int64_t type, const Rounded *x, const uint8_t *at, int64_t row, int64_t rows,
                    float (*sums)[PANEL_OUTPUTS]) {
#define PANEL_CASE(type) \
    case type: panel_##type(x, at, row, rows, sums); break;
    switch (type) { EACH_TYPE(PANEL_CASE) }
}

/* -- rows in 8 bits -------------------------------------------------------------------------------------------------- */

int64_t rounded_size(int64_t rows, int64_t inputs) { return rows * (inputs + inputs / BLOCK * 20); }
Rounded rounded_at(void *memory, int64_t rows, int64_t inputs) {
    const int64_t blocks = rows * (inputs / BLOCK);
    char *at = memory;
    return (Rounded){.bytes = (int8_t *)at,
                     .scales = (float *)(at + blocks * BLOCK),
                     .sums = (float *)(at + blocks * (BLOCK + 4)),
                     .less = (int32_t *)(at + blocks * (BLOCK + 8)),
                     .rows = rows,
                     .inputs = inputs};
}

/* Sizes are compared as whole numbers, as which floats above 0 have the same order, and what is infinite or no number
   comes last. It must not get lost: a block with it has no number as its scale. */
INLINE void round_blocks(const Rounded *to, const void *x, int64_t row, int64_t from, int64_t end, const int half) {
    for (int64_t b = from / BLOCK; b < end / BLOCK; b++) {
        const int64_t at = row * to->inputs + b * BLOCK, place = b * to->rows + row;
        const vf low = load(x, at, LANES, half), high = load(x, at + LANES, LANES, half);
        float scale, inverse;
        const int lost = scale_of(largest_of((vi)low & 0x7fffffff, (vi)high & 0x7fffffff), &scale, &inverse);
        vi a = nearest(low * splat(inverse)), c = nearest(high * splat(inverse));
        if (lost) a = c = (vi){0};
        const byte_half bytes = bytes_of(a), others = bytes_of(c);
        memcpy(to->bytes + place * BLOCK, &bytes, sizeof bytes);
        memcpy(to->bytes + place * BLOCK + LANES, &others, sizeof others);
        const int32_t first = sum_of(a), second = sum_of(c);
        to->scales[place] = scale;
        to->sums[place] = scale * (float)(first + second);
        to->less[3 * place] = -first;
        to->less[3 * place + 1] = -second;
        to->less[3 * place + 2] = -(first + second);
    }
}
void round_part(const Rounded *to, const void *x, int64_t row, int64_t from, int64_t end, int64_t half) {
    BY_HALF(half, round_blocks, to, x, row, from, end);
}

/* -- shares of the work ---------------------------------------------------------------------------------------------- */

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
void multiply_blocks(const Product *p, int64_t from, int64_t to) {
    const int64_t *blocks = p->blocks;
    for (int64_t i = 0; i < blocks[0]; i++) {
        const Part part = part_of(blocks, i);
        const int64_t bytes = panel_bytes(kind_of(part.type), p->inputs), end = part.first + part.outputs;
        int64_t output = most(from, part.first);
        for (; output < to && output < end; output += PANEL_OUTPUTS) {
            const uint8_t *at = part.panels + (output - part.first) / PANEL_OUTPUTS * bytes;
            const int64_t count = least(end - output, PANEL_OUTPUTS);
            for (int64_t row = 0; row < p->rows; row += TILE) {
                const int64_t rows = least(p->rows - row, TILE);
                float sums[TILE][PANEL_OUTPUTS];
                memset(sums, 0, (size_t)rows * sizeof *sums);
                multiply_panel(part.type, &p->rounded, at, row, rows, sums);
                put(p, sums, row, rows, output, count);
            }
        }
    }
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
static void block_gemm(int64_t *n) {
    const int64_t *more = n + 4 + GEMM;
    Workers *workers = POINTER(more[3]);
    int64_t taken[workers->most * TAKEN];
    memset(taken, 0, sizeof taken);
    BlockCall job = {.product = product_of(n + 4, more[0]), .unit = more[1], .taken = taken};
    Product *p = &job.product;
    p->out = POINTER(n[0]), p->x = POINTER(n[1]), p->residual = POINTER(n[2]), p->rows = n[3];
    p->rounded = rounded_at(POINTER(more[2]), p->rows, p->inputs);
    run_team_unlocked(some_blocks, &job, &job.team, p->rows * p->inputs * p->outputs < SMALL ? NULL : workers);
}

Function block_gemm_functions[] = {{"block_gemm", block_gemm, 8 + GEMM}, {0}};
