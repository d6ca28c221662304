"""The command line: parsing and printing only."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from modelyard import __version__
from modelyard.benchmark import command as bench_command
from modelyard.cli import cluster as stations
from modelyard.config.describe import ConfigDescription, describe_config
from modelyard.config.load import load_config
from modelyard.config.problems import ConfigError, ConfigProblem
from modelyard.config.schema import json_schema
from modelyard.config.settings import LoadedConfig
from modelyard.core.errors import ModelyardError
from modelyard.tune import command as tune_command

app = typer.Typer(
    name="modelyard",
    help="One port, every client, every engine: a local LLM gateway and model pool.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="TOML or JSON file. Without it the first that exists: config/settings.json, modelyard.toml, the default.",
    ),
]


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on, 127.0.0.1 if not set; one that others can reach needs an API key."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 8000 if not set; 0 takes a free one.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="How many gateway processes share the port; for engines outside them.")
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="Address of a scheduler in another process, such as tcp://127.0.0.1:5555; it has the models."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster that is to run the workers: ray://HOST:PORT, auto for the one that runs here."
        ),
    ] = None,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Keep four files of each request in ./debug: both sides of it, prompt, output."),
    ] = False,
) -> None:
    """Run the server.

    Then point a client at it, for example: [bold]ANTHROPIC_BASE_URL=http://localhost:8000 claude[/bold]
    """
    from modelyard.server.serve import serve as run

    if cluster is not None:  # for the scheduler, which is another process
        os.environ |= {"MODELYARD_WORKERS__CLUSTER": "ray", "MODELYARD_WORKERS__RAY_ADDRESS": cluster}
    http = {"host": host, "port": port, "workers": workers}
    log = {"debug_dir": "debug"} if debug else {}
    loaded = _load(config, {"http": http, "log": log})
    for problem in loaded.problems:
        _print_problem(problem)
    raise typer.Exit(_guarded(run, loaded.config, config, http, debug, scheduler))


@app.command()
def check(config: ConfigOption = None) -> None:
    """Show what a configuration comes to: models, caches, resolved routes, problems, and engines that do not work."""
    from modelyard.cli.explain import broken_engines

    loaded = _load(config)
    seen = describe_config(loaded)
    out.print(f"[dim]from {', '.join(seen.sources)}[/dim]")
    _print_tables(seen)
    _print_memory(loaded)
    problems = [*seen.problems, *broken_engines(loaded.config)]
    for problem in problems:
        _print_problem(problem)
    raise typer.Exit(1 if any(p.level != "warning" for p in problems) else 0)


@app.command()
def schema() -> None:
    """Print the configuration's JSON Schema, for editors that complete from it."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode() + "\n")


models_app = typer.Typer(help="The models of a configuration, and the library of files.", no_args_is_help=True)
app.add_typer(models_app, name="models")

UrlOption = Annotated[str, typer.Option(help="Where the server runs, without /v1.", envvar="MODELYARD_URL")]
KeyOption = Annotated[str | None, typer.Option(help="API key, where the server wants one.", envvar="MODELYARD_API_KEY")]


@models_app.command("add")
def models_add(
    source: Annotated[str, typer.Argument(help="A GGUF file, a folder, or a hub's repository such as org/name.")],
    name: Annotated[str | None, typer.Option(help="What to call it; else after its file or repository.")] = None,
    quant: Annotated[str | None, typer.Option(help="Which variant, such as Q4_K_M, where there are several.")] = None,
) -> None:
    """Put a model into the library: remember a file of this machine, or fetch one from a Hugging Face repository."""
    from modelyard.library import models as described
    from modelyard.library import models as shelf
    from modelyard.library import progress

    meter = progress.ProgressReporter(err, lambda line: err.print(line, markup=False, highlight=False))
    entry = _guarded(lambda: shelf.add_model(source, name=name, quant=quant, progress=meter))
    out.print(f"{escape(entry.name)} is in the library. To serve it, write into modelyard.toml:", soft_wrap=True)
    out.print(described.config_snippet(entry), markup=False, highlight=False, soft_wrap=True)


@models_app.command("list")
def models_list(config: ConfigOption = None) -> None:
    """List the configuration's models and the library's, with size, quantization and whether the file is here."""
    from modelyard.library import models as described

    loaded = _load(config)
    models = _table("model", "engine", "aliases", "loaded", "size", "quant", "file", "")
    for m in describe_config(loaded).models:
        file = described.file_row(loaded.config.models[m.name].path)
        row = (m.name, m.backend, ", ".join(m.aliases), m.starts, file.size, file.quant, file.state, m.description)
        models.add_row(*map(escape, row))
    out.print(models)
    _print_library(_guarded(described.list_rows))


@models_app.command("show")
def models_show(
    name: Annotated[str, typer.Argument(help="A model's name or one of its aliases, or a name in the library.")],
    config: ConfigOption = None,
) -> None:
    """Explain one model: its file, its caches, its template and where that comes from, its output format and why."""
    from modelyard.cli.explain import explain_model

    loaded = _load(config)
    rows = _guarded(explain_model, loaded.config, name)
    table = Table(show_header=False, box=None)
    for label, value in rows:
        table.add_row(f"[bold]{label}[/bold]", escape(value))
    out.print(table)


@models_app.command("remove")
def models_remove(
    name: Annotated[str, typer.Argument(help="A name in the library.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Take a model out of the library. Files go only where the library fetched them."""
    from modelyard.library import models as shelf

    entry = _guarded(shelf.get_model, name)
    what = f"Delete {entry.path}" if entry.owned else f"Forget {entry.path} (the file stays)"
    if not yes and not typer.confirm(f"{what}?", err=True):
        raise typer.Exit(1)
    _guarded(shelf.remove_model, name)
    out.print(f"{escape(name)} is no longer in the library.")


@models_app.command("convert")
def models_convert(
    name: Annotated[str, typer.Argument(help="A GGUF model: a name in the library, or a path.")],
    to: Annotated[str, typer.Option(help="Which kind of folder: hf for Hugging Face, ct2 for CTranslate2.")],
    target: Annotated[Path | None, typer.Option("--out", help="The folder to make; else one in the library.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Number format of the weights; unset: int8 for ct2, bfloat16 for hf.")
    ] = None,
) -> None:
    """Make a Hugging Face or CTranslate2 folder of a GGUF model, and put it into the library."""
    from modelyard.library import models as described
    from modelyard.library import progress
    from modelyard.library.convert import convert

    meter = progress.ProgressReporter(err, lambda line: err.print(line, markup=False, highlight=False))
    entry = _guarded(lambda: convert(name, to, out=target, quantization=quantization, progress=meter))
    out.print(f"{escape(entry.name)} is in the library: {escape(entry.path)}", soft_wrap=True)
    if to == "ct2":
        out.print("To serve it, write into modelyard.toml:")
        out.print(described.config_snippet(entry), markup=False, highlight=False, soft_wrap=True)


@app.command()
def chat(
    model: Annotated[
        str | None, typer.Argument(help="Any name that the server knows; without one, the first that it lists.")
    ] = None,
    url: UrlOption = "http://127.0.0.1:8000",
    key: KeyOption = None,
    system: Annotated[str | None, typer.Option(help="A system prompt, said before the first message.")] = None,
) -> None:
    """Talk to a running server in the terminal. Ctrl-D ends it, Ctrl-C stops an answer."""
    from modelyard.cli.chat import Conversation, Screen

    talk = Conversation(url, model, key=key, system=system)
    _guarded(talk.run, Screen(out))


@app.command()
def launch(
    agent: Annotated[str, typer.Argument(help="Which one: claude, codex, opencode, continue or aider.")],
    own: Annotated[list[str] | None, typer.Argument(help="After --: arguments for the agent itself.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Any name that the server knows; without one, the first that it lists.")
    ] = None,
    url: UrlOption = "http://127.0.0.1:8000",
    key: KeyOption = None,
    config: ConfigOption = None,
    show: Annotated[bool, typer.Option("--print", help="Only print the same as lines for a shell.")] = False,
) -> None:
    """Run a coding agent on a local model. Where no server runs, one is started for as long as the agent runs.

    For example: [bold]modelyard launch claude -- --resume[/bold]. The agent's own settings are left as they are.
    """
    from modelyard.launch import launch as launching

    order = launching.Order(agent=agent, url=url, model=model, key=key, config=config, own=tuple(own or ()))
    if show:
        sys.stdout.write(_guarded(launching.printed, order, os.environ))
        return
    say = lambda line: err.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)  # noqa: E731
    raise typer.Exit(_guarded(launching.launch, order, os.environ, say))


@app.command()
def explain(
    session: Annotated[
        str | None, typer.Argument(help="The end of a session's name; without one, that of the newest request.")
    ] = None,
    last: Annotated[int, typer.Option(help="So many requests.", min=1)] = 20,
    url: UrlOption = "http://127.0.0.1:8000",
    key: KeyOption = None,
) -> None:
    """Show the last requests of a session on a running server: what its cache had of each prompt, and why not more."""
    from modelyard.cli.request_history import COLUMNS, rows

    heading, found = _guarded(rows, url, key, session, last)
    table = _table(*COLUMNS)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in found:
        table.add_row(*map(escape, row))
    out.print(escape(heading), soft_wrap=True)
    out.print(table)


@app.command()
def workbench(
    url: UrlOption = "http://127.0.0.1:8000",
    port: Annotated[int, typer.Option(help="Port of the page on this machine; 0 takes a free one.")] = 8010,
) -> None:
    """Open the workbench of a server that runs elsewhere. A server's own is at /workbench on its own port."""
    from modelyard.telemetry import log
    from modelyard.telemetry.settings import LogSettings
    from modelyard.workbench.standalone import serve as serve_workbench

    log.setup(LogSettings())
    raise typer.Exit(_guarded(serve_workbench, url, port))


@app.command()
def parse(
    format: Annotated[str, typer.Option(help="The model's output format, or auto to detect it from --template.")],
    template: Annotated[Path | None, typer.Option(help="A chat template, for --format auto.", exists=True)] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON list of the tools on offer; without it any name is a call.", exists=True)
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="Feed so many characters at a time.", min=1)] = None,
    prefill: Annotated[str, typer.Option(help="The prompt's tail, where it opened the reasoning, say.")] = "",
) -> None:
    """Read a model's raw output from standard input and print its reasoning, content and tool calls as JSON."""
    from modelyard.scanner.parse_output import parse_command

    def work() -> str:
        return parse_command(
            sys.stdin.buffer.read().decode("utf-8", "replace"),
            format=format,
            template=template.read_text("utf-8") if template else None,
            tools=tools.read_bytes() if tools else None,
            chunk=chunks,
            prefill=prefill,
        )

    sys.stdout.write(_guarded(work) + "\n")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


def main() -> None:
    app()


# --- printing ---------------------------------------------------------------------------------------------------------


def _load(path: Path | None, overrides: dict[str, Any] | None = None) -> LoadedConfig:
    try:
        return load_config(path, overrides=overrides)
    except ConfigError as error:
        for problem in error.problems:
            _print_problem(problem)
        raise typer.Exit(2) from None
    except ModelyardError as error:
        _fail(error)


def _guarded(work: Any, *args: Any) -> Any:
    try:
        return work(*args)
    except ModelyardError as error:
        _fail(error)


def _fail(error: ModelyardError) -> NoReturn:
    err.print(f"[red]error[/red] {escape(error.message)}", soft_wrap=True)
    raise typer.Exit(2)


def _print_problem(problem: ConfigProblem) -> None:
    colour = {"error": "red", "unavailable": "yellow", "warning": "yellow"}[problem.level]
    err.print(f"[{colour}]{problem.level}[/{colour}] {escape(str(problem))}", soft_wrap=True)


def _print_tables(seen: ConfigDescription) -> None:
    _print_models(seen)
    caches = _table("cache", "model", "window", "parallel", "tokens in all", "overflow", "for")
    for c in seen.caches:
        caches.add_row(c.name, c.model, str(c.window), str(c.parallel), str(c.tokens), c.overflow, c.description)
    out.print(caches)
    routes = _table("asked for", "endpoint", "model", "cache", "window")
    for r in seen.routes:
        routes.add_row(r.match, r.endpoint, r.model, r.cache, str(r.window))
    out.print(routes)


def _print_models(seen: ConfigDescription) -> None:
    models = _table("model", "engine", "aliases", "loaded", "")
    for m in seen.models:
        models.add_row(m.name, m.backend, ", ".join(m.aliases), m.starts, m.description)
    out.print(models)


def _print_memory(loaded: LoadedConfig) -> None:
    """What the models would take; one that cannot tell is told of among the problems."""
    from modelyard.server.memory_estimate import available_memory, estimate_all, format_size

    here = available_memory()
    table = _table("memory", "weights", "KV caches", "compute", "in all")
    for taken in estimate_all(loaded.config, here):
        if (m := taken.memory) is not None and m.total:
            table.add_row(escape(taken.model), *map(format_size, (m.weights, m.kv, m.compute, m.total)))
    if table.row_count:
        out.print(table)
        gpus = "".join(f", {format_size(free)} on GPU {name}" for name, free in here.gpus.items())
        out.print(f"[dim]free now: {format_size(here.ram_free)} of RAM{gpus}[/dim]")


def _print_library(rows: Any) -> None:
    library = _table("library", "from", "size", "quant", "file", "")
    for entry, file in rows:
        library.add_row(*map(escape, (entry.name, entry.source, file.size, file.quant, file.state, entry.path)))
    if rows:
        out.print(library)


def _table(*columns: str) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column)
    return table


stations.add_to(app, _load, _guarded, lambda line: out.print(line, markup=False, soft_wrap=True))
bench_command.add_to(app, _load, _guarded, out, err)
tune_command.add_to(app, _load, _guarded, out, err)
