"""Every kind of step of a family in every format, chunks of a prompt, single tokens and nodes of a tree, on one rank
and on two, against transformers with the same weights dequantised."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from family_files import CASES, HYBRIDS, WITH_EXPERTS, written
from hybrid_models import Pooled, check_steps
from thread_ranks import meet

from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.parallel.ranks import ALONE, Ranks

OPS = make_ops(torch.device("cpu"))
pytestmark = pytest.mark.slow
ALL_CASES = [
    (family, form, ranks)
    for (family, form), ranks in product(CASES, ["one rank", "two ranks", "whole experts"])
    if ranks != "whole experts" or family in WITH_EXPERTS
]
SOME = [
    ("deepseek-v3", "fp8 block", "two ranks"), ("deepseek-v3.2", "awq", "two ranks"),
    ("glm-5", "fp8 block", "whole experts"), ("glm4-moe", "compressed int4", "one rank"),
    ("minimax-m2", "gptq", "two ranks"), ("gemma4-per-layer", "Q4_K", "two ranks"),
    ("gemma4-experts", "compressed int4", "whole experts"), ("qwen3.5-moe", "gptq", "whole experts"),
    ("qwen3-next", "Q8_0", "two ranks"), ("kimi-linear", "Q8_0", "one rank"), ("lfm2", "awq", "one rank"),
    ("granite4-rope", "gptq", "two ranks"),
    ("nemotron-h-moe", "compressed int4", "whole experts"), ("falcon-h1-behind", "fp8 block", "two ranks"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "form", "ranks"),
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.exhaustive) for case in ALL_CASES],
)
def test_steps_equal_transformers(tmp_path: Path, family: str, form: str, ranks: str) -> None:
    if form == "Q4_K" and form not in OPS.block_kinds:
        pytest.skip("the gguf package writes no such blocks")
    theirs, path = written(tmp_path, family, form)
    near = 4e-4 if family in HYBRIDS and form == "Q4_K" else 1e-4  # wider ones, with logits twice as large

    def check(rank: Ranks) -> None:
        model: Any = load_model(path, torch.float32, "cpu", ranks=rank)
        model.pack(OPS)
        check_steps(theirs, Pooled(model, OPS), near)

    if ranks == "one rank":
        check(ALONE)
        return
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, meet(2, ranks == "whole experts")))
