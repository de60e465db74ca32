"""What clients are told of models that are there, loaded or not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftwing.errors import DraftwingError
from draftwing.files import load_json
from draftwing.models.stored import family_of, reads_images, stored_as
from draftwing.server.ollama import rounded
from draftwing.server.parsers.reasoning import writes_harmony
from draftwing.server.parsers.tools import style_of
from draftwing.server.router.memory import WEIGHTS, model_files
from draftwing.server.router.model import Model
from draftwing.server.router.proxy import ask
from draftwing.text.tokenizer import chat_source

_NEVER = "9999-12-31T23:59:59Z"
# What models do that write no text, by how their architectures' names end.
_SILENT: dict[str, list[str]] = {"ForSequenceClassification": [], "Model": ["embedding"]}


class Listing:
    """Asks servers that run, once for each start, and remembers what they said; the others' files say little."""

    def __init__(self, key: Callable[[], str | None]) -> None:
        """key: returns one that servers take, None where they need none."""
        self._key = key
        self._said: dict[str, tuple[float, dict[str, Any]]] = {}  # by name: of which start, and what

    async def openai(self, model: Model) -> dict[str, Any]:
        """Returns an entry of /v1/models, with llama.cpp's `status`."""
        said = await self._of_server(model)
        card = {"id": model.served.name, "object": "model", "created": int(model.since), "owned_by": "draftwing"}
        takes = {"memory": model.size} if model.ready else {}
        status = {"value": model.state} | takes | ({"failed": True, "error": model.failure} if model.failure else {})
        names = {"aliases": list(model.served.names[1:])} if len(model.served.names) > 1 else {}
        return {**card, **said.get("openai", {}), **names, "path": model.served.model, "status": status}

    def anthropic(self, model: Model) -> dict[str, Any]:
        """Returns an entry of /v1/models for Anthropic's clients."""
        name = model.served.name
        return {"id": name, "type": "model", "display_name": name, "created_at": _written(model.since)}

    async def ollama(self, model: Model) -> dict[str, Any]:
        """Returns an entry of /api/tags."""
        said: dict[str, Any] = (await self._of_server(model)).get("ollama", {})
        return said or await asyncio.to_thread(_from_files, model)

    async def running(self, model: Model) -> dict[str, Any]:
        """Returns an entry of /api/ps."""
        expires = model.expires()
        found = {**await self.ollama(model), "expires_at": _NEVER if math.isinf(expires) else _written(expires)}
        found |= {"size": model.size, "state": model.state, **(await self._of_server(model)).get("running", {})}
        return found | ({"size_vram": 0} if model.asleep else {})

    async def _of_server(self, model: Model) -> dict[str, Any]:
        since, said = self._said.get(model.served.name, (0.0, {}))
        server = model.server
        if model.ready and server is not None and since != model.since:
            since = model.since
            try:
                cards, running = [
                    json.loads(await ask(server.path, path, self._key())) for path in ("/v1/models", "/api/ps")
                ]
                card, known = running["models"][0], ("context_length", "size_vram")
                first = cards["data"][0]
            except (DraftwingError, ValueError, LookupError):
                return said  # it has just ended, or the keys change
            said = {
                "openai": first,
                "running": {name: card[name] for name in known},
                "ollama": {name: value for name, value in card.items() if name not in (*known, "expires_at")}
                | {"modified_at": _written(since)},
            }
            self._said[model.served.name] = since, said
        return said


def show(model: Model) -> dict[str, Any]:
    """Returns what /api/show says of a model that is not loaded, as far as its files say it; blocks."""
    card, about = _from_files(model), _about(model)
    family, template = card["details"]["family"], about.get("template", "")
    context = {f"{family}.context_length": about["context"]} if family and "context" in about else {}
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": card["details"],
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": _stored(model, model_files(model.served))["values"],
            **context,
        },
        "capabilities": about.get("does", ["completion", *_further(model.served.arguments, template, about)]),
        "modified_at": card["modified_at"],
    }


def _further(options: Mapping[str, Any], template: str, about: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the loaded model can do besides writing text, by Ollama's names."""
    harmony = writes_harmony(options.get("reasoning_parser"), options.get("tool_call_parser"), template)
    if "tools" in template and (harmony or options.get("tool_call_parser") or style_of(template)):
        yield "tools"
    if about.get("sees") and not options.get("disable_images"):
        yield "vision"
    if harmony or options.get("reasoning_parser"):
        yield "thinking"


def _from_files(model: Model) -> dict[str, Any]:
    files, name = model_files(model.served), model.served.name
    weights = [file for file in files if file.suffix in WEIGHTS]
    found = _stored(model, files)
    family = family_of(found["architecture"])
    return {
        "name": name,
        "model": name,
        "modified_at": _written(max((file.stat().st_mtime for file in weights), default=0)),
        "size": found["bytes"] or sum(file.stat().st_size for file in weights),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": found["format"],
            "family": family,
            "families": [family] if family else [],
            "parameter_size": rounded(found["values"]),
            "quantization_level": found["type"],
        },
    }


def _stored(model: Model, files: Sequence[Path]) -> dict[str, Any]:
    first = next((file for file in files if file.suffix == ".gguf"), None)
    return stored_as(first or (files[0].parent if files else Path(model.served.model)))


def _about(model: Model) -> dict[str, Any]:
    """Returns context, template and whether it reads images, as far as files say them."""
    files = {file.name: file for file in model_files(model.served)}
    first = next((file for file in files.values() if file.suffix == ".gguf"), None)
    try:
        if first is not None:
            from draftwing.gguf_file import open_gguf

            data = open_gguf(first).metadata
            family = data["general.architecture"]
            found = {"context": data.get(f"{family}.context_length"), "template": _template(model, first)}
            found["does"] = None if data.get(f"{family}.attention.causal", True) else ["embedding"]  # an encoder
            found["sees"] = "mmproj" in model.served.arguments or any(first.parent.glob("mmproj*.gguf"))
        else:
            data = load_json(files["config.json"])
            architecture = str((data.get("architectures") or [""])[0])
            does = next((does for end, does in _SILENT.items() if architecture.endswith(end)), None)
            text = {**data, **(data.get("text_config") or {})}  # of models that read images, too
            found = {"context": text.get("max_position_embeddings"), "does": does}
            found["sees"] = reads_images(data)
            found["template"] = _template(model, files["config.json"].parent) if does is None else ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError, DraftwingError):
        return {}
    return {name: value for name, value in found.items() if value not in (None, "")}


def _template(model: Model, place: Path) -> str:
    """Returns the chat template that the loaded model would have; empty: it has none, or none that can be read."""
    try:
        found = chat_source(place, model.served.arguments.get("chat_template"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, DraftwingError):
        return ""
    return found if isinstance(found, str) else ""


def _written(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
