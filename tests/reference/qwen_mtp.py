"""The arithmetic of the prediction layer of Qwen3.5 and its like, written out in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Position = int | Sequence[int]  # in a text, or time, height and width


class Reference:
    """Rows one by one; each sees those before it. Norms are stored less 1."""

    def __init__(self, theirs: Any, weights: Mapping[str, Tensor]) -> None:
        self.w = {name: value.double() for name, value in weights.items()}
        self.config, self.past = theirs.config, [[], []]  # type: ignore[var-annotated]
        self.embed = theirs.model.embed_tokens.weight.detach().double()
        self.head = theirs.lm_head.weight.detach().double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / (mean + self.config.rms_norm_eps).sqrt() * (1 + self.w[f"mtp.{name}.weight"])

    def matrix(self, name: str) -> Tensor:
        return self.w[f"mtp.layers.0.{name}.weight"]

    def turned(self, head: Tensor, position: Position) -> Tensor:
        """The first quarter of a head, in pairs of its halves; in three axes pairs take turns."""
        turns, rope = self.config.head_dim // 4, self.config.rope_parameters
        out, half = head.clone(), turns // 2
        for i in range(half):
            axis = i % 3 if i < 3 * rope.get("mrope_section", (0, 0, 0))[i % 3] else 0
            angle = (position if isinstance(position, int) else position[axis]) * rope["rope_theta"] ** (-2 * i / turns)
            out[i] = head[i] * math.cos(angle) - head[half + i] * math.sin(angle)
            out[half + i] = head[half + i] * math.cos(angle) + head[i] * math.sin(angle)
        return out

    def attention(self, x: Tensor, position: Position) -> Tensor:
        dim = self.config.head_dim
        q_and_gate = (self.matrix("self_attn.q_proj") @ x).view(-1, 2, dim)
        k = (self.matrix("self_attn.k_proj") @ x).view(-1, dim)
        v = (self.matrix("self_attn.v_proj") @ x).view(-1, dim)
        for past, new in zip(self.past, ([self.turned(self.normed_head(h, "k"), position) for h in k], v), strict=True):
            past.append(new)
        out = []
        for i, (q, gate) in enumerate(q_and_gate):
            theirs = i * len(k) // len(q_and_gate)
            q = self.turned(self.normed_head(q, "q"), position)
            scores = torch.stack([q @ keys[theirs] for keys in self.past[0]]) / dim**0.5
            mixed = sum(p * values[theirs] for p, values in zip(scores.softmax(0), self.past[1], strict=True))
            out.append(mixed * gate.sigmoid())
        return self.matrix("self_attn.o_proj") @ torch.cat(out)

    def normed_head(self, head: Tensor, which: str) -> Tensor:
        return self.norm(head, f"layers.0.self_attn.{which}_norm")

    def mlp(self, x: Tensor) -> Tensor:
        if "mtp.layers.0.mlp.gate.weight" not in self.w:
            return self.gated(x, *(self.matrix(f"mlp.{name}_proj") for name in ("gate", "up", "down")))
        values, chosen = (self.matrix("mlp.gate") @ x).softmax(0).topk(self.config.num_experts_per_tok)
        made, down = (self.w[f"mtp.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        out = torch.zeros_like(x)
        for p, expert in zip(values / values.sum(), chosen, strict=True):
            out += p * self.gated(x, *made[expert].tensor_split(2), down[expert])
        shared = self.gated(x, *(self.matrix(f"mlp.shared_expert.{name}_proj") for name in ("gate", "up", "down")))
        return out + (self.matrix("mlp.shared_expert_gate") @ x).sigmoid() * shared

    def gated(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        g = gate @ x
        return down @ (g * g.sigmoid() * (up @ x))

    def row(self, token: int | Tensor, feature: Tensor, position: Position) -> tuple[Tensor, Tensor]:
        """token: the next one of the text, or what stands in place of its embedding -> what the next row is fed, and
        logits of the token after."""
        known = self.embed[token] if isinstance(token, int) else token
        parts = self.norm(known, "pre_fc_norm_embedding"), self.norm(feature, "pre_fc_norm_hidden")
        x = self.w["mtp.fc.weight"] @ torch.cat(parts)
        x = x + self.attention(self.norm(x, "layers.0.input_layernorm"), position)
        x = x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm"))
        x = self.norm(x, "norm")
        return x, self.head @ x
