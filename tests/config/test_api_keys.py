"""Keys from the command line and from a file: what they may, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwing.config.api_keys import ApiKey, read_keys
from draftwing.config.options import Options
from draftwing.errors import ConfigError

FILE = """
[alice]
key = "sk-alice"
requests_per_minute = 60
tokens_per_minute = 1000
max_priority = -2

["the operator"]
key = "sk-operator"
admin = true
"""


def written(folder: Path, text: str) -> Options:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    return Options(api_key_file=str(path))


def test_keys_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = written(tmp_path, FILE)
    alice = ApiKey("alice", "sk-alice", False, 60, 1000, -2)
    assert read_keys(options) == (alice, ApiKey("the operator", "sk-operator", True, max_priority=0))
    (tmp_path / "keys.toml").write_text(FILE, "utf-8-sig")
    assert read_keys(options)[0] == alice
    assert not caplog.text and "sk-alice" not in repr(alice)
    (tmp_path / "keys.toml").chmod(0o644)
    read_keys(options)
    assert "chmod 600" in caplog.text


def test_one_key_may_everything_unless_there_is_one_for_operators() -> None:
    assert read_keys(Options()) == ()
    assert read_keys(Options(api_key="a")) == (ApiKey("api_key", "a", True),)
    both = (ApiKey("api_key", "a"), ApiKey("admin_api_key", "b", True))
    assert read_keys(Options(api_key="a", admin_api_key="b")) == both


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a", "not valid TOML"), ("", "has no key"), ("a = 1", "must be a table"), ("[a]", "visible ASCII"),
        ('[a]\nkey = "sk secret"', "visible ASCII"), ('[a]\nkey = "sk-é"', "visible ASCII"),
        ('[a]\nkey = ["secret"]', "key must be a text"),
        ('[a]\nkey = "b"\nlimit = 1', "unknown setting 'limit'; expected key, admin, requests_per_minute, tokens_"),
        ('[a]\nkey = "b"\nmax_priority = 1.5', "max_priority must be a whole number; found 1.5"),
        ('[a]\nkey = "b"\nadmin = 1', "admin must be true or false; found 1"),
        ('[a]\nkey = "b"\ntokens_per_minute = 0', "a whole number of at least 1; found 0"),
        ('[a]\nkey = "b"\n[c]\nkey = "b"', "the keys of 'a' and 'c' are the same"),
    ],
)  # fmt: skip
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_keys(written(tmp_path, text))
    assert message in str(error.value) and "secret" not in str(error.value)


def test_what_excludes_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        read_keys(Options(api_key="a", api_key_file="b"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_keys(Options(api_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="are the same"):
        read_keys(Options(api_key="a", admin_api_key="a"))
