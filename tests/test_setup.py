"""What setup.py builds, with a compiler that only notes what it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in_compiler import stand_in_compiler

from draftwing.ops.cpu.isa import known_sets

pytestmark = pytest.mark.slow  # processes of their own

ROOT = Path(__file__).resolve().parent.parent


def build(folder: Path, refused: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Builds into folder / "lib". refused: a flag that the compiler does not know."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", folder / "lib", "--build-temp", folder / "temp"]
    environ = {**os.environ, **stand_in_compiler(folder, refused), **environ}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)


def built(folder: Path) -> dict[str, str]:
    """{set: how its module was linked}"""
    return {path.name.split(".")[0][1:]: path.read_text() for path in (folder / "lib").rglob("*.so")}


def test_every_set_is_a_module_of_its_own_objects(tmp_path: Path) -> None:
    assert build(tmp_path, "-none").returncode == 0
    modules = built(tmp_path)
    assert set(modules) == {isa.name for isa in known_sets()}
    objects = [word for command in modules.values() for word in command.split() if word.endswith(".o")]
    assert len(objects) == len(set(objects)) and objects
    for isa in known_sets():
        compiled = next((tmp_path / "temp").rglob(f"*_{isa.name}/**/cpu.o")).read_text().split()
        assert {*isa.flags, f"-DISA={isa.name}", "-ffp-contract=off"} <= set(compiled)


@pytest.mark.skipif(len(known_sets()) < 2, reason="one set alone is known here")
def test_what_the_compiler_does_not_know_is_left_out_alone(tmp_path: Path) -> None:
    sets = known_sets()[0], known_sets()[-1]
    last = sets[-1]
    asked = ",".join(isa.name for isa in sets)
    assert build(tmp_path, last.flags[-1], DRAFTWING_BUILD_ISA=asked).returncode == 0
    assert set(built(tmp_path)) == {isa.name for isa in sets if last.flags[-1] not in isa.flags}


def test_without_a_compiler_the_install_goes_on(tmp_path: Path) -> None:
    assert build(tmp_path, "-c").returncode == 0
    assert not built(tmp_path)


def test_the_sets_that_are_asked_for_are_built(tmp_path: Path) -> None:
    assert build(tmp_path, "-none", DRAFTWING_BUILD_ISA="plain").returncode == 0
    assert set(built(tmp_path)) == {"plain"}
    refused = build(tmp_path, "-none", DRAFTWING_BUILD_ISA="plain,avx3")
    assert refused.returncode != 0 and "expected some of plain" in refused.stderr and "avx3" in refused.stderr
