"""Every message between gateways and workers on one side and the scheduler on the other, grouped by who receives it.

    gateway                         scheduler
    Join(version, name, held)  ──→                                a new conversation; `held` are places it still uses
                               ←──  Joined · State*               models and engines, whenever they change
    Ask(ticket, …)             ──→
                               ←──  (Queued)? · (Granted | Denied)
    Leave(ticket)              ──→                                given back, or given up
                               ←──  Revoked(ticket)
    Command · Look · Keep …    ──→
                               ←──  Answer(id)

Tokens do not pass here: a grant names the worker and the engine, and the gateway speaks to it directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import field

from modelyard.core.engine import EngineInfo
from modelyard.core.errors import ModelyardError
from modelyard.core.lease import ModelStatus
from modelyard.core.pool import ModelStateChange
from modelyard.core.request import Priority
from modelyard.workers.messages import Beat, Goodbye, Held, Message, Refused, reader


class Asked(Message, frozen=True):
    """A demand on its way; `prompt` are the first tokens, where it matters which replica knows them."""

    model: str
    cache: str
    tokens: int = 0
    weight: int = 1
    key: str = ""
    session: str | None = None
    priority: Priority = "main"
    deadline: float | None = None
    trace: str = ""
    prompt: bytes = b""
    again: bool = False


# --- for the scheduler ------------------------------------------------------------------------------------------------


class Join(Message, frozen=True, tag="join"):
    """A gateway comes, or comes back under the same name. `held` are the places in which its answers still run."""

    version: int
    name: str
    held: tuple[tuple[int, Asked], ...] = ()


class Enlist(Message, frozen=True, tag="enlist"):
    """A worker offers itself, again and again; `engines` are open there already. `machine` is the name of the one that
    it runs on, with what is free there: bytes of RAM, and of each GPU by its UUID."""

    version: int
    name: str
    endpoint: str
    engines: tuple[Held, ...] = ()
    machine: str = ""
    ram_free: int = 0
    gpus: dict[str, int] = field(default_factory=dict)


class Ask(Message, frozen=True, tag="ask"):
    """`avoid` are engines that the gateway has just lost: the scheduler may not know of that yet."""

    ticket: int
    demand: Asked
    avoid: tuple[str, ...] = ()


class Leave(Message, frozen=True, tag="leave"):
    """`spent` output tokens were made there."""

    ticket: int
    spent: int = 0


class Command(Message, frozen=True, tag="command"):
    """`argument` is JSON: the overrides of a load, `force`, a number of replicas, a trace."""

    id: int
    verb: Literal["load", "unload", "drain", "scale", "cancel", "reload"]
    model: str = ""
    argument: bytes = b"null"


class Look(Message, frozen=True, tag="look"):
    id: int
    what: Literal["snapshot", "requests"]


class Keep(Message, frozen=True, tag="keep"):
    """The store that all gateways share. A value is put, none is looked up, `delete` says what it says."""

    id: int
    scope: bytes
    key: bytes
    value: bytes | None = None
    delete: bool = False


ForScheduler = Join | Enlist | Ask | Leave | Command | Look | Keep | Beat | Goodbye


# --- for a gateway --------------------------------------------------------------------------------------------------


class EngineAt(Message, frozen=True):
    """Where an engine is open."""

    model: str
    endpoint: str
    engine: str
    kind: Literal["text", "chat"]
    info: EngineInfo
    embeds: bool = False


class Joined(Message, frozen=True, tag="joined"):
    version: int


class State(Message, frozen=True, tag="state"):
    """`edition` counts how often the configuration was read anew."""

    models: dict[str, ModelStatus]
    engines: tuple[EngineAt, ...] = ()
    replicas: dict[str, int] = field(default_factory=dict)
    figures: dict[str, dict[str, int]] = field(default_factory=dict)
    edition: int = 0


class Queued(Message, frozen=True, tag="queued"):
    ticket: int
    position: int


class Granted(Message, frozen=True, tag="granted"):
    ticket: int
    endpoint: str
    engine: str
    weight: int = 1
    waited: float = 0.0


class Denied(Message, frozen=True, tag="denied"):
    ticket: int
    error: ModelyardError


class Revoked(Message, frozen=True, tag="revoked"):
    ticket: int
    error: ModelyardError


class Changed(Message, frozen=True, tag="changed"):
    change: ModelStateChange


class Answer(Message, frozen=True, tag="answer"):
    """`value` is MessagePack of what was asked for, or the stored bytes themselves."""

    id: int
    error: ModelyardError | None = None
    value: bytes | None = None


ForGateway = Joined | Refused | State | Queued | Granted | Denied | Revoked | Changed | Answer | Beat | Goodbye

read_for_scheduler: Callable[[bytes], ForScheduler] = reader(ForScheduler)
read_for_gateway: Callable[[bytes], ForGateway] = reader(ForGateway)
