"""Options of other servers are answered with ours."""

from __future__ import annotations

import pytest

from draftwing.cli.main import main
from draftwing.config import sglang_compat
from draftwing.config.fields import names_of
from draftwing.config.foreign_names import OURS, WITHOUT_COUNTERPART
from draftwing.config.options import Options
from draftwing.errors import ConfigError


def test_what_is_named_is_an_option_and_what_is_known_is_none() -> None:
    known = names_of(Options)
    assert set(OURS.values()) <= known.keys()
    assert not {*OURS, *WITHOUT_COUNTERPART} & {*known, *sglang_compat.FOREIGN}
    assert not OURS.keys() & WITHOUT_COUNTERPART.keys()


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--max-model-len", "--context-length"), ("--max_model_len=4096", "--context-length"),
        ("--gpu-memory-utilization", "--mem-fraction-static"), ("--max-num-seqs", "--max-running-requests"),
        ("--ctx-size", "--context-length"), ("--n-gpu-layers", "--device"), ("--enable-lora", "LoRA"),
        ("--speculative-config", "--speculative-algorithm"), ("--mmproj", "images are not supported"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["serve", "chat", "bench"])
def test_the_command_line_names_ours(command: str, option: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main([command, option, "1"])
    assert info.value.code == 2 and ours in capsys.readouterr().err.splitlines()[-1]


def test_keywords_are_answered_alike() -> None:
    with pytest.raises(ConfigError, match="'mem_fraction_static'"):
        Options.from_kwargs(gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="LoRA"):
        Options.from_kwargs(enable_lora=True)


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [("half", "float16"), ("fp16", "float16"), ("bf16", "bfloat16"), ("float", "float32"), ("bfloat16", "bfloat16")],
)
def test_spellings_of_a_dtype(spelling: str, dtype: str) -> None:
    assert Options.from_kwargs(dtype=spelling).resolve().dtype == dtype
