// Follows gemm_dense.cu: the same products with the same bits, for many rows of x. Here tensor cores count, and copies
// from the L2 cache.
//
// A cluster's two blocks have the same 128 rows of x, of which each copies a half to both, and features side by side.
// Blocks stay and take one tile after the other. Where few rows have K in ranges, or in the shares of gemm.cu, a block
// sums one after the other and adds them in the same order. A tile's results leave while the next one's first products are
// made: in turn with them, by way of shared memory and the copy engine, which also brings what is added to results.
//
// Weights of one range need no second set of sums while the next tile is multiplied, if nothing is added to results: they
// wait in 16 bits (HELD), so that a block has up to 256 features.

#define MANY 128     // rows of x of a block
#define TOGETHER 16  // of which all features are done before others begin: x and weights stay in the L2 cache
#define WAY 32       // columns of a box of results: rows of 64 bytes
#define HELD_ROOM 3  // boxes of results of a warp group that have room where results are held

#ifndef ON_HOST
// A box to the same place in both blocks of the cluster, whose barriers at the same place expect it.
__device__ __forceinline__ void copy_box_to_both(void* to, const TensorMap* map, int column, int row, Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_at(to)),
        "l"(map), "r"(column), "r"(row), "r"(0), "r"(shared_at(barrier)), "h"((u16)3)
        : "memory");
}

// A box from shared memory to where the map has it, of what `show_writes` has shown.
__device__ __forceinline__ void store_box(const TensorMap* map, const void* from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(column), "r"(row), "r"(0), "r"(shared_at(from))
                 : "memory");
}

// Boxes that this thread has stored become a group. `wait_for_reads` waits until the shared memory that all groups but
// the last LEFT come from may be written again.
__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
#endif

struct ManyTask {
    const TensorMap *x, *w, *extra, *y;  // boxes of extra and y: WAY columns of 64 rows
    Result result;
    int K;
    int stages;  // of the ring
};

// Of a range of K. Shares have every eighth panel.
template <int RANGES>
struct Panels {
    static constexpr int APART = RANGES == SHARES ? SHARES : 1;
    int first, count;

    __device__ __forceinline__ Panels(int all, int range) {
        first = RANGES == SHARES ? range : all * range / RANGES;
        count = RANGES == SHARES ? (all - range + SHARES - 1) / SHARES : all * (range + 1) / RANGES - first;
    }
};

// Of the tiles of a product, which clusters take in turn, the part of a block.
struct ManyTile {
    int token0, feature0;

    // own: results of a row. features: tiles of them.
    __device__ __forceinline__ ManyTile(int M, int own, int features, int number, int rank) {
        const int blocks = (M + MANY - 1) / MANY, first = number / (TOGETHER * features) * TOGETHER;
        const int some = min(TOGETHER, blocks - first), within = number - first * features;
        // The last one's rows may be others' too, for rows that are not there take longer than those that are.
        token0 = min((first + within % some) * MANY, max(M - MANY, 0)), feature0 = (within / some * 2 + rank) * own;
    }
};

// How a warp group's results leave: 64 rows by boxes, of which the last may overlap with the one before. HELD: by one box
// after the other, which take turns in the room of HELD_ROOM.
template <int FEATURES, bool GATED, bool HELD>
struct Results {
    static constexpr int WIDTH = GATED ? FEATURES / 2 : FEATURES, BOXES = (WIDTH + WAY - 1) / WAY, BYTES = 64 * WAY * 2;
    static constexpr int ROOM = HELD ? HELD_ROOM : BOXES;
    const ManyTask& task;
    char* const room;      // [ROOM][64][WAY], in the order of 64-byte swizzling
    Barrier* const there;  // opens when what is added has come
    const int group, lane, warp;  // warp: of the group
    bool asked;
    int parity;

    __device__ __forceinline__ bool leads() const { return warp == 0 && lane == 0; }
    __device__ __forceinline__ static int column_of(int box) { return min(box * WAY, WIDTH - WAY); }

    // Lets what is added to a tile's results come, when those of the tile before have left.
    __device__ __forceinline__ void ask(const ManyTile& tile) {
        asked = task.result.extra;
        if (!asked || !leads()) return;
        wait_for_reads<0>();
        expect_bytes(there, BOXES * BYTES);
        for (int box = 0; box < BOXES; ++box)
            copy_box(room + box * BYTES, task.extra, tile.feature0 + column_of(box), tile.token0 + group * 64, there);
    }

    // A lane's results of two columns from n on, whose first sum is at this index, as `Product` leaves them.
    __device__ __forceinline__ u32 pair(const float (&sum)[FEATURES / 2], int n, int at, u32 before) const {
        const u16* const bias = task.result.bias && n < task.result.features ? task.result.bias + n : nullptr;
        float out[2];
        EACH(v, 2) {
            out[v] = sum[at + v];
            if (bias) out[v] += to_float(bias[v]);
            if (GATED) {
                float up = sum[(GATED ? FEATURES / 4 : 0) + at + v];
                if (bias) up += to_float(bias[task.result.features + v]);
                out[v] = silu_times(out[v], up);
            }
            if (!HELD && task.result.extra) out[v] += to_float((u16)(v ? before >> 16 : before));
        }
        return pair_of(out[0], out[1]);
    }

    // value: gives a pair, by its first column, the index of its first sum, and what is added.
    template <class VALUE>
    __device__ __forceinline__ void store(const ManyTile& tile, int box, VALUE value) {
        const int row = warp * 16 + lane / 4, swizzle = row / 2 % 4, column = column_of(box), slot = box % ROOM;
        if (box == 0 || HELD) {
            if (leads()) {
                if (box == 0) wait_for_reads<0>();
                else wait_for_reads<ROOM - 1>();
            }
            sync_128(group);
            if (asked) {
                wait_barrier(there, parity);
                asked = false, parity ^= 1;
            }
        }
        EACH(j, WAY / 8) {
            const int n = tile.feature0 + column + j * 8 + lane % 4 * 2, at = (column / 8 + j) * 4;
            EACH(h, 2) {
                u32* const its = (u32*)(room + slot * BYTES + (row + h * 8) * (WAY * 2) + ((j ^ swizzle) * 16) + lane % 4 * 4);
                *its = value(n, at + h * 2, !HELD && task.result.extra ? *its : 0u);
            }
        }
        if (!HELD && box + 1 < BOXES) return;
        show_writes();
        sync_128(group);
        if (!leads()) return;
        for (int b = HELD ? box : 0; b <= box; ++b)
            store_box(task.y, room + b % ROOM * BYTES, tile.feature0 + column_of(b), tile.token0 + group * 64);
        end_stores();
    }
};

// FEATURES: of an instruction, which are a block's of a tile, a multiple of 16. RANGES: of K. HELD: of one range, and
// nothing is added to results.
template <int FEATURES, int RANGES, bool GATED, bool HELD>
__device__ __forceinline__ void dense_gemm_many(const ManyTask& task) {
    using Out = Results<FEATURES, GATED, HELD>;
    constexpr int CONSUMERS = 256, BOXES_AT_A_TIME = RANGES == SHARES ? 3 : 1;  // a share may have few panels
    // Panels of the first range that `cuda_many.takes` asks for: a tile's results have left when they are multiplied.
    static_assert((Out::BOXES + BOXES_AT_A_TIME - 1) / BOXES_AT_A_TIME <= (RANGES == SHARES ? 2 : HELD ? 8 : 6), "a block would wait for ever");
    static_assert(!HELD || RANGES == 1, "");
    extern __shared__ float sums[];  // barriers, then rings, then results
    const int rank = rank_in_cluster(), stages = task.stages, steps = task.K / PANEL;
    Barrier* const full = (Barrier*)sums;
    Barrier* const empty = full + stages;
    Barrier* const there = empty + stages;
    u16* const x_ring = (u16*)(sums + BARRIERS + (-shared_at(sums + BARRIERS) & 1023) / 4);  // [stages][MANY][PANEL]
    u16* const w_ring = x_ring + stages * MANY * PANEL;                                      // [stages][FEATURES][PANEL]
    char* const results = (char*)(w_ring + stages * FEATURES * PANEL);
    const int features = (task.result.features + 2 * Out::WIDTH - 1) / (2 * Out::WIDTH);  // tiles
    const int tiles = (task.result.M + MANY - 1) / MANY * features;
    const int number0 = blockIdx.x / 2, step = gridDim.x / 2;
    launch_dependents();

    if (threadIdx.x == CONSUMERS) {
        prefetch_map(task.w);
        prefetch_map(task.x);
        init_ring(full, empty, stages, 1, 2 * (CONSUMERS / 32));  // warps of both blocks
        for (int group = 0; group < 2; ++group) init_barrier(there + group, 1);
        show_barriers();
    }
    sync_cluster();  // barriers are there for all

    int s = 0, parity = 0;
    auto next_stage = [&] {
        if (++s == stages) s = 0, parity ^= 1;
    };
    if (threadIdx.x >= CONSUMERS) {
        give_registers<24>();
        if (threadIdx.x == CONSUMERS) {  // asks for copies
            auto ask_weights = [&](const ManyTile& tile, int i, int stage) {
                expect_bytes(full + stage, (MANY + FEATURES) * (PANEL * 2));
                copy_box(w_ring + stage * FEATURES * PANEL, task.w, i * PANEL, tile.feature0, full + stage);
            };
            auto ask_x = [&](const ManyTile& tile, int i, int stage) {
                copy_box_to_both(x_ring + (stage * 2 + rank) * (MANY / 2) * PANEL, task.x, i * PANEL,
                                 tile.token0 + rank * (MANY / 2), full + stage);
            };
            const int early = number0 < tiles ? min(stages, Panels<RANGES>(steps, 0).count) : 0;
            const ManyTile first(task.result.M, Out::WIDTH, features, number0, rank);
            for (int i = 0; i < early; ++i) ask_weights(first, i * Panels<RANGES>::APART, i);
            wait_for_earlier_kernels();
            for (int i = 0; i < early; ++i, next_stage()) ask_x(first, i * Panels<RANGES>::APART, i);
            int asked = early;
            for (int number = number0; number < tiles; number += step) {
                const ManyTile tile(task.result.M, Out::WIDTH, features, number, rank);
                for (int range = 0; range < RANGES; ++range) {
                    const Panels<RANGES> panels(steps, range);
                    for (int i = asked; i < panels.count; ++i, next_stage()) {
                        wait_barrier(empty + s, parity ^ 1);
                        ask_weights(tile, panels.first + i * Panels<RANGES>::APART, s);
                        ask_x(tile, panels.first + i * Panels<RANGES>::APART, s);
                    }
                    asked = 0;
                }
            }
        }
    } else {  // a warp group has 64 of the block's rows
        take_registers<240>();
        const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), group = warp / 4;
        Out out{task, results + group * Out::ROOM * Out::BYTES, there + group, group, lane, warp % 4, false, 0};
        float d[FEATURES / 2], whole[HELD ? 1 : FEATURES / 2];
        u32 packed[HELD ? Out::WIDTH / 4 : 1];
        int last = -1;  // the stage whose products may be under way
        auto begin_stage = [&](bool first) {
            wait_barrier(full + s, parity);
            const u64 a = rows_at(x_ring + (s * MANY + group * 64) * PANEL), b = rows_at(w_ring + s * FEATURES * PANEL);
            begin_products();
            EACH(k, 4) {  // 32 bytes further
                if (HELD && first && k == 0) Product<FEATURES>::set(d, a, b);
                else Product<FEATURES>::add(d, a + k * 2, b + k * 2);
            }
            end_products();
        };
        auto give_back = [&] {
            if (last >= 0 && lane < 2) arrive_at_rank(empty + last, lane);
        };
        auto end_stage_before = [&] {
            wait_for_products<1>();
            give_back();
            last = s;
            next_stage();
        };
        auto value = [&](int n, int at, u32 extra) -> u32 {
            if constexpr (HELD) return packed[at / 2];
            else return out.pair(whole, n, at, extra);
        };
        wait_for_earlier_kernels();  // one of them may have written what is added at the end
        // Results of the tile before; of none at first, whose rows are outside. Nothing depends on which: else ptxas would
        // let each instruction end before the next begins.
        ManyTile before(task.result.M, Out::WIDTH, features, number0, rank);
        before.token0 = task.result.M;
        EACH(k, (HELD ? 1 : FEATURES / 2)) whole[k] = 0.f;
        EACH(k, (HELD ? Out::WIDTH / 4 : 1)) packed[k] = 0u;
        EACH(k, FEATURES / 2) d[k] = 0.f;
        for (int number = number0; number < tiles; number += step) {
            const ManyTile tile(task.result.M, Out::WIDTH, features, number, rank);
            for (int range = 0; range < RANGES; ++range) {
                const int count = Panels<RANGES>(steps, range).count;
                int i = 0;
                if constexpr (!HELD) {
                    EACH(k, FEATURES / 2) d[k] = 0.f;
                }
                if (range == 0) {
#pragma unroll
                    for (int first = 0; first < Out::BOXES; first += BOXES_AT_A_TIME, ++i) {
                        begin_stage(first == 0);
#pragma unroll
                        for (int box = first; box < min(first + BOXES_AT_A_TIME, Out::BOXES); ++box)
                            out.store(before, box, value);
                        end_stage_before();
                    }
                    EACH(k, (HELD ? 1 : FEATURES / 2)) whole[k] = 0.f;  // as few rows begin with
                    if constexpr (!HELD) out.ask(tile);
                }
                for (; i < count; ++i) {
                    begin_stage(false);
                    end_stage_before();
                }
                wait_for_products<0>();
                keep_here(d);
                give_back();
                last = -1;
                if constexpr (HELD) {
                    EACH(k, FEATURES / 2) d[k] = 0.f + d[k];  // as few rows begin with
                    EACH(k, Out::WIDTH / 4)
                        packed[k] = out.pair(d, tile.feature0 + k / 2 * 8 + lane % 4 * 2, k * 2, 0u);
                } else {
                    EACH(k, FEATURES / 2) whole[k] += d[k];
                }
            }
            before = tile;
        }
        EACH(box, Out::BOXES) out.store(before, box, value);
        if (out.leads()) wait_for_reads<0>();  // before shared memory is another block's
    }
    sync_whole_cluster();  // no block leaves while others write to it
}

#define DENSE_MANY(NAME, FEATURES, RANGES, GATED, HELD, THREADS)                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                          \
        NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                                \
             const __grid_constant__ TensorMap more, const __grid_constant__ TensorMap to, const u16* bias,           \
             const u16* extra, u16* y, int M, int features, int K, int stages) {                                      \
        dense_gemm_many<FEATURES, RANGES, GATED, HELD>(                                                               \
            {&x, &w, &more, &to, {bias, extra, y, M, features, GATED}, K, stages});                                   \
    }
