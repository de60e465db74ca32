"""Structural tags: what they accept and refuse."""

import json

import pytest

from draftwing.errors import RequestError
from draftwing.requests.grammar_field import Grammar

INT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=foo>", "schema": INT, "end": "</function>"},
        {"begin": "<function=bar>", "schema": {"type": "object"}, "end": "</function>"},
        {"begin": "[[", "schema": {"type": "array"}, "end": "]]"},
    ],
    "triggers": ["<function=", "[["],
}
CALL = {"type": "tag", "begin": "<|call|>f", "content": {"type": "json_schema", "json_schema": INT}, "end": "<|call|>"}
FOO = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</a>"}
EITHER = {"type": "tag", "begin": "{", "content": {"type": "any_text"}, "end": ["}", "]"]}


def form(kind, **fields):
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


CASES = [
    (
        LEGACY,
        [
            "", "free <function text", '<function=foo>{"x": 1}</function>',
            'a<function=foo>{"x":1}</function> b [[[1]]] c',
        ],
        ["<function=", "<function=baz>", "<function=foo>{}</function>", '<function=foo>{"x": 1}', "[[{}]]"],
    ),
    (form("const_string", value='a "b"\n'), ['a "b"\n'], ["a", 'a "b"\nc']), (form("any_text"), ["", "x\ny é"], []),
    (form("json_schema", json_schema=INT), ['{"x": 2}'], ["{}"]),
    (form("regex", pattern="a/b+"), ["a/bb"], ["a", "a/"]),
    (form("grammar", grammar='root ::= "(" root ")" | ""'), ["", "(())"], ["(()"]),
    (
        form("sequence", elements=[FOO, EITHER, {"type": "any_text"}]), ["<a>1</a>{x}y", "<a>1</a>{]"],
        ["<a></a>{}", "{}"],
    ),
    (form("or", elements=[FOO, {"type": "const_string", "value": "no"}]), ["<a>12</a>", "no"], ["", "<a>12"]),
    (form("optional", content=FOO), ["", "<a>1</a>"], ["<a>1</a><a>1</a>"]),
    (form("star", content=FOO), ["", "<a>1</a><a>2</a>"], ["<a>"]),
    (form("plus", content=FOO), ["<a>1</a>", "<a>1</a><a>2</a>"], [""]),
    (form("repeat", content=FOO, min=2, max=3), ["<a>1</a>" * 2, "<a>1</a>" * 3], ["<a>1</a>", "<a>1</a>" * 4]),
    (form("repeat", content=FOO, min=1, max=-1), ["<a>1</a>" * 7], [""]),
    (form("tags_with_separator", tags=[FOO], separator=", "), ["", "<a>1</a>, <a>2</a>"], ["<a>1</a>,", "x"]),
    (form("tags_with_separator", tags=[FOO], separator=",", at_least_one=True), ["<a>1</a>"], [""]),
    (
        form("tags_with_separator", tags=[FOO], separator=",", stop_after_first=True), ["", "<a>1</a>"],
        ["<a>1</a>,<a>1</a>"],
    ),
    (form("triggered_tags", triggers=["<"], tags=[FOO]), ["", "x<a>1</a>y"], ["x<", "<b>"]),
    (form("triggered_tags", triggers=["<a"], tags=[FOO], at_least_one=True), ["x<a>1</a>y"], ["", "x"]),
    (form("triggered_tags", triggers=["<a"], tags=[FOO], stop_after_first=True), ["", "x<a>1</a>"], ["<a>1</a>y"]),
]  # fmt: skip


@pytest.mark.parametrize("tag, good, bad", CASES, ids=range(len(CASES)))
def test_what_is_accepted(byte_vocab, tag, good, bad):
    tokens = {chr(b): byte_vocab.bytes.index(bytes([b])) for b in range(128)}

    def by_character(text):
        """Without forced text, which the tokenizer would cut differently."""
        state = byte_vocab.compiler.compile(Grammar("structural_tag", json.dumps(tag)))
        ids = [tokens.get(c, t) for c in text for t in ([0] if c in tokens else byte_vocab.encode(c))]
        return state._matcher.try_consume_tokens(ids) == len(ids) and state.may_end

    for text in good:
        assert by_character(text), text
    for text in bad:
        assert not by_character(text), text


def test_special_tokens_are_tokens(vocab):
    tag = form("triggered_tags", triggers=["<|call|>"], tags=[CALL])
    call = vocab.tokenizer.backend.token_to_id("<|call|>")
    root = vocab.compiler.compile(Grammar("structural_tag", json.dumps(tag)))
    state = root.fork()
    for part in [b"text ", call, b'f{"x": 3}', call, b" more"]:
        if isinstance(part, int):
            assert state.advance(part)
        while isinstance(part, bytes) and part:  # however the text is cut: the longest legal token
            fits = [t for t in vocab.bits(state.mask()) if part.startswith(vocab.bytes[t] or b"none")]
            assert fits, part
            token = max(fits, key=lambda t: len(vocab.bytes[t]))
            assert state.advance(int(token))
            part = part[len(vocab.bytes[token]) :]
    assert state.may_end
    for text, whole in [("text", True), ("text <|call|>", False)]:
        assert vocab.accepts(root, text) == whole
    state = root.fork()
    assert call in vocab.bits(state.mask())
    # Spelled out it is plain text, not the token.
    spelled = [vocab.bytes.index(bytes([b])) for b in b"<|call|>x"]
    assert state.run(spelled) == len(spelled) and state.may_end
    assert state.advance(call) and not state.may_end


@pytest.mark.parametrize(
    "tag, reason",
    [
        (form("qwen_xml_parameter", json_schema={}), "not supported"),
        (form("any_text", excludes=["x"]), "'excludes' is not supported"),
        (form("any_text", max_tokens=3), "'max_tokens' is not supported"),
        (form("json_schema", json_schema={}, style="qwen_xml"), "'style'"),
        (form("regex"), "'pattern' is missing"),
        (form("sequence", elements=[]), "not empty"),
        (form("sequence", elements=[{"type": "any_text"}, FOO]), "any_text"),
        (form("triggered_tags", triggers=["x"], tags=[FOO]), "found 0"),
        (form("triggered_tags", triggers=["<", "<a"], tags=[FOO]), "found 2"),
        ({"type": "other", "format": {}}, "other"),
        ({"structures": [{"begin": "a", "end": "b"}], "triggers": ["a"]}, "structures"),
        ({**LEGACY, "strict": True}, "'strict' is not supported"),
        ({**LEGACY, "triggers": None}, "triggers"),
    ],
)
def test_what_is_not_supported_is_refused(byte_vocab, tag, reason):
    with pytest.raises(RequestError, match=reason) as error:
        byte_vocab.compiler.compile(Grammar("structural_tag", json.dumps(tag)))
    assert error.value.param == "structural_tag"
