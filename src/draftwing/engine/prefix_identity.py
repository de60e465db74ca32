"""What bits of the prefix cache depend on, for those that outlive the engine: `engine.saved_prefixes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from draftwing.config.options import Options
from draftwing.engine.build import Parts
from draftwing.engine.provenance import Provenance, StoredFile, digests_of, file_digest
from draftwing.engine.startup.models import draft_path_of
from draftwing.kv.prefix_index import digest_of
from draftwing.models.towers import projector_file
from draftwing.requests.request import GenerationRequest
from draftwing.version import __version__


def namespace_of(request: GenerationRequest) -> bytes:
    """Returns a digest of what requests must share to share prefixes."""
    return digest_of(json.dumps([request.client, request.cache_salt, request.adapter_digest]).encode())


def identity_of(parts: Parts, provenance: Provenance) -> bytes:
    """Returns a digest of all that bits of the cache depend on besides the text. Reads the model's files where their
    digests are not remembered. Raises GenerationError."""
    executor, options = parts.executor, parts.options
    of_bits = tuple(file for file in provenance.files if file.part in ("weights", "config"))
    pool = executor.attn.pool
    known = [
        __version__, torch.__version__, provenance.device, executor.device.ops.title, provenance.options,
        digests_of(provenance._replace(files=of_bits, template=None)),
        options.context_length or executor.model.config.max_positions,  # some rotary embeddings go by it
        [(str(kept.dtype), list(kept.shape[1:])) for kept in executor.by_slot], list(pool.scales),
        repr(pool.layers), repr(executor.model.config.tower), _projector_digest(parts, of_bits),
        parts.sched.config.lookahead, str(options.speculative_algorithm), _files_of_drafts(options),
    ]  # fmt: skip
    return digest_of(json.dumps(known).encode())


def _projector_digest(parts: Parts, files: tuple[StoredFile, ...]) -> str | None:
    """Returns the digest of the file that reads images beside a GGUF file, which is among `files`. Raises
    GenerationError."""
    if parts.executor.model.tower is None:
        return None
    path = projector_file.find(Path(files[0].path), parts.options.mmproj)
    if path is None:
        return None
    stat = path.stat()
    return file_digest(StoredFile("images", str(path.absolute()), stat.st_size, stat.st_mtime_ns))


def _files_of_drafts(options: Options) -> list[Any]:
    """Of draft models by names, sizes and times: their bits change no text."""
    path, found = draft_path_of(options), list[Any]([options.speculative_second_draft_model_path])
    for file in [] if path is None else [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        stat = file.stat()
        found.append([str(file.absolute()), stat.st_size, stat.st_mtime_ns])
    return found
