"""One streamed request → one record: the only place where a measured request meets the network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from benchkit.load import wire
from benchkit.load.stream import StreamReader, StreamReading
from benchkit.protocol import Limits
from benchkit.record import RequestRecord

READ_BUFFER_BYTES = 1 << 22
"""Room for one giant event before aiohttp pauses reading."""

KEEPALIVE_S = 0.75
"""Kept connections are dropped before a server's own limit (uvicorn: 5 s) can close them under a request."""

DEAD_CONNECTION_NS = 1_000_000_000
"""A connection that was dead before the send says so within a round trip; one lost later was lost in real work."""

BODY_LIMIT_BYTES = 1 << 20
"""How much of an error's body is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One request, ready to be sent: the body is bytes before the clock starts. Lengths in tokens."""

    index: int
    url: str
    endpoint: str
    headers: Mapping[str, str]
    body: bytes
    isl: int
    osl: int
    kv: int
    secrets: tuple[str, ...] = ()  # what an answer must not repeat into a record


@dataclass(slots=True)
class _Wire:
    """Stamps that aiohttp's tracing takes for one attempt."""

    t_send_ns: int | None = None
    reused: bool = False


def open_session(limits: Limits) -> aiohttp.ClientSession:
    """The one session of a run: no limit of connections, no total timeout, no proxy, no cookies."""
    trace = aiohttp.TraceConfig()

    async def sent(_session: Any, context: Any, _params: Any) -> None:
        # Fires as the body is handed to the socket, after any connecting: the client's own delay stays out of TTFT.
        context.trace_request_ctx.t_send_ns = time.perf_counter_ns()

    async def reused(_session: Any, context: Any, _params: Any) -> None:
        context.trace_request_ctx.reused = True

    trace.on_request_chunk_sent.append(sent)
    trace.on_connection_reuseconn.append(reused)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s or None),
        read_bufsize=READ_BUFFER_BYTES,
        trace_configs=[trace],
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=True,
        trust_env=False,
    )


@dataclass(slots=True)
class _Outcome:
    """What is known of a request so far; the record is made of it once, at the end."""

    attempts: int = 0
    wire: _Wire = field(default_factory=_Wire)
    t_headers_ns: int | None = None
    http_status: int | None = None
    phase: str = "connect"


async def send(
    session: aiohttp.ClientSession,
    shot: Shot,
    *,
    stream: int,
    t_sched_ns: int,
    t_free_ns: int,
    limits: Limits,
    keep_text: bool = False,
    keep_events: bool = True,
) -> RequestRecord:
    """Sends one request and reads its stream to the end, whatever the end is.

    Args:
        session: from `open_session`.
        shot: the request.
        stream: the slot that sends it.
        t_sched_ns: when it was due.
        t_free_ns: when a slot was free for it.
        limits: the protocol's timeouts; 0 means none.
        keep_text: keep what was generated.
        keep_events: keep per-event offsets.

    Returns:
        The record; a failure has `error` set. Only cancellation is raised.
    """
    outcome = _Outcome()
    reader = StreamReader()
    try:
        async with asyncio.timeout(limits.request_timeout_s or None) as whole:
            reading = await _attempts(session, shot, outcome, reader, limits)
    except TimeoutError:
        limit = f"request_timeout_s = {limits.request_timeout_s:g}"
        if not whole.expired():  # aiohttp's own: the connection was not made in time
            limit = f"connect_s = {limits.connect_s:g}"
        reading = reader.broken(time.perf_counter_ns(), wire.TIMEOUT, f"{limit} passed in phase {outcome.phase}")
    except Exception as error:  # one request must never end the run
        reading = reader.broken(time.perf_counter_ns(), wire.PROTOCOL_ERROR, f"{type(error).__name__}: {error}")
    return _record(shot, outcome, reading, stream, t_sched_ns, t_free_ns, keep_text, keep_events)


async def _attempts(
    session: aiohttp.ClientSession, shot: Shot, outcome: _Outcome, reader: StreamReader, limits: Limits
) -> StreamReading:
    while True:
        outcome.attempts += 1
        outcome.wire = _Wire()
        outcome.phase = "connect"
        try:
            return await _attempt(session, shot, outcome, reader, limits)
        except aiohttp.ConnectionTimeoutError:
            raise TimeoutError from None
        except aiohttp.ClientConnectorError as error:
            return reader.broken(time.perf_counter_ns(), wire.CONNECT_ERROR, str(error))
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            now = time.perf_counter_ns()
            sent = outcome.wire.t_send_ns
            at_once = sent is None or now - sent < DEAD_CONNECTION_NS
            if outcome.wire.reused and outcome.t_headers_ns is None and at_once:
                # A kept connection that the server had already closed: the clock starts again at the next t_send.
                # The pool may hold more of them; each is gone once tried, and a new one ends this loop.
                continue
            if reader.finished:
                return reader.end(now)
            detail = f"connection lost in phase {outcome.phase}: {error or type(error).__name__}"
            return reader.broken(now, wire.DISCONNECTED, detail)
        except aiohttp.ClientResponseError as error:
            return reader.broken(time.perf_counter_ns(), wire.PROTOCOL_ERROR, f"not HTTP: {error.message}")


async def _attempt(
    session: aiohttp.ClientSession, shot: Shot, outcome: _Outcome, reader: StreamReader, limits: Limits
) -> StreamReading:
    try:
        async with asyncio.timeout(None) as patience:
            _allow(patience, limits.first_token_s)
            async with session.post(
                shot.url,
                data=shot.body,
                headers=shot.headers,
                allow_redirects=False,
                trace_request_ctx=outcome.wire,
            ) as response:
                outcome.t_headers_ns = time.perf_counter_ns()
                outcome.http_status = response.status
                outcome.phase = "first token"
                if response.status != 200 or response.content_type != "text/event-stream":
                    return await _no_stream(response, reader)
                while True:
                    data = await response.content.readany()
                    # Stamp before parsing: decoding a long event would count as the server's time.
                    now = time.perf_counter_ns()
                    if not data:
                        return reader.end(now)
                    reader.feed(now, data)
                    if reader.first_output_ns is not None:
                        outcome.phase = "stream"
                        _allow(patience, limits.idle_s)
    except TimeoutError:
        if not patience.expired():
            raise
    streaming = outcome.phase == "stream"
    limit = f"idle_s = {limits.idle_s:g}" if streaming else f"first_token_s = {limits.first_token_s:g}"
    return reader.broken(time.perf_counter_ns(), wire.TIMEOUT, f"{limit} passed in phase {outcome.phase}")


def _allow(patience: asyncio.Timeout, seconds: float) -> None:
    """Moves the deadline, but not for every event: a new one within a tenth of the limit is not worth a timer."""
    if not seconds:
        patience.reschedule(None)
        return
    when, wanted = patience.when(), asyncio.get_running_loop().time() + seconds
    if when is None or abs(wanted - when) > seconds / 10:
        patience.reschedule(wanted)


async def _no_stream(response: aiohttp.ClientResponse, reader: StreamReader) -> StreamReading:
    """An answer that is no event stream: an error's body, kept, or something that this API never sends."""
    body = await response.content.read(BODY_LIMIT_BYTES)
    now = time.perf_counter_ns()
    reading = wire.read_body(response.status, response.content_type, body)
    if reading.error is None:
        detail = f"asked for a stream, got {response.content_type or 'no content type'}"
        return reader.broken(now, wire.BAD_CONTENT_TYPE, detail)
    detail = reading.error_detail
    if reading.error == wire.REDIRECT:
        detail = f"to {response.headers.get('Location', '?')}; redirects are not followed"
    return reader.broken(now, reading.error, detail)


def _record(
    shot: Shot,
    outcome: _Outcome,
    reading: StreamReading,
    stream: int,
    t_sched_ns: int,
    t_free_ns: int,
    keep_text: bool,
    keep_events: bool,
) -> RequestRecord:
    t_send_ns = outcome.wire.t_send_ns
    timings = reading.server_timings

    def kept(text: str | None) -> str | None:
        return None if text is None else without_secrets(text, shot.secrets)

    return RequestRecord(
        index=shot.index,
        stream=stream,
        worker=0,
        endpoint=shot.endpoint,
        attempts=outcome.attempts,
        asked_isl=shot.isl,
        asked_osl=shot.osl,
        kv=shot.kv,
        t_sched_ns=t_sched_ns,
        t_free_ns=t_free_ns,
        t_send_ns=t_send_ns,
        t_headers_ns=outcome.t_headers_ns,
        t_first_ns=reading.t_first_ns,
        t_last_ns=reading.t_last_ns,
        t_end_ns=reading.t_end_ns,
        prompt_tokens=reading.prompt_tokens,
        completion_tokens=reading.completion_tokens,
        cached_tokens=reading.cached_tokens,
        reasoning_tokens=reading.reasoning_tokens,
        first_event_tokens=reading.first_event_tokens,
        events=reading.events,
        data_events=reading.data_events,
        event_ns=tuple(t - t_send_ns for t in reading.event_ns) if keep_events and t_send_ns is not None else None,
        event_tokens=reading.event_tokens if keep_events else None,
        token_source=reading.token_source,
        finish_reason=kept(reading.finish_reason),
        error=reading.error,
        error_detail=without_secrets(reading.error_detail, shot.secrets),
        http_status=outcome.http_status,
        model=kept(reading.model),
        response_id=kept(reading.response_id),
        server_timings=None if timings is None else kept(orjson.dumps(timings).decode()),
        text=kept(reading.text) if keep_text else None,
        reasoning_text=kept(reading.reasoning_text) if keep_text else None,
    )


def without_secrets(text: str, secrets: tuple[str, ...]) -> str:
    """A server's text with every known secret replaced: some servers repeat the key that they refuse."""
    for secret in secrets:
        text = text.replace(secret, "[secret]")
    return text
