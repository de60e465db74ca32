"""Options of other servers are answered with ours."""

from __future__ import annotations

import logging

import pytest

from draftwing.cli.main import _parser, main
from draftwing.config import foreign_names
from draftwing.config.fields import names_of
from draftwing.config.foreign_names import (
    FOREIGN,
    OF_REQUESTS,
    OURS,
    REFUSED,
    SHORT,
    WITHOUT_COUNTERPART,
    instead,
    of_others,
)
from draftwing.config.options import Options
from draftwing.config.sources import dashed, with_sources
from draftwing.config.trees import TreeShape
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.devices.cuda import defaults_for
from draftwing.errors import ConfigError


def test_what_is_named_is_an_option_and_what_is_known_is_none() -> None:
    known = names_of(Options)
    assert set(OURS.values()) <= known.keys()
    tables = (OURS, OF_REQUESTS, WITHOUT_COUNTERPART)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)) and not {*names} & {*known, *foreign_names.FOREIGN}
    assert set(SHORT.values()) <= {*names, *known, *foreign_names.FOREIGN}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--num_ctx=4096", "--context-length"), ("--gpu-memory-utilization", "--mem-fraction-static"),
        ("--lora-scaled", "--lora-modules"), ("-hff", "org/name:FILE.gguf"), ("-c", "--context-length"),
        ("-tp", "--tp-size"),
        ("--repeat-penalty", "repetition_penalty"), ("-dp", "--dp-size"),
    ],
)  # fmt: skip
def test_the_command_line_names_ours(option: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["serve", option, "1"])
    assert info.value.code == 2 and ours in capsys.readouterr().err.splitlines()[-1]


def test_keywords_are_answered_alike() -> None:
    with pytest.raises(ConfigError, match="'mem_fraction_static'"):
        Options.from_kwargs(gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="--lora-modules"):
        Options.from_kwargs(lora="x.gguf")
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
    ["root_dir", "log_file", "cache_dir", "ui_path", "max_requests", "host_name",
     "disable_log", "num_layers", "enable_cache", "draft_model_quantization", "learn_rate"],
)  # fmt: skip
def test_another_word_is_no_slip(option: str) -> None:
    assert instead(option, names_of(Options)) == ""


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


# The commands of SGLang's page on speculative decoding, after the model's name.
STANDALONE = """--speculative-algorithm STANDALONE --speculative-draft-model-path Qwen/Qwen2.5-1.5B-Instruct
    --speculative-num-steps 4 --speculative-eagle-topk 2 --speculative-num-draft-tokens 7
    --cuda-graph-max-bs 8 --mem-fraction-static 0.7 --log-level warning"""
SPEC_V2 = STANDALONE.replace("topk 2", "topk 1").replace("tokens 7", "tokens 5")
NGRAM = """--speculative-algorithm NGRAM --speculative-num-draft-tokens 16
    --speculative-ngram-max-match-window-size 12 --speculative-ngram-max-bfs-breadth 10
    --cuda-graph-max-bs 8 --mem-fraction-static 0.8 --log-level warning"""
COMPILED = "--mem-fraction 0.6 --enable-torch-compile --torch-compile-max-bs 2 --log-level warning"


def options(command: str, **environ: str) -> Options:
    arguments = vars(
        _parser()[0].parse_args(dashed(["serve", "--model", "Qwen/Qwen2.5-7B-Instruct", *command.split()]))
    )
    del arguments["command"]
    return Options.from_kwargs(**with_sources(arguments, environ)).resolve()


def test_the_commands_of_the_page(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tree = options(STANDALONE)
    assert (tree.speculative_shape, tree.mem_fraction_static) == (TreeShape(4, 2, 7), 0.7)
    assert tree.speculative_draft_model_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert tree.cuda_graph_max_bs == 8 and not caplog.records
    assert options(NGRAM).speculative_shape == TreeShape(15, 10, 16)
    compiled = options(COMPILED)
    assert compiled.mem_fraction_static == 0.6
    assert compiled.enable_torch_compile and compiled.torch_compile_max_bs == 2
    assert options(NGRAM.replace("max-bs 8", "max-bs-decode 4")).cuda_graph_max_bs == 4
    assert not caplog.records


def test_environment(caplog: pytest.LogCaptureFixture) -> None:
    chain = options(SPEC_V2, SGLANG_ENABLE_SPEC_V2="True")
    assert (
        chain.enable_overlap
        and chain.for_engine(CpuDevice().defaults).enable_overlap
        and chain.speculative_shape == TreeShape(4, 1, 5)
    )
    assert not options(SPEC_V2, SGLANG_ENABLE_SPEC_V2="False").enable_overlap
    off = options(SPEC_V2 + " --disable-overlap-schedule", SGLANG_ENABLE_SPEC_V2="1")
    assert not off.for_engine(defaults_for(0)).enable_overlap
    with caplog.at_level(logging.WARNING):
        options(NGRAM, SGLANG_NGRAM_FORCE_GREEDY_VERIFY="True")
    assert "SGLANG_NGRAM_FORCE_GREEDY_VERIFY has no effect" in caplog.text


def test_every_unsupported_flag_parses_and_is_handled(caplog: pytest.LogCaptureFixture) -> None:
    for name, foreign in FOREIGN.items():
        value = {bool: "", int: "7", float: "0.5", str: "x"}[foreign.kind]
        flag = "--" + name.replace("_", "-")
        if name in REFUSED:
            with pytest.raises(ConfigError, match=f"{flag} is not supported: ..."):
                options(f"{flag} {value}")
        else:
            with caplog.at_level(logging.WARNING):
                assert not hasattr(options(f"{flag} {value}"), name)
            assert f"{flag} has no effect: " in caplog.text
        assert all(options(f"{flag} {neutral}") for neutral in foreign.neutral)
        assert Options.from_kwargs(**{name: None}) == Options()


def test_what_asks_for_one_device_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options("--tp 1 --dp-size 1 --page-size 1 --quantization none")
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"--dp-size is not supported: .* one replica"):
        options("--dp_size 2")
