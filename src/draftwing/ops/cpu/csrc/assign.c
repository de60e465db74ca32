/* What is worth verifying, on the CPU: survival, and the best nodes of a batch. The reference is
   ops/assign/spec.py, whose terms these are. One thread, with the GIL; arrays are contiguous, int64 unless stated otherwise. */

#include "cpu.h"

/* Level of a grade: the log odds of a probability, in steps. */
int64_t level_of(float logp) {
    const float p = expf(logp), some = p > 1e-6f ? p : 1e-6f, inside = some < 1 - 1e-6f ? some : 1 - 1e-6f;
    const int64_t level = (int64_t)floorf(SLOPE * logf(inside / (1 - inside)) + MIDDLE + 0.5f);
    return level < 0 ? 0 : level < LEVELS ? level : LEVELS - 1;
}

/* survival (float32), mark; grade or 0, parent, alive (bytes), depth, rows; batch, nodes, dummy; seen, accepted
   (float32) */
static PyObject *py_rank(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[12];
    if (!numbers(args, given, 12, n)) return NULL;
    float *survival = POINTER(n[0]);
    const float *seen = POINTER(n[10]), *accepted = POINTER(n[11]);
    int64_t *mark = POINTER(n[1]);
    const int64_t *grade = POINTER(n[2]), *parent = POINTER(n[3]), *depth = POINTER(n[5]), *rows = POINTER(n[6]);
    const uint8_t *alive = POINTER(n[4]);
    for (int64_t b = 0, i = 0; b < n[7]; b++)
        for (int64_t node = 0; node < n[8]; node++, i++) {
            const int64_t mine = grade ? grade[i] : 0;
            survival[i] = node ? 0 : 1;
            if (node && alive[i] && rows[b] != n[9]) {
                const int64_t cell = cell_of(mine, depth[i]);
                const float share = accepted[cell] / seen[cell];
                survival[i] = survival[b * n[8] + parent[i]] * (share < SURE ? share : SURE);
            }
            mark[i] = depth[i] + (mine / LEVELS << MARK_SOURCE) + ((int64_t)(survival[i] * MARK_ONE) << MARK_SURVIVAL);
            if (alive[i]) mark[i] |= MARK_VERIFIED;
        }
    Py_RETURN_NONE;
}

/* The largest number from 1 on that at least `total` of the survivals reach, as the bits of a float (which are in the
   order of the floats from 0 on); 1 where fewer do. */
static int32_t least_of(const int32_t *bits, int64_t size, int64_t total) {
    int32_t low = 1, high = 0x3F800001; /* 1.0, and the next one */
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        int32_t enough = 0;
        for (int64_t i = 0; i < size; i++) enough += bits[i] >= middle;
        if (enough >= total) low = middle;
        else high = middle;
    }
    return low;
}

typedef struct {
    const int64_t *tokens, *path, *path_len, *positions, *slots, *prefix, *rows;                    /* of the nodes */
    int64_t *ids_of, *positions_of, *slots_of, *rows_of, *prefix_of, *path_len_of, *path_of, width; /* of the queries */
} Queries;

static void take_query(const Queries *s, int64_t query, int64_t node, int64_t b) {
    s->ids_of[query] = s->tokens[node];
    s->positions_of[query] = s->positions[node];
    s->slots_of[query] = s->slots[node];
    s->rows_of[query] = s->rows[b];
    s->prefix_of[query] = s->prefix[b];
    s->path_len_of[query] = s->path_len[node];
    memcpy(s->path_of + query * s->width, s->path + node * s->width, (size_t)s->width * 8);
}
static void fill_query(const Queries *s, int64_t query, int64_t dummy) {
    s->ids_of[query] = s->positions_of[query] = s->slots_of[query] = s->prefix_of[query] = 0;
    s->rows_of[query] = dummy;
    s->path_len_of[query] = 1;
    memset(s->path_of + query * s->width, 0, (size_t)s->width * 8);
}

/* survival (float32), mark; tokens, path, path_len, positions, write_slots, prefix_len, rows; batch, nodes, width of a
   path, total, spare trees, dummy; alive (bytes), mark, place; ids, positions, write_slots, rows, prefix_len, path,
   path_len of the queries; rows, prefix_len, starts of the trees */
static PyObject *py_assign(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[28];
    if (!numbers(args, given, 28, n)) return NULL;
    const int32_t *bits = POINTER(n[0]);
    const int64_t *mark = POINTER(n[1]), batch = n[9], nodes = n[10], total = n[12], spare = n[13], dummy = n[14];
    const Queries s = {.tokens = POINTER(n[2]),
                       .path = POINTER(n[3]),
                       .path_len = POINTER(n[4]),
                       .positions = POINTER(n[5]),
                       .slots = POINTER(n[6]),
                       .prefix = POINTER(n[7]),
                       .rows = POINTER(n[8]),
                       .width = n[11],
                       .ids_of = POINTER(n[18]),
                       .positions_of = POINTER(n[19]),
                       .slots_of = POINTER(n[20]),
                       .rows_of = POINTER(n[21]),
                       .prefix_of = POINTER(n[22]),
                       .path_of = POINTER(n[23]),
                       .path_len_of = POINTER(n[24])};
    uint8_t *alive = POINTER(n[15]);
    int64_t *marked = POINTER(n[16]), *place = POINTER(n[17]);
    int64_t *rows = POINTER(n[25]), *prefix = POINTER(n[26]), *starts = POINTER(n[27]);
    const int32_t least = least_of(bits, batch * nodes, total);
    int64_t left = total, query = 0; /* left: for nodes that just reach it, the first ones */
    for (int64_t i = 0; i < batch * nodes; i++) left -= bits[i] > least;
    for (int64_t b = 0, i = 0; b < batch; b++) {
        rows[b] = s.rows[b], prefix[b] = s.prefix[b], starts[b] = query;
        for (int64_t node = 0; node < nodes; node++, i++) {
            alive[i] = bits[i] > least || (bits[i] == least && left-- > 0);
            marked[i] = alive[i] ? mark[i] : mark[i] & ~(int64_t)MARK_VERIFIED;
            place[i] = alive[i] ? query : 0;
            if (alive[i]) take_query(&s, query++, i, b);
        }
    }
    starts[batch] = query;
    for (int64_t tree = batch; tree < batch + spare; tree++) {
        rows[tree] = dummy, prefix[tree] = 0;
        starts[tree + 1] = starts[tree] + nodes < total ? starts[tree] + nodes : total;
    }
    for (; query < total; query++) fill_query(&s, query, dummy);
    Py_RETURN_NONE;
}

PyMethodDef assign_methods[] = {
    {"rank", (PyCFunction)(void (*)(void))py_rank, METH_FASTCALL, NULL},
    {"assign", (PyCFunction)(void (*)(void))py_assign, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
