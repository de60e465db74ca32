"""Prompts that a model writes itself: it goes on where its chat template has a user speak.

Prompts of collections are many of a kind; what a model was tuned on is in its own prompts, too (as in Magpie, Xu et al.
2024, arXiv 2406.08464). Half of them begin with one of a few words, for a small model repeats itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from draftwing.engine.session import Session
from draftwing.errors import ConfigError, RequestError
from draftwing.files import replace_file
from draftwing.log import progress_bar
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import BadData, Skipped

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

LONGEST, SHORTEST, MAX_CHARACTERS = 240, 12, 1500  # tokens; characters
_TOP_P = 0.97
_MARK = "\x00"
_BEGINNINGS = (
    "Write a", "Write a Python function that", "Write a short story about", "Draft an email", "Imagine you are",
    "Act as",
    "Solve", "If", "Suppose", "There are", "How many", "Calculate", "Find", "Given", "Extract", "Read the following",
    "Summarize", "Rewrite", "Classify", "Explain", "Describe", "Compare", "What is", "What are", "Why", "How does",
    "How do I", "Who", "Discuss", "Analyze", "Create a", "Design", "Implement", "Give me", "List", "In", "The",
    "Please", "Help me", "Could you", "Tell me", "Consider", "Translate", "Evaluate", "Identify", "Convert",
)  # fmt: skip


def write_prompts(engine: Engine, count: int, file: Path, seed: int = 0) -> int:
    """Asks the model for `count` prompts and writes those that can be used, each once, as JSON lines with `turns`.

    A prompt ends where the template ends what a user says. Left out is, and the log says how often, what did not end,
    is too short or too long, or has special tokens in it. Returns how many there are. Raises ConfigError for a model
    without a chat template, for a file that is there already, which it is when all are, and where nothing is left.
    """
    opening, stops = _turn(engine.tokenizer)
    asked: dict[str, list[int]] = {}  # what was said for the user already, and then all of it
    found, skipped = set[str](), Skipped(read=count)
    partial = checked(file)

    def requests() -> Iterator[GenerationRequest]:
        for number in range(count):
            draw = random.Random(f"{seed} {number}")
            begun = draw.choice(_BEGINNINGS) if draw.random() < 0.5 else ""
            name, ids = str(number), _encoded(engine.tokenizer, opening + begun)
            asked[name] = _encoded(engine.tokenizer, begun) if begun else []
            params = SamplingParams(
                max_new_tokens=LONGEST, temperature=1.0, top_p=_TOP_P, sampling_seed=draw.randrange(2**50),
                stop_token_ids=stops.ids, stop=stops.text,
            )  # fmt: skip
            yield engine.info.admit(GenerationRequest(name, ids, params))

    window = 2 * (engine.info.options.max_running_requests or 64)
    with (
        partial.open("w", encoding="utf-8") as lines,
        progress_bar(total=count, desc="writing", unit=" prompts") as bar,
        closing(Session(engine).run(requests(), window)) as outputs,
    ):
        for output in outputs:
            asked[output.uid] += output.token_ids
            if output.finish_reason is None:
                continue
            bar.update()
            ids = asked.pop(output.uid)
            try:
                text = _text(engine.tokenizer, ids, stops, output.finish_reason["type"] == "stop")
                if text in found:
                    raise BadData("repeated")
            except BadData as error:
                skipped.note(error, repr(engine.tokenizer.decode(ids)[:60]))
                continue
            found.add(text)
            lines.write(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n")
    skipped.log()
    skipped.require(len(found), "prompt")
    replace_file(partial, file)
    return len(found)


def checked(file: Path) -> Path:
    """Returns the file that is written before all of it is there. Raises ConfigError."""
    if file.exists():
        raise ConfigError(f"--out {file} is there already: name another file")
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ConfigError(f"--out {file} cannot be made: {error.strerror}. Name another file") from None
    return partial


class _Stops(NamedTuple):
    """What ends a user's turn: tokens, or a text where the template has no token for it. marks: tokens that no prompt
    has, templates' too, that are no special ones (`<think>`)."""

    ids: tuple[int, ...]
    text: tuple[str, ...]
    marks: frozenset[int]


def _turn(tokenizer: Tokenizer) -> tuple[str, _Stops]:
    """Returns what stands before the words of a user who speaks first, and what ends them."""
    if tokenizer.chat_template is None:
        raise ConfigError("prompts need a chat template, and the model has none: give one with --chat-template")
    try:
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
    except RequestError as error:
        raise ConfigError(f"the chat template refuses a user who speaks first: {error}") from None
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise ConfigError("the chat template does not write what a user says as it is")
    added = tokenizer.backend.get_added_tokens_decoder().items()
    marks = frozenset(number for number, token in added if token.special or str(token.content).startswith("<"))
    after = after.strip()
    ends = _encoded(tokenizer, after)[:1]
    if marks.issuperset(ends):
        return before, _Stops((*tokenizer.stop_ids, *ends), (), marks)
    return before, _Stops((*tokenizer.stop_ids,), (after.partition("\n")[0],), marks)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
    return ids


def _text(tokenizer: Tokenizer, ids: list[int], stops: _Stops, ended: bool) -> str:
    """Raises BadData for what is no prompt."""
    said = [token for token in ids if token not in stops.ids]
    text = tokenizer.decode(said)
    for end in stops.text:
        text = text.partition(end)[0]
    text = text.strip()
    if not ended:
        raise BadData(f"did not end within {LONGEST} tokens")
    if not SHORTEST <= len(text) <= MAX_CHARACTERS:
        raise BadData(f"shorter than {SHORTEST} or longer than {MAX_CHARACTERS} characters")
    if "\ufffd" in text or stops.marks.intersection(said):
        raise BadData("special tokens or broken characters")
    return text
