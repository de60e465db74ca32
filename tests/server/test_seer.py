"""A small trained model sees: a whole server says of pictures what they show, with drafts and without. Its files are
made by tools/train_small_seer.py (docs/dev/training.md)."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from image_models import encoded
from scripted import launched
from scripts import script

ROOT = Path(__file__).parents[2]
SEER = ROOT / "tests" / "images" / "files" / "seer"
COUNT = 8

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = f"--model {SEER} --speculative-algorithm NGRAM --speculative-fixed-shape --max-total-tokens 8192"
    with launched(command) as (_, url):
        yield url


def sent(message: dict[str, Any]) -> dict[str, Any]:
    """As a client writes a message of the tool's."""
    parts = message["content"]
    if isinstance(parts, str):
        return message
    data = base64.b64encode(encoded(parts[0]["image"])).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {**message, "content": [shown, *parts[1:]]}


def test_it_says_what_pictures_show(url: str) -> None:
    """Of the pictures that it is shown, and not of those for which another client asked the same."""
    tool, draw = script(ROOT / "tools" / "train_small_seer.py"), random.Random("asked")
    right, confused, drafted, texts = 0, 0, 0, set[str]()
    with httpx.Client(base_url=url, timeout=60) as client:

        def answer(messages: list[Any], **more: Any) -> tuple[str, int]:
            body = {"messages": [*map(sent, messages)], "temperature": 0, "max_tokens": 24, **more}
            found = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            usage = found["usage"].get("completion_tokens_details") or {}
            return found["choices"][0]["message"]["content"], usage.get("accepted_prediction_tokens", 0)

        for _ in range(COUNT):
            questions, scenes = tool.asked(draw)
            own = tool.talk(questions, scenes, draw).messages
            other = tool.talk(questions, [scene and scene.another(draw) for scene in scenes], draw).messages
            for messages in (own, other):
                plain, _ = answer(messages[:-1], speculative="off")
                text, accepted = answer(messages[:-1])
                assert text == plain
                right += text == messages[-1]["content"]
                confused += messages is other and scenes[0] is not None and text == own[-1]["content"]
                drafted += accepted
                texts.add(text)
    assert right >= 0.8 * 2 * COUNT and confused == 0
    assert len(texts) > COUNT // 2 and drafted > 0
