"""Every fault does on the wire what its key says, and nothing to the next request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from simclient import Client, Heard

from benchkit.sim.profile import FAULTS, Profile
from benchkit.sim.server import running

FAST: dict[str, Any] = {"step_base_s": 0.002, "step_per_seq_s": 0, "request_overhead_s": 0, "prefill_tok_per_s": 0}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    profile = Profile(**FAST, fault_after_tokens=3, fault_stall_s=0.2, fault_giant_bytes=700_000, prefix_caching=False)
    async with running(profile) as sim:
        yield sim.url


async def faulty(client: Client, url: str, fault: str, **more: Any) -> Heard:
    """The answer with the fault; the request after it must be whole."""
    heard = await client.stream(url, words=4, osl=6, sim_fault=fault, **more)
    after = await client.stream(url, words=4, osl=6)
    assert (6, "length", "[DONE]", False) == (
        after.usages[-1]["completion_tokens"],
        after.finish_reasons[-1],
        after.data[-1],
        after.cut,
    )
    metrics = await client.metrics(url)
    assert 0 == metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
    return heard


WHOLE = " amber anchor autumn beacon birch border"
THREE = " amber anchor autumn"
FINISHED = [None] * 5 + ["length"]
ERROR = {"error": {"message": "simulated fault", "type": "InternalServerError", "param": None, "code": 500}}


async def test_disconnect_closes_the_connection_mid_stream(client: Client, url: str) -> None:
    heard = await faulty(client, url, "disconnect")

    assert heard.cut
    assert (THREE, [None] * 3) == (heard.text, heard.finish_reasons)


async def test_truncate_ends_cleanly_but_too_early(client: Client, url: str) -> None:
    heard = await faulty(client, url, "truncate")

    assert not heard.cut
    assert (THREE, [None] * 3, []) == (heard.text, heard.finish_reasons, heard.usages)
    assert "[DONE]" not in heard.data


async def test_error_in_stream_is_an_object_inside_a_200(client: Client, url: str) -> None:
    heard = await faulty(client, url, "error_in_stream")

    assert (200, False) == (heard.status, heard.cut)
    assert ERROR == heard.events[-1]
    assert THREE == heard.text
    assert 1 == (await client.metrics(url))['vllm:request_success_total{finished_reason="error"}']


async def test_error_first_comes_in_place_of_the_first_token(client: Client, url: str) -> None:
    heard = await faulty(client, url, "error_first")
    whole = await faulty(client, url, "error_first", stream=False, stream_options=None)

    assert (200, [ERROR]) == (heard.status, heard.events)
    assert (200, ERROR) == (whole.status, whole.json)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_http_errors_carry_an_error_object(client: Client, url: str, status: int) -> None:
    heard = await faulty(client, url, f"http_{status}")

    assert (status, status, "simulated fault") == (
        heard.status,
        heard.json["error"]["code"],
        heard.json["error"]["message"],
    )


async def test_a_stall_holds_everything_back_and_then_sends_it(client: Client, url: str) -> None:
    heard = await faulty(client, url, "stall")
    gaps_s = [(b - a) / 1e9 for (a, _), (b, _) in zip(heard.reads, heard.reads[1:], strict=False)]

    assert (WHOLE, FINISHED, 6) == (heard.text, heard.finish_reasons, heard.usages[-1]["completion_tokens"])
    assert 0.19 < max(gaps_s) < 0.4


async def test_no_usage_leaves_usage_out(client: Client, url: str) -> None:
    heard = await faulty(client, url, "no_usage")
    whole = await faulty(client, url, "no_usage", stream=False, stream_options=None)

    assert ([], WHOLE, FINISHED) == (heard.usages, heard.text, heard.finish_reasons)
    assert "usage" not in whole.json


async def test_no_finish_ends_with_done_and_no_reason(client: Client, url: str) -> None:
    heard = await faulty(client, url, "no_finish")

    assert (WHOLE, [None] * 6, "[DONE]") == (heard.text, heard.finish_reasons, heard.data[-1])


async def test_comments_stand_between_and_inside_events(client: Client, url: str) -> None:
    heard = await faulty(client, url, "comments")
    blocks = heard.raw.decode().removesuffix("\n\n").split("\n\n")

    assert 2 * 8 == len(blocks)  # six tokens, usage, [DONE]
    assert {": keep-alive"} == set(blocks[::2])
    assert all(block.startswith(": part of it\ndata: ") for block in blocks[1::2])
    assert WHOLE == heard.text


async def test_crlf_ends_every_line(client: Client, url: str) -> None:
    heard = await faulty(client, url, "crlf")

    assert heard.raw.count(b"\n") == heard.raw.count(b"\r\n") == 2 * 8
    assert (WHOLE, FINISHED) == (heard.text, heard.finish_reasons)


async def test_split_utf8_cuts_a_character_in_two_reads(client: Client, url: str) -> None:
    heard = await faulty(client, url, "split_utf8")

    assert any(data.endswith("\N{SLIGHTLY SMILING FACE}".encode()[:2]) for _, data in heard.reads)
    assert THREE + " \N{SLIGHTLY SMILING FACE} birch border" == heard.text
    assert 6 == heard.usages[-1]["completion_tokens"]


async def test_a_giant_event_is_padded_and_still_says_the_same(client: Client, url: str) -> None:
    heard = await faulty(client, url, "giant_event")

    assert 700_000 <= max(len(data) for data in heard.data) < 701_000
    assert (WHOLE, FINISHED) == (heard.text, heard.finish_reasons)


async def test_garbage_is_cut_json_between_whole_events(client: Client, url: str) -> None:
    heard = await faulty(client, url, "garbage")
    broken = []
    for data in heard.data[:-1]:
        try:
            json.loads(data)
        except ValueError:
            broken.append(data)

    assert 1 == len(broken)
    assert 7 == len(heard.data) - 1 - len(broken)  # six tokens and usage


async def test_a_whole_answer_can_be_dropped(client: Client, url: str) -> None:
    heard = await faulty(client, url, "disconnect", stream=False, stream_options=None)

    assert heard.cut
    assert b"" == heard.raw


async def test_every_kth_request_is_hit(client: Client) -> None:
    async with running(Profile(**FAST, fault_http_503_every=3, fault_no_usage_every=2)) as sim:
        heard = [await client.stream(sim.url, osl=2) for _ in range(7)]

    assert [200, 200, 503, 200, 200, 503, 200] == [h.status for h in heard]
    assert [1, 0, 0, 0, 1, 0, 1] == [len(h.usages) if h.status == 200 else 0 for h in heard]


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_also_hit_a_chat_of_one_token_from_a_boot_that_is_fresh(client: Client, fault: str) -> None:
    async with running(Profile(**FAST, fault_stall_s=0.01)) as sim:
        heard = await client.chat(sim.url, "hi", osl=1, sim_fault=fault)
        after = await client.chat(sim.url, "hi", osl=1)

    assert heard.raw != after.raw or heard.status != 200 or fault == "stall"
    assert (1, "length") == (after.usages[-1]["completion_tokens"], after.finish_reasons[-1])
