"""Which runs stand for an arm, and whether two arms were asked the same question: what makes a comparison fair."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchkit.arm import parse_arm
from benchkit.errors import BadInput, Finding
from benchkit.measured import MeasuredRun

Grid = Literal["warm", "cold"]

USABLE: Mapping[Grid, str] = {"warm": "banked", "cold": "recorded"}
"""The state that a run of each grid must be in to be shown: cold runs are never banked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A doubt as it will be read: `kind` for programs, `text` for the footnote."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reps:
    """The runs that stand for one arm, oldest first: never empty, all of one arm hash.

    Raises:
        Finding: no runs, or runs of several arm hashes, which do not pool.
    """

    arm: str
    runs: tuple[MeasuredRun, ...]
    left_out: tuple[MeasuredRun, ...]
    """Runs of the same grid, arm and sessions that are not used: a reader may ask why."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise Finding(f"{self.arm}: no runs")
        by_hash: dict[str, list[str]] = {}
        for rep in self.runs:
            by_hash.setdefault(rep.run.arm_hash, []).append(rep.run.id)
        if len(by_hash) > 1:
            found = "; ".join(f"{hash_[:12]} ({', '.join(ids)})" for hash_, ids in sorted(by_hash.items()))
            raise Finding(
                f"{self.arm}: {len(by_hash)} arm hashes under one name, which do not pool: {found}; "
                "choose a --session, or give the changed arm another name"
            )

    @property
    def newest(self) -> MeasuredRun:
        """The run that started last: its texts speak for the arm."""
        return self.runs[-1]

    @property
    def title(self) -> str:
        """The arm's title, else its name."""
        return parse_arm(self.newest.run.arm_text, self.arm).title or self.arm

    @property
    def sessions(self) -> tuple[str, ...]:
        """The sessions that the runs come from, oldest first."""
        return tuple(dict.fromkeys(rep.run.session for rep in self.runs))

    @property
    def notes(self) -> tuple[Note, ...]:
        """What is doubtful about all of the arm's numbers."""
        notes = []
        if any(rep.run.server.get("engine") == "sim" for rep in self.runs):
            notes.append(Note(kind="simulated", text="simulated: says nothing about any engine or hardware"))
        boots = {rep.run.boot_id for rep in self.runs}
        if None in boots and self.newest.run.grid == "warm":
            text = "the server does not tell its boot: warm on the plan's word"
            notes.append(Note(kind="boot_unknown", text=text))
        elif None not in boots and len(boots) == 1 and len(self.runs) > 1:
            notes.append(Note(kind="one_boot", text="all reps of this arm come from one server boot"))
        if len(self.sessions) > 1:
            notes.append(Note(kind="sessions", text=f"reps pooled from {len(self.sessions)} sessions"))
        labels = sorted({label for rep in self.runs for label in rep.labels} - {"final"})
        if labels:
            notes.append(Note(kind="label", text=f"labelled {', '.join(labels)}"))
        if self.left_out:
            others = ", ".join(f"{rep.run.id} ({rep.status})" for rep in self.left_out)
            notes.append(Note(kind="left_out", text=f"runs of the same sessions that are not used: {others}"))
        return tuple(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactDifference:
    """Something that is not the same on both sides, as text; None where one side does not tell."""

    name: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        texts = ["not told" if value is None else value for value in (self.a, self.b)]
        # A launch command or a request body says nothing in a footnote that its name does not.
        return self.name if max(map(len, texts)) > 60 else f"{self.name} {texts[0]} → {texts[1]}"


# --- which runs -------------------------------------------------------------------------------------------


def protocol_hash_named(runs: Iterable[MeasuredRun], name: str) -> str:
    """The protocol hash that a name, a hash or the first 8 or more digits of one stands for in the runs.

    Raises:
        BadInput: no run has it.
        Finding: the name stands for several questions.
    """
    is_hash = re.fullmatch(r"[0-9a-f]{8,64}", name) is not None
    newest: dict[str, str] = {}
    for rep in runs:
        run = rep.run
        if run.protocol == name or (is_hash and run.protocol_hash.startswith(name)):
            newest[run.protocol_hash] = max(run.started_at, newest.get(run.protocol_hash, ""))
    if not newest:
        raise BadInput(f"{name}: no run of this protocol; try: benchkit run {name} --arm ARM")
    if len(newest) > 1:
        found = ", ".join(f"{hash_[:12]} (last run {at})" for hash_, at in sorted(newest.items()))
        raise Finding(f"{name}: {len(newest)} protocol hashes under one name: {found}; name the one you mean")
    return next(iter(newest))


def select_reps(
    runs: Iterable[MeasuredRun],
    protocol_hash: str,
    *arms: str,
    session: str | None = None,
    since: str | None = None,
    all: bool = False,
    grid: Grid = "warm",
) -> tuple[Reps, ...]:
    """The reps of each arm: of the newest session that has every arm, else of the newest session of each.

    Args:
        runs: any runs; those of another protocol, arm or grid are passed over.
        protocol_hash: the whole hash.
        arms: names of arms, all different.
        session: only runs of this session.
        since: runs that started at or after this moment (UTC, "2026-09-08" or "2026-09-08T10:00:00Z").
        all: runs of every session.
        grid: "warm" takes banked runs; "cold" takes cold ones, which are never banked.

    Raises:
        BadInput: an arm named twice, or a moment that cannot be read.
        Finding: an arm without such runs (the message says what to type), or with several arm hashes.
    """
    if len(set(arms)) != len(arms):
        raise BadInput(f"arms: expected different arms, found {', '.join(arms)}")
    if since is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d+)?)?Z?)?", since):
        raise BadInput(f'since: expected a UTC time like "2026-09-08T10:00:00Z", found "{since}"')
    of_protocol = [rep for rep in runs if rep.run.protocol_hash == protocol_hash]
    asked = [
        rep
        for rep in of_protocol
        if rep.run.grid == grid
        and rep.run.arm in arms
        and (session is None or rep.run.session == session)
        and (since is None or rep.run.started_at >= since)
    ]
    asked.sort(key=lambda rep: (rep.run.started_at, rep.run.session, rep.run.slot, rep.run.id))
    usable = [rep for rep in asked if rep.status == USABLE[grid]]
    for arm in arms:
        if arm not in {rep.run.arm for rep in usable}:
            raise Finding(_nothing_usable(of_protocol, asked, protocol_hash, arm, grid))
    chosen = {arm: {rep.run.session for rep in usable if rep.run.arm == arm} for arm in arms}
    if session is None and since is None and not all:
        chosen = _newest_sessions(usable, arms)
    return tuple(
        Reps(
            arm=arm,
            runs=tuple(rep for rep in usable if rep.run.arm == arm and rep.run.session in chosen[arm]),
            left_out=tuple(
                rep
                for rep in asked
                if rep.run.arm == arm and rep.run.session in chosen[arm] and rep.status != USABLE[grid]
            ),
        )
        for arm in arms
    )


def _newest_sessions(usable: Sequence[MeasuredRun], arms: Sequence[str]) -> dict[str, set[str]]:
    arms_of: dict[str, set[str]] = {}
    for rep in usable:  # oldest first, so that a session moves to the end with its latest run
        arms_of[rep.run.session] = arms_of.pop(rep.run.session, set()) | {rep.run.arm}
    newest_first = list(reversed(arms_of))
    common = next((s for s in newest_first if arms_of[s] == set(arms)), None)
    return {arm: {common or next(s for s in newest_first if arm in arms_of[s])} for arm in arms}


def _nothing_usable(
    of_protocol: Sequence[MeasuredRun], asked: Sequence[MeasuredRun], protocol_hash: str, arm: str, grid: Grid
) -> str:
    name = of_protocol[-1].run.protocol if of_protocol else protocol_hash[:12]
    what = f"{arm}: no {'banked warm' if grid == 'warm' else 'cold'} run of {name} ({protocol_hash[:12]})"
    mine = [rep for rep in asked if rep.run.arm == arm]
    recorded = " ".join(rep.run.id for rep in mine if rep.status == "recorded")
    if recorded and grid == "warm":
        return f'{what}; recorded, not banked: try: benchkit bank {recorded} --why "…"'
    if mine:
        return f"{what}; found {', '.join(f'{rep.run.id} ({rep.status})' for rep in mine)}"
    known = sorted({rep.run.arm for rep in of_protocol})
    if known and arm not in known:
        return f"{what}; its arms are {', '.join(known)}; try: benchkit run {name} --arm {arm}"
    return f"{what} among those asked for; try: benchkit run {name} --arm {arm}"


# --- are they matched -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Two arms side by side before any number: what keeps them from being matched, and what else differs."""

    differs: tuple[str, ...]
    """What keeps the two from being matched; empty if they are."""
    factor: tuple[str, ...]
    """Names of the facts under test."""
    under_test: tuple[FactDifference, ...]
    not_under_test: tuple[FactDifference, ...]
    outcomes: tuple[FactDifference, ...]
    """What the servers tell of themselves, and differ in."""
    notes: tuple[Note, ...]


def match_arms(a: Reps, b: Reps, factor: Sequence[str], *, given: bool, unmatched: bool) -> Match:
    """What is under test between two arms and what else differs.

    Args:
        a: the arm that is compared with.
        b: the arm that is compared.
        factor: names of facts under test.
        given: the factor was asked for now, so that a name no arm declares is a mistake; one that the stored
            protocol declares cannot be corrected any more, and becomes a note.
        unmatched: go on where the two are not matched.

    Raises:
        BadInput: a given factor that neither arm declares.
        Finding: the arms are not matched; the message lists what differs.
    """
    differs = []
    for what, attribute in (
        ("protocol hash", "protocol_hash"),
        ("prompts digest", "prompts_digest"),
        ("measurement number of the client", "measurement"),
    ):
        found = [sorted({str(getattr(rep.run, attribute))[:12] for rep in reps.runs}) for reps in (a, b)]
        if len({*found[0], *found[1]}) > 1:
            differs.append(f"{what}: {a.arm} {', '.join(found[0])}; {b.arm} {', '.join(found[1])}")
    if differs and not unmatched:
        raise Finding(
            f"{a.arm} and {b.arm} are not matched: {' · '.join(differs)}; "
            "--unmatched compares them all the same, under a heading that says so"
        )
    notes = [Note(kind="unmatched", text=f"not matched: {line}") for line in differs]
    facts_a, facts_b = _facts(a), _facts(b)
    unknown = [name for name in factor if name not in facts_a and name not in facts_b]
    if unknown and given:
        known = ", ".join(sorted({*facts_a, *facts_b}))
        raise BadInput(f"factor {', '.join(unknown)}: neither {a.arm} nor {b.arm} declares it; declared: {known}")
    if unknown:
        text = f"named by the protocol as under test, declared by neither arm: {', '.join(unknown)}"
        notes.append(Note(kind="factor_unknown", text=text))
    differences = _differences(facts_a, facts_b)
    under_test = tuple(d for d in differences if d.name in factor)
    others = tuple(d for d in differences if d.name not in factor)
    if len(differences) > 1:
        # The id that requests send is a label of what the facts describe; alone it is all there is to tell.
        others = tuple(d for d in others if d.name != "model")
    same = [name for name in factor if name not in unknown and name not in {d.name for d in under_test}]
    if same:
        notes.append(Note(kind="factor_equal", text=f"under test, but equal on both sides: {', '.join(same)}"))
    run_a, run_b = a.newest.run, b.newest.run
    outcomes = _differences(_flat(run_a.server), _flat(run_b.server))
    for kind, words, listed in (
        ("facts", "not under test, but different" if factor else "the arms differ in", others),
        ("outcomes", "the servers tell different", outcomes),
        ("host", "measured from different clients", _differences(_client(a), _client(b))),
    ):
        if listed:
            notes.append(Note(kind=kind, text=f"{words}: {'; '.join(map(str, listed))}"))
    if set(a.sessions).isdisjoint(b.sessions):
        text = f"not one session: {a.arm} {', '.join(a.sessions)}; {b.arm} {', '.join(b.sessions)}"
        notes.append(Note(kind="sessions_differ", text=text))
    return Match(
        differs=tuple(differs),
        factor=tuple(factor),
        under_test=under_test,
        not_under_test=others,
        outcomes=outcomes,
        notes=tuple(notes),
    )


def _facts(reps: Reps) -> dict[str, str]:
    arm = parse_arm(reps.newest.run.arm_text, reps.arm)
    own: dict[str, Any] = {"model": arm.model, "engine": arm.engine, "api": arm.api}
    if arm.request.extra_body:
        own["request.extra_body"] = dict(arm.request.extra_body)
    if arm.launch is not None:
        own["launch.command"] = arm.launch.command
    return {name: _text(value) for name, value in (own | dict(arm.facts)).items()}


def _client(reps: Reps) -> dict[str, str]:
    run = reps.newest.run
    return {"benchkit": run.client_version} | _flat(run.host)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in values.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": _text(value)}
    return out


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[FactDifference, ...]:
    return tuple(
        FactDifference(name=name, a=a.get(name), b=b.get(name))
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
