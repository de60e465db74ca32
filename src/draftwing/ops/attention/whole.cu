// Follows gemm.cu, gemm_bulk.cu, gemm_wgmma.cu and gemm_dense.cu: attention to all of a picture's patches (compute
// capability 9.0 alone). Every query sees every key.
//
// A block has GROUPS * 64 queries of a head and reads all of its keys and values by the copy engine, KEYS at a time, from
// the last to the first. A warp group has 64 queries. Its scores of some keys are multiplied while values of the keys
// before are, and warp groups take turns in asking for both: while some make weights of scores, tensor cores work for
// another. A query's sums have the same order in any block.
//
// Heads are no wider in memory than they are. Queries and keys come as 64 columns in rows of 128 bytes, and as 16 more in
// rows of 32, zeros behind the head's end; values in slabs of 32 columns, of which products take as many as there are.

#define ENDS 16  // columns of queries and keys behind the first 64
#define SLAB 32  // columns of a box of values

#ifndef ON_HOST
// o += p v for 16 keys: p of 64 queries in registers, v [16][SIZE] in slabs. whole_cuda.py has more.
template <int SIZE>
struct Weighted;

// d = q k^T, or d += q k^T, for 16 columns of q in registers.
template <int KEYS>
struct Scores;

// Of rows of 32 bytes, swizzled.
__device__ __forceinline__ u64 ends_at(const void* p) {
    return shared_at(p) >> 4 & 0x3fff | 1ull << 16 | 16ull << 32 | 3ull << 62;
}

// Of slabs [KEYS][SLAB] one behind the other, swizzled, whose columns are the features of a product.
template <int KEYS>
__device__ __forceinline__ u64 slabs_at(const void* p) {
    return shared_at(p) >> 4 & 0x3fff | (u64)(KEYS * SLAB / 8) << 16 | (u64)SLAB << 32 | 2ull << 62;
}

__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Warp groups ask for products in turn.
__device__ __forceinline__ void wait_for_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory"); }
#endif

struct WholeTask {
    // [rows][heads][size], whose boxes are 64 columns, ENDS or SLAB, of one head
    const TensorMap *queries, *query_ends, *keys, *key_ends, *values;
    u16* out;  // [rows][heads][size]
    int rows, count, heads;
    float scale;  // of scores, times log2(e)
};

// What a warp group knows of its queries, of which a lane has parts of two.
template <int KEYS>
struct Softmax {
    float s[KEYS / 2];  // scores, then weights
    float top[2], sum[2], factor[2];

    // As many of the keys are there.
    __device__ __forceinline__ void hide_from(int count) {
        const int column = threadIdx.x % 4 * 2;
        EACH(i, KEYS / 2) if (i / 4 * 8 + i % 2 + column >= count) s[i] = __uint_as_float(0xff800000);
    }

    template <bool FIRST>
    __device__ __forceinline__ void weigh(float scale) {
        EACH(h, 2) {
            float most[2] = {s[h * 2], s[h * 2 + 1]};
            EACH(j, KEYS / 8 - 1) EACH(e, 2) most[e] = fmaxf(most[e], s[(j + 1) * 4 + h * 2 + e]);
            float all = fmaxf(most[0], most[1]);
            all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
            all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
            if (!FIRST) all = fmaxf(all, top[h]);
            const float least = all * scale;
            factor[h] = FIRST ? 0.f : power(top[h] * scale - least);
            top[h] = all;
            float sums[2] = {0.f, 0.f};
            EACH(j, KEYS / 8) EACH(e, 2) {
                float& its = s[j * 4 + h * 2 + e];
                its = power(fmaf(its, scale, -least));
                sums[e] += its;
            }
            sum[h] = FIRST ? sums[0] + sums[1] : fmaf(sum[h], factor[h], sums[0] + sums[1]);
        }
    }

    __device__ __forceinline__ void pack(u32 (&p)[KEYS / 4]) const {
        EACH(i, KEYS / 4) p[i] = pair_of(s[i * 2], s[i * 2 + 1]);
    }
};

// Where a block has what it reads.
template <int SIZE, int KEYS, int GROUPS, int STAGES>
struct Room {
    static constexpr int MORE = SIZE > 64 ? ENDS : 0, SLABS = (SIZE + SLAB - 1) / SLAB;
    static constexpr int KEY_BYTES = KEYS * (64 + MORE) * 2, VALUE_BYTES = KEYS * SLABS * SLAB * 2;
    u16 *queries, *keys, *values, *query_ends, *key_ends;

    __device__ __forceinline__ Room(u16* at) {
        queries = at, keys = queries + GROUPS * 64 * 64, values = keys + STAGES * KEYS * 64;
        query_ends = values + STAGES * KEYS * SLABS * SLAB, key_ends = query_ends + GROUPS * 64 * MORE;
    }
    __device__ __forceinline__ u16* keys_of(int stage) const { return keys + stage * KEYS * 64; }
    __device__ __forceinline__ u16* key_ends_of(int stage) const { return key_ends + stage * KEYS * MORE; }
    __device__ __forceinline__ u16* values_of(int stage) const { return values + stage * KEYS * SLABS * SLAB; }
};

template <int STAGES>
struct WholeBarriers {
    Barrier keys[STAGES], values[STAGES], keys_read[STAGES], values_read[STAGES], queries;
};

// Asks for a block's queries, keys and values: one thread.
template <int SIZE, int KEYS, int GROUPS, int STAGES>
__device__ __forceinline__ void ask_for_all(const WholeTask& task, const Room<SIZE, KEYS, GROUPS, STAGES>& room,
                                            WholeBarriers<STAGES>& barriers, int tiles) {
    using Its = Room<SIZE, KEYS, GROUPS, STAGES>;
    const int row0 = blockIdx.x * GROUPS * 64, head = blockIdx.y;
    expect_bytes(&barriers.queries, GROUPS * 64 * (64 + Its::MORE) * 2);
    for (int g = 0; g < GROUPS; ++g) {
        copy_box(room.queries + g * 64 * 64, task.queries, 0, head, &barriers.queries, row0 + g * 64);
        if (Its::MORE)
            copy_box(room.query_ends + g * 64 * Its::MORE, task.query_ends, 64, head, &barriers.queries, row0 + g * 64);
    }
    int s = 0, parity = 1;
    for (int tile = tiles - 1; tile >= 0; --tile) {
        wait_barrier(&barriers.keys_read[s], parity);
        expect_bytes(&barriers.keys[s], Its::KEY_BYTES);
        copy_box(room.keys_of(s), task.keys, 0, head, &barriers.keys[s], tile * KEYS);
        if (Its::MORE) copy_box(room.key_ends_of(s), task.key_ends, 64, head, &barriers.keys[s], tile * KEYS);
        wait_barrier(&barriers.values_read[s], parity);
        expect_bytes(&barriers.values[s], Its::VALUE_BYTES);
        for (int i = 0; i < Its::SLABS; ++i)
            copy_box(room.values_of(s) + i * KEYS * SLAB, task.values, i * SLAB, head, &barriers.values[s], tile * KEYS);
        if (++s == STAGES) s = 0, parity ^= 1;
    }
}

// A warp group's queries, in shared memory or, HELD, in registers.
template <int SIZE, int KEYS, bool HELD>
struct Queries {
    u64 at, ends;
    u32 own[HELD ? (SIZE + 15) / 16 : 1][4];

    __device__ __forceinline__ Queries(const u16* queries, const u16* query_ends) {
        at = rows_at(queries), ends = ends_at(query_ends);
        if (!HELD) return;
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, word = threadIdx.x % 4;
        EACH(k, (SIZE + 15) / 16) EACH(i, 4) {
            const int its = row + i % 2 * 8, chunk = k * 2 + i / 2;
            own[k][i] = k < 4 ? ((const u32*)queries)[its * 32 + (chunk ^ its % 8) * 4 + word]
                              : ((const u32*)query_ends)[its * 8 + (i / 2 ^ its / 4 % 2) * 4 + word];
        }
    }

    __device__ __forceinline__ void multiply(float (&s)[KEYS / 2], const u16* keys, const u16* key_ends) const {
        const u64 its = rows_at(keys);
        EACH(k, (SIZE + 15) / 16) {
            const u64 b = k < 4 ? its + k * 2 : ends_at(key_ends);
            if constexpr (HELD) {
                if (k == 0) Scores<KEYS>::set(s, own[k], b);
                else Scores<KEYS>::add(s, own[k], b);
            } else {
                if (k == 0) Product<KEYS>::set(s, at, b);
                else Product<KEYS>::add(s, k < 4 ? at + k * 2 : ends, b);
            }
        }
    }
};

// Sums of weighted values over sums of weights -> rows of the result. first: of the block's queries.
template <int SIZE>
__device__ __forceinline__ void store_rows(const WholeTask& task, int first, const float (&o)[SIZE / 2],
                                           const float (&sum)[2]) {
    const int lane = threadIdx.x & 31, row0 = first + (threadIdx.x >> 5) * 16 + lane / 4;
    EACH(h, 2) {
        float all = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
        all += __shfl_xor_sync(~0u, all, 2);
        const float factor = 1.f / all;
        const int row = row0 + h * 8;
        if (row >= task.rows) continue;
        u16* const out = task.out + ((size_t)row * task.heads + blockIdx.y) * SIZE + lane % 4 * 2;
        EACH(j, SIZE / 8) *(u32*)(out + j * 8) = pair_of(o[j * 4 + h * 2] * factor, o[j * 4 + h * 2 + 1] * factor);
    }
}

// What a warp group does with its queries.
template <int SIZE, int KEYS, int GROUPS, int STAGES>
__device__ __forceinline__ void attend(const WholeTask& task, const Room<SIZE, KEYS, GROUPS, STAGES>& room,
                                       WholeBarriers<STAGES>& barriers, int tiles) {
    const int lane = threadIdx.x & 31, group = held(threadIdx.x >> 7), next = group + 1 == GROUPS ? 0 : group + 1;
    Softmax<KEYS> softmax;
    float o[SIZE / 2];
    u32 p[KEYS / 4];
    EACH(i, SIZE / 2) o[i] = 0.f;
    if (next == 0) give_turn(0);
    wait_barrier(&barriers.queries, 0);
    // Of two warp groups each has registers for its queries, which leaves shared memory to keys.
    const Queries<SIZE, KEYS, GROUPS == 2> queries(room.queries + group * 64 * 64,
                                                   room.query_ends + group * 64 * room.MORE);
    auto begin_scores = [&](int s) {
        begin_products();
        queries.multiply(softmax.s, room.keys_of(s), room.key_ends_of(s));
        end_products();
    };
    auto begin_values = [&](int s) {
        const u64 at = slabs_at<KEYS>(room.values_of(s));
        begin_products();
        EACH(k, KEYS / 16) Weighted<SIZE>::add(o, p + k * 4, at + k * SLAB * 2);
        end_products();
    };
    wait_barrier(&barriers.keys[0], 0);
    wait_for_turn(group);
    begin_scores(0);
    give_turn(next);
    wait_for_products<0>();
    keep_here(softmax.s);
    if (lane == 0) arrive(&barriers.keys_read[0]);
    softmax.hide_from(task.count - (tiles - 1) * KEYS);
    softmax.template weigh<true>(task.scale);
    softmax.pack(p);
    int s = 0, parity = 0;  // of the keys whose weights there are
    for (int tile = tiles - 2; tile >= 0; --tile) {
        const int s1 = s + 1 == STAGES ? 0 : s + 1, parity1 = s + 1 == STAGES ? parity ^ 1 : parity;
        wait_barrier(&barriers.keys[s1], parity1);
        wait_for_turn(group);
        begin_scores(s1);
        wait_barrier(&barriers.values[s], parity);
        begin_values(s);
        give_turn(next);
        wait_for_products<1>();
        keep_here(softmax.s);
        softmax.template weigh<false>(task.scale);
        // No sum is negative. This depends on all weights, without which ptxas would make them behind the next wait.
        if (lane == 0 && !(softmax.sum[0] < 0.f || softmax.sum[1] < 0.f)) arrive(&barriers.keys_read[s1]);
        wait_for_products<0>();
        keep_here(o);
        if (lane == 0) arrive(&barriers.values_read[s]);
        EACH(i, SIZE / 2) o[i] *= softmax.factor[i / 2 % 2];
        softmax.pack(p);
        s = s1, parity = parity1;
    }
    wait_barrier(&barriers.values[s], parity);
    begin_values(s);
    wait_for_products<0>();
    keep_here(o);
    store_rows<SIZE>(task, blockIdx.x * GROUPS * 64, o, softmax.sum);
}

template <int SIZE, int KEYS, int GROUPS, int STAGES>
__device__ __forceinline__ void whole_attention(const WholeTask& task) {
    extern __shared__ float sums[];  // barriers, then what is read
    WholeBarriers<STAGES>& barriers = *(WholeBarriers<STAGES>*)sums;
    const Room<SIZE, KEYS, GROUPS, STAGES> room((u16*)(sums + BARRIERS + (-shared_at(sums + BARRIERS) & 1023) / 4));
    const int tiles = (task.count + KEYS - 1) / KEYS;
    launch_dependents();
    if (threadIdx.x == 0) {
        init_ring(barriers.keys, barriers.keys_read, STAGES, 1, GROUPS * 4);
        init_ring(barriers.values, barriers.values_read, STAGES, 1, GROUPS * 4);
        init_barrier(&barriers.queries, 1);
        show_barriers();
    }
    __syncthreads();
    wait_for_earlier_kernels();
    if (threadIdx.x >= GROUPS * 128) {
        give_registers<GROUPS == 3 ? 32 : 24>();
        if (threadIdx.x == GROUPS * 128) ask_for_all(task, room, barriers, tiles);
    } else {
        take_registers<GROUPS == 3 ? 160 : 240>();
        attend(task, room, barriers, tiles);
    }
}

#define WHOLE_KERNEL(NAME, SIZE, KEYS, GROUPS, STAGES)                                                               \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, 1)                                              \
        NAME(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap query_ends,                \
             const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap key_ends,                     \
             const __grid_constant__ TensorMap values, u16* out, int rows, int count, int heads, float scale) {      \
        whole_attention<SIZE, KEYS, GROUPS, STAGES>(                                                                 \
            {&queries, &query_ends, &keys, &key_ends, &values, out, rows, count, heads, scale});                     \
    }
