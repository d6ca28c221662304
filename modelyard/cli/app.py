"""The command line: every command, in the order of `modelyard --help`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from modelyard import __version__, plugins
from modelyard.cli.chat import chat
from modelyard.cli.config import check, config_app, schema
from modelyard.cli.console import CommandGroup, fail, out
from modelyard.cli.diagnostics import doctor, explain, parse
from modelyard.cli.keys import keys_app
from modelyard.cli.models import models_app, pull, rm
from modelyard.cli.pool import logs, ps, status, stop
from modelyard.cli.run import run
from modelyard.cli.serve import launch, scheduler, serve, workbench, worker
from modelyard.cli.setup import setup
from modelyard.cli.start import start

EPILOG = """
[bold]Begin[/bold]
  modelyard start                                a model that suits this machine
[bold]Try a model[/bold]
  modelyard run smollm2 "Why is the sky blue?"   a small one, fetched once
  modelyard run hf.co/Qwen/Qwen3-4B-GGUF         one of the hub, as a chat
  git diff | modelyard run qwen "Review this"    in a pipe
[bold]Serve it to every client and agent[/bold]
  modelyard serve
  modelyard launch claude                        an agent on a local model
  modelyard status                               and ps, and logs -f
[dim]modelyard COMMAND --help explains a command; docs/cli.md has them all.[/dim]
"""

app = CommandGroup(
    name="modelyard",
    help="One port, every client, every engine: a local LLM gateway and model pool.",
    epilog=EPILOG,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

_USE, _SERVER, _LIBRARY = "Use models", "The server", "Models on this machine"
_SETUP, _EXPLAIN, _CLUSTER, _TOOLS = "Set up", "Explain", "Several processes and machines", "Measure, tune and import"

for panel, commands in {
    _USE: (start, run, chat, launch),
    _SERVER: (serve, ps, stop, status, logs, workbench),
    _LIBRARY: (pull, rm),
    _SETUP: (setup, doctor, check, schema),
    _EXPLAIN: (explain, parse),
    _CLUSTER: (scheduler, worker),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(models_app, name="models", rich_help_panel=_LIBRARY)
app.add_typer(keys_app, name="keys", rich_help_panel=_SERVER)
app.add_typer(config_app, name="config", rich_help_panel=_SETUP)
for name in plugins.outside("commands"):
    try:
        if isinstance(found := plugins.load("commands", name), typer.Typer):
            app.add_typer(found, name=name, rich_help_panel=_TOOLS)
        else:
            app.command(name, rich_help_panel=_TOOLS)(found)
    except plugins.MissingLibrary as error:  # where it is used, not in every command
        app.command(name, rich_help_panel=_TOOLS)(partial(fail, error))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit
