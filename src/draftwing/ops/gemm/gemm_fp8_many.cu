// Follows gemm_fp8.cu: the same products with the same bits, for many rows of x. Here tensor cores count, and copies from
// the L2 cache.
//
// A cluster's two blocks have 128 rows of x each and the same features of weights in two parts, of which each copies one
// to both. Blocks stay and take one tile after the other, while the next one's copies are on their way. Where few rows
// have K in ranges, a block sums one range after the other and adds the ranges in the same order.

#define MANY 128  // rows of x of a block
#define PAIRS 8   // of blocks whose rows have all their features before others begin: x and weights stay in the L2 cache

#ifndef ON_HOST
// To the same place in both blocks of the cluster, whose barriers at the same place expect it.
__device__ __forceinline__ void copy_bulk_to_both(void* to, const void* from, int bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(shared_at(to)),
                 "l"(from), "r"(bytes), "r"(shared_at(barrier)), "h"((u16)3)
                 : "memory");
}

__device__ __forceinline__ u32 of_neighbour(u32 value) { return __shfl_xor_sync(0xffffffff, value, 1); }

// Volatile for the reason that `load_value` has.
__device__ __forceinline__ u32 load_pair(const u16* p) {
    u32 pair;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(pair) : "l"(p));
    return pair;
}

// A warp group waits for its turn to begin products, which the other one gives it.
__device__ __forceinline__ void take_turn(int group) {
    asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(2 + group) : "memory");
}
#endif

// Of the tiles of a product, which blocks of clusters take in turn.
struct Fp8Tile {
    int token0, x_rows, at[2], there[2];

    __device__ __forceinline__ Fp8Tile(const Fp8Task& task, int part, int features, int number, int rank) {
        const int pairs = (task.padded + 2 * MANY - 1) / (2 * MANY), first = number / (PAIRS * features) * PAIRS;
        const int some = min(PAIRS, pairs - first), within = number - first * features;
        token0 = ((first + within % some) * 2 + rank) * MANY, x_rows = max(min(MANY, task.padded - token0), 0);
        const int own = task.result.gated ? part : 2 * part, feature0 = within / some * own, left = task.result.features - feature0;
        at[0] = feature0, at[1] = feature0 + (task.result.gated ? task.result.features : part);
        there[0] = min(part, left), there[1] = task.result.gated ? there[0] : max(min(part, left - part), 0);
    }
};

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
    EACH(j, PART / 16) {
        const float one = scales.of[j] * above, other = scales.of[j] * below;
#pragma unroll
        for (int k = j * 8; k < j * 8 + 8; ++k) total[k] = fmaf(d[k], k % 4 < 2 ? one : other, total[k]);
    }
}

// A thread has pairs of two rows. Of 16 features two threads swap a pair, so that a warp stores 32 bytes of a row.
template <bool GATED, int PART>
__device__ __forceinline__ void store_tile(const Fp8Task& task, const Fp8Tile& tile, const float (&sum)[2][PART / 2],
                                           int token, int lane) {
    const int n = tile.at[0] + lane % 4 * 2, odd = lane % 2;
    EACH(h, 2) {
        const int row = tile.token0 + token + h * 8;
        const size_t first = (size_t)row * task.result.features;
        const u16* const extra = task.result.extra + first + n;
        u16* const y = task.result.y + first + tile.at[0] + odd * 8 + lane % 4 / 2 * 4;
        EACH(p, (GATED ? 1 : 2)) {
#pragma unroll
            for (int j = 0; j < PART / 8; j += 2) {
                const bool there = row < task.result.M && j * 8 < tile.there[p];
                u32 pairs[2];
                EACH(v, 2) {
                    const int at = (j + v) * 4 + h * 2, ahead = p * PART + (j + v) * 8;
                    float one = 0.f + sum[p][at], other = 0.f + sum[p][at + 1];  // as few rows begin with
                    if (task.result.bias && there) {
                        one += to_float(task.result.bias[n + ahead]), other += to_float(task.result.bias[n + ahead + 1]);
                    }
                    if (GATED) {
                        float up = 0.f + sum[1][at], next = 0.f + sum[1][at + 1];
                        if (task.result.bias && there) {
                            const u16* const bias = task.result.bias + task.result.features + n + ahead;
                            up += to_float(bias[0]), next += to_float(bias[1]);
                        }
                        one = silu_times(one, up), other = silu_times(other, next);
                    }
                    if (task.result.extra && there) {
                        const u32 pair = load_pair(extra + ahead);
                        one += to_float((u16)pair), other += to_float((u16)(pair >> 16));
                    }
                    pairs[v] = pair_of(one, other);
                }
                const u32 swapped = of_neighbour(odd ? pairs[0] : pairs[1]);
                if (there)
                    *(uint2*)(y + p * PART + j * 8) =
                        odd ? make_uint2(swapped, pairs[1]) : make_uint2(pairs[0], swapped);
            }
        }
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
    const int features = (task.result.features + (task.result.gated ? PART : 2 * PART) - 1) / (task.result.gated ? PART : 2 * PART);  // tiles
    const int tiles = (task.padded + 2 * MANY - 1) / (2 * MANY) * features;
    const int number0 = blockIdx.x / 2, step = gridDim.x / 2;
    launch_dependents();

    if (threadIdx.x == CONSUMERS) {
        init_ring(full, empty, stages, 2, 2 * (CONSUMERS / 32));  // warps of both blocks
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
            const int weights = task.result.features * (task.result.gated ? 2 : 1);
            wait_for_earlier_kernels();
            for (int number = number0; number < tiles; number += step) {
                const Fp8Tile tile(task, PART, features, number, rank);
                const int own = rank ? tile.there[1] : tile.there[0], at = rank ? tile.at[1] : tile.at[0];
                for (int i = 0; i < blocks; ++i) {
                    wait_barrier(empty + s, parity ^ 1);
                    expect_bytes(full + s, (tile.there[0] + tile.there[1]) * WIDE + tile.x_rows * (WIDE + 4));
                    if (own > 0)
                        copy_bulk_to_both(w_ring + (s * 2 + rank) * PART * WIDE,
                                          task.w + ((size_t)i * weights + at) * WIDE, own * WIDE, full + s);
                    if (tile.x_rows > 0) {
                        const size_t row = (size_t)i * task.padded + tile.token0;
                        copy_bulk(x_ring + s * MANY * WIDE, task.x + row * WIDE, tile.x_rows * WIDE, full + s);
                        copy_bulk(x_scales + s * MANY, task.x_scales + row, tile.x_rows * 4, full + s);
                    }
                    next_stage();
                }
            }
        } else if (threadIdx.x / 32 == CONSUMERS / 32 + 1) {  // a warp that reads scales of weights, a stage ahead
            const int lane = threadIdx.x % 32, p = lane / SPAN, unit = lane % SPAN;
            for (int number = number0; number < tiles; number += step) {
                const Fp8Tile tile(task, PART, features, number, rank);
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
        for (int number = number0; number < tiles; number += step) {
            const Fp8Tile tile(task, PART, features, number, rank);
            float total[2][PART / 2], whole[2][PART / 2];
            EACH(p, 2) EACH(k, PART / 2) total[p][k] = whole[p][k] = 0.f;

            auto end_range = [&] {
                EACH(p, 2) EACH(k, PART / 2) whole[p][k] += total[p][k], total[p][k] = 0.f;
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
                EACH(p, 2) {
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
            if (task.result.gated) store_tile<true, PART>(task, tile, sum, token, lane);
            else store_tile<false, PART>(task, tile, sum, token, lane);
        }
        if (TURNS && group == 0) take_turn(0);
    }
    sync_whole_cluster();  // no block leaves while others write to it
}
