"""Engines that live in a worker, as any other engine looks: their requests travel, their tokens come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from modelyard.core.engine import (
    Chunk,
    Control,
    Embeddings,
    EngineInfo,
    EngineStats,
    Generation,
    OnProgress,
    Prompt,
)
from modelyard.core.errors import ModelyardError, Unsupported
from modelyard.core.events import Event
from modelyard.core.request import Request
from modelyard.workers.messages import (
    STUDY,
    AddChat,
    AddRequest,
    Count,
    Done,
    Embed,
    Opened,
    Order,
    Study,
)
from modelyard.workers.packing import pack_ids, unpack_vector
from modelyard.workers.prompts import request_of
from modelyard.workers.session import Session

Loss = asyncio.Future[ModelyardError]


class Remote:
    """An engine that is open in a worker. Closing it lets go of it: it stays open there."""

    def __init__(self, session: Session, engine: str, info: EngineInfo, lost: Loss | None = None) -> None:
        self._session, self.id, self.info = session, engine, info
        self.lost: Loss = lost or asyncio.get_running_loop().create_future()
        session.watch(engine, self._died)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} at {self._session.endpoint}>"

    def _died(self, error: ModelyardError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)

    async def open(self, progress: OnProgress) -> None:
        progress(1.0, "ready")

    async def study(self, have: tuple[str, ...]) -> Done:
        """Its tokenizer, from the worker; raises where that one cannot tell."""
        welcome = await self._session.meet()
        if STUDY not in welcome.able:
            raise Unsupported(f"the worker {welcome.worker} is too old to send its tokenizers: update it")
        return await self._session.ask(lambda id: Study(id, self.id, have))

    def stats(self) -> EngineStats:
        return self._session.stats.get(self.id, EngineStats())

    async def close(self) -> None:
        self._session.unwatch(self.id)


class RemoteText(Remote):
    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        return self._session.text(lambda id: AddRequest(self.id, request_of(id, prompt)))

    async def control(self, op: Control) -> None:
        await self._session.ask(lambda id: Order(id, self.id, op))


class RemoteEmbedder(RemoteText):
    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        packed = [pack_ids(ids) for ids in batch]
        done = await self._session.ask(lambda id: Embed(id, self.id, packed))
        return Embeddings([unpack_vector(vector) for vector in done.vectors], done.tokens or 0)


class RemoteChat(Remote):
    def chat(self, request: Request) -> Generation[Event]:
        bare = replace(request, warnings=())
        return self._session.chat(lambda id: AddChat(self.id, id, bare))

    async def count(self, request: Request) -> int | None:
        return (await self._session.ask(lambda id: Count(id, self.id, request))).tokens


class Noted(Loss):
    """An engine's `lost` that tells somebody in the same breath: who tries again must not be sent there."""

    def __init__(self, tell: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._tell = tell

    def set_result(self, result: ModelyardError, /) -> None:
        super().set_result(result)
        self._tell()


def remote(session: Session, opened: Opened, lost: Loss | None = None) -> RemoteText | RemoteChat:
    """The engine of this kind. One that makes no embeddings has no `embed`: that is how the gateway tells.

    `lost` is whom to tell of its death, where somebody has promised that already.
    """
    kind = RemoteChat if opened.kind == "chat" else RemoteEmbedder if opened.embeds else RemoteText
    return kind(session, opened.engine, opened.info, lost)
