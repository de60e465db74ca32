"""Turns tokens into text: incrementally, where only what no later token can change is given out and stop strings are
cut, and each by itself, as log probabilities show it: bytes, which need not be whole characters.

There is one implementation for the stream and for the scheduler's stop rule, so both cut at the same character.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

from tokenizers.pre_tokenizers import ByteLevel

from draftwing.requests.sampling_params import SamplingParams
from draftwing.requests.stop_regex import RegexScanner, Searches
from draftwing.text.tokenizer import Tokenizer

# Tokens that may wait for the rest of a character before a place to cut the window is searched. Valid UTF-8 needs
# at most four; more are waiting only when a model produces garbage.
_MAX_WAITING = 8
_REPLACEMENT = "\ufffd"


class _TokenText:
    """Text of a growing token list; the concatenation of all parts equals `decode` of the whole list.

    Decoders look at neighbours: a byte-level one joins bytes to characters, a sentencepiece one strips the space
    before the first word. So a window is decoded, of the tokens that are waiting and one token before them, whose text
    is known. The window restarts where the text is complete; its cost does not depend on the length of the list.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._context: list[int] = []  # one token, and one that is empty if any followed it
        self._context_text = ""
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        tokenizer = self._tokenizer
        if token in self._skipped or tokenizer.piece(token) is None:
            return ""
        if token in tokenizer.byte_fallback_ids:
            # A run of byte tokens is decoded as a whole: one wrong byte turns all of them into U+FFFD.
            self._waiting.append(token)
            return ""
        self._waiting.append(token)
        text = self._decode_waiting()
        if not tokenizer.joins_bytes or not text.endswith(_REPLACEMENT):
            return self._advance(len(self._waiting), text)
        if len(self._waiting) > _MAX_WAITING:
            return self._cut(text)
        return ""

    def flush(self) -> str:
        """Returns the rest, as `decode` gives it when nothing follows."""
        return self._advance(len(self._waiting), self._decode_waiting()) if self._waiting else ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _decode_waiting(self) -> str:
        return self._decode(self._context + self._waiting)[len(self._context_text) :]

    def _advance(self, count: int, text: str) -> str:
        """Gives out the first `count` waiting tokens, whose text is `text`."""
        # An empty token alone does not do: a decoder would take what follows it for the start of the text. But it ends
        # a run of byte tokens, and what follows one at the very start is no start of the text.
        for token in self._waiting[:count]:
            if self._tokenizer.piece(token):
                self._context = [token]
            elif not self._context or self._tokenizer.piece(self._context[-1]):
                self._context = [*self._context, token]
        self._context_text = self._decode(self._context)
        del self._waiting[:count]
        return text

    def _cut(self, text: str) -> str:
        """Cuts the window before its last character. At a cut inside a character both halves would give their own
        U+FFFD, so where the parts' texts add up to the whole, no later byte can change the first part."""
        for count in range(len(self._waiting) - 1, 0, -1):
            tail = self._decode(self._waiting[count:])
            head = self._decode(self._context + self._waiting[:count])[len(self._context_text) :]
            if head + tail == text:
                return self._advance(count, head)
        return ""


class IncrementalDetokenizer:
    """Text of one answer as its tokens arrive.

    stop: strings that end the answer. The one that is completed first counts; of several completed by the same
    character, the longest. stop_regex: searches for expressions that end it, see `draftwing.requests.stop_regex`;
    against a string, what ends first counts. Text up to the stop (`no_stop_trim`: including it) is given out, nothing
    after it. Which is found, and where, does not depend on how the tokens are split over calls.
    track: keep `starts`, to know which tokens a text is made of.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        no_stop_trim: bool = False,
        stop_regex: RegexScanner | None = None,
        track: bool = False,
    ) -> None:
        self.stopped: str | None = None  # the text that met a stop
        self.expression: str | None = None  # of stop_regex, if it was one
        self.starts: list[int] | None = [] if track else None  # characters of certain text before each token
        self._source = _TokenText(tokenizer, skip_special_tokens)
        self._stop = tuple(s for s in stop if s)
        self._regex = stop_regex
        self._no_stop_trim = no_stop_trim
        self._longest = max((len(s) for s in self._stop), default=0)
        self._certain = 0  # characters of text that no later token can change
        self._sent = 0  # how many of them were given out
        self._recent = ""  # the last certain characters: those not given out, and those that a stop may reach back to

    @property
    def failed(self) -> str | None:
        """Returns why stops are no longer looked for: an expression takes too long."""
        return self._regex.failed if self._regex is not None else None

    def push(self, ids: Iterable[int], final: bool = False) -> str:
        """Takes the next tokens and returns the text that became certain; `final` says that no token follows."""
        if self.stopped is not None:
            return ""
        if self._regex is not None or self.starts is not None:
            return self._push_each(ids, final)
        new = "".join([self._source.push(token) for token in ids])
        if final:
            new += self._source.flush()
        return self._scan(new, final) if self._stop and (new or final) else new

    def end_at(self, matched: str | None) -> str:
        """Returns the rest of the text, where the search here `failed`: up to the stop that the scheduler found, or all
        of it. Nothing was given out since it failed."""
        assert self.failed
        self.stopped = matched
        at = -1 if matched is None else self._recent.rfind(matched)
        end = len(self._recent) if matched is None or at < 0 else at + len(matched) * self._no_stop_trim
        rest = self._recent[len(self._recent) - (self._certain - self._sent) : end]
        self._sent += len(rest)
        return rest

    def _push_each(self, ids: Iterable[int], final: bool) -> str:
        """Token by token, since an expression is searched in the text after each of them."""
        shown = ""
        for token in ids:
            if self.starts is not None:
                self.starts.append(self._certain)
            new = self._source.push(token)
            if new:
                shown += self._scan(new, False)
                if self.stopped is not None:
                    return shown
        if final:
            shown += self._scan(self._source.flush(), True)
        return shown

    def _scan(self, new: str, final: bool) -> str:
        buffer, self._certain = self._recent + new, self._certain + len(new)
        first = self._certain - len(buffer)  # where the buffer begins in the text
        unsent = self._sent - first
        match = self._find(buffer)
        hold = 0
        if not final and not self._no_stop_trim:
            hold = max((partial_end(buffer, string) for string in self._stop), default=0)
        if self._regex is not None:
            found = self._regex.push(new) if new else None
            if found is not None and (match is None or (found.end, found.start) < (first + match[1], first + match[0])):
                match = max(found.start - first, unsent), found.end - first, found.text
                self.expression = found.pattern
            if self._regex.failed:
                hold = len(buffer) - unsent  # until `end_at`
            elif not final:
                # Even where the match is shown: what a lookahead sees lies behind it.
                hold = max(hold, min(self._regex.hold, len(buffer) - unsent))
        if match is not None:
            start, end, self.stopped = match
            # With trimming, what precedes the match was never sent beyond its start: it was held as its prefix.
            shown = buffer[unsent : end if self._no_stop_trim else start]
        else:
            shown = buffer[unsent : len(buffer) - hold]
        self._sent += len(shown)
        self._recent = buffer[max(0, len(buffer) - max(self._longest - 1, hold)) :]
        return shown

    def _find(self, buffer: str) -> tuple[int, int, str] | None:
        """Returns (start, end, string) of the first completed stop string. No match ended in earlier text, of which
        `buffer` has the longest - 1 last characters, or more: so the first occurrence of each string is the right
        one."""
        best: tuple[int, int, str] | None = None
        for string in self._stop:
            start = buffer.find(string)
            if start >= 0 and (best is None or (start + len(string), start) < (best[1], best[0])):
                best = (start, start + len(string), string)
        return best


def partial_end(text: str, marker: str) -> int:
    """Returns the length of the longest end of `text` that `marker` begins with and is longer than."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0


class StopStringScanner:
    """Finds where an answer with stop strings or expressions ends, for the scheduler: the detokenizer of the stream,
    fed token by token."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        params: SamplingParams,
        together: Hashable | None = None,
        searches: Searches | None = None,
    ) -> StopStringScanner | None:
        """Returns what watches an answer with these parameters; None where its text ends nothing. together: as
        `GenerationRequest.together`.  searches: of all answers; None: it shares nothing."""
        regex = (searches or Searches()).scanner(params.stop_regex, together)
        if not params.stop and regex is None:
            return None
        return cls(IncrementalDetokenizer(tokenizer, params.skip_special_tokens, params.stop, stop_regex=regex))

    @property
    def failed(self) -> str | None:
        """Returns why the answer can no longer be watched: an expression takes too long. It has to end then."""
        return self._detokenizer.failed

    def push(self, token: int) -> str | None:
        """Returns the stop that the text contains since this token, or None. Later calls repeat the answer."""
        self._detokenizer.push((token,))
        return self._detokenizer.stopped

    def finish(self) -> str | None:
        """Returns the stop that the whole text contains, or None, when the answer ends for another reason: text that
        was waiting for a next token counts too."""
        self._detokenizer.push((), final=True)
        return self._detokenizer.stopped


class TokenTexts:
    """Texts of the tokens of a vocabulary, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def raw(self, token: int) -> bytes:
        """Returns a token's bytes inside of a text; special tokens are written out. Empty for an id outside of the
        vocabulary."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._bytes(token)
        return known

    def text(self, token: int) -> str:
        """Returns a token's text; bytes that are no characters are U+FFFD."""
        return self.raw(token).decode(errors="replace")

    def special(self, token: int) -> bool:
        """Returns whether it is a special token, such as the end of a turn."""
        return token in self._tokenizer.special_ids

    def key(self, token: int) -> str:
        """Returns a name: as `text`, but tokens of different bytes have different ones, `bytes:\\xf0\\x9f` for broken
        characters."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        piece = tokenizer.piece(token)
        if piece is None:
            return b""
        if token in tokenizer.special_ids:
            return piece.encode()
        if token in tokenizer.byte_fallback_ids:
            return bytes([int(piece[3:5], 16)])
        # After another token: at the start of a text some decoders drop a space.
        before, text = self._neighbour
        shown = tokenizer.decode([*before, token], skip_special_tokens=False)[len(text) :]
        if _REPLACEMENT in shown and tokenizer.joins_bytes:
            alphabet = _byte_alphabet()
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
        return shown.encode()

    @cached_property
    def _neighbour(self) -> tuple[list[int], str]:
        ids = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        return ids, self._tokenizer.decode(ids, skip_special_tokens=False)


class TokenNames(TokenTexts):
    """`token_id:17` in place of texts, for clients that read ids from them, as vLLM has it."""

    def _bytes(self, token: int) -> bytes:
        return f"token_id:{token}".encode()


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable bytes are themselves, the others are 256 and up."""
    letters = ByteLevel.alphabet()
    others = [byte for byte in range(256) if chr(byte) not in letters]
    return {letter: ord(letter) if ord(letter) < 256 else others[ord(letter) - 256] for letter in letters}
