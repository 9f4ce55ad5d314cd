"""The glossary: every metric's name, unit, direction and formula, as pure functions of a cell's records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from benchkit.protocol import Cell, Slo
from benchkit.record import RequestRecord

NS = 1e9
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One entry of the glossary.

    `better` is None where neither direction is. `compare` says whether two arms differ by a ratio or, for
    shares and counts, by a plain difference. `per_request` metrics of a cell appear as `_mean`, `_p50`, `_p90`,
    `_p95`, `_p99` over its successes; the bare name is the p50.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"] | None
    compare: Literal["ratio", "difference"]
    per_request: bool
    formula: str


def _metrics(*rows: tuple[str, str, str, str, bool, str]) -> dict[str, Metric]:
    return {
        name: Metric(
            name=name,
            unit=unit,
            better=None if better == "-" else better,  # type: ignore[arg-type]
            compare=compare,  # type: ignore[arg-type]
            per_request=per_request,
            formula=formula,
        )
        for name, unit, better, compare, per_request, formula in rows
    }


GLOSSARY: Mapping[str, Metric] = _metrics(
    ("ttft_s", "s", "lower", "ratio", True, "t_first − t_send"),
    ("ttft_from_sched_s", "s", "lower", "ratio", True, "t_first − t_sched"),
    ("tpot_s", "s", "lower", "ratio", True, "(t_last − t_first) / (C − n1), for C > n1"),
    ("e2e_s", "s", "lower", "ratio", True, "t_last − t_send"),
    ("dispatch_s", "s", "lower", "ratio", True, "t_send − max(t_sched, t_free): the client's own delay"),
    ("stream_decode_tok_per_s", "tok/s", "higher", "ratio", True, "1 / tpot_s, TTFT excluded"),
    ("prompt_tokens", "tok", "-", "ratio", True, "P, as the server counts, template included"),
    ("completion_tokens", "tok", "-", "ratio", True, "C, from usage"),
    ("tpot_weighted_s", "s", "lower", "ratio", False, "Σ(t_last − t_first) / Σ(C − n1)"),
    ("icl_s", "s", "lower", "ratio", True, "gaps between output events, pooled over the cell"),
    ("itl_s", "s", "lower", "ratio", True, "gaps between tokens, pooled; only where tokens per event are known"),
    ("output_tok_per_s", "tok/s", "higher", "ratio", False, "ΣC / (max t_end − min t_send), TTFT included"),
    ("total_tok_per_s", "tok/s", "higher", "ratio", False, "Σ(P + C) / (max t_end − min t_send)"),
    ("req_per_s", "req/s", "higher", "ratio", False, "successes / (max t_end − min t_send)"),
    (
        "steady_output_tok_per_s", "tok/s", "higher", "ratio", False,
        "tokens arriving from the latest t_first of the first N requests to the first moment when fewer than N "
        "are in flight and none is left to send, over that time; null if shorter than 2 × median e2e",
    ),
    ("decode_tok_per_s", "tok/s", "higher", "ratio", False, "Σ(C − n1) / length of the union of [t_first, t_last]"),
    (
        "prefill_tok_per_s", "tok/s", "higher", "ratio", False,
        "requests = N released together: Σ(P − K) / (max t_first − min t_send); N = 1: median (P − K) / ttft_s",
    ),
    ("prefill_window_s", "s", "lower", "ratio", False, "requests = N released together: max t_first − min t_send"),
    (
        "serialization_ratio", "", "lower", "ratio", False,
        "(max t_first − min t_send) at N released together / (N × mean ttft_s of the c1 cell, same ISL, OSL, KV)",
    ),
    (
        "contention_band_min_tok_per_s", "tok/s", "higher", "ratio", False,
        "slowest per-stream decode rate while a whole cohort decodes, in [max t_first, min t_last]; over all cohorts",
    ),
    (
        "contention_band_max_tok_per_s", "tok/s", "higher", "ratio", False,
        "fastest per-stream decode rate while a whole cohort decodes, in [max t_first, min t_last]; over all cohorts",
    ),
    ("chunk_per_s", "1/s", "higher", "ratio", False, "(output events − 1) / (t_last − t_first), median of streams"),
    ("tokens_per_event", "tok", "-", "ratio", False, "ΣC / Σ output events"),
    (
        "goodput_req_per_s", "req/s", "higher", "ratio", False,
        "successes that meet every limit of [slo] / (max t_end − min t_send); failures are misses",
    ),
    ("acceptance_rate", "share", "higher", "difference", False, "Δaccepted / Δdrafted tokens, server's counters"),
    ("acceptance_length", "tok", "higher", "ratio", False, "1 + Δaccepted tokens / Δdrafts, server's counters"),
    ("prefix_hit_rate", "share", "-", "difference", False, "ΣK / ΣP from usage, where the server tells K"),
    ("error_rate", "share", "lower", "difference", False, "failed requests / requests"),
    ("peak_running", "req", "-", "difference", False, "highest sampled number of running requests"),
    ("peak_waiting", "req", "lower", "difference", False, "highest sampled number of waiting requests"),
    ("preemptions", "count", "lower", "difference", False, "Δ of the server's preemption counter"),
    ("kv_peak", "share", "-", "difference", False, "highest sampled use of the KV pool"),
)  # fmt: skip


def metric_named(name: str) -> Metric | None:
    """The glossary's entry for a name, with or without a suffix such as `_p99` or `_mean`; None if unknown."""
    if name in GLOSSARY:
        return GLOSSARY[name]
    base, _, suffix = name.rpartition("_")
    entry = GLOSSARY.get(base)
    if entry and entry.per_request and suffix in ("mean", *(f"p{q}" for q in PERCENTILES)):
        return entry
    return None


# --- one request ------------------------------------------------------------------------------------------


def n1(record: RequestRecord) -> int:
    """Tokens in the first output event: what the server tells, else 1 (assumed)."""
    return 1 if record.first_event_tokens is None else record.first_event_tokens


def ttft_s(record: RequestRecord) -> float | None:
    """Time to first token: t_first − t_send, in s."""
    if record.t_first_ns is None or record.t_send_ns is None:
        return None
    return (record.t_first_ns - record.t_send_ns) / NS


def ttft_from_sched_s(record: RequestRecord) -> float | None:
    """Time to first token from when the request was due: immune to coordinated omission, in s."""
    return None if record.t_first_ns is None else (record.t_first_ns - record.t_sched_ns) / NS


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token: (t_last − t_first) / (C − n1), in s; None unless C > n1.

    None too where first and last output came in one read: no decode time was seen, which is not a time of zero.
    """
    c = record.completion_tokens
    if c is None or record.t_first_ns is None or record.t_last_ns is None or c <= n1(record):
        return None
    if record.t_last_ns == record.t_first_ns:
        return None
    return (record.t_last_ns - record.t_first_ns) / NS / (c - n1(record))


def e2e_s(record: RequestRecord) -> float | None:
    """From the send to the last output: t_last − t_send, in s."""
    if record.t_last_ns is None or record.t_send_ns is None:
        return None
    return (record.t_last_ns - record.t_send_ns) / NS


def dispatch_s(record: RequestRecord) -> float | None:
    """The client's own delay: t_send less the moment when a slot was free and the request was due, in s."""
    if record.t_send_ns is None:
        return None
    return (record.t_send_ns - max(record.t_sched_ns, record.t_free_ns)) / NS


def stream_decode_tok_per_s(record: RequestRecord) -> float | None:
    """One stream's decode rate, 1 / TPOT, in tok/s; None where TPOT is unknown or zero."""
    tpot = tpot_s(record)
    return None if not tpot else 1 / tpot


_PER_REQUEST: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft_s": ttft_s,
    "ttft_from_sched_s": ttft_from_sched_s,
    "tpot_s": tpot_s,
    "e2e_s": e2e_s,
    "dispatch_s": dispatch_s,
    "stream_decode_tok_per_s": stream_decode_tok_per_s,
    "prompt_tokens": lambda r: r.prompt_tokens,
    "completion_tokens": lambda r: r.completion_tokens,
}


# --- a cell -----------------------------------------------------------------------------------------------


def cell_metrics(
    records: Sequence[RequestRecord], *, cell: Cell, facts: Mapping[str, Any], slo: Slo
) -> dict[str, float | None]:
    """Every metric of a cell that its records and facts allow; None where they do not.

    Args:
        records: all requests of the cell, failures included.
        cell: its place in the grid; N is its concurrency.
        facts: what was known around it (`CellRecord.facts`): the server's counters and peaks, the prefix mode.
        slo: the limits for goodput.

    Returns:
        Values by name, in the glossary's units. Percentiles are `inverted_cdf`: an observed request.
    """
    good = [r for r in records if r.ok]
    out: dict[str, float | None] = {}
    for name, per_request in _PER_REQUEST.items():
        out |= _spread(name, [v for r in good if (v := per_request(r)) is not None])
    out |= _spread("icl_s", event_gaps_s(good))
    out |= _spread("itl_s", token_gaps_s(good))
    out |= _window_rates(records, good, slo)
    out["tpot_weighted_s"] = _tpot_weighted_s(good)
    out["steady_output_tok_per_s"] = steady_output_tok_per_s(records, concurrency=cell.concurrency)
    out["decode_tok_per_s"] = decode_tok_per_s(good)
    together = len(records) == cell.concurrency and all(r.ok for r in records)
    out["prefill_window_s"] = _prefill_window_s(records) if together else None
    out["prefill_tok_per_s"] = _prefill_tok_per_s(records, cell, facts, out["prefill_window_s"])
    bands = contention_bands(good) if together and cell.concurrency > 1 else ()
    out["contention_band_min_tok_per_s"] = min((low for low, _ in bands), default=None)
    out["contention_band_max_tok_per_s"] = max((high for _, high in bands), default=None)
    chunk_rates = [
        (r.events - 1) * NS / (r.t_last_ns - r.t_first_ns)
        for r in good
        if r.t_first_ns is not None and r.t_last_ns is not None and r.events > 1 and r.t_last_ns > r.t_first_ns
    ]
    out["chunk_per_s"] = _percentile(chunk_rates, 50)
    out["tokens_per_event"] = _tokens_per_event(good)
    out["error_rate"] = (len(records) - len(good)) / len(records) if records else None
    out |= _server_metrics(facts)
    told = [r for r in good if r.cached_tokens is not None and r.prompt_tokens]
    cached = sum(r.cached_tokens or 0 for r in told)
    out["prefix_hit_rate"] = cached / sum(r.prompt_tokens or 0 for r in told) if told else None
    return out


def window_s(records: Sequence[RequestRecord]) -> float | None:
    """The cell's whole window, max t_end − min t_send over all its requests, in s; None if nothing was sent."""
    sent = [r.t_send_ns for r in records if r.t_send_ns is not None]
    if not sent:
        return None
    length = (max(r.t_end_ns for r in records) - min(sent)) / NS
    return length if length > 0 else None


def _window_rates(records: Sequence[RequestRecord], good: Sequence[RequestRecord], slo: Slo) -> dict[str, float | None]:
    names = ("output_tok_per_s", "total_tok_per_s", "req_per_s", "goodput_req_per_s")
    length = window_s(records)
    if length is None:
        return dict.fromkeys(names)
    out: dict[str, float | None] = {"req_per_s": len(good) / length}
    counted = all(r.completion_tokens is not None for r in good)
    out["output_tok_per_s"] = sum(r.completion_tokens or 0 for r in good) / length if counted else None
    counted = counted and all(r.prompt_tokens is not None for r in good)
    total = sum((r.prompt_tokens or 0) + (r.completion_tokens or 0) for r in good)
    out["total_tok_per_s"] = total / length if counted else None
    limits = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s}
    asked = {name: limit for name, limit in limits.items() if limit is not None}
    met = sum(all(_within(r, name, limit) for name, limit in asked.items()) for r in good)
    out["goodput_req_per_s"] = met / length if asked else None
    return out


def _within(record: RequestRecord, name: str, limit: float) -> bool:
    """Whether a success meets a limit; what is not known does not, but a one-token answer has no TPOT to miss."""
    value = _PER_REQUEST[name](record)
    if value is None:
        return name == "tpot_s" and record.completion_tokens is not None and record.completion_tokens <= n1(record)
    return value <= limit


def _tpot_weighted_s(good: Sequence[RequestRecord]) -> float | None:
    seconds, tokens = 0.0, 0
    for r in good:
        tpot = tpot_s(r)
        if tpot is not None and r.completion_tokens is not None:
            seconds += tpot * (r.completion_tokens - n1(r))
            tokens += r.completion_tokens - n1(r)
    return seconds / tokens if tokens else None


def _tokens_per_event(good: Sequence[RequestRecord]) -> float | None:
    counted = [r for r in good if r.completion_tokens is not None and r.events]
    events = sum(r.events for r in counted)
    return sum(r.completion_tokens or 0 for r in counted) / events if events else None


def event_gaps_s(good: Sequence[RequestRecord]) -> list[float]:
    """Gaps between successive output events of each stream, pooled, in s (inter-chunk latency)."""
    return [gap / NS for r in good if r.event_ns is not None for gap in (b - a for a, b in pairwise(r.event_ns))]


def token_gaps_s(good: Sequence[RequestRecord]) -> list[float]:
    """Gaps between successive tokens, pooled, in s; tokens of one event arrive together, so their gap is 0.

    Only over streams whose every event says how many tokens it carries; the others are left out.
    """
    gaps: list[float] = []
    for r in good:
        if r.event_ns is None or r.event_tokens is None:
            continue
        before: int | None = None
        for at, tokens in zip(r.event_ns, r.event_tokens, strict=True):
            if tokens and before is not None:
                gaps.append((at - before) / NS)
            gaps.extend([0.0] * (tokens - 1))
            before = at if tokens else before
    return gaps


def arrivals(record: RequestRecord) -> list[tuple[int, float]]:
    """When a request's tokens arrived: (stamp in ns, tokens), exact where told, else C − n1 spread evenly.

    The spread is over the later output events; a record without per-event stamps gives nothing.
    """
    c = record.completion_tokens
    if record.event_ns is None or record.t_send_ns is None or c is None or not record.event_ns:
        return []
    stamps = [record.t_send_ns + offset for offset in record.event_ns]
    if record.event_tokens is not None:
        return list(zip(stamps, map(float, record.event_tokens), strict=True))
    if len(stamps) == 1:
        return [(stamps[0], float(c))]
    share = (c - n1(record)) / (len(stamps) - 1)
    return [(stamps[0], float(n1(record))), *((at, share) for at in stamps[1:])]


def steady_output_tok_per_s(records: Sequence[RequestRecord], *, concurrency: int) -> float | None:
    """Tokens per second while the cell was full: all N streams decoding, more to send or none ended yet.

    The window runs from the latest t_first of the first N requests to the first end after the last send.
    None where it is shorter than two median e2e times, or where a request failed or kept no events.
    """
    if not records or any(not r.ok or r.event_ns is None or r.t_send_ns is None for r in records):
        return None
    if any(r.completion_tokens is None for r in records):
        return None
    by_send = sorted(records, key=lambda r: r.t_send_ns or 0)
    firsts = [r.t_first_ns for r in by_send[:concurrency]]
    if any(t is None for t in firsts):
        return None
    start = max(t for t in firsts if t is not None)
    last_send = max(r.t_send_ns or 0 for r in records)
    end = min((r.t_end_ns for r in records if r.t_end_ns > last_send), default=start)
    median_e2e = _percentile([v for r in records if (v := e2e_s(r)) is not None], 50)
    if median_e2e is None or (end - start) / NS < 2 * median_e2e:
        return None
    tokens = sum(n for r in records for at, n in arrivals(r) if start < at <= end)
    return tokens * NS / (end - start)


def decode_tok_per_s(good: Sequence[RequestRecord]) -> float | None:
    """Decode rate of the cell: Σ(C − n1) over the time in which at least one stream decoded, in tok/s."""
    spans = sorted((r.t_first_ns, r.t_last_ns) for r in good if r.t_first_ns is not None and r.t_last_ns is not None)
    if not spans or any(r.completion_tokens is None for r in good):
        return None
    covered, (start, end) = 0, spans[0]
    for a, b in spans[1:]:
        if a > end:
            covered, start, end = covered + end - start, a, b
        else:
            end = max(end, b)
    covered += end - start
    tokens = sum((r.completion_tokens or 0) - n1(r) for r in good if r.completion_tokens)
    return tokens * NS / covered if covered > 0 else None


def _prefill_tok_per_s(
    records: Sequence[RequestRecord], cell: Cell, facts: Mapping[str, Any], window_s: float | None
) -> float | None:
    unique = facts.get("prefix") == "unique"
    computed = [
        None if r.prompt_tokens is None or (r.cached_tokens is None and not unique)
        else r.prompt_tokens - (r.cached_tokens or 0)
        for r in records
    ]  # fmt: skip
    if not records or any(not r.ok for r in records) or any(c is None for c in computed):
        return None
    if cell.concurrency == 1:
        rates = [c / t for r, c in zip(records, computed, strict=True) if c is not None and (t := ttft_s(r))]
        return _percentile(rates, 50)
    return sum(c or 0 for c in computed) / window_s if window_s else None


def _prefill_window_s(records: Sequence[RequestRecord]) -> float | None:
    firsts = [r.t_first_ns for r in records if r.t_first_ns is not None]
    sends = [r.t_send_ns for r in records if r.t_send_ns is not None]
    if len(firsts) != len(records) or len(sends) != len(records):
        return None
    return (max(firsts) - min(sends)) / NS


def with_serialization_ratio(
    cells: Sequence[tuple[Cell, Mapping[str, float | None]]],
) -> list[dict[str, float | None]]:
    """The metrics of a grid's cells, each with its `serialization_ratio`, the one metric that needs two cells.

    1 when N prompts take N times as long as one, less when they share work; None unless the cell released all its
    requests together and the grid has the c1 cell of the same ISL, OSL and KV.
    """
    alone = {(c.isl, c.osl, c.kv): metrics.get("ttft_s_mean") for c, metrics in cells if c.concurrency == 1}
    out = []
    for cell, metrics in cells:
        window, single = metrics.get("prefill_window_s"), alone.get((cell.isl, cell.osl, cell.kv))
        known = window is not None and single and cell.concurrency > 1
        ratio = window / (cell.concurrency * single) if known else None  # type: ignore[operator]
        out.append({**metrics, "serialization_ratio": ratio})
    return out


def contention_bands(good: Sequence[RequestRecord]) -> tuple[tuple[float, float], ...]:
    """(slowest, fastest) per-stream decode rate while all of a cohort decode, in tok/s; one band per cohort.

    Only tokens that arrive in (max t_first, min t_last] count. Where that window is empty (serialised prefills
    split the streams into early and late ones), the cohort is split at the largest gap in t_first.
    """
    streams = sorted(
        (r for r in good if r.t_first_ns is not None and r.t_last_ns is not None and r.event_ns),
        key=lambda r: r.t_first_ns or 0,
    )
    if not streams or any(r.completion_tokens is None for r in streams):
        return ()
    start = max(r.t_first_ns or 0 for r in streams)
    end = min(r.t_last_ns or 0 for r in streams)
    if end > start:
        rates = [sum(n for at, n in arrivals(r) if start < at <= end) * NS / (end - start) for r in streams]
        return ((min(rates), max(rates)),)
    if len(streams) == 1:
        return ()
    firsts = [r.t_first_ns or 0 for r in streams]
    cut = max(range(1, len(streams)), key=lambda i: firsts[i] - firsts[i - 1])
    return contention_bands(streams[:cut]) + contention_bands(streams[cut:])


def counter_moved(facts: Mapping[str, Any], name: str) -> float | None:
    """By how much a counter of the server rose over a cell; None where it is not told before and after.

    None too for one that fell: it belongs to another process, and the difference means nothing.
    """
    before, after = ((facts.get(f"server_{when}") or {}).get(name) for when in ("before", "after"))
    return None if before is None or after is None or after < before else float(after - before)


def _server_metrics(facts: Mapping[str, Any]) -> dict[str, float | None]:
    accepted, drafted, drafts = (counter_moved(facts, name) for name in ("accepted_tokens", "draft_tokens", "drafts"))
    out: dict[str, float | None] = {
        "acceptance_rate": accepted / drafted if accepted is not None and drafted else None,
        "acceptance_length": 1 + accepted / drafts if accepted is not None and drafts else None,
        "preemptions": counter_moved(facts, "preemptions"),
    }
    peaks = facts.get("peaks") or {}
    for name, gauge in (("peak_running", "running"), ("peak_waiting", "waiting"), ("kv_peak", "kv_usage")):
        out[name] = peaks.get(gauge)
    return out


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    out: dict[str, float | None] = {f"{name}_mean": float(np.mean(values)) if len(values) else None}
    for q in PERCENTILES:
        out[f"{name}_p{q}"] = _percentile(values, q)
    return out | {name: out[f"{name}_p50"]}


def _percentile(values: Sequence[float], q: int) -> float | None:
    if not len(values):
        return None
    return float(np.percentile(np.asarray(values, dtype=float), q, method="inverted_cdf"))
