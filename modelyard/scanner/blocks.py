"""The events of one reply: one block open at a time, neighbouring deltas of one feed made into one."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from modelyard.core.events import BlockDelta, BlockEnd, BlockKind, BlockStart, Event, TokenLogprob


class Blocks:
    __slots__ = ("_events", "_logprobs", "index", "kind", "parts")

    def __init__(self) -> None:
        self.index = -1
        self.kind: BlockKind | None = None
        self.parts: list[str] = []  # the open block's text since its last delta
        self._logprobs: list[TokenLogprob] = []
        self._events: list[Event] = []

    def say(self, kind: BlockKind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if self.kind != kind:
            self.close()
            self._open(kind)
        self.parts.append(text)
        if logprobs:
            self._logprobs.extend(logprobs)

    def start_call(self, call_id: str, name: str, namespace: str | None, custom: bool) -> None:
        self.close()
        self._open("tool_call", call_id, name, namespace, custom)

    def _open(
        self, kind: BlockKind, call_id: str = "", name: str = "", ns: str | None = None, custom: bool = False
    ) -> None:
        self.index += 1
        self.kind = kind
        self._events.append(BlockStart(self.index, kind, call_id, name, ns, custom))

    def close(self, complete: bool = True) -> None:
        if self.kind is None:
            return
        self._flush()
        self._events.append(BlockEnd(self.index, complete=complete))
        self.kind = None

    def _flush(self) -> None:
        if (text := "".join(self.parts)) or self._logprobs:
            self._events.append(BlockDelta(self.index, text, tuple(self._logprobs)))
        self.parts.clear()
        self._logprobs.clear()

    def take(self) -> list[Event]:
        """Everything since the last take."""
        if self.parts:
            self._flush()
        events, self._events = self._events, []
        return events

    def forget(self) -> None:
        """The prompt's own blocks are no part of the reply; a call that it left open is, from its start."""
        events = self.take()
        starts = [i for i, e in enumerate(events) if isinstance(e, BlockStart)]
        self.index, still_open = -1, self.kind == "tool_call"
        if still_open:
            self.index = 0
            self._events = [replace(e, index=0) for e in events[starts[-1] :] if isinstance(e, BlockStart | BlockDelta)]
        else:
            self.kind = None
