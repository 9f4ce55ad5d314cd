"""The flags of a cell: what is doubtful about its numbers, and which doubts keep a run from being banked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchkit.metrics import counter_moved, stream_decode_tok_per_s
from benchkit.protocol import Protocol
from benchkit.record import CellRecord, RequestRecord, Run

RULES = 2
"""Raised whenever a rule is added or changes; stored with what `bank` accepted."""

NEVER_WAIVED = frozenset({"cold", "incomplete", "no_success"})
"""Flags that no reason can lift: such a run is shown, never cited."""

FLAGS: Mapping[str, tuple[str, str]] = {
    "cold": ("blocks, never waived", "first grid of this protocol on this boot of the server"),
    "incomplete": ("blocks, never waived", "the grid was interrupted and could not be completed on the same boot"),
    "no_success": ("blocks, never waived", "not one request of the cell succeeded"),
    "errors": ("blocks above limits.error_rate", "requests failed; the classes and counts are named"),
    "truncated_stream": ("blocks", "streams ended without a finish_reason, or the connection was lost in mid-answer"),
    "usage_missing": ("blocks", "answers without usage: their tokens are unknown, and are not guessed"),
    "short_output": ("blocks", "answers of another length than asked, though ignore_eos was set"),
    "isl_drift": ("blocks", "the server counted prompts more than 2 % longer or shorter than asked, or cut them"),
    "prefix_contaminated": ("blocks", "more than 1 % of unique prompts' tokens came from the prefix cache"),
    "impossible_rate": ("blocks", "more than 8 tokens arrived all at once, or a stream was faster than max_tok_per_s"),
    "client_limited": ("blocks", "the client's own event loop lagged more than limits.client_lag_ms at p99"),
    "foreign_load": ("blocks", "the server was busy before the cell, or finished requests that are not ours"),
    "server_restarted": ("blocks", "the server's boot changed during the run, or its counters ran backwards"),
    "model_mismatch": ("blocks", "another model answered than was asked"),
    "timeouts": ("footnote", "requests hit a limit of the protocol"),
    "few_requests": ("footnote", "fewer than two requests per stream"),
    "empty_output": ("footnote", "answers of no tokens"),
    "preempted": ("footnote", "the server preempted requests"),
    "boot_unknown": ("footnote", "the server does not tell its boot; the plan's word on warm is taken"),
    "resumed": ("footnote", "the grid was interrupted before this cell, and taken up again on the same boot"),
    "prefix_cached": ("footnote", "prompts were sent as they are, and part of them came from the prefix cache"),
    "reconnected": ("footnote", "a kept connection was dead; the request was sent again before any byte came"),
    "assumed_uncached": ("footnote", "the server does not tell cached tokens; unique prompts are taken as uncached"),
    "assumed_n1": ("footnote", "the first event is taken to carry one token; the server does not say"),
    "spread_tokens": ("footnote", "tokens of later events are spread evenly in windowed rates"),
    "coalesced_events": ("footnote", "events carry several tokens: they are not tokens here"),
}
"""Every flag: what it does to banking, and what it means."""

ISL_TOLERANCE = 0.02
CONTAMINATION_TOLERANCE = 0.01
CACHE_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One doubt about a cell. A blocking one keeps the run from being banked until it is waived."""

    name: str
    blocking: bool
    detail: str


@dataclass(frozen=True, slots=True)
class _Case:
    protocol: Protocol
    run: Run
    cell: CellRecord
    records: Sequence[RequestRecord]

    @property
    def good(self) -> list[RequestRecord]:
        return [r for r in self.records if r.ok]


_Rule = Callable[[_Case], Iterator[Flag]]


def cell_flags(protocol: Protocol, run: Run, cell: CellRecord, records: Sequence[RequestRecord]) -> tuple[Flag, ...]:
    """Every flag of a cell, blocking ones first, computed from its records and the run's facts."""
    case = _Case(protocol, run, cell, records)
    flags = [flag for rule in _RULES for flag in rule(case)]
    return tuple(sorted(flags, key=lambda f: not f.blocking))


def _blocks(name: str, detail: str) -> Flag:
    return Flag(name=name, blocking=True, detail=detail)


def _notes(name: str, detail: str) -> Flag:
    return Flag(name=name, blocking=False, detail=detail)


def _grid(case: _Case) -> Iterator[Flag]:
    if case.run.grid == "cold":
        yield _blocks("cold", f"first grid of this protocol on this boot (of {case.run.cold_of})")
    elif case.run.boot_id is None:
        yield _notes("boot_unknown", "the server does not tell its boot; taken as warm on the plan's word")
    if case.cell.facts.get("resumed"):
        yield _notes("resumed", "the grid was interrupted before this cell, and taken up again")
    if not case.run.complete:
        yield _blocks("incomplete", "cells of the grid were never measured")


def _outcomes(case: _Case) -> Iterator[Flag]:
    failed = Counter(r.error for r in case.records if r.error)
    if not case.good:
        yield _blocks("no_success", f"0 of {len(case.records)} requests succeeded")
    if failed:
        limit = case.protocol.limits.error_rate
        rate = failed.total() / len(case.records)
        detail = f"{failed.total()} of {len(case.records)} failed: " + ", ".join(
            f"{name} {count}" for name, count in sorted(failed.items(), key=lambda f: str(f[0]))
        )
        first = next(r for r in case.records if r.error)
        status = f"status {first.http_status}, " if first.http_status not in (None, 200) else ""
        words = " ".join(first.error_detail.split())
        detail += f"; the first: {status}{words if len(words) <= 160 else words[:157] + '…'}"
        yield Flag(name="errors", blocking=rate > limit, detail=detail)
    cut = sum(r.error == "incomplete_stream" or (r.error == "disconnected" and r.events > 0) for r in case.records)
    if cut:
        yield _blocks("truncated_stream", f"{cut} ended without a finish_reason")
    if failed["timeout"]:
        yield _notes("timeouts", f"{failed['timeout']} hit a limit of the protocol")
    retried = sum(r.attempts > 1 for r in case.records)
    if retried:
        yield _notes("reconnected", f"{retried} sent again: the kept connection was dead before any answer")


def _tokens(case: _Case) -> Iterator[Flag]:
    good = case.good
    blind = sum(r.completion_tokens is None or r.prompt_tokens is None for r in good)
    if blind:
        yield _blocks("usage_missing", f"{blind} of {len(good)} answers without usage: tokens unknown")
    counted = [r for r in good if r.completion_tokens is not None]
    if case.protocol.workload.ignore_eos:
        short = [r for r in counted if r.completion_tokens != r.asked_osl]
        if short:
            worst = min(short, key=lambda r: (r.completion_tokens or 0) / r.asked_osl)
            yield _blocks(
                "short_output",
                f"{len(short)} of {len(counted)} answers not of the length asked "
                f"(worst {worst.completion_tokens} of {worst.asked_osl})",
            )
    empty = sum(r.completion_tokens == 0 for r in counted)
    if empty:
        yield _notes("empty_output", f"{empty} answers of 0 tokens")
    drifts = [
        (r.prompt_tokens - asked) / asked for r in good if r.prompt_tokens is not None and (asked := r.kv + r.asked_isl)
    ]
    off = [d for d in drifts if abs(d) > ISL_TOLERANCE]
    if off:
        worst_drift = max(off, key=abs)
        yield _blocks(
            "isl_drift",
            f"{len(off)} of {len(drifts)} prompts off by more than {ISL_TOLERANCE:.0%} (worst {worst_drift:+.1%})",
        )


def _prefix(case: _Case) -> Iterator[Flag]:
    if not case.good:
        return
    if case.protocol.workload.prefix != "unique":
        cached = sum(r.cached_tokens or 0 for r in case.good)
        if cached:
            share = f"{cached / sum(r.prompt_tokens or 0 for r in case.good):.1%}"
            yield _notes("prefix_cached", f"{share} of the prompt tokens came from the prefix cache")
        return
    # The template's head is the same in every prompt: what a cache holds of it is no contamination.
    head = -(-int(case.cell.facts.get("template_tokens") or 0) // CACHE_BLOCK_TOKENS) * CACHE_BLOCK_TOKENS
    told = [r for r in case.good if r.cached_tokens is not None and r.prompt_tokens]
    hits: float = sum(max(0, (r.cached_tokens or 0) - head) for r in told)
    asked: float = sum(r.prompt_tokens or 0 for r in told)
    if len(told) < len(case.good):
        yield _notes("assumed_uncached", "the server does not tell cached tokens; unique prompts are taken as uncached")
    if not told:  # the server's own counters know more than its usage tells
        hits = max(0.0, (counter_moved(case.cell.facts, "prefix_hits") or 0) - head * len(case.records))
        asked = counter_moved(case.cell.facts, "prefix_queries") or 0
    if asked and hits / asked > CONTAMINATION_TOLERANCE:
        share = f"{hits / asked:.1%}"
        yield _blocks("prefix_contaminated", f"{share} of the prompt tokens came from the prefix cache")


def _rates(case: _Case) -> Iterator[Flag]:
    at_once = sum((r.completion_tokens or 0) > 8 and r.t_first_ns == r.t_last_ns for r in case.good)
    if at_once:
        yield _blocks("impossible_rate", f"{at_once} answers came all at once: no decode time can be seen")
    bound = case.protocol.limits.max_tok_per_s
    if bound:
        fast = [v for r in case.good if (v := stream_decode_tok_per_s(r)) is not None and v > bound]
        if fast:
            yield _blocks("impossible_rate", f"{len(fast)} streams above {bound:g} tok/s (fastest {max(fast):.0f})")
    known = [r for r in case.good if r.completion_tokens]
    tokens, events = sum(r.completion_tokens or 0 for r in known), sum(r.events for r in known)
    if events and tokens > 1.05 * events:
        yield _notes("coalesced_events", f"{tokens / events:.2f} tokens per event: events are not tokens here")
    if any(r.first_event_tokens is None for r in known):
        yield _notes("assumed_n1", "the first event is taken to carry one token; the server does not say")
    if any(r.event_tokens is None and r.event_ns for r in known):
        yield _notes("spread_tokens", "tokens of later events spread evenly in windowed rates")


def _harness(case: _Case) -> Iterator[Flag]:
    lag = case.cell.facts.get("client_lag_p99_ms")
    if lag is not None and lag > case.protocol.limits.client_lag_ms:
        yield _blocks(
            "client_limited",
            f"the client lagged {lag:.1f} ms (p99), above {case.protocol.limits.client_lag_ms:g} ms",
        )
    n, concurrency = len(case.records), case.cell.cell.concurrency
    if n < 2 * concurrency:
        yield _notes("few_requests", f"{n} requests for {concurrency} streams")


def _server(case: _Case) -> Iterator[Flag]:
    facts = case.cell.facts
    before, after = facts.get("server_before") or {}, facts.get("server_after") or {}
    if facts.get("idle") is False:
        yield _blocks("foreign_load", "the server was not idle before the cell")
    elif (finished := counter_moved(facts, "requests_done")) is not None:
        # Those that never reached the engine are in no counter of it, so they must not hide others.
        ours = sum(r.http_status in (None, 200) and r.t_send_ns is not None for r in case.records)
        foreign = finished - ours
        if foreign > 0:
            yield _blocks("foreign_load", f"the server finished {foreign:.0f} requests that are not ours")
    told = {facts.get("boot_before"), facts.get("boot_after")} - {None}
    fell = sorted(name for name in before if name in after and after[name] < before[name])
    if len(told | ({case.run.boot_id} - {None})) > 1:
        yield _blocks("server_restarted", "the server's boot changed during the run")
    elif fell:
        yield _blocks("server_restarted", f"counters of the server ran backwards: {', '.join(fell)}")
    elif told and case.run.boot_id is None:
        yield _blocks("server_restarted", "the server's boot was not known when the grid began, and is now")
    asked = facts.get("model")
    others = sorted({r.model for r in case.good if r.model is not None and asked and r.model != asked})
    if others:
        yield _blocks("model_mismatch", f"asked for {asked}, answered by {', '.join(others)}")
    if preemptions := counter_moved(facts, "preemptions"):
        yield _notes("preempted", f"{preemptions:.0f} preemptions")


_RULES: tuple[_Rule, ...] = (_grid, _outcomes, _tokens, _prefix, _rates, _harness, _server)
