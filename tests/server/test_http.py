"""Responses as JSON: the same text whole, in pieces, and from a thread."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import watched_sizes
from starlette.testclient import TestClient

from draftwing.server import endpoints, http, worker_pools
from draftwing.server.http import encode
from draftwing.server.parsers.message import MessageReader
from draftwing.text.answer import Answer

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TREES = st.recursive(
    LEAVES, lambda t: st.lists(t, max_size=9) | st.dictionaries(st.text(), t, max_size=4), max_leaves=40
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(data=TREES, piece=st.integers(1, 4))
def test_pieces_are_the_whole(data: Any, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http, "_PIECE", piece)
        assert encode(data, large=True) == encode(data)
    assert json.loads(encode(data)) == data


CHOICES = [{"index": i, "logprobs": {"content": [{"token": "a", "logprob": -1.5}] * 40}} for i in range(100)]
TOPS = [None, *([[-1.5, 7, "a"]] * 128 for _ in range(200))]
IDS = list(range(100_000))


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        {"choices": CHOICES},
        [{"meta_info": {"output_top_logprobs": TOPS}}],
        {"index": 0, "choices": [CHOICES, CHOICES * 10, TOPS]},
        {"ids": IDS, "of each": [IDS, [], {}, IDS], "none": None},
    ],
)
def test_no_piece_is_large(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever encodes a piece keeps the event loop from running."""
    whole, sizes = http._at_once, list[int]()

    def spy(part: Any) -> bytes:
        sizes.append(leaves(part))
        return whole(part)

    monkeypatch.setattr(http, "_at_once", spy)
    assert encode(data, large=True) == whole(data)
    assert max(sizes) <= 2 * http._PIECE
    assert len(sizes) < 40 + 8 * leaves(data) / http._PIECE  # nor are they tiny


def leaves(data: Any) -> int:
    if isinstance(data, dict | list):
        return sum(map(leaves, data.values() if isinstance(data, dict) else data)) + 1
    return 1


def test_numbers_that_json_does_not_have_are_null() -> None:
    for large in (False, True):
        assert encode({"a": [math.nan, -math.inf, 1.5], "b": (1, 2)}, large) == b'{"a":[null,null,1.5],"b":[1,2]}'


CHAT = {"messages": [{"role": "user", "content": "abcdefg"}], "logprobs": True, "top_logprobs": 3, "n": 2}
TEXT = {"prompt": ["abcdefg", "hij"], "logprobs": 3, "echo": True, "return_token_ids": True}
GENERATE = {"text": "abcdefg", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 6, "seed": 1}),
    ("/v1/completions", TEXT | {"max_tokens": 6, "seed": 1}),
    ("/generate", GENERATE | {"sampling_params": {"max_new_tokens": 6, "sampling_seed": 1}, "rid": "r"}),
    ("/v1/responses", {"input": "abcdefg"}),
    ("/v1/messages", {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 6}),
    ("/tokenize", {"prompt": "abcdefg", "return_token_strs": True}),
]


CASES = [
    (path, body, stream) for path, body in REQUESTS for stream in (False, True) if path != "/tokenize" or not stream
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body", "stream"), CASES)
def test_large_answers_are_made_in_a_thread(
    path: str, body: dict[str, Any], stream: bool, client: TestClient, engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They say the same, piece by piece or whole."""
    threads: set[str] = set()

    def spy(data: Any, large: bool = False) -> bytes:
        threads.add(threading.current_thread().name)
        return encode(data, large)

    for module in (http, endpoints):
        monkeypatch.setattr(module, "encode", spy)
    asked = body | ({"stream": True} if stream else {})
    small = client.post(path, json=asked)
    assert small.status_code == 200 and not any("draftwing" in name for name in threads)
    monkeypatch.setattr(worker_pools, "MAX_INLINE_SIZE", 0)
    monkeypatch.setattr(http, "_PIECE", 2)
    engine.cached.clear()
    large = client.post(path, json=asked)
    if path != "/tokenize" and not (stream and path == "/v1/messages"):  # whose events are small
        assert any("draftwing" in name for name in threads)
    if stream:
        shown = [_without_ids(json.loads(line[6:])) for line in small.text.splitlines() if line.startswith("data: {")]
        again = [_without_ids(json.loads(line[6:])) for line in large.text.splitlines() if line.startswith("data: {")]
        assert again[-1] == shown[-1]
    else:
        assert _without_ids(large.json()) == _without_ids(small.json())


SAID = {"input": "abcdefg" * 9, "include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", SAID),
        ("/v1/responses", SAID | {"top_logprobs": 9, "max_output_tokens": 20}),
        ("/v1/responses", SAID | {"top_logprobs": 1, "store": False}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 60}),
        ("/api/chat", {"messages": CHAT["messages"], "model": "m", "logprobs": True, "top_logprobs": 9}),
        ("/api/generate", {"prompt": "abcdefg", "model": "m", "logprobs": True, "top_logprobs": 4, "raw": True}),
        ("/generate", {"text": "abcdefg", "return_hidden_states": True}),
        ("/generate", {"text": ["abcdefg", "hi"], "return_hidden_states": True, "sampling_params": {"n": 2}}),
        ("/generate", GENERATE | {"return_hidden_states": [True], "text": ["abcdefg"]}),
    ],
)
@pytest.mark.parametrize("burst", [pytest.param(1, marks=pytest.mark.slow), 50])
def test_no_large_event_is_encoded_on_the_event_loop(
    path: str, body: dict[str, Any], burst: int, client: TestClient, engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Not what is new, and not what repeats a whole message."""
    threads = set[str]()

    def spy(data: Any, large: bool = False) -> bytes:
        if numbers(data) > 30:
            threads.add(threading.current_thread().name)
        return encode(data, large)

    for module in (http, endpoints):
        monkeypatch.setattr(module, "encode", spy)
    monkeypatch.setattr(worker_pools, "MAX_INLINE_SIZE", 30)
    engine.burst = burst
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert all(name.startswith("draftwing-json") for name in threads), threads
    assert threads or (burst == 1 and path not in ("/v1/responses", "/generate")), "else an event has one token"
    if path == "/v1/responses":
        names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
        ends = ["output_text.done", "content_part.done", "output_item.done"]
        assert [name.removeprefix("response.") for name in names[-4:-1]] == ends
        data = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        assert [event["sequence_number"] for event in data] == list(range(len(data)))
        of_ends = [data[-4], data[-3]["part"], data[-2]["item"]["content"][0], data[-1]["response"]["output"][0]]
        whole = [one["logprobs"] for one in (*of_ends[:3], of_ends[3]["content"][0])]
        deltas = [entry for event in data if event["type"].endswith("text.delta") for entry in event["logprobs"]]
        assert whole == [deltas] * 4 and "".join(entry["token"] for entry in deltas) == of_ends[0]["text"]


def numbers(data: Any) -> int:
    """Log probabilities and numbers of hidden states: all that is no integer."""
    if isinstance(data, dict | list):
        return sum(map(numbers, data.values() if isinstance(data, dict) else data))
    return isinstance(data, float)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_characters_count_where_messages_are_read(
    path: str, stream: bool, client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few tokens they are made of: a token may be a hundred of them."""
    sizes, read, push = watched_sizes(monkeypatch, "render"), list[int](), MessageReader.push

    def reads(self: MessageReader, text: str, final: bool, ids: Any) -> Any:
        read.append(len(text))
        return push(self, text, final, ids)

    monkeypatch.setattr(MessageReader, "push", reads)
    monkeypatch.setattr(Answer, "entries", 0)
    said = (
        {"input": "hello", "store": False}
        if path == "/v1/responses"
        else {"messages": [{"role": "user", "content": "hello"}]}
    )
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = client.post(path, json={"model": "m", **said, length: 20, "stream": stream})
    assert response.status_code == 200, response.text
    prompt = len(engine.requests[-1].prompt_ids) if not stream or "chat" in path else 0
    more = 0
    if (
        path == "/v1/responses"
    ):  # which repeats the request: as a whole once, in a stream three times, last with the text, as do three events
        asked = len(response.request.content)
        more = 3 * asked + 4 * sum(read) if stream else asked
    assert sum(read) > 10 and sum(sizes) == prompt + sum(read) + more


def _without_ids(data: Any) -> Any:
    """Without what differs between two requests: ids, times, and how many events came before."""
    if isinstance(data, list):
        return [_without_ids(one) for one in data]
    if isinstance(data, dict):
        other = (
            "id", "created", "created_at", "completed_at", "item_id", "timings", "e2e_latency", "sequence_number",
        )  # fmt: skip
        return {name: _without_ids(value) for name, value in data.items() if name not in other}
    return data


@pytest.mark.parametrize("large", [False, True])
def test_one_line_whatever_a_reader_takes_for_its_end(large: bool) -> None:
    """`str.splitlines` and httpx's `iter_lines` cut at all of these."""
    end = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    data = {f"a{end}": [f"{end}b{end}{end}c\\{end}", {"é😀": end}]}
    assert len(end.splitlines()) == len(end), "what is tested are ends of lines"
    text = encode(data, large).decode()
    assert len(text.splitlines()) == 1 and json.loads(text) == data and "é😀" in text
    assert len(http.event(data, large).splitlines()) == 2 and http.event(data, large).endswith("\n\n")


@pytest.mark.parametrize("wrap", [lambda one: [one], lambda one: {"a": [one]}, lambda one: [[one], {"b": one}][:1]])
def test_what_is_nested_deeply_is_encoded_in_time_that_grows_with_it(wrap: Callable[[Any], Any]) -> None:
    nested: Any = "x"
    for _ in range(100):  # twice as long for each would take for ever
        nested = wrap(nested)
    assert json.loads(encode([nested, 1], large=True)) == [nested, 1]
