/* What this CPU can run, and lets a program use: the names in `needs` of ops/cpu/isa.py. Asked of the plain module. */

#include "cpu.h"

typedef struct {
    const char *name;
    uint32_t where, bit, state; /* x86: which word of `words`, and what the operating system must keep of it */
} Feature;

#if defined(__x86_64__)
#include <cpuid.h>

enum { LEAF_1_C, LEAF_7_B, LEAF_7_C, LEAF_7_1_A, LEAF_EXT_C, WORDS };
#define YMM 0x06u
#define ZMM 0xe6u
static const Feature features[] = {
    {"sse4_2", LEAF_1_C, 20, 0},         {"movbe", LEAF_1_C, 22, 0},        {"popcnt", LEAF_1_C, 23, 0},
    {"lzcnt", LEAF_EXT_C, 5, 0},         {"bmi1", LEAF_7_B, 3, 0},          {"bmi2", LEAF_7_B, 8, 0},
    {"avx", LEAF_1_C, 28, YMM},          {"fma", LEAF_1_C, 12, YMM},        {"f16c", LEAF_1_C, 29, YMM},
    {"avx2", LEAF_7_B, 5, YMM},          {"avx_vnni", LEAF_7_1_A, 4, YMM},  {"avx512f", LEAF_7_B, 16, ZMM},
    {"avx512dq", LEAF_7_B, 17, ZMM},     {"avx512cd", LEAF_7_B, 28, ZMM},   {"avx512bw", LEAF_7_B, 30, ZMM},
    {"avx512vl", LEAF_7_B, 31, ZMM},     {"avx512_vbmi", LEAF_7_C, 1, ZMM}, {"avx512_vnni", LEAF_7_C, 11, ZMM},
    {"avx512_bf16", LEAF_7_1_A, 5, ZMM},
};

/* words: some of cpuid's, by what `Feature` calls them -> what the operating system keeps of a thread's registers. */
static uint32_t read_words(uint32_t *words) {
    uint32_t a, b, c, d, kept = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) words[LEAF_1_C] = c;
    if (words[LEAF_1_C] >> 27 & 1) __asm__("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) words[LEAF_EXT_C] = c;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return kept;
    words[LEAF_7_B] = b;
    words[LEAF_7_C] = c;
    if (a && __get_cpuid_count(7, 1, &a, &b, &c, &d)) words[LEAF_7_1_A] = a;
    return kept;
}
#elif defined(__aarch64__)
enum { HWCAP, HWCAP_2, WORDS };
static const Feature features[] = {{"crc32", HWCAP, 7, 0},
                                   {"atomics", HWCAP, 8, 0},
                                   {"asimdrdm", HWCAP, 12, 0},
                                   {"asimddp", HWCAP, 20, 0},
                                   {"i8mm", HWCAP_2, 13, 0}};
#if defined(__linux__)
#include <sys/auxv.h>
static uint32_t read_words(uint32_t *words) {
    words[HWCAP] = (uint32_t)getauxval(AT_HWCAP);
    words[HWCAP_2] = (uint32_t)getauxval(AT_HWCAP2);
    return 0;
}
#else
static uint32_t read_words(uint32_t *words) { /* Apple's: all have those of the first word */
    words[HWCAP] = ~0u;
    return 0;
}
#endif
#else
enum { WORDS = 1 };
static const Feature features[1];
static uint32_t read_words(uint32_t *words) { return 0; }
#endif

/* -> a list of names */
PyObject *py_cpu_features(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    uint32_t words[WORDS] = {0};
    const uint32_t kept = read_words(words);
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names && i < sizeof features / sizeof *features; i++) {
        const Feature *f = &features[i];
        if (!f->name || !(words[f->where] >> f->bit & 1) || (kept & f->state) != f->state) continue;
        PyObject *name = PyUnicode_FromString(f->name);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}
