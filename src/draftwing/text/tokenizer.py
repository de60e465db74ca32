"""Turns text into tokens and back, and renders the chat template, for every kind of checkpoint.

Texts of any length are tokenized at a bounded cost: one that cannot fit is found out before all of it is tokenized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from draftwing.errors import TOO_LONG, CheckpointError, ConfigError, RequestError
from draftwing.files import load_json
from draftwing.gguf_file import open_gguf
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from draftwing.text import gguf_tokenizer
from draftwing.text.chat_template import ChatTemplate, Message

_IN_GGUF = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
BUNDLED_TEMPLATE = "chatml_tools"  # a file next to this one: ChatML with tools
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Words of templates that have a place for tools, or more than the bundled one has: other beginnings, reasoning, images.
_NOT_PLAIN = ("tool", "bos_token", "think", "reasoning", "image", "<|im_sep|>")
_MARK = "Qcontinued{}Z"  # plain letters and digits, which no filter of a template changes


class Tokenizer:
    """A vocabulary with its chat template.

    backend: does the work.  special_tokens: text of `bos_token`, `eos_token`, ...
    chat_template: jinja2 source, or None.  tool_template: another source, used when a conversation has tools.
    extra_stop_ids: tokens that end an answer besides eos, as the checkpoint names them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        tool_template: str | None = None,
        extra_stop_ids: Sequence[int] = (),
    ) -> None:
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1  # highest id + 1
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)  # of tokens that are matched as a whole, special or not
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        # Byte tokens of a sentencepiece vocabulary; the decoder joins runs of them to characters.
        falls_back = backend.decoder is not None and b'"ByteFallback"' in backend.decoder.__getstate__()
        self.byte_fallback_ids = frozenset(i for t, i in vocab.items() if falls_back and _BYTE_TOKEN.fullmatch(t))
        self.joins_bytes = not falls_back  # any token may end inside a character
        self.chat_template = chat_template
        self._template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        self._tool_template = None if tool_template is None else ChatTemplate(tool_template, self.special_tokens)
        stop = {i for i in (self.eos_id, self._end_of_turn(), *extra_stop_ids) if i is not None}
        self.stop_ids = frozenset(stop)

    @cached_property
    def ending(self) -> int:
        """Returns how many tokens it puts behind a text by itself."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), len(whole))
        return len(whole) - at - len(plain) if plain and at < len(whole) else 0

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _end_of_turn(self) -> int | None:
        """Returns the special token that ends an assistant's turn, or None when the template ends it with plain text or
        nothing. Some checkpoints name another token as eos, and generation would run past this one."""
        suffix = "" if self._template is None else self._template.turn_suffix.lstrip()
        ids = self.encode(suffix, add_special_tokens=False) if suffix else []
        return ids[0] if ids and ids[0] in self.special_ids else None

    def piece(self, token: int) -> str | None:
        """Returns how the vocabulary writes a token; None for an id outside of it (the embedding may be padded), which
        decoding drops."""
        piece: str | None = self.backend.id_to_token(token)
        return piece

    @property
    def vocabulary_hash(self) -> str:
        """Returns a hash of which id is which token: what is kept as ids means something with the same one alone."""
        vocabulary = sorted((id, token) for token, id in self.backend.get_vocab(with_added_tokens=True).items())
        return blake2b(repr(vocabulary).encode(), digest_size=16).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`. Special tokens written in it are recognised; `add_special_tokens` adds BOS and EOS
        as the checkpoint asks."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Returns the ids of two texts as the checkpoint joins them, and where the second begins if the checkpoint
        tells them apart, else 0. Otherwise as `encode`."""
        found = self.backend.encode(first, second)
        return found.ids, found.type_ids.index(1) if 1 in found.type_ids else 0

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encodes each text. Other Python threads run meanwhile: the library gives up the interpreter's lock for
        batches, though not for a single text."""
        batch = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def chat_source(self) -> str | None:
        """Returns the text of the chat template that is shown tools; None without one."""
        template = self._tool_template or self._template
        return None if template is None else template.source

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> str:
        """Returns the prompt text of a conversation. Raises RequestError without a template or when it refuses the
        messages. kwargs: as of `ChatTemplate.render`."""
        template = self._tool_template if tools and self._tool_template is not None else self._template
        if template is None:
            raise RequestError(
                "the model has no chat template: start the server with --chat-template FILE, or use /v1/completions",
                "messages",
            )
        return template.render(messages, tools=tools, **kwargs)

    def render_continued(self, messages: Sequence[Message], **kwargs: Any) -> str:
        """Returns the prompt text up to the end of the last message, which has to be the assistant's, for the model to
        go on with it; spaces at its end are kept, whatever the template does to those of finished messages. kwargs: as
        of `render_chat`.

        Raises RequestError, also where the template does not show the message's end.
        """
        last = messages[-1] if messages else {}
        content = last.get("content")
        if last.get("role") != "assistant" or not isinstance(content, str):
            raise RequestError(
                "continue_final_message needs a last message of the assistant, with a text", "continue_final_message"
            )
        # Nothing holds its own digest, so the mark is nowhere else.
        mark = _MARK.format(blake2b(repr((messages, kwargs)).encode(), digest_size=16).hexdigest())
        marked = [*messages[:-1], {**last, "content": content + mark}]
        text, found, _ = self.render_chat(marked, add_generation_prompt=False, **kwargs).rpartition(mark)
        if not found:
            raise RequestError("the chat template does not show the last message", "continue_final_message")
        return text.replace(mark, "")  # some templates show it before, too

    def encode_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """Returns the ids of the rendered conversation. The template writes all special tokens, BOS included, so none
        is added. kwargs: as of `render_chat`."""
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)


def load_tokenizer(path: Path, chat_template: str | Path | None = None) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder or a `.gguf` file.

    chat_template: replaces the checkpoint's; a file, the jinja2 text itself, or the name of one that comes with us.
    Raises CheckpointError for a missing or unsupported tokenizer, ConfigError for a template file that does not exist.
    """
    override = None if chat_template is None else _template_text(chat_template)
    return _from_gguf(path, override) if path.is_file() else _from_folder(path, override)


def chat_source(path: Path, chat_template: str | Path | None = None) -> str | None:
    """Returns what `Tokenizer.chat_source` of the loaded tokenizer is, without loading it. Raises CheckpointError,
    ConfigError, and ValueError or TypeError for a template that is none."""
    if chat_template is not None:
        return _template_text(chat_template)
    if path.is_file():
        metadata = open_gguf(path).metadata
        found = _for_tools(None, *map(metadata.get, _IN_GGUF))
    else:
        templates = _templates(path, _read_json(path / "tokenizer_config.json"))
        found = _for_tools(None, templates.get("default"), templates.get("tool_use"))
    return found[1] or found[0]


def vocabulary_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """Returns the first token that two tokenizers number differently, as a sentence; None when they agree.

    Ids that only one of them has do not matter: families pad their vocabularies to different sizes.
    """
    ours, theirs = target.backend.get_vocab(), draft.backend.get_vocab()
    known = {token_id: token for token, token_id in theirs.items()}
    for token, token_id in sorted(ours.items(), key=lambda item: item[1]):
        other = known.get(token_id)
        if other is not None and other != token:
            return f"First difference: id {token_id} is {token!r} in the target and {other!r} in the draft."
    return None


def _template_text(template: str | Path) -> str:
    if isinstance(template, str) and ("{%" in template or "{{" in template):
        return template
    file = Path(template).expanduser()
    if template == BUNDLED_TEMPLATE and not file.exists():
        file = Path(__file__).with_name(f"{BUNDLED_TEMPLATE}.jinja")
    if not file.is_file():
        raise ConfigError(
            f"--chat-template: expected a file, a jinja2 template, or {BUNDLED_TEMPLATE}; found {str(template)!r}"
        )
    return file.read_text(encoding="utf-8-sig")


def _from_gguf(path: Path, override: str | None) -> Tokenizer:
    metadata = open_gguf(path).metadata
    try:
        backend = gguf_tokenizer.build_backend(metadata)
        stop = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
        specials, extra = gguf_tokenizer.special_tokens(metadata), [int(i) for i in stop if i is not None]
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a value of a kind that nobody writes
        raise CheckpointError(f"{path}: tokenizer.ggml.*: found values of other types: {error}") from None
    return Tokenizer(backend, specials, *_for_tools(override, *map(metadata.get, _IN_GGUF)), extra)


def _from_folder(path: Path, override: str | None) -> Tokenizer:
    config = _read_json(path / "tokenizer_config.json")
    specials = _special_tokens(_read_json(path / "special_tokens_map.json"), config)
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    else:
        backend = _convert(path)
    try:
        _add_tokens(backend, path, config, specials)
        _apply_bos_eos_flags(backend, config, specials)
        templates = _templates(path, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected tokens and chat templates as transformers writes them in tokenizer_config.json, "
            f"added_tokens.json and chat_template.json; found something else: {type(error).__name__}: {error}"
        ) from None
    return Tokenizer(backend, specials, *_for_tools(override, templates.get("default"), templates.get("tool_use")))


def _for_tools(override: str | None, default: str | None, tool_use: str | None) -> tuple[str | None, str | None]:
    """Returns the templates of conversations, and of those with tools where that is another one. A plain ChatML that
    has no place for tools, as the default model's, gets the one that comes with us."""
    if override is not None:
        return override, None
    plain = isinstance(default, str) and "<|im_start|>" in default and "<|im_end|>" in default
    if tool_use is None and plain and not any(word in (default or "") for word in _NOT_PLAIN):
        tool_use = _template_text(BUNDLED_TEMPLATE)
    return default, tool_use


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the object in `file`; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = load_json(file)
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _convert(path: Path) -> tokenizers.Tokenizer:
    """Older formats (tokenizer.model, vocab.json with merges.txt) through transformers, where it is installed."""
    sources = [name for name in ("tokenizer.model", "vocab.json") if (path / name).is_file()]
    if not sources:
        raise CheckpointError(f"{path} has no tokenizer: expected tokenizer.json (or --tokenizer-path)")
    hint = (
        f"{path} has {sources[0]} but no tokenizer.json. Convert it once, with transformers and sentencepiece "
        f'installed: python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{path}').save_pretrained('{path}')\""
    )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(hint) from error
    try:
        converted = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
        backend = converted.backend_tokenizer
    except Exception as error:  # whatever its many converters raise
        raise CheckpointError(f"{hint}\n(transformers could not convert it here: {error})") from error
    assert isinstance(backend, tokenizers.Tokenizer)
    return backend


def _content(token: Any) -> str | None:
    """Returns the text of a token in a configuration file: a string, or an object with its flags."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(mapping: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
    found = {name: _content(config.get(name, mapping.get(name))) for name in _SPECIAL_NAMES}
    return {name: token for name, token in found.items() if token is not None}


def _add_tokens(backend: tokenizers.Tokenizer, path: Path, config: dict[str, Any], specials: Mapping[str, str]) -> None:
    """Adds tokens that other files add to tokenizer.json, under the ids they state, and named special tokens."""
    known = backend.get_added_tokens_decoder()
    named = set(specials.values())
    declared: dict[int, AddedToken] = {}
    for text, i in _read_json(path / "added_tokens.json").items():
        if int(i) not in known or known[int(i)].content != text:
            declared[int(i)] = AddedToken(text, normalized=False, special=text in named)
    for key, spec in config.get("added_tokens_decoder", {}).items():
        flags = {flag: bool(spec.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip")}
        special = bool(spec.get("special", False)) or spec["content"] in named
        normalized = bool(spec.get("normalized", not spec.get("special")))
        declared[int(key)] = AddedToken(spec["content"], normalized=normalized, special=special, **flags)
    # The flags of tokenizer_config.json win over those of tokenizer.json. `repr` shows all of them.
    new = [(i, token) for i, token in sorted(declared.items()) if i not in known or repr(known[i]) != repr(token)]
    backend.add_tokens([token for _, token in new])
    for i, token in new:
        if backend.token_to_id(token.content) != i:
            raise CheckpointError(
                f"{path}: token {token.content!r} is declared with id {i}, but tokenizer.json gives it id "
                f"{backend.token_to_id(token.content)}"
            )
    known = backend.get_added_tokens_decoder()
    special_now = {token.content for token in known.values() if token.special}
    extra: list[str | None] = []
    for name in ("extra_special_tokens", "additional_special_tokens"):  # as transformers 5 calls them, and 4
        stated = config.get(name) or []
        extra += [_content(token) for token in (stated.values() if isinstance(stated, Mapping) else stated)]
    # A special token outside the vocabulary would get an id beyond the embedding: leave it out.
    wanted = [
        t for t in [*specials.values(), *extra] if t and t not in special_now and backend.token_to_id(t) is not None
    ]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in dict.fromkeys(wanted)])


def _apply_bos_eos_flags(backend: tokenizers.Tokenizer, config: dict[str, Any], specials: Mapping[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where they are stated, overrule what tokenizer.json does by itself.

    Files of models that were published for transformers 4 rely on it: its Llama tokenizers took BOS from the flag
    only. transformers 5 ignores the flags next to a tokenizer.json.
    """
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    bos, eos = (backend.token_to_id(specials[name]) if name in specials else None for name in _SPECIAL_NAMES[:2])
    plain = backend.encode("a", add_special_tokens=False).ids
    ids = backend.encode("a", add_special_tokens=True).ids
    has_bos, has_eos = ids[: -len(plain)] == [bos], ids[len(ids) - 1 :] == [eos] != plain[-1:]
    add_bos = config.get("add_bos_token", has_bos)
    add_eos = config.get("add_eos_token", has_eos)
    gguf_tokenizer.set_bos_eos(backend, bos if add_bos else None, eos if add_eos else None)


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own win over the configuration, as in transformers."""
    found = _by_name(config.get("chat_template")) | _by_name(
        _read_json(path / "chat_template.json").get("chat_template")
    )
    file = path / "chat_template.jinja"
    if file.is_file():
        found = {"default": file.read_text(encoding="utf-8")}
    for more in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[more.stem] = more.read_text(encoding="utf-8")
    return found


def _by_name(stated: Any) -> dict[str, str]:
    """Chat templates as configurations state them: one, an object of several, or a list."""
    if isinstance(stated, str):
        return {"default": stated}
    if isinstance(stated, list):
        return {entry["name"]: entry["template"] for entry in stated}
    return dict(stated or {})


PIECE = 65_536  # characters that are tokenized without looking up


class Stopped(Exception):
    """Nobody waits for the ids any more."""


def encode_bounded(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    max_tokens: int,
    field: str,
    add_special_tokens: bool = True,
    stopped: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Returns the ids of each text, as `Tokenizer.encode` gives them.

    max_tokens: tokens that a text may have. One that has more may still be encoded if it is short, or has few more.
    field: named in the error.  stopped: asked between pieces; Stopped is raised when it says so.

    Raises RequestError for a text that has more tokens.
    """
    out: list[list[int]] = []
    for batch in _batches(texts):
        if len(batch[0]) > PIECE:
            _refuse_long(tokenizer, batch[0], max_tokens, field, stopped)
        if stopped():
            raise Stopped
        out += tokenizer.encode_many(batch, add_special_tokens)
    return out


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, however long; of several by all processors."""
    if len(texts) == 1:
        return [tokenizer.encode(texts[0])]
    return [ids for batch in _batches(texts) for ids in tokenizer.encode_many(batch)]


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields the texts in turn, together as long as they are no more than a piece."""
    batch, size = list[str](), 0
    for text in texts:
        if batch and size + len(text) > PIECE:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _refuse_long(tokenizer: Tokenizer, text: str, max_tokens: int, field: str, stopped: Callable[[], bool]) -> None:
    """Counts the tokens of pieces. Their sum may be a little more than the text has, for a cut changes the tokens
    next to it; so a quarter more is let pass, and left to whoever counts the real ones."""
    count = 0
    for start in range(0, len(text), PIECE):
        if stopped():
            raise Stopped
        count += len(tokenizer.encode_many([text[start : start + PIECE]], add_special_tokens=False)[0])
        if count > max_tokens + max_tokens // 4 + 64:
            message = f"the prompt is too long: {field} has more than {max_tokens} tokens; {TOO_LONG} exceeded"
            raise RequestError(message, field, "context_length_exceeded")


def bad_word_ids(tokenizer: Tokenizer, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
    """Returns each of the request's words as it is tokenized at the start of a text and after a space, where the two
    differ; what was found before, where it was.

    Raises RequestError for a word of too many tokens, or of none, and for too many sequences.
    """
    if request.bad_word_ids is not None:
        return request.bad_word_ids
    found: dict[tuple[int, ...], None] = {}
    for word in request.params.bad_words:
        forms = {word: None, " " + word.lstrip(): None}
        for form in forms:
            ids = tokenizer.encode(form, add_special_tokens=False)
            if not ids:
                raise RequestError(f"bad_words: expected a word that has tokens, found {word!r}", "bad_words")
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words takes words of at most {MAX_BAD_WORD_TOKENS} tokens; {word[:80]!r} has {len(ids)}",
                    "bad_words",
                )
            found[tuple(ids)] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words takes at most {MAX_BAD_WORDS} token sequences, of which a word gives up to two; found "
            f"{len(found)}",
            "bad_words",
        )
    return tuple(found)
