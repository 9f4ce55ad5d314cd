"""One request, one run: the immutable records of what was measured, and the Parquet file of a cell."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchkit.canonical import canonical_json, sha256_hex
from benchkit.errors import Finding
from benchkit.protocol import Cell

if TYPE_CHECKING:
    import pyarrow as pa

RAW_SCHEMA = 1
"""The version of the Parquet schema, kept in each file's metadata under `benchkit.schema`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it. Stamps in ns of one monotonic clock; None is not known, never 0.

    A failed request has `error` set and its token counts None. `t_sched_ns` is when the request was due and
    `t_free_ns` when a slot was free for it; in a closed loop they are the same moment.
    """

    index: int  # i: the prompt depends on i alone
    stream: int  # the slot that sent it
    worker: int  # the process that sent it
    endpoint: str
    attempts: int  # sends: 2 where a kept connection was dead before a byte of the answer came
    asked_isl: int
    asked_osl: int
    kv: int

    t_sched_ns: int
    t_free_ns: int
    t_send_ns: int | None  # the body was written to the socket
    t_headers_ns: int | None
    t_first_ns: int | None  # first event that carries output
    t_last_ns: int | None  # last event that carries output
    t_end_ns: int  # end of the stream, or of hope

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    reasoning_tokens: int | None
    first_event_tokens: int | None  # n1: None where the server does not tell
    events: int  # events that carry output
    data_events: int  # all SSE events
    event_ns: tuple[int, ...] | None  # arrival of each output event, less t_send_ns
    event_tokens: tuple[int, ...] | None  # tokens of each output event, where told
    token_source: str  # usage | none

    finish_reason: str | None
    error: str | None  # error class
    error_detail: str
    http_status: int | None
    model: str | None  # as the server names it
    response_id: str | None
    server_timings: str | None  # the server's own words about this request, as JSON
    text: str | None  # where the protocol keeps it
    reasoning_text: str | None

    @property
    def ok(self) -> bool:
        """True for a success: an answer that came to its end without an error."""
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """One measured cell of a run: where its raw is, and what was known around it.

    `facts` holds JSON values: idle seconds, the server's counters before and after, sampled peaks,
    the client's lag, template tokens (see docs/ledger.md).
    """

    cell: Cell
    raw: str  # sha256 of the file's bytes
    content: str  # sha256 of its canonical rows
    n: int
    n_ok: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One grid of one protocol on one arm, with all that is needed to read it in ten years."""

    id: str
    session: str
    protocol: str
    protocol_hash: str
    protocol_text: str
    arm: str
    arm_hash: str
    arm_text: str
    grid: str  # cold | warm
    cold_of: str | None  # boot | protocol, for a cold grid
    rep: int  # 0-based among the warm grids of its arm and session; a cold grid has that of the step it came with
    block: int  # the block of interleaved grids it belongs to
    slot: int  # its place in the session's order
    boot_id: str | None
    complete: bool  # False: some cells of the grid were never measured
    prompts_digest: str
    measurement: int
    client_version: str
    started_at: str  # UTC, ISO 8601 with Z
    ended_at: str
    command: str
    host: Mapping[str, Any]
    server: Mapping[str, Any]
    note: str
    cells: tuple[CellRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """The run as JSON values."""
        out = asdict(self)
        out["cells"] = list(out["cells"])
        return out

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Run:
        """The run that `to_json` wrote; keys that a later version added are passed over."""
        known = {f.name for f in fields(Run)}
        rest = {k: v for k, v in value.items() if k in known and k != "cells"}
        return Run(**rest, cells=tuple(cell_from_json(c) for c in value["cells"]))


def cell_from_json(value: Mapping[str, Any]) -> CellRecord:
    """The cell record that `dataclasses.asdict` made JSON of."""
    return CellRecord(**{**value, "cell": Cell(**value["cell"])})


def new_id(prefix: str, at: str) -> str:
    """A new id that sorts by time: prefix, UTC to the second, six random hex digits."""
    stamp = at[:19].replace("-", "").replace(":", "")
    return f"{prefix}-{stamp}-{secrets.token_hex(3)}"


# --- the raw: a Parquet file named by its sha256 ----------------------------------------------------------

_TEXTS = (
    "endpoint", "token_source", "finish_reason", "error", "error_detail",
    "model", "response_id", "server_timings", "text", "reasoning_text",
)  # fmt: skip
_SMALL = ("index", "stream", "worker", "attempts", "http_status", "events", "data_events")
_LISTS = ("event_ns", "event_tokens")


def raw_schema() -> pa.Schema:
    """The Arrow schema of a raw: one column per field of `RequestRecord`, in its order."""
    import pyarrow as pa

    def type_of(name: str) -> pa.DataType:
        if name in _TEXTS:
            return pa.string()
        if name in _LISTS:
            return pa.list_(pa.int64() if name == "event_ns" else pa.int32())
        return pa.int32() if name in _SMALL else pa.int64()

    return pa.schema([(f.name, type_of(f.name)) for f in fields(RequestRecord)])


def raw_bytes(records: Sequence[RequestRecord], about: Mapping[str, Any]) -> bytes:
    """The bytes of a raw: the records as Parquet, with `about` (run, cell) in its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = raw_schema().with_metadata({"benchkit.schema": str(RAW_SCHEMA), "benchkit.about": canonical_json(about)})
    columns = {name: [getattr(r, name) for r in records] for name in schema.names}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pydict(columns, schema=schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def read_raw(path: Path, *, sha256: str, events: bool = True) -> tuple[RequestRecord, ...]:
    """The records of a raw, after its bytes were found to match their hash.

    Args:
        path: the Parquet file.
        sha256: what the ledger pins; the bytes must match it.
        events: False leaves the per-event lists out (None), which is many times faster.

    Raises:
        Finding: the file is gone, is not what was pinned, or is no raw.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = pinned_bytes(path, sha256)
    names = [f.name for f in fields(RequestRecord)]
    wanted = names if events else [n for n in names if n not in _LISTS]
    try:
        # On this thread alone: a pool that still stands when the process ends can abort it.
        table = pq.read_table(pa.BufferReader(data), columns=wanted, use_threads=False, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise Finding(f"raw {sha256[:12]}…: {path} is not a raw: {error}") from None
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    rows = []
    for i in range(table.num_rows):
        row: dict[str, Any] = {name: columns[name][i] if name in columns else None for name in names}
        for name in _LISTS:
            row[name] = None if row[name] is None else tuple(row[name])
        rows.append(RequestRecord(**row))
    return tuple(rows)


def pinned_bytes(path: Path, sha256: str) -> bytes:
    """The bytes of a file that is pinned by its hash.

    Raises:
        Finding: the file is missing, unreadable or changed; the message says how, and what to do.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Finding(f"raw {sha256[:12]}…: missing ({path}); restore it from a copy") from None
    except OSError as error:
        raise Finding(f"raw {sha256[:12]}…: cannot be read ({path}: {error.strerror})") from None
    found = sha256_hex(data)
    if found != sha256:
        why = "bytes do not match the ledger"
        if sha256_hex(data.replace(b"\r\n", b"\n")) == sha256:
            why = "only line endings differ from the ledger (something converted them)"
        raise Finding(f"raw {sha256[:12]}…: {why} (found {found[:12]}…); restore {path}, raws are never rewritten")
    return data


def content_digest(records: Iterable[RequestRecord]) -> str:
    """The sha256 over the records' canonical rows: the same results give the same digest in any file."""
    return sha256_hex("\n".join(canonical_json(asdict(r)) for r in records))


def write_pinned(folder: Path, data: bytes, suffix: str) -> tuple[str, Path]:
    """Bytes into `folder/ab/cdef…suffix`, named by their sha256, so that a crash leaves all of it or nothing.

    Written to a temporary name beside its place, fsynced, linked to its name (which never overwrites), and
    the directories fsynced. The same bytes twice are one file.

    Returns:
        The sha256 and the path.

    Raises:
        OSError: disk full, read-only folder; nothing is left under the final name.
        Finding: the name is taken by a file of other bytes.
    """
    sha = sha256_hex(data)
    path = pinned_path(folder, sha, suffix)
    if path.exists():
        pinned_bytes(path, sha)
        return sha, path
    path.parent.mkdir(parents=True, exist_ok=True)
    link_new(path, data)
    fsync_dir(folder)
    return sha, path


def pinned_path(folder: Path, sha256: str, suffix: str) -> Path:
    """Where `write_pinned` puts the file of a hash."""
    return folder / sha256[:2] / f"{sha256[2:]}{suffix}"


def link_new(path: Path, data: bytes) -> None:
    """A new read-only file with these bytes, whole and durable before its name appears; never overwrites."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o444)
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process wrote the same hash: the same bytes
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def fsync_dir(path: Path) -> None:
    """Makes a directory's new names durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
