// Follows gemm_dense.cu and gemm_many.cu: the same products with the same bits, for many rows of x.
//
// Results go to shared memory and from there by the copy engine, while the next tile's products begin; what is added to
// them comes the same way, while products are made.

#define WAY 32  // columns of a box of results: rows of 64 bytes

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

// A box from shared memory to where the map has it. What threads wrote has to be shown by `show_writes` before.
__device__ __forceinline__ void store_box(const TensorMap* map, const void* from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(column),
                 "r"(row), "r"(0), "r"(shared_at(from))
                 : "memory");
}

__device__ __forceinline__ void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Boxes that this thread stores since it did so last are a group; `wait_for_reads` waits until shared memory may be
// written again that all groups come from.
__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); }
#endif

struct ManyTask {
    const TensorMap *x, *w, *extra, *y;  // boxes of extra and y: WAY columns of 64 rows
    Result result;
    int K;
    int stages;  // of the ring
    int boxes;   // of results that a warp group has room for
};

// The end of a warp group's part of a tile: 64 rows of WIDTH results, by boxes.
template <int FEATURES, bool GATED>
struct Ending {
    static constexpr int WIDTH = GATED ? FEATURES / 2 : FEATURES, BOXES = (WIDTH + WAY - 1) / WAY, BYTES = 64 * WAY * 2;
    const ManyTask& task;
    char* const room;  // [boxes][64][WAY], in the order of 64-byte swizzling
    Barrier* const there;  // opens when boxes of what is added have come
    const int group, lane, warp;  // warp: of the group
    int parity = 0;

    __device__ __forceinline__ bool leads() const { return warp == 0 && lane == 0; }

    // Of the tile's boxes from `first` on as many as there is room for: where the last one overlaps, it has the same.
    __device__ __forceinline__ int boxes_from(int first) const { return min(task.boxes, BOXES - first); }
    __device__ __forceinline__ static int column_of(int box) { return min(box * WAY, WIDTH - WAY); }

    // Lets what is added come.
    __device__ __forceinline__ void ask(const Tile& tile, int first) const {
        if (!leads()) return;
        wait_for_reads();
        if (!task.result.extra) return;
        expect_bytes(there, boxes_from(first) * BYTES);
        for (int b = 0; b < boxes_from(first); ++b)
            copy_box(room + b * BYTES, task.extra, tile.at[0] + column_of(first + b), tile.token0 + group * 64, there);
    }

    // sum: of the features a thread has of two rows, as `Product` leaves them.
    __device__ __forceinline__ void store(const Tile& tile, const float (&sum)[FEATURES / 2]) {
        const int row = warp * 16 + lane / 4, swizzle = row / 2 % 4;
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            const int b = box % task.boxes;
            if (box && b == 0) ask(tile, box);
            if (b == 0) {
                sync_group(group);  // room is there
                if (task.result.extra) wait_barrier(there, parity), parity ^= 1;
            }
            const int column = min(box * WAY, WIDTH - WAY);
#pragma unroll
            for (int j = 0; j < WAY / 8; ++j) {
                const int n = tile.at[0] + column + j * 8 + lane % 4 * 2, at = (column / 8 + j) * 4;
                float bias[2] = {0.f, 0.f}, up_bias[2] = {0.f, 0.f};
                if (task.result.bias && n < task.result.features) {
                    bias[0] = to_float(task.result.bias[n]), bias[1] = to_float(task.result.bias[n + 1]);
                    if (GATED) {
                        const u16* const up = task.result.bias + task.result.features + n;
                        up_bias[0] = to_float(up[0]), up_bias[1] = to_float(up[1]);
                    }
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    u32* const its = (u32*)(room + b * BYTES + (row + h * 8) * (WAY * 2) + ((j ^ swizzle) * 16) + lane % 4 * 4);
                    const u32 before = task.result.extra ? *its : 0u;
                    float out[2];
#pragma unroll
                    for (int v = 0; v < 2; ++v) {
                        out[v] = 0.f + sum[at + h * 2 + v];  // as few rows begin with
                        if (task.result.bias) out[v] += bias[v];
                        if (GATED) {
                            float up = 0.f + sum[(GATED ? FEATURES / 4 : 0) + at + h * 2 + v];
                            if (task.result.bias) up += up_bias[v];
                            out[v] = silu_times(out[v], up);
                        }
                        if (task.result.extra) out[v] += to_float((u16)(v ? before >> 16 : before));
                    }
                    *its = pair_of(out[0], out[1]);
                }
            }
            if (b + 1 < task.boxes && box + 1 < BOXES) continue;
            show_writes();
            sync_group(group);
            if (!leads()) continue;
            for (int i = 0; i <= b; ++i)
                store_box(task.y, room + i * BYTES, tile.at[0] + column_of(box - b + i), tile.token0 + group * 64);
            end_stores();
        }
    }
};

// FEATURES: of an instruction, which are a tile's, a multiple of 32. RANGES: of K.
template <int FEATURES, int RANGES, bool GATED>
__device__ __forceinline__ void dense_gemm_many(const ManyTask& task) {
    constexpr int PART = FEATURES / 2, CONSUMERS = 256;
    extern __shared__ float sums[];  // barriers, then rings, then results
    const int rank = rank_in_cluster(), stages = task.stages, steps = task.K / PANEL;
    Barrier* const full = (Barrier*)sums;
    Barrier* const empty = full + stages;
    Barrier* const there = empty + stages;
    u16* const x_ring = (u16*)(sums + BARRIERS + (-shared_at(sums + BARRIERS) & 1023) / 4);  // [stages][MANY][PANEL]
    u16* const w_ring = x_ring + stages * MANY * PANEL;                                      // [stages][FEATURES][PANEL]
    char* const results = (char*)(w_ring + stages * FEATURES * PANEL);
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
        for (int group = 0; group < 2; ++group) init_barrier(there + group, 1);
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
                                 GATED ? tile.at[0] : tile.at[0] + rank * PART, GATED ? rank : 0, full + stage);
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
        Ending<FEATURES, GATED> ending{task, results + group * task.boxes * Ending<FEATURES, GATED>::BYTES, there + group,
                                       group, lane, warp % 4};
        auto give_back = [&](int stage) {
            if (lane < 2) arrive_at_rank(empty + stage, lane);
        };
        wait_for_earlier_kernels();  // one of them may have written what is added at the end
        for (int number = number0; number < tiles.all; number += step) {
            const Tile tile(task.result, task.result.M, PART, tiles.features, number, rank);
            ending.ask(tile, 0);
            float d[FEATURES / 2], whole[FEATURES / 2];
#pragma unroll
            for (int k = 0; k < FEATURES / 2; ++k) whole[k] = 0.f;
            for (int range = 0, i = 0; range < RANGES; ++range) {
                const int end = steps * (range + 1) / RANGES;
                int last = -1;  // the stage whose products may be under way
#pragma unroll
                for (int k = 0; k < FEATURES / 2; ++k) d[k] = 0.f;
                for (; i < end; ++i, next_stage()) {
                    wait_barrier(full + s, parity);
                    const u64 a = rows_at(x_ring + (s * MANY + group * 64) * PANEL);
                    const u64 b = rows_at(w_ring + s * FEATURES * PANEL);
                    begin_products();
#pragma unroll
                    for (int k = 0; k < 4; ++k) Product<FEATURES>::add(d, a + k * 2, b + k * 2);  // 32 bytes further
                    end_products();
                    if (last >= 0) {
                        wait_for_products<1>();
                        give_back(last);
                    }
                    last = s;
                }
                wait_for_products<0>();
                keep_here(d);
                if (last >= 0) give_back(last);
#pragma unroll
                for (int k = 0; k < FEATURES / 2; ++k) whole[k] += d[k];
            }
            ending.store(tile, whole);
        }
        if (ending.leads()) wait_for_reads();  // before shared memory is another block's
    }
    sync_whole_cluster();  // no block leaves while others write to it
}

#define DENSE_MANY(NAME, FEATURES, RANGES, GATED, THREADS)                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                                 \
             const __grid_constant__ TensorMap more, const __grid_constant__ TensorMap to, const u16* bias,            \
             const u16* extra, u16* y, int M, int features, int K, int stages, int boxes) {                            \
        dense_gemm_many<FEATURES, RANGES, GATED>(                                                                      \
            {&x, &w, &more, &to, {bias, extra, y, M, features, GATED}, K, stages, boxes});                             \
    }
