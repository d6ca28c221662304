"""Histories that a template would refuse or lose are brought into a form that it takes.

Agents send what no template author thought of: system messages in the middle and at the end, two messages of one role
in a row, calls and results for templates that know no tools. What a template can take is found out once, by rendering
small probes: a probe fails if the template raises OR if a text of it is missing from the prompt or out of order. Each
failed probe switches on one step, for every later conversation alike: a prompt's form never depends on what was asked
before, so prefixes stay stable. A history that fails all the same climbs the ladder: the remaining steps are added one
by one until it renders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.prompt.conversation import Entry
from modelyard.prompt.steps import (
    LADDER,
    STEPS,
    Step,
    developer_as_system,
    one_message_a_turn,
    one_system_first,
    short_call_ids,
    system_in_first_user,
    tools_as_text,
    user_opens,
)
from modelyard.prompt.template import ChatTemplate, TemplateFailed


def _say(role: str, content: str) -> Entry:
    return {"role": role, "content": content}


def used_tool(call_id: str) -> list[Entry]:
    function = {"name": "probename", "arguments": {"probekey": "probevalue"}}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        _say("user", "probe one"),
        _say("assistant", "") | {"tool_calls": [call]},
        _say("tool", "probe result") | {"name": "probename", "tool_call_id": call_id},
        _say("assistant", "probe two"),
        _say("user", "probe three"),
    ]


_TOOL = {
    "type": "function",
    "function": {"name": "probename", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}
_ONE, _TWO, _THREE = _say("user", "probe one"), _say("assistant", "probe two"), _say("user", "probe three")
_CALLED = ("probe one", "probename", "probevalue", "probe result", "probe two", "probe three")

# step → conversations that need no such step where they come out whole: (entries, texts in their order)
_PROBES: Mapping[Step, tuple[tuple[list[Entry], tuple[str, ...]], ...]] = {
    developer_as_system: (
        ([_say("developer", "probe rule"), _ONE], ("probe rule", "probe one")),
        ([_ONE, _TWO, _say("developer", "probe rule"), _THREE], ("probe two", "probe rule", "probe three")),
    ),
    tools_as_text: ((used_tool("abcdef123"), _CALLED),),
    short_call_ids: ((used_tool("call_0123456789"), _CALLED),),
    one_system_first: (
        ([_say("system", "probe rule"), _say("system", "probe more"), _ONE], ("probe rule", "probe more", "probe one")),
        ([_ONE, _TWO, _say("system", "probe rule"), _THREE], ("probe two", "probe rule", "probe three")),
        ([_ONE, _TWO, _THREE, _say("system", "probe rule")], ("probe three", "probe rule")),
    ),
    user_opens: (([_TWO, _THREE], ("probe two", "probe three")),),
    system_in_first_user: (([_say("system", "probe rule"), _ONE], ("probe rule", "probe one")),),
    one_message_a_turn: (
        (
            [_ONE, _THREE, _TWO, _say("assistant", "probe four"), _ONE],
            ("probe one", "probe three", "probe two", "probe four"),
        ),
    ),
}


class TamedTemplate:
    """A template that takes every history. `repr` tells which steps it needs."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.steps = tuple(step for step in STEPS if not all(self._takes(*probe) for probe in _PROBES[step]))

    def __repr__(self) -> str:
        return f"<TamedTemplate [{', '.join(step.__name__ for step in self.steps)}]>"

    def _takes(self, entries: list[Entry], texts: Sequence[str]) -> bool:
        used = [_TOOL] if any(entry["role"] == "tool" for entry in entries) else None
        try:
            text = self.template.render({"messages": entries, "tools": used, "add_generation_prompt": True})
        except TemplateFailed:
            return False
        at = 0
        for wanted in texts:
            if (at := text.find(wanted, at)) < 0:
                return False
            at += len(wanted)
        return True

    def render(self, entries: list[Entry], variables: Mapping[str, Any]) -> str:
        try:
            return self._render(entries, variables, self.steps)
        except TemplateFailed as error:
            return self._climb(entries, variables, error)

    def _climb(self, entries: list[Entry], variables: Mapping[str, Any], error: TemplateFailed) -> str:
        on = set(self.steps)
        for step in LADDER:
            if step in on:
                continue
            on.add(step)
            try:
                return self._render(entries, variables, [each for each in STEPS if each in on])
            except TemplateFailed:
                continue
        raise error  # the first one: it is about the conversation as it was sent

    def _render(self, entries: list[Entry], variables: Mapping[str, Any], steps: Sequence[Step]) -> str:
        for step in steps:
            entries = step(entries)
        return self.template.render({**variables, "messages": entries})
