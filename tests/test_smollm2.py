"""The default model through the Python API: known answers, and the same tokens with speculation on and off."""

import json

import jsonschema
import pytest

from draftwing import LLM, SamplingParams

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
REPEAT = [
    {"role": "user", "content": 'Repeat this JSON exactly:\n{"a": [1, 2, 3], "b": {"c": "d", "e": "f"}, "g": true}'}
]
STORY = [{"role": "user", "content": "Tell me a very short story about a fox and a crow."}]

OPENAI = {"sampling_defaults": "openai"}  # no penalties, which would keep a text from being repeated


@pytest.fixture(scope="module")
def plain(smollm2_path):
    with LLM("smollm2", speculative_algorithm="none", max_total_tokens=4096, max_running_requests=8, **OPENAI) as llm:
        yield llm


@pytest.fixture(scope="module")
def ngram(smollm2_path):
    """Of a fixed shape: whether answers so short are drafted would else depend on what steps cost on this machine."""
    options = dict(speculative_algorithm="NGRAM", speculative_fixed_shape=True, max_running_requests=8)
    with LLM("smollm2", max_total_tokens=4096, **options, **OPENAI) as llm:
        yield llm


@pytest.fixture(scope="module")
def dense(smollm2_path):
    """Without the errors of activations in 8 bits: the first token of the known answer leads by 0.1 alone."""
    with LLM("smollm2", speculative_algorithm="none", quantization="none", max_total_tokens=1024, **OPENAI) as llm:
        yield llm


def test_a_known_answer(dense):
    (answer,) = dense.chat(CAPITAL, SamplingParams(temperature=0))
    assert answer.token_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == {"type": "stop", "matched": 2}
    assert answer.meta_info["prompt_tokens"] == 37


def test_ngram_changes_no_token(plain, ngram):
    """In the model's own dtype: greedy and seeded answers, alone and side by side."""
    params = [SamplingParams(temperature=0, max_new_tokens=45), SamplingParams(temperature=0, max_new_tokens=24),
              SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_new_tokens=24)]  # fmt: skip
    alone = [plain.chat(c, p)[0] for c, p in zip((REPEAT, STORY, STORY), params, strict=True)]
    together = ngram.chat([REPEAT, STORY, STORY], params)
    assert [a.token_ids for a in alone] == [a.token_ids for a in together]
    assert together[0].meta_info["spec_accept_length"] > 1.5, "nothing was copied"
    assert sum(a.meta_info["spec_num_correct_drafts"] for a in together) > 15


THREE = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
PAIR = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 999}},
        "required": ["ok", "n"], "additionalProperties": False}  # fmt: skip
TAGS = {"type": "object", "properties": {
    "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2}, "p": {"type": ["null", "boolean"]}},
    "required": ["tags", "p"], "additionalProperties": False}  # fmt: skip


def test_answers_of_small_schemas_come_to_an_end(plain, ngram):
    """With any white space some go on with it up to their limit. Drafts change none of them."""
    asked = [(THREE, "Hello"), (PAIR, "What is the capital of France?"), (TAGS, "Write a poem."), (TAGS, "Once upon"),
             (PAIR, "The weather"), (THREE, "def f(x):")]  # fmt: skip
    prompts = [[{"role": "user", "content": text}] for _, text in asked]
    params = [
        SamplingParams.read({"json_schema": schema, "max_new_tokens": 120, "temperature": i % 2 * 0.8, "seed": 1})
        for i, (schema, _) in enumerate(asked)
    ]
    answers = plain.chat(prompts, params)
    assert [answer.finish_reason["type"] for answer in answers] == ["stop"] * 6
    for answer, (schema, _) in zip(answers, asked, strict=True):
        jsonschema.validate(json.loads(answer.text), schema)
    assert [answer.token_ids for answer in ngram.chat(prompts, params)] == [answer.token_ids for answer in answers]


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("choice", [pytest.param("auto", marks=pytest.mark.exhaustive), "required"])
def test_tools_from_the_start(plain, ngram, choice):
    """With no option; the same text with drafts."""
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    sampling = SamplingParams(temperature=0, max_new_tokens=40)
    first, second = (llm.chat(asked, sampling, tools=[TOOL], tool_choice=choice)[0] for llm in (plain, ngram))
    assert first.text == second.text and "get_weather" in plain.tokenizer.decode(first.prompt_token_ids)
    assert choice == "auto" or first.tool_calls[0]["function"]["name"] == "get_weather"
