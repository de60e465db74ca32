"""Small random checkpoints of heads that draft a block, as z-lab (DFlash, DFlash2, Domino), DeepSpec (DSpark) and the
speculators library publish them, and their arithmetic in float64: dense, from scratch, without the package's code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from reference.checkpoints import Checkpoint, Maker, draft_vocabulary, sizes
from reference.draft_heads import (
    KV,
    DraftPass,
    cast,
    head_counts,
    linear,
    mlp,
    rms_norm,
    rotate,
    run_target,
    turn_of,
)
from torch import Tensor
from torch.nn.functional import silu

IDS = [1, 3]  # layers of the target whose outputs are read


def _body(make: Maker, config: dict[str, Any], target: Checkpoint, read: int) -> dict[str, Tensor]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    body = {"fc.weight": make.matrix(hidden, read * target.config["hidden_size"], 1.4)}
    body |= {"hidden_norm.weight": make.norm(hidden), "norm.weight": make.norm(hidden)}
    for i in range(config["num_hidden_layers"]):
        body |= make.layer(f"layers.{i}", config)
        for part in "qk":
            body[f"layers.{i}.self_attn.{part}_norm.weight"] = make.norm(head_dim)
    return body


def _config(target: Checkpoint, **changes: Any) -> dict[str, Any]:
    same = {key: target.config[key] for key in ("hidden_size", "vocab_size")}
    own = sizes(model_type="qwen3", head_dim=16, rope_theta=1e6, rms_norm_eps=1e-6, intermediate_size=40)
    return own | same | {"num_target_layers": target.config["num_hidden_layers"]} | changes


def dflash_head(target: Checkpoint, seed: int = 300, read: int = len(IDS), **changes: Any) -> Checkpoint:
    """z-lab's layout. read: hidden states of the target that fc reads.  changes: config keys; those of `dflash_config`
    are merged into it."""
    inner = {"mask_token_id": 5, "target_layer_ids": IDS} | changes.pop("dflash_config", {})
    names = {"architectures": ["DFlashDraftModel"], "block_size": 6, "dflash_config": inner}
    config = _config(target, **names | changes)
    return Checkpoint(_body(Maker(seed), config, target, read), config)


def domino_head(target: Checkpoint, seed: int = 600, **changes: Any) -> Checkpoint:
    """A DFlash head with Domino's correction, in z-lab's layout. changes: as for `dflash_head`."""
    inner = {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 10, "pure_draft_prefix_len": 1}
    head = dflash_head(target, dflash_config=inner | changes.pop("dflash_config", {}), **changes)
    make, hidden, vocab = Maker(seed), head.config["hidden_size"], head.config["vocab_size"]
    more = {
        "prefix_gru.weight_ih_l0": make.matrix(30, hidden, 8.0),  # rows of an embedding are small
        "prefix_gru.weight_hh_l0": make.matrix(30, 10),
        "embed_proj.0.weight": make.matrix(8, hidden + 10, 2.0),
        "embed_proj.2.weight": make.matrix(vocab, 8, 2.0),
    }
    return Checkpoint(head.tensors | more, head.config)


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def dflash2_parts(config: dict[str, Any], seed: int, own: dict[str, Any]) -> dict[str, Tensor]:
    """What a DFlash2 head has besides a DFlash head's tensors. own: the keys of `DFLASH2`."""
    make, hidden, vocab = Maker(seed), config["hidden_size"], config["vocab_size"]
    taps, rank = own["conv_kernel_size"], own["selector_rank"]
    body = {"candidate_selector.hidden_projection.weight": make.matrix(rank, hidden)}
    for part in ("predecessor", "successor"):
        body[f"candidate_selector.{part}_codebook"] = make.matrix(vocab, rank, 2.0)
    for i in range(config["num_hidden_layers"]):
        for part in ("attention", "mlp"):
            name = f"layers.{i}.{part}_conv"
            body[f"{name}.base_kernel"] = make.vector(2 * taps * hidden, 1.0).view(2, taps, hidden)
            body[f"{name}.kernel_projection.weight"] = make.matrix(2 * taps * hidden // own["conv_group_size"], hidden)
    return body


def dflash2_head(target: Checkpoint, seed: int = 700, **changes: Any) -> Checkpoint:
    """z-lab's layout. changes: as for `dflash_head`."""
    inner = {"block_size": 6, **DFLASH2} | changes.pop("dflash_config", {})
    names = {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    head = dflash_head(target, dflash_config=inner, **names | changes)
    del head.config["block_size"]  # it is in `dflash_config`
    return Checkpoint(head.tensors | dflash2_parts(head.config, seed, inner), head.config)


def dspark_head(target: Checkpoint, seed: int = 400, confidence: bool = True, **changes: Any) -> Checkpoint:
    """DeepSpec's layout, with frozen copies of the target's ends, here of random values that nobody may use."""
    config = _config(
        target, **{
            "architectures": ["Qwen3DSparkModel"], "block_size": 5, "target_layer_ids": IDS, "mask_token_id": 5,
            "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": confidence,
            "confidence_head_with_markov": True, **changes,
        }
    )  # fmt: skip
    make, vocab, hidden, rank = Maker(seed), config["vocab_size"], config["hidden_size"], config["markov_rank"]
    body = _body(make, config, target, len(config["target_layer_ids"]))
    body |= {"embed_tokens.weight": make.matrix(vocab, hidden), "lm_head.weight": make.matrix(vocab, hidden)}
    body["markov_head.markov_w1.weight"] = make.matrix(vocab, rank, rank**0.5)
    body["markov_head.markov_w2.weight"] = make.matrix(vocab, rank, 2.0)
    if config["markov_head_type"] == "gated":
        body["markov_head.gate_proj.weight"] = make.matrix(rank, hidden + rank)
        body["markov_head.gate_proj.bias"] = make.vector(rank)
    if config["markov_head_type"] == "rnn":
        body["markov_head.joint_proj.weight"] = make.matrix(3 * rank, 2 * rank + hidden, 2.0)
        body["markov_head.joint_proj.bias"] = make.vector(3 * rank)
    if confidence:
        body["confidence_head.proj.weight"] = make.matrix(1, hidden + rank)
        body["confidence_head.proj.bias"] = make.vector(1)
    return Checkpoint(body, config)


def speculators_head(
    target: Checkpoint, kind: str = "dspark", rows: int = 8, seed: int = 500, tied: bool = False, **changes: Any
) -> Checkpoint:
    """The speculators library's layout: the layers' config apart, a vocabulary of its own, ids of boundaries. tied: the
    lm_head is left out, where its rows are the target's."""
    layers = _config(target, num_hidden_layers=2)
    outer = {
        "architectures": [f"{kind.title()}DraftModel"], "speculators_model_type": kind, "block_size": 5,
        "mask_token_id": 5, "aux_hidden_state_layer_ids": [one + 1 for one in IDS], "draft_vocab_size": rows,
        "transformer_layer_config": layers, **changes,
    }  # fmt: skip
    make, vocab, hidden = Maker(seed), layers["vocab_size"], layers["hidden_size"]
    body = _body(make, layers, target, len(IDS))
    body |= {"embed_tokens.weight": make.matrix(vocab, hidden), "lm_head.weight": make.matrix(rows, hidden, 3.0)}
    if tied:
        del body["lm_head.weight"]
    body |= dict(zip(("d2t", "t2d"), draft_vocabulary(vocab, rows, seed), strict=True))
    if kind == "dflash2":
        outer |= DFLASH2
        body |= dflash2_parts(layers, seed + 1, DFLASH2)
    if kind == "dspark":
        outer |= {"markov_rank": 8, "markov_head_type": "vanilla"}
        body["markov_head.markov_w1.weight"] = make.matrix(vocab, 8, 8**0.5)
        body["markov_head.markov_w2.weight"] = make.matrix(rows, 8, 2.0)
    return Checkpoint(body, outer)


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q [n, heads, D], k, v [m, kv_heads, D], seen [n, m] -> [n, heads * D]"""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def block_rows(
    head: Checkpoint, w: dict[str, Tensor], block: Tensor, aux_hidden: Tensor, windows: Sequence[int],
    causal: Sequence[bool],
) -> tuple[Tensor, list[KV]]:  # fmt: skip
    """The normed states of a block's rows, of which block [rows, H] is the embedding, after a text whose hidden states
    of the target are aux_hidden [T, ...]; and the text's keys and values. w: the head's weights."""
    config = head.config.get("transformer_layer_config", head.config)
    block = block * config.get("dflash_config", {}).get("input_embedding_scale", 1)
    dim, eps, rows, last = head_counts(config)[2], config["rms_norm_eps"], len(block), len(aux_hidden)
    turn = turn_of(config, dim, torch.float64)
    known, places = torch.arange(last), torch.arange(last, last + rows)
    c, x = rms_norm(linear(aux_hidden, w, "fc"), w["hidden_norm.weight"], eps), block
    kv: list[KV] = []

    def heads_of(z: Tensor, name: str, part: str, at: Tensor) -> Tensor:
        y = linear(z, w, f"{name}.{part}_proj").view(len(z), -1, dim)
        return y if part == "v" else rotate(rms_norm(y, w[f"{name}.{part}_norm.weight"], eps), at, turn)

    for i in range(config["num_hidden_layers"]):
        name = f"layers.{i}.self_attn"
        h = rms_norm(x, w[f"layers.{i}.input_layernorm.weight"], eps)
        h, after_attention = convolved(w, f"layers.{i}.attention_conv", h)
        of_text = tuple(heads_of(c, name, part, known) for part in "kv")
        of_block = tuple(heads_of(h, name, part, places) for part in "kv")
        kv.append(of_text)
        reach = known > last - windows[i] if windows[i] else known >= 0
        inside = torch.ones(rows, rows, dtype=torch.bool)
        seen = torch.cat((reach.expand(rows, -1), inside.tril() if causal[i] else inside), 1)
        keys, values = (torch.cat(pair) for pair in zip(of_text, of_block, strict=True))
        x = x + after_attention(
            linear(_attend(heads_of(h, name, "q", places), keys, values, seen), w, f"{name}.o_proj")
        )
        h = rms_norm(x, w[f"layers.{i}.post_attention_layernorm.weight"], eps)
        h, after_mlp = convolved(w, f"layers.{i}.mlp_conv", h)
        x = x + after_mlp(mlp(h, w, f"layers.{i}.mlp"))
    return rms_norm(x, w["norm.weight"], eps), kv


def convolved(w: dict[str, Tensor], name: str, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """DFlash2: what a sublayer reads in place of x [rows, H], and what is done with what it makes of that; both are as
    they are without a convolution. Row by row, channel by channel."""
    if f"{name}.base_kernel" not in w:
        return x, lambda made: made
    base, (rows, hidden) = w[f"{name}.base_kernel"], x.shape
    _, taps, _ = base.shape
    groups = len(w[f"{name}.kernel_projection.weight"]) // (2 * taps)
    dynamic = linear(x, w, f"{name}.kernel_projection").view(rows, 2, taps, groups)

    def side(which: int, z: Tensor) -> Tensor:
        out = torch.zeros_like(z)
        for t in range(rows):
            for c in range(hidden):
                for tap in range(min(taps, t + 1)):
                    factor = base[which, tap, c] + dynamic[t, which, tap, c // (hidden // groups)]
                    out[t, c] += factor * z[t - tap, c]
        return out

    return side(0, x), lambda made: side(1, made)


def paired(w: dict[str, Tensor], count: int, logits: Tensor, row: Tensor, above: int) -> Tensor:
    """DFlash2: log scores of all tokens after the token above; logits with their noise, of the row's state. Only the
    most likely ones can follow, and share the probability that they have together."""
    likely = logits.log_softmax(0)
    chosen = likely.topk(count).indices
    gate = w["candidate_selector.predecessor_codebook"][above] * linear(row, w, "candidate_selector.hidden_projection")
    scores = likely[chosen] + w["candidate_selector.successor_codebook"][chosen] @ gate
    scores = scores.log_softmax(0) + likely[chosen].logsumexp(0)
    return torch.full_like(logits, -math.inf).scatter(0, chosen, scores)


def corrected(w: dict[str, Tensor], lm_head: Tensor, y: Tensor, tokens: Sequence[int], embed: Tensor) -> Tensor:
    """The logits of what follows some drafted tokens, the newest token of the text before them; y: states of the
    rows, embed: the target's embedding."""
    row, logits = y[len(tokens) - 1], lm_head @ y[len(tokens) - 1]
    if "prefix_gru.weight_ih_l0" in w and len(tokens) > 1:
        fed = silu(w["embed_proj.0.weight"] @ torch.cat((row, gru(w, embed[torch.tensor(tokens)]))))
        logits = logits + w["embed_proj.2.weight"] @ fed
    if "markov_head.markov_w1.weight" in w:
        e = w["markov_head.markov_w1.weight"][tokens[-1]]
        if "markov_head.gate_proj.weight" in w:
            e = torch.sigmoid(linear(torch.cat((row, e)), w, "markov_head.gate_proj")) * e
        if "markov_head.joint_proj.weight" in w:
            e = recurrent(w, tokens, y)
        logits = logits + w["markov_head.markov_w2.weight"] @ e
    return logits


def gru(w: dict[str, Tensor], read: Tensor) -> Tensor:
    """torch's own GRU without biases, after all of read [n, H]."""
    hidden = w["prefix_gru.weight_hh_l0"].shape[1]
    module = torch.nn.GRU(read.shape[1], hidden, bias=False, dtype=read.dtype)
    weights = {name.removeprefix("prefix_gru."): value for name, value in w.items() if name.startswith("prefix_gru.")}
    _, state = torch.func.functional_call(module, weights, (read,))
    return state[0]


def recurrent(w: dict[str, Tensor], tokens: Sequence[int], y: Tensor) -> Tensor:
    """What W2 is fed after some drafted tokens, the newest token of the text before them; y: states of the rows."""
    state = out = torch.zeros(w["markov_head.markov_w1.weight"].shape[1], dtype=y.dtype)
    for token, row in zip(tokens, y, strict=False):
        fed = torch.cat((state, w["markov_head.markov_w1.weight"][token], row))
        gate, fresh, out = linear(fed, w, "markov_head.joint_proj").chunk(3)
        state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(fresh)
    return torch.tanh(out)


def _states(
    target: Checkpoint, head: Checkpoint, tokens: Sequence[int], rows: int, from_anchor: bool, windows: Sequence[int],
    causal: Sequence[bool],
) -> tuple[Tensor, list[KV]]:  # fmt: skip
    """States of the rows that predict, and keys and values of the text."""
    w, t = cast(head.tensors, torch.float64), cast(target.tensors, torch.float64)
    *text, newest = tokens
    streams = run_target(target.tensors, target.config, text).streams
    config = head.config | head.config.get("dflash_config", {})
    boundaries = config.get("aux_hidden_state_layer_ids") or [i + 1 for i in config["target_layer_ids"]]
    aux_hidden = torch.cat([streams[i] for i in boundaries], 1)
    ids = torch.tensor([newest] + [config["mask_token_id"]] * (rows - 1))
    y, kv = block_rows(head, w, t["model.embed_tokens.weight"][ids], aux_hidden, windows, causal)
    return y[0 if from_anchor else 1 :], kv


def accepted(target: Checkpoint, head: Checkpoint, tokens: Sequence[int], rows: int, path: Sequence[int]) -> float:
    """What a DSpark head without windows says of how often a token is accepted after some drafted ones."""
    w = cast(head.tensors, torch.float64)
    y, _ = _states(target, head, tokens, rows, True, (0, 0), (False, False))
    fed = torch.cat((y[len(path)], w["markov_head.markov_w1.weight"][(tokens[-1], *path)[-1]]))
    return torch.sigmoid(linear(fed, w, "confidence_head.proj")).item()


def block_pass(
    target: Checkpoint, head: Checkpoint, tokens: Sequence[int], rows: int, from_anchor: bool,
    windows: Sequence[int] = (0, 0), causal: Sequence[bool] = (False, False),
) -> DraftPass:  # fmt: skip
    """What the head knows after x_0 .. x_T, of which the target has not seen x_T; as plain as the formats have it.

    rows, from_anchor, windows (0: none), causal: what its config is expected to say.
    """
    w, t, newest = cast(head.tensors, torch.float64), cast(target.tensors, torch.float64), tokens[-1]
    y, kv = _states(target, head, tokens, rows, from_anchor, windows, causal)
    own = "d2t" in w
    lm_head = w["lm_head.weight"] if own else t.get("lm_head.weight", t["model.embed_tokens.weight"])
    ids = torch.arange(len(lm_head)) + (w["d2t"] if own else 0)

    def at(path: tuple[int, ...]) -> Tensor:
        return corrected(w, lm_head, y, (newest, *path), t["model.embed_tokens.weight"])

    flat = head.config | head.config.get("dflash_config", {})

    def scaled(path: tuple[int, ...]) -> Tensor:
        logits, cap = at(path) * flat.get("output_multiplier", 1), flat.get("final_logit_softcapping")
        return cap * torch.tanh(logits / cap) if cap else logits

    def choose(path: tuple[int, ...], logits: Tensor) -> Tensor:
        every = logits  # by the target's ids, as codebooks are
        if own:
            every = logits.new_full((len(w["t2d"]),), -math.inf).scatter(0, ids, logits)
        return paired(w, flat["selector_top_k"], every, y[len(path)], (newest, *path)[-1])[ids]

    if "candidate_selector.predecessor_codebook" not in w:
        return DraftPass(list(tokens), kv, ids, scaled)
    return DraftPass(list(tokens), kv, ids, scaled, choose=choose)
