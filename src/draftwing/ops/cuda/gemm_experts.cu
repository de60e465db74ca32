// Follows gemm.cu and gemm_groups.cu: GEMMs of few rows with the weights of experts, of which those are read that rows
// chose. Weights of all experts lie one beneath the other. A row of x with one of its choices is a pair, and pairs of one
// expert are a tile (`ExpertTiles` in ops/torch/experts.py); a block has some features of one tile.
//
// Sums are made as in gemm.cu, in shares, so that a pair's bits depend on its row and expert alone. Of quantised weights
// a lane has other columns of a chunk than there.

enum { CLAMPED = 3 };  // beside PLAIN and SILU_MUL
#define TILES 32  // that a block may meet
#define ALPHA 1.702f  // of the clamped gate

// Not from the L1 cache, which may have what was there before.
__device__ __forceinline__ int load_route(const int* p) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// How many tiles there are of those that there may be: they come first. By all lanes of a warp.
__device__ __forceinline__ int count_tiles(const int* tiles, int most) {
    constexpr int ROUNDS = 8;  // whose loads are under way together
    int live = 0;
    for (int first = 0; first < most; first += ROUNDS * 32) {
        int expert[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int at = first + i * 32 + (threadIdx.x & 31);
            expert[i] = at < most ? load_route(tiles + at) : -1;
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) live += __popc(__ballot_sync(~0u, expert[i] >= 0));
    }
    return live;
}

// As `copy_async`, of 8 bytes, and what is beside them to the L2 cache.
__device__ __forceinline__ void copy_half_async(u32* to, const u32* from) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

// What lane t has of a chunk of x: 8 columns from X_LANE * t on, and 8 from X_HALF further on.
struct StoredExperts : Stored {
    static constexpr int X_LANE = 8, X_HALF = 32;

    __device__ __forceinline__ static StoredExperts of(const void* w, const u32*, const u32*, int) { return {{(const u16*)w}}; }

    // From a row on.
    __device__ __forceinline__ StoredExperts from(size_t row, int K) const { return {{w + row * K}}; }
};

// Weights as in ops/expert_rows.py, for bfloat16: codes row by row, in words whose halves are neighbours in the matrix;
// scales of 128 columns, or of all, by row. Codes become bfloat16s by where their bits are put, as they do there.
enum { INT4 = 1, INT8 = 2, FP8 = 3, MX = 4 };
template <int CODES, int OF_STEP, bool ZEROS>
struct Words {
    static constexpr bool SMALL = CODES == INT4 || CODES == MX;
    static constexpr int X_LANE = 16, X_HALF = 8;
    static constexpr int UNITS = SMALL ? 1 : 2, WORDS = ZEROS ? 4 : 2;  // as `Stored` has them
    static constexpr int OF_CHUNK = SMALL ? 8 : 16;  // words of a row and a chunk
    // Rows of scales by which those of a warp's chunk are ahead of those of the chunk before.
    static constexpr int ON = OF_STEP == 0 ? 0 : CODES == MX ? SHARES / 2 : OF_STEP * SHARES / 2;
    const u32 *words, *scales, *zeros;
    int rows;  // of the weight

    __device__ __forceinline__ static Words of(const void* words, const u32* scales, const u32* zeros, int rows) {
        return {(const u32*)words, scales, zeros, rows};
    }

    __device__ __forceinline__ Words from(size_t row, int K) const {
        return {words + row * (K / CHUNK * OF_CHUNK), scales + row, ZEROS ? zeros + row : zeros, rows};
    }

    struct Part {
        u32 words[2][SMALL ? 2 : 4], scales[2], zeros[2];  // of features g and g + 8

        __device__ __forceinline__ void expand(int j, u32 (&top)[4], u32 (&bottom)[4]) const {
            expand_row(0, j, top);
            expand_row(1, j, bottom);
        }

        __device__ __forceinline__ void expand_row(int half, int j, u32 (&out)[4]) const {
            const u32 scale = high_twice(scales[half]);
            const u32 zero = ZEROS ? high_twice(zeros[half]) : 0xc308c308;  // -136
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // a pair of columns
                const u32 word = SMALL ? words[half][j] : words[half][j * 2 + i / 2];
                if constexpr (CODES == INT4) {
                    out[i] = times(fma_pair((word >> 4 * i & 0x000f000f) | 0x43004300, ONE, zero), scale);
                } else if constexpr (CODES == INT8) {
                    const u32 pair = i % 2 ? word >> 8 : word;
                    const u32 offset = (pair & 0x00800080) | 0xc300c300;  // -128, or -256 where it is negative
                    out[i] = times(fma_pair((pair & 0x007f007f) | 0x43004300, ONE, offset), scale);
                } else if constexpr (CODES == FP8) {
                    const u32 sign = i % 2 ? word : word << 8, body = i % 2 ? word >> 4 : word << 4;
                    out[i] = times((sign & 0x80008000) | (body & 0x07f007f0), scale);
                } else {
                    const u32 body = i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6);
                    out[i] = times((word << (12 - 4 * i) & 0x80008000) | (body & 0x01c001c0), scale);
                }
            }
        }
    };

    template <int KIND>
    struct Rows {
        const u32 *row[2], *scale[2], *zero[2];
        int on, shift;  // MX: where the lane's exponent is in the four of a word

        __device__ __forceinline__ void find(const Words& weights, int row0, int at, int chunk, int N, int K) {
            const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
            const size_t groups = (CODES == MX ? chunk / 2 : OF_STEP == 4 ? chunk * 2 + t / 2 : chunk * OF_STEP / 2);
            on = ON * weights.rows;
            shift = (chunk % 2 * 2 + t / 2) * 8;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int n =
                    KIND != PLAIN ? min(row0 + at / 2 + g, N - 1) + half * N : min(row0 + at + half * 8 + g, N - 1);
                row[half] = weights.words + (size_t)n * (K / CHUNK * OF_CHUNK) + (chunk * OF_CHUNK + t * (OF_CHUNK / 4));
                scale[half] = weights.scales + (groups * weights.rows + n);
                if (ZEROS) zero[half] = weights.zeros + (groups * weights.rows + n);
            }
        }

        // chunk: a multiple of SHARES.
        __device__ __forceinline__ void copy(u16* units, u32* words, int chunk) const {
            const size_t group = (size_t)(chunk / SHARES) * on;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32* const from = row[half] + chunk * OF_CHUNK;
                if constexpr (SMALL) copy_half_async((u32*)units + half * 2, from);
                else copy_async(units + half * 256, (const u16*)from);
                copy_word_async(words + half * 32, scale[half] + group);
                if (ZEROS) copy_word_async(words + (2 + half) * 32, zero[half] + group);
            }
        }

        __device__ __forceinline__ void take(Part& into, const u16* units, const u32* words) const {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 v = load_shared(units + (SMALL ? 0 : half * 256));
                if constexpr (SMALL) {
                    into.words[half][0] = half ? v.z : v.x, into.words[half][1] = half ? v.w : v.y;
                } else {
                    into.words[half][0] = v.x, into.words[half][1] = v.y;
                    into.words[half][2] = v.z, into.words[half][3] = v.w;
                }
                const u32 word = words[half * 32];
                into.scales[half] = CODES == MX ? word >> shift << 24 >> 1 : word;
                if (ZEROS) into.zeros[half] = __float_as_uint(__uint_as_float(words[(2 + half) * 32]) - 128.f);
            }
        }
    };
};

// KIND and LIMIT's part of it: what becomes of a gate and its up.
template <int KIND>
__device__ __forceinline__ float gated(float gate, float up, float limit) {
    if (KIND == SILU_MUL) return gate / (1.f + __expf(-gate)) * up;
    gate = gate < limit ? gate : limit;
    up = up < limit ? up : limit;
    up = up > -limit ? up : -limit;
    return gate / (1.f + __expf(-ALPHA * gate)) * (up + 1.f);
}

// y [pairs, N], a pair its row of x [pairs / choices, K] times the weight [N, K] of its expert; gated: of [2 * N, K], of
// which the upper half are gates. bias: as the weight has rows. order, tiles [3][tile_count]: `ExpertTiles`, which may
// have up to X_ROWS pairs each; without an order all tiles are there.
//
// A unit is a tile of pairs with some features. Blocks stay, as those of `ring_gemm`, and each has as many units, one
// behind the other: whatever was chosen, all read as much.
template <class WEIGHTS, int X_ROWS, int ROW_TILES, int AHEAD, int KIND>
__device__ __forceinline__ void expert_gemm(const u16* __restrict__ x, const WEIGHTS all, const u16* __restrict__ bias,
                                            const int* __restrict__ order, const int* __restrict__ tiles,
                                            u16* __restrict__ y, int tile_count, int choices, int N, int K, float limit) {
    constexpr bool GATED = KIND != PLAIN;
    constexpr int TOKEN_TILES = (X_ROWS + 7) / 8, TOKENS = TOKEN_TILES * 8, ROWS = ROW_TILES * 16, PITCH = pitch_of(ROWS);
    constexpr int OUT = GATED ? ROWS / 2 : ROWS, SUMS = SHARES * TOKENS * PITCH;
    // Of a warp, in u16 and u32.
    constexpr int HALF_X = X_ROWS < 8 ? X_ROWS * 32 : 256, X_UNITS = TOKEN_TILES * 2 * HALF_X;
    constexpr int UNITS = WEIGHTS::UNITS * 256, WORDS = WEIGHTS::WORDS * 32;
    static_assert(SHARES * 32 % OUT == 0, "a thread stores results of one feature");
    extern __shared__ float sums[];  // [2][SHARES][TOKENS][PITCH], then of TILES tiles: experts, how many pairs, which
    int* const experts = (int*)(sums + 2 * SUMS);
    int *const live_pairs = experts + TILES, *const pairs = live_pairs + TILES;  // pairs [TILES][TOKENS]
    u16* const x_rings = (u16*)(pairs + TILES * TOKENS);
    u16* const rings = x_rings + SHARES * AHEAD * X_UNITS;
    u32* const ring_words = (u32*)(rings + SHARES * AHEAD * ROW_TILES * UNITS);
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
    // Of this lane: where the next chunk is, and goes to behind it.
    const int first_x = held(warp * (AHEAD * X_UNITS) + lane * 8);
    const int first_unit = held(warp * (AHEAD * ROW_TILES * UNITS) + lane * 8);
    const int first_word = held(warp * (AHEAD * ROW_TILES * WORDS) + lane);
    int slot = 0, x_unit = first_x, unit = first_unit, word = first_word;
    auto go_on = [&] {
        end_copies();
        const bool more = ++slot < AHEAD;
        slot = more ? slot : 0;
        x_unit = more ? x_unit + X_UNITS : first_x;
        unit = more ? unit + ROW_TILES * UNITS : first_unit;
        word = more ? word + ROW_TILES * WORDS : first_word;
    };
    const int chunks = K / CHUNK, count = (chunks - warp + SHARES - 1) / SHARES;  // of the warp's share
    const int parts = (N + OUT - 1) / OUT;  // units of a tile

    wait_for_earlier_kernels();  // before weights, since which they are depends on what was chosen
    const int all_units = (order ? count_tiles(tiles, tile_count) : tile_count) * parts;
    const int first = (int)((long long)all_units * blockIdx.x / gridDim.x);
    const int units = (int)((long long)all_units * (blockIdx.x + 1) / gridDim.x) - first;
    if (units == 0) return;
    const int tile0 = first / parts, part0 = first - tile0 * parts, here = (part0 + units - 1) / parts + 1;  // tiles
    for (int i = threadIdx.x; i < here; i += SHARES * 32) experts[i] = load_route(tiles + tile0 + i);
    __syncthreads();

    // What to ask for next: weights, and x behind them.
    int left = count > 0 ? units : 0, tile_ahead = 0, part_ahead = part0, ahead = 0;
    typename WEIGHTS::template Rows<GATED ? SILU_MUL : PLAIN> rows[ROW_TILES];
    auto find = [&] {
        const WEIGHTS weights = all.from((size_t)experts[tile_ahead] * (GATED ? 2 * N : N), K);
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) rows[r].find(weights, part_ahead * OUT, r * 16, warp, N, K);
    };
    auto copy_weights = [&] {
        if (left == 0) return;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
            rows[r].copy(rings + unit + r * UNITS, ring_words + word + r * WORDS, ahead * SHARES);
        if (++ahead < count) return;
        ahead = 0;
        if (++part_ahead == parts) part_ahead = 0, ++tile_ahead;
        if (--left > 0) find();
    };
    if (left > 0) find();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s, go_on()) copy_weights();

    for (int i = threadIdx.x; i < here * X_ROWS; i += SHARES * 32) {
        const int* const tile = tiles + tile_count + tile0 + i / X_ROWS;
        const int begin = load_route(tile), live = load_route(tile + tile_count), m = i % X_ROWS;
        const int at = begin + min(m, live - 1);
        pairs[i / X_ROWS * TOKENS + m] = order ? load_route(order + at) : at;
        if (m == 0) live_pairs[i / X_ROWS] = live;
    }
    __syncthreads();
    int x_left = count > 0 ? units : 0, x_tile = 0, x_part = part0, x_ahead = 0;
    const u16* token[TOKEN_TILES];
    bool live_ahead[TOKEN_TILES];
    auto find_x = [&] {
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) {
            const int row = m * 8 + g;
            live_ahead[m] = row < X_ROWS && row < live_pairs[x_tile];
            const int pair = live_ahead[m] ? pairs[x_tile * TOKENS + row] : 0;
            token[m] = x + (size_t)(pair / choices) * K + (warp * CHUNK + t * WEIGHTS::X_LANE);
        }
    };
    auto copy_x = [&] {
        if (x_left == 0) return;
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (live_ahead[m])
                    copy_async(x_rings + x_unit + (m * 2 + j) * HALF_X, token[m] + x_ahead * STEP + j * WEIGHTS::X_HALF);
        if (++x_ahead < count) return;
        x_ahead = 0;
        --x_left;
        if (++x_part < parts) return;
        x_part = 0, ++x_tile;
        if (x_left > 0) find_x();
    };
    find_x();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s, go_on()) copy_x();

    uint4 b[TOKEN_TILES][2];
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; ++m) b[m][0] = b[m][1] = make_uint4(0, 0, 0, 0);
    int half = 0, tile = 0, part = part0;
    for (int u = 0; u < units; ++u, half ^= 1) {
        const int live = live_pairs[tile], row = threadIdx.x % OUT, n = part * OUT + row;  // n: what this thread stores
        float offset = 0.f, up_offset = 0.f;
        if (bias && n < N && threadIdx.x < OUT * live) {
            const u16* const its = bias + (size_t)experts[tile] * (GATED ? 2 * N : N) + n;
            offset = load_value(its);
            if (GATED) up_offset = load_value(its + N);
        }
        float d[ROW_TILES][TOKEN_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int m = 0; m < TOKEN_TILES; ++m) d[r][m][0] = d[r][m][1] = d[r][m][2] = d[r][m][3] = 0.f;
        for (int c = 0; c < count; ++c) {
            wait_for_copies<AHEAD - 1>();
            typename WEIGHTS::Part a[ROW_TILES];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
                rows[r].take(a[r], rings + unit + r * UNITS, ring_words + word + r * WORDS);
#pragma unroll
            for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (m * 8 + g < live) b[m][j] = load_shared(x_rings + x_unit + (m * 2 + j) * HALF_X);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    u32 top[4], bottom[4];
                    a[r].expand(j, top, bottom);
#pragma unroll
                    for (int m = 0; m < TOKEN_TILES; ++m) {
                        const uint4 in = b[m][j];
                        mma(d[r][m], top[0], bottom[0], top[1], bottom[1], in.x, in.y);
                        mma(d[r][m], top[2], bottom[2], top[3], bottom[3], in.z, in.w);
                    }
                }
            copy_weights();
            copy_x();
            go_on();
        }
        float* const parts_here = sums + half * SUMS;  // the other half may still be read
        keep_sums<ROW_TILES, TOKEN_TILES, PITCH>(d, parts_here + warp * TOKENS * PITCH);
        __syncthreads();
        const int at_row = GATED ? row / 8 * 16 + row % 8 : row;
        for (int m = threadIdx.x / OUT; m < live && n < N; m += SHARES * 32 / OUT) {
            float sum = 0.f, up = 0.f;
#pragma unroll
            for (int v = 0; v < SHARES; ++v) {
                const float* const p = parts_here + (v * TOKENS + m) * PITCH + at_row;
                sum += *p;
                if (GATED) up += p[8];
            }
            sum += offset;
            if (GATED) sum = gated<KIND>(sum, up + up_offset, limit);
            y[(size_t)pairs[tile * TOKENS + m] * N + n] = from_float(sum);
        }
        if (++part == parts) part = 0, ++tile;
    }
}

#define EXPERT_KERNEL(NAME, BLOCKS, ...)                                                                             \
    extern "C" __global__ void __launch_bounds__(SHARES * 32, BLOCKS)                                                \
        NAME(const u16* x, const void* w, const u32* scales, const u32* zeros, int rows, const u16* bias,            \
             const int* order, const int* tiles, u16* y, int tile_count, int choices, int N, int K, float limit) {   \
        expert_gemm<Weights, __VA_ARGS__>(x, Weights::of(w, scales, zeros, rows), bias, order, tiles, y, tile_count, \
                                          choices, N, K, limit);                                                     \
    }
