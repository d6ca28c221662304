from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelyard.core.units import format_duration, format_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2048, "2 KiB"),
        (1023.9 * 1024, "1.0 MiB"),
        (5 * 2**20, "5.0 MiB"),
        (98_362_432, "94 MiB"),
        (1023.7 * 2**20, "1.0 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_sizes_are_binary(count: float, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "<1 ms"),
        (0.25, "250 ms"),
        (1.5, "1.5 s"),
        (40, "40 s"),
        (180, "3 min"),
        (7200, "2 h"),
        (259_200, "3 days"),
    ],
)
def test_times_below_a_second_are_in_milliseconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


ROOT = Path(__file__).parents[2]
DECIMAL = re.compile(r"(?<![A-Za-z+/])[kKMGT]B(?![A-Za-z0-9])")


def texts(file: Path) -> Iterator[str]:
    """The string literals of a module except its docstrings; none without such a unit, because parsing takes time."""
    tree = ast.parse(source if DECIMAL.search(source := file.read_text()) else "")
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


def test_no_output_and_no_page_has_decimal_units() -> None:
    """MB means one thing to some people and another to others: see "Units" in CONTRIBUTING.md."""
    modules = [file for folder in ("modelyard", "bench") for file in (ROOT / folder).rglob("*.py")]
    found = {str(file.relative_to(ROOT)): text for file in modules for text in texts(file) if DECIMAL.search(text)}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found |= {page.name: match[0] for page in pages if (match := DECIMAL.search(page.read_text()))}
    assert found == {}
