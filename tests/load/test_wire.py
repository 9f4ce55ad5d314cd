"""Request bodies, and what one event or one whole answer says."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchkit.errors import BadInput
from benchkit.load.wire import WireEvent, merged, read_body, read_event, request_body

JSON = "application/json"


def body(**changes: Any) -> dict[str, Any]:
    return request_body(**{"api": "chat", "engine": "openai", "model": "m", "prompt": "hi", "max_tokens": 4} | changes)


def event(value: object) -> WireEvent:
    return read_event(json.dumps(value).encode())


def delta(**fields: object) -> WireEvent:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def usage(**fields: object) -> Any:
    return event({"choices": [], "usage": fields}).usage


# --- what is sent


def test_a_chat_request_has_what_is_needed_and_nothing_else():
    assert body() == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_completions_request_carries_the_prompt_as_it_is():
    assert body(api="completions") == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert body(api="completions", prompt=(5, 6, 7))["prompt"] == [5, 6, 7]


def test_the_system_text_comes_first_and_the_assistant_prefix_last():
    messages = body(system="be brief", assistant_prefix="<think></think>")["messages"]

    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "<think></think>"),
    ]


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "tabbyapi", "sim"])
def test_a_prefix_is_continued_and_no_new_turn_is_opened(engine: str):
    sent = body(engine=engine, assistant_prefix="Sure")

    assert sent["continue_final_message"] is True
    assert sent["add_generation_prompt"] is False


def test_each_engine_gets_only_fields_that_it_knows():
    sglang = body(engine="sglang", assistant_prefix="Sure")
    unknown = body(engine="openai", assistant_prefix="Sure")

    assert sglang["continue_final_message"] is True
    assert "add_generation_prompt" not in sglang
    assert not {"continue_final_message", "add_generation_prompt"} & set(unknown)


def test_without_a_prefix_nothing_is_continued():
    assert not {"continue_final_message", "add_generation_prompt"} & set(body(engine="vllm"))


def test_max_tokens_goes_into_one_field():
    sent = body(max_tokens=9, max_tokens_field="max_completion_tokens")

    assert sent["max_completion_tokens"] == 9
    assert "max_tokens" not in sent


def test_ignore_eos_does_not_bring_min_tokens_along():
    sent = body(ignore_eos=True)

    assert sent["ignore_eos"] is True
    assert "min_tokens" not in sent
    assert body(ignore_eos=True, min_tokens=True)["min_tokens"] == 4


def test_running_usage_is_asked_for_beside_the_final_one():
    assert body(continuous_usage=True)["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_sampling_and_seed_stand_at_the_top():
    sent = body(sampling={"temperature": 0.0, "top_p": 0.95}, seed=0)

    assert (sent["temperature"], sent["top_p"], sent["seed"]) == (0.0, 0.95, 0)
    assert "seed" not in body()


def test_extra_body_comes_last_and_merges_nested_objects():
    sent = body(
        sampling={"temperature": 1.0},
        continuous_usage=True,
        extra_body={
            "temperature": 0.5,
            "chat_template_kwargs": {"enable_thinking": False},
            "stream_options": {"continuous_usage_stats": False},
        },
    )

    assert sent["temperature"] == 0.5
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}


def test_merging_leaves_both_sides_alone():
    base, extra = {"a": {"x": 1, "y": 2}, "b": [1]}, {"a": {"y": 3, "z": 4}, "b": [2], "c": None}

    assert merged(base, extra) == {"a": {"x": 1, "y": 3, "z": 4}, "b": [2], "c": None}
    assert base == {"a": {"x": 1, "y": 2}, "b": [1]}
    assert extra == {"a": {"y": 3, "z": 4}, "b": [2], "c": None}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": [1, 2]}, "token ids"),
        ({"api": "completions", "system": "be brief"}, "no roles"),
        ({"api": "completions", "assistant_prefix": "Sure"}, "no roles"),
        ({"api": "responses"}, "expected chat or completions"),
        ({"max_tokens_field": "max_new_tokens"}, "found 'max_new_tokens'"),
        ({"extra_body": {"stream": False}}, "must stay true"),
        ({"extra_body": {"stream_options": None}}, "must stay true"),
        ({"extra_body": {"stream_options": {"include_usage": False}}}, "must stay true"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], says: str):
    with pytest.raises(BadInput, match=says):
        body(**changes)


# --- what one event says


@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content"])
def test_generated_text_is_output_whatever_its_field(field: str):
    said = delta(**{field: " a"})

    assert said.output
    assert ((said.text, said.reasoning_text) if field == "content" else (said.reasoning_text, said.text)) == (" a", "")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "", "reasoning_content": None},
        {"content": None, "tool_calls": None},
        {"tool_calls": []},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "", "arguments": ""}}]},
    ],
)
def test_a_role_or_an_empty_delta_is_no_output(fields: dict[str, object]):
    said = delta(**fields)

    assert not said.output
    assert (said.text, said.reasoning_text, said.tool_text) == ("", "", "")


def test_a_tool_call_is_output_by_its_name_and_by_its_arguments():
    assert delta(tool_calls=[{"index": 0, "function": {"name": "add"}}]).tool_text == "add"
    said = delta(content=None, tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}])
    assert said.output
    assert said.tool_text == '{"a":'


def test_the_old_function_call_counts_only_where_it_stands_alone():
    call = {"name": "add", "arguments": "{"}

    assert delta(function_call=call).tool_text == "add{"
    assert delta(function_call=call, tool_calls=[{"index": 0, "function": call}]).tool_text == "add{"


def test_thoughts_sent_under_both_names_are_read_once():
    assert delta(reasoning="hm", reasoning_content="hm").reasoning_text == "hm"


def test_content_may_be_a_list_of_parts():
    said = delta(content=[{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}])

    assert said.text == "ab"


def test_a_text_completion_has_its_text_in_the_choice():
    said = event({"choices": [{"index": 0, "text": " a", "finish_reason": "length"}]})

    assert said.output
    assert (said.text, said.finish_reason, said.choices, said.finished) == (" a", "length", (0,), (0,))


def test_each_choice_keeps_its_index():
    said = event({"choices": [{"index": 1, "text": "a", "finish_reason": "stop"}, {"text": "b"}]})

    assert (said.choices, said.finished, said.text) == ((1, 0), (1,), "ab")


@pytest.mark.parametrize("reason", [None, "", 0, {"type": "length"}])
def test_only_a_name_is_a_finish_reason(reason: object):
    said = event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})

    assert (said.finish_reason, said.finished) == (None, ())


def test_token_ids_are_kept():
    assert event({"choices": [{"index": 0, "text": "", "token_ids": [5, 6]}]}).token_ids == (5, 6)
    assert event({"choices": [{"index": 0, "text": "", "token_ids": []}]}).token_ids == ()
    assert event({"choices": [{"index": 0, "text": "", "token_ids": None}]}).token_ids is None
    assert event({"choices": [{"index": 0, "text": "", "token_ids": ["5"]}]}).token_ids is None


def test_usage_is_read_with_its_details():
    said = usage(
        prompt_tokens=26,
        completion_tokens=40,
        prompt_tokens_details={"cached_tokens": 16, "created_cache_tokens": 0},
        completion_tokens_details={"reasoning_tokens": 10},
    )

    assert (said.prompt_tokens, said.completion_tokens, said.cached_tokens, said.reasoning_tokens) == (26, 40, 16, 10)


def test_reasoning_tokens_may_stand_at_the_top_of_usage():
    assert usage(completion_tokens=9, reasoning_tokens=3).reasoning_tokens == 3
    assert usage(reasoning_tokens=3, completion_tokens_details={"reasoning_tokens": 0}).reasoning_tokens == 0


def test_null_in_usage_is_not_zero():
    said = usage(prompt_tokens=0, completion_tokens=None, prompt_tokens_details=None, completion_tokens_details=None)

    assert (
        said.prompt_tokens,
        said.completion_tokens,
        said.cached_tokens,
        said.reasoning_tokens,
    ) == (0, None, None, None)


@pytest.mark.parametrize("count", [True, -1, 1.0, "7", [7], 2**63])
def test_what_is_no_count_is_unknown(count: object):
    assert usage(prompt_tokens=5, completion_tokens=count).completion_tokens is None


@pytest.mark.parametrize("value", [None, {}, {"total_tokens": 4}, [], 7, {"prompt_tokens": None}])
def test_usage_without_a_count_is_no_usage(value: object):
    assert event({"choices": [], "usage": value}).usage is None


def test_usage_may_stand_in_a_choice():
    said = event({"choices": [{"index": 0, "delta": {}, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}]})

    assert said.usage is not None
    assert said.usage.completion_tokens == 2


def test_the_servers_own_figures_are_kept_as_they_came():
    assert event({"choices": [], "timings": {"predicted_n": 12}}).timings == {"predicted_n": 12}
    assert event({"choices": [], "metrics": {"queue_time_ms": 0.5}}).timings == {"queue_time_ms": 0.5}
    times = {"prompt_time": 0.0, "prompt_tokens_per_sec": "Indeterminate", "total_time": 0.02}
    assert times == event({"choices": [], "usage": {"prompt_tokens": 5, **times}}).timings
    assert event({"choices": [], "usage": {"prompt_tokens": 5}}).timings is None


def test_model_and_id_are_the_servers_words():
    said = event({"id": "c1", "model": "m", "choices": []})

    assert (said.id, said.model) == ("c1", "m")
    assert event({"model_name": "exl3", "choices": []}).model == "exl3"


@pytest.mark.parametrize("data", [b"[DONE]", b" [DONE]", b"[DONE] ", b"[DONE]\n"])
def test_done_is_done_with_blanks_around_it(data: bytes):
    assert read_event(data).done


@pytest.mark.parametrize("data", [b"null", b"", b" "])
def test_nothing_is_no_error(data: bytes):
    assert WireEvent() == read_event(data)


@pytest.mark.parametrize("data", [b"{", b'{"a":', b"[]", b'"x"', b"7", b"[DONE", b"done", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_malformed(data: bytes):
    said = read_event(data)

    assert said.malformed
    assert not said.done


def test_a_blank_after_the_json_is_fine():
    assert read_event(b'{"choices":[{"index":0,"delta":{"content":"a"}}]} ').text == "a"


def test_bytes_that_are_no_character_are_replaced():
    assert read_event(b'{"choices":[{"index":0,"text":"a\xffb"}]}').text == "a\ufffdb"


def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_is_a_character():
    assert read_event(b'{"choices":[{"index":0,"text":"a\\ud83d"}]}').text == "a\ufffd"
    assert read_event(b'{"choices":[{"index":0,"text":"\\ud83d\\ude42"}]}').text == "\U0001f642"


def test_python_servers_may_write_nan():
    data = b'{"choices":[{"index":0,"text":"a","logprobs":{"top":[NaN, -Infinity]}}]}'

    assert read_event(data).text == "a"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"error": {"message": "engine stopped", "type": "server_error", "code": 500}}, "engine stopped"),
        ({"error": "`max_new_tokens` must be greater than 0"}, "`max_new_tokens` must be greater than 0"),
        ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, "too long"),
        ({"error": {"object": "error", "message": "too long", "code": 400}}, "too long"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body", "n"], "msg": "low"}, {"loc": ["body"], "msg": "x"}]}, "body.n: low; body: x"),
        ({"error": {"code": 7}}, '{"code": 7}'),
        ({"error": {"message": "", "type": "t"}}, '{"message": "", "type": "t"}'),
        ({"error": ["a", 1]}, '["a", 1]'),
    ],
)  # fmt: skip
def test_an_error_is_found_in_every_shape(value: object, message: str):
    said = event(value)

    assert said.error is not None
    assert message == said.error.message
    assert not said.malformed
    assert not said.output


def test_an_error_keeps_its_type_code_and_param():
    said = event({"error": {"message": "m", "type": "t", "code": "c", "param": "p"}}).error

    assert said is not None
    assert (said.message, said.type, said.code, said.param) == ("m", "t", "c", "p")


@pytest.mark.parametrize("extra", [{"error": None}, {"error": False}, {"error": {}}, {"detail": None}, {"detail": "x"}])
def test_a_chunk_that_mentions_no_error_is_none(extra: dict[str, object]):
    assert event({"choices": [{"index": 0, "text": "a"}], **extra}).error is None


@pytest.mark.parametrize("data", [b'{"message":"full","code":503}', b'{"error":"full"}', b'"full"', b"full"])
def test_an_event_named_error_is_an_error_whatever_it_holds(data: bytes):
    said = read_event(data, "error").error

    assert said is not None
    assert said.message == "full"


KEYS = [
    *("choices", "delta", "message", "content", "text", "tool_calls", "function", "name", "arguments", "index"),
    *("usage", "prompt_tokens", "completion_tokens", "prompt_tokens_details", "token_ids", "finish_reason"),
    *("error", "detail", "object", "loc", "msg", "timings"),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(json_values, st.sampled_from(["message", "error", "ping"]))
def test_no_json_breaks_the_reader(value: object, name: str):
    data = json.dumps(value).encode()
    said = read_event(data, name)
    whole = read_body(200, JSON, data)

    assert said.malformed == (name != "error" and not isinstance(value, dict | None))
    assert (whole.error is None) == (whole.event is not None)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.sampled_from([200, 302, 400, 500]), st.sampled_from(["", JSON, "text/html"]))
def test_no_bytes_break_the_reader(data: bytes, status: int, content_type: str):
    read_event(data)

    assert read_body(status, content_type, data).error is not None


# --- what a whole answer says


def completion(**choice: object) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    return json.dumps({"id": "c", "model": "m", "choices": [{"index": 0, **choice}], "usage": usage}).encode()


def test_a_plain_completion_reads_like_one_event():
    chat = read_body(200, JSON, completion(message={"role": "assistant", "content": "hi"}, finish_reason="stop"))
    text = read_body(200, "application/json; charset=utf-8", completion(text="hi", finish_reason="length"))

    for reading, reason in ((chat, "stop"), (text, "length")):
        assert (reading.error, reading.error_detail, reading.wire_error) == (None, "", None)
        assert reading.event is not None and reading.event.usage is not None
        assert ("hi", reason, 2) == (
            reading.event.text,
            reading.event.finish_reason,
            reading.event.usage.completion_tokens,
        )


@pytest.mark.parametrize(
    ("status", "content_type", "data", "error", "detail"),
    [
        (200, JSON, b'{"error":{"message":"quota"}}', "in_band_error", "quota"),
        (200, "text/plain", b'{"error":"quota"}', "in_band_error", "quota"),
        (200, JSON, completion(text="a", finish_reason="abort"), "in_band_error", "finish_reason abort"),
        (200, JSON, completion(text="a", finish_reason=None), "incomplete_stream", "no finish_reason"),
        (200, JSON, b'{"object":"list","data":[]}', "protocol_error", 'without choices: {"object":"list"'),
        (200, JSON, b'{"choices":[', "protocol_error", 'not a JSON object: {"choices":['),
        (200, JSON, b"", "protocol_error", "an empty body"),
        (200, "text/html", b"<html><title>Sign in</title><p>x", "bad_content_type", "text/html: Sign in"),
        (200, "", b"ok", "bad_content_type", "no content type: ok"),
        (302, "text/html", b"<!DOCTYPE html><body><h1>Found</h1></body>", "redirect", "Found"),
        (307, "", b"", "redirect", "an empty body"),
        (400, JSON, b'{"object":"error","message":"too long","code":400}', "http_error", "too long"),
        (401, JSON, b'{"error":"Unauthorized"}', "http_error", "Unauthorized"),
        (404, JSON, b'{"detail":"Not Found"}', "http_error", "Not Found"),
        (429, JSON, b'{"message":"slow down"}', "http_error", "slow down"),
        (500, "text/plain", b"Internal Server Error\n", "http_error", "Internal Server Error"),
        (502, "text/html", b"<html><style>p{}</style>Bad <b>gateway</b></html>", "http_error", "Bad gateway"),
        (503, "", b"", "http_error", "an empty body"),
        (503, JSON, b'{"status":"loading"}', "http_error", '{"status":"loading"}'),
        (204, "", b"", "http_error", "an empty body"),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_stream_is_named_by_what_went_wrong(
    status: int, content_type: str, data: bytes, error: str, detail: str
):
    reading = read_body(status, content_type, data)

    assert error == reading.error
    assert detail in reading.error_detail
    assert reading.event is None


def test_a_message_is_cut_at_a_thousand_characters():
    for data in (
        b"x" * 5000,
        json.dumps({"error": "x" * 5000}).encode(),
        json.dumps({"detail": ["x" * 900] * 9}).encode(),
    ):
        assert len(read_body(500, JSON, data).error_detail) == 1000
