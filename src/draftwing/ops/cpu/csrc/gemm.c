/* Products of few rows with a weight in bfloat16, read where oneDNN has packed it.

   A decode step reads every weight once, so a GEMM of few rows takes as long as its weight takes to read, and what
   oneDNN does before it reads (some 10 us a call). This starts at once, and each thread walks through memory of its own
   from beginning to end. The layout is oneDNN's AB16b64a2b: panels of 64 outputs, in them pairs of inputs, in them the
   outputs. A row's bits are oneDNN's, too, among any number of rows: inputs are summed in order, in blocks whose sums
   are added one after the other. `ops/gemm/cpu.py` tries out whether that is so and how long the blocks are. */

#include "sums.h"

#define PANEL 64
#define HALF 32         /* outputs of half a panel, the smallest share of the work */
#define AHEAD (8 << 10) /* bytes that are fetched before they are needed; hardware does not see past a page's end */

#if defined(__AVX512BF16__)
INLINE __m512 widened(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

/* Outputs [column, column + 16 * vectors) of `rows` rows. */
INLINE void tile(const Product *p, int64_t row, int64_t column, const int rows, const int vectors) {
    const int64_t pairs = p->inputs / 2, block = p->block / 2;
    const uint16_t *weight = (const uint16_t *)p->weight + column / PANEL * PANEL * p->inputs + column % PANEL * 2;
    const int32_t *x = (const int32_t *)((const uint16_t *)p->x + row * p->inputs);
    const uint16_t *bias = p->bias, *residual = p->residual;
    __m512 total[TALL][4] = {0};
    for (int64_t first = 0; first < pairs; first += block) {
        const int64_t end = least(first + block, pairs);
        __m512 sum[TALL][4];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_setzero_ps();
        for (int64_t i = first; i < end; i++, weight += 2 * PANEL) {
            __m512bh w[4];
            for (int v = 0; v < vectors; v++) {
                w[v] = (__m512bh)_mm512_loadu_si512(weight + 32 * v);
                _mm_prefetch((const char *)(weight + 32 * v) + AHEAD, _MM_HINT_T0);
            }
            for (int r = 0; r < rows; r++) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(x[r * pairs + i]);
                for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], pair, w[v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) total[r][v] = first ? _mm512_add_ps(total[r][v], sum[r][v]) : sum[r][v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            const int64_t output = column + v * LANES, at = (row + r) * p->outputs + output;
            __m512 y = total[r][v];
            if (bias) y = _mm512_add_ps(y, widened(bias + output));
            if (residual) y = _mm512_add_ps(y, widened(residual + at));
            _mm256_storeu_si256((void *)((uint16_t *)p->out + at), (__m256i)_mm512_cvtneps_pbh(y));
        }
}

/* -- shares of the work -------------------------------------------------------------------------------------------- */

INLINE void columns(const Product *p, int64_t column, const int vectors) {
#define TILE_OF(n) tile(p, row, column, n, vectors)
    EACH_ROWS(row, rows, 0, p->rows) BY_ROWS(rows, TILE_OF)
}

static void multiply_panels(const Product *p, int64_t from, int64_t to) {
    while (from < to)
        if (from % PANEL || from + PANEL > to) {
            columns(p, from, 2);
            from += HALF;
        } else {
            columns(p, from, 4);
            from += PANEL;
        }
}

const int has_product = 1;
#else
static void multiply_panels(const Product *p, int64_t from, int64_t to) {}
const int has_product = 0;
#endif

void multiply_part(const Product *p, int64_t from, int64_t to) {
    if (p->blocks) multiply_blocks(p, from, to);
    else multiply_panels(p, from, to);
}

static void multiply_some(void *data) {
    Product *p = data;
    const int64_t halves = p->outputs / HALF;
    for (int64_t share; (share = take(&p->next, 1)) < p->shares;)
        multiply_part(p, share * halves / p->shares * HALF, (share + 1) * halves / p->shares * HALF);
}

Product product_of(const int64_t *n, int64_t half) {
    Product p = {.half = half};
    memcpy(&p, n, GEMM * sizeof *n);
    return p;
}

/* out [rows, outputs], x [rows, inputs], residual [rows, outputs] or 0, rows; of the GEMM: packed weight, bias
   [outputs] or 0, inputs, a multiple of 32, outputs, a multiple of 64, block, 0; workers */
static void product(int64_t *n) {
    Product p = product_of(n + 4, 1);
    Workers *workers = POINTER(n[4 + GEMM]);
    p.out = POINTER(n[0]), p.x = POINTER(n[1]), p.residual = POINTER(n[2]), p.rows = n[3];
    p.shares = workers->most;
    run_unlocked(multiply_some, &p, workers, p.inputs * p.outputs / 20000);
}

Function product_functions[] = {{"product", product, 5 + GEMM}, {0}};
