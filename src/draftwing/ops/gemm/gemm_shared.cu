// Follows gemm.cu: the GEMMs whose rows of x the warps of a block share by way of shared memory.

// As `gemm`, with the same bits, for more rows: x goes by way of shared memory, so that a block of more features, and
// with it fewer reads of x, needs no more registers. WARPS_F * ROW_TILES * 16 features a block, for each of WARPS_K parts
// of K. A part is one share, and the blocks of a cluster have them all; or a block has one part, and its warps sum all
// shares, one after the other. AHEAD chunks of weights in flight, in registers, and STAGES - 1 of x, in shared memory,
// in units of 16 bytes in the order in which the lanes of a warp need them.
template <class WEIGHTS, int TOKEN_TILES, int WARPS_F, int WARPS_K, int ROW_TILES, int AHEAD, int STAGES, int CLUSTER,
          int KIND>
__device__ __forceinline__ void shared_gemm(OPERANDS) {
    constexpr int TOKENS = TOKEN_TILES * 8, ROWS = WARPS_F * ROW_TILES * 16, PITCH = pitch_of(ROWS);
    constexpr int THREADS = WARPS_F * WARPS_K * 32;
    constexpr bool ONE_PART = WARPS_K * CLUSTER == 1;
    static_assert(ONE_PART || WARPS_K * CLUSTER == SHARES, "a warp sums one share, or all");
    constexpr int PART = TOKENS * CHUNK, STAGE = WARPS_K * PART;  // of x, u16
    extern __shared__ float sums[];  // first [STAGES][STAGE] of u16, then [WARPS_K][TOKENS][PITCH]
    u16* const stages = (u16*)sums;
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int part = WARPS_K > 1 ? warp / WARPS_F : 0, warp_row = warp % WARPS_F * (ROW_TILES * 16);
    const int row0 = blockIdx.x / CLUSTER * (KIND == SILU_MUL ? ROWS / 2 : ROWS), token0 = blockIdx.y * TOKENS;
    // A round has chunk c + p for part p, as far as there is one. A cluster's ranks are in the order of blockIdx.x.
    const int chunks = K / CHUNK, first = blockIdx.x % CLUSTER * WARPS_K;
    const int rounds = ONE_PART ? chunks : (chunks - first + SHARES - 1) / SHARES;
    auto after = [&](int c) {  // ONE_PART: chunks 0, 8, 16, ..., then 1, 9, 17, ...
        if (!ONE_PART || c + SHARES < chunks) return c + SHARES;
        return c < chunks && c % SHARES + 1 < SHARES ? c % SHARES + 1 : chunks;  // no more once there is none
    };

    typename WEIGHTS::template Rows<KIND> rows[ROW_TILES];
    EACH(r, ROW_TILES) rows[r].find(weights, row0, warp_row + r * 16, part, N, K);
    typename WEIGHTS::Part a[AHEAD][ROW_TILES];
    auto load_weights = [&](typename WEIGHTS::Part(&into)[ROW_TILES], int c, int j) {  // half j of a chunk
        if (c + part < chunks)
            EACH(r, ROW_TILES) rows[r].load(into[r], c, j);
    };
    int weights_ahead = first, x_ahead = first;  // of the round to ask for next
    for (auto& chunk : a)                        // where a part has no chunk left, x is zeros, and this must be numbers
        EACH(r, ROW_TILES) chunk[r].clear();
#pragma unroll
    for (int p = 0; p < AHEAD; ++p, weights_ahead = after(weights_ahead))
        EACH(j, 2) load_weights(a[p], weights_ahead, j);

    wait_for_earlier_kernels();
    constexpr int UNITS = STAGE / (32 * 8), COPIES = (UNITS + THREADS / 32 - 1) / (THREADS / 32);
    constexpr bool EVEN = UNITS % (THREADS / 32) == 0;
    const u16* from[COPIES];
    bool live[COPIES];
    EACH(q, COPIES) {  // this lane's unit of half u % 2 of a chunk, of 8 rows, of one part
        const int u = warp + q * (THREADS / 32), row = token0 + u / 2 % TOKEN_TILES * 8 + g;
        live[q] = row < M && u < UNITS;
        from[q] = x + (size_t)row * K + u / 2 / TOKEN_TILES * CHUNK + u % 2 * 32 + t * 8;
    }
    auto copy_x = [&](int stage) {
        EACH(q, COPIES) {
            const int u = warp + q * (THREADS / 32);
            const bool there = live[q] && x_ahead + u / 2 / TOKEN_TILES < chunks;
            if (EVEN || u < UNITS)
                copy_async(stages + stage * STAGE + (u * 32 + lane) * 8, from[q] + x_ahead * CHUNK, there);
        }
        x_ahead = after(x_ahead);
        end_copies();
    };
    EACH(s, STAGES - 1) copy_x(s);

    float d[ROW_TILES][TOKEN_TILES][4], sum[ROW_TILES][TOKEN_TILES][4];
    clear_sums(d, sum);

    int c = first, stage = 0;
    for (int i = 0; i < rounds; i += AHEAD) {
        EACH(p, AHEAD) {
            if (i + p >= rounds) break;
            const int next = stage + 1 < STAGES ? stage + 1 : 0;
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // the chunk is there for all, and nobody reads the one that is overwritten now
            copy_x(stage > 0 ? stage - 1 : STAGES - 1);
            EACH(j, 2) {
                u32 top[ROW_TILES][4], bottom[ROW_TILES][4];
                EACH(r, ROW_TILES) a[p][r].expand(j, top[r], bottom[r]);
                EACH(m, TOKEN_TILES) {
                    const int u = (part * TOKEN_TILES + m) * 2 + j;
                    const uint4 in = load_shared(stages + stage * STAGE + (u * 32 + lane) * 8);
                    EACH(r, ROW_TILES) mma_half(d[r][m], top[r], bottom[r], in);
                }
                load_weights(a[p], weights_ahead, j);
            }
            if (ONE_PART && c + SHARES >= chunks) add_share(sum, d);
            c = after(c);
            weights_ahead = after(weights_ahead);
            stage = next;
        }
    }

    wait_for_copies<0>();
    __syncthreads();
    finish<WEIGHTS, WARPS_K, CLUSTER, ROWS, TOKENS, THREADS, KIND>(
        ONE_PART ? sum : d, sums, part * TOKENS * PITCH + warp_row, bias, extra, y, row0, token0, M, N);
}

// As `gemm`, with the same bits, for more rows: WARPS_F * WF * 16 features and WARPS_T * WT * 8 rows of x a block, of
// which each warp has WF * 16 and WT * 8. A warp sums all shares, one after the other: chunks 0, 8, 16, ..., then 1, 9,
// 17, ...
//
// A chunk in shared memory has 8 units of 16 bytes a row; odd rows have their halves swapped, so that the threads of a
// quarter warp, which read 64 bytes of two rows each, meet no bank twice.
template <class WEIGHTS, int WARPS_F, int WARPS_T, int WF, int WT, int STAGES, int KIND>
__device__ __forceinline__ void tiled_gemm(OPERANDS) {
    constexpr int ROWS = WARPS_F * WF * 16, TOKENS = WARPS_T * WT * 8, PITCH = pitch_of(ROWS);
    constexpr int THREADS = WARPS_F * WARPS_T * 32;
    constexpr int STAGE = (ROWS + TOKENS) * CHUNK, UNITS = CHUNK / 8, STRIDE = THREADS / UNITS;
    static_assert(ROWS % STRIDE == 0 && TOKENS % STRIDE == 0, "");
    const u16* const w = weights.w;
    extern __shared__ float sums[];  // first [STAGES][ROWS + TOKENS][CHUNK] of u16, then [TOKENS][PITCH]
    u16* const stages = (u16*)sums;
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = K / CHUNK;
    const int row0 = blockIdx.y * (KIND == SILU_MUL ? ROWS / 2 : ROWS), token0 = blockIdx.x * TOKENS;

    // This thread copies one unit of every STRIDE-th row.
    const int unit = threadIdx.x % UNITS, first = threadIdx.x / UNITS;
    const int to = first * CHUNK + (unit ^ ((first & 1) << 2)) * 8;
    auto copy_weights = [&](int stage, int chunk) {
        EACH(p, ROWS / STRIDE) {
            const int i = first + p * STRIDE;
            const int row =
                KIND == SILU_MUL ? min(row0 + i / 16 * 8 + i % 8, N - 1) + i % 16 / 8 * N : min(row0 + i, N - 1);
            copy_async(stages + stage * STAGE + to + p * STRIDE * CHUNK,
                       w + (size_t)row * K + chunk * CHUNK + unit * 8);
        }
    };
    auto copy_x = [&](int stage, int chunk) {
        EACH(p, TOKENS / STRIDE) {
            const int row = min(token0 + first + p * STRIDE, M - 1);
            copy_async(stages + stage * STAGE + (ROWS + p * STRIDE) * CHUNK + to,
                       x + (size_t)row * K + chunk * CHUNK + unit * 8);
        }
    };
    auto after = [&](int chunk) { return chunk + SHARES < chunks ? chunk + SHARES : chunk % SHARES + 1; };

    int ahead = 0;  // the chunk to copy next
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s, ahead = after(ahead))
        if (s < chunks) copy_weights(s, ahead);
    wait_for_earlier_kernels();
    ahead = 0;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s, ahead = after(ahead)) {
        if (s < chunks) copy_x(s, ahead);
        end_copies();
    }

    float d[WF][WT][4], sum[WF][WT][4];
    clear_sums(d, sum);

    const int warp_row = warp % WARPS_F * (WF * 16), warp_token = warp / WARPS_F * (WT * 8);
    for (int i = 0, c = 0; i < chunks; ++i) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // the chunk is there for all, and nobody reads the one that is overwritten now
        if (i + STAGES - 1 < chunks) {
            const int stage = (i + STAGES - 1) % STAGES;
            copy_weights(stage, ahead);
            copy_x(stage, ahead);
            ahead = after(ahead);
        }
        end_copies();
        const u16* const stage = stages + i % STAGES * STAGE;
        EACH(j, 2) {
            const int at = ((t + j * 4) ^ ((g & 1) << 2)) * 8;
            uint4 a[WF][2], b[WT];
            EACH(r, WF) EACH(half, 2)
                a[r][half] = load_shared(stage + (warp_row + r * 16 + half * 8 + g) * CHUNK + at);
            EACH(m, WT) b[m] = load_shared(stage + (ROWS + warp_token + m * 8 + g) * CHUNK + at);
            EACH(r, WF) EACH(m, WT) {
                mma(d[r][m], a[r][0].x, a[r][1].x, a[r][0].y, a[r][1].y, b[m].x, b[m].y);
                mma(d[r][m], a[r][0].z, a[r][1].z, a[r][0].w, a[r][1].w, b[m].z, b[m].w);
            }
        }
        if (c + SHARES >= chunks) add_share(sum, d);
        c = after(c);
    }

    wait_for_copies<0>();
    __syncthreads();
    finish<WEIGHTS, 1, 1, ROWS, TOKENS, THREADS, KIND>(sum, sums, warp_token * PITCH + warp_row, bias, extra, y, row0,
                                                       token0, M, N);
}
