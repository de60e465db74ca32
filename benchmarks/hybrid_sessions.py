"""Which share of an agent's tokens comes from the prefix cache, for a model with recurrent layers.

    python benchmarks/hybrid_sessions.py [--at-once 1,4,16] [--drafters none,NGRAM,NEXTN] [option=value ...]

A session starts with a text that all have in common and one of its own. Each turn appends what the last answer said
after its thinking, and the result of a tool; so the end of the last prompt and the whole answer are replaced. Every few
turns the results of the last two tools are rewritten, too. The model is small and random, with the layers of Qwen3.5
(three delta nets, one attention) and a prediction layer, so its text means nothing; all sessions are greedy.

`repeated` are prompt tokens that an earlier prompt of the session, with its answer, began with, and `cached` is the
share of these that were not computed again; a request computes at least one. With drafts every answer is compared with
that of no speculation.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from load_runs import Job, drive, let_go, listed, machine, make_engine, sampling

from draftwing.engine.engine import Engine

VOCAB = 512
OPENING = 3  # ids that the template puts before an answer: role and <think>
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 65536, "attn_output_gate": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1, "eos_token_id": VOCAB - 1, "torch_dtype": "float32",
}  # fmt: skip


def write_small(folder: Path) -> None:
    """Config and tokenizer of the small model; its words are its ids."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf8")
    words = tokenizers.models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


class Lengths(NamedTuple):
    """Tokens. common: that all sessions begin with.  own: of a session's first message.  thinking, said: of an answer.
    result: of a tool, twice that at most."""

    common: int = 1500
    own: int = 300
    thinking: int = 60
    said: int = 20
    result: int = 150


class Session:
    """A conversation: messages whose last ones may change, and all that was computed for it."""

    def __init__(self, number: int, lengths: Lengths) -> None:
        self._rng, self._lengths = random.Random(number), lengths
        common = _ids(random.Random("common"), lengths.common)
        self.messages = [common, _ids(self._rng, lengths.own)]
        self.answers: list[list[int]] = []
        self._known: list[list[int]] = []

    def prompt(self) -> list[int]:
        return [*(token for message in self.messages for token in message), *range(OPENING)]

    def repeated(self, prompt: Sequence[int]) -> int:
        """Tokens that an earlier prompt and its answer began with; the last one of all must be run."""
        return min(max((_common(prompt, one) for one in self._known), default=0), len(prompt) - 1)

    def answered(self, prompt: list[int], answer: list[int], rewrites: bool) -> None:
        """The next turn. rewrites: whether the last messages become others."""
        self.answers.append(answer)
        self._known.append(prompt + answer)
        if rewrites:
            self.messages[-3:] = [self.messages[-3], *(_ids(self._rng, self._lengths.result) for _ in range(2))]
        said = [0, *answer[self._lengths.thinking :]]
        self.messages += [said, _ids(self._rng, self._rng.randint(1, 2) * self._lengths.result)]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(OPENING, VOCAB - 1) for _ in range(count)]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def play(engine: Engine, count: int, turns: int, every: int, lengths: Lengths) -> tuple[dict[str, Any], Any]:
    """So many sessions at once; what came from the cache, and all answers. every: turns after which ends change."""
    assert engine.flush_cache()
    sessions = [Session(number, lengths) for number in range(count)]
    before, total, repeated, cached, seconds, most = engine.stats(), 0, 0, 0, 0.0, 0
    for turn in range(turns):
        prompts = [session.prompt() for session in sessions]
        again = [session.repeated(prompt) for session, prompt in zip(sessions, prompts, strict=True)]
        tokens = lengths.thinking + lengths.said
        jobs = [Job(prompt, sampling(0.0, tokens, number)) for number, prompt in enumerate(prompts)]
        answers, took, _ = drive(engine, jobs, count)
        seconds += took
        for session, prompt, same, answer in zip(sessions, prompts, again, answers, strict=True):
            total, repeated = total + len(prompt), repeated + same
            cached += min(answer.meta["cached_tokens"], same)
            session.answered(prompt, answer.tokens, turn % every == every - 1)
        most = max(most, engine.stats()["snapshot_bytes"])
    after = engine.stats()
    found = {
        "prompt_tokens": total, "repeated": repeated, "share": cached / max(repeated, 1), "seconds": seconds,
        "snapshots": after["snapshots"], "state_slots": after["state_slots"], "snapshot_bytes": most,
    }  # fmt: skip
    counts = {name: after[name] - before[name] for name in ("snapshot_hits", "snapshot_evictions")}
    return found | counts, [session.answers for session in sessions]


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| drafts | sessions | prompt tokens | repeated | cached | snapshots | MB | hits | evicted | s | text |",
        "|---" * 11 + "|",
    ]
    for one in results:
        text = {None: "", True: "same", False: "DIFFERENT"}[one["same"]]
        lines.append(
            f"| {one['drafter']} | {one['sessions']} | {one['prompt_tokens']} | {one['repeated']} | {one['share']:.1%} "
            f"| {one['snapshots']} of {one['state_slots']} | {one['snapshot_bytes'] / 1e6:.1f} "
            f"| {one['snapshot_hits']} | {one['snapshot_evictions']} | {one['seconds']:.1f} | {text} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="another one, with its weights; none are read of the small one")
    parser.add_argument("--at-once", type=listed(int), default=[1, 4, 16])
    parser.add_argument("--drafters", type=listed(str), default=["none", "NGRAM", "NEXTN"], help="none first")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rewrite-every", type=int, default=4, help="turns")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", metavar="option=value", help="of all engines")
    args = parser.parse_args()
    args.draft, results, texts = [], list[dict[str, Any]](), dict[int, Any]()
    with tempfile.TemporaryDirectory() as folder:
        more = {}
        if args.model is None:
            args.model, more = folder, {"load_format": "dummy"}
            write_small(Path(folder))
        for drafter in args.drafters:
            engine = make_engine(args, drafter, **more)
            if engine is None:
                continue
            for count in args.at_once:
                found, answers = play(engine, count, args.turns, args.rewrite_every, Lengths())
                same = None if drafter == "none" or count not in texts else answers == texts[count]
                texts.setdefault(count, answers)
                results.append({"drafter": drafter, "sessions": count, "same": same, **found})
                print(results[-1], flush=True)
            let_go(engine)
    if args.out:
        about = {"machine": machine(), "options": args.options, "date": time.strftime("%Y-%m-%d")}
        args.out.write_text(json.dumps(about | {"runs": results}, indent=1), encoding="utf8")
    print(table(results))


if __name__ == "__main__":
    main()
