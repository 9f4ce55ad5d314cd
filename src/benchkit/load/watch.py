"""What is watched while a cell is measured: the client's own lag, the server's gauges."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np

from benchkit.load.server import Server

LAG_PERIOD_S = 0.005
GAUGE_PERIOD_S = 0.5
FIRST_GAUGE_S = 0.1


@dataclass(slots=True)
class Watch:
    """Filled while watching: lags in ms, and the highest value that each gauge of the server showed."""

    lags_ms: list[float] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)
    samples: int = 0

    @property
    def lag_p99_ms(self) -> float | None:
        """The lag that 99 % of the samples stay within: how late this client could notice a byte."""
        if not self.lags_ms:
            return None
        return float(np.percentile(self.lags_ms, 99, method="inverted_cdf"))


@contextlib.asynccontextmanager
async def watching(server: Server) -> AsyncIterator[Watch]:
    """Watches until the block ends; the garbage collector rests meanwhile, as its pauses would be measured."""
    watch = Watch()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    tasks = [asyncio.create_task(_lag(watch)), asyncio.create_task(_gauges(watch, server))]
    try:
        yield watch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if collecting:
            gc.enable()


async def _lag(watch: Watch) -> None:
    # Against absolute deadlines, none of them left out: a stall of 300 ms is sixty late samples, not one. What a
    # sleep overshoots is the loop being busy, less the timer's own 1 ms.
    due = time.perf_counter()
    while True:
        due += LAG_PERIOD_S
        left = due - time.perf_counter()
        if left > 0:
            await asyncio.sleep(left)
        watch.lags_ms.append(max(0.0, (time.perf_counter() - due) * 1e3 - 1.0))


async def _gauges(watch: Watch, server: Server) -> None:
    # Not at once: a sample from before the first request would say that nothing ran.
    due = time.perf_counter() + FIRST_GAUGE_S
    await asyncio.sleep(FIRST_GAUGE_S)
    while True:
        for name, value in (await server.gauges()).items():
            watch.peaks[name] = max(watch.peaks.get(name, 0.0), value)
        watch.samples += 1
        due = max(due + GAUGE_PERIOD_S, time.perf_counter() + GAUGE_PERIOD_S / 2)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
