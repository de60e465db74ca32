/* Adapters' factors in 8 bits, beside weights in blocks: the rows that these have in 8 bits meet factors in 8 bits, too.

   `down` [S, slices, rank / 16, bytes]: a panel of Q8_0 (blocks.h) for 16 rows of it. `up` [S, outputs / 16, rank / 16, 288]:
   of 16 outputs with 16 factors, byte 64 g + 4 o + i has factor 4 g + i of output o, plus 128; 16 scales, float16. Between
   the products a row has 16 sums in 8 bits by a scale of their own. Sums of products are whole numbers, and floats are
   added by one order, so a row has the same bits beside any others and with any instruction set. */

#include "dots.h"

#define FACTORS 16
#define UP_BYTES (PANEL_OUTPUTS * FACTORS + 2 * PANEL_OUTPUTS)

void round_sums(Sixteen *to, const float *sums) {
    const vf u = loadf(sums);
    const vi sizes = (vi)u & 0x7fffffff;
    float scale, inverse;
    const int lost = scale_of(largest_of(sizes, sizes), &scale, &inverse);
    const vi q = lost ? (vi){0} : nearest(u * splat(inverse));
    const byte_half bytes = bytes_of(q);
    memcpy(to->bytes, &bytes, sizeof bytes);
    to->scale = scale;
    to->less = -sum_of(q);
}

/* Adds PART floats to elements from `at` on. */
INLINE void add_part(void *y, int64_t at, const int half, pf x) {
    if (!half) {
        const pf sum = part_at((float *)y + at) + x;
        memcpy((float *)y + at, &sum, sizeof sum);
        return;
    }
    ph before;
    memcpy(&before, (uint16_t *)y + at, sizeof before);
    Parted sum = {0};
    sum.bits[0] = wider(before) << 16;
    sum.floats[0] += x;
    const vh all = narrow(sum.f);
    memcpy((uint16_t *)y + at, &all, sizeof before);
}

/* The end of rows [row, to) of the same slot. */
static int64_t alike(const int64_t *slots, int64_t row, int64_t to) {
    int64_t end = row + 1;
    while (end < to && slots[end] == slots[row]) end++;
    return end;
}

void down_8_bits(const Adapted *a, const int64_t *slots, const Rounded *x, int64_t unit, int64_t from, int64_t to,
                 float *sums, Sixteen *small) {
    const int64_t each = a->rank / FACTORS, slice = unit / each, first = unit % each * FACTORS;
    const int64_t bytes = panel_bytes(kind_of(Q8_0), a->inputs);
    for (int64_t row = from, end; row < to; row = end) {
        end = alike(slots, row, to);
        const int64_t mine = (slots[row] - 1) * a->slices + slice;
        if (!slots[row] || a->ranks[mine] <= first) continue;
        float made[32][PANEL_OUTPUTS];
        memset(made, 0, (size_t)(end - row) * sizeof *made);
        const uint8_t *panel = (const uint8_t *)a->down + (mine * each + first / FACTORS) * bytes;
        multiply_panel(Q8_0, x, panel, row, end - row, made);
        for (int64_t r = row; r < end; r++) {
            float *u = made[r - row];
            storef(u, loadf(u) * splat(a->scales[mine]));
            if (sums) memcpy(sums + (r * a->slices + slice) * a->rank + first, u, sizeof *made);
            else round_sums(small + unit * x->rows + r, u);
        }
    }
}

/* WIDE parts of 16 outputs with 16 factors, and their scales. */
INLINE void factors_of(const uint8_t *at, int part, vb (*w)[8], pf *scale) {
    for (int i = 0; i < WIDE; i++) {
        const int o = PART * (part + i);
        for (int g = 0; g < FACTORS / 4; g++) {
            const vb q = bytes_at(at + 64 * g + 4 * o);
            w[i][g] = WIDE_IS_SIGNED ? q ^ 128 : q;
        }
        scale[i] = from_halves(at + PANEL_OUTPUTS * FACTORS + 2 * o);
    }
}
/* Adds to y, of `rows` rows, up to MANY, what `blocks` of 16 factors make of panels of outputs [first, last). u: of the
   first row and factors; u_stride: to the next factors. */
INLINE void add_up(const uint8_t *at, int64_t panel, const Sixteen *u, int64_t u_stride, int64_t blocks, int64_t first,
                   int64_t last, char *y, int64_t y_stride, const int half, const int rows) {
    const Kind k = {.wide = 1};
    for (int64_t o = first; o < last; o += PANEL_OUTPUTS, at += panel)
        for (int part = 0; part < PANEL_OUTPUTS / PART; part += WIDE) {
            pf sums[MANY][WIDE] = {0};
            for (int64_t b = 0; b < blocks; b++) {
                const Sixteen *some = u + b * u_stride;
                vb w[WIDE][8];
                pf scale[WIDE];
                vn whole[MANY][WIDE];
                factors_of(at + b * UP_BYTES, part, w, scale);
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < WIDE; c++) whole[r][c] = every(WIDE_IS_SIGNED ? 0 : some[r].less * 128);
                dots(k, (const vb(*)[8])w, some[0].bytes, 0, FACTORS / 4, rows, whole);
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < WIDE; c++)
                        sums[r][c] += floats_of(whole[r][c]) * scale[c] * every_float(some[r].scale);
            }
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < WIDE; c++) add_part(y, r * y_stride + o + PART * (part + c), half, sums[r][c]);
        }
}
#define ADD_UP(half, count)                                                                                        \
    for (; r + count <= rows; r += count)                                                                          \
    add_up(at, panel, u + r, u_stride, blocks, first, last, y + r * y_stride * (half ? 2 : 4), y_stride, half, count)
INLINE void add_rows(const uint8_t *at, int64_t panel, const Sixteen *u, int64_t u_stride, int64_t blocks,
                     int64_t first, int64_t last, char *y, int64_t y_stride, int64_t rows, const int half) {
    int64_t r = 0;
    ADD_UP(half, MANY);
#if MANY > 4
    ADD_UP(half, 4);
#endif
#if MANY > 1
    ADD_UP(half, 1);
#endif
}

void up_8_bits(const Adapted *a, const int64_t *slots, const Sixteen *small, int64_t rows, int64_t from, int64_t to,
               int64_t first, int64_t last, void *y, int64_t y_stride, int64_t half) {
    const int64_t each = a->rank / FACTORS, panels = a->outputs / PANEL_OUTPUTS, panel = each * UP_BYTES;
    for (int64_t row = from, end; row < to; row = end) {
        end = alike(slots, row, to);
        if (!slots[row]) continue;
        for (int64_t slice = 0, begin = 0; slice < a->slices; begin = a->ends[slice++]) {
            const int64_t o = most(first, begin), stop = least(last, a->ends[slice]);
            const int64_t slot = slots[row] - 1, blocks = (a->ranks[slot * a->slices + slice] + FACTORS - 1) / FACTORS;
            const uint8_t *at = (const uint8_t *)a->up + (slot * panels + o / PANEL_OUTPUTS) * panel;
            const Sixteen *u = small + slice * each * rows + row;
            char *to_row = (char *)y + row * y_stride * (half ? 2 : 4);
            if (o >= stop || !blocks) continue;
            BY_HALF(half, add_rows, at, panel, u, rows, blocks, o, stop, to_row, y_stride, end - row);
        }
    }
}
