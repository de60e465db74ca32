"""What a loaded engine says of itself."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from draftwing.engine.admission import EngineInfo
from draftwing.engine.build import Parts
from draftwing.engine.provenance import Provenance
from draftwing.engine.row_table import BAN_IDS
from draftwing.models.generation import sampling_defaults, stop_ids
from draftwing.models.pooling import pooling_of
from draftwing.models.stored import stored_as
from draftwing.text.tokenizer import Tokenizer


def info_of(
    parts: Parts, path: Path, tokenizer: Tokenizer, processors: Collection[str], provenance: Provenance | None
) -> EngineInfo:
    """Returns the facts of an engine without its adapters. path: its folder or file.  processors: names of the custom
    logits processors. Raises CheckpointError."""
    options, executor = parts.options, parts.executor
    target, device = executor.model, executor.device
    config, pooling = target.config, pooling_of(path)
    stored = stored_as(path)
    if config.encoder is not None:  # which leaves the vector in the place of the last token
        pooling = config.encoder.pooling._replace(kind="last")
    elif config.headless:
        pooling = pooling._replace(stated=True)
    return EngineInfo(
        options=options,
        architecture=config.architecture,
        context_length=parts.context_length,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        stop_ids=frozenset(stop_ids(path, config, tokenizer.stop_ids)),
        max_total_tokens=parts.sched.config.slots,
        max_banned=BAN_IDS,
        dtype=str(target.dtype).removeprefix("torch."),
        device=device.kind,
        weight_bytes=target.weight_bytes(),
        pool_bytes=sum(kept.nbytes for kept in executor.attn.pool.tensors),
        processors=tuple(processors),
        defaults=sampling_defaults(path, options.model) if options.sampling_defaults == "model" else {},
        capability=parts.capability,
        stored={**stored, "values": stored["values"] or config.matrix_weights, "on_device": device.has_own_memory},
        images=None if target.tower is None else target.tower.config.processor(tokenizer),
        provenance=provenance,
        head_rank=0 if executor.head_slots is None else executor.head_slots.rank,
        pooling=pooling,
        writes=config.encoder is None and not config.headless,
    )
