"""`draftwing chat`: in a terminal with a scripted model, against a server, and in this process with a tiny model."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from scripted import wait_until

from draftwing import LLM
from draftwing.cli.answerers import Fields, InProcess, Messages, Piece, Remote, Usage
from draftwing.cli.chat import Chat, ask, asked, picture_part
from draftwing.cli.client import Client
from draftwing.cli.commands import take_question
from draftwing.cli.main import main

SCRIPTED = """
import itertools, json, sys, time
from pathlib import Path
from draftwing.cli.answerers import Piece
from draftwing.cli.chat import COMMANDS, Chat
from draftwing.cli.line_reader import LineReader

class Scripted:
    info = {"served_model_name": "scripted"}

    def answer(self, messages, fields, usage):
        print(json.dumps(messages), file=log, flush=True)
        try:
            for i in itertools.count() if messages[-1]["content"] == "endless" else range(2):
                usage.tokens += 1
                yield Piece(f"<{i}>")
                time.sleep(0.002)
        except BaseException:
            print('"aborted"', file=log, flush=True)
            raise

with open(sys.argv[1], "w") as log, LineReader(Path(sys.argv[2]), COMMANDS) as lines:
    Chat(Scripted(), lines.read, None, {}).run()
"""


class Terminal:
    """A program with a terminal of its own."""

    def __init__(self, argv: list[str]) -> None:
        self._fd, end = pty.openpty()

        def own_terminal() -> None:  # Ctrl-C is for the session whose terminal it is
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored where the tests run in the background

        self.process = subprocess.Popen(
            argv, stdin=end, stdout=end, stderr=end, preexec_fn=own_terminal, env={**os.environ, "TERM": "xterm"}
        )
        os.close(end)

    def read_until(self, word: str, again: str = "") -> str:
        """What it writes, up to `word`. again: keys that are typed when nothing comes for a second."""
        text, end = "", time.monotonic() + 60
        while not text.endswith(word):
            assert time.monotonic() < end, f"{word!r} does not come in {text[-100:]!r}"
            if select.select([self._fd], [], [], 1)[0]:
                text += os.read(self._fd, 1).decode()
            else:
                self.type(again)
        return text

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def ask(self, keys: str) -> str:
        """Types when the prompt is there; returns what comes before the next one."""
        self.type(keys)
        return self.read_until(">>> ")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.slow
def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    log, history = tmp_path / "log", tmp_path / "cache" / "history"
    with closing(Terminal([sys.executable, "-c", SCRIPTED, str(log), str(history)])) as terminal:
        assert "scripted" in terminal.read_until(">>> ")
        assert "<0><1>" in terminal.ask("one\n")
        terminal.ask("\x1b[A\x1b[D\x1b[Dx\n")  # the line before, changed two characters from its end
        terminal.ask("/rest\n")
        terminal.ask("/reset\n")
        terminal.type("two \\\n")
        terminal.read_until("... ")
        terminal.ask("lines\n")
        terminal.type('"""a\n')
        terminal.read_until("... ")
        terminal.ask('b"""\n')
        terminal.ask("/reset\n")
        terminal.type("endless\n")
        terminal.read_until("<1>")
        terminal.ask("\x03")
        terminal.type("never asked")
        terminal.read_until("never asked")
        terminal.type("\x03")
        terminal.read_until(">>> ", again="\x03")  # Python's readline misses one while it still works on a key
        terminal.ask("three\n")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one if one == "aborted" else one[-1] for one in seen] == [
        *map(question, ("one", "oxne", "two \nlines", "a\nb", "endless")), "aborted", question("three"),
    ]  # fmt: skip
    assert [len(one) for one in seen if one != "aborted"] == [1, 3, 1, 3, 1, 3]
    assert seen[-1][1]["content"].startswith("<0><1>")  # what there was of the stopped answer
    assert history.read_text().splitlines()[:3] == ["one", "oxne", "/rest"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


class Model:
    """Answers with the numbers of its calls, and keeps what it was asked. fails: raises instead."""

    info = {"served_model_name": "model", "sampling_defaults": {"top_p": 0.9}}  # noqa: RUF012

    def __init__(self) -> None:
        self.asked: list[tuple[Messages, Fields]] = []

    def answer(self, messages: Messages, fields: Fields, usage: Usage) -> Generator[Piece, None, None]:
        self.asked.append((list(messages), dict(fields)))
        usage.tokens = 7
        yield Piece("thought", reasoning=True)
        yield Piece(str(len(self.asked)))


def talk(model: Any, *lines: str, system: str | None = None) -> None:
    todo = iter(lines)

    def read() -> str:
        try:
            return next(todo)
        except StopIteration:
            raise EOFError from None

    Chat(model, read, system, {}).run()


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    talk(
        model, "a", "/set temperature 0.2", "/set seed 3", "/set top_k many", "/set n 2", "/set nothing 1", "b",
        "/set seed", "/system be brief", "/regenerate", "/nothing", " /c", "/reset", "/regenerate", "/system", "d",
        "/show", "/help", "/exit", "never asked",
    )  # fmt: skip
    system = {"role": "system", "content": "be brief"}
    before = [question("a"), {"role": "assistant", "content": "1"}, question("b")]
    assert model.asked == [
        ([question("a")], {}), (before, {"temperature": 0.2, "sampling_seed": 3}),
        ([system, *before], {"temperature": 0.2}),
        ([system, *before, {"role": "assistant", "content": "3"}, question("/c")], {"temperature": 0.2}),
        ([question("d")], {"temperature": 0.2}),
    ]  # fmt: skip
    out, error = capsys.readouterr()
    errors = error.splitlines()
    assert [word in line for word, line in zip(("top_k", "n is not", "nothing", "/nothing", "no answer"), errors,
                                               strict=True)] == [True] * 5  # fmt: skip
    assert "7 tokens" in out and "\x1b" not in out


def test_a_saved_conversation_is_a_request(
    tmp_path: Path, url: str, echo: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = Model(), tmp_path / "a b.json"
    talk(model, "a", "/set max_tokens 40", f"/save {file}", "b", f"/save {file}", system="be brief")
    body = json.loads(file.read_text())
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    Client(url, "key").post("/v1/chat/completions", body)
    assert echo.requests[0].params.max_new_tokens == 40
    talk(model, f"/load {file}", "c", f"/save {tmp_path / 'other'}")
    assert model.asked[-1] == ([*body["messages"], question("c")], {"max_new_tokens": 40})
    capsys.readouterr()
    talk(model, f"/save {file}", "/save", "/save /no/such/folder/file", "/load /no/such/file", f"/load {tmp_path}")
    for wrong in ('{"messages": 5}', '[{"role": "user"}]', '{"messages": [], "top_k": "x"}', "{"):
        file.write_text(wrong)
        talk(model, f"/load {file}")
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 9 and all(line.startswith("error: ") for line in errors)
    assert file.read_text() == "{"


def test_an_answer_that_fails_leaves_the_conversation(capsys: pytest.CaptureFixture[str], url: str) -> None:
    remote = Remote(Client(url, "key"))
    talk(remote, "hi", "bad", "ho")
    out, error = capsys.readouterr()
    assert "no bad words" in error and error.startswith("error: ")
    assert "user:hi\nassistant:user:hi\n\nuser:ho\n" in out and "user:bad" not in out


def test_one_question_to_a_server(
    url: str, echo: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["chat", "--url", f"{url}/v1", "--api-key", "key", "--system", "be brief"]
    for words, piped, expected in (
        (["héllo"], "", "user:héllo"),
        ([], "a\nb\n", "user:a\nb"),
        (["read this:"], "a\n", "user:read this:\n\na"),
        (["read this:"], "\ufeff\na\n", "user:read this:\n\na"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(piped))
        assert main([*argv, *words, "--max-tokens", "30"]) == 0
        out, error = capsys.readouterr()
        assert out == f"system:be brief\n{expected}"[:30].rstrip("\n") + "\n" and "tokens" in error
        assert echo.requests[-1].params.max_new_tokens == 30
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(argv) == 2 and main([*argv, "bad"]) == 2
    assert main([*argv, "--temperature", "-1", "hi"]) == 2 and len(echo.requests) == 4


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They go with one question, and stay in the conversation and in what is saved."""
    file, model = tmp_path / "a.png", Model()
    file.write_bytes(b"abc")
    talk(model, f"/image {file}", "a", "b", "/image /no/such/file", f"/save {tmp_path / 'saved'}")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}
    shown = {"role": "user", "content": [picture, {"type": "text", "text": "a"}]}
    assert [messages for messages, _ in model.asked] == [
        [shown], [shown, {"role": "assistant", "content": "1"}, question("b")]
    ]  # fmt: skip
    assert "/no/such/file cannot be read" in capsys.readouterr().err
    talk(model, f"/load {tmp_path / 'saved'}", "c")
    assert model.asked[-1][0][0] == shown
    ask(model, asked("d", [picture_part(str(file))]), None, {})
    assert model.asked[-1][0] == [{**shown, "content": [picture, {"type": "text", "text": "d"}]}]


def test_a_server_aborts_what_is_closed(url: str, echo: FakeEngine) -> None:
    echo.pause = 0.02
    usage = Usage()
    pieces = Remote(Client(url, "key")).answer([question("a" * 500)], {"ignore_eos": True}, usage)
    assert next(pieces).text and usage.tokens > 0
    pieces.close()
    wait_until(lambda: len(echo.aborted) == 1)


def test_in_process(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(model, max_total_tokens=2000, max_running_requests=4, speculative_algorithm="NGRAM") as llm:
        expected = llm.chat([question("hello")], {"temperature": 0, "max_new_tokens": 12})
        answerer, usage = InProcess(llm.engine), Usage()
        pieces = answerer.answer([question("hello")], {"temperature": 0}, usage)
        assert next(pieces) is not None and usage.tokens > 0
        pieces.close()
        assert llm.engine.idle()
        ask(answerer, asked("hello"), None, {"temperature": 0, "max_new_tokens": 12})
        out, error = capsys.readouterr()
        assert out.strip("\n") == expected[0].text.strip("\n")
        assert "12 tokens" in error and "acceptance length" in error
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    argv = ["chat", model, "--temperature", "0", "--max-tokens", "12", "--max-total-tokens", "2000"]
    assert main(argv) == 0
    assert capsys.readouterr().out.strip("\n") == expected[0].text.strip("\n")


@pytest.mark.parametrize(
    ("words", "piped"),
    [([], ""), ([], " \n\n"), ([], None), (["--image", "/no/such/file"], "hi"), (["why", "--image", "/"], ""),
     (["why\udcff"], ""), (["why"], "a\udcff")],
)  # fmt: skip
def test_no_model_is_loaded_for_what_can_have_no_answer(
    model: str, words: list[str], piped: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr("draftwing.engine.engine.Engine.__init__", lambda *args, **kwargs: loaded.append(args))
    monkeypatch.setattr("sys.stdin", piped if piped is None else io.StringIO(piped))
    assert main(["chat", model, *words]) == 2
    out, error = capsys.readouterr()
    assert not loaded and not out and len(error.splitlines()) == 1 and error.startswith("draftwing: error: ")


@pytest.mark.parametrize(
    ("words", "url", "unknown", "expected"),
    [
        (["smollm2"], None, [], ("smollm2", None, [])),
        (["Why is it?"], None, [], (None, "Why is it?", [])),
        (["a folder"], None, [], ("a folder", None, [])),
        (["m", "why"], None, [], ("m", "why", [])),
        (["m"], None, ["why"], ("m", "why", [])),  # options between them
        (["why"], "http://x", [], (None, "why", [])),
        (["m", "why"], None, ["--odd", "more"], ("m", "why", ["--odd", "more"])),
        ([], None, [], (None, None, [])),
    ],
)
def test_model_or_question(
    words: list[str], url: str | None, unknown: list[str], expected: tuple[Any, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    arguments: dict[str, Any] = {"url": url, "question": None}
    arguments |= dict(zip(("positional_model", "question"), words, strict=False))
    left = take_question(arguments, unknown)
    assert (arguments.get("positional_model"), arguments["question"], left) == expected
