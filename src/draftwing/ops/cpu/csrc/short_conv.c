/* Short convolutions between gates: c * conv(b * u) of each channel, over a token and those before it. The reference is
   `Attend.short_conv`, whose roundings these are: b * u and the convolution are rounded to the storage, and nothing
   else on the way. What is kept of each token, b * u, lies in its slot. */

#include "cpu.h"

#define MOST_TAPS 8
#define CHANNELS 64 /* that a thread takes at a time */

typedef struct {
    void *out;
    const void *made;
    int64_t stride; /* of `made` */
    const float *taps;
    void *kept;
    const int64_t *slots;                            /* that are written */
    int64_t channels, width, half, kept_half; /* width: taps */
    Workers *workers;
    int64_t queries;
    Batch batch;
    int64_t next;
} Conv;

/* Where b * u of the tokens before lies, the nearest first; slot 0: of none. table, prefix: the row's. */
INLINE void slots_before(const Conv *j, const int64_t *table, int64_t prefix, int64_t query, int64_t *before) {
    const int64_t *path = j->batch.path + query * j->batch.depth;
    for (int64_t back = 1; back < j->width; back++) {
        const int64_t at = (j->batch.spans ? 0 : j->batch.path_len[query] - 1) - back, place = prefix + (at < 0 ? at : path[at]);
        before[back] = place < 0 ? 0 : table[place];
    }
}

INLINE void convolve(const Conv *j, int64_t query, const int64_t *before, const float *taps, int64_t first, int64_t end,
                     const int half, const int kept_half) {
    for (int64_t c = first; c < end; c += LANES, taps += LANES) {
        const int64_t n = end - c, at = query * j->stride + c;
        const vf own = load(j->made, at, n, half) * load(j->made, at + 2 * j->channels, n, half);
        vf sum = rounded(own, half) * loadf(taps + (j->width - 1) * CHANNELS);
        for (int64_t back = 1; back < j->width; back++) {
            vf value = {0};
            if (before[back] > 0) value = load(j->kept, before[back] * j->channels + c, n, kept_half);
            sum += rounded(value, half) * loadf(taps + (j->width - 1 - back) * CHANNELS);
        }
        const vf gate = load(j->made, at + j->channels, n, half);
        store(j->out, query * j->channels + c, n, half, gate * rounded(sum, half));
    }
}
INLINE void keep(const Conv *j, int64_t query, int64_t first, int64_t end, const int half, const int kept_half) {
    for (int64_t c = first; c < end; c += LANES) {
        const int64_t n = end - c, at = query * j->stride + c;
        const vf own = load(j->made, at, n, half) * load(j->made, at + 2 * j->channels, n, half);
        store(j->kept, j->slots[query] * j->channels + c, n, kept_half, rounded(own, half));
    }
}

INLINE void run_channels(const Conv *j, int64_t first, int64_t end, const int half, const int kept_half) {
    float taps[MOST_TAPS * CHANNELS] = {0};
    int64_t before[MOST_TAPS];
    for (int64_t c = first; c < end; c++)
        for (int64_t t = 0; t < j->width; t++) taps[t * CHANNELS + c - first] = j->taps[c * j->width + t];
    for (int again = 0; again < 2; again++) /* all are kept before any is read */
        for (int64_t number = 0; number < j->batch.count; number++) {
            const Item item = item_of(&j->batch, number);
            for (int64_t query = item.first; query < item.first + item.queries; query++) {
                if (!again) {
                    keep(j, query, first, end, half, kept_half);
                    continue;
                }
                const int64_t prefix = item.span ? item.span[2] + query - item.first : j->batch.prefix[number];
                slots_before(j, item.table, prefix, query, before);
                convolve(j, query, before, taps, first, end, half, kept_half);
            }
        }
}
static void some_channels(void *data) {
    Conv *j = data;
    for (int64_t first; (first = take(&j->next, CHANNELS)) < j->channels;) {
        const int64_t end = least(first + CHANNELS, j->channels);
        BY_HALVES(j->half, j->kept_half, run_channels, j, first, end);
    }
}

static void short_conv(int64_t *n) {
    Conv *j = (Conv *)n;
    run_unlocked(some_channels, j, j->workers, j->queries * j->channels * j->width / 8000);
}

Function conv_functions[] = {{"short_conv", short_conv, UP_TO(Conv, next), sizeof(Conv)}, {0}};
