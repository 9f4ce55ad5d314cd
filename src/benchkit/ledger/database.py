"""SQLite under the ledger: the tables, the guards that keep them append-only, connections, transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    event,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, StaticPool

from benchkit.errors import BadInput, BenchkitError, Finding
from benchkit.ledger.entries import Entry
from benchkit.record import Run

SCHEMA = 1
"""The version of the tables, kept in `PRAGMA user_version`."""

BUSY_TIMEOUT_S = 30.0

metadata = MetaData()


def _table(name: str, *parts: Any) -> Table:
    # Without rowid: a rowid is a second key, and REPLACE over it would slip past the guard on the first.
    return Table(name, metadata, *parts, sqlite_strict=True, sqlite_with_rowid=False)


def _text(name: str, *parts: Any, nullable: bool = False) -> Column[str]:
    return Column(name, Text, *parts, nullable=nullable)


def _integer(name: str) -> Column[int]:
    return Column(name, Integer, nullable=False)


entry_table = _table(
    "entry",
    Column("hash", Text, primary_key=True),
    _text("prev"),
    _text("kind"),
    _text("at"),
    _text("who"),
    _text("payload"),
)
run_table = _table(
    "run",
    Column("entry", Text, ForeignKey("entry.hash"), primary_key=True),
    Column("id", Text, nullable=False, index=True),
    _text("session"),
    _text("protocol"),
    _text("protocol_hash"),
    _text("arm"),
    _text("arm_hash"),
    _text("grid"),
    _integer("rep"),
    _text("boot_id", nullable=True),
    _integer("complete"),
    _text("started_at"),
    _text("ended_at"),
)
raw_table = _table(
    "raw",
    Column("sha256", Text, primary_key=True),
    _integer("bytes"),
    _text("content"),
)
cell_table = _table(
    "cell",
    Column("entry", Text, ForeignKey("run.entry"), primary_key=True),
    Column("place", Integer, primary_key=True),
    _integer("isl"),
    _integer("osl"),
    _integer("kv"),
    _integer("concurrency"),
    _text("raw", ForeignKey("raw.sha256")),
    _integer("n"),
    _integer("n_ok"),
)
measure_table = _table(
    "measure",
    Column("entry", Text, primary_key=True),
    Column("place", Integer, primary_key=True),
    _text("code"),
    _integer("rules"),
    _text("metrics"),
    _text("flags"),
    _text("digest"),
    ForeignKeyConstraint(["entry", "place"], ["cell.entry", "cell.place"]),
)
"""A cache, and so the one table that may change: what the code named by `code` makes of a cell's raw."""

APPEND_ONLY = (entry_table, run_table, raw_table, cell_table)


def derived_rows(entry: Entry) -> dict[str, list[dict[str, Any]]]:
    """The rows of `raw`, `run` and `cell` that follow from an entry, by table, in the order of insertion.

    Raises:
        ValueError: a recorded entry whose payload is not a run.
    """
    if entry.kind != "recorded":
        return {}
    run, sizes = recorded_run(entry)
    raws = {c.raw: {"sha256": c.raw, "bytes": sizes[c.raw], "content": c.content} for c in run.cells}
    names = [c.name for c in run_table.columns if c.name not in ("entry", "complete")]
    return {
        "raw": list(raws.values()),
        "run": [
            {
                "entry": entry.hash,
                **{name: getattr(run, name) for name in names},
                "complete": int(run.complete),
            }
        ],
        "cell": [
            {
                "entry": entry.hash,
                "place": place,
                "isl": c.cell.isl,
                "osl": c.cell.osl,
                "kv": c.cell.kv,
                "concurrency": c.cell.concurrency,
                "raw": c.raw,
                "n": c.n,
                "n_ok": c.n_ok,
            }
            for place, c in enumerate(run.cells)
        ],
    }


def recorded_run(entry: Entry) -> tuple[Run, Mapping[str, int]]:
    """The run of a recorded entry, and the size in bytes of each of its raws by sha256.

    Raises:
        ValueError: the payload is not a run.
    """
    try:
        run, sizes = Run.from_json(entry.payload["run"]), entry.payload["bytes"]
        names = {c.name for c in run_table.columns} - {"entry", "rep", "complete", "boot_id"}
        texts = [*(getattr(run, n) for n in names), *(t for c in run.cells for t in (c.raw, c.content))]
        numbers = [run.rep, *(n for c in run.cells for n in (sizes[c.raw], c.n, c.n_ok, *astuple(c.cell)))]
        if (
            all(isinstance(t, str) for t in [*texts, run.boot_id or ""])
            and all(isinstance(n, int) for n in numbers)
            and isinstance(run.complete, bool)
        ):
            return run, sizes
    except (KeyError, TypeError, AttributeError):
        pass
    raise ValueError("its payload is not a run")


def insert_entry(conn: Connection, entry: Entry) -> None:
    """Adds an entry and the rows that follow from it; rows of raws that are known stay as they are."""
    conn.execute(entry_table.insert(), entry.row)
    try:
        rows = derived_rows(entry)
    except ValueError:
        return  # kept, since its hash is right; `verify` names it
    for name, values in rows.items():
        table = metadata.tables[name]
        if name == "raw":
            shas = [v["sha256"] for v in values]
            known = set(conn.scalars(select(table.c.sha256).where(table.c.sha256.in_(shas))))
            values = [v for v in values if v["sha256"] not in known]
        if values:
            conn.execute(table.insert(), values)


# --- the schema ---------------------------------------------------------------------------------------------


def _guards(table: Table) -> Iterator[str]:
    """Triggers that refuse update, delete, and the replacing insert (which fires neither by itself)."""
    name = table.name
    same_key = " AND ".join(f"{c.name} = NEW.{c.name}" for c in table.primary_key.columns)
    refuse = f"BEGIN SELECT RAISE(ABORT, '{name} is append-only: a correction is a new entry'); END"
    yield f"CREATE TRIGGER {name}_no_update BEFORE UPDATE ON {name} {refuse}"
    yield f"CREATE TRIGGER {name}_no_delete BEFORE DELETE ON {name} {refuse}"
    yield (
        f"CREATE TRIGGER {name}_no_replace BEFORE INSERT ON {name} "
        f"WHEN EXISTS (SELECT 1 FROM {name} WHERE {same_key}) {refuse}"
    )


def create_schema(conn: Connection) -> None:
    """Tables, guards and version, inside the transaction of `conn`."""
    metadata.create_all(conn, checkfirst=False)
    for table in APPEND_ONLY:
        for trigger in _guards(table):
            conn.exec_driver_sql(trigger)
    conn.exec_driver_sql(f"PRAGMA user_version = {SCHEMA}")


def schema_of(conn: Connection) -> dict[str, str]:
    """What SQLite has in its own schema table: `type name` → SQL with blanks made equal."""
    rows = conn.exec_driver_sql("SELECT type, name, sql FROM sqlite_master")
    return {f"{type_} {name}": " ".join(str(sql).split()) for type_, name, sql in rows}


@cache
def expected_schema() -> dict[str, str]:
    """What `schema_of` gives for a new database."""
    database = Database(None)
    try:
        with database.writing() as conn:
            create_schema(conn)
            return schema_of(conn)
    finally:
        database.close()


# --- connections --------------------------------------------------------------------------------------------


class Database:
    """The SQLite file of a ledger, or one in memory.

    A connection lives as long as its transaction: nothing stays open between commands, and a database that
    was rebuilt under a new file is the one that the next transaction sees.
    """

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        self._engine = create_engine(
            "sqlite+pysqlite://", creator=self._connect, poolclass=StaticPool if path is None else NullPool
        )

        @event.listens_for(self._engine, "begin")
        def begin(conn: Connection) -> None:
            conn.exec_driver_sql(conn.get_execution_options().get("benchkit_begin", "BEGIN"))

    def _connect(self) -> sqlite3.Connection:
        name = ":memory:" if self.path is None else self.path.absolute().as_uri()
        if self.read_only:
            name += "?mode=ro"
        # isolation_level None: the driver opens no transactions of its own; the "begin" event does.
        conn = sqlite3.connect(name, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        # A flipped byte is found by its hash, not by an exception from the middle of a SELECT.
        conn.text_factory = lambda data: data.decode(errors="backslashreplace")
        conn.execute("PRAGMA foreign_keys = ON")
        conn.execute("PRAGMA recursive_triggers = ON")
        conn.execute("PRAGMA synchronous = FULL")
        return conn

    def close(self) -> None:
        """Lets go of what is in memory; a file has nothing open."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state.

        Raises:
            BenchkitError: in one line, where SQLite gives an error.
        """
        with self._plain_errors(), self._engine.connect() as conn, conn.begin():
            yield conn

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that alone may write, from its first read to its commit (BEGIN IMMEDIATE).

        Raises:
            BenchkitError: in one line, where SQLite gives an error; then nothing was written.
        """
        with self._plain_errors(), self._engine.connect() as conn:
            conn = conn.execution_options(benchkit_begin="BEGIN IMMEDIATE")
            with conn.begin():
                yield conn

    def prepare(self) -> None:
        """Makes the tables where there are none, and refuses a database of another make or version.

        Raises:
            BadInput: a newer benchkit wrote it.
            Finding: it is damaged, or no ledger.
        """
        with self.reading() as conn:
            version = conn.exec_driver_sql("PRAGMA user_version").scalar_one()
            tables = conn.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one()
        if version == tables == 0 and not self.read_only:
            with self.writing() as conn:
                # Asked again under the lock: two processes may make the same ledger.
                if conn.exec_driver_sql("PRAGMA user_version").scalar_one() == 0:
                    create_schema(conn)
        elif version > SCHEMA:
            raise BadInput(
                f"{self.path}: written by a newer benchkit (schema {version}, this one knows {SCHEMA}); "
                "upgrade benchkit"
            )
        elif version != SCHEMA:
            raise Finding(f"{self.path}: not the database of a ledger; {REBUILD}")

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise self._in_one_line(error.orig) from None
        except sqlite3.Error as error:  # from `_connect`
            raise self._in_one_line(error) from None

    def _in_one_line(self, error: BaseException | None) -> BenchkitError:
        where = self.path or "ledger in memory"
        name = str(getattr(error, "sqlite_errorname", ""))
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return BenchkitError(
                f"{where}: another process has held it for {BUSY_TIMEOUT_S:g} s; try again when it is done"
            )
        if name == "SQLITE_READONLY_DBMOVED":
            return Moved(f"{where}: was rebuilt by another process; try again")
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
            return Unwritable(f"{where}: cannot be written or opened ({error}); nothing was changed")
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            return BenchkitError(f"{where}: {error}: is the disk full? Nothing was changed")
        if name.startswith("SQLITE_CONSTRAINT"):
            return Finding(f"{where}: refused: {error}; `benchkit verify` says more")
        return Finding(f"{where}: damaged ({error}); {REBUILD}")


class Unwritable(BadInput):
    """The database cannot be opened, or opened for reading only."""


class Moved(BenchkitError):
    """The database's file was replaced while a transaction waited for it."""


REBUILD = "`benchkit ledger rebuild` makes it anew from entries/"
