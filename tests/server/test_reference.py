"""The page at /docs has every endpoint and field of the OpenAPI document, and asks nobody for anything."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest
from fastapi.testclient import TestClient


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_page_has_all_endpoints_and_needs_nobody(path: str, client: TestClient) -> None:
    response, document = client.get(path), client.get("/openapi.json").json()
    text = response.text
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for tag, attributes in Elements(text).found:
        assert tag not in ("script", "link", "img", "iframe")
        assert not any("//" in (value or "") for value in attributes.values())
    sections = [unescape(part) for part in re.findall("<details>.*?</details>", text, re.DOTALL)]
    count = 0
    for place, methods in document["paths"].items():
        for method, operation in methods.items():
            (section,) = [s for s in sections if f"<b>{method.upper()}</b> <code>{place}</code>" in s]
            count += 1
            content = operation.get("requestBody", {"content": {}})["content"]
            for name in content.get("application/json", {}).get("schema", {}).get("properties", ()):
                assert f"<td><code>{name}</code>" in section, (place, name)
    assert count == len(sections) > 20
