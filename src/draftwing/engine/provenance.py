"""What a text depends on besides its request: the kind of device, options, and the files of a model by their digests.

The engine takes note of it when it starts, which takes no time. Files are read when somebody asks for a receipt, in a
thread, and what was found is kept for the next start. No torch is imported but where an engine starts.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from draftwing.config.options import Options
from draftwing.errors import FileChanged, GenerationError
from draftwing.files import cache_folder, load_json, write_json

if TYPE_CHECKING:
    from draftwing.engine.executor import Executor

# Options that can change a text. Those that name code or files of a machine are left to who checks a receipt.
TEXT_OPTIONS: Final = (
    "dtype", "quantization", "kv_cache_dtype", "fp8_activations", "tp_size", "enable_expert_parallel",
    "enable_tp_invariance", "fast_numerics", "enable_torch_compile", "constrained_json_whitespace_pattern",
    "constrained_json_disable_any_whitespace",
)  # fmt: skip
_CONFIGS: Final = ("config.json", "generation_config.json", "hf_quant_config.json")
_TOKENIZER: Final = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|spiece|sentencepiece).*|.*\.tiktoken"
)
_REMEMBERED: Final = 2**20  # bytes of a file whose digest is kept for the next start


class StoredFile(NamedTuple):
    """A file of a model as it was before the model was loaded. part: which of the digests it belongs to."""

    part: str
    path: str
    size: int
    mtime_ns: int


class Provenance(NamedTuple):
    """What a text depends on besides its request. device: its kind, of a GPU with the compute capability. options:
    types of weights and cache with the values that they came to, others as given.  template: digest of the chat
    template."""

    device: str
    options: tuple[tuple[str, Any], ...]
    files: tuple[StoredFile, ...]
    template: str | None


def model_files(options: Options, path: Path) -> tuple[StoredFile, ...]:
    """Returns the files that a text depends on of the model at `path`. Imports torch. Raises CheckpointError."""
    from draftwing.gguf_file import PART
    from draftwing.models.hub import resolve_model
    from draftwing.models.weight_files import weight_files

    tokenizer = path
    if options.tokenizer_path:
        tokenizer = resolve_model(options.tokenizer_path, options.revision, option="--tokenizer-path", weights=False)
    parts: dict[str, Iterable[Path]] = {}
    if path.suffix == ".gguf":
        split = PART.fullmatch(path.name)
        names = "" if split is None else f"{escape(split['model'])}-?????-of-{split['count']}.gguf"
        parts["weights"] = path.parent.glob(names) if names else [path]
    else:
        parts |= {"weights": weight_files(path), "config": [path / name for name in _CONFIGS]}
    if tokenizer.is_dir():
        parts["tokenizer"] = [file for file in tokenizer.iterdir() if _TOKENIZER.fullmatch(file.name)]
    elif tokenizer != path:
        parts["tokenizer"] = [tokenizer]
    found = []
    for part, files in parts.items():
        for file in sorted(files):
            if file.is_file():
                stat = file.stat()
                found.append(StoredFile(part, str(file.absolute()), stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def provenance_of(
    options: Options, files: tuple[StoredFile, ...], executor: Executor, template: str | None
) -> Provenance | None:
    """Returns that of an engine; None where weights or drafts are made up. files: of the model, as they were before it
    was loaded.  template: of conversations."""
    from draftwing.layers.linear_ops.blocks import BlockFormat

    if options.label:
        return None
    device, weights = executor.device, executor.model.config.weight_format
    capability = device.ops.compute_capability
    kind = device.kind if capability is None else f"{device.kind} {capability[0]}.{capability[1]}"
    values = {name: getattr(options, name) for name in TEXT_OPTIONS}
    values["dtype"] = str(executor.model.dtype).removeprefix("torch.")
    if isinstance(weights, BlockFormat):
        values["quantization"] = weights.kind.lower()
    if options.kv_cache_dtype == "auto":
        values["kv_cache_dtype"] = str(executor.attn.pool.dtype).removeprefix("torch.")
    digest = None if template is None else sha256_of(template)
    return Provenance(kind, tuple(values.items()), files, digest)


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(file: StoredFile, remembered: bool = True) -> str:
    """Returns the SHA-256 of a file's content. remembered: what was computed for a file of this path, size and time is
    believed. Raises FileChanged for one that has not this size and time, and GenerationError for one that cannot be
    read."""
    kept = cache_folder() / "digests" / f"{sha256_of(file.path)[:32]}.json"
    key = [file.path, file.size, file.mtime_ns]
    remembered = remembered and file.size >= _REMEMBERED
    if remembered:
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = load_json(kept)
            if found["file"] == key:
                return str(found["sha256"])

    def check(descriptor: int) -> None:
        stat = os.fstat(descriptor)
        if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
            raise FileChanged(f"{file.path} has changed since the start")

    try:
        with open(file.path, "rb") as content:
            check(content.fileno())  # before all of it is read
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            check(content.fileno())
    except OSError as error:
        raise GenerationError(f"{file.path} cannot be read: {error.strerror}") from None
    if remembered:
        with suppress(OSError, RuntimeError):
            write_json(kept, {"file": key, "sha256": digest})
    return digest


def digests_of(provenance: Provenance, remembered: bool = True) -> dict[str, str]:
    """Returns one digest for each part of a model: of names, sizes and digests of its files. Raises as
    `file_digest`."""
    lines: dict[str, list[str]] = {}
    for file in provenance.files:
        line = f"{Path(file.path).name} {file.size} {file_digest(file, remembered)}"
        lines.setdefault(file.part, []).append(line)
    found = {part: sha256_of("\n".join(each)) for part, each in lines.items()}
    return found if provenance.template is None else found | {"chat_template": provenance.template}


class Digests:
    """Computes the digests of a model in a thread, once somebody asks for a receipt. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: Provenance | None = None
        self._found: Future[dict[str, str]] = Future()

    def begin(self, provenance: Provenance | None) -> Future[dict[str, str]]:
        """Returns the digests of an engine that admits requests for receipts, as they will be; they raise
        GenerationError. What fails is tried again, but for files that have changed: they stay so until a start."""
        assert provenance is not None, "`EngineInfo.admit` has refused the request"
        with self._lock:
            error = self._found.exception() if self._found.done() else None
            if provenance != self._of or not isinstance(error, FileChanged | None):  # the engine may be another one
                self._of, self._found = provenance, Future()
                self._found.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it for others
                args = (provenance, self._found)
                thread = threading.Thread(target=self._run, args=args, name="draftwing-digests", daemon=True)
                try:
                    thread.start()
                except RuntimeError as failed:  # of too many threads
                    self._found.set_exception(GenerationError(f"there is no receipt: {failed}; try again"))
            return self._found

    @staticmethod
    def _run(provenance: Provenance, found: Future[dict[str, str]]) -> None:
        try:
            found.set_result(digests_of(provenance))
        except FileChanged as error:
            found.set_exception(FileChanged(f"there is no receipt: {error}; start again"))
        except GenerationError as error:
            found.set_exception(GenerationError(f"there is no receipt: {error}"))
        except BaseException as error:  # whoever waits is told
            found.set_exception(error)
