"""How many answers may wait for their first token, and how many log probabilities responses may hold: of one client,
and of all. How much receipts of one request may hold."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from draftwing.core import Output
from draftwing.errors import DraftwingError, RequestError
from draftwing.requests.request import GenerationRequest

RETRY_SECONDS = 1
ABANDONED_SECONDS = 10.0  # for which an answer that was asked for and left counts among those of its key


class QueueFull(DraftwingError):
    """Too many answers wait (HTTP 429 where they are the client's own, else 503)."""

    def __init__(self, message: str, own: bool, when: str = "when some have begun") -> None:
        super().__init__(f"{message}; try again {when}")
        self.own = own


class AdmissionQuota:
    """Answers from when they are asked for until the engine gives a token or their end; a request whose answers are not
    made yet is one. Those whose client left count until the engine has let go of them, and for some time among those of
    its key, so that nobody can ask and leave faster than the server follows."""

    def __init__(self, max_answers: int, max_per_key: int, clock: Callable[[], float] = time.monotonic) -> None:
        """max_answers: of all clients.  max_per_key: of one with a key; without keys all are one client."""
        self._max_answers, self._max_per_key = max_answers, max_per_key
        self._clients: dict[str, str] = {}  # by uid
        self._counts: Counter[str] = Counter()
        self._made = 0
        self._abandoned: deque[tuple[float, str, int]] = deque()  # until when so many count for a client
        self._clock = clock

    def __len__(self) -> int:
        return len(self._clients)

    @contextmanager
    def reserve(self, client: str, count: int) -> Iterator[None]:
        """Counts so many while they are made, which takes a while. Raises QueueFull where they would be too many."""
        self.check(client, count)
        self._made += count
        self._counts[client] += count
        try:
            yield
        finally:
            self._made -= count
            self._less(client, count)

    def check(self, client: str, count: int, held: int = 0) -> None:
        """Raises QueueFull where so many more would be too many. held: places that are given back for them."""
        while self._abandoned and self._abandoned[0][0] <= self._clock():
            _, name, past = self._abandoned.popleft()
            self._less(name, past)
        if client and (there := self._counts[client] - held) + count > self._max_per_key:
            limit = f"of at most {self._max_per_key} (--max-queued-requests-per-key)"
            raise QueueFull(f"{there} answers of this key wait, {limit}: there is no room for {count} more", own=True)
        if (there := len(self) + self._made - held) + count > self._max_answers:
            limit = f"of at most {self._max_answers} (--max-queued-requests)"
            raise QueueFull(f"{there} answers wait, {limit}: there is no room for {count} more", own=False)

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            self._clients[request.uid] = request.client
            self._counts[request.client] += 1

    def started(self, uid: str) -> None:
        """Ends the wait of an answer; does nothing for one that did not wait."""
        client = self._clients.pop(uid, None)
        if client is not None:
            self._less(client, 1)

    def abandoned(self, uids: Iterable[str]) -> None:
        """Keeps counting answers that their client, one for all, has left."""
        clients = [self._clients[uid] for uid in uids if uid in self._clients]
        if clients:
            self._abandoned.append((self._clock() + ABANDONED_SECONDS, clients[0], len(clients)))
            self._counts[clients[0]] += len(clients)

    def clear(self) -> None:
        for uid in list(self._clients):
            self.started(uid)

    def _less(self, client: str, count: int) -> None:
        self._counts[client] -= count
        if not self._counts[client]:
            del self._counts[client]


# Each takes 12 bytes until its response is made, and its position 115, or up to 410 with other tokens than its own: of
# all that may be held the most is 0.7 GB (of the token's own and the best), and a quarter more with `LEEWAY`.
MAX_REQUEST_LOGPROBS = 2**21  # of a request
MAX_HELD_LOGPROBS = 2**22
SHARE = 2  # a key has a part of that: the most of one request
FREE_LOGPROBS = 2**14  # that a key may hold however many there are: who asks for the rest keeps nobody from asking
# A response with no more than those may go beyond a sum by a part of it: what fills the sum is a large one, and that is
# the one to fail, not whichever has the next token.
LEEWAY = 4


MAX_RECEIPT_TOKENS = 2**21  # of prompts that the receipts of a request hold, a dozen bytes of JSON each


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


def check_receipts(requests: Sequence[GenerationRequest]) -> None:
    """Raises RequestError where receipts of the answers to requests that came together would hold too much of their
    prompts: each of n answers has the whole prompt in its own."""
    total = sum(request.params.n * len(request.prompt_ids) for request in requests)
    if total > MAX_RECEIPT_TOKENS:
        raise RequestError(
            f"receipt: the receipts of a response hold at most {MAX_RECEIPT_TOKENS} tokens of prompts, each of its "
            f"answers the whole prompt; found {total}: ask for fewer answers or shorter prompts, or for no receipts",
            "receipt",
        )


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
