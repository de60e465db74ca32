"""Options and environment variables of SGLang that are no options here.

Users bring their commands along. Each name is known and says what becomes of it: it has no effect, which is logged
once, or it asks for what this version cannot give, which is refused with what to do instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwing.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unsupported:
    """kind: of the value, bool for a flag without one.  neutral: values that ask for nothing."""

    kind: type[Any]
    why: str
    neutral: tuple[Any, ...] = ()


_EXACT = "what is accepted is what the target draws, so verification is exact as it is"
_ONE_DTYPE = "the draft uses the target's attention and types"
_OTHER_DRAFTER = "its algorithm is not in this version; --speculative-algorithm lists those that are"
_BLOCK = "the block is as long as the head's config says; --speculative-num-steps is how many of its tokens are drafted"
_LEARNT = "what steps cost and how often drafts are accepted is measured as requests are served"
_LOSSY = "it would change what the model says; leave it out"
_ADAPTS = "drafts are as large as is fastest, up to --speculative-num-draft-tokens; --speculative-fixed-shape pins them"
_ONE_DEVICE = "a server is one replica, with the devices of --tp-size; run several and balance the load in front"

NO_EFFECT = {
    "grammar_backend": Unsupported(str, "grammars are compiled by llguidance", ("llguidance",)),
    "attention_backend": Unsupported(str, "this version has its own attention, chosen by the device"),
    "page_size": Unsupported(int, "the KV pool is handed out by single tokens", (1,)),
    "cuda_graph_max_bs_prefill": Unsupported(int, "prompts of up to 512 tokens run from CUDA graphs"),
    "speculative_use_rejection_sampling": Unsupported(bool, _EXACT),
    "speculative_use_block_verification": Unsupported(bool, _EXACT),
    "speculative_attention_mode": Unsupported(str, _ONE_DTYPE),
    "speculative_draft_attention_backend": Unsupported(str, _ONE_DTYPE),
    "speculative_draft_kv_cache_dtype": Unsupported(str, _ONE_DTYPE),
    "speculative_adaptive": Unsupported(bool, _ADAPTS),
    "speculative_adaptive_config": Unsupported(str, _ADAPTS),
    "speculative_ngram_match_type": Unsupported(str, "matches are ranked by how often they were right", ("BFS",)),
    "speculative_ngram_external_corpus_max_tokens": Unsupported(int, "there is no external corpus"),
    "speculative_moe_runner_backend": Unsupported(str, "there are no mixture-of-experts drafts"),
    "speculative_moe_a2a_backend": Unsupported(str, "there are no mixture-of-experts drafts"),
    "speculative_domino_candidate_pool_size": Unsupported(int, "every token is a candidate", (0,)),
    "speculative_dspark_sps_table_path": Unsupported(str, _LEARNT),
    "speculative_dspark_confidence_sts_path": Unsupported(str, _LEARNT),
    "speculative_dspark_align_verify_tokens_to_graph_tier": Unsupported(bool, _LEARNT),
}

REFUSED = {
    "dp": Unsupported(int, _ONE_DEVICE, (1,)),
    "dp_size": Unsupported(int, _ONE_DEVICE, (1,)),
    "data_parallel_size": Unsupported(int, _ONE_DEVICE, (1,)),
    "enable_dp_attention": Unsupported(
        bool, "attention is not split over devices; run one server per device and balance the load in front"
    ),
    "speculative_accept_threshold_single": Unsupported(float, _LOSSY, (1.0,)),
    "speculative_accept_threshold_acc": Unsupported(float, _LOSSY, (1.0,)),
    "speculative_draft_load_format": Unsupported(str, "weights are read as they are found", ("auto", "safetensors")),
    "speculative_draft_model_quantization": Unsupported(
        str, "draft models are quantised as --quantization says", ("unquant",)
    ),
    "speculative_draft_window_size": Unsupported(int, "the draft attends to everything"),
    "speculative_draft_sink_size": Unsupported(int, "the draft attends to everything"),
    "speculative_ngram_external_corpus_path": Unsupported(str, "only prompts and answers are remembered"),
    "speculative_ngram_external_sam_budget": Unsupported(int, "only prompts and answers are remembered", (0,)),
    "speculative_dflash_block_size": Unsupported(int, _BLOCK),
    "speculative_dspark_block_size": Unsupported(int, _BLOCK),
    "enable_multi_layer_eagle": Unsupported(bool, "NEXTN uses all prediction layers of a checkpoint as it is"),
    "uno_lora_path": Unsupported(str, _OTHER_DRAFTER),
}

FOREIGN = NO_EFFECT | REFUSED


def take(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what remains when foreign options are taken out, logged or refused (ConfigError)."""
    for name, value in values.items():
        foreign = FOREIGN.get(name)
        # A flag that is off, like a None, was not asked for.
        if foreign is None or value is None or value is False or value in foreign.neutral:
            continue
        if name in REFUSED:
            raise ConfigError(f"--{name.replace('_', '-')} is not supported: {foreign.why}")
        logger.warning("--%s has no effect: %s", name.replace("_", "-"), foreign.why)
    return {name: value for name, value in values.items() if name not in FOREIGN}


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns options that SGLang's environment variables ask for."""
    options: dict[str, Any] = {}
    if _true(environ, "SGLANG_ENABLE_SPEC_V2"):
        logger.warning("SGLANG_ENABLE_SPEC_V2 is read as --enable-overlap; any --speculative-eagle-topk works with it")
        options["enable_overlap"] = True
    if _true(environ, "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"):
        logger.warning(
            "SGLANG_NGRAM_FORCE_GREEDY_VERIFY has no effect: %s. For greedy text, send temperature 0", _EXACT
        )
    length = environ.get("SGLANG_SIMULATE_ACC_LEN", "").strip()
    if length:
        try:
            value = float(length)
        except ValueError:
            raise ConfigError(f"SGLANG_SIMULATE_ACC_LEN: expected a number, found {length!r}") from None
        if value > 0:  # SGLang's default is -1
            logger.warning("SGLANG_SIMULATE_ACC_LEN is read as --simulate-accept-length %s", length)
            options["simulate_accept_length"] = value
    return options


def _true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on")
