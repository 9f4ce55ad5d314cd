"""The command line: parses, prints, and turns errors into exit codes; it decides nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from benchkit import __version__
from benchkit.errors import BadInput, BenchkitError, Finding

if TYPE_CHECKING:
    from benchkit.ledger import Ledger

app = typer.Typer(
    name="benchkit",
    help="Benchmark harness and results ledger for LLM serving.\n\n"
    "Exit codes: 0 done · 1 a finding · 2 bad input · 3 endpoint unreachable or unfit · 4 inconclusive · "
    "5 the run is invalid · 130 interrupted, with what was measured kept.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
ledger_app = typer.Typer(help="Upkeep of a ledger: rebuild, merge.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(ledger_app, name="ledger")

LedgerOption = Annotated[
    Path | None, typer.Option("--ledger", metavar="DIR", help="The ledger; else BENCHKIT_LEDGER, else ./ledger.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
WhyOption = Annotated[str, typer.Option("--why", help="The reason; kept for good, printed where it matters.")]
Names = Annotated[list[str], typer.Argument(metavar="RUN...", help="Run ids, session ids, or latest.")]
ArmOption = Annotated[list[str], typer.Option("--arm", metavar="ARM", help="A file or a name; repeat for more arms.")]


def main() -> NoReturn:
    """The entry point: every error ends in one clear line and its exit code."""
    try:
        code = app(standalone_mode=False)
    except BenchkitError as error:
        print(f"benchkit: {error}", file=sys.stderr)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("benchkit: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away, as `head` does
        code = 0
    except Exception as error:
        show = getattr(error, "show", None)  # what typer raises for a wrong flag; its class moved between versions
        if show is None:
            raise
        show()
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _opened(given: Path | None, *, create: bool = False) -> Iterator[Ledger]:
    from benchkit.commands.names import ledger_path
    from benchkit.ledger import Ledger

    with Ledger.open(ledger_path(given), create=create) as ledger:
        for note in ledger.notes:
            print(f"note: {note}", file=sys.stderr)
        yield ledger


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1))


def _version(asked: bool) -> None:
    if asked:
        print(f"benchkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="The version, then end.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    ledger: Annotated[
        Path | None, typer.Option("--ledger", metavar="DIR", help="Where to keep it; ./demo-ledger unless told.")
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="On llama.cpp's own server (needs benchkit[llamacpp]), not the simulator.")
    ] = False,
    protocol: Annotated[
        str | None, typer.Option("--protocol", help="With --real: another shipped protocol.", metavar="NAME")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """The main job, start to end: two arms, one cold and three warm grids each, banked and compared.

    \b
    Examples:
      benchkit demo
      benchkit demo --real --ledger /tmp/real-ledger
    """
    from benchkit.commands import compare as compare_command
    from benchkit.commands import demo as demo_command
    from benchkit.ledger import Ledger

    if protocol is not None and not real:
        raise BadInput("--protocol: expected with --real only")
    root = demo_command.demo_ledger(ledger)
    with Ledger.open(root, create=True) as opened:
        if real:
            done = demo_command.real(opened, protocol=protocol, quiet=json_)
        else:
            done = demo_command.simulated(opened, quiet=json_)
        if done.refused is not None:
            raise Finding(f"{done.refused}\nmeasured and recorded in {root}, but not citable as it stands")
        chosen = compare_command.compared(opened, done.protocol, done.arms, metrics=compare_command.DEMO_METRICS)
    if json_:
        runs = [r.to_json() for r in done.runs]
        session = done.runs[0].run.session
        _print_json({"session": session, "ledger": str(root), "runs": runs, "compare": chosen.to_json()})
        return
    print(chosen.markdown())
    a, b = done.arms
    print(
        f"\nThe ledger is {root}. Next:\n"
        f"  benchkit compare {done.protocol} --arm {a} --arm {b} --metric tpot_s --ledger {root}\n"
        f"  benchkit runs --ledger {root}\n"
        f"  benchkit verify --ledger {root}"
    )


@app.command()
def sim(
    port: Annotated[int, typer.Option(help="0 takes any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML or JSON profile of the engine.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One key of the profile.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Print the profile's keys and end.")] = False,
) -> None:
    """Serves the simulated endpoint until it is told to stop.

    \b
    Examples:
      benchkit sim --port 8001
      benchkit sim --port 8002 --set tokens_per_step=3 --set step_base_s=0.012
    """
    from benchkit.sim.__main__ import main as serve

    argv = ["--port", str(port), "--host", host]
    argv += ["--profile", str(profile)] if profile is not None else []
    argv += [word for setting in set_ or () for word in ("--set", setting)]
    raise typer.Exit(serve([*argv, "--keys"] if keys else argv))


@app.command()
def run(
    protocol: Annotated[str | None, typer.Argument(help="A protocol: a file, or a name (benchkit protocols).")] = None,
    arm: ArmOption = [],  # noqa: B006 (typer reads it, nothing changes it)
    ledger: LedgerOption = None,
    resume: Annotated[
        str | None, typer.Option(metavar="SESSION", help="Complete a session that was interrupted.")
    ] = None,
    reps: Annotated[int | None, typer.Option(min=0, help="Warm grids per arm, in place of the protocol's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order in which arms are interleaved.")] = 1,
    note: Annotated[str, typer.Option(help="The operator's words, kept with each run.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, measure nothing.")] = False,
    json_: JsonOption = False,
) -> None:
    """Measures a protocol on one or more arms, interleaved, and records every grid.

    \b
    Examples:
      benchkit run my-protocol.toml --arm a.toml --arm b.toml
      benchkit run demo --arm a.toml --dry-run
      benchkit run --resume ses-20261129T101500-1a2b3c
    """
    from benchkit.commands import run as run_command
    from benchkit.commands import show as show_command

    if (protocol is None) == (resume is None):
        raise BadInput("expected a PROTOCOL, or --resume SESSION; `benchkit run --help` has examples")
    if resume is not None:
        if arm or reps is not None or dry_run or note or seed != 1:
            raise BadInput("--resume: expected alone; a session keeps what it was planned with")
        with _opened(ledger) as opened:
            runs, session = run_command.resume(opened, resume, quiet=json_), resume
    else:
        with ExitStack() as stack:
            # The plan comes first: a typo must not leave an empty ledger behind.
            known = stack.enter_context(_maybe_opened(ledger))
            plan = run_command.plan_session(
                protocol or "",
                arm,
                [] if known is None else [s.run for s in known.runs()],
                reps=reps,
                seed=seed,
                command=run_command.command_line(),
                note=note,
            )
            session = plan.session
            if dry_run:
                described = run_command.describe(plan)
                _print_json(described) if json_ else print(show_command.plan_text(described))
                return
            opened = known if known is not None else stack.enter_context(_opened(ledger, create=True))
            runs = run_command.run(opened, plan, quiet=json_)
    if json_:
        _print_json({"session": session, "runs": [r.to_json() for r in runs]})
    elif runs:
        print(show_command.runs_text(runs))
        print(f"\nNext: benchkit bank {session} --why '…'   (`benchkit show latest` has every metric and flag)")
    run_command.refuse_empty(runs)


@contextmanager
def _maybe_opened(given: Path | None) -> Iterator[Ledger | None]:
    """The ledger for its names, or None where there is none yet."""
    from benchkit.commands.names import ledger_path
    from benchkit.ledger import Layout

    root = ledger_path(given)
    if not Layout(root).exists and (root.is_dir() or not root.exists()):
        yield None
        return
    with _opened(given) as ledger:
        yield ledger


@app.command()
def protocols(json_: JsonOption = False) -> None:
    """The shipped protocols, each with what it measures."""
    from benchkit.commands import show as show_command

    found = show_command.shipped_protocols()
    _print_json(found) if json_ else print(show_command.protocols_text(found))


@app.command()
def bank(runs: Names, why: WhyOption, ledger: LedgerOption = None, json_: JsonOption = False) -> None:
    """Accepts runs into the citable set; a session's id means its complete warm runs.

    \b
    Example:
      benchkit bank ses-20261129T101500-1a2b3c --why 'quiet machine, no flags'
    """
    from benchkit.commands import decide

    with _opened(ledger) as opened:
        done = decide.bank(opened, runs, why=why)
    if json_:
        _print_json(done)
        return
    for id_ in done["banked"]:
        print(f"banked {id_}")
    for id_ in done["already_banked"]:
        print(f"{id_} was banked before")


@app.command()
def quarantine(runs: Names, why: WhyOption, ledger: LedgerOption = None, json_: JsonOption = False) -> None:
    """Takes runs out of the citable set; they stay in the ledger with the reason."""
    from benchkit.commands import decide

    with _opened(ledger) as opened:
        done = decide.quarantine(opened, runs, why=why)
    _print_json(done) if json_ else print("\n".join(f"quarantined {id_}" for id_ in done["quarantined"]))


@app.command()
def waive(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    flag: Annotated[str, typer.Argument(metavar="FLAG", help="The flag's name, as `benchkit show` prints it.")],
    why: WhyOption,
    cell: Annotated[str | None, typer.Option(metavar="CELL", help='One cell, e.g. "256/48 c8"; else all.')] = None,
    ledger: LedgerOption = None,
    json_: JsonOption = False,
) -> None:
    """Gives the reason why a blocking flag does not keep a run from being banked; tables print it.

    \b
    Example:
      benchkit waive run-2026 client_limited --why 'p99 lag of 6 ms against TPOT of 40 ms'
    """
    from benchkit.commands import decide

    with _opened(ledger) as opened:
        done = decide.waive(opened, run, flag, cell=cell, why=why)
    _print_json(done) if json_ else print(f"waived {done['flag']} of {done['run']}")


@app.command()
def runs(
    protocol: Annotated[str | None, typer.Option(help="Only this protocol (name or hash).")] = None,
    arm: Annotated[str | None, typer.Option(help="Only this arm (name or hash).")] = None,
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    status: Annotated[str | None, typer.Option(help="Only recorded, banked, quarantined, …")] = None,
    ledger: LedgerOption = None,
    json_: JsonOption = False,
) -> None:
    """What is in the ledger, oldest first."""
    from benchkit.commands import show as show_command

    with _opened(ledger) as opened:
        found = show_command.runs(opened, protocol=protocol, arm=arm, session=session, status=status)
        waiting = show_command.unfinished_sessions(opened)
    if json_:
        _print_json({"runs": found, "unfinished_sessions": waiting})
        return
    print(show_command.run_list_text(found))
    for id_ in waiting:
        print(f"\nunfinished: benchkit run --resume {id_}")


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id or its beginning, a session's id, or latest.")],
    ledger: LedgerOption = None,
    json_: JsonOption = False,
) -> None:
    """A run with its cells: metrics, flags, provenance."""
    from benchkit.commands import show as show_command

    with _opened(ledger) as opened:
        found = show_command.show(opened, run)
    if json_:
        _print_json({"session": found[0].run.session, "runs": [r.to_json() for r in found]})
    else:
        print("\n\n".join(show_command.show_text(r) for r in found))


@app.command()
def log(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Only what touches this run.")] = None,
    ledger: LedgerOption = None,
    json_: JsonOption = False,
) -> None:
    """The ledger's entries, oldest first: who did what to which run, when and why."""
    from benchkit.commands import show as show_command

    with _opened(ledger) as opened:
        entries = show_command.log(opened, run)
    _print_json({"entries": entries}) if json_ else print(show_command.log_text(entries))


@app.command()
def compare(
    protocol: Annotated[str, typer.Argument(help="A protocol's name in the ledger, its hash, or a file.")],
    arm: ArmOption,
    metric: Annotated[list[str] | None, typer.Option(help="Metrics; the protocol's primary unless told.")] = None,
    factor: Annotated[str | None, typer.Option(help="Facts under test, with commas: checkpoint,quantization.")] = None,
    session: Annotated[str | None, typer.Option(help="Reps of this session only.")] = None,
    since: Annotated[str | None, typer.Option(metavar="DATE", help="Reps measured since (UTC, ISO 8601).")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All banked reps, not only the newest session's.")] = False,
    unmatched: Annotated[bool, typer.Option("--unmatched", help="Print what does not match, marked as such.")] = False,
    ledger: LedgerOption = None,
    json_: JsonOption = False,
) -> None:
    """Two arms, matched: mean ± s, Δ % with its interval, and a verdict; B against A.

    \b
    Examples:
      benchkit compare demo --arm autoregressive --arm speculative --ledger demo-ledger
      benchkit compare demo --arm autoregressive --arm speculative --metric tpot_s --json --ledger demo-ledger
    """
    from benchkit.commands import compare as compare_command

    with _opened(ledger) as opened:
        chosen = compare_command.compared(
            opened, protocol, arm, metrics=metric or (), factor=factor, session=session, since=since, all_=all_,
            unmatched=unmatched,
        )  # fmt: skip
    _print_json(chosen.to_json()) if json_ else print(chosen.markdown())


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="A definition under the ledger's tables/, without .toml.")],
    ledger: LedgerOption = None,
    json_: JsonOption = False,
) -> None:
    """One table, regenerated from the raws that its definition names."""
    from benchkit.commands import tables as tables_command

    with _opened(ledger) as opened:
        made = tables_command.table(opened, name)
    _print_json(made.to_json()) if json_ else print(made.markdown(), end="")


@app.command()
def readme(
    file: Annotated[Path, typer.Argument(help="A markdown file with <!-- benchkit:table NAME --> blocks.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a block is not as it would be.")]
    = False,
    ledger: LedgerOption = None,
    json_: JsonOption = False,
) -> None:  # fmt: skip
    """Regenerates the marked blocks of a markdown file in place.

    \b
    Examples:
      benchkit readme README.md
      benchkit readme README.md --check
    """
    from benchkit.commands import tables as tables_command

    with _opened(ledger) as opened:
        done = tables_command.readme(opened, file, check=check)
    if json_:
        _print_json(done)
    else:
        for line in done["lines"]:
            print(line)
    if check and done["drift"]:
        raise Finding(f"{file}: {len(done['drift'])} blocks are not what the ledger gives: {', '.join(done['drift'])}")


@app.command()
def verify(ledger: LedgerOption = None, json_: JsonOption = False) -> None:
    """Re-hashes every raw, walks the chain, recomputes what is cached; exit 1 and names what is wrong."""
    from benchkit.commands import upkeep

    found = upkeep.verify(ledger)
    if json_:
        _print_json(found)
    else:
        print(upkeep.verify_text(found))
    if not found["ok"]:
        raise Finding(f"{len(found['problems'])} problems")


@ledger_app.command("rebuild")
def ledger_rebuild(ledger: LedgerOption = None, json_: JsonOption = False) -> None:
    """Makes the database anew from entries/ and raws/."""
    from benchkit.commands import upkeep

    done = upkeep.rebuild(ledger)
    _print_json(done) if json_ else print(f"rebuilt {done['ledger']}: {done['entries']} entries, {done['runs']} runs")


@ledger_app.command("merge")
def ledger_merge(
    why: Annotated[str, typer.Option("--why", help="The reason, if there is more to say.")] = "",
    ledger: LedgerOption = None,
    json_: JsonOption = False,
) -> None:
    """Joins several heads, as a git merge leaves them, into one."""
    from benchkit.commands import upkeep

    with _opened(ledger) as opened:
        done = upkeep.merge(opened, why=why)
    _print_json(done) if json_ else print(f"merged into {done['entry'][:12]}" if done["entry"] else "nothing to merge")
