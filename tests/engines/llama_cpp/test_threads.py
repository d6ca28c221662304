"""The number of threads follows the machine: simulated machines, and a real context."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from modelyard.engines.llama_cpp.threads import ThreadCount

Machine = Callable[[int, int], float]  # (threads, rows) → seconds of a step


def quiet(threads: int, rows: int) -> float:
    """Every core is free."""
    return 0.008 * rows**0.5 / threads**0.9


def busy(free: int, random: Random) -> Machine:
    """If there are more threads than free cores, all of them wait until each has had its time slice."""

    def step(threads: int, rows: int) -> float:
        waits = random.uniform(2, 8) * threads / free if threads > free else random.uniform(0.9, 1.2)
        return quiet(min(threads, free), rows) * waits

    return step


def run(count: ThreadCount, machine: Machine, seconds: float, rows: int = 1) -> float:
    """Steps per second."""
    steps, spent = 0, 0.0
    while spent < seconds:
        took = machine(count.next(rows), rows)
        count.took(rows, took)
        steps, spent = steps + 1, spent + took
    return steps / spent


@pytest.mark.parametrize("cores", [2, 4, 16])
@pytest.mark.parametrize("rows", [1, 8, 512])
def test_on_a_quiet_machine_all_threads_compute_nearly_all_of_the_time(cores: int, rows: int) -> None:
    assert run(ThreadCount(cores), quiet, 120, rows) > 0.95 / quiet(cores, rows)


@pytest.mark.parametrize(("cores", "free"), [(2, 1), (4, 1), (4, 3), (16, 12), (16, 1)])
def test_on_a_busy_machine_as_many_threads_as_cores_are_free_do(cores: int, free: int) -> None:
    count, random = ThreadCount(cores), Random(1)
    run(count, busy(free, random), 20)  # finds it
    best = 1 / (1.05 * quiet(free, 1))
    assert run(count, busy(free, random), 120) > 0.85 * best


def test_a_load_that_comes_and_goes_is_followed_within_seconds() -> None:
    count, random = ThreadCount(2), Random(2)
    for _ in range(3):
        run(count, quiet, 9)  # a core that is free again is not seen by one thread, only by a try
        assert run(count, quiet, 5) > 0.95 / quiet(2, 1)
        run(count, busy(1, random), 5)
        assert run(count, busy(1, random), 5) > 0.8 / (1.05 * quiet(1, 1))


def test_steps_of_other_sizes_are_not_compared_with_each_other() -> None:
    """A prompt between tokens is slow because it is long."""
    count = ThreadCount(2)
    for _ in range(200):
        for rows in (1, 1, 1, 512):
            threads = count.next(rows)
            count.took(rows, quiet(threads, rows))
    assert repr(count) == "<ThreadCount 2 of 2>"


def test_one_core_is_never_tried_with_another_number() -> None:
    count = ThreadCount(1)
    run(count, quiet, 5)
    assert {count.next(rows) for rows in (1, 8, 512)} == {1}
