/* Weights in quantised blocks: from GGUF's layout to panels, single rows as floats, and floats to blocks. */

#include "blocks.h"

/* -- blocks of a row, as GGUF stores them -------------------------------------------------------------------------- */

/* What a block says: value i is q[i] * scale[i / 16] * unit + shift * base; of those without super-blocks unit and base
   are 1. Scales and shifts are float16 then, and else whole numbers, so that panels hold what the file does. */
typedef struct {
    uint8_t q[BLOCK]; /* not below 0: with `Kind.zero` still in it */
    uint16_t half_scale, half_min;
    uint8_t scale[2], min; /* of a super-block's */
} Values;

INLINE uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

INLINE void nibbles(uint8_t *q, const uint8_t *from) {
    for (int i = 0; i < 16; i++) {
        q[i] = from[i] & 15;
        q[i + 16] = from[i] >> 4;
    }
}
INLINE void fifth_bits(uint8_t *q, const uint8_t *from) {
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < BLOCK; i++) q[i] |= (uint8_t)((bits >> i & 1) << 4);
}
/* The scale and min of block j of a Q4_K or Q5_K super-block, 6 bits each, in 12 bytes. */
INLINE void six_bits(Values *v, const uint8_t *s, int64_t j) {
    v->scale[0] = v->scale[1] = j < 4 ? s[j] & 63 : (uint8_t)((s[j + 4] & 15) | s[j - 4] >> 6 << 4);
    v->min = j < 4 ? s[j + 4] & 63 : (uint8_t)(s[j + 4] >> 4 | s[j] >> 6 << 4);
}
/* Block j of a super-block that is stored at `at`; of a type without them j is 0. */
INLINE Values values_of(const int64_t type, const uint8_t *at, int64_t j) {
    const Kind k = kind_of(type);
    Values v = {.half_scale = half_at(at)};
    const uint8_t *low, *high;
    if (k.min) v.half_min = half_at(at + 2);
    switch (type) {
    case Q4_0:
    case Q4_1:
    case Q5_0:
    case Q5_1:
        low = at + (k.min ? 4 : 2);
        nibbles(v.q, k.high ? low + 4 : low);
        if (k.high) fifth_bits(v.q, low);
        break;
    case Q8_0:
        for (int i = 0; i < BLOCK; i++) v.q[i] = at[2 + i] ^ 128;
        break;
    case MXFP4:
        v.scale[0] = at[0];
        nibbles(v.q, at + 1);
        break;
    case Q4_K:
    case Q5_K:
        six_bits(&v, at + 4, j);
        low = at + (type == Q4_K ? 16 : 48) + j / 2 * 32;
        for (int i = 0; i < BLOCK; i++) v.q[i] = j % 2 ? low[i] >> 4 : low[i] & 15;
        for (int i = 0; i < BLOCK && type == Q5_K; i++) v.q[i] |= (uint8_t)((at[16 + i] >> j & 1) << 4);
        break;
    case Q6_K:
        v.half_scale = half_at(at + 208);
        v.scale[0] = at[192 + 2 * j];
        v.scale[1] = at[193 + 2 * j];
        low = at + j / 4 * 64 + j % 2 * 32;
        high = at + 128 + j / 4 * 32;
        for (int i = 0; i < BLOCK; i++)
            v.q[i] = (uint8_t)((j % 4 < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * (j % 4) & 3) << 4);
        break;
    }
    return v;
}

/* -- to panels ----------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *to;
    const uint8_t *from; /* rows as GGUF stores them */
    int64_t type, rows, inputs;
    Workers *workers;
    Team team;
} Packing;

INLINE void put_block(Kind k, uint8_t *to, const Values *v, int64_t output) {
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < 4; i++) {
            const int64_t lane = 4 * output + i;
            const uint8_t q = v->q[4 * g + i];
            if (k.wide) to[64 * g + lane] = q;
            else if (g < 4) to[64 * g + lane] = q & 15;
            else to[64 * (g - 4) + lane] |= (uint8_t)(q << 4);
            if (k.high == 1) to[256 + lane] |= (uint8_t)((q >> 4 & 1) << g);
            if (k.high == 2) to[256 + 64 * (g / 4) + lane] |= (uint8_t)((q >> 4 & 3) << 2 * (g % 4));
        }
    uint8_t *scales = to + q_bytes(k);
    if (k.mx) {
        scales[output] = v->scale[0];
    } else if (!k.super) {
        memcpy(scales + 2 * output, &v->half_scale, 2);
        if (k.min) memcpy(scales + 32 + 2 * output, &v->half_min, 2);
    } else {
        scales[output] = v->scale[0];
        scales[16 + output] = k.halves ? v->scale[1] : v->min;
    }
}
INLINE void pack_panel(const int64_t type, const Packing *j, int64_t panel) {
    const Kind k = kind_of(type);
    const int64_t first = panel * PANEL_OUTPUTS, blocks = j->inputs / BLOCK, size = panel_bytes(k, j->inputs);
    const int64_t row_bytes = blocks / (k.super ? SUPER : 1) * k.stored;
    uint8_t *start = j->to + panel * size;
    memset(start, 0, (size_t)size);
    for (int64_t o = 0; o < PANEL_OUTPUTS && first + o < j->rows; o++) {
        const uint8_t *from = j->from + (first + o) * row_bytes;
        uint8_t *to = start;
        for (int64_t b = 0; b < blocks; b++, to += block_bytes(k)) {
            const Values v = values_of(type, from, k.super ? b % SUPER : 0);
            if (k.super && b % SUPER == 0) {
                memcpy(to + 2 * o, &v.half_scale, 2);
                if (k.min) memcpy(to + 32 + 2 * o, &v.half_min, 2);
                to += head_bytes(k);
            }
            put_block(k, to, &v, o);
            if (!k.super || b % SUPER == SUPER - 1) from += k.stored;
        }
    }
}
static void some_panels(void *data) {
    Packing *j = data;
    const Member me = join(&j->team);
    const int64_t panels = (j->rows + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    for (int64_t i = share(&me, panels, 0); i < share(&me, panels, 1); i++) {
#define PACK(type) \
    case type: pack_panel(type, j, i); break;
        switch (j->type) { EACH_TYPE(PACK) }
    }
}

static void block_pack(int64_t *n) {
    Packing *j = (Packing *)n;
    run_team_unlocked(some_panels, j, &j->team, j->workers);
}
/* type, inputs -> bytes of a panel; 0: no such type */
static int64_t known_panel_bytes(int64_t *n) {
    const Kind k = kind_of(n[0]);
    return k.stored ? panel_bytes(k, n[1]) : 0;
}

/* -- single rows as floats ----------------------------------------------------------------------------------------- */

static void floats_of(float *to, Part part, int64_t output, int64_t inputs) {
    const Kind k = kind_of(part.type);
    const int64_t o = output % PANEL_OUTPUTS;
    const uint8_t *at = part.panels + output / PANEL_OUTPUTS * panel_bytes(k, inputs);
    float unit = 1, base = 1;
    for (int64_t b = 0; b < inputs / BLOCK; b++, at += block_bytes(k), to += BLOCK) {
        if (k.super && b % SUPER == 0) {
            unit = from_half(half_at(at + 2 * o));
            if (k.min) base = -from_half(half_at(at + 32 + 2 * o));
            at += head_bytes(k);
        }
        const uint8_t *scales = at + q_bytes(k);
        float scale[2], min = 0;
        for (int h = 0; h < 2; h++)
            scale[h] = k.mx       ? from_exponent(scales[o])
                       : !k.super ? from_half(half_at(scales + 2 * o))
                       : k.halves ? unit * (float)(int8_t)scales[16 * h + o]
                                  : unit * (float)scales[o];
        if (k.min) min = k.super ? base * (float)scales[16 + o] : from_half(half_at(scales + 32 + 2 * o));
        for (int i = 0; i < BLOCK; i++) {
            const int64_t g = i / 4, lane = 4 * o + i % 4;
            int q = k.wide ? at[64 * g + lane] : g < 4 ? at[64 * g + lane] & 15 : at[64 * (g - 4) + lane] >> 4;
            if (k.high == 1) q |= (at[256 + lane] >> g & 1) << 4;
            if (k.high == 2) q |= (at[256 + 64 * (g / 4) + lane] >> 2 * (g % 4) & 3) << 4;
            if (k.mx) q = (int[]){MX_VALUES}[q];
            else if (k.zero) q -= 1 << k.zero;
            to[i] = scale[i / 16] * (float)q + min;
        }
    }
}

/* out [count, inputs] float, ids, blocks (as `Product.blocks`), inputs, count. An id that is no output gives zeros. */
static void block_rows(int64_t *n) {
    const int64_t *ids = POINTER(n[1]), *blocks = POINTER(n[2]), inputs = n[3];
    for (int64_t i = 0; i < n[4]; i++) {
        float *to = (float *)POINTER(n[0]) + i * inputs;
        memset(to, 0, (size_t)inputs * 4);
        for (int64_t p = 0; p < blocks[0]; p++) {
            const Part part = part_of(blocks, p);
            if (ids[i] >= part.first && ids[i] < part.first + part.outputs)
                floats_of(to, part, ids[i] - part.first, inputs);
        }
    }
}

/* -- floats to blocks ---------------------------------------------------------------------------------------------- */

static uint16_t to_half(float value) { /* to the nearest and to even */
    union {
        float value;
        uint32_t bits;
    } x = {value};
    const uint32_t sign = x.bits >> 16 & 0x8000, rest = x.bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more */
    if (rest < 0x38800000) { /* below the normal numbers: adding 0.5 leaves multiples of 2^-24 in the low bits */
        x.bits = rest;
        x.value += 0.5f;
        return (uint16_t)(sign | (x.bits - 0x3f000000));
    }
    return (uint16_t)(sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}
static void put_half(uint8_t *to, float value) {
    const uint16_t h = to_half(value);
    memcpy(to, &h, sizeof h);
}

/* Whether one of them is infinite or no number, which times 0 is not 0. */
static int any_lost(const float *x, int64_t count) {
    vf sums = {0};
    for (int64_t i = 0; i < count; i += LANES) sums += loadf(x + i) * splat(0);
    return sum_lanes(sums) != 0;
}
/* 0 where it may be infinite: as float16, such a scale is 0. */
static float inverse_of(float scale) { return fabsf(scale) >= 0x1p-126f ? 1 / scale : 0; }

/* As GGML's reference does: the largest value has the largest q. */
static void to_q8_0(uint8_t *to, const float *x) {
    float most = 0;
    for (int i = 0; i < BLOCK; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    const float d = most / 127, inverse = inverse_of(d);
    put_half(to, d);
    for (int i = 0; i < BLOCK; i++) {
        const float size = fabsf(x[i] * inverse), whole = floorf(size) + floorf(2 * (size - floorf(size)));
        to[2 + i] = (uint8_t)(int8_t)(x[i] < 0 ? -whole : whole);
    }
}
static void to_q4_0(uint8_t *to, const float *x) {
    float most = 0, signed_most = 0;
    for (int i = 0; i < BLOCK; i++)
        if (fabsf(x[i]) > most) most = fabsf(x[i]), signed_most = x[i];
    const float d = signed_most / -8, inverse = inverse_of(d);
    put_half(to, d);
    for (int i = 0; i < 16; i++) {
        const int low = (int)((double)x[i] * inverse + 8.5), high = (int)((double)x[i + 16] * inverse + 8.5);
        to[2 + i] = (uint8_t)((low > 15 ? 15 : low) | (high > 15 ? 15 : high) << 4);
    }
}

/* Scale and min >= 0 with which q * scale - min comes nearest to 32 values: for some numbers of steps between the
   smallest and the largest value, the q that follow, and the line through them with the least squares. */
static void fit(const float *x, float *scale, float *min) {
    float low = 0, high = x[0], best = INFINITY;
    for (int i = 0; i < BLOCK; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    *scale = 0;
    *min = -low;
    if (!(high > low)) return;
    for (int step = 0; step <= 20; step++) {
        const float inverse = (14.0f + 0.1f * (float)step) / (high - low);
        float sum_q = 0, sum_qq = 0, sum_x = 0, sum_qx = 0, error = 0;
        for (int i = 0; i < BLOCK; i++) {
            float q = floorf((x[i] - low) * inverse + 0.5f);
            q = q > 15 ? 15 : q;
            sum_q += q;
            sum_qq += q * q;
            sum_x += x[i];
            sum_qx += q * x[i];
        }
        const float size = BLOCK * sum_qq - sum_q * sum_q; /* 0: all q are the same */
        float d = (BLOCK * sum_qx - sum_q * sum_x) / size, m = (sum_q * sum_qx - sum_qq * sum_x) / size;
        if (!(size > 0 && m >= 0)) m = 0, d = sum_qq > 0 ? sum_qx / sum_qq : 0;
        if (!(d > 0)) continue;
        for (int i = 0; i < BLOCK; i++) {
            float q = floorf((x[i] + m) / d + 0.5f);
            q = q < 0 ? 0 : q > 15 ? 15 : q;
            const float off = q * d - m - x[i];
            error += off * off;
        }
        if (error < best) best = error, *scale = d, *min = m;
    }
}
static void to_q4_k(uint8_t *to, const float *x) {
    float scale[SUPER], min[SUPER], most_scale = 0, most_min = 0;
    uint8_t s[SUPER], m[SUPER];
    for (int j = 0; j < SUPER; j++) {
        fit(x + j * BLOCK, scale + j, min + j);
        most_scale = scale[j] > most_scale ? scale[j] : most_scale;
        most_min = min[j] > most_min ? min[j] : most_min;
    }
    put_half(to, most_scale / 63);
    put_half(to + 2, most_min / 63);
    const float d = from_half(half_at(to)), unit = from_half(half_at(to + 2));
    memset(to + 4, 0, 140);
    for (int j = 0; j < SUPER; j++) {
        const float by_scale = d > 0 ? scale[j] / d + 0.5f : 0, by_min = unit > 0 ? min[j] / unit + 0.5f : 0;
        s[j] = (uint8_t)(by_scale > 63 ? 63 : by_scale);
        m[j] = (uint8_t)(by_min > 63 ? 63 : by_min);
        if (j < 4) {
            to[4 + j] |= s[j];
            to[8 + j] |= m[j];
        } else {
            to[8 + j] = (uint8_t)((s[j] & 15) | (m[j] & 15) << 4);
            to[j] |= (uint8_t)(s[j] >> 4 << 6);
            to[4 + j] |= (uint8_t)(m[j] >> 4 << 6);
        }
        const float step = d * (float)s[j], base = unit * (float)m[j];
        for (int i = 0; i < BLOCK; i++) {
            const float y = step > 0 ? (x[j * BLOCK + i] + base) / step + 0.5f : 0;
            const int q = y < 0 ? 0 : y > 15 ? 15 : (int)y;
            to[16 + j / 2 * 32 + i] |= (uint8_t)(q << (j % 2 ? 4 : 0));
        }
    }
}

typedef struct {
    uint8_t *to;
    const float *from;
    int64_t type, blocks; /* Q8_0, Q4_0, Q4_K; or super-blocks */
    Workers *workers;
    Team team;
} Quantizing;
static void some_blocks(void *data) {
    Quantizing *j = data;
    const Member me = join(&j->team);
    const Kind k = kind_of(j->type);
    for (int64_t i = share(&me, j->blocks, 0); i < share(&me, j->blocks, 1); i++) {
        uint8_t *to = j->to + i * k.stored;
        const int64_t values = BLOCK * (k.super ? SUPER : 1);
        const float *from = j->from + i * values;
        if (any_lost(from, values)) memset(to, 0x7e, (size_t)k.stored); /* as float16 no number, either */
        else if (j->type == Q8_0) to_q8_0(to, from);
        else if (j->type == Q4_0) to_q4_0(to, from);
        else to_q4_k(to, from);
    }
}
static void block_quantize(int64_t *n) {
    Quantizing *j = (Quantizing *)n;
    run_team_unlocked(some_blocks, j, &j->team, j->workers);
}

Function block_functions[] = {
    {"block_pack", block_pack, UP_TO(Packing, team), sizeof(Packing)},
    {"block_quantize", block_quantize, UP_TO(Quantizing, team), sizeof(Quantizing)},
    {"block_rows", block_rows, 5},
    {"panel_bytes", .count = known_panel_bytes, .given = 2},
    {0},
};
