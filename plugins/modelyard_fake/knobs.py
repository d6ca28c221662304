"""The fake engine's knobs for the optimizer: they demonstrate it without a model."""

from __future__ import annotations

from collections.abc import Iterator

from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard_fake.script import FakeOptions

_INSTANT = 1_000_000.0


def knobs(spec: EngineSpec, here: AvailableMemory, goal: Goal) -> Iterator[Knob]:
    del spec, here
    if goal == "batch":
        yield Knob(name="parallel", values=(1, 2, 4, 8), stage=1, place="cache")
    yield Knob(name="token_delay", values=(0.0, 0.001, 0.005, 0.02), stage=2)
    yield Knob(name="prefill_rate", values=(1000.0, 10_000.0, 100_000.0, _INSTANT), stage=3)


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    options: FakeOptions = spec.options
    return {
        "parallel": spec.caches[cache].parallel,
        "token_delay": options.delay,
        "prefill_rate": options.prefill_rate or _INSTANT,
    }


def forbids(setting: Setting) -> str | None:
    del setting
    return None
