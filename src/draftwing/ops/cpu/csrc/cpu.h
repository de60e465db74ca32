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
#include <stddef.h>
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
typedef int8_t pb __attribute__((vector_size(PART)));
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
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++) /* a loop that is unrolled */
#define EACH_REGISTER EACH(c, REGISTERS)
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

/* name(a, b): -1 where a is `compared` to b, else 0. */
#define COMPARISON(name, vector, field, registers, compared) \
    INLINE vi name(vector a, vector b) { \
        Parted x = {.field = a}, y = {.field = b}; \
        EACH_REGISTER x.ints[c] = x.registers[c] compared y.registers[c]; \
        return x.i; \
    }
COMPARISON(above, vf, f, floats, >)
COMPARISON(at_least, vf, f, floats, >=)
COMPARISON(same, vf, f, floats, ==)
COMPARISON(more, vi, i, ints, >)
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
/* Calls f(.., half), for which that is a constant. */
#define BY_HALF(half, f, ...) ((half) ? f(__VA_ARGS__, 1) : f(__VA_ARGS__, 0))
/* The same of two types, of which the second is in bfloat16 where the first is. */
#define BY_HALVES(half, second, f, ...) ((half) ? f(__VA_ARGS__, 1, 1) : BY_HALF(second, f, __VA_ARGS__, 0))

/* PART bytes with a sign as whole numbers. GCC 12 would move them one by one for `__builtin_convertvector`. */
INLINE pi from_signed(const void *p) {
#if PART == 16
    return (pi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p));
#elif defined(__AVX2__)
    return (pi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p));
#else
    pb v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, pi);
#endif
}
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

/* The sum of the products of `size` elements of x and w, from `x_at` and `w_at` on. */
INLINE float dot_of(const void *x, int64_t x_at, const int x_half, const void *w, int64_t w_at, const int w_half,
                    int64_t size) {
    vf sum = {0};
    for (int64_t c = 0; c < size; c += LANES)
        sum += load(x, x_at + c, size - c, x_half) * load(w, w_at + c, size - c, w_half);
    return sum_lanes(sum);
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

/* To the nearest whole number and to even, of up to 2^22: what is added is 1.5 * 2^23, which has it in its low bits. */
INLINE vi nearest(vf x) {
    const vf magic = splat(12582912.0f);
    return (vi)(x + magic) - (vi)magic;
}

/* A polynomial by Horner's rule: factors from the highest power's down to the constant. */
INLINE vf polynomial(vf x, const float *factors, const int count) {
    vf p = splat(factors[0]);
    EACH(i, count - 1) p = p * x + splat(factors[i + 1]);
    return p;
}
#define POLYNOMIAL(x, ...) polynomial(x, (const float[]){__VA_ARGS__}, sizeof((float[]){__VA_ARGS__}) / sizeof(float))

/* 2^x to 2 ulp; 0 below the normal numbers, so exactly 0 at -inf. x is at most 127. */
INLINE vf exp2_16(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
    vi normal = at_least(x, splat(-126.0f));
    vf y = select_f(normal, x, splat(0.0f));
    vf r = y + magic;
    vi n = (vi)r - (vi)magic;
    vf p = POLYNOMIAL(y - (r - magic), 1.525273380e-5f, 1.540353039e-4f, 1.333355815e-3f, 9.618129108e-3f, 5.550410866e-2f,
                      2.402265070e-1f, 6.931471806e-1f, 1.0f); /* Taylor: ln(2)^k / k! */
    return select_f(normal, (vf)((vi)p + (n << 23)), splat(0.0f));
}

/* ln(x) to 2 ulp for normal x > 0: x = 2^e * m with m around 1, ln(m) = 2 atanh((m - 1) / (m + 1)) by its series. */
INLINE vf log16(vf x) {
    const int32_t root = 0x3f3504f3; /* sqrt(1/2) */
    vi e = ((vi)x - root) >> 23;
    vf m = (vf)((vi)x - (e << 23)) - 1.0f, s = m / (m + 2.0f), power = __builtin_convertvector(e, vf), q = s * s;
    vf p = POLYNOMIAL(q, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3);
    p = p * q * s * 2.0f + power * 1.42860677e-6f; /* ln 2 in two parts; the first times a power is exact */
    return (p + 2.0f * s) + power * 0.693145752f;
}

/* x / (1 + 2^power). A power that is no number does not stay so. */
INLINE vf over_exp2(vf x, vf power) {
    return x / (1.0f + exp2_16(select_f(above(power, splat(126.0f)), splat(126.0f), power)));
}
INLINE vf sigmoid(vf x) { return over_exp2(splat(1.0f), x * splat(-1.44269504f)); }
INLINE vf exponential(vf x) { return exp2_16(x * splat(1.44269504f)); }
/* ln(1 + exp(x)) = max(x, 0) + ln(1 + y), y = exp(-|x|); ln(1 + y) = 2 atanh(y / (2 + y)) by its series. */
INLINE vf softplus(vf x) {
    const vf positive = select_f(above(x, splat(0.0f)), x, splat(0.0f)), size = positive + (positive - x);
    const vf y = exponential(-size), s = y / (y + 2.0f), q = s * s;
    const vf p = POLYNOMIAL(q, 1.0f / 15, 1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3);
    return positive + 2.0f * (s + s * q * p);
}
INLINE vf silu(vf x) { return over_exp2(x, x * splat(-1.44269504f)); }
INLINE vf gelu_by_tanh(vf x) { return over_exp2(x, x * (splat(-2.30220819f) - x * x * splat(0.102943240f))); }
/* cap * tanh(x / cap) = cap - 2 * cap / (1 + exp(2x / cap)); factor: 2 log2(e) / cap. What is no number stays so. */
INLINE vf soft_capped(vf x, float cap, float factor) {
    return select_f(at_least(x, splat(-INFINITY)), cap - over_exp2(splat(2 * cap), x * splat(factor)), x);
}
/* The largest lane. */
INLINE float top_lane(vf v) {
    float top = v[0];
    for (int l = 1; l < LANES; l++) top = v[l] > top ? v[l] : top;
    return top;
}
INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

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

/* Memory that a thread reads next, and what it reads after that, up to three ranges: brought nearer while it computes, or
   waits for others. NULL: there are no more. */
typedef struct {
    const char *at, *end, *later, *last, *third, *final;
} Ahead;
INLINE void fetch(Ahead *a, int64_t lines) {
    for (; lines && a->at < a->end; lines--) {
        __builtin_prefetch(a->at, 0, 2);
        a->at += 64;
        if (a->at >= a->end && a->later) *a = (Ahead){a->later, a->last, a->third, a->final};
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
/* `run` and `run_team` without the lock. */
HIDDEN void run_unlocked(void (*work)(void *), void *data, Workers *workers, int64_t cost);
HIDDEN void run_team_unlocked(void (*work)(void *), void *data, Team *team, Workers *workers);

/* -- the module: module.c ------------------------------------------------------------------------------------------- */

/* A function of the module. Python gives pointers and sizes as integers, unchecked: the classes of ops/cpu know the
   tensors. Doubles may follow them. All come one after the other in memory whose rest is zeros, so a struct that begins
   with such fields is made of them. */
typedef struct {
    const char *name;
    void (*call)(int64_t *n);     /* NULL: `count` */
    int64_t given, size;          /* integers; bytes of the memory, 0: what is given has room */
    int64_t doubles, more;        /* behind the integers; integers behind these, all of which may be left out */
    int64_t (*count)(int64_t *n); /* returns an integer; others return None */
    PyMethodDef method;           /* of the module, which fills it in */
} Function;
#define UP_TO(type, field) (int64_t)(offsetof(type, field) / sizeof(int64_t)) /* fields before it, each of 8 bytes */
#define POINTER(x) ((void *)(intptr_t)(x))
HIDDEN const Function *function_of(PyObject *function); /* NULL: it is none of the module's */
/* Lists of them, one of a file. */
#define EACH_LIST(DO) \
    DO(row) DO(layer) DO(expert) DO(product) DO(block_gemm) DO(block) DO(sampling) DO(edit) DO(simulate) DO(tree) \
    DO(assign) DO(ngram) DO(suffix) DO(merge) DO(head) DO(pair) DO(delta) DO(conv) DO(attention) DO(latent) DO(adapter) \
    DO(index)
#define DECLARED(name) HIDDEN extern Function name##_functions[];
EACH_LIST(DECLARED)
HIDDEN PyObject *py_replay(PyObject *self, PyObject *const *args, Py_ssize_t given);       /* replay.c */
HIDDEN PyObject *py_cpu_features(PyObject *self, PyObject *const *args, Py_ssize_t given); /* features.c */

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

/* Up to eps, what `rope_write` is given. */
typedef struct Rows {
    void *out, *kv; /* out: also the rows [q, k, v] that are turned */
    const int64_t *slots;
    const void *cos, *sin;
    int64_t rows, heads, kv_heads, dim, stride, rope_stride, half, kv_type; /* strides: of q, k, v; of cos and sin */
    const void *q_norm, *k_norm; /* NULL where there is none */
    Workers *workers;
    int64_t wide;   /* weights of norms are floats beside bfloat16 */
    int64_t v_norm; /* whether heads of values are normed, too, without weights */
    int64_t after;  /* whether heads of q and k are normed when they are turned, not before */
    double eps, cap, scale;
    void (*row)(const struct Rows *, int64_t);
    int64_t next, size;
    int64_t gelu;    /* in place of silu, or without a gate: 1 by tanh, 2 as it is */
    int64_t centred; /* whether the mean is taken from what is normed */
    const void *x, *y, *weight; /* y, weight: NULL where there is none */
} Rows;
/* Of row i: all of it, elements, or heads [from, to). */
HIDDEN void norm_part(const Rows *r, int64_t i);
HIDDEN void silu_part(const Rows *r, int64_t i, int64_t from, int64_t to);
HIDDEN void ungated_part(const Rows *r, int64_t i, int64_t from, int64_t to);
HIDDEN void rope_part(const Rows *r, int64_t i, int64_t from, int64_t to);

/* -- attention.c ---------------------------------------------------------------------------------------------------- */

/* What a forward's queries are, and what they attend to: `who` of ops/attention/cpu.py. */
typedef struct {
    const int64_t *rows, *table; /* of items; page tables of all rows, table_stride apart */
    int64_t table_stride;
    const int64_t *prefix, *path, *path_len; /* of trees; of chunks path_len: keys of each query, NULL: up to its own */
    const int64_t *spans;                    /* row, offset, start, length of each chunk; NULL: items are trees */
    const int64_t *starts;       /* of trees with different numbers of queries: their first ones, or NULL */
    int64_t count, nodes, depth; /* of items; queries of a tree, or of the longest span; of paths */
} Batch;
/* A chunk or tree of it: its queries, and the page table of its row. */
typedef struct {
    const int64_t *span, *table; /* span: NULL of a tree */
    int64_t row, first, queries;
} Item;
INLINE Item item_of(const Batch *b, int64_t number) {
    Item i = {.span = b->spans ? b->spans + 4 * number : NULL};
    i.row = b->rows[i.span ? i.span[0] : number];
    i.table = b->table + i.row * b->table_stride;
    i.first = i.span ? i.span[1] : b->starts ? b->starts[number] : number * b->nodes;
    i.queries = i.span ? i.span[3] : b->starts ? b->starts[number + 1] - i.first : b->nodes;
    return i;
}

/* Up to `values`, what `attend` is given. */
typedef struct {
    void *out;
    const void *q, *kv;
    int64_t q_stride, heads, kv_heads, dim, half, kv_type; /* half: of q and out */
    Batch batch;
    int64_t *tickets; /* all scratch begins here; of tiles in several units: how many of these have ended */
    int64_t scratch_size;
    Workers *workers;
    int64_t window;     /* this, sinks and scalar: as `AttentionKind` has them */
    const float *sinks; /* of heads, or NULL */
    int64_t scalar;
    int64_t parts;  /* of what a head keeps: 2, key and value; 1: its value is its key */
    int64_t values; /* elements of a value that come out, from the first on: dim or fewer; given 0: dim */
    double cap;     /* of scores, 0: there is none */
    const Rounded *rounded;  /* where what comes out is rounded to 8 bits, too, or NULL */
    int64_t padded;          /* dim up to 16s */
    float *scratch, *stored; /* of threads; what chunks of these tiles have */
    int64_t stored_size, worker;
    int64_t *taken; /* of each thread's units: see `Shares` */
} Attention;
#define ATTENTION UP_TO(Attention, cap)
HIDDEN Attention attention_of(const int64_t *numbers);
/* Attends until nothing is left to take, in thread `thread` of those that share `taken`. */
HIDDEN void attend_units(const Attention *a, int64_t thread, Ahead *next);
HIDDEN void attend_anew(const Attention *a); /* before units are taken, while nobody attends */

/* -- products: gemm.c (few rows, weights in bfloat16), block_gemm.c (weights in blocks) ------------------------------- */

/* Up to `blocks` the numbers of a GEMM. */
typedef struct {
    const void *weight, *bias;      /* bias: or NULL */
    int64_t inputs, outputs, block; /* block: inputs that are summed together, of bfloat16 */
    const int64_t *blocks;          /* the parts of a weight in blocks (blocks.h); NULL: it is in bfloat16 */
    const void *x, *residual;       /* residual: or NULL */
    void *out;
    Rounded rounded;                  /* x, where the weight is in blocks */
    int64_t rows, half, shares, next; /* half: of x, bias, residual and out */
} Product;
/* Outputs [from, to): multiples of 32, of a weight in blocks of 16 */
HIDDEN void multiply_part(const Product *p, int64_t from, int64_t to);
HIDDEN void multiply_blocks(const Product *p, int64_t from, int64_t to);
HIDDEN extern const int has_product; /* whether this CPU can, with weights in bfloat16 */
#define SMALL (1 << 18) /* multiplications, some 3 us: a GEMM in blocks with fewer is one thread's; not swept */

/* In layer.c. */
#define GEMM UP_TO(Product, x)
HIDDEN Product product_of(const int64_t *numbers, int64_t half);
/* Outputs of a GEMM; the weight of these, or as much of its beginning as a cache has room for. */
typedef struct {
    int64_t from, to;
} Range;
HIDDEN Ahead weight_of(const Product *p, Range outputs);

/* In adapters.c and adapters_8.c. Of a matrix, as `AdapterWeights` gives its numbers; functions take NULL where it has no
   adapters. */
enum { IN_FLOAT, IN_HALF, IN_8_BITS };
typedef struct {
    const void *down, *up; /* [S, slices, rank, inputs], [S, rank, outputs]; in 8 bits see adapters_8.c */
    const int64_t *ranks;  /* [S, slices] */
    const float *scales;   /* [S, slices] */
    const int64_t *ends;   /* [slices] */
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
HIDDEN int64_t adapter_bytes(const Adapted *a, int64_t rows); /* of `between` */
HIDDEN int64_t adapter_units(const Adapted *a);               /* of the first product */
/* A thread's part of what `adapter_down` reads for the first row that has an adapter. */
HIDDEN Ahead adapter_ahead(const Adapted *a, const int64_t *slots, int64_t rows, const Member *me);
HIDDEN void adapter_down(const Adapted *a, const Adapting *of, int64_t unit);
/* y [rows, outputs], of which outputs [from, to): multiples of 16 */
HIDDEN void adapter_up(const Adapted *a, const Adapting *of, void *y, int64_t from, int64_t to);

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

/* -- penalties and biases: edits.c ------------------------------------------------------------------------------------- */

/* Of the row table, and of a batch of draft trees. Rows of a batch are b, rows of the table rows[b]. Of the logits'
   tokens those in [from, to) are edited; draft_ids: where logits have each token, or NULL: under its own number. */
typedef struct {
    const int64_t *rows, *text; /* [batch]; [R, length] */
    int64_t length;
    const int64_t *prompt_len;
    const float *penalties;   /* [R, 3]: frequency, presence, repetition */
    const int64_t *bias_ids;  /* [R, biases], padded with value 0 */
    const float *bias_values; /* [R, biases] */
    int64_t biases;
    const float *costs; /* [R, longest + 1]: of repetitions of so many tokens, longest < 64 */
    int64_t longest;
    const int64_t *draft_ids, *kv_len; /* of drafts; kv_len [R] */
    const int64_t *tokens;             /* [batch, nodes]; of drafts see `edit_logits` */
    int64_t width;                     /* of paths [batch, nodes, width] */
    const int64_t *path, *path_len;
    int64_t nodes;
    int64_t from, to;
} Edits;
#define EDITS UP_TO(Edits, from) /* of the target's trees */
#define DRAFT_EDITS UP_TO(Edits, path)
INLINE Edits edits_of(const int64_t *n, int64_t count) {
    Edits e = {0};
    memcpy(&e, n, (size_t)count * sizeof *n);
    return e;
}
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
   [batch * nodes, width] below each node's root, down to it; width -1: not known. logits of the row's nodes, `stride`
   from one to the next, are changed; counts, found: memory, of which [from, to) is used. */
HIDDEN void edit_logits(const Edits *e, int64_t b, void *logits, int64_t nodes, int64_t stride, int half,
                        int32_t *counts, int32_t *found);

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

/* The places of the best `count` of n scores, best first; of equals the lower place. Where there are NaN any may be. In
   tree.c. */
HIDDEN void best_first(const float *score, int64_t n, int64_t count, int64_t *places);

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
/* How likely a node is right whose parent was. seen, accepted: of cells. */
INLINE float share_right(const float *seen, const float *accepted, int64_t grade, int64_t depth) {
    const int64_t cell = cell_of(grade, depth);
    const float share = accepted[cell] / seen[cell];
    return share < SURE ? share : SURE;
}
HIDDEN int64_t level_of(float logp); /* in assign.c */

