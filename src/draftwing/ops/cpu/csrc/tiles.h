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
#define SUM_TILES 4

/* Numbers of tiles: those of sums come first, then rows and weights of two products in turn. */
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
        sizes.rows[i] = (uint8_t)(i < WEIGHTS_0 ? rows : groups);
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

/* Stores the sums that tile `to` has, unless `sums` [row][16] is NULL, and makes others: of the groups that tiles are made
   for, x [rows][32 bytes] times w, unless that is NULL. */
#define IN_TURN(SUMS, X, W)                 \
    if (w) {                                \
        _tile_loadd(W, w, 64);              \
        _tile_loadd(X, x, BLOCK);           \
    }                                       \
    if (sums) _tile_stored(SUMS, sums, 64); \
    if (w) {                                \
        _tile_zero(SUMS);                   \
        _tile_dpbssd(SUMS, X, W);           \
    }
INLINE void multiply_tile(int to, const void *w, const int8_t *x, int32_t (*sums)[PANEL_OUTPUTS]) {
    /* What tiles read is in memory, which GCC 12 does not know that they do. */
    __asm__ volatile("" : : "r"(w), "r"(x), "r"(sums) : "memory");
    switch (to) {
    case 0: IN_TURN(0, ROWS_0, WEIGHTS_0); break;
    case 1: IN_TURN(1, ROWS_1, WEIGHTS_1); break;
    case 2: IN_TURN(2, ROWS_0, WEIGHTS_0); break;
    case 3: IN_TURN(3, ROWS_1, WEIGHTS_1); break;
    }
    __asm__ volatile("" : : : "memory");
}
#else
INLINE void release_tiles(Tiles *t) {}
#endif
