"""Banked reps of arms into samples, differences and verdicts, with every doubt beside its number."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchkit.errors import BadInput, Finding
from benchkit.measured import MeasuredRun
from benchkit.metrics import GLOSSARY, Metric, metric_named
from benchkit.protocol import Cell, Compare, parse_protocol
from benchkit.reps import FactDifference, Match, Note, Reps, match_arms
from benchkit.stats import (
    Comparison,
    Sample,
    boot_means,
    compare_difference,
    compare_paired,
    compare_unpaired,
    equivalent,
    holm,
    pooled_relative_s,
    reps_needed,
    verdict,
)

Design = Literal["unpaired", "paired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFlag:
    """A flag on a cell of an arm, in `reps` of its runs; `waived` is the reason, None if not waived."""

    name: str
    blocking: bool
    waived: str | None
    detail: str
    reps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One metric of one arm in one cell. `sample` is None where nothing was measured, never zeros."""

    sample: Sample | None
    n_text: str
    """The number of observations as it is printed: "3", or "2 boots × 3"."""
    flags: tuple[SideFlag, ...]
    notes: tuple[Note, ...]

    def to_json(self) -> dict[str, Any]:
        """The side in the shape that `compare --json` promises."""
        sample = self.sample
        return {
            "n": sample.n if sample else 0,
            "n_text": self.n_text,
            "mean": sample.mean if sample else None,
            "s": sample.s if sample else None,
            "values": list(sample.values) if sample else [],
            "flags": [
                {"name": f.name, "blocking": f.blocking, "waived": f.waived, "detail": f.detail, "reps": f.reps}
                for f in self.flags
            ],
            "notes": [note.text for note in self.notes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CellComparison:
    """One metric of two arms in one cell. `verdict` is about B; None where there is nothing to say."""

    cell: Cell
    metric: str
    entry: Metric
    a: Side
    b: Side
    difference: Comparison | None
    p_adjusted: float | None
    verdict: str | None
    notes: tuple[Note, ...]

    def to_json(self) -> dict[str, Any]:
        """The cell in the shape that `compare --json` promises; delta is B relative to A."""
        d, cell = self.difference, self.cell
        return {
            "isl": cell.isl,
            "osl": cell.osl,
            "kv": cell.kv,
            "concurrency": cell.concurrency,
            "metric": self.metric,
            "unit": self.entry.unit,
            "better": self.entry.better,
            "scale": self.entry.compare,
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "delta_pct": _finite(d.delta_pct) if d else None,
            "ci_pct": [_finite(bound) for bound in d.ci_pct] if d and d.ci_pct else None,
            "ratio90_pct": [_finite(bound) for bound in d.ratio90_pct] if d and d.ratio90_pct else None,
            "test": d.test if d else "none",
            "statistic": d.statistic if d else None,
            "df": d.df if d else None,
            "p": d.p if d else None,
            "p_adjusted": self.p_adjusted,
            "sigma_equiv": d.sigma_equiv if d else None,
            "mde_pct": d.mde_pct if d else None,
            "verdict": self.verdict,
            "notes": [note.text for note in self.notes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmsComparison:
    """Arm B against arm A: what was compared, how, and what came out, cell by cell."""

    protocol: str
    protocol_hash: str
    grid: str
    a: Reps
    b: Reps
    match: Match
    design: Design
    margin_pct: float
    notes: tuple[Note, ...]
    """Doubts about the comparison as a whole, those of `match` included."""
    cells: tuple[CellComparison, ...]

    def to_json(self) -> dict[str, Any]:
        """The comparison in the shape that `compare --json` promises."""

        def told(differences: Iterable[FactDifference]) -> list[dict[str, str | None]]:
            return [{"name": d.name, "a": d.a, "b": d.b} for d in differences]

        return {
            "protocol": self.protocol,
            "protocol_hash": self.protocol_hash,
            "grid": self.grid,
            "matched": not self.match.differs,
            "differs": list(self.match.differs),
            "factor": list(self.match.factor),
            "design": self.design,
            "margin_pct": self.margin_pct,
            "arms": [self.a.arm, self.b.arm],
            "arm_hashes": [reps.newest.run.arm_hash for reps in (self.a, self.b)],
            "runs": [[rep.run.id for rep in reps.runs] for reps in (self.a, self.b)],
            "under_test": told(self.match.under_test),
            "not_under_test": told(self.match.not_under_test),
            "outcomes": told(self.match.outcomes),
            "footnotes": [
                {"kind": note.kind, "arm": arm, "text": note.text}
                for arm, notes in ((None, self.notes), (self.a.arm, self.a.notes), (self.b.arm, self.b.notes))
                for note in notes
            ],
            "cells": [cell.to_json() for cell in self.cells],
        }


# --- the comparison ---------------------------------------------------------------------------------------


def compare_arms(
    baseline: Reps,
    *others: Reps,
    metrics: Sequence[str] = (),
    factor: Sequence[str] | None = None,
    margin_pct: float | None = None,
    design: Design | None = None,
    unmatched: bool = False,
    cells: Collection[Cell] | None = None,
) -> tuple[ArmsComparison, ...]:
    """Each other arm (B) against the baseline (A), p adjusted by Holm over all comparisons of one metric.

    What is not given is read from the `[compare]` that was stored with the newest run, declared before it
    was made; a margin or a design given here is used with a note that says so.

    Args:
        baseline: arm A.
        others: arms B.
        metrics: names of the glossary, with or without a suffix such as `_p99`; default the primary one.
        factor: facts under test; the others that differ are listed apart.
        margin_pct: within which the arms count as equal, in per cent.
        design: "paired" compares runs that share a session and a block.
        unmatched: go on where the arms are not matched.
        cells: only these cells; default all that any arm measured.

    Raises:
        BadInput: an unknown metric, or a factor that neither arm declares.
        Finding: the arms are not matched; the message lists what differs.
    """
    arms = (baseline, *others)
    declared, notes = declared_compare(arms)
    names = tuple(dict.fromkeys(metrics)) or (declared.primary,)
    entries = {name: glossary_entry(name) for name in names}
    if margin_pct is not None and margin_pct != declared.margin_pct:
        text = f"margin {margin_pct:g} % given afterwards; declared before the runs: {declared.margin_pct:g} %"
        notes += (Note(kind="margin_given", text=text),)
    if design is not None and design != declared.design:
        text = f"compared {design} as asked afterwards; declared before the runs: {declared.design}"
        notes += (Note(kind="design_given", text=text),)
    margin = declared.margin_pct if margin_pct is None else margin_pct
    design = design or declared.design
    places = cells_of(arms, only=cells)
    tested = declared.factor if factor is None else tuple(factor)
    matches = [match_arms(baseline, b, tested, given=factor is not None, unmatched=unmatched) for b in others]
    drafts = [
        _compare_cell(baseline, other, cell, name, entries[name], design)
        for other in others
        for name in names
        for cell in places
    ]
    judged = _judged(drafts, margin)
    per_arm = len(names) * len(places)
    return tuple(
        ArmsComparison(
            protocol=other.newest.run.protocol,
            protocol_hash=other.newest.run.protocol_hash,
            grid=other.newest.run.grid,
            a=baseline,
            b=other,
            match=match,
            design=design,
            margin_pct=margin,
            notes=match.notes + notes,
            cells=tuple(judged[i * per_arm : (i + 1) * per_arm]),
        )
        for i, (other, match) in enumerate(zip(others, matches, strict=True))
    )


def declared_compare(arms: Sequence[Reps]) -> tuple[Compare, tuple[Note, ...]]:
    """The `[compare]` stored with the newest run of any of the arms, and a note if older runs declared another."""
    texts: dict[str, str] = {}
    for rep in (rep for reps in arms for rep in reps.runs):
        run = rep.run
        texts[run.protocol_text] = max(run.started_at, texts.get(run.protocol_text, ""))
    newest_last = sorted(texts, key=lambda text: (texts[text], text))
    found = [parse_protocol(text, "the stored protocol").compare for text in newest_last]
    newest = found[-1]
    older = sorted({(c.margin_pct, c.design) for c in found} - {(newest.margin_pct, newest.design)})
    if not older:
        return newest, ()
    words = "; ".join(f"margin {margin:g} %, {design}" for margin, design in older)
    text = f"margin {newest.margin_pct:g} %, {newest.design} as the newest run declares; other runs declare {words}"
    return newest, (Note(kind="declared_otherwise", text=text),)


def glossary_entry(name: str) -> Metric:
    """The glossary's entry of a metric's name. Raises BadInput for an unknown one, with the nearest known."""
    entry = metric_named(name)
    if entry is None:
        near = difflib.get_close_matches(name, GLOSSARY, n=1)
        raise BadInput(f"metric {name}: not in the glossary" + (f"; did you mean {near[0]}?" if near else ""))
    return entry


def cells_of(arms: Iterable[Reps], *, only: Collection[Cell] | None = None) -> tuple[Cell, ...]:
    """The cells that any run of the arms measured, by ISL, OSL, KV and concurrency.

    Raises:
        Finding: none is left.
    """
    found = {cell.cell for reps in arms for rep in reps.runs for cell in rep.cells}
    kept = sorted(found if only is None else found & set(only))
    if not kept:
        raise Finding("no cell to compare: none of those asked for was measured")
    return tuple(kept)


def side_of(reps: Reps, cell: Cell, metric: str) -> Side:
    """One metric of one arm in one cell: one value per rep, or per boot where there are two or more."""
    return _side(reps, cell, metric, _by_boot([(rep.run.boot_id, v) for rep, v in _values(reps, cell, metric)]))


# --- one cell ---------------------------------------------------------------------------------------------


def _compare_cell(a: Reps, b: Reps, cell: Cell, metric: str, entry: Metric, design: Design) -> CellComparison:
    side_a, side_b, notes = side_of(a, cell, metric), side_of(b, cell, metric), []
    paired = design == "paired" and side_a.sample is not None and side_b.sample is not None
    if paired:
        samples, alone = _pairs(_values(a, cell, metric), _values(b, cell, metric))
        if samples is None:
            paired = False
            notes.append(Note(kind="no_pairs", text="declared paired, but no block has both arms: unpaired"))
        else:
            side_a, side_b = _side(a, cell, metric, samples[0]), _side(b, cell, metric, samples[1])
            if alone:
                notes.append(Note(kind="unpaired", text=f"left out, only one arm has a value: {', '.join(alone)}"))
    difference = None
    if side_a.sample is not None and side_b.sample is not None:
        if entry.compare == "difference":
            difference = compare_difference(side_a.sample, side_b.sample, paired=paired)
        elif min(side_a.sample.values + side_b.sample.values) <= 0:
            notes.append(Note(kind="not_positive", text="a ratio needs values above zero"))
        else:
            difference = (compare_paired if paired else compare_unpaired)(side_a.sample, side_b.sample)
    return CellComparison(
        cell=cell,
        metric=metric,
        entry=entry,
        a=side_a,
        b=side_b,
        difference=difference,
        p_adjusted=None,
        verdict=None,
        notes=tuple(notes),
    )


def _values(reps: Reps, cell: Cell, metric: str) -> list[tuple[MeasuredRun, float]]:
    found = []
    for rep in reps.runs:
        value = next((c.metrics.get(metric) for c in rep.cells if c.cell == cell), None)
        if value is not None and math.isfinite(value):
            found.append((rep, float(value)))
    return found


def _by_boot(values: Sequence[tuple[Any, float]]) -> Sample | None:
    """The sample of values with their boots: boot means where all boots are known and two or more."""
    if not values:
        return None
    boots: dict[Any, list[float]] = {}
    for boot, value in values:
        boots.setdefault(boot, []).append(value)
    if None in boots or len(boots) < 2:
        return Sample(values=tuple(value for _, value in values))
    return boot_means(list(boots.values()))


def _pairs(
    a: Sequence[tuple[MeasuredRun, float]], b: Sequence[tuple[MeasuredRun, float]]
) -> tuple[tuple[Sample, Sample] | None, list[str]]:
    """Samples whose i-th values share a block (or a pair of boots), and the blocks that have one arm only."""
    blocks: dict[tuple[str, int], tuple[list[tuple[MeasuredRun, float]], ...]] = {}
    for side, values in enumerate((a, b)):
        for rep, value in values:
            blocks.setdefault((rep.run.session, rep.run.block), ([], []))[side].append((rep, value))
    sessions = {session for session, _ in blocks}
    alone = [
        f"block {block}" + (f" of {session}" if len(sessions) > 1 else "")
        for (session, block), sides in sorted(blocks.items())
        if not (sides[0] and sides[1])
    ]
    pairs = [sides for _, sides in sorted(blocks.items()) if sides[0] and sides[1]]
    if not pairs:
        return None, alone
    # Runs of one arm that share a block are one observation of it: their mean.
    means = [[math.fsum(v for _, v in side) / len(side) for side in sides] for sides in pairs]
    boots = [tuple(dict.fromkeys(rep.run.boot_id for side in sides for rep, _ in side)) for sides in pairs]
    keys = [None if None in boot else boot for boot in boots]
    samples = [_by_boot([(key, mean[i]) for key, mean in zip(keys, means, strict=True)]) for i in (0, 1)]
    if samples[0] is None or samples[1] is None:
        return None, alone
    return (samples[0], samples[1]), alone


_N1_METRICS = frozenset(
    {"tpot_s", "tpot_weighted_s", "stream_decode_tok_per_s", "decode_tok_per_s", "steady_output_tok_per_s"}
    | {"contention_band_min_tok_per_s", "contention_band_max_tok_per_s"}
)
_WINDOWED = frozenset({"steady_output_tok_per_s", "contention_band_min_tok_per_s", "contention_band_max_tok_per_s"})
_FOOTNOTES: Mapping[str, tuple[str, frozenset[str] | None]] = {
    # Words without numbers, so that equal doubts share a mark; and the metrics that they touch (None: all).
    "assumed_uncached": (
        "the server does not tell cached tokens; unique prompts are taken as uncached",
        frozenset({"prefill_tok_per_s"}),
    ),
    "assumed_n1": ("the first event is taken to carry one token; the server does not say", _N1_METRICS),
    "spread_tokens": ("tokens of later events are spread evenly; the server does not say", _WINDOWED),
    "coalesced_events": ("events carry more than one token", _WINDOWED | {"icl_s", "chunk_per_s"}),
    "few_requests": ("fewer than two requests a stream", None),
}


def _side(reps: Reps, cell: Cell, metric: str, sample: Sample | None) -> Side:
    entry = glossary_entry(metric)
    at = [c for rep in reps.runs for c in rep.cells if c.cell == cell]
    counted: dict[tuple[str, str | None], SideFlag] = {}
    for flag in (flag for c in at for flag in c.flags):
        before = counted.get((flag.name, flag.waived))
        counted[flag.name, flag.waived] = SideFlag(
            name=flag.name,
            blocking=flag.blocking,
            waived=flag.waived,
            detail=before.detail if before else flag.detail,
            reps=before.reps + 1 if before else 1,
        )
    notes = [note for flag in counted.values() if (note := _flag_note(flag, entry, len(reps.runs)))]
    measured = len(_values(reps, cell, metric))
    if not at:
        notes.append(Note(kind="missing", text="this arm did not measure the cell"))
    elif not measured:
        notes.append(Note(kind="missing", text=f"{metric} could not be measured here"))
    elif measured < len(reps.runs):
        missing = len(reps.runs) - measured
        notes.append(Note(kind="missing", text=f"no value in {missing} of {len(reps.runs)} reps"))
    n_text = sample.notes[0].removeprefix("n = ") if sample and sample.notes else str(sample.n if sample else 0)
    return Side(sample=sample, n_text=n_text, flags=tuple(counted.values()), notes=tuple(notes))


def _flag_note(flag: SideFlag, entry: Metric, reps: int) -> Note | None:
    if flag.name in ("cold", "boot_unknown"):  # said of the arm as a whole
        return None
    share = "" if flag.reps == reps else f" (in {flag.reps} of {reps} reps)"
    if flag.name in _FOOTNOTES:
        text, touched = _FOOTNOTES[flag.name]
        return None if touched is not None and entry.name not in touched else Note(kind=flag.name, text=text + share)
    if flag.waived is not None:
        return Note(kind=flag.name, text=f"{flag.name}: {flag.detail}; waived: {flag.waived}{share}")
    state = "; blocking, not waived" if flag.blocking else ""
    return Note(kind=flag.name, text=f"{flag.name}: {flag.detail}{state}{share}")


# --- what may be said -------------------------------------------------------------------------------------


def _judged(cells: Sequence[CellComparison], margin_pct: float) -> list[CellComparison]:
    """The cells with adjusted p, verdict and the notes that go with it; one Holm family a metric."""
    judged = list(cells)
    for metric in dict.fromkeys(cell.metric for cell in cells):
        family = [i for i, cell in enumerate(cells) if cell.metric == metric]
        adjusted = holm([d.p if (d := cells[i].difference) else None for i in family])
        floor = _floor([cells[i] for i in family])
        tests = sum(p is not None for p in adjusted)
        for i, p_adjusted in zip(family, adjusted, strict=True):
            cell, said = cells[i], _verdict(cells[i], p_adjusted, margin_pct)
            notes = cell.notes
            if said == "unresolved":
                notes += _why_unresolved(cell, p_adjusted, tests, margin_pct, floor)
            judged[i] = replace(cell, p_adjusted=p_adjusted, verdict=said, notes=notes)
    return judged


def _verdict(cell: CellComparison, p_adjusted: float | None, margin_pct: float) -> str | None:
    if cell.a.sample is None or cell.b.sample is None:
        return None
    if cell.difference is None:
        return "unresolved"
    if cell.entry.better is None:
        return "parity" if equivalent(cell.difference, margin_pct) else None
    return verdict(cell.difference, p_adjusted, margin_pct, cell.entry.better)


def _floor(family: Sequence[CellComparison]) -> str:
    """How much like cells vary, as words: what stands in for the s of a single rep."""
    spread = [
        sample
        for cell in family
        for sample in (cell.a.sample, cell.b.sample)
        if cell.entry.compare == "ratio" and sample is not None and sample.n > 1 and min(sample.values) > 0
    ]
    pooled = pooled_relative_s(spread)
    return f"; like cells vary by s = {_two(100 * pooled[0])} % ({pooled[1]} df)" if pooled and pooled[0] else ""


def _why_unresolved(
    cell: CellComparison, p_adjusted: float | None, tests: int, margin_pct: float, floor: str
) -> tuple[Note, ...]:
    a, b, d = cell.a.sample, cell.b.sample, cell.difference
    if a is None or b is None or d is None:
        return ()
    if min(a.n, b.n) < 2:
        return (Note(kind="one_rep", text=f"one rep has no s, so nothing can be said of the difference{floor}"),)
    if d.mde_pct is None:
        return (Note(kind="no_spread", text="no spread at all: the difference has no interval"),)
    # Never "reps" where the observation is a pair or a boot.
    paired = d.test.startswith("paired")
    booted = {bool(a.notes), bool(b.notes)}
    what = "observations" if len(booted) > 1 else "boots" if True in booted else "pairs" if paired else "reps"
    count = str(a.n) if a.n == b.n else f"{a.n} and {b.n}"
    if d.scale == "difference":
        share = cell.entry.unit == "share"
        found = f"{_two(100 * d.mde_pct)} points" if share else f"{_two(d.mde_pct)} {cell.entry.unit}"
    else:
        found = f"{_two(d.mde_pct)} %"
    text = f"{count} {what} resolve {found}"
    pooled = None if paired or d.scale == "difference" else pooled_relative_s([a, b])
    if pooled and d.mde_pct > margin_pct and (needed := reps_needed(pooled[0], margin_pct)) > min(a.n, b.n):
        text += f"; {needed} would resolve {margin_pct:g} %"
    if d.p is not None and p_adjusted is not None and d.p < 0.05 <= p_adjusted:
        text += f"; p {_two(d.p)} alone, {_two(p_adjusted)} among {tests} comparisons"
    return (Note(kind="mde", text=text),)


def _two(value: float) -> str:
    """Two significant digits, without an exponent for what a table holds."""
    return f"{float(f'{value:.1e}'):g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
