"""Two small vocabularies, byte-level and sentencepiece-like, and the sampled data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from draftwing.grammar.compiler import GrammarCompiler
from draftwing.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
SPECIAL = ["<eos>", "<|call|>"]
# GPT-2's table: printable bytes stand for themselves, the others come after 255, in order.
PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [b for b in range(256) if b not in PLAIN]
BYTES = {chr(b): b for b in PLAIN} | {chr(256 + i): b for i, b in enumerate(OTHERS)}
PADDING = 37  # the logits are wider than the vocabulary


def schema_cases():
    return [json.loads(line) for line in (DATA / "maskbench_sample.jsonl").read_text(encoding="utf8").splitlines()]


def corpus():
    for case in schema_cases():
        yield json.dumps(case["schema"])
        yield from (json.dumps(test["data"], ensure_ascii=False) for test in case["tests"])


def byte_level():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return Tokenizer(backend, {"eos_token": "<eos>"})


def sentencepiece():
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("\u2581?[^\u2581]+"), "isolated")
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=1200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<eos>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].get)
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ", 1)) for m in model["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ["<unk>", *SPECIAL]])
    return Tokenizer(backend, {"eos_token": "<eos>", "unk_token": "<unk>"})


class Vocab:
    """A tokenizer with its compiler, and tokens as bytes by our own reading of the vocabulary."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size + PADDING
        self.compiler = GrammarCompiler(tokenizer, self.size, tokenizer.stop_ids)
        self.eos = tokenizer.eos_id
        self.bytes = [self._bytes(i) for i in range(tokenizer.vocab_size)]
        self._single = {raw[0]: i for i, raw in reversed([*enumerate(self.bytes)]) if raw and len(raw) == 1}

    def _bytes(self, token):
        piece = self.tokenizer.piece(token)
        if token in self.tokenizer.special_ids or piece is None:
            return None
        if token in self.tokenizer.byte_fallback_ids:
            return bytes([int(piece[3:5], 16)])
        if not self.tokenizer.joins_bytes:
            return piece.replace("\u2581", " ").encode()
        return bytes(BYTES[c] for c in piece)

    def encode(self, text):
        """Tokens of a text in the middle of an answer: without sentencepiece's space in front."""
        if self.tokenizer.joins_bytes:
            return self.tokenizer.encode(text, add_special_tokens=False)
        newline = self.tokenizer.encode("\n", add_special_tokens=False)
        ids = self.tokenizer.encode("\n" + text, add_special_tokens=False)
        assert ids[: len(newline)] == newline
        return ids[len(newline) :]

    def accepts(self, state, text):
        """Whether a text is a whole answer."""
        state, tokens = state.fork(), self.encode(text)
        return state.run(tokens) == len(tokens) and state.may_end

    def accepts_bytes(self, state, text):
        """As `accepts`, byte by byte, so that forced text may be cut anyhow."""
        matcher, tokens = state.fork()._matcher, [self._single[byte] for byte in text.encode()]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def text(self, tokens):
        return b"".join(self.bytes[t] for t in tokens).decode()

    def bits(self, mask):
        assert mask.dtype == np.uint32 and mask.shape == (-(-self.size // 32),)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


@pytest.fixture(scope="session")
def byte_vocab():
    return Vocab(byte_level())


@pytest.fixture(scope="session")
def spm_vocab():
    return Vocab(sentencepiece())


@pytest.fixture(params=["byte_vocab", pytest.param("spm_vocab", marks=pytest.mark.slow)])
def vocab(request):
    return request.getfixturevalue(request.param)
