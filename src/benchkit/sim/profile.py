"""The profile: every number and switch of the simulated engine, checked when it is made."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any


def _key(
    default: object, doc: str, *, least: float | None = None, most: float | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """A field whose meaning and bounds travel with it, so that checks and help come from one place."""
    return field(default=default, metadata={"doc": doc, "least": least, "most": most, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The simulated engine's constants and switches; `describe_keys()` prints what each one means.

    Raises ValueError, naming key, expected and found, for a value of the wrong type or out of bounds.
    """

    model: str = _key("sim-model", "model id, the only one that is served")
    max_model_len: int = _key(131072, "prompt and output tokens that one request may have together", least=2)

    prefill_tok_per_s: float = _key(20000.0, "prompt tokens computed per second; 0 = in no time", least=0)
    request_overhead_s: float = _key(0.005, "delay of each request before it can be scheduled", least=0)
    step_base_s: float = _key(0.010, "seconds of a decode step, the part that does not depend on the batch", least=0)
    step_per_seq_s: float = _key(0.0001, "seconds of a decode step for each running sequence", least=0)
    step_per_kv_token_s: float = _key(
        0.0, "seconds of a decode step for each token in the running batch's KV when the step starts", least=0
    )

    tokens_per_step: int = _key(1, "tokens that every decode step yields for each sequence", least=1)
    acceptance: tuple[float, ...] = _key(
        (),
        "speculative decoding instead of tokens_per_step: probability that draft position i is accepted, "
        "given that those before it were; a step yields 1 + accepted tokens",
        least=0,
        most=1,
    )
    seed: int = _key(1, "seed of accepted lengths and of drawn output lengths")
    event_per_token: bool = _key(False, "one SSE event for each token of a step, all in one write")

    max_num_seqs: int = _key(256, "sequences that may run at once", least=1)
    kv_pool_tokens: int = _key(0, "tokens in the KV pool; 0 = without limit", least=0)
    prefix_caching: bool = _key(True, "whole prompt blocks seen since boot are not computed again")
    report_cached: bool = _key(True, "usage.prompt_tokens_details.cached_tokens is sent where prefix_caching is on")
    block_size: int = _key(16, "tokens in a block of the prefix cache", least=1)

    cold_requests: int = _key(0, "so many first requests of a boot are cold", least=0)
    cold_factor: float = _key(1.0, "all times of a cold request, and of steps it takes part in, times this", least=1)

    natural_osl: int = _key(0, "output length where ignore_eos does not hold; 0 = always max_tokens", least=0)
    natural_osl_spread: float = _key(
        0.0, "natural_osl is drawn evenly from (1 − spread) to (1 + spread) times itself", least=0, most=1
    )
    honour_ignore_eos: bool = _key(True, "false: ignore_eos is accepted and has no effect")
    reasoning: int = _key(0, "so many first output tokens of a chat come as reasoning_content", least=0)
    template_tokens_per_message: int = _key(4, "tokens the chat template puts before each message", least=0)
    template_tokens_tail: int = _key(3, "tokens of the generation prompt", least=0)

    usage_mode: str = _key(
        "final",
        "where streams carry usage: final = as asked by stream_options; none = nowhere; "
        "forced = in every chunk, asked or not; finish = in the finish_reason chunk, if include_usage is asked",
        choices=("final", "none", "forced", "finish"),
    )
    role_chunk_early: bool = _key(False, "a chat's role chunk follows the headers at once, not with the first token")
    send_done: bool = _key(True, "streams end with [DONE]")
    metrics: bool = _key(True, "false: /metrics answers 404")
    tokenize: bool = _key(True, "false: /tokenize and /detokenize answer 404")
    keepalive_s: float = _key(75.0, "idle connections are closed after this", least=0)

    fault_after_tokens: int = _key(4, "a fault inside a stream hits once this many tokens are out", least=0)
    fault_stall_s: float = _key(1.0, "length of a stall", least=0)
    fault_giant_bytes: int = _key(1_000_000, "size of a giant event's data line", least=1000)
    fault_disconnect_every: int = _key(0, "connection closed mid-stream, no last HTTP chunk", least=0)
    fault_truncate_every: int = _key(0, "stream ends properly in HTTP, but mid-output and without [DONE]", least=0)
    fault_error_in_stream_every: int = _key(0, "error object inside a 200 stream, after some tokens", least=0)
    fault_error_first_every: int = _key(0, "error object in a 200 answer in place of the first token", least=0)
    fault_http_429_every: int = _key(0, "HTTP 429 with an error object", least=0)
    fault_http_500_every: int = _key(0, "HTTP 500 with an error object", least=0)
    fault_http_503_every: int = _key(0, "HTTP 503 with an error object", least=0)
    fault_stall_every: int = _key(0, "nothing is sent for fault_stall_s, then all that is due", least=0)
    fault_no_usage_every: int = _key(0, "no usage, asked or not", least=0)
    fault_no_finish_every: int = _key(0, "no finish_reason, then [DONE]", least=0)
    fault_comments_every: int = _key(0, "an SSE comment before each event and inside each event", least=0)
    fault_crlf_every: int = _key(0, "SSE lines end in CRLF", least=0)
    fault_split_utf8_every: int = _key(0, "a 4-byte character cut in two, the halves 5 ms apart", least=0)
    fault_giant_event_every: int = _key(0, "one event padded to fault_giant_bytes", least=0)
    fault_garbage_every: int = _key(0, "an event whose JSON is cut off, between whole ones", least=0)

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for key, value in _checked("profile", values).items():
            object.__setattr__(self, key, value)

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted for each sequence in a step; 0 without speculative decoding."""
        return len(self.acceptance) or self.tokens_per_step - 1

    def differences(self) -> dict[str, object]:
        """The keys whose value is not the default."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


FAULTS: tuple[str, ...] = tuple(
    f.name.removeprefix("fault_").removesuffix("_every") for f in fields(Profile) if f.name.endswith("_every")
)
"""Names that a request's `sim_fault` takes; each is also a key `fault_<name>_every` of the profile."""


def read_profile(path: Path | None = None, overrides: Mapping[str, object] | None = None) -> Profile:
    """The profile in a TOML file (or a JSON one, by its suffix), with single keys replaced by `overrides`.

    Raises ValueError, naming file, key, expected and found, for what cannot be a profile; OSError for a
    file that cannot be read.
    """
    values: dict[str, object] = {}
    if path is not None:
        text = path.read_bytes()
        try:
            found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text.decode())
        except ValueError as error:  # both decoders and the UTF-8 one raise kinds of ValueError
            raise ValueError(f"{path}: expected {path.suffix.lstrip('.') or 'toml'}, found: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path}: expected a table of keys, found {found!r}")
        values = _checked(str(path), found)
    return Profile(**{**values, **_checked("override", overrides or {})})  # type: ignore[arg-type]


def describe_keys() -> str:
    """One line a key: name, default, meaning."""
    lines = []
    for f in fields(Profile):
        assert f.default is not MISSING
        doc = (
            f.metadata["doc"] if not f.name.endswith("_every") else "every k-th request, 0 = none: " + f.metadata["doc"]
        )
        lines.append(f"{f.name} = {json.dumps(f.default)}\n    {doc}")
    return "\n".join(lines)


def _checked(where: str, values: Mapping[str, object]) -> dict[str, object]:
    """The values in their fields' types; ValueError names the first that does not fit."""
    known = {f.name: f for f in fields(Profile)}
    checked: dict[str, object] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (nearest: {near[0]})" if near else ""
            raise ValueError(f"{where}: {key}: expected a key of the profile{hint}, found an unknown one")
        checked[key] = _fitted(where, key, value, str(known[key].type), known[key].metadata)
    if checked.get("acceptance") and checked.get("tokens_per_step", 1) != 1:
        found = checked["tokens_per_step"]
        raise ValueError(f"{where}: tokens_per_step: expected 1 where acceptance is given, found {found}")
    return checked


def _fitted(where: str, key: str, value: object, kind: str, meta: Mapping[str, Any]) -> object:
    least, most, choices = meta["least"], meta["most"], meta["choices"]

    def is_number(x: object) -> bool:
        if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x):
            return False
        return (least is None or x >= least) and (most is None or x <= most)

    bounds = (f" ≥ {least:g}" if least is not None else "") + (f" and ≤ {most:g}" if most is not None else "")
    if kind == "bool":
        fits, expected = isinstance(value, bool), "true or false"
    elif kind == "int":
        fits, expected = isinstance(value, int) and is_number(value), "an integer" + bounds
    elif kind == "float":
        fits, expected = is_number(value), "a number" + bounds
        value = float(value) if fits else value  # type: ignore[arg-type]
    elif kind == "str":
        fits = isinstance(value, str) and bool(value) and (not choices or value in choices)
        expected = "one of " + ", ".join(choices) if choices else "a text"
    else:
        fits = isinstance(value, (list, tuple)) and all(is_number(x) for x in value)
        expected = f"a list of numbers{bounds}"
        value = tuple(float(x) for x in value) if fits else value  # type: ignore[attr-defined]
    if not fits:
        raise ValueError(f"{where}: {key}: expected {expected}, found {value!r}")
    return value
