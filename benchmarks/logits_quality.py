"""What arithmetic costs in quality: the model's distributions under two configurations, and llama.cpp's next to them.

    python benchmarks/logits_quality.py --other "--dtype bfloat16" [--base "--dtype float32"] [--out result.json]

A text is cut into pieces of 512 tokens (`--piece`), and the second half of each piece counts, as in llama.cpp's
`llama-perplexity`: 255 positions a piece, eight pieces. At each of them the distributions of both configurations are
compared: KL divergence of the other from the base (natural logarithm), and whether both choose the same token when
greedy. `--llama ISA` builds llama.cpp (`llama_cpp_build.py`) and lets it do the same with the same text: the file as it
is against itself in float32. llama.cpp keeps the base's logits in 16 bits, and "noise" is what that alone gives.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_files import write_float32
from llama_cpp_build import CACHE, ISAS, build
from torch import Tensor

from draftwing import LLM, SamplingParams
from draftwing.config.sources import add_arguments
from draftwing.models.hub import resolve_model

TEXT = Path(__file__).parent / "data" / "mt_bench.jsonl"


def load(model: str, options: str, **drafts: Any) -> LLM:
    """options: as on the command line of `draftwing serve`; without drafts, if none are given."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    drafts = drafts or {"speculative_algorithm": "none"}
    return LLM(model, **drafts, **vars(parser.parse_args(shlex.split(options))))


def distributions(llm: LLM, ids: list[int]) -> tuple[Tensor, list[int]]:
    """(logits [n, V] float32, the greedy choice) at each position of the second half but the last.

    The engine weighs the best tokens of half precision again, so its choice may differ from the arg-max of the logits.
    """
    model, seen = llm.engine.parts.executor.model, []
    logits = model.logits

    def noted(hidden: Tensor) -> Tensor:
        out = logits(hidden)
        seen.append(out.float())
        return out

    model.logits = noted  # type: ignore[method-assign]
    try:
        (answer,) = llm.generate(
            [ids], SamplingParams(temperature=0.0, max_new_tokens=1), return_logprob=True, logprob_start_len=0,
            top_logprobs_num=1,
        )  # fmt: skip
    finally:
        model.logits = logits  # type: ignore[method-assign]
    # One row is the sampler's; the prompt's come in slices. Position t tells token t + 1.
    rows = torch.cat([out for out in seen if len(out) > 1])
    assert len(rows) == len(ids) - 1
    best = [top[0][1] for top in answer.meta_info["input_top_logprobs"] if top]
    return rows[len(ids) // 2 :], best[len(ids) // 2 :]


def divergences(base: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(base) || softmax(other)) of each row of [n, V] logits, [n] float64 in nats."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (base, other))
    return (p.exp() * (p - q)).sum(-1).cpu()


def summary(values: Tensor, same: float) -> dict[str, float]:
    """values [n]: KL divergences; same: share of equal choices."""
    quantiles = torch.quantile(values, torch.tensor([0.5, 0.99], dtype=values.dtype)).tolist()
    return {
        "mean": values.mean().item(), "median": quantiles[0], "p99": quantiles[1], "max": values.max().item(),
        "same_choice": same, "positions": len(values),
    }  # fmt: skip


def compare(base: LLM, other: LLM, text: str, pieces: int, piece: int) -> dict[str, float]:
    ids = base.engine.tokenizer.encode(text)
    if len(ids) < pieces * piece:
        raise SystemExit(f"expected a text of {pieces * piece} tokens or more, found {len(ids)}")
    found, same = [], []
    for start in range(0, pieces * piece, piece):
        (p, chosen), (q, others) = (distributions(llm, ids[start : start + piece]) for llm in (base, other))
        found.append(divergences(p, q))
        same += [mine == theirs for mine, theirs in zip(chosen, others, strict=True)]
    return summary(torch.cat(found), float(np.mean(same)))


def llama_figures(
    model: Path, text: str, pieces: int, piece: int, isa: str, folder: Path
) -> dict[str, dict[str, float]]:
    """llama.cpp's: of the file, and of its base against what the base was kept in."""
    program = build(isa, folder) / "llama-perplexity"
    exact = folder / f"{model.stem}.F32.gguf"
    if not exact.exists():
        write_float32(model, exact)
    with tempfile.TemporaryDirectory() as place:
        words, kept = Path(place) / "text.txt", Path(place) / "base.kld"
        words.write_text(text, encoding="utf8")

        def run(file: Path, *more: str) -> str:
            command = [program, "-m", file, "-f", words, "-c", piece, "--chunks", pieces, "--kl-divergence-base", kept]
            done = subprocess.run([str(word) for word in (*command, *more)], capture_output=True, check=True, text=True)
            return done.stdout + done.stderr

        run(exact)
        return {name: parsed(run(file, "--kl-divergence")) for name, file in (("llama.cpp", model), ("noise", exact))}


def parsed(output: str) -> dict[str, float]:
    """The figures of `llama-perplexity --kl-divergence`, named as those of `summary`."""
    labels = {"mean": r"Mean +KLD", "median": r"Median +KLD", "p99": r"99\.0% +KLD", "max": r"Maximum KLD"}
    found = {}
    for name, label in {**labels, "same_choice": "Same top p"}.items():
        match = re.search(rf"^{label}: +(-?[\d.]+)", output, re.MULTILINE)
        if match is None:
            raise ValueError(f"expected a line {label!r} from llama-perplexity, found:\n{output[-2000:]}")
        found[name] = float(match[1])
    return {**found, "same_choice": found["same_choice"] / 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="of a GGUF file where --llama is given")
    parser.add_argument("--base", default="--dtype float32", help="options of `draftwing serve`, as one string")
    parser.add_argument("--other", default="", help="options of the other configuration")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--pieces", type=int, default=8, help="pieces of the text")
    parser.add_argument("--piece", type=int, default=512, help="tokens of a piece; the second half counts")
    parser.add_argument("--llama", choices=ISAS, help="also llama.cpp, with this instruction set")
    parser.add_argument("--build", type=Path, default=CACHE, help="folder for llama.cpp and its files")
    parser.add_argument("--out", type=Path, help="write the JSON to a file")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf8")
    results: dict[str, Any] = {}
    with load(args.model, args.base) as base, load(args.model, args.other) as other:
        results["draftwing"] = compare(base, other, text, args.pieces, args.piece)
    if args.llama:
        results |= llama_figures(resolve_model(args.model), text, args.pieces, args.piece, args.llama, args.build)
    print("| configuration | mean KL | median | 99% | most | same choice |\n|---|---|---|---|---|---|")
    for name, row in results.items():
        figures = " | ".join(f"{row[key]:.3g}" for key in ("mean", "median", "p99", "max"))
        print(f"| {name} | {figures} | {100 * row['same_choice']:.2f}% |")
    if args.out:
        record = {
            "model": args.model,
            "base": args.base,
            "other": args.other,
            "pieces": args.pieces,
            "piece": args.piece,
            **results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
