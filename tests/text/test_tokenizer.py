"""Hugging Face folders against transformers' AutoTokenizer, on small tokenizers that are trained here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_checkpoint import write_checkpoint
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from draftwing.errors import CheckpointError, ConfigError, RequestError
from draftwing.models.hub import resolve_model
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from draftwing.text.tokenizer import (
    BUNDLED_TEMPLATE,
    PIECE,
    Stopped,
    Tokenizer,
    bad_word_ids,
    encode_bounded,
    load_tokenizer,
    vocabulary_difference,
)

CORPUS = ["The quick brown fox jumps over the lazy dog.", "Zwölf Boxkämpfer jagen Viktor quer, 1234 mal!", "日本語 😀"]
TEXTS = [
    "the lazy fox", "  two spaces", "", "Größe 😀 日本", "<s>x</s>", "a<think>b</think>", "new\nline\t1234", "e\u0301",
]  # fmt: skip
SPECIALS = ["<unk>", "<s>", "</s>"]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = SPECIALS + [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=names, show_progress=False)
    backend.train_from_iterator(CORPUS[:2], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # byte tokens are ordinary tokens
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "normalized": False}
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps({**base, **config}))
    return folder


@pytest.mark.parametrize("kind", [byte_level, metaspace])
@pytest.mark.parametrize(
    "config",
    [
        {}, {"add_bos_token": True, "add_eos_token": False}, {"add_bos_token": False, "add_eos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)  # fmt: skip
def test_equals_transformers(kind: Any, config: dict[str, Any], tmp_path: Path) -> None:
    folder = save(tmp_path / "model", kind(), **config)
    # Given as arguments too, because transformers 5 does not read these flags from the file.
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, **config)
    assert ours.bos_id == theirs.bos_token_id == 1 and ours.eos_id == theirs.eos_token_id == 2
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == frozenset(theirs.all_special_ids) | {0}  # tokenizer.json marks <unk> as special too
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_tokens_declared_outside_of_tokenizer_json(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    spec = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = {
        str(size): {"content": "<|im_start|>", "special": True, **spec},
        str(size + 1): {"content": "<tool>", "special": False, **spec},
    }
    folder = save(tmp_path / "model", backend, added_tokens_decoder=added, eos_token="<|im_start|>")
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>a<tool>b"
    assert ours.encode(text) == theirs.encode(text)
    assert {size, size + 1} <= set(ours.encode(text))
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True) == "a<tool>b"
    assert ours.eos_id == size and ours.vocab_size == size + 2

    added[str(size + 7)] = added.pop(str(size + 1))
    save(folder, backend, added_tokens_decoder=added)
    with pytest.raises(CheckpointError, match=f"'<tool>' is declared with id {size + 7}"):
        load_tokenizer(folder)


def test_older_files_name_special_and_added_tokens(tmp_path: Path) -> None:
    backend = byte_level()
    folder = save(tmp_path / "model", backend, bos_token=None, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>", "pad_token": "<nowhere>"}))
    (folder / "added_tokens.json").write_text(json.dumps({"<|end|>": backend.get_vocab_size()}))
    (folder / "tokenizer_config.json").write_text("{}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_id == backend.get_vocab_size() and tokenizer.eos_id in tokenizer.special_ids
    assert tokenizer.bos_id is None
    assert tokenizer.vocab_size == backend.get_vocab_size() + 1  # a named token without an id gets none


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_added_tokens_of_older_files_keep_the_flags_of_tokenizer_json(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<pad me>", lstrip=True, rstrip=True, normalized=False)])
    folder = save(tmp_path / "model", backend)
    (folder / "added_tokens.json").write_text(json.dumps({"<pad me>": backend.token_to_id("<pad me>")}))
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "the  <pad me>  fox"
    assert ours.encode(text) == theirs.encode(text) == backend.encode(text).ids


def test_where_chat_templates_lie(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", byte_level())
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="--chat-template") as error:
        load_tokenizer(folder).render_chat(messages)
    assert error.value.param == "messages"

    save(folder, byte_level(), chat_template="A")
    assert load_tokenizer(folder).chat_template == "A"
    named = [{"name": "default", "template": "B{{ tools }}"}, {"name": "tool_use", "template": "C{{ tools[0].x }}"}]
    save(folder, byte_level(), chat_template=named)
    assert load_tokenizer(folder).render_chat(messages) == "BNone"
    assert load_tokenizer(folder).render_chat(messages, tools=[{"x": 1}]) == "C1"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "D"}))
    assert load_tokenizer(folder).render_chat(messages) == "D"
    (folder / "chat_template.jinja").write_text("E")
    assert load_tokenizer(folder).render_chat(messages) == "E"

    assert load_tokenizer(folder, "F{{ messages[0].content }}").render_chat(messages, tools=[{}]) == "Fhi"
    (tmp_path / "own.jinja").write_text("G")
    for path in (tmp_path / "own.jinja", str(tmp_path / "own.jinja")):
        assert load_tokenizer(folder, path).render_chat(messages) == "G"
    with pytest.raises(ConfigError, match="chatml"):
        load_tokenizer(folder, "chatml")


@pytest.mark.parametrize("kind", [byte_level, metaspace])
@pytest.mark.parametrize(
    "flags",
    [
        {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True, "special": True}, {"single_word": True},
        {"normalized": True}, {"special": True}, {"special": True, "normalized": True, "single_word": True},
    ],
    ids=str,
)  # fmt: skip
def test_flags_that_differ_from_those_of_tokenizer_json(kind: Any, flags: dict[str, bool], tmp_path: Path) -> None:
    backend = kind()
    backend.normalizer = normalizers.Sequence([n for n in (backend.normalizer, normalizers.Lowercase()) if n])
    backend.add_tokens([AddedToken("<Think>", normalized=False), AddedToken("<Stop>", normalized=True, lstrip=True)])
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    added = {
        str(backend.token_to_id(text)): {"content": text, **plain, **flags} for text in ("<Think>", "<Stop>", "</s>")
    }
    folder = save(tmp_path / "model", backend, added_tokens_decoder=added)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    unlike = 0
    for text in (
        "a <Think> b",
        "a<Think>b",
        "the  <Stop>\n fox",
        "x<stop>y <think> z",
        "q </s> r</s>",
        "<Think><Stop> ",
    ):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        unlike += ids != backend.encode(text).ids
    assert unlike or flags == {"special": True}, "the flags change what is compared"
    reported, known = (t.get_added_tokens_decoder() for t in (ours.backend, theirs.backend_tokenizer))
    assert {i: repr(token) for i, token in reported.items() if token.content != "</s>"} == {
        i: repr(token) for i, token in known.items() if token.content != "</s>"
    }


@pytest.mark.parametrize("empty", [{}, [], None])
@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens"])
def test_more_special_tokens_by_either_name(name: str, empty: Any, tmp_path: Path) -> None:
    """transformers 5 writes one name and 4 the other; both may be there."""
    other = {"extra_special_tokens", "additional_special_tokens"} - {name}
    lists: list[Any] = [["<think>"], [{"content": "<think>", "lstrip": False}]]
    for tokens in lists + ([{"a": "<think>"}] if name == "extra_special_tokens" else []):
        folder = save(tmp_path / "model", byte_level(), **{name: tokens, other.copy().pop(): empty})
        tokenizer = load_tokenizer(folder)
        assert tokenizer.backend.token_to_id("<think>") in tokenizer.special_ids
        assert tokenizer.decode(tokenizer.encode("a<think>b")) == "ab"
    folder = save(
        tmp_path / "model", byte_level(), extra_special_tokens=["<think>"], additional_special_tokens=["<|a|>"]
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<|a|>": byte_level().get_vocab_size()}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("a<think>b<|a|> fox")) == "ab fox"


ASKED = [{"role": "user", "content": "hi"}]
TOOL = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, {"chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "T{{ tools[0].function.name }}"}),
        ({"chat_template": "C"}, {"chat_template.jinja": "D", "additional_chat_templates/rag.jinja": "R"}),
        ({"chat_template": [{"name": "default", "template": "C"}, {"name": "tool_use", "template": "U"}]}, {}),
        (
            {"chat_template": [{"name": "default", "template": "C"}, {"name": "tool_use", "template": "U"}]},
            {"chat_template.jinja": "D"},
        ),
        ({"chat_template": {"default": "C", "tool_use": "U", "rag": "R"}}, {}),
        ({"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "C"}]}, {}),
    ],
)
def test_named_templates_as_in_transformers(config: dict[str, Any], files: dict[str, str], tmp_path: Path) -> None:
    folder = save(tmp_path / "model", byte_level(), **config)
    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOL):
        expected = theirs.apply_chat_template(ASKED, tools=tools, tokenize=False)
        assert ours.render_chat(ASKED, tools=tools) == expected
        assert ours.chat_source is None or tools is None or ours.chat_source[0] == expected[0]


def test_a_template_for_tools_beside_one_in_the_configuration(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", byte_level(), chat_template="C")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(ASKED) == "C" and tokenizer.render_chat(ASKED, tools=TOOL) == "T"
    (folder / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError):
        load_tokenizer(folder)
    save(folder, byte_level(), chat_template="C")
    (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": {"default": "J", "tool_use": "K"}}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(ASKED) == "J" and tokenizer.render_chat(ASKED, tools=TOOL) == "K"


def test_chat_ids_equal_transformers_and_bos_is_not_doubled(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    template = "{{ bos_token }}" + CHATML
    folder = save(tmp_path / "model", backend, chat_template=template, add_bos_token=True)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "be 日"}, {"role": "user", "content": "the fox?"}]
    for prompt in (True, False):
        ids = ours.encode_chat(messages, add_generation_prompt=prompt)
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert ids.count(1) == 1 and ids[0] == 1
    assert ours.stop_ids == {2, backend.token_to_id("<|im_end|>")}  # the chat ends otherwise than eos says


def test_broken_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no protobuf")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object, found list"):
        load_tokenizer(tmp_path)


def test_vocab_and_merges_are_converted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    backend = byte_level()
    backend.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}))
    tokenizer = load_tokenizer(folder)
    for text in ("the lazy fox", "Größe 1234"):
        assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.eos_id == 2


def test_first_difference_of_two_vocabularies() -> None:
    def made(*pieces: str) -> Tokenizer:
        return Tokenizer(tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [])), {})

    target = made("a", "b", "c", "d")
    assert vocabulary_difference(target, made("a", "b", "c", "d", "pad")) is None
    assert vocabulary_difference(target, made("a", "b")) is None
    found = vocabulary_difference(target, made("a", "x", "c", "y"))
    assert found == "First difference: id 1 is 'b' in the target and 'x' in the draft."


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json", "chat_template.json"])
def test_files_that_hold_anything(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    values = (None, True, -1, 2**64, "", "\ud800", [], [[]], [None], [{}], {}, {"x": 1}, {"content": None}, "{% for")
    keys = ("eos_token", "chat_template", "added_tokens_decoder", "add_bos_token", "extra_special_tokens")
    contents = [json.dumps(value) for value in values] + ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
    contents += [json.dumps({**config, key: value}) for key in keys for value in values]
    refused = 0
    for content in contents:
        (folder / name).write_text(content)
        try:
            load_tokenizer(folder)
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith(str(folder)) or "chat template" in str(error)
    assert refused > 10


def test_the_template_that_comes_with_us_takes_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model", byte_level(), chat_template="C")
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(folder, BUNDLED_TEMPLATE)
    said = tokenizer.render_chat(ASKED, tools=TOOL)
    assert TOOL[0]["function"]["name"] in said and said.endswith("<|im_start|>assistant\n")
    (tmp_path / BUNDLED_TEMPLATE).write_text("a file of this name")
    assert load_tokenizer(folder, BUNDLED_TEMPLATE).render_chat(ASKED) == "a file of this name"


_LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_NEXT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (_LOOP + _NEXT, True),
        ("{% if messages[0].role != 'system' %}<|im_start|>system\nYou help<|im_end|>\n{% endif %}" + _LOOP, True),
        ("{{ bos_token }}" + _LOOP + _NEXT, False), (_LOOP + _NEXT + "<think>\n", False),
        ("{% for m in messages %}<s>{{ m.content }}{% endfor %}", False),
    ],
    ids=["plain", "a system prompt of its own", "bos", "reasoning", "no ChatML"],
)  # fmt: skip
def test_plain_chatml_takes_tools_from_the_start(tmp_path: Path, template: str, shown: bool) -> None:
    """What is asked without tools is the checkpoint's own template; a template that was passed stays alone."""
    tokenizer = load_tokenizer(save(tmp_path / "model", byte_level(), chat_template=template))
    assert (TOOL[0]["function"]["name"] in tokenizer.render_chat(ASKED, tools=TOOL)) == shown
    assert ("<tool_call>" in (tokenizer.chat_source or "")) == shown
    passed = load_tokenizer(tmp_path / "model", template)
    assert passed.render_chat(ASKED) == tokenizer.render_chat(ASKED) == passed.render_chat(ASKED, tools=TOOL)


def ids_of(tokenizer: Tokenizer, words: list[str]) -> tuple[tuple[int, ...], ...]:
    return bad_word_ids(tokenizer, GenerationRequest("", [1], SamplingParams(bad_words=words)))


def test_both_forms_of_a_word(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    found = ids_of(tokenizer, ["capital", " France"])
    assert [tokenizer.decode(ids) for ids in found] == ["capital", " capital", " France"]
    inside = tokenizer.encode("The capital of France is")
    assert all(ids[0] in inside for ids in found[1:]) and len(found[1]) == len(found[2]) == 1
    assert ids_of(tokenizer, []) == ()
    asked = GenerationRequest("", [1], SamplingParams(bad_words=["capital"]), bad_word_ids=((5,),))
    assert bad_word_ids(tokenizer, asked) == ((5,),), "found before"
    assert len(ids_of(tokenizer, ["capital", "capital", " capital"])) == 2


def test_limits(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    with pytest.raises(RequestError, match=str(MAX_BAD_WORD_TOKENS)) as info:
        ids_of(tokenizer, ["a b " * MAX_BAD_WORD_TOKENS])
    assert info.value.param == "bad_words"
    with pytest.raises(RequestError, match=f"{MAX_BAD_WORDS} token sequences"):
        ids_of(tokenizer, [f"w{i}" for i in range(MAX_BAD_WORDS)])


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: object) -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2", None, weights=False))


def texts() -> list[str]:
    draw = random.Random(3)
    words = " ".join(draw.choice(["the", "zebra", "quantum", "日本", "12", "\n\n"]) for _ in range(40_000))
    return ["a", words, "", "b" * 1000, "x" * (PIECE + 1), " " * 100_000, "c" * PIECE]


def test_ids_are_those_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    plain = [tokenizer.encode(text) for text in texts()]
    longest = max(map(len, plain))
    assert encode_bounded(tokenizer, texts(), longest, "prompt") == plain  # what just fits is never refused


def test_what_cannot_fit_costs_no_more_than_what_does(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode_many = Tokenizer.encode_many

    def spy(self: Tokenizer, batch: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        seen.append(sum(map(len, batch)))
        return encode_many(self, batch, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_many", spy)
    with pytest.raises(RequestError, match="prompt has more than 1000 tokens") as error:
        encode_bounded(tokenizer, ["word " * 10**6], 1000, "prompt")
    assert error.value.param == "prompt" and sum(seen) == PIECE


def test_it_stops_between_pieces(tokenizer: Tokenizer) -> None:
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        encode_bounded(tokenizer, ["word " * 10**6], 10**6, "prompt", stopped=lambda: next(asked))
    with pytest.raises(StopIteration):
        next(asked)
