"""What tools/train_small_seer.py writes is a model that the engine loads with its tower, and whose text is the same
with drafts as without."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import script

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def test_a_model_is_written_and_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"tower-steps": 3, "tower-batch": 4, "pictures": 4, "steps": 3, "batch": 2, "check": 4, "device": "cpu"}
    arguments = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    script(ROOT / "tools" / "train_small_seer.py").main([str(tmp_path), *arguments])
    shown = capsys.readouterr().out
    assert "tower: step 3 of 3" in shown and "decoder: step 3 of 3" in shown
    assert shown.count("; 4 are those without drafts") == 9
    assert (tmp_path / "examples" / "0.png").is_file()
