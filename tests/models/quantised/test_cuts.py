"""A rank reads its part of a quantised matrix, and has the bits that the matrix has there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from gguf import GGMLQuantizationType as Type
from reference.checkpoints import llama_target
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_gguf import write as write_gguf
from tiny_quantised import MODULE, matrix, read, settings

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.models import folder
from draftwing.models.loader import load_model
from draftwing.models.quantised.cuts import stored_cuts
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Absent, Share

ROWS, COLUMNS = 64, 192
NOT_IN_PARTS = {"bitsandbytes", "modelopt nvfp4"}
NOT_BY_COLUMN = {"gptq order", "compressed int4 group order"}


@pytest.mark.parametrize("name", tiny.FORMATS)
def test_parts_are_those_of_the_whole(name: str) -> None:
    config, write = tiny.FORMATS[name]
    written = write(matrix(ROWS, COLUMNS)).tensors
    whole, scheme = read(config, written).dense(torch.float32), settings(config).scheme_of(MODULE)
    assert scheme is not None
    for axis, size in ((0, ROWS), (1, COLUMNS)):
        for start, count in ((0, size // 2), (size // 2, size // 2), (size // 3 // 32 * 32, 32)):
            cut = Cut(axis, Share(start, count, size))
            found = stored_cuts(scheme, cut)
            if found is None:
                assert name in NOT_IN_PARTS or (axis == 1 and name in NOT_BY_COLUMN)
                continue
            parts = {key: found[key].of_tensor(key, value) if key in found else value for key, value in written.items()}
            assert torch.equal(read(config, parts).dense(torch.float32), whole.narrow(axis, start, count))


@pytest.mark.parametrize("name", ["fp8 block", "awq", "gptq zeros", "compressed int4"])
def test_parts_of_groups_are_cut_from_the_whole(name: str) -> None:
    scheme = settings(tiny.FORMATS[name][0]).scheme_of(MODULE)
    assert scheme is not None and stored_cuts(scheme, Cut(1, Share(48, 48, 192))) is None
    assert stored_cuts(scheme, Cut(0, Share(4, 4, 64))) is None or name == "compressed int4"


def test_tensors_of_another_size_are_refused() -> None:
    """None is cut as if it were of that size; of a matrix of more columns each tensor says so."""
    for name in tiny.FORMATS:
        config, write = tiny.FORMATS[name]
        scheme, cut = settings(config).scheme_of(MODULE), Cut(1, Share(0, COLUMNS // 2, COLUMNS))
        found = None if scheme is None else stored_cuts(scheme, cut)
        for key, value in write(matrix(ROWS, 2 * COLUMNS)).tensors.items() if found else ():
            if found and key in found:
                with pytest.raises(CheckpointError, match="in axis"):
                    found[key].of_tensor(key, value)


class Counted:
    """A safetensors file whose bytes are counted as they are read."""

    read = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        self._file = safe_open(*args, **more)

    def __enter__(self) -> Any:
        self._file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def keys(self) -> Any:
        return self._file.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._counted(self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        stored = self._file.get_slice(name)
        return type(
            "Slice", (), {
                "get_shape": staticmethod(stored.get_shape),
                "get_dtype": staticmethod(stored.get_dtype),
                "__getitem__": lambda _, key: self._counted(stored[key]),
            },
        )()  # fmt: skip

    @staticmethod
    def _counted(value: torch.Tensor) -> torch.Tensor:
        Counted.read += value.nbytes
        return value


@pytest.mark.parametrize(
    "name",
    [
        "",
        "fp8 block",
        "awq",
        *(
            pytest.param(one, marks=pytest.mark.exhaustive)
            for one in ("compressed fp8 channel", "gptq zeros", "compressed int4 zeros", "compressed nvfp4")
        ),
    ],
)
def test_a_rank_of_four_reads_a_quarter_of_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """But for norms, and words that say how long things are."""
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256}
    path = llama_target(1, vocab_size=100, **sizes).write(tmp_path)
    if name:
        config, write = tiny.FORMATS[name]
        tiny.quantise(path, config, lambda module: write)
    stored = load_file(path / "model.safetensors")
    if not name:
        save_file({key: value.bfloat16() for key, value in stored.items()}, path / "model.safetensors")
    size = (path / "model.safetensors").stat().st_size
    monkeypatch.setattr(folder, "safe_open", Counted)
    for rank in range(4):
        Counted.read = 0
        model = load_model(path, torch.float32, "cpu", ranks=Absent(4, rank))
        assert 0.23 * size < Counted.read < 0.28 * size, rank
        o = model.layers[1].mixer.o.dense_weight()
        assert o.shape == (128, 32)


def test_of_a_gguf_file_a_rank_dequantises_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = write_gguf(tmp_path / "m.gguf", "llama", Type.F16), list[int]()
    decoded = GGUFFile.decoded

    def counted(self: GGUFFile, name: str, raw: Any) -> Any:
        made.append(raw.nbytes)
        return decoded(self, name, raw)

    monkeypatch.setattr(GGUFFile, "decoded", counted)
    load_model(path, torch.float32, "cpu")
    whole = sum(made)
    for rank in range(2):
        made.clear()
        load_model(path, torch.float32, "cpu", ranks=Absent(2, rank))
        assert sum(made) < 0.53 * whole
