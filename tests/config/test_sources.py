"""Options of a file and of the environment."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from draftwing.cli.main import main
from draftwing.config.fields import kinds, names_of
from draftwing.config.options import Options
from draftwing.config.sglang_compat import FOREIGN
from draftwing.config.sources import with_sources
from draftwing.errors import ConfigError

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
    file.write_text(text)
    meant = MEANT if text else Options()
    assert read({"config": str(file)}) == read(DRAFTWING_CONFIG=str(file)) == meant
    meant.resolve()


def test_every_option_has_a_variable() -> None:
    examples: dict[type[Any], tuple[str, Any]] = {
        bool: ("yes", True), int: ("7", 7), float: ("0.5", 0.5), str: ("auto", "auto"), type: ("auto", "auto"),
    }  # fmt: skip
    for spec in dataclasses.fields(Options):
        kind = kinds(Options)[spec.name]
        text, value = examples[kind.singles[0]]
        if spec.metadata["choices"]:
            text = value = spec.metadata["choices"][0]
        elif spec.metadata["min"] is not None:
            value = kind.singles[0](
                max(spec.metadata["min"], 0.5) if kind.singles == (float,) else spec.metadata["min"]
            )
            text = str(value)
        for name in (spec.name, *spec.metadata["aliases"]):
            found = read(**{f"DRAFTWING_{name.upper()}": text})
            assert getattr(found, spec.name) == ((value,) if kind.many else value), name


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
        ("a.toml", "enable_lora = true", "a.toml, line 1: .*'enable_lora'; adapters"),
        ("a.toml", "port = '8080'", "a.toml, line 1: port must be an int; found '8080'"),
        ("a.toml", "port = 80.5", "a.toml, line 1: port must be an int; found 80.5"),
        ("a.toml", "disable_ui = 'yes'", "a.toml, line 1: disable_ui must be a bool; found 'yes'"),
        ("a.toml", "disable_ui = 1", "a.toml, line 1: disable_ui must be a bool"),
        ("a.toml", "\n\nport = 99999", "a.toml, line 3: port must be at most 65535"),
        ("a.toml", "dtype = 'int3'", "a.toml, line 1: dtype must be one of"),
        ("a.toml", "model = ''", "a.toml, line 1: model must not be empty"),
        ("a.toml", "model = ['a', 'b']", "a.toml, line 1: model must be a str"),
        ("a.toml", "model = 'a'\nmodel_path = 'b'", "a.toml, line 2: --model is given twice, here and in .*line 1"),
        ("a.toml", "[server]\nport = 1", "a.toml.*server is a table"),
        ("a.toml", "port = x", "not valid TOML: .*line 1"),
        ("a.toml", "port = 1\nport = 2", "not valid TOML"),
        (
            "a.yaml",
            "port: 1\ndtype: auto\nport: 2",
            "a.yaml, line 3: port is given twice, here and in .*a.yaml, line 1$",
        ),
        ("a.yaml", "port: 1\nport: 1", "a.yaml, line 2: port is given twice"),
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
)
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
        ("PORT", "70000", "DRAFTWING_PORT: port must be at most 65535"),
        ("DISABLE_UI", "maybe", "DRAFTWING_DISABLE_UI: disable_ui must be true or false; found 'maybe'"),
        ("API_KEY", "", "DRAFTWING_API_KEY: api_key must not be empty"),
        ("ADMIN_API_KEY", "", "DRAFTWING_ADMIN_API_KEY: admin_api_key must not be empty"),
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
