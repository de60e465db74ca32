"""What a hostile client sends, over real sockets, to a server with little memory: it answers others all the while."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from attacked import Attacked, attacked
from attackers import ATTACKS, attacking, feel
from scripted import wait_until

MB = 1 << 20
JSON = {"content-type": "application/json"}
LIMITS = {"header_seconds": 0.5, "body_seconds": 1.0, "write_seconds": 1.0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Attacked]:
    with attacked() as one:
        yield one


@pytest.fixture(scope="module")
def guarded() -> Iterator[Attacked]:
    """One that needs a key, and whose steps take as long as a model's."""
    with attacked(options={"api_key": "right"}, pause=0.02) as one:
        yield one


@pytest.fixture(scope="module")
def hasty() -> Iterator[Attacked]:
    """One whose time-outs are short."""
    with attacked(limits=LIMITS) as one:
        yield one


def works(server: Attacked, seconds: float = 30.0) -> None:
    """A chat is answered."""
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=seconds)
    assert answer.status_code == 200, answer.text


def reply(sock: socket.socket) -> bytes:
    """All that comes until the other side closes; a reset is an end, too."""
    out = b""
    try:
        while data := sock.recv(65536):
            out += data
    except ConnectionResetError:
        pass
    return out


def head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


# -- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.further(path=["/tokenize", "/v1/messages"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions", "/generate", "/v1/messages"])
def test_a_body_of_200_mb_is_refused_while_it_comes(server: Attacked, path: str) -> None:
    before = server.resident
    with server.connect() as sock:
        sock.sendall(head(path, f"content-length: {200 * MB}"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")
    answer = httpx.post(server.url + path, content=b"a" * (20 * MB), headers=JSON)
    assert answer.status_code == 413 and "--max-body-size" in answer.text
    assert answer.headers["connection"] == "close"

    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b'"' * MB

    answer = httpx.post(server.url + path, content=chunks(), headers=JSON)
    assert answer.status_code == 413
    works(server)
    assert server.resident - before < 64 * MB


def test_many_large_bodies_at_once_are_too_many() -> None:
    with attacked(options={"max_body_size": MB}) as server:
        socks = [server.connect() for _ in range(100)]
        for sock in socks:  # each stops before its end
            sock.sendall(head("/generate", f"content-length: {MB}") + b" " * (MB - 1))
        end, refused, waiting = time.monotonic() + 20, 0, list(socks)
        while refused < 36 and time.monotonic() < end:
            readable, _, _ = select.select(waiting, [], [], 0.1)
            refused += sum(sock.recv(100).startswith(b"HTTP/1.1 503 ") for sock in readable)
            waiting = [sock for sock in waiting if sock not in readable]
        assert refused >= 36 and server.resident < 400 * MB
        for sock in socks:
            sock.close()
        works(server)


def wrong_bodies() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Name, path, and what makes a body of nearly 4 MB."""

    def repeated(begin: bytes, unit: bytes, end: bytes) -> bytes:
        return begin + (unit * ((4 * MB - 100) // len(unit))).rstrip(b",") + end

    def fields(count: int) -> bytes:
        return b",".join(b'"%d":""' % i for i in range(count))

    chat, generate = "/v1/chat/completions", "/generate"
    message = b'{"messages":[{"role":"user","content":"a"}],'
    empty = b"{" + b" " * 40 + b"},"  # so long that there are fewer than are counted as too many
    yield "too many messages", chat, lambda: repeated(b'{"messages":[', b"{},", b"]}")
    yield "too many fields in all", generate, lambda: b'{"text":"a","speculative":{' + fields(300_000) + b"}}"
    yield "too many lists", chat, lambda: repeated(message + b'"metadata":[', b"[],", b"]}")
    yield "lists of lists", chat, lambda: repeated(message + b'"metadata":[', b"[" * 150 + b"]" * 150 + b",", b"]}")
    yield "empty messages", chat, lambda: repeated(b'{"messages":[', empty, b"]}")
    yield "wrong ids", generate, lambda: repeated(b'{"input_ids":[', b'"",', b"]}")
    yield "wrong parts", chat, lambda: repeated(b'{"messages":[{"role":"user","content":[', empty, b"]}]}")
    yield "wrong stops", chat, lambda: repeated(message + b'"stop":[', b"1,", b"]}")
    yield "deep", chat, lambda: b'{"messages":' + b"[" * (4 * MB - 100)
    yield "deep metadata", chat, lambda: message + b'"metadata":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    yield "digits", generate, lambda: b'{"text":"a","priority":' + b"9" * (4 * MB - 100) + b"}"
    yield "prompts", generate, lambda: repeated(b'{"text":[', b'"a",', b"]}")
    yield "a long text", generate, lambda: b'{"text":"' + b"1" * (4 * MB - 100) + b'"}'
    yield (
        "a model's name",
        "/v1/completions",
        lambda: b'{"prompt":"a","stream":true,"model":"' + b"m" * (4 * MB - 100) + b'"}',
    )
    yield "system", "/v1/messages", lambda: repeated(b'{"model":"m","max_tokens":1,"messages":[', empty, b"]}")


@pytest.mark.parametrize(
    ("path", "body"),
    [pytest.param(path, body, id=name) for name, path, body in wrong_bodies()],
)
def test_a_large_wrong_body_costs_little(server: Attacked, path: str, body: Callable[[], bytes]) -> None:
    before = server.seconds
    answer = httpx.post(server.url + path, content=body(), headers=JSON, timeout=60)
    assert answer.status_code == 400 and len(answer.content) < 2000, answer.text[:300]
    assert server.seconds - before < 5
    works(server)


def test_memory_comes_back_after_large_bodies(server: Attacked) -> None:
    for _, path, body in list(wrong_bodies())[::3]:
        httpx.post(server.url + path, content=body(), headers=JSON, timeout=60)
    wait_until(lambda: server.resident < 250 * MB)


def test_a_compressed_body_is_refused(server: Attacked) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert httpx.post(f"{server.url}/generate", content=b"\x1f\x8b", headers=headers).status_code == 415


# -- tokenization -----------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_short_chats_are_not_behind_long_texts(server: Attacked) -> None:
    """Eight texts of 1.9 MB that fit no context, and a chat and prompts that are tokenized in threads, too."""
    text = json.dumps({"prompt": "1" * 1_900_000})
    chat = {"model": "m", "messages": [{"role": "user", "content": "a " * 900 + "b" * 3000}]}
    prompts = {"prompt": ["a " * 900] * 3, "max_tokens": 1}

    def long() -> int:
        return httpx.post(f"{server.url}/tokenize", content=text, headers=JSON, timeout=60).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        began = time.monotonic()
        waiting = [pool.submit(long) for _ in range(8)]
        answer = httpx.post(f"{server.url}/v1/messages/count_tokens", json=chat, timeout=60)
        assert answer.status_code == 200 and answer.json()["input_tokens"] > 4800, answer.text
        answer = httpx.post(f"{server.url}/v1/completions", json=prompts, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 5400, answer.text
        assert time.monotonic() - began < 5
        assert [one.result() for one in waiting] == [400] * 8


# -- slow clients -----------------------------------------------------------------------------------------------------


def closed(sock: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    sock.settimeout(0.001)
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.further(first=[b"\r\n", b"P"])
@pytest.mark.parametrize("first", [b"", b"\r\n", b"P", head("/generate")[:-2], head("/generate", "content-length: 99")])
def test_a_client_that_sends_a_byte_now_and_then_is_put_off(hasty: Attacked, first: bytes) -> None:
    socks = [hasty.connect() for _ in range(20)]
    for sock in socks:
        sock.sendall(first)
    end = time.monotonic() + 10
    open_ = list(socks)
    while open_ and time.monotonic() < end:
        for sock in list(open_):
            sock.settimeout(0.005)
            try:
                sock.send(b"\r\n"[:1] if first in (b"", b"\r\n") else b"x")
                if not (data := sock.recv(4096)) or data.startswith(b"HTTP/1.1 408"):
                    open_.remove(sock)
            except TimeoutError:
                pass
            except OSError:
                open_.remove(sock)
        time.sleep(0.05)
    assert not open_
    works(hasty)
    for sock in socks:
        sock.close()


def test_idle_connections_make_room() -> None:
    with attacked(options={"max_connections": 20}) as server:
        socks = [server.connect() for _ in range(60)]
        for _ in range(5):
            works(server)
        wait_until(lambda: sum(closed(sock) for sock in socks) >= 40)
        for sock in socks:
            sock.close()


def responses(server: Attacked) -> float:
    """How many have ended."""
    page = httpx.get(f"{server.url}/metrics").text.splitlines()
    lines = [line for line in page if line.startswith("draftwing:http_responses_total{")]
    return sum(float(line.split()[-1]) for line in lines)


def test_a_stream_that_nobody_reads_is_aborted(hasty: Attacked) -> None:
    """Answers of some megabytes, more than the buffers between the two hold."""
    body = {"text": "a" * 1000, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}, "stream": True}
    body |= {"return_logprob": True, "top_logprobs_num": 100}
    data = json.dumps(body).encode()
    before = responses(hasty)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(4)]
        for sock in socks:
            sock.settimeout(20)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", hasty.port))
            sock.sendall(head("/generate", f"content-length: {len(data)}") + data)
        wait_until(lambda: responses(hasty) >= before + 4, 60)
        for sock in socks:
            assert b"[DONE]" not in reply(sock)
    info = httpx.get(f"{hasty.url}/server_info").json()
    assert info["internal_states"][0]["num_running_reqs"] == 0


def test_what_is_no_body_is_limited(server: Attacked) -> None:
    begin = head("/generate", "transfer-encoding: chunked")
    attacks = {
        "a header": (b"GET / HTTP/1.1\r\na: ", b"a"), "headers": (b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
        "a path": (b"GET /", b"a"), "empty lines": (b"", b"\r\n"), "a trailer": (begin + b"1\r\n{\r\n0\r\na: ", b"a"),
        "trailers": (begin + b"1\r\n{\r\n0\r\n", b"a: b\r\n"), "an extension": (begin + b"1;", b"a"),
        "pipelined": (b"", b"GET /health HTTP/1.1\r\n\r\n"),
    }  # fmt: skip
    before = server.resident
    for name, (first, unit) in attacks.items():
        with server.connect(10) as sock:
            sock.sendall(first)
            sent = 0
            try:
                while sent < 50 * MB:
                    sent += sock.send(unit * (65536 // len(unit)))
            except (ConnectionError, TimeoutError):
                pass
            assert sent < 20 * MB, name
    assert server.resident - before < 50 * MB
    works(server)


@pytest.mark.parametrize(
    ("first", "size"),
    [(b"GET /health HTTP/1.1\r\nhost: a\r\n", 1), (head("/generate")[:-2], 8), (head("/x")[:-2], 60)],
)
def test_tiny_chunks_are_refused_early(server: Attacked, first: bytes, size: int) -> None:
    """A few hundred kilobytes of them are read, of any number."""
    unit = b"%x\r\n" % size + b" " * size + b"\r\n"
    with server.connect(10) as sock:
        sock.sendall(first + b"transfer-encoding: chunked\r\n\r\n")
        assert sent_until_closed(sock, unit, 60 * MB) < 20 * MB
    works(server)


@pytest.mark.parametrize(
    "headers",
    [
        b"GET /health HTTP/1.1\r\ntransfer-encoding: chunked\r\n",
        b"HEAD / HTTP/1.1\r\ntransfer-encoding: chunked\r\n",
        b"POST /nothing HTTP/1.1\r\ntransfer-encoding: chunked\r\n",
        b"POST /nothing HTTP/1.1\r\ncontent-length: 999999999\r\n",
        b"PUT /v1/models HTTP/1.1\r\ncontent-length: 999999999\r\n",
        b"POST /generate HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-type: text/plain\r\n",
        # As it comes: too large, as it says or as it turns out, or what nobody may send.
        b"POST /generate HTTP/1.1\r\ncontent-length: 999999999\r\ncontent-type: application/json\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-type: application/json\r\n",
        b"POST /api/chat HTTP/1.1\r\ntransfer-encoding: chunked\r\n",
        b"POST /v1/messages HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-type: application/json\r\n"
        b"content-encoding: gzip\r\n",
        b"DELETE /v1/responses/resp_1 HTTP/1.1\r\ntransfer-encoding: chunked\r\n",
    ],
)
def test_a_body_that_nobody_reads_ends_its_connection(server: Attacked, headers: bytes) -> None:
    unit = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    with server.connect(10) as sock:
        sock.sendall(headers + b"\r\n")
        taken = sent_until_closed(sock, unit, 200 * MB)
        assert taken < 20 * MB
        answer = reply(sock)
        assert answer.startswith(b"HTTP/1.1 ") and b" 500 " not in answer[:20]
    works(server)


def sent_until_closed(sock: socket.socket, unit: bytes, most: int) -> int:
    """Bytes that the server's system took before the server closed the connection, or so many."""
    sent, block = 0, unit * max(65536 // len(unit), 1)
    with contextlib.suppress(ConnectionError):
        while sent < most:
            sent += sock.send(block)
    return sent


def test_honest_bodies_in_small_chunks_are_taken(server: Attacked) -> None:
    body = {"text": "ab" * 300, "sampling_params": {"max_new_tokens": 2}}
    whole = json.dumps(body)

    def pieces(size: int) -> Iterator[bytes]:
        for at in range(0, len(whole), size):
            yield whole[at : at + size].encode()

    for size in (1, 3, 64, 500):
        assert httpx.post(f"{server.url}/generate", content=pieces(size), headers=JSON).status_code == 200
    large = json.dumps({"text": "a" * 1_000_000})
    chunks = (large[at : at + 100].encode() for at in range(0, len(large), 100))
    answer = httpx.post(f"{server.url}/generate", content=chunks, headers=JSON, timeout=30)
    assert answer.status_code == 400 and "context" in answer.text


FIRST = (  # of each kind: bodies before and after an answer, endless heads, many requests, many connections
    "chunks of a byte, without a key", "a body after a 401", "headers", "requests that do not wait",
    "connections that ask for /health and leave",
)  # fmt: skip


@pytest.mark.timing
@pytest.mark.further(name=[name for name in ATTACKS if name not in FIRST])
@pytest.mark.parametrize("name", [*ATTACKS])
def test_others_are_served_while_many_attack(guarded: Attacked, name: str) -> None:
    """64 connections without a key. `tools/attacks.py` measures what is felt of them on an idle machine; here others
    may run with it."""
    with attacking(name, guarded.port, 20):
        time.sleep(0.2)
        felt = feel(guarded.port, 0.7, "right")
    assert len(felt.gaps) > 2 and max(felt.health) < 5
    assert sorted(felt.gaps)[len(felt.gaps) // 2] < 0.25


@pytest.mark.timing
def test_thousands_who_wait_for_a_flush_and_leave_cost_little() -> None:
    with attacked(pause=0.02) as server:
        body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}).encode()
        with server.connect(60) as running:
            running.sendall(head("/generate", f"content-length: {len(body)}") + body)
            time.sleep(0.3)
            for _ in range(1500):
                with server.connect() as sock:
                    sock.sendall(b"POST /flush_cache?timeout=3600 HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
            time.sleep(0.5)
            before = server.seconds
            time.sleep(1)
            assert server.seconds - before < 0.3, "of 1 s, with an answer that runs"
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200


def test_odd_clients(server: Attacked) -> None:
    body = json.dumps({"text": "ab"}).encode()
    whole = head("/generate", f"content-length: {len(body)}") + body
    with server.connect() as sock:  # of HTTP/1.0: the end of the response is the end of the connection
        sock.sendall(whole.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b"200 OK" in reply(sock)
    with server.connect() as sock:  # one after the other without waiting
        sock.sendall(whole * 3 + whole.replace(b"host", b"connection: close\r\nhost"))
        assert reply(sock).count(b"HTTP/1.1 200 OK") == 4
    with server.connect() as sock:
        sock.sendall(b"GET /generate HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert sock.recv(4096).startswith((b"HTTP/1.1 405", b"HTTP/1.1 400"))
    with server.connect() as sock:  # resets in the middle
        sock.sendall(whole[:-3])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    works(server)


# -- chat templates ---------------------------------------------------------------------------------------------------

ENDLESS = "{% for m in messages %}{{ m.content }}{% if m.content == 'go' %}{% for i in range(99999) %}"
ENDLESS += "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"


def test_an_endless_template_holds_up_nobody() -> None:
    """It ends as an error while other requests are answered, and the server ends when it is asked to."""
    with attacked(template=ENDLESS, options={"drain_timeout": 30}) as server:
        endless = {"messages": [{"role": "user", "content": "go"}]}

        def ask(path: str) -> httpx.Response:
            return httpx.post(server.url + path, json=endless, timeout=60)

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            waiting = pool.submit(ask, "/v1/chat/completions")
            answered = 0
            while not waiting.done():
                assert httpx.post(f"{server.url}/generate", json={"text": "ab"}, timeout=60).status_code == 200
                answered += 1
                time.sleep(0.1)
            assert answered > 2, "they waited for the template"
            assert waiting.result().status_code == 400 and "longer than 2 s" in waiting.result().text
            works(server)
            last = pool.submit(ask, "/v1/chat/completions")
            time.sleep(0.3)
            server.process.terminate()
            server.process.join(60)
            assert server.process.exitcode == 0
            assert last.exception() or last.result().status_code == 400


# -- requests that are hardly any -------------------------------------------------------------------------------------

ODD = [
    b"POST /generate HTTP/1.1\r\nhost: [\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: a/b?c#d@e\xff\r\n\r\n",
    head("/generate", "content-length: 5", "transfer-encoding: chunked") + b"0\r\n\r\n",
    head("/generate", "content-length: 5", "content-length: 6") + b"abcdef", head("/generate", "content-length: -5"),
    head("/generate", f"content-length: {10**23}"), head("/generate", f"content-length: {2**64 - 1}"),
    head("/generate", "transfer-encoding: chunked, identity") + b"0\r\n\r\n",
    head("/generate", "transfer-encoding: chunked") + b"ffffffffffffffffff\r\n", b"CONNECT a:80 HTTP/1.1\r\n\r\nxxxx",
    b"OPTIONS * HTTP/1.1\r\n\r\n", b"GET http://[/health HTTP/1.1\r\n\r\n", b"GET /%ff%00%0a\xc2\x9b HTTP/1.1\r\n\r\n",
    b"GET /health\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes.fromhex("16030100c8010000c40303") + bytes(100),
    b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    head("/generate", "content-type: \u00ff\u009b"),
    head("/generate", "expect: 100-continue", "content-length: 999999999"), head("/generate", "authorization: \u00ff"),
]  # fmt: skip


def test_requests_that_are_hardly_any(server: Attacked) -> None:
    """Each is answered by something, and none by a 500."""
    for request in ODD:
        with server.connect(5) as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            assert b" 500 " not in reply(sock)[:20], request
    works(server)
