"""Multi-token prediction layers that are stored with their model, as MiMo-7B (arXiv 2505.07608), Qwen3.5,
GLM-4.5 and Nemotron 3 have them.

Each joins the model's output at a position with the embedding of the next token and is an ordinary layer otherwise,
with attention also in models whose own layers mostly have none, and with an MLP where these are one part alone;
embedding and head are the model's. Where a model has several residual streams, as Qwen4-Exp, it joins each of them, and
leaves as many. One layer is run for any number of steps. Of several, each predicts one token
further: layer j joins the model's output at position t with the embedding of token t + 1 + j.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError, ConfigError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig, NoMixer
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.embedding import Embedding
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import ParamSlice, WeightFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.norm import RMSNorm
from draftwing.layers.streams import StreamedLayer, Streams, stored_streams
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import FeatureHead, Shown
from draftwing.models.weight_map import MTP, MTP_LAYERS, entries, layer_names, named
from draftwing.ops.attention.attend import Attend
from draftwing.ops.table import LayerOps


class MTPLayer(nn.Module):
    """input_proj [hidden, 2 * hidden] over (feature, embedding), or (embedding, feature), each normed, then a decoder
    layer and a norm."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        embedding_first: bool,
    ) -> None:
        super().__init__()
        hidden, eps, wide = config.hidden_size, config.norm.eps, config.norm.dtype(dtype)
        self._embedding_first = embedding_first
        self.token_norm = RMSNorm(hidden, eps, wide, device)
        self.hidden_norm = RMSNorm(hidden, eps, wide, device)
        self.input_proj = Linear(2 * hidden, hidden, False, dtype, device, config.weight_format)
        self.layer = DecoderLayer(layer, index, dtype, device)
        self.final_norm = RMSNorm(hidden, eps, wide, device)

    def join(self, ids: Tensor, positions: Tensor, embed: Embedding | Shown, feature: Tensor, ops: LayerOps) -> Tensor:
        """ids [M], positions [M] or of axes [3, M], feature [M, hidden] -> [M, hidden], what the decoder layer runs
        on"""
        if self._embedding_first:
            return self.input_proj(ops.concat_columns(self.token_norm(embed(ids)), self.hidden_norm(feature)))
        norms, eps = (self.token_norm.weight, self.hidden_norm.weight), self.token_norm.eps
        # In training the first position of a sequence had no token to embed.
        known, rows = embed.source(ids)
        first = positions if positions.dim() == 1 else positions[0]
        return self.input_proj(ops.fuse_inputs(known, rows, feature, norms, eps, first, feature_first=True))

    def forward(self, joined: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """joined [M, hidden] -> [M, hidden] after the final norm"""
        return self.final_norm(self.layer(joined, cos, sin, attend))


class StreamedMTPLayer(nn.Module):
    """Each stream of the feature, all of which are normed as one, and the embedding under matrices of their own, added;
    then a decoder layer over several streams, and what makes one of them before the head."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden, norm, form = config.hidden_size, config.norm, config.weight_format
        assert layer.streams is not None
        self._hidden, self._count = hidden, layer.streams.count
        self.token_norm = RMSNorm(hidden, norm.eps, norm.dtype(dtype), device)
        self.hidden_norm = RMSNorm(self._count * hidden, norm.eps, norm.dtype(dtype), device)
        self.token_proj, self.stream_proj = (Linear(hidden, hidden, False, dtype, device, form) for _ in range(2))
        self.layer = StreamedLayer(layer, index, dtype, device)
        self.mixer = Streams(layer.streams, hidden, norm, dtype, device, form, adds=False)

    def join(self, ids: Tensor, positions: Tensor, embed: Embedding | Shown, feature: Tensor, ops: LayerOps) -> Tensor:
        """ids [M], feature [M, count * hidden] -> [M, count * hidden]"""
        own = self.token_proj(self.token_norm(embed(ids)))
        streams = self.stream_proj(self.hidden_norm(feature).view(-1, self._hidden)).view(-1, self._count, self._hidden)
        return (streams + own.unsqueeze(1)).flatten(1)

    def forward(self, joined: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """joined [M, count * hidden] -> the same"""
        return self.layer(joined, cos, sin, attend)


class MTPHead(FeatureHead):
    """One or more `MTPLayer`s of the target's own shape."""

    forward_name = "run_layer"

    def __init__(
        self,
        target: DecoderModel,
        layers: int,
        dtype: torch.dtype,
        device: torch.device | str,
        weight_format: WeightFormat = DENSE,
        embedding_first: bool | None = None,
    ) -> None:
        """weight_format: of the layers' matrices.  embedding_first: what they read, None: as the target's would.
        Raises CheckpointError for several that do."""
        one = target.config.family.one_predicts if embedding_first is None else embedding_first
        if one and layers > 1:
            raise CheckpointError(f"{MTP}layers.*: expected one prediction layer, found {layers}")
        own = (_layer_of(target.config),) * layers
        config = replace(target.config, layers=own, weight_format=weight_format, vocab_format=weight_format)
        super().__init__(config, target, target.stream_layers or (target.final_aux_layer,), dtype)
        where = torch.device(device)
        self.embedding_first, self.width = one, config.hidden_size * len(self.aux_layers)
        self.layers = nn.ModuleList(
            MTPLayer(config, layer, i, dtype, where, one)
            if layer.streams is None
            else StreamedMTPLayer(config, layer, i, dtype, where)
            for i, layer in enumerate(self.layer_configs)
        )
        self.lookahead = layers

    def run(self, ids: Tensor, positions: Tensor, features: Tensor | None, level: int, attend: Attend) -> Tensor:
        """ids, positions [M], features [M, hidden] -> [M, hidden]: the rows in every layer that has its turn at this
        level or later, for their keys and values; the output is that of the first of these."""
        assert features is not None
        turn = min(level, len(self.layers) - 1)
        out = self.run_layer(ids, positions, features, turn, attend)
        for i in range(turn + 1, len(self.layers)):
            self.run_layer(ids, positions, features, i, attend)
        return out

    def write(self, ids: Tensor, positions: Tensor, features: Tensor | None, attend: Attend) -> None:
        assert features is not None
        cos, sin = self._rotation(positions)
        for mtp in self.layers:
            assert isinstance(mtp, MTPLayer | StreamedMTPLayer)
            mtp.layer.write(mtp.join(ids, positions, self.embedding, features, self.ops), cos, sin, attend)

    def run_layer(self, ids: Tensor, positions: Tensor, features: Tensor, layer: int, attend: Attend) -> Tensor:
        """ids [M]: for layer j the token 1 + j after the row's; positions [M], features [M, hidden] -> [M, hidden]
        after the layer's final norm, or all streams."""
        cos, sin = self._rotation(positions)
        mtp = self.layers[layer]
        assert isinstance(mtp, MTPLayer | StreamedMTPLayer)
        return mtp(mtp.join(ids, positions, self.embedding, features, self.ops), cos, sin, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        last = self.layers[-1]
        return super().logits(last.mixer(hidden) if isinstance(last, StreamedMTPLayer) else hidden)

    def pack(self, ops: LayerOps) -> None:
        super().pack(ops)
        if self.config.streams is not None:  # which come before what the call knows
            self.top_k = None

    def names(self) -> dict[str, ParamSlice]:
        if self.embedding_first:
            return self._names_of_one()
        hidden, table = self.config.hidden_size, {}
        for i in range(self.config.num_layers):
            checkpoint, model = f"{MTP_LAYERS}{i}", f"layers.{i}"
            for name, param in (
                ("token_layernorm", "token_norm"),
                ("hidden_layernorm", "hidden_norm"),
                ("final_layernorm", "final_norm"),
            ):
                table[f"{checkpoint}.{name}.weight"] = ParamSlice(f"{model}.{param}.weight", 0, hidden)
            table |= named(self.config.weight_format, f"{checkpoint}.input_proj", f"{model}.input_proj", 0, hidden)
            table |= layer_names(self.config, checkpoint, f"{model}.layer", ranks=self.ranks, index=i)
        return table

    def _names_of_one(self) -> dict[str, ParamSlice]:
        hidden, added, theirs = self.config.hidden_size, self.config.norm.offset, self.config.family.mtp_names
        table: dict[str, ParamSlice] = {}
        for i, part in enumerate(stored_layers(self.target.config)):
            config = replace(self.config, layers=(part,))
            table |= layer_names(config, f"{MTP}layers.{i}", "layers.0.layer", ranks=self.ranks)
        norms = {"pre_fc_norm_embedding": ("token_norm", hidden), "pre_fc_norm_hidden": ("hidden_norm", self.width)}
        if self.config.streams is None:
            norms["norm"] = "final_norm", hidden
        for name, (param, size) in norms.items():
            at = f"{MTP}{theirs.get(name, name)}.weight"
            table[at] = ParamSlice(f"layers.0.{param}.weight", 0, size, added=added)
        if self.config.streams is not None:
            form, mixer = self.config.weight_format, f"{MTP}{self.config.family.final_norm.removeprefix('model.')}"
            last = stored_streams(self.config.streams, hidden, mixer, "layers.0.mixer", adds=False)
            table |= entries(self.config, self.config.layers[0], last)
            for name, param in (("fc_embedding", "token_proj"), ("fc_hidden", "stream_proj")):
                table |= named(form, f"{MTP}{name}", f"layers.0.{param}", 0, hidden)
            return table
        return table | named(
            self.config.weight_format, f"{MTP}{theirs.get('fc', 'fc')}", "layers.0.input_proj", 0, hidden
        )


def mtp_head_of(
    names: Collection[str], target: DecoderModel, dtype: torch.dtype, weight_format: WeightFormat
) -> MTPHead:
    """Returns a head of the meta device of as many layers as tensors of such names are of, in the layout they have.
    weight_format: of the layers' matrices.  Raises CheckpointError for more layers than are served."""
    one = all(not name.startswith(MTP_LAYERS) for name in names)
    prefix = f"{MTP}layers." if one else MTP_LAYERS
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    each = len(stored_layers(target.config)) if one else 1
    return MTPHead(target, -(-len(numbers) // each) or 1, dtype, "meta", weight_format, one)


def _layer_of(config: ModelConfig) -> LayerConfig:
    """Returns what a prediction layer is like, from the config of its target."""
    layer, *mlp = stored_layers(config)
    return replace(mlp[0], mixer=layer.mixer) if mlp else layer


def stored_layers(config: ModelConfig) -> list[LayerConfig]:
    """Returns as what layers it is stored: as the config says; else the target's first with attention, and with experts
    where it has any and the family's prediction layers have such; behind one without an MLP the first that is an MLP
    alone, and has experts where any has. Raises CheckpointError where no layer of the target could be one."""
    every = config.ahead or config.layers
    able = [layer for layer in every if isinstance(layer.mixer, AttentionConfig | LatentAttentionConfig)]
    if not able:
        raise CheckpointError(
            f"prediction layers of {config.architecture} are not supported: no layer is plain attention"
        )
    able = [_with_own_index(layer) for layer in able]
    if config.family.predicts_dense:
        able = [replace(layer, experts=None) for layer in able]
    alone = [] if able[0].has_mlp else [layer for layer in config.layers if isinstance(layer.mixer, NoMixer)]
    return [next((layer for layer in some if layer.experts is not None), some[0]) for some in (able, alone) if some]


def _with_own_index(layer: LayerConfig) -> LayerConfig:
    """Returns the layer with an indexer in place of another layer's picks: a head has no layer before it."""
    mixer = layer.mixer
    if not isinstance(mixer, LatentAttentionConfig) or mixer.index is None:
        return layer
    return replace(layer, mixer=replace(mixer, index=replace(mixer.index, shared=False)))


def untrained(config: ModelConfig) -> str | None:
    """Returns what prediction layers of such a model have that is not trained; None where they can be."""
    layer, *mlp = stored_layers(config)
    if mlp:
        return "an MLP that is a layer of its own"
    if layer.experts is not None:
        return "experts"
    if not isinstance(layer.mixer, AttentionConfig):
        return "attention over latents"
    own = layer.mixer.window or layer.mixer.rope or layer.mixer.sinks or layer.mixer.scalar
    return "attention with a window, a rotary embedding, sinks or a scale of its own" if own else None


def check_trainable(config: ModelConfig, count: int) -> None:
    """Raises ConfigError for a model whose `count` prediction layers are more, or of another kind, than is trained."""
    if count != 1:
        raise ConfigError(f"training takes one prediction layer, {config.architecture} has {count}")
    found = untrained(config)
    if found is not None:
        raise ConfigError(
            f"the prediction layers of {config.architecture} cannot be trained: expected plain attention and one MLP, "
            f"found {found}"
        )
