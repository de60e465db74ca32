"""What one client's requests leave behind is of no use to another's, and is not shown to anybody."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing.config.options import Options
from draftwing.core import TracedStep
from draftwing.engine.engine import Engine
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

BEFORE, SECRET = "PIN of the safe: ", "4719-ROSEBUD-22"


class Reply(NamedTuple):
    text: str
    cached: int  # tokens of the prompt
    accepted: int  # drafts
    drafted: set[str]  # texts of the drafted paths, behind what was committed before


@pytest.fixture(scope="module", params=["NGRAM", "SUFFIX"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    options = Options(
        model=str(folder), device="cpu", num_threads=1, random_seed=3, max_total_tokens=4096,
        max_running_requests=4, speculative_algorithm=request.param, speculative_fixed_shape=True,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # drawn salts might meet in NGRAM's table
        patch.setattr("draftwing.engine.namespaces.secrets.token_bytes", bytes)
        engine = Engine(options)
    yield engine
    engine.close()


def ask(engine: Engine, pattern: str | None, prompt: str = "who asks?", **fields: Any) -> Reply:
    """An answer, which matches the pattern, as the request's own stream tells it."""
    grammar = None if pattern is None else Grammar("regex", pattern)
    params = SamplingParams(
        max_new_tokens=60, temperature=1.5, sampling_seed=1, ignore_eos=grammar is None, grammar=grammar,
        frequency_penalty=2.0 if grammar is None else 0.0,
    )  # fmt: skip
    ids = engine.tokenizer.encode(prompt)
    engine.submit(GenerationRequest("one", ids, params, **fields))
    tokens, drafted, meta = list[int](), set[str](), dict[str, Any]()
    while not engine.idle():
        for output in engine.step():
            for step in output.trace:
                drafted |= paths(engine, tokens, step)
                tokens += step.tokens
            if not output.trace:
                tokens += output.token_ids
            meta = output.meta or meta
    text = engine.tokenizer.decode([token for token in tokens if token < 256])
    return Reply(text, meta["cached_tokens"], meta["spec_num_correct_drafts"], drafted)


def paths(engine: Engine, before: list[int], step: TracedStep) -> set[str]:
    found = list[list[int]]()
    for node in step.nodes:
        found.append([*(before if node.parent is None else found[node.parent]), node.token])
    return {engine.tokenizer.decode([token for token in path if token < 256]) for path in found}


def of_the_secret(reported: Reply) -> set[str]:
    """Drafts that go on with it, beyond what the request itself says."""
    return {text for text in reported.drafted if text.startswith(BEFORE + SECRET[:4])}


@pytest.mark.slow
def test_clients_share_nothing(engine: Engine) -> None:
    first = ask(engine, None, client="alice")  # it does not repeat itself: only a memory of it can draft it
    again = ask(engine, None, client="alice")
    assert again.cached > 0 and again.accepted > first.accepted + 20, "there was nothing to be read"
    for other in ({"client": "bob"}, {}, {"client": "alice", "cache_salt": "x"}, {"cache_salt": "alice"}):
        reported = ask(engine, None, **other)
        assert reported == first and reported.cached == 0, other
        assert ask(engine, None, **other) == again, other


@pytest.mark.slow
@pytest.mark.parametrize("client", ["", "alice"])
def test_a_trace_tells_of_its_own_text_alone(engine: Engine, client: str) -> None:
    """Also where all are one client: whoever looks may be another person."""
    for _ in range(3):
        ask(engine, BEFORE + SECRET, "alice asks", client=client)
    guess = BEFORE + "[0-9A-Z-]{9}"
    assert not of_the_secret(ask(engine, guess, client=client, traced=True))
    own = ask(engine, "(ab cd ){6}", client=client, traced=True)
    assert any("ab cd ab cd " in text for text in own.drafted) and own.accepted > 8, "its own text is not drafted"
    options = engine.options
    engine.options = dataclasses.replace(options, ui_show_texts=True)
    try:
        assert of_the_secret(ask(engine, guess, client=client, traced=True)), "there was nothing to leak"
    finally:
        engine.options = options
