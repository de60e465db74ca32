"""The tensors of GGUF files under the names, and in the form, that a folder's checkpoint has them in."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, block_values, is_quantized
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.models.apart import of_latents
from draftwing.models.config import ModelConfig
from draftwing.models.family import InGGUF
from draftwing.models.fields import MAX_LAYERS, Fields
from draftwing.models.weight_map import MTP, NGRAM_TABLE, POSITIONS
from draftwing.models.weight_map import PER_LAYER as PER_LAYER_IN_FOLDERS
from draftwing.ops.gemm.stored import BlockRows, MXRows
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)
Stored = Tensor | BlockRows
Part = TypeVar("Part", bound=Tensor | BlockRows)
PER_LAYER = "per_layer_token_embd.weight"  # the tensor of embeddings by layer
MXFP4 = "MXFP4"  # GGML's name of the type
# [experts, rows, columns], of which gates and ups may be one tensor, the gates first
EXPERT_TENSORS = {
    "ffn_gate_exps": ("gate",), "ffn_up_exps": ("up",), "ffn_down_exps": ("down",), "ffn_gate_up_exps": ("gate", "up"),
}  # fmt: skip
BLOCK = re.compile(r"blk\.(\d+)\.")
EXPERT_PARTS = re.compile(rf"blk\.(\d+)\.({'|'.join(EXPERT_TENSORS)})\.(weight|bias)")
_NORM = re.compile(r"norm(_key|_query|_conv)?\.weight$")
_JOINED = re.compile(r"(blk\.\d+\.)(ssm_ba|ssm_in)\.weight")  # of delta nets, by key head
NO_CUTS: Mapping[str, Cut] = MappingProxyType({})
_SHARED_UP = ".ffn_up_shexp.weight"
_OF_CONFIG = "rope_freqs.", "rope_factors_", "altup_"
# Of a prediction layer, copies of the model's embedding and head.
_NEXTN_COPIES = ".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight"


def own_layers(fields: Fields) -> int:
    """Returns layers of the model itself; further blocks are prediction layers."""
    blocks = fields.whole("block_count", high=MAX_LAYERS)
    return blocks - fields.whole("nextn_predict_layers", 0, blocks - 1, 0)


def block_of(file: GGUFFile) -> int:
    """Returns how many columns of the matrices that end MLPs are one block, at most."""
    return max((block_values(file.kind(name)) for name in file.tensors if ".ffn_down" in name), default=1)


def tensors(
    file: GGUFFile,
    config: ModelConfig,
    progress: Progress | None = None,
    in_blocks: bool = False,
    predicting: bool = False,
    experts: range | None = None,
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> Iterator[tuple[str, Tensor | BlockRows | MXRows]]:
    """Yields (Hugging Face name, float32 tensor), dequantised one at a time; `progress(done, total)` in bytes. Experts
    in MXFP4 stay so.

    in_blocks: quantised matrices come as they are stored, and mostly are views of the file.  predicting: those of the
    prediction layers come, in place of the model's own.  experts: those that come, None: all.  cuts: by name, where a
    part is wanted; of most matrices nothing else is read.
    """
    arch = file.metadata["general.architecture"]
    own = own_layers(Fields(file.metadata, str(file.path), f"{arch}."))
    nets = [layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaNetConfig)]
    latent = next((layer.mixer for layer in config.layers if isinstance(layer.mixer, LatentAttentionConfig)), None)
    permuted = config.family.gguf is not None and config.family.gguf.permuted
    total, done = file.size, 0
    for name in file.tensors:
        block = BLOCK.match(name)
        # Of the model's embedding and head, or of what is there in two parts.
        copied = name.endswith(_NEXTN_COPIES) or is_copy(name, file.tensors)
        if name.startswith(_OF_CONFIG) or copied or (block is not None and int(block[1]) >= own) != predicting:
            continue  # part of the config, or of `InGGUF.more`, or nobody asks for it
        match = EXPERT_PARTS.fullmatch(name)
        if match:
            yield from _of_experts(file, config, name, match, in_blocks, own, experts, cuts)
            done += file.raw(name).nbytes
            continue
        info = file.tensors[name]
        if name == PER_LAYER:  # larger than all others
            raw = torch.from_numpy(file.mapped(name))
            yield _table_name(config), BlockRows(file.kind(name), raw, info.shape[-1])
            done += raw.nbytes
            continue
        of_heads = latent is not None and len(info.shape) == 3  # a matrix for each
        as_stored = in_blocks and (len(info.shape) == 2 or of_heads) and is_quantized(info.type_id)
        cut = cuts.get(hf_name(name, config, own))
        if cut is not None and (len(info.shape) != 2 or info.shape[cut.axis] != cut.share.whole):
            cut = None  # it is cut when it is as folders have it
        if as_stored or cut is not None:
            value = _matrix(file, name, file.raw(name), cut, as_stored)
        else:
            value = torch.from_numpy(file.dequantized(name))
            value = value.flatten(0, -2) if of_heads else value
        rows = value.data if isinstance(value, BlockRows) else value
        if config.norm.offset and _NORM.search(name) and not name.endswith("ssm_norm.weight"):
            rows = rows - config.norm.offset  # as a checkpoint in folders has them
        if permuted and name.split(".")[-2] in ("attn_q", "attn_k"):
            heads, other = divmod(len(rows), config.attention.head_dim)
            rows = rows if other else unpermuted(rows, heads)
        value = value._replace(data=rows) if isinstance(value, BlockRows) else rows
        for part, one in without_key_heads(name, value, nets[0]) if nets else _gates_apart(name, value, config):
            theirs = hf_name(part, config, own)
            made = _as_in_folders(theirs, one) if isinstance(one, Tensor) else one
            for last, each in ((theirs, made),) if latent is None else of_latents(theirs, made, latent):
                yield last, each if cut is not None else _own(cuts, last, each)
        done += file.raw(name).nbytes
        if progress is not None:
            progress(done, total)
    form = config.family.gguf
    if form is not None and form.more is not None and not predicting:
        more = form.more(file, own)
        yield from ((name, _own(cuts, name, value)) for name, value in more)
    if progress is not None:
        progress(total, total)


def _of_experts(
    file: GGUFFile,
    config: ModelConfig,
    name: str,
    match: re.Match[str],
    in_blocks: bool,
    own: int,
    experts: range | None,
    cuts: Mapping[str, Cut],
) -> Iterator[tuple[str, Tensor | BlockRows | MXRows]]:
    """Yields the matrices, or biases, of a tensor of all experts, one by one. own: layers of the model itself."""
    info, names, bias = file.tensors[name], config.family.expert_names, match[3] == "bias"
    dims = 2 if bias else 3
    if len(info.shape) != dims:
        raise CheckpointError(f"{file.path}: {name}: expected {dims} dimensions, found shape {list(info.shape)}")
    count, parts = info.shape[0], EXPERT_TENSORS[match[2]]
    raw, kind = file.raw(name).reshape(count, 1 if bias else info.shape[1], -1), file.kind(name)
    as_stored = in_blocks and is_quantized(info.type_id)
    if bias and len(parts) > 1:
        raise CheckpointError(f"{file.path}: {name} is not supported: expected biases of gates and ups apart")
    each = [
        (expert, getattr(names, part), rows)
        for expert, stored in enumerate(raw)
        if experts is None or expert in experts
        for part, rows in zip(parts, np.array_split(stored, len(parts)), strict=True)
    ]
    for expert, part, stored in each:
        theirs = f"{layer_name(int(match[1]), match[2], config, own)}.{names.experts}.{expert}.{part}.{match[3]}"
        cut = cuts.get(theirs)
        if bias:
            yield theirs, _own(cuts, theirs, torch.from_numpy(file.decoded(name, stored)[0]))
        elif kind == MXFP4 and not as_stored:
            whole = _matrix(file, name, stored, cut, True)
            assert isinstance(whole, BlockRows)
            yield theirs, mx_rows(whole.data.numpy())
        else:
            yield theirs, _matrix(file, name, stored, cut, as_stored)


def _own(cuts: Mapping[str, Cut], name: str, value: Part) -> Part:
    """Returns the part that is wanted."""
    return cuts[name].of(name, value) if name in cuts else value  # type: ignore[return-value]


def _matrix(file: GGUFFile, name: str, raw: NDArray[np.uint8], cut: Cut | None, as_stored: bool) -> Tensor | BlockRows:
    """Returns a matrix as it is stored, or in float32; where `cut` is a part, it is cut before it is dequantised.

    raw [rows, bytes of a row]: in the file."""
    kind = file.kind(name)
    rows, block = BlockRows(kind, torch.from_numpy(raw), file.tensors[name].shape[-1]), block_values(kind)
    early = cut is not None and (as_stored or cut.axis == 0 or not (cut.share.start % block or cut.share.size % block))
    if cut is not None and early:
        found = cut.of(name, rows)
        assert isinstance(found, BlockRows)
        rows = found
    if as_stored:
        return rows
    made = torch.from_numpy(file.decoded(name, rows.data.numpy()))
    return made if cut is None or early else cut.of_tensor(name, made)


def mx_rows(stored: NDArray[np.uint8]) -> MXRows:
    """stored [rows, columns / 32 * 17]: of a block its exponent, then its values, the first half in the low bits of 16
    bytes and the second in the high bits."""
    blocks = stored.reshape(len(stored), -1, 17)
    halves = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)  # [rows, blocks, 32]
    codes = halves[..., ::2] | halves[..., 1::2] << 4
    return MXRows(torch.from_numpy(codes.reshape(len(stored), -1)), torch.from_numpy(blocks[..., 0].copy()))


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Undoes the row order of the `llama` architecture, which pairs rows (2i, 2i + 1) of a head for rotation.

    rows [heads * head_dim, ...], weight or bias; row 2i of a head becomes row i, row 2i + 1 row head_dim / 2 + i.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _as_in_folders(name: str, values: Tensor) -> Tensor:
    """Returns a tensor as a folder's checkpoint has it: converters have done some of the arithmetic. name: there."""
    if name.endswith(".A_log"):  # most converters negate it; one for each head, or for each element of a state
        return (values if min(values.shape) > 1 else values.flatten()).abs().log()
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return values.view(-1, 1, values.shape[-1])
    # Of state-space layers one row for each head, or group; corrections of ERNIE 4.5 are one row of a matrix.
    if name.endswith((".D", "norm.weight", "_correction_bias")):
        return values.flatten()
    return values.view(1, -1) if name.endswith("shared_expert_gate.weight") else values


def without_key_heads(name: str, value: Stored, net: DeltaNetConfig) -> Iterator[tuple[str, Stored]]:
    """Yields (name, value) of a tensor, or of two in place of one in which those of a key head lie together."""
    match = _JOINED.fullmatch(name)
    if match is None:
        yield name, value
        return
    whole = replace(net, by_key_head=True)
    if match[2] == "ssm_ba":
        parts, order = ("ssm_beta", "ssm_alpha"), whole.ba_order()
        sizes = net.value_heads, net.value_heads
    else:
        parts, order = ("attn_qkv", "attn_gate"), whole.qkvz_order()
        sizes = net.keeps().channels, net.made
    joined, first = value if order is None else order.of(name, value), 0
    for part, size in zip(parts, sizes, strict=True):
        own = Cut(0, Share(first, size, sum(sizes))).of(name, joined)
        assert isinstance(own, Tensor | BlockRows)
        yield f"{match[1]}{part}.weight", own
        first += size


def _gates_apart(name: str, value: Stored, config: ModelConfig) -> Iterator[tuple[str, Stored]]:
    """Yields (name, value) of a tensor, or of two in place of the gates and ups of the expert of all rows in one."""
    width = 0 if config.experts is None else config.experts.shared
    rows = len(value.data if isinstance(value, BlockRows) else value)
    if not name.endswith(_SHARED_UP) or rows != 2 * width:
        yield name, value
        return
    for part, first in (("gate", 0), ("up", width)):
        own = Cut(0, Share(first, width, rows)).of(name, value)
        assert isinstance(own, Tensor | BlockRows)
        yield name.replace("ffn_up_", f"ffn_{part}_"), own


def is_copy(name: str, names: Container[str]) -> bool:
    """Returns whether a tensor is the matrix of keys and values, of which the file has both parts, too."""
    parts = (name.replace("attn_kv_b", part) for part in ("attn_k_b", "attn_v_b"))
    return name.endswith(".attn_kv_b.weight") and all(part in names for part in parts)


# ---- names -----------------------------------------------------------------------------------------------------------

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "position_embd.weight": f"{POSITIONS}.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    PER_LAYER: f"{PER_LAYER_IN_FOLDERS}.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "layer_output_scale": "layer_scalar",
}
# Of layers with norms before and after each part.
_OUT_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Of a prediction layer, below `model.mtp`; the rest of it is named as a layer's.
_NEXTN_NAMES = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "layer_output_norm": "norm",
}
_BARE = {
    "A_log",
    "dt_bias",
    "D",
    "sinks",
    "layer_scalar",
    "correct_output_scale",
}  # ends of names without `.weight` or `.bias` in folders


def _table_name(config: ModelConfig) -> str:
    """Returns what the table is called in a folder of which single rows are read: of each layer's own embeddings, or of
    the n-grams of one layer."""
    of_ngrams = next((i for i, layer in enumerate(config.layers) if layer.ngram is not None), None)
    return TOP_NAMES[PER_LAYER] if of_ngrams is None else f"{NGRAM_TABLE.format(of_ngrams)}.shard_0.weight"


def layer_name(block: int, part: str, config: ModelConfig, own: int) -> str:
    """Returns what the name of a block's part begins with. own: layers of the model itself."""
    if block < own:
        return f"model.layers.{block}"
    # Where layers have one part alone, the MLP of a prediction layer is one of its own.
    of_mlp = part.startswith(("ffn_", "exp_probs_b", "post_attention_norm"))
    return f"{MTP}layers.{block - own + bool(of_mlp and config.family.mtp_names)}"


def hf_name(name: str, config: ModelConfig, own: int) -> str:
    """Returns the Hugging Face name of a GGUF tensor; one that has none keeps its own. own: layers of the model
    itself."""
    family, form = config.family, config.family.gguf or InGGUF("")
    match = re.fullmatch(r"blk\.(\d+)\.([\w.]+?)(\.weight|\.bias|)", name)
    if match is None:
        return (TOP_NAMES | {**form.top_names}).get(name, name)
    part, suffix = match[2], match[3]
    if part == form.next_norm:
        return f"model.layers.{int(match[1]) + 1}.input_layernorm{suffix}"
    layer = layer_name(int(match[1]), part, config, own)
    names = {**BLOCK_NAMES, **(_OUT_NORM_NAMES if family.out_norms else {}), **form.names}
    of_experts, experts = family.expert_names, config.experts
    if part == "ffn_gate_inp" and experts is not None:
        return f"{layer}.{of_experts.router}{suffix}"
    if part == "exp_probs_b" and experts is not None and experts.routing.has_correction:
        return f"{layer}.{of_experts.correction}"
    shared = re.fullmatch("ffn_(gate|up|down)_shexp", part)
    if shared is not None and experts is not None and experts.shared:
        return f"{layer}.{of_experts.shared}.{getattr(of_experts, shared[1])}{suffix}"
    if part in _NEXTN_NAMES:
        return f"{MTP}{family.mtp_names.get(_NEXTN_NAMES[part], _NEXTN_NAMES[part])}{suffix}"
    if part not in names:
        return name
    theirs = family.layer_names.get(names[part], names[part])
    suffix = suffix or ".weight" * theirs.endswith("norm")  # that of norms is missing in Falcon-H1's files
    return f"{layer}.{theirs}{'' if theirs.rpartition('.')[2] in _BARE else suffix}"
