"""The models of an engine, target and drafter: in which types they compute and store, what their files must be, their
weights, which tokens may be drafted, and the policy that chooses what is.

What configs and file names tell of an engine that cannot be is checked before any weight is read: that may take
minutes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwing.config.drafters import TOKEN_MAP, shipped_head
from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, PREDICTED, TreeShape
from draftwing.engine.devices.base import Device
from draftwing.engine.row_table import RowTable
from draftwing.engine.startup.adapters import adapted_kinds
from draftwing.engine.startup.memory import row_length
from draftwing.errors import CheckpointError, ConfigError
from draftwing.gguf_file import open_gguf
from draftwing.layers.linear_ops.base import SAFE_KIND, WeightFormat
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.log import progress_bar
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import SHARED, DecoderModel
from draftwing.models.heads.config import read_config, same
from draftwing.models.hub import resolve_model
from draftwing.models.loader import load_config, load_model
from draftwing.models.towers import projector_file
from draftwing.models.towers.loading import load_tower, stored_tensors
from draftwing.models.weight_files import weight_files
from draftwing.ops.gemm.groups import SCHEMES
from draftwing.ops.types import Draft
from draftwing.parallel.ranks import ALONE, Ranks
from draftwing.sched.policy.cost import StepCost
from draftwing.sched.policy.shape_policy import FixedShape, TreePolicy
from draftwing.spec.drafter import DraftContext, Drafter, DraftStep
from draftwing.spec.token_map import FIRST, LARGE, check_topk, load_token_map
from draftwing.text.tokenizer import Tokenizer, load_tokenizer, vocabulary_difference

_AS_BLOCKS = {"fp8": "Q8_0", "w4a16": "Q4_0"}  # on a CPU, by the name that they have on a GPU
_OF_HEADS = "int8"  # the scheme of draft heads with a quantised target
OF_LM_HEADS = "w4a16"  # and of a copy of a large lm_head for drafts, by default
# Types of activations that a GPU has kernels for.
_TAKEN = {"fp8": (torch.bfloat16,), "w4a16": (torch.bfloat16, torch.float16), "int8": (torch.bfloat16,)}
log = logging.getLogger("draftwing")


class Precision(NamedTuple):
    """Types of one engine."""

    dtype: torch.dtype  # of activations, and of weights that are not quantised
    kv_dtype: torch.dtype  # of the KV pool
    weights: WeightFormat = DENSE  # of language models, the target and one that drafts
    head_weights: WeightFormat = DENSE  # of draft heads, whose errors cost acceptance, never text
    draft_lm_head: str | None = None  # the scheme of a copy of the lm_head for drafts of few rows


def pick_precision(
    options: Options, device: Device, checkpoint: torch.dtype | None, quantised: bool = False
) -> Precision:
    """Returns what `--dtype`, `--quantization` and `--kv-cache-dtype` come to on this device. checkpoint: what the
    weights were saved in, None where it does not say; quantised: as the config says. Raises ConfigError for what the
    device cannot do."""
    kind = _block_kind(options, device)
    if kind is None:
        asked = pick_dtype(options.dtype, device, checkpoint)
        dtype = device.ops.exact_dtype(asked)
        if dtype != asked:
            log.info(
                "--dtype %s: computed in float32, for in that type a text would depend on the batch", options.dtype
            )
        weights = _unblocked(options, device, dtype)
        heads: WeightFormat = DENSE
        few_bits = quantised or options.quantization in SCHEMES
        if isinstance(weights, GroupFormat) and few_bits and dtype in _TAKEN[_OF_HEADS]:
            # A step of the target is shorter, and drafts must be as well.
            heads = replace(weights, scheme=_OF_HEADS)
        kv_dtype = _kv_dtype(options, device, dtype, dtype)
        return Precision(dtype, kv_dtype, weights, heads, _draft_lm_head(options, device, dtype))
    # Activations are rounded to 8 bits in blocks before each product; what lies between products stays in float32.
    kv_dtype = _kv_dtype(options, device, torch.float32, torch.bfloat16)
    scheme = _draft_lm_head(options, device, torch.float32)
    return Precision(torch.float32, kv_dtype, BlockFormat(kind, device.ops), BlockFormat(SAFE_KIND, device.ops), scheme)


def pick_dtype(name: str, device: Device, checkpoint: torch.dtype | None) -> torch.dtype:
    """Returns the type that `--dtype` names. checkpoint: what the weights were saved in."""
    if name == "auto":
        return device.default_dtype(checkpoint)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _block_kind(options: Options, device: Device) -> str | None:
    """Returns the kind of blocks that weights are quantised to, None where they stay as they are."""
    asked, known = options.quantization, device.ops.block_kinds
    if asked == "none" or (asked == "auto" and (options.dtype != "auto" or not known)):
        return None
    if asked == "auto":
        return SAFE_KIND
    if asked in _AS_BLOCKS and device.ops.keeps_groups:
        return None
    kind, option = _AS_BLOCKS.get(asked, asked.upper()), f"--quantization {asked}"
    if kind not in known:
        other = "fp8, w4a16, " if device.ops.keeps_groups else ""
        raise ConfigError(
            f"{option}: weights are multiplied in blocks on a CPU (--device cpu), by our C extension, which is built "
            f"where draftwing is installed with a compiler, unless DRAFTWING_NATIVE=0. Use {other}none or auto"
        )
    if options.dtype not in ("auto", "float32"):
        raise ConfigError(f"{option} computes in float32 between products: leave out --dtype {options.dtype}")
    return kind


def _unblocked(options: Options, device: Device, dtype: torch.dtype) -> WeightFormat:
    """Returns the format of weights that do not become blocks."""
    if options.quantization == "none" or not device.ops.keeps_groups:
        return DENSE
    scheme = options.quantization if options.quantization in SCHEMES else None
    if scheme is not None and dtype not in _TAKEN[scheme]:
        raise ConfigError(
            f"--quantization {scheme} with --dtype {str(dtype).removeprefix('torch.')}: expected "
            f"{' or '.join(str(taken).removeprefix('torch.') for taken in _TAKEN[scheme])}"
        )
    return GroupFormat(scheme, device.ops, device.ops.fp8_from if options.fp8_activations == "auto" else None)


def _draft_lm_head(options: Options, device: Device, dtype: torch.dtype) -> str | None:
    """Returns the scheme of the lm_head of drafts; None: as the model or the head has it."""
    asked = options.speculative_lm_head_quantization
    if asked == "none":
        return None
    scheme = OF_LM_HEADS if asked == "auto" else asked
    if device.ops.keeps_groups and dtype in _TAKEN[scheme]:
        return scheme
    if asked == "auto":
        return None
    raise ConfigError(
        f"--speculative-lm-head-quantization {asked}: expected a GPU with our own kernels and a model in "
        f"{' or '.join(str(taken).removeprefix('torch.') for taken in _TAKEN[scheme])}, found one in "
        f"{str(dtype).removeprefix('torch.')} on {device.kind}: use auto, with which a CPU has what is in bfloat16 in "
        "8 bits already"
    )


def _kv_dtype(options: Options, device: Device, dtype: torch.dtype, default: torch.dtype) -> torch.dtype:
    if options.kv_cache_dtype == "auto":
        return default
    if options.kv_cache_dtype == "fp8_e4m3":
        if dtype.itemsize != 2 or not device.ops.reads_fp8_pool:
            raise ConfigError(
                "--kv-cache-dtype fp8_e4m3: expected a model in bfloat16 or float16 on CUDA (compute capability 8.9 "
                f"or later), found one in {str(dtype).removeprefix('torch.')} on {device.kind}: leave it out"
            )
        return torch.float8_e4m3fn
    if options.kv_cache_dtype == "int8":
        if not device.ops.reads_int8_pool:
            raise ConfigError(
                "--kv-cache-dtype int8: expected a CPU (--device cpu) with our C extension, which is built where "
                "draftwing is installed with a compiler, unless DRAFTWING_NATIVE=0; found the operations of "
                f"{device.ops.title} on {device.kind}: leave it out"
            )
        return torch.int8
    asked: torch.dtype = getattr(torch, options.kv_cache_dtype)
    if asked == dtype or (device.ops.reads_half_pool_in_fp32 and dtype == torch.float32):
        return asked
    found = str(dtype).removeprefix("torch.")
    raise ConfigError(
        f"--kv-cache-dtype {options.kv_cache_dtype} with a model in {found}: expected auto"
        + (f" or {found}" if dtype != torch.float16 else "")
    )


def check_target(options: Options, path: Path, config: ModelConfig) -> None:
    """Raises ConfigError for a context that the model does not have, CheckpointError for weights that are not there."""
    wanted = options.context_length
    if wanted and wanted > config.max_positions:
        raise ConfigError(f"--context-length {wanted} exceeds the {config.max_positions} positions of the model")
    if path.is_dir() and not options.dummy:
        weight_files(path)
    asked = options.quantization
    stored = () if asked in ("auto", "none") else _stored_as(path, config)
    if stored and asked not in stored:
        log.warning(
            "--quantization %s: the checkpoint is quantised already (%s) and stays so; only its other matrices change",
            asked, ", ".join(stored),
        )  # fmt: skip


def _stored_as(path: Path, config: ModelConfig) -> tuple[str, ...]:
    """In which formats a checkpoint is quantised, in lower case; empty where it is not."""
    if config.quantization is not None:
        return (config.quantization.method,)
    if path.suffix != ".gguf":
        return ()
    file = open_gguf(path)
    return tuple(sorted({file.kind(name).lower() for name in file.tensors} - {"f32", "f16", "bf16"}))


def check_draft_files(options: Options, path: Path, target: ModelConfig) -> None:
    """Checks files of a draft model as those of the target. options: `for_engine`; path: of the draft model. Not for a
    user's own drafter, whose files may be anything."""
    spec = options.drafter_spec
    if spec.same_tokenizer:
        vocab = min(load_config(path).vocab_size, target.vocab_size)
    elif path.suffix == ".gguf" and "mtp" in spec.heads:
        vocab = target.vocab_size  # the loader reads of it what there is to check
    elif spec.heads:
        if not path.is_dir() and path.suffix != ".gguf":
            raise CheckpointError(f"draft model: expected a folder or a .gguf file, found neither at {path}")
        try:
            raw = read_config(path)
            same("vocab_size", target.vocab_size, raw.get("vocab_size", target.vocab_size))
            if raw.get("target_hidden_size") != target.hidden_size:  # for which an EAGLE-3 head may be smaller
                hidden = raw.get("hidden_size", target.hidden_size)
                same("hidden_size of the target it was trained for", target.hidden_size, hidden)
        except CheckpointError as error:
            raise CheckpointError(f"draft model {path}: {error}") from None
        vocab = raw.get("draft_vocab_size") or target.vocab_size
    else:
        return
    if path.is_dir() and not options.dummy:
        weight_files(path)
    check_topk(options.speculative_shape.topk, vocab, str(path))


def check_token_map(options: Options, token_ids: Tensor) -> None:
    """Raises ConfigError for a token map that a drafter heeds, with too few tokens. options: `for_engine`."""
    if TOKEN_MAP in options.drafter_spec.options:
        check_topk(options.speculative_shape.topk, len(token_ids), f"the token map {options.speculative_token_map}")


def capability(device: Device, ranks: Ranks) -> dict[str, Any]:
    """Returns what drives the model. ranks: how many; devices: that of each rank; kernels: what computes there; links:
    between them; sums: how partial sums are taken, and why."""
    devices = device.names(ranks.size)
    found: dict[str, Any] = {"ranks": ranks.size, "devices": devices, "kernels": device.ops.title}
    if ranks.size == 1:
        return found | {"why": "--tp-size 1: the model is on one device"}
    why = f"--tp-size {ranks.size}: every rank has a share of each layer's heads, of its MLP and of the vocabulary"
    return found | {"links": device.links(ranks.size), "sums": ranks.title, "why": why}


def in_words(found: dict[str, Any]) -> str:
    """Returns one line for the log."""
    devices = ", ".join(sorted(set(found["devices"])))
    return f"{found['ranks']} ranks on {devices}; links {found['links']}; sums: {found['sums']}"


def load_with_progress(
    path: Path, precision: Precision, device: Device, options: Options, ranks: Ranks = ALONE, target: bool = True
) -> DecoderModel:
    """Returns the model, packed. target: whether it is the one that options are of."""
    with progress_bar(unit="B", unit_scale=True, desc="loading weights", disable=ranks.rank > 0) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done >= total:
                bar.close()  # before anything is logged

        file = projector_file.find(path, options.mmproj) if target and not options.disable_images else None
        most = device.memory_limit() * (ranks.size if device.has_own_memory else 1)
        model = load_model(
            path, precision.dtype, device.device, progress, options.dummy, precision.weights, most, ranks,
            options.context_length or 0, lambda config: _seeing(config, path, file, options),
        )  # fmt: skip
    apart = target and SHARED in adapted_kinds(options)
    model.pack(device.ops, options.deterministic and target, options.enable_deterministic_inference, apart)
    tower = model.config.tower
    if not target or tower is None or options.disable_images:
        return model
    model.tower = load_tower(
        tower, stored_tensors(file or path, tower), precision.dtype, device.device, precision.weights, device.ops,
        options.dummy,
    )  # fmt: skip
    if device.ops.compute_capability is not None:
        with torch.inference_mode():
            model.tower.module.warm()
    return model


def _seeing(config: ModelConfig, path: Path, file: Path | None, options: Options) -> ModelConfig:
    """Returns a config with what reads images of a file beside the model's, if there is one."""
    return config if file is None else projector_file.with_projector(config, path, file, options.mmproj is not None)


def make_drafter(
    options: Options, path: Path, token_ids: Tensor | None, target: DecoderModel, precision: Precision, device: Device
) -> tuple[Drafter | None, FixedShape | TreePolicy]:
    """Returns the drafter and shape policy that options `for_engine` ask for; path: of the draft model, or of the
    target where it drafts for itself."""
    if not options.drafts:
        # Without a predicted output every step is plain.
        return None, FixedShape(PREDICTED if target.encoder is None else PLAIN)
    shape, rows = options.speculative_shape, options.max_running_requests
    assert rows is not None, "for_engine gives it a value"

    def load(path: Path) -> DecoderModel:
        return load_with_progress(path, precision, device, options, target=False)

    def free_memory() -> int:
        device.trim()
        share = options.mem_fraction_static
        others = 0 if share is None else int(device.total_memory() * (1 - share))  # what this engine leaves alone
        return device.free_memory() - others

    drafter: Drafter = options.drafter_spec.make(
        DraftContext(
            options, target, shape, rows + 1, precision.dtype, device.device, device.ops, path, token_ids, load,
            precision.head_weights, precision.draft_lm_head, free_memory,
        )
    )  # fmt: skip
    if options.drafter_spec.own and not drafter.kv_layers:
        check_draft(drafter, options.drafter, shape, device)
    menu = drafter.menu(shape)
    if options.speculative_fixed_shape:
        return drafter, FixedShape(menu[0])  # which is deeper than a model's where a lookup drafts, too
    return drafter, TreePolicy(menu, StepCost(menu, False), not drafter.fixed_confidence, drafter.initial_confidence)


@torch.inference_mode()
def check_draft(drafter: Drafter, name: str, shape: TreeShape, device: Device) -> None:
    """Raises ConfigError where a user's drafter, which needs no pool, proposes another tree than it is asked for.
    Kernels would not notice."""
    table = RowTable(1, row_length(shape.nodes + 1), device)
    rows = torch.zeros(1, dtype=torch.int64, device=device.device)
    draft = drafter.propose(DraftStep(table, rows, shape, 1, rows[:0]))
    if not isinstance(draft, Draft):
        raise ConfigError(f"{name}: propose must return a Draft; found {type(draft).__name__}")
    for part, tensor, dtype in zip(draft._fields[:3], draft[:3], (torch.int64, torch.int64, torch.bool), strict=True):
        if tensor.shape != (1, shape.nodes) or tensor.dtype != dtype:
            raise ConfigError(
                f"{name}: the drafts of {shape} for one row must have {part} of shape [1, {shape.nodes}] and type "
                f"{dtype}; found {list(tensor.shape)} and {tensor.dtype}"
            )


def token_map(
    options: Options, vocab: int, device: Device, tokenizer: Tokenizer | None
) -> tuple[Options, Tensor | None]:
    """Returns the tokens that may be drafted, None: all; and options that name them. On a CPU few of a large
    vocabulary."""
    spec, name = options.drafter_spec, options.speculative_token_map
    if name is None and vocab > LARGE and tokenizer is not None and not device.has_own_memory:
        name = str(FIRST) if spec.heads and TOKEN_MAP in spec.options else None
    if name is None:
        return options, None
    token_ids = load_token_map(name, vocab, () if tokenizer is None else tokenizer.added_ids)
    if token_ids is not None:
        check_token_map(options, token_ids)
    return replace(options, speculative_token_map=name), token_ids


def draft_path_of(options: Options) -> Path | None:
    if options.speculative_draft_model_path is None:
        return None
    return resolve_model(
        options.speculative_draft_model_path, options.speculative_draft_model_revision,
        option="--speculative-draft-model-path", weights=not options.dummy,
    )  # fmt: skip


def check_draft_tokenizer(options: Options, draft_path: Path, target: Tokenizer) -> None:
    """Raises ConfigError unless a small draft model has the target's token ids."""
    difference = vocabulary_difference(target, load_tokenizer(draft_path, None))
    if difference:
        raise ConfigError(
            f"{options.speculative_draft_model_path} cannot draft for {options.model}: their tokenizers give different "
            f"ids to the same tokens. {difference}"
        )


def log_drafter(options: Options) -> None:
    """Logs the drafter, its largest tree, and how to turn it off: it may be there by default."""
    if not options.drafts:
        log.info("speculative decoding: off; --speculative-algorithm turns it on")
        return
    draft = options.speculative_draft_model_path
    bundled = shipped_head(options.model, options.drafter_spec)
    own = " (prediction layers of the checkpoint)" if options.drafter_spec.heads else ""
    source = f" ({'bundled head' if draft == str(bundled) else draft})" if draft else own
    log.info(
        "speculative decoding: %s%s, at most %d steps, topk %d, %d draft tokens; --speculative-algorithm none turns it "
        "off",
        options.drafter.replace("EAGLE3", "EAGLE-3"), source, *options.speculative_shape.tree,
    )  # fmt: skip
