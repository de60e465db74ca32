"""Reads and cleans prompts and conversations: what cannot be used is skipped, counted and named by its line.

No torch and no model: a user learns what is wrong with the data before anything large is loaded.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from draftwing.errors import ConfigError

logger = logging.getLogger(__name__)

NGRAM = 13  # words; as Brown et al. 2020 (arXiv 2005.14165, appendix C) look for evaluation data in training data
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_PROMPT_FIELDS = ("prompt", "turns", "question", "instruction", "text")
# A word is a run of letters and digits, or one character of a script that is written without spaces.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
_SHOWN = 20  # examples that a report names for each reason


class BadData(Exception):
    """An entry that cannot be used. `str()` is the reason, a few words that are the same for all of its kind."""


@dataclass(frozen=True)
class Prompt:
    """What a user says, turn after turn; the model is to answer each. where: file and line. copy: 1, 2, ... where the
    same is asked again, for another answer."""

    turns: tuple[str, ...]
    system: str | None = None
    where: str = ""
    copy: int = 0

    @property
    def key(self) -> str:
        """Returns a name that texts share which differ in case and white space only, and are of the same copy."""
        key = _key([self.system or "", *self.turns])
        return f"{key}-{self.copy}" if self.copy else key


@dataclass(frozen=True)
class Conversation:
    """Alternating messages, {"role", "content"}: perhaps one of the system's, then the user's and the assistant's in
    turn, the last one the assistant's."""

    messages: tuple[Mapping[str, str], ...]
    where: str = ""

    @property
    def key(self) -> str:
        return _key([f"{message['role']} {message['content']}" for message in self.messages])

    @property
    def turns(self) -> tuple[str, ...]:
        """Returns what the user says."""
        return tuple(message["content"] for message in self.messages if message["role"] == "user")

    def prompt(self) -> Prompt:
        """Returns what the system and the user say."""
        first = self.messages[0]
        return Prompt(self.turns, first["content"] if first["role"] == "system" else None, self.where)


Item = TypeVar("Item", Prompt, Conversation)


@dataclass
class Skipped:
    """Counts of what was read and of what was left out, with the first examples of each reason."""

    read: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def note(self, reason: str | BadData, where: str) -> None:
        reason = str(reason)
        self.counts[reason] = self.counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _SHOWN:
            examples.append(where)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def report(self) -> dict[str, Any]:
        return {"read": self.read, "skipped": self.counts, "examples": self.examples}

    def log(self) -> None:
        for reason, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            some = ", ".join(self.examples[reason][:5]) + (", ..." if count > 5 else "")
            logger.warning("skipped %d of %d: %s (%s)", count, self.read, reason, some)

    def require(self, left: int, what: str) -> None:
        """Raises ConfigError where nothing is left."""
        if left:
            return
        reasons = "; ".join(
            f"{count} {reason} (such as {self.examples[reason][0]})" for reason, count in self.counts.items()
        )
        raise ConfigError(f"no {what} is left of {self.read} read: {reasons or 'the files are empty'}")


# ---- prompts and conversations ---------------------------------------------------------------------------------------


def read_prompts(files: Sequence[str | Path], skipped: Skipped, seed: int = 0) -> list[Prompt]:
    """Returns the distinct prompts of all files, in the order read; the first of equals stays.

    files: JSON lines (.jsonl, .ndjson), JSON (an array, or an object of arrays), CSV, or text with a prompt a line,
    each also as .gz.
    `FILE:N` takes a random N of a file's prompts, the same ones for the same seed.
    An entry is a string, an array whose first element is one, or an object with `prompt`, `turns`, `question`,
    `instruction` (and perhaps `input`) or `text`. Raises ConfigError for files that cannot be read.
    """
    found: dict[str, Prompt] = {}
    for name in files:
        path, limit = _limited(name)
        here = _read(path, skipped, lambda entry, where: Prompt(_turns(entry), where=where), found)
        if limit is not None and limit < len(here):
            chosen = set(sorted(here, key=lambda key: _key([str(seed), key]))[:limit])
            here = {key: prompt for key, prompt in here.items() if key in chosen}
        found |= here
    return list(found.values())


def read_conversations(files: Sequence[str | Path], skipped: Skipped) -> list[Conversation]:
    """Returns the distinct conversations of files in ShareGPT's or OpenAI's layout, in the order read.

    An entry has `conversations` or `messages`, whose elements have `from` and `value`, or `role` and `content`.
    What the user says after the last answer is left out. Raises ConfigError for files that cannot be read.
    """
    found: dict[str, Conversation] = {}
    for name in files:
        found |= _read(Path(name), skipped, lambda entry, where: Conversation(_messages(entry), where), found)
    return list(found.values())


def _read(path: Path, skipped: Skipped, make: Callable[[Any, str], Item], known: Mapping[str, Item]) -> dict[str, Item]:
    """Returns what `make` makes of the entries of a file, by key, without those that are `known`."""
    found: dict[str, Item] = {}
    for where, entry in entries(path, skipped):
        try:
            item = make(entry, where)
        except BadData as error:
            skipped.note(error, where)
            continue
        if item.key in found or item.key in known:
            skipped.note("repeated", where)
        else:
            found[item.key] = item
    return found


def first_turns(path: str | Path, skipped: Skipped) -> list[str]:
    """Returns what an evaluation asks: the first turn of every prompt of a file."""
    return [prompt.turns[0] for prompt in read_prompts([path], skipped)]


def _turns(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, list) and entry and isinstance(entry[0], str):
        entry = entry[0]  # [text, label]
    if isinstance(entry, dict):
        name = next((name for name in _PROMPT_FIELDS if entry.get(name) is not None), None)
        if name is None:
            raise BadData(f"none of the fields {', '.join(_PROMPT_FIELDS)}")
        value = entry[name]
        if name == "instruction" and isinstance(value, str) and isinstance(entry.get("input"), str):
            value = "\n\n".join(part for part in (value, entry["input"]) if part.strip())
        entry = value
    turns = entry if isinstance(entry, list) else [entry]
    if not turns:
        raise BadData("empty")
    return tuple(_text(turn) for turn in turns)


def _messages(entry: Any) -> tuple[dict[str, str], ...]:
    raw = entry.get("messages", entry.get("conversations")) if isinstance(entry, dict) else None
    if not isinstance(raw, list):
        raise BadData("neither messages nor conversations")
    messages: list[dict[str, str]] = []
    for turn in raw:
        if not isinstance(turn, dict):
            raise BadData("a message that is no object")
        role, content = role_and_content(turn)
        if role not in ("system", "user", "assistant"):
            raise BadData("wrong roles")
        if role == "system" and (content is None or (isinstance(content, str) and not content.strip())):
            continue
        messages.append({"role": role, "content": _text(content)})
    if not messages:
        raise BadData("empty")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadData("no assistant turn")
    if messages[-1]["role"] == "user":
        messages.pop()
    start = messages[0]["role"] == "system"
    if [m["role"] for m in messages[start:]] != ["user", "assistant"] * ((len(messages) - start) // 2):
        raise BadData("wrong roles")
    return tuple(messages)


def role_and_content(turn: Mapping[str, Any]) -> tuple[Any, Any]:
    """Reads a message in ShareGPT's or OpenAI's layout; parts of a content are joined."""
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if isinstance(content, list):  # OpenAI's parts; those without a text, or with null for one, say nothing
        texts = (part.get("text") for part in content if isinstance(part, dict))
        content = "".join(text for text in texts if isinstance(text, str))
    return _ROLES.get(str(role), role), content


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadData("a text that is no string")
    if not value.strip():
        raise BadData("empty")
    if "\0" in value:  # of UTF-16, of a file that was cut: no word that anybody said
        raise BadData("a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadData("not UTF-8") from None
    return value


# ---- overlap with evaluation prompts ---------------------------------------------------------------------------------


class Overlap:
    """Finds texts that share a run of `NGRAM` words with an evaluation prompt, case and punctuation aside. Of shorter
    evaluation prompts, and where `whole` of all, texts that have the same words."""

    def __init__(self, prompts: Iterable[str], whole: bool = False) -> None:
        self.reason = "a held-out prompt" if whole else f"an evaluation prompt or {NGRAM} words of one"
        self._grams: set[str] = set()
        self._same: set[str] = set()
        for prompt in prompts:
            words = _words(prompt)
            if whole or len(words) < NGRAM:
                self._same.add(" ".join(words))
            else:
                self._grams.update(_grams(words))

    def found_in(self, texts: Iterable[str]) -> bool:
        words = map(_words, texts)
        return any(" ".join(w) in self._same or any(gram in self._grams for gram in _grams(w)) for w in words)


def without_overlap(items: Iterable[Any], overlap: Overlap, skipped: Skipped) -> list[Any]:
    """Returns the prompts or conversations in which `overlap` finds nothing, in what the user says."""
    left = []
    for item in items:
        if overlap.found_in(item.turns):
            skipped.note(overlap.reason, item.where)
        else:
            left.append(item)
    return left


def held_out(keys: Iterable[str], share: float, seed: int, purpose: str) -> set[str]:
    """Chooses a random `share` of the keys, at least one, a prompt's copies always together. It stays the same when
    other keys are added; choices for different purposes are independent."""
    order = {key: int(_key([str(seed), purpose, original(key)])[:13], 16) / 2**52 for key in keys}
    least = min(order.values(), default=0.0)
    return {key for key, at in order.items() if at < share or at == least}


def original(key: str) -> str:
    """Returns the key of the prompt that `key` names a copy of."""
    return key.partition("-")[0]


def _words(text: str) -> list[str]:
    return list(_WORD.findall(text.casefold()))


def _grams(words: Sequence[str]) -> Iterator[str]:
    for i in range(len(words) - NGRAM + 1):
        yield " ".join(words[i : i + NGRAM])


def _key(parts: Iterable[str]) -> str:
    text = "\x1f".join(" ".join(part.casefold().split()) for part in parts)
    return blake2b(text.encode(), digest_size=10).hexdigest()


# ---- files -----------------------------------------------------------------------------------------------------------


def _limited(name: str | Path) -> tuple[Path, int | None]:
    """Splits FILE:N into FILE and N."""
    path = Path(name)
    head, colon, tail = str(name).rpartition(":")
    if colon and tail.isdecimal() and not path.exists():
        return Path(head), int(tail)
    return path, None


def entries(path: Path, skipped: Skipped) -> Iterator[tuple[str, Any]]:
    """Gives (file and line, entry) of everything that can be parsed."""
    kind = Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()
    try:
        with _open(path) as lines:
            if kind == ".csv":
                found = _csv(lines, path)
            elif kind == ".json":
                found = _json(lines, path)
            elif kind in (".jsonl", ".ndjson"):
                found = _json_lines(lines, path)
            else:
                found = ((f"{path.name}:{number}", line.strip()) for number, line in enumerate(lines, 1))
            for where, entry in found:
                if entry == "":
                    continue  # an empty line
                skipped.read += 1
                if isinstance(entry, BadData):
                    skipped.note(entry, where)
                else:
                    yield where, entry
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path} cannot be read: {reason}") from None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[io.TextIOWrapper]:
    """Opens a text file; bytes that are no UTF-8 come as lone surrogates, which `_text` refuses."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as raw:
        yield io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _csv(lines: Iterable[str], path: Path) -> Iterator[tuple[str, Any]]:
    rows = csv.DictReader(lines)
    while True:
        try:
            row: Any = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            row = BadData(f"a broken line: {error}")
        yield f"{path.name}:{rows.line_num}", row


def _json(lines: io.TextIOWrapper, path: Path) -> Iterator[tuple[str, Any]]:
    text = lines.read()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        first = text.lstrip().partition("\n")[0]
        if not first.startswith("{") or isinstance(_line(first), BadData):
            what = f"is not valid JSON: {error}" if isinstance(error, ValueError) else "is nested too deeply"
            raise ConfigError(f"{path} {what}") from None
        yield from _json_lines(text.split("\n"), path)  # JSON lines under another name
        return
    parts: Sequence[Any] = [content]
    if isinstance(content, dict) and content and all(isinstance(value, list) for value in content.values()):
        looks_like_one = {"messages", "conversations", "turns"} & set(content)
        parts = [content] if looks_like_one else list(content.values())  # an object of splits
    found = (entry for part in parts for entry in (part if isinstance(part, list) else [part]))
    for number, entry in enumerate(found, 1):
        yield f"{path.name}, entry {number}", entry


def _json_lines(lines: Iterable[str], path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path.name}:{number}", _line(line)


def _line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return BadData("a broken line")
