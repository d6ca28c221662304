"""Every test here runs a real agent: none of them is part of a run that does not ask for them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(autouse=True, scope="session")
def _interrupts_reach_the_agents() -> Iterator[None]:
    """A shell that runs the tests in its background has them, and what they start, ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
