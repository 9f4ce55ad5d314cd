"""Runs one piece of work on a ledger again and again, killed before its first step, its second, …, until it lives.

Started by test_crash.py as a process of its own, so that forking meets no threads. A step is any call that
touches the disk: a system call that writes, links, renames, makes durable; a statement or commit of SQLite.
For each step it prints `STEP killed` or `STEP done`, and leaves the ledger as ROOT/STEP.
"""

from __future__ import annotations

import os
import posix
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchkit.ledger import Journal, Ledger
from benchkit.record import raw_bytes
from making import AT, make_record, write_run

POSIX = {"fsync", "link", "unlink", "rename", "replace", "mkdir", "rmdir", "fchmod"}
SAY = {"at": AT, "who": "driver"}


def record(root: Path) -> None:
    with Ledger.open(root) as ledger:
        ledger.record(write_run(ledger, "r-2"), **SAY)


def bank(root: Path) -> None:
    with Ledger.open(root) as ledger:
        ledger.bank(["r-1"], why="clean", **SAY)


def create(root: Path) -> None:
    with Ledger.open(root / "new", create=True) as ledger:
        ledger.record(write_run(ledger, "r-2"), **SAY)


def rebuild(root: Path) -> None:
    Ledger.rebuild(root).close()


def journal(root: Path) -> None:
    with Ledger.open(root) as ledger, Journal.create(root, "s-2", {"grids": 1}) as session:
        run = write_run(ledger, "r-2")
        session.start_run({"id": "r-2"})
        for index, cell in enumerate(run.cells):
            session.add_cell("r-2", index, cell)
        session.keep_interrupted("r-2", 2, raw_bytes([make_record()], {}))
        ledger.record(run, **SAY)
        session.finish_run("r-2")
        session.finish()


def die_before(step: int) -> Callable[[Any, str, Any], None]:
    """A profile function that ends the process without warning when the step of that number would begin."""
    seen = 0

    def watch(frame: Any, event: str, function: Any) -> None:
        nonlocal seen
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        conn = owner.connection if isinstance(owner, sqlite3.Cursor) else owner
        in_transaction = (
            isinstance(conn, sqlite3.Connection)
            and conn.in_transaction
            and function.__name__ in ("execute", "executemany", "commit")
        )
        of_file = type(owner).__name__ == "BufferedWriter"
        if in_transaction or of_file or (owner is posix and function.__name__ in POSIX):
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    return watch


def main(name: str, start: Path, root: Path, every: int) -> None:
    work = globals()[name]
    work(Path(shutil.copytree(start, root / "warm-up")))  # imports and caches, which no child repeats
    step = 1
    while True:
        place = Path(shutil.copytree(start, root / str(step)))
        child = os.fork()
        if child == 0:
            sys.setprofile(die_before(step))
            try:
                work(place)
            finally:
                sys.setprofile(None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(step, "killed" if os.WIFSIGNALED(status) else "done", flush=True)
        if not os.WIFSIGNALED(status):
            sys.exit(os.WEXITSTATUS(status))
        step += every


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
