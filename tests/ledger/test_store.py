from __future__ import annotations

import dataclasses
import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import select

from benchkit import metrics
from benchkit.errors import BadInput, BenchkitError, Finding
from benchkit.ledger import Ledger, verify
from benchkit.ledger.database import cell_table, measure_table, metadata, run_table
from benchkit.record import RequestRecord
from benchkit.validity import Flag
from making import AT, PROTOCOL, make_failure, make_record, make_run, write_run

SAY = {"at": AT, "who": "me"}


def one_failure_in_cell_0(place: int, record: RequestRecord) -> RequestRecord:
    if place == 0 and record.index == 1:
        return make_failure(index=1, t_send_ns=record.t_send_ns)
    return record


def dump(ledger: Ledger) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table but the cache."""
    with ledger.chain.database.reading() as conn:
        return {
            table.name: sorted(tuple(row) for row in conn.execute(select(table)))
            for table in metadata.sorted_tables
            if table is not measure_table
        }


# --- open ---------------------------------------------------------------------------------------------------


def test_a_place_without_a_ledger_says_how_one_is_made(tmp_path: Path):
    with pytest.raises(BadInput, match=r"no ledger at .*nothing; `benchkit run` makes one"):
        Ledger.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_file_is_no_place_for_a_ledger(tmp_path: Path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(BadInput, match="cannot make a ledger there"):
        Ledger.open(tmp_path / "file", create=True)


def test_a_new_ledger_keeps_git_from_converting_its_bytes(ledger: Ledger):
    assert "raws/** binary" in (ledger.root / ".gitattributes").read_text()
    assert "entries/** -text" in (ledger.root / ".gitattributes").read_text()
    assert {"ledger.db*", "sessions/"} <= set((ledger.root / ".gitignore").read_text().splitlines())


def test_a_database_that_is_none_says_how_it_is_made_anew(ledger: Ledger):
    make_run(ledger)
    ledger.layout.database.write_bytes(b"not a database at all, " * 100)

    with pytest.raises(Finding, match=r"damaged \(file is not a database\).*benchkit ledger rebuild"):
        Ledger.open(ledger.root)

    assert [s.run.id for s in Ledger.rebuild(ledger.root).runs()] == ["r-1"]


def test_a_database_of_a_newer_benchkit_is_left_alone(ledger: Ledger):
    with sqlite3.connect(ledger.layout.database) as conn:
        conn.execute("PRAGMA user_version = 99")
    conn.close()

    with pytest.raises(BadInput, match=r"newer benchkit \(schema 99, this one knows 1\)"):
        Ledger.open(ledger.root)


def test_a_database_of_something_else_is_refused(ledger: Ledger):
    ledger.layout.database.unlink()
    conn = sqlite3.connect(ledger.layout.database)
    conn.execute("CREATE TABLE mine (x)")
    conn.close()

    with pytest.raises(Finding, match="not the database of a ledger"):
        Ledger.open(ledger.root)


def test_a_missing_database_is_made_from_the_entries(ledger: Ledger):
    make_run(ledger, "r-1", bank=True)
    make_run(ledger, "r-2")
    before = dump(ledger)
    ledger.layout.database.unlink()

    again = Ledger.open(ledger.root)

    assert before == dump(again)
    assert verify(again).ok


def test_rebuild_gives_equal_content(ledger: Ledger):
    make_run(ledger, "r-1", bank=True)
    make_run(ledger, "r-2")
    ledger.quarantine(["r-2"], why="the fan was off", **SAY)
    before, states = dump(ledger), ledger.runs()

    again = Ledger.rebuild(ledger.root)

    assert before == dump(again)
    assert states == again.runs()
    assert verify(again).ok


def test_rebuild_keeps_an_entry_that_only_the_old_database_knew(ledger: Ledger):
    make_run(ledger)
    (file,) = ledger.layout.entries.iterdir()
    data = file.read_bytes()
    file.unlink()

    again = Ledger.rebuild(ledger.root)

    assert [s.run.id for s in again.runs()] == ["r-1"]
    assert data == file.read_bytes()


def test_rebuild_keeps_a_damaged_database_beside_the_new_one(ledger: Ledger):
    make_run(ledger)
    damaged = b"\0" * 8192
    ledger.layout.database.write_bytes(damaged)

    again = Ledger.rebuild(ledger.root)

    assert damaged == (ledger.root / "ledger.db.damaged-1").read_bytes()
    assert any("ledger.db.damaged-1" in n for n in again.notes)
    assert verify(again).ok


def test_entries_that_git_brought_are_taken_in(ledger: Ledger, tmp_path: Path):
    make_run(ledger, "r-1")
    clone = tmp_path / "clone"
    shutil.copytree(ledger.root, clone)
    with Ledger.open(clone) as other:
        make_run(other, "r-2", bank=True)
    shutil.copytree(clone / "raws", ledger.root / "raws", dirs_exist_ok=True)
    shutil.copytree(clone / "entries", ledger.root / "entries", dirs_exist_ok=True)

    again = Ledger.open(ledger.root)

    assert [(s.run.id, s.status) for s in again.runs()] == [("r-1", "recorded"), ("r-2", "banked")]
    assert verify(again).ok


def test_an_entry_whose_predecessor_did_not_come_is_passed_over_and_named(ledger: Ledger):
    make_run(ledger, "r-1")
    make_run(ledger, "r-2")
    first, second = ledger.log()
    ledger.layout.entry(first.hash).unlink()
    ledger.layout.database.unlink()

    again = Ledger.open(ledger.root)

    assert again.runs() == []
    assert any(second.hash[:12] in note and first.hash[:12] in note for note in again.notes)


def test_a_missing_entry_file_is_written_again_by_the_next_open(ledger: Ledger):
    make_run(ledger)
    (file,) = ledger.layout.entries.iterdir()
    data = file.read_bytes()
    file.unlink()

    Ledger.open(ledger.root)

    assert data == file.read_bytes()


# --- record -------------------------------------------------------------------------------------------------


def test_a_recorded_run_comes_back_as_it_went_in(ledger: Ledger):
    run = make_run(ledger, "r-1", grid="cold", cold_of="boot", boot_id=None, note="näive “quotes”\n")

    (state,) = Ledger.open(ledger.root).runs()

    assert run == state.run
    assert (state.status, state.why, state.recorded_at) == ("recorded", "", AT)
    assert ledger.log("r-1")[0].hash == state.entry


def test_the_records_of_a_cell_come_back_from_its_raw(ledger: Ledger):
    run = make_run(ledger)

    with_events = ledger.records(run.cells[0])
    without = ledger.records(run.cells[0], events=False)

    assert (len(with_events[0].event_ns or ()), without[0].event_ns) == (11, None)
    assert [metrics.ttft_s(r) for r in with_events] == [0.1, 0.1]


def test_the_same_run_twice_is_one_entry(ledger: Ledger):
    run = make_run(ledger)

    again = ledger.record(run, at="2026-02-01T00:00:00Z", who="other")

    assert [again] == ledger.log()


def test_another_run_under_the_same_id_is_refused(ledger: Ledger):
    run = make_run(ledger)

    with pytest.raises(Finding, match="r-1: recorded already, with other values"):
        ledger.record(dataclasses.replace(run, note="other"), **SAY)


def test_a_run_without_its_raw_is_refused(ledger: Ledger):
    run = write_run(ledger)
    ledger.layout.raw(run.cells[1].raw).unlink()

    with pytest.raises(Finding, match=rf"raw {run.cells[1].raw[:12]}…: missing"):
        ledger.record(run, **SAY)
    assert ledger.runs() == []


def test_a_value_that_json_cannot_carry_is_refused_in_one_line(ledger: Ledger):
    run = write_run(ledger, facts={"lag": float("nan")})

    with pytest.raises(BadInput, match="cannot be written as JSON"):
        ledger.record(run, **SAY)


def test_runs_are_found_by_what_they_are(ledger: Ledger):
    make_run(ledger, "r-1", arm="a", bank=True)
    run = make_run(ledger, "r-2", arm="b", grid="cold", session="s-2")

    assert [s.run.id for s in ledger.runs(protocol="tiny")] == ["r-1", "r-2"]
    assert [s.run.id for s in ledger.runs(arm="b")] == ["r-2"]
    assert [s.run.id for s in ledger.runs(arm=run.arm_hash, protocol=run.protocol_hash)] == ["r-2"]
    assert [s.run.id for s in ledger.runs(session="s-2")] == ["r-2"]
    assert [s.run.id for s in ledger.runs(status="banked", grid="warm")] == ["r-1"]
    assert ledger.runs(status="banked", grid="cold") == []


def test_a_run_is_found_by_a_beginning_that_no_other_shares(ledger: Ledger):
    make_run(ledger, "r-10")
    make_run(ledger, "r-1")
    make_run(ledger, "r-20")

    assert ledger.run("r-1").run.id == "r-1"
    assert ledger.run("r-2").run.id == "r-20"
    with pytest.raises(BadInput, match="can mean 3 runs: r-10, r-1, r-20"):
        ledger.run("r-")
    with pytest.raises(BadInput, match=r"run r-3: not in .*; there are .*r-1"):
        ledger.run("r-3")
    with pytest.raises(BadInput):
        ledger.run("")


def test_the_ledger_knows_what_a_boot_has_served(ledger: Ledger):
    run = make_run(ledger, boot_id="boot-1")
    ledger.quarantine([run.id], why="odd", **SAY)

    assert ledger.served(run.protocol_hash, "boot-1")
    assert not ledger.served("0" * 64, "boot-1")
    assert not ledger.served(run.protocol_hash, "boot-2")
    assert (ledger.boot_seen("boot-1"), ledger.boot_seen("boot-2")) == (True, False)


# --- bank ---------------------------------------------------------------------------------------------------


def test_banking_is_one_entry_for_all_runs_and_says_what_was_banked_before(ledger: Ledger):
    make_run(ledger, "r-1", bank=True)
    make_run(ledger, "r-2")
    make_run(ledger, "r-3")
    before = len(ledger.log())

    done = ledger.bank(["r-1", "r-2", "r-3", "r-2"], why="clean", **SAY)
    again = ledger.bank(["r-1", "r-2"], why="clean", **SAY)

    assert (done.banked, done.already) == (("r-2", "r-3"), ("r-1",))
    assert (again.entry, again.banked, again.already) == (None, (), ("r-1", "r-2"))
    assert before + 1 == len(ledger.log())
    assert {"banked"} == {s.status for s in ledger.runs()}
    assert ledger.run("r-2").why == "clean"


def test_a_blocking_flag_keeps_all_of_the_runs_out_until_it_is_waived(ledger: Ledger):
    make_run(ledger, "r-1")
    make_run(ledger, "r-2", change=one_failure_in_cell_0)

    with pytest.raises(Finding) as refused:
        ledger.bank(["r-1", "r-2"], why="x", **SAY)

    lines = str(refused.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("run r-2, cell 100/11 c1: errors: 1 of 2 failed: http 1")
    assert '`benchkit waive r-2 errors --cell "100/11 c1" --why …`' in lines[0]
    assert {"recorded"} == {s.status for s in ledger.runs()}

    ledger.waive("r-2", "errors", why="the switch was rebooted", cell="100/11 c1", **SAY)
    ledger.bank(["r-1", "r-2"], why="x", **SAY)

    doubts = ledger.measured(ledger.run("r-2")).cells[0].flags
    assert [(d.name, d.blocking, d.waived) for d in doubts] == [("errors", True, "the switch was rebooted")]
    assert verify(ledger).ok


def test_every_blocking_flag_of_every_cell_is_listed_at_once(ledger: Ledger):
    make_run(
        ledger,
        "r-1",
        change=lambda place, r: make_record(index=r.index, t_send_ns=r.t_send_ns, completion_tokens=9 + place),
    )

    with pytest.raises(Finding) as refused:
        ledger.bank(["r-1"], why="x", **SAY)

    assert [": ".join(line.split(": ")[:2]) for line in str(refused.value).splitlines()] == [
        "run r-1, cell 100/11 c1: short_output",
        "run r-1, cell 100/11 c2: short_output",
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"grid": "cold", "cold_of": "boot"}, "r-1: is cold; cold runs are shown, never banked"),
        ({"complete": False}, "r-1: is incomplete"),
    ],
)
def test_cold_and_incomplete_runs_are_never_banked(ledger: Ledger, overrides: dict[str, object], words: str):
    make_run(ledger, **overrides)

    with pytest.raises(Finding) as refused:
        ledger.bank(["r-1"], why="x", **SAY)

    assert [words] == [line[4:][: len(words)] for line in str(refused.value).splitlines()]


def test_a_quarantined_run_is_not_banked(ledger: Ledger):
    make_run(ledger, "r-1")
    ledger.quarantine(["r-1"], why="the fan was off", **SAY)

    with pytest.raises(Finding, match=r"is quarantined \(the fan was off\)"):
        ledger.bank(["r-1"], why="x", **SAY)


def test_a_banked_run_can_be_quarantined(ledger: Ledger):
    make_run(ledger, "r-1", bank=True)

    ledger.quarantine(["r-1"], why="the fan was off", **SAY)

    assert (ledger.run("r-1").status, ledger.run("r-1").why) == ("quarantined", "the fan was off")
    assert [e.kind for e in ledger.log("r-1")] == ["recorded", "banked", "quarantined"]


def test_results_are_not_banked_twice_under_two_names(ledger: Ledger):
    run = make_run(ledger, "r-1", bank=True)
    copy = dataclasses.replace(run, id="r-2")
    ledger.record(copy, **SAY)

    with pytest.raises(Finding, match=r"r-2, cell 100/11 c1: the same results as those of run r-1"):
        ledger.bank(["r-2"], why="x", **SAY)


def test_a_raw_that_changed_since_is_not_banked(ledger: Ledger):
    run = make_run(ledger)
    path = ledger.layout.raw(run.cells[0].raw)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(Finding, match="bytes do not match the ledger"):
        ledger.bank(["r-1"], why="x", **SAY)


def test_counts_that_the_raw_does_not_bear_out_are_not_banked(ledger: Ledger):
    run = write_run(ledger)
    wrong = dataclasses.replace(run.cells[0], n_ok=1)
    ledger.record(dataclasses.replace(run, cells=(wrong, run.cells[1])), **SAY)

    with pytest.raises(Finding, match="n_ok: the ledger says 1, its records 2"):
        ledger.bank(["r-1"], why="x", **SAY)


@pytest.mark.parametrize("why", ["", "  \n"])
def test_no_decision_without_a_reason(ledger: Ledger, why: str):
    make_run(ledger, change=one_failure_in_cell_0)

    for decide in (
        lambda: ledger.bank(["r-1"], why=why, **SAY),
        lambda: ledger.quarantine(["r-1"], why=why, **SAY),
        lambda: ledger.waive("r-1", "errors", why=why, **SAY),
    ):
        with pytest.raises(BadInput, match="expected a reason"):
            decide()


# --- waive --------------------------------------------------------------------------------------------------


def test_what_cannot_be_waived_says_why_not(ledger: Ledger):
    make_run(ledger, "r-1", change=one_failure_in_cell_0, grid="cold", cold_of="boot")

    with pytest.raises(BadInput, match="cold: cannot be waived"):
        ledger.waive("r-1", "cold", why="x", **SAY)
    with pytest.raises(BadInput, match=r"run r-1: does not carry usage_missing; blocking there: cold, errors"):
        ledger.waive("r-1", "usage_missing", why="x", **SAY)
    with pytest.raises(BadInput, match=r"cell 100/11 c2: does not carry errors; blocking there: cold"):
        ledger.waive("r-1", "errors", why="x", cell="100/11 c2", **SAY)
    with pytest.raises(BadInput, match=r'cell "9/9 c9": not in run r-1; there are 100/11 c1, 100/11 c2'):
        ledger.waive("r-1", "errors", why="x", cell="9/9 c9", **SAY)


def test_a_footnote_needs_no_waiver(ledger: Ledger):
    make_run(ledger, "r-1", boot_id=None)

    with pytest.raises(BadInput, match="boot_unknown does not block"):
        ledger.waive("r-1", "boot_unknown", why="x", **SAY)


# --- measured -----------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_raw_and_come_from_the_cache_the_second_time(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    make_run(ledger)
    first = ledger.measured(ledger.run("r-1"))
    monkeypatch.setattr("benchkit.ledger.store.examine", None)  # the second time nothing is computed

    second = ledger.measured(ledger.run("r-1"))

    assert first == second
    # 2 streams of 11 tokens end 201 ms after they began; 2 rounds, 300 ms apart.
    assert pytest.approx(second.cells[1].metrics["output_tok_per_s"]) == 44 / 0.501
    assert second.cells[0].metrics["ttft_s"] == 0.1


def test_no_figure_is_given_of_a_raw_that_is_gone_or_changed_even_from_the_cache(ledger: Ledger):
    run = make_run(ledger)
    ledger.measured(ledger.run("r-1"))
    ledger.layout.raw(run.cells[0].raw).unlink()

    with pytest.raises(Finding, match="missing"):
        ledger.measured(ledger.run("r-1"))


def test_a_row_of_the_cache_that_was_changed_is_not_believed(ledger: Ledger):
    make_run(ledger)
    before = ledger.measured(ledger.run("r-1"))
    with ledger.chain.database.writing() as conn:
        conn.exec_driver_sql("UPDATE measure SET metrics = replace(metrics, '0.1', '0.2')")

    assert before == ledger.measured(ledger.run("r-1"))


def test_a_banked_run_keeps_the_flags_it_was_banked_with(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    make_run(ledger, "r-1", boot_id=None, bank=True)
    make_run(ledger, "r-2", boot_id=None)
    newer = Flag(name="newer", blocking=True, detail="")
    for module in ("measure", "store", "verification"):
        monkeypatch.setattr(f"benchkit.ledger.{module}.RULES", 10_000)
    monkeypatch.setattr("benchkit.ledger.measure.cell_flags", lambda *given: (newer,))

    banked, fresh = (ledger.measured(ledger.run(r)).cells[0].flags for r in ("r-1", "r-2"))

    assert ([f.name for f in banked], [f.name for f in fresh]) == (["boot_unknown"], ["newer"])
    found = verify(ledger)
    assert found.ok
    assert any("rules 10000 (banked under" in n and "add newer" in n for n in found.notes)


# --- branches -----------------------------------------------------------------------------------------------


@pytest.fixture
def branched(ledger: Ledger, tmp_path: Path) -> Ledger:
    """Two people went on from r-1: one banked it, the other recorded r-2 and quarantined r-1; git joined both."""
    make_run(ledger, "r-1")
    clone = tmp_path / "clone"
    shutil.copytree(ledger.root, clone)
    with Ledger.open(clone) as other:
        make_run(other, "r-2", at="2026-02-02T00:00:00Z")
        other.quarantine(["r-1"], why="throttled", at="2026-02-03T00:00:00Z", who="other")
    ledger.bank(["r-1"], why="clean", at="2026-02-01T00:00:00Z", who="me")
    shutil.copytree(clone / "raws", ledger.root / "raws", dirs_exist_ok=True)
    shutil.copytree(clone / "entries", ledger.root / "entries", dirs_exist_ok=True)
    return Ledger.open(ledger.root)


def test_branches_that_are_not_joined_are_a_finding_which_a_merge_cures(branched: Ledger):
    assert [p.kind for p in verify(branched).problems] == ["unmerged"]
    assert len(branched.heads()) == 2
    with pytest.raises(Finding, match="2 branches are not joined; run `benchkit ledger merge`"):
        branched.bank(["r-2"], why="x", **SAY)

    merge = branched.merge_heads(**SAY)

    assert merge is not None
    assert len(merge.prev) == 2
    assert (merge.hash,) == branched.heads()
    assert None is branched.merge_heads(**SAY)
    assert verify(branched).ok
    assert {s.run.id: s.status for s in branched.runs()} == {"r-1": "quarantined", "r-2": "recorded"}


def test_a_measurement_is_recorded_on_the_newest_branch_all_the_same(branched: Ledger):
    newest = branched.heads()[-1]

    make_run(branched, "r-3", at="2026-02-04T00:00:00Z")

    assert (newest,) == branched.log("r-3")[0].prev
    assert len(branched.heads()) == 2


# --- guards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["entry", "run", "raw", "cell"])
def test_update_delete_and_replace_are_refused_even_to_a_foreign_client(ledger: Ledger, table: str):
    make_run(ledger)
    conn = sqlite3.connect(ledger.layout.database)  # no pragma of ours is on
    key = {"entry": "hash", "run": "entry", "raw": "sha256", "cell": "entry"}[table]
    for statement in (
        f"UPDATE {table} SET {key} = {key}",
        f"DELETE FROM {table}",
        f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}",
        f"INSERT INTO {table} SELECT * FROM {table} WHERE true ON CONFLICT DO UPDATE SET {key} = 'x'",
    ):
        with pytest.raises(sqlite3.IntegrityError, match=f"{table} is append-only"):
            conn.execute(statement)
    conn.close()
    assert verify(ledger).ok


def test_b40_a_row_that_points_at_nothing_is_refused_on_a_fresh_connection(ledger: Ledger):
    run = make_run(ledger)
    (there,) = (s.entry for s in ledger.runs())
    values = {"place": 7, "isl": 1, "osl": 1, "kv": 0, "concurrency": 1, "raw": run.cells[0].raw, "n": 1, "n_ok": 1}

    for orphan in ({**values, "entry": "0" * 64}, {**values, "entry": there, "raw": "0" * 64}):
        with (
            pytest.raises(BenchkitError, match="FOREIGN KEY constraint failed"),
            ledger.chain.database.writing() as conn,
        ):
            conn.execute(cell_table.insert(), orphan)
    with pytest.raises(BenchkitError, match="FOREIGN KEY"), ledger.chain.database.writing() as conn:
        conn.execute(
            measure_table.insert(),
            {"entry": "0" * 64, "place": 0, "code": "", "rules": 1, "metrics": "", "flags": "", "digest": ""},
        )
    assert verify(ledger).ok


def test_a_text_is_refused_where_a_number_belongs(ledger: Ledger):
    make_run(ledger)
    with ledger.chain.database.reading() as conn:
        row = dict(conn.execute(select(run_table)).mappings().one())

    with pytest.raises(BenchkitError, match="cannot store TEXT"), ledger.chain.database.writing() as conn:
        conn.exec_driver_sql("DROP TRIGGER run_no_replace")
        conn.execute(run_table.insert(), {**row, "entry": "x", "rep": "fast"})


def test_entries_are_what_the_protocol_said_on_the_day(ledger: Ledger):
    make_run(ledger)

    (file,) = ledger.layout.entries.iterdir()

    assert json.loads(file.read_bytes())["payload"]["run"]["protocol_text"] == PROTOCOL
