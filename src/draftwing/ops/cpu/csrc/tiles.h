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
#ifndef FEWEST
#define FEWEST 2 /* rows that tiles are used from */
#endif
#ifndef CHUNK
#define CHUNK 4
#endif

/* Numbers of tiles: sums of four products in turn, or, of more than TILE_ROWS rows, of the first rows and of others of two;
   rows and weights of two. */
#define SUMS_0 0
#define SUMS_1 1
#define SUMS_2 2
#define SUMS_3 3
#define ROWS_0 4
#define ROWS_1 5
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
        const int64_t of_rows = rows <= TILE_ROWS ? rows : i % 2 ? rows - TILE_ROWS : TILE_ROWS;
        sizes.rows[i] = (uint8_t)(i < WEIGHTS_0 ? of_rows : groups);
        sizes.row_bytes[i] = (uint16_t)(i == ROWS_0 || i == ROWS_1 ? 4 * groups : 64);
    }
    __asm__ volatile("" : "+m"(sizes)); /* all of it is in memory: GCC 12 thinks that 8 bytes are read */
    _tile_loadconfig(&sizes);
    *t = (Tiles){rows, groups};
}
INLINE void release_tiles(Tiles *t) {
    if (t->rows) _tile_release();
    *t = (Tiles){0, 0};
}

/* sums[row][16]: of the groups that tiles are made for, x [rows][32 bytes] times w. `turn`, 0 to 3, takes other tiles
   than the one before. */
#define LOAD_ROWS(X, from) _tile_loadd(X, x + (from) * BLOCK, BLOCK)
#define MULTIPLY(SUMS, X, W) \
    _tile_zero(SUMS);        \
    _tile_dpbssd(SUMS, X, W)
#define ONE(SUMS, X, W)    \
    _tile_loadd(W, w, 64); \
    LOAD_ROWS(X, 0);       \
    MULTIPLY(SUMS, X, W);  \
    _tile_stored(SUMS, sums, 64)
#define TWO(SUMS, OTHERS, W)      \
    _tile_loadd(W, w, 64);        \
    LOAD_ROWS(ROWS_0, 0);         \
    LOAD_ROWS(ROWS_1, TILE_ROWS); \
    MULTIPLY(SUMS, ROWS_0, W);    \
    MULTIPLY(OTHERS, ROWS_1, W);  \
    _tile_stored(SUMS, sums, 64); \
    _tile_stored(OTHERS, sums[TILE_ROWS], 64)
INLINE void multiply_tiles(const Tiles *t, const void *w, const int8_t *x, int32_t (*sums)[PANEL_OUTPUTS], int turn) {
    /* What tiles read is in memory, which GCC 12 does not know that they do. */
    __asm__ volatile("" : : "r"(w), "r"(x), "r"(sums) : "memory");
    if (t->rows > TILE_ROWS) turn = 4 + turn % 2;
    switch (turn) {
    case 0: ONE(SUMS_0, ROWS_0, WEIGHTS_0); break;
    case 1: ONE(SUMS_1, ROWS_1, WEIGHTS_1); break;
    case 2: ONE(SUMS_2, ROWS_0, WEIGHTS_0); break;
    case 3: ONE(SUMS_3, ROWS_1, WEIGHTS_1); break;
    case 4: TWO(SUMS_0, SUMS_1, WEIGHTS_0); break;
    case 5: TWO(SUMS_2, SUMS_3, WEIGHTS_1); break;
    }
    __asm__ volatile("" : : : "memory");
}
#else
INLINE void release_tiles(Tiles *t) {}
#endif
