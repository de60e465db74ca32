"""tools/inflate.py: a pair at a larger shape writes the text of the small pair and drafts the same tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.learnable import ENGINE, prompts, write_target

from draftwing import LLM
from draftwing.models.heads.block_config import BlockConfig
from draftwing.models.loader import load_model
from draftwing.train.checkpoint import save_head
from draftwing.train.heads import new_block_head, new_eagle3_head

pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import inflate  # noqa: E402

SHAPE = {
    "hidden_size": 80, "intermediate_size": 200, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 300,
}  # fmt: skip
KEPT = torch.arange(0, 250, 2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and the same at another shape."""
    folder = tmp_path_factory.mktemp("inflate")
    small = write_target(folder / "small")
    inflate.inflate_target(small, folder / "large", {**inflate.LLAMA_8B, **SHAPE}, torch.float32, "cpu")
    return small, folder / "large"


def work(target: Path, algorithm: str, head: Path, steps: int, topk: int, nodes: int) -> tuple[list[Any], list[Any]]:
    """Greedy text and the drafts of each step of two requests, one after the other."""
    drafts = []
    options = {
        "speculative_algorithm": algorithm, "speculative_draft_model_path": str(head), "speculative_num_steps": steps,
        "speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes, "speculative_fixed_shape": True,
    }  # fmt: skip
    with LLM(str(target), **ENGINE, **options) as llm:
        drafter = llm.engine.parts.executor.drafter
        propose = drafter.propose

        def watched(*args: Any) -> Any:
            draft = propose(*args)
            drafts.append(torch.where(draft.alive, draft.tokens * 100 + draft.parent, -1)[0].tolist())
            return draft

        drafter.propose = watched
        params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        texts = [llm.generate(one, params)[0].token_ids for one in prompts(2, 5)]
    return texts, drafts


CASES = [
    ("DSPARK", True, "vanilla"), pytest.param("DSPARK", False, "vanilla", marks=pytest.mark.exhaustive),
    ("DSPARK", True, "rnn"), pytest.param("DSPARK", True, "gated", marks=pytest.mark.exhaustive),
    ("DFLASH", False, ""), ("EAGLE3", False, ""),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "tied", "markov"), CASES)
def test_the_same_text_and_drafts(
    algorithm: str, tied: bool, markov: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    small, large = pair
    target = load_model(small, torch.float32, "cpu")
    if algorithm == "EAGLE3":
        head: Any = new_eagle3_head(target, KEPT, seed=3)
    else:
        spark = algorithm == "DSPARK"
        extra: dict[str, Any] = {"markov": markov, "rank": 8, "confidence": "markov"} if spark else {}
        block = BlockConfig((1, 3, 5), 4 + (not spark), 255, spark, (), (), tied=tied, **extra)
        head = new_block_head(target, block, KEPT, layers=2, seed=3)
    with torch.no_grad():
        for i, param in enumerate(head.parameters()):  # norms that are no ones
            if param.dim() == 1 and len(param) > 1:
                param.add_(0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(i)))
    stored = save_head(head, tmp_path / "small", torch.float32)
    arguments = ["head", str(stored), str(tmp_path / "large"), "--target", str(small), "--dtype", "float32"]
    inflate.main([*arguments, "--rank", "16" if markov == "vanilla" else "8", "--shape", str(SHAPE).replace("'", '"')])
    shape = (4, 2, 8)
    texts, drafts = work(small, algorithm, stored, *shape)
    assert (texts, drafts) == work(large, algorithm, tmp_path / "large", *shape)
    assert len({str(one) for one in drafts}) > 4, "the drafts vary"
    assert load_model(large, torch.float32, "cpu").config.num_layers == 8
