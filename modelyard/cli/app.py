"""The command line: every command, in the order of `modelyard --help`."""

from __future__ import annotations

from typing import Annotated

import typer

from modelyard import __version__
from modelyard.cli.chat import chat
from modelyard.cli.config import check, schema
from modelyard.cli.config_files import config_app
from modelyard.cli.console import out
from modelyard.cli.diagnostics import explain, parse
from modelyard.cli.measure import BENCH_HELP, OPTIMIZE_HELP, bench, optimize
from modelyard.cli.models import models_app, pull
from modelyard.cli.serve import keys, launch, scheduler, serve, workbench, worker

app = typer.Typer(
    name="modelyard",
    help="One port, every client, every engine: a local LLM gateway and model pool.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)

for command in (serve, pull, check, schema, chat, launch, explain, workbench, parse, scheduler, worker, keys):
    app.command()(command)
app.add_typer(models_app, name="models")
app.add_typer(config_app, name="config")
app.command(help=BENCH_HELP)(bench)
app.command(help=OPTIMIZE_HELP)(optimize)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


def main() -> None:
    app()
