"""Who answers in a terminal: a server over HTTP (`Remote`), or an engine of this process (`InProcess`)."""

from __future__ import annotations

import contextlib
import dataclasses
import urllib.parse
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwing.cli.client import Client, ServerError, part
from draftwing.config.drafters import NO_DRAFTER
from draftwing.engine.session import Session
from draftwing.errors import listed
from draftwing.images.parts import pictures_of, shown
from draftwing.images.reader import filled, placed
from draftwing.llm_inputs import read_messages
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

Messages = list[dict[str, Any]]  # as of /v1/chat/completions
Fields = Mapping[str, Any]  # sampling parameters that the user has set, by their names in `SamplingParams`
CHAT_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # of /v1/chat/completions, where others


class Piece(NamedTuple):
    """New text of an answer. reasoning: whether it is what the model thinks before the answer."""

    text: str
    reasoning: bool = False


@dataclass
class Usage:
    """Counts of an answer so far. acceptance_length: None while it is not known, or without drafts."""

    tokens: int = 0
    acceptance_length: float | None = None
    finish: str | None = None


class Remote:
    """A running server. Raises ServerError where there is none, or none with this model. info: facts as in
    /server_info, of which any may be missing."""

    def __init__(self, client: Client, model: str | None = None) -> None:
        """model: of several; None: the first one."""
        self._client = client
        answer = client.get("/v1/models")
        if answer.get("data") == []:
            raise ServerError("the server has no models")
        part(answer, ("data", 0, "id"), "/v1/models")
        cards = [card for card in answer["data"] if isinstance(card, dict) and "id" in card]
        names = [str(name) for card in cards for name in (card["id"], *(card.get("aliases") or ()))]
        if model is not None and model not in names:
            raise ServerError(f"the server has no model {model!r}; it has {listed(names)}")
        self.info: Mapping[str, Any] = {"served_model_name": model or names[0]}
        with contextlib.suppress(ServerError):  # it may be another engine's
            asked = urllib.parse.quote(self.info["served_model_name"], safe="")
            self.info = {**client.get(f"/server_info?model={asked}"), **self.info}

    def answer(self, messages: Messages, fields: Fields, usage: Usage) -> Generator[Piece, None, None]:
        """Yields an answer as it comes, and keeps `usage` up to date. To close the generator aborts the request."""
        body = {"model": self.info["served_model_name"], "messages": messages, **chat_fields(fields)}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        for event in self._client.stream("/v1/chat/completions", body):
            usage.tokens = (event.get("usage") or {}).get("completion_tokens", usage.tokens)
            drafted = (event.get("metrics") or {}).get("speculative_decoding") or {}
            usage.acceptance_length = drafted.get("mean_acceptance_length", usage.acceptance_length)
            for choice in event.get("choices", ()):
                usage.finish = choice.get("finish_reason") or usage.finish
                delta = choice.get("delta", {})
                for name, reasoning in (("reasoning_content", True), ("content", False)):
                    if delta.get(name):
                        yield Piece(delta[name], reasoning)


class InProcess:
    """An engine of this process, as `Remote`."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._session = engine, Session(engine)
        info = engine.info
        self.info: Mapping[str, Any] = {
            **{spec.name: getattr(info.options, spec.name) for spec in dataclasses.fields(info.options)},
            **info.options.label,
            "served_model_name": info.model_name,
            "speculative_algorithm": info.options.drafter,
            "weight_bytes": info.weight_bytes,
            "device": info.device,
            "dtype": info.dtype,
            "context_length": info.context_length,
            "sampling_defaults": info.defaults,
        }

    def answer(self, messages: Messages, fields: Fields, usage: Usage) -> Generator[Piece, None, None]:
        engine = self._engine
        params = SamplingParams.read(fields, defaults={"max_new_tokens": None, **engine.info.defaults})
        read = read_messages(messages)
        text = engine.tokenizer.render_chat(shown(read))
        prompt = filled(text, pictures_of(read), engine.info.images)
        ids, images = placed(engine.tokenizer.encode(prompt.text, add_special_tokens=False), prompt, engine.info.images)
        if "max_new_tokens" not in fields:
            params = params.fit(engine.info.context_length - len(ids))
        (answer,) = answers = self._session.prepare([GenerationRequest("", ids, params, images=images)])
        with closing(self._session.stream(answers)) as pieces:
            for _, text in pieces:
                usage.tokens = len(answer.token_ids)
                if answer.finish_reason is not None:
                    usage.finish = answer.finish_reason["type"]
                    if engine.info.speculates:
                        usage.acceptance_length = answer.meta["spec_accept_length"]
                if text:
                    yield Piece(text)


Answerer = Remote | InProcess


def chat_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields with their names in /v1/chat/completions."""
    return {CHAT_NAMES.get(name, name): value for name, value in fields.items()}


def described(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what a user wants to know of a model: names, and values in words."""
    weights: Mapping[str, int] = info.get("weight_bytes") or {}
    quantisation = max(weights, key=lambda name: weights[name]) if weights else info.get("dtype")
    kind = ", ".join(str(part) for part in (quantisation, info.get("device")) if part)
    found = [("model", f"{info['served_model_name']} ({kind})" if kind else str(info["served_model_name"]))]
    if (drafter := info.get("speculative_algorithm")) is not None:
        found.append(("drafter", _drafter(str(drafter), info)))
    if info.get("context_length"):
        found.append(("context", f"{info['context_length']} tokens"))
    if info.get("simulated"):
        found.append(("SIMULATED", ", ".join(info["simulated"])))
    return found


def _drafter(name: str, info: Mapping[str, Any]) -> str:
    if name == NO_DRAFTER.name:
        return "none: no speculation"
    draft = info.get("speculative_draft_model_path")
    if draft is None:
        return name
    bundled = ("draftwing", "heads") in pairwise(PurePath(draft).parts)  # of this package, or of the server's
    return f"{name} ({'bundled head' if bundled else draft})"
