"""Texts with drafts against those without, of each family in little: a few layers with the heads of the real model, and
random weights made from its config. How many of 80 are the same tokens?

    python benchmarks/family_texts.py [--families gemma4-12b,..] [--formats none,fp8] [--ways 2] [--seconds 150]
        [--out FILE] [--files] [--adapters 32] [option=value ...]

First without drafts, one request at a time. Then with each drafter as a chain and as a tree, 16 requests at once,
beside prompts in the same step, with half of each prompt in the cache. Each engine answers all prompts twice: SUFFIX
knows the second time what comes, so most of its drafts are accepted. A family is a process, `--at-once` of them run.
FILE has what is known so far, after each engine. Options are those of all engines, such as tp_size=2. With --files
weights are read from files, so that they do not depend on the number of ranks, and digests of texts can be compared;
llama has an EAGLE-3 head then, and with --adapters as many of rank 16, of which prompts have one by turns, or none.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "src"), str(ROOT / "tests")]

import random_models  # noqa: E402
from hybrid_gpu import config_of  # noqa: E402
from load_runs import listed, options_of  # noqa: E402
from reference import hf_configs as real  # noqa: E402
from tiny_checkpoint import write_tokenizer  # noqa: E402

VOCAB, HIDDEN = 4096, 1024
SMALL = {
    "hidden_size": HIDDEN, "intermediate_size": 2048, "vocab_size": VOCAB, "num_hidden_layers": 4, "eos_token_id": 256,
    "bos_token_id": None, "max_position_embeddings": 4096, "first_k_dense_replace": 1, "pad_token_id": None,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 32, "moe_intermediate_size": 256, "num_experts_per_tok": 4}
LATENT = {"num_attention_heads": 16, "num_key_value_heads": 16} | EXPERTS
KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
GEMMA = {"num_hidden_layers": 8, "layer_types": KINDS, "vocab_size_per_layer_input": VOCAB, "sliding_window": 64}
HYBRID = {"num_attention_heads": 8, "num_key_value_heads": 2, "quantization_config": None, "layer_types": None}
ROUTED = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
FEW = ROUTED | {"shared_expert_intermediate_size": 256}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}


# Sizes by the names that configs have for them.
SIZES = SMALL | ROUTED | HEADS | {
    "num_layers": 4, "max_position_embeddings": 4096, "ffn_hidden_size": 2048, "padded_vocab_size": VOCAB,
    "attention_head_dim": 64, "kv_channels": 64, "multi_query_group_num": 4, "num_local_experts": 32,
    "n_routed_experts": 32, "shared_expert_intermediate_size": 256, "shared_intermediate_size": 256,
    "sliding_window": 64,
}  # fmt: skip
WIDE_LATENT = {
    "kv_lora_rank": 256, "q_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "qk_head_dim": 128,
    "v_head_dim": 128, "num_key_value_heads": 16,
}  # fmt: skip


def published(name: str) -> dict[str, Any]:
    """Returns the keys of a config as it was published, with small sizes."""
    found: dict[str, Any] = json.loads((ROOT / "tests/models/published" / f"{name}.json").read_text())
    return found


def grown(name: str, **more: Any) -> dict[str, Any]:
    """Returns the text model's keys of such a config with the sizes of one that is measured here, and those in `more`.

    Layers are at least four; lists of one value for each layer go on as they begin."""
    whole = published(name)
    own = whole.get("text_config", whole)
    old = next(own[key] for key in ("num_hidden_layers", "num_layers", "n_layer") if key in own)
    layers = max(4, old)
    sizes = {key: value for key, value in SIZES.items() if own.get(key) is not None or key == "eos_token_id"}
    lists = {key: (own[key] * layers)[:layers] for key in own if isinstance(own[key], list) and len(own[key]) == old}
    counts = {key: layers for key in ("num_hidden_layers", "num_layers") if key in own}
    if own.get("num_key_value_heads") == own.get("num_attention_heads", 0):
        counts["num_key_value_heads"] = SIZES["num_attention_heads"]
    plain = {"bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}  # tied ones repeat themselves
    return own | sizes | lists | counts | plain | more


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": random_models.LLAMA_8B | SMALL | HEADS | {"num_nextn_predict_layers": 0},
    "glm-4.7-flash": real.GLM47_FLASH | SMALL | EXPERTS,
    "deepseek-v3": real.DEEPSEEK_V3 | SMALL | LATENT | {"q_lora_rank": 512},
    "gemma4-12b": real.GEMMA4_31B | SMALL | GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma4-26b-a4b": real.GEMMA4_26B | SMALL | GEMMA | {"num_experts": 32, "moe_intermediate_size": 256},
    "gemma4-e2b": real.GEMMA4_E2B["text_config"] | SMALL | GEMMA | {"num_kv_shared_layers": 4},
    "glm-4.5": real.GLM45 | SMALL | EXPERTS | {"num_attention_heads": 24, "num_key_value_heads": 2},
    "minimax-m2": real.MINIMAX_M2 | SMALL | {
        "num_local_experts": 32, "num_experts_per_tok": 4, "num_attention_heads": 24, "num_key_value_heads": 4,
        "intermediate_size": 256, "attn_type_list": [1] * 4, "num_nextn_predict_layers": 0,
    },
    "deepseek-v2": real.DEEPSEEK_V2_LITE | SMALL | LATENT | {"num_nextn_predict_layers": 0},
    "qwen3.5-9b": config_of("9B") | SMALL | HYBRID,
    "qwen3.5-35b-a3b": config_of("35B-A3B") | SMALL | HYBRID | FEW,
    "qwen3-next": config_of("35B-A3B") | SMALL | HYBRID | FEW | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    },
    "lfm2": SMALL | {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_attention_heads": 16, "num_key_value_heads": 4,
        "conv_L_cache": 3, "norm_eps": 1e-5, "block_auto_adjust_ff_dim": False, "tie_embedding": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"], "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "granite-4-tiny": real.GRANITE4_TINY | SMALL | {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 32, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 256,
        "shared_intermediate_size": 512, "num_nextn_predict_layers": 0,
    },
    "nemotron-3-nano": real.NEMOTRON3_NANO | SMALL | {
        "hybrid_override_pattern": "MEM*ME", "num_hidden_layers": 6, "mamba_num_heads": 32, "num_attention_heads": 8,
        "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512, "num_nextn_predict_layers": 0,
    },
    "falcon-h1": real.FALCON_H1_7B | SMALL | {
        "mamba_n_heads": 16, "mamba_d_ssm": 2048, "num_attention_heads": 8, "num_nextn_predict_layers": 0,
    },
    "kimi-linear": real.KIMI_LINEAR_48B | SMALL | {
        "linear_attn_config": {
            "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 8,
            "short_conv_kernel_size": 4,
        }, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 32, "num_experts_per_token": 4,
        "moe_intermediate_size": 256, "model_max_length": 4096, "num_nextn_predict_layers": 0,
    },
    "deepseek-v3.2": real.DEEPSEEK_V32 | SMALL | LATENT | {"q_lora_rank": 512, "index_n_heads": 8, "index_topk": 64},
    "glm-5.2": real.GLM52 | SMALL | LATENT | {  # every other layer reads what the one before it picked
        "q_lora_rank": 512, "index_n_heads": 8, "index_topk": 64, "num_experts": 32, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "qk_head_dim": 192, "index_topk_freq": 2, "index_skip_topk_offset": 1, "layer_types": None,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
    "jamba": published("jamba-1.5-mini") | SMALL | {  # state-space layers of Mamba-1
        "attn_layer_offset": 1, "attn_layer_period": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 512, "num_experts": 16, "num_nextn_predict_layers": 0,
    },
    "ling3": real.LING3_FLASH | SMALL | ROUTED | {
        "num_attention_heads": 16, "num_key_value_heads": 16, "first_k_dense_replace": 1, "layer_group_size": 4,
        "n_group": 4, "topk_group": 2,
    },
    "qwen4": real.QWEN4_FLASH | SMALL | FEW | {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "hc_lowrank": 64, "indexer_budget": 64,
        "indexer_n_heads": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_attention_heads": 8,
        "num_key_value_heads": 2, "ngram_vocab_size_base": 8192, "heads_per_ngram": 4, "ple_embed_dim": 256,
        "ple_layer_ids": [1], "split_ngram_parts": 8, "num_nextn_predict_layers": 0,
    },
    "gpt-oss-20b": real.GPT_OSS_20B | SMALL | {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 512, "sliding_window": 64, "num_nextn_predict_layers": 0, "quantization_config": None,
    },
    "lfm2-8b": real.LFM2_8B | SMALL | ROUTED | {
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_dense_layers": 1, "num_nextn_predict_layers": 0,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "llama-4": real.LLAMA4_MAVERICK["text_config"] | SMALL | {
        "architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 128, "intermediate_size_mlp": 2048,
        "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 16,
        "num_nextn_predict_layers": 0, "floor_scale": 64,
    },
    "gemma-2": real.GEMMA2_2B | SMALL | {
        "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 64, "num_nextn_predict_layers": 0,
    },
    "hunyuan-v3": published("hy3-preview") | SMALL | ROUTED | HEADS,
    "ling2": published("ling-mini-2.0") | SMALL | ROUTED | HEADS | {
        "num_hidden_layers": 4, "moe_shared_expert_intermediate_size": 256,
    },
    "k-exaone": published("k-exaone-236b-a23b") | SMALL | ROUTED | HEADS | {"sliding_window": 64},
    "mellum-2": published("mellum2-12b-a2.5b") | SMALL | ROUTED | HEADS | {"sliding_window": 64},
    "phi-3.5-moe": published("phi-3.5-moe") | SMALL | HEADS | {
        "num_local_experts": 16, "intermediate_size": 512, "rope_scaling": None, "num_nextn_predict_layers": 0,
    },
    "laguna": published("laguna-xs.2") | SMALL | ROUTED | HEADS | {
        "num_attention_heads_per_layer": [16, 32, 32, 32], "shared_expert_intermediate_size": 256,
        "sliding_window": 64, "num_nextn_predict_layers": 0,
    },
    "olmo-hybrid": published("olmo-hybrid-7b") | SMALL | {
        "num_attention_heads": 16, "num_key_value_heads": 16, "linear_num_key_heads": 8, "linear_num_value_heads": 8,
        "linear_key_head_dim": 64, "linear_value_head_dim": 128, "num_nextn_predict_layers": 0,
    },
    "gemma-3n": published("gemma-3n-e2b-it")["text_config"] | SMALL | HEADS | {
        "architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 6, "intermediate_size": [2048] * 6,
        "hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": VOCAB, "sliding_window": 64,
        "num_nextn_predict_layers": 0,
    },
    "north": published("north-mini-code-1.0") | SMALL | ROUTED | HEADS | {
        "num_hidden_layers": 5, "intermediate_size": 256, "prefix_dense_intermediate_size": 2048, "sliding_window": 64,
        "num_nextn_predict_layers": 0,
    },
    "lfm3": published("lfm3-1.7b") | SMALL | HEADS | {
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "sliding_window": 64,
        "num_nextn_predict_layers": 0,
    },
    "helium": grown("helium-1-2b"),
    "ministral": grown("ministral-8b-transformers-5"),
    "cwm": grown("cwm-32b"),
    "ministral3": grown("devstral-2-123b"),
    "mistral": grown("mistral-7b-v0.1"),
    "mistral4": grown("mistral-small-4-119b", architectures=["Mistral4ForCausalLM"], head_dim=128, **WIDE_LATENT),
    "mixtral": grown("mixtral-8x7b", intermediate_size=256),
    "smollm3": grown("smollm3-3b", no_rope_layers=[1, 1, 1, 0]),
    "phi-4": grown("phi-4"),
    "phi-4-mini": grown("phi-4-mini-instruct", rope_scaling={
        "type": "longrope", "short_factor": [1.0] * 24, "long_factor": [1 + i / 12 for i in range(24)],
    }),
    "qwen2": grown("qwen2.5-7b-instruct"),
    "qwen3": grown("qwen3-8b"),
    "qwen2-moe": grown("qwen2-57b-a14b-instruct"),
    "qwen3-moe": grown("qwen3-30b-a3b"),
    "glm-4-chat": grown("glm-4-9b-chat-hf"),
    "chatglm": grown("glm-4-9b-chat", seq_length=4096),
    "glm-4-0414": grown("glm-4-9b-0414"),
    "youtu": grown("youtu-llm-2b", head_dim=64, **WIDE_LATENT),
    "mimo": grown("mimo-7b-rl"),
    "granite-3": grown("granite-3.3-8b-instruct"),
    "granite-moe": grown("granite-3.1-1b-a400m-instruct", intermediate_size=256),
    "granite-swash": grown("granite-swash-2b"),
    "granite-swash-moe": grown("granite-swash-3b-a600m", intermediate_size=256),
    "hyperclova": grown("hyperclovax-seed-think-14b"),
    "bamba": grown("bamba-9b-v2", mamba_n_heads=32, mamba_d_head=64, mamba_d_state=128, attn_rotary_emb=32),
    "nemotron-h": grown(
        "nemotron-h-56b", mamba_num_heads=32, mamba_head_dim=64, ssm_state_size=128, attention_head_dim=128
    ),
    "olmo": grown("olmo-7b-hf"),
    "nanochat": grown("nanochat-d32"),
    "olmo-2": grown("olmo-2-7b"),
    "olmo-3": grown("olmo-3.1-32b-instruct", layer_types=KINDS[:4]),
    "exaone-3.5": grown("exaone-3.5-7.8b-instruct"),
    "exaone-4": grown("exaone-4.0-32b", layer_types=KINDS[:4]),
    "ernie": grown("ernie-4.5-0.3b"),
    "ernie-moe": grown("ernie-4.5-21b-a3b"),
    "seed-oss": grown("seed-oss-36b-instruct"),
    "gemma": grown("gemma-2b-it", num_key_value_heads=1),
    "vaultgemma": grown("vaultgemma-1b"),
    "gemma-3": grown("gemma-3-1b-it"),
    "command-r": grown("aya-expanse-8b"),
    "command-r7b": grown("command-r7b-12-2024"),
    "solar-open": grown("solar-open-100b", moe_intermediate_size=256),
    "minicpm": grown("minicpm4-8b"),
    "minicpm3": grown("minicpm3-4b", **WIDE_LATENT),
    "internlm2": grown("internlm2_5-7b-chat"),
    "internlm3": grown("internlm3-8b-instruct"),
    "deci": grown("llama-3.3-nemotron-super-49b"),
    "stablelm": grown("stablelm-2-1_6b"),
    "nemotron-4": grown("minitron-4b-base"),
    "jais-2": grown("jais-2-8b-chat"),
    "starcoder2": grown("starcoder2-7b"),
    "phi-2": grown("phi-2", partial_rotary_factor=0.5),
    "gpt-neox": grown("pythia-1.4b"),
    "apertus": grown("apertus-8b-instruct"),
    "arcee": grown("afm-4.5b"),
    "trinity": grown("trinity-mini"),
    "hunyuan": grown("hunyuan-7b-instruct", num_experts=1),
    "hunyuan-moe": grown("hunyuan-a13b-instruct", intermediate_size=256, moe_intermediate_size=[256] * 4),
    "olmoe": grown("olmoe-1b-7b", intermediate_size=256),
    "flexolmo": grown("flexolmo-7x7b-1t", num_experts=7, intermediate_size=256),
    "falcon": grown("falcon-7b-instruct"),
    "falcon-40b": grown("falcon-40b-instruct", num_kv_heads=4),
    "gpt2": grown("gpt2", n_embd=HIDDEN, n_layer=4, n_head=16, n_positions=4096),
    "starcoder": grown("starcoderbase", n_embd=HIDDEN, n_inner=2048, n_layer=4, n_head=16, n_positions=4096),
    "mimo-v2": grown(
        "mimo-v2-flash", head_dim=192, swa_head_dim=192, v_head_dim=128, swa_v_head_dim=128, num_attention_heads=8,
        swa_num_attention_heads=8, num_key_value_heads=2, sliding_window_size=64,
    ),
    "step-3.5": grown(
        "step-3.5-flash", num_attention_groups=4, head_dim=128, num_attention_heads=8, moe_intermediate_size=256,
        share_expert_dim=256, moe_num_experts=32, sliding_window=64, num_sliding_attention_heads=16,
        attention_other_setting=None, num_nextn_predict_layers=0, max_position_embeddings=4096,
    ),
    "mamba": grown("mamba-2.8b-hf", intermediate_size=2 * HIDDEN, time_step_rank="auto"),
    "falcon-mamba": grown("falcon-mamba-7b", intermediate_size=2 * HIDDEN, time_step_rank="auto"),
    "mamba-2": grown(
        "mamba-codestral-7b", intermediate_size=2 * HIDDEN, num_heads=32, head_dim=64, n_groups=8, state_size=128
    ),
    "llama-3.2-vision": grown("llama-3.2-11b-vision-instruct", architectures=["MllamaForCausalLM"]),
    "dots": grown("dots.llm1.inst", moe_intermediate_size=256),
    "minimax-m1": grown("minimax-m1-80k", intermediate_size=256, rotary_dim=32, shared_intermediate_size=0),
}  # fmt: skip
CHAIN = {"speculative_num_steps": 4, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5}
TREE = {"speculative_num_steps": 4, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}


def written(folder: Path, name: str, files: bool = False, adapters: int = 0) -> dict[str, Any]:
    """Writes the family's config, and an assistant's where it has one -> the options of its own drafter.

    adapters: of a Llama."""
    config = dict(FAMILIES[name])
    config.pop("quantization_config", None)
    config.pop("dtype", None)
    if name != "kimi-linear" and ("n_routed_experts" not in config or name == "nemotron-3-nano"):
        config.pop("first_k_dense_replace", None)
    config.setdefault("architectures", ["Gemma4ForCausalLM"])
    if name.startswith("gemma4"):
        own = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "layer_types": KINDS[:4]}
        text = {**config, **own, "enable_moe_block": False, "num_kv_shared_layers": 4}
        clusters = {"use_ordered_embeddings": True, "num_centroids": 64, "centroid_intermediate_top_k": 8}
        assistant = {
            "model_type": "gemma4_assistant", "backbone_hidden_size": HIDDEN, "text_config": text,
            **(clusters if name == "gemma4-e2b" else {}),
        }  # fmt: skip
        write(folder / "assistant", assistant)
    write(folder / "model", config)
    write_tokenizer(folder / "model")
    if files:
        random_models.write_weights(folder / "model", "cpu")
    if name.startswith("gemma4"):
        return {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_draft_model_path": str(folder / "assistant")}
    if name == "llama" and files:
        write(folder / "draft", random_models.eagle3(config))
        random_models.write_head(folder / "draft", folder / "model", "EAGLE3", "cpu")
        for i in range(adapters):
            shapes = random_models.matrices(config)
            random_models.write_adapter(folder / f"a{i}", folder / "model", i, random_models.RANK, shapes=shapes)
        return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder / "draft")}
    # Of prediction layers only Qwen3.5's are written.
    layers = config.get("mtp_num_hidden_layers" if files else "num_nextn_predict_layers")
    return {"speculative_algorithm": "NEXTN" if layers else "NGRAM"}


def write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def answers(folder: Path, args: argparse.Namespace, at_once: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Of all prompts twice, and what else there is to say of the engine."""
    import torch

    from draftwing import LLM

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 300, (args.count,), generator=generator).tolist()
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
    params = [
        {"temperature": 0.8 * (i % 2), "sampling_seed": i, "max_new_tokens": args.tokens, "ignore_eos": True}
        for i in range(args.count)
    ]
    weights = "auto" if args.files else "dummy"
    given = {
        "device": args.device, "load_format": weights, "dtype": "bfloat16", "max_total_tokens": 65536, "random_seed": 1,
        "max_running_requests": at_once, "chunked_prefill_size": 256, "log_level": "warning",
        "quantization": args.format,
    } | options_of(args.options)  # fmt: skip
    names = [f"a{i}" for i in range(args.adapters)]
    if names:
        modules = [f"{one}={folder.with_name(one)}" for one in names]
        given = {"lora_modules": modules, "max_loras": len(names)} | given
    which = [([None, *names])[i % (len(names) + 1)] for i in range(args.count)]
    started = time.monotonic()
    with LLM(str(folder), **(given | options)) as llm:
        loaded = time.monotonic()
        if at_once > 1:
            llm.generate([prompt[: len(prompt) // 2] for prompt in prompts], {"max_new_tokens": 1}, adapter=which)
        rounds = [llm.generate(prompts, params, adapter=which) for _ in range(2 if at_once > 1 else 1)]
        said = {
            "start_s": round(loaded - started, 1), "s": round(time.monotonic() - loaded, 1),
            "accept_length": round(llm.engine.stats()["accept_length"], 2),
            "preempted": sum(one.meta_info["num_retractions"] for found in rounds for one in found),
            "cached": sum(one.meta_info["cached_tokens"] for found in rounds for one in found),
        }  # fmt: skip
    return [[list(one.token_ids) for one in found] for found in rounds], said


def one_family(args: argparse.Namespace) -> None:
    """Prints a line of JSON for each engine."""
    name = args.one
    with tempfile.TemporaryDirectory() as made:
        own = written(Path(made), name, args.files, args.adapters)
        drafter = own.pop("speculative_algorithm")
        (plain,), said = answers(Path(made) / "model", args, 1, speculative_algorithm="none")
        said["different_tokens"] = len({token for answer in plain for token in answer})
        said["sha256"] = hashlib.sha256(json.dumps(plain).encode()).hexdigest()  # to compare with other machines
        print(json.dumps({"family": name, "format": args.format, "way": "none, one at a time", **said}), flush=True)
        more = {"speculative_fixed_shape": True, "enable_mixed_chunk": True, **own}
        algorithms = f"{drafter}+SUFFIX" if drafter != "NGRAM" else "SUFFIX", drafter
        shapes = ("trees", TREE), ("chains", CHAIN)
        for algorithm, (words, shape) in [*itertools.product(algorithms, shapes)][: args.ways]:
            found, said = answers(Path(made) / "model", args, 16, speculative_algorithm=algorithm, **shape, **more)
            same = [sum(a == b for a, b in zip(plain, again, strict=True)) for again in found]
            line = {"family": name, "format": args.format, "way": f"{algorithm}, {words}", "same": same}
            print(json.dumps({**line, "of": args.count, **said}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=listed(str), default=list(FAMILIES))
    parser.add_argument("--formats", type=listed(str), default=["none"], help="as --quantization has them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--count", type=int, default=80, help="of prompts")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--ways", type=int, default=4, help="to draft, of: trees, chains, the same without SUFFIX")
    parser.add_argument("--at-once", type=int, default=8, help="families")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which what runs is stopped")
    parser.add_argument("--out", type=Path, default=Path("family_texts.json"))
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--adapters", type=int, default=0, help="of llama, with --files")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--format", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", metavar="option=value", help="of all engines")
    args = parser.parse_args()
    if args.one:
        one_family(args)
        return
    end, todo = time.monotonic() + args.seconds, [(form, name) for form in args.formats for name in args.families]
    running: dict[tuple[str, str], tuple[subprocess.Popen[str], Path]] = {}
    logs, results = Path(tempfile.mkdtemp()), {}
    while (todo or running) and time.monotonic() < end:
        while todo and len(running) < args.at_once:
            form, name = key = todo.pop(0)
            command = [sys.executable, __file__, "--one", name, "--format", form, "--device", args.device]
            command += ["--count", str(args.count), "--tokens", str(args.tokens), *args.options]
            command += ["--ways", str(args.ways)]
            command += ["--files"] * args.files + ["--adapters", str(args.adapters)]
            log = logs / f"{form} {name}"
            with log.open("w") as file, log.with_suffix(".err").open("w") as errors:
                running[key] = subprocess.Popen(command, stdout=file, stderr=errors, text=True), log
        time.sleep(0.5)
        for key, (process, log) in list(running.items()):
            results[key] = collected(process, log)
            if process.poll() is not None:
                del running[key]
        text = json.dumps([line for lines in results.values() for line in lines], indent=1)
        args.out.with_suffix(".part").write_text(text)
        args.out.with_suffix(".part").replace(args.out)  # so that it is whole, whenever this is ended
    for (form, name), (process, _) in running.items():
        process.kill()
        print(f"{name}, {form}: stopped")
    for line in (line for lines in results.values() for line in lines):
        print(json.dumps(line))


def collected(process: subprocess.Popen[str], log: Path) -> list[dict[str, Any]]:
    """The lines of a family so far, and what it failed with."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    if process.poll():
        lines.append({"family": log.name, "failed": log.with_suffix(".err").read_text()[-1500:]})
    return lines


if __name__ == "__main__":
    main()
