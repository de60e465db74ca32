// Follows gemm_dense.cu and gemm_many.cu: the same products with the same bits, for many rows of x.

#ifndef ON_HOST
// A box of one of the map's matrices, to the same place in both blocks of the cluster, whose barriers at the same place
// expect it.
__device__ __forceinline__ void copy_box_to_both(void* to, const TensorMap* map, int column, int row, int matrix,
                                                 Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_at(to)),
        "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(shared_at(barrier)), "h"((u16)3)
        : "memory");
}
#endif

// FEATURES: of an instruction, which are a tile's, a multiple of 32. RANGES: of K.
template <int FEATURES, int RANGES>
__device__ __forceinline__ void dense_gemm_many(const DenseTask& task) {
    constexpr int PART = FEATURES / 2, CONSUMERS = 256;
    extern __shared__ float sums[];  // barriers, then rings
    const int rank = rank_in_cluster(), stages = task.stages, steps = task.K / PANEL;
    Barrier* const full = (Barrier*)sums;
    Barrier* const empty = full + stages;
    u16* const x_ring = (u16*)(sums + BARRIERS + (-shared_at(sums + BARRIERS) & 1023) / 4);  // [stages][MANY][PANEL]
    u16* const w_ring = x_ring + stages * MANY * PANEL;                                      // [stages][FEATURES][PANEL]
    const Tiles tiles(task.result, task.result.M, PART);
    const int number0 = blockIdx.x / 2, step = gridDim.x / 2;
    launch_dependents();

    if (threadIdx.x == CONSUMERS) {
        prefetch_map(task.w);
        prefetch_map(task.x);
        for (int s = 0; s < stages; ++s) {
            init_barrier(full + s, 1);
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
            auto ask_weights = [&](const Tile& tile, int i, int stage) {
                expect_bytes(full + stage, (MANY + FEATURES) * (PANEL * 2));
                copy_box_to_both(w_ring + (stage * 2 + rank) * PART * PANEL, task.w, i * PANEL,
                                 task.result.gated ? tile.at[0] : tile.at[0] + rank * PART, task.result.gated ? rank : 0,
                                 full + stage);
            };
            auto ask_x = [&](const Tile& tile, int i, int stage) {
                copy_box(x_ring + stage * MANY * PANEL, task.x, i * PANEL, tile.token0, full + stage);
            };
            const int early = number0 < tiles.all ? min(stages, steps) : 0;
            const Tile first(task.result, task.result.M, PART, tiles.features, number0, rank);
            for (int i = 0; i < early; ++i) ask_weights(first, i, i);
            wait_for_earlier_kernels();
            for (int i = 0; i < early; ++i, next_stage()) ask_x(first, i, i);
            for (int number = number0; number < tiles.all; number += step) {
                const Tile tile(task.result, task.result.M, PART, tiles.features, number, rank);
                for (int i = number == number0 ? early : 0; i < steps; ++i, next_stage()) {
                    wait_barrier(empty + s, parity ^ 1);
                    ask_weights(tile, i, s);
                    ask_x(tile, i, s);
                }
            }
        }
    } else {  // a warp group has 64 of the block's rows
        take_registers<240>();
        const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), group = warp / 4;
        const int token = group * 64 + warp % 4 * 16 + lane / 4;
        auto give_back = [&](int stage) {
            if (lane < 2) arrive_at_rank(empty + stage, lane);
        };
        wait_for_earlier_kernels();  // one of them may have written what is added at the end
        for (int number = number0; number < tiles.all; number += step) {
            const Tile tile(task.result, task.result.M, PART, tiles.features, number, rank);
            float d[2][PART / 2], whole[2][PART / 2];
#pragma unroll
            for (int k = 0; k < FEATURES / 2; ++k) whole[k / (PART / 2)][k % (PART / 2)] = 0.f;
            for (int range = 0, i = 0; range < RANGES; ++range) {
                const int end = steps * (range + 1) / RANGES;
                int last = -1;  // the stage whose products may be under way
#pragma unroll
                for (int k = 0; k < FEATURES / 2; ++k) d[k / (PART / 2)][k % (PART / 2)] = 0.f;
                for (; i < end; ++i, next_stage()) {
                    wait_barrier(full + s, parity);
                    const u64 a = rows_at(x_ring + (s * MANY + group * 64) * PANEL);
                    const u64 b = rows_at(w_ring + s * FEATURES * PANEL);
                    begin_products();
#pragma unroll
                    for (int k = 0; k < 4; ++k)  // 32 bytes further
                        Product<FEATURES>::add((float(&)[FEATURES / 2]) d, a + k * 2, b + k * 2);
                    end_products();
                    if (last >= 0) {
                        wait_for_products<1>();
                        give_back(last);
                    }
                    last = s;
                }
                wait_for_products<0>();
                keep_here((float(&)[FEATURES / 2]) d);
                if (last >= 0) give_back(last);
#pragma unroll
                for (int k = 0; k < FEATURES / 2; ++k)
                    whole[k / (PART / 2)][k % (PART / 2)] += d[k / (PART / 2)][k % (PART / 2)];
            }
            if (task.result.gated) store_tile<true, PART>(task.result, tile, whole, token, lane);
            else store_tile<false, PART>(task.result, tile, whole, token, lane);
        }
    }
    sync_whole_cluster();  // no block leaves while others write to it
}

#define DENSE_MANY(NAME, FEATURES, RANGES, THREADS)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* bias, const u16* extra, \
             u16* y, int M, int features, int K, int x_rows, int rows, int stages, int ahead, int gated) {             \
        dense_gemm_many<FEATURES, RANGES>({&x, &w, {bias, extra, y, M, features, gated}, K, x_rows, rows, stages, ahead}); \
    }
