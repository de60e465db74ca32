"""Float64 references of a target model and of every kind of draft head, in dense torch and nothing else.

Written from the published formats only; it shares no code with the package. Everything is recomputed from scratch from
the committed text x_0 .. x_T, whose last token x_T is not yet in the target's KV: no cache, no slots, no tree masks.
The logits of a tree node come from a dense pass over the committed text and that node's own path, so whatever an
engine does to share work between branches has to agree with this.

Tensors are a dict of Hugging Face names, configurations are parsed `config.json` dicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Config = Mapping[str, Any]
KV = tuple[Tensor, Tensor]  # keys after RoPE, values: [rows, kv_heads, head_dim] each


# --- the arithmetic every model shares ----------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def linear(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    """x W^T, plus the bias if the checkpoint has one."""
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


class Turn(NamedTuple):
    """How queries and keys are turned: radians per position of each pair, and what cosine and sine are scaled with."""

    freq: Tensor
    scale: float


def turn_of(config: Config, head_dim: int, dtype: torch.dtype) -> Turn:
    """Of a head of so many elements, of which a share may be turned. theta is the config's own, 10000 where it names
    none. Newer configs have one object for all that older ones have in two places."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind, scale = given.get("rope_type", given.get("type", "default")), 1.0
    turned = int(head_dim * (given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1))
    dims = head_dim if kind == "proportional" else turned
    freq = theta ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    if kind == "proportional":  # other pairs stay, and are counted
        freq[turned // 2 :] = 0
    elif kind == "linear":
        freq = freq / given["factor"]
    elif kind == "llama3":
        low, high, factor = given["low_freq_factor"], given["high_freq_factor"], given["factor"]
        turns = given["original_max_position_embeddings"] * freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = keep * freq + (1 - keep) * freq / factor
    elif kind == "yarn":
        freq, scale = yarn(given, freq, theta, dims)
    else:
        assert kind in ("default", "mrope"), kind  # of text alone the three positions of mrope are one
    return Turn(freq.to(dtype), scale)


def yarn(given: Config, freq: Tensor, theta: float, dims: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): pairs that turn less than `beta_slow` times within the original context are slowed
    down by the factor, those that turn more than `beta_fast` times are left, with a ramp over the pairs between; and
    the scale of cosine and sine."""
    factor, original = given["factor"], given["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(given.get("beta_fast", 32)), pair(given.get("beta_slow", 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = ((torch.arange(dims // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)

    def mscale(of: float) -> float:
        return 0.1 * of * math.log(factor) + 1 if factor > 1 else 1.0

    some, every = given.get("mscale"), given.get("mscale_all_dim")
    return freq * (1 - ramp) + freq / factor * ramp, mscale(some) / mscale(every) if some and every else mscale(1)


def rotate(x: Tensor, positions: Tensor, turn: Turn) -> Tensor:
    """Half-rotation RoPE: x [n, heads, head_dim]; component d pairs with d + half of those that are turned."""
    angle = positions.to(turn.freq.dtype)[:, None, None] * turn.freq  # [n, 1, dims / 2]
    cos, sin = angle.cos() * turn.scale, angle.sin() * turn.scale
    half = len(turn.freq)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def head_counts(config: Config) -> tuple[int, int, int]:
    heads = config["num_attention_heads"]
    return heads, config.get("num_key_value_heads") or heads, config.get("head_dim") or config["hidden_size"] // heads


def attention(x: Tensor, positions: Tensor, tensors: Tensors, name: str, config: Config) -> tuple[Tensor, KV]:
    """Causal self-attention over the rows of x in order: x [n, in] -> [n, H], and the rows' KV."""
    heads, kv_heads, head_dim = head_counts(config)
    turn = turn_of(config, head_dim, x.dtype)
    q = linear(x, tensors, f"{name}.q_proj").view(-1, heads, head_dim)
    k = linear(x, tensors, f"{name}.k_proj").view(-1, kv_heads, head_dim)
    v = linear(x, tensors, f"{name}.v_proj").view(-1, kv_heads, head_dim)
    if f"{name}.q_norm.weight" in tensors:
        q = rms_norm(q, tensors[f"{name}.q_norm.weight"], config["rms_norm_eps"])
        k = rms_norm(k, tensors[f"{name}.k_norm.weight"], config["rms_norm_eps"])
    q, k = rotate(q, positions, turn), rotate(k, positions, turn)
    group = heads // kv_heads
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(head_dim)
    past = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    kinds = config.get("layer_types")
    if kinds and kinds[int(name.split("layers.")[1].split(".")[0])] == "sliding_attention":
        past &= positions[:, None] - positions < config["sliding_window"]
    if "known" in config:
        past &= positions[:, None] - positions < config["known"]
    weights = scores.masked_fill(~past, -math.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, values).reshape(len(x), heads * head_dim)
    return linear(mixed, tensors, f"{name}.o_proj"), (k, v)


def mlp(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    gate = linear(x, tensors, f"{name}.gate_proj")
    return linear(gate * torch.sigmoid(gate) * linear(x, tensors, f"{name}.up_proj"), tensors, f"{name}.down_proj")


def decoder_layer(
    x: Tensor, positions: Tensor, tensors: Tensors, name: str, config: Config, norm: str | None = "input_layernorm"
) -> tuple[Tensor, KV]:
    """One pre-norm decoder layer; norm: name of the weight before attention, None for no norm there."""
    eps = config["rms_norm_eps"]
    inner = x if norm is None else rms_norm(x, tensors[f"{name}.{norm}.weight"], eps)
    mixed, kv = attention(inner, positions, tensors, f"{name}.self_attn", config)
    h = x + mixed
    return h + mlp(rms_norm(h, tensors[f"{name}.post_attention_layernorm.weight"], eps), tensors, f"{name}.mlp"), kv


def cast(tensors: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}


# --- the target ------------------------------------------------------------------------------------------------------


class TargetPass(NamedTuple):
    """streams[k] [n, H]: residual stream after k layers (0: embedding, L: before the final norm)."""

    streams: list[Tensor]
    hidden: Tensor  # [n, H] after the final norm
    logits: Tensor  # [n, V]
    kv: list[KV]


def lm_head_weight(tensors: Tensors) -> Tensor:
    """[V, H]; a checkpoint without a head of its own ties it to the embedding."""
    return tensors["lm_head.weight"] if "lm_head.weight" in tensors else tensors["model.embed_tokens.weight"]


def run_target(tensors: Tensors, config: Config, tokens: Sequence[int]) -> TargetPass:
    """A Llama, Qwen2, Qwen3 or MiMo target over `tokens` at positions 0, 1, .. (MTP layers are not looked at)."""
    w = cast(tensors, torch.float64)
    positions = torch.arange(len(tokens))
    x = w["model.embed_tokens.weight"][torch.as_tensor(tokens)]
    streams, kvs = [x], []
    for i in range(config["num_hidden_layers"]):
        x, kv = decoder_layer(x, positions, w, f"model.layers.{i}", config)
        streams.append(x)
        kvs.append(kv)
    hidden = rms_norm(x, w["model.norm.weight"], config["rms_norm_eps"])
    return TargetPass(streams, hidden, hidden @ lm_head_weight(w).T, kvs)


# --- draft heads -----------------------------------------------------------------------------------------------------


@dataclass
class DraftPass:
    """What a draft head knows after the committed text.

    kv: per draft layer, of the rows 0 .. rows - 1, row i in slot i at RoPE position i.  ids [Vd]: the target id of
    each draft row.  at(path): draft logits [Vd] for the token that follows the committed text and the path.
    choose(path, logits): log scores of these, once they have noise, where a head does more than to normalise.
    """

    tokens: list[int]  # x_0 .. x_T
    kv: list[KV]
    ids: Tensor
    at: Callable[[tuple[int, ...]], Tensor]
    hidden: Tensor | None = None  # [H] what the seed row feeds back, None for STANDALONE
    choose: Callable[[tuple[int, ...], Tensor], Tensor] = lambda path, logits: logits.log_softmax(-1)
    memo: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def logits(self, path: tuple[int, ...] = ()) -> Tensor:
        if path not in self.memo:
            self.memo[path] = self.at(path)
        return self.memo[path]


class StepOut(NamedTuple):
    feedback: Tensor  # [n, H] the feature that a draft-produced row hands on
    logits: Tensor  # [n, Vd]
    kv: list[KV]


def chained(
    tokens: Sequence[int],
    features: Tensor,
    embed: Tensor,
    ids: Tensor,
    step: Callable[[Tensor, Tensor, Tensor], StepOut],
) -> DraftPass:
    """A head whose row i combines e(x_{i+1}) with a feature of row i, at position i.

    features [T, H] come from the target; the row after a draft-produced one takes that row's feedback.
    step(embeddings [n, H], features [n, H], positions [n]) runs the head over n rows densely.
    """
    tokens = list(tokens)
    known = len(tokens) - 1
    assert features.shape[0] == known >= 1

    def run(follow: list[int], feats: Tensor) -> StepOut:
        return step(embed[torch.tensor(follow)], feats, torch.arange(len(follow)))

    clean = run(tokens[1:], features)
    fed: dict[tuple[int, ...], Tensor] = {(): features}  # features of all rows of a path

    def at(path: tuple[int, ...]) -> Tensor:
        out = run([*tokens[1:], *path], features_of(path))
        return out.logits[-1]

    def features_of(path: tuple[int, ...]) -> Tensor:
        if path not in fed:
            before = features_of(path[:-1])
            last = run([*tokens[1:], *path[:-1]], before).feedback[-1:]
            fed[path] = torch.cat((before, last))
        return fed[path]

    return DraftPass(tokens, clean.kv, ids, at, clean.feedback[-1])


def masked(
    tokens: Sequence[int], features: Tensor, embed: Tensor, ids: Tensor,
    step: Callable[[Tensor, Tensor, Tensor], StepOut], mask: int, feature: Tensor,
) -> DraftPass:  # fmt: skip
    """As `chained`, of a head that knows nothing of a path but its length: rows after the newest token's are those of a
    mask, whose token and feature [1, H] are always the same."""

    def run(more: int) -> StepOut:
        follow = torch.tensor([*tokens[1:], *[mask] * more])
        return step(embed[follow], torch.cat((features, feature.expand(more, -1))), torch.arange(len(follow)))

    clean = run(0)
    return DraftPass(list(tokens), clean.kv, ids, lambda path: run(len(path)).logits[-1], clean.feedback[-1])


def own_names(tensors: Tensors) -> dict[str, Tensor]:
    """A head's tensors under one spelling: no `model.` prefix, `layers.0` for `midlayer`, `fc_norm.i` for aux norms."""
    out = {}
    for name, value in tensors.items():
        name = name.removeprefix("model.")
        name = "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
        for i, part in enumerate(("low", "mid", "high")):
            name = name.replace(f"aux_norm_{part}.", f"fc_norm.{i}.")
        out[name] = value
    return out


def eagle2(
    target: Tensors, target_config: Config, head: Tensors, config: Config, tokens: Sequence[int],
    token_map: Sequence[int] | None = None,
) -> DraftPass:  # fmt: skip
    """EAGLE-1/2: z = fc([e; f]), one layer without an input norm, the target's head on its output without a norm."""
    w, t = own_names(cast(head, torch.float64)), cast(target, torch.float64)
    config = near(config, target_config)
    features = run_target(target, target_config, tokens[:-1]).hidden
    # All of the target's ids, or the map's without duplicates.
    ids = torch.tensor(list(dict.fromkeys(token_map or range(target_config["vocab_size"]))))

    def step(e: Tensor, f: Tensor, positions: Tensor) -> StepOut:
        x, kvs = linear(torch.cat((e, f), -1), w, "fc"), []
        for i in range(config.get("num_hidden_layers", 1)):
            norm = "input_layernorm" if i and f"layers.{i}.input_layernorm.weight" in w else None
            x, kv = decoder_layer(x, positions, w, f"layers.{i}", config, norm)
            kvs.append(kv)
        return StepOut(x, x @ lm_head_weight(t)[ids].T, kvs)

    return chained(tokens, features, t["model.embed_tokens.weight"], ids, step)


def near(config: Config, target: Config) -> Config:
    """With how far layers of a head see that knows fewer positions than the target."""
    known = config.get("max_position_embeddings")
    return {**config, "known": known} if known is not None and known < target["max_position_embeddings"] else config


def flat_config(config: Config) -> dict[str, Any]:
    """The `speculators` layout flattened: the layer's config overlaid with the top-level keys."""
    if "transformer_layer_config" not in config:
        return dict(config)
    flat = {**config["transformer_layer_config"], **config}
    flat.setdefault("norm_before_residual", True)
    return flat


def aux_boundaries(config: Config, layers: int, convention: str | None = None) -> list[int]:
    """Which residual streams feed EAGLE-3, as numbers of layers already run.

    Explicit ids count layer outputs ("output": id k is the stream after k + 1 layers) or boundaries ("boundary").
    """
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return [2, layers // 2, layers - 3]
    if convention is None:
        convention = "boundary" if max(ids) == layers or ids[0] == 2 else "output"
    return [k + 1 if convention == "output" else k for k in ids]


def eagle3(
    target: Tensors, target_config: Config, head: Tensors, config: Config, tokens: Sequence[int],
    convention: str | None = None, streams: Sequence[int] | None = None,
) -> DraftPass:  # fmt: skip
    """EAGLE-3 with its variants. Draft layers after the first are plain decoder layers over the residual stream; their
    norm before attention is whichever of `hidden_norm` and `input_layernorm` the file has.

    streams: residual streams that it reads, where these are known.
    """
    w, t = own_names(cast(head, torch.float64)), cast(target, torch.float64)
    c = near(flat_config(config), target_config)
    eps = c["rms_norm_eps"]
    nested = c.get("eagle_config") or {}
    ran = run_target(target, target_config, tokens[:-1])
    last_alone = nested.get("use_aux_hidden_state") is False

    def fused(chosen: Sequence[Tensor]) -> Tensor:
        if c.get("fc_norm") or c.get("use_aux_norm"):
            chosen = [rms_norm(x, w[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(chosen)]
        aux = torch.cat(tuple(chosen), -1)
        if c.get("norm_before_fc") or nested.get("norm_before_fc"):
            aux = rms_norm(aux, w["input_norm.weight"], eps)
        return aux if last_alone else linear(aux, w, "fc")

    read = streams or aux_boundaries(c, target_config["num_hidden_layers"], convention)
    features = fused([ran.hidden] if last_alone else [ran.streams[k] for k in read])
    rows = c.get("draft_vocab_size") or target_config["vocab_size"]
    ids = torch.arange(rows) + w.get("d2t", 0)
    head_weight = w["lm_head.weight"] if "lm_head.weight" in w else lm_head_weight(t)
    masks = "mask_hidden" in w
    other_size = c.get("target_hidden_size") not in (None, c["hidden_size"])
    own_embedding = other_size or (masks and "embed_tokens.weight" in w)
    embed = w["embed_tokens.weight"] if own_embedding else t["model.embed_tokens.weight"]

    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("layers."))

    def first_layer(e: Tensor, g: Tensor, positions: Tensor) -> tuple[Tensor, KV]:
        normed = rms_norm(g, w["layers.0.hidden_norm.weight"], eps)
        a = torch.cat((rms_norm(e, w["layers.0.input_layernorm.weight"], eps), normed), -1)
        mixed, kv = attention(a, positions, w, "layers.0.self_attn", c)
        h = (normed if c.get("norm_before_residual") else g) + mixed
        return h + mlp(rms_norm(h, w["layers.0.post_attention_layernorm.weight"], eps), w, "layers.0.mlp"), kv

    def step(e: Tensor, g: Tensor, positions: Tensor) -> StepOut:
        x, kv = first_layer(e, g, positions)
        kvs = [kv]
        for i in range(1, layers):
            norm = "hidden_norm" if f"layers.{i}.hidden_norm.weight" in w else "input_layernorm"
            x, kv = decoder_layer(x, positions, w, f"layers.{i}", c, norm)
            kvs.append(kv)
        normed = rms_norm(x, w["norm.weight"], eps)
        return StepOut(normed if c.get("norm_output") else x, normed @ head_weight.T, kvs)

    if masks:
        mask, *_ = (c[key] for key in ("pard_token", "ptd_token_id", "mask_token_id") if c.get(key) is not None)
        size = target_config["hidden_size"]
        feature = fused(w["mask_hidden"].view(-1, size).unsqueeze(1).unbind())
        return masked(tokens, features, embed, ids, step, mask, feature)
    return chained(tokens, features, embed, ids, step)


def mtp_step(
    w: Tensors, config: Config, layer: int, e: Tensor, feature: Tensor, positions: Tensor
) -> tuple[Tensor, KV]:
    """One MiMo MTP layer: hidden before embedding, the embedding zeroed at position 0. Returns the normed output."""
    name, eps = f"model.mtp_layers.{layer}", config["rms_norm_eps"]
    e = torch.where((positions == 0)[:, None], 0.0, e)
    pair = (
        rms_norm(feature, w[f"{name}.hidden_layernorm.weight"], eps),
        rms_norm(e, w[f"{name}.token_layernorm.weight"], eps),
    )
    y = linear(torch.cat(pair, -1), w, f"{name}.input_proj")
    y, kv = decoder_layer(y, positions, w, name, config)
    return rms_norm(y, w[f"{name}.final_layernorm.weight"], eps), kv


def mtp(target: Tensors, config: Config, tokens: Sequence[int], window: int | None = None) -> DraftPass:
    """MiMo's built-in heads, which see no further back than `window`.

    Row i of layer j combines the target's feature f_i with e(x_{i+1+j}), at position i, and predicts x_{i+2+j}; step s
    reads layer s at row T - 1 of the text continued by the path. Layer j's KV is a function of the committed text for
    rows 0 .. T - 1 - j only. Past the last layer that one goes on with its own output.
    """
    n, w, last = config["num_nextn_predict_layers"], cast(target, torch.float64), len(tokens) - 1
    embed, features = w["model.embed_tokens.weight"], run_target(target, config, tokens[:-1]).hidden  # [T, H]
    own = config if window is None else {**config, "known": window}

    def rows(layer: int, text: Sequence[int], fed: Tensor) -> tuple[Tensor, KV]:
        follow = embed[torch.tensor(text[1 + layer : 1 + layer + len(fed)], dtype=torch.int64)]
        return mtp_step(w, own, layer, follow, fed[: len(follow)], torch.arange(len(follow)))

    def output(path: tuple[int, ...]) -> Tensor:
        fed = features
        for s in range(n, len(path) + 1):
            fed = torch.cat((fed, rows(n - 1, [*tokens, *path[: s - 1]], fed)[0][-1:]))
        out = rows(min(len(path), n - 1), [*tokens, *path], fed)[0]
        assert len(out) == last + max(len(path) - n + 1, 0)
        return out[-1]

    head = lm_head_weight(w)
    kv = [rows(j, tokens, features)[1] for j in range(n)]
    return DraftPass(list(tokens), kv, torch.arange(len(head)), lambda path: head @ output(path), output(()))


def mtp_of_first_rows(target: Tensors, config: Config, tokens: Sequence[int]) -> DraftPass:
    """The same of one layer; of several each sees the rows of the first, as in training. Row i < T is (f_i, e(x_{i+1}))
    for all of them, row T - 1 + s is (what layer s - 1 gave at the row before, e(c_s)), at its own position. Step s
    reads layer s at row T - 1 + s; past the last layer the last goes on.
    """
    w, layers = cast(target, torch.float64), config["num_nextn_predict_layers"]
    embed, features = w["model.embed_tokens.weight"], run_target(target, config, tokens[:-1]).hidden

    def last_output(path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The layer of this level on all rows: its output at the last of them, and all features so far."""
        fed = features
        if path:
            before, fed = last_output(path[:-1])
            fed = torch.cat((fed, before[None]))
        follow = torch.tensor([*tokens[1:], *path])
        layer = min(len(path), layers - 1)
        return mtp_step(w, config, layer, embed[follow], fed, torch.arange(len(follow)))[0][-1], fed

    follow = embed[torch.tensor(tokens[1:])]
    kvs = [mtp_step(w, config, j, follow, features, torch.arange(len(follow)))[1] for j in range(layers)]
    head = lm_head_weight(w)
    ids = torch.arange(len(head))
    return DraftPass(list(tokens), kvs, ids, lambda path: head @ last_output(path)[0], last_output(())[0])


def standalone(draft: Tensors, config: Config, tokens: Sequence[int]) -> DraftPass:
    """A plain language model on the unshifted text. Its KV has rows 0 .. T - 1, like the target's; the row of x_T,
    whose output predicts x_{T+1}, belongs to the next step."""

    def at(path: tuple[int, ...]) -> Tensor:
        return run_target(draft, config, [*tokens, *path]).logits[-1]

    ids = torch.arange(config["vocab_size"])
    return DraftPass(list(tokens), run_target(draft, config, tokens[:-1]).kv, ids, at)


# --- the EAGLE-2 tree ------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """Nodes in the order of their flat candidate ids, node 0 the root (the last committed token)."""

    tokens: list[int]
    parents: list[int]  # parents[0] = 0
    depths: list[int]
    positions: list[int]
    scores: list[float]  # log-probability of the path; 0 for the root
    flat: list[int]  # flat candidate id of each node, -1 for the root
    flat_scores: list[float]  # of every candidate
    flat_paths: list[tuple[int, ...]]
    gap: float  # the smallest score difference that any choice hung on (how robust the tree is to rounding)

    def path(self, node: int) -> tuple[int, ...]:
        return () if node == 0 else (*self.path(self.parents[node]), self.tokens[node])


def best(scores: Sequence[float], count: int) -> tuple[list[int], float]:
    """Indices of the `count` largest, best first, ties to the lower index; and the gap to the first one left out or
    between neighbours in the order."""
    assert count <= len(scores)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    upto = order[: count + 1]
    gaps = [scores[a] - scores[b] for a, b in pairwise(upto)]
    return order[:count], min(gaps, default=math.inf)


def grow(
    log_probs: Callable[[tuple[int, ...]], Sequence[float]], ids: Sequence[int],
    root: int, position: int, steps: int, topk: int, nodes: int,
) -> Tree:  # fmt: skip
    """The EAGLE-2 tree: log_probs(path) -> scores over draft rows for the token after the path (of target ids)."""
    assert steps >= 1 and nodes - 1 <= topk + (steps - 1) * topk * topk
    scores: list[float] = []
    paths: list[tuple[int, ...]] = []
    above: list[int] = []  # flat id of each candidate's parent, -1 for the root
    gap = math.inf

    def extend(parent: int) -> None:
        nonlocal gap
        path, score = (paths[parent], scores[parent]) if parent >= 0 else ((), 0.0)
        row = [float(p) for p in log_probs(path)]
        chosen, step_gap = best(row, topk)
        gap = min(gap, step_gap)
        for r in chosen:
            scores.append(score + row[r])
            paths.append((*path, int(ids[r])))
            above.append(parent)

    extend(-1)
    frontier = list(range(topk))
    for s in range(1, steps):
        first = len(scores)
        assert first == topk + (s - 1) * topk * topk
        for parent in frontier:
            extend(parent)
        chosen, step_gap = best(scores[first:], topk)
        if s + 1 < steps:  # the last level has no frontier
            gap = min(gap, step_gap)
        frontier = [first + c for c in chosen]
    selected, _ = best(scores, nodes - 1)
    kept = sorted(selected)
    left_out = [scores[i] for i in range(len(scores)) if i not in set(selected)]
    if left_out:
        gap = min(gap, min(scores[i] for i in selected) - max(left_out))
    node_of = {-1: 0} | {flat: 1 + n for n, flat in enumerate(kept)}
    parents = [0] + [node_of[above[flat]] for flat in kept]
    depths = [0] + [len(paths[flat]) for flat in kept]
    return Tree(
        [root] + [paths[flat][-1] for flat in kept], parents, depths, [position + d for d in depths],
        [0.0] + [scores[flat] for flat in kept], [-1, *kept], scores, paths, gap,
    )  # fmt: skip


def draft_tree(
    draft: DraftPass, steps: int, topk: int, nodes: int, noise: Callable[[int], Tensor] | None = None
) -> Tree:
    """The tree a head proposes after the committed text.

    noise(position) -> [V]: what coupling adds to the logits of the token that will stand there (temperature times the
    keyed Gumbel noise), by target id, before the scores are normalised.
    """
    last = len(draft.tokens) - 1

    def log_probs(path: tuple[int, ...]) -> list[float]:
        logits = draft.logits(path)
        if noise is not None:
            logits = logits + noise(last + 1 + len(path)).to(logits.dtype)[draft.ids]
        return draft.choose(path, logits).tolist()

    return grow(log_probs, draft.ids.tolist(), draft.tokens[-1], last, steps, topk, nodes)
