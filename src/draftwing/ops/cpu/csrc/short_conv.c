/* Short convolutions between gates: c * conv(b * u) of each channel, over a token and those before it. The reference is
   `Attend.short_conv`, whose roundings these are: b * u and the convolution are rounded to the storage, and nothing
   else on the way. What is kept of each token, b * u, lies in its slot. */

#include "cpu.h"

#define MOST_TAPS 8
#define CHANNELS 64 /* that a thread takes at a time */

typedef struct {
    void *out, *kept;
    const void *made;
    const float *taps;
    int64_t stride, channels, width, half, kept_half; /* stride: of `made`; width: taps */
    const int64_t *slots, *rows, *table, *prefix, *path, *path_len, *spans, *starts; /* as in `Attention` */
    int64_t table_stride, count, longest, depth, next;
} Conv;

/* Where b * u of the tokens before lies, the nearest first; slot 0: of none. table, prefix: the row's. */
INLINE void slots_before(const Conv *j, const int64_t *table, int64_t prefix, int64_t query, int64_t *before) {
    const int64_t *path = j->path + query * j->depth;
    for (int64_t back = 1; back < j->width; back++) {
        const int64_t at = (j->spans ? 0 : j->path_len[query] - 1) - back, place = prefix + (at < 0 ? at : path[at]);
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
        for (int64_t item = 0; item < j->count; item++) {
            const int64_t *span = j->spans ? j->spans + 4 * item : NULL;
            const int64_t from = span ? span[1] : j->starts ? j->starts[item] : item * j->longest;
            const int64_t n = span ? span[3] : j->starts ? j->starts[item + 1] - from : j->longest;
            const int64_t *table = j->table + j->rows[span ? span[0] : item] * j->table_stride;
            for (int64_t query = from; query < from + n; query++) {
                if (!again) {
                    keep(j, query, first, end, half, kept_half);
                    continue;
                }
                slots_before(j, table, span ? span[2] + query - from : j->prefix[item], query, before);
                convolve(j, query, before, taps, first, end, half, kept_half);
            }
        }
}
static void some_channels(void *data) {
    Conv *j = data;
    for (int64_t first; (first = take(&j->next, CHANNELS)) < j->channels;) {
        const int64_t end = first + CHANNELS < j->channels ? first + CHANNELS : j->channels;
        if (j->half) run_channels(j, first, end, 1, 1);
        else if (j->kept_half) run_channels(j, first, end, 0, 1);
        else run_channels(j, first, end, 0, 0);
    }
}

/* out, made, its stride, taps, kept, write slots, channels, width, half, half of what is kept, workers, queries; rows,
   table, its stride, prefix_len, path, path_len, spans, starts, count, nodes or length of the longest span, depth: as
   of attention */
static PyObject *py_short_conv(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[23];
    if (!numbers(args, given, 23, n)) return NULL;
    Conv j = {.out = POINTER(n[0]),
              .made = POINTER(n[1]),
              .stride = n[2],
              .taps = POINTER(n[3]),
              .kept = POINTER(n[4]),
              .slots = POINTER(n[5]),
              .channels = n[6],
              .width = n[7],
              .half = n[8],
              .kept_half = n[9],
              .rows = POINTER(n[12]),
              .table = POINTER(n[13]),
              .table_stride = n[14],
              .prefix = POINTER(n[15]),
              .path = POINTER(n[16]),
              .path_len = POINTER(n[17]),
              .spans = POINTER(n[18]),
              .starts = POINTER(n[19]),
              .count = n[20],
              .longest = n[21],
              .depth = n[22]};
    RELEASE_GIL
    run(some_channels, &j, POINTER(n[10]), n[11] * j.channels * j.width / 8000);
    TAKE_GIL
    Py_RETURN_NONE;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}
PyMethodDef conv_methods[] = {METHOD(short_conv), {NULL, NULL, 0, NULL}};
