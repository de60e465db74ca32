"""Prepares the data of a run: reads it, keeps evaluation prompts out of it, and makes token sequences of conversations
as they are written and of answers that the target generated."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftwing.errors import ConfigError, RequestError
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import (
    BadData,
    Conversation,
    Overlap,
    Prompt,
    Skipped,
    first_turns,
    held_out,
    read_conversations,
    read_prompts,
    without_overlap,
)
from draftwing.train.settings import Settings
from draftwing.train.store import Tokens


@dataclass(frozen=True)
class Response:
    """One conversation that the target answered, a line of a responses file.

    ids: all of it, as the engine saw it and wrote it.  spans: [start, end) of the answers among them, the token that
    ends one included.  finish: why the last answer ended ("stop", "length").
    """

    key: str
    ids: list[int]
    spans: list[tuple[int, int]]
    temperature: float
    seed: int
    finish: str
    messages: list[dict[str, str]]

    def line(self) -> str:
        return json.dumps(self.__dict__, ensure_ascii=False) + "\n"

    def tokens(self) -> Tokens:
        mask = np.zeros(len(self.ids), np.bool_)
        for start, end in self.spans:
            mask[start:end] = True
        return Tokens(np.array(self.ids, np.int32), mask, self.key)

    @classmethod
    def parse(cls, line: str) -> Response:
        """Reads a line. Raises BadData."""
        try:
            entry = json.loads(line)
            spans = [(int(start), int(end)) for start, end in entry.pop("spans")]
            response = cls(spans=spans, **entry)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise BadData("a broken line") from None
        if not response.spans or not all(0 <= a < b <= len(response.ids) for a, b in spans):
            raise BadData("no assistant turn")
        return response


def first_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Returns what the engine is asked first; without a chat template, a text to complete. Raises BadData."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt.turns[0])
    return chat_ids(opening(prompt), tokenizer)


def opening(prompt: Prompt) -> list[dict[str, str]]:
    """Returns the messages before the first answer."""
    system = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
    return [*system, {"role": "user", "content": prompt.turns[0]}]


def chat_ids(messages: Sequence[dict[str, str]], tokenizer: Tokenizer) -> list[int]:
    """Encodes a conversation up to where the model answers. Raises BadData."""
    try:
        return tokenizer.encode_chat(messages)
    except RequestError:
        raise BadData("refused by the chat template") from None


def conversation_tokens(conversation: Conversation, tokenizer: Tokenizer, max_length: int) -> Tokens:
    """Encodes a conversation as its chat template writes it; what the assistant says is found by rendering its
    beginnings.

    An answer ends with the token that ends a turn. Raises BadData for one that the template refuses, that shows none
    of its answers, or that has more than `max_length` tokens.
    """
    messages = conversation.messages
    if tokenizer.chat_template is None:
        raise ConfigError("conversations need a chat template, and the model has none: give one with --chat-template")
    try:
        text = tokenizer.render_chat(messages, add_generation_prompt=False)
        bounds = [_bounds(text, conversation, i, tokenizer) for i, m in enumerate(messages) if m["role"] == "assistant"]
    except RequestError:
        raise BadData("refused by the chat template") from None
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    ids, starts = encoding.ids, [start for start, _ in encoding.offsets]
    if len(ids) > max_length:
        raise BadData(f"longer than {max_length} tokens")
    mask = np.zeros(len(ids), np.bool_)
    for start, end in bounds:
        for i, at in enumerate(starts):
            if start <= at < end:
                mask[i] = True
                if ids[i] in tokenizer.stop_ids:
                    break  # where a server would have ended the answer
    if not mask.any():
        raise BadData("the chat template shows no answer")
    return Tokens(np.array(ids, np.int32), mask, conversation.key)


def _bounds(text: str, conversation: Conversation, i: int, tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns [start, end) of message i's text in `text`, what ends its turn included; empty where it cannot be
    found."""
    messages = conversation.messages
    before = tokenizer.render_chat(messages[:i], add_generation_prompt=True)
    through = tokenizer.render_chat(messages[: i + 1], add_generation_prompt=False)
    if text.startswith(before) and text.startswith(through):
        return len(before), len(through)
    # A template may open an answer with more than it keeps later, such as an empty reasoning.
    content = messages[i]["content"].strip()
    start = text.find(content, len(tokenizer.render_chat(messages[:i], add_generation_prompt=False)))
    if start < 0:
        return 0, 0
    return start, max(start + len(content), len(through) if text.startswith(through) else 0)


def responses_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("responses*.jsonl"))


def read_responses(files: Sequence[Path], skipped: Skipped) -> Iterator[Response]:
    """Reads all files, each key once. Raises ConfigError for a file that cannot be read."""
    seen = set()
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            skipped.read += 1
            try:
                response = Response.parse(line)
                if response.key in seen:
                    raise BadData("repeated")
            except BadData as error:
                skipped.note(error, f"{file.name}:{number}")
                continue
            seen.add(response.key)
            yield response


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            yield from lines
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """Cleaned data: prompts to be answered, conversations as they are in tokens, first user turns of evaluation
    sets."""

    prompts: list[Prompt]
    conversations: list[Tokens]
    sets: dict[str, list[str]]
    skipped: Skipped


def read_dataset(settings: Settings, tokenizer: Callable[[], Tokenizer]) -> Dataset:
    """Reads and cleans what the settings name. tokenizer: loads it, which is only called for conversations.

    Raises ConfigError where nothing is left to train on.
    """
    skipped = Skipped()
    if not settings.prompts and not settings.conversations:
        raise ConfigError("there is nothing to train on: give --prompts or --conversations FILES")
    prompts = read_prompts(settings.prompts, skipped, settings.seed)
    talks = read_conversations(settings.conversations, skipped)
    sets = evaluation_sets(settings.eval_prompts)
    if sets:
        overlap = Overlap(text for texts in sets.values() for text in texts)
        prompts = without_overlap(prompts, overlap, skipped)
        talks = without_overlap(talks, overlap, skipped)
    else:  # some of the data is measured on instead of trained on
        items: list[Prompt | Conversation] = [*prompts, *talks]
        chosen = held_out((item.key for item in items), settings.held_out, settings.seed, "eval")
        texts = list(dict.fromkeys(item.turns[0] for item in items if item.key in chosen))
        sets = {"held out": texts} if texts else {}
        # Others may begin with what is measured. Runs of words would be too much: prompts of one file often share some.
        overlap = Overlap(texts, whole=True)
        prompts = without_overlap([prompt for prompt in prompts if prompt.key not in chosen], overlap, skipped)
        talks = without_overlap([talk for talk in talks if talk.key not in chosen], overlap, skipped)
    if settings.regenerate:
        asked = {prompt.key: prompt for prompt in prompts}
        for prompt in (talk.prompt() for talk in talks):
            if prompt.key in asked:  # conversations may differ in nothing but the answers
                skipped.note("repeated", prompt.where)
            else:
                asked[prompt.key] = prompt
        prompts, talks = list(asked.values()), []
    prompts = [dataclasses.replace(one, copy=copy) for copy in range(settings.answers) for one in prompts]
    conversations = []
    for talk in talks:
        try:
            conversations.append(conversation_tokens(talk, tokenizer(), settings.max_length))
        except BadData as error:
            skipped.note(error, talk.where)
    skipped.require(len(prompts) + len(conversations), "prompt or conversation")
    skipped.log()
    logger.info("%d prompts to answer, %d conversations as they are", len(prompts), len(conversations))
    return Dataset(prompts, conversations, sets, skipped)


def evaluation_sets(files: Sequence[str]) -> dict[str, list[str]]:
    """Returns the first user turns of each file of prompts, by the name of the set."""
    sets: dict[str, list[str]] = {}
    for file in files:
        path, broken = Path(file), Skipped()
        stem = path.name.partition(".")[0]
        name = path.parent.name if stem in ("question", "questions", "test") and path.parent.name else stem
        texts = first_turns(file, broken)
        broken.require(len(texts), f"evaluation prompt of {file}")
        sets[name if name not in sets else file] = texts
    return sets
