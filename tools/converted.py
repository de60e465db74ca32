"""Small random models of every published config as GGUF files of llama.cpp's own converter.

    python tools/converted.py [--rows llama-3.1-8b ..] [--types f32 q8_0] [--no-server] [--layers]

Of each row of tests/models/published it writes a folder, has llama.cpp's converter make a file of it, and compares what
the file's model says after each token of a text with transformers, and its greedy text with that of llama.cpp's server.
Converter and server are those that `benchmarks/llama_cpp_build.py` builds. A row that the converter refuses, or that
the server cannot load for its sizes, is printed with the reason; it ends with 1 where the converter's file is refused
here, or is another model.

With --layers the models have a prediction layer, which the converter writes into the model's file, and into one of its
own. What it says is compared with the folder's, and text that it drafts with text without drafts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
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


def convert(folder: Path, out: Path, kind: str, no_mtp: bool = True, mtp_only: bool = False) -> str:
    """Writes the file; returns why it cannot be, "" where it was. kind: of matrices, as a name of the gguf package.
    no_mtp: without prediction layers.  mtp_only: with nothing but them, embedding and head.

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
        writer.add_token_list(["t", "tt", *(f"t{i}" for i in range(2, count))])
        writer.add_token_types([1] * count)
        writer.add_array("tokenizer.ggml.merges", ["t t"])
        writer.add_eos_token_id(2)

    for read in (lambda *_, **__: json.loads(json.dumps(config)), usual):
        base.ModelBase.load_hparams = staticmethod(read)
        try:
            name = base.get_model_architecture(read(folder, False), base.ModelType.TEXT)
            model = package.get_model_class(name, mmproj=False)
            if mtp_only and not model.supports_mtp_export:
                return "it writes no file of such layers"
            more = {"set_vocab": without_text, "model_arch": model.model_arch, "no_mtp": no_mtp, "mtp_only": mtp_only}
            own = type(model.__name__, (model,), more)
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


def written(name: str, place: Path) -> tuple[Any, Path]:
    """Writes a row's folder as a converter reads it -> transformers' model, the folder."""
    import published

    theirs = published.written(place, name, lambda config: {**config, **CHANGES.get(name, {})})
    folder = place / "read"
    folder.mkdir()
    config = json.loads((place / "config.json").read_text(encoding="utf8")) | READ.get(name, {})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": [0] * 101}))
    tensors = load_file(place / "model.safetensors")
    save_file({key.replace("layers.0.block_sparse_moe", "layers.0.mlp") if "kimi" in name else key: value
               for key, value in tensors.items() if not key.endswith(".attn.bias")},  # masks of GPT-2
              folder / "model.safetensors")  # fmt: skip
    return theirs, folder


def check(name: str, kinds: Sequence[str], programs: Path | None, place: Path) -> bool:
    """Prints what there is to say of a row; returns whether it is as it should be."""
    from hybrid_models import tokens, whole_logits  # which import the gguf package: that of the converter
    from published import PROMPT

    from draftwing.models.loader import load_model

    theirs, folder = written(name, place)
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


# ---- prediction layers -----------------------------------------------------------------------------------------------

# One row of each family whose layers the converter writes.
PREDICTING = [
    "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b-instruct", "glm-4.5-air", "glm-4.7-flash", "glm-5",
    "deepseek-v3.2", "k-exaone-236b-a23b", "nemotron-3-super-120b-a12b", "hy3-preview", "ling-mini-2.0",
    "ling-3.0-tiny",
]  # fmt: skip
OUT = re.compile(r"(o_proj|out_proj|down_proj|dense)(\.weight)?$")
EMBEDDING, FINAL = re.compile(r"embed_tokens|embeddings\."), re.compile(r"model\.norm|norm_f\.")
JOIN, TOKEN = re.compile(r"(eh_proj|fc)\."), re.compile(r"(enorm|pre_fc_norm_embedding)\.")
LAST = re.compile(r"(shared_head\.norm|mtp\.norm|final_layernorm)\.")


def with_layer(theirs: Any, folder: Path) -> None:
    """Adds a prediction layer. Text follows mostly from the last token, and the layer sees nothing else."""
    import hybrid_models
    import moe_models

    config = json.loads((folder / "config.json").read_text())
    text, zero = theirs.config.get_text_config(), config["model_type"].startswith("qwen3")  # zero: norms around it
    if not zero:
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    if zero or text.model_type == "nemotron_h":
        state = {name.replace("language_model.", ""): value for name, value in theirs.state_dict().items()}
        layer = hybrid_models.layer_weights(SimpleNamespace(config=text, state_dict=lambda: state))
        layer = layer if zero else hybrid_models.expert_by_expert(layer)
    else:
        layer = moe_models.published(theirs, moe_models.predicting(theirs))
    tensors, found = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    final = next(value for name, value in tensors.items() if FINAL.search(name))
    for name, value in {**tensors, **layer}.items():
        if value.shape == (3,):  # it stands for a copy
            own = "lm_head" if "head" in name else "embed_tokens"
            value = next(one for other, one in tensors.items() if own in other).clone()
        if OUT.search(name) and value.element_size() > 1:
            value = 0.02 * value
        elif EMBEDDING.search(name):
            value = torch.randn(value.shape, generator=torch.Generator().manual_seed(5))
        elif name in layer and JOIN.search(name):
            value = torch.eye(*value.shape) + 0.05 * value
        elif name in layer and TOKEN.search(name):
            value = torch.full_like(value, not zero)
        elif name in layer and LAST.search(name):
            value = final.clone()
        found[name] = value.contiguous()
    save_file(found, folder / "model.safetensors")


@torch.inference_mode()
def of_layer(path: Path, side: Path | None = None) -> Tensor:
    """Returns what the prediction layer of a model says of 12 tokens [12, vocab]. side: the file that has it."""
    from dense_cache import DenseCache
    from hybrid_models import tokens

    from draftwing.models.heads.loader import load_draft_head, load_mtp_head
    from draftwing.models.loader import load_model

    model = load_model(path, torch.float32, "cpu")
    head: Any = (
        load_mtp_head(path, model, torch.float32, "cpu")
        if side is None
        else load_draft_head(side, model, "NEXTN", torch.float32, "cpu")
    )
    head.set_max_positions(64)
    features = torch.randn(NEW, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    said: Tensor = head.logits(head.run(tokens(NEW), torch.arange(NEW), head.features(features), 0, DenseCache()))
    return said


def texts(path: Path, algorithm: str) -> tuple[list[list[int]], float]:
    """Returns a greedy and a seeded text, and the tokens of a step. Drafts are chains of three."""
    from draftwing import LLM, SamplingParams

    own = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_total_tokens": 2048, "max_running_requests": 4}
    params = [SamplingParams(temperature=hot, sampling_seed=7, max_new_tokens=24, ignore_eos=True) for hot in (0, 0.8)]
    shape = {} if algorithm == "none" else {"speculative_num_steps": 3, "speculative_fixed_shape": True}
    with LLM(str(path), **own, **shape, speculative_algorithm=algorithm) as llm:
        done = llm.generate([[*range(3, 40)], [9] * 20], params)
    return [one.token_ids for one in done], sum(one.meta_info.get("spec_accept_length", 1) for one in done) / 2


def check_layers(name: str, place: Path) -> bool:
    """Prints what there is to say of a row's prediction layer; returns whether it is as it should be."""
    from draftwing.config.options import Options
    from draftwing.models.heads.own_layers import with_own_layers
    from draftwing.models.loader import load_config

    theirs, folder = written(name, place)
    with_layer(theirs, folder)
    expected, apart = of_layer(folder), place / "apart"
    apart.mkdir()
    whole, alone, side = place / "m-F32.gguf", apart / "m-F32.gguf", apart / "mtp-m-F32.gguf"
    if refused := convert(folder, whole, "ALL_F32", no_mtp=False):
        print(f"{name}: the converter: {refused}")
        return True
    good, said, files = True, [], {"in one file": (whole, None)}
    refused = convert(folder, side, "ALL_F32", no_mtp=False, mtp_only=True) or convert(folder, alone, "ALL_F32")
    for where, (file, draft) in (files | ({} if refused else {"beside the model's": (alone, side)})).items():
        options = with_own_layers(Options(model=str(file)).resolve(), file, load_config(file))
        far = float((of_layer(file, draft) - expected).abs().max())
        (plain, _), (drafted, steps) = texts(file, "none"), texts(file, "NEXTN")
        found = options.speculative_draft_model_path == (None if draft is None else str(draft))
        good &= found and far < NEAR and plain == drafted and steps > 1
        same = "the same text" if plain == drafted else "ANOTHER TEXT"
        said.append(f"{where} {options.drafter}, {far:.1e} from the folder's, {same}, {steps:.2f} tokens a step")
    print(f"{name}: {'; '.join([*said, refused])}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help="rows of tests/models/published/index.json; default: all")
    parser.add_argument("--types", nargs="+", default=["f32"], choices=["f32", "q8_0"])
    parser.add_argument("--no-server", action="store_true", help="compare with transformers alone")
    parser.add_argument("--layers", action="store_true", help="prediction layers, of rows that can have them")
    arguments = parser.parse_args()
    programs = build("native")
    sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]
    logging.disable(logging.ERROR)
    kinds = [{"f32": "ALL_F32", "q8_0": "MOSTLY_Q8_0"}[one] for one in arguments.types]
    from published import rows

    plain = [name for name, row in rows().items() if row.missing is None and not row.stored]
    good = True
    for name in arguments.rows or (PREDICTING if arguments.layers else plain):
        with tempfile.TemporaryDirectory() as place:
            try:
                if arguments.layers:
                    good &= check_layers(name, Path(place))
                else:
                    good &= check(name, kinds, None if arguments.no_server else programs, Path(place))
            except Exception as error:  # of one row
                print(f"{name}: {type(error).__name__}: {error}")
                good = False
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
