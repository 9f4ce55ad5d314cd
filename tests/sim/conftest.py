"""The client of the simulator's tests, and a clock that jumps from one deadline of the engine to the next."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from simclient import Client

from benchkit.sim.engine import Emission, Engine


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(session)


@pytest.fixture
def run_out() -> Callable[..., list[Emission]]:
    """Plays an engine to its end, or to a moment."""

    def play(engine: Engine, *, until_ns: int | None = None) -> list[Emission]:
        out: list[Emission] = []
        while (due_ns := engine.due_ns()) is not None and (until_ns is None or due_ns <= until_ns):
            out += engine.advance(due_ns)
        return out

    return play
