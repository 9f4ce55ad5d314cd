"""`python -m benchkit.sim`: serves the simulated endpoint until it is told to stop."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchkit.sim.process import READY
from benchkit.sim.profile import describe_keys, read_profile
from benchkit.sim.server import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 after SIGTERM or SIGINT, 2 for a profile or a port that will not do."""
    parser = argparse.ArgumentParser(prog="python -m benchkit.sim", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free one (default)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="TOML or JSON")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one key of the profile")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end when stdin ends, too")
    parser.add_argument("--keys", action="store_true", help="print the profile's keys and end")
    options = parser.parse_args(argv)
    if not 0 <= options.port < 65536:
        print(f"--port: expected 0 to 65535, found {options.port}", file=sys.stderr)
        return 2
    if options.keys:
        print(describe_keys())
        return 0
    try:
        profile = read_profile(options.profile, read_settings(options.set))
        serve(
            profile,
            host=options.host,
            port=options.port,
            ready=lambda url: print(READY + url, flush=True),
            until_stdin_closes=options.until_stdin_closes,
        )
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def read_settings(settings: Sequence[str]) -> dict[str, object]:
    """Overrides from `key=value` words; a value is JSON where it can be, else a text."""
    overrides: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set: expected key=value, found {setting!r}")
        try:
            overrides[key] = json.loads(value)
        except ValueError:
            overrides[key] = value
    return overrides


if __name__ == "__main__":
    sys.exit(main())
