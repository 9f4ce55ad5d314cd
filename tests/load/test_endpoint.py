"""One request over a real socket: every way to end becomes one record, and the stamps are those of the wire."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from loopback import HEAD, Play, playing

from benchkit.load.endpoint import Shot, open_session, send
from benchkit.load.shapes import Flight, closed
from benchkit.metrics import dispatch_s, tpot_s, ttft_s
from benchkit.protocol import Limits
from benchkit.record import RequestRecord, raw_bytes

CASES = Path(__file__).parents[1] / "data" / "cases"


def event(text: str = "", *, finish: str | None = None, usage: tuple[int, int] | None = None) -> bytes:
    value: dict[str, Any] = {
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}],
    }
    if usage is not None:
        value = {"model": "m", "choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


END = event(finish="length") + event(usage=(7, 3)) + b"data: [DONE]\n\n"
WHOLE = HEAD + event("a") + event("b") + event("c") + END


def shot(url: str, index: int = 0, body: bytes = b"{}") -> Shot:
    return Shot(
        index=index,
        url=url + "/v1/chat/completions",
        endpoint=url + "/v1",
        headers={"Content-Type": "application/json"},
        body=body,
        isl=7,
        osl=3,
        kv=0,
    )


async def one(url: str, limits: Limits | None = None, **options: Any) -> RequestRecord:
    limits = limits or Limits()
    async with open_session(limits) as session:
        now = time.perf_counter_ns()
        return await send(session, shot(url), stream=0, t_sched_ns=now, t_free_ns=now, limits=limits, **options)


async def played(play: Play, limits: Limits | None = None, *, abort: bool = False, **options: Any) -> RequestRecord:
    async with playing(play, abort=abort) as server:
        return await one(server.url, limits, **options)


async def test_a_whole_stream_is_a_success_with_the_servers_counts() -> None:
    record = await played([(0, WHOLE)], keep_text=True)

    assert (
        record.error, record.prompt_tokens, record.completion_tokens, record.token_source, record.finish_reason,
        record.text,
    ) == (None, 7, 3, "usage", "length", "abc")  # fmt: skip
    assert (record.events, record.data_events) == (3, 6)


async def test_bytes_and_escapes_that_are_no_text_are_stored_as_replacement_characters() -> None:
    half = b'data: {"model":"m\\ud83d","choices":[{"index":0,"delta":{"content":"\xff"},"finish_reason":null}]}\n\n'

    record = await played([(0, HEAD + half + event("b") + event("c") + END)], keep_text=True)

    assert (None, "m\ufffd", "\ufffdbc") == (record.error, record.model, record.text)
    assert raw_bytes([record], {})


async def test_text_is_kept_only_where_the_protocol_says_so() -> None:
    assert (await played([(0, WHOLE)])).text is None


async def test_stamps_are_when_bytes_came() -> None:
    play = [(0.1, HEAD), (0.1, event("a")), (0.15, event("b")), (0.15, event("c") + END)]

    record = await played(play)

    assert pytest.approx(ttft_s(record), abs=0.02) == 0.2
    assert pytest.approx(tpot_s(record), abs=0.02) == 0.15
    assert record.t_send_ns is not None
    assert record.t_headers_ns is not None
    assert pytest.approx((record.t_headers_ns - record.t_send_ns) / 1e9, abs=0.02) == 0.1
    assert 0 <= dispatch_s(record) < 0.05  # type: ignore[operator]


async def test_a_role_only_event_is_no_first_token() -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'

    record = await played([(0, HEAD + role), (0.1, event("a") + END)])

    assert pytest.approx(ttft_s(record), abs=0.02) == 0.1


async def test_an_http_error_keeps_its_body() -> None:
    body = b'{"error":{"message":"no such model","type":"NotFoundError","code":404}}'
    head = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    record = await played([(0, head + body)])

    assert (record.error, record.http_status) == ("http_error", 404)
    assert "no such model" in record.error_detail
    assert record.completion_tokens is None


@pytest.mark.parametrize(
    ("play", "error"),
    [
        ([(0, HEAD + event("a") + event("b"))], "incomplete_stream"),
        ([(0, HEAD + b'data: {"error":{"message":"engine stopped"}}\n\ndata: [DONE]\n\n')], "in_band_error"),
        ([(0, HEAD + event("a") + b"data: {not json}\n\n" + END)], "protocol_error"),
        ([(0, HEAD)], "incomplete_stream"),
        ([(0, b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere.example/\r\nContent-Length: 0\r\n\r\n")], "redirect"),
        ([(0, b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\nhello")], "bad_content_type"),
        ([(0, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 24\r\n\r\n"
              b'{"error":{"message":"x"}}')], "in_band_error"),
        ([(0, b"SMTP ready\r\n\r\n")], "protocol_error"),
        ([(0, b"")], "disconnected"),
    ],
)  # fmt: skip
async def test_every_bad_end_has_its_class_and_is_no_success(play: Play, error: str) -> None:
    if error == "in_band_error" and b"Content-Length: 24" in play[0][1]:
        play = [(0, play[0][1].replace(b"Content-Length: 24", b"Content-Length: 25"))]

    record = await played(play)

    assert error == record.error, record.error_detail
    assert not record.ok
    assert record.completion_tokens is None


async def test_a_reset_in_mid_stream_is_a_lost_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = event("a")

    record = await played([(0, head + b"%x\r\n%s\r\n" % (len(data), data)), (0.05, b"")], abort=True)

    assert "disconnected" == record.error
    assert record.t_first_ns is not None


async def test_a_chunked_body_without_its_last_chunk_is_a_lost_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = event("a")

    record = await played([(0, head + b"%x\r\n%s\r\n" % (len(data), data))])

    assert "disconnected" == record.error


async def test_a_lost_connection_after_the_finish_reason_and_usage_is_harmless() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = event("a") + event("b") + event("c") + END

    record = await played([(0, head + b"%x\r\n%s\r\n" % (len(data), data))])

    assert (record.error, record.completion_tokens) == (None, 3)


async def test_a_refused_connection_is_a_record() -> None:
    async with playing([(0, WHOLE)]) as server:
        url = server.url
    record = await one(url)

    assert "connect_error" == record.error
    assert record.t_send_ns is None


@pytest.mark.parametrize(
    ("limits", "phase"),
    [
        (Limits(first_token_s=0.1), "first_token_s = 0.1"),
        (Limits(idle_s=0.1), "idle_s = 0.1"),
        (Limits(request_timeout_s=0.3), "request_timeout_s = 0.3"),
    ],
)
async def test_a_timeout_names_its_limit(limits: Limits, phase: str) -> None:
    silent_first = phase.startswith("first")
    play = [(0.0, HEAD), (5.0 if silent_first else 0.0, event("a")), (5.0, event("b") + END)]

    started = time.perf_counter()
    record = await played(play, limits)

    assert "timeout" == record.error
    assert phase in record.error_detail
    assert time.perf_counter() - started < 2.0


async def test_a_server_that_never_answers_hits_the_first_token_limit() -> None:
    record = await played([(5.0, HEAD)], Limits(first_token_s=0.1))

    assert "timeout" == record.error


async def test_a_stream_longer_than_any_default_limit_goes_on() -> None:
    """Case B16, the clock scaled: the whole takes seven times the idle limit, and no total limit cuts it."""
    play = [(0, HEAD), *[(0.1, event(str(i))) for i in range(10)], (0.1, END)]

    record = await played(play, Limits(idle_s=0.15))

    assert record.ok
    async with open_session(Limits()) as session:
        assert session.timeout.total is None


async def test_a_giant_event_is_read_whole() -> None:
    """Case B09: one data line of 700,000 characters."""
    recipe = json.loads((CASES / "B09.recipe.json").read_text())
    expected = json.loads((CASES / "expected.json").read_text())["B09"]["expect"]
    body = (recipe["head"] + recipe["repeat"] * recipe["times"] + recipe["tail"]).encode()
    assert recipe["total_bytes"] == len(body)

    record = await played([(0, HEAD + body)], keep_text=True)

    assert (None, expected["text_length"]) == (record.error, len(record.text or ""))
    assert (expected["prompt_tokens"], expected["completion_tokens"]) == (
        record.prompt_tokens,
        record.completion_tokens,
    )


async def test_concurrency_is_what_the_server_sees() -> None:
    """Case B14: 150 requests at once are 150 open at once, not the 100 of a default connection pool."""
    play = [(1.0, WHOLE)]
    flight = Flight()
    async with playing(play) as server, open_session(Limits()) as session:

        async def fire(index: int, stream: int, t_ns: int) -> RequestRecord:
            return await send(
                session, shot(server.url, index), stream=stream, t_sched_ns=t_ns, t_free_ns=t_ns, limits=Limits()
            )

        started = time.perf_counter()
        await closed(150, 150, fire, flight)
        wall_s = time.perf_counter() - started

        assert 150 == server.max_open
    assert 150 == flight.max_in_flight
    assert all(r.ok for r in flight.records)
    assert wall_s < 1.8


async def test_a_kept_connection_that_the_server_closed_fails_no_request() -> None:
    """Case B15 in small: cells of four requests, with pauses around the server's idle limit."""
    length = len(WHOLE) - len(HEAD)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % length
    play = [(0, head + WHOLE[len(HEAD) :])]
    records: list[RequestRecord] = []
    async with playing(play, keep_alive=True, idle_s=0.2) as server, open_session(Limits()) as session:
        for cell in range(8):
            flight = Flight()

            async def fire(index: int, stream: int, t_ns: int) -> RequestRecord:
                return await send(
                    session, shot(server.url, index), stream=stream, t_sched_ns=t_ns, t_free_ns=t_ns, limits=Limits()
                )

            await closed(4, 2, fire, flight)
            records += flight.records
            await asyncio.sleep(0.17 + 0.01 * cell)

    assert sum(r.ok for r in records) == 32
    assert all(ttft_s(r) < 0.1 for r in records)  # type: ignore[operator]


async def test_connections_that_die_as_they_are_used_again_cost_a_new_send_and_never_a_request() -> None:
    """As llama.cpp does: the answer says keep-alive, and the server hangs up on whatever comes next."""
    length = len(WHOLE) - len(HEAD)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % length

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        await asyncio.sleep(0.02)
        writer.write(head + WHOLE[len(HEAD) :])
        await reader.readuntil(b"\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    flight = Flight()
    async with server, open_session(Limits()) as session:

        async def fire(index: int, stream: int, t_ns: int) -> RequestRecord:
            return await send(
                session, shot(url, index), stream=stream, t_sched_ns=t_ns, t_free_ns=t_ns, limits=Limits()
            )

        await closed(12, 4, fire, flight)

    assert 12 == sum(r.ok for r in flight.records)
    assert {1} == {r.attempts for r in flight.records if r.index < 4}
    assert all(2 <= r.attempts <= 5 for r in flight.records if r.index >= 4)
    assert all(0.02 <= ttft_s(r) < 0.1 for r in flight.records)  # type: ignore[operator]


async def test_a_connection_lost_after_real_work_is_a_failure_and_is_not_sent_again() -> None:
    """As a balancer's time limit cuts it: a kept connection, no header yet, and seconds of the server's work."""
    length = len(WHOLE) - len(HEAD)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % length
    got = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(head + WHOLE[len(HEAD) :])
        await reader.readuntil(b"\r\n\r\n{}")
        got += 1
        await asyncio.sleep(1.2)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, open_session(Limits()) as session:
        records = [
            await send(session, shot(url, i), stream=0, t_sched_ns=0, t_free_ns=0, limits=Limits()) for i in range(2)
        ]

    assert [None, "disconnected"] == [r.error for r in records]
    assert 1 == got
    assert 1 == records[1].attempts


async def test_a_closed_loop_draws_requests_in_order_and_keeps_n_in_flight() -> None:
    flight = Flight()
    begun: list[int] = []

    async def fire(index: int, stream: int, t_ns: int) -> RequestRecord:
        from samples import record_with

        begun.append(index)
        await asyncio.sleep(0.005)
        return record_with(index=index, stream=stream)

    await closed(10, 3, fire, flight)

    assert list(range(10)) == begun
    assert 3 == flight.max_in_flight
    assert {0, 1, 2} == {r.stream for r in flight.records}


async def test_a_cancelled_cell_keeps_what_had_ended() -> None:
    flight = Flight()

    async def fire(index: int, stream: int, t_ns: int) -> RequestRecord:
        from samples import record_with

        await asyncio.sleep(0.01 if index < 4 else 60)
        return record_with(index=index)

    task = asyncio.create_task(closed(10, 2, fire, flight))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert {0, 1, 2, 3} == {r.index for r in flight.records}
