// Follows gemm_experts.cu and gemm_bulk.cu: the same products with the same bits, of weights that come by bulk copies
// (compute capability 9.0).
//
// A block stays, and has its weights as one stream: a warp asks for them, some features with all their columns at a time,
// as far ahead as there is shared memory, and neither sums nor tiles that end make it wait. SHARES others multiply, and do
// not wait for each other either: what they have of some features they add up when they have multiplied the next ones. K
// is known here, so that a lane has what it needs of the rows of x in registers, for as long as the block is at the same
// tile.

// ROWS features of an expert with all their columns in shared memory: rows of WIDTH words, then SCALES rows of a scale by
// feature, and as many of zeros. GATED: 8 gates and their 8 ups in turn.
template <class WEIGHTS, int ROWS, int CHUNKS, bool GATED>
struct Stage {
    static constexpr int WIDTH = CHUNKS * WEIGHTS::OF_CHUNK, SCALES = WEIGHTS::scales_of(CHUNKS);
    static constexpr int WORDS = ROWS * (WIDTH + SCALES * (WEIGHTS::WITH_ZEROS ? 2 : 1));

    // By a warp. n: the first feature, of N.
    __device__ __forceinline__ static void ask(u32* stage, const WEIGHTS& all, size_t expert_row, int n, int N,
                                               Barrier* full) {
        constexpr int TOGETHER = GATED ? 8 : ROWS;  // features that are neighbours
        const int lane = threadIdx.x & 31, copies = ROWS / TOGETHER;
        if (lane < copies) {
            const int first = n + (GATED ? lane / 2 * 8 : 0), bytes = max(min(TOGETHER, N - first), 0) * (WIDTH * 4);
            expect_bytes(full, bytes);
            if (bytes > 0)
                copy_bulk(stage + lane * TOGETHER * WIDTH, all.codes() + (expert_row + first + lane % 2 * N) * WIDTH, bytes,
                          full);
        }
        if constexpr (SCALES > 0) {
            for (int i = lane; i < SCALES * ROWS / 4; i += 32) {  // four features at a time
                const int group = i / (ROWS / 4), row = i % (ROWS / 4) * 4;
                const int feature = GATED ? min(n + row / 16 * 8 + row % 8, N - 4) + row % 16 / 8 * N : min(n + row, N - 4);
                const size_t from = (size_t)group * all.rows + expert_row + feature;
                u32* const to = stage + ROWS * WIDTH + group * ROWS + row;
                copy_async((u16*)to, (const u16*)(all.scales + from));
                if (WEIGHTS::WITH_ZEROS) copy_async((u16*)(to + ROWS * SCALES), (const u16*)(all.zeros + from));
            }
            arrive_after_copies(full);
        }
    }

    // Threads that arrive at `full`.
    static constexpr int ARRIVE = (GATED ? ROWS / 8 : 1) + (SCALES > 0 ? 32 : 0);
};

// d += what the stage has of the warp's chunks, times b: the same of x, of which TILES times 8 pairs are live at most.
template <class WEIGHTS, class STAGE, int CHUNKS, int TILES, int TOKEN_TILES, int ROW_TILES, int COUNT>
__device__ __forceinline__ void multiply_stage(float (&d)[ROW_TILES][TOKEN_TILES][4], const u32* stage,
                                               const uint4 (&b)[COUNT][TOKEN_TILES][2]) {
    constexpr int ROWS = ROW_TILES * 16, SCALES = WEIGHTS::scales_of(2 * SHARES) - WEIGHTS::scales_of(SHARES);
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2;
    const u32* const words = stage + g * STAGE::WIDTH + WEIGHTS::word_of(warp);
    const u32* const scales = stage + ROWS * STAGE::WIDTH + WEIGHTS::scale_of(warp) * ROWS + g;
    EACH(i, COUNT) {
        if ((i + 1) * SHARES > CHUNKS && i * SHARES + warp >= CHUNKS) continue;
        typename WEIGHTS::Part a[ROW_TILES];
        EACH(r, ROW_TILES)
            a[r].take(words + r * 16 * STAGE::WIDTH + i * SHARES * WEIGHTS::OF_CHUNK, 8 * STAGE::WIDTH,
                      scales + i * SCALES * ROWS + r * 16, ROWS * STAGE::SCALES);
        EACH(j, 2) {
            u32 top[ROW_TILES][4], bottom[ROW_TILES][4];
            EACH(r, ROW_TILES) a[r].expand(j, top[r], bottom[r]);
#pragma unroll
            for (int half = 0; half < 4; half += 2)
                EACH(m, TILES) EACH(r, ROW_TILES)
                    mma(d[r][m], top[r][half], bottom[r][half], top[r][half + 1], bottom[r][half + 1],
                        half ? b[i][m][j].z : b[i][m][j].x, half ? b[i][m][j].w : b[i][m][j].y);
        }
    }
}

// sum += what the stage has of the warp's 16 features, times b: as `multiply_stage`, share after share.
template <class WEIGHTS, class STAGE, int CHUNKS, int TILES, int TOKEN_TILES>
__device__ __forceinline__ void multiply_rows(float (&sum)[1][TOKEN_TILES][4], float (&d)[1][TOKEN_TILES][4],
                                              const u32* stage, const uint4 (&b)[CHUNKS][TOKEN_TILES][2]) {
    constexpr int ROWS = SHARES * 16;
    const int row = threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4;
    const u32 *const words = stage + row * STAGE::WIDTH, *const scales = stage + ROWS * STAGE::WIDTH + row;
    EACH(v, SHARES) {
        if (v >= CHUNKS) continue;
#pragma unroll
        for (int c = v; c < CHUNKS; c += SHARES) {
            typename WEIGHTS::Part a;
            a.take(words + WEIGHTS::word_of(c), 8 * STAGE::WIDTH, scales + WEIGHTS::scale_of(c) * ROWS,
                   ROWS * STAGE::SCALES);
            EACH(j, 2) {
                u32 top[4], bottom[4];
                a.expand(j, top, bottom);
                EACH(m, TILES) mma_half(d[0][m], top, bottom, b[c][m][j]);
            }
        }
        add_share(sum, d);
    }
}

// A warp's part of a kernel: asks for the weights of a share, unit after unit, as far ahead as there are stages.
template <class STAGE, int STAGES, int OUT, bool GATED, class WEIGHTS>
__device__ __forceinline__ void ask_for_share(u32* stages, Barrier* full, Barrier* empty, const WEIGHTS& all,
                                              const Share& share, const int* tiles, int parts, int N) {
    int tile = share.at / parts - 1, part = share.at % parts, expert = -1, stage = 0, phase = 0;
    for (int at = share.at; at < share.end; ++at, ++part) {
        if (at == share.at || part == parts) {
            if (at > share.at) part = 0;
            expert = load_route(tiles + ++tile);
        }
        if (expert < 0) return;
        wait_barrier(empty + stage, phase ^ 1);
        STAGE::ask(stages + stage * STAGE::WORDS, all, (size_t)expert * (GATED ? 2 * N : N), part * OUT, N, full + stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

// As `expert_gemm`, for K of CHUNKS chunks, with STAGES stages of ROW_TILES * 16 features.
template <class WEIGHTS, int TOKEN_TILES, int ROW_TILES, int STAGES, int CHUNKS, int KIND>
__device__ __forceinline__ void stream_gemm(PAIR_OPERANDS) {
    constexpr bool GATED = KIND != PLAIN;
    constexpr int TOKENS = TOKEN_TILES * 8, ROWS = ROW_TILES * 16, PITCH = pitch_of(ROWS), OUT = GATED ? ROWS / 2 : ROWS;
    constexpr int THREADS = SHARES * 32, COUNT = (CHUNKS + SHARES - 1) / SHARES, SUMS = SHARES * TOKENS * PITCH;
    constexpr int MINE = (OUT * TOKENS + THREADS - 1) / THREADS;  // results that a thread adds up
    using STAGE = Stage<WEIGHTS, ROWS, CHUNKS, GATED>;
    // Of float [2][SHARES][TOKENS][PITCH]; then stages; barriers: [STAGES] that are full, as many that are empty, [2] of
    // sums that are there; pairs int [2][TOKENS].
    extern __shared__ float sums[];
    u32* const stages = (u32*)(sums + 2 * SUMS);
    Barrier* const full = (Barrier*)(stages + STAGES * STAGE::WORDS);
    Barrier *const empty = full + STAGES, *const summed = empty + STAGES;
    int* const pairs = (int*)(summed + 2);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int parts = (N + OUT - 1) / OUT;  // of a tile
    if (threadIdx.x == 0) {
        init_ring(full, empty, STAGES, STAGE::ARRIVE, SHARES);
        for (int s = 0; s < 2; ++s) init_barrier(summed + s, SHARES);
        show_barriers();
    }
    __syncthreads();

    // As in `expert_gemm`.
    if (!known) wait_for_earlier_kernels();
    launch_dependents();
    const Share share = Share::of(tiles, tile_count, parts);
    const int units = share.end - share.at;
    int tile = share.at / parts - 1, part = share.at % parts, expert = -1, stage = 0, phase = 0;
    const auto next_stage = [&] {
        ++part;
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };

    if (warp == SHARES) return ask_for_share<STAGE, STAGES, OUT, GATED>(stages, full, empty, all, share, tiles, parts, N);

    if (known) wait_for_earlier_kernels();
    uint4 b[COUNT][TOKEN_TILES][2];
    int pair[TOKEN_TILES], live = 0;
    int its_live = 0, its_row0 = 0, its_bias = 0;  // of the unit that is not yet added up
    float offset[MINE], up_offset[MINE];

    // Which thread adds up what changes, since there is less to add up than there are threads.
    const auto result = [&](int unit, int i) { return (threadIdx.x + unit * 64) % THREADS + i * THREADS; };
    const auto load_offsets = [&](int unit) {
        EACH(i, MINE) {
            const int at = result(unit, i), n = its_row0 + at % OUT;
            offset[i] = up_offset[i] = 0.f;
            if (bias && at / OUT < its_live && n < N) {
                offset[i] = load_value(bias + its_bias + n);
                if (GATED) up_offset[i] = load_value(bias + its_bias + N + n);
            }
        }
    };
    const auto add_up = [&](int unit) {
        const int turn = unit & 1;
        wait_barrier(summed + turn, unit >> 1 & 1);
        EACH(i, MINE) {
            const int at = result(unit, i), row = at % OUT, m = at / OUT;
            if (m >= its_live || its_row0 + row >= N) continue;
            const float* const from = sums + turn * SUMS + m * PITCH + (GATED ? row / 8 * 16 + row % 8 : row);
            float sum = 0.f, up = 0.f;
            EACH(v, SHARES) {
                sum += from[v * TOKENS * PITCH];
                if (GATED) up += from[v * TOKENS * PITCH + 8];
            }
            sum += offset[i];
            if (GATED) sum = gated<KIND>(sum, up + up_offset[i], limit);
            y[(size_t)pairs[turn * TOKENS + m] * N + its_row0 + row] = let_through<KIND>(sum, limit);
        }
    };

    int unit = 0;
    for (; unit < units; ++unit, next_stage()) {
        if (unit == 0 || part == parts) {
            if (unit > 0) part = 0;
            expert = load_route(tiles + ++tile);
            if (expert < 0) return;
            const int begin = load_route(tiles + tile_count + tile);
            live = load_route(tiles + 2 * tile_count + tile);
            EACH(m, TOKEN_TILES) {
                const int place = begin + min(m * 8 + g, live - 1);
                pair[m] = order ? load_route(order + place) : place;
                const u16* const token = x + (size_t)(pair[m] / choices) * (CHUNKS * CHUNK) + t * WEIGHTS::X_LANE;
                EACH(i, COUNT) EACH(j, 2) {
                    b[i][m][j] = make_uint4(0, 0, 0, 0);
                    if (m * 8 + g < live && i * SHARES + warp < CHUNKS)
                        b[i][m][j] = load_x(token + (i * SHARES + warp) * CHUNK + j * WEIGHTS::X_HALF);
                }
            }
        }
        if (unit > 0) load_offsets(unit - 1);

        float d[ROW_TILES][TOKEN_TILES][4];
        clear_sums(d);
        wait_barrier(full + stage, phase);
        const u32* const here = stages + stage * STAGE::WORDS;
        if (TOKEN_TILES > 1 && live <= 8) multiply_stage<WEIGHTS, STAGE, CHUNKS, 1>(d, here, b);
        else multiply_stage<WEIGHTS, STAGE, CHUNKS, TOKEN_TILES>(d, here, b);
        __syncwarp();
        if (lane == 0) arrive(empty + stage);

        // When all have come so far with the unit before, nobody reads any more of the one before that.
        if (unit > 0) add_up(unit - 1);
        const int turn = unit & 1;
        keep_sums<ROW_TILES, TOKEN_TILES, PITCH>(d, sums + turn * SUMS + warp * TOKENS * PITCH);
        if (warp == 0 && t == 0)
            EACH(m, TOKEN_TILES) pairs[turn * TOKENS + m * 8 + g] = pair[m];
        __syncwarp();
        if (lane == 0) arrive(summed + turn);
        its_live = live, its_row0 = part * OUT, its_bias = expert * (GATED ? 2 * N : N);
    }
    if (unit > 0) load_offsets(unit - 1), add_up(unit - 1);
}

// The same where K is short: a warp has some features of a stage with all their columns, and sums share after share in
// registers, so that no sums pass through shared memory.
template <class WEIGHTS, int TOKEN_TILES, int STAGES, int CHUNKS>
__device__ __forceinline__ void row_stream_gemm(PAIR_OPERANDS) {
    constexpr int ROWS = SHARES * 16;
    using STAGE = Stage<WEIGHTS, ROWS, CHUNKS, false>;
    extern __shared__ float sums[];  // stages; barriers: [STAGES] that are full, as many that are empty
    u32* const stages = (u32*)sums;
    Barrier* const full = (Barrier*)(stages + STAGES * STAGE::WORDS);
    Barrier* const empty = full + STAGES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int parts = (N + ROWS - 1) / ROWS;  // of a tile
    if (threadIdx.x == 0) {
        init_ring(full, empty, STAGES, STAGE::ARRIVE, SHARES);
        show_barriers();
    }
    __syncthreads();

    // As in `expert_gemm`.
    if (!known) wait_for_earlier_kernels();
    launch_dependents();
    const Share share = Share::of(tiles, tile_count, parts);
    if (warp == SHARES) return ask_for_share<STAGE, STAGES, ROWS, false>(stages, full, empty, all, share, tiles, parts, N);

    if (known) wait_for_earlier_kernels();
    uint4 b[CHUNKS][TOKEN_TILES][2];
    int result[TOKEN_TILES][2], live = 0;  // where the lane's two pairs of 8 have their results
    int tile = share.at / parts - 1, part = share.at % parts, expert = -1, stage = 0, phase = 0;
    for (int at = share.at; at < share.end; ++at, ++part) {
        if (at == share.at || part == parts) {
            if (at > share.at) part = 0;
            expert = load_route(tiles + ++tile);
            if (expert < 0) return;
            const int begin = load_route(tiles + tile_count + tile);
            live = load_route(tiles + 2 * tile_count + tile);
            const auto pair_of = [&](int i) {
                const int place = begin + min(i, live - 1);
                return order ? load_route(order + place) : place;
            };
            EACH(m, TOKEN_TILES) {
                const u16* const token = x + (size_t)(pair_of(m * 8 + g) / choices) * (CHUNKS * CHUNK) + t * WEIGHTS::X_LANE;
                EACH(c, CHUNKS) EACH(j, 2) {
                    b[c][m][j] = make_uint4(0, 0, 0, 0);
                    if (m * 8 + g < live) b[c][m][j] = load_x(token + c * CHUNK + j * WEIGHTS::X_HALF);
                }
                EACH(i, 2) result[m][i] = pair_of(m * 8 + t * 2 + i);
            }
        }

        float d[1][TOKEN_TILES][4], sum[1][TOKEN_TILES][4];
        clear_sums(d, sum);
        wait_barrier(full + stage, phase);
        const u32* const here = stages + stage * STAGE::WORDS;
        if (TOKEN_TILES > 1 && live <= 8) multiply_rows<WEIGHTS, STAGE, CHUNKS, 1>(sum, d, here, b);
        else multiply_rows<WEIGHTS, STAGE, CHUNKS, TOKEN_TILES>(sum, d, here, b);
        __syncwarp();
        if (lane == 0) arrive(empty + stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;

        EACH(half, 2) {
            const int n = part * ROWS + warp * 16 + half * 8 + g;
            const float offset = bias && n < N ? load_value(bias + (size_t)expert * N + n) : 0.f;
            EACH(m, TOKEN_TILES) EACH(i, 2)
                if (m * 8 + t * 2 + i < live && n < N)
                    y[(size_t)result[m][i] * N + n] = let_through<PLAIN>(sum[0][m][half * 2 + i] + offset, limit);
        }
    }
}
