/* Two drafters' trees of a row become one (ops/merge/spec.py). One thread, with the GIL; arrays are contiguous
   int64, `alive` bytes, what is calibrated float32. */

#include "cpu.h"

typedef struct {
    const int64_t *tokens, *parent, *grade;
    const uint8_t *alive;
    int64_t nodes;
} Draft;

#define DRAFT(at, size) \
    {.tokens = POINTER(n[at]), .parent = POINTER(n[at + 1]), .alive = POINTER(n[at + 2]), .grade = POINTER(n[at + 3]), \
     .nodes = n[size]}

typedef struct {
    int64_t token, parent, grade, depth, place;
    float survival;
    int alive;
} Node;

static int64_t united(int64_t a, int64_t b) {
    return (a / LEVELS | b / LEVELS) * LEVELS + most(a % LEVELS, b % LEVELS);
}

/* All nodes of both trees of row b, the first's before the second's; of two with one path the first's. Returns whether
   parents come before their children. */
static int unite(const Draft *first, const Draft *second, int64_t b, Node *all) {
    const int64_t one = first->nodes, two = second->nodes;
    for (int64_t i = 0, at = b * one; i < one; i++, at++) {
        all[i] = (Node){first->tokens[at], first->parent[at], first->grade[at], 0, 0, 0, i == 0 || first->alive[at]};
        if (i && (all[i].parent < 0 || all[i].parent >= i)) return 0;
    }
    all[one].place = 0; /* of the second's nodes for now: where what they stand for is */
    all[one].alive = 0;
    for (int64_t i = 1, at = b * two + 1; i < two; i++, at++) {
        const int64_t above = second->parent[at];
        if (above < 0 || above >= i) return 0;
        Node *node = all + one + i;
        *node = (Node){second->tokens[at], all[one + above].place, second->grade[at], 0, one + i, 0, second->alive[at]};
        for (int64_t j = 1; node->alive && node->parent < one && j < one; j++)
            if (all[j].alive && all[j].parent == node->parent && all[j].token == node->token) {
                all[j].grade = united(all[j].grade, node->grade);
                node->alive = 0;
                node->place = j;
            }
    }
    return 1;
}

/* Leaves the best `nodes` alive, with their places; returns how many there are. held: scratch of that size. */
static int64_t choose(Node *all, int64_t count, int64_t nodes, int64_t most, const float *seen, const float *accepted,
                      int64_t *held) {
    int64_t chosen = 0;
    all[0].survival = 1;
    for (int64_t i = 0; i < count; i++) {
        Node *node = all + i;
        if (!node->alive) continue;
        if (i) {
            const Node *above = all + node->parent;
            node->depth = above->depth + 1;
            node->survival = above->survival * share_right(seen, accepted, node->grade, node->depth);
            node->alive = node->depth <= most;
        }
        if (!node->alive || (chosen == nodes && node->survival <= all[held[nodes - 1]].survival)) continue;
        int64_t at = chosen < nodes ? chosen++ : nodes - 1;
        for (; at && node->survival > all[held[at - 1]].survival; at--) held[at] = held[at - 1];
        held[at] = i;
    }
    for (int64_t i = 0; i < count; i++) all[i].alive = 0;
    for (int64_t i = 0; i < chosen; i++) all[held[i]].alive = 1;
    for (int64_t i = 0, place = 0; i < count; i++)
        if (all[i].alive) all[i].place = place++;
    return chosen;
}

/* tokens, parent, alive, grade of the first and of the second; batch, nodes of the first, of the second, of the result,
   depth's bound; seen, accepted; tokens, parent, alive, grade */
static void merge(int64_t *n) {
    const Draft first = DRAFT(0, 9), second = DRAFT(4, 10);
    const int64_t batch = n[8], nodes = n[11], count = first.nodes + second.nodes;
    int64_t *tokens = POINTER(n[15]), *parent = POINTER(n[16]), *grade = POINTER(n[18]);
    uint8_t *alive = POINTER(n[17]);
    Node *all = PyMem_Malloc((size_t)count * sizeof(Node) + (size_t)nodes * 8);
    if (!all) return (void)PyErr_NoMemory();
    int64_t *held = (int64_t *)(all + count);
    int fine = 1;
    for (int64_t b = 0; b < batch && (fine = unite(&first, &second, b, all)); b++) {
        const int64_t chosen = choose(all, count, nodes, n[12], POINTER(n[13]), POINTER(n[14]), held), to = b * nodes;
        for (int64_t i = 0; i < count; i++)
            if (all[i].alive) {
                const int64_t at = to + all[i].place;
                tokens[at] = all[i].token;
                parent[at] = all[all[i].parent].place;
                grade[at] = all[i].grade;
                alive[at] = 1;
            }
        for (int64_t at = to + chosen; at < to + nodes; at++) {
            tokens[at] = all[0].token;
            parent[at] = grade[at] = alive[at] = 0;
        }
        grade[to] = all[0].grade;
    }
    PyMem_Free(all);
    if (!fine) PyErr_Format(PyExc_ValueError, "expected parents before their children in trees to merge");
}

/* values, stride, count, highest value: one more each */
static void raise_confidence(int64_t *n) {
    int64_t *value = POINTER(n[0]);
    for (int64_t i = 0; i < n[2]; i++, value += n[1])
        if (*value < n[3]) ++*value;
}

Function merge_functions[] = {{"merge", merge, 19}, {"raise_confidence", raise_confidence, 4}, {0}};
