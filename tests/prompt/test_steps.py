from __future__ import annotations

from typing import Any

from modelyard.prompt import template_adapter


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def test_joined_turns_lose_nothing() -> None:
    first = say("assistant", "a", reasoning_content="x", tool_calls=[1])
    second = say("assistant", "b", reasoning_content="y", tool_calls=[2])
    (both,) = template_adapter.one_message_a_turn([first, second])
    assert both == say("assistant", "a\n\nb", reasoning_content="x\ny", tool_calls=[1, 2])
    assert first["tool_calls"] == [1]


def test_pictures_stay_parts_when_turns_are_joined() -> None:
    picture = {"type": "image"}
    (both,) = template_adapter.one_message_a_turn([say("user", "look"), say("user", [picture])])
    assert both["content"] == [{"type": "text", "text": "look"}, picture]


def test_tool_messages_are_never_joined() -> None:
    results = [say("tool", "a"), say("tool", "b")]
    assert template_adapter.one_message_a_turn(results) == results


def test_short_ids_are_stable_and_calls_still_meet_their_results() -> None:
    asked = [say("assistant", "", tool_calls=[{"id": "call_é"}]), say("tool", "r", tool_call_id="call_é")]
    called, answered = template_adapter.short_call_ids(asked)
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert len(answered["tool_call_id"]) == 9
    assert template_adapter.short_call_ids([called, answered]) == [called, answered]


def test_a_system_prompt_alone_becomes_the_users() -> None:
    assert template_adapter.system_in_first_user([say("system", "a"), say("developer", "b")]) == [say("user", "a\n\nb")]


def test_a_user_opens_every_conversation() -> None:
    assert [e["role"] for e in template_adapter.user_opens([say("system", "s"), say("assistant", "a")])] == [
        "system",
        "user",
        "assistant",
    ]
    assert [e["role"] for e in template_adapter.user_opens([])] == ["user"]
    assert template_adapter.user_opens([say("user", "u")]) == [say("user", "u")]
