"""The whole street through the command line: run, bank, compare, table, readme, verify, on the simulator."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchkit.ledger import Journal, Ledger, unfinished, verify
from benchkit.sim.process import SimProcess, spawned
from benchkit.sim.profile import Profile
from benchkit.sim.truth import expected_cell

# A prefill of 10 ms outlasts the client's gaps between sends: streams released together are one queue, and the closed
# form holds for all of them. A TTFT of a quarter of a second makes 2 % more than what HTTP costs on a busy machine.
PLAIN = Profile(request_overhead_s=0.24, prefill_tok_per_s=12_800.0, step_base_s=0.012, step_per_seq_s=0.0005)
TRIPLE = Profile(
    request_overhead_s=0.24, prefill_tok_per_s=12_800.0, step_base_s=0.020, step_per_seq_s=0.0005, tokens_per_step=3
)

PROTOCOL = """
schema = 1
name = "closed-form"
[load]
concurrency = [1, 4]
requests = [3, 4]
[workload]
isl = [128]
osl = [46]
[grids]
cold = 1
warm = 3
cooldown_s = 0.05
[limits]
client_lag_ms = 500
[compare]
margin_pct = 2.0
factor = ["speculative"]
"""

SHORT = """
schema = 1
name = "short"
[load]
concurrency = [1, 2, 3, 4]
requests = [2, 2, 3, 4]
[workload]
isl = [64]
osl = [8]
[grids]
cold = 1
warm = 2
cooldown_s = 0
[limits]
client_lag_ms = 1000
"""


@dataclass(frozen=True)
class Bench:
    """A folder with a ledger and a command line."""

    folder: Path

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name

    def arm(self, name: str, url: str, **facts: str) -> str:
        lines = [f'schema = 1\nname = "{name}"\nmodel = "sim-model"\nendpoints = ["{url}/v1"]\n[facts]']
        lines += [f'{k} = "{v}"' for k, v in facts.items()]
        return self.write(f"{name}.toml", "\n".join(lines) + "\n")

    def start(self, *argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchkit", *argv],
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "BENCHKIT_WHO": "test"},
        )

    def run(self, *argv: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        process = self.start(*argv)
        out, err = process.communicate(timeout=150)
        assert code == process.returncode, f"{argv}: {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def json(self, *argv: str, code: int = 0) -> Any:
        return json.loads(self.run(*argv, "--json", code=code).stdout)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="module")
def fast() -> Iterator[SimProcess]:
    with spawned(Profile(request_overhead_s=0.02, step_base_s=0.004)) as sim:
        yield sim


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A session of two arms, run once and banked; tests that change it work on a copy of their own."""
    bench = Bench(tmp_path_factory.mktemp("street"))
    bench.write("p.toml", PROTOCOL)
    with spawned(PLAIN) as plain, spawned(TRIPLE) as triple:
        arms = [bench.arm("plain", plain.url, speculative="none"), bench.arm("triple", triple.url, speculative="mtp:2")]
        done = bench.json("run", "p.toml", "--arm", arms[0], "--arm", arms[1])
    bench.run("bank", done["session"], "--why", "test")
    bench.write("session.json", json.dumps(done))
    return bench


@pytest.fixture
def copy(measured: Bench, tmp_path: Path) -> Bench:
    subprocess.run(["cp", "-r", f"{measured.folder}/.", str(tmp_path)], check=True)
    return Bench(tmp_path)


def session_of(bench: Bench) -> Any:
    return json.loads((bench.folder / "session.json").read_text())


# --- what is measured is what is true ---------------------------------------------------------------------


def test_the_session_is_one_cold_and_three_warm_grids_of_each_arm(measured: Bench) -> None:
    runs = session_of(measured)["runs"]

    for arm in ("plain", "triple"):
        assert ["cold", "warm", "warm", "warm"] == [r["grid"] for r in runs if r["arm"] == arm]
    assert {"recorded"} == {r["status"] for r in runs}
    assert [[True]] * 2 == [[f["blocking"] for f in r["cells"][0]["flags"] if f["name"] == "cold"] for r in runs[:2]]


@pytest.mark.parametrize("name", ["plain", "triple"])
def test_token_counts_are_exact_with_one_and_with_three_tokens_an_event(measured: Bench, name: str) -> None:
    with Ledger.open(measured.ledger) as ledger:
        for state in ledger.runs(arm=name):
            for cell in state.run.cells:
                for record in ledger.records(cell):
                    assert (128, 46, 1, "usage") == (
                        record.prompt_tokens, record.completion_tokens, record.first_event_tokens, record.token_source,
                    )  # fmt: skip
                    # One token with the first event; 45 more are 45 steps of one, or 15 of three.
                    assert (1, *[1] * 45) == record.event_tokens if name == "plain" else (1, *[3] * 15)
                    assert (46 if name == "plain" else 16) == record.events


@pytest.mark.parametrize(("name", "profile"), [("plain", PLAIN), ("triple", TRIPLE)])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_uncontended_cells_are_within_two_percent_of_the_closed_form(
    measured: Bench, name: str, profile: Profile, concurrency: int
) -> None:
    found = measured.json("compare", "closed-form", "--arm", "plain", "--arm", "triple", *METRICS)
    truth = expected_cell(profile, prompt_tokens=128, osl=46, concurrency=concurrency)
    side = "a" if name == "plain" else "b"

    means = {c["metric"]: c[side]["mean"] for c in found["cells"] if c["concurrency"] == concurrency}

    assert truth.ttft_s == pytest.approx(means["ttft_s"], rel=0.02)
    assert truth.tpot_s == pytest.approx(means["tpot_s"], rel=0.02)
    assert truth.output_tok_per_s == pytest.approx(means["output_tok_per_s"], rel=0.02)


METRICS = ("--metric", "output_tok_per_s", "--metric", "ttft_s", "--metric", "tpot_s")


def test_the_comparison_is_the_ratio_of_the_closed_forms_and_says_who_leads(measured: Bench) -> None:
    found = measured.json("compare", "closed-form", "--arm", "plain", "--arm", "triple")
    a, b = (expected_cell(p, prompt_tokens=128, osl=46).output_tok_per_s for p in (PLAIN, TRIPLE))
    cell = found["cells"][0]

    assert ("closed-form", True, ["plain", "triple"]) == (found["protocol"], found["matched"], found["arms"])
    assert (1, "output_tok_per_s", "tok/s", 3, 3) == (
        cell["concurrency"], cell["metric"], cell["unit"], cell["a"]["n"], cell["b"]["n"],
    )  # fmt: skip
    assert 100 * (b / a - 1) == pytest.approx(cell["delta_pct"], abs=3)
    assert cell["ci_pct"][0] < cell["delta_pct"] < cell["ci_pct"][1]
    assert "leads" == cell["verdict"]


def test_prefills_that_queue_show_in_the_serialization_ratio(measured: Bench) -> None:
    """Overhead runs in parallel and prefill in turns: (0.24 + 4 · 0.01) / (4 · (0.24 + 0.01)) = 0.28."""
    runs = measured.json("show", session_of(measured)["session"])["runs"]

    ratios = [c["metrics"]["serialization_ratio"] for r in runs for c in r["cells"] if c["concurrency"] == 4]
    assert 8 == len(ratios)
    assert 0.28 == pytest.approx(sum(ratios) / 8, rel=0.03)


def test_acceptance_length_is_the_servers_own_count(measured: Bench) -> None:
    runs = [r for r in session_of(measured)["runs"] if r["arm"] == "triple"]

    # Drafts of two, all accepted: three tokens a step.
    assert {(1.0, 3.0)} == {
        (c["metrics"]["acceptance_rate"], c["metrics"]["acceptance_length"]) for r in runs for c in r["cells"]
    }


# --- what may be cited ------------------------------------------------------------------------------------


def test_a_cold_run_is_never_banked_and_the_refusal_says_why(copy: Bench) -> None:
    cold = next(r["id"] for r in session_of(copy)["runs"] if r["grid"] == "cold")

    refused = copy.run("bank", cold, "--why", "please", code=1)

    assert "cold" in refused.stderr
    assert cold in refused.stderr
    assert "recorded" == copy.json("show", cold)["runs"][0]["status"]
    assert "cannot be waived" in copy.run("waive", cold, "cold", "--why", "please", code=2).stderr


def test_a_quarantined_run_leaves_the_comparison(copy: Bench) -> None:
    warm = next(r["id"] for r in session_of(copy)["runs"] if r["grid"] == "warm" and r["arm"] == "plain")
    copy.run("quarantine", warm, "--why", "the node died in mid-bench")

    found = copy.json("compare", "closed-form", "--arm", "plain", "--arm", "triple")

    assert (2, 3) == (found["cells"][0]["a"]["n"], found["cells"][0]["b"]["n"])
    assert "the node died" in copy.run("log", warm).stdout


def test_the_second_session_on_a_boot_runs_no_cold_grid_and_says_so(bench: Bench, fast: SimProcess) -> None:
    arm = bench.arm("a", fast.url)
    bench.write("p.toml", SHORT)
    first = bench.json("run", "p.toml", "--arm", arm)
    again = bench.run("run", "p.toml", "--arm", arm)

    assert ["cold", "warm", "warm"] == [r["grid"] for r in first["runs"]]
    assert "already served the protocol; its cold grid is not run again" in again.stderr
    grids = [r["grid"] for r in bench.json("runs")["runs"]]
    assert ["cold", "warm", "warm", "warm", "warm"] == grids


def test_a_restart_makes_the_next_grid_cold_by_itself(bench: Bench) -> None:
    bench.write("p.toml", SHORT.replace("cold = 1", "cold = 0").replace("warm = 2", "warm = 1"))
    with spawned(Profile(request_overhead_s=0.01, step_base_s=0.003)) as sim:
        arm = bench.arm("a", sim.url)
        bench.run("run", "p.toml", "--arm", arm)
        before = bench.json("runs")["runs"]
        sim.restart()
        time.sleep(0.5)
        bench.run("run", "p.toml", "--arm", arm)
        after = bench.json("runs")["runs"]

    assert ["cold", "warm"] == [r["grid"] for r in before]
    assert ["cold", "warm", "cold", "warm"] == [r["grid"] for r in after]
    assert 2 == len({r["boot_id"] for r in after})


# --- damage is found --------------------------------------------------------------------------------------


def test_a_flipped_byte_in_any_raw_is_found_and_named(copy: Bench) -> None:
    assert copy.json("verify")["ok"]
    rng = random.Random(5)
    for raw in sorted(copy.ledger.glob("raws/*/*.parquet"))[::3]:
        whole = raw.read_bytes()
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        raw.chmod(0o644)
        raw.write_bytes(bytes(damaged))
        found = copy.json("verify", code=1)
        assert any((raw.parent.name + raw.stem)[:12] in p["what"] for p in found["problems"]), found["problems"]
        raw.write_bytes(whole)
    assert copy.json("verify")["ok"]


def test_a_changed_row_is_found_and_named_whatever_the_table(copy: Bench) -> None:
    path = copy.ledger / "ledger.db"
    with sqlite3.connect(path) as db:
        tables = [r[0] for r in db.execute("select name from sqlite_master where type = 'table'")]
        assert {"entry", "run", "cell", "raw"} <= set(tables)
        columns = {t: [r[1] for r in db.execute(f"pragma table_info({t})")] for t in tables}
        types = {t: [r[2] for r in db.execute(f"pragma table_info({t})")] for t in tables}
        with pytest.raises(sqlite3.DatabaseError):
            db.execute("update run set arm = 'another'")
    pristine = path.read_bytes()
    for table in tables:
        db = sqlite3.connect(path)
        for (trigger,) in db.execute("select name from sqlite_master where type = 'trigger'").fetchall():
            db.execute(f"drop trigger {trigger}")
        column = columns[table][-1]
        rows = db.execute(f"select count(*) from {table}").fetchone()[0]
        if rows:
            first = columns[table][0]
            where = f"{first} = (select max({first}) from {table})"
            db.execute(f"update {table} set {column} = {NEW_VALUE[types[table][-1]]} where {where}")
            db.commit()
        db.close()
        if rows:
            found = copy.json("verify", code=1)
            assert any(table in p["what"] or table in p["kind"] for p in found["problems"]), (table, found["problems"])
        path.write_bytes(pristine)
    assert copy.json("verify")["ok"]


def test_the_database_is_made_anew_from_entries_and_raws(copy: Bench) -> None:
    before = copy.json("compare", "closed-form", "--arm", "plain", "--arm", "triple")
    (copy.ledger / "ledger.db").unlink()

    assert before == copy.json("compare", "closed-form", "--arm", "plain", "--arm", "triple")
    assert copy.json("verify")["ok"]


NEW_VALUE = {"TEXT": "'something else'", "INTEGER": "12345", "REAL": "1.5"}


# --- tables -----------------------------------------------------------------------------------------------


def test_readme_regenerates_its_block_and_check_finds_a_hand_edit(copy: Bench) -> None:
    (copy.ledger / "tables").mkdir(exist_ok=True)
    (copy.ledger / "tables" / "head.toml").write_text(
        'schema = 1\nprotocol = "closed-form"\narms = ["plain", "triple"]\nmetrics = ["output_tok_per_s"]\n'
    )
    copy.write("README.md", "# Title\n\n<!-- benchkit:table head -->\n<!-- /benchkit -->\n\nAfter.\n")

    copy.run("readme", "README.md", "--check", code=1)
    copy.run("readme", "README.md")
    made = (copy.folder / "README.md").read_text()
    copy.run("readme", "README.md", "--check")
    (copy.folder / "README.md").write_text(made.replace("leads", "crushes"))
    drifted = copy.run("readme", "README.md", "--check", code=1)
    copy.run("readme", "README.md")

    assert made == (copy.folder / "README.md").read_text()
    assert "crushes" in drifted.stdout
    assert copy.run("table", "head").stdout.rstrip("\n") in made
    assert "± " in made
    assert "| leads" in made


def test_an_unknown_block_is_one_clear_line(copy: Bench) -> None:
    copy.write("README.md", "<!-- benchkit:table nowhere -->\n<!-- /benchkit -->\n")

    assert "README.md:1" in copy.run("readme", "README.md", code=2).stderr


# --- what happens when it is cut short --------------------------------------------------------------------


def test_twenty_kills_at_random_moments_lose_no_finished_cell(bench: Bench, fast: SimProcess) -> None:
    arm = bench.arm("a", fast.url)
    bench.write("p.toml", SHORT.replace("cooldown_s = 0", "cooldown_s = 0.05"))
    rng = random.Random(20)
    kills = 0
    argv: list[str] = []
    finished: dict[tuple[str, int], str] = {}
    while kills < 20:
        if not argv:
            argv, finished = ["run", "p.toml", "--arm", arm], {}
        process = bench.start(*argv)
        try:
            process.communicate(timeout=rng.uniform(0.4, 3.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
        if not bench.ledger.exists():
            continue
        found = verify(bench.ledger)
        assert found.ok, found.problems
        waiting = unfinished(bench.ledger)
        assert len(waiting) <= 1
        finished = _kept(bench, finished)
        argv = ["run", "--resume", waiting[0]] if waiting else []
    for session in unfinished(bench.ledger):
        bench.run("run", "--resume", session)
    _kept(bench, finished)

    assert finished
    assert verify(bench.ledger).ok
    assert [] == unfinished(bench.ledger)
    with Ledger.open(bench.ledger) as ledger:
        by_session: dict[str, list[int]] = {}
        for state in ledger.runs():
            assert state.run.complete
            by_session.setdefault(state.run.session, []).append(len(state.run.cells))
    assert all(set(cells) == {4} and len(cells) in (2, 3) for cells in by_session.values()), by_session


def _kept(bench: Bench, before: dict[tuple[str, int], str]) -> dict[tuple[str, int], str]:
    """Finished cells by (run, place), after it was seen that those known before are still there, unchanged."""
    now: dict[tuple[str, int], str] = {}
    for session in unfinished(bench.ledger):
        with Journal.open(bench.ledger, session) as journal:
            for header, cells in journal.runs():
                now.update({(header["id"], place): cell.raw for place, cell in cells.items()})
    with Ledger.open(bench.ledger) as ledger:
        for state in ledger.runs():
            now.update({(state.run.id, place): cell.raw for place, cell in enumerate(state.run.cells)})
    assert before.items() <= now.items()
    return now


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_measured_and_says_how_to_go_on(bench: Bench, fast: SimProcess, sign: int) -> None:
    arm = bench.arm("a", fast.url)
    bench.write("p.toml", SHORT.replace("warm = 2", "warm = 20"))
    process = bench.start("run", "p.toml", "--arm", arm)
    deadline = time.monotonic() + 20
    while not list(bench.ledger.glob("sessions/*/runs/*/cell-1.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(sign)
    _, err = process.communicate(timeout=20)

    assert 130 == process.returncode, err
    [session] = unfinished(bench.ledger)
    last = err.strip().splitlines()[-1]
    assert f"benchkit run --resume {session}" in last
    assert verify(bench.ledger).ok
    assert list(bench.ledger.glob("sessions/*/runs/*/cell-0.json")) or bench.json("runs")["runs"]


def test_a_session_resumes_to_its_end_and_then_has_nothing_left(bench: Bench, fast: SimProcess) -> None:
    arm = bench.arm("a", fast.url)
    bench.write("p.toml", SHORT)
    process = bench.start("run", "p.toml", "--arm", arm)
    while not list(bench.ledger.glob("sessions/*/runs/*/cell-1.json")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    [session] = unfinished(bench.ledger)

    done = bench.json("run", "--resume", session)

    assert {4} == {len(r["cells"]) for r in done["runs"]}
    assert done["runs"] == bench.json("run", "--resume", session)["runs"]


# --- endpoints that will not do ---------------------------------------------------------------------------


def test_an_endpoint_that_is_not_there_ends_with_3_and_leaves_no_trace(bench: Bench) -> None:
    arm = bench.arm("a", "http://127.0.0.1:9")
    bench.write("p.toml", SHORT)

    refused = bench.run("run", "p.toml", "--arm", arm, code=3)

    assert "http://127.0.0.1:9/v1: cannot be reached" in refused.stderr
    assert 1 == len(refused.stderr.strip().splitlines())
    assert {"runs": [], "unfinished_sessions": []} == bench.json("runs")


def test_another_model_than_served_ends_with_3_and_names_those_served(bench: Bench, fast: SimProcess) -> None:
    arm = bench.arm("a", fast.url)
    text = (bench.folder / arm).read_text().replace('"sim-model"', '"another"')
    bench.write("p.toml", SHORT)

    assert "it serves: sim-model" in bench.run("run", "p.toml", "--arm", bench.write("b.toml", text), code=3).stderr


def test_a_stream_without_usage_is_recorded_and_refused_by_bank(bench: Bench) -> None:
    bench.write("p.toml", SHORT)
    with spawned(Profile(usage_mode="none", request_overhead_s=0.01, step_base_s=0.002)) as sim:
        done = bench.json("run", "p.toml", "--arm", bench.arm("a", sim.url))

    cell = done["runs"][-1]["cells"][0]
    assert cell["metrics"]["output_tok_per_s"] is None
    assert "usage_missing" in {f["name"] for f in cell["flags"] if f["blocking"]}
    assert "usage_missing" in bench.run("bank", done["session"], "--why", "x", code=1).stderr


def test_failures_are_records_and_a_cell_without_success_ends_with_5(bench: Bench) -> None:
    bench.write("p.toml", SHORT)
    with spawned(Profile(fault_http_500_every=1)) as sim:
        done = bench.json("run", "p.toml", "--arm", bench.arm("a", sim.url), code=5)

    assert {0} == {c["n_ok"] for r in done["runs"] for c in r["cells"]}
    errors = next(f for f in done["runs"][0]["cells"][0]["flags"] if f["name"] == "errors")
    assert "2 of 2 failed: http_error 2; the first: status 500, " in errors["detail"]
    assert "no_success" in {f["name"] for f in done["runs"][0]["cells"][0]["flags"]}


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (("run",), "expected a PROTOCOL, or --resume SESSION"),
        (("run", "nowhere.toml", "--arm", "x"), "nowhere.toml: No such file or directory"),
        (("run", "nowhere", "--arm", "x"), "protocol nowhere: no such file, and no such name"),
        (("run", "demo"), "--arm: expected at least one arm, found none"),
        (("show", "run-x"), "no ledger at ledger"),
        (("run", "--resume", "ses-x"), "no ledger at ledger"),
        (("compare", "demo", "--arm", "a"), "no ledger at ledger"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(bench: Bench, argv: tuple[str, ...], what: str) -> None:
    refused = bench.run(*argv, code=2)

    assert what in refused.stderr
    assert 1 == len(refused.stderr.strip().splitlines()), refused.stderr


# --- boots that change, and servers that do not tell ------------------------------------------------------


def wait_for(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_kill_before_the_first_cell_leaves_the_next_grid_cold(bench: Bench) -> None:
    """A grid that served nothing has not warmed the boot: the next session's first grid is cold all the same."""
    bench.write("slow.toml", SHORT.replace("cooldown_s = 0", "cooldown_s = 30"))
    with spawned(Profile(request_overhead_s=0.01, step_base_s=0.003)) as sim:
        arm = bench.arm("a", sim.url)
        process = bench.start("run", "slow.toml", "--arm", arm)
        wait_for(lambda: list(bench.ledger.glob("sessions/*/runs/*/header.json")))
        process.kill()
        process.communicate()
        bench.write("quick.toml", SHORT.replace("warm = 2", "warm = 1"))
        bench.run("run", "quick.toml", "--arm", arm)

    assert ["cold", "warm"] == [r["grid"] for r in bench.json("runs")["runs"]]


def test_a_session_taken_up_on_another_boot_keeps_the_old_cells_and_measures_the_grid_anew(bench: Bench) -> None:
    bench.write("p.toml", SHORT.replace("warm = 2", "warm = 1").replace("cooldown_s = 0", "cooldown_s = 0.3"))
    with spawned(Profile(request_overhead_s=0.01, step_base_s=0.003)) as sim:
        arm = bench.arm("a", sim.url)
        process = bench.start("run", "p.toml", "--arm", arm)
        wait_for(lambda: list(bench.ledger.glob("sessions/*/runs/*/cell-1.json")))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        [session] = unfinished(bench.ledger)
        sim.restart()
        time.sleep(0.5)
        done = bench.run("run", "--resume", session)

    assert "not the server that began" in done.stderr
    runs = bench.json("runs")["runs"]
    assert [("cold", False), ("cold", True), ("warm", True)] == [(r["grid"], r["complete"]) for r in runs]
    assert runs[0]["boot_id"] != runs[1]["boot_id"] == runs[2]["boot_id"]
    partial = bench.json("show", runs[0]["id"])["runs"][0]
    assert 2 <= len(partial["cells"]) < 4
    assert "incomplete" in {f["name"] for f in partial["cells"][0]["flags"]}
    assert verify(bench.ledger).ok


def test_a_server_that_does_not_tell_its_boot_is_taken_at_the_plans_word_and_says_so(bench: Bench) -> None:
    bench.write("p.toml", SHORT.replace("warm = 2", "warm = 1"))
    with spawned(Profile(request_overhead_s=0.01, step_base_s=0.003, metrics=False, tokenize=False)) as sim:
        done = bench.json("run", "p.toml", "--arm", bench.arm("a", sim.url))

    assert [("cold", None), ("warm", None)] == [(r["grid"], r["boot_id"]) for r in done["runs"]]
    assert "boot_unknown" in {f["name"] for f in done["runs"][1]["cells"][0]["flags"]}
    assert "protocol" == done["runs"][0]["cold_of"]  # the probes that counted its tokens had used the boot
    bench.run("bank", done["session"], "--why", "test")


def test_an_arm_of_two_endpoints_is_served_by_both_and_has_both_boots(bench: Bench) -> None:
    bench.write("p.toml", SHORT.replace("warm = 2", "warm = 1"))
    profile = Profile(request_overhead_s=0.01, step_base_s=0.003)
    with spawned(profile) as one, spawned(profile) as two:
        text = (bench.folder / bench.arm("pair", one.url)).read_text()
        bench.write("pair.toml", text.replace(f'["{one.url}/v1"]', f'["{one.url}/v1", "{two.url}/v1"]'))
        done = bench.json("run", "p.toml", "--arm", "pair.toml")

    ports = [url.rsplit(":", 1)[1] for url in (one.url, two.url)]
    assert all(all(port in r["boot_id"] for port in ports) for r in done["runs"])
    with Ledger.open(bench.ledger) as ledger:
        for state in ledger.runs():
            for cell in state.run.cells:
                records = ledger.records(cell)
                assert {f"{u}/v1" for u in (one.url, two.url)} >= {r.endpoint for r in records}
                moved = cell.facts["server_after"]["requests_done"] - cell.facts["server_before"]["requests_done"]
                assert len(records) == moved  # the sum over both
    assert not [f for r in done["runs"] for c in r["cells"] for f in c["flags"] if f["name"] == "foreign_load"]


def test_a_server_that_dies_in_mid_run_ends_the_session_with_3_and_it_goes_on_once_the_server_is_back(
    bench: Bench,
) -> None:
    bench.write("p.toml", SHORT.replace("warm = 2", "warm = 1").replace("cooldown_s = 0", "cooldown_s = 0.2"))
    profile = Profile(request_overhead_s=0.01, step_base_s=0.003)
    with spawned(profile) as sim:
        port = int(sim.url.rsplit(":", 1)[1])
        process = bench.start("run", "p.toml", "--arm", bench.arm("a", sim.url), "--json")
        wait_for(lambda: list(bench.ledger.glob("sessions/*/runs/*/cell-1.json")))
        sim.child.kill()
        out, err = process.communicate(timeout=120)

    assert (3, "") == (process.returncode, out)
    [session] = unfinished(bench.ledger)
    assert f"Go on with: benchkit run --resume {session}" in err
    assert verify(bench.ledger).ok
    with spawned(profile, port=port):
        bench.run("run", "--resume", session)
    runs = bench.json("runs")["runs"]
    assert [("cold", False), ("cold", True), ("warm", True)] == [(r["grid"], r["complete"]) for r in runs]
    kept = bench.json("show", runs[0]["id"])["runs"][0]["cells"]
    assert kept[0]["n_ok"] == kept[0]["n"]


def test_token_ids_on_the_chat_api_are_refused_before_anything_is_begun(bench: Bench, fast: SimProcess) -> None:
    bench.write("p.toml", SHORT.replace("osl = [8]", 'osl = [8]\nsend = "ids"'))

    refused = bench.run("run", "p.toml", "--arm", bench.arm("a", fast.url), code=2)

    assert "chat API takes no token ids" in refused.stderr
    assert {"runs": [], "unfinished_sessions": []} == bench.json("runs")


def test_a_typo_leaves_no_ledger_behind(bench: Bench) -> None:
    bench.write("p.toml", SHORT.replace("[workload]", '[compare]\nprimary = "tok_per_fortnight"\n[workload]'))

    refused = bench.run("run", "p.toml", "--arm", bench.arm("a", "http://127.0.0.1:9"), code=2)

    assert "compare.primary: expected a metric" in refused.stderr
    assert not bench.ledger.exists()


def test_a_cell_measured_again_sends_other_prompts_and_says_so(bench: Bench) -> None:
    """The first prompts of an interrupted cell are in the prefix cache: sent again they would be served from it."""
    protocol = SHORT.replace("isl = [64]", "isl = [512]").replace("warm = 2", "warm = 1")
    bench.write("p.toml", protocol.replace("requests = [2, 2, 3, 4]", "requests = [2, 30, 3, 4]"))
    with spawned(Profile(request_overhead_s=0.05, step_base_s=0.005)) as sim:
        process = bench.start("run", "p.toml", "--arm", bench.arm("a", sim.url))
        wait_for(lambda: list(bench.ledger.glob("sessions/*/runs/*/cell-0.json")))
        time.sleep(0.8)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        [session] = unfinished(bench.ledger)
        done = bench.json("run", "--resume", session)

    cell = done["runs"][0]["cells"][1]
    names = {f["name"] for f in cell["flags"]}
    assert "resumed" in names
    assert "prefix_contaminated" not in names
    assert cell["metrics"]["prefix_hit_rate"] < 0.02


def test_a_key_that_the_server_repeats_is_written_nowhere(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import http.server
    import threading

    key = "sk-planted-0123456789"
    monkeypatch.setenv("PLANTED_KEY", key)

    class Echo(http.server.BaseHTTPRequestHandler):
        def answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            found = self.path.endswith("/models")
            self.answer(200 if found else 404, '{"data":[{"id":"sim-model","owned_by":"vllm"}]}' if found else "{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                count = (
                    len(body["messages"][0]["content"].split()) if "messages" in body else len(body["prompt"].split())
                )
                self.answer(200, json.dumps({"count": count + 7, "tokens": [1] * count}))
            else:
                self.answer(401, json.dumps({"error": {"message": f"bad key {self.headers['Authorization']}"}}))

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    arm = bench.arm("a", f"http://127.0.0.1:{server.server_port}")
    text = (bench.folder / arm).read_text().replace("[facts]", 'api_key_env = "PLANTED_KEY"\n[facts]')
    bench.write("a.toml", text)
    bench.write("p.toml", SHORT)
    done = bench.run("run", "p.toml", "--arm", "a.toml", code=5)
    shown = bench.run("show", "latest").stdout + bench.run("log").stdout
    server.shutdown()
    server.server_close()

    assert "bad key Bearer [secret]" in done.stderr
    with Ledger.open(bench.ledger) as ledger:
        details = {r.error_detail for s in ledger.runs() for c in s.run.cells for r in ledger.records(c)}
    assert any("[secret]" in d for d in details)
    assert key not in done.stdout + done.stderr + shown + "".join(details)
    assert not [p for p in bench.ledger.rglob("*") if p.is_file() and key.encode() in p.read_bytes()]


def test_sigterm_stops_a_run_that_a_script_made_deaf_to_ctrl_c(bench: Bench, fast: SimProcess) -> None:
    bench.write("p.toml", SHORT.replace("warm = 2", "warm = 20"))
    bench.arm("a", fast.url)
    script = f"trap '' INT; exec {sys.executable} -m benchkit run p.toml --arm a.toml"
    process = subprocess.Popen(["bash", "-c", script], cwd=bench.folder, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(bench.ledger.glob("sessions/*/runs/*/cell-1.json")))
    process.terminate()
    _, err = process.communicate(timeout=20)

    assert 130 == process.returncode, err
    assert "benchkit run --resume" in err


def test_a_simulated_arm_is_marked_in_every_comparison(measured: Bench) -> None:
    found = measured.run("compare", "closed-form", "--arm", "plain", "--arm", "triple").stdout

    assert "simulated: says nothing about any engine or hardware" in found
