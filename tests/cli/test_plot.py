"""`draftwing bench --plot`: what the picture says is what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing.cli.main import main
from draftwing.cli.plot import WIDTH, plot

SVG = "{http://www.w3.org/2000/svg}"


def record(concurrency: int, throughput: float, by_depth: list[float], **more: Any) -> dict[str, Any]:
    spread = {"mean": 3.0, "p50": 2.5, "p99": 41.0}
    return {
        "concurrency": concurrency, "throughput": throughput, "ttft_ms": spread, "tbt_ms": spread,
        "accept_by_depth": by_depth, **more,
    }  # fmt: skip


def swept() -> list[dict[str, Any]]:
    """No drafts, a chain, two trees, and the engine's own choice, at 1 and 16 requests."""
    rates = {(0, 1, 1): (100, 900), (3, 1, 4): (130, 950), (5, 2, 8): (155, 720), (5, 4, 16): (148, 610)}
    found = []
    for (steps, topk, nodes), both in rates.items():
        for size, rate in zip((1, 16), both, strict=True):
            shape = {"batch_size": size, "steps": steps, "topk": topk, "num_draft_tokens": nodes, "fixed": True}
            found.append(record(size, rate, [0.7, 0.4, 0.2][:steps], **shape))
    chosen = {"steps": 5, "topk": 4, "num_draft_tokens": 16, "fixed": False}
    return [*found, *(record(size, rate, [0.7], batch_size=size, **chosen) for size, rate in ((1, 152), (16, 948)))]


def drawn(text: str) -> tuple[list[ElementTree.Element], list[str]]:
    """Rectangles, and texts. Everything has to lie on the page."""
    root = ElementTree.fromstring(text)
    height = float(root.attrib["viewBox"].split()[3])
    shapes, words = root.findall(f".//{SVG}rect"), root.findall(f".//{SVG}text")
    for one in shapes:
        box = [float(one.attrib.get(name, 0)) for name in ("x", "y", "width", "height")]
        assert min(box) >= 0 and box[0] + box[2] <= WIDTH and box[1] + box[3] <= height + 0.1
    assert all(0 <= float(one.attrib["x"]) <= WIDTH and 0 < float(one.attrib["y"]) < height for one in words)
    return shapes, [one.text or "" for one in words]


def test_bars_have_the_height_of_what_was_measured() -> None:
    shapes, words = drawn(plot([record(1, 200, [0.8, 0.5]), record(8, 800, [0.6])], "a <title>"))
    assert words[0] == "a <title>" and {"200", "800", "80", "50", "60", "1 request", "8 requests", "p99"} <= set(words)
    bars = [one for one in shapes if one.attrib["fill"] == "#2f6fde" and one.attrib["rx"] == "2"]
    first, second, *_ = (float(one.attrib["height"]) for one in bars if one.attrib["width"] != "9.0")
    assert second == pytest.approx(4 * first, rel=0.01)


def test_a_sweep_has_a_map_for_each_batch_size() -> None:
    shapes, words = drawn(plot(swept(), "sweep"))
    assert [word for word in words if word.startswith("Throughput against no drafts")] == [
        "Throughput against no drafts, 1 request at once", "Throughput against no drafts, 16 requests at once",
    ]  # fmt: skip
    assert {"1.30x", "1.55x", "1.48x", "1.06x", "0.80x", "0.68x", "chain", "top 2, 8", "depth 5"} <= set(words)
    assert {"no drafts", "best fixed tree", "chosen by the engine"} <= set(words)
    assert len([one for one in shapes if one.attrib.get("stroke-width") == "2"]) == 2, "the best of each has a frame"
    assert {"155", "152", "948", "950"} <= set(words)


@pytest.mark.slow
def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, picture = write_checkpoint(tmp_path / "tiny"), tmp_path / "out.svg"
    argv = ["bench", "--model", str(model), "--speculative-algorithm", "NGRAM", "--max-total-tokens", "4000", "--json"]
    argv += ["--num-prompts", "2", "--max-tokens", "12", "--ignore-eos", "--concurrency", "1,2", "--plot", str(picture)]
    assert main(argv) == 0
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    _, words = drawn(picture.read_text(encoding="utf8"))
    assert f"draftwing bench: {model}" in words and {"1 request", "2 requests"} <= set(words)
    assert all(0 <= share <= 1 for share in (*one["accept_by_depth"], *two["accept_by_depth"]))


@pytest.mark.parametrize("path", ["out.png", "/no/such/folder/out.svg"])
def test_where_it_cannot_be_written(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", "--plot", path]) == 2
    assert "--plot writes an .svg file" in capsys.readouterr().err
