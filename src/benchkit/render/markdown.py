"""Tables as GitHub markdown that also reads well in a terminal: aligned columns, escaped texts, shared footnotes."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal

from benchkit.render.table import Table, Text

MARKS = "†‡§¶"


def table_markdown(table: Table) -> str:
    """A table as markdown: title, a block a metric, footnotes, notes, provenance; ends with a line break.

    Equal footnotes share a mark, in the order in which a reader meets them.
    """
    marks: dict[str, str] = {}
    parts = [f"**{escaped(table.title)}**"]
    for block in table.blocks:
        parts.append(f"**{escaped(block.metric)}** · {escaped(block.about)}")
        # Marks go to headings first, then row by row.
        heads = [_marked(column.head, marks) for column in block.columns]
        body = list(zip(*(column.cells for column in block.columns), strict=True))
        rows = [[_marked(cell, marks) for cell in row] for row in body]
        parts.append(grid(heads, rows, [column.align for column in block.columns]))
    lines = [f"{mark} {escaped(note)}" for note, mark in marks.items()]
    lines += [escaped(line) for line in (*table.notes, *table.provenance)]
    parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], align: Sequence[Literal["left", "right"]]) -> str:
    """A GitHub table of texts that are markdown already, its columns padded to equal width.

    Raises:
        ValueError: a row with more or fewer cells than there are headings.
    """
    lines = [list(heads), *(list(row) for row in rows)]
    if any(len(line) != len(align) for line in lines):
        raise ValueError(f"expected {len(align)} cells in every row, found {sorted({len(line) for line in lines})}")
    widths = [max(3, *(width(line[i]) for line in lines)) for i in range(len(align))]
    rule = [f"{'-' * (w - 1)}:" if side == "right" else "-" * w for w, side in zip(widths, align, strict=True)]
    out = []
    for line in (lines[0], rule, *lines[1:]):
        cells = []
        for text, w, side in zip(line, widths, align, strict=True):
            pad = " " * (w - width(text))
            cells.append(pad + text if side == "right" else text + pad)
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def escaped(text: str) -> str:
    """A text of people as markdown that shows it: on one line, no pipe ends a cell, nothing becomes markup."""
    line = " ".join(text.split())
    for sign in "\\|*`~":
        line = line.replace(sign, f"\\{sign}")
    # A comment or a tag would vanish from the page, or end the block of a README that the table stands in.
    return line.replace("<", "&lt;")


def width(text: str) -> int:
    """The columns that a text takes in a terminal: 2 for wide signs, 0 for combining ones."""
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text
    )


def _marked(cell: Text, marks: dict[str, str]) -> str:
    for note in cell.notes:
        marks.setdefault(note, _mark(len(marks)))
    text = escaped(cell.text)
    if cell.bold:
        text = f"**{text}**"
    signs = [sign for note, sign in marks.items() if note in cell.notes]
    return f"{text} {' '.join(signs)}" if signs else text


def _mark(place: int) -> str:
    """†, ‡, §, ¶, then doubled, tripled: no digits, which read as exponents beside a number."""
    return MARKS[place % len(MARKS)] * (1 + place // len(MARKS))
