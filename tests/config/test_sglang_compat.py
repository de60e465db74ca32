"""Commands of SGLang's users: what has no effect is said, what cannot be done is refused."""

from __future__ import annotations

import logging

import pytest

from draftwing.cli.main import _parser
from draftwing.config.arguments import dashed
from draftwing.config.options import Options
from draftwing.config.sglang_compat import FOREIGN, REFUSED
from draftwing.config.sources import with_sources
from draftwing.core import TreeShape
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.devices.cuda import defaults_for
from draftwing.errors import ConfigError

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


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_every_unsupported_flag_parses_and_is_handled(name: str, caplog: pytest.LogCaptureFixture) -> None:
    foreign = FOREIGN[name]
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
