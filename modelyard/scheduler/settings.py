"""The `[scheduler]` section of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Struct
from pydantic import BaseModel, ByteSize, ConfigDict, Field, WithJsonSchema

if TYPE_CHECKING:
    from modelyard.scheduler.memory_planner import MemoryLimits

_SIZE = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}
Size = Annotated[ByteSize, WithJsonSchema(_SIZE)]


class SchedulerOptions(Struct, frozen=True):
    """The settings as the scheduler uses them. `timeout_s`: how long requests wait for a lost engine."""

    max_waiting: int = 1024
    max_waiting_tokens: int | None = None
    timeout_s: float = 30.0
    max_wait_s: float | None = None
    load_timeout_s: float = 1800.0
    patience_s: float = 10.0
    linger_s: float = 1.0


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
        default=None, gt=0, description="Total prompt tokens that may wait for a model; unset means no such limit."
    )
    max_wait_s: float | None = Field(
        default=600.0, gt=0, description="Seconds that a request may wait for a free slot; unset means no limit."
    )
    memory_limit: Size | None = Field(
        default=None,
        gt=0,
        description='RAM that all loaded models may take together, such as "24GiB"; idle ones make room for others. '
        "Unset: what the machine has.",
    )
    gpu_memory_limit: Size | dict[str, Size] | None = Field(
        default=None,
        description="Memory that models may take of each GPU, or a table of limits by GPU UUID; unset: what it has.",
    )
    idle_ttl_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds without a request after which a model is unloaded until the next one; 0 means never.",
    )
    load_timeout_s: float = Field(default=1800.0, gt=0, description="Seconds that loading a model may take.")
    patience_s: float = Field(
        default=10.0,
        ge=0,
        description="If two models do not fit together: how long requests for one wait while the other is busy, "
        "before it is their turn.",
    )
    linger_s: float = Field(
        default=1.0,
        ge=0,
        description="How long a model that has just become idle is kept while another waits for its memory.",
    )

    def options(self) -> SchedulerOptions:
        return SchedulerOptions(
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
            timeout_s=self.timeout_ms / 1000,
            max_wait_s=self.max_wait_s,
            load_timeout_s=self.load_timeout_s,
            patience_s=self.patience_s,
            linger_s=self.linger_s,
        )

    def memory_limits(self) -> MemoryLimits:
        from modelyard.scheduler.memory_planner import MemoryLimits  # not needed to read the settings

        # Plain numbers: pydantic's ByteSize cannot be encoded, and limits are part of snapshots.
        ram = int(self.memory_limit) if self.memory_limit is not None else None
        gpu = self.gpu_memory_limit
        if isinstance(gpu, dict):
            return MemoryLimits(ram, None, {uuid: int(size) for uuid, size in gpu.items()})
        return MemoryLimits(ram, int(gpu) if gpu is not None else None)
