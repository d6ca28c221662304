"""Adapts message histories that a chat template would refuse or drop.

Agents send what no template author expected: system messages in the middle and at the end, two messages of one role in
a row, calls and results for templates without tool support. What a template accepts is found once, by rendering small
probes: a probe fails if the template raises, or if one of its texts is missing from the prompt or out of order. Each
failed probe enables one step for all conversations, so a prompt's form never depends on earlier requests and prefixes
stay stable. If a history fails all the same, the remaining steps are added one by one until it renders.

A step is a pure function from messages to messages. No step loses text.
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
    """Some templates require nine letters and digits."""
    return [_with_short_ids(entry) if "tool_call_id" in entry or "tool_calls" in entry else entry for entry in entries]


def _with_short_ids(entry: TemplateMessage) -> TemplateMessage:
    if "tool_call_id" in entry:
        return entry | {"tool_call_id": _short(entry["tool_call_id"])}
    return entry | {"tool_calls": [call | {"id": _short(call["id"])} for call in entry["tool_calls"]]}


def _short(id: str) -> str:
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.blake2b(id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def one_system_first(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    """Leading system messages become one; later ones stay in place as a reminder in a user message."""
    start = _first_after_system(entries)
    head: list[TemplateMessage] = []
    for entry in entries[:start]:
        head = [_joined(head[0], entry)] if head else [entry]
    return head + [_reminder(entry) if entry["role"] in _SYSTEM else entry for entry in entries[start:]]


_SYSTEM = ("system", "developer")


def _first_after_system(entries: Sequence[TemplateMessage]) -> int:
    return next((at for at, entry in enumerate(entries) if entry["role"] not in _SYSTEM), len(entries))


def _reminder(entry: TemplateMessage) -> TemplateMessage:
    return {"role": "user", "content": f"<system-reminder>\n{_text(entry['content'])}\n</system-reminder>"}


def user_opens(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    start = _first_after_system(entries)
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
    return [
        _tool_message_as_text(entry) if entry["role"] == "tool" or "tool_calls" in entry else entry for entry in entries
    ]


def _tool_message_as_text(entry: TemplateMessage) -> TemplateMessage:
    if entry["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(entry['content'])}\n</tool_response>"}
    calls = "\n".join(f"<tool_call>\n{tojson(call['function'])}\n</tool_call>" for call in entry["tool_calls"])
    content = f"{entry['content']}\n{calls}" if entry["content"] else calls
    return {key: value for key, value in entry.items() if key != "tool_calls"} | {"content": content}


def system_in_first_user(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    head = one_system_first(entries)
    if not head or head[0]["role"] not in _SYSTEM:
        return head
    system, rest = head[0] | {"role": "user"}, head[1:]
    return [_joined(system, rest[0]), *rest[1:]] if rest and rest[0]["role"] == "user" else [system, *rest]


def with_types(entries: list[TemplateMessage]) -> list[TemplateMessage]:
    """Some templates, mostly of models that see, read lists of typed parts only and drop a plain string. It is no step:
    such a template accepts nothing without it."""
    return [
        entry | {"content": _listed(entry["content"]) or [{"type": "text", "text": ""}]}
        if isinstance(entry.get("content"), str)
        else entry
        for entry in entries
    ]


# The order in which enabled steps apply; later steps rely on earlier ones.
STEPS: tuple[Step, ...] = (
    developer_as_system,
    short_call_ids,
    tools_as_text,
    one_system_first,
    user_opens,
    system_in_first_user,
    one_message_a_turn,
)
# The order in which steps are added for a history that still fails; tools go last, because they cost the model most.
FALLBACK_ORDER: tuple[Step, ...] = (
    developer_as_system,
    short_call_ids,
    one_system_first,
    user_opens,
    one_message_a_turn,
    tools_as_text,
    system_in_first_user,
)


def _joined(first: TemplateMessage, second: TemplateMessage) -> TemplateMessage:
    """Join two messages of one role."""
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


# --- probes -----------------------------------------------------------------------------------------------------------


def _message(role: str, content: str) -> TemplateMessage:
    return {"role": role, "content": content}


def used_tool(call_id: str) -> list[TemplateMessage]:
    function = {"name": "probename", "arguments": {"probekey": "probevalue"}}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        _message("user", "probe one"),
        _message("assistant", "") | {"tool_calls": [call]},
        _message("tool", "probe result") | {"name": "probename", "tool_call_id": call_id},
        _message("assistant", "probe two"),
        _message("user", "probe three"),
    ]


_TOOL = {
    "type": "function",
    "function": {"name": "probename", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}
_ONE, _TWO, _THREE = _message("user", "probe one"), _message("assistant", "probe two"), _message("user", "probe three")
_UNKNOWN_ROLE = "probepilot"
_CALLED = ("probe one", "probename", "probevalue", "probe result", "probe two", "probe three")

# step → conversations that render completely if the step is not needed: (messages, texts in order)
_PROBES: Mapping[Step, tuple[tuple[list[TemplateMessage], tuple[str, ...]], ...]] = {
    developer_as_system: (
        ([_message("developer", "probe rule"), _ONE], ("probe rule", "probe one")),
        ([_ONE, _TWO, _message("developer", "probe rule"), _THREE], ("probe two", "probe rule", "probe three")),
    ),
    tools_as_text: ((used_tool("abcdef123"), _CALLED),),
    short_call_ids: ((used_tool("call_0123456789"), _CALLED),),
    one_system_first: (
        (
            [_message("system", "probe rule"), _message("system", "probe more"), _ONE],
            ("probe rule", "probe more", "probe one"),
        ),
        ([_ONE, _TWO, _message("system", "probe rule"), _THREE], ("probe two", "probe rule", "probe three")),
        ([_ONE, _TWO, _THREE, _message("system", "probe rule")], ("probe three", "probe rule")),
    ),
    user_opens: (([_TWO, _THREE], ("probe two", "probe three")),),
    system_in_first_user: (([_message("system", "probe rule"), _ONE], ("probe rule", "probe one")),),
    one_message_a_turn: (
        (
            [_ONE, _THREE, _TWO, _message("assistant", "probe four"), _ONE],
            ("probe one", "probe three", "probe two", "probe four"),
        ),
    ),
}


class AdaptedTemplate:
    """A template that accepts every history. `repr` shows the steps it needs."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._needs_types = False
        if not self._accepts([_ONE], ("probe one",)):
            self._needs_types = True
            self._needs_types = self._accepts([_ONE], ("probe one",))
        self.steps = tuple(step for step in STEPS if self._needs(step))
        missing = [step for step in FALLBACK_ORDER if step not in self.steps]
        added = (missing[:count] for count in range(len(missing) + 1))
        self._attempts = [tuple(step for step in STEPS if step in (*self.steps, *more)) for more in added]

    def __repr__(self) -> str:
        return f"<AdaptedTemplate [{', '.join(step.__name__ for step in self.steps)}]>"

    def _needs(self, step: Step) -> bool:
        if not all(self._accepts(*probe) for probe in _PROBES[step]):
            return True
        return step is developer_as_system and self._copies_role("developer")

    def _copies_role(self, role: str) -> bool:
        """Whether the template writes the name of this role as it would write any word: the model was not trained on
        it."""
        try:
            known, unknown = (
                self.template.render({"messages": [_message(name, "probe rule"), _ONE], "add_generation_prompt": True})
                for name in (role, _UNKNOWN_ROLE)
            )
        except TemplateFailed:
            return False
        return role in known and known.replace(role, _UNKNOWN_ROLE) == unknown

    def _accepts(self, entries: list[TemplateMessage], texts: Sequence[str]) -> bool:
        used = [_TOOL] if any(entry["role"] == "tool" for entry in entries) else None
        shown = with_types(entries) if self._needs_types else entries
        try:
            text = self.template.render({"messages": shown, "tools": used, "add_generation_prompt": True})
        except TemplateFailed:
            return False
        at = 0
        for wanted in texts:
            if (at := text.find(wanted, at)) < 0:
                return False
            at += len(wanted)
        return True

    def render(self, entries: list[TemplateMessage], variables: Mapping[str, Any]) -> str:
        failures: list[TemplateFailed] = []
        for steps in self._attempts:
            adapted = entries
            for step in steps:
                adapted = step(adapted)
            if self._needs_types:
                adapted = with_types(adapted)
            try:
                return self.template.render({**variables, "messages": adapted})
            except TemplateFailed as error:
                failures.append(error)
        raise failures[0]  # it describes the conversation as it was sent
