"""What is in a wheel, built with a compiler that does nothing, and what tools/build_wheels.py asks of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from scripts import script
from stand_in_compiler import stand_in_compiler

from draftwing import __version__
from draftwing.ops.cpu.isa import known_sets

pytestmark = pytest.mark.slow  # builds a wheel

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
BUILT = {isa.name for isa in known_sets()[:2]}  # test_setup.py builds all


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    environ = os.environ | stand_in_compiler(folder) | {"DRAFTWING_BUILD_ISA": ",".join(BUILT)}
    base = ["egg_info", "--egg-base", folder, "build", "--build-base", folder / "build"]
    command = [sys.executable, "setup.py", "-q", *base, "bdist_wheel", "--compression", "stored"]
    command += ["--dist-dir", folder / "dist"]
    subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True)
    (found,) = (folder / "dist").iterdir()
    return found


def test_one_wheel_is_for_every_python_and_cpu_of_its_kind(wheel: Path) -> None:
    name, version, python, abi, _ = wheel.name.removesuffix(".whl").split("-")
    assert (name, version, python, abi) == ("draftwing", __version__, "cp311", "abi3")
    modules = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert modules == {f"_{name}.abi3.so" for name in BUILT}


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path.relative_to(SOURCE) for path in (SOURCE / "draftwing").rglob("*") if path.is_file()]
    wanted = {str(path) for path in files if "__pycache__" not in path.parts and path.suffix != ".so"}
    assert wanted - names == set()
    licences = {Path(name).name for name in names if "dist-info/licenses/" in name}
    assert licences == {path.name for path in (ROOT / "LICENSE", *SOURCE.rglob("LICENSE*"))}


def test_a_wheel_without_a_module_or_of_a_newer_glibc_is_noticed(tmp_path: Path) -> None:
    tool = script(ROOT / "tools" / "build_wheels.py")
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as file:
        file.writestr("draftwing/ops/cpu/_plain.abi3.so", "")
    others = [f"draftwing/ops/cpu/_{name}.abi3.so" for name in ("dotprod", "i8mm")]
    assert tool.missing(tmp_path / "x.whl", "aarch64") == others
    assert tool.asked_glibc("a-1-cp311-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl") == (2, 27)
    assert tool.asked_glibc("a-1-cp311-abi3-manylinux_2_34_aarch64.whl") > tool.NEWEST_GLIBC


def test_extras_that_are_named_exist() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.py"), *(ROOT / "examples").rglob("*")]
    text = "".join(path.read_text(encoding="utf8") for path in files if path.is_file() and path.suffix != ".pyc")
    named = {extra for found in re.findall(r"draftwing\[([\w,-]+)\]", text) for extra in found.split(",")}
    declared = set(re.findall(r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert {"ray", "otel"} <= named <= declared
