"""What an arm's server says of itself: tokens by two ways that agree, boot, idleness, and refusals in one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import orjson
import pytest
from loopback import HEAD, playing

from benchkit.arm import Arm, parse_arm
from benchkit.errors import BadInput, EndpointUnfit
from benchkit.load.endpoint import Shot, open_session, send
from benchkit.load.server import Server, completion_url, request_headers
from benchkit.protocol import Limits, Protocol, parse_protocol
from benchkit.record import RequestRecord
from benchkit.sim.process import SimProcess, spawned
from benchkit.sim.profile import Profile
from benchkit.workload.random import bodies, prompt_words, token_ids
from benchkit.workload.words import CANDIDATES

CASES = Path(__file__).parents[1] / "data" / "cases"


def protocol_of(workload: str = "", request: str = "") -> Protocol:
    return parse_protocol(
        f'schema = 1\nname = "p"\n[load]\nconcurrency = [1]\n[workload]\nisl = [100]\nosl = [4]\n{workload}\n'
        f"[request]\n{request}\n"
    )


def arm_of(url: str, **keys: str) -> Arm:
    lines = "".join(f'{k} = "{v}"\n' for k, v in keys.items())
    return parse_arm(f'schema = 1\nname = "a"\nmodel = "sim-model"\nendpoints = ["{url}/v1"]\n{lines}')


@pytest.fixture(scope="module")
def sim() -> Iterator[SimProcess]:
    with spawned(Profile(request_overhead_s=0.0, prefill_tok_per_s=0.0, step_base_s=0.001)) as process:
        yield process


@pytest.fixture(scope="module")
def mute() -> Iterator[SimProcess]:
    """A server without /tokenize and /metrics."""
    profile = Profile(tokenize=False, metrics=False, request_overhead_s=0.0, prefill_tok_per_s=0.0, step_base_s=0.001)
    with spawned(profile) as process:
        yield process


@pytest.fixture
async def control() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def sent(server: Server, protocol: Protocol, prompt: str | list[int], osl: int = 4) -> RequestRecord:
    shot = Shot(
        index=0,
        url=completion_url(server.arm),
        endpoint=server.arm.endpoints[0],
        headers=server.headers,
        body=orjson.dumps(server.body(protocol, prompt, max_tokens=osl)),
        isl=100,
        osl=osl,
        kv=0,
    )
    async with open_session(Limits()) as session:
        return await send(session, shot, stream=0, t_sched_ns=0, t_free_ns=0, limits=Limits())


@pytest.mark.parametrize(("api", "system"), [("chat", ""), ("chat", "Answer in one word."), ("completions", "")])
@pytest.mark.parametrize("tokenizer", ["sim", "mute"])
async def test_the_prompt_has_exactly_the_tokens_asked(
    request: pytest.FixtureRequest, control: aiohttp.ClientSession, api: str, system: str, tokenizer: str
) -> None:
    url = request.getfixturevalue(tokenizer).url
    protocol = protocol_of(request=f'system = "{system}"')
    server = Server(arm_of(url, api=api), control)
    await server.identify()

    vocabulary, source = await server.vocabulary(protocol)
    [body] = bodies(protocol.workload, protocol.cells[0], 1, vocabulary)
    text = prompt_words(protocol.workload, vocabulary, "run-1", protocol.cells[0], 0, body)
    record = await sent(server, protocol, text)

    assert 100 == record.prompt_tokens
    assert ("/tokenize" if tokenizer == "sim" else "usage of probe requests") == source
    assert (0 if tokenizer == "sim" else 2) == server.probes
    assert 256 == len(vocabulary.words)
    assert set(vocabulary.words) <= set(CANDIDATES)


async def test_token_ids_are_sent_as_they_are(sim: SimProcess, control: aiohttp.ClientSession) -> None:
    protocol = protocol_of('send = "ids"')
    server = Server(arm_of(sim.url, api="completions"), control)
    await server.identify()

    vocabulary, _ = await server.vocabulary(protocol)
    [body] = bodies(protocol.workload, protocol.cells[0], 1, vocabulary)
    text = prompt_words(protocol.workload, vocabulary, "run-1", protocol.cells[0], 0, body)
    record = await sent(server, protocol, token_ids(vocabulary, text))

    assert 100 == record.prompt_tokens


async def test_token_ids_need_a_server_that_tells_them(mute: SimProcess, control: aiohttp.ClientSession) -> None:
    server = Server(arm_of(mute.url, api="completions"), control)
    await server.identify()

    with pytest.raises(EndpointUnfit, match=r'workload\.send = "ids" needs /tokenize'):
        await server.vocabulary(protocol_of('send = "ids"'))


async def test_the_engine_the_boot_and_idleness_are_found(sim: SimProcess, control: aiohttp.ClientSession) -> None:
    server = Server(arm_of(sim.url), control)

    told, outcomes = await server.identify()

    assert "sim" == server.engine
    assert 131072 == told["max_model_len"]
    assert {} == outcomes
    boot = await server.boot_id()
    assert boot is not None
    assert boot.endswith("@" + sim.url.removeprefix("http://"))
    assert boot == await server.boot_id()
    assert (True, "vllm:num_requests_running + vllm:num_requests_waiting") == await server.wait_idle()


async def test_a_server_without_metrics_has_no_boot_no_counters_and_no_idle_signal(
    mute: SimProcess, control: aiohttp.ClientSession
) -> None:
    assert await Server(arm_of(mute.url), control).boot_id() is None
    assert (None, None) == await Server(arm_of(mute.url), control).wait_idle()
    assert {} == await Server(arm_of(mute.url), control).counters()


async def test_the_idle_gate_waits_for_a_foreign_request(control: aiohttp.ClientSession) -> None:
    protocol = protocol_of()
    with spawned(Profile(request_overhead_s=0.0, prefill_tok_per_s=0.0, step_base_s=0.02)) as busy:
        server = Server(arm_of(busy.url), control)
        await server.identify()
        foreign = asyncio.create_task(sent(server, protocol, "A word", osl=30))
        await asyncio.sleep(0.2)
        assert not foreign.done()

        idle, _ = await server.wait_idle()

        assert idle
        assert (await foreign).ok


async def test_case_b32_the_field_that_a_server_refuses_is_found_before_the_run(
    control: aiohttp.ClientSession,
) -> None:
    refusal = (CASES / "B32.json").read_bytes()
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":1}}\n\n'
    finish = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"length"}]}\n\n'
    head = (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    )
    plays = [[(0.0, head % len(refusal) + refusal)], [(0.0, HEAD + finish + usage + b"data: [DONE]\n\n")]]
    async with playing(lambda i: plays[min(i, 1)]) as fake:
        server = Server(arm_of(fake.url, engine="openai"), control)
        assert 8 == await server._probed_tokens(protocol_of(), "A")

        sent_bodies = [json.loads(body) for body in fake.bodies]

    assert ["max_tokens", "max_completion_tokens"] == [
        next(k for k in ("max_completion_tokens", "max_tokens") if k in body) for body in sent_bodies
    ]
    assert "max_tokens" not in sent_bodies[1]
    assert "max_completion_tokens" in server.body(protocol_of(), "A", max_tokens=5)


async def test_a_stream_without_usage_cannot_be_probed(control: aiohttp.ClientSession) -> None:
    finish = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    async with playing([(0.0, HEAD + finish)]) as fake:
        with pytest.raises(EndpointUnfit, match="the stream carries no usage"):
            await Server(arm_of(fake.url, engine="openai"), control)._probed_tokens(protocol_of(), "A")


def test_keys_come_from_the_environment_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = arm_of("http://127.0.0.1:9", api_key_env="BENCHKIT_TEST_KEY")
    monkeypatch.setenv("BENCHKIT_TEST_KEY", "s3cret")
    headers, secrets = request_headers(arm)
    assert "Bearer s3cret" == headers["Authorization"]
    assert ("s3cret",) == secrets

    monkeypatch.delenv("BENCHKIT_TEST_KEY")
    with pytest.raises(BadInput, match=r"arm a: the environment variable BENCHKIT_TEST_KEY .* is not set"):
        request_headers(arm)
