"""How many log probabilities requests may ask for, and all responses together may hold."""

from __future__ import annotations

from collections.abc import Sequence

from draftwing.core import Output
from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest
from draftwing.server.waiting import QueueFull

MOST_ENTRIES = 2**21  # of a request; each takes some 255 bytes until its response is sent
ALL_ENTRIES = 2**22
FEW_ENTRIES = 2**14  # that a request may hold however many there are: who asks for the rest keeps nobody from asking


class EntriesFull(QueueFull):
    """Responses hold too many log probabilities (HTTP 503)."""

    def __init__(self) -> None:
        full = f"the responses to all requests hold {ALL_ENTRIES} log probabilities, the most they may"
        super().__init__(full, own=False, when="later")


def fit_entries(requests: Sequence[GenerationRequest], chosen: bool, context: int) -> list[GenerationRequest]:
    """Requests that came together, with lengths that they do not ask for cut to what their log probabilities leave.
    Raises RequestError where they ask for too many.

    chosen: whether lengths are the client's, those of None apart.  context: tokens of a prompt and its answer.
    """
    weights = [request.params.n * _width(request) for request in requests]
    if not any(weights):
        return list(requests)
    prompts = sum(weight * _told(request) for weight, request in zip(weights, requests, strict=True))
    room = max((MOST_ENTRIES - prompts) // sum(weights), 1)
    found, total = [], prompts
    for weight, request in zip(weights, requests, strict=True):
        params = request.params
        length = context - len(request.prompt_ids) if params.max_new_tokens is None else params.max_new_tokens
        if weight and length > room and (not chosen or params.max_new_tokens is None):
            length = room
            request = request._replace(params=params.replace(max_new_tokens=room))
        found.append(request)
        total += weight * length
    if total > MOST_ENTRIES:
        raise RequestError(
            f"top_logprobs_num: a response holds at most {MOST_ENTRIES} log probabilities, those of its prompts and of "
            f"further tokens at each position included; this one may have {total}: ask for less of them, or for fewer "
            "or shorter answers",
            "top_logprobs_num",
        )
    return found


class Entries:
    """Log probabilities that the responses in the making hold."""

    def __init__(self) -> None:
        self.held = 0

    def add(self, count: int, own: int) -> None:
        """Of a response that has `own` with them. Raises EntriesFull where they are too many."""
        self.held += count
        if self.held > ALL_ENTRIES and own > FEW_ENTRIES:
            raise EntriesFull


def entries(output: Output, request: GenerationRequest) -> int:
    """How many come with news of a request."""
    return _width(request) * (len(output.logprobs) + len(output.prompt_logprobs))


def _width(request: GenerationRequest) -> int:
    """Log probabilities at a position."""
    wanted = request.logprobs
    return 0 if wanted is None else 1 + wanted.top + len(wanted.token_ids)


def _told(request: GenerationRequest) -> int:
    """Positions of the prompt that are."""
    wanted = request.logprobs
    return 0 if wanted is None or wanted.start < 0 else max(len(request.prompt_ids) - wanted.start, 0)
