"""The engine's model in virtual time: by hand, against the closed forms, and however it is driven."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchkit.sim.engine import Emission, Engine, Sequence, block_keys
from benchkit.sim.profile import Profile
from benchkit.sim.truth import expected_cell, expected_tokens_per_step

RunOut = Callable[..., list[Emission]]
MS = 1_000_000


def bare(**keys: object) -> Profile:
    """Steps of 10 ms and nothing else that takes time."""
    free: dict[str, object] = {"prefill_tok_per_s": 0, "request_overhead_s": 0, "step_per_seq_s": 0}
    return Profile(**free | {"prefix_caching": False, **keys})  # type: ignore[arg-type]


def at_ms(emissions: list[Emission], sequence: Sequence) -> list[tuple[float, int]]:
    """When the sequence got how many tokens."""
    return [(e.at_ns / MS, e.tokens) for e in emissions if e.sequence is sequence]


def test_one_stream_by_hand(run_out: RunOut) -> None:
    engine = Engine(
        bare(prefill_tok_per_s=1000, request_overhead_s=0.005, step_per_seq_s=0.001, step_per_kv_token_s=0.0001)
    )
    stream = engine.submit(arrival_ns=1000 * MS, prompt_tokens=100, max_tokens=3)

    # 5 + 100 ms to the first token; then 10 + 1 + 0.1 × 101, 10 + 1 + 0.1 × 102.
    assert [(1105.0, 1), (1126.1, 1), (1147.3, 1)] == at_ms(run_out(engine), stream)
    assert "done" == stream.state


def test_a_step_carries_k_tokens_and_the_last_one_the_remainder(run_out: RunOut) -> None:
    engine = Engine(bare(tokens_per_step=3))
    stream = engine.submit(arrival_ns=0, prompt_tokens=5, max_tokens=9)

    assert [(0, 1), (10, 3), (20, 3), (30, 2)] == at_ms(run_out(engine), stream)
    # Drafts count before the cut: three steps of two drafted, all accepted.
    assert (3, 6, [3, 3]) == (
        engine.counters.drafts,
        engine.counters.draft_tokens,
        engine.counters.accepted_per_position,
    )


def test_prefills_come_one_after_another_and_before_decoding(run_out: RunOut) -> None:
    engine = Engine(bare(prefill_tok_per_s=1000))
    first, second = (engine.submit(arrival_ns=0, prompt_tokens=20, max_tokens=2) for _ in range(2))

    emissions = run_out(engine)

    assert [(20, 1), (50, 1)] == at_ms(emissions, first)
    assert [(40, 1), (50, 1)] == at_ms(emissions, second)


def test_a_prefill_stalls_streams_that_decode(run_out: RunOut) -> None:
    engine = Engine(bare(prefill_tok_per_s=1000))
    victim = engine.submit(arrival_ns=0, prompt_tokens=10, max_tokens=4)
    other = engine.submit(arrival_ns=12 * MS, prompt_tokens=100, max_tokens=1)

    emissions = run_out(engine)

    # The step under way ends at 20; the prefill takes the engine until 120.
    assert [(10, 1), (20, 1), (130, 1), (140, 1)] == at_ms(emissions, victim)
    assert [(120, 1)] == at_ms(emissions, other)


def test_who_does_not_fit_in_the_pool_waits_and_nobody_overtakes(run_out: RunOut) -> None:
    engine = Engine(bare(kv_pool_tokens=100))
    long = engine.submit(arrival_ns=0, prompt_tokens=50, max_tokens=10)
    blocked = engine.submit(arrival_ns=1, prompt_tokens=40, max_tokens=5)
    small = engine.submit(arrival_ns=2, prompt_tokens=1, max_tokens=1)

    run_out(engine, until_ns=85 * MS)
    assert (1, 2, 60) == (engine.running, engine.waiting, engine.kv_reserved_tokens)
    emissions = run_out(engine)

    assert [(90, 1)] == at_ms(emissions, long)
    assert [(90, 1), (100, 1), (110, 1), (120, 1), (130, 1)] == at_ms(emissions, blocked)
    assert [(90, 1)] == at_ms(emissions, small)
    assert (0, 0, 0) == (engine.running, engine.waiting, engine.kv_reserved_tokens)


def test_no_more_sequences_run_than_allowed(run_out: RunOut) -> None:
    engine = Engine(bare(max_num_seqs=2))
    streams = [engine.submit(arrival_ns=0, prompt_tokens=1, max_tokens=3) for _ in range(5)]

    emissions = run_out(engine)

    assert [0, 0, 20, 20, 40] == [at_ms(emissions, stream)[0][0] for stream in streams]


def test_whole_blocks_are_reused_and_the_last_token_never_is(run_out: RunOut) -> None:
    engine = Engine(bare(prefill_tok_per_s=1000, prefix_caching=True, block_size=16))
    cached = []
    prompts = (range(40), range(40), range(32), range(33), [*range(16), 99, *range(17, 40)], range(1, 40))
    for i, ids in enumerate(prompts):
        keys = block_keys(list(ids), 16)
        start = i * 10**9
        stream = engine.submit(arrival_ns=start, prompt_tokens=len(ids), max_tokens=1, block_keys=keys)
        (emission,) = run_out(engine)
        cached.append(stream.cached_tokens)
        assert (len(ids) - stream.cached_tokens) * MS == emission.at_ns - start

    assert [0, 32, 16, 32, 16, 0] == cached
    assert (40 + 40 + 32 + 33 + 40 + 39, sum(cached)) == (
        engine.counters.prefix_queries,
        engine.counters.prefix_hits,
    )


def test_the_first_requests_of_a_boot_are_cold_and_slow_down_their_batch(run_out: RunOut) -> None:
    engine = Engine(bare(prefill_tok_per_s=1000, request_overhead_s=0.001, cold_requests=1, cold_factor=3))
    cold = engine.submit(arrival_ns=0, prompt_tokens=10, max_tokens=3)
    warm = engine.submit(arrival_ns=20 * MS, prompt_tokens=10, max_tokens=4)

    emissions = run_out(engine)

    assert [(33, 1), (73, 1), (103, 1)] == at_ms(emissions, cold)  # 3 × (1 + 10), then steps of 3 × 10
    assert [(43, 1), (73, 1), (103, 1), (113, 1)] == at_ms(emissions, warm)


def test_an_aborted_request_frees_its_place(run_out: RunOut) -> None:
    engine = Engine(bare(max_num_seqs=1))
    gone = engine.submit(arrival_ns=0, prompt_tokens=1, max_tokens=100)
    waits = engine.submit(arrival_ns=0, prompt_tokens=1, max_tokens=1)
    never = engine.submit(arrival_ns=0, prompt_tokens=1, max_tokens=1)
    run_out(engine, until_ns=25 * MS)

    engine.abort(gone)
    engine.abort(never)
    emissions = run_out(engine)

    assert [(30, 1)] == at_ms(emissions, waits)
    assert [] == at_ms(emissions, gone) + at_ms(emissions, never)
    assert {"stop": 0, "length": 1, "abort": 2, "error": 0} == engine.counters.finished


def test_natural_length_ends_with_stop_unless_eos_is_ignored(run_out: RunOut) -> None:
    engine = Engine(bare(natural_osl=5))
    asked = [
        engine.submit(arrival_ns=0, prompt_tokens=1, max_tokens=m, ignore_eos=i)
        for m, i in [(9, False), (9, True), (3, False)]
    ]
    run_out(engine)

    assert [(5, "stop"), (9, "length"), (3, "length")] == [(s.generated, s.finish_reason) for s in asked]


def test_ignore_eos_can_be_without_effect(run_out: RunOut) -> None:
    engine = Engine(bare(natural_osl=100, natural_osl_spread=0.2, honour_ignore_eos=False))
    lengths = [engine.submit(arrival_ns=0, prompt_tokens=1, max_tokens=500).output_tokens for _ in range(200)]

    assert 80 <= min(lengths) < 85
    assert 115 < max(lengths) <= 120


seconds = st.floats(0, 0.05)


@given(
    st.builds(
        Profile,
        prefill_tok_per_s=st.sampled_from([0, 1000, 12345]),
        request_overhead_s=seconds,
        step_base_s=seconds,
        step_per_seq_s=seconds,
        step_per_kv_token_s=st.floats(0, 0.001),
        tokens_per_step=st.integers(1, 4),
        cold_requests=st.sampled_from([0, 100]),
        cold_factor=st.floats(1, 3),
    ),
    st.integers(1, 200),
    st.integers(1, 30),
    st.integers(1, 6),
)
def test_the_closed_forms_say_what_the_engine_does(profile: Profile, prompt: int, osl: int, n: int) -> None:
    engine = Engine(profile)
    # Unique prompts: nothing is cached.
    keys = [block_keys([i] * prompt, profile.block_size) for i in range(n)]
    streams = [engine.submit(arrival_ns=0, prompt_tokens=prompt, max_tokens=osl, block_keys=k) for k in keys]
    emissions = []
    while (due_ns := engine.due_ns()) is not None:
        emissions += engine.advance(due_ns)

    truth = expected_cell(profile, prompt_tokens=prompt, osl=osl, concurrency=n, cold=profile.cold_requests > 0)

    rounding_s = 1e-9 * (osl + n + 1)
    for stream, expected in zip(streams, truth.streams, strict=True):
        times = [e.at_ns / 1e9 for e in emissions if e.sequence is stream]
        assert expected.ttft_s == pytest.approx(times[0], abs=rounding_s)
        assert expected.e2e_s == pytest.approx(times[-1], abs=rounding_s)
    end_s = max(e.at_ns for e in emissions) / 1e9
    if end_s > 0.001:
        assert truth.output_tok_per_s == pytest.approx(n * osl / end_s, rel=1e-4)


@given(st.integers(1, 3), st.integers(2, 20), st.integers(2, 6))
def test_the_closed_form_of_a_burst_has_its_first_stream_a_step_ahead(k: int, osl: int, n: int) -> None:
    profile = bare(tokens_per_step=k, step_per_seq_s=0.001, step_per_kv_token_s=0.0001, request_overhead_s=0.002)
    engine = Engine(profile)
    streams = [engine.submit(arrival_ns=i * 100_000, prompt_tokens=7, max_tokens=osl) for i in range(n)]
    emissions = []
    while (due_ns := engine.due_ns()) is not None:
        emissions += engine.advance(due_ns)

    truth = expected_cell(profile, prompt_tokens=7, osl=osl, concurrency=n, arrival="burst")

    for stream, expected in zip(streams, truth.streams, strict=True):
        times = [e.at_ns / 1e9 for e in emissions if e.sequence is stream]
        assert expected.ttft_s == pytest.approx(times[0], abs=1e-7)
        assert expected.e2e_s == pytest.approx(times[-1], abs=1e-7)


def test_accepted_drafts_come_as_often_as_their_probabilities_say(run_out: RunOut) -> None:
    profile = bare(acceptance=[0.8, 0.5, 0.25])
    engine = Engine(profile)
    stream = engine.submit(arrival_ns=0, prompt_tokens=1, max_tokens=20_001)
    tokens = [e.tokens for e in run_out(engine)]
    c = engine.counters

    assert 1 + 0.8 + 0.4 + 0.1 == pytest.approx(expected_tokens_per_step(profile))
    assert 1 == tokens[0]
    assert 20_001 == sum(tokens) == stream.generated
    assert len(tokens) - 1 == c.drafts == c.draft_tokens / 3
    # Four standard errors of a share over some 8,700 drafts.
    for share, accepted in zip([0.8, 0.4, 0.1], c.accepted_per_position, strict=True):
        assert share == pytest.approx(accepted / c.drafts, abs=4 * (share * (1 - share) / c.drafts) ** 0.5)
    assert c.drafts + sum(c.accepted_per_position) - 20_000 in range(4)  # the cut of the last step


def test_the_expected_decode_time_under_acceptance_is_the_mean_of_many_runs(run_out: RunOut) -> None:
    profile = bare(acceptance=[0.7, 0.4], step_per_kv_token_s=0.0002, max_num_seqs=1)
    engine = Engine(profile)
    streams = [engine.submit(arrival_ns=0, prompt_tokens=30, max_tokens=12) for _ in range(3000)]
    last = {e.sequence.index: e.at_ns for e in run_out(engine)}
    spans = [(last[s.index] - s.t_first_ns) / 1e9 for s in streams]

    truth = expected_cell(profile, prompt_tokens=30, osl=12)

    mean = sum(spans) / len(spans)
    error = (sum((x - mean) ** 2 for x in spans) / len(spans) / len(spans)) ** 0.5
    assert truth.streams[0].decode_s == pytest.approx(mean, abs=4 * error)
    assert error < 0.01 * mean


def test_what_has_no_closed_form_is_refused() -> None:
    with pytest.raises(ValueError, match="do not all fit"):
        expected_cell(Profile(max_num_seqs=2), prompt_tokens=1, osl=1, concurrency=3)
    with pytest.raises(ValueError, match="not in step"):
        expected_cell(Profile(acceptance=(0.5,)), prompt_tokens=1, osl=2, concurrency=2)


@given(st.lists(st.integers(1, 40 * MS), max_size=60))
def test_late_or_early_calls_change_nothing_about_what_happens_when(gaps: list[int]) -> None:
    def fresh() -> Engine:
        engine = Engine(bare(prefill_tok_per_s=1000, request_overhead_s=0.003, max_num_seqs=2))
        for arrival, prompt, osl in [(0, 10, 5), (1, 30, 3), (2, 5, 8)]:
            engine.submit(arrival_ns=arrival * MS, prompt_tokens=prompt, max_tokens=osl)
        return engine

    def seen(emissions: list[Emission]) -> list[tuple[int, int, int]]:
        return [(e.sequence.index, e.at_ns, e.tokens) for e in emissions]

    on_time, odd = fresh(), fresh()
    now_ns, heard = 0, []
    for gap in gaps:
        now_ns += gap
        heard += odd.advance(now_ns)
    heard += odd.advance(10**12)

    assert seen(on_time.advance(10**12)) == seen(heard)
