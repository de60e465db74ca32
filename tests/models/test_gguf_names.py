"""Names of tensors in GGUF files: those of the gguf package's tables, in the tests' files and for the loader."""

from __future__ import annotations

import re
from pathlib import Path

import gemma4_models
import moe_models
import pytest
from gguf import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES

from draftwing.gguf_file import open_gguf
from draftwing.models import gguf
from draftwing.models.gguf_names import hf_name

KINDS = {
    "glm4-moe-groups": MODEL_ARCH.GLM4_MOE, "minimax-m2": MODEL_ARCH.MINIMAXM2, "deepseek-v3": MODEL_ARCH.DEEPSEEK2,
    **dict.fromkeys(gemma4_models.KINDS, MODEL_ARCH.GEMMA4),
}  # fmt: skip
# What has no name in a folder: copies and factors of old converters, and tensors of all experts, which are taken apart.
NAMELESS = re.compile(
    r"rope_freqs|blk\.\d+\.(attn_rot_embd|ffn_(gate|up|down|gate_up)_exps|nextn\.(embed_tokens|shared_head_head))"
)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    if kind in gemma4_models.KINDS:
        theirs = gemma4_models.reference(kind)
        path = gemma4_models.write_gguf(tmp_path / "m.gguf", theirs)
    else:
        theirs = moe_models.reference(kind)
        path = moe_models.write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    file, layers = open_gguf(path), theirs.config.num_hidden_layers
    config, last = gguf.model_config(file), layers - 1
    known = {TENSOR_NAMES[tensor].format(bid=last) for tensor in MODEL_TENSORS[KINDS[kind]]}
    bases = {re.sub(r"^blk\.\d+", f"blk.{last}", name.rpartition(".")[0]) for name in file.tensors}
    assert bases <= known
    if config.experts is None:  # of which the table has names, too
        return
    named = {base for base in known if hf_name(f"{base}.weight", config, layers) != f"{base}.weight"}
    assert not [base for base in known - named if not NAMELESS.fullmatch(base)]
