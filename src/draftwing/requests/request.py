"""What passes from whoever asks to the engine: a prompt, how its answer is sampled, and what is asked besides: log
probabilities, drafts no larger than wanted, and a text that the answer is expected to resemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from draftwing.errors import RequestError
from draftwing.requests.images import RequestImage
from draftwing.requests.refusals import check_text, show, suggestion
from draftwing.requests.sampling_params import SamplingParams

MAX_PREDICTED: Final = 16384  # tokens of a predicted output
MAX_LOGPROBS: Final = 128  # best tokens, and further tokens, of a position
MAX_OPENAI_LOGPROBS: Final = 20  # in chat completions
MAX_COMPLETION_LOGPROBS: Final = 20  # as vLLM; OpenAI has 5
MAX_MARKER: Final = 32  # tokens of a marker of reasoning
LOGPROB_FIELDS = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob")
_SPECULATIVE = ("algorithm", "num_steps", "topk", "num_draft_tokens")


class LogprobParams(NamedTuple):
    """Log probabilities that a request wants, of the model's own distribution: softmax(logits), before any edit.

    top: how many best tokens of each position.  token_ids: further tokens of each position.
    start: first prompt position whose token's log probability is wanted; -1: only the answer's.
    hidden: the model's hidden size, where its last hidden states are wanted; 0: they are not.
    shown: whether the answer has log probabilities; False: hidden states alone, which are sent on the same way.
    shown_from: as `start`, where the answer has fewer of the prompt's than hidden states need; None: the same.
    """

    top: int = 0
    token_ids: tuple[int, ...] = ()
    start: int = -1
    hidden: int = 0
    shown: bool = True
    shown_from: int | None = None

    @property
    def first_shown(self) -> int:
        """Returns the first prompt position whose token's log probability the answer has; -1: none."""
        return self.start if self.shown_from is None else self.shown_from

    @property
    def width(self) -> int:
        """Returns how many numbers a position has."""
        return 1 + self.top + len(self.token_ids) + self.hidden


class SpecLimits(NamedTuple):
    """The largest draft tree that a request wants, no larger than the engine's; depth 0 switches drafting off."""

    depth: int
    topk: int
    nodes: int


def logprob_params(
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    token_ids_logprob: Sequence[int] | None = None,
    where: str = "",
    *,
    hidden: int = 0,
) -> LogprobParams | None:
    """Reads `/generate`'s fields; None where nothing is asked for. where: what comes before a list's index in names.
    hidden: as of `LogprobParams`; then the prompt's are wanted from its first token on."""
    values = dict(zip(LOGPROB_FIELDS, (logprob_start_len, top_logprobs_num, token_ids_logprob), strict=True))
    if not return_logprob:
        for name, value in values.items():
            # A start alone asks for nothing: clients send it with either.
            if value and name != "logprob_start_len":
                raise RequestError(f"{where}{name} needs return_logprob: true", where + name)
        return LogprobParams(start=0, hidden=hidden, shown=False) if hidden else None
    start = _whole(f"{where}logprob_start_len", -1 if logprob_start_len is None else logprob_start_len, -1, 2**31 - 1)
    top = _whole(f"{where}top_logprobs_num", top_logprobs_num or 0, 0, MAX_LOGPROBS)
    ids = token_ids_logprob or ()
    name = f"{where}token_ids_logprob"
    if not isinstance(ids, Sequence) or isinstance(ids, str) or len(ids) > MAX_LOGPROBS:
        raise RequestError(f"{name} must be a list of at most {MAX_LOGPROBS} token ids; found {show(ids)}", name)
    known = tuple(_whole(name, token, 0, 2**31 - 1) for token in ids)
    return LogprobParams(top, known, 0, hidden, shown_from=start) if hidden else LogprobParams(top, known, start)


class ThinkingBudget(NamedTuple):
    """The most tokens of an answer's reasoning. Once so many are inside of its blocks, an open block is ended.

    begin, end: token ids of the markers.  open: whether the answer begins inside of a block.
    again: whether blocks may begin anywhere, and not at the answer's beginning alone.
    """

    tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    open: bool
    again: bool = False


class Terms(NamedTuple):
    """On what an engine takes a request: its most new tokens, and the token ids that end it."""

    new_tokens: int
    stop_ids: frozenset[int]


class GenerationRequest(NamedTuple):
    """One prompt, one answer. `cache_salt` isolates the prefix cache and what drafters remember, as `client` does.

    limits: None drafts as the engine does.  prediction: token ids that the answer is expected to resemble.
    name: by which the client may abort it, together with others.  terms: None until `EngineInfo.admit` let it in.
    bad_word_ids: the token sequences of its parameters' `bad_words`; None where they are yet to be found.
    thinking: of its parameters' `thinking_budget`, as the model's markers and its prompt make it.
    traced: outputs report what was drafted for it.  client: the name of the API key that asked, where there are keys.
    learn: whether it and its answer may be kept on the disk; for drafters to learn from: `learnable`.
    arrived: when it was asked for, in monotonic seconds, which all processes of a machine share; None: when an engine
    gets it.  receipt: whether its answer is to come with a receipt (`engine.receipts`).  images: in the order of the
    prompt, whose tokens stand for their positions.  adapters: names of those that answer it, together, each with what
    its own scale is multiplied with.  adapter_digest: of what that is, as a server knows of a single one, and of which
    draft head of its own there is, once an engine has the request.  slot: number of
    the one of its client that holds its text afterwards, as llama.cpp's `id_slot`; -1: none does.  second: where the
    second text of a pair begins in the prompt, for models that tell the two apart; 0: it is one text.
    """

    uid: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    logprobs: LogprobParams | None = None
    limits: SpecLimits | None = None
    prediction: tuple[int, ...] = ()
    name: str = ""
    terms: Terms | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] | None = None
    traced: bool = False
    client: str = ""
    arrived: float | None = None
    thinking: ThinkingBudget | None = None
    learn: bool = True
    receipt: bool = False
    images: tuple[RequestImage, ...] = ()
    adapters: tuple[tuple[str, float], ...] = ()
    adapter_digest: str = ""
    slot: int = 0
    second: int = 0

    @property
    def pooled(self) -> bool:
        """Returns whether hidden states of its prompt are all that is wanted."""
        wanted = self.logprobs
        return self.params.max_new_tokens == 0 and wanted is not None and wanted.hidden > 0 and not wanted.shown

    @property
    def learnable(self) -> bool:
        """Returns whether drafts may learn from it: texts alone are kept for that, and only the model's own."""
        return self.learn and not self.images and not self.adapters

    @property
    def together(self) -> tuple[str, float] | None:
        """Returns what all answers that a client asked for at once have in common; None where that is not known."""
        return None if self.arrived is None else (self.client, self.arrived)


class Speculation(NamedTuple):
    """How the drafts of a request are limited by its field `speculative`. limits: None drafts as the engine does."""

    limits: SpecLimits | None
    used: dict[str, Any]  # as responses report it


def speculation(field: Any, algorithm: str, maximum: SpecLimits) -> Speculation:
    """Reads the field `speculative`: "off", or {"algorithm", "num_steps", "topk", "num_draft_tokens"} of which any may
    be left out; None asks for nothing. algorithm, maximum: the engine's. Raises RequestError, naming field and limit,
    for more than it has."""
    if field is None:
        return Speculation(None, _used(algorithm, maximum))
    if isinstance(field, str) and field.lower() == "off":
        return _off(maximum)
    if not isinstance(field, Mapping):
        raise RequestError(f'speculative must be "off" or an object; found {show(field)}', "speculative")
    for name in field:
        if name not in _SPECULATIVE:
            full = f"speculative.{str(name)[:80]}"
            raise RequestError(f"{full} is not a known field{suggestion(str(name), _SPECULATIVE)}", full)
    asked = field.get("algorithm")
    if asked is not None:
        if isinstance(asked, str) and asked.lower() in ("off", "none"):
            return _no_drafts(field, maximum)
        if not isinstance(asked, str) or asked.upper() != algorithm.upper():
            raise RequestError(
                f"speculative.algorithm must be {algorithm!r}, with which the server was started, or 'off'; found "
                f"{show(asked)}",
                "speculative.algorithm",
            )
    depth = _bounded(field, "num_steps", 0, maximum.depth)
    topk = _bounded(field, "topk", 1, maximum.topk)
    nodes = _bounded(field, "num_draft_tokens", 1, maximum.nodes)
    depth = min(depth, nodes - 1)
    if depth == 0:
        return _off(maximum)
    limits = SpecLimits(depth, topk, min(nodes, depth + 1) if topk == 1 else nodes)
    return Speculation(None if limits == maximum else limits, _used(algorithm, limits))


def prediction_text(value: Any, param: str = "prediction") -> str:
    """Returns the text of OpenAI's {"type": "content", "content": a string or text parts}. Raises RequestError."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind != "content" or not set(value) <= {"type", "content"}:
        raise RequestError(f'{param} must be {{"type": "content", "content": ...}}; found {show(value)}', param)
    content = value.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise RequestError(f"{param}.content must be a string or a list of text parts", f"{param}.content")
    for i, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            name = f"{param}.content.{i}"
            raise RequestError(f"{name} must be {{'type': 'text', 'text': ...}}; found {show(part)}", name)
    return check_text("".join(part["text"] for part in parts), param)


def _used(algorithm: str, limits: SpecLimits) -> dict[str, Any]:
    return dict(zip(_SPECULATIVE, (algorithm if limits.depth else "none", *limits), strict=True))


def _off(maximum: SpecLimits) -> Speculation:
    none = SpecLimits(0, 1, 1)
    return Speculation(none if maximum.depth else None, _used("none", none))


def _no_drafts(field: Mapping[str, Any], maximum: SpecLimits) -> Speculation:
    """Switched off by name: numbers that ask for drafts contradict it."""
    for name, nothing in (("num_steps", 0), ("topk", 1), ("num_draft_tokens", 1)):
        if field.get(name) not in (None, 0, nothing) or isinstance(field.get(name), bool):
            raise RequestError(
                f"speculative.{name} and speculative.algorithm {field['algorithm']!r} exclude each other",
                f"speculative.{name}",
            )
    return _off(maximum)


def _bounded(field: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = field.get(name)
    return high if value is None else _whole(f"speculative.{name}", value, low, high)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}; found {show(value)}", name)
    return value
