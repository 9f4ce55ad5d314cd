"""What a name on the command line means: a file, something the ledger knows, or something shipped."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from benchkit.errors import BadInput
from benchkit.record import Run
from benchkit.settings import read_text


def ledger_path(given: Path | None) -> Path:
    """Where the ledger is: `--ledger`, else `BENCHKIT_LEDGER`, else `./ledger`."""
    return given or Path(os.environ.get("BENCHKIT_LEDGER") or "ledger")


def who() -> str:
    """Who an entry is by: `BENCHKIT_WHO`, else the user's login name."""
    try:
        return os.environ.get("BENCHKIT_WHO") or getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        return f"uid {os.getuid()}"


def shipped_folder() -> Path:
    """The folder of shipped protocols: inside the package, or beside the source in a checkout."""
    inside = Path(str(files("benchkit"))) / "protocols"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "protocols"


def shipped(kind: str) -> dict[str, Path]:
    """Shipped files by name; kind is "protocol" or "arm"."""
    folder = shipped_folder() if kind == "protocol" else shipped_folder() / "arms"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def text_of(kind: str, name: str, runs: Iterable[Run] = ()) -> tuple[str, str]:
    """The TOML text of a protocol or an arm, and what to call it in messages.

    Args:
        kind: "protocol" or "arm".
        name: a path, or a name: the newest text that the ledger has under it wins over a shipped file.
        runs: the ledger's runs, oldest first.

    Raises:
        BadInput: neither file nor known name; the message lists the names there are.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file() or os.sep in name:
        return read_text(path), str(path)
    texts = {
        (r.protocol if kind == "protocol" else r.arm): (r.protocol_text if kind == "protocol" else r.arm_text)
        for r in runs
    }
    if name in texts:
        return texts[name], f"{kind} {name} (in the ledger)"
    found = shipped(kind)
    if name in found:
        return read_text(found[name]), str(found[name])
    known = ", ".join(sorted({*texts, *found})) or "none"
    raise BadInput(f"{kind} {name}: no such file, and no such name in the ledger or shipped; known: {known}")
