"""The order of rounds, and how long each is."""

from __future__ import annotations

import pytest

from modelyard.benchmark.bench.plan import Plan, Step, steps
from modelyard.benchmark.lanes import Extent
from modelyard.benchmark.workload import named


def plan(**more: object) -> Plan:
    return Plan(**{"workload": named("chat"), "streams": (1, 4), **more})  # type: ignore[arg-type]


def test_two_subjects_take_turns_there_and_back() -> None:
    order = [(s.number, s.streams, s.subject) for s in steps(plan(rounds=2), 2) if not s.is_warmup]
    assert order == [(0, 1, 0), (0, 1, 1), (0, 4, 0), (0, 4, 1), (1, 1, 1), (1, 1, 0), (1, 4, 1), (1, 4, 0)]


def test_everybody_is_warmed_up_once_with_all_streams_before_anything_counts() -> None:
    first = list(steps(plan(rounds=1), 2))[:2]
    assert first == [Step(0, 4, -1), Step(1, 4, -1)]
    assert all(step.is_warmup for step in first)
    assert not any(step.is_warmup for step in steps(plan(warmup=0), 2))


def test_every_step_has_a_key_of_its_own() -> None:
    keys = [step.key for step in steps(plan(rounds=3), 2)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("workload", "asked", "streams", "expected"),
    [
        ("chat", {}, 4, Extent(conversations=2)),
        ("chat", {"requests": 10}, 4, Extent(conversations=3)),
        ("chat", {"requests": 1}, 4, Extent(conversations=1)),
        ("agent", {}, 2, Extent(conversations=1)),
        ("agent", {"requests": 9}, 2, Extent(conversations=2)),
        ("chat", {"seconds": 3.0}, 4, Extent(seconds=3.0)),
    ],
)
def test_a_round_is_as_long_as_asked_in_whole_conversations(
    workload: str, asked: dict[str, float], streams: int, expected: Extent
) -> None:
    assert plan(workload=named(workload), **asked).extent(streams) == expected


def test_the_answers_of_a_round_are_known_unless_time_decides() -> None:
    assert plan(workload=named("agent", turns=3)).answers(4) == 12
    assert plan(seconds=1.0).answers(4) is None
