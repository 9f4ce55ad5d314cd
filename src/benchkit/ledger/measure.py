"""What a cell's raw says: its metrics and flags, and the cache that spares computing them again."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from sqlalchemy import Connection, delete, select

from benchkit import metrics, record, stats, validity
from benchkit.canonical import canonical_json, hash_of, sha256_hex
from benchkit.ledger.database import measure_table
from benchkit.metrics import cell_metrics
from benchkit.protocol import Protocol
from benchkit.record import CellRecord, RequestRecord, Run
from benchkit.validity import RULES, Flag, cell_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The metrics and flags of one cell."""

    metrics: Mapping[str, float | None]
    flags: tuple[Flag, ...]


def examine(protocol: Protocol, run: Run, cell: CellRecord, records: Sequence[RequestRecord]) -> Examined:
    """The metrics and flags of a cell, from its records."""
    return Examined(
        metrics=cell_metrics(records, cell=cell.cell, facts=cell.facts, slo=protocol.slo),
        flags=cell_flags(protocol, run, cell, records),
    )


@cache
def code() -> str:
    """Names the code that computes metrics and flags: a row that other code filled in is not used."""
    return sha256_hex("".join(inspect.getsource(m) for m in (metrics, record, stats, validity)))[:16]


def cached(conn: Connection, entry: str) -> dict[int, Examined]:
    """What the cache holds of a run (named by the entry that recorded it), by the place of the cell."""
    rows = conn.execute(
        select(measure_table).where(
            measure_table.c.entry == entry, measure_table.c.code == code(), measure_table.c.rules == RULES
        )
    ).mappings()
    whole = [row for row in map(dict, rows) if is_whole(row)]
    return {row["place"]: examined_of(row) for row in whole}


def keep(conn: Connection, entry: str, examined: Mapping[int, Examined]) -> None:
    """Puts what was computed of a run's cells in the cache."""
    for place, what in examined.items():
        conn.execute(delete(measure_table).where(measure_table.c.entry == entry, measure_table.c.place == place))
        conn.execute(measure_table.insert(), cache_row(entry, place, what))


def cache_row(entry: str, place: int, examined: Examined) -> dict[str, Any]:
    """The row of the cache for one cell, with a digest that gives a change by hand away."""
    row = {
        "entry": entry,
        "place": place,
        "code": code(),
        "rules": RULES,
        "metrics": canonical_json(examined.metrics),
        "flags": canonical_json([asdict(f) for f in examined.flags]),
    }
    return {**row, "digest": hash_of(row)}


def is_whole(row: Mapping[str, Any]) -> bool:
    """Whether a row of the cache is as it was written."""
    return bool(row["digest"] == hash_of({k: v for k, v in row.items() if k != "digest"}))


def examined_of(row: Mapping[str, Any]) -> Examined:
    """What a whole row of the cache holds."""
    return Examined(metrics=json.loads(row["metrics"]), flags=tuple(Flag(**f) for f in json.loads(row["flags"])))
