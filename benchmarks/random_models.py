"""Models with random weights in the formats of real ones, for servers that are measured beside each other.

    python benchmarks/random_models.py NAME FOLDER [--adapters 32]

Writes FOLDER/target: config.json, a tokenizer with a token for each id, and what prepares pictures; FOLDER/draft, the
config of a head, where there is one; FOLDER/a0, a1 and so on. Most have no weights: servers make them (`--load-format
dummy`). Those that servers cannot make, MXFP4 and what adapters lie upon, are written, on the GPU where there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "benchmarks" / "gpu_kernels"), str(ROOT / "tests")]

import embeddings  # noqa: E402
from hybrid_gpu import FP8, config_of  # noqa: E402
from ranks import SHAPES  # noqa: E402
from reference import hf_configs as real  # noqa: E402
from step import LLAMA, TINY  # noqa: E402
from tiny_adapters import ATTENTION, MLP, write_adapter  # noqa: E402

from draftwing.models.decoder import DecoderModel  # noqa: E402
from draftwing.models.dummy import fill_random  # noqa: E402
from draftwing.models.loader import load_config  # noqa: E402
from draftwing.models.weight_map import checkpoint_names, stored_tensors  # noqa: E402

Config = dict[str, Any]
MX_BLOCK = 32  # values of MXFP4 with one scale
CODES_VARIANCE = 8.56  # of all 16 codes of MXFP4
SHARD = 4 << 30  # bytes of a file
RANK = 16  # of adapters
DONE = "done"  # a file of a folder that is whole
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if 'image' in p['type'] %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
VISION = {
    "model_type": "qwen3_5", "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": [],
}  # fmt: skip
PICTURE_IDS = {
    "vision_start_token_id": 248053, "vision_end_token_id": 248054, "image_token_id": 248056, "video_token_id": 248057,
}  # fmt: skip
PICTURE_TOKENS = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor", "patch_size": 16,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}  # fmt: skip
VIDEOS = PREPROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"}


class Model(NamedTuple):
    """target, draft: keys of config.json.  files: whether weights are written, "": for nobody, "peer": for servers but
    ours, which can make them below adapters, "both"."""

    target: Config
    draft: Config | None = None
    files: str = ""


def with_pictures(tower: Config = VISION, **sizes: Any) -> Config:
    """Returns the config of a Qwen3.5 with its tower. sizes: of its text model."""
    text = real.QWEN35_9B["text_config"] | sizes
    tower = tower | {"out_hidden_size": text["hidden_size"]}
    return real.QWEN35_9B | PICTURE_IDS | {"text_config": text, "vision_config": tower}


def eagle3(target: Config) -> Config:
    """Returns the config of an EAGLE-3 head of one layer and 32,000 tokens, or all where there are fewer."""
    sizes = {key: target[key] for key in ("hidden_size", "vocab_size")}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    more = {"draft_vocab_size": min(32000, target["vocab_size"]), "target_hidden_size": target["hidden_size"]}
    return LLAMA | sizes | own | more


LLAMA_8B = LLAMA | {"model_type": "llama"}
TINY_LLAMA = LLAMA_8B | TINY
LLAMA_70B = LLAMA_8B | SHAPES["70b"]
BLOCKS_OF_FP8 = {"quantization_config": FP8 | {"modules_to_not_convert": ["lm_head"]}}
GPT_OSS_120B = real.GPT_OSS_20B | {
    "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
DFLASH2_27B = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 248320, "rms_norm_eps": 1e-6, "rope_theta": 1e7, "max_position_embeddings": 262144,
    "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "num_target_layers": 64, "layer_types": [*["sliding_attention"] * 4, "full_attention"], "sliding_window": 2048,
    "is_causal": False, "dflash_config": {
        "block_size": 8, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61], "conv_kernel_size": 2,
        "conv_group_size": 64, "selector_rank": 256, "selector_top_k": 16,
    },
}  # fmt: skip
TINY_TOWER = VISION | {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
TINY_HYBRID = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "head_dim": 64,
}  # fmt: skip
LARGER = {
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "linear_num_value_heads": 48,
}  # fmt: skip
MODELS = {
    "llama-8b": Model(LLAMA_8B, eagle3(LLAMA_8B)),
    "llama-8b-files": Model(LLAMA_8B, eagle3(LLAMA_8B), "peer"),
    "llama-70b": Model(LLAMA_70B, eagle3(LLAMA_70B)),
    "llama-70b-fp8": Model(LLAMA_70B | BLOCKS_OF_FP8, eagle3(LLAMA_70B)),
    "qwen3.5-27b-fp8": Model(config_of("27B"), DFLASH2_27B),
    "qwen3.5-122b-fp8": Model(config_of("122B-A10B")),
    "qwen3.5-9b-pictures": Model(with_pictures()),
    "qwen3.5-27b-pictures": Model(with_pictures(**LARGER)),
    "gpt-oss-120b": Model(GPT_OSS_120B, files="both"),
    "nemotron-3-nano": Model(real.NEMOTRON3_NANO | {"torch_dtype": "bfloat16"}),
    "granite-4-tiny": Model(real.GRANITE4_TINY),
    "kimi-linear-48b": Model(real.KIMI_LINEAR_48B),
    "lfm2-8b": Model(real.LFM2_8B),
    "qwen3-embedding": Model(embeddings.SHAPE, files="both"),
    "tiny": Model(TINY_LLAMA, eagle3(TINY_LLAMA), "peer"),
    "tiny-pictures": Model(with_pictures(TINY_TOWER, **TINY_HYBRID)),
    "tiny-embedding": Model(embeddings.SHAPE | embeddings.TINY, files="both"),
}


def write(folder: Path, name: str, adapters: int = 0, device: str = "cpu") -> None:
    """Writes one of `MODELS` below `folder`, whole or not at all where it is there already."""
    model, done = MODELS[name], folder / DONE
    if done.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    target = folder / "target"
    target.mkdir(parents=True)
    if name.endswith("embedding"):
        embeddings.made(target, torch.bfloat16, tiny=name.startswith("tiny"))
    else:
        write_config(target, model.target)
        write_weights(target, model.target, device) if model.files else None
    if model.draft is not None:
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(json.dumps(model.draft))
    for i in range(adapters):
        write_adapter(folder / f"a{i}", target, i, RANK, dtype=torch.bfloat16, shapes=matrices(model.target))
    done.touch()


def vocabulary(config: Config) -> int:
    """Returns how many token ids a model has."""
    return int(config.get("text_config", config)["vocab_size"])


def write_config(folder: Path, config: Config) -> None:
    """Writes all of a model but its weights."""
    (folder / "config.json").write_text(json.dumps(config))
    text = config.get("text_config", config)
    end = text.get("eos_token_id") or vocabulary(config) - 1
    special = {end: "<|endoftext|>"}
    if "vision_config" in config:
        special |= dict(zip((config[key] for key in PICTURE_IDS), PICTURE_TOKENS, strict=True))
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"<{i}>" for i in range(256, vocabulary(config)))]
    for number, name in special.items():
        pieces[number] = name
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in special.values()])
    backend.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[end], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def write_weights(folder: Path, config: Config, device: str = "cpu", shard: int = SHARD) -> None:
    """Writes the weights of a Llama in bfloat16, or of a gpt-oss with experts in MXFP4."""
    whole = config
    if "quantization_config" in whole:  # all but the experts is of a model with few of them
        few = {"num_local_experts": whole["num_experts_per_tok"], "quantization_config": None}
        config = whole | few
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        model = DecoderModel(load_config(Path(name)), torch.bfloat16, "meta")
    fill_random(model, device)
    others = stored_tensors(model, checkpoint_names(model.config))
    if config is whole:
        save_shards(folder, others, shard)
        return
    own = (pair for pair in others if not any(part in pair[0] for part in (".experts.", ".router.")))
    save_shards(folder, (pair for some in (own, experts_in_mxfp4(whole, device)) for pair in some), shard)


def experts_in_mxfp4(config: Config, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yields routers and experts of each layer, as gpt-oss was published."""
    generator = torch.Generator(device).manual_seed(0)
    count, hidden, ffn = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        here = f"model.layers.{layer}.mlp"
        router = torch.empty(count, hidden, dtype=torch.bfloat16, device=device)
        yield f"{here}.router.weight", router.normal_(0, hidden**-0.5, generator=generator)
        yield f"{here}.router.bias", torch.zeros(count, dtype=torch.bfloat16)
        for part, rows, columns in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
            blocks = count, rows, columns // MX_BLOCK
            codes = torch.empty(*blocks, MX_BLOCK // 2, dtype=torch.uint8, device=device)
            yield f"{here}.experts.{part}_blocks", codes.random_(generator=generator)
            exponent = 127 - round(math.log2(CODES_VARIANCE * columns) / 2)
            yield f"{here}.experts.{part}_scales", torch.full(blocks, exponent, dtype=torch.uint8)
            yield f"{here}.experts.{part}_bias", torch.zeros(count, rows, dtype=torch.bfloat16)


def save_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard: int) -> None:
    """Writes tensors as they come, in files of at most `shard` bytes where each tensor lets them, with an index."""
    where: dict[str, str] = {}
    held: dict[str, Tensor] = {}

    def save() -> None:
        file = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(held, folder / file, {"format": "pt"})
        where.update(dict.fromkeys(held, file))
        held.clear()

    for name, value in tensors:
        if held and sum(one.nbytes for one in held.values()) + value.nbytes > shard:
            save()
        held[name] = value.detach().to("cpu", copy=True).contiguous()
    save()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def matrices(config: Config) -> dict[str, tuple[int, int]]:
    """Returns outputs and inputs of the matrices of a Llama's layers, by module."""
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    values = hidden // heads * config["num_key_value_heads"]
    attention = dict(
        zip(ATTENTION, ((hidden, hidden), (values, hidden), (values, hidden), (hidden, hidden)), strict=True)
    )
    mlp = dict(zip(MLP, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True))
    return {
        f"model.layers.{i}.{place}.{name}": shape
        for i in range(config["num_hidden_layers"])
        for place, part in (("self_attn", attention), ("mlp", mlp))
        for name, shape in part.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapters", type=int, default=0, help="of rank 16, on all linear layers of a Llama")
    args = parser.parse_args()
    write(args.folder, args.name, args.adapters, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
