"""Adapters (LoRA) are loaded and unloaded while serving, by vLLM's and SGLang's routes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field, RootModel

from draftwing.config.adapters import AdapterCard, check_name
from draftwing.errors import ConfigError, RequestError
from draftwing.models.adapters.files import FILES, folder_of
from draftwing.requests.refusals import show
from draftwing.server.endpoints import read_body, schema
from draftwing.server.schema import AdapterName, AdapterScale, Body
from draftwing.server.service import Service


class LoadAdapterRequest(Body, hints="base_model_name lora_int_id pinned is_3d_lora_weight"):
    """Body of /v1/load_lora_adapter and /load_lora_adapter. lora_path: below the folder of --lora-dir."""

    lora_name: AdapterName
    lora_path: AdapterName
    load_inplace: bool | None = None


class UnloadAdapterRequest(Body, hints="lora_int_id"):
    """Body of /v1/unload_lora_adapter and /unload_lora_adapter."""

    lora_name: AdapterName


class ScalesRequest(RootModel[Annotated[list[AdapterScale], Field(max_length=256)]]):
    """Body of /lora-adapters."""


def path_below(folder: str | None, asked: str) -> Path:
    """Returns the place of an adapter that a client names. Raises RequestError for one that is not below the folder,
    or has a file that is not, whatever links say."""
    if folder is None:
        raise RequestError(
            "no adapter is loaded while serving: start with --lora-dir FOLDER, below which they are", "lora_path"
        )
    root = Path(folder).expanduser().resolve()
    try:
        path = (root / asked).resolve(strict=True)
        files = [folder / name for folder in (path, folder_of(path)) for name in FILES]
        places = [path, *(file.resolve() for file in files if file.exists())]
    except (OSError, ValueError, RuntimeError):  # a link to itself, a NUL
        found = f"found none at {show(asked)}"
        raise RequestError(f"lora_path: expected a folder below --lora-dir, {found}", "lora_path") from None
    if path == root or not all(place.is_relative_to(root) for place in places):
        raise RequestError(f"lora_path: expected a path below --lora-dir, found {show(asked)}", "lora_path")
    return path


def add_adapter_routes(app: FastAPI, service: Service) -> None:
    engine, options = service.engine, service.options

    async def load(request: Request) -> AdapterCard:
        body = await read_body(request, LoadAdapterRequest)
        try:
            name = check_name(body.lora_name, options.model_names)
        except ConfigError as error:
            raise RequestError(str(error), "lora_name") from None
        path = await asyncio.to_thread(path_below, options.lora_dir, body.lora_path)
        new = name not in engine.adapters
        card = await engine.load_adapter(name, path, bool(body.load_inplace))  # also for a client that goes away
        if new:
            service.lora_scales.pop(name, None)  # it was of one that has been unloaded
        return card

    async def unload(request: Request) -> str:
        body = await read_body(request, UnloadAdapterRequest)
        await engine.unload_adapter(body.lora_name)
        return body.lora_name

    def loaded() -> dict[str, Any]:
        paths = {name: card.path for name, card in engine.adapters.items()}
        return {"success": True, "error_message": "", "loaded_adapters": paths}

    def listed() -> list[dict[str, Any]]:
        scales, cards = service.lora_scales, engine.adapters
        return [
            {"id": id, "name": name, "path": cards[name].path, "scale": scales.get(name, 0.0)}
            for id, name in service.adapter_numbers.items()
        ]

    @app.get("/lora-adapters")
    async def lora_adapters() -> list[dict[str, Any]]:
        """Returns all adapters, as llama.cpp does, with the scale that each has in requests which ask for none."""
        return listed()

    @app.post("/lora-adapters")
    async def scale_adapters(request: Request) -> list[dict[str, Any]]:
        """Sets the scales of adapters in requests that ask for none; those that are left out have 0."""
        body = await read_body(request, ScalesRequest)
        service.lora_scales = service.scales_of(body.root, "scale") or {}
        return listed()

    @app.post("/v1/load_lora_adapter", openapi_extra=schema(LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> Response:
        card = await load(request)
        return PlainTextResponse(f"Success: LoRA adapter {card.name!r} is loaded.\n")

    @app.post("/v1/unload_lora_adapter", openapi_extra=schema(UnloadAdapterRequest))
    async def unload_lora_adapter(request: Request) -> Response:
        return PlainTextResponse(f"Success: LoRA adapter {await unload(request)!r} is unloaded.\n")

    @app.post("/load_lora_adapter", openapi_extra=schema(LoadAdapterRequest))
    async def load_as_sglang(request: Request) -> dict[str, Any]:
        await load(request)
        return loaded()

    @app.post("/unload_lora_adapter", openapi_extra=schema(UnloadAdapterRequest))
    async def unload_as_sglang(request: Request) -> dict[str, Any]:
        await unload(request)
        return loaded()
