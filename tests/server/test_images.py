"""Pictures in requests of each dialect: what the model sees, what is refused and in which words."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote

import numpy as np
import pytest
from fake_engine import FakeEngine
from image_models import encoded, picture
from picture_kinds import PICTURES, SHOWN, seen_by_transformers
from PIL import Image
from scripted import client_of, keys_file, openai_client, serving
from seeing import PAD, Seeing
from starlette.testclient import TestClient

from draftwing.images import reader
from draftwing.images.fetch import Fetcher
from draftwing.images.processing import MAX_IMAGES, MAX_PIXELS
from draftwing.machine import Processors
from draftwing.requests.images import RequestImage
from draftwing.server import worker_pools

ENGINE = Seeing
DATA = base64.b64encode(encoded(SHOWN)).decode()
URL = f"data:image/png;base64,{DATA}"
CHAT = "/v1/chat/completions"
OPENAI = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USER: dict[str, Any] = {"role": "user"}
A = {"type": "text", "text": "a"}

BODIES: dict[str, tuple[str, dict[str, Any], str]] = {  # path, body, and the text with @ for an image
    "chat": (CHAT, {"messages": [USER | {"content": [A, OPENAI, A]}]}, "user:a@a;"),
    "chat, in a tool's result": (
        CHAT,
        {
            "messages": [
                USER | {"content": "b"},
                {"role": "assistant", "content": "c", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": [OPENAI]},
            ]
        },
        "user:b;assistant:c;tool:@;",
    ),
    "chat, two turns": (
        CHAT,
        {
            "messages": [
                USER | {"content": [OPENAI]},
                {"role": "assistant", "content": "x"},
                USER | {"content": [OPENAI, A]},
            ]
        },
        "user:@;assistant:x;user:@a;",
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                USER | {"content": [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "a"}]}
            ]
        },
        "user:@a;",
    ),
    "responses, in a tool's result": (
        "/v1/responses",
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": URL}],
                },
            ]
        },
        "assistant:;tool:@;",
    ),
    "messages": ("/v1/messages", {"max_tokens": 4, "messages": [USER | {"content": [ANTHROPIC, A]}]}, "user:@a;"),
    "messages, in a tool's result": (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
                USER | {"content": [{"type": "tool_result", "tool_use_id": "t", "content": [A, ANTHROPIC]}]},
            ],
        },
        "assistant:;tool:a@;",
    ),
    "ollama": ("/api/chat", {"model": "m", "messages": [USER | {"content": "a", "images": [DATA]}]}, "user:@a;"),
    "ollama, a prompt": ("/api/generate", {"model": "m", "prompt": "a", "images": [DATA]}, "user:@a;"),
    "generate": ("/generate", {"text": "a<|image_pad|>b", "image_data": URL}, "a@b"),
    "generate, a picture of each prompt": (
        "/generate",
        {"text": ["a<|image_pad|>b"] * 2, "image_data": [DATA, URL], "sampling_params": {"max_new_tokens": 2}},
        "a@b",
    ),
    "generate, one picture of all prompts": (
        "/generate",
        {"text": ["a<|image_pad|>b"] * 2, "image_data": DATA, "sampling_params": {"max_new_tokens": 2}},
        "a@b",
    ),
    "generate, a batch": (
        "/generate",
        {"text": ["a<|image_pad|>b", "c"], "image_data": [[DATA], None], "sampling_params": {"max_new_tokens": 2}},
        "a@b",
    ),
}


def shown(engine: FakeEngine) -> tuple[str, tuple[RequestImage, ...]]:
    """The first prompt with @ for an image, and its images."""
    request = engine.requests[0]
    text = bytearray()
    at = {image.start: image for image in request.images}
    position = 0
    alphabet = engine.tokenizer
    while position < len(request.prompt_ids):
        image = at.get(position)
        if image is None:
            text += alphabet.decode([request.prompt_ids[position]]).encode()
            position += 1
            continue
        assert request.prompt_ids[position : image.end] == [PAD] * image.tokens
        text += b"@"
        position = image.end
    return text.decode(), request.images


@pytest.mark.parametrize("name", BODIES)
def test_each_dialect(client: TestClient, engine: FakeEngine, name: str) -> None:
    path, body, expected = BODIES[name]
    response = client.post(path, json={"model": "m", "stream": False} | body if path != "/generate" else body)
    assert response.status_code == 200, response.text
    text, images = shown(engine)
    assert text == expected
    for image in images:
        assert image.grid == (3, 5) and np.array_equal(image.pixels, np.asarray(SHOWN))
    assert not engine.requests[0].learnable


def test_client_libraries() -> None:
    """OpenAI's and Anthropic's own, over a socket, streaming and not."""
    engine = Seeing()
    parts: Any = {"role": "user", "content": [A, OPENAI]}
    with serving(engine) as url:
        api = openai_client(url)
        chat = api.chat.completions.create(model="m", messages=[parts], max_tokens=4)
        stream = api.chat.completions.create(model="m", messages=[parts], max_tokens=4, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == chat.choices[0].message.content
        given: Any = [USER | {"content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]}]
        response = api.responses.create(model="m", input=given, max_output_tokens=16)
        more = api.responses.create(model="m", input="a", previous_response_id=response.id, max_output_tokens=16)
        assert more.usage is not None and response.usage is not None
        assert more.usage.input_tokens > response.usage.input_tokens > 15
        import anthropic  # it takes a second, which few processes need

        claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with claude.messages.stream(
            model="m",
            max_tokens=4,
            messages=[USER | {"content": [A, ANTHROPIC]}],  # type: ignore[list-item]
        ) as events:
            usage = events.get_final_message().usage
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 15
    assert [len(request.images) for request in engine.requests] == [1] * 5
    assert len({request.images[0].digest for request in engine.requests}) == 1


def test_usage_counts_tokens_of_images(client: TestClient) -> None:
    body = {"messages": [USER | {"content": [A, OPENAI]}], "max_tokens": 2}
    plain = {"messages": [USER | {"content": [A]}], "max_tokens": 2}
    with_image, without = (client.post(CHAT, json=one).json()["usage"]["prompt_tokens"] for one in (body, plain))
    assert with_image == without + 15
    counted = client.post(
        "/v1/messages/count_tokens", json={"messages": [USER | {"content": [A, ANTHROPIC]}], "model": "m"}
    )
    assert counted.json()["input_tokens"] == with_image


def refusal(client: TestClient, url: Any) -> str:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    response = client.post(CHAT, json={"messages": [USER | {"content": content}]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "messages.0.content.0"
    return str(error["message"])


def data_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def bomb() -> bytes:
    """A small file of a picture with more pixels than may be decoded."""
    side = int(MAX_PIXELS**0.5) + 8
    return encoded(Image.new("1", (side, side)), "PNG")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", "addresses are not followed"),
        ("file:///etc/passwd", "addresses are not followed"),
        ("", "addresses are not followed"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,???", "expected base64"),
        (data_of(b"no picture"), "expected a PNG, JPEG, WebP or GIF"),
        (data_of(encoded(SHOWN)[:300]), "cannot be decoded"),
        (data_of(encoded(SHOWN, "TIFF")), "expected a PNG, JPEG, WebP or GIF"),
        (data_of(encoded(picture(402, 2))), "differ at most 200 times"),
    ],
)
def test_what_is_no_picture_is_refused(client: TestClient, url: str, words: str) -> None:
    message = refusal(client, url)
    assert words in message and "\n" not in message


@pytest.mark.parametrize(
    "head",
    ["data:image/png;base64,", "DATA:IMAGE/PNG;BASE64,", "data:;base64,", "data:image/png;charset=utf-8;base64,",
     "data:image/png; base64,", "data:image/jpeg;base64, ", " \n data:image/png;base64,\n"],
)  # fmt: skip
def test_how_data_may_be_written(client: TestClient, engine: FakeEngine, head: str) -> None:
    """As browsers read it; a picture is told by its bytes."""
    pictures = [DATA, base64.urlsafe_b64encode(encoded(SHOWN)).decode(), DATA.rstrip("="), f"{DATA[:40]}\n{DATA[40:]} "]
    pictures += [quote(DATA, safe=""), "".join(f"%{ord(char):02x}" for char in DATA)]
    for data in pictures:
        content = [{"type": "image_url", "image_url": {"url": head + data}}]
        response = client.post(CHAT, json={"messages": [USER | {"content": content}], "max_tokens": 1})
        assert response.status_code == 200, response.text
    assert len({request.images[0].digest for request in engine.requests}) == 1 and len(engine.requests) == len(pictures)


def test_pictures_of_addresses(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(fetcher: Fetcher, url: SplitResult, where: str, until: float) -> tuple[bytes, str]:
        asked.append(url.geturl())
        return encoded(SHOWN), ""

    monkeypatch.setattr(Fetcher, "_asked", answer)
    seeing = Seeing()
    seeing.info = dataclasses.replace(
        seeing.info, options=dataclasses.replace(seeing.info.options, allow_image_urls=("a.example",))
    )
    seeing.options = seeing.info.options
    url = "https://a.example/b.png"
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": url}}]}]}),
        ("/v1/messages", {"messages": [USER | {"content": [ANTHROPIC | {"source": {"type": "url", "url": url}}]}],
                          "max_tokens": 2, "model": "m"}),
        ("/v1/responses", {"input": [USER | {"content": [{"type": "input_image", "image_url": url}]}]}),
        ("/generate", {"text": "<|image_pad|>", "image_data": url}),
    ]  # fmt: skip
    with client_of(seeing) as client:
        for path, body in bodies:
            response = client.post(path, json=body)
            assert response.status_code == 200, (path, response.text)
        content = [{"type": "image_url", "image_url": {"url": f" {url}\n"}}]
        assert client.post(CHAT, json={"messages": [USER | {"content": content}]}).status_code == 200
    assert asked == [url] * (len(bodies) + 1)
    assert len({request.images[0].digest for request in seeing.requests}) == 1


@pytest.mark.parametrize("one", [True, False])
def test_a_picture_of_many_prompts_is_fetched_and_read_once(one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a small request would have the same pixels made, and kept, a thousand times."""
    asked: list[str] = []
    other = encoded(picture(40, 24, 1))

    def answer(fetcher: Fetcher, url: SplitResult, where: str, until: float) -> tuple[bytes, str]:
        asked.append(url.path)
        return (other if url.path == "/other" else encoded(SHOWN)), ""

    monkeypatch.setattr(Fetcher, "_asked", answer)
    monkeypatch.setattr(reader, "read", lambda *args, read=reader.read: asked.append("read") or read(*args))
    seeing = Seeing()
    seeing.options = dataclasses.replace(seeing.info.options, allow_image_urls=("a.example",))
    seeing.info = dataclasses.replace(seeing.info, options=seeing.options)
    urls = ["https://a.example/a", "https://a.example/other", "https://a.example/a"]
    body = {"text": ["a<|image_pad|>b"] * 3, "image_data": urls[0] if one else urls}
    with client_of(seeing) as client:
        response = client.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 2}})
    assert response.status_code == 200, response.text
    assert sorted(asked) == (["/a", "read"] if one else ["/a", "/other", "read", "read"])
    digests = [request.images[0].digest for request in seeing.requests]
    assert len(digests) == 3 and digests[0] == digests[2] and (digests[0] == digests[1]) == one


@pytest.mark.slow
def test_pictures_rest_while_others_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that who sends them as fast as they are answered leaves the server time for others' streams."""
    monkeypatch.setattr(worker_pools, "PICTURE_REST", 1.5)
    monkeypatch.setattr(worker_pools, "processors", lambda: Processors(4, 4))
    seeing = Seeing()
    keys = keys_file(tmp_path, '[a]\nkey = "a"\n[b]\nkey = "b"\n')
    seeing.options = dataclasses.replace(seeing.info.options, api_key_file=keys)
    seeing.info = dataclasses.replace(seeing.info, options=seeing.options)
    body = {"messages": [USER | {"content": [OPENAI]}], "max_tokens": 1}

    def pictures(client: TestClient) -> float:
        begun = time.monotonic()
        for _ in range(3):
            assert client.post(CHAT, json=body, headers={"x-api-key": "b"}).status_code == 200
        return time.monotonic() - begun

    long = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
    with client_of(seeing) as client:
        alone = pictures(client)
        seeing.pause = 0.02
        with ThreadPoolExecutor(1) as other:
            answer = other.submit(client.post, "/generate", json=long, headers={"x-api-key": "a"})
            while not seeing.running:
                time.sleep(0.01)
            beside = pictures(client)
            assert not answer.done()
            seeing.pause = 0.0005
    assert alone < 3 <= beside


def test_a_bomb_is_refused_by_its_header(client: TestClient) -> None:
    data = bomb()
    assert len(data) < 1 << 20
    assert f"at most {MAX_PIXELS}" in refusal(client, data_of(data))


def test_more_images_than_a_prompt_may_have(client: TestClient, engine: FakeEngine) -> None:
    """Of a request with many prompts each may have so many."""
    body = {"messages": [USER | {"content": [OPENAI] * (MAX_IMAGES + 1)}]}
    response = client.post(CHAT, json=body)
    assert response.status_code == 400 and f"at most {MAX_IMAGES} images" in response.text
    many, one = MAX_IMAGES + 1, MAX_IMAGES // 2 + 1
    for prompts, of_each in ((many, 1), (2, one), (1, MAX_IMAGES)):
        engine.requests.clear()
        for shown in ([[URL] * of_each] * prompts, URL) if of_each == 1 else ([[URL] * of_each] * prompts,):
            body = {"text": ["<|image_pad|>" * of_each] * prompts, "image_data": shown}
            response = client.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 1}})
            assert response.status_code == 200, response.text
            assert [len(request.images) for request in engine.requests] == [of_each] * prompts
            engine.requests.clear()
    body = {"text": ["<|image_pad|>" * many, "a"], "image_data": [[URL] * many, []]}
    response = client.post("/generate", json=body)
    assert response.status_code == 400 and f"at most {MAX_IMAGES} images" in response.text


def test_text_that_looks_like_a_place_for_an_image(client: TestClient, engine: FakeEngine) -> None:
    text = {"type": "text", "text": "<|image_pad|>"}
    response = client.post(CHAT, json={"messages": [USER | {"content": [text, OPENAI]}]})
    assert response.status_code == 400 and "no text may hold it" in response.text
    assert client.post(CHAT, json={"messages": [USER | {"content": [text]}], "max_tokens": 1}).status_code == 200
    assert engine.requests[0].images == ()


def test_images_of_the_assistant_are_refused(client: TestClient) -> None:
    messages = [USER | {"content": "a"}, {"role": "assistant", "content": [OPENAI]}, USER | {"content": "b"}]
    response = client.post(CHAT, json={"messages": messages})
    assert response.status_code == 400 and "images belong into messages of users and tools" in response.text


def test_a_model_that_reads_none(plain: tuple[FakeEngine, TestClient]) -> None:
    message = refusal(plain[1], URL)
    assert message == "messages.0.content.0: this model reads no images; send text alone, or serve one that does"


def test_clients_are_told_whether_the_model_reads_images(
    client: TestClient, plain: tuple[FakeEngine, TestClient]
) -> None:
    """Where Ollama's, llama.cpp's and SGLang's clients look before they let a user attach a picture."""
    for asked, reads in ((client, True), (plain[1], False)):
        assert ("vision" in asked.post("/api/show", json={"model": "m"}).json()["capabilities"]) == reads
        assert asked.get("/props").json()["modalities"]["vision"] is reads
        assert asked.get("/model_info").json()["has_image_understanding"] is reads


# -- pictures of every kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PICTURES)
def test_every_kind_of_picture_is_what_transformers_sees(client: TestClient, engine: FakeEngine, name: str) -> None:
    from transformers import Qwen2VLImageProcessorPil

    content = [{"type": "image_url", "image_url": {"url": data_of(PICTURES[name])}}]
    response = client.post(CHAT, json={"messages": [USER | {"content": content}], "max_tokens": 1})
    assert response.status_code == 200, response.text
    (image,) = engine.requests[0].images
    size = {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 48}
    how = {"size": size, "patch_size": 8, "merge_size": 1, "temporal_patch_size": 1, "do_normalize": False}
    theirs = Qwen2VLImageProcessorPil(**how, do_rescale=False)(
        images=seen_by_transformers(PICTURES[name]), return_tensors="np"
    )  # fmt: skip
    assert tuple(theirs["image_grid_thw"][0][1:]) == image.grid
    patches = theirs["pixel_values"].reshape(*image.grid, 3, 8, 8).transpose(0, 3, 1, 4, 2)
    assert np.array_equal(patches.reshape(image.pixels.shape), image.pixels)


def test_a_trace_tells_which_tokens_are_images(client: TestClient, engine: FakeEngine) -> None:
    content = [OPENAI, A, OPENAI]
    body = {"messages": [USER | {"content": content}], "max_tokens": 4, "stream": True, "speculative_trace": True}
    lines = client.post(CHAT, json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    steps = [step for one in events for choice in one["choices"] for step in choice.get("speculative_trace", ())]
    (request,) = engine.requests
    assert steps[0]["images"] == [image.tokens for image in request.images] and len(steps[0]["images"]) == 2
    assert len(steps) > 1 and not any("images" in step for step in steps[1:])
