"""Progress on stderr while a session runs: one line that is rewritten on a terminal, one line a cell elsewhere."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

from benchkit.load.shapes import Flight
from benchkit.protocol import Cell
from benchkit.record import Run

REFRESH_S = 0.5


@dataclass(slots=True)
class Progress:
    """Counts a session's requests and says how far it is. Lines are short to write: they share the measuring loop.

    `total` is the number of requests of the whole session; ETA takes the rest to go on at the speed so far.
    """

    total: int
    quiet: bool
    out: TextIO = field(default_factory=lambda: sys.stderr)
    done: int = 0
    started_s: float = field(default_factory=time.monotonic)
    _task: asyncio.Task[None] | None = None
    _where: str = ""

    @property
    def live(self) -> bool:
        """Whether lines are rewritten in place."""
        return not self.quiet and self.out.isatty()

    def note(self, text: str) -> None:
        """One line that stays, and that must be heard even where progress is not wanted."""
        self._clear()
        print(text, file=self.out, flush=True)

    def say(self, text: str) -> None:
        """One line of progress that stays."""
        if not self.quiet:
            self.note(text)

    def cell_started(self, run: Run, cell: Cell, n: int, flight: Flight) -> None:
        """From here on the line follows this cell."""
        self._where = f"{run.arm} {run.grid} {run.rep + 1} · {cell}"
        self.stop()
        if self.live:
            self._task = asyncio.create_task(self._follow(n, flight))

    def cell_done(self, n: int, n_ok: int, output_tok_per_s: float | None, ttft_s: float | None) -> None:
        """The cell's line, with what it measured."""
        self.stop()
        self.done += n
        rate = "—" if output_tok_per_s is None else f"{output_tok_per_s:.1f}"
        ttft = "—" if ttft_s is None else f"{ttft_s * 1e3:.1f}"
        self.say(f"{self._where} · {n_ok}/{n} ok · {rate} tok/s · TTFT {ttft} ms · {self._eta(self.done)}")

    def stop(self) -> None:
        """Ends the live line."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._clear()

    async def _follow(self, n: int, flight: Flight) -> None:
        while True:
            landed = len(flight.records)
            failed = sum(not r.ok for r in flight.records)
            errors = f" · {failed} failed" if failed else ""
            line = f"{self._where} · {landed}/{n}{errors} · {self._eta(self.done + landed)}"
            self.out.write(f"\r\x1b[2K{line[:150]}")
            self.out.flush()
            await asyncio.sleep(REFRESH_S)

    def _eta(self, done: int) -> str:
        share = done / self.total if self.total else 1.0
        elapsed = time.monotonic() - self.started_s
        if not 0 < share < 1:
            return f"{share:.0%} · {_clock(elapsed)} so far"
        return f"{share:.0%} · ETA {_clock(elapsed * (1 - share) / share)}"

    def _clear(self) -> None:
        if self.live:
            self.out.write("\r\x1b[2K")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
