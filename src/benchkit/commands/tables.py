"""`benchkit table` and `readme`: definitions under `tables/`, regenerated from the raws they name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchkit.commands.compare import protocol_hash_meant, runs_of
from benchkit.errors import BadInput, BenchkitError
from benchkit.ledger import Ledger
from benchkit.render.markdown import table_markdown
from benchkit.render.readme import drift, read_markdown, rewrite_file
from benchkit.render.spec import build_table, read_table_spec
from benchkit.render.table import Table
from benchkit.settings import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A table made anew, and its name."""

    name: str
    table: Table

    def to_json(self) -> dict[str, Any]:
        """Title, blocks, notes and provenance as JSON values."""
        return {"name": self.name, **asdict(self.table)}

    def markdown(self) -> str:
        """The table as GitHub markdown, with a line break at its end."""
        return table_markdown(self.table)


def table(ledger: Ledger, name: str) -> Made:
    """The table of a definition.

    Raises:
        BadInput: no such definition (the message lists those there are), or one that cannot be used.
        Finding: what it asks for is not there, or not citable.
    """
    folder = ledger.root / "tables"
    path = folder / f"{name}.toml"
    if "/" in name or not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.toml"))) or "none"
        raise BadInput(f"table {name}: no definition {path}; known: {known}")
    spec = read_table_spec(read_text(path), str(path))
    try:
        hash_ = protocol_hash_meant(ledger, spec.protocol)
        return Made(name=name, table=build_table(spec, runs_of(ledger, hash_, spec.arms, spec.grid)))
    except BenchkitError as error:
        raise type(error)(f"table {name}: {error}") from None


def readme(ledger: Ledger, file: Path, *, check: bool) -> dict[str, Any]:
    """Regenerates the blocks of a markdown file, or says which are not as they would be.

    Raises:
        BadInput: a file or a mark that cannot be used.
        Finding: a table that cannot be made.
    """

    def render(name: str) -> str:
        return table(ledger, name).markdown()

    if check:
        found = drift(read_markdown(file), render, str(file))
        lines = [f"{file}:{d.line}: {d.name} is not what the ledger gives\n{d.diff}" for d in found]
        return {"file": str(file), "drift": [d.name for d in found], "changed": False, "lines": lines}
    changed = rewrite_file(file, render)
    return {
        "file": str(file),
        "drift": [],
        "changed": changed,
        "lines": [f"{file}: {'regenerated' if changed else 'unchanged'}"],
    }
