from __future__ import annotations

from typing import Any

import pytest

from benchkit.ledger import Ledger
from benchkit.ledger.entries import Entry, Graph, new_entry
from benchkit.ledger.states import RunState, fold
from making import AT, make_run


@pytest.fixture
def recorded(ledger: Ledger) -> Entry:
    make_run(ledger, "r-1")
    return ledger.log()[0]


def after(*prev: Entry, kind: str, at: str = AT, **payload: Any) -> Entry:
    return new_entry(prev=[e.hash for e in prev], kind=kind, at=at, who="me", payload=payload)


def decision(*prev: Entry, kind: str, at: str = AT, why: str = "because") -> Entry:
    if kind == "banked":
        run = prev[0].payload["run"] if prev[0].kind == "recorded" else None
        cells = [{"cell": c["cell"], "flags": []} for c in run["cells"]] if run else CELLS
        return after(*prev, kind=kind, at=at, why=why, rules=1, runs=[{"run": "r-1", "cells": cells}])
    return after(*prev, kind=kind, at=at, why=why, runs=["r-1"])


CELLS = [
    {"cell": {"isl": 100, "osl": 11, "kv": 0, "concurrency": 1}, "flags": []},
    {"cell": {"isl": 100, "osl": 11, "kv": 0, "concurrency": 2}, "flags": []},
]


def state_of(*entries: Entry) -> RunState:
    states = fold(Graph(entries))
    assert states.faults == ()
    return states.runs["r-1"]


@pytest.mark.parametrize("kind", ["banked", "quarantined", "superseded", "retracted"])
def test_the_last_word_on_a_line_is_the_status(recorded: Entry, kind: str):
    first = decision(recorded, kind="quarantined", why="first")
    last = decision(first, kind=kind, why="last")

    assert (kind, "last") == (state_of(recorded, first, last).status, state_of(recorded, first, last).why)


@pytest.mark.parametrize(
    ("one", "other", "holds"),
    [
        ("banked", "quarantined", "quarantined"),
        ("quarantined", "banked", "quarantined"),
        ("superseded", "banked", "superseded"),
        ("retracted", "quarantined", "retracted"),
        ("banked", "banked", "banked"),
    ],
)
def test_of_contradictory_branches_the_more_restrictive_holds_until_a_later_entry_decides(
    recorded: Entry, one: str, other: str, holds: str
):
    a = decision(recorded, kind=one, at="2026-02-01T00:00:00Z", why="a")
    b = decision(recorded, kind=other, at="2026-02-02T00:00:00Z", why="b")
    merge = after(a, b, kind="merge", why="")
    decided = decision(merge, kind="banked", why="looked at it")

    assert holds == state_of(recorded, a, b).status
    assert holds == state_of(recorded, a, b, merge).status
    assert state_of(recorded, a, b, merge, decided).status == "banked"


def test_superseded_says_by_what(recorded: Entry):
    last = after(recorded, kind="superseded", runs=["r-1"], by="r-2", why="measured again")

    assert state_of(recorded, last).superseded_by == "r-2"


def test_labels_come_and_go(recorded: Entry):
    first = after(recorded, kind="labelled", runs=["r-1"], add=["final", "in-flight"], remove=[], why="x")
    second = after(first, kind="labelled", runs=["r-1"], add=[], remove=["in-flight"], why="y")

    assert state_of(recorded, first, second).labels == {"final": "x"}


def test_a_waiver_of_one_cell_leaves_the_other(recorded: Entry):
    cells = state_of(recorded).run.cells
    one = after(recorded, kind="waived", run="r-1", flag="errors", cell=CELLS[0]["cell"], why="known")

    state = state_of(recorded, one)

    assert state.waived("errors", cells[0].cell) == "known"
    assert None is state.waived("errors", cells[1].cell)
    assert None is state.waived("isl_drift", cells[0].cell)


def test_the_newest_waiver_gives_the_reason(recorded: Entry):
    one = after(recorded, kind="waived", run="r-1", flag="errors", cell=None, why="old")
    two = after(one, kind="waived", run="r-1", flag="errors", cell=None, why="new")

    assert state_of(recorded, one, two).waived("errors", state_of(recorded).run.cells[1].cell) == "new"


def test_notes_and_merges_change_no_state(recorded: Entry):
    note = after(recorded, kind="note", runs=["r-1"], text="hot day")

    assert state_of(recorded) == state_of(recorded, note)


def test_a_kind_of_a_later_version_is_kept_and_passed_over(recorded: Entry):
    later = after(recorded, kind="blessed", runs=["r-1"])

    states = fold(Graph([recorded, later]))

    assert (later.hash,) == states.unknown
    assert states.runs["r-1"].status == "recorded"


@pytest.mark.parametrize(
    "payload",
    [
        {"kind": "quarantined", "runs": ["r-9"], "why": "x"},
        {"kind": "banked", "runs": [{"run": "r-1", "cells": []}], "rules": 1, "why": "x"},
        {"kind": "banked", "runs": [{"run": "r-1"}], "why": "x"},
        {"kind": "banked", "runs": [{"run": "r-1", "cells": CELLS}], "why": "x"},
        {"kind": "waived", "run": "r-1", "why": "x"},
        {"kind": "recorded", "run": 7},
        {"kind": "recorded", "run": {"id": "r-2", "cells": []}, "bytes": {}},
    ],
)
def test_an_entry_that_makes_no_sense_is_a_fault_and_changes_nothing(recorded: Entry, payload: dict[str, Any]):
    odd = after(recorded, **payload)

    states = fold(Graph([recorded, odd]))

    assert [odd.hash] == [hash_ for hash_, _ in states.faults]
    assert {"r-1": state_of(recorded)} == states.runs


def test_a_run_recorded_twice_is_a_fault_of_the_second(recorded: Entry):
    again = after(recorded, kind="recorded", at="2026-02-01T00:00:00Z", **recorded.payload)

    ((hash_, why),) = fold(Graph([again, recorded])).faults

    assert again.hash == hash_
    assert "recorded already" in why
