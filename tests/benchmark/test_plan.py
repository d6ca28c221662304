"""Durations, the order of rounds, and how long each is."""

from __future__ import annotations

import pytest

from modelyard.benchmark.load import RoundLength
from modelyard.benchmark.plan import Plan, Step, parse_duration
from modelyard.benchmark.workload import get_workload
from modelyard.core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("30s", 30), ("10m", 600), ("1.5h", 5400), (" 2 M ", 120), ("0.5s", 0.5)]
)
def test_a_duration_is_parsed(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-3s", "0", "3d", "1m30s", "inf"])
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidRequest, match="such as 90, 30s, 10m or 1h"):
        parse_duration(text)


def plan(**more: object) -> Plan:
    return Plan(**{"workload": get_workload("chat"), "streams": (1, 4), **more})  # type: ignore[arg-type]


def test_targets_alternate_in_order_from_round_to_round() -> None:
    order = [(s.number, s.streams, s.target) for s in plan(rounds=2).steps(2) if not s.is_warmup]
    assert order == [(0, 1, 0), (0, 1, 1), (0, 4, 0), (0, 4, 1), (1, 1, 1), (1, 1, 0), (1, 4, 1), (1, 4, 0)]


def test_every_target_is_warmed_up_with_all_streams_before_the_first_round() -> None:
    first = list(plan(rounds=1).steps(2))[:2]
    assert first == [Step(0, 4, -1), Step(1, 4, -1)]
    assert all(step.is_warmup for step in first)
    assert not any(step.is_warmup for step in plan(warmup=0).steps(2))


def test_every_step_has_its_own_key() -> None:
    keys = [step.key for step in plan(rounds=3).steps(2)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("workload", "options", "streams", "expected"),
    [
        ("chat", {}, 4, RoundLength(conversations=2)),
        ("chat", {"requests": 10}, 4, RoundLength(conversations=3)),
        ("chat", {"requests": 1}, 4, RoundLength(conversations=1)),
        ("agent", {}, 2, RoundLength(conversations=1)),
        ("agent", {"requests": 9}, 2, RoundLength(conversations=2)),
        ("chat", {"seconds": 3.0}, 4, RoundLength(seconds=3.0)),
    ],
)
def test_a_round_has_whole_conversations(
    workload: str, options: dict[str, float], streams: int, expected: RoundLength
) -> None:
    assert plan(workload=get_workload(workload), **options).round_length(streams) == expected


def test_the_size_of_a_step_is_its_responses_or_its_seconds() -> None:
    agent = plan(workload=get_workload("agent", turns=3), streams=(1, 2), rounds=2)
    assert agent.size(Step(0, 2, 0)) == 6
    assert agent.size(Step(0, 2, -1)) == 6
    assert plan(seconds=5.0).size(Step(0, 1, 0)) == 5.0
