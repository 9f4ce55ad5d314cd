"""Arm files: one side of a comparison, with the hash within which its reps pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from benchkit.canonical import hash_of
from benchkit.settings import Section, read_settings

Engine = Literal["auto", "vllm", "sglang", "tabbyapi", "llamacpp", "openai", "sim"]
Fact = str | int | float | bool


class ArmRequest(Section):
    """What this engine needs to do the same thing; a fact, not part of the question."""

    extra_body: Mapping[str, Any] = Field(default_factory=dict)
    headers_env: Mapping[str, str] = Field(default_factory=dict)


class Launch(Section):
    """How the arm's server was started; recorded as a fact."""

    command: Annotated[str, Field(min_length=1)]
    ready_timeout_s: Annotated[float, Field(gt=0)] = 1800.0


class Arm(Section):
    """A whole arm file."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    title: str = ""
    model: Annotated[str, Field(min_length=1)]
    endpoints: Annotated[tuple[str, ...], Field(min_length=1)]
    engine: Engine = "auto"
    api: Literal["chat", "completions"] = "chat"
    api_key_env: str = ""
    request: ArmRequest = Field(default_factory=ArmRequest)
    facts: Mapping[str, Fact] = Field(default_factory=dict)
    launch: Launch | None = None

    @field_validator("endpoints")
    @classmethod
    def _urls(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError('expected URLs like "http://127.0.0.1:8000/v1"')
            if parts.query or parts.fragment:
                raise ValueError("expected URLs without a query (keys go into headers_env), found one with")
            if parts.username or parts.password:
                raise ValueError("expected URLs without a user or password (use api_key_env), found one with")
        return tuple(value.rstrip("/") for value in values)


def arm_hash(arm: Arm, server_told: Mapping[str, Any]) -> str:
    """The sha256 of what the arm is: declared, and told by the server; not where it is or by which key.

    Args:
        arm: the arm file.
        server_told: version and flags that the server itself tells, from an allow-list.
    """
    return hash_of(
        {
            "model": arm.model,
            "engine": arm.engine,
            "api": arm.api,
            "facts": dict(arm.facts),
            "launch": None if arm.launch is None else arm.launch.model_dump(mode="json"),
            "request": arm.request.model_dump(mode="json"),
            "server": dict(server_told),
        }
    )


def parse_arm(text: str, where: str = "arm") -> Arm:
    """The arm that a TOML text says.

    Raises:
        BadInput: one line per fault: file, key path, expected, found.
    """
    return read_settings(Arm, text, where)
