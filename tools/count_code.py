"""Counts what a reader has to hold in mind: code, files, nouns, protocols and the like.

    python tools/count_code.py [--by-package] [--json FILE]

Code lines are lines without blanks, comments, docstrings and imports. `make check` prints the table.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "draftwing"
KERNELS = SOURCE / "ops"
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str, tree: ast.Module) -> int:
    """Counts lines of Python that are no blank, comment, docstring or import."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, Definition) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            left_out.update(range(first.lineno, (first.end_lineno or 0) + 1))
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for i, line in lines if line.strip() and not line.lstrip().startswith("#") and i not in left_out)


def parsed(folder: Path) -> dict[Path, tuple[str, ast.Module]]:
    """Returns text and syntax tree of each Python file under a folder."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found[path] = text, ast.parse(text)
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, known: frozenset[str]) -> Iterator[str]:
    """Yields modules of the package that a module names in imports, of functions and for types alone, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else node.module


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns groups of modules that import each other: strongly connected components of more than one."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    return found


def classes(files: Mapping[Path, tuple[str, ast.Module]]) -> Iterator[ast.ClassDef]:
    for _, tree in files.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def table_names(kind: ast.ClassDef) -> Iterator[str]:
    """Yields what a kind of operations puts into the table: its methods and other names, but for private ones."""
    for node in kind.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = [node.name]
        else:
            found = [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
        yield from (name for name in found if not name.startswith("_"))


def shape_rows(tree: ast.Module) -> Iterator[int]:
    """Yields how many calls with three numbers and more each constant of a module is made of, named or not: shapes of
    kernels."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            calls = (one for one in ast.walk(node.value) if isinstance(one, ast.Call))
            values = ([*one.args, *(keyword.value for keyword in one.keywords)] for one in calls)
            yield sum(sum(isinstance(value, ast.Constant) for value in one) >= 3 for one in values)


def table_rows(page: Path, heading: str) -> int:
    """Counts the rows of the table whose first column has this heading."""
    rows, inside = 0, False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"| {heading} |"):
            inside = True
        elif inside and line.startswith("|"):
            rows += not line.startswith("|---")
        else:
            inside = False
    return rows


def counted() -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Returns counts by name, and files and code lines by package."""
    files = parsed(SOURCE)
    tests = parsed(ROOT / "tests")
    packages: dict[str, tuple[int, int]] = {}
    graph: dict[str, set[str]] = {}
    known = frozenset(map(module_of, files))
    importers: dict[str, set[str]] = {}
    for path, (text, tree) in files.items():
        parts = path.relative_to(SOURCE).parts
        name = parts[0] if len(parts) > 1 else "(top)"
        count, lines = packages.get(name, (0, 0))
        packages[name] = count + 1, lines + code_lines(text, tree)
        own = module_of(path)
        graph[own] = {one for one in imports(tree, known) if one != own}
        for other in graph[own]:
            importers.setdefault(other, set()).add(own)
    every = list(classes(files))
    table = next((node for node in every if node.name == "LayerOps"), None)
    kinds = {ast.unparse(base) for base in (table.bases if table else ())}
    shapes = sum(sum(shape_rows(tree)) for path, (_, tree) in files.items() if KERNELS in path.parents)
    native = [path for kind in ("*.c", "*.h", "*.cu", "*.cuh", "*.cpp") for path in SOURCE.rglob(kind)]
    protocols = [node for node in every if any("Protocol" in ast.unparse(base) for base in node.bases)]
    names = {name for node in every if node is table or node.name in kinds for name in table_names(node)}
    counts = {
        "code lines of src": sum(lines for _, lines in packages.values()),
        "files of src": len(files),
        "files below 150 lines": sum(len(text.splitlines()) < 150 for text, _ in files.values()),
        "files with one importer": sum(len(one) == 1 for one in importers.values()),
        "lines of C and CUDA": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in native),
        "lines of tests": sum(len(text.splitlines()) for text, _ in tests.values()),
        "code lines of tests": sum(code_lines(*one) for one in tests.values()),
        "files of tests": len(tests),
        "nouns": table_rows(ROOT / "docs" / "architecture.md", "noun"),
        "protocols": len(protocols),
        "protocols of GEMMs": sum("Gemm" in node.name or node.name == "HeadProducts" for node in protocols),
        "names in the table of layers": len(names),
        "rows of kernel shapes in code": shapes,
        "import circles": len(circles(graph)),
    }
    return counts, packages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-package", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    counts, packages = counted()
    for name, count in counts.items():
        print(f"{name:32}{count:8,}")
    if args.by_package:
        for name, (count, lines) in sorted(packages.items(), key=lambda one: -one[1][1]):
            print(f"  {name:20}{count:5} files{lines:8,} code lines")
    if args.json:
        about = {"counts": counts, "packages": {name: list(one) for name, one in packages.items()}}
        args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
