"""Protocol files: faults are named, and the hash says exactly whether two runs asked the same question."""

from __future__ import annotations

import hashlib
import json

import pytest

from benchkit.errors import BadInput
from benchkit.protocol import Cell, canonical_form, parse_protocol

FULL = """
schema = 1
name = "decode-8192x1024"
title = "Decode throughput, 8192/1024"

[load]
shape = "closed"
concurrency = [1, 8, 32]
requests = [8, 32, 64]

[workload]
kind = "random"
send = "text"
isl = [8192]
osl = [1024]
kv = [0]
range_ratio = 0.2
prefix = "unique"
ignore_eos = true
seed = 1

[request]
system = ""
assistant_prefix = ""
extra_body = { chat_template_kwargs = { enable_thinking = true } }

[sampling]
temperature = 1.0
top_p = 0.95

[record]
text = false
events = true

[grids]
cold = 1
warm = 3
boots = 1
idle_gate = true
cooldown_s = 2

[limits]
connect_s = 10
first_token_s = 0
idle_s = 300
request_timeout_s = 0
error_rate = 0.0
client_lag_ms = 5

[slo]
ttft_s = 2.0
tpot_s = 0.05

[compare]
primary = "output_tok_per_s"
margin_pct = 1.0
design = "unpaired"
factor = ["checkpoint", "quantization"]
"""


def changed(old: str, new: str) -> str:
    assert FULL.count(old) == 1, old
    return FULL.replace(old, new)


SAME_QUESTION = {
    "whitespace": FULL.replace(" = ", "   =   ").replace("\n", "\n\n"),
    "comments": FULL.replace("[load]", "# a comment\n[load] # another"),
    "key order": changed("isl = [8192]\nosl = [1024]\n", "osl = [1024]\nisl = [8192]\n"),
    "table order": FULL.replace("[sampling]\ntemperature = 1.0\ntop_p = 0.95\n", "")
    + "\n[sampling]\ntop_p = 0.95\ntemperature = 1.0\n",
    "name": changed('"decode-8192x1024"', '"another-name"'),
    "title": changed("Decode throughput, 8192/1024", "Other words"),
    "notes": changed("schema = 1\n", 'schema = 1\nnotes = "for the record"\n'),
    "compare": changed("margin_pct = 1.0", "margin_pct = 3.0"),
    "no compare": FULL[: FULL.index("[compare]")],
    "cold grids": changed("cold = 1", "cold = 0"),
    "warm grids": changed("warm = 3", "warm = 10"),
    "kept text": changed("text = false", "text = true"),
    "kept events": changed("events = true", "events = false"),
    "a default written out or left out": changed('shape = "closed"\n', ""),
    "an integer where a number is meant": changed("temperature = 1.0", "temperature = 1"),
}

OTHER_QUESTION = {
    "concurrency": changed("concurrency = [1, 8, 32]", "concurrency = [1, 8, 64]"),
    "requests": changed("requests = [8, 32, 64]", "requests = [8, 32, 96]"),
    "isl": changed("isl = [8192]", "isl = [8191]"),
    "osl": changed("osl = [1024]", "osl = [1024, 2048]"),
    "range_ratio": changed("range_ratio = 0.2", "range_ratio = 0.1"),
    "prefix": changed('"unique"', '"as_is"'),
    "ignore_eos": changed("ignore_eos = true", "ignore_eos = false"),
    "seed": changed("seed = 1", "seed = 2"),
    "extra_body": changed("enable_thinking = true", "enable_thinking = false"),
    "system": changed('system = ""', 'system = "Be brief."'),
    "assistant_prefix": changed('assistant_prefix = ""', 'assistant_prefix = "<think></think>"'),
    "temperature": changed("temperature = 1.0", "temperature = 0.0"),
    "top_p": changed("top_p = 0.95", "top_p = 0.9"),
    "idle_gate": changed("idle_gate = true", "idle_gate = false"),
    "cooldown": changed("cooldown_s = 2", "cooldown_s = 3"),
    "first token limit": changed("first_token_s = 0", "first_token_s = 60"),
    "error rate": changed("error_rate = 0.0", "error_rate = 0.1"),
    "slo": changed("ttft_s = 2.0", "ttft_s = 1.0"),
}


@pytest.mark.parametrize("what", SAME_QUESTION)
def test_the_hash_is_the_same_for_the_same_question(what: str) -> None:
    assert parse_protocol(FULL).hash == parse_protocol(SAME_QUESTION[what]).hash


@pytest.mark.parametrize("what", OTHER_QUESTION)
def test_the_hash_differs_where_something_else_is_measured(what: str) -> None:
    assert parse_protocol(FULL).hash != parse_protocol(OTHER_QUESTION[what]).hash


def test_every_other_question_has_a_hash_of_its_own() -> None:
    assert len(OTHER_QUESTION) == len({parse_protocol(text).hash for text in OTHER_QUESTION.values()})


def test_the_hash_is_pinned_and_can_be_checked_by_hand() -> None:
    canonical = (
        '{"grids":{"cooldown_s":2.0,"idle_gate":true},'
        '"limits":{"client_lag_ms":5.0,"connect_s":10.0,"error_rate":0.0,"first_token_s":0.0,"idle_s":300.0,'
        '"max_tok_per_s":0.0,"request_timeout_s":0.0},'
        '"load":{"concurrency":[1,8,32],"requests":[8,32,64],"requests_per_stream":4,"shape":"closed"},'
        '"request":{"assistant_prefix":"","extra_body":{"chat_template_kwargs":{"enable_thinking":true}},"system":""},'
        '"sampling":{"temperature":1.0,"top_p":0.95},"schema":1,'
        '"slo":{"e2e_s":null,"tpot_s":0.05,"ttft_s":2.0},'
        '"workload":{"ignore_eos":true,"isl":[8192],"kind":"random","kv":[0],"osl":[1024],"prefix":"unique",'
        '"range_ratio":0.2,"seed":1,"send":"text"}}'
    )

    assert json.loads(canonical) == parse_protocol(FULL).canonical
    assert hashlib.sha256(canonical.encode()).hexdigest() == parse_protocol(FULL).hash


def test_a_key_added_later_leaves_old_hashes_alone() -> None:
    old = {"load": {"shape": "closed"}, "schema": 1}
    with_new_key = {"load": {"shape": "closed", "ramp_s": 0.0}, "schema": 1, "trace": {"file": ""}}
    added = {"load.ramp_s": 0.0, "trace.file": ""}

    assert {**old, "trace": {}} == canonical_form(with_new_key, added)
    with_new_key["load"]["ramp_s"] = 2.0  # type: ignore[index]
    assert canonical_form(with_new_key, added)["load"] == {"shape": "closed", "ramp_s": 2.0}


def test_cells_run_through_concurrency_fastest() -> None:
    protocol = parse_protocol(changed("osl = [1024]", "osl = [1024, 64]"))

    assert [(c.osl, c.concurrency) for c in protocol.cells] == [
        (1024, 1),
        (1024, 8),
        (1024, 32),
        (64, 1),
        (64, 8),
        (64, 32),
    ]
    assert "8192/1024 c1" == str(protocol.cells[0])
    assert str(Cell(isl=8192, osl=64, kv=131072, concurrency=8)) == "8192/64 kv 131072 c8"


def test_requests_come_by_level_or_by_stream() -> None:
    assert [parse_protocol(FULL).load.requests_at(c) for c in (1, 8, 32)] == [8, 32, 64]
    per_stream = parse_protocol(changed("requests = [8, 32, 64]", "requests_per_stream = 3"))
    assert [per_stream.load.requests_at(c) for c in (1, 8, 32)] == [3, 24, 96]


FAULTS = {
    "concurrency = [1, 8, 32]": {
        'concurrency = [1, "8", 32]': 'p.toml: load.concurrency[1]: expected an integer, found "8"',
        "concurrency = [1, 8, 0]": "p.toml: load.concurrency[2]: expected more than 0, found 0",
        "concurrency = []": "p.toml: load.concurrency: expected at least 1 value, found []",
        "concurrency = 8": "p.toml: load.concurrency: expected a list, found 8",
        "concurrency = [1, 1.5, 32]": "p.toml: load.concurrency[1]: expected an integer, found 1.5",
        "concurrency = [1, true, 32]": "p.toml: load.concurrency[1]: expected an integer, found true",
        "concurrency = [8, 8, 32]": "p.toml: load.concurrency: expected different levels, found [8, 8, 32]",
    },
    "requests = [8, 32, 64]": {
        "requests = [8, 32]": "p.toml: load.requests: expected 3 values, one per level of concurrency, found 2",
        "requests = [8, 32, 64]\nrequests_per_stream = 2": (
            "p.toml: load.requests: expected requests or requests_per_stream, found both"
        ),
    },
    "isl = [8192]": {
        "isle = [8192]": (
            "p.toml: workload.isl: expected a value, found none; the key is required\n"
            "p.toml: workload.isle: unknown key; did you mean isl?"
        ),
        "isl = [8192, 8192]": "p.toml: workload.isl: expected different values, found [8192, 8192]",
    },
    "range_ratio = 0.2": {"range_ratio = 1.0": "p.toml: workload.range_ratio: expected less than 1, found 1.0"},
    'shape = "closed"': {'shape = "open"': 'p.toml: load.shape: expected "closed", found "open"'},
    "temperature = 1.0": {
        'temperature = "hot"': 'p.toml: sampling.temperature: expected a number, found "hot"',
        "temperature = nan": "p.toml: sampling.temperature: expected a finite number, found NaN",
        "temperature = -1": "p.toml: sampling.temperature: expected at least 0, found -1",
    },
    "schema = 1\n": {
        "schema = 2\n": "p.toml: schema: expected 1, found 2",
        "": "p.toml: schema: expected a value, found none; the key is required",
    },
    '"decode-8192x1024"': {
        '"Decode it"': (
            'p.toml: name: expected a name that matches ^[a-z0-9][a-z0-9._-]*$, found "Decode it"'
        )
    },
    "[sampling]\n": {
        "[sampeling]\n": "p.toml: sampeling: unknown key; did you mean sampling?",
    },
    "kv = [0]": {
        "kv = [0, 131072]": (
            "p.toml: workload.kv: expected [0], the only depth that this version can prime and prove, "
            "found [0, 131072]"
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, cases in FAULTS.items() for new in cases])
def test_a_fault_is_named_with_file_key_expected_and_found(old: str, new: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_protocol(changed(old, new), "p.toml")

    assert FAULTS[old][new] == str(caught.value)


def test_text_that_is_no_toml_says_where() -> None:
    with pytest.raises(BadInput, match=r"^p\.toml: not TOML: .*line 2"):
        parse_protocol("schema = 1\nname = \n", "p.toml")


def test_ids_cannot_carry_a_system_text() -> None:
    text = changed('send = "text"', 'send = "ids"').replace('system = ""', 'system = "x"')
    with pytest.raises(BadInput, match=r"workload\.send: expected"):
        parse_protocol(text, "p.toml")
