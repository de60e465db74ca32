// Follows gemm_wgmma.cu: what gemm_dense_many.cu and gemm_fp8_many.cu have in common, products of many rows of x. Here
// tensor cores count, and copies from the L2 cache.
//
// A cluster's two blocks have 128 rows of x each and the same features of weights in two parts, of which each copies one
// to both. Blocks stay and take one tile after the other, while the next one's copies are on their way. Where few rows
// have K in ranges, a block sums one range after the other and adds the ranges in the same order.

#define MANY 128  // rows of x of a block
#define PAIRS 8   // of blocks whose rows have all their features before others begin: x and weights stay in the L2 cache

#ifndef ON_HOST
__device__ __forceinline__ void arrive_at_rank(Barrier* barrier, int rank) {
    asm volatile("{.reg .u32 at; mapa.shared::cluster.u32 at, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [at];}" ::"r"(shared_at(barrier)),
                 "r"(rank)
                 : "memory");
}

__device__ __forceinline__ u32 of_neighbour(u32 value) { return __shfl_xor_sync(0xffffffff, value, 1); }

__device__ __forceinline__ u32 pair_of(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Volatile for the reason that `load_value` has.
__device__ __forceinline__ uint2 load_four_values(const u16* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
#endif

// Of the tiles of a product, which blocks of clusters take in turn.
struct Tile {
    int token0, at[2], there[2];  // by part of the weights: its first row, and how many it has

    // rows: of x. part: features of a part. features: tiles of them.
    __device__ __forceinline__ Tile(const Result& result, int rows, int part, int features, int number, int rank) {
        const int pairs = (rows + 2 * MANY - 1) / (2 * MANY), first = number / (PAIRS * features) * PAIRS;
        const int some = min(PAIRS, pairs - first), within = number - first * features;
        token0 = ((first + within % some) * 2 + rank) * MANY;
        const int own = result.gated ? part : 2 * part, feature0 = within / some * own, left = result.features - feature0;
        at[0] = feature0, at[1] = feature0 + (result.gated ? result.features : part);
        there[0] = min(part, left), there[1] = result.gated ? there[0] : max(min(part, left - part), 0);
    }
};

// Tiles of features, and of all.
struct Tiles {
    int features, all;

    __device__ __forceinline__ Tiles(const Result& result, int rows, int part) {
        const int own = result.gated ? part : 2 * part;
        features = (result.features + own - 1) / own, all = (rows + 2 * MANY - 1) / (2 * MANY) * features;
    }
};

// A thread has pairs of two rows. Of 16 features two threads swap a pair, so that a warp reads and stores 32 bytes of a
// row.
template <bool GATED, int PART>
__device__ __forceinline__ void store_tile(const Result& result, const Tile& tile, const float (&sum)[2][PART / 2],
                                           int token, int lane) {
    const int n = tile.at[0] + lane % 4 * 2, odd = lane % 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = tile.token0 + token + h * 8;
        const size_t first = (size_t)row * result.features + tile.at[0] + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
        for (int p = 0; p < (GATED ? 1 : 2); ++p) {
            uint2 before[PART / 16];  // asked for before what they are added to
#pragma unroll
            for (int j = 0; j < PART / 8; j += 2) {
                before[j / 2] = make_uint2(0, 0);
                if (result.extra && row < result.M && j * 8 < tile.there[p])
                    before[j / 2] = load_four_values(result.extra + first + p * PART + j * 8);
            }
#pragma unroll
            for (int j = 0; j < PART / 8; j += 2) {
                const bool there = row < result.M && j * 8 < tile.there[p];
                const u32 other_before = of_neighbour(odd ? before[j / 2].x : before[j / 2].y);
                u32 pairs[2];
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    const int at = (j + v) * 4 + h * 2, ahead = p * PART + (j + v) * 8;
                    float one = 0.f + sum[p][at], other = 0.f + sum[p][at + 1];  // as few rows begin with
                    if (result.bias && there) {
                        one += to_float(result.bias[n + ahead]), other += to_float(result.bias[n + ahead + 1]);
                    }
                    if (GATED) {
                        float up = 0.f + sum[1][at], next = 0.f + sum[1][at + 1];
                        if (result.bias && there) {
                            const u16* const bias = result.bias + result.features + n + ahead;
                            up += to_float(bias[0]), next += to_float(bias[1]);
                        }
                        one = silu_times(one, up), other = silu_times(other, next);
                    }
                    if (result.extra) {
                        const u32 pair = v == odd ? (odd ? before[j / 2].y : before[j / 2].x) : other_before;
                        one += to_float((u16)pair), other += to_float((u16)(pair >> 16));
                    }
                    pairs[v] = pair_of(one, other);
                }
                const u32 swapped = of_neighbour(odd ? pairs[0] : pairs[1]);
                if (there)
                    *(uint2*)(result.y + first + p * PART + j * 8) =
                        odd ? make_uint2(swapped, pairs[1]) : make_uint2(pairs[0], swapped);
            }
        }
    }
}
