"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file.

Four kinds of vocabulary are supported, named by `tokenizer.ggml.model`: `gpt2`, a byte-level BPE whose text is cut
into words by the pre-tokenizer that `tokenizer.ggml.pre` names, `llama`, a sentencepiece BPE with scores and byte
tokens, `gemma4`, the same with merges, and `bert`, WordPiece. A wrong pre-tokenizer gives working but worse tokens
without any error, so unknown names are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from draftwing.errors import CheckpointError

logger = logging.getLogger(__name__)

Metadata = Mapping[str, Any]

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# Letters of alphabets with case, as DeepSeek's first tokenizers list them. Escaped, because some of them change
# when a tool normalises this file.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

# Regular expressions that cut the text into words, applied one after the other; the pieces between matches stay.
# GPT-2's own expression is built into the library's byte-level step and stands for an empty list.
_LLAMA3 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",)
_QWEN2 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",)
_QWEN35 = (  # marks belong to words
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+({_CONTRACTION})?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*({_CONTRACTION})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" rf"|{_SPACES}",
)
_NOT_HAN = tuple(rf"[{letters}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI_K2 = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}*{_NOT_HAN[1]}+({_CONTRACTION})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}+{_NOT_HAN[1]}*({_CONTRACTION})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_SEED_CODER = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
_GPT2: tuple[str, ...] = ()
_WORDS: dict[str, tuple[str, ...]] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,  # of Nemotron-H and Nemotron 3
    "glm4": _LLAMA3,
    "dbrx": _LLAMA3,  # of OLMo 2, Phi-4 and Granite 4
    "smaug-bpe": _LLAMA3,  # of SmolLM3
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "minimax-m2": _O200K,
    "deepseek-llm": _DEEPSEEK_LLM,  # V2's, too
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": _KIMI_K2,  # of Kimi Linear, too
    "hunyuan-dense": _DEEPSEEK_V3,
    "hunyuan": _QWEN2,  # with experts
    "bailingmoe2": _QWEN2,
    "stablelm2": _QWEN2,
    "solar-open": _QWEN2,
    "seed-coder": _SEED_CODER,
    "laguna": (r"[^\n]+|\n+", *_QWEN2),
    "cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", *_O200K),
    "chatglm-bpe": _LLAMA3,
    "smollm": _GPT2,
    "refact": _GPT2,  # of Granite 3
    "starcoder": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,  # of GPT-NeoX, too
    "command-r": _GPT2,
    "exaone": _GPT2,
    "exaone4": _GPT2,
    "gpt-2": _GPT2,
    "default": _GPT2,
}
_SINGLE_DIGITS = frozenset({"smollm", "refact", "starcoder", "exaone", "command-r"})
_COMPOSED = frozenset({"qwen2", "qwen35"})  # text is brought to NFC first
# A word that is itself a token is taken whole, even where merges would not lead to it; and BOS is the default.
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "tekken"})

_LONGEST = 512  # characters of a sentencepiece token that is looked at in all its parts

_GEMMA4 = "gemma4"  # pieces of sentencepiece with spaces, joined by merges that the file lists
_SPACE = "\u2581"  # sentencepiece's visible space
_UPPER_ASCII = re.compile("[A-Z]")
_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_BERT = "bert"
_BERT_KEYS = {
    "cls_token": "tokenizer.ggml.cls_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # as converters spell it
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_USUAL_IDS = {  # where the file names none
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    _BERT: {"bos_token": 101, "sep_token": 102, "unk_token": 100, "pad_token": 0},
}


def build_backend(metadata: Metadata) -> tokenizers.Tokenizer:
    """Builds the tokenizer of a GGUF file, BOS and EOS included as its flags say.

    Raises CheckpointError for a kind of vocabulary or a pre-tokenizer that is not supported, and for broken metadata.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", _GEMMA4, _BERT):
        found = "no tokenizer" if kind is None else f"a tokenizer of kind {kind!r}"
        raise CheckpointError(
            f"the GGUF file has {found}; supported are 'gpt2' (byte-level BPE), 'llama' (SPM), 'gemma4' and 'bert' "
            "(WordPiece)"
        )
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    stated = metadata.get("tokenizer.ggml.token_type")
    types = [int(TokenType.NORMAL)] * len(tokens) if stated is None else [int(kind) for kind in stated]
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries, expected {len(tokens)}")
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        if kind == "gpt2":
            backend, add_bos = _byte_level(metadata, vocab)
        elif kind == _BERT:
            return _word_piece(metadata, tokens, types)
        else:
            backend, add_bos = _sentencepiece(metadata, vocab, tokens, types), True
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception, e.g. for a merge of tokens it does not know
        raise CheckpointError(f"the GGUF file's vocabulary or merges are inconsistent: {error}") from error
    _add_tokens(backend, tokens, types)
    ids = special_token_ids(metadata)
    bos = ids.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = ids.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    set_bos_eos(backend, bos, eos)
    return backend


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Returns `bos_token`, `eos_token`, `unk_token`, `pad_token` as text, those that the file names."""
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    ids = special_token_ids(metadata)
    return {name: tokens[i] for name, i in ids.items()}


def special_token_ids(metadata: Metadata) -> dict[str, int]:
    """Returns the ids of `bos_token`, `eos_token`, `unk_token` and `pad_token`, those that the file names. Raises
    CheckpointError for an id outside the vocabulary."""
    count = len(_required(metadata, "tokenizer.ggml.tokens"))
    kind = metadata.get("tokenizer.ggml.model")
    keys, usual = _SPECIAL_KEYS | (_BERT_KEYS if kind == _BERT else {}), _USUAL_IDS.get(str(kind), {})
    found = {name: metadata.get(key, usual.get(name)) for name, key in keys.items()}
    for name, i in found.items():
        if i is not None and not 0 <= int(i) < count:
            raise CheckpointError(f"{keys[name]} is {i}, expected an id below {count}")
    return {name: int(i) for name, i in found.items() if i is not None}


def _required(metadata: Metadata, key: str) -> Sequence[Any]:
    value: Sequence[Any] | None = metadata.get(key)
    if value is None or len(value) == 0:
        raise CheckpointError(f"the GGUF file has no {key}; convert the model again with its tokenizer")
    return value


def _byte_level(metadata: Metadata, vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Builds a byte-level BPE; tells whether BOS is added when the file does not say."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        logger.warning("the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre); GPT-2's is used")
        pre = "default"
    if pre not in _WORDS:
        known = ", ".join(sorted(_WORDS))
        raise CheckpointError(
            f"the GGUF file needs the pre-tokenizer {pre!r}, which is not supported (supported: {known}); "
            "serve the model from its Hugging Face folder instead"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _required(metadata, "tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    words = _WORDS[pre]
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(word), "isolated") for word in words]
    if pre in _SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _WHOLE_WORDS


def _sentencepiece(
    metadata: Metadata, vocab: dict[str, int], tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    own_merges = metadata.get("tokenizer.ggml.model") == _GEMMA4
    if own_merges:
        merges = [tuple(merge.split(" ", 1)) for merge in _required(metadata, "tokenizer.ggml.merges")]
    else:
        merges = _merges_from_scores(vocab, tokens, types, _required(metadata, "tokenizer.ggml.scores"))
    unk = special_token_ids(metadata).get("unk_token")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab,
            merges,
            unk_token=None if unk is None else tokens[unk],
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not own_merges))
    decoding: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)
    # Llama 2 and its descendants put the space at the start of every piece between special tokens. Mistral's
    # vocabularies with control tokens for instructions only put it at the start of the text.
    instruct = vocab.get("[INST]")
    if prefix and instruct is not None and types[instruct] == TokenType.CONTROL:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    elif prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    return backend


def _word_piece(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """A file's tokens have a space in front where they begin a word, and none where WordPiece marks that they go on."""
    pieces = [
        token if kind == TokenType.CONTROL else token[1:] if token.startswith(_SPACE) else f"##{token}"
        for token, kind in zip(tokens, types, strict=True)
    ]
    ids = special_token_ids(metadata)
    backend = tokenizers.Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[ids["unk_token"]])
    )
    cased = any(
        kind == TokenType.NORMAL and _UPPER_ASCII.search(piece) for piece, kind in zip(pieces, types, strict=True)
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    _add_tokens(backend, pieces, types)
    set_bos_eos(backend, ids.get("cls_token", ids["bos_token"]), ids["sep_token"])  # newer files say bos for cls
    return backend


def _merges_from_scores(
    vocab: dict[str, int], tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Merges that do what sentencepiece does with scores: of all neighbours whose join is a token, join those whose
    join scores highest. Each way to split a token in two known ones is a merge with that token's rank."""
    if len(scores) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries, expected {len(tokens)}")
    ranked: list[tuple[float, int, str, str]] = []
    for i, token in enumerate(tokens):
        if types[i] != TokenType.NORMAL:
            continue
        if len(token) > _LONGEST:
            raise CheckpointError(f"token {i}: expected at most {_LONGEST} characters, found {len(token)}")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-float(scores[i]), -cut, left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Adds tokens that are found in the text before anything else. Control tokens are special: decoding can skip
    them."""
    control = [t for t, kind in zip(tokens, types, strict=True) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    user = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control if t])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in user if t])


def set_bos_eos(backend: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Makes `backend` add these ids around every text that is encoded with special tokens; None adds nothing."""
    # The names are only labels: real ones could hold characters that the template's syntax uses.
    labels = [("BOS", bos_id)] * (bos_id is not None) + [("EOS", eos_id)] * (eos_id is not None)
    pieces = ["BOS"] * (bos_id is not None) + ["$A"] + ["EOS"] * (eos_id is not None)
    backend.post_processor = processors.TemplateProcessing(single=" ".join(pieces), special_tokens=labels)
