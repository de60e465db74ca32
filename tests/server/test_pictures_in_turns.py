"""Pictures of earlier turns and in results of tools, over HTTP: log probabilities and text are what transformers makes
of the same conversation with its own processor, which writes the prompt by the same chat template."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from image_models import EOS, KINDS, SPECIAL, encoded, picture, reference, write_model
from scripted import client_of
from starlette.testclient import TestClient
from tiny_tokenizers import byte_level
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4
from transformers.processing_utils import ProcessorMixin

from draftwing.config.options import Options
from draftwing.engine.engine import Engine

TOKENS = 8
Messages = list[dict[str, Any]]
# As Qwen's: results of tools are turns of the user, one after the other.
TEMPLATE = """
{%- macro write(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or () %}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}user{% endif %}<result>{{ write(m.content) }}</result>
{%- if loop.last or loop.nextitem.role != 'tool' %};{% endif %}
{%- else %}{{ m.role }}: {{ write(m.content) }}
{%- for call in m.tool_calls or () %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor %};{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
PNG = {"type": "base64", "media_type": "image/png"}
NAMES = {"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>", "image_token": "<|image_pad|>"}


class Theirs(NamedTuple):
    """processor: a class of transformers, with its arguments of pictures' processor and tokenizer.  image: what stands
    for a picture in the template.  names: of special tokens."""

    processor: Callable[[Any, Any], Any]
    image: str
    names: dict[str, str] = NAMES


QWEN = Theirs(
    lambda pictures, tokens: transformers.Qwen3VLProcessor(pictures, tokens, None),
    "<|vision_start|><|image_pad|><|vision_end|>",
    {
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|v|>",
    },
)
FAMILIES = {
    "qwen3-vl": QWEN,
    "qwen3.5": QWEN,
    "gemma3": Theirs(
        lambda pictures, tokens: transformers.Gemma3Processor(pictures, tokens, image_seq_length=16), "<|vision_start|>"
    ),
    "gemma4": Theirs(
        lambda pictures, tokens: transformers.Gemma4Processor(None, pictures, tokens, None, image_seq_length=16),
        "<|image_pad|>",
        {**NAMES, "audio_token": "<a>", "boa_token": "<b>", "eoa_token": "<c>"},
    ),
}


def shown(seed: int, width: int = 40, height: int = 30) -> dict[str, Any]:
    return {"type": "image", "image": picture(width, height, seed)}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def calling(number: int, text: str = "") -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": number}}
    call = {"type": "function", "id": f"c{number}", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def result(number: int, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": [*parts]}


FIRST = {"role": "user", "content": [shown(0), said("what?")]}
CONVERSATIONS: dict[str, Messages] = {
    "earlier turns": [
        FIRST,
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [said("and"), shown(1, 64, 16), said("this?"), shown(2, 8, 8)]},
        {"role": "assistant", "content": "a dog"},
        {"role": "user", "content": "the first?"},
    ],
    "a tool's result": [{"role": "user", "content": "look"}, calling(1), result(1, said("seen:"), shown(3))],
    "both": [
        FIRST,
        calling(1, "I look"),
        result(1, shown(4, 30, 40), said("and")),
        calling(2),
        result(2, shown(0), shown(5, 16, 24)),
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [shown(0), said("now?")]},
    ],
}


def data(part: dict[str, Any]) -> str:
    return base64.b64encode(encoded(part["image"])).decode()


def address(part: dict[str, Any]) -> str:
    return f"data:image/png;base64,{data(part)}"


def parts_of(message: dict[str, Any], drawn: Callable[[dict[str, Any]], dict[str, Any]]) -> Messages:
    """drawn: how a dialect writes a picture."""
    content = message["content"]
    parts = content if isinstance(content, list) else [said(content)] * bool(content)
    return [drawn(part) if "image" in part else part for part in parts]


def openai(messages: Messages) -> Messages:
    found = []
    for message in messages:
        content = parts_of(message, lambda part: {"type": "image_url", "image_url": {"url": address(part)}})
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        found.append({**message, "content": content or None, **({"tool_calls": calls} if calls else {})})
    return found


def anthropic(messages: Messages) -> Messages:
    found: Messages = []
    for message in messages:
        content = parts_of(message, lambda part: {"type": "image", "source": {**PNG, "data": data(part)}})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            named = {"id": call["id"], "name": function["name"], "input": function["arguments"]}
            content.append({"type": "tool_use", **named})
        if message["role"] == "tool":
            content = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
        found.append({"role": message["role"].replace("tool", "user"), "content": content})
    return found


def responses(messages: Messages) -> Messages:
    found: Messages = []
    for message in messages:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        content = [
            {**part, "type": kind} if part["type"] == "text" else part
            for part in parts_of(message, lambda part: {"type": "input_image", "image_url": address(part)})
        ]
        if message["role"] == "tool":
            found.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
            continue
        if content:
            found.append({"role": message["role"], "content": content})
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"])
            found.append({"type": "function_call", "call_id": call["id"], "name": "look", "arguments": arguments})
    return found


class Local(Engine):
    """What `LocalLink` wants of an engine besides."""

    def __init__(self, folder: Path) -> None:
        options = {"dtype": "float32", "max_total_tokens": 4096, "num_threads": 1, "chunked_prefill_size": 16}
        drafts = {"speculative_algorithm": "NGRAM", "speculative_fixed_shape": True}
        super().__init__(Options.from_kwargs(model=str(folder), **options, **drafts).resolve())


class Family(NamedTuple):
    kind: str
    client: TestClient
    processor: Any


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    kind, theirs = request.param, FAMILIES[request.param]
    folder, settings = write_model(tmp_path_factory.mktemp("turns") / kind, kind), KINDS[kind]
    template = TEMPLATE.replace("IMAGE", theirs.image)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(*SPECIAL), eos_token="<eos>", pad_token="<|pad|>", extra_special_tokens=theirs.names
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *args: None)  # none reads videos
        patch.setattr(gemma4, "_SUPPORTED_SOFT_TOKENS", (16,))
        pictures = getattr(transformers, settings.processor)(**settings.settings)
        processor = theirs.processor(pictures, tokenizer)
        processor.chat_template = template
        with client_of(Local(folder)) as client:  # type: ignore[arg-type]
            yield Family(kind, client, processor)


@torch.inference_mode()
def expected(family: Family, messages: Messages) -> tuple[int, list[int], torch.Tensor]:
    """Tokens of the prompt, those of the answer, up to a special one where it is not the first, and log probabilities
    of all where these stand."""
    asked = family.processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    model, length = reference(family.kind), asked["input_ids"].shape[1]
    model.model.rope_deltas = None
    how = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(**asked, max_new_tokens=TOKENS, **how)
    tokens = out.sequences[0, length:].tolist()
    count = max(next((i for i, token in enumerate(tokens) if token >= EOS), TOKENS), 1)
    return length, tokens[:count], torch.cat(out.logits).log_softmax(-1)[:count]


@pytest.mark.slow
@pytest.mark.further(family=["qwen3.5", "gemma4"])
@pytest.mark.further(family="gemma3", name=["earlier turns", "a tool's result"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_pictures_are_where_transformers_has_them(family: Family, name: str) -> None:
    """In each dialect, turn by turn, so that what was said before is cached."""
    whole = CONVERSATIONS[name]
    turns = [i + 1 for i, message in enumerate(whole) if message["role"] != "assistant"]
    for end in [turn for turn in turns if turn == len(whole) or whole[turn]["role"] == "assistant"]:
        messages = whole[:end]
        length, tokens, known = expected(family, messages)
        text = family.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        body: dict[str, Any] = {"model": "m", "temperature": 0}
        chat = {"messages": openai(messages), "max_tokens": len(tokens), "logprobs": True, "top_logprobs": 4}
        answer = family.client.post("/v1/chat/completions", json={**body, **chat}).raise_for_status().json()
        assert answer["usage"]["prompt_tokens"] == length
        assert (answer["choices"][0]["message"]["content"] or "") == text
        found = answer["choices"][0]["logprobs"]["content"]
        assert [one["logprob"] for one in found] == pytest.approx(known.max(1).values.tolist(), abs=1e-4)
        best = [[other["logprob"] for other in one["top_logprobs"]] for one in found]
        assert torch.allclose(torch.tensor(best), known.topk(4).values, atol=1e-4)
        asked = {"messages": anthropic(messages), "max_tokens": len(tokens)}
        answer = family.client.post("/v1/messages", json={**body, **asked}).raise_for_status().json()
        assert "".join(block.get("text", "") for block in answer["content"]) == text
        asked = {"input": responses(messages), "max_output_tokens": len(tokens)}
        answer = family.client.post("/v1/responses", json={**body, **asked}).raise_for_status().json()
        assert "".join(part["text"] for one in answer["output"] for part in one["content"]) == text
