"""What servers' metrics say, read off real captures and the reported cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchkit.load.scrape import Scrape, read_prometheus, read_scrape, summed

DATA = Path(__file__).parents[1] / "data"


def captured(folder: str, name: str = "metrics") -> Scrape:
    text = (DATA / "captures" / folder / f"{name}.response").read_bytes().decode()
    return read_scrape(text.split("\r\n\r\n", 1)[1].replace("\r\n", "\n"))


def test_case_b33_differences_of_counters() -> None:
    before, after = (read_scrape((DATA / "cases" / f"B33.{when}.prom").read_text()) for when in ("before", "after"))

    moved = {name: after.counters[name] - before.counters[name] for name in after.counters}

    assert (200, 800, 440) == (moved["drafts"], moved["draft_tokens"], moved["accepted_tokens"])
    assert [180, 140, 80, 40] == [moved[f"accepted_pos_{i}"] for i in range(4)]  # of 200 drafts: .9 .7 .4 .2
    assert 0.1 == moved["prefix_hits"] / moved["prefix_queries"]


def test_vllm_tells_counters_gauges_boot_and_an_idle_signal() -> None:
    scrape = captured("vllm-0.32.0-cpu-specdecode")

    assert {"prompt_tokens", "generation_tokens", "requests_done", "drafts", "accepted_tokens"} <= set(scrape.counters)
    assert scrape.started is not None
    assert scrape.started.startswith("2026-11-29T")
    assert "vllm:num_requests_running + vllm:num_requests_waiting" == scrape.idle_signal
    assert 0 == scrape.busy
    assert scrape.cache_config["block_size"].isdigit()


def test_vllm_while_queueing_is_busy() -> None:
    scrape = captured("vllm-0.32.0-cpu", "metrics-while-queueing")

    assert (2, 3, 5) == (scrape.gauges["running"], scrape.gauges["waiting"], scrape.busy)


def test_created_lines_are_no_counters() -> None:
    text = "vllm:num_preemptions_total 3.0\nvllm:num_preemptions_created 1.7e9\n"

    assert {"preemptions": 3.0} == dict(read_scrape(text).counters)


def test_a_counter_without_total_in_its_name_is_the_same_counter() -> None:
    assert {"preemptions": 3.0} == dict(read_scrape("vllm:num_preemptions 3.0\n").counters)


def test_llamacpp_tells_speculation_and_an_idle_signal_and_its_boot_in_a_header() -> None:
    scrape = captured("llama.cpp-xllamacpp-2026.10.11549-ngram-ping")

    assert scrape.counters["draft_tokens"] >= scrape.counters["accepted_tokens"] > 0
    assert scrape.started is None
    assert "1234" == read_scrape("", "1234").started
    assert "llamacpp:requests_processing + llamacpp:requests_deferred" == scrape.idle_signal


def test_sglangs_idleness_is_told_by_used_kv_tokens_not_by_its_tick_gauges() -> None:
    assert "sglang:kv_used_tokens" == captured("sglang-0.5.16-h200").idle_signal
    running = captured("sglang-0.5.16-h200", "metrics-while-running")
    assert running.busy is not None
    assert running.busy > 0


def test_labels_are_summed_and_may_hold_commas_and_quotes() -> None:
    text = (
        'vllm:request_success_total{finished_reason="stop",model_name="a,b \\"c\\""} 2.0\n'
        'vllm:request_success_total{finished_reason="length",model_name="a"} 5.0\n'
    )

    assert 7.0 == read_scrape(text).counters["requests_done"]
    assert 'a,b \\"c\\"' == read_prometheus(text)["vllm:request_success_total"][0][0]["model_name"]


@pytest.mark.parametrize("text", ["", "<html>no metrics</html>", "vllm:num_preemptions_total twelve", "{}"])
def test_what_is_no_metrics_says_nothing(text: str) -> None:
    scrape = read_scrape(text)

    assert ({}, {}, None, None) == (dict(scrape.counters), dict(scrape.gauges), scrape.idle_signal, scrape.busy)


def test_a_counter_that_one_endpoint_lacks_is_no_sum() -> None:
    both = [read_scrape("vllm:num_preemptions_total 3\nvllm:prompt_tokens_total 5\n"),
            read_scrape("vllm:prompt_tokens_total 7\n")]  # fmt: skip

    assert {"prompt_tokens": 12.0} == summed(both)
