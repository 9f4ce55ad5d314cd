"""Protocol files: what is measured and how, with the hash that says two runs asked the same question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from benchkit.canonical import hash_of
from benchkit.errors import BadInput
from benchkit.settings import Section, read_settings

PositiveInt = Annotated[int, Field(gt=0)]
PositiveInts = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """One point of a protocol's grid. ISL, OSL and KV in tokens, concurrency in streams."""

    isl: int
    osl: int
    kv: int
    concurrency: int

    def __str__(self) -> str:
        depth = f" kv {self.kv}" if self.kv else ""
        return f"{self.isl}/{self.osl}{depth} c{self.concurrency}"


class Load(Section):
    """When requests are due. `requests` holds one number per level of concurrency."""

    shape: Literal["closed"] = "closed"
    concurrency: PositiveInts
    requests: PositiveInts | None = None
    requests_per_stream: PositiveInt = 4

    @model_validator(mode="after")
    def _one_number_a_level(self) -> Load:
        if len(set(self.concurrency)) != len(self.concurrency):
            raise ValueError(f"concurrency: expected different levels, found {list(self.concurrency)}")
        if self.requests is not None:
            if "requests_per_stream" in self.model_fields_set:
                raise ValueError("requests: expected requests or requests_per_stream, found both")
            if len(self.requests) != len(self.concurrency):
                raise ValueError(
                    f"requests: expected {len(self.concurrency)} values, one per level of concurrency, "
                    f"found {len(self.requests)}"
                )
        return self

    def requests_at(self, concurrency: int) -> int:
        """How many requests a cell at this level of concurrency sends."""
        if self.requests is None:
            return self.requests_per_stream * concurrency
        return self.requests[self.concurrency.index(concurrency)]


class Workload(Section):
    """What is sent: prompts of known token counts. ISL, OSL and KV in tokens."""

    kind: Literal["random"] = "random"
    send: Literal["text", "ids"] = "text"
    isl: PositiveInts
    osl: PositiveInts
    kv: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    range_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    prefix: Literal["unique", "as_is"] = "unique"
    ignore_eos: bool = True
    seed: int = 1

    @field_validator("isl", "osl", "kv")
    @classmethod
    def _different(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(values)) != len(values):
            raise ValueError("expected different values")
        return values

    @field_validator("kv")
    @classmethod
    def _no_depth_yet(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if values != (0,):
            raise ValueError("expected [0], the only depth that this version can prime and prove")
        return values


class Request(Section):
    """What every request carries, as part of the question."""

    system: str = ""
    assistant_prefix: str = ""
    extra_body: Mapping[str, Any] = Field(default_factory=dict)


class Sampling(Section):
    """Sampling parameters, sent as they are."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Recording(Section):
    """What a raw keeps besides counts and stamps; changes nothing that is measured, so it is not hashed."""

    text: bool = False
    events: bool = True


class Grids(Section):
    """How many grids a session makes, and how the server rests before each cell."""

    cold: Annotated[int, Field(ge=0)] = 1
    warm: Annotated[int, Field(ge=0)] = 3
    boots: Annotated[int, Field(ge=1, le=1)] = 1
    idle_gate: bool = True
    cooldown_s: Seconds = 2.0


class Limits(Section):
    """When a request counts as lost, and when a cell does. 0 means no limit."""

    connect_s: Seconds = 10.0
    first_token_s: Seconds = 0.0
    idle_s: Seconds = 300.0
    request_timeout_s: Seconds = 0.0
    error_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    client_lag_ms: Annotated[float, Field(gt=0)] = 5.0
    max_tok_per_s: Annotated[float, Field(ge=0)] = 0.0


class Slo(Section):
    """The limits that a request must meet to count as goodput."""

    ttft_s: Annotated[float, Field(gt=0)] | None = None
    tpot_s: Annotated[float, Field(gt=0)] | None = None
    e2e_s: Annotated[float, Field(gt=0)] | None = None


class Compare(Section):
    """How two arms are compared; declared before the run, read from the protocol stored with it."""

    primary: str = "output_tok_per_s"
    margin_pct: Annotated[float, Field(gt=0)] = 1.0
    design: Literal["unpaired", "paired"] = "unpaired"
    factor: tuple[str, ...] = ()


class Protocol(Section):
    """A whole protocol file."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    title: str = ""
    notes: str = ""
    load: Load
    workload: Workload
    request: Request = Field(default_factory=Request)
    sampling: Sampling = Field(default_factory=Sampling)
    record: Recording = Field(default_factory=Recording)
    grids: Grids = Field(default_factory=Grids)
    limits: Limits = Field(default_factory=Limits)
    slo: Slo = Field(default_factory=Slo)
    compare: Compare = Field(default_factory=Compare)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The grid's cells in the order in which they are measured: concurrency runs fastest."""
        return tuple(self._cells())

    @property
    def requests_per_grid(self) -> int:
        """How many requests one pass over all cells sends."""
        return sum(self.load.requests_at(cell.concurrency) for cell in self.cells)

    def _cells(self) -> Iterator[Cell]:
        work = self.workload
        for isl in work.isl:
            for osl in work.osl:
                for kv in work.kv:
                    for concurrency in self.load.concurrency:
                        yield Cell(isl=isl, osl=osl, kv=kv, concurrency=concurrency)

    @property
    def canonical(self) -> dict[str, Any]:
        """What is measured, and nothing else: the value whose canonical JSON is hashed (design: terms).

        Without name, title, notes, `[compare]`, `[record]` and the numbers of grids, since more reps
        are the same question. A key added after schema 1 was released enters only where it differs from
        the default it was introduced with (`ADDED_KEYS`), so that old hashes stay.
        """
        form = canonical_form(self.model_dump(mode="json", by_alias=True), ADDED_KEYS)
        for key in ("name", "title", "notes", "compare", "record"):
            del form[key]
        for key in ("cold", "warm", "boots"):
            del form["grids"][key]
        return form

    @property
    def hash(self) -> str:
        """The protocol hash: sha256 of the canonical form, 64 hex digits."""
        return hash_of(self.canonical)


ADDED_KEYS: Mapping[str, Any] = {}
"""Keys that came after the first release of schema 1, by dotted path, with the default they came with."""


def canonical_form(values: dict[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Parsed values without the later keys that still hold the default they were introduced with."""

    def kept(table: dict[str, Any], prefix: str) -> dict[str, Any]:
        out = {}
        for key, value in table.items():
            path = f"{prefix}{key}"
            if path in added and added[path] == value:
                continue
            out[key] = kept(value, path + ".") if isinstance(value, dict) else value
        return out

    return kept(values, "")


def parse_protocol(text: str, where: str = "protocol") -> Protocol:
    """The protocol that a TOML text says.

    Raises:
        BadInput: one line per fault: file, key path, expected, found.
    """
    protocol = read_settings(Protocol, text, where)
    if protocol.workload.send == "ids" and (protocol.request.system or protocol.request.assistant_prefix):
        raise BadInput(f'{where}: workload.send: expected "text" with request.system or assistant_prefix, found "ids"')
    return protocol
