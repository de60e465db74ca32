// Follows gemm_fp8.cu and gemm_many.cu: the same products with the same bits, for many rows of x.

#ifndef ON_HOST
// To the same place in both blocks of the cluster, whose barriers at the same place expect it.
__device__ __forceinline__ void copy_bulk_to_both(void* to, const void* from, int bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(shared_at(to)),
                 "l"(from), "r"(bytes), "r"(shared_at(barrier)), "h"((u16)3)
                 : "memory");
}

// A warp group waits for its turn to begin products, which the other one gives it.
__device__ __forceinline__ void take_turn(int group) {
    asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(2 + group) : "memory");
}
#endif

// What a warp group has of a tile's scales for 128 columns.
template <int PART>
struct Fp8Scales {
    float of[PART / 16];

    __device__ __forceinline__ void read(const float* p) {
#pragma unroll
        for (int j = 0; j < PART / 16; j += 4) {
            const float4 four = *(const float4*)(p + j);
            of[j] = four.x;
            if (j + 1 < PART / 16) of[j + 1] = four.y;
            if (j + 2 < PART / 16) of[j + 2] = four.z;
            if (j + 3 < PART / 16) of[j + 3] = four.w;
        }
    }
};

template <int PART>
__device__ __forceinline__ void add_scaled(float (&total)[PART / 2], const float (&d)[PART / 2],
                                           const Fp8Scales<PART>& scales, float above, float below) {
#pragma unroll
    for (int j = 0; j < PART / 16; ++j) {
        const float one = scales.of[j] * above, other = scales.of[j] * below;
#pragma unroll
        for (int k = j * 8; k < j * 8 + 8; ++k) total[k] = fmaf(d[k], k % 4 < 2 ? one : other, total[k]);
    }
}

// PART: features of an instruction, a multiple of 16; a tile has two such parts. RANGES: of K.
template <int PART, int RANGES>
__device__ __forceinline__ void fp8_gemm_many(const Fp8Task& task) {
    constexpr int SPAN = (PART / 16 + 3) / 4 * 4;  // scales of a part
    constexpr bool TURNS = PART >= 80;  // of warp groups; smaller products are done before the other group has begun
    extern __shared__ float sums[];
    const int rank = rank_in_cluster(), stages = task.stages, blocks = task.K / WIDE;
    Fp8* const x_ring = (Fp8*)sums + (-shared_at(sums) & 1023);           // [stages][MANY][128]
    Fp8* const w_ring = x_ring + stages * MANY * WIDE;                    // [stages][2][PART][128]
    float* const x_scales = (float*)(w_ring + stages * 2 * PART * WIDE);  // [stages][MANY]
    float* const w_scales = x_scales + stages * MANY;                     // [stages][2][SPAN]
    Barrier* const full = (Barrier*)(w_scales + stages * 2 * SPAN);
    Barrier* const empty = full + stages;
    const Tiles tiles(task.result, task.padded, PART);
    const int number0 = blockIdx.x / 2, step = gridDim.x / 2;
    launch_dependents();

    if (threadIdx.x == CONSUMERS) {
        for (int s = 0; s < stages; ++s) {
            init_barrier(full + s, 2);
            init_barrier(empty + s, 2 * (CONSUMERS / 32));  // warps of both blocks
        }
        show_barriers();
    }
    sync_cluster();  // barriers are there for all

    int s = 0, parity = 0;
    auto next_stage = [&] {
        if (++s == stages) s = 0, parity ^= 1;
    };
    if (threadIdx.x >= CONSUMERS) {
        leave_registers();
        if (threadIdx.x == CONSUMERS) {  // asks for copies
            const int weights = task.result.features * (task.result.gated ? 2 : 1);
            wait_for_earlier_kernels();
            for (int number = number0; number < tiles.all; number += step) {
                const Tile tile(task.result, task.padded, PART, tiles.features, number, rank);
                const int x_rows = max(min(MANY, task.padded - tile.token0), 0);
                const int own = rank ? tile.there[1] : tile.there[0], at = rank ? tile.at[1] : tile.at[0];
                for (int i = 0; i < blocks; ++i) {
                    wait_barrier(empty + s, parity ^ 1);
                    expect_bytes(full + s, (tile.there[0] + tile.there[1]) * WIDE + x_rows * (WIDE + 4));
                    if (own > 0)
                        copy_bulk_to_both(w_ring + (s * 2 + rank) * PART * WIDE,
                                          task.w + ((size_t)i * weights + at) * WIDE, own * WIDE, full + s);
                    if (x_rows > 0) {
                        const size_t row = (size_t)i * task.padded + tile.token0;
                        copy_bulk(x_ring + s * MANY * WIDE, task.x + row * WIDE, x_rows * WIDE, full + s);
                        copy_bulk(x_scales + s * MANY, task.x_scales + row, x_rows * 4, full + s);
                    }
                    next_stage();
                }
            }
        } else if (threadIdx.x / 32 == CONSUMERS / 32 + 1) {  // a warp that reads scales of weights, a stage ahead
            const int lane = threadIdx.x % 32, p = lane / SPAN, unit = lane % SPAN;
            for (int number = number0; number < tiles.all; number += step) {
                const Tile tile(task.result, task.padded, PART, tiles.features, number, rank);
                const bool there = p < 2 && unit * TALL < (p ? tile.there[1] : tile.there[0]);
                const float* const from = task.w_scales + (size_t)((p ? tile.at[1] : tile.at[0]) / TALL + unit) * blocks;
                float next = there ? from[0] : 0.f;
                for (int i = 0; i < blocks; ++i) {
                    const float scale = next;
                    if (there && i + 1 < blocks) next = from[i + 1];
                    wait_barrier(empty + s, parity ^ 1);
                    if (p < 2) w_scales[(s * 2 + p) * SPAN + unit] = scale;
                    __syncwarp();
                    if (lane == 0) arrive(full + s);
                    next_stage();
                }
            }
        }
    } else {  // a warp group has 64 of the block's rows
        take_registers<240>();
        const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), group = warp / 4;
        const int token = group * 64 + warp % 4 * 16 + lane / 4;
        wait_for_earlier_kernels();
        if (TURNS && group == 1) give_turn(0);
        for (int number = number0; number < tiles.all; number += step) {
            const Tile tile(task.result, task.padded, PART, tiles.features, number, rank);
            float total[2][PART / 2], whole[2][PART / 2];
#pragma unroll
            for (int p = 0; p < 2; ++p)
#pragma unroll
                for (int k = 0; k < PART / 2; ++k) total[p][k] = whole[p][k] = 0.f;

            auto end_range = [&] {
#pragma unroll
                for (int p = 0; p < 2; ++p)
#pragma unroll
                    for (int k = 0; k < PART / 2; ++k) whole[p][k] += total[p][k], total[p][k] = 0.f;
            };
            auto multiply = [&](float (&d)[PART / 2], int stage, int p) {
                const u64 a = rows_at(x_ring + (stage * MANY + group * 64) * WIDE);
                const u64 b = rows_at(w_ring + (stage * 2 + p) * PART * WIDE);
                if (TURNS) take_turn(group);
                begin_products();
                Product<PART>::set(d, a, b);
#pragma unroll
                for (int k = 1; k < 4; ++k) Product<PART>::add(d, a + k * 2, b + k * 2);  // 32 bytes further
                end_products();
                if (TURNS) give_turn(1 - group);
            };
            int range = 1, end = blocks / RANGES;
            for (int i = 0; i < blocks; ++i) {
                wait_barrier(full + s, parity);
                const float above = x_scales[s * MANY + token], below = x_scales[s * MANY + token + 8];
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    float d[PART / 2];
                    multiply(d, s, p);
                    Fp8Scales<PART> scales;
                    scales.read(w_scales + (s * 2 + p) * SPAN);
                    wait_for_products<0>();
                    keep_here(d);
                    if (p == 1 && lane < 2) arrive_at_rank(empty + s, lane);
                    add_scaled<PART>(total[p], d, scales, above, below);
                }
                if (RANGES > 1 && i + 1 == end) end_range(), ++range, end = blocks * range / RANGES;
                next_stage();
            }

            float(&sum)[2][PART / 2] = RANGES == 1 ? total : whole;
            if (task.result.gated) store_tile<true, PART>(task.result, tile, sum, token, lane);
            else store_tile<false, PART>(task.result, tile, sum, token, lane);
        }
        if (TURNS && group == 0) take_turn(0);
    }
    sync_whole_cluster();  // no block leaves while others write to it
}

#define FP8_MANY(NAME, PART, RANGES, THREADS)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                        \
        NAME(const Fp8* x, const float* x_scales, const Fp8* w, const float* w_scales, const u16* bias,             \
             const u16* extra, u16* y, int M, int padded, int features, int K, int rows, int stages, int gated) {   \
        fp8_gemm_many<PART, RANGES>(                                                                                \
            {x, x_scales, w, w_scales, {bias, extra, y, M, features, gated}, padded, K, rows, stages});             \
    }
