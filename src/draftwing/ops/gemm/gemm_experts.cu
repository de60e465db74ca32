// Follows gemm.cu and gemm_groups.cu: GEMMs of few rows with the weights of experts, of which those are read that rows
// chose. Weights of all experts lie one beneath the other. A row of x with one of its choices is a pair, and pairs of one
// expert are a tile (`ExpertTiles` in ops/experts/spec.py); a block has some features of one tile.
//
// Sums are made as in gemm.cu, in shares, so that a pair's bits depend on its row and expert alone. Of quantised weights
// a lane has other columns of a chunk than there.

enum { CLAMPED = 3 };  // besides PLAIN and SILU_MUL
#define ALPHA 1.702f  // of the clamped gate

// Not from the L1 cache, which may have what was there before.
__device__ __forceinline__ int load_route(const int* p) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Byte `which`, in both halves.
__device__ __forceinline__ u32 byte_twice(u32 word, int which) { return __byte_perm(word, 0, 0x4040 + which * 0x101); }

// As `load_weight`.
__device__ __forceinline__ uint2 load_half_weight(const u32* p) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// How many lanes of the warp say so.
__device__ __forceinline__ int count_in_warp(bool so) { return __popc(__ballot_sync(0xffffffff, so)); }

// What lane t has of a chunk of x: 8 columns from X_LANE * t on, and 8 from X_HALF further on. For gemm_stream.cu: words of
// a row and a chunk, the first of a lane, the rows of scales that chunks have, and the first of a chunk.
struct StoredExperts : Stored {
    static constexpr int X_LANE = 8, X_HALF = 32, OF_CHUNK = 32;
    static constexpr bool SMALL = false, WITH_ZEROS = false;

    struct Part : Stored::Part {
        __device__ __forceinline__ void take(const u32* words, int below, const u32*, int) {
            EACH(i, 4) v[i / 2][i % 2] = load_shared((const u16*)(words + i % 2 * below + i / 2 * 16));
        }
    };

    __device__ __forceinline__ static constexpr int scales_of(int) { return 0; }
    __device__ __forceinline__ static int word_of(int chunk) { return chunk * OF_CHUNK + (threadIdx.x & 3) * 4; }
    __device__ __forceinline__ static int scale_of(int) { return 0; }
    __device__ __forceinline__ const u32* codes() const { return (const u32*)w; }

    __device__ __forceinline__ static StoredExperts of(const void* w, const u32*, const u32*, int) { return {{(const u16*)w}}; }

    // From a row on.
    __device__ __forceinline__ StoredExperts from(size_t row, int K) const { return {{w + row * K}}; }
};

// Weights as in ops/experts/rows.py, for bfloat16: codes row by row, in words whose halves are neighbours in the matrix;
// scales of 128 columns, or of all, by row. Codes become bfloat16s by where their bits are put, which they lie for.
enum { INT4 = 1, INT8 = 2, FP8 = 3, MX = 4 };
template <int CODES, int OF_STEP, bool ZEROS>
struct Words {
    static constexpr bool TAKE_TURNS = false, SMALL = CODES == INT4 || CODES == MX, WITH_ZEROS = ZEROS;
    static constexpr int POWER = 0, X_LANE = 16, X_HALF = 8;
    static constexpr int OF_CHUNK = SMALL ? 8 : 16;  // words of a row and a chunk
    const u32 *words, *scales, *zeros;
    int rows;  // of the weight

    __device__ __forceinline__ static Words of(const void* words, const u32* scales, const u32* zeros, int rows) {
        return {(const u32*)words, scales, zeros, rows};
    }

    __device__ __forceinline__ Words from(size_t row, int K) const {
        return {words + row * (K / CHUNK * OF_CHUNK), scales + row, ZEROS ? zeros + row : zeros, rows};
    }

    __device__ __forceinline__ static constexpr int scales_of(int chunks) {
        return CODES == MX ? (chunks + 1) / 2 : OF_STEP == 0 ? 1 : (chunks + 1) / 2 * OF_STEP;
    }

    __device__ __forceinline__ static int word_of(int chunk) {
        return chunk * OF_CHUNK + (threadIdx.x & 3) * (OF_CHUNK / 4);
    }

    __device__ __forceinline__ static int scale_of(int chunk) {
        return CODES == MX ? chunk / 2 : OF_STEP == 4 ? chunk * 2 + (threadIdx.x & 3) / 2 : chunk * OF_STEP / 2;
    }

    __device__ __forceinline__ const u32* codes() const { return words; }

    struct Part {
        // Of features g and g + 8, as loaded: what is done to them at once waits for them.
        u32 words[2][SMALL ? 2 : 4], scales[2], zeros[2];

        // From shared memory. of_scales: those of feature g, and `its_zeros` further on its zeros.
        __device__ __forceinline__ void take(const u32* from, int below, const u32* of_scales, int its_zeros) {
            EACH(half, 2) {
                if constexpr (SMALL) {
                    const uint2 v = *(const uint2*)(from + half * below);
                    words[half][0] = v.x, words[half][1] = v.y;
                } else {
                    const uint4 v = load_shared((const u16*)(from + half * below));
                    words[half][0] = v.x, words[half][1] = v.y, words[half][2] = v.z, words[half][3] = v.w;
                }
                scales[half] = of_scales[half * 8];
                if (ZEROS) zeros[half] = of_scales[half * 8 + its_zeros];
            }
        }

        // Of the four of a word; a warp's chunks are even ones, or odd ones.
        __device__ __forceinline__ static u32 exponent_twice(u32 word) {
            return byte_twice(word, (threadIdx.x >> 5) % 2 * 2 + (threadIdx.x & 3) / 2) << 7;
        }

        __device__ __forceinline__ void expand(int j, u32 (&top)[4], u32 (&bottom)[4]) const {
            expand_row(0, j, top);
            expand_row(1, j, bottom);
        }

        __device__ __forceinline__ void expand_row(int half, int j, u32 (&out)[4]) const {
            const u32 scale = CODES == MX ? exponent_twice(scales[half]) : high_twice(scales[half]);
            const u32 less = ZEROS ? __float_as_uint(__uint_as_float(zeros[half]) - 128.f) : 0;
            const u32 zero = ZEROS ? high_twice(less) : 0xc308c308;  // -136
            EACH(i, 4) {  // a pair of columns
                const u32 word = SMALL ? words[half][j] : words[half][j * 2 + i / 2];
                if constexpr (CODES == INT4) {
                    out[i] = times(fma_pair((word >> 4 * i & 0x000f000f) | 0x43004300, ONE, zero), scale);
                } else if constexpr (CODES == INT8) {
                    const u32 pair = i % 2 ? word >> 8 : word;
                    const u32 offset = (pair & 0x00800080) | 0xc300c300;  // -128, or -256 where it is negative
                    out[i] = times(fma_pair((pair & 0x007f007f) | 0x43004300, ONE, offset), scale);
                } else if constexpr (CODES == FP8) {
                    const u32 low = (word << 4 & 0x80f080f0) | (word >> 4 & 0x07000700);
                    out[i] = times(i % 2 ? low : word & 0x87f087f0, scale);
                } else {
                    const u32 moved = i == 2 ? rotate_right(word, 20) : word << 6 * i;
                    const u32 last = (word << 2 & 0x80c080c0) | (word >> 6 & 0x01000100);
                    out[i] = times(i < 3 ? moved & 0x81c081c0 : last, scale);
                }
            }
        }
    };

    template <int KIND>
    struct Rows {
        const u32 *words, *scales, *zeros;  // of the expert
        u32 row[2], scale[2];               // from there, in words: pointers would take twice the registers
        u32 of_all;                         // rows of the weight
        u32 scale_of[2], zero_of[2];  // where a row has but one

        __device__ __forceinline__ void find(const Words& weights, int row0, int at, int chunk, int N, int K) {
            const int g = (threadIdx.x & 31) >> 2;
            const u32 group = Words::scale_of(chunk);
            words = weights.words, scales = weights.scales, zeros = weights.zeros;
            of_all = weights.rows;
            EACH(half, 2) {
                const int n =
                    KIND != PLAIN ? min(row0 + at / 2 + g, N - 1) + half * N : min(row0 + at + half * 8 + g, N - 1);
                row[half] = n * (K / CHUNK * OF_CHUNK) + word_of(chunk);
                scale[half] = group * of_all + n;
                if (OF_STEP == 0) load_scale(scale_of[half], zero_of[half], half, 0);
            }
        }

        // chunk: a multiple of SHARES. The last half has both.
        __device__ __forceinline__ void load(Part& into, int chunk, int j) const {
            if (j == 0) return;
            EACH(half, 2) {
                const u32* const from = words + (row[half] + chunk * OF_CHUNK);
                if constexpr (SMALL) {
                    const uint2 v = load_half_weight(from);
                    into.words[half][0] = v.x, into.words[half][1] = v.y;
                } else {
                    const uint4 v = load_weight((const u16*)from);
                    into.words[half][0] = v.x, into.words[half][1] = v.y;
                    into.words[half][2] = v.z, into.words[half][3] = v.w;
                }
                if (OF_STEP == 0) into.scales[half] = scale_of[half], into.zeros[half] = zero_of[half];
                else load_scale(into.scales[half], into.zeros[half], half, chunk);
            }
        }

        __device__ __forceinline__ void load_scale(u32& of, u32& its_zero, int half, int chunk) const {
            const u32 at = scale[half] + (CODES == MX ? chunk / 2 : chunk * OF_STEP / 2) * of_all;
            of = load_word(scales + at);
            if (ZEROS) its_zero = load_word(zeros + at);
        }
    };
};

// KIND and LIMIT's part of it: what becomes of a gate and its up.
template <int KIND>
__device__ __forceinline__ float gated(float gate, float up, float limit) {
    if (KIND == SILU_MUL) return silu_times(gate, up);
    gate = rounded(gate), up = rounded(up);  // as silu_times has them
    gate = gate < limit ? gate : limit;
    up = up < limit ? up : limit;
    up = up > -limit ? up : -limit;
    return gate / (1.f + __expf(-ALPHA * gate)) * (up + 1.f);
}

// What is stored of a sum. A kernel without gates takes a limit below 0 for: the square of what is above 0, as experts
// without gates let it through, of what is rounded before.
template <int KIND>
__device__ __forceinline__ u16 let_through(float sum, float limit) {
    const u16 value = from_float(sum);
    if (KIND != PLAIN || limit >= 0.f) return value;
    const float above = to_float(value) < 0.f ? 0.f : to_float(value);
    return from_float(above * above);
}

// What a block does, one after the other: from `at` until `end`, mostly parts of one tile, whose rows of x are in the
// L1 cache from the first one on.
struct Share {
    int at, end;

    // tiles: those that are not there come last.
    __device__ __forceinline__ static Share of(const int* tiles, int tile_count, int parts) {
        const int block = blockIdx.x, blocks = gridDim.x;
        if (tile_count * parts <= blocks) return {block, block + 1};  // there may be none
        constexpr int TOGETHER = 16;  // loads that are under way at a time
        int live = 0;
        for (int first = 0; first < tile_count; first += 32 * TOGETHER) {
            int expert[TOGETHER];
            EACH(i, TOGETHER) {
                const int tile = first + i * 32 + (threadIdx.x & 31);
                expert[i] = -1;
                if (tile < tile_count) expert[i] = load_route(tiles + tile);
            }
            EACH(i, TOGETHER) live += count_in_warp(expert[i] >= 0);
        }
        const int each = live * parts / blocks, rest = live * parts % blocks, at = each * block + min(block, rest);
        return {at, at + each + (block < rest)};
    }
};

// A tile of pairs of one expert, and the features of it that a block has next.
struct Work {
    int expert, begin, live, row0;  // expert: -1: there is none

    __device__ __forceinline__ static Work of(int work, int end, const int* tiles, int tile_count, int parts,
                                              int features) {
        if (work >= end) return {-1, 0, 1, 0};
        const int tile = work / parts;
        return {load_route(tiles + tile), load_route(tiles + tile_count + tile), load_route(tiles + 2 * tile_count + tile),
                work % parts * features};
    }
};

// The warp's share of a tile, of which TILES times 8 pairs are live at most. a, b: the first chunks of weights and x,
// loaded; token: where this lane's rows of x begin.
template <class WEIGHTS, int TILES, int TOKEN_TILES, int ROW_TILES, int AHEAD, int X_AHEAD, class OF_ROWS>
__device__ __forceinline__ void multiply(float (&d)[ROW_TILES][TOKEN_TILES][4],
                                         typename WEIGHTS::Part (&a)[AHEAD][ROW_TILES],
                                         uint4 (&b)[X_AHEAD][TOKEN_TILES][2], const OF_ROWS (&rows)[ROW_TILES],
                                         const u16* const (&token)[TOKEN_TILES], int count, int live) {
    const int g = (threadIdx.x & 31) >> 2;
    for (int c = 0; c < count; c += AHEAD) {
        EACH(p, AHEAD) {
            if (c + p >= count) continue;
            const int q = p % X_AHEAD;
            EACH(r, ROW_TILES) EACH(j, 2) {
                u32 top[4], bottom[4];
                a[p][r].expand(j, top, bottom);
                EACH(m, TILES) mma_half(d[r][m], top, bottom, b[q][m][j]);
            }
            if (c + p + AHEAD < count)
                EACH(r, ROW_TILES) EACH(j, 2) rows[r].load(a[p][r], (c + p + AHEAD) * SHARES, j);
            if (c + p + X_AHEAD < count)
                EACH(m, TILES) EACH(j, 2)
                    if (m * 8 + g < live)
                        b[q][m][j] = load_x(token[m] + (c + p + X_AHEAD) * STEP + j * WEIGHTS::X_HALF);
        }
    }
}

// What a GEMM of pairs is given.
#define PAIR_OPERANDS                                                                                             \
    const u16 *__restrict__ x, const WEIGHTS all, const u16 *__restrict__ bias, const int *__restrict__ order,    \
        const int *__restrict__ tiles, u16 *__restrict__ y, int tile_count, int choices, int known, int N, int K, \
        float limit

// y [pairs, N], a pair its row of x [pairs / choices, K] times the weight [N, K] of its expert; gated: of [2 * N, K], of
// which the upper half are gates. bias: as the weight has rows. order, tiles [3][tile_count]: `ExpertTiles`, which may
// have up to TOKEN_TILES * 8 pairs each, and those that are not there last. known: whether order and tiles were there
// before the kernel before this one let this one come.
//
// Blocks stay. While one adds up what its warps have, its next weights and rows of x are on their way; which these are
// it asks for before.
template <class WEIGHTS, int TOKEN_TILES, int ROW_TILES, int AHEAD, int X_AHEAD, int KIND>
__device__ __forceinline__ void expert_gemm(PAIR_OPERANDS) {
    static_assert(AHEAD % X_AHEAD == 0, "a chunk of x is in the same registers in every round");
    constexpr bool GATED = KIND != PLAIN;
    constexpr int TOKENS = TOKEN_TILES * 8, ROWS = ROW_TILES * 16, PITCH = pitch_of(ROWS), OUT = GATED ? ROWS / 2 : ROWS;
    constexpr int THREADS = SHARES * 32;
    extern __shared__ float sums[];  // [SHARES][TOKENS][PITCH], then the pairs of the tile, [TOKENS] int
    int* const pairs = (int*)(sums + SHARES * TOKENS * PITCH);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = K / CHUNK, count = (chunks - warp + SHARES - 1) / SHARES;  // of the warp's share
    const int parts = (N + OUT - 1) / OUT;                                       // of a tile

    // Which weights are read depends on what was chosen. The next kernel comes no sooner, so that it may find that known.
    if (!known) wait_for_earlier_kernels();
    launch_dependents();

    typename WEIGHTS::template Rows<GATED ? SILU_MUL : PLAIN> rows[ROW_TILES];
    typename WEIGHTS::Part a[AHEAD][ROW_TILES];
    const auto begin_weights = [&](const Work& work) {
        const WEIGHTS weights = all.from((size_t)work.expert * (GATED ? 2 * N : N), K);
        EACH(r, ROW_TILES) rows[r].find(weights, work.row0, r * 16, warp, N, K);
        EACH(p, AHEAD)
            if (p < count)
                EACH(r, ROW_TILES) EACH(j, 2) rows[r].load(a[p][r], p * SHARES, j);
    };

    Share share = Share::of(tiles, tile_count, parts);
    const auto next_work = [&] { return Work::of(share.at++, share.end, tiles, tile_count, parts, OUT); };
    Work work = next_work();
    if (work.expert < 0) return;
    begin_weights(work);
    if (known) wait_for_earlier_kernels();

    const u16* token[TOKEN_TILES];
    uint4 b[X_AHEAD][TOKEN_TILES][2];
    int pair[TOKEN_TILES];
    const auto find_pairs = [&](const Work& work) {
        EACH(m, TOKEN_TILES) {
            const int place = work.begin + min(m * 8 + g, work.live - 1);
            pair[m] = order ? load_route(order + place) : place;
        }
    };
    const auto begin_x = [&](int live) {
        EACH(m, TOKEN_TILES) token[m] = x + (size_t)(pair[m] / choices) * K + (warp * CHUNK + t * WEIGHTS::X_LANE);
        EACH(p, X_AHEAD) EACH(m, TOKEN_TILES) EACH(j, 2) {
            b[p][m][j] = make_uint4(0, 0, 0, 0);
            if (p < count && m * 8 + g < live) b[p][m][j] = load_x(token[m] + p * STEP + j * WEIGHTS::X_HALF);
        }
    };
    find_pairs(work);
    begin_x(work.live);
    Work next = next_work();

    while (true) {
        const int live = work.live;
        if (warp == 0 && t == 0)
            EACH(m, TOKEN_TILES) pairs[m * 8 + g] = pair[m];
        if (next.expert >= 0) find_pairs(next);
        const Work after = next_work();
        // Where OUT does not divide the threads, the last ones do what the first ones do in the next round: the same.
        const int first = work.expert * (GATED ? 2 * N : N) + work.row0, row = threadIdx.x % OUT;
        float offset = 0.f, up_offset = 0.f;
        if (bias && work.row0 + row < N) {
            offset = load_value(bias + first + row);
            if (GATED) up_offset = load_value(bias + first + N + row);
        }

        float d[ROW_TILES][TOKEN_TILES][4];
        clear_sums(d);

        if (TOKEN_TILES > 1 && live <= 8) multiply<WEIGHTS, 1>(d, a, b, rows, token, count, live);
        else multiply<WEIGHTS, TOKEN_TILES>(d, a, b, rows, token, count, live);

        if (next.expert >= 0) begin_x(next.live), begin_weights(next);
        keep_sums<ROW_TILES, TOKEN_TILES, PITCH>(d, sums + warp * TOKENS * PITCH);
        __syncthreads();
        const int at_row = GATED ? row / 8 * 16 + row % 8 : row;
        if (work.row0 + row < N)
            for (int m = threadIdx.x / OUT; m < live; m += THREADS / OUT) {
                float sum = 0.f, up = 0.f;
                EACH(v, SHARES) {
                    const float* const p = sums + (v * TOKENS + m) * PITCH + at_row;
                    sum += *p;
                    if (GATED) up += p[8];
                }
                sum += offset;
                if (GATED) sum = gated<KIND>(sum, up + up_offset, limit);
                y[(size_t)pairs[m] * N + work.row0 + row] = let_through<KIND>(sum, limit);
            }
        if (next.expert < 0) return;
        __syncthreads();
        work = next, next = after;
    }
}

#define EXPERT_KERNEL(NAME, THREADS, BLOCKS, GEMM, ...)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                     \
        NAME(const u16* x, const void* w, const u32* scales, const u32* zeros, int rows, const u16* bias,             \
             const int* order, const int* tiles, u16* y, int tile_count, int choices, int known, int N, int K,        \
             float limit) {                                                                                           \
        GEMM<Weights, __VA_ARGS__>(x, Weights::of(w, scales, zeros, rows), bias, order, tiles, y, tile_count,         \
                                   choices, known, N, K, limit);                                                      \
    }
