"""What a drafter gains by drawing with the target's own noise: accept length at several temperatures, with and without.

    python benchmarks/coupling.py [--prompts 8] [--tokens 64] [--blur 0.25]

The draft is the default model with noise added to its weights (`--blur` times each matrix's standard deviation), run as
STANDALONE; without coupling it proposes its own most probable tokens, as other engines' tree drafters do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from draftwing import LLM, SamplingParams
from draftwing.config.options import Options
from draftwing.core import TreeShape
from draftwing.engine.build import assemble
from draftwing.engine.device import pick_device
from draftwing.engine.engine import Engine
from draftwing.models.hub import fetch_default_model
from draftwing.models.loader import load_model
from draftwing.sched.shapes import FixedShape
from draftwing.spec.heads import DraftLM
from draftwing.spec.model_drafter import ModelDrafter
from draftwing.text.tokenizer import load_tokenizer

PROMPTS = Path(__file__).parent / "data" / "mt_bench.jsonl"


class Uncoupled(ModelDrafter):
    """Drafts without the target's noise."""

    def propose(self, slots, rows, shape, max_bound, noisy):  # type: ignore[no-untyped-def]
        return super().propose(slots, rows, shape, max_bound, noisy[:0])

    def observe(self, slots, batch, taps, next_ids, count, noisy):  # type: ignore[no-untyped-def]
        super().observe(slots, batch, taps, next_ids, count, noisy[:0])


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
    target = load_model(fetch_default_model(), torch.float32, "cpu")
    draft = blurred(args.blur)
    device = pick_device("cpu")
    options = Options(
        max_total_tokens=8192, max_running_requests=16, dtype="float32", speculative_algorithm="none"
    ).resolve()
    tokenizer = load_tokenizer(fetch_default_model())
    with PROMPTS.open(encoding="utf8") as lines:
        questions = [json.loads(line)["turns"][0] for line in lines][:: 80 // args.prompts][: args.prompts]
    for shape in (TreeShape(4, 1, 5), TreeShape(4, 4, 16)):
        for kind in (ModelDrafter, Uncoupled):
            head = DraftLM(draft, target.config.vocab_size)
            drafter = kind(head, 17, shape.topk, torch.float32, torch.device("cpu"))
            parts = assemble(options, target, torch.float32, device, drafter, FixedShape(shape))
            llm = LLM.from_engine(Engine.from_parts(options, tokenizer, parts, ()))
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
                    "coupled": kind is ModelDrafter,
                    "temperature": temperature,
                    "accept_length": round(1 + drafts / steps, 3),
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
