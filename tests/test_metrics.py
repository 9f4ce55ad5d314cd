"""The glossary's formulas, on records whose values a reader can check in the head."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchkit.metrics import (
    GLOSSARY,
    cell_metrics,
    contention_bands,
    metric_named,
    n1,
    steady_output_tok_per_s,
    stream_decode_tok_per_s,
    tpot_s,
    ttft_from_sched_s,
    ttft_s,
    with_serialization_ratio,
)
from benchkit.protocol import Cell, Slo
from benchkit.record import RequestRecord
from samples import MS, RECORD, S, failed_record, record_with

CASES = Path(__file__).parent / "data" / "cases"


def cell(concurrency: int = 1) -> Cell:
    return Cell(isl=100, osl=11, kv=0, concurrency=concurrency)


def metrics(
    *records: RequestRecord, concurrency: int = 1, slo: Slo | None = None, **facts: object
) -> dict[str, object]:
    return dict(cell_metrics(records, cell=cell(concurrency), facts=facts, slo=slo or Slo()))


def stream(send_ms: int, first_ms: int, last_ms: int, tokens: int, **changes: object) -> RequestRecord:
    """A stream of single-token events, evenly spaced from first to last."""
    step = (last_ms - first_ms) / (tokens - 1) if tokens > 1 else 0
    offsets = tuple(round((first_ms - send_ms + i * step) * MS) for i in range(tokens))
    return record_with(
        t_sched_ns=send_ms * MS, t_free_ns=send_ms * MS, t_send_ns=send_ms * MS, t_first_ns=first_ms * MS,
        t_last_ns=last_ms * MS, t_end_ns=last_ms * MS, completion_tokens=tokens, events=tokens, event_ns=offsets,
        event_tokens=(1,) * tokens, **changes,
    )  # fmt: skip


def test_ttft_runs_from_the_send_and_from_the_schedule() -> None:
    record = record_with(t_sched_ns=9 * S)

    assert 0.5 == ttft_s(record)
    assert 1.5 == ttft_from_sched_s(record)


def test_tpot_leaves_out_the_first_event() -> None:
    assert 0.02 == tpot_s(record_with())


def test_tpot_divides_by_the_tokens_after_the_first_event() -> None:
    record = record_with(completion_tokens=13, first_event_tokens=3)

    assert 0.02 == tpot_s(record)
    assert 50.0 == stream_decode_tok_per_s(record)


def test_an_unknown_first_event_counts_as_one_token() -> None:
    assert n1(record_with(first_event_tokens=None)) == 1
    assert tpot_s(record_with(first_event_tokens=None)) == 0.02


def test_tpot_is_unknown_where_first_and_last_output_came_in_one_read() -> None:
    at_once = record_with(t_last_ns=RECORD.t_first_ns)

    assert tpot_s(at_once) is None
    assert stream_decode_tok_per_s(at_once) is None


@pytest.mark.parametrize("tokens", [0, 1, None])
def test_tpot_is_unknown_without_a_second_token(tokens: int | None) -> None:
    assert tpot_s(record_with(completion_tokens=tokens)) is None


def test_whole_window_rates_include_ttft_and_reach_from_first_send_to_last_end() -> None:
    found = metrics(stream(0, 500, 1000, 11), stream(1000, 1500, 2000, 11))

    assert found["output_tok_per_s"] == 11.0  # 22 tokens in 2 s
    assert found["total_tok_per_s"] == 111.0  # and 200 prompt tokens
    assert 1.0 == found["req_per_s"]


def test_failures_lengthen_the_window_and_add_no_tokens() -> None:
    case = json.loads((CASES / "B19.json").read_text())
    expected = json.loads((CASES / "expected.json").read_text())["B19"]["expect"]
    records = [
        stream(0, r["ttft_ms"], round(r["end_s"] * 1e3), r["tokens"])
        if r["status"] == "ok"
        else failed_record(t_send_ns=0, t_sched_ns=0, t_free_ns=0, t_end_ns=round(r["end_s"] * S))
        for r in case
    ]

    found = metrics(*records, concurrency=5)

    assert expected["throughput_tok_s"] == found["output_tok_per_s"]
    assert expected["mean_ttft_ms"] == pytest.approx(1e3 * found["ttft_s_mean"])  # type: ignore[operator]
    assert 0.4 == found["error_rate"]


def test_an_answer_without_usage_makes_rates_unknown_not_small() -> None:
    found = metrics(record_with(), record_with(completion_tokens=None, prompt_tokens=None, token_source="none"))

    assert found["output_tok_per_s"] is None
    assert found["total_tok_per_s"] is None
    assert found["req_per_s"] is not None


def test_percentiles_are_observed_requests() -> None:
    records = [stream(0, i, i + 10, 2) for i in range(1, 101)]

    found = metrics(*records, concurrency=100)

    assert tuple(found[f"ttft_s_p{q}"] for q in (50, 90, 95, 99)) == (0.05, 0.09, 0.095, 0.099)
    assert found["ttft_s"] == found["ttft_s_p50"]


def test_a_rate_over_requests_is_weighted_by_tokens() -> None:
    """Case B35's arithmetic: 100 tokens in 1 s and 4,000 in 2 s are 4,100 in 3 s, not the mean of two rates."""
    records = [stream(0, 100, 1100, 101), stream(2000, 2100, 4100, 4001)]

    assert pytest.approx(3.0 / 4100) == metrics(*records)["tpot_weighted_s"]
    assert pytest.approx(4100 / 3.0) == metrics(*records)["decode_tok_per_s"]


def test_case_b21_tpot_comes_from_tokens_and_the_gap_between_events_has_another_name() -> None:
    case = json.loads((CASES / "B21.json").read_text())
    stamps = [round(e["t"] * S) for e in case["events"]]
    so_far = [e["tokens_so_far"] for e in case["events"]]
    record = record_with(
        t_send_ns=0, t_first_ns=stamps[0], t_last_ns=stamps[-1], t_end_ns=stamps[-1], completion_tokens=13,
        first_event_tokens=so_far[0], events=4, event_ns=tuple(stamps),
        event_tokens=(1, *(b - a for a, b in pairwise(so_far))),
    )  # fmt: skip

    found = metrics(record)

    assert pytest.approx(0.010) == found["tpot_s"]
    assert pytest.approx(0.040) == found["icl_s"]
    assert pytest.approx(0.010) == found["itl_s_mean"]  # three gaps of 40 ms and nine of 0 are 12 gaps of 10
    assert pytest.approx(100.0) == found["stream_decode_tok_per_s"]
    assert pytest.approx(25.0) == found["chunk_per_s"]
    assert 3.25 == found["tokens_per_event"]


def test_itl_is_unknown_where_events_do_not_tell_their_tokens() -> None:
    found = metrics(record_with(event_tokens=None))

    assert found["itl_s"] is None
    assert pytest.approx(0.02) == found["icl_s"]


def test_decode_rate_covers_the_union_of_the_decoding_times() -> None:
    """[0.1, 0.3] and [0.2, 0.4] are 0.3 s, [1.0, 1.1] is another 0.1 s: 30 tokens in 0.4 s."""
    records = [stream(0, 100, 300, 11), stream(0, 200, 400, 11), stream(900, 1000, 1100, 11)]

    assert pytest.approx(75.0) == metrics(*records)["decode_tok_per_s"]


def test_steady_rate_counts_what_arrives_while_the_cell_is_full() -> None:
    """Two slots, each with requests of 100 ms: one token at once, ten more evenly.

    The window runs from 0 (both first tokens are there at once) to the first end after the last send, at 1.0 s:
    the two last requests were sent at 0.9 s.
    """
    records = [
        stream(100 * i, 100 * i, 100 * (i + 1), 11, index=2 * i + slot, stream=slot)
        for i in range(10)
        for slot in (0, 1)
    ]

    rate = steady_output_tok_per_s(records, concurrency=2)

    assert pytest.approx((2 * 10 + 2 * 9 * 11) / 1.0) == rate


def test_steady_rate_is_unknown_in_a_short_cell() -> None:
    assert steady_output_tok_per_s([stream(0, 100, 200, 11), stream(0, 100, 200, 11)], concurrency=2) is None


def test_windowed_rates_need_every_answers_count() -> None:
    blind = [
        stream(100 * i, 100 * i, 100 * (i + 1), 11, index=i) for i in range(9)
    ] + [record_with(t_send_ns=900 * MS, t_first_ns=900 * MS, t_last_ns=1000 * MS, t_end_ns=1000 * MS,
                     completion_tokens=None, event_tokens=None)]  # fmt: skip

    assert steady_output_tok_per_s(blind[:9], concurrency=1) is not None
    assert steady_output_tok_per_s(blind, concurrency=1) is None
    assert () == contention_bands([record_with(), record_with(completion_tokens=None)])


def test_prefill_rate_needs_requests_released_together_or_a_single_stream() -> None:
    alone = [stream(0, 500, 1000, 11), stream(2000, 2500, 3000, 11)]
    assert metrics(*alone, prefix="unique")["prefill_tok_per_s"] == 200.0  # 100 tokens in 0.5 s

    together = [stream(0, 100 * (i + 1), 2000, 11) for i in range(4)]
    assert metrics(*together, concurrency=4, prefix="unique")["prefill_tok_per_s"] == 1000.0  # 400 in 0.4 s
    assert metrics(*together, concurrency=2, prefix="unique")["prefill_tok_per_s"] is None


def test_prefill_rate_leaves_cached_tokens_out_and_is_unknown_where_a_cache_may_have_helped() -> None:
    cached = stream(0, 500, 1000, 11, cached_tokens=50)
    assert metrics(cached, prefix="as_is")["prefill_tok_per_s"] == 100.0
    assert metrics(stream(0, 500, 1000, 11, cached_tokens=None), prefix="as_is")["prefill_tok_per_s"] is None
    assert 200.0 == metrics(stream(0, 500, 1000, 11, cached_tokens=None), prefix="unique")["prefill_tok_per_s"]


def test_serialization_ratio_is_one_when_n_prompts_take_n_times_as_long() -> None:
    alone = metrics(stream(0, 100, 200, 11))
    serial = metrics(*[stream(0, 100 * (i + 1), 2000, 11) for i in range(4)], concurrency=4)
    shared = metrics(*[stream(0, 100, 2000, 11) for _ in range(4)], concurrency=4)
    refilled = metrics(*[stream(0, 100, 2000, 11) for _ in range(8)], concurrency=4)

    for found, expected in ((serial, 1.0), (shared, 0.25), (refilled, None)):
        grid = [(cell(1), alone), (cell(4), found)]
        assert [None, expected] == [m["serialization_ratio"] for m in with_serialization_ratio(grid)]  # type: ignore[arg-type]
    assert [None] == [m["serialization_ratio"] for m in with_serialization_ratio([(cell(4), serial)])]  # type: ignore[list-item]


def test_contention_band_is_of_the_time_in_which_the_whole_cohort_decodes() -> None:
    fast, slow = stream(0, 100, 1100, 101), stream(0, 100, 2100, 21)

    [(low, high)] = contention_bands([fast, slow])

    assert pytest.approx((low, high)) == (10.0, 100.0)


def test_contention_bands_split_where_serialised_prefills_split_the_cohort() -> None:
    early = [stream(0, 100, 600, 11), stream(0, 120, 600, 11)]
    late = [stream(0, 5000, 6000, 11), stream(0, 5010, 6000, 11)]

    bands = contention_bands(early + late)

    assert 2 == len(bands)
    assert bands[0][0] > bands[1][1]


def test_goodput_counts_failures_as_misses() -> None:
    """Case B25: 4 of 10 requests within the limit in 20 s are 0.2 req/s."""
    case = json.loads((CASES / "B25.json").read_text())
    records = [
        stream(0, r["ttft_ms"], r["ttft_ms"] + 10, 2)
        if r["status"] == "ok"
        else failed_record("timeout", t_send_ns=0, t_end_ns=case["window_s"] * S)
        for r in case["requests"]
    ]

    found = metrics(*records, concurrency=10, slo=Slo(ttft_s=case["slo"]["ttft_ms"] / 1e3))

    assert 0.2 == found["goodput_req_per_s"]


def test_goodput_takes_nothing_unknown_for_met() -> None:
    silent = record_with(t_first_ns=None, t_last_ns=None, events=0, event_ns=(), event_tokens=None)
    blind = record_with(completion_tokens=None, event_tokens=None)
    one = stream(0, 300, 300, 1)

    assert 0.0 == metrics(silent, slo=Slo(ttft_s=1.0))["goodput_req_per_s"]
    assert 0.0 == metrics(blind, slo=Slo(tpot_s=1.0))["goodput_req_per_s"]
    assert 0.0 < metrics(one, slo=Slo(tpot_s=0.001))["goodput_req_per_s"]  # type: ignore[operator]


def test_a_decode_rate_needs_every_answers_count() -> None:
    blind = record_with(completion_tokens=None, event_tokens=None)

    assert metrics(record_with(), record_with())["decode_tok_per_s"] is not None
    assert metrics(record_with(), blind)["decode_tok_per_s"] is None


def test_a_counter_that_fell_gives_no_difference() -> None:
    found = metrics(
        record_with(),
        server_before={"drafts": 100.0, "draft_tokens": 400.0, "accepted_tokens": 200.0, "preemptions": 9.0},
        server_after={"drafts": 20.0, "draft_tokens": 80.0, "accepted_tokens": 40.0, "preemptions": 4.0},
    )

    assert (None, None, None) == (found["acceptance_rate"], found["acceptance_length"], found["preemptions"])


def test_goodput_is_unknown_without_limits() -> None:
    assert metrics(record_with())["goodput_req_per_s"] is None


def test_acceptance_comes_from_the_counters_difference_never_from_their_lifetime() -> None:
    """Case B33's values: 200 drafts, 800 draft tokens, 440 accepted."""
    found = metrics(
        record_with(),
        server_before={"drafts": 1000.0, "draft_tokens": 4000.0, "accepted_tokens": 1200.0, "preemptions": 3.0},
        server_after={"drafts": 1200.0, "draft_tokens": 4800.0, "accepted_tokens": 1640.0, "preemptions": 3.0},
        peaks={"running": 6.0, "waiting": 14.0},
    )

    assert 0.55 == found["acceptance_rate"]
    assert 3.2 == found["acceptance_length"]
    assert tuple(found[k] for k in ("preemptions", "peak_running", "peak_waiting", "kv_peak")) == (0.0, 6.0, 14.0, None)


def test_acceptance_is_unknown_where_nothing_was_drafted() -> None:
    counters = {"drafts": 5.0, "draft_tokens": 10.0, "accepted_tokens": 2.0}

    found = metrics(record_with(), server_before=counters, server_after=counters)

    assert found["acceptance_rate"] is None
    assert found["acceptance_length"] is None


def test_case_b22_one_token_answers_have_no_tpot_and_no_nan_appears() -> None:
    one = stream(0, 300, 300, 1)
    none = record_with(
        t_first_ns=None, t_last_ns=None, completion_tokens=0, events=0, event_ns=(), event_tokens=(),
    )  # fmt: skip
    eleven = stream(0, 200, 1200, 11)

    found = metrics(one, none, eleven)

    assert pytest.approx(0.1) == found["tpot_s_mean"]
    assert all(v is None or np.isfinite(v) for v in found.values())  # type: ignore[call-overload]


def test_a_cell_of_failures_has_no_latency_and_no_nan() -> None:
    found = metrics(failed_record(t_send_ns=None), failed_record())

    assert found["ttft_s"] is None
    assert 1.0 == found["error_rate"]
    assert 0.0 == found["output_tok_per_s"]


def test_every_metric_of_a_cell_is_in_the_glossary() -> None:
    names = set(metrics(record_with()))

    assert not {name for name in names if metric_named(name) is None}
    missing = {"serialization_ratio"}  # needs the c1 cell of the same grid
    assert set(GLOSSARY) - missing <= names


def test_an_unknown_name_is_no_metric() -> None:
    assert metric_named("tokens_per_fortnight") is None
    assert metric_named("output_tok_per_s_p99") is None
    assert GLOSSARY["ttft_s"] == metric_named("ttft_s_p99")
