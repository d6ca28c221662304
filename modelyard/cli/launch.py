"""`modelyard launch`: runs a coding agent on a local model."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.markup import escape

from modelyard.cli.console import DEFAULT_URL, ConfigOption, KeyOption, UrlOption, err, run_or_exit


def launch(
    agent: Annotated[str, typer.Argument(help="One of claude, codex, opencode, continue and aider.")],
    own: Annotated[list[str] | None, typer.Argument(help="After --: arguments for the agent.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Any model name of the server; default: the first that it lists.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    config: ConfigOption = None,
    show: Annotated[bool, typer.Option("--print", help="Only print the equivalent shell commands.")] = False,
) -> None:
    """Run a coding agent on a local model. If no server runs, one is started for as long as the agent runs.

    For example: [bold]modelyard launch claude -- --resume[/bold]. The agent's own settings are not changed.
    """
    from modelyard.launch.launch import LaunchOptions, launch_agent, launch_script

    arguments = tuple(own or ())
    options = LaunchOptions(agent=agent, url=url, model=model, key=key, config=config, arguments=arguments)
    if show:
        sys.stdout.write(run_or_exit(launch_script, options, os.environ))
        return
    notify = lambda line: err.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)  # noqa: E731
    raise typer.Exit(run_or_exit(launch_agent, options, os.environ, notify))
