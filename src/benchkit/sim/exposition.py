"""The engine's state as /metrics text, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchkit.sim.engine import Engine, Histogram


def metrics_text(engine: Engine, *, boot_time_s: float, max_lag_s: float) -> str:
    """The exposition: `boot_time_s` in Unix time, `max_lag_s` the longest that an event was late since boot."""
    p, c = engine.profile, engine.counters
    label = f'engine="0",model_name="{_escaped(p.model)}"'
    lines: list[str] = []

    def family(name: str, kind: str, rows: Iterable[tuple[str, str, float]]) -> None:
        lines.append(f"# HELP {name} Simulated.")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{row}{{{labels}}} {value!r}" for row, labels, value in rows)

    def gauge(name: str, value: float) -> None:
        family(name, "gauge", [(name, label, float(value))])

    def counter(name: str, rows: Sequence[tuple[str, float]]) -> None:
        family(f"{name}_total", "counter", [(f"{name}_total", label + more, float(value)) for more, value in rows])
        family(f"{name}_created", "gauge", [(f"{name}_created", label + more, boot_time_s) for more, _ in rows])

    def histogram(name: str, h: Histogram) -> None:
        rows = [(f"{name}_bucket", f'{label},le="{b!r}"', float(n)) for b, n in zip(h.bounds, h.buckets, strict=True)]
        rows.append((f"{name}_bucket", f'{label},le="+Inf"', float(h.count)))
        rows += [(f"{name}_count", label, float(h.count)), (f"{name}_sum", label, h.total)]
        family(name, "histogram", rows)
        family(f"{name}_created", "gauge", [(f"{name}_created", label, boot_time_s)])

    lines += [
        "# HELP process_start_time_seconds Start of this boot, Unix time.",
        "# TYPE process_start_time_seconds gauge",
    ]
    lines.append(f"process_start_time_seconds {boot_time_s!r}")
    gauge("vllm:num_requests_running", engine.running)
    gauge("vllm:num_requests_waiting", engine.waiting)
    gauge("vllm:kv_cache_usage_perc", engine.kv_reserved_tokens / p.kv_pool_tokens if p.kv_pool_tokens else 0.0)
    if p.kv_pool_tokens:
        config = (
            f'block_size="{p.block_size}",enable_prefix_caching="{p.prefix_caching}",engine="0",'
            f'kv_cache_size_tokens="{p.kv_pool_tokens}",num_gpu_blocks="{p.kv_pool_tokens // p.block_size}"'
        )
        family("vllm:cache_config_info", "gauge", [("vllm:cache_config_info", config, 1.0)])
    counter("vllm:prompt_tokens", [("", c.prompt_tokens)])
    counter("vllm:generation_tokens", [("", c.generation_tokens)])
    counter("vllm:request_success", [(f',finished_reason="{reason}"', n) for reason, n in c.finished.items()])
    counter("vllm:num_preemptions", [("", 0)])
    counter("vllm:prefix_cache_queries", [("", c.prefix_queries)])
    counter("vllm:prefix_cache_hits", [("", c.prefix_hits)])
    if p.draft_tokens:
        accepted = c.accepted_per_position
        counter("vllm:spec_decode_num_drafts", [("", c.drafts)])
        counter("vllm:spec_decode_num_draft_tokens", [("", c.draft_tokens)])
        counter("vllm:spec_decode_num_accepted_tokens", [("", sum(accepted))])
        positions = [(f',position="{i}"', n) for i, n in enumerate(accepted)]
        counter("vllm:spec_decode_num_accepted_tokens_per_pos", positions)
    histogram("vllm:time_to_first_token_seconds", c.ttft)
    histogram("vllm:request_time_per_output_token_seconds", c.tpot)
    gauge("sim:max_lag_seconds", max_lag_s)
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
