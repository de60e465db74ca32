"""The one decoder: Llama, Mistral, Qwen2 and Qwen3, which differ by the values of a `ModelConfig`.

Queries are a flat list of M tokens. Which tokens see which is not known here: attention is the injected `attend`, so
serving binds the paged pool, and a test or a trainer a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.linear import FEW_ROWS, Linear
from draftwing.layers.norm import RMSNorm
from draftwing.layers.rope import rope_table, rotate
from draftwing.models.config import ModelConfig
from draftwing.ops import use_triton
from draftwing.ops.attention import Attend
from draftwing.ops.cpu.layer import HEAD_UNIT, NativeLayer, NativeLayers
from draftwing.ops.pick import exact_logits_kernel, layer_kernels, take_rows


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [M, 2 * ffn] -> silu(gate) * up, [M, ffn]"""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


AddNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]  # `ops.triton.layers.add_rms_norm`


def run_native(
    layers: NativeLayers | None, x: Tensor, normed: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend
) -> Tensor | None:
    """What `ops.cpu.attention.Bound.layers` gives of them; None where they, or so many rows, are not run in one
    call."""
    if layers is None or x.shape[0] > FEW_ROWS:
        return None
    whole = getattr(attend, "layers", None)
    return None if whole is None else whole(layers, x, normed, cos, sin)


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP. q, k and v are one product, and so are gate and up: fewer passes over x."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, in_size: int = 0
    ) -> None:
        """in_size: of what q, k and v are made from; 0: the hidden size."""
        super().__init__()
        self.index = index
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, ffn, eps = config.hidden_size, config.ffn_size, config.norm_eps
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.attn_norm = RMSNorm(hidden, eps, dtype, device)
        self.qkv = Linear(in_size or hidden, q_rows + 2 * kv_rows, config.qkv_bias, dtype, device)
        self.q_norm = RMSNorm(self.head_dim, eps, dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps, dtype, device) if config.qk_norm else None
        self.o = Linear(q_rows, hidden, config.o_bias, dtype, device)
        self.mlp_norm = RMSNorm(hidden, eps, dtype, device)
        self.gate_up = Linear(hidden, 2 * ffn, config.mlp_bias, dtype, device)
        self.down = Linear(ffn, hidden, config.mlp_bias, dtype, device)
        self._silu_mul = silu_mul
        self._add_norm: AddNorm | None = None
        self.native: NativeLayers | None = None  # all of it, for few rows

    def pack(self) -> None:
        """What `DecoderModel.pack` does, for the operations here that are no modules; when these are packed."""
        weight = self.mlp_norm.weight
        kernels = layer_kernels(weight)
        if kernels is not None:
            self._silu_mul = kernels.silu_mul
        if use_triton(weight):
            from draftwing.ops.triton.layers import add_rms_norm

            self._add_norm = add_rms_norm
        self.native = self._in_one_call()

    def _in_one_call(self) -> NativeLayers | None:
        """Where the CPU's kernels have all that this layer does."""
        linears = self.qkv, self.o, self.gate_up, self.down
        products = [linear.few for linear in linears if linear.few is not None]
        if len(products) < len(linears) or self.q_norm is not None or self.head_dim % HEAD_UNIT:
            return None
        own = isinstance(self.attn_norm, RMSNorm) and self.qkv.in_features == self.o.out_features
        norms = self.attn_norm.weight if own else None, self.mlp_norm.weight
        layer = NativeLayer(norms, self.mlp_norm.eps, products, [linear.bias for linear in linears])
        return NativeLayers([layer], self.index)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [M, hidden] -> [M, hidden]; cos, sin [M, 1, head_dim]"""
        native = self.native if self.native is not None and self.native.norms_input else None
        outs = run_native(native, x, None, cos, sin, attend)
        if outs is not None:
            return outs[0]
        return self.mix(self.attn_norm(x), x, cos, sin, attend)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def mix(self, normed: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """`forward` behind its first norm: normed [M, in_size], residual stream x [M, hidden] -> [M, hidden]"""
        outs = run_native(self.native, x, normed, cos, sin, attend)
        if outs is not None:
            return outs[0]
        qkv = self.qkv(normed).view(x.shape[0], -1, self.head_dim)  # [M, heads + 2 * kv_heads, head_dim]
        attended = self._attend(qkv, cos, sin, attend)
        if self._add_norm is not None:
            x, normed = self._add_norm(x, self.o(attended), self.mlp_norm.weight, self.mlp_norm.eps)
        else:
            x = self.o(attended, x)
            normed = self.mlp_norm(x)
        return self.down(self._gated(normed), x, overwrite=self._add_norm is not None)

    def _gated(self, normed: Tensor) -> Tensor:
        """normed [M, hidden] -> silu(gate) * up, [M, ffn]"""
        skinny = self.gate_up.skinny(normed.shape[0])
        if skinny is not None:
            return skinny.gated(normed, self.gate_up.weight, self.gate_up.bias)
        return self._silu_mul(self.gate_up(normed))

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """qkv [M, heads + 2 * kv_heads, head_dim], which may be overwritten -> [M, heads * head_dim]"""
        # A backend may turn q and k itself, and perhaps norm them before (`fused` of its `Bound`).
        fused = getattr(attend, "fused", None)
        out: Tensor
        if fused is not None and self.q_norm is None:
            out = fused(self.index, qkv, cos, sin)
            return out
        if getattr(attend, "norms_heads", False) and self.q_norm is not None and self.k_norm is not None:
            assert fused is not None and self.q_norm.eps == self.k_norm.eps
            out = fused(self.index, qkv, cos, sin, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
            return out
        qk = qkv[:, : self.heads + self.kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.heads]), self.k_norm(qk[:, self.heads :])), 1)
        qk = rotate(qk, cos, sin)
        v = qkv[:, self.heads + self.kv_heads :]
        return attend(self.index, qk[:, : self.heads], qk[:, self.heads :], v)


class DecoderModel(nn.Module):
    """Embedding, layers, final norm and head; an ordinary trainable module as long as it is not packed."""

    rope: Tensor  # [positions, 2, head_dim]

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        """Weights are allocated and not filled; on device "meta" they take no memory (the loader's way)."""
        super().__init__()
        device = torch.device(device)
        self.config = config
        # from_pretrained skips the random initialisation, which on the meta device costs a second of imports.
        table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.embed = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dtype, device) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, dtype, device)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self.register_buffer("rope", torch.empty(0), persistent=False)
        self._native: dict[tuple[int, ...], NativeLayers | None] = {}  # by the taps that are wanted

    @property
    def final_tap(self) -> int:
        return self.config.num_layers + 1

    def set_max_positions(self, positions: int) -> None:
        """Makes the rotary table; every position of a later `forward` must be below `positions`."""
        weight = self.norm.weight
        self.rope = rope_table(self.config.rope, self.config.head_dim, positions, weight.dtype, weight.device)

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """ids, positions [M] int64 -> hidden states after the final norm [M, hidden], and the taps.

        taps: layers whose input (the residual stream before them, `num_layers` for that before the final norm) is
        wanted, `final_tap` for what comes after the final norm; they come concatenated in the order given,
        [M, len(taps) * hidden], or None when there are none.
        """
        assert self.rope.numel(), "call set_max_positions first"
        cos, sin = take_rows(self.rope, positions).unsqueeze(2).unbind(1)  # [M, 1, head_dim] each
        native = self._in_one_call(taps) if ids.shape[0] <= FEW_ROWS else None
        if native is not None and hasattr(attend, "layers"):
            outs = run_native(native, take_rows(self.embed.weight.detach(), ids), None, cos, sin, attend)
            assert outs is not None
            x = self.norm(outs[native.last])
            return x, x if tuple(taps) == (self.final_tap,) else native.joined(outs)
        x = self.embed(ids)  # [M, hidden]
        streams = {0: x} if 0 in taps else {}
        for i, layer in enumerate(self.layers, 1):
            x = layer(x, cos, sin, attend)
            if i in taps:
                streams[i] = x
        x = self.norm(x)
        streams[self.final_tap] = x
        return x, torch.cat([streams[i] for i in taps], -1) if taps else None

    def _in_one_call(self, taps: Sequence[int]) -> NativeLayers | None:
        """All layers, where each is and the taps are outputs of them, or what comes after the final norm alone."""
        kept = () if tuple(taps) == (self.final_tap,) else tuple(taps)
        if kept not in self._native:
            natives = [layer.native for layer in self.layers if isinstance(layer, DecoderLayer)]
            layers = [part for native in natives if native is not None for part in native.layers]
            whole = len(layers) == len(self.layers) and all(layer.norms_input for layer in layers)
            inner = all(1 <= i <= len(layers) for i in kept)
            self._native[kept] = NativeLayers(layers, kept=kept) if whole and inner else None
        return self._native[kept]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] after the final norm -> [M, vocab] in the model's dtype."""
        return self.lm_head(hidden)

    def exact_logits(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden [..., hidden] after the final norm, ids [..., K] -> the logits of those ids, [..., K] float32.

        A half-precision product rounds logits to 8 or 11 bits, 0.125 at a logit of 25 in bfloat16: near ties come out
        as ties or reversed. A few candidates computed again from the same weights, summed in float32, settle them.
        """
        weight = self.lm_head.weight
        if use_triton(hidden):
            from draftwing.ops.triton.layers import chosen_logits

            # Torch's sum on a GPU takes another order when there are more rows.
            return chosen_logits(hidden.flatten(0, -2), weight, ids.flatten(0, -2)).view(ids.shape)
        native = exact_logits_kernel(hidden)
        if native is not None:
            return native(hidden, weight, ids)
        return (weight[ids].float() * hidden.unsqueeze(-2).float()).sum(-1)

    def pack(self, deterministic: bool = False) -> None:
        """Lets every layer prepare for inference, weights and kernels; the model is not trainable afterwards.

        deterministic: as `Linear.pack` has it; raises ConfigError for a weight that the kernels do not take.
        """
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                module.pack(module is self.lm_head, deterministic, name)  # `exact_logits` reads its rows
            elif isinstance(module, RMSNorm):
                module.pack()
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.pack()
        self._native.clear()
