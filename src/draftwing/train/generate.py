"""On-policy data: the engine that will serve the head answers the prompts.

What is drawn for a prompt follows from the seed and the prompt alone, so it does not matter in which order prompts run,
with what, and in how many attempts: a run that was killed goes on with the prompts that have no line yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from draftwing.engine.session import Session
from draftwing.errors import ConfigError, RequestError
from draftwing.log import progress_bar
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import BadData, Prompt, Skipped, original
from draftwing.train.progress import Remaining
from draftwing.train.sequences import Response, chat_ids, first_ids, opening

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

logger = logging.getLogger(__name__)

MIN_ANSWER = 16  # tokens that must be left for an answer


@dataclass(frozen=True)
class Sampling:
    """Says how answers are drawn.

    max_tokens: of one answer.  max_length: of a conversation with its answers, in tokens.
    greedy: share of the prompts answered at temperature 0; the others, and all copies of prompts, have temperatures
    spread evenly over `temperatures`, inclusive.
    """

    max_tokens: int = 1024
    max_length: int = 2048
    greedy: float = 0.5
    temperatures: tuple[float, float] = (0.6, 1.0)
    seed: int = 0

    def draw(self, key: str, turn: int = 0) -> SamplingParams:
        """Draws the parameters of a prompt's answer; all of a conversation's answers have the same temperature."""
        share, place = (self._uniform(f"{what} {key}") for what in ("greedy", "place"))
        low, high = self.temperatures
        temperature = 0.0 if share < self.greedy and key == original(key) else round(low + place * (high - low), 3)
        seed = int(self._uniform(f"noise {turn} {key}") * 2**52)
        return SamplingParams(max_new_tokens=self.max_tokens, temperature=temperature, sampling_seed=seed)

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
    engine: Engine, prompts: Sequence[tuple[Prompt, list[int]]], file: Path, sampling: Sampling, skipped: Skipped
) -> int:
    """Answers prompts (of `usable`) and appends a line for each to `file` when its last answer is there.

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
                one = _Running(prompt, prompt.key, opening(prompt), list(ids), [], sampling.draw(prompt.key))
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
        return engine.info.admit(GenerationRequest(one.key, list(one.ids), one.params))
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
