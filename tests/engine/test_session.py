"""Driving an engine, around the server tests' stand-in for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import CONTEXT, EOS, FakeEngine
from tiny_checkpoint import write_checkpoint

from draftwing import LLM
from draftwing.config.options import Options
from draftwing.engine.session import Session, prepare
from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest, SpecLimits
from draftwing.requests.sampling_params import SamplingParams


def request(uid: str, prompt: list[int] | None = None, **fields: object) -> GenerationRequest:
    return GenerationRequest(uid, prompt or [1, 2, 3], SamplingParams(**fields))


def test_at_most_so_many_run_at_once() -> None:
    engine, seen = FakeEngine(), list[int]()
    session, ended = Session(engine), list[str]()  # type: ignore[arg-type]
    for output in session.run((request(str(i)) for i in range(7)), at_once=3):
        seen.append(len(engine.running))
        if output.finish_reason is not None:
            ended.append(output.uid)
    assert sorted(ended) == [str(i) for i in range(7)] and max(seen) <= 3 and engine.idle()


def test_requests_are_taken_when_there_is_room() -> None:
    engine, taken = FakeEngine(), list[int]()

    def requests():
        for i in range(6):
            taken.append(i)
            yield request(str(i), ignore_eos=True, max_new_tokens=1 + 20 * (i == 0))

    outputs = Session(engine).run(requests(), at_once=2)  # type: ignore[arg-type]
    next(outputs)
    assert taken == [0, 1]
    assert [output.uid for output in outputs if output.finish_reason] != [] and taken == [*range(6)]


def test_what_is_unfinished_is_aborted() -> None:
    engine = FakeEngine()
    session = Session(engine)  # type: ignore[arg-type]
    outputs = session.run([request(uid, ignore_eos=True, max_new_tokens=1000) for uid in "ab"])
    next(outputs)
    outputs.close()
    assert sorted(engine.aborted) == ["a", "b"] and engine.idle()
    assert [output.finish_reason for output in session.run([request("c", max_new_tokens=1)])] == [
        {"type": "length", "length": 1}
    ]


def test_more_can_be_asked_on_the_way() -> None:
    engine = FakeEngine()
    session, ended = Session(engine), list[str]()  # type: ignore[arg-type]
    for output in session.run([request("first")]):
        if output.finish_reason is not None:
            ended.append(output.uid)
            if output.uid == "first":
                session.submit(request("second"))
    assert ended == ["first", "second"]


def test_answers_are_prepared_once_for_the_engine() -> None:
    tree = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    info, tokenizer = FakeEngine(Options(speculative_algorithm="EAGLE", **tree)).info, FakeEngine().tokenizer  # type: ignore[arg-type]
    asked = [request("", n=2, seed=3, max_new_tokens=None), request("", [4], seed=5)]
    answers = list(prepare(info, tokenizer, asked, {"num_steps": 2}, random.Random(0)))
    assert [answer.index for answer in answers] == [0, 1, 2]
    one, other, last = (answer.request for answer in answers)
    assert len({one.uid, other.uid, last.uid}) == 3 and one.prompt_ids is other.prompt_ids
    assert (one.params.sampling_seed, last.params.sampling_seed) == (3, 5) != (other.params.sampling_seed, 5)
    assert {answer.request.limits for answer in answers} == {SpecLimits(2, 4, 8)}
    assert one.terms == (CONTEXT - 3, frozenset({EOS}))
    assert info.admit(one) is one  # it is not looked at again
    stops = request("", [3], stop_token_ids=(5, 999, 2**31 - 1))  # those of another vocabulary end nothing
    assert info.admit(stops).terms.stop_ids == frozenset({EOS, 5})  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="outside of the vocabulary"):
        list(prepare(info, tokenizer, [request("", [999])], None, random.Random(0)))


@pytest.mark.slow
def test_the_default_device_of_a_program_is_its_own(tmp_path: Path) -> None:
    """As where a notebook has set a GPU, beside an engine on the CPU; on `meta` nothing can be computed."""
    folder, params = write_checkpoint(tmp_path / "m"), {"max_new_tokens": 12, "temperature": 0.9, "sampling_seed": 3}
    options: dict[str, Any] = {"device": "cpu", "max_total_tokens": 256, "speculative_algorithm": "NGRAM"}

    def texts() -> list[Any]:
        with LLM(str(folder), **options) as llm:
            streamed = "".join(piece.text for piece in llm.stream("abcabc", params))
            found = [answer.text for answer in llm.generate(["abc", "x"], params)]
            return [found, streamed, llm.embed("a")[0].tolist()]

    expected = texts()
    with torch.device("meta"):
        assert texts() == expected
    torch.set_default_device("meta")
    try:
        assert texts() == expected and torch.ones(1).is_meta
    finally:
        torch.set_default_device(None)
