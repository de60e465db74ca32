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

/* Numbers of tiles: sums of two products in turn, rows and weights of three. Where another hardware thread of the core is
   at work none of them can stand for several, as they do otherwise: one is loaded while two products wait for theirs. */
#define SUM_TILES 2
#define WEIGHTS 5

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
        sizes.rows[i] = (uint8_t)(i < WEIGHTS ? rows : groups);
        sizes.row_bytes[i] = (uint16_t)(i >= SUM_TILES && i < WEIGHTS ? 4 * groups : 64);
    }
    __asm__ volatile("" : "+m"(sizes)); /* all of it is in memory: GCC 12 thinks that 8 bytes are read */
    _tile_loadconfig(&sizes);
    *t = (Tiles){rows, groups};
}
INLINE void release_tiles(Tiles *t) {
    if (t->rows) _tile_release();
    *t = (Tiles){0, 0};
}

/* Stores what the tile of the product before the last one has in `sums` [row][16], unless that is NULL, and multiplies: of
   the groups that tiles are made for, x [rows][32 bytes] times w. turn: products before this one, % 6. */
#define IN_TURN(SUMS, X, W)    \
    _tile_loadd(W, w, 64);     \
    _tile_loadd(X, x, BLOCK);  \
    if (sums) _tile_stored(SUMS, sums, 64); \
    _tile_zero(SUMS);          \
    _tile_dpbssd(SUMS, X, W);
INLINE void multiply_tile(int turn, const void *w, const int8_t *x, int32_t (*sums)[PANEL_OUTPUTS]) {
    /* What tiles read is in memory, which GCC 12 does not know that they do. */
    __asm__ volatile("" : : "r"(w), "r"(x), "r"(sums) : "memory");
    switch (turn) {
    case 0: IN_TURN(0, 2, 5); break;
    case 1: IN_TURN(1, 3, 6); break;
    case 2: IN_TURN(0, 4, 7); break;
    case 3: IN_TURN(1, 2, 5); break;
    case 4: IN_TURN(0, 3, 6); break;
    case 5: IN_TURN(1, 4, 7); break;
    }
    __asm__ volatile("" : : : "memory");
}
INLINE void store_tile(int turn, int32_t (*sums)[PANEL_OUTPUTS]) {
    if (!sums) return;
    if (turn % SUM_TILES) _tile_stored(1, sums, 64);
    else _tile_stored(0, sums, 64);
    __asm__ volatile("" : : : "memory");
}
#else
INLINE void release_tiles(Tiles *t) {}
#endif
