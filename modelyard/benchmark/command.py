"""The command `modelyard bench`: its options, and printing what a run found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from modelyard.config.settings import LoadedConfig

if TYPE_CHECKING:
    from modelyard.benchmark.results import BenchmarkResults
    from modelyard.benchmark.targets import BenchOptions, TargetSpec

LoadConfig = Callable[[Path | None], LoadedConfig]  # prints an error and exits if it fails
Guarded = Callable[..., Any]  # likewise, for any call
_INTERRUPTED = 130

_HELP = """Measure a model or a server: time to first token, time per token, tokens per second, at given concurrency.

\b
[bold]A model of a configuration[/bold], its engine in this process or a server of its own:
  modelyard bench
  modelyard bench --config modelyard.toml --model qwen -c 1,4
  modelyard bench --config modelyard.toml --model qwen --workload agent --http
\b
[bold]Any server[/bold] with OpenAI's chat completions:
  modelyard bench --url http://127.0.0.1:8000 --model qwen --key $KEY -c 1,8,32 --duration 30s
\b
[bold]Two of them in one run[/bold], in interleaved rounds; a difference counts only beyond the noise:
  modelyard bench --url http://127.0.0.1:8000 --url http://127.0.0.1:8080 --workload batch
  modelyard bench --config old.toml --config new.toml --rounds 10
\b
[bold]For programs and papers[/bold]:
  modelyard bench --json > run.json
  modelyard bench -c 1,2,4 --plot run.svg

Every round has new prompts, so that no cache holds them; --seed repeats them. Ctrl-C ends the run and prints what it
has measured. The exit code is 1 if no request succeeded.
"""

# --- what to measure --------------------------------------------------------------------------------------------------

Urls = Annotated[list[str] | None, typer.Option(help="A server, with or without /v1; give two to compare them.")]
Configs = Annotated[list[Path] | None, typer.Option(help="TOML or JSON file; default: the one that serve uses.")]
Models = Annotated[list[str] | None, typer.Option(help="Which model; default: the first. Two: both of one server.")]
Keys = Annotated[list[str] | None, typer.Option(help="API key of the server.", envvar="MODELYARD_API_KEY")]
Http = Annotated[bool, typer.Option("--http", help="For a configured model: start a server and measure through it.")]
CacheName = Annotated[str | None, typer.Option(help="Which cache of the model; default: its default cache.")]

# --- the workload -----------------------------------------------------------------------------------------------------

WorkloadName = Annotated[str, typer.Option(help="Chat (short), agent (long, several turns) or batch (many streams).")]
Streams = Annotated[str | None, typer.Option("--concurrency", "-c", help="How many streams at once, such as 1,4,8.")]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Length of the first prompt.")]
OutputTokens = Annotated[int | None, typer.Option(min=1, help="Maximum length of an output.")]
Turns = Annotated[int | None, typer.Option(min=1, help="Requests in one conversation.")]
Body = Annotated[str | None, typer.Option(help="JSON fields for every request, such as '{\"ignore_eos\": true}'.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the prompts; default: new in every run.")]

# --- the length of the run --------------------------------------------------------------------------------------------

Requests = Annotated[int | None, typer.Option(min=1, help="Requests in one round.")]
Duration = Annotated[str | None, typer.Option(help="Instead: how long a round lasts, such as 30s.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Number of rounds; default: 3, or 6 to compare.")]
Warmup = Annotated[int, typer.Option(min=0, help="Conversations per stream before the first round.")]
Limit = Annotated[str, typer.Option(help="A response that takes longer is an error.")]

# --- the output -------------------------------------------------------------------------------------------------------

AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of tables.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results into this file: .svg, or .png with Pillow.")]


def add_to(app: typer.Typer, load_config: LoadConfig, guarded: Guarded, out: Console, err: Console) -> None:
    @app.command(help=_HELP)
    def bench(
        url: Urls = None,
        config: Configs = None,
        model: Models = None,
        key: Keys = None,
        http: Http = False,
        cache: CacheName = None,
        workload: WorkloadName = "chat",
        concurrency: Streams = None,
        prompt_tokens: PromptTokens = None,
        output_tokens: OutputTokens = None,
        turns: Turns = None,
        requests: Requests = None,
        duration: Duration = None,
        rounds: Rounds = None,
        warmup: Warmup = 1,
        limit: Limit = "10m",
        body: Body = None,
        seed: Seed = None,
        json: AsJson = False,
        plot: Plot = None,
    ) -> None:
        from modelyard.benchmark.targets import BenchOptions

        options = BenchOptions(
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
        raise typer.Exit(_bench(options, load_config, guarded, out, err, plot, as_json=json))


def _bench(
    options: BenchOptions,
    load_config: LoadConfig,
    guarded: Guarded,
    out: Console,
    err: Console,
    file: Path | None,
    *,
    as_json: bool,
) -> int:
    """The exit code."""
    from msgspec.json import encode, format

    from modelyard.benchmark import drawing, report
    from modelyard.benchmark.plot import plot
    from modelyard.benchmark.targets import prepare

    if file is not None:
        guarded(drawing.check_file, file)
    specs, results = guarded(prepare, options, load_config)
    guarded(_run, specs, results, err)
    if as_json:
        sys.stdout.write(format(encode(report.values(results)), indent=2).decode() + "\n")
    else:
        report.show(results, out)
    if file is not None:
        guarded(drawing.save, plot(results), file)
    return _INTERRUPTED if results.is_interrupted else 0 if results.answers else 1


def _run(specs: list[TargetSpec], results: BenchmarkResults, err: Console) -> None:
    import asyncio

    from modelyard.benchmark.run import ProgressBar, run
    from modelyard.http.server import loop_factory

    with ProgressBar(results.plan, results.targets, err) as bar, asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(run(specs, results, bar))
        except KeyboardInterrupt:
            results.is_interrupted = True
