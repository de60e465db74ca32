"""A small Llama model and its draft head at the shape of a large one, without changing what they compute.

    python tools/inflate.py target SMALL OUT                          # LlamaForCausalLM, e.g. SmolLM2-135M-Instruct
    python tools/inflate.py head HEAD OUT --target SMALL              # EAGLE-3, DFLASH or DSPARK head of SMALL
    --shape '{"hidden_size": 4096, ...}' changes keys of the large shape, which is Llama 3.1 8B's; --rank 256 is that
    of a Markov head

The large model moves and multiplies what a model of its shape does, and writes the text of the small one; a head that
is inflated with it has its drafts accepted as often. So real text and real acceptance are timed at the price of a model
whose weights are not at hand.

Why it is the same function:
- The first h of H hidden dimensions are the small model's, the others stay zero. An RMS norm divides by a root that is
  smaller by sqrt(h / H), which its weight carries; eps is eps h / H.
- A small head of d dimensions lies in a large one of D at the rotary pairs of equal frequency (pair j at j D / d). The
  scale of scores is undone by sqrt(D / d) in the rows of q, or in the weight of q's norm where heads are normed, which
  carries sqrt(d / D) in turn. Heads keep their groups.
- Layers that give nothing (o and down are zero) stand evenly between the others. Ids of auxiliary hidden states count
  them.
- Rows of the embedding that the small model lacks are zero; those of the lm_head point away from the mean hidden state,
  so that they never win.
- Weights that only meet zeros are noise, so that nothing is cheaper than in a real model.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
}  # fmt: skip
SHARD = 4_000_000_000  # bytes of a file
ATTENTION, MLP = "self_attn", "mlp"

Put = Callable[[str, Tensor], None]


def read(folder: Path, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the weights, floating ones in float32, names without `model.`"""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    weights = {
        name.removeprefix("model."): (x.float() if x.is_floating_point() else x).to(device) for name, x in found.items()
    }
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), weights


class Writer:
    """Tensors in shards, then the index and the config."""

    def __init__(self, out: Path, dtype: torch.dtype) -> None:
        self._out, self._dtype = out, dtype
        self._shard: dict[str, Tensor] = {}
        self._bytes, self._where = 0, dict[str, str]()
        out.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, x: Tensor) -> None:
        self._shard[name] = x = (x.to(self._dtype) if x.is_floating_point() else x).contiguous().cpu()
        self._bytes += x.nbytes
        if self._bytes > SHARD:
            self._flush()

    def _flush(self) -> None:
        if self._shard:
            file = f"model-{len(set(self._where.values())):05d}.safetensors"
            save_file(self._shard, self._out / file, metadata={"format": "pt"})
            self._where |= dict.fromkeys(self._shard, file)
            self._shard, self._bytes = {}, 0

    def close(self, config: dict[str, Any]) -> None:
        self._flush()
        index = {"metadata": {}, "weight_map": self._where}
        for name, content in (("model.safetensors.index.json", index), ("config.json", config)):
            (self._out / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


class Shape:
    """A small and a large shape, and matrices of the one in those of the other."""

    def __init__(self, small: dict[str, Any], large: dict[str, Any], device: str) -> None:
        self.large = large
        self.h, self.heads = small["hidden_size"], small["num_attention_heads"]
        self.kv = small.get("num_key_value_heads") or self.heads
        self.d = small.get("head_dim") or self.h // self.heads
        self.H, self.F, self.D = (large[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
        self.HEADS, self.KV = large["num_attention_heads"], large["num_key_value_heads"]
        fits = self.h <= self.H and self.D % self.d == 0 and self.kv <= self.KV and small["intermediate_size"] <= self.F
        if not fits or self.heads // self.kv > self.HEADS // self.KV or large["vocab_size"] < small["vocab_size"]:
            raise SystemExit(f"expected a shape in which the small one fits, found {large} for {small}")
        pairs = self.D // self.d * torch.arange(self.d // 2, device=device)
        self._turned = torch.cat((pairs, self.D // 2 + pairs))  # rows of a large head that hold a small one's
        self._device, self._generator = device, torch.Generator(device).manual_seed(0)

    def noise(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator, device=self._device) * 0.02

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._device)

    def norm(self, weight: Tensor) -> Tensor:
        out = torch.ones(self.H, device=self._device)
        out[: self.h] = weight
        return out * math.sqrt(self.h / self.H)

    def head_norm(self, weight: Tensor, scale: float) -> Tensor:
        out = torch.ones(self.D, device=self._device)
        out[self._turned] = weight * scale
        return out

    def columns(self, w: Tensor, blocks: int = 1) -> Tensor:
        """[rows, blocks * h] -> [rows, blocks * H]"""
        rows = len(w)
        out = self.noise(rows, blocks * self.H).view(rows, blocks, self.H)
        out[:, :, : self.h] = w.view(rows, blocks, self.h)
        return out.flatten(1)

    def grown(self, w: Tensor, rows: int) -> Tensor:
        """With rows of zeros below: what must stay zero."""
        return torch.cat((w, self.zeros(rows - len(w), w.shape[1])))

    def filled(self, w: Tensor, rows: int) -> Tensor:
        """With rows of noise below."""
        return torch.cat((w, self.noise(rows - len(w), w.shape[1])))

    def _place(self, k: int, count: int, large: int) -> int:
        """Where small head k of `count` is among the large ones."""
        per, large_per = count // self.kv, large // self.KV
        return k // per * large_per + k % per

    def turned_heads(self, w: Tensor, count: int, large: int, scale: float, blocks: int) -> Tensor:
        """Rows of q or k."""
        out = self.noise(large * self.D, blocks * self.H).view(large, self.D, -1)
        w = self.columns(w, blocks).view(count, self.d, -1)
        for k in range(count):
            place = self._place(k, count, large)
            out[place] = 0
            out[place, self._turned] = w[k] * scale
        return out.flatten(0, 1)

    def values(self, w: Tensor, blocks: int) -> Tensor:
        out = self.noise(self.KV * self.D, blocks * self.H).view(self.KV, self.D, -1)
        w = self.columns(w, blocks).view(self.kv, self.d, -1)
        for k in range(self.kv):
            out[k] = 0
            out[k, : self.d] = w[k]
        return out.flatten(0, 1)

    def outputs(self, w: Tensor) -> Tensor:
        """Of attention: [h, heads * d] -> [H, HEADS * D]"""
        out, w = self.zeros(self.H, self.HEADS, self.D), w.view(self.h, self.heads, self.d)
        for k in range(self.heads):
            out[: self.h, self._place(k, self.heads, self.HEADS), : self.d] = w[:, k]
        return out.flatten(1)

    def down(self, w: Tensor) -> Tensor:
        out = self.zeros(self.H, self.F)
        out[: self.h, : w.shape[1]] = w
        return out

    def layer(self, put: Put, to: str, weights: dict[str, Tensor], source: str, blocks: int = 1) -> None:
        """blocks: hidden states beside each other that q, k and v read."""
        w = {name.removeprefix(source): x for name, x in weights.items() if name.startswith(source)}
        if any(name.endswith("bias") for name in w):
            raise SystemExit(f"{source}: expected no biases")
        normed, bigger = f"{ATTENTION}.q_norm.weight" in w, math.sqrt(self.D / self.d)
        q, k, v, o = (f"{ATTENTION}.{part}_proj.weight" for part in "qkvo")
        put(to + q, self.turned_heads(w[q], self.heads, self.HEADS, 1.0 if normed else bigger, blocks))
        put(to + k, self.turned_heads(w[k], self.kv, self.KV, 1.0, blocks))
        put(to + v, self.values(w[v], blocks))
        put(to + o, self.outputs(w[o]))
        if normed:  # over D dimensions the root is smaller by sqrt(d / D); the scale of scores is made up for
            put(f"{to}{ATTENTION}.q_norm.weight", self.head_norm(w[f"{ATTENTION}.q_norm.weight"], 1.0))
            put(f"{to}{ATTENTION}.k_norm.weight", self.head_norm(w[f"{ATTENTION}.k_norm.weight"], 1 / bigger))
        for part in ("gate", "up"):
            name = f"{MLP}.{part}_proj.weight"
            put(to + name, self.filled(self.columns(w[name]), self.F))
        put(f"{to}{MLP}.down_proj.weight", self.down(w[f"{MLP}.down_proj.weight"]))
        for name in ("hidden_norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"):
            if name in w:
                put(to + name, self.norm(w[name]))

    def idle_layer(self, put: Put, to: str) -> None:
        """Gives nothing, and takes the time of a layer."""
        rows = {"q": self.HEADS * self.D, "k": self.KV * self.D, "v": self.KV * self.D}
        for part, count in rows.items():
            put(f"{to}{ATTENTION}.{part}_proj.weight", self.noise(count, self.H))
        put(f"{to}{ATTENTION}.o_proj.weight", self.zeros(self.H, self.HEADS * self.D))
        for part in ("gate", "up"):
            put(f"{to}{MLP}.{part}_proj.weight", self.noise(self.F, self.H))
        put(f"{to}{MLP}.down_proj.weight", self.zeros(self.H, self.F))
        for name in ("input_layernorm", "post_attention_layernorm"):
            put(f"{to}{name}.weight", self.norm(torch.ones(self.h, device=self._device)))

    def config(self, small: dict[str, Any]) -> dict[str, Any]:
        """The keys of sizes and arithmetic."""
        kept = ("bos_token_id", "eos_token_id", "pad_token_id", "norm_before_residual")
        theta = small.get("rope_theta") or (small.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        return {
            **self.large, "hidden_act": "silu", "rms_norm_eps": small["rms_norm_eps"] * self.h / self.H,
            "rope_theta": theta, "rope_scaling": small.get("rope_scaling"), "attention_bias": False, "mlp_bias": False,
            "max_position_embeddings": small.get("max_position_embeddings", 8192), "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", **{key: small[key] for key in kept if key in small},
        }  # fmt: skip


def idle_before(small_layers: int, large_layers: int) -> list[int]:
    """The small layers before which one comes that gives nothing."""
    more = large_layers - small_layers
    places = [(k + 1) * small_layers // (more + 1) for k in range(more)]
    if len(set(places)) < more or more < 0:
        raise SystemExit(f"expected {small_layers} to {2 * small_layers} layers, found {large_layers}")
    return places


def mean_direction(folder: Path, device: str) -> Tensor:
    """[h]: where the final hidden states of some text point on average."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = "The fox jumps over the dog. def main(): return 0\n1. Paris is a city.\nDear editor, x = a + b * 3.14\n" * 4
    with torch.no_grad():
        hidden = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    return (hidden / hidden.norm()).to(device)


def inflate_target(small: Path, out: Path, large: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    config, w = read(small, device)
    shape, writer = Shape(config, large, device), Writer(out, dtype)
    table, vocab = w["embed_tokens.weight"], large["vocab_size"]
    head = shape.columns(w.get("lm_head.weight", table))
    if vocab > len(table):
        others = shape.noise(vocab - len(table), shape.H)
        others[:, : shape.h] = -4.0 * mean_direction(small, device)
        head = torch.cat((head, others))
    writer.put("lm_head.weight", head)
    del head
    writer.put("model.embed_tokens.weight", shape.grown(torch.nn.functional.pad(table, (0, shape.H - shape.h)), vocab))
    idle, n = idle_before(config["num_hidden_layers"], large["num_hidden_layers"]), 0
    for i in range(config["num_hidden_layers"]):
        if i in idle:
            shape.idle_layer(writer.put, f"model.layers.{n}.")
            n += 1
        shape.layer(writer.put, f"model.layers.{n}.", w, f"layers.{i}.")
        n += 1
    writer.put("model.norm.weight", shape.norm(w["norm.weight"]))
    writer.close({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape.config(config)})
    for file in small.glob("*"):
        if "token" in file.name or file.name in ("chat_template.jinja", "generation_config.json"):
            shutil.copy(file, out)


def inflate_head(
    small: Path, out: Path, target: Path, large: dict[str, Any], rank: int, dtype: torch.dtype, device: str
) -> None:
    """rank: of the Markov head, 0: as it is."""
    config, w = read(small, device)
    shape, writer = Shape(config, large, device), Writer(out, dtype)
    block = "hidden_norm.weight" in w
    if "prefix_gru.weight_hh_l0" in w:
        raise SystemExit(f"{small}: expected a head of another kind than Domino's")
    layers = json.loads((target / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    writer.put("fc.weight", shape.grown(shape.columns(w["fc.weight"], w["fc.weight"].shape[1] // shape.h), shape.H))
    writer.put("norm.weight", shape.norm(w["norm.weight"]))
    if "lm_head.weight" in w:
        writer.put("lm_head.weight", shape.columns(w["lm_head.weight"]))
    if "d2t" in w:
        writer.put("d2t", w["d2t"])
        ids = torch.arange(len(w["d2t"])) + w["d2t"].cpu()
        writer.put("t2d", torch.zeros(large["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True))
    elif "lm_head.weight" in w or block:
        raise SystemExit(f"{small}: expected a vocabulary of its own (d2t)")
    keys = shape.config(config) | {"draft_vocab_size": config["draft_vocab_size"]}
    if not block:
        w = {name.replace("layers.0.", "midlayer."): x for name, x in w.items()}
        shape.layer(writer.put, "midlayer.", w, "midlayer.", blocks=2)
        ids = eagle3_ids(config, layers, large["num_hidden_layers"])
        keys |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        keys["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    else:
        writer.put("hidden_norm.weight", shape.norm(w["hidden_norm.weight"]))
        for i in range(config["num_hidden_layers"]):
            shape.layer(writer.put, f"layers.{i}.", w, f"layers.{i}.")
        keys |= block_keys(config, layers, large["num_hidden_layers"])
        if "markov_head.markov_w1.weight" in w:
            keys["markov_rank"] = markov_head(shape, writer.put, w, large["vocab_size"], rank)
    writer.close(keys)


def markov_head(shape: Shape, put: Put, w: dict[str, Tensor], vocab: int, rank: int) -> int:
    """Returns its rank."""
    above, made = (w[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    small = above.shape[1]
    rank = max(rank, small)
    for part in ("gate_proj", "joint_proj"):
        if f"markov_head.{part}.bias" in w:
            if rank != small:
                raise SystemExit(f"--rank {rank}: expected {small}, as it is, for a Markov head with {part}")
            put(f"markov_head.{part}.weight", read_with(shape, w[f"markov_head.{part}.weight"], part == "joint_proj"))
            put(f"markov_head.{part}.bias", w[f"markov_head.{part}.bias"])
    put("markov_head.markov_w1.weight", shape.grown(torch.nn.functional.pad(above, (0, rank - small)), vocab))
    put("markov_head.markov_w2.weight", torch.cat((made, shape.noise(len(made), rank - small)), 1))
    if "confidence_head.proj.weight" in w:
        own, token = w["confidence_head.proj.weight"].split(
            [shape.h, w["confidence_head.proj.weight"].shape[1] - shape.h], 1
        )
        parts = [shape.columns(own)] + ([torch.nn.functional.pad(token, (0, rank - small))] if token.shape[1] else [])
        put("confidence_head.proj.weight", torch.cat(parts, 1))
        put("confidence_head.proj.bias", w["confidence_head.proj.bias"])
    return rank


def read_with(shape: Shape, w: Tensor, last: bool) -> Tensor:
    """A matrix that reads a row's state and others, which stay as they are; last: the state after them."""
    if last:
        return torch.cat((w[:, : -shape.h], shape.columns(w[:, -shape.h :])), 1)
    return torch.cat((shape.columns(w[:, : shape.h]), w[:, shape.h :]), 1)


def moved(ids: list[int], layers: int, large_layers: int) -> list[int]:
    """Ids of layers whose output is meant, among the large model's."""
    idle = idle_before(layers, large_layers)
    return [i + sum(place <= i for place in idle) for i in ids]


def eagle3_ids(config: dict[str, Any], layers: int, large_layers: int) -> list[int]:
    """As `resolve_aux_layers` reads a config without ids: the streams before the layers 2, L / 2 and L - 3."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    if ids[0] == 2 or max(ids) == layers:  # then they count the streams between layers
        ids = [i - 1 for i in ids]
    return moved(ids, layers, large_layers)


def block_keys(config: dict[str, Any], layers: int, large_layers: int) -> dict[str, Any]:
    inner = config.get("dflash_config") or {}
    both = {**config, **inner}
    ids = both.get("target_layer_ids")
    if ids is None or any(both.get(key) for key in ("layer_types", "use_swa", "causal", "is_causal")):
        raise SystemExit("expected target_layer_ids, and neither windows nor causal layers")
    names = ("block_size", "mask_token_id", "sample_from_anchor", "markov_head_type", "enable_confidence_head")
    kept = {key: both[key] for key in (*names, "confidence_head_with_markov") if key in both}
    own = {"target_layer_ids": moved(ids, layers, large_layers), "num_target_layers": large_layers, "is_causal": False}
    if inner:
        own["dflash_config"] = {"mask_token_id": kept["mask_token_id"], "target_layer_ids": own["target_layer_ids"]}
    names = {"architectures": config["architectures"], "model_type": "qwen3"}
    return {**names, **kept, **own, "num_hidden_layers": config["num_hidden_layers"]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("target", "head"))
    parser.add_argument("small", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, help="the small model that the head drafts for")
    parser.add_argument("--shape", type=json.loads, default={}, help="keys of the large shape that differ from 8B's")
    parser.add_argument("--rank", type=int, default=0, help="rank of the Markov head (default: as it is)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    given = parser.parse_args(arguments)
    large, dtype = {**LLAMA_8B, **given.shape}, getattr(torch, given.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.what == "target":
        inflate_target(given.small, given.out, large, dtype, device)
    elif given.target is None:
        parser.error("a head needs --target")
    else:
        inflate_head(given.small, given.out, given.target, large, given.rank, dtype, device)


if __name__ == "__main__":
    main()
