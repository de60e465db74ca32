"""`benchmarks/beside.py`: its cases, the models that it makes, and what becomes of servers that fail."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hybrid_models import whole_logits
from safetensors.torch import load_file
from scripts import script

from draftwing.config.options import Options
from draftwing.config.sources import add_arguments
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.loader import load_model
from draftwing.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
beside = script(ROOT / "benchmarks" / "beside.py")
cases: ModuleType = sys.modules["beside_cases"]
models: ModuleType = sys.modules["random_models"]
hybrid_gpu: ModuleType = sys.modules["hybrid_gpu"]
Case, Waves, Wave = cases.Case, cases.Waves, cases.Wave
PEER = f"""#!{sys.executable}
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

mode, words = os.environ["MODE"], sys.argv[1:]
open(os.environ["PIDS"], "a").write(f"{{os.getpid()}}\\n")
assert words[:2] == ["-m", "draftwing" if mode == "works" else "sglang.launch_server"], words
if mode == "ours":  # which takes the peer's options, but for these
    skipped = {{"--mem-fraction-static", "--dtype"}}
    words = [word for i, word in enumerate(words) if not {{word, words[i - 1]}} & skipped]
    os.execv(sys.executable, [sys.executable, "-m", "draftwing.launch_server", *words[2:]])
if mode == "dies":
    print("reading weights")
    print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
    sys.exit(3)
if mode == "never ready":
    time.sleep(600)


class Answers(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        count = asked["sampling_params"]["max_new_tokens"]
        if count > 16 and mode == "hangs":
            time.sleep(600)
        if count > 16 and mode == "dies later":
            print("Scheduler hit an exception: device-side assert", flush=True)
            os._exit(9)
        if mode == "refuses" and len(asked["input_ids"]) > 30:
            body, status = {{"error": {{"message": "too long for me"}}}}, 400
        else:
            body, status = {{"meta_info": {{"completion_tokens": count, "cached_tokens": 0}}}}, 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


ThreadingHTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Answers).serve_forever()
"""
OURS = "--device cpu --num-threads 1 --max-total-tokens 4000"
WAVES = Waves((Wave(1, 0.0), Wave(3, 1.0)), ((20, 24), (40, 20)), (False, True))
TINY = Case("tiny", "tiny", WAVES, cases.EAGLE3, length=256, rows=4)
TINY_PICTURES = (((64, 96), "JPEG"), ((96, 64), "PNG"))
PLAIN = Case("plain", "tiny", Waves((Wave(2, 0.0),), ((20, 24),), (False,)), length=256, rows=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    models.write(folder, "tiny")
    return folder


@pytest.fixture
def words(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a command line, with a peer of this kind. real: whether ours is; else it is a small process, too."""
    python = tmp_path / "python"
    python.write_text(PEER)
    python.chmod(0o755)
    (tmp_path / "out" / "models").mkdir(parents=True)
    (tmp_path / "out" / "models" / "tiny").symlink_to(tiny)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))

    def made(mode: str, *more: str, real: bool = False) -> list[str]:
        found = ["--out", str(tmp_path / "out"), "--cards", ",", "--start", "90", "--rounds", "1", *more]
        ours = ["--ours-args", OURS] if real else ["--ours-python", str(python), "--ours-env", "MODE=works"]
        return [*found, *ours, "--peer-python", str(python), "--peer-env", f"MODE={mode}"]

    return made


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "figures.jsonl").read_text().splitlines()]


def gone(folder: Path, seconds: float = 10.0) -> bool:
    """Whether all peers that were started end within some seconds."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_our_options_are_taken(case: Any, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    for shares in (False, True):
        given = vars(parser.parse_args(case.our_words(tmp_path, shares)))
        options = Options.from_kwargs(**given).resolve()
        assert options.tp_size == case.cards and options.drafts == (case.drafts is not None)
        assert len(options.adapters) == case.adapters < options.max_loras + 1
        assert (options.mem_fraction_static is None) != shares


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_both_are_asked_for_the_same(case: Any, tmp_path: Path) -> None:
    """But for who reads weights, and how acceptance is simulated."""
    ours, peer = case.our_words(tmp_path, False), case.peer_words(tmp_path)
    for option in ("--model-path", "--context-length", "--tp-size", "--max-running-requests", "--lora-paths"):
        assert [ours[i + 1] for i, word in enumerate(ours) if word == option] == [
            peer[i + 1] for i, word in enumerate(peer) if word == option
        ]
    drafts = case.drafts is not None and bool(case.drafts.peer)  # or it has none where ours does
    assert drafts == ("SGLANG_SIMULATE_ACC_LEN" in case.peer_environ()) == ("--speculative-algorithm" in peer)
    assert ("--simulate-accept-length" in ours) == (case.drafts is not None)
    assert "--disable-radix-cache" not in (*ours, *peer)  # prompts are known or new by what is in them


def test_names_are_unique_and_lists_can_be_cut(capsys: pytest.CaptureFixture[str]) -> None:
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    beside.main(["--list", "--only", "8b,gpt-oss-120b", "--cards", "0,1"])
    out = capsys.readouterr().out
    assert out.count("draftwing serve") == out.count("sglang.launch_server") == 2
    assert out.count("CUDA_VISIBLE_DEVICES=0 ") == 1 and "models/llama-8b/target" in out  # can be typed as it is
    with pytest.raises(SystemExit, match=r"expected cases of 8b, .*found 9b"):
        beside.main(["--only", "8b,9b"])


@pytest.mark.parametrize(("cards", "case", "expected"), [
    (["0"], "8b", [["0"], ["0"]]), (["0", "1"], "8b", [["0"], ["1"]]), (["4", "5", "6", "7"], "122b", [[*"4567"]] * 2),
    ([*"01234567"], "122b", [[*"0123"], [*"4567"]]), (["2", "3"], "pictures-27b", [["2"], ["3"]]),
])  # fmt: skip
def test_cards(cards: list[str], case: str, expected: list[list[str]], tmp_path: Path) -> None:
    """Each server has its own where there are enough; who shares leaves room."""
    args = beside.arguments(["--cards", ",".join(cards)])
    found = beside.contenders(next(one for one in cases.CASES if one.name == case), tmp_path, args)
    assert [one.environ["CUDA_VISIBLE_DEVICES"].split(",") for one in found] == expected
    assert ("--mem-fraction-static" in found[0].command) == (expected[0] == expected[1])


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.further(  # others have their parts
    name=[
        "llama-8b",
        "llama-70b",
        "llama-70b-fp8",
        "qwen3.5-122b-fp8",
        "qwen3.5-27b-pictures",
        "qwen3.5-9b-pictures",
        "kimi-linear-48b",
        "tiny",
    ]
)
@pytest.mark.parametrize("name", [name for name in models.MODELS if not name.endswith("embedding")])
def test_configs_are_taken(name: str, tmp_path: Path) -> None:
    """At their real sizes, of which nothing is allocated."""
    model = models.MODELS[name]
    models.write_config(tmp_path, model.target)
    target = load_model(tmp_path, torch.bfloat16, "meta", dummy=True)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.backend.get_vocab_size() == models.vocabulary(model.target) == target.config.vocab_size
    assert tokenizer.backend.decode(tokenizer.backend.encode("What is in it? é\n").ids) == "What is in it? é\n"
    for case in (case for case in cases.CASES if case.model == name and case.drafts is not None):
        if case.drafts.head:
            folder = tmp_path / "draft"
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(model.draft))
            load_draft_head(folder, target, case.drafts.ours, torch.bfloat16, "meta", dummy=True)
        else:
            load_mtp_head(tmp_path, target, torch.bfloat16, "meta", dummy=True)


@pytest.mark.parametrize("name", ["tiny", "tiny-pictures"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    models.write_config(tmp_path, models.MODELS[name].target)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    asked = [{"role": "user", "content": "What is in it? é"}, {"role": "assistant", "content": " <6>"}]
    text = theirs.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert theirs(text)["input_ids"] == ours.encode_chat(asked)
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    ids = theirs(theirs.apply_chat_template(shown, tokenize=False))["input_ids"]
    start, end, picture, _ = models.PICTURE_IDS.values()
    if name == "tiny-pictures":
        assert ids.count(picture) == 1 and ids[ids.index(picture) - 1 : ids.index(picture) + 2] == [start, picture, end]


TINY_GPT_OSS = models.GPT_OSS_120B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_local_experts": 8, "vocab_size": 1000, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"], "eos_token_id": 999,
}  # fmt: skip
TINY_HYBRID = hybrid_gpu.config_of("tiny") | {"vocab_size": 1000, "eos_token_id": 999}
TINY_LFM2 = models.MODELS["lfm2-8b"].target | {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 1000,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"], "eos_token_id": 999,
}  # fmt: skip
TINY_FP8 = models.TINY_LLAMA | models.BLOCKS_OF_FP8 | {"hidden_size": 256, "intermediate_size": 384}


def reference(folder: Path, config: dict[str, Any]) -> Any:
    """The model of transformers. Blocks of fp8 are dequantised here, which it would do with a further package alone."""
    load, method = transformers.AutoModelForCausalLM, config.get("quantization_config", {}).get("quant_method")
    if method != "fp8":
        more = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if method else {}
        return load.from_pretrained(folder, dtype=torch.float32, **more).eval()
    stored = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    wide = {name: value.float() for name, value in stored.items() if not name.endswith("_scale_inv")}
    for name in stored.keys() - wide.keys():
        matrix = name.removesuffix("_scale_inv")
        scales = stored[name].repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide[matrix] *= scales[: wide[matrix].shape[0], : wide[matrix].shape[1]]
    settings = transformers.AutoConfig.from_pretrained(folder)
    del settings.quantization_config
    model = load.from_config(settings, dtype=torch.float32).eval()
    missing, unknown = model.load_state_dict(wide, strict=False)
    assert not missing and all(name.startswith("mtp.") for name in unknown)
    return model


@pytest.mark.parametrize(("config", "shard"), [
    pytest.param(models.TINY_LLAMA, 1 << 30, marks=pytest.mark.exhaustive), (models.TINY_LLAMA, 40_000),
    (TINY_GPT_OSS, 50_000), (TINY_LFM2, 50_000), pytest.param(TINY_HYBRID, 1 << 30, marks=pytest.mark.exhaustive),
    (TINY_HYBRID | {"quantization_config": models.FP8}, 1 << 20), (TINY_FP8, 1 << 30),
])  # fmt: skip
def test_weights_are_those_of_transformers(config: dict[str, Any], shard: int, tmp_path: Path) -> None:
    models.write_config(tmp_path, config)
    models.write_weights(tmp_path, shard=shard)
    ours = load_model(tmp_path, torch.float32, "cpu")
    theirs = reference(tmp_path, config)
    ids = torch.randint(0, 1000, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids).logits[0]
        found = whole_logits(ours, ids[0])
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-3)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard < 1 << 30)
    if config["model_type"] == "qwen3_5_text":
        load_mtp_head(tmp_path, ours, torch.float32, "cpu")


def test_heads_have_weights(tiny: Path, tmp_path: Path) -> None:
    target = load_model(tiny / "target", torch.float32, "cpu")
    load_draft_head(tiny / "draft", target, "EAGLE3", torch.float32, "cpu")
    inner = models.DFLASH2_27B["dflash_config"] | {"target_layer_ids": [1, 3], "conv_group_size": 8, "mask_token_id": 9}
    sizes = {key: models.TINY_LLAMA[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
    config = models.DFLASH2_27B | sizes | {"num_target_layers": 4, "head_dim": 16, "dflash_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    models.write_head(tmp_path, tiny / "target", "DFLASH2", "cpu")
    load_draft_head(tmp_path, target, "DFLASH2", torch.float32, "cpu")


def test_the_table_has_medians_and_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all rounds and calls, but for a line whose writing was broken off."""
    rates = {"draftwing": (300.0, 100.0, 150.0), "SGLang": (50.0, 150.0)}
    lines = [
        {"case": "8b", "wave": "1 x 300, new", "engine": name, "rate": rate, "first_ms": 10 * rate}
        for name, some in rates.items()
        for rate in some
    ]
    lines += [
        {"case": "8b", "wave": "start", "engine": "SGLang", "seconds": 100.0},
        {"case": "27b", "wave": "2", "engine": "draftwing", "rate": 7.0, "accept_length": 2.5},
        {"case": "27b", "wave": "2", "engine": "SGLang", "failed": "RuntimeError"},
    ]
    (tmp_path / "figures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"case": "8b", "wa')
    beside.main(["--out", str(tmp_path), "--seconds", "0"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["case", "wave", "draftwing", "SGLang", "ratio"]
    assert rows[2] == ["8b", "1 x 300, new", "150, 1500 ms", "100, 1000 ms", "1.50"]
    assert rows[3] == ["27b", "2", "7, 2.5 a step", "", ""] and len(rows) == 4


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive  # stand-ins show the same; test_other_loads has a real server
@pytest.mark.slow
def test_two_servers_get_the_same_waves(words: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside.main(words("ours", "--peer-args", OURS, "--peer", "peer", real=True), [TINY])
    lines = lines_of(tmp_path)
    assert not [line for line in lines if "failed" in line]
    labels = [work.label for work in TINY.load.works(1000)]
    for engine in ("draftwing", "peer"):
        mine = [line for line in lines if line["engine"] == engine]
        assert [line["wave"] for line in mine] == ["start", *labels]
        assert all(line["rate"] > 0 for line in mine[1:])
    drafted = [line for line in lines if "accept_length" in line]
    assert all(1 < line["accept_length"] < 4 for line in drafted if line["engine"] == "draftwing")
    known = {line["wave"]: line["cached"] for line in lines if "cached" in line}
    assert all((cached > 0) == ("known" in wave) for wave, cached in known.items())
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in capsys.readouterr().out and table.count("\n") == 2 + 8
    assert gone(tmp_path)


@pytest.mark.slow
@pytest.mark.further(model=["tiny-pictures", "tiny-embedding"])
@pytest.mark.further(adapters=0, model="tiny")  # as with adapters
@pytest.mark.parametrize(("model", "load", "adapters", "count"), [
    ("tiny", cases.Contexts((60, 120), (1, 2), 256), 0, 4), ("tiny", PLAIN.load._replace(adapters=(0, 1, 2)), 2, 3),
    ("tiny-pictures", cases.Pictures(TINY_PICTURES, 3, 8, 2), 0, 4), ("tiny-embedding", cases.Vectors(20, 8, 4), 0, 2),
])  # fmt: skip
def test_other_loads(model: str, load: Any, adapters: int, count: int, words: Any, tmp_path: Path) -> None:
    case = Case("one", model, load, length=1024, rows=4, adapters=adapters)
    beside.main([*words("", "--rounds", "2", real=True), "--peer", "none"], [case])
    lines = lines_of(tmp_path)
    assert not [line for line in lines if "failed" in line]
    assert [line["wave"] for line in lines] == ["start", *[work.label for work in load.works(1000)] * 2]
    assert all(line["rate"] > 0 for line in lines[1:]) and len(lines) == 1 + 2 * count


@pytest.mark.parametrize(("mode", "wave", "said"), [
    ("dies", "start", "exit code 3.*CUDA out of memory"), ("never ready", "start", "did not answer"),
    ("hangs", "2 x 20, new", "did not answer"), ("dies later", "2 x 20, new", "exit code 9.*device-side assert"),
])  # fmt: skip
def test_a_peer_that_fails(mode: str, wave: str, said: str, words: Any, tmp_path: Path) -> None:
    """It is said how, and ours is measured all the same."""
    more = ["--start", "5"] if mode == "never ready" else ["--wave", "3"]
    beside.main(words(mode, *more), [PLAIN])
    ours, peer = ([line for line in lines_of(tmp_path) if line["engine"] == name] for name in ("draftwing", "SGLang"))
    assert [line["wave"] for line in ours] == ["start", "2 x 20, new"] and ours[1]["rate"] > 0
    assert peer[-1]["wave"] == wave
    assert re.search(said, peer[-1]["failed"], re.DOTALL)
    assert gone(tmp_path, 1.0)


def test_a_refused_wave_is_left_out_and_others_count(words: Any, tmp_path: Path) -> None:
    case = PLAIN._replace(load=Waves((Wave(2, 0.0),), ((20, 24), (40, 24)), (False,)))
    beside.main(words("refuses", "--rounds", "2"), [case])
    peer = [line for line in lines_of(tmp_path) if line["engine"] == "SGLang"]
    assert [line["wave"] for line in peer if "rate" in line] == ["2 x 20, new"] * 2
    (failed,) = (line for line in peer if "failed" in line)
    assert failed["wave"] == "2 x 40, new" and "too long for me" in failed["failed"]


def test_each_round_has_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no server is always asked first for a wave."""
    first: dict[tuple[str, int], str] = {}
    monkeypatch.setattr(
        beside, "ask", lambda run, case, server, work, number: first.setdefault((work.label, number), server.name) != ""
    )
    running = SimpleNamespace(poll=lambda: None)
    servers = {name: SimpleNamespace(name=name, process=running) for name in ("ours", "peer")}
    for case in (PLAIN, TINY, PLAIN._replace(load=Waves((Wave(2, 0.0),) * 3, ((20, 24),), (False,)))):
        first.clear()
        beside.measure(SimpleNamespace(args=SimpleNamespace(rounds=4)), case, servers)
        for label in {label for label, _ in first}:
            order = [first[label, number] for number in range(4)]
            assert order in (["ours", "peer"] * 2, ["peer", "ours"] * 2)


def test_models_are_dropped_after_their_last_case(words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []
    folder = tmp_path / "out" / "models" / "plain"
    monkeypatch.setitem(models.MODELS, "plain", models.Model(models.TINY_LLAMA))
    monkeypatch.setattr(beside, "made", lambda run, case, folder: folder.mkdir(exist_ok=True) or True)
    monkeypatch.setattr(beside, "measure", lambda *_: there.append(folder.exists()))
    some = [PLAIN._replace(name=name, model="plain") for name in "abc"]
    beside.main(words("refuses", "--drop-models", "--only", "a,b"), some)
    assert there == [True, True] and not folder.exists()


def test_time_that_is_up(words: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit is left out, in words, and the call ends in time."""
    began = time.monotonic()
    beside.main(words("hangs", "--seconds", "10"), [PLAIN, TINY])
    assert time.monotonic() - began < 25
    left = [line["case"] for line in lines_of(tmp_path) if "left out" in line.get("failed", "")]
    assert left == ["plain", "tiny"] and gone(tmp_path, 1.0)
    capsys.readouterr()
    beside.main(words("hangs", "--seconds", "0"), [PLAIN, TINY])
    assert capsys.readouterr().out == (tmp_path / "out" / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.further(number=signal.SIGKILL)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed(number: int, words: Any, tmp_path: Path) -> None:
    """Its figures stay, its servers do not."""
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'benchmarks')!r}, {str(ROOT / 'tests')!r}]; import beside, "
        f"beside_cases as c; load = c.Waves((c.Wave(2, 0.0),), ((20, 16), (20, 24)), (False,)); "
        f"beside.main(sys.argv[1:], [c.Case('plain', 'tiny', load, length=256, rows=4)])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *words("hangs", "--wave", "300")])
    until = time.monotonic() + 90
    while time.monotonic() < until and "rate" not in str(read(tmp_path)):
        time.sleep(0.2)
    time.sleep(1.0)
    process.send_signal(number)
    process.wait(15)
    assert gone(tmp_path, 15.0)
    for pid in (pid for pid in os.listdir("/proc") if pid.isdigit()):
        assert str(tmp_path / "out") not in command_of(pid), "a server is left"
    assert "rate" in str(lines_of(tmp_path))


def read(folder: Path) -> str:
    path = folder / "out" / "figures.jsonl"
    return path.read_text() if path.exists() else ""


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
