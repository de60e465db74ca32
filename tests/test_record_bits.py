"""Records of bits: what differs between two is named, and equal ones pass."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script

TOOL = Path(__file__).parents[1] / "tools" / "record_bits.py"
RECORD: dict[str, Any] = {
    "llama | none": {"greedy": [{"tokens": [3, 5, 8], "output_token_logprobs": ["3:-0x1.8p+1", "5:-0x1.0p+0"]}]},
    "llama | NGRAM": {"greedy": [{"tokens": [3, 5, 8], "drafts": {"spec_verify_ct": 2}}]},
    "refused": {"error": "ConfigError: no"},
}


@pytest.fixture(scope="module")
def tool() -> Any:
    return script(TOOL)


def test_what_makes_checkpoints_finds_its_helpers() -> None:
    """They are imported where they are needed, so nothing else says that one has moved."""
    source = TOOL.with_name("bit_models.py").read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = sorted({name.partition(".")[0] for name in names})
    code = f"import importlib.util, bit_models; print([n for n in {tops} if importlib.util.find_spec(n) is None])"
    done = subprocess.run([sys.executable, "-c", code], cwd=TOOL.parent, capture_output=True, text=True)
    assert len(tops) > 10 and done.stdout == "[]\n", done.stdout + done.stderr


def test_equal_records_pass(tool: Any) -> None:
    assert tool.compare(RECORD, copy.deepcopy(RECORD)) == []


def test_what_differs_is_named(tool: Any) -> None:
    other = copy.deepcopy(RECORD)
    other["llama | none"]["greedy"][0] = {"tokens": [3, 5, 9], "output_token_logprobs": ["3:-0x1.8p+1", "5:-0x1.1p+0"]}
    other["llama | NGRAM"]["greedy"][0]["tokens"].append(1)
    other["refused"] = {"greedy": []}
    other["new"] = other.pop("llama | NGRAM")
    assert tool.compare(RECORD, other) == [
        "llama | NGRAM: only in the first",
        "new: only in the second",
        "llama | none: greedy[0].tokens[2]: 8, then 9, and 1 more",
        "refused: error: 'ConfigError: no', then None, and 1 more",
    ]


def test_lists_of_other_lengths_differ(tool: Any) -> None:
    assert [*tool.differences({"tokens": [1]}, {"tokens": [1, 2]})] == [("tokens", [1], [1, 2])]


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    changed = {**RECORD, "refused": {"error": "another"}}
    for name, cases in (("a", RECORD), ("b", changed)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"cases": cases, "seconds": {}}))
    for other, status, said in (("a", 0, "0 of 3 cases differ"), ("b", 1, "1 of 3 cases differ")):
        files = [str(tmp_path / f"{name}.json") for name in ("a", other)]
        done = subprocess.run([sys.executable, TOOL, "compare", *files], capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (status, said)


def test_prompts_have_room_in_the_context(tool: Any) -> None:
    for context in (32, 64, 128, 512, 4096):
        prompts = tool.prompts_for(101, context)
        assert all(0 < len(prompt) <= context - tool.NEW for prompt in prompts)
        assert prompts == tool.prompts_for(101, context) and max(map(max, prompts)) < 101


def test_texts_with_drafts_are_compared_with_those_without(tool: Any) -> None:
    case = tool.Case("llama | NGRAM", "llama", "llama", {}, like="llama | none")
    assert tool.same_texts(case, RECORD)
    other = copy.deepcopy(RECORD)
    other["llama | NGRAM"]["greedy"][0]["tokens"][0] = 4
    assert not tool.same_texts(case, other)
    assert tool.same_texts(case, {"llama | NGRAM": other["llama | NGRAM"]}), "there is nothing to compare with"


def test_each_case_has_a_name_of_its_own(tool: Any) -> None:
    index = {name: {"drafters": {}} for name in needed(tool)}
    index["head/exact EAGLE3"]["drafters"] = {"EAGLE3": {}}
    index["family/qwen3.5/plain"]["drafters"] = {"NEXTN": {}}
    cases = tool.all_cases(index)
    names = {case.name for case in cases}
    assert len(names) == len(cases) > 100
    assert all(case.like in names for case in cases if case.like)


def needed(tool: Any) -> set[str]:
    """Models that the list of cases names."""
    listed = sys.modules["bit_cases"]
    found = set[str]()
    for name in ("SOME", "DRAFTED", "IN_BF16", "IN_INT8", "CACHED", "SCHEDULED", "SHARED"):
        found.update(getattr(listed, name))
    return found | {"dense/varied"}
