"""Tokenizers built from GGUF metadata: the real SmolLM2 file, and small vocabularies for every pre-tokenizer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwing.errors import CheckpointError
from draftwing.text.gguf_tokenizer import build_backend, special_tokens
from draftwing.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def _byte_names() -> list[str]:
    """Visible characters of the 256 bytes, in GPT-2's order of ids."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in visible]
    return [chr(b) for b in visible] + [chr(256 + i) for i in range(len(others))]


def byte_level(pre: str | None, merges: list[str], **keys: Any) -> dict[str, Any]:
    tokens = _byte_names() + ["".join(m.split(" ")) for m in merges] + ["<s>", "<|user|>"]
    count = len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (count - 2) + [3, 4],
        "tokenizer.ggml.bos_token_id": count - 2,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def sentencepiece(**keys: Any) -> dict[str, Any]:
    pieces = ["▁", "t", "h", "e", "a", "s", "th", "▁th", "the", "▁the", "at", "hat", "▁a", "aa", "é", "[INST]"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 1) + [4],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }  # fmt: skip


def gemma4() -> dict[str, Any]:
    merges = ["t h", "th e", "▁ the", "▁ ▁", "a t", "▁ a"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "t", "h", "e", "a"]
    tokens += ["".join(merge.split(" ")) for merge in merges] + ["<|channel>"]
    return {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [6] * 256 + [1] * (len(tokens) - 261) + [4],
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip


def word_piece(*words: str, **keys: Any) -> dict[str, Any]:
    """Special tokens where BERT has them."""
    unused = [f"\u2581[unused{i}]" for i in range(99)]
    tokens = ["[PAD]", *unused, "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * 99 + [3] * 4 + [1] * len(words),
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }  # fmt: skip


def pieces(metadata: dict[str, Any], text: str) -> list[str]:
    return build_backend(metadata).encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]), ("x  10", [104, 256, 33, 32]),
        ("  42\n\n7", [256, 36, 34, 1116, 39]),
    ],
)  # fmt: skip
def test_smollm2_encodes(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids) == text


def test_smollm2_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.stop_ids) == (1, 2, frozenset({2}))
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.decode([504, 2]) == "The"
    assert smollm2.decode([504, 2], skip_special_tokens=False) == "The<|im_end|>"


def test_smollm2_chat(smollm2: Tokenizer) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = smollm2.encode_chat(question)
    assert len(ids) == 37 and ids[:4] == [1, 9690, 198, 2683]
    assert smollm2.decode(ids, skip_special_tokens=False).endswith("France?<|im_end|>\n<|im_start|>assistant\n")


# Joins of digits and of letters with marks show where each pre-tokenizer cuts.
JOINS = ["1 2", "12 3", "123 4", "A b", "' S", "Ġ Ġ", "! Ċ", "! /", "! a"]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # Digits: GPT-2 keeps them together, SmolLM and Qwen cut each, Llama 3 cuts threes.
        ("gpt-2", "1234", ["1234"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("starcoder", "1234", ["1", "2", "3", "4"]),
        ("stablelm2", "1234", ["1", "2", "3", "4"]),
        ("exaone", "1234", ["1", "2", "3", "4"]),
        ("solar-open", "1234", ["1", "2", "3", "4"]),
        ("olmo", "1234", ["1234"]),
        ("phi-2", "'S", ["'", "S"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("qwen35", "1234", ["1", "2", "3", "4"]),
        ("lfm2", "1234", ["123", "4"]),
        ("falcon-h1", "1234", ["123", "4"]),
        ("pixtral", "'S", ["'S"]),
        ("glm4", "1234", ["123", "4"]),
        ("tekken", "1234", ["1", "2", "3", "4"]),
        ("deepseek-llm", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        # The space before a digit belongs to the run of spaces, not to the digit.
        ("smollm", "  1", ["ĠĠ", "1"]),
        ("gpt-2", "  1", ["Ġ", "Ġ", "1"]),
        # A mark before a letter: only the newer expressions keep them in one word.
        ("gpt-2", "!a", ["!", "a"]),
        ("llama-bpe", "!a", ["!a"]),
        ("qwen2", "!a", ["!a"]),
        ("deepseek-llm", "!a", ["!", "a"]),
        # Contractions in capitals, line ends after marks, and a change from lower to upper case.
        ("gpt-2", "'S", ["'", "S"]),
        ("llama-bpe", "'S", ["'S"]),
        ("gpt-2", "!\n", ["!", "Ċ"]),
        ("qwen2", "!\n", ["!Ċ"]),
        ("llama-bpe", "aAb", ["a", "Ab"]),
        ("tekken", "!/", ["!/"]),
        ("gpt-4o", "!/", ["!/"]),
        ("minimax-m2", "!/", ["!/"]),
        ("deepseek-v3", "1234", ["123", "4"]),
        ("deepseek-v3", "!a", ["!a"]),
        ("hunyuan-dense", "1234", ["123", "4"]),
        ("hunyuan", "1234", ["1", "2", "3", "4"]),
        ("bailingmoe2", "!\n", ["!Ċ"]),
        ("kimi-k2", "1234", ["123", "4"]),
        ("kimi-k2", "!\n", ["!Ċ"]),
        ("command-r", "1234", ["1", "2", "3", "4"]),
        ("command-r", "!a", ["!", "a"]),
        ("deepseek-v3", "!\n", ["!Ċ"]),
        ("gpt-4o", "1234", ["123", "4"]),
        ("gpt-4o", "'S", ["'S"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(byte_level(pre, JOINS), text) == expected


@pytest.mark.parametrize(
    ("pre", "merges", "text", "expected"),
    [
        ("qwen35", ["x Ì", "xÌ ģ"], "x\u0301", ["xÌģ"]),  # of which no character is composed
        ("qwen2", ["x Ì", "xÌ ģ"], "x\u0301", ["x", "Ì", "ģ"]),
        ("llama-bpe", ["b A"], "abAb", ["a", "bA", "b"]),
        ("tekken", ["b A"], "abAb", ["a", "b", "A", "b"]),
        ("gpt-4o", ["a '", "a' s"], "a's", ["a's"]),
        ("tekken", ["a '", "a' s"], "a's", ["a", "'", "s"]),
        ("kimi-k2", ["a '", "a' s"], "a's", ["a's"]),
        ("kimi-k2", ["a ä"], "a\u4e2d", ["a", "ä", "¸", "Ń"]),  # no letters and Han in one word
        ("gpt-4o", ["a ä"], "a\u4e2d", ["aä", "¸", "Ń"]),
    ],
)
def test_marks_case_and_contractions(pre: str, merges: list[str], text: str, expected: list[str]) -> None:
    assert pieces(byte_level(pre, merges), text) == expected


def test_words_that_are_tokens_are_taken_whole() -> None:
    metadata = byte_level("llama-bpe", ["a b"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "cab"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert pieces(metadata, "cab") == ["cab"]  # no merge leads there
    assert pieces({**metadata, "tokenizer.ggml.pre": "qwen2"}, "cab") == ["c", "ab"]


def test_qwen_composes_characters() -> None:
    assert pieces(byte_level("qwen2", ["x y"]), "e\u0301") == ["Ã", "©"]
    assert len(pieces(byte_level("llama-bpe", ["x y"]), "e\u0301")) == 3


def test_user_defined_and_control_tokens() -> None:
    backend = build_backend(byte_level("gpt-2", JOINS))
    assert backend.encode("a<|user|>a<s>").tokens == ["a", "<|user|>", "a", "<s>"]
    ids = backend.encode("a<|user|><s>").ids
    assert backend.decode(ids, skip_special_tokens=True) == "a<|user|>"


def test_bos_and_eos_flags() -> None:
    bos = byte_level("gpt-2", ["x y"])["tokenizer.ggml.bos_token_id"]
    a = _byte_names().index("a")
    assert build_backend(byte_level("gpt-2", ["x y"])).encode("a").ids == [a]
    assert build_backend(byte_level("llama-bpe", ["x y"])).encode("a").ids == [bos, a]
    flagged = byte_level("gpt-2", ["x y"], add_bos_token=True, add_eos_token=True, eos_token_id=5)
    assert build_backend(flagged).encode("a").ids == [bos, a, 5]
    assert build_backend(byte_level("llama-bpe", ["x y"], add_bos_token=False)).encode("a").ids == [a]


def test_sentencepiece_prefers_the_highest_score() -> None:
    # "th" scores higher than "hat" and "at", so it is joined first although "hat" is longer.
    assert pieces(sentencepiece(), "that") == ["▁th", "at"]
    assert pieces(sentencepiece(), "the  the") == ["▁the", "▁", "▁the"]
    assert pieces(sentencepiece(add_space_prefix=False), "the the") == ["the", "▁the"]
    assert build_backend(sentencepiece()).encode("the").ids[0] == 1  # BOS by default


def test_sentencepiece_falls_back_to_bytes() -> None:
    backend = build_backend(sentencepiece())
    encoded = backend.encode("é中", add_special_tokens=False)
    assert encoded.tokens == ["▁", "é", "<0xE4>", "<0xB8>", "<0xAD>"]
    assert backend.decode(encoded.ids) == "é中"


def test_space_prefix_after_special_tokens() -> None:
    """Llama 2 prefixes each piece; vocabularies with instruction control tokens only the start of the text."""
    metadata = sentencepiece()
    assert pieces(metadata, "<s>a</s>a") == ["<s>", "▁a", "</s>", "▁a"]
    control = {**metadata, "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"][:-1], 3]}
    assert pieces(control, "[INST] a[INST]a") == ["[INST]", "▁a", "[INST]", "a"]
    assert pieces(control, "a") == ["▁a"]


def test_special_token_names() -> None:
    assert special_tokens(sentencepiece()) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert special_tokens(byte_level("gpt-2", ["x y"])) == {"bos_token": "<s>"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "kind 't5'.*'gpt2'.*'llama'.*'bert'"), ({}, "no tokenizer"),
        (byte_level("jais", ["x y"]) | {"tokenizer.ggml.merges": ["a b"]}, "'jais', which is not supported.*smollm"),
        (byte_level("gpt-2", ["a b"]) | {"tokenizer.ggml.token_type": [1]}, "1 entries, expected"),
        (byte_level("gpt-2", ["a b"]) | {"tokenizer.ggml.merges": ["a xyz"]}, "inconsistent"),
        (byte_level("gpt-2", ["a b"]) | {"tokenizer.ggml.merges": []}, "no tokenizer.ggml.merges"),
        (byte_level("gpt-2", ["a b"], eos_token_id=10**6), "eos_token_id is 1000000"),
        (sentencepiece(scores=[0.0]), "1 entries, expected"),
    ],
)  # fmt: skip
def test_what_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_backend(metadata)


@pytest.mark.parametrize(
    ("key", "value"), [("token_type", 5), ("tokens", 7), ("eot_token_id", "q"), ("model", np.array([1, 2]))]
)
def test_metadata_of_other_types_are_refused(
    key: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"]}
    metadata |= {"tokenizer.ggml.scores": [0.0] * 4, f"tokenizer.ggml.{key}": value}  # type: ignore[dict-item]
    file = tmp_path / "m.gguf"
    file.touch()
    monkeypatch.setattr("draftwing.text.tokenizer.open_gguf", lambda path: SimpleNamespace(metadata=metadata))
    with pytest.raises(CheckpointError, match="found values of other types"):
        load_tokenizer(file)


def test_a_token_without_end_is_refused_at_once() -> None:
    tokens = ["<unk>", "<s>", "</s>", "a" * 3_000_000]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * 4}
    with pytest.raises(CheckpointError, match="token 3: expected at most 512 characters, found 3000000"):
        build_backend(metadata)


def test_merges_of_gemma4() -> None:
    """In their order, over spaces, too; there is no space in front, and BOS is added."""
    assert pieces(gemma4(), "the the") == ["the", "▁the"]
    assert pieces(gemma4(), "  that") == ["▁▁", "th", "at"]
    assert pieces(gemma4(), "the<|channel>é") == ["the", "<|channel>", "<0xC3>", "<0xA9>"]
    backend = build_backend(gemma4())
    assert backend.encode("a").ids == [2, 264]
    text = " the  hat\n é"
    assert backend.decode(backend.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize("keys", [{}, {"cls_token_id": 101, "seperator_token_id": 102}, {"bos_token_id": 101}])
def test_word_piece(keys: dict[str, int]) -> None:
    backend = build_backend(word_piece("\u2581the", "s", "\u2581a", ",", "\u2581,", **keys))
    found = backend.encode("Thes, \u00c1\tx [SEP] thess")
    assert [*map(backend.id_to_token, found.ids)] == [
        "[CLS]",
        "the",
        "##s",
        ",",
        "a",
        "[UNK]",
        "[SEP]",
        "the",
        "##s",
        "##s",
        "[SEP]",
    ]
    assert backend.decode(found.ids) == "thes, a thess"
    cased = build_backend(word_piece("\u2581The", "\u2581the", **keys))
    assert cased.encode("The the THE", add_special_tokens=False).tokens == ["The", "the", "[UNK]"]
