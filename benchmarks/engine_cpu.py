"""Speed of the engine on a CPU, side by side in one run: transformers, no speculation, NGRAM, batches.

    python benchmarks/engine_cpu.py --out results.json [--parts single,overhead,batch,copy,mtbench] [--prompts 80]

Greedy, bfloat16 where the CPU has it. A part alternates its competitors prompt by prompt and takes the better of
`--repeats` runs of each, because a shared machine only ever makes a run slower; what is reported is ratios. Caches are
emptied before every run. `single` needs transformers (`pip install -e .[dev]`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from load_texts import mt_bench

from draftwing import LLM, SamplingParams

PEOPLE = ("Ann Lee", "Oslo"), ("Bo Chan", "Lima"), ("Cy Diaz", "Rome"), ("Di Evans", "Bern"), ("Ed Frost", "Kyiv")
RECORDS = [{"id": i, "name": name, "city": city, "active": i % 2 == 0} for i, (name, city) in enumerate(PEOPLE)]
JSON_TEXT = json.dumps(RECORDS, indent=1)
PARAGRAPH = (
    "The harbour town wakes before the sun. Fishermen push their boats off the stone ramp, gulls circle over the "
    "nets, and the baker on the corner opens his shutters. By eight the market is full: crates of mackerel, baskets "
    "of lemons, bread that is still warm. Children cut through the stalls on their way to school, and the old men on "
    "the bench by the chapel comment on everything that passes."
)
CODE = (
    "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('negative size')\n"
    "    return width * height\n\n\ndef perimeter(width, height):\n    if width < 0 or height < 0:\n"
    "        raise ValueError('negative size')\n    return 2 * (width + height)\n"
)
# Written as texts to go on with: the default model is too small to copy when it is asked to in a chat.
COPY_TASKS = {
    "repeat JSON": f"Original:\n```json\n{JSON_TEXT}\n```\n\nExact copy of the original:\n```json\n",
    "edit text": f"Original text: {PARAGRAPH}\n\nThe same text with 'lemons' replaced by 'oranges': ",
    "edit code": f"# version 1\n{CODE}\n\n# version 2: the same code, with the function area renamed to surface\n",
}


def engine(algorithm: str, threads: int) -> LLM:
    """Without the model's own penalties: with them nothing is copied."""
    return LLM("smollm2", speculative_algorithm=algorithm, num_threads=threads, sampling_defaults="openai")


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)


def timed(work: Callable[[], int]) -> float:
    """Tokens per second of `work`, which returns how many it made."""
    start = time.perf_counter()
    return work() / (time.perf_counter() - start)


def best(repeats: int, runs: dict[str, Callable[[], int]]) -> dict[str, float]:
    """The best tokens per second of each, run in turn."""
    rates: dict[str, float] = dict.fromkeys(runs, 0.0)
    for _ in range(repeats):
        for name, work in runs.items():
            rates[name] = max(rates[name], timed(work))
    return rates


def generate(llm: LLM, prompts: list[list[int]], tokens: int) -> Callable[[], int]:
    def work() -> int:
        return sum(len(out.token_ids) for out in llm.generate(prompts, greedy(tokens)))

    return work


def fresh(llm: LLM, prompts: list[list[int]], tokens: int) -> Callable[[], int]:
    """As `generate`, with prefix cache and n-gram memory emptied first, so that a repeat cannot copy the run before."""
    work = generate(llm, prompts, tokens)

    def run() -> int:
        assert llm.engine.flush_cache()
        return work()

    return run


def questions(llm: LLM, count: int) -> list[list[int]]:
    return [llm.engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in mt_bench(count)]


def load_transformers(dtype: torch.dtype) -> Any:
    """The default model in transformers, with the weights that draftwing reads from the same file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftwing.models.hub import fetch_default_model
    from draftwing.models.loader import load_model
    from draftwing.models.weight_map import checkpoint_names, stored_tensors

    ours = load_model(fetch_default_model(), dtype, "cpu")
    c = ours.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.layers[0].ffn,
        num_hidden_layers=c.num_layers, num_attention_heads=c.attention.heads, num_key_value_heads=c.attention.kv_heads,
        head_dim=c.attention.head_dim, max_position_embeddings=c.max_positions, rms_norm_eps=c.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.ropes[0].theta}, tie_word_embeddings=c.tie_embeddings,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    missing, unexpected = model.load_state_dict(dict(stored_tensors(ours, checkpoint_names(c))), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return model


def single(llm: LLM, repeats: int) -> dict[str, Any]:
    """One request of 128 tokens against transformers' `generate`, same prompt, dtype and threads."""
    prompt = questions(llm, 1)[0]
    model = load_transformers(llm.engine.parts.executor.model.dtype)
    ids = torch.tensor([prompt])

    def reference() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, min_new_tokens=128, do_sample=False
            )
        return out.shape[1] - ids.shape[1]

    rates = best(repeats, {"transformers": reference, "none": fresh(llm, [prompt], 128)})
    return {**rates, "ratio": rates["none"] / rates["transformers"]}


def overhead(llm: LLM) -> dict[str, Any]:
    """Milliseconds per step, and how many of them are not the model's forward.

    Small steps are recorded and replayed, where nobody can look into them: the forward is timed in steps that are not,
    in turn with those that are. Medians."""
    executor = llm.engine.parts.executor
    model, key, spent = executor.model, executor.graphs.key, [0.0]

    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            out = function(*args)
            spent[0] += time.perf_counter() - start
            return out

        return call

    def per_step(prompt: list[int]) -> tuple[float, float]:
        """ms of a step, and of its forward where that was seen"""
        spent[0], start = 0.0, time.perf_counter()
        (out,) = llm.generate([prompt], greedy(128))
        total = time.perf_counter() - start
        steps = out.meta_info["spec_verify_ct"] + 1  # and the prefill
        return 1e3 * total / steps, 1e3 * spent[0] / steps

    prompt = questions(llm, 1)[0]
    generate(llm, [prompt], 8)()
    forward, logits = model.forward, model.logits
    steps, forwards = [], []
    for _ in range(7):
        steps.append(per_step(prompt)[0])
        model.forward, model.logits = clocked(forward), clocked(logits)  # type: ignore[method-assign]
        executor.graphs.key = lambda shape, size: None  # type: ignore[method-assign]
        try:
            forwards.append(per_step(prompt)[1])
        finally:
            model.forward, model.logits, executor.graphs.key = forward, logits, key  # type: ignore[method-assign]
    step = statistics.median(steps)
    return {"step_ms": step, "outside_forward_ms": step - statistics.median(forwards)}


def batch(llm: LLM, repeats: int) -> dict[str, Any]:
    """Throughput of 16 requests at once against one."""
    prompts = questions(llm, 16)
    rates = best(repeats, {"1": fresh(llm, prompts[:1], 128), "16": fresh(llm, prompts, 128)})
    return {**rates, "ratio": rates["16"] / rates["1"]}


def against(plain: LLM, spec: LLM, prompts: dict[str, list[int]], tokens: int, repeats: int) -> dict[str, Any]:
    """NGRAM against none, prompt by prompt; also whether the tokens are the same."""
    rows = {}
    for name, prompt in prompts.items():
        answers: dict[str, Any] = {}

        def run(llm: LLM, which: str, prompt: list[int] = prompt, answers: dict[str, Any] = answers) -> int:
            assert llm.engine.flush_cache()
            (answers[which],) = llm.generate([prompt], greedy(tokens))
            return len(answers[which].token_ids)

        rates = best(repeats, {"none": lambda run=run: run(plain, "none"), "NGRAM": lambda run=run: run(spec, "NGRAM")})
        rows[name] = {
            **rates,
            "ratio": rates["NGRAM"] / rates["none"],
            "accept_length": answers["NGRAM"].meta_info["spec_accept_length"],
            "same_tokens": answers["NGRAM"].token_ids == answers["none"].token_ids,
        }
        print(f"  {name:24.24s} {rows[name]}", flush=True)
    ratios = [row["ratio"] for row in rows.values()]
    return {
        "median": statistics.median(ratios),
        "worst": min(ratios),
        "mean": statistics.fmean(ratios),
        "identical": sum(row["same_tokens"] for row in rows.values()),
        "of": len(rows),
        "prompts": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="single,overhead,batch,copy,mtbench")
    parser.add_argument("--prompts", type=int, default=80, help="MT-bench prompts")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = args.parts.split(",")
    plain = engine("none", args.threads)
    results: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
    }
    if "single" in parts:
        results["single"] = single(plain, args.repeats)
    if "overhead" in parts:
        results["overhead"] = overhead(plain)
        ngram = engine("NGRAM", args.threads)
        results["overhead NGRAM"] = overhead(ngram)
    if "batch" in parts:
        results["batch"] = batch(plain, args.repeats)
    for part in ("copy", "mtbench"):
        if part in parts:
            spec = engine("NGRAM", args.threads)
            prompts = (
                {name: plain.engine.tokenizer.encode(text) for name, text in COPY_TASKS.items()}
                if part == "copy"
                else {str(81 + i): ids for i, ids in enumerate(questions(plain, args.prompts))}
            )
            results[part] = against(plain, spec, prompts, args.tokens, args.repeats)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1), encoding="utf8")
    for name, value in results.items():
        shown = {k: v for k, v in value.items() if k != "prompts"} if isinstance(value, dict) else value
        print(f"{name}: {shown}")


if __name__ == "__main__":
    main()
