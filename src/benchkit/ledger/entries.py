"""An entry of the ledger: its one text, its hash, and the graph that entries make."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchkit.canonical import canonical_json, sha256_hex
from benchkit.errors import BadInput

ENTRY_SCHEMA = 1
"""The version of an entry's text."""

KINDS = frozenset(
    ("recorded", "banked", "quarantined", "superseded", "retracted", "waived", "labelled", "note", "merge")
)
"""What an entry may say. Entries of kinds that a later version added are kept and passed over."""

_HASH = re.compile(r"[0-9a-f]{64}")
_AT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")
_KEYS = {"at", "kind", "payload", "prev", "schema", "who"}
_COLUMNS = ("hash", "prev", "kind", "at", "who", "payload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One immutable statement about runs, linked to the entries before it by their hashes."""

    hash: str  # sha256 of `data`
    prev: tuple[str, ...]  # none for the first, two or more only in a merge
    kind: str
    at: str  # UTC, ISO 8601 with Z
    who: str
    payload: Mapping[str, Any]

    @property
    def data(self) -> bytes:
        """The bytes that are hashed, which are also those of the entry's file."""
        return _text(self.prev, self.kind, self.at, self.who, self.payload).encode()

    @property
    def row(self) -> dict[str, str]:
        """The entry as a row of the table `entry`: `prev` and `payload` are the JSON that was hashed."""
        return {
            "hash": self.hash,
            "prev": canonical_json(self.prev),
            "kind": self.kind,
            "at": self.at,
            "who": self.who,
            "payload": canonical_json(self.payload),
        }


def new_entry(*, prev: Iterable[str], kind: str, at: str, who: str, payload: Mapping[str, Any]) -> Entry:
    """A new entry.

    Raises:
        BadInput: a time that is not UTC ISO 8601 with Z, or a payload that JSON cannot carry.
    """
    if not _AT.fullmatch(at):
        raise BadInput(f'at: expected UTC like "2026-01-31T12:00:00Z", found "{at}"')
    try:
        data = _text(tuple(prev), kind, at, who, payload).encode()
    except (TypeError, ValueError) as error:  # NaN, an object, half of a surrogate pair
        raise BadInput(f"{kind} entry: cannot be written as JSON: {error}") from None
    return parse_entry(data)


def parse_entry(data: bytes) -> Entry:
    """The entry that these bytes are.

    Raises:
        ValueError: they are not the canonical text of an entry; the message says why.
    """
    try:
        value = json.loads(data)
    except ValueError:
        raise ValueError("not JSON") from None
    if not isinstance(value, dict) or not {"schema", "kind"} <= value.keys():
        raise ValueError("not an entry")
    if value["schema"] != ENTRY_SCHEMA:
        raise ValueError(
            f"schema {value['schema']!r} is not known here ({ENTRY_SCHEMA} is); a newer benchkit may read it"
        )
    prev, payload = value.get("prev"), value.get("payload")
    if (
        value.keys() != _KEYS
        or not all(isinstance(value[key], str) for key in ("at", "kind", "who"))
        or not isinstance(payload, dict)
        or not isinstance(prev, list)
        or not all(isinstance(p, str) and is_hash(p) for p in prev)
    ):
        raise ValueError("not an entry")
    if canonical_json(value).encode() != data:
        raise ValueError("not in canonical form")
    return Entry(
        hash=sha256_hex(data),
        prev=tuple(prev),
        kind=value["kind"],
        at=value["at"],
        who=value["who"],
        payload=payload,
    )


def data_of_row(row: Mapping[str, Any]) -> bytes | None:
    """The bytes that a row of the table stands for, as they lie there; None where a column is no text.

    Built from the columns' own texts, so that any change of any column changes the bytes.
    """
    if not all(isinstance(row[name], str) for name in _COLUMNS):
        return None
    at, kind, who = (canonical_json(row[name]) for name in ("at", "kind", "who"))
    text = (
        f'{{"at":{at},"kind":{kind},"payload":{row["payload"]},"prev":{row["prev"]},'
        f'"schema":{ENTRY_SCHEMA},"who":{who}}}'
    )
    return text.encode(errors="replace")


def entry_of_row(row: Mapping[str, Any]) -> Entry:
    """The entry that a row holds.

    Raises:
        ValueError: the row is not what was written; the message says why.
    """
    data = data_of_row(row)
    if data is None:
        raise ValueError("a column is no text")
    if sha256_hex(data) != row["hash"]:
        raise ValueError(f"does not match its hash (found {sha256_hex(data)[:12]}…)")
    return parse_entry(data)


def is_hash(text: str) -> bool:
    """Whether a text is a sha256 as 64 hex digits."""
    return _HASH.fullmatch(text) is not None


def _text(prev: tuple[str, ...], kind: str, at: str, who: str, payload: Mapping[str, Any]) -> str:
    return canonical_json(
        {"at": at, "kind": kind, "payload": payload, "prev": prev, "schema": ENTRY_SCHEMA, "who": who}
    )


# --- the graph ----------------------------------------------------------------------------------------------


class Graph:
    """Entries in an order in which each stands after those it is linked to; equal sets give equal orders.

    Attributes:
        order: all entries; where the links leave it open, by time, then by hash.
        heads: the hashes that no entry is linked to, newest last. More than one: unmerged branches.
        missing: links to entries that are not here, as (entry, prev).
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        by_hash = {e.hash: e for e in entries}
        children: dict[str, list[str]] = {h: [] for h in by_hash}
        waits_for = dict.fromkeys(by_hash, 0)
        missing = []
        for e in by_hash.values():
            for prev in e.prev:
                if prev in by_hash:
                    children[prev].append(e.hash)
                    waits_for[e.hash] += 1
                else:
                    missing.append((e.hash, prev))

        ready = [(by_hash[h].at, h) for h, n in waits_for.items() if n == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            _, h = heapq.heappop(ready)
            order.append(by_hash[h])
            for child in children[h]:
                waits_for[child] -= 1
                if waits_for[child] == 0:
                    heapq.heappush(ready, (by_hash[child].at, child))

        self.order: tuple[Entry, ...] = tuple(order)
        self.heads: tuple[str, ...] = tuple(
            e.hash for e in sorted(order, key=lambda e: (e.at, e.hash)) if not children[e.hash]
        )
        self.missing: tuple[tuple[str, str], ...] = tuple(sorted(missing))
        self._stretch_of(children)

    def _stretch_of(self, children: Mapping[str, list[str]]) -> None:
        """Splits the graph into unbranched stretches, and notes which stretches lie before which.

        A ledger is one long line with a few forks: bits per stretch stay small where bits per entry
        would grow with the square of the ledger.
        """
        self._place: dict[str, int] = {e.hash: i for i, e in enumerate(self.order)}
        self._stretch: dict[str, int] = {}
        self._before: list[int] = []  # per stretch, a bit for each stretch that lies before it
        for e in self.order:
            prevs = [p for p in e.prev if p in self._place]
            if len(prevs) == 1 and len(children[prevs[0]]) == 1:
                self._stretch[e.hash] = self._stretch[prevs[0]]
                continue
            self._stretch[e.hash] = len(self._before)
            bits = 0
            for p in prevs:
                bits |= self._before[self._stretch[p]] | 1 << self._stretch[p]
            self._before.append(bits)

    def leads_to(self, earlier: str, later: str) -> bool:
        """Whether `later` was written in the knowledge of `earlier`: a chain of links joins them."""
        a, b = self._stretch[earlier], self._stretch[later]
        if a == b:
            return self._place[earlier] < self._place[later]
        return bool(self._before[b] >> a & 1)
