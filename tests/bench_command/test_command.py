"""`modelyard bench` end to end, in a child process where a signal is tested."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from modelyard.cli import app
from modelyard_bench.workload import conversation, get_workload
from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.live_server import LiveServer, demo_config, live_server

QUICK = ("--prompt-tokens", "20", "--output-tokens", "5", "--rounds", "2", "--seed", "1")


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server(demo_config([{"steps": [{"tokens": 50}]}])) as running:
        yield running


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MODELYARD_LIBRARY", raising=False)  # a variable would be a second source
    path = tmp_path / "modelyard.json"
    path.write_text(json.dumps(demo_config([{"steps": [{"tokens": 50}]}])))
    return path


def bench(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app.app, ["bench", *arguments], env=env)


def run_json(*arguments: str, **env: str) -> dict[str, Any]:
    done = bench(*arguments, *QUICK, "--json", **env)
    assert done.exit_code == 0, done.output
    values: dict[str, Any] = json.loads(done.stdout)
    return values


def test_a_configured_model_is_measured_in_process(file: Path) -> None:
    found = run_json("--config", str(file), "--model", "demo", "-c", "1,4")
    assert [(r["streams"], r["answers"], r["errors"]) for r in found["results"]] == [(1, 4, {}), (4, 16, {})]
    assert {r["output_tokens"] / r["answers"] for r in found["results"]} == {5}
    assert {r["prompt_tokens"] / r["answers"] for r in found["results"]} == {20}
    assert found["results"][0]["ttft_s"]["p50"] <= found["results"][0]["ttft_s"]["p99"]
    (subject,) = found["subjects"]
    assert (subject["label"], str(file) in subject["name"].split(", "), subject["model"]) == ("A", True, "demo")
    assert found["comparisons"] == []


def test_several_turns_build_on_each_other(file: Path) -> None:
    found = run_json("--config", str(file), "--workload", "agent", "--turns", "3")
    assert found["results"][0]["answers"] == 2 * 3
    assert found["results"][0]["cached_tokens"] > 0


def test_two_urls_are_compared_in_interleaved_rounds(served: LiveServer) -> None:
    found = run_json("--url", served.url, "--url", served.url + "/v1", "--model", "demo", "--requests", "2")
    assert [(r["subject"], r["answers"]) for r in found["results"]] == [("A", 4), ("B", 4)]
    assert {(c["subject"], c["over"]) for c in found["comparisons"]} == {("B", "A")}
    assert all(len(c["first"]) == len(c["second"]) == 2 for c in found["comparisons"] if c["figure"] == "TTFT")


def test_two_configurations_are_compared_and_drawn(file: Path, tmp_path: Path) -> None:
    done = bench("--config", str(file), "--config", str(file), *QUICK, "--plot", str(tmp_path / "run.svg"))
    assert done.exit_code == 0, done.output
    assert "B over A" in done.stdout
    assert (tmp_path / "run.svg").read_text().startswith("<svg")


def test_a_round_may_have_a_duration_instead_of_requests(file: Path) -> None:
    found = run_json("--config", str(file), "--duration", "0.05s")
    assert found["results"][0]["answers"] >= 2


def test_errors_are_shown_and_the_exit_code_is_1_if_no_request_succeeded() -> None:
    with live_server(demo_config([{"steps": [{"fail": "out of memory", "kind": "unavailable"}]}])) as broken:
        done = bench("--url", broken.url, "--model", "demo", *QUICK)
    assert done.exit_code == 1
    assert "+4 failed" in done.stdout
    assert "4 × A at 1: 503: out of memory" in done.stdout
    assert "in the warm-up: 503: out of memory" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        (("--model", "other"), "no model 'other'", 1),
        (("--plot", "run.gif"), "run.gif must end in .svg or .png", 2),
        (("-c", "9"), "-c asks for 9", 2),
        (("--url", "nowhere"), "'nowhere' is not a URL", 2),
    ],
)
def test_invalid_options_are_one_sentence(file: Path, arguments: tuple[str, ...], error: str, code: int) -> None:
    done = bench("--config", str(file), *arguments)
    assert done.exit_code == code
    assert error in done.stderr
    assert "Traceback" not in done.output


def test_a_missing_server_is_one_sentence_and_exit_code_1() -> None:
    done = bench("--url", "http://127.0.0.1:1")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "connection refused" in done.stderr


def test_help_has_examples() -> None:
    text = bench("--help", COLUMNS="160").stdout
    for example in ("modelyard bench --config", "modelyard bench --url", "--json > run.json", "--plot run.svg"):
        assert example in text


def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    """The second conversation of the first round never ends: its prompt is known, because the seed is."""
    workload = get_workload("chat", prompt_tokens=20, output_tokens=5)
    number = conversation(workload, 1, "0/1/0 0 1")[0].text.split()[0]
    script = [{"when": f"^{number} ", "steps": [{"hang": True}]}, {"steps": [{"text": "Well."}]}]
    argv = [*cli_process.MODELYARD, "bench", "--model", "demo", *QUICK, "--warmup", "0", "--json", "--url"]
    with live_server(demo_config(script)) as stuck:
        process = subprocess.Popen(
            [*argv, stuck.url], cwd=tmp_path, env=cli_process.environment(), stdout=subprocess.PIPE, text=True
        )
        try:
            wait_until(lambda: _second_hangs(stuck), "one that is answered and one that hangs")
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=cli_process.DEADLINE)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130
    assert json.loads(out)["interrupted"] is True
    assert [r["answers"] for r in json.loads(out)["results"]] == [1]


def _second_hangs(served: LiveServer) -> bool:
    requests = httpx.get(f"{served.url}/v1/admin/requests", headers=served.owner).json()
    ended = {one["id"] for one in requests["ended"]}
    return len(ended) == 1 and any(one["id"] not in ended for one in requests["live"])
