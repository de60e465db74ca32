"""Vectors of texts a second on a CPU: `LLM.embed` beside sentence-transformers, or transformers where that is missing.

    python benchmarks/embeddings.py [--model FOLDER] [--texts 64] [--dtype bfloat16] [--other-dtype float32]
    python benchmarks/embeddings.py --llama-cpp [--model FILE.gguf]

Without a model it is one of the shape of Qwen3-Embedding-0.6B, with random weights and the tokenizer of SmolLM2, made
in a folder that is removed again. The texts are parts of the questions of MT-bench, of 8 to 128 words. Both sides get
all of them in one call; sentence-transformers sorts them by length and runs 32 at a time, its default. They take turns,
and the better of `--repeats` runs of each counts, because a shared machine only ever makes a run slower. Prefixes are
not cached. What is printed beside the figures is the least cosine between the vectors of the two sides.

With `--llama-cpp` the other side is llama.cpp's server, built where it is not (`llama_cpp_build.py`, minutes). Both
serve one GGUF file in Q8_0 and get all texts in one request; llama.cpp's batch has 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chat_servers import Server, draftwing_server, llama_server
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from gguf_files import add_sizes, copy_metadata, finish
from llama_cpp_build import build
from load_texts import mt_bench

from draftwing import LLM
from draftwing.models.hub import resolve_model
from draftwing.text.tokenizer import load_tokenizer

Embed = Callable[[list[str]], Any]
BATCH, CONTEXT = 2048, 32768  # tokens of llama.cpp's batch, and of all its sequences
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj":
         "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj":
         "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}  # fmt: skip


def texts_of(count: int) -> list[str]:
    draw, words = random.Random(0), " ".join(mt_bench()).split()
    found = []
    for _ in range(count):
        start = draw.randrange(len(words) - 128)
        found.append(" ".join(words[start : start + draw.randint(8, 128)]))
    return found


def random_model() -> Any:
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, rope_parameters={"rope_theta": 1e6},
        tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    return Qwen3Model(config)


def made_gguf(path: Path) -> Path:
    """Writes the same model as a GGUF file in Q8_0, its norms in float32."""
    model, writer = random_model(), GGUFWriter(path, "qwen3")
    config = model.config
    config.hidden, config.ffn = config.hidden_size, config.intermediate_size
    config.heads, config.kv_heads = config.num_attention_heads, config.num_key_value_heads
    copy_metadata(GGUFReader(resolve_model("smollm2")), writer, only="tokenizer.")
    add_sizes(writer, config, config.num_hidden_layers, config.max_position_embeddings, config.head_dim, 1e6)
    writer.add_uint32("qwen3.pooling_type", 3)  # of the last token
    names = {"embed_tokens": "token_embd", "norm": "output_norm"}
    for name, value in model.state_dict().items():
        of_layer = name.removeprefix("layers.").removesuffix(".weight").split(".", 1)
        stem = f"blk.{of_layer[0]}.{PARTS[of_layer[1]]}" if name.startswith("layers.") else names[of_layer[0]]
        if value.dim() == 1:
            writer.add_tensor(f"{stem}.weight", value.numpy())
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{stem}.weight", quantize(value.numpy(), kind), raw_dtype=kind)
    finish(writer)
    return path


def made(folder: Path, dtype: torch.dtype) -> str:
    """Writes the model and returns its folder."""
    random_model().to(dtype).save_pretrained(folder)
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
    if (Path(folder) / "modules.json").exists():
        kept = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype})
        return "sentence-transformers", lambda texts: kept.encode(texts, show_progress_bar=False)
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
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--other-dtype", help="of the other library; default: the same")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as name:
        if asked.llama_cpp:
            beside_llama_cpp(asked, Path(asked.model) if asked.model else made_gguf(Path(name) / "model.gguf"))
        else:
            beside_library(asked, asked.model or made(Path(name), getattr(torch, asked.dtype)))


def beside_library(asked: argparse.Namespace, model: str) -> None:
    name, other = other_side(model, getattr(torch, asked.other_dtype or asked.dtype))
    options = {"dtype": asked.dtype, "num_threads": asked.threads, "disable_radix_cache": True}
    with LLM(model, speculative_algorithm="none", **options) as llm:
        compare(
            asked,
            {"draftwing": partial(llm.embed, truncate=True), name: other},
            lambda text: len(llm.tokenizer.encode(text)),
        )


def beside_llama_cpp(asked: argparse.Namespace, model: Path) -> None:
    sizes = ("-b", str(BATCH), "-ub", str(BATCH), "--parallel", "32", "--embeddings", "--pooling", "last")
    theirs = llama_server("llama.cpp", build("native"), model, asked.threads, CONTEXT, *sizes)
    ours = draftwing_server(
        "draftwing", str(model), asked.threads, CONTEXT, "native", "--speculative-algorithm", "none"
    )
    log = model.with_suffix(".log")
    with Server(ours, log) as first, Server(theirs, log) as second:
        sides: dict[str, Embed] = {}
        for server in (first, second):
            sides[server.contender.name] = partial(over_http, server)
            server.ready(partial(over_http, server, ["a"]))
        tokenizer = load_tokenizer(model)
        compare(asked, sides, lambda text: len(tokenizer.encode(text)))


def over_http(server: Server, texts: list[str]) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"input": texts, "model": "default"})
    return [row["embedding"] for row in answer["data"]]


def compare(asked: argparse.Namespace, sides: dict[str, Embed], tokens_of: Callable[[str], int]) -> None:
    texts = texts_of(asked.texts)
    tokens = sum(map(tokens_of, texts))
    best, vectors = dict.fromkeys(sides, 0.0), dict[str, Any]()
    for _ in range(asked.repeats):
        for side, embed in sides.items():
            start = time.perf_counter()
            vectors[side] = np.asarray(embed(texts), np.float32)
            best[side] = max(best[side], len(texts) / (time.perf_counter() - start))
    ours, theirs = vectors.values()
    alike = float((ours * theirs).sum(1).min())
    for side, rate in best.items():
        print(f"{side:24}{rate:8.1f} texts/s {rate * tokens / len(texts):8.0f} tokens/s")
    print(f"least cosine between the two: {alike:.5f}")
    if asked.out is not None:
        asked.out.write_text(json.dumps({"texts": len(texts), "tokens": tokens, "rates": best, "cosine": alike}))


if __name__ == "__main__":
    main()
