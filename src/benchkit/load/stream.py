"""The stamped bytes of one streamed answer → when its output came, how many tokens it was, how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from benchkit.load.sse import SseDecoder, SseEvent
from benchkit.load.wire import ABORTED, IN_BAND_ERROR, INCOMPLETE_STREAM, PROTOCOL_ERROR, Usage, WireEvent, read_event

MAX_BYTES: Final = 256 * 1024 * 1024
"""How many bytes of one answer are read before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReading:
    """One streamed answer, read to its end. Stamps are those given to the reader, in ns; None is "not known".

    An output event carries generated text (content, reasoning, a tool call), token ids, or a rise of running
    usage. Of a failure the tokens are unknown: what had been counted by then is not what was asked for.
    """

    t_first_ns: int | None  # first output event
    t_last_ns: int | None  # last output event
    t_end_ns: int
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    reasoning_tokens: int | None  # part of completion_tokens
    token_source: str  # usage | none
    first_event_tokens: int | None  # n1, where running usage or token ids tell it
    events: int  # output events
    data_events: int  # all events with data, `[DONE]` too
    event_ns: tuple[int, ...]  # arrival of each output event
    event_tokens: tuple[int, ...] | None  # tokens of each output event, where they add up to completion_tokens
    finish_reason: str | None
    done_seen: bool
    error: str | None  # a class of benchkit.load.wire
    error_detail: str
    text: str
    reasoning_text: str
    tool_text: str
    server_timings: dict[str, Any] | None
    model: str | None
    response_id: str | None


class StreamReader:
    """Reads one answer of status 200 while it arrives; `end` or `broken` closes it and gives the reading.

    A success has no error and a finish_reason for every choice. Neither `[DONE]` nor usage is needed for that:
    without usage the tokens are unknown, and events never stand in for them.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.first_output_ns: int | None = None
        """Arrival of the first output event."""
        self.last_event_ns: int | None = None
        """Arrival of the last event with data, output or not."""
        self.error: str | None = None
        """The class of the first failure found, None so far."""

        self._max_bytes = max_bytes
        self._bytes = 0
        self._read_ns = 0  # stamp of the last read
        self._decoder = SseDecoder()
        self._detail = ""
        self._data_events = 0
        self._done = False
        self._choices: set[int] = set()
        self._finished: set[int] = set()
        self._finish_reason: str | None = None
        self._usage_at_finish = False
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._reasoning_tokens: int | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool: list[str] = []
        self._timings: dict[str, Any] | None = None
        self._model: str | None = None
        self._id: str | None = None
        # One entry per output event:
        self._event_ns: list[int] = []
        self._by_usage: list[int | None] = []
        self._by_ids: list[int | None] = []
        self._running = _RunningUsage()

    @property
    def finished(self) -> bool:
        """True once nothing of worth can follow: every choice finished, and then `[DONE]` or usage came.

        A connection that is lost after that has lost nothing: close with `end` rather than `broken`.
        """
        return self._all_finished and (self._done or self._usage_at_finish)

    def feed(self, t_ns: int, data: bytes) -> None:
        """Takes one read. Every event that it completes arrived at `t_ns`."""
        self._bytes += len(data)
        if self._bytes > self._max_bytes:
            self._decoder = SseDecoder()  # lets go of what it holds
            self._fail(PROTOCOL_ERROR, f"response larger than {self._max_bytes} bytes")
            return
        self._read_ns = t_ns
        for event in self._decoder.feed(data):
            self._take(t_ns, event)

    def end(self, t_ns: int) -> StreamReading:
        """The reading, after the body ended as its framing said it would."""
        tail = self._take_tail()
        if tail:
            self._fail(INCOMPLETE_STREAM, f"cut in the middle of an event: {_shown(tail)}")
        elif not self._all_finished:
            self._fail(INCOMPLETE_STREAM, self._what_is_missing())
        elif self._finish_reason in ABORTED:
            self._fail(IN_BAND_ERROR, f"finish_reason {self._finish_reason}")
        return self._reading(t_ns)

    def broken(self, t_ns: int, error: str, detail: str) -> StreamReading:
        """The reading, after the connection was lost or the client gave up.

        What the server had said before, an error event for one, is the better reason and stands.
        """
        self._take_tail()
        self._fail(error, detail)
        return self._reading(t_ns)

    @property
    def _all_finished(self) -> bool:
        return bool(self._finished) and self._finished >= self._choices

    def _fail(self, error: str, detail: str) -> None:
        """Notes a failure; the first one stands."""
        if self.error is None:
            self.error, self._detail = error, detail

    def _what_is_missing(self) -> str:
        if not self._data_events:
            return "the stream held no event"
        missing = sorted(self._choices - self._finished) if len(self._choices) > 1 else []
        which = f" for choice {missing[0]}" if missing else ""
        return f"{'[DONE] without' if self._done else 'the stream ended without'} a finish_reason{which}"

    def _take_tail(self) -> bytes:
        """Takes the event that no blank line closed, if it is whole; returns it if it was cut."""
        for event in [] if self._done else self._decoder.end():
            if not read_event(event.data, event.event).malformed:
                # Its bytes came with the last read, however long the server then took to close.
                self._take(self._read_ns, event)
            elif not b"[DONE]".startswith(event.data):  # half of a mark that nothing depends on
                return event.data
        return b""

    def _take(self, t_ns: int, event: SseEvent) -> None:
        if not event.data:
            return
        self._data_events += 1
        self.last_event_ns = t_ns
        if self._done:
            return
        said = read_event(event.data, event.event)
        if said.done:
            self._done = True
        elif said.malformed:
            # Events of a name of their own (pings, extensions) need not speak JSON.
            if event.event == "message":
                self._fail(PROTOCOL_ERROR, f"event {self._data_events} is no JSON object: {_shown(event.data)}")
        else:
            self._take_said(t_ns, said)

    def _take_said(self, t_ns: int, said: WireEvent) -> None:
        if said.error:
            self._fail(IN_BAND_ERROR, said.error.message)
        self._choices.update(said.choices)
        self._finished.update(said.finished)
        self._finish_reason = said.finish_reason or self._finish_reason
        self._model = self._model or said.model
        self._id = self._id or said.id
        self._timings = said.timings or self._timings
        if said.usage:
            self._take_usage(said.usage)
        if said.text:
            self._text.append(said.text)
        if said.reasoning_text:
            self._reasoning.append(said.reasoning_text)
        if said.tool_text:
            self._tool.append(said.tool_text)
        tokens = self._running.tokens_in(said)
        if said.output or said.token_ids or tokens:
            if self.first_output_ns is None:
                self.first_output_ns = t_ns
            self._event_ns.append(t_ns)
            self._by_usage.append(tokens)
            self._by_ids.append(len(said.token_ids) if said.token_ids else None)

    def _take_usage(self, usage: Usage) -> None:
        """Keeps the newest count of each kind: usage is a running total, never to be added up."""
        if usage.prompt_tokens is not None:
            self._prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self._completion_tokens = usage.completion_tokens
        if usage.cached_tokens is not None:
            self._cached_tokens = usage.cached_tokens
        if usage.reasoning_tokens is not None:
            self._reasoning_tokens = usage.reasoning_tokens
        self._usage_at_finish = self._usage_at_finish or self._all_finished

    def _tokens_of_first(self) -> int | None:
        """Tokens of the first output event: those up to it by running usage, or those whose ids it lists."""
        if not self._event_ns or len(self._choices) > 1:
            return None
        return self._by_usage[0] or self._by_ids[0]

    def _tokens_by_event(self, completion_tokens: int | None) -> tuple[int, ...] | None:
        """Tokens of each output event, by the first account that leaves no event out and adds up."""
        # Running usage of several choices is per choice on one server and a sum on another.
        if not self._event_ns or len(self._choices) > 1:
            return None
        for account in (self._by_usage, self._by_ids):
            tokens = tuple(count for count in account if count is not None)
            if len(tokens) == len(account) and sum(tokens) == completion_tokens:
                return tokens
        return None

    def _reading(self, t_ns: int) -> StreamReading:
        ok = self.error is None
        completion_tokens = self._completion_tokens if ok else None
        return StreamReading(
            t_first_ns=self.first_output_ns,
            t_last_ns=self._event_ns[-1] if self._event_ns else None,
            t_end_ns=t_ns,
            prompt_tokens=self._prompt_tokens if ok else None,
            completion_tokens=completion_tokens,
            cached_tokens=self._cached_tokens if ok else None,
            reasoning_tokens=self._reasoning_tokens if ok else None,
            token_source="none" if completion_tokens is None else "usage",
            first_event_tokens=self._tokens_of_first() if ok else None,
            events=len(self._event_ns),
            data_events=self._data_events,
            event_ns=tuple(self._event_ns),
            event_tokens=self._tokens_by_event(completion_tokens),
            finish_reason=self._finish_reason,
            done_seen=self._done,
            error=self.error,
            error_detail=self._detail,
            text="".join(self._text),
            reasoning_text="".join(self._reasoning),
            tool_text="".join(self._tool),
            server_timings=self._timings,
            model=self._model,
            response_id=self._id,
        )


def _shown(data: bytes) -> str:
    """The beginning of an event that cannot be read."""
    return data[:200].decode("utf-8", "replace")


class _RunningUsage:
    """Tells how many tokens an event brought, on servers that send a running count of them with every event."""

    def __init__(self) -> None:
        self._runs = True  # nothing speaks against it yet
        self._told = False  # some event had a count, be it 0
        self._counted = 0  # up to the last output event

    def tokens_in(self, said: WireEvent) -> int | None:
        """Tokens since the output event before; None where the count is missing or is no running one.

        More than 0 makes an output event of one without text: the EOS token, half a character, markup that a
        parser swallowed. That takes a count in an earlier event, for the first count of all may be the total.
        """
        count = said.usage.completion_tokens if said.usage else None
        told, self._told = self._told, self._told or count is not None
        generated = said.output or bool(said.token_ids)
        if generated and not count:
            self._runs = False  # text uncounted, or counted as 0 (Ollama): usage is a total that comes at the end
        if not count or not said.choices or not self._runs or not (generated or told):
            return None
        tokens = count - self._counted
        if tokens < 0:
            self._runs = False
            return None
        self._counted = count
        return tokens
