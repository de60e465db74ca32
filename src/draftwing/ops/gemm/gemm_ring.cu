// Follows gemm.cu: the GEMM of few rows whose blocks stay.

// As `gemm`, with the same bits. A block takes one tile of features after the other, and each of its lanes asks for what
// it will need AHEAD chunks ahead, across the borders of tiles, into a ring in shared memory of its own: how much is on
// its way does not depend on registers, and memory does not rest while sums are stored. Few registers also leave room
// for blocks of the next kernel, which fill their rings meanwhile. x comes as far ahead, since it queues behind weights.
// X_ROWS rows of x a block: less than 8 take less room.
template <class WEIGHTS, int X_ROWS, int ROW_TILES, int AHEAD, int KIND>
__device__ __forceinline__ void ring_gemm(OPERANDS) {
    constexpr int TOKEN_TILES = (X_ROWS + 7) / 8, TOKENS = TOKEN_TILES * 8, ROWS = ROW_TILES * 16, PITCH = pitch_of(ROWS);
    constexpr int OUT = KIND == SILU_MUL ? ROWS / 2 : ROWS, SUMS = SHARES * TOKENS * PITCH;
    // Of a warp, in u16 and u32.
    constexpr int HALF_X = X_ROWS < 8 ? X_ROWS * 32 : 256, X_UNITS = TOKEN_TILES * 2 * HALF_X, UNITS = WEIGHTS::UNITS * 256, WORDS = WEIGHTS::WORDS * 32;
    extern __shared__ float sums[];  // [2][SHARES][TOKENS][PITCH], then rings
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
    u16* const x_rings = (u16*)(sums + 2 * SUMS);
    u16* const rings = x_rings + SHARES * AHEAD * X_UNITS;
    u32* const ring_words = (u32*)(rings + SHARES * AHEAD * ROW_TILES * UNITS);
    // Of this lane: where the next chunk is, and goes to behind it.
    const int first_x = held(warp * (AHEAD * X_UNITS) + lane * 8);
    const int first_unit = held(warp * (AHEAD * ROW_TILES * UNITS) + lane * 8);
    const int first_word = held(warp * (AHEAD * ROW_TILES * WORDS) + lane);
    int slot = 0, x_unit = first_x, unit = first_unit, word = first_word;
    auto go_on = [&] {
        end_copies();
        const bool more = ++slot < AHEAD;
        slot = more ? slot : 0;
        x_unit = more ? x_unit + X_UNITS : first_x;
        unit = more ? unit + ROW_TILES * UNITS : first_unit;
        word = more ? word + ROW_TILES * WORDS : first_word;
    };
    const int chunks = K / CHUNK, count = (chunks - warp + SHARES - 1) / SHARES;  // of the warp's share
    const int tiles = (N + OUT - 1) / OUT, token0 = blockIdx.y * X_ROWS;
    M = min(M, token0 + X_ROWS);

    int tile_ahead = count > 0 ? blockIdx.x : tiles, ahead = 0;  // what weights to ask for next
    typename WEIGHTS::template Rows<KIND> rows[ROW_TILES];
    auto find = [&] {
        EACH(r, ROW_TILES) rows[r].find(weights, tile_ahead * OUT, r * 16, warp, N, K);
    };
    auto copy_weights = [&] {
        if (tile_ahead >= tiles) return;
        EACH(r, ROW_TILES) rows[r].copy(rings + unit + r * UNITS, ring_words + word + r * WORDS, ahead * SHARES);
        if (++ahead < count) return;
        ahead = 0;
        tile_ahead += gridDim.x;
        if (tile_ahead < tiles) find();
    };
    if (count > 0) find();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s, go_on()) copy_weights();

    wait_for_earlier_kernels();
    int token[TOKEN_TILES], live[TOKEN_TILES];  // a row of x, and whether there is one
    EACH(m, TOKEN_TILES) {
        const int row = token0 + m * 8 + g;
        live[m] = held(row < M && count > 0);
        token[m] = held(min(row, M - 1) * K + warp * CHUNK + t * 8);
    }
    int x_ahead = 0;
    auto copy_x = [&] {
        EACH(m, TOKEN_TILES) EACH(j, 2)
            if (live[m])
                copy_async(x_rings + x_unit + (m * 2 + j) * HALF_X, x + token[m] + x_ahead * STEP + j * 32);
        x_ahead = x_ahead + 1 < count ? x_ahead + 1 : 0;
    };
#pragma unroll
    for (int s = 0; s < AHEAD; ++s, go_on()) copy_x();
    uint4 b[TOKEN_TILES][2];
    EACH(m, TOKEN_TILES) b[m][0] = b[m][1] = make_uint4(0, 0, 0, 0);

    int half = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, half ^= 1) {
        float d[ROW_TILES][TOKEN_TILES][4];
        clear_sums(d);
        for (int c = 0; c < count; ++c) {
            wait_for_copies<AHEAD - 1>();
            typename WEIGHTS::Part a[ROW_TILES];
            EACH(r, ROW_TILES) rows[r].take(a[r], rings + unit + r * UNITS, ring_words + word + r * WORDS);
            EACH(m, TOKEN_TILES) EACH(j, 2)
                if (live[m]) b[m][j] = load_shared(x_rings + x_unit + (m * 2 + j) * HALF_X);
            EACH(j, 2) EACH(r, ROW_TILES) {
                u32 top[4], bottom[4];
                a[r].expand(j, top, bottom);
                EACH(m, TOKEN_TILES) mma_half(d[r][m], top, bottom, b[m][j]);
            }
            copy_weights();
            copy_x();
            go_on();
        }
        float* const here = sums + half * SUMS;  // the other half may still be read
        finish<WEIGHTS, SHARES, 1, ROWS, TOKENS, SHARES * 32, KIND>(d, here, warp * TOKENS * PITCH, bias, extra, y,
                                                                    tile * OUT, token0, M, N);
    }
}
