"""Engines that tests share: opening one for every test would take most of the time of the suite.

The tests of this package run on one event loop and are sorted by subject. A shared engine is emptied before each test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from modelyard.core.engine import CacheInfo, Control, TextEngine
from tests.engines.conformance.subjects import CLUSTER, SUBJECTS, Subject, params
from tests.workers.ray_nodes import RayNodes, ray_nodes

Open = Callable[..., Awaitable[TextEngine]]

_HERE = Path(__file__).parent
_UNSHARED = ("vllm_real", *CLUSTER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [at for at, item in enumerate(items) if item.path.is_relative_to(_HERE)]
    for at, item in zip(mine, sorted((items[at] for at in mine), key=_sort_key), strict=True):
        items[at] = item


def _sort_key(item: pytest.Item) -> tuple[bool, str]:
    callspec = getattr(item, "callspec", None)
    return item.path.name == "test_chat_engines.py", callspec.params.get("subject", "") if callspec is not None else ""


class SharedEngines:
    """Open engines of one subject at a time, by their arguments."""

    def __init__(self) -> None:
        self._subject: Subject | None = None
        self._engines: dict[tuple[int, int, bool], TextEngine] = {}

    async def get(self, subject: Subject, window: int, parallel: int, slow: bool) -> TextEngine:
        if subject is not self._subject:
            await self.close()
            self._subject = subject
        key = (window, parallel, slow)
        if key not in self._engines:
            self._engines[key] = await open_engine(subject, window, parallel, slow)
        return self._engines[key]

    async def discard_unusable(self) -> None:
        for key, engine in tuple(self._engines.items()):
            if engine.lost.done() or engine.stats().running:
                del self._engines[key]
                await engine.close()

    async def close(self) -> None:
        while self._engines:
            await self._engines.popitem()[1].close()


async def open_engine(subject: Subject, window: int, parallel: int, slow: bool, file: Path | None = None) -> TextEngine:
    caches = {"main": CacheInfo(window, parallel), "fast": CacheInfo(window, parallel)}
    engine = subject.create(caches, slow=slow, file=file)
    await engine.open(lambda *_: None)
    return engine


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[RayNodes]:
    with ray_nodes() as made:
        yield made


@pytest.fixture(params=params(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "llama_cpp_ray":
        request.getfixturevalue("ray_cluster")
    return SUBJECTS[request.param]


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_engines() -> AsyncIterator[SharedEngines]:
    shared = SharedEngines()
    yield shared
    await shared.close()


@pytest_asyncio.fixture(loop_scope="package")
async def opened(subject: Subject, shared_engines: SharedEngines) -> AsyncIterator[Open]:
    """Returns an open engine without KV of earlier tests. Do not close it: `fresh` is for tests that do."""
    closing: list[TextEngine] = []

    async def open_(
        window: int = 512, parallel: int = 2, *, slow: bool = False, file: Path | None = None
    ) -> TextEngine:
        if window != 512 or file is not None or subject in [SUBJECTS[name] for name in _UNSHARED]:
            closing.append(engine := await open_engine(subject, window, parallel, slow, file))
            return engine
        engine = await shared_engines.get(subject, window, parallel, slow)
        await engine.control(Control("evict"))
        return engine

    yield open_
    for engine in closing:
        await engine.close()
    await shared_engines.discard_unusable()


@pytest_asyncio.fixture(loop_scope="package")
async def fresh(subject: Subject) -> AsyncIterator[TextEngine]:
    """An open engine for one test."""
    engine = await open_engine(subject, 512, 2, slow=True)
    yield engine
    await engine.close()
