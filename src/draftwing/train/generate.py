"""Has the engine that will serve the head write its data: answers to prompts, and prompts.

What is drawn for a prompt follows from the seed and the prompt alone, so it does not matter in which order prompts run,
with what, and in how many attempts: a run that was killed goes on with the prompts that have no line yet.

Prompts of collections are many of a kind; what a model was tuned on is in its own prompts, too (as in Magpie, Xu et al.
2024, arXiv 2406.08464): it goes on where its chat template has a user speak. Half of them begin with one of a few
words, for a small model repeats itself."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwing.engine.session import Session
from draftwing.errors import ConfigError, RequestError
from draftwing.files import replace_file
from draftwing.log import progress_bar
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import BadData, Prompt, Skipped, original
from draftwing.train.dataset import Response, chat_ids, first_ids, opening
from draftwing.train.progress import Remaining

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

logger = logging.getLogger(__name__)

MIN_ANSWER = 16  # tokens that must be left for an answer


@dataclass(frozen=True)
class Sampling:
    """Says how answers are drawn.

    max_tokens: of one answer.  max_length: of a conversation with its answers, in tokens.
    greedy: share of the prompts answered at temperature 0; the others, and all copies of prompts, have temperatures
    spread evenly over `temperatures`, inclusive, but for `default`, a share of these that is drawn as a request is that
    sets nothing, with what the model's defaults change of its logits.  defaults: as `sampling_defaults` returns them.
    """

    max_tokens: int = 1024
    max_length: int = 2048
    greedy: float = 0.5
    temperatures: tuple[float, float] = (0.6, 1.0)
    seed: int = 0
    default: float = 0.0
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, key: str, turn: int = 0) -> SamplingParams:
        """Draws the parameters of a prompt's answer; all of a conversation's answers are drawn alike."""
        share, place, default = (self._uniform(f"{what} {key}") for what in ("greedy", "place", "default"))
        low, high = self.temperatures
        seed = int(self._uniform(f"noise {turn} {key}") * 2**52)
        fixed = {"max_new_tokens": self.max_tokens, "sampling_seed": seed}
        if share < self.greedy and key == original(key):
            return SamplingParams(**fixed, temperature=0.0)
        if default < self.default:
            return SamplingParams.read(fixed, defaults=self.defaults)
        return SamplingParams(**fixed, temperature=round(low + place * (high - low), 3))

    def _uniform(self, text: str) -> float:
        """Returns a number in [0, 1)."""
        digest = blake2b(f"{self.seed} {text}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53


@dataclass
class _Running:
    """A conversation that is being answered. ids: its prompt, then the answer as it comes."""

    prompt: Prompt
    key: str
    messages: list[dict[str, str]]
    ids: list[int]
    spans: list[tuple[int, int]]
    params: SamplingParams
    adapter: str | None = None
    start: int = 0  # of the answer among ids

    @property
    def turn(self) -> int:
        return len(self.spans)


def usable(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, sampling: Sampling, skipped: Skipped
) -> list[tuple[Prompt, list[int]]]:
    """Returns prompts that leave room for an answer, with their token ids."""
    found, longest = [], sampling.max_length - MIN_ANSWER
    known: dict[str, list[int]] = {}  # copies have the same
    for prompt in progress_bar(iterable=prompts, desc="tokenizing", unit=" prompts"):
        try:
            name = original(prompt.key)
            if name not in known:
                known[name] = first_ids(prompt, tokenizer)
            ids = known[name]
            if len(ids) > longest:
                raise BadData(f"longer than {longest} tokens")
            if not ids:
                raise BadData("empty")
        except BadData as error:
            if not prompt.copy:
                skipped.note(error, prompt.where)
        else:
            found.append((prompt, ids))
    return found


def cut_last_line(file: Path) -> None:
    """Cuts off what a kill left of the last line of `file`, which need not be there. Raises ConfigError."""
    try:
        with file.open("r+b") as lines:
            partial = next((len(line) for line in lines if not line.endswith(b"\n")), 0)
            if partial:  # else the file stays as old as it is
                lines.truncate(lines.seek(0, os.SEEK_END) - partial)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


def generate(
    engine: Engine, prompts: Sequence[tuple[Prompt, list[int]]], file: Path, sampling: Sampling, skipped: Skipped,
    adapter: str | None = None,
) -> int:  # fmt: skip
    """Answers prompts (of `usable`) and appends a line for each to `file` when its last answer is there. adapter: the
    name of one of the engine's, which answers.

    Returns how many tokens were generated. Which prompts still need an answer is the caller's matter.
    """
    # Twice what fits into the engine, so that a row never waits for the next request.
    window = 2 * (engine.info.options.max_running_requests or 64)
    session, running, generated = Session(engine), dict[str, _Running](), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    remaining, ended, lengths = Remaining("generating", len(prompts)), 0, list[int]()
    with (
        file.open("a", encoding="utf-8") as lines,
        progress_bar(total=len(prompts), desc="generating", unit=" prompts", smoothing=0.05) as bar,
    ):

        def first_turns() -> Iterator[GenerationRequest]:
            for prompt, ids in prompts:
                one = _Running(prompt, prompt.key, opening(prompt), list(ids), [], sampling.draw(prompt.key), adapter)
                request = _request(engine, one, sampling, skipped)
                if request is None:
                    bar.update()
                else:
                    running[one.key] = one
                    yield request

        with closing(session.run(first_turns(), window)) as outputs:
            for output in outputs:
                one = running[output.uid]
                one.ids += output.token_ids
                generated += len(output.token_ids)
                if output.finish_reason is None:
                    continue
                finish = str(output.finish_reason["type"])
                if _next_turn(session, one, finish, sampling, skipped):
                    continue
                del running[output.uid]
                if one.spans:
                    lengths += [end - start for start, end in one.spans]
                    lines.write(_response(one, finish, sampling).line())
                    lines.flush()
                else:
                    skipped.note("no answer", one.prompt.where)
                bar.update()
                bar.set_postfix(tokens=generated, refresh=False)
                ended += 1
                remaining.update(ended, f", {sum(lengths) / max(1, len(lengths)):.0f} tokens an answer")
        os.fsync(lines.fileno())
    return generated


def _request(engine: Engine, one: _Running, sampling: Sampling, skipped: Skipped) -> GenerationRequest | None:
    """Asks for the answer to one.ids; None if that is refused or there is no room for it."""
    limit = min(sampling.max_length, engine.info.context_length)
    params, one.start = sampling.draw(one.key, one.turn), len(one.ids)
    room = min(sampling.max_tokens, limit - one.start)
    if room < MIN_ANSWER:
        if not one.turn:
            skipped.note(f"longer than {limit - MIN_ANSWER} tokens", one.prompt.where)
        return None
    one.params = params.replace(max_new_tokens=room)
    try:
        adapters = () if one.adapter is None else ((one.adapter, 1.0),)
        return engine.info.admit(GenerationRequest(one.key, list(one.ids), one.params, adapters=adapters))
    except RequestError as error:
        if not one.turn:
            skipped.note(f"refused by the engine: {error}", one.prompt.where)
        return None


def _next_turn(session: Session, one: _Running, finish: str, sampling: Sampling, skipped: Skipped) -> bool:
    """Takes the answer that has ended, and asks for the next one if there is one."""
    if len(one.ids) == one.start or finish not in ("stop", "length"):
        del one.ids[one.start :]
        return False
    one.spans.append((one.start, len(one.ids)))
    one.messages.append({"role": "assistant", "content": session.engine.tokenizer.decode(one.ids[one.start :])})
    tokenizer = session.engine.tokenizer
    if finish != "stop" or one.turn >= len(one.prompt.turns) or tokenizer.chat_template is None:
        return False
    following = [*one.messages, {"role": "user", "content": one.prompt.turns[one.turn]}]
    try:
        ids = chat_ids(following, tokenizer)
    except BadData:
        return False
    before = one.ids
    # Written out and read again, an answer may become other tokens than were generated; then it is the last one.
    if ids[: len(before)] != before:
        return False
    one.ids = ids
    request = _request(session.engine, one, sampling, skipped)
    if request is None:
        one.ids = before
        return False
    session.submit(request)
    one.messages = following
    return True


def _response(one: _Running, finish: str, sampling: Sampling) -> Response:
    params = sampling.draw(one.key)
    assert params.sampling_seed is not None
    return Response(
        one.key, one.ids, one.spans, params.temperature, params.sampling_seed, finish, one.messages
    )  # fmt: skip


LONGEST, SHORTEST, MAX_CHARACTERS = 240, 12, 1500  # tokens; characters
_TOP_P = 0.97
_MARK = "\x00"
_BEGINNINGS = (
    "Write a", "Write a Python function that", "Write a short story about", "Draft an email", "Imagine you are",
    "Act as",
    "Solve", "If", "Suppose", "There are", "How many", "Calculate", "Find", "Given", "Extract", "Read the following",
    "Summarize", "Rewrite", "Classify", "Explain", "Describe", "Compare", "What is", "What are", "Why", "How does",
    "How do I", "Who", "Discuss", "Analyze", "Create a", "Design", "Implement", "Give me", "List", "In", "The",
    "Please", "Help me", "Could you", "Tell me", "Consider", "Translate", "Evaluate", "Identify", "Convert",
)  # fmt: skip


def write_prompts(engine: Engine, count: int, file: Path, seed: int = 0) -> int:
    """Asks the model for `count` prompts and writes those that can be used, each once, as JSON lines with `turns`.

    A prompt ends where the template ends what a user says. Left out is, and the log says how often, what did not end,
    is too short or too long, or has special tokens in it. Returns how many there are. Raises ConfigError for a model
    without a chat template, for a file that is there already, which it is when all are, and where nothing is left.
    """
    opening, stops = _turn(engine.tokenizer)
    asked: dict[str, list[int]] = {}  # what was said for the user already, and then all of it
    found, skipped = set[str](), Skipped(read=count)
    partial = partial_file(file)

    def requests() -> Iterator[GenerationRequest]:
        for number in range(count):
            draw = random.Random(f"{seed} {number}")
            begun = draw.choice(_BEGINNINGS) if draw.random() < 0.5 else ""
            name, ids = str(number), _encoded(engine.tokenizer, opening + begun)
            asked[name] = _encoded(engine.tokenizer, begun) if begun else []
            params = SamplingParams(
                max_new_tokens=LONGEST, temperature=1.0, top_p=_TOP_P, sampling_seed=draw.randrange(2**50),
                stop_token_ids=stops.ids, stop=stops.text,
            )  # fmt: skip
            yield engine.info.admit(GenerationRequest(name, ids, params))

    window = 2 * (engine.info.options.max_running_requests or 64)
    with (
        partial.open("w", encoding="utf-8") as lines,
        progress_bar(total=count, desc="writing", unit=" prompts") as bar,
        closing(Session(engine).run(requests(), window)) as outputs,
    ):
        for output in outputs:
            asked[output.uid] += output.token_ids
            if output.finish_reason is None:
                continue
            bar.update()
            ids = asked.pop(output.uid)
            try:
                text = _text(engine.tokenizer, ids, stops, output.finish_reason["type"] == "stop")
                if text in found:
                    raise BadData("repeated")
            except BadData as error:
                skipped.note(error, repr(engine.tokenizer.decode(ids)[:60]))
                continue
            found.add(text)
            lines.write(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n")
    skipped.log()
    skipped.require(len(found), "prompt")
    replace_file(partial, file)
    return len(found)


def partial_file(file: Path) -> Path:
    """Returns the file that is written before all of it is there. Raises ConfigError."""
    if file.exists():
        raise ConfigError(f"--out {file} is there already: name another file")
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ConfigError(f"--out {file} cannot be made: {error.strerror}. Name another file") from None
    return partial


class _Stops(NamedTuple):
    """What ends a user's turn: tokens, or a text where the template has no token for it. marks: tokens that no prompt
    has, templates' too, that are no special ones (`<think>`)."""

    ids: tuple[int, ...]
    text: tuple[str, ...]
    marks: frozenset[int]


def _turn(tokenizer: Tokenizer) -> tuple[str, _Stops]:
    """Returns what stands before the words of a user who speaks first, and what ends them."""
    if tokenizer.chat_template is None:
        raise ConfigError("prompts need a chat template, and the model has none: give one with --chat-template")
    try:
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
    except RequestError as error:
        raise ConfigError(f"the chat template refuses a user who speaks first: {error}") from None
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise ConfigError("the chat template does not write what a user says as it is")
    added = tokenizer.backend.get_added_tokens_decoder().items()
    marks = frozenset(number for number, token in added if token.special or str(token.content).startswith("<"))
    after = after.strip()
    ends = _encoded(tokenizer, after)[:1]
    if marks.issuperset(ends):
        return before, _Stops((*tokenizer.stop_ids, *ends), (), marks)
    return before, _Stops((*tokenizer.stop_ids,), (after.partition("\n")[0],), marks)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.backend.encode(text, add_special_tokens=False).ids)


def _text(tokenizer: Tokenizer, ids: list[int], stops: _Stops, ended: bool) -> str:
    """Raises BadData for what is no prompt."""
    said = [token for token in ids if token not in stops.ids]
    text = tokenizer.decode(said)
    for end in stops.text:
        text = text.partition(end)[0]
    text = text.strip()
    if not ended:
        raise BadData(f"did not end within {LONGEST} tokens")
    if not SHORTEST <= len(text) <= MAX_CHARACTERS:
        raise BadData(f"shorter than {SHORTEST} or longer than {MAX_CHARACTERS} characters")
    if "\ufffd" in text or stops.marks.intersection(said):
        raise BadData("special tokens or broken characters")
    return text
