"""Vectors of texts a second on a CPU: `LLM.embed` beside sentence-transformers, or transformers where that is missing.

    python benchmarks/embeddings.py [--model FOLDER] [--texts 64] [--dtype bfloat16] [--threads 2] [--out results.json]

Without a model it is one of the shape of Qwen3-Embedding-0.6B, with random weights and the tokenizer of SmolLM2, made
in a folder that is removed again. The texts are parts of the questions of MT-bench, of 8 to 128 words. Both sides get
all of them in one call; sentence-transformers sorts them by length and runs 32 at a time, its default. They take turns,
and the better of `--repeats` runs of each counts, because a shared machine only ever makes a run slower. Prefixes are
not cached. What is printed beside the figures is the least cosine between the vectors of the two sides.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from load_texts import mt_bench

from draftwing import LLM
from draftwing.models.hub import resolve_model
from draftwing.text.tokenizer import load_tokenizer

Embed = Callable[[list[str]], Any]


def texts_of(count: int) -> list[str]:
    draw, words = random.Random(0), " ".join(mt_bench()).split()
    found = []
    for _ in range(count):
        start = draw.randrange(len(words) - 128)
        found.append(" ".join(words[start : start + draw.randint(8, 128)]))
    return found


def made(folder: Path, dtype: torch.dtype) -> str:
    """Writes the model and returns its folder."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, rope_parameters={"rope_theta": 1e6},
        tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    Qwen3Model(config).to(dtype).save_pretrained(folder)
    file = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(file | {"architectures": ["Qwen3ForCausalLM"]}))
    load_tokenizer(resolve_model("smollm2")).backend.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return str(folder)


def other_side(folder: str, dtype: torch.dtype) -> tuple[str, Embed]:
    """Returns the name of a library and what makes vectors with it: of the last token, of length 1."""
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Normalize, Pooling, Transformer
    except ImportError:
        return "transformers", with_transformers(folder, dtype)
    transformer = Transformer(folder, model_kwargs={"dtype": dtype}, processor_kwargs={"padding_side": "left"})
    size = transformer.get_embedding_dimension()
    model = SentenceTransformer(
        modules=[transformer, Pooling(size, pooling_mode="lasttoken"), Normalize()], device="cpu"
    )
    if model.tokenizer.pad_token is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token
    return "sentence-transformers", lambda texts: model.encode(texts, show_progress_bar=False)


def with_transformers(folder: str, dtype: torch.dtype, batch: int = 32) -> Embed:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token

    def embed(texts: list[str]) -> np.ndarray[Any, Any]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = np.empty((len(texts), model.config.hidden_size), np.float32)
        for begin in range(0, len(order), batch):
            which = order[begin : begin + batch]
            inputs = tokenizer([texts[i] for i in which], padding=True, return_tensors="pt")
            with torch.inference_mode():
                last = model(**inputs).last_hidden_state[:, -1].float()
            found[which] = torch.nn.functional.normalize(last, dim=-1).numpy()
        return found

    return embed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        compare(asked, asked.model or made(Path(folder), getattr(torch, asked.dtype)))


def compare(asked: argparse.Namespace, model: str) -> None:
    texts = texts_of(asked.texts)
    name, other = other_side(model, getattr(torch, asked.dtype))
    options = {"dtype": asked.dtype, "num_threads": asked.threads, "disable_radix_cache": True}
    with LLM(model, speculative_algorithm="none", context_length=2048, **options) as llm:
        tokens = sum(len(llm.tokenizer.encode(text)) for text in texts)
        sides: dict[str, Embed] = {"draftwing": llm.embed, name: other}
        best, vectors = dict.fromkeys(sides, 0.0), dict[str, Any]()
        for _ in range(asked.repeats):
            for side, embed in sides.items():
                start = time.perf_counter()
                vectors[side] = np.asarray(embed(texts), np.float32)
                best[side] = max(best[side], len(texts) / (time.perf_counter() - start))
    alike = float((vectors["draftwing"] * vectors[name]).sum(1).min())
    for side, rate in best.items():
        print(f"{side:24}{rate:8.1f} texts/s {rate * tokens / len(texts):8.0f} tokens/s")
    print(f"least cosine between the two: {alike:.5f}")
    if asked.out is not None:
        asked.out.write_text(json.dumps({"texts": len(texts), "tokens": tokens, "rates": best, "cosine": alike}))


if __name__ == "__main__":
    main()
