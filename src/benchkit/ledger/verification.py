"""Whether a ledger still holds: raws, entries, rows, guards and cache, each against what it follows from."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select

from benchkit.canonical import canonical_json, sha256_hex
from benchkit.errors import BadInput, Finding
from benchkit.ledger.database import (
    APPEND_ONLY,
    REBUILD,
    Database,
    derived_rows,
    expected_schema,
    metadata,
    schema_of,
)
from benchkit.ledger.entries import Entry, Graph, data_of_row, entry_of_row
from benchkit.ledger.files import Layout, read_entry
from benchkit.ledger.journal import unfinished
from benchkit.ledger.measure import Examined, cache_row, code, examine, examined_of, is_whole
from benchkit.ledger.states import RunState, States, fold
from benchkit.ledger.store import Ledger, record_faults
from benchkit.protocol import Protocol, parse_protocol
from benchkit.record import pinned_bytes, read_raw
from benchkit.validity import RULES, Flag

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is not as the ledger says."""

    kind: str  # database | schema | entry | entry-file | unmerged | row | raw | protocol | flags | cache
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify` found. Notes are worth knowing and break nothing."""

    ok: bool
    raws: int  # raws that entries name
    entries: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def verify(ledger: Ledger | Path) -> Verification:
    """Checks all of a ledger against itself: every hash, link, row, trigger, metric and flag.

    Args:
        ledger: an open ledger, or the folder of one: it is opened first, as every command does, which puts
            right what a crash or a pull left half done; one too damaged to open is checked all the same.

    Raises:
        BadInput: no ledger there.
    """
    if isinstance(ledger, Ledger):
        return _verify(ledger.layout, ledger.chain.database, list(ledger.notes), [])
    layout = Layout(ledger)
    if not layout.exists:
        raise BadInput(f"no ledger at {ledger}; `benchkit run` makes one")
    try:
        opened = Ledger.open(ledger)
    except (BadInput, Finding) as error:
        return _verify(layout, None, [], [_problem("database", str(error))])
    with opened:
        return _verify(layout, opened.chain.database, list(opened.notes), [])


def _verify(layout: Layout, database: Database | None, notes: list[str], problems: list[Problem]) -> Verification:
    files, broken = _read_files(layout)
    problems += broken
    tables: dict[str, list[Row]] = {}
    if database is not None:
        tables, found = _read_tables(database)
        problems += found
    entries = dict(files)
    if "entry" in tables:
        problems += _entry_problems(layout, tables["entry"], files, entries)

    graph = Graph(entries.values())
    states = fold(graph)
    problems += _graph_problems(graph, states)
    notes += [f"entry {h[:12]}… is of a kind that this version does not know" for h in states.unknown]

    expected, found = _expected_rows(graph)
    problems += found
    for table in APPEND_ONLY[1:]:
        if table.name in tables:
            problems += _row_problems(table.name, expected[table.name], tables[table.name])

    cache = {(r["entry"], r["place"]): r for r in tables.get("measure", [])}
    for state in states.runs.values():
        found, said = _run_problems(layout, state, _sizes(entries[state.entry]), cache)
        problems += found
        notes += said
    problems += [
        _problem("cache", f"measure {_key(key)}: columns entry, place: no such cell; changed by hand")
        for key in cache  # what the runs left over
    ]

    shas = {row["sha256"] for row in expected["raw"]}
    notes += [*_leftovers(layout, shas), f"SQLite {sqlite3.sqlite_version}"]
    return Verification(
        ok=not problems, raws=len(shas), entries=len(entries), problems=tuple(problems), notes=tuple(notes)
    )


def _problem(kind: str, what: str) -> Problem:
    return Problem(kind=kind, what=what)


# --- the database as SQLite sees it -------------------------------------------------------------------------


def _read_tables(database: Database) -> tuple[dict[str, list[Row]], list[Problem]]:
    """All rows of all tables that can be read, and what SQLite itself finds wrong."""
    tables: dict[str, list[Row]] = {}
    problems = []
    for table in metadata.sorted_tables:
        try:
            with database.reading() as conn:
                tables[table.name] = [dict(row) for row in conn.execute(select(table)).mappings()]
        except Finding as error:
            problems.append(_problem("database", f"table {table.name}: {error}"))
    try:
        with database.reading() as conn:
            schema = schema_of(conn)
            faults = [str(row[0]) for row in conn.exec_driver_sql("PRAGMA integrity_check(5)")]
            orphans = list(conn.exec_driver_sql("PRAGMA foreign_key_check"))
    except Finding as error:
        return tables, [*problems, _problem("database", str(error))]
    problems += [_problem("database", f"integrity check: {f}; {REBUILD}") for f in faults if f != "ok"]
    problems += [
        _problem("row", f"{child}: a row refers to a row of {parent} that is not there; {REBUILD}")
        for child, _, parent, _ in orphans
    ]
    return tables, problems + _schema_problems(schema)


def _schema_problems(found: Mapping[str, str]) -> list[Problem]:
    expected = expected_schema()
    return [
        *(_problem("schema", f"{n}: missing; {REBUILD}") for n in sorted(expected.keys() - found.keys())),
        *(_problem("schema", f"{n}: not of benchkit's making") for n in sorted(found.keys() - expected.keys())),
        *(
            _problem("schema", f"{n}: is not as it was made: {found[n]}; {REBUILD}")
            for n in sorted(found.keys() & expected.keys())
            if found[n] != expected[n]
        ),
    ]


# --- entries ------------------------------------------------------------------------------------------------


def _read_files(layout: Layout) -> tuple[dict[str, Entry], list[Problem]]:
    entries, problems = {}, []
    for hash_, path in sorted(layout.entry_files().items()):
        try:
            entries[hash_] = read_entry(path)
        except ValueError as error:
            problems.append(_problem("entry-file", f"{path}: {error}; restore it, entries are never rewritten"))
    return entries, problems


def _entry_problems(
    layout: Layout, rows: Sequence[Row], files: Mapping[str, Entry], entries: dict[str, Entry]
) -> Iterator[Problem]:
    """Rows of `entry` against their hashes and files; the whole ones are added to `entries`."""
    seen = set()
    for row in rows:
        where = f"entry {_short(row['hash'])}"
        seen.add(row["hash"])
        try:
            entry = entry_of_row(row)
        except ValueError as error:
            data = data_of_row(row)
            meant = sha256_hex(data) if data is not None else ""
            if meant in files:
                seen.add(meant)
                yield _problem("entry", f"{where}: column hash: should be {meant[:12]}…; {REBUILD}")
            elif row["hash"] in files:
                for column, value in files[row["hash"]].row.items():
                    if row[column] != value:
                        words = f"the file says {_short(value, 60)}, the row {_short(row[column], 60)}"
                        yield _problem("entry", f"{where}: column {column}: {words}; {REBUILD}")
            else:
                yield _problem("entry", f"{where}: {error}, and there is no file to restore it from")
            continue
        entries[entry.hash] = entry
        if entry.hash not in files and not layout.entry(entry.hash).exists():
            yield _problem("entry-file", f"{where}: its file is missing; the next command writes it again")
    for hash_ in sorted(files.keys() - seen):
        yield _problem("entry", f"entry {_short(hash_)}: has a file and no row; {REBUILD}")


def _graph_problems(graph: Graph, states: States) -> Iterator[Problem]:
    for child, prev in graph.missing:
        yield _problem("entry", f"entry {_short(child)}: follows {_short(prev)}, which is not here; restore it")
    if len(graph.heads) > 1:
        heads = ", ".join(_short(h) for h in graph.heads)
        yield _problem("unmerged", f"{len(graph.heads)} branches are not joined ({heads}); run `benchkit ledger merge`")
    for hash_, why in states.faults:
        yield _problem("entry", f"entry {_short(hash_)}: {why}")


# --- derived rows -------------------------------------------------------------------------------------------


def _expected_rows(graph: Graph) -> tuple[dict[str, list[Row]], list[Problem]]:
    """The rows that the entries derive, by table."""
    rows: dict[str, list[Row]] = {table.name: [] for table in APPEND_ONLY[1:]}
    raws: dict[str, Row] = {}
    problems = []
    for entry in graph.order:
        try:
            derived = derived_rows(entry)
        except ValueError:
            continue  # `fold` has named it
        for name, new in derived.items():
            for row in new:
                if name == "raw" and raws.setdefault(row["sha256"], row) is not row:
                    if raws[row["sha256"]] != row:
                        what = "two entries give it different size or content"
                        problems.append(_problem("raw", f"raw {_short(row['sha256'])}: {what}"))
                    continue
                rows[name].append(row)
    return rows, problems


def _row_problems(name: str, expected: Sequence[Row], found: Sequence[Row]) -> Iterator[Problem]:
    """Every difference between the rows of a table and those that the entries derive."""
    keys = [c.name for c in metadata.tables[name].primary_key.columns]
    want = {tuple(row[k] for k in keys): row for row in expected}
    have = {tuple(row[k] for k in keys): row for row in found}
    extra = [key for key in have if key not in want]
    for key, row in want.items():
        where = f"{name} {_key(key)}"
        there = have.get(key)
        if there is None:
            # A changed key looks like one row lost and another won.
            moved = next((k for k in extra if _alike(have[k], row, keys)), None)
            if moved is None:
                yield _problem("row", f"{where}: missing; {REBUILD}")
                continue
            extra.remove(moved)
            there = have[moved]
        for column, value in row.items():
            if there[column] != value:
                words = f"the entries say {_short(value)}, the row {_short(there[column])}"
                yield _problem("row", f"{where}: column {column}: {words}; {REBUILD}")
    for key in extra:
        yield _problem("row", f"{name} {_key(key)}: a row that no entry gives; {REBUILD}")


def _alike(a: Row, b: Row, keys: Sequence[str]) -> bool:
    return all(a[c] == b[c] for c in a if c not in keys) and len(a) > len(keys)


# --- raws, flags and the cache ------------------------------------------------------------------------------


def _run_problems(
    layout: Layout, state: RunState, sizes: Mapping[str, int], cache: dict[tuple[Any, Any], Row]
) -> tuple[list[Problem], list[str]]:
    """What is wrong with a run's raws, flags and cached rows (which are taken out of `cache`), and notes."""
    run, problems, notes = state.run, [], []
    protocol: Protocol | None = None
    try:
        protocol = parse_protocol(run.protocol_text, f"run {run.id}: protocol")
        if protocol.hash != run.protocol_hash:
            problems.append(_problem("protocol", f"run {run.id}: its hash is not that of its protocol text"))
    except BadInput as error:
        problems.append(_problem("protocol", str(error)))
    if state.status == "banked" and (run.grid == "cold" or not run.complete):
        problems.append(_problem("flags", f"run {run.id}: is banked, and cold or incomplete"))

    for place, cell in enumerate(run.cells):
        where = f"run {run.id}, cell {cell.cell}"
        row = cache.pop((state.entry, place), None)
        path = layout.raw(cell.raw)
        try:
            size = len(pinned_bytes(path, cell.raw))
            records = read_raw(path, sha256=cell.raw)
        except Finding as error:
            problems.append(_problem("raw", f"{where}: {error}"))
            if row is not None and not is_whole(row):
                problems.append(_problem("cache", f"measure {_key((state.entry, place))}: changed by hand"))
            continue
        faults = record_faults(cell, records)
        if size != sizes[cell.raw]:
            faults.append(f"bytes: the ledger says {sizes[cell.raw]}, the file has {size}")
        problems += [_problem("raw", f"{where}: raw {_short(cell.raw)}: {f}") for f in faults]
        if faults or protocol is None:
            continue
        examined = examine(protocol, run, cell, records)
        if row is not None:
            problems += _cache_problems(state.entry, place, row, examined)
        if state.flags is not None and state.rules is not None:
            found, said = _flag_problems(where, state, state.flags[place], examined, place)
            problems += found
            notes += said
    return problems, notes


def _cache_problems(entry: str, place: int, row: Row, examined: Examined) -> Iterator[Problem]:
    where = f"measure {_key((entry, place))}"
    if not is_whole(row):
        fresh = cache_row(entry, place, examined)
        changed = [c for c in fresh if fresh[c] != row[c]] or ["digest"]
        yield _problem("cache", f"{where}: column {', '.join(changed)}: changed by hand; {REBUILD}")
    elif row["code"] == code() and row["rules"] == RULES:
        kept = examined_of(row)
        for name in sorted(kept.metrics.keys() | examined.metrics.keys()):
            a, b = kept.metrics.get(name), examined.metrics.get(name)
            if not _equal(a, b):
                yield _problem("cache", f"{where}: column metrics: {name} is {a}, its raw gives {b}; {REBUILD}")
        if kept.flags != examined.flags:
            yield _problem("cache", f"{where}: column flags: not those that its raw gives; {REBUILD}")


def _equal(a: float | None, b: float | None) -> bool:
    # Sums of floats may differ in the last bits between processors, and the database may have travelled.
    return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9))


def _flag_problems(
    where: str, state: RunState, banked: Sequence[Flag], examined: Examined, place: int
) -> tuple[list[Problem], list[str]]:
    """The flags that a cell was banked with against those that its raw gives now."""
    cell = state.run.cells[place].cell
    problems = [
        _problem("flags", f"{where}: banked with {f.name}, which nobody waived")
        for f in banked
        if f.blocking and state.waived(f.name, cell) is None and state.status == "banked"
    ]
    then = {(f.name, f.blocking) for f in banked}
    now = {(f.name, f.blocking) for f in examined.flags}
    if state.rules == RULES:
        problems += [
            _problem("flags", f"{where}: {name}: not the same in the banked entry and by its raw")
            for name, _ in sorted(then ^ now)
        ]
        return problems, []
    newer = ", ".join(sorted(name for name, _ in now - then))
    rules = f"rules {RULES} (banked under {state.rules})"
    return problems, [f"{where}: {rules} add {newer}; what is banked stays"] if newer else []


def _sizes(entry: Entry) -> Mapping[str, int]:
    sizes: Mapping[str, int] = entry.payload["bytes"]
    return sizes


# --- notes --------------------------------------------------------------------------------------------------


def _leftovers(layout: Layout, shas: set[str]) -> Iterator[str]:
    """What lies in the folder and belongs to no entry: of use to somebody, or the trace of a crash."""
    for path in sorted(layout.raws.rglob("*")) if layout.raws.is_dir() else ():
        if path.is_dir():
            continue
        name = path.relative_to(layout.root)
        if path.suffix == ".tmp":
            yield f"{name}: left by a crash; it may be deleted"
        elif path.suffix != ".parquet" or path.parent.name + path.stem not in shas:
            yield f"{name}: a raw that no entry names"
    for folder in (layout.entries, layout.root):
        for path in sorted(folder.glob("*.tmp")) if folder.is_dir() else ():
            yield f"{path.relative_to(layout.root)}: left by a crash; it may be deleted"
    for session in unfinished(layout.root):
        yield f"session {session} is not finished; `benchkit run --resume {session}` goes on with it"


def _short(value: Any, most: int = 12) -> str:
    text = value if isinstance(value, str) else canonical_json(value) if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _key(key: Sequence[Any]) -> str:
    return " ".join(_short(part) for part in key)
