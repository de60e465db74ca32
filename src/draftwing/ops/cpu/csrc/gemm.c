/* Products of few rows with a weight in bfloat16, read where oneDNN has packed it.

   A decode step reads every weight once, so a GEMM of few rows takes as long as its weight takes to read, and what
   oneDNN does before it reads (some 10 us a call). This starts at once, and each thread walks through memory of its own
   from beginning to end. The layout is oneDNN's AB16b64a2b: panels of 64 outputs, in them pairs of inputs, in them the
   outputs. A row's bits are oneDNN's, too, among any number of rows: inputs are summed in order, in blocks whose sums
   are added one after the other. `layers/linear.py` tries out whether that is so and how long the blocks are.

   Weights in 8 bits are half as long. They are laid out alike, but four inputs together, and rows are rounded to 8
   bits, too: good enough to draft with. */

#include "cpu.h"

#define PANEL 64
#define HALF 32         /* outputs of half a panel, the smallest share of the work */
#define GROUP_ROWS 6    /* of which a panel's sums fit in registers */
#define AHEAD (8 << 10) /* bytes that are fetched before they are needed; hardware does not see past a page's end */

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <immintrin.h>

INLINE __m512 widened(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

/* Outputs [column, column + 16 * vectors) of `rows` rows. */
INLINE void tile(const Product *p, int64_t row, int64_t column, const int rows, const int vectors) {
    const int64_t pairs = p->inputs / 2, block = p->block / 2;
    const uint16_t *weight = p->weight + column / PANEL * PANEL * p->inputs + column % PANEL * 2;
    const int32_t *x = (const int32_t *)(p->x + row * p->inputs);
    __m512 total[GROUP_ROWS][4] = {0};
    for (int64_t first = 0; first < pairs; first += block) {
        const int64_t end = first + block < pairs ? first + block : pairs;
        __m512 sum[GROUP_ROWS][4];
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
            if (p->bias) y = _mm512_add_ps(y, widened(p->bias + output));
            if (p->residual) y = _mm512_add_ps(y, widened(p->residual + at));
            _mm256_storeu_si256((void *)(p->out + at), (__m256i)_mm512_cvtneps_pbh(y));
        }
}

/* -- weights in 8 bits --------------------------------------------------------------------------------------------- */

#define BYTE_INPUTS 4096 /* at most, and rows */
#define BYTE_ROWS 8
typedef struct {
    float scale[BYTE_ROWS];
    uint8_t x[BYTE_ROWS * BYTE_INPUTS]; /* plus 128: the instruction wants one factor without sign */
} Bytes;

/* Each row by its own scale. */
static void to_bytes(const Product *p, Bytes *to) {
    for (int64_t row = 0; row < p->rows; row++) {
        const uint16_t *x = p->x + row * p->inputs;
        __m512 most = _mm512_set1_ps(1e-30f);
        for (int64_t i = 0; i < p->inputs; i += LANES) most = _mm512_max_ps(most, _mm512_abs_ps(widened(x + i)));
        const float scale = _mm512_reduce_max_ps(most) / 127;
        to->scale[row] = scale;
        for (int64_t i = 0; i < p->inputs; i += LANES) {
            const __m512i y = _mm512_cvtps_epi32(_mm512_mul_ps(widened(x + i), _mm512_set1_ps(1 / scale)));
            const __m128i bytes = _mm_xor_si128(_mm512_cvtsepi32_epi8(y), _mm_set1_epi8(-128));
            _mm_storeu_si128((void *)(to->x + row * p->inputs + i), bytes);
        }
    }
}

INLINE void byte_tile(const Product *p, const Bytes *x, int64_t row, int64_t column, const int rows,
                      const int vectors) {
    const int64_t fours = p->inputs / 4;
    const uint8_t *weight = (const uint8_t *)p->weight + column / PANEL * PANEL * p->inputs + column % PANEL * 4;
    const int32_t *from = (const int32_t *)(x->x + row * p->inputs);
    __m512i sum[GROUP_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_setzero_si512();
    for (int64_t i = 0; i < fours; i++, weight += 4 * PANEL) {
        __m512i w[4];
        for (int v = 0; v < vectors; v++) {
            w[v] = _mm512_loadu_si512(weight + 64 * v);
            _mm_prefetch((const char *)(weight + 64 * v) + AHEAD, _MM_HINT_T0);
        }
        for (int r = 0; r < rows; r++) {
            const __m512i four = _mm512_set1_epi32(from[r * fours + i]);
            for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], four, w[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            const int64_t output = column + v * LANES, at = (row + r) * p->outputs + output;
            const __m512i exact = _mm512_sub_epi32(sum[r][v], _mm512_loadu_si512(p->offsets + output));
            const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(p->scales + output), _mm512_set1_ps(x->scale[row + r]));
            __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), scale);
            if (p->bias) y = _mm512_add_ps(y, widened(p->bias + output));
            if (p->residual) y = _mm512_add_ps(y, widened(p->residual + at));
            _mm256_storeu_si256((void *)(p->out + at), (__m256i)_mm512_cvtneps_pbh(y));
        }
}

INLINE void byte_columns(const Product *p, const Bytes *x, int64_t column, const int vectors) {
    for (int64_t row = 0; row < p->rows; row += 4) switch (p->rows - row) {
        case 1: byte_tile(p, x, row, column, 1, vectors); break;
        case 2: byte_tile(p, x, row, column, 2, vectors); break;
        case 3: byte_tile(p, x, row, column, 3, vectors); break;
        default: byte_tile(p, x, row, column, 4, vectors);
        }
}

static void multiply_bytes(const Product *p, int64_t from, int64_t to) {
    Bytes x;
    to_bytes(p, &x);
    while (from < to)
        if (from % PANEL || from + PANEL > to) {
            byte_columns(p, &x, from, 2);
            from += HALF;
        } else {
            byte_columns(p, &x, from, 4);
            from += PANEL;
        }
}

/* -- shares of the work -------------------------------------------------------------------------------------------- */

INLINE void columns(const Product *p, int64_t column, const int vectors) {
    const int64_t groups = (p->rows + GROUP_ROWS - 1) / GROUP_ROWS, most = (p->rows + groups - 1) / groups;
    for (int64_t row = 0; row < p->rows; row += most) switch (p->rows - row < most ? p->rows - row : most) {
        case 1: tile(p, row, column, 1, vectors); break;
        case 2: tile(p, row, column, 2, vectors); break;
        case 3: tile(p, row, column, 3, vectors); break;
        case 4: tile(p, row, column, 4, vectors); break;
        case 5: tile(p, row, column, 5, vectors); break;
        default: tile(p, row, column, 6, vectors);
        }
}

void multiply_part(const Product *p, int64_t from, int64_t to) {
    if (p->scales) {
        multiply_bytes(p, from, to);
        return;
    }
    while (from < to)
        if (from % PANEL || from + PANEL > to) {
            columns(p, from, 2);
            from += HALF;
        } else {
            columns(p, from, 4);
            from += PANEL;
        }
}

static void multiply_some(void *data) {
    Product *p = data;
    const int64_t halves = p->outputs / HALF;
    for (int64_t share; (share = take(&p->next, 1)) < p->shares;)
        multiply_part(p, share * halves / p->shares * HALF, (share + 1) * halves / p->shares * HALF);
}

void multiply(Product *p, int64_t threads) {
    p->shares = threads;
    run(multiply_some, p, threads, p->inputs * p->outputs / 20000);
}
const int has_product = 1;
#else
void multiply(Product *p, int64_t threads) {}
void multiply_part(const Product *p, int64_t from, int64_t to) {}
const int has_product = 0;
#endif

/* out [rows, outputs], x [rows, inputs], packed weight, bias [outputs] or 0, residual [rows, outputs] or 0; rows,
   inputs, a multiple of 32, outputs, a multiple of 64, block; scales and offsets [outputs] or zeros; threads */
PyObject *py_product(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[12];
    if (!numbers(args, given, 12, n)) return NULL;
    Product p = {.out = POINTER(n[0]),
                 .x = POINTER(n[1]),
                 .weight = POINTER(n[2]),
                 .bias = POINTER(n[3]),
                 .residual = POINTER(n[4]),
                 .rows = n[5],
                 .inputs = n[6],
                 .outputs = n[7],
                 .block = n[8],
                 .scales = POINTER(n[9]),
                 .offsets = POINTER(n[10])};
    Py_BEGIN_ALLOW_THREADS
    multiply(&p, n[11]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
