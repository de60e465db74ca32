"""How long adapters take to load while others stream, and what gaps these see meanwhile, over HTTP.

    python benchmarks/adapter_loads.py --out FOLDER [--model llama-8b] [--drafts none EAGLE3] [--streams 8] [--rounds 8]
    python benchmarks/adapter_loads.py --url http://127.0.0.1:30000 --admin-key KEY --out FOLDER

Writes a config and adapters of rank 16 on all linear layers, 84 MB each of an 8B model, to FOLDER/NAME-dummy, and
starts `draftwing serve` with weights that it makes itself, without drafts and with. A server of one's own has
`--lora-dir FOLDER/NAME-dummy`. Greedy answers are streamed all the time, one after the other. In each round, `--window`
seconds each or as long as it takes, with another adapter each time:

  nothing             gaps without loads
  load                a load through the administrator's endpoint, to the memory of the host
  one token           a request of one token without an adapter, whose prompt others wait for
  first token         the same with the adapter, whose slot on the device is filled first
  next token          the same once more
  nothing again       as the first
  unload

Prints milliseconds of each, and the longest gap between two events of a stream in its windows: as a ratio to the
median of all gaps without loads, and to the longest of these; and of the longest gaps of single windows the median, as
a ratio to that of windows without loads. A round before them does not count.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import random_models
import torch
from beside_cases import EAGLE3
from chat_servers import Contender, Server
from waves import prompts

from draftwing.cli.client import Client, ServerError

BAR = 1.25  # times the longest gap without loads
REST = 0.2  # seconds between two windows
QUIET, LOAD, PLAIN, FIRST, NEXT, AGAIN, UNLOAD = (
    "nothing", "load", "one token", "first token", "next token", "nothing again", "unload"
)  # fmt: skip


class Seen(NamedTuple):
    """What a window saw. seconds: of what was done.  gaps: of all streams, those that reach into it."""

    seconds: float
    gaps: list[float]


class Streams:
    """Clients that each stream answers, one after the other, until they are asked to stop."""

    def __init__(self, client: Client, every: Sequence[list[int]], tokens: int) -> None:
        self._client, self._tokens, self._stop = client, tokens, False
        self._found: list[list[tuple[float, float]]] = [[] for _ in every]  # of each, when its gaps began and ended
        self._errors: list[str] = []
        pairs = zip(every, self._found, strict=True)
        self._threads = [threading.Thread(target=self._stream, args=pair) for pair in pairs]
        for thread in self._threads:
            thread.start()

    def _stream(self, ids: list[int], found: list[tuple[float, float]]) -> None:
        try:
            while not self._stop:
                before = 0.0
                for _ in self._client.stream("/v1/completions", completion(ids, self._tokens)):
                    now = time.perf_counter()
                    if before:
                        found.append((before, now))
                    before = now
                    if self._stop:
                        return
        except ServerError as error:
            self._errors.append(str(error))

    def wait(self, events: int = 8) -> None:
        """Returns when all have begun. Raises ServerError where one is refused."""
        while min(map(len, self._found)) < events:
            self.check()
            time.sleep(0.01)

    def check(self) -> None:
        if self._errors:
            raise ServerError(self._errors[0])

    def stop(self) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Returns gaps that reach into a time."""
        every = [pair for found in self._found for pair in list(found)]
        return [after - before for before, after in every if after > begin and before < end]


def completion(ids: list[int], tokens: int, adapter: str = "") -> dict[str, Any]:
    """Returns the body of a greedy request of `/v1/completions`, whose events hold what is new."""
    named = {"model": adapter} if adapter else {}
    return {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **named}


def watched(streams: Streams, act: Callable[[], object], window: float) -> Seen:
    """Does something while others stream."""
    begin = time.perf_counter()
    act()
    seconds = time.perf_counter() - begin
    time.sleep(max(0.0, window - seconds))
    end = time.perf_counter()
    time.sleep(REST)
    streams.check()
    return Seen(seconds, streams.gaps(begin, end))


def one_round(client: Client, number: int, vocab: int, args: argparse.Namespace) -> dict[str, Seen]:
    """Returns what was seen, by what was done. number: of the adapter."""
    name, path = f"a{number}", f"a{number}"

    def token(adapter: str, seed: int) -> Callable[[], object]:
        (ids,) = prompts(1, args.prompt, vocab, f"{number} {seed}")
        return lambda: client.post("/v1/completions", completion(ids, 1, adapter))

    load = {"lora_name": name, "lora_path": path}
    acts: dict[str, Callable[[], object]] = {
        QUIET: lambda: None, LOAD: lambda: client.post("/load_lora_adapter", load), PLAIN: token("", 0),
        FIRST: token(name, 1), NEXT: token(name, 2), AGAIN: lambda: None,
        UNLOAD: lambda: client.post("/unload_lora_adapter", {"lora_name": name}),
    }  # fmt: skip
    streams = Streams(client, prompts(args.streams, args.prompt, vocab, f"streams {number}"), args.tokens)
    try:
        streams.wait()
        time.sleep(REST)
        return {what: watched(streams, act, args.window) for what, act in acts.items()}
    finally:
        streams.stop()


def summary(rounds: Sequence[dict[str, Seen]]) -> dict[str, Any]:
    """Returns milliseconds and ratios, by what was done."""
    quiet = [one[what] for one in rounds for what in (QUIET, AGAIN)]
    every = [gap for one in quiet for gap in one.gaps]
    median, longest, usual = statistics.median(every), max(every), statistics.median(max(one.gaps) for one in quiet)
    found: dict[str, Any] = {"gap_median_ms": round(1e3 * median, 3), "gap_longest_ms": round(1e3 * longest, 3)}
    for what in (QUIET, LOAD, PLAIN, FIRST, NEXT, UNLOAD):
        own = quiet if what == QUIET else [one[what] for one in rounds]
        most = max(max(one.gaps) for one in own)
        found[what] = {
            "ms": [round(1e3 * one.seconds, 1) for one in own],
            "longest_gap_ms": round(1e3 * most, 3),
            "to_median": round(most / median, 2),
            "to_longest": round(most / longest, 2),
            "windows": round(statistics.median(max(one.gaps) for one in own) / usual, 2),
        }
    return found


def table(found: dict[str, Any]) -> str:
    lines = [
        "| meanwhile | ms, median | worst | longest gap, ms | to the median | to the longest without | of windows |",
        "|" + "---|" * 7,
    ]
    for what in (QUIET, LOAD, PLAIN, FIRST, NEXT, UNLOAD):
        own = found[what]
        took = [f"{statistics.median(own['ms']):.1f}", f"{max(own['ms']):.1f}"] if what != QUIET else ["", ""]
        figures = [
            f"{own['longest_gap_ms']:.1f}",
            *(f"{own[key]:.2f}" for key in ("to_median", "to_longest", "windows")),
        ]
        lines.append(f"| {' | '.join([what, *took, *figures])} |")
    ratio = found[LOAD]["to_longest"]
    said = "within" if ratio <= BAR else "above"
    return "\n".join([*lines, f"The longest gap of a load is {ratio:.2f} times the longest without: {said} {BAR}"])


@contextmanager
def served(folder: Path, drafts: str, args: argparse.Namespace) -> Iterator[str]:
    """Starts a server; its URL."""
    words = [
        "--model-path", str(folder / "target"), "--load-format", "dummy", "--lora-dir", str(folder),
        "--max-running-requests", str(args.streams + 2), *shlex.split(args.serve),
    ]  # fmt: skip
    words += EAGLE3.words(True, folder) if drafts == "EAGLE3" else ["--speculative-algorithm", drafts]
    contender = Contender(drafts, (sys.executable, "-m", "draftwing", "serve", *words))
    with Server(contender, folder / f"{drafts}.log") as server:

        def health() -> None:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                pass

        server.ready(health, args.start)
        yield server.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for models and results")
    parser.add_argument("--model", default="llama-8b", choices=[n for n, m in random_models.MODELS.items() if m.draft])
    parser.add_argument("--drafts", nargs="+", default=["none", "EAGLE3"], help="of the servers that are started")
    parser.add_argument("--url", help="of a server that runs; without it some are started")
    parser.add_argument("--admin-key", help="of that server's administrator")
    parser.add_argument("--streams", type=int, default=8, help="answers that are streamed at once")
    parser.add_argument("--rounds", type=int, default=8, help="adapters that are loaded")
    parser.add_argument("--window", type=float, default=1.0, help="seconds")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=8000, help="of an answer: prompts of the next make gaps")
    parser.add_argument("--start", type=float, default=300.0, help="seconds that a server may take to start")
    parser.add_argument("--serve", default="", help="more options of the server, as one string")
    args = parser.parse_args()
    folder, device = args.out / f"{args.model}-dummy", "cuda" if torch.cuda.is_available() else "cpu"
    random_models.write(folder, args.model, args.rounds + 1, device, weights=False)
    vocab = random_models.vocabulary(random_models.MODELS[args.model].target)
    for drafts in args.drafts if args.url is None else [args.url]:
        with served(folder, drafts, args) if args.url is None else nullcontext(args.url) as url:
            client = Client(url, args.admin_key)
            rounds = [one_round(client, args.rounds - i, vocab, args) for i in range(args.rounds + 1)]
        found = summary(rounds[1:])
        print(f"{drafts}, {args.streams} streams, {device}\n{table(found)}\n", flush=True)
        with (args.out / "adapter_loads.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"drafts": drafts, "model": args.model, "streams": args.streams} | found) + "\n")


if __name__ == "__main__":
    main()
