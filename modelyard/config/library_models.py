"""The models of the library as a part of the configuration: every pulled or added model can be served by its name."""

from __future__ import annotations

from contextlib import suppress

from modelyard.core.engine import AvailableMemory
from modelyard.core.errors import ModelyardError
from modelyard.engines.llama_cpp.library import visible_memory
from modelyard.library.variants import MemoryBudget
from modelyard.telemetry import system

_RAM_SHARE, _GPU_SHARE = 0.7, 0.9  # the rest is for other programs


def machine_budget() -> MemoryBudget:
    """What one model may take of this machine, whatever is free now: the choice of a quantization or of a window is
    for longer than a moment, and the pool unloads other models for it."""
    total = AvailableMemory(system.total_ram(), {gpu.uuid: gpu.total for gpu in system.read_gpus()})
    with suppress(ModelyardError):  # no llama.cpp: another engine may use the GPUs
        total = visible_memory(total)
    return MemoryBudget(int(_RAM_SHARE * total.ram_free), int(_GPU_SHARE * sum(total.gpus.values())))
