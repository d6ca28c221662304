"""An engine in the worker that hosts it: made from what travelled, opened, watched, and closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal

from pydantic import ValidationError

from modelyard import plugins
from modelyard.core.engine import EmbeddingEngine, Engine, EngineSpec, OnProgress
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, Unsupported
from modelyard.workers.messages import Held, Opened, OpenEngine
from modelyard.workers.tokenizer import gather

log = logging.getLogger(__name__)


def order_of(engine: str, backend: str, spec: EngineSpec, identity: str = "") -> OpenEngine:
    """What a worker needs to make this engine. Only what was set travels: the rest is the engine's own default."""
    options: bytes = spec.options.model_dump_json(exclude_unset=True).encode()
    return OpenEngine(engine, backend, spec.model, options, dict(spec.caches), spec.modalities, identity)


def spec_of(order: OpenEngine) -> EngineSpec:
    kind = plugins.load("engines", order.backend).Options
    try:
        options = kind.model_validate_json(order.options)
    except ValidationError as error:
        told = error.errors()[0]
        where = ".".join(map(str, told["loc"]))
        raise InvalidRequest(
            f"the options of {order.model!r} do not fit this worker's engine: {where}: {told['msg']}"
        ) from None
    return EngineSpec(order.model, options, order.caches, order.modalities)


class Hosted:
    """`lost` is called when the engine dies by itself."""

    def __init__(self, order: OpenEngine, lost: Callable[[Hosted, ModelyardError], None]) -> None:
        self.id, self.model, self.identity = order.engine, order.model, order.identity
        self._order, self._lost = order, lost
        self.engine: Engine | None = None  # once it is open
        self.kind: Literal["text", "chat"] = "text"
        self.running = 0
        self.opening: asyncio.Task[None] | None = None  # whoever opens it
        self._made: Engine | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self, progress: OnProgress) -> Engine:
        try:
            spec = spec_of(self._order)
            module: Any = plugins.load("engines", self._order.backend)
            self.kind = module.kind(spec.options)
            self._made = made = module.create(spec)
            await made.open(progress)
        except asyncio.CancelledError:
            await self.close()
            raise
        except Exception as error:
            await self.close()
            raise fault(error) from error
        self.engine = made
        self._watching = asyncio.get_running_loop().create_task(self._watch(made))
        return self.engine

    async def _watch(self, engine: Engine) -> None:
        error = await asyncio.shield(engine.lost)
        self._lost(self, error)

    async def end(self) -> None:
        """Whatever it does now: one that still opens is not waited for."""
        if self.opening is not None and not self.opening.done():
            self.opening.cancel()
            await asyncio.wait({self.opening})
        await self.close()

    async def close(self) -> None:
        """Idempotent."""
        self.engine = None
        if self._watching is not None:
            self._watching.cancel()
        made, self._made = self._made, None
        if made is not None:
            await made.close()

    async def tokenizer(self) -> dict[str, bytes]:
        """What a gateway needs that does not have this model's files."""
        module: Any = plugins.load("engines", self._order.backend)
        if not hasattr(module, "tokenizer_path"):
            raise Unsupported(f"the engine of {self.model!r} has no tokenizer of its own", code="tokenizer_missing")
        return await asyncio.to_thread(lambda: gather(module.tokenizer_path(spec_of(self._order).options)))

    def told(self) -> Opened:
        assert self.engine is not None  # noqa: S101  the caller has looked
        return Opened(self.id, self.kind, self.engine.info, isinstance(self.engine, EmbeddingEngine))

    def held(self) -> Held:
        assert self.engine is not None  # noqa: S101  the caller has looked
        return Held(self.id, self.model, self.identity, self.kind, self.engine.info)


def fault(error: BaseException) -> ModelyardError:
    """What a client may hear of it; all else is in the log, under an id."""
    if isinstance(error, ModelyardError):
        return error
    internal = Internal(f"the worker failed: {type(error).__name__}: {error}")
    log.error("worker failure (id %s)", internal.id, exc_info=error)
    return internal
