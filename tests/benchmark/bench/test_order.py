"""What the user typed, made into subjects and a plan, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelyard.benchmark.bench.order import Order, Place, places, prepare
from modelyard.config.load import LoadedConfig, load_config
from modelyard.core.errors import ModelyardError
from tests.serving import demo

A, B = "http://a", "http://b"
X, Y = Path("x.toml"), Path("y.toml")


def loaded(path: Path | None) -> LoadedConfig:
    return load_config(env={}, overrides=demo())


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ({}, [Place(None, None, None, None)]),
        ({"models": ("m",)}, [Place(None, None, "m", None)]),
        ({"urls": (A, B), "models": ("m",)}, [Place(A, None, "m", None), Place(B, None, "m", None)]),
        ({"urls": (A, B), "models": ("m", "n")}, [Place(A, None, "m", None), Place(B, None, "n", None)]),
        ({"urls": (A,), "models": ("m", "n")}, [Place(A, None, "m", None), Place(A, None, "n", None)]),
        ({"configs": (X, Y)}, [Place(None, X, None, None), Place(None, Y, None, None)]),
        ({"urls": (A,), "configs": (X,)}, [Place(A, None, None, None), Place(None, X, None, None)]),
        ({"urls": (A, B), "keys": ("k",)}, [Place(A, None, None, "k"), Place(B, None, None, "k")]),
        ({"urls": (A, B), "keys": ("k", "l")}, [Place(A, None, None, "k"), Place(B, None, None, "l")]),
    ],
)
def test_places_models_and_keys_find_each_other(order: dict[str, Any], expected: list[Place]) -> None:
    assert places(Order(**order)) == expected


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"urls": (A, B), "models": ("m", "n", "o")}, "one --model for all, or one for each"),
        ({"urls": (A, B, A), "models": ("m", "n")}, "give --model once for all 3, or once for each"),
        ({"urls": (A, B, A), "keys": ("m", "n")}, "give --key once for all 3"),
        ({"urls": (A,) * 9}, "at most 8"),
        ({"workload": "talk"}, "there is no workload 'talk'"),
        ({"models": ("other",)}, "no model 'other'; there are demo"),
        ({"cache": "big"}, "the model demo has no cache 'big'; it has main, fast"),
        ({"streams": "1,8"}, "the cache of demo has 4 places and -c asks for 8"),
        ({"streams": "many"}, "no list of numbers such as 1,4,8"),
        ({"streams": "0"}, "no list of numbers"),
        ({"prompt_tokens": 4000}, "takes 4128 tokens and the cache main has 4096"),
        ({"requests": 3, "duration": "3s"}, "by --requests or by --duration, not by both"),
        ({"duration": "soon"}, "no span of time"),
        ({"limit": "never"}, "no span of time"),
        ({"urls": (A,), "body": "[1]"}, "--body must be a JSON object"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_runs(order: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelyardError) as caught:
        prepare(Order(**order), loaded)
    assert said in caught.value.message


def test_a_plan_is_what_was_asked_for() -> None:
    order = Order(streams="4,1,4", prompt_tokens=9, output_tokens=8, turns=2, duration="2m", rounds=5, seed=3, warmup=0)
    candidates, book = prepare(order, loaded)
    plan = book.plan
    assert (plan.streams, plan.rounds, plan.seconds, plan.seed, plan.warmup) == ((4, 1), 5, 120.0, 3, 0)
    workload = plan.workload
    assert (workload.prompt_tokens, workload.output_tokens, workload.turns, workload.turn_tokens) == (9, 8, 2, 9)
    assert [(c.model, c.places) for c in candidates] == [("demo", 4)]


def test_a_comparison_has_more_rounds_and_labels() -> None:
    _, book = prepare(Order(configs=(X, Y)), loaded)
    assert [subject.label for subject in book.subjects] == ["A", "B"]
    assert book.plan.rounds == 6
    assert prepare(Order(), loaded)[1].plan.rounds == 3


def test_prompts_are_new_in_every_run_unless_a_seed_is_given() -> None:
    seeds = {prepare(Order(), loaded)[1].plan.seed for _ in range(5)}
    assert len(seeds) > 1


def test_a_workload_with_more_streams_than_places_is_measured_with_those_there_are_and_it_is_said() -> None:
    _, book = prepare(Order(workload="batch"), loaded)
    assert book.plan.streams == (4,)
    assert book.notes == ["the cache of demo has 4 places: measured with 4 streams instead of 8"]


def test_over_http_and_at_urls_requests_queue() -> None:
    assert prepare(Order(streams="64", http=True), loaded)[1].plan.streams == (64,)
    assert prepare(Order(streams="64", urls=(A,)), loaded)[1].plan.streams == (64,)
