"""When each request is due: the shapes of load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from benchkit.record import RequestRecord

Fire = Callable[[int, int, int], Awaitable[RequestRecord]]
"""Sends request `index` from slot `stream`, which was free and due at `t_ns`."""


@dataclass(slots=True)
class Flight:
    """A cell while it is measured: what has landed, and how many requests were in flight at most."""

    records: list[RequestRecord] = field(default_factory=list)
    in_flight: int = 0
    max_in_flight: int = 0


async def closed(n: int, concurrency: int, fire: Fire, flight: Flight) -> None:
    """N streams, each sending its next request as soon as its last one ended, until n have been sent.

    Requests are drawn in order from one counter, so request i is the same whichever slot sends it. Records land
    in `flight` as they end, so that a cancelled cell keeps what it had.
    """
    indices = iter(range(n))

    async def slot(stream: int) -> None:
        for index in indices:
            t_free_ns = time.perf_counter_ns()
            flight.in_flight += 1
            flight.max_in_flight = max(flight.max_in_flight, flight.in_flight)
            try:
                flight.records.append(await fire(index, stream, t_free_ns))
            finally:
                flight.in_flight -= 1

    async with asyncio.TaskGroup() as slots:
        for stream in range(min(n, concurrency)):
            slots.create_task(slot(stream))
