"""Real servers' bytes (tests/data/captures): every answer is read as its server meant it, however it is cut."""

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchkit.load.sse import SseDecoder
from benchkit.load.stream import StreamReader, StreamReading
from benchkit.load.wire import BodyReading, read_body

CAPTURES = Path(__file__).parents[1] / "data" / "captures"

LLAMA = "llama.cpp-xllamacpp-2026.10.11549"
LLAMA_NGRAM = "llama.cpp-xllamacpp-2026.10.11549-ngram-ping"
LLAMA_PYTHON = "llama-cpp-python-0.3.36"
SGLANG = "sglang-0.5.16-h200"
TABBY = "tabbyapi-e632af4-exllamav3-1.6.5-h200"
TRANSFORMERS = "transformers-serve-5.24.0"
VLLM = "vllm-0.32.0-cpu"

# Streams that are no success, and a part of the reason.
BROKEN = {
    f"{LLAMA_PYTHON}/chat-stream-interrupted": ("incomplete_stream", "[DONE] without a finish_reason"),
    f"{LLAMA_PYTHON}/error-too-long-text-stream": ("incomplete_stream", "the stream held no event"),
    f"{LLAMA_PYTHON}/error-too-long-chat-stream": ("incomplete_stream", "the stream held no event"),
    f"{LLAMA_NGRAM}/text-stream-ignore-eos-over-context": ("incomplete_stream", "without a finish_reason"),
    f"{LLAMA}/text-stream-server-killed": ("incomplete_stream", "without a finish_reason"),
    f"{SGLANG}/chat-stream-client-leaves": ("incomplete_stream", "without a finish_reason"),
    f"{SGLANG}/chat-stream-server-engine-killed": ("incomplete_stream", "without a finish_reason"),
    f"{TABBY}/chat-stream-client-leaves": ("incomplete_stream", "without a finish_reason"),
    f"{TRANSFORMERS}/error-max-tokens-0": ("in_band_error", "`max_new_tokens` must be greater than 0, but is 0."),
    f"{TRANSFORMERS}/error-max-tokens-negative": ("in_band_error", "must be greater than 0, but is -5."),
    f"{VLLM}/chat-stream-engine-killed": ("in_band_error", "EngineCore encountered an issue."),
    f"{VLLM}-specdecode/chat-stream-reasoning-then-content": ("in_band_error", "not yet supported with speculative"),
}
# Other APIs that stream under /v1/…: they have no choices, so they are never taken for a success.
OTHER_APIS = {
    f"{LLAMA}/native-completion-stream",
    f"{SGLANG}/generate-stream",
    f"{VLLM}-reasoning-tools/responses-stream",
    f"{VLLM}-reasoning-tools/messages-stream",
}


class Capture(NamedTuple):
    """One captured answer; `spans` are the places of its body in the raw bytes."""

    status: int
    content_type: str
    raw: bytes
    spans: list[tuple[int, int]]
    whole: bool  # its own framing closed it

    @property
    def body(self) -> bytes:
        return b"".join(self.raw[a:b] for a, b in self.spans)


@functools.cache
def capture(name: str) -> Capture:
    raw = (CAPTURES / f"{name}.response").read_bytes()
    head = raw.partition(b"\r\n\r\n")[0].decode()
    headers = dict(re.findall(r"^([\w-]+): *(.*?)\r?$", head.lower(), re.MULTILINE))
    start = len(head.encode()) + 4
    if headers.get("transfer-encoding") == "chunked":
        spans, whole = chunks(raw, start)
    else:
        spans, whole = [(start, len(raw))], len(raw) - start == int(headers["content-length"])
    return Capture(int(head.split(" ")[1]), headers.get("content-type", ""), raw, spans, whole)


def chunks(raw: bytes, at: int) -> tuple[list[tuple[int, int]], bool]:
    """Where the data of each chunk stand (RFC 9112, section 7.1), and whether the last chunk came."""
    spans = []
    while (line_end := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line_end].split(b";")[0], 16)
        if size == 0:
            return spans, raw[line_end:] == b"\r\n\r\n"
        at = line_end + 2
        spans.append((at, min(at + size, len(raw))))
        at += size + 2
    return spans, False


def body_reads(name: str) -> list[tuple[int, bytes]]:
    """What each read of reads.tsv brought of the body, and when, in ns since the request was sent."""
    rows = (CAPTURES / f"{name}.reads.tsv").read_text(encoding="utf-8").splitlines()[1:]
    raw, spans = capture(name).raw, capture(name).spans
    reads, begin = [], 0
    for seconds, size in (row.split("\t") for row in rows):
        end = begin + int(size)
        piece = b"".join(raw[max(a, begin) : min(b, end)] for a, b in spans if a < end and b > begin)
        reads.append((round(float(seconds) * 1e9), piece))
        begin = end
    assert begin == len(raw)
    return reads


NAMES = sorted(str(path.relative_to(CAPTURES))[: -len(".response")] for path in CAPTURES.glob("*/*.response"))
STREAMS = [name for name in NAMES if capture(name).content_type.startswith("text/event-stream")]
GOOD_STREAMS = [name for name in STREAMS if name not in BROKEN and name not in OTHER_APIS]
SINGLE = [name for name in GOOD_STREAMS if not re.search(r"-n2|-batch", name)]


def read(body: bytes, *cuts: int) -> StreamReading:
    """The reading of a body cut at these places; every read has the same stamp."""
    reader = StreamReader()
    for a, b in itertools.pairwise([0, *cuts, len(body)]):
        reader.feed(1, body[a:b])
    return reader.end(2)


def reading(name: str) -> StreamReading:
    return read(capture(name).body)


def answer(name: str) -> BodyReading:
    got = capture(name)
    return read_body(got.status, got.content_type, got.body)


def timed(name: str) -> StreamReading:
    """The reading of a stream in the pieces, and at the times, that the network gave."""
    reader = StreamReader()
    for t_ns, data in body_reads(name):
        reader.feed(t_ns, data)
    return reader.end(t_ns)


def objects(body: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a stream, found with a plain pattern: no captured event has two data lines."""
    lines = re.findall(rb"^data: ?(\{.*\}) ?\r?$", body, re.MULTILINE)
    return [json.loads(line.decode("utf-8", "replace")) for line in lines]


# --- all of them


def test_every_capture_is_there():
    assert len(NAMES) == 456
    assert len(STREAMS) == 229
    assert set(STREAMS) >= BROKEN.keys() | OTHER_APIS


@pytest.mark.parametrize("folder", sorted({name.split("/")[0] for name in NAMES}))
def test_the_files_are_what_their_index_says(folder: str):
    head, *rows = (CAPTURES / folder / "INDEX.tsv").read_text(encoding="utf-8").splitlines()
    for line in rows:
        row = dict(zip(head.split("\t"), line.split("\t"), strict=True))
        name = f"{folder}/{row['name']}"
        # Two requests on one connection have no file; a later answer replaced one that timed out.
        if row["name"] == "keepalive-reuse" or row["bytes"] == "0":
            continue
        assert row["status_line"].split(" ")[1] == str(capture(name).status), name
        assert (row["ended"] == "complete") == capture(name).whole, name


@pytest.mark.parametrize("name", GOOD_STREAMS)
def test_a_good_stream_says_what_a_plain_reading_of_its_lines_says(name: str):
    said = objects(capture(name).body)
    choices = [choice for value in said for choice in value.get("choices", [])]
    deltas = [choice.get("delta", choice) for choice in choices]
    usages = [value["usage"] for value in said if value.get("usage")]
    got = reading(name)

    assert (got.error, got.error_detail) == (None, "")
    assert [c["finish_reason"] for c in choices if c.get("finish_reason")][-1] == got.finish_reason
    assert "".join(d.get("content") or d.get("text") or "" for d in deltas) == got.text
    thoughts = (d.get("reasoning") or d.get("reasoning_content") or "" for d in deltas)
    assert "".join(thoughts) == got.reasoning_text
    assert (usages[-1]["completion_tokens"] if usages else None) == got.completion_tokens
    assert (usages[-1]["prompt_tokens"] if usages else None) == got.prompt_tokens
    assert ("usage" if usages else "none") == got.token_source
    assert (b"[DONE]" in capture(name).body) == got.done_seen
    assert got.event_tokens is None or sum(got.event_tokens) == got.completion_tokens


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_stream_is_no_success(name: str):
    error, detail = BROKEN[name]
    got = reading(name)

    assert error == got.error
    assert detail in got.error_detail
    assert (got.prompt_tokens, got.completion_tokens, got.token_source) == (None, None, "none")


@pytest.mark.parametrize("name", sorted(OTHER_APIS))
def test_a_stream_of_another_api_is_no_success(name: str):
    assert (reading(name).error, reading(name).events) == ("incomplete_stream", 0)


@pytest.mark.parametrize("name", [name for name in NAMES if capture(name).status != 200])
def test_a_refusal_is_an_http_error_with_the_servers_words(name: str):
    got, body = answer(name), capture(name).body

    assert got.error == "http_error"
    # The first word of the message stands in the body as it is, unless there is no body at all.
    words = re.findall(r"[A-Za-z_]{4,}", got.error_detail)
    assert (words and words[0].encode() in body) or (got.error_detail == "an empty body" and not body)


@pytest.mark.parametrize("name", [name for name in NAMES if "nonstream" in name and capture(name).status == 200])
def test_a_plain_completion_is_read_whole(name: str):
    got, value = answer(name), json.loads(capture(name).body)
    choice = value["choices"][0]

    assert got.error is None and got.event is not None
    assert (choice.get("message", {}).get("content") or choice.get("text") or "") == got.event.text
    assert choice["finish_reason"] == got.event.finish_reason
    count = got.event.usage.completion_tokens if got.event.usage else None
    assert (value["usage"]["completion_tokens"] if value["usage"] else None) == count


# --- however it is cut


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(STREAMS), st.data())
def test_any_cut_gives_the_same_events_and_the_same_reading(name: str, data: st.DataObject):
    body = capture(name).body
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=30).map(sorted))
    whole, pieces = SseDecoder(), SseDecoder()
    events = [event for a, b in itertools.pairwise([0, *cuts, len(body)]) for event in pieces.feed(body[a:b])]

    assert whole.feed(body) + whole.end() == events + pieces.end()
    assert read(body) == read(body, *cuts)


@pytest.mark.parametrize(
    "name",
    [
        f"{LLAMA}/chat-stream-usage",
        f"{LLAMA_NGRAM}/text-stream-ping-comments",
        f"{TABBY}/chat-stream-usage",  # CR LF
        f"{TRANSFORMERS}/chat-stream",
        f"{VLLM}/real-chat-stream-emoji",
        f"{VLLM}/chat-stream-engine-killed",
        f"{SGLANG}-nextn-held/chat-stream-usage-continuous",
    ],
)
def test_byte_by_byte_gives_the_same_reading(name: str):
    body = capture(name).body

    assert read(body) == read(body, *range(1, len(body)))


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(SINGLE), st.data())
def test_a_stream_that_stops_anywhere_is_no_success_before_its_finish_reason(name: str, data: st.DataObject):
    body = capture(name).body
    finish = re.search(rb'^data: ?.*"finish_reason": ?"\w+".*?(?=\r?$)', body, re.MULTILINE)
    assert finish
    stop = data.draw(st.integers(0, len(body)))
    got = read(body[:stop])

    assert reading(name).text.startswith(got.text)
    if stop < finish.end():
        assert got.error == "incomplete_stream"
        assert (got.prompt_tokens, got.completion_tokens) == (None, None)
    elif got.error:
        assert got.error_detail.startswith("cut in the middle of an event")
    else:
        assert got.completion_tokens in (None, reading(name).completion_tokens)


@pytest.mark.parametrize("name", [str(p.relative_to(CAPTURES))[:-10] for p in sorted(CAPTURES.glob("*/*.reads.tsv"))])
def test_the_networks_own_pieces_give_the_same_reading(name: str):
    got, whole = timed(name), reading(name)

    for field in ("error", "text", "reasoning_text", "completion_tokens", "events", "data_events", "event_tokens"):
        assert getattr(whole, field) == getattr(got, field)
    assert list(got.event_ns) == sorted(got.event_ns)


# --- what each server does


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        (f"{VLLM}/text-stream-usage-continuous", (1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1)),
        (f"{VLLM}/chat-stream-usage-continuous", (1,) * 12),
        (f"{VLLM}-specdecode/text-stream-usage-continuous", (1, 1, 1, 3, 3, 5, 5, 5, 5, 5, 5, 1)),
        (f"{VLLM}-specdecode/text-stream-return-token-ids", (1, 1, 1, 3, 3, 5, 5, 5, 5, 5, 5, 1)),
        (f"{VLLM}-specdecode/chat-stream-reasoning-continuous", (1, 1, 1, 1, 3, 3, 5, 5, 4)),
        (f"{VLLM}-reasoning-tools/chat-stream-tool-forced", (23, 13, 1, 1, 1, 13)),
        (f"{VLLM}/chat-stream-return-token-ids", (1, 1, 1, 1)),
        (f"{SGLANG}/chat-stream-continuous-only", (1,) * 12),
        (f"{SGLANG}-nextn/chat-stream-usage-continuous", (1, 2, 3, 2, 3, 2, 3, 3, 3, 3, 3, 2, 2)),
        (f"{SGLANG}-nextn-held/chat-stream-usage-continuous", (1, 31)),
        (f"{SGLANG}-ngram/chat-stream-usage-continuous", (1, 8, 8, 8, 7)),
    ],
)
def test_running_usage_or_token_ids_tell_the_tokens_of_each_event(name: str, tokens: tuple[int, ...]):
    assert tokens == reading(name).event_tokens
    assert tokens[0] == reading(name).first_event_tokens


@pytest.mark.parametrize(
    ("name", "tokens", "events"),
    [
        (f"{VLLM}/real-chat-stream-natural-stop", 25, 24),  # the EOS token has an event without text
        (f"{VLLM}/real-chat-stream-emoji", 40, 20),  # half characters
        (f"{VLLM}-request-metrics/text-stream-usage", 40, 6),  # eight tokens an event
        (f"{VLLM}-specdecode/chat-stream-reasoning-excluded", 24, 0),
        (f"{SGLANG}-nextn-held/text-stream-usage", 32, 2),
        (f"{TABBY}/chat-stream-32", 32, 30),
        (f"{LLAMA}/text-stream-stop-string", 1, 0),
    ],
)
def test_where_nothing_tells_the_tokens_of_an_event_none_are_made_up(name: str, tokens: int, events: int):
    got = reading(name)

    assert (None, tokens, events) == (got.error, got.completion_tokens, got.events)
    assert (got.first_event_tokens, got.event_tokens) == (None, None)


@pytest.mark.parametrize("name", [n for n in SINGLE if n.startswith("llama.cpp")])
def test_llama_cpp_counts_in_timings_what_it_counts_in_usage(name: str):
    got = reading(name)

    assert got.server_timings is not None
    if got.token_source == "usage":
        assert got.server_timings["predicted_n"] == got.completion_tokens
        assert got.server_timings["cache_n"] == got.cached_tokens
        assert got.server_timings["prompt_n"] + got.server_timings["cache_n"] == got.prompt_tokens


def test_vllm_puts_its_own_times_beside_the_usage():
    got = reading(f"{VLLM}-request-metrics/chat-stream-usage")

    assert got.server_timings is not None
    assert got.server_timings["time_to_first_token_ms"] == 5.51777900000161
    speculation = got.server_timings["speculative_decoding"]
    # Each step gives one token beside the accepted drafts: 1 + 28 / 8.
    assert speculation["mean_acceptance_length"] == 4.5
    assert speculation["num_accepted_draft_tokens"] / speculation["num_spec_steps"] == 28 / 8


def test_tabby_sends_usage_and_its_times_with_the_finish_reason():
    got = reading(f"{TABBY}/chat-stream-usage")

    assert (got.prompt_tokens, got.completion_tokens, got.cached_tokens, got.finish_reason) == (16, 12, None, "length")
    assert got.server_timings == {
        "prompt_time": 0.0,
        "prompt_tokens_per_sec": "Indeterminate",
        "completion_time": 0.02,
        "completion_tokens_per_sec": 662.37,
        "total_time": 0.02,
    }
    assert reading(f"{TABBY}/text-stream-usage").model == "exl3-4bpw"


def test_transformers_ends_without_done():
    got = reading(f"{TRANSFORMERS}/chat-stream")

    assert (got.error, got.done_seen, got.completion_tokens, got.prompt_tokens) == (None, False, 8, 36)


def test_llama_cpp_python_never_counts_a_stream():
    assert {None} == {reading(name).completion_tokens for name in STREAMS if name.startswith(LLAMA_PYTHON)}


@pytest.mark.parametrize(
    ("name", "cached"),
    [
        (f"{VLLM}/chat-stream-prefix-miss", 0),
        (f"{VLLM}/chat-stream-prefix-hit", 384),
        (f"{VLLM}/chat-stream-after-reset", 0),
        (f"{SGLANG}/chat-stream-cache-hit", 1209),
        (f"{SGLANG}/chat-stream-cache-miss", None),
        (f"{SGLANG}-no-cache-report/chat-stream-again-cached-2", None),
        (f"{LLAMA}/chat-stream-again-cached", 35),
        (f"{TABBY}/chat-stream-cache-hit", None),
    ],
)
def test_cached_tokens_are_what_the_server_tells_and_null_is_not_zero(name: str, cached: int | None):
    assert cached == reading(name).cached_tokens


def test_thoughts_and_content_are_parted_and_their_tokens_counted():
    got = reading(f"{VLLM}-reasoning-tools/chat-stream-reasoning-then-content")

    assert (got.completion_tokens, got.reasoning_tokens, got.first_event_tokens) == (40, 10, 1)
    assert got.reasoning_text.startswith(" nopinonege peda")
    assert got.text.startswith("tihulotopunu")
    assert got.event_tokens is not None and sum(got.event_tokens) == 40


def test_a_forced_tool_call_is_output():
    got = reading(f"{VLLM}-reasoning-tools/chat-stream-tool-required")

    assert (got.tool_text, got.text, got.finish_reason, got.events) == ("addtrue", "", "tool_calls", 6)


def test_a_stream_cut_by_its_server_keeps_what_had_come():
    got = reading(f"{VLLM}/chat-stream-engine-killed")

    assert got.text.startswith("California was a different world that never did exist.")
    assert (got.events, got.data_events, got.done_seen) == (25, 28, True)


def test_several_choices_finish_one_by_one():
    assert (reading(f"{VLLM}/chat-stream-n2").finish_reason, reading(f"{VLLM}/chat-stream-n2").events) == ("length", 24)
    body = capture(f"{VLLM}/chat-stream-n2").body
    first_finish = body.index(b'"finish_reason":"length"')
    got = read(body[: body.index(b"\n\n", first_finish) + 2])
    assert (
        got.error,
        got.error_detail,
    ) == ("incomplete_stream", "the stream ended without a finish_reason for choice 1")


def test_a_batch_that_opens_with_null_is_read():
    got = reading(f"{LLAMA}/text-stream-prompt-batch")

    assert (got.error, got.events, got.data_events) == (None, 8, 12)


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        (f"{VLLM}/error-unknown-model", "The model `no-such-model` does not exist.", 404),
        (f"{VLLM}-reasoning-tools/error-no-key", "Unauthorized", None),
        (f"{VLLM}/error-404", "Not Found", None),
        (f"{LLAMA}/loading-chat-503", "Loading model", 503),
        (f"{LLAMA}/error-too-long-text-stream", "request (6001 tokens) exceeds the available context size", 400),
        (f"{LLAMA_NGRAM}/error-no-key", "Invalid API Key", 401),
        (f"{SGLANG}/error-too-long-text", "The input (9001 tokens) is longer", 400),
        (f"{SGLANG}/flush-cache-while-running", "Flush cache failed.", None),
        (f"{TABBY}/error-too-long-text-stream", "Prompt length 9002 exceeds", "context_length_exceeded"),
        (f"{TABBY}/error-max-tokens-negative", "body.max_tokens: Input should be greater", None),
        (f"{TRANSFORMERS}/chat-stream-ignore-eos", "Unexpected fields in the request:", None),
        (f"{TRANSFORMERS}/error-malformed-json", "body.28: JSON decode error", None),
        (f"{TRANSFORMERS}/error-missing-messages", "Internal Server Error", None),
        (f"{LLAMA_PYTHON}/error-malformed-json", "Internal Server Error", None),
        (f"{LLAMA_PYTHON}/error-too-long-text", "This model's maximum context length", "context_length_exceeded"),
    ],
)
def test_a_refusal_gives_its_message_and_code(name: str, message: str, code: str | int | None):
    got = answer(name)

    assert got.error_detail.startswith(message)
    assert code == (got.wire_error.code if got.wire_error else None)


# --- when it came


@pytest.mark.parametrize(
    ("name", "first_s", "last_s", "tokens"),
    [
        # The role comes at 4 ms with the headers, the first token at 160.
        (f"{TRANSFORMERS}/chat-stream", 0.160225, 0.337501, 8),
        # Headers at 6 ms; the last token shares its read with finish, usage and [DONE].
        (f"{LLAMA}/chat-stream-usage", 0.025162, 4.940811, 12),
        # Headers at 3 ms, role at 10.24; usage and [DONE] come after the last token.
        (f"{VLLM}/chat-stream-usage", 0.010331, 0.078912, 12),
        # One event for the first token, one for the other 31.
        (f"{SGLANG}-nextn-held/chat-stream-usage", 0.062416, 0.121840, 32),
    ],
)
def test_first_and_last_token_are_when_their_read_came(name: str, first_s: float, last_s: float, tokens: int):
    got = timed(name)

    assert (round(first_s * 1e9), round(last_s * 1e9)) == (got.t_first_ns, got.t_last_ns)
    assert tokens == got.completion_tokens


def test_comments_during_a_long_prefill_are_no_first_token():
    got = timed(f"{LLAMA_NGRAM}/text-stream-ping-comments")

    assert got.t_first_ns is not None and got.server_timings is not None
    assert int(got.server_timings["prompt_ms"]) == 11_705
    assert 0 < got.t_first_ns / 1e6 - 11_705.009 < 100


@pytest.mark.parametrize(
    "name", ["chat-stream", "chat-stream-usage", "text-stream", "text-stream-usage", "chat-stream-long"]
)
def test_llama_cpp_agrees_on_prefill_and_decode_time(name: str):
    got = timed(f"{LLAMA}/{name}")

    assert got.server_timings is not None and got.t_first_ns is not None and got.t_last_ns is not None
    # The server's prefill has no HTTP in it, and it is part of the wait for the first token.
    assert 0 <= got.t_first_ns / 1e6 - got.server_timings["prompt_ms"] < 50
    decode_ms = (got.t_last_ns - got.t_first_ns) / 1e6
    assert got.server_timings["predicted_ms"] == pytest.approx(decode_ms, abs=20)


def test_vllm_agrees_on_first_token_and_generation_time():
    got = timed(f"{VLLM}-request-metrics/text-stream-usage")

    assert got.server_timings is not None and got.t_first_ns is not None and got.t_last_ns is not None
    server_ttft_ms = got.server_timings["queue_time_ms"] + got.server_timings["time_to_first_token_ms"]
    assert 0 <= got.t_first_ns / 1e6 - server_ttft_ms < 20
    decode_ms = (got.t_last_ns - got.t_first_ns) / 1e6
    assert got.server_timings["generation_time_ms"] == pytest.approx(decode_ms, abs=5)
