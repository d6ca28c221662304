"""How every token engine opens, closes, is cancelled, and refuses what it cannot read."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from modelyard.core.engine import Accepted, CacheInfo, Control, Progress, Tokens
from modelyard.core.errors import ModelyardError, NotFound, Unavailable
from tests.engines.conformance.conftest import Open
from tests.engines.conformance.subjects import RELOADED, REUSING, TELLING, Subject, prompt, reread
from tests.engines.reading import accepted, end, ids, read, until

CACHES = {"main": CacheInfo(256, 2)}
LONG = "A long walk along the river. " * 20
CYCLES = 8
GROWTH = 64 << 20  # a context or a model that stays behind so often is several times this


async def test_opening_tells_its_progress(subject: Subject) -> None:
    told: list[float] = []
    engine = subject.make(CACHES)
    await engine.open(lambda done, _: told.append(done))
    await asyncio.sleep(0)  # what another thread has told reaches the loop in its next round
    await engine.close()
    assert told == sorted(told)
    assert told[-1] == 1.0


async def test_engine_closes_twice_and_unopened(subject: Subject) -> None:
    engine = subject.make(CACHES)
    await engine.close()
    opened = subject.make(CACHES)
    await opened.open(lambda *_: None)
    await opened.close()
    await opened.close()


async def test_opening_can_be_given_up(subject: Subject) -> None:
    engine = subject.make(CACHES)
    task = asyncio.create_task(engine.open(lambda *_: None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.close()


async def test_close_ends_what_runs_and_what_waits(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True)
    running = engine.generate(prompt(subject, LONG, max_tokens=200))
    seen = await until(running, Accepted)
    waiting = engine.generate(prompt(subject, LONG, max_tokens=200))
    await engine.close()
    for chunks in (seen + await read(running), await read(waiting)):
        assert isinstance(end(chunks).error, Unavailable)


async def test_closed_engine_refuses_jobs(subject: Subject, opened: Open) -> None:
    engine = await opened()
    await engine.close()
    assert isinstance(end(await read(engine.generate(prompt(subject)))).error, Unavailable)


@pytest.mark.parametrize("subject", RELOADED, indirect=True)
async def test_many_loads_and_unloads_leave_no_memory_behind(subject: Subject) -> None:
    async def cycle() -> int:
        """What was taken while it was open."""
        closed = _own_memory()
        engine = subject.make(CACHES)
        await engine.open(lambda *_: None)
        assert ids(await read(engine.generate(prompt(subject, "Hi.", max_tokens=1))))
        taken = _own_memory() - closed
        await engine.close()
        return taken

    loads = [await cycle() for _ in range(3)]  # the first ones fill pools and tables that stay
    before = _own_memory()
    for _ in range(CYCLES):
        await cycle()
    # An allocator keeps some of what it got, and more in a process that has seen much; a load that stays is a multiple.
    assert _own_memory() - before < max(GROWTH, loads[-1] // 2)


def _own_memory() -> int:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


# --- cancelling -----------------------------------------------------------------------------------------------------


async def test_job_cancelled_at_once_still_ends(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True)
    generation = engine.generate(prompt(subject, LONG, max_tokens=200))
    generation.cancel()
    chunks = await read(generation)
    assert end(chunks).reason == "cancelled"
    assert ids(chunks) == []


@pytest.mark.parametrize("subject", TELLING, indirect=True)
async def test_job_cancelled_while_it_is_read_stops_reading(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True, parallel=1)
    generation = engine.generate(asked := prompt(subject, LONG, max_tokens=200))
    chunks = await until(generation, Progress)
    generation.cancel()
    chunks += await read(generation)
    assert end(chunks).reason == "cancelled"
    assert ids(chunks) == []
    assert max(chunk.done for chunk in chunks if isinstance(chunk, Progress)) < asked.n_tokens


async def test_job_cancelled_while_it_speaks_counts_what_it_said(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True)
    generation = engine.generate(prompt(subject, "Count to a thousand. " * 6, max_tokens=200))
    chunks = await until(generation, Tokens)
    generation.cancel()
    generation.cancel()
    chunks += await read(generation)
    assert end(chunks).reason == "cancelled"
    assert 0 < end(chunks).usage.output == len(ids(chunks)) < 200


async def test_place_of_a_cancelled_job_is_free_when_it_has_ended(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True, parallel=1)
    for kind in (Accepted, Tokens):
        generation = engine.generate(prompt(subject, max_tokens=200))
        await until(generation, kind)
        generation.cancel()
        await read(generation)
        assert engine.stats().running == 0
        assert end(await read(engine.generate(prompt(subject, "Hi.", max_tokens=1)))).error is None


async def test_cancelling_one_job_leaves_the_other_alone(subject: Subject, opened: Open) -> None:
    engine = await opened(slow=True)
    doomed, other = (engine.generate(prompt(subject, session=name, max_tokens=9)) for name in ("a", "b"))
    await until(doomed, Accepted)
    doomed.cancel()
    chunks = await read(other)
    assert end(chunks).reason in ("length", "stop")
    assert len(ids(chunks)) == end(chunks).usage.output > 0
    await read(doomed)


# --- evicting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", REUSING, indirect=True)
async def test_evicting_one_cache_leaves_the_others_reuse_untouched(subject: Subject, opened: Open) -> None:
    engine = await opened()
    for cache in ("main", "fast"):
        await read(engine.generate(prompt(subject, cache=cache, max_tokens=1)))
    await engine.control(Control("evict", "main"))
    kept = {c: accepted(await read(engine.generate(prompt(subject, cache=c)))).cached_tokens for c in ("main", "fast")}
    assert kept == {"main": 0, "fast": reread(subject, prompt(subject).n_tokens)}


async def test_evicting_without_a_name_evicts_all(subject: Subject, opened: Open) -> None:
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
async def test_broken_file_keeps_the_engine_from_opening(
    subject: Subject, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    broken = tmp_path / subject.file.name
    broken.write_bytes(damage(subject.file.read_bytes()))
    engine = subject.make(CACHES, file=broken)
    with pytest.raises(ModelyardError, match=str(broken)):
        await engine.open(lambda *_: None)
    await engine.close()


async def test_missing_file_is_named(subject: Subject, tmp_path: Path) -> None:
    engine = subject.make(CACHES, file=tmp_path / subject.file.name)
    with pytest.raises(ModelyardError, match=str(tmp_path)):
        await engine.open(lambda *_: None)
    await engine.close()
