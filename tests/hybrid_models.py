"""Small random hybrid models of transformers, and forwards of ours over a pool with states of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import load_file, save_file
from thread_ranks import meet
from torch import Tensor

from draftwing.kv.pool import KVPool, RowStates, delta_specs
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_model
from draftwing.ops.attention.batch import Batch, ChunkSpan, ImageRows
from draftwing.ops.attention.spec import TorchAttention
from draftwing.ops.table import TorchOps
from draftwing.parallel.ranks import Ranks
from draftwing.train.capture import Causal

VOCAB, LAYERS = 101, 4
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256, "bos_token_id": None,
}  # fmt: skip
NET = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
LFM2_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
}  # fmt: skip
CONVS = {
    "conv_L_cache": 3, "norm_eps": 1e-5,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
LFM3 = {
    "head_dim": 32, "conv_L_cache": 5, "norm_eps": 1e-3, "sliding_window": 20, "tie_word_embeddings": False,
    "pad_token_id": None,
    "layer_types": ["full_attention", "conv", "sliding_attention", "conv"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}  # fmt: skip
GRANITE = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"], "rms_norm_eps": 1e-5,
    "shared_intermediate_size": 80, "attention_multiplier": 0.125, "embedding_multiplier": 3, "logits_scaling": 2,
    "residual_multiplier": 0.4, "mamba_n_heads": 8, "mamba_d_state": 32, "position_embedding_type": "nope",
    "num_local_experts": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
BAMBA = {
    "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_state": 32, "mamba_d_head": 16, "mamba_n_groups": 2,
    "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "pad_token_id": 0,
}  # fmt: skip
JAMBA = {
    "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3,
    "mamba_d_conv": 3, "mamba_dt_rank": 32, "pad_token_id": 0, "mamba_conv_bias": False,
}  # fmt: skip
OLMO = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 48,
    "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": None}, "pad_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"], "head_dim": 32,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4,
}  # fmt: skip
NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5,
}  # fmt: skip
NEMOTRON_MTP = "layers.0.eh_proj", "layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm"
FALCON = {
    "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 32, "head_dim": 32, "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4, "key_multiplier": 0.6, "mlp_multipliers": [1.3, 0.7], "attention_out_multiplier": 0.8,
    "attention_in_multiplier": 1.2, "ssm_multipliers": [0.7, 1.3, 1.4, 0.8, 1.5], "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
EVEN_FACTORS = {  # which quantised weights can be multiplied with to the bit
    "embedding_multiplier": 4.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.5, "mlp_multipliers": [2.0, 0.5],
    "attention_out_multiplier": 0.5, "attention_in_multiplier": 2.0, "ssm_multipliers": [0.5, 2.0, 2.0, 0.5, 1.0],
    "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5, "mamba_d_ssm": 128, "mamba_n_heads": 8,
}  # fmt: skip
KIMI = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "linear_head_dim": 32, "linear_num_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 3, "n_group": 2,
    "moe_intermediate_size": 32, "routed_scaling_factor": 1.5, "pad_token_id": None, "eos_token_id": None,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
LING = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 32, "layer_group_size": 2, "first_k_dense_replace": 1, "kda_lower_bound": -3.0,
    "routed_scaling_factor": 1.5, "pad_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
LIGHTNING = {  # in blocks of 8 tokens
    "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3, "pad_token_id": None,
    "eos_token_id": None, "block_size": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    **{f"{part}_alpha_factor": 3.5 for part in ("full_attn", "linear_attn", "mlp")},
    **{f"{part}_beta_factor": 1.25 for part in ("full_attn", "linear_attn", "mlp")},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
QWEN4 = {  # with blocks of 4 tokens, of which 3 are picked, and n-grams in two layers
    **NET, **EXPERTS, "hc_count": 4, "hc_lowrank": 16, "ple_layer_ids": [1, 3], "ple_embed_dim": 64, "ngram_size": 3,
    "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 16, "split_ngram_parts": 3,
    "indexer_n_heads": 11, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 12,
    "indexer_compress_ratio": 4, "eos_token_id": 7, "output_gate_type": "sigmoid",
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
}  # fmt: skip
# Prefix of transformers' classes, and what is not in `SIZES`.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", NET),
    "qwen3.5-even": ("Qwen3_5", {**NET, "linear_num_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3.5-every": (
        "Qwen3_5",
        {
            **NET,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {**NET["rope_parameters"], "partial_rotary_factor": 1.0},
        },
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", {**NET, **EXPERTS}),
    "qwen3-next": ("Qwen3Next", {**NET, **EXPERTS}),
    "qwen3-next-mixed": ("Qwen3Next", {**NET, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen4": ("Qwen4Exp", QWEN4),
    "granite4": ("GraniteMoeHybrid", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite4-dense": ("GraniteMoeHybrid", GRANITE),
    "granite4-rope": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": ("Bamba", BAMBA),
    "jamba": ("Jamba", JAMBA),
    "olmo-hybrid": ("OlmoHybrid", OLMO),
    "olmo-hybrid-turned": (
        "OlmoHybrid",
        {
            **OLMO,
            "linear_allow_neg_eigval": False,
            "linear_num_value_heads": 4,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h-moe": ("NemotronH", {**NEMOTRON, **NEMOTRON_EXPERTS}),
    "nemotron-h-latent": (
        "NemotronH",
        {**NEMOTRON, **NEMOTRON_EXPERTS, "moe_latent_size": 32, "conv_kernel": 3, "use_conv_bias": False},
    ),
    "falcon-h1": ("FalconH1", FALCON),
    "falcon-h1-normed": (
        "FalconH1",
        {
            **FALCON,
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-behind": (
        "FalconH1",
        {**FALCON, **EVEN_FACTORS, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
    ),
    "kimi-linear": ("KimiLinear", KIMI),
    "minimax": ("MiniMax", LIGHTNING),
    "ling3": ("BailingHybrid", LING),
    "ling3-plain": (
        "BailingHybrid",
        {**LING, "kda_safe_gate": False, "q_lora_rank": 24, "attention_bias": True, "norm_topk_prob": False},
    ),
    "lfm2": ("Lfm2", {**CONVS, "intermediate_size": 150, "block_multiple_of": 32}),
    "lfm3": ("Lfm3", LFM3),
    "lfm2-moe": ("Lfm2Moe", {**LFM2_EXPERTS, **CONVS, "num_dense_layers": 1}),
    "lfm2-plain": ("Lfm2", {**CONVS, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
}


def reference(kind: str, **overrides: Any) -> Any:
    """Of transformers, in float32, with random weights, and values of norms and decays that matter."""
    prefix, settings = KINDS[kind]
    named = f"{prefix}TextConfig" if hasattr(transformers, f"{prefix}TextConfig") else f"{prefix}Config"
    if not hasattr(transformers, named):
        pytest.skip(f"transformers {transformers.__version__} has no {prefix}")
    try:
        config = getattr(transformers, named)(**{**SIZES, **settings, **overrides})
    except StrictDataclassClassValidationError as error:
        if "layer types" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} has other layers of {prefix}")
    return of_values(getattr(transformers, f"{prefix}ForCausalLM"), config)


def mamba2(vocab_size: int) -> Any:
    """Of transformers, as `reference`: no layer has attention."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 32}
    return of_values(transformers.Mamba2ForCausalLM, transformers.Mamba2Config(vocab_size=vocab_size, **sizes))


def of_values(kind: Callable[[Any], Any], config: Any) -> Any:
    """A model of a config with random weights, and values of norms and decays that matter."""
    torch.manual_seed(0)
    model = kind(config).float().eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("A_log"):
                param.uniform_(-3, 0.5)
            elif name.endswith("dt_bias"):
                param.normal_(0, 0.5)
            elif "norm" in name:
                param.uniform_(0.5, 1.5)
            else:
                param.normal_(0, 0.5 if "conv" in name and param.dim() == 3 else 0.15)
        for name, values in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                values.normal_(0, 0.3)
    return model


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    if model.config.model_type == "olmo_hybrid":
        file = folder / "model.safetensors"
        save_file(of_convolutions(load_file(file), model.config), file)
    return folder


def of_convolutions(tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The tensors with taps of queries, keys and values apart, as published; transformers writes thirds of them all."""
    made, keys = dict(tensors), config.linear_num_key_heads * config.linear_key_head_dim
    sizes = keys, keys, config.linear_num_value_heads * config.linear_value_head_dim
    for name in tensors:
        if ".q_conv1d." in name:
            names = [name.replace(".q_", f".{part}_") for part in "qkv"]
            joined = torch.cat([tensors[one] for one in names])
            made |= {one: part.clone() for one, part in zip(names, joined.split(sizes), strict=True)}
    return made


def layer_weights(theirs: Any, seed: int = 5) -> dict[str, Tensor]:
    """`mtp.*` of a prediction layer, of the shapes of the model's first layer with attention; of Nemotron's, of the
    first with experts, too."""
    generator = torch.Generator().manual_seed(seed)
    hidden, nemotron = theirs.config.hidden_size, theirs.config.model_type == "nemotron_h"
    first, streams = theirs.config.layer_types.index, theirs.config.model_type == "qwen4_exp_text"
    attention = "indexed_attention" if streams else "full_attention"
    shapes = {
        name.replace(f"model.layers.{layer}.", f"mtp.layers.{i}."): value.shape
        for i, layer in enumerate((first(attention), *([first("moe")] if nemotron else ())))
        for name, value in theirs.state_dict().items()
        if name.startswith(f"model.layers.{layer}.")
    }
    join, *norms = NEMOTRON_MTP if nemotron else ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in norms}
    shapes[f"mtp.{join}.weight"] = (hidden, 2 * hidden)
    if streams:
        del shapes["mtp.fc.weight"], shapes["mtp.norm.weight"]
        shapes |= {f"mtp.{name}.weight": (hidden, hidden) for name in ("fc_embedding", "fc_hidden")}
        shapes["mtp.pre_fc_norm_hidden.weight"] = (theirs.config.hc_count * hidden,)
        mixer = "model.hyper_connection_mixer."
        shapes |= {
            name.replace("model.", "mtp."): value.shape
            for name, value in theirs.state_dict().items()
            if name.startswith(mixer)
        }
    return {
        name: 0.3 * torch.randn(shape, generator=generator) / (1 if len(shape) == 1 else shape[-1] ** 0.5 / 3)
        for name, shape in shapes.items()
    }


def with_layer(folder: Path, theirs: Any, weights: Mapping[str, Tensor], **more: Any) -> Path:
    """A checkpoint with its prediction layer, as published: experts of one tensor, or of many."""
    saved(folder, theirs)
    stored = load_file(folder / "model.safetensors")
    own = expert_by_expert(weights) if theirs.config.model_type == "nemotron_h" else weights
    save_file({**stored, **own}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, mtp_key(theirs): 1, **more}))
    return folder


def mtp_key(theirs: Any) -> str:
    """Of a config that has a prediction layer."""
    return "num_nextn_predict_layers" if theirs.config.model_type == "nemotron_h" else "mtp_num_hidden_layers"


def expert_by_expert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of tensors of all experts, those of each."""
    apart = {}
    for name, value in weights.items():
        prefix, found, matrix = name.partition(".experts.")
        some = {f"{prefix}.experts.{i}.{matrix}.weight": one.clone() for i, one in enumerate(value)} if found else {}
        apart |= some or {name: value}
    return apart


@torch.inference_mode()
def whole_logits(model: DecoderModel, ids: Tensor, images: ImageRows | None = None) -> Tensor:
    """Of one sequence, without a pool."""
    return model.logits(model(ids, torch.arange(len(ids)), Causal(1, len(ids)), images=images)[0])


def on_ranks(
    path: Path, ops: TorchOps, ids: Tensor, expert_parallel: bool = False, size: int = 2, invariant: bool = False,
    dtype: torch.dtype = torch.float32, images: ImageRows | None = None, **kw: Any,
) -> Tensor:  # fmt: skip
    """The logits of a packed model that is spread over so many ranks, which agree on them. kw: as `load_model` has
    them."""

    def share(ranks: Ranks) -> Tensor:
        model = load_model(path, dtype, "cpu", ranks=ranks, **kw)
        model.pack(ops)
        return whole_logits(model, ids, images)

    with ThreadPoolExecutor(size) as pool:
        one, *others = pool.map(share, meet(size, expert_parallel, invariant))
    assert all(torch.equal(one, other) for other in others)
    return one


def tokens(length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


class Pooled:
    """One row of a model, on its device, over a pool of scattered slots."""

    nodes, long = 6, 96

    def __init__(self, model: DecoderModel, ops: TorchOps | None = None, adapted: Tensor | None = None) -> None:
        """ops: whose attention, None: torch's.  adapted: the slot of each row of the one call, None: of none."""
        self.model, self._adapted = model, adapted
        self.device = device = next(model.parameters()).device
        specs = delta_specs(model.kv_layers)
        self.pool = KVPool(model.kv_layers, 2 * self.long, model.dtype, device)
        self.states = self.pool.states = RowStates(specs, 2, 1, self.nodes, model.dtype, device)  # type: ignore[attr-defined]
        self.states.read[0], self.states.write[0] = 0, 1
        self.attn = TorchAttention(self.pool) if ops is None else ops.attention(self.pool)  # type: ignore[arg-type]
        self.table = torch.zeros(2, self.long, dtype=torch.int64)
        self.table[0] = 1 + torch.randperm(2 * self.long, generator=torch.Generator().manual_seed(3))[: self.long]
        self._rows, self._spare = torch.tensor([0]), 2

    @torch.inference_mode()
    def chunk(self, ids: Tensor, start: int) -> Tensor:
        """Logits of the positions from `start` on."""
        end = start + len(ids)
        batch = Batch(
            self._rows, ids, torch.arange(start, end), self.table[0, start:end], self.table, torch.tensor([start]),
            chunks=(ChunkSpan(0, 0, start, len(ids)),), bound=end,
        )  # fmt: skip
        out = self._logits(batch)
        self._advance(end)
        return out

    @torch.inference_mode()
    def tree(self, ids: Tensor, parents: list[int], start: int) -> Tensor:
        """Logits of a tree's nodes [n]; parents: of each node, -1 of the root, whose position is `start`."""
        paths = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
        depth = max(map(len, paths))
        path = torch.tensor([[*nodes, *[0] * (depth - len(nodes))] for nodes in paths])[None]
        path_len = torch.tensor([[len(nodes) for nodes in paths]])
        batch = Batch(
            self._rows, ids, start + path_len[0] - 1, self.table[0, start : start + len(ids)], self.table,
            torch.tensor([start]), path, path_len, window=len(ids), bound=start + len(ids),
        )  # fmt: skip
        out = self._logits(batch)
        self._advance(start + 1)
        return out

    def _logits(self, batch: Batch) -> Tensor:
        there = Batch(*(part.to(self.device) if isinstance(part, Tensor) else part for part in batch))
        hidden, _ = self.model(there.ids, there.positions, self.attn.bind(there, 0), adapted=self._adapted)
        return self.model.logits(hidden).cpu()

    def accept(self, start: int, nodes: list[int]) -> None:
        """Puts these nodes of the tree whose root was at `start` behind it, as commit does."""
        slots, others = self.table[0, start:].clone(), [i for i in range(len(self.table[0]) - start) if i not in nodes]
        self.table[0, start:] = slots[torch.tensor([*nodes, *others])]

    def _advance(self, length: int) -> None:
        """As commit does. Before the first step the state is that of an empty text, which is never written."""
        self.states.advance(self._rows.to(self.device), torch.tensor([length], device=self.device))
        if not self.states.write[0]:
            self.states.write[0] = self._spare


def check_steps(theirs: Any, pooled: Pooled, near: float = 1e-4) -> None:
    """Chunks, single tokens and a tree have the logits that transformers' model gives the whole text."""
    ids = tokens(40)
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    found = [pooled.chunk(ids[:3], 0), pooled.chunk(ids[3:20], 3), pooled.tree(ids[20:21], [-1], 20)]
    # The text's tokens are nodes 0, 2 and 4; then two steps of one node follow.
    drafted = ids[torch.tensor([21, 5, 22, 9, 23])]
    found.append(pooled.tree(drafted, [-1, 0, 0, 2, 2], 21)[torch.tensor([0, 2, 4])])
    pooled.accept(21, [0, 2, 4])
    found += [pooled.tree(ids[24:25], [-1], 24), pooled.tree(ids[25:26], [-1], 25), pooled.chunk(ids[26:], 26)]
    torch.testing.assert_close(torch.cat(found), expected, atol=near, rtol=1e-4)
