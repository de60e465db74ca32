"""Plants faults in the package, one after another, and shows which of them the tests notice.

    python tools/plant_faults.py                          # all of tools/faults.toml
    python tools/plant_faults.py --only sched             # those of an area, or one by its name; may be repeated
    python tools/plant_faults.py --jobs 4 --json OUT.json # four at a time; results for comparisons
    python tools/plant_faults.py --list                   # faults, where they go, and which tests are asked

A fault is a table of faults.toml:

    name      what becomes wrong
    area      part of the package
    old, new  source text, of one or a few lines, and what takes its place. All whitespace counts alike, so text that
              was indented anew or moved to another file is found. It stands in the package once.
    within    function, method or class (`Class.method`) in which it stands, where the text alone is not enough
    tests     words. The test files asked are those whose path or text has most of them, at most three

Faults are planted in a copy of src/; the checkout stays as it is. Test files run each by itself, those with most words
first, up to the first failure. Where one does not end in time the fault is `hung`, which counts as caught. A test file
that failed runs once more without a fault. If it fails again, it is not asked: its failures say nothing. --trust leaves
that out.

Exits with 2 where the text of a fault is not in the package, or more than once; else with 0.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults.toml")
MOST_FILES = 3  # test files for a fault
CASES = "not timing and not exhaustive"
PASSED, NO_TESTS = 0, 5  # exit codes of pytest
BROKEN = (3, 4)  # of an error of its own, and of a wrong command
FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A row of faults.toml."""

    name: str
    area: str
    old: str
    new: str
    tests: tuple[str, ...]
    within: str = ""


@dataclass(frozen=True)
class Place:
    """Where the text of a fault stands: characters of a file of the package, `path` below src/."""

    path: Path
    start: int
    end: int


@dataclass
class Result:
    """What came of a fault: "caught", "hung" or "not caught". test: the one that noticed.  files: those that ran."""

    name: str
    area: str
    outcome: str = "not caught"
    test: str = ""
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)


class Misplaced(Exception):
    """The text of a fault is not in the package, or more than once."""


# -- faults and their places ------------------------------------------------------------------------------------------


def read_faults(path: Path = FAULTS) -> list[Fault]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    faults = [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    assert len({fault.name for fault in faults}) == len(faults), "two faults have one name"
    return faults


@cache
def sources(root: Path = ROOT) -> Mapping[Path, str]:
    """Returns the text of the package's modules by their path below src/."""
    src = root / "src"
    return {path.relative_to(src): path.read_text(encoding="utf-8") for path in sorted(src.rglob("*.py"))}


def locate(fault: Fault, texts: Mapping[Path, str]) -> Place:
    """Returns where a fault goes. Raises Misplaced."""
    words = fault.old.split()
    pattern = re.compile(r"\s+".join(map(re.escape, words)))
    found = [
        Place(path, match.start(), match.end())
        for path, text in texts.items()
        if all(word in text for word in words)
        for match in pattern.finditer(text)
        if not fault.within or _stands_within(text, match.start(), fault.within)
    ]
    if len(found) == 1:
        return found[0]
    where = ", ".join(f"{place.path}:{texts[place.path].count(chr(10), 0, place.start) + 1}" for place in found)
    raise Misplaced(f"{fault.name}: expected its text once, found it {len(found)} times{where and ': ' + where}")


def _stands_within(text: str, at: int, name: str) -> bool:
    line = text.count("\n", 0, at) + 1
    return any(first <= line <= last for first, last in _spans(ast.parse(text), name.split(".")))


def _spans(tree: ast.AST, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Gives the lines of each function or class of a name, the last of `names` inside of the others."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name != names[0]:
            continue
        if len(names) == 1:
            yield node.lineno, node.end_lineno or node.lineno
        else:
            yield from _spans(node, names[1:])


def planted(text: str, place: Place, fault: Fault) -> str:
    """Returns a module with a fault in it. Further lines are indented as the line in which it begins."""
    begin = text.rfind("\n", 0, place.start) + 1
    line = text[begin : place.start]
    indent = line[: len(line) - len(line.lstrip())]
    return text[: place.start] + fault.new.strip().replace("\n", f"\n{indent}") + text[place.end :]


# -- tests ------------------------------------------------------------------------------------------------------------


@cache
def texts_of_tests(root: Path = ROOT) -> Mapping[str, str]:
    """Returns the text of all test files by their path."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in found}


def files_for(fault: Fault, texts: Mapping[str, str]) -> list[str]:
    """Returns the test files of a fault: those with most of its words, of equals those with one in their path, and of
    these the shortest."""

    def rank(path: str) -> tuple[int, int, int]:
        named = sum(word in path for word in fault.tests)
        return -sum(word in path or word in texts[path] for word in fault.tests), -named, len(texts[path])

    own = {f"tests/test_{Path(__file__).stem}.py"}
    return sorted((path for path in texts if path not in own and rank(path)[0]), key=rank)[:MOST_FILES]


@dataclass(frozen=True)
class Run:
    """How pytest ended; code: None where it took too long."""

    code: int | None
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        return self.code not in (PASSED, NO_TESTS)

    @property
    def test(self) -> str:
        """Returns the first test that failed."""
        found = FAILURE.search(self.output)
        return found[1] if found else ""


def run_tests(copy: Path, path: str, timeout: float) -> Run:
    """Runs a test file of the checkout with the package in a copy of src/."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-m", CASES, path,
    ]  # fmt: skip
    if importlib.util.find_spec("xdist") is not None:
        command.append("-n0")
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what the tests started
            output, code = "", None
    if code in BROKEN:
        raise RuntimeError(f"pytest {path} ended with {code}:\n{output[-2000:]}")
    return Run(code, time.monotonic() - begun, output)


# -- copies of the package --------------------------------------------------------------------------------------------


@contextmanager
def copies(count: int) -> Iterator[list[Path]]:
    """Gives copies of src/, of whose files only modules take space of their own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        found = [Path(folder) / str(i) for i in range(count)]
        for copy in found:
            shutil.copytree(ROOT / "src", copy, copy_function=_copy, ignore=shutil.ignore_patterns("__pycache__"))
            _check_import(copy)
        yield found


def _copy(source: str, target: str) -> None:
    if not source.endswith(".py"):
        try:
            os.link(source, target)
            return
        except OSError:  # another file system
            pass
    shutil.copyfile(source, target)


def _check_import(copy: Path) -> None:
    """Fails where another package than the copy's would be tested."""
    env = {**os.environ, "PYTHONPATH": str(copy)}
    where = "import draftwing; print(draftwing.__file__)"
    found = subprocess.run([sys.executable, "-c", where], env=env, cwd=ROOT, text=True, capture_output=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(copy), f"expected the package of {copy}, found {found.stdout}"


def _write(path: Path, text: str) -> None:
    """Writes a module, and removes what was compiled of it, which is told by its size and the second alone."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


@contextmanager
def _with_fault(copy: Path, fault: Fault, place: Place) -> Iterator[None]:
    path, text = copy / place.path, sources()[place.path]
    _write(path, planted(text, place, fault))
    try:
        yield
    finally:
        _write(path, text)


# -- a session --------------------------------------------------------------------------------------------------------


class Session:
    """Plants faults in copies, of which each thread takes one at a time."""

    def __init__(self, copies: Sequence[Path], timeout: float, trusts: bool = False) -> None:
        """trusts: tests that fail are taken to pass without a fault."""
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._threads, self._timeout, self._trusts = len(copies), timeout, trusts
        self._passes: dict[str, bool] = {}  # by test file, whether it does without a fault
        for copy in copies:
            self._free.put(copy)

    def results(self, faults: Sequence[tuple[Fault, Place, Sequence[str]]]) -> Iterator[Result]:
        with ThreadPoolExecutor(self._threads) as pool:
            yield from pool.map(lambda one: self._result(*one), faults)

    def _result(self, fault: Fault, place: Place, files: Sequence[str]) -> Result:
        result, copy = Result(fault.name, fault.area), self._free.get()
        try:
            for path in (path for path in files if self._passes.get(path, True)):
                with _with_fault(copy, fault, place):
                    run = run_tests(copy, path, self._timeout)
                result.files.append(path)
                result.seconds = round(result.seconds + run.seconds, 1)
                if run.failed and self._passes_without(copy, path):
                    result.outcome, result.test = "hung" if run.code is None else "caught", run.test or path
                    break
        finally:
            self._free.put(copy)
        return result

    def _passes_without(self, copy: Path, path: str) -> bool:
        """Returns whether a test file passes without a fault. copy: which has none now."""
        if self._trusts:
            return True
        if path not in self._passes:
            run = run_tests(copy, path, self._timeout)
            self._passes[path] = not run.failed
            if run.failed:
                print(f"{path} fails without a fault, and is not asked: {run.test or 'it takes too long'}")
        return self._passes[path]


# -- the command ------------------------------------------------------------------------------------------------------


def chosen(faults: Sequence[Fault], only: Sequence[str]) -> list[Fault]:
    """Returns faults of areas or names; all where none is named."""
    unknown = set(only) - {name for fault in faults for name in (fault.name, fault.area)}
    if unknown:
        sys.exit(f"no fault and no area: {', '.join(sorted(unknown))}; --list names them")
    return [fault for fault in faults if not only or fault.name in only or fault.area in only]


def located(faults: Sequence[Fault]) -> list[tuple[Fault, Place, list[str]]]:
    """Returns faults with their places and test files; exits with 2 where a text is not to be found."""
    found, wrong = [], []
    for fault in faults:
        try:
            found.append((fault, locate(fault, sources()), files_for(fault, texts_of_tests())))
        except Misplaced as error:
            wrong.append(str(error))
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        sys.exit(2)
    return found


def report(results: Sequence[Result]) -> None:
    """Prints how many faults of each area were caught, and of all."""
    print()
    for area in dict.fromkeys(result.area for result in results):
        its = [result.outcome != "not caught" for result in results if result.area == area]
        print(f"{area:10} {sum(its)} of {len(its)}")
    caught = sum(result.outcome != "not caught" for result in results)
    print(f"{caught} of {len(results)}, in {sum(result.seconds for result in results):.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants faults and shows which of them the tests notice.")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a fault or an area")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results go")
    parser.add_argument("--timeout", type=float, default=240.0, metavar="SECONDS", help="for a test file")
    parser.add_argument("--trust", action="store_true", help="do not run tests that failed without a fault, too")
    parser.add_argument("--list", action="store_true", help="show faults, and run nothing")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faults = located(chosen(read_faults(), args.only))
    if args.list:
        for fault, place, files in faults:
            print(f"{fault.area:10} {fault.name}\n{'':11}{place.path}: {' '.join(files)}")
        return
    results: list[Result] = []
    with copies(max(args.jobs, 1)) as folders:
        session = Session(folders, args.timeout, args.trust)
        for result in session.results(faults):
            results.append(result)
            how = f"{result.outcome} by {result.test}" if result.test else result.outcome
            print(f"{result.area:10} {result.name}: {how}, {result.seconds:.0f} s")
            if args.json is not None:  # after each: who ends it early keeps what there is
                args.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n", encoding="utf-8")
    report(results)


if __name__ == "__main__":
    main()
