"""Pictures over HTTP, of any server with /v1/chat/completions: time to the first token and tokens a second after it,
one request after another, then of `--many` requests at once.

    python benchmarks/images_http.py --url draftwing=http://127.0.0.1:30001 --url other=http://... --out FILE

Pictures are made here, and each is sent once, as a data URL with a line of text; servers have the same ones. Figures of
single requests are medians. Two waves of requests at once count; one of each kind that does not comes first.
`beside.py` starts the servers, too.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from chat_servers import chat
from PIL import Image

TEXT = "What is in it?"


def picture(width: int, height: int, seed: int, kind: str) -> str:
    """Returns a data URL. Colours run as those of a photograph, with a little noise."""
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 1, width, dtype=np.float32), np.linspace(0, 1, height, dtype=np.float32))
    waves = [np.sin(rng.uniform(1, 9) * across + rng.uniform(1, 9) * down + rng.uniform(0, 6)) for _ in range(3)]
    noise = rng.integers(-6, 7, (height, width, 1))
    pixels = (127 + 110 * np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    how: dict[str, Any] = {"compress_level": 1} if kind == "PNG" else {"quality": 90}
    Image.fromarray(pixels).save(out, kind, **how)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def ask(url: str, image: str | None, text: str, tokens: int) -> dict[str, float]:
    """Streams an answer. Returns seconds until the first chunk with text and until the end, and tokens/s between the
    first and the last one. Raises HTTPException where it is refused."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": image}})
    found = chat(url, [{"role": "user", "content": parts}], tokens)
    return {
        "first": found.first,
        "whole": found.total,
        "tokens": found.tokens,
        "prompt": found.prompt_tokens,
        "rate": (found.tokens - 1) / (found.last - found.first) if found.last > found.first else 0.0,
    }


def median(found: list[dict[str, float]], key: str) -> float:
    return round(statistics.median(one[key] for one in found), 4)


def one_by_one(url: str, images: Sequence[str | None], tokens: int) -> dict[str, Any]:
    found = [ask(url, image, f"{i} {TEXT}", tokens) for i, image in enumerate(images)]
    return {
        "first_ms": round(1e3 * median(found, "first"), 1),
        "rate": round(median(found, "rate"), 1),
        "prompt": found[0]["prompt"],
        "tokens": found[0]["tokens"],
        "each_ms": [round(1e3 * one["first"], 1) for one in found],
    }


def at_once(url: str, images: list[str], tokens: int) -> dict[str, Any]:
    with ThreadPoolExecutor(len(images)) as threads:
        began = time.perf_counter()
        found = list(threads.map(lambda image: ask(url, image, TEXT, tokens), images))
        took = time.perf_counter() - began
    firsts = sorted(one["first"] for one in found)
    return {
        "first_ms": round(1e3 * statistics.median(firsts), 1),
        "last_first_ms": round(1e3 * firsts[-1], 1),
        "rate": round(sum(one["tokens"] for one in found) / took, 1),
        "seconds": round(took, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", required=True, help="NAME=URL, for each server")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--many", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="small pictures and short answers")
    args = parser.parse_args()
    small, large = ((64, 96), (320, 320)) if args.tiny else ((640, 480), (2048, 2048))
    if args.tiny:
        args.tokens, args.many = 12, 4
    cells = {
        "{}x{} JPEG".format(*small): (*small, "JPEG", 5),
        "{}x{} JPEG".format(*large): (*large, "JPEG", 5),
        "{}x{} PNG".format(*large): (*large, "PNG", 3),
    }
    number = itertools.count()
    made = {
        name: [picture(w, h, next(number), kind) for _ in range(count)] for name, (w, h, kind, count) in cells.items()
    }
    waves = [[picture(*small, next(number), "JPEG") for _ in range(args.many)] for _ in range(3)]
    warm = [picture(w, h, next(number), kind) for w, h, kind, _ in cells.values() for _ in range(2)]
    results: dict[str, Any] = {}
    for name, url in (one.split("=", 1) for one in args.url):
        results[name] = {}
        for what, found in measured(url, warm, made, waves, args.tokens):
            results[name][what] = found
            print(name, what, found, flush=True)
            args.out.write_text(json.dumps(results, indent=1))


def measured(
    url: str, warm: list[str], made: dict[str, list[str]], waves: list[list[str]], tokens: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what was measured of a server, and the figures."""
    for image in warm:
        ask(url, image, TEXT, 16)
    at_once(url, waves[-1], 16)
    yield "text alone", one_by_one(url, [None] * 3, tokens)
    for name, images in made.items():
        yield name, one_by_one(url, images, tokens)
    for i, images in enumerate(waves[:-1]):
        yield f"{len(images)} at once, {i}", at_once(url, images, tokens)


if __name__ == "__main__":
    main()
