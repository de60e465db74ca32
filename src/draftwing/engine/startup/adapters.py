"""What a start does for adapters (LoRA): slots on the device, and those that options name."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

from draftwing.config.adapters import DEFAULT_HEAD_RANK, DEFAULT_RANK, AdapterCard, may_be_one
from draftwing.config.options import Options
from draftwing.engine.devices.base import Device
from draftwing.errors import CheckpointError, ConfigError
from draftwing.models.adapters.adapter import Adapter, AdapterSlots
from draftwing.models.adapters.files import folder_of
from draftwing.models.adapters.heads import HeadSlots
from draftwing.models.adapters.read import read_adapter, stored_kinds, stored_rank
from draftwing.models.decoder import DecoderModel
from draftwing.spec.drafter import Drafter

log = logging.getLogger("draftwing")
NO_HEADS = (
    "expected a drafter with a head of the model's own kinds (EAGLE, EAGLE3, one prediction layer), and "
    "--max-lora-head-rank of its rank"
)
CHANGED = "the files have changed since the adapter was loaded"


def with_rank(options: Options) -> Options:
    """Returns options with the rank that slots have room for. Raises ConfigError and CheckpointError."""
    if not options.serves_adapters:
        return options
    if options.enable_torch_compile:
        raise ConfigError("--enable-torch-compile and adapters (--lora-modules, --lora-dir) exclude each other")
    rank, of_heads = options.max_lora_rank, options.max_lora_head_rank
    if rank is None:
        rank = max((stored_rank(path) for _, path in options.adapters), default=0)
        options = replace(options, max_lora_rank=max(DEFAULT_RANK, rank))
    if of_heads is None:
        own = [folder for _, path in options.adapters if (folder := folder_of(path)).is_dir()]
        least = 0 if options.learn is None else DEFAULT_HEAD_RANK
        options = replace(options, max_lora_head_rank=max(least, *map(stored_rank, own), 0))
    return options


def adapted_kinds(options: Options) -> set[str]:
    """Returns which kinds of matrices, as `kind_of` has them, adapters of options change. Raises CheckpointError."""
    return set[str]().union(*(stored_kinds(path) for _, path in options.adapters))


def adapter_slots(options: Options, model: DecoderModel) -> AdapterSlots | None:
    """Returns slots for the adapters of a packed model, where options `with_rank` ask for some."""
    if not options.serves_adapters:
        return None
    assert options.max_lora_rank is not None
    wide = adapted_kinds(options)
    slots = AdapterSlots(model, options.max_loras, options.max_lora_rank, wide)
    if model.ranks.rank == 0:
        log.info("adapters: %d slots of rank %d, %.2f GB", options.max_loras, options.max_lora_rank, slots.nbytes / 1e9)
    return slots


def head_slots(options: Options, drafter: Drafter | None) -> HeadSlots | None:
    """Returns slots for heads of adapters' own, where options `with_rank` ask for some and what drafts has a head that
    takes them."""
    head = None if drafter is None else drafter.adaptable
    if not options.serves_adapters or not options.max_lora_head_rank or head is None:
        return None
    slots = HeadSlots(head, options.max_loras, options.max_lora_head_rank)
    if head.target.ranks.rank == 0:
        log.info("adapters' own draft heads: slots of rank %d, %.2f GB", options.max_lora_head_rank, slots.nbytes / 1e9)
    return slots


class AdapterFiles:
    """Reads adapters that slots take, and draft heads of their own, from any thread."""

    def __init__(self, slots: AdapterSlots, heads: HeadSlots | None, options: Options, device: Device) -> None:
        """heads: slots of draft heads; None: none is served."""
        self._slots, self._heads, self._options, self._device = slots, heads, options, device

    def read(self, name: str, path: Path) -> tuple[AdapterCard, Adapter]:
        """Returns an adapter with the draft head that lies beside it, as clients will know it. Raises
        CheckpointError."""
        adapter = replace(self._read(path), head=self._head_beside(name, path))
        if not may_be_one(adapter.base, self._options.model):
            log.warning(
                "the adapter %r was trained on %r (base_model_name_or_path), and %r is served: its matrices fit, what "
                "it answers may not be what it was trained for", name, adapter.base[:200], self._options.model,
            )  # fmt: skip
        return AdapterCard(name, str(path), adapter.digest, adapter.rank, adapter.base), self.imaged(adapter)

    def again(self, card: AdapterCard) -> Adapter:
        """Returns an adapter that was read before. Raises CheckpointError, also where it is another one now."""
        adapter = self._read(Path(card.path))
        if adapter.digest != card.digest:
            raise CheckpointError(f"{card.path}: {CHANGED}")
        return adapter

    def head_again(self, folder: Path, digest: str) -> Adapter:
        """Returns a draft head that was read before. Raises CheckpointError, also where it is another one now."""
        head = self.head(folder)
        if head.digest != digest:
            raise CheckpointError(f"{folder}: {CHANGED}")
        return head

    def head(self, folder: Path) -> Adapter:
        """Returns the draft head of a folder. Raises CheckpointError, and ConfigError where none is served."""
        if self._heads is None:
            raise ConfigError(NO_HEADS)
        return self._heads.read(folder)

    def imaged(self, adapter: Adapter) -> Adapter:
        """Returns the adapter as slots are filled with it."""
        return self._slots.imaged(adapter, self._device.host_memory)

    def ask_ahead(self) -> None:
        """Has a thread ask for page-locked memory for the next adapter, where one may be loaded while serving."""
        memory = self._device.host_memory
        if self._options.lora_dir and self._device.has_own_memory:
            threading.Thread(target=self._slots.spare.fill, args=(memory,), name="adapter", daemon=True).start()

    def _read(self, path: Path) -> Adapter:
        targets, most = self._slots.targets, self._options.max_lora_rank
        assert most is not None
        adapter = read_adapter(path, targets.config, targets.most_bytes(most))
        if adapter.rank > most:
            raise CheckpointError(
                f"{path}: the adapter's rank is {adapter.rank}; slots have room for {most}: start with "
                f"--max-lora-rank {adapter.rank}"
            )
        return targets.fit(adapter)

    def _head_beside(self, name: str, path: Path) -> Adapter | None:
        folder = folder_of(path)
        if not folder.exists():
            return None
        if self._heads is None:
            log.warning("the draft head of the adapter %r is not used: %s", name, NO_HEADS)
            return None
        return self._heads.read(folder)
