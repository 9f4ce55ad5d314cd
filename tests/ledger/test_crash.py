from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, select

from benchkit.errors import BenchkitError
from benchkit.ledger import Journal, Ledger, unfinished, verify
from benchkit.ledger.database import Database, entry_table
from benchkit.ledger.entries import Graph
from benchkit.ledger.states import States
from making import AT, make_run, write_run

HERE = Path(__file__).parent
SAY = {"at": AT, "who": "me"}


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: a kill asks nothing of the disk, and fsync is slow there."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder)


def survivors(memory: Path, work: str, every: int) -> Iterator[tuple[Path, bool]]:
    """The ledgers that the work left when killed before each of its steps, and whether it had come to its end."""
    start = memory / "start"
    with Ledger.open(start, create=True) as ledger:
        make_run(ledger, "r-1")
    done = subprocess.run(
        [sys.executable, HERE / "crash_driver.py", work, start, memory, str(every)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) >= 10
    before = None
    for step, outcome in lines:
        files = {p.relative_to(memory / step): p.read_bytes() for p in (memory / step).rglob("*") if p.is_file()}
        if files != before or outcome == "done":  # a step that only read leaves what was checked already
            yield memory / step, outcome == "done"
        before = files


def whole(root: Path) -> Ledger:
    """The ledger after a crash, as the next command finds it: whole, no entry without its file."""
    ledger = Ledger.open(root)
    found = verify(ledger)
    assert found.ok, (root, found.problems)
    assert {e.hash for e in ledger.log()} == set(ledger.layout.entry_files())
    return ledger


def test_a_kill_before_any_step_of_record_leaves_the_old_state_or_the_new(memory: Path):
    seen = []
    for root, done in survivors(memory, "record", every=1):
        ledger = whole(root)
        seen.append([s.run.id for s in ledger.runs()])
        for state in ledger.runs():
            assert [2, 4] == [len(ledger.records(c)) for c in state.run.cells]
        if done:
            assert ["r-1", "r-2"] == seen[-1]
    old, new = seen.count(["r-1"]), seen.count(["r-1", "r-2"])
    assert old + new == len(seen)
    assert seen == [["r-1"]] * old + [["r-1", "r-2"]] * new
    assert new > 1  # killed after the commit and before the end


def test_a_kill_before_any_step_of_bank_leaves_the_old_state_or_the_new(memory: Path):
    seen = [whole(root).run("r-1").status for root, _ in survivors(memory, "bank", every=1)]

    assert ["recorded"] * seen.count("recorded") + ["banked"] * seen.count("banked") == seen
    assert seen.count("banked") > 1


def test_a_kill_while_a_ledger_is_made_leaves_one_that_the_next_command_can_use(memory: Path):
    for root, done in survivors(memory, "create", every=9):
        with Ledger.open(root / "new", create=True) as ledger:
            ledger.record(write_run(ledger, "r-2"), at=AT, who="driver")
            assert verify(ledger).ok
            assert 1 == len(ledger.log()) or not done


def test_a_kill_while_the_database_is_rebuilt_loses_nothing(memory: Path):
    for root, _ in survivors(memory, "rebuild", every=5):
        assert ["r-1"] == [s.run.id for s in whole(root).runs()]


def test_a_kill_in_a_session_leaves_a_journal_to_resume_or_none(memory: Path):
    ends = {(False, False)}  # as it starts
    for root, done in survivors(memory, "journal", every=4):
        ledger = whole(root)
        recorded = "r-2" in [s.run.id for s in ledger.runs()]
        ends.add((bool(unfinished(root)), recorded))
        for session in unfinished(root):
            with Journal.open(root, session) as journal:
                assert {"grids": 1} == journal.plan
                for header, cells in journal.runs():
                    assert {"id": "r-2"} == header
                    for cell in cells.values():
                        assert cell.n == len(ledger.records(cell))
                assert recorded or not journal.finished
        if done:
            assert recorded
            assert [] == unfinished(root)
    assert {(False, False), (True, False), (True, True), (False, True)} == ends


# --- many at once -------------------------------------------------------------------------------------------

APPENDER = """
import sys
sys.path.insert(0, sys.argv[3])
from dataclasses import replace
from pathlib import Path
from making import AT, write_run
from benchkit.ledger import Ledger
with Ledger.open(Path(sys.argv[1]), create=True) as ledger:
    run = write_run(ledger, "seed-" + sys.argv[2])
    for i in range(int(sys.argv[4])):
        ledger.record(replace(run, id=f"{sys.argv[2]}-{i}"), at=AT, who=sys.argv[2])
"""


def test_b39_two_processes_that_record_at_once_lose_nothing_and_make_one_chain(memory: Path):
    root = memory / "ledger"
    n = 25
    command = [sys.executable, "-W", "error", "-c", APPENDER, root]
    both = [subprocess.Popen([*command, name, HERE.parent, str(n)], stderr=subprocess.PIPE, text=True) for name in "ab"]
    for process in both:
        _, stderr = process.communicate(timeout=60)
        assert (0, "") == (process.returncode, stderr)

    ledger = whole(root)
    assert {f"{name}-{i}" for name in "ab" for i in range(n)} == {s.run.id for s in ledger.runs()}
    assert 1 == len(ledger.heads())
    assert 2 * n == len(ledger.log())


ROWS = """
import sys
from pathlib import Path
from sqlalchemy import func, select
from benchkit.ledger.database import Database, entry_table
from benchkit.ledger.entries import new_entry
database = Database(Path(sys.argv[1]))
for i in range(200):
    with database.writing() as conn:
        count = conn.scalar(select(func.count()).select_from(entry_table))
        entry = new_entry(prev=(), kind="note", at="2026-01-31T12:00:00Z", who=sys.argv[2], payload={"n": count})
        conn.execute(entry_table.insert(), entry.row)
"""


def test_b39_two_processes_of_200_transactions_that_read_and_write_leave_400_rows(memory: Path):
    Ledger.open(memory / "ledger", create=True)
    path = memory / "ledger" / "ledger.db"
    both = [
        subprocess.Popen([sys.executable, "-c", ROWS, path, name], stderr=subprocess.PIPE, text=True) for name in "ab"
    ]
    for process in both:
        _, stderr = process.communicate(timeout=60)
        assert (0, "") == (process.returncode, stderr)

    with Database(path).reading() as conn:
        counts = sorted(conn.scalars(select(func.json_extract(entry_table.c.payload, "$.n"))))
    assert list(range(400)) == counts


def test_a_writer_whose_database_was_rebuilt_under_it_goes_on_with_the_new_one(ledger: Ledger):
    make_run(ledger, "r-1")
    tries = []

    def build(graph: Graph, states: States) -> dict[str, object]:
        tries.append(len(graph.order))
        if len(tries) == 1:  # between this transaction's begin and its first write
            new = ledger.layout.database.with_suffix(".new")
            shutil.copy(ledger.layout.database, new)
            new.replace(ledger.layout.database)
        return {"runs": ["r-1"], "text": "hot day"}

    entry = ledger.chain.append("note", build, **SAY)

    assert [1, 1] == tries
    assert entry == whole(ledger.root).log("r-1")[-1]


def test_an_open_ledger_goes_on_with_a_database_that_was_rebuilt(ledger: Ledger):
    make_run(ledger, "r-1")
    Ledger.rebuild(ledger.root)
    make_run(ledger, "r-2")

    assert ["r-1", "r-2"] == [s.run.id for s in whole(ledger.root).runs()]


def test_a_ledger_that_another_process_holds_says_so(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    make_run(ledger, "r-1")
    monkeypatch.setattr("benchkit.ledger.database.BUSY_TIMEOUT_S", 0.05)
    holder = sqlite3.connect(ledger.layout.database, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")

    with pytest.raises(BenchkitError, match="another process has held it"):
        ledger.quarantine(["r-1"], why="x", **SAY)

    holder.execute("ROLLBACK")
    holder.close()
    assert "quarantined" == ledger.quarantine(["r-1"], why="x", **SAY).kind


# --- full and read-only disks -------------------------------------------------------------------------------

LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from making import AT, write_run
from benchkit.errors import BenchkitError
from benchkit.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]))
run = write_run(ledger, "r-2", note="x" * 200_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    ledger.record(run, at=AT, who="me") if sys.argv[4] == "record" else write_run(ledger, "r-3")
except BenchkitError as error:
    print(error)
"""


def files_without_raws(root: Path) -> set[Path]:
    return {p for p in root.rglob("*") if p.is_file() and p.suffix != ".parquet"}


@pytest.mark.parametrize(
    ("what", "limit", "words"), [("record", 120_000, "is the disk full?"), ("write_raw", 2000, "File too large")]
)
def test_a_disk_that_takes_no_more_gives_one_clear_line_and_no_half_state(
    ledger: Ledger, what: str, limit: int, words: str
):
    make_run(ledger, "r-1")
    files = files_without_raws(ledger.root)

    said = subprocess.run(
        [sys.executable, "-c", LIMITED, ledger.root, HERE.parent, str(limit), what],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "" == said.stderr
    assert words in said.stdout
    assert 1 == len(said.stdout.splitlines())
    assert ["r-1"] == [s.run.id for s in whole(ledger.root).runs()]
    assert files == files_without_raws(ledger.root)


def test_an_entry_whose_file_finds_no_room_is_in_the_ledger_and_is_written_later(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    run = write_run(ledger, "r-1")

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", full)
        entry = ledger.record(run, **SAY)

    assert any("No space left on device" in note for note in ledger.notes)
    assert not ledger.layout.entry(entry.hash).exists()
    assert ["r-1"] == [s.run.id for s in whole(ledger.root).runs()]


def test_a_read_only_disk_is_named_when_a_raw_is_written(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    def read_only(*given: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "link", read_only)

    with pytest.raises(BenchkitError, match="Read-only file system: the raw was not written; the ledger can be read"):
        write_run(ledger, "r-1")


READER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from making import AT, write_run
from benchkit.errors import BenchkitError
from benchkit.ledger import Ledger, verify
import pyarrow.parquet
Ledger.open(Path(sys.argv[1]).parent / "warm-up", create=True).close()
if os.geteuid() == 0:
    os.seteuid(65534)
ledger = Ledger.open(Path(sys.argv[1]))
state = ledger.run("r-1")
print(ledger.writable, state.status, ledger.measured(state).cells[0].metrics["ttft_s"], verify(ledger).ok)
for write in (
    lambda: ledger.record(state.run, at=AT, who="me"),
    lambda: ledger.quarantine(["r-1"], why="x", at=AT, who="me"),
    lambda: ledger.write_raw([], {}),
    lambda: Ledger.rebuild(Path(sys.argv[1])),
):
    try:
        write()
    except BenchkitError as error:
        print(error)
"""


@pytest.mark.parametrize("database", ["there", "missing", "older than the entries", "with a journal left by a crash"])
def test_a_folder_that_cannot_be_written_is_read_and_refuses_writes_in_one_line(database: str):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        root = Path(folder) / "ledger"
        with Ledger.open(root, create=True) as ledger:
            make_run(ledger, "r-1")
            older = ledger.layout.database.read_bytes()
            ledger.bank(["r-1"], why="clean", **SAY)
        if database == "missing":
            ledger.layout.database.unlink()
        elif database == "older than the entries":
            ledger.layout.database.write_bytes(older)
        elif database == "with a journal left by a crash":
            leave_a_hot_journal(ledger.layout.database)
        modes = {p: p.stat().st_mode for p in [root, *root.rglob("*")]}
        for path in modes:
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            said = subprocess.run(
                [sys.executable, "-W", "error", "-c", READER, root, HERE.parent],
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            for path, mode in modes.items():
                path.chmod(mode)

    assert "" == said.stderr
    first, *rest = said.stdout.splitlines()
    assert "False banked 0.1 True" == first
    assert [f"{root}: the ledger can be read, not written; nothing was changed"] * 4 == rest


def leave_a_hot_journal(path: Path) -> None:
    """Copies database and journal in the middle of a transaction whose pages have reached the file."""
    conn = sqlite3.connect(path, isolation_level=None)
    conn.execute("PRAGMA cache_size = 1")
    conn.execute("PRAGMA cache_spill = 1")
    conn.execute("BEGIN IMMEDIATE")
    for i in range(50):
        values = (f"{i:064x}", "[]", "note", AT, "me", "x" * 3000)
        conn.execute("INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?)", values)
    journal = path.with_name(path.name + "-journal")
    copies = path.read_bytes(), journal.read_bytes()
    conn.execute("ROLLBACK")
    conn.close()
    assert copies[0] != path.read_bytes()
    path.write_bytes(copies[0])
    journal.write_bytes(copies[1])


def test_a_journal_left_by_a_crash_is_rolled_back_by_the_next_open(ledger: Ledger):
    make_run(ledger, "r-1")
    leave_a_hot_journal(ledger.layout.database)

    assert ["r-1"] == [s.run.id for s in whole(ledger.root).runs()]
