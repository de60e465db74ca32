"""Receipts: answers with drafts are the same when they are made again, without drafts and by another engine, and what
was changed of a receipt is found out."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.learnable import write_target
from tiny_checkpoint import write_checkpoint

from draftwing import LLM, AsyncLLM
from draftwing.config.options import Options
from draftwing.engine import engine as engine_module
from draftwing.engine.engine import Engine
from draftwing.engine.provenance import Digests, Provenance, StoredFile, digests_of, file_digest, model_files
from draftwing.engine.receipt_replay import replay
from draftwing.engine.receipts import check_files, digest_of, first_difference, options_for, read_receipt, warnings_of
from draftwing.errors import ConfigError, DraftwingError, GenerationError, ReceiptError, RequestError
from draftwing.ops import make_ops
from draftwing.ops.cpu.extension import usable_sets
from draftwing.requests.request import SpecLimits

Receipt = dict[str, Any]
NGRAM: dict[str, Any] = {
    "speculative_algorithm": "NGRAM", "speculative_fixed_shape": True, "max_total_tokens": 4096, "random_seed": 5,
    "chat_template": "chatml_tools",
}  # fmt: skip
PROMPT = list(b"one two one two one two")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 5, "top_p": 0.9, "top_k": 50},
    "seeded": {"temperature": 0.8, "sampling_seed": 2**63 - 1},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "logit_bias": {"7": 1.5}},
    "dry": {"temperature": 0, "dry_multiplier": 0.8},
    "stops": {"temperature": 1, "stop": ["e", "\n", "é"], "stop_regex": ["[xyz]+"], "stop_token_ids": [9]},
    "bans": {"temperature": 1, "bad_words": ["a", "the"], "allowed_token_ids": [*range(1, 256)]},
    "json": {"temperature": 1, "response_format": {"type": "json_object"}},
    "schema": {"temperature": 0, "json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "regex": {"temperature": 1, "regex": "[0-9]{3}-[a-z]{2,5}"},
    "no end": {"temperature": 0, "ignore_eos": True, "min_new_tokens": 0},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target", max_position_embeddings=512, intermediate_size=64)


@pytest.fixture(scope="module")
def drafting(target: Path) -> Iterator[LLM]:
    with LLM(str(target), **NGRAM) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[LLM]:
    """Another engine, as `draftwing verify` starts it."""
    options = {"chat_template": "chatml_tools", "max_running_requests": 1, "max_total_tokens": 4096}
    with LLM(str(target), speculative_algorithm="none", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def receipt(drafting: LLM) -> Receipt:
    return receipt_of(drafting, temperature=5, top_k=40, sampling_seed=3, max_new_tokens=48)


def receipt_of(llm: LLM, **params: Any) -> Receipt:
    (done,) = llm.generate(PROMPT, {"max_new_tokens": 24, **params}, receipt=True)
    assert done.receipt is not None
    return done.receipt


def text(receipt: Receipt) -> str:
    return json.dumps(receipt)


def forged(receipt: Receipt) -> str:
    """By somebody who knows how the digest is made."""
    return json.dumps({**receipt, "digest": digest_of(receipt)})


def canonical_digest(receipt: Receipt) -> str:
    """What the page says of it, by other means than the package's."""
    held = {name: value for name, value in sorted(receipt.items()) if name != "digest"}
    return hashlib.sha256(json.dumps(held, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS)
def test_an_answer_with_drafts_is_the_same_without(drafting: LLM, plain: LLM, params: dict[str, Any]) -> None:
    done = drafting.generate([PROMPT, PROMPT[::-1]], {"max_new_tokens": 24, "n": 2, **params}, receipt=True)
    for one in done:
        assert one.receipt is not None and one.receipt["answer"]["token_ids"] == one.token_ids
        assert one.receipt["request"]["prompt_ids"] == one.prompt_token_ids
        assert one.receipt["digest"] == canonical_digest(one.receipt)
        found = replay(read_receipt(text(one.receipt)), plain.engine)
        assert found.same, found
        assert not warnings_of(read_receipt(text(one.receipt)), plain.engine.info)
    if not params["temperature"]:
        return
    assert len({one.receipt["request"]["sampling"]["sampling_seed"] for one in done if one.receipt}) == len(done) - (
        2 if "sampling_seed" in params else 0
    )


def test_the_drafts_of_these_answers_were_accepted(drafting: LLM) -> None:
    (done,) = drafting.generate(PROMPT, {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True})
    assert done.meta_info["spec_num_correct_drafts"] > 0


def test_a_conversation_with_tools(drafting: LLM, plain: LLM) -> None:
    asked = [{"role": "user", "content": "call it"}]
    (done,) = drafting.chat(asked, {"max_new_tokens": 40}, tools=TOOLS, tool_choice="required", receipt=True)
    assert done.receipt is not None and "grammar" in done.receipt["request"]["sampling"]
    assert replay(read_receipt(text(done.receipt)), plain.engine).same


def test_thinking_budgets_and_logits_processors(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget's tokens are in the receipt; code of the server's owner is only named, and never imported for it."""
    (tmp_path / "even_tokens.py").write_text(
        "def even(tokens, logits, params):\n    logits[params['from']::2] = -1e9\n    return logits\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"reasoning_parser": "qwen3", "logit_processor": "even_tokens:even"}
    asked: list[dict[str, Any]] = [
        {"temperature": 5, "thinking_budget": 3, "max_new_tokens": 30},
        {"temperature": 5, "custom_logit_processor": "even", "custom_params": {"from": 1}, "ignore_eos": True},
    ]
    with LLM(str(target), **NGRAM, **own) as llm:
        begun, end = [*PROMPT, *llm.tokenizer.encode("<think>\n")], llm.tokenizer.encode("</think>")
        thought, even = llm.generate([begun, PROMPT], asked, receipt=True)
    assert thought.receipt is not None and even.receipt is not None
    assert thought.token_ids[3:11] == end and not any(token % 2 for token in even.token_ids)
    assert thought.receipt["request"]["thinking"]["tokens"] == 3
    read = [read_receipt(text(one.receipt)) for one in (thought, even) if one.receipt is not None]
    with LLM(str(target), speculative_algorithm="none", max_total_tokens=1024) as bare:
        assert replay(read[0], bare.engine).same
        with pytest.raises(ReceiptError, match="custom_logit_processor 'even' is not one"):
            replay(read[1], bare.engine)
    options = options_for(read[1], {"logit_processor": "even_tokens:even", "max_total_tokens": 1024})
    with LLM.from_engine(Engine(options)) as llm:
        assert replay(read[1], llm.engine).same


def test_a_request_of_an_engine_that_drafts_is_run_without_drafts(drafting: LLM, receipt: Receipt) -> None:
    asked: list[Any] = []
    submit = drafting.engine.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting.engine, "submit", lambda request: (asked.append(request), submit(request)))
        assert replay(read_receipt(text(receipt)), drafting.engine).same
    assert [request.limits for request in asked] == [SpecLimits(0, 1, 1)]


def test_a_stream_has_it_at_its_end(drafting: LLM, plain: LLM) -> None:
    *pieces, last = drafting.stream(PROMPT, {"max_new_tokens": 9, "temperature": 1}, receipt=True)
    assert last.completion is not None and last.completion.receipt is not None and pieces
    assert replay(read_receipt(text(last.completion.receipt)), plain.engine).same


@pytest.mark.slow
def test_an_engine_in_another_process(target: Path, plain: LLM) -> None:
    async def asked() -> Receipt | None:
        async with AsyncLLM(str(target), **NGRAM) as llm:
            return (await llm.generate(PROMPT, {"max_new_tokens": 9, "temperature": 5}, receipt=True)).receipt

    assert replay(read_receipt(json.dumps(asyncio.run(asked()))), plain.engine).same


def test_digests_are_begun_with_the_request_and_no_answer_waits_for_those_of_another(
    drafting: LLM, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known(Future[dict[str, str]]):
        def result(self, timeout: float | None = None) -> dict[str, str]:
            return super().result(0)  # nobody waits for it in vain

    found, steps, begun = Known(), list[int](), list[int]()
    step = drafting.engine.step

    def counted(block: bool = False) -> Any:
        steps.append(len(steps))
        news = step(block)
        if drafting.engine.idle():
            found.set_result(digests_of(provenance))
        return news

    provenance = drafting.engine.info.provenance
    assert provenance is not None
    monkeypatch.setattr(drafting.engine, "step", counted)
    monkeypatch.setattr(Digests, "begin", lambda self, of: (begun.append(len(steps)), found)[1])
    params = [{"max_new_tokens": 2}, {"max_new_tokens": 60, "ignore_eos": True}]
    for one in drafting.generate([PROMPT, PROMPT], params, receipt=True):
        assert one.receipt is not None and replay(read_receipt(text(one.receipt)), plain.engine).same
    assert begun == [0], "before the first step"


def test_who_does_not_ask_has_none(drafting: LLM) -> None:
    (done,) = drafting.generate(PROMPT, {"max_new_tokens": 2})
    assert done.receipt is None and "receipt" not in done.meta_info
    with pytest.raises(RequestError, match="receipt must be true or false"):
        drafting.generate(PROMPT, receipt="yes")  # type: ignore[arg-type]


def test_an_answer_without_a_limit_has_that_of_its_context(drafting: LLM, plain: LLM) -> None:
    found = receipt_of(drafting, max_new_tokens=None, temperature=0, ignore_eos=True)
    tokens = len(found["answer"]["token_ids"])
    assert found["request"]["sampling"]["max_new_tokens"] == tokens == plain.engine.info.context_length - len(PROMPT)
    assert replay(read_receipt(text(found)), plain.engine).same


@pytest.mark.parametrize(
    "device, exact, fast", [("cuda 9.0", False, True), ("cuda 9.0", True, False), ("cpu", False, False)]
)
def test_receipts_of_versions_with_another_name_of_the_numerics(
    receipt: Receipt, device: str, exact: bool, fast: bool
) -> None:
    fields: Any = json.loads(text(receipt))
    del fields["options"]["fast_numerics"]
    fields["options"]["enable_deterministic_inference"], fields["device"] = exact, device
    fields["digest"] = digest_of(fields)
    read = read_receipt(json.dumps(fields))
    assert read.options["fast_numerics"] is fast and "enable_deterministic_inference" not in read.options
    assert options_for(read, {"device": "cpu"}).fast_numerics is fast


def test_other_languages_may_write_it_anew(receipt: Receipt) -> None:
    """JavaScript has no integers of more than 53 bits, and writes 1.0 as 1; blanks and the order of names are free."""

    def numbers(value: Any) -> Iterator[float]:
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from numbers(one)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value

    assert all(abs(one) < 2**53 and (isinstance(one, int) or not one.is_integer()) for one in numbers(receipt))
    turned = json.dumps(dict(reversed(receipt.items())), indent=2)
    assert read_receipt(turned) == read_receipt(text(receipt))


# -- what was changed --------------------------------------------------------------------------------------------------


def changed(*path: Any, to: Callable[[Any], Any]) -> Callable[[Receipt], None]:
    def change(receipt: Receipt) -> None:
        at: Any = receipt
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = to(at.get(path[-1]) if isinstance(at, dict) else at[path[-1]])

    return change


def with_grammar(_: Any, **more: Any) -> dict[str, Any]:
    return {"kind": "regex", "text": "[ab]+", "whitespace": None, **more}


def with_processor(_: Any, **more: Any) -> dict[str, Any]:
    return {"name": "none", "params": "{}", **more}


def with_thinking(_: Any, **more: Any) -> dict[str, Any]:
    return {"tokens": 3, "begin": [60], "end": [62], "open": False, "again": False, **more}


SAMPLING = ("request", "sampling")
# Whether a forged digest hides it; what a replay does not depend on is not found out by one, and changes no text.
TAMPERED: dict[str, tuple[Callable[[Receipt], None], str]] = {
    "a token of the answer": (changed("answer", "token_ids", 5, to=lambda token: token ^ 1), "different"),
    "the first token": (changed("answer", "token_ids", 0, to=lambda token: token ^ 3), "different"),
    "the last token": (changed("answer", "token_ids", -1, to=lambda token: token ^ 1), "different"),
    "a longer answer": (changed("answer", "token_ids", to=lambda tokens: [*tokens, 7]), "different"),
    "a shorter answer": (changed("answer", "token_ids", to=lambda tokens: tokens[:-1]), "different"),
    "no answer": (changed("answer", "token_ids", to=lambda tokens: []), "different"),
    "why it ended": (changed("answer", "finish_reason", to=lambda reason: "stop"), "different"),
    "the end of the prompt": (changed("request", "prompt_ids", -1, to=lambda token: token ^ 1), "different"),
    "the beginning of the prompt": (changed("request", "prompt_ids", 0, to=lambda token: token ^ 1), "different"),
    "a shorter prompt": (changed("request", "prompt_ids", to=lambda tokens: tokens[1:]), "different"),
    "the seed": (changed(*SAMPLING, "sampling_seed", to=lambda seed: str(int(seed) ^ 1)), "different"),
    "the temperature": (changed(*SAMPLING, "temperature", to=lambda value: 0), "different"),
    "top_k": (changed(*SAMPLING, "top_k", to=lambda value: 1), "different"),
    "a penalty": (changed(*SAMPLING, "repetition_penalty", to=lambda value: 2), "different"),
    "a bias": (changed(*SAMPLING, "logit_bias", to=lambda value: {"9": 100}), "different"),
    "a stop string": (changed(*SAMPLING, "stop_token_ids", to=lambda value: [*range(64)]), "different"),
    "the length": (changed(*SAMPLING, "max_new_tokens", to=lambda value: value - 1), "different"),
    "a grammar": (
        changed(*SAMPLING, "grammar", to=lambda value: {"kind": "regex", "text": "[ab]+", "whitespace": None}),
        "different",
    ),
    "the weights": (changed("digests", "weights", to=lambda digest: digest[::-1]), "refused"),
    "the config": (changed("digests", "config", to=lambda digest: "0" * 64), "refused"),
    "the tokenizer": (changed("digests", "tokenizer", to=lambda digest: "0" * 64), "refused"),
    "a digest that is left out": (changed("digests", to=lambda digests: {}), "refused"),
    "the model": (changed("model", to=lambda model: "/no/such/model"), "refused"),
    "a model that is no path": (changed("model", to=lambda model: "a" * 5000), "refused"),
    "a model of nobody": (changed("model", to=lambda model: "~nobody-of-this-name/model"), "refused"),
    "the revision": (changed("revision", to=lambda model: 7), "refused"),
    "the format": (changed("version", to=lambda version: 2), "refused"),
    "an unknown field": (changed("more", to=lambda value: 1), "refused"),
    "an unknown parameter": (changed(*SAMPLING, "heat", to=lambda value: 1), "refused"),
    "several answers": (changed(*SAMPLING, "n", to=lambda value: 2), "refused"),
    "a seed that is none": (changed(*SAMPLING, "sampling_seed", to=lambda value: "x"), "refused"),
    "a token that is none": (changed("answer", "token_ids", 2, to=lambda token: "a"), "refused"),
    "a token outside of the vocabulary": (changed("request", "prompt_ids", 2, to=lambda token: 2**30), "refused"),
    "an unknown option": (changed("options", "model", to=lambda value: "x"), "refused"),
    "an option's value": (changed("options", "dtype", to=lambda value: "float8"), "refused"),
    "thinking": (changed("request", "thinking", to=lambda value: {"tokens": 1}), "refused"),
    "a version that is no number": (changed("version", to=lambda version: True), "refused"),
    **{
        f"a grammar with {name}={value!r}": (
            changed(*SAMPLING, "grammar", to=partial(with_grammar, **{name: value})),
            "refused",
        )
        for name, value in (("kind", "zz"), ("kind", []), ("text", 5), ("text", None), ("whitespace", 7), ("more", 1))
    },
    "a grammar that is a list": (changed(*SAMPLING, "grammar", to=lambda value: []), "refused"),
    **{
        f"a logits processor with {name}={str(value)[:9]}": (
            changed(*SAMPLING, "logits_processor", to=partial(with_processor, **{name: value})),
            "refused",
        )
        for name, value in (("params", "[" * 100_000), ("params", "{"), ("params", {}), ("params", "7"), ("name", 5))
    },
    **{
        f"thinking with {name}={value!r}": (
            changed("request", "thinking", to=partial(with_thinking, **{name: value})),
            "refused",
        )
        for name, value in (
            ("tokens", 2**70),
            ("tokens", -5),
            ("tokens", True),
            ("begin", [2**80]),
            ("begin", [-1]),
            ("begin", [60] * 40),
            ("end", []),
            ("end", [62] * 40),
            ("end", ["a"]),
            ("open", 1),
            ("again", None),
        )
    },
    "the device": (changed("device", to=lambda device: "cuda 9.0"), "warned"),
    "the version of the engine": (changed("draftwing", to=lambda version: "9.9"), "warned"),
    "the chat template": (changed("digests", "chat_template", to=lambda digest: "0" * 64), "warned"),
    "an option": (changed("options", "tp_size", to=lambda value: 4), "warned"),
}


def checked(content: str, engine: Any) -> str:
    try:
        found = read_receipt(content)
        check_files(found, options_for(found, {"tp_size": 1}))
        outcome = "same" if replay(found, engine).same else "different"
        return "warned" if outcome == "same" and warnings_of(found, engine.info) else outcome
    except DraftwingError:
        return "refused"


def test_what_was_not_changed_is_the_same(receipt: Receipt, plain: LLM) -> None:
    assert checked(text(receipt), plain.engine) == "same"


@pytest.mark.parametrize(("tamper", "outcome"), TAMPERED.values(), ids=TAMPERED)
def test_what_was_changed_is_found_out(
    receipt: Receipt, plain: LLM, tamper: Callable[[Receipt], None], outcome: str
) -> None:
    """Without a new digest at once, without any model; with one by the model's files, or by the text."""
    other = copy.deepcopy(receipt)
    tamper(other)
    assert text(other) != text(receipt)
    with pytest.raises(ReceiptError):
        read_receipt(text(other))
    assert checked(forged(other), plain.engine) == outcome


def test_what_is_no_receipt_is_refused(receipt: Receipt) -> None:
    for content in ("", "[]", "{}", "[" * 100_000, "null", text(receipt)[:-1], '{"version": NaN}'):
        with pytest.raises(ReceiptError):
            read_receipt(content)
    with pytest.raises(ReceiptError, match="whole response"):
        read_receipt(json.dumps({"choices": [{"receipt": receipt}]}))


def test_where_two_answers_differ_it_says_by_how_much(receipt: Receipt, plain: LLM) -> None:
    other = copy.deepcopy(receipt)
    tokens = other["answer"]["token_ids"]
    tokens[6] ^= 1
    found = replay(read_receipt(forged(other)), plain.engine)
    right = receipt["answer"]["token_ids"]
    assert (found.at, found.expected, found.found) == (6, tokens[6], right[6]) and not found.same
    (scored,) = plain.generate(
        [[*PROMPT, *right[:6]]], {"max_new_tokens": 1}, return_logprob=True, token_ids_logprob=[tokens[6], right[6]]
    )
    (first, second) = (value for value, *_ in scored.meta_info["output_token_ids_logprobs"][0])
    assert found.gap == pytest.approx(first - second, abs=1e-5)
    other["answer"]["token_ids"] = right[:6]
    found = replay(read_receipt(forged(other)), plain.engine)
    assert (found.at, found.expected, found.found, found.gap) == (6, None, right[6], None)


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [([], [], None), ([1], [1], None), ([1], [2], 0), ([1, 2], [1], 1), ([], [1], 0), ([1, 2, 3], [1, 2, 4], 2)],
)
def test_first_difference(one: list[int], other: list[int], index: int | None) -> None:
    assert first_difference(one, other) == index


# -- models and engines ------------------------------------------------------------------------------------------------


def test_other_weights_are_named(receipt: Receipt, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", disturbance=0.5, max_position_embeddings=512, intermediate_size=64)
    found = read_receipt(text(receipt))
    with pytest.raises(ReceiptError, match="digest of weights differs"):
        check_files(found, options_for(found, {"model": str(other)}))
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in Path(receipt["model"]).iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    assert check_files(found, options_for(found, {"model": str(copied)})) == copied
    (copied / "generation_config.json").write_text('{"eos_token_id": 5}')
    with pytest.raises(ReceiptError, match="digest of config differs"):
        check_files(found, options_for(found, {"model": str(copied)}))


def test_an_engine_with_other_options_is_warned_of(receipt: Receipt, target: Path) -> None:
    found = read_receipt(text(receipt))
    assert options_for(found, {}).dtype == "float32" and options_for(found, {}).drafter == "none"
    given = {"kv_cache_dtype": "float32", "max_total_tokens": 512}
    with LLM(str(target), speculative_algorithm="none", **given) as llm:
        of_cache, of_template = warnings_of(found, llm.engine.info)
    assert "--kv-cache-dtype" in of_cache and "float32" in of_cache and "chat template" in of_template
    with pytest.raises(ConfigError):
        options_for(found, {"dtype": "float8"})


def test_parts_of_a_split_file_count(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "m-00001-of-00003.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    split, alone = (model_files(Options(), tmp_path / name) for name in ("m-00001-of-00002.gguf", "other.gguf"))
    assert [Path(file.path).name for file in split] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert [Path(file.path).name for file in alone] == ["other.gguf"]
    before = digests_of(Provenance("cpu", (), split, None))
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"x")
    after = model_files(Options(), tmp_path / "m-00001-of-00002.gguf")
    assert digests_of(Provenance("cpu", (), after, None)) != before


def test_made_up_weights_have_none(target: Path) -> None:
    with LLM(str(target), load_format="dummy", max_total_tokens=512) as llm, pytest.raises(RequestError, match="made"):
        llm.generate(PROMPT, receipt=True)


def test_a_file_is_read_once_for_all_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "weights"
    content = os.urandom(2**20 + 1)
    path.write_bytes(content)

    def now() -> StoredFile:
        stat = path.stat()
        return StoredFile("weights", str(path), stat.st_size, stat.st_mtime_ns)

    expected = hashlib.sha256(content).hexdigest()
    before = now()
    assert file_digest(before) == expected
    stat = path.stat()
    path.write_bytes(content[::-1])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(before) == expected, "of the same size and time"
    assert file_digest(before, remembered=False) == hashlib.sha256(content[::-1]).hexdigest()
    path.write_bytes(content[:-1])
    assert file_digest(now()) == hashlib.sha256(content[:-1]).hexdigest()
    with pytest.raises(GenerationError, match="has changed"):
        file_digest(before)


def test_digests_are_computed_once_for_each_start(tmp_path: Path) -> None:
    file = tmp_path / "weights"

    def started(content: bytes) -> Any:
        file.write_bytes(content)
        stored = StoredFile("weights", str(file), len(content), file.stat().st_mtime_ns)
        return SimpleNamespace(provenance=Provenance("cpu", (), (stored,), None))

    digests, first = Digests(), started(b"a")
    found = digests.begin(first.provenance)
    assert digests.begin(first.provenance) is found and found.result()["weights"]
    second = started(b"bc")
    assert digests.begin(second.provenance).result()["weights"] != found.result()["weights"]
    third = started(b"def")
    file.rename(tmp_path / "away")
    with pytest.raises(GenerationError, match=r"cannot be read: .*"):
        digests.begin(third.provenance).result()
    (tmp_path / "away").rename(file)
    assert digests.begin(third.provenance).result()["weights"], "what failed is tried again"


def test_a_file_that_has_changed_is_not_read_for_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "weights", list[Any]()
    file.write_bytes(b"abc")
    provenance = Provenance("cpu", (), (StoredFile("weights", str(file), 3, file.stat().st_mtime_ns),), None)
    digest = hashlib.file_digest

    def slow(content: Any, name: str) -> Any:
        read.append(content)
        found = digest(content, name)
        file.write_bytes(b"abcd")  # meanwhile
        return found

    monkeypatch.setattr(hashlib, "file_digest", slow)
    digests = Digests()
    for _ in range(3):
        with pytest.raises(GenerationError, match="has changed since the start; start again"):
            digests.begin(provenance).result()
    assert len(read) == 1
    with pytest.raises(GenerationError, match="has changed"):
        Digests().begin(provenance).result()
    assert len(read) == 1, "its size is known before it is read"


def test_a_thread_that_cannot_be_started_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").write_bytes(b"")
    stat = (tmp_path / "weights").stat()
    provenance = Provenance("cpu", (), (StoredFile("weights", str(tmp_path / "weights"), 0, stat.st_mtime_ns),), None)
    digests = Digests()

    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        found = digests.begin(provenance)
    with pytest.raises(GenerationError, match="can't start new thread"):
        found.result(timeout=1)
    assert digests.begin(provenance).result()["weights"]


def test_a_file_that_changes_while_a_model_is_loaded_makes_no_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the old one that was loaded."""
    folder = write_checkpoint(tmp_path / "tiny")
    build = engine_module.build

    def during(*args: Any) -> Any:
        parts = build(*args)
        (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
        return parts

    monkeypatch.setattr(engine_module, "build", during)
    with LLM(str(folder), speculative_algorithm="none", max_total_tokens=512) as llm:
        for _ in range(2):
            with pytest.raises(GenerationError, match=r"config\.json has changed"):
                llm.generate(PROMPT, {"max_new_tokens": 2}, receipt=True)


def test_files_that_cannot_be_compared_are_no_fault_of_the_receipt(
    receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.file_digest

    def changing(content: Any, name: str) -> Any:
        os.utime(content.name, ns=(1, 1))
        return digest(content, name)

    found = read_receipt(text(receipt))
    before = {file: file.stat() for file in Path(receipt["model"]).iterdir()}
    monkeypatch.setattr(hashlib, "file_digest", changing)
    with pytest.raises(ReceiptError, match="has changed since the start") as refused:
        check_files(found, options_for(found, {}))
    assert "there is no receipt" not in str(refused.value)
    for file, stat in before.items():
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_file_that_has_changed_since_the_start_makes_no_receipt(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    with LLM(str(folder), speculative_algorithm="none", max_total_tokens=512) as llm:
        provenance = llm.engine.info.provenance
        assert provenance is not None and digests_of(provenance)["weights"]
        (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
        with pytest.raises(GenerationError, match=r"config\.json has changed"):
            llm.generate(PROMPT, {"max_new_tokens": 2}, receipt=True)


# -- other instruction sets --------------------------------------------------------------------------------------------

CHECK = """
import json, sys
from pathlib import Path
from draftwing import LLM
from draftwing.engine.receipt_replay import replay
from draftwing.engine.receipts import read_receipt
folder, file, threads = sys.argv[1:]
with LLM(folder, speculative_algorithm="none", num_threads=int(threads), max_total_tokens=4096, device="cpu") as llm:
    found = [replay(read_receipt(json.dumps(one)), llm.engine) for one in json.loads(Path(file).read_text())]
    print(json.dumps([one.same for one in found]))
"""
BLOCKS = bool(make_ops(torch.device("cpu")).block_kinds)


def verified_elsewhere(receipts: list[Receipt | None], model: str, folder: Path, isa: str, threads: int) -> list[bool]:
    """By a process with another instruction set."""
    file = folder / f"{isa}.json"
    file.write_text(json.dumps(receipts))
    out = subprocess.run(
        [sys.executable, "-c", CHECK, model, str(file), str(threads)],
        env={**os.environ, "DRAFTWING_CPU_ISA": isa}, capture_output=True, text=True,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    same: list[bool] = json.loads(out.stdout.splitlines()[-1])
    return same


@pytest.mark.exhaustive  # whose kernels have the same bits: tests/ops/cpu/test_extension.py
@pytest.mark.slow
@pytest.mark.skipif(not BLOCKS, reason="needs GEMMs of weights in blocks")
def test_another_instruction_set_makes_the_same_answers(target: Path, tmp_path: Path) -> None:
    params = [{"max_new_tokens": 16, "temperature": i % 3, "n": 2} for i in range(3)]
    with LLM(str(target), **NGRAM, device="cpu") as llm:
        done = llm.generate([PROMPT] * 3, params, receipt=True)
    isa = next((one.name for one in usable_sets() if one.name == "plain"), usable_sets()[-1].name)
    assert verified_elsewhere([one.receipt for one in done], str(target), tmp_path, isa, 2) == [True] * 6


@pytest.mark.exhaustive
@pytest.mark.skipif(not BLOCKS, reason="needs GEMMs of weights in blocks")
@pytest.mark.parametrize("number", range(len(usable_sets()) if BLOCKS else 0))
def test_100_receipts_of_the_default_model(smollm2_path: Path, tmp_path: Path, number: int) -> None:
    """Made by this process with drafts of the head, checked by each instruction set and other numbers of threads."""
    prompts = [f"Question {i}: what is {i} times {i + 1}? Answer:" for i in range(50)]
    params = [{"max_new_tokens": 20, "temperature": (0.0, 0.7, 1.0)[i % 3], "n": 2} for i in range(50)]
    drafting = {"speculative_fixed_shape": True}  # however long steps take
    with LLM("smollm2", device="cpu", max_total_tokens=8192, max_running_requests=16, **drafting) as llm:
        done = llm.generate(prompts, params, receipt=True, use_tqdm=False)
    assert len(done) == 100 and sum(one.meta_info["spec_num_correct_drafts"] for one in done) > 0
    receipts = [one.receipt for one in done]
    isa = usable_sets()[number].name
    assert verified_elsewhere(receipts, "smollm2", tmp_path, isa, 1 + number % 2) == [True] * 100
