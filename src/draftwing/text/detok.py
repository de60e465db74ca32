"""From tokens to text, incrementally: only what no later token can change is given out, and stop strings are cut.

There is one implementation for the stream and for the scheduler's stop rule, so both cut at the same character.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        self._context: list[int] = []  # at most one token
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
        """The rest, as `decode` gives it when nothing follows."""
        return self._advance(len(self._waiting), self._decode_waiting()) if self._waiting else ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _decode_waiting(self) -> str:
        return self._decode(self._context + self._waiting)[len(self._context_text) :]

    def _advance(self, count: int, text: str) -> str:
        """Gives out the first `count` waiting tokens, whose text is `text`."""
        # An empty token does not do: a decoder would take what follows it for the start of the text.
        last = next((token for token in reversed(self._waiting[:count]) if self._tokenizer.piece(token)), None)
        if last is not None:
            self._context = [last]
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
    character, the longest. Text up to it (`no_stop_trim`: including it) is given out, nothing after it. Which one is
    found, and where, does not depend on how the tokens are split over calls.
    spaces_between_special_tokens: has no effect, as for every tokenizer that the `tokenizers` library runs: special
    tokens are decoded like others, with no space added around them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        no_stop_trim: bool = False,
    ) -> None:
        self.stopped: str | None = None  # the stop string that was met
        self._source = _TokenText(tokenizer, skip_special_tokens)
        self._stop = tuple(s for s in stop if s)
        self._no_stop_trim = no_stop_trim
        self._longest = max((len(s) for s in self._stop), default=0)
        self._seen = ""  # the last certain characters that a stop string may still reach back to
        self._held = 0  # how many of them were not given out
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, ids: Iterable[int], final: bool = False) -> str:
        """Takes the next tokens and returns the text that became certain; `final` says that no token follows."""
        if self.stopped is not None:
            return ""
        new = "".join([self._source.push(token) for token in ids])
        if final:
            new += self._source.flush()
        if self._stop and (new or final):
            new = self._scan(new, final)
        if new:
            self._parts.append(new)
        return new

    def _scan(self, new: str, final: bool) -> str:
        buffer = self._seen + new
        unsent = len(self._seen) - self._held
        match = self._find(buffer)
        if match is not None:
            start, end, self.stopped = match
            # With trimming, what precedes the match was never sent beyond its start: it was held as its prefix.
            return buffer[unsent : end if self._no_stop_trim else start]
        hold = 0 if final or self._no_stop_trim else self._possible_start(buffer)
        self._seen, self._held = buffer[max(0, len(buffer) - self._longest + 1) :], hold
        return buffer[unsent : len(buffer) - hold]

    def _find(self, buffer: str) -> tuple[int, int, str] | None:
        """(start, end, string) of the first completed stop string. Only the longest - 1 last characters of earlier
        text are in `buffer`, and no match ended in them, so the first occurrence of each string is the right one."""
        best: tuple[int, int, str] | None = None
        for string in self._stop:
            start = buffer.find(string)
            if start >= 0 and (best is None or (start + len(string), start) < (best[1], best[0])):
                best = (start, start + len(string), string)
        return best

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that a stop string starts with."""
        longest = 0
        for string in self._stop:
            at = buffer.find(string[0], max(0, len(buffer) - len(string) + 1))
            while at >= 0 and not string.startswith(buffer[at:]):
                at = buffer.find(string[0], at + 1)
            if at >= 0:
                longest = max(longest, len(buffer) - at)
        return longest


class StopStringScanner:
    """The scheduler's stop rule for requests with stop strings: the detokenizer of the stream, fed token by token."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], skip_special_tokens: bool = True) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, stop=stop)

    def push(self, token: int) -> str | None:
        """The stop string that the text contains since this token, or None. Later calls repeat the answer."""
        self._detokenizer.push((token,))
        return self._detokenizer.stopped

    def finish(self) -> str | None:
        """Like `push`, when the answer ends for another reason: text that was waiting for a next token counts too."""
        self._detokenizer.push((), final=True)
        return self._detokenizer.stopped
