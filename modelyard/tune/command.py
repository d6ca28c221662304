"""The command `modelyard optimize`: parsing and printing only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from modelyard.config.settings import LoadedConfig

Load = Callable[[Path | None], LoadedConfig]  # or it has said what is wrong, and the command is over
Guarded = Callable[..., Any]  # likewise
_INTERRUPTED = 130

_HELP = """Measure a model's settings on this machine, and say which are best. Nothing is written without --apply.

\b
  modelyard optimize
  modelyard optimize --config modelyard.toml --model qwen --for agent --budget 20m
  modelyard optimize --config modelyard.toml --for batch --streams 16 --apply
  modelyard optimize --for memory --slack 10% --plot found.svg
\b
[bold]What is best[/bold] is what --for says:
  chat     the time of one answer
  agent    the time to the first token of long prompts that build on each other
  batch    tokens a second of many answers at once
  memory   the least memory within --slack of the best speed

Every trial is a process of its own with a real load on the real engine: one that crashes, hangs or runs out of memory
is a result. Number formats that cost more quality than --loss allows are not tried. At the end the best is measured
against the current settings in fresh rounds that take turns; --apply writes it only where it is better beyond the
noise, keeps a copy of the file beside it, and touches no other key. Ctrl-C prints the best so far and writes nothing;
the same command then goes on where it was.
"""


def add_to(app: typer.Typer, load: Load, guarded: Guarded, out: Console, err: Console) -> None:
    @app.command(help=_HELP)
    def optimize(
        config: Annotated[
            Path | None,
            typer.Option("--config", "-c", help="TOML or JSON file; without it the one that serve would take."),
        ] = None,
        model: Annotated[str | None, typer.Option(help="Which model; without one, the first.")] = None,
        goal: Annotated[str, typer.Option("--for", help="What it is for: chat, agent, batch or memory.")] = "chat",
        budget: Annotated[str, typer.Option(help="How long it may take, such as 90s, 10m or 1h.")] = "10m",
        apply: Annotated[bool, typer.Option("--apply", help="Write what was found into the file.")] = False,
        streams: Annotated[int | None, typer.Option(min=1, help="For batch: answers at once; 8 if not set.")] = None,
        slack: Annotated[str, typer.Option(help="For memory: how much slower than the best it may be.")] = "5%",
        loss: Annotated[str, typer.Option(help="How much perplexity may rise by rounded numbers.")] = "1%",
        memory: Annotated[
            int | None, typer.Option(min=1, help="MiB of RAM that a trial may hold; unset: what is free now.")
        ] = None,
        fresh: Annotated[bool, typer.Option("--fresh", help="Do not go on with a run that was broken off.")] = False,
        seed: Annotated[int, typer.Option(help="Other prompts for another number.")] = 0,
        json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
        plot: Annotated[Path | None, typer.Option(help="Draw it into this .svg or .png file, too.")] = None,
    ) -> None:
        from modelyard.tune import session

        wishes = session.Wishes(
            config=config,
            model=model,
            goal=goal,
            budget=budget,
            apply=apply,
            streams=streams,
            slack=slack,
            loss=loss,
            memory=memory,
            fresh=fresh,
            seed=seed,
            json=json,
            plot=plot,
        )
        raise typer.Exit(guarded(session.optimize, load(config), wishes, out, err))
