"""Hashes of kernels are the same in whatever order they are made, else what one process compiles another would not
find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

HASHES = """
import json, random, sys
import draftwing.ops.triton.ops
from draftwing.ops.triton.hashes import hash_all
from triton.runtime.jit import JITFunction
found = {f"{name}.{key}": value for name, module in [*sys.modules.items()] if name.startswith("draftwing.ops.triton.")
         for key, value in vars(module).items() if isinstance(value, JITFunction)}
if sys.argv[1] == "all":
    hash_all()
order = sorted(found)
random.Random(int(sys.argv[2])).shuffle(order)
print(json.dumps({name: found[name].cache_key for name in order}))
"""


def hashes(way: str, seed: int) -> dict[str, str]:
    env = os.environ | {"TRITON_INTERPRET": "0"}
    run = [sys.executable, "-c", HASHES, way, str(seed)]
    return json.loads(subprocess.run(run, env=env, check=True, capture_output=True, text=True).stdout)


def test_the_order_of_launches_does_not_matter() -> None:
    found = hashes("all", 1)
    assert len(found) > 100 and found == hashes("all", 2)
    assert hashes("launched", 1) != hashes("launched", 2), "Triton has mended it: nothing has to be done any more"


def test_every_rank_hashes_before_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwing.engine import build
    from draftwing.engine.devices import pick_device

    class Hashed(Exception):
        pass

    def hashing() -> None:
        raise Hashed

    device = pick_device("cpu")
    monkeypatch.setattr(device.ops, "hash_kernels", hashing)
    monkeypatch.setattr(build, "pick_device", lambda *asked: device)
    monkeypatch.setattr(device, "set_threads", lambda *threads: None)
    setup = SimpleNamespace(options=SimpleNamespace(device="cpu", num_threads=1), rank=1)
    with pytest.raises(Hashed):
        build.build_rank(setup, lambda: None)
