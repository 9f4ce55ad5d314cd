"""The right answers in closed form: what a client must measure on cells where the model leaves nothing to chance.

With f the cold factor (1 when warm), o = request_overhead_s, τ = (P − K) / prefill_tok_per_s (0 where prefill
takes no time), b, s, c = step_base_s, step_per_seq_s, step_per_kv_token_s, k = tokens_per_step, O = tokens of
output, N = streams, and J = ⌈(O − 1) / k⌉ decode steps after the first token:

    one stream    ttft = f·(o + τ)
                  decode = f·(J·(b + s) + c·(J·(P + 1) + k·J·(J − 1)/2))
                  since step j = 1 … J starts with P + 1 + (j − 1)·k tokens in the KV
    N together    ttft of stream i = 1 … N = f·(o + i·τ); all end at f·(o + N·τ + J·(b + s·N)
                  + c·N·(J·(P + 1) + k·J·(J − 1)/2)), since all prefills come before the first decode step
    tpot          decode / (O − 1): the first event carries one token
    output tok/s  N·O / (the last stream's end)

Over HTTP, N requests sent together arrive one after another. Where the first one's overhead and prefill are
over before the others are ready (τ = 0), it starts alone and is a step ahead of them: that is `arrival="burst"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from benchkit.sim.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTruth:
    """One stream's times in seconds, from the arrival of the cell's first request."""

    ttft_s: float
    e2e_s: float
    tpot_s: float | None  # None for a single token

    @property
    def decode_s(self) -> float:
        """From the first event to the last."""
        return self.e2e_s - self.ttft_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTruth:
    """The streams of one cell, in order of arrival, and what follows from them."""

    streams: tuple[StreamTruth, ...]
    output_tokens: int  # of all streams

    @property
    def ttft_s(self) -> float:
        """Median stream, an observed one."""
        return _median([stream.ttft_s for stream in self.streams])

    @property
    def tpot_s(self) -> float | None:
        """Median stream; None where a stream is a single token."""
        values = [stream.tpot_s for stream in self.streams if stream.tpot_s is not None]
        return _median(values) if values else None

    @property
    def e2e_s(self) -> float:
        """Median stream."""
        return _median([stream.e2e_s for stream in self.streams])

    @property
    def window_s(self) -> float:
        """From the first arrival to the last stream's end."""
        return max(stream.e2e_s for stream in self.streams)

    @property
    def output_tok_per_s(self) -> float:
        """All output tokens over the window, first tokens included."""
        return self.output_tokens / self.window_s


def expected_cell(
    profile: Profile,
    *,
    prompt_tokens: int,
    osl: int,
    concurrency: int = 1,
    cached_tokens: int = 0,
    cold: bool = False,
    arrival: Literal["together", "burst"] = "together",
) -> CellTruth:
    """What `concurrency` requests of equal length, sent together to an idle engine, take.

    `cached_tokens` of each prompt are already in the prefix cache; `cold` makes all of them cold. For one
    stream under `acceptance` the value is the expectation over accepted lengths, exact. Raises ValueError where
    there is no closed form: streams that do not all fit at once, or several streams under `acceptance`.
    """
    p, n = profile, concurrency
    if n > p.max_num_seqs or (p.kv_pool_tokens and n * (prompt_tokens + osl) > p.kv_pool_tokens):
        raise ValueError(f"no closed form: {n} × ({prompt_tokens} + {osl}) tokens do not all fit at once")
    if n > 1 and p.acceptance:
        raise ValueError(f"no closed form: {n} streams under acceptance are not in step")
    factor = p.cold_factor if cold else 1.0
    overhead_s = p.request_overhead_s
    prefill_s = (prompt_tokens - cached_tokens) / p.prefill_tok_per_s if p.prefill_tok_per_s else 0.0
    steps = ceil((osl - 1) / p.tokens_per_step)

    if p.acceptance:
        first = [overhead_s + prefill_s]
        end = [first[0] + _expected_decode_s(p, prompt_tokens, osl)]
    elif arrival == "burst" and n > 1 and prefill_s == 0 and steps > 0:
        solo_s = _step_s(p, 1, prompt_tokens + 1)
        leader_end = overhead_s + solo_s
        for i in range(1, steps):
            leader_kv = prompt_tokens + 1 + i * p.tokens_per_step
            leader_end += _step_s(p, n, n * leader_kv - (n - 1) * p.tokens_per_step)
        last_kv = prompt_tokens + 1 + (steps - 1) * p.tokens_per_step
        follower_end = leader_end + _step_s(p, n - 1, (n - 1) * last_kv)
        first = [overhead_s] + [overhead_s + solo_s] * (n - 1)
        end = [leader_end] + [follower_end] * (n - 1)
    else:
        kv_sum = steps * (prompt_tokens + 1) + p.tokens_per_step * steps * (steps - 1) // 2
        decode_s = steps * (p.step_base_s + p.step_per_seq_s * n) + p.step_per_kv_token_s * n * kv_sum
        first = [overhead_s + i * prefill_s for i in range(1, n + 1)]
        # A single token has no decode step: each stream ends with its own prefill.
        end = [first[-1] + decode_s] * n if steps else first
    streams = tuple(
        StreamTruth(ttft_s=factor * t0, e2e_s=factor * t1, tpot_s=factor * (t1 - t0) / (osl - 1) if osl > 1 else None)
        for t0, t1 in zip(first, end, strict=True)
    )
    return CellTruth(streams=streams, output_tokens=n * osl)


def expected_tokens_per_step(profile: Profile) -> float:
    """Mean tokens of a decode step, the cut at the end left out: k, or 1 + Σ Π of the acceptances."""
    reached, tokens = 1.0, float(profile.tokens_per_step)
    for probability in profile.acceptance:
        reached *= probability
        tokens += reached
    return tokens


def _step_s(p: Profile, batch: int, kv_tokens: int) -> float:
    return p.step_base_s + p.step_per_seq_s * batch + p.step_per_kv_token_s * kv_tokens


def _expected_decode_s(p: Profile, prompt_tokens: int, osl: int) -> float:
    """V(osl − 1), where V(n) = step time with n tokens to go + Σ P(t tokens) · V(n − t), and V(≤ 0) = 0."""
    share = []
    reached = 1.0
    for probability in p.acceptance:
        share.append(reached * (1 - probability))
        reached *= probability
    share.append(reached)
    value = [0.0]
    for left in range(1, osl):
        step_s = _step_s(p, 1, prompt_tokens + osl - left)
        value.append(step_s + sum(q * value[left - t] for t, q in enumerate(share, start=1) if t < left))
    return value[-1]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
