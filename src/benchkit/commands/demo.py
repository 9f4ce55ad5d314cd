"""`benchkit demo`: the main job from start to end, on simulated arms or on a real llama.cpp server."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchkit.canonical import canonical_json
from benchkit.commands import decide
from benchkit.commands.names import text_of
from benchkit.commands.run import command_line, new_plan, run
from benchkit.errors import BadInput, Finding
from benchkit.ledger import Ledger
from benchkit.measured import MeasuredRun
from benchkit.protocol import parse_protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What a demo did: its runs, and why they were not banked, if they were not."""

    protocol: str
    arms: tuple[str, str]
    runs: tuple[MeasuredRun, ...]
    refused: str | None


def simulated(ledger: Ledger, *, quiet: bool) -> Demo:
    """Two simulated arms: an autoregressive one, and one that speculates and whose steps cost more."""
    from benchkit.sim.process import spawned
    from benchkit.sim.profile import Profile

    with contextlib.ExitStack() as servers:
        plain = servers.enter_context(
            spawned(Profile(step_base_s=0.008, step_per_seq_s=0.0002, cold_requests=14, cold_factor=2.0))
        )
        speculating = servers.enter_context(
            spawned(
                Profile(
                    step_base_s=0.0115,
                    step_per_seq_s=0.0006,
                    acceptance=(0.7, 0.5),
                    cold_requests=14,
                    cold_factor=2.0,
                )
            )
        )
        arms = {
            "autoregressive": _arm("autoregressive", plain.url, "sim-model", "sim", speculative="none"),
            "speculative": _arm("speculative", speculating.url, "sim-model", "sim", speculative="draft:2"),
        }
        return _session(ledger, "demo", arms, quiet=quiet)


def real(ledger: Ledger, *, protocol: str | None, quiet: bool) -> Demo:
    """llama.cpp's own server twice on the same model, without and with n-gram speculation.

    SmolLM2-135M-Instruct where its wheel is installed, else a tiny random model that is written here.

    Raises:
        BadInput: the extra `benchkit[llamacpp]` is not installed.
    """
    from importlib.util import find_spec

    from benchkit.llamacpp.gguf import smollm2_path, write_tiny_gguf
    from benchkit.llamacpp.serve import running_server

    if find_spec("xllamacpp") is None:
        raise BadInput("demo --real needs llama.cpp's server: pip install 'benchkit[llamacpp]'")
    model, alias = smollm2_path(), "smollm2-135m-instruct"
    if model is None:
        model, alias = ledger.root / "models" / "tiny-random.gguf", "tiny-random"
        if not model.exists():
            model.parent.mkdir(parents=True, exist_ok=True)
            write_tiny_gguf(model)
    with contextlib.ExitStack() as servers:
        arms = {}
        for name, ngram in (("plain", False), ("ngram", True)):
            # One thread each: the server's threads poll while they wait, and the client needs a processor too.
            url = servers.enter_context(running_server(model, alias=alias, ctx=8192, slots=8, threads=1, ngram=ngram))
            facts = {"checkpoint": model.name, "engine_threads": "1", "speculative": "ngram:3:4" if ngram else "none"}
            arms[f"{alias}-{name}"] = _arm(f"{alias}-{name}", url, alias, "llamacpp", **facts)
        return _session(ledger, protocol or "llamacpp-quick", arms, quiet=quiet)


def _arm(name: str, url: str, model: str, engine: str, **facts: str) -> str:
    """The text of an arm's file."""
    lines = [
        "schema = 1",
        f'name = "{name}"',
        f'model = "{model}"',
        f'endpoints = ["{url}/v1"]',
        f'engine = "{engine}"',
        "",
        "[facts]",
        *(f"{key} = {canonical_json(value)}" for key, value in sorted(facts.items())),
    ]
    return "\n".join(lines) + "\n"


def _session(ledger: Ledger, protocol: str, arms: Mapping[str, str], *, quiet: bool) -> Demo:
    text, _ = text_of("protocol", protocol)
    plan = new_plan(text, list(arms.values()), reps=None, seed=1, command=command_line(), note="benchkit demo")
    run(ledger, plan, quiet=quiet)
    refused = None
    try:
        decide.bank(ledger, [plan.session], why="benchkit demo: the warm grids of a demonstration")
    except Finding as finding:
        refused = str(finding)  # a refusal is shown; the demonstration does not end with it
    first, second = arms
    return Demo(
        protocol=parse_protocol(text, protocol).name,
        arms=(first, second),
        runs=tuple(ledger.measured(s) for s in ledger.runs(session=plan.session)),
        refused=refused,
    )


def demo_ledger(given: Path | None) -> Path:
    """The ledger of a demo: one of its own unless told otherwise, so that no real one gets toy runs."""
    return given or Path("demo-ledger")
