"""`draftwing bench --plot`: the records of a run as one picture, an SVG that needs nothing else.

Without a sweep there are throughput, accepted drafts by depth, and latency at each concurrency. A sweep has a heat map
for each batch size besides: throughput of every tree against no drafts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftwing.sched.explain import number_of

Record = Mapping[str, Any]
Series = tuple[str, Sequence[float | None]]  # a name, and a value for each group

WIDTH, MARGIN, GAP, CARD, HEAD = 980, 24, 20, 236, 62
COLOURS = ("#2f6fde", "#b86a00", "#8446cf", "#1d7a46", "#b3261e", "#6f757d")
INK, SOFT, LINE = "#1e2125", "#62676e", "#e2dfd8"
CELL, LABEL = 30, 66  # height of a heat map's row, width of its names


class Box(NamedTuple):
    """The place of a chart: its corner and size."""

    x: float
    y: float
    width: float
    height: float


def plot(records: Sequence[Record], title: str) -> str:
    """Returns the picture of all records of a run, as `engine.benchmark.record_of` and `sweep` give them.

    title: what was measured.
    """
    swept = any("batch_size" in record for record in records)
    groups, series = _swept(records) if swept else _run(records)
    maps = _heat_maps(records) if swept else []
    parts: list[str] = []
    half = (WIDTH - 2 * MARGIN - GAP) / 2
    places = [Box(MARGIN + (half + GAP) * (i % 2), HEAD + (CARD + GAP) * (i // 2), half, CARD) for i in range(4)]
    for box, chart in zip(places, _charts(groups, series), strict=True):
        parts += bars(box, *chart)
    y = HEAD + 2 * (CARD + GAP)
    for name, rows, columns, values in maps:
        height = 52 + CELL * len(rows) + 22
        parts += heat_map(Box(MARGIN, y, WIDTH - 2 * MARGIN, height), name, rows, columns, values)
        y += height + GAP
    return _page(parts, y, title)


# -- what is drawn -----------------------------------------------------------------------------------------------------


def _run(records: Sequence[Record]) -> tuple[list[str], list[tuple[str, list[Record]]]]:
    """Returns names of the groups, and the records of each series in their order."""
    return [number_of(record["concurrency"]) for record in records], [("", list(records))]


def _swept(records: Sequence[Record]) -> tuple[list[str], list[tuple[str, list[Record]]]]:
    """Splits a sweep: no drafts, the best fixed tree of each batch size, and what the engine chose by itself."""
    sizes = list(dict.fromkeys(record["batch_size"] for record in records))
    found: dict[str, list[Record]] = {"no drafts": [], "best fixed tree": [], "chosen by the engine": []}
    for size in sizes:
        there = [record for record in records if record["batch_size"] == size]
        kinds = {
            "no drafts": [record for record in there if record["steps"] == 0],
            "best fixed tree": [record for record in there if record["fixed"] and record["steps"] > 0],
            "chosen by the engine": [record for record in there if not record["fixed"]],
        }
        for name, some in kinds.items():
            if some:
                found[name].append(max(some, key=lambda record: record["throughput"]))
    complete = [(name, kept) for name, kept in found.items() if len(kept) == len(sizes)]
    return list(map(number_of, sizes)), complete


def _charts(groups: list[str], series: Sequence[tuple[str, list[Record]]]) -> list[tuple[str, list[str], list[Series]]]:
    """Title, groups and series of the four charts."""
    drafting = [(name, some) for name, some in series if any(record["accept_by_depth"] for record in some)]
    name, some = drafting[-1] if drafting else ("", [])
    deepest = max((len(record["accept_by_depth"]) for record in some), default=0)
    by_depth: list[Series] = [
        (group, [_percent(record["accept_by_depth"], depth) for depth in range(deepest)])
        for group, record in zip(groups, some, strict=bool(some))
    ]
    accepted = "Accepted to each depth, % of steps" + (f" ({name})" if name else "")
    quantiles = ("p50", "p99") if len(series) == 1 else ("p50",)
    median = "" if len(series) == 1 else ", median"
    return [
        ("Throughput, tokens/s", groups, [(one, [record["throughput"] for record in kept]) for one, kept in series]),
        (accepted, [str(depth + 1) for depth in range(deepest)], by_depth),
        (f"Time to the first token{median}, ms", groups, _latency(series, "ttft_ms", quantiles)),
        (f"Time between tokens{median}, ms", groups, _latency(series, "tbt_ms", quantiles)),
    ]


def _percent(shares: Sequence[float], depth: int) -> float | None:
    return 100 * shares[depth] if depth < len(shares) else None


def _latency(series: Sequence[tuple[str, list[Record]]], what: str, quantiles: Sequence[str]) -> list[Series]:
    return [
        (name or quantile, [record[what].get(quantile) for record in some])
        for name, some in series
        for quantile in quantiles
    ]


Map = tuple[str, list[str], list[str], dict[tuple[int, int], float]]


def _heat_maps(records: Sequence[Record]) -> list[Map]:
    """Maps, for each batch size, throughput of fixed trees over that of no drafts, by depth, breadth and size."""
    maps: list[Map] = []
    for size in dict.fromkeys(record["batch_size"] for record in records):
        there = [record for record in records if record["batch_size"] == size and record["fixed"]]
        plain = next((record["throughput"] for record in there if record["steps"] == 0), None)
        trees = [record for record in there if record["steps"] > 0]
        if plain is None or not trees:
            continue
        rows = sorted({record["steps"] for record in trees})
        # A chain's size follows from its depth, so all chains are one column.
        columns = sorted({_breadth(record) for record in trees})
        values = {
            (rows.index(record["steps"]), columns.index(_breadth(record))): record["throughput"] / plain
            for record in trees
        }
        names = ["chain" if topk == 1 else f"top {topk}, {nodes}" for topk, nodes in columns]
        title = f"Throughput against no drafts, {number_of(size)} at once"
        maps.append((title, [f"depth {depth}" for depth in rows], names, values))
    return maps


def _breadth(record: Record) -> tuple[int, int]:
    return (1, 0) if record["topk"] == 1 else (record["topk"], record["num_draft_tokens"])


# -- how it is drawn ---------------------------------------------------------------------------------------------------


def bars(box: Box, title: str, groups: Sequence[str], series: Sequence[Series]) -> list[str]:
    """Bars from 0 up, side by side in each group; None is left out."""
    parts = [_card(box), _text(box.x + 16, box.y + 26, title, weight=600), _legend(box, series)]
    known = [value for _, values in series for value in values if value is not None]
    if not known:
        return [*parts, _text(box.x + box.width / 2, box.y + box.height / 2, "nothing", SOFT, anchor="middle")]
    left, right, top, bottom = box.x + 58, box.x + box.width - 16, box.y + 62, box.y + box.height - 32
    highest, ticks = _scale(1.06 * max(known))  # there is room for a number above it
    for tick in ticks:
        y = bottom - (bottom - top) * tick / highest
        parts.append(f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(_text(left - 8, y + 4, f"{tick:,g}", SOFT, 11, "end"))
    room = (right - left) / len(groups)
    width = min(room * 0.76 / len(series), 54)
    for g, group in enumerate(groups):
        middle = left + room * (g + 0.5)
        parts.append(_text(middle, bottom + 18, group, SOFT, 11, "middle"))
        for n, (_, values) in enumerate(series):
            if values[g] is not None:
                parts += _bar(middle + width * (n - len(series) / 2), bottom, width, values[g], highest, top, n)
    return parts


def _bar(x: float, bottom: float, width: float, value: float | None, highest: float, top: float, n: int) -> list[str]:
    assert value is not None
    height = (bottom - top) * value / highest
    shape = _rect(x + 1, bottom - height, width - 2, height, COLOURS[n % len(COLOURS)], 'rx="2"')
    return [shape, _text(x + width / 2, bottom - height - 5, _short(value), INK, 11 if width > 24 else 9, "middle")]


def heat_map(
    box: Box, title: str, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[int, int], float]
) -> list[str]:
    """Returns a table of factors by (row, column), blue above 1 and orange below; the best has a frame."""
    parts = [_card(box), _text(box.x + 16, box.y + 26, title, weight=600)]
    left, top = box.x + 16 + LABEL, box.y + 46
    width = min((box.width - LABEL - 32) / len(columns), 92)
    largest = max((abs(math.log(value)) for value in values.values()), default=0.0) or 1.0
    best = max(values, key=lambda place: values[place])
    for r, row in enumerate(rows):
        parts.append(_text(left - 10, top + CELL * r + 19, row, SOFT, 11, "end"))
    for c, column in enumerate(columns):
        parts.append(_text(left + width * (c + 0.5), top + CELL * len(rows) + 16, column, SOFT, 11, "middle"))
    for (r, c), value in values.items():
        share = abs(math.log(value)) / largest
        colour = COLOURS[0] if value >= 1 else COLOURS[1]
        frame = f'stroke="{INK}" stroke-width="2"' if (r, c) == best else ""
        x, y = left + width * c, top + CELL * r
        more = f'rx="4" fill-opacity="{0.06 + 0.8 * share:.2f}" {frame}'
        parts.append(_rect(x + 1.5, y + 1.5, width - 3, CELL - 3, colour, more))
        parts.append(_text(x + width / 2, y + 19, f"{value:.2f}x", INK, 12, "middle", 600 if (r, c) == best else 400))
    return parts


def _page(parts: Sequence[str], height: float, title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif" font-size="13">'
    )
    ground = _rect(0, 0, WIDTH, height, "#f7f6f3")
    return "\n".join([head, ground, _text(MARGIN, 40, title, size=18, weight=600), *parts, "</svg>"]) + "\n"


def _card(box: Box) -> str:
    return _rect(*box, "#ffffff", f'rx="12" stroke="{LINE}"')


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" {more}/>'


def _legend(box: Box, series: Sequence[Series]) -> str:
    parts, x = [], box.x + 16
    for n, (name, _) in enumerate(series):
        if name:
            parts.append(_rect(x, box.y + 35, 9, 9, COLOURS[n % len(COLOURS)], 'rx="2"'))
            parts.append(_text(x + 14, box.y + 43, name, SOFT, 11))
            x += 24 + 6.2 * len(name)
    return "\n".join(parts)


def _text(
    x: float, y: float, words: str, fill: str = INK, size: int = 13, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{html.escape(words)}</text>'
    )


def _scale(value: float) -> tuple[float, list[float]]:
    """Returns the end of an axis that reaches `value`, and its ticks: at most six, of 1, 2 or 5 times a power of
    ten."""
    if value <= 0:
        return 1.0, [0.0, 1.0]
    power = 10 ** math.floor(math.log10(value / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if value / (factor * power) <= 5)
    count = math.ceil(value / step - 1e-9)
    return step * count, [step * i for i in range(count + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
