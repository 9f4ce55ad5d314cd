"""Tables compared whole, one for each doubt that a table can carry."""

import json
from pathlib import Path

import pytest

from benchkit.compare import compare_arms
from benchkit.errors import BadInput, Finding
from benchkit.measured import MeasuredRun
from benchkit.render.markdown import table_markdown, width
from benchkit.render.spec import TableSpec, build_table, read_table_spec
from benchkit.render.table import comparison_table
from benchkit.reps import select_reps
from handmade import (
    A_P1,
    A_T1,
    B_P1,
    B_T1,
    B_T3,
    arm_text,
    cell,
    compare_section,
    flag,
    grid_reps,
    rep,
    reps,
)

CASES = Path(__file__).parents[1] / "data" / "cases"
PAIRED = compare_section(design='"paired"')
SPREAD = (0.99, 1.0, 1.01)
HASH = rep("base", {}).run.protocol_hash[:12]
SPEC = 'schema = 1\nprotocol = "decode"\narms = ["base", "new"]\n'


def made(runs: list[MeasuredRun], more: str = "", arms: str = '["base", "new"]') -> str:
    """The markdown of a table definition over these runs."""
    spec = read_table_spec(f'schema = 1\nprotocol = "decode"\narms = {arms}\n{more}')
    return table_markdown(build_table(spec, runs))


def golden(name: str) -> str:
    """The text of a table under `golden/`, in which `HASH` stands for the protocol's."""
    return (Path(__file__).parent / "golden" / f"{name}.md").read_text(encoding="utf-8").replace("HASH", HASH)


# Goldens


def test_an_arm_that_leads_stands_in_bold():
    runs = reps("base", A_T1) + reps("new", B_T1)

    assert golden("leads") == made(runs)


def test_parity_within_the_declared_margin_is_said_in_words_and_nothing_is_bold():
    runs = reps("base", A_T1, protocol_text=compare_section(margin_pct="2.0")) + reps(
        "new", B_T3, protocol_text=compare_section(margin_pct="2.0")
    )

    assert golden("parity") == made(runs)


def test_an_unresolved_cell_says_what_could_have_been_seen():
    runs = reps("base", A_T1) + reps("new", B_T3)

    assert golden("unresolved") == made(runs)


def test_paired_reps_give_a_narrower_interval_than_their_spread_suggests():
    runs = reps("base", A_P1, protocol_text=PAIRED) + reps("new", B_P1, protocol_text=PAIRED)

    assert golden("paired") == made(runs)


def test_a_single_rep_has_no_s_and_no_interval():
    runs = reps("base", A_T1) + reps("new", B_T3[:1])

    assert golden("one-rep") == made(runs)


def test_a_missing_cell_is_a_dash_with_a_footnote():
    runs = grid_reps("base", {cell(1): {"output_tok_per_s": A_T1}, cell(8): {"output_tok_per_s": A_T1}}) + grid_reps(
        "new", {cell(1): {"output_tok_per_s": B_T1}}
    )

    assert golden("missing-cell") == made(runs)


def test_a_waived_flag_prints_its_reason():
    runs = reps("base", A_T1) + reps(
        "new",
        B_T1,
        flags={
            cell(): (
                flag("errors", "1 of 24 failed: timeout 1", blocking=True, waived="one host rebooted"),
                flag("few_requests"),
            )
        },
    )

    assert golden("waived-flag") == made(runs)


def test_a_table_of_cold_grids_says_that_it_is_not_to_be_cited():
    runs = [
        *reps("base", A_T1[:1], grid="cold", cold_of="boot", status="recorded"),
        *reps("new", B_T1[:1], grid="cold", cold_of="boot", status="recorded"),
    ]

    assert golden("cold") == made(runs, 'grid = "cold"')


def test_a_pipe_in_a_title_and_a_line_break_in_a_heading_leave_the_table_whole():
    runs = reps(
        "base", A_T1, arm_text=arm_text("base", title="exl3|4.0bpw", facts={"quantization": "exl3|4.0bpw"})
    ) + reps("new", B_T1, arm_text=arm_text("new", title="llama.cpp", facts={"quantization": "Q4_K"}))

    assert golden("pipe") == made(runs, 'title = "first\\nsecond"\nfactor = ["quantization"]')


def test_where_lower_is_better_a_fall_leads():
    runs = grid_reps(
        "base", {cell(): {"ttft_s": [0.1 * x for x in SPREAD], "output_tok_per_s": [100 * x for x in SPREAD]}}
    ) + grid_reps("new", {cell(): {"ttft_s": [0.08 * x for x in SPREAD], "output_tok_per_s": [80 * x for x in SPREAD]}})

    assert golden("lower-is-better") == made(runs, 'metrics = ["ttft_s", "output_tok_per_s"]')


def test_a_missing_sample_is_told_and_counts_as_no_zero():
    runs = [
        run
        for arm, values in json.loads((CASES / "B44.json").read_text()).items()
        for run in reps(arm, list(values.values()), metric="acceptance_rate", protocol_text=PAIRED)
    ]

    assert golden("missing-sample") == made(runs, 'metrics = ["acceptance_rate"]')


def test_one_arm_alone_has_no_difference_and_isl_gets_a_column_where_it_varies():
    runs = grid_reps("base", {cell(1, isl): {"output_tok_per_s": A_T1} for isl in (1024, 8192)})

    assert golden("one-arm") == made(runs, arms='["base"]')


def test_three_arms_get_a_column_each_and_a_delta_against_the_baseline():
    runs = (
        grid_reps("base", {cell(1): {"output_tok_per_s": A_T1}, cell(8): {"output_tok_per_s": A_T1}})
        + grid_reps("new", {cell(1): {"output_tok_per_s": B_T1}, cell(8): {"output_tok_per_s": B_T3}})
        + grid_reps(
            "slow", {cell(1): {"output_tok_per_s": B_T3[:2]}, cell(8): {"output_tok_per_s": [x / 2 for x in A_T1[:2]]}}
        )
    )

    assert golden("three-columns") == made(runs, arms='["base", "new", "slow"]')


def test_three_arms_as_rows_stay_within_a_terminal():
    runs = (
        grid_reps("base", {cell(1): {"output_tok_per_s": A_T1}, cell(8): {"output_tok_per_s": A_T1}})
        + grid_reps("new", {cell(1): {"output_tok_per_s": B_T1}, cell(8): {"output_tok_per_s": B_T3}})
        + grid_reps(
            "slow", {cell(1): {"output_tok_per_s": B_T3[:2]}, cell(8): {"output_tok_per_s": [x / 2 for x in A_T1[:2]]}}
        )
    )

    assert golden("three-rows") == made(runs, 'layout = "rows"\nbaseline="new"', arms='["base", "new", "slow"]')


def test_boots_are_what_was_repeated_where_there_are_several():
    runs = reps("base", A_T1) + reps("new", (1490.0, 1510.0, 1500.0, 1524.0), boots=["x", "x", "y", "y"])

    assert golden("boots") == made(runs)


def test_n_stands_in_the_cell_where_an_arm_has_several():
    runs = grid_reps("base", {cell(1): {"output_tok_per_s": A_T1}, cell(8): {"output_tok_per_s": A_T1}}) + grid_reps(
        "new", {cell(1): {"output_tok_per_s": B_T1}, cell(8): {"output_tok_per_s": (*B_T1[:2], None)}}
    )

    assert golden("n-per-cell") == made(runs)


def test_of_two_that_lead_the_better_is_bold():
    sides = {"base": 0.1, "new": 0.08, "third": 0.05}
    runs = [run for arm, ttft in sides.items() for run in reps(arm, [ttft * x for x in SPREAD], metric="ttft_s")]

    text = made(runs, 'metrics = ["ttft_s"]', arms='["base", "new", "third"]')

    assert "| **50.00 ± 0.50** |" in text
    assert 2 == text.count(" leads")
    assert 1 == text.count("**", text.index("|   1")) // 2


# What a definition asks for


def test_cells_are_filtered_before_anything_is_compared():
    rates = {cell(c, isl): {"output_tok_per_s": A_T1} for c in (1, 8) for isl in (1024, 8192)}
    runs = grid_reps("base", rates) + grid_reps("new", rates)

    table = build_table(read_table_spec(SPEC + "concurrency = [8]\nisl = [1024]\nosl = [1024, 7]\n"), runs)

    assert ["8"] == [text.text for text in table.blocks[0].columns[0].cells]
    assert "over" not in table.provenance[0]
    assert 3 == len(table.provenance[1].rpartition("raws ")[2].split(", "))


def test_the_same_runs_in_any_order_give_the_same_bytes():
    runs = (
        grid_reps("base", {cell(): {"output_tok_per_s": A_T1}}) + reps("new", B_T1) + reps("new", B_T3, session="s-2")
    )

    assert made(runs) == made(list(reversed(runs)))


def test_a_session_or_all_sessions_can_be_asked_for():
    runs = [run for s in ("s-1", "s-2") for arm in ("base", "new") for run in reps(arm, A_T1, session=s)]

    assert "of s-1; raws" in made(runs, 'session = "s-1"')
    assert "6 banked warm runs" in made(runs, "all = true")
    assert "reps pooled from 2 sessions" in made(runs, "all = true")


def test_unmatched_arms_stand_under_a_heading_that_says_so():
    runs = reps("base", A_T1) + reps("new", B_T1, measurement=2)
    selected = select_reps(runs, runs[0].run.protocol_hash, "base", "new")

    text = table_markdown(comparison_table(compare_arms(*selected, unmatched=True)))

    assert text.startswith("**NOT MATCHED: decode: new against base**\n")
    assert "\n- not matched: measurement number of the client: base 1; new 2\n" in text


def test_a_note_on_one_of_several_pairs_names_its_arm():
    facts = {"base": "W4A16", "new": "NVFP4", "third": "W4A16"}
    runs = [run for arm, q in facts.items() for run in reps(arm, A_T1, arm_text=arm_text(arm, facts={"quant": q}))]

    text = made(runs, 'factor = ["quant"]', arms='["base", "new", "third"]')

    assert "\n- new: under test: quant W4A16 → NVFP4\n" in text
    assert "\n- third: under test, but equal on both sides: quant\n" in text


def test_arms_of_one_title_are_told_apart_by_name():
    runs = [run for arm in ("base", "new") for run in reps(arm, A_T1, arm_text=arm_text(arm, title="same"))]

    assert "new against base" in made(runs)


def test_the_goldens_of_two_arms_fit_a_terminal_of_100_columns():
    for path in sorted((Path(__file__).parent / "golden").glob("*.md")):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        # Lines of one block are of one width. More than two arms as columns are wider: hence rows.
        assert 1 == len({width(line) for line in lines}) or path.stem == "lower-is-better"
        assert path.stem == "three-columns" or max(map(width, lines)) <= 100


def test_a_definition_without_what_it_needs_is_refused_by_key():
    with pytest.raises(BadInput) as error:
        read_table_spec('schema = 1\nprotocl = "decode"\narms = []\nlayout = "diagonal"', "t.toml")

    assert [
        "t.toml: protocol: expected a value, found none; the key is required",
        "t.toml: arms: expected at least 1 value, found []",
        't.toml: layout: expected "columns" or "rows", found "diagonal"',
        "t.toml: protocl: unknown key; did you mean protocol?",
    ] == str(error.value).splitlines()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('baseline = "bsae"', 't.toml: baseline: expected one of arms, found "bsae"'),
        ('session = "s-1"\nall = true', "t.toml: all: expected session or all, found both"),
    ],
)
def test_a_definition_whose_keys_do_not_agree_is_refused(more, message):
    with pytest.raises(BadInput, match=message):
        read_table_spec(SPEC + more, "t.toml")


def test_a_definition_with_an_arm_twice_is_refused():
    with pytest.raises(BadInput, match=r"arms: expected different arms, found \['a', 'a'\]"):
        read_table_spec(SPEC.replace('["base", "new"]', '["a", "a"]'))


def test_a_filter_that_leaves_no_cell_is_a_finding():
    spec: TableSpec = read_table_spec(SPEC + "concurrency = [3]\n")

    with pytest.raises(Finding, match="no cell is left"):
        build_table(spec, reps("base", A_T1) + reps("new", B_T1))
