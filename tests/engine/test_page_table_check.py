"""Other slots on the device than in the scheduler's copy are found. That equal ones pass every `Rig.run` shows."""

from __future__ import annotations

from typing import Any

import pytest

from draftwing.core import PLAIN, TreeShape
from draftwing.engine.page_table_check import PageTableCheck
from draftwing.errors import DraftwingError


def loaded(h: Any, **how: Any) -> Any:
    """A rig with three requests."""
    rig = h.Rig(h.tiny_model(), **how)
    for i in range(3):
        rig.submit(str(i), [i + 1, 5, 6, 5, 6, 5], h.greedy(40))
    return rig


@pytest.mark.parametrize("harness", ["cpu"], indirect=True, scope="session")
@pytest.mark.parametrize("shape", [PLAIN, TreeShape(4, 3, 11)])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_row_that_was_permuted_otherwise_is_found(harness: Any, shape: TreeShape, lag: int) -> None:
    rig = loaded(harness, shapes=(shape,), drafter=None if shape == PLAIN else "ngram", lag=lag)

    def swap(turn: int) -> None:
        if turn == 12:
            row = min(rig.sched.kv.by_row)
            rig.slots.page_table[row, [2, 3]] = rig.slots.page_table[row, [3, 2]]

    with pytest.raises(DraftwingError, match=r"expected slot .* at position 2"):
        rig.run(between=swap)


@pytest.mark.parametrize("harness", ["cpu"], indirect=True, scope="session")
def test_rows_take_turns_and_most_steps_copy_nothing(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = loaded(harness, lag=1)
    rig.page_table_check = PageTableCheck(rig.sched, rig.slots, every=5)
    copied: list[str] = []
    compare = PageTableCheck._compare
    monkeypatch.setattr(PageTableCheck, "_compare", lambda self, copy: copied.append(copy.uid) or compare(self, copy))
    rig.run()
    assert {"0", "1", "2"} == set(copied) and 5 < len(copied) < 12
