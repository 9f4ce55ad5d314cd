"""The model of a continuous-batching engine, in its own time: what is due when, never how late it was done.

The engine does one thing at a time. Whenever it is free, it decides:

1. The oldest waiting request that is ready (arrival + request_overhead_s) is prefilled, if a sequence slot
   and prompt + max_tokens of the KV pool are free; if they are not, nobody behind it is served. A prefill
   lasts uncached prompt tokens / prefill_tok_per_s, decoding stalls meanwhile, and at its end the request's
   first token is out.
2. Else, if sequences run, one decode step is done for all of them. It lasts step_base_s + step_per_seq_s ×
   sequences + step_per_kv_token_s × their KV tokens (prompt and output so far) when the step starts. At its
   end each sequence gets tokens_per_step tokens, or 1 + accepted ones, cut at its output length.
3. Else it is idle until a request is ready.

The pool is reserved for prompt + max_tokens on admission, so nothing is ever preempted. Times are integers of
nanoseconds on whatever clock the caller uses; a phase starts where the one before it ended, so lateness of
the caller never adds up.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from benchkit.sim.profile import Profile

TTFT_BUCKETS_S = (0.001, 0.01, 0.1, 1.0, 10.0)
TPOT_BUCKETS_S = (0.001, 0.01, 0.1, 1.0)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine."""

    index: int  # 1 for the first of this boot
    prompt_tokens: int
    max_tokens: int
    output_tokens: int  # what it will generate: at most max_tokens
    finish_reason: str  # told with the last token
    arrival_ns: int
    ready_ns: int
    block_keys: Row[int]
    factor: float  # of all its times; above 1 while cold
    rng: random.Random
    cached_tokens: int = 0
    generated: int = 0
    t_first_ns: int = 0
    state: str = "waiting"  # waiting | prefilling | running | done


class Emission(NamedTuple):
    """Tokens that one sequence gets at one moment."""

    sequence: Sequence
    at_ns: int
    start: int  # tokens the sequence had before
    tokens: int
    finish_reason: str | None


@dataclass(slots=True)
class Histogram:
    """Cumulative buckets, sum and count, as Prometheus keeps them."""

    bounds: tuple[float, ...]
    buckets: list[int] = field(default_factory=list)
    total: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.buckets = [0] * len(self.bounds)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.total += value
        self.count += 1
        for i, bound in enumerate(self.bounds):
            self.buckets[i] += value <= bound


@dataclass(slots=True)
class Counters:
    """What the engine has done since boot; drafts and accepted tokens are counted before the cut at the end."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    tpot: Histogram = field(default_factory=lambda: Histogram(TPOT_BUCKETS_S))


class Engine:
    """One boot of the simulated engine."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.counters = Counters(accepted_per_position=[0] * profile.draft_tokens)
        self.kv_reserved_tokens = 0
        self._submitted = 0
        self._cached_blocks: set[int] = set()
        self._queue: list[tuple[int, int, Sequence]] = []  # heap by (ready_ns, index); aborted ones stay until met
        self._waiting = 0
        self._batch: dict[int, Sequence] = {}
        self._prefilling: Sequence | None = None
        self._busy = False
        self._phase_end_ns = 0  # while busy: of the phase under way; else: when the last one ended

    @property
    def running(self) -> int:
        """Sequences admitted and not finished."""
        return len(self._batch) + (self._prefilling is not None and self._prefilling.state != "done")

    @property
    def waiting(self) -> int:
        """Requests submitted and not yet admitted."""
        return self._waiting

    def submit(
        self,
        *,
        arrival_ns: int,
        prompt_tokens: int,
        max_tokens: int,
        block_keys: Row[int] = (),
        ignore_eos: bool = True,
    ) -> Sequence:
        """A request that arrived at `arrival_ns`; the caller has made sure that it can ever fit."""
        p = self.profile
        self._submitted += 1
        index = self._submitted
        rng = random.Random(p.seed * 1_000_003 + index)
        output_tokens, finish_reason = max_tokens, "length"
        if p.natural_osl and not (ignore_eos and p.honour_ignore_eos):
            spread = p.natural_osl_spread
            natural = max(1, round(p.natural_osl * rng.uniform(1 - spread, 1 + spread)))
            if natural <= max_tokens:
                output_tokens, finish_reason = natural, "stop"
        factor = p.cold_factor if index <= p.cold_requests else 1.0
        sequence = Sequence(
            index=index,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            output_tokens=output_tokens,
            finish_reason=finish_reason,
            arrival_ns=arrival_ns,
            ready_ns=arrival_ns + _ns(p.request_overhead_s * factor),
            block_keys=block_keys,
            factor=factor,
            rng=rng,
        )
        heappush(self._queue, (sequence.ready_ns, index, sequence))
        self._waiting += 1
        return sequence

    def abort(self, sequence: Sequence, reason: str = "abort") -> None:
        """Take a request out and free its place; nothing if it is done. A phase under way keeps its length."""
        if sequence.state == "done":
            return
        if sequence.state == "waiting":
            self._waiting -= 1
        else:
            self.kv_reserved_tokens -= sequence.prompt_tokens + sequence.max_tokens
            self._batch.pop(sequence.index, None)
        sequence.state = "done"
        self.counters.finished[reason] += 1

    def due_ns(self) -> int | None:
        """When `advance` has something to do next; None while nothing is under way or waiting."""
        if self._busy:
            return self._phase_end_ns
        head = self._head()
        return None if head is None else max(self._phase_end_ns, head.ready_ns)

    def advance(self, now_ns: int) -> list[Emission]:
        """Do all that was due by `now_ns` and return the tokens that came out, in order of time."""
        out: list[Emission] = []
        while self._busy or self._start_phase(now_ns):
            if self._phase_end_ns > now_ns:
                break
            self._busy = False
            if self._prefilling is not None:
                self._end_prefill(self._prefilling, out)
            else:
                self._end_step(out)
        return out

    def _head(self) -> Sequence | None:
        while self._queue and self._queue[0][2].state == "done":
            heappop(self._queue)
        return self._queue[0][2] if self._queue else None

    def _start_phase(self, now_ns: int) -> bool:
        p = self.profile
        head = self._head()
        start_ns = self._phase_end_ns
        if not self._batch:
            if head is None or head.ready_ns > now_ns:
                return False
            start_ns = max(start_ns, head.ready_ns)
        if head is not None and head.ready_ns <= start_ns and self._fits(head):
            heappop(self._queue)
            self._admit(head)
            todo = head.prompt_tokens - head.cached_tokens
            seconds = todo / p.prefill_tok_per_s if p.prefill_tok_per_s else 0.0
            self._phase_end_ns = start_ns + _ns(seconds * head.factor)
        else:
            live = sum(s.prompt_tokens + s.generated for s in self._batch.values()) if p.step_per_kv_token_s else 0
            seconds = p.step_base_s + p.step_per_seq_s * len(self._batch) + p.step_per_kv_token_s * live
            factor = max(s.factor for s in self._batch.values())
            self._phase_end_ns = start_ns + _ns(seconds * factor)
        self._busy = True
        return True

    def _fits(self, sequence: Sequence) -> bool:
        pool = self.profile.kv_pool_tokens
        needed = self.kv_reserved_tokens + sequence.prompt_tokens + sequence.max_tokens
        return len(self._batch) < self.profile.max_num_seqs and (not pool or needed <= pool)

    def _admit(self, sequence: Sequence) -> None:
        p = self.profile
        self._waiting -= 1
        self.kv_reserved_tokens += sequence.prompt_tokens + sequence.max_tokens
        self._prefilling = sequence
        sequence.state = "prefilling"
        if p.prefix_caching:
            # The last token is always computed: a model needs it to say anything.
            usable = (sequence.prompt_tokens - 1) // p.block_size
            blocks = 0
            while blocks < usable and sequence.block_keys[blocks] in self._cached_blocks:
                blocks += 1
            sequence.cached_tokens = blocks * p.block_size
            self.counters.prefix_queries += sequence.prompt_tokens
            self.counters.prefix_hits += sequence.cached_tokens

    def _end_prefill(self, sequence: Sequence, out: list[Emission]) -> None:
        self._prefilling = None
        self._cached_blocks.update(sequence.block_keys)
        if sequence.state == "done":  # aborted meanwhile
            return
        sequence.state = "running"
        sequence.t_first_ns = self._phase_end_ns
        self._batch[sequence.index] = sequence
        self.counters.prompt_tokens += sequence.prompt_tokens
        self.counters.ttft.observe((self._phase_end_ns - sequence.arrival_ns) / 1e9)
        self._emit(sequence, 1, out)

    def _end_step(self, out: list[Emission]) -> None:
        # Nobody joins during a step, so the batch is the one it started with, less those aborted.
        for sequence in list(self._batch.values()):
            self._emit(sequence, 1 + self._accepted(sequence), out)

    def _accepted(self, sequence: Sequence) -> int:
        p = self.profile
        if not p.draft_tokens:
            return 0
        accepted = p.tokens_per_step - 1
        for probability in p.acceptance:
            if sequence.rng.random() >= probability:
                break
            accepted += 1
        self.counters.drafts += 1
        self.counters.draft_tokens += p.draft_tokens
        for position in range(accepted):
            self.counters.accepted_per_position[position] += 1
        return accepted

    def _emit(self, sequence: Sequence, tokens: int, out: list[Emission]) -> None:
        start = sequence.generated
        tokens = min(tokens, sequence.output_tokens - start)
        sequence.generated += tokens
        self.counters.generation_tokens += tokens
        finished = sequence.generated == sequence.output_tokens
        if finished:
            sequence.state = "done"
            del self._batch[sequence.index]
            self.kv_reserved_tokens -= sequence.prompt_tokens + sequence.max_tokens
            self.counters.finished[sequence.finish_reason] += 1
            if sequence.generated > 1:
                decode_s = (self._phase_end_ns - sequence.t_first_ns) / 1e9
                self.counters.tpot.observe(decode_s / (sequence.generated - 1))
        finish_reason = sequence.finish_reason if finished else None
        out.append(Emission(sequence, self._phase_end_ns, start, tokens, finish_reason))


def block_keys(ids: Row[int], block_size: int) -> list[int]:
    """A key for each whole block of a prompt that stands for the block and all before it."""
    data = array("I", ids).tobytes()
    width = block_size * array("I").itemsize
    keys: list[int] = []
    key = 0
    for start in range(0, len(data) - width + 1, width):
        key = hash((key, data[start : start + width]))
        keys.append(key)
    return keys


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
