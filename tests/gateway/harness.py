"""A gateway with the real router, renderer and scheduler, and an engine that the test controls by hand."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import msgspec
import pytest

from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.engine import Accepted, CacheInfo, Chunk, End, EngineInfo, EngineSpec, Prompt, Tokens
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Event
from modelyard.core.request import Caller, Message, Request, Text
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.model import Model
from modelyard.gateway.stream import Stream
from modelyard.prompt.images import Images
from modelyard.scheduler.scheduler import Scheduler
from modelyard.scheduler.settings import SchedulerOptions
from modelyard.server.model_definition import define_model
from modelyard.telemetry.metrics import Metrics
from tests.live_server import demo_config

CALLER = Caller(trace="t1", endpoint="/v1/chat/completions")


@cache
def config() -> Config:
    return load_config(env={}, overrides=demo_config()).config


@cache
def model() -> Model:
    return define_model(config().router().catalog.models["demo"])


def make_request(text: str = "hi", **more: Any) -> Request:
    return Request(**{"model": "demo", "messages": (Message("user", (Text(text),)),)} | more)


def ids(text: str) -> list[int]:
    return model().pipeline.tokenizer.encode(text)


class ManualGeneration(GenerationQueue[Chunk]):
    """One generation of the engine, fed by the test. After a cancel it ends only when the test ends it."""

    __slots__ = ("is_cancelled", "prompt")

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(on_cancel=self._cancelled)
        self.prompt, self.is_cancelled = prompt, False

    def _cancelled(self) -> None:
        self.is_cancelled = True

    def accept(self) -> None:
        self.put(Accepted())

    def write(self, text: str) -> None:
        self.put(Tokens(ids(text)))

    def end(self, reason: Any = "stop", error: ModelyardError | None = None) -> None:
        self.put_many([End(reason, error=error)], last=True)

    def finish(self, text: str = "Hello.") -> None:
        self.accept()
        self.write(text)
        self.end()


class ManualEngine:
    """`generations` holds all generations started so far; `start_error` is raised when one starts."""

    __slots__ = ("_start_error", "generations", "info", "lost")  # no weak references, as an engine of a plug-in may be

    def __init__(self, caches: dict[str, CacheInfo], start_error: Exception | None) -> None:
        self.info = EngineInfo("manual", caches)
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.generations: list[ManualGeneration] = []
        self._start_error = start_error

    async def open(self, progress: Any) -> None: ...
    async def close(self) -> None: ...

    def generate(self, prompt: Prompt) -> Any:
        if self._start_error is not None:
            raise self._start_error
        self.generations.append(ManualGeneration(prompt))
        return self.generations[-1]


def with_settings(old: Model, **settings: Any) -> Model:
    entry = msgspec.structs.replace(old.entry, settings=old.settings.model_copy(update=settings))
    return msgspec.structs.replace(old, entry=entry)


class GatewayHarness:
    """`start_error` is raised by the engine, `model_fault` is the definition's; `changes` are made to the model."""

    def __init__(
        self,
        *,
        slots: int = 4,
        options: SchedulerOptions = SchedulerOptions(),
        start_error: Exception | None = None,
        model_fault: ModelyardError | None = None,
        **changes: Any,
    ) -> None:
        caches = {"main": CacheInfo(4096, slots), "fast": CacheInfo(2048, slots)}
        self.engine, self.scheduler = (
            ManualEngine(caches, start_error),
            Scheduler(options, create=lambda *_: self.engine),
        )  # type: ignore[arg-type,return-value]
        self.scheduler.reconfigure({"demo": EngineSpec("demo", None, caches)})
        models = {"demo": msgspec.structs.replace(model(), fault=model_fault, **changes)}
        images = Images(config().images)
        self.gateway = Gateway(
            router=config().router(), models=models, leases=self.scheduler, images=images, metrics=Metrics()
        )

    async def __aenter__(self) -> GatewayHarness:
        self.scheduler.load("demo")
        await wait_until(lambda: self.scheduler.status()["demo"].state == "ready")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.close()
        await self.scheduler.close()

    @property
    def running(self) -> int:
        return self.scheduler.status()["demo"].running

    @property
    def waiting(self) -> int:
        return self.scheduler.status()["demo"].waiting

    async def start(self, text: str = "hi", **request: Any) -> Stream:
        return self.gateway.start(await self.gateway.prepare(make_request(text, **request), CALLER))

    async def generation(self, number: int = 0) -> ManualGeneration:
        """Wait until the engine has started the generation with this index."""
        await wait_until(lambda: len(self.engine.generations) > number)
        return self.engine.generations[number]


async def wait_until(condition: Any) -> None:
    """Run the loop until `condition` holds. Pending work completes within a few iterations, without a clock."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never became true")


async def read_events(stream: Stream) -> list[Event]:
    """All events in order of arrival."""
    return [event for _, batch in [item async for item in stream] for event in batch]


async def refusal(harness: GatewayHarness, kind: type[ModelyardError], caller: Caller = CALLER, **request: Any) -> Any:
    """The error of a request, which is the same for its count; it takes no slot."""
    with pytest.raises(kind) as caught:
        await harness.gateway.prepare(make_request(**request), caller)
    with pytest.raises(kind):
        await harness.gateway.inputs.count(make_request(**request), caller)
    assert (harness.running, harness.waiting) == (0, 0)
    return caught.value
