"""The server that the programs meet: draftwing's own application around a scripted engine or a model, and a record of
what arrived."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path += [str(TESTS), str(TESTS / "server")]

from fake_engine import FakeEngine, local  # noqa: E402
from scripted import TEMPLATE, ScriptedEngine, listening  # noqa: E402

from draftwing.config.options import Options  # noqa: E402
from draftwing.images.processing import PatchProcessor  # noqa: E402
from draftwing.requests.request import GenerationRequest  # noqa: E402
from draftwing.server.app import create_app  # noqa: E402
from draftwing.server.run import opened  # noqa: E402

KEY = "local-key"
LONG = "long story"  # words of a prompt whose answer is to be cancelled
STORY = "Once upon a time there was a server. " * 1500
CONTEXT = 1_000_000  # byte tokens: the prompt of an agent has 100,000 and more
SLOW, QUICK = 0.01, 0.0005  # seconds of a step of three bytes
SIDES = 64, 48  # of the picture
IMAGE = "<|image_pad|>"
PARTS = (  # of a message
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{% if p.type == 'image' %}"
    f"{IMAGE}{{% else %}}{{{{ p.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
)


class Player(ScriptedEngine):
    """Plays the model of a tool loop. Its first two answers, `replies`, each make the program read a file; the files
    hold `codes`, which the last one tells in place of {answer}. So the prompt itself says which turn it is."""

    def __init__(self, replies: list[str], last: str, with_tools: bool, **more: Any) -> None:
        super().__init__(tools="hermes", api_key=KEY, **more)
        self.info = dataclasses.replace(self.info, context_length=CONTEXT, max_total_tokens=2 * CONTEXT)
        first, second = random.sample(range(1000, 10000), 2)
        self.codes = [f"code {first}", f"code {second}"]
        self.answer = f"The first file has {self.codes[0]}, the second has {self.codes[1]}."
        self.replies, self.last, self.with_tools = replies, last, with_tools
        self.turns: set[int] = set()  # that were played

    def submit(self, request: GenerationRequest) -> None:
        self.script = self.reply(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        super().submit(request)

    def reply(self, prompt: str) -> str:
        """What the model says to a prompt. Agents ask for titles, too, and offer no tools then."""
        self.pause = SLOW if LONG in prompt else QUICK
        if LONG in prompt:
            return STORY
        if self.with_tools and "<tools>" not in prompt:
            return "Two files"
        turn = sum(code in prompt for code in self.codes)
        self.turns.add(turn)
        return self.replies[turn] if turn < 2 else self.last.replace("{answer}", self.answer)

    def faults(self) -> list[str]:
        """What is wrong with what arrived."""
        return [] if self.turns == {0, 1, 2} else [f"turns of the loop: {sorted(self.turns)}"]

    def streaming(self) -> bool:
        """Whether a part of a long answer has been given."""
        return any(len(done) > 60 for _, done, _ in list(self.running.values()))


class Viewer(Player):
    """Plays a model that is shown `PICTURE`. Where a prompt has none, it makes the program show it, if `replies` say
    how."""

    def __init__(self) -> None:
        super().__init__([], "{answer}", False, template=TEMPLATE.replace("{{ m.content }}", PARTS), special=(IMAGE,))
        token = self.tokenizer.backend.token_to_id(IMAGE)
        processor = PatchProcessor(token, IMAGE, IMAGE, 8, 8 * 8 * 4, SIDES[0] * SIDES[1])
        self.info = dataclasses.replace(self.info, images=processor)
        self.answer = f"The picture shows {self.codes[0]}."

    def reply(self, prompt: str) -> str:
        self.pause = QUICK
        if IMAGE in prompt or not self.replies:
            return self.answer
        return self.replies[0] if "<tools>" in prompt else "A picture"

    def faults(self) -> list[str]:
        seen = {image.digest: np.asarray(image.pixels) for request in self.requests for image in request.images}
        if len(seen) != 1:
            return [f"pictures that the model was shown: {len(seen)}"]
        (pixels,) = seen.values()
        wanted = np.asarray(Image.open(io.BytesIO(PICTURE)))
        return [] if np.array_equal(pixels, wanted) else [f"it is another picture, of {pixels.shape}"]


def drawn() -> bytes:
    """A PNG file with colours that run."""
    across = Image.linear_gradient("L").resize(SIDES)
    out = io.BytesIO()
    Image.merge("RGB", (across, across.transpose(Image.Transpose.FLIP_TOP_BOTTOM), across)).save(out, "PNG")
    return out.getvalue()


PICTURE = drawn()


@dataclasses.dataclass
class Exchange:
    """One request; the texts are kept where it was refused."""

    method: str
    path: str
    status: int = 0
    stream: bool = False
    ignored: str = ""
    done: bool = False
    newest: float = 0.0  # when a part of the answer was sent, by the monotonic clock
    body: bytes = b""
    answer: bytes = b""

    @property
    def error(self) -> str:
        """The message of an answer that refuses."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return json.loads(self.answer)["error"]["message"]
        return self.answer.decode(errors="replace")

    def __str__(self) -> str:
        line = f"{self.method} {self.path}: {self.status}{', a stream' if self.stream else ''}"
        return line + (f"\n{self.body.decode()}\n{self.answer.decode()}" if self.status >= 400 else "")


class Recorder:
    """Middleware that keeps an `Exchange` for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.seen: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        one = Exchange(scope["method"], scope["path"])
        self.seen.append(one)

        async def heard() -> Message:
            message = await receive()
            one.body += message.get("body", b"")
            return message

        async def said(message: Message) -> None:
            one.newest = time.monotonic()
            if message["type"] == "http.response.start":
                headers = {name.lower(): value.decode() for name, value in message["headers"]}
                one.status, one.ignored = message["status"], headers.get(b"draftwing-ignored", "")
                one.stream = headers.get(b"content-type", "").startswith(("text/event-stream", "application/x-ndjson"))
            elif one.status >= 400:
                one.answer += message.get("body", b"")
            elif not message.get("more_body"):
                one.done = True
            await send(message)

        await self.app(scope, heard, said)


@contextlib.contextmanager
def scripted(engine: FakeEngine) -> Iterator[tuple[str, Recorder]]:
    """A server around an engine in this process."""
    recorder = Recorder(create_app(local(engine), engine.tokenizer))
    with listening(recorder) as url:
        yield url, recorder


@contextlib.contextmanager
def real(model: str) -> Iterator[tuple[str, Recorder]]:
    """A server of a model. Its template knows tools, which the default model's own does not."""
    options = Options(
        model=model, chat_template="chatml_tools", tool_call_parser="hermes", api_key=KEY, log_level="error"
    )
    with opened(options.resolve()) as (engine, tokenizer):
        recorder = Recorder(create_app(engine, tokenizer))
        with listening(recorder) as url:
            yield url, recorder


def call(name: str, arguments: dict[str, object]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
