"""Targets and draft heads whose weights are constructed so that every draft is the target's greedy continuation.

The target's attention and MLP add nothing (zero o_proj and down_proj), so its residual stream is the embedding of the
token; its lm_head then maps every token to its successor in a fixed permutation. A head that sees the embedding of
the right token, and only that, predicts the same: a wrong shift, a swapped half of `fc`, a forgotten d2t or a norm
in the wrong place costs all of the accept length. Queries, keys and values stay random, so KV is still written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from reference import draft_heads
from reference.block_heads import dflash2_head, domino_head, dspark_head
from reference.checkpoints import Checkpoint, Maker, draft_vocabulary, llama_target, mimo, sizes
from torch import Tensor

MARGIN = 12.0  # the successor's logit leads by at least this much


class Exact(NamedTuple):
    target: Checkpoint
    head: Checkpoint | None  # None: built into the target (MTP)
    successor: Tensor  # [V]
    starts: list[int]  # tokens a prompt may end in: from here on the text stays inside the draft's vocabulary


class Codes(NamedTuple):
    """embedding[v] = basis code[v] with root mean square one; code[:, 0] is one for every token."""

    code: Tensor  # [V, D] of +1 and -1, rows distinct
    basis: Tensor  # [H, D], basis^T basis = (H / D) I

    @property
    def embedding(self) -> Tensor:
        return self.code @ self.basis.T

    @property
    def inverse(self) -> Tensor:
        """[D, H], gives the code back from an embedding."""
        return self.basis.T * (self.basis.shape[1] / self.basis.shape[0])


def make_codes(vocab: int, hidden: int, width: int, seed: int) -> Codes:
    """Distinct sign codes of `width` entries, lifted to `hidden` dimensions by a random scaled isometry."""
    generator = torch.Generator().manual_seed(seed)
    rows: set[tuple[float, ...]] = set()
    while len(rows) < vocab:
        bits = torch.randint(0, 2, (width - 1,), generator=generator).double() * 2 - 1
        rows.add((1.0, *bits.tolist()))
    code = torch.tensor(sorted(rows), dtype=torch.float64)[torch.randperm(vocab, generator=generator)]
    q, _ = torch.linalg.qr(torch.randn(hidden, width, generator=generator, dtype=torch.float64))
    return Codes(code, q * math.sqrt(hidden / width))


def cycles(vocab: int, kept: list[int], seed: int) -> Tensor:
    """A permutation with one cycle through the kept tokens and one through the others."""
    generator = torch.Generator().manual_seed(seed)
    successor = torch.empty(vocab, dtype=torch.int64)
    others = sorted(set(range(vocab)) - set(kept))
    for group in (kept, others):
        order = torch.tensor(group, dtype=torch.int64)[torch.randperm(len(group), generator=generator)]
        successor[order] = order.roll(-1)
    return successor


def readout(codes: Codes, norm: Tensor, before: Tensor) -> Tensor:
    """Rows of an lm_head that are largest where the normed hidden state is `norm` times the embedding of before[t].

    Two codes differ in at least one sign, so <e(u), e(u)> leads <e(u), e(v)> by 2 H / D.
    """
    hidden, width = codes.basis.shape
    return codes.embedding[before] / norm * (MARGIN / (2 * hidden / width))


def still_target(plain: Checkpoint, codes: Codes, successor: Tensor) -> Checkpoint:
    """The checkpoint with its layers silenced and its ends set to map every token to its successor."""
    tensors = dict(plain.tensors)
    for name, value in tensors.items():
        if name.startswith("model.layers.") and ("o_proj" in name or "down_proj" in name):
            tensors[name] = torch.zeros_like(value)
    tensors["model.embed_tokens.weight"] = codes.embedding
    tensors["lm_head.weight"] = readout(codes, tensors["model.norm.weight"].double(), successor.argsort())
    return Checkpoint({k: v.float() for k, v in tensors.items()}, plain.config)


def rms_gain(eps: float) -> float:
    """What RMS norm does to an embedding whose root mean square is one."""
    return 1 / math.sqrt(1 + eps)


def exact_eagle2(seed: int = 0, fc_bias: bool = False, **changes: Any) -> Exact:
    """fc passes the embedding half, scaled like the target's final norm; bias: a zero one in the file."""
    plain = llama_target(seed, **changes)
    c, hidden = plain.config, plain.config["hidden_size"]
    codes = make_codes(c["vocab_size"], hidden, hidden // 2, seed + 1)
    successor = cycles(c["vocab_size"], list(range(c["vocab_size"])), seed + 2)
    target = still_target(plain, codes, successor)
    config = sizes(architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=1, bias=fc_bias)
    config |= {k: c[k] for k in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
    make = Maker(seed + 3)
    head = make.layer("layers.0", config, norms=("post_attention_layernorm",))
    silence(head, "layers.0")
    gain = plain.tensors["model.norm.weight"].double() * rms_gain(c["rms_norm_eps"])
    head["fc.weight"] = torch.cat((gain.diag(), torch.zeros(hidden, hidden)), 1).float()
    if fc_bias:
        head["fc.bias"] = torch.zeros(hidden)
    return Exact(target, Checkpoint(head, config), successor, list(range(c["vocab_size"])))


def silence(tensors: dict[str, Tensor], layer: str) -> None:
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{layer}.{part}.weight"] = torch.zeros_like(tensors[f"{layer}.{part}.weight"])


def exact_mtp(seed: int = 0, layers: int = 1, **changes: Any) -> Exact:
    """input_proj takes the embedding half back to the embedding; the final norm is the target's."""
    plain = mimo(seed, layers, **changes)
    c, hidden = plain.config, plain.config["hidden_size"]
    codes = make_codes(c["vocab_size"], hidden, hidden // 2, seed + 1)
    successor = cycles(c["vocab_size"], list(range(c["vocab_size"])), seed + 2)
    tensors = dict(still_target(plain, codes, successor).tensors)
    for i in range(layers):
        name = f"model.mtp_layers.{i}"
        silence(tensors, name)
        undo = 1 / (tensors[f"{name}.token_layernorm.weight"].double() * rms_gain(c["rms_norm_eps"]))
        tensors[f"{name}.input_proj.weight"] = torch.cat((torch.zeros(hidden, hidden), undo.diag()), 1).float()
        tensors[f"{name}.final_layernorm.weight"] = tensors["model.norm.weight"].clone()
    return Exact(Checkpoint(tensors, c), None, successor, list(range(c["vocab_size"])))


def self_attention_weight(config: dict[str, Any], reach: int) -> float:
    """Entry that makes every query and key so large that attention stays on its own row over `reach` positions.

    With q = k = a (1, .. 1) before RoPE the score at distance n is a^2 / sqrt(D) * 2 sum_d cos(n freq_d), largest at
    n = 0; the lead must be large enough for the other rows to vanish in float32.
    """
    head_dim = draft_heads.head_counts(config)[2]
    freq = draft_heads.turn_of(config, head_dim, torch.float64).freq
    lead = (1 - torch.cos(torch.arange(1, reach)[:, None] * freq)).sum(1).min() * 2 / math.sqrt(head_dim)
    return math.sqrt(60.0 / float(lead))


def exact_eagle3(
    seed: int = 0, rows: int | None = 48, layers: int = 7, style: str = "midlayer", reach: int = 256, **changes: Any
) -> Exact:
    """norm_before_residual with a zero hidden_norm removes the feature; attention to the own row alone, whose value
    and output projections pass the embedding. rows: draft vocabulary, None for the target's own head."""
    plain = llama_target(seed, num_hidden_layers=layers, **changes)
    c, hidden, vocab = plain.config, plain.config["hidden_size"], plain.config["vocab_size"]
    config = sizes(architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=1)
    config |= {k: c[k] for k in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
    config |= {"norm_before_residual": True}
    heads, kv_heads, head_dim = draft_heads.head_counts(config)
    codes = make_codes(vocab, hidden, kv_heads * head_dim, seed + 1)
    make = Maker(seed + 3)
    if rows is None:
        kept = torch.arange(vocab)
    else:
        d2t, t2d = draft_vocabulary(vocab, rows, seed + 4)
        kept = torch.arange(rows) + d2t
        config["draft_vocab_size"] = rows
    successor = cycles(vocab, kept.tolist(), seed + 2)
    target = still_target(plain, codes, successor)
    name = "midlayer" if style == "midlayer" else "layers.0"
    head = make.layer(name, config, 2 * hidden, norms=("hidden_norm", "input_layernorm", "post_attention_layernorm"))
    head[f"{name}.hidden_norm.weight"] = torch.zeros(hidden)
    head[f"{name}.mlp.down_proj.weight"] = torch.zeros_like(head[f"{name}.mlp.down_proj.weight"])
    gain = head[f"{name}.input_layernorm.weight"].double() * rms_gain(config["rms_norm_eps"])
    decode = torch.cat((codes.inverse / gain, torch.zeros(kv_heads * head_dim, hidden)), 1)  # [D, 2H]: a -> code
    one = decode[:1] * self_attention_weight(config, reach)  # the code's constant entry
    head[f"{name}.self_attn.q_proj.weight"] = one.expand(heads * head_dim, -1)
    head[f"{name}.self_attn.k_proj.weight"] = one.expand(kv_heads * head_dim, -1)
    head[f"{name}.self_attn.v_proj.weight"] = decode
    group = heads // kv_heads  # query heads of a group see the same value: each passes its share
    lifted = codes.basis.view(hidden, kv_heads, 1, head_dim).expand(-1, -1, group, -1) / group
    head[f"{name}.self_attn.o_proj.weight"] = lifted.reshape(hidden, heads * head_dim)
    head["fc.weight"] = make.matrix(hidden, 3 * hidden)  # the residual it feeds must not count
    if rows is None:
        head["norm.weight"] = target.tensors["model.norm.weight"].clone()
    else:
        head["norm.weight"] = make.norm(hidden)
        head["lm_head.weight"] = readout(codes, head["norm.weight"].double(), successor.argsort()[kept])
        head |= {"d2t": d2t, "t2d": t2d}
    head = {k: v.float().contiguous() if v.is_floating_point() else v for k, v in head.items()}
    return Exact(target, Checkpoint(head, config), successor, kept.tolist())


def exact_dspark(
    seed: int = 0, layers: int = 7, head_changes: Mapping[str, Any] | None = None, **changes: Any
) -> Exact:
    """The Markov head alone says what follows a token: the final norm is zero, so the block's own logits are, too."""
    plain = llama_target(seed, num_hidden_layers=layers, **changes)
    hidden, vocab = plain.config["hidden_size"], plain.config["vocab_size"]
    codes = make_codes(vocab, hidden, hidden // 2, seed + 1)
    successor = cycles(vocab, list(range(vocab)), seed + 2)
    head = dspark_head(plain, seed + 3, markov_rank=hidden, **(head_changes or {}))
    head.tensors["norm.weight"].zero_()
    head.tensors["markov_head.markov_w1.weight"] = codes.embedding.float()
    head.tensors["markov_head.markov_w2.weight"] = readout(codes, torch.ones(hidden), successor.argsort()).float()
    return Exact(still_target(plain, codes, successor), head, successor, list(range(vocab)))


def exact_domino(
    seed: int = 0, layers: int = 7, head_changes: Mapping[str, Any] | None = None, **changes: Any
) -> Exact:
    """The block's first row alone says what follows the newest token, as its layers are silent; the GRU's state is the
    code of the token above, which the correction turns into what follows it, louder than what follows a mask."""
    plain = llama_target(seed, num_hidden_layers=layers, **changes)
    hidden, vocab = plain.config["hidden_size"], plain.config["vocab_size"]
    width = hidden // 2
    codes = make_codes(vocab, hidden, width, seed + 1)
    successor = cycles(vocab, list(range(vocab)), seed + 2)
    target = still_target(plain, codes, successor)
    inner = {"shift_label": True, "emb_dim": 2 * width, "gru_hidden_dim": width}
    head = domino_head(plain, seed + 3, dflash_config=inner, **(head_changes or {}))
    t = head.tensors
    for i in range(head.config["num_hidden_layers"]):
        silence(t, f"layers.{i}")
    t["norm.weight"] = target.tensors["model.norm.weight"].clone()
    constant = codes.inverse[0]  # reads 1 from every embedding
    # Nothing is kept and nothing reset: n = tanh(8 code).
    t["prefix_gru.weight_ih_l0"] = torch.cat((0 * codes.inverse, -40 * constant.expand(width, -1), 8 * codes.inverse))
    t["prefix_gru.weight_hh_l0"] = torch.zeros(3 * width, width)
    own = torch.cat((torch.zeros(width, hidden), torch.eye(width)), 1)
    t["embed_proj.0.weight"] = torch.cat((own, -own))  # silu(x) - silu(-x) = x
    louder = 3 * readout(codes, torch.ones(hidden), successor.argsort()) @ codes.basis
    t["embed_proj.2.weight"] = torch.cat((louder, -louder), 1)
    tensors = {name: value.float().contiguous() for name, value in t.items()}
    return Exact(target, Checkpoint(tensors, head.config), successor, list(range(vocab)))


def exact_dflash2(
    seed: int = 0, layers: int = 7, head_changes: Mapping[str, Any] | None = None, **changes: Any
) -> Exact:
    """Pairs alone say what follows a token, of which all are candidates: the layers are silent, the final norm leaves
    next to nothing for logits, and the projection reads the same from every row."""
    plain = llama_target(seed, num_hidden_layers=layers, **changes)
    hidden, vocab = plain.config["hidden_size"], plain.config["vocab_size"]
    codes = make_codes(vocab, hidden, hidden // 2, seed + 1)
    successor = cycles(vocab, list(range(vocab)), seed + 2)
    inner = {"selector_rank": hidden, "selector_top_k": min(vocab, 64)}
    head = dflash2_head(plain, seed + 3, dflash_config=inner, **(head_changes or {}))
    t = head.tensors
    for i in range(head.config["num_hidden_layers"]):
        silence(t, f"layers.{i}")
    t["norm.weight"] = torch.full((hidden,), 1e-3)
    t["candidate_selector.hidden_projection.weight"] = 1e3 * codes.inverse[0].expand(hidden, -1)
    t["candidate_selector.predecessor_codebook"] = codes.embedding
    t["candidate_selector.successor_codebook"] = readout(codes, torch.ones(hidden), successor.argsort())
    tensors = {name: value.float().contiguous() for name, value in t.items()}
    return Exact(still_target(plain, codes, successor), Checkpoint(tensors, head.config), successor, list(range(vocab)))


def exact_masks(**changes: Any) -> Exact:
    """`exact_eagle3` with masks for all drafts but the first, which it is right about."""
    exact = exact_eagle3(**changes)
    hidden = exact.target.config["hidden_size"]
    tensors = exact.head.tensors | {"mask_hidden": Maker(5).matrix(1, 3 * hidden)}
    return exact._replace(head=Checkpoint(tensors, exact.head.config | {"pard_token": 5}))


MAKERS = {
    # the constructor, and how much effect the target's layers get back
    "EAGLE": (exact_eagle2, 0.65),
    "EAGLE3": (exact_eagle3, 0.65),
    "DSPARK": (exact_dspark, 0.65),
    "DFLASH2": (exact_dflash2, 0.65),
    "DFLASH": (exact_domino, 0.65),  # with Domino's correction, as what follows depends on the branch
    "NEXTN": (exact_mtp, 0.8),
    "NEXTN 2 layers": (partial(exact_mtp, layers=2), 0.8),
    "NEXTN 3 layers": (partial(exact_mtp, layers=3), 0.8),
}


def disturbed(target: Checkpoint, scale: float) -> Checkpoint:
    make, tensors = Maker(99), dict(target.tensors)
    for name, value in tensors.items():
        if name.startswith("model.layers.") and ("o_proj" in name or "down_proj" in name):
            tensors[name] = make.matrix(*value.shape, scale)
    return Checkpoint(tensors, target.config)
