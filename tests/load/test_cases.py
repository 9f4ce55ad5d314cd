"""Faults reported with tools of this kind (tests/data/cases): those that are about reading an answer."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchkit.load.sse import SseDecoder
from benchkit.load.stream import StreamReader, StreamReading
from benchkit.load.wire import read_body, request_body

CASES = Path(__file__).parents[1] / "data" / "cases"
EXPECTED: dict[str, Any] = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))
STREAMS = ["B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B09", "B10", "B11", "B13", "B30", "B31"]

# The key of expected.json → what it names in a reading.
READ_AS = {
    "error_class": lambda r: r.error,
    "error_message": lambda r: r.error_detail,
    "text": lambda r: r.text,
    "text_length": lambda r: len(r.text),
    "text_sha256": lambda r: hashlib.sha256(r.text.encode()).hexdigest(),
    "reasoning_text": lambda r: r.reasoning_text,
    "finish_reason": lambda r: r.finish_reason,
    "prompt_tokens": lambda r: r.prompt_tokens,
    "completion_tokens": lambda r: r.completion_tokens,
    "reasoning_tokens": lambda r: r.reasoning_tokens,
    "visible_tokens": lambda r: r.completion_tokens - r.reasoning_tokens,
    "token_source": lambda r: r.token_source,
    "content_events": lambda r: r.events,
    "data_events": lambda r: r.data_events,
    "outcome": lambda r: "ok" if r.error is None else "error",
    # Each data event was stamped with its own index.
    "ttft_event": lambda r: r.t_first_ns,
    "last_token_event": lambda r: r.t_last_ns,
}
ELSEWHERE = {"flags", "request_must_contain", "ttft_s", "tpot_s"}  # flags belong to validity, the rest is below


def stream_of(case: str) -> bytes:
    path = CASES / f"{case}.sse"
    if path.exists():
        return path.read_bytes()
    recipe = json.loads((CASES / f"{case}.recipe.json").read_text(encoding="utf-8"))
    body = (recipe["head"] + recipe["repeat"] * recipe["times"] + recipe["tail"]).encode()
    assert recipe["sha256"] == hashlib.sha256(body).hexdigest()
    return body


def read_event_by_event(stream: bytes) -> StreamReading:
    """The reading of a stream whose n-th data event arrives at n ns."""
    reader = StreamReader()
    events = stream.split(b"\n\n")
    for index, event in enumerate(events[:-1]):
        reader.feed(index, event + b"\n\n")
    reader.feed(len(events), events[-1])
    return reader.end(len(events))


def read_in(reads: list[bytes]) -> StreamReading:
    reader = StreamReader()
    for read in reads:
        reader.feed(1, read)
    return reader.end(1)


@pytest.mark.parametrize("case", STREAMS)
def test_a_reported_fault_is_not_repeated(case: str):
    reading = read_event_by_event(stream_of(case))
    expected, wrong = EXPECTED[case]["expect"], EXPECTED[case].get("wrong", {})

    assert set(expected) <= set(READ_AS) | ELSEWHERE
    for key in expected.keys() - ELSEWHERE:
        assert expected[key] == READ_AS[key](reading), key
    for key in wrong.keys() - ELSEWHERE:
        values = wrong[key] if isinstance(wrong[key], list) else [wrong[key]]
        assert READ_AS[key](reading) not in values, key


@pytest.mark.parametrize("case", ["B08", "B10"])
def test_the_reads_that_broke_other_clients_change_nothing(case: str):
    stream, (first, *more) = stream_of(case), EXPECTED[case]["split_at"]
    cuts = [0, first, *more, len(stream)]
    reads = [stream[a:b] for a, b in itertools.pairwise(cuts)]

    assert read_in([stream]) == read_in(reads)
    assert EXPECTED[case]["expect"]["text"] == read_in(reads).text


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([case for case in STREAMS if case != "B09"]), st.data())
def test_any_cut_of_a_case_gives_the_same_events_and_the_same_reading(case: str, data: st.DataObject):
    stream = stream_of(case)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12).map(sorted))
    reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    decoder = SseDecoder()

    assert SseDecoder().feed(stream) == [event for read in reads for event in decoder.feed(read)]
    assert read_in([stream]) == read_in(reads)


def test_b02_time_per_token_is_over_the_tokens_that_came_not_those_asked_for():
    case = EXPECTED["B02"]
    arrivals_ns = [round(s * 1e9) for s in case["arrivals_s"]["content_events"]]
    events = stream_of("B02").split(b"\n\n")[:-1]
    # What follows the content (finish, usage, [DONE]) comes a second later and is no output.
    stamps = arrivals_ns + [1_600_000_000] * (len(events) - len(arrivals_ns))
    reader = StreamReader()
    for stamp, event in zip(stamps, events, strict=True):
        reader.feed(stamp, event + b"\n\n")
    reading = reader.end(1_700_000_000)

    assert reading.t_first_ns is not None and reading.t_last_ns is not None
    assert reading.completion_tokens is not None
    assert case["expect"]["ttft_s"] == pytest.approx(reading.t_first_ns / 1e9, rel=1e-9)
    tpot_s = (reading.t_last_ns - reading.t_first_ns) / 1e9 / (reading.completion_tokens - 1)
    assert case["expect"]["tpot_s"] == pytest.approx(tpot_s, rel=1e-9)
    assert case["wrong"]["tpot_s"] != pytest.approx(tpot_s, rel=0.5)
    assert tuple(arrivals_ns) == reading.event_ns


def test_b04_every_request_asks_for_usage():
    wanted = EXPECTED["B04"]["expect"]["request_must_contain"]

    for api in ("chat", "completions"):
        body = request_body(api=api, engine="openai", model="m", prompt="hi", max_tokens=4)
        assert wanted == {key: body[key] for key in wanted}


def test_b12_an_error_object_is_no_success_because_its_status_is_200():
    case = EXPECTED["B12"]
    reading = read_body(200, case["http"]["content_type"], (CASES / "B12.json").read_bytes())

    assert case["expect"]["error_class"] == reading.error
    assert case["expect"]["error_message"] == reading.error_detail
    assert reading.event is None


def test_b32_a_refused_field_is_named_and_the_other_field_is_sent_alone():
    case = EXPECTED["B32"]
    refused = read_body(case["http"]["status"], case["http"]["content_type"], (CASES / "B32.json").read_bytes())

    assert case["expect"]["probe_error_class"] == refused.error
    assert refused.wire_error is not None
    assert case["expect"]["error_param"] == refused.wire_error.param
    field = case["expect"]["run_uses_field"]
    body = request_body(api="chat", engine="openai", model="m", prompt="hi", max_tokens=4, max_tokens_field=field)
    assert body[field] == 4
    assert refused.wire_error.param not in body
