"""Token maps: lists of every form, and the tool that makes them."""

from __future__ import annotations

import json
import logging
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tiny_checkpoint import write_checkpoint

from draftwing.cli.main import main
from draftwing.cli.token_map import write_token_map
from draftwing.errors import CheckpointError, ConfigError
from draftwing.spec.token_map import load_token_map
from draftwing.text.tokenizer import Tokenizer

IDS = [7, 2, 9, 2, 40, 7, 0]  # most frequent first, with repeats
KEPT = [0, 2, 7, 9, 40]


def save(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def test_a_count_takes_the_first_of_the_vocabulary_and_all_takes_all(tmp_path: Path) -> None:
    first = load_token_map("4", 41, added={39, 2, 40, 99})
    assert first is not None and first.tolist() == [0, 1, 2, 3, 39, 40], "99 has no row"
    everything = load_token_map("500", 41)
    assert everything is not None and everything.tolist() == list(range(41))
    assert load_token_map("all", 41) is None
    with pytest.raises(CheckpointError, match="there is no file '0'"):
        load_token_map("0", 41)


@pytest.mark.parametrize("form", ["list", "tuple", "tensor", "int32", "json", "lines", "words"])
def test_forms(tmp_path: Path, form: str) -> None:
    path = tmp_path / "map"
    if form in ("json", "lines", "words"):
        path.write_text({"json": json.dumps(IDS), "lines": "\n".join(map(str, IDS)), "words": "7 2 9\n2 40 7 0 "}[form])
    else:
        content = {"list": IDS, "tuple": tuple(IDS), "tensor": torch.tensor(IDS), "int32": torch.tensor(IDS).int()}
        path = save(tmp_path / "freq_32768.pt", content[form])
    ids = load_token_map(str(path), 41)
    assert ids.dtype == torch.int64 and ids.tolist() == KEPT


def test_the_hub_is_asked_for_what_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(repo: str, file: str) -> str:
        asked.append((repo, file))
        if file != "freq_32768.pt":
            raise OSError("no route")
        return str(save(tmp_path / "cache.pt", IDS))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    name = "thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt"
    assert load_token_map(name, 41).tolist() == KEPT
    assert asked == [("thunlp/LLaMA3-Instruct-8B-FR-Spec", "freq_32768.pt")]
    save(tmp_path / name, [3])  # a folder of the same relative name comes first
    assert load_token_map(name, 41).tolist() == [3]
    with pytest.raises(CheckpointError, match=r"other\.pt of the hub's a/b cannot be had \(OSError: no route"):
        load_token_map("a/b/other.pt", 41)
    assert len(asked) == 2


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_refusals(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (exec, ("raise SystemExit('executed')",))

    cases: list[tuple[Any, str]] = [
        ([1, 41, 2], "0 to 40; found 1 that are not, such as 41"),
        ([-1], "such as -1"),
        ([], "empty"),
        ([1, "2"], "list of integers"),
        ([1.5], "list of integers"),
        ([True], "list of integers"),
        (torch.tensor([1.0]), "list of integers, found Tensor"),
        (torch.tensor([[1]]), "list of integers, found Tensor"),
        ({"ids": [1]}, "list of integers, found dict"),
        (Evil(), "cannot be read"),
    ]
    for content, expected in cases:
        with pytest.raises(CheckpointError, match=expected):
            load_token_map(str(save(tmp_path / "map.pt", content)), 41)
    (tmp_path / "map.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_token_map(str(tmp_path / "map.pt"), 41)
    for text in ("one two", "[1, 2", "{}"):
        (tmp_path / "map.txt").write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_token_map(str(tmp_path / "map.txt"), 41)
    for name in (str(tmp_path / "nothing.pt"), str(tmp_path), "freq.pt"):
        with pytest.raises(CheckpointError, match="there is no file"):
            load_token_map(name, 41)


# ---- the tool --------------------------------------------------------------------------------------------------------

WORDS = ["<s>", "<end>", "a", "b", "c", "d", "user", "assistant"]


def make_tokenizer(template: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "<end>"])
    chat = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}" if template else None
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "<end>"}, chat)


def named(path: Path) -> list[str]:
    ids = torch.load(path, weights_only=True)
    assert type(ids) is list
    return [WORDS[i] for i in ids]


def test_counts_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("c c c b b d")
    (tmp_path / "b.jsonl").write_text('{"text": "b b"}\n\n"d"\n')
    report = write_token_map([tmp_path / "a.txt", tmp_path / "b.jsonl"], make_tokenizer(), 3, tmp_path / "out.pt")
    assert named(tmp_path / "out.pt") == ["b", "c", "<end>"]  # the end of an answer is kept though it never occurs
    assert report == (3, 9, 3, 7 / 9)
    assert load_token_map(str(tmp_path / "out.pt"), 8).tolist() == [1, 3, 4]


@pytest.mark.parametrize("form", ["openai", "parts", "sharegpt", "list"])
def test_counts_conversations(tmp_path: Path, form: str) -> None:
    """As the model sees them: with its template."""
    texts = [("user", "a b"), ("assistant", "c c c")]
    if form == "sharegpt":
        turns = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in texts]
        entry: Any = {"id": "1", "conversations": turns}
    elif form == "parts":
        entry = {"messages": [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in texts]}
    else:
        entry = {"messages": [{"role": role, "content": text} for role, text in texts]}
    file = tmp_path / ("in.json" if form == "list" else "in.jsonl")
    file.write_text(json.dumps([entry] if form == "list" else entry))
    write_token_map([file], make_tokenizer(), 100, tmp_path / "out.json")
    counted = Counter(["user", "a", "b", "<end>", "assistant", "c", "c", "c", "<end>"])
    expected = sorted(counted, key=lambda word: (-counted[word], WORDS.index(word)))
    assert [WORDS[i] for i in json.loads((tmp_path / "out.json").read_text())] == expected


def test_without_a_template_the_words_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "d d"}]}))
    with caplog.at_level(logging.INFO):
        write_token_map([tmp_path / "in.jsonl"], make_tokenizer(False), 9, tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text() == "5\n1\n"
    assert "shorter than 9" in caplog.text and "100.00% of 2 in 1 documents" in caplog.text


def test_tool_refusals(tmp_path: Path) -> None:
    def refused(content: str | None, expected: str, name: str = "in.jsonl", size: int = 3) -> None:
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=expected):
            write_token_map([tmp_path / name], make_tokenizer(), size, tmp_path / "out.pt")

    refused("a", "expected at least 1, found 0", "in.txt", 0)
    refused("", "no text to count", "in.txt")
    refused(None, "nothing.txt cannot be read", "nothing.txt")
    refused('{"text": "a"}\n{', "cannot be read")
    refused('{"text": "a"}\n{"prompt": "a"}', ":2: expected a text")
    refused("[3]", "entry 1: expected a text", "in.json")
    (tmp_path / "in.txt").write_text("a")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_token_map([tmp_path / "in.txt"], make_tokenizer(), 3, tmp_path / "no" / "out.pt")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokenizer of a checkpoint: one of bytes, and <eos> 256."""
    model = write_checkpoint(tmp_path / "model")
    (tmp_path / "a.txt").write_text("aaa bb")
    (tmp_path / "b.jsonl").write_text('{"text": "aac"}')
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    command = ["token-map", "--model", str(model), "--size", "3", "--out", str(tmp_path / "freq.pt")]
    assert main([*command, *files]) == 0
    table = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    assert torch.load(tmp_path / "freq.pt", weights_only=True) == [table["a"], table["b"], 256]
    assert f"token map {tmp_path / 'freq.pt'}: 3 tokens, 77.78% of 9 in 2 documents" in capsys.readouterr().err

    assert main([*command, str(tmp_path / "nothing.txt")]) == 2
    assert "nothing.txt cannot be read" in capsys.readouterr().err
    for wrong in (["--size", "0", *files], ["--out", "x.pt"]):
        with pytest.raises(SystemExit):
            main(["token-map", "--model", str(model), *wrong])
