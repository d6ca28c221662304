"""Settings of the queue in front of the engines."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SchedulerSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    endpoint: str = Field(
        default="",
        description="ZeroMQ address of a scheduler in another process; empty means the scheduler runs in this one.",
    )
    timeout_ms: int = Field(
        default=30_000, gt=0, description="How long a request waits for a lost engine to come back, in milliseconds."
    )
    max_waiting: int = Field(
        default=1024, ge=0, description="Requests that may wait for a model; one more is refused at once."
    )
    max_waiting_tokens: int | None = Field(
        default=None, gt=0, description="Prompt tokens that may wait for a model in all; unset means no such limit."
    )
