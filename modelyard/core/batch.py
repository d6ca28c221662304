"""Batches: many requests that run when nothing else waits. What every protocol's batches have in common."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from modelyard.core.events import Usage

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Outcome = Literal["succeeded", "errored", "canceled", "expired"]


class BatchFault(Struct, frozen=True):
    """Why a whole batch has failed."""

    code: str
    message: str
    line: int | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """`times` are those at which it entered a state. `ending` is the state that a batch which is being finalized
    ends in."""

    id: str
    api: Literal["openai", "anthropic"]
    endpoint: str
    input_file: str = ""
    window: str = "24h"
    created: int
    expires: int
    metadata: dict[str, str] = {}
    output_ttl_s: float | None = None
    allow_remote: bool = False
    status: BatchStatus = "validating"
    ending: BatchStatus = "completed"
    times: dict[str, int] = {}
    total: int = 0
    counts: dict[str, int] = {}  # by outcome
    usage: Usage = Usage()
    model: str | None = None
    output_file: str | None = None
    error_file: str | None = None
    faults: tuple[BatchFault, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")

    def count(self, outcome: Outcome) -> int:
        return self.counts.get(outcome, 0)


class BatchLine(Struct, frozen=True):
    """A request of a batch."""

    custom_id: str
    body: bytes


class LineFault(Exception):
    """A line that cannot be run."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


class BatchRow(Struct, frozen=True):
    """What became of a line. `body` is the reply, whatever its status; without one, `code` and `message` say why."""

    line: int
    custom_id: str | None
    outcome: Outcome
    status: int = 0
    request_id: str = ""
    body: bytes = b""
    code: str = ""
    message: str = ""
