"""Comparisons laid out as tables: a block a metric, a row a cell, a column an arm, and every doubt as a note."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchkit.compare import (
    ArmsComparison,
    CellComparison,
    Side,
    cells_of,
    declared_compare,
    glossary_entry,
    side_of,
)
from benchkit.metrics import Metric
from benchkit.protocol import Cell
from benchkit.render.numbers import Shown, delta, mean_and_s, shown_as, t_and_sigma
from benchkit.reps import Reps

MISSING = "—"
"""What stands where nothing was measured; never a zero."""


Layout = Literal["columns", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One cell of a table, or a column's heading: plain text, and the footnotes that it carries."""

    text: str
    notes: tuple[str, ...] = ()
    bold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column: its heading, its alignment, its cells from top to bottom."""

    head: Text
    align: Literal["left", "right"]
    cells: tuple[Text, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One metric: its name, what the heading says of it, and the columns."""

    metric: str
    about: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table before any format: title, blocks, notes on the whole, and where the numbers come from."""

    title: str
    blocks: tuple[Block, ...]
    notes: tuple[str, ...]
    provenance: tuple[str, ...]


def comparison_table(comparisons: Sequence[ArmsComparison], *, title: str = "", layout: Layout = "columns") -> Table:
    """The table of one baseline against one or more other arms.

    Two arms get columns for delta, t and verdict. More arms get a column each and a delta with its verdict, or
    as "rows" a line each under the columns of two, which stays narrow however many they are.

    Args:
        comparisons: what `compare_arms` gave: at least one, all of the same baseline and cells.
        title: the title; default says who is compared with whom.
        layout: where more than two arms go.

    Raises:
        ValueError: no comparison.
    """
    if not comparisons:
        raise ValueError("no comparison to lay out")
    first = comparisons[0]
    arms = (first.a, *(one.b for one in comparisons))
    names = _column_names(arms)
    metrics = tuple(dict.fromkeys(cell.metric for cell in first.cells))
    blocks = []
    for metric in metrics:
        rows = [[cell for cell in one.cells if cell.metric == metric] for one in comparisons]
        if len(comparisons) == 1:
            block = _two_arms(arms, names, rows[0])
        else:
            block = (_arms_as_rows if layout == "rows" else _arms_as_columns)(arms, names, rows)
        blocks.append(block)
    if not title:
        title = f"{first.protocol}: {', '.join(names[1:])} against {names[0]}"
    # Said once where it holds for every pair, else with the arm's name.
    notes: dict[str, list[str]] = {}
    for one, name in zip(comparisons, names[1:], strict=True):
        for note in (*_under_test(one), *(n.text for n in one.notes)):
            notes.setdefault(note, []).append(name)
    said = tuple(text if len(of) == len(comparisons) else f"{', '.join(of)}: {text}" for text, of in notes.items())
    if any(one.match.differs for one in comparisons):
        title = f"NOT MATCHED: {title}"
    return Table(
        title=_graded(title, arms),
        blocks=tuple(blocks),
        notes=said,
        provenance=(_method(comparisons), *_sources(arms, names, {cell.cell for cell in first.cells})),
    )


def single_arm_table(
    reps: Reps, *, metrics: Sequence[str] = (), cells: Sequence[Cell] | None = None, title: str = ""
) -> Table:
    """The table of one arm alone: mean and s of each cell, nothing compared.

    Args:
        reps: the arm.
        metrics: names of the glossary; default the primary one of the stored protocol.
        cells: only these; default all that were measured.
        title: the title; default the protocol's and the arm's name.

    Raises:
        BadInput: an unknown metric.
        Finding: no cell is left.
    """
    declared, _ = declared_compare((reps,))
    names, places = _column_names((reps,)), cells_of((reps,), only=cells)
    blocks = []
    for metric in tuple(dict.fromkeys(metrics)) or (declared.primary,):
        entry, sides = glossary_entry(metric), [side_of(reps, cell, metric) for cell in places]
        shown = _shown(entry, sides)
        column = _arm_column(reps, names[0], sides, shown, [False] * len(sides))
        columns = (*_cell_columns(places), column)
        blocks.append(_block(metric, entry, shown, places, "", _n(names, [sides]), columns))
    run = reps.newest.run
    return Table(
        title=_graded(title or f"{run.protocol}: {names[0]}", (reps,)),
        blocks=tuple(blocks),
        notes=(),
        provenance=(f"protocol {run.protocol} {run.protocol_hash[:12]}: mean ± s", *_sources((reps,), names, places)),
    )


# --- one block --------------------------------------------------------------------------------------------


def _two_arms(arms: Sequence[Reps], names: Sequence[str], rows: Sequence[CellComparison]) -> Block:
    entry, places = rows[0].entry, [row.cell for row in rows]
    a, b = [row.a for row in rows], [row.b for row in rows]
    shown = _shown(entry, [*a, *b])
    columns = (
        *_cell_columns(places),
        _arm_column(arms[0], names[0], a, shown, [row.verdict == "trails" for row in rows]),
        _arm_column(arms[1], names[1], b, shown, [row.verdict == "leads" for row in rows]),
        *_difference_columns(rows, shown),
    )
    versus = f"{names[1]} against {names[0]}"
    return _block(rows[0].metric, entry, shown, places, versus, _n(names, [a, b]), columns)


def _arms_as_columns(arms: Sequence[Reps], names: Sequence[str], rows: Sequence[Sequence[CellComparison]]) -> Block:
    entry, metric, places = rows[0][0].entry, rows[0][0].metric, [row.cell for row in rows[0]]
    # All reps of each arm: the pairs of a paired comparison differ from one other arm to the next.
    sides = [[side_of(arm, cell, metric) for cell in places] for arm in arms]
    shown = _shown(entry, [side for column in sides for side in column])
    best = [_best([column[i] for column in sides], [r[i].verdict for r in rows], entry) for i in range(len(places))]
    columns = [
        *_cell_columns(places),
        _arm_column(arms[0], names[0], sides[0], shown, [b == 0 for b in best]),
    ]
    for place, (arm, name, compared) in enumerate(zip(arms[1:], names[1:], rows, strict=True), start=1):
        columns.append(_arm_column(arm, name, sides[place], shown, [b == place for b in best]))
        columns.append(
            Column(
                head=Text(text=f"Δ {name}"),
                align="left",
                cells=tuple(
                    Text(
                        text=f"{_delta(row, shown)} {row.verdict}" if row.verdict else _delta(row, shown),
                        notes=tuple(note.text for note in row.notes),
                    )
                    for row in compared
                ),
            )
        )
    return _block(metric, entry, shown, places, f"Δ against {names[0]} [95 % CI]", _n(names, sides), tuple(columns))


def _arms_as_rows(arms: Sequence[Reps], names: Sequence[str], rows: Sequence[Sequence[CellComparison]]) -> Block:
    entry, metric, places = rows[0][0].entry, rows[0][0].metric, [row.cell for row in rows[0]]
    sides = [[side_of(arm, cell, metric) for cell in places] for arm in arms]
    shown = _shown(entry, [side for column in sides for side in column])
    best = [_best([column[i] for column in sides], [r[i].verdict for r in rows], entry) for i in range(len(places))]
    columns = [
        _arm_column(arm, name, column, shown, [b == place for b in best])
        for place, (arm, name, column) in enumerate(zip(arms, names, sides, strict=True))
    ]
    lines = [(i, place) for i in range(len(places)) for place in range(len(arms))]
    compared = [None if place == 0 else rows[place - 1][i] for i, place in lines]
    return _block(
        metric,
        entry,
        shown,
        places,
        f"against {names[0]}",
        _n(names, sides),
        (
            *_cell_columns([places[i] for i, _ in lines]),
            Column(head=Text(text="arm"), align="left", cells=tuple(columns[place].head for _, place in lines)),
            Column(
                head=Text(text="mean ± s"), align="right", cells=tuple(columns[place].cells[i] for i, place in lines)
            ),
            *_difference_columns(compared, shown),
        ),
    )


def _difference_columns(rows: Sequence[CellComparison | None], shown: Shown) -> tuple[Column, ...]:
    """Delta, t and verdict of each row; empty for the baseline's own."""
    nothing = Text(text="")
    return (
        Column(
            head=Text(text="Δ [95 % CI]"),
            align="right",
            cells=tuple(Text(text=_delta(row, shown)) if row else nothing for row in rows),
        ),
        Column(
            head=Text(text="t (df), σ"),
            align="right",
            cells=tuple(Text(text=_t(row)) if row else nothing for row in rows),
        ),
        Column(
            head=Text(text="verdict"),
            align="left",
            cells=tuple(
                Text(text=row.verdict or MISSING, notes=tuple(note.text for note in row.notes)) if row else nothing
                for row in rows
            ),
        ),
    )


def _best(sides: Sequence[Side], verdicts: Sequence[str | None], entry: Metric) -> int | None:
    """The column of the best arm, where the verdicts resolve it from the baseline (column 0)."""
    if verdicts and all(said == "trails" for said in verdicts):
        return 0
    sign = -1 if entry.better == "lower" else 1
    leading = [
        (sign * side.sample.mean, place)
        for place, (side, said) in enumerate(zip(sides[1:], verdicts, strict=True), start=1)
        if said == "leads" and side.sample is not None
    ]
    return max(leading)[1] if leading else None


def _block(
    metric: str,
    entry: Metric,
    shown: Shown,
    places: Sequence[Cell],
    versus: str,
    n: str,
    columns: tuple[Column, ...],
) -> Block:
    way = f"{entry.better} is better" if entry.better else ""
    value = "p50" if metric == entry.name and entry.per_request else ""
    about = [", ".join(filter(None, (value, shown.unit, way)))]
    fixed = [
        f"{name.upper()} {getattr(places[0], name)}"
        for name in ("isl", "osl", "kv")
        if not _varies(places, name) and (name != "kv" or places[0].kv)
    ]
    about += [", ".join(fixed), versus, n]
    return Block(metric=metric, about=" · ".join(filter(None, about)), columns=_promoted(columns))


def _cell_columns(places: Sequence[Cell]) -> tuple[Column, ...]:
    heads = {"isl": "ISL", "osl": "OSL", "kv": "KV", "concurrency": "c"}
    return tuple(
        Column(
            head=Text(text=head),
            align="right",
            cells=tuple(Text(text=str(getattr(place, name))) for place in places),
        )
        for name, head in heads.items()
        if name == "concurrency" or _varies(places, name)
    )


def _varies(places: Sequence[Cell], name: str) -> bool:
    return len({getattr(place, name) for place in places}) > 1


def _arm_column(
    arm: Reps,
    name: str,
    sides: Sequence[Side],
    shown: Shown,
    bold: Sequence[bool],
) -> Column:
    """Mean ± s of an arm; n is said in the heading, or in each cell where the arm has several."""
    own = {side.n_text for side in sides if side.sample is not None}
    cells = []
    for side, best in zip(sides, bold, strict=True):
        text = MISSING
        if side.sample is not None:
            text = mean_and_s(side.sample.mean, side.sample.s, shown.factor)
            text += f" (n={side.n_text})" if len(own) > 1 else ""
        cells.append(Text(text=text, notes=tuple(note.text for note in side.notes), bold=best))
    head = Text(text=name, notes=tuple(note.text for note in arm.notes))
    return Column(head=head, align="right", cells=tuple(cells))


def _n(names: Sequence[str], columns: Sequence[Sequence[Side]]) -> str:
    """What the heading says of n: once if it is the same everywhere, else arm by arm; "" where cells say it."""
    own = [sorted({side.n_text for side in column if side.sample is not None}) for column in columns]
    if len({n for found in own for n in found}) == 1:
        return f"n = {next(found[0] for found in own if found)}"
    return ", ".join(f"{name} n = {found[0]}" for name, found in zip(names, own, strict=True) if len(found) == 1)


def _shown(entry: Metric, sides: Sequence[Side]) -> Shown:
    means = [side.sample.mean for side in sides if side.sample is not None]
    return shown_as(entry.unit, means, ratio=entry.compare == "ratio")


def _delta(row: CellComparison, shown: Shown) -> str:
    d = row.difference
    if d is None:
        return MISSING
    return delta(d.delta_pct, d.ci_pct, shown.delta_unit, 1.0 if d.scale == "ratio" else shown.factor)


def _t(row: CellComparison) -> str:
    d = row.difference
    if d is None or d.statistic is None or d.df is None or d.sigma_equiv is None:
        return MISSING
    return t_and_sigma(d.statistic, d.df, d.sigma_equiv)


def _promoted(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Notes that every cell of a column of two or more carries, said once at its head."""
    out = []
    for column in columns:
        shared = [note for note in column.cells[0].notes if all(note in cell.notes for cell in column.cells)]
        if shared and len(column.cells) > 1:
            cells = tuple(replace(cell, notes=tuple(n for n in cell.notes if n not in shared)) for cell in column.cells)
            head = replace(column.head, notes=column.head.notes + tuple(shared))
            column = replace(column, head=head, cells=cells)
        out.append(column)
    return tuple(out)


# --- around the blocks ------------------------------------------------------------------------------------


def _column_names(arms: Sequence[Reps]) -> list[str]:
    """The arms' titles, or their names where two titles are the same."""
    titles = [arm.title for arm in arms]
    return titles if len(set(titles)) == len(titles) else [arm.arm for arm in arms]


def _graded(title: str, arms: Sequence[Reps]) -> str:
    return f"{title} (cold grids: not banked, not to be cited)" if arms[0].newest.run.grid == "cold" else title


def _under_test(one: ArmsComparison) -> tuple[str, ...]:
    return (f"under test: {'; '.join(map(str, one.match.under_test))}",) if one.match.under_test else ()


def _method(comparisons: Sequence[ArmsComparison]) -> str:
    """The question and how it was decided: protocol, design, size of the Holm family, margin."""
    first = comparisons[0]
    families: dict[str, int] = {}
    for cell in (cell for one in comparisons for cell in one.cells):
        families[cell.metric] = families.get(cell.metric, 0) + (cell.p_adjusted is not None)
    sizes = sorted(set(families.values()))
    size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    adjusted = f"p adjusted by Holm over {size} comparisons{' a metric' if len(families) > 1 else ''}, "
    return (
        f"protocol {first.protocol} {first.protocol_hash[:12]}: mean ± s, {first.design}, "
        f"{adjusted if sizes[-1] > 1 else ''}parity within ±{first.margin_pct:g} %"
    )


def _sources(arms: Sequence[Reps], names: Sequence[str], cells: Collection[Cell]) -> tuple[str, ...]:
    """One line an arm: how many runs, which, and the raws that the numbers were computed from."""
    lines = []
    for arm, name in zip(arms, names, strict=True):
        grid = "banked warm" if arm.newest.run.grid == "warm" else "cold"
        # The last digits of an id, since its time is the session's.
        ids = ", ".join(rep.run.id.rpartition("-")[2] for rep in arm.runs)
        raws = ", ".join(cell.raw[:8] for rep in arm.runs for cell in rep.cells if cell.cell in cells)
        plural = "s" if len(arm.runs) > 1 else ""
        lines.append(f"{name}: {len(arm.runs)} {grid} run{plural} {ids} of {', '.join(arm.sessions)}; raws {raws}")
    return tuple(lines)
