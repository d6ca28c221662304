"""What the admin API works with: the pool, the gateway, and questions that only the composition root can answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from modelyard.core.engine import MemoryEstimate
from modelyard.core.pool import Pool
from modelyard.gateway import Gateway
from modelyard.http.admin.peers import PeerGateways
from modelyard.telemetry.request_capture import MemoryCaptureSink
from modelyard.telemetry.system import MachineMemory


class ModelDetails(Struct, frozen=True, kw_only=True):
    """What a model's definition says that the pool does not know. `overrides` are the fields that one load may change,
    each with its JSON Schema; `definition` holds no secrets."""

    backend: str
    enabled: bool = False
    aliases: tuple[str, ...] = ()
    description: str = ""
    overrides: Mapping[str, Any] = {}
    definition: Mapping[str, Any] = {}


class ReloadResult(Struct, frozen=True, kw_only=True):
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # settings that need a restart, and what the file itself warns of


class AdminService(Protocol):
    """The composition root, as the admin API sees it."""

    def particulars(self, model: str) -> ModelDetails: ...
    async def memory(self) -> MachineMemory: ...
    async def estimate(self, model: str, overrides: Mapping[str, Any]) -> MemoryEstimate: ...
    async def reload(self) -> ReloadResult: ...


class AdminContext(Struct, frozen=True):
    pool: Pool
    gateway: Gateway
    papers: MemoryCaptureSink
    house: AdminService
    tune: Path  # where the optimizer leaves its results
    clock: Callable[[], float]
    siblings: PeerGateways = PeerGateways()
