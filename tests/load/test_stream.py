"""A stamped stream → when output came, how many tokens it was, how it ended."""

import json
from collections.abc import Iterable

import pytest

from benchkit.load.stream import StreamReader, StreamReading

DONE = b"data: [DONE]\n\n"
ROLE = {"role": "assistant", "content": ""}


def sse(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(
    text: str | None = None,
    *,
    finish: str | None = None,
    c: int | None = None,
    ids: list[int] | None = None,
    index: int = 0,
    delta: dict[str, object] | None = None,
) -> bytes:
    """A chat chunk with this text; `c` is the running completion_tokens in it, `ids` its token ids."""
    if delta is None:
        delta = {} if text is None else {"content": text}
    value: dict[str, object] = {"id": "c1", "model": "m", "choices": [{"index": index, "delta": delta}]}
    value["choices"][0]["finish_reason"] = finish  # type: ignore[index]
    if ids is not None:
        value["choices"][0]["token_ids"] = ids  # type: ignore[index]
    if c is not None:
        value["usage"] = {"prompt_tokens": 7, "completion_tokens": c}
    return sse(value)


def usage(completion: int | None, prompt: int | None = 7, **more: object) -> bytes:
    return sse({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}})


def read(*events: bytes) -> StreamReading:
    """The reading of events that arrive at 1, 2, 3 … ns; the stream ends well at 99."""
    return started(events).end(99)


def started(events: Iterable[bytes]) -> StreamReader:
    reader = StreamReader()
    for stamp, event in enumerate(events, 1):
        reader.feed(stamp, event)
    return reader


# --- when


def test_the_first_token_is_the_first_event_with_output_not_the_role():
    reading = read(chunk(delta=ROLE), chunk("a"), chunk("b"), chunk(finish="stop"), usage(2), DONE)

    assert (reading.t_first_ns, reading.t_last_ns, reading.t_end_ns) == (2, 3, 99)
    assert reading.event_ns == (2, 3)
    assert (reading.events, reading.data_events) == (2, 6)


def test_the_finish_event_is_output_where_it_carries_text():
    assert read(chunk("a"), chunk("b", finish="length"), usage(2)).t_last_ns == 2


@pytest.mark.parametrize(
    "delta", [{"reasoning": "a"}, {"reasoning_content": "a"}, {"tool_calls": [{"function": {"name": "f"}}]}]
)
def test_a_thought_or_a_tool_call_is_a_first_token(delta: dict[str, object]):
    assert read(chunk(delta=ROLE), chunk(delta=delta), chunk("b", finish="stop")).t_first_ns == 2


def test_events_of_one_read_share_its_stamp():
    reading = read(chunk(delta=ROLE) + chunk("a") + chunk("b"), chunk("c", finish="stop"))

    assert reading.event_ns == (1, 1, 2)


def test_an_event_arrives_with_the_read_that_completes_it():
    event = chunk("a", finish="stop")
    reading = read(event[:20], event[20:-1], event[-1:])

    assert reading.event_ns == (3,)


def test_what_the_reader_knows_can_be_asked_while_it_streams():
    reader = StreamReader()
    assert (reader.first_output_ns, reader.last_event_ns, reader.error) == (None, None, None)

    reader.feed(1, chunk(delta=ROLE) + b": ping\n\n")
    assert (reader.first_output_ns, reader.last_event_ns) == (None, 1)
    reader.feed(2, b": ping\n\n")
    assert reader.last_event_ns == 1, "a comment is no event"
    reader.feed(3, chunk("a"))
    reader.feed(4, chunk("b"))
    assert (reader.first_output_ns, reader.last_event_ns, reader.error) == (3, 4, None)


def test_a_stream_without_output_has_no_first_token():
    reading = read(chunk(delta=ROLE), chunk(finish="length"), usage(24), DONE)

    assert (reading.t_first_ns, reading.t_last_ns, reading.events, reading.event_ns) == (None, None, 0, ())
    assert (reading.error, reading.completion_tokens, reading.event_tokens) == (None, 24, None)


# --- how many


def test_tokens_come_from_usage_never_from_events():
    reading = read(chunk("one two"), chunk(" three"), chunk(finish="stop"), usage(12), DONE)

    assert (reading.prompt_tokens, reading.completion_tokens, reading.token_source) == (7, 12, "usage")
    assert (reading.first_event_tokens, reading.event_tokens) == (None, None)


def test_without_usage_the_tokens_are_unknown_and_the_request_is_fine():
    reading = read(chunk("a"), chunk("b", finish="stop"), DONE)

    assert (reading.error, reading.token_source, reading.completion_tokens) == (None, "none", None)


def test_the_last_count_wins_field_by_field_and_null_changes_nothing():
    reading = read(
        usage(1, prompt_tokens_details={"cached_tokens": 4}),
        chunk("a", finish="stop"),
        usage(None, prompt=8, reasoning_tokens=2),
        usage(9, prompt=None, prompt_tokens_details=None),
    )

    assert (
        reading.prompt_tokens,
        reading.completion_tokens,
        reading.cached_tokens,
        reading.reasoning_tokens,
    ) == (8, 9, 4, 2)


def test_running_usage_tells_the_tokens_of_each_event():
    reading = read(
        chunk(delta=ROLE, c=0),
        chunk("a", c=1),
        chunk("b c", c=3),
        chunk("d e f", c=6, finish="length"),
        usage(6),
        DONE,
    )

    assert (reading.first_event_tokens, reading.event_tokens, reading.completion_tokens) == (1, (1, 2, 3), 6)


def test_the_first_event_holds_all_tokens_up_to_it():
    # vLLM with a forced tool call: 22 tokens of markup before the name.
    tool = {"tool_calls": [{"index": 0, "function": {"name": "add"}}]}
    reading = read(chunk(delta=ROLE, c=0), chunk(delta=tool, c=23), chunk(finish="stop", c=36), usage(36))

    assert (reading.first_event_tokens, reading.event_tokens) == (23, (23, 13))


def test_a_rise_of_running_usage_is_output_without_text():
    # The EOS token, and the last piece of markup that a parser swallowed.
    reading = read(chunk("a", c=1), chunk("", c=2), chunk(finish="stop", c=3), usage(3), DONE)

    assert (reading.t_last_ns, reading.event_tokens) == (3, (1, 1, 1))


def test_half_a_character_is_a_first_token_where_running_usage_shows_it():
    reading = read(chunk(delta=ROLE, c=0), chunk("", c=1), chunk("é", c=2, finish="length"), usage(2))

    assert (reading.t_first_ns, reading.event_tokens) == (2, (1, 1))


def test_thoughts_that_are_not_sent_end_with_the_event_that_counts_them():
    reading = read(chunk(delta=ROLE, c=0), chunk(finish="length", c=24), usage(24), DONE)

    assert (reading.t_first_ns, reading.first_event_tokens, reading.event_tokens) == (2, 24, (24,))


def test_the_final_usage_is_no_output():
    for end in (chunk(finish="stop", c=2), chunk(finish="stop") + usage(2), chunk(finish="stop", c=2) + usage(2)):
        reading = read(chunk("a"), chunk("b"), end, DONE)
        assert (reading.t_last_ns, reading.events, reading.event_tokens) == (2, 2, None)


def test_the_final_usage_is_no_output_where_nothing_else_came_either():
    reading = read(chunk(delta=ROLE), chunk(finish="stop", c=1), DONE)

    assert (reading.events, reading.completion_tokens) == (0, 1)


def test_zeros_in_every_event_are_no_running_count():
    # Ollama's completions: usage of zeros in each chunk, the truth in the last.
    reading = read(chunk("a", c=0), chunk("b", c=0), chunk("", c=2, finish="stop"), DONE)

    assert (reading.completion_tokens, reading.events, reading.t_last_ns) == (2, 2, 2)
    assert (reading.first_event_tokens, reading.event_tokens) == (None, None)


def test_a_count_in_the_role_event_is_no_first_token():
    # Proxies carry over an estimate of 1 that another API sends before anything is generated.
    reading = read(chunk(delta=ROLE, c=1), chunk("a"), chunk(finish="stop"), usage(9))

    assert (reading.t_first_ns, reading.events, reading.first_event_tokens) == (2, 1, None)


def test_an_account_that_misses_an_event_is_dropped_whole():
    reading = read(chunk("a", c=1), chunk("b"), chunk("c", c=3, finish="stop"), usage(3))

    assert (reading.first_event_tokens, reading.event_tokens) == (1, None)
    assert read(chunk("a", ids=[5, 6]), chunk("b", finish="stop"), usage(2)).event_tokens is None


def test_an_account_that_does_not_add_up_is_dropped_whole():
    assert read(chunk("a", c=1), chunk("b", c=2, finish="stop"), usage(3)).event_tokens is None
    assert read(chunk("a", ids=[5]), chunk("b", ids=[6], finish="stop"), usage(3)).event_tokens is None


def test_a_running_count_that_falls_is_not_believed():
    reading = read(chunk("a", c=4), chunk("b", c=1), chunk("c", c=5, finish="stop"), usage(5))

    assert (reading.completion_tokens, reading.event_tokens) == (5, None)


def test_two_events_of_one_token_share_its_count():
    # A server that parts thoughts from content sends both with the same running total.
    thought = {"reasoning_content": "hm"}
    reading = read(chunk(delta=thought, c=2), chunk("a", c=2), chunk("b", c=3, finish="stop"), usage(3))

    assert reading.event_tokens == (2, 0, 1)


def test_token_ids_tell_the_tokens_of_each_event():
    reading = read(chunk("a b", ids=[5, 6]), chunk("", ids=[7]), chunk("c", ids=[8, 9], finish="stop"), usage(5))

    assert (reading.first_event_tokens, reading.event_tokens, reading.event_ns[1]) == (2, (2, 1, 2), 2)


def test_empty_token_ids_are_no_output():
    assert read(chunk("a", ids=[5]), chunk("", ids=[], finish="stop"), usage(1)).events == 1


def test_with_several_choices_no_event_is_given_tokens():
    # Running usage is per choice on one server and a sum on another: that it adds up proves nothing.
    reading = read(
        chunk("a", c=1), chunk("b", c=1, index=1), chunk(finish="stop"), chunk(finish="stop", index=1), usage(1)
    )

    assert (reading.error, reading.completion_tokens) == (None, 1)
    assert (reading.first_event_tokens, reading.event_tokens) == (None, None)


# --- how it ended


def test_a_finish_reason_makes_a_success_and_done_does_not():
    assert read(chunk("a", finish="stop")).error is None
    cut = read(chunk("a"), DONE)
    assert (cut.error, cut.error_detail) == ("incomplete_stream", "[DONE] without a finish_reason")
    assert cut.done_seen


def test_every_choice_needs_its_finish_reason():
    reading = read(chunk("a"), chunk("b", index=1), chunk(finish="stop", index=1), usage(2), DONE)

    assert (
        reading.error,
        reading.error_detail,
    ) == ("incomplete_stream", "[DONE] without a finish_reason for choice 0")


def test_an_empty_body_is_an_incomplete_stream():
    assert (read().error, read().error_detail) == ("incomplete_stream", "the stream held no event")


def test_a_failure_keeps_its_text_and_times_and_has_no_tokens():
    reading = read(chunk("a", c=1), chunk("b", c=2, ids=[1]))

    assert (reading.error, reading.text, reading.event_ns, reading.events) == ("incomplete_stream", "ab", (1, 2), 2)
    assert (
        reading.prompt_tokens,
        reading.completion_tokens,
        reading.cached_tokens,
        reading.reasoning_tokens,
        reading.first_event_tokens,
        reading.event_tokens,
        reading.token_source,
    ) == (None, None, None, None, None, None, "none")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_event_fails_the_request_wherever_it_comes(at: int):
    events = [chunk("a"), chunk("b", finish="stop"), usage(2), DONE]
    events.insert(at, sse({"error": {"message": "engine died", "code": 500}}))
    reading = read(*events)

    assert (reading.error, reading.error_detail, reading.completion_tokens) == ("in_band_error", "engine died", None)


def test_an_event_named_error_fails_the_request():
    reading = read(chunk("a"), b"event: error\ndata: overloaded\n\n", chunk(finish="stop"))

    assert (reading.error, reading.error_detail) == ("in_band_error", "overloaded")


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_request_is_no_success(reason: str):
    reading = read(chunk("a"), chunk(finish=reason), usage(1), DONE)

    assert ("in_band_error", f"finish_reason {reason}") == (reading.error, reading.error_detail)
    assert (None, reason) == (reading.completion_tokens, reading.finish_reason)


def test_an_event_that_cannot_be_read_is_a_protocol_error():
    reading = read(chunk("a"), b"data: {oops\n\n", chunk("b", finish="stop"), usage(2), DONE)

    assert (reading.error, reading.error_detail) == ("protocol_error", "event 2 is no JSON object: {oops")
    assert reading.text == "ab"


def test_events_of_other_names_need_not_be_json():
    assert read(b"event: ping\ndata: now\n\n", chunk("a", finish="stop")).error is None


def test_null_and_empty_events_say_nothing():
    reading = read(b"data: null\n\n", b"data\n\n", b"data:\n\n", chunk("a", finish="stop"))

    assert (reading.error, reading.data_events, reading.events) == (None, 2, 1)


def test_the_first_failure_stands():
    reading = read(sse({"error": "first"}), b"data: {oops\n\n", sse({"error": "second"}))

    assert (reading.error, reading.error_detail) == ("in_band_error", "first")


def test_an_unclosed_last_event_counts_if_it_is_whole():
    reading = read(chunk("a"), chunk("b", finish="stop") + usage(2).rstrip(b"\n"))

    assert (reading.error, reading.completion_tokens, reading.data_events) == (None, 2, 3)


def test_an_unclosed_last_event_arrived_with_the_last_read():
    reading = read(chunk("a"), chunk("b", finish="stop").rstrip(b"\n"))

    assert (reading.t_last_ns, reading.t_end_ns) == (2, 99)


def test_an_unclosed_last_event_that_was_cut_is_a_cut_stream():
    reading = read(chunk("a"), chunk("b", finish="stop"), usage(2)[:-9])

    assert reading.error == "incomplete_stream"
    assert reading.error_detail.startswith('cut in the middle of an event: {"choices"')
    assert reading.completion_tokens is None


@pytest.mark.parametrize("cut", range(1, len(DONE) + 1))
def test_half_a_done_mark_is_as_good_as_none(cut: int):
    reading = read(chunk("a", finish="stop"), usage(1), DONE[:-cut])

    assert (reading.error, reading.completion_tokens) == (None, 1)


def test_what_follows_done_is_not_read():
    reading = read(chunk("a", finish="stop"), usage(1), DONE, chunk("b"), b"data: {oops\n\n", b"data: {")

    assert (reading.error, reading.text, reading.events, reading.completion_tokens) == (None, "a", 1, 1)


def test_a_lost_connection_has_the_callers_reason():
    reading = started([chunk("a"), chunk("b", c=2)[:-9]]).broken(50, "disconnected", "reset by peer")

    assert (reading.error, reading.error_detail, reading.t_end_ns) == ("disconnected", "reset by peer", 50)
    assert (reading.text, reading.completion_tokens) == ("a", None)


def test_what_the_server_said_is_a_better_reason_than_the_lost_connection():
    for error in (sse({"error": "engine died"}), sse({"error": "engine died"}).rstrip(b"\n")):
        reading = started([chunk("a"), error]).broken(50, "disconnected", "reset by peer")
        assert (reading.error, reading.error_detail) == ("in_band_error", "engine died")


def test_finished_means_that_nothing_of_worth_can_follow():
    reader = started([chunk("a"), chunk("b", finish="stop")])
    assert not reader.finished, "usage may still come"
    reader.feed(9, usage(2))
    assert reader.finished

    assert started([chunk("a", finish="stop"), DONE]).finished
    assert started([chunk("a", finish="stop", c=1)]).finished
    assert not started([chunk("a", c=1), DONE]).finished
    assert not started([chunk("a", c=1), chunk(finish="stop")]).finished
    assert not started([chunk("a"), chunk("b", index=1), chunk(finish="stop", c=2)]).finished


def test_a_response_beyond_the_limit_is_given_up():
    reader = StreamReader(max_bytes=1000)
    reader.feed(1, chunk("a"))
    reader.feed(2, b"x" * 1000)
    reader.feed(3, b"\n\n" + chunk("b", finish="stop"))
    reading = reader.end(9)

    assert (reading.error, reading.error_detail) == ("protocol_error", "response larger than 1000 bytes")
    assert (reading.text, reading.events) == ("a", 1)


def test_the_limit_itself_is_allowed():
    stream = chunk("a", finish="stop")
    reader = StreamReader(max_bytes=len(stream))
    reader.feed(1, stream)

    assert reader.end(2).error is None


# --- what it said


def test_text_thoughts_and_tool_calls_are_kept_apart():
    reading = read(
        chunk(delta={"reasoning": "h"}),
        chunk(delta={"reasoning_content": "m"}),
        chunk("a"),
        chunk(delta={"content": "b", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
        chunk(delta={"tool_calls": [{"function": {"arguments": "}"}}]}, finish="tool_calls"),
    )

    assert (reading.text, reading.reasoning_text, reading.tool_text) == ("ab", "hm", "f{}")
    assert (reading.finish_reason, reading.events) == ("tool_calls", 5)


def test_the_servers_figures_and_names_are_kept():
    reading = read(
        chunk("a"),
        sse({"id": "c2", "model": "other", "choices": [], "timings": {"predicted_n": 1}}),
        sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": {"predicted_n": 2}}),
    )

    assert (reading.response_id, reading.model, reading.server_timings) == ("c1", "m", {"predicted_n": 2})
