"""`return_hidden_states` vs transformers: what the last norm gives, the same with drafts to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoint import write_checkpoint
from transformers import AutoModelForCausalLM

from draftwing import LLM, SamplingParams
from draftwing.errors import RequestError

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3], [1]]
SMALL: dict[str, Any] = dict(context_length=128, max_total_tokens=2048, dtype="float32")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "none": {"speculative_algorithm": "none"},
    "chunks": {"speculative_algorithm": "none", "chunked_prefill_size": 4, "disable_radix_cache": True},
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "SUFFIX": {"speculative_algorithm": "SUFFIX"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def states_of(folder: str, options: dict[str, Any], params: SamplingParams, **asked: Any) -> list[Any]:
    with LLM(folder, **SMALL, **options) as llm:
        llm.generate(PROMPTS, params)  # what is cached has to be run again, for its hidden states
        return llm.generate(PROMPTS, params, return_hidden_states=True, **asked)


def rows(states: list[Any]) -> np.ndarray[Any, Any]:
    """[P + N - 1, H], of [P][H] and N - 1 times [H]"""
    return np.asarray([*states[0], *states[1:]], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_are_those_of_transformers(folder: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=temperature, sampling_seed=3, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    by_name = {name: states_of(folder, options, params) for name, options in ALGORITHMS.items()}
    drafted = sum(done.meta_info.get("spec_num_correct_drafts", 0) for done in by_name["NGRAM"])
    assert drafted > 0 or temperature, "drafts were accepted"
    for number, prompt in enumerate(PROMPTS):
        plain = by_name["none"][number]
        ids = [*prompt, *plain.token_ids]
        with torch.no_grad():
            expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        for done in (found[number] for found in by_name.values()):
            states = done.meta_info["hidden_states"]
            assert done.token_ids == plain.token_ids
            assert (len(states[0]), len(states)) == (len(prompt), len(done.token_ids))
            np.testing.assert_allclose(rows(states), expected[:-1].numpy(), rtol=1e-4, atol=1e-4)
            assert "output_token_logprobs" not in done.meta_info
        for name in ("NGRAM", "SUFFIX"):
            assert by_name[name][number].meta_info["hidden_states"][1:] == plain.meta_info["hidden_states"][1:]


@pytest.mark.slow
def test_with_log_probabilities_and_without_an_answer(folder: str) -> None:
    none, params = ALGORITHMS["none"], SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
    alone = states_of(folder, none, params)
    both = states_of(folder, none, params, return_logprob=True, top_logprobs_num=2)
    for one, other in zip(alone, both, strict=True):
        assert one.meta_info["hidden_states"] == other.meta_info["hidden_states"]
        assert len(other.meta_info["output_top_logprobs"]) == 3 and other.meta_info["input_token_logprobs"] == []
    some = states_of(folder, none, params, return_logprob=True, logprob_start_len=0)
    for one, other, prompt in zip(alone, some, PROMPTS, strict=True):
        assert one.meta_info["hidden_states"] == other.meta_info["hidden_states"]
        assert [entry[1] for entry in other.meta_info["input_token_logprobs"]] == prompt
    with pytest.raises(RequestError, match="logprob_start_len must be below"):
        states_of(folder, none, params, return_logprob=True, logprob_start_len=50)
    with pytest.raises(RequestError, match="return_hidden_states must be true or false"), LLM(folder, **SMALL) as llm:
        llm.generate(PROMPTS, return_hidden_states="no")  # type: ignore[call-overload]
    nothing = states_of(folder, none, params.replace(max_new_tokens=0))
    for one, other in zip(alone, nothing, strict=True):
        assert other.token_ids == [] and other.meta_info["hidden_states"] == [one.meta_info["hidden_states"][0]]
