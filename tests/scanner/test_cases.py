"""Every case of every format, in every cutting: the same blocks."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from modelyard.scanner.formats import load, names
from tests.scanner.reading import Heard, calls_of, pieces, scan, text_of, tokens

CASES = Path(__file__).parent / "cases"


def read_cases() -> list[Any]:
    return [
        pytest.param(path.stem, case, id=f"{path.stem}: {case['name']}")
        for path in sorted(CASES.glob("*.toml"))
        for case in tomllib.loads(path.read_text())["case"]
    ]


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    options = {"prefill": case.get("prefill", ""), "cut": case.get("cut", False), "stop": case.get("stop", [])}
    return options | ({"tools": None} if case.get("any_tool") else {})


def summary(blocks: list[Heard]) -> dict[str, Any]:
    return {
        "reasoning": text_of(blocks, "thinking"),
        "content": text_of(blocks),
        "calls": [list(c) for c in calls_of(blocks)],
        "broken": [list(c) for c in calls_of(blocks, complete=False)],
    }


def expected(case: dict[str, Any]) -> dict[str, Any]:
    return {k: case.get(k, [] if k in ("calls", "broken") else "") for k in ("reasoning", "content", "calls", "broken")}


@pytest.mark.parametrize(("format", "case"), read_cases())
def test_case_reads_the_same_in_every_cutting(format: str, case: dict[str, Any]) -> None:
    raw, options = case["raw"], options_of(case)
    whole = scan([raw], format, **options)
    assert summary(whole) == expected(case)
    assert scan(list(raw), format, **options) == whole
    for at in range(1, len(raw)):
        assert scan([raw[:at], raw[at:]], format, **options) == whole, f"cut after {raw[:at]!r}"


@pytest.mark.parametrize(("format", "case"), [c for c in read_cases() if not c.values[1].get("quotes")])
def test_case_reads_the_same_where_markers_are_tokens(format: str, case: dict[str, Any]) -> None:
    form, options = load(format), options_of(case)
    if not (specials := tokens(form)):
        return
    split = pieces(case["raw"], form, specials)
    assert summary(scan(split, format, specials=specials, **options)) == expected(case)


def test_every_format_has_fifteenread_cases() -> None:
    for name in names():
        path = CASES / f"{name}.toml"
        assert path.exists(), f"{name} has no cases"
        assert len(tomllib.loads(path.read_text())["case"]) >= 15, name
