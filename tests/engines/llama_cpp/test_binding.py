"""The thread pool: shared by all contexts, ended by close, optional."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import psutil
import pytest

from modelyard.core.engine import CacheInfo
from modelyard.engines.llama_cpp import binding
from modelyard.engines.llama_cpp.binding import ThreadPool
from tests.engines.llama_cpp.exact_models import exact_model
from tests.engines.llama_cpp.helpers import id_prompt, running
from tests.engines.reading import end, ids, read

RUN = list(range(40))


def count() -> int:
    return psutil.Process().num_threads()


def test_a_pool_has_threads_until_it_is_closed() -> None:
    before = count()
    pool = ThreadPool(3)
    assert pool.is_shared
    assert count() == before + 2  # the caller is the third
    pool.close()
    assert count() == before
    pool.close()


def test_a_single_thread_needs_no_pool() -> None:
    before = count()
    pool = ThreadPool(1)
    assert not pool.is_shared
    assert count() == before
    pool.close()


async def test_caches_share_one_pool() -> None:
    caches = {"main": CacheInfo(128, 1), "fast": CacheInfo(128, 1)}
    answers = []
    for n_threads in (1, 2):
        async with running(caches, path=str(exact_model()), n_threads=n_threads) as engine:
            assert engine._thread_pool is not None
            assert engine._thread_pool.is_shared == (n_threads > 1)
            answers += [ids(await read(engine.generate(id_prompt(RUN, cache=cache)))) for cache in caches]
            held = count()
            await read(engine.generate(id_prompt(RUN[:20], cache="main")))
            assert count() == held
    assert all(answer == answers[0] for answer in answers)


async def test_a_cache_may_use_fewer_threads_than_the_pool() -> None:
    caches = {"main": CacheInfo(128, 1, n_threads=2), "fast": CacheInfo(128, 1, n_threads=1)}
    async with running(caches, path=str(exact_model())) as engine:
        main, fast = [await read(engine.generate(id_prompt(RUN, cache=cache))) for cache in caches]
    assert ids(main) == ids(fast)


async def test_prompts_may_use_more_threads_than_streams() -> None:
    caches = {"main": CacheInfo(128, 1)}
    answers = []
    for n_threads_batch in (None, 2):
        made = {"path": str(exact_model()), "n_threads": 1, "n_threads_batch": n_threads_batch}
        async with running(caches, **made) as engine:
            assert engine._thread_pool is not None
            assert engine._thread_pool.is_shared == (n_threads_batch == 2)
            answers.append(ids(await read(engine.generate(id_prompt(RUN)))))
    assert answers[0] == answers[1]


async def test_a_library_without_pools_works(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(binding, "lib", SimpleNamespace(cpu_function=lambda *_: None))
    with caplog.at_level(logging.INFO, logger=binding.__name__):
        async with running({"main": CacheInfo(128, 1)}, path=str(exact_model()), n_threads=2) as engine:
            assert end(await read(engine.generate(id_prompt(RUN)))).reason == "length"
    assert "has no thread pools" in caplog.text


def test_a_pool_loads_no_second_copy_of_the_library() -> None:
    """Its threads would compute with empty tables."""
    ThreadPool(2).close()
    mapped = {mapping.path for mapping in psutil.Process().memory_maps() if "libggml-cpu" in mapping.path}
    assert len(mapped) == 1
