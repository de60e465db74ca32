"""What the endpoints work on: the engine, the tokenizer, the names that requests use, and answers while they grow."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from draftwing.core import TokenLogprobs
from draftwing.engine.receipts import make_receipt
from draftwing.engine.session import prepare
from draftwing.errors import GenerationError, NotFound, RequestError, listed
from draftwing.grammar.compiler import Translator
from draftwing.images.fetch import Fetcher, is_address
from draftwing.images.reader import Picture
from draftwing.learn.traffic import ANONYMOUS, names_of
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.edge.keys import client, client_name
from draftwing.server.engine_client import AsyncEngine
from draftwing.server.learning import Collector, Deleted, Learning
from draftwing.server.parsers.reasoning import Reasoning
from draftwing.server.quotas import check_receipts, first_logprobs, fit_logprobs
from draftwing.server.schema import GenerationBody, split_prompts
from draftwing.server.worker_pools import WorkerPools
from draftwing.text.answer import Answer
from draftwing.text.detok import TokenTexts
from draftwing.text.tokenizer import Tokenizer, bad_word_ids, encode_bounded

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_ANSWERS = 2048  # prompts times n
MAX_BODY, MAX_BODY_WITH_IMAGES = 4 << 20, 32 << 20  # bytes, where no option says
MAX_COMPILED = 64  # grammars that the engine need not be asked about; it keeps more
MAX_COUNTED = 2**18  # tokens of a text that /tokenize takes, though the context be shorter
_MAX_LOGGED_MODELS = 100  # names of other models that are asked for, each logged once
_ANSWERS_AT_ONCE = 32  # answers that are made in one turn of the event loop, which takes about a millisecond
# Until the next turn, where somebody is served: its processor is one of the engine's, whose threads wait for each
# other.
_PAUSE_SECONDS = 0.01
_EXPRESSION = 100  # characters of a text are read while one of an expression is compiled
_INLINE_CHARACTERS = 4096  # of all texts of a request; fewer are tokenized at once: a thread costs more than it frees


class Generation:
    """Answers that were asked for together.

    All of them are handed to the engine at once, so that the n answers to a prompt can share its prefill.
    Raises EngineDead when made, and GenerationError where the model fails. Iterate or `finish()`, and `close()` in any
    case.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        pools: WorkerPools,
        answers: Sequence[Answer],
        id: str,
        prompt_tokens: int,
        shows_drafts: bool = False,
        ignored: Sequence[str] = (),
    ) -> None:
        """answers: as `prepare` makes them.  id: of the response.  prompt_tokens: of all prompts, each counted once.
        shows_drafts: whether the response says how it was drafted.  ignored: fields of the request without effect."""
        self.answers, self.id, self.prompt_tokens = answers, id, prompt_tokens
        self.render = pools.render  # makes JSON of the answers so far; for its size see `Answer.entries`
        self.ignored = tuple(ignored)
        first = answers[0]
        self.speculates = engine.info.speculates or bool(first.request.prediction)
        self.label: dict[str, Any] = first.label | ({"speculative": first.speculative} if shows_drafts else {})
        # Answers to a prompt, which is one list, hold what is reported of it once.
        self._prompt_logprobs: dict[tuple[int, LogprobParams | None], list[TokenLogprobs | None]] = {}
        self._by_uid = {answer.request.uid: answer for answer in answers}
        requests = [answer.request for answer in answers]
        self._digests = engine.digests.begin(engine.info.provenance) if first.request.receipt else None
        self._stream = engine.submit(requests)
        self._info, self._pools = engine.info, pools
        self.records = engine.observer.begin(id, requests, answers, self.ignored)

    async def __aiter__(self) -> AsyncIterator[tuple[Answer, str]]:
        """Each answer that made progress, with its new text (empty while a character or stop string is incomplete). One
        that is complete and waits for its receipt lets the others go first."""
        digests, held = self._digests, list[tuple[Answer, str]]()
        async for output in self._stream:
            answer = self._by_uid[output.uid]
            status = None if output.finish_reason is None else output.finish_reason.get("status_code")
            if output.finish_reason is not None and status == 500:
                raise GenerationError(output.finish_reason["message"])
            if output.finish_reason is not None and status == 404:
                raise NotFound(output.finish_reason["message"], "model", "model_not_found")
            text = answer.push(output)
            if output.prompt_logprobs:
                prompt = id(answer.request.prompt_ids), answer.wanted
                answer.prompt_logprobs = self._prompt_logprobs.setdefault(prompt, answer.prompt_logprobs)
            if answer.wants_receipt:
                held.append((answer, text))
            else:
                yield answer, text
            if held and digests is not None and (digests.done() or not self._stream.open):
                known = await asyncio.wrap_future(digests)
                for answer, text in held:
                    answer.receipt = await self._receipt(answer, known)
                    yield answer, text
                held.clear()

    async def _receipt(self, answer: Answer, digests: dict[str, str]) -> dict[str, Any]:
        size = len(answer.request.prompt_ids) + len(answer.token_ids)
        return await self._pools.run(size, lambda gone: make_receipt(self._info, digests, answer))

    async def finish(self) -> Sequence[Answer]:
        """Returns all answers, once all are complete."""
        async for _ in self:
            pass
        return self.answers

    def close(self) -> None:
        self._stream.close()


class Service:
    def __init__(
        self, engine: AsyncEngine, tokenizer: Tokenizer, collector: Collector | None = None,
        learning: Learning | None = None,
    ) -> None:  # fmt: skip
        """collector, learning: of `--learn`."""
        self._learning = learning
        self.engine, self.tokenizer, self._collector = engine, tokenizer, collector
        self.options = engine.info.options
        self.model, self.names = engine.info.model_name, engine.info.options.model_names
        self.started = time.time()
        self.texts = TokenTexts(tokenizer)
        self.reasoning = Reasoning(self.options, tokenizer)
        self.pools = WorkerPools(engine.answers_others)
        self._fetch = Fetcher(self.options.allow_image_urls)
        self._translator = Translator.of(engine.info.options, tokenizer)
        self._compiled: OrderedDict[Grammar, None] = OrderedDict()  # by the engine, or one before it; newest last
        self._draw = random.Random(self.options.random_seed)
        self._strangers: set[str] = set()
        self._numbers: dict[str, int] = {}  # of adapters by name, also of those that were unloaded
        self.lora_scales: dict[str, float] = {}  # of adapters by name, for requests that ask for none themselves

    async def encode(
        self, field: str, value: str | list[Any], add_special_tokens: bool = True
    ) -> tuple[list[list[int]], bool]:
        """Returns prompts as token ids from any of the forms, and whether they came as a batch."""
        prompts, batched = split_prompts(field, value)
        # Prompts are all texts or all token ids.
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        given = [prompt for prompt in prompts if isinstance(prompt, list)]
        ids = await self.tokenize(texts, field, add_special_tokens) if texts else given
        if not all(ids):
            raise RequestError(f"{field} must have at least one token; found a text that has none", field)
        return ids, batched

    async def fetched(self, pictures: Sequence[Picture]) -> list[Picture]:
        """Returns pictures with those that are somewhere else fetched, where that is allowed. Raises RequestError."""
        if not self.options.allow_image_urls or not any(map(is_address, pictures)):
            return list(pictures)
        return [await self.pools.fetch(partial(self._fetch, picture)) for picture in pictures]

    @property
    def max_body_size(self) -> int:
        """Returns the most bytes of a body."""
        usual = MAX_BODY if self.engine.info.images is None else MAX_BODY_WITH_IMAGES
        return usual if self.options.max_body_size is None else self.options.max_body_size

    @property
    def countable(self) -> int:
        """Returns tokens of a text that is only counted, or of ids that are only decoded."""
        return max(self.engine.info.context_length, MAX_COUNTED)

    async def tokenize(
        self, texts: list[str], field: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Returns the ids of texts from a field of a request. Raises RequestError for one that is far longer than
        `max_tokens` tokens, None being the context; when cancelled it stops soon."""
        size = sum(map(len, texts))
        if size <= _INLINE_CHARACTERS:
            return [self.tokenizer.encode(text, add_special_tokens) for text in texts]
        limit = self.engine.info.context_length if max_tokens is None else max_tokens
        return await self.pools.run(
            size, lambda gone: encode_bounded(self.tokenizer, texts, limit, field, add_special_tokens, gone)
        )

    async def detokenize(self, every: list[list[int]], field: str, skip_special_tokens: bool = True) -> list[str]:
        """Returns the texts of ids from a field of a request, as `tokenize`."""
        longest = max(map(len, every), default=0)
        if longest > self.countable:
            raise RequestError(f"{field} takes at most {self.countable} ids in a list; found {longest}", field)
        size, known = sum(map(len, every)), self.engine.info.vocab_size
        for ids in every:
            if ids and (min(ids) < 0 or max(ids) >= known):
                bad = next(token for token in ids if not 0 <= token < known)
                raise RequestError(f"{field}: id {bad} is outside of the vocabulary [0, {known})", field)

        def decode(ids: list[int], gone: Callable[[], bool]) -> str:
            return self.tokenizer.decode(ids, skip_special_tokens)

        # One by one, so that it ends when it is cancelled.
        return [await self.pools.run(size, partial(decode, ids)) for ids in every]

    async def sampling(self, body: GenerationBody, check: Callable[[], T]) -> T:
        """Returns what `check` makes of the body's sampling fields: in a thread where it compiles expressions, which
        may take half a second."""
        if not body.expressions:
            return check()
        return await self.pools.run(_EXPRESSION * body.expressions, lambda gone: check())

    async def check_grammars(self, asked: Iterable[tuple[SamplingParams, str | None]]) -> None:
        """Has the engine compile the grammars. Raises RequestError for one that cannot be used, GenerationError when
        the time of the current HTTP request is up, or EngineDead.

        asked: parameters, and the field that holds their grammar, where it has another name than its kind.
        """
        different = {params.grammar: field for params, field in asked if params.grammar is not None}
        for grammar, field in different.items():
            if grammar not in self._compiled:
                async with self._in_time():
                    # In a thread: it may take long.
                    translate = partial(self._translated, grammar, field)
                    text = await self.pools.run(len(grammar.text), translate)
                    await self.engine.compile(grammar, text, field, client_name())
            self._compiled[grammar] = None
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        deadline = self.engine.info.deadline(self.engine.observer.arrived)
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise GenerationError("the request exceeded its timeout while its grammar was compiled") from None

    def _translated(self, grammar: Grammar, field: str | None, gone: Callable[[], bool]) -> str:
        return self._translator.translate(grammar, field)

    def check_room(self, count: int, held: int = 1) -> None:
        """Refuses so many answers, before anything is done for them that takes longer. Raises QueueFull where too many
        wait, and RequestError where it is too many for one request. held: places that the request has
        already."""
        limit = min(MAX_ANSWERS, self.options.max_queued_requests, self.options.max_queued_requests_per_key)
        if count > limit:
            raise RequestError(f"one request takes at most {limit} answers; found {count}", "n")
        self.engine.quota.check(client_name(), count, held)

    async def complete(
        self,
        body: GenerationBody,
        prompt: str | list[Any],
        add_special_tokens: bool = True,
        ignored: Sequence[str] = (),
    ) -> Generation:
        """Asks for the answers to prompts as they are, in any of the forms of `encode`. ignored: as of `submit`. Raises
        as `submit` and `check_grammars`."""
        params = await self.sampling(body, partial(body.sampling, self.engine.info.defaults))
        self.check_room(params.n * len(split_prompts("prompt", prompt)[0]))
        logprobs = body.wanted_logprobs()
        await self.check_grammars([(params, body.grammar_field)])
        every, _ = await self.encode("prompt", prompt, add_special_tokens)
        return await self.submit(
            [GenerationRequest("", ids, params, logprobs=logprobs) for ids in every], body, ignored
        )

    async def submit(
        self, requests: Sequence[GenerationRequest], body: GenerationBody, ignored: Sequence[str] = ()
    ) -> Generation:
        """Asks for the answers to prompts that came together. A default length is cut to the context.

        ignored: fields that have no effect here, besides the body's hints.

        Raises RequestError, naming fields as the body does, QueueFull where too many wait, or EngineDead.
        """
        info, predicted = self.engine.info, body.predicted
        count = sum(request.params.n for request in requests)
        self.check_room(count)
        id = body.asked_id if isinstance(body.asked_id, str) else body.id_prefix + uuid.uuid4().hex
        shared: dict[str, Any] = {"priority": body.priority or 0, "cache_salt": body.cache_salt, "traced": body.traced}
        shared["arrived"], shared["receipt"] = self.engine.observer.arrived, body.wants_receipt
        shared["slot"], learn = body.slot or 0, body.learnable
        if body.slot is not None and info.options.prefix_cache_dir is None:
            ignored = (*ignored, "id_slot")
        requests = self._with_adapters(requests, body)
        if body.wants_receipt:
            check_receipts(requests)
        if (key := client.get()) is not None:
            shared["client"], learn = key.name, learn and key.learn
            if key.max_priority is not None and shared["priority"] > key.max_priority:
                found = f"for this key (max_priority); found {shared['priority']}"
                raise RequestError(f"priority must be at most {key.max_priority} {found}", "priority")
        body.place.close()
        with self.engine.quota.reserve(client_name(), count):
            if predicted:
                shared["prediction"] = tuple(
                    (await self.tokenize([predicted], "prediction", add_special_tokens=False))[0]
                )
            asked = [one._replace(name=one.name or id, learn=one.learn and learn, **shared) for one in requests]
            answers: list[Answer] = []
            try:
                asked = await self._with_bad_words(asked)
                asked = [one if one.thinking is not None else self.reasoning.bounded(one) for one in asked]
                if body.length is None or info.options.allow_auto_truncate:
                    fitting = [one.params.fit(info.context_length - len(one.prompt_ids)) for one in asked]
                    if body.length is not None and any(a is not b.params for a, b in zip(fitting, asked, strict=True)):
                        ignored = (*ignored, body.length)
                    asked = [one._replace(params=params) for one, params in zip(asked, fitting, strict=True)]
                asked = fit_logprobs(asked, body.length is not None, info.context_length)
                if any(one.logprobs is not None for one in asked):
                    first = first_logprobs(asked)
                    self.engine.logprob_quota.check(client_name(), first, first)
                for answer in prepare(info, self.tokenizer, asked, body.speculative, self._draw):
                    answers.append(answer)
                    if len(answers) % _ANSWERS_AT_ONCE == 0 and len(answers) < count:
                        await asyncio.sleep(_PAUSE_SECONDS if self.engine.active else 0)
            except RequestError as error:
                raise body.renamed(error) from None
            tokens = sum(len(request.prompt_ids) for request in requests)
            unused = dict.fromkeys((*body.ignored, *ignored))
            return Generation(self.engine, self.pools, answers, id, tokens, body.speculative is not None, [*unused])

    def _with_adapters(self, requests: Sequence[GenerationRequest], body: GenerationBody) -> list[GenerationRequest]:
        """Returns the requests with the adapters that the body names. Raises RequestError."""
        named = getattr(body, "model", None)
        self.check_model(named)  # it may have been unloaded since the body was read
        model, scales = self.adapter_of(named), self.scales_of(body.lora)
        if model and scales is not None:
            raise RequestError(f"lora and the model {model[:200]!r}, an adapter, exclude each other: give one", "lora")
        scales = {k: v for k, v in self.lora_scales.items() if k in self.engine.adapters} if scales is None else scales
        default = ((model, 1.0),) if model else tuple(scales.items())
        asked = body.adapters(len(requests))
        for name in asked:
            if name and name not in self.engine.adapters:
                raise self.no_model(name, "lora_path")
            if name and (body.lora is not None or name != (model or name)):
                other = "lora" if body.lora is not None else f"the model {model!r:.200}, an adapter,"
                raise RequestError(f"lora_path and {other} exclude each other: give one", "lora_path")
        return [
            request._replace(adapters=one, adapter_digest=self._digest_of(one))
            for request, one in zip(requests, [((name, 1.0),) if name else default for name in asked], strict=True)
        ]

    def _digest_of(self, adapters: Sequence[tuple[str, float]]) -> str:
        """Returns the digest of a single adapter that is not scaled; else ""."""
        name = adapters[0][0] if len(adapters) == 1 and adapters[0][1] == 1 else None
        return "" if name is None else self.engine.adapters[name].digest

    def scales_of(self, asked: Sequence[Any] | None, field: str = "lora") -> dict[str, float] | None:
        """Returns scales by name from llama.cpp's list of {"id", "scale"}, of adapters whose scale is not 0; None:
        nothing is asked for. Raises RequestError. field: that it came in."""
        if asked is None:
            return None
        names, found = self.adapter_numbers, dict[str, float]()
        for one in asked:
            if one.id not in names:
                ids = (
                    f"that /lora-adapters lists, {listed([*map(str, names)])}"
                    if names
                    else "of an adapter; there are none"
                )
                raise RequestError(f"{field}: expected an id {ids}; found {one.id}", field)
            found[names[one.id]] = one.scale
        return {name: scale for name, scale in found.items() if scale}

    @property
    def adapter_numbers(self) -> dict[int, str]:
        """Returns the names of adapters by llama.cpp's numbers: who has read one never gets another adapter by it."""
        for name in self.engine.adapters:
            self._numbers.setdefault(name, len(self._numbers))
        return {number: name for name, number in self._numbers.items() if name in self.engine.adapters}

    def adapter_of(self, asked: str | None) -> str | None:
        """Returns the adapter that a model's name stands for: its own name, or that behind the model's and a colon."""
        if asked is None or not self.engine.adapters or asked.removesuffix(":latest") in self.names:
            return None  # clients of Ollama write `:latest` behind the model's name, which an adapter may be called
        for name in (asked, asked.removesuffix(":latest")):
            behind = (name.removeprefix(f"{model}:") for model in self.names)
            if (found := next((one for one in (name, *behind) if one in self.engine.adapters), None)) is not None:
                return found
        return None

    async def _with_bad_words(self, asked: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Returns the requests with the token sequences of their `bad_words`, found once for those that share their
        parameters. Raises RequestError as `bad_word_ids`."""
        different = {one.params.bad_words: one for one in asked}
        size = sum(2 * len(word) for words in different for word in words)

        def tokenized(gone: Callable[[], bool]) -> dict[tuple[str, ...], tuple[tuple[int, ...], ...]]:
            return {words: bad_word_ids(self.tokenizer, one) for words, one in different.items() if not gone()}

        if size <= _INLINE_CHARACTERS:
            found = tokenized(lambda: False)
        else:
            found = await self.pools.run(size, tokenized)
        return [one._replace(bad_word_ids=found[one.params.bad_words]) for one in asked]

    @property
    def draft_model_path(self) -> str | None:
        """Returns the folder of the head that drafts now: of the command line, or what was swapped in."""
        return self.options.speculative_draft_model_path if self._learning is None else self._learning.draft_model_path

    async def delete_traffic(self, client: str) -> dict[str, Any]:
        """Removes what is kept of a client's requests; see `Collector.delete`. Raises EngineDead."""
        client, found = client or ANONYMOUS, Deleted(0, [])
        if self._collector is not None and self._learning is not None:
            with self._learning.stopped():
                found = await self._collector.delete(client)
        lookups = sum([await self.engine.forget_client(name) for name in names_of(client)])
        return {"client": client, **found._asdict(), "lookups": lookups}

    def name_for(self, asked: str | None) -> str:
        """Returns the model name of a response: the one that was asked for if it is served, else that of the model that
        answers, whatever was asked for."""
        if asked is None:
            return self.model
        self.engine.observer.asked_for(asked)
        if self._known(asked):
            return asked
        if asked not in self._strangers and len(self._strangers) < _MAX_LOGGED_MODELS:
            self._strangers.add(asked)
            logger.info("a request asks for model %.200r; it is served by %r", asked, self.model)
        return self.model

    def _known(self, asked: str) -> bool:
        known = asked.removesuffix(":latest") in self.names  # as Ollama's clients write a name without a tag
        return known or self.adapter_of(asked) is not None

    def check_model(self, asked: Any) -> None:
        """Raises NotFound for a model that is not served, where `--strict-model-name` asks for it, or there are
        adapters: whoever asks for one must not get another's answer."""
        strict = self.options.strict_model_name or self.options.serves_adapters
        if strict and isinstance(asked, str) and not self._known(asked):
            raise self.no_model(asked)

    def no_model(self, asked: str, field: str = "model") -> NotFound:
        """Returns the error about a model that is not served."""
        known = listed([*map(repr, (*self.names, *self.engine.adapters))])
        return NotFound(f"the model {asked[:200]!r} does not exist; this server has {known}", field, "model_not_found")
