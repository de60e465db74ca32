// Runs the kernels of skinny.cu on the CPU: a thread of a block is a fiber, and what is PTX there is a function here.
// SOURCE, given on the command line, is skinny.cu from where its PTX ends.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
#define WARPS 8
#define CHUNK 64
#define STEP (WARPS * CHUNK)
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __expf expf
using std::min;

struct uint4 { u32 x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Index { int x, y; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    int arrived = 0;  // barriers and products it has come to
    bool done = false;
    std::deque<std::vector<std::pair<u16*, const u16*>>> groups;
    std::vector<std::pair<u16*, const u16*>> open;
};

float sums[1 << 16];
static Index blockIdx, gridDim, threadIdx;
static Fiber fibers[WARPS * 32];
static ucontext_t scheduler;
static bool early;  // copies happen as early as they can; else as late
static struct { u32 a[4], b[2]; float* d; } lanes[WARPS * 32];

static float to_float(u16 bits) {
    const u32 wide = (u32)bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}

static u16 from_float(float f) {
    u32 bits;
    memcpy(&bits, &f, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static uint4 read16(const u16* p) {
    uint4 v;
    memcpy(&v, p, 16);
    return v;
}
static uint4 load_weight(const u16* p) { return read16(p); }
static uint4 load_x(const u16* p) { return read16(p); }
static uint4 load_shared(const u16* p) { return read16(p); }
static float load_value(const u16* p) { return to_float(*p); }
static void launch_dependents() {}
static void wait_for_earlier_kernels() {}

static void copy_async(u16* to, const u16* from) {
    if (early) memcpy(to, from, 16);
    else fibers[threadIdx.x].open.push_back({to, from});
}
static void end_copies() {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}
template <int LEFT>
static void wait_for_copies() {
    for (auto& groups = fibers[threadIdx.x].groups; groups.size() > LEFT; groups.pop_front())
        for (auto& copy : groups.front()) memcpy(copy.first, copy.second, 16);
}

// Waits until the fibers [first, first + count) have come as far.
static void meet(int first, int count) {
    const int me = threadIdx.x, here = ++fibers[me].arrived;
    for (;;) {
        bool all = true;
        for (int i = first; i < first + count; ++i) all &= fibers[i].arrived >= here;
        if (all) return;
        swapcontext(&fibers[me].context, &scheduler);
        threadIdx.x = me;
    }
}
static void __syncthreads() { meet(0, WARPS * 32); }

// The sum is made in the order of k, so that a product that is given its k in another order gives other bits.
static void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const int me = threadIdx.x, first = me / 32 * 32, g = me % 32 / 4, t = me % 4;
    lanes[me] = {{a0, a1, a2, a3}, {b0, b1}, d};
    meet(first, 32);
    float out[4];
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = t * 2 + i % 2;
        out[i] = d[i];
        for (int k = 0; k < 16; ++k) {
            const int lane = k % 8 / 2, shift = k % 2 * 16;
            const u16 a = lanes[first + row % 8 * 4 + lane].a[row / 8 + k / 8 * 2] >> shift;
            const u16 b = lanes[first + column * 4 + lane].b[k / 8] >> shift;
            out[i] = fmaf(to_float(a), to_float(b), out[i]);
        }
    }
    meet(first, 32);
    memcpy(d, out, sizeof out);
}

#include SOURCE

using Kernel = void (*)(const u16*, const u16*, const u16*, const u16*, u16*, int, int, int);
static struct {
    Kernel kernel;
    const u16 *x, *w, *bias, *extra;
    u16* y;
    int M, N, K;
} job;

static void body() {
    const int me = threadIdx.x;
    job.kernel(job.x, job.w, job.bias, job.extra, job.y, job.M, job.N, job.K);
    fibers[me].done = true;
    fibers[me].arrived = 1 << 30;
    swapcontext(&fibers[me].context, &scheduler);
}

// kind: 0 plain, 1 add, 2 silu. tile: rows of x that a block takes.
extern "C" void run(int kind, int tile, const u16* x, const u16* w, const u16* bias, const u16* extra, u16* y, int M, int N,
                    int K, int grid_x, int grid_y, int copies_early) {
    static const Kernel kernels[5][3] = {{plain_8, add_8, silu_8}, {plain_16, add_16, silu_16}, {plain_32, add_32, silu_32},
                                         {plain_64, add_64, silu_64}, {plain_128, add_128, silu_128}};
    int size = 0;
    while (8 << size < tile) ++size;
    job = {kernels[size][kind], x, w, bias, extra, y, M, N, K};
    early = copies_early;
    gridDim = {grid_x, grid_y};
    for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) {
            memset(sums, 0xff, sizeof sums);  // NaN
            for (int i = 0; i < WARPS * 32; ++i) {
                Fiber& fiber = fibers[i];
                fiber.stack.resize(64 << 10);
                fiber.arrived = fiber.done = 0;
                fiber.groups.clear();
                getcontext(&fiber.context);
                fiber.context.uc_stack.ss_sp = fiber.stack.data();
                fiber.context.uc_stack.ss_size = fiber.stack.size();
                makecontext(&fiber.context, body, 0);
            }
            for (bool left = true; left;) {
                left = false;
                for (int first = 0; first < WARPS * 32; first += 32)
                    for (bool moved = true; moved;) {  // a warp runs as far as it gets before the next one does
                        moved = false;
                        for (int i = first; i < first + 32; ++i)
                            if (!fibers[i].done) {
                                const int before = fibers[i].arrived;
                                threadIdx.x = i;
                                swapcontext(&scheduler, &fibers[i].context);
                                moved |= fibers[i].arrived != before;
                                left |= !fibers[i].done;
                            }
                    }
            }
        }
}
