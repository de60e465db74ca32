"""What a checkpoint recommends for sampling: files in folders, metadata of .gguf files, and values of an alias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch
import transformers
from tiny_checkpoint import write_checkpoint
from transformers import GenerationConfig

from draftwing import LLM
from draftwing.config.aliases import ALIASES, Alias
from draftwing.errors import CheckpointError
from draftwing.models import generation
from draftwing.models.generation import sampling_defaults, suppressed, unfollowed


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


@pytest.mark.slow
def test_tokens_that_are_never_drawn_are_those_of_transformers(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(tmp_path / "m"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt, own = [5, 6, 7], {"eos_token_id": 256, "pad_token_id": 257}

    def expected(words: list[list[int]], **more: Any) -> list[int]:
        given = GenerationConfig(**own, max_new_tokens=16, do_sample=False, bad_words_ids=words or None, **more)
        return list(theirs.generate(torch.tensor([prompt]), generation_config=given)[0, len(prompt) :].tolist())

    plain = expected([])
    for more in ({}, {"suppress_tokens": [plain[1]]}):
        for words in ([], [[plain[0]]], [[one] for one in plain[:4]], [[plain[2]], [256], [plain[2]]]):
            config = {**own, "do_sample": False, "bad_words_ids": words, **more}
            (folder / "generation_config.json").write_text(json.dumps(config))
            texts = []
            for algorithm in ("none", "NGRAM"):
                with LLM(str(folder), speculative_algorithm=algorithm, dtype="float32", max_total_tokens=256) as llm:
                    texts.append(llm.generate([prompt], {"max_new_tokens": 16})[0].token_ids)
            assert texts[0] == texts[1] == expected(words, **more)
        assert plain != expected([[plain[0]]], **more)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"no_repeat_ngram_size": 3, "num_beams": 4}, ["no_repeat_ngram_size", "num_beams"]),
        (
            {"begin_suppress_tokens": [3], "forced_eos_token_id": 2, "min_new_tokens": 5},
            ["begin_suppress_tokens", "forced_eos_token_id", "min_new_tokens"],
        ),
        ({"no_repeat_ngram_size": 0, "num_beams": 1, "guidance_scale": 1.0, "min_length": 0, "max_time": None}, []),
        ({"typical_p": 0.5, "do_sample": True}, ["typical_p"]),
        ({"typical_p": 0.5, "do_sample": False}, []),
        ({"typical_p": 1.0, "renormalize_logits": True, "use_cache": False}, []),
        ({"bad_words_ids": [[1, 2]]}, ["bad_words_ids of several tokens"]),
        ({"bad_words_ids": [[1], [2]], "suppress_tokens": [4], "stop_strings": []}, []),
    ],
)
def test_keys_that_are_not_followed_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], named: list[str]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    sampling_defaults(tmp_path)
    said = [record for record in caplog.records if "not followed" in record.message]
    assert len(said) == bool(named)
    assert sorted(unfollowed(given)) == sorted(named)


def test_the_defaults_of_transformers_are_followed() -> None:
    for given in (GenerationConfig(), GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)):
        assert not [*unfollowed(given.to_dict())]


@pytest.mark.parametrize("words", [5, [5], [["a"]], [[True]], [[-1]], {"a": 1}])
def test_bad_words_that_are_none_are_refused(tmp_path: Path, words: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"bad_words_ids": words}))
    with pytest.raises(CheckpointError, match="bad_words_ids"):
        suppressed(tmp_path)
