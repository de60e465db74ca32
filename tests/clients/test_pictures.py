"""A picture by the clients of others: the engine gets it once for each request, and it is the same picture."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from image_models import encoded, picture
from scripted import serving
from seeing import Seeing

SHOWN = picture(40, 24)
BYTES = encoded(SHOWN)
DATA = base64.b64encode(BYTES).decode()
URL = f"data:image/png;base64,{DATA}"
PARTS = {
    "chat": {"type": "image_url", "image_url": {"url": URL}},
    "block": {"type": "image", "base64": DATA, "mime_type": "image/png"},  # LangChain's own, of every model
}


@pytest.fixture
def seeing() -> Iterator[tuple[Seeing, str]]:
    engine = Seeing()
    with serving(engine) as url:
        yield engine, url


def check(engine: Seeing, requests: int) -> None:
    assert len(engine.requests) == requests
    for request in engine.requests:
        (image,) = request.images
        assert np.array_equal(image.pixels, np.asarray(SHOWN))


def test_openai(seeing: Any) -> None:
    openai, (engine, url) = importlib.import_module("openai"), seeing
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    content = [PARTS["chat"], {"type": "text", "text": "a"}]
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], max_tokens=4)
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "a"}]
    client.responses.create(model="m", input=[{"role": "user", "content": content}], max_output_tokens=16)
    check(engine, 2)


def test_anthropic(seeing: Any) -> None:
    anthropic, (engine, url) = importlib.import_module("anthropic"), seeing
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    client.messages.create(model="m", max_tokens=4, messages=[{"role": "user", "content": [image]}])
    check(engine, 1)


def test_ollama(seeing: Any) -> None:
    pytest.importorskip("ollama._client", reason="draftwing[clients] is not installed")
    ollama, (engine, url) = importlib.import_module("ollama"), seeing
    client, few = ollama.Client(host=url), {"num_predict": 4}
    for image in (BYTES, DATA):
        client.chat(model="m", messages=[{"role": "user", "content": "a", "images": [image]}], options=few)
    client.generate(model="m", prompt="a", images=[BYTES], options=few)
    check(engine, 3)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", ["chat", "responses", "ollama"])
def test_langchain(seeing: Any, kind: str, name: str) -> None:
    engine, url = seeing
    if kind == "ollama":
        found = pytest.importorskip("langchain_ollama", reason="draftwing[clients] is not installed")
        chat = found.ChatOllama(model="m", base_url=url, num_predict=4)
    else:
        found = pytest.importorskip("langchain_openai", reason="draftwing[clients] is not installed")
        responses = kind == "responses"
        chat = found.ChatOpenAI(
            model="m", base_url=f"{url}/v1", api_key="none", max_retries=0, max_tokens=16, use_responses_api=responses
        )
    messages = [{"role": "user", "content": [PARTS[name], {"type": "text", "text": "a"}]}]
    chat.invoke(messages)
    assert [*chat.stream(messages)]
    check(engine, 2)
