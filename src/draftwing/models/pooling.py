"""What a checkpoint says about making one vector of a text: the files of sentence-transformers, or a GGUF file's
`pooling_type`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from draftwing.errors import CheckpointError
from draftwing.files import load_json
from draftwing.gguf_file import open_gguf
from draftwing.layers.encoder import EncoderConfig
from draftwing.models.fields import Fields
from draftwing.models.weight_files import read_json, weight_files
from draftwing.requests.pooling import Pooling, PoolingKind
from draftwing.requests.refusals import show

MODULES = "modules.json"
_LENGTH = "sentence_bert_config.json"
_GGUF: dict[int, PoolingKind] = {1: "mean", 2: "cls", 3: "last"}  # 0: nothing is said; 4: a model that judges
_MODES: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls"}
_FLAGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_KNOWN = ("Transformer", "Pooling", "Normalize")


def pooling_of(path: str | Path) -> Pooling:
    """Returns how vectors are made with a model folder or `.gguf` file; where it does not say, the last token's hidden
    state, of length 1. Raises CheckpointError for files that cannot be read."""
    path = Path(path)
    if path.suffix == ".gguf":
        metadata = open_gguf(path).metadata
        kind = _GGUF.get(metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0))
        return Pooling() if kind is None else Pooling(kind, stated=True)
    file = path / MODULES
    return _of_modules(file) if file.is_file() else Pooling()


def encoder_of(path: Path, encoder: EncoderConfig) -> EncoderConfig:
    """Returns an encoder with the pooling and the length of texts that a folder's files name, if they do. Raises
    CheckpointError."""
    said, file = pooling_of(path), path / _LENGTH
    if said.stated and not encoder.pooling.scores:
        encoder = replace(encoder, pooling=said)
    if not file.is_file():
        return encoder
    most = Fields(read_json(file), _LENGTH).whole("max_seq_length", default=encoder.tokens)
    return replace(encoder, tokens=min(most, encoder.tokens))


def has_head(folder: Path) -> bool:
    """Returns whether a folder's weights have an lm head; True where they are not there or not safetensors."""
    try:
        files = weight_files(folder)
        if files[0].suffix != ".safetensors":
            return True
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as shard:
                if any(name.endswith("lm_head.weight") for name in shard.keys()):  # noqa: SIM118 (not a dict)
                    return True
    except (CheckpointError, SafetensorError, OSError):  # whoever reads the weights says what is wrong
        return True
    return False


def _of_modules(file: Path) -> Pooling:
    try:
        modules = load_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise CheckpointError(f"{file}: expected a list of objects, found {show(modules)}")
    kinds = {str(one.get("type")).rpartition(".")[2]: one for one in modules}
    if "Pooling" not in kinds:
        return Pooling()
    normalize, folder = "Normalize" in kinds, kinds["Pooling"].get("path")
    others = [kind for kind in kinds if kind not in _KNOWN]
    if not isinstance(folder, str) or "/" in folder.strip("/") or ".." in folder:
        raise CheckpointError(f"{file}: path of Pooling: expected a folder beside it, found {show(folder)}")
    kind, refused = _kind(read_json(file.parent / folder / "config.json"))
    if others:
        refused = f"{MODULES} names {', '.join(map(show, others))}, which is not supported"
    return Pooling(kind or "last", normalize, True, refused)


def _kind(config: dict[str, Any]) -> tuple[PoolingKind | None, str]:
    """Returns how a config of Pooling makes vectors, and what of it is not supported."""
    named = config.get("pooling_mode")
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    found = _MODES.get(named) if isinstance(named, str) else None
    if found is None and named is None and len(modes) == 1:
        found = _FLAGS.get(modes[0])  # type: ignore[assignment]
    if found is None:
        shown = show(named) if named is not None else ", ".join(modes) or "none"
        return None, f"pooling must be of the last token, of the first, or the mean of all; found {shown}"
    if found == "mean" and config.get("include_prompt") is False:
        return found, "include_prompt: false is not supported: which tokens are an instruction's is not known"
    return found, ""
