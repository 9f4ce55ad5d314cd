"""What the endpoint answers: counts, usage, tokenization, errors, counters, restart."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from simclient import Client

from benchkit.sim.profile import Profile
from benchkit.sim.server import running
from benchkit.sim.tokens import ToyTokenizer


def swift(**keys: Any) -> Profile:
    """Steps of 1 ms, so that a test of bytes does not wait."""
    fast: dict[str, Any] = {"step_base_s": 0.001, "step_per_seq_s": 0, "request_overhead_s": 0}
    return Profile(**fast | {"prefill_tok_per_s": 0, **keys})


def count(text: str) -> int:
    return len(ToyTokenizer().encode(text))


async def test_a_text_stream_has_its_tokens_its_usage_and_its_end(client: Client) -> None:
    async with running(swift()) as sim:
        heard = await client.stream(sim.url, words=10, osl=7)

    assert [None] * 6 + ["length"] == heard.finish_reasons
    assert 7 == count(heard.text)
    assert "[DONE]" == heard.data[-1]
    assert [] == heard.events[-1]["choices"]
    usage = {"prompt_tokens": 10, "total_tokens": 17, "completion_tokens": 7}
    assert [usage | {"prompt_tokens_details": {"cached_tokens": 0}}] == heard.usages


async def test_a_chat_opens_with_a_role_that_shares_the_first_tokens_read(client: Client) -> None:
    async with running(swift(request_overhead_s=0.05)) as sim:
        heard = await client.chat(sim.url, "Say something", osl=5)

    assert {"role": "assistant", "content": ""} == heard.events[0]["choices"][0]["delta"]
    assert b'"role"' in heard.reads[0][1] and b'"content":" ' in heard.reads[0][1]
    assert 5 == count(heard.text) == heard.usages[-1]["completion_tokens"]


async def test_the_role_can_come_long_before_the_first_token(client: Client) -> None:
    async with running(swift(request_overhead_s=0.1, role_chunk_early=True)) as sim:
        heard = await client.chat(sim.url, "Say something", osl=2)

    assert b'"role"' in heard.reads[0][1] and b'"content":" ' not in heard.reads[0][1]
    assert (heard.output_ns[0] - heard.reads[0][0]) / 1e9 > 0.08


@pytest.mark.parametrize(
    "text", ["plain words here", "a verylongwordindeed, 1234!\n\n  twice", "価格は千円 🙂", "x" * 30000]
)
async def test_usage_says_what_tokenize_says(client: Client, text: str) -> None:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": [{"type": "text", "text": "go on"}]}]
    async with running(swift()) as sim:
        told = await client.post(
            sim.url + "/tokenize", {"model": "sim-model", "prompt": text, "add_special_tokens": True}
        )
        llama = await client.post(sim.url + "/tokenize", {"content": text})
        used = await client.post(sim.url + "/v1/completions", {"prompt": text, "max_tokens": 1})
        ids = await client.post(sim.url + "/v1/completions", {"prompt": told.json["tokens"], "max_tokens": 1})
        chat_told = await client.post(sim.url + "/tokenize", {"messages": messages, "add_generation_prompt": True})
        chat_used = await client.post(sim.url + "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        back = await client.post(sim.url + "/detokenize", {"tokens": told.json["tokens"]})

    assert count(text) == told.json["count"] == len(told.json["tokens"])
    assert 131072 == told.json["max_model_len"]
    assert {"tokens": told.json["tokens"]} == llama.json
    assert told.json["count"] == used.json["usage"]["prompt_tokens"] == ids.json["usage"]["prompt_tokens"]
    # Two messages of 4 template tokens each, and 3 for the generation prompt.
    assert count(text) + count("go on") + 11 == chat_told.json["count"] == chat_used.json["usage"]["prompt_tokens"]
    assert text == back.json["prompt"]


async def test_an_answer_can_come_whole(client: Client) -> None:
    async with running(swift(reasoning=2, tokens_per_step=4)) as sim:
        chat = await client.chat(sim.url, "hello", osl=6, stream=False, stream_options=None)
        text = await client.post(
            sim.url + "/v1/completions", {"prompt": "a b", "max_tokens": 6, "return_token_ids": True}
        )

    message = chat.json["choices"][0]["message"]
    assert (4, 2) == (count(message["content"]), count(message["reasoning_content"]))
    assert {"reasoning_tokens": 2} == chat.json["usage"]["completion_tokens_details"]
    assert ("length", 6) == (text.json["choices"][0]["finish_reason"], count(text.json["choices"][0]["text"]))
    assert ToyTokenizer().encode(text.json["choices"][0]["text"]) == text.json["choices"][0]["token_ids"]


async def test_reasoning_comes_first_and_counts_as_output(client: Client) -> None:
    async with running(swift(reasoning=4, tokens_per_step=2)) as sim:
        heard = await client.chat(sim.url, "think", osl=8)
        starved = await client.chat(sim.url, "think", osl=3)

    deltas = [e["choices"][0]["delta"] for e in heard.events if e["choices"]][1:]
    assert [["reasoning_content"], ["reasoning_content"], ["reasoning_content", "content"]] == [
        list(d) for d in deltas[:3]
    ]
    assert 4 == sum(count(d.get("reasoning_content", "")) for d in deltas) == count(heard.text)
    assert (8, 4) == (
        heard.usages[-1]["completion_tokens"],
        heard.usages[-1]["completion_tokens_details"]["reasoning_tokens"],
    )
    assert "" == starved.text
    assert 3 == starved.usages[-1]["completion_tokens_details"]["reasoning_tokens"]


async def test_a_step_is_one_event_or_one_event_a_token_in_one_write(client: Client) -> None:
    async with running(swift(tokens_per_step=3)) as sim:
        joined = await client.stream(
            sim.url, osl=8, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
    async with running(swift(tokens_per_step=3, event_per_token=True, step_base_s=0.03)) as sim:
        single = await client.stream(sim.url, osl=8)

    assert [1, 4, 7, 8, 8] == [u["completion_tokens"] for u in joined.usages]
    assert 8 == len(single.finish_reasons)
    assert 4 == len(single.output_ns)
    assert joined.text == single.text


@pytest.mark.parametrize(
    ("mode", "asked", "carriers"),
    [
        ("final", {}, [0, 0, 0]),
        ("final", {"include_usage": True}, [0, 0, 0, 3]),
        ("final", {"include_usage": True, "continuous_usage_stats": True}, [1, 2, 3, 3]),
        ("none", {"include_usage": True, "continuous_usage_stats": True}, [0, 0, 0]),
        ("forced", {}, [1, 2, 3, 3]),
        ("finish", {"include_usage": True}, [0, 0, 3]),
    ],
)
async def test_usage_is_where_it_was_asked_for_or_where_the_profile_puts_it(
    client: Client, mode: str, asked: dict[str, bool], carriers: list[int]
) -> None:
    async with running(swift(usage_mode=mode)) as sim:
        heard = await client.stream(sim.url, osl=3, stream_options=asked)

    assert carriers == [(event.get("usage") or {"completion_tokens": 0})["completion_tokens"] for event in heard.events]


async def test_cached_tokens_are_whole_blocks_of_what_was_seen(client: Client) -> None:
    def cached(heard: Any) -> int:
        return int(heard.usages[-1]["prompt_tokens_details"]["cached_tokens"])

    async with running(swift(block_size=16)) as sim:
        seen = [cached(await client.stream(sim.url, words=words, osl=1)) for words in (100, 100, 96, 40, 5)]
        nonce = cached(await client.stream(sim.url, osl=1, prompt="fresh" + " word" * 99))

    assert [0, 96, 80, 32, 0] == seen
    assert 0 == nonce


@pytest.mark.parametrize(
    ("body", "status", "kind", "part"),
    [
        ({"model": "other"}, 404, "NotFoundError", "`other` does not exist"),
        ({"max_tokens": 91}, 400, "BadRequestError", "maximum context length is 100 tokens"),
        ({"prompt": " a" * 100}, 400, "BadRequestError", "maximum context length is 100 tokens"),
        ({"max_tokens": 60}, 400, "BadRequestError", "KV cache holds 64 tokens"),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens must be"),
        ({"prompt": ""}, 400, "BadRequestError", "prompt is empty"),
        ({"prompt": [1, -2]}, 400, "BadRequestError", "token ids"),
        ({"prompt": [2**31]}, 400, "BadRequestError", "token ids"),
        ({"prompt": {"a": 1}}, 400, "BadRequestError", "token ids"),
        ({"stream": "yes"}, 400, "BadRequestError", "stream: expected true or false"),
        ({"stream": False}, 400, "BadRequestError", "stream_options"),
        ({"sim_fault": "fire"}, 400, "BadRequestError", "sim_fault: expected one of disconnect"),
    ],
)
async def test_what_cannot_be_served_gets_an_error_object(
    client: Client, body: dict[str, Any], status: int, kind: str, part: str
) -> None:
    async with running(swift(max_model_len=100, kv_pool_tokens=64)) as sim:
        heard = await client.stream(sim.url, words=10, **body)
        after = await client.metrics(sim.url)

    error = heard.json["error"]
    assert (status, status, kind) == (heard.status, error["code"], error["type"])
    assert part in error["message"]
    assert 0 == after["vllm:num_requests_waiting"] + after["vllm:num_requests_running"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"messages": []}', b'{"messages": [{"content": "x"}]}'])
async def test_a_bad_body_is_a_400(client: Client, raw: bytes) -> None:
    async with running(swift()) as sim:
        heard = await client.post(sim.url + "/v1/chat/completions", raw)

    assert (400, 400) == (heard.status, heard.json["error"]["code"])


async def test_both_names_of_max_tokens_are_taken_and_sampling_keys_are_ignored(client: Client) -> None:
    more = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 1, "chat_template_kwargs": {"enable_thinking": True}}
    async with running(swift()) as sim:
        heard = await client.chat(sim.url, "hello", osl=9, max_completion_tokens=4, **more)
        text = await client.stream(sim.url, osl=9, max_tokens=None, max_completion_tokens=3)

    assert (4, 3) == (heard.usages[-1]["completion_tokens"], text.usages[-1]["completion_tokens"])


async def test_a_natural_end_says_stop_unless_eos_is_ignored(client: Client) -> None:
    async with running(swift(natural_osl=4)) as sim:
        free = await client.stream(sim.url, osl=9, ignore_eos=False)
        held = await client.stream(sim.url, osl=9, ignore_eos=True)

    assert ("stop", 4) == (free.finish_reasons[-1], count(free.text))
    assert ("length", 9) == (held.finish_reasons[-1], count(held.text))


async def test_models_health_and_version_answer(client: Client) -> None:
    async with running(swift(model="m/n", max_model_len=77)) as sim:
        async with client.session.get(sim.url + "/v1/models") as response:
            models = await response.json()
        async with client.session.get(sim.url + "/health") as response:
            assert (200, b"") == (response.status, await response.read())
        async with client.session.get(sim.url + "/version") as response:
            assert {"version": "sim-1"} == await response.json()

    assert [("m/n", 77)] == [(m["id"], m["max_model_len"]) for m in models["data"]]


async def test_what_the_profile_leaves_out_is_a_404(client: Client) -> None:
    async with running(swift(metrics=False, tokenize=False)) as sim:
        async with client.session.get(sim.url + "/metrics") as response:
            assert 404 == response.status
        assert 404 == (await client.post(sim.url + "/tokenize", {"prompt": "x"})).status


async def test_counters_move_by_exactly_what_was_done(client: Client) -> None:
    async with running(swift(acceptance=[1, 1, 0], block_size=16, natural_osl=7)) as sim:
        before = await client.metrics(sim.url)
        for _ in range(2):
            await client.stream(sim.url, words=33, osl=10)  # 1 token, then three steps of three
        await client.stream(sim.url, words=1, osl=10, ignore_eos=False)  # 1, then two steps
        after = await client.metrics(sim.url)

    moved = {name: value - before[name] for name, value in after.items() if value != before[name]}
    vllm = {name.removeprefix("vllm:"): value for name, value in moved.items() if "seconds" not in name}
    assert {
        "prompt_tokens_total": 67,
        "generation_tokens_total": 27,
        'request_success_total{finished_reason="length"}': 2,
        'request_success_total{finished_reason="stop"}': 1,
        "prefix_cache_queries_total": 67,
        "prefix_cache_hits_total": 32,
        "spec_decode_num_drafts_total": 8,
        "spec_decode_num_draft_tokens_total": 24,
        "spec_decode_num_accepted_tokens_total": 16,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 8,
        'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 8,
    } == vllm
    assert 3 == moved["vllm:time_to_first_token_seconds_count"]
    assert 3 == moved["vllm:request_time_per_output_token_seconds_count"]
    # Steps of 1 ms carry three tokens: (3 ms / 9 + 3 ms / 9 + 2 ms / 6) in all.
    assert 0.001 == pytest.approx(moved["vllm:request_time_per_output_token_seconds_sum"], rel=1e-6)
    assert 0 == after["vllm:num_preemptions_total"]
    assert before["process_start_time_seconds"] == after["vllm:prompt_tokens_created"]


async def test_a_client_that_leaves_frees_its_slot(client: Client) -> None:
    async with running(swift(max_num_seqs=1, step_base_s=0.01)) as sim:
        leaver = asyncio.create_task(client.stream(sim.url, osl=5000))
        await client.settled(sim.url, lambda m: m["vllm:num_requests_running"] == 1)
        waiter = asyncio.create_task(client.stream(sim.url, osl=2))
        await client.settled(sim.url, lambda m: m["vllm:num_requests_waiting"] == 1)
        leaver.cancel()
        heard = await asyncio.wait_for(waiter, 2)
        after = await client.metrics(sim.url)

    assert 2 == heard.usages[-1]["completion_tokens"]
    assert (1, 1) == (
        after['vllm:request_success_total{finished_reason="abort"}'],
        after['vllm:request_success_total{finished_reason="length"}'],
    )
    assert 0 == after["vllm:num_requests_running"] + after["vllm:num_requests_waiting"]


async def test_a_restart_is_a_fresh_boot_on_the_same_port(client: Client) -> None:
    async with running(swift(step_base_s=0.01, cold_requests=1, cold_factor=2)) as sim:
        await client.stream(sim.url, words=64, osl=2)
        before = await client.metrics(sim.url)
        under_way = asyncio.create_task(client.stream(sim.url, osl=5000))
        await client.settled(sim.url, lambda m: m["vllm:num_requests_running"] == 1)
        sim.restart()
        cut = await under_way
        fresh = await client.metrics(sim.url)
        again = await client.stream(sim.url, words=64, osl=2)
        after = await client.metrics(sim.url)

    assert cut.cut and "[DONE]" not in cut.data
    assert fresh["process_start_time_seconds"] - before["process_start_time_seconds"] >= 0.001
    assert 0 == sum(fresh[name] for name in fresh if name.endswith(("_total", "_count")) or "success_total" in name)
    assert 0 == again.usages[-1]["prompt_tokens_details"]["cached_tokens"]
    # One decode step of 10 ms, cold both times.
    cold_s = [m["vllm:request_time_per_output_token_seconds_sum"] for m in (before, after)]
    assert [0.02, 0.02] == pytest.approx(cold_s)


async def test_several_hundred_connections_at_once_are_all_served(client: Client) -> None:
    async with running(swift(max_num_seqs=1000)) as sim:
        heard = await asyncio.gather(*(client.stream(sim.url, osl=3) for _ in range(300)))

    assert {(200, 3)} == {(h.status, h.usages[-1]["completion_tokens"]) for h in heard}


async def test_each_event_is_json_of_the_shape_clients_know(client: Client) -> None:
    async with running(swift()) as sim:
        heard = await client.chat(sim.url, "hello", osl=1)

    role, token, usage = (json.loads(data) for data in heard.data[:-1])
    assert {"id", "object", "created", "model", "choices"} == set(role)
    assert ("chat.completion.chunk", "sim-model") == (token["object"], token["model"])
    assert role["id"] == token["id"] == usage["id"]
    assert {"index": 0, "delta": {"content": " amber"}, "logprobs": None, "finish_reason": "length"} == token[
        "choices"
    ][0]
