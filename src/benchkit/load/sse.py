"""Bytes of an event stream → server-sent events, however the network cut them."""

from __future__ import annotations

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """One dispatched event: its type (`message` where none is named) and its data, lines joined by LF."""

    event: str
    data: bytes


class SseDecoder:
    """An incremental decoder of `text/event-stream` (WHATWG HTML, section 9.2.6).

    Lines end at LF, CR LF or CR and nowhere else: U+2028 and its kin are text. The cost is linear in the
    bytes, whatever the size of an event or of the reads. `id` and `retry` are read and dropped, since a
    measured request is never reconnected.
    """

    __slots__ = ("_at_start", "_data", "_event", "_partial", "_skip_lf")

    def __init__(self) -> None:
        self._at_start = True  # a byte order mark may still come
        self._skip_lf = False  # the last byte was a CR: an LF right after it ends the same line
        self._partial: list[bytes] = []  # pieces of a line whose end has not come
        self._data: list[bytes] = []  # data lines of an event whose blank line has not come
        self._event = ""

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that this read completed, in order; often several, often none."""
        if not data:
            return []
        if self._at_start:
            data = self._without_bom(data)
        if self._skip_lf and data:
            self._skip_lf = False
            if data[0] == 0x0A:
                data = data[1:]
        if not self._partial and not self._data and not self._event:
            events = _whole_events(data)
            if events is not None:
                return events
        has_cr = b"\r" in data
        if not has_cr and b"\n" not in data:
            if data:
                self._partial.append(data)
            return []
        if self._partial:
            self._partial.append(data)
            data = b"".join(self._partial)
        if has_cr:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        rest = lines.pop()
        self._partial = [rest] if rest else []
        return self._take(lines)

    def end(self) -> list[SseEvent]:
        """At most one event: what had come of one that was never closed by a blank line.

        A browser would drop it. Here the caller judges whether it was whole.
        """
        last = b"".join(self._partial)
        self._partial = []
        # A blank line closes the event, whether or not the line before it had ended.
        return self._take([last, b""])

    def _without_bom(self, data: bytes) -> bytes:
        """The bytes after a byte order mark, or nothing while it could still be one."""
        head = b"".join(self._partial) + data
        if len(head) < len(_BOM) and _BOM.startswith(head):
            self._partial = [head]
            return b""
        self._partial = []
        self._at_start = False
        return head.removeprefix(_BOM)

    def _take(self, lines: list[bytes]) -> list[SseEvent]:
        """Reads whole lines; a blank one dispatches the event before it."""
        events: list[SseEvent] = []
        data = self._data
        for line in lines:
            if not line:
                if data:
                    whole = data[0] if len(data) == 1 else b"\n".join(data)
                    events.append(SseEvent(self._event or "message", whole))
                    data = self._data = []
                self._event = ""
                continue
            if line.startswith(b"data: "):  # nearly every line there is
                data.append(line[6:])
                continue
            field, _, value = line.partition(b":")
            if value[:1] == b" ":
                value = value[1:]
            if field == b"data":
                data.append(value)
            elif field == b"event":
                self._event = value.decode("utf-8", "replace")
        return events


def _whole_events(data: bytes) -> list[SseEvent] | None:
    """The events of a read that holds nothing but whole `data: …` lines, each with its blank line; else None.

    Most reads of most servers are like that, and then one split does the work of the line loop.
    """
    if not (data.startswith(b"data: ") and data.endswith(b"\n\n")) or b"\r" in data:
        return None
    parts = data[6:-2].split(b"\n\ndata: ")
    if data.count(b"\n") != 2 * len(parts):  # a comment, a second line, another field in between
        return None
    return [SseEvent("message", part) for part in parts]
