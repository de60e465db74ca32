"""What tools/train_small_hybrid.py writes is a model that the engine loads, with its prediction layer, and that drafts
for itself without a change of its text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import script

from draftwing import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def test_a_trained_model_drafts_for_itself(tmp_path: Path) -> None:
    sizes = {"steps": 12, "batch": 2, "length": 48, "vocab": 300, "hidden": 64, "layers": 4, "rate": 0.01}
    arguments = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten. " * 200)
    script(ROOT / "tools" / "train_small_hybrid.py").main([str(tmp_path / "model"), str(text), *arguments])
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "model" / "held_out.jsonl").open()]
    assert prompts and all(prompt in text.read_text() for prompt in prompts)
    params, tokens, lengths = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), {}, {}
    for algorithm, fixed in (("NONE", False), ("NEXTN", True)):
        options = dict(speculative_algorithm=algorithm, speculative_fixed_shape=fixed, dtype="float32")
        with LLM(str(tmp_path / "model"), **options) as llm:
            answers = llm.generate(prompts, params)
            tokens[algorithm] = [one.token_ids for one in answers]
            lengths[algorithm] = max(one.meta_info["spec_accept_length"] for one in answers)
    assert tokens["NEXTN"] == tokens["NONE"]
    assert lengths["NEXTN"] > 1
