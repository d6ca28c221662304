"""The form of the configuration: values between inputs and JSON, and what it says. Pure parts only."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.workbench.pages.config_form import (
    UNSET,
    done_text,
    entered_value,
    place_text,
    placeholder,
    shown_value,
    target_text,
)


def field(kind: str, **more: Any) -> dict[str, Any]:
    return {"name": "x", "kind": kind, "group": "more", "description": "", **more}


@pytest.mark.parametrize(
    ("kind", "entered", "value"),
    [
        ("text", " ", None),
        ("text", "a b", "a b"),
        ("boolean", "on", True),
        ("boolean", "off", False),
        ("boolean", UNSET, None),
        ("choice", "f16", "f16"),
        ("integer", 4.0, 4),
        ("integer", 4.5, 4.5),  # the server refuses it
        ("number", 0.5, 0.5),
        ("list", "a\n b \n\nc,d", ["a", "b", "c,d"]),
        ("list", "[1, 2]", [1, 2]),
        ("list", "[ab", ["[ab"]),
        ("value", "auto", "auto"),
        ("value", "8", 8),
        ("value", '{"a": 1}', {"a": 1}),
    ],
)
def test_what_is_entered_becomes_json(kind: str, entered: Any, value: Any) -> None:
    assert entered_value(field(kind), entered) == value


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("list", ["a", 1], "a\n1"),
        ("value", {"a": 1}, '{"a": 1}'),
        ("value", 8, "8"),
        ("text", "a", "a"),
        ("text", None, ""),
    ],
)
def test_a_value_is_shown_as_it_is_entered(kind: str, value: Any, shown: str) -> None:
    assert shown_value(field(kind), value) == shown
    if value is not None and kind != "list":
        assert entered_value(field(kind), shown) == value


def test_an_empty_field_says_what_applies() -> None:
    assert placeholder(field("integer", default=4), None) == "default: 4"
    assert placeholder(field("integer", minimum=1, maximum=8), None) == "1 to 8"
    assert placeholder(field("integer", minimum=1), None) == "1 to …"
    assert placeholder(field("value", suggestions=("auto",)), None) == "auto"
    assert placeholder(field("text"), {"value": "b", "source": "library"}) == "b (from library)"


def test_the_file_and_the_effect_are_named() -> None:
    preview = {"file": "/a.toml", "title": "your own file", "exists": False, "effect": {"added": ["m"]}}
    assert target_text(preview) == "/a.toml (your own file), which is created. Then m is added."
    assert target_text({**preview, "exists": True, "effect": None}) == "/a.toml (your own file)."
    assert done_text({"file": "/a.toml", "backup": "/a.bak.toml"}) == (
        "/a.toml was written. The old version is /a.bak.toml."
    )
    config = {"files": [{"path": "/a.toml", "title": "your own file"}]}
    assert place_text({"file": "/a.toml"}, False, config) == "In /a.toml, your own file."
    assert "library" in place_text({"file": None, "source": "library"}, False, config)
