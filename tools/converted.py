"""Small random models of every published config as GGUF files of llama.cpp's own converter.

    python tools/converted.py [--rows llama-3.1-8b ..] [--types f32 q8_0] [--no-server]

Of each row of tests/models/published it writes a folder, has llama.cpp's converter make a file of it, and compares what
the file's model says after each token of a text with transformers, and its greedy text with that of llama.cpp's server.
Converter and server are those that `benchmarks/llama_cpp_build.py` builds. A row that the converter refuses, or that
the server cannot load for its sizes, is printed with the reason; it ends with 1 where the converter's file is refused
here, or is another model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]
from llama_cpp_build import CACHE, VERSION, build  # noqa: E402

SOURCE = CACHE / VERSION / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
NEW = 12  # tokens that are compared with the server's
NEAR = 1e-4
# What converters take from sizes of published models, and is otherwise in small ones; and what files cannot say.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba-9b-v2": {"attn_rotary_emb": 8}, "ernie-4.5-21b-a3b": {"intermediate_size": 128},
    "glm-4-9b-chat-hf": {"head_dim": 8, "rms_norm_eps": 1e-5},
    "hunyuan-7b-instruct": {"rope_theta": 10000.0}, "minicpm3-4b": {"rope_theta": 10000.0},
    "falcon-11b": {"rope_theta": 10000.0},
    "minitron-4b-base": {"head_dim": 16}, "phi-2": {"intermediate_size": 256}, "olmoe-1b-7b": {"rms_norm_eps": 1e-5},
    "solar-open-100b": {"partial_rotary_factor": 1.0}, "mistral-7b-v0.1": {"sliding_window": None},
    "zephyr-7b-beta": {"sliding_window": None}, "starcoder2-7b": {"sliding_window": None},
}  # fmt: skip
# What converters read under other names, or as models were published.
READ: dict[str, dict[str, Any]] = {
    "dots.llm1.inst": {"scoring_func": "sigmoid"}, "hunyuan-7b-instruct": {"max_position_embeddings": 32768},
    "pythia-1.4b": {"layer_norm_eps": 1e-5},
    **{f"granite-swash-{size}": {"no_rope_layers": [0, 1, 1, 1, 0]} for size in ("2b", "3b-a600m")},
}  # fmt: skip
# Whose files leave out what llama.cpp does without: chunks, a factor of scores or of queries, windows of no layer,
# embeddings by layer of tokens of images.
UNSAID = {
    "llama-4-maverick", "gemma-3-4b-it", "gemma-3-12b-it", "gemma-3-27b-it", "rnj-1-instruct", "mistral-small-4-119b",
    "deepseek-r1-0528-qwen3-8b", "gemma-3n-e2b-it",
}  # fmt: skip


def convert(folder: Path, out: Path, kind: str) -> str:
    """Writes the file; returns why it cannot be, "" where it was. kind: of matrices, as a name of the gguf package.

    Converters read a config as it is where transformers does not know the model, else with what that adds to it.
    """
    base, package = importlib.import_module("conversion.base"), importlib.import_module("conversion")
    gguf = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    usual, refused = base.ModelBase.load_hparams, ""

    def without_text(self: Any) -> None:
        """Writes a vocabulary of names, of which llama.cpp's server needs some."""
        count, writer = self.hparams["vocab_size"], self.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([f"t{i}" for i in range(count)])
        writer.add_token_types([1] * count)
        writer.add_array("tokenizer.ggml.merges", ["t t"])
        writer.add_eos_token_id(2)

    for read in (lambda *_, **__: json.loads(json.dumps(config)), usual):
        base.ModelBase.load_hparams = staticmethod(read)
        try:
            name = base.get_model_architecture(read(folder, False), base.ModelType.TEXT)
            model = package.get_model_class(name, mmproj=False)
            model.no_mtp = True
            own = type(model.__name__, (model,), {"set_vocab": without_text, "model_arch": model.model_arch})
            made = own(folder, gguf.LlamaFileType[kind], out)
            if hasattr(made, "impl"):  # of one class for two
                type(made.impl).set_vocab = without_text
            with torch.inference_mode():
                made.write()
            return ""
        except (Exception, SystemExit) as error:
            refused = f"{type(error).__name__}: {error}".replace("\n", " ")[:120]
        finally:
            base.ModelBase.load_hparams = staticmethod(usual)
    return refused


def of_server(programs: Path, file: Path, ids: Sequence[int]) -> list[int] | str:
    """Returns the tokens that llama.cpp writes after `ids`, or why it does not."""
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [programs / "llama-server", "-m", file, "--port", port, "-t", 1, "-c", 512, "-np", 1, "--no-warmup",
               "-fa", "off", "-ctk", "f32", "-ctv", "f32"]  # fmt: skip
    body = {"prompt": [*ids], "n_predict": NEW, "top_k": 1, "samplers": ["top_k"], "return_tokens": True,
            "ignore_eos": True, "cache_prompt": False}  # fmt: skip
    asked = Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            time.sleep(0.1)
            if process.poll() is not None:
                return "llama.cpp does not load it"
            try:
                found: list[int] = json.loads(urlopen(asked, timeout=10).read())["tokens"]
                return found
            except HTTPError as error:
                if error.code != 503:  # which it says while it loads
                    return f"llama.cpp answers {error.code}"
            except (URLError, TimeoutError):  # it is not there yet
                continue
        return "llama.cpp does not answer"
    finally:
        process.kill()
        process.wait()


@torch.inference_mode()
def greedy(model: Any, ids: Tensor) -> list[int]:
    from hybrid_models import whole_logits

    for _ in range(NEW):
        logits = whole_logits(model, ids)[-1]
        logits[2] = -torch.inf  # as the server does, which goes on behind the end
        ids = torch.cat((ids, logits.argmax()[None]))
    return ids[-NEW:].tolist()


def dequantise(file: Path, out: Path) -> None:
    """Writes the same model with the values of its weights in F32, of which llama.cpp rounds no activation."""
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for one in reader.tensors:
        writer.add_tensor(one.name, gguf.quants.dequantize(one.data, one.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def compared(model: Any, ids: Tensor, other: Sequence[int], ours: Sequence[int]) -> str:
    """Says how many tokens are the same, and how far apart ours and llama.cpp's first other one are here, in nats."""
    from hybrid_models import whole_logits

    same = next((i for i, (a, b) in enumerate(zip(other, ours, strict=True)) if a != b), NEW)
    said = f"{same} of {NEW} tokens are llama.cpp's"
    if same == NEW:
        return said
    logits = whole_logits(model, torch.cat((ids, torch.tensor(ours[:same], dtype=ids.dtype))))[-1]
    return f"{said}, whose next is {float(logits[ours[same]] - logits[other[same]]):.1e} less likely here"


def check(name: str, kinds: Sequence[str], programs: Path | None, place: Path) -> bool:
    """Prints what there is to say of a row; returns whether it is as it should be."""
    from hybrid_models import tokens, whole_logits  # which import the gguf package: that of the converter
    from published import PROMPT, written

    from draftwing.models.loader import load_model

    theirs = written(place, name, lambda config: {**config, **CHANGES.get(name, {})})
    folder = place / "read"
    folder.mkdir()
    config = json.loads((place / "config.json").read_text(encoding="utf8")) | READ.get(name, {})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": [0] * 101}))
    tensors = load_file(place / "model.safetensors")
    save_file({key.replace("layers.0.block_sparse_moe", "layers.0.mlp") if "kimi" in name else key: value
               for key, value in tensors.items() if not key.endswith(".attn.bias")},  # masks of GPT-2
              folder / "model.safetensors")  # fmt: skip
    good = True
    for kind in kinds:
        out = place / f"{kind}.gguf"
        if refused := convert(folder, out, kind):
            print(f"{name}: the converter: {refused}")
            return True
        model: Any = load_model(out, torch.float32, "cpu")
        ids = tokens(min(PROMPT, model.config.max_positions))
        start = ids[: min(40, model.config.max_positions - NEW)]
        with torch.inference_mode():
            expected = theirs(input_ids=ids[None]).logits[0].log_softmax(-1)
            far = float((whole_logits(model, ids).log_softmax(-1) - expected).abs().max())
        said = ""
        if programs is not None:
            other, ours = of_server(programs, out, start.tolist()), greedy(model, start)
            said = other if isinstance(other, str) else compared(model, start, other, ours)
            if "F32" not in kind and not isinstance(other, str) and list(other) != ours:
                dequantise(out, place / "wide.gguf")
                other = of_server(programs, place / "wide.gguf", start.tolist())
                same = other if isinstance(other, str) else compared(model, start, other, ours)
                said += f"; with the same weights in F32 {same}"
        print(f"{name}, {kind}: {far:.1e} from transformers; {said}", flush=True)
        good &= far < NEAR or "F32" not in kind or name in UNSAID
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help="rows of tests/models/published/index.json; default: all")
    parser.add_argument("--types", nargs="+", default=["f32"], choices=["f32", "q8_0"])
    parser.add_argument("--no-server", action="store_true", help="compare with transformers alone")
    arguments = parser.parse_args()
    programs = build("native")
    sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]
    logging.disable(logging.ERROR)
    kinds = [{"f32": "ALL_F32", "q8_0": "MOSTLY_Q8_0"}[one] for one in arguments.types]
    from published import rows

    plain = [name for name, row in rows().items() if row.missing is None and not row.stored]
    good = True
    for name in arguments.rows or plain:
        with tempfile.TemporaryDirectory() as place:
            try:
                good &= check(name, kinds, None if arguments.no_server else programs, Path(place))
            except Exception as error:  # of one row
                print(f"{name}: {type(error).__name__}: {error}")
                good = False
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
