"""Models with random weights in the formats of real ones, for servers that are measured beside each other.

    python benchmarks/random_models.py NAME FOLDER [--adapters 32]

Writes FOLDER/target: config.json, a tokenizer with a token for each id, and what prepares pictures; FOLDER/draft, a
head, where there is one; FOLDER/a0, a1 and so on. Weights are made on the GPU where there is one. Some models have
none, as too large for a disk or stored in too special a way: servers make them (`--load-format dummy`). That is no way
for fp8 and MXFP4, of which SGLang then has zeros and whatever was in memory; zeros take less power. Nor for mixtures:
its weights are so small then that all tokens choose the same experts, and it reads these alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
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

from draftwing.layers.linear_ops.base import ParamSlice  # noqa: E402
from draftwing.models.decoder import DecoderModel  # noqa: E402
from draftwing.models.dummy import HEAD_SCALE, random_values  # noqa: E402
from draftwing.models.heads.loader import load_draft_head, load_mtp_head  # noqa: E402
from draftwing.models.loader import load_config, load_model  # noqa: E402
from draftwing.models.weight_map import checkpoint_names  # noqa: E402

Config = dict[str, Any]
MX_BLOCK = 32  # values of MXFP4 with one scale
FP8_BLOCK = 128  # rows and columns of fp8 with one scale
CODES = 64.0  # standard deviation of codes in fp8, which end at 448
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
    """target, draft: keys of config.json.  files: whether weights are written.  drafter: the algorithm of the head."""

    target: Config
    draft: Config | None = None
    files: bool = False
    drafter: str = "EAGLE3"


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
    "use_sliding_window": True, "is_causal": False, "dflash_config": {
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
    "llama-8b": Model(LLAMA_8B, eagle3(LLAMA_8B), files=True),
    "llama-70b": Model(LLAMA_70B, eagle3(LLAMA_70B)),
    "llama-70b-fp8": Model(LLAMA_70B | BLOCKS_OF_FP8, eagle3(LLAMA_70B), files=True),
    "qwen3.5-27b-fp8": Model(config_of("27B"), DFLASH2_27B, files=True, drafter="DFLASH2"),
    "qwen3.5-122b-fp8": Model(config_of("122B-A10B"), files=True),
    "qwen3.5-9b-pictures": Model(with_pictures()),
    "qwen3.5-27b-pictures": Model(with_pictures(**LARGER)),
    "gpt-oss-120b": Model(GPT_OSS_120B, files=True),
    "nemotron-3-nano": Model(real.NEMOTRON3_NANO | {"torch_dtype": "bfloat16"}, eagle3(real.NEMOTRON3_NANO)),
    "granite-4-tiny": Model(real.GRANITE4_TINY, eagle3(real.GRANITE4_TINY)),
    "kimi-linear-48b": Model(real.KIMI_LINEAR_48B, eagle3(real.KIMI_LINEAR_48B)),
    "lfm2-8b": Model(real.LFM2_8B, eagle3(real.LFM2_8B), files=True),
    "qwen3-embedding": Model(embeddings.SHAPE, files=True),
    "tiny": Model(TINY_LLAMA, eagle3(TINY_LLAMA), files=True),
    "tiny-pictures": Model(with_pictures(TINY_TOWER, **TINY_HYBRID)),
    "tiny-embedding": Model(embeddings.SHAPE | embeddings.TINY, files=True),
}


def write(folder: Path, name: str, adapters: int = 0, device: str = "cpu", weights: bool = True) -> None:
    """Writes one of `MODELS` below `folder`, whole or not at all where it is there already. weights: whether any are
    written; else servers make them."""
    model, done = MODELS[name], folder / DONE
    files = weights and model.files
    if done.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    target = folder / "target"
    target.mkdir(parents=True)
    if name.endswith("embedding"):
        embeddings.made(target, torch.bfloat16, tiny=name.startswith("tiny"))
    else:
        write_config(target, model.target)
        write_weights(target, device) if files else None
    if model.draft is not None:
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(json.dumps(model.draft))
        write_head(folder / "draft", target, model.drafter, device) if files else None
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


def write_weights(folder: Path, device: str = "cpu", shard: int = SHARD) -> None:
    """Writes the weights of a config: of a Llama, an LFM2 mixture or the text model of a Qwen3.5, with its prediction
    layer, in bfloat16 or blocks of fp8, or of a gpt-oss with experts in MXFP4."""
    raw, config = json.loads((folder / "config.json").read_text()), load_config(folder)
    model = DecoderModel(config, torch.bfloat16, "meta")
    tensors = [random_tensors(model, checkpoint_names(config), device)]
    if config.quantization is not None and config.quantization.method == "mxfp4":
        own = (".experts.", ".router.")
        tensors = [((name, value) for name, value in tensors[0] if not any(part in name for part in own))]
        tensors.append(experts_in_mxfp4(raw, device))
    if raw.get("mtp_num_hidden_layers"):
        head = load_mtp_head(folder, model, torch.bfloat16, "meta", dummy=True)
        named = random_tensors(head, head.names(), device, config.quantization)
        tensors.append((name.removeprefix("model."), value) for name, value in named)
    save_shards(folder, itertools.chain(*tensors), shard)


def random_tensors(
    module: Any, table: Mapping[str, ParamSlice], device: str, quantization: Any = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields what a checkpoint has of a module on the meta device. quantization: as its config says, unless it says so
    itself."""
    generator, params = torch.Generator(device).manual_seed(0), dict(module.named_parameters(remove_duplicate=False))
    quantization = quantization or module.config.quantization
    in_fp8 = quantization is not None and quantization.method == "fp8"
    for name, part in table.items():
        owner, _, leaf = part.param.rpartition(".")
        scale = HEAD_SCALE if owner == "lm_head" else 1.0
        values = random_values(part.of(params[part.param]), leaf, scale, device, generator)
        stored = part.stored(values)
        stem = name.removesuffix(".weight")
        if in_fp8 and stem != name and stored.dim() == 2 and quantization.scheme_of(stem) is not None:
            rows, columns = stored.shape
            yield name, stored.mul_(CODES * columns**0.5).to(torch.float8_e4m3fn)
            blocks = math.ceil(rows / FP8_BLOCK), math.ceil(columns / FP8_BLOCK)
            yield f"{stem}.weight_scale_inv", torch.full(blocks, columns**-0.5 / CODES)
        else:
            yield name, stored


def write_head(folder: Path, target: Path, drafter: str, device: str) -> None:
    """Writes the weights of a head for the model in `target`."""
    model = load_model(target, torch.bfloat16, "meta", dummy=True)
    head = load_draft_head(folder, model, drafter, torch.bfloat16, "meta", dummy=True)
    generator = torch.Generator(device).manual_seed(1)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, like in head.stored_tensors():
            if name == "d2t":  # drafted tokens lie evenly in the target's vocabulary
                yield name, torch.arange(len(like)) * model.config.vocab_size // len(like) - torch.arange(len(like))
            elif like.is_floating_point():
                yield name, random_values(like, name.rpartition(".")[2], 1.0, device, generator)

    save_shards(folder, tensors(), SHARD)


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
