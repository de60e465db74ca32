// Follows gemm_groups.cu and gemm_bulk.cu: the GEMM of more than 16 rows with weights in 4 or 8 bits (wgmma, compute capability 9.0 alone).
//
// As in gemm_wide.cu weights become an instruction's first operand in registers, and x is read from shared memory. Each
// block of a cluster has a share, or a block sums all shares, one after the other. `order_x` first writes x as shared
// memory is to have it: panels of TOKENS rows and a chunk, one after the other along K, each the matrices of 8 rows and 8
// columns that `wide_mma` reads. So a panel comes by one bulk copy.
//
// One thread asks for panels. A stage has two barriers: `full` opens when its panel is there, `empty` when all warps have
// done with it. A warp for this alone would leave the others too few registers: they are given out by four warps. Weights
// come by way of rings that each lane has for its own, as in `wide_gemm`.

#define LATE 2  // chunks: so far a warp group may be behind the other before that waits

#ifndef ON_HOST
__device__ __forceinline__ float4 load_four(const float* p) { return *(const float4*)p; }

// Volatile for the reason that `load_value` has.
__device__ __forceinline__ uint2 load_four_values(const u16* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
#endif

// sums [TOKENS][pitch_of(ROWS)] in each block of a cluster, by all its threads -> y, as `store_results` does it, of four
// features at a time.
template <int POWER, int CLUSTER, int ROWS, int TOKENS, int THREADS, int KIND>
__device__ __forceinline__ void store_tall(const float* sums, const u16* __restrict__ bias,
                                           const u16* __restrict__ extra, u16* __restrict__ y, int row0, int token0,
                                           int M, int N) {
    constexpr int PITCH = pitch_of(ROWS), FOURS = (KIND == SILU_MUL ? ROWS / 2 : ROWS) / 4;
    for (int i = blockIdx.x % CLUSTER * THREADS + threadIdx.x; i < FOURS * TOKENS; i += CLUSTER * THREADS) {
        const int row = i % FOURS * 4, m = i / FOURS, n = row0 + row, token = token0 + m;
        if (n >= N || token >= M) continue;
        const size_t at = (size_t)token * N + n;
        const float* const from = sums + m * PITCH + (KIND == SILU_MUL ? row / 8 * 16 + row % 8 : row);
        uint2 before = {0, 0};
        if (KIND == ADD) before = load_four_values(extra + at);
        auto sum_of = [&](const float* p, const u16* its_bias, float (&out)[4]) {
            out[0] = out[1] = out[2] = out[3] = 0.f;
            EACH(v, CLUSTER) {
                float4 part;
                if constexpr (CLUSTER > 1) part = load_four_from_rank(p, v);
                else part = load_four(p);
                out[0] += part.x, out[1] += part.y, out[2] += part.z, out[3] += part.w;
            }
            EACH(k, 4) {
                if (POWER > 0) out[k] *= (float)(1 << POWER);
                if (bias) out[k] += to_float(its_bias[k]);
            }
        };
        float sum[4], up[4];
        sum_of(from, bias + n, sum);
        if (KIND == SILU_MUL) sum_of(from + 8, bias + N + n, up);
        u16 out[4];
        EACH(k, 4) {
            const u32 pair = k < 2 ? before.x : before.y;
            if (KIND == ADD) sum[k] += to_float((u16)(k % 2 ? pair >> 16 : pair));
            if (KIND == SILU_MUL) sum[k] = silu_times(sum[k], up[k]);
            out[k] = from_float(sum[k]);
        }
        *(uint2*)(y + at) = {out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16};
    }
}

// WARP_GROUPS warp groups, each with ROW_TILES * 64 features and TOKEN_TILES * 8 rows of x, AHEAD chunks of weights and STAGES
// of x in flight or read. CLUSTER blocks have the same features and rows, and each a share. One sums them in turn: chunks
// 0, 8, 16, ..., then 1, 9, 17, ... Blocks side by side have the same weights. N, of a gate or of all: a multiple of 16.
template <class WEIGHTS, int TOKEN_TILES, int WARP_GROUPS, int ROW_TILES, int STAGES, int AHEAD, int CLUSTER, int KIND>
__device__ __forceinline__ void tall_gemm(OPERANDS) {
    constexpr int TOKENS = TOKEN_TILES * 8, WARPS = WARP_GROUPS * 4, ROWS = WARPS * ROW_TILES * 16, PITCH = pitch_of(ROWS);
    constexpr int STAGE = TOKENS * CHUNK;  // of x, u16
    constexpr int UNITS = WEIGHTS::UNITS * 256, WORDS = WEIGHTS::WORDS * 32;  // of a warp, in u16 and u32
    static_assert(STAGES > LATE, "a stage is asked for again so many chunks after it is read");
    constexpr bool IN_SHARES = CLUSTER == 1;
    static_assert(IN_SHARES || CLUSTER == SHARES, "sums are to have the bits of few rows");
    constexpr int PARTS = WARPS * AHEAD * ROW_TILES, USED = STAGES * STAGE * 2 + PARTS * (UNITS * 2 + WORDS * 4);
    constexpr int BARRIERS = USED > TOKENS * PITCH * 4 ? USED : TOKENS * PITCH * 4;  // bytes before them
    extern __shared__ float sums[];  // first [STAGES][STAGE] of u16 and rings, then [TOKENS][PITCH]; behind both, barriers
    u16* const stages = (u16*)sums;
    u16* const rings = stages + STAGES * STAGE;
    u32* const ring_words = (u32*)(rings + PARTS * UNITS);
    Barrier* const full = (Barrier*)((unsigned char*)sums + BARRIERS);  // nothing else may ever be written there
    Barrier* const empty = full + STAGES;
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), rank = blockIdx.x % CLUSTER;
    const int token_block = blockIdx.x / CLUSTER, row0 = blockIdx.y * (KIND == SILU_MUL ? ROWS / 2 : ROWS);
    const int chunks = K / CHUNK, count = (chunks - rank + CLUSTER - 1) / CLUSTER;
    auto after = [&](int c) { return !IN_SHARES ? c + CLUSTER : c + SHARES < chunks ? c + SHARES : c % SHARES + 1; };
    if (threadIdx.x == 0) {
        init_ring(full, empty, STAGES, 1, WARPS);
        show_barriers();
    }

    const int first_unit = held(warp * (AHEAD * ROW_TILES * UNITS) + lane * 8);
    const int first_word = held(warp * (AHEAD * ROW_TILES * WORDS) + lane);
    const int tile = warp / 4 * (ROW_TILES * 4) + warp % 4;  // of 16 features, the first; the next is 4 further
    typename WEIGHTS::template Rows<KIND> rows[ROW_TILES];
    EACH(r, ROW_TILES) rows[r].find(weights, row0, (tile + r * 4) * 16, 0, N, K);
    int asked = 0, weights_ahead = rank, slot = 0, unit = first_unit, word = first_word;
    auto copy_weights = [&] {
        if (asked++ < count)
            EACH(r, ROW_TILES) rows[r].copy(rings + unit + r * UNITS, ring_words + word + r * WORDS, weights_ahead);
        end_copies();
        weights_ahead = after(weights_ahead);
        const bool more = ++slot < AHEAD;
        slot = more ? slot : 0;
        unit = more ? unit + ROW_TILES * UNITS : first_unit;
        word = more ? word + ROW_TILES * WORDS : first_word;
    };
    EACH(s, AHEAD) copy_weights();

    wait_for_earlier_kernels();
    const u16* const panels = x + (size_t)token_block * chunks * STAGE;
    int x_ahead = rank;
    auto copy_x = [&](int s) {
        if (lane == 0) {
            expect_bytes(full + s, STAGE * 2);
            copy_bulk(stages + s * STAGE, panels + (size_t)x_ahead * STAGE, STAGE * 2, full + s);
        }
        x_ahead = after(x_ahead);
    };
    if (warp == 0)
        for (int s = 0; s < min(STAGES, count); ++s) copy_x(s);
    __syncthreads();  // barriers are there for all

    float d[ROW_TILES][TOKEN_TILES][4], sum[ROW_TILES][TOKEN_TILES][4];  // the latter: of shares
    clear_sums(d, sum);
    u32 top[2][ROW_TILES][4], bottom[2][ROW_TILES][4];
    int c = rank, stage = 0, parity = 0, before = 0, free = 0, free_parity = 0;
    for (int i = 0; i < count; ++i) {
        wait_for_copies<AHEAD - 1>();
        typename WEIGHTS::Part a[ROW_TILES];
        EACH(r, ROW_TILES) rows[r].take(a[r], rings + unit + r * UNITS, ring_words + word + r * WORDS);
        const u16* const matrices = stages + stage * STAGE;
        EACH(j, 2) {
            wait_for_products<1>();  // those that read the registers written next have ended
            if (j == 1 && i > 0 && lane == 0) arrive(empty + before);  // and with them all of the chunk before
            EACH(r, ROW_TILES) a[r].expand(j, top[j][r], bottom[j][r]);
            if (j == 0) wait_barrier(full + stage, parity);
            begin_products();
            EACH(h, 2) EACH(r, ROW_TILES)
                wide_mma<TOKEN_TILES>(d[r], top[j][r][2 * h], bottom[j][r][2 * h], top[j][r][2 * h + 1],
                                      bottom[j][r][2 * h + 1], matrices + (j * 4 + h * 2) * (TOKEN_TILES * 64));
            end_products();
        }
        copy_weights();
        if (warp == 0 && i >= LATE && i - LATE + STAGES < count) {
            wait_barrier(empty + free, free_parity);
            copy_x(free);
            const bool more = ++free < STAGES;
            free_parity = more ? free_parity : free_parity ^ 1;
            free = more ? free : 0;
        }
        if (IN_SHARES && c + SHARES >= chunks) {  // a share ends here
            wait_for_products<0>();
            add_share(sum, d);
        }
        c = after(c);
        before = stage;
        const bool more = ++stage < STAGES;
        parity = more ? parity : parity ^ 1;
        stage = more ? stage : 0;
    }
    wait_for_products<0>();
    wait_for_copies<0>();
    __syncthreads();  // sums take the place of all else
    keep_sums<ROW_TILES, TOKEN_TILES, PITCH, KIND == SILU_MUL, 4>(IN_SHARES ? sum : d, sums, tile);
    if constexpr (CLUSTER > 1) sync_cluster();
    else __syncthreads();
    store_tall<WEIGHTS::POWER, CLUSTER, ROWS, TOKENS, WARPS * 32, KIND>(sums, bias, extra, y, row0, token_block * TOKENS, M,
                                                                        N);
    if constexpr (CLUSTER > 1) sync_cluster();
}

// x [M, K] -> panels, with zeros behind its rows. A warp of 8 has half a chunk of 8 rows.
template <int TOKEN_TILES>
__device__ __forceinline__ void order_x(const u16* __restrict__ x, u16* __restrict__ panels, int M, int K) {
    launch_dependents();
    const int lane = threadIdx.x & 31, half = blockIdx.x * 8 + (threadIdx.x >> 5), tile = blockIdx.y;
    wait_for_earlier_kernels();
    if (half >= K / 32) return;
    const int row = tile * 8 + (lane >> 2);
    uint4 in = make_uint4(0, 0, 0, 0);
    if (row < M) in = load_x(x + (size_t)row * K + half * 32 + (lane & 3) * 8);
    const size_t panel = (size_t)(tile / TOKEN_TILES) * (K / CHUNK) + half / 2;
    u32* const to = (u32*)panels + ((panel * 8 + half % 2 * 4) * TOKEN_TILES + tile % TOKEN_TILES) * 32 + lane;
    place_x<TOKEN_TILES * 32>(to, in);
}

#define ORDER_KERNEL(NAME, TOKEN_TILES)                                                               \
    extern "C" __global__ void __launch_bounds__(256) NAME(const u16* x, u16* panels, int M, int K) { \
        order_x<TOKEN_TILES>(x, panels, M, K);                                                        \
    }
