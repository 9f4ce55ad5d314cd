"""The journal of a session: its plan and the cells it has finished, on disk before a run enters the chain."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchkit.canonical import canonical_json
from benchkit.errors import BadInput
from benchkit.ledger.files import Layout, disk_errors
from benchkit.record import CellRecord, cell_from_json, fsync_dir

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Journal:
    """One session's journal, held by one process at a time.

    A folder `sessions/SESSION/` with plan.json and, per run in the order of starting, `runs/0001-RUN/` with
    header.json, cell-0.json, …, and `finished` once the run is in the chain. Every file appears whole or
    not at all; one that is torn or foreign is passed over.

    Attributes:
        session: its id.
        passed_over: what could not be read, with why; never fatal.
    """

    def __init__(self, folder: Path, lock: int, plan: Mapping[str, Any]) -> None:
        self.session = folder.name
        self.passed_over: list[str] = []
        self._folder = folder
        self._lock: int | None = lock
        self._plan = plan

    @classmethod
    def create(cls, root: Path, session: str, plan: Mapping[str, Any]) -> Journal:
        """A new journal in the ledger at `root`, holding the session's plan.

        Raises:
            BadInput: the session exists, or cannot be the name of a folder.
            BenchkitError: the disk did not take it.
        """
        folder = _folder(root, session)
        text = canonical_json(plan)
        with disk_errors("the session's plan was not written"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir()
            except FileExistsError:
                raise BadInput(f"session {session}: exists; `--resume {session}` goes on with it") from None
            lock = _locked(folder)
            _write_whole(folder / "plan.json", text.encode())
            fsync_dir(folder.parent)
        return cls(folder, lock, json.loads(text))

    @classmethod
    def open(cls, root: Path, session: str) -> Journal:
        """The journal of a session that was begun and not finished.

        Raises:
            BadInput: no such session (the message lists those there are), or another process runs it.
        """
        folder = _folder(root, session)
        names = unfinished(root)
        if session not in names:
            there = f"unfinished ones: {', '.join(names)}" if names else "no session is unfinished"
            raise BadInput(f"session {session}: not in {folder.parent}; {there}")
        with disk_errors(f"session {session} was not opened"):
            lock = _locked(folder)
        plan = _read(folder / "plan.json")
        if isinstance(plan, str):  # it finished between the two looks
            os.close(lock)
            raise BadInput(f"session {session}: its plan cannot be read: {plan}")
        return cls(folder, lock, plan)

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan that the session was begun with."""
        return self._plan

    def start_run(self, header: Mapping[str, Any]) -> None:
        """Notes that a run begins; `header["id"]` is its id.

        Raises:
            BadInput: the run has begun already.
        """
        run_id, text = str(header["id"]), canonical_json(header)
        if any(_run_id(f) == run_id for f in self._run_folders()):
            raise BadInput(f"session {self.session}: run {run_id} has begun already")
        number = max(map(_number, self._run_folders()), default=0) + 1
        folder = self._folder / "runs" / f"{number:04d}-{run_id}"
        with disk_errors(f"the begin of run {run_id} was not noted"):
            folder.mkdir(parents=True)
            fsync_dir(folder.parent)
            fsync_dir(self._folder)
            _write_whole(folder / "header.json", text.encode())

    def add_cell(self, run_id: str, index: int, cell: CellRecord) -> None:
        """Notes that a cell of a run is measured and its raw written; index is its place in the grid."""
        text = canonical_json(asdict(cell))
        with disk_errors(f"cell {index} of run {run_id} was not noted; its raw is kept"):
            _write_whole(self._of(run_id) / f"cell-{index}.json", text.encode())

    def keep_interrupted(self, run_id: str, index: int, data: bytes) -> Path:
        """Keeps the records of a cell that was interrupted, as a raw that no run will name.

        Args:
            run_id: the run.
            index: the cell's place in the grid.
            data: a Parquet file, as `record.raw_bytes` makes it.

        Returns:
            Where it lies; it goes when the session is finished, since the cell was measured again by then.
        """
        path = self._of(run_id) / f"cell-{index}.interrupted.parquet"
        with disk_errors(f"what cell {index} of run {run_id} had measured was not kept"):
            _write_whole(path, data)
        return path

    def runs(self) -> list[tuple[dict[str, Any], dict[int, CellRecord]]]:
        """Every run that has begun, finished or not, in order: its header, and its measured cells by index."""
        out = []
        self.passed_over = []
        for folder in self._run_folders():
            header = _read(folder / "header.json")
            if isinstance(header, str):
                self.passed_over.append(f"{folder / 'header.json'}: {header}")
                continue
            out.append((header, self._cells(folder)))
        return out

    @property
    def finished(self) -> tuple[str, ...]:
        """The ids of the runs that are in the chain, in the order in which they began."""
        return tuple(_run_id(f) for f in self._run_folders() if (f / "finished").exists())

    def finish_run(self, run_id: str) -> None:
        """Notes that a run is in the chain."""
        with disk_errors(f"the end of run {run_id} was not noted"):
            _write_whole(self._of(run_id) / "finished", b"")

    def finish(self) -> None:
        """Removes the journal: all that it held is in the chain."""
        # Renamed first: a crash half-way through deleting leaves no half of a session to resume.
        gone = self._folder.with_name(f".{self.session}.finished")
        with disk_errors(f"session {self.session} was not removed"):
            self._folder.rename(gone)
            fsync_dir(gone.parent)
            shutil.rmtree(gone)
        self.close()

    def close(self) -> None:
        """Lets another process go on with the session."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_folders(self) -> list[Path]:
        runs = self._folder / "runs"
        if not runs.is_dir():
            return []
        return sorted((f for f in runs.iterdir() if re.match(r"\d{4,}-.", f.name)), key=_number)

    def _of(self, run_id: str) -> Path:
        for folder in self._run_folders():
            if _run_id(folder) == run_id:
                return folder
        raise BadInput(f"session {self.session}: run {run_id} has not begun")

    def _cells(self, folder: Path) -> dict[int, CellRecord]:
        cells = {}
        for path in sorted(folder.iterdir()):
            name = re.fullmatch(r"cell-(\d+)\.json", path.name)
            if name is None:
                if path.name not in ("header.json", "finished") and not path.name.endswith(".parquet"):
                    self.passed_over.append(f"{path}: not of the journal's making")
                continue
            value = _read(path)
            if isinstance(value, str):
                self.passed_over.append(f"{path}: {value}")
                continue
            try:
                cells[int(name[1])] = cell_from_json(value)
            except (KeyError, TypeError):
                self.passed_over.append(f"{path}: not a cell")
        return dict(sorted(cells.items()))


def unfinished(root: Path) -> list[str]:
    """The sessions of a ledger that were begun and not finished, oldest first."""
    sessions = Layout(Path(root)).sessions
    if not sessions.is_dir():
        return []
    return sorted(
        f.name for f in sessions.iterdir() if _NAME.fullmatch(f.name) and not isinstance(_read(f / "plan.json"), str)
    )


def _folder(root: Path, session: str) -> Path:
    if not _NAME.fullmatch(session):
        raise BadInput(f'session: expected a name of letters, digits, ".", "_" and "-", found "{session}"')
    return Layout(Path(root)).sessions / session


def _number(folder: Path) -> int:
    return int(folder.name.split("-", 1)[0])


def _run_id(folder: Path) -> str:
    return folder.name.split("-", 1)[1]


def _locked(folder: Path) -> int:
    """A file descriptor that holds the session until it is closed, by the kernel's hand if need be."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BadInput(f"session {folder.name} is being run by another process") from None
    return lock


def _read(path: Path) -> dict[str, Any] | str:
    """The JSON object that a file holds, or why there is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:
        return "torn or foreign: not JSON"
    return value if isinstance(value, dict) else "not a JSON object"


def _write_whole(path: Path, data: bytes) -> None:
    """A file that appears whole and durable, or not at all; one of the same name is replaced."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)
