// An experiment next to src/draftwing/ops/gemm/gemm.cu, whose text comes before this: weights through a ring in shared
// memory, filled across kernel boundaries. Not yet run on a GPU.

// -- Hopper: weights stream through shared memory ------------------------------------------------------------------------
//
// One block a multiprocessor walks over tiles of 16 features. A producer warp keeps a ring of stages full by bulk copies;
// it starts before the kernel before has finished, so that the memory is busy while blocks of that one drain, and never
// waits for anything but free stages. Two kernels fit a multiprocessor.

#define STAGES 6
#define STAGE_PITCH 1088                 // bytes of a row of 512 elements, padded against bank conflicts
#define STAGE_BYTES (16 * STAGE_PITCH)
#define SUMS_PITCH 9
#define STREAM_THREADS ((WARPS + 1) * 32)

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile("{\n .reg .pred done;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 " @!done bra again;\n}" ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

// Same result as `product`, bit for bit. Dynamic shared memory: the ring, then [2][WARPS][16][TOKEN_TILES * 8 + 1]
// floats, then the barriers.
template <int TOKEN_TILES, int KIND>
__device__ __forceinline__ void stream(const u16* __restrict__ x, const u16* __restrict__ w, const u16* __restrict__ bias,
                                       const u16* __restrict__ extra, u16* __restrict__ y, int M, int N, int K,
                                       const u16* __restrict__ next, int next_bytes) {
    constexpr int TOKENS = TOKEN_TILES * 8, PITCH = TOKENS + 1, OUT = KIND == SILU_MUL ? 8 : 16;
    extern __shared__ __align__(128) unsigned char ring[];
    float* sums = (float*)(ring + STAGES * STAGE_BYTES);
    const u32 base = shared_address(ring), full = shared_address(sums + 2 * WARPS * 16 * PITCH), empty = full + STAGES * 8;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + s * 8, 1);
            barrier_init(empty + s * 8, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int tiles = (N + OUT - 1) / OUT, stages = (K + STEP - 1) / STEP;

    if (warp == WARPS) {  // the producer; lane i copies row i of a tile
        int stage = 0, parity = 1;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int g = lane & 7, half = (lane >> 3) & 1;
            const int row = KIND == SILU_MUL ? min(tile * 8 + g, N - 1) + half * N : min(tile * 16 + (lane & 15), N - 1);
            const u16* from = w + (size_t)row * K;
            for (int s = 0; s < stages; ++s) {
                const u32 bytes = min(STEP, K - s * STEP) * 2;
                barrier_wait(empty + stage * 8, parity);
                if (lane == 0) barrier_expect(full + stage * 8, bytes * 16);
                __syncwarp();
                if (lane < 16)
                    bulk_copy(base + stage * STAGE_BYTES + lane * STAGE_PITCH, from + s * STEP, bytes, full + stage * 8);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        if (next) {
            const int share = (next_bytes / gridDim.x + 4095) / 4096 * 4096;
            for (int i = lane * 4096; i < share; i += 32 * 4096) {
                const long long at = (long long)blockIdx.x * share + i;
                if (at + 4096 <= next_bytes)
                    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"((const char*)next + at), "r"(4096));
            }
        }
        wait_for_earlier_kernels();  // when this kernel is done, all before it are
        return;
    }

    const int g = lane >> 2, t = lane & 3;
    const int last = K / CHUNK - (stages - 1) * WARPS;  // chunks of the last stage
    wait_for_earlier_kernels();
    const u16* token[TOKEN_TILES];
    bool live[TOKEN_TILES];
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; ++m) {
        live[m] = m * 8 + g < M;
        token[m] = x + (size_t)min(m * 8 + g, M - 1) * K + warp * CHUNK + t * 8;
    }
    constexpr int X_AHEAD = 2;
    uint4 b[X_AHEAD + 1][TOKEN_TILES][2];
    auto load = [&](uint4 (&to)[TOKEN_TILES][2], int s) {  // x of stage s of a tile
        const bool there = s + 1 < stages || warp < last;
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                to[m][j] = make_uint4(0, 0, 0, 0);
                if (live[m] && there) to[m][j] = load_x(token[m] + s * STEP + j * 32);
            }
    };
    int ahead = 0;  // stage of the tile whose x is loaded next
#pragma unroll
    for (int p = 0; p < X_AHEAD; ++p) {
        load(b[p], ahead);
        if (++ahead == stages) ahead = 0;
    }
    int stage = 0, parity = 0, buffer = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float d[TOKEN_TILES][4];
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) d[m][0] = d[m][1] = d[m][2] = d[m][3] = 0.f;
        for (int s = 0; s < stages; ++s) {
            load(b[X_AHEAD], ahead);
            if (++ahead == stages) ahead = 0;
            barrier_wait(full + stage * 8, parity);
            if (s + 1 < stages || warp < last) {
                const u32 at = base + stage * STAGE_BYTES + g * STAGE_PITCH + warp * (CHUNK * 2) + t * 16;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint4 top = load_shared(at + j * 64), bottom = load_shared(at + 8 * STAGE_PITCH + j * 64);
#pragma unroll
                    for (int m = 0; m < TOKEN_TILES; ++m) {
                        mma(d[m], top.x, bottom.x, top.y, bottom.y, b[0][m][j].x, b[0][m][j].y);
                        mma(d[m], top.z, bottom.z, top.w, bottom.w, b[0][m][j].z, b[0][m][j].w);
                    }
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage * 8);
            if (++stage == STAGES) stage = 0, parity ^= 1;
#pragma unroll
            for (int p = 0; p < X_AHEAD; ++p)
#pragma unroll
                for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) b[p][m][j] = b[p + 1][m][j];
        }
        float* mine = sums + (buffer * WARPS + warp) * 16 * PITCH;
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) {
            mine[g * PITCH + m * 8 + t * 2] = d[m][0];
            mine[g * PITCH + m * 8 + t * 2 + 1] = d[m][1];
            mine[(g + 8) * PITCH + m * 8 + t * 2] = d[m][2];
            mine[(g + 8) * PITCH + m * 8 + t * 2 + 1] = d[m][3];
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
        for (int i = threadIdx.x; i < OUT * TOKENS; i += WARPS * 32) {
            const int row = i % OUT, m = i / OUT, n = tile * OUT + row;
            if (n >= N || m >= M) continue;
            const float* of = sums + buffer * WARPS * 16 * PITCH + row * PITCH + m;
            float sum = 0.f, up = 0.f;
#pragma unroll
            for (int v = 0; v < WARPS; ++v) {
                sum += of[v * 16 * PITCH];
                if (KIND == SILU_MUL) up += of[(v * 16 + 8) * PITCH];
            }
            if (bias) {
                sum += to_float(bias[n]);
                if (KIND == SILU_MUL) up += to_float(bias[N + n]);
            }
            const size_t at = (size_t)m * N + n;
            if (KIND == ADD) sum += to_float(extra[at]);
            if (KIND == SILU_MUL) sum = sum / (1.f + __expf(-sum)) * up;
            y[at] = from_float(sum);
        }
        buffer ^= 1;
    }
}
#endif


#define STREAM_KERNEL(NAME, TOKEN_TILES, KIND)                                                                        \
    extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2) NAME(                                              \
        const u16* x, const u16* w, const u16* bias, const u16* extra, u16* y, int M, int N, int K, const u16* next,   \
        int next_bytes) {                                                                                              \
        stream<TOKEN_TILES, KIND>(x, w, bias, extra, y, M, N, K, next, next_bytes);                                    \
    }
