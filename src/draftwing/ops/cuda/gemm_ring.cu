// Follows gemm.cu: the GEMM of few rows whose blocks stay.

// As `gemm`, with the same bits. A block takes one tile of features after the other, and each of its lanes asks for what
// it will need AHEAD chunks ahead, across the borders of tiles, into a ring in shared memory of its own: how much is on
// its way does not depend on registers, and memory does not rest while sums are stored. Few registers also leave room
// for blocks of the next kernel, which fill their rings meanwhile. X_AHEAD chunks of x are in flight, in registers.
template <class WEIGHTS, int TOKEN_TILES, int ROW_TILES, int AHEAD, int X_AHEAD, int KIND>
__device__ __forceinline__ void ring_gemm(const u16* __restrict__ x, const WEIGHTS weights,
                                          const u16* __restrict__ bias, const u16* __restrict__ extra,
                                          u16* __restrict__ y, int M, int N, int K) {
    constexpr int TOKENS = TOKEN_TILES * 8, ROWS = ROW_TILES * 16, PITCH = pitch_of(ROWS);
    constexpr int OUT = KIND == SILU_MUL ? ROWS / 2 : ROWS, SUMS = SHARES * TOKENS * PITCH;
    constexpr int UNITS = WEIGHTS::UNITS * 256, WORDS = WEIGHTS::WORDS * 32;  // of a warp, in u16 and u32
    extern __shared__ float sums[];  // [2][SHARES][TOKENS][PITCH], then rings
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
    u16* const rings = (u16*)(sums + 2 * SUMS);
    u32* const ring_words = (u32*)(rings + SHARES * AHEAD * ROW_TILES * UNITS);
    // Of this lane: where the next chunk is, and goes to behind it.
    const int first_unit = held(warp * (AHEAD * ROW_TILES * UNITS) + lane * 8);
    const int first_word = held(warp * (AHEAD * ROW_TILES * WORDS) + lane);
    int slot = 0, unit = first_unit, word = first_word;
    const int chunks = K / CHUNK, count = (chunks - warp + SHARES - 1) / SHARES;  // of the warp's share
    const int tiles = (N + OUT - 1) / OUT, token0 = blockIdx.y * TOKENS;

    int tile_ahead = count > 0 ? blockIdx.x : tiles, ahead = 0;  // what to ask for next
    typename WEIGHTS::template Rows<KIND> rows[ROW_TILES];
    auto find = [&] {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) rows[r].find(weights, tile_ahead * OUT, r * 16, warp, N, K);
    };
    auto copy_next = [&] {
        if (tile_ahead < tiles) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
                rows[r].copy(rings + unit + r * UNITS, ring_words + word + r * WORDS, ahead * SHARES);
            if (++ahead == count) {
                ahead = 0;
                tile_ahead += gridDim.x;
                if (tile_ahead < tiles) find();
            }
        }
        end_copies();
        const bool more = ++slot < AHEAD;
        slot = more ? slot : 0;
        unit = more ? unit + ROW_TILES * UNITS : first_unit;
        word = more ? word + ROW_TILES * WORDS : first_word;
    };
    if (count > 0) find();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) copy_next();

    wait_for_earlier_kernels();
    int token[TOKEN_TILES], live[TOKEN_TILES];  // a row of x, and how many chunks it has
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; ++m) {
        const int row = token0 + m * 8 + g;
        live[m] = held(row < M ? count : 0);
        token[m] = held(min(row, M - 1) * K + warp * CHUNK + t * 8);
    }
    uint4 b[X_AHEAD][TOKEN_TILES][2];
    auto load_chunk = [&](uint4(&into)[TOKEN_TILES][2], int c) {
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (c < live[m]) into[m][j] = load_x(x + token[m] + c * STEP + j * 32);
    };
#pragma unroll
    for (int p = 0; p < X_AHEAD; ++p) {
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) b[p][m][0] = b[p][m][1] = make_uint4(0, 0, 0, 0);
        load_chunk(b[p], p);
    }

    int half = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, half ^= 1) {
        float d[ROW_TILES][TOKEN_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int m = 0; m < TOKEN_TILES; ++m) d[r][m][0] = d[r][m][1] = d[r][m][2] = d[r][m][3] = 0.f;
        for (int c = 0; c < count; c += X_AHEAD)
#pragma unroll
            for (int p = 0; p < X_AHEAD; ++p) {
                if (c + p >= count) break;
                wait_for_copies<AHEAD - 1>();
                typename WEIGHTS::Part a[ROW_TILES];
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
                    rows[r].take(a[r], rings + unit + r * UNITS, ring_words + word + r * WORDS);
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) {
                        u32 top[4], bottom[4];
                        a[r].expand(j, top, bottom);
#pragma unroll
                        for (int m = 0; m < TOKEN_TILES; ++m) {
                            const uint4 in = b[p][m][j];
                            mma(d[r][m], top[0], bottom[0], top[1], bottom[1], in.x, in.y);
                            mma(d[r][m], top[2], bottom[2], top[3], bottom[3], in.z, in.w);
                        }
                    }
                copy_next();
                load_chunk(b[p], c + p + X_AHEAD);
            }
#pragma unroll
        for (int p = 0; p < X_AHEAD; ++p) load_chunk(b[p], p);  // of the next tile
        float* const here = sums + half * SUMS;  // the other half may still be read
        keep_sums<ROW_TILES, TOKEN_TILES, PITCH, WEIGHTS::TAKE_TURNS && KIND == SILU_MUL>(d, here + warp * TOKENS * PITCH);
        __syncthreads();
        store_results<WEIGHTS::POWER, SHARES, 1, ROWS, TOKENS, SHARES * 32, KIND>(here, bias, extra, y, tile * OUT, token0, M, N);
    }
}
