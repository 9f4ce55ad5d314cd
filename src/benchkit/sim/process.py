"""A simulated server in a process of its own, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchkit.sim.profile import Profile

READY = "READY "
"""What the one line on stdout starts with; the URL follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimProcess:
    """A simulated server that listens at `url`."""

    url: str
    pid: int
    child: subprocess.Popen[str]

    def restart(self) -> None:
        """Ask for a fresh boot (SIGHUP); it has happened when process_start_time_seconds has changed."""
        self.child.send_signal(signal.SIGHUP)


def command(profile: Profile, *, port: int = 0) -> list[str]:
    """The command line that serves `profile`."""
    settings = [f"{key}={json.dumps(value)}" for key, value in profile.differences().items()]
    sets = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "benchkit.sim", "--port", str(port), *sets]


@contextlib.contextmanager
def spawned(profile: Profile, *, port: int = 0) -> Iterator[SimProcess]:
    """A server in its own process, ended with the block, and by itself should this process die.

    Raises RuntimeError if it ends before it is ready; what it said is on stderr.
    """
    child = subprocess.Popen(
        [*command(profile, port=port), "--until-stdin-closes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line.startswith(READY):
            raise RuntimeError(f"the simulator was not ready: exit code {child.wait()}")
        yield SimProcess(url=line.removeprefix(READY).strip(), pid=child.pid, child=child)
    finally:
        child.stdin.close()
        child.terminate()
        child.wait()
        child.stdout.close()
