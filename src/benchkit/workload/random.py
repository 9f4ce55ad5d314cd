"""Random prompts of an exact length: words drawn by hash, so that prompt i is the same on every machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from benchkit.canonical import canonical_json, sha256_hex
from benchkit.errors import BadInput, EndpointUnfit
from benchkit.protocol import Cell, Workload
from benchkit.workload.words import LETTERS

NONCE_TOKENS = 8
"""Tokens of the nonce that opens a unique prompt: one letter and seven words."""

FEWEST_WORDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Words that are one token each on a server, and the tokens that its template adds to every prompt.

    `ids` maps words and letters to token ids where the server tells them, for `workload.send = "ids"`.
    """

    words: tuple[str, ...]  # 2^k of them, k ≤ 8
    template_tokens: int
    ids: dict[str, int] | None

    @staticmethod
    def of(single_token_words: Sequence[str], *, template_tokens: int, ids: dict[str, int] | None) -> Vocabulary:
        """The vocabulary of the first 2^k words, k as large as they allow, at most 8.

        Raises:
            EndpointUnfit: too few words are one token on this server for prompts that differ.
        """
        if len(single_token_words) < FEWEST_WORDS:
            raise EndpointUnfit(
                f"only {len(single_token_words)} known words are one token on this server, {FEWEST_WORDS} are needed "
                "to build prompts of exact length"
            )
        size = 1 << min(8, int(math.log2(len(single_token_words))))
        return Vocabulary(words=tuple(single_token_words[:size]), template_tokens=template_tokens, ids=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A prompt before its nonce: the words that follow, and what is asked of the server. Lengths in tokens."""

    words: tuple[str, ...]
    isl: int  # P as it should be, template and nonce included
    osl: int


def bodies(workload: Workload, cell: Cell, n: int, vocabulary: Vocabulary) -> tuple[Body, ...]:
    """The n prompts of a cell. Body i is a function of the workload's seed, the cell and i alone.

    ISL and OSL are drawn uniformly from the integers in [(1 − r)·x, (1 + r)·x].

    Raises:
        BadInput: the cell's ISL cannot hold the template and the nonce.
    """
    return tuple(_body(workload, cell, i, vocabulary) for i in range(n))


def _body(workload: Workload, cell: Cell, index: int, vocabulary: Vocabulary) -> Body:
    key = f"{workload.seed}|{cell.isl}|{cell.osl}|{cell.kv}|{cell.concurrency}|{index}"
    isl = _drawn(cell.isl, workload.range_ratio, key + "|isl")
    osl = _drawn(cell.osl, workload.range_ratio, key + "|osl")
    template = 0 if workload.send == "ids" else vocabulary.template_tokens
    head = NONCE_TOKENS if workload.prefix == "unique" else 1
    count = isl - template - head
    if count < 1:
        raise BadInput(
            f"workload.isl: expected at least {template + head + 1} tokens here "
            f"(template {template}, head of the prompt {head}), found {isl}"
        )
    return Body(words=_words(vocabulary.words, key, count), isl=isl, osl=osl)


def _drawn(x: int, ratio: float, key: str) -> int:
    r = Fraction(repr(ratio))  # exact: in floats, 1.15 × 100 is a little less than 115
    low, high = math.ceil((1 - r) * x), math.floor((1 + r) * x)
    if low >= high:
        return x
    u = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    return max(1, low + u * (high - low + 1) // (1 << 64))


def _words(words: Sequence[str], key: str, count: int) -> tuple[str, ...]:
    # One byte of SHAKE-128 a word: the same stream in any language, and no modulo bias, since 2^k words divide 256.
    mask = len(words) - 1
    return tuple(words[b & mask] for b in hashlib.shake_128(key.encode()).digest(count))


def nonce(vocabulary: Vocabulary, sent_by: str, cell: Cell, index: int) -> tuple[str, ...]:
    """The first tokens of a unique prompt: a function of who sends it, cell and index, so that nothing is reused.

    `sent_by` is the run's id, and a salt for a cell that is measured again: its first prompts may be in the cache.
    """
    key = f"{sent_by}|{cell}|{index}"
    letter = LETTERS[hashlib.sha256(key.encode()).digest()[0] % len(LETTERS)]
    return (letter, *_words(vocabulary.words, key, NONCE_TOKENS - 1))


def prompt_words(workload: Workload, vocabulary: Vocabulary, sent_by: str, cell: Cell, index: int, body: Body) -> str:
    """The text of prompt i: nonce (or, as is, one fixed letter) and body, one blank between words."""
    head = nonce(vocabulary, sent_by, cell, index) if workload.prefix == "unique" else (LETTERS[0],)
    return " ".join((*head, *body.words))


def token_ids(vocabulary: Vocabulary, text: str) -> list[int]:
    """The token ids of a text made of the vocabulary's words.

    Raises:
        EndpointUnfit: the server did not tell its token ids.
    """
    if vocabulary.ids is None:
        raise EndpointUnfit(
            'workload.send = "ids" needs a server that tells its token ids (/tokenize); this one does not'
        )
    return [vocabulary.ids[word] for word in text.split(" ")]


def prompts_digest(workload: Workload, vocabulary: Vocabulary, cells: Iterable[tuple[Cell, Sequence[Body]]]) -> str:
    """The sha256 over the ordered prompts of a grid before their nonce, words or token ids, and the OSL asked for."""

    def sent(body: Body) -> str | list[int]:
        text = " ".join(body.words)
        return token_ids(vocabulary, text) if workload.send == "ids" else text

    lines = (canonical_json([str(cell), sent(b), b.osl]) for cell, group in cells for b in group)
    return sha256_hex("\n".join(lines))
