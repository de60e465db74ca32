"""Commands and client code of SGLang's page on speculative decoding, with the import changed and nothing else, in a
folder that holds small stand-in checkpoints under the same names."""

from __future__ import annotations

import os
from pathlib import Path

import openai
import pytest
import requests
from stand_ins import accept_length, llama2, llama3, llama31, mimo, model_of, qwen25, write_all

from draftwing.test.doc_patch import launch_server_cmd
from draftwing.utils import print_highlight, terminate_process, wait_for_server

pytestmark = pytest.mark.slow
EAGLE2 = """
python3 -m sglang.launch_server --model meta-llama/Llama-2-7b-chat-hf  --speculative-algorithm EAGLE \\
    --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B --speculative-num-steps 3 \\
    --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --cuda-graph-max-bs 8 --log-level warning
"""
EAGLE2_COMPILED = """
python3 -m sglang.launch_server --model meta-llama/Llama-2-7b-chat-hf  --speculative-algorithm EAGLE \\
    --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B --speculative-num-steps 5 \\
        --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.6 \\
            --enable-torch-compile --torch-compile-max-bs 2 --log-level warning
"""
FR_SPEC = """
python3 -m sglang.launch_server --model meta-llama/Meta-Llama-3-8B-Instruct --speculative-algorithm EAGLE \\
    --speculative-draft-model-path lmsys/sglang-EAGLE-LLaMA3-Instruct-8B --speculative-num-steps 5 \\
    --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --speculative-token-map thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt \\
    --mem-fraction 0.7 --cuda-graph-max-bs 2 --dtype float16  --log-level warning
"""  # noqa: E501
EAGLE3 = """
python3 -m sglang.launch_server --model meta-llama/Llama-3.1-8B-Instruct  --speculative-algorithm EAGLE3 \\
    --speculative-draft-model-path jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B --speculative-num-steps 5 \\
        --speculative-eagle-topk 8 --speculative-num-draft-tokens 32 --mem-fraction 0.6 \\
        --cuda-graph-max-bs 2 --dtype float16 --log-level warning
"""
MTP = """
    python3 -m sglang.launch_server --model-path XiaomiMiMo/MiMo-7B-RL --host 0.0.0.0 --trust-remote-code \\
    --speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2 \\
    --mem-fraction 0.5 --log-level warning
"""  # noqa: E501
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
# With the most tokens that a step can commit to an exact head's drafts; None: the draft is a random model, or a memory.
COMMANDS = {
    "EAGLE-2": (EAGLE2, 4),
    "torch.compile": (EAGLE2_COMPILED, 6),
    "FR-Spec": (FR_SPEC, 6),
    "EAGLE-3": (EAGLE3, 6),
    "STANDALONE": (STANDALONE, None),
    "SpecV2": (SPEC_V2, None),
    "NGRAM": (NGRAM, None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("page"), llama2, llama3, llama31, mimo, qwen25)


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.mark.further(name=["EAGLE-2", "FR-Spec", "STANDALONE", "NGRAM"])  # as others, and as commands of test_docs.py
@pytest.mark.parametrize("name", COMMANDS)
def test_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, most = COMMANDS[name]
    # Of smaller trees, which may be faster here, fewer drafts are accepted.
    server_process, port = launch_server_cmd(command + " --speculative-fixed-shape" * (most is not None))
    try:
        wait_for_server(f"http://localhost:{port}", timeout=60, process=server_process)
        client = openai.Client(base_url=f"http://127.0.0.1:{port}/v1", api_key="None")
        response = client.chat.completions.create(
            model=model_of(command),
            messages=[
                {"role": "user", "content": "List 3 countries and their capitals."},
            ],
            temperature=0,
            max_tokens=64,
        )
        print_highlight(f"Response: {response}")
        accepted = accept_length(f"http://127.0.0.1:{port}")
    finally:
        terminate_process(server_process)
    assert server_process.returncode == 0
    text = capsys.readouterr().out
    assert text.startswith("Response: ChatCompletion(id='") and "metadata={'weight_version': 'default'}" in text
    assert response.usage is not None and 1 <= response.usage.completion_tokens <= 64
    assert response.choices[0].finish_reason in ("length", "stop")
    if most is not None:
        # A few tokens outside of FR-Spec's list end a draft early, and so does the end of the answer.
        assert accepted > (0.6 if name == "FR-Spec" else 0.85) * most


def test_multi_token_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    # On a busy machine it may be found that drafts do not pay.
    server_process, port = launch_server_cmd(MTP + " --speculative-fixed-shape")
    try:
        wait_for_server(f"http://localhost:{port}", timeout=60, process=server_process)
        url = f"http://localhost:{port}/v1/chat/completions"
        data = {
            "model": "XiaomiMiMo/MiMo-7B-RL",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        response = requests.post(url, json=data)
        print_highlight(response.json())
        accepted = accept_length(f"http://127.0.0.1:{port}")
    finally:
        terminate_process(server_process)
    assert server_process.returncode == 0
    assert capsys.readouterr().out.startswith("{'id': '")
    answer = response.json()
    assert answer["model"] == "XiaomiMiMo/MiMo-7B-RL" and answer["choices"][0]["message"]["content"]
    assert accepted > 0.85 * 2
