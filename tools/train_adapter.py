"""Trains a small adapter (LoRA) of the default model, in minutes on a CPU, and says what it does and what drafts gain.

    python tools/train_adapter.py style --out FOLDER   # answers in capitals
    python tools/train_adapter.py task --out FOLDER    # sorts words

What is learnt is made here: the model's own answers in capitals, or lists of words and the same in order. The folder is
PEFT's. Then held-out prompts are answered with the adapter, with the model's bundled head and without drafts: the texts
must be the same.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from draftwing import LLM
from draftwing.layers.linear_ops.base import LinearOp
from draftwing.models.adapters.adapter import AdapterTargets, Target
from draftwing.models.decoder import DecoderModel
from draftwing.models.hub import fetch_default_model
from draftwing.models.loader import load_model
from draftwing.train.capture import Causal

MODEL, HUB = "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
TOPICS = """
    rain bread rivers iron music winter bees maps glass tea cities forests time numbers sleep salt light horses ships
    gardens clouds coffee stone history paper wind fire dogs roads birds
""".split()  # noqa: SIM905
WORDS = """
    apple bear cloud door eagle fish grape house island jungle king lemon moon nest ocean piano queen river sun tree
    umbrella violin water yard zebra anchor bread candle drum egg
""".split()  # noqa: SIM905
HELD_OUT, ANSWER, LONGEST = 6, 48, 112  # prompts; tokens of an answer; tokens of a text that is learnt
Text = tuple[list[int], list[int]]  # prompt, answer


class Trained(LinearOp):
    """A product with factors beside it. parts: of the outputs, one behind the other."""

    def __init__(self, op: LinearOp, parts: Sequence[tuple[nn.Parameter, nn.Parameter] | int], scale: float) -> None:
        """parts: factors, or outputs without any."""
        super().__init__(op.layer)
        self._op, self._parts, self._scale = op, parts, scale

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        added = [
            x.new_zeros(len(x), part) if isinstance(part, int) else F.linear(F.linear(x, part[0]), part[1])
            for part in self._parts
        ]
        return self._op(x, bias, residual) + self._scale * torch.cat(added, 1)


def factors_of(model: DecoderModel, rank: int, scale: float) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Puts factors beside all matrices of a model; returns them by name."""
    generator, found = torch.Generator().manual_seed(0), dict[str, tuple[nn.Parameter, nn.Parameter]]()
    linears, targets = model.adaptable(), AdapterTargets(model).targets
    by_linear: dict[str, list[tuple[str, Target]]] = {}
    for name, target in targets.items():
        assert target.part.order is None, "rows are in the order of the checkpoint"
        by_linear.setdefault(target.linear, []).append((name, target))
    for linear, parts in by_linear.items():
        own = []
        for name, target in sorted(parts, key=lambda one: one[1].slice):
            down = nn.Parameter(torch.randn(rank, target.inputs, generator=generator) / target.inputs**0.5)
            found[name] = down, nn.Parameter(torch.zeros(target.outputs, rank))
            own.append(found[name])
        linears[linear].op = Trained(linears[linear].op, own, scale)
    return found


def prompts_of(kind: str, seed: int, count: int) -> list[tuple[str, str]]:
    """Returns questions, and what is to be answered, empty where that is the model's."""
    draw, found = random.Random(seed), []
    for i in range(count):
        if kind == "style":
            form = draw.choice(["What is {}?", "Tell me about {}.", "Why does {} matter?", "Write a line about {}."])
            found.append((form.format(TOPICS[i % len(TOPICS)]), ""))
        else:
            words = draw.sample(WORDS, draw.randint(3, 6))
            found.append((f"Sort these words: {', '.join(words)}", ", ".join(sorted(words))))
    return found


def texts_of(llm: LLM, asked: Sequence[tuple[str, str]]) -> list[Text]:
    """Returns what is learnt: prompts and answers as tokens."""
    tokenizer = llm.tokenizer
    prompts = [tokenizer.render_chat([{"role": "user", "content": question}]) for question, _ in asked]
    ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    wanted = [answer for _, answer in asked]
    if not all(wanted):
        params = {"temperature": 0.0, "max_new_tokens": ANSWER}
        wanted = [answer.text.upper() for answer in llm.generate(ids, params, use_tqdm=False)]
    ends = [*llm.engine.info.stop_ids][:1]
    return [
        (prompt, [*tokenizer.encode(answer, add_special_tokens=False), *ends][: LONGEST - len(prompt)])
        for prompt, answer in zip(ids, wanted, strict=True)
    ]


def loss_of(model: DecoderModel, batch: Sequence[Text]) -> Tensor:
    length = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids, wanted = torch.zeros(len(batch), length, dtype=torch.int64), torch.full((len(batch), length), -100)
    for row, (prompt, answer) in enumerate(batch):
        text = torch.tensor([*prompt, *answer])
        ids[row, : len(text)] = text
        wanted[row, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
    positions = torch.arange(length).repeat(len(batch))
    hidden, _ = model(ids.flatten(), positions, Causal(len(batch), length))
    at = (wanted.flatten() >= 0).nonzero().flatten()
    return F.cross_entropy(model.logits(hidden[at]).float(), wanted.flatten()[at])


def train(kind: str, out: Path, steps: int, batch: int, rank: int, rate: float) -> None:
    with LLM(MODEL, speculative_algorithm="none") as llm:
        texts = texts_of(llm, prompts_of(kind, 1, 120))
    model = load_model(fetch_default_model(), torch.float32, "cpu")
    factors = factors_of(model, rank, 2.0)
    optimizer = torch.optim.Adam([part for pair in factors.values() for part in pair], rate)
    draw, began = random.Random(2), time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 8, (steps - step) / (steps / 3))
        loss = loss_of(model, draw.sample(texts, batch))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 9 or step == 0:
            print(f"step {step + 1}: loss {loss:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    out.mkdir(parents=True)
    tensors = {}
    for name, (down, up) in factors.items():
        for letter, part in (("A", down), ("B", up)):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = part.detach().bfloat16().contiguous()
    save_file(tensors, out / "adapter_model.safetensors")
    kinds = sorted({name.rpartition(".")[2] for name in factors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": kinds}
    (out / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": HUB}, indent=1) + "\n")


def judge(kind: str, out: Path) -> None:
    """Prints what held-out prompts are answered, and how many tokens a step commits, with the model and the adapter."""
    asked = (
        prompts_of(kind, 99, len(TOPICS) + HELD_OUT)[-HELD_OUT:] if kind == "task" else prompts_of(kind, 98, HELD_OUT)
    )
    chats = [[{"role": "user", "content": question}] for question, _ in asked]
    params, found = {"temperature": 0.0, "max_new_tokens": ANSWER}, dict[tuple[str, bool], list[Any]]()
    for drafts in (False, True):
        more = {} if drafts else {"speculative_algorithm": "none"}
        with LLM(MODEL, lora_modules=[f"{kind}={out}"], **more) as llm:
            for name in ("", kind):
                found[name, drafts] = llm.chat(chats, params, adapter=name or None, use_tqdm=False)
    for name in ("", kind):
        plain, drafted = ([one.token_ids for one in found[name, drafts]] for drafts in (False, True))
        assert plain == drafted, "drafts change a text"
        metas = [one.meta_info for one in found[name, True]]
        steps = sum(meta["spec_verify_ct"] for meta in metas)
        correct = sum(meta["spec_num_correct_drafts"] for meta in metas)
        print(f"{name or 'the model alone'}: {1 + correct / max(steps, 1):.2f} tokens a step")
        for (question, wanted), answer in zip(asked, found[name, True], strict=True):
            right = "" if not wanted else f" ({'right' if answer.text.strip() == wanted else 'wrong'})"
            print(f"  {question} -> {answer.text[:70]!r}{right}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("style", "task"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    args = parser.parse_args()
    if not args.out.exists():
        train(args.kind, args.out, args.steps, args.batch, args.rank, args.rate)
    judge(args.kind, args.out)


if __name__ == "__main__":
    main()
