"""Table definitions: what a TOML file of `ledger/tables/` asks for, and the table that the runs give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from benchkit.compare import cells_of, compare_arms
from benchkit.errors import Finding
from benchkit.measured import MeasuredRun
from benchkit.render.table import Layout, Table, comparison_table, single_arm_table
from benchkit.reps import protocol_hash_named, select_reps
from benchkit.settings import Section, read_settings

Name = Annotated[str, Field(min_length=1)]


class TableSpec(Section):
    """A whole table definition. Filters that are absent keep every cell; metrics default to the primary one."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    title: str = ""
    protocol: Name
    arms: Annotated[tuple[Name, ...], Field(min_length=1)]
    baseline: str = ""
    metrics: tuple[Name, ...] = ()
    concurrency: tuple[int, ...] | None = None
    isl: tuple[int, ...] | None = None
    osl: tuple[int, ...] | None = None
    factor: tuple[Name, ...] | None = None
    layout: Layout = "columns"
    grid: Literal["warm", "cold"] = "warm"
    session: str = ""
    all: bool = False

    @model_validator(mode="after")
    def _names_agree(self) -> TableSpec:
        if len(set(self.arms)) != len(self.arms):
            raise ValueError(f"arms: expected different arms, found {list(self.arms)}")
        if self.baseline and self.baseline not in self.arms:
            raise ValueError(f'baseline: expected one of arms, found "{self.baseline}"')
        if self.session and self.all:
            raise ValueError("all: expected session or all, found both")
        return self


def read_table_spec(text: str, where: str = "table") -> TableSpec:
    """The table definition that a TOML text says.

    Raises:
        BadInput: one line per fault: file, key path, expected, found.
    """
    return read_settings(TableSpec, text, where)


def build_table(spec: TableSpec, runs: Sequence[MeasuredRun]) -> Table:
    """The table that a definition asks for, from any runs that hold its reps.

    The baseline is the first column; the other arms follow in the order of the definition.

    Raises:
        BadInput: an unknown protocol, metric or factor.
        Finding: an arm without reps, arms that are not matched, or no cell left.
    """
    baseline = spec.baseline or spec.arms[0]
    arms = (baseline, *(arm for arm in spec.arms if arm != baseline))
    reps = select_reps(
        runs,
        protocol_hash_named(runs, spec.protocol),
        *arms,
        session=spec.session or None,
        all=spec.all,
        grid=spec.grid,
    )
    cells = [
        cell
        for cell in cells_of(reps)
        if (spec.concurrency is None or cell.concurrency in spec.concurrency)
        and (spec.isl is None or cell.isl in spec.isl)
        and (spec.osl is None or cell.osl in spec.osl)
    ]
    if not cells:
        raise Finding("no cell is left: concurrency, isl and osl keep none of those measured")
    if len(reps) == 1:
        return single_arm_table(reps[0], metrics=spec.metrics, cells=cells, title=spec.title)
    comparisons = compare_arms(reps[0], *reps[1:], metrics=spec.metrics, factor=spec.factor, cells=cells)
    return comparison_table(comparisons, title=spec.title, layout=spec.layout)
