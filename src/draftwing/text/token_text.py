"""Looks up what a single token stands for, as log probabilities show it: bytes, which need not be whole characters."""

from __future__ import annotations

from functools import cached_property

from tokenizers.pre_tokenizers import ByteLevel

from draftwing.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


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
