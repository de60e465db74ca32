"""What a drafter gains by drawing with the target's own noise: accept length at several temperatures, with and without.

    python benchmarks/coupling.py [--prompts 8] [--tokens 64] [--blur 0.25]

The draft is the default model with noise added to its weights (`--blur` times each matrix's standard deviation), run as
STANDALONE; without coupling it proposes its own most probable tokens, as other engines' tree drafters do.
"""

from __future__ import annotations

import argparse
import json
from typing import ClassVar

import torch
from load_texts import mt_bench

from draftwing import LLM, SamplingParams
from draftwing.config.trees import TREE, TreeShape
from draftwing.models.heads.base import DraftLM
from draftwing.models.hub import fetch_default_model
from draftwing.models.loader import load_model
from draftwing.ops.types import Draft
from draftwing.spec.drafter import DraftContext, DraftStep, SeenTokens
from draftwing.spec.model_drafter import ModelDrafter


class Coupled(ModelDrafter):
    """Drafts with the blurred model."""

    blur: ClassVar[float]

    @classmethod
    def build(cls, context: DraftContext) -> Coupled:
        head = DraftLM(blurred(cls.blur), context.target.config.vocab_size)
        return cls(head, context.rows, context.shape.topk, context.dtype, context.device)


class Uncoupled(Coupled):
    """Drafts without the target's noise."""

    def propose(self, step: DraftStep) -> Draft:
        return super().propose(step._replace(noisy=step.noisy[:0]))

    def extend(self, seen: SeenTokens) -> None:
        super().extend(seen._replace(noisy=seen.noisy[:0]))


def blurred(blur: float) -> torch.nn.Module:
    model = load_model(fetch_default_model(), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    for layer in model.layers:
        for weight in layer.parameters():
            if weight.dim() == 2:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * blur)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--blur", type=float, default=0.25)
    args = parser.parse_args()
    Coupled.blur = args.blur
    questions = mt_bench()[:: 80 // args.prompts][: args.prompts]
    for shape in (TreeShape(4, 1, 5), TreeShape(4, 4, 16)):
        for kind in (Coupled, Uncoupled):
            options = dict(zip(TREE, shape, strict=True))
            llm = LLM(
                speculative_algorithm=kind, max_total_tokens=8192, max_running_requests=16, dtype="float32", **options
            )
            for temperature in (0.0, 0.7, 1.0):
                params = SamplingParams(
                    temperature=temperature, max_new_tokens=args.tokens, sampling_seed=1, ignore_eos=True
                )
                chats = [[{"role": "user", "content": question}] for question in questions]
                metas = [out.meta_info for out in llm.chat(chats, params)]
                drafts = sum(meta["spec_num_correct_drafts"] for meta in metas)
                steps = sum(meta["spec_verify_ct"] for meta in metas)
                row = {
                    "shape": list(shape),
                    "coupled": kind is Coupled,
                    "temperature": temperature,
                    "accept_length": round(1 + drafts / steps, 3),
                }
                print(json.dumps(row), flush=True)
            llm.close()


if __name__ == "__main__":
    main()
