from __future__ import annotations

import dataclasses
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from benchkit.errors import BadInput, BenchkitError, Finding
from benchkit.ledger import Ledger, Verification, verify
from benchkit.ledger.database import metadata
from benchkit.record import write_pinned
from making import AT, make_failure, make_run, write_run

SAY = {"at": AT, "who": "me"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with a banked, waived, measured run of two cells."""
    root = tmp_path_factory.mktemp("verify") / "ledger"
    with Ledger.open(root, create=True) as ledger:
        make_run(
            ledger,
            "r-1",
            change=lambda place, r: make_failure(t_send_ns=r.t_send_ns) if (place, r.index) == (0, 1) else r,
        )
        ledger.waive("r-1", "errors", why="known", at="2026-01-31T12:00:01Z", who="me")
        ledger.bank(["r-1"], why="clean", at="2026-01-31T12:00:02Z", who="me")
        ledger.measured(ledger.run("r-1"))
        assert verify(ledger).ok
    return root


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def cheat(root: Path, *statements: str) -> None:
    """Changes the database as somebody would who wants no trace: triggers dropped before, made again after."""
    conn = sqlite3.connect(root / "ledger.db", isolation_level=None)
    conn.execute("PRAGMA synchronous = OFF")
    conn.execute("BEGIN")
    triggers = conn.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        conn.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        conn.execute(statement)
    for _, sql in triggers:
        conn.execute(sql)
    conn.commit()
    conn.close()


def check(root: Path) -> Verification:
    """Verifies what lies there, without the repairs that opening makes first."""
    ledger = Ledger.open(root)
    return verify(ledger)


def problems(found: Verification) -> str:
    assert found.ok == (not found.problems)
    return "\n".join(f"{p.kind}: {p.what}" for p in found.problems)


def flip(path: Path, place: int, bits: int) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


COLUMNS = [(table.name, column.name) for table in metadata.sorted_tables for column in table.columns]


def test_a_whole_ledger_has_no_problem_and_is_counted(whole: Path):
    found = verify(whole)

    assert (found.ok, found.raws, found.entries, found.problems) == (True, 2, 3, ())
    assert any(note.startswith("SQLite ") for note in found.notes)


@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_any_column_of_any_row_that_was_changed_by_hand_is_named(whole: Path, copy: Path, table: str, column: str):
    database = copy / "ledger.db"
    good = (whole / "ledger.db").read_bytes()
    keys = [c.name for c in metadata.tables[table].primary_key.columns]
    conn = sqlite3.connect(database)
    rows = conn.execute(f"SELECT {', '.join(keys)}, {column} FROM {table}").fetchall()
    conn.close()
    assert rows

    for *key, value in rows:
        with Ledger.open(copy) as ledger:
            where = " AND ".join(f"{k} = {v!r}" for k, v in zip(keys, key, strict=True))
            new = value + 7 if isinstance(value, int) else repr(value[:-1] + ("1" if value[-1] != "1" else "0"))
            cheat(copy, f"UPDATE {table} SET {column} = {new} WHERE {where}")
            found = problems(verify(ledger))
        named = [line for line in found.splitlines() if table in line and column in line]
        assert any(str(key[0])[:11] in line for line in named), found
        database.write_bytes(good)


def test_a_row_that_was_dropped_is_named(copy: Path):
    for table in ("entry", "run", "raw", "cell"):
        with Ledger.open(copy) as ledger:
            good = (copy / "ledger.db").read_bytes()
            key = metadata.tables[table].primary_key.columns.keys()[0]
            cheat(copy, f"DELETE FROM {table} WHERE {key} = (SELECT max({key}) FROM {table})")
            found = problems(verify(ledger))
            assert any(table in line and ("missing" in line or "no row" in line) for line in found.splitlines())
            (copy / "ledger.db").write_bytes(good)


def test_a_row_that_no_entry_gives_is_named(copy: Path):
    cheat(copy, f"INSERT INTO raw VALUES ('{'a' * 64}', 1, 'x')")

    assert "row: raw aaaaaaaaaaaa…: a row that no entry gives" in problems(check(copy))


@pytest.mark.parametrize("trigger", ["entry_no_update", "run_no_delete", "cell_no_replace"])
def test_a_guard_that_was_dropped_is_missed(copy: Path, trigger: str):
    conn = sqlite3.connect(copy / "ledger.db")
    conn.execute(f"DROP TRIGGER {trigger}")
    conn.close()

    found = check(copy)

    assert f"schema: trigger {trigger}: missing" in problems(found)
    assert verify(Ledger.rebuild(copy)).ok


def test_a_table_that_was_added_is_named(copy: Path):
    conn = sqlite3.connect(copy / "ledger.db")
    conn.execute("CREATE TABLE mine (x)")
    conn.close()

    assert "schema: table mine: not of benchkit's making" in problems(check(copy))


@pytest.mark.parametrize("table", [t.name for t in metadata.sorted_tables])
def test_a_table_that_was_dropped_is_a_problem_and_no_traceback(copy: Path, table: str):
    conn = sqlite3.connect(copy / "ledger.db")
    conn.execute(f"DROP TABLE {table}")
    conn.close()

    found = verify(copy)

    assert f"no such table: {table}" in problems(found)
    assert found.entries == 3
    assert verify(Ledger.rebuild(copy)).ok


def test_an_entry_that_is_no_json_any_more_is_a_problem_and_stops_readers_in_one_line(copy: Path):
    cheat(copy, "UPDATE entry SET payload = '{' WHERE kind = 'banked'")

    assert "column payload: the file says" in problems(verify(copy))
    with Ledger.open(copy) as ledger, pytest.raises(Finding, match="does not match its hash") as stopped:
        ledger.runs()
    assert len(str(stopped.value).splitlines()) == 1


def test_a_damaged_entry_does_not_lose_a_measurement(copy: Path):
    cheat(copy, "UPDATE entry SET payload = '{' WHERE kind = 'banked'")

    with Ledger.open(copy) as ledger:
        run = write_run(ledger, "r-2")
        ledger.record(run, **SAY)
    with Ledger.rebuild(copy) as again:
        assert sorted(s.run.id for s in again.runs()) == ["r-1", "r-2"]
        assert again.run("r-1").status == "banked"


def test_a_file_of_an_entry_that_is_gone_is_written_again_and_until_then_a_problem(copy: Path):
    ledger = Ledger.open(copy)
    for path in ledger.layout.entries.iterdir():
        path.unlink()

    assert problems(verify(ledger)).count("its file is missing; the next command writes it again") == 3
    assert verify(copy).ok


def test_an_entry_dropped_from_both_places_is_missed_by_what_follows_it(copy: Path):
    ledger = Ledger.open(copy)
    waived = next(e for e in ledger.log() if e.kind == "waived")
    ledger.layout.entry(waived.hash).unlink()
    cheat(copy, f"DELETE FROM entry WHERE hash = '{waived.hash}'")

    found = problems(check(copy))

    assert f"follows {waived.hash[:12]}…, which is not here" in found
    assert "banked with errors, which nobody waived" in found


def test_b41_line_endings_that_were_converted_are_told_from_other_damage(copy: Path):
    raw = next(p for p in sorted((copy / "raws").rglob("*.parquet")) if b"\n" in p.read_bytes())
    entry = max((copy / "entries").iterdir())
    for path, data in ((raw, raw.read_bytes().replace(b"\n", b"\r\n")), (entry, entry.read_bytes() + b"\r\n")):
        path.chmod(0o644)
        path.write_bytes(data)

    found = problems(check(copy))

    assert f"{entry}: only line endings differ" in found
    assert found.count("raw: run") == 1


@pytest.mark.parametrize("damage", ["truncated", "emptied", "deleted", "swapped"])
def test_damage_to_a_raw_is_named_with_run_and_cell(copy: Path, damage: str):
    ledger = Ledger.open(copy)
    one, other = (ledger.layout.raw(c.raw) for c in ledger.run("r-1").run.cells)
    one.chmod(0o644)
    data = {"truncated": one.read_bytes()[:-5], "emptied": b"", "swapped": other.read_bytes(), "deleted": None}[damage]
    if data is None:
        one.unlink()
    else:
        one.write_bytes(data)

    found = problems(verify(ledger))

    assert f"raw: run r-1, cell 100/11 c1: raw {ledger.run('r-1').run.cells[0].raw[:12]}…" in found
    assert ("missing" if damage == "deleted" else "bytes do not match the ledger") in found
    assert len(found.splitlines()) == 1


def test_a_raw_that_is_pinned_and_no_parquet_is_a_problem(copy: Path):
    ledger = Ledger.open(copy)
    sha, _ = write_pinned(ledger.layout.raws, b"PAR1 not really", ".parquet")
    run = write_run(ledger, "r-2")
    ledger.record(dataclasses.replace(run, cells=(dataclasses.replace(run.cells[0], raw=sha),)), **SAY)

    assert "is not a raw" in problems(verify(ledger))


def test_a_protocol_hash_that_is_not_that_of_the_text_is_a_problem(copy: Path):
    ledger = Ledger.open(copy)
    make_run(ledger, "r-2", protocol_hash="0" * 64)

    assert "protocol: run r-2: its hash is not that of its protocol text" in problems(verify(ledger))


def test_leftovers_are_notes(copy: Path):
    ledger = Ledger.open(copy)
    orphan = write_run(ledger, "r-2").cells[0].raw
    (copy / "raws" / "ab").mkdir(exist_ok=True)
    (copy / "raws" / "ab" / ".x.parquet.1.tmp").write_bytes(b"half")
    (copy / "entries" / ".x.json.1.tmp").write_bytes(b"half")

    found = verify(copy)

    assert found.ok
    assert f"raws/{orphan[:2]}/{orphan[2:]}.parquet: a raw that no entry names" in found.notes
    assert "raws/ab/.x.parquet.1.tmp: left by a crash; it may be deleted" in found.notes
    assert "entries/.x.json.1.tmp: left by a crash; it may be deleted" in found.notes


def test_a_flipped_bit_anywhere_in_a_raw_or_an_entry_is_found(copy: Path):
    ledger = Ledger.open(copy)
    chance = random.Random(1)
    paths = [*sorted((copy / "raws").rglob("*.parquet")), *sorted((copy / "entries").iterdir())]
    for _ in range(20):
        path = chance.choice(paths)
        place, bits = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        flip(path, place, bits)
        found = problems(verify(ledger))
        assert path.stem[:9] in found, (path, place, bits)
        flip(path, place, bits)
    assert verify(ledger).ok


def contents(path: Path) -> object:
    """All that a database says: rows and schema; None where it cannot be read."""
    try:
        conn = sqlite3.connect(path)
        try:
            names = [t.name for t in metadata.sorted_tables]
            return [conn.execute(f"SELECT * FROM {n}").fetchall() for n in ["sqlite_master", *names]]
        finally:
            conn.close()
    except (sqlite3.Error, UnicodeDecodeError):
        return None


@pytest.mark.parametrize("part", range(4))
def test_a_flipped_bit_anywhere_in_the_database_is_found_or_changes_nothing(whole: Path, copy: Path, part: int):
    chance = random.Random(part)
    database, good = copy / "ledger.db", (whole / "ledger.db").read_bytes()
    said = contents(whole / "ledger.db")
    found_some = 0
    for _ in range(15):
        place, bits = chance.randrange(100 if part == 0 else len(good)), 1 << chance.randrange(8)
        flip(database, place, bits)
        same = said == contents(database)
        found = verify(copy)
        found_some += not found.ok
        assert same or not found.ok or said == contents(database), (place, bits)
        for extra in copy.glob("ledger.db*"):
            extra.unlink()
        database.write_bytes(good)
    assert found_some or part == 0


def test_a_page_of_zeros_is_found_and_rebuilt(whole: Path, copy: Path):
    database = copy / "ledger.db"
    good = database.read_bytes()
    for page in range(len(good) // 4096):
        database.write_bytes(good[: page * 4096] + bytes(4096) + good[(page + 1) * 4096 :])
        assert not verify(copy).ok
        with Ledger.rebuild(copy) as again:
            assert verify(again).ok
            assert again.run("r-1").status == "banked"


def test_no_ledger_is_bad_input_to_verify_too(tmp_path: Path):
    with pytest.raises(BadInput, match="no ledger at"):
        verify(tmp_path / "nothing")


@pytest.mark.parametrize(
    "use",
    [
        lambda ledger: ledger.runs(),
        lambda ledger: ledger.log(),
        lambda ledger: ledger.heads(),
        lambda ledger: ledger.bank(["r-1"], why="x", **SAY),
        lambda ledger: write_run(ledger, "r-2") and ledger.record(write_run(ledger, "r-2"), **SAY),
    ],
)
def test_a_database_that_broke_since_it_was_opened_ends_in_one_line(copy: Path, use: Callable[[Ledger], object]):
    ledger = Ledger.open(copy)
    (copy / "ledger.db").write_bytes(b"x" * 10_000)

    with pytest.raises(BenchkitError, match="benchkit ledger rebuild") as stopped:
        use(ledger)
    assert len(str(stopped.value).splitlines()) == 1
