// Follows gemm_experts.cu, gemm_bulk.cu and gemm_wgmma.cu: the same products with the same bits, of many pairs (compute
// capability 9.0 alone).
//
// Weights lie as for few pairs. Tiles of them come by the copy engine, and go from shared memory to registers as lanes of
// gemm.cu have them: 16 bytes side by side, which are the first operand of two instructions. The second one is x, which
// comes with its columns as these instructions want them: of 32, in words of two, word 4 q + t is what was 4 t + q. Threads
// that do nothing else gather its rows.
//
// Two warp groups have 64 rows of weights each and all pairs of a tile. Blocks stay.

#define MANY_ROWS 128  // of weights, that a block has of a tile
#define GATHER 128     // threads that copy
#define OUT_PAIRS 64   // of which a warp group's results are in shared memory at a time

#ifndef ON_HOST
// d = a b^T (more: 0) or d += a b^T, for 16 columns: a from registers, as in mma.sync, b PAIRS rows of 32 bytes.
template <int PAIRS>
struct FromRegisters;

// Four matrices of 8 x 8, of which a lane has words of two columns of row lane / 4, become rows of shared memory by
// column. at: where lane l's row is, column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* at, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_at(at)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void store_16(u16* to, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
#endif

// Rows of weights lie in shared memory so that two which neighbouring lanes read begin in different halves of the banks:
// row i of eight of an instruction is row `lies_at(i)`.
__device__ __forceinline__ int lies_at(int i) { return i >> 1 | (i & 1) << 2; }

__device__ __forceinline__ u32 low_halves(u32 first, u32 second) { return (first & 0xffff) | second << 16; }
__device__ __forceinline__ u32 high_halves(u32 first, u32 second) { return first >> 16 | (second & 0xffff0000); }

struct ManyPairs {
    const TensorMap* w;  // boxes: 64 columns of a warp group's rows, half of which are gates and half their ups
    const u16 *x, *bias;
    const int *order, *tiles;
    u16* y;
    int tile_count, choices, N, K, stages;
    float limit;
};

// What a block has of a tile, in shared memory: threads that copy write it, before they ask for its first stage. They may
// have gone on to the tile after the next one when the others store results.
template <int TOKENS>
struct ManyWork {
    int expert, live, row0, unused;  // expert: -1: there is none; live: pairs
    int pairs[TOKENS];
    u32 rows[TOKENS];  // where those of x begin, in 16 bytes
};
#define WORKS 4

// What results of a warp group are staged in: rows of pairs, of as many bytes as it has results.
template <int KIND>
struct Staged {
    static constexpr int UNITS = KIND == PLAIN ? 8 : 4;  // of 16 bytes
    static constexpr int BYTES = OUT_PAIRS * UNITS * 16;
    char* const room;

    __device__ __forceinline__ char* unit(int pair, int unit) const {
        return room + (pair * UNITS + (unit ^ (KIND == PLAIN ? pair & 7 : pair >> 1 & 3))) * 16;
    }
};

// The threads that multiply: one warp group's part of a tile of up to PAIRS pairs.
template <int PAIRS, int TOKENS, int KIND>
struct Multiplied {
    float d[PAIRS / 2], total[PAIRS / 2];

    // s, parity: of the ring, whose stages have STAGE bytes, weights first.
    __device__ __forceinline__ void run(const ManyPairs& task, char* ring, Barrier* full, Barrier* empty, int& s,
                                        int& parity) {
        constexpr int STAGE = (MANY_ROWS + TOKENS) * 128;
        const int lane = held(threadIdx.x & 31), warp = held(threadIdx.x >> 5), g = lies_at(lane >> 2), t = lane & 3;
        const int chunks = held(task.K / CHUNK);
        const int row = warp / 4 * 64 + warp % 4 * (KIND == PLAIN ? 16 : 8) + g;  // the other one is so much further:
        constexpr int OTHER = (KIND == PLAIN ? 8 : 32) * 128;
        const int at = held(row * 128 + ((t ^ g) * 16));  // of half 1 of a chunk: 64 bytes, the bit g may have
        EACH(k, PAIRS / 2) d[k] = total[k] = 0.f;
        auto give_back = [&](int stage) {
            if (lane == 0) arrive(empty + stage);
        };
        int last = -1;  // the stage whose products may be under way
        uint4 top[2], bottom[2];
#pragma unroll 1
        for (int share = 0; share < min(chunks, SHARES); ++share) {
            const int count = (chunks - share + SHARES - 1) / SHARES;
#pragma unroll 1
            for (int c = 0; c < count; ++c) {
                wait_barrier(full + s, parity);
                show_writes();  // those of the threads that copied are to be seen by instructions
                const char* const stage = ring + s * STAGE;
                const u64 b = rows_at(stage + MANY_ROWS * 128);
                EACH(j, 2) {
                    wait_for_products<1>();  // those that read the registers written next have ended
                    if (j == 1) {            // and those of the stage before
                        if (last >= 0) give_back(last);
                        last = s;
                    }
                    top[j] = load_shared((const u16*)(stage + (at ^ j * 64)));
                    bottom[j] = load_shared((const u16*)(stage + (at ^ j * 64) + OTHER));
                    begin_products();
                    FromRegisters<PAIRS>::add(d, top[j].x, bottom[j].x, top[j].y, bottom[j].y, b + j * 4, c + j);
                    FromRegisters<PAIRS>::add(d, top[j].z, bottom[j].z, top[j].w, bottom[j].w, b + j * 4 + 2, 1);
                    end_products();
                }
                if (++s == task.stages) s = 0, parity ^= 1;
            }
            wait_for_products<0>();
            keep_here(d);
            give_back(last);
            last = -1;
            EACH(k, PAIRS / 2) total[k] += d[k];
        }
    }

    // SQUARES: as `let_through` has them.
    template <bool SQUARES>
    __device__ __forceinline__ void store(const ManyPairs& task, const ManyWork<TOKENS>& work, const Staged<KIND>& staged,
                                          int group) const {
        constexpr int OWN = KIND == PLAIN ? 64 : 32;  // results of a pair
        const int thread = held(threadIdx.x % 128), lane = thread & 31, warp = thread / 32;
        const int feature0 = work.row0 + group * OWN, n = feature0 + warp * (OWN / 4) + lies_at(lane >> 2);
        float offset[2] = {0.f, 0.f};
        if (task.bias) {
            const u16* const from = task.bias + (size_t)work.expert * (KIND == PLAIN ? task.N : 2 * task.N);
            if (n < task.N) offset[0] = load_value(from + n);
            if (KIND == PLAIN ? n + 8 < task.N : n < task.N) offset[1] = load_value(from + n + (KIND == PLAIN ? 8 : task.N));
        }
        // Of eight pairs and two results beside each other, or of gates and ups.
        auto word = [&](int m, int half) -> u32 {
            float sum[2];
            EACH(v, 2) {
                sum[v] = total[m * 4 + half * 2 + v] + offset[half];
                if (KIND != PLAIN) sum[v] = gated<KIND>(sum[v], total[m * 4 + 2 + v] + offset[1], task.limit);
            }
            constexpr float LIMIT = SQUARES ? -1.f : 0.f;
            return let_through<KIND>(sum[0], LIMIT) | (u32)let_through<KIND>(sum[1], LIMIT) << 16;
        };
        EACH(box, (PAIRS + OUT_PAIRS - 1) / OUT_PAIRS) {
            constexpr int TILES = PAIRS < OUT_PAIRS ? PAIRS / 8 : OUT_PAIRS / 8, AT_ONCE = KIND == PLAIN ? 2 : 4;
            if (box * OUT_PAIRS >= work.live) break;
            sync_128(group);  // the results before have been read
#pragma unroll
            for (int m = 0; m < TILES; m += AT_ONCE) {
                const int first = box * (OUT_PAIRS / 8) + m;
                if (first * 8 >= PAIRS) continue;
                u32 words[4];
                EACH(i, 4) {
                    const int tile = first + (KIND == PLAIN ? i / 2 : i);
                    words[i] = tile * 8 < PAIRS ? word(tile, KIND == PLAIN ? i % 2 : 0) : 0u;
                }
                const int i = lane / 8, pair = (m + (KIND == PLAIN ? i / 2 : i)) * 8 + lane % 8;
                store_matrices(staged.unit(pair, KIND == PLAIN ? warp * 2 + i % 2 : warp), words);
            }
            sync_128(group);
            for (int i = thread; i < TILES * 8 * Staged<KIND>::UNITS; i += 128) {
                const int pair = i / Staged<KIND>::UNITS, unit = i % Staged<KIND>::UNITS;
                if (box * OUT_PAIRS + pair >= work.live || feature0 + unit * 8 >= task.N) continue;
                const uint4 in = *(const uint4*)staged.unit(pair, unit);
                const uint4 v = {low_halves(in.x, in.y), low_halves(in.z, in.w), high_halves(in.x, in.y), high_halves(in.z, in.w)};
                store_16(task.y + (size_t)work.pairs[box * OUT_PAIRS + pair] * task.N + feature0 + unit * 8, v);
            }
        }
    }

    __device__ __forceinline__ void end(const ManyPairs& task, const ManyWork<TOKENS>& work, const Staged<KIND>& staged,
                                        int group) const {
        if (KIND == PLAIN && task.limit < 0.f) store<true>(task, work, staged, group);
        else store<false>(task, work, staged, group);
    }
};

// What one of the threads that copy copies of a stage: 16 bytes of each row of some fours.
struct Gathered {
    int first, places[4];  // of fours, and where those of a four lie

    __device__ __forceinline__ explicit Gathered(int thread) : first(thread / 8) {
        EACH(i, 4) places[i] = held(i * 128 + ((thread % 8 ^ (first & 1) * 4 + i) * 16));
    }

    // Up to three rows more than `count`. What comes next is asked for before.
    template <int TOKENS>
    __device__ __forceinline__ void copy(char* to, const u16* x, const ManyWork<TOKENS>& work, int count) const {
        auto rows_of = [&](int four) { return load_shared((const u16*)(work.rows + min(four, TOKENS / 4 - 1) * 4)); };
        x += threadIdx.x % 8 * 8, to += first * 512;
        uint4 next = rows_of(first);
#pragma unroll 1
        for (int four = first; four * 4 < count; four += GATHER / 8, to += GATHER / 8 * 512) {
            const u32 from[4] = {next.x, next.y, next.z, next.w};
            next = rows_of(four + GATHER / 8);
            EACH(i, 4) copy_async((u16*)(to + places[i]), x + (size_t)from[i] * 8);
        }
    }
};

// What threads that copy do: one tile after the other, as far ahead as there are stages.
template <int TOKENS, int KIND>
__device__ __forceinline__ void copy_many_pairs(const ManyPairs& task, ManyWork<TOKENS>* works, char* ring, Barrier* full,
                                                Barrier* empty) {
    constexpr int STAGE = (MANY_ROWS + TOKENS) * 128, MINE = (TOKENS + GATHER - 1) / GATHER;
    constexpr int OWN = KIND == PLAIN ? MANY_ROWS : MANY_ROWS / 2;  // results of a pair
    const int thread = threadIdx.x % GATHER, chunks = task.K / CHUNK, parts = (task.N + OWN - 1) / OWN;
    const Gathered gathered(thread);
    int number = blockIdx.x, s = 0, parity = 0, turn = 0;
    int expert, live = 0, row0 = 0, pair[MINE];  // of the next tile
    auto find = [&] {
        const int tile = number / parts;
        expert = tile < task.tile_count ? load_route(task.tiles + tile) : -1;
        if (expert >= 0) {
            const int begin = load_route(task.tiles + task.tile_count + tile);
            live = load_route(task.tiles + 2 * task.tile_count + tile), row0 = number % parts * OWN;
            EACH(i, MINE) {
                const int at = begin + thread + i * GATHER;
                pair[i] = thread + i * GATHER >= live ? 0 : task.order ? load_route(task.order + at) : at;
            }
        }
        number += gridDim.x;
    };
    find();
    while (true) {
        ManyWork<TOKENS>& work = works[turn % WORKS];
        if (thread == 0) work.expert = expert, work.live = live, work.row0 = row0;
        if (expert < 0) break;
        EACH(i, MINE)
            if (thread + i * GATHER < TOKENS) {
                work.pairs[thread + i * GATHER] = pair[i];
                work.rows[thread + i * GATHER] = pair[i] / task.choices * (task.K / 8);
            }
        sync_128(2);
        const int count = live, own_row0 = row0, matrix = expert * (KIND == PLAIN ? 1 : 2);
        int chunk = 0;
        for (int i = 0; i < chunks; ++i) {
            wait_barrier(empty + s, parity ^ 1);
            char* const stage = ring + s * STAGE;
            if (thread == 0) {
                expect_bytes(full + s, MANY_ROWS * 128);
                EACH(i, 2) copy_box(stage + i * 64 * 128, task.w, chunk * CHUNK, own_row0 + i * (OWN / 2), full + s, matrix);
            }
            gathered.copy(stage + MANY_ROWS * 128, task.x + chunk * CHUNK, work, count);
            arrive_after_copies(full + s);
            if (++s == task.stages) s = 0, parity ^= 1;
            chunk = chunk + SHARES < chunks ? chunk + SHARES : chunk % SHARES + 1;
            if (i == 0) find();
        }
        ++turn;
    }
    wait_barrier(empty + s, parity ^ 1);  // a stage with nothing in it says that this was all
    arrive(full + s);
    if (thread == 0) arrive(full + s);
}

// Always true.
template <int PAIRS, int TOKENS, int KIND>
__device__ __forceinline__ bool multiply_tile(const ManyPairs& task, const ManyWork<TOKENS>& work,
                                              const Staged<KIND>& staged, char* ring, Barrier* full, Barrier* empty,
                                              int& s, int& parity, int group) {
    Multiplied<PAIRS, TOKENS, KIND> part;
    part.run(task, ring, full, empty, s, parity);
    part.end(task, work, staged, group);
    return true;
}

// TOKENS: pairs of a tile at most. PAIRS: as many as instructions have: the first of these that suffice,
// multiples of 16, up to TOKENS.
// OWN_REGISTERS, LEFT_REGISTERS: of threads that multiply, and that copy. K has half as many chunks as there are stages, or
// more.
template <int TOKENS, int KIND, int OWN_REGISTERS, int LEFT_REGISTERS, int... PAIRS>
__device__ __forceinline__ void many_pairs_gemm(const ManyPairs& task) {
    constexpr int STAGE = (MANY_ROWS + TOKENS) * 128, CONSUMERS = 256;
    extern __shared__ float sums[];  // barriers, works, then the ring, then results
    const int stages = task.stages;
    Barrier* const full = (Barrier*)sums;
    Barrier* const empty = full + stages;
    ManyWork<TOKENS>* const works = (ManyWork<TOKENS>*)(empty + stages);
    char* const ring = (char*)(works + WORKS) + (-shared_at(works + WORKS) & 1023);
    if (threadIdx.x == CONSUMERS) {
        prefetch_map(task.w);
        init_ring(full, empty, stages, GATHER + 1, CONSUMERS / 32);
        show_barriers();
    }
    __syncthreads();
    wait_for_earlier_kernels();
    launch_dependents();
    if (threadIdx.x >= CONSUMERS) {
        give_registers<LEFT_REGISTERS>();
        copy_many_pairs<TOKENS, KIND>(task, works, ring, full, empty);
    } else {
        take_registers<OWN_REGISTERS>();
        const int group = held(threadIdx.x / 128);
        const Staged<KIND> staged{ring + stages * STAGE + group * Staged<KIND>::BYTES};
        for (int s = 0, parity = 0, turn = 0;; ++turn) {
            wait_barrier(full + s, parity);
            const ManyWork<TOKENS>& work = works[turn % WORKS];
            if (work.expert < 0) break;
            (... || (work.live <= PAIRS && multiply_tile<PAIRS, TOKENS, KIND>(task, work, staged, ring, full, empty, s,
                                                                              parity, group)));
        }
    }
}

#define MANY_PAIRS_KERNEL(NAME, ...)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256 + GATHER, 1)                                                     \
        NAME(const __grid_constant__ TensorMap w, const u16* x, const u16* bias, const int* order, const int* tiles,  \
             u16* y, int tile_count, int choices, int N, int K, int stages, float limit) {                            \
        many_pairs_gemm<__VA_ARGS__>({&w, x, bias, order, tiles, y, tile_count, choices, N, K, stages, limit});       \
    }
