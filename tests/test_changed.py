"""Tests of training run when they or what training imports have changed since they passed, and are left out else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from textwrap import dedent

import changed
import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "tests/conftest.py": """
        from changed import Changed
        def pytest_addoption(parser): parser.addoption("--changed", action="store_true")
        def pytest_configure(config): config.pluginmanager.register(Changed(config))
    """,
    "tests/helper.py": "import deep",
    "tests/deep.py": "",
    "tests/train/test_it.py": """
        import os
        def test_one(): pass
        def test_two():
            import helper
            assert "FAILS" not in os.environ
    """,
    "tests/test_other.py": "def test_other(): pass",
    "src/draftwing/__init__.py": "",
    "src/draftwing/layer.py": """
        def late():
            import draftwing.server
    """,
    "src/draftwing/heads/__init__.py": "",
    "src/draftwing/heads/one.py": "from draftwing import layer",
    "src/draftwing/server.py": "",
    "src/draftwing/train/fit.py": """
        def fit():
            from draftwing.heads import one
    """,
}  # fmt: skip
FILES = {name: dedent(content) for name, content in FILES.items()}
LONG_AGO = time.time() - 1000


def write(root: Path, name: str, content: str) -> None:
    """As if it had been written before pytest began."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second of each run
    pytester.makeini("[pytest]\ntestpaths = tests\npythonpath = tests")
    for name, content in FILES.items():
        write(pytester.path, name, content)
    return pytester


def ran(project: pytest.Pytester, *args: str) -> tuple[int, int, int]:
    """Returns how many tests passed, failed and were left out."""
    result = project.runpytest_inprocess(*args)
    found = result.parseoutcomes()
    left_out = found.get("deselected", 0)
    told = f"tests of training: {left_out} that passed are left out"
    assert (told in result.stdout.str()) == bool(left_out)
    return found.get("passed", 0), found.get("failed", 0), left_out


def test_what_passed_is_left_out_until_something_changes(project: pytest.Pytester) -> None:
    assert ran(project, "--changed") == (3, 0, 0)  # a fresh clone
    for name in ("src/draftwing/server.py", "tests/test_other.py"):  # what functions of others import is another part
        write(project.path, name, FILES[name] + "\n# changed")
    assert ran(project, "--changed") == (1, 0, 2)
    for name in ("src/draftwing/layer.py", "tests/deep.py"):
        write(project.path, name, FILES[name] + "\n# changed")
        assert ran(project, "--changed") == (3, 0, 0), name
    write(project.path, "tests/train/test_new.py", "def test_new(): pass")
    assert ran(project, "--changed") == (4, 0, 0)
    (project.path / "src/draftwing/train/fit.py").unlink()
    assert ran(project, "--changed") == (4, 0, 0)
    assert ran(project, "--changed") == (1, 0, 3)


@pytest.mark.slow
def test_all_run_where_they_are_named_or_nothing_is_to_be_left_out(project: pytest.Pytester) -> None:
    ran(project, "--changed")
    assert ran(project) == (3, 0, 0)
    assert ran(project, "--changed", "tests/train/test_it.py::test_one") == (1, 0, 0)
    assert ran(project, "--changed", "-p", "no:cacheprovider") == (3, 0, 0)


@pytest.mark.slow
def test_what_failed_runs_again(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FAILS", "1")
        assert ran(project, "--changed") == (2, 1, 0)
    assert ran(project, "--changed") == (2, 0, 1)
    with monkeypatch.context() as patch:
        patch.setenv("FAILS", "1")
        assert ran(project, "tests/train") == (1, 1, 0)
    assert ran(project, "--changed") == (2, 0, 1)


@pytest.mark.slow
def test_a_file_that_is_changed_meanwhile_counts_as_changed(project: pytest.Pytester) -> None:
    os.utime(project.path / "tests" / "helper.py", (time.time() + 60,) * 2)
    assert ran(project, "--changed") == ran(project, "--changed") == (3, 0, 0)


@pytest.mark.slow
def test_a_process_that_runs_tests_for_another_leaves_out_the_same(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    for expected in ((3, 0), (1, 0)):
        result = project.runpytest_subprocess("--changed", "-pxdist", "-n1")
        found = result.parseoutcomes()
        assert (found.get("passed", 0), found.get("failed", 0)) == expected


@pytest.mark.slow
def test_training_imports_the_engine_and_no_server() -> None:
    found = changed.watched(ROOT)
    modules = {"train/kernels/losses", "engine/engine", "models/decoder", "__init__"}
    assert {f"src/draftwing/{name}.py" for name in modules} <= found
    assert {"tests/reference/fit_run.py", "tests/tiny_checkpoint.py"} <= found
    assert not any(name.startswith(("src/draftwing/server", "src/draftwing/cli")) for name in found)
