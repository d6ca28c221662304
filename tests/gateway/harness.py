"""A gateway with the real router, renderer and scheduler, and an engine that does what the test says."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import msgspec

from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.engine import Accepted, CacheInfo, Chunk, End, EngineInfo, Prompt, Tokens
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Event
from modelyard.core.request import Caller, Message, Request, Text
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.gateway.gateway import ChoiceStream, Gateway
from modelyard.gateway.model import Model
from modelyard.prompt.images import Images
from modelyard.scheduler.scheduler import Scheduler
from modelyard.server.model_definition import define_model
from modelyard.telemetry.metrics import Metrics
from tests.live_server import demo_config

CALLER = Caller(trace="t1", endpoint="/v1/chat/completions")


@cache
def config() -> Config:
    return load_config(env={}, overrides=demo_config()).config


@cache
def model() -> Model:
    return define_model(config().router().catalog.models["demo"], config().models["demo"]).model


def make_request(text: str = "hi", **more: Any) -> Request:
    return Request(**{"model": "demo", "messages": (Message("user", (Text(text),)),)} | more)


def ids(text: str) -> list[int]:
    return model().pipeline.tokenizer.encode(text)


class ManualGeneration(GenerationQueue[Chunk]):
    """One job of the engine: the test speaks for it. Cancelled, it ends only when the test says so."""

    __slots__ = ("is_cancelled", "prompt")

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(on_cancel=self._cancelled)
        self.prompt, self.is_cancelled = prompt, False

    def _cancelled(self) -> None:
        self.is_cancelled = True

    def accept(self) -> None:
        self.put(Accepted())

    def say(self, text: str) -> None:
        self.put(Tokens(ids(text)))

    def end(self, reason: Any = "stop", error: ModelyardError | None = None) -> None:
        self.put_many([End(reason, error=error)], last=True)

    def whole(self, text: str = "Hello.") -> None:
        self.accept()
        self.say(text)
        self.end()


class ManualEngine:
    """`jobs` holds every job that was ever begun; `fault` is what beginning one raises."""

    def __init__(self, caches: dict[str, CacheInfo], fault: Exception | None) -> None:
        self.info = EngineInfo("puppet", caches)
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.jobs: list[ManualGeneration] = []
        self._fault = fault

    async def open(self, progress: Any) -> None: ...
    async def close(self) -> None: ...

    def generate(self, prompt: Prompt) -> Any:
        if self._fault is not None:
            raise self._fault
        self.jobs.append(ManualGeneration(prompt))
        return self.jobs[-1]


class GatewayHarness:
    """`fault` is the engine's, `broken` the definition's; `changes` are made to the model."""

    def __init__(
        self, *, places: int = 4, fault: Exception | None = None, broken: ModelyardError | None = None, **changes: Any
    ) -> None:
        caches = {"main": CacheInfo(4096, places), "fast": CacheInfo(2048, places)}
        self.engine, self.scheduler = ManualEngine(caches, fault), Scheduler()
        self.scheduler.add("demo", caches, lambda: self.engine)  # type: ignore[arg-type,return-value]
        models = {"demo": msgspec.structs.replace(model(), fault=broken, **changes)}
        images = Images(config().images)
        self.gateway = Gateway(
            router=config().router(), models=models, leases=self.scheduler, images=images, metrics=Metrics()
        )

    async def __aenter__(self) -> GatewayHarness:
        self.scheduler.load("demo")
        await until(lambda: self.scheduler.status()["demo"].state == "ready")
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

    async def start(self, text: str = "hi", **request: Any) -> ChoiceStream | MultiChoiceStream:
        return self.gateway.start(await self.gateway.prepare(make_request(text, **request), CALLER))

    async def job(self, number: int = 0) -> ManualGeneration:
        """The engine's job of this number, as soon as it was begun."""
        await until(lambda: len(self.engine.jobs) > number)
        return self.engine.jobs[number]


async def until(true: Any) -> None:
    """Whatever is due happens within a few turns of the loop: nothing here waits for the clock."""
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


async def read(answer: ChoiceStream | MultiChoiceStream) -> list[Event]:
    """All events to the last, in the order of their arrival."""
    return [event for _, batch in [each async for each in answer] for event in batch]
