"""The chain of entries: opened, put right after a crash or a pull, added to in one transaction, rebuilt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Connection, select

from benchkit.errors import BadInput, Finding
from benchkit.ledger.database import REBUILD, Database, Moved, Unwritable, entry_table, insert_entry
from benchkit.ledger.entries import Entry, Graph, entry_of_row, new_entry
from benchkit.ledger.files import Layout, disk_errors, read_entry
from benchkit.ledger.states import States, fold
from benchkit.record import fsync_dir

Payload = dict[str, Any]
Build = Callable[[Graph, States], Payload | None]
"""Makes the payload of a new entry from what holds inside its transaction; None where no entry is needed."""


class Chain:
    """All entries of a ledger, as database and folder hold them.

    Attributes:
        layout: where things lie.
        database: the SQLite file, or one in memory where the folder cannot be written.
        writable: False for a ledger that can only be read.
        notes: what was put right or passed over, for a human to read.
    """

    def __init__(self, layout: Layout, database: Database, *, writable: bool) -> None:
        self.layout = layout
        self.database = database
        self.writable = writable
        self.notes: list[str] = []
        self._entries: dict[str, Entry] = {}
        self._damaged: dict[str, str] = {}  # rows that are not what was written: key → why
        self._folded: tuple[int, Graph, States] | None = None

    @classmethod
    def open(cls, layout: Layout, *, create: bool) -> Chain:
        """The chain of a ledger; see `Ledger.open`."""
        if not layout.exists:
            if not create:
                raise BadInput(f"no ledger at {layout.root}; `benchkit run` makes one")
            layout.make()
        if not layout.writable:
            return cls._open_for_reading(layout)
        layout.make()
        chain = cls(layout, Database(layout.database), writable=True)
        chain.database.prepare()
        chain._take_in()
        chain._write_missing_files()
        return chain

    @classmethod
    def _open_for_reading(cls, layout: Layout) -> Chain:
        """A database in memory stands in for one that is missing, cannot be used, or lacks pulled entries."""
        chain = cls(layout, Database(layout.database, read_only=True), writable=False)
        known: set[str] = set()
        saved: list[Entry] = []
        if layout.database.is_file():
            try:
                chain.database.prepare()
                with chain.database.reading() as conn:
                    known = set(conn.scalars(select(entry_table.c.hash)))
                if layout.entry_files().keys() <= known:
                    return chain
                saved, _ = _rows_of(chain.database)
            except (Unwritable, Finding) as error:  # a journal to roll back, say, or damage
                chain.notes.append(f"read from entries/ alone: {error}")
        chain.database = Database(None)
        chain.database.prepare()
        chain._take_in(also=saved)
        return chain

    @classmethod
    def rebuild(cls, layout: Layout) -> Chain:
        """The chain with a new database; see `Ledger.rebuild`."""
        if not layout.exists:
            raise BadInput(f"no ledger at {layout.root}; `benchkit run` makes one")
        old, fresh = layout.database, layout.database.with_name("ledger.db.new.tmp")
        chain = cls(layout, Database(fresh), writable=layout.writable)
        chain.must_be_writable()
        layout.make()
        saved, whole = _rows_of(Database(old)) if old.is_file() else ([], True)
        with disk_errors("the database was not rebuilt"), contextlib.ExitStack() as held:
            if old.is_file() and whole:
                # Nobody adds to the old file from here on; whoever waits for it is told that it moved.
                conn = held.enter_context(Database(old).writing())
                rows = conn.execute(select(entry_table)).mappings()
                saved = [entry_of_row(dict(row)) for row in rows]
            for leftover in (fresh, fresh.with_name(f"{fresh.name}-journal")):
                leftover.unlink(missing_ok=True)
            chain.database.prepare()
            chain._take_in(also=saved)
            if not whole:
                n = len(list(layout.root.glob("ledger.db.damaged-*")))
                aside = old.rename(old.with_name(f"ledger.db.damaged-{n + 1}"))
                chain.notes.append(f"the old database could not be read whole; it is kept as {aside.name}")
            # A journal of the old file would be rolled back into the new one.
            old.with_name(f"{old.name}-journal").unlink(missing_ok=True)
            fresh.replace(old)
            fsync_dir(layout.root)
        chain.database = Database(old)
        chain._write_missing_files()
        return chain

    # --- reading --------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The graph of all entries.

        Raises:
            Finding: an entry is damaged.
        """
        with self.database.reading() as conn:
            graph, _ = self._current(conn)
        self._must_be_whole()
        return graph

    @property
    def states(self) -> States:
        """What all entries say.

        Raises:
            Finding: an entry is damaged.
        """
        with self.database.reading() as conn:
            _, states = self._current(conn)
        self._must_be_whole()
        return states

    def entry(self, hash_: str) -> Entry:
        """An entry that graph or states named."""
        return self._entries[hash_]

    # --- adding ---------------------------------------------------------------------------------------------

    def append(self, kind: str, build: Build, *, at: str, who: str) -> Entry | None:
        """Adds one entry in one transaction: heads read, payload built on what holds now, rows written.

        `build` gives None where no entry is needed. The entry's file follows the commit; should that fail,
        the entry is in the ledger all the same and the next command writes the file.
        """
        self.must_be_writable()
        try:
            entry = self._commit(kind, build, at=at, who=who)
        except Moved:
            entry = self._commit(kind, build, at=at, who=who)
        if entry is None:
            return None
        self._entries[entry.hash] = entry
        try:
            self.layout.write_entry(entry)
        except OSError as error:
            self.notes.append(
                f"{self.layout.entry(entry.hash)}: not written yet ({error.strerror}); the entry is in the "
                "database, and the next command writes its file"
            )
        return entry

    def _commit(self, kind: str, build: Build, *, at: str, who: str) -> Entry | None:
        with self.database.writing() as conn:
            graph, states = self._current(conn)
            if kind != "recorded":
                self._must_be_whole()
            payload = build(graph, states)
            if payload is None:
                return None
            prev = graph.heads
            if kind == "recorded":
                prev = prev[-1:]
            elif kind != "merge" and len(prev) > 1:
                raise Finding(f"{self.layout.root}: {len(prev)} branches are not joined; run `benchkit ledger merge`")
            entry = new_entry(prev=prev, kind=kind, at=at, who=who, payload=payload)
            insert_entry(conn, entry)
        return entry

    def _current(self, conn: Connection) -> tuple[Graph, States]:
        """Graph and states as of a transaction; rows that were read before are not read again."""
        hashes = set(conn.scalars(select(entry_table.c.hash)))
        new = [h for h in hashes if h not in self._entries]
        parts = [new[i : i + 500] for i in range(0, len(new), 500)]
        self._damaged = {}
        for part in parts:
            for row in conn.execute(select(entry_table).where(entry_table.c.hash.in_(part))).mappings():
                try:
                    self._entries[row["hash"]] = entry_of_row(dict(row))
                except ValueError as error:
                    self._damaged[row["hash"]] = str(error)
        if self._folded is None or self._folded[0] != len(self._entries):
            graph = Graph(self._entries.values())
            self._folded = (len(self._entries), graph, fold(graph))
        return self._folded[1], self._folded[2]

    def _must_be_whole(self) -> None:
        for hash_, why in self._damaged.items():
            raise Finding(f"{self.layout.database}: entry {hash_[:12]}…: {why}; `benchkit verify` says more, {REBUILD}")

    def must_be_writable(self) -> None:
        """Raises BadInput for a ledger that can only be read."""
        if not self.writable:
            raise BadInput(f"{self.layout.root}: the ledger can be read, not written; nothing was changed")

    # --- putting right --------------------------------------------------------------------------------------

    def _take_in(self, also: Iterable[Entry] = ()) -> None:
        """Takes into the database what lies in the folder, as far as its links are known, and all of `also`."""
        with self.database.reading() as conn:
            known = set(conn.scalars(select(entry_table.c.hash)))
        had = {e.hash: e for e in also}  # by a database before: what was in stays in, gaps or not
        found = {h: e for h, e in had.items() if h not in known}
        for hash_, path in self.layout.entry_files().items():
            if hash_ not in known and hash_ not in found:
                try:
                    found[hash_] = read_entry(path)
                except ValueError as error:
                    self.notes.append(f"passed over {path}: {error}")
        if not found:
            return
        with self.database.writing() as conn:
            known = set(conn.scalars(select(entry_table.c.hash)))
            for entry in Graph(found.values()).order:
                if entry.hash in known:
                    continue
                lacking = [p for p in entry.prev if p not in known]
                if lacking and entry.hash not in had:
                    self.notes.append(
                        f"passed over entry {entry.hash[:12]}…: it follows {lacking[0][:12]}…, which is not here"
                    )
                    continue
                insert_entry(conn, entry)
                known.add(entry.hash)

    def _write_missing_files(self) -> None:
        """Writes the files of entries that have none: the database commits first, a crash may come between."""
        files = self.layout.entry_files()
        with self.database.reading() as conn:
            lacking = [h for h in conn.scalars(select(entry_table.c.hash)) if h not in files]
            rows = [conn.execute(select(entry_table).filter_by(hash=h)).mappings().one() for h in lacking]
        for row in rows:
            try:
                self.layout.write_entry(entry_of_row(dict(row)))
            except ValueError:
                continue  # a damaged row gets no file; reading it says so
            except OSError as error:
                self.notes.append(f"{self.layout.entries}: an entry's file is not written yet: {error}")
                return


def _rows_of(database: Database) -> tuple[list[Entry], bool]:
    """The whole entries of a database, and whether all of it could be read."""
    entries: list[Entry] = []
    whole = True
    try:
        with database.reading() as conn:
            for row in conn.execute(select(entry_table)).mappings():
                try:
                    entries.append(entry_of_row(dict(row)))
                except ValueError:
                    whole = False
    except Finding:
        whole = False
    return entries, whole
