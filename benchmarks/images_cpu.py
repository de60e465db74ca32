"""Pictures on a CPU beside llama.cpp: time to the first token, of the tower and of the prompt apart, and tokens a
second after it.

    python benchmarks/images_cpu.py --out result.json [--size 0.8B] [--quantised Q8_0] [--pictures none,640x480]

Files have the shapes of Qwen3.5 and random weights (`hybrid_cpu.py`), with a tower in 16 bits beside them (`mmproj`).
Both serve over HTTP, without drafts and cached prefixes, and take turns; each round has another picture. What the tower
takes is, of ours, how much sooner the same picture has its first token when it is sent again, with its features known;
of llama.cpp, what its log says. A picture `none` is text alone. A figure is the median of the rounds, a ratio the
median of the rounds' ratios; each round is printed and kept as soon as it ends. `llama_cpp_build.py` says what a build
of llama.cpp needs; `--contenders draftwing` leaves it out.

`--gaps` measures ours alone, and something else: how long somebody who is being answered waits for a token at most
while a picture is read for another one, beside how long a token takes without.

What a tower takes grows with the square of the pixels: on two cores a round of both takes some 15 s with 640x480 at
0.8B, but four minutes with 2304x1728. `--rounds 1` is enough for these, and `--files FOLDER` keeps the files.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from chat_servers import Contender, Server, draftwing_server, llama_server
from gguf import GGUFWriter
from gguf_files import IMAGE_TOKENS, MIXTURES, finish
from hybrid_cpu import SIZES, write_random
from llama_cpp_build import CACHE, ISAS, VERSION, build
from load_runs import listed, machine
from PIL import Image

OURS, LLAMA, NONE = "draftwing", "llama.cpp", "none"
MARKER = "<picture>"  # stands for one in prompts of llama.cpp
TEXT = "ab" * 12, "ba" * 12  # before a picture and behind it
LOUD = "-np", "1", "-lv", "4"  # else it does not say what a tower takes
STAMP = r"(\d+)\.(\d+)\.(\d+)\.\d+ I "  # minutes, seconds, milliseconds
ENCODED = re.compile(rf"{STAMP}.*encoding mtmd batch.*\n(?:.*\n)*?{STAMP}.*decoding image batch 1/")
PATCH, MERGE, SIDE = 16, 2, 48  # of towers; SIDE**2 positions are learned


class TowerSize(NamedTuple):
    depth: int
    hidden: int
    heads: int
    ffn: int


TOWERS = {"0.8B": TowerSize(12, 768, 12, 3072), "4B": TowerSize(24, 1024, 16, 4096)}


class Seen(NamedTuple):
    """first, tower, prompt: seconds to the first token, and their two parts.  rate: tokens a second behind it."""

    first: float
    tower: float
    prompt: float
    rate: float


def write_projector(path: Path, size: TowerSize, width: int) -> None:
    """Writes a tower with random weights. width: the hidden size of the language model."""
    rng, writer = np.random.default_rng(1), GGUFWriter(path, "clip")
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "projection_dim": width, "embedding_length": size.hidden, "feed_forward_length": size.ffn,
        "block_count": size.depth, "attention.head_count": size.heads, "patch_size": PATCH, "spatial_merge_size": MERGE,
        "image_size": SIDE * PATCH, "image_min_pixels": 65536, "image_max_pixels": 1 << 24,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    writer.add_array("clip.vision.is_deepstack_layers", [False] * size.depth)

    def linear(name: str, rows: int, *columns: int, kind: Any = np.float16) -> None:
        values = rng.standard_normal((rows, *columns), np.float32) / np.prod(columns) ** 0.5
        writer.add_tensor(f"{name}.weight", values.astype(kind))
        writer.add_tensor(f"{name}.bias", np.zeros(rows, np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size.hidden, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(size.hidden, np.float32))

    hidden, merged = size.hidden, MERGE**2 * size.hidden
    linear("v.patch_embd", hidden, 3, PATCH, PATCH)
    second = rng.standard_normal((hidden, 3, PATCH, PATCH), np.float32) / (3 * PATCH**2) ** 0.5
    writer.add_tensor("v.patch_embd.weight.1", second.astype(np.float16))
    writer.add_tensor("v.position_embd.weight", rng.standard_normal((SIDE**2, hidden), np.float32) / 10)
    for block in range(size.depth):
        here = f"v.blk.{block}"
        norm(f"{here}.ln1"), norm(f"{here}.ln2")
        linear(f"{here}.attn_qkv", 3 * hidden, hidden)
        linear(f"{here}.attn_out", hidden, hidden)
        linear(f"{here}.ffn_up", size.ffn, hidden)
        linear(f"{here}.ffn_down", hidden, size.ffn)
    norm("v.post_ln")
    linear("mm.0", merged, merged)
    linear("mm.2", width, merged)
    finish(writer)


def picture(width: int, height: int, seed: int) -> str:
    """A PNG file in base64. Its colours run, as those of a photograph."""
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = [np.sin(rng.uniform(1, 9) * across + rng.uniform(1, 9) * down + rng.uniform(0, 6)) for _ in range(3)]
    pixels = (127 + 120 * np.stack(waves, -1)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return base64.b64encode(out.getvalue()).decode()


def timed(server: Server, path: str, body: dict[str, Any], tokens: int) -> tuple[float, float]:
    """Returns seconds to the first token, and tokens a second behind it."""
    began, times = time.perf_counter(), []
    with server.answer(path, body | {"stream": True}) as response:
        times = [time.perf_counter() - began for line in response if line.startswith(b"data: {")]
    return times[0], (tokens - 1) / (times[-1] - times[0]) if tokens > 1 else 0.0


def ask_ours(server: Server, data: str, tokens: int) -> Seen:
    """data: of the picture; empty: none."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"text": "".join((TEXT[0], *IMAGE_TOKENS * bool(data), TEXT[1])), "sampling_params": sampling}
    if not data:
        first, rate = timed(server, "/generate", body, tokens)
        return Seen(first, 0.0, first, rate)
    body["image_data"] = data
    first, _ = timed(server, "/generate", body | {"sampling_params": sampling | {"max_new_tokens": 1}}, 1)
    again, rate = timed(server, "/generate", body, tokens)
    return Seen(first, first - again, again, rate)


def ask_llama(server: Server, data: str, tokens: int) -> Seen:
    """As `ask_ours`."""
    prompt = {"prompt_string": MARKER.join(TEXT), "multimodal_data": [data]} if data else "".join(TEXT)
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    before = server.log.stat().st_size
    first, rate = timed(server, "/completion", body, tokens)
    if not data:
        return Seen(first, 0.0, first, rate)
    time.sleep(0.2)  # it writes its log beside its work
    said = server.log.read_bytes()[before:].decode(errors="replace")
    found = ENCODED.search(said)
    if found is None:
        raise RuntimeError(f"{LLAMA} did not say how long it read a picture: see {server.log}")
    began, ended = (60 * a + b + c / 1000 for a, b, c in (map(int, found.groups()[i : i + 3]) for i in (0, 3)))
    return Seen(first, ended - began, first - (ended - began), rate)


ASK: dict[str, Callable[[Server, str, int], Seen]] = {OURS: ask_ours, LLAMA: ask_llama}


def contenders(args: argparse.Namespace, file: Path, projector: Path) -> list[Contender]:
    named, found = ("--mmproj", str(projector)), []
    if OURS in args.contenders:
        more = (*named, "--speculative-algorithm", "none", "--context-length", str(args.context))
        room = max(2 * args.context, 32768)  # a recurrent state takes as much memory as 1,600 tokens
        found.append(draftwing_server(OURS, str(file), args.threads, room, args.isa, *more))
    if LLAMA in args.contenders:
        theirs = llama_server(LLAMA, build(args.isa, args.cache), file, args.threads, args.context, *LOUD, *named)
        found.append(Contender(theirs.name, theirs.command, environ={"LLAMA_MEDIA_MARKER": MARKER}))
    return [replace(one, patience=args.patience) for one in found]


def measure(args: argparse.Namespace, file: Path, projector: Path) -> None:
    """Runs the rounds of each contender, by the picture's size."""
    found: dict[str, dict[str, list[Seen]]] = {}
    logs = Path(tempfile.mkdtemp(prefix="logs-"))  # which stay, for errors name them
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(one, logs / f"{one.name}.log")) for one in contenders(args, file, projector)
        ]
        small = picture(256, 256, 0)
        for server in servers:
            server.ready(lambda server=server: ASK[server.contender.name](server, small, 2))
        for size in args.pictures:
            rounds = found[size] = {server.contender.name: [] for server in servers}
            for number in range(1, args.rounds + 1):
                shown = "" if size == NONE else picture(*map(int, size.split("x")), number)
                for server in servers:
                    name = server.contender.name
                    seen = ASK[name](server, shown, args.tokens)
                    rounds[name].append(seen)
                    print(f"{args.size} {size} round {number} {name}:", in_words(seen._asdict()), flush=True)
                write(args, found)
            for name, figures in summary(rounds).items():
                print(f"{args.size} {size} {name}:", in_words(figures), flush=True)


def gaps(args: argparse.Namespace, file: Path, projector: Path) -> None:
    """Prints the usual and the longest seconds between tokens of one request while pictures of others are read."""
    (ours,) = contenders(argparse.Namespace(**{**vars(args), "contenders": [OURS]}), file, projector)
    with Server(ours, Path(tempfile.mkdtemp(prefix="logs-")) / "log") as server:
        small = picture(256, 256, 0)
        server.ready(lambda: ask_ours(server, small, 2))
        for size in args.pictures:
            body = {"text": TEXT[0], "stream": True}
            body["sampling_params"] = {"max_new_tokens": args.context - 256, "temperature": 0, "ignore_eos": True}
            with server.answer("/generate", body) as response, ThreadPoolExecutor(1) as pool:
                times = [time.perf_counter() for _ in itertools.islice(_events(response), args.tokens)]
                shown = picture(*map(int, size.split("x")), 1)
                asked = pool.submit(ask_ours, server, shown, 1)
                while not asked.done():
                    next(_events(response))
                    times.append(time.perf_counter())
                alone, beside = np.diff(times[: args.tokens]), np.diff(times[args.tokens :])
                found = {"alone": np.median(alone), "usual": np.median(beside), "longest": beside.max()}
                print(f"{args.size} {size} gaps:", in_words(found | {"first": asked.result().first}), flush=True)


def _events(response: Iterable[bytes]) -> Iterator[bytes]:
    return (line for line in response if line.startswith(b"data: {"))


def in_words(figures: dict[str, float]) -> str:
    return ", ".join(f"{field} {value:.3g}" for field, value in figures.items())


def summary(rounds: dict[str, list[Seen]]) -> dict[str, Any]:
    """By contender: medians of each figure, and of ours how many times as fast as llama.cpp it is."""
    found: dict[str, Any] = {
        name: {field: statistics.median(getattr(one, field) for one in own) for field in Seen._fields}
        for name, own in rounds.items()
    }
    if OURS in rounds and LLAMA in rounds:
        pairs = [*zip(rounds[OURS], rounds[LLAMA], strict=True)]
        found["ratio"] = {
            field: statistics.median(getattr(theirs, field) / getattr(ours, field) for ours, theirs in pairs)
            for field in Seen._fields[:-1]
            if getattr(rounds[OURS][0], field)
        } | {"rate": statistics.median(ours.rate / theirs.rate for ours, theirs in pairs)}
    return found


def write(args: argparse.Namespace, found: dict[str, dict[str, list[Seen]]]) -> None:
    if args.out:
        results = {size: summary(rounds) for size, rounds in found.items()}
        about = {
            "machine": machine(), "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg(), "size": args.size,
            "kind": args.quantised, "llama_cpp_python": VERSION, "rounds": found, "results": results,
        }  # fmt: skip
        args.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=TOWERS, default="0.8B")
    parser.add_argument("--quantised", choices=MIXTURES, default="Q4_K")
    parser.add_argument("--pictures", type=listed(str), default=[NONE, "640x480", "1920x1080"])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", type=listed(str), default=[*ASK])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--isa", choices=ISAS, default="native")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of builds of llama.cpp")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds that a client waits for a first token")
    parser.add_argument("--gaps", action="store_true", help="those of others while pictures are read")
    parser.add_argument("--files", type=Path, help="a folder that keeps the files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = args.files or Path(folder)
        file, projector = (place / f"{name}-{args.size}.gguf" for name in (f"random-{args.quantised}", "mmproj"))
        if not file.exists():
            write_random(file, SIZES[args.size], MIXTURES[args.quantised], 32768)
        if not projector.exists():
            write_projector(projector, TOWERS[args.size], SIZES[args.size].hidden)
        (gaps if args.gaps else measure)(args, file, projector)


if __name__ == "__main__":
    main()
