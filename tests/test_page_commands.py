"""Commands and client code of SGLang's page on speculative decoding, with the import changed and nothing else, in a
folder that holds small stand-in checkpoints under the same names."""

from __future__ import annotations

import sys
from pathlib import Path

import openai
import pytest

from draftwing.test.doc_patch import launch_server_cmd
from draftwing.utils import print_highlight, terminate_process, wait_for_server

sys.path.insert(0, str(Path(__file__).parent))

from tiny_checkpoint import write_checkpoint

STANDALONE = """
python3 -m sglang.launch_server --model Qwen/Qwen2.5-7B-Instruct --speculative-algorithm STANDALONE \\
    --speculative-draft-model-path Qwen/Qwen2.5-1.5B-Instruct \\
    --speculative-num-steps 4 --speculative-eagle-topk 2 --speculative-num-draft-tokens 7 \\
    --cuda-graph-max-bs 8 --mem-fraction-static 0.7 --log-level warning
"""
SPEC_V2 = """
SGLANG_ENABLE_SPEC_V2=True python3 -m sglang.launch_server --model Qwen/Qwen2.5-7B-Instruct --speculative-algorithm STANDALONE \\
    --speculative-draft-model-path Qwen/Qwen2.5-1.5B-Instruct \\
    --speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5 \\
    --cuda-graph-max-bs 8 --mem-fraction-static 0.7 --log-level warning
"""  # noqa: E501
NGRAM = """
python3 -m sglang.launch_server --model Qwen/Qwen2.5-7B-Instruct --speculative-algorithm NGRAM \\
    --speculative-num-draft-tokens 16 \\
    --speculative-ngram-max-match-window-size 12 --speculative-ngram-max-bfs-breadth 10 \\
    --cuda-graph-max-bs 8 --mem-fraction-static 0.8 --log-level warning
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    # The commands ask for most of the memory: large heads keep the pool's number of tokens usual.
    write_checkpoint(folder / "Qwen/Qwen2.5-7B-Instruct", seed=1, layers=2, heads=16, size=256)
    write_checkpoint(folder / "Qwen/Qwen2.5-1.5B-Instruct", seed=1, layers=1, heads=16, size=256)
    return folder


@pytest.mark.parametrize("command", [STANDALONE, SPEC_V2, NGRAM], ids=["STANDALONE", "SpecV2", "NGRAM"])
def test_command(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    server_process, port = launch_server_cmd(command)
    try:
        wait_for_server(f"http://localhost:{port}", timeout=60, process=server_process)
        client = openai.Client(base_url=f"http://127.0.0.1:{port}/v1", api_key="None")
        response = client.chat.completions.create(
            model="Qwen/Qwen2.5-7B-Instruct",
            messages=[
                {"role": "user", "content": "List 3 countries and their capitals."},
            ],
            temperature=0,
            max_tokens=64,
        )
        print_highlight(f"Response: {response}")
    finally:
        terminate_process(server_process)
    assert server_process.returncode == 0
    text = capsys.readouterr().out
    assert text.startswith("Response: ChatCompletion(id='") and "metadata={'weight_version': 'default'}" in text
    assert response.usage is not None and 1 <= response.usage.completion_tokens <= 64
    assert response.choices[0].finish_reason in ("length", "stop")
