"""Says before the long stages of a run what they take: tokens, disk and time.

Tokens and bytes are counted. Time follows from counted operations and from how fast this device multiplies large
matrices: capturing and training reach between `SLOWEST` and `FASTEST` of that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftwing.config.drafters import Training
from draftwing.models.config import ModelConfig
from draftwing.train.data import Prompt
from draftwing.train.progress import duration
from draftwing.train.settings import Settings
from draftwing.train.store import Tokens

# Shares of the speed of large matrix products. Heads of SmolLM2 reached 0.12 to 0.17 on an H200.
SLOWEST, FASTEST = 0.1, 0.5
# Of the optimizer. A step moves a weight by about the learning rate, 0.4 / H by default, and it begins at about
# 1 / sqrt(H): this many move it by a part of itself. A head that was trained needs less: 24 have taught one much.
LEAST_STEPS, LEAST_FURTHER_STEPS = 100, 10
_STATE = 12  # bytes of a parameter in fit/state.pt: itself and two moments of the optimizer


class Text(NamedTuple):
    """Counts tokens of what a run is trained on. answers: those in the loss.  missing: those of which no hidden states
    are stored yet."""

    tokens: int
    answers: int
    missing: int


def count_text(tokens: Sequence[Tokens], known: Set[str] = frozenset()) -> Text:
    """Counts what is there. known: keys of those whose hidden states are stored."""
    lengths = [(one.key, len(one.ids)) for one in tokens]
    missing = sum(length for key, length in lengths if key not in known)
    return Text(sum(length for _, length in lengths), sum(int(one.loss_mask.sum()) for one in tokens), missing)


def longest_text(given: Text, prompts: Sequence[tuple[Prompt, list[int]]], settings: Settings) -> Text:
    """Adds the longest answers to the prompts that have none yet. prompts: with their token ids."""
    asked = sum(len(ids) for _, ids in prompts)
    rooms = (min(settings.max_length - len(ids), settings.max_tokens * len(one.turns)) for one, ids in prompts)
    room = sum(rooms)
    return Text(given.tokens + asked + room, given.answers + room, given.missing + asked + room)


class HeadSize(NamedTuple):
    """Counts values in the matrices of a head. once: of those used once per token.  layers: of those used in each pass.
    lm_head: of its own one or of the target's rows.  trained: whether that is its own.  passes: through the layers for
    a token of text.  drafts: of a token in the loss, each with its logits."""

    once: int
    layers: int
    lm_head: int
    trained: bool
    passes: float
    drafts: float

    @property
    def parameters(self) -> int:
        return self.once + self.layers + (self.lm_head if self.trained else 0)


def head_size(settings: Settings, target: ModelConfig, aux_layers: int) -> HeadSize:
    """Returns the sizes of a fresh head. aux_layers: how many hidden states it reads."""
    how, hidden, vocab = settings.training, target.hidden_size, target.vocab_size
    attention = target.attention
    layer = attention.weights(hidden) + 3 * hidden * (settings.ffn_size or target.mlp_size)
    if how.block:
        block = settings.block_steps or how.block
        drafted = settings.draft_vocab_size
        trained = drafted is not None and settings.draft_lm_head == "own"
        passes = 1 + settings.anchors * (block + 1)
        return HeadSize(aux_layers * hidden**2, settings.draft_layers * layer, hidden * (drafted or vocab), trained,
                        passes, settings.anchors * block)  # fmt: skip
    steps = settings.ttt_steps or _chain(how)
    if not how.aux_hidden_states:
        return HeadSize(0, layer + 2 * hidden**2, hidden * vocab, False, steps, steps)
    layer += hidden * attention.head_dim * (attention.heads + 2 * attention.kv_heads)  # which read twice the width
    drafted = settings.draft_vocab_size or min(32000, vocab // 4)
    return HeadSize(aux_layers * hidden**2, layer, hidden * drafted, True, steps, steps)


def _chain(how: Training) -> int:
    from draftwing.train.ttt import Loss

    return Loss(**how.loss).steps


@dataclass(frozen=True)
class Forecast:
    """What a run takes. seen, steps: tokens that training goes over, and in how many steps, unless it ends by the
    clock.  capturing, training: operations.  features, checkpoints: bytes on the disk."""

    text: Text
    seen: int
    steps: int
    capturing: float
    training: float
    features: int
    checkpoints: int

    def report(self, settings: Settings, rate: float, devices: int, free: int, at_most: bool) -> list[str]:
        """Returns lines for the log. rate: operations per second of large matrix products, of one device.  devices:
        that train.  free: bytes on the disk.  at_most: whether the text's answers are not there yet."""
        bound = "at most " if at_most else ""
        seen = "" if settings.minutes else f"; {_count(self.seen)} seen in training"
        disk = self.features + self.checkpoints
        fits = "" if disk <= free else ": it may not fit, --online stores no hidden states"
        captured, trained = (0.0, self.capturing) if settings.online else (self.capturing, 0.0)
        work = {"capturing": captured, "training": 0.0 if settings.minutes else (self.training + trained) / devices}
        times = ["generating shows its own after the first answers"] if at_most else []
        times += [
            f"{name} {bound}{_span(count / rate / FASTEST, count / rate / SLOWEST)}"
            for name, count in work.items()
            if count
        ]
        times += [f"training {settings.minutes:g} min"] if settings.minutes else []
        lines = [
            f"forecast, tokens: {bound}{_count(self.text.tokens)}, {_count(self.text.answers)} of them in "
            f"answers{seen}",
            f"forecast, disk: {bound}{self.features / 1e9:.2f} GB of hidden states and {self.checkpoints / 1e9:.2f} GB "
            f"of checkpoints; {free / 1e9:.1f} GB are free{fits}",
            f"forecast, time: {'; '.join(times)}; evaluation not counted",
        ]
        least = LEAST_FURTHER_STEPS if settings.init_head else LEAST_STEPS
        if settings.trains and not settings.minutes and 0 < self.steps < least:
            more = math.ceil(least / self.steps)
            passes = f"--steps {least}" if settings.steps else f"--epochs {settings.epochs * more:g}"
            lines.append(
                f"forecast, steps: {bound}{self.steps} of the optimizer, which train next to nothing; at least {least} "
                f"take {more} times the prompts (`draftwing write-prompts` makes some), {passes}, or --batch-tokens "
                f"{max(settings.batch_tokens // more, 1)}"
            )
        return lines


def forecast(settings: Settings, target: ModelConfig, aux_layers: int, text: Text, token_bytes: int) -> Forecast:
    """Counts what a run takes. token_bytes: of a token's hidden states on the disk."""
    head, share = head_size(settings, target, aux_layers), text.answers / max(1, text.tokens)
    vocab = target.hidden_size * target.vocab_size
    # Two operations a value forward, two for the gradient of the input, two for that of the matrix.
    lm_head = head.drafts * (6 if head.trained else 4) * head.lm_head + 2 * vocab
    token = 6 * (head.once + head.passes * head.layers) + share * lm_head
    step = settings.batch_tokens * settings.accumulate * settings.gpus
    seen = settings.steps * step or round(settings.epochs * text.tokens * (1 - settings.held_out))
    capturing = 2.0 * target.products * (seen if settings.online else text.missing)
    written = head.parameters * (2 * _STATE + 4)  # the state replaces another one; and the head
    stored = 0 if settings.online else text.missing * token_bytes
    return Forecast(text, seen, settings.steps or math.ceil(seen / step), capturing, token * seen, stored, written)


def product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Measures operations per second of large matrix products."""
    size = 1024
    while size < 8192 and 8 * _products(size, 1, device, dtype) < seconds:
        size *= 2
    times = max(1, round(seconds / _products(size, 1, device, dtype)))
    return 2 * size**3 * times / _products(size, times, device, dtype)


def _products(size: int, times: int, device: torch.device, dtype: torch.dtype) -> float:
    """Returns seconds of so many products, after one that does not count."""
    a = torch.ones(size, size, device=device, dtype=dtype)
    (a @ a)[0, 0].item()
    start = time.perf_counter()
    for _ in range(times - 1):
        a @ a
    (a @ a)[0, 0].item()  # waits for the device
    return max(time.perf_counter() - start, 1e-9)


def _span(low: float, high: float) -> str:
    """low, high: seconds."""
    first, last = duration(low), duration(high)
    return first if first == last else f"{first} to {last}"


def _count(tokens: int) -> str:
    return f"{tokens / 1e6:.1f} million" if tokens >= 1e6 else f"{tokens:,}"
