"""What a server's Prometheus text says, under one set of names for every engine; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens", "llamacpp:prompt_tokens"),
    "generation_tokens": ("vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted"),
    "requests_done": ("vllm:request_success", "sglang:num_requests"),
    "preemptions": ("vllm:num_preemptions",),
    "drafts": ("vllm:spec_decode_num_drafts", "llamacpp:spec_decode_num_drafts"),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", "llamacpp:spec_decode_num_draft_tokens"),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "llamacpp:spec_decode_num_accepted_tokens"),
    "prefix_queries": ("vllm:prefix_cache_queries",),
    "prefix_hits": ("vllm:prefix_cache_hits",),
}
"""Monotonic counters by our name: the servers' names without `_total`, which some leave out."""

_PER_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos", "llamacpp:spec_decode_num_accepted_tokens_per_pos")

GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    "kv_used_tokens": ("sglang:kv_used_tokens",),
}
"""Gauges by our name."""

# Signals of idleness that move at once. SGLang's running and queue gauges are refreshed by a log tick, so they lie.
_IDLE: tuple[tuple[str, ...], ...] = (
    ("sglang:kv_used_tokens",),
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
)

_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One reading of a server's metrics. A name that the server does not have is absent, never zero."""

    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    started: str | None  # which start of the process this is, in the server's own words
    idle_signal: str | None  # which gauges say that it is idle; None where none can be trusted
    busy: float | None  # their sum
    cache_config: Mapping[str, str]  # vLLM's own words about its KV cache


def read_prometheus(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by metric name: (labels, value). Lines that are no sample are passed over."""
    out: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("#") or not (match := _LINE.match(line)):
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        out.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), number))
    return out


def read_scrape(text: str, start_header: str | None = None) -> Scrape:
    """What one `/metrics` answer says. `_created` lines are gauges of time, never counters, and are not read.

    Args:
        text: the answer's body.
        start_header: its `Process-Start-Time-Unix`, by which llama.cpp tells one start from another.
    """
    samples = read_prometheus(text)

    def total(names: Iterable[str]) -> float | None:
        for name in names:
            for spelling in (name + "_total", name):
                if spelling in samples:
                    return sum(value for _, value in samples[spelling])
        return None

    counters = {ours: value for ours, theirs in COUNTERS.items() if (value := total(theirs)) is not None}
    for name in _PER_POSITION:
        for labels, value in samples.get(name + "_total", samples.get(name, [])):
            key = f"accepted_pos_{labels.get('position', '?')}"
            counters[key] = counters.get(key, 0.0) + value
    gauges = {
        ours: sum(value for _, value in samples[name])
        for ours, theirs in GAUGES.items()
        for name in theirs
        if name in samples
    }
    signal = next((names for names in _IDLE if all(n in samples for n in names)), None)
    started = start_header
    if "process_start_time_seconds" in samples:
        moment = datetime.fromtimestamp(samples["process_start_time_seconds"][0][1], UTC)
        started = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    config = samples.get("vllm:cache_config_info", [])
    return Scrape(
        counters=counters,
        gauges=gauges,
        started=started,
        idle_signal=None if signal is None else " + ".join(signal),
        busy=None if signal is None else sum(value for n in signal for _, value in samples[n]),
        cache_config=config[0][0] if config else {},
    )


def summed(scrapes: Iterable[Scrape]) -> dict[str, float]:
    """Counters over several endpoints of one arm; only those that every endpoint has."""
    all_ = [s.counters for s in scrapes]
    names = set.intersection(*(set(c) for c in all_)) if all_ else set()
    return {name: sum(c[name] for c in all_) for name in sorted(names)}
