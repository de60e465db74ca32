"""Writes answers with the default model, with drafts and without, and prints their tokens.

A program of its own, for the instruction set is chosen when the extension is loaded: `python text_probe.py 12` writes
answers of 12 tokens and prints one JSON object, {case: token ids of each answer}. They are the same on every CPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from draftwing import LLM, SamplingParams

PROMPTS = ["The capital of France is", "It was a dark night, and the old sailor"]
# As it comes, an engine may find by its clock that drafts do not pay; a fixed one runs at every step.
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "tree": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 8,
        "speculative_fixed_shape": True,
    },
    "no drafts": {"speculative_algorithm": "none"},
}


def main(count: int) -> None:
    asked = {
        "greedy": SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True),
        "seeded": SamplingParams(temperature=0.8, sampling_seed=7, max_new_tokens=count, ignore_eos=True),
    }
    tokens = {}
    for engine, options in ENGINES.items():
        with LLM(
            "smollm2", device="cpu", max_total_tokens=512, max_running_requests=2, sampling_defaults="openai", **options
        ) as llm:
            for name, params in asked.items():
                answers = llm.generate(PROMPTS, params)
                accepted = sum(answer.meta_info["spec_num_correct_drafts"] for answer in answers)
                assert accepted or engine != "tree", "a comparison of drafts needs some that are accepted"
                tokens[f"{name}, {engine}"] = [answer.token_ids for answer in answers]
    print(json.dumps(tokens))


if __name__ == "__main__":
    main(int(sys.argv[1]))
