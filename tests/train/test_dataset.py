"""What is asked and what is measured: nothing of what is held out is trained on, and nothing is asked twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_tokenizer

from draftwing.text.tokenizer import Tokenizer, load_tokenizer
from draftwing.train.dataset import Dataset, read_dataset
from draftwing.train.settings import Settings

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>\n{% endfor %}"
PREAMBLE = "below is an instruction that describes a task write what completes it as well as you can"  # > 13 words


def write(path: Path, *entries: object) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def talk(*messages: str) -> dict[str, Any]:
    roles = ("user", "assistant") * (len(messages) // 2)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, messages, strict=True)]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder, TEMPLATE)


def read(tokenizer: Tokenizer, **settings: Any) -> Dataset:
    return read_dataset(Settings(**settings), lambda: tokenizer)


@pytest.mark.parametrize("regenerate", [False, True])
def test_what_is_measured_is_not_trained_on(tmp_path: Path, tokenizer: Tokenizer, regenerate: bool) -> None:
    """Every first turn is there three times: alone, and in two conversations that go on in other ways."""
    texts = [f"{PREAMBLE} number {i}" for i in range(60)]
    prompts = write(tmp_path / "p.jsonl", *texts)
    talks = write(
        tmp_path / "c.jsonl",
        *(talk(text, f"answer {i}") for i, text in enumerate(texts)),
        *(talk(text.upper() + "!", "yes", f"and {i}", "no") for i, text in enumerate(texts)),
    )
    found = read(tokenizer, prompts=(prompts,), conversations=(talks,), held_out=0.1, regenerate=regenerate)
    (measured,) = found.sets.values()
    held = {text.lower().rstrip("!") for text in measured}
    assert 3 < len(held) < 40
    assert len(measured) == len(set(measured)), "each is measured once"
    trained = {prompt.turns[0].lower().rstrip("!") for prompt in found.prompts}
    assert trained == set(texts) - held, "not more is taken out: prompts of one kind share many words"
    chosen = 180 - len(found.conversations) - len(found.prompts) - found.skipped.total
    dropped = found.skipped.counts["a held-out prompt"]
    assert dropped + chosen == 3 * len(held) and 0 < chosen <= dropped * 2
    assert all(where.startswith(("p.jsonl:", "c.jsonl:")) for where in found.skipped.examples["a held-out prompt"])
    assert len(found.conversations) == (0 if regenerate else 2 * (60 - len(held)))


def test_answers_are_not_asked_for_twice(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Conversations that differ in their answers only are one prompt, and may be among the prompts."""
    measured = write(tmp_path / "e.jsonl", "measured")
    prompts = write(tmp_path / "p.jsonl", "one", "two")
    talks = write(
        tmp_path / "c.jsonl",
        talk("One", "an answer"), talk("three", "an answer"), talk("three", "another"), talk("three", "a", "more", "b"),
    )  # fmt: skip
    given = {"prompts": (prompts,), "conversations": (talks,), "eval_prompts": (measured,), "regenerate": True}
    found = read(tokenizer, **given, answers=2)
    asked = [("one",), ("two",), ("three",), ("three", "more")]
    assert [prompt.turns for prompt in found.prompts] == asked * 2 and not found.conversations
    assert len({prompt.key for prompt in found.prompts}) == 8
    assert found.skipped.examples == {"repeated": ["c.jsonl:1", "c.jsonl:3"]}
