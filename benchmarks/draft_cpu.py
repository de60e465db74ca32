"""What drafting costs on a CPU: a growth step of EAGLE-3 against a forward of its target, and the work around trees.

    python benchmarks/draft_cpu.py --out results.json [--parts growth,bookkeeping] [--threads 2]

The target is the default model, the head one of its shape with random weights: its cost is that of a trained one.
Competitors take turns and the median of many turns counts, so that a busy moment of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwing import LLM
from draftwing.core import PLAIN, TreeShape
from draftwing.models.config import ModelConfig
from draftwing.models.hub import fetch_default_model
from draftwing.models.loader import load_config
from draftwing.ops.types import Continuations, Draft
from draftwing.spec.drafter import DraftStep
from draftwing.spec.model_drafter import ModelDrafter

DEPTH, TOPK, NODES = 6, 4, 32
DRAFT_VOCAB = 8192
CONTEXT = 256  # committed tokens of the row that is measured


def write_random_head(folder: Path, target: ModelConfig) -> Path:
    """An EAGLE-3 head in the official layout with the layer sizes of the target."""
    hidden, ffn, (heads, kv_heads, head_dim) = target.hidden_size, target.layers[0].ffn, target.attention.shape
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    queries, keys = heads * head_dim, kv_heads * head_dim
    kept = torch.randperm(target.vocab_size, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": matrix(queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, queries),
        "midlayer.mlp.gate_proj.weight": matrix(ffn, hidden),
        "midlayer.mlp.up_proj.weight": matrix(ffn, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, ffn),
        "lm_head.weight": matrix(DRAFT_VOCAB, hidden),
        "d2t": kept - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, kept, True),
    }
    for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "vocab_size": target.vocab_size, "draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "max_position_embeddings": target.max_positions,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def medians(turns: int, work: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + turns // 10):
        for name, function in work.items():
            start = time.perf_counter()
            function()
            if turn >= turns // 10:  # before, caches are cold
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


class Row:
    """A row of the row table as in the middle of an answer, without a request behind it."""

    def __init__(self, llm: LLM) -> None:
        self.executor = llm.engine.parts.executor
        self.slots, self.model = self.executor.slots, self.executor.model
        assert self.executor.drafter is not None
        self.drafter = self.executor.drafter
        self.rows = torch.zeros(1, dtype=torch.int64)
        self.nobody = self.rows[:0]
        self.reset()

    def reset(self) -> None:
        self.slots.table[0] = torch.arange(1, self.slots.length + 1)
        self.slots.kv_len[0] = CONTEXT

    def propose(self, shape: TreeShape) -> Any:
        return self.drafter.propose(DraftStep(self.slots, self.rows, shape, CONTEXT, self.nobody))

    def forward(self, shape: TreeShape) -> Callable[[], Any]:
        """The target over a tree of this shape, logits included."""
        draft = self.executor.propose(self.rows, shape, CONTEXT, self.nobody)
        batch, _ = self.executor.target_batch(self.rows, draft, shape, CONTEXT)

        def run() -> Tensor:
            attend = self.executor.attn.bind(batch, 0)
            hidden, _ = self.model(batch.ids, batch.positions, attend, self.drafter.aux_layers)
            return self.model.logits(hidden)

        return run


def growth(row: Row, turns: int) -> dict[str, Any]:
    """A growth step runs the head over topk nodes, makes their logits and chooses: the mean of a draft's DEPTH - 1.

    A draft always follows a forward of the target, which leaves none of the head's weights in the caches; `next_step`
    is what one level more costs, when they are there.
    """
    shallow, deep = TreeShape(2, TOPK, 1 + TOPK), TreeShape(DEPTH, TOPK, NODES)
    times = medians(
        turns,
        {
            "one": row.forward(PLAIN),
            "shallow": lambda: row.propose(shallow),
            "tree": row.forward(deep),
            "deep": lambda: row.propose(deep),
        },
    )
    step = times["deep"] / (DEPTH - 1)
    return {
        "growth_step_ms": step,
        "next_step_ms": (times["deep"] - times["shallow"]) / (deep.depth - shallow.depth),
        "forward_1_ms": times["one"],
        f"forward_{NODES}_ms": times["tree"],
        "share_of_forward_1": step / times["one"],
        f"share_of_forward_{NODES}": step / times["tree"],
    }


def bookkeeping(row: Row, turns: int) -> dict[str, Any]:
    """Milliseconds of what is neither target nor head: choosing nodes, geometry and batch, acceptance and commit."""
    shape, drafter = TreeShape(DEPTH, TOPK, NODES), row.drafter
    assert isinstance(drafter, ModelDrafter)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, row.model.config.vocab_size, (TOPK, TOPK), generator=generator)
    logp = torch.rand(TOPK, TOPK, generator=generator).log().sort(-1, descending=True).values
    hidden = torch.zeros(1, TOPK, drafter.head.width, dtype=next(row.model.parameters()).dtype)

    def build() -> Draft:
        growth = drafter._grow(row.slots, row.rows, shape)
        for _ in range(1, DEPTH):
            growth.level(), growth.level_rows()
            growth.add(Continuations(ids, logp), hidden)
        return growth.draft()

    draft = build()
    batch, tree = row.executor.target_batch(row.rows, draft, shape, CONTEXT)
    target = draft.tokens.roll(-1, 1)
    before = batch.prefix_len.clone()
    parts = medians(
        turns,
        {
            "grow": build,
            "geometry": lambda: row.executor.target_batch(row.rows, draft, shape, CONTEXT),
            "commit": lambda: row.executor.ops.commit(row.slots, row.rows, draft, tree, target, before, 0, True),
            "": row.reset,
        },
    )
    del parts[""]
    return {**{f"{name}_ms": ms for name, ms in parts.items()}, "total_ms": sum(parts.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="growth,bookkeeping")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        head = write_random_head(Path(folder), load_config(fetch_default_model()))
        llm = LLM(
            "smollm2", speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head),
            speculative_num_steps=DEPTH, speculative_eagle_topk=TOPK, speculative_num_draft_tokens=NODES,
            speculative_fixed_shape=True, num_threads=args.threads, max_running_requests=4,
        )  # fmt: skip
    row = Row(llm)
    results: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}",
        "dtype": str(llm.engine.parts.dtype).removeprefix("torch."),
        "date": time.strftime("%Y-%m-%d"),
    }
    with torch.inference_mode():
        for name, part in (("growth", growth), ("bookkeeping", bookkeeping)):
            if name in args.parts.split(","):
                results[name] = part(row, args.turns)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1), encoding="utf8")
    for name, value in results.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
