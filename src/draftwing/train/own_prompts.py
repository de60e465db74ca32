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
from typing import TYPE_CHECKING

from tqdm import tqdm

from draftwing.engine.session import Session
from draftwing.errors import ConfigError, RequestError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

LONGEST, SHORTEST, MOST = 240, 12, 1500  # tokens; characters
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

    Left out is what did not end, is too short or too long, or has the template's own marks in it. Returns how many
    there are. Raises ConfigError for a model without a chat template, and for a file that is there already.
    """
    opening = _opening(engine.tokenizer)
    added = engine.tokenizer.backend.get_added_tokens_decoder()
    marks = {number for number, token in added.items() if token.special}
    asked: dict[str, list[int]] = {}  # what was said for the user already, and then all of it
    found: set[str] = set()
    try:
        lines = file.open("x", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file} cannot be made: {error.strerror}. Name another file") from None

    def requests() -> Iterator[GenerationRequest]:
        for number in range(count):
            draw = random.Random(f"{seed} {number}")
            begun = draw.choice(_BEGINNINGS) if draw.random() < 0.5 else ""
            name, ids = str(number), _encoded(engine.tokenizer, opening + begun)
            asked[name] = _encoded(engine.tokenizer, begun) if begun else []
            params = SamplingParams(
                max_new_tokens=LONGEST, temperature=1.0, top_p=_TOP_P, sampling_seed=draw.randrange(2**50)
            )
            yield engine.info.admit(GenerationRequest(name, ids, params))

    window = 2 * (engine.info.options.max_running_requests or 64)
    with (
        lines,
        tqdm(total=count, desc="writing", unit=" prompts") as bar,
        closing(Session(engine).run(requests(), window)) as outputs,
    ):
        for output in outputs:
            asked[output.uid] += output.token_ids
            if output.finish_reason is None:
                continue
            bar.update()
            text = _text(engine.tokenizer, asked.pop(output.uid), marks)
            if output.finish_reason["type"] == "stop" and text is not None and text not in found:
                found.add(text)
                lines.write(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n")
    return len(found)


def _opening(tokenizer: Tokenizer) -> str:
    """What stands before the words of a user who speaks first."""
    if tokenizer.chat_template is None:
        raise ConfigError("prompts need a chat template, and the model has none: give one with --chat-template")
    try:
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    except RequestError as error:
        raise ConfigError(f"the chat template refuses a user who speaks first: {error}") from None
    before, mark, _ = text.partition(_MARK)
    if not mark:
        raise ConfigError("the chat template does not write what a user says as it is")
    return before


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
    return ids


def _text(tokenizer: Tokenizer, ids: list[int], marks: set[int]) -> str | None:
    """None: it is no prompt. marks: tokens that none has."""
    said = [token for token in ids if token not in tokenizer.stop_ids]
    text = tokenizer.decode(said).strip()
    good = SHORTEST <= len(text) <= MOST and "\ufffd" not in text and not marks.intersection(said)
    return text if good else None
