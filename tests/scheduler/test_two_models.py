"""Two models of llama.cpp that do not fit into memory together, behind a complete gateway.

Both are the same file under two names, in windows and on one thread small enough for a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from modelyard.config.load import load_config
from modelyard.core.engine import AvailableMemory
from modelyard.core.events import BlockDelta, Event, Failed, Finished
from modelyard.core.request import Caller, Message, Request, Sampling, Text
from modelyard.gateway.stream import Stream
from modelyard.server.app import ServerApp, compose
from modelyard.server.memory_estimate import estimate_engine
from tests.engines.llama_cpp.helpers import model_file
from tests.engines.llama_cpp.short_model import short_model_file

CALLER = Caller(trace="t", endpoint="/v1/chat/completions")
SAMPLING = Sampling(temperature=0.0)


def settings(limit: int | None, n_ctx: int, file: Path) -> dict[str, Any]:
    model = {
        "backend": "llama_cpp",
        "path": str(file),
        "n_ctx": n_ctx,
        "parallel": 2,
        "n_threads": 1,
        "n_ubatch": 32,
        "autoload": True,
        "enabled": False,
    }
    # Only idle models are evicted, and at once: the result depends on the order of requests, not on time.
    pool = {"patience_s": 100_000.0, "linger_s": 0.0}
    return {
        "models": {"a": model, "b": model},
        "scheduler": pool if limit is None else pool | {"memory_limit": limit},
    }


@asynccontextmanager
async def server(folder: Path, *, n_ctx: int = 256, file: Path | None = None) -> AsyncIterator[ServerApp]:
    """A server with enough memory for one of the models, however it is measured, but not for both."""
    env = {"MODELYARD_CACHE": str(folder)}
    free = compose(load_config(env={}, overrides=settings(None, n_ctx, file or short_model_file())).config, env)
    limit = estimate_engine(free.scheduler._models["a"].spec, AvailableMemory(2**40)).total * 7 // 4
    app = compose(load_config(env={}, overrides=settings(limit, n_ctx, file or short_model_file())).config, env)
    try:
        yield app
    finally:
        await app.stop()
        await app.gateway.close()


async def started(app: ServerApp, model: str, text: str, max_tokens: int = 2, **more: Any) -> Stream:
    request = Request(
        model=model, messages=(Message("user", (Text(text),)),), sampling=SAMPLING, max_tokens=max_tokens, **more
    )
    return app.gateway.start(await app.gateway.prepare(request, CALLER))


async def read(answer: Stream) -> list[Event]:
    events = [event for _, batch in [each async for each in answer] for event in batch]
    answer.close()
    return events


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, BlockDelta))


def counts(app: ServerApp) -> list[tuple[str, int, int]]:
    return [(model.state, model.running, model.waiting) for model in app.scheduler.snapshot().models.values()]


async def test_mixed_requests_are_answered_with_one_load_of_each_model(tmp_path: Path):
    async with server(tmp_path) as app:
        questions = [f"What is {number} plus {number}?" for number in range(5)]
        answers = [await started(app, "ab"[i % 2], questions[i % 5]) for i in range(20)]
        replies = await asyncio.gather(*map(read, answers))
        assert [type(reply[-1]) for reply in replies] == [Finished] * 20
        texts = {question: {text(replies[i]) for i in range(20) if i % 5 == n} for n, question in enumerate(questions)}
        assert {len(each) for each in texts.values()} == {1}  # both models give the same answer
        models = app.scheduler.snapshot().models
        assert [models[name].loads for name in "ab"] == [1, 1]
        assert sorted(counts(app)) == [("ready", 0, 0), ("stopped", 0, 0)]


async def test_alternating_clients_make_the_models_take_turns(tmp_path: Path):
    async with server(tmp_path) as app:
        for name in "abab":
            assert isinstance((await read(await started(app, name, "Hi")))[-1], Finished)
        models = app.scheduler.snapshot().models
        assert [(models[name].loads, models[name].evictions) for name in "ab"] == [(2, 2), (2, 1)]


async def test_load_measurements_are_saved(tmp_path: Path):
    file = model_file()  # so large that its load shows in the memory of this process
    async with server(tmp_path, file=file) as app:
        await app.scheduler.load("a")
        model = app.scheduler.snapshot().models["a"]
        assert model.estimate is not None
        assert model.load_s is not None
    assert os.listdir(tmp_path) == ["measured.json"]
    async with server(tmp_path, file=file) as again:
        await again.scheduler.load("b")  # another name, another entry
        assert again.scheduler.snapshot().models["a"].load_s is None
        await again.scheduler.unload("b")
        await again.scheduler.load("a")
        assert again.scheduler._memory_planner._measurements.get(again.scheduler._models["a"].spec.identity) is not None


@pytest.mark.parametrize("force", [False, True])
async def test_unload_during_a_stream(tmp_path: Path, force: bool):
    async with server(tmp_path, n_ctx=2048 if force else 256) as app:
        stops = app.gateway.lookup.models["a"].pipeline.stop_ids
        endless = {"sampling": Sampling(temperature=0.0, logit_bias=dict.fromkeys(stops, -100.0))} if force else {}
        request = Request(
            **{"model": "a", "messages": (Message("user", (Text("Tell a story."),)),), "sampling": SAMPLING}
            | {"max_tokens": 1900 if force else 24}
            | endless
        )
        answer = app.gateway.start(await app.gateway.prepare(request, CALLER))
        _, events = await anext(answer)
        assert app.scheduler.snapshot().models["a"].running == 1
        unloading = app.scheduler.unload("a", force=force)
        assert not unloading.done()
        rest = await read(answer)
        await unloading
        assert counts(app)[0] == ("stopped", 0, 0)
    last = (events + rest)[-1]
    if force:
        assert isinstance(last, Failed)
        assert last.error.code == "model_unloaded"
    else:
        assert isinstance(last, Finished)
        assert last.usage.output > 0


def resources(process: psutil.Process) -> set[object]:
    """Processes, open files and the engines' threads."""
    files = {file.path for file in process.open_files()}
    return {*process.children(recursive=True), *files} | {t for t in threading.enumerate() if "llama:" in t.name}


async def test_random_cancellations_leave_nothing_behind(tmp_path: Path):
    random, process = Random(3), psutil.Process()
    tasks, before = asyncio.all_tasks(), resources(process)
    async with server(tmp_path) as app:
        answers = [await started(app, random.choice("ab"), f"Number {number}", 2) for number in range(80)]
        readers = [asyncio.create_task(read(answer)) for answer in answers]
        random.shuffle(answers)
        await asyncio.sleep(0)
        for number, answer in enumerate(answers[:65]):
            answer.cancel()
            if number % 10 == 0:
                await asyncio.sleep(0)
        replies = await asyncio.gather(*readers)
        ends = [type(reply[-1]) for reply in replies]
        assert ends.count(Finished) >= 15
        assert ends.count(Finished) + ends.count(Failed) == 80
        await app.scheduler.drain("a" if app.scheduler._models["a"].desired else "b")
        assert {(running, waiting) for _, running, waiting in counts(app)} == {(0, 0)}
        assert app.scheduler.requests() == ()
        engines = [engine for name in "ab" for engine in app.scheduler.engines(name)]
        assert [engine.stats().running for engine in engines] == [0] * len(engines)
    assert asyncio.all_tasks() == tasks
    assert resources(process) - before == set()
    assert set(os.listdir(tmp_path)) <= {"measured.json"}
