"""Panels of lines over a common axis, as SVG. No dependency: a page shows the file as it is."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 900, 130, 70, 150, 20, 34
COLOURS = ("#1f6fb4", "#c4501b", "#2a8a4a", "#7a4ea3", "#7d7d7d")


class Line(NamedTuple):
    label: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


class Panel(NamedTuple):
    """One plot; `ticks` are (value, text) of its own axis, the highest last."""

    title: str
    lines: Sequence[Line]
    ticks: Sequence[tuple[float, str]]


def render(panels: Sequence[Panel], end: float, marks: Sequence[tuple[float, str]], axis: str) -> str:
    """The picture. end: of the common axis, which begins at 0.  marks: vertical lines, with texts that stand above."""
    height = TOP + len(panels) * (HEIGHT + GAP) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]

    def across(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / end

    for at, text in marks:
        x = across(at)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - 34}" stroke="#ccc"/>')
        parts.append(f'<text x="{x + 3:.1f}" y="{TOP - 6}" fill="#555">{html.escape(text)}</text>')
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (HEIGHT + GAP), across)
    parts.append(f'<text x="{(WIDTH - RIGHT) / 2:.0f}" y="{height - 8}" fill="#555">{html.escape(axis)}</text></svg>')
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, top: float, across: object) -> list[str]:
    assert callable(across)
    highest = panel.ticks[-1][0] or 1.0

    def up(value: float) -> float:
        return top + 14 + (HEIGHT - 14) * (1 - min(value, highest) / highest)

    parts = [f'<text x="{LEFT}" y="{top + 10}" font-weight="bold">{html.escape(panel.title)}</text>']
    for value, text in panel.ticks:
        y = up(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{html.escape(text)}</text>')
    for number, line in enumerate(panel.lines):
        colour, places = COLOURS[number % len(COLOURS)], [(across(x), up(y)) for x, y in line.points]
        if line.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="{colour}"/>' for x, y in places]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        y = top + 26 + 16 * number
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y}" fill="{colour}">{html.escape(line.label)}</text>')
    return parts
