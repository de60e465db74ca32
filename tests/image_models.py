"""Small random models that read images, of transformers, with a tokenizer, a chat template and pictures to show."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from hybrid_models import CONVS, NET, SIZES, layer_weights
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_tokenizers import byte_level
from torch import Tensor
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4

from draftwing.images.processing import Tile
from draftwing.images.reader import Picture, Prompt, placed, read
from draftwing.images.tiles import GridProcessor
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_model
from draftwing.models.towers.loading import load_tower, stored_tensors
from draftwing.ops import make_ops
from draftwing.text.tokenizer import load_tokenizer

PAD, START, END, EOS = 258, 259, 260, 256
SPECIAL = "<eos>", "<pad>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
TEXT = {"vocab_size": 264, "pad_token_id": 257, "eos_token_id": EOS, "max_position_embeddings": 1024}
IDS = {"image_token_id": PAD, "video_token_id": 261, "vision_start_token_id": START, "vision_end_token_id": END}
VISION = {
    "depth": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 36,
}  # fmt: skip
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
MROPE = {"rope_parameters": {**NET["rope_parameters"], **SECTIONS}}
QWEN3 = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2,
}  # fmt: skip
PREPROCESSOR = {
    "size": {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 48}, "patch_size": 4, "merge_size": 2,
    "temporal_patch_size": 2, "image_mean": [0.5, 0.4, 0.45], "image_std": [0.5, 0.25, 0.3],
}  # fmt: skip
GEMMA4 = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "global_head_dim": 32, "num_key_value_heads": 2, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 1,
    "sliding_window": 20, "vocab_size_per_layer_input": 264, "use_bidirectional_attention": None,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 30.0, "enable_moe_block": False, "use_double_wide_mlp": False,
}  # fmt: skip
POOLED = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "num_key_value_heads": 2, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64,
    "use_clipped_linears": True, "standardize": True,
}  # fmt: skip
PLAIN_LAYERS = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip


class Kind(NamedTuple):
    """prefix: of transformers' classes.  config: of the model.  processor: the class that prepares pictures, with its
    settings."""

    prefix: str
    config: dict[str, Any]
    processor: str = "Qwen2VLImageProcessorPil"
    settings: dict[str, Any] = PREPROCESSOR


GEMMA3 = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "sliding_window": 12, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
KINDS: dict[str, Kind] = {
    "qwen3.5": Kind("Qwen3_5", {"text_config": {**SIZES, **NET, **TEXT, **MROPE}, "vision_config": VISION, **IDS}),
    "qwen3-vl": Kind(
        "Qwen3VL",
        {
            "text_config": {
                **QWEN3,
                **TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [6, 5, 5],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {**VISION, "deepstack_visual_indexes": [0, 1]},
            **IDS,
        },
    ),
    "gemma4": Kind(
        "Gemma4",
        {
            "text_config": {**GEMMA4, **TEXT},
            "vision_config": POOLED,
            "image_token_id": PAD,
            "boi_token_id": START,
            "eoi_token_id": END,
            "audio_token_id": 262,
            "video_token_id": 261,
        },
        "Gemma4ImageProcessorPil",
        {"max_soft_tokens": 16, "patch_size": 4, "pooling_kernel_size": 2},
    ),
    "gemma4-mutual": Kind(  # as 26B and 31B
        "Gemma4",
        {
            "text_config": {
                **GEMMA4,
                **TEXT,
                "use_bidirectional_attention": "vision",
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "sliding_window": 12,
            },
            "vision_config": {**POOLED, "use_clipped_linears": False},
            "image_token_id": PAD,
            "boi_token_id": START,
            "eoi_token_id": END,
            "audio_token_id": 262,
            "video_token_id": 263,
        },
        "Gemma4ImageProcessorPil",
        {"max_soft_tokens": 16, "patch_size": 4, "pooling_kernel_size": 2},
    ),
    "gemma3": Kind(
        "Gemma3",
        {
            "text_config": {**GEMMA3, **TEXT},
            "vision_config": {**PLAIN_LAYERS, "image_size": 32},
            "image_token_index": PAD,
            "boi_token_index": START,
            "eoi_token_index": END,
            "mm_tokens_per_image": 16,
        },
        "Gemma3ImageProcessorPil",
        {
            "size": {"height": 32, "width": 32},
            "resample": 2,
            "image_mean": [0.5, 0.4, 0.45],
            "image_std": [0.5, 0.25, 0.3],
        },
    ),
    "smolvlm": Kind(
        "SmolVLM",
        {
            "text_config": {**QWEN3, **TEXT, "model_type": "llama", "num_hidden_layers": 3},
            "vision_config": {**PLAIN_LAYERS, "image_size": 32},
            "image_token_id": PAD,
            "scale_factor": 2,
            "pad_token_id": 257,
        },
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}},
    ),
    "idefics3": Kind(
        "Idefics3",
        {
            "text_config": {**QWEN3, **TEXT, "model_type": "llama", "num_hidden_layers": 3},
            "vision_config": {**PLAIN_LAYERS, "image_size": 32},
            "image_token_id": PAD,
            "scale_factor": 2,
            "pad_token_id": 257,
        },
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}},
    ),
    "lfm2-vl": Kind(
        "Lfm2Vl",
        {
            "text_config": {**SIZES, **CONVS, **TEXT, "model_type": "lfm2", "num_hidden_layers": 4},
            "vision_config": {
                **PLAIN_LAYERS,
                "model_type": "siglip2_vision_model",
                "num_patches": 36,
                "vision_use_head": False,
            },
            "image_token_id": PAD,
            "projector_hidden_size": 80,
        },
        "",
        {
            "encoder_patch_size": 4,
            "downsample_factor": 2,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "tile_size": 32,
            "image_mean": [0.5, 0.4, 0.45],
            "image_std": [0.5, 0.25, 0.3],
        },
    ),
}
# Of which the GEMMs of a GPU's deterministic mode take all matrices of the decoder.
ON_GPU: dict[str, Kind] = {
    "qwen3.5 on a gpu": Kind(
        "Qwen3_5",
        {
            "text_config": {**SIZES, **NET, **TEXT, **MROPE, "intermediate_size": 192},
            "vision_config": VISION,
            **IDS,
        },
    ),
    "qwen3-vl on a gpu": KINDS["qwen3-vl"]._replace(
        config={
            **KINDS["qwen3-vl"].config,
            "text_config": {**KINDS["qwen3-vl"].config["text_config"], "intermediate_size": 192, "head_dim": 64},
        }
    ),
    "gemma4 on a gpu": KINDS["gemma4"]._replace(
        config={
            **KINDS["gemma4"].config,
            "text_config": {
                **GEMMA4,
                **TEXT,
                "intermediate_size": 128,
                "hidden_size_per_layer_input": 64,
                "head_dim": 256,
                "global_head_dim": 512,
            },
        }
    ),
    "gemma4-mutual on a gpu": KINDS["gemma4-mutual"]._replace(
        config={
            **KINDS["gemma4-mutual"].config,
            "text_config": {
                **KINDS["gemma4-mutual"].config["text_config"],
                "intermediate_size": 128,
                "head_dim": 256,
                "global_head_dim": 512,
            },
        }
    ),
    "gemma3 on a gpu": KINDS["gemma3"]._replace(  # with heads as 27B, whose text has the kernels of Hopper
        config={
            **KINDS["gemma3"].config,
            "text_config": {**GEMMA3, **TEXT, "intermediate_size": 128, "head_dim": 128},
        }
    ),
}
# With towers of one layer, of which pictures are as large as those of published models.
ONE_LAYER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_LARGE = {**VISION, "depth": 1, "hidden_size": 32, "intermediate_size": 32, "patch_size": 16}
SPLIT: dict[str, Any] = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}


def _large(kind: str, vision: dict[str, Any], settings: dict[str, Any], **more: Any) -> Kind:
    own = KINDS[kind]
    return own._replace(config={**own.config, "vision_config": vision, **more}, settings={**own.settings, **settings})


QWEN_SIZES = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16}
LARGE: dict[str, Kind] = {
    "large qwen3.5": _large("qwen3.5", QWEN_LARGE, QWEN_SIZES),
    "large qwen3-vl": _large("qwen3-vl", {**QWEN_LARGE, "deepstack_visual_indexes": [0]}, QWEN_SIZES),
    "large gemma4": _large(
        "gemma4",
        {**POOLED, "num_hidden_layers": 1, "patch_size": 16, "pooling_kernel_size": 3},
        {"max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3},
    ),
    "large gemma3": _large(
        "gemma3",
        {**ONE_LAYER, "patch_size": 14, "image_size": 896},
        {"size": {"height": 896, "width": 896}},
        mm_tokens_per_image=256,
    ),
    "large smolvlm": _large("smolvlm", {**ONE_LAYER, "patch_size": 16, "image_size": 512}, SPLIT, scale_factor=4),
    "large idefics3": _large("idefics3", {**ONE_LAYER, "patch_size": 16, "image_size": 512}, SPLIT, scale_factor=4),
    "large lfm2-vl": _large(
        "lfm2-vl",
        {**KINDS["lfm2-vl"].config["vision_config"], **ONE_LAYER, "patch_size": 16, "num_patches": 256},
        {"encoder_patch_size": 16, "min_image_tokens": 64, "max_image_tokens": 256, "tile_size": 512},
    ),
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GEMMA_EXPERTS = {"num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32, "enable_moe_block": True}


def _routed(kind: str, prefix: str, **more: Any) -> Kind:
    own = KINDS[kind]
    return own._replace(prefix=prefix, config={**own.config, "text_config": {**own.config["text_config"], **more}})


# With experts, beside pictures of the same towers.
ROUTED: dict[str, Kind] = {
    "qwen3-vl-moe": _routed("qwen3-vl", "Qwen3VLMoe", **EXPERTS),
    "qwen3.5-moe": _routed("qwen3.5", "Qwen3_5Moe", **EXPERTS, shared_expert_intermediate_size=64),
    "gemma4-26b": _routed("gemma4-mutual", "Gemma4", **GEMMA_EXPERTS),
}
ALL = KINDS | ON_GPU | LARGE | ROUTED
FEW = ("qwen3.5", "gemma3")  # one with states of rows, one with mutual images: for what is the scheduler's
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@cache
def reference(kind: str) -> Any:
    """Of transformers, in float32, with random weights, and values of norms and decays that matter."""
    prefix, settings, *_ = ALL[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**settings)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("A_log"):
                param.uniform_(-3, 0.5)
            elif name.endswith("dt_bias"):
                param.normal_(0, 0.5)
            elif "norm" in name:
                param.uniform_(0.5, 1.5)
            elif name.endswith("lm_head.weight"):
                param.normal_(0, 0.5)
            else:
                param.normal_(0, 0.5 if "conv" in name and param.dim() == 3 else 0.15)
        for name, values in model.named_buffers():
            if name.endswith(("put_min", "put_max")):  # which clip something
                values.fill_(-1.5 if name.endswith("min") else 1.0)
            elif name.endswith(("std_bias", "std_scale", "layer_scalar")):
                values.uniform_(0.5, 1.5)
    return model


def write_model(folder: Path, kind: str) -> Path:
    """Writes a whole checkpoint."""
    reference(kind).save_pretrained(folder)
    byte_level(*SPECIAL).save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("<|image_pad|><|vision_end|>", "") if kind.startswith("gemma3") else TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    (folder / "preprocessor_config.json").write_text(json.dumps(ALL[kind].settings))
    return folder


def with_prediction_layer(folder: Path, kind: str) -> dict[str, Tensor]:
    """Adds one with random weights to a checkpoint of `write_model`. Returns these."""
    theirs = reference(kind)
    text = {name.replace("model.language_model.", "model."): value for name, value in theirs.state_dict().items()}
    weights = layer_weights(SimpleNamespace(config=theirs.config.get_text_config(), state_dict=lambda: text))
    save_file({**load_file(folder / "model.safetensors"), **weights}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return weights


@cache
def loaded(folder: Path, packed: bool = True) -> tuple[DecoderModel, Any]:
    """Returns a checkpoint's model with its tower, and how pictures are prepared. packed: as it is served, so that a
    row's bits do not depend on how many there are."""
    model = load_model(folder, torch.float32, "cpu")
    tower = model.config.tower
    assert tower is not None
    ops = make_ops(torch.device("cpu"))
    if packed:
        model.pack(ops, True)
    model.tower = load_tower(tower, stored_tensors(folder, tower), torch.float32, torch.device("cpu"), DENSE, ops)
    return model, tower.processor(load_tokenizer(folder, None))


@cache
def in_blocks(folder: Path) -> DecoderModel:
    """The model of `loaded` with weights in blocks, whose steps are calls of C."""
    ops = make_ops(torch.device("cpu"))
    model = load_model(folder, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", ops))
    model.pack(ops, True)
    model.tower = loaded(folder)[0].tower
    return model


def prompt_of(folder: Path, number: int, shown: list[tuple[int, int, int]]) -> tuple[list[int], Any]:
    """Tokens and images of a prompt; the first token is the number, those of requests 0 and 4 are else the same."""
    _, processor = loaded(folder)
    pieces = [read(Picture(encoded(picture(*size)), "x"), processor) for size in shown]
    tiles = [sum(isinstance(piece, Tile) for piece in every) for every in pieces]
    places = [one for count in tiles for one in (90, *[PAD] * count, 91)]
    text = [number, *range(60, 64 + number % 4), *places, 70 + number % 4, 33]
    return placed(text, Prompt("", pieces), processor)


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Colours that run over the picture, and noise: no two are alike."""
    random = np.random.default_rng([seed, width, height])
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = [np.sin(3 * random.normal() + 5 * random.normal() * across + 5 * random.normal() * down) for _ in range(3)]
    values = 127 + 90 * np.stack(waves, -1) + random.normal(0, 12, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def processed(kind: str, images: Sequence[Image.Image]) -> dict[str, Tensor]:
    """Returns what transformers makes of pictures, by the names that its models take."""
    if not images:
        return {}
    _, _, processor, settings = ALL[kind]
    if not processor:
        return by_patches(kind, images)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemma4, "_SUPPORTED_SOFT_TOKENS", (16, 280))  # for short prompts
        made = getattr(transformers, processor)(**settings)(images=list(images), return_tensors="pt")
    return {name: value for name, value in made.items() if name not in ("num_soft_tokens_per_image", "num_crops")}


def by_patches(kind: str, images: Sequence[Image.Image]) -> dict[str, Tensor]:
    """Does as a processor that needs torchvision, of our tiles."""
    settings = ALL[kind].settings
    side = settings["encoder_patch_size"]
    least, most = (settings[f"{name}_image_tokens"] * (2 * side) ** 2 for name in ("min", "max"))
    processor = GridProcessor(PAD, "", "", 2 * side, least, most, settings["tile_size"])
    tiles = [piece for image in images for piece in processor.pieces(image) if isinstance(piece, Tile)]
    longest = max([64, *(tile.height * tile.width // side**2 for tile in tiles)])
    values, masks = torch.zeros(len(tiles), longest, 3 * side**2), torch.zeros(len(tiles), longest, dtype=torch.int32)
    shapes = torch.tensor([[tile.height // side, tile.width // side] for tile in tiles])
    for i, tile in enumerate(tiles):
        pixels = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(tile.height, tile.width, 3) / 255
        pixels = (pixels - torch.tensor(settings["image_mean"])) / torch.tensor(settings["image_std"])
        patches = pixels.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2).flatten(2).flatten(0, 1)
        values[i, : len(patches)] = patches
        masks[i, : len(patches)] = 1
    return {"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": masks}


def features(kind: str, image: Image.Image) -> tuple[Tensor, list[Tensor]]:
    """Returns the features of a picture, and those that layers add, by transformers."""
    inner = reference(kind).model
    found = inner.get_image_features(**processed(kind, [image]), return_dict=True)
    deep = [
        one[0] if isinstance(one, tuple | list) else one for one in getattr(found, "deepstack_features", None) or ()
    ]
    pooled = found.pooler_output
    return torch.cat(tuple(pooled)) if isinstance(pooled, tuple | list) else pooled, deep


def inputs_of(kind: str, ids: Sequence[int], images: Sequence[Image.Image]) -> tuple[Any, dict[str, Tensor]]:
    """Returns a model and what it takes of a prompt. ids: with all tokens of images."""
    model, whole = reference(kind), torch.tensor([list(ids)])
    model.model.rope_deltas = None
    name = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
    kinds = {name: (whole == PAD).int()} if kind.startswith(("qwen", "gemma")) else {}
    return model, {"input_ids": whole, "attention_mask": torch.ones_like(whole), **processed(kind, images), **kinds}


def logits(kind: str, ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
    """Returns the logits behind each token of a prompt, by transformers. ids: as of `greedy`."""
    model, inputs = inputs_of(kind, ids, images)
    return model(**inputs).logits[0]


def greedy(kind: str, ids: Sequence[int], images: Sequence[Image.Image], count: int) -> list[int]:
    """Returns so many tokens that transformers draws after a prompt with images. ids: with all tokens of images."""
    model, inputs = inputs_of(kind, ids, images)
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(ids) :].tolist()
