// Runs the kernels of gemm.cu on the CPU: a thread of a cluster is a fiber, and what is PTX there is a function here.
// SOURCE, given on the command line, is what gemm.py compiles from where its PTX ends.
#undef _FORTIFY_SOURCE  // it takes a jump to another stack for an error
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
#define ON_HOST
#define SHARES 8
#define CHUNK 64
#define STEP (SHARES * CHUNK)
#define EACH(i, COUNT) _Pragma("unroll") for (int i = 0; i < (COUNT); ++i)
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __expf expf
using std::max;
using std::min;

struct uint4 { u32 x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct uint2 { u32 x, y; };
static float quotient(float a, float b) { return a / b; }
struct float4 { float x, y, z, w; };
struct Index { int x, y; };
struct Copy { void* to; const void* from; int bytes; };
struct Lane { u32 a[4], b[2]; float* d; };
struct Fiber {
    ucontext_t context;  // where it begins
    jmp_buf rest;  // where it goes on: swapcontext() would ask the system for signals each time
    std::vector<char> stack;
    bool begun = false, done = false;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

static const float GUARD = 12345.f;  // behind a block's shared memory
static Index blockIdx, threadIdx, gridDim;
static std::vector<Fiber> fibers;  // of the blocks of a cluster, one block after the other
template <class T>
struct Aligned : std::allocator<T> {  // blocks of a cluster have the same at the same place behind a multiple of 1,024 bytes
    template <class U>
    struct rebind { using other = Aligned<U>; };
    T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(1024)); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(1024)); }
};
using Memory = std::vector<float, Aligned<float>>;
static std::vector<Memory> memory;  // shared memory by block of the cluster
static std::vector<Lane> lanes;
static std::vector<int> warp_arrived, block_arrived;  // at barriers, in all
static int cluster_arrived, threads, first_block, me;
static long steps;  // barriers that somebody has come to
static jmp_buf scheduler;
static std::vector<char> waited;  // by thread of a block of experts': for the earlier kernel
static int early;  // copies happen as early as they can; else as late. So do instructions, but for 2: as late as they can

static void enter(int fiber) {
    me = fiber;
    threadIdx.x = fiber % threads;
    blockIdx.x = first_block + fiber / threads;
}

static void leave(int fiber) {
    if (!_setjmp(fibers[fiber].rest)) _longjmp(scheduler, 1);
}

static void go_on(int fiber) {
    enter(fiber);
    if (_setjmp(scheduler)) return;
    if (fibers[fiber].begun) _longjmp(fibers[fiber].rest, 1);
    fibers[fiber].begun = true;
    setcontext(&fibers[fiber].context);
}

static float* shared_memory() { return memory[me / threads].data(); }
template <class T>
static T* at_rank(T* p, int rank) { return (T*)((char*)memory[rank].data() + ((char*)p - (char*)shared_memory())); }

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

static float product(u16 a, u16 b) { return to_float(from_float(to_float(a) * to_float(b))); }

static uint4 read16(const u16* p) {
    uint4 v;
    memcpy(&v, p, 16);
    return v;
}
static uint4 load_weight(const u16* p) { return read16(p); }
static bool may_read(bool x);
static uint4 load_x(const u16* p) {
    if (!may_read(true)) abort();
    return read16(p);
}
static uint4 load_shared(const u16* p) { return read16(p); }
static float load_value(const u16* p) {
    if (!may_read(true)) abort();
    return to_float(*p);
}
static float load_from_rank(const float* p, int rank) { return *at_rank(p, rank); }
static int held(int value) { return value; }
static void launch_dependents();
static void wait_for_earlier_kernels();

static void finish(const Copy& copy) {
    if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
    else memset(copy.to, 0, copy.bytes);
}
static void copy_async(const Copy& copy) {
    if (early) finish(copy);
    else fibers[me].open.push_back(copy);
}
// Where copies may come from; nothing is known as long as there is none.
static std::vector<std::pair<const char*, const char*>> sources;
static void check_source(const void* from, int bytes) {
    bool inside = sources.empty();
    for (const auto& [begin, end] : sources) inside |= begin <= from && (const char*)from + bytes <= end;
    if (!inside) abort();
}
extern "C" void source(const char* begin, long bytes) {
    if (begin) sources.push_back({begin, begin + bytes});
    else sources.clear();
}
static void copy_async(u16* to, const u16* from, bool there = true) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) abort();
    if (there) check_source(from, 16);
    copy_async({to, there ? from : nullptr, 16});
}
static void copy_word_async(u32* to, const u32* from) { copy_async({to, from, 4}); }
static void end_copies() {
    fibers[me].groups.push_back(std::move(fibers[me].open));
    fibers[me].open.clear();
}
template <int LEFT>
static void wait_for_copies() {
    for (auto& groups = fibers[me].groups; groups.size() > LEFT; groups.pop_front())
        for (const Copy& copy : groups.front()) finish(copy);
}

// Waits until all of `count` fibers have come here.
static void meet(int& arrived, int count) {
    const int fiber = me, all = (arrived / count + 1) * count;
    ++arrived, ++steps;
    while (arrived < all) {
        leave(fiber);
        enter(fiber);
    }
}
static void __syncthreads() { meet(block_arrived[me / threads], threads); }
static void __syncwarp() { meet(warp_arrived[me / 32], 32); }
static void sync_cluster() { meet(cluster_arrived, fibers.size()); }

// The sum is made in the order of k, so that a GEMM that is given its k in another order gives other bits.
static void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const int first = me / 32 * 32, g = me % 32 / 4, t = me % 4;
    lanes[me] = {{a0, a1, a2, a3}, {b0, b1}, d};
    meet(warp_arrived[me / 32], 32);
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
    meet(warp_arrived[me / 32], 32);
    memcpy(d, out, sizeof out);
}

// Of four warps an instruction for all, each has 16 features and shares the matrices of x: lane g * 4 + t of a warp has
// word t of row g of both. They are read when the instruction is waited for, or at once.
#ifndef DENSE
static void show_writes() {}
#endif
static std::vector<std::deque<std::vector<std::function<void()>>>> product_groups;  // by thread: instructions
static std::vector<std::vector<std::function<void()>>> products_open;
static void begin_products() {}
static void end_products() {
    product_groups[me].push_back(std::move(products_open[me]));
    products_open[me].clear();
}
template <int LEFT>
static void wait_for_products() {
    for (auto& groups = product_groups[me]; groups.size() > LEFT; groups.pop_front())
        for (const auto& product : groups.front()) product();
}
struct Wide { u32 a[4]; float (*d)[4]; const u16* b; int token_tiles; };
static void do_wide(const Wide& wide) {
    const int lane = me % 32;
    for (int m = 0; m < wide.token_tiles; ++m) {
        const u32* const matrix = (const u32*)wide.b + m * 32 + lane;
        mma(wide.d[m], wide.a[0], wide.a[1], wide.a[2], wide.a[3], matrix[0], matrix[wide.token_tiles * 32]);
    }
}
template <int TOKEN_TILES>
static void wide_mma(float (&d)[TOKEN_TILES][4], u32 a0, u32 a1, u32 a2, u32 a3, const u16* b) {
    const Wide wide = {{a0, a1, a2, a3}, d, b, TOKEN_TILES};
    if (early == 1) do_wide(wide);
    else products_open[me].push_back([wide] { do_wide(wide); });
}

// A barrier opens when all have arrived and all copies that it is to see are done: at once, or when it is waited for.
typedef unsigned long long Barrier;
struct Open { int count = 0, missing = 0, times = 0; long expected = 0, bulk = 0; std::vector<Copy> copies; };
static std::map<const Barrier*, Open> barriers;
static bool opens(Open& open) {
    if (open.missing || open.bulk != open.expected) return false;
    for (const Copy& copy : open.copies) finish(copy);
    open.copies.clear();
    open.missing = open.count, open.expected = open.bulk = 0;
    ++open.times, ++steps;
    return true;
}
static void init_barrier(Barrier* barrier, int count) {
    *barrier = 0;  // has to be within the block's memory
    barriers[barrier] = {count, count};
}
static void show_barriers() {}
static void arrive(Barrier* barrier) {
    Open& open = barriers.at(barrier);
    if (!open.missing) abort();  // one too many
    --open.missing, ++steps;
    if (open.copies.empty()) opens(open);
}
static void expect_bytes(Barrier* barrier, int bytes) {
    Open& open = barriers.at(barrier);
    if (!open.missing) abort();
    --open.missing, open.expected += bytes, ++steps;
}
static void copy_bulk(void* to, const void* from, int bytes, Barrier* barrier) {
    Open& open = barriers.at(barrier);
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) abort();
    check_source(from, bytes);
    open.bulk += bytes, ++steps;
    open.copies.push_back({to, from, bytes});
    if (early) opens(open);
}
static void arrive_after_copies(Barrier* barrier) {
    Open& open = barriers.at(barrier);
    if (!open.missing) abort();
    --open.missing, ++steps;
    for (const Copy& copy : fibers[me].open) open.copies.push_back(copy);
    fibers[me].open.clear();
    if (early) opens(open);
}
static void wait_barrier(Barrier* barrier, int parity) {
    const int fiber = me;
    Open& open = barriers.at(barrier);
    while (open.times % 2 == parity && !(open.copies.size() && opens(open))) {
        leave(fiber);
        enter(fiber);
    }
}
static float4 load_four(const float* p) {
    if ((uintptr_t)p % 16) abort();
    return {p[0], p[1], p[2], p[3]};
}
static float4 load_four_from_rank(const float* p, int rank) {
    return load_four(at_rank(p, rank));
}
static uint2 load_four_values(const u16* p) {
    uint2 v;
    memcpy(&v, p, 8);
    return v;
}

#ifdef GROUPS
// As in gemm_groups.cu, for bfloat16.
#define TYPE_BF16 1
#define WHOLE 20
#define ONE 0x3f803f80
#define MINUS_EIGHT 0x80088008
#define MINUS_128 0x80808080
#define LESS 15
#define TWO_TO_LESS 0x47004700

static u32 fma_pair(u32 a, u32 b, u32 c) {  // what it is given here fits into a float
    u32 d = 0;
    for (int shift = 0; shift < 32; shift += 16)
        d |= (u32)from_float(fmaf(to_float(a >> shift), to_float(b >> shift), to_float(c >> shift))) << shift;
    return d;
}
static u32 load_word(const u32* p) { return *p; }
static u32 low_twice(u32 pair) { return (pair & 0xffff) * 0x10001; }
static u32 high_twice(u32 pair) { return (pair >> 16) * 0x10001; }
static u32 rotate_right(u32 word, int bits) { return bits ? word >> bits | word << (32 - bits) : word; }
static u32 times(u32 a, u32 b) { return fma_pair(a, b, 0x80008000); }
#endif

#ifdef EXPERTS
static int load_route(const int* p) {
    if (!may_read(false)) abort();
    return *p;
}
static std::vector<int> votes;  // by thread
static int count_in_warp(bool so) {
    const int first = me / 32 * 32;
    votes.resize(fibers.size());
    votes[me] = so;
    meet(warp_arrived[me / 32], 32);
    int count = 0;
    for (int i = first; i < first + 32; ++i) count += votes[i];
    meet(warp_arrived[me / 32], 32);
    return count;
}
static u32 byte_twice(u32 word, int which) { return (word >> which * 8 & 0xff) * 0x10001; }
static uint2 load_half_weight(const u32* p) {
    if ((uintptr_t)p % 8) abort();
    return {p[0], p[1]};
}
static float __uint_as_float(u32 bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static u32 __float_as_uint(float f) {
    u32 bits;
    memcpy(&bits, &f, 4);
    return bits;
}
#endif

#if defined(FP8) || defined(DENSE)
struct float2 { float x, y; };
typedef unsigned long long u64;
static u32 shared_at(const void* p) { return (u32)(uintptr_t)p; }
// A part of 128 bytes of a row, in the order of swizzling.
static const unsigned char* swizzled(u64 rows, int row, int byte) {
    const uintptr_t at = (rows << 4) + row * 128 + byte;
    return (const unsigned char*)(at ^ (at >> 7 & 7) << 4);
}
static u64 rows_at(const void* p) { return (uintptr_t)p >> 4; }
#ifdef FP8
typedef unsigned char Operand;
static float value_of_code(int code) {
    const int power = code >> 3 & 15, part = code & 7;
    const float size = power ? ldexpf(8 + part, power - 10) : ldexpf(part, -9);
    return (code & 127) == 127 ? NAN : code & 128 ? -size : size;
}
static struct Codes {
    float values[256];
    Codes() {
        for (int code = 0; code < 256; ++code) values[code] = value_of_code(code);
    }
} codes;
static float value_of(u64 rows, int row, int k) { return codes.values[*swizzled(rows, row, k)]; }
#else
typedef u16 Operand;
#ifdef PICTURES
// Rows of 32 bytes, or slabs of 32 columns, which are rows here: the address in 16 bytes, and how many keys there are.
static u64 ends_at(const void* p) { return (uintptr_t)p >> 4 | 1ull << 62; }
template <int KEYS>
static u64 slabs_at(const void* p) {
    return (uintptr_t)p >> 4 | (u64)(KEYS / 8) << 48 | 2ull << 62;
}
static float value_of(u64 rows, int row, int k) {
    uintptr_t at = (rows & (1ull << 48) - 1) << 4;
    const int kind = rows >> 62, keys = (rows >> 48 & 63) * 8;
    if (kind == 0) at += row * 128 + k * 2, at ^= (at >> 7 & 7) << 4;
    if (kind == 1) at += row * 32 + k * 2, at ^= (at >> 7 & 1) << 4;
    if (kind == 2) at += ((row / 32 * keys + k) * 32 + row % 32) * 2, at ^= (at >> 7 & 3) << 4;
    return to_float(*(const u16*)at);
}
#else
static float value_of(u64 rows, int row, int k) { return to_float(*(const u16*)swizzled(rows, row, k * 2)); }
#endif
#endif
struct Factors { float* d; u64 a, b; int features; bool more; };
static void do_product(const Factors& factors) {  // of 32 bytes of each row
    const int lane = me % 32, warp = me % threads / 32 % 4;
    for (int i = 0; i < factors.features / 2; ++i) {
        const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, feature = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = factors.more ? factors.d[i] : 0.f;
        for (int k = 0; k < 32 / (int)sizeof(Operand); ++k)
            sum = fmaf(value_of(factors.a, row, k), value_of(factors.b, feature, k), sum);
        factors.d[i] = sum;
    }
}
template <int FEATURES>
struct Product {
    static void set(float (&d)[FEATURES / 2], u64 a, u64 b) { ask({d, a, b, FEATURES, false}); }
    static void add(float (&d)[FEATURES / 2], u64 a, u64 b) { ask({d, a, b, FEATURES, true}); }
    static void ask(const Factors& factors) {
        if (early) do_product(factors);
        else products_open[me].push_back([factors] { do_product(factors); });
    }
};
template <int COUNT>
static void keep_here(float (&d)[COUNT]) {}
static std::vector<int> consumers_arrived;
template <int THREADS>
static void sync_consumers() { meet(consumers_arrived[me / threads], THREADS); }
static std::vector<int> arrived_128;  // of which 128 threads
static void sync_128(int which) { meet(arrived_128[me / threads * 3 + which], 128); }
static int cluster_here, cluster_times;  // threads that wait, and how often all have met
static void meet_cluster() {  // those who have left count as if they were there
    const int fiber = me, before = cluster_times;
    ++cluster_here, ++steps;
    while (cluster_times == before) {
        int left = 0;
        for (const Fiber& other : fibers) left += !other.done;
        if (cluster_here == left) {
            cluster_here = 0, ++cluster_times, ++steps;
        } else {
            leave(fiber);
            enter(fiber);
        }
    }
}
static void sync_whole_cluster() { meet_cluster(); }
static float silu_times(float gate, float up) {
    const float g = to_float(from_float(gate));
    return product(from_float(quotient(g, 1.f + expf(-g))), from_float(up));
}
static int rank_in_cluster() { return me / threads; }
static int blocks_of_cluster() { return fibers.size() / threads; }
static void add_four(const u16* p, float (&sum)[4]) {
    for (int k = 0; k < 4; ++k) sum[k] += to_float(p[k]);
}
template <int COUNT>
static void take_registers() {}
template <int COUNT>
static void give_registers() {}
static void arrive_at_rank(Barrier* barrier, int rank) { arrive(at_rank(barrier, rank)); }
static u32 pair_of(float first, float second) { return from_float(first) | (u32)from_float(second) << 16; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static std::vector<u32> shown;  // by thread
static u32 of_neighbour(u32 value) {
    shown.resize(fibers.size());
    shown[me] = value;
    meet(warp_arrived[me / 32], 32);
    const u32 found = shown[me ^ 1];
    meet(warp_arrived[me / 32], 32);
    return found;
}
#endif

#ifdef FP8
static u32 load_pair(const u16* p) { return p[0] | (u32)p[1] << 16; }
static void copy_bulk_to_both(void* to, const void* from, int bytes, Barrier* barrier) {
    for (int rank = 0; rank < 2; ++rank) copy_bulk(at_rank((char*)to, rank), from, bytes, at_rank(barrier, rank));
}
static std::vector<int> given, taken;  // turns: by block and warp group, and by thread
static void give_turn(int group) { ++given[me / threads * 2 + group], ++steps; }
static void take_turn(int group) {
    const int fiber = me, all = ++taken[fiber] * 128;
    while (given[fiber / threads * 2 + group] < all) {
        leave(fiber);
        enter(fiber);
    }
}
#endif

#ifdef DENSE
#define __grid_constant__
struct TensorMap { const u16* data; bool result; int shape[3], box[3]; };
static void prefetch_map(const TensorMap* map) {}
static void prefetch_box(const TensorMap* map, int column, int row) {}
static char* swizzled_box(const void* start, const TensorMap* map, int at) {  // bytes from a box's start
    const int bits = map->box[0] / 8 - 1;  // rows of 128, 64 or 32 bytes
    const uintptr_t place = (uintptr_t)start + at;
    return (char*)(place ^ (place >> 7 & bits) << 4);
}
// Of each 16 bytes of a box of one matrix or more: where they are in shared and, unless they are outside, global memory.
template <class EACH>
static void each_piece(const void* start, const TensorMap* map, int column, int row, EACH each, int first = 0) {
    const auto [columns, rows, matrices] = map->box;
    if ((columns != 64 && columns != 32 && columns != 16) || (uintptr_t)start % (columns * 16)) abort();
    for (int i = 0; i < matrices * rows * columns / 8; ++i) {
        const int wide = columns / 8, at_column = column + i % wide * 8, at_row = row + i / wide % rows;
        const int matrix = first + i / wide / rows;
        const bool inside = at_column < map->shape[0] && at_row < map->shape[1] && matrix < map->shape[2];
        const u16* const from = map->data + ((long)matrix * map->shape[1] + at_row) * map->shape[0] + at_column;
        each(swizzled_box(start, map, i * 16), inside ? from : nullptr);
    }
}
static void copy_box(void* to, const TensorMap* map, int column, int row, Barrier* barrier, int matrix = 0) {
    if (map->result && !waited[me]) abort();
    Open& open = barriers.at(barrier);
    auto ask = [&](char* at, const u16* from) { open.copies.push_back({at, from, 16}); };
    each_piece(to, map, column, row, ask, matrix);
    open.bulk += map->box[0] * map->box[1] * map->box[2] * 2, ++steps;
    if (early) opens(open);
}
static std::vector<int> shown_writes;  // by block and warp group: threads that have shown what they wrote
static int warp_group() { return me / threads * 2 + me % threads / 128; }
static std::vector<std::vector<Copy>> stores_open;  // by thread: boxes that are on their way, of no group yet
static std::vector<std::deque<std::vector<Copy>>> stores;  // and of groups
static void store_box(const TensorMap* map, const void* from, int column, int row) {
    if (shown_writes[warp_group()] != 128) abort();
    each_piece(from, map, column, row, [&](char* at, const u16* to) {
        if (to) stores_open[me].push_back({(void*)to, at, 16});
    });
}
template <int LEFT>
static void wait_for_reads() {
    for (auto& groups = stores[me]; groups.size() > LEFT; groups.pop_front())
        for (const Copy& copy : groups.front()) finish(copy);
}
static void end_stores() {
    shown_writes[warp_group()] = 0;
    stores[me].push_back(std::move(stores_open[me]));
    stores_open[me].clear();
    if (early) wait_for_reads<0>();
}
static void show_writes() { ++shown_writes[warp_group()]; }
static void copy_box_to_both(void* to, const TensorMap* map, int column, int row, Barrier* barrier) {
    for (int rank = 0; rank < 2; ++rank) copy_box(at_rank((char*)to, rank), map, column, row, at_rank(barrier, rank));
}
static void copy_box_once(void* to, const TensorMap* map, int column, int row, Barrier* barrier) {
    copy_box(to, map, column, row, barrier);
}
#endif

#if defined(MANY_PAIRS) || defined(PICTURES)
static void store_16(u16* to, const uint4& v) {
    if ((uintptr_t)to % 16) abort();
    memcpy(to, &v, 16);
}
// What lanes of a warp give the instruction that they have together.
static std::vector<u32> given_words;
static void store_matrices(void* at, const u32 (&words)[4]) {
    const int first = me / 32 * 32, lane = me % 32;
    given_words.resize(fibers.size() * 4);
    for (int i = 0; i < 4; ++i) given_words[me * 4 + i] = words[i];
    meet(warp_arrived[me / 32], 32);
    if ((uintptr_t)at % 16) abort();
    for (int i = 0; i < 8; ++i)
        ((u16*)at)[i] = given_words[(first + i * 4 + lane % 8 / 2) * 4 + lane / 8] >> lane % 2 * 16;
    meet(warp_arrived[me / 32], 32);
}
struct Mixed { u32 a[4]; float* d; u64 b; int pairs; bool more; };
static void do_mixed(const Mixed& mixed) {  // of 32 bytes of each row
    const int lane = me % 32, first = me - lane + lane / 4 * 4;
    lanes[me] = {{mixed.a[0], mixed.a[1], mixed.a[2], mixed.a[3]}, {}, mixed.d};
    meet(warp_arrived[me / 32], 32);
    for (int i = 0; i < mixed.pairs / 2; ++i) {
        float sum = mixed.more ? mixed.d[i] : 0.f;
        for (int k = 0; k < 16; ++k) {
            const u16 a = lanes[first + k % 8 / 2].a[i % 4 / 2 + k / 8 * 2] >> k % 2 * 16;
            sum = fmaf(to_float(a), value_of(mixed.b, i / 4 * 8 + lane % 4 * 2 + i % 2, k), sum);
        }
        mixed.d[i] = sum;
    }
    meet(warp_arrived[me / 32], 32);
}
template <int PAIRS>
struct FromRegisters {
    static void add(float (&d)[PAIRS / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more) {
        const Mixed mixed = {{a0, a1, a2, a3}, d, b, PAIRS, more != 0};
        if (early == 1) do_mixed(mixed);
        else products_open[me].push_back([mixed] { do_mixed(mixed); });
    }
};
#endif

#ifdef PICTURES
template <int FEATURES>
struct Scores {
    static void set(float (&d)[FEATURES / 2], const u32* a, u64 b) { FromRegisters<FEATURES>::add(d, a[0], a[1], a[2], a[3], b, 0); }
    static void add(float (&d)[FEATURES / 2], const u32* a, u64 b) { FromRegisters<FEATURES>::add(d, a[0], a[1], a[2], a[3], b, 1); }
};
template <int FEATURES>
struct Weighted : Scores<FEATURES> {};
static float power(float x) { return exp2f(x); }
static float __shfl_xor_sync(u32, float value, int by) {
    shown.resize(fibers.size());
    shown[me] = __float_as_uint(value);
    meet(warp_arrived[me / 32], 32);
    const u32 found = shown[me ^ by];
    meet(warp_arrived[me / 32], 32);
    return __uint_as_float(found);
}
static std::vector<int> turns, turns_taken;  // that a warp group was given, by threads, and that a thread has taken
static void give_turn(int group) { ++turns[group], ++steps; }
static void wait_for_turn(int group) {
    const int fiber = me, all = ++turns_taken[fiber] * 128;
    while (turns[group] < all) {
        leave(fiber);
        enter(fiber);
    }
}
#endif

#include SOURCE

using Kernel = void (*)(const u16*, const u16*, const u16*, const u16*, u16*, int, int, int);
using GroupKernel = void (*)(const u16*, const u16*, const u32*, const u32*, const u16*, const u16*, u16*, int, int, int);
static struct {
    Kernel kernel;
    const u16 *x, *w, *bias, *extra;
    u16* y;
    int M, N, K;
} job;
static struct {  // of the weight of the next runs, where there are any
    const u32 *scales, *zeros;
    int there;
} group;
using ExpertKernel = void (*)(const u16*, const void*, const u32*, const u32*, int, const u16*, const int*, const int*,
                              u16*, int, int, int, int, int, float);
static struct {  // of the next runs, where the weight is one of experts
    int rows, tile_count, choices, known;
    const int *order, *tiles;
    float limit;
    int there;
} expert;

#ifdef HEADS
using HeadKernel = void (*)(const u16*, const u16*, u16*, int, int, int, int, int, int, int, float, const u16*,
                            const u16*, const u16*, int, int, int, int);
static struct {  // of the next run besides what `job` has; strides of x and y, and what is turned
    int heads, x_row, x_head, y_row, y_head;
    float factor;
    const u16 *turned, *cos, *sin;
    int width, row, head, angles;
} heads;
extern "C" void head_sizes(int count, int x_row, int x_head, int y_row, int y_head, float factor, const u16* turned,
                           const u16* cos, const u16* sin, int width, int row, int head, int angles) {
    heads = {count, x_row, x_head, y_row, y_head, factor, turned, cos, sin, width, row, head, angles};
}
#endif

// A thread of a block of experts' has to wait for the earlier kernel before it reads what that one writes, which is x and,
// where routes are not known, these; and then before it lets the next kernel come.
static void wait_for_earlier_kernels() {
    waited[me] = true;
}
static void launch_dependents() {
    if (expert.there && !expert.known && !waited[me]) abort();
}
static bool may_read(bool x) { return !expert.there || waited[me] || (expert.known && !x); }

#ifdef FP8
using Fp8Kernel = void (*)(const Fp8*, const float*, const Fp8*, const float*, const u16*, const u16*, u16*, int, int,
                           int, int, int, int, int);
static struct {  // of the next runs, besides what `job` has
    const float *x_scales, *w_scales;
    int padded, rows, stages, gated;
} fp8;
extern "C" void fp8_sizes(const float* x_scales, const float* w_scales, int padded, int rows, int stages, int gated) {
    fp8 = {x_scales, w_scales, padded, rows, stages, gated};
}
#endif

#ifdef DENSE
using DenseKernel = void (*)(TensorMap, TensorMap, const u16*, const u16*, u16*, int, int, int, int, int, int, int, int,
                             int);
using DenseManyKernel = void (*)(TensorMap, TensorMap, TensorMap, TensorMap, const u16*, const u16*, u16*, int, int, int,
                                 int);
static struct {  // of the next run besides what `job` has
    int x_rows, rows, stages, chain, gated, many;
} dense;
extern "C" void dense_sizes(int x_rows, int rows, int stages, int chain, int gated, int many) {
    dense = {x_rows, rows, stages, chain, gated, many};
}
#endif

#ifdef MANY_PAIRS
using ManyPairsKernel = void (*)(TensorMap, const u16*, const u16*, const int*, const int*, u16*, int, int, int, int, int,
                                 float);
static struct {  // of the next run besides what `job` and `expert` have; count: of experts
    int count, gated, stages;
} many_pairs;
extern "C" void many_pairs_sizes(int count, int gated, int stages) { many_pairs = {count, gated, stages}; }
#endif

#ifdef PICTURES
using WholeKernel = void (*)(TensorMap, TensorMap, TensorMap, TensorMap, TensorMap, u16*, int, int, int, float);
static struct {  // of the next run besides what `job` has
    int size, heads, keys;
    float scale;
} whole;
extern "C" void whole_sizes(int size, int heads, int keys, float scale) {
    whole = {size, heads, keys, scale};
}
#endif

static void body() {
    const int fiber = me;
#ifdef PICTURES
    auto map = [](const u16* data, int rows, int columns, int some) {
        return TensorMap{data, true, {whole.size, whole.heads, rows}, {columns, 1, some}};
    };
    ((WholeKernel)job.kernel)(map(job.x, job.M, 64, 64), map(job.x, job.M, 16, 64), map(job.w, job.N, 64, whole.keys),
                              map(job.w, job.N, 16, whole.keys), map(job.bias, job.N, 32, whole.keys), job.y,
                              job.M, job.N, whole.heads, whole.scale);
#elif defined(MANY_PAIRS)
    const int parts = many_pairs.gated ? 2 : 1;
    const TensorMap w = {job.w, false, {job.K, job.N, many_pairs.count * parts}, {64, 64 / parts, parts}};
    ((ManyPairsKernel)job.kernel)(w, job.x, job.bias, expert.order, expert.tiles, job.y, expert.tile_count,
                                  expert.choices, job.N, job.K, many_pairs.stages, expert.limit);
#elif defined(DENSE)
    const int parts = dense.gated ? 2 : 1;
    const TensorMap x = {job.x, true, {job.K, job.M, 1}, {64, dense.many ? 64 : dense.x_rows, 1}};
    const TensorMap w = {job.w, false, {job.K, job.N, parts}, {64, dense.rows / parts, parts}};
    if (dense.many) {
        const TensorMap more = {job.extra, true, {job.N, job.M, 1}, {32, 64, 1}}, to = {job.y, true, {job.N, job.M, 1}, {32, 64, 1}};
        ((DenseManyKernel)job.kernel)(x, w, more, to, job.bias, job.extra, job.y, job.M, job.N, job.K, dense.stages);
    } else
    ((DenseKernel)job.kernel)(x, w, job.bias, job.extra, job.y, job.M, job.N, job.K, dense.x_rows, dense.rows,
                              dense.stages, 2, dense.chain, dense.gated);
#elif defined(FP8)
    ((Fp8Kernel)job.kernel)((const Fp8*)job.x, fp8.x_scales, (const Fp8*)job.w, fp8.w_scales, job.bias, job.extra, job.y,
                            job.M, fp8.padded, job.N, job.K, fp8.rows, fp8.stages, fp8.gated);
#elif defined(HEADS)
    ((HeadKernel)job.kernel)(job.x, job.w, job.y, job.M, job.N, heads.heads, heads.x_row, heads.x_head, heads.y_row,
                             heads.y_head, heads.factor, heads.turned, heads.cos, heads.sin, heads.width, heads.row,
                             heads.head, heads.angles);
#else
    if (expert.there)
        ((ExpertKernel)job.kernel)(job.x, job.w, group.scales, group.zeros, expert.rows, job.bias, expert.order,
                                   expert.tiles, job.y, expert.tile_count, expert.choices, expert.known, job.N, job.K,
                                   expert.limit);
    else if (group.there)
        ((GroupKernel)job.kernel)(job.x, job.w, group.scales, group.zeros, job.bias, job.extra, job.y, job.M, job.N,
                                  job.K);
    else job.kernel(job.x, job.w, job.bias, job.extra, job.y, job.M, job.N, job.K);
#endif
    fibers[fiber].done = true;
    ++steps;
    leave(fiber);
}

static void run_cluster() {
    for (Fiber& fiber : fibers) {
        fiber.stack.resize(64 << 10);
        fiber.begun = fiber.done = false;
        fiber.groups.clear();
        fiber.open.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, body, 0);
    }
    for (bool left = true; left;) {
        left = false;
        for (size_t first = 0; first < fibers.size(); first += 32)
            for (bool moved = true; moved;) {  // a warp runs as far as it gets before the next one does
                const long before = steps;
                for (size_t i = first; i < first + 32; ++i)
                    if (!fibers[i].done) {
                        go_on(i);
                        left |= !fibers[i].done;
                    }
                moved = steps != before;
            }
    }
}

// Whether the kernel left alone what is behind the `shared` bytes of a block.
extern "C" bool run(Kernel kernel, int block_threads, int cluster, int shared, const u16* x, const u16* w, const u16* bias,
                    const u16* extra, u16* y, int M, int N, int K, int grid_x, int grid_y, int copies_early) {
    job = {kernel, x, w, bias, extra, y, M, N, K};
    threads = block_threads, early = copies_early;
    fibers.resize(cluster * threads);
    lanes.resize(fibers.size());
    gridDim = {grid_x, grid_y};
    bool kept = true;
    for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
        for (first_block = 0; first_block < grid_x; first_block += cluster) {
            memory.assign(cluster, Memory(shared / 4, NAN));
            for (auto& block : memory) block.resize(shared / 4 + 4096, GUARD);
            warp_arrived.assign(fibers.size() / 32, 0);
            block_arrived.assign(cluster, 0);
            cluster_arrived = 0;
            product_groups.assign(fibers.size(), {}), products_open.assign(fibers.size(), {});
#if defined(FP8) || defined(DENSE)
            consumers_arrived.assign(cluster, 0);
            arrived_128.assign(cluster * 3, 0);
            cluster_here = 0;
#endif
#ifdef DENSE
            stores.assign(fibers.size(), {}), stores_open.assign(fibers.size(), {});
            shown_writes.assign(cluster * 2 + 1, 0);
#endif
#ifdef FP8
            given.assign(cluster * 2, 0);
            taken.assign(fibers.size(), 0);
#endif
#ifdef PICTURES
            turns.assign(3, 0), turns_taken.assign(fibers.size(), 0);
#endif
            barriers.clear();
            waited.assign(fibers.size(), false);
            run_cluster();
            for (auto& block : memory)
                for (size_t i = shared / 4; i < block.size(); ++i) kept &= block[i] == GUARD;
        }
    return kept;
}

extern "C" void groups(const u32* scales, const u32* zeros, int there) { group = {scales, zeros, there}; }

extern "C" void experts(int rows, int tile_count, int choices, int known, const int* order, const int* tiles,
                        float limit, int there) {
    expert = {rows, tile_count, choices, known, order, tiles, limit, there};
}

#ifdef GROUPS
template <class BODY>
static void each_thread(int grid_x, int grid_y, BODY body) {
    gridDim = {grid_x, grid_y};
    waited.assign(256, false);
    for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x) me = threadIdx.x, body();
}

#ifdef TALL
extern "C" void run_order(void (*order)(const u16*, u16*, int, int), const u16* x, u16* y, int M, int K, int grid_x,
                          int grid_y) {
    each_thread(grid_x, grid_y, [&] { order(x, y, M, K); });
}
#elif !defined(EXPERTS)
extern "C" void run_unpack(const u16* w, const u32* scales, const u32* zeros, u16* y, int N, int K, int in_sets,
                           int grid_x, int grid_y) {
    each_thread(grid_x, grid_y, [&] { unpack_all(w, scales, zeros, y, N, K, in_sets); });
}
#endif
#endif
