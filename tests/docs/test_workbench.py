"""The page on the workbench: every picture it shows is there, and every page of the workbench is on it."""

from __future__ import annotations

import re
from pathlib import Path

from modelyard.workbench.nicegui_app import NAVIGATION

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "workbench.md").read_text()


def test_every_picture_is_there_and_every_one_that_is_there_is_shown() -> None:
    shown = re.findall(r"!\[[^\]]+\]\((workbench/[a-z]+\.png)\)", PAGE)
    assert sorted(shown) == sorted(f"workbench/{file.name}" for file in (DOCS / "workbench").glob("*.png"))


def test_every_page_is_told_of() -> None:
    assert [name for _, name, _ in NAVIGATION if name.lower() not in PAGE.lower()] == []
