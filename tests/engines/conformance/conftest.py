from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from modelyard.core.engine import CacheInfo, TextEngine
from tests.engines.conformance.subjects import SUBJECTS, Subject, chosen
from tests.workers.nodes import Nodes, nodes

Open = Callable[..., Awaitable[TextEngine]]


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Nodes]:
    with nodes() as made:
        yield made


@pytest.fixture(params=chosen(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "llama_cpp_ray":
        request.getfixturevalue("ray_cluster")
    return SUBJECTS[request.param]


@pytest.fixture
async def opened(subject: Subject) -> AsyncIterator[Open]:
    """Opens the subject's engine, and closes it when the test is over."""
    engines: list[TextEngine] = []

    async def open_(window: int = 512, parallel: int = 2, *, slow: bool = False) -> TextEngine:
        caches = {"main": CacheInfo(window, parallel), "fast": CacheInfo(window, parallel)}
        engines.append(engine := subject.make(caches, slow=slow))
        await engine.open(lambda *_: None)
        return engine

    yield open_
    for engine in engines:
        await engine.close()
