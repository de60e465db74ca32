"""Compares libraries for constrained decoding: what they accept, what they refuse, how long masks take.

    python benchmarks/grammars.py SCHEMAS.tar.gz REGEXES.txt [--library llguidance xgrammar] [--walks 4]

SCHEMAS: an archive of MaskBench files (guidance-ai/jsonschemabench), `{"schema", "tests": [{"valid", "data"}]}` each.
REGEXES: an expression a line. Expressions have no examples, so they are checked by random walks: what a library
generates must match in Python's `re`, and the strings that do must be accepted by every library.

The libraries are not installed together with draftwing except for the one that it uses (docs/dev/grammar.md).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tarfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from draftwing.models.hub import fetch_default_model
from draftwing.text.tokenizer import Tokenizer, load_tokenizer


class LLGuidance:
    """One grammar at a time, through `llguidance`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self.lib = llguidance
        self.tokens = llguidance.LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.stop_ids)
        )
        self.words = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)

    def compile(self, kind: str, text: str) -> Any:
        make = self.lib.LLMatcher
        grammar = make.grammar_from_json_schema(text) if kind == "json" else make.grammar_from_regex(text)
        matcher = make(self.tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def fresh(self, grammar: Any) -> Any:
        return grammar.deep_copy()

    def mask(self, state: Any) -> np.ndarray:
        state.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
        return self.words

    def advance(self, state: Any, token: int) -> bool:
        return state.try_consume_tokens([token]) == 1


class XGrammar:
    """One grammar at a time, through `xgrammar`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self.lib = xgrammar
        vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
        pieces = [""] * tokenizer.vocab_size
        for piece, i in vocab.items():
            pieces[i] = piece
        kind = xgrammar.VocabType.BYTE_LEVEL if tokenizer.joins_bytes else xgrammar.VocabType.BYTE_FALLBACK
        info = xgrammar.TokenizerInfo(
            pieces, kind, vocab_size=tokenizer.vocab_size, stop_token_ids=sorted(tokenizer.stop_ids)
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.words = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)

    def compile(self, kind: str, text: str) -> Any:
        # Not strict: otherwise additional properties are forbidden where a schema does not mention them.
        if kind == "json":
            return self.compiler.compile_json_schema(text, any_whitespace=True, strict_mode=False)
        return self.compiler.compile_regex(text)

    def fresh(self, grammar: Any) -> Any:
        return self.lib.GrammarMatcher(grammar)

    def mask(self, state: Any) -> np.ndarray:
        self.words[:] = -1
        state.fill_next_token_bitmask(self.words)
        return self.words.numpy()[0]

    def advance(self, state: Any, token: int) -> bool:
        return bool(state.accept_token(token))


LIBRARIES = {"llguidance": LLGuidance, "xgrammar": XGrammar}


def allowed(words: np.ndarray, token: int) -> bool:
    return bool((int(words[token >> 5]) >> (token & 31)) & 1)


class Bench:
    def __init__(self, library: Any, tokenizer: Tokenizer) -> None:
        self.library, self.tokenizer = library, tokenizer
        self.stop = min(tokenizer.stop_ids)
        self.mask_us: list[float] = []

    def accepts(self, grammar: Any, text: str) -> bool:
        """Whether each token of `text` is allowed after those before it, and the end after all of them."""
        state = self.library.fresh(grammar)
        for token in [*self.tokenizer.encode(text, add_special_tokens=False), self.stop]:
            start = time.perf_counter()
            words = self.library.mask(state)
            self.mask_us.append((time.perf_counter() - start) * 1e6)
            if not allowed(words, token):
                return False
            if token != self.stop and not self.library.advance(state, token):
                return False
        return True

    def walk(self, grammar: Any, rng: random.Random, limit: int = 60) -> str | None:
        """A random string of the grammar; None where it did not end within `limit` tokens."""
        state, tokens = self.library.fresh(grammar), []
        for _ in range(limit):
            words = self.library.mask(state)
            if allowed(words, self.stop) and rng.random() < 0.4:
                break
            choices = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            choices = choices[choices != self.stop]
            if not len(choices):
                break
            token = int(choices[rng.randrange(len(choices))])
            assert self.library.advance(state, token), "a token of the mask is not accepted"
            tokens.append(token)
        else:
            return None
        if not allowed(self.library.mask(state), self.stop):
            raise AssertionError("dead end")
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def schemas(self, archive: Path, every: int) -> dict[str, Any]:
        count: Counter[str] = Counter()
        compile_ms: list[float] = []
        details: list[str] = []
        with tarfile.open(archive) as files:
            for member in files.getmembers()[::every]:
                case = json.load(files.extractfile(member))  # type: ignore[arg-type]
                count["schemas"] += 1
                start = time.perf_counter()
                try:
                    grammar = self.library.compile("json", json.dumps(case["schema"]))
                except Exception as error:
                    details.append(f"{member.name}: does not compile: {str(error)[:200]}")
                    continue
                compile_ms.append((time.perf_counter() - start) * 1e3)
                count["compile"] += 1
                good = [self._try(grammar, t) for t in case["tests"] if t["valid"]]
                bad = [self._try(grammar, t) for t in case["tests"] if not t["valid"]]
                count["good"] += len(good)
                count["good accepted"] += sum(good)
                count["bad"] += len(bad)
                count["bad refused"] += len(bad) - sum(bad)
                if all(good) and not any(bad):
                    count["schemas all right"] += 1
                else:
                    details.append(f"{member.name}: refuses {len(good) - sum(good)} good, accepts {sum(bad)} bad")
        return {**count, "compile ms": quantiles(compile_ms), "mask us": quantiles(self.mask_us), "details": details}

    def _try(self, grammar: Any, test: dict[str, Any]) -> bool:
        return self.accepts(grammar, json.dumps(test["data"], ensure_ascii=False))


def quantiles(values: list[float]) -> dict[str, float]:
    array = np.asarray(values or [0.0])
    return {
        "median": round(float(np.median(array)), 1),
        "p99": round(float(np.quantile(array, 0.99)), 1),
        "max": round(float(array.max()), 1),
    }


def regexes(benches: dict[str, Bench], patterns: list[str], walks: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    strings: dict[str, set[str]] = {p: set() for p in patterns}
    grammars: dict[str, dict[str, Any]] = {}
    for name, bench in benches.items():
        count: Counter[str] = Counter(patterns=len(patterns))
        details: list[str] = []
        compile_ms: list[float] = []
        grammars[name] = {}
        for pattern in patterns:
            start = time.perf_counter()
            try:
                grammar = bench.library.compile("regex", pattern)
            except Exception as error:
                details.append(f"{pattern!r}: {str(error)[:120]}")
                continue
            compile_ms.append((time.perf_counter() - start) * 1e3)
            count["compile"] += 1
            grammars[name][pattern] = grammar
            rng = random.Random(pattern)
            sound = True
            for _ in range(walks):
                try:
                    text = bench.walk(grammar, rng)
                except AssertionError as error:
                    details.append(f"{pattern!r}: {error}")
                    sound = False
                    break
                if text is None or "\ufffd" in text:
                    continue
                if re.fullmatch(pattern, text) is None:
                    sound = False
                    details.append(f"{pattern!r}: generates {text!r}")
                    break
                strings[pattern].add(text)
            count["sound"] += sound
        report[name] = {"compile ms": quantiles(compile_ms), "count": count, "details": details}
    for name, bench in benches.items():
        bench.mask_us.clear()
        count = report[name]["count"]
        for pattern, grammar in grammars[name].items():
            results = {text: bench.accepts(grammar, text) for text in sorted(strings[pattern])}
            count["strings"] += len(results)
            count["strings accepted"] += sum(results.values())
            report[name]["details"] += [f"{pattern!r}: refuses {text!r}" for text, ok in results.items() if not ok][:1]
        report[name]["mask us"] = quantiles(bench.mask_us)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("regexes", type=Path)
    parser.add_argument("--library", nargs="+", choices=sorted(LIBRARIES), default=sorted(LIBRARIES))
    parser.add_argument("--walks", type=int, default=4)
    parser.add_argument("--every", type=int, default=1, help="take every n-th schema and expression only")
    parser.add_argument("--details", action="store_true", help="also list what failed")
    args = parser.parse_args()
    tokenizer = load_tokenizer(fetch_default_model())
    benches = {}
    for name in args.library:
        start = time.perf_counter()
        benches[name] = Bench(LIBRARIES[name](tokenizer), tokenizer)
        print(f"{name}: import and tokenizer {time.perf_counter() - start:.2f} s")
    reports: dict[str, Any] = {}
    for name, bench in benches.items():
        reports[f"schemas, {name}"] = bench.schemas(args.schemas, args.every)
    patterns = args.regexes.read_text(encoding="utf-8").splitlines()[:: args.every]
    found = regexes(benches, patterns, args.walks)
    reports.update({f"regexes, {name}": report for name, report in found.items()})
    for title, report in reports.items():
        details = report.pop("details")
        print(f"{title}: {json.dumps(report)}")
        if args.details:
            print("\n".join(f"    {line}" for line in details))


if __name__ == "__main__":
    main()
