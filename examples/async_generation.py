"""Streams one answer while others are generated in the same batch, with asyncio and without a server.

    python examples/async_generation.py [MODEL]

MODEL is an alias (smollm2, the default), a hub id, or a folder.
"""

from __future__ import annotations

import asyncio
import sys

from draftwing import AsyncLLM

PROMPTS = ["The capital of France is", "Water boils at"]
GREEDY = {"temperature": 0, "max_new_tokens": 24}


async def main(model: str = "smollm2") -> None:
    async with AsyncLLM(model) as llm:
        others = [asyncio.create_task(llm.generate(prompt, GREEDY)) for prompt in PROMPTS]
        async for piece in llm.stream("Once upon a time", GREEDY):
            print(piece.text, end="", flush=True)
        print()
        for prompt, answer in zip(PROMPTS, await asyncio.gather(*others), strict=True):
            print(f"{prompt!r} -> {answer.text!r}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
