"""Waves of requests with a picture each: what they wait for, by what a tower takes for one and how fast they come. The
engine's own scheduler, an 8B model on an H200, no drafts.

    python benchmarks/sim/pictures.py [--requests 32] [--prompt 317] [--answer 128]

Towers run one after the other, before the forward of the chunk that has the picture's first tokens, and hold up the
host as long as the device, as work does that takes longer to launch than to do. Figures are of the third wave.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

from served import OnH200, request

from draftwing.core import Plan, StepResult

TOWERS, SPACINGS = (0.0, 5.0, 10.0, 20.0, 40.0), (1.0, 8.0, 20.0)  # milliseconds
BEFORE = 4  # tokens of a prompt before its picture
WAVES = 3


class Pictures(OnH200):
    def __init__(self, tower: float) -> None:
        """tower: seconds for a picture."""
        super().__init__(drafts=False, mixed=True)
        self.tower = tower

    def step(self, plan: Plan) -> tuple[StepResult, float]:
        result, launch = super().step(plan)
        chunks = plan.chunks if plan.mixed_prefill is None else plan.mixed_prefill.chunks
        towers = self.tower * sum(chunk.start <= BEFORE < chunk.start + chunk.length for chunk in chunks)
        return replace(result, seconds=result.seconds + towers), launch + towers


def wave(tower: float, spacing: float, requests: int, prompt: int, answer: int) -> tuple[list[float], float]:
    """Returns seconds to the first token of each request, ascending, and to the end. spacing: seconds between them."""
    served, rng, began = Pictures(tower), random.Random(1), 0.0
    for number in range(WAVES):
        served.now = began = served.now + 1
        served.began.clear()
        for i in range(requests):
            tokens = [rng.randrange(1000) for _ in range(prompt)]
            served.todo.append((began + spacing * i, request(f"{number} {i}", tokens, answer)))
        served.run()
    return sorted(first - began for first in served.began.values()), served.now - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=317, help="tokens, those of the picture included")
    parser.add_argument("--answer", type=int, default=128, help="tokens")
    args = parser.parse_args()
    print("tower  one each  first tokens: median   last   tokens/s")
    for tower in TOWERS:
        for spacing in SPACINGS:
            firsts, whole = wave(tower / 1e3, spacing / 1e3, args.requests, args.prompt, args.answer)
            median, last = 1e3 * firsts[len(firsts) // 2], 1e3 * firsts[-1]
            rate = args.requests * args.answer / whole
            print(f"{tower:2.0f} ms   {spacing:4.0f} ms           {median:8.0f} {last:8.0f}  {rate:8,.0f}", flush=True)


if __name__ == "__main__":
    main()
