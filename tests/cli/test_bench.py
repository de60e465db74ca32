"""`draftwing bench`: what is compared with what, the table, the sweep's lines, and progress."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from draftwing.cli.bench import Progress, Remote, compare, footer, table
from draftwing.cli.client import Client
from draftwing.engine import benchmark
from draftwing.engine.benchmark import Ended, Sample, ignored


class Clock:
    """Stands in for the module time; it moves when it is asked to."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class StandIn:
    """Answers each prompt with ten tokens, the first 50 ms after it came and the others 10 ms apart, or 40 ms without
    drafts; it keeps what was asked of it."""

    def __init__(self, clock: Clock, drafter: str | None) -> None:
        self._clock, self._drafter = clock, drafter
        self.runs: list[tuple[int, bool]] = []  # prompts, and whether drafts were asked for

    def encode(self, prompt: str) -> list[int]:
        return [1]

    def run(
        self, prompts: Sequence[list[int]], params: dict[str, Any], concurrency: int, drafts: bool = True,
        ended: Ended = ignored,
    ) -> list[Sample]:  # fmt: skip
        self.runs.append((len(prompts), drafts))
        samples = []
        for prompt in prompts:
            sample = Sample(self._clock.now, prompt_tokens=len(prompt))
            sample.first = sample.start + 0.05
            self._clock.now = sample.end = sample.first + 9 * (0.01 if drafts else 0.04)
            sample.tokens = 10
            steps = 4 if drafts else 10
            sample.meta = {"spec_verify_ct": steps, "spec_num_correct_drafts": 10 - steps}
            samples.append(sample)
            ended(sample)
        return samples

    def drafter(self) -> str | None:
        return self._drafter

    def flush(self) -> None:
        pass

    def weight_bytes(self) -> dict[str, int]:
        return {}

    def min_step_seconds(self) -> float:
        return 0.0

    def stages(self) -> dict[str, float]:
        return {}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    return clock


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.mark.parametrize(("concurrency", "warmups"), [(1, 4), (8, 8)])
def test_both_sides_alternate_after_warm_up(clock: Clock, concurrency: int, warmups: int) -> None:
    target = StandIn(clock, "EAGLE3")
    record = compare(target, [[1]] * 3, {}, concurrency, Progress(io.StringIO()))
    assert target.runs == [(warmups, False), (3, False), (warmups, True), (3, True), (3, False), (3, True)]
    assert (record["rounds"], record["warmup_prompts"], record["drafter"]) == (2, warmups, "EAGLE3")
    # Warm-up prompts are in neither: 3 prompts of 0.14 s or 0.41 s in each of two rounds.
    assert record["requests"] == record["without_drafts"]["requests"] == 6
    assert record["seconds"] == pytest.approx(6 * 0.14)
    assert record["speedup"] == pytest.approx(0.41 / 0.14)


def test_the_table_has_both_sides_and_their_ratio(clock: Clock) -> None:
    record = compare(StandIn(clock, "EAGLE3"), [[1]] * 3, {}, 2, Progress(io.StringIO()))
    lines = table(record)
    assert [cells(line) for line in lines] == [
        ["2 requests at once", "EAGLE3", "without drafts", "speedup"], ["output tokens/s", "71.43", "24.39", "2.93x"],
        ["requests/s", "7.14", "2.44", "2.93x"], ["time to first token, median, ms", "50.00", "50.00", "1.00x"],
        ["time to first token, p99, ms", "50.00", "50.00", "1.00x"],
        ["time per output token, median, ms", "10.00", "40.00", "4.00x"],
        ["time per output token, p99, ms", "10.00", "40.00", "4.00x"], ["acceptance length", "2.50", "1.00"], [],
    ]  # fmt: skip
    assert len({len(line) for line in lines[:-2]}) == 1, "columns end alike"


def test_without_a_drafter_there_is_one_round_and_one_column(clock: Clock) -> None:
    target = StandIn(clock, None)
    record = compare(target, [[1]] * 3, {}, 1, Progress(io.StringIO()))
    assert target.runs == [(4, True), (3, True)] and "without_drafts" not in record
    assert {len(cells(line)) for line in table(record)[:-1]} == {2}
    once = ["time per output token, median, ms"]
    assert once in [cells(line) for line in table(record | {"tbt_ms": {}})], "answers of one token have none"
    assert len(footer([record], remote=False).splitlines()) == 2, "it says that a column is missing"
    compared = compare(StandIn(clock, "NGRAM"), [[1]] * 3, {}, 8, Progress(io.StringIO()))
    assert len(footer([compared], remote=False).splitlines()) == 1


@pytest.mark.parametrize(
    ("info", "drafter"),
    [
        ({"speculative_algorithm": "EAGLE3", "speculative": {"explain": None}}, "EAGLE3"),
        ({"speculative_algorithm": "none", "speculative": {"explain": None}}, None),
        ({"speculative_algorithm": "EAGLE3"}, None),  # another engine's server: its requests have no such field
    ],
)
def test_a_server_is_asked_for_no_drafts_where_it_can_be(
    info: dict[str, Any], drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[dict[str, Any]] = []

    def stream(self: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        bodies.append(body)
        return [{"meta_info": {"completion_tokens": 2}}]

    monkeypatch.setattr(Client, "get", lambda self, path: info)
    monkeypatch.setattr(Client, "stream", stream)
    target = Remote(Client("http://127.0.0.1:1"))
    assert target.drafter() == drafter
    target.run([[1, 2]], {"temperature": 0}, 1)
    target.run([[1, 2]], {"temperature": 0}, 1, drafts=False)
    plain = {"input_ids": [1, 2], "sampling_params": {"temperature": 0}}
    assert bodies == [plain, {**plain, "speculative": "off"}]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_changes_and_goes() -> None:
    file = Terminal()
    with pytest.raises(KeyboardInterrupt), Progress(file) as progress:
        progress.show("1 of 2")
        progress.show("2 of 2")
        raise KeyboardInterrupt
    assert "\n" not in file.getvalue() and [text.removeprefix("\x1b[K") for text in file.getvalue().split("\r")] == [
        "", "1 of 2", "2 of 2", "",
    ]  # fmt: skip


def test_without_a_terminal_there_is_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = Clock(), io.StringIO()
    monkeypatch.setattr("draftwing.cli.bench.time", clock)
    progress = Progress(file)
    for second in range(25):
        clock.now = 100.0 + second
        progress.show(f"{second} s")
    progress.clear()
    assert file.getvalue() == "10 s\n20 s\n"
