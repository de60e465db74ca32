"""How far back a draft head's own attention sees, by trial. A head that learnt from short texts says the wrong thing
behind long ones, as many published heads do (their configs name the target's positions, not those that they were
trained on); kept to its last tokens it goes on as before. What a head sees changes drafts alone, never the text.

Where first drafts in long texts are right less often than in short ones, the head is kept to `WINDOW` tokens for as
many drafts as were judged before, and for good where that is better."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from draftwing.config.options import Options
from draftwing.config.trees import carried_window
from draftwing.core import stretch_of
from draftwing.engine.executor import Executor
from draftwing.engine.head_fit import Expected, expected, is_made_up

log = logging.getLogger("draftwing")

LONG = 2048  # tokens of a text, in which what a head learnt from short ones is over: docs/dev/block_heads.md
WINDOW = 1024  # tokens: 512 accepted the same within 2% there, 2,048 up to 6% less; 1% less than all in short texts
ENOUGH = 400  # first drafts, of which a share has an error of 0.025
FALL = 0.85  # of the share in short texts, below which a window is tried
GAIN = 1.1  # times the share without, from which it is kept


class First(NamedTuple):
    """First drafts of steps: how many, and how many were right."""

    drafts: int
    right: int

    @property
    def share(self) -> float:
        return self.right / self.drafts

    def since(self, before: First) -> First:
        return First(self.drafts - before.drafts, self.right - before.right)


class DraftWindow:
    """Decides once, while nothing runs."""

    def __init__(
        self, usual: Expected, counts: Callable[[], Mapping[int, list[int]]], see: Callable[[int | None], bool]
    ) -> None:
        """usual: first drafts that should be right, for want of enough in short texts.  counts: [drafts, right] of
        first drafts by stretch of the text, since the start.  see: keeps the head to its last tokens from the next step
        on, None: to what it saw at the start; returns whether that could be done now."""
        self._usual, self._counts, self._see = usual, counts, see
        self._before = First(0, 0), First(0, 0)  # in short and in long texts, by heads of before
        self._whole: First | None = None  # in long texts, when the trial began
        self.window: int | None = None  # that the head is kept to
        self.done = False

    def judge_anew(self) -> None:
        """Forgets what was drafted, for the head is another one now. What was decided stays."""
        self._before, self._whole = self._sums(), None

    def rest(self) -> None:
        """Looks at what was drafted since the start, or by this head."""
        if self.done:
            return
        if self.window is not None and self._whole is None:  # the trial was of a head of before
            if not self._see(None):
                return
            self._before, self.window = self._sums(), None
        short, long = (now.since(before) for now, before in zip(self._sums(), self._before, strict=True))
        if self._whole is None:
            usual, says = self._usual.share, f"{self._usual.says} says"
            if short.drafts >= ENOUGH:
                usual, says = short.share, "in shorter texts"
            if long.drafts >= ENOUGH and long.share < FALL * usual and self._see(WINDOW):
                self._whole, self.window = long, WINDOW
                log.info(
                    "behind %d tokens %.0f%% of first drafts are right, %s %.0f%%: the draft's own attention sees the "
                    "last %d tokens from now on, to see whether that is better",
                    LONG, 100 * long.share, says, 100 * usual, WINDOW,
                )  # fmt: skip
            return
        whole = self._whole
        now = long.since(whole)
        if now.drafts < ENOUGH:
            return
        better = now.share >= GAIN * whole.share
        if not better and not self._see(None):
            return
        self.done, self.window = True, WINDOW if better else None
        log.info(
            "behind %d tokens %.0f%% of first drafts are right where the draft sees the last %d, %.0f%% where it sees "
            "all: %s (--speculative-draft-window-size %d)",
            LONG, 100 * now.share, WINDOW, 100 * whole.share, "this stays" if better else "it sees all again",
            WINDOW * better,
        )  # fmt: skip

    def _sums(self) -> tuple[First, First]:
        """Returns what was drafted in short and in long texts."""
        found = [[0, 0], [0, 0]]
        for stretch, (drafts, right) in self._counts().items():
            part = found[stretch >= stretch_of(LONG)]
            part[0] += drafts
            part[1] += right
        short, long = found
        return First(*short), First(*long)


def watch_window(
    options: Options, executor: Executor, folder: Path, counts: Callable[[], Mapping[int, list[int]]],
    see: Callable[[int | None], bool],
) -> DraftWindow | None:  # fmt: skip
    """Returns what decides for the head that an engine drafts with; None where how far it sees is said, or where it
    sees no further. Arguments as of `DraftWindow`. folder: the head's."""
    head, asked = executor.head, options.speculative_draft_window_size
    if head is None or not head.sees_beyond(WINDOW) or asked is not None or carried_window(folder) is not None:
        return None
    return None if is_made_up(options) else DraftWindow(expected(folder, head), counts, see)
