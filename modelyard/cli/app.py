"""The command line: every command, in the order of `modelyard --help`."""

from __future__ import annotations

from typing import Annotated

import typer

from modelyard import __version__
from modelyard.benchmark import command as bench_command
from modelyard.cli.chat import chat
from modelyard.cli.config import check, schema
from modelyard.cli.console import err, load_or_exit, out, run_or_exit
from modelyard.cli.diagnostics import explain, parse
from modelyard.cli.launch import launch
from modelyard.cli.models import models_app
from modelyard.cli.serve import keys, scheduler, serve, workbench, worker
from modelyard.tune import command as tune_command

app = typer.Typer(
    name="modelyard",
    help="One port, every client, every engine: a local LLM gateway and model pool.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)

for command in (serve, check, schema, chat, launch, explain, workbench, parse, scheduler, worker, keys):
    app.command()(command)
app.add_typer(models_app, name="models")
bench_command.add_to(app, load_or_exit, run_or_exit, out, err)
tune_command.add_to(app, load_or_exit, run_or_exit, out, err)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


def main() -> None:
    app()
