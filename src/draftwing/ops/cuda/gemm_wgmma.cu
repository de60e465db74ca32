// Follows gemm.cu and gemm_bulk.cu: what gemm_dense.cu and gemm_fp8.cu have in common (wgmma, compute capability 9.0
// alone).
//
// x is an instruction's first operand, 64 rows of it, and weights the second: any multiple of 8 features. So all blocks
// get as many bytes of weights. Both lie in shared memory as rows of 128 bytes, in the order of 128-byte swizzling.
//
// The blocks of a cluster have the same rows of x and ranges of K; blocks with the same range have other features. A block
// sums its range in order. Then ranges are added in order. How many there are depends on the weight's shape alone, so a
// row has the same bits in any batch.

typedef unsigned long long u64;

#ifndef ON_HOST
// d = a b^T, or d += a b^T, for 32 bytes of 64 rows a and FEATURES rows b. Is done when waited for. wgmma.py has more.
template <int FEATURES>
struct Product;

// Of rows of 128 bytes, swizzled: the address in 16 bytes, and from 8 rows to the next 8.
__device__ __forceinline__ u64 rows_at(const void* p) {
    return shared_at(p) >> 4 & 0x3fff | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until no more than LEFT of the groups that `end_products` ended are under way.
template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Not read before, nor written after.
template <int COUNT>
__device__ __forceinline__ void keep_here(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// THREADS: of the warp groups that multiply. One thread behind them asks for copies.
template <int THREADS>
__device__ __forceinline__ void sync_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

__device__ __forceinline__ void sync_cluster_but_producers() {  // which have left
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Until all threads of the cluster that have not left are here, whatever they wrote.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

__device__ __forceinline__ int rank_in_cluster() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ int blocks_of_cluster() {
    int blocks;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
__device__ __forceinline__ void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }

// Volatile for the reason that `load_value` has.
__device__ __forceinline__ void add_four(const u16* p, float (&sum)[4]) {
    u32 pairs[2];
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(pairs[0]), "=r"(pairs[1]) : "l"(p));
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[k] += to_float((u16)(k % 2 ? pairs[k / 2] >> 16 : pairs[k / 2]));
}
#endif

struct Result {
    const u16 *bias, *extra;
    u16* y;  // [M][features]
    int M, features, gated;
};

// Of a result, what a block has: some rows of x, a half of its weights or two of them in `half`s, a range of K.
struct Place {
    int token0, feature0, half, first, count, ranges, range, sharers, sharer;

    // rows: of weights of a block, in two halves: gates and their ups, or features. wide: columns of a step of K.
    __device__ __forceinline__ Place(const Result& result, int tokens, int rows, int K, int wide, int all_ranges) {
        const int rank = rank_in_cluster(), blocks = blocks_of_cluster(), steps = (K + wide - 1) / wide;
        ranges = all_ranges, sharers = blocks / ranges, range = rank / sharers, sharer = rank - range * sharers;
        half = (rows / 8 + 1) / 2 * 8;
        token0 = blockIdx.x / blocks * tokens, feature0 = (blockIdx.y * sharers + sharer) * (result.gated ? half : rows);
        first = steps * range / ranges, count = steps * (range + 1) / ranges - first;
    }
};

// sums [tokens][pitch] in each block of a cluster, by the consumers of all -> y. own: features of a block.
template <int THREADS>
__device__ __forceinline__ void store_sums(const Result& result, const Place& place, const float* sums, int pitch,
                                           int tokens, int own) {
    const int fours = own / 4, count = min(tokens, result.M - place.token0) * fours;
    for (int i = place.range * THREADS + threadIdx.x; i < count; i += place.ranges * THREADS) {
        const int token = i / fours, row = (i - token * fours) * 4, n = place.feature0 + row;
        if (n >= result.features) continue;
        const size_t at = (size_t)(place.token0 + token) * result.features + n;
        auto sum_of = [&](const float* p, const u16* bias, float (&out)[4]) {
            out[0] = out[1] = out[2] = out[3] = 0.f;
            for (int v = 0; v < place.ranges; ++v) {
                const float4 part =
                    place.ranges == 1 ? *(const float4*)p : load_four_from_rank(p, v * place.sharers + place.sharer);
                out[0] += part.x, out[1] += part.y, out[2] += part.z, out[3] += part.w;
            }
            if (result.bias)
#pragma unroll
                for (int k = 0; k < 4; ++k) out[k] += to_float(bias[k]);
        };
        float sum[4], up[4];
        sum_of(sums + token * pitch + row, result.bias + n, sum);
        if (result.gated) {
            sum_of(sums + token * pitch + place.half + row, result.bias + result.features + n, up);
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[k] = sum[k] / (1.f + __expf(-sum[k])) * up[k];
        }
        if (result.extra) add_four(result.extra + at, sum);
        u16 out[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) out[k] = from_float(sum[k]);
        *(uint2*)(result.y + at) = {out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16};
    }
}
