"""The GitHub table writer: cells that stay cells, columns that line up, footnotes that are shared."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchkit.render.markdown import escaped, grid, table_markdown, width
from benchkit.render.table import Block, Column, Table, Text

CASES = Path(__file__).parents[1] / "data" / "cases"


def cells_of(line: str) -> list[str]:
    """The cells that GitHub sees in a line: pipes split it, unless a backslash stands before them."""
    return [cell.strip() for cell in re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]]


def test_a_pipe_and_a_line_break_in_a_cell_leave_the_table_whole():
    case = json.loads((CASES / "B42.json").read_text())
    expect = json.loads((CASES / "expected.json").read_text())["B42"]["expect"]

    text = grid(
        case["columns"], [[escaped(str(cell)) for cell in row] for row in case["rows"]], ["left", "right", "left"]
    )

    assert (
        "| engine       | tok/s | note         |\n"
        "| ------------ | ----: | ------------ |\n"
        "| exl3\\|4.0bpw |  41.5 | first second |\n"
        "| llama.cpp    |  39.0 |              |"
    ) == text
    lines = text.splitlines()
    assert {expect["columns"]} == {len(cells_of(line)) for line in lines}
    assert expect["rows"] == len(lines) - 2
    assert expect["escaped_cell"] == cells_of(lines[2])[0]


@given(st.lists(st.text(), min_size=3, max_size=3))
def test_any_text_makes_one_line_of_as_many_cells(texts):
    line = grid(["a", "b", "c"], [[escaped(text) for text in texts]], ["left"] * 3).split("\n")[2:]

    assert 1 == len(line)
    assert 3 == len(cells_of(line[0]))


def test_what_would_be_markup_is_shown_as_it_is():
    assert r"2\*H100 \`x\` a\\\|b \~ &lt;!-- /benchkit -->" == escaped("2*H100 `x`\u2028a\\|b ~\r\n<!-- /benchkit -->")


def test_columns_line_up_under_wide_and_combining_signs():
    lines = grid(["数", "e\u0301"], [["a", "b"]], ["left", "right"]).split("\n")

    assert [(2, 1)] == [(width("数"), width("e\u0301"))]
    assert {1 + 5 + 1 + 5 + 1} == {width(line) for line in lines}


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"expected 2 cells in every row, found \[1, 2\]"):
        grid(["a", "b"], [["1"]], ["left", "left"])


def test_equal_footnotes_share_a_mark_and_marks_double_after_four():
    notes = [(f"note {i % 5}",) for i in range(6)]
    column = Column(
        head=Text(text="x"), align="left", cells=tuple(Text(text=str(i), notes=n) for i, n in enumerate(notes))
    )
    block = Block(metric="m_s", about="ms", columns=(column,))

    assert (
        "**T**\n\n**m_s** · ms\n\n"
        "| x    |\n| ---- |\n| 0 †  |\n| 1 ‡  |\n| 2 §  |\n| 3 ¶  |\n| 4 †† |\n| 5 †  |\n\n"
        "- † note 0\n- ‡ note 1\n- § note 2\n- ¶ note 3\n- †† note 4\n- whole\n- source\n"
    ) == table_markdown(Table(title="T", blocks=(block,), notes=("whole",), provenance=("source",)))
