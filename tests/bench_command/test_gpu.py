"""`modelyard bench --gpu`: the suite against servers that run, its table, and the options that it refuses."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard_bench.gpu.command import bench_gpu, read_settings, table
from modelyard_bench.gpu.servers import LLAMA_SERVER, Server
from modelyard_bench.gpu.suite import Answer, Results, Settings, first_tokens, measure, rate, read_answer
from modelyard_bench.http_client import HttpResponse
from modelyard_bench.targets import BenchOptions
from tests.live_server import demo_config, live_server

SETTINGS = Settings(widths=(1, 8), rounds=1, output_tokens=6, prompt_tokens=40, seed=1)


def measured(settings: Settings = SETTINGS) -> tuple[Results, list[str]]:
    config = demo_config([{"steps": [{"tokens": 6}]}], token_delay=0.001)
    config["caches"]["main"] |= {"parallel": 16, "n_ctx": 8192}
    results, lines = Results(), list[str]()
    with live_server(config) as live:
        ours = Server("Modelyard", live.url, "demo", LLAMA_SERVER)
        few = Server("8 slots", live.url, "demo", LLAMA_SERVER, few=True)
        group = [Server(LLAMA_SERVER, live.url, "demo"), ours, few]
        asyncio.run(measure([group], settings, results, lines.append))
    return results, lines


def test_every_case_is_measured_on_every_server() -> None:
    results, lines = measured()
    names = [case.name for case in results.cases()]
    assert names[:4] == ["greedy, 8 streams", "sampled, 8 streams", "greedy, 1 stream", "sampled, 1 stream"]
    assert [name.split()[1] for name in names[4:]] == ["1", "8", "agents,", "agents,", "their", "short"]
    both = {server for case, server in results.rates if case.name == "greedy, 1 stream"}
    assert both == {LLAMA_SERVER, "Modelyard"}, "few slots are measured with few streams"
    assert all(value > 0 for values in results.rates.values() for value in values)
    assert any("greedy, 8 streams" in line for line in lines)
    (peer,) = results.peers()
    out = Console(file=io.StringIO(), width=200)
    out.print(table(results, peer))
    assert "Modelyard / llama-server" in out.file.getvalue()  # type: ignore[attr-defined]
    notes = "\n".join(results.notes())
    assert "of greedy" in notes
    assert "all slots of 8 slots" in notes
    assert "of reading the tokens once" in notes


def test_a_rate_counts_what_arrives_while_all_streams_run() -> None:
    answers = [Answer(0.0, 4, (1.0, 2.0, 3.0, 4.0)), Answer(0.0, 4, (2.0, 3.0, 4.0, 5.0))]
    assert rate(answers) == pytest.approx(2.0), "after the last first token, up to the first last one"
    assert first_tokens(answers) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (HttpResponse(0.0, error="connection refused"), "connection refused"),
        (HttpResponse(0.0, status=503, parts=[(0.1, b"loading")]), "503: loading"),
        (HttpResponse(0.0, status=200, parts=[(0.1, b"data: {}\n\n")]), "not a complete stream"),
    ],
)
def test_what_is_no_complete_stream_ends_the_run(response: HttpResponse, message: str) -> None:
    with pytest.raises(ModelyardError, match=message):
        read_answer(response)


@pytest.mark.parametrize(
    "options",
    [{"streams": "1,x"}, {"streams": "0"}, {"urls": ("http://a",)}, {"configs": (Path("x"),)}, {"body": "{}"}],
)
def test_options_of_other_runs_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        read_settings(BenchOptions(**options))  # type: ignore[arg-type]


def test_the_defaults_are_those_of_the_published_table() -> None:
    settings = read_settings(BenchOptions())
    assert (settings.widths, settings.slots, settings.window) == ((1, 2, 4, 8, 16, 32, 64), 64, 4096)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(NotFound, match=r"gone\.gguf"):
        bench_gpu(BenchOptions(), [tmp_path / "gone.gguf"], as_json=False, out=console, err=console)
