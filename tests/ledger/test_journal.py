from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchkit.canonical import sha256_hex
from benchkit.errors import BadInput
from benchkit.ledger import Journal, Ledger, unfinished, verify
from benchkit.record import raw_bytes, read_raw
from making import make_record, write_run

PLAN = {"arms": ["a", "b"], "seed": 1, "grids": [{"grid": "cold"}, {"grid": "warm"}]}


def test_a_journal_gives_back_its_plan_and_its_finished_cells_in_the_order_of_starting(ledger: Ledger):
    first, second = write_run(ledger, "r-9"), write_run(ledger, "r-1")
    with Journal.create(ledger.root, "s-1", PLAN) as journal:
        journal.start_run({"id": "r-9", "grid": "cold"})
        for index in (1, 0):
            journal.add_cell("r-9", index, first.cells[index])
        journal.finish_run("r-9")
        journal.start_run({"id": "r-1", "grid": "warm"})
        journal.add_cell("r-1", 1, second.cells[1])

    with Journal.open(ledger.root, "s-1") as again:
        assert PLAN == again.plan
        assert [
            ({"id": "r-9", "grid": "cold"}, {0: first.cells[0], 1: first.cells[1]}),
            ({"id": "r-1", "grid": "warm"}, {1: second.cells[1]}),
        ] == again.runs()
        assert ("r-9",) == again.finished
        assert [] == again.passed_over


def test_ten_thousand_runs_stay_in_the_order_of_starting(ledger: Ledger):
    with Journal.create(ledger.root, "s-1", PLAN) as journal:
        journal.start_run({"id": "first"})
        folder = next((ledger.layout.sessions / "s-1" / "runs").iterdir())
        folder.rename(folder.with_name("9999-first"))
        journal.start_run({"id": "second"})

        assert ["first", "second"] == [header["id"] for header, _ in journal.runs()]


def test_a_finished_session_leaves_nothing(ledger: Ledger):
    with Journal.create(ledger.root, "s-1", PLAN) as journal:
        journal.start_run({"id": "r-1"})
        assert ["s-1"] == unfinished(ledger.root)
        journal.finish()

    assert [] == unfinished(ledger.root)
    assert [] == list(ledger.layout.sessions.iterdir())


def test_an_unknown_session_is_bad_input_that_lists_those_there_are(ledger: Ledger):
    with pytest.raises(BadInput, match=r"session s-9: not in .*; no session is unfinished"):
        Journal.open(ledger.root, "s-9")
    Journal.create(ledger.root, "s-1", PLAN).close()
    Journal.create(ledger.root, "s-2", PLAN).close()

    with pytest.raises(BadInput, match="unfinished ones: s-1, s-2"):
        Journal.open(ledger.root, "s-9")
    with pytest.raises(BadInput, match="session s-1: exists; `--resume s-1` goes on with it"):
        Journal.create(ledger.root, "s-1", PLAN)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "a\nb"])
def test_a_session_is_named_like_a_folder(ledger: Ledger, name: str):
    for door in (lambda: Journal.create(ledger.root, name, PLAN), lambda: Journal.open(ledger.root, name)):
        with pytest.raises(BadInput, match="expected a name"):
            door()


def test_a_session_that_another_process_runs_is_not_opened_until_that_one_is_gone(ledger: Ledger):
    Journal.create(ledger.root, "s-1", PLAN).close()
    script = (
        "import sys; from pathlib import Path; from benchkit.ledger import Journal\n"
        "journal = Journal.open(Path(sys.argv[1]), 's-1'); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, ledger.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert "held\n" == other.stdout.readline()

        with pytest.raises(BadInput, match="session s-1 is being run by another process"):
            Journal.open(ledger.root, "s-1")
        other.kill()
        other.wait()

    Journal.open(ledger.root, "s-1").close()


def test_torn_and_foreign_files_are_passed_over_and_named(ledger: Ledger):
    run = write_run(ledger, "r-1")
    with Journal.create(ledger.root, "s-1", PLAN) as journal:
        journal.start_run({"id": "r-1"})
        journal.add_cell("r-1", 0, run.cells[0])
        folder = ledger.layout.sessions / "s-1" / "runs" / "0001-r-1"
        (folder / "cell-1.json").write_bytes((folder / "cell-0.json").read_bytes()[:40])
        (folder / "cell-2.json").write_text("[]")
        (folder / "cell-3.json").write_text("{}")
        (folder / "notes.txt").write_text("mine")
        (folder.parent / "0002-r-2").mkdir()
        (ledger.layout.sessions / "stray").mkdir()
        (ledger.layout.sessions / "torn").mkdir()
        (ledger.layout.sessions / "torn" / "plan.json").write_bytes(b'{"arms":')

        assert [({"id": "r-1"}, {0: run.cells[0]})] == journal.runs()
        assert [
            "cell-1.json: torn or foreign: not JSON",
            "cell-2.json: not a JSON object",
            "cell-3.json: not a cell",
            "notes.txt: not of the journal's making",
            "header.json: No such file or directory",
        ] == [line.rsplit("/", 1)[1] for line in journal.passed_over]
        assert ["s-1"] == unfinished(ledger.root)


def test_a_cell_that_was_measured_again_replaces_the_first(ledger: Ledger):
    run = write_run(ledger, "r-1")
    with Journal.create(ledger.root, "s-1", PLAN) as journal:
        journal.start_run({"id": "r-1"})
        for cell in run.cells:
            journal.add_cell("r-1", 0, cell)

        assert [({"id": "r-1"}, {0: run.cells[1]})] == journal.runs()


def test_a_run_begins_once_and_before_its_cells(ledger: Ledger):
    run = write_run(ledger, "r-1")
    with Journal.create(ledger.root, "s-1", PLAN) as journal:
        with pytest.raises(BadInput, match="run r-1 has not begun"):
            journal.add_cell("r-1", 0, run.cells[0])
        journal.start_run({"id": "r-1"})
        with pytest.raises(BadInput, match="run r-1 has begun already"):
            journal.start_run({"id": "r-1"})


def test_what_an_interrupted_cell_measured_is_kept_beside_the_whole_ones(ledger: Ledger):
    data = raw_bytes([make_record()], {"run": "r-1"})
    with Journal.create(ledger.root, "s-1", PLAN) as journal:
        journal.start_run({"id": "r-1"})
        path = journal.keep_interrupted("r-1", 1, data)

        assert "cell-1.interrupted.parquet" == path.name
        assert (make_record(),) == read_raw(path, sha256=sha256_hex(data))
        assert [({"id": "r-1"}, {})] == journal.runs()
        assert [] == journal.passed_over


def test_an_unfinished_session_is_a_note_of_verify(ledger: Ledger):
    Journal.create(ledger.root, "s-1", PLAN).close()

    found = verify(ledger)

    assert found.ok
    assert "session s-1 is not finished; `benchkit run --resume s-1` goes on with it" in found.notes


def test_a_place_without_sessions_has_none(tmp_path: Path):
    assert [] == unfinished(tmp_path)
