"""The tree of errors, each with the exit code that it ends a command with.

BenchkitError
├── BadInput        2    a file, a flag or a name that cannot be used
├── Finding         1    the command worked and found something wrong: drift, damage, unmatched, not citable
├── EndpointUnfit   3    the endpoint cannot be reached, or cannot be measured
├── Inconclusive    4    a gate that can say neither pass nor regression
├── InvalidRun      5    a run without one success in a cell
└── Interrupted   130    stopped by the user; what was measured is kept

A failed *request* is none of these: it is a record with `error` set.
"""

from __future__ import annotations

from typing import ClassVar


class BenchkitError(Exception):
    """Any error that ends a command with one clear line: where, what, and what to try."""

    exit_code: ClassVar[int] = 1


class BadInput(BenchkitError):
    """A file, a flag or a name that cannot be used."""

    exit_code = 2


class Finding(BenchkitError):
    """The command did its work and found something wrong."""

    exit_code = 1


class EndpointUnfit(BenchkitError):
    """The endpoint cannot be reached, or what it sends cannot be measured."""

    exit_code = 3


class Inconclusive(BenchkitError):
    """A gate that can say neither pass nor regression."""

    exit_code = 4


class InvalidRun(BenchkitError):
    """A run that measured nothing usable: a cell without one success."""

    exit_code = 5


class Interrupted(BenchkitError):
    """Stopped by the user; what was measured is kept."""

    exit_code = 130
