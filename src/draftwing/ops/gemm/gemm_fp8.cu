// Follows gemm.cu, gemm_bulk.cu and gemm_wgmma.cu: products of fp8 (e4m3) with fp8, with scales of 128 columns (wgmma,
// compute capability 9.0 alone). For any number of rows; gemm_fp8_many.cu is faster for many. Up to 128 rows take the
// time to read the weights.
//
// Both operands come as they lie in global memory (ops/fp8/spec.py): of 128 columns all rows, in the order in which
// 128-byte swizzling reads them. A stage is 128 columns: a copy or two of weights and one of x. What tensor cores sum of
// 128 columns is multiplied with both scales before it is added.

typedef unsigned char Fp8;

#define WIDE 128     // columns of a stage, and of a scale
#define TALL 16      // features of a scale
#define CONSUMERS 256  // threads of two warp groups; a thread behind them asks for copies

struct Fp8Task {
    const Fp8* x;           // [K / 128][padded][128]
    const float* x_scales;  // [K / 128][padded]
    const Fp8* w;           // [K / 128][features, or twice][128]
    const float* w_scales;  // [features / 16, or twice][K / 128]
    Result result;
    int padded, K;
    int rows;    // of weights that a block takes, in two parts: half of them, or the gates and their ups
    int stages;  // of the ring
};

// The parts of a block's weights: where they are, and how many rows.
struct Fp8Parts {
    int at[2], there[2];

    __device__ __forceinline__ Fp8Parts(const Fp8Task& task, const Place& place) {
        const bool gated = task.result.gated;
        const int left = min(place.own, task.result.features - place.feature0);
        at[0] = place.feature0, at[1] = gated ? task.result.features + place.feature0 : place.feature0 + place.half;
        there[0] = min(place.half, left), there[1] = gated ? left : left - there[0];
    }
};

// GROUPS * 64 rows of x. A warp group has both parts of the weights for 64 of these rows or, where there are no more, one
// part each. PART: features of an instruction, no less than a part has; what it reads behind them is not stored, nor are
// rows behind those of x.
template <int GROUPS, int PART>
__device__ __forceinline__ void fp8_gemm(const Fp8Task& task) {
    constexpr int TOKENS = GROUPS * 64, SPAN = (PART / 8 + 3) / 4 * 4;  // scales of a part
    extern __shared__ float sums[];  // first rings, [stages] of x, weights and scales of x, then [TOKENS][pitch]
    const Place place(task.result, TOKENS, task.rows, task.K, WIDE);
    const Fp8Parts parts(task, place);
    const int x_rows = min(TOKENS, task.padded - place.token0);
    Fp8* const x_ring = (Fp8*)sums + (-shared_at(sums) & 1023);
    Fp8* const w_ring = x_ring + task.stages * x_rows * WIDE;
    float* const x_scales = (float*)(w_ring + task.stages * task.rows * WIDE);
    float* const w_scales = x_scales + task.stages * TOKENS;  // [count][2][SPAN]
    Barrier* const full = (Barrier*)(w_scales + place.count * 2 * SPAN);
    Barrier* const empty = full + task.stages;
    launch_dependents();

    const int weights = task.result.features * (task.result.gated ? 2 : 1);
    auto ask_weights = [&](int i, int s) {
        expect_bytes(full + s, (parts.there[0] + parts.there[1]) * WIDE + x_rows * (WIDE + 4));
        EACH(p, 2)
            if (parts.there[p] > 0)
                copy_bulk(w_ring + (s * task.rows + p * place.half) * WIDE,
                          task.w + ((size_t)(place.first + i) * weights + parts.at[p]) * WIDE, parts.there[p] * WIDE, full + s);
    };
    auto ask_x = [&](int i, int s) {
        const size_t row = (size_t)(place.first + i) * task.padded + place.token0;
        copy_bulk(x_ring + s * x_rows * WIDE, task.x + row * WIDE, x_rows * WIDE, full + s);
        copy_bulk(x_scales + s * TOKENS, task.x_scales + row, x_rows * 4, full + s);
    };
    const int early = min(task.stages, place.count);
    if (threadIdx.x == CONSUMERS) {
        for (int s = 0; s < task.stages; ++s) {
            init_barrier(full + s, 1);
            init_barrier(empty + s, CONSUMERS / 32);
        }
        show_barriers();
        for (int i = 0; i < early; ++i) ask_weights(i, i);
    }
    __syncthreads();  // barriers are there for all

    if (threadIdx.x >= CONSUMERS) {
        if (GROUPS > 1) give_registers<24>();
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
        if (GROUPS > 1) take_registers<240>();
        const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), group = warp / 4;
        for (int e = threadIdx.x; e < place.count * 2 * SPAN; e += CONSUMERS) {
            const int unit = e / place.count, i = e - unit * place.count, p = unit / SPAN, row = unit % SPAN * 8;
            const int first = p ? parts.at[1] : parts.at[0], there = p ? parts.there[1] : parts.there[0];
            w_scales[(i * 2 + p) * SPAN + unit % SPAN] =
                row < there ? task.w_scales[(size_t)((first + row) / TALL) * (task.K / WIDE) + place.first + i] : 0.f;
        }
        sync_consumers<CONSUMERS>();
        wait_for_earlier_kernels();

        const int first_part = GROUPS == 1 ? group : 0, token = (GROUPS == 1 ? 0 : group * 64) + warp % 4 * 16 + lane / 4;
        float total[GROUPS][PART / 2];
        EACH(p, GROUPS) EACH(k, PART / 2) total[p][k] = 0.f;
        int s = 0, parity = 0;
        for (int i = 0; i < place.count; ++i) {
            wait_barrier(full + s, parity);
            const u64 a = rows_at(x_ring + (s * x_rows + (GROUPS == 1 ? 0 : group * 64)) * WIDE);
            const float above = x_scales[s * TOKENS + token], below = x_scales[s * TOKENS + token + 8];
            EACH(p, GROUPS) {
                const u64 b = rows_at(w_ring + (s * task.rows + (first_part + p) * place.half) * WIDE);
                float d[PART / 2];
                begin_products();
                Product<PART>::set(d, a, b);
#pragma unroll
                for (int k = 1; k < 4; ++k) Product<PART>::add(d, a + k * 2, b + k * 2);  // 32 bytes further
                end_products();
                wait_for_products<0>();
                keep_here(d);
                if (p == GROUPS - 1 && lane == 0) arrive(empty + s);
                const float4* const fours = (const float4*)(w_scales + (i * 2 + first_part + p) * SPAN);
                float4 four;
                EACH(j, PART / 8) {
                    if (j % 4 == 0) four = fours[j / 4];
                    const float scale = j % 4 == 0 ? four.x : j % 4 == 1 ? four.y : j % 4 == 2 ? four.z : four.w;
                    const float one = scale * above, other = scale * below;
                    total[p][j * 4] = fmaf(d[j * 4], one, total[p][j * 4]);
                    total[p][j * 4 + 1] = fmaf(d[j * 4 + 1], one, total[p][j * 4 + 1]);
                    total[p][j * 4 + 2] = fmaf(d[j * 4 + 2], other, total[p][j * 4 + 2]);
                    total[p][j * 4 + 3] = fmaf(d[j * 4 + 3], other, total[p][j * 4 + 3]);
                }
            }
            if (++s == task.stages) s = 0, parity ^= 1;
        }

        sync_consumers<CONSUMERS>();  // sums take the place of rings
        const int pitch = task.rows + (8 - task.rows & 31);  // lanes that store at the same time meet in no bank
        EACH(p, GROUPS) {
            const int part = first_part + p, columns = part == 0 ? place.half : task.rows - place.half;
            EACH(j, PART / 8) {
                if (j * 8 >= columns) continue;
                float* const to = sums + token * pitch + part * place.half + j * 8 + lane % 4 * 2;
                *(float2*)to = {total[p][j * 4], total[p][j * 4 + 1]};
                *(float2*)(to + 8 * pitch) = {total[p][j * 4 + 2], total[p][j * 4 + 3]};
            }
        }
        finish_sums<CONSUMERS>(task.result, place, sums, pitch, TOKENS);
    }
}

#define FP8_KERNEL(NAME, THREADS, GEMM, ...)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                        \
        NAME(const Fp8* x, const float* x_scales, const Fp8* w, const float* w_scales, const u16* bias,             \
             const u16* extra, u16* y, int M, int padded, int features, int K, int rows, int stages, int gated) {   \
        GEMM<__VA_ARGS__>({x, x_scales, w, w_scales, {bias, extra, y, M, features, gated}, padded, K, rows, stages}); \
    }

#ifndef ON_HOST
// value / scale, rounded as a division rounds it; inverse: 1 / scale, rounded.
__device__ __forceinline__ float divided(float value, float scale, float inverse) {
    const float near = value * inverse;
    return fmaf(fmaf(-near, scale, value), inverse, near);
}

// x [M][K] -> codes [K / 128][padded][128] and scales [K / 128][padded], as `quantised` of ops/fp8/spec.py. 16 lanes have 128
// columns of ROWS rows, and the other 16 of a warp the next columns or, with several rows, the next rows: 8 rows' codes lie
// together.
template <int ROWS>
__device__ __forceinline__ void quantise_fp8(const u16* x, Fp8* codes, float* scales, int M, int padded, int K) {
    launch_dependents();
    const int unit = blockIdx.x * 16 + threadIdx.x / 16, lane = threadIdx.x % 16, blocks = K / WIDE;
    const int block = ROWS == 1 ? unit % blocks : unit / 2 % blocks;
    const int row0 = ROWS == 1 ? unit / blocks : (unit / 2 / blocks * 2 + unit % 2) * ROWS;
    wait_for_earlier_kernels();
    uint4 in[ROWS];
    EACH(r, ROWS) {
        in[r] = make_uint4(0, 0, 0, 0);
        if (row0 + r < M) in[r] = load_x(x + (size_t)(row0 + r) * K + block * WIDE + lane * 8);
    }
    EACH(r, ROWS) {
        const int row = row0 + r;
        const u32 pairs[4] = {in[r].x, in[r].y, in[r].z, in[r].w};
        float value[8], most = 1e-10f;
        EACH(k, 8) {
            value[k] = to_float((u16)(k % 2 ? pairs[k / 2] >> 16 : pairs[k / 2]));
            most = fmaxf(most, fabsf(value[k]));
        }
#pragma unroll
        for (int distance = 8; distance > 0; distance /= 2)
            most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, distance));
        const float scale = most / 448.f, inverse = 1.f / scale;
        u32 out[2];
        EACH(half, 2) {
            u16 low, high;
            float v[4];
            EACH(k, 4) v[k] = divided(value[half * 4 + k], scale, inverse);
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
            out[half] = low | (u32)high << 16;
        }
        if (row >= M) continue;
        const size_t at = (size_t)block * padded + row;
        *(uint2*)(codes + at * WIDE + ((lane / 2 ^ row % 8) * 2 + lane % 2) * 8) = {out[0], out[1]};
        if (lane == 0) scales[at] = scale;
    }
}

#define QUANTISE_KERNEL(ROWS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        quantise_fp8_##ROWS(const u16* x, Fp8* codes, float* scales, int M, int padded, int K) {                      \
        quantise_fp8<ROWS>(x, codes, scales, M, padded, K);                                                          \
    }
QUANTISE_KERNEL(1)
QUANTISE_KERNEL(4)
#endif
