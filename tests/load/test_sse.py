"""Bytes → events: framing, odd line ends, any cut of the network, linear cost."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchkit.load.sse import SseDecoder, SseEvent

BOM = b"\xef\xbb\xbf"


def decode(*reads: bytes) -> list[SseEvent]:
    """Events of a stream that came in these reads, an unclosed one at its end included."""
    decoder = SseDecoder()
    return [event for read in reads for event in decoder.feed(read)] + decoder.end()


def data_of(*reads: bytes) -> list[bytes]:
    return [event.data for event in decode(*reads)]


def test_an_event_ends_at_its_blank_line():
    decoder = SseDecoder()

    assert decoder.feed(b"data: one\n") == []
    assert [SseEvent("message", b"one")] == decoder.feed(b"\n")
    assert decoder.end() == []


def test_several_events_in_one_read_come_out_in_order():
    assert data_of(b"data: 1\n\ndata: 2\n\ndata: 3\n\n") == [b"1", b"2", b"3"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_every_kind_of_line_end_counts(end: bytes):
    assert data_of(end.join([b"data: 1", b"", b"data: 2", b"data: 3", b"", b""])) == [b"1", b"2\n3"]


def test_a_lf_in_the_next_read_belongs_to_the_cr_before_it():
    decoder = SseDecoder()

    assert decoder.feed(b"data: 1\r") == []
    assert decoder.feed(b"\ndata: 2\r") == []
    assert [SseEvent("message", b"1\n2")] == decoder.feed(b"\n\r")
    assert decoder.feed(b"\n") == []
    assert decoder.end() == []


def test_cr_lf_then_lf_is_a_blank_line():
    assert [event.data for event in SseDecoder().feed(b"data: 1\r\n\n")] == [b"1"]


def test_at_most_one_blank_after_the_colon_is_dropped():
    assert data_of(b"data:a\n\ndata: b\n\ndata:  c\n\ndata:\td\n\n") == [b"a", b"b", b" c", b"\td"]


def test_a_blank_at_the_end_stays():
    # TensorRT-LLM writes one after the JSON of its first chunk.
    assert data_of(b"data: {} \n\n") == [b"{} "]


def test_data_lines_are_joined_by_lf():
    assert data_of(b"data: YHOO\ndata: +2\ndata: 10\n\n") == [b"YHOO\n+2\n10"]


def test_comments_say_nothing_wherever_they_stand():
    stream = b": ping - 2026\n\ndata: 1\n:\ndata: 2\n\n:\n\n:data: no\n\n"

    assert data_of(stream) == [b"1\n2"]


def test_a_comment_between_events_is_not_part_of_their_data():
    # The shape that a split at blank lines alone gets wrong.
    assert data_of(b"data: 1\n\n: ping\n\ndata: 2\n\n") == [b"1", b"2"]


def test_a_field_named_data_without_a_colon_is_an_empty_line_of_data():
    # The example of the standard, section 9.2.6: an empty event, then a single newline, then nothing.
    decoder = SseDecoder()

    assert [event.data for event in decoder.feed(b"data\n\ndata\ndata\n\ndata:")] == [b"", b"\n"]


def test_the_name_of_an_event_lasts_for_that_event():
    assert decode(b"event: ping\ndata: 1\n\ndata: 2\n\n") == [("ping", b"1"), ("message", b"2")]


def test_a_name_without_data_is_no_event_and_is_forgotten():
    assert decode(b"event: ping\n\ndata: 1\n\n") == [("message", b"1")]


def test_a_name_is_remembered_until_the_read_that_brings_its_data():
    assert decode(b"event: ping\n", b"data: 1\n\n") == [("ping", b"1")]


def test_the_name_may_come_after_the_data_and_the_last_one_counts():
    assert decode(b"event: a\ndata: 1\nevent: b\n\n") == [("b", b"1")]


def test_id_and_retry_and_unknown_fields_are_passed_over():
    assert decode(b"id: 7\nretry: 3000\nfoo: bar\ndata: 1\n Data: 2\nDATA: 3\n\n") == [("message", b"1")]


def test_a_byte_order_mark_is_dropped_at_the_start_only():
    assert data_of(BOM + b"data: 1\n\n") == [b"1"]
    assert data_of(BOM[:1], BOM[1:2], BOM[2:] + b"data: 1\n\n") == [b"1"]
    assert data_of(b"data: 1\n\n" + BOM + b"data: 2\n\n") == [b"1"], "the second line is no data field"
    assert data_of(b"data: " + BOM + b"1\n\n") == [BOM + b"1"]


def test_half_a_byte_order_mark_is_an_unknown_field():
    assert data_of(BOM[:2], b"data: 1\ndata: 2\n\n") == [b"2"]
    assert data_of(BOM[:2]) == []


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x00"])
def test_what_python_calls_a_line_end_is_text(mark: str):
    text = f'{{"a":"x{mark}y"}}'.encode()

    assert [text] == data_of(b"data: " + text + b"\n\n")


def test_what_no_blank_line_closed_is_given_at_the_end_once():
    decoder = SseDecoder()
    decoder.feed(b"event: e\ndata: 1\ndata: tw")

    assert [SseEvent("e", b"1\ntw")] == decoder.end()
    assert decoder.end() == []


def test_a_line_that_ended_without_its_blank_line_is_given_too():
    assert data_of(b"data: 1\n") == [b"1"]
    assert data_of(b"data: 1\r") == [b"1"]


def test_nothing_is_left_of_a_stream_that_ended_well():
    assert decode() == []
    assert decode(b"") == []
    assert decode(b"\n\n\r\n: x\n") == []


def test_a_read_that_is_empty_changes_nothing():
    assert data_of(b"data: 1\r", b"", b"\n", b"", b"\n") == [b"1"]


def reference(stream: bytes) -> list[SseEvent]:
    """The standard's rules on a whole stream, written to be obvious rather than fast."""
    events, data, name = [], [], ""
    for line in [*re.split(rb"\r\n|\n|\r", stream.removeprefix(BOM)), b""]:
        if line == b"":
            if data:
                events.append(SseEvent(name or "message", b"\n".join(data)))
            data, name = [], ""
        elif match := re.fullmatch(rb"(data|event)(?:: ?(.*))?", line, re.DOTALL):
            if match[1] == b"data":
                data.append(match[2] or b"")
            else:
                name = (match[2] or b"").decode()
    return events


FRAGMENTS = [
    b"\n", b"\r", b"\r\n", b"\n\n", b"data: ", b"data:", b"data", b"event: e", b"event:", b": ping", b":", b" ",
    b"x", b'{"a":1}', b"[DONE]", BOM, "\u2028".encode(), b"data: 1\n\n", b"data: 1\r\n\r\n", b"id: 1\n", b"\x00",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map(b"".join), max_size=6))
def test_any_stream_in_any_reads_gives_what_the_standard_says(reads: list[bytes]):
    assert reference(b"".join(reads)) == decode(*reads)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20).map(b"".join))
def test_byte_by_byte_gives_what_the_standard_says(stream: bytes):
    assert reference(stream) == decode(*(stream[i : i + 1] for i in range(len(stream))))


@pytest.mark.parametrize(
    "line", [b"data: " + b"x" * 20_000_000, b"data: " + b"y" * 994 + b"\n"], ids=["one line", "many lines"]
)
def test_an_event_of_20_megabytes_in_small_reads_costs_linear_time(line: bytes):
    stream = line * (20_000_000 // len(line) or 1) + b"\n\n"
    decoder = SseDecoder()
    events = []
    start = time.process_time()
    for at in range(0, len(stream), 4096):
        events += decoder.feed(stream[at : at + 4096])
    cpu_s = time.process_time() - start

    assert len(events) == 1
    assert len(events[0].data) > 19_500_000
    # Joining at every read would copy 20 MB some 5,000 times over: 50 GB, a quarter of a minute.
    assert cpu_s < 3
