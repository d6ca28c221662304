from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.request import Reasoning
from tests.protocols.openai_chat.bodies import read, written


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Reasoning()),
        ({"reasoning_effort": "high"}, Reasoning(effort="high")),
        ({"reasoning_effort": "none"}, Reasoning(enabled=False, effort="none")),
        ({"reasoning": {"effort": "low", "exclude": True}}, Reasoning(effort="low", visible=False)),
        ({"reasoning": {"enabled": True, "max_tokens": 99}}, Reasoning(enabled=True, budget=99)),
        ({"enable_thinking": False}, Reasoning(enabled=False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, Reasoning(enabled=True, budget=2048)),
        ({"thinking": {"type": "disabled"}}, Reasoning(enabled=False)),
        ({"thinking": {"type": "new-word"}}, Reasoning()),
        ({"thinking": True}, Reasoning(enabled=True)),
        ({"thinking": "off"}, Reasoning(enabled=False)),
        ({"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True}, Reasoning(enabled=False)),
        ({"chat_template_kwargs": {"enable_thinking": "soon"}}, Reasoning()),
    ],
)
def test_every_dialect_of_the_switch_is_read(fields: dict[str, Any], expected: Reasoning) -> None:
    assert read(**fields).reasoning == expected


def test_the_templates_switch_has_one_place_only() -> None:
    request = read(chat_template_kwargs={"enable_thinking": True, "flavour": 1})
    assert request.chat_template_kwargs == {"flavour": 1}
    assert request.reasoning == Reasoning(enabled=True)
    assert written(request)["chat_template_kwargs"] == {"flavour": 1, "enable_thinking": True}


def test_an_effort_of_none_needs_no_second_switch_upstream() -> None:
    out = written(read(reasoning_effort="none"))
    assert out["reasoning_effort"] == "none"
    assert "chat_template_kwargs" not in out
