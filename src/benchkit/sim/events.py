"""The bytes of an answer: chat and text chunks, usage, errors, and one JSON object for those that do not stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import orjson

from benchkit.sim.profile import Profile
from benchkit.sim.tokens import WORDS

DONE: Final = b"data: [DONE]\n\n"
_WORD_BYTES: Final = tuple(word.encode() for word in WORDS)  # plain ASCII: nothing to escape in JSON
WIDE_CHARACTER: Final = " \N{SLIGHTLY SMILING FACE}"
"""One toy token whose character takes four bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request asked for, after all checks."""

    chat: bool
    prompt_ids: list[int]
    max_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    ignore_eos: bool
    token_ids: bool  # return_token_ids: the choice carries the output's ids
    fault: str | None


class Answer:
    """One request's answer in bytes, chunk by chunk or whole."""

    def __init__(self, profile: Profile, wanted: Wanted, *, number: int, created: int, word_ids: list[int]) -> None:
        self._chat = wanted.chat
        self._prompt_tokens = len(wanted.prompt_ids)
        self._reasoning = profile.reasoning if wanted.chat else 0
        self._event_per_token = profile.event_per_token
        self._word_ids = word_ids if wanted.token_ids else None
        self._cached: int | None = None
        self._total = 0
        mode = "none" if wanted.fault == "no_usage" else profile.usage_mode
        asked = wanted.include_usage
        self._usage_each = mode == "forced" or (mode == "final" and asked and wanted.continuous_usage)
        self._usage_with_finish = mode == "finish" and asked
        self._usage_last = mode == "forced" or (mode == "final" and asked)
        self._usage_whole = mode != "none"
        self._finish = wanted.fault != "no_finish"
        self._id = f"{'chatcmpl' if wanted.chat else 'cmpl'}-sim-{number}"
        self._created = created
        self._model = profile.model
        kind = "chat.completion.chunk" if wanted.chat else "text_completion"
        opening = orjson.dumps({"id": self._id, "object": kind, "created": created, "model": profile.model})
        self._opening = b"data: " + opening[:-1] + b',"choices":['

    def cached(self, tokens: int | None) -> None:
        """Tell how many prompt tokens came from the cache; None keeps usage silent about it."""
        self._cached = tokens

    def role(self) -> bytes:
        """The chunk that opens a chat and carries no token; nothing for a text completion."""
        if not self._chat:
            return b""
        return self._chunk(b'{"role":"assistant","content":""}', b"null", 0, 0, usage=self._usage_each)

    def tokens(self, start: int, count: int, finish_reason: str | None, *, wide: bool = False) -> bytes:
        """The events of `count` tokens after `start` ones; `wide` puts a 4-byte character in place of the first."""
        if self._event_per_token and count > 1:
            last = start + count - 1
            return b"".join(
                self._tokens(i, 1, finish_reason if i == last else None, wide=wide and i == start)
                for i in range(start, start + count)
            )
        return self._tokens(start, count, finish_reason, wide=wide)

    def closing(self) -> bytes:
        """The chunk without choices that carries usage, where it is due."""
        return self._opening + b"]" + self._usage(self._total) + b"}\n\n" if self._usage_last else b""

    def whole(self, count: int, finish_reason: str) -> bytes:
        """The answer of a request that does not stream."""
        thoughts = min(count, self._reasoning)
        text = b"".join(self._words(thoughts, count)).decode()
        choice: dict[str, object] = {"index": 0, "logprobs": None}
        if self._chat:
            message = {"role": "assistant", "content": text}
            if self._reasoning:
                message["reasoning_content"] = b"".join(self._words(0, thoughts)).decode()
            choice["message"] = message
        else:
            choice["text"] = text
        choice["finish_reason"] = finish_reason if self._finish else None
        if self._word_ids is not None:
            choice["token_ids"] = self._ids(0, count)
        kind = "chat.completion" if self._chat else "text_completion"
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": [choice]}
        return orjson.dumps(head)[:-1] + (self._usage(count) if self._usage_whole else b"") + b"}"

    def _tokens(self, start: int, count: int, finish_reason: str | None, *, wide: bool) -> bytes:
        end = start + count
        self._total = end
        if not self._chat:
            delta = b'"text":"' + b"".join(self._words(start, end, wide=wide)) + b'"'
        else:
            parts = []
            if start < self._reasoning:
                words = self._words(start, min(end, self._reasoning), wide=wide)
                parts.append(b'"reasoning_content":"' + b"".join(words) + b'"')
            if end > self._reasoning:
                words = self._words(max(start, self._reasoning), end, wide=wide and start >= self._reasoning)
                parts.append(b'"content":"' + b"".join(words) + b'"')
            delta = b"{" + b",".join(parts) + b"}"
        finish = b"null" if finish_reason is None or not self._finish else b'"' + finish_reason.encode() + b'"'
        usage = self._usage_each or (self._usage_with_finish and finish_reason is not None)
        return self._chunk(delta, finish, start, end, usage=usage)

    def _chunk(self, delta: bytes, finish: bytes, start: int, end: int, *, usage: bool) -> bytes:
        ids = b"" if self._word_ids is None else b',"token_ids":' + orjson.dumps(self._ids(start, end))
        return b"".join((
            self._opening,
            b'{"index":0,"delta":' if self._chat else b'{"index":0,',
            delta,
            b',"logprobs":null,"finish_reason":',
            finish,
            ids,
            b"}]",
            self._usage(end) if usage else b"",
            b"}\n\n",
        ))  # fmt: skip

    def _usage(self, completion_tokens: int) -> bytes:
        """The member `,"usage":{…}` after so many tokens of output."""
        p, c = self._prompt_tokens, completion_tokens
        cached = b"" if self._cached is None else b',"prompt_tokens_details":{"cached_tokens":%d}' % self._cached
        thought = b""
        if self._reasoning:
            thought = b',"completion_tokens_details":{"reasoning_tokens":%d}' % min(c, self._reasoning)
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b%b}' % (
            p, p + c, c, cached, thought,
        )  # fmt: skip

    def _words(self, start: int, end: int, *, wide: bool = False) -> list[bytes]:
        words = [_WORD_BYTES[i % len(_WORD_BYTES)] for i in range(start, end)]
        if wide and words:
            words[0] = WIDE_CHARACTER.encode()
        return words

    def _ids(self, start: int, end: int) -> list[int]:
        assert self._word_ids is not None
        return [self._word_ids[i % len(self._word_ids)] for i in range(start, end)]


def error_body(message: str, *, status: int, kind: str, param: str | None = None) -> bytes:
    """An error object in the shape that vLLM answers with."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def error_event(message: str) -> bytes:
    """The same object as an event inside a 200 stream."""
    return b"data: " + error_body(message, status=500, kind="InternalServerError") + b"\n\n"


def padded(event: bytes, size: int) -> bytes:
    """The event with a member of filler, so that its data line is at least `size` bytes long."""
    missing = size - len(event)
    filler = b',"sim_padding":"' + b"x" * max(0, missing) + b'"'
    return event.removesuffix(b"}\n\n") + filler + b"}\n\n"
