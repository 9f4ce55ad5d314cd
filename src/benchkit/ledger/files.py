"""The ledger's folder: where things lie, and what is found in it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchkit.canonical import sha256_hex
from benchkit.errors import BadInput, BenchkitError
from benchkit.ledger.entries import Entry, is_hash, parse_entry
from benchkit.record import fsync_dir, link_new, pinned_path

GITATTRIBUTES = """\
# Named by the hash of their bytes: no line-end conversion, ever.
raws/** binary
entries/** -text
"""
GITIGNORE = """\
# The database is made anew from entries/.
ledger.db*
sessions/
*.tmp
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths under the root of a ledger."""

    root: Path

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.root / "ledger.db"

    @property
    def raws(self) -> Path:
        """Raws, as ab/cdef….parquet."""
        return self.root / "raws"

    @property
    def entries(self) -> Path:
        """Entries, as HASH.json."""
        return self.root / "entries"

    @property
    def sessions(self) -> Path:
        """Journals of sessions that are not finished."""
        return self.root / "sessions"

    def raw(self, sha256: str) -> Path:
        """Where the raw of a hash lies."""
        return pinned_path(self.raws, sha256, ".parquet")

    def entry(self, hash_: str) -> Path:
        """Where the file of an entry lies."""
        return self.entries / f"{hash_}.json"

    @property
    def exists(self) -> bool:
        """Whether there is a ledger: a database, or entries to make one from."""
        return self.database.is_file() or self.entries.is_dir()

    @property
    def writable(self) -> bool:
        """Whether this process may add to it."""
        paths = [p for p in (self.root, self.entries, self.raws, self.database) if p.exists()]
        effective = os.access in os.supports_effective_ids
        return all(os.access(p, os.W_OK, effective_ids=effective) for p in paths)

    def make(self) -> None:
        """Makes the folders and the files for git that are not there.

        Raises:
            BadInput: the place cannot be written, or is a file.
        """
        folders = [self.raws, self.entries, self.sessions, self.root / "tables"]
        files = {self.root / ".gitattributes": GITATTRIBUTES, self.root / ".gitignore": GITIGNORE}
        if all(path.exists() for path in (*folders, *files)):
            return
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            for path, text in files.items():
                if not path.exists():
                    path.write_text(text, encoding="utf-8")
            fsync_dir(self.root)
        except OSError as error:
            raise BadInput(f"{self.root}: cannot make a ledger there: {error.strerror or error}") from None

    def entry_files(self) -> dict[str, Path]:
        """The files of entries by the hash that each is named by."""
        try:
            names = [p for p in self.entries.iterdir() if p.suffix == ".json" and is_hash(p.stem)]
        except FileNotFoundError:
            return {}
        return {p.stem: p for p in names}

    def write_entry(self, entry: Entry) -> None:
        """Writes the file of an entry; raises OSError where the disk does not take it."""
        link_new(self.entry(entry.hash), entry.data)


def read_entry(path: Path) -> Entry:
    """The entry that a file holds, its bytes matching its name.

    Raises:
        ValueError: they do not, or are no entry; the message says how.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    if sha256_hex(data) != path.stem:
        if sha256_hex(data.replace(b"\r\n", b"\n").removesuffix(b"\n")) == path.stem:
            raise ValueError("only line endings differ from what was written (something converted them)")
        raise ValueError(f"bytes do not match the name (found {sha256_hex(data)[:12]}…)")
    return parse_entry(data)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """OSErrors of writing as one line that says what was not done and what to try."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or str(error)
        hint = {
            errno.ENOSPC: "; free some space and try again",
            errno.EDQUOT: "; free some space and try again",
            errno.EFBIG: "; the limit on file sizes (ulimit -f) is too small",
            errno.EROFS: "; the ledger can be read, not added to",
            errno.EACCES: "; the ledger can be read, not added to",
        }.get(error.errno or 0, "")
        raise BenchkitError(f"{where}{reason}: {what}{hint}") from None
