"""Every flag: what raises it, what does not, and whether it blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchkit import validity
from benchkit.protocol import Protocol
from benchkit.record import RequestRecord, Run
from benchkit.validity import FLAGS, NEVER_WAIVED, cell_flags
from samples import RECORD, cell_with, failed_record, protocol_with, record_with, run_with


def flags(
    *records: RequestRecord,
    protocol: Protocol | None = None,
    run: Run | None = None,
    concurrency: int = 1,
    **facts: Any,
) -> dict[str, bool]:
    """Flag names and whether they block, for a cell of these records."""
    shown = records or (record_with(), record_with())
    cell = cell_with(concurrency, n=len(shown), **facts)
    return {f.name: f.blocking for f in cell_flags(protocol or protocol_with(), run or run_with(), cell, shown)}


def test_a_clean_warm_cell_has_no_flag() -> None:
    assert flags() == {}


def test_a_cold_grid_blocks_and_can_never_be_waived() -> None:
    assert flags(run=run_with(grid="cold", cold_of="boot")) == {"cold": True}
    assert "cold" in NEVER_WAIVED


def test_an_unknown_boot_is_a_footnote() -> None:
    assert flags(run=run_with(boot_id=None)) == {"boot_unknown": False}


def test_an_incomplete_grid_blocks_and_can_never_be_waived() -> None:
    assert flags(run=run_with(complete=False)) == {"incomplete": True}
    assert "incomplete" in NEVER_WAIVED


def test_errors_block_above_the_limit_and_are_disclosed_below_it() -> None:
    records = [record_with()] * 9 + [failed_record("http_error")]
    tolerant = protocol_with(osl="osl = [11]\n[limits]\nerror_rate = 0.1")

    assert flags(*records) == {"errors": True}
    assert flags(*records, protocol=tolerant) == {"errors": False}


def test_no_success_at_all_blocks_and_can_never_be_waived() -> None:
    assert flags(failed_record(), failed_record())["no_success"]
    assert "no_success" in NEVER_WAIVED


def test_a_truncated_stream_blocks() -> None:
    assert flags(record_with(), record_with(), failed_record("incomplete_stream"))["truncated_stream"]
    assert flags(record_with(), record_with(), failed_record("disconnected", events=3))["truncated_stream"]
    assert "truncated_stream" not in flags(record_with(), record_with(), failed_record("disconnected"))


def test_a_timeout_is_named() -> None:
    assert flags(record_with(), record_with(), failed_record("timeout"))["timeouts"] is False


def test_missing_usage_blocks() -> None:
    blind = record_with(prompt_tokens=None, completion_tokens=None, token_source="none", event_tokens=None)

    assert flags(record_with(), blind)["usage_missing"]


@pytest.mark.parametrize("tokens", [9, 12])
def test_an_answer_of_another_length_than_asked_blocks_under_ignore_eos(tokens: int) -> None:
    record = record_with(completion_tokens=tokens, event_tokens=None)

    assert flags(record_with(), record)["short_output"]
    assert "short_output" not in flags(
        record_with(), record, protocol=protocol_with(osl="osl = [11]\nignore_eos = false")
    )


def test_isl_off_by_more_than_two_percent_blocks() -> None:
    assert flags(record_with(), record_with(prompt_tokens=102)) == {}
    assert flags(record_with(), record_with(prompt_tokens=103)) == {"isl_drift": True}
    assert flags(record_with(), record_with(prompt_tokens=26)) == {"isl_drift": True}  # case B30: cut by the server


def test_a_warm_prefix_cache_blocks_where_prompts_were_to_be_unique() -> None:
    assert flags(record_with(cached_tokens=1), record_with(cached_tokens=1)) == {}
    assert flags(record_with(cached_tokens=64), record_with(cached_tokens=0)) == {"prefix_contaminated": True}


def test_a_server_whose_usage_hides_cached_tokens_is_judged_by_its_counters() -> None:
    silent = record_with(cached_tokens=None)
    before = {"prefix_hits": 1000.0, "prefix_queries": 5000.0}

    clean = flags(silent, silent, server_before=before, server_after={"prefix_hits": 1002.0, "prefix_queries": 5200.0})
    warm = flags(silent, silent, server_before=before, server_after={"prefix_hits": 1100.0, "prefix_queries": 5200.0})

    assert {"assumed_uncached": False} == clean
    assert {"assumed_uncached": False, "prefix_contaminated": True} == warm
    assert {"assumed_uncached": False} == flags(silent, silent)


def test_cached_tokens_are_disclosed_where_prompts_are_sent_as_they_are() -> None:
    as_is = protocol_with(osl='osl = [11]\nprefix = "as_is"')

    assert {"prefix_cached": False} == flags(record_with(cached_tokens=64), record_with(), protocol=as_is)
    assert {} == flags(record_with(cached_tokens=0), record_with(), protocol=as_is)


def test_a_cell_after_an_interruption_is_a_footnote() -> None:
    assert {"resumed": False} == flags(resumed=True)


def test_the_templates_head_in_the_cache_is_no_contamination() -> None:
    cached = [record_with(cached_tokens=16), record_with(cached_tokens=16)]

    assert flags(*cached, template_tokens=12) == {}  # 12 rounded up to one block of 16
    assert flags(*cached) == {"prefix_contaminated": True}


def test_a_long_answer_in_one_event_blocks() -> None:
    at_once = record_with(
        events=1, event_ns=(500_000_000,), event_tokens=(11,), first_event_tokens=11, t_last_ns=RECORD.t_first_ns
    )

    assert flags(record_with(), at_once)["impossible_rate"]


def test_a_long_answer_whose_events_came_in_one_read_blocks() -> None:
    """A gateway that buffers: eleven events, one stamp, and a TTFT that is the whole answer's time."""
    buffered = record_with(t_first_ns=RECORD.t_last_ns, event_ns=(700_000_000,) * 11)

    assert flags(record_with(), buffered)["impossible_rate"]
    assert {} == flags(record_with(completion_tokens=11), record_with())


def test_a_rate_beyond_the_protocols_bound_blocks() -> None:
    bounded = protocol_with(osl="osl = [11]\n[limits]\nmax_tok_per_s = 40.0")

    assert flags(protocol=bounded)["impossible_rate"]  # 11 tokens of 20 ms are 50 tok/s
    assert flags(protocol=protocol_with(osl="osl = [11]\n[limits]\nmax_tok_per_s = 51.0")) == {}


def test_a_lagging_client_blocks() -> None:
    assert flags(client_lag_p99_ms=4.9) == {}
    assert flags(client_lag_p99_ms=5.1) == {"client_limited": True}


def test_requests_that_are_not_ours_block() -> None:
    assert flags(server_before={"requests_done": 7.0}, server_after={"requests_done": 9.0}) == {}
    assert flags(server_before={"requests_done": 7.0}, server_after={"requests_done": 10.0}) == {"foreign_load": True}
    assert flags(idle=False) == {"foreign_load": True}


def test_a_restart_during_the_cell_blocks() -> None:
    assert flags(boot_before="boot-1", boot_after="boot-1") == {}
    assert flags(boot_before="boot-1", boot_after="boot-2") == {"server_restarted": True}


def test_another_model_than_asked_blocks() -> None:
    assert flags(model="m") == {}
    assert flags(model="another") == {"model_mismatch": True}


def test_few_requests_are_a_footnote() -> None:
    assert flags(*[record_with()] * 4, concurrency=4) == {"few_requests": False}
    assert flags(*[record_with()] * 8, concurrency=4) == {}


def test_preemptions_are_a_footnote() -> None:
    assert flags(server_before={"preemptions": 1.0}, server_after={"preemptions": 2.0}) == {"preempted": False}


def test_what_is_assumed_about_tokens_is_a_footnote() -> None:
    assumed = record_with(first_event_tokens=None, event_tokens=None)

    assert flags(assumed, assumed) == {"assumed_n1": False, "spread_tokens": False}


def test_several_tokens_an_event_are_a_footnote() -> None:
    coalesced = record_with(events=4, event_ns=tuple(range(4)), event_tokens=(2, 3, 3, 3), first_event_tokens=2)

    assert flags(coalesced, coalesced) == {"coalesced_events": False}


def test_a_reconnect_is_a_footnote() -> None:
    assert flags(record_with(), record_with(attempts=2)) == {"reconnected": False}


def test_every_flag_is_documented_and_every_documented_flag_can_be_raised() -> None:
    source = Path(validity.__file__).read_text()
    raised = set(re.findall(r'_(?:blocks|notes)\(\s*"([a-z_0-9]+)"', source)) | {"errors"}

    assert set(FLAGS) == raised
    assert NEVER_WAIVED == {name for name, (effect, _) in FLAGS.items() if "never" in effect}
