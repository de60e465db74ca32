"""MiniMax-M1: what its layers keep in few bits."""

from __future__ import annotations

from pathlib import Path

import torch
from hybrid_models import tokens, whole_logits
from published import written
from safetensors.torch import load_file, save_file

from draftwing.models.loader import load_model


@torch.inference_mode()
def test_sums_over_a_long_text_have_room_in_float16(tmp_path: Path) -> None:
    """What lightning attention gives grows with the text before a norm divides it: into the thousands, where a layer of
    published sizes has read thousands of tokens. Here larger queries, keys and values make such numbers."""
    written(tmp_path, "minimax-m1-80k")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in stored:
        if name.endswith("qkv_proj.weight"):
            stored[name] *= 4
    save_file(stored, file, {"format": "pt"})
    ids = tokens(40)
    exact, found = (
        whole_logits(load_model(tmp_path, dtype, "cpu"), ids).float().log_softmax(-1)
        for dtype in (torch.float32, torch.float16)
    )
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, exact, atol=0.1, rtol=0)
