"""Commands that cannot work, as hands used to other servers type them. Each ends with code 2 and one sentence, which
names what to type instead, before any weight is read: those of the model here cannot be."""

from __future__ import annotations

import io
import json
import re
import shlex
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference.checkpoints import eagle3_head, llama_target
from tiny_checkpoint import VOCAB, write_tokenizer

from draftwing.cli.main import main

TARGET = llama_target(0, vocab_size=VOCAB, num_hidden_layers=6, max_position_embeddings=128)
UNREADABLE = b"these are no weights"
DEEPSEEK: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
RWKV: dict[str, Any] = {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What words in braces of the commands stand for: folders, files and addresses."""
    root = tmp_path_factory.mktemp("models")
    for name, config in {"deepseek": DEEPSEEK, "rwkv": RWKV, "weightless": {}}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    (root / "empty").mkdir()
    (root / "no.gguf").write_bytes(b"not a GGUF file")
    TARGET.write(root / "target")
    eagle3_head(TARGET, vocab_size=2 * VOCAB).write(root / "head")
    write_tokenizer(root / "target")
    for model in ("target", "head"):
        (root / model / "model.safetensors").write_bytes(UNREADABLE)
    with socket.socket() as unheard, socket.create_server(("127.0.0.1", 0)) as taken:
        unheard.bind(("127.0.0.1", 0))
        found = {file.name.replace(".", "_"): str(file) for file in root.iterdir()}
        yield found | {
            "root": str(root), "unheard": f"http://127.0.0.1:{unheard.getsockname()[1]}",
            "taken": str(taken.getsockname()[1]),
        }  # fmt: skip


COMMANDS = ("serve", "chat", "bench", "pull")
MODELS = "'smollm2' .* folder .* .gguf .* hub id"
HEAD = "bench {target} --speculative-algorithm EAGLE3 --speculative-draft-model-path"
WRONG = [
    ("serv", r"'serve', 'chat'"),
    ("serve smollm3", MODELS),
    ("serve --speculative-algoritm EAGLE3", "--speculative-algorithm$"),
    ("serve --max_runing_requests=3", "nearest option is --max-running-requests$"),
    ("serve --spec 1", "--spec;"),
    ("chat word 'a question' more", "unrecognised arguments: more$"),
    ("bench --num-prompts 0", "at least 1; found '0'"),
    ("bench --concurrency 1,0", "as 1,8; found '1,0'"),
    ("serve --host 'no such host'", "is not an address"),
    ("bench --url ftp://x", "expected a URL"),
    ("bench --url {unheard} --model x", "model would have no effect"),
    ("bench --url {unheard} --sweep", "does not go with --url"),
    ("bench --output /no/such/folder/file", "cannot be written"),
    ("bench --save-shape", "--save-shape needs --sweep"),
    ("bench --sweep --save-shape --model x --speculative-algorithm NGRAM", "found NGRAM"),
    (
        "bench --sweep --save-shape --speculative-algorithm=EAGLE3 --speculative-draft-model=a/b",
        "expected one with config.json, found a/b",
    ),
    ("serve --temp 0.2", "'temperature'"),
    ("serve --dp-size 2", "--tp-size"),
    ("serve --spec-typ x", "draftwing serve --help-all"),
    ("serve --model /no/such/folder", MODELS),
    ("bench --model {empty}", "no config.json.*" + MODELS),
    ("bench --model {no_gguf}", "not a GGUF file"),
    ("bench {deepseek}", "DeepseekV4ForCausalLM has sparse attention over compressed keys"),
    ("bench {rwkv}", "a recurrence without attention"),
    ("bench {target} --context-length 100000", "--context-length 100000 .* 128 positions"),
    ("bench {target} --quantization int4", "--quantization must be one of auto, .*'int4'"),
    (f"{HEAD} {{weightless}}", "no weights in .*expected one of model.safetensors"),
    (f"{HEAD} {{head}}", f"vocab_size.*{VOCAB}"),
    ("bench --speculative-num-steps -1", "--speculative-num-steps must be at least 1; found -1"),
    ("serve --port abc", "--port.*'abc'"),
    ("serve --port {taken}", "port {taken} of 127.0.0.1 is in use.*--port"),
    ("serve --chat-template nothing.jinja --load-format dumy", "--load-format must be one of"),
    ("chat {target} --chat-template nothing.jinja", "--chat-template: expected a file, .*chatml_tools"),
    ("chat --url {unheard}", "no answer from {unheard}"),
    ("bench --url {unheard}", "no answer from {unheard}"),
    ("bench --prompts {root}/nothing.jsonl", "--prompts: .*nothing.jsonl cannot be read"),
    ("train --out {root}/run", "--prompts or --conversations"),
    ("train fti --out {root}/run", "did you mean fit"),
    ("train --out {root}/run --prompts {root}/nothing", "nothing cannot be read"),
    ("serve --learn ''", "--learn must not be empty"),
    ("serve {target} --speculative-algorithm NGRAM --speculative-memory ''", "--speculative-memory must not be empty"),
    ("traffic rm anonymous --speculative-memory ''", "--speculative-memory must not be empty"),
    ("traffic rm '' --learn {root}", "client must not be empty"),
    ("train --out {root}/run --prompts {root}/nothing ''", "--prompts must not be empty"),
    ("token-map --model x --out {root}/map ''", "files must not be empty"),
    ("train --out {root}/run --algorithm EAGLE4", "--algorithm must be one of"),
]


@pytest.mark.parametrize(("command", "says"), WRONG, ids=[command for command, _ in WRONG])
def test_it_says_what_to_do(
    command: str, says: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a question"))
    words = [word.format(**places) for word in shlex.split(command)]
    usage = ""
    try:
        code = main(words)
    except SystemExit as error:  # argparse's
        code, usage = error.code, f"usage: draftwing {words[0] if words[0] in COMMANDS else '[-h]'} "
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert said.err.startswith(usage) if usage else line.startswith("draftwing: error: ")
    assert code == 2 and not said.out and "Traceback" not in said.err
    assert re.search(says.format(**places), line), line


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) == 2
    assert "use --device cpu or auto" in capsys.readouterr().err
