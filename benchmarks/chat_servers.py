"""Servers side by side: start them, stream chat completions from them with one client, read what memory they take.

Any server of `/v1/chat/completions` will do. Memory is read from /proc, so that part is for Linux.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from draftwing.utils import STOP_SECONDS, free_port, terminate_process

HOST = "127.0.0.1"
START_SECONDS = 300.0
_LIBC = ctypes.CDLL(None)
_PDEATHSIG = 1  # of prctl(2)
MEMORY = ("Rss", "Pss", "Pss_Anon", "Pss_File")


class Answer(NamedTuple):
    """first, last, total: seconds from the request to the first text, to the last one and to the end."""

    first: float
    last: float
    total: float
    prompt_tokens: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Contender:
    """A server to be started: its command without host and port, what it needs in a request and in its environment.
    patience: seconds that a client waits for the next piece of an answer."""

    name: str
    command: tuple[str, ...]
    body: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    patience: float = START_SECONDS


class Server:
    """A running contender; a context manager that ends it. It ends when this process does, however that comes about."""

    def __init__(self, contender: Contender, log: Path, stop_seconds: float = STOP_SECONDS) -> None:
        """stop_seconds: that it may take to end in an orderly way."""
        self.contender, self.port, self.log = contender, free_port(HOST), log
        self.url, self._stop_seconds = f"http://{HOST}:{self.port}", stop_seconds
        words = [*contender.command, "--host", HOST, "--port", str(self.port)]
        self.started = time.perf_counter()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                words, env={**os.environ, **contender.environ}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        terminate_process(self.process, self._stop_seconds)
        self.kill()  # what it has started, should that still run

    def kill(self) -> None:
        """Ends all of its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def last_words(self, lines: int = 8) -> str:
        """Returns the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def first_answer(self, messages: Sequence[dict[str, str]]) -> float:
        """Seconds from the start of the process to one token of an answer, asked for until the server gives it.

        Raises RuntimeError when the server ends before, TimeoutError when it takes too long.
        """
        return self.ready(lambda: self.ask(messages, 1))

    def ready(self, attempt: Callable[[], object], limit: float = START_SECONDS) -> float:
        """Seconds from the start of the process until an attempt raised nothing. Raises as `first_answer`."""
        while time.perf_counter() < self.started + limit:
            try:
                attempt()
            except (OSError, http.client.HTTPException):
                if self.process.poll() is not None:
                    raise RuntimeError(f"{self.contender.name} did not start: see {self.log}") from None
                time.sleep(0.01)
            else:
                return time.perf_counter() - self.started
        raise TimeoutError(f"{self.contender.name} gave no answer within {limit:g} s: see {self.log}")

    def ask(self, messages: Sequence[dict[str, str]], tokens: int) -> Answer:
        """A greedy answer of exactly `tokens` tokens. Raises HTTPException for a refusal or half a stream."""
        return chat(self.url, messages, tokens, self.contender.body, self.contender.patience)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """What the server answers to JSON. Raises HTTPException for a refusal."""
        with self.answer(path, body) as response:
            return json.load(response)

    def answer(self, path: str, body: dict[str, Any]) -> AbstractContextManager[http.client.HTTPResponse]:
        """Returns the response to JSON, as `answer_of`."""
        return answer_of(self.url, path, body, self.contender.patience)

    def ask_all(self, prompts: Sequence[Sequence[dict[str, str]]], tokens: int) -> tuple[float, list[Answer]]:
        """All prompts at once; (seconds until the last has its answer, answers)."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            answers = list(pool.map(lambda prompt: self.ask(prompt, tokens), prompts))
            return time.perf_counter() - start, answers

    def memory(self) -> list[dict[str, Any]]:
        """Bytes in use, of the server's process and then of its children: see MEMORY, and proc_pid_smaps(5)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [memory_of(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in (self.process.pid, *children)]


def _end_with_parent() -> None:
    """In a process that is about to become a server: it gets SIGKILL when the thread that started it ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)


@contextmanager
def answer_of(
    url: str, path: str, body: dict[str, Any], patience: float = START_SECONDS
) -> Iterator[http.client.HTTPResponse]:
    """The response of a server to JSON. Raises HTTPException for a refusal, TimeoutError where nothing comes for
    `patience` seconds."""
    at = urlsplit(url)
    with closing(http.client.HTTPConnection(at.hostname or HOST, at.port, timeout=patience)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status}: {response.read().decode(errors='replace')}")
        yield response


def chat(
    url: str, messages: Sequence[dict[str, Any]], tokens: int, more: Mapping[str, Any] = MappingProxyType({}),
    patience: float = START_SECONDS,
) -> Answer:  # fmt: skip
    """Streams a greedy answer of exactly `tokens` tokens. more: in the request. Raises HTTPException for a refusal or
    half a stream."""
    body = {
        "model": "default", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    start, first, last, events = time.perf_counter(), 0.0, 0.0, []
    with answer_of(url, "/v1/chat/completions", body, patience) as response:
        for line in response:
            if line.startswith(b"data: {"):
                events.append(line)
                if text_of(line):
                    last = time.perf_counter() - start
                    first = first or last
        total = time.perf_counter() - start
    usage = json.loads(events[-1].removeprefix(b"data: ")).get("usage") if events else None
    if usage is None:
        raise http.client.HTTPException(f"{url} ended a stream before it was whole: {events[-1:]!r}"[:600])
    text = "".join(map(text_of, events))
    return Answer(first or total, last or total, total, usage["prompt_tokens"], usage["completion_tokens"], text)


def text_of(event: bytes) -> str:
    """The piece of text in a line of a stream, of an answer or of its reasoning."""
    choices = json.loads(event.removeprefix(b"data: ")).get("choices")
    delta = choices[0]["delta"] if choices else {}
    return delta.get("content") or delta.get("reasoning_content") or ""


def memory_of(smaps: str) -> dict[str, int]:
    """smaps: text of smaps_rollup; the fields of MEMORY in bytes."""
    lines = [line.split() for line in smaps.splitlines()]
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0][:-1] in MEMORY}


# What holds torch and its libraries to an instruction set, too: they choose by the CPU otherwise.
SET_BY = {
    "avx2": {
        "DRAFTWING_CPU_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {},
    "native": {},
}  # fmt: skip


def run_with(isa: str) -> None:
    """Begins this program again where its environment does not hold it to the instruction set `isa`: libraries choose
    theirs when they are loaded."""
    wanted = {**os.environ, **SET_BY[isa]}
    if wanted != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], wanted)


def llama_server(name: str, programs: Path, model: Path, threads: int, context: int, *more: str) -> Contender:
    """llama.cpp's server; context: tokens of all slots together."""
    command = (
        str(programs / "llama-server"), "-m", str(model), "-t", str(threads), "-tb", str(threads), "-c", str(context),
        "--cache-ram", "0", *more,
    )  # fmt: skip
    return Contender(name, command, {"cache_prompt": False})


def draftwing_server(name: str, model: str, threads: int, context: int, isa: str, *more: str) -> Contender:
    """Ours, of the interpreter and the package that run this; context: tokens of all requests together."""
    command = (
        sys.executable, "-m", "draftwing", "serve", "--model", model, "--num-threads", str(threads),
        "--max-total-tokens", str(context), "--disable-radix-cache", "--log-level", "warning", *more,
    )  # fmt: skip
    return Contender(name, command, environ=SET_BY[isa])
