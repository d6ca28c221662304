"""Subjects made ready: an engine in this process, a server of its own, a URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelyard.benchmark.bench import subjects
from modelyard.benchmark.bench.subjects import Access, Candidate
from modelyard.benchmark.lanes import play
from modelyard.benchmark.sample import Round
from modelyard.benchmark.workload import named
from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from tests.serving import demo, serving

CHAT = named("chat", prompt_tokens=30, output_tokens=6)
SCRIPT: list[dict[str, Any]] = [{"steps": [{"tokens": 50}]}]


def config(**model: Any) -> Config:
    return load_config(env={}, overrides=demo(SCRIPT, **model) | {"workers": {"patience": 1000}}).config


async def measured(candidate: Candidate) -> tuple[Round, list[str]]:
    said: list[str] = []
    async with candidate.open(said.append) as load:
        return await play(load, CHAT, streams=2), said


@pytest.mark.parametrize("model", [{}, {"kind": "chat"}, {"placement": "process"}])
async def test_any_engine_is_measured_in_process(model: dict[str, Any]) -> None:
    made = config(**model)
    candidate = subjects.in_process(made, "mine", subjects.find(made, "demo", None), CHAT, 60.0)
    found, _ = await measured(candidate)
    assert [sample.output_tokens for sample in found.good] == [6, 6]
    assert (candidate.name, candidate.model, candidate.places) == ("mine", "demo", 4)


async def test_a_model_that_cannot_be_defined_says_why() -> None:
    made = config(tokenizer_path="/no/such/tokenizer.json")
    candidate = subjects.in_process(made, "mine", subjects.find(made, None, None), CHAT, 60.0)
    with pytest.raises(ModelyardError, match="tokenizer"):
        await measured(candidate)


async def test_a_server_of_its_own_is_started_for_the_time_of_the_measurement(tmp_path: Path) -> None:
    file = tmp_path / "modelyard.json"
    file.write_text(json.dumps(demo(SCRIPT)))
    made = load_config(file, env={}).config
    candidate = subjects.over_http(made, file, "mine", subjects.find(made, None, "fast"), Access())
    found, said = await measured(candidate)
    assert [sample.output_tokens for sample in found.good] == [6, 6]
    assert said == ["starting a server", "loading the model"]


async def test_a_url_is_asked_as_it_is() -> None:
    with serving(demo(SCRIPT)) as running:
        found, _ = await measured(subjects.at_url(running.url, None, Access(extra={"max_tokens": 4})))
    assert [sample.output_tokens for sample in found.good] == [4, 4]


async def test_a_url_where_nobody_answers_is_no_subject() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await measured(subjects.at_url("http://127.0.0.1:1", None, Access()))


@pytest.mark.parametrize(
    ("routes", "cache", "name"),
    [
        ([], "main", "demo"),
        ([], "fast", "fast"),
        ([{"match": "*haiku*", "cache": "fast"}, {"match": "*", "cache": "main"}], "main", "demo"),
        ([{"match": "*haiku*", "cache": "fast"}, {"match": "*", "cache": "main"}], "fast", "haiku"),
    ],
)
def test_over_http_a_cache_is_asked_for_by_a_name_that_leads_to_it(
    routes: list[dict[str, Any]], cache: str, name: str
) -> None:
    made = load_config(env={}, overrides={**demo(), "routes": routes}).config
    assert subjects.address(made, subjects.find(made, "demo", cache)) == name


def test_a_cache_that_no_name_leads_to_is_measured_in_process_or_not_at_all() -> None:
    made = load_config(env={}, overrides={**demo(), "routes": [{"match": "*", "cache": "main"}]}).config
    with pytest.raises(InvalidRequest, match="the routes lead no name to the cache fast of demo"):
        subjects.over_http(made, None, "mine", subjects.find(made, "demo", "fast"), Access())


def test_a_cache_is_found_by_model_by_name_or_by_default() -> None:
    made = config()
    assert subjects.find(made, None, None).name == "main"
    assert subjects.find(made, "demo", "fast").name == "fast"
    assert subjects.find(made, "fast", None).name == "fast"
