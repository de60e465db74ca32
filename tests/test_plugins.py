"""Families and weight formats of installed packages."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from reference.hf_configs import LLAMA2_7B

from draftwing import plugins
from draftwing.errors import CheckpointError, ConfigError
from draftwing.layers.linear_ops.dense import FORMATS, DenseFormat
from draftwing.models.config import ENTRY_POINTS, from_hf
from draftwing.models.families import FAMILIES

MODULE = """
from draftwing.layers.linear_ops.dense import FORMATS, DenseFormat
from draftwing.models.families import FAMILIES, Family

FAMILIES["OursForCausalLM"] = Family("ours", qkv_bias=True)
FORMATS["ours"] = lambda config: DenseFormat()
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint(name, value, ENTRY_POINTS)
        for name, value in {
            "OursForCausalLM": "ours_of_a_test",
            "ours": "ours_of_a_test",
            "LlamaForCausalLM": "nowhere",
            "BrokenForCausalLM": "nowhere",
        }.items()
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda **kw: EntryPoints(points).select(**kw))
    for table in (FAMILIES, FORMATS):
        for name in ("OursForCausalLM", "ours"):
            monkeypatch.setitem(table, name, None)  # type: ignore[attr-defined]
            monkeypatch.delitem(table, name)  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "ours_of_a_test", raising=False)


def test_a_family_of_an_installed_package_is_found_by_its_architecture() -> None:
    config = from_hf({**LLAMA2_7B, "architectures": ["OursForCausalLM"]})
    assert config.architecture == "OursForCausalLM" and config.attention.qkv_bias


def test_a_format_of_an_installed_package_is_found_by_its_quant_method() -> None:
    config = from_hf({**LLAMA2_7B, "quantization_config": {"quant_method": "ours"}})
    assert isinstance(config.weight_format, DenseFormat)


def test_the_packages_own_families_come_first() -> None:
    assert not from_hf(LLAMA2_7B).attention.qkv_bias


def test_what_cannot_be_imported_says_so() -> None:
    with pytest.raises(ConfigError, match=r"draftwing\.models BrokenForCausalLM: nowhere cannot be loaded: ModuleNot"):
        from_hf({**LLAMA2_7B, "architectures": ["BrokenForCausalLM"]})
    with pytest.raises(CheckpointError, match="unknown architecture OtherForCausalLM"):
        from_hf({**LLAMA2_7B, "architectures": ["OtherForCausalLM"]})
