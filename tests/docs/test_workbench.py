"""docs/workbench.md: every screenshot exists and is shown, and every page of the workbench is described."""

from __future__ import annotations

import re
from pathlib import Path

from modelyard.workbench.nicegui_app import NAVIGATION

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "workbench.md").read_text()


def test_every_screenshot_exists_and_is_shown() -> None:
    shown = re.findall(r"!\[[^\]]+\]\((workbench/[a-z]+\.png)\)", PAGE)
    assert sorted(shown) == sorted(f"workbench/{file.name}" for file in (DOCS / "workbench").glob("*.png"))


def test_every_page_is_described() -> None:
    assert [name for _, name, *_ in NAVIGATION if name.lower() not in PAGE.lower()] == []
