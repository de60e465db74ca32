// Follows gemm_experts.cu: the same products by warps that work alone. Each has 16 rows of a weight with all of K, and
// sums of all shares in registers; they are added in the same order, so bits are the same. Nothing goes through shared
// memory, and no warp waits for another one. It takes many tiles to have all of them at work.
template <class WEIGHTS, int TOKEN_TILES, int WARPS, int AHEAD, int X_AHEAD, int KIND>
__device__ __forceinline__ void expert_gemm_alone(const u16* __restrict__ x, const WEIGHTS all,
                                                  const u16* __restrict__ bias, const int* __restrict__ order,
                                                  const int* __restrict__ tiles, u16* __restrict__ y, int tile_count,
                                                  int choices, int known, int N, int K, float limit) {
    static_assert(SHARES % AHEAD == 0 && AHEAD % X_AHEAD == 0, "a chunk is in the same registers in every round");
    constexpr bool GATED = KIND != PLAIN;
    constexpr int OUT = GATED ? 8 : 16;  // features of a warp
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = K / CHUNK, parts = (N + WARPS * OUT - 1) / (WARPS * OUT);

    if (!known) wait_for_earlier_kernels();
    launch_dependents();

    typename WEIGHTS::template Rows<GATED ? SILU_MUL : PLAIN> rows;
    typename WEIGHTS::Part a[AHEAD];
    const auto begin_weights = [&](const Work& work) {
        rows.find(all.from((size_t)work.expert * (GATED ? 2 * N : N), K), work.row0, 0, 0, N, K);
#pragma unroll
        for (int p = 0; p < AHEAD; ++p)
            if (p < chunks)
#pragma unroll
                for (int j = 0; j < 2; ++j) rows.load(a[p], p, j);
    };
    const auto work_at = [&](int at) {
        Work work = Work::of(at, tiles, tile_count, parts, WARPS * OUT);
        work.row0 += warp * OUT;
        return work;
    };

    int at = blockIdx.x;
    Work work = work_at(at);
    if (work.expert < 0) return;
    begin_weights(work);
    if (known) wait_for_earlier_kernels();

    while (true) {
        const int live = work.live;
        const auto pair_of = [&](int m) {
            const int place = work.begin + min(m, live - 1);
            return order ? load_route(order + place) : place;
        };
        int source[TOKEN_TILES], out[TOKEN_TILES][2];  // pairs that a lane reads, and those it has results of
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) {
            source[m] = pair_of(m * 8 + g);
#pragma unroll
            for (int i = 0; i < 2; ++i) out[m][i] = pair_of(m * 8 + t * 2 + i);
        }
        const u16* token[TOKEN_TILES];
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m)
            token[m] = x + (size_t)(source[m] / choices) * K + t * WEIGHTS::X_LANE;
        uint4 b[X_AHEAD][TOKEN_TILES][2];
#pragma unroll
        for (int p = 0; p < X_AHEAD; ++p)
#pragma unroll
            for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    b[p][m][j] = make_uint4(0, 0, 0, 0);
                    if (p < chunks && m * 8 + g < live)
                        b[p][m][j] = load_x(token[m] + p * CHUNK + j * WEIGHTS::X_HALF);
                }
        float offset[2];  // of features g and g + 8, gated: of a gate and its up
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int n = work.row0 + g + (GATED ? 0 : half * 8), row = n + (GATED ? half * N : 0);
            offset[half] = bias && n < N ? load_value(bias + (work.expert * (GATED ? 2 * N : N) + row)) : 0.f;
        }
        at += gridDim.x;
        const Work next = work_at(at);

        float d[SHARES][TOKEN_TILES][4];
#pragma unroll
        for (int v = 0; v < SHARES; ++v)
#pragma unroll
            for (int m = 0; m < TOKEN_TILES; ++m) d[v][m][0] = d[v][m][1] = d[v][m][2] = d[v][m][3] = 0.f;
        for (int first = 0; first < chunks; first += SHARES) {
#pragma unroll
            for (int v = 0; v < SHARES; ++v) {
                const int chunk = first + v, p = v % AHEAD, q = v % X_AHEAD;
                if (chunk < chunks) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        u32 top[4], bottom[4];
                        a[p].expand(j, top, bottom);
#pragma unroll
                        for (int m = 0; m < TOKEN_TILES; ++m) {
                            if (m > 0 && live <= m * 8) continue;
                            const uint4 in = b[q][m][j];
                            mma(d[v][m], top[0], bottom[0], top[1], bottom[1], in.x, in.y);
                            mma(d[v][m], top[2], bottom[2], top[3], bottom[3], in.z, in.w);
                        }
                    }
                    if (chunk + AHEAD < chunks)
#pragma unroll
                        for (int j = 0; j < 2; ++j) rows.load(a[p], chunk + AHEAD, j);
                    if (chunk + X_AHEAD < chunks)
#pragma unroll
                        for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
                            for (int j = 0; j < 2; ++j)
                                if (m * 8 + g < live)
                                    b[q][m][j] = load_x(token[m] + (chunk + X_AHEAD) * CHUNK + j * WEIGHTS::X_HALF);
                }
            }
        }

        const int row0 = work.row0;
        const bool there[2] = {row0 + g < N, row0 + g + 8 < N};
        if (next.expert >= 0) begin_weights(next);
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum[2] = {0.f, 0.f};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int v = 0; v < SHARES; ++v) sum[half] += d[v][m][half * 2 + i];
                    sum[half] += offset[half];
                }
                if (m * 8 + t * 2 + i >= live) continue;
                u16* const to = y + (size_t)out[m][i] * N + row0 + g;
                if (GATED) {
                    if (there[0]) *to = from_float(gated<KIND>(sum[0], sum[1], limit));
                } else {
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (there[half]) to[half * 8] = from_float(sum[half]);
                }
            }
        if (next.expert < 0) return;
        work = next;
    }
}
