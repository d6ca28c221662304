"""Every text engine opens, closes, cancels jobs, evicts caches and reports broken files in the same way."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from modelyard.core.engine import Accepted, CacheInfo, Control, Progress, TextEngine, Tokens
from modelyard.core.errors import ModelyardError, NotFound, Unavailable
from tests.engines.conformance.conftest import Open
from tests.engines.conformance.subjects import (
    FAST_TO_LOAD,
    REPORTING_PROGRESS,
    REUSING_KV,
    Subject,
    prompt,
    reusable_tokens,
)
from tests.engines.reading import accepted, end, ids, read, until

pytestmark = pytest.mark.asyncio(loop_scope="package")

CACHES = {"main": CacheInfo(256, 2)}
LONG = "A long walk along the river. " * 20
CYCLES = 3
MAX_GROWTH = 64 << 20  # bytes; a leaked context or model would add several times as much


async def test_load_reports_its_progress(subject: Subject) -> None:
    reports: list[float] = []
    engine = subject.create(CACHES)
    await engine.open(lambda done, _: reports.append(done))
    await asyncio.sleep(0)  # a report of another thread arrives in the next loop iteration
    await engine.close()
    assert reports == sorted(reports)
    assert reports[-1] == 1.0


async def test_engine_closes_twice_and_unopened(subject: Subject) -> None:
    engine = subject.create(CACHES)
    await engine.close()
    opened = subject.create(CACHES)
    await opened.open(lambda *_: None)
    await opened.close()
    await opened.close()


async def test_load_can_be_cancelled(subject: Subject) -> None:
    engine = subject.create(CACHES)
    task = asyncio.create_task(engine.open(lambda *_: None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.close()


async def test_close_fails_running_waiting_and_later_jobs(subject: Subject, fresh: TextEngine) -> None:
    running = fresh.generate(prompt(subject, LONG, max_tokens=200))
    seen = await until(running, Accepted)
    waiting = fresh.generate(prompt(subject, LONG, max_tokens=200))
    await fresh.close()
    for chunks in (seen + await read(running), await read(waiting), await read(fresh.generate(prompt(subject)))):
        assert isinstance(end(chunks).error, Unavailable)


@pytest.mark.parametrize("subject", FAST_TO_LOAD, indirect=True)
async def test_repeated_loads_leak_no_memory(subject: Subject) -> None:
    async def cycle(measure: Callable[[], int] = lambda: 0) -> int:
        engine = subject.create(CACHES)
        await engine.open(lambda *_: None)
        assert ids(await read(engine.generate(prompt(subject, "Hi.", max_tokens=1))))
        open_memory = measure()
        await engine.close()
        return open_memory

    await cycle()  # the first load fills pools that stay
    closed = _own_memory()
    size = await cycle(_own_memory) - closed
    before = _own_memory()
    for _ in range(CYCLES):
        await cycle()
    # Allocators keep some memory, and more in a long-lived process; a leak would be a multiple of it.
    assert _own_memory() - before < max(MAX_GROWTH, size // 2)


def _own_memory() -> int:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


# --- cancellation -----------------------------------------------------------------------------------------------------


async def test_job_cancelled_at_once_ends(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True)
    generation = engine.generate(prompt(subject, LONG, max_tokens=200))
    generation.cancel()
    chunks = await read(generation)
    assert end(chunks).reason == "cancelled"
    assert len(ids(chunks)) <= 1  # the engine's thread may have begun a step


@pytest.mark.parametrize("subject", REPORTING_PROGRESS, indirect=True)
async def test_job_cancelled_during_prefill_stops(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True, parallel=1)
    generation = engine.generate(job := prompt(subject, LONG, max_tokens=200))
    chunks = await until(generation, Progress)
    generation.cancel()
    chunks += await read(generation)
    assert end(chunks).reason == "cancelled"
    assert ids(chunks) == []
    assert max(chunk.done for chunk in chunks if isinstance(chunk, Progress)) < job.n_tokens


async def test_job_cancelled_during_decoding_counts_its_output(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True)
    generation = engine.generate(prompt(subject, "Count to a thousand. " * 6, max_tokens=200))
    chunks = await until(generation, Tokens)
    generation.cancel()
    generation.cancel()
    chunks += await read(generation)
    assert end(chunks).reason == "cancelled"
    assert 0 < end(chunks).usage.output == len(ids(chunks)) < 200


async def test_cancelled_job_frees_its_slot(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True, parallel=1)
    for kind in (Accepted, Tokens):
        generation = engine.generate(prompt(subject, max_tokens=200))
        await until(generation, kind)
        generation.cancel()
        await read(generation)
        assert engine.stats().running == 0
        assert end(await read(engine.generate(prompt(subject, "Hi.", max_tokens=1)))).error is None


async def test_cancelling_one_job_does_not_affect_another(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True)
    cancelled, other = (engine.generate(prompt(subject, session=name, max_tokens=9)) for name in ("a", "b"))
    await until(cancelled, Accepted)
    cancelled.cancel()
    chunks = await read(other)
    assert end(chunks).reason in ("length", "stop")
    assert len(ids(chunks)) == end(chunks).usage.output > 0
    await read(cancelled)


# --- eviction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", REUSING_KV, indirect=True)
async def test_evicting_one_cache_keeps_the_others(subject: Subject, opened: Open) -> None:
    engine = await opened()
    for cache in ("main", "fast"):
        await read(engine.generate(prompt(subject, cache=cache, max_tokens=1)))
    await engine.control(Control("evict", "main"))
    cached = {
        c: accepted(await read(engine.generate(prompt(subject, cache=c)))).cached_tokens for c in ("main", "fast")
    }
    assert cached == {"main": 0, "fast": reusable_tokens(subject, prompt(subject).n_tokens)}


async def test_evicting_without_a_name_evicts_all_caches(subject: Subject, opened: Open) -> None:
    engine = await opened()
    for cache in ("main", "fast"):
        await read(engine.generate(prompt(subject, cache=cache, max_tokens=1)))
    await engine.control(Control("evict"))
    assert engine.stats().occupied_tokens == 0


async def test_evicting_an_unknown_cache_is_an_error(opened: Open) -> None:
    engine = await opened()
    with pytest.raises(NotFound):
        await engine.control(Control("evict", "huge"))


# --- files ----------------------------------------------------------------------------------------------------------


def _garbage(data: bytes) -> bytes:
    return bytes(range(256)) * 100


@pytest.mark.parametrize(
    "damage",
    [pytest.param(lambda data: b"", id="empty"), _garbage, pytest.param(lambda data: data[: len(data) // 3], id="cut")],
)
async def test_broken_file_fails_the_load(subject: Subject, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    broken = tmp_path / subject.file.name
    broken.write_bytes(damage(subject.file.read_bytes()))
    engine = subject.create(CACHES, file=broken)
    with pytest.raises(ModelyardError, match=str(broken)):
        await engine.open(lambda *_: None)
    await engine.close()


async def test_missing_file_is_named(subject: Subject, tmp_path: Path) -> None:
    engine = subject.create(CACHES, file=tmp_path / subject.file.name)
    with pytest.raises(ModelyardError, match=str(tmp_path)):
        await engine.open(lambda *_: None)
    await engine.close()
