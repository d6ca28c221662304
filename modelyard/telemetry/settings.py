"""Settings of the log and of the debug journal."""

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
        description="Lines for people or JSON lines for machines; auto writes for people on a terminal only.",
    )
    debug_dir: Path | None = Field(
        default=None,
        description='Folder for the four files that each request leaves behind; --debug sets it to "debug".',
    )
    debug_max_requests: int = Field(
        default=200, gt=0, description="Requests kept in debug_dir; older ones are deleted."
    )
    debug_max_bytes: int = Field(
        default=256 * 1024**2, gt=0, description="Bytes kept in debug_dir; older files are deleted."
    )

    history_requests: int = Field(
        default=1000, gt=0, description="Finished requests that the admin API remembers, in memory."
    )
    history_texts: bool = Field(
        default=False,
        description="Whether the texts of requests (prompt, output, reply) are kept in memory for the admin API, which "
        "can also switch it while the server runs.",
    )
    history_bytes: int = Field(
        default=64 * 1024**2, gt=0, description="Bytes of such texts in all; the oldest leave first."
    )

    @field_validator("level", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        word = value.lower() if isinstance(value, str) else value
        return "warning" if word == "warn" else word
