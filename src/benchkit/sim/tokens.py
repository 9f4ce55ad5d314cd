"""The toy tokenizer: text cut into pieces by one rule, reversible, and a chat template of fixed cost.

The rule: an optional single blank followed by up to 8 ASCII letters, or by one digit, or by one character
that is neither blank, letter nor digit; else one blank character. A word of at most 8 letters is one token
with the blank before it; a longer one is cut every 8 letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final
from zlib import crc32

ID_LIMIT: Final = 2**31
"""Ids are 0 … ID_LIMIT − 1."""

_PIECE: Final = re.compile(r" ?[A-Za-z]{1,8}| ?[0-9]| ?[^\sA-Za-z0-9]|\s")
_BLANK: Final = re.compile(r"\s")


class ToyTokenizer:
    """Text to ids and back; the memo of pieces seen is what makes the way back exact."""

    def __init__(self) -> None:
        self._id_of: dict[str, int] = {}
        self._piece_of: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text's pieces: crc32 of the piece in 31 bits, the next free one if it is taken."""
        known = self._id_of
        return [known[p] if p in known else self._learn(p) for p in _PIECE.findall(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. An id never seen becomes a word that encodes to this one id from then on."""
        known = self._piece_of
        return "".join(known[i] if i in known else self._invent(i) for i in ids)

    def special(self, name: str) -> int:
        """The id of a template token such as `<user:0>`, which no text encodes to."""
        return self._id_of[name] if name in self._id_of else self._learn(name)

    def _learn(self, piece: str) -> int:
        token = crc32(piece.encode("utf-8", "surrogatepass")) % ID_LIMIT
        while token in self._piece_of:
            token = (token + 1) % ID_LIMIT
        self._id_of[piece] = token
        self._piece_of[token] = piece
        return token

    def _invent(self, token: int) -> str:
        letters, rest = "", token
        for _ in range(7):  # 26**7 > 2**31
            rest, digit = divmod(rest, 26)
            letters += chr(ord("a") + digit)
        piece = " " + letters
        self._piece_of[token] = piece
        self._id_of.setdefault(piece, token)
        return piece


def slices(text: str, size: int = 8192) -> Iterator[str]:
    """The text in parts of about `size` ≥ 1 characters that encode to the same ids as the whole.

    A cut is made before a blank only, because a blank never continues a piece.
    """
    start = 0
    while len(text) - start > size:
        blank = _BLANK.search(text, start + size)
        if blank is None:
            break
        yield text[start : blank.start()]
        start = blank.start()
    yield text[start:]


_SPOKEN: Final = """
amber anchor autumn beacon birch border bridge candle canyon cedar circle clover coral cotton crystal delta
distant early ember evening falcon feather fern field forest garden gentle glacier golden granite harbor harvest
hazel hidden hollow island ivory jasmine juniper lantern lemon linen marble meadow mellow morning mountain north
ocean orchard pebble pepper prairie quiet rain river saffron silver stone summer thunder valley velvet willow
"""
WORDS: Final = tuple(" " + word for word in _SPOKEN.split())
"""What the simulated model says, over and over: each word is one token with its blank."""
