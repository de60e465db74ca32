"""Small random models that read images, of transformers, with a tokenizer, a chat template and pictures to show."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hybrid_models import NET, SIZES
from PIL import Image
from tiny_tokenizers import byte_level
from torch import Tensor

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
# The prefix of transformers' classes, and their configs.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", {"text_config": {**SIZES, **NET, **TEXT, **MROPE}, "vision_config": VISION, **IDS}),
    "qwen3-vl": (
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
}
PREPROCESSOR = {
    "size": {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 48}, "patch_size": 4, "merge_size": 2,
    "temporal_patch_size": 2, "image_mean": [0.5, 0.4, 0.45], "image_std": [0.5, 0.25, 0.3],
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@cache
def reference(kind: str) -> Any:
    """Of transformers, in float32, with random weights, and values of norms and decays that matter."""
    prefix, settings = KINDS[kind]
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
    return model


def write_model(folder: Path, kind: str) -> Path:
    """Writes a whole checkpoint."""
    reference(kind).save_pretrained(folder)
    byte_level(*SPECIAL).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


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


def processed(image: Image.Image, settings: Mapping[str, Any] = PREPROCESSOR) -> tuple[Tensor, Tensor]:
    """Returns what transformers makes of a picture: values of patches, and the grid [1, 3]."""
    made = transformers.Qwen2VLImageProcessorPil(**settings)(images=image, return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


def greedy(model: Any, ids: Sequence[int], images: Sequence[Image.Image], count: int) -> list[int]:
    """Returns so many tokens that transformers draws after a prompt with images. ids: with all tokens of images."""
    made = [processed(image) for image in images]
    whole = torch.tensor([list(ids)])
    kinds = (whole == PAD).int()
    more = (
        {
            "pixel_values": torch.cat([values for values, _ in made]),
            "image_grid_thw": torch.cat([grid for _, grid in made]),
        }
        if made
        else {}
    )
    model.model.rope_deltas = None
    out = model.generate(
        input_ids=whole, attention_mask=torch.ones_like(whole), mm_token_type_ids=kinds, max_new_tokens=count,
        do_sample=False, eos_token_id=None, **more,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()
