"""Request bodies for OpenAI-compatible servers, and what one event or one whole answer says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from benchkit.errors import BadInput

# --- the classes of failure: the `error` of a request's record ------------------------------------------

IN_BAND_ERROR: Final = "in_band_error"
"""Status 200, then the server said that it failed: an error object, or a finish_reason abort or error."""
INCOMPLETE_STREAM: Final = "incomplete_stream"
"""The body ended in good order without a finish_reason for every choice; `[DONE]` alone proves nothing."""
PROTOCOL_ERROR: Final = "protocol_error"
"""What came cannot be read: an event that is no JSON object, no choices, more bytes than allowed."""
HTTP_ERROR: Final = "http_error"
"""A status other than 200 that is no redirect."""
BAD_CONTENT_TYPE: Final = "bad_content_type"
"""Status 200 with something that is neither an event stream nor JSON, such as a proxy's login page."""
REDIRECT: Final = "redirect"
"""A 3xx status. Never followed: the measured server would be another one than the arm names."""
CONNECT_ERROR: Final = "connect_error"
"""No connection: refused, unresolved, or TLS failed."""
TIMEOUT: Final = "timeout"
"""One of the protocol's limits passed: connect, first token, silence between events, or the whole request."""
DISCONNECTED: Final = "disconnected"
"""The connection was lost before the answer had ended."""

ABORTED: Final = frozenset({"abort", "error"})
"""Finish reasons that are no success: SGLang and vLLM give them to a request that the engine dropped."""

_DETAIL_CHARS: Final = 1000  # FastAPI repeats the whole request in its validation errors


# --- what is sent ---------------------------------------------------------------------------------------

# What makes a server go on from the last assistant message instead of opening a new turn. vLLM, llama.cpp and
# TabbyAPI refuse continue_final_message while add_generation_prompt keeps its default; SGLang does not know the
# second. An unknown server gets the message alone: transformers answers 422 to any field it does not know.
_BOTH: Final = {"continue_final_message": True, "add_generation_prompt": False}
_CONTINUE: Final[dict[str, dict[str, bool]]] = {
    "vllm": _BOTH,
    "llamacpp": _BOTH,
    "tabbyapi": _BOTH,
    "sim": _BOTH,
    "sglang": {"continue_final_message": True},
}


def request_body(
    *,
    api: str,
    engine: str,
    model: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    max_tokens_field: str = "max_tokens",
    system: str = "",
    assistant_prefix: str = "",
    ignore_eos: bool = False,
    min_tokens: bool = False,
    continuous_usage: bool = False,
    sampling: Mapping[str, Any] | None = None,
    seed: int | None = None,
    extra_body: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON values of one streamed request that asks for usage.

    `api` is "chat" or "completions", `prompt` a text or (completions only) token ids. `max_tokens_field` names
    the one field that carries `max_tokens`: "max_tokens" or "max_completion_tokens", never both. `min_tokens`
    asks for no fewer tokens than that either, `continuous_usage` for running usage in every event. `extra_body`
    is merged last, nested objects key by key.

    Raises:
        BadInput: token ids, a system text or an assistant prefix where the api cannot carry them, or an
            `extra_body` that would switch off the stream or its usage.

    """
    body: dict[str, Any] = {"model": model}
    if api == "chat":
        if not isinstance(prompt, str):
            raise BadInput("the chat API takes no token ids: send text, or set api = completions")
        body["messages"] = _messages(prompt, system, assistant_prefix)
        if assistant_prefix:
            body |= _CONTINUE.get(engine, {})
    elif api == "completions":
        if system or assistant_prefix:
            raise BadInput("the completions API has no roles: system and assistant_prefix need api = chat")
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    else:
        raise BadInput(f"api: expected chat or completions, found {api!r}")
    if max_tokens_field not in ("max_tokens", "max_completion_tokens"):
        raise BadInput(f"expected max_tokens or max_completion_tokens, found {max_tokens_field!r}")
    body[max_tokens_field] = max_tokens
    if min_tokens:
        body["min_tokens"] = max_tokens
    if ignore_eos:
        body["ignore_eos"] = True
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if continuous_usage:
        body["stream_options"]["continuous_usage_stats"] = True
    body |= sampling or {}
    if seed is not None:
        body["seed"] = seed
    body = merged(body, extra_body or {})
    options = body["stream_options"]
    asks_usage = isinstance(options, dict) and options.get("include_usage") is True
    if body["stream"] is not True or not asks_usage:
        raise BadInput("extra_body: stream and stream_options.include_usage must stay true to be measured")
    return body


def merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A new dict of both: where both hold an object they are merged key by key, elsewhere `extra` wins."""
    out = dict(base)
    for key, value in extra.items():
        mine = out.get(key)
        out[key] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return out


def _messages(prompt: str, system: str, assistant_prefix: str) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    if assistant_prefix:
        messages.append({"role": "assistant", "content": assistant_prefix})
    return messages


# --- what is received -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts in the server's own words. None is "not told", which is not zero."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    reasoning_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WireError:
    """A server's account of what went wrong."""

    message: str
    type: str | None
    code: str | int | None
    param: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WireEvent:
    """What one event says: output, counts, an end, an error, or nothing of use.

    `output` is true for generated text of any kind: content, reasoning, a tool call's name or arguments.
    A role, an empty delta and token ids without text are not.
    """

    malformed: bool = False  # no JSON object (and not `null`, which says nothing)
    done: bool = False  # the `[DONE]` mark
    output: bool = False
    text: str = ""
    reasoning_text: str = ""
    tool_text: str = ""
    token_ids: tuple[int, ...] | None = None
    usage: Usage | None = None
    choices: tuple[int, ...] = ()  # the index of each choice in this event
    finished: tuple[int, ...] = ()  # those of them that have a finish_reason
    finish_reason: str | None = None
    error: WireError | None = None
    timings: dict[str, Any] | None = None  # the server's own figures about this request, as they came
    model: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReading:
    """What an answer that is no event stream says: an error class and message, or one event with it all."""

    error: str | None
    error_detail: str
    wire_error: WireError | None
    event: WireEvent | None


_DONE_EVENT: Final = WireEvent(done=True)
_MALFORMED_EVENT: Final = WireEvent(malformed=True)
_EMPTY_EVENT: Final = WireEvent()
_FIRST_CHOICE: Final = (0,)


def read_event(data: bytes, name: str = "message") -> WireEvent:
    """What the data of one server-sent event says. Never raises: what cannot be read is `malformed`.

    An event that is named `error` is an error, whatever its data look like.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        stripped = data.strip()
        if stripped == b"[DONE]":
            return _DONE_EVENT
        if not stripped:
            return _EMPTY_EVENT
        try:
            value = _loads_leniently(data)
        except (ValueError, RecursionError):
            value = stripped.decode("utf-8", "replace")
    if name == "error":
        said = _error_in(value) if isinstance(value, dict) else None
        return WireEvent(error=said or _error_of(value))
    if isinstance(value, dict):
        return _event_of(value)
    return _EMPTY_EVENT if value is None else _MALFORMED_EVENT  # llama.cpp opens a batch with `data: null`


def read_body(status: int, content_type: str, body: bytes) -> BodyReading:
    """What an answer that is no event stream says.

    A plain completion (`stream: false`) comes back as `event` with no error; whether it was asked for is the
    caller's to judge.
    """
    try:
        value = _loads(body)
    except (ValueError, RecursionError):
        value = None
    obj = value if isinstance(value, dict) else {}
    if status != 200:
        failure = REDIRECT if 300 <= status < 400 else HTTP_ERROR
        said = _error_in(obj) or (_error_of(obj) if "message" in obj else None)
        return _failed(failure, said.message if said else _readable(body), said)
    said = _error_in(obj)
    if said:
        return _failed(IN_BAND_ERROR, said.message, said)
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        return _failed(BAD_CONTENT_TYPE, f"{kind or 'no content type'}: {_readable(body)}")
    if not obj:
        return _failed(PROTOCOL_ERROR, f"not a JSON object: {_readable(body)}")
    event = _event_of(obj)
    if not event.choices:
        return _failed(PROTOCOL_ERROR, f"an answer without choices: {_readable(body)}")
    if not set(event.choices) <= set(event.finished):
        return _failed(INCOMPLETE_STREAM, "no finish_reason")
    if event.finish_reason in ABORTED:
        return _failed(IN_BAND_ERROR, f"finish_reason {event.finish_reason}")
    return BodyReading(error=None, error_detail="", wire_error=None, event=event)


def _failed(error: str, detail: str, said: WireError | None = None) -> BodyReading:
    return BodyReading(error=error, error_detail=detail[:_DETAIL_CHARS], wire_error=said, event=None)


def _loads(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return _loads_leniently(data)


def _loads_leniently(data: bytes) -> object:
    """Reads what strict JSON forbids and servers send: bad UTF-8, half surrogates, NaN and Infinity."""
    value = json.loads(data.decode("utf-8", "replace"))
    # Half a surrogate pair gets through json but into no file: each becomes U+FFFD.
    text = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    again: object = json.loads(text)
    return again


def _event_of(obj: dict[str, Any]) -> WireEvent:
    """Reads one chunk, or one whole completion, whose `message` stands where a chunk has its `delta`."""
    usage = obj.get("usage")
    text = reasoning = tool = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    indexes: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    choices = obj.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        index = choice.get("index")
        here = (index,) if index and isinstance(index, int) else _FIRST_CHOICE
        indexes += here
        delta = choice.get("delta") or choice.get("message")
        if isinstance(delta, dict):
            text += _text(delta.get("content"))
            # Some servers send the same thoughts under both names.
            reasoning += _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
            tool += _tool_text(delta)
        else:
            text += _text(choice.get("text"))
        ids = choice.get("token_ids")
        if isinstance(ids, list) and all(type(i) is int for i in ids):
            token_ids = (token_ids or ()) + tuple(ids)
        reason = choice.get("finish_reason")
        if reason and isinstance(reason, str):
            finish_reason = reason
            finished += here
        usage = usage or choice.get("usage")  # some servers put it into the last choice instead
    timings = obj.get("timings") or obj.get("metrics") or obj.get("stats")  # llama.cpp; vLLM; NIM
    return WireEvent(
        output=bool(text or reasoning or tool),
        text=text,
        reasoning_text=reasoning,
        tool_text=tool,
        token_ids=token_ids,
        usage=_usage_of(usage) if isinstance(usage, dict) else None,
        choices=indexes,
        finished=finished,
        finish_reason=finish_reason,
        error=_error_in(obj),
        timings=timings if isinstance(timings, dict) else _times_in(usage),
        model=_str_or_none(obj.get("model") or obj.get("model_name")),  # the latter: TabbyAPI's completions
        id=_str_or_none(obj.get("id")),
    )


def _text(value: object) -> str:
    """A content field: a string, or a list of parts that carry `text`."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_text(part.get("text")) for part in value if isinstance(part, dict))
    return ""


def _tool_text(delta: dict[str, Any]) -> str:
    """Names and arguments of a delta's tool calls, or of the older `function_call` where it stands alone."""
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        functions = [call.get("function") for call in calls if isinstance(call, dict)]
    else:
        functions = [delta.get("function_call")]
    return "".join(_text(f.get("name")) + _text(f.get("arguments")) for f in functions if isinstance(f, dict))


def _usage_of(usage: dict[str, Any]) -> Usage | None:
    """The counts of a usage object, or None where it holds not one."""
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    cached = _count_in(usage.get("prompt_tokens_details"), "cached_tokens")
    reasoning = _count_in(usage.get("completion_tokens_details"), "reasoning_tokens")
    if reasoning is None:
        reasoning = _count(usage.get("reasoning_tokens"))  # SGLang
    if prompt is completion is cached is reasoning is None:
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached, reasoning_tokens=reasoning)


def _count_in(details: object, key: str) -> int | None:
    return _count(details.get(key)) if isinstance(details, dict) else None


def _count(value: object) -> int | None:
    """A count of tokens, or None for anything that cannot be one."""
    # Not isinstance: True is an int too.
    return value if type(value) is int and 0 <= value < 2**63 else None


def _times_in(usage: object) -> dict[str, Any] | None:
    """TabbyAPI's times and rates, which stand in the usage object."""
    if not isinstance(usage, dict):
        return None
    return {k: v for k, v in usage.items() if k.endswith(("_time", "_per_sec"))} or None


def _str_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


# --- errors in their many shapes ------------------------------------------------------------------------


def _error_in(obj: dict[str, Any]) -> WireError | None:
    """The error an object carries: under `error`, flat (SGLang), or FastAPI's `detail`; None for none."""
    error = obj.get("error")
    if error:
        return _error_of(error)
    if obj.get("object") == "error":
        return _error_of(obj)
    detail = obj.get("detail")
    if detail and "choices" not in obj:
        return WireError(message=_detail_text(detail), type=None, code=None, param=None)
    return None


def _error_of(error: object) -> WireError:
    """An error's own object, or whatever a server put in its place."""
    if not isinstance(error, dict):
        return WireError(message=_as_text(error), type=None, code=None, param=None)
    code = error.get("code")
    return WireError(
        message=_as_text(error.get("message") or error),
        type=_str_or_none(error.get("type")),
        code=code if isinstance(code, str) or type(code) is int else None,
        param=_str_or_none(error.get("param")),
    )


def _detail_text(detail: object) -> str:
    """FastAPI's detail: a sentence, or a list of validation errors, each with the place it was found at."""
    if not isinstance(detail, list):
        return _as_text(detail)
    return "; ".join(_validation_error(item) for item in detail)[:_DETAIL_CHARS]


def _validation_error(item: object) -> str:
    if not isinstance(item, dict) or not isinstance(item.get("loc"), list) or "msg" not in item:
        return _as_text(item)
    return f"{'.'.join(map(str, item['loc']))}: {_as_text(item['msg'])}"


def _as_text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:_DETAIL_CHARS]


_TAG: Final = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.IGNORECASE | re.DOTALL)
_TITLE: Final = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


def _readable(body: bytes) -> str:
    """The first words of a body for a person: of HTML its title or else its text, of text the text itself."""
    text = body[:20_000].decode("utf-8", "replace").lstrip()
    if text[:9].lower() == "<!doctype" or text[:5].lower() == "<html":
        title = _TITLE.search(text)
        text = title[1] if title else _TAG.sub(" ", text)
    return " ".join(text.split())[:_DETAIL_CHARS] or "an empty body"
