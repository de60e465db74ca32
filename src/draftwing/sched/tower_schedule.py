"""Who waits for a tower to read an image, and when the tower goes on: in pieces, between the steps of others, where it
takes longer than a part of a prompt may. A piece stands where such a part would, so gaps are no longer for it; where
prompts of others wait, too, pieces and their parts take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from draftwing.core import Chunk
from draftwing.requests.images import RequestImage
from draftwing.sched.policy.prefill_budget import PrefillBudget
from draftwing.sched.req import Req, ReqState


class TowerPiece(NamedTuple):
    """A piece of a tower's work on an image. salt: of the request.  tokens: of a prompt, in whose time it is done.
    seconds: after which it ends in any case; a host that only launches work sees less."""

    image: RequestImage
    salt: int
    tokens: int
    seconds: float


class TowerSchedule:
    """next: what the tower does before the step just planned, if anything.  unseen: is asked, of images of a request
    with a salt, for the first one from a position of the prompt on that is not read yet, and takes longer than so many
    tokens."""

    def __init__(self, prefills: PrefillBudget, most: int, lookahead: int = 0) -> None:
        """most: tokens of a piece, where it is not known how long they take.  lookahead: tokens before an image with
        which a draft head reads it."""
        self.unseen: Callable[[Sequence[RequestImage], int, int, int], RequestImage | None] = lambda *asked: None
        self.next: TowerPiece | None = None
        self._prefills, self._most, self._lookahead = prefills, most, lookahead
        self._unseen: dict[Req, RequestImage] = {}

    def plan(self, running: Sequence[Req], steps: bool, prefilled: Sequence[Chunk]) -> bool:
        """Chooses what is `next`. steps: whether somebody takes part in a step now.  prefilled: right before it.
        Returns whether parts of prompts wait for the next step, since there is a piece."""
        had_piece, self.next = self.next is not None, None
        prompts = [req for req in running if req.state is ReqState.PREFILL]
        self._unseen.clear()
        if not any(req.request.images for req in prompts):
            return False
        each, decoding = self._prefills.token_seconds(0), len(prompts) < len(running)
        seconds = self._prefills.pause(decoding)
        tokens = min(int(seconds / each), self._most) if each else self._most
        for req in prompts:
            image = self.unseen(req.request.images, req.salt, req.sent, tokens)
            if image is not None:
                self._unseen[req] = image
        come = [req for req in self._unseen if not self.room(req)]
        if not come or (steps and (prefilled or (had_piece and len(come) < len(prompts)))):
            return False
        first = min(come, key=lambda req: req.rank)
        self.next = TowerPiece(self._unseen[first], first.salt, tokens, seconds)
        return steps

    def room(self, req: Req) -> int:
        """Returns how many tokens of a prompt may be prefilled now."""
        image = self._unseen.get(req)
        return req.unsent if image is None else max(image.start - self._lookahead - req.sent, 0)
