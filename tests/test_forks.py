"""What forked processes report arrives, and one that ends with its tests is a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # processes of their own

FILES = {
    "conftest.py": 'pytest_plugins = ["forks"]',
    "test_a.py": (
        "import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert [1, 2] == [1, 3]\n\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    ),
    "test_b.py": "import os\n\ndef test_dies():\n    if 'STATUS' in os.environ: os._exit(int(os.environ['STATUS']))\n",
}


def run(folder: Path, *more: str, **environ: str) -> subprocess.CompletedProcess[str]:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--forks", "2", *more]
    paths = {"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=paths | environ, capture_output=True, text=True, timeout=60)


def test_reports_of_all_processes_arrive(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1 and "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout
    assert "At index 1 diff: 2 != 3" in done.stdout
    assert run(tmp_path, "--deselect", "test_a.py::test_bad").returncode == 0


@pytest.mark.parametrize("status", ["0", "3"])
def test_a_process_that_ends_fails_the_run(tmp_path: Path, status: str) -> None:
    done = run(tmp_path, "--deselect", "test_a.py::test_bad", STATUS=status)
    assert done.returncode == 1 and "a process ended in test_b.py::test_dies" in done.stdout, done.stdout
