"""Who imports whom, and who asks about the device: the rules of docs/architecture.md, walked in the syntax trees."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import draftwing
from draftwing.models.families import FAMILIES

ROOT = Path(draftwing.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
HOST_SIDE = ("errors", "log", "core", "config", "requests", "sched")

# Modules whose questions are right, and why.
MAY_ASK = {
    "cli.doctor": "says what is wrong with each device of a machine, before there is one",
    "engine.devices.cuda": "says whether there is a GPU",
    "engine.graphs": "`RecordedStages`, which is made where `ops.can_record` alone",
    "engine.startup.compiler_process": "says whether something may be compiled, before there is a device",
    "engine.startup.precompile": "compiles the GPU's kernels, in a process without tensors on it",
    "kv.pool": "only a CPU's memory is taken as it is written",
    "serve.ray": "says what a replica needs of a machine, before there is one",
    "train.store": "pins memory for a GPU",
    "train.losses": "training's own kernels, with gradients",
    "train.fit": "the process group's backend",
    "train.optimizer": "whether bfloat16 is native, and torch's fused step",
    "train.stages": "a forecast: processes on a CPU share its cores",
    "train.ttt": "training's own kernels, with gradients; and a GPU would wait for the number of rows to be learnt",
}

# Who else than `models.families` may name one, and why.
MAY_NAME = {
    "config.drafters": "trees that people know of SGLang, which has others for this architecture",
    "config.option_fields": "values of options, as other servers have them",
    "config.options": "which of these trees",
    "layers.rope": "the name of a way to scale, in `rope_type`",
    "models.fields": "keys of configs of many",
    "models.towers.projector_file": "the name of a projector in GGUF files",
    "models.positions": "the name of a way to scale, in `rope_type`",
    "server.parsers.reasoning": "values of options, as other servers have them",
    "server.parsers.tools": "values of options, and marks of chat templates",
    "text.gguf_tokenizer": "names of tokenizers in GGUF files",
    "train.checkpoint": "what other engines expect of the config of a head",
    "train.evaluate": "a sentence of a model card",
}
FAMILY = re.compile(
    r"afmoe|apertus|arcee|bailing|bamba|(?<!sentence_)bert|cohere|cwm|decilm|deepseek|dots1|ernie|exaone|falcon|gemma|glm|gpt_?oss|gpt2lm|gpt_?bigcode|granite|helium|hunyuan|hy_?v3|hyperclova|internlm|jais|jamba|kimi|laguna|lfm[23]|mamba2?for|(?<!o)llama(?!\.cpp|_arg)|mellum|mimo|minicpm|minimax|nanochat|"
    r"nemotron|neox|mi(?:ni)?stral|mixtral|olmo|phi(?:[34]|for|moe)|qwen|sarvam|seed_?oss|smollm3|solar|stablelm|starcoder|step3p|youtu",
    re.IGNORECASE,
)


class Import(NamedTuple):
    target: str  # a module of the package without "draftwing.", or a foreign one
    deferred: bool  # inside a function
    typing: bool  # under TYPE_CHECKING


@cache
def texts() -> dict[str, str]:
    """The package's modules by dotted name, "" for its root."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf8")
    return found


@cache
def trees() -> dict[str, ast.Module]:
    gc.disable()  # to look for garbage among so many nodes takes as long as to make them
    found = {name: ast.parse(text) for name, text in texts().items()}
    gc.enable()
    return found


@cache
def imports(module: str) -> list[Import]:
    return list(_imports(trees()[module], deferred=False, typing=False))


def _imports(node: ast.AST, deferred: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # which has no statements
            continue
        inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        test = getattr(child, "test", None)
        for_types = typing or (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING")
        names: list[str] = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            whole = [f"{child.module}.{alias.name}" for alias in child.names]
            names = [name if _own(name) in trees() else str(child.module) for name in whole]
        for name in dict.fromkeys(names):
            yield Import(_own(name), deferred, typing)
        yield from _imports(child, inside, for_types)


def _own(name: str) -> str:
    return name.removeprefix("draftwing").removeprefix(".") if re.match(r"draftwing(\.|$)", name) else name


def layers() -> dict[str, int]:
    """Package -> its row in the table of the page's section Layout, the lowest first."""
    section = PAGE.read_text(encoding="utf8").split("\n## Layout\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name: i for i, row in enumerate(rows) for name in re.findall(r"`([a-z_]+)/?`", row)}


def upward(module: str) -> Iterator[str]:
    """Imports of what stands below the module in the table, those for type checkers included."""
    rank = layers()
    for found in imports(module):
        if found.target in trees() and found.target and rank[_top(found.target)] > rank[_top(module)]:
            yield f"{module} -> {found.target}"


def _top(module: str) -> str:
    return module.split(".")[0]


DEVICES = {"'cpu'", "'cuda'"}  # as ast.unparse writes them
QUESTION = re.compile(r"is_cuda|is_cpu|is_available|use_triton|device\.type|(['\"])(cpu|cuda)\1")  # what may be one
OWN_FOLDERS = ("ops.cpu", "ops.cuda", "ops.triton")


def questions(module: str) -> Iterator[str]:
    """Where a module asks which device it is on, or names an implementation of one device."""
    for found in imports(module):
        if any(found.target == folder or found.target.startswith(folder + ".") for folder in OWN_FOLDERS):
            yield f"{module}: imports {'.'.join(found.target.split('.')[:2])}"
    for node in ast.walk(trees()[module]) if QUESTION.search(texts()[module]) else ():
        if isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_cpu"):
            yield f"{module}: {node.attr}"
        elif isinstance(node, ast.Attribute) and node.attr == "is_available":
            yield f"{module}: {ast.unparse(node)}"
        elif isinstance(node, ast.Name) and node.id == "use_triton":
            yield f"{module}: use_triton"
        elif isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any(side in DEVICES for side in sides) or any(side.endswith("device.type") for side in sides):
                yield f"{module}: compares with a device's name"


def may_ask(module: str) -> bool:
    """`ops`, which has the attention backends, training's kernels, which are Triton's, and those with a reason."""
    return _top(module) == "ops" or f"{module}.".startswith("train.kernels.") or module in MAY_ASK


def test_no_modules_import_one_another_in_a_circle() -> None:
    """By what is imported when they are; the root loads what it has when it is first asked for."""
    edges = {
        module: {found.target for found in imports(module) if found.target and not (found.deferred or found.typing)}
        for module in trees()
    }
    TopologicalSorter(edges).prepare()  # raises CycleError, which has the modules


def test_every_module_has_a_place_in_the_table() -> None:
    assert {_top(module) for module in trees() if module not in ("", "__main__")} == set(layers())


def test_the_walk_sees_what_it_looks_for() -> None:
    assert Import("torch", False, False) in imports("engine.executor")
    assert any(found.typing for found in imports(""))
    assert any(found.deferred for module in trees() for found in imports(module))
    assert "engine.devices.cuda: torch.cuda.is_available" in set(questions("engine.devices.cuda"))
    assert layers()["core"] < layers()["sched"] < layers()["ops"] < layers()["engine"] < layers()["server"]


def test_nothing_is_imported_upwards() -> None:
    found = {line for module in trees() if module not in ("", "__main__") for line in upward(module)}
    assert not found, "imports of what stands below in the table of docs/architecture.md"


def test_the_host_side_imports_no_torch() -> None:
    """Nor does what it imports of the package, directly or not."""
    hosts = [module for module in trees() if module in HOST_SIDE or _top(module) in HOST_SIDE]
    assert len(hosts) > 15
    seen, todo = set(hosts), list(hosts)
    with_torch = set()
    while todo:
        module = todo.pop()
        for found in imports(module):
            if not found.typing and _top(found.target) == "torch":
                with_torch.add(module)
            known = not found.target or found.target not in trees() or found.target in seen
            if not (known or found.typing or found.deferred):
                seen.add(found.target)
                todo.append(found.target)
    assert not with_torch


def test_nobody_else_asks_about_the_device() -> None:
    found = {line for module in trees() if not may_ask(module) for line in questions(module)}
    assert not found, "ask `ops`, or whoever made the device: docs/architecture.md, Operations"
    idle = {module for module in MAY_ASK if not any(questions(module))}
    assert not idle, "no longer asks: remove from MAY_ASK"


@cache
def names_a_family(text: str) -> bool:
    return FAMILY.search(text) is not None


def named_families(module: str) -> Iterator[str]:
    """Yields names and texts of a module's code that speak of a family of models; docstrings and comments may."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [*ast.walk(trees()[module])]
    owners = [node for node in nodes if isinstance(node, kinds)]
    documented = {id(owner.body[0].value) for owner in owners if owner.body and isinstance(owner.body[0], ast.Expr)}
    for node in nodes:
        texts = [getattr(node, key, None) for key in ("id", "attr", "arg", "name", "asname")]
        if isinstance(node, ast.Constant) and id(node) not in documented:
            texts.append(node.value)
        yield from (text for text in texts if isinstance(text, str) and names_a_family(text))


@pytest.mark.slow
def test_nobody_else_names_a_family_of_models() -> None:
    modules = [module for module in trees() if not f"{module}.".startswith("models.families.")]
    found = {module: set(named_families(module)) for module in modules if FAMILY.search(texts()[module])}
    assert not {module: names for module, names in found.items() if names and module not in MAY_NAME}
    idle = {module for module in MAY_NAME if not found.get(module)}
    assert not idle, "no longer names one: remove from MAY_NAME"
    assert all(FAMILY.search(name) for name in FAMILIES), "the pattern knows all that are served"


def test_drafters_never_see_the_sampler() -> None:
    """They may couple with the target through the same noise; what was drawn they get."""
    for module in trees():
        if _top(module) == "spec":
            targets = {found.target for found in imports(module)}
            assert not targets & {
                "ops.sampling.spec",
                "ops.sampling.cpu",
                "ops.sampling.triton",
            } and "sampling" not in map(_top, targets)


def test_importing_the_package_is_light() -> None:
    """Torch takes a server 140 MB, which each of several models would have."""
    of_servers = [module for module in trees() if _top(module) == "server"]
    code = "import sys, draftwing.cli.main; from draftwing import SamplingParams; from importlib import import_module; "
    code += f"[import_module('draftwing.' + one) for one in {of_servers}]; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
