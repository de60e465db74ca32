"""Options: names, ranges, and what they tell of themselves."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from draftwing.config.drafters import NAMES
from draftwing.config.options import Options
from draftwing.config.trees import TreeShape
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.devices.cuda import defaults_for
from draftwing.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            {"speculative_algorithm": "magic"},
            f"must be one of {', '.join(NAMES)}, several as in EAGLE3+NGRAM, or module:Class of a "
            "drafter of your own; found 'magic'",
        ),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1}, "at least 2; found 1"),
        ({"port": 65536}, "port must be at most 65535; found 65536"),
        ({"port": "30000"}, "port must be an int"),
        ({"port": True}, "port must be an int"),
        ({"dtype": "int8"}, "auto, float32, bfloat16, float16; found 'int8'"),
        ({"device": "tpu"}, "auto, cpu, cuda"),
        ({"mem_fraction_static": 1.5}, "at most 0.99"),
        ({"mem_fraction_static": float("nan")}, "finite"),
        ({"request_timeout": 0}, "at least 0.001"),
        ({"model": ""}, "must not be empty"),
        ({"disable_radix_cache": 1}, "must be a bool"),
        ({"log_level": "loud"}, "log_level"),
        ({"context_length": 1}, "at least 2"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_rule(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError) as info:
        Options(**fields).resolve()
    assert rule in str(info.value)


@pytest.mark.parametrize(
    ("enable", "disable"),
    [("enable_overlap", "disable_overlap_schedule"), ("enable_mixed_chunk", "disable_mixed_chunk")],
)
def test_overlap_and_mixed_steps_are_the_default_on_cuda_only(enable: str, disable: str) -> None:
    def is_on(device: str, **fields: Any) -> bool:
        defaults = defaults_for(0) if device == "cuda" else CpuDevice().defaults
        fields.setdefault("speculative_algorithm", "none")
        return getattr(Options(**fields).resolve().for_engine(defaults), enable)  # type: ignore[arg-type, no-any-return]

    assert is_on("cuda") and not is_on("cpu")
    assert is_on("cpu", **{enable: True})
    assert not is_on("cuda", **{disable: True})
    assert is_on("cuda", speculative_algorithm="NGRAM")
    assert is_on("cuda", disable_cuda_graph=True) == (enable == "enable_overlap")


def test_keyword_options() -> None:
    assert Options.from_kwargs(model_path="a", mem_fraction=0.5) == Options(model="a", mem_fraction_static=0.5)
    with pytest.raises(ConfigError, match="'speculative_algoritm'; the nearest option is 'speculative_algorithm'"):
        Options.from_kwargs(speculative_algoritm="NGRAM")
    with pytest.raises(ConfigError, match="given twice"):
        Options.from_kwargs(model="a", model_path="b")


CPU_DEFAULTS = CpuDevice().defaults

NGRAM = {"speculative_algorithm": "ngram"}
STANDALONE: dict[str, Any] = {"speculative_algorithm": "standalone", "speculative_draft_model_path": "x"}


@pytest.fixture(autouse=True)
def no_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if no heads came with the package: those are test_bundled.py's matter."""
    monkeypatch.setattr("draftwing.config.drafters.HEADS", tmp_path)


@pytest.mark.parametrize(
    ("drafter", "given", "shape"),
    [
        (NGRAM, {}, (11, 10, 12)),
        (NGRAM, {"eagle_topk": 1}, (11, 1, 12)),
        (NGRAM, {"eagle_topk": 1, "num_steps": 4}, (4, 1, 5)),
        (NGRAM, {"num_steps": 4, "eagle_topk": 2, "num_draft_tokens": 7}, (4, 2, 7)),
        (NGRAM, {"eagle_topk": 1, "num_steps": 3, "num_draft_tokens": 9}, (3, 1, 4)),
        (NGRAM, {"num_draft_tokens": 2}, (1, 10, 2)),
        (STANDALONE, {}, (3, 1, 4)),
        (STANDALONE, {"num_steps": 5}, (5, 1, 6)),
        (STANDALONE, {"num_steps": 4, "eagle_topk": 2, "num_draft_tokens": 7}, (4, 2, 7)),
        (STANDALONE, {"num_steps": 4, "eagle_topk": 1, "num_draft_tokens": 9}, (4, 1, 5)),
        (STANDALONE, {"num_steps": 2, "eagle_topk": 4, "num_draft_tokens": 21}, (2, 4, 21)),
        (STANDALONE, {"eagle_topk": 2, "num_draft_tokens": 3}, (2, 2, 3)),  # fewer steps where fewer tokens are given
    ],
)
def test_shapes(
    drafter: dict[str, Any], given: dict[str, int], shape: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {f"speculative_{name}": value for name, value in given.items()}
    with caplog.at_level(logging.WARNING):
        options = Options(**drafter, **fields).resolve()
    assert options.speculative_algorithm == drafter["speculative_algorithm"].upper()
    assert options.speculative_shape.tree == shape and options.resolve() == options
    assert ("is a chain" in caplog.text) == (given.get("num_draft_tokens", shape[2]) != shape[2])


def test_without_files_nothing_is_decided_for_a_model_that_is_no_alias() -> None:
    """Numbers of a tree wait until it is known who drafts."""
    options = Options(model="org/name", speculative_num_steps=2).resolve()
    assert options.speculative_algorithm is None and not options.drafts and options.resolve() == options
    chosen = dataclasses.replace(options, speculative_algorithm="NEXTN").resolve()
    assert chosen.for_engine(CPU_DEFAULTS).speculative_shape == TreeShape(2, 1, 3)


@pytest.mark.parametrize("name", ["EAGLE", "eagle3", "NextN"])
def test_heads_get_their_default_tree_from_the_targets_architecture(name: str) -> None:
    options = Options(speculative_algorithm=name, speculative_draft_model_path="x").resolve()
    assert options.speculative_algorithm == name.upper()
    assert options.for_engine(CPU_DEFAULTS, "LlamaForCausalLM").speculative_shape == TreeShape(5, 4, 16)
    assert options.for_engine(CPU_DEFAULTS, "Qwen2ForCausalLM").speculative_shape == TreeShape(3, 1, 4)
    assert not options.for_engine(CPU_DEFAULTS, "Qwen2ForCausalLM").speculative_fixed_shape
    carried = TreeShape(4, 2, 10)
    assert options.for_engine(CPU_DEFAULTS, "LlamaForCausalLM", carried).speculative_shape == carried


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ({"num_steps": 2}, (2, 2, 7)),  # no more than there are
        ({"num_steps": 7}, (7, 2, 10)),
        ({"eagle_topk": 1}, (4, 1, 5)),
        ({"num_draft_tokens": 6}, (4, 2, 6)),
        ({"num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 4}, (2, 2, 4)),
    ],
)
def test_what_is_given_wins_over_the_tree_that_a_head_asks_for(given: dict[str, int], shape: tuple[int, ...]) -> None:
    fields: dict[str, Any] = {f"speculative_{name}": value for name, value in given.items()}
    options = Options(speculative_algorithm="EAGLE", **fields).resolve()
    filled = options.for_engine(CPU_DEFAULTS, "LlamaForCausalLM", TreeShape(4, 2, 10))
    assert filled.speculative_shape.tree == tuple(shape)[:3] and not filled.speculative_fixed_shape
    pinned = Options(speculative_algorithm="EAGLE", speculative_fixed_shape=True, **fields).resolve()
    assert pinned.for_engine(CPU_DEFAULTS, "LlamaForCausalLM", TreeShape(4, 2, 10)).speculative_fixed_shape


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            STANDALONE | {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 3},
            "4 to 11 for 3 steps and topk 2; found 3",
        ),
        (
            STANDALONE | {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 12},
            "(steps - 1) * topk^2",
        ),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 12}, "speculative_num_draft_tokens - 1"),
        (
            {
                "speculative_algorithm": "NGRAM",
                "speculative_ngram_min_match_window_size": 5,
                "speculative_ngram_max_match_window_size": 4,
            },
            "min_match_window_size must be at most speculative_ngram_max_match_window_size; found 5 and 4",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_ngram_min_bfs_breadth": 11},
            "min_bfs_breadth must be at most speculative_ngram_max_bfs_breadth; found 11 and 10",
        ),
        ({"enable_overlap": True, "disable_overlap_schedule": True}, "exclude each other"),
        ({"enable_mixed_chunk": True, "disable_mixed_chunk": True}, "exclude each other"),
        ({"chunked_prefill_size": 0}, "at least 1, or -1"),
        (
            {"reasoning_parser": "qwen3", "tool_call_parser": "gpt-oss"},
            "in one format; found reasoning_parser = 'qwen3'",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_rule(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError) as info:
        Options(**fields).resolve()
    assert rule in str(info.value)


def test_options_without_effect_are_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options = Options(speculative_num_steps=3, max_total_tokens=100, mem_fraction_static=0.5).resolve()
    assert (
        "--speculative-num-steps has no effect" in caplog.text and "--mem-fraction-static has no effect" in caplog.text
    )
    assert options.speculative_num_steps is None and options.mem_fraction_static is None


def test_sizes_by_the_device(caplog: pytest.LogCaptureFixture) -> None:
    def sizes(options: Options) -> tuple[int | None, int | None, int | None]:
        return options.max_running_requests, options.chunked_prefill_size, options.cuda_graph_max_bs

    options = Options().resolve()
    assert sizes(options) == (None, None, None)
    assert sizes(options.for_engine(CPU_DEFAULTS)) == (64, 512, None)
    assert sizes(options.for_engine(defaults_for(141 * 10**9))) == (256, 8192, 128)
    assert sizes(options.for_engine(defaults_for(24 * 10**9))) == (128, 4096, 64)
    assert sizes(options.for_engine(defaults_for(8 * 10**9))) == (64, 2048, 32)
    given = Options(max_running_requests=16, chunked_prefill_size=-1, cuda_graph_max_bs=20).resolve()
    assert sizes(given.for_engine(defaults_for(10**12))) == (16, -1, 16), "no graph is larger than the largest batch"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        on_cpu = given.for_engine(CPU_DEFAULTS)
        assert sizes(on_cpu) == (16, -1, None) and on_cpu.for_engine(CPU_DEFAULTS) == on_cpu == on_cpu.resolve()
    assert [r.getMessage() for r in caplog.records] == ["without CUDA, --cuda-graph-max-bs has no effect"]
    on_cuda = given.for_engine(defaults_for(10**12))
    assert on_cuda.for_engine(defaults_for(10**12)) == on_cuda == on_cuda.resolve()
    assert options.deterministic and Options(enable_deterministic_inference=True).deterministic
    assert not Options(fast_numerics=True).deterministic and not Options(enable_torch_compile=True).deterministic
