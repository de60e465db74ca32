// Follows gemm.cu, gemm_bulk.cu and gemm_wgmma.cu: products in 16 bits (compute capability 9.0 alone). Up to some 100
// rows take the time to read the weights.
//
// x and weights are rows of matrices in global memory, which the copy engine brings in panels of 64 columns: a stage. What
// is behind a matrix comes as zeros.

#define PANEL 64      // columns: rows of 128 bytes
#define BARRIERS 128  // floats: room for them

#ifndef ON_HOST
struct alignas(64) TensorMap {
    u64 words[16];
};

// A box of the map from column, row and matrix on.
__device__ __forceinline__ void copy_box(void* to, const TensorMap* map, int column, int row, Barrier* barrier,
                                         int matrix = 0) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(shared_at(to)), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(shared_at(barrier))
        : "memory");
}

// The same of all matrices, and caches may forget it first.
__device__ __forceinline__ void copy_box_once(void* to, const TensorMap* map, int column, int row, Barrier* barrier) {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_at(to)),
        "l"(map), "r"(column), "r"(row), "r"(0), "r"(shared_at(barrier)), "l"(policy)
        : "memory");
}

// From memory to the L2 cache.
__device__ __forceinline__ void prefetch_box(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(column), "r"(row), "r"(0)
                 : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
#endif

struct DenseTask {
    const TensorMap *x, *w;  // x [1][M][K], w [1, or 2 of gates and ups][features][K]
    Result result;
    int K;
    int x_rows;  // that a block takes of x: rows behind them are not stored
    int rows;    // of weights that a block takes, in two halves
    int stages;  // of the ring
    int ahead;   // stages behind these, which come to the L2 cache while earlier kernels end
    int chain;   // ranges of K of a block: 1, or 2, where clusters of four would leave too many multiprocessors idle
};

// GROUPS * 64 rows of x. A warp group has all of the weights for 64 of these rows or, where there are no more, one half each.
// FEATURES: of an instruction, for each reads x anew: all, or a half of them with one group, and with three, whose
// registers ptxas counts before they are given out. What is read behind the weights is not stored.
template <int GROUPS, int FEATURES>
__device__ __forceinline__ void dense_gemm(const DenseTask& task) {
    constexpr int TOKENS = GROUPS * 64, CONSUMERS = (GROUPS > 1 ? GROUPS : 2) * 128, PARTS = GROUPS == 3 ? 2 : 1;
    extern __shared__ float sums[];  // barriers, then rings: [stages] of x and weights, then sums of a first range of two
    const Place place(task.result, task.x_rows, task.rows, task.K, PANEL, task.chain);
    Barrier* const full = (Barrier*)sums;
    Barrier* const empty = full + task.stages;
    u16* const x_ring = (u16*)(sums + BARRIERS + (-shared_at(sums + BARRIERS) & 1023) / 4);
    u16* const w_ring = x_ring + task.stages * task.x_rows * PANEL;
    launch_dependents();

    auto ask_weights = [&](int i, int s) {
        expect_bytes(full + s, (task.rows + task.x_rows) * (PANEL * 2));
        copy_box_once(w_ring + s * task.rows * PANEL, task.w, (place.first + i) * PANEL, place.feature0, full + s);
    };
    auto ask_x = [&](int i, int s) {
        copy_box(x_ring + s * task.x_rows * PANEL, task.x, (place.first + i) * PANEL, place.token0, full + s);
    };
    const int early = min(task.stages, place.count);
    if (threadIdx.x == CONSUMERS) {
        prefetch_map(task.w);
        prefetch_map(task.x);
        init_ring(full, empty, task.stages, 1, CONSUMERS / 32);
        show_barriers();
        for (int i = 0; i < early; ++i) ask_weights(i, i);
        for (int i = early; i < min(early + task.ahead, place.count); ++i)
            prefetch_box(task.w, (place.first + i) * PANEL, place.feature0);
    }
    __syncthreads();  // barriers are there for all

    if (threadIdx.x >= CONSUMERS) {
        if (GROUPS > 2) give_registers<24>();
        if (threadIdx.x == CONSUMERS) {
            wait_for_earlier_kernels();
            for (int i = 0; i < early; ++i) ask_x(i, i);
            int s = 0, parity = 0;
            for (int i = early; i < place.count; ++i) {
                wait_barrier(empty + s, parity);
                ask_weights(i, s);
                ask_x(i, s);
                if (++s == task.stages) s = 0, parity ^= 1;
            }
        }
    } else {
        if (GROUPS > 2) take_registers<160>();
        const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), group = warp / 4;
        const int first_token = GROUPS == 1 ? 0 : group * 64, first_row = GROUPS == 1 ? group * place.half : 0;
        const int columns = GROUPS == 2 ? task.rows : place.half;
        const int pitch = task.rows + (8 - task.rows & 31);  // lanes that store at the same time meet in no bank
        // Sums [TOKENS][pitch]: those of the last range take the place of rings.
        float* const last = (float*)x_ring;
        float* const before = last + max(task.stages * (task.x_rows + task.rows) * (PANEL / 2), TOKENS * pitch);
        const int at = (first_token + warp % 4 * 16 + lane / 4) * pitch + first_row + lane % 4 * 2;
        wait_for_earlier_kernels();  // one of them may have written what is added at the end
        int s = 0, parity = 0;
        for (int range = 0; range < task.chain; ++range) {
            float d[PARTS][FEATURES / 2];
            EACH(part, PARTS) EACH(k, FEATURES / 2) d[part][k] = 0.f;
            for (int i = place.begin_of(range); i < place.begin_of(range + 1); ++i) {
                wait_barrier(full + s, parity);
                const u64 a = rows_at(x_ring + (s * task.x_rows + first_token) * PANEL);
                const u64 b = rows_at(w_ring + (s * task.rows + first_row) * PANEL);
                begin_products();
                EACH(k, 4)  // 32 bytes further
                    EACH(part, PARTS)
                        Product<FEATURES>::add(d[part], a + k * 2, b + k * 2 + part * (place.half * PANEL / 8));
                end_products();
                wait_for_products<0>();
                if (lane == 0) arrive(empty + s);
                if (++s == task.stages) s = 0, parity ^= 1;
            }
            EACH(part, PARTS) keep_here(d[part]);
            const bool ends = range + 1 == task.chain;
            if (ends) sync_consumers<CONSUMERS>();
            float* const to = (ends ? last : before) + at;
            EACH(part, PARTS) EACH(j, FEATURES / 8) {
                if (j * 8 >= columns) continue;
                float* const its = to + part * place.half + j * 8;
                *(float2*)its = {d[part][j * 4], d[part][j * 4 + 1]};
                *(float2*)(its + 8 * pitch) = {d[part][j * 4 + 2], d[part][j * 4 + 3]};
            }
        }
        if (task.chain == 1) finish_sums<CONSUMERS>(task.result, place, last, pitch, task.x_rows);
        else finish_sums<CONSUMERS, 2>(task.result, place, last, pitch, task.x_rows, before - last);
    }
}

#define DENSE_KERNEL(NAME, GROUPS, FEATURES, THREADS)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* bias, const u16* extra, \
             u16* y, int M, int features, int K, int x_rows, int rows, int stages, int ahead, int chain, int gated) {  \
        dense_gemm<GROUPS, FEATURES>(                                                                                  \
            {&x, &w, {bias, extra, y, M, features, gated}, K, x_rows, rows, stages, ahead, chain});                    \
    }
