"""What benchmarks/replicas.py computes of what it reads; no server is started."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def replicas() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        return importlib.import_module("replicas")


def test_counts(replicas: ModuleType) -> None:
    text = """# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 120.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 7.0
"""
    assert replicas.counts_of(text) == (120, 30)


def test_what_came_since(replicas: ModuleType) -> None:
    before, after = (
        [replicas.Counts(100, 10), replicas.Counts(0, 0)],
        [replicas.Counts(130, 30), replicas.Counts(90, 60)],
    )
    assert replicas.since(before, after) == ((120, 80), 0.75)
    assert replicas.since(before, before) == ((0, 0), 0.0)


def test_each_group_shares_a_long_beginning(replicas: ModuleType) -> None:
    every = replicas.prompts(3, 4, 100, random.Random(0))
    assert len(every) == 3 + 3 * 4
    systems = [messages[0]["content"] for messages in every]
    assert len(set(systems[:3])) == 3 and set(systems[3:]) == set(systems[:3])
    assert all(systems[3:].count(one) == 4 for one in systems[:3])
    assert len({str(messages) for messages in every}) == len(every)
    assert every == replicas.prompts(3, 4, 100, random.Random(0))


def test_table(replicas: ModuleType) -> None:
    row = {
        "run": "one",
        "replicas": 1,
        "requests": 8,
        "failed": 0,
        "tokens_per_s": 10.0,
        "hit_rate": 0.8,
        "busiest": 1.0,
    }
    lines = list(
        replicas.table(
            [
                {**row, "tokens_per_s": 7.0},
                row,  # of the second round
                {**row, "run": "balanced", "replicas": 2, "tokens_per_s": 19.0, "hit_rate": 0.76, "busiest": 0.6},
            ]
        )
    )
    assert lines[-1] == "| balanced | 2 | 8 | 0 | 19.0 | 1.90 | 0.760 | 95.0% | 60% |"
