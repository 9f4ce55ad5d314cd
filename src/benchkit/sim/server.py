"""The simulated endpoint over HTTP: routes, and the loop that does what the engine's model says when it is due."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import orjson
from aiohttp import web

from benchkit.sim.engine import Engine, block_keys
from benchkit.sim.events import Answer, Wanted, error_body
from benchkit.sim.exposition import metrics_text
from benchkit.sim.profile import FAULTS, Profile
from benchkit.sim.reply import FAULT_MESSAGE, StreamReply, WholeReply
from benchkit.sim.requests import (
    Refusal,
    chat_ids,
    check_model,
    checked_ids,
    prompt_to_ids,
    read_object,
    read_wanted,
    text_ids,
)
from benchkit.sim.tokens import WORDS, ToyTokenizer

VERSION: Final = "sim-1"

# Timers of epoll are rounded up to the next millisecond. Waking earlier than that and polling the loop until
# the deadline puts events within tens of microseconds of it.
_POLL_NS: Final = 1_500_000
_HTTP_FAULTS: Final = {"http_429": "TooManyRequests", "http_500": "InternalServerError", "http_503": "Unavailable"}
_MAX_BODY_BYTES: Final = 1 << 30
_STREAM_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Server": "benchkit-sim"}
_JSON_HEADERS: Final = {"Content-Type": "application/json", "Server": "benchkit-sim"}


class Sim:
    """A listening simulated server; made by `running`, or by `serve` for a process of its own."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.url = ""
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tokenizer = ToyTokenizer()
        self._word_ids = [self._tokenizer.encode(word)[0] for word in WORDS]
        self._wake = asyncio.Event()
        self._boot_time_s = 0.0
        self._boot()
        self._pacing = asyncio.create_task(self._pace())
        self._pacing.add_done_callback(self._pacing_ended)
        self._runner: web.AppRunner | None = None

    async def listen(self, host: str, port: int) -> str:
        """Open the port (0 = any) and return the URL; OSError where it is taken."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        routes: list[web.RouteDef] = [
            web.get("/health", self._health),
            web.get("/version", self._version),
            web.get("/v1/models", self._models),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._text),
        ]
        if self.profile.metrics:
            routes.append(web.get("/metrics", self._metrics))
        if self.profile.tokenize:
            routes += [web.post("/tokenize", self._tokenize), web.post("/detokenize", self._detokenize)]
        app.add_routes(routes)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,  # a client that leaves frees its slot
            keepalive_timeout=self.profile.keepalive_s,
            shutdown_timeout=0.5,
        )
        await self._runner.setup()
        # The default backlog of 128 makes a burst of more connections wait for a retransmitted SYN.
        site = web.TCPSite(self._runner, host, port, backlog=4096)
        await site.start()
        bound_host, bound_port = self._runner.addresses[0][:2]
        self.url = f"http://{bound_host}:{bound_port}"
        return self.url

    def restart(self) -> None:
        """Be a fresh boot: new start time, counters at zero, caches empty, cold; answers under way are dropped."""
        for reply in list(self._replies.values()):
            reply.drop()
        self._boot()
        self._wake.set()

    async def close(self) -> None:
        """Drop what is under way and free the port."""
        for reply in list(self._replies.values()):
            reply.drop()
        if self._runner is not None:
            await self._runner.cleanup()
        self._pacing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pacing

    def _boot(self) -> None:
        # Two boots never share a start time, however fast they follow each other.
        self._boot_time_s = round(max(time.time(), self._boot_time_s + 0.001), 6)
        self._engine = Engine(self.profile)
        self._replies: dict[int, StreamReply | WholeReply] = {}
        self._max_lag_ns = 0
        self._requests = 0

    async def _pace(self) -> None:
        while True:
            due_ns = self._engine.due_ns()
            wait_ns = None if due_ns is None else due_ns - time.perf_counter_ns()
            if wait_ns is None or wait_ns > _POLL_NS:
                await self._sleep(wait_ns)
                continue
            if wait_ns <= 0:
                replies = self._replies
                for emission in self._engine.advance(time.perf_counter_ns()):
                    # A reply is missing where its client has left, or was dropped by a fault.
                    if (reply := replies.get(emission.sequence.index)) is not None:
                        reply.deliver(emission)
                        self._max_lag_ns = max(self._max_lag_ns, time.perf_counter_ns() - emission.at_ns)
            await asyncio.sleep(0)

    async def _sleep(self, wait_ns: int | None) -> None:
        """Until shortly before the deadline, or until a request arrives that may be due earlier."""
        self._wake.clear()
        timer = None
        if wait_ns is not None:
            timer = asyncio.get_running_loop().call_later((wait_ns - _POLL_NS) / 1e9, self._wake.set)
        await self._wake.wait()
        if timer is not None:
            timer.cancel()

    def _pacing_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.stopped.done():
            self.stopped.set_exception(error)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=True)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=False)

    async def _complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        raw = await request.read()
        arrival_ns = time.perf_counter_ns()
        try:
            wanted = await read_wanted(self.profile, self._tokenizer, read_object(raw), chat=chat)
        except Refusal as refusal:
            return _refused(refusal)
        self._requests += 1
        wanted = dataclasses.replace(wanted, fault=wanted.fault or self._fault_due())
        if wanted.fault in _HTTP_FAULTS:
            status = int(wanted.fault.removeprefix("http_"))
            body = error_body(FAULT_MESSAGE, status=status, kind=_HTTP_FAULTS[wanted.fault])
            return web.Response(body=body, status=status, headers=_JSON_HEADERS)
        answer = Answer(self.profile, wanted, number=self._requests, created=int(time.time()), word_ids=self._word_ids)
        if not wanted.stream:
            whole = WholeReply(self.profile, answer, wanted.fault)
            await self._generate(request, wanted, whole, arrival_ns)
            return web.Response(body=whole.body, headers=_JSON_HEADERS)
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        response.enable_chunked_encoding()
        writer = await response.prepare(request)
        assert writer is not None
        writer.send_headers()
        if request.transport is not None:
            stream = StreamReply(self.profile, answer, request.transport, wanted.fault)
            await self._generate(request, wanted, stream, arrival_ns)
        return response

    async def _generate(
        self, request: web.Request, wanted: Wanted, reply: StreamReply | WholeReply, arrival_ns: int
    ) -> None:
        """Run one request through the engine until its reply has ended; leaving early frees its place."""
        engine, replies = self._engine, self._replies
        caching = self.profile.prefix_caching
        sequence = engine.submit(
            arrival_ns=arrival_ns,
            prompt_tokens=len(wanted.prompt_ids),
            max_tokens=wanted.max_tokens,
            block_keys=block_keys(wanted.prompt_ids, self.profile.block_size) if caching else (),
            ignore_eos=wanted.ignore_eos,
        )
        replies[sequence.index] = reply
        self._wake.set()
        try:
            if await reply.ended == "drop" and request.transport is not None:
                request.transport.close()
        finally:
            del replies[sequence.index]
            engine.abort(sequence, reply.abort_reason)

    def _fault_due(self) -> str | None:
        for name in FAULTS:
            every = getattr(self.profile, f"fault_{name}_every")
            if every and self._requests % every == 0:
                return name
        return None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(headers={"Server": "benchkit-sim"})

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.profile.model,
            "object": "model",
            "created": int(self._boot_time_s),
            "owned_by": "benchkit-sim",
            "root": self.profile.model,
            "parent": None,
            "max_model_len": self.profile.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = metrics_text(self._engine, boot_time_s=self._boot_time_s, max_lag_s=self._max_lag_ns / 1e9)
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "Server": "benchkit-sim"}
        return web.Response(body=text.encode(), headers=headers)

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            body = read_object(await request.read())
            check_model(self.profile, body)
            if isinstance(content := body.get("content"), str):  # llama.cpp's form
                return _json({"tokens": await text_ids(self._tokenizer, content)})
            if "messages" in body:
                ids = await chat_ids(self.profile, self._tokenizer, body)
            else:
                ids = await prompt_to_ids(self._tokenizer, body.get("prompt"))
        except Refusal as refusal:
            return _refused(refusal)
        return _json(
            {"count": len(ids), "max_model_len": self.profile.max_model_len, "tokens": ids, "token_strs": None}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        try:
            body = read_object(await request.read())
            check_model(self.profile, body)
            text = self._tokenizer.decode(checked_ids(body.get("tokens"), param="tokens"))
        except Refusal as refusal:
            return _refused(refusal)
        return _json({"prompt": text, "content": text})  # vLLM's name, llama.cpp's name


@contextlib.asynccontextmanager
async def running(profile: Profile, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Sim]:
    """A server inside the running loop, listening at `.url`.

    It shares the interpreter with its client: for times that have to be right, start a process (`spawned`).
    """
    sim = Sim(profile)
    try:
        await sim.listen(host, port)
        yield sim
    finally:
        await sim.close()


def serve(
    profile: Profile,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] | None = None,
    until_stdin_closes: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP makes it a fresh boot. `ready` is told the URL once the port is open.

    `until_stdin_closes` ends it as well when whoever holds the other end of stdin is gone. Raises OSError for a
    port that cannot be had.
    """

    async def main() -> None:
        async with running(profile, host=host, port=port) as sim:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, _stop, sim)
            loop.add_signal_handler(signal.SIGHUP, sim.restart)
            if until_stdin_closes:
                stdin = sys.stdin.fileno()
                loop.add_reader(stdin, lambda: None if os.read(stdin, 4096) else _stop(sim))
            # A collection in the middle of a step would be late for all its events; what start-up made stays.
            gc.collect()
            gc.freeze()
            gc.set_threshold(100_000, 50, 50)
            if ready is not None:
                ready(sim.url)
            await sim.stopped

    asyncio.run(main())


def _stop(sim: Sim) -> None:
    if not sim.stopped.done():
        sim.stopped.set_result(None)


def _refused(refusal: Refusal) -> web.Response:
    return web.Response(body=refusal.body, status=refusal.status, headers=_JSON_HEADERS)


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), headers=_JSON_HEADERS)
