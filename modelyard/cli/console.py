"""What all commands share: consoles, common options, the configuration, errors, tables, and completion of names.

Modules of commands import what they need where they need it: `modelyard --help` and a shell's completion should not
wait for engines and HTTP clients.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from modelyard.core.errors import InvalidRequest, ModelyardError

if TYPE_CHECKING:
    from modelyard.config.problems import ConfigProblem
    from modelyard.config.settings import LoadedConfig

out, err = Console(emoji=False), Console(stderr=True, emoji=False)  # a file's :100: is a line, and no emoji
_GAP = 3  # between the columns of a table
_LAST_COLUMN = 16  # characters that the last column of a table gets, if it has as many

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="TOML or JSON file, read alone. Default: the user's file, then config/settings.json or modelyard.toml in "
        "this folder: see modelyard config path.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(help="URL of the server, without /v1. Default: the configured address.", envvar="MODELYARD_URL"),
]
KeyOption = Annotated[str | None, typer.Option(help="API key, if the server needs one.", envvar="MODELYARD_API_KEY")]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(
        "--key", help="Admin key, if the server has keys.", envvar=["MODELYARD_ADMIN_KEY", "MODELYARD_API_KEY"]
    ),
]
KeepAliveOption = Annotated[
    str,
    typer.Option(help="How long a server that this starts waits for the next command: 10m, 2h; 0: not, -1: for ever."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


_F = TypeVar("_F", bound=Callable[..., Any])


class _WithPlainFlags:
    """A flag takes no value, so help shows no type for it."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc] # of the command that this is mixed into
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_WithPlainFlags, TyperCommand):
    pass


class _Group(_WithPlainFlags, TyperGroup):
    pass


class CommandGroup(typer.Typer):
    """Commands whose help is for people."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, no_args_is_help=True, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[_F], _F]:
        return super().command(name, cls=_Command, **options)


def load_or_exit(path: Path | None, overrides: dict[str, Any] | None = None, *, quiet: bool = False) -> LoadedConfig:
    """`quiet`: the notes were printed before."""
    from modelyard.config.library_models import read_library_models
    from modelyard.config.load import load_config
    from modelyard.config.problems import ConfigError

    try:
        loaded = load_config(path, overrides=overrides, library=read_library_models)
    except ConfigError as error:
        for problem in error.problems:
            print_problem(problem)
        raise typer.Exit(2) from None
    except ModelyardError as error:
        fail(error)
    if not quiet:
        print_notes(loaded)
    return loaded


def print_notes(loaded: LoadedConfig) -> None:
    """About files that are ignored."""
    from modelyard.processes.supervisor import INDEX_VARIABLE

    if INDEX_VARIABLE not in os.environ:  # the supervisor has said it
        for note in loaded.notes:
            err.print(f"[yellow]note[/yellow] {escape(note)}", soft_wrap=True)


def run_or_exit(work: Any, *args: Any) -> Any:
    """Call `work`. Print an expected error as one line and exit: 2 if the command was wrong, 1 if it failed."""
    try:
        return work(*args)
    except ModelyardError as error:
        fail(error)


def fail(error: ModelyardError) -> NoReturn:
    """Print the error as one line and exit."""
    err.print(f"[red]error[/red] {escape(error.message)}", soft_wrap=True)
    raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1)


def read_keep_alive(text: str) -> float | None:
    """Seconds; None: for ever."""
    from modelyard.protocols.ollama.fields import read_keep_alive

    seconds = read_keep_alive(text)
    return None if seconds is None or seconds == float("inf") else seconds


def print_problem(problem: ConfigProblem) -> None:
    colour = {"error": "red", "unavailable": "yellow", "warning": "yellow", "note": "dim"}[problem.level]
    err.print(f"[{colour}]{problem.level}[/{colour}] {escape(str(problem))}", soft_wrap=True)


def print_json(value: Any) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Only the last column is wrapped: the next command needs a model's whole name. In a pipe nothing is wrapped.
    Columns without a value are left out."""
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    widths = [max(cell_len(text) for text in (columns[index], *(row[index] for row in rows))) for index in kept]
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    if out.is_terminal:
        widths[-1] = min(widths[-1], max(_LAST_COLUMN, out.width - sum(widths[:-1]) - _GAP * len(widths[:-1])))
    table.width = sum(widths) + _GAP * (len(widths) - 1)
    for index, width in zip(kept, widths, strict=True):
        table.add_column(columns[index], width=width, overflow="fold")
    for row in rows:
        table.add_row(*(escape(row[index]) for index in kept))
    out.print(table, crop=False)


# --- shell completion of model names, without asking a server ---------------------------------------------------------


def complete_models(incomplete: str) -> list[str]:
    return sorted(name for name in {*_configured(), *_in_library()} if name.startswith(incomplete))


def complete_library(incomplete: str) -> list[str]:
    return sorted(name for name in _in_library() if name.startswith(incomplete))


def _configured() -> set[str]:
    """Errors complete nothing: a shell has no place to show them."""
    from modelyard.config.load import load_config

    try:
        models = load_config().config.models
    except (ModelyardError, OSError):
        return set()
    return {*models, *(alias for model in models.values() for alias in model.aliases)}


def _in_library() -> set[str]:
    from modelyard.library.models import list_models

    try:
        return {entry.name for entry in list_models()}
    except (ModelyardError, OSError):
        return set()
