"""The keys page: what it says about limits, budgets and usage. Pure parts only."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.workbench.pages.keys import budget_use, changed_rules, limit_value, rule_lines, usage_columns

NO_LIMITS = {"requests_per_minute": None, "tokens_per_minute": None, "max_concurrent": None}


def key(**more: Any) -> dict[str, Any]:
    usage = {"requests": 3, "failed": 0, "prompt": 600, "cached": 0, "output": 400, "reasoning": 0, "cost": 0.5}
    return {
        "id": "key_1",
        "name": "team",
        "admin": False,
        "models": [],
        "allow_remote": None,
        **NO_LIMITS,
        "token_budget": None,
        "cost_budget": None,
        "budget_period": "month",
        "expires": None,
        "revoked": None,
        "usage": usage,
        "budget": {"tokens_left": None, "cost_left": None, "resets": None},
        **more,
    }


def test_rules_are_said_in_words() -> None:
    assert list(rule_lines(key(), 0)) == ["models: all", "limits: none"]
    limited = key(models=["qwen*"], requests_per_minute=60, max_concurrent=2, expires=86400.0)
    assert list(rule_lines(limited, 3600)) == [
        "models: qwen*",
        "limits: 60 requests a minute, 2 requests at a time",
        "expires 1970-01-02 01:00",
    ]


def test_a_budget_shows_the_part_that_is_closer_to_its_end() -> None:
    assert budget_use(key(), "USD") == (0.0, "")
    left = {"tokens_left": 1000, "cost_left": 0.5, "resets": None}
    both = key(token_budget=2000, cost_budget=1.0, budget=left)
    assert budget_use(both, "USD") == (0.5, "1\u202f000 of 2\u202f000 tokens and 0.50 USD of 1.00 USD a month")
    spent = key(cost_budget=0.5, budget_period="total", budget={**left, "tokens_left": None, "cost_left": 0.0})
    assert budget_use(spent, "EUR") == (1.0, "0.50 EUR of 0.50 EUR in all")


@pytest.mark.parametrize(
    ("name", "value", "sent"),
    [("max_concurrent", 2.0, 2), ("max_concurrent", 2.5, 2.5), ("cost_budget", 2.0, 2.0), ("token_budget", None, None)],
)
def test_a_limit_is_sent_as_a_number(name: str, value: float | None, sent: float | None) -> None:
    assert limit_value(name, value) == sent
    assert type(limit_value(name, value)) is type(sent)


def test_only_what_was_changed_is_sent() -> None:
    before = key(expires=86400.0 + 5000, max_concurrent=2)
    names = ("admin", "models", "allow_remote", *NO_LIMITS, "token_budget", "cost_budget", "budget_period")
    values = {name: before[name] for name in names} | {"expires": "1970-01-02"}
    assert changed_rules(before, values) == {}
    assert changed_rules(before, values | {"max_concurrent": None}) == {"max_concurrent": None}
    assert changed_rules(before, values | {"expires": None}) == {"expires": None}


def test_a_currency_is_never_a_script() -> None:
    cost = usage_columns("key", '"; alert(1) //</script>')[-1][":format"]
    assert "</script>" not in cost
    assert '\\"; alert' in cost
