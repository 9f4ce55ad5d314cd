"""A session from its first grid to its last: idle gate, measure, cold or warm by boot, interleave, resume."""

from __future__ import annotations

import asyncio
import secrets
import signal as signals
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from typing import Protocol as Interface

import aiohttp
import orjson

from benchkit import MEASUREMENT, __version__
from benchkit.arm import Arm, arm_hash, parse_arm
from benchkit.load.endpoint import Shot, open_session, send
from benchkit.load.host import host_facts, now_utc
from benchkit.load.plan import Plan, Step
from benchkit.load.server import Server, completion_url
from benchkit.load.shapes import Flight, closed
from benchkit.load.watch import Watch, watching
from benchkit.protocol import Cell, Protocol, parse_protocol
from benchkit.record import CellRecord, RequestRecord, Run, new_id
from benchkit.workload.random import Body, Vocabulary, bodies, prompt_words, prompts_digest, token_ids


class Sink(Interface):
    """Where a session's results go, and what it must know of earlier ones."""

    def served(self, protocol_hash: str, boot_id: str) -> bool:
        """Whether a boot has already served a grid of this protocol, in any invocation."""

    def boot_seen(self, boot_id: str) -> bool:
        """Whether a boot is known to have served anything."""

    def run_started(self, run: Run) -> None:
        """A grid begins; the run has no cells yet."""

    def cell_started(self, run: Run, cell: Cell, n: int, flight: Flight) -> None:
        """A cell begins; `flight` fills while it is measured."""

    def cell_done(
        self, run: Run, index: int, cell: Cell, records: Sequence[RequestRecord], facts: Mapping[str, Any]
    ) -> CellRecord:
        """A cell is measured: keep it, durably, before the next one begins."""

    def cell_interrupted(self, run: Run, index: int, cell: Cell, records: Sequence[RequestRecord]) -> None:
        """A cell was cut short: what had ended is kept aside."""

    def run_done(self, run: Run) -> None:
        """A grid is complete, or will never be."""

    def planned(self, requests: int) -> None:
        """The session will send so many requests more (or, if negative, fewer) than was thought."""

    def say(self, text: str) -> None:
        """One line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A run that an earlier invocation of this session began: the cells it has, by their place in the grid."""

    run: Run
    cells: Mapping[int, CellRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Station:
    """An arm, ready to be measured."""

    arm: Arm
    text: str
    server: Server
    hash: str
    server_facts: dict[str, Any]
    vocabulary: Vocabulary
    digest: str
    boot: str | None  # which boot all this was learnt of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    plan: Plan
    protocol: Protocol
    stations: list[_Station]
    measured: aiohttp.ClientSession
    host: dict[str, Any]
    sink: Sink


async def run_session(
    plan: Plan,
    sink: Sink,
    *,
    done: frozenset[tuple[int, str]] = frozenset(),
    begun: Sequence[Begun] = (),
) -> None:
    """Measures every step of a plan that is not done yet.

    Args:
        plan: the session.
        sink: takes each cell as it is done.
        done: (slot, grid) of the runs that earlier invocations completed.
        begun: runs that earlier invocations began.

    Raises:
        EndpointUnfit: an arm cannot be reached, or cannot be measured.
        BadInput: the prompts cannot be built as asked.
    """
    task = asyncio.current_task()
    if task is not None:  # SIGTERM ends a session as Ctrl-C does, also where a script made SIGINT deaf
        asyncio.get_running_loop().add_signal_handler(signals.SIGTERM, task.cancel)
    protocol = parse_protocol(plan.protocol_text)
    arms = [parse_arm(text) for text in plan.arm_texts]
    async with aiohttp.ClientSession(trust_env=False) as control, open_session(protocol.limits) as measured:
        stations = []
        for arm, text in zip(arms, plan.arm_texts, strict=True):
            stations.append(await _station(protocol, arm, text, Server(arm, control)))
        session = _Session(
            plan=plan,
            protocol=protocol,
            stations=stations,
            measured=measured,
            host=host_facts(),
            sink=sink,
        )
        for step in plan.steps:
            if (step.slot, step.grid) not in done:
                await _step(session, step, begun)


async def _station(protocol: Protocol, arm: Arm, text: str, server: Server) -> _Station:
    boot = await server.boot_id()
    told, outcomes = await server.identify()
    vocabulary, source = await server.vocabulary(protocol)
    ids = protocol.workload.send == "ids"
    server.body(protocol, [0] if ids else "", max_tokens=1)  # a question that this API cannot carry fails here
    grid = ((cell, bodies(protocol.workload, cell, _n(protocol, cell), vocabulary)) for cell in protocol.cells)
    return _Station(
        arm=arm,
        text=text,
        server=server,
        hash=arm_hash(arm, {"engine": server.engine, **told}),
        server_facts={
            "engine": server.engine,
            "told": told,
            "outcomes": outcomes,
            "max_tokens_field": server.max_tokens_field,
            "tokenizer": source,
            "template_tokens": vocabulary.template_tokens,
            "probe_requests": server.probes,
        },
        vocabulary=vocabulary,
        digest=prompts_digest(protocol.workload, vocabulary, grid),
        boot=boot,
    )


def _n(protocol: Protocol, cell: Cell) -> int:
    return protocol.load.requests_at(cell.concurrency)


async def _step(session: _Session, step: Step, begun: Sequence[Begun]) -> None:
    """One step of the plan; before a warm one, the cold grid that a fresh boot owes."""
    sink = session.sink
    boot = await session.stations[step.arm].server.boot_id(patient=True)
    station = await _current(session, step.arm, boot)
    here = (boot, station.hash, station.digest, session.protocol.hash, MEASUREMENT)
    for earlier in begun:
        run = earlier.run
        if run.slot != step.slot:
            continue
        if (run.boot_id, run.arm_hash, run.prompts_digest, run.protocol_hash, run.measurement) == here:
            await _grid(session, station, run, earlier.cells)
            if run.grid == step.grid:
                return
        elif earlier.cells:
            sink.say(f"{run.arm}: not the server that began {run.id}; its cells are kept as an incomplete run")
            cells = tuple(earlier.cells[i] for i in sorted(earlier.cells))
            sink.planned(sum(c.n for c in cells))
            sink.run_done(replace(run, cells=cells, complete=False, ended_at=now_utc()))
    first = boot is not None and not sink.served(session.protocol.hash, boot)
    if step.grid == "cold" and boot is not None and not first:
        sink.say(f"{station.arm.name}: this boot has already served the protocol; its cold grid is not run again")
        sink.planned(-session.protocol.requests_per_grid)
        return
    if step.grid == "warm" and first:
        sink.say(f"{station.arm.name}: first grid on this boot: recorded as cold, the warm one follows")
        sink.planned(session.protocol.requests_per_grid)
        await _grid(session, station, await _begin(session, station, replace(step, grid="cold"), boot))
    await _grid(session, station, await _begin(session, station, step, boot))


async def _current(session: _Session, arm: int, boot: str | None) -> _Station:
    """The arm as it is now: what was learnt of a server is learnt anew when it has restarted."""
    station = session.stations[arm]
    if boot == station.boot:
        return station
    fresh = await _station(session.protocol, station.arm, station.text, station.server)
    session.stations[arm] = fresh
    if fresh.hash != station.hash:
        session.sink.say(f"{station.arm.name}: restarted as another version or with other flags; its reps do not pool")
    return fresh


async def _begin(session: _Session, station: _Station, step: Step, boot: str | None) -> Run:
    cold_of = None
    if step.grid == "cold":
        counters = await station.server.counters()
        worked = any(counters.get(name) for name in ("requests_done", "prompt_tokens", "generation_tokens"))
        seen = boot is None or station.server.probes > 0 or session.sink.boot_seen(boot)
        cold_of = "protocol" if worked or seen else "boot"
    started = now_utc()
    run = Run(
        id=new_id("run", started),
        session=session.plan.session,
        protocol=session.protocol.name,
        protocol_hash=session.protocol.hash,
        protocol_text=session.plan.protocol_text,
        arm=station.arm.name,
        arm_hash=station.hash,
        arm_text=station.text,
        grid=step.grid,
        cold_of=cold_of,
        rep=step.rep,
        block=step.block,
        slot=step.slot,
        boot_id=boot,
        complete=False,
        prompts_digest=station.digest,
        measurement=MEASUREMENT,
        client_version=__version__,
        started_at=started,
        ended_at="",
        command=session.plan.command,
        host=session.host,
        server=station.server_facts,
        note=session.plan.note,
        cells=(),
    )
    session.sink.run_started(run)
    return run


async def _grid(session: _Session, station: _Station, run: Run, have: Mapping[int, CellRecord] | None = None) -> None:
    """Measures the cells of a begun run that are missing, then hands the whole run over.

    Args:
        session: what the run belongs to.
        station: its arm.
        run: the run without cells.
        have: cells that an earlier invocation measured; None for a run that begins now.
    """
    # An interrupted cell's prompts may be in the prefix cache: prompts sent again need another nonce.
    salt = "" if have is None else secrets.token_hex(4)
    cells: list[CellRecord] = []
    for index, cell in enumerate(session.protocol.cells):
        known = (have or {}).get(index)
        cells.append(known or await _cell(session, station, run, index, cell, salt))
    session.sink.run_done(replace(run, cells=tuple(cells), complete=True, ended_at=now_utc()))


async def _cell(session: _Session, station: _Station, run: Run, index: int, cell: Cell, salt: str) -> CellRecord:
    protocol, server, sink = session.protocol, station.server, session.sink
    n = _n(protocol, cell)
    shots = [
        _shot(protocol, station, run.id + salt, cell, i, body)
        for i, body in enumerate(bodies(protocol.workload, cell, n, station.vocabulary))
    ]
    await server.reach()
    idle, signal, idle_since_ns = await _idle_gate(session, station)
    boot_before = await server.boot_id()
    before = await server.counters()
    flight = Flight()
    sink.cell_started(run, cell, n, flight)

    async def fire(i: int, stream: int, t_ns: int) -> RequestRecord:
        return await send(
            session.measured,
            shots[i],
            stream=stream,
            t_sched_ns=t_ns,
            t_free_ns=t_ns,
            limits=protocol.limits,
            keep_text=protocol.record.text,
            keep_events=protocol.record.events,
        )

    started, rested_s = now_utc(), (time.perf_counter_ns() - idle_since_ns) / 1e9
    try:
        async with watching(server) as watch:
            await closed(n, cell.concurrency, fire, flight)
    except BaseException:
        sink.cell_interrupted(run, index, cell, sorted(flight.records, key=lambda r: r.index))
        raise
    facts = {
        "model": station.arm.model,
        "prefix": protocol.workload.prefix,
        "template_tokens": station.vocabulary.template_tokens,
        "started_at": started,
        "resumed": bool(salt),
        "idle": idle,
        "idle_signal": signal,
        "rested_s": rested_s,
        "boot_before": boot_before,
        "server_before": before,
        "server_after": {},
        "boot_after": None,
        "max_in_flight": flight.max_in_flight,
        **_watched(watch),
    }
    records = sorted(flight.records, key=lambda r: r.index)
    try:
        facts["server_after"] = await server.counters(settled=True)
        facts["boot_after"] = await server.boot_id()
    except asyncio.CancelledError:
        sink.cell_done(run, index, cell, records, facts)  # every request has ended: the cell is whole
        raise
    return sink.cell_done(run, index, cell, records, facts)


def _watched(watch: Watch) -> dict[str, Any]:
    return {
        "peaks": dict(sorted(watch.peaks.items())),
        "gauge_samples": watch.samples,
        "client_lag_p99_ms": watch.lag_p99_ms,
        "client_lag_max_ms": max(watch.lags_ms, default=None),
    }


async def _idle_gate(session: _Session, station: _Station) -> tuple[bool | None, str | None, int]:
    """Waits until every arm of the session is idle, since they may share a machine, then lets it rest.

    Returns:
        Whether all were idle (None without a signal), the signal of this arm, and when that was seen, in ns.
    """
    idle, signal = None, None
    if session.protocol.grids.idle_gate:
        for other in session.stations:
            found, by = await other.server.wait_idle()
            if other is station:
                signal = by
            if found is False or (other is station and idle is None):
                idle = found
    since_ns = time.perf_counter_ns()
    await asyncio.sleep(session.protocol.grids.cooldown_s)
    return idle, signal, since_ns


def _shot(protocol: Protocol, station: _Station, sent_by: str, cell: Cell, index: int, body: Body) -> Shot:
    text = prompt_words(protocol.workload, station.vocabulary, sent_by, cell, index, body)
    prompt = token_ids(station.vocabulary, text) if protocol.workload.send == "ids" else text
    endpoint = station.arm.endpoints[index % len(station.arm.endpoints)]
    return Shot(
        index=index,
        url=completion_url(station.arm, endpoint),
        endpoint=endpoint,
        headers=station.server.headers,
        body=orjson.dumps(station.server.body(protocol, prompt, max_tokens=body.osl)),
        isl=body.isl,
        osl=body.osl,
        kv=cell.kv,
        secrets=station.server.secrets,
    )
