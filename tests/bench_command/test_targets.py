"""The targets of a run, from the command's options: an engine in this process, a server of our own, a URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelyard.config.load import load_config
from modelyard.config.settings import Config, LoadedConfig
from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard_bench.load import Round
from modelyard_bench.targets import (
    Access,
    BenchOptions,
    TargetOptions,
    TargetSpec,
    engine_target,
    find_cache,
    model_name,
    prepare,
    running_server,
    server_target,
    target_options,
    url_target,
)
from modelyard_bench.workload import get_workload
from tests.bench_command.fakes import run_round
from tests.live_server import demo_config, live_server

A, B = "http://a", "http://b"
X, Y = Path("x.toml"), Path("y.toml")


def loaded(path: Path | None) -> LoadedConfig:
    return load_config(env={}, overrides=demo_config())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [TargetOptions(None, None, None, None)]),
        ({"models": ("m",)}, [TargetOptions(None, None, "m", None)]),
        ({"urls": (A, B), "models": ("m",)}, [TargetOptions(A, None, "m", None), TargetOptions(B, None, "m", None)]),
        (
            {"urls": (A, B), "models": ("m", "n")},
            [TargetOptions(A, None, "m", None), TargetOptions(B, None, "n", None)],
        ),
        ({"urls": (A,), "models": ("m", "n")}, [TargetOptions(A, None, "m", None), TargetOptions(A, None, "n", None)]),
        ({"configs": (X, Y)}, [TargetOptions(None, X, None, None), TargetOptions(None, Y, None, None)]),
        ({"urls": (A,), "configs": (X,)}, [TargetOptions(A, None, None, None), TargetOptions(None, X, None, None)]),
        ({"urls": (A, B), "keys": ("k",)}, [TargetOptions(A, None, None, "k"), TargetOptions(B, None, None, "k")]),
        ({"urls": (A, B), "keys": ("k", "l")}, [TargetOptions(A, None, None, "k"), TargetOptions(B, None, None, "l")]),
    ],
)
def test_targets_models_and_keys_are_matched(options: dict[str, Any], expected: list[TargetOptions]) -> None:
    assert target_options(BenchOptions(**options)) == expected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"urls": (A, B), "models": ("m", "n", "o")}, "one --model for all, or one for each"),
        ({"urls": (A, B, A), "models": ("m", "n")}, "give --model once for all 3, or once for each"),
        ({"urls": (A, B, A), "keys": ("m", "n")}, "give --key once for all 3"),
        ({"urls": (A,) * 9}, "at most 8 targets"),
        ({"workload": "talk"}, "there is no workload 'talk'"),
        ({"models": ("other",)}, "no model 'other'; there are demo"),
        ({"cache": "big"}, "the model demo has no cache 'big'; it has main, fast"),
        ({"streams": "1,8"}, "the cache of demo has 4 slots and -c asks for 8"),
        ({"streams": "many"}, "not a list of numbers such as 1,4,8"),
        ({"streams": "0"}, "not a list of numbers"),
        ({"prompt_tokens": 4000}, "takes 4128 tokens and the cache main has 4096"),
        ({"requests": 3, "duration": "3s"}, "give --requests or --duration, not both"),
        ({"duration": "soon"}, "not a duration"),
        ({"limit": "never"}, "not a duration"),
        ({"urls": (A,), "body": "[1]"}, "--body must be a JSON object"),
    ],
)
def test_invalid_options_are_refused_before_anything_runs(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ModelyardError) as caught:
        prepare(BenchOptions(**options), loaded)
    assert error in caught.value.message


def test_the_plan_follows_the_options() -> None:
    options = BenchOptions(
        streams="4,1,4", prompt_tokens=9, output_tokens=8, turns=2, duration="2m", rounds=5, seed=3, warmup=0
    )
    specs, results = prepare(options, loaded)
    plan = results.plan
    assert (plan.streams, plan.rounds, plan.seconds, plan.seed, plan.warmup) == ((4, 1), 5, 120.0, 3, 0)
    workload = plan.workload
    assert (workload.prompt_tokens, workload.output_tokens, workload.turns, workload.turn_tokens) == (9, 8, 2, 9)
    assert [(spec.model, spec.max_streams) for spec in specs] == [("demo", 4)]


def test_a_comparison_has_more_rounds_and_labels() -> None:
    _, results = prepare(BenchOptions(configs=(X, Y)), loaded)
    assert [target.label for target in results.targets] == ["A", "B"]
    assert results.plan.rounds == 6
    assert prepare(BenchOptions(), loaded)[1].plan.rounds == 3


def test_prompts_are_new_in_every_run_without_a_seed() -> None:
    seeds = {prepare(BenchOptions(), loaded)[1].plan.seed for _ in range(5)}
    assert len(seeds) > 1


def test_the_default_streams_are_limited_to_the_slots_and_this_is_noted() -> None:
    _, results = prepare(BenchOptions(workload="batch"), loaded)
    assert results.plan.streams == (4,)
    assert results.notes == ["the cache of demo has 4 slots: measured with 4 streams instead of 8"]


def test_a_server_queues_more_streams_than_it_has_slots() -> None:
    assert prepare(BenchOptions(streams="64", http=True), loaded)[1].plan.streams == (64,)
    assert prepare(BenchOptions(streams="64", urls=(A,)), loaded)[1].plan.streams == (64,)


# --- opened targets ---------------------------------------------------------------------------------------------------

CHAT = get_workload("chat", prompt_tokens=30, output_tokens=6)
SCRIPT: list[dict[str, Any]] = [{"steps": [{"tokens": 50}]}]


def config(**model: Any) -> Config:
    return load_config(env={}, overrides=demo_config(SCRIPT, **model) | {"workers": {"patience": 1000}}).config


async def measured(spec: TargetSpec) -> tuple[Round, list[str]]:
    lines: list[str] = []
    async with spec.open(lines.append) as target:
        return await run_round(target, CHAT, streams=2), lines


@pytest.mark.parametrize("model", [{}, {"kind": "chat"}, {"placement": "process"}])
async def test_every_kind_of_engine_is_measured_in_process(model: dict[str, Any]) -> None:
    settings = config(**model)
    spec = engine_target(settings, "mine", find_cache(settings, "demo", None), CHAT, 60.0)
    found, _ = await measured(spec)
    assert [sample.output_tokens for sample in found.succeeded] == [6, 6]
    assert (spec.name, spec.model, spec.max_streams) == ("mine", "demo", 4)


async def test_a_model_that_cannot_be_defined_is_an_error() -> None:
    settings = config(tokenizer_path="/no/such/tokenizer.json")
    spec = engine_target(settings, "mine", find_cache(settings, None, None), CHAT, 60.0)
    with pytest.raises(ModelyardError, match="tokenizer"):
        await measured(spec)


async def test_a_server_runs_for_the_time_of_the_measurement(tmp_path: Path) -> None:
    file = tmp_path / "modelyard.json"
    file.write_text(json.dumps(demo_config(SCRIPT)))
    settings = load_config(file, env={}).config
    spec = server_target(settings, file, "mine", find_cache(settings, None, "fast"), Access())
    found, lines = await measured(spec)
    assert [sample.output_tokens for sample in found.succeeded] == [6, 6]
    assert lines == ["starting a server", "loading the model"]


async def test_a_url_is_measured() -> None:
    with live_server(demo_config(SCRIPT)) as running:
        found, _ = await measured(url_target(running.url, None, Access(extra={"max_tokens": 4})))
    assert [sample.output_tokens for sample in found.succeeded] == [4, 4]


async def test_a_url_without_a_server_is_an_error() -> None:
    with pytest.raises(Unavailable, match="does not respond"):
        await measured(url_target("http://127.0.0.1:1", None, Access()))


@pytest.mark.parametrize(
    ("routes", "cache", "name"),
    [
        ([], "main", "demo"),
        ([], "fast", "fast"),
        ([{"match": "*haiku*", "cache": "fast"}, {"match": "*", "cache": "main"}], "main", "demo"),
        ([{"match": "*haiku*", "cache": "fast"}, {"match": "*", "cache": "main"}], "fast", "fast"),
    ],
)
def test_over_http_a_cache_is_requested_by_a_name_that_leads_to_it(
    routes: list[dict[str, Any]], cache: str, name: str
) -> None:
    settings = load_config(env={}, overrides={**demo_config(), "routes": routes}).config
    assert model_name(settings, find_cache(settings, "demo", cache)) == name


def test_a_cache_without_a_name_cannot_be_measured_over_http() -> None:
    route = {"match": "fast", "cache": "main"}
    settings = load_config(env={}, overrides={**demo_config(), "routes": [route]}).config
    with pytest.raises(InvalidRequest, match="no route or name leads to the cache fast of demo"):
        server_target(settings, None, "mine", find_cache(settings, "demo", "fast"), Access())


def test_a_cache_is_found_by_model_by_name_or_by_default() -> None:
    settings = config()
    assert find_cache(settings, None, None).name == "main"
    assert find_cache(settings, "demo", "fast").name == "fast"
    assert find_cache(settings, "fast", None).name == "fast"


async def test_a_server_that_exits_at_once_is_reported_with_its_output(tmp_path: Path) -> None:
    file = tmp_path / "modelyard.json"
    file.write_text('{"modelz": {}}')
    with pytest.raises(Unavailable, match=r"the server ended with exit code 2: (.|\n)*modelz"):
        async with running_server(file, "demo", None, lambda line: None):
            raise AssertionError


async def test_an_unknown_key_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "modelyard.json"
    file.write_text(json.dumps(demo_config() | {"keys": [{"name": "me", "key": "sesame-open-please"}]}))
    with pytest.raises(ModelyardError, match="key"):
        async with running_server(file, "demo", None, lambda line: None):
            raise AssertionError
