"""The models of one server: a file's list, and a folder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from draftwing.config.model_list import in_folder, read_models, seconds
from draftwing.config.sources import model_tables, with_sources
from draftwing.errors import ConfigError

TOML = """
port = 1234
max_total_tokens = 100
[[models]]
model = "qwen3-0.6b"
aliases = ["default"]
[[models]]
name = "small"
model = "smollm2"
max-total-tokens = 7
keep_alive = 300
lora_modules = ["poet=/there"]
"""
YAML = """
port: 1234
max_total_tokens: 100
models:
  - {model: qwen3-0.6b, aliases: [default]}
  - {name: small, model: smollm2, max-total-tokens: 7, keep_alive: 300, lora_modules: [poet=/there]}
"""


@pytest.mark.parametrize(("ending", "text"), [("toml", TOML), ("yaml", YAML)])
def test_a_list_in_the_file(tmp_path: Path, ending: str, text: str) -> None:
    file = tmp_path / f"models.{ending}"
    file.write_text(text)
    given = {"config": str(file), "keep_alive": "1h"}
    arguments = with_sources(given, {})
    assert arguments == {"port": 1234, "max_total_tokens": 100, "keep_alive": "1h"}
    big, small = read_models(arguments, model_tables(given, {}))
    assert big.names == ("qwen3-0.6b", "default") and big.keep_alive == 3600
    assert big.arguments["max_total_tokens"] == 100 and big.model == "qwen3-0.6b"
    assert small.asked == ("small", "poet") and small.keep_alive == 300
    assert small.arguments["max_total_tokens"] == 7 and small.arguments["served_model_name"] == ("small",)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"name": "x"}, "has no model"), ({"model": "m", "port": 1}, "--port is of the whole server"),
        ({"model": "m", "modle": 1}, "unknown option 'modle'"), ({"model": "m", "aliases": "x"}, "aliases a list"),
        ({"model": "m", "max_total_tokens": "x"}, "max_total_tokens must be an int"), ("m", "must be a table"),
    ],
)  # fmt: skip
def test_a_list_that_is_wrong(tmp_path: Path, table: object, says: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models: [{table}]")
    with pytest.raises(ConfigError, match=rf"models\[0\].*{says}"):
        model_tables({"config": str(file)}, {})


def test_names_are_of_one_model() -> None:
    with pytest.raises(ConfigError, match="two models have the name 'b'"):
        read_models({}, [{"model": "a", "aliases": ["b"]}, {"model": "c", "name": "b"}])
    one, two = read_models({"model": "a"}, [{"model": "b"}])
    assert (one.name, two.name) == ("a", "b")


def test_a_folder(tmp_path: Path) -> None:
    for name in ("one.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-one.gguf", "notes.txt"):
        (tmp_path / name).touch()
    files = ("hf/config.json", "hf/mmproj.gguf", "repo/it.Q4.gguf", "repo/mmproj-it.gguf", "two/x.gguf", "two/y.gguf")
    files += ("repo/mtp-it.gguf", "repo/it-DFlash2-Q8_0.gguf")
    for name in (*files, ".hidden/config.json", "empty/readme"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = {model.name: Path(model.model).relative_to(tmp_path).as_posix() for model in in_folder({}, tmp_path, [])}
    assert found == {
        "one": "one.gguf", "big": "big-00001-of-00002.gguf", "hf": "hf", "repo": "repo/it.Q4.gguf",
        "two/x": "two/x.gguf", "two/y": "two/y.gguf",
    }  # fmt: skip
    named = read_models({}, [{"name": "mine", "model": str(tmp_path / "hf")}, {"name": "one", "model": "smollm2"}])
    assert {model.name for model in in_folder({}, tmp_path, named)} == {"big", "repo", "two/x", "two/y"}
    with pytest.raises(ConfigError, match="models_dir"):
        in_folder({}, tmp_path / "nowhere", [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0), ("0", 0), (5, 5), (1.5, 1.5), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("1.5h", 5400),
        (-1, math.inf), ("-1m", math.inf),
    ],
)  # fmt: skip
def test_times(value: object, expected: float) -> None:
    assert seconds(value) == expected


@pytest.mark.parametrize("value", ["", "x", "5 m", "m", True, [], "1h-3m", "٣"])
def test_what_is_no_time(value: object) -> None:
    with pytest.raises(ConfigError, match="keep_alive must be seconds"):
        seconds(value)
