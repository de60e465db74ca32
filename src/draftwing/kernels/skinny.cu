// Products of a few rows with a large weight: y[M, N] = x[M, K] @ w[N, K]^T, bound by the time to read w once.
//
// Compiled at run time (nvrtc.py), with TYPE_BF16 set to 1 or 0 (half) on the command line. Weights are the first
// operand of mma.sync and go from global memory to registers without a stop in shared memory: in the row of a weight the
// order of k within a chunk of 64 is permuted, the same way as in x, so that each thread's share is 16 contiguous bytes.
// A block owns ROW_TILES * 16 features; its 8 warps share K in contiguous stretches, and their sums are added in
// order. The order of all additions depends on K alone, never on M: a row's result is the same bits in any batch.
//
// Many rows take `tiled_product`, which reads weights and x by way of shared memory: the same instructions on the same
// numbers in the same order, so the same bits, but one read of a weight serves 128 rows.
//
// Weights are constants, so a block begins to read them while the kernel before it still runs, and only then waits for
// it (programmatic dependent launch, Hopper and later). It reads what its registers hold and no more: asking for the next
// 16 MB into the L2 cache made a step of 32 layers take 0.2 ms longer.

typedef unsigned int u32;
typedef unsigned short u16;

#define WARPS 8
#define CHUNK 64
#define STEP (WARPS * CHUNK)

#if TYPE_BF16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif

__device__ __forceinline__ float to_float(u16 bits) {
#if TYPE_BF16
    return __uint_as_float((u32)bits << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
#endif
}

__device__ __forceinline__ u16 from_float(float f) {
    u16 bits;
#if TYPE_BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
#endif
    return bits;
}

// Volatile, and not by way of .nc, which ptxas moves behind griddepcontrol.wait: what is read ahead must stay ahead of it.
__device__ __forceinline__ uint4 load_weight(const u16* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint4 load_x(const u16* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Not by way of .nc either, which the compiler chooses for a restricted pointer: an earlier kernel may have written this
// while the block was already up.
__device__ __forceinline__ float load_value(const u16* p) {
    u16 bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(p));
    return to_float(bits);
}

__device__ __forceinline__ uint4 load_shared(const u16* p) { return *(const uint4*)p; }

// 16 bytes from global to shared memory, past the registers. Copies that `end_copies` ended are a group;
// `wait_for_copies` waits until no more than LEFT groups are under way.
__device__ __forceinline__ void copy_async(u16* to, const u16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

enum { PLAIN = 0, ADD = 1, SILU_MUL = 2 };

// sums [PARTS][ROWS][TOKENS + 1] of a block, by all its threads -> y.
template <int PARTS, int ROWS, int TOKENS, int KIND>
__device__ __forceinline__ void store_results(const float* sums, const u16* __restrict__ bias,
                                              const u16* __restrict__ extra, u16* __restrict__ y, int row0, int token0,
                                              int M, int N) {
    constexpr int PITCH = TOKENS + 1;
    constexpr int OUT = KIND == SILU_MUL ? ROWS / 2 : ROWS;
    for (int i = threadIdx.x; i < OUT * TOKENS; i += WARPS * 32) {
        const int row = i % OUT, m = i / OUT, n = row0 + row, token_at = token0 + m;
        if (n >= N || token_at >= M) continue;
        const int at_row = KIND == SILU_MUL ? row / 8 * 16 + row % 8 : row;
        float sum = 0.f, up = 0.f;
#pragma unroll
        for (int v = 0; v < PARTS; ++v) {
            sum += sums[(v * ROWS + at_row) * PITCH + m];
            if (KIND == SILU_MUL) up += sums[(v * ROWS + at_row + 8) * PITCH + m];
        }
        if (bias) {
            sum += to_float(bias[n]);
            if (KIND == SILU_MUL) up += to_float(bias[N + n]);
        }
        const size_t at = (size_t)token_at * N + n;
        if (KIND == ADD) sum += load_value(extra + at);
        if (KIND == SILU_MUL) sum = sum / (1.f + __expf(-sum)) * up;
        y[at] = from_float(sum);
    }
}

// PLAIN: y = x w^T (+ bias).  ADD: y = x w^T (+ bias) + extra.  SILU_MUL: w is [2 * N, K], gates before ups, and
// y = silu(gate) * up.  TOKEN_TILES * 8 rows of x a block (blockIdx.y picks them), AHEAD chunks of weights and X_AHEAD of x
// in flight.
template <int TOKEN_TILES, int ROW_TILES, int AHEAD, int X_AHEAD, int KIND>
__device__ __forceinline__ void product(const u16* __restrict__ x, const u16* __restrict__ w, const u16* __restrict__ bias,
                                        const u16* __restrict__ extra, u16* __restrict__ y, int M, int N, int K) {
    static_assert(AHEAD % X_AHEAD == 0, "a chunk of x is in the same registers in every round");
    constexpr int TOKENS = TOKEN_TILES * 8, ROWS = ROW_TILES * 16, PITCH = TOKENS + 1;
    extern __shared__ float sums[];  // [WARPS][ROWS][PITCH]
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = K / CHUNK, count = (chunks - warp + WARPS - 1) / WARPS;  // warp w has chunks w, w + 8, ...
    const int row0 = blockIdx.x * (KIND == SILU_MUL ? ROWS / 2 : ROWS), token0 = blockIdx.y * TOKENS;
    const size_t k0 = (size_t)warp * CHUNK + t * 8;

    const u16* weight[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // SILU_MUL: a tile is 8 gates and, below them, the 8 ups that belong to them.
            const int row = KIND == SILU_MUL ? min(row0 + r * 8 + g, N - 1) + half * N
                                             : min(row0 + r * 16 + half * 8 + g, N - 1);
            weight[r][half] = w + (size_t)row * K + k0;
        }
    uint4 a[AHEAD][ROW_TILES][4];
#pragma unroll
    for (int p = 0; p < AHEAD; ++p)
        if (p < count)
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int j = 0; j < 4; ++j) a[p][r][j] = load_weight(weight[r][j & 1] + p * STEP + (j >> 1) * 32);

    wait_for_earlier_kernels();
    const u16* token[TOKEN_TILES];
    bool live[TOKEN_TILES];
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; ++m) {
        const int row = token0 + m * 8 + g;
        live[m] = row < M;
        token[m] = x + (size_t)min(row, M - 1) * K + k0;
    }
    uint4 b[X_AHEAD][TOKEN_TILES][2];
#pragma unroll
    for (int p = 0; p < X_AHEAD; ++p)
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                b[p][m][j] = make_uint4(0, 0, 0, 0);
                if (p < count && live[m]) b[p][m][j] = load_x(token[m] + p * STEP + j * 32);
            }

    float d[ROW_TILES][TOKEN_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) d[r][m][0] = d[r][m][1] = d[r][m][2] = d[r][m][3] = 0.f;

    for (int c = 0; c < count; c += AHEAD) {
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) {
            if (c + p < count) {
                const int q = p % X_AHEAD;
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                    for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const uint4 top = a[p][r][j * 2], bottom = a[p][r][j * 2 + 1], in = b[q][m][j];
                            mma(d[r][m], top.x, bottom.x, top.y, bottom.y, in.x, in.y);
                            mma(d[r][m], top.z, bottom.z, top.w, bottom.w, in.z, in.w);
                        }
                if (c + p + AHEAD < count)
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            a[p][r][j] = load_weight(weight[r][j & 1] + (c + p + AHEAD) * STEP + (j >> 1) * 32);
                if (c + p + X_AHEAD < count)
#pragma unroll
                    for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
                        for (int j = 0; j < 2; ++j)
                            if (live[m]) b[q][m][j] = load_x(token[m] + (c + p + X_AHEAD) * STEP + j * 32);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) {
            float* at = sums + ((size_t)warp * ROWS + r * 16 + g) * PITCH + m * 8 + t * 2;
            at[0] = d[r][m][0];
            at[1] = d[r][m][1];
            at[8 * PITCH] = d[r][m][2];
            at[8 * PITCH + 1] = d[r][m][3];
        }
    __syncthreads();
    store_results<WARPS, ROWS, TOKENS, KIND>(sums, bias, extra, y, row0, token0, M, N);
}

// As `product`, with the same bits, for more rows: WARPS_F * WF * 16 features and WARPS_T * WT * 8 rows of x a block, of
// which each warp has WF * 16 and WT * 8. What there are 8 warps for, a warp does one after the other here: chunks 0, 8,
// 16, ..., then 1, 9, 17, ...
//
// A chunk in shared memory has 8 units of 16 bytes a row; odd rows have their halves swapped, so that the threads of a
// quarter warp, which read 64 bytes of two rows each, meet no bank twice.
template <int WARPS_F, int WARPS_T, int WF, int WT, int STAGES, int KIND>
__device__ __forceinline__ void tiled_product(const u16* __restrict__ x, const u16* __restrict__ w,
                                              const u16* __restrict__ bias, const u16* __restrict__ extra,
                                              u16* __restrict__ y, int M, int N, int K) {
    constexpr int ROWS = WARPS_F * WF * 16, TOKENS = WARPS_T * WT * 8, PITCH = TOKENS + 1, THREADS = WARPS * 32;
    constexpr int STAGE = (ROWS + TOKENS) * CHUNK, UNITS = CHUNK / 8, STRIDE = THREADS / UNITS;
    static_assert(WARPS_F * WARPS_T == WARPS && ROWS % STRIDE == 0 && TOKENS % STRIDE == 0, "");
    extern __shared__ float sums[];  // first [STAGES][ROWS + TOKENS][CHUNK] of u16, then [ROWS][PITCH]
    u16* const stages = (u16*)sums;
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = K / CHUNK;
    const int row0 = blockIdx.y * (KIND == SILU_MUL ? ROWS / 2 : ROWS), token0 = blockIdx.x * TOKENS;

    // This thread copies one unit of every STRIDE-th row.
    const int unit = threadIdx.x % UNITS, first = threadIdx.x / UNITS;
    const int to = first * CHUNK + (unit ^ ((first & 1) << 2)) * 8;
    auto copy_weights = [&](int stage, int chunk) {
#pragma unroll
        for (int p = 0; p < ROWS / STRIDE; ++p) {
            const int i = first + p * STRIDE;
            const int row = KIND == SILU_MUL ? min(row0 + i / 16 * 8 + i % 8, N - 1) + i % 16 / 8 * N : min(row0 + i, N - 1);
            copy_async(stages + stage * STAGE + to + p * STRIDE * CHUNK, w + (size_t)row * K + chunk * CHUNK + unit * 8);
        }
    };
    auto copy_x = [&](int stage, int chunk) {
#pragma unroll
        for (int p = 0; p < TOKENS / STRIDE; ++p) {
            const int row = min(token0 + first + p * STRIDE, M - 1);
            copy_async(stages + stage * STAGE + (ROWS + p * STRIDE) * CHUNK + to,
                       x + (size_t)row * K + chunk * CHUNK + unit * 8);
        }
    };
    auto after = [&](int chunk) { return chunk + WARPS < chunks ? chunk + WARPS : chunk % WARPS + 1; };

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
#pragma unroll
    for (int r = 0; r < WF; ++r)
#pragma unroll
        for (int m = 0; m < WT; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) d[r][m][i] = sum[r][m][i] = 0.f;

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
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int at = ((t + j * 4) ^ ((g & 1) << 2)) * 8;
            uint4 a[WF][2], b[WT];
#pragma unroll
            for (int r = 0; r < WF; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    a[r][half] = load_shared(stage + (warp_row + r * 16 + half * 8 + g) * CHUNK + at);
#pragma unroll
            for (int m = 0; m < WT; ++m) b[m] = load_shared(stage + (ROWS + warp_token + m * 8 + g) * CHUNK + at);
#pragma unroll
            for (int r = 0; r < WF; ++r)
#pragma unroll
                for (int m = 0; m < WT; ++m) {
                    mma(d[r][m], a[r][0].x, a[r][1].x, a[r][0].y, a[r][1].y, b[m].x, b[m].y);
                    mma(d[r][m], a[r][0].z, a[r][1].z, a[r][0].w, a[r][1].w, b[m].z, b[m].w);
                }
        }
        if (c + WARPS >= chunks)  // what is one warp's share there ends here
#pragma unroll
            for (int r = 0; r < WF; ++r)
#pragma unroll
                for (int m = 0; m < WT; ++m)
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        sum[r][m][k] += d[r][m][k];
                        d[r][m][k] = 0.f;
                    }
        c = after(c);
    }

    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int r = 0; r < WF; ++r)
#pragma unroll
        for (int m = 0; m < WT; ++m) {
            float* at = sums + (warp_row + r * 16 + g) * PITCH + warp_token + m * 8 + t * 2;
            at[0] = sum[r][m][0];
            at[1] = sum[r][m][1];
            at[8 * PITCH] = sum[r][m][2];
            at[8 * PITCH + 1] = sum[r][m][3];
        }
    __syncthreads();
    store_results<1, ROWS, TOKENS, KIND>(sums, bias, extra, y, row0, token0, M, N);
}

#define KERNEL(NAME, TOKEN_TILES, ROW_TILES, AHEAD, X_AHEAD, KIND, BLOCKS)                                           \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) NAME(                                             \
        const u16* x, const u16* w, const u16* bias, const u16* extra, u16* y, int M, int N, int K) {                  \
        product<TOKEN_TILES, ROW_TILES, AHEAD, X_AHEAD, KIND>(x, w, bias, extra, y, M, N, K);                          \
    }

// Features a block, chunks in flight and blocks a multiprocessor, as measured best on one H200.
KERNEL(plain_8, 1, 2, 2, 2, PLAIN, 2)
KERNEL(add_8, 1, 1, 2, 2, ADD, 3)
KERNEL(silu_8, 1, 2, 2, 2, SILU_MUL, 2)
KERNEL(plain_16, 2, 1, 2, 1, PLAIN, 3)
KERNEL(add_16, 2, 1, 2, 2, ADD, 2)
KERNEL(silu_16, 2, 2, 2, 1, SILU_MUL, 2)
KERNEL(plain_32, 4, 2, 1, 1, PLAIN, 2)
KERNEL(add_32, 4, 1, 2, 1, ADD, 2)
KERNEL(silu_32, 4, 2, 1, 1, SILU_MUL, 2)
KERNEL(plain_64, 8, 2, 2, 1, PLAIN, 1)
KERNEL(add_64, 8, 2, 2, 1, ADD, 1)
KERNEL(silu_64, 8, 2, 2, 1, SILU_MUL, 1)

#define TILED(NAME, WARPS_F, WARPS_T, WF, WT, STAGES, KIND)                                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) NAME(                                                  \
        const u16* x, const u16* w, const u16* bias, const u16* extra, u16* y, int M, int N, int K) {                  \
        tiled_product<WARPS_F, WARPS_T, WF, WT, STAGES, KIND>(x, w, bias, extra, y, M, N, K);                          \
    }

TILED(plain_128, 2, 4, 4, 4, 3, PLAIN)
TILED(add_128, 2, 4, 4, 4, 3, ADD)
TILED(silu_128, 2, 4, 4, 4, 3, SILU_MUL)
