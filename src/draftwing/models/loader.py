"""Loads a model folder or a GGUF file into a `DecoderModel`.

Parameters start on the meta device and are allocated one by one as their tensors arrive, so memory stays within the
weights plus one shard. Nothing from a checkpoint is ever executed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError, ConfigError, listed
from draftwing.gguf_file import dequantized, open_gguf
from draftwing.layers.config import LayerConfig
from draftwing.layers.hybrid import HybridConfig
from draftwing.layers.indexer import INDEXER
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.linear import Linear, operations
from draftwing.layers.linear_ops.base import ParamSlice, WeightFormat
from draftwing.layers.linear_ops.blocks import log_blocks
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import log_groups
from draftwing.models import gguf_config, gguf_tensors
from draftwing.models.apart import each_expert, of_state_space, without_latents
from draftwing.models.config import ModelConfig, from_hf
from draftwing.models.decoder import DecoderModel
from draftwing.models.dummy import SEED, fill_random
from draftwing.models.fields import Fields
from draftwing.models.folder import folder_tensors
from draftwing.models.generation import suppressed
from draftwing.models.gguf_tensors import Progress
from draftwing.models.pooling import MODULES, encoder_of, has_head
from draftwing.models.quantised.config import Quantization, Scheme
from draftwing.models.quantised.cuts import DenseCut, stored_cuts
from draftwing.models.quantised.read import KVScales, assembled
from draftwing.models.weight_files import read_config_json, read_json
from draftwing.models.weight_map import (
    MTP_PREFIXES,
    OTHER_SENSES,
    canonical,
    checkpoint_names,
    is_elsewhere,
    nextn_layer,
    own_experts,
    predicts,
)
from draftwing.ops.gemm.stored import BlockRows, MXRows, QuantizedRows
from draftwing.ops.upload import Uploader
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Hugging Face name with its `model.` prefix; on the CPU, in blocks where the parameter's format takes them
Stored = Tensor | BlockRows | QuantizedRows | MXRows
Tensors = Iterable[tuple[str, Stored]]


def load_config(path: str | Path) -> ModelConfig:
    """Returns the config of a model folder or `.gguf` file, without its weights; raises CheckpointError."""
    path = Path(path)
    if path.suffix == ".gguf":
        return gguf_config.model_config(open_gguf(path))
    if not path.is_dir():
        raise CheckpointError(f"expected a model folder or a .gguf file, found neither at {path}")
    config = read_config_json(path)
    if "auto_map" in config:
        logger.info("auto_map in %s is ignored: code from a checkpoint is never executed", path / "config.json")
    found = replace(from_hf(config), suppressed=suppressed(path))
    if found.encoder is not None:
        encoder = encoder_of(path, found.encoder)
        found = replace(found, encoder=encoder, max_positions=encoder.context)
    if not found.tie_embeddings and (path / MODULES).is_file() and not has_head(path):
        found = replace(found, tie_embeddings=True, headless=True)
    return found if found.tower is None else replace(found, tower=found.tower.prepared(_preparing(path)))


def _preparing(path: Path) -> Fields:
    """Returns what a folder says of how pictures are prepared."""
    own, whole = path / "preprocessor_config.json", path / "processor_config.json"
    if own.exists():
        return Fields(read_json(own), own.name)
    return Fields(read_json(whole), whole.name).inner("image_processor") if whole.exists() else Fields({}, own.name)


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
    dummy: bool = False,
    weight_format: WeightFormat = DENSE,
    most_bytes: int | None = None,
    ranks: Ranks = ALONE,
    context: int = 0,
    adjust: Callable[[ModelConfig], ModelConfig] = lambda config: config,
) -> DecoderModel:
    """Loads a folder or a `.gguf` file; the rotary table covers the config's `max_positions`.

    dtype: of activations, and of weights that are not quantised.
    dummy: random weights in place of the stored ones, of which only the config is read.
    weight_format: of all matrices, where the checkpoint has no format of its own.
    most_bytes: that weights and rotary table may take; what takes more is refused before anything is allocated.
    ranks: over which the model is spread. Of the files this one reads its share alone, as far as they let it.
    context: tokens that texts have at most, 0: as many as there are positions.
    adjust: adds to the config what the files do not say.

    The parameters come frozen, as serving wants them; a trainer calls `requires_grad_()` on what it trains.

    Raises CheckpointError for missing, misshapen or duplicate tensors and for what the config asks in vain.
    """
    started = time.perf_counter()
    path = Path(path)
    kv_scales = KVScales()
    config, tensors = (
        (load_config(path), ()) if dummy else open_checkpoint(path, progress, weight_format, kv_scales, ranks)
    )
    config = adjust(config)
    if config.weight_format == DENSE:
        config = replace(config, weight_format=weight_format, vocab_format=weight_format.of_vocabulary)
    whole, config = config, config.for_texts(context or config.max_positions)
    if config != whole:
        logger.info("texts have at most %d tokens: indexers or chunks that would leave out none are not there", context)
    if most_bytes is not None:
        check_size(config, dtype, most_bytes)
    model = DecoderModel(config, dtype, "meta", ranks)
    harmless = _unread(config.layers) | ({"lm_head.weight"} if config.tie_embeddings else set())
    if dummy:
        in_mxfp4 = config.quantization is not None and config.quantization.method == "mxfp4"
        fill_random(model, device, SEED + ranks.rank, in_mxfp4, schemes_of(config, ranks))
    else:
        checked = _tied(tensors) if config.tie_embeddings else tensors
        fill_parameters(model, checkpoint_names(config, ranks), checked, device, harmless)
    model.kv_scales = kv_scales
    model.set_max_positions(config.max_positions)
    size = sum(p.nbytes for p in model.parameters()) + sum(op.sizes.total() for op in operations(model))
    what = "random weights made (load_format dummy: the text is worthless)" if dummy else "weights loaded"
    logger.info("%s: %.2f s, %.2f GB", what, time.perf_counter() - started, size / 1e9)
    log_blocks(model)
    log_groups(model)
    return model.requires_grad_(False)


def _unread(layers: Iterable[LayerConfig]) -> set[str]:
    """Returns names of tensors that checkpoints may have of layers that read others' keys and values, and of what
    follows from the config."""
    layers, made = list(layers), ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")
    of_ngrams = {
        f"model.layers.{i}.ple.ple_embedding.{name}"
        for i, layer in enumerate(layers)
        if layer.ngram is not None
        for name in made
    }
    return of_ngrams | {
        f"model.layers.{i}.self_attn.{name}.weight"
        for i, layer in enumerate(layers)
        if layer.mixer.kv_from is not None
        for name in ("k_proj", "v_proj", "k_norm")
    }


def mapped_bytes(path: Path, config: ModelConfig) -> int:
    """Returns how many bytes of a checkpoint's files are read row by row from there, and held nowhere else on a CPU:
    those of embeddings by layer, in a folder without a look at its files."""
    tables = [layer.ngram for layer in config.layers if layer.ngram is not None]
    ngrams = sum(one.rows * one.size // len(one.tables) for one in tables) * (config.dtype or torch.bfloat16).itemsize
    if path.suffix == ".gguf" and (tables or config.per_layer):
        file = open_gguf(path)
        return file.raw(gguf_tensors.PER_LAYER).nbytes if gguf_tensors.PER_LAYER in file.tensors else 0
    if not config.per_layer:
        return ngrams
    return config.per_layer_rows * config.num_layers * config.per_layer * (config.dtype or torch.bfloat16).itemsize


def _tied(tensors: Tensors) -> Tensors:
    """Returns the tensors. A head that is not the embedding, though the config says so, is left out, which is said:
    other libraries take it."""
    found: dict[str, Tensor] = {}  # mapped from their files
    for name, value in tensors:
        if name in (_EMBEDDING, _HEAD) and isinstance(value, Tensor):
            found[name] = value
            # Of other shapes where this rank has a part of the embedding.
            if len(found) == 2 and found[_EMBEDDING].shape == found[_HEAD].shape:
                embedding = found[_EMBEDDING]
                if not torch.equal(embedding, found.pop(_HEAD).to(embedding.dtype)):
                    logger.warning(
                        "lm_head.weight is not used: tie_word_embeddings is true, so logits are made with "
                        "model.embed_tokens.weight, which differs; to use it, set that to false in config.json"
                    )
                found.clear()
        yield name, value


def schemes_of(config: ModelConfig, ranks: Ranks) -> dict[str, Scheme]:
    """Returns how parameters are stored that are quantised: as the first matrix that is in each."""
    found: dict[str, Scheme] = {}
    if config.quantization is None:
        return found
    for name, part in checkpoint_names(config, ranks).items():
        if part.param not in found and part.param.endswith(".weight"):
            scheme = config.quantization.scheme_of(name.rpartition(".")[0])
            if scheme is not None:
                found[part.param] = scheme
    return found


def check_size(config: ModelConfig, dtype: torch.dtype, most_bytes: int) -> None:
    """Raises CheckpointError where a model of this config cannot fit, whatever its files hold."""
    size = config.weight_format.min_bytes(dtype, config.quantization is not None)
    kinds = {layer.mixer.rotates for layer in config.layers}
    table = sum(2 * kind[1] for kind in kinds if kind is not None) * config.max_positions * dtype.itemsize
    needed = config.matrix_weights * size + table
    if needed > most_bytes:
        raise CheckpointError(
            f"config of {config.architecture}: {config.num_layers} layers of hidden_size {config.hidden_size}, a "
            f"vocabulary of {config.vocab_size} and {config.max_positions} positions: expected a model that fits into "
            f"{most_bytes / 1e9:.1f} GB of memory, found one of {needed / 1e9:.1f} GB"
        )


def open_checkpoint(
    path: Path,
    progress: Progress | None = None,
    weight_format: WeightFormat = DENSE,
    kv_scales: KVScales | None = None,
    ranks: Ranks = ALONE,
) -> tuple[ModelConfig, Tensors]:
    """Returns the config of a folder or a `.gguf` file, and the tensors of its model, which are read one by one, in
    blocks where the file has them and the format takes them. kv_scales: gets those of the folder.  ranks: over which
    the model is spread, so that parts of tensors come."""
    if path.suffix == ".gguf":
        file = open_gguf(path)
        config = gguf_config.model_config(file)
        if weight_format.takes_blocks:
            config = config.in_blocks(gguf_tensors.block_of(file))
        held, cuts = own_experts(config, ranks), _cuts(config, ranks)
        return config, gguf_tensors.tensors(file, config, progress, weight_format.takes_blocks, False, held, cuts)
    config = load_config(path).in_blocks(weight_format.block)
    cuts, quantization, experts = _cuts(config, ranks), config.quantization, own_experts(config, ranks)
    parts, whole = _parts_of_files(cuts, quantization)
    stored = folder_tensors(path, progress, parts, lambda name: is_elsewhere(name, config, experts))
    own = _of_language(((canonical(name), value) for name, value in stored), config)
    others = own if kv_scales is None else kv_scales.taken(own)
    put_together = assembled(quantization, others, weight_format.reads_on)
    matrices = ((name, _cut(whole.get(name), name, value)) for name, value in put_together)
    if config.family.apart is not None:
        matrices = _apart(matrices, config.family.apart, cuts)  # type: ignore[assignment]
    hybrid = next((one.mixer for one in config.layers if isinstance(one.mixer, HybridConfig)), None)
    if hybrid is not None and hybrid.net.in_parts:
        matrices = _apart(matrices, partial(of_state_space, hybrid.net), cuts)  # type: ignore[assignment]
    latent = next((one.mixer for one in config.layers if isinstance(one.mixer, LatentAttentionConfig)), None)
    if latent is not None:
        matrices = without_latents(matrices, latent, cuts)  # type: ignore[assignment]
    if config.experts is None:
        return config, matrices
    device, family = weight_format.reads_on, config.family
    count, layout = config.experts.count, (family.interleaved, experts, config.hidden_size, family.across)
    return config, each_expert(matrices, count, cuts, device, *layout)  # type: ignore[arg-type]


def _of_language(tensors: Iterable[tuple[str, Tensor]], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Those of the language model itself: without prediction layers, which the drafter loads if such are served, and
    what reads images and hears."""
    aside = size = unserved = 0
    idle = [i for i, layer in enumerate(config.layers) if not (layer.mixes or layer.has_mlp)]  # without images
    others = (*OTHER_SENSES, *(f"model.layers.{i}." for i in idle))
    for name, value in tensors:
        if name.startswith(others):
            aside, size = aside + 1, size + value.nbytes
        elif name.startswith(MTP_PREFIXES):
            unserved += not predicts(name, config)
        elif nextn_layer(name, config) is None:
            yield name, value
    if unserved:
        logger.warning("%d tensors of prediction layers are not loaded: none are served with such a model", unserved)
    if aside:
        logger.info("%d tensors for images or sound are not loaded, %.2f GB", aside, size / 1e9)


def _apart(
    tensors: Tensors, apart: Callable[[str, Stored], Iterable[tuple[str, Stored]]], cuts: Mapping[str, Cut]
) -> Iterator[tuple[str, Stored]]:
    """Yields what such a function as `Family.apart` makes of each, of which this rank has the part that `cuts` says."""
    for name, value in tensors:
        for own, part in apart(name, value):
            yield own, cuts[own].of(own, part) if own != name and own in cuts else part


def _cuts(config: ModelConfig, ranks: Ranks) -> dict[str, Cut]:
    """Returns which tensors this rank has a part of. Raises ConfigError for a format that cannot be spread."""
    if ranks.size == 1:
        return {}
    if config.weight_format != DENSE:
        raise ConfigError(f"--tp-size {ranks.size}: this checkpoint's format of weights cannot be spread over ranks")
    return {name: part.cut for name, part in checkpoint_names(config, ranks).items() if part.cut is not None}


def _parts_of_files(
    cuts: Mapping[str, Cut], quantization: Quantization | None
) -> tuple[dict[str, Cut], dict[str, Cut]]:
    """Returns which tensors of files are read in part, and which matrices have to be put together before they are
    cut."""
    parts, whole = dict[str, Cut](), dict[str, Cut]()
    for name, cut in cuts.items():
        module, _, suffix = name.rpartition(".")
        scheme = None if quantization is None or suffix != "weight" else quantization.scheme_of(module)
        found = {"weight": cut} if scheme is None else stored_cuts(scheme, cut)
        if suffix != "weight":
            parts[name] = cut
        elif found is None:
            parts[name], whole[name] = DenseCut(*cut), cut
        else:
            parts |= {f"{module}.{one}": part for one, part in found.items()}
    return parts, whole


def _cut(cut: Cut | None, name: str, value: Tensor | QuantizedRows) -> Stored:
    """Returns the part of a matrix that was put together; one that is not quantised came in part."""
    came_in_part = cut is None or (isinstance(value, Tensor) and value.shape[cut.axis] == cut.share.size)
    return value if cut is None or came_in_part else cut.of(name, value)


def fill_parameters(
    module: nn.Module,
    table: Mapping[str, ParamSlice],
    tensors: Tensors,
    device: torch.device | str,
    harmless: Iterable[str] = (),
    cuts: bool = False,
) -> None:
    """Allocates on `device` and fills the parameters of a meta `module`, casting to each parameter's dtype.
    cuts: whether tensors come whole, and this rank has the parts of them that `table` says.

    A tensor that `table` does not name is reported in the log unless it is `harmless`; one that `table` names and
    that does not come is an error.
    """
    params = dict(module.named_parameters(remove_duplicate=False))
    missing, unused = set(table), []
    dequantised: Counter[tuple[str, str]] = Counter()  # bytes
    with Uploader(device) as uploader:
        for name, tensor in tensors:
            part = table.get(name)
            if part is None:
                if name not in harmless and not name.endswith("rotary_emb.inv_freq") and f".{INDEXER}." not in name:
                    unused.append(name)
                continue
            if name not in missing:
                raise CheckpointError(f"{name} is in the checkpoint twice")
            missing.discard(name)
            if cuts and part.cut is not None:
                tensor = part.cut.of(name, tensor)
            if part.order is not None:
                tensor = part.order.of(name, tensor)
            param = params[part.param]
            check_shape(name, stored_shape(tensor), list(part.of(param).shape))
            owner = module.get_submodule(part.param.rpartition(".")[0])
            if isinstance(owner, Linear) and part.times != 1:
                tensor, part = _scaled(name, tensor, part.times), part._replace(times=1.0)
            if isinstance(owner, Linear) and owner.op.keep(part, tensor):
                continue
            if isinstance(tensor, BlockRows):
                tensor = torch.from_numpy(dequantized(tensor.data.numpy(), tensor.kind))
            elif isinstance(tensor, QuantizedRows | MXRows):
                label, before = tensor.label, tensor.nbytes
                tensor = tensor.dense(param.dtype)
                dequantised += Counter({(label, "in"): before, (label, "out"): tensor.nbytes})
            wide = param.is_floating_point()
            # Values of 8 bits mean nothing without scales, which nobody has named.
            if not (tensor.is_floating_point() and tensor.itemsize > 1 if wide else tensor.dtype == param.dtype):
                wanted = "floating point values of 16 bits or more" if wide else f"values in {param.dtype}"
                raise CheckpointError(f"{name}: expected {wanted}, found {tensor.dtype}")
            if param.is_meta:
                param = params[part.param] = allocate(module, part.param, param, device)
            uploader.copy(part.of(param), part.made(tensor.to(param.dtype)) if part.changes else tensor)
    for label in sorted({label for label, _ in dequantised}):
        logger.info(
            "matrices in %s are dequantised, which takes %.2f GB in place of %.2f",
            label, dequantised[label, "out"] / 1e9, dequantised[label, "in"] / 1e9,
        )  # fmt: skip
    for name, param in params.items():
        owner, last = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if param.is_meta and last in (unsaid := getattr(owner, "unsaid", {})):  # which no checkpoint has
            allocate(module, name, param, device).data.copy_(torch.as_tensor(unsaid[last]))
    if missing:
        others = f"; it has these instead: {listed(sorted(unused), 4)}" if unused else ""
        raise CheckpointError(f"tensors missing from the checkpoint: {listed(sorted(missing))}{others}")
    if unused:
        logger.warning("tensors of the checkpoint that are not used: %s", listed(sorted(unused)))


def _scaled(name: str, value: Stored, times: float) -> Stored:
    if isinstance(value, Tensor):
        return value * times
    if isinstance(value, QuantizedRows):
        return value._replace(scales=value.scales * times)
    raise CheckpointError(
        f"{name}: expected a matrix that can be multiplied with {times:g}, found {type(value).__name__}"
    )


def check_shape(name: str, shape: list[int], expected: list[int]) -> None:
    """Raises CheckpointError for a tensor of another shape than what it fills."""
    if shape != expected:
        raise CheckpointError(f"{name}: expected shape {expected}, found {shape}")


def stored_shape(value: Stored) -> list[int]:
    """Returns the shape of a tensor, or of a matrix that is stored in blocks or groups."""
    if isinstance(value, BlockRows):
        return [len(value.data), value.columns]
    if isinstance(value, MXRows):
        return [value.rows, value.columns]
    return list(value.codes.shape if isinstance(value, QuantizedRows) else value.shape)


def allocate(module: nn.Module, name: str, meta: nn.Parameter, device: torch.device | str) -> nn.Parameter:
    """Puts an empty parameter on `device` in the place of the one that `name` has on the meta device."""
    owner, _, leaf = name.rpartition(".")
    values = torch.empty(meta.shape, dtype=meta.dtype, device=device)
    param = nn.Parameter(values, meta.is_floating_point())  # others take no gradient
    setattr(module.get_submodule(owner), leaf, param)
    return param
