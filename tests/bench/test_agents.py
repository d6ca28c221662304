"""The agent benchmark: a short session against a running server, and what is compared with what."""

from __future__ import annotations

import psutil
from msgspec import structs

from bench.agents import BEST, EQUAL, Outcome, comparisons, run
from bench.peers import OURS
from bench.servers import Server
from bench.session import QUICK, replay
from tests.serving import demo, serving

ONE = Outcome(10, 1000, 100, 50, 2.0, 10.0, 8.0, 500.0)


def test_a_session_is_played_to_its_end_and_summed():
    seen: list[str] = []
    with serving(demo([{"steps": [{"tokens": 3}]}])) as served:
        server = Server(psutil.Process(), int(served.url.rpartition(":")[2]))
        found = run(server, QUICK, lambda talk: seen.append(talk.name))
    assert found.requests == len(seen) == sum(1 for _ in replay(QUICK))
    assert found.answered == 3 * found.requests
    assert 0 < found.ttft <= found.seconds
    assert found.peak_mb > 0


def test_the_best_rival_sets_the_times_and_the_equal_one_the_tokens():
    equal = structs.replace(ONE, evaluated=1000)
    lines = {line.what: line for line in comparisons({OURS: [ONE, ONE], BEST: [ONE, ONE], EQUAL: [equal]})}
    assert lines["prompt tokens evaluated, equal KV memory"].met is True
    assert lines["prompt tokens evaluated"].met is True
    assert lines["times to the first token, summed"].met is False
    assert lines["the whole session"].met is True


def test_without_the_equal_one_nothing_is_said_of_it():
    assert all("equal" not in line.what for line in comparisons({OURS: [ONE], BEST: [ONE]}))
