"""`modelyard start`: from nothing to a useful model that answers every client, in one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.markup import escape

from modelyard.cli.console import ConfigOption, err, fail, load_or_exit, out, run_or_exit
from modelyard.cli.models import pull_model
from modelyard.core.errors import Unavailable

if TYPE_CHECKING:
    from modelyard.library.catalogue import CatalogueModel, Use
    from modelyard.library.variants import MemoryBudget

_USES = {"chat": "a chat", "code": "coding agents", "vision": "pictures"}


def start(
    model: Annotated[
        str | None, typer.Argument(help="A name of the catalogue, the library or the hub; default: one that suits.")
    ] = None,
    use: Annotated[str, typer.Option("--for", help="What the model is for: chat, code (agents) or vision.")] = "chat",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; take what is proposed.")] = False,
    config: ConfigOption = None,
) -> None:
    """Choose a model that suits this machine, fetch it, and serve it in the background.

    For example: modelyard start, modelyard start --for code,
    modelyard start qwen3:8b. It ends with modelyard stop --server.
    """
    from modelyard.config.library_models import machine_budget
    from modelyard.server.client import find_url

    if use not in _USES:
        err.print(f"[red]error[/red] --for takes {', '.join(_USES)}")
        raise typer.Exit(2)
    budget = machine_budget()
    out.print(f"This machine: {escape(_describe(budget))}.", highlight=False)
    chosen = model or _choose(cast("Use", use), budget, ask=not yes)
    name = pull_model(chosen).name
    address = find_url(None)
    _serve(address, name, config)
    _print_lines(address, name)


def _describe(budget: MemoryBudget) -> str:
    from modelyard.core.units import format_size

    gpu = f"{format_size(budget.gpu)} of GPU memory and " if budget.gpu else "no GPU that llama.cpp uses, "
    return f"{gpu}{format_size(budget.ram)} of RAM that models may take"


def _choose(use: Use, budget: MemoryBudget, *, ask: bool) -> str:
    """A model of the library that suits, else one of the catalogue, as the user confirms or names another."""
    from modelyard.core.units import format_size
    from modelyard.library import catalogue

    suited = [found for found in catalogue.search("", use) if catalogue.fits(found, use, budget)]
    here = _in_library(suited)
    if here is not None:
        out.print(f"{escape(here)} is here already and suits {_USES[use]}.", highlight=False)
        return here
    if not suited:
        smallest = min(catalogue.search("", use), key=lambda found: found.needs(use))
        fail(
            Unavailable(
                f"no model of the catalogue for {_USES[use]} suits this machine: the smallest, {smallest.name}, needs "
                f"{format_size(smallest.needs(use))}. Try it all the same: modelyard start {smallest.name}; or see how "
                "a server works with a demo: modelyard serve"
            )
        )
    best = suited[0]
    out.print(f"For {_USES[use]} this suits it: [bold]{best.name}[/bold], {_about(best)}", highlight=False)
    if not ask:
        return best.name
    others = [f"{found.name} ({format_size(found.size)})" for found in suited[1:4]]
    if others:
        out.print(f"Others: {', '.join(others)}; all: modelyard models search", highlight=False)
    answer: str = typer.prompt("Which one", default=best.name)
    return answer.strip()


def _about(model: CatalogueModel) -> str:
    from modelyard.core.units import format_size

    features = [f"a window of {model.window:,} tokens", *(["tools"] if model.tools else [])]
    features += ["thinking"] if model.thinking else []
    return f"{escape(model.title)}: {format_size(model.size)} to fetch, {', '.join(features)}."


def _in_library(suited: list[CatalogueModel]) -> str | None:
    """A model that was fetched before, or by another program, and that the catalogue knows for this use."""
    from modelyard.library import elsewhere
    from modelyard.library.models import list_models

    here = {entry.source: entry.name for entry in list_models()}
    others = elsewhere.find_models()
    here = (
        {model.repo or model.name: model.name for model in others} | {model.name: model.name for model in others} | here
    )
    return next((here[key] for model in suited for key in (model.repo, model.name) if key in here), None)


def _serve(address: str, name: str, config: Path | None) -> None:
    """With a server that runs already, or one that stays until it is stopped."""
    from modelyard.server.client import ServerClient, is_local
    from modelyard.server.running_servers import BackgroundServer, log_path

    load_or_exit(config, quiet=True)
    if not is_local(address):
        fail(Unavailable(f"the configured address {address} is not one of this machine"))
    with ServerClient(address) as server:
        if run_or_exit(server.is_running):
            out.print(f"A server runs already at {address}.", highlight=False)
        else:
            with (
                err.status("[dim]starting the server …[/dim]"),
                BackgroundServer(address, config, os.environ, None) as started,
            ):
                run_or_exit(started.wait_until, server.is_running)
            out.print(
                f"A server runs at {address}, in the background; its log: {log_path(os.environ)}", highlight=False
            )
        known = [card["id"] for card in server.get("/v1/models")["data"]]
        if name not in known:
            fail(Unavailable(f"the server at {address} does not offer {name}; it has {', '.join(known)}"))
        with err.status(f"[dim]loading {escape(name)} …[/dim]"):
            run_or_exit(lambda: server.post(server.model_path(name, "load"), wait=True))


def _print_lines(address: str, name: str) -> None:
    out.print(
        f"\n  Chat here         modelyard run {name}"
        f"\n  Chat in a page    modelyard workbench"
        f"\n  A coding agent    modelyard launch claude --model {name}   (or codex, gemini, opencode, …)"
        f"\n  OpenAI's SDK      base_url={address}/v1  model={name}  any key"
        f"\n  Anthropic's SDK   base_url={address}  model={name}  any key"
        f"\n  Ollama's clients  OLLAMA_HOST={address}"
        f"\n  The end           modelyard stop --server\n",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
