"""What is asked of a trial's process and what it answers: values only, since they cross from one process to another."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from modelyard.benchmark.workload import Workload
from modelyard.core.knobs import Loss

FailureKind = Literal["crash", "hang", "memory", "refused", "errors"]


class Order(Struct, frozen=True, kw_only=True):
    """Measure one model by this workload; or, where `reference` is set, what its numbers lose beside the reference's.
    `config` and `reference` hold this one model and its caches."""

    config: dict[str, Any]
    model: str
    workload: Workload
    conversations: int = 1
    seed: int = 0
    key: str = ""
    answer_s: float = 600.0  # longest time of one answer
    reference: dict[str, Any] | None = None
    bench: bool = False  # by the engine's own program instead


class Figures(Struct, frozen=True, kw_only=True, tag="figures"):
    """What one trial measured. `speed` is tokens a second: of one stream, or of all where there are several."""

    speed: float
    ttft_s: float
    answer_s: float
    memory: int
    load_s: float = 0.0
    wall_s: float = 0.0  # all answers of the trial together


class Failure(Struct, frozen=True, tag="failure"):
    """Why a trial has no figures: a result like any other."""

    kind: FailureKind
    reason: str

    def __str__(self) -> str:
        return f"{_WORDS[self.kind]}: {self.reason}"


class Judged(Struct, frozen=True, tag="loss"):
    loss: Loss


class Benched(Struct, frozen=True, tag="bench"):
    """What the engine's own program says: prompt tokens read and tokens made a second."""

    prefill: float
    decode: float


Outcome = Figures | Failure | Judged | Benched

_WORDS: dict[FailureKind, str] = {
    "crash": "the process died",
    "hang": "not finished in time",
    "memory": "out of memory",
    "refused": "it cannot be loaded",
    "errors": "its answers failed",
}
