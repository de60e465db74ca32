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
static void rank(int64_t *n) {
    float *survival = POINTER(n[0]);
    const float *seen = POINTER(n[10]), *accepted = POINTER(n[11]);
    int64_t *mark = POINTER(n[1]);
    const int64_t *grade = POINTER(n[2]), *parent = POINTER(n[3]), *depth = POINTER(n[5]), *rows = POINTER(n[6]);
    const uint8_t *alive = POINTER(n[4]);
    for (int64_t b = 0, i = 0; b < n[7]; b++)
        for (int64_t node = 0; node < n[8]; node++, i++) {
            const int64_t mine = grade ? grade[i] : 0;
            survival[i] = node ? 0 : 1;
            if (node && alive[i] && rows[b] != n[9])
                survival[i] = survival[b * n[8] + parent[i]] * share_right(seen, accepted, mine, depth[i]);
            mark[i] = depth[i] + (mine / LEVELS << MARK_SOURCE) + ((int64_t)(survival[i] * MARK_ONE) << MARK_SURVIVAL);
            if (alive[i]) mark[i] |= MARK_VERIFIED;
        }
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

/* What `assign` is given. */
typedef struct {
    const int32_t *survival; /* the bits of float32 */
    const int64_t *mark, *tokens, *path, *path_len, *positions, *slots, *prefix, *rows; /* of the nodes */
    int64_t batch, nodes, width, total, spare, dummy; /* width: of a path; spare: trees */
    uint8_t *alive;
    int64_t *marked, *place;
    int64_t *ids_of, *positions_of, *slots_of, *rows_of, *prefix_of, *path_of, *path_len_of; /* of the queries */
    int64_t *tree_rows, *tree_prefix, *starts;
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

static void assign(int64_t *n) {
    const Queries *s = (const Queries *)n;
    const int64_t nodes = s->nodes, total = s->total;
    const int32_t *bits = s->survival, least = least_of(bits, s->batch * nodes, total);
    int64_t left = total, query = 0; /* left: for nodes that just reach it, the first ones */
    for (int64_t i = 0; i < s->batch * nodes; i++) left -= bits[i] > least;
    for (int64_t b = 0, i = 0; b < s->batch; b++) {
        s->tree_rows[b] = s->rows[b], s->tree_prefix[b] = s->prefix[b], s->starts[b] = query;
        for (int64_t node = 0; node < nodes; node++, i++) {
            s->alive[i] = bits[i] > least || (bits[i] == least && left-- > 0);
            s->marked[i] = s->alive[i] ? s->mark[i] : s->mark[i] & ~(int64_t)MARK_VERIFIED;
            s->place[i] = s->alive[i] ? query : 0;
            if (s->alive[i]) take_query(s, query++, i, b);
        }
    }
    s->starts[s->batch] = query;
    for (int64_t tree = s->batch; tree < s->batch + s->spare; tree++) {
        s->tree_rows[tree] = s->dummy, s->tree_prefix[tree] = 0;
        s->starts[tree + 1] = s->starts[tree] + nodes < total ? s->starts[tree] + nodes : total;
    }
    for (; query < total; query++) fill_query(s, query, s->dummy);
}

Function assign_functions[] = {{"rank", rank, 12}, {"assign", assign, sizeof(Queries) / 8}, {0}};
