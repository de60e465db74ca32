"""Vectors of texts a second: `LLM.embed` beside sentence-transformers, or transformers where that is missing.

    python benchmarks/embeddings.py [--model FOLDER] [--texts 64] [--dtype bfloat16] [--other-dtype float32]
        [--device cuda]
    python benchmarks/embeddings.py --llama-cpp [--model FILE.gguf]
    python benchmarks/embeddings.py --write FOLDER
    python benchmarks/embeddings.py --texts 1000 --url draftwing=http://127.0.0.1:30001 --url SGLang=http://...

Without a model it is one of the shape of Qwen3-Embedding-0.6B, with random weights and the tokenizer of SmolLM2, made
in a folder that is removed again. The texts are parts of the questions of MT-bench, of 8 to 128 words. Both sides get
all of them in one call; sentence-transformers sorts them by length and runs 32 at a time, its default. They take turns,
and the better of `--repeats` runs of each counts, because a shared machine only ever makes a run slower. Prefixes are
not cached. What is printed beside the figures is the least cosine between the vectors of the two sides.

With `--llama-cpp` the other side is llama.cpp's server, built where it is not (`llama_cpp_build.py`, minutes). Both
serve one GGUF file in Q8_0 and get all texts in one request; llama.cpp's batch has 2,048 tokens.

`--write` leaves that model in a folder, for servers that are started by hand. With `--url` these are asked for all
texts by their `/v1/embeddings`: `batches`, one request of `--batch` texts after another, and `singles`, requests of one
text, `--clients` of them at once. The client reads answers, and only then what is in them. Vectors are JSON's numbers,
or with `--base64` what OpenAI's client asks for by default.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from chat_servers import Server, draftwing_server, llama_server
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from gguf_files import add_sizes, copy_metadata, finish
from llama_cpp_build import build
from load_texts import mt_bench
from safetensors.torch import save_file

from draftwing import LLM
from draftwing.models.hub import resolve_model
from draftwing.text.tokenizer import load_tokenizer

Embed = Callable[[list[str]], Any]
BATCH, CONTEXT = 2048, 32768  # tokens of llama.cpp's batch, and of all its sequences
POOL = 1 << 17  # tokens of a GPU's KV pool beside another library
SECONDS = 120.0  # after which a request has failed
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


SHAPE = {
    "vocab_size": 49152, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
THETA = 1e6  # of rotary embeddings
TINY = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def random_model(tiny: bool = False) -> Any:
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    return Qwen3Model(Qwen3Config(**SHAPE | (TINY if tiny else {}), rope_parameters={"rope_theta": THETA}))


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


def made(folder: Path, dtype: torch.dtype, tokenizer: str | None = None, tiny: bool = False) -> str:
    """Writes the model, with names that other engines know, and returns its folder. tokenizer: a file."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": value.to(dtype) for name, value in random_model(tiny).state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    about = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": str(dtype).split(".")[1]}
    more = {"rms_norm_eps": 1e-6, "rope_theta": THETA, "hidden_act": "silu", "attention_bias": False, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(about | SHAPE | (TINY if tiny else {}) | more))
    if tokenizer is None:
        load_tokenizer(resolve_model("smollm2")).backend.save(str(folder / "tokenizer.json"))
    else:
        (folder / "tokenizer.json").write_bytes(Path(tokenizer).read_bytes())
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return str(folder)


def other_side(folder: str, dtype: torch.dtype, device: str) -> tuple[str, Embed]:
    """Returns the name of a library and what makes vectors with it: of the last token, of length 1."""
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Normalize, Pooling, Transformer
    except ImportError:
        return "transformers", with_transformers(folder, dtype, device)
    if (Path(folder) / "modules.json").exists():
        kept = SentenceTransformer(folder, device=device, model_kwargs={"dtype": dtype})
        return "sentence-transformers", lambda texts: kept.encode(texts, show_progress_bar=False)
    transformer = Transformer(folder, model_kwargs={"dtype": dtype}, processor_kwargs={"padding_side": "left"})
    size = transformer.get_embedding_dimension()
    modules = [transformer, Pooling(size, pooling_mode="lasttoken"), Normalize()]
    model = SentenceTransformer(modules=modules, device=device)
    if model.tokenizer.pad_token is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token
    return "sentence-transformers", lambda texts: model.encode(texts, show_progress_bar=False)


def with_transformers(folder: str, dtype: torch.dtype, device: str, batch: int = 32) -> Embed:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder, dtype=dtype).to(device), AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token

    def embed(texts: list[str]) -> np.ndarray[Any, Any]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = np.empty((len(texts), model.config.hidden_size), np.float32)
        for begin in range(0, len(order), batch):
            which = order[begin : begin + batch]
            inputs = tokenizer([texts[i] for i in which], padding=True, return_tensors="pt").to(device)
            with torch.inference_mode():
                last = model(**inputs).last_hidden_state[:, -1].float()
            found[which] = torch.nn.functional.normalize(last, dim=-1).cpu().numpy()
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json of the model that is written")
    parser.add_argument("--tiny", action="store_true", help="write a small one")
    parser.add_argument("--url", action="append", metavar="NAME=URL", help="of a server; may be given several times")
    parser.add_argument("--batch", type=int, default=64, help="texts of a request of `batches`")
    parser.add_argument("--base64", action="store_true", help="vectors come as OpenAI's client asks for them")
    parser.add_argument("--clients", type=int, default=32, help="requests at once of `singles`")
    asked = parser.parse_args()
    if asked.device == "cpu":
        torch.set_num_threads(asked.threads)
    if asked.write is not None:
        made(asked.write, getattr(torch, asked.dtype), asked.tokenizer, asked.tiny)
        return
    if asked.url:
        beside_servers(asked)
        return
    with tempfile.TemporaryDirectory() as name:
        if asked.llama_cpp:
            beside_llama_cpp(asked, Path(asked.model) if asked.model else made_gguf(Path(name) / "model.gguf"))
        else:
            beside_library(asked, asked.model or made(Path(name), getattr(torch, asked.dtype)))


def beside_library(asked: argparse.Namespace, model: str) -> None:
    name, other = other_side(model, getattr(torch, asked.other_dtype or asked.dtype), asked.device)
    options: dict[str, Any] = {"dtype": asked.dtype, "disable_radix_cache": True, "device": asked.device}
    options |= {"num_threads": asked.threads} if asked.device == "cpu" else {"max_total_tokens": POOL}
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


class Asker:
    """Asks a server by connections that stay, one for each thread, as long as the server keeps them."""

    def __init__(self, url: str, form: str) -> None:
        """form: of vectors, as `encoding_format` names it."""
        self._host, self._form, self._own = urlsplit(url).netloc, form, threading.local()

    def __call__(self, texts: Sequence[str]) -> bytes:
        """Returns the body of a response. Raises RuntimeError for a refusal."""
        body = json.dumps({"input": texts, "model": "default", "encoding_format": self._form})
        kept = hasattr(self._own, "connection")
        try:
            status, answer = self._ask(body)
        except (ConnectionError, http.client.HTTPException):
            if not kept:
                raise
            del self._own.connection  # the server has closed it while others were asked
            status, answer = self._ask(body)
        if status != 200:
            raise RuntimeError(f"{self._host}: status {status}, {answer[:500]!r}")
        return answer

    def _ask(self, body: str) -> tuple[int, bytes]:
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection(self._host, timeout=SECONDS)
        self._own.connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        response = self._own.connection.getresponse()
        return response.status, bytes(response.read())


def works_of(texts: list[str], batch: int, threads: ThreadPoolExecutor) -> dict[str, Callable[[Asker], list[bytes]]]:
    """Returns ways to ask for all texts, by name: so many in a request, or one, of as many requests as threads."""
    batches = [texts[at : at + batch] for at in range(0, len(texts), batch)]
    return {
        "batches": lambda ask: [ask(batch) for batch in batches],
        "singles": lambda ask: list(threads.map(lambda text: ask([text]), texts)),
    }


def vector_of(found: list[float] | str) -> np.ndarray[Any, Any]:
    """Returns a vector out of a response, whichever form it has."""
    if isinstance(found, str):
        return np.frombuffer(base64.b64decode(found), "<f4").astype(np.float64)
    return np.asarray(found, np.float64)


def beside_servers(asked: argparse.Namespace) -> None:
    """Prints rates of each server, and the least cosine between its vectors and those of the first one."""
    texts, form = texts_of(asked.texts), "base64" if asked.base64 else "float"
    servers = {name: Asker(url, form) for name, url in (one.split("=", 1) for one in asked.url)}
    found: dict[str, Any] = {name: {"batches": 0.0, "singles": 0.0} for name in servers}
    first, tokens = None, 0
    with ThreadPoolExecutor(asked.clients) as threads:
        works = works_of(texts, asked.batch, threads)
        for turn in range(asked.repeats + 1):  # the first does not count
            for (name, ask), (kind, work) in ((one, other) for one in servers.items() for other in works.items()):
                start = time.perf_counter()
                answers = work(ask)
                rate = len(texts) / (time.perf_counter() - start)
                print(f"turn {turn} {name:16}{kind:8}{rate:9.1f} texts/s", flush=True)
                if turn:
                    found[name][kind] = max(found[name][kind], rate)
                    continue
                every = [json.loads(answer) for answer in answers]
                tokens = sum(one["usage"]["prompt_tokens"] for one in every)
                vectors = np.asarray([vector_of(row["embedding"]) for one in every for row in one["data"]])
                first = vectors if first is None else first
                cosines = (first * vectors).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(vectors, axis=1)
                found[name][f"{kind}: tokens, cosine"] = tokens, float(cosines.min())
    for name, kind in ((name, kind) for name in servers for kind in works):
        rate, (tokens, cosine) = found[name][kind], found[name][f"{kind}: tokens, cosine"]
        of = f"{rate:9.1f} texts/s {rate * tokens / len(texts):9.0f} tokens/s"
        print(f"{name:16}{kind:8}{of}, least cosine to the first {cosine:.5f}", flush=True)
    if asked.out is not None:
        asked.out.write_text(json.dumps({"texts": len(texts), "form": form, **found}))


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
