"""Generates in this process, without a server: many prompts at once, each with its own parameters.

    python examples/offline_generation.py [MODEL]

MODEL is an alias (smollm2, the default), a hub id, or a folder.
"""

from __future__ import annotations

import sys

from draftwing import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time"]
PARAMS = [
    SamplingParams(temperature=0, max_new_tokens=24),
    SamplingParams(temperature=0, max_new_tokens=24, stop=("\n", ".")),
    # The same seed gives the same text, whatever else runs and whether drafts help or not.
    SamplingParams(temperature=0.8, top_p=0.95, max_new_tokens=24, sampling_seed=7),
]


def main(model: str = "smollm2") -> None:
    with LLM(model=model) as llm:
        for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, PARAMS), strict=True):
            print(f"{prompt!r} -> {answer.text!r} ({answer.finish_reason['type']})")


if __name__ == "__main__":
    main(*sys.argv[1:])
