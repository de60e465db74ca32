"""The Python API: `LLM` runs the engine in the calling process and thread; `AsyncLLM` (async_llm.py) in another one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from draftwing.config.options import Options
from draftwing.engine.session import Session, on_host
from draftwing.errors import RequestError
from draftwing.llm_inputs import Inputs, Message, Params, RequestOptions
from draftwing.log import progress_bar
from draftwing.requests.refusals import check_level
from draftwing.requests.request import GenerationRequest
from draftwing.text.answer import Answer
from draftwing.text.pooler import Pooler, cosine

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from draftwing.engine.engine import Engine
    from draftwing.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Completion:
    """One answer: its text, its token ids without the prompt's, why it ended, and numbers such as
    `meta_info["spec_accept_length"]`. `finish_reason` and `meta_info` are those of `/generate`'s response.

    prompt_token_ids: of the prompt.  message: of an answer to a conversation with tools, what goes into the history: a
    dict with `content`, `tool_calls` and `reasoning_content`; else None."""

    text: str
    token_ids: list[int]
    finish_reason: dict[str, Any]
    meta_info: dict[str, Any] = field(repr=False)
    prompt_token_ids: list[int] = field(default_factory=list, repr=False)
    message: dict[str, Any] | None = None

    @classmethod
    def of(cls, answer: Answer, inputs: Inputs, asked: RequestOptions) -> Completion:
        """Takes over a finished answer of a call that asked for these options."""
        assert answer.finish_reason is not None
        meta = answer.meta_info(inputs.token_texts(asked))
        ids = list(answer.request.prompt_ids)
        return cls(answer.text, answer.token_ids, answer.finish_reason, meta, ids, inputs.message(answer, asked))

    @property
    def outputs(self) -> list[Completion]:
        """Returns the answer in a list, for programs that were written for vLLM: `completion.outputs[0].text`."""
        return [self]

    @property
    def receipt(self) -> dict[str, Any] | None:
        """Returns the receipt of a complete answer, where it was asked for: `draftwing verify` checks it."""
        return self.meta_info.get("receipt")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Returns the calls of `message`."""
        return (self.message or {}).get("tool_calls", [])


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer: its text and token ids since the piece before, and with the last piece the whole
    answer. The text is empty while a character or stop string is incomplete."""

    text: str
    token_ids: list[int]
    completion: Completion | None = None


class LLM:
    """Loads a model and generates text: `LLM("smollm2", speculative_algorithm="NGRAM")`.

    Options have the server's names; `draftwing serve --help` lists them. None means that an option is not given. Then
    `smollm2` uses its bundled draft head, aliases with a published head use that one, and other models run without
    speculation. `speculative_algorithm="none"` turns it off; a class derived from `Drafter` is an algorithm of your
    own.

    Close it, or use it in a `with` statement, to free the model's memory. Not thread-safe. Raises ConfigError for an
    option that cannot work, CheckpointError for a model that cannot be served.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        named = options if model is None else {"model": model} | options
        resolved = Options.from_kwargs(**named).resolve()
        from draftwing.engine.engine import Engine  # after the options are checked: it imports torch

        with on_host():
            engine = Engine(resolved)
        self._begin(engine)

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Wraps an engine that exists already; `close` closes it."""
        llm = cls.__new__(cls)
        llm._begin(engine)
        return llm

    def _begin(self, engine: Engine) -> None:
        self.engine = engine
        self._session = Session(engine)
        self._inputs = Inputs(engine.info, engine.tokenizer)
        self._closed = False

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool | None = None,
        **request_options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Completes prompts and returns `params.n` completions per prompt, prompt after prompt.

        prompts: one or several, each a text or a list of token ids.
        params: `SamplingParams` or a dict of its fields, one for all prompts or one per prompt. Fields that are not set
        are the model's defaults (`engine.info.defaults`), as over HTTP.
        use_tqdm: whether a terminal shows a progress bar; None: for more than one answer.
        request_options: see `RequestOptions`.

        Raises RequestError for a prompt that can never run; nothing is generated then.
        """
        return self._run(self._inputs.of_prompts(prompts, params, request_options), request_options, use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        use_tqdm: bool | None = None,
        **request_options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Answers conversations with the model's chat template. Otherwise as `generate`.

        conversations: one, a list of {"role": ..., "content": ...}, or a list of them.
        chat_template_kwargs: further variables of the chat template.
        continue_final_message: the answers continue the last messages, which must be the assistant's.
        """
        asked = self._inputs.of_chats(
            conversations, params, request_options, chat_template_kwargs, continue_final_message
        )
        return self._run(asked, request_options, use_tqdm)

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: Params | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **request_options: Unpack[RequestOptions],
    ) -> Generator[Piece, None, None]:
        """Yields one answer in pieces, as it is generated. To close the iterator aborts the request.

        prompt: a text, a list of token ids, or a conversation as `chat` takes it. Otherwise as `generate`.

        Raises RequestError before anything is generated, and RuntimeError where the LLM is asked for anything else
        between two pieces.
        """
        request = self._inputs.of_one(prompt, params, request_options, chat_template_kwargs)
        (answer,) = self._prepare([request], request_options)
        return self._pieces(answer, request_options)

    def embed(
        self,
        texts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        dimensions: int | None = None,
        *,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """Returns a vector for each text or list of token ids, [N, dimensions], as the model's files say they are made;
        where these say nothing, of the last token's hidden state, with length 1.

        dimensions: so many of the first numbers of each, made as long as 1 again; None: all, the hidden size.
        truncate: leaves out the end of a text that is too long.

        Raises RequestError for what can never run, GenerationError for hidden states that are not finite.
        """
        pooler = self._pooler
        answers = self._finished(vector_requests(pooler, self._inputs, texts, dimensions, truncate))
        return np.stack([pooler.vector(answer, dimensions) for answer in answers])

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[float]:
        """Returns how well each text of `text_2` answers that of `text_1`, or the one there is: the cosine of their
        vectors, where the model's files say that it makes some, else the probability that the model says "yes".

        instruction: what makes a text right, for models that judge.  truncate: as of `embed`.

        Raises RequestError.
        """
        first, second = ([side] if isinstance(side, str) else list(side) for side in (text_1, text_2))
        if not first or not second or not all(first) or not all(second):
            raise RequestError("text_1 and text_2 must not be empty", "text_1")
        if len(first) not in (1, len(second)):
            raise RequestError(f"text_1 must be one text, or {len(second)} as text_2; found {len(first)}", "text_1")
        first = first * len(second) if len(first) == 1 else first
        pooler = self._pooler
        if not pooler.judges:
            vectors = self.embed([*first, *second], truncate=truncate)
            return [cosine(*pair) for pair in zip(vectors[: len(first)], vectors[len(first) :], strict=True)]
        pairs = enumerate(zip(first, second, strict=True))
        asked = [pooler.judged(one, other, instruction, f"text_2.{i}", truncate) for i, (one, other) in pairs]
        return [pooler.score(answer) for answer in self._finished(asked)]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[tuple[int, float]]:
        """Returns (index, score) of the documents, the best first; scores are those of `score`. top_n: of so many."""
        found = self.score(query, documents, instruction=instruction, truncate=truncate)
        return sorted(enumerate(found), key=lambda one: -one[1])[:top_n]

    def load_adapter(self, name: str, path: str | Path, replace: bool = False) -> None:
        """Loads an adapter (LoRA), which `adapter=name` asks for from now on; needs the option `lora_modules` or
        `lora_dir`. path: its folder.  replace: whether one of this name may be there that is another.

        Raises CheckpointError for one that does not fit the model, ConfigError for a name that is taken.
        """
        with on_host():
            self.engine.load_adapter(name, Path(path).expanduser(), replace)

    def unload_adapter(self, name: str) -> None:
        """Lets no further answer have an adapter. Raises RequestError for one that is not there."""
        self.engine.unload_adapter(name)

    def sleep(self, level: int = 1) -> None:
        """Gives memory back until somebody asks for an answer, or `wake_up`: that of the KV cache, and on a GPU all
        that is there, which is in host memory meanwhile. Texts do not change. level: vLLM's; 1, for weights are kept.

        Raises GenerationError where the host has no room, RequestError for another level, and RuntimeError between two
        pieces of an answer.
        """
        check_level(level)
        self._until(self.engine.sleep)

    def wake_up(self) -> None:
        """Has memory again. Raises GenerationError where others have taken it, and RuntimeError as `sleep`."""
        self._until(self.engine.wake_up)

    @property
    def is_sleeping(self) -> bool:
        return not self._closed and self.engine.is_sleeping

    def _until(self, ask: Callable[[], Future[None]]) -> None:
        self._check_open()
        self._session.until(ask)

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer: `encode`, `decode`, and `render_chat` of its chat template."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """Returns `tokenizer`; the name that vLLM has for it."""
        return self.tokenizer

    def __repr__(self) -> str:
        return described(self, self.engine.info.options) + (" (closed)" if self._closed else "")

    def close(self) -> None:
        """Frees the model's memory. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _pooler(self) -> Pooler:
        info = self.engine.info
        return Pooler(self.tokenizer, info.pooling, info.hidden_size, info.context_length)

    def _finished(self, asked: Sequence[GenerationRequest]) -> list[Answer]:
        answers = self._prepare(asked, {})
        for _ in self._session.stream(answers):
            pass
        return answers

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed")

    def _prepare(self, asked: Sequence[GenerationRequest], request_options: RequestOptions) -> list[Answer]:
        self._check_open()
        return self._session.prepare(asked, request_options.get("speculative"))

    def _run(
        self, asked: Sequence[GenerationRequest], request_options: RequestOptions, use_tqdm: bool | None
    ) -> list[Completion]:
        answers = self._prepare(asked, request_options)
        shown = len(answers) > 1 if use_tqdm is None else use_tqdm
        with progress_bar(total=len(answers), desc="generating", unit="answer", disable=not shown) as bar:
            for answer, _ in self._session.stream(answers):
                bar.update(answer.finish_reason is not None)
        return [Completion.of(answer, self._inputs, request_options) for answer in answers]

    def _pieces(self, answer: Answer, asked: RequestOptions) -> Generator[Piece, None, None]:
        last, seen = "", 0
        with closing(self._session.stream([answer])) as news:
            for _, text in news:
                if answer.finish_reason is not None:
                    last = text
                else:
                    yield Piece(text, answer.token_ids[seen:])
                    seen = len(answer.token_ids)
        # After the session is done: with the whole answer in hand, the next request may be made.
        yield Piece(last, answer.token_ids[seen:], Completion.of(answer, self._inputs, asked))


def vector_requests(
    pooler: Pooler,
    inputs: Inputs,
    texts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    dimensions: int | None,
    truncate: bool,
) -> list[GenerationRequest]:
    """Returns the requests for the vectors of texts, as `LLM.embed` has them. Raises RequestError."""
    pooler.check_dimensions(dimensions)
    keep = pooler.ending if truncate else 0
    every = inputs.token_ids(texts)
    if not every:
        raise RequestError("texts must hold at least one text; found an empty list", "texts")
    return pooler.vector_requests([pooler.fit(one, f"texts.{i}", truncate, keep) for i, one in enumerate(every)])


def described(llm: object, options: Options) -> str:
    """Returns a line that says which model runs, and who drafts for it."""
    return f"{type(llm).__name__}({options.model!r}, speculative_algorithm={options.speculative_algorithm!r})"
