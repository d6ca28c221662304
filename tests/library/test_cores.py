"""The cores of the process, and thread counts worth trying."""

from __future__ import annotations

import psutil
import pytest

from modelyard.library import cores


@pytest.mark.parametrize(
    ("logical", "physical", "expected"),
    [
        (1, 1, (1,)),
        (2, 2, (1, 2)),
        (2, 1, (1, 2)),
        (8, 4, (1, 2, 3, 4, 8)),
        (12, 6, (1, 2, 4, 5, 6, 8, 12)),
        (6, 8, (1, 2, 4, 5, 6)),
        (4, None, (1, 2, 3, 4)),
    ],
)
def test_thread_counts_are_powers_of_two_and_the_numbers_of_cores(logical, physical, expected, monkeypatch):
    monkeypatch.setattr(cores, "logical", lambda: logical)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: physical)
    assert cores.thread_counts() == expected


def test_process_has_at_least_one_core_and_no_more_than_it_may_use():
    assert 1 <= cores.physical() <= cores.logical()


def test_more_threads_than_cores_are_reduced_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cores, "logical", lambda: 8)
    assert [cores.bounded(threads, "n_threads") for threads in (1, 8, 9, 512, 512)] == [1, 8, 8, 8, 8]
    assert [record.message for record in caplog.records] == [
        "n_threads = 9 is more than this process may use: 8 threads, one per core",
        "n_threads = 512 is more than this process may use: 8 threads, one per core",
    ]
