"""YaRN where a part of each head is turned, against transformers: of folders, of GGUF files, and by all kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hybrid_gguf
import hybrid_models
import moe_models
import pytest
import torch
from hybrid_models import tokens, whole_logits

from draftwing.models.loader import load_model
from draftwing.ops import make_ops

pytestmark = pytest.mark.slow
MOES = ("glm4-moe", "minimax-m2")
KINDS = ("qwen3.5", "qwen3.5-moe", "qwen3-next", *MOES)
BASE = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"factor": 4.0}, {"factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0}, {"factor": 8.0, "attention_factor": 1.7},
    {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 2.0}, {"factor": 4.0, "truncate": False},
)  # fmt: skip
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def reference(kind: str, scaling: dict[str, Any], share: float = 0.5) -> Any:
    of = moe_models if kind in MOES else hybrid_models
    return of.reference(kind, rope_parameters={**BASE, **scaling, "partial_rotary_factor": share})


@pytest.mark.further(scaling=[*SCALINGS[2:]])
@pytest.mark.further(scaling=SCALINGS[0])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_of_a_folder(tmp_path: Path, kind: str, scaling: dict[str, Any]) -> None:
    theirs, ids = reference(kind, scaling), tokens(200)
    theirs.save_pretrained(tmp_path)
    model, ops = load_model(tmp_path, torch.float32, "cpu"), make_ops(torch.device("cpu"))
    expected = theirs(ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(whole_logits(model, ids).log_softmax(-1), expected, **TOLERANCE)
    model.pack(ops)
    torch.testing.assert_close(whole_logits(model, ids).log_softmax(-1), expected, **TOLERANCE)


@pytest.mark.further(factor=8.0, kind=["qwen3.5-moe", "qwen3-next", *MOES])
@pytest.mark.parametrize("factor", [2.0, 8.0])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_of_a_gguf_file(tmp_path: Path, kind: str, factor: float) -> None:
    theirs, ids, path = reference(kind, {"factor": factor}), tokens(200), tmp_path / "m.gguf"
    if kind in MOES:
        moe_models.write_gguf(path, theirs.config, theirs.state_dict())
    else:
        hybrid_gguf.write(path, theirs.config, theirs.state_dict())
    expected = theirs(ids[None]).logits[0].log_softmax(-1)
    found = whole_logits(load_model(path, torch.float32, "cpu"), ids).log_softmax(-1)
    torch.testing.assert_close(found, expected, **TOLERANCE)
