"""docs/cli.md names every command, every slash command and every shared option."""

from __future__ import annotations

from pathlib import Path

import typer

from modelyard.cli.app import app
from modelyard.cli.chat import HELP

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def test_the_page_names_every_command() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    words = {word.strip("`,.:") for word in PAGE.split()}
    assert set(commands) <= words
    assert {"path", "show", "edit"} <= words


def test_the_page_names_every_slash_command() -> None:
    assert [name for name in HELP if f"`{name}" not in PAGE] == []
