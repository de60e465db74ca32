"""Answers that are JSON of a given form: only tokens that keep to the schema are allowed, with drafts or without.

python examples/structured_output.py [MODEL]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from draftwing import LLM

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
        "islands": {"type": "boolean"},
    },
    "required": ["name", "continent", "islands"],
    "additionalProperties": False,
}


def main(model: str = "smollm2") -> list[dict[str, Any]]:
    found = []
    with LLM(model=model) as llm:
        chats = [[{"role": "user", "content": f"Describe {name} as JSON."}] for name in ("Japan", "Kenya", "Peru")]
        for answer in llm.chat(chats, {"json_schema": SCHEMA, "temperature": 0, "max_new_tokens": 200}):
            # An answer that reached its length is cut, and then no JSON.
            if answer.finish_reason["type"] == "stop":
                found.append(json.loads(answer.text))
                print(found[-1])
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
