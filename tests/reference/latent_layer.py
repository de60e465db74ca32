"""GLM-4.7-Flash's prediction layer in float64, of the tensors of a checkpoint: keys and values are computed, a
text is run whole, expert by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class PredictionLayer:
    def __init__(self, config: Any, tensors: Mapping[str, Tensor], embedding: Tensor) -> None:
        """config: of transformers.  tensors: below `model.layers.N.`, without it.  embedding: of the model."""
        self.config, self.embedding = config, embedding.double()
        self.w = {name: value.double() for name, value in tensors.items()}

    def __call__(self, ids: Tensor, fed: Tensor) -> Tensor:
        """ids [N]: the token after each row's; fed [N, hidden]: the model's hidden state at a row, or what this gave of
        the row before -> [N, hidden]"""
        both = self._norm(self.embedding[ids], "enorm"), self._norm(fed.double(), "hnorm")
        x = self._times(torch.cat(both, 1), "eh_proj")
        x = x + self._attention(self._norm(x, "input_layernorm"))
        x = x + self._experts(self._norm(x, "post_attention_layernorm"))
        return self._norm(x, "shared_head.norm")

    def _attention(self, x: Tensor) -> Tensor:
        c, rows = self.config, len(x)
        heads, plain, turned = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        down = self._norm(self._times(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6)
        q, q_turned = self._times(down, "self_attn.q_b_proj").view(rows, heads, -1).split((plain, turned), 2)
        latent, k_turned = self._times(x, "self_attn.kv_a_proj_with_mqa").split((c.kv_lora_rank, turned), 1)
        latent = self._norm(latent, "self_attn.kv_a_layernorm", 1e-6)
        k, v = self._times(latent, "self_attn.kv_b_proj").view(rows, heads, -1).split((plain, c.v_head_dim), 2)
        scores = torch.einsum("ihd,jhd->hij", q, k)
        scores += torch.einsum("ihd,jd->hij", self._turn(q_turned), self._turn(k_turned.unsqueeze(1)).squeeze(1))
        later = torch.ones(rows, rows).triu(1).bool()
        weights = (scores * (plain + turned) ** -0.5).masked_fill(later, -torch.inf).softmax(2)
        return self._times(torch.einsum("hij,jhd->ihd", weights, v).flatten(1), "self_attn.o_proj")

    def _turn(self, x: Tensor) -> Tensor:
        """x [N, heads, turned], whose elements are pairs of neighbours, row i by i angles"""
        size = x.shape[2]
        inverse = self.config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        angle = torch.arange(len(x)).double()[:, None, None] * inverse
        pairs = torch.view_as_complex(x.reshape(*x.shape[:2], -1, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(2)

    def _experts(self, x: Tensor) -> Tensor:
        c, out = self.config, self._mlp(x, "mlp.shared_experts")
        for i, row in enumerate(x):
            scores = self._times(row, "mlp.gate").sigmoid()
            chosen = (scores + self.w["mlp.gate.e_score_correction_bias"]).topk(c.num_experts_per_tok).indices
            shares = scores[chosen] / scores[chosen].sum() * c.routed_scaling_factor
            for share, expert in zip(shares, chosen.tolist(), strict=True):
                out[i] += share * self._mlp(row, f"mlp.experts.{expert}")
        return out

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self._times(x, f"{name}.gate_proj"), self._times(x, f"{name}.up_proj")
        return self._times(F.silu(gate) * up, f"{name}.down_proj")

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + (self.config.rms_norm_eps if eps is None else eps)).sqrt() * self.w[f"{name}.weight"]

    def _times(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T
