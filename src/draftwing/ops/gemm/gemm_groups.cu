// Follows gemm.cu: its GEMMs for weights that are stored in 4 or 8 bits, as integers or as fp8 (e4m3), with a scale for
// each group of columns of a row. A weight is (code - zero) * scale, rounded to the type of x: the bits of the result are
// those that the kernels of gemm.cu give for a matrix of these values.
//
// Weights lie in tiles of 16 features x 64 columns, one after the other along K, so that a lane finds its part of a tile
// in 16 contiguous bytes (8 bits: twice 16) and a warp reads 512. Lane g * 4 + t has of features g and g + 8 ("top" and
// "bottom") columns j * 32 + t * 8 + 0 .. 7 for j = 0 and 1, as the lanes of gemm.cu do.
//
// - 4 bits: words (top, j = 0), (bottom, j = 0), (top, j = 1), (bottom, j = 1); of a word, column 2 * n is at bit
//   FIRST + 4 * n and column 2 * n + 1 16 bits further, around its end.
// - Integers of 8 bits: for each j words top, top, bottom, bottom of four columns each. Column 2 * n is byte n, and column
//   2 * n + 1 byte n + 2. Codes count from 0.
// - fp8: the same words. Half word h has columns h and 2 + h; the first where bfloat16 has sign, exponent and mantissa,
//   the second in the bits between.
//
// A code becomes a number by its place alone: as a mantissa without exponent (8 bits of bfloat16: the least exponent has
// steps as small), or with that of fp8, whose offset is another. Scales are as much larger, 2^UNIT and 2^120 times what
// they mean, and zeros in units of codes. In bfloat16 scales of integers are less by 2^LESS, so that those beyond 1 have
// room, and with them all weights, exactly: sums have the same bits but for their exponents, and are multiplied with
// 2^LESS when they are complete.
//
// Scales and zeros: [N / 16][groups][8] pairs (of feature g and of g + 8) in the type of x. Of chunk c that is group
// c >> SHIFT, all with SHIFT = WHOLE; with SHIFT = -1 a chunk has two groups, one for each j.

#define WHOLE 20

#if TYPE_BF16
#define PAIR "bf16x2"
#define ONE 0x3f803f80
#define FIRST 0  // UNIT is 133
#define MINUS_EIGHT 0x80088008  // -8 * 2^-UNIT
#define MINUS_128 0x80808080
#define LESS 15
#define TWO_TO_LESS 0x47004700
#else
#define PAIR "f16x2"
#define ONE 0x3c003c00
#define FIRST 6  // UNIT is 18
#define MINUS_EIGHT 0x82008200
#define MINUS_128 0  // the mantissa has room, but scales have none
#define LESS 0  // there are no exponents for it
#define TWO_TO_LESS ONE
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

__device__ __forceinline__ u32 times(u32 a, u32 b) { return fma_pair(a, b, 0x80008000); }

// Weights as these are, for `gemm` and `shared_gemm` with N a multiple of 16.
template <int BITS, bool ZEROS, int SHIFT, bool INT8>
struct Groups {
    static constexpr bool TAKE_TURNS = true, GO_ON = true;
    static constexpr int POWER = BITS == 4 || INT8 ? LESS : 0;
    static constexpr int HERE = SHIFT < 0 ? 2 : 1;  // groups of a chunk
    static constexpr int UNITS = BITS / 4, WORDS = ZEROS ? 2 * HERE : HERE;
    const u16* codes;
    const u32 *scales, *zeros;

    struct Part {
        uint4 codes[BITS / 4];
        u32 scales[HERE], zeros[HERE];

        __device__ __forceinline__ void clear() {
            for (auto& v : codes) v = make_uint4(0, 0, 0, 0);
            for (auto& v : scales) v = 0;
            for (auto& v : zeros) v = 0;
        }

        __device__ __forceinline__ void expand(int j, u32 (&top)[4], u32 (&bottom)[4]) const {
            const u32 scale = scales[j % HERE], zero = ZEROS ? zeros[j % HERE] : 0;
            if constexpr (BITS == 4) {
                expand_codes(j ? codes[0].z : codes[0].x, low_twice(scale), low_twice(zero), top);
                expand_codes(j ? codes[0].w : codes[0].y, high_twice(scale), high_twice(zero), bottom);
            } else if constexpr (INT8) {
                expand_bytes(codes[j].x, codes[j].y, low_twice(scale), top);
                expand_bytes(codes[j].z, codes[j].w, high_twice(scale), bottom);
            } else {
                expand_fp8(codes[j].x, codes[j].y, low_twice(scale), top);
                expand_fp8(codes[j].z, codes[j].w, high_twice(scale), bottom);
            }
        }

        __device__ __forceinline__ static void expand_codes(u32 word, u32 scale, u32 zero, u32 (&out)[4]) {
            const u32 offset = ZEROS ? 0 : times(scale, MINUS_EIGHT);
            EACH(i, 4) {
#if TYPE_BF16  // the codes of every other pair are 16 times as large where they are
                const u32 code = (i < 2 ? word : word >> 8) & (i % 2 ? 0x00f000f0 : 0x000f000f);
                const u32 its_scale = i % 2 ? times(scale, 0x3d803d80) : scale;
                const u32 its_zero = ZEROS && i % 2 ? times(zero, 0x41804180) : zero;
#else
                const u32 code = rotate_right(word, 4 * i) & 0x03c003c0, its_scale = scale, its_zero = zero;
#endif
                // 8 * scale is exact, so the one rounding is that of the product.
                out[i] = ZEROS ? times(fma_pair(code, ONE, its_zero), its_scale) : fma_pair(code, its_scale, offset);
            }
        }

        __device__ __forceinline__ static void expand_bytes(u32 first, u32 second, u32 scale, u32 (&out)[4]) {
            const u32 words[2] = {first, second}, offset = times(scale, MINUS_128);
            EACH(i, 4) out[i] = fma_pair((i % 2 ? words[i / 2] >> 8 : words[i / 2]) & 0x00ff00ff, scale, offset);
        }

        __device__ __forceinline__ static void expand_fp8(u32 first, u32 second, u32 scale, u32 (&out)[4]) {
            const u32 words[2] = {first, second};
            EACH(i, 2) {
                out[2 * i] = times(words[i] & 0x87f087f0, scale);
                out[2 * i + 1] = times((words[i] << 4 & 0x80f080f0) | (words[i] >> 4 & 0x07000700), scale);
            }
        }
    };

    // SILU_MUL: tiles of gates and of their ups take turns.
    template <int KIND>
    struct Rows {
        const u16* codes;
        const u32 *scales, *zeros;

        // Where the groups of a chunk begin; also of a difference of chunks that is a multiple of SHARES.
        __device__ __forceinline__ static int groups(int chunk) {
            return (SHIFT < 0 ? chunk * 2 : SHIFT == WHOLE ? 0 : chunk >> SHIFT) * 8;
        }

        __device__ __forceinline__ void find(const Groups& weights, int row0, int at, int chunk, int N, int K) {
            const int lane = threadIdx.x & 31, chunks = K / CHUNK, of_tile = groups(chunks - 1) + HERE * 8;
            const int r = at / 16, last = N / 16 - 1;
            const int tile =
                KIND == SILU_MUL ? min(row0 / 16 + r / 2, last) + (r & 1) * (N / 16) : min(row0 / 16 + r, last);
            codes = weights.codes + ((size_t)tile * chunks + chunk) * (BITS * 64) + lane * 8;
            const size_t group = (size_t)tile * of_tile + groups(chunk) + (lane >> 2);
            scales = weights.scales + group;
            if (ZEROS) zeros = weights.zeros + group;
        }

        // chunk: a multiple of SHARES, or any where that of `find` was one. The last half has what both need.
        __device__ __forceinline__ void load(Part& into, int chunk, int j) const {
            if (BITS == 8) into.codes[j] = load_weight(codes + chunk * (BITS * 64) + j * 256);
            if (j == 0) return;
            if (BITS == 4) into.codes[0] = load_weight(codes + chunk * (BITS * 64));
            EACH(i, HERE) {
                into.scales[i] = load_word(scales + groups(chunk) + i * 8);
                if (ZEROS) into.zeros[i] = load_word(zeros + groups(chunk) + i * 8);
            }
        }

        __device__ __forceinline__ void copy(u16* units, u32* words, int chunk) const {
            EACH(i, UNITS) copy_async(units + i * 256, codes + chunk * (BITS * 64) + i * 256);
            EACH(i, HERE) {
                copy_word_async(words + i * 32, scales + groups(chunk) + i * 8);
                if (ZEROS) copy_word_async(words + (HERE + i) * 32, zeros + groups(chunk) + i * 8);
            }
        }

        __device__ __forceinline__ static void take(Part& into, const u16* units, const u32* words) {
            EACH(i, UNITS) into.codes[i] = load_shared(units + i * 256);
            EACH(i, HERE) {
                into.scales[i] = words[i * 32];
                if (ZEROS) into.zeros[i] = words[(HERE + i) * 32];
            }
        }

        __device__ __forceinline__ void go_on(int chunks) {
            codes += chunks * (BITS * 64);
            scales += groups(chunks);
            if (ZEROS) zeros += groups(chunks);
        }
    };
};

#define GROUP_KERNEL(NAME, THREADS, BLOCKS, CLUSTER, GEMM, ...)                                                      \
    extern "C" __global__ void CLUSTER_##CLUSTER __launch_bounds__(THREADS, BLOCKS)                                  \
        NAME(const u16* x, const u16* codes, const u32* scales, const u32* zeros, const u16* bias, const u16* extra, \
             u16* y, int M, int N, int K) {                                                                          \
        GEMM<Weights, __VA_ARGS__>(x, {codes, scales, zeros}, bias, extra, y, M, N, K);                              \
    }

// The weights [N, K] in the type of x. A warp of the 8 of a block takes UNPACK_RUN chunks of a tile of features at a time,
// whose loads are under way together; there may be any number of blocks.
#define UNPACK_RUN 4
template <class WEIGHTS>
__device__ __forceinline__ void unpack(const WEIGHTS weights, u16* __restrict__ y, int N, int K, bool in_sets) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int chunks = K / CHUNK, runs = (chunks + UNPACK_RUN - 1) / UNPACK_RUN, total = N / 16 * runs;
    for (int at = blockIdx.x * 8 + (threadIdx.x >> 5); at < total; at += gridDim.x * 8) {
        const int tile = at / runs, first = at % runs * UNPACK_RUN;
        typename WEIGHTS::template Rows<PLAIN> rows;
        rows.find(weights, tile * 16, 0, 0, N, K);
        typename WEIGHTS::Part part[UNPACK_RUN];
        EACH(r, UNPACK_RUN) EACH(j, 2) if (first + r < chunks) rows.load(part[r], first + r, j);
        EACH(r, UNPACK_RUN) {
            if (first + r >= chunks) break;
            EACH(j, 2) {
                u32 top[4], bottom[4];
                part[r].expand(j, top, bottom);
                if (WEIGHTS::POWER > 0)
                    EACH(i, 4) top[i] = times(top[i], TWO_TO_LESS), bottom[i] = times(bottom[i], TWO_TO_LESS);
                u16* const to = y + (size_t)(tile * 16 + g) * K + (first + r) * CHUNK + j * 32;
                u16* const below = to + (size_t)8 * K;
                if (in_sets) {
                    const int other = 16 + t * 4;
                    *(uint2*)(to + t * 4) = {top[0], top[1]}, *(uint2*)(to + other) = {top[2], top[3]};
                    *(uint2*)(below + t * 4) = {bottom[0], bottom[1]}, *(uint2*)(below + other) = {bottom[2], bottom[3]};
                } else {
                    *(uint4*)(to + t * 8) = make_uint4(top[0], top[1], top[2], top[3]);
                    *(uint4*)(below + t * 8) = make_uint4(bottom[0], bottom[1], bottom[2], bottom[3]);
                }
            }
        }
    }
}

#define UNPACK_KERNEL(NAME)                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 4)                                    \
        NAME(const u16* codes, const u32* scales, const u32* zeros, u16* y, int N, int K,   \
             int in_sets) {                                                                 \
        unpack<Weights>({codes, scales, zeros}, y, N, K, in_sets);                          \
    }
