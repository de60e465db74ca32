"""What programs.toml says, and the programs' packages in build/clients."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "clients"
NODE = BUILD / "node" / "node_modules" / "node" / "bin"
NONE: Mapping[str, str] = MappingProxyType({})


class Program(NamedTuple):
    """What programs.toml says of one program."""

    name: str
    title: str
    dialect: str
    folder: str  # whose packages it uses
    npm: Sequence[str] = ()
    pypi: Sequence[str] = ()
    command: Sequence[str] = ()
    script: str = ""
    environ: Mapping[str, str] = NONE
    quiet: Mapping[str, str] = NONE
    files: Mapping[str, str] = NONE
    calls: Sequence[Mapping[str, Any]] = ()
    replies: Sequence[str] = ()
    last: str = ""
    shows: Sequence[str] = ()
    looks: Mapping[str, Any] = NONE
    terminal: Mapping[str, Any] = NONE
    alone: Sequence[str] = ()
    fixtures: Mapping[str, str] = NONE
    small: Sequence[str] = ()
    refused: Sequence[str] = ()
    note: str = ""
    form: str = ""

    @property
    def packages(self) -> Sequence[str]:
        return self.npm or self.pypi


def load() -> tuple[dict[str, Program], str]:
    """All programs by name, and the version of Node.js that runs some of them."""
    tables = tomllib.loads((HERE / "programs.toml").read_text())
    node = tables.pop("node")
    programs = {}
    for name, table in tables.items():
        folder = table.pop("like", name)
        programs[name] = Program(**{"name": name, "folder": folder, **tables[folder], **table})
    return programs, node


def filled(text: str, values: dict[str, str]) -> str:
    """The text with values in place of {names}; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def split(package: str) -> tuple[str, str]:
    """Name and pinned version of a package, of PyPI (with its extras) or npm."""
    name, _, version = package.partition("==") if "==" in package else package.rpartition("@")
    return name, version


class InstallError(Exception):
    """A program cannot be had here; says what its installer said."""


def npm_install(folder: Path, packages: Sequence[str], env: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "package.json").exists():
        (folder / "package.json").write_text('{"private": true}')
    command(folder, env, "npm", "install", "--no-fund", "--no-audit", "--save-exact", *packages)


def command(folder: Path, env: Mapping[str, str], *words: str | Path) -> None:
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise InstallError(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")


def install(program: Program, newest: bool, node: str) -> Path:
    """The folder that has the program's packages. Raises InstallError."""
    folder = BUILD / program.folder / ("newest" if newest else "pinned")
    wanted = program.packages
    if newest:
        wanted = [split(package)[0] + ("@latest" if program.npm else "") for package in wanted]
    marker, mark = (
        folder / "installed.json",
        json.dumps([*wanted, node if program.npm else "", today() if newest else ""]),
    )
    if marker.exists() and marker.read_text() == mark:
        return folder
    env = {**os.environ, "PATH": f"{NODE}:{os.environ['PATH']}"}
    try:
        if program.npm:
            if not (NODE / "node").exists() or output(NODE / "node", "--version") != f"v{node}":
                npm_install(BUILD / "node", [f"node@{node}"], env)
            npm_install(folder, wanted, env)
        else:
            command(ROOT, env, sys.executable, "-m", "venv", folder / "venv")
            pip = folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"
            command(ROOT, env, *pip, *(["--upgrade"] if newest else []), *wanted)
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        raise InstallError(str(error)) from None
    marker.write_text(mark)
    return folder


def versions(program: Program, folder: Path) -> dict[str, str]:
    """Of the packages that are installed."""
    names = [split(package)[0] for package in program.packages]
    if program.npm:
        found = [json.loads((folder / "node_modules" / name / "package.json").read_text())["version"] for name in names]
        return dict(zip(names, found, strict=True))
    names = [re.sub(r"\[.*", "", name) for name in names]
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    return dict(zip(names, output(folder / "venv/bin/python", "-c", code, *names).split(), strict=True))


def output(*words: str | Path) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def today() -> str:
    return datetime.date.today().isoformat()
