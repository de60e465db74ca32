"""Serves random mixed traffic for a long time, breaks the engine meanwhile, and looks at what is left of it.

    python tools/soak.py --minutes 60 --model smollm2 -- --speculative-algorithm NGRAM

Options after `--` go to `draftwing serve`. Faults come in the first third of the time, of twenty minutes or more in
the first sixth, so that the last engine is warm after a third: the engine is killed, stopped for a moment, stopped for
good; clients leave in the middle of an answer, or do not read it; no file can be written, as on a full disk. Afterwards
these must hold, or the exit code is 1:

- all slots and rows are back;
- memory, descriptors and threads of engine and server are those of the end of the first third: memory within 2%, in
  less than twenty minutes those of the end of the second third, and 16 MB more. Memory is the least of what is
  allocated, and of what is resident, in a quarter of a third: a step takes 100 MB for a moment, and what it frees goes
  back once a minute. The KV pool, the store of responses and the memories of `NGRAM` and `SUFFIX`, which take memory as
  they fill, are small unless options say otherwise, so that they are full by then;
- nothing in the log looks like a bug; else all that it says of the minute before is printed, with whole traces;
- answers of a sample equal those of a fresh server without drafts. On a GPU `--enable-deterministic-inference` is among
  the options, so that no weight is without the promise.

A table says what memory is made of after each third. `--by-kind 1000` asks afterwards for so many answers of each kind
of request, one kind after the other, and says by how much memory in use grew in the second half of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from soak_traffic import KINDS, TOOL, Outcome, answer_of, many, one_client, short

GROWTH = 0.02  # of memory since the first third, in shorter soaks since the second
JUDGED = 170.0  # seconds of a soak from which on memory is judged
WARM = 1200.0  # seconds of a soak after which all has been used that takes memory once
SLACK = 16e6  # bytes that a process may grow by beyond that in a shorter one
HANG = 5.0  # the watchdog's seconds
TELL = 60.0  # seconds between lines that tell how it goes
BUGS = ("Traceback", "Exception", "never awaited", "leak", "stopped by an exception")
MINUTE = timedelta(seconds=60)  # of the log that is printed before a bug
AFTER = timedelta(seconds=5)
MAX_MINUTES = 3  # that are printed
EVENTS = ("killed", "stopped for a moment", "stopped")


class Server:
    """`draftwing serve` in a process of its own; its log is kept."""

    def __init__(self, model: str, port: int, more: list[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it is read later)
        command = [sys.executable, "-m", "draftwing.launch_server", "--model", model, "--port", str(port)]
        read, write = os.pipe()  # a file could not be written
        self.process = subprocess.Popen(
            [*command, "--log-level", "info", "--watchdog-timeout", str(HANG), *more],
            stderr=write, stdout=write,
        )  # fmt: skip
        os.close(write)
        self._copy = subprocess.Popen(["cat"], stdin=read, stdout=self.log)
        os.close(read)

    @property
    def engine(self) -> int | None:
        """The engine's process, a child of the server's."""
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                for child in (task / "children").read_text().split():
                    if b"draftwing.engine.process.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
        return None

    async def ready(self, client: httpx.AsyncClient, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended:
            if await self.healthy(client):
                self.fill_disk()
                return
            await asyncio.sleep(0.2)
        raise SystemExit(f"the server is not ready:\n{self.text()[-3000:]}")

    async def healthy(self, client: httpx.AsyncClient) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await client.get("/health", timeout=5)).status_code == 200
        return False

    def fill_disk(self) -> None:
        """No file grows any more in the server, its engine and engines to come. Before, a GPU's kernels are kept."""
        for pid in (self.process.pid, self.engine):
            if pid is not None:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._copy.wait(30)


def records(log: str) -> list[tuple[datetime, str]]:
    """What was logged, with its times, each with all its lines; what is no message of the log, as the traces of threads
    are not, belongs to the one before it."""
    found: list[tuple[datetime, str]] = []
    for line in log.splitlines():
        try:
            found.append((datetime.strptime(line[:21], "[%Y-%m-%d %H:%M:%S]"), line))
        except ValueError:
            at, *before = found.pop() if found else (datetime.min,)
            found.append((at, "\n".join([*before, line])))
    return found


def bugs(log: str) -> tuple[list[str], list[str]]:
    """What looks like a bug in a log, and what it says of the minute before each, as far as that was not said yet."""
    every, minutes, shown = records(log), list[str](), datetime.min
    found = [(at, text) for at, text in every if any(bug in text for bug in BUGS)]
    for at, _ in found:
        if at > shown and len(minutes) < MAX_MINUTES:
            begin, shown = max(at - MINUTE, shown) if at > datetime.min + MINUTE else shown, at + AFTER
            minutes.append("\n".join(text for when, text in every if begin < when <= shown))
    return [text for _, text in found], minutes


@dataclass
class Size:
    """Of a process: resident bytes, those that its allocator has given out, descriptors and threads."""

    pid: int
    resident: int
    allocated: int  # 0 where nobody said
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int | None, allocated: int) -> Size | None:
        with contextlib.suppress(OSError, ValueError, KeyError):  # one that has ended has no VmRSS
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            resident = int(status["VmRSS"].split()[0]) * 1024
            return cls(int(str(pid)), resident, allocated, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))
        return None


async def faults(server: Server, client: httpx.AsyncClient, seed: int, end: float, out: Outcome) -> None:
    """One of each kind, each to an engine that serves; by `end` where engines start soon."""
    generator, began = random.Random(seed), time.monotonic()
    for kind in EVENTS:
        await asyncio.sleep(max((end - began) / (len(EVENTS) + 1) * generator.uniform(0.8, 1.0), 1.0))
        while not server.ended and not await server.healthy(client):
            await asyncio.sleep(0.2)
        if (pid := server.engine) is None:
            return
        out.counts[f"engine {kind}"] += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            if kind == "stopped for a moment":
                await asyncio.sleep(HANG / 4)
                os.kill(pid, signal.SIGCONT)


# -- the whole --------------------------------------------------------------------------------------------------------


Sizes = list[tuple[float, Size | None, Size | None]]  # time, engine, server
Parts = dict[str, dict[str, int]]  # by process: what its memory is made of, as `/server_info` says


async def parts(client: httpx.AsyncClient) -> Parts:
    """Returns nothing while there is no engine."""
    with contextlib.suppress(httpx.HTTPError):
        response = await client.get("/server_info")
        if response.status_code == 200:
            found: Parts = response.json()["processes"]
            return found
    return {}


def show_parts(columns: list[tuple[str, Parts]]) -> None:
    """Prints MB, and thousands of objects, by process and part. What is allocated may not be resident yet, as an empty
    pool; the rest is code, weights that are files, stacks, and what Python allocates by itself."""
    columns = [(name, found) for name, found in columns if found]
    print(f"{'MB':22}" + "".join(f"{name:>14}" for name, _ in columns))
    for process in ("engine", "server"):
        for part in ("resident", "pool", "recordings", "other allocated", "held", "rest", "python_blocks"):
            row = [_part(found[process], part) for _, found in columns]
            if any(row):
                print(f"{process:7} {part:15}" + "".join(f"{value:14,.1f}" for value in row))


def _part(memory: dict[str, int], part: str) -> float:
    named = memory.get("pool", 0) + memory.get("recordings", 0)
    if part == "other allocated":
        return (memory.get("allocated", named) - named) / 1e6
    if part == "rest":
        return (memory["resident"] - memory.get("allocated", named) - memory.get("held", 0)) / 1e6
    return memory.get(part, 0) / (1e3 if part == "python_blocks" else 1e6)


async def by_kind(client: httpx.AsyncClient, count: int, clients: int, seed: int, longest: int, tools: bool) -> None:
    """Prints, of each kind of request, the growth of allocated memory per 1,000 of them; the first half is not
    counted, in which caches fill."""
    generator = random.Random(seed)
    for kind in KINDS:
        if kind == "tools" and not tools:
            continue
        found = []
        for half in (count // 2, count - count // 2):
            await many(client, kind, half, clients, longest, generator)
            await drained(client)
            found.append(await parts(client))
        if all(found):
            before, after = ([one[name].get("allocated", 0) for name in ("engine", "server")] for one in found)
            grown = [(late - early) / half for early, late in zip(before, after, strict=True)]
            print(f"{kind:12} engine {grown[0]:+9.1f}, server {grown[1]:+9.1f} KB per 1,000 requests", flush=True)


async def sizes(server: Server, client: httpx.AsyncClient, end: float, out: Outcome) -> Sizes:
    """Tells every minute how it goes: who looks at a soak that was cut off sees how far it came."""
    found: Sizes = []
    began = shown = time.monotonic()
    while time.monotonic() < end and not server.ended:
        said = await parts(client)
        engine, own = (said.get(name, {}).get("allocated", 0) for name in ("engine", "server"))
        found.append((time.monotonic(), Size.of(server.engine, engine), Size.of(server.process.pid, own)))
        if found[-1][0] >= shown + TELL:
            shown = found[-1][0]
            memory = " and ".join("none" if size is None else f"{size.resident / 1e6:.0f} MB" for size in found[-1][1:])
            print(f"{(shown - began) / 60:.0f} min: {memory}, {counted(out)}, {len(out.problems)} problems", flush=True)
        await asyncio.sleep(min(5.0, max(end - time.monotonic(), 0.1)))
    return found


def counted(out: Outcome) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(out.counts.items()))


async def drained(client: httpx.AsyncClient) -> dict[str, Any]:
    """The engine's numbers once nothing runs any more."""
    for _ in range(600):
        response = await client.get("/server_info")
        if response.status_code == 200:
            state: dict[str, Any] = response.json()["internal_states"][0]
            if not state["num_running_reqs"] and not state["num_waiting_reqs"]:
                return state
        await asyncio.sleep(0.1)
    return {}


def judge_memory(found: Sizes, began: float, seconds: float, out: Outcome) -> None:
    for name, at in (("engine", 1), ("server", 2)):
        whole = [(row[0] - began, row[at]) for row in found]
        late = [(when, size) for when, size in whole if size is not None and when > seconds * 2 / 3]
        if not late or late[0][1].pid != late[-1][1].pid:
            out.problems.append(f"the {name} was not there throughout")
            continue
        part = max(len(late) // 4, 1)
        steady = [
            size for when, size in whole if size is not None and when > seconds / 3 and size.pid == late[-1][1].pid
        ]
        windows = (steady[:part], [size for _, size in late[:part]], [size for _, size in late[-part:]])
        for kind in ("allocated", "resident"):
            least = [min((b for size in some if (b := getattr(size, kind))), default=0) for some in windows]
            if problem := grown(f"{name}, {kind}", least, seconds):
                out.problems.append(problem)
        print(f"{name}: {late[-1][1].files} descriptors, {late[-1][1].threads} threads")
        files = [sorted(size.files for _, size in some)[part // 2] for some in (late[:part], late[-part:])]
        if files[1] > files[0] + 16:
            out.problems.append(f"the {name} had {files[0]} descriptors, then {files[1]}")
        threads = {s.threads for _, s in late}
        if max(threads) - min(threads) > 8:
            out.problems.append(f"the {name} has {min(threads)} to {max(threads)} threads")


def grown(what: str, least: list[int], seconds: float) -> str | None:
    """Prints the least bytes after a third, after two and at the end, 0: not known; returns what is wrong with them."""
    begin, first, last = least
    if not all(least):
        return f"the memory of {what} is not known throughout: {least}" if seconds >= JUDGED else None
    long = seconds >= WARM
    growth = last / (begin if long else first) - 1
    print(f"{what}: {begin / 1e6:.1f} MB after a third, {first / 1e6:.1f} MB after two thirds, "
          f"{last / 1e6:.1f} MB at the end ({growth:+.1%})")  # fmt: skip
    too_much = seconds >= JUDGED and growth > GROWTH + (0 if long else SLACK / first)
    return f"the memory of {what} grew by {growth:.1%}" if too_much else None


async def judge_pool(client: httpx.AsyncClient, out: Outcome) -> None:
    state = await drained(client)
    memory = state.get("memory_usage", {})
    if not state or memory["free_tokens"] + memory["cached_tokens"] != memory["token_capacity"]:
        out.problems.append(f"rows or slots are not back: {state}")
    elif (await client.post("/flush_cache?timeout=20")).status_code != 200:
        out.problems.append("the cache cannot be flushed")


async def soak(args: argparse.Namespace) -> Outcome:
    out, seconds = Outcome(), args.minutes * 60
    server = Server(args.model, args.port, args.serve)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            await server.ready(client)
            asking = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "max_tokens": 1}
            tools = (await client.post("/v1/chat/completions", json=asking)).status_code == 200
            began = time.monotonic()
            end = began + seconds
            make_client = partial(one_client, server.url, lambda: server.ended, args.longest, tools, end, out)
            clients = [make_client(args.seed * 1000 + i) for i in range(args.clients)]
            watching = asyncio.ensure_future(sizes(server, client, end, out))
            broken = began + seconds / (6 if seconds >= WARM else 3)
            breaking = faults(server, client, args.seed, broken, out) if args.faults else asyncio.sleep(0)
            looking = asyncio.ensure_future(thirds(client, began, seconds))
            await asyncio.gather(*clients, breaking)
            found, columns = await watching, await looking
            if server.ended:
                out.problems.append(
                    f"the server ended after {found[-1][0] - began:.0f} s with {server.process.returncode}"
                )
            else:
                judge_memory(found, began, seconds, out)
                show_parts(columns)
                await judge_pool(client, out)
                if args.by_kind:
                    await by_kind(client, args.by_kind, args.clients, args.seed, args.longest, tools)
    finally:
        ended = server.ended
        server.close()
    log = server.text()
    problems, minutes = bugs(log)
    out.problems += problems[:20]
    print("\n\n".join([log] if args.log or ended else minutes))
    if not ended:
        await compare(args, out)
    return out


async def thirds(client: httpx.AsyncClient, began: float, seconds: float) -> list[tuple[str, Parts]]:
    """Returns what memory is made of at the end of each third, the last one a little before."""
    found = []
    for name, share in (("first third", 1 / 3), ("second third", 2 / 3), ("end", 0.99)):
        await asyncio.sleep(max(began + share * seconds - time.monotonic(), 0))
        found.append((name, await parts(client)))
    return found


def without_drafts(options: list[str]) -> list[str]:
    """Returns a server's options without those of drafts, and with one that has none."""
    kept, skipping = list[str](), False
    for word in options:
        skipping = word.startswith("--speculative-") or (skipping and not word.startswith("--"))
        kept += [] if skipping else [word]
    return [*kept, "--speculative-algorithm", "none"]


async def compare(args: argparse.Namespace, out: Outcome) -> None:
    """Asks a fresh server without drafts for the answers of the sample, one after the other."""
    fresh = Server(args.model, args.port, without_drafts(args.serve))
    try:
        async with httpx.AsyncClient(base_url=fresh.url, timeout=180) as client:
            await fresh.ready(client)
            for asked, answer in out.sample:
                again = await client.post(asked.path, json=asked.body)
                if again.status_code != 200 or answer_of(asked.path, again.json()) != answer:
                    out.problems.append(
                        f"another answer: {answer[:200]} then, {again.text[:300]} now, to {short(asked)}"
                    )
    finally:
        fresh.close()


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--longest", type=int, default=300, help="words of a prompt")
    parser.add_argument("--port", type=int, default=30100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-faults", dest="faults", action="store_false")
    parser.add_argument("--by-kind", type=int, default=0, metavar="N", help="requests of each kind, at the end")
    parser.add_argument("--log", action="store_true", help="print the server's log")
    args = parser.parse_args(argv[:at])
    small = ["--max-total-tokens", "4096", "--response-store-size", str(2**20)]
    for name in ("ngram", "suffix"):
        if name.upper() in argv[at + 1 :]:
            small += [f"--speculative-{name}-capacity", str(2**16)]
    args.serve = ["--tool-call-parser", "hermes", *small, *argv[at + 1 :]]
    if torch.cuda.is_available():
        args.serve.append("--enable-deterministic-inference")
    out = asyncio.run(soak(args))
    print(counted(out), f"{len(out.sample)} compared")
    for problem in out.problems[:40]:
        print("PROBLEM", problem)
    return 1 if out.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
