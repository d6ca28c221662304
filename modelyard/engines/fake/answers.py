"""What the fake engine answers where no rule fits: a demo, an echo, or what a constraint asks for."""

from __future__ import annotations

import json
import re
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines.fake.conversation import ConversationView
from modelyard.engines.fake.instance import instance
from modelyard.engines.fake.sample import sample
from modelyard.engines.fake.script import ScriptCall, ScriptStep

Steps = tuple[ScriptStep, ...]

_CALL = re.compile(r"\bcall\s+[`\"']?([\w.-]+)[`\"']?\s*(\{.*\})?", re.IGNORECASE | re.DOTALL)
_THINK = re.compile(r"\bthink\b", re.IGNORECASE)
_QUOTED = 300  # characters of the user's words that are said back


def demo(talk: ConversationView) -> Steps:
    if talk.result is not None:
        return (ScriptStep(text=f"The tool answered: {_short(talk.result)}"),)
    asked = _CALL.search(talk.user)
    if asked and (name := asked[1].rstrip(".")) in talk.tools:
        return (ScriptStep(text=f"I call {name} for you. "), ScriptStep(call=call_of(name, talk, asked[2])))
    thought = (ScriptStep(think="The user wants to see some reasoning, so here is a thought."),)
    return (*(thought if _THINK.search(talk.user) else ()), ScriptStep(text=_greeting(talk)))


def _greeting(talk: ConversationView) -> str:
    said = f"You said: “{_short(talk.user)}”. " if talk.user else ""
    tools = f"You offer tools: say “call {next(iter(talk.tools))}” and I will. " if _mentions_tools(talk) else ""
    return (
        f"Hello! I am the built-in fake engine: there is no model behind me, only a script. {said}{tools}"
        "Everything around me is real, though: routes, templates, tokens and streams. "
        "Give a model another backend in the configuration to talk to somebody wiser."
    )


def _mentions_tools(talk: ConversationView) -> bool:
    """Only then are the tools looked up: in a long prompt that costs a full decode."""
    return "tool" in talk.user.lower() and bool(talk.tools)


def _short(text: str) -> str:
    return text if len(text) <= _QUOTED else text[:_QUOTED] + "…"


def call_of(name: str, talk: ConversationView, arguments: str | None = None) -> ScriptCall:
    """The user's own JSON where it is an object, else the least that the tool's schema accepts."""
    given = _object(arguments) if arguments else None
    if given is None:
        made = instance(talk.tools.get(name) or {"type": "object"})
        given = made if isinstance(made, dict) else {}
    return ScriptCall(name=name, arguments=given)


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def constrained(constraint: Constraint, talk: ConversationView) -> Steps | None:
    """None where the constraint leaves the answer free, or where the fake cannot read its language."""
    if constraint.trigger is not None:
        return None
    if constraint.kind == "json_object":
        return (ScriptStep(text="{}"),)
    if constraint.kind == "json_schema":
        return (ScriptStep(text=json.dumps(instance(_schema(constraint.text)), ensure_ascii=False)),)
    if constraint.kind == "regex":
        return (ScriptStep(text=sample(constraint.text)),)
    return forced_call(constraint.tools, talk) if constraint.kind == "tools" or constraint.tools else None


def forced_call(names: tuple[str, ...], talk: ConversationView) -> Steps | None:
    """The tool that the user's words name, if that is one of those allowed; else the first."""
    allowed = names or tuple(talk.tools)
    if not allowed:
        return None
    asked = _CALL.search(talk.user)
    name = asked[1] if asked and asked[1] in allowed else allowed[0]
    return (ScriptStep(call=call_of(name, talk, asked[2] if asked else None)),)


def _schema(text: str) -> dict[str, Any] | bool:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {error}", code="invalid_json_schema") from None
    return found if isinstance(found, dict | bool) else {}
