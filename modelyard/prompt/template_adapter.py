"""The steps that bring a history into a form that a template takes: pure, each one a list of entries to another.

None loses a word: what has no place of its own is told as text, in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelyard.prompt.template import ChatTemplate, TemplateFailed, TemplateMessage, tojson

Step = Callable[[list[TemplateMessage]], list[TemplateMessage]]


def developer_as_system(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    return [entry | {"role": "system"} if entry["role"] == "developer" else entry for entry in entries]


def short_call_ids(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    """Some templates insist on nine letters and digits."""
    return [_with_short_ids(entry) for entry in entries]


def _with_short_ids(entry: TemplateMessage) -> TemplateMessage:
    if "tool_call_id" in entry:
        return entry | {"tool_call_id": _short(entry["tool_call_id"])}
    if "tool_calls" in entry:
        return entry | {"tool_calls": [call | {"id": _short(call["id"])} for call in entry["tool_calls"]]}
    return entry


def _short(id: str) -> str:
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.blake2b(id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def one_system_first(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    """Leading system messages become one; later ones stay in their place as a reminder in the user's turn."""
    start = _after_systems(entries)
    head: list[TemplateMessage] = []
    for entry in entries[:start]:
        head = [_joined(head[0], entry)] if head else [entry]
    return head + [_reminder(entry) if entry["role"] in _SYSTEM else entry for entry in entries[start:]]


_SYSTEM = ("system", "developer")


def _after_systems(entries: Sequence[TemplateMessage]) -> int:
    return next((at for at, entry in enumerate(entries) if entry["role"] not in _SYSTEM), len(entries))


def _reminder(entry: TemplateMessage) -> TemplateMessage:
    return {"role": "user", "content": f"<system-reminder>\n{_text(entry['content'])}\n</system-reminder>"}


def user_opens(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    start = _after_systems(entries)
    if start < len(entries) and entries[start]["role"] == "user":
        return entries
    return [*entries[:start], {"role": "user", "content": "(the conversation goes on)"}, *entries[start:]]


def one_message_a_turn(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    out: list[TemplateMessage] = []
    for entry in entries:
        if out and entry["role"] == out[-1]["role"] and entry["role"] in ("user", "assistant"):
            out[-1] = _joined(out[-1], entry)
        else:
            out.append(entry)
    return out


def tools_as_text(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    return [_told(entry) for entry in entries]


def _told(entry: TemplateMessage) -> TemplateMessage:
    if entry["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(entry['content'])}\n</tool_response>"}
    if "tool_calls" not in entry:
        return entry
    calls = "\n".join(f"<tool_call>\n{tojson(call['function'])}\n</tool_call>" for call in entry["tool_calls"])
    content = f"{entry['content']}\n{calls}" if entry["content"] else calls
    return {key: value for key, value in entry.items() if key != "tool_calls"} | {"content": content}


def system_in_first_user(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    head = one_system_first(entries)
    if not head or head[0]["role"] not in _SYSTEM:
        return head
    system, rest = head[0] | {"role": "user"}, head[1:]
    return [_joined(system, rest[0]), *rest[1:]] if rest and rest[0]["role"] == "user" else [system, *rest]


# Applied in this order, whichever are on: a later step tidies up what an earlier one left.
STEPS: tuple[Step, ...] = (
    developer_as_system,
    short_call_ids,
    tools_as_text,
    one_system_first,
    user_opens,
    system_in_first_user,
    one_message_a_turn,
)
# Added in this order, for a history that still fails: the tools go last, for the model loses most with them.
LADDER: tuple[Step, ...] = (
    developer_as_system,
    short_call_ids,
    one_system_first,
    user_opens,
    one_message_a_turn,
    tools_as_text,
    system_in_first_user,
)


def _joined(first: TemplateMessage, second: TemplateMessage) -> TemplateMessage:
    """Two messages of one role as one; nothing of either is lost."""
    both = first | second | {"content": _joined_content(first["content"], second["content"])}
    if "tool_calls" in both:
        both["tool_calls"] = first.get("tool_calls", []) + second.get("tool_calls", [])
    if "reasoning_content" in first and "reasoning_content" in second:
        both["reasoning_content"] = first["reasoning_content"] + "\n" + second["reasoning_content"]
    return both


def _joined_content(
    first: str | list[TemplateMessage], second: str | list[TemplateMessage]
) -> str | list[TemplateMessage]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}" if first and second else first or second
    return _listed(first) + _listed(second)


def _listed(content: str | list[TemplateMessage]) -> list[TemplateMessage]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def _text(content: str | list[TemplateMessage]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(item.get("text", "[image]") for item in content)


# Histories that a template would refuse or lose are brought into a form that it takes.
#
# Agents send what no template author thought of: system messages in the middle and at the end, two messages of one role
# in a row, calls and results for templates that know no tools. What a template can take is found out once, by rendering
# small probes: a probe fails if the template raises OR if a text of it is missing from the prompt or out of order. Each
# failed probe switches on one step, for every later conversation alike: a prompt's form never depends on what was asked
# before, so prefixes stay stable. A history that fails all the same climbs the ladder: the remaining steps are added one
# by one until it renders.


def _say(role: str, content: str) -> TemplateMessage:
    return {"role": role, "content": content}


def used_tool(call_id: str) -> list[TemplateMessage]:
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
_PROBES: Mapping[Step, tuple[tuple[list[TemplateMessage], tuple[str, ...]], ...]] = {
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


class AdaptedTemplate:
    """A template that takes every history. `repr` tells which steps it needs."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.steps = tuple(step for step in STEPS if not all(self._takes(*probe) for probe in _PROBES[step]))

    def __repr__(self) -> str:
        return f"<TamedTemplate [{', '.join(step.__name__ for step in self.steps)}]>"

    def _takes(self, entries: list[TemplateMessage], texts: Sequence[str]) -> bool:
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

    def render(self, entries: list[TemplateMessage], variables: Mapping[str, Any]) -> str:
        try:
            return self._render(entries, variables, self.steps)
        except TemplateFailed as error:
            return self._climb(entries, variables, error)

    def _climb(self, entries: list[TemplateMessage], variables: Mapping[str, Any], error: TemplateFailed) -> str:
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

    def _render(self, entries: list[TemplateMessage], variables: Mapping[str, Any], steps: Sequence[Step]) -> str:
        for step in steps:
            entries = step(entries)
        return self.template.render({**variables, "messages": entries})
