"""What an arm's servers say of themselves: identity, boot, counters, idleness, tokens."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from benchkit.arm import Arm
from benchkit.errors import BadInput, EndpointUnfit
from benchkit.load import wire
from benchkit.load.endpoint import without_secrets
from benchkit.load.scrape import Scrape, read_scrape, summed
from benchkit.load.stream import StreamReader
from benchkit.protocol import Protocol
from benchkit.workload.random import Vocabulary
from benchkit.workload.words import CANDIDATES, LETTERS, SYLLABLES

ASK_TIMEOUT_S = 20.0
IDLE_TIMEOUT_S = 120.0
SETTLE_S = 2.0
RESIDUE_S = 10.0

# What may be stored of a server's own words: real ones also tell environment variables and paths.
_TOLD_CACHE_KEYS = ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "sliding_window")
_OUTCOME_CACHE_KEYS = ("num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens")
_TOLD_SGLANG_KEYS = (
    "version", "context_length", "dtype", "quantization", "kv_cache_dtype", "tp_size", "dp_size", "pp_size", "ep_size",
    "page_size", "mem_fraction_static", "max_running_requests", "max_total_tokens", "chunked_prefill_size",
    "schedule_policy", "disable_radix_cache", "disable_overlap_schedule", "disable_cuda_graph", "attention_backend",
    "sampling_backend", "moe_runner_backend", "fp8_gemm_runner_backend", "stream_interval", "enable_cache_report",
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip
_OUTCOME_SGLANG_KEYS = ("max_total_num_tokens", "max_req_input_len")
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tabbyapi": "tabbyapi", "benchkit-sim": "sim"}


class Server:
    """The servers behind an arm, asked over a session of their own so that measured connections stay theirs."""

    def __init__(self, arm: Arm, session: aiohttp.ClientSession) -> None:
        self.arm = arm
        self.session = session
        self.engine: str = arm.engine
        self.headers, self.secrets = request_headers(arm)
        self.max_tokens_field = "max_tokens"
        self.tells_boot = False
        self.probes = 0

    async def identify(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Finds engine, version and limits, and checks that the model is served.

        Returns:
            What goes into the arm hash, and outcomes that do not.

        Raises:
            EndpointUnfit: unreachable, refused, or another model.
        """
        facts = [await self._identify(endpoint) for endpoint in self.arm.endpoints]
        return _joined([told for told, _ in facts]), _joined([outcomes for _, outcomes in facts])

    async def _identify(self, endpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
        told: dict[str, Any] = {}
        outcomes: dict[str, Any] = {}
        models = await self._models(endpoint)
        served = [m for m in models if m.get("id") == self.arm.model]
        if models and not served:
            names = ", ".join(sorted(str(m.get("id")) for m in models)[:8])
            raise EndpointUnfit(f"{endpoint}: does not serve the model {self.arm.model}; it serves: {names}")
        entry = served[0] if served else {}
        if self.engine == "auto":
            self.engine = _ENGINES.get(str(entry.get("owned_by", "")).lower(), "openai")
        if isinstance(entry.get("max_model_len"), int):
            told["max_model_len"] = entry["max_model_len"]
        root = root_of(endpoint)
        version = await self._get_json(root + "/version")
        if isinstance(version, dict) and isinstance(version.get("version"), str):
            told["version"] = version["version"]
        if self.engine == "llamacpp":
            # It closes the connection after a streamed answer although its headers say keep-alive.
            self.headers["Connection"] = "close"
            props = await self._get_json(root + "/props")
            if isinstance(props, dict):
                told["version"] = str(props.get("build_info"))
                told["total_slots"] = props.get("total_slots")
                settings = props.get("default_generation_settings")
                told["n_ctx"] = settings.get("n_ctx") if isinstance(settings, dict) else None
        if self.engine == "sglang":
            info = await self._get_json(root + "/server_info")
            if isinstance(info, dict):
                told |= {k: info[k] for k in _TOLD_SGLANG_KEYS if info.get(k) is not None}
                outcomes |= {k: info[k] for k in _OUTCOME_SGLANG_KEYS if info.get(k) is not None}
        scrape = await self._scrape(endpoint)
        if scrape is not None:
            told |= {k: scrape.cache_config[k] for k in _TOLD_CACHE_KEYS if k in scrape.cache_config}
            outcomes |= {k: scrape.cache_config[k] for k in _OUTCOME_CACHE_KEYS if k in scrape.cache_config}
        return told, outcomes

    async def boot_id(self, *, patient: bool = False) -> str | None:
        """Which boot of the server answers, by its own word; None where it does not tell.

        With `patient`, a server that has told once is asked again before its silence counts: one lost answer must
        not make a fresh boot look like one that does not tell.
        """
        for attempt in range(5 if patient else 1):
            starts = [s.started for s in await self._scrapes() or ()]
            if starts and None not in starts:
                self.tells_boot = True
                named = zip(starts, self.arm.endpoints, strict=True)
                return ",".join(f"{start}@{urlsplit(endpoint).netloc}" for start, endpoint in named)
            if not self.tells_boot:
                return None
            await asyncio.sleep(0.1 * 2**attempt)
        return None

    async def reach(self) -> None:
        """Raises EndpointUnfit where an endpoint cannot be reached, so that a dead server ends a session early."""
        for endpoint in self.arm.endpoints:
            await self._models(endpoint)

    async def counters(self, *, settled: bool = False) -> dict[str, float]:
        """The server's monotonic counters, summed over endpoints; empty where it has none.

        With `settled`, waits up to two seconds for the server to see its last request end: counters of a request
        move only then.
        """
        deadline = time.perf_counter() + SETTLE_S
        while True:
            scrapes = await self._scrapes()
            if scrapes is None:
                return {}
            if not settled or not any(s.busy for s in scrapes) or time.perf_counter() > deadline:
                return summed(scrapes)
            await asyncio.sleep(0.02)

    async def gauges(self) -> dict[str, float]:
        """Running, waiting and KV use at this moment, the sum (KV: the highest) over endpoints."""
        out: dict[str, float] = {}
        for endpoint in self.arm.endpoints:
            scrape = await self._scrape(endpoint)
            for name, value in ({} if scrape is None else scrape.gauges).items():
                out[name] = max(out.get(name, 0.0), value) if name == "kv_usage" else out.get(name, 0.0) + value
        return out

    async def wait_idle(self) -> tuple[bool | None, str | None]:
        """Waits until no endpoint works on a request, by a signal that moves at once.

        Returns:
            (True, signal); (False, signal) if it was still busy after two minutes; (None, None) without a signal.
        """
        started = since = time.perf_counter()
        residue: list[float | None] = []
        while True:
            scrapes = await self._scrapes()
            if scrapes is None or any(s.idle_signal is None for s in scrapes):
                return None, None
            now, busy = time.perf_counter(), [s.busy for s in scrapes]
            if busy != residue or any(s.gauges.get(g) for s in scrapes for g in ("running", "waiting")):
                residue, since = busy, now
            # SGLang may keep a few tokens in use for good: a residue that does not move, and nothing running.
            if not any(busy) or now - since > RESIDUE_S:
                return True, scrapes[0].idle_signal
            if now - started > IDLE_TIMEOUT_S:
                return False, scrapes[0].idle_signal
            await asyncio.sleep(0.05)

    # --- tokens -------------------------------------------------------------------------------------------

    async def vocabulary(self, protocol: Protocol) -> tuple[Vocabulary, str]:
        """Words of one token each on this server and its template's tokens, by `/tokenize` or by probing usage.

        Returns:
            The vocabulary, and where the counts came from.

        Raises:
            EndpointUnfit: the server counts no prompt tokens at all, or knows too few of the words.
        """
        bare = await self._text_tokens(LETTERS[0])
        if bare is None:
            count, source = self._probed_tokens, "usage of probe requests"
            if protocol.workload.send == "ids":
                raise EndpointUnfit(
                    f'{self.arm.endpoints[0]}: workload.send = "ids" needs /tokenize, which this server lacks'
                )
        else:
            count, source = self._prompt_tokens, "/tokenize"
        if self.engine == "openai":  # an unknown server: find out how it wants max_tokens before anything is measured
            await self._probed_tokens(protocol, LETTERS[0])
        base = await count(protocol, LETTERS[0])
        letter_tokens = 1
        words: list[str] = []
        # Where the first 256 are good, as in nearly every tokenizer, one question is enough.
        for group, enough in ((CANDIDATES[:256], 256), (CANDIDATES[256:], 64), (SYLLABLES, 0)):
            words += await self._single(protocol, count, base, group)
            if len(words) >= enough:
                break
        ids = await self._ids(words[:256]) if protocol.workload.send == "ids" else None
        return Vocabulary.of(words, template_tokens=base - letter_tokens, ids=ids), source

    async def _single(self, protocol: Protocol, count: Any, base: int, group: Sequence[str]) -> list[str]:
        """Those of a group that are one token after a blank, by halving: one question where all are."""
        found = await count(protocol, " ".join((LETTERS[0], *group))) - base
        if found == len(group):
            return list(group)
        if len(group) == 1 or found >= 2 * len(group) > 8:
            return []  # a group where words average two tokens holds too few good ones to be worth the questions
        half = len(group) // 2
        return [
            *await self._single(protocol, count, base, group[:half]),
            *await self._single(protocol, count, base, group[half:]),
        ]

    async def _ids(self, words: Sequence[str]) -> dict[str, int]:
        bare = await self._text_tokens(LETTERS[0]) or []
        head = len(bare) - 1  # what the tokenizer puts in front of every text
        out = {}
        for letter in LETTERS:
            out[letter] = (await self._text_tokens(letter) or [])[head]
        for word in words:
            out[word] = (await self._text_tokens(f"{LETTERS[0]} {word}") or [])[head + 1]
        return out

    async def _text_tokens(self, text: str) -> list[int] | None:
        """The token ids of a text as a completions prompt, specials included; None without `/tokenize`."""
        url = root_of(self.arm.endpoints[0]) + "/tokenize"
        if self.engine == "llamacpp":
            answer = await self._post_json(url, {"content": text, "add_special": True, "parse_special": True})
        else:
            answer = await self._post_json(url, {"model": self.arm.model, "prompt": text, "add_special_tokens": True})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) and tokens and isinstance(tokens[0], int) else None

    async def _prompt_tokens(self, protocol: Protocol, text: str) -> int:
        """How many prompt tokens a request with this text will have, by the server's tokenizer."""
        tokens: int | None = None
        if self.arm.api == "completions":
            ids = await self._text_tokens(text)
            tokens = None if ids is None else len(ids)
        else:
            body = self.body(protocol, text, max_tokens=1)
            extra = {k: body[k] for k in _TEMPLATE_KEYS if k in body}
            asked = {"messages": body["messages"], **extra}
            root = root_of(self.arm.endpoints[0])
            if self.engine == "llamacpp":
                answer = await self._post_json(root + "/apply-template", asked)
                if isinstance(answer, dict) and isinstance(answer.get("prompt"), str):
                    ids = await self._text_tokens(answer["prompt"])
                    tokens = None if ids is None else len(ids)
            else:
                generate = {"add_generation_prompt": body.get("add_generation_prompt", True)}
                answer = await self._post_json(root + "/tokenize", {"model": self.arm.model, **generate, **asked})
                count = answer.get("count") if isinstance(answer, dict) else None
                tokens = count if isinstance(count, int) else None
        return tokens if tokens is not None else await self._probed_tokens(protocol, text)

    async def _probed_tokens(self, protocol: Protocol, text: str) -> int:
        """How many prompt tokens a request with this text has: one answer token, and `usage` read."""
        self.probes += 1
        url, body = completion_url(self.arm), self.body(protocol, text, max_tokens=1)
        refused: wire.BodyReading | None = None
        reader = StreamReader()
        try:
            timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S * 6)
            async with self.session.post(url, data=orjson.dumps(body), headers=self.headers, timeout=timeout) as answer:
                data = await answer.read()
                if answer.status != 200:
                    refused = wire.read_body(answer.status, answer.content_type, data)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EndpointUnfit(f"{url}: no answer to a probe: {str(error) or type(error).__name__}") from None
        if refused is not None:
            said = refused.wire_error
            if self.max_tokens_field == "max_tokens" and said is not None and said.param == "max_tokens":
                self.max_tokens_field = "max_completion_tokens"
                return await self._probed_tokens(protocol, text)
            raise EndpointUnfit(f"{url}: refused a probe request: {self._shown(refused.error_detail)}")
        reader.feed(0, data)
        reading_ = reader.end(0)
        if reading_.prompt_tokens is None:
            why = reading_.error_detail or "the stream carries no usage"
            raise EndpointUnfit(f"{url}: cannot be measured: {self._shown(why)}")
        return reading_.prompt_tokens

    def body(self, protocol: Protocol, prompt: str | Sequence[int], *, max_tokens: int) -> dict[str, Any]:
        """The JSON body of one request of this protocol on this arm."""
        extra = wire.merged(protocol.request.extra_body, self.arm.request.extra_body)
        return wire.request_body(
            api=self.arm.api,
            engine=self.engine,
            model=self.arm.model,
            prompt=prompt,
            max_tokens=max_tokens,
            max_tokens_field=self.max_tokens_field,
            system=protocol.request.system,
            assistant_prefix=protocol.request.assistant_prefix,
            ignore_eos=protocol.workload.ignore_eos,
            continuous_usage=self.engine in _CONTINUOUS_USAGE,
            sampling=protocol.sampling.model_dump(mode="json"),
            extra_body=extra,
        )

    def _shown(self, text: str) -> str:
        return without_secrets(text, self.secrets)

    # --- one question -------------------------------------------------------------------------------------

    async def _models(self, endpoint: str) -> list[dict[str, Any]]:
        url = endpoint + "/models"
        try:
            async with self.session.get(url, headers=self.headers, timeout=_ask_timeout()) as answer:
                data = await answer.read()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise EndpointUnfit(f"{endpoint}: cannot be reached ({why}); is the server up?") from None
        if status in (401, 403):
            raise EndpointUnfit(
                f"{url}: status {status}; set api_key_env in the arm to the variable that holds the key"
            )
        if status == 503:
            raise EndpointUnfit(f"{url}: status 503, the server is still loading; wait until it is ready")
        if status == 404 and not endpoint.endswith("/v1"):
            raise EndpointUnfit(f"{url}: status 404; endpoints of this API mostly end in /v1")
        try:
            found = orjson.loads(data).get("data") if status == 200 else None
        except (orjson.JSONDecodeError, AttributeError):
            found = None
        return [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []

    async def _scrapes(self) -> list[Scrape] | None:
        """One reading of every endpoint's metrics; None unless all of them answer."""
        scrapes = [await self._scrape(endpoint) for endpoint in self.arm.endpoints]
        known = [s for s in scrapes if s is not None]
        return known if len(known) == len(scrapes) else None

    async def _scrape(self, endpoint: str) -> Scrape | None:
        try:
            url = root_of(endpoint) + "/metrics"
            async with self.session.get(url, headers=self.headers, timeout=_ask_timeout()) as answer:
                start = answer.headers.get("Process-Start-Time-Unix")
                return read_scrape(await answer.text(), start) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
            return None

    async def _get_json(self, url: str) -> Any:
        return await self._json("GET", url, None)

    async def _post_json(self, url: str, body: Mapping[str, Any]) -> Any:
        return await self._json("POST", url, body)

    async def _json(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        """The JSON that a URL answers with status 200; None for anything else: such routes are optional."""
        try:
            data = None if body is None else orjson.dumps(body)
            async with self.session.request(
                method, url, data=data, headers=self.headers, timeout=_ask_timeout()
            ) as answer:
                return orjson.loads(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError):
            return None


_TEMPLATE_KEYS = ("chat_template_kwargs", "continue_final_message", "add_generation_prompt")
_CONTINUOUS_USAGE = frozenset({"vllm", "sglang", "sim"})


def request_headers(arm: Arm) -> tuple[dict[str, str], tuple[str, ...]]:
    """The headers of every request to an arm, and those of their values that must never be kept or shown.

    Raises:
        BadInput: a variable that the arm names is not set.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    wanted = dict(arm.request.headers_env)
    if arm.api_key_env:
        wanted["Authorization"] = arm.api_key_env
    secrets = []
    for header, variable in wanted.items():
        value = os.environ.get(variable)
        if not value:
            raise BadInput(f"arm {arm.name}: the environment variable {variable} (for {header}) is not set")
        headers[header] = f"Bearer {value}" if header == "Authorization" and " " not in value else value
        secrets += [value, value.rpartition(" ")[2]]
    return headers, tuple(sorted(set(secrets), key=len, reverse=True))


def completion_url(arm: Arm, endpoint: str | None = None) -> str:
    """Where an arm's requests go."""
    path = "/chat/completions" if arm.api == "chat" else "/completions"
    return (endpoint or arm.endpoints[0]) + path


def root_of(endpoint: str) -> str:
    """The server's root: the endpoint without its `/v1`."""
    return endpoint.removesuffix("/v1")


def _ask_timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)


def _joined(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One fact per name; where endpoints differ, all their values in the endpoints' order, None for none."""
    out: dict[str, Any] = {}
    for name in sorted({name for one in facts for name in one}):
        values = [one.get(name) for one in facts]
        out[name] = values[0] if all(v == values[0] for v in values) else values
    return out
