"""Records, cells and runs by value: sane ones, any field of which a test replaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchkit.protocol import Cell, Protocol, parse_protocol
from benchkit.record import CellRecord, RequestRecord, Run

MS = 1_000_000
S = 1_000_000_000

PROTOCOL_TEXT = """
schema = 1
name = "test"
[load]
concurrency = [1, 4]
requests = [2, 8]
[workload]
isl = [100]
osl = [11]
"""

ARM_TEXT = """
schema = 1
name = "a"
model = "m"
endpoints = ["http://127.0.0.1:9/v1"]
"""

RECORD = RequestRecord(
    index=0, stream=0, worker=0, endpoint="http://127.0.0.1:9/v1", attempts=1, asked_isl=100, asked_osl=11, kv=0,
    t_sched_ns=10 * S, t_free_ns=10 * S, t_send_ns=10 * S, t_headers_ns=10 * S + 5 * MS, t_first_ns=10 * S + 500 * MS,
    t_last_ns=10 * S + 700 * MS, t_end_ns=10 * S + 701 * MS, prompt_tokens=100, completion_tokens=11,
    cached_tokens=0, reasoning_tokens=None, first_event_tokens=1, events=11, data_events=13,
    event_ns=tuple((500 + 20 * i) * MS for i in range(11)), event_tokens=(1,) * 11, token_source="usage",
    finish_reason="length", error=None, error_detail="", http_status=200, model="m", response_id="r-0",
    server_timings=None, text=None, reasoning_text=None,
)  # fmt: skip
"""Sent at 10 s; 11 tokens of 20 ms from 10.5 s on: TTFT 0.5 s, TPOT 0.02 s."""

FAILED: dict[str, Any] = {
    "t_first_ns": None, "t_last_ns": None, "prompt_tokens": None, "completion_tokens": None,
    "first_event_tokens": None, "events": 0, "event_ns": (), "event_tokens": None, "token_source": "none",
    "finish_reason": None,
}  # fmt: skip


def record_with(**changes: Any) -> RequestRecord:
    """The record above with some fields replaced."""
    return replace(RECORD, **changes)


def failed_record(error: str = "http_error", **changes: Any) -> RequestRecord:
    """A record of a failure, without stamps of output and without tokens."""
    return replace(RECORD, **{**FAILED, "error": error, "error_detail": "why", **changes})


def protocol_with(**replaced: str) -> Protocol:
    """The protocol above; `replaced` maps a key to the lines that stand in place of its line."""
    lines = [
        next((new for key, new in replaced.items() if line.startswith(key + " ")), line)
        for line in PROTOCOL_TEXT.split("\n")
    ]
    return parse_protocol("\n".join(lines))


def cell_with(concurrency: int = 1, *, n: int = 2, **facts: Any) -> CellRecord:
    """A cell record with these facts around it."""
    cell = Cell(isl=100, osl=11, kv=0, concurrency=concurrency)
    return CellRecord(cell=cell, raw="0" * 64, content="1" * 64, n=n, n_ok=n, facts=facts)


def run_with(**changes: Any) -> Run:
    """A warm run of the protocol above without cells."""
    values: dict[str, Any] = {
        "id": "run-20260101T000000-000000", "session": "ses-20260101T000000-000000", "protocol": "test",
        "protocol_hash": protocol_with().hash, "protocol_text": PROTOCOL_TEXT, "arm": "a", "arm_hash": "2" * 64,
        "arm_text": ARM_TEXT, "grid": "warm", "cold_of": None, "rep": 0, "block": 1, "slot": 1, "boot_id": "boot-1",
        "complete": True, "prompts_digest": "3" * 64, "measurement": 1, "client_version": "0.1.0",
        "started_at": "2026-01-01T00:00:00.000Z", "ended_at": "2026-01-01T00:01:00.000Z", "command": "benchkit run",
        "host": {}, "server": {}, "note": "", "cells": (),
    }  # fmt: skip
    return Run(**{**values, **changes})
