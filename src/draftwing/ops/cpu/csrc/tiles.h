/* AMX: tiles of 16 rows of 64 bytes. Eight products of four inputs each, of 16 rows with 16 outputs, are one
   instruction, and what waits for it in memory is a block's sums.

   TILES names a header with the same instructions as functions, for tests on CPUs without them. */

#pragma once
#include "blocks.h"

#if defined(__AMX_INT8__) || defined(TILES)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

/* A thread's tiles, for some rows and groups of four inputs. They are given back at the end of a GEMM: whoever else uses
   tiles in this thread sets sizes of its own, and the operating system saves none that are not in use. */
typedef struct {
    int64_t rows, groups; /* 0: not in use */
} Tiles;

#if HAS_TILES
#include <immintrin.h>
#ifdef TILES
#include TILES
#endif

#define TILE_ROWS 16 /* of a tile */
#define FEWEST 16    /* rows that tiles are used from: 8 rows take 1.2 of the time without them, 16 0.9, 32 0.8 */

/* Numbers of tiles: sums of two blocks in turn, each of the first rows and of others; rows; weights. */
#define SUMS_0 0
#define OTHERS_0 1
#define SUMS_1 2
#define OTHERS_1 3
#define FIRST_ROWS 4
#define OTHER_ROWS 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

/* How large tiles are, as the instruction reads it. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileSizes;

INLINE void size_tiles(Tiles *t, int64_t rows, int64_t groups) {
    if (t->rows == rows && t->groups == groups) return;
    TileSizes sizes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const int64_t left = i % 2 && i < WEIGHTS_0 ? rows - TILE_ROWS : rows;
        const int64_t count = i >= WEIGHTS_0 ? groups : left < 0 ? 0 : left < TILE_ROWS ? left : TILE_ROWS;
        sizes.rows[i] = (uint8_t)count;
        sizes.row_bytes[i] = (uint16_t)(!count ? 0 : i == FIRST_ROWS || i == OTHER_ROWS ? 4 * groups : 64);
    }
    __asm__ volatile("" : "+m"(sizes)); /* all of it is in memory: GCC 12 thinks that 8 bytes are read */
    _tile_loadconfig(&sizes);
    *t = (Tiles){rows, groups};
}
INLINE void release_tiles(Tiles *t) {
    if (t->rows) _tile_release();
    *t = (Tiles){0, 0};
}

/* sums[row][16]: of the groups that tiles are made for, x [rows][32 bytes] times w; `turn`, 0 or 1, takes other tiles
   than the one before. */
#define PRODUCTS(WEIGHTS, SUMS, OTHERS)                        \
    _tile_loadd(WEIGHTS, w, 64);                               \
    _tile_loadd(FIRST_ROWS, x, BLOCK);                         \
    _tile_zero(SUMS);                                          \
    _tile_dpbssd(SUMS, FIRST_ROWS, WEIGHTS);                   \
    if (t->rows > TILE_ROWS) {                                 \
        _tile_loadd(OTHER_ROWS, x + TILE_ROWS * BLOCK, BLOCK); \
        _tile_zero(OTHERS);                                    \
        _tile_dpbssd(OTHERS, OTHER_ROWS, WEIGHTS);             \
    }                                                          \
    _tile_stored(SUMS, sums, 64);                              \
    if (t->rows > TILE_ROWS) _tile_stored(OTHERS, sums[TILE_ROWS], 64)
INLINE void multiply_tiles(const Tiles *t, const void *w, const int8_t *x, int32_t (*sums)[PANEL_OUTPUTS], int turn) {
    /* What tiles read is in memory, which GCC 12 does not know that they do. */
    __asm__ volatile("" : : "r"(w), "r"(x), "r"(sums) : "memory");
    if (turn) {
        PRODUCTS(WEIGHTS_1, SUMS_1, OTHERS_1);
    } else {
        PRODUCTS(WEIGHTS_0, SUMS_0, OTHERS_0);
    }
    __asm__ volatile("" : : : "memory");
}
#else
INLINE void release_tiles(Tiles *t) {}
#endif
