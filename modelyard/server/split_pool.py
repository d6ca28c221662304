"""The pool of a gateway of `serve --workers`: engines without weights run in each gateway, the others once, in workers
that the scheduler of all gateways has started.

A remote upstream or the fake engine costs nothing to open again, and tokens take no detour. It has the slots of its
settings in each gateway. While API keys have limits, the scheduler counts for all gateways, so all engines are its own.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from modelyard import plugins
from modelyard.core.engine import Engine, EngineSpec
from modelyard.core.pool import (
    KeyLimits,
    LeaseRequest,
    ModelStatus,
    Override,
    Overrides,
    PoolSnapshot,
    RequestSnapshot,
    Ticket,
)
from modelyard.scheduler.scheduler import Scheduler
from modelyard.workers.remote_pool import RemotePool

VARIABLE: Final = "MODELYARD_WORKER_SPLIT"  # set by `serve --workers` for its gateways and their scheduler


def runs_in_gateways(backend: str, env: Mapping[str, str] = os.environ) -> bool:
    return VARIABLE in env and backend in plugins.names("engines") and not plugins.engine(backend).holds_weights


class SplitPool(RemotePool):
    """`here` has the engines of this process."""

    def __init__(self, here: Scheduler, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.here = here
        self._names: frozenset[str] = frozenset()
        self._spawn(self._forward_changes())

    async def _forward_changes(self) -> None:
        async for change in self.here.subscribe():
            self._changes.publish(change)

    def reconfigure(self, specs: Mapping[str, EngineSpec], override: Override | None = None) -> None:
        own = {name: spec for name, spec in specs.items() if runs_in_gateways(spec.backend)}
        self.here.reconfigure(own, override)
        self._names = frozenset(own)

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, request: LeaseRequest) -> Ticket:
        return self.here.request(request) if request.model in self._names else super().request(request)

    def engine(self, model: str) -> Engine | None:
        return self.here.engine(model) if model in self._names else super().engine(model)

    def engines(self, name: str) -> tuple[Engine, ...]:
        return self.here.engines(name) if name in self._names else super().engines(name)

    # --- status -------------------------------------------------------------------------------------------------------

    def status(self) -> Mapping[str, ModelStatus]:
        return ChainMap(dict(self.here.status()), dict(super().status()))

    def metrics(self) -> Mapping[str, Mapping[str, int]]:
        here, there = self.here.metrics(), super().metrics()
        return {name: {**there.get(name, {}), **values} for name, values in here.items()}

    def snapshot(self) -> PoolSnapshot:
        here, there = self.here.snapshot(), super().snapshot()
        return replace(there, models={**there.models, **here.models}, retiring=(*there.retiring, *here.retiring))

    def requests(self) -> tuple[RequestSnapshot, ...]:
        return (*super().requests(), *self.here.requests())

    # --- admin operations ---------------------------------------------------------------------------------------------

    def load(self, name: str, overrides: Overrides | None = None) -> Any:
        return self.here.load(name, overrides) if name in self._names else super().load(name, overrides)

    def unload(self, name: str, force: bool = False) -> Any:
        return self.here.unload(name, force) if name in self._names else super().unload(name, force)

    def drain(self, name: str) -> Any:
        return self.here.drain(name) if name in self._names else super().drain(name)

    def scale(self, name: str, replicas: int) -> Any:
        return self.here.scale(name, replicas) if name in self._names else super().scale(name, replicas)

    def cancel(self, trace: str) -> int:
        return super().cancel(trace) + self.here.cancel(trace)

    def set_limits(self, limits: Mapping[str, KeyLimits]) -> None:
        super().set_limits(limits)
        self.here.set_limits(limits)

    def preload(self, name: str) -> None:
        if name in self._names:
            self.here.preload(name)

    async def close(self) -> None:
        await self.here.close()
        await super().close()
