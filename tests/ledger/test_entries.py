from __future__ import annotations

import hashlib
import json
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchkit.errors import BadInput
from benchkit.ledger import Ledger
from benchkit.ledger.entries import (
    Entry,
    Graph,
    data_of_row,
    entry_of_row,
    new_entry,
    parse_entry,
)
from making import AT, make_run


def note(text: str, *prev: Entry, at: str = AT) -> Entry:
    return new_entry(prev=[e.hash for e in prev], kind="note", at=at, who="me", payload={"text": text})


def test_the_hash_of_an_entry_is_the_sha256_of_its_sorted_unspaced_json():
    text = '{"at":"2026-01-31T12:00:00Z","kind":"note","payload":{"a":1,"b":"é"},"prev":[],"schema":1,"who":"me"}'

    entry = new_entry(prev=(), kind="note", at=AT, who="me", payload={"b": "é", "a": 1})

    assert text.encode() == entry.data
    assert hashlib.sha256(text.encode()).hexdigest() == entry.hash


def test_sha256sum_checks_the_files_of_entries_by_hand(ledger: Ledger):
    make_run(ledger, bank=True)
    files = sorted(ledger.layout.entries.iterdir())

    said = subprocess.run(["sha256sum", *files], capture_output=True, text=True, check=True).stdout.split()

    assert len(files) == 2
    assert [f.stem for f in files] == said[::2]


def test_an_entry_comes_back_from_its_bytes_and_from_its_row():
    entry = note("two\nlines, and “quotes”", note("first"))

    assert entry == parse_entry(entry.data)
    assert entry == entry_of_row(entry.row)
    assert entry.data == data_of_row(entry.row)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "not an entry"),
        (b'{"schema":1,"kind":"note"}', "not an entry"),
        (note("x").data.replace(b'"schema":1', b'"schema":2'), "schema 2 is not known here"),
        (note("x").data.replace(b",", b", "), "not in canonical form"),
        (note("x").data + b"\n", "not in canonical form"),
        (note("x").data.replace(b'"prev":[]', b'"prev":["x"]'), "not an entry"),
    ],
)
def test_what_is_no_entry_is_refused_with_why(data: bytes, why: str):
    with pytest.raises(ValueError, match=why):
        parse_entry(data)


@pytest.mark.parametrize("at", ["", "2026-01-31", "2026-01-31T12:00:00", "2026-01-31T12:00:00+01:00"])
def test_a_time_without_z_is_refused(at: str):
    with pytest.raises(BadInput, match="expected UTC"):
        note("x", at=at)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), "\ud800"])
def test_a_value_that_json_cannot_carry_is_refused_in_one_line(value: object):
    with pytest.raises(BadInput, match="cannot be written as JSON"):
        new_entry(prev=(), kind="note", at=AT, who="me", payload={"x": value})


def test_a_branch_that_is_not_joined_is_a_second_head_newest_last():
    root = note("root")
    old, new = note("old", root, at="2026-02-01T00:00:00Z"), note("new", root, at="2026-03-01T00:00:00Z")

    graph = Graph([new, old, root])

    assert (root, old, new) == graph.order
    assert (old.hash, new.hash) == graph.heads
    assert not graph.leads_to(old.hash, new.hash)
    assert graph.leads_to(root.hash, new.hash)


def test_a_clock_that_went_back_does_not_put_an_entry_before_what_it_follows():
    first = note("first", at="2026-02-01T00:00:00Z")
    second = note("second", first, at="2026-01-01T00:00:00Z")

    assert (first, second) == Graph([second, first]).order


def test_a_link_to_nothing_is_named():
    lost, child = note("lost"), None
    child = note("child", lost)

    graph = Graph([child])

    assert ((child.hash, lost.hash),) == graph.missing
    assert (child,) == graph.order


@given(st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=12), st.randoms())
def test_order_and_ancestry_of_any_graph_are_those_of_a_plain_search(links: list[list[int]], shuffle: random.Random):
    entries: list[Entry] = []
    for i, prevs in enumerate(links):
        chosen = {p % i for p in prevs} if i else set()
        entries.append(note(str(i), *(entries[p] for p in sorted(chosen))))
    by_hash = {e.hash: e for e in entries}

    def ancestors(e: Entry) -> set[str]:
        return set(e.prev).union(*(ancestors(by_hash[p]) for p in e.prev))

    graph = Graph(entries)
    shuffled = list(entries)
    shuffle.shuffle(shuffled)

    assert graph.order == Graph(shuffled).order
    assert {e.hash for e in entries} == {e.hash for e in graph.order}
    for e in entries:
        assert ancestors(e) == {a.hash for a in entries if a.hash != e.hash and graph.leads_to(a.hash, e.hash)}
    assert {e.hash for e in entries} - {p for e in entries for p in e.prev} == set(graph.heads)


def test_a_file_is_read_as_json_by_anything(ledger: Ledger, tmp_path: Path):
    run = make_run(ledger)

    (file,) = ledger.layout.entries.iterdir()

    assert run.id == json.loads(file.read_text())["payload"]["run"]["id"]
