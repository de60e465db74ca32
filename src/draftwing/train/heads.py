"""Makes fresh draft heads for a target, and loads published ones to be trained further: serving modules in float32,
unpacked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.config.trees import carried_window
from draftwing.errors import ConfigError
from draftwing.layers.attention import Attention, AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.embedding import Embedding
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.mlp import GatedMLP
from draftwing.layers.part_configs import NormConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import DecoderModel
from draftwing.models.families import PLAIN_FAMILY
from draftwing.models.heads.base import FeatureHead
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.config import BlockConfig, Markov
from draftwing.models.heads.dflash2 import GroupedConv
from draftwing.models.heads.eagle import Eagle3Config, Eagle3Head, EagleHead
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.heads.mtp import MTPHead, check_trainable
from draftwing.models.heads.swap import differences
from draftwing.models.loader import fill_parameters, open_checkpoint
from draftwing.models.weight_map import checkpoint_names
from draftwing.ops.table import PLAIN
from draftwing.train.capture import eagle3_aux_layers
from draftwing.train.checkpoint import aux_layer_ids
from draftwing.train.draft_vocabulary import unused_token
from draftwing.train.settings import Settings
from draftwing.train.store import Tokens

AnyHead = EagleHead | Eagle3Head | MTPHead | BlockHead
Head = TypeVar("Head", bound=FeatureHead)

RIDGE = 1e-3  # of the mean square of a column: enough where there are fewer tokens than columns
TRAINED = torch.float32  # what parameters are kept in


def new_eagle3_head(
    target: DecoderModel, target_ids: Tensor | None, aux_layers: Sequence[int] = (), ffn_size: int = 0, seed: int = 0,
    longest: int = 0,
) -> Eagle3Head:  # fmt: skip
    """Returns an untrained EAGLE-3 head of one layer of the target's sizes, on the device of the target's embedding.

    target_ids [Vd] int64, ascending: the target's tokens that it can draft, None for all.
    aux_layers: residual streams of the target as `DecoderModel.forward` numbers them; none given: `eagle3_aux_layers`.
    ffn_size: width of its MLP, 0 for the target's.
    longest: tokens of a text that it learns from, which are the positions that it knows; 0: those of the target.

    Its lm_head and final norm start as the target's, and its layer as the target's last one, fed with the last of the
    auxiliary hidden states.

    Raises ConfigError for auxiliary hidden states that its config could not name, and for ids that are no ascending ids
    of the target.
    """
    config = _knowing(_layer_config(target.config, ffn_size), longest or target.config.max_positions, target.config)
    aux_layers = tuple(aux_layers) or eagle3_aux_layers(target.config.num_layers)
    aux_layer_ids(aux_layers, target.config.num_layers)
    rows = _checked_count(target_ids, config.vocab_size) or config.vocab_size
    device = target.embed.weight.device
    head = Eagle3Head(config, Eagle3Config(aux_layers, config.hidden_size, rows), target, TRAINED, device)
    head.target_ids = None if target_ids is None else target_ids.to(device)
    _initialise(head, seed)
    assert head.lm_head is not None
    with torch.no_grad():
        weight = _head_weight(target)
        head.lm_head.weight.copy_(weight if head.target_ids is None else weight[head.target_ids])
        _start_as_last_norm(head.norm.weight, target)
    _start_as_last_layer(head, target)
    return trainable(head)


@torch.no_grad()
def _start_as_last_layer(head: Eagle3Head, target: DecoderModel) -> None:
    """Copies the target's last layer. That layer says what follows token t; the head is to say what follows t + 1, and
    learns it several times faster from here than from random weights. What it reads of token t + 1 stays random.

    Parts of other shapes stay random too, all of attention where the target norms its heads, as heads do not, and all
    where its layers begin without a norm."""
    last, layer, hidden = target.layers[-1], head.fusion, head.config.hidden_size
    assert isinstance(last, DecoderLayer)
    assert head.fc is not None
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
    if last.attn_norm is None or last.mlp_norm is None:  # whose parts read what no norm has seen
        return
    own, theirs = layer.mixer, last.mixer
    assert isinstance(own, Attention) and layer.mlp_norm is not None
    if isinstance(theirs, Attention) and theirs.head_norms() is None and own.shape == theirs.shape:
        own.qkv.weight[:, hidden:].copy_(theirs.qkv.dense_weight())
        layer.hidden_norm.weight.copy_(last.attn_norm.weight)
        own.o.weight.copy_(theirs.o.dense_weight())
    mlp, made = last.mlp, layer.mlp  # of experts, or without a gate, there is none to begin with
    assert isinstance(made, GatedMLP)
    if isinstance(mlp, GatedMLP) and made.down.weight.shape == (mlp.down.out_features, mlp.down.in_features):
        layer.mlp_norm.weight.copy_(last.mlp_norm.weight)
        made.gate_up.weight.copy_(mlp.gate_up.dense_weight())
        made.down.weight.copy_(mlp.down.dense_weight())


def new_eagle_head(
    target: DecoderModel, ffn_size: int = 0, fc_bias: bool = False, seed: int = 0, longest: int = 0
) -> EagleHead:
    """Returns an untrained EAGLE (EAGLE-2) head of one layer of the target's sizes; q, k and v have biases where the
    target's have, as published heads for Qwen2 do. longest: as of `new_eagle3_head`."""
    config = _layer_config(target.config, ffn_size, qkv_bias=target.config.attention.qkv_bias)
    config = _knowing(config, longest or config.max_positions, target.config)
    head = EagleHead(config, target, fc_bias, TRAINED, target.embed.weight.device)
    _initialise(head, seed)
    return trainable(head)


def new_mtp_head(target: DecoderModel, seed: int = 0, longest: int = 0) -> MTPHead:
    """Returns an untrained prediction layer in the manner of MiMo, of the target's own shape. Its final norm starts as
    the target's, whose head reads what it gives. longest: as of `new_eagle3_head`."""
    head = MTPHead(target, 1, TRAINED, target.embed.weight.device)
    head.config = _knowing(head.config, longest or head.config.max_positions, target.config)
    _initialise(head, seed)
    with torch.no_grad():
        _start_as_last_norm(head.get_parameter("layers.0.final_norm.weight"), target)
    return trainable(head)


def new_block_head(
    target: DecoderModel,
    block: BlockConfig,
    target_ids: Tensor | None = None,
    layers: int = 5,
    ffn_size: int = 0,
    seed: int = 0,
    longest: int = 0,
) -> BlockHead:
    """Returns an untrained head that drafts blocks: layers of the target's sizes with norms of their heads, as
    published ones have them.

    block: its windows and causal layers are made to be as many as there are layers, all causal where any is, and its
    draft_vocab that of target_ids [Vd] int64, ascending: the target's tokens that it can draft, None for all, where
    nothing is tied.

    Its final norm starts as the target's, and so does an lm_head of its own. longest: as of `new_eagle3_head`. Raises
    ConfigError for ids that are no ascending ids of the target.
    """
    config = _layer_config(target.config, ffn_size, layers, qk_norm=True)
    config = _knowing(config, longest or config.max_positions, target.config)
    rows = _checked_count(target_ids, config.vocab_size)
    tied = block.tied and rows > 0
    causal = (any(block.causal),) * layers
    block = replace(block, windows=(0,) * layers, causal=causal, draft_vocab=rows, tied=tied)
    head = BlockHead(config, block, target, TRAINED, target.embed.weight.device)
    _initialise(head, seed)
    head.draft_only(target_ids)
    with torch.no_grad():
        _start_as_dflash(head)
        _start_as_last_norm(head.norm.weight, target)
        if head.lm_head is not None:
            head.lm_head.weight.copy_(_head_weight(target)[head.target_ids])
    return trainable(head)


def _start_as_dflash(head: BlockHead) -> None:
    """Lets convolutions pass what they get, and pairs say nothing."""
    for part in head.modules():
        if isinstance(part, GroupedConv):
            part.base.zero_()[:, 0] = 1
            part.factors.weight.zero_()
    if head.selector is not None:
        head.selector.after.zero_()


def new_head(
    kind: str, target: DecoderModel, target_ids: Tensor | None, aux_layers: Sequence[int], ffn_size: int, seed: int,
    longest: int = 0,
) -> EagleHead | Eagle3Head | MTPHead:  # fmt: skip
    """Returns an untrained head of a kind (`DrafterSpec.heads`) that drafts one token after the other; each takes of
    these what it can use."""
    if kind == "eagle3":
        return new_eagle3_head(target, target_ids, aux_layers, ffn_size, seed, longest)
    if kind == "eagle":
        return new_eagle_head(target, ffn_size, seed=seed, longest=longest)
    return new_mtp_head(target, seed, longest)


def _knowing(config: ModelConfig, positions: int, target: ModelConfig) -> ModelConfig:
    return replace(config, max_positions=min(positions, target.max_positions))


def load_head(path: str | Path, target: DecoderModel, algorithm: str, longest: int = 0) -> AnyHead:
    """Loads a published head to be trained further, on the device of the target's embedding.

    path: its folder, or the model's folder or `.gguf` file that has prediction layers.  algorithm: of `draftwing
    train`.  longest: tokens of a text that it will learn from: positions that it knows then, if it did not before.
    Raises CheckpointError, and ConfigError for prediction layers that cannot be trained.
    """
    head = load_draft_head(path, target, algorithm, TRAINED, target.embed.weight.device, trains=True)
    known = carried_window(Path(path)) or head.config.max_positions
    head.config = _knowing(head.config, max(known, longest), target.config)
    return trainable(head)


def aux_layers_of(path: str | Path, config: ModelConfig, algorithm: str) -> tuple[int, ...]:
    """Returns the residual streams that a published head reads of a target with this config. Raises CheckpointError."""
    target = DecoderModel(config, TRAINED, "meta")
    return load_draft_head(path, target, algorithm, TRAINED, "meta").aux_layers


def renewable(head: FeatureHead) -> bool:
    """Returns whether which tokens the head drafts is a part of it: not where these are all of the target's, or those
    of a token map."""
    return head.target_ids is not None and (head.lm_head is not None or isinstance(head, BlockHead))


@torch.no_grad()
def renew_vocabulary(head: FeatureHead, ids: Sequence[int]) -> None:
    """Lets a head that is `renewable` draft the target's tokens `ids`, as many as before, ascending.

    Rows that are new begin as the linear map of the target's rows that gives the head's own best: the target's rows
    themselves are of another scale, and their tokens would be drafted everywhere. Rows of the target's own lm_head are
    the target's.
    """
    draft_ids = head.draft_ids()
    assert head.target_ids is not None and draft_ids is not None and len(ids) == len(head.target_ids)
    new = torch.tensor(ids, device=head.target_ids.device)
    tables = [] if head.lm_head is None else [head.lm_head]
    if isinstance(head, BlockHead) and head.markov is not None:
        tables.append(head.markov.out)
    rows = draft_ids[new]  # where each was, -1 of new ones
    theirs = F.pad(_head_weight(head.target).double(), (0, 1), value=1.0)  # [V, hidden + 1]
    known, gram = theirs[head.target_ids], torch.eye(theirs.shape[1], dtype=torch.float64, device=new.device)
    gram = known.t() @ known + RIDGE * known.square().sum() / theirs.shape[1] * gram
    for weight in (table.weight for table in tables):
        fresh = (theirs[new] @ torch.linalg.solve(gram, known.t() @ weight.double())).to(weight.dtype)
        weight.copy_(torch.where((rows < 0).unsqueeze(1), fresh, weight[rows.clamp(min=0)]))
    head.draft_only(new)


def load_mean(paths: Sequence[Path], target: DecoderModel, algorithm: str, longest: int = 0) -> AnyHead:
    """Returns the mean of heads that were trained on from the same one, which often accepts a little more than each of
    them (Wortsman et al. 2022, arXiv 2203.05482). Of one head it is that head. longest: as of `load_head`.

    Raises as `load_head` does, and ConfigError for heads of which one does not compute as the first does.
    """
    mean = load_head(paths[0], target, algorithm, longest)
    sums = {name: parameter.detach().double() for name, parameter in mean.named_parameters()}
    for path in paths[1:]:
        other = load_head(path, target, algorithm)
        found = [*differences(mean, other), *([] if _drafts_alike(mean, other) else ["the tokens that they draft"])]
        if found:
            raise ConfigError(f"--init-head: there is no mean of {paths[0]} and {path}, which differ in "
                              f"{'; '.join(found)}")  # fmt: skip
        for name, parameter in other.named_parameters():
            sums[name] += parameter.detach()
        del other  # before the next one is loaded
    with torch.no_grad():
        for name, parameter in mean.named_parameters():
            parameter.copy_(sums[name] / len(paths))
    return mean


def _drafts_alike(first: FeatureHead, other: FeatureHead) -> bool:
    ids, others = first.target_ids, other.target_ids
    return ids is others if ids is None or others is None else torch.equal(ids, others)


def trainable(head: Head) -> Head:
    """Lets gradients into all parameters but an embedding and rows of the target's lm_head, which are never trained."""
    if isinstance(head, MTPHead):
        check_trainable(head.target.config, head.config.num_layers)
    if isinstance(head, BlockHead) and head.config_of_block.logit_cap:
        raise ConfigError("a head with final_logit_softcapping cannot be trained")
    if isinstance(head, Eagle3Head) and head.eagle.mask is not None:
        raise ConfigError("a head for parallel drafting (P-EAGLE) cannot be trained")
    head.requires_grad_(True)
    for part in (getattr(head, "embed", None), head.head_rows):
        if isinstance(part, Embedding | Linear):
            part.requires_grad_(False)
    return head.train()


# ---- the target ------------------------------------------------------------------------------------------------------


def load_target_ends(path: str | Path, dtype: torch.dtype, device: torch.device | str) -> DecoderModel:
    """Loads a target without its layers but the last, where a head starts from; the others stay without memory:
    embedding, final norm and head are all that training from stored features needs. path: a model folder or a `.gguf`
    file."""
    config, tensors = open_checkpoint(Path(path))
    model = DecoderModel(config, dtype, "meta")
    last = f"layers.{config.num_layers - 1}."
    slices = checkpoint_names(config).items()
    table = {name: part for name, part in slices if not part.param.startswith("layers.") or part.param.startswith(last)}
    fill_parameters(model, table, ((name, tensor) for name, tensor in tensors if name in table), device)
    return model.requires_grad_(False)


class TargetHead:
    """The target's logits, from hidden states [n, hidden] after its final norm.

    Summed and kept in float32: rounded to bfloat16 a logit of 25 is off by up to 6%, and so is a probability.
    """

    def __init__(self, target: DecoderModel) -> None:
        self._weight = _head_weight(target)
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None  # ids, their rows of the weight, and the other rows

    @property
    def device(self) -> torch.device:
        return self._weight.device

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits [n, V], float32 or wider."""
        return PLAIN.wide_gemm(hidden, self._weight)

    def of(
        self, ids: Tensor, hidden: Tensor, temperature: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the logits of the tokens `ids` [n, len(ids)], whether the largest of all logits is among them [n]
        bool, and how much of the probability at a temperature, or at those of all rows [n, 1], is theirs [n]; 1 where
        no temperature is named, which saves passes over the others.

        A CPU makes the others in half precision, whose GEMMs are five times as fast there; a token that is the best
        but for that rounding counts as the best.
        """
        weight, slow = self._weight, PLAIN.wide_gemm_is_slow(self._weight)
        if self._kept is None or self._kept[0] is not ids:
            self._kept = None  # or both would be there at once: another head's may take as much as the target's head
            others = torch.ones(len(weight), dtype=torch.bool, device=weight.device).index_fill_(0, ids, False)
            own = weight[ids]
            self._kept = ids, own.float() if slow else own, weight[others]
        _, own, rest = self._kept
        kept = PLAIN.wide_gemm(hidden, own)
        best = kept.amax(-1)
        if not len(rest):
            return kept, torch.ones_like(best, dtype=torch.bool), torch.ones_like(best)
        other = (hidden.to(rest.dtype) @ rest.t()).float() if slow else PLAIN.wide_gemm(hidden, rest)
        row_max = other.amax(-1)
        if temperature is None:
            share = torch.ones_like(best)
        else:
            share = torch.sigmoid((kept / temperature).logsumexp(-1) - (other / temperature).logsumexp(-1))
        return kept, best >= row_max - row_max.abs() * (2**-8 if slow else 0.0), share


def _head_weight(target: DecoderModel) -> Tensor:
    """Returns the target's output embedding, [V, hidden]."""
    return target.lm_head.dense_weight().detach()


# ---- parts -----------------------------------------------------------------------------------------------------------


def _start_as_last_norm(weight: Tensor, target: DecoderModel) -> None:
    """Copies that of the target's last norm, but for one of several streams."""
    if target.config.streams is None:
        weight.copy_(target.norm.weight)


def _layer_config(target: ModelConfig, ffn_size: int, layers: int = 1, **switches: Any) -> ModelConfig:
    """Returns the config of plain Llama layers of the target's sizes: what engines expect of a head, whatever family
    the target is of. switches: of their attention.

    Its rotary base is the target's. Scaling is not taken over, as published heads do not have it either.
    """
    norm = NormConfig(target.norm.eps)
    attention = AttentionConfig(*target.attention.shape, **switches)
    layer = LayerConfig(target.hidden_size, attention, ffn_size or target.mlp_size, norm)
    return replace(
        target,
        architecture=PLAIN_FAMILY,
        layers=(layer,) * layers,
        ropes=(RopeConfig(target.ropes[0].theta),),
        norm=norm,
        embed_scale=1.0,
        logit_scale=1.0,
        tie_embeddings=False,
        head_bias=False,
        own_rows=0,
        normed_embeddings=False,
        learned_positions=0,
        stored_rows=0,
        weight_format=DENSE,
    )


def _initialise(head: FeatureHead, seed: int) -> None:
    """Matrices uniform with the variance 1 / (3 columns), as torch's own linear layers start; norms one, biases zero.

    Made on the CPU, so that a seed gives the same head on any device.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in head.named_parameters():
            if name.endswith("bias"):
                param.zero_()
            elif param.dim() == 1:
                param.fill_(1.0)
            else:
                limit = param.shape[1] ** -0.5
                param.copy_(torch.rand(param.shape, generator=generator) * (2 * limit) - limit)


def _checked_count(ids: Tensor | None, vocab: int) -> int:
    """Returns how many tokens a draft vocabulary [n] has, 0 of none. Raises ConfigError."""
    if ids is None:
        return 0
    assert ids.dim() == 1 and ids.dtype == torch.int64 and ids.numel()
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise ConfigError(f"draft vocabulary: expected ascending, different ids below {vocab}")
    return len(ids)


def fresh_block(
    settings: Settings, aux_layers: tuple[int, ...], tokens: Iterable[Tokens], vocab: int, hidden: int
) -> BlockConfig:
    """Returns what a new head's block is like, as asked for. tokens: all texts; vocab, hidden: the target's.

    A DSpark head's first row predicts, and it has a Markov head and a confidence head; of the others that row is lost.
    A DFlash2 head has convolutions and a selector of published sizes. Raises ConfigError for a mask that the target
    does not have, and where every token is in use."""
    kind, steps = settings.drafter.heads[0], settings.block_steps or settings.training.block
    spark, two = kind == "dspark", kind == "dflash2"
    mask = checked_mask(settings, vocab)
    return BlockConfig(
        aux_layers=aux_layers,
        rows=steps + (not spark),
        mask=unused_token(tokens, vocab) if mask is None else mask,
        from_anchor=spark,
        windows=(),
        causal=(settings.causal_block,),
        markov=cast(Markov, settings.markov_head) if spark else "",
        rank=settings.markov_rank if spark or two else 0,
        confidence="markov" if spark else "",
        tied=settings.draft_lm_head == "target",
        taps=2 if two else 0,
        group=math.gcd(16, hidden) if two else 0,
        candidates=min(16, vocab) if two else 0,
    )


def checked_mask(settings: Settings, vocab: int) -> int | None:
    """Returns --mask-token. Raises ConfigError for one that a target of so many tokens does not have."""
    mask = settings.mask_token
    if mask is not None and mask >= vocab:
        raise ConfigError(f"--mask-token: expected a token id below {vocab}, found {mask}")
    return mask
