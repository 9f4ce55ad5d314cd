"""The notebooks run from start to end on the project's own ledger, and show what they say."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from benchkit.ledger import Ledger

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def executed(name: str) -> list[Any]:
    """The code cells of a notebook after it ran in its own folder."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}})
    client.execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.filterwarnings("ignore")  # the kernel's own machinery warns on some platforms
def test_the_first_look_shows_the_ledgers_means_and_a_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCHKIT_LEDGER", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")

    cells = executed("01-first-look.ipynb")

    outputs = [output for cell in cells for output in cell.outputs]
    pictures = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert 1 == len(pictures)
    assert 10_000 < len(base64.b64decode(pictures[0]))
    table = next(o.data["text/plain"] for o in outputs if "mean" in o.get("data", {}).get("text/plain", ""))
    for mean in means_by_hand():
        assert re.search(rf"\b{re.escape(f'{mean:.3f}'.rstrip('0').rstrip('.'))}", table), (mean, table)


def means_by_hand() -> list[float]:
    """Mean output tok/s of each arm and concurrency over banked runs: plain sums."""
    values: dict[tuple[str, int], list[float]] = {}
    with Ledger.open(NOTEBOOKS.parent / "ledger") as ledger:
        for state in ledger.runs(status="banked"):
            for cell in state.run.cells:
                found = ledger.records(cell)
                window_s = (max(r.t_end_ns for r in found) - min(r.t_send_ns or r.t_end_ns for r in found)) / 1e9
                rate = sum(r.completion_tokens or 0 for r in found) / window_s
                values.setdefault((state.run.arm, cell.cell.concurrency), []).append(rate)
    return [sum(v) / len(v) for v in values.values()]
