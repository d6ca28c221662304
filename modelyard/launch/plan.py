"""What it takes to start an agent, as data: facts of the server in, variables, files and arguments out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

ANY_KEY = "modelyard"  # agents refuse to start without one, also where the server wants none


class Facts(Struct, frozen=True, kw_only=True):
    """The server and the model that an agent is to talk to. `background` is the name for its small side requests."""

    url: str
    model: str
    window: int | None = None  # None: a remote model that does not say
    background: str = ""
    key: str = ANY_KEY

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def aside(self) -> str:
        return self.background or self.model


class Plan(Struct, frozen=True, kw_only=True):
    """`arguments` stand before the user's own. `files` are written anew each time, `initial` ones only where there is
    none yet: the agent goes on writing into them. `notes` are sentences for the user, said before it starts."""

    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    initial: Mapping[Path, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Agent(Struct, frozen=True, kw_only=True):
    """Where an agent comes from. `version` is the one that our tests run; `inside` its program in its own folder."""

    title: str
    program: str
    package: str
    version: str
    source: Literal["npm", "PyPI"]
    inside: str

    @property
    def requirement(self) -> str:
        return f"{self.package}{'@' if self.source == 'npm' else '=='}{self.version}"

    @property
    def install(self) -> str:
        """The command that a user types."""
        return f"npm install -g {self.package}" if self.source == "npm" else f"pipx install {self.package}"
