"""Which runs stand for an arm, and what keeps two arms from being compared."""

from dataclasses import replace

import pytest

from benchkit.errors import BadInput, Finding
from benchkit.protocol import parse_protocol
from benchkit.reps import FactDifference, Reps, match_arms, protocol_hash_named, select_reps
from handmade import A_T1, B_T1, arm_text, cell, compare_section, rep, reps

HASH = rep("base", {}).run.protocol_hash


def ids(selected: Reps) -> list[str]:
    return [one.run.id for one in selected.runs]


# Which runs


def test_the_newest_session_with_both_arms_is_taken_even_where_a_newer_one_has_one_arm():
    runs = [
        *reps("base", A_T1[:2], session="s-1"),
        *reps("new", B_T1[:2], session="s-1"),
        *reps("base", A_T1[:1], session="s-2"),
        *reps("new", B_T1[:1], session="s-2"),
        *reps("base", A_T1, session="s-3"),
    ]

    base, new = select_reps(reversed(runs), HASH, "base", "new")

    assert ["r-s-2-base0"] == ids(base)
    assert ["r-s-2-new0"] == ids(new)


def test_without_a_common_session_each_arm_gives_its_newest():
    runs = [
        *reps("base", A_T1[:1], session="s-1"),
        *reps("base", A_T1[:1], session="s-3"),
        *reps("new", B_T1[:1], session="s-2"),
    ]

    base, new = select_reps(runs, HASH, "base", "new")

    assert (["r-s-3-base0"], ["r-s-2-new0"]) == (ids(base), ids(new))


def test_a_session_that_was_resumed_is_as_new_as_its_last_run():
    runs = [
        rep("base", {}, session="s-1"),
        rep("base", {}, session="s-2"),
        rep("base", {}, session="s-1", number=1, started_at="2026-09-03T10:00:00Z"),
    ]

    assert ["r-s-1-base0", "r-s-1-base1"] == ids(select_reps(runs, HASH, "base")[0])


def test_a_session_since_and_all_change_which_reps_are_taken():
    runs = [run for s in ("s-1", "s-2", "s-3") for arm in ("base", "new") for run in reps(arm, [1.0], session=s)]

    assert ["r-s-1-base0"] == ids(select_reps(runs, HASH, "base", "new", session="s-1")[0])
    assert ["r-s-2-base0", "r-s-3-base0"] == ids(select_reps(runs, HASH, "base", "new", since="2026-09-02")[0])
    last = select_reps(runs, HASH, "base", since="2026-09-03T10:00:00Z")[0]
    assert ["r-s-3-base0"] == ids(last)  # started at that very second
    assert ["r-s-1-base0", "r-s-2-base0", "r-s-3-base0"] == ids(select_reps(runs, HASH, "base", "new", all=True)[0])


def test_only_banked_warm_runs_of_the_protocol_count_and_the_others_of_the_session_are_told():
    runs = [
        *reps("base", A_T1[:2]),
        rep("base", {}, number=2, status="quarantined"),
        rep("base", {}, number=3, grid="cold", cold_of="boot", status="recorded"),
        rep("base", {}, number=4, protocol_hash="f" * 64),
        rep("base", {}, number=5, session="s-0", status="recorded"),
    ]

    (base,) = select_reps(runs, HASH, "base")

    assert ["r-s-1-base0", "r-s-1-base1"] == ids(base)
    assert "runs of the same sessions that are not used: r-s-1-base2 (quarantined)" in [n.text for n in base.notes]


def test_cold_grids_are_taken_on_request_though_never_banked():
    runs = [*reps("base", A_T1), rep("base", {}, id="r-cold", grid="cold", cold_of="boot", status="recorded")]

    (base,) = select_reps(runs, HASH, "base", grid="cold")

    assert ["r-cold"] == ids(base)


def test_no_banked_reps_says_what_to_bank():
    runs = [*reps("base", A_T1), *reps("new", B_T1[:2], status="recorded")]

    with pytest.raises(Finding) as error:
        select_reps(runs, HASH, "base", "new")

    assert (
        f"new: no banked warm run of decode ({HASH[:12]}); recorded, not banked: "
        'try: benchkit bank r-s-1-new0 r-s-1-new1 --why "…"'
    ) == str(error.value)


def test_an_arm_that_never_ran_is_told_from_one_that_was_retracted():
    runs = reps("base", A_T1[:1], status="retracted")

    with pytest.raises(Finding, match=r"found r-s-1-base0 \(retracted\)$"):
        select_reps(runs, HASH, "base")
    with pytest.raises(Finding, match=r"its arms are base; try: benchkit run decode --arm bsae$"):
        select_reps(runs, HASH, "bsae")


def test_several_arm_hashes_under_one_name_are_listed_and_never_pooled():
    runs = [*reps("base", A_T1[:1], arm_hash="a" * 64), rep("base", {}, number=1, arm_hash="b" * 64)]

    with pytest.raises(Finding, match=r"2 arm hashes .*: aaaaaaaaaaaa \(r-s-1-base0\); bbbbbbbbbbbb \(r-s-1-base1\);"):
        select_reps(runs, HASH, "base")


def test_arm_hashes_of_sessions_that_are_not_selected_do_not_matter():
    runs = [*reps("base", A_T1[:1], arm_hash="a" * 64), *reps("base", A_T1[:1], session="s-2", arm_hash="b" * 64)]

    assert ["r-s-2-base0"] == ids(select_reps(runs, HASH, "base")[0])
    with pytest.raises(Finding, match="2 arm hashes"):
        select_reps(runs, HASH, "base", all=True)


def test_an_arm_is_not_compared_with_itself_and_a_moment_must_be_one():
    with pytest.raises(BadInput, match="expected different arms, found base, base"):
        select_reps([], HASH, "base", "base")
    with pytest.raises(BadInput, match='since: expected a UTC time like "2026-09-08T10:00:00Z", found "yesterday"'):
        select_reps([], HASH, "base", since="yesterday")


def test_a_protocol_is_found_by_name_by_hash_and_by_the_start_of_its_hash():
    runs = reps("base", A_T1)

    assert [HASH] * 3 == [protocol_hash_named(runs, name) for name in ("decode", HASH, HASH[:8])]
    with pytest.raises(BadInput, match="decoed: no run of this protocol"):
        protocol_hash_named(runs, "decoed")


def test_a_protocol_name_that_stands_for_two_questions_is_a_finding():
    runs = [*reps("base", A_T1), rep("base", {}, number=5, protocol_hash="f" * 64)]

    with pytest.raises(Finding, match=r"decode: 2 protocol hashes .* ffffffffffff \(last run 2026-09-01T10:05:00Z\)"):
        protocol_hash_named(runs, "decode")


# Doubts about an arm


def test_reps_of_one_known_boot_say_so_and_reps_of_two_do_not():
    assert ["one_boot"] == [n.kind for n in select_reps(reps("base", A_T1), HASH, "base")[0].notes]
    assert [] == list(select_reps(reps("base", A_T1, boots=["x", "y", "y"]), HASH, "base")[0].notes)
    assert [] == list(select_reps(reps("base", A_T1[:1]), HASH, "base")[0].notes)


def test_an_unknown_boot_a_label_and_pooled_sessions_are_notes():
    runs = [rep("base", {}, labels=("in-flight",)), rep("base", {}, session="s-2", labels=("final",))]

    (base,) = select_reps(runs, HASH, "base", all=True)

    assert [
        "the server does not tell its boot: warm on the plan's word",
        "reps pooled from 2 sessions",
        "labelled in-flight",
    ] == [note.text for note in base.notes]


# Matched or not


def pair(**of_b: object) -> tuple[Reps, Reps]:
    a, b = rep("base", {cell(): {}}), rep("new", {cell(): {}})
    b = replace(b, run=replace(b.run, **of_b))
    return Reps(arm="base", runs=(a,), left_out=()), Reps(arm="new", runs=(b,), left_out=())


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("protocol_hash", "f" * 64, f"protocol hash: base {HASH[:12]}; new ffffffffffff"),
        ("prompts_digest", "e" * 64, "prompts digest: base "),
        ("measurement", 2, "measurement number of the client: base 1; new 2"),
    ],
)
def test_another_question_other_prompts_or_another_way_of_measuring_do_not_match(field, value, line):
    a, b = pair(**{field: value})

    with pytest.raises(Finding) as error:
        match_arms(a, b, (), given=False, unmatched=False)
    assert "base and new are not matched: " in str(error.value)
    assert line in str(error.value)

    found = match_arms(a, b, (), given=False, unmatched=True)
    assert found.differs[0].startswith(line)
    assert f"not matched: {found.differs[0]}" in [note.text for note in found.notes]


def test_facts_under_test_stand_apart_from_others_that_differ_and_from_what_servers_tell():
    facts_a = {"checkpoint": "x", "quantization": "W4A16", "kv_cache_dtype": "bf16"}
    facts_b = {"checkpoint": "y", "quantization": "NVFP4", "kv_cache_dtype": "fp8"}
    a, b = pair(arm_text=arm_text("new", facts=facts_b), server={"version": "1", "kv": {"tokens": 7}})
    a = replace(a, runs=(replace(a.runs[0], run=replace(a.runs[0].run, arm_text=arm_text("base", facts=facts_a))),))

    found = match_arms(a, b, ("checkpoint", "quantization"), given=True, unmatched=False)

    assert (
        FactDifference(name="checkpoint", a="x", b="y"),
        FactDifference(name="quantization", a="W4A16", b="NVFP4"),
    ) == found.under_test
    assert [
        "not under test, but different: kv_cache_dtype bf16 → fp8",
        "the servers tell different: kv.tokens not told → 7",
    ] == [note.text for note in found.notes]


def test_the_engine_is_a_fact_and_a_client_on_another_host_is_told():
    a, b = pair(arm_text=arm_text("new", engine="sglang"), host={"cpu": "y"}, client_version="0.2.0", session="s-2")

    found = match_arms(a, b, (), given=False, unmatched=False)

    assert [
        "the arms differ in: engine vllm → sglang",
        "measured from different clients: benchkit 0.1.0 → 0.2.0; cpu x → y",
        "not one session: base s-1; new s-2",
    ] == [note.text for note in found.notes]


def test_a_factor_that_no_arm_declares_is_a_mistake_when_given_and_a_note_when_stored():
    a, b = pair()

    with pytest.raises(BadInput, match="factor quantisation: neither base nor new declares it; declared: api, engine"):
        match_arms(a, b, ("quantisation",), given=True, unmatched=False)

    stored = match_arms(a, b, ("quantisation", "engine"), given=False, unmatched=False)
    assert [
        "named by the protocol as under test, declared by neither arm: quantisation",
        "under test, but equal on both sides: engine",
    ] == [note.text for note in stored.notes]


def test_a_long_fact_is_named_without_its_text():
    assert "launch.command" == str(FactDifference(name="launch.command", a="vllm serve " + 60 * "x", b=None))


def test_a_changed_compare_section_is_the_same_question():
    assert HASH == parse_protocol(compare_section(margin_pct="2.0")).hash
