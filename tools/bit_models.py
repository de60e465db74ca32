"""The checkpoints of `record_bits.py`: small random models of every family, in every format, with every kind of head.

`make` writes them once, by the helpers of tests, with an index of what there is: for each model its files, the sizes of
its vocabulary and context, and what drafts for it, as options of an engine. Who records needs no helper.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "models/families")]  # helpers, and the test that writes gpt-oss

INDEX = "models.json"
TOKENIZER = "tokenizer"
DRAFT, TOKENS = "speculative_draft_model_path", "speculative_token_map"  # options whose values are files of the folder
SIZES = {"vocab_size": 258, "max_position_embeddings": 512}
WHOLE_BLOCKS = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}  # of latents
LATENT = ("deepseek-v2", "deepseek-v3", "glm4-moe-lite")
# Where a block of a GGUF file has its float16 scales; others: at 0.
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_M": (),
}  # fmt: skip
GGUF_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip


class Models:
    """A folder of checkpoints, and the index of it. failed: the errors of those that could not be written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index, self.failed = folder, dict[str, Any](), dict[str, str]()

    def add(
        self, name: str, path: Path, drafters: Mapping[str, Mapping[str, Any]] | None = None, vocab: int = 0,
        context: int = 0,
    ) -> None:  # fmt: skip
        """drafters: options of each. vocab, context: of a file; a folder's config says them."""
        if not vocab:
            whole = json.loads((path / "config.json").read_text())
            config = whole.get("text_config") or whole
            vocab, context = config["vocab_size"], config["max_position_embeddings"]
        within = {
            drafter: {key: self._inside(value) if isinstance(value, Path) else value for key, value in options.items()}
            for drafter, options in (drafters or {}).items()
        }
        self.index[name] = {"path": self._inside(path), "vocab": vocab, "context": context, "drafters": within}

    def attempt(self, name: str, write: Callable[[Path], None]) -> None:
        """Calls it with a new folder of this name. What fails is told, and the others go on."""
        try:
            write(self.folder / name)
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {error}"

    def _inside(self, path: Path) -> str:
        return str(path.relative_to(self.folder))


def make(folder: Path) -> dict[str, str]:
    """Writes all checkpoints and their index; returns the errors of those that failed."""
    from tiny_checkpoint import write_tokenizer

    models = Models(folder)
    tokenizer = folder / TOKENIZER
    tokenizer.mkdir(parents=True)
    write_tokenizer(tokenizer)
    (tokenizer / "config.json").write_text("{}")
    for each in (published, families, kinds, dense, formats, gguf_types, gguf_families, exact_heads, drawn_heads):
        each(models)
    (folder / INDEX).write_text(json.dumps(models.index, indent=1))
    return models.failed


def published(models: Models) -> None:
    """Each config that the tests know as published and served."""
    import published as known

    for row in known.rows().values():
        if row.missing is None:

            def write(folder: Path, name: str = row.name) -> None:
                known.written(folder, name)
                shutil.rmtree(folder / "wide")
                _smaller(folder / "model.safetensors", halved=not known.rows()[name].stored)
                models.add(f"published/{name}", folder)

            models.attempt(f"published/{row.name}", write)


def _smaller(file: Path, halved: bool) -> None:
    """Leaves out large matrices for images and sound, which nobody reads. halved: the others become bfloat16, as those
    of models are that are not quantised."""
    import torch
    from safetensors.torch import load_file, save_file

    senses = ("vision", "visual", "audio")
    kept = {
        name: value.bfloat16() if halved and value.dtype == torch.float32 else value
        for name, value in load_file(file).items()
        if value.numel() < 1_000_000 or not any(sense in name for sense in senses)
    }
    save_file(kept, file)


def families(models: Models) -> None:
    """The later families in each format, with a prediction layer or an assistant of the same format."""
    import family_files as known

    forms = [*known.FORMS, "Q4_0", "MXFP4"]
    for family, form in product(known.FAMILIES, forms):

        def write(folder: Path, family: str = family, form: str = form) -> None:
            sizes: dict[str, Any] = {**SIZES, **(WHOLE_BLOCKS if family in LATENT else {})}
            if family in LATENT:
                sizes["q_lora_rank"] = None if family == "deepseek-v2" else 64
            if family.startswith("gemma4"):
                sizes["tie_word_embeddings"] = form[0] in "QM"  # files have no head
            _, path = known.written(folder, family, form, **sizes)
            drafters: dict[str, dict[str, Any]] = {"NEXTN": {}} if family in known.PREDICTING else {}
            if family.startswith("gemma4"):
                assistant = path.with_name("assistant.gguf" if path.suffix else "assistant")
                drafters["FROZEN_KV_MTP"] = {DRAFT: assistant}
            if form == "plain":
                drafters |= _heads(folder)
            shutil.rmtree(folder / "wide", ignore_errors=True)
            models.add(f"family/{family}/{form}", path, drafters, SIZES["vocab_size"], SIZES["max_position_embeddings"])

        models.attempt(f"family/{family}/{form.replace(' ', '_')}", write)


def _heads(folder: Path) -> dict[str, dict[str, Any]]:
    """Drawn heads, and a language model, for a target of 64 hidden values and three layers or more."""
    from reference import block_heads, checkpoints
    from tiny_checkpoint import write_tokenizer

    target = checkpoints.Checkpoint({}, {"hidden_size": 64, "num_hidden_layers": 3, **SIZES})
    own = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, **SIZES}
    made = {
        "EAGLE3": checkpoints.eagle3_head(target, rows=None, eagle_aux_hidden_state_layer_ids=[0, 1, 2], **own),
        "DFLASH": block_heads.dflash_head(target, dflash_config={"target_layer_ids": [0, 2]}, **own),
        "STANDALONE": checkpoints.small_llama_draft(**SIZES),
    }
    for name, head in made.items():
        write_tokenizer(head.write(folder / name))
    return {name: {DRAFT: folder / name} for name in made}


def kinds(models: Models) -> None:
    """Further ways in which layers of the later families differ, unquantised, with odd sizes."""
    import gemma4_models
    import hybrid_models
    import moe_models

    for helper in (moe_models, hybrid_models, gemma4_models):
        for kind in helper.KINDS:

            def write(folder: Path, kind: str = kind, helper: Any = helper) -> None:
                theirs, drafters = helper.reference(kind, **SIZES), {}
                theirs.save_pretrained(folder / "model", max_shard_size="200KB")  # several files
                if helper is gemma4_models:
                    assistant = gemma4_models.assistant_for(theirs, 43)
                    assistant.save_pretrained(folder / "assistant")
                    drafters["FROZEN_KV_MTP"] = {DRAFT: folder / "assistant"}
                models.add(f"kind/{kind}", folder / "model", drafters)

            models.attempt(f"kind/{helper.__name__}-{kind}", write)


def dense(models: Models) -> None:
    """Unquantised models of plain families, for all that is chosen when an engine starts."""
    from reference import checkpoints, learnable

    wide = {"hidden_size": 256, "intermediate_size": 256, **SIZES}
    made = {
        "llama": checkpoints.llama_target(3, **wide),
        "qwen2": checkpoints.qwen2_target(3, **wide),
        "mimo": checkpoints.mimo(3, 2, **{**wide, "head_dim": 64}),
        "llama-tied": checkpoints.llama_target(5, **{**wide, "tie_word_embeddings": True}),
    }
    for name, made_model in made.items():

        def write(folder: Path, name: str = name, model: checkpoints.Checkpoint = made_model) -> None:
            file = "pytorch_model.bin" if name == "qwen2" else "model.safetensors"
            models.add(f"dense/{name}", model.write(folder, file), {"NEXTN": {}} if name == "mimo" else {})

        models.attempt(f"dense/{name}", write)
    models.attempt("dense/varied", lambda folder: models.add("dense/varied", learnable.write_target(folder)))


def formats(models: Models) -> None:
    """Each format of quantised folders that the tests write."""
    import tiny_quantised as tiny
    from reference import checkpoints

    sizes = {"hidden_size": 128, "intermediate_size": 192, **SIZES}
    makers = {
        "llama": lambda: checkpoints.llama_target(3, **sizes),
        "qwen2": lambda: checkpoints.qwen2_target(3, **sizes),
        "mimo": lambda: checkpoints.mimo(3, **sizes, head_dim=32),
    }
    for name, family in product(tiny.FORMATS, makers):
        config, writer = tiny.FORMATS[name]

        def write(folder: Path, name: str = name, family: str = family, config=config, writer=writer) -> None:  # type: ignore[no-untyped-def]
            makers[family]().write(folder)
            tiny.quantise(folder, config, lambda _: writer)
            models.add(f"format/{family}/{name}", folder, {"NEXTN": {}} if family == "mimo" else {})

        models.attempt(f"format/{family}/{name.replace(' ', '_')}", write)


def gguf_types(models: Models) -> None:
    """A file for each type of GGML, of random blocks where the gguf package writes none."""
    for kind in GGUF_TYPES:

        def write(folder: Path, kind: str = kind) -> None:
            folder.mkdir(parents=True)
            path = _gguf(folder / "model.gguf", "llama", kind, columns=256)
            models.add(f"gguf/llama/{kind}", path, None, 258, 128)

        models.attempt(f"gguf/llama/{kind}", write)


def gguf_families(models: Models) -> None:
    """The plain families as files, in parts, too, and gpt-oss. Others are among `families`."""
    import test_gpt_oss as oss
    from gguf import GGMLQuantizationType as Type

    archs = {"llama-experts": 4, "qwen2": 0, "qwen3": 0, "qwen3moe": 4, "gemma3": 0}
    for (arch, experts), kind in product(archs.items(), ("F16", "Q8_0", "Q5_K", "IQ4_XS")):

        def write(folder: Path, arch: str = arch, experts: int = experts, kind: str = kind) -> None:
            folder.mkdir(parents=True)
            split = 5 if kind == "Q8_0" else 0
            _gguf(folder / "model.gguf", arch.partition("-")[0], kind, 256, experts, split)
            models.add(f"gguf/{arch}/{kind}", sorted(folder.glob("*.gguf"))[0], None, 258, 128)

        models.attempt(f"gguf/{arch}/{kind}", write)
    for kind in ("MXFP4", "F32", "Q8_0"):

        def write_oss(folder: Path, kind: str = kind) -> None:
            folder.mkdir(parents=True)
            path = oss.written(folder / "model.gguf", oss.made(), Type[kind])
            models.add(f"gguf/gpt-oss/{kind}", path, None, oss.VOCAB, 4096)

        models.attempt(f"gguf/gpt-oss/{kind}", write_oss)


def _gguf(path: Path, arch: str, kind: str, columns: int, experts: int = 0, split: int = 0) -> Path:
    """A file of one layer whose matrices have this type, and values of the size that real ones have."""
    import numpy as np
    import tiny_gguf as tiny
    from gguf import GGMLQuantizationType as Type

    tiny.HIDDEN, tiny.FFN, tiny.VOCAB, tiny.HEAD_DIM = columns, columns, 258, columns // tiny.HEADS
    quantize, form = tiny.quantize, Type[kind]

    def stored(values: Any, raw: Type) -> Any:
        """As it is with float16 and more; else blocks whose bytes are random."""
        if raw.name in ("F32", "F16", "BF16"):
            return quantize(values / values.shape[-1] ** 0.5 if values.ndim > 1 else values, raw)
        return random_blocks(raw, values.shape, np.random.default_rng(values.size))

    tiny.quantize = stored
    try:
        return tiny.write(path, arch, form, experts=experts, split=split)
    finally:
        tiny.quantize = quantize


def random_blocks(kind: Any, shape: tuple[int, ...], rng: Any) -> Any:
    """The bytes of a matrix of this type whose values have a standard deviation of 1 / sqrt(columns)."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    count, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // count, size), dtype=np.uint8)
    if kind.name in ("MXFP4", "NVFP4"):
        exponents = 1 if kind.name == "MXFP4" else 4  # a byte each
        data[..., :exponents] = 122 if kind.name == "MXFP4" else 0x28
        return data.reshape(*shape[:-1], -1)
    if kind.name == "IQ1_M":  # four bits of its scale in each of four numbers
        for byte, nibble in zip((49, 51, 53, 55), (0, 0, 4, 2), strict=True):
            data[..., byte] = data[..., byte] & 15 | nibble << 4
        return data.reshape(*shape[:-1], -1)

    def scaled(scale: float) -> Any:
        for at in SCALES.get(kind.name, (0,)):
            data[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        return data.reshape(*shape[:-1], -1)

    spread = float(dequantize(scaled(1.0).reshape(-1, scaled(1.0).shape[-1]), kind).std())
    return scaled(1 / (spread * shape[-1] ** 0.5))


def exact_heads(models: Models) -> None:
    """Heads that are mostly right, for targets whose text depends on all of the context."""
    from reference import exact_heads as known

    for kind, (maker, scale) in known.MAKERS.items():

        def write(folder: Path, kind: str = kind, maker: Any = maker, scale: float = scale) -> None:
            exact = maker()
            drafters: dict[str, dict[str, Any]] = {kind.partition(" ")[0]: {}}
            if exact.head is not None:
                drafters = {kind: {DRAFT: exact.head.write(folder / "head")}}
            models.add(f"head/exact {kind}", known.disturbed(exact.target, scale).write(folder / "target"), drafters)

        models.attempt(f"head/exact_{kind.replace(' ', '_')}", write)


def drawn_heads(models: Models) -> None:
    """Random heads in every layout; of few tokens, so that some drafts are right."""
    from reference import block_heads, checkpoints
    from reference.draft_cases import CASES, Case
    from tiny_checkpoint import write_tokenizer

    target = checkpoints.llama_target(4, num_hidden_layers=7, vocab_size=12)
    blocks = {
        "dflash": block_heads.dflash_head(target),
        "dflash windows": block_heads.dflash_head(
            target, layer_types=["sliding_attention", "full_attention"], sliding_window=8
        ),
        "domino": block_heads.domino_head(target),
        "dspark": block_heads.dspark_head(target),
        "dspark plain": block_heads.dspark_head(target, confidence=False),
        "dspark gated": block_heads.dspark_head(target, markov_head_type="gated"),
        "dspark rnn": block_heads.dspark_head(target, markov_head_type="rnn"),
        "speculators dspark": block_heads.speculators_head(target),
        "speculators dflash": block_heads.speculators_head(target, "dflash"),
        "speculators tied": block_heads.speculators_head(target, rows=12, tied=True),
    }
    cases: dict[str, Callable[[], Case]] = dict(CASES)
    for name, head in blocks.items():
        algorithm = "DSPARK" if "dspark" in name or "tied" in name else "DFLASH"
        cases[name] = lambda head=head, algorithm=algorithm: Case(target, head, algorithm, list)  # type: ignore[misc]
    for name, found in cases.items():

        def write(folder: Path, name: str = name, found: Callable[[], Case] = found) -> None:
            case, options = found(), dict[str, Any]()
            if case.head is not None:
                file = "pytorch_model.bin" if case.algorithm == "EAGLE" else "model.safetensors"
                options[DRAFT] = case.head.write(folder / "head", file)
                write_tokenizer(folder / "head")
            if "aux_layer_ids" in case.options:
                options["speculative_aux_layer_ids"] = case.options["aux_layer_ids"]
            if "token_ids" in case.options:
                options[TOKENS] = folder / "tokens.json"
                options[TOKENS].write_text(json.dumps(case.options["token_ids"].tolist()))
            models.add(f"head/{name}", case.target.write(folder / "target"), {case.algorithm: options})

        models.attempt(f"head/{name.replace(' ', '_').replace(',', '')}", write)
