"""A thinking budget, read token by token."""

from __future__ import annotations

from draftwing.requests.request import ThinkingBudget


def machine(answer: list[int], budget: ThinkingBudget) -> int:
    """What must follow the answer; -1 for what the model likes."""
    inside, since, used = budget.open, 0, 0
    for i in range(len(answer)):
        so_far = answer[: i + 1]
        used, since = used + inside, since + 1
        size = len(budget.begin)
        if budget.begin and tuple(so_far[-size:]) == budget.begin and (budget.again or i + 1 - size <= 1):
            inside, since = True, 0
        elif inside and since >= len(budget.end) and tuple(so_far[-len(budget.end) :]) == budget.end:
            inside = False
    if not inside or used < budget.tokens:
        return -1
    said = max(
        count
        for count in range(len(budget.end))
        if count <= since and tuple(answer[len(answer) - count :]) == budget.end[:count]
    )
    return budget.end[said]
