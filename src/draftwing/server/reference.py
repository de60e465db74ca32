"""The page at `/docs`: what can be asked, made from the OpenAPI document. It needs nothing but what it holds."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from draftwing.server.http import dialect

_TITLES = {
    "openai": "OpenAI's API, and what other servers have added to it",
    "responses": "OpenAI's Responses API",
    "anthropic": "Anthropic's API",
    "ollama": "Ollama's API",
    "native": "SGLang's API, and the server itself",
}
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .2rem 0; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0; overflow-wrap: anywhere; }
code { font-family: ui-monospace, monospace; }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def add_reference(app: FastAPI) -> None:
    """Adds the page, under the two names that FastAPI has for such. The application was made without them."""

    @cache
    def made() -> str:
        return "\n".join(_page(app.openapi()))

    for path in ("/docs", "/redoc"):

        @app.get(path, include_in_schema=False)
        async def page() -> HTMLResponse:
            return HTMLResponse(made(), headers=_HEADERS)


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    about = document["info"]
    title = escape(f"{about['title']} {about['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    yield '<meta name="viewport" content="width=device-width">'
    yield f'<main><h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
    for kind, heading in _TITLES.items():
        paths = {path: methods for path, methods in document["paths"].items() if dialect(path) == kind}
        if paths:
            yield f"<h2>{heading}</h2>"
        for path, methods in paths.items():
            for method, operation in methods.items():
                yield from _operation(path, method, operation)
    yield "</main></html>"


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code></summary>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields = [(one["name"], one["in"], one.get("required"), one["schema"]) for one in operation.get("parameters", ())]
    needed = body.get("required", ())
    fields += [(name, "body", name in needed, schema) for name, schema in body.get("properties", {}).items()]
    if fields:
        yield "<table><tr><th>field<th>in<th>type<th>default</tr>"
    for name, where, required, schema in fields:
        default = "required" if required else _value(schema.get("default"))
        cells = (f"<code>{escape(name)}</code>", where, escape(_type(schema)), escape(default))
        yield f"<tr><td>{'<td>'.join(cells)}</tr>"
    yield f"{'</table>' if fields else ''}</details>"


def _value(default: Any) -> str:
    return "" if default is None else str(default)


def _type(schema: Mapping[str, Any]) -> str:
    """Returns a JSON schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return " or ".join(map(repr, values))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))
