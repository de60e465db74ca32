"""How many log probabilities requests may ask for, and the responses of a key and of all may hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from draftwing.core import Output
from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest
from draftwing.server.admission_quota import QueueFull

# Each takes 12 bytes until its response is made, and its position 115, or up to 410 with other tokens than its own: of
# all that may be held the most is 0.7 GB (of the token's own and the best), and a quarter more with `LEEWAY`.
MAX_REQUEST_LOGPROBS = 2**21  # of a request
MAX_HELD_LOGPROBS = 2**22
SHARE = 2  # a key has a part of that: the most of one request
FREE_LOGPROBS = 2**14  # that a key may hold however many there are: who asks for the rest keeps nobody from asking
# A response with no more than those may go beyond a sum by a part of it: what fills the sum is a large one, and that is
# the one to fail, not whichever has the next token.
LEEWAY = 4


class LogprobQuotaFull(QueueFull):
    """Responses hold too many log probabilities (HTTP 429 where they are the client's own, else 503)."""

    def __init__(self, own: bool) -> None:
        whose, limit = ("of this key", MAX_HELD_LOGPROBS // SHARE) if own else ("to all requests", MAX_HELD_LOGPROBS)
        full = f"the responses {whose} hold {limit} log probabilities, the most they may"
        super().__init__(full, own=own, when="later")


def fit_logprobs(requests: Sequence[GenerationRequest], chosen: bool, context: int) -> list[GenerationRequest]:
    """Returns requests that came together, with lengths that they do not ask for cut to what their log probabilities
    leave. Raises RequestError where they ask for too many.

    chosen: whether lengths are the client's, those of None apart.  context: tokens of a prompt and its answer.
    """
    weights = [request.params.n * _width(request) for request in requests]
    if not any(weights):
        return list(requests)
    prompts = sum(weight * _prompt_positions(request) for weight, request in zip(weights, requests, strict=True))
    room = max((MAX_REQUEST_LOGPROBS - prompts) // sum(weights), 1)
    found, total = [], prompts
    for weight, request in zip(weights, requests, strict=True):
        params = request.params
        length = context - len(request.prompt_ids) if params.max_new_tokens is None else params.max_new_tokens
        if weight and length > room and (not chosen or params.max_new_tokens is None):
            length = room
            request = request._replace(params=params.replace(max_new_tokens=room))
        found.append(request)
        total += weight * length
    if total > MAX_REQUEST_LOGPROBS:
        states = any(request.logprobs.hidden for request in requests if request.logprobs is not None)
        name = "return_hidden_states" if states else "top_logprobs_num"
        kinds = "log probabilities, or three times as many numbers of hidden states" if states else "log probabilities"
        raise RequestError(
            f"{name}: a response holds at most {MAX_REQUEST_LOGPROBS} {kinds}, those of its "
            f"prompts and of further tokens at each position included; this one may have {total}: ask for less of "
            "them, or for fewer or shorter answers",
            name,
        )
    return found


class LogprobQuota:
    """Log probabilities that responses hold until they are sent, by client. Without keys all are one client, ""."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.held = 0

    def add(self, client: str, count: int, response: int) -> None:
        """Counts them in any case. Raises LogprobQuotaFull where they are too many. response: all that it holds now."""
        self.held += count
        self.of[client] += count
        self.check(client, response)

    def give_back(self, client: str, count: int) -> None:
        self.held -= count
        self.of[client] -= count
        if not self.of[client]:
            del self.of[client]

    def check(self, client: str, response: int, more: int = 0) -> None:
        """Raises LogprobQuotaFull where a client may hold no more than it does.

        response: what the one that asks holds, with `more`.  more: that it asks for, at least; they are not held yet.
        """
        own = self.of[client] + more
        room = MAX_HELD_LOGPROBS + (MAX_HELD_LOGPROBS // LEEWAY if response <= FREE_LOGPROBS else 0)
        # Shares are between keys: without one there is nobody to keep the rest for.
        if client and own > room // SHARE:
            raise LogprobQuotaFull(own=True)
        if self.held + more > room and (not client or own > FREE_LOGPROBS):
            raise LogprobQuotaFull(own=False)


def count_logprobs(output: Output, request: GenerationRequest) -> int:
    """Counts the log probabilities that come with an output of a request."""
    return _width(request) * (len(output.logprobs) + len(output.prompt_logprobs))


def first_logprobs(requests: Sequence[GenerationRequest]) -> int:
    """Counts the log probabilities that come with the first tokens of requests."""
    return sum(_width(request) * (1 + _prompt_positions(request)) for request in requests)


def _width(request: GenerationRequest) -> int:
    """Counts the log probabilities of one position; three numbers of a hidden state take the memory of one."""
    wanted = request.logprobs
    return 0 if wanted is None else wanted.width - wanted.hidden + (wanted.hidden + 2) // 3


def _prompt_positions(request: GenerationRequest) -> int:
    """Counts the positions of a prompt that have log probabilities."""
    wanted = request.logprobs
    return 0 if wanted is None or wanted.start < 0 else max(len(request.prompt_ids) - wanted.start, 0)
