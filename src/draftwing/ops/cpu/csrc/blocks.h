/* Weights in quantised blocks: how GGUF stores them, and how they are laid out for GEMMs.

   A block is 32 inputs of one output: whole numbers q and what makes values of them, scale * q + min. GGUF stores a
   row's blocks one after the other. A GEMM reads panels: 16 outputs, and of them block after block. A panel's block has

   - the low 4 bits of q, 256 bytes: byte 64 g + 4 o + i has input 4 g + i of output o, and above it input 16 + 4 g + i;
     or all 8 bits of q, plus 128, 512 bytes: byte 64 g + 4 o + i has input 4 g + i of output o
   - further bits, 64 bytes for each: byte 4 o + i has bit g of input 4 g + i (one bit); of two, bytes 0 to 63 are those
     of g = 0..3, bytes 64 to 127 those of g = 4..7
   - 16 scales and perhaps 16 mins: float16, or whole numbers that those of a super-block of 8 blocks are multiplied
     with; a super-block begins with its own, float16. Of MXFP4 16 exponents, and q are codes of twice its values.

   So a panel is as long as what it is made of (K types: 3% longer), and is read from beginning to end. */

#pragma once
#include "cpu.h"

#define BLOCK 32 /* inputs */
#define SUPER 8  /* blocks of a super-block */
#define PANEL_OUTPUTS 16

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, MXFP4 = 39 }; /* GGML's numbers */
#define EACH_TYPE(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(MXFP4)

typedef struct {
    int wide;   /* whether q is stored in 8 bits; else in 4 and `high` more */
    int high;   /* 0, 1, 2 */
    int zero;   /* what q is too large by, as a power of two; 0: nothing */
    int min;    /* whether blocks have a min */
    int super;  /* whether there are super-blocks */
    int halves; /* whether each half of a block has a scale of its own, a signed byte */
    int mx;     /* whether q is a sign and three bits that name a size, and a scale an exponent of 2, more by 127 */
    int stored; /* bytes of a block (or super-block) in GGUF */
} Kind;

INLINE Kind kind_of(int64_t type) {
    switch (type) {
    case Q4_0: return (Kind){.zero = 3, .stored = 18};
    case Q4_1: return (Kind){.min = 1, .stored = 20};
    case Q5_0: return (Kind){.high = 1, .zero = 4, .stored = 22};
    case Q5_1: return (Kind){.high = 1, .min = 1, .stored = 24};
    case Q8_0: return (Kind){.wide = 1, .zero = 7, .stored = 34};
    case Q4_K: return (Kind){.min = 1, .super = 1, .stored = 144};
    case Q5_K: return (Kind){.high = 1, .min = 1, .super = 1, .stored = 176};
    case Q6_K: return (Kind){.high = 2, .zero = 5, .super = 1, .halves = 1, .stored = 210};
    case MXFP4: return (Kind){.zero = 4, .mx = 1, .stored = 17}; /* zero: of what codes become */
    default: return (Kind){0};
    }
}
/* Bytes of a panel's block: of its bits of q, of all of it, and of what a super-block begins with. */
INLINE int64_t q_bytes(Kind k) { return (k.wide ? 512 : 256) + 64 * k.high; }
INLINE int64_t block_bytes(Kind k) { return q_bytes(k) + (k.mx ? 16 : k.super || !k.min ? 32 : 64); }
INLINE int64_t head_bytes(Kind k) { return k.super ? k.min ? 64 : 32 : 0; }
INLINE int64_t panel_bytes(Kind k, int64_t inputs) {
    const int64_t blocks = inputs / BLOCK;
    return blocks * block_bytes(k) + (k.super ? blocks / SUPER * head_bytes(k) : 0);
}

/* Twice the values of MXFP4's codes. */
#define MX_VALUES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
/* Half of a power of 2 by its exponent, more by 127; the first two lie below the normal numbers. */
INLINE float from_exponent(uint8_t e) {
    const uint32_t bits = e < 2 ? (uint32_t)(e + 1) << 21 : (uint32_t)(e - 1) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
INLINE float from_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff);
    union {
        uint32_t bits;
        float value;
    } x;
    if (rest >= 0x7c00) x.bits = 0x7f800000 | (rest & 0x3ff) << 13; /* infinite, or no number */
    else if (rest >= 0x400) x.bits = (rest << 13) + (112u << 23);
    else x.value = (float)rest * 0x1p-24f;
    x.bits |= sign;
    return x.value;
}

/* Adds to sums[row][16] the products of rows [row, row + rows), up to 32, with a panel; in block_gemm.c. */
HIDDEN void multiply_panel(int64_t type, const Rounded *x, const uint8_t *at, int64_t row, int64_t rows,
                           float (*sums)[PANEL_OUTPUTS]);

/* Part of a weight: outputs [first, first + outputs), in panels of one kind; the last may be filled up. */
typedef struct {
    const uint8_t *panels;
    int64_t type, first, outputs;
} Part;
INLINE Part part_of(const int64_t *blocks, int64_t i) { /* `Product.blocks`: their number, and 4 numbers of each */
    const int64_t *n = blocks + 1 + 4 * i;
    return (Part){POINTER(n[0]), n[1], n[2], n[3]};
}
