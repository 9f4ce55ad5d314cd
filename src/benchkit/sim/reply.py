"""How one request's tokens reach its client: streamed with whatever fault was asked for, or as a whole."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from benchkit.sim.engine import Emission
from benchkit.sim.events import DONE, WIDE_CHARACTER, Answer, error_event
from benchkit.sim.events import padded as padded_event
from benchkit.sim.profile import Profile

Ending = Literal["close", "drop"]
"""close: the HTTP message ends as it should; drop: the connection is closed in the middle of it."""

FAULT_MESSAGE: Final = "simulated fault"
_GARBAGE: Final = b'data: {"id":"cmpl-sim","choices":[{"index":0,"delta":{"content":"\n\n'
_HALVES_APART_S: Final = 0.005


class StreamReply:
    """Writes each emission to the socket the moment it is delivered, framed as one HTTP chunk.

    It writes to the transport itself: going through the response object costs a coroutine for each event,
    which at 64 streams makes the last one visibly later than the first.
    """

    def __init__(self, profile: Profile, answer: Answer, transport: asyncio.Transport, fault: str | None) -> None:
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.abort_reason = "abort"
        self._profile = profile
        self._answer = answer
        self._transport = transport
        self._fault = fault
        self._hit = False
        self._held: list[bytes] | None = None  # while held, what is due waits here
        self._ending: Ending | None = None
        self._role_due = True
        if profile.role_chunk_early:
            self._put(self._role())

    def deliver(self, emission: Emission) -> None:
        """Send what an emission means for this client."""
        if self.ended.done() or self._ending is not None:
            return
        p, fault = self._profile, self._fault
        if emission.start == 0 and p.prefix_caching and p.report_cached:
            self._answer.cached(emission.sequence.cached_tokens)
        hit = not self._hit and (emission.start >= p.fault_after_tokens or emission.finish_reason is not None)
        self._hit = self._hit or hit
        if fault == "error_first" or (hit and fault == "error_in_stream"):
            self.abort_reason = "error"
            self._put(error_event(FAULT_MESSAGE) + (DONE if p.send_done else b""))
            self._end("close")
            return
        if hit and fault in ("disconnect", "truncate"):
            self._end("drop" if fault == "disconnect" else "close")
            return

        split = hit and fault == "split_utf8"
        data = self._answer.tokens(emission.start, emission.tokens, emission.finish_reason, wide=split)
        if hit and fault == "giant_event":
            data = padded_event(data, p.fault_giant_bytes)
        if hit and fault == "garbage":
            data = _GARBAGE + data
        data = self._role() + data
        if emission.finish_reason is not None:
            data += self._answer.closing() + (DONE if p.send_done or fault == "no_finish" else b"")

        if hit and fault == "stall":
            self._hold(p.fault_stall_s)
        if split:
            cut = data.index(WIDE_CHARACTER.encode()) + 3  # the blank and half of the four bytes
            self._put(data[:cut])
            self._hold(_HALVES_APART_S)
            data = data[cut:]
        self._put(data)
        if emission.finish_reason is not None:
            self._end("close")

    def drop(self) -> None:
        """Close the connection where the answer stands."""
        if not self.ended.done():
            self.ended.set_result("drop")

    def _role(self) -> bytes:
        due, self._role_due = self._role_due, False
        return self._answer.role() if due else b""

    def _put(self, data: bytes) -> None:
        if self._fault == "comments":
            events = data.removesuffix(b"\n\n").split(b"\n\n") if data else []
            data = b"".join(b": keep-alive\n\n: part of it\n" + event + b"\n\n" for event in events)
        elif self._fault == "crlf":
            data = data.replace(b"\n", b"\r\n")
        if self._held is not None:
            self._held.append(data)
        elif data and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _hold(self, seconds: float) -> None:
        self._held = []
        asyncio.get_running_loop().call_later(seconds, self._release)

    def _release(self) -> None:
        data, self._held = b"".join(self._held or []), None
        if data and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        if self._ending is not None and not self.ended.done():
            self.ended.set_result(self._ending)

    def _end(self, ending: Ending) -> None:
        if self._held is not None:
            self._ending = ending
        else:
            self.ended.set_result(ending)


class WholeReply:
    """Waits for the last token, then has the body of an answer that does not stream."""

    def __init__(self, profile: Profile, answer: Answer, fault: str | None) -> None:
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.abort_reason = "abort"
        self.body = b""
        self._profile = profile
        self._answer = answer
        self._fault = fault

    def deliver(self, emission: Emission) -> None:
        """Count an emission; the last one makes the body."""
        p = self._profile
        if emission.start == 0 and p.prefix_caching and p.report_cached:
            self._answer.cached(emission.sequence.cached_tokens)
        if emission.finish_reason is None or self.ended.done():
            return
        self.body = self._answer.whole(emission.start + emission.tokens, emission.finish_reason)
        if self._fault in ("error_first", "error_in_stream"):
            self.body = error_event(FAULT_MESSAGE).removeprefix(b"data: ").rstrip()
        elif self._fault == "garbage":
            self.body = self.body[: len(self.body) // 2]
        if self._fault == "stall":
            asyncio.get_running_loop().call_later(p.fault_stall_s, self._end, "close")
        else:
            self._end("drop" if self._fault in ("disconnect", "truncate") else "close")

    def drop(self) -> None:
        """Close the connection without an answer."""
        self._end("drop")

    def _end(self, ending: Ending) -> None:
        if not self.ended.done():
            self.ended.set_result(ending)
