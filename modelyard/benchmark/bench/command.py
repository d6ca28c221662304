"""The command `modelyard bench`: parsing and printing only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from modelyard.benchmark.bench import options
from modelyard.config.load import LoadedConfig

if TYPE_CHECKING:
    from modelyard.benchmark.bench.book import Book
    from modelyard.benchmark.bench.order import Order
    from modelyard.benchmark.bench.subjects import Candidate

Load = Callable[[Path | None], LoadedConfig]  # or it has said what is wrong, and the command is over
Guarded = Callable[..., Any]  # likewise
_INTERRUPTED = 130

_HELP = """Measure a model or a server: time to the first token, time per token, tokens a second, at so many streams.

\b
[bold]A model of a configuration[/bold], its engine in this process or a server of its own:
  modelyard bench
  modelyard bench --config modelyard.toml --model qwen -c 1,4
  modelyard bench --config modelyard.toml --model qwen --workload agent --http
\b
[bold]Any server[/bold] with OpenAI's chat completions:
  modelyard bench --url http://127.0.0.1:8000 --model qwen --key $KEY -c 1,8,32 --duration 30s
\b
[bold]Two of them in one run[/bold], their rounds taking turns; a difference counts only beyond the noise:
  modelyard bench --url http://127.0.0.1:8000 --url http://127.0.0.1:8080 --workload batch
  modelyard bench --config old.toml --config new.toml --rounds 10
\b
[bold]For programs and papers[/bold]:
  modelyard bench --json > run.json
  modelyard bench -c 1,2,4 --plot run.svg

Prompts are made anew for every round, so that no cache has seen them; --seed makes them the same again. Ctrl-C ends the
run and prints what it has measured. Exit code 1 where nothing was answered.
"""


def add_to(app: typer.Typer, load: Load, guarded: Guarded, out: Console, err: Console) -> None:
    @app.command(help=_HELP)
    def bench(
        url: options.Urls = None,
        config: options.Configs = None,
        model: options.Models = None,
        key: options.Keys = None,
        http: options.Http = False,
        cache: options.CacheName = None,
        workload: options.WorkloadName = "chat",
        concurrency: options.Streams = None,
        prompt_tokens: options.PromptTokens = None,
        output_tokens: options.OutputTokens = None,
        turns: options.Turns = None,
        requests: options.Requests = None,
        duration: options.Duration = None,
        rounds: options.Rounds = None,
        warmup: options.Warmup = 1,
        limit: options.Limit = "10m",
        body: options.Body = None,
        seed: options.Seed = None,
        json: options.AsJson = False,
        plot: options.Plot = None,
    ) -> None:
        from modelyard.benchmark.bench.order import Order

        order = Order(
            urls=tuple(url or ()),
            configs=tuple(config or ()),
            models=tuple(model or ()),
            keys=tuple(key or ()),
            cache=cache,
            http=http,
            workload=workload,
            streams=concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            turns=turns,
            requests=requests,
            duration=duration,
            rounds=rounds,
            warmup=warmup,
            seed=seed,
            limit=limit,
            body=body,
        )
        raise typer.Exit(_run(order, load, guarded, out, err, plot, as_json=json))


def _run(
    order: Order, load: Load, guarded: Guarded, out: Console, err: Console, plot: Path | None, *, as_json: bool
) -> int:
    """The exit code."""
    from modelyard.benchmark.bench.order import prepare
    from modelyard.benchmark.drawing import check

    if plot is not None:
        guarded(check, plot)
    candidates, book = guarded(prepare, order, load)
    guarded(_measured, candidates, book, err)
    _print(book, out, as_json=as_json)
    if plot is not None:
        guarded(_draw, book, plot)
    return _INTERRUPTED if book.is_interrupted else 0 if book.answers else 1


def _measured(candidates: list[Candidate], book: Book, err: Console) -> None:
    import asyncio

    from modelyard.benchmark.bench.progress import Bar
    from modelyard.benchmark.bench.run import run
    from modelyard.http.server import loop_factory

    with Bar(book.plan, book.subjects, err) as bar, asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(run(candidates, book.plan, book, bar))
        except KeyboardInterrupt:
            book.is_interrupted = True


def _print(book: Book, out: Console, *, as_json: bool) -> None:
    from msgspec.json import encode, format

    from modelyard.benchmark.bench import report

    if as_json:
        sys.stdout.write(format(encode(report.values(book)), indent=2).decode() + "\n")
    else:
        report.show(book, out)


def _draw(book: Book, file: Path) -> None:
    from modelyard.benchmark.bench.plot import plot
    from modelyard.benchmark.drawing import save

    save(plot(book), file)
