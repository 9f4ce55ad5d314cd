"""Records and runs for tests: real ones, written through the ledger's own door, of numbers to check in the head."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchkit import MEASUREMENT
from benchkit.arm import arm_hash, parse_arm
from benchkit.ledger import Ledger
from benchkit.protocol import Protocol, parse_protocol
from benchkit.record import CellRecord, RequestRecord, Run

AT = "2026-01-31T12:00:00Z"

PROTOCOL = """\
schema = 1
name = "tiny"
[load]
concurrency = [1, 2]
requests = [2, 4]
[workload]
isl = [100]
osl = [11]
"""

ARM = """\
schema = 1
name = "ARM"
model = "m"
endpoints = ["http://127.0.0.1:8000/v1"]
[facts]
checkpoint = "ARM"
"""


def make_record(**overrides: Any) -> RequestRecord:
    """A success: sent at 1 s, first token after 0.1 s, ten more tokens 10 ms apart."""
    sent = overrides.get("t_send_ns", 1_000_000_000)
    values: dict[str, Any] = {
        "index": 0,
        "stream": 0,
        "worker": 0,
        "endpoint": "http://127.0.0.1:8000/v1",
        "attempts": 1,
        "asked_isl": 100,
        "asked_osl": 11,
        "kv": 0,
        "t_sched_ns": sent,
        "t_free_ns": sent,
        "t_send_ns": sent,
        "t_headers_ns": sent + 1_000_000,
        "t_first_ns": sent + 100_000_000,
        "t_last_ns": sent + 200_000_000,
        "t_end_ns": sent + 201_000_000,
        "prompt_tokens": 100,
        "completion_tokens": 11,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "first_event_tokens": 1,
        "events": 11,
        "data_events": 13,
        "event_ns": tuple(100_000_000 + 10_000_000 * i for i in range(11)),
        "event_tokens": (1,) * 11,
        "token_source": "usage",
        "finish_reason": "length",
        "error": None,
        "error_detail": "",
        "http_status": 200,
        "model": "m",
        "response_id": "x",
        "server_timings": None,
        "text": None,
        "reasoning_text": None,
    }
    return RequestRecord(**{**values, **overrides})


def make_failure(**overrides: Any) -> RequestRecord:
    """A request that the server answered with 500."""
    nothing = dict.fromkeys(
        (
            "t_first_ns", "t_last_ns", "prompt_tokens", "completion_tokens", "cached_tokens",
            "reasoning_tokens", "first_event_tokens", "event_ns", "event_tokens", "finish_reason", "model",
        )
    )  # fmt: skip
    failed = {"error": "http", "error_detail": "500", "http_status": 500, "events": 0, "token_source": "none"}
    return make_record(**{**nothing, **failed, **overrides})


def write_run(
    ledger: Ledger,
    id: str = "r-1",
    *,
    protocol_text: str = PROTOCOL,
    change: Callable[[int, RequestRecord], RequestRecord] = lambda place, record: record,
    facts: dict[str, Any] | None = None,
    **overrides: Any,
) -> Run:
    """A warm run whose raws are written and which is not recorded yet.

    `change` is given the place of the cell and each record; runs of different ids have different stamps.
    """
    protocol = parse_protocol(protocol_text)
    arm_name = overrides.get("arm", "a")
    arm_text = ARM.replace("ARM", arm_name)
    start_ns = zlib.crc32(id.encode()) * 1000
    cells = []
    for place, cell in enumerate(protocol.cells):
        n = protocol.load.requests_at(cell.concurrency)
        records = [
            change(
                place,
                make_record(
                    index=i,
                    stream=i % cell.concurrency,
                    t_send_ns=start_ns + (i // cell.concurrency) * 300_000_000,
                    asked_isl=cell.isl,
                    asked_osl=cell.osl,
                ),
            )
            for i in range(n)
        ]
        raw = ledger.write_raw(records, {"run": id, "cell": asdict(cell)})
        cells.append(
            CellRecord(
                cell=cell,
                raw=raw.sha256,
                content=raw.content,
                n=len(records),
                n_ok=sum(r.ok for r in records),
                facts={"model": "m", "idle": True, **(facts or {})},
            )
        )
    values: dict[str, Any] = {
        "id": id,
        "session": "s-1",
        "protocol": protocol.name,
        "protocol_hash": protocol.hash,
        "protocol_text": protocol_text,
        "arm": arm_name,
        "arm_hash": arm_hash(parse_arm(arm_text), {}),
        "arm_text": arm_text,
        "grid": "warm",
        "cold_of": None,
        "rep": 0,
        "block": 0,
        "slot": 0,
        "boot_id": "boot-1",
        "complete": True,
        "prompts_digest": "0" * 64,
        "measurement": MEASUREMENT,
        "client_version": "0.1.0",
        "started_at": AT,
        "ended_at": AT,
        "command": "benchkit run",
        "host": {"cpu": "test"},
        "server": {},
        "note": "",
        "cells": tuple(cells),
    }
    return Run(**{**values, **overrides})


def make_run(ledger: Ledger, id: str = "r-1", *, bank: bool = False, at: str = AT, **overrides: Any) -> Run:
    """A run that is recorded, and banked where asked; see `write_run`."""
    run = write_run(ledger, id, **overrides)
    ledger.record(run, at=at, who="tester")
    if bank:
        ledger.bank([run.id], why="a test", at=at, who="tester")
    return run


def tiny_protocol() -> Protocol:
    """The protocol of the runs above: two cells, 2 and 4 requests."""
    return parse_protocol(PROTOCOL)
