"""The commands of a server in several processes: scheduler, worker, keys. Parsing and printing only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from modelyard.config.load import load_config as read
from modelyard.config.settings import LoadedConfig

Load = Callable[[Path | None], LoadedConfig]  # or it has said what is wrong, and the command is over
Guarded = Callable[..., Any]  # likewise

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML or JSON file, the same everywhere.")]


def add_to(app: typer.Typer, load: Load, guarded: Guarded, say: Callable[[str], None]) -> None:
    @app.command()
    def scheduler(
        config: ConfigOption = None,
        listen: Annotated[
            str | None,
            typer.Option(help="Address to listen on for gateways and workers; tcp://127.0.0.1:5555 if not set."),
        ] = None,
    ) -> None:
        """Run the scheduler by itself: it has the models run in workers, and gateways ask it for places.

        The gateways are started with [bold]modelyard serve --scheduler ADDRESS[/bold] and the same configuration.
        """
        from modelyard.server.scheduler_process import run_scheduler

        raise typer.Exit(guarded(run_scheduler, load(config).config, listen, lambda: read(config)))

    @app.command()
    def worker(
        scheduler: Annotated[str, typer.Option(help="Address of the scheduler to work for.")],
        config: ConfigOption = None,
        listen: Annotated[
            str | None,
            typer.Option(help="Address to listen on, which gateways must reach; from other machines tcp://THIS-ONE:*."),
        ] = None,
    ) -> None:
        """Offer this machine to a scheduler: it decides which engines run here. Ends in peace on SIGTERM."""
        from modelyard.server.scheduler_process import run_worker_for

        raise typer.Exit(guarded(run_worker_for, load(config).config, scheduler, listen))

    @app.command()
    def keys(file: Annotated[Path, typer.Argument(help="The file to make; its reader can join the cluster.")]) -> None:
        """Make the keys with which the members of a cluster know each other and encrypt what they say."""
        from modelyard.workers.transport import generate_keys, write_keys

        guarded(write_keys, file, generate_keys())
        say(f"{file}: give it to every member, and set workers.keys to its path there.")
