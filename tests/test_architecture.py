"""Who may import whom: the layering of docs/architecture.md, walked in the syntax tree."""

import ast
from pathlib import Path

import pytest

import draftwing

ROOT = Path(draftwing.__file__).parent
HOST_ONLY = [
    "core.py",
    "errors.py",
    *sorted(f"{package}/{p.name}" for package in ("config", "sched") for p in (ROOT / package).glob("*.py")),
    "requests/sampling_params.py",
    "models/bundled.py",
]


def imports(path):
    """Every module that a file imports, at any depth, but not what only type checkers see."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(files, *forbidden):
    found = []
    for name in files:
        for module in imports(ROOT / name):
            if any(module == ban or module.startswith(ban + ".") for ban in forbidden):
                found.append(f"{name} imports {module}")
    return found


def below(package):
    return [str(p.relative_to(ROOT)) for p in sorted((ROOT / package).rglob("*.py"))]


def test_the_walk_sees_imports():
    assert "torch" in set(imports(ROOT / "engine/executor.py"))
    assert offenders(["engine/executor.py"], "torch")


@pytest.mark.parametrize("name", HOST_ONLY)
def test_the_host_side_imports_no_torch(name):
    assert not offenders([name], "torch", "draftwing.engine", "draftwing.spec", "draftwing.models", "draftwing.ops")


def test_layers_import_downwards_only():
    upper = ["draftwing.engine", "draftwing.server", "draftwing.llm", "draftwing.cli", "draftwing.sched"]
    assert not offenders([*below("layers"), *below("kv")], *upper, "draftwing.models", "draftwing.spec")
    assert not offenders(below("models"), *upper, "draftwing.spec", "draftwing.sampling")
    assert not offenders(below("sampling"), *upper, "draftwing.spec", "draftwing.models")
    # a drafter may couple with the target through the same noise, but it never sees the sampler
    assert not offenders(below("spec"), *upper, "draftwing.ops.torch.sampling", "draftwing.ops.torch.filters")
    assert not offenders(below("engine"), "draftwing.server", "draftwing.llm", "draftwing.cli")


def test_importing_the_package_is_light():
    import subprocess
    import sys

    code = "import sys, draftwing; from draftwing import SamplingParams; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
