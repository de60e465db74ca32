/* What the files of the C extension share: vectors, threads, arguments.

   Vectors are the compiler's (GCC 12, Clang): 16 floats, one register or several as the machine has it.

   All files are compiled for several instruction sets (ops/cpu/isa.py), and what they compute has the same bits in each.
   So sums run in an order of their own, over 16 lanes where they are a vector's; a product and a sum are rounded one by
   one (-ffp-contract=off), or fused in every set (`fused`); and no function of libm is called that rounds in more
   than one way, which leaves sqrt and what is exact. */

#pragma once
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define NOT_FINITE 0x100000000 /* as in core.py: beside a token that was drawn from logits that are not finite */
#define TOKEN_PART 0xffffffff
#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define HIDDEN __attribute__((visibility("hidden"))) /* shared by the files, not by the module */

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int64_t vl __attribute__((vector_size(128))); /* 16 of them */
typedef uint16_t vh __attribute__((vector_size(32)));

/* What a register holds of a vector: where sums are kept over a loop, compilers leave longer ones in memory. What is
   done lane by lane has the same bits in parts. */
#if defined(__AVX512F__)
#define PART 16
#elif defined(__AVX__)
#define PART 8
#else
#define PART 4
#endif
typedef float pf __attribute__((vector_size(4 * PART)));
typedef uint32_t pu __attribute__((vector_size(4 * PART)));
typedef int32_t pi __attribute__((vector_size(4 * PART)));
typedef uint16_t ph __attribute__((vector_size(2 * PART)));
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* -- vectors ------------------------------------------------------------------------------------------------------ */

INLINE vf loadf(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void storef(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf select_f(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* A vector by registers. What GCC 12 compares, shuffles or converts of a longer one goes lane by lane. */
#define REGISTERS (LANES / PART)
#define EACH_REGISTER _Pragma("GCC unroll 4") for (int c = 0; c < REGISTERS; c++)
typedef union {
    vf f;
    vi i;
    pf floats[REGISTERS];
    pi ints[REGISTERS];
    pu bits[REGISTERS];
} Parted;
typedef union {
    vh all;
    ph parts[REGISTERS];
} PartedHalf;

INLINE vi above(vf a, vf b) {
    Parted x = {.f = a}, y = {.f = b};
    EACH_REGISTER x.ints[c] = x.floats[c] > y.floats[c];
    return x.i;
}
INLINE vi at_least(vf a, vf b) {
    Parted x = {.f = a}, y = {.f = b};
    EACH_REGISTER x.ints[c] = x.floats[c] >= y.floats[c];
    return x.i;
}
INLINE vi same(vf a, vf b) {
    Parted x = {.f = a}, y = {.f = b};
    EACH_REGISTER x.ints[c] = x.floats[c] == y.floats[c];
    return x.i;
}
INLINE vi more(vi a, vi b) {
    Parted x = {.i = a}, y = {.i = b};
    EACH_REGISTER x.ints[c] = x.ints[c] > y.ints[c];
    return x.i;
}
INLINE vi splat_int(int32_t x) { return x - (vi){0}; }
INLINE vf larger(vf a, vf b) { return select_f(above(a, b), a, b); } /* b where either is no number */

INLINE pu wider(ph h) {
#if PART == 16
    return (pu)_mm512_cvtepu16_epi32((__m256i)h);
#elif PART == 8 && defined(__AVX2__)
    return (pu)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, pu);
#endif
}
INLINE vf widen(vh h) {
    const PartedHalf from = {.all = h};
    Parted to;
    EACH_REGISTER to.bits[c] = wider(from.parts[c]) << 16;
    return to.f;
}

/* To bfloat16, to the nearest and to even. */
INLINE vh narrow(vf v) {
    Parted x = {.f = v};
    EACH_REGISTER {
        const pu bits = x.bits[c], number = (pu)(x.floats[c] == x.floats[c]);
        const pu nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        x.bits[c] = (number & nearest) | (~number & 0x7fc0);
    }
#if PART == 8 && defined(__AVX2__)
    return (vh)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x.bits[0], (__m256i)x.bits[1]), 0xd8);
#else
    PartedHalf to;
    EACH_REGISTER to.parts[c] = __builtin_convertvector(x.bits[c], ph);
    return to.all;
#endif
}
INLINE vf rounded(vf v, int half) { return half ? widen(narrow(v)) : v; }

INLINE pf part_at(const float *p) {
    pf v;
    memcpy(&v, p, sizeof v);
    return v;
}
/* `count` elements of an array as floats. */
INLINE void to_floats(float *to, const void *from, int64_t count, int half) {
    if (!half) {
        memcpy(to, from, (size_t)count * 4);
        return;
    }
    const uint16_t *values = from;
    int64_t i = 0;
    for (; i + PART <= count; i += PART) {
        ph some;
        memcpy(&some, values + i, sizeof some);
        const pu wide = wider(some) << 16;
        memcpy(to + i, &wide, sizeof wide);
    }
    for (; i < count; i++) {
        const uint32_t wide = (uint32_t)values[i] << 16;
        memcpy(to + i, &wide, 4);
    }
}

/* Elements [at, at + n) of an array, zeros up to 16. */
INLINE vf load(const void *base, int64_t at, int64_t n, int half) {
    if (half) {
        vh h = {0};
        if (n >= LANES) memcpy(&h, (const uint16_t *)base + at, sizeof h);
        else memcpy(&h, (const uint16_t *)base + at, (size_t)n * 2);
        return widen(h);
    }
    vf v = {0};
    if (n >= LANES) memcpy(&v, (const float *)base + at, sizeof v);
    else memcpy(&v, (const float *)base + at, (size_t)n * 4);
    return v;
}
INLINE void store(void *base, int64_t at, int64_t n, int half, vf v) { /* of a size that is known: no call */
    if (half) {
        vh h = narrow(v);
        if (n >= LANES) memcpy((uint16_t *)base + at, &h, sizeof h);
        else memcpy((uint16_t *)base + at, &h, (size_t)n * 2);
    } else {
        if (n >= LANES) memcpy((float *)base + at, &v, sizeof v);
        else memcpy((float *)base + at, &v, (size_t)n * 4);
    }
}

/* Stores past the caches where an instruction set has it, at a multiple of a vector's size; and what makes that visible
   to other threads before anything that is stored later. */
INLINE void store_past(float *to, pf x) {
#if PART == 16
    _mm512_stream_ps(to, (__m512)x);
#elif PART == 8 && defined(__AVX2__)
    _mm256_stream_ps(to, (__m256)x);
#else
    memcpy(to, &x, sizeof x);
#endif
}
INLINE void all_past(void) {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

/* The upper half to the lower one, and so on. */
INLINE float sum_lanes(vf v) {
    const Parted x = {.f = v};
    float s[4];
#if PART == 16
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x.f), _mm512_extractf32x8_ps((__m512)x.f, 1));
#elif PART == 8
    const pf half = x.floats[0] + x.floats[1];
#endif
#if PART > 4
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128((__m256)half), _mm256_extractf128_ps((__m256)half, 1));
#else
    const pf quarter = (x.floats[0] + x.floats[2]) + (x.floats[1] + x.floats[3]);
#endif
    memcpy(s, &quarter, sizeof s);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* x * y + z, rounded once. Where no instruction does it: of numbers as doubles the product is exact, and a sum that is
   rounded to an odd last bit where it is not exact may be rounded again (Boldo and Melquiond 2008). */
#if defined(__AVX512F__)
INLINE pf fused(pf x, pf y, pf z) { return (pf)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }
#elif defined(__FMA__)
INLINE pf fused(pf x, pf y, pf z) { return (pf)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); }
#elif defined(__aarch64__)
INLINE pf fused(pf x, pf y, pf z) { return (pf)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y); }
#else
typedef float few __attribute__((vector_size(8)));
typedef double pd __attribute__((vector_size(16)));
typedef uint64_t pl __attribute__((vector_size(16)));
INLINE few fused_two(few x, few y, few z) {
    const pd product = __builtin_convertvector(x, pd) * __builtin_convertvector(y, pd);
    const pd more = __builtin_convertvector(z, pd), sum = product + more, added = sum - product;
    const pd rest = (product - (sum - added)) + (more - added);
    const pl inexact = (pl)(rest < 0.0) | (pl)(rest > 0.0), even = ((pl)sum & 1) - 1;
    const pl towards = 1 - 2 * (((pl)rest ^ (pl)sum) >> 63); /* zero, or away from it */
    return __builtin_convertvector((pd)((pl)sum + (inexact & even & towards)), few);
}
INLINE pf fused(pf x, pf y, pf z) {
    few made[2];
    made[0] = fused_two(__builtin_shufflevector(x, x, 0, 1), __builtin_shufflevector(y, y, 0, 1),
                        __builtin_shufflevector(z, z, 0, 1));
    made[1] = fused_two(__builtin_shufflevector(x, x, 2, 3), __builtin_shufflevector(y, y, 2, 3),
                        __builtin_shufflevector(z, z, 2, 3));
    return __builtin_shufflevector(made[0], made[1], 0, 1, 2, 3);
}
#endif

/* 2^x to 2 ulp; 0 below the normal numbers, so exactly 0 at -inf. x is at most 127. */
INLINE vf exp2_16(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
    vi normal = at_least(x, splat(-126.0f));
    vf y = select_f(normal, x, splat(0.0f));
    vf r = y + magic;
    vi n = (vi)r - (vi)magic;
    vf f = y - (r - magic), p = splat(1.525273380e-5f); /* Taylor: ln(2)^k / k! */
    p = p * f + splat(1.540353039e-4f);
    p = p * f + splat(1.333355815e-3f);
    p = p * f + splat(9.618129108e-3f);
    p = p * f + splat(5.550410866e-2f);
    p = p * f + splat(2.402265070e-1f);
    p = p * f + splat(6.931471806e-1f);
    p = p * f + splat(1.0f);
    return select_f(normal, (vf)((vi)p + (n << 23)), splat(0.0f));
}

/* ln(x) to 2 ulp for normal x > 0: x = 2^e * m with m around 1, ln(m) = 2 atanh((m - 1) / (m + 1)) by its series. */
INLINE vf log16(vf x) {
    const int32_t root = 0x3f3504f3; /* sqrt(1/2) */
    vi e = ((vi)x - root) >> 23;
    vf m = (vf)((vi)x - (e << 23)) - 1.0f, s = m / (m + 2.0f), power = __builtin_convertvector(e, vf), q = s * s;
    vf p = q * (1.0f / 9) + 1.0f / 7;
    p = p * q + 1.0f / 5;
    p = p * q + 1.0f / 3;
    p = p * q * s * 2.0f + power * 1.42860677e-6f; /* ln 2 in two parts; the first times a power is exact */
    return (p + 2.0f * s) + power * 0.693145752f;
}

/* What is no number does not stay so. */
INLINE vf sigmoid(vf x) {
    const vf power = x * splat(-1.44269504f);
    return 1.0f / (1.0f + exp2_16(select_f(above(power, splat(126.0f)), splat(126.0f), power)));
}

/* -- threads ------------------------------------------------------------------------------------------------------ */

/* The threads that calls run in, as `ops/cpu/workers.py` has them in memory. most: as many as torch uses, since OpenMP
   makes and ends threads when the number changes; active: in which calls run now; fixed: whether that stays so; since:
   ns of the clock, when fewer were taken; pause: ns from then until more are tried; credit: ns that may be lost before
   fewer are taken; saved: ns that tries may lose before pauses are long. No result depends on any of it, but for the last
   bits of drafts' log probabilities. */
typedef struct {
    int64_t most, active, fixed, since, pause, credit, saved;
    const int64_t *pinned; /* the processor of each thread, or NULL */
} Workers;
HIDDEN void find_threads(void); /* once, before anything runs */
HIDDEN int has_openmp(void);     /* whether threads outlive a call */
HIDDEN int can_adapt(void);      /* whether calls notice that a thread of theirs cannot run */
/* Calls work(data) in each of the threads, or in one (workers: NULL, or little work); cost: about the microseconds that
   one would take. */
HIDDEN void run(void (*work)(void *), void *data, Workers *workers, int64_t cost);
INLINE int64_t take(int64_t *counter, int64_t step) { return __atomic_fetch_add(counter, step, __ATOMIC_RELAXED); }

/* Memory that a thread reads next, and after that: brought nearer while it computes, or waits for others. */
typedef struct {
    const char *at, *end, *later, *last;
} Ahead;
INLINE void fetch(Ahead *a, int64_t lines) {
    for (; lines && a->at < a->end; lines--) {
        __builtin_prefetch(a->at, 0, 2);
        a->at += 64;
        if (a->at >= a->end && a->later) *a = (Ahead){a->later, a->last, NULL, NULL};
    }
}

/* Threads that do several things one after the other, with all of them done before the next begins: to meet costs a
   fraction of what `run` does. */
typedef struct {
    int64_t size, entered, arrived, round;
} Team; /* round: meetings that were */
typedef struct {
    Team *team;
    int64_t number, size;
} Member;
/* Calls work(data) in the threads, or in fewer, each of which begins with `join`. `team` starts as zeros. */
HIDDEN void run_team(void (*work)(void *), void *data, Team *team, Workers *workers);
HIDDEN Member join(Team *team);
HIDDEN void meet(const Member *me, Ahead *next);
/* Until others have counted up to `value`; as in `meet`, memory that is read next comes nearer meanwhile. */
HIDDEN void await_count(const int64_t *count, int64_t value, Ahead *next);
/* Calls calls(data), which runs kernels one after the other, in threads that stay for all of them where such can be had:
   to begin a piece of work takes a fraction of a microsecond then, in place of several. */
HIDDEN void run_together(void (*calls)(void *), void *data, Workers *workers);
/* Of the calls: the numbers (`GEMM`) of that which reads a weight next, or NULL. They stay until it begins. */
HIDDEN void tell_weight(const int64_t *gemm);
typedef struct {
    const int64_t *gemm;
    Ahead next; /* of its weight */
} Fetched;
INLINE int64_t share(const Member *me, int64_t units, int64_t more) { return (me->number + more) * units / me->size; }

/* Units of work of which each thread has a share of its own and, when that is done, takes from the others' shares: some
   threads are slower for a while, by what else uses their processor or its memory. Of its own it takes half of what is
   left at a time, since what lies together is read faster. */
typedef struct {
    const Member *me;
    int64_t *taken;          /* of each thread's share, TAKEN apart: zeros before anyone begins */
    int64_t units, of, left; /* of: whose share; left: shares that were not looked at */
    int64_t from, to;        /* units that were taken */
} Shares;
#define TAKEN 8 /* a cache line */
INLINE Shares shares_of(const Member *me, int64_t units, int64_t *taken) {
    return (Shares){me, taken, units, me->number, me->size, 0, 0};
}
/* Takes the next units; 0: there are none. */
INLINE int take_units(Shares *s) {
    for (; s->left; s->left--, s->of = (s->of + 1) % s->me->size) {
        const Member owner = {.number = s->of, .size = s->me->size};
        int64_t *taken = s->taken + s->of * TAKEN, some = 1;
        const int64_t first = share(&owner, s->units, 0), end = share(&owner, s->units, 1);
        if (s->of == s->me->number) some = (end - first - __atomic_load_n(taken, __ATOMIC_RELAXED) + 1) / 2;
        s->from = first + take(taken, some > 1 ? some : 1);
        s->to = s->from + some < end ? s->from + some : end;
        if (s->from < end) return 1;
    }
    return 0;
}

/* -- Python's lock: threads.c --------------------------------------------------------------------------------------- */

/* In place of Py_BEGIN_ALLOW_THREADS and Py_END_ALLOW_THREADS: recorded calls keep the lock for some ms. */
HIDDEN PyThreadState *release_gil(void);
HIDDEN void take_gil(PyThreadState *released);
#define RELEASE_GIL \
    { \
        PyThreadState *released = release_gil();
#define TAKE_GIL \
        take_gil(released); \
    }

/* -- the module: pointers and sizes as integers, unchecked; the classes of ops/cpu know the tensors ------------------ */

INLINE int64_t *numbers(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, int64_t *to) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd integers, found %zd", wanted, given);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < given; i++) to[i] = PyLong_AsLongLong(args[i]);
    return PyErr_Occurred() ? NULL : to;
}
#define POINTER(x) ((void *)(intptr_t)(x))

/* -- rows in 8 bits: block_gemm.c ------------------------------------------------------------------------------------ */

/* Rows in 8 bits, each block of 32 by a scale of its own, block by block: what follows is [blocks, rows, ..]. */
typedef struct {
    int8_t *bytes;   /* [32] */
    float *scales;   /* [] */
    float *sums;     /* [] of the bytes, times the scale */
    int32_t *less;   /* [3] sums of the first 16 bytes, the last 16, and all, times -1 */
    int64_t rows, inputs;
} Rounded;
HIDDEN int64_t rounded_size(int64_t rows, int64_t inputs); /* bytes, a multiple of 52 */
HIDDEN Rounded rounded_at(void *memory, int64_t rows, int64_t inputs);
/* Of row `row` of x [rows, inputs], elements [from, end), multiples of 32. */
HIDDEN void round_part(const Rounded *to, const void *x, int64_t row, int64_t from, int64_t end, int64_t half);

/* -- keys and values ------------------------------------------------------------------------------------------------ */

/* Types of the pool. In 8 bits a row, the key or value of a head, is followed by its scale. */
enum { FLOAT, HALF, INT8 };
#define SCALE_BYTES 4
#define MOST_DIM 512 /* in 8 bits: sums of so many products have room in 32 */
/* A row as `KVPool.write` rounds it; in attention_int8.c. */
HIDDEN void round_row(char *to, const float *x, int64_t dim);

/* -- what lies between the products: cpu.c ------------------------------------------------------------------------- */

typedef struct Rows {
    void (*row)(const struct Rows *, int64_t);
    int64_t rows, next, size, heads, kv_heads, dim, stride, rope_stride, half, kv_type;
    int64_t wide; /* weights of norms are floats beside bfloat16 */
    int64_t gelu; /* in place of silu, or without a gate: 1 by tanh, 2 as it is */
    int64_t centred;    /* whether the mean is taken from what is normed */
    int64_t after;      /* whether heads of q and k are normed when they are turned, not before */
    int64_t v_norm;     /* whether heads of values are normed, too, without weights */
    double eps, cap, scale;
    void *out, *kv;
    const void *x, *y, *weight, *cos, *sin, *q_norm, *k_norm; /* y, weight, q_norm, k_norm: NULL where there is none */
    const int64_t *slots;
} Rows;
/* Of row i: all of it, elements, or heads [from, to). */
HIDDEN void norm_part(const Rows *r, int64_t i);
HIDDEN void silu_part(const Rows *r, int64_t i, int64_t from, int64_t to);
HIDDEN void rope_part(const Rows *r, int64_t i, int64_t from, int64_t to);

/* -- attention.c ---------------------------------------------------------------------------------------------------- */

typedef struct {
    const void *q, *kv;
    void *out;
    const int64_t *rows, *table, *prefix, *path, *path_len, *spans; /* spans: row, offset, start, length; trees: NULL */
    const int64_t *starts; /* of trees with different numbers of queries: their first ones, or NULL */
    int64_t count, nodes, depth, table_stride, q_stride, heads, kv_heads, dim, half, kv_type; /* half: of q and out */
    Workers *workers;
    int64_t window, scalar; /* as `AttentionKind` has them */
    int64_t parts;          /* of what a head keeps: 2, key and value; 1: its value is its key */
    int64_t values;         /* elements of a value that come out, from the first on: dim or fewer */
    float cap;              /* of scores, 0: there is none */
    const float *sinks;     /* of heads, or NULL */
    const Rounded *rounded; /* where what comes out is rounded to 8 bits, too, or NULL */
    int64_t padded;         /* dim up to 16s */
    int64_t *tickets;       /* of tiles in several units: how many of these have ended */
    float *scratch, *stored; /* of threads; what chunks of these tiles have */
    int64_t stored_size, worker;
    int64_t *taken; /* of each thread's units: see `Shares` */
} Attention;
/* From out, q, kv, stride of q, heads, kv_heads, dim, half, type of kv, rows of the table, table, its stride,
   prefix_len, path, path_len (of spans: keys of each query, 0: those up to its own), spans, starts, count of rows or
   spans, nodes or length of the longest span, depth,
   scratch, its size, workers; window, sinks or 0, scalar: as `AttentionKind` has them; parts; values, 0: dim. */
#define ATTENTION 28
HIDDEN Attention attention_of(const int64_t *numbers);
/* Attends until nothing is left to take, in thread `thread` of those that share `taken`. */
HIDDEN void attend_units(const Attention *a, int64_t thread, Ahead *next);
HIDDEN void attend_anew(const Attention *a); /* before units are taken, while nobody attends */

/* -- products: gemm.c (few rows, weights in bfloat16), block_gemm.c (weights in blocks) ------------------------------- */

typedef struct {
    const void *x, *weight, *bias, *residual; /* bias, residual: or NULL */
    void *out;
    const int64_t *blocks;                /* the parts of a weight in blocks (blocks.h); NULL: it is in bfloat16 */
    Rounded rounded;                      /* x, where the weight is in blocks */
    int64_t rows, inputs, outputs, block; /* block: inputs that are summed together, of bfloat16 */
    int64_t half, shares, next;           /* half: of x, bias, residual and out */
} Product;
/* Outputs [from, to): multiples of 32, of a weight in blocks of 16 */
HIDDEN void multiply_part(const Product *p, int64_t from, int64_t to);
HIDDEN void multiply_blocks(const Product *p, int64_t from, int64_t to);
HIDDEN extern const int has_product; /* whether this CPU can, with weights in bfloat16 */
HIDDEN PyObject *py_product(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_block_gemm(PyObject *self, PyObject *const *args, Py_ssize_t given);
#define SMALL (1 << 18) /* multiplications, some 3 us: a GEMM in blocks with fewer is one thread's; not swept */

/* In blocks.c. */
HIDDEN PyObject *py_block_pack(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_block_quantize(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_block_rows(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_panel_bytes(PyObject *self, PyObject *const *args, Py_ssize_t given);

/* In layer.c. */
#define GEMM 6 /* weight, bias, inputs, outputs, block, blocks */
HIDDEN Product product_of(const int64_t *numbers, int64_t half);
/* Outputs of a GEMM; the weight of these, or as much of its beginning as a cache has room for. */
typedef struct {
    int64_t from, to;
} Range;
HIDDEN Ahead weight_of(const Product *p, Range outputs);
HIDDEN PyObject *py_layers_spare(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_layers(PyObject *self, PyObject *const *args, Py_ssize_t given);

/* In adapters.c and adapters_8.c. Numbers of a matrix: see `adapted_of`; NULL: it has no adapters. */
enum { IN_FLOAT, IN_HALF, IN_8_BITS };
typedef struct {
    const void *down, *up; /* [S, slices, rank, inputs], [S, rank, outputs]; in 8 bits see adapters_8.c */
    const int64_t *ranks, *ends; /* [S, slices]; [slices] */
    const float *scales; /* [S, slices] */
    int64_t slices, rank, type, inputs, outputs; /* type: of factors; in 8 bits rank is a multiple of 16 */
} Adapted;
/* Rows that adapters may change, and what lies between the two products: [rows, slices, rank] of floats, or `Sixteen`s
   [slices, rank / 16, rows]. */
typedef struct {
    const int64_t *slots; /* 0: of nobody */
    const void *x;        /* [rows, inputs] */
    const Rounded *small; /* x for factors in 8 bits */
    void *between;
    int64_t rows, half; /* half: whether x and y are in bfloat16 */
} Adapting;
HIDDEN int64_t adapter_bytes(const int64_t *numbers, int64_t rows); /* of `between` */
HIDDEN int64_t adapter_units(const int64_t *numbers); /* of the first product */
HIDDEN void adapter_down(const int64_t *numbers, const Adapting *a, int64_t unit);
/* y [rows, outputs], of which outputs [from, to): multiples of 16 */
HIDDEN void adapter_up(const int64_t *numbers, const Adapting *a, void *y, int64_t from, int64_t to);

/* A row's 16 sums in 8 bits, as far from the next one's as `dots` wants it. */
typedef struct {
    int8_t bytes[16];
    float scale;
    int32_t less; /* the sum of the bytes, times -1 */
    int64_t unused;
} Sixteen;
HIDDEN void round_sums(Sixteen *to, const float *sums); /* [16] */
/* Of rows [from, to), up to 32: 16 rows of `down` of a slice, to `sums` [rows, slices, rank] or, if that is NULL, to `small`
   [slices, rank / 16, rows]. */
HIDDEN void down_8_bits(const Adapted *a, const int64_t *slots, const Rounded *x, int64_t unit, int64_t from, int64_t to,
                        float *sums, Sixteen *small);
/* Outputs [first, last) of rows [from, to), up to 32, of `rows`; y_stride: from one row of y to the next. */
HIDDEN void up_8_bits(const Adapted *a, const int64_t *slots, const Sixteen *small, int64_t rows, int64_t from,
                      int64_t to, int64_t first, int64_t last, void *y, int64_t y_stride, int64_t half);

/* In replay.c. */
HIDDEN Ahead weight_ahead(const int64_t *gemm, const Member *me); /* what a thread reads of a weight in blocks */
HIDDEN PyObject *py_replay(PyObject *self, PyObject *const *args, Py_ssize_t given);

/* In experts.c. */
HIDDEN PyObject *py_experts_spare(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_experts(PyObject *self, PyObject *const *args, Py_ssize_t given);

/* In features.c. */
HIDDEN PyObject *py_cpu_features(PyObject *self, PyObject *const *args, Py_ssize_t given);

/* -- penalties and biases: edits.c ------------------------------------------------------------------------------------- */

/* Of the row table, and of a batch of draft trees. Rows of a batch are b, rows of the table rows[b]. Of the logits'
   tokens those in [from, to) are edited; draft_ids: where logits have each token, or NULL: under its own number. */
typedef struct {
    const int64_t *rows, *text, *prompt_len, *bias_ids; /* [batch]; [R, length]; [R]; [R, biases], padded with value 0 */
    const float *penalties, *bias_values; /* [R, 3]: frequency, presence, repetition; [R, biases] */
    const int64_t *tokens, *path, *path_len; /* [batch, nodes], and of paths [batch, nodes, width] */
    const int64_t *draft_ids, *kv_len; /* of drafts; kv_len [R] */
    const float *costs; /* [R, longest + 1]: of repetitions of so many tokens, longest < 64 */
    int64_t length, biases, nodes, width, from, to, longest;
} Edits;
typedef struct {
    float factor, delta;
} Edit;
INLINE float edited(float x, Edit e) { return (x > 0.0f ? x / e.factor : x * e.factor) + e.delta; }
HIDDEN int is_edited(const Edits *e, int64_t b); /* whether the row has any but what repetitions cost */
HIDDEN int repeats_cost(const Edits *e, int64_t b); /* whether repetitions do */
/* counts [vocab] are zeros before; newest: position of the row's root, up to which its text counts. found [vocab]: the
   tokens that are counted or have a bias, each once. Returns how many these are. */
HIDDEN int64_t count_text(const Edits *e, int64_t b, int64_t newest, int32_t *counts, int32_t *found);
/* newest: as above; before [width]: what is put back. */
HIDDEN void count_path(const Edits *e, int64_t b, int64_t node, int64_t newest, int32_t *counts, int32_t *before);
HIDDEN void forget_path(const Edits *e, int64_t b, int64_t node, int64_t newest, int32_t *counts,
                        const int32_t *before);
HIDDEN Edit edit_of(const Edits *e, int64_t b, const int32_t *counts, int64_t id);
/* x [vocab] as floats of the node's logits: the tokens that have an edit, when all is counted. */
HIDDEN void edit_node(const Edits *e, int64_t b, int64_t node, const int32_t *found, int64_t distinct,
                      const int32_t *counts, const void *logits, int half, float *x);

/* Drafts know of their rows' texts up to kv_len; of what is drafted below, for what repetitions cost alone: `tokens`
   [batch * nodes, width]. */
#define DRAFT_EDITS 14
HIDDEN Edits draft_edits_of(const int64_t *n);
/* logits of the row's nodes, `stride` from one to the next, are changed; counts, found: memory, of which [from, to) is
   used. */
HIDDEN void edit_logits(const Edits *e, int64_t b, void *logits, int64_t nodes, int64_t stride, int half,
                        int32_t *counts, int32_t *found);
HIDDEN PyObject *py_edit_logits(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_descend(PyObject *self, PyObject *const *args, Py_ssize_t given);

/* Two words for a seed and a position: ops/noise/spec.py. */
typedef struct {
    uint32_t word[2];
} Key;
INLINE Key key_of(int64_t seed, int64_t position) {
    uint64_t key = (uint64_t)position * 0x9E3779B97F4A7C15 + (uint64_t)seed * 0xD1342543DE82EF95;
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9;
    key = (key ^ key >> 27) * 0x94D049BB133111EB;
    key ^= key >> 31;
    return (Key){{(uint32_t)key, (uint32_t)(key >> 32)}};
}

/* In sampling.c. */
HIDDEN PyObject *py_sampling_rows(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_draw(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_heaviest(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_gumbel(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_top_tokens(PyObject *self, PyObject *const *args, Py_ssize_t given);
HIDDEN PyObject *py_following(PyObject *self, PyObject *const *args, Py_ssize_t given);

/* In simulate.c. */
HIDDEN PyObject *py_simulate(PyObject *self, PyObject *const *args, Py_ssize_t given);

/* A node's mark and grade, and what is known of grades: as in core.py and ops/assign/spec.py. */
#define MARK_DEPTH 0xFF
#define MARK_VERIFIED (1 << 8)
#define MARK_SOURCE 9
#define MARK_SURVIVAL 16
#define MARK_ONE ((1 << 15) - 1)
#define LEVELS 16
#define DEPTHS 16
#define SLOPE 1.25f
#define MIDDLE 7.0f
#define SURE 0.995f
enum { OTHER, MODEL, LOOKUP };
INLINE int64_t cell_of(int64_t grade, int64_t depth) { return grade * DEPTHS + (depth < DEPTHS ? depth : DEPTHS - 1); }
HIDDEN int64_t level_of(float logp); /* in assign.c */

/* What tree.c, assign.c, ngram.c, suffix.c, merge.c, heads.c, pairs.c, delta_net.c, short_conv.c, attention.c, latent.c
   adapters.c and indexer.c add to the module. */
HIDDEN extern PyMethodDef tree_methods[], assign_methods[], ngram_methods[], suffix_methods[], merge_methods[],
    head_methods[], pair_methods[], delta_methods[], conv_methods[], attention_methods[], latent_methods[],
    adapter_methods[], index_methods[];
