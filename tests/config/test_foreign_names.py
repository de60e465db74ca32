"""Options of other servers are answered with ours."""

from __future__ import annotations

import pytest

from draftwing.cli.main import main
from draftwing.config import sglang_compat
from draftwing.config.fields import names_of
from draftwing.config.foreign_names import OF_REQUESTS, OURS, SHORT, WITHOUT_COUNTERPART, of_others
from draftwing.config.options import Options
from draftwing.errors import ConfigError


def test_what_is_named_is_an_option_and_what_is_known_is_none() -> None:
    known = names_of(Options)
    assert set(OURS.values()) <= known.keys()
    tables = (OURS, OF_REQUESTS, WITHOUT_COUNTERPART)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)) and not {*names} & {*known, *sglang_compat.FOREIGN}
    assert set(SHORT.values()) <= {*names, *known, *sglang_compat.FOREIGN}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--num_ctx=4096", "--context-length"),
        ("--gpu-memory-utilization", "--mem-fraction-static"), ("--max-num-seqs", "--max-running-requests"),
        ("--ctx-size", "--context-length"), ("--n-gpu-layers", "--device"), ("--enable-lora", "LoRA"),
        ("--speculative-config", "--speculative-algorithm"), ("--mmproj", "images are not supported"),
        ("--api-prefix", "--root-path"), ("-hff", "org/name:FILE.gguf"), ("-ngl", "--device"),
        ("-c", "--context-length"), ("-t", "--num-threads"),
        ("--num-ctx", "--context-length"), ("-tp", "--tp-size"),
        ("--reasoning-format", "--reasoning-parser"), ("--repeat-penalty", "repetition_penalty"), ("-dp", "--dp-size"),
    ],
)  # fmt: skip
def test_the_command_line_names_ours(option: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["serve", option, "1"])
    assert info.value.code == 2 and ours in capsys.readouterr().err.splitlines()[-1]


def test_keywords_are_answered_alike() -> None:
    with pytest.raises(ConfigError, match="'mem_fraction_static'"):
        Options.from_kwargs(gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="LoRA"):
        Options.from_kwargs(enable_lora=True)
    with pytest.raises(ConfigError, match="field of each request"):
        Options.from_kwargs(n_predict=3)


def test_a_name_of_the_same_thing_is_read() -> None:
    assert Options.from_kwargs(max_model_len=4096) == Options.from_kwargs(context_length=4096)
    with pytest.raises(ConfigError, match="given twice"):
        Options.from_kwargs(max_model_len=4096, context_length=4096)
    with pytest.raises(ConfigError, match=r"^max_model_len must be an int"):
        Options.from_kwargs(max_model_len="8k").resolve()


@pytest.mark.parametrize("option", ["-n", "--n-predict", "--num-predict"])
def test_fields_of_requests_are_options_where_a_command_asks(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, ours in (("serve", "'max_tokens'"), ("chat", "--max-tokens")):
        with pytest.raises(SystemExit):
            main([command, option, "1"])
        assert ours in capsys.readouterr().err.splitlines()[-1]


def test_what_has_no_effect_is_not_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--speculative-adaptive-confi", "x"])
    assert "nearest" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    ["--root-dir", "--log-file", "--cache-dir", "--lora-path", "--ui-path", "--max-requests", "--host-name",
     "--disable-log", "--num-layers", "--enable-cache", "--draft-model-quantization", "--learn-rate"],
)  # fmt: skip
def test_another_word_is_no_slip(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", option, "1"])
    assert "draftwing serve --help-all lists" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("modle", "model"), ("prot", "port"), ("hots", "host"), ("maxrunningrequests", "max_running_requests"),
        ("log_levle", "log_level"), ("max_runing_requests", "max_running_requests"),
        ("contextlength", "context_length"),
        ("served_model_names", "served_model_name"), ("speculative_algoritm", "speculative_algorithm"),
    ],
)  # fmt: skip
def test_a_slip_is_answered_by_what_was_meant(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{typed}'; the nearest option is '{meant}'$"):
        Options.from_kwargs(**{typed: "x"})


def test_variables_of_other_servers() -> None:
    environ = {"OLLAMA_HOST": "x", "OLLAMA_NUM_PARALLEL": "4", "LLAMA_ARG_CTX_SIZE": "9", "OLLAMA_NOPRUNE": "1"}
    found = of_others(environ | {"HOST": "y"}, names_of(Options))
    assert found == {
        "OLLAMA_HOST": "host", "OLLAMA_NUM_PARALLEL": "max_running_requests", "LLAMA_ARG_CTX_SIZE": "context_length"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [("half", "float16"), ("fp16", "float16"), ("bf16", "bfloat16"), ("float", "float32"), ("bfloat16", "bfloat16")],
)
def test_spellings_of_a_dtype(spelling: str, dtype: str) -> None:
    assert Options.from_kwargs(dtype=spelling).resolve().dtype == dtype
