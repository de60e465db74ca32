"""The references against something else again: transformers, a worked example, a second formulation, brute force."""

from __future__ import annotations

import math
import random

import pytest
import torch
from reference import checkpoints, draft_heads, exact_heads
from reference.draft_heads import draft_tree, grow, run_target, verify_greedy

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


# --- tree ------------------------------------------------------------------------------------------------------------


def test_worked_example():
    """Flat scores .6 .3 | .30 .21 .27 .015 | .24 .03 .189 .054, K = 2, S = 3, N = 6."""
    table = {
        (): [0.6, 0.3],
        (0,): [0.5, 0.35],
        (1,): [0.9, 0.05],
        (0, 0): [0.8, 0.1],
        (1, 0): [0.7, 0.2],
    }
    tree = grow(lambda path: [math.log(p) for p in table[path]], [0, 1], root=9, position=7, steps=3, topk=2, nodes=6)
    flat = [math.exp(s) for s in tree.flat_scores]
    assert flat == pytest.approx([0.6, 0.3, 0.30, 0.21, 0.27, 0.015, 0.24, 0.03, 0.189, 0.054])
    assert tree.flat == [-1, 0, 1, 2, 4, 6]
    assert tree.parents == [0, 0, 0, 1, 2, 3]
    assert tree.depths == [0, 1, 1, 2, 2, 3]
    assert tree.positions == [7, 8, 8, 9, 9, 10]
    rows = ["".join("01"[j in mask] for j in range(6)) for mask in draft_heads.ancestors(tree)]
    assert rows == ["100000", "110000", "101000", "110100", "101010", "110101"]
    assert draft_heads.links(tree) == ([1, 3, 4, 5, -1, -1], [-1, 2, -1, -1, -1, -1])


def test_ties_go_to_the_lower_index_and_keep_the_tree_closed():
    def all_equal(path):
        return [0.0, 0.0, 0.0, -5.0]  # a probability that rounded to one, three times

    tree = grow(all_equal, [10, 11, 12, 13], root=1, position=0, steps=4, topk=3, nodes=9)
    assert tree.flat == [-1, 0, 1, 2, 3, 4, 5, 6, 7]
    assert tree.tokens[1:] == [10, 11, 12, 10, 11, 12, 10, 11]
    assert tree.parents == [0, 0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("seed", range(8))
def test_tree_properties_on_random_distributions(seed):
    rng = random.Random(seed)
    steps, topk = rng.randrange(1, 6), rng.randrange(1, 5)
    nodes = 1 + rng.randrange(1, topk + (steps - 1) * topk * topk + 1)
    rows: dict[tuple[int, ...], list[float]] = {}

    def log_probs(path):
        if path not in rows:
            logits = torch.tensor([rng.gauss(0, 2) for _ in range(8)], dtype=F64)
            rows[path] = logits.log_softmax(-1).tolist()
        return rows[path]

    tree = grow(log_probs, range(8), 0, 5, steps, topk, nodes)
    assert len(tree.tokens) == nodes and max(tree.depths) <= steps
    for i in range(1, nodes):
        path = tree.path(i)
        assert tree.parents[i] < i and tree.depths[i] == len(path) == tree.depths[tree.parents[i]] + 1
        score = sum(rows[path[:d]][path[d]] for d in range(len(path)))
        assert tree.scores[i] == pytest.approx(score)
        assert tree.scores[i] <= tree.scores[tree.parents[i]]
    assert len({tree.path(i) for i in range(nodes)}) == nodes, "siblings repeat a token"
    kept = set(tree.flat)
    worst = min(tree.scores)
    assert all(s <= worst for flat, s in enumerate(tree.flat_scores) if flat not in kept)
    if topk == 1:
        assert tree.parents == [max(0, i - 1) for i in range(nodes)]


# --- heads -----------------------------------------------------------------------------------------------------------


def slow_eagle3(target, tcfg, head, cfg, tokens, path):
    """EAGLE-3 in its plain form once more: one row at a time, a KV list, RoPE by complex numbers, no helpers."""
    w = {k.replace("midlayer.", "m."): v.double() for k, v in head.items()}
    hidden, eps = cfg["hidden_size"], cfg["rms_norm_eps"]
    heads, kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
    hd = hidden // heads

    def norm(x, name):
        return x / (x.pow(2).mean() + eps).sqrt() * w[name]

    def spin(x, pos):  # [heads, hd]
        z = torch.complex(x[:, : hd // 2].contiguous(), x[:, hd // 2 :].contiguous())
        angle = pos * 10000.0 ** (-2 * torch.arange(hd // 2).double() / hd)
        z = z * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    streams = run_target(target, tcfg, tokens[:-1]).streams
    count = tcfg["num_hidden_layers"]
    keys, values, out = [], [], None
    for i, token in enumerate([*tokens[1:], *path]):
        if i < len(tokens) - 1:
            g = w["fc.weight"] @ torch.cat([streams[k][i] for k in (2, count // 2, count - 3)])
        else:
            g = out
        e = target["model.embed_tokens.weight"][token].double()
        a = torch.cat((norm(e, "m.input_layernorm.weight"), norm(g, "m.hidden_norm.weight")))
        q = spin((w["m.self_attn.q_proj.weight"] @ a).view(heads, hd), i)
        keys.append(spin((w["m.self_attn.k_proj.weight"] @ a).view(kv_heads, hd), i))
        values.append((w["m.self_attn.v_proj.weight"] @ a).view(kv_heads, hd))
        mixed = []
        for h in range(heads):
            group = h * kv_heads // heads
            score = torch.stack([k[group] @ q[h] for k in keys]) / hd**0.5
            weight = score.exp() / score.exp().sum()
            mixed.append(sum(p * v[group] for p, v in zip(weight, values, strict=True)))
        h = g + w["m.self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = norm(h, "m.post_attention_layernorm.weight")
        gate = w["m.mlp.gate_proj.weight"] @ y
        out = h + w["m.mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * (w["m.mlp.up_proj.weight"] @ y))
    return w["lm_head.weight"] @ norm(out, "norm.weight"), torch.stack(keys), torch.stack(values)


def test_eagle3_against_a_second_formulation():
    target = checkpoints.llama_target(1, num_hidden_layers=7)
    head = checkpoints.eagle3_head(target, 5)
    tokens = text(17, 1)
    draft = draft_heads.eagle3(*target, *head, tokens)
    for path in [(), (3,), (3, 50, 7)]:
        logits, keys, values = slow_eagle3(target.tensors, target.config, head.tensors, head.config, tokens, path)
        torch.testing.assert_close(draft.logits(path), logits)
    torch.testing.assert_close(draft.kv[0][0], keys[:16])
    torch.testing.assert_close(draft.kv[0][1], values[:16])


def test_eagle2_by_hand():
    """The head's KV and root logits from its formula, with a target that hands over its features."""
    target = checkpoints.llama_target(2)
    head = checkpoints.eagle2_head(target, 6, fc_bias=True)
    tokens = text(11, 2)
    w = {k: v.double() for k, v in head.tensors.items()}
    f = run_target(*target, tokens[:-1]).hidden
    e = target.tensors["model.embed_tokens.weight"].double()[tokens[1:]]
    z = e @ w["fc.weight"][:, :32].T + f @ w["fc.weight"][:, 32:].T + w["fc.bias"]
    draft = draft_heads.eagle2(*target, *head, tokens)
    torch.testing.assert_close(draft.kv[0][1].flatten(1), z @ w["layers.0.self_attn.v_proj.weight"].T)
    assert len(draft.kv[0][0]) == len(tokens) - 1
    assert draft.logits().shape == (checkpoints.VOCAB,)
    assert draft.logits((1, 2)).shape == (checkpoints.VOCAB,)


VARIANTS = {
    "official": {},
    "theta": {"rope_theta": 500000.0},
    "before residual": {"norm_before_residual": True},
    "fc_norm": {"fc_norm": True},
    "before fc": {"norm_before_fc": True},
    "norm output": {"norm_output": True},
    "five aux": {"aux": 5, "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]},
    "two layers": {"layers": 2},
    "head_dim": {"head_dim": 16},
    "own width": {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "target_hidden_size": 32},
}


def test_every_eagle3_variant_changes_the_result():
    """The same random weights, each switch: no two switches compute the same."""
    target = checkpoints.llama_target(4, num_hidden_layers=7)
    tokens, seen = text(12, 3), {}
    for name, changes in VARIANTS.items():
        head = checkpoints.eagle3_head(target, 7, **changes)
        draft = draft_heads.eagle3(*target, *head, tokens)
        assert len(draft.kv) == changes.get("layers", 1)
        logits = draft.logits((5, 6))
        assert torch.isfinite(logits).all()
        for other, theirs in seen.items():
            assert (logits - theirs).abs().max() > 0.05, (name, other)
        seen[name] = logits


def test_layouts_and_prefixes_are_the_same_head():
    target = checkpoints.llama_target(4, num_hidden_layers=7)
    tokens = text(12, 3)
    by_name = [checkpoints.eagle3_head(target, 7, **{key: True}) for key in ("fc_norm", "use_aux_norm")]
    new, legacy = (draft_heads.eagle3(*target, *head, tokens).logits() for head in by_name)
    assert torch.equal(new, legacy)
    expected = draft_heads.eagle3(*target, *checkpoints.eagle3_head(target, 7, norm_before_residual=True), tokens)
    for style, prefix in (("midlayer", "model."), ("layers", ""), ("layers", "model."), ("speculators", "")):
        changes = {} if style == "speculators" else {"norm_before_residual": True}
        head = checkpoints.eagle3_head(target, 7, style=style, prefix=prefix, **changes)
        draft = draft_heads.eagle3(*target, *head, tokens)
        assert torch.equal(draft.logits((5,)), expected.logits((5,)))
        assert torch.equal(draft.ids, expected.ids)


@pytest.mark.parametrize(
    "ids, layers, expected",
    [
        (None, 32, [2, 16, 29]),
        ([1, 15, 28], 32, [2, 16, 29]),
        ([2, 16, 29], 32, [2, 16, 29]),
        ([24, 30, 36], 36, [24, 30, 36]),
        ([1, 11, 21], 24, [2, 12, 22]),
        ([3, 11, 21], 24, [4, 12, 22]),
    ],
)
def test_aux_ids(ids, layers, expected):
    assert draft_heads.aux_boundaries({"eagle_aux_hidden_state_layer_ids": ids}, layers) == expected
    assert draft_heads.aux_boundaries({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, layers) == expected


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


def all_heads() -> dict[str, draft_heads.DraftPass]:
    llama, deep = checkpoints.llama_target(9), checkpoints.llama_target(9, num_hidden_layers=7)
    qwen, tokens = checkpoints.qwen2_target(9), text(13, 9)
    return {
        "eagle2": draft_heads.eagle2(*llama, *checkpoints.eagle2_head(llama), tokens),
        "eagle2 qwen2": draft_heads.eagle2(*qwen, *checkpoints.eagle2_head(qwen), tokens),
        "eagle3": draft_heads.eagle3(*deep, *checkpoints.eagle3_head(deep), tokens),
        "mtp": draft_heads.mtp(*checkpoints.mimo(9), tokens),
        "mtp 3": draft_heads.mtp(*checkpoints.mimo(9, 3), tokens),
        "standalone": draft_heads.standalone(*checkpoints.small_llama_draft(), tokens),
    }


def test_trees_of_all_heads():
    for name, draft in all_heads().items():
        tree = draft_tree(draft, 3, 3, 9)
        assert tree.tokens[0] == draft.tokens[-1] and tree.positions[0] == 12, name
        assert set(tree.tokens[1:]) <= set(draft.ids.tolist())
        assert max(tree.depths) >= 2, name
        chain = draft_tree(draft, 3, 1, 4)
        assert chain.parents == [0, 0, 1, 2]
        assert tree.tokens[1] == chain.tokens[1] == int(draft.ids[draft.logits().argmax()])
        # a noise that decides everything decides the tree
        loud = torch.zeros(checkpoints.VOCAB)
        best = int(draft.ids[3])
        loud[best] = 1e4
        assert draft_tree(draft, 3, 1, 4, lambda position, loud=loud: loud).tokens[1:] == [best] * 3


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


def swap_halves(head, name):
    weight = head[name]
    half = weight.shape[1] // 2
    return {name: torch.cat((weight[:, half:], weight[:, :half]), 1)}


MUTANTS = {
    "fc order": ("eagle2", lambda e: (swap_halves(e.head.tensors, "fc.weight"), {})),
    "input_proj order": ("mtp", lambda e: (swap_halves(e.target.tensors, "model.mtp_layers.0.input_proj.weight"), {})),
    "no d2t": ("eagle3", lambda e: ({"d2t": torch.zeros_like(e.head.tensors["d2t"])}, {})),
    "residual before norm": ("eagle3", lambda e: ({}, {"norm_before_residual": False})),
    "embedding second": ("eagle3", lambda e: (swap_halves(e.head.tensors, "midlayer.self_attn.v_proj.weight"), {})),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_costs_an_exact_head_its_drafts(name):
    kind, mutate = MUTANTS[name]
    exact = EXACT[kind][0]()
    tensors, config = mutate(exact)
    if exact.head is None:
        exact = exact._replace(target=exact.target._replace(tensors=exact.target.tensors | tensors))
    else:
        head = checkpoints.Checkpoint(exact.head.tensors | tensors, exact.head.config | config)
        exact = exact._replace(head=head)
    lengths = []
    tokens = [*text(20), exact.starts[5]]
    for _ in range(6):
        tree = draft_tree(run_head(exact, kind, tokens, F64), 4, 1, 5)
        tokens += verify_greedy(*exact.target, tokens, tree)
        lengths.append(len(tokens))
    assert lengths[-1] - 21 < 6 * 3
