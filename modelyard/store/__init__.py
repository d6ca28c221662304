"""What must be remembered between requests: bounded, and scoped so that no API key sees another's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelyard.core.store import Store
from modelyard.plugins import load

NOT_PLUGINS = frozenset({"settings"})


def open_store(settings: StoreSettings) -> Store:
    """The store that the settings name; it may wait for a disk, so call it before the serving starts."""
    store: Store = load("store", settings.backend).create(settings)
    return store


# Settings of the memory between requests (stored responses, text of calls).


class StoreSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    backend: Literal["memory", "sqlite"] = Field(
        default="memory",
        description="Where entries live: in this process, or in a file that outlives it and can be shared.",
    )
    path: Path | None = Field(default=None, description='The database file; needed by the "sqlite" backend.')
    max_entries: int = Field(default=10_000, gt=0, description="Entries kept; the least recently used leave first.")
    max_bytes: int = Field(
        default=256 * 1024**2, gt=0, description="Bytes kept; the least recently used entries leave first."
    )
    ttl_s: float = Field(default=86_400, gt=0, description="Seconds after which an entry is forgotten.")

    @model_validator(mode="after")
    def _sqlite_has_a_file(self) -> Self:
        if self.backend == "sqlite" and self.path is None:
            raise ValueError('backend "sqlite" needs path, the file to keep entries in')
        return self
