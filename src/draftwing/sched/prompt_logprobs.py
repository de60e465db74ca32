"""Log probabilities of prompts, computed once for the answers that want the same of the same prompt."""

from __future__ import annotations

from collections.abc import Iterable

from draftwing.sched.req import Req


class PromptLogprobCache:
    """Keeps those of the requests that run, and of the newest one reported, which may have ended with its first token
    while others wait."""

    def __init__(self) -> None:
        self._newest: Req | None = None

    def add(self, req: Req) -> None:
        """Adds a request whose prompt has been run."""
        if _wants(req):
            self._newest = req

    def clear(self) -> None:
        """Forgets all, as nobody waits."""
        self._newest = None

    def share(self, req: Req, running: Iterable[Req]) -> None:
        """Gives what is known of the prompt to a request that is about to get a row, whose KV may then be cached,
        too."""
        if req.next_prompt_logprob is None:
            return
        known = [*running] if self._newest is None else [self._newest, *running]
        for other in known:
            if _wants(other) and other.next_prompt_logprob is None and _alike(req, other):
                req.prompt_logprobs = other.prompt_logprobs  # one list: nobody changes it any more
                return


def _wants(req: Req) -> bool:
    wanted = req.request.logprobs
    return wanted is not None and wanted.start >= 0


def _alike(one: Req, other: Req) -> bool:
    same = one.salt == other.salt and one.request.logprobs == other.request.logprobs
    return same and one.request.prompt_ids == other.request.prompt_ids
