"""The command. What is slow to import is imported when it runs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from modelyard.cli.console import err, load_or_exit, out, run_or_exit

if TYPE_CHECKING:
    from modelyard_bench.results import BenchmarkResults
    from modelyard_bench.targets import BenchOptions, TargetSpec

_INTERRUPTED = 130

# What to measure.
Urls = Annotated[list[str] | None, typer.Option(help="A server, with or without /v1; give two to compare them.")]
Configs = Annotated[list[Path] | None, typer.Option(help="TOML or JSON file; default: the one that serve uses.")]
Models = Annotated[list[str] | None, typer.Option(help="Which model; default: the first. Two: both of one server.")]
Keys = Annotated[list[str] | None, typer.Option(help="API key of the server.", envvar="MODELYARD_API_KEY")]
Http = Annotated[bool, typer.Option("--http", help="For a configured model: start a server and measure through it.")]
CacheName = Annotated[str | None, typer.Option(help="Which cache of the model; default: its default cache.")]
# The workload.
WorkloadName = Annotated[str, typer.Option(help="Chat (short), agent (long, several turns) or batch (many streams).")]
Streams = Annotated[str | None, typer.Option("--concurrency", "-c", help="How many streams at once, such as 1,4,8.")]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Length of the first prompt.")]
OutputTokens = Annotated[int | None, typer.Option(min=1, help="Maximum length of an output.")]
Turns = Annotated[int | None, typer.Option(min=1, help="Requests in one conversation.")]
Body = Annotated[str | None, typer.Option(help="JSON fields for every request, such as '{\"ignore_eos\": true}'.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the prompts; default: new in every run.")]
ImageFolder = Annotated[Path | None, typer.Option("--images", help="Instead: a folder of images for one prompt.")]
PromptFile = Annotated[Path | None, typer.Option(help="For --images: the prompt; default: transcribe the document.")]
Gpu = Annotated[list[Path] | None, typer.Option(help="Instead: a GGUF file, or a folder for vLLM, in 1 to 64 streams.")]
# The length of the run.
Requests = Annotated[int | None, typer.Option(min=1, help="Requests in one round.")]
Duration = Annotated[str | None, typer.Option(help="Instead: how long a round lasts, such as 30s.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Number of rounds; default: 3, or 6 to compare.")]
Warmup = Annotated[int, typer.Option(min=0, help="Conversations per stream before the first round.")]
Limit = Annotated[str, typer.Option(help="A response that takes longer is an error.")]
# The output.
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of tables.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results into this file: .svg, or .png with Pillow.")]


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
    images: ImageFolder = None,
    prompt_file: PromptFile = None,
    gpu: Gpu = None,
) -> None:
    """Measure a model or a server: time to first token, time per token, tokens per second, at given concurrency.

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
        [bold]Images[/bold], each for the first time and again:
          modelyard bench --url http://127.0.0.1:8000 --model eyes --images scans/
    \b
    [bold]Many streams[/bold] on a GPU, beside llama-server (a GGUF file) or vLLM (a folder), all started here:
      modelyard bench --gpu model.gguf
      modelyard bench --gpu model.gguf --gpu folder/ -c 1,8,64 --rounds 3 --json > run.json
        \b
        [bold]For programs and papers[/bold]:
          modelyard bench --json > run.json
          modelyard bench -c 1,2,4 --plot run.svg

        Every round has new prompts, so that no cache holds them; --seed repeats them. Ctrl-C ends the run and prints
        what it has measured. The exit code is 1 if no request succeeded.
    """
    from msgspec.json import encode, format

    from modelyard_bench import drawing, report
    from modelyard_bench.targets import BenchOptions, prepare

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
    if gpu:
        from modelyard_bench.gpu.command import bench_gpu

        raise typer.Exit(run_or_exit(partial(bench_gpu, options, gpu, as_json=json, out=out, err=err)))
    if images is not None:
        raise typer.Exit(_bench_documents(replace(options, http=True), images, prompt_file, as_json=json))
    if plot is not None:
        run_or_exit(drawing.check_file, plot)
    specs, results = run_or_exit(prepare, options, load_or_exit)
    run_or_exit(_run_benchmark, specs, results)
    if json:
        sys.stdout.write(format(encode(report.values(results)), indent=2).decode() + "\n")
    else:
        report.show(results, out)
    if plot is not None:
        run_or_exit(drawing.save, report.plot(results), plot)
    raise typer.Exit(_INTERRUPTED if results.is_interrupted else 0 if results.answers else 1)


def _bench_documents(options: BenchOptions, folder: Path, prompt_file: Path | None, *, as_json: bool) -> int:
    import asyncio

    from msgspec.json import encode, format

    from modelyard.http.server import loop_factory
    from modelyard_bench import documents
    from modelyard_bench.targets import prepare

    found = run_or_exit(documents.find_images, folder)
    prompt = run_or_exit(documents.read_prompt, prompt_file)
    specs, results = run_or_exit(prepare, options, load_or_exit)
    work = documents.run(
        specs,
        found,
        prompt,
        number=results.plan.seed,
        output_tokens=options.output_tokens or documents.OUTPUT_TOKENS,
        repetitions=options.rounds or documents.REPETITIONS,
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        measured = run_or_exit(runner.run, work)
    if as_json:
        sys.stdout.write(format(encode(measured), indent=2).decode() + "\n")
    else:
        documents.show(measured, out)
    return 0 if any(result.first.error is None for result in measured) else 1


def _run_benchmark(specs: list[TargetSpec], results: BenchmarkResults) -> None:
    import asyncio

    from modelyard.http.server import loop_factory
    from modelyard_bench.run import ProgressBar, run

    with ProgressBar(results.plan, results.targets, err) as bar, asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(run(specs, results, bar))
        except KeyboardInterrupt:
            results.is_interrupted = True
