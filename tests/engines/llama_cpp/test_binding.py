"""The pool of threads: one for all contexts, gone when it is closed, and no harm where the library has none."""

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


def test_pool_has_its_threads_until_it_is_closed() -> None:
    before = count()
    pool = ThreadPool(3)
    assert pool.is_shared
    assert count() == before + 2  # the caller is the third
    pool.close()
    assert count() == before
    pool.close()


def test_single_thread_needs_no_thread_pool() -> None:
    before = count()
    pool = ThreadPool(1)
    assert not pool.is_shared
    assert count() == before
    pool.close()


async def test_caches_compute_on_one_thread_pool() -> None:
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


async def test_cache_with_fewer_threads_than_the_pool_computes_with_its_own() -> None:
    caches = {"main": CacheInfo(128, 1, n_threads=2), "fast": CacheInfo(128, 1, n_threads=1)}
    async with running(caches, path=str(exact_model())) as engine:
        main, fast = [await read(engine.generate(id_prompt(RUN, cache=cache))) for cache in caches]
    assert ids(main) == ids(fast)


async def test_prompts_may_be_read_with_more_threads_than_answers_are_made_with() -> None:
    caches = {"main": CacheInfo(128, 1)}
    answers = []
    for n_threads_batch in (None, 2):
        made = {"path": str(exact_model()), "n_threads": 1, "n_threads_batch": n_threads_batch}
        async with running(caches, **made) as engine:
            assert engine._thread_pool is not None
            assert engine._thread_pool.is_shared == (n_threads_batch == 2)
            answers.append(ids(await read(engine.generate(id_prompt(RUN)))))
    assert answers[0] == answers[1]


async def test_library_without_pools_still_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(binding, "lib", SimpleNamespace(_lib=SimpleNamespace()))
    with caplog.at_level(logging.INFO, logger=binding.__name__):
        async with running({"main": CacheInfo(128, 1)}, path=str(exact_model()), n_threads=2) as engine:
            assert end(await read(engine.generate(id_prompt(RUN)))).reason == "length"
    assert "ggml_threadpool_params_init" in caplog.text


def test_pool_brings_no_second_copy_of_the_library() -> None:
    """Its threads would compute with tables that nobody has filled."""
    ThreadPool(2).close()
    mapped = {mapping.path for mapping in psutil.Process().memory_maps() if "libggml-cpu" in mapping.path}
    assert len(mapped) == 1
