// Follows gemm.cu: products of heads, each with a matrix of its own of at most SHARES chunks of columns.
//
// Such a matrix is small, and its product waits for more than it reads. So a warp has its 16 features with all of their
// columns in registers before it waits for the kernel in front, takes one tile of rows after the other, and needs no other
// warp for its sums. They are made as in gemm.cu: a chunk is a share here.

enum { WARPS = 2, TILE = 8 };  // of a block; rows of x at a time

// What is beside a head's product: the rest of a query, which is turned.
struct Turned {
    const u16 *x, *cos, *sin;  // x: first elements of pairs, and WIDTH / 2 further on the second ones
    int width, row, head, angles;  // elements; then from one row or head of x to the next, and from one of cos and sin
};

__device__ __forceinline__ u16 scaled(u16 value, float factor) { return from_float(to_float(value) * factor); }

// A thread has a pair of elements of a head in every row whose place in its tile is its own. The first product of each is
// rounded, as in `rotate`.
__device__ __forceinline__ void turn(const Turned from, u16* __restrict__ y, int M, int N, int heads, int first,
                                     int y_row, int y_head, float factor) {
    const int half = from.width / 2, at = (blockIdx.x - first) * WARPS * 32 + threadIdx.x;
    const int i = at % half, head = at / half % heads, place = at / (half * heads);
    wait_for_earlier_kernels();
    if (place >= TILE) return;
    for (int m = blockIdx.y * TILE + place; m < M; m += gridDim.y * TILE) {
        const u16* const x = from.x + (size_t)m * from.row + head * from.head + i;
        const size_t angle = (size_t)m * from.angles + i;
        const float a = load_value(x), b = load_value(x + half);
        const float cos_a = load_value(from.cos + angle), cos_b = load_value(from.cos + angle + half);
        const float sin_a = load_value(from.sin + angle), sin_b = load_value(from.sin + angle + half);
        u16* const to = y + (size_t)m * y_row + head * y_head + N + i;
        to[0] = scaled(from_float(fmaf(b, sin_a, to_float(from_float(a * cos_a)))), factor);
        to[half] = scaled(from_float(fmaf(a, sin_b, to_float(from_float(b * cos_b)))), factor);
    }
}

// y [M, heads, N] = x [M, heads, K] times w [heads, N, K]^T, times `factor`; K is CHUNKS chunks, N a multiple of 16. Rows
// and heads of x and y may be apart. Blocks (features, rows); those of `turned`, where there is any, come last, and put it
// behind the N of its head.
template <int CHUNKS>
__device__ __forceinline__ void head_gemm(const u16* __restrict__ x, const u16* __restrict__ w, u16* __restrict__ y,
                                          int M, int N, int heads, int x_row, int x_head, int y_row, int y_head,
                                          float factor, const Turned turned) {
    constexpr int K = CHUNKS * CHUNK;
    launch_dependents();
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int units = heads * (N / 16), first = (units + WARPS - 1) / WARPS;
    if (blockIdx.x >= first) return turn(turned, y, M, N, heads, first, y_row, y_head, factor);
    const int unit = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (unit >= units) return;
    const int head = unit / (N / 16), n = unit % (N / 16) * 16 + g;

    const u16* const row = w + ((size_t)head * N + n) * K + t * 8;
    Stored::Part a[CHUNKS];
    EACH(c, CHUNKS) EACH(j, 2) EACH(half, 2) a[c].v[j][half] = load_weight(row + half * 8 * K + c * CHUNK + j * 32);
    wait_for_earlier_kernels();

    for (int m = blockIdx.y * TILE; m < M; m += gridDim.y * TILE) {
        const u16* const token = x + (size_t)min(m + g, M - 1) * x_row + head * x_head + t * 8;
        uint4 b[CHUNKS][2];
        EACH(c, CHUNKS) EACH(j, 2) {
            b[c][j] = make_uint4(0, 0, 0, 0);
            if (m + g < M) b[c][j] = load_x(token + c * CHUNK + j * 32);
        }
        float d[1][1][4], sum[1][1][4];
        clear_sums(d, sum);
        EACH(c, CHUNKS) {
            EACH(j, 2) {
                u32 top[4], bottom[4];
                a[c].expand(j, top, bottom);
                mma_half(d[0][0], top, bottom, b[c][j]);
            }
            add_share(sum, d);
        }
        u16* const to = y + head * y_head + n;
        EACH(i, 4) {
            const int at = m + t * 2 + i % 2;
            if (at < M) to[(size_t)at * y_row + i / 2 * 8] = scaled(from_float(sum[0][0][i]), factor);
        }
    }
}

// One block of a multiprocessor is enough: with fewer registers the compiler puts each load of x before what needs it, and
// they wait one after the other.
#define HEAD_KERNEL(CHUNKS)                                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)                                                         \
        heads_##CHUNKS(const u16* x, const u16* w, u16* y, int M, int N, int heads, int x_row, int x_head, int y_row,   \
                       int y_head, float factor, const u16* turned, const u16* cos, const u16* sin, int turned_width,   \
                       int turned_row, int turned_head, int angles) {                                                   \
        head_gemm<CHUNKS>(x, w, y, M, N, heads, x_row, x_head, y_row, y_head, factor,                                   \
                          {turned, cos, sin, turned_width, turned_row, turned_head, angles});                           \
    }
