"""Draft heads in every published layout, each with the float64 reference of what it drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reference import checkpoints, draft_heads
from reference.checkpoints import Checkpoint

from draftwing.models.heads.loader import load_draft_head, load_mtp_head

VOCAB = 12


class Case(NamedTuple):
    target: Checkpoint
    head: Checkpoint | None  # None: built into the target
    algorithm: str
    reference: Callable[[list[int]], draft_heads.DraftPass]
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)


def eagle2(target: Checkpoint, **changes: Any) -> Case:
    head = checkpoints.eagle2_head(target, vocab_size=VOCAB, **changes)
    return Case(target, head, "EAGLE", lambda tokens: draft_heads.eagle2(*target, *head, tokens))


def eagle3(**changes: Any) -> Case:
    target = checkpoints.llama_target(4, num_hidden_layers=7, vocab_size=VOCAB)
    head = checkpoints.eagle3_head(target, **{"vocab_size": VOCAB, "rows": 8, **changes})
    return Case(target, head, "EAGLE3", lambda tokens: draft_heads.eagle3(*target, *head, tokens))


def forced_ids() -> Case:
    """Ids that look like layer outputs, read as boundaries because the option says so."""
    case = eagle3(eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    target, head = case.target, case.head
    assert head is not None
    return case._replace(
        reference=lambda tokens: draft_heads.eagle3(*target, *head, tokens, convention="boundary"),
        options={"aux_layer_ids": "boundary"},
    )


def mtp(layers: int, window: int | None = None) -> Case:
    """window: how far back the layers see, None: everything."""
    target = checkpoints.mimo(5, layers, vocab_size=VOCAB)
    options = {} if window is None else {"window": window}
    return Case(target, None, "NEXTN", lambda tokens: draft_heads.mtp(*target, tokens, window), options)


def standalone() -> Case:
    target = checkpoints.llama_target(6, vocab_size=VOCAB)
    draft = checkpoints.small_llama_draft(vocab_size=VOCAB)
    return Case(target, draft, "STANDALONE", lambda tokens: draft_heads.standalone(*draft, tokens))


def token_map(**changes: Any) -> Case:
    """changes: of the target."""
    case, kept = eagle2(checkpoints.llama_target(7, vocab_size=VOCAB, **changes)), [1, 2, 4, 5, 7, 9, 10]
    target, head = case.target, case.head
    assert head is not None
    return case._replace(
        reference=lambda tokens: draft_heads.eagle2(*target, *head, tokens, token_map=kept),
        options={"token_ids": torch.tensor(kept)},
    )


CASES: dict[str, Callable[[], Case]] = {
    "eagle2 llama": lambda: eagle2(checkpoints.llama_target(1, vocab_size=VOCAB)),
    "eagle2 fc bias": lambda: eagle2(checkpoints.llama_target(2, vocab_size=VOCAB), fc_bias=True, embedding=True),
    "eagle2 qwen2": lambda: eagle2(checkpoints.qwen2_target(3, vocab_size=VOCAB)),
    "eagle2 tokens": token_map,
    "eagle3 official": eagle3,
    "eagle3 speculators": lambda: eagle3(style="speculators"),
    "eagle3 prefix": lambda: eagle3(
        style="layers", prefix="model.", norm_before_residual=True, rope_theta=1e6, embedding=True
    ),
    "eagle3 shared head": lambda: eagle3(rows=None),
    "eagle3 fc_norm": lambda: eagle3(fc_norm=True, norm_output=True),
    "eagle3 aux norm": lambda: eagle3(use_aux_norm=True),
    "eagle3 norm before fc": lambda: eagle3(norm_before_fc=True),
    "eagle3 five aux": lambda: eagle3(aux=5, eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4, 5]),
    "eagle3 last state": lambda: eagle3(aux=0, eagle_config={"use_aux_hidden_state": False}),
    "eagle3 window": lambda: eagle3(layers=2, sliding_window=3, layer_types=["full_attention", "sliding_attention"]),
    "eagle3 forced ids": forced_ids,
    "eagle3 two layers": lambda: eagle3(layers=2),
    "eagle3 two layers, input norm": lambda: eagle3(layers=2, later_norm="input_layernorm"),
    "eagle3 head_dim": lambda: eagle3(head_dim=16),
    "eagle3 own width": lambda: eagle3(
        hidden_size=24, num_attention_heads=3, num_key_value_heads=1, target_hidden_size=32
    ),
    "mtp": lambda: mtp(1),
    "mtp 2 layers": lambda: mtp(2),
    "mtp 3 layers": lambda: mtp(3),
    "mtp window": lambda: mtp(1, 3),
    "mtp 2 layers, window": lambda: mtp(2, 4),
    "standalone": standalone,
}


def load_head(
    head: Checkpoint | None, algorithm: str, folder: Path, target: Any, dtype: torch.dtype = torch.float32,
    device: str = "cpu", **options: Any,
) -> Any:  # fmt: skip
    """The head, from a checkpoint in the folder, where `target` was written to. options: window: as of `mtp`."""
    window = options.pop("window", None)
    if head is None:
        found = load_mtp_head(folder / "target", target, dtype, device, **options)
        if window is not None:
            found.see_at_most(window)
        return found
    # The official files are pickles, third-party ones safetensors.
    path = head.write(folder / "draft", "pytorch_model.bin" if algorithm == "EAGLE" else "model.safetensors")
    return load_draft_head(path, target, algorithm.partition(" ")[0], dtype, device, **options)
