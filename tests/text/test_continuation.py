"""Prompts that end inside of the assistant's last message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers.utils.chat_template_utils import render_jinja_template

from draftwing.errors import RequestError
from draftwing.text.tokenizer import Tokenizer, load_tokenizer

ASKED = [{"role": "user", "content": "Hi"}]


def said(content: Any) -> list[dict[str, Any]]:
    return [*ASKED, {"role": "assistant", "content": content}]


def with_template(template: str) -> Tokenizer:
    return Tokenizer(Backend(models.BPE({"a": 0}, [])), {}, template)


def test_as_transformers_does(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    source = tokenizer.chat_template
    assert source is not None
    for content in ("Sure", "Sure, two\nlines", "1. a"):
        theirs, _ = render_jinja_template(
            [said(content)], None, None, source, continue_final_message=True, **tokenizer.special_tokens
        )
        assert [tokenizer.render_continued(said(content))] == theirs


@pytest.mark.parametrize("trim", ["", " | trim"])
def test_spaces_at_the_end_are_kept(trim: str) -> None:
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content']" + trim + " }}</>{% endfor %}"
    tokenizer = with_template(template + "{% if add_generation_prompt %}<assistant>{% endif %}{{ more }}")
    text = tokenizer.render_continued(said("one two  \n"), more="!")
    assert text == "<user>Hi</><assistant>one two  \n"
    assert tokenizer.render_continued(said("")) == "<user>Hi</><assistant>"


def test_what_cannot_be_continued() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for messages in (ASKED, [], said(None), said([{"type": "text", "text": "a"}])):
        with pytest.raises(RequestError) as info:
            tokenizer.render_continued(messages)
        assert info.value.param == "continue_final_message"
    with pytest.raises(RequestError, match="does not show"):
        with_template("{{ messages[0]['content'] }}").render_continued(said("a"))


@pytest.mark.parametrize("content", ["one  ", "", "two\n", "QcontinuedZ", "a QcontinuedZZQcontinuedZ b"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("last: {{ messages[-1].content }}|{% for m in messages %}<{{ m.content }}>{% endfor %}", "last: %s|<Hi><%s"),
        ("{{ messages | map(attribute='content') | join }}\n{{ messages[-1].content }}.", "Hi%s\n%s"),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<Hi><%s"),
        ("{% for m in messages %}<{{ m.content | map(attribute='text') | join }}>{% endfor %}", "<Hi><%s"),
    ],
)
def test_the_message_is_shown_as_it_is_however_often(template: str, expected: str, content: str) -> None:
    text = with_template(template).render_continued(said(content))
    assert text == expected.replace("%s", content)


def test_a_text_that_looks_like_what_we_mark_its_end_with_costs_no_more_than_another() -> None:
    text = "".join(f"Qcontinued{'Z' * length}" for length in (1, 2, 300_000))
    tokenizer = with_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokenizer.render_continued(said(text)) == f"Hi{text}"
