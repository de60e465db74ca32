"""Translates structural tags as SGLang and xgrammar define them to llguidance's Lark dialect.

Two forms: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, free text in which each trigger starts one
of the structures, and `{"format": {"type": ...}}`, which combines formats. What cannot be expressed is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftwing.grammar.ebnf import GrammarError, to_lark
from draftwing.grammar.limits import lark_regex
from draftwing.grammar.schemas import schema_text

_ANY = "/(?s:.*)/"
_MAX_DEPTH = 50

# Fields of each format besides "type"; those with a value here may be left out, or must have that value where the value
# is in _FIXED.
_FIELDS: dict[str, tuple[set[str], dict[str, Any]]] = {
    "const_string": ({"value"}, {}),
    "json_schema": ({"json_schema"}, {"style": "json"}),
    "any_text": (set(), {"excludes": []}),
    "regex": ({"pattern"}, {"excludes": []}),
    "grammar": ({"grammar"}, {}),
    "sequence": ({"elements"}, {}),
    "or": ({"elements"}, {}),
    "optional": ({"content"}, {}),
    "plus": ({"content"}, {}),
    "star": ({"content"}, {}),
    "repeat": ({"content", "min", "max"}, {}),
    "tag": ({"begin", "content", "end"}, {}),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one": False, "stop_after_first": False, "excludes": []}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one": False, "stop_after_first": False}),
}
_FIXED = {"style", "excludes"}


def to_lark_grammar(tag: Any, special: Mapping[str, int], json_options: Mapping[str, Any]) -> str:
    """Translates the structural tag `tag`, a parsed JSON document. Raises GrammarError.

    special: ids of the special tokens; text that spells one stands for the token.
    json_options: how JSON is written, llguidance's `x-guidance`.
    """
    if not isinstance(tag, dict):
        raise GrammarError("expected a JSON object")
    if tag.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"expected the type 'structural_tag', found {tag['type']!r}")
    if "format" in tag:
        _no_others(tag, {"type", "format"}, "structural_tag")
        form = tag["format"]
    else:
        _no_others(tag, {"type", "structures", "triggers"}, "structural_tag")
        form = _from_structures(tag.get("structures"), tag.get("triggers"))
    writer = _Writer(special, json_options)
    start = writer.write(form, last=True)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])


def _no_others(found: dict[str, Any], known: set[str], where: str) -> None:
    if others := sorted(found.keys() - known):
        raise GrammarError(f"{where}: {others[0]!r} is not supported")


def _from_structures(structures: Any, triggers: Any) -> dict[str, Any]:
    if not isinstance(structures, list) or not structures:
        raise GrammarError("expected 'structures', a list of {begin, schema, end}, or 'format'")
    tags = []
    for item in structures:
        if not isinstance(item, dict) or not {"begin", "schema", "end"} <= item.keys():
            raise GrammarError("structures: expected objects with 'begin', 'schema' and 'end'")
        _no_others(item, {"begin", "schema", "end"}, "structures")
        schema = item["schema"]
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise GrammarError(f"structures: 'schema' is not JSON: {error}") from None
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": item["begin"], "content": content, "end": item["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Writer:
    """Collects rules; `write` gives an expression that uses them."""

    def __init__(self, special: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self.json_options = json_options
        self.special = special
        names = sorted((name for name in special if name), key=len, reverse=True)
        self.split = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.depth = 0

    def rule(self, body: str, lazy: bool = False) -> str:
        name = f"s{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' * lazy}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = f"S{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def text(self, text: str) -> str:
        """Writes text as it is, but for special tokens."""
        parts, at = [], 0
        for match in self.split.finditer(text):
            parts += [json.dumps(text[at : match.start()], ensure_ascii=False)] if match.start() > at else []
            parts.append(f"<[{self.special[match.group()]}]>")
            at = match.end()
        parts += [json.dumps(text[at:], ensure_ascii=False)] if text[at:] else []
        return " ".join(parts) or '""'

    def write(self, form: Any, last: bool) -> str:
        """Returns an expression for a format. last: whether nothing follows, so that free text has an end."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise GrammarError(f"formats are nested more than {_MAX_DEPTH} deep")
        kind, fields = _fields(form)
        expression = self._expression(kind, fields, last)
        self.depth -= 1
        return expression

    def _expression(self, kind: str, fields: dict[str, Any], last: bool) -> str:
        match kind:
            case "const_string":
                return self.text(_string(fields["value"], "const_string.value"))
            case "json_schema":
                return self.rule("%json " + schema_text(fields["json_schema"], self.json_options))
            case "any_text" if last:
                return self.terminal(_ANY)
            case "any_text":
                raise GrammarError("any_text is supported at the end, and in a tag that ends with a text")
            case "regex":
                return self.terminal(f"/{lark_regex(_string(fields['pattern'], 'regex.pattern'))}/")
            case "grammar":
                return self.rule("%lark {\n" + to_lark(_string(fields["grammar"], "grammar.grammar")) + "\n}")
            case "sequence":
                elements = _list(fields["elements"], "sequence.elements")
                final = len(elements) - 1
                return self.rule(" ".join(self.write(e, last and i == final) for i, e in enumerate(elements)))
            case "or":
                return self.rule(" | ".join(self.write(e, last) for e in _list(fields["elements"], "or.elements")))
            case "optional":
                return f"({self.write(fields['content'], last)})?"
            case "plus" | "star":
                return f"({self.write(fields['content'], False)}){'+' if kind == 'plus' else '*'}"
            case "repeat":
                low, high = fields["min"], fields["max"]
                if not (type(low) is type(high) is int and low >= 0 and (high >= low or high == -1)):
                    raise GrammarError("repeat: expected integers min <= max, or -1 as max for no limit")
                return f"({self.write(fields['content'], False)}){{{low},{'' if high == -1 else high}}}"
            case "tag":
                return self.tag(fields, _string(fields["begin"], "tag.begin"), last)
            case "triggered_tags":
                return self._triggered_tags(fields, last)
        assert kind == "tags_with_separator", kind
        return self._tags_with_separator(fields)

    def tag(self, fields: dict[str, Any], begin: str, last: bool) -> str:
        ends = fields["end"] if isinstance(fields["end"], list) else [fields["end"]]
        ends = [_string(end, "tag.end") for end in _list(ends, "tag.end")]
        content = fields["content"]
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            _fields(content)
            return f"{self.text(begin)} ({' | '.join(self._until(end) for end in ends)})"
        inside = self.write(content, last and ends == [""])
        return self.rule(f"{self.text(begin)} {inside} ({' | '.join(self.text(end) for end in ends)})")

    def _until(self, text: str) -> str:
        """Free text up to the first `text`, which may begin with special tokens."""
        special = self.split.match(text)
        if special is not None:
            return self.rule(f"{self.terminal(_ANY)} {self.text(text)}")
        if self.split.search(text) is not None:
            raise GrammarError(f"{text!r} ends free text: special tokens in it must come first")
        return self.rule(f"{self.terminal(_ANY)} {json.dumps(text, ensure_ascii=False)}", lazy=True)

    def _triggered_tags(self, fields: dict[str, Any], last: bool) -> str:
        if not last and not fields["stop_after_first"]:
            raise GrammarError("triggered_tags is supported at the end, where free text may follow it")
        triggers = [_string(t, "triggers") for t in _list(fields["triggers"], "triggers")]
        after: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in _list(fields["tags"], "tags"):
            kind, inner = _fields(tag, "tag")
            begin = _string(inner["begin"], "tag.begin")
            fitting = [t for t in after if t and begin.startswith(t)]
            if kind != "tag" or len(fitting) != 1:
                raise GrammarError(f"expected one trigger that the tag {begin!r} starts with, found {len(fitting)}")
            after[fitting[0]].append(self.tag(inner, begin[len(fitting[0]) :], False))
        calls = [
            self.rule(f"{self._until(trigger)} ({' | '.join(bodies)})") for trigger, bodies in after.items() if bodies
        ]
        call, text = self.rule(" | ".join(calls)), self.terminal(_ANY)
        if fields["stop_after_first"]:
            return call if fields["at_least_one"] else self.rule(f"{call} | {text}")
        return self.rule(f"({call}){'+' if fields['at_least_one'] else '*'} {text}")

    def _tags_with_separator(self, fields: dict[str, Any]) -> str:
        tag = self.rule(" | ".join(self.write(t, False) for t in _list(fields["tags"], "tags")))
        separator = self.text(_string(fields["separator"], "separator"))
        many = tag if fields["stop_after_first"] else self.rule(f"{tag} ({separator} {tag})*")
        return many if fields["at_least_one"] else f"({many})?"


def _fields(form: Any, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """Type of a format and its fields, with those that were left out."""
    if not isinstance(form, dict):
        raise GrammarError("expected a format, an object with a 'type'")
    kind = form.get("type", default)
    if kind not in _FIELDS:
        raise GrammarError(f"the format {kind!r} is not supported; supported are {', '.join(_FIELDS)}")
    required, defaults = _FIELDS[kind]
    if missing := sorted(required - form.keys()):
        raise GrammarError(f"{kind}: {missing[0]!r} is missing")
    _no_others(form, {"type", *required, *defaults}, kind)
    fields = {**defaults, **form}
    for name in _FIXED & defaults.keys():
        if fields[name] != defaults[name]:
            raise GrammarError(f"{kind}: {name!r} is not supported")
    return kind, fields


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise GrammarError(f"{name}: expected a string, found {type(value).__name__}")
    return value


def _list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{name}: expected a list that is not empty")
    return value
