"""Prompts of a kind and length for load tests: chat, code, texts to be copied, random tokens; seeded, all different."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
QUESTION = 150  # tokens: a longer chat prompt has several questions
COPIED = 150  # tokens of a text that is copied, at most


class Texts:
    """Prompts as token ids.

    chat: questions, several where one is too short.  code: Python functions, the last one without its body.
    copy: a text and its copies, the last one unfinished.  random: token ids without meaning.
    """

    def __init__(self, tokenizer: Any, vocab: int, seed: int = 0) -> None:
        """tokenizer: draftwing's.  vocab: ids of random tokens are below it."""
        self._tokenizer, self._seed = tokenizer, seed
        self._vocab = min(vocab, tokenizer.vocab_size)
        self._first = max(tokenizer.special_ids, default=0) + 1 if len(tokenizer.special_ids) < 1000 else 300
        if self._first > self._vocab // 2:  # special tokens at the end of the vocabulary
            self._first, self._vocab = 0, min(tokenizer.special_ids)
        self._questions = questions()
        self._functions = _lines("mbpp.jsonl", lambda row: (row["prompt"], row["solution"]))
        self._makers: dict[str, Callable[[int, int, random.Random], list[int]]] = {
            "chat": self._chat, "code": self._code, "copy": self._copy, "random": self._random,
        }  # fmt: skip

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._makers)

    def prompts(self, kind: str, length: int, count: int, start: int = 0) -> list[list[int]]:
        """`count` prompts of about `length` tokens; others for another `start`."""
        make = self._makers[kind]
        return [
            make(length, index, random.Random(f"{self._seed} {kind} {length} {index}"))
            for index in range(start, start + count)
        ]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _chat(self, length: int, index: int, rng: random.Random) -> list[int]:
        """Up to QUESTION tokens one question, each index another as long as there are any."""
        order = random.Random(self._seed).sample(self._questions, len(self._questions))
        text = order[index % len(order)]
        if length > QUESTION:
            parts, size = [text], 0
            while size < length:
                parts.append(rng.choice(order))
                size += len(self._encode(parts[-1])) + 1
            text = "\n\n".join(parts)
        asked = self._tokenizer.decode(self._encode(text)[: max(length - 30, 8)])
        found: list[int] = self._tokenizer.encode_chat([{"role": "user", "content": asked}])
        return found

    def _code(self, length: int, index: int, rng: random.Random) -> list[int]:
        order = random.Random(self._seed).sample(self._functions, len(self._functions))
        last = self._encode("\n\n" + order[index % len(order)][0])
        before: list[int] = []
        while len(before) + len(last) < length and length > len(last) + 20:
            before += self._encode("\n\n" + "".join(rng.choice(order)))
        return (before[-(length - len(last)) :] if before else []) + last

    def _copy(self, length: int, index: int, rng: random.Random) -> list[int]:
        """Small models copy what they saw copied: the text comes four times, and ends within a copy."""
        del index
        text: list[int] = []
        while len(text) < min(length // 4, COPIED):
            text += self._encode("".join(rng.choice(self._functions)) + "\n\n" + rng.choice(self._questions) + "\n\n")
        text = text[: max(min(length // 4, COPIED), 4)]
        return (text * (length // len(text) + 1))[:length]

    def _random(self, length: int, index: int, rng: random.Random) -> list[int]:
        del index
        return [rng.randrange(self._first, self._vocab) for _ in range(length)]


def questions() -> list[str]:
    """First turns of MT-bench and instructions of self-instruct."""
    return [*mt_bench(), *_lines("self_instruct.jsonl", lambda row: row["prompt"])]


def mt_bench(count: int | None = None) -> list[str]:
    """First turns of so many prompts, by default of all 80."""
    return _lines("mt_bench.jsonl", lambda row: row["turns"][0])[:count]


def _lines(name: str, read: Callable[[dict[str, Any]], Any]) -> list[Any]:
    with (DATA / name).open(encoding="utf8") as lines:
        return [read(json.loads(line)) for line in lines]
