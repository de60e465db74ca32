"""Attacks a server with connections that have no key, and prints what others feel of each attack.

    python tools/attacks.py [--pictures] [--model smollm2] [--seconds 6] [--only WORDS] [-- OPTIONS OF draftwing serve]

For each attack a line: the longest time that /health took, and the 99th percentile of the gaps between the events of a
stream, alone and attacked, one right after the other. Without `--model` the engine is a stand-in whose step takes 20 ms
and no processor. With `--pictures` a client with a key of its own sends these, and a `--model` has to read them.
The exit code is 1 where /health took more than 250 ms or the gaps more than 1.25 times as long.
Meant for a machine without other work; the attackers are a process of the lowest priority.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "server")]

from attacked import attacked  # noqa: E402
from attackers import ATTACKS, OPEN, attacking, feel  # noqa: E402
from picture_attacks import FETCHED, PICTURES  # noqa: E402
from picture_attacks import KEY as ATTACKER  # noqa: E402

from draftwing.utils import launch_server_cmd, terminate_process, wait_for_server  # noqa: E402

KEY = "right"
HEALTH, RATIO = 0.25, 1.25  # the most, in seconds and as a multiple
MEMORY = 4 << 30  # bytes of the stand-in's server: 64 bodies of 32 MiB may be held at once
LEAD_SECONDS = 0.5  # seconds that an attack has begun before


@contextlib.contextmanager
def serving(model: str | None, serve: list[str], keys: str | None = None, pictures: bool = False) -> Iterator[int]:
    """The port of a server. keys: of its clients, a file; None: anybody may use it."""
    if model is None:
        more = {"allow_image_urls": ("*",)} if pictures else {}
        with attacked(options={"api_key_file": keys, **more}, pause=0.02, pictures=pictures, memory=MEMORY) as server:
            yield server.port
        return
    serve = [*serve, "--log-level", "error", *([] if keys is None else ["--api-key-file", keys])]
    process, port = launch_server_cmd(shlex.join(["python", "-m", "draftwing.launch_server", "--model", model, *serve]))
    try:
        wait_for_server(f"http://127.0.0.1:{port}", process=process)
        yield port
    finally:
        terminate_process(process)


@contextlib.contextmanager
def key_file() -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(f'[client]\nkey = "{KEY}"\n[attacker]\nkey = "{ATTACKER}"\n')
        file.flush()
        yield file.name


def line(name: str, port: int, seconds: float, connections: int, key: str) -> bool:
    """Prints what is felt of an attack. Whether that is little."""
    alone = feel(port, seconds, key)
    with attacking(name, port, seconds + LEAD_SECONDS + 5, connections):
        time.sleep(LEAD_SECONDS)
        felt = feel(port, seconds, key)
    time.sleep(1.5)  # those who are held leave
    ratio, health = felt.late / alone.late, max(felt.health)
    bad = ratio > RATIO or health > HEALTH
    print(
        f"| {name} | {1e3 * health:.0f} | {1e3 * alone.late:.1f} | {1e3 * felt.late:.1f} | {ratio:.2f} |"
        + (" TOO MUCH" if bad else ""),
        flush=True,
    )
    return not bad


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="of `draftwing serve`; none: a stand-in for the engine")
    parser.add_argument("--pictures", action="store_true", help="attacks with pictures in place of the others")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--only", default="", help="attacks whose names have these words")
    args = parser.parse_args(argv[:at])
    print("| attack | /health, longest, ms | gaps alone, 99%, ms | attacked, 99%, ms | ratio |\n|---|---|---|---|---|")
    good, more = True, argv[at + 1 :]
    keyed = [*(PICTURES | ({} if args.model else FETCHED) if args.pictures else ATTACKS)]
    with key_file() as keys, serving(args.model, more, keys, args.pictures) as port:
        feel(port, 1.0, KEY)
        for name in keyed:
            if args.only in name:
                good &= line(name, port, args.seconds, args.connections, KEY)
    for name in OPEN if not args.pictures else ():
        if args.only in name:
            with serving(args.model, more) as port:
                feel(port, 1.0)
                good &= line(name, port, args.seconds, args.connections, "")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
