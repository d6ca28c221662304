"""Which slot of llama-server takes a request, once there is more than one scope (`Prompt.scope`). Pure.

llama-server gives a request the slot whose prompt is most similar, whoever sent it. So its slots are chosen here: one
of the same scope, else the one that was used least recently, which then reuses nothing. A request that names its slot
also takes nothing from llama-server's prompt cache in RAM. While no request has a scope, llama-server chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, takewhile
from typing import Any

from msgspec import Struct

from modelyard.core.request import Message

FieldValues = dict[str, Any]  # of a request body


class Slot(Struct):
    index: int
    scope: str = ""
    messages: tuple[Message, ...] = ()  # of its last request
    use_order: int = 0
    busy: bool = False


class ScopedSlots:
    """`slots` is 0 if their number is not known: then no request reuses anything, once there are scopes."""

    def __init__(self, slots: int) -> None:
        self._slots = [Slot(index) for index in range(slots)]
        self._uses = count(1)
        self._is_mixed = False  # a request has had a scope

    def take(self, scope: str, messages: tuple[Message, ...]) -> tuple[Slot | None, FieldValues]:
        """The slot, until `release`, and the fields of the request body that choose it."""
        self._is_mixed = self._is_mixed or bool(scope)
        if not self._is_mixed:
            return None, {}
        free = [slot for slot in self._slots if not slot.busy]
        if not free:
            return None, {"cache_prompt": False}
        own = [slot for slot in free if slot.scope == scope]
        slot = max(own, key=lambda each: (equal_messages(each.messages, messages), each.use_order), default=None)
        reuses = slot is not None
        slot = slot or min(free, key=lambda each: each.use_order)
        slot.scope, slot.messages, slot.use_order, slot.busy = scope, messages, next(self._uses), True
        return slot, {"id_slot": slot.index, "cache_prompt": reuses}

    def release(self, slot: Slot | None) -> None:
        if slot is not None:
            slot.busy = False


def equal_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
