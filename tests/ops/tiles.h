/* AMX's instructions as functions: what tiles.h of the extension uses, for CPUs without them. They stop where the CPU
   would: at tiles of no size, or of sizes that do not go together. */

#include <stdlib.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd

static _Thread_local struct {
    uint8_t rows, bytes[16][64];
    uint16_t row_bytes;
} tiles[8];
static int64_t tile_products; /* that were made: tests look whether any were */

static void check(int fine) {
    if (!fine) abort();
}
static void _tile_loadconfig(const void *from) {
    const uint8_t *sizes = from;
    check(sizes[0] == 1 && sizes[1] == 0);
    memset(tiles, 0, sizeof tiles);
    for (int i = 0; i < 8; i++) {
        memcpy(&tiles[i].row_bytes, sizes + 16 + 2 * i, 2);
        tiles[i].rows = sizes[48 + i];
        check(tiles[i].rows <= 16 && tiles[i].row_bytes <= 64 && !tiles[i].rows == !tiles[i].row_bytes);
    }
    for (int i = 8; i < 16; i++) check(!sizes[48 + i] && !sizes[16 + 2 * i] && !sizes[17 + 2 * i]);
}
static void _tile_release(void) { memset(tiles, 0, sizeof tiles); }
static void _tile_zero(int t) {
    check(tiles[t].rows);
    memset(tiles[t].bytes, 0, sizeof tiles[t].bytes);
}
static void _tile_loadd(int t, const void *from, int64_t stride) {
    _tile_zero(t);
    for (int r = 0; r < tiles[t].rows; r++)
        memcpy(tiles[t].bytes[r], (const char *)from + r * stride, tiles[t].row_bytes);
}
static void _tile_stored(int t, void *to, int64_t stride) {
    check(tiles[t].rows);
    for (int r = 0; r < tiles[t].rows; r++) memcpy((char *)to + r * stride, tiles[t].bytes[r], tiles[t].row_bytes);
}
static void _tile_dpbssd(int to, int a, int b) {
    check(tiles[to].rows && tiles[to].rows == tiles[a].rows && tiles[to].row_bytes == tiles[b].row_bytes);
    check(tiles[a].row_bytes == 4 * tiles[b].rows);
    for (int r = 0; r < tiles[to].rows; r++)
        for (int n = 0; n < tiles[to].row_bytes / 4; n++) {
            int32_t sum;
            memcpy(&sum, tiles[to].bytes[r] + 4 * n, 4);
            for (int i = 0; i < tiles[a].row_bytes; i++)
                sum += (int8_t)tiles[a].bytes[r][i] * (int8_t)tiles[b].bytes[i / 4][4 * n + i % 4];
            memcpy(tiles[to].bytes[r] + 4 * n, &sum, 4);
        }
    tile_products++;
}
