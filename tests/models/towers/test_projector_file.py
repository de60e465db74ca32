"""What reads images beside a GGUF file, written by the gguf package, against the same model's folder."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
from engine_rig import Rig, greedy
from hybrid_gguf import write
from image_models import (
    END,
    KINDS,
    PAD,
    SPECIAL,
    START,
    VISION,
    encoded,
    features,
    logits,
    picture,
    reference,
    write_model,
)
from tiny_gguf import finish
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.images.processing import Tile
from draftwing.images.reader import Picture, Prompt, placed, read
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.config import ModelConfig
from draftwing.models.loader import load_config, load_model
from draftwing.models.towers import projector_file
from draftwing.models.towers.loading import load_tower, stored_tensors
from draftwing.ops import make_ops
from draftwing.ops.table import PLAIN
from draftwing.requests.request import LogprobParams
from draftwing.text.tokenizer import load_tokenizer

CPU = torch.device("cpu")
MERGER = {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
names = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.MMPROJ, 8)


def name_of(theirs: str, taps: list[int]) -> str:
    """As llama.cpp's converter names a tensor of a tower, by the package's own table where that has it."""
    theirs, _, leaf = theirs.rpartition(".")
    deep = re.fullmatch(r"deepstack_merger_list\.(\d+)\.(norm|linear_fc\d)", theirs)
    if deep is not None:
        part = {"norm": "DS_NORM", "linear_fc1": "DS_FC1", "linear_fc2": "DS_FC2"}[deep[2]]
        form = gguf_package.TENSOR_NAMES[gguf_package.MODEL_TENSOR[f"V_{part}"]]
        return f"{form.format(bid=taps[int(deep[1])])}.{leaf}"
    theirs = theirs.replace("attn.qkv", "attn_qkv")
    own = MERGER.get(theirs) or names.get_name(f"visual.{theirs}")
    if own is None:
        own = re.sub(r"blocks\.(\d+)\.attn_qkv", r"v.blk.\1.attn_qkv", theirs)
    return f"{own}.{leaf}"


def write_projector(path: Path, kind: str, **changes: Any) -> Path:
    visual, config = reference(kind).model.visual, reference(kind).config.vision_config
    taps = list(getattr(config, "deepstack_visual_indexes", None) or [])
    writer = gguf_package.GGUFWriter(path, "clip")
    writer.add_clip_projector_type(changes.get("projector", "qwen3vl_merger"))
    writer.add_bool("clip.has_vision_encoder", True)
    for key, value in {
        "projection_dim": changes.get("width", VISION["out_hidden_size"]), "embedding_length": VISION["hidden_size"],
        "feed_forward_length": VISION["intermediate_size"], "block_count": VISION["depth"], "patch_size": 4,
        "attention.head_count": VISION["num_heads"], "spatial_merge_size": 2, "image_min_pixels": 256,
        "image_max_pixels": 3072,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_array("clip.vision.image_mean", [0.5, 0.4, 0.45])
    writer.add_array("clip.vision.image_std", [0.5, 0.25, 0.3])
    writer.add_array("clip.vision.is_deepstack_layers", [i in taps for i in range(VISION["depth"])])
    for theirs, value in visual.state_dict().items():
        values: dict[str, Tensor] = {name_of(theirs, taps): value}
        if theirs == "patch_embed.proj.weight":
            first = name_of(theirs, taps)
            values = {first: value[:, :, 0], f"{first}.1": value[:, :, 1]}
        for name, one in values.items():
            writer.add_tensor(name, one.contiguous().numpy().astype(np.float32))
    finish(writer)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("folder") / "model", "qwen3.5")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The language model alone."""
    theirs = reference("qwen3.5")
    inner = {f"model.{name}": value for name, value in theirs.model.language_model.state_dict().items()}

    def more(writer: gguf_package.GGUFWriter) -> None:
        writer.add_token_list([*(f"t{i}" for i in range(256)), *SPECIAL])
        writer.add_rope_dimension_sections([2, 1, 1, 0])

    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write(path, theirs.config.text_config, {**inner, "lm_head.weight": theirs.lm_head.weight}, edit=more)


def seeing(model: Path, file: Path) -> ModelConfig:
    return projector_file.with_projector(load_config(model), model, file, True)


@torch.inference_mode()
def test_the_tower_is_the_folders(folder: Path, model: Path) -> None:
    file = write_projector(model.parent / "mmproj-F32.gguf", "qwen3.5")
    assert projector_file.find(model, None) == file and projector_file.find(model, str(file)) == file
    config, whole = seeing(model, file), load_config(folder)
    assert config.tower == whole.tower is not None
    assert config.ropes == whole.ropes
    assert config.tower is not None and config.tower.token == PAD
    towers = [
        load_tower(config.tower, stored_tensors(path, config.tower), torch.float32, CPU, DENSE, PLAIN)
        for path in (file, folder)
    ]
    processor = config.tower.processor(load_tokenizer(folder, None))
    (tile,) = (piece for piece in read(Picture(encoded(picture(40, 30)), "x"), processor) if isinstance(piece, Tile))
    pixels = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(tile.height, tile.width, 3)
    ours, theirs = (tower.features(pixels, 20) for tower in towers)
    assert torch.equal(ours, theirs)


@torch.inference_mode()
def test_features_that_layers_add(model: Path, tmp_path: Path) -> None:
    file = write_projector(tmp_path / "mmproj.gguf", "qwen3-vl")
    config = seeing(model, file).tower
    assert config is not None and config.deep == 2
    folder = write_model(tmp_path / "folder", "qwen3-vl")
    whole = load_config(folder).tower
    assert whole == config
    ours, theirs = (
        load_tower(config, stored_tensors(path, config), torch.float32, CPU, DENSE, PLAIN) for path in (file, folder)
    )
    pixels = torch.randint(0, 255, (16, 24, 3), dtype=torch.uint8)
    assert torch.equal(ours.features(pixels, 6), theirs.features(pixels, 6))


def sized_writer(path: Path, arch: gguf_package.MODEL_ARCH, text: Any) -> gguf_package.GGUFWriter:
    """A file that has the sizes of a language model so far. text: its config."""
    writer = gguf_package.GGUFWriter(path, gguf_package.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(text.num_hidden_layers)
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    writer.add_key_length(text.head_dim)
    writer.add_value_length(text.head_dim)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    return writer


def write_dense(path: Path) -> Path:
    """The language model of a Qwen3-VL, by the package's own names of tensors."""
    theirs = reference("qwen3-vl")
    text, arch = theirs.config.text_config, gguf_package.MODEL_ARCH.QWEN3VL
    own = gguf_package.get_tensor_name_map(arch, text.num_hidden_layers)
    writer = sized_writer(path, arch, text)
    writer.add_rope_freq_base(text.rope_parameters["rope_theta"])
    writer.add_rope_dimension_sections([6, 5, 5, 0])
    writer.add_num_deepstack_layers(2)
    writer.add_token_list([*(f"t{i}" for i in range(256)), *SPECIAL, *(f"u{i}" for i in range(text.vocab_size - 261))])
    writer.add_eos_token_id(text.eos_token_id)
    inner = {f"model.{name}": value for name, value in theirs.model.language_model.state_dict().items()}
    for name, value in {**inner, "lm_head.weight": theirs.lm_head.weight.detach()}.items():
        made = own.get_name(name, try_suffixes=(".weight",))
        assert made is not None, name
        writer.add_tensor(made, value.contiguous().numpy().astype(np.float32))
    finish(writer)
    return path


@torch.inference_mode()
def test_a_dense_model_with_features_that_layers_add(tmp_path: Path) -> None:
    model = write_dense(tmp_path / "model.gguf")
    config = seeing(model, write_projector(tmp_path / "mmproj.gguf", "qwen3-vl"))
    whole = load_config(write_model(tmp_path / "folder", "qwen3-vl"))
    assert config.tower == whole.tower and config.ropes == whole.ropes
    norm = config.layers[0].norm  # a file has its eps in 32 bits
    assert config.layers == tuple(dataclasses.replace(layer, norm=norm) for layer in whole.layers)
    assert config.architecture == whole.architecture
    with pytest.raises(CheckpointError, match="expected 2 layers that add features"):
        seeing(model, write_projector(tmp_path / "other.gguf", "qwen3.5"))


def test_what_is_not_served(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for changes, words in (
        ({"projector": "pixtral"}, "expected qwen3vl_merger or gemma3 or idefics3 or lfm2 or gemma4v"),
        ({"width": 32}, "hidden size, 64"),
    ):
        file = write_projector(tmp_path / f"{words}.gguf", "qwen3.5", **changes)
        with pytest.raises(CheckpointError, match=words):
            seeing(model, file)
        config = load_config(model)
        assert projector_file.with_projector(config, model, file, False) == config
        assert words in caplog.text
    with pytest.raises(CheckpointError, match=r"--mmproj: expected a \.gguf file, found none"):
        projector_file.find(model, str(tmp_path / "nothing.gguf"))
    with pytest.raises(CheckpointError, match="a folder has what reads images within"):
        projector_file.find(tmp_path, str(tmp_path / "nothing.gguf"))
    assert projector_file.find(tmp_path, None) is None


def test_a_model_without_the_token_of_images(tmp_path: Path) -> None:
    theirs = reference("qwen3.5")
    inner = {f"model.{name}": value for name, value in theirs.model.language_model.state_dict().items()}
    tensors = {**inner, "lm_head.weight": theirs.lm_head.weight}
    path = write(tmp_path / "m.gguf", theirs.config.text_config, tensors)
    file = write_projector(tmp_path / "mmproj.gguf", "qwen3.5")
    with pytest.raises(CheckpointError, match="expected a token"):
        seeing(path, file)


# -- Gemma 3 -----------------------------------------------------------------------------------------------------------


def write_gemma(path: Path, soft: str = "<image_soft_token>") -> Path:
    """The language model of a Gemma 3, by the package's own names of tensors. soft: the token of images."""
    theirs = reference("gemma3")
    text, arch = theirs.config.text_config, gguf_package.MODEL_ARCH.GEMMA3
    own = gguf_package.get_tensor_name_map(arch, text.num_hidden_layers)
    writer = sized_writer(path, arch, text)
    writer.add_rope_freq_base(text.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(text.sliding_window)
    writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    names = {PAD: soft, START: "<start_of_image>", END: "<end_of_image>"}
    tokens = [names.get(i, f"t{i}") for i in range(text.vocab_size)]
    writer.add_token_list(tokens)
    kinds = gguf_package.TokenType
    writer.add_token_types([kinds.CONTROL if name.startswith("<") else kinds.NORMAL for name in tokens])
    writer.add_eos_token_id(text.eos_token_id)
    for name, value in theirs.model.language_model.state_dict().items():
        made = own.get_name(f"model.{name}", try_suffixes=(".weight",))
        assert made is not None, name
        added = 1 if name.endswith("norm.weight") else 0  # as converters do
        writer.add_tensor(made, (value + added).contiguous().numpy().astype(np.float32))
    finish(writer)
    return path


def write_gemma_projector(path: Path, swapped: bool = False, **changes: int) -> Path:
    """swapped: whether it calls the two matrices of layers as early converters did."""
    theirs = reference("gemma3")
    vision = theirs.config.vision_config
    writer = gguf_package.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(gguf_package.VisionProjectorType.GEMMA3)
    writer.add_vision_projection_dim(theirs.config.text_config.hidden_size)
    writer.add_vision_image_size(changes.get("size", vision.image_size))
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_image_mean([0.5, 0.4, 0.45])
    writer.add_vision_image_std([0.5, 0.25, 0.3])
    writer.add_vision_projector_scale_factor(changes.get("factor", 2))
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swapped else {}
    parts = {"vision_tower.": theirs.model.vision_tower, "multi_modal_projector.": theirs.model.multi_modal_projector}
    for prefix, part in parts.items():
        for name, value in part.state_dict().items():
            whole = f"{prefix}{name}".replace("mm_input_projection_weight", "mm_input_projection.weight")
            whole = whole if "vision_model" in whole else whole.replace("tower.", "tower.vision_model.")
            stem, _, leaf = whole.rpartition(".")
            made = names.get_name(stem)
            if made is None:  # the head, which makes one row of an image
                assert "head" in stem, stem
                continue
            for one, another in other.items():
                if made.endswith(one):
                    made = made.replace(one, another)
                    break
            added = 1 if "soft_emb_norm" in name else 0
            writer.add_tensor(f"{made}.{leaf}", (value + added).contiguous().numpy().astype(np.float32))
    finish(writer)
    return path


@torch.inference_mode()
@pytest.mark.parametrize("swapped", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_gemma3_is_transformers(tmp_path: Path, swapped: bool) -> None:
    """Features, and log probabilities of a prompt with two pictures."""
    path, file = write_gemma(tmp_path / "model.gguf"), write_gemma_projector(tmp_path / "mmproj.gguf", swapped)
    folder = write_model(tmp_path / "folder", "gemma3")
    whole, config = load_config(folder), seeing(path, file)
    assert config.tower is not None and whole.tower is not None  # a file has its eps in 32 bits
    assert dataclasses.replace(config.tower, eps=whole.tower.eps) == whole.tower
    model = load_model(path, torch.float32, "cpu", adjust=lambda own: seeing(path, file))
    tower = config.tower
    model.tower = load_tower(tower, stored_tensors(file, tower), torch.float32, CPU, DENSE, make_ops(CPU))
    processor = tower.processor(load_tokenizer(folder, None))
    shown = [picture(40, 30), picture(8, 30, 1)]
    pieces = [read(Picture(encoded(one), "x"), processor) for one in shown]
    ids, images = placed([1, 90, PAD, 91, 70, 90, PAD, 91, 33, 34], Prompt("", pieces), processor)
    for one, image in zip(shown, images, strict=True):
        found = model.tower.features(torch.from_numpy(image.pixels.copy()), image.tokens)
        expected, _ = features("gemma3", one)
        torch.testing.assert_close(found, expected.view_as(found), atol=1e-4, rtol=1e-4)
    rig = Rig(model)
    rig.submit("0", ids, greedy(1), images=images, logprobs=LogprobParams(start=0))
    values = [value.value for value in rig.run().prompt_logprobs["0"][1:]]
    theirs = logits("gemma3", ids, shown)[:-1].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert values == pytest.approx(theirs.tolist(), abs=1e-4, rel=1e-4)


def test_gemma3_whose_tokens_are_no_square(tmp_path: Path) -> None:
    path, file = write_gemma(tmp_path / "model.gguf"), write_gemma_projector(tmp_path / "mmproj.gguf", factor=3)
    with pytest.raises(CheckpointError, match="expected a divisor of 8, found 3"):
        seeing(path, file)


def test_gemma3_without_the_token_of_images(tmp_path: Path) -> None:
    """Some converters leave it out, as it is past the words; then it is one that nothing uses."""
    file = write_gemma_projector(tmp_path / "mmproj.gguf")
    tower = seeing(write_gemma(tmp_path / "free.gguf", "<unused7>"), file).tower
    assert tower is not None and tower.token == PAD
    with pytest.raises(CheckpointError, match="expected a token <image_soft_token>, found none"):
        seeing(write_gemma(tmp_path / "none.gguf", "<other>"), file)


# -- SmolVLM, LFM2-VL, Gemma 4 -----------------------------------------------------------------------------------------

TOKENS = {  # that stand for an image and around it
    "smolvlm": ["<image>"], "idefics3": ["<image>"], "lfm2-vl": ["<image>"],
    "gemma4": ["<|image|>", "<|image>", "<image|>"], "gemma4-mutual": ["<|image|>", "<|image>", "<image|>"],
}  # fmt: skip
PROJECTORS = {"smolvlm": "IDEFICS3", "idefics3": "IDEFICS3", "lfm2-vl": "LFM2"}


def write_words(path: Path, kind: str) -> Path:
    """A file of a language model without its tensors."""
    writer = gguf_package.GGUFWriter(path, "llama")
    own = dict(zip((PAD, START, END), TOKENS[kind], strict=False))
    writer.add_token_list([own.get(i, f"t{i}") for i in range(264)])
    writer.add_pad_token_id(257)
    finish(writer)
    return path


def named_as_llama_cpp(kind: str, name: str) -> str | None:
    """Returns what its converter calls a tensor of a model, by the package's own table; None where it has none."""
    if kind.startswith("gemma4"):
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        name += ".weight" if name.endswith("position_embedding_table") else ""
    elif kind == "lfm2-vl":
        name = name.replace("model.vision_tower.", "vision_tower.vision_model.").removeprefix("model.")
    leaves = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
    return names.get_name(name, try_suffixes=leaves)


def write_layers(path: Path, kind: str) -> Path:
    theirs = reference(kind)
    vision, whole = theirs.config.vision_config, theirs.config
    writer = gguf_package.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    if kind.startswith("gemma4"):
        writer.add_clip_vision_projector_type(gguf_package.VisionProjectorType.GEMMA4V)
        writer.add_vision_projector_scale_factor(vision.pooling_kernel_size)
    else:
        writer.add_clip_projector_type(getattr(gguf_package.VisionProjectorType, PROJECTORS[kind]))
        writer.add_vision_projector_scale_factor(getattr(whole, "scale_factor", None) or whole.downsample_factor)
        writer.add_vision_preproc_image_size(32)
    writer.add_vision_projection_dim(whole.text_config.hidden_size)
    writer.add_vision_image_size(getattr(vision, "image_size", 224))
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(getattr(vision, "layer_norm_eps", 1e-6))
    settings = KINDS[kind].settings
    writer.add_vision_image_mean(settings.get("image_mean", [0.5, 0.5, 0.5]))
    writer.add_vision_image_std(settings.get("image_std", [0.5, 0.5, 0.5]))
    for name, value in theirs.state_dict().items():
        if "language_model" in name or "text_model" in name or name.startswith("lm_head"):
            continue
        made, patch = named_as_llama_cpp(kind, name), vision.patch_size
        assert made is not None, name
        if made == "v.patch_embd.weight" and value.dim() == 2:
            value = value.view(len(value), patch, patch, 3).permute(0, 3, 1, 2)
        writer.add_tensor(made, value.reshape(value.shape or (1,)).contiguous().numpy().astype(np.float32))
    finish(writer)
    return path


@torch.inference_mode()
@pytest.mark.parametrize("kind", TOKENS)
def test_other_towers_are_the_folders(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path / "folder", kind)
    whole = load_config(folder)
    model, file = write_words(tmp_path / "model.gguf", kind), write_layers(tmp_path / "mmproj.gguf", kind)
    config = projector_file.with_projector(dataclasses.replace(whole, tower=None), model, file, True)
    assert config.tower is not None and whole.tower is not None
    # A file has its eps in 32 bits, and nothing of how many tokens an image may have.
    kept = {
        name: getattr(whole.tower, name)
        for name in ("eps", "budget", "least", "most", "tile")
        if hasattr(whole.tower, name)
    }
    assert dataclasses.replace(config.tower, **kept) == whole.tower
    towers = [
        load_tower(one, stored_tensors(path, one), torch.float32, CPU, DENSE, PLAIN)
        for path, one in ((file, config.tower), (folder, whole.tower))
    ]
    pieces = read(Picture(encoded(picture(40, 30)), "x"), whole.tower.processor(load_tokenizer(folder, None)))
    tiles = [piece for piece in pieces if isinstance(piece, Tile)]
    for tile in tiles:
        pixels = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(tile.height, tile.width, 3)
        ours, theirs = (tower.features(pixels, tile.grid[0] * tile.grid[1]) for tower in towers)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert tiles


def test_a_file_without_a_projector(tmp_path: Path) -> None:
    config = dataclasses.replace(load_config(write_model(tmp_path / "folder", "lfm2-vl")), tower=None)
    model = write_words(tmp_path / "model.gguf", "lfm2-vl")
    writer = gguf_package.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_clip_projector_type("lfm2")
    writer.add_vision_projection_dim(config.hidden_size)
    finish(writer)
    with pytest.raises(CheckpointError, match=r"expected a tensor mm\.1\.weight"):
        projector_file.with_projector(config, model, tmp_path / "mmproj.gguf", True)
