"""One file a model family: its raw format in the docstring, its markers as data, a small reader for its calls."""

from __future__ import annotations

from functools import cache

from modelyard import plugins
from modelyard.core.output_format import OutputFormat


@cache
def load(name: str) -> OutputFormat:
    """The format of that id; an unknown id is an error that lists the known ones."""
    found = plugins.load("scanner.formats", name).FORMAT
    assert isinstance(found, OutputFormat)  # noqa: S101
    return found


def names() -> tuple[str, ...]:
    return plugins.names("scanner.formats")
