"""What a checkpoint says about generating text: which token ids end an answer, which are never drawn, and how to
sample where a request does not say. Checkpoints spread stop ids over several files, and each alone is often
incomplete."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from draftwing.config.aliases import ALIASES
from draftwing.errors import RequestError
from draftwing.gguf_file import open_gguf
from draftwing.models.config import ModelConfig
from draftwing.models.fields import Fields
from draftwing.models.weight_files import read_json
from draftwing.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# What they are called in a .gguf file, after `general.sampling.`
_GGUF_SAMPLING = {name: name for name in _SAMPLING} | {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
# Of generation_config.json: keys that nothing here follows, and the values at which they change nothing.
_ALWAYS: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],), "constraints": ([],), "diversity_penalty": (0,), "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "exponential_decay_length_penalty": (),
    "force_words_ids": ([],), "forced_bos_token_id": (), "forced_decoder_ids": ([],), "forced_eos_token_id": (),
    "guidance_scale": (1,), "max_time": (), "min_length": (0,), "min_new_tokens": (0,), "no_repeat_ngram_size": (0,),
    "num_beams": (1,), "penalty_alpha": (0,), "sequence_bias": ({}, []), "stop_strings": ([], ""),
    "token_healing": (False,), "watermarking_config": (),
}  # fmt: skip
_SAMPLED: dict[str, tuple[Any, ...]] = {"epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (1,), "typical_p": (1,)}


def stop_ids(path: str | Path, config: ModelConfig, others: Iterable[int | None] = ()) -> tuple[int, ...]:
    """Returns the sorted union of `generation_config.json` (when there is one), the config, and `others`.

    others: the tokenizer's end of text and the chat template's end of turn; None entries are skipped.
    """
    ids = set(config.stop_ids) | {i for i in others if i is not None}
    ids.update(Fields(_generation_config(path), "generation_config.json").ids("eos_token_id"))
    return tuple(sorted(ids))


def suppressed(path: Path) -> tuple[int, ...]:
    """Returns the ids that a folder's `generation_config.json` wants never drawn, mostly none: `suppress_tokens`, and
    `bad_words_ids` that are one token, an end of the text apart. Raises CheckpointError."""
    fields = Fields(_generation_config(path), "generation_config.json")
    ends, words = fields.ids("eos_token_id"), fields.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and all(map(_is_id, word)) for word in words):
        raise fields.unlike("bad_words_ids", "a list of lists of token ids")
    return (*fields.ids("suppress_tokens"), *(word[0] for word in words if len(word) == 1 and word[0] not in ends))


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def sampling_defaults(path: str | Path, model: str = "") -> dict[str, Any]:
    """Returns sampling parameters by the names of `SamplingParams`, for fields that a request does not set: those of
    the alias, if `model` is one, before those of `generation_config.json` or of a `.gguf` file's metadata.

    `do_sample: false` means greedy decoding. What is out of range is left out, with a warning. `max_new_tokens` is only
    there when the alias has it, for requests that nothing else limits.
    """
    path = Path(path)
    source, given = path.name, _gguf_sampling(path)
    if path.is_dir():
        source, given = "generation_config.json", _generation_config(path)
        if unread := [*unfollowed(given)]:
            logger.warning("%s: not followed, so transformers may write another text: %s", source, ", ".join(unread))
        if given.get("do_sample") is False:
            given = {"temperature": 0.0}
    defaults: dict[str, Any] = {}
    for name in _SAMPLING:
        if given.get(name) is None:
            continue
        try:
            defaults[name] = getattr(SamplingParams.read({name: given[name]}), name)
        except RequestError as error:
            logger.warning("a sampling default of %s is not used: %s", source, error)
    return defaults | dict(ALIASES[model].sampling if model in ALIASES else {})


def unfollowed(given: Mapping[str, Any]) -> Iterator[str]:
    """Yields keys of a generation_config.json by which transformers writes another text and this package does not."""
    for name, neutral in {**_ALWAYS, **({} if given.get("do_sample") is False else _SAMPLED)}.items():
        if given.get(name) is not None and given[name] not in neutral:
            yield name
    words = given.get("bad_words_ids")
    if isinstance(words, list) and any(isinstance(word, list) and len(word) > 1 for word in words):
        yield "bad_words_ids of several tokens"


def _gguf_sampling(path: Path) -> dict[str, Any]:
    """Returns the recommended sampling parameters in the metadata of a `.gguf` file, as llama.cpp reads them."""
    if path.suffix != ".gguf":
        return {}
    metadata = open_gguf(path).metadata
    return {name: metadata.get(f"general.sampling.{theirs}") for name, theirs in _GGUF_SAMPLING.items()}


def _generation_config(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "generation_config.json"
    return read_json(file) if file.is_file() else {}
