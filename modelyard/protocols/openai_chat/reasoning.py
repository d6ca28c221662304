"""How much a chat client wants the model to think: four dialects of one switch."""

from __future__ import annotations

from typing import Any

from modelyard.core.request import Reasoning, Request
from modelyard.protocols.openai_chat.body import ChatCompletionBody, ReasoningBody, ThinkingBody

SWITCH = "enable_thinking"  # as chat templates call it

_UNASKED = Reasoning()
_NO_REASONING, _NO_THINKING = ReasoningBody(), ThinkingBody()
_WORDS = {"enabled": True, "adaptive": True, "on": True, "auto": None, "disabled": False, "off": False, "none": False}


def read_reasoning(body: ChatCompletionBody) -> Reasoning:
    """Of several switches the most specific wins: the template's, ours, `thinking`, `reasoning`, an effort of none."""
    if not _is_asked(body):
        return _UNASKED
    asked, thinking = body.reasoning or _NO_REASONING, _read_thinking(body.thinking)
    effort = body.reasoning_effort if body.reasoning_effort is not None else asked.effort
    switches = (
        _template_switch(body.chat_template_kwargs),
        body.enable_thinking,
        _WORDS.get(thinking.type),
        asked.enabled,
        False if effort == "none" else None,
    )
    return Reasoning(
        enabled=next((switch for switch in switches if switch is not None), None),
        effort=effort,
        budget=asked.max_tokens if asked.max_tokens is not None else thinking.budget_tokens,
        visible=None if asked.exclude is None else not asked.exclude,
    )


def _is_asked(body: ChatCompletionBody) -> bool:
    named = body.reasoning_effort is not None or body.reasoning is not None or body.thinking is not None
    return named or body.enable_thinking is not None or body.chat_template_kwargs is not None


def _read_thinking(thinking: ThinkingBody | bool | str | None) -> ThinkingBody:
    if isinstance(thinking, ThinkingBody):
        return thinking
    if isinstance(thinking, bool):
        return ThinkingBody("enabled" if thinking else "disabled")
    return ThinkingBody(thinking) if thinking else _NO_THINKING


def _template_switch(kwargs: dict[str, Any] | None) -> bool | None:
    switch = kwargs.get(SWITCH) if kwargs else None
    return switch if isinstance(switch, bool) else None


def read_template_kwargs(body: ChatCompletionBody) -> dict[str, Any]:
    """Without the switch: it has its one place in `Reasoning.enabled`."""
    kwargs = body.chat_template_kwargs or {}
    if _template_switch(kwargs) is None:
        return kwargs
    return {name: value for name, value in kwargs.items() if name != SWITCH}


def write_reasoning(request: Request) -> dict[str, Any]:
    """Only what was asked for: servers that do not know a field may refuse it."""
    asked, out = request.reasoning, dict[str, Any]()
    if asked.effort is not None:
        out["reasoning_effort"] = asked.effort
    if asked.enabled is not None and not (asked.effort == "none" and asked.enabled is False):
        out["chat_template_kwargs"] = request.chat_template_kwargs | {SWITCH: asked.enabled}
    detail: dict[str, Any] = {}
    if asked.budget is not None:
        detail["max_tokens"] = asked.budget
    if asked.visible is not None:
        detail["exclude"] = not asked.visible
    if detail:
        out["reasoning"] = detail
    return out
