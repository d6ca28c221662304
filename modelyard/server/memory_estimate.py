"""What each model of a configuration will take of memory, beside what is free: asked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from modelyard import plugins
from modelyard.config.engine_options import engine_spec
from modelyard.config.settings import Config
from modelyard.core.engine import AvailableMemory, MemoryEstimate
from modelyard.core.errors import ModelyardError
from modelyard.engines.llama_cpp.estimate import format_size
from modelyard.router.catalog import ModelEntry
from modelyard.telemetry import system

__all__ = ["Footprint", "footprint", "footprints", "format_size", "machine", "sentence"]


class Footprint(Struct, frozen=True):
    """Bytes of one replica, or why they cannot be told."""

    model: str
    memory: MemoryEstimate | None
    note: str = ""


def machine() -> AvailableMemory:
    return system.free_memory(with_gpus=True)


def footprints(config: Config, here: AvailableMemory) -> Iterator[Footprint]:
    for entry in config.router().catalog.models.values():
        yield footprint(config, entry, here)


def footprint(config: Config, entry: ModelEntry, here: AvailableMemory) -> Footprint:
    try:
        module = plugins.load("engines", entry.backend)
        return Footprint(entry.name, module.estimate(engine_spec(entry, config.models[entry.name]), here))
    except ModelyardError as error:
        return Footprint(entry.name, None, error.message)


def sentence(taken: Footprint, here: AvailableMemory) -> str:
    """As people read it: the sum, its parts, and what is free."""
    if taken.memory is None:
        return f"not known: {taken.note}"
    parts = ((format_size(b), what) for b, what in _parts(taken.memory) if b)
    told = f"about {format_size(taken.memory.total)} ({', '.join(f'{what} {count}' for count, what in parts)})"
    if not taken.memory.total:
        return "none of its own"
    gpus = f", {format_size(sum(here.gpus.values()))} of GPU memory" if here.gpus else ""
    return f"{told}; free now: {format_size(here.ram_free)} of RAM{gpus}"


def _parts(memory: MemoryEstimate) -> tuple[tuple[int, str], ...]:
    return (memory.weights, "weights"), (memory.kv, "KV caches"), (memory.compute, "compute buffers")
