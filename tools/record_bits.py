"""Records texts and log probabilities of every family, format, cache and drafter, bit for bit, and compares records.

    python tools/record_bits.py make --folder DIR                    # writes the checkpoints, 280 MB, once
    python tools/record_bits.py record --folder DIR --out before.json
    python tools/record_bits.py record --folder DIR --out after.json [--only WORD]
    python tools/record_bits.py compare before.json after.json       # names what differs; exit status 1 if any

For a change of the code that must not change one bit. `make` needs the helpers of tests; `record` runs the package that
Python imports (`PYTHONPATH=src`) with those files, through `LLM` and its options alone, in one thread on the CPU. Its
steps depend on no clock: drafts have a fixed shape, and salts are known. A case that fails is recorded as its error;
those whose text with drafts is not the text without are named at the end, and make the exit status 1.

`bit_cases.py` lists the cases. Those of a group run in processes of their own, with the group's instruction set; one
that says nothing for two minutes is ended, which costs the case that it was at.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, groupby
from pathlib import Path
from typing import Any

from bit_cases import ALIAS, Case, all_cases, environment
from bit_models import DRAFT, INDEX, TOKENIZER, TOKENS, make

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"  # with a drafter of a user's own
NEW = 24  # tokens of an answer
LENGTHS = (7, 90, 300)  # of prompts
BATCH = 300  # cases of one process at most
SILENCE = 120.0  # seconds
ENGINE: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "max_total_tokens": 2048, "max_running_requests": 4, "chunked_prefill_size": 128,
    "random_seed": 1, "sampling_defaults": "openai", "log_level": "error",
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
LOGGED: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 5, "use_tqdm": False}
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
# Fields of a request, and options of its call.
ASKED_FOR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frequency": ({"frequency_penalty": 0.5, "presence_penalty": 0.3}, {}),
    "repetition": ({"repetition_penalty": 1.3}, {}),
    "dry": ({"dry_multiplier": 0.8}, {}),
    "bias": ({"logit_bias": {"5": 2.0, "7": -3.0}}, {}),
    "top": ({"temperature": 0.8, "sampling_seed": 1, "top_p": 0.8, "top_k": 20}, {}),
    "min_p": ({"temperature": 1.5, "sampling_seed": 2, "min_p": 0.05}, {}),
    "allowed": ({"temperature": 1.0, "sampling_seed": 3, "allowed_token_ids": [*range(1, 40, 2)]}, {}),
    "penalties and seed": ({"temperature": 0.9, "sampling_seed": 4, "frequency_penalty": 0.4, "top_k": 30}, {}),
    "stops": ({"min_new_tokens": 5, "stop_token_ids": [*range(12)]}, {}),
    "n": ({"temperature": 1.2, "sampling_seed": 5, "n": 2}, {}),
    "regex": ({"ignore_eos": False, "temperature": 0.7, "sampling_seed": 6, "regex": "[a-f]{4}( [0-9]{2})*"}, {}),
    "schema": ({"ignore_eos": False, "temperature": 1.0, "sampling_seed": 7, "json_schema": SCHEMA}, {}),
    "prediction": ({}, {"prediction": "a text that nobody writes, with a few tokens"}),
    "no drafts": ({}, {"speculative": "off"}),
    "token ids": ({}, {"token_ids_logprob": [1, 2, 3]}),
    "hidden states": ({}, {"return_hidden_states": True}),
}
TEXTS = [  # for the default model
    "The capital of France is",
    "".join(f"{day}: open from 9 am to 5 pm.\n" for day in ("Monday", "Tuesday", "Wednesday", "Thursday")) + "Friday:",
    "def add(a, b):\n    return a + b\n\n\n" * 12 + "def sub(a, b):\n",
]


# --- one case --------------------------------------------------------------------------------------------------------


def answers_of(folder: Path, index: Mapping[str, Any], case: Case) -> dict[str, Any]:
    """Runs a case; returns what it was answered, by call."""
    from draftwing import LLM

    known_salts()
    options, model, prompts = {**ENGINE, **case.options}, ALIAS, list[Any](TEXTS)
    if case.model != ALIAS:
        entry = index[case.model]
        prompts = prompts_for(entry["vocab"], min(entry["context"], case.options.get("context_length", 1 << 30)))
        model, options["tokenizer_path"] = str(folder / entry["path"]), str(folder / TOKENIZER)
    for key in (DRAFT, TOKENS):
        if key in options:
            options[key] = str(folder / options[key])
    with LLM(model, **options) as llm:
        return dict(ASKED[case.asks](llm, prompts))


def usual(llm: Any, prompts: list[Any]) -> Iterator[tuple[str, Any]]:
    """Greedy and sampled answers; then two whose prompts are cached, and whose text lookups know; then a prompt's."""
    seeded = {**GREEDY, "temperature": 2.0, "sampling_seed": 5}
    first = llm.generate([*prompts, prompts[1]], [GREEDY] * len(prompts) + [seeded], **LOGGED)
    yield "first", [told(one) for one in first]
    fewer, more = {**GREEDY, "max_new_tokens": NEW // 2}, {**seeded, "max_new_tokens": NEW // 2}
    longer = [*first[1].prompt_token_ids, *first[1].token_ids[:4]]
    again = llm.generate([prompts[1], longer], [fewer, more], return_logprob=True, use_tqdm=False)
    yield "again", [told(one) for one in again]
    ask = {"return_logprob": True, "logprob_start_len": 0, "use_tqdm": False}
    yield "prompt", [told(one) for one in llm.generate([prompts[-1]], {**GREEDY, "max_new_tokens": 1}, **ask)]


def fields(llm: Any, prompts: list[Any]) -> Iterator[tuple[str, Any]]:
    """Each of `ASKED_FOR`, then a conversation."""
    for name, (wanted, call) in ASKED_FOR.items():

        def ask(wanted: dict[str, Any] = wanted, call: dict[str, Any] = call) -> Any:
            return [told(one) for one in llm.generate(prompts[:2], {**GREEDY, **wanted}, **LOGGED, **call)]

        yield name, attempted(ask)
    chat = [{"role": "user", "content": "Name two colours."}]
    yield "chat", attempted(lambda: [told(one) for one in llm.chat(chat, GREEDY, **LOGGED)])


ASKED: dict[str, Callable[[Any, list[Any]], Iterator[tuple[str, Any]]]] = {"usual": usual, "fields": fields}


def attempted(ask: Callable[[], Any]) -> Any:
    """Returns what it gives, or its error."""
    try:
        return ask()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def told(answer: Any) -> dict[str, Any]:
    """All of an answer that is the same each time: numbers as the hexadecimal digits of floats."""
    meta = answer.meta_info
    found = {
        "tokens": answer.token_ids, "text": answer.text, "finish": answer.finish_reason,
        "cached": meta["cached_tokens"], "retractions": meta["num_retractions"],
        "drafts": {key: value for key, value in meta.items() if key.startswith("spec_")},
    }  # fmt: skip
    for key in ("output_token_logprobs", "input_token_logprobs"):
        if meta.get(key):
            found[key] = [f"{token}:{exact(value)}" for value, token, _ in meta[key]]
    for key in ("output_top_logprobs", "output_token_ids_logprobs"):
        if meta.get(key):
            found[key] = [" ".join(f"{token}:{exact(value)}" for value, token, _ in row) for row in meta[key] if row]
    if meta.get("hidden_states"):  # of which there are many
        found["hidden_states"] = hashlib.sha256(json.dumps(digits(meta["hidden_states"])).encode()).hexdigest()
    return found


def exact(value: float | None) -> str | None:
    return None if value is None else float(value).hex()


def digits(value: Any) -> Any:
    """The same with floats as `exact` has them."""
    if isinstance(value, float):
        return exact(value)
    return [digits(one) for one in value] if isinstance(value, list | tuple) else value


def prompts_for(vocab: int, context: int) -> list[list[int]]:
    """Token ids, of as many as the context has room for; the second prompt repeats itself."""
    drawn = random.Random(7)
    sizes = [min(length, (context - NEW - 1) // (1 + (length < LENGTHS[-1]))) for length in LENGTHS]
    short, middle, long = ([drawn.randrange(vocab) for _ in range(size)] for size in sizes)
    return [short, (middle[: -(-len(middle) // 2)] * 2)[: len(middle)], long]


def known_salts() -> None:
    """Gives the module `secrets` the same numbers in each case. Before the package is imported, too."""
    drawn, numbers = random.Random(3), count()
    secrets.randbits = drawn.getrandbits
    secrets.token_bytes = lambda size=32: drawn.randbytes(size)  # type: ignore[assignment]
    secrets.token_hex = lambda size=32: f"{next(numbers):0{2 * size}x}"  # type: ignore[assignment]


# --- processes -------------------------------------------------------------------------------------------------------


def child(folder: Path, out: Path) -> None:
    """Runs the cases that stdin names, and writes a line of JSON for each."""
    known_salts()
    importlib.metadata.entry_points = cache(importlib.metadata.entry_points)  # which takes as long as a tiny model
    sys.path.append(str(EXAMPLES))
    index = json.loads((folder / INDEX).read_text())
    by_name = {case.name: case for case in all_cases(index)}
    with out.open("a") as file:
        for name in json.load(sys.stdin):
            begin, case = time.perf_counter(), by_name[name]
            found = attempted(lambda case=case: answers_of(folder, index, case))  # type: ignore[misc]
            if "error" in found:
                found["error"] = found["error"].replace(str(folder), "FOLDER")
            file.write(json.dumps([name, found, round(time.perf_counter() - begin, 2)]) + "\n")
            file.flush()


def answered(folder: Path, cases: Sequence[Case], log: Any) -> Iterator[tuple[str, Any, float]]:
    """Runs cases of one group in a process, and in further ones where it ends before its time."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment(cases[0].group)}
    names = [case.name for case in cases]
    while names:
        with tempfile.TemporaryDirectory() as own:
            part = Path(own) / "part"
            part.touch()
            command = [sys.executable, __file__, "child", "--folder", str(folder), "--out", str(part)]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=variables, text=True, start_new_session=True
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(names))
            process.stdin.close()
            try:
                ended = watched(process, part)
            finally:
                stop(process)
            found = [json.loads(line) for line in part.read_text().splitlines() if line.endswith("]")]
        yield from found
        names = names[len(found) :]
        if names:
            yield names.pop(0), {"error": ended}, 0.0


def watched(process: subprocess.Popen[str], part: Path) -> str:
    """Waits until it ends or writes nothing for too long; returns how it ended."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        if part.stat().st_size != size:
            size, since = part.stat().st_size, time.monotonic()
        if time.monotonic() - since > SILENCE:
            return f"no answer in {SILENCE:.0f} s"
        time.sleep(0.1)
    return f"the process ended with status {process.returncode}"


def stop(process: subprocess.Popen[str]) -> None:
    """Ends it, with its processes of ranks, if it runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def record(folder: Path, out: Path, only: str) -> int:
    """Records all cases whose names have the word, and says what to look at."""
    cases = [case for case in all_cases(json.loads((folder / INDEX).read_text())) if only in case.name]
    cases.sort(key=lambda case: case.group)
    found, seconds, begin = dict[str, Any](), Counter[str](), time.monotonic()
    with out.with_suffix(".log").open("w") as log:
        for group, its in groupby(cases, key=lambda case: case.group):
            every, start = [*its], time.monotonic()
            for first in range(0, len(every), BATCH):
                for name, answers, took in answered(folder, every[first : first + BATCH], log):
                    found[name] = answers
                    seconds[name] += took  # type: ignore[assignment]
                out.write_text(json.dumps({"cases": found, "seconds": seconds}, indent=0))
            failed = sum("error" in found[case.name] for case in every)
            print(f"{group}: {len(every)} cases, {failed} errors, {time.monotonic() - start:.0f} s", flush=True)
    for name, answers in found.items():
        if "error" in answers:
            print(f"error: {name}: {answers['error']}")
    other = [case.name for case in cases if not same_texts(case, found)]
    for name in other:
        print(f"text with drafts is not the text without: {name}")
    print(f"{len(found)} cases, {time.monotonic() - begin:.0f} s")
    return bool(other)


def same_texts(case: Case, found: Mapping[str, Any]) -> bool:
    """Whether a case that drafts has the tokens of the one that does not; True if there is none."""
    pair = found.get(case.like, {"error": ""}), found[case.name]
    if not case.like or any("error" in one for one in pair):
        return True
    texts = [
        [[answer["tokens"] for answer in call] for call in one.values() if isinstance(call, list)]
        for one in pair
        if one
    ]
    return texts[0] == texts[1]


# --- two records -----------------------------------------------------------------------------------------------------


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns a line for each case that is not in both records, or not the same in both."""
    lines = [f"{name}: only in the first" for name in before if name not in after]
    lines += [f"{name}: only in the second" for name in after if name not in before]
    for name in before:
        apart = [*differences(before[name], after[name])] if name in after else []
        if apart:
            place, one, other = apart[0]
            more = f", and {len(apart) - 1} more" if len(apart) > 1 else ""
            lines.append(f"{name}: {place}: {one!r}, then {other!r}{more}")
    return lines


def differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields each value that is not the same, and where."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            yield from differences(one.get(key), other.get(key), f"{place}.{key}" if place else key)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}[{i}]")
    elif one != other:
        yield place, one, other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("make", "record", "child"):
        command = commands.add_parser(name)
        command.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
        if name != "make":
            command.add_argument("--out", type=Path, required=True)
    commands.choices["record"].add_argument("--only", default="", metavar="WORD", help="cases with it in their names")
    pair = commands.add_parser("compare")
    pair.add_argument("before", type=Path)
    pair.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "child":
        child(args.folder, args.out)
    elif args.command == "record":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by which its processes end, too
        return record(args.folder.resolve(), args.out, args.only)
    elif args.command == "make":
        failed = make(args.folder.resolve())
        for name, error in failed.items():
            print(f"{name}: {error}")
        return bool(failed)
    else:
        first, second = (json.loads(path.read_text())["cases"] for path in (args.before, args.after))
        lines = compare(first, second)
        print("\n".join([*lines, f"{len(lines)} of {len(first | second)} cases differ"]))
        return bool(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
