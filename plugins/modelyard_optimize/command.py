"""The command. What is slow to import is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelyard.cli.console import err, load_or_exit, out, run_or_exit


def optimize(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML or JSON file; default: the one that serve uses.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which model; default: the first.")] = None,
    goal: Annotated[str, typer.Option("--for", help="The goal: chat, agent, batch or memory.")] = "chat",
    budget: Annotated[str, typer.Option(help="How long it may take, such as 90s, 10m or 1h.")] = "10m",
    apply: Annotated[bool, typer.Option("--apply", help="Write the result into the file.")] = False,
    streams: Annotated[int | None, typer.Option(min=1, help="For batch: concurrent answers; default 8.")] = None,
    slack: Annotated[str, typer.Option(help="For memory: how much slower than the best it may be.")] = "5%",
    loss: Annotated[str, typer.Option(help="How much perplexity may rise by rounded numbers.")] = "1%",
    memory: Annotated[
        int | None, typer.Option(min=1, help="MiB of RAM that a trial may use; default: what is free now.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not resume an interrupted run.")] = False,
    seed: Annotated[int, typer.Option(help="Another number gives other prompts.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the result into this .svg or .png file.")] = None,
) -> None:
    """Measure a model's settings on this machine, and report the best. Nothing is written without --apply.

    \b
      modelyard optimize
      modelyard optimize --config modelyard.toml --model qwen --for agent --budget 20m
      modelyard optimize --config modelyard.toml --for batch --streams 16 --apply
      modelyard optimize --for memory --slack 10% --plot found.svg

    \b
    [bold]The goal[/bold] is set by --for:
      chat     the time of one answer
      agent    the time to first token of long prompts that build on each other
      batch    tokens per second of many concurrent answers
      memory   the least memory within --slack of the best speed

    Every trial is a child process with a real load on the real engine: a crash, a hang or a lack of memory is a result.
    Number formats that cost more quality than --loss allows are not tried. At the end the best setting is measured
    against the current one in fresh interleaved rounds; --apply writes it only if it is better beyond the noise, keeps
    a backup beside the file, and changes no other key. Ctrl-C prints the best so far and writes nothing; the same
    command resumes.
    """
    from modelyard_optimize.optimize import OptimizeOptions
    from modelyard_optimize.optimize import optimize as run

    options = OptimizeOptions(
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
    raise typer.Exit(run_or_exit(run, load_or_exit(config), options, out, err))
