"""Options on the command line: spellings, values, what is not given."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftwing.cli.main import main
from draftwing.config import sglang_compat
from draftwing.config.arguments import PAGE, add_arguments, dashed
from draftwing.config.fields import as_typed, flag, kinds
from draftwing.config.options import REQUESTS, SERVER, Options
from draftwing.errors import ConfigError
from draftwing.train.settings import Settings


def parse(*argv: str) -> Options:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return Options.from_kwargs(**vars(parser.parse_args(dashed(argv))))


def test_what_is_not_given_stays_the_default() -> None:
    assert parse() == Options()


def test_every_option_has_both_spellings_and_reaches_its_field() -> None:
    examples = {str: "x", int: "7", float: "0.5"}
    for field in dataclasses.fields(Options):
        for name in (field.name, *field.metadata["aliases"]):
            for typed in ("--" + name, "--" + name.replace("_", "-")):
                confidence = str(field.type)
                if confidence == "bool":
                    assert getattr(parse(typed), field.name) is True
                    continue
                many = confidence.startswith("tuple")
                kind = next(kind for kind in examples if confidence.removeprefix("tuple[").startswith(kind.__name__))
                value = (kind(examples[kind]),) if many else kind(examples[kind])
                for argv in ((typed, examples[kind]), (f"{typed}={examples[kind]}",)):
                    assert getattr(parse(*argv), field.name) == value


def test_underscores_in_values_stay() -> None:
    assert parse("--model_path=my_org/my_model").model == "my_org/my_model"
    assert parse("--model", "my_model").model == "my_model"


def helped(command: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as info:
        main([command, option])
    assert info.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "chat", "bench", "train", "write-prompts"])
def test_help_has_the_common_options_and_help_all_the_others(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, whole = (
        helped(command, option, capsys, monkeypatch).partition("\noptions:")[2] for option in ("--help", "--help-all")
    )
    hidden = {"serve": (), "train": (SERVER, REQUESTS)}.get(command, (SERVER,))
    for spec in dataclasses.fields(Options):
        name = flag(spec.name)
        if spec.metadata["group"] not in hidden:
            assert (f"  {name} " in short) == spec.metadata["common"] and re.search(f"  {name}\\b", whole), name
        elif spec.name != "api_key":
            assert f"  {name} " not in short + whole, name
    for foreign in sglang_compat.FOREIGN:
        assert f"  {flag(foreign)}" not in short
        assert (re.search(f"  {flag(foreign)}\\b", whole) is not None) == (command == "serve"), foreign
    assert "--help-all" in short and PAGE in short
    assert command != "serve" or len(short.splitlines()) < 60


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("port must be at most 9; found 10", "--port must be at most 9; found 10"),
        ("the port of a host", "the port of a host"),
        ("tp_size needs num_threads.", "--tp-size needs --num-threads."),
        ("found 'num_threads', /num_threads, num_threads/x and num_threads.json", None),
        (
            "--mem-fraction-static and mem_fraction: no_such_option",
            "--mem-fraction-static and --mem-fraction: no_such_option",
        ),
        ("max_tokens must be at least 16", "--max-tokens must be at least 16"),
    ],
)
def test_names_in_errors_are_options(message: str, typed: str | None) -> None:
    assert as_typed(message, Options, Settings) == (typed or message)


WRONG = {  # of fields that have aliases: a value each, and what is said of it
    "model": ("", "must not be empty"), "tp_size": ("65", "must be at most 64"),
    "enable_expert_parallel": ("3", "explicit argument"), "context_length": ("1", "must be at least 2"),
    "mem_fraction_static": ("2", "must be at most 0.99"), "cuda_graph_max_bs": ("0", "must be at least 1"),
    "speculative_algorithm": ("", "must not be empty"), "speculative_draft_model_path": ("", "must not be empty"),
    "speculative_ngram_branch_length": ("257", "must be at most 256"),
}  # fmt: skip


@pytest.mark.parametrize("spec", [spec for spec in dataclasses.fields(Options) if spec.metadata["aliases"]],
                         ids=lambda spec: spec.name)  # fmt: skip
def test_an_error_names_the_option_as_it_was_given(
    spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, said = WRONG[spec.name]

    def error(*argv: str) -> str:
        with contextlib.suppress(SystemExit):
            assert main(["serve", *argv]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    typed = [flag(name) for name in (spec.name, *spec.metadata["aliases"])]
    for one in [*typed, *spec.metadata["short"]]:
        others = "|".join(other for other in [*typed, *spec.metadata["short"]] if other != one)
        for words in ([f"{one}={value}"], [typed[-1], "8", f"{one}={value}"], [one]):
            if (words == [one] and str(spec.type) == "bool") or (len(words) > 2 and spec.name == "model"):
                continue
            found = error(*words)
            assert (said if value in words[-1] and words != [one] else "expected one argument") in found, found
            assert re.search(rf"(^| ){one}[ :]", found) and not re.search(f"({others})[ :]", found), found
    (confidence,) = {int, float, str, bool} & {*kinds(Options)[spec.name].singles}
    given = value if confidence in (str, bool) else confidence(value)
    for name in spec.metadata["aliases"]:
        with pytest.raises(ConfigError, match=f"^{name} must"):
            Options.from_kwargs(**{name: given}).resolve()
        (tmp_path / "a.yaml").write_text(f"{name}: {json.dumps(given)}")
        assert f"line 1: {flag(name) if '_' in name else name} must" in error("--config", str(tmp_path / "a.yaml"))
        monkeypatch.setenv(variable := f"DRAFTWING_{name.upper()}", value or " ")
        if value:
            assert f"{variable}: {flag(name) if '_' in name else name} must" in error()
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max-model-len 8k", "argument --max-model-len: invalid int value: '8k'"),
        ("--max_model_len 8k", "argument --max-model-len: invalid int value: '8k'"),
        ("--context-length 8k", "argument --context-length: invalid int value: '8k'"),
        ("--tp two", "argument --tp: invalid int value: 'two'"),
        ("-md x --speculative-algo NGRAM", "error: -md needs a --speculative-algo that drafts with a model"),
    ],
)
def test_other_errors_name_it_so_too(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["serve", *words.split()]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "same"),
    [
        (["-m", "x.gguf"], ["--model", "x.gguf"]),
        (["-hf", "org/name:Q4_K_M"], ["--model", "org/name:Q4_K_M"]),
        (["-hf=org/name"], ["--model", "org/name"]),
        (["--hf-repo", "org/name"], ["--model", "org/name"]),
        (["-md", "x.gguf"], ["--speculative-draft-model-path", "x.gguf"]),
        (["-hfd", "org/name:Q8_0"], ["--speculative-draft-model-path", "org/name:Q8_0"]),
    ],
)
def test_spellings_of_llama_cpp(argv: list[str], same: list[str]) -> None:
    assert parse(*argv) == parse(*same) != parse()


def test_several_names_of_a_model() -> None:
    assert parse("--served-model-name", "a", "b").model_names == ("a", "b")
    assert Options.from_kwargs(served_model_name="a").model_names == ("a",)
    assert Options.from_kwargs(served_model_name=["a", "b"]).resolve().model_names == ("a", "b")
    assert parse("--model", "m").model_names == ("m",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a b", "several models.* 'a' and 'b'"),
        ("a --model b", "several models.* 'a' and 'b'"),
        ("--model a --model b", "several models.* 'a' and 'b'"),
        ("--model-path a -m b", "several models.* 'a' and 'b'"),
        ("-hf a/b --model c/d", "several models.* 'a/b' and 'c/d'"),
    ],
)
def test_a_server_has_one_model(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["serve", *words.split()]) == 2
    except SystemExit as error:  # argparse's
        assert error.code == 2
    assert re.search(said, capsys.readouterr().err.splitlines()[-1])


def test_of_options_given_again_the_last_one_counts() -> None:
    assert parse("--port", "1", "--port=2", "--disable-ui", "--disable-ui").port == 2
    assert parse("--model", "a", "--model-path", "a").model == "a"
