// Follows gemm.cu: the same GEMMs for weights that are stored in 4 bits or as fp8 (e4m3), with a scale for each group of
// columns of a row. A weight is (code - zero) * scale, rounded to the type of x: the bits of the result are those that
// the kernels of gemm.cu give for a matrix of these values.
//
// Weights lie in tiles of 16 features x 64 columns, one after the other along K, so that a lane finds its part of a tile
// in 16 contiguous bytes (fp8: twice 16) and a warp reads 512. Lane g * 4 + t has of features g and g + 8 ("top" and
// "bottom") columns j * 32 + t * 8 + 0 .. 7 for j = 0 and 1, as the lanes of gemm.cu do.
//
// - 4 bits: words (top, j = 0), (bottom, j = 0), (top, j = 1), (bottom, j = 1); of a word, column 2 * n is at bit
//   FIRST + 4 * n and column 2 * n + 1 16 bits further, around its end.
// - fp8: for each j words top, top, bottom, bottom of four columns each. Half word h has columns h and 2 + h; the first
//   where bfloat16 has sign, exponent and mantissa, the second in the bits between.
//
// A code becomes a number by its place alone: as a mantissa without exponent, or with that of fp8, whose offset is
// another. Scales are as much larger, 2^UNIT and 2^120 times what they mean, and zeros in units of codes.
//
// Scales and zeros: [N / 16][groups][8] pairs (of feature g and of g + 8) in the type of x. Of chunk c that is group
// c >> SHIFT, all with SHIFT = WHOLE; with SHIFT = -1 a chunk has two groups, one for each j.

#define WHOLE 20

#if TYPE_BF16
#define PAIR "bf16x2"
#define ONE 0x3f803f80
#define FIRST 3  // UNIT is 130
#define CODES 0x00780078
#define MINUS_EIGHT 0x80408040  // -8 * 2^-UNIT
#else
#define PAIR "f16x2"
#define ONE 0x3c003c00
#define FIRST 6  // UNIT is 18
#define CODES 0x03c003c0
#define MINUS_EIGHT 0x82008200
#endif

// Of two values each, rounded once; small numbers without an exponent count.
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Volatile for the reason that `load_weight` has.
__device__ __forceinline__ u32 load_word(const u32* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 low_twice(u32 pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ __forceinline__ u32 high_twice(u32 pair) { return __byte_perm(pair, 0, 0x3232); }
__device__ __forceinline__ u32 rotate_right(u32 word, int bits) { return __funnelshift_r(word, word, bits); }

// The same in all threads of the warp, which the compiler does not see of threadIdx.
__device__ __forceinline__ int of_warp(int value) { return __shfl_sync(~0u, value, 0); }

__device__ __forceinline__ u32 times(u32 a, u32 b) { return fma_pair(a, b, 0x80008000); }

// A lane's part of a tile.
template <int BITS, bool ZEROS, int SHIFT>
struct Part {
    static constexpr int GROUPS_HERE = SHIFT < 0 ? 2 : 1;
    uint4 codes[BITS / 4];
    u32 scales[GROUPS_HERE], zeros[GROUPS_HERE];

    __device__ __forceinline__ void clear() {
        for (auto& v : codes) v = make_uint4(0, 0, 0, 0);
        for (auto& v : scales) v = 0;
        for (auto& v : zeros) v = 0;
    }

    // The weights of 8 columns, in pairs: j picks the columns, `bottom` the feature.
    __device__ __forceinline__ void expand(int j, bool bottom, u32 (&out)[4]) const {
        const int group = SHIFT < 0 ? j : 0;
        const u32 scale = bottom ? high_twice(scales[group]) : low_twice(scales[group]);
        if constexpr (BITS == 4) {
            const u32 word = j ? bottom ? codes[0].w : codes[0].z : bottom ? codes[0].y : codes[0].x;
            if constexpr (ZEROS) {
                const u32 zero = bottom ? high_twice(zeros[group]) : low_twice(zeros[group]);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    out[i] = times(fma_pair(rotate_right(word, 4 * i) & CODES, ONE, zero), scale);
            } else {  // 8 * scale is exact, so the one rounding is that of the product
                const u32 offset = times(scale, MINUS_EIGHT);
#pragma unroll
                for (int i = 0; i < 4; ++i) out[i] = fma_pair(rotate_right(word, 4 * i) & CODES, scale, offset);
            }
        } else {
            const u32 words[2] = {bottom ? codes[j].z : codes[j].x, bottom ? codes[j].w : codes[j].y};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                out[2 * i] = times(words[i] & 0x87f087f0, scale);
                out[2 * i + 1] = times((words[i] << 4 & 0x80f080f0) | (words[i] >> 4 & 0x07000700), scale);
            }
        }
    }
};

// Where a lane finds its parts of a tile of 16 features, from one chunk on.
template <int BITS, bool ZEROS, int SHIFT>
struct Features {
    const u16* codes;
    const u32 *scales, *zeros;

    // Where the groups of a chunk begin; also of a difference of chunks that is a multiple of SHARES.
    __device__ __forceinline__ static int groups(int chunk) {
        return (SHIFT < 0 ? chunk * 2 : SHIFT == WHOLE ? 0 : chunk >> SHIFT) * 8;
    }

    __device__ __forceinline__ void at(const u16* all, const u32* all_scales, const u32* all_zeros, int tile, int chunk,
                                       int K) {
        const int lane = threadIdx.x & 31, chunks = K / CHUNK, of_tile = groups(chunks - 1) + (SHIFT < 0 ? 16 : 8);
        codes = all + ((size_t)tile * chunks + chunk) * (BITS * 64) + lane * 8;
        const size_t group = (size_t)tile * of_tile + groups(chunk) + (lane >> 2);
        scales = all_scales + group;
        if (ZEROS) zeros = all_zeros + group;
    }

    // Of the chunk that is so much further; a multiple of SHARES, or the first is chunk 0.
    __device__ __forceinline__ void load(Part<BITS, ZEROS, SHIFT>& into, int further) const {
#pragma unroll
        for (int q = 0; q < BITS / 4; ++q) into.codes[q] = load_weight(codes + further * (BITS * 64) + q * 256);
#pragma unroll
        for (int i = 0; i < (SHIFT < 0 ? 2 : 1); ++i) {
            into.scales[i] = load_word(scales + groups(further) + i * 8);
            if (ZEROS) into.zeros[i] = load_word(zeros + groups(further) + i * 8);
        }
    }

    __device__ __forceinline__ void advance(int further) {
        codes += further * (BITS * 64);
        scales += groups(further);
        if (ZEROS) zeros += groups(further);
    }
};

// Tile r of those that begin at feature row0. SILU_MUL: tiles of gates and of their ups take turns.
template <int KIND>
__device__ __forceinline__ int tile_at(int row0, int r, int N) {
    const int last = N / 16 - 1;
    return KIND == SILU_MUL ? min(row0 / 16 + r / 2, last) + (r & 1) * (N / 16) : min(row0 / 16 + r, last);
}

#define GROUP_ARGS                                                                                  \
    const u16 *__restrict__ x, const u16 *__restrict__ w, const u32 *__restrict__ scales,           \
        const u32 *__restrict__ zeros, const u16 *__restrict__ bias, const u16 *__restrict__ extra, \
        u16 *__restrict__ y, int M, int N, int K

#define GROUP_KERNEL(NAME, THREADS, BLOCKS, CLUSTER, GEMM, ...)                                        \
    extern "C" __global__ void CLUSTER_##CLUSTER __launch_bounds__(THREADS, BLOCKS) NAME(GROUP_ARGS) { \
        GEMM<__VA_ARGS__>(x, w, scales, zeros, bias, extra, y, M, N, K);                               \
    }

// As `gemm`, with N a multiple of 16.
template <int BITS, bool ZEROS, int SHIFT, int TOKEN_TILES, int ROW_TILES, int AHEAD, int X_AHEAD, int KIND>
__device__ __forceinline__ void group_gemm(GROUP_ARGS) {
    static_assert(AHEAD % X_AHEAD == 0, "a chunk of x is in the same registers in every round");
    static_assert(KIND != SILU_MUL || ROW_TILES % 2 == 0, "gates and ups take turns");
    constexpr int TOKENS = TOKEN_TILES * 8, ROWS = ROW_TILES * 16, PITCH = pitch_of(ROWS);
    extern __shared__ float sums[];  // [SHARES][TOKENS][PITCH]
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = of_warp(threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
    const int chunks = K / CHUNK, count = (chunks - warp + SHARES - 1) / SHARES;  // of the warp's share
    const int row0 = blockIdx.x * (KIND == SILU_MUL ? ROWS / 2 : ROWS), token0 = blockIdx.y * TOKENS;

    Features<BITS, ZEROS, SHIFT> features[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) features[r].at(w, scales, zeros, tile_at<KIND>(row0, r, N), warp, K);
    Part<BITS, ZEROS, SHIFT> a[AHEAD][ROW_TILES];
#pragma unroll
    for (int p = 0; p < AHEAD; ++p)
        if (p < count)
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) features[r].load(a[p][r], p * SHARES);

    wait_for_earlier_kernels();
    const u16* token[TOKEN_TILES];
    bool live[TOKEN_TILES];
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; ++m) {
        const int row = token0 + m * 8 + g;
        live[m] = row < M;
        token[m] = x + (size_t)min(row, M - 1) * K + warp * CHUNK + t * 8;
    }
    uint4 b[X_AHEAD][TOKEN_TILES][2];
#pragma unroll
    for (int p = 0; p < X_AHEAD; ++p)
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                b[p][m][j] = make_uint4(0, 0, 0, 0);
                if (p < count && live[m]) b[p][m][j] = load_x(token[m] + p * STEP + j * 32);
            }

    float d[ROW_TILES][TOKEN_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) d[r][m][0] = d[r][m][1] = d[r][m][2] = d[r][m][3] = 0.f;

    for (int c = 0; c < count; c += AHEAD) {
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) {
            if (c + p < count) {
                const int q = p % X_AHEAD;
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        u32 top[4], bottom[4];
                        a[p][r].expand(j, false, top);
                        a[p][r].expand(j, true, bottom);
#pragma unroll
                        for (int m = 0; m < TOKEN_TILES; ++m) {
                            const uint4 in = b[q][m][j];
                            mma(d[r][m], top[0], bottom[0], top[1], bottom[1], in.x, in.y);
                            mma(d[r][m], top[2], bottom[2], top[3], bottom[3], in.z, in.w);
                        }
                    }
                    if (c + p + AHEAD < count) features[r].load(a[p][r], (p + AHEAD) * SHARES);
                }
                if (c + p + X_AHEAD < count)
#pragma unroll
                    for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
                        for (int j = 0; j < 2; ++j)
                            if (live[m]) b[q][m][j] = load_x(token[m] + (p + X_AHEAD) * STEP + j * 32);
            }
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) features[r].advance(AHEAD * SHARES);
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) token[m] += AHEAD * STEP;
    }

    keep_sums<ROW_TILES, TOKEN_TILES, PITCH, KIND == SILU_MUL>(d, sums + warp * TOKENS * PITCH);
    __syncthreads();
    store_results<SHARES, 1, ROWS, TOKENS, SHARES * 32, KIND>(sums, bias, extra, y, row0, token0, M, N);
}

// As `shared_gemm`, with N a multiple of 16.
template <int BITS, bool ZEROS, int SHIFT, int TOKEN_TILES, int WARPS_F, int WARPS_K, int ROW_TILES, int AHEAD,
          int STAGES, int CLUSTER, int KIND>
__device__ __forceinline__ void shared_group_gemm(GROUP_ARGS) {
    static_assert(KIND != SILU_MUL || ROW_TILES % 2 == 0, "gates and ups take turns");
    constexpr int TOKENS = TOKEN_TILES * 8, ROWS = WARPS_F * ROW_TILES * 16, PITCH = pitch_of(ROWS);
    constexpr int THREADS = WARPS_F * WARPS_K * 32;
    constexpr bool ONE_PART = WARPS_K * CLUSTER == 1;
    static_assert(ONE_PART || WARPS_K * CLUSTER == SHARES, "a warp sums one share, or all");
    constexpr int PART = TOKENS * CHUNK, STAGE = WARPS_K * PART;  // of x, u16
    extern __shared__ float sums[];  // first [STAGES][STAGE] of u16, then [WARPS_K][TOKENS][PITCH]
    u16* const stages = (u16*)sums;
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = of_warp(threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
    const int part = WARPS_K > 1 ? warp / WARPS_F : 0, warp_tile = warp % WARPS_F * ROW_TILES;
    const int row0 = blockIdx.x / CLUSTER * (KIND == SILU_MUL ? ROWS / 2 : ROWS), token0 = blockIdx.y * TOKENS;
    const int chunks = K / CHUNK, first = blockIdx.x % CLUSTER * WARPS_K;
    const int rounds = ONE_PART ? chunks : (chunks - first + SHARES - 1) / SHARES;
    auto after = [&](int c) {  // as in `shared_gemm`
        if (!ONE_PART || c + SHARES < chunks) return c + SHARES;
        return c < chunks && c % SHARES + 1 < SHARES ? c % SHARES + 1 : chunks;
    };

    Features<BITS, ZEROS, SHIFT> features[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) features[r].at(w, scales, zeros, tile_at<KIND>(row0, warp_tile + r, N), 0, K);
    Part<BITS, ZEROS, SHIFT> a[AHEAD][ROW_TILES];
    auto load_weights = [&](Part<BITS, ZEROS, SHIFT>(&into)[ROW_TILES], int c) {
        if (c + part < chunks)
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) features[r].load(into[r], c + part);
    };
    int weights_ahead = first, x_ahead = first;  // of the round to ask for next
    for (auto& chunk : a)                        // where a part has no chunk left, x is zeros, and this must be numbers
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) chunk[r].clear();
#pragma unroll
    for (int p = 0; p < AHEAD; ++p, weights_ahead = after(weights_ahead)) load_weights(a[p], weights_ahead);

    wait_for_earlier_kernels();
    constexpr int UNITS = STAGE / (32 * 8), COPIES = (UNITS + THREADS / 32 - 1) / (THREADS / 32);
    constexpr bool EVEN = UNITS % (THREADS / 32) == 0;
    const u16* from[COPIES];
    bool live[COPIES];
#pragma unroll
    for (int q = 0; q < COPIES; ++q) {  // this lane's unit of half u % 2 of a chunk, of 8 rows, of one part
        const int u = warp + q * (THREADS / 32), row = token0 + u / 2 % TOKEN_TILES * 8 + g;
        live[q] = row < M && u < UNITS;
        from[q] = x + (size_t)row * K + u / 2 / TOKEN_TILES * CHUNK + u % 2 * 32 + t * 8;
    }
    auto copy_x = [&](int stage) {
#pragma unroll
        for (int q = 0; q < COPIES; ++q) {
            const int u = warp + q * (THREADS / 32);
            const bool there = live[q] && x_ahead + u / 2 / TOKEN_TILES < chunks;
            if (EVEN || u < UNITS)
                copy_async(stages + stage * STAGE + (u * 32 + lane) * 8, from[q] + x_ahead * CHUNK, there);
        }
        x_ahead = after(x_ahead);
        end_copies();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) copy_x(s);

    float d[ROW_TILES][TOKEN_TILES][4], sum[ROW_TILES][TOKEN_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) d[r][m][i] = sum[r][m][i] = 0.f;

    int c = first, stage = 0;
    for (int i = 0; i < rounds; i += AHEAD) {
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) {
            if (i + p >= rounds) break;
            const int next = stage + 1 < STAGES ? stage + 1 : 0;
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // the chunk is there for all, and nobody reads the one that is overwritten now
            copy_x(stage > 0 ? stage - 1 : STAGES - 1);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 top[ROW_TILES][4], bottom[ROW_TILES][4];
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    a[p][r].expand(j, false, top[r]);
                    a[p][r].expand(j, true, bottom[r]);
                }
#pragma unroll
                for (int m = 0; m < TOKEN_TILES; ++m) {
                    const int u = (part * TOKEN_TILES + m) * 2 + j;
                    const uint4 in = load_shared(stages + stage * STAGE + (u * 32 + lane) * 8);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) {
                        mma(d[r][m], top[r][0], bottom[r][0], top[r][1], bottom[r][1], in.x, in.y);
                        mma(d[r][m], top[r][2], bottom[r][2], top[r][3], bottom[r][3], in.z, in.w);
                    }
                }
            }
            load_weights(a[p], weights_ahead);
            if (ONE_PART && c + SHARES >= chunks)  // a share ends here
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                    for (int m = 0; m < TOKEN_TILES; ++m)
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            sum[r][m][k] += d[r][m][k];
                            d[r][m][k] = 0.f;
                        }
            c = after(c);
            weights_ahead = after(weights_ahead);
            stage = next;
        }
    }

    wait_for_copies<0>();
    __syncthreads();
    keep_sums<ROW_TILES, TOKEN_TILES, PITCH, KIND == SILU_MUL>(ONE_PART ? sum : d,
                                                               sums + part * TOKENS * PITCH + warp_tile * 16);
    if constexpr (CLUSTER > 1) sync_cluster();
    else __syncthreads();
    store_results<WARPS_K, CLUSTER, ROWS, TOKENS, THREADS, KIND>(sums, bias, extra, y, row0, token0, M, N);
    if constexpr (CLUSTER > 1) sync_cluster();  // nobody ends while others read what it has
}

// The weights [N, K] in the type of x. A block of 8 warps has a tile of features (blockIdx.x) and 8 chunks (blockIdx.y).
template <int BITS, bool ZEROS, int SHIFT>
__device__ __forceinline__ void unpack(const u16* __restrict__ w, const u32* __restrict__ scales,
                                       const u32* __restrict__ zeros, u16* __restrict__ y, int K) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, chunk = blockIdx.y * 8 + (threadIdx.x >> 5);
    if (chunk >= K / CHUNK) return;
    Features<BITS, ZEROS, SHIFT> features;
    features.at(w, scales, zeros, blockIdx.x, 0, K);
    Part<BITS, ZEROS, SHIFT> part;
    features.load(part, chunk);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 out[4];
            part.expand(j, half, out);
            *(uint4*)(y + (size_t)(blockIdx.x * 16 + half * 8 + g) * K + chunk * CHUNK + j * 32 + t * 8) =
                make_uint4(out[0], out[1], out[2], out[3]);
        }
}

#define UNPACK_KERNEL(NAME, ...)                                                 \
    extern "C" __global__ void __launch_bounds__(256)                            \
        NAME(const u16* w, const u32* scales, const u32* zeros, u16* y, int K) { \
        unpack<__VA_ARGS__>(w, scales, zeros, y, K);                             \
    }
