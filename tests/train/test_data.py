"""Readers of prompts and conversations: every layout, every kind of bad entry, repeated ones, evaluation prompts."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from tiny_checkpoint import write_tokenizer

from draftwing.errors import ConfigError
from draftwing.text.tokenizer import Tokenizer, load_tokenizer
from draftwing.train.data import (
    NGRAM,
    BadData,
    Conversation,
    Overlap,
    Prompt,
    Skipped,
    first_turns,
    read_conversations,
    read_prompts,
    without_overlap,
)
from draftwing.train.dataset import conversation_tokens


def jsonl(path: Path, *entries: object) -> Path:
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries), encoding="utf-8")
    return path


def texts(prompts: list[Prompt]) -> list[str]:
    return [" / ".join(prompt.turns) for prompt in prompts]


# ---- prompts ---------------------------------------------------------------------------------------------------------

ENTRIES = [
    ({"prompt": "a b", "source": "x"}, "a b"),
    ({"question_id": 1, "turns": ["first", "second"]}, "first / second"),
    ({"question": "why?", "answer": "so"}, "why?"),
    ({"instruction": "add", "input": "1 2", "output": "3"}, "add\n\n1 2"),
    ({"instruction": "sing", "input": "", "text": "an answer"}, "sing"),
    ({"text": "hello", "category": "c"}, "hello"),
]


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "json.gz"])
def test_every_layout_of_a_prompt(tmp_path: Path, kind: str) -> None:
    entries = [entry for entry, _ in ENTRIES] + ["plain"]
    text = "\n".join(map(json.dumps, entries)) if kind.startswith("jsonl") else json.dumps(entries)
    path = tmp_path / f"p.{kind}"
    path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    skipped = Skipped()
    assert texts(read_prompts([path], skipped)) == [expected for _, expected in ENTRIES] + ["plain"]
    assert (skipped.read, skipped.total) == (7, 0)


def test_csv_text_splits_and_lines_under_another_name(tmp_path: Path) -> None:
    with (tmp_path / "p.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "category"], ["two\nlines, quoted", "a"], ["three", "b"]])
    (tmp_path / "splits.json").write_text(json.dumps({"train": [["one", "x"]], "val": [["four", "y"]]}))
    (tmp_path / "lines.json").write_text('{"prompt": "five"}\n{"prompt": "six"}\n')
    (tmp_path / "all.nl").write_text("seven\n\neight\n")
    files = [tmp_path / name for name in ("p.csv", "splits.json", "lines.json", "all.nl")]
    expected = ["two\nlines, quoted", "three", "one", "four", "five", "six", "seven", "eight"]
    assert texts(read_prompts(files, Skipped())) == expected


def test_what_cannot_be_used_is_counted_with_its_lines(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "good"}, '{"prompt": "broken', {"prompt": "  "}, {"other": 1}, {"prompt": 5}, "",
        {"prompt": " GOOD "}, {"turns": []}, '{"prompt": "\\ud800"}', {"prompt": "fine"},
    )  # fmt: skip
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff\xfe"}\n')
    skipped = Skipped()
    assert texts(read_prompts([path], skipped)) == ["good", "fine"]
    fields = "none of the fields prompt, turns, question, instruction, text"
    assert skipped.examples == {
        "a broken line": ["p.jsonl:2"],
        "empty": ["p.jsonl:3", "p.jsonl:8"],
        fields: ["p.jsonl:4"],
        "a text that is no string": ["p.jsonl:5"],
        "repeated": ["p.jsonl:7"],
        "not UTF-8": ["p.jsonl:9", "p.jsonl:11"],
    }
    assert skipped.read == 10 and skipped.total == 8


def test_nothing_left_says_why(tmp_path: Path) -> None:
    skipped = Skipped()
    left = read_prompts([jsonl(tmp_path / "p.jsonl", {"prompt": ""}, "{")], skipped)
    with pytest.raises(ConfigError, match=r"no prompt is left of 2 read: 1 empty \(such as p.jsonl:1\); 1 a broken"):
        skipped.require(len(left), "prompt")


@pytest.mark.parametrize("name", ["p.ndjson", "P.NDJSON", "p.JSONL", "p.ndjson.gz"])
def test_lines_of_json_under_other_names(tmp_path: Path, name: str) -> None:
    text = b'{"prompt": "one"}\n{"prompt": "two"}\n'
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert texts(read_prompts([tmp_path / name], Skipped())) == ["one", "two"]


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "name, content, reason, line",
    [
        ("p.csv", b"text,n\na\0b,1\nfine,2\n", "a NUL character", "p.csv:2"),
        ("p.jsonl", b'{"prompt": "a\\u0000"}\n{"prompt": "fine"}\n', "a NUL character", "p.jsonl:1"),
        ("p.txt", "ab\nfine\n".encode("utf-16-le")[:6] + b"\nfine\n", "a NUL character", "p.txt:1"),
        ("p.jsonl", f'{{"prompt": {DEEP}\n"fine"\n'.encode(), "a broken line", "p.jsonl:1"),
        ("p.json", f'{{"prompt": "fine"}}\n{DEEP}\n'.encode(), "a broken line", "p.json:2"),
        ("p.jsonl", b'null\n"fine"\n', "a text that is no string", "p.jsonl:1"),
        ("p.jsonl", b'{"turns": [null]}\n"fine"\n', "a text that is no string", "p.jsonl:1"),
    ],
)
def test_odd_entries_are_skipped(tmp_path: Path, name: str, content: bytes, reason: str, line: str) -> None:
    (tmp_path / name).write_bytes(content)
    skipped = Skipped()
    assert texts(read_prompts([tmp_path / name], skipped))[-1] == "fine"
    assert skipped.examples[reason][0] == line


def test_a_file_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(DEEP + "]" * len(DEEP))
    with pytest.raises(ConfigError, match=r"p.json is nested too deeply"):
        read_prompts([tmp_path / "p.json"], Skipped())


@pytest.mark.parametrize("name, content", [("p.json", b"[1,"), ("p.jsonl.gz", b"\x1f\x8b\x08"), ("none.jsonl", None)])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        read_prompts([tmp_path / name], Skipped())


def test_a_limit_takes_the_same_random_ones(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", *[{"prompt": f"number {i}"} for i in range(200)])
    taken = texts(read_prompts([f"{path}:20"], Skipped(), seed=1))
    assert len(taken) == 20 and taken == texts(read_prompts([f"{path}:20"], Skipped(), seed=1))
    assert taken != texts(read_prompts([f"{path}:20"], Skipped(), seed=2))
    assert max(int(text.split()[1]) for text in taken) > 100, "not the first ones"
    assert len(read_prompts([f"{path}:900"], Skipped())) == 200


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_both_layouts_of_conversations(tmp_path: Path) -> None:
    share = {"id": "1", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"},
                                          {"from": "human", "value": "never answered"}]}  # fmt: skip
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    openai = {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": parts},
                           {"role": "assistant", "content": "ab"}]}  # fmt: skip
    found = read_conversations([jsonl(tmp_path / "c.jsonl", share, openai)], Skipped())
    assert [[tuple(m.values()) for m in c.messages] for c in found] == [
        [("user", "hi"), ("assistant", "hello")],
        [("system", "be kind"), ("user", "ab"), ("assistant", "ab")],
    ]
    assert found[1].prompt() == Prompt(("ab",), "be kind", "c.jsonl:2")


def test_bad_conversations(tmp_path: Path) -> None:
    def talk(*roles: str) -> dict[str, object]:
        return {"messages": [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]}

    path = jsonl(
        tmp_path / "c.jsonl",
        talk("user", "assistant"), talk("user"), talk("assistant", "user", "assistant"), talk("user", "robot"),
        talk("user", "user", "assistant"), {"messages": []}, {"messages": [{"role": "user", "content": ""}]},
        '{"messages": [', {"prompt": "x"}, talk("user", "assistant"), talk("user", "system", "assistant"),
    )  # fmt: skip
    skipped = Skipped()
    assert len(read_conversations([path], skipped)) == 1
    assert skipped.examples == {
        "no assistant turn": ["c.jsonl:2"],
        "wrong roles": ["c.jsonl:3", "c.jsonl:4", "c.jsonl:5", "c.jsonl:11"],
        "empty": ["c.jsonl:6", "c.jsonl:7"],
        "a broken line": ["c.jsonl:8"],
        "neither messages nor conversations": ["c.jsonl:9"],
        "repeated": ["c.jsonl:10"],
    }


@pytest.mark.parametrize("content", [5, {"a": 1}, True])
def test_a_system_message_that_is_no_text(tmp_path: Path, content: object) -> None:
    messages = [{"role": "system", "content": content}, {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a"}]  # fmt: skip
    skipped, none = Skipped(), [{**messages[0], "content": None}, *messages[1:]]
    (found,) = read_conversations([jsonl(tmp_path / "c.jsonl", {"messages": messages}, {"messages": none})], skipped)
    assert len(found.messages) == 2 and skipped.examples == {"a text that is no string": ["c.jsonl:1"]}


def test_null_is_no_text(tmp_path: Path) -> None:
    """Of a part, too, whether others say something or not."""

    def talk(*parts: object) -> dict[str, object]:
        said = [{"type": "text", "text": part} for part in parts]
        return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "a"}]}

    skipped = Skipped()
    (found,) = read_conversations([jsonl(tmp_path / "c.jsonl", talk(None, "q"), talk(None))], skipped)
    assert found.turns == ("q",) and skipped.examples == {"empty": ["c.jsonl:2"]}


# ---- what is learnt of a conversation --------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Opens an answer with an empty reasoning, which it does not show in the history.
REASONING = CHATML.replace("<|assistant|>{% endif", "<|assistant|><think></think>{% endif")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


def answers(tokenizer: Tokenizer, ids: list[int], mask: list[bool]) -> list[str]:
    """The runs of tokens that count, as text with special tokens."""
    runs, last = [], False
    for token, counted in zip(ids, mask, strict=True):
        if counted and not last:
            runs.append([])
        if counted:
            runs[-1].append(token)
        last = counted
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


TALK = Conversation(
    tuple(
        {"role": role, "content": content}
        for role, content in (("user", "a"), ("assistant", "fünf a"), ("user", "fünf"), ("assistant", "b!"))
    )
)


@pytest.mark.parametrize("template, end", [(CHATML, "<eos>"), (REASONING, "<eos>")])
def test_only_answers_and_what_ends_them_count(folder: Path, template: str, end: str) -> None:
    tokenizer = load_tokenizer(folder, template)
    tokens = conversation_tokens(TALK, tokenizer, 500)
    assert answers(tokenizer, tokens.ids.tolist(), tokens.loss_mask.tolist()) == [f"fünf a{end}", f"b!{end}"]
    assert tokens.ids.tolist() == tokenizer.encode_chat(TALK.messages, add_generation_prompt=False)


def test_a_conversation_that_is_too_long_or_refused(folder: Path) -> None:
    with pytest.raises(BadData, match="longer than 10 tokens"):
        conversation_tokens(TALK, load_tokenizer(folder, CHATML), 10)
    with pytest.raises(BadData, match="refused by the chat template"):
        conversation_tokens(TALK, load_tokenizer(folder, "{{ raise_exception('no') }}"), 500)
    with pytest.raises(BadData, match="shows no answer"):
        conversation_tokens(TALK, load_tokenizer(folder, "{{ messages[0]['content'] }}"), 500)


# ---- evaluation prompts ----------------------------------------------------------------------------------------------


def words(start: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(start, start + count))


def test_thirteen_shared_words_are_too_many() -> None:
    assert NGRAM == 13
    overlap = Overlap([words(0, 30), "a short question"])
    assert overlap.found_in([f"before {words(7, 13)} after"])
    assert not overlap.found_in([f"before {words(7, 12)} after {words(19, 11)}"])
    assert overlap.found_in(["unrelated", words(17, 13).upper().replace(" ", ",  ")]), "case and punctuation aside"
    assert overlap.found_in(["A short question?"]) and not overlap.found_in(["a short question of mine"])
    japanese = "".join(chr(0x3041 + i) for i in range(40))
    assert Overlap([japanese]).found_in([japanese[5:18]]) and not Overlap([japanese]).found_in([japanese[5:17]])


def test_what_is_held_out_is_compared_whole() -> None:
    overlap = Overlap([words(0, 30), "a short question"], whole=True)
    assert overlap.found_in(["other", words(0, 30).upper() + "!"]) and overlap.found_in(["A short question?"])
    assert not overlap.found_in([words(0, 29), words(1, 29), f"{words(0, 30)} more"])


def test_prompts_that_share_with_an_evaluation_are_dropped(tmp_path: Path) -> None:
    asked = jsonl(tmp_path / "question.jsonl", {"turns": [words(0, 20), "never looked at"]})
    assert first_turns(asked, Skipped()) == [words(0, 20)]
    skipped = Skipped()
    prompts = [Prompt(("fine",), where="p:1"), Prompt(("fine", words(3, 15)), where="p:2")]
    assert without_overlap(prompts, Overlap(first_turns(asked, Skipped())), skipped) == prompts[:1]
    assert skipped.examples == {"an evaluation prompt or 13 words of one": ["p:2"]}
