"""The soak: it runs against a real server, and its verdict notices what grows or is left."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bench.resources import Usage
from bench.servers import modelyard_server
from bench.soak import Sample, Talk, judge, soak

FAKE: dict[str, Any] = {"models": {"real": {"backend": "fake", "token_delay": 0}, "fake": {"backend": "fake"}}}


async def test_a_short_soak_ends_with_every_slot_free() -> None:
    with modelyard_server(FAKE) as server:
        samples, outcomes = await soak(server, minutes=0.02, clients=4, pause_s=0.01)
    assert outcomes["200"] > 0
    assert (samples[-1].waiting, samples[-1].running) == (0, 0)


def samples(rss: float = 0.0, files: int = 0, threads: int = 0, waiting: int = 0, running: int = 0) -> list[Sample]:
    """Ten minutes, in which the memory grows by `rss` MB and the rest is added at the end."""
    usual = [Sample(60.0 * n, Usage(300 + rss * n / 10, 20, 5, 1), 1, 2) for n in range(10)]
    return [*usual, Sample(600.0, Usage(300 + rss, 20 + files, 5 + threads, 1), waiting, running)]


def test_flat_usage_and_expected_outcomes_are_good() -> None:
    outcomes = Counter({"200": 90, "disconnected": 5, "cancelled": 3, "499": 2})
    assert judge(samples(rss=1), outcomes).is_good


@pytest.mark.parametrize(
    ("grown", "outcome", "word"),
    [
        ({"rss": 60}, "200", "memory grows by"),
        ({"files": 20}, "200", "files or threads grow"),
        ({"threads": 20}, "200", "files or threads grow"),
        ({"waiting": 1}, "200", "1 requests wait"),
        ({"running": 1}, "200", "1 run after"),
        ({}, "500", "500"),
        ({}, "ReadTimeout", "ReadTimeout"),
    ],
)
def test_growth_leftovers_and_failures_are_named(grown: dict[str, Any], outcome: str, word: str) -> None:
    verdict = judge(samples(**grown), Counter({outcome: 5}))
    assert not verdict.is_good
    assert word in verdict.reasons[0]


def test_conversations_grow_and_have_the_shape_of_their_protocol() -> None:
    paths = set()
    for number in range(60):
        talk = Talk(number, "real")
        first = talk.body(stream=False)
        talk.answered()
        second = talk.body(stream=True)
        paths.add(talk.path)
        if "messages" in first:
            assert (len(first["messages"]), len(second["messages"])) == (1, 3)
    assert len(paths) == 5
