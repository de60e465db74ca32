"""Options on the command line: spellings, values, what is not given."""

from __future__ import annotations

import argparse
import dataclasses
import re

import pytest

from draftwing.cli.main import main
from draftwing.config import sglang_compat
from draftwing.config.arguments import PAGE, add_arguments, dashed
from draftwing.config.fields import as_typed, flag
from draftwing.config.options import REQUESTS, SERVER, Options
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
