"""Data kept between requests (stored responses, replay memory): bounded, and scoped by API key."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelyard.core.store import Store
from modelyard.plugins import load


class StoreSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    backend: Literal["memory", "sqlite"] = Field(
        default="memory",
        description="Where entries are kept: in this process, or in a file that survives it and can be shared.",
    )
    path: Path | None = Field(default=None, description='The database file; required by the "sqlite" backend.')
    max_entries: int = Field(
        default=10_000, gt=0, description="Entries kept; least recently used ones are dropped first."
    )
    max_bytes: int = Field(
        default=256 * 1024**2, gt=0, description="Bytes kept; least recently used entries are dropped first."
    )
    ttl_s: float = Field(default=86_400, gt=0, description="Seconds after which an entry expires.")

    @model_validator(mode="after")
    def _require_path(self) -> Self:
        if self.backend == "sqlite" and self.path is None:
            raise ValueError('backend "sqlite" needs path, the file to keep entries in')
        return self


def open_store(settings: StoreSettings) -> Store:
    """Open the configured store. It may wait for a disk: call it before the server starts."""
    store: Store = load("store", settings.backend).create(settings)
    return store
