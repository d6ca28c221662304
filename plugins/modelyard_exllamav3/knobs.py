"""The ExLlamaV3 options that `modelyard optimize` may change."""

from __future__ import annotations

from collections.abc import Iterator

from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard_exllamav3.options import ExllamaOptions


def knobs(spec: EngineSpec, here: AvailableMemory, goal: Goal) -> Iterator[Knob]:
    del spec, here
    if goal == "batch":
        yield Knob(name="parallel", values=(1, 2, 4, 8, 16), stage=1, place="cache")
    yield Knob(name="exllama_max_chunk_size", values=(512, 1024, 2048, 4096, 8192), stage=2)
    yield Knob(name="exllama_max_q_size", values=(4, 8, 16), stage=3)


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    options: ExllamaOptions = spec.options
    return {
        "parallel": spec.caches[cache].parallel,
        "exllama_max_chunk_size": options.exllama_max_chunk_size,
        "exllama_max_q_size": options.exllama_max_q_size,
    }


def forbids(setting: Setting) -> str | None:
    del setting
    return None
