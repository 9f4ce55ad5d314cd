"""A plain client that keeps every read with its time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came back for one request."""

    status: int
    t_send_ns: int
    reads: tuple[tuple[int, bytes], ...]
    cut: bool  # the HTTP message did not end as it should

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.reads)

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def data(self) -> list[str]:
        """The data lines of the stream, in order."""
        return [line[6:] for line in self.raw.decode().splitlines() if line.startswith("data: ")]

    @property
    def events(self) -> list[Any]:
        return [json.loads(data) for data in self.data if data != "[DONE]"]

    @property
    def text(self) -> str:
        choices = [event["choices"][0] for event in self.events if event.get("choices")]
        return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)

    @property
    def finish_reasons(self) -> list[str | None]:
        return [event["choices"][0]["finish_reason"] for event in self.events if event.get("choices")]

    @property
    def usages(self) -> list[Any]:
        return [event["usage"] for event in self.events if event.get("usage")]

    @property
    def output_ns(self) -> list[int]:
        """When each read arrived that carries output."""
        return [t for t, data in self.reads if b'"text":"' in data or b'"content":" ' in data]

    @property
    def ttft_s(self) -> float:
        return (self.output_ns[0] - self.t_send_ns) / 1e9

    @property
    def e2e_s(self) -> float:
        return (self.output_ns[-1] - self.t_send_ns) / 1e9


class Client:
    """One session; bodies are sent as they are."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, url: str, body: dict[str, Any] | bytes) -> Heard:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reads: list[tuple[int, bytes]] = []
        cut = False
        t_send_ns = time.perf_counter_ns()
        status = 0
        try:
            async with self.session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
                status = response.status
                async for chunk in response.content.iter_any():
                    reads.append((time.perf_counter_ns(), chunk))
        except aiohttp.ClientError:
            cut = True
        return Heard(status=status, t_send_ns=t_send_ns, reads=tuple(reads), cut=cut)

    async def stream(self, url: str, *, words: int = 10, osl: int = 8, **more: Any) -> Heard:
        """A streamed text completion of a prompt of `words` one-token words, with usage asked for."""
        body = {"prompt": " word" * words, "max_tokens": osl, "stream": True, "ignore_eos": True}
        body |= {"stream_options": {"include_usage": True}}
        return await self.post(url + "/v1/completions", body | more)

    async def chat(self, url: str, content: str, *, osl: int = 8, **more: Any) -> Heard:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": osl, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        return await self.post(url + "/v1/chat/completions", body | more)

    async def metrics(self, url: str) -> dict[str, float]:
        """Samples by name, with the labels that are not the same everywhere."""
        async with self.session.get(url + "/metrics") as response:
            text = await response.text()
        samples = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = re.sub(r'engine="0",model_name="[^"]*",?', "", name).replace("{}", "")
                samples[name] = float(value)
        return samples

    async def settled(self, url: str, wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The metrics once they are as wanted; fails after two seconds."""
        for _ in range(200):
            samples = await self.metrics(url)
            if wanted(samples):
                return samples
            await asyncio.sleep(0.01)
        raise AssertionError(f"never came true, last: {samples}")
