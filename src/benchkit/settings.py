"""TOML files of people into frozen values; every fault names file, key path, expected and found."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from benchkit.errors import BadInput


class Section(BaseModel):
    """A table of a TOML file: frozen, typed strictly, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def read_settings(kind: type[S], text: str, where: str) -> S:
    """The value that a TOML text says, or BadInput with one line for each fault.

    Args:
        kind: the section class of the whole file.
        text: the TOML text.
        where: what the messages call the file.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{where}: not TOML: {error}") from None
    try:
        return kind.model_validate(_with_tuples(raw))
    except ValidationError as error:
        raise BadInput("\n".join(f"{where}: {_fault(kind, raw, e)}" for e in error.errors())) from None


def read_text(path: Path) -> str:
    """The text of a file of settings; BadInput where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not UTF-8 text") from None


def _with_tuples(value: Any) -> Any:
    """Lists as tuples: what is read stays as it was read."""
    if isinstance(value, dict):
        return {k: _with_tuples(v) for k, v in value.items()}
    return tuple(_with_tuples(v) for v in value) if isinstance(value, list) else value


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}


def _fault(kind: type[BaseModel], raw: Mapping[str, Any], error: ErrorDetails) -> str:
    """One fault as `key.path[1]: expected …, found …`."""
    path = _key_path(error["loc"])
    type_, ctx, found = error["type"], error.get("ctx", {}), _shown(error["input"])
    if type_ == "missing":
        return f"{path}: expected a value, found none; the key is required"
    if type_ == "extra_forbidden":
        known = _known_keys(kind, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys here: {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    if type_ == "value_error":  # our own validators' words: "expected …", or "key: expected …, found …"
        words = str(ctx["error"])
        if not words.startswith("expected"):
            return f"{path}.{words}".lstrip(".")
        return f"{path}: {words}" if ", found" in words else f"{path}: {words}, found {found}"
    if type_ in _EXPECTED:
        expected = _EXPECTED[type_]
    elif type_ == "literal_error":
        expected = str(ctx["expected"]).replace("'", '"')
    elif type_ == "too_short":
        expected = f"at least {ctx['min_length']} value{'s' if ctx['min_length'] != 1 else ''}"
    elif type_ == "string_pattern_mismatch":
        expected = f"a name that matches {ctx['pattern']}"
    elif type_ == "string_too_short":
        expected = "a text that is not empty"
    elif type_ in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        word = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
        expected = " and ".join(f"{word[k]} {v:g}" for k, v in ctx.items() if k in word)
    else:
        expected = error["msg"]
    return f"{path}: expected {expected}, found {found}"


def _key_path(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _known_keys(kind: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    model: Any = kind
    for part in loc:
        annotation = model.model_fields[part].annotation
        choices = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in choices if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(field.alias or name for name, field in model.model_fields.items())
