"""What a client measures on the wire is what the closed forms say: the server in a process of its own.

Other work on the machine only ever adds to when an event is seen. So a moment is the earliest of several requests, as
many as it takes (up to a bound) to see it unhindered once; an event that comes too early fails at any number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from simclient import Client, Heard

from benchkit.sim.process import spawned
from benchkit.sim.profile import Profile
from benchkit.sim.truth import CellTruth, expected_cell

T = TypeVar("T")


def about(seconds: float | tuple[float, ...]) -> Any:
    return pytest.approx(seconds, rel=0.02)


async def repeated(once: Callable[[], Awaitable[T]], enough: Callable[[list[T]], bool], *, most: int = 15) -> list[T]:
    """At least three results, more until they are enough."""
    results: list[T] = []
    while len(results) < 3 or (len(results) < most and not enough(results)):
        results.append(await once())
    return results


def ttft_s(heard: list[Heard]) -> float:
    return min(h.ttft_s for h in heard)


def decode_s(heard: list[Heard]) -> float:
    return min(h.e2e_s for h in heard) - ttft_s(heard)


def as_expected(heard: list[Heard], truth: CellTruth) -> bool:
    return bool(about(truth.ttft_s) == ttft_s(heard) and about(truth.streams[0].decode_s) == decode_s(heard))


@pytest.mark.parametrize(
    "keys",
    [
        {"step_base_s": 0.010, "step_per_seq_s": 0.0005},
        {"step_base_s": 0.006, "step_per_kv_token_s": 0.00001},
        {"step_base_s": 0.020, "tokens_per_step": 3},
    ],
    ids=["one token a step", "steps that grow with the KV", "three tokens a step"],
)
async def test_one_stream_takes_what_the_closed_form_says(client: Client, keys: dict[str, Any]) -> None:
    profile = Profile(prefill_tok_per_s=5000, request_overhead_s=0.010, prefix_caching=False, **keys)
    truth = expected_cell(profile, prompt_tokens=400, osl=31)
    with spawned(profile) as sim:
        await client.stream(sim.url, words=1, osl=1)  # opens the connection
        heard = await repeated(
            lambda: client.stream(sim.url, words=400, osl=31), lambda heard: as_expected(heard, truth)
        )

    usage = {"prompt_tokens": 400, "total_tokens": 431, "completion_tokens": 31}
    assert [usage] * len(heard) == [h.usages[-1] for h in heard]
    assert {1 + -(-30 // profile.tokens_per_step)} == {len(h.finish_reasons) for h in heard}
    assert truth.ttft_s == about(ttft_s(heard))
    assert truth.tpot_s == about(decode_s(heard) / 30)


async def test_streams_together_take_what_the_closed_form_says(client: Client) -> None:
    profile = Profile(prefill_tok_per_s=20_000, request_overhead_s=0.010, step_per_seq_s=0.0005, prefix_caching=False)
    truth = expected_cell(profile, prompt_tokens=200, osl=31, concurrency=8)

    async def cell() -> tuple[float, float, float]:
        """First arrival to the last first token, to the last token, to the last stream's end."""
        heard = await asyncio.gather(*(client.stream(url, words=200, osl=31) for _ in range(8)))
        start_ns = min(h.t_send_ns for h in heard)
        moments = (h.output_ns[0] for h in heard), (h.output_ns[-1] for h in heard), (h.reads[-1][0] for h in heard)
        first_s, last_s, end_s = ((max(moment) - start_ns) / 1e9 for moment in moments)
        return first_s, last_s, end_s

    def earliest(cells: list[tuple[float, float, float]]) -> tuple[float, float, float]:
        first_s, last_s, end_s = (min(moment) for moment in zip(*cells, strict=True))
        return first_s, last_s, end_s

    last = truth.streams[-1]
    expected = (last.ttft_s, last.e2e_s, truth.window_s)
    with spawned(profile) as sim:
        url = sim.url
        await asyncio.gather(*(client.stream(url, words=1, osl=1) for _ in range(8)))  # opens the connections
        cells = await repeated(cell, lambda cells: earliest(cells) == about(expected))

    first_s, last_s, end_s = earliest(cells)
    assert last.ttft_s == about(first_s)
    assert last.tpot_s == about((last_s - first_s) / 30)
    assert truth.output_tok_per_s == about(8 * 31 / end_s)


async def test_a_cold_boot_is_slower_by_the_factor_until_it_is_warm(client: Client) -> None:
    profile = Profile(prefill_tok_per_s=5000, prefix_caching=False, cold_requests=1, cold_factor=2.5)
    cold, warm = (expected_cell(profile, prompt_tokens=400, osl=11, cold=cold) for cold in (True, False))
    first: list[Heard] = []
    with spawned(profile) as sim:

        async def boot() -> Heard:
            """The cold request of a boot, then one that is warm."""
            started = (await client.metrics(sim.url))["process_start_time_seconds"]
            sim.restart()
            await client.settled(sim.url, lambda m: m["process_start_time_seconds"] > started)
            first.append(await client.stream(sim.url, words=400, osl=11))
            return await client.stream(sim.url, words=400, osl=11)

        after = await repeated(boot, lambda after: as_expected(first, cold) and as_expected(after, warm))

    assert 2.5 == pytest.approx(cold.ttft_s / warm.ttft_s)
    assert cold.ttft_s == about(ttft_s(first))
    assert cold.tpot_s == about(decode_s(first) / 10)
    assert warm.ttft_s == about(ttft_s(after))
    assert warm.tpot_s == about(decode_s(after) / 10)


async def test_who_waits_for_the_pool_starts_when_the_first_is_done(client: Client) -> None:
    # Room for two of 50 + 20 tokens. The third waits 5 ms of overhead, two prefills of 10 ms and 19 steps of 10 ms;
    # then comes its own prefill.
    profile = Profile(prefill_tok_per_s=5000, step_per_seq_s=0, kv_pool_tokens=150, prefix_caching=False)
    gauges = []
    with spawned(profile) as sim:

        async def cell() -> float:
            requests = [asyncio.create_task(client.stream(sim.url, words=50, osl=20)) for _ in range(3)]
            await client.settled(sim.url, lambda m: m["vllm:num_requests_running"] == 2)
            gauges.append(await client.metrics(sim.url))
            return max(h.ttft_s for h in await asyncio.gather(*requests))

        waits_s = await repeated(cell, lambda waits_s: about(0.225) == min(waits_s))

    assert 0.225 == about(min(waits_s))
    assert (2, 1) == (gauges[0]["vllm:num_requests_running"], gauges[0]["vllm:num_requests_waiting"])
    assert 140 / 150 == pytest.approx(gauges[0]["vllm:kv_cache_usage_perc"])
