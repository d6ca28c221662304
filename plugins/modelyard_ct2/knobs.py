"""The CTranslate2 options that `modelyard optimize` may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard.library import cores
from modelyard_ct2.options import ComputeType, Ct2Options


def knobs(spec: EngineSpec, here: AvailableMemory, goal: Goal) -> Iterator[Knob]:
    del here
    if goal == "batch":
        yield Knob(name="parallel", values=(1, 2, 4, 8, 16), stage=1, place="cache")
    yield Knob(name="inter_threads", values=cores.thread_counts(), stage=2)
    yield Knob(name="intra_threads", values=cores.thread_counts(), stage=2)
    yield Knob(name="compute_type", values=_supported_types(spec.options), stage=3, lossy=True)


def _supported_types(options: Ct2Options) -> tuple[str, ...]:
    """Those that the device supports; CTranslate2 silently replaces the others by one of these."""
    import ctranslate2

    device = "cuda" if options.device != "cpu" and ctranslate2.get_cuda_device_count() else "cpu"
    supported = ctranslate2.get_supported_compute_types(device)
    return tuple(name for name in get_args(ComputeType) if name in supported)


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    options: Ct2Options = spec.options
    capacity = sum(info.parallel for info in spec.caches.values())
    return {
        "parallel": spec.caches[cache].parallel,
        "inter_threads": options.batch_workers(capacity),
        "intra_threads": options.threads_per_batch(capacity),
        "compute_type": options.compute_type,
    }


def forbids(setting: Setting) -> str | None:
    values = setting.values
    batches, threads = int(values.get("inter_threads", 1)), int(values.get("intra_threads", 1))
    if threads > 1 and batches * threads > cores.logical():
        return "more threads than the machine has cores"
    return None
