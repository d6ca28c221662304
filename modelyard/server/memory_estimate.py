"""The memory that each model of a configuration needs, estimated before it is loaded, and what is free."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from pydantic import ValidationError

from modelyard import plugins
from modelyard.config.settings import Config, engine_spec
from modelyard.core.engine import AvailableMemory, EngineSpec, MemoryEstimate
from modelyard.core.errors import ModelyardError
from modelyard.core.units import format_size
from modelyard.router.router import ModelEntry
from modelyard.telemetry import system


class ModelMemory(Struct, frozen=True):
    """Bytes of one replica, or why they are unknown."""

    model: str
    memory: MemoryEstimate | None
    note: str = ""


def available_memory() -> AvailableMemory:
    return system.free_memory(with_gpus=True)


def estimate_all(config: Config, available: AvailableMemory) -> Iterator[ModelMemory]:
    for entry in config.router().catalog.models.values():
        yield estimate_memory(entry, available)


def estimate_memory(entry: ModelEntry, available: AvailableMemory) -> ModelMemory:
    try:
        return ModelMemory(entry.name, estimate_engine(engine_spec(entry), available))
    except ModelyardError as error:
        return ModelMemory(entry.name, None, error.message)
    except ValidationError:  # in the rest of a configuration with errors
        return ModelMemory(entry.name, None, "its settings are not valid")


def estimate_engine(spec: EngineSpec, available: AvailableMemory) -> MemoryEstimate:
    if spec.fault is not None and spec.options is None:
        raise spec.fault
    return plugins.engine(spec.backend).estimate(spec, available)


def describe_memory(estimated: ModelMemory, available: AvailableMemory) -> str:
    """A sentence for people: the total, its parts, and what is free."""
    if estimated.memory is None:
        return f"unknown: {estimated.note}"
    parts = ((format_size(b), what) for b, what in memory_parts(estimated.memory) if b)
    total = f"about {format_size(estimated.memory.total)} ({', '.join(f'{what} {count}' for count, what in parts)})"
    if not estimated.memory.total:
        return "none in this process"
    gpus = f", {format_size(sum(available.gpus.values()))} of GPU memory" if available.gpus else ""
    return f"{total}{describe_layers(estimated.memory)}; free now: {format_size(available.ram_free)} of RAM{gpus}"


def describe_layers(memory: MemoryEstimate) -> str:
    """Where the layers go; nothing for an engine or a machine without that choice."""
    return f", {memory.gpu_layers} of {memory.layers} layers on the GPU" if memory.gpu_layers else ""


def memory_parts(memory: MemoryEstimate) -> tuple[tuple[int, str], ...]:
    return (memory.weights, "weights"), (memory.kv, "KV caches"), (memory.compute, "compute buffers")
