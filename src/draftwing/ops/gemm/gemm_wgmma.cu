// Follows gemm.cu and gemm_bulk.cu: what gemm_dense.cu, gemm_fp8.cu and their kernels for many rows have in common (wgmma,
// compute capability 9.0 alone).
//
// x is an instruction's first operand, 64 rows of it, and weights the second: any multiple of 8 features. So all blocks
// get as many bytes of weights. Both lie in shared memory as rows of 128 bytes, in the order of 128-byte swizzling.
//
// The blocks of a cluster have the same features and rows, and each a range of K, or some that follow each other. A block
// sums a range in order. Then ranges are added in order. How many there are depends on the weight's shape alone, so a row
// has the same bits in any batch.

typedef unsigned long long u64;

#ifndef ON_HOST
// d = a b^T, or d += a b^T, for 32 bytes of 64 rows a and FEATURES rows b. Is done when waited for. cuda_wgmma.py has more.
template <int FEATURES>
struct Product;

// Of rows of 128 bytes, swizzled: the address in 16 bytes, and from 8 rows to the next 8.
__device__ __forceinline__ u64 rows_at(const void* p) {
    return shared_at(p) >> 4 & 0x3fff | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Not read before, nor written after.
template <int COUNT>
__device__ __forceinline__ void keep_here(float (&d)[COUNT]) {
    EACH(i, COUNT) asm volatile("" : "+f"(d[i])::"memory");
}

// THREADS: of the warp groups that multiply. One thread behind them asks for copies.
template <int THREADS>
__device__ __forceinline__ void sync_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// Of 128 threads: 0 and 1 of the warp groups that multiply, 2 of threads that copy.
__device__ __forceinline__ void sync_128(int which) { asm volatile("bar.sync %0, 128;" ::"r"(2 + which) : "memory"); }

// Of all threads of the cluster that have not left, of warps whose threads come at different times, too.
__device__ __forceinline__ void sync_whole_cluster() {
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

__device__ __forceinline__ void arrive_at_rank(Barrier* barrier, int rank) {
    asm volatile("{.reg .u32 at; mapa.shared::cluster.u32 at, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [at];}" ::"r"(shared_at(barrier)),
                 "r"(rank)
                 : "memory");
}

__device__ __forceinline__ u32 pair_of(float first, float second) {
    u32 pair;
#if TYPE_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Volatile for the reason that `load_value` has.
__device__ __forceinline__ void add_four(const u16* p, float (&sum)[4]) {
    u32 pairs[2];
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(pairs[0]), "=r"(pairs[1]) : "l"(p));
    EACH(k, 4) sum[k] += to_float((u16)(k % 2 ? pairs[k / 2] >> 16 : pairs[k / 2]));
}
#endif

struct Result {
    const u16 *bias, *extra;
    u16* y;  // [M][features]
    int M, features, gated;
};

// What a block, or a cluster, is to do.
struct Place {
    int token0, feature0, half, own, first, count, steps, blocks, rank, chain;

    // rows: of weights of a block, in two parts: half of them, or the gates and their ups. wide: columns of a step of K.
    // chain: ranges of a block.
    __device__ __forceinline__ Place(const Result& result, int tokens, int rows, int K, int wide, int chain = 1)
        : steps(K / wide), blocks(blocks_of_cluster()), rank(rank_in_cluster()), chain(chain) {
        half = (rows / 8 + 1) / 2 * 8, own = result.gated ? half : rows;
        token0 = blockIdx.x / blocks * tokens, feature0 = blockIdx.y * own;
        first = begin_of(0), count = begin_of(chain) - first;
    }

    // Of a range of the block's.
    __device__ __forceinline__ int begin_of(int range) const {
        return steps * (rank * chain + range) / (blocks * chain);
    }
};

// Four sums of all ranges, and the bias. p: where this block has those of its last one. earlier: how much further those
// of the first are, where a block has two.
template <int RANGES, int CHAIN>
__device__ __forceinline__ void sum_of_ranges(const float* p, int earlier, const u16* bias, float (&out)[4]) {
    float4 part[RANGES];
    EACH(v, RANGES) {
        const float* const its = v % CHAIN == CHAIN - 1 ? p : p + earlier;
        part[v] = RANGES == CHAIN ? *(const float4*)its : load_four_from_rank(its, v / CHAIN);
    }
    out[0] = out[1] = out[2] = out[3] = 0.f;
    EACH(v, RANGES) out[0] += part[v].x, out[1] += part[v].y, out[2] += part[v].z, out[3] += part[v].w;
    if (bias)
        EACH(k, 4) out[k] += to_float(bias[k]);
}

// sums [tokens][pitch] in each block of a cluster, by the THREADS consumers of all -> y
template <int RANGES, int CHAIN, int THREADS>
__device__ __forceinline__ void store_sums(const Result& result, const Place& place, const float* sums, int earlier,
                                           int pitch, int tokens) {
    const int fours = place.own / 4, count = min(tokens, result.M - place.token0) * fours;
    for (int i = place.rank * THREADS + threadIdx.x; i < count; i += RANGES / CHAIN * THREADS) {
        const int token = i / fours, row = (i - token * fours) * 4, n = place.feature0 + row;
        if (n >= result.features) continue;
        const size_t at = (size_t)(place.token0 + token) * result.features + n;
        float before[4] = {0.f, 0.f, 0.f, 0.f}, sum[4], up[4];
        if (result.extra) add_four(result.extra + at, before);  // asked for before what it is added to
        const float* const p = sums + token * pitch + row;
        sum_of_ranges<RANGES, CHAIN>(p, earlier, result.bias ? result.bias + n : nullptr, sum);
        if (result.gated) {
            sum_of_ranges<RANGES, CHAIN>(p + place.half, earlier, result.bias ? result.bias + result.features + n : nullptr, up);
            EACH(k, 4) sum[k] = silu_times(sum[k], up[k]);
        }
        u16 out[4];
        EACH(k, 4) out[k] = from_float(result.extra ? sum[k] + before[k] : sum[k]);
        *(uint2*)(result.y + at) = {out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16};
    }
}

// The end of a block, from when its consumers have stored their sums: 1, 2 or 4 ranges, of which a block has CHAIN.
template <int THREADS, int CHAIN = 1>
__device__ __forceinline__ void finish_sums(const Result& result, const Place& place, const float* sums, int pitch,
                                            int tokens, int earlier = 0) {
    if (place.blocks == 1) {
        sync_consumers<THREADS>();
        store_sums<CHAIN, CHAIN, THREADS>(result, place, sums, earlier, pitch, tokens);
        return;
    }
    sync_whole_cluster();
    if (place.blocks == 2) store_sums<2 * CHAIN, CHAIN, THREADS>(result, place, sums, earlier, pitch, tokens);
    else store_sums<4, 1, THREADS>(result, place, sums, 0, pitch, tokens);  // each has one
    meet_cluster();  // nobody ends while others read what it has
}
