"""Log probabilities in the shapes of the three APIs: of the tokens that are returned, no others."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import EOS, FakeEngine
from scripted import ok, streamed
from starlette.testclient import TestClient
from tokenizers.processors import TemplateProcessing

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "é😀 one two"}]
ECHO = "user:é😀 one two\n"


def value(token: int) -> float:
    """What the stand-in says of a token."""
    return -token / 100


def test_chat(client: TestClient, engine: FakeEngine) -> None:
    choice = ok(client, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    ids = engine.tokenizer.encode(ECHO)
    assert [entry["logprob"] for entry in content] == [value(token) for token in ids]  # none of the stop token
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"] == ECHO
    assert content[0]["token"] == "u" and {"\ufffd"} < {entry["token"] for entry in content}
    best = content[0]["top_logprobs"]
    assert [entry["logprob"] for entry in best] == [-0.5, -1.0]
    assert all(set(entry) == {"token", "logprob", "bytes"} for entry in best)


@pytest.mark.parametrize("stream", [False, True])
def test_ids_in_place_of_texts(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    """As vLLM names them, of the echoed prompt and of the best tokens, too."""
    body: dict[str, Any] = {"prompt": "aé", "logprobs": 2, "echo": True, "return_tokens_as_token_ids": True}
    told = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    if stream:
        found = [chunk["choices"][0]["logprobs"] for chunk in streamed(client, COMPLETION, **body)]
        columns = [name for one in found if one for name in one["tokens"]]
        chat = [chunk["choices"][0]["logprobs"] for chunk in streamed(client, CHAT, **told)]
        content = [entry for one in chat if one for entry in one["content"]]
    else:
        columns = ok(client, COMPLETION, **body)["choices"][0]["logprobs"]["tokens"]
        content = ok(client, CHAT, **told)["choices"][0]["logprobs"]["content"]
    assert columns == [f"token_id:{token}" for token in engine.tokenizer.encode("aéaé")]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in engine.tokenizer.encode(ECHO)]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert all(other["token"].startswith("token_id:") for other in entry["top_logprobs"])


def test_chat_stream_gives_each_token_with_its_text(client: TestClient) -> None:
    whole = ok(client, CHAT, messages=MESSAGES, logprobs=True)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in streamed(client, CHAT, messages=MESSAGES, logprobs=True)]
    reported: list[Any] = []
    text = ""
    for chunk in chunks:
        content = chunk["delta"].get("content") or ""
        entries = (chunk["logprobs"] or {"content": []})["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == content
        reported += entries
        text += content
    assert reported == whole["logprobs"]["content"] and text == ECHO
    assert whole["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize(("stop", "keep"), [("stop", False), ("stop", True), ("stop_regex", False)])
def test_what_a_stop_cuts_has_no_log_probability(client: TestClient, stop: str, keep: bool) -> None:
    body = {"prompt": "one two three", stop: "two", "no_stop_trim": keep, "logprobs": 0}
    text = "one two" if keep else "one "
    choice = ok(client, COMPLETION, **body)["choices"][0]
    assert choice["text"] == text and "".join(choice["logprobs"]["tokens"]) == text
    chunks = [chunk["choices"][0] for chunk in streamed(client, COMPLETION, **body)]
    assert "".join(chunk["text"] for chunk in chunks) == text
    tokens = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["tokens"]]
    assert "".join(tokens) == text


def test_a_shown_stop_token_counts(client: TestClient) -> None:
    body = {"prompt": "abc", "logprobs": 0, "no_stop_trim": True, "skip_special_tokens": False}
    choice = ok(client, COMPLETION, **body)["choices"][0]
    assert choice["text"] == "abc<eos>" and choice["logprobs"]["tokens"] == ["a", "b", "c", "<eos>"]
    assert ok(client, COMPLETION, prompt="abc", logprobs=0)["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]


def test_completions(client: TestClient, engine: FakeEngine) -> None:
    data = ok(client, COMPLETION, prompt="aé", logprobs=2)["choices"][0]["logprobs"]
    ids = engine.tokenizer.encode("aé")
    assert data["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"] and data["text_offset"] == [0, 1, 1]
    assert data["token_logprobs"] == [value(token) for token in ids]
    # The best two, which do not hold the token itself, and it.
    assert [len(best) for best in data["top_logprobs"]] == [3, 3, 3]
    assert data["top_logprobs"][0]["a"] == value(ids[0])
    zero = ok(client, COMPLETION, prompt="aé", logprobs=0)["choices"][0]["logprobs"]
    assert zero["top_logprobs"][0] == {"a": value(ids[0])}
    assert ok(client, COMPLETION, prompt="aé")["choices"][0]["logprobs"] is None


def test_echo_has_those_of_the_prompt(client: TestClient, engine: FakeEngine) -> None:
    whole = ok(client, COMPLETION, prompt="aéb", logprobs=1, echo=True, n=2)["choices"]
    ids = engine.tokenizer.encode("aéb")
    for choice in whole:
        data = choice["logprobs"]
        assert choice["text"] == "aébaéb" and len(data["tokens"]) == 2 * len(ids)
        assert data["token_logprobs"] == [None, *map(value, ids[1:]), *map(value, ids)]
        assert data["top_logprobs"][0] is None and data["text_offset"] == [0, 1, 1, 2, 3, 4, 4, 5]
    joined: dict[str, list[Any]] = {}
    for chunk in streamed(client, COMPLETION, prompt="aéb", logprobs=1, echo=True):
        for name, column in (chunk["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(column)
    assert joined == whole[0]["logprobs"]
    silent = ok(client, COMPLETION, prompt="aéb", logprobs=1)["choices"][0]["logprobs"]
    assert silent["text_offset"] == [0, 1, 1, 2]


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_shows_the_special_tokens_of_a_prompt(client: TestClient, engine: FakeEngine, as_ids: bool) -> None:
    text = "a<eos>é<eos>"
    ids = engine.tokenizer.encode(text)
    body = {"prompt": ids if as_ids else text, "echo": True, "max_tokens": 1, "logprobs": 0}
    (choice,) = ok(client, COMPLETION, **body)["choices"]
    assert choice["text"].startswith(text) and choice["logprobs"]["text_offset"][: len(ids)] == [0, 1, 6, 6, 7]
    assert "".join(choice["logprobs"]["tokens"][:2]) == "a<eos>"


def test_an_echo_leaves_out_what_the_tokenizer_adds(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = engine.tokenizer.backend
    x, a = (backend.token_to_id(letter) for letter in "xa")
    monkeypatch.setattr(engine.tokenizer, "bos_id", x)
    body, before = {"echo": True, "max_tokens": 1, "logprobs": 0}, backend.post_processor
    backend.post_processor = TemplateProcessing(single="x $A", special_tokens=[("x", x)])
    try:
        (choice,) = ok(client, COMPLETION, **body, prompt="xab")["choices"]
        assert choice["text"] == "xabx"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
        for more in ({"prompt": [x, a]}, {"prompt": "xa", "add_special_tokens": False}):
            (choice,) = ok(client, COMPLETION, **body, **more)["choices"]
            assert choice["text"] == "xax"
    finally:
        backend.post_processor = before


def test_generate(client: TestClient, engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("abc")
    asked = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [7, 300 - 100]}
    info = ok(client, "/generate", text="abc", logprob_start_len=0, **asked)["meta_info"]
    assert info["input_token_logprobs"] == [[None, ids[0], None], *([value(t), t, None] for t in ids[1:])]
    assert info["output_token_logprobs"] == [[value(t), t, None] for t in [*ids, EOS]]
    assert info["output_token_logprobs_length"] == 4
    assert info["input_top_logprobs"][0] is None and len(info["input_top_logprobs"]) == 3
    assert info["output_top_logprobs"][0] == [[-0.5, ids[0] + 1, None], [-1.0, ids[0] + 2, None]]
    assert info["output_token_ids_logprobs"][0] == [[-7.0, 7, None], [-200.0, 200, None]]
    assert info["input_token_ids_logprobs"][0] is None and len(info["output_token_ids_logprobs"]) == 4
    later = ok(client, "/generate", text="abc", logprob_start_len=2, return_logprob=True)["meta_info"]
    assert later["input_token_logprobs"] == [[value(ids[2]), ids[2], None]] and "input_top_logprobs" not in later
    text = ok(client, "/generate", text="abc", return_logprob=True, return_text_in_logprobs=True)["meta_info"]
    assert text["output_token_logprobs"][-1] == [value(EOS), EOS, "<eos>"] and text["input_token_logprobs"] == []
    assert "output_token_logprobs" not in ok(client, "/generate", text="abc", logprob_start_len=0)["meta_info"]


def test_generate_asks_for_each_prompt(client: TestClient, engine: FakeEngine) -> None:
    body = {
        "text": ["abc", "de", "f"],
        "return_logprob": [True, False, True],
        "logprob_start_len": [1, -1, -1],
        "top_logprobs_num": [0, 0, 1],
        "token_ids_logprob": [[1, 2], None, []],
    }
    first, second, third = (answer["meta_info"] for answer in ok(client, "/generate", **body))
    assert len(first["input_token_logprobs"]) == 2 and "output_token_ids_logprobs" in first
    assert "output_token_logprobs" not in second and len(third["output_top_logprobs"]) == 2
    assert [request.logprobs is None for request in engine.requests] == [False, True, False]


@pytest.mark.parametrize("letters", ["A", "xyz", "abcdefghijklmnopqrstuvwxyz0123456789"], ids=len)
def test_log_probabilities_of_tokens_that_are_asked_for(client: TestClient, letters: str) -> None:
    ids = ok(client, "/tokenize", prompt=letters, add_special_tokens=False)["tokens"]
    asked = {letter: -float(token) for letter, token in zip(letters, ids, strict=True)}
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    chat = ok(client, "/v1/chat/completions", **body, logprob_token_ids=ids)["choices"][0]
    assert len(chat["logprobs"]["content"]) == 3
    for one in chat["logprobs"]["content"]:
        own = {one["token"]: one["logprob"]}
        listed = {top["token"]: top["logprob"] for top in one["top_logprobs"]}
        assert listed == asked | (own if one["token"] not in asked else {})
    text = {"prompt": "AB", "logprobs": 1, "max_tokens": 2, "logprob_token_ids": ids}
    found = ok(client, "/v1/completions", **text)["choices"][0]["logprobs"]
    for top, token, own in zip(found["top_logprobs"], "AB", found["token_logprobs"], strict=True):
        assert top == asked | {token: own}
    for wrong in ({"logprobs": None}, {"logprob_token_ids": [10**6]}, {"logprob_token_ids": []}):
        response = client.post("/v1/completions", json=text | wrong)
        assert response.status_code == 400 and "logprob_token_ids" in response.json()["param"], response.text


@pytest.mark.parametrize(("text", "count"), [("abc", 0), ("a\u00e9b", 2), ("one two", 5), ("x y", 20)])
def test_prompt_logprobs_are_those_of_generate(client: TestClient, text: str, count: int) -> None:
    one = ok(client, COMPLETION, prompt=text, prompt_logprobs=count, logprobs=1)["choices"][0]
    assert one["logprobs"] == ok(client, COMPLETION, prompt=text, logprobs=1)["choices"][0]["logprobs"]
    alone = ok(client, COMPLETION, prompt=text, prompt_logprobs=count, n=2)["choices"]
    assert all(choice["prompt_logprobs"] == one["prompt_logprobs"] and choice["logprobs"] is None for choice in alone)
    chat = {"messages": [{"role": "user", "content": text}], "return_token_ids": True}
    data = ok(client, CHAT, **chat, prompt_logprobs=count)
    assert data["choices"][0]["logprobs"] is None
    for ids, found in (
        (ok(client, "/tokenize", prompt=text)["tokens"], one["prompt_logprobs"]),
        (data["prompt_token_ids"], data["prompt_logprobs"]),
    ):
        asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": count}
        asked["return_text_in_logprobs"] = True
        info = ok(client, "/generate", input_ids=ids, **asked)["meta_info"]
        best = info.get("input_top_logprobs") or [[] for _ in ids]
        assert found[0] is None and len(found) == len(ids)
        for entry, (logprob, token, shown), top in zip(
            found[1:], info["input_token_logprobs"][1:], best[1:], strict=True
        ):
            expected = {str(token): {"logprob": logprob, "decoded_token": shown, "rank": None}}
            for rank, (logprob, token, shown) in enumerate(top, 1):
                expected[str(token)] = {"logprob": logprob, "decoded_token": shown, "rank": rank}
            assert entry == expected


@pytest.mark.parametrize("wrong", [{"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"stream": True}], ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_prompt_logprobs_that_are_refused(client: TestClient, path: str, wrong: dict[str, Any]) -> None:
    prompt: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    response = client.post(path, json={**prompt, "prompt_logprobs": 1} | wrong)
    assert response.status_code == 400 and response.json()["param"] == "prompt_logprobs", response.text
