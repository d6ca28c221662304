"""What keeps a model's options from working on this machine, found without loading it: the `faults` of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from modelyard.core.errors import ModelyardError, NotFound

OptionFault = tuple[str, str]  # the option, and what is wrong with it


def try_options(*attempts: tuple[str, Callable[[str], object], str | None]) -> Iterator[OptionFault]:
    """The attempts that fail: an option, what is done with its value, and the value; None if it is not set."""
    for option, attempt, value in attempts:
        if value is None:
            continue
        try:
            attempt(value)
        except ModelyardError as error:
            yield option, error.message.removeprefix(f"{option}: ")


def try_call(option: str, call: Callable[[], object]) -> Iterator[OptionFault]:
    yield from try_options((option, lambda _: call(), ""))


def require_file(path: str) -> None:
    if not Path(path).expanduser().is_file():
        raise NotFound(f"there is no file {path!r}", code="file_missing")


def require_folder(path: str) -> None:
    if not Path(path).expanduser().is_dir():
        raise NotFound(f"there is no folder {path!r}", code="file_missing")


def require_template(template: str) -> None:
    """A template is a text with braces, or the path of a file."""
    if "{" not in template and "\n" not in template:
        require_file(template)
