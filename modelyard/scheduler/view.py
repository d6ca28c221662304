"""The pool as the policy sees it: plain values, made anew for each look."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from modelyard.core.errors import ModelyardError
from modelyard.core.pool import ReplicaState
from modelyard.scheduler.placement import Bytes, needed


class ReplicaView(Struct, frozen=True, kw_only=True):
    id: int
    state: ReplicaState
    bytes: Bytes = field(default_factory=dict)
    running: int = 0
    ready_since: float = 0.0
    idle_since: float = 0.0  # of a ready one: when its last answer ended, or since it is ready
    evicting: bool = False  # drains to make room for another model

    @property
    def is_leaving(self) -> bool:
        return self.state in ("draining", "closing")


class ModelView(Struct, frozen=True, kw_only=True):
    """`wanted` is how many replicas it should have now; `asked_since` since when somebody waits for it: a request or
    an administrator. `need` is what one more replica takes; None: nobody has looked yet. `abroad` is what it takes on
    other machines, by their names, where that is not the same."""

    name: str
    wanted: int = 0
    asked_since: float | None = None
    need: Bytes | None = field(default_factory=dict)
    replicas: tuple[ReplicaView, ...] = ()
    waiting: int = 0
    load_s: float = 1.0
    idle_ttl_s: float | None = None
    abroad: Mapping[str, Bytes] = field(default_factory=dict)

    def need_at(self, site: str) -> Bytes:
        return needed(site, self.need, self.abroad)

    @property
    def staying(self) -> tuple[ReplicaView, ...]:
        return tuple(one for one in self.replicas if not one.is_leaving)


class PoolView(Struct, frozen=True, kw_only=True):
    """`hard` are bytes that were set as limits; `soft` what the machine seems to have where none was set: there an
    engine has the last word on what fits. `sites` are the machines on which a replica may go, the first choice first;
    the devices of all but this one are told apart by their machine's name."""

    models: tuple[ModelView, ...]
    hard: Bytes = field(default_factory=dict)
    soft: Bytes = field(default_factory=dict)
    patience_s: float = 10.0
    linger_s: float = 1.0
    sites: tuple[str, ...] = ("",)


# --- what is to be done -------------------------------------------------------------------------------------------


class Survey(Struct, frozen=True):
    """Find out what a replica of it takes."""

    model: str


class Claim(Struct, frozen=True):
    """Room is being made for a replica of it: nobody else may have it."""

    model: str
    why: str = ""


class Start(Struct, frozen=True):
    """Load a replica: the claimed one, or a new one; on which machine."""

    model: str
    replica: int | None = None
    site: str = ""


class Stop(Struct, frozen=True):
    """Give it no more requests, and close it when its last answer has ended. `evict`: to make room for another."""

    model: str
    replica: int
    evict: bool = False


class Keep(Struct, frozen=True):
    """Nobody needs its room any more: it goes on."""

    model: str
    replica: int


class Sleep(Struct, frozen=True):
    """No replicas until somebody asks for it."""

    model: str
    why: str


class Reject(Struct, frozen=True):
    """It can never be loaded like this: those who wait are told."""

    model: str
    error: ModelyardError


Action = Survey | Claim | Start | Stop | Keep | Sleep | Reject


class Plan(Struct, frozen=True):
    """What to do now, and when to look again even if nothing happens."""

    actions: tuple[Action, ...] = ()
    wake: float | None = None
