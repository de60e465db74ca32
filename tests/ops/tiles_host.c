/* GEMMs of blocks as they are compiled for AMX, in one thread, whose instructions are functions of tiles.h here. */

#include "block_gemm.c"
#include "rounding.c"

Member join(Team *team) { return (Member){.team = team, .size = 1}; }
void meet(const Member *me, Ahead *next) {}
void run_team(void (*work)(void *), void *data, Team *team, Workers *workers) { work(data); }
PyThreadState *release_gil(void) { return NULL; }
void take_gil(PyThreadState *released) {}
Product product_of(const int64_t *n, int64_t half) { return (Product){0}; }

/* out [rows, outputs], x [rows, inputs] floats; blocks: as `Product` has them; spare [rounded_size] -> products of
   tiles */
int64_t multiply(float *out, const float *x, int64_t rows, int64_t inputs, int64_t outputs, const int64_t *blocks,
                 void *spare) {
    Product p = {.x = x, .out = out, .blocks = blocks, .rows = rows, .inputs = inputs, .outputs = outputs};
    p.rounded = rounded_at(spare, rows, inputs);
    for (int64_t i = 0; i < rows; i++) round_part(&p.rounded, x, i, 0, inputs, 0);
    tile_products = 0;
    multiply_blocks(&p, 0, outputs);
    return tile_products;
}
