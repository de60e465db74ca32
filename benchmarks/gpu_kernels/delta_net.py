"""Gated delta nets, state-space layers, KDA and short convolutions: microseconds of a layer inside a CUDA graph,
against what its bytes take.

    python benchmarks/gpu_kernels/delta_net.py [sweep] [SHAPE ...]

Shapes are those of Qwen3.5-27B, 9B and 0.8B, Granite-4-Tiny, Nemotron-3-Nano and Kimi-Linear in bfloat16. A step reads
the state of each row and writes one, reads its tokens' inputs and leaves them as records, and with drafts runs two
accepted tokens again. `sweep`: other forms of the recurrence, for plain steps, chains, a tree and chunks, of the first
shape if none is named.
"""

from __future__ import annotations

import sys
import time
from itertools import product

import torch
from timing import replay_us

from draftwing.kv.pool import DeltaSpec, RowStates
from draftwing.ops.attention.batch import Batch, ChunkSpan, DeltaInputs, DeltaWeights
from draftwing.ops.delta_net import triton as delta_net
from draftwing.ops.delta_net.triton_plan import Walks, plan_chunks, plan_trees
from draftwing.ops.delta_net.triton_walk import CHUNK, CHUNKS, TREE, Form
from draftwing.ops.short_conv.triton import short_conv, sources_of

SHAPES = {
    **{name: DeltaSpec(16, heads, 128, 128, 4) for name, heads in (("27B", 48), ("9B", 32), ("0.8B", 16))},
    "granite-4-tiny": DeltaSpec(1, 48, 128, 64, 4, corrects=False),
    "nemotron-3-nano": DeltaSpec(8, 64, 128, 64, 4, corrects=False),
    "kimi-linear": DeltaSpec(32, 32, 128, 128, 4, by_channel=True),
}
LARGEST = "27B"
NODES, AGAIN, CONTEXT = 16, 2, 1024  # AGAIN: tokens that a step with drafts runs again
HALF, CUDA = torch.bfloat16, torch.device("cuda")
LAYERS = 8  # with states of their own, so that none is in the cache from the call before


def copy_rate() -> float:
    """Bytes per microsecond of a copy."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    y = torch.empty_like(x)
    return 2 * x.nbytes / replay_us(lambda: y.copy_(x))


class Net:
    """`LAYERS` layers of a shape and the states of some rows."""

    def __init__(self, spec: DeltaSpec, rows: int) -> None:
        self.spec, self.rows = spec, rows
        self.states = RowStates(dict.fromkeys(range(LAYERS), spec), 2 * rows + 1, rows, NODES, HALF, CUDA)
        at = torch.arange(rows, device=CUDA)
        self.states.set(torch.stack((at, 1 + 2 * at, 2 + 2 * at, 0 * at), 1))
        self.table = 1 + torch.arange((rows + 1) * CONTEXT, device=CUDA).view(rows + 1, CONTEXT)
        heads, normed = spec.value_heads, spec.value_dim if spec.corrects else spec.value_heads * spec.value_dim
        self.weights = DeltaWeights(
            torch.randn(4, spec.channels, device=CUDA).t(), -torch.rand(heads, device=CUDA),
            torch.zeros(spec.decays, device=CUDA), torch.ones(normed, device=CUDA), 1e-6,
        )  # fmt: skip
        if not spec.corrects:
            biases, skip = torch.zeros(spec.channels, device=CUDA), torch.ones(heads, device=CUDA)
            self.weights = self.weights._replace(conv_bias=biases, skip=skip)

    def inputs(self, tokens: int) -> DeltaInputs:
        spec = self.spec
        both = torch.randn(tokens, spec.channels + spec.value_heads * spec.value_dim, device=CUDA).to(HALF)
        gates = torch.randn(tokens, spec.value_heads + spec.decays, device=CUDA).to(HALF)
        return DeltaInputs(*both.tensor_split((spec.channels,), 1), *gates.tensor_split((spec.value_heads,), 1))

    def trees(self, nodes: int, chain: bool = False) -> Batch:
        """One of each row; a node of a tree has two children."""
        paths = [[0]]
        for node in range(1, nodes):
            paths.append([*paths[node - 1 if chain else (node - 1) // 2], node])
        depth, rows, again = max(map(len, paths)), torch.arange(self.rows, device=CUDA), AGAIN * (nodes > 1)
        path = torch.tensor([[*own, *[0] * (depth - len(own))] for own in paths], device=CUDA)
        lengths = torch.tensor([len(own) for own in paths], device=CUDA).repeat(self.rows, 1)
        self.states.page.zero_()
        self.states.node_slots[: self.rows, 1, :AGAIN] = self.table[: self.rows, :AGAIN]
        slots = self.table[: self.rows, again : again + nodes].flatten()
        prefix = torch.full_like(rows, again)
        return Batch(rows, slots, slots, slots, self.table, prefix, path.repeat(self.rows, 1, 1), lengths, nodes)

    def chunk(self, tokens: int, count: int = 1) -> Batch:
        """count: of prompts with a chunk of so many tokens each."""
        at = torch.arange(tokens, device=CUDA).repeat(count)
        spans = tuple(ChunkSpan(i, i * tokens, 0, tokens) for i in range(count))
        return Batch(torch.arange(count, device=CUDA), at, at, at, self.table, at[:count] * 0, chunks=spans)

    def plan(self, batch: Batch) -> Walks:
        return (plan_chunks if batch.chunks else plan_trees)(self.states, batch, self.spec.conv_width)

    def micros(self, batch: Batch, form: Form | None = None) -> float:
        """Of a layer, without the plan."""
        inputs, layers, plan = self.inputs(len(batch.write_slots)), self.states.layers, self.plan(batch)

        def all_layers() -> None:
            for layer in range(LAYERS):
                delta_net.delta_net(layers[layer], plan, inputs, self.weights, layer == 0, form)

        return replay_us(all_layers, 5, least=True) / LAYERS

    def least(self, batch: Batch, rate: float) -> float:
        """Microseconds that a layer's bytes take."""
        spec, tokens, rows = self.spec, len(batch.write_slots), len(batch.rows)
        values, record = spec.value_heads * spec.value_dim, spec.record_bytes(HALF)
        again = 0 if batch.chunks or tokens == rows else rows * AGAIN * record
        own = tokens * ((1 if batch.chunks else 2) * record + 2 * HALF.itemsize * values)
        return (2 * rows * spec.state_bytes(HALF) + own + again) / rate


def bench(rate: float, names: list[str]) -> None:
    for name in names or SHAPES:
        spec = SHAPES[name]
        for rows in (1, 16, 64):
            net = Net(spec, rows)
            for nodes, chain in ((1, True), (4, True), (4, False), (16, False)):
                batch, what = net.trees(nodes, chain), "chain" if chain else "tree"
                show(f"{name}, {rows} rows, a {what} of {nodes}", net.micros(batch), net.least(batch, rate))
        for count, tokens in ((1, 512), (1, 4096), (8, 4096)):
            net = Net(spec, count)
            batch = net.chunk(tokens, count)
            show(f"{name}, chunks of {count} x {tokens}", net.micros(batch), net.least(batch, rate))
    net = Net(SHAPES[(names or [LARGEST])[0]], 64)
    for nodes in (1, 16):
        batch = net.trees(nodes)
        show(f"plan of 64 trees of {nodes}, once a step", replay_us(lambda batch=batch: net.plan(batch)), 0.0)
    for rows, tokens in ((1, 1), (64, 1), (1, 512)):
        show(f"short convolution, 2048 channels, {rows} rows, {tokens} tokens", *convolution(rows, tokens, rate))


def convolution(rows: int, tokens: int, rate: float) -> tuple[float, float]:
    """One of `rows` and `tokens` is 1. -> microseconds of a layer, and of its bytes alone"""
    count, kept = rows * tokens, torch.zeros(8193, 2048, dtype=HALF, device=CUDA)
    made, taps = torch.randn(count, 3 * 2048, device=CUDA).to(HALF), torch.randn(2048, 3, device=CUDA)
    at, which = torch.arange(count, device=CUDA), torch.arange(rows, device=CUDA)
    table = 1 + torch.arange(8192, device=CUDA).view(64, 128)
    batch = Batch(which, at, at, 1 + at, table, 0 * which, chunks=(ChunkSpan(0, 0, 0, tokens),))
    if tokens == 1:
        path = torch.zeros(rows, 1, 1, dtype=torch.int64, device=CUDA)
        slots = table[:rows, 5].contiguous()
        batch = batch._replace(
            write_slots=slots, prefix_len=0 * which + 5, path=path, path_len=path[..., 0] + 1, chunks=()
        )
    elif tokens > 1:
        batch = batch._replace(table=table.view(1, -1))
    slots, sources = batch.write_slots, sources_of(batch, 2, torch.zeros(8193, dtype=torch.int32, device=CUDA))
    took = replay_us(lambda: [short_conv(made, taps, kept, slots, sources) for _ in range(LAYERS)])
    return took / LAYERS, count * 5 * 2048 * HALF.itemsize / rate


def sweep(rate: float, names: list[str]) -> None:
    for name in names or [LARGEST]:
        trees = (1, 1, True), (64, 1, True), (16, 8, True), (16, 16, False)
        for rows, nodes, chain in (*trees, (1, 0, True), (8, 0, True)):
            net = Net(SHAPES[name], rows)
            batch = net.trees(nodes, chain) if nodes else net.chunk(4096, rows)
            what = f"{rows} chunks of 4096"
            if nodes:
                what = f"{rows} rows, a {'chain' if chain else 'tree'} of {nodes}"
            turn = TREE.turn if nodes else CHUNK.turn
            forms = {Form(lanes, warps, per, turn, 3) for lanes, warps, per in product((4, 8), (1, 2, 4), (2, 4))}
            for form in (*sorted(forms), TREE if nodes else CHUNK if rows == 1 else CHUNKS):
                show(f"{name}, {what}, {tuple(form)}", net.micros(batch, form), net.least(batch, rate))


def show(label: str, took: float, least: float) -> None:
    print(f"{label:60} {took:9.1f} us   bytes alone {least:8.1f} us", flush=True)


@torch.inference_mode()
def main() -> None:
    started, rate = time.monotonic(), copy_rate()
    print(f"{torch.cuda.get_device_name()}: {rate / 1e6:.2f} TB/s of a copy")
    (sweep if "sweep" in sys.argv else bench)(rate, [name for name in sys.argv[1:] if name in SHAPES])
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
