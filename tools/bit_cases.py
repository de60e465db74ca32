"""What `record_bits.py` runs: which models of its folder, with which options of an engine, in which processes.

A case has a name that says all of this: `group | model | options | drafter`. Its text without drafts is the text with
them, so each case that drafts names the one that does not.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LOOKUPS: dict[str, dict[str, Any]] = {"NGRAM": {}, "SUFFIX": {}}
BF16, F32 = {"dtype": "bfloat16"}, {"dtype": "float32"}
OWN = {"custom_drafter:PairLookup": {}}  # of `examples`
ALIAS = "smollm2"
# Of the published configs, one of each architecture and each format: lookups draft for these, too.
CHOSEN = (
    "llama-3.1-8b", "llama-2-7b-chat", "vicuna-7b-v1.5-16k", "llama-3.1-8b-instruct-fp8-kv", "mistral-7b-v0.1",
    "mixtral-8x7b", "mixtral-8x7b-instruct-gptq", "qwen2.5-7b-instruct-yarn", "qwen2.5-7b-instruct-gptq-int8",
    "deepseek-r1-distill-qwen-1.5b", "qwen3-0.6b", "qwen3-32b-fp8", "qwen3-8b-gptq-int4", "qwen3-30b-a3b",
    "qwen3-30b-a3b-awq", "qwen3-next-80b-a3b-instruct", "qwen3.5-27b", "qwen3.6-27b-w4a16", "qwen3.5-35b-a3b",
    "gemma-3-1b-it", "gemma-3-4b-it", "gemma-4-26b-a4b-it", "gemma-4-e2b-it", "gemma-4-12b-it", "glm-4.5-air",
    "glm-4.5-air-fp8", "glm-4.7-flash", "deepseek-v2-chat", "deepseek-v3", "kimi-k2-thinking", "minimax-m2",
    "gpt-oss-20b", "gpt-oss-20b-bf16", "mimo-7b-rl", "lfm2.5-1.2b-instruct",
)  # fmt: skip
# For each instruction set, and for torch alone: a few of each way to compute.
SOME = (
    "format/llama/awq", "format/llama/compressed int4", "gguf/llama/Q4_K", "gguf/llama/Q5_K", "gguf/llama/Q6_K",
    "gguf/llama/Q5_0", "gguf/gpt-oss/MXFP4", "published/gemma-3-4b-it", "family/deepseek-v3/Q4_K",
    "family/minimax-m2/awq", "family/gemma4-per-layer/plain", "family/qwen3-next/plain", "family/lfm2/plain",
)  # fmt: skip
DRAFTED = ("dense/mimo", "head/exact EAGLE3", "head/dspark gated")
IN_BF16 = ("dense/llama", "published/qwen3-30b-a3b", "family/deepseek-v3/plain", "family/qwen3.5/plain")
IN_INT8 = ("dense/llama", "published/gpt-oss-20b", "family/gemma4-per-layer/plain")
CACHED = (
    "dense/varied", "published/mistral-7b-v0.1", "published/qwen3-30b-a3b", "family/gemma4-experts/plain",
    "family/qwen3.5/plain", "family/lfm2/plain", "family/deepseek-v3/plain", "head/exact EAGLE3",
    "head/exact DSPARK", *IN_INT8,
)  # fmt: skip
SCHEDULED = (
    "dense/varied", "head/exact EAGLE3", "family/qwen3.5/plain", "family/gemma4-per-layer/plain",
    "family/deepseek-v3/plain",
)  # fmt: skip
SHARED = ("published/llama-3.1-8b", "published/qwen3-30b-a3b", "family/qwen3.5/plain", "family/gemma4-dense/plain",
          "family/deepseek-v3/plain")  # fmt: skip
SETS = {"x86_64": ("plain", "avx2", "avx_vnni", "avx512", "avx512_bf16"), "aarch64": ("plain", "dotprod", "i8mm")}


class Case(NamedTuple):
    """group: cases of one process, with the variables of `environment`.  model: of the folder's index, or an alias.
    like: the case whose text this one has, if it drafts.  asks: what is asked for, of `record_bits.ASKED`."""

    name: str
    group: str
    model: str
    options: Mapping[str, Any]
    like: str = ""
    asks: str = "usual"


def environment(group: str) -> dict[str, str]:
    """Variables that the process of a group has besides those of its parent."""
    first, _, rest = group.partition(" ")
    if first == "isa":
        return {"DRAFTWING_CPU_ISA": rest}
    return {"DRAFTWING_NATIVE": "0"} if group == "torch" else {}


def all_cases(index: Mapping[str, Any]) -> list[Case]:
    """index: of the models that were made."""
    parts = (published, families, kinds, dense, formats, gguf, heads, caches, schedules, fields, others, bundled)
    return [case for part in parts for case in part(index)]


def tree(steps: int, topk: int, nodes: int) -> dict[str, int]:
    return {
        "speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes,
    }  # fmt: skip


CHAIN, TREE = tree(3, 1, 4), tree(4, 3, 12)


def several(
    group: str, model: str, drafters: Mapping[str, Mapping[str, Any]], asks: str = "usual", **options: Any
) -> Iterator[Case]:
    """The case without drafts, and one for each drafter, whose options these are. A drafter's name may have a mark
    behind a `#`, where there are several cases of it."""
    label = " ".join(f"{key}={value}" for key, value in options.items()) or "as it comes"
    plain = f"{group} | {model} | {label} | none"
    yield Case(plain, group, model, {**options, "speculative_algorithm": "none"}, "", asks)
    for drafter, own in drafters.items():
        algorithm = drafter.partition("#")[0]
        more = {**options, **own, "speculative_algorithm": algorithm, "speculative_fixed_shape": True}
        yield Case(f"{group} | {model} | {label} | {drafter}", group, model, more, plain, asks)


def treed(drafters: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {**own, **TREE} for name, own in drafters.items()}


def paired(drafters: Mapping[str, Mapping[str, Any]], lookup: str = "SUFFIX") -> dict[str, dict[str, Any]]:
    """Each of them together with a lookup."""
    return {f"{name}+{lookup}": {**own, **TREE} for name, own in drafters.items()}


def named(index: Mapping[str, Any], kind: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields numbers and names of models, with what drafts for them."""
    for i, name in enumerate(name for name in index if name.startswith(f"{kind}/")):
        yield i, name, index[name]["drafters"]


def lookup(i: int) -> dict[str, dict[str, Any]]:
    """One of the two, in turn."""
    return {"SUFFIX" if i % 2 else "NGRAM": {}}


def published(index: Mapping[str, Any]) -> Iterator[Case]:
    for i, name, _ in named(index, "published"):
        chosen = name.partition("/")[2] in CHOSEN
        yield from several("published", name, lookup(i) if chosen else {})
        if chosen:
            yield from several("published", name, {}, **(BF16 if i % 2 else F32))


def families(index: Mapping[str, Any]) -> Iterator[Case]:
    for i, name, own in named(index, "family"):
        if not name.endswith("/plain"):
            yield from several("family", name, (treed(own) or lookup(i)) if i % 2 else {})
            continue
        builtin = {key: value for key, value in own.items() if key in ("NEXTN", "FROZEN_KV_MTP")}
        yield from several("family", name, LOOKUPS | own | treed(builtin) | paired(builtin))
        yield from several("family", name, treed(builtin) or lookup(i), **BF16)
        yield from several("family", name, {}, **F32)


def kinds(index: Mapping[str, Any]) -> Iterator[Case]:
    for i, name, own in named(index, "kind"):
        yield from several("kind", name, lookup(i) | own)
        yield from several("kind", name, {}, **(BF16 if i % 2 else F32))


def dense(index: Mapping[str, Any]) -> Iterator[Case]:
    """What unquantised checkpoints may become when they are loaded."""
    for i, name, own in named(index, "dense"):
        chain = {f"{key}#chain": {**value, **CHAIN} for key, value in own.items()}
        yield from several("dense", name, LOOKUPS | OWN | own | chain | paired(own, "NGRAM"))
        for dtype in ("bfloat16", "float32", "float16"):
            yield from several("dense", name, own or lookup(i), dtype=dtype)
        for quantization in ("none", "q8_0", "q4_0", "q4_k", "fp8", "w4a16"):
            yield from several("dense", name, {}, quantization=quantization)
    yield from several("dense", "dense/llama", {}, load_format="dummy")


def formats(index: Mapping[str, Any]) -> Iterator[Case]:
    for i, name, own in named(index, "format"):
        llama = name.startswith("format/llama")
        if llama or i % 2:
            yield from several("format", name, lookup(i) if llama else own)
        if llama:
            yield from several("format", name, {}, **(BF16 if i % 2 else F32))


def gguf(index: Mapping[str, Any]) -> Iterator[Case]:
    for i, name, _ in named(index, "gguf"):
        yield from several("gguf", name, lookup(i))
        if i % 3 == 0:
            yield from several("gguf", name, {}, **(BF16 if i % 2 else F32))


def heads(index: Mapping[str, Any]) -> Iterator[Case]:
    for i, name, own in named(index, "head"):
        exact = "exact" in name
        chain = {f"{key}#chain": {**value, **CHAIN} for key, value in own.items()} if exact else {}
        trees = {f"{key}#tree": value for key, value in treed(own).items()}
        pair = paired(own, "NGRAM" if i % 2 else "SUFFIX") if exact else {}
        yield from several("head", name, own | chain | trees | pair)
        if exact or i % 3 == 0:
            yield from several("head", name, trees, **(F32 if exact else BF16))


def caches(index: Mapping[str, Any]) -> Iterator[Case]:
    for i, name in enumerate(CACHED):
        for kv in ("float32", "bfloat16", "int8"):
            drafters = (treed(index[name]["drafters"]) or lookup(i)) if kv == "int8" else {}
            yield from several("cache", name, dict([*drafters.items()][:2]), kv_cache_dtype=kv)
    yield from several("cache", "dense/llama", {}, kv_cache_dtype="int8", **F32)
    yield from several("cache", "dense/llama", {}, kv_cache_dtype="fp8_e4m3")  # refused on a CPU


def schedules(index: Mapping[str, Any]) -> Iterator[Case]:
    """Ways to run the same requests."""
    ways: tuple[dict[str, Any], ...] = (
        {"chunked_prefill_size": 32}, {"disable_radix_cache": True}, {"enable_overlap": True},
        {"enable_mixed_chunk": True, "chunked_prefill_size": 32}, {"max_total_tokens": 400, "max_running_requests": 2},
        {"context_length": 140},
    )  # fmt: skip
    for name in SCHEDULED:
        drafters = treed(index[name]["drafters"]) or LOOKUPS
        for way in ways:
            yield from several("schedule", name, dict([*drafters.items()][:1]), **way)


def fields(index: Mapping[str, Any]) -> Iterator[Case]:
    """All that a request may ask for."""
    yield from several("field", "dense/varied", LOOKUPS, "fields")
    for name, drafter in (("head/exact EAGLE3", "EAGLE3"), ("family/qwen3.5/plain", "NEXTN")):
        own = {drafter: index[name]["drafters"][drafter]}
        yield from several("field", name, treed(own) | paired(own), "fields", **F32)


def others(index: Mapping[str, Any]) -> Iterator[Case]:
    """Each instruction set, torch alone, and two ranks."""
    for group in (*(f"isa {isa}" for isa in SETS.get(platform.machine(), ())), "torch"):
        for name in SOME:
            yield from several(group, name, {})
        for name in DRAFTED:
            yield from several(group, name, treed(index[name]["drafters"]))
        for name in IN_BF16:
            yield from several(group, name, {"SUFFIX": {}} if name == IN_BF16[0] else {}, **BF16)
        if group != "torch":
            for name in IN_INT8:
                yield from several(group, name, {}, kv_cache_dtype="int8")
    for name in SHARED:
        yield from several("ranks", name, {}, tp_size=2, **F32)
    yield from several("ranks", SHARED[1], {"SUFFIX": {}}, tp_size=2, enable_expert_parallel=True, **F32)


def bundled(index: Mapping[str, Any]) -> Iterator[Case]:
    """The default model, with its heads."""
    heads: dict[str, dict[str, Any]] = {"EAGLE3": {}, "EAGLE": {}, "NEXTN": {}, "EAGLE3+NGRAM": TREE}
    yield from several(ALIAS, ALIAS, {"SUFFIX": {}} | heads)
    yield from several(ALIAS, ALIAS, {}, kv_cache_dtype="int8")
    for isa in SETS.get(platform.machine(), ())[:2]:
        yield from several(f"isa {isa}", ALIAS, {"EAGLE3": {}})
