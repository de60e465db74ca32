"""Options of a file and of the environment."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from draftwing.cli.main import main
from draftwing.config import foreign_names
from draftwing.config.fields import as_typed, flag, kinds, names_of
from draftwing.config.foreign_names import FOREIGN
from draftwing.config.option_fields import REQUESTS, SERVER
from draftwing.config.options import Options
from draftwing.config.sources import PAGE, add_arguments, dashed, with_sources
from draftwing.errors import ConfigError
from draftwing.train.settings import Settings

TOML = """
# comment
model = "org/name"
"served-model-name" = ["a", "b"]
port = 8080
watchdog_timeout = 60
disable-ui = true
mem-fraction = 0.5
"""
YAML = """
# comment
model: org/name
served-model-name: [a, b]
port: 8080
--watchdog_timeout: 60
disable-ui: true
mem-fraction: 0.5
revision: null
"""
MEANT = Options(
    model="org/name", served_model_name=("a", "b"), port=8080, watchdog_timeout=60, disable_ui=True,
    mem_fraction_static=0.5,
)  # fmt: skip


def read(arguments: dict[str, Any] | None = None, **environ: str) -> Options:
    return Options.from_kwargs(**with_sources(arguments or {}, environ))


@pytest.mark.parametrize(("suffix", "text"), [(".toml", TOML), (".yaml", YAML), (".yml", YAML), (".yaml", "")])
def test_a_file(suffix: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"server{suffix}"
    meant = MEANT if text else Options()
    for encoding in ("utf-8", "utf-8-sig"):  # as editors save
        file.write_text(text, encoding)
        assert read({"config": str(file)}) == read(DRAFTWING_CONFIG=str(file)) == meant
    meant.resolve()


def example(spec: dataclasses.Field[Any]) -> tuple[str, Any]:
    """A text that an option takes, and what its field is then."""
    kind, texts = kinds(Options)[spec.name], {bool: "true", int: "7", float: "0.5"}
    single = kind.singles[0]
    text = spec.metadata["choices"][0] if spec.metadata["choices"] else texts.get(single, "auto")
    if spec.metadata["min"] is not None:
        text = str(max(spec.metadata["min"], 0.5) if single is float else spec.metadata["min"])
    value = True if single is bool else single(text) if single in texts else text
    return text, (value,) if kind.many else value


def test_every_option_reaches_its_field(tmp_path: Path) -> None:
    """By each of its names: of the command line in both spellings, of a variable, and of a file."""
    every = {}
    for spec in dataclasses.fields(Options):
        text, every[spec.name] = example(spec)
        meant = Options(**{spec.name: every[spec.name]})
        for name in (spec.name, *spec.metadata["aliases"]):
            assert read(**{f"DRAFTWING_{name.upper()}": text}) == meant, name
            for typed in ("--" + name, flag(name)):
                forms = [[typed]] if every[spec.name] is True else [[typed, text], [f"{typed}={text}"]]
                assert all(parse(*words) == meant for words in forms), typed
    (tmp_path / "a.toml").write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in every.items()))
    (tmp_path / "a.yaml").write_text(json.dumps(every))
    for file in ("a.toml", "a.yaml"):
        assert read({"config": str(tmp_path / file)}) == Options(**every)


def test_the_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The command line, the environment, the file; an option overrules its opposite of a lower place."""
    file = tmp_path / "a.toml"
    file.write_text("port = 1\nlog_interval = 1\nmax_connections = 1\nenable-mixed-chunk = true\napi_key = 'sk'")
    environ = {"DRAFTWING_PORT": "2", "DRAFTWING_LOG_INTERVAL": "2", "DRAFTWING_ENABLE_OVERLAP": "1"}
    caplog.set_level(logging.DEBUG, "draftwing")
    found = read(
        {"config": str(file), "port": 3, "disable_overlap_schedule": True, "disable_mixed_chunk": True}, **environ
    )
    assert (found.port, found.log_interval, found.max_connections) == (3, 2, 1)
    assert (found.enable_overlap, found.enable_mixed_chunk, found.disable_mixed_chunk) == (False, False, True)
    assert found.resolve().api_key == "sk"
    assert f"--max-connections 1 is of {file}, line 3" in caplog.text
    assert "--log-interval 2.0 is of DRAFTWING_LOG_INTERVAL" in caplog.text and "sk" not in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "\nprot = 1", "a.toml, line 2: unknown option 'prot'; the nearest option is 'port'"),
        ("a.toml", "port = 1\nnum-ctx = 9", "a.toml, line 2: .*'num_ctx'; here it is 'context_length'"),
        ("a.toml", "temperature = 1", "a.toml, line 1: .*'temperature'.* field of each request"),
        ("a.toml", "port = '8080'", "a.toml, line 1: port must be an int; found '8080'"),
        ("a.toml", "disable_ui = 'yes'", "a.toml, line 1: disable_ui must be a bool; found 'yes'"),
        ("a.toml", "\n\nport = 99999", "a.toml, line 3: port must be at most 65535"),
        ("a.toml", "model = ['a', 'b']", "a.toml, line 1: model must be a str"),
        ("a.toml", "model = 'a'\nmodel_path = 'b'", "a.toml, line 2: --model is given twice, here and in .*line 1"),
        ("a.toml", "[server]\nport = 1", "a.toml.*server is a table"),
        ("a.toml", "port = x", "not valid TOML: .*line 1"),
        ("a.toml", "port = 1\nport = 2", "not valid TOML"),
        (
            "a.yaml", "port: 1\ndtype: auto\nport: 2",
            "a.yaml, line 3: port is given twice, here and in .*a.yaml, line 1$",
        ),
        ("a.yml", "{port: 1, 'port': null}", "a.yml, line 1: port is given twice"),
        ("a.yaml", "tp-size: 1\ntp_size: 2", "a.yaml, line 2: --tp-size is given twice, here and in .*line 1"),
        ("a.yaml", "server:\n  port: 1", "a.yaml, line 1: server is a table"),
        ("a.yaml", "port: [", "not valid YAML: .*line 1"),
        ("a.yaml", 'api_key: "1234567\n', "not valid YAML: line 2, column 1$"),
        ("a.yaml", "api_key: *1234567", "not valid YAML: line 1, column 10$"),
        ("a.yaml", "- port", "must have lines such as port: 8080; found a list"),
        ("a.yaml", "\napi-key: 1234567", "a.yaml, line 2: api_key must be a str; found another type"),
        ("a.json", "{}", "ends with .toml, .yaml or .yml"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as info:
        read({"config": str(tmp_path / name)})
    assert "1234567" not in str(info.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("none.toml", "a.toml", "."):
        with pytest.raises(ConfigError, match=r"cannot be read|ends with"):
            read({"config": str(tmp_path / name)})
    for command in ("serve", "chat", "bench", "write-prompts"):
        argv = ["--out", str(tmp_path / "out")] if command == "write-prompts" else []
        assert main([command, *argv, "--config", str(tmp_path / "none.toml")]) == 2
        assert "none.toml' cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("PORT", "eighty", "DRAFTWING_PORT: port must be an int; found 'eighty'"),
        ("PORT", " ", "DRAFTWING_PORT: port must be an int"),
        ("DISABLE_UI", "maybe", "DRAFTWING_DISABLE_UI: disable_ui must be true or false; found 'maybe'"),
        ("API_KEY", "", "DRAFTWING_API_KEY: api_key must not be empty"),
        ("API_KEY_FILE", "", "DRAFTWING_API_KEY_FILE: api_key_file must not be empty"),
        ("PROT", "", "DRAFTWING_PROT: unknown option 'prot'"),
        ("PROT", "80", "DRAFTWING_PROT: unknown option 'prot'; the nearest option is 'port'"),
        ("NUM_CTX", "80", "DRAFTWING_NUM_CTX: .*here it is 'context_length'"),
    ],
)
def test_what_is_wrong_in_the_environment(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**{f"DRAFTWING_{name}": text})


def test_an_empty_variable_is_as_none(tmp_path: Path) -> None:
    """Of every option but those that keep strangers out; what it would overrule counts."""
    names = {*names_of(Options), *FOREIGN} - {"api_key", "admin_api_key", "api_key_file"}
    assert read(**{f"DRAFTWING_{name.upper()}": "" for name in names}) == Options()
    file = tmp_path / "a.toml"
    file.write_text("port = 1\nenable-overlap = true")
    found = read(DRAFTWING_CONFIG=str(file), DRAFTWING_PORT="", DRAFTWING_DISABLE_OVERLAP_SCHEDULE="")
    assert (found.port, found.enable_overlap) == (1, True)
    assert read(DRAFTWING_MODEL="", DRAFTWING_MODEL_PATH="a").model == "a"


def test_variables_of_others(caplog: pytest.LogCaptureFixture) -> None:
    """Kubernetes makes variables for each service; what is read elsewhere is none of ours."""
    service = {
        "DRAFTWING_PORT": "tcp://10.0.0.7:30000", "DRAFTWING_SERVICE_HOST": "10.0.0.7", "DRAFTWING_SERVICE_PORT": "1",
        "DRAFTWING_SERVICE_PORT_HTTP": "30000", "DRAFTWING_PORT_30000_TCP": "tcp://10.0.0.7:30000",
        "DRAFTWING_PORT_30000_TCP_ADDR": "10.0.0.7", "DRAFTWING_METRICS_PORT": "tcp://10.0.0.8:9",
        "DRAFTWING_NATIVE": "1", "DRAFTWING_CPU_ISA": "plain",
    }  # fmt: skip
    assert read(**service, OTHER_PORT="5") == Options() and not caplog.records
    assert read(DRAFTWING_WHATEVER="x") == Options() and "DRAFTWING_WHATEVER is not read" in caplog.text


def test_the_command_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded, the first wrong one ends the command."""
    file = tmp_path / "a.yaml"
    file.write_text("model: /no/such/model\nport: 0")
    monkeypatch.setenv("DRAFTWING_DTYPE", "int3")
    assert main(["serve", "--config", str(file)]) == 2
    assert "DRAFTWING_DTYPE: dtype must be one of" in capsys.readouterr().err
    monkeypatch.delenv("DRAFTWING_DTYPE")
    assert main(["serve", "--config", str(file)]) == 2
    assert "'/no/such/model' does not exist" in capsys.readouterr().err


def test_an_empty_name_of_the_file_is_refused() -> None:
    """It may hold the key."""
    with pytest.raises(ConfigError, match="DRAFTWING_CONFIG: expected the name of a file"):
        with_sources({}, {"DRAFTWING_CONFIG": ""})
    assert with_sources({"config": None}, {}) == {}


@functools.cache
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(made)
    return made


def parse(*argv: str) -> Options:
    return Options.from_kwargs(**vars(parser().parse_args(dashed(argv))))


def test_what_is_not_given_stays_the_default() -> None:
    assert parse() == Options()


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
    for foreign in foreign_names.FOREIGN:
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
    "enable_expert_parallel": ("3", "explicit argument"), "disable_images": ("3", "explicit argument"),
    "context_length": ("1", "must be at least 2"),
    "mem_fraction_static": ("2", "must be at most 0.99"), "cuda_graph_max_bs": ("0", "must be at least 1"),
    "speculative_algorithm": ("", "must not be empty"), "speculative_draft_model_path": ("", "must not be empty"),
    "speculative_ngram_branch_length": ("257", "must be at most 256"),
    "lora_modules": ("", "must not be empty"), "max_loras": ("257", "must be at most 256"),
    "max_cpu_loras": ("0", "must be at least 1"),
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
            assert (said if value in words[-1] and words != [one] else "one argument") in found, found
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
        (["-m", "x.gguf"], ["--model", "x.gguf"]), (["-hf", "org/name:Q4_K_M"], ["--model", "org/name:Q4_K_M"]),
        (["-hf=org/name"], ["--model", "org/name"]), (["--hf-repo", "org/name"], ["--model", "org/name"]),
        (["-md", "x.gguf"], ["--speculative-draft-model-path", "x.gguf"]),
        (["-hfd", "org/name:Q8_0"], ["--speculative-draft-model-path", "org/name:Q8_0"]),
    ],
)  # fmt: skip
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
        ("a b", "several models.* 'a' and 'b'"), ("a --model b", "several models.* 'a' and 'b'"),
        ("--model a --model b", "several models.* 'a' and 'b'"),
        ("--model-path a -m b", "several models.* 'a' and 'b'"),
        ("-hf a/b --model c/d", "several models.* 'a/b' and 'c/d'"),
    ],
)  # fmt: skip
def test_a_server_has_one_model(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["serve", *words.split()]) == 2
    except SystemExit as error:  # argparse's
        assert error.code == 2
    assert re.search(said, capsys.readouterr().err.splitlines()[-1])


def test_of_options_given_again_the_last_one_counts() -> None:
    assert parse("--port", "1", "--port=2", "--disable-ui", "--disable-ui").port == 2
    assert parse("--model", "a", "--model-path", "a").model == "a"
