"""Settings of the log, of request capture and of the request history."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class LogSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        default="info", description="The least severe level that is logged."
    )
    format: Literal["auto", "human", "json"] = Field(
        default="auto",
        description="Text lines (human) or JSON lines (json); auto writes text on a terminal and JSON elsewhere.",
    )
    debug_dir: Path | None = Field(
        default=None,
        description='Folder for request capture, four files per request; --debug sets it to "debug".',
    )
    debug_max_requests: int = Field(
        default=200, gt=0, description="Requests kept in debug_dir; older ones are deleted."
    )
    debug_max_bytes: int = Field(
        default=256 * 1024**2, gt=0, description="Bytes kept in debug_dir; older files are deleted."
    )
    history_requests: int = Field(
        default=1000, gt=0, description="Finished requests that the admin API keeps in memory."
    )
    history_texts: bool = Field(
        default=False,
        description="Keep the texts of requests (prompt, output, response) in memory for the admin API. The admin API "
        "can switch it while the server runs.",
    )
    history_bytes: int = Field(
        default=64 * 1024**2, gt=0, description="Bytes of these texts in all; the oldest are dropped first."
    )

    @field_validator("level", mode="before")
    @classmethod
    def _normalize_level(cls, value: Any) -> Any:
        level = value.lower() if isinstance(value, str) else value
        return "warning" if level == "warn" else level
