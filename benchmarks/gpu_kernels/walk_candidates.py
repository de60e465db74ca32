"""Candidates of the delta net's kernels behind a producer, in graphs, states cold. SECONDS of time."""
import statistics, sys, time
T0 = time.monotonic()
import torch, triton
import triton.language as tl
import old_delta_net
from draftwing.kv.row_states import RowStates
from draftwing.ops.attention import Batch, ChunkSpan, DeltaInputs, DeltaWeights
from draftwing.ops.row_states import DeltaSpec
from draftwing.ops.triton import delta_net as new
from draftwing.ops.triton.common import launch_options, start
from draftwing.ops.triton.delta_plan import plan_chunks, plan_trees

CPU = not torch.cuda.is_available()
DEV = torch.device("cpu" if CPU else "cuda")
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 60
LAYERS, CONTEXT, AGAIN, HALF = (1 if CPU else 8), 1024, 2, torch.bfloat16
SPEC = DeltaSpec(2, 4, 16, 16, 4) if CPU else DeltaSpec(16, 32, 128, 128, 4)
WEIGHT = 4096 if CPU else 8 << 20  # float32 of a producer
PROGRAMS = 2 if CPU else 528


def say(*a):
    print(f"[{time.monotonic() - T0:5.1f}]", *a, flush=True)


@triton.jit
def _producer(w, source, into, sink, count, EACH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start(PDL)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, EACH, BLOCK):
        total += tl.load(w + tl.program_id(0) * EACH + i + at)
    tl.store(sink + tl.program_id(0) * BLOCK + at, total)
    for i in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        tl.store(into + i + at, tl.load(source + i + at, mask=i + at < count), mask=i + at < count)


CANDIDATES = {
    "c16 s4": dict(columns=16, stages=4),
    "old": None,
    "c32 s2": dict(columns=32, stages=2),
    "c32 s1": dict(columns=32, stages=1),
    "c32 s3": dict(columns=32, stages=3),
    "c16 s1": dict(columns=16, stages=1),
    "c16 s4 r128": dict(columns=16, stages=4, registers=128),
    "c8 s4": dict(columns=8, stages=4),
    "c32 s2 by channel": dict(columns=32, stages=2, tap=False),
    "other spread": dict(columns=32, stages=2, other=True),
    "c16 other spread": dict(columns=16, stages=4, other=True),
}


class Case:
    def __init__(self, rows, nodes, chunk=0, keep=4):
        self.rows, self.nodes, self.chunk_len = rows, nodes, chunk
        self.name = f"chunk {chunk}" if chunk else f"{rows} x {nodes}"
        keep = max(keep, nodes)
        self.states = RowStates(dict.fromkeys(range(LAYERS), SPEC), 2 * rows + 1, rows, keep, HALF, DEV)
        for kept in self.states.layers.values():
            for part in (kept.state, kept.conv, kept.inputs, kept.gates):
                part.copy_(torch.randn(part.shape[1:], device=DEV) * 0.3)
            kept.gates.abs_()
            kept.gates[..., 0, :].neg_()
        at = torch.arange(rows, device=DEV)
        self.states.set(torch.stack((at, 1 + 2 * at, 2 + 2 * at, 0 * at), 1))
        self.table = 1 + torch.arange((rows + 1) * CONTEXT, device=DEV).view(rows + 1, CONTEXT)
        tokens = chunk or rows * nodes
        values = SPEC.value_heads * SPEC.value_dim
        wide = tokens * (SPEC.channels + values)
        self.count = wide + tokens * 2 * SPEC.value_heads
        self.source = torch.randn(LAYERS, self.count, device=DEV).to(HALF)
        self.into = torch.zeros(self.count, device=DEV, dtype=HALF)
        both = self.into[:wide].view(tokens, -1)
        gates = self.into[wide:].view(tokens, -1)
        self.inputs = DeltaInputs(*both.tensor_split((SPEC.channels,), 1), *gates.chunk(2, 1))
        batch = self.chunk() if chunk else self.trees()
        self.plan = (plan_chunks if chunk else plan_trees)(self.states, batch, SPEC.conv_width)

    def trees(self):
        paths = [[0]]
        for node in range(1, self.nodes):
            paths.append([*paths[node - 1 if self.nodes < 5 else (node - 1) // 2], node])
        depth, rows = max(map(len, paths)), torch.arange(self.rows, device=DEV)
        again = AGAIN * (self.nodes > 1)
        path = torch.tensor([[*own, *[0] * (depth - len(own))] for own in paths], device=DEV)
        lengths = torch.tensor([len(own) for own in paths], device=DEV).repeat(self.rows, 1)
        self.states.page.zero_()
        self.states.node_slots[: self.rows, 1, :AGAIN] = self.table[: self.rows, :AGAIN]
        slots = self.table[: self.rows, again : again + self.nodes].flatten()
        prefix = torch.full_like(rows, again)
        return Batch(rows, slots, slots, slots, self.table, prefix, path.repeat(self.rows, 1, 1), lengths, self.nodes)

    def chunk(self):
        at = torch.arange(self.chunk_len, device=DEV)
        return Batch(at[:1], at, at, at, self.table, at[:1], chunks=(ChunkSpan(0, 0, 0, self.chunk_len),))

    def least(self):
        tokens = self.chunk_len or self.rows * self.nodes
        values = SPEC.value_heads * SPEC.value_dim
        return (2 * self.rows * SPEC.state_bytes(HALF) + tokens * (2 * SPEC.record_bytes(HALF) + 4 * values)) / 4.26e6


W = torch.zeros(LAYERS, WEIGHT, device=DEV)
SINK = torch.empty(PROGRAMS * 1024, device=DEV)
CONV = torch.randn(SPEC.channels, 4, device=DEV)
BY_TAP = CONV.t().contiguous().t()
WEIGHTS = DeltaWeights(CONV, -torch.rand(SPEC.value_heads, device=DEV), torch.zeros(SPEC.value_heads, device=DEV),
                       torch.ones(SPEC.value_dim, device=DEV), 1e-6)


def produce(case, layer):
    each = WEIGHT // PROGRAMS // 1024 * 1024
    _producer[(PROGRAMS,)](W[layer], case.source[layer], case.into, SINK, case.count, EACH=each, BLOCK=1024,
                           num_warps=8, **launch_options(DEV))


def all_layers(case, options):
    outs = []
    for layer in range(LAYERS):
        produce(case, layer)
        kept = case.states.layers[layer]
        if options is None:
            outs.append(old_delta_net.delta_net(kept, case.plan, case.inputs, WEIGHTS))
        else:
            own = dict(options)
            weights = WEIGHTS._replace(conv=BY_TAP) if own.pop("tap", True) else WEIGHTS
            if own.pop("other", False):
                own["spread"] = not case.chunk_len
            outs.append(new.delta_net(kept, case.plan, case.inputs, weights, layer == 0, **own))
    return outs


def producers(case):
    for layer in range(LAYERS):
        produce(case, layer)


def recorded(fn):
    out = fn()
    if CPU:
        return fn, out
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    return graph.replay, out


def times(runs, rounds=9):
    found = {name: [] for name in runs}
    if CPU:
        return {name: (1.0, 1.0) for name in runs}
    for turn in range(rounds):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            begin.record()
            run()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3)
    return {name: (min(t[1:]), statistics.median(t[1:])) for name, t in found.items()}


def written(case):
    """What a step leaves."""
    found = []
    for kept in case.states.layers.values():
        found += [kept.state[2 : 2 * case.rows + 1 : 2], kept.conv[2 : 2 * case.rows + 1 : 2], kept.inputs[: case.rows, 0], kept.gates[: case.rows, 0]]
    return found


@torch.inference_mode()
def main():
    say(torch.cuda.get_device_name() if not CPU else "cpu", "copy:")
    if not CPU:
        x = torch.empty(1 << 30, dtype=torch.uint8, device=DEV); y = torch.empty_like(x)
        run, _ = recorded(lambda: y.copy_(x))
        say("copy TB/s", 2 * x.nbytes / times({"c": run})["c"][0] / 1e6)
        run, _ = recorded(lambda: torch.add(x.view(torch.float32), 1, out=y.view(torch.float32)))
        say("add TB/s", 2 * x.nbytes / times({"c": run})["c"][0] / 1e6)
        del x, y
    failed, compiled = set(), False
    for rows, nodes, chunk in [(64, 1, 0), (1, 1, 512), (1, 1, 0), (16, 1, 0), (64, 4, 0), (16, 4, 0), (1, 4, 0), (1, 1, 2048), (128, 1, 0), (1, 16, 0), (16, 16, 0), (64, 16, 0)]:
        if CPU and rows * nodes > 4 or time.monotonic() - T0 > SECONDS - 6:
            continue
        case = Case(rows, nodes, 8 if CPU and chunk else chunk)
        expected = states = None
        runs, notes = {}, {}
        runs["producer"], _ = recorded(lambda: producers(case))
        for name, options in CANDIDATES.items():
            if name in failed:
                continue
            if time.monotonic() - T0 > SECONDS - 3:
                break
            try:
                run, outs = recorded(lambda: all_layers(case, options))
            except Exception as error:  # a candidate that does not compile
                say(name, "FAILED", repr(error)[:300]); failed.add(name); continue
            if not compiled:
                say("compiled", name)
            runs[name] = run
            for part in written(case):
                part.zero_()
            for _ in range(1 if CPU else 3):  # races
                run()
            outs = [out.clone() for out in outs]
            left = [part.clone() for part in written(case)]
            if expected is None:  # of the old kernels; plain order, each waits
                expected, states = outs, left
                notes[name] = "finite" if all(o.isfinite().all() for o in outs) else "NOT FINITE"
            else:
                same = all(torch.equal(a, b) for a, b in zip(outs + left, expected + states))
                off = max((a.float() - b.float()).abs().max().item() for a, b in zip(outs + left, expected + states))
                notes[name] = "same bits" if same else f"off by {off:.2g}"
        compiled = True
        found = times(runs, 5 if rows * nodes > 256 or chunk else 9)
        base = found["producer"]
        say(f"--- {case.name}: bytes {case.least():.1f} us at 4.26 TB/s; producer {base[0] / LAYERS:.2f} us")
        for name in list(runs)[1:]:
            least, median = ((found[name][i] - base[i]) / LAYERS for i in (0, 1))
            say(f"{case.name:10} {name:18} least {least:8.2f} median {median:8.2f} us   {notes[name]}")
        del runs, case
    say("end")


main()
