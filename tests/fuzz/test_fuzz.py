"""A short run of the fuzzer with fixed seeds: nothing is found. `make fuzz` runs for longer, with other seeds."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.fuzz.explore import Results, Target, explore_all
from tests.fuzz.file_targets import file_targets
from tests.fuzz.frame_targets import frame_targets
from tests.fuzz.server_under_test import server_in_thread, server_of_architectures

SEED = 17
_PATHS = ("chat/completions", "completions", "embeddings", "rerank", "messages", "responses")
MODEL_CALLS = {f"POST /v1/{path}" for path in _PATHS} | {"POST /infill"}


def expect_nothing(targets: list[Target[Any]], times: int) -> None:
    results = Results()
    explore_all(targets, times, SEED, results)
    assert not results.findings, "\n".join(map(str, results.findings.values()))
    assert len(results.outcomes) == len(targets)


@pytest.mark.parametrize(("admin", "times"), [(False, 40), (True, 15)], ids=["api", "admin"])
def test_no_request_breaks_the_server(admin: bool, times: int) -> None:
    with server_in_thread() as server:
        expect_nothing(server.targets(admin=admin), times)


@pytest.mark.parametrize(("opened", "times"), [(frame_targets, 60), (file_targets, 150)], ids=["frames", "files"])
def test_no_frame_and_no_file_breaks_a_process(opened: Any, times: int) -> None:
    targets: AbstractContextManager[list[Target[Any]]] = opened()
    with targets as found:
        expect_nothing(found, times)


def test_no_request_to_a_model_of_an_unusual_architecture_ends_the_gateway() -> None:
    with server_of_architectures() as server:
        targets = [target for target in server.targets(admin=False) if target.name in MODEL_CALLS]
        assert len(targets) == len(MODEL_CALLS)
        expect_nothing(targets, times=4)
