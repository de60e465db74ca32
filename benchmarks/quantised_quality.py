"""What quantised checkpoints cost in quality: distributions and drafts, next to a checkpoint that is not quantised.

    python benchmarks/quantised_quality.py FOLDER... --base BFLOAT16 [--options "--dtype float32"] [--out result.json]

For each folder: KL divergence from the base (in float32) and how often both choose the same token, as in
`logits_quality.py`; and the accept length of SmolLM2's EAGLE-3 head with a fixed chain of three drafts, greedy.
`quantised_files.py` writes folders of that model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from load_texts import mt_bench
from logits_quality import TEXT, distributions, divergences, load, summary

import draftwing
from draftwing import LLM, SamplingParams

HEAD = Path(draftwing.__file__).parent / "heads" / "smollm2" / "eagle3"
PIECE = 512  # tokens; the second half counts
DRAFTS = {
    "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(HEAD), "speculative_num_steps": 3,
    "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "speculative_fixed_shape": True,
}  # fmt: skip


def texts(llm: LLM, prompts: int, tokens: int) -> tuple[list[str], float]:
    """(greedy answers to MT-bench's first turns, mean tokens of a step)"""
    turns = mt_bench()
    chats = [[{"role": "user", "content": turn}] for turn in turns[:: len(turns) // prompts][:prompts]]
    answers = llm.chat(chats, SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True))
    drafts, steps = (
        sum(answer.meta_info.get(key, 0) for answer in answers)
        for key in ("spec_num_correct_drafts", "spec_verify_ct")
    )  # fmt: skip
    return [answer.text for answer in answers], 1 + drafts / steps if steps else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--base", required=True, help="the folder of the same model that is not quantised")
    parser.add_argument("--options", default="", help="of `draftwing serve`, as one string")
    parser.add_argument("--pieces", type=int, default=2, help=f"of {PIECE} tokens")
    parser.add_argument("--prompts", type=int, default=16, help="of MT-bench; with 0 only distributions")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--out", type=Path, help="write the JSON to a file")
    args = parser.parse_args()
    with load(args.base, "--dtype float32") as base:
        ids = base.engine.tokenizer.encode(TEXT.read_text(encoding="utf8"))
        pieces = [ids[start : start + PIECE] for start in range(0, args.pieces * PIECE, PIECE)]
        expected = [distributions(base, piece) for piece in pieces]
    print("| folder | mean KL | 99% | same token | accept length |\n|---|---|---|---|---|", flush=True)
    rows = {}
    for folder in args.folders:
        with load(folder, args.options, **(DRAFTS if args.prompts else {})) as llm:
            found = [distributions(llm, piece) for piece in pieces]
            answers, length = texts(llm, args.prompts, args.tokens) if args.prompts else ([], None)
        values = torch.cat([divergences(p, q) for (p, _), (q, _) in zip(expected, found, strict=True)])
        agree = np.concatenate([np.equal(p, q) for (_, p), (_, q) in zip(expected, found, strict=True)])
        row = summary(values, float(agree.mean()))
        rows[folder] = {**row, "accept_length": length, "texts": answers}
        figures = f"{row['mean']:.3g} | {row['p99']:.3g} | {100 * row['same_choice']:.1f}%"
        print(f"| {Path(folder).name} | {figures} | {length and round(length, 2)} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
