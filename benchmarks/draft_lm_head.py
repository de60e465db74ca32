"""What acceptance costs where drafts multiply with the lm_head in fewer bits, as a GPU may do.

    python benchmarks/draft_lm_head.py [--algorithm EAGLE3] [--tree 5,4,16] [--temperature 0] [--formats none,int8]

The default model with its own heads, on a CPU: for each format the drafts' lm_head is quantised, dequantised again and
computed with in float32; everything else stays as it is. EAGLE3 has an lm_head of its own, NEXTN the target's. Of
`w4a16:16`, which is what a GPU does, the best 16 logits are computed again with the matrix as it is. Prompts are those
of MT-bench. `--out` adds lines to a file, from which `--sum` makes the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from load_runs import listed
from load_texts import mt_bench
from torch import Tensor

from draftwing import LLM
from draftwing.config.drafters import find_drafter, shipped_head
from draftwing.config.trees import TREE
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.folder import folder_tensors
from draftwing.models.heads.base import FeatureHead, linear_of
from draftwing.ops.gemm.groups import quantized
from draftwing.ops.table import LayerOps

SAMPLES = 1000  # of prompts, for the error of a ratio


class Rescored:
    """An lm_head in fewer bits, of whose best outputs so many are computed again with the matrix as it is."""

    def __init__(self, few: Linear, whole: Linear, best: int) -> None:
        self.few, self.whole, self.best = few, whole, best
        self.in_features, self.out_features = few.in_features, few.out_features

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.few(x)
        ids = logits.topk(self.best, 1).indices
        return logits.scatter_(1, ids, self.whole(x).gather(1, ids))


def rounded(weight: Tensor, form: str) -> Tensor:
    """weight [rows, columns] -> its values in this format, float32"""
    weight = weight.float()
    return weight if form == "none" else quantized(weight, form).dense(torch.float32)


def run(args: argparse.Namespace, form: str) -> list[tuple[int, int]]:
    """Accepted drafts and steps of each prompt."""
    folder = shipped_head("smollm2", find_drafter(args.algorithm))
    assert folder is not None
    own = next((tensor for name, tensor in folder_tensors(folder) if name == "lm_head.weight"), None)
    packs = FeatureHead.pack

    scheme, _, best = form.partition(":")

    def pack(head: FeatureHead, ops: LayerOps) -> None:
        weight = head.target.lm_head.dense_weight() if own is None else own
        head.lm_head = linear_of(rounded(weight, scheme), None, DENSE)
        packs(head, ops)
        if best:
            (norm, few), whole = head.output_layer(), linear_of(weight.float(), None, DENSE)
            whole.pack(ops)
            rescored = Rescored(few, whole, int(best))
            head.top_k = None
            head.output_layer = lambda: (norm, rescored)

    options: dict[str, Any] = dict(zip(TREE, args.tree, strict=True)) | {"speculative_token_map": "all"}
    if args.algorithm == "EAGLE3":
        del options["speculative_token_map"]
    texts = mt_bench()[args.start : args.start + args.prompts]
    params = {"max_new_tokens": args.tokens, "temperature": args.temperature, "seed": 1, "ignore_eos": True}
    with (
        patch.object(FeatureHead, "pack", pack),
        LLM(
            "smollm2", speculative_algorithm=args.algorithm, speculative_fixed_shape=True, log_level="error", **options
        ) as llm,
    ):
        found = llm.chat([[{"role": "user", "content": text}] for text in texts], params, use_tqdm=False)
    return [(one.meta_info["spec_num_correct_drafts"], one.meta_info["spec_verify_ct"]) for one in found]


def summed(file: Path) -> None:
    """Prints acceptance lengths, and the ratio to that of `none` with its standard error by prompts drawn again."""
    cells: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for line in file.read_text().splitlines():
        read = json.loads(line)
        cells.setdefault(read["cell"], {}).setdefault(read["format"], []).extend(map(tuple, read["found"]))
    generator = torch.Generator().manual_seed(0)
    for cell, formats in cells.items():
        base = torch.tensor(formats["none"], dtype=torch.float64)
        for form, found in formats.items():
            here = torch.tensor(found, dtype=torch.float64)
            count = min(len(here), len(base))
            pairs = torch.stack((here[:count], base[:count]))  # [2, prompts, 2]
            drawn = pairs[:, torch.randint(count, (SAMPLES, count), generator=generator)].sum(2)  # [2, samples, 2]
            lengths = 1 + drawn[..., 0] / drawn[..., 1]
            whole = 1 + pairs.sum(1)[:, 0] / pairs.sum(1)[:, 1]
            error = float((lengths[0] / lengths[1]).std())
            ratio = float(whole[0] / whole[1])
            print(f"{cell:28s} {form:6s} {count:3d} prompts {whole[0]:.3f}  x{ratio:.4f} ± {error:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="EAGLE3", choices=("EAGLE3", "NEXTN"))
    parser.add_argument("--tree", type=listed(int), default=[5, 4, 16])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--formats", type=listed(str), default=["none", "int8", "fp8", "w4a16"])
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--start", type=int, default=0, help="the first prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sum", type=Path)
    args = parser.parse_args()
    if args.sum is not None:
        return summed(args.sum)
    for form in args.formats:
        found = run(args, form)
        cell = f"{args.algorithm} {tuple(args.tree)} {args.temperature:g}"
        line = json.dumps({"cell": cell, "format": form, "start": args.start, "found": found})
        print(line if args.out is None else f"{cell} {form} {args.start}", flush=True)
        if args.out is not None:
            with args.out.open("a") as out:
                print(line, file=out)


if __name__ == "__main__":
    main()
