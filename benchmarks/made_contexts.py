"""Decoding behind contexts whose prompts take many minutes on a CPU: keys and values are made up.

    python benchmarks/made_contexts.py --isa avx512 --context 16000 --who none,off --out made.json
    python benchmarks/made_contexts.py --isa native --context 8000 --who none,EAGLE3 --tokens 96 --requests 4

The model is `--model` of `cpu_contexts.py`, a GGUF file with random weights, so nobody could tell. This engine goes
through the prompt without its layers, and its pool is filled with random numbers; llama.cpp, with flash attention and
without, gets the state of a short prompt over and over, anew for each question. Then both answer questions behind that,
whose 48 tokens they do compute. All run after each other, for memory: `none` is this engine, `EAGLE3` the same with a
head of random weights, whose acceptance is simulated (`--accept-length`), `off` and `on` are llama.cpp's flash
attention. `--out` keeps what it has of other runs. `hybrid_cpu.py --made` is for recurrent layers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import torch
from chat_servers import Contender, Server, run_with
from cpu_contexts import LLAMAS, SHAPES, SPARE, Shape, ask_llama, write_random
from gguf_files import MIXTURES
from llama_cpp_build import CACHE, ISAS, build
from load_runs import Job, drive, let_go, listed, sampling
from safetensors.torch import save_file
from turns import Answer, Ask, ask_engine, cpu_engine, kv_bytes_per_token, read_bandwidth

from draftwing.engine.engine import Engine
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.models.decoder import DecoderModel

ENDING = 48  # tokens of a question
SHORT = 64  # of llama.cpp's prompt
NOISE = 1 << 20  # random numbers that a pool has again and again
MOST_READ = 1 << 30  # bytes of a plain read
DRAFTERS = ("none", "EAGLE3")  # of this engine
DRAFTED = 32_000  # tokens of a head


# ---- this engine -----------------------------------------------------------------------------------------------------


@contextmanager
def without_layers() -> Iterator[None]:
    """Meanwhile layers give what they get."""
    with (
        patch.object(DecoderModel, "_whole_layers", lambda model, aux_layers: None),
        patch.object(DecoderLayer, "__call__", lambda layer, x, *others: x),
        patch.object(DecoderLayer, "mix", lambda layer, normed, x, *others: x),
    ):
        yield


def fill(engine: Engine, text: list[int]) -> None:
    """Has the engine cache the text with random keys and values. States of recurrent layers are those of no text."""
    with without_layers():
        ask_engine(engine, text, 1)
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(0))
    for kv in engine.parts.executor.attn.pool.kv:
        flat = kv.view(-1)
        for part in flat.split(NOISE):
            part.copy_(noise[: len(part)])


def write_head(folder: Path, shape: Shape) -> None:
    """Writes an EAGLE-3 head with random weights for this target, which drafts 32,000 of its tokens."""
    folder.mkdir()
    hidden, queries, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "fc": (hidden, 3 * hidden), "lm_head": (DRAFTED, hidden), "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden), "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries), "midlayer.mlp.gate_proj": (shape.ffn, hidden),
        "midlayer.mlp.up_proj": (shape.ffn, hidden), "midlayer.mlp.down_proj": (hidden, shape.ffn),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(*size, generator=generator).mul(0.02) for name, size in sizes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file({**tensors, "d2t": torch.zeros(DRAFTED, dtype=torch.int64)}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": hidden, "intermediate_size": shape.ffn, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "draft_vocab_size": DRAFTED, "max_position_embeddings": 1 << 16, "rope_theta": shape.rope,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def ask_at_once(engine: Engine, count: int, prompt: list[int], tokens: int) -> Answer:
    """Asks so many at once, which differ by their last token. decode: of all together; accept_length: the mean."""
    jobs = [Job([*prompt[:-1], number + 3], sampling(0.0, tokens, 0)) for number in range(count)]
    answers, _, _ = drive(engine, jobs, count)
    steps = [answer.meta.get("spec_verify_ct") or tokens - 1 for answer in answers]
    return Answer(
        sum((len(answer.tokens) - 1) / (answer.end - answer.first) for answer in answers),
        computed=max(len(prompt) - answer.meta.get("cached_tokens", 0) for answer in answers),
        accept_length=statistics.mean((tokens - 1) / count for count in steps),
    )


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def repeated(file: BinaryIO, rows: int, size: int, wanted: int) -> bytes:
    """`rows` rows of `size` bytes, read and repeated up to `wanted`."""
    part = file.read(rows * size)
    return (part * -(-wanted // rows))[: wanted * size]


def grow(small: Path, large: Path, text: list[int], axes: bool = False) -> None:
    """small: the state of a slot with a few tokens; large: where that of `text` goes, which has its keys and values
    again and again, and the same recurrent state.  axes: whether a token has further positions, as in Qwen3.5."""
    with small.open("rb") as file, large.open("wb") as to:
        magic, version, count = struct.unpack("3I", file.read(12))
        file.seek(4 * count, os.SEEK_CUR)
        streams, cells = struct.unpack("2I", file.read(8))
        file.seek((24 if axes else 12) * cells, os.SEEK_CUR)  # of each its position, and the one sequence that has it
        turned, layers = struct.unpack("2I", file.read(8))
        assert streams == 1, "expected one slot"
        wanted = len(text)
        to.write(struct.pack(f"3I{wanted}i2I", magic, version, wanted, *text, streams, wanted))
        for position, token in enumerate(text):
            more = (position, position, token) if axes else ()
            to.write(struct.pack(f"iI{len(more)}ii", position, 1, *more, 0))
        to.write(struct.pack("2I", turned, layers))
        for part in range(2 * layers):  # keys of all layers, then values
            if part < layers or not turned:
                head = file.read(12)
                to.write(head + repeated(file, cells, struct.unpack("=iQ", head)[1], wanted))
                continue
            head = file.read(12)
            _, size, width = struct.unpack("=iII", head)
            to.write(head)
            for _ in range(width):
                to.write(repeated(file, cells, size, wanted))
        if states := file.read():  # of recurrent layers, behind their number and the newest token's position
            to.write(states[:4] + struct.pack("i", wanted - 1) + states[8:])


@contextmanager
def llama(args: Any, file: Path, flash: str, text: list[int], folder: Path, axes: bool = False) -> Iterator[Ask]:
    """axes: of `grow`."""
    command: list[Any] = [build(args.isa, args.cache) / "llama-server", "-m", file, "-fa", flash, "-np", 1]
    command += ["-c", len(text) + SPARE, "-t", args.threads, "-tb", args.threads, "--cache-ram", 0, "--no-warmup"]
    command += ["--slot-save-path", folder]
    with Server(Contender("llama.cpp", tuple(map(str, command))), folder / "log") as server:

        def ask(prompt: list[int], tokens: int) -> Any:
            server.post("/slots/0?action=restore", {"filename": "large"})  # recurrent states cannot go back
            return ask_llama(server, prompt, tokens)

        server.ready(lambda: ask_llama(server, text[:SHORT], 1))
        server.post("/slots/0?action=save", {"filename": "small"})
        grow(folder / "small", folder / "large", text, axes)
        yield ask


# ---- all -------------------------------------------------------------------------------------------------------------


def asked(ask: Ask, text: list[int], args: Any) -> list[Answer]:
    """Answers of rounds, after one that is not counted. Each is behind the same text, which has to be cached."""
    found = []
    for number in range(args.rounds + 1):
        rng = random.Random(number)
        answer = ask([*text, *(rng.randrange(3, 1000) for _ in range(ENDING))], args.tokens)
        assert answer.computed <= 2 * ENDING, f"{answer.computed} tokens were computed: the context is not cached"
        found.append(answer)
    return found[1:]


def measure(args: Any, file: Path, shape: Shape, who: str) -> dict[str, Any]:
    rng = random.Random(0)
    text = [rng.randrange(3, shape.vocab) for _ in range(args.context)]
    with tempfile.TemporaryDirectory() as folder:
        if who in DRAFTERS:
            options: dict[str, Any] = {"speculative_algorithm": who, "max_running_requests": args.requests + 1}
            if who != "none":
                write_head(head := Path(folder) / "head", shape)
                options |= {
                    "speculative_draft_model_path": str(head), "speculative_draft_window_size": args.window,
                    "simulate_accept_length": args.accept_length,
                }  # fmt: skip
            engine = cpu_engine(str(file), args.threads, args.context + SPARE * args.requests, **options)
            try:
                fill(engine, text)
                answers = asked(partial(ask_at_once, engine, args.requests), text, args)
            finally:
                let_go(engine)
        else:
            with llama(args, file, who, text, Path(folder)) as ask:
                answers = asked(ask, text, args)
    found = [answer.decode for answer in answers]
    rate, size = statistics.median(found), file.stat().st_size + kv_bytes_per_token(file) * args.context
    read = read_bandwidth(min(size, MOST_READ), args.threads, 5)
    length = statistics.mean(answer.accept_length for answer in answers)
    return {
        "decode": rate, "floor_share": rate * size / read, "read_bytes_per_s": read, "rounds": found,
        "accept_length": length,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--quantised", choices=MIXTURES, default="Q8_0", help="of random weights")
    parser.add_argument("--file", type=Path, help="of the model, where it is kept for the next run")
    parser.add_argument("--context", type=int, default=16_000)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--who", type=listed(str), default=["none", *LLAMAS.values()])
    parser.add_argument("--requests", type=int, default=1, help="at once, of this engine")
    parser.add_argument("--accept-length", type=float, default=2.51)
    parser.add_argument("--window", type=int, default=1024, help="tokens that the head sees")
    parser.add_argument("--isa", choices=ISAS, default="avx512")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of builds of llama.cpp")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    run_with(args.isa)
    with tempfile.TemporaryDirectory() as folder:
        file, shape = args.file or Path(folder) / "made.gguf", SHAPES[args.model]
        if not file.exists():
            write_random(file, shape, 1 << 16, MIXTURES[args.quantised])
        for who in args.who:
            name, found = f"{args.isa}, {args.context} x {args.requests}, {who}", measure(args, file, shape, who)
            print(json.dumps({name: found}), flush=True)
            if args.out is not None:
                kept = json.loads(args.out.read_text(encoding="utf8")) if args.out.exists() else {}
                args.out.write_text(json.dumps({**kept, name: found}, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
