"""Streams beside a measurement run until the block ends."""

from __future__ import annotations

import pytest

from bench.noise import noise
from tests.serving import Served, demo, serving


def port(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


def test_all_streams_run_inside_the_block():
    with serving(demo([{"steps": [{"text": "…"}, {"hang": True}]}])) as served, noise(port(served), "demo", 3):
        assert served.status("demo").running == 3


def test_streams_that_are_refused_are_an_error():
    refused = [{"steps": [{"fail": "out of memory", "kind": "unavailable"}]}]
    with serving(demo(refused)) as served, pytest.raises(RuntimeError, match="did not start"):  # noqa: SIM117
        with noise(port(served), "demo", 1):
            pass
