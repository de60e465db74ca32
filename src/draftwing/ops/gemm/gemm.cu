// Products of a few rows with a large weight: y[M, N] = x[M, K] @ w[N, K]^T, bound by the time to read w once.
//
// Compiled at run time (nvrtc.py), with TYPE_BF16 set to 1 or 0 (half) on the command line; gemm_shared.cu and the
// kernels that cuda.py lists follow this file. K comes in chunks of 64; share v of it is chunks v, v + 8, v + 16, ...
// A share is summed in order, and then the sums of the 8 shares are: the order of all additions depends on K alone, never
// on M, so a row's result is the same bits in any batch. How the work is cut is free otherwise:
//
// - `gemm`: up to 8 rows, and more where it is not slower. A warp has a share, and x in registers.
// - `ring_gemm`: the same for weights that are few bytes. Blocks stay for many features, and read far ahead.
// - `shared_gemm`: up to 64 rows, whose x the warps of a block share by way of shared memory.
// - `wide_gemm`: the same by the tensor cores' instructions for four warps at a time.
// - `tiled_gemm`: more. Weights come by way of shared memory, too, and one read of a weight serves 128 rows.
//
// Weights are the first operand of mma.sync and, but for the last of these, go from global memory to registers without a
// stop in shared memory: in the row of a weight the order of k within a chunk is permuted, the same way as in x, so that
// each thread's part is 16 contiguous bytes.
//
// Weights are constants, so a block begins to read them while the kernel before it still runs, and only then waits for
// it (programmatic dependent launch, Hopper and later). It reads what its registers or its ring hold and no more: what is
// asked for into the L2 cache keeps the kernels before it waiting, by 3 to 10% of a step.

typedef unsigned int u32;
typedef unsigned short u16;

#define SHARES 8
#define CHUNK 64
#define STEP (SHARES * CHUNK)

#if TYPE_BF16
#define TYPE ".bf16"
#else
#define TYPE ".f16"
#endif
#define TYPES TYPE TYPE
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32" TYPES ".f32"

__device__ __forceinline__ float to_float(u16 bits) {
#if TYPE_BF16
    return __uint_as_float((u32)bits << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
#endif
}

__device__ __forceinline__ u16 from_float(float f) {
    u16 bits;
#if TYPE_BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
#endif
    return bits;
}

// a / b, as a compiler of kernels that are not in CUDA divides.
__device__ __forceinline__ float quotient(float a, float b) {
    float f;
    asm("div.full.f32 %0, %1, %2;" : "=f"(f) : "f"(a), "f"(b));
    return f;
}

// a * b of numbers of 16 bits, rounded to them.
__device__ __forceinline__ float product(u16 a, u16 b) {
#if TYPE_BF16 && __CUDA_ARCH__ < 900
    return to_float(from_float(to_float(a) * to_float(b)));
#else
    u16 bits;
    asm("mul" TYPE " %0, %1, %2;" : "=h"(bits) : "h"(a), "h"(b));
    return to_float(bits);
#endif
}

// Volatile, and not by way of .nc, which ptxas moves behind griddepcontrol.wait: what is read ahead must stay ahead of it.
__device__ __forceinline__ uint4 load_weight(const u16* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ uint4 load_x(const u16* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Not by way of .nc either, which the compiler chooses for a restricted pointer: an earlier kernel may have written this
// while the block was already up.
__device__ __forceinline__ float load_value(const u16* p) {
    u16 bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(p));
    return to_float(bits);
}

__device__ __forceinline__ uint4 load_shared(const u16* p) { return *(const uint4*)p; }

// 16 bytes from global to shared memory, past the registers; zeros if not `there`. Copies that `end_copies` ended are a
// group; `wait_for_copies` waits until no more than LEFT groups are under way.
__device__ __forceinline__ void copy_async(u16* to, const u16* from, bool there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_word_async(u32* to, const u32* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Waits for all threads of the cluster, and makes what they wrote to shared memory visible to each other. Clusters, here
// and below: compute capability 9.0 and later.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What `p` points to in the shared memory of this rank's block.
__device__ __forceinline__ float load_from_rank(const float* p, int rank) {
    float f;
    asm volatile("{.reg .u32 at; mapa.shared::cluster.u32 at, %1, %2; ld.shared::cluster.f32 %0, [at];}"
                 : "=f"(f)
                 : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank)
                 : "memory");
    return f;
}

// Instructions of a warp group (wgmma) between these two are one group of them.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until no more than LEFT groups are under way.
template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// What this thread wrote to shared memory becomes visible to such instructions and to bulk copies, behind a barrier.
__device__ __forceinline__ void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps the compiler from computing a number anew wherever it is used.
__device__ __forceinline__ int held(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

enum { PLAIN = 0, ADD = 1, SILU_MUL = 2 };

// A loop that is unrolled.
#define EACH(i, COUNT) _Pragma("unroll") for (int i = 0; i < (COUNT); ++i)

// No two lanes of a warp that stores a tile meet in a bank; of 16 features, which cuda.py wants small, two do.
__device__ constexpr int pitch_of(int rows) { return rows > 16 ? rows + 4 : rows + 2; }

// Sums of a warp, of ROW_TILES times 16 features and TOKEN_TILES times 8 rows of x.
template <int ROW_TILES, int TOKEN_TILES>
__device__ __forceinline__ void clear_sums(float (&d)[ROW_TILES][TOKEN_TILES][4]) {
    EACH(r, ROW_TILES) EACH(m, TOKEN_TILES) d[r][m][0] = d[r][m][1] = d[r][m][2] = d[r][m][3] = 0.f;
}

// Those of a share, and of the shares before it.
template <int ROW_TILES, int TOKEN_TILES>
__device__ __forceinline__ void clear_sums(float (&d)[ROW_TILES][TOKEN_TILES][4],
                                           float (&sum)[ROW_TILES][TOKEN_TILES][4]) {
    EACH(r, ROW_TILES) EACH(m, TOKEN_TILES) EACH(i, 4) d[r][m][i] = sum[r][m][i] = 0.f;
}

// A share ends: its sums are added to those of the shares before it.
template <int ROW_TILES, int TOKEN_TILES>
__device__ __forceinline__ void add_share(float (&sum)[ROW_TILES][TOKEN_TILES][4],
                                          float (&d)[ROW_TILES][TOKEN_TILES][4]) {
    EACH(r, ROW_TILES) EACH(m, TOKEN_TILES) EACH(i, 4) {
        sum[r][m][i] += d[r][m][i];
        d[r][m][i] = 0.f;
    }
}

// Half a chunk: 32 columns, of which a lane has 8 in pairs.
__device__ __forceinline__ void mma_half(float (&d)[4], const u32 (&top)[4], const u32 (&bottom)[4], const uint4& in) {
    mma(d, top[0], bottom[0], top[1], bottom[1], in.x, in.y);
    mma(d, top[2], bottom[2], top[3], bottom[3], in.z, in.w);
}

// d, sums of a warp, whose tiles are the `first` one and those APART further -> sums [tokens][pitch_of(rows)]. TAKE_TURNS:
// even tiles are gates and odd ones their ups, which come out as `store_results` wants them, 8 rows of each in turn.
template <int ROW_TILES, int TOKEN_TILES, int PITCH, bool TAKE_TURNS = false, int APART = 1>
__device__ __forceinline__ void keep_sums(const float (&d)[ROW_TILES][TOKEN_TILES][4], float* sums, int first = 0) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    EACH(r, ROW_TILES) EACH(m, TOKEN_TILES) EACH(i, 4) {
        const int its = first + r * APART;
        const int row = TAKE_TURNS ? its / 2 * 32 + its % 2 * 8 + (i >> 1) * 16 : its * 16 + (i >> 1) * 8;
        sums[(m * 8 + t * 2 + (i & 1)) * PITCH + row + g] = d[r][m][i];
    }
}

// Words of a lane's part of x, in the order of `wide_mma`: APART words from one matrix to the next.
template <int APART>
__device__ __forceinline__ void place_x(u32* to, const uint4& in) {
    to[0] = in.x, to[APART] = in.y, to[2 * APART] = in.z, to[3 * APART] = in.w;
}

__device__ __forceinline__ float rounded(float f) { return to_float(from_float(f)); }

// silu(gate) * up. Both are rounded before, and silu(gate) is: the bits of ops/elementwise/triton.py, which makes gates of
// products to which something was added.
__device__ __forceinline__ float silu_times(float gate, float up) {
    const float g = rounded(gate);
    return product(from_float(quotient(g, 1.f + __expf(-g))), from_float(up));
}

// sums [PARTS][TOKENS][pitch_of(ROWS)] in each block of a cluster, by all its threads -> y. POWER: of 2, by which weights
// were smaller.
template <int POWER, int PARTS, int CLUSTER, int ROWS, int TOKENS, int THREADS, int KIND>
__device__ __forceinline__ void store_results(const float* sums, const u16* __restrict__ bias,
                                              const u16* __restrict__ extra, u16* __restrict__ y, int row0, int token0,
                                              int M, int N) {
    constexpr int PITCH = pitch_of(ROWS), OUT = KIND == SILU_MUL ? ROWS / 2 : ROWS;
    // Left to itself, the compiler gives some of these GEMMs 8 to 15 registers more than they need, by dtype.
    constexpr int UNROLL = KIND == SILU_MUL && OUT * TOKENS <= CLUSTER * THREADS ? 1 : 2;
    const int first = blockIdx.x % CLUSTER * THREADS + threadIdx.x;
#pragma unroll UNROLL
    for (int i = first; i < OUT * TOKENS; i += CLUSTER * THREADS) {
        const int row = i % OUT, m = i / OUT, n = row0 + row, token_at = token0 + m;
        if (n >= N || token_at >= M) continue;
        const int at_row = KIND == SILU_MUL ? row / 8 * 16 + row % 8 : row;
        const size_t at = (size_t)token_at * N + n;
        const float before = KIND == ADD ? load_value(extra + at) : 0.f;
        float part[CLUSTER * PARTS], up_part[CLUSTER * PARTS];
        EACH(v, CLUSTER * PARTS) {
            const float* const p = sums + (v % PARTS * TOKENS + m) * PITCH + at_row;
            if constexpr (CLUSTER > 1) {
                part[v] = load_from_rank(p, v / PARTS);
                if (KIND == SILU_MUL) up_part[v] = load_from_rank(p + 8, v / PARTS);
            } else {
                part[v] = *p;
                if (KIND == SILU_MUL) up_part[v] = p[8];
            }
        }
        float sum = 0.f, up = 0.f;
        EACH(v, CLUSTER * PARTS) {
            sum += part[v];
            if (KIND == SILU_MUL) up += up_part[v];
        }
        if (POWER > 0) sum *= (float)(1 << POWER), up *= (float)(1 << POWER);
        if (bias) {
            sum += to_float(bias[n]);
            if (KIND == SILU_MUL) up += to_float(bias[N + n]);
        }
        if (KIND == ADD) sum += before;
        if (KIND == SILU_MUL) sum = silu_times(sum, up);
        y[at] = from_float(sum);
    }
}

// The end of a block: d, sums of a warp, which it keeps `own` floats behind `sums`, -> y, as `store_results` has it.
template <class WEIGHTS, int PARTS, int CLUSTER, int ROWS, int TOKENS, int THREADS, int KIND, int ROW_TILES,
          int TOKEN_TILES>
__device__ __forceinline__ void finish(const float (&d)[ROW_TILES][TOKEN_TILES][4], float* sums, int own,
                                       const u16* __restrict__ bias, const u16* __restrict__ extra,
                                       u16* __restrict__ y, int row0, int token0, int M, int N) {
    keep_sums<ROW_TILES, TOKEN_TILES, pitch_of(ROWS), WEIGHTS::TAKE_TURNS && KIND == SILU_MUL>(d, sums + own);
    if constexpr (CLUSTER > 1) sync_cluster();
    else __syncthreads();
    store_results<WEIGHTS::POWER, PARTS, CLUSTER, ROWS, TOKENS, THREADS, KIND>(sums, bias, extra, y, row0, token0, M, N);
    if constexpr (CLUSTER > 1) sync_cluster();  // nobody ends while others read what it has
}

// With these cuda.py lists the kernels. GEMM: a template, and behind it what it is called with.
#define CLUSTER_1
#define CLUSTER_2 __cluster_dims__(2, 1, 1)
#define CLUSTER_4 __cluster_dims__(4, 1, 1)
#define CLUSTER_8 __cluster_dims__(8, 1, 1)
#define KERNEL(NAME, THREADS, BLOCKS, CLUSTER, GEMM, ...)                                                  \
    extern "C" __global__ void CLUSTER_##CLUSTER __launch_bounds__(THREADS, BLOCKS)                        \
        NAME(const u16* x, const u16* w, const u16* bias, const u16* extra, u16* y, int M, int N, int K) { \
        GEMM<Stored, __VA_ARGS__>(x, {w}, bias, extra, y, M, N, K);                                        \
    }

// Weights in the type of x. A kind of weights has a `Part`, what a lane has of a tile of 16 features and a chunk, and
// `Rows`, where it finds that of a tile.
struct Stored {
    static constexpr bool TAKE_TURNS = false;
    static constexpr int POWER = 0;
    static constexpr bool GO_ON = false;  // pointers move in a loop: fewer instructions, which are not what it waits for
    static constexpr int UNITS = 4, WORDS = 0;  // a lane's part in shared memory, of 16 and of 4 bytes
    const u16* w;

    struct Part {
        uint4 v[2][2];  // by half of the chunk, for features g and g + 8

        __device__ __forceinline__ void clear() { v[0][0] = v[0][1] = v[1][0] = v[1][1] = make_uint4(0, 0, 0, 0); }

        // The weights of 8 columns, in pairs, of features g (top) and g + 8.
        __device__ __forceinline__ void expand(int j, u32 (&top)[4], u32 (&bottom)[4]) const {
            top[0] = v[j][0].x, top[1] = v[j][0].y, top[2] = v[j][0].z, top[3] = v[j][0].w;
            bottom[0] = v[j][1].x, bottom[1] = v[j][1].y, bottom[2] = v[j][1].z, bottom[3] = v[j][1].w;
        }
    };

    template <int KIND>
    struct Rows {
        const u16* row[2];

        // Of the tile `at` features behind row0. Chunks count from `chunk` on.
        template <class INDEX>  // the width that a kernel's other offsets have
        __device__ __forceinline__ void find(const Stored& weights, int row0, int at, INDEX chunk, int N, int K) {
            const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
            EACH(half, 2) {
                // SILU_MUL: a tile is 8 gates and, below them, the 8 ups that belong to them.
                const int n =
                    KIND == SILU_MUL ? min(row0 + at / 2 + g, N - 1) + half * N : min(row0 + at + half * 8 + g, N - 1);
                row[half] = weights.w + (size_t)n * K + (chunk * CHUNK + t * 8);
            }
        }

        // Half j of a chunk.
        __device__ __forceinline__ void load(Part& into, int chunk, int j) const {
            EACH(half, 2) into.v[j][half] = load_weight(row[half] + chunk * CHUNK + j * 32);
        }

        // A chunk to shared memory, where the lanes of a warp have their units and words side by side; and from there.
        __device__ __forceinline__ void copy(u16* units, u32* words, int chunk) const {
            EACH(i, 4) copy_async(units + i * 256, row[i % 2] + chunk * CHUNK + i / 2 * 32);
        }

        __device__ __forceinline__ static void take(Part& into, const u16* units, const u32* words) {
            EACH(i, 4) into.v[i / 2][i % 2] = load_shared(units + i * 256);
        }
    };
};

// What a GEMM is given.
#define OPERANDS                                                                                                   \
    const u16 *__restrict__ x, const WEIGHTS weights, const u16 *__restrict__ bias, const u16 *__restrict__ extra, \
        u16 *__restrict__ y, int M, int N, int K

// PLAIN: y = x w^T (+ bias).  ADD: y = x w^T (+ bias) + extra.  SILU_MUL: w is [2 * N, K], gates before ups, and
// y = silu(gate) * up.  TOKEN_TILES * 8 rows of x a block (blockIdx.y picks them), AHEAD chunks of weights and X_AHEAD of x
// in flight.
template <class WEIGHTS, int TOKEN_TILES, int ROW_TILES, int AHEAD, int X_AHEAD, int KIND>
__device__ __forceinline__ void gemm(OPERANDS) {
    static_assert(AHEAD % X_AHEAD == 0, "a chunk of x is in the same registers in every round");
    constexpr int TOKENS = TOKEN_TILES * 8, ROWS = ROW_TILES * 16, PITCH = pitch_of(ROWS);
    extern __shared__ float sums[];  // [SHARES][TOKENS][PITCH]
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = K / CHUNK, count = (chunks - warp + SHARES - 1) / SHARES;  // of the warp's share
    const int row0 = blockIdx.x * (KIND == SILU_MUL ? ROWS / 2 : ROWS), token0 = blockIdx.y * TOKENS;
    const size_t k0 = (size_t)warp * CHUNK + t * 8;

    typename WEIGHTS::template Rows<KIND> rows[ROW_TILES];
    EACH(r, ROW_TILES) rows[r].find(weights, row0, r * 16, (size_t)warp, N, K);
    typename WEIGHTS::Part a[AHEAD][ROW_TILES];
    EACH(p, AHEAD)
        if (p < count)
            EACH(r, ROW_TILES) EACH(j, 2) rows[r].load(a[p][r], p * SHARES, j);

    wait_for_earlier_kernels();
    const u16* token[TOKEN_TILES];
    bool live[TOKEN_TILES];
    EACH(m, TOKEN_TILES) {
        const int row = token0 + m * 8 + g;
        live[m] = row < M;
        token[m] = x + (size_t)min(row, M - 1) * K + k0;
    }
    uint4 b[X_AHEAD][TOKEN_TILES][2];
    EACH(p, X_AHEAD) EACH(m, TOKEN_TILES) EACH(j, 2) {
        b[p][m][j] = make_uint4(0, 0, 0, 0);
        if (p < count && live[m]) b[p][m][j] = load_x(token[m] + p * STEP + j * 32);
    }

    float d[ROW_TILES][TOKEN_TILES][4];
    clear_sums(d);

    for (int c = 0; c < count; c += AHEAD) {
        const int come = WEIGHTS::GO_ON ? 0 : c;  // from where the pointers are
        EACH(p, AHEAD) {
            if (c + p < count) {
                const int q = p % X_AHEAD;
                EACH(r, ROW_TILES) EACH(j, 2) {
                    u32 top[4], bottom[4];
                    a[p][r].expand(j, top, bottom);
                    EACH(m, TOKEN_TILES) mma_half(d[r][m], top, bottom, b[q][m][j]);
                }
                if (c + p + AHEAD < count)
                    EACH(r, ROW_TILES) EACH(j, 2) rows[r].load(a[p][r], (come + p + AHEAD) * SHARES, j);
                if (c + p + X_AHEAD < count)
                    EACH(m, TOKEN_TILES) EACH(j, 2)
                        if (live[m]) b[q][m][j] = load_x(token[m] + (come + p + X_AHEAD) * STEP + j * 32);
            }
        }
        if constexpr (WEIGHTS::GO_ON) {
            EACH(r, ROW_TILES) rows[r].go_on(AHEAD * SHARES);
            EACH(m, TOKEN_TILES) token[m] += AHEAD * STEP;
        }
    }

    finish<WEIGHTS, SHARES, 1, ROWS, TOKENS, SHARES * 32, KIND>(d, sums, warp * TOKENS * PITCH, bias, extra, y, row0,
                                                                token0, M, N);
}
