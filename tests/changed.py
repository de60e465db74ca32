"""Leaves out tests of training that have passed since anything that training imports was changed.

They take minutes, and most changes are to other parts. `make check` and `make test` ask for it by `--changed`; without
that, and where files are named, all tests run. What passed is kept in pytest's cache with a hash of each file that it
depends on: a fresh clone runs everything, and so does whoever changes one of these files.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

# Of tests of training, folders and files; and what they run that no import names.
TESTS = ("tests/train", "tests/test_train_small_hybrid.py", "tests/test_train_small_seer.py")
MORE = ("tests/conftest.py", "tests/shared_fixtures.py", "tools/train_small_hybrid.py", "tools/train_small_seer.py")
TRAINING = "src/draftwing/train"
CACHED = "draftwing/training"


class Changed:
    """A plugin of pytest, in the process that shows results and in those that run tests for it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._begin = config, time.time()
        self._passed: set[str] = set()
        self._failed: set[str] = set()
        self._cache: pytest.Cache | None = getattr(config, "cache", None)  # None with -p no:cacheprovider
        kept = None if self._cache is None else self._cache.get(CACHED, None)
        self._kept: set[str] = set()  # tests that have passed with all files as they are
        if kept is not None and hashes(config.rootpath, {*kept["files"], *own_files(config.rootpath)}) == kept["files"]:
            self._kept = set(kept["passed"])
        self._for_another: dict[str, bool] | None = getattr(
            config, "workerinput", None
        )  # of xdist, to which all is named
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        asked = config.option.changed and not named
        self._leaves_out = asked if self._for_another is None else self._for_another["leaves_out"]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["leaves_out"] = self._leaves_out

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        out = [item for item in items if self._leaves_out and item.nodeid in self._kept]
        if out:
            items[:] = [item for item in items if item.nodeid not in self._kept]
            self._config.hook.pytest_deselected(items=out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid.startswith(TESTS):
            if report.failed:
                self._failed.add(report.nodeid)
            elif report.when == "call" and report.passed:
                self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        ran = self._passed or self._failed
        if self._for_another is not None or self._cache is None or not ran:
            return
        try:
            files = watched(self._config.rootpath)
        except SyntaxError:  # of a file that is being written
            return
        if any((self._config.rootpath / name).stat().st_mtime >= self._begin for name in files):
            return  # nobody knows with which of both contents they passed
        passed = sorted((self._kept | self._passed) - self._failed)
        self._cache.set(CACHED, {"files": hashes(self._config.rootpath, files), "passed": passed})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._leaves_out and self._kept:
            count = len(self._kept)
            terminalreporter.write_line(
                f"tests of training: {count} that passed are left out, for nothing that training imports has changed"
            )


def own_files(root: Path) -> set[str]:
    """Returns files of training and its tests, and `MORE`."""
    found = [root / name for name in MORE]
    for name in (*TESTS, TRAINING):
        found += (root / name).rglob("*.py") if (root / name).is_dir() else [root / name]
    return {path.relative_to(root).as_posix() for path in found if path.is_file()}


def watched(root: Path) -> set[str]:
    """Returns `own_files` and what these import: modules of the package for training, helpers in `tests` for tests.

    What training imports counts with what is imported with it, not with what its functions import later: an engine that
    is asked for a server would be the whole package. Raises SyntaxError."""
    own = own_files(root)
    found, todo = set(own), sorted(own)
    while todo:
        name = todo.pop()
        folder = root / ("src" if name.startswith("src/") else "tests")
        tree = ast.parse((root / name).read_bytes())
        for module in imported(tree, deferred=name in own or folder.name == "tests"):
            new = {path.relative_to(root).as_posix() for path in files_of(folder, module)} - found
            found |= new
            todo += new
    return found


def imported(node: ast.AST, deferred: bool) -> Iterator[str]:
    """Yields names of modules that are imported, or could be, for `from a import b` may be of a module a.b. deferred:
    in functions and for types alone, too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (name.name for name in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{name.name}" for name in child.names)
        elif isinstance(child, ast.expr):
            continue
        elif deferred or not (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
        ):
            yield from imported(child, deferred)


def files_of(folder: Path, module: str) -> Iterator[Path]:
    """Yields files that an import of this module runs, its packages' own among them."""
    path = folder
    for part in module.split("."):
        path /= part
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                yield file


def hashes(root: Path, names: set[str]) -> dict[str, str]:
    """Returns a hash of each file's content; of one that is not there, that of nothing."""
    paths = {name: root / name for name in sorted(names)}
    contents = {name: path.read_bytes() if path.is_file() else b"" for name, path in paths.items()}
    return {name: blake2b(content, digest_size=16).hexdigest() for name, content in contents.items()}
