"""draftwing beside SGLang on GPUs: starts both servers, sends both the same waves of requests by turns, prints a table.

    python benchmarks/beside.py --cards 0 --peer-python /opt/sglang/bin/python --out FOLDER [--only 8b,8b-eagle3]
        [--seconds 1500] [--rounds 2] [--peer-env NAME=VALUE] [--peer-args WORDS] [--ours-...]

Cases are in `beside_cases.py` (`--list` shows them with both commands), their models in `random_models.py`. With twice
as many cards as a case needs each server has its own; else both are on the same ones, ours started first, for it
measures what its steps cost; those that have no room beside each other run one after the other. `--peer none`: ours
alone. Every wave is warmed first, by short answers. FOLDER/figures.jsonl gets a line for each wave, or for what went
wrong, as soon as it is known; logs are in FOLDER/logs, models in FOLDER/models, which stay for the next run. The table
is of all lines of the file, medians of rounds; `--seconds 0` prints it alone. Cases whose time is up are left out.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import random_models
from beside_cases import CASES, Case, Work
from chat_servers import Contender, Server
from load_runs import listed

from draftwing.cli.client import ServerError

OURS = "draftwing"
CARDS = "CUDA_VISIBLE_DEVICES"
STOP_SECONDS = 5.0  # that a server has to end in an orderly way
DYING = 2.0  # seconds between its last answer and its end
PAUSE = 2.0  # seconds between asking a server whether it is ready
FAILURES = ServerError, RuntimeError, OSError, http.client.HTTPException, ValueError, KeyError


class TimeUp(Exception):
    """What ran took too long."""


@dataclass
class Run:
    """One call of this program. end: when its time is over, of `time.monotonic`."""

    args: argparse.Namespace
    end: float
    servers: list[Server] = field(default_factory=list)

    def left(self) -> float:
        return self.end - time.monotonic()

    def note(self, **line: Any) -> None:
        """Adds a line to the figures."""
        text = json.dumps(line)
        print(text, flush=True)
        with (self.args.out / "figures.jsonl").open("a") as out:
            out.write(text + "\n")

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Meanwhile signals that ask for an end end the servers, so that nobody waits for answers, and then this."""

        def stop(number: int, _: FrameType | None) -> None:
            self.kill()
            raise SystemExit(128 + number)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def limit(self, seconds: float, server: Server | None = None) -> Iterator[None]:
        """Raises TimeUp after so many seconds, or when the time of the run is over, and ends the server, or all, so
        that nobody waits for answers any more."""

        def up(*_: object) -> None:
            self.kill() if server is None or self.left() <= 0 else server.kill()
            raise TimeUp(f"no end within {seconds:.0f} s")

        seconds = max(min(seconds, self.left() + 0.05), 0.01)
        before = signal.signal(signal.SIGALRM, up)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def contenders(case: Case, folder: Path, args: argparse.Namespace) -> list[Contender]:
    """Returns the servers of a case, ours first."""
    own = args.peer == "none" or len(args.cards) >= 2 * case.cards
    cards = args.cards[: case.cards]
    words = case.our_words(folder, not own and not alone(case, args)) + shlex.split(args.ours_args)
    command = (args.ours_python, "-m", "draftwing", "serve", *words)
    found = [Contender(OURS, command, environ=environ(cards, args.ours_env))]
    if args.peer != "none":
        cards = args.cards[case.cards : 2 * case.cards] if own else cards
        words = case.peer_words(folder) + shlex.split(args.peer_args)
        command = (args.peer_python, "-m", "sglang.launch_server", *words)
        found.append(Contender(args.peer, command, environ=case.peer_environ() | environ(cards, args.peer_env)))
    return found


def alone(case: Case, args: argparse.Namespace) -> bool:
    """Returns whether two servers are not to be on the same cards at once."""
    return case.alone or bool(args.apart)


def environ(cards: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Returns variables of a server. given: NAME=VALUE."""
    return {CARDS: ",".join(cards)} | dict(one.split("=", 1) for one in given)


def apart(some: Sequence[Contender]) -> bool:
    """Returns whether no card is of two of them."""
    cards = [card for one in some for card in one.environ[CARDS].split(",")]
    return len(set(cards)) == len(cards)


def started(run: Run, case: Case, some: Sequence[Contender], stack: ExitStack) -> dict[str, Server]:
    """Starts servers, by name; who gets ready in time stays. Servers of the same cards start after each other."""
    found: dict[str, Server] = {}
    for group in [some] if apart(some) else [[one] for one in some]:
        begun = []
        for one in group:
            log = run.args.out / "logs" / f"{case.name}-{one.name}.log"
            log.unlink(missing_ok=True)
            begun.append(stack.enter_context(Server(one, log, STOP_SECONDS)))
            run.servers.append(begun[-1])
        for server in begun:
            name = server.contender.name
            try:
                seconds = server.ready(lambda server=server: healthy(server), max(min(run.args.start, run.left()), 0))
            except (RuntimeError, TimeoutError) as error:
                if run.left() <= 0:
                    raise TimeUp from None
                failed(run, case, server, "start", error)
            else:
                run.note(case=case.name, engine=name, wave="start", seconds=round(seconds, 1))
                found[name] = server
    return found


def healthy(server: Server) -> None:
    """Raises OSError where a server is not ready."""
    if server.process.poll() is None:
        time.sleep(PAUSE if time.perf_counter() > server.started + PAUSE else 0.1)
    with urllib.request.urlopen(f"{server.url}/health", timeout=5):
        pass


def failed(run: Run, case: Case, server: Server, wave: str, error: Exception) -> None:
    """Notes what went wrong, in the server's words where it has ended; ends it where it does not answer."""
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(DYING)
    ended = server.process.poll()
    said = f"{type(error).__name__}: {error}"[:600]
    if ended is not None or isinstance(error, TimeoutError | TimeUp):
        server.kill()
        why = "did not answer" if ended is None or isinstance(error, TimeUp) else f"ended with exit code {ended}"
        said += f"; {server.contender.name} {why}; its last lines:\n{server.last_words()}"
    run.note(case=case.name, engine=server.contender.name, wave=wave, failed=said)


def ask(run: Run, case: Case, server: Server, work: Work, number: int) -> bool:
    """Sends a wave and notes the figures, or what went wrong; returns whether it went well."""
    try:
        with run.limit(run.args.wave, server):
            figures = work.run(server.url, number)
    except (*FAILURES, TimeUp) as error:
        if run.left() <= 0:
            raise TimeUp from None
        failed(run, case, server, work.label, error)
        return False
    if number >= 0:
        run.note(case=case.name, engine=server.contender.name, wave=work.label, round=number, **figures)
    return True


def measure(run: Run, case: Case, servers: dict[str, Server]) -> None:
    """Sends all waves, in each round to the servers in another order. Who refuses one, or dies of it, is left out."""
    works = list(case.load.works(random_models.vocabulary(random_models.MODELS[case.model].target)))
    refused: set[tuple[str, str]] = set()
    for number in range(-1, run.args.rounds):
        for place, work in enumerate(works):
            first = (number + place) % len(servers)
            for name in (*servers, *servers)[first : first + len(servers)]:
                server = servers[name]
                if server.process.poll() is not None or (name, work.label) in refused:
                    continue
                if not ask(run, case, server, work, number):
                    refused.add((name, work.label))


def folder_of(args: argparse.Namespace, case: Case) -> Path:
    """Returns where the model of a case is."""
    return Path(args.out / "models" / f"{case.model}{f'-{case.adapters}' * bool(case.adapters)}")


def made(run: Run, case: Case, folder: Path) -> bool:
    """Makes a model, in a process of its own, which leaves the cards; returns whether it is there."""
    if (folder / random_models.DONE).exists():
        return True
    words = [sys.executable, random_models.__file__, case.model, str(folder), "--adapters", str(case.adapters)]
    try:
        found = subprocess.run(
            words, env=os.environ | environ(run.args.cards, ()), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=max(run.left(), 0.01),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeUp from None
    if found.returncode:
        run.note(case=case.name, engine="", wave="model", failed=found.stderr[-600:])
    return found.returncode == 0


def one_case(run: Run, case: Case) -> None:
    """Makes the model where it is not there yet, and measures. Raises TimeUp when the time of the run is over."""
    folder = folder_of(run.args, case)
    if not made(run, case, folder):
        return
    every = contenders(case, folder, run.args)
    for some in [every] if apart(every) or not alone(case, run.args) else [[one] for one in every]:
        with ExitStack() as stack:
            stack.callback(run.servers.clear)
            if servers := started(run, case, some, stack):
                measure(run, case, servers)


def cases(run: Run, wanted: Sequence[Case]) -> None:
    """Measures cases while there is time."""
    for place, case in enumerate(wanted):
        if run.args.cards and len(run.args.cards) < case.cards:
            run.note(case=case.name, engine="", wave="", failed=f"left out: it needs {case.cards} cards")
            continue
        try:
            if run.left() <= 0:
                raise TimeUp
            one_case(run, case)
            if run.args.drop_models and folder_of(run.args, case) not in [
                folder_of(run.args, late) for late in wanted[place + 1 :]
            ]:
                shutil.rmtree(folder_of(run.args, case), ignore_errors=True)
        except TimeUp:
            run.kill()
            for late in wanted[place:]:
                run.note(case=late.name, engine="", wave="", failed="left out, all or in part: the time is over")
            return


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the figures in Markdown: medians of rounds, and ratios of ours to the peer's."""
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if "rate" in line:
            found[line["case"], line["wave"]][line["engine"]].append(line)
    peers = list(dict.fromkeys(name for row in found.values() for name in row if name != OURS))
    heads = ["case", "wave", OURS]
    for peer in peers:
        heads += [peer, "ratio"]
    rows = [heads, ["---"] * len(heads)]
    for (case, wave), row in found.items():
        cells = [case, wave, shown(row.get(OURS, []))]
        for peer in peers:
            both = [statistics.median(one["rate"] for one in row[name]) for name in (OURS, peer) if row.get(name)]
            ratio = f"{both[0] / both[1]:.2f}" if len(both) == 2 and both[1] else ""
            cells += [shown(row.get(peer, [])), ratio]
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shown(lines: Sequence[dict[str, Any]]) -> str:
    """Returns tokens per second, and where they were measured milliseconds to the first token and tokens a step."""
    if not lines:
        return ""
    parts = [f"{statistics.median(one['rate'] for one in lines):,.0f}"]
    for key, unit in (("first_ms", " ms"), ("accept_length", " a step")):
        if values := [one[key] for one in lines if one.get(key)]:
            parts.append(f"{statistics.median(values):.4g}{unit}")
    return ", ".join(parts)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of figures so far, but for one whose writing was broken off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("beside"), help="folder of figures, logs and models")
    parser.add_argument("--only", type=listed(str), help="names of cases, with commas")
    parser.add_argument("--cards", type=listed(str), default=["0"], help="as CUDA_VISIBLE_DEVICES has them")
    parser.add_argument("--peer", default="SGLang", help="name of the other server in the table; none: there is none")
    parser.add_argument("--ours-python", default=sys.executable, metavar="PATH", help="interpreter that has draftwing")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="interpreter that has SGLang")
    parser.add_argument("--ours-env", action="append", default=[], metavar="NAME=VALUE", help="several are several")
    parser.add_argument("--peer-env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--ours-args", default="", metavar="WORDS", help="further options, in one string")
    parser.add_argument("--peer-args", default="", metavar="WORDS")
    parser.add_argument("--seconds", type=float, default=86400.0, help="in all")
    parser.add_argument("--start", type=float, default=600.0, help="seconds until a server is ready")
    parser.add_argument("--wave", type=float, default=240.0, help="seconds of one wave at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--apart", action="store_true", help="never two servers on the same cards: these are small")
    parser.add_argument("--drop-models", action="store_true", help="remove each model after its last case")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, every: Sequence[Case] = CASES) -> None:
    args = arguments(words)
    known = {case.name: case for case in every}
    if unknown := set(args.only or ()) - set(known):
        raise SystemExit(f"expected cases of {', '.join(known)}; found {', '.join(sorted(unknown))}")
    wanted = [known[name] for name in args.only] if args.only else list(every)
    if args.list:
        for case in wanted:
            some = contenders(case, folder_of(args, case), args)
            variables = (shlex.join(f"{name}={value}" for name, value in one.environ.items()) for one in some)
            commands = (shlex.join(one.command) for one in some)
            print(case.name, *map(" ".join, zip(variables, commands, strict=True)), sep="\n  ")
        return
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    run = Run(args, time.monotonic() + args.seconds)
    if args.seconds > 0:
        with run.stoppable():
            cases(run, wanted)
    text = table(read(args.out / "figures.jsonl"))
    (args.out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
