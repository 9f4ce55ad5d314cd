"""The simulator as a process: one line when it is ready, signals, and how it refuses a bad profile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from simclient import Client

from benchkit.sim.process import spawned
from benchkit.sim.profile import Profile

MODULE = [sys.executable, "-m", "benchkit.sim"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_ready_once_and_ends_with_zero(number: signal.Signals) -> None:
    with subprocess.Popen([*MODULE, "--port", "0"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        child.send_signal(number)
        rest = child.stdout.read()

    assert line.startswith("READY http://127.0.0.1:")
    assert int(line.rsplit(":", 1)[1]) > 0
    assert ("", 0) == (rest, child.returncode)


def test_it_ends_when_whoever_started_it_is_gone() -> None:
    command = [*MODULE, "--until-stdin-closes"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        child.stdin.close()

        assert 0 == child.wait(timeout=5)


def test_a_bad_profile_ends_with_two_and_one_line(tmp_path: Path) -> None:
    file = tmp_path / "sim.toml"
    file.write_text("max_num_seqs = 'many'")

    ended = subprocess.run([*MODULE, "--profile", str(file)], capture_output=True, text=True, timeout=10, check=False)

    assert (2, "") == (ended.returncode, ended.stdout)
    assert f"{file}: max_num_seqs: expected an integer ≥ 1, found 'many'\n" == ended.stderr


async def test_hangup_makes_it_a_fresh_boot(client: Client) -> None:
    with spawned(Profile(request_overhead_s=0)) as sim:
        await client.stream(sim.url, osl=2)
        before = await client.metrics(sim.url)
        sim.restart()
        started = before["process_start_time_seconds"]
        after = await client.settled(sim.url, lambda m: m["process_start_time_seconds"] > started)
        heard = await client.stream(sim.url, osl=2)
        pid = sim.pid

    assert (2, 0) == (before["vllm:generation_tokens_total"], after["vllm:generation_tokens_total"])
    assert 200 == heard.status
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
