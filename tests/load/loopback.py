"""A loopback server that plays bytes with delays: what it sends, when, and how it ends is the test's to say."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

Play = Sequence[tuple[float, bytes]]
"""(seconds to wait, bytes to send); after the last one the connection ends as `close` says."""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@dataclass(slots=True)
class Loopback:
    """A running server: its base URL, the requests it got, and how many connections it had at once."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    max_open: int = 0


@contextlib.asynccontextmanager
async def playing(
    play: Play | Callable[[int], Play], *, keep_alive: bool = False, idle_s: float | None = None, abort: bool = False
) -> AsyncIterator[Loopback]:
    """Serves `play` for each request, or what `play(i)` says for request i.

    Args:
        play: bytes and delays.
        keep_alive: the connection stays open for further requests.
        idle_s: a kept connection is closed after this silence, as real servers do.
        abort: the connection ends with a reset.
    """
    loopback = Loopback()
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        loopback.connections += 1
        loopback.open += 1
        loopback.max_open = max(loopback.max_open, loopback.open)
        try:
            while True:
                async with asyncio.timeout(idle_s):
                    head = await reader.readuntil(b"\r\n\r\n")
                    names = (line.lower().split(b":") for line in head.split(b"\r\n"))
                    length = next(int(name[1]) for name in names if name[0] == b"content-length")
                    body = await reader.readexactly(length)
                loopback.bodies.append(body)
                script = play(len(loopback.bodies) - 1) if callable(play) else play
                for delay, data in script:
                    await asyncio.sleep(delay)
                    writer.write(data)
                    await writer.drain()
                if not keep_alive:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        finally:
            loopback.open -= 1
            tasks.discard(task)
            if abort:
                # A linger of zero makes the close a reset.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(ConnectionError):
                writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=4096, limit=1 << 24)
    loopback.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield loopback
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
