"""Chat templates against transformers' own renderer, and the token that ends a turn."""

import concurrent.futures
import signal
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers.utils.chat_template_utils import render_jinja_template

from draftwing.errors import CheckpointError, RequestError
from draftwing.text import chat_template, sandbox
from draftwing.text.chat_template import ChatTemplate
from draftwing.text.tokenizer import Tokenizer

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + system }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

BLOCKS = """{% for message in messages %}
  {% if message.role == 'assistant' %}
    {% generation %}
[{{ message.content }}]{{ eos_token }}
    {% endgeneration %}
  {% else %}
<{{ message | tojson }}>
  {% endif %}
{% endfor %}
{{ "go" if add_generation_prompt }}{{ missing_variable }}"""

MESSAGES = [
    {"role": "system", "content": " Be <brief> & 'good' "}, {"role": "user", "content": "日本語 <b>?</b>\n"},
    {"role": "skip", "content": "-"}, {"role": "assistant", "content": "ok"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": "<x>"}}}]


@pytest.mark.parametrize("source", [CHATML, LLAMA3, BLOCKS])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_equals_transformers(source: str, prompt: bool, tools: Any) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(source, special).render(MESSAGES, prompt, tools)
    theirs, _ = render_jinja_template([MESSAGES], tools, None, source, add_generation_prompt=prompt, **special)
    assert ours == theirs[0]
    assert "日本語" in ours


def test_variables_and_functions() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }} {{ thinking }} {{ bos_token }}", {"bos_token": "<s>"})
    year, thinking, bos = template.render([], thinking=False).split()
    assert len(year) == 4 and year.isdigit() and thinking == "False" and bos == "<s>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "chat template refuses"),
        ("{{ messages[9].content }}", "chat template refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template refuses"),
        ("{{ messages.append(1) }}", "chat template refuses"),
        ("{% for i in range(10**9) %}{% endfor %}", "chat template refuses"),
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 2 s",
            marks=pytest.mark.exhaustive,  # see tests/server/test_attacks.py
        ),
        ("{{ messages[0].content * 10**10 }}", "more than 1024 MiB"),
        ("{{ messages[0].content * 10**7 * 2 }}", "more than 16777216 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
    ],
)  # fmt: skip
def test_errors_of_a_template_are_the_requests(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert error.value.param == "messages"


def test_a_wrong_template_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(  # found by the probe
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            marks=pytest.mark.exhaustive,
        ),
        "{{ 9 ** (9 ** 9) }}",  # made when it is compiled
        "{{ " + "(" * 100_000,
    ],
)
def test_an_endless_template_is_refused_when_it_is_loaded(source: str) -> None:
    with pytest.raises(CheckpointError, match="--chat-template") as error:
        assert ChatTemplate(source, {}).turn_suffix
    assert str(error.value).startswith("the chat template ") and "\n" not in str(error.value)


def test_processes_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: template.render([{"content": f"{i} \ud800"}]), range(200)))
    assert texts == [f"{i} \ufffd" for i in range(200)]
    there = len(chat_template._sandbox._idle)
    assert 1 <= there <= 8
    monkeypatch.setattr(sandbox, "_Process", None)
    for _ in range(10):
        template.render([{"content": "a"}])
    assert len(chat_template._sandbox._idle) == there


@pytest.mark.slow
def test_a_process_that_others_end_says_nothing_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.render([{"content": "a"}])
    for process in chat_template._sandbox._idle:
        process._process.kill()
        process._process.wait()
    assert template.render([{"content": "b"}]) == "b"

    class Doomed(sandbox._Process):
        def ask(self, job: bytes, most: int) -> tuple[bytes, bytes]:
            self._process.kill()
            return super().ask(job, most)

    monkeypatch.setattr(chat_template._sandbox, "_idle", [])
    monkeypatch.setattr(sandbox, "_Process", Doomed)
    with pytest.raises(chat_template.TemplateLimit, match=r"the chat template ended its process \(SIGKILL\), twice"):
        template.render([{"content": "c"}])


def test_a_process_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    monkeypatch.setattr(chat_template._sandbox, "_idle", [sandbox._Process(chat_template._sandbox._module)])
    monkeypatch.setattr(sandbox, "PATIENCE", 0.2)
    chat_template._sandbox._idle[0]._process.send_signal(signal.SIGSTOP)
    with pytest.raises(chat_template.TemplateLimit, match=r"the chat template takes longer than 0.2 s"):
        template.render([{"content": "a"}])
    assert not chat_template._sandbox._idle


def test_what_is_no_plain_value() -> None:
    with pytest.raises(RequestError, match="plain values"):
        ChatTemplate("{{ f }}", {}).render([], f=lambda: None)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, 7), (LLAMA3, 8),
        ("{% for m in messages %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endfor %}", 2),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content + ' and ' + eos_token }}{% endfor %}", None),
        ("{{ messages[0].content }}", None), ("{{ raise_exception('no') }}", None),
    ],
)  # fmt: skip
def test_end_of_turn(source: str, expected: int | None) -> None:
    specials = {"</s>": 2, "<|im_end|>": 7, "<|eot_id|>": 8}
    backend = Backend(models.WordLevel({"other": 0} | specials, unk_token="other"))
    backend.add_special_tokens([*specials])
    assert Tokenizer(backend, {"eos_token": "</s>"}, source).stop_ids == {2, expected or 2}


EVERY = {"system", "user", "assistant", "tool"}
LISTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
PARTS: list[Any] = [
    # A template, and the roles whose content it takes as a list.
    (LISTS + "{% endfor %}</>{% endfor %}", EVERY),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content[0]['text'] }}</>{% endfor %}", EVERY),
    (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content | map(attribute='text') | join }}"
        "{% else %}{{ m.content }}{% endif %}</>{% endfor %}",
        {"user"},
    ),
    (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% for p in m.content %}{{ p['text'] }}{% endfor %}{% else %}{{ '' + m.content }}{% endif %}</>{% endfor %}",
        {"assistant"},
    ),
    (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}</>{% endfor %}",
        set(),
    ),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}", set()),
]  # fmt: skip


@pytest.mark.parametrize(("source", "roles"), PARTS)
def test_content_in_the_form_that_the_template_wants(source: str, roles: set[str]) -> None:
    messages = [{"role": role, "content": f"Text of {role}: é\n"} for role in ("system", "user", "assistant", "tool")]
    template = ChatTemplate(source, {})
    text = template.render(messages, add_generation_prompt=False)
    assert text == "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
    shaped = [{**m, "content": [{"type": "text", "text": m["content"]}]} if m["role"] in roles else m for m in messages]
    assert [text] == render_jinja_template([shaped], None, None, source)[0]
    given = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    if "user" in roles:
        assert template.render(given) == "<user>a</>", "lists stay as they are"
    assert template.turn_suffix == "</>"


def test_a_template_that_shows_nothing_is_given_strings() -> None:
    assert ChatTemplate("{{ messages[0].content is string }}", {}).render([{"role": "user", "content": "a"}]) == "True"


@pytest.mark.parametrize("source", [r"{{ '\ud83d' }}x", r"x{{ '\udc00\ud83d' }}", r"{{ '\ud83d\ude00' }}"])
def test_halves_of_characters_do_not_come_out(source: str) -> None:
    ChatTemplate(source, {}).render([]).encode()
