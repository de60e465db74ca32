"""The references against transformers and against heads that are right by construction."""

from __future__ import annotations

import random

import pytest
import torch
from reference import checkpoints, draft_heads, exact_heads
from reference.draft_heads import draft_tree, run_target, verify_greedy

pytestmark = pytest.mark.slow

F64 = torch.float64


@pytest.fixture(scope="module", autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(checkpoints.VOCAB) for _ in range(length)]


# --- target ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "tied"])
def test_target_is_what_transformers_computes(family):
    import transformers

    make = {
        "llama": checkpoints.llama_target,
        "qwen2": checkpoints.qwen2_target,
        "tied": checkpoints.small_llama_draft,
    }[family]
    checkpoint = make(3)
    kind = transformers.Qwen2Config if family == "qwen2" else transformers.LlamaConfig
    config = kind(**{k: v for k, v in checkpoint.config.items() if k not in ("architectures", "torch_dtype")})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).to(F64).eval()
    missing, unexpected = model.load_state_dict(checkpoint.tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    tokens = text(90)
    theirs = model(torch.tensor([tokens]), output_hidden_states=True)
    ours = run_target(checkpoint.tensors, checkpoint.config, tokens)
    # their rotary angles and norms round to float32 on the way
    torch.testing.assert_close(ours.logits, theirs.logits[0], rtol=1e-4, atol=1e-4)
    for k in range(checkpoint.config["num_hidden_layers"]):
        torch.testing.assert_close(ours.streams[k], theirs.hidden_states[k][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.hidden, theirs.hidden_states[-1][0], rtol=1e-4, atol=1e-4)


# --- heads -----------------------------------------------------------------------------------------------------------

READINGS = ["target features", "chained", "first layer's rows"]


def test_mtp_layers():
    """The first of several layers is the single one; all readings agree on it, and differ on the second."""
    one, two = checkpoints.mimo(5, 1), checkpoints.mimo(5, 2)
    assert all(torch.equal(two.tensors[name], value) for name, value in one.tensors.items())
    tokens = text(14, 5)
    single = draft_heads.mtp(*one, tokens)
    later = []
    for reading in READINGS:
        torch.testing.assert_close(draft_heads.mtp(*one, tokens, reading=reading).logits((9, 8)), single.logits((9, 8)))
        double = draft_heads.mtp(*two, tokens, reading=reading)
        torch.testing.assert_close(double.logits(), single.logits())
        torch.testing.assert_close(double.kv[0][0], single.kv[0][0])
        later.append(double.logits((9,)))
        assert all((later[-1] - other).abs().max() > 0.05 for other in (single.logits((9,)), *later[:-1]))


@pytest.mark.parametrize("reading", READINGS[:2])
def test_later_mtp_layers_look_further_ahead(reading):
    """The KV of a later layer sees only as much text as its rows depend on."""
    two, tokens = checkpoints.mimo(5, 2), text(14, 5)
    draft = draft_heads.mtp(*two, tokens, reading=reading)
    assert len(draft.kv[1][0]) == len(tokens) - 2
    other = draft_heads.mtp(*two, [*tokens[:-1], (tokens[-1] + 1) % checkpoints.VOCAB], reading=reading)
    assert torch.equal(draft.kv[1][0][:-1], other.kv[1][0][:-1])
    assert not torch.equal(draft.kv[1][0][-1], other.kv[1][0][-1])
    # layer 1 after a path is layer 1 on the text that this path continues, short of that text's last features
    longer = draft_heads.mtp(*two, [*tokens, 9], reading=reading)
    torch.testing.assert_close(longer.kv[1][0][:12], draft.kv[1][0])


def test_mtp_zeroes_the_embedding_at_position_zero():
    target = checkpoints.mimo(6)
    tokens = text(9, 6)
    changed = [tokens[0], (tokens[1] + 1) % checkpoints.VOCAB, *tokens[2:]]
    keys, other = (draft_heads.mtp(*target, t).kv[0][0] for t in (tokens, changed))
    assert torch.equal(keys[0], other[0])
    assert not torch.equal(keys[1], other[1])


def test_standalone_path_logits_are_the_models():
    draft = checkpoints.small_llama_draft()
    tokens = text(10, 7)
    ours = draft_heads.standalone(*draft, tokens)
    assert torch.equal(ours.logits((4, 5)), run_target(*draft, [*tokens, 4, 5]).logits[-1])
    assert len(ours.kv) == 2 and len(ours.kv[0][0]) == 9


def test_token_map_restricts_and_renames():
    target = checkpoints.llama_target(8)
    head = checkpoints.eagle2_head(target, 8)
    tokens, kept = text(10, 8), [7, 3, 60, 3, 1]
    full = draft_heads.eagle2(*target, *head, tokens)
    cut = draft_heads.eagle2(*target, *head, tokens, token_map=kept)
    assert cut.ids.tolist() == [7, 3, 60, 1]
    torch.testing.assert_close(cut.logits((60,)), full.logits((60,))[[7, 3, 60, 1]])
    assert set(draft_tree(cut, 3, 2, 6).tokens[1:]) <= set(kept)


# --- constructed heads -----------------------------------------------------------------------------------------------

EXACT = {
    "eagle2": (lambda: exact_heads.exact_eagle2(1), "eagle2"),
    "eagle2 bias": (lambda: exact_heads.exact_eagle2(2, fc_bias=True), "eagle2"),
    "eagle3": (lambda: exact_heads.exact_eagle3(3), "eagle3"),
    "eagle3 layers": (lambda: exact_heads.exact_eagle3(4, style="layers"), "eagle3"),
    "eagle3 shared head": (lambda: exact_heads.exact_eagle3(5, rows=None), "eagle3"),
    "mtp": (lambda: exact_heads.exact_mtp(6), "mtp"),
    "mtp 4": (lambda: exact_heads.exact_mtp(7, layers=4), "mtp"),
}


def run_head(exact: exact_heads.Exact, kind: str, tokens: list[int], dtype: torch.dtype) -> draft_heads.DraftPass:
    if kind == "mtp":
        return draft_heads.mtp(*exact.target, tokens, dtype=dtype)
    return getattr(draft_heads, kind)(*exact.target, *exact.head, tokens, dtype=dtype)


@pytest.mark.further(dtype=torch.float32)
@pytest.mark.further(name=["eagle2 bias", "eagle3 layers"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_exact_heads_are_always_accepted(name, dtype):
    make, kind = EXACT[name]
    exact = make()
    steps = 4
    for topk, nodes, start, stop in ((1, 5, 6, 40), (3, 12, 90, 100), (3, 12, 200, 210)):
        # drafts are exact whatever the prompt: random tokens, the last one in the draft's vocabulary
        tokens = [*text(start, topk), exact.starts[5]]
        while len(tokens) < stop:
            tree = draft_tree(run_head(exact, kind, tokens, dtype), steps, topk, nodes)
            committed = verify_greedy(*exact.target, tokens, tree, dtype)
            assert len(committed) == steps + 1
            assert committed == [int(exact.successor[t]) for t in [tokens[-1], *committed[:-1]]]
            tokens += committed


@pytest.mark.parametrize("name", ["eagle2", "eagle3", "mtp"])
def test_a_wrong_shift_costs_an_exact_head_everything(name):
    make, kind = EXACT[name]
    exact = make()
    tokens = [*text(20), exact.starts[5]]
    shifted = run_head(exact, kind, [*tokens[:-2], tokens[-1], tokens[-2]], F64)  # the row sees another token
    truth = int(exact.successor[tokens[-1]])
    assert int(shifted.ids[shifted.logits().argmax()]) != truth
