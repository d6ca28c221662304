"""Commands that run servers and agents: serve, scheduler, worker, keys, workbench, launch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from modelyard.cli.console import (
    ConfigOption,
    KeepAliveOption,
    KeyOption,
    UrlOption,
    err,
    load_or_exit,
    out,
    print_problem,
    read_keep_alive,
    run_or_exit,
)
from modelyard.server.client import find_url

if TYPE_CHECKING:
    from modelyard.config.settings import LoadedConfig

SharedConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML or JSON file, the same for all processes.")
]


def serve(
    config: ConfigOption = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default 127.0.0.1. Any other address needs an API key.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default 8000. 0 takes a free one.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="How many gateway processes share the port; their engines run outside them.")
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help='Address of a scheduler in another process; "auto" for the default one of this user.'),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="A Ray cluster for the workers: ray://HOST:PORT, or auto for the one on this machine."),
    ] = None,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Write four files per request to ./debug: request, prompt, output, response."),
    ] = False,
) -> None:
    """Run the server.

    Then point a client at it, for example: [bold]ANTHROPIC_BASE_URL=http://localhost:8000 claude[/bold]
    """
    from modelyard.server.serve import serve as run_server

    if cluster is not None:  # the scheduler is another process
        os.environ |= {"MODELYARD_WORKERS__CLUSTER": "ray", "MODELYARD_WORKERS__RAY_ADDRESS": cluster}
    http = {"host": host, "port": port, "workers": workers}
    log = {"debug_dir": "debug"} if debug else {}
    loaded = load_or_exit(config, {"http": http, "log": log, "scheduler": {"endpoint": scheduler}})
    for problem in loaded.problems:
        print_problem(problem)
    raise typer.Exit(run_or_exit(run_server, loaded.config, config, http, debug, scheduler))


def _config_loader(config: Path | None) -> Callable[[], LoadedConfig]:
    from modelyard.config.library_models import read_library_models
    from modelyard.config.load import load_config

    return partial(load_config, config, library=read_library_models)


def scheduler(
    config: SharedConfigOption = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on for gateways and workers: ipc:///PATH in a private folder or tcp://HOST:PORT; "
            "default: a socket that only this user can reach."
        ),
    ] = None,
) -> None:
    """Run the scheduler as its own process: it runs the models in workers and grants leases to gateways.

    Start the gateways with [bold]modelyard serve --scheduler auto[/bold] and the same configuration.
    """
    from modelyard.server.scheduler_process import run_scheduler

    loaded = load_or_exit(config)
    reload = _config_loader(config)
    raise typer.Exit(run_or_exit(run_scheduler, loaded.config, listen, reload))


def worker(
    scheduler: Annotated[
        str, typer.Option(help='Address of the scheduler; "auto" for the default one of this user.')
    ] = "auto",
    config: SharedConfigOption = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Address to listen on, which gateways must reach; from other machines tcp://THIS-HOST:*."),
    ] = None,
) -> None:
    """Offer this machine to a scheduler, which decides what models of the configuration run here.

    SIGTERM ends it gracefully.
    """
    from modelyard.server.scheduler_process import run_worker_for

    loaded = load_or_exit(config)
    reload = _config_loader(config)
    raise typer.Exit(run_or_exit(run_worker_for, loaded.config, scheduler, listen, reload))


def workbench(
    url: UrlOption = None,
    port: Annotated[
        int | None, typer.Option(help="Serve the page on this port of this machine; 0 takes a free one.")
    ] = None,
) -> None:
    """Print a link that opens the workbench of your server as its owner: it works once, within an hour.

    For a server on another machine, or with --port, this serves the page itself, on port 8010.
    """
    import time

    from modelyard.accounts.owner import OwnerProof
    from modelyard.server.running_servers import find_server
    from modelyard.telemetry import log
    from modelyard.telemetry.log import LogSettings
    from modelyard.workbench.app import serve as serve_workbench

    address = find_url(url)
    if port is None and (own := find_server(address)) is not None and own.token:
        link = f"{own.url}/workbench?code={OwnerProof(own.token).new_code(time.time())}"
        out.print(link, markup=False, highlight=False, soft_wrap=True)
        return
    log.setup(LogSettings())
    raise typer.Exit(run_or_exit(serve_workbench, address, 8010 if port is None else port))


def launch(
    agent: Annotated[
        str,
        typer.Argument(
            help="Such as claude, codex, gemini, opencode, copilot, pi, aider, vscode; a wrong name lists them all."
        ),
    ],
    own: Annotated[list[str] | None, typer.Argument(help="After --: arguments for the agent.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Any model name of the server; default: the first that suits the agent.")
    ] = None,
    url: UrlOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    show: Annotated[bool, typer.Option("--print", help="Only print the equivalent shell commands.")] = False,
    keep_alive: KeepAliveOption = "10m",
    keep_config: Annotated[
        bool,
        typer.Option("--keep-my-config", help="Use your own settings and history of the agent, not private ones."),
    ] = False,
) -> None:
    """Run a coding agent on a local model. If no server runs, one is started, which stays for the next command.

    For example: [bold]modelyard launch claude -- --resume[/bold]. Your own settings of an agent are not changed.
    """
    from modelyard.launch.launch import LaunchOptions, launch_agent, launch_script

    arguments = tuple(own or ())
    options = LaunchOptions(
        agent=agent,
        url=find_url(url),
        model=model,
        key=key,
        config=config,
        arguments=arguments,
        keep_alive_s=run_or_exit(read_keep_alive, keep_alive),
        keep_config=keep_config,
    )
    if show:
        sys.stdout.write(run_or_exit(launch_script, options, os.environ))
        return
    notify = lambda line: err.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)  # noqa: E731
    raise typer.Exit(run_or_exit(launch_agent, options, os.environ, notify))
