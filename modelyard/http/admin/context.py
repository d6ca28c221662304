"""What the admin API uses: the pool, the gateway, and a service that the composition root provides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from modelyard.accounts.accounts import Accounts
from modelyard.chat_store import ChatStore
from modelyard.core.engine import MemoryEstimate
from modelyard.core.pool import Pool
from modelyard.gateway.gateway import Gateway
from modelyard.http.admin.peers import PeerGateways
from modelyard.telemetry.request_capture import MemoryCaptureSink
from modelyard.telemetry.system import MachineMemory

# By the role that a request needs: its method and path, the handler, and what it does.


class ReloadResult(Struct, frozen=True, kw_only=True):
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # settings that need a restart, and warnings of the file


class AdminOperations(Protocol):
    """Implemented by `modelyard.server.admin_service`."""

    def describe(self, model: str) -> dict[str, Any]:
        """What the admin API shows of its settings, without secrets, and the overrides of a load as JSON Schemas."""
        ...

    async def memory(self) -> MachineMemory: ...
    async def estimate(self, model: str, overrides: Mapping[str, Any]) -> MemoryEstimate: ...
    def names_files(self, model: str, overrides: Mapping[str, Any]) -> bool: ...
    async def reload(self) -> ReloadResult: ...
    async def scheduler_log(self, since: float, level: int, request: str, limit: int) -> list[dict[str, Any]]: ...
    def routes(self) -> list[dict[str, Any]]: ...


class ModelDownloads(Protocol):
    """Implemented by `modelyard.server.model_library`. The values are structs for the reply."""

    def all(self) -> Sequence[Any]: ...
    async def search(self, text: str) -> Sequence[Any]: ...
    async def offer(self, source: str) -> Any: ...
    def start(self, source: str, quant: str | None = None) -> Any: ...
    def cancel(self, id: str) -> Any: ...


class ConfigChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of one model, cache or route in a configuration file. `set` has values by the names of fields; `unset`
    returns fields to their defaults. A route has an `index`, and `to` is its new place. `file`: by default the one that
    has it. `revision` is that of the file which the client has seen; another one is refused. `force` writes a model
    that does not run on this machine."""

    section: Literal["models", "caches", "routes"]
    name: str = ""
    index: int | None = None
    set: dict[str, Any] = {}
    unset: list[str] = []
    is_new: bool = field(default=False, name="new")
    remove: bool = False
    to: int | None = None
    file: str = ""
    revision: str | None = None
    force: bool = False


class ConfigEditing(Protocol):
    """Implemented by `modelyard.server.config_editor`. The values are JSON or structs for the reply."""

    async def overview(self) -> Any: ...
    async def fields(
        self, section: Literal["models", "caches", "routes"], name: str, values: dict[str, Any]
    ) -> Any: ...
    async def preview(self, change: ConfigChange) -> Any: ...
    async def apply(self, change: ConfigChange) -> Any: ...


class AdminContext(Struct, frozen=True):
    pool: Pool
    gateway: Gateway
    captures: MemoryCaptureSink
    service: AdminOperations
    tune: Path  # the folder of the optimizer's results
    clock: Callable[[], float]
    chats: ChatStore
    downloads: ModelDownloads
    remove_model: Callable[[str], Awaitable[None]]  # from the library, with its files
    accounts: Accounts
    limits_warning: str = ""  # why the rate limits of a new key do not hold for the whole server
    peers: PeerGateways = PeerGateways()
    editor: ConfigEditing | None = None  # None: the configuration does not come from files
    shares_scheduler: bool = False  # with other gateways, which then follow a reload
    set_aside: Callable[[], Awaitable[list[str]]] | None = None  # the batches that are not run again
