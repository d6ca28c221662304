"""The engine `markov`: a chain of words, learned from a text file. It takes conversations, so it needs no tokenizer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from modelyard.core.engine import (
    Capabilities,
    EngineInfo,
    EnginePlugin,
    EngineSpec,
    EngineStats,
    Generation,
    OnProgress,
)
from modelyard.core.errors import ModelyardError
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Finished, Started, Usage
from modelyard.core.request import Request, Text
from modelyard.engines.generation_queue import GenerationQueue

CAPABILITIES = Capabilities(tools=False)


class Options(BaseModel):
    """The engine's fields of a model's section."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The text file that the words come from.")
    markov_words: int = Field(default=12, ge=1, description="Words of an answer if the client sets no limit.")


class MarkovEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self._options: Options = spec.options
        self.info = EngineInfo(spec.backend, dict(spec.caches), CAPABILITIES)
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._following: dict[str, list[str]] = {}

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "reading words")
        words = (await asyncio.to_thread(Path(self._options.path).read_text)).split()
        for word, following in pairwise(words):
            self._following.setdefault(word, []).append(following)

    def chat(self, request: Request) -> Generation[Event]:
        queue: GenerationQueue[Event] = GenerationQueue()
        prompt = _words(request)
        answer = list(self._answer(prompt, request))
        started: list[Event] = [Started(uuid4().hex, request.model, int(time.time())), BlockStart(0, "text")]
        text = [BlockDelta(0, f" {word}" if at else word) for at, word in enumerate(answer)]
        usage = Usage(prompt=len(prompt), output=len(answer))
        queue.put_many([*started, *text, BlockEnd(0), Finished("max_tokens", usage)], last=True)
        return queue

    def _answer(self, prompt: list[str], request: Request) -> Iterator[str]:
        chance = random.Random(request.sampling.seed)  # noqa: S311 - no secret
        word = prompt[-1] if prompt else ""
        for _ in range(request.max_tokens or self._options.markov_words):
            word = chance.choice(self._following.get(word) or sorted(self._following))
            yield word

    async def count(self, request: Request) -> int | None:
        return len(_words(request))

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        self._following.clear()


def _words(request: Request) -> list[str]:
    parts = [part for message in request.messages for part in message.parts if isinstance(part, Text)]
    return " ".join(part.text for part in parts).split()


def faults(spec: EngineSpec) -> Iterator[tuple[str, str]]:
    """For `modelyard check`: what keeps the engine from being opened."""
    path = Path(spec.options.path)
    if not path.is_file():
        yield "path", f"there is no file {path}"
    elif len(path.read_text().split()) < 2:
        yield "path", f"{path} has fewer than two words"


ENGINE = EnginePlugin(
    Options=Options,
    create=MarkovEngine,
    kind="chat",
    capabilities=CAPABILITIES,
    holds_weights=False,
    faults=faults,
)
