"""How long a request may take."""

from __future__ import annotations

import time
from pathlib import Path

from tiny_checkpoint import write_checkpoint

from draftwing.config.options import Options
from draftwing.engine.engine import Engine
from draftwing.engine.session import Session
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams


def test_the_time_of_a_request_begins_when_it_was_asked_for(tmp_path: Path) -> None:
    """What it waited for before the engine got it counts."""
    folder = write_checkpoint(tmp_path / "tiny")
    engine = Engine(Options(model=str(folder), device="cpu", dtype="float32", num_threads=1, request_timeout=600))
    now, params = time.monotonic(), SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    asked = {"late": now - 601, "long ago": now - 100, "now": None}
    requests = [GenerationRequest(uid, [1, 2, 3], params, arrived=arrived) for uid, arrived in asked.items()]
    ended = {output.uid: output for output in Session(engine).run(requests) if output.finish_reason is not None}
    engine.close()
    late = ended.pop("late")
    assert late.finish_reason == {"type": "abort", "message": "the request exceeded its timeout"}
    assert not late.token_ids
    assert {uid: output.finish_reason for uid, output in ended.items()} == {
        "long ago": {"type": "length", "length": 3}, "now": {"type": "length", "length": 3}
    }  # fmt: skip
