"""Runs the same prompts with drafts and without: the text is the same, the time is not.

    python examples/compare_speculation.py [MODEL [ALGORITHM]]

NGRAM, the default, needs no second model: it copies from what was written before.
"""

from __future__ import annotations

import sys
import time

from draftwing import LLM, Completion

PROMPTS = [
    'Repeat this JSON exactly: {"name": "Ada", "born": 1815, "known for": ["notes", "the analytical engine"]}',
    "List 3 countries and their capitals.",
]


def run(model: str, algorithm: str) -> list[Completion]:
    with LLM(model=model, speculative_algorithm=algorithm) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        llm.chat(chats[-1], {"temperature": 0, "max_new_tokens": 16})  # the first steps of a process are slower
        start = time.perf_counter()
        answers = [llm.chat(chat, {"temperature": 0, "max_new_tokens": 96})[0] for chat in chats]
        seconds = time.perf_counter() - start
    tokens = sum(len(answer.token_ids) for answer in answers)
    steps = sum(answer.meta_info["spec_verify_ct"] for answer in answers)
    print(f"{algorithm:>8}: {tokens / seconds:6.1f} tokens per second, {tokens / steps:.2f} per step")
    return answers


def main(model: str = "smollm2", algorithm: str = "NGRAM") -> bool:
    plain, drafted = run(model, "none"), run(model, algorithm)
    same = [answer.token_ids for answer in plain] == [answer.token_ids for answer in drafted]
    print("the text is the same" if same else "the texts differ")
    return same


if __name__ == "__main__":
    main(*sys.argv[1:])
