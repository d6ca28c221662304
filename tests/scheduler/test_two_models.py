"""Two real models that do not fit into memory together, behind a complete gateway.

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
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.gateway.gateway import ChoiceStream
from modelyard.server.app import ServerApp, compose
from tests.engines.llama_cpp.helpers import model_file

CALLER = Caller(trace="t", endpoint="/v1/chat/completions")
SAMPLING = Sampling(temperature=0.0)


def settings(limit: int | None, n_ctx: int = 256) -> dict[str, Any]:
    model = {
        "backend": "llama_cpp",
        "path": str(model_file()),
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
async def server(folder: Path, *, n_ctx: int = 256) -> AsyncIterator[ServerApp]:
    """A server with enough memory for one of the models, however it is measured, but not for both."""
    env = {"MODELYARD_CACHE": str(folder)}
    free = compose(load_config(env={}, overrides=settings(None, n_ctx)).config, env)
    estimate = free.scheduler._models["a"].spec.estimate
    assert estimate is not None
    limit = estimate(AvailableMemory(2**40)).total * 7 // 4
    made = compose(load_config(env={}, overrides=settings(limit, n_ctx)).config, env)
    try:
        yield made
    finally:
        await made.stop()
        await made.gateway.close()


async def started(
    made: ServerApp, model: str, text: str, max_tokens: int = 2, **more: Any
) -> ChoiceStream | MultiChoiceStream:
    request = Request(
        model=model, messages=(Message("user", (Text(text),)),), sampling=SAMPLING, max_tokens=max_tokens, **more
    )
    return made.gateway.start(await made.gateway.prepare(request, CALLER))


async def read(answer: ChoiceStream | MultiChoiceStream) -> list[Event]:
    events = [event for _, batch in [each async for each in answer] for event in batch]
    answer.close()
    return events


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, BlockDelta))


def counts(made: ServerApp) -> list[tuple[str, int, int]]:
    return [(model.state, model.running, model.waiting) for model in made.scheduler.snapshot().models.values()]


async def test_fifty_mixed_requests_are_answered_with_one_load_of_each(tmp_path: Path):
    async with server(tmp_path) as made:
        questions = [f"What is {number} plus {number}?" for number in range(5)]
        answers = [await started(made, "ab"[i % 2], questions[i % 5]) for i in range(50)]
        replies = await asyncio.gather(*map(read, answers))
        assert [type(reply[-1]) for reply in replies] == [Finished] * 50
        texts = {question: {text(replies[i]) for i in range(50) if i % 5 == n} for n, question in enumerate(questions)}
        assert {len(each) for each in texts.values()} == {1}  # both models give the same answer
        models = made.scheduler.snapshot().models
        assert [models[name].loads for name in "ab"] == [1, 1]
        assert sorted(counts(made)) == [("ready", 0, 0), ("stopped", 0, 0)]


async def test_alternating_clients_make_the_models_take_turns(tmp_path: Path):
    async with server(tmp_path) as made:
        for name in "abab":
            assert isinstance((await read(await started(made, name, "Hi")))[-1], Finished)
        models = made.scheduler.snapshot().models
        assert [(models[name].loads, models[name].evictions) for name in "ab"] == [(2, 2), (2, 1)]


async def test_load_measurements_are_saved(tmp_path: Path):
    async with server(tmp_path) as made:
        await made.scheduler.load("a")
        model = made.scheduler.snapshot().models["a"]
        assert model.estimate is not None
        assert model.load_s is not None
    assert os.listdir(tmp_path) == ["measured.json"]
    async with server(tmp_path) as again:
        await again.scheduler.load("b")  # another name, another entry
        assert again.scheduler.snapshot().models["a"].load_s is None
        await again.scheduler.unload("b")
        await again.scheduler.load("a")
        assert again.scheduler._memory_planner._measurements.get(again.scheduler._models["a"].spec.identity) is not None


@pytest.mark.parametrize("force", [False, True])
async def test_unload_during_a_stream(tmp_path: Path, force: bool):
    async with server(tmp_path, n_ctx=2048 if force else 256) as made:
        stops = made.gateway.models["a"].pipeline.stop_ids
        endless = {"sampling": Sampling(temperature=0.0, logit_bias=dict.fromkeys(stops, -100.0))} if force else {}
        request = Request(
            **{"model": "a", "messages": (Message("user", (Text("Tell a story."),)),), "sampling": SAMPLING}
            | {"max_tokens": 1900 if force else 24}
            | endless
        )
        answer = made.gateway.start(await made.gateway.prepare(request, CALLER))
        _, events = await anext(answer)
        assert made.scheduler.snapshot().models["a"].running == 1
        gone = made.scheduler.unload("a", force=force)
        assert not gone.done()
        rest = await read(answer)
        await gone
        assert counts(made)[0] == ("stopped", 0, 0)
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


async def test_two_hundred_requests_with_random_cancels_leave_nothing_behind(tmp_path: Path):
    random, process = Random(3), psutil.Process()
    tasks, before = asyncio.all_tasks(), resources(process)
    async with server(tmp_path) as made:
        answers = [await started(made, random.choice("ab"), f"Number {number}", 2) for number in range(200)]
        readers = [asyncio.create_task(read(answer)) for answer in answers]
        random.shuffle(answers)
        await asyncio.sleep(0)
        for number, answer in enumerate(answers[:170]):
            answer.cancel()
            if number % 10 == 0:
                await asyncio.sleep(0)
        replies = await asyncio.gather(*readers)
        ends = [type(reply[-1]) for reply in replies]
        assert ends.count(Finished) >= 30
        assert ends.count(Finished) + ends.count(Failed) == 200
        await made.scheduler.drain("a" if made.scheduler._models["a"].desired else "b")
        assert {(running, waiting) for _, running, waiting in counts(made)} == {(0, 0)}
        assert made.scheduler.requests() == ()
        engines = [engine for name in "ab" for engine in made.scheduler.engines(name)]
        assert [engine.stats().running for engine in engines] == [0] * len(engines)
    assert asyncio.all_tasks() == tasks
    assert resources(process) - before == set()
    assert set(os.listdir(tmp_path)) <= {"measured.json"}
