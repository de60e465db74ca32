"""tools/plant_faults.py: its faults are where it says, and change what they are planted in."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import script

TOOL = Path(__file__).parents[1] / "tools" / "plant_faults.py"


@pytest.mark.slow
def test_each_fault_has_one_place_and_changes_a_module_that_still_compiles() -> None:
    tool = script(TOOL)
    faults = tool.read_faults()
    assert len(faults) >= 60
    sources, tests = tool.sources(), tool.texts_of_tests()
    for fault in faults:
        place = tool.locate(fault, sources)
        text = sources[place.path]
        changed = tool.planted(text, place, fault)
        assert changed != text, fault.name
        compile(changed, str(place.path), "exec")
        assert tool.files_for(fault, tests), f"{fault.name}: no test has any of {fault.tests}"


MODULE = """\
class First:
    def free(self, count):
        if count:
            self.left += count
            self.news = (
                count,
            )


class Second:
    def free(self, count):
        if count:
            self.left += count
"""


def test_text_is_found_however_it_is_indented_and_within_what_is_named() -> None:
    tool = script(TOOL)
    fault = tool.Fault(
        "leaks", "kv", "if count:\n    self.left += count", "if not count:\n    pass", ("free",), "Second.free"
    )
    texts = {Path("a.py"): MODULE, Path("b.py"): "left += count"}
    place = tool.locate(fault, texts)
    assert tool.planted(MODULE, place, fault).endswith("        if not count:\n            pass\n")
    assert MODULE[place.start :] == "if count:\n            self.left += count\n"
    wide = tool.Fault("leaks", "kv", "self.news = ( count, )", "self.news = ()", ("free",))
    assert "self.news = ()\n" in tool.planted(MODULE, tool.locate(wide, texts), wide)


@pytest.mark.parametrize("old, times", [("left += count", 3), ("left -= count", 0)])
def test_text_that_is_not_there_once_is_refused(old: str, times: int) -> None:
    tool = script(TOOL)
    fault = tool.Fault("leaks", "kv", old, "pass", ("free",))
    with pytest.raises(tool.Misplaced, match=f"leaks: expected its text once, found it {times} times"):
        tool.locate(fault, {Path("a.py"): MODULE, Path("b.py"): "left += count"})


def test_files_with_most_words_are_asked_and_of_equals_the_shortest() -> None:
    tool = script(TOOL)
    fault = tool.Fault("leaks", "kv", "a", "b", ("test_kv", "free("))
    texts = {
        "tests/test_a.py": "free(1) and more",
        "tests/test_b.py": "free(1)",
        "tests/test_c.py": "",
        "tests/test_kv.py": "free(1)",
    }
    assert tool.files_for(fault, texts) == ["tests/test_kv.py", "tests/test_b.py", "tests/test_a.py"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fault_is_caught_by_a_test_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = script(TOOL)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sum.py").write_text("import pkg\n\ndef test_sum():\n    assert pkg.total(1, 2) == 3\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "pkg.py").write_text("def total(a, b):\n    return a + b\n\n\ndef other(a):\n    return a\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "_check_import", lambda copy: None)
    texts = tool.sources(tmp_path)
    monkeypatch.setattr(tool, "sources", lambda: texts)
    caught = tool.Fault("subtracts", "a", "return a + b", "return a - b", ("total",))
    missed = tool.Fault("gives nothing", "a", "return a\n", "return None\n", ("total",), "other")
    with tool.copies(1) as copies:
        session = tool.Session(copies, 60)
        found = list(
            session.results([(one, tool.locate(one, texts), ["tests/test_sum.py"]) for one in (caught, missed)])
        )
    assert [one.outcome for one in found] == ["caught", "not caught"]
    assert found[0].test == "tests/test_sum.py::test_sum"
