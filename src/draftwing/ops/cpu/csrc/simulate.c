/* Samples of a step whose acceptance is simulated: `TreeOps.simulate`, so that such steps are recorded as others are. */

#include "cpu.h"

/* out, target, tokens, parent, alive, depth [batch, nodes], path [batch, nodes, width], rows, kv_len, batch, nodes,
   width, chance, its bits, vocab */
static void simulate(int64_t *n) {
    const int64_t *rows = POINTER(n[7]), *kv_len = POINTER(n[8]), nodes = n[10], width = n[11], vocab = n[14];
    for (int64_t b = 0; b < n[9]; b++) {
        int64_t *out = (int64_t *)POINTER(n[0]) + b * nodes;
        const int64_t *target = (int64_t *)POINTER(n[1]) + b * nodes, *tokens = (int64_t *)POINTER(n[2]) + b * nodes;
        const int64_t *parent = (int64_t *)POINTER(n[3]) + b * nodes, *depth = (int64_t *)POINTER(n[5]) + b * nodes;
        const uint8_t *alive = (uint8_t *)POINTER(n[4]) + b * nodes;
        const int64_t bits = key_of(rows[b], kv_len[b]).word[0] & (((int64_t)1 << n[13]) - 1);
        int64_t wanted = 0, leaf = 0, power = n[12];
        for (int64_t level = 1; level < width; level++, power = power * n[12] >> n[13]) wanted += bits < power;
        for (int64_t i = 1; i < nodes; i++)
            if (alive[i] && depth[i] <= wanted && depth[i] > depth[leaf]) leaf = i;
        memcpy(out, target, (size_t)nodes * 8);
        const int64_t *path = (int64_t *)POINTER(n[6]) + (b * nodes + leaf) * width;
        for (int64_t level = 1; level <= depth[leaf]; level++) out[path[level - 1]] = tokens[path[level]];
        int64_t most = -1, least = vocab, hit = 0; /* of the leaf's children */
        for (int64_t i = 1; i < nodes; i++) {
            if (!alive[i] || parent[i] != leaf) continue;
            most = tokens[i] > most ? tokens[i] : most;
            least = tokens[i] < least ? tokens[i] : least;
            hit |= tokens[i] == target[leaf];
        }
        if (hit && most + 1 < vocab) out[leaf] = most + 1;
        else if (hit && least > 0) out[leaf] = least - 1;
    }
}

Function simulate_functions[] = {{"simulate", simulate, 15}, {0}};
