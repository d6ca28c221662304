"""Slots are chosen by scope: nothing of another scope is reused, and a scope finds its own conversations again."""

from __future__ import annotations

from modelyard.core.request import Message, Text
from modelyard.engines.llama_server.engine import ScopedSlots


def said(*texts: str) -> tuple[Message, ...]:
    return tuple(Message("user", (Text(text),)) for text in texts)


def run(slots: ScopedSlots, scope: str, *texts: str) -> tuple[int | None, bool | None]:
    """One whole request: the slot, and whether it reuses what the slot holds."""
    slot, fields = slots.take(scope, said(*texts))
    slots.release(slot)
    return fields.get("id_slot"), fields.get("cache_prompt")


def test_the_server_chooses_while_there_is_one_scope() -> None:
    slots = ScopedSlots(2)
    assert slots.take("", said("a")) == (None, {})
    assert run(slots, "ann", "a") == (0, False), "what came before had no scope"
    assert run(slots, "", "a") == (1, True)
    assert run(slots, "", "a") == (1, True)


def test_a_scope_reuses_its_own_slot_and_no_other() -> None:
    slots = ScopedSlots(2)
    assert run(slots, "ann", "a") == (0, False)
    assert run(slots, "bob", "a") == (1, False)
    assert run(slots, "ann", "a", "b") == (0, True)
    assert run(slots, "eve", "a") == (1, False), "the least recently used one"
    assert run(slots, "bob", "a") == (0, False)


def test_a_conversation_continues_where_most_of_it_is() -> None:
    slots = ScopedSlots(3)
    first, _ = slots.take("ann", said("system", "one"))
    second, _ = slots.take("ann", said("system", "two"))
    slots.release(first)
    slots.release(second)
    assert run(slots, "ann", "system", "one", "more") == (0, True)
    assert run(slots, "ann", "system", "two", "more") == (1, True)


def test_a_busy_slot_is_not_taken_and_without_a_slot_nothing_is_reused() -> None:
    slots = ScopedSlots(2)
    first, _ = slots.take("ann", said("a"))
    second, fields = slots.take("ann", said("a"))
    assert fields == {"id_slot": 1, "cache_prompt": False}
    assert slots.take("ann", said("a")) == (None, {"cache_prompt": False})
    slots.release(first)
    slots.release(second)
    assert run(slots, "ann", "a") == (1, True)
    assert run(ScopedSlots(0), "ann", "a") == (None, False)
