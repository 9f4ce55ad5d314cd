"""Canonical JSON and sha256: one value, one text, one hash, on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no blanks, UTF-8 kept, no NaN or infinity.

    Raises:
        ValueError: a float that JSON cannot carry (NaN, infinity).
        TypeError: a value that is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_hex(data: bytes | str) -> str:
    """The sha256 of bytes, or of a text's UTF-8, as 64 hex digits."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def hash_of(value: Any) -> str:
    """The sha256 of a value's canonical JSON."""
    return sha256_hex(canonical_json(value))
