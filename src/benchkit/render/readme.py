"""README blocks: what stands between the marks of a markdown file, made again in place, or checked for drift."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchkit.errors import BadInput, BenchkitError

_OPEN = re.compile(r"<!-- benchkit:table (?P<name>[A-Za-z0-9][A-Za-z0-9._-]*) -->")
_CLOSE = "<!-- /benchkit -->"
_ANY = re.compile(r"<!--\s*/?\s*benchkit\b", re.IGNORECASE)
_FENCE = re.compile(r" {0,3}(?P<fence>`{3,}|~{3,})")

DIFF_LINES = 20
"""How many lines of a difference are shown; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A block that no longer says what the ledger says: its name, its line (from 1), a short unified diff."""

    name: str
    line: int
    diff: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A block of a file: indexes of its marks among the lines, its name and its indentation."""

    name: str
    opened: int
    closed: int
    indent: str


def rewritten(text: str, render: Callable[[str], str], where: str = "README.md") -> str:
    """The text with every block made again; line ends, indentation and all else stay as they are.

    A block begins and ends with a mark alone on its line, `<!-- benchkit:table NAME -->` and
    `<!-- /benchkit -->`. Marks inside a fenced code block are text. Doing it twice changes nothing.

    Args:
        text: the file's text, its line ends kept.
        render: the markdown of a table by name.
        where: what messages call the file.

    Raises:
        BadInput: a mark that is unknown, nested, not closed or not opened; `file:line` is named.
        BenchkitError: what `render` raised, with `file:line` before it.
    """
    lines = text.split("\n")
    out: list[str] = []
    done = 0
    for block in list(_blocks(lines, where)):  # all marks are sound before a table is made
        out += lines[done : block.opened + 1]
        out += _content(block, lines[block.opened], render, where)
        done = block.closed
    return "\n".join(out + lines[done:])


def drift(text: str, render: Callable[[str], str], where: str = "README.md") -> tuple[Drift, ...]:
    """The blocks that `rewritten` would change, with what would change; the arguments and errors are its own."""
    lines = text.split("\n")
    found = []
    for block in list(_blocks(lines, where)):
        old = lines[block.opened + 1 : block.closed]
        new = _content(block, lines[block.opened], render, where)
        if old != new:
            found.append(Drift(name=block.name, line=block.opened + 1, diff=_short_diff(block.name, old, new)))
    return tuple(found)


def block_names(text: str, where: str = "README.md") -> tuple[str, ...]:
    """The names of the tables that a file's blocks ask for, in order; BadInput as in `rewritten`."""
    return tuple(block.name for block in _blocks(text.split("\n"), where))


def rewrite_file(path: Path, render: Callable[[str], str]) -> bool:
    """A markdown file with its blocks made again; True if it changed. Written whole or not at all.

    Raises:
        BadInput: a file that cannot be read as UTF-8, or marks as in `rewritten`.
        OSError: it cannot be written.
    """
    text = read_markdown(path)
    new = rewritten(text, render, str(path))
    if new == text:
        return False
    target = path.resolve()  # a link stays a link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(new.encode())
        shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def read_markdown(path: Path) -> str:
    """A file's text with its line ends as they are. Raises BadInput where it cannot be read as UTF-8."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not UTF-8 text") from None


def _blocks(lines: list[str], where: str) -> Iterator[_Block]:
    fence = ""
    opened: tuple[str, int, str] | None = None
    for place, line in enumerate(lines):
        bare = line.removeprefix("\ufeff").strip()
        # Inside a block everything up to its mark is ours, fences included.
        if opened is None:
            fence, was = _fence_after(fence, line), fence
            if fence or was:
                continue
        if not _ANY.match(bare):
            continue
        at = f"{where}:{place + 1}"
        mark = _OPEN.fullmatch(bare)
        if mark is not None:
            if opened is not None:
                raise BadInput(f"{at}: block {mark['name']} opens inside block {opened[0]} of line {opened[1] + 1}")
            opened = (mark["name"], place, line[: len(line) - len(line.lstrip(" \t"))])
        elif bare == _CLOSE:
            if opened is None:
                raise BadInput(f"{at}: {_CLOSE} without a block before it")
            yield _Block(name=opened[0], opened=opened[1], closed=place, indent=opened[2])
            opened = None
        else:
            raise BadInput(f"{at}: expected <!-- benchkit:table NAME --> or {_CLOSE} alone on its line, found {bare}")
    if opened is not None:
        raise BadInput(f"{where}:{opened[1] + 1}: block {opened[0]} is not closed; end it with {_CLOSE}")


def _fence_after(fence: str, line: str) -> str:
    """The fence that is open after a line: "" for none."""
    found = _FENCE.match(line)
    if found is None:
        return fence
    if not fence:
        return found["fence"]
    closes = found["fence"][0] == fence[0] and len(found["fence"]) >= len(fence)
    return "" if closes and not line[found.end() :].strip() else fence


def _content(block: _Block, mark: str, render: Callable[[str], str], where: str) -> list[str]:
    """The lines between the marks: a blank one, the table, a blank one, with the line ends of the opening mark."""
    try:
        made = render(block.name)
    except BenchkitError as error:
        raise type(error)(f"{where}:{block.opened + 1}: {error}") from None
    body = made.replace("\r\n", "\n").strip("\n").split("\n")
    end = "\r" if mark.endswith("\r") else ""
    return [f"{block.indent}{line}{end}" if line else end for line in ("", *body, "")]


def _short_diff(name: str, old: list[str], new: list[str]) -> str:
    bare_old, bare_new = ([line.removesuffix("\r") for line in lines] for lines in (old, new))
    if bare_old == bare_new:
        return "only line ends differ"
    sides = {"fromfile": f"{name} in the file", "tofile": f"{name} from the ledger"}
    diff = list(difflib.unified_diff(bare_old, bare_new, **sides, n=1, lineterm=""))
    rest = len(diff) - DIFF_LINES
    return "\n".join(diff if rest <= 0 else [*diff[:DIFF_LINES], f"… {rest} more lines"])
