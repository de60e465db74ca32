"""What a checkpoint recommends for sampling: files in folders, metadata of .gguf files, and values of an alias."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_gguf

from draftwing.config.aliases import ALIASES, Alias
from draftwing.models import generation
from draftwing.models.generation import sampling_defaults


def test_generation_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 0, "top_p": 7, "max_new_tokens": 5, "do_sample": True}))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": -1}
    assert "top_p" in caplog.text
    file.write_text(json.dumps({"temperature": 0.6, "do_sample": False}))
    assert sampling_defaults(tmp_path) == {"temperature": 0.0}


def test_metadata_of_a_gguf_file(tmp_path: Path) -> None:
    def edit(writer: tiny_gguf.gguf_package.GGUFWriter) -> None:
        writer.add_sampling_temp(0.5)
        writer.add_sampling_top_k(20)
        writer.add_sampling_penalty_repeat(1.25)

    file = tiny_gguf.write(tmp_path / "a.gguf", "llama", edit=edit)
    assert sampling_defaults(file) == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}


def test_values_of_an_alias_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.5}))
    alias = Alias(None, "1B", "MIT", sampling={"temperature": 0.2, "max_new_tokens": 9})
    monkeypatch.setattr(generation, "ALIASES", {"mine": alias})
    assert sampling_defaults(tmp_path, "mine") == {"temperature": 0.2, "top_p": 0.5, "max_new_tokens": 9}
    assert sampling_defaults(tmp_path, "other") == {"temperature": 0.6, "top_p": 0.5}


def test_values_of_aliases_are_sampling_parameters() -> None:
    for name, alias in ALIASES.items():
        generation.SamplingParams(**alias.sampling)  # which refuses others
        assert name == name.lower()
