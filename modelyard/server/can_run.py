"""Whether a model can run on this machine, and what keeps it from running: one answer for `check`, `doctor`, the lists
of models, readiness and the load itself. Nothing is loaded and nothing is fetched.

A model of another scheduler (`scheduler.endpoint`) runs on other machines: nothing here is asked about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct
from pydantic import BaseModel, ValidationError

from modelyard import plugins
from modelyard.config.library_models import missing_hub_model
from modelyard.config.problems import ConfigPath, validation_message
from modelyard.config.settings import Config, engine_spec
from modelyard.core.engine import AvailableMemory, EnginePlugin, EngineSpec, MemoryEstimate
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.units import format_size
from modelyard.library import default_model
from modelyard.router.router import ModelEntry
from modelyard.scheduler.memory_planner import MemoryLimits
from modelyard.server.memory_estimate import available_memory, estimate_engine, estimate_memory, memory_parts
from modelyard.telemetry.system import MachineMemory, read_memory
from modelyard.workers import interpreter

RunFault = tuple[ConfigPath, str]  # the setting of the model, and what is wrong with it
_OPTIONS_THAT_SPLIT = ("n_gpu_layers", "llama_server_n_gpu_layers")  # such an engine puts the rest into RAM


def run_faults(
    entry: ModelEntry, limits: MemoryLimits, machine: MachineMemory, memory: MemoryEstimate | None
) -> Iterator[RunFault]:
    """The engine's library or program, the model's files and devices, and its memory, if it is known."""
    try:
        spec = engine_spec(entry)
    except ModelyardError as error:
        yield ("backend",), error.message
        return
    except ValidationError as error:
        yield (), validation_message(error.errors()[0])
        return
    yield from _spec_faults(spec, limits, machine, memory)


def _spec_faults(
    spec: EngineSpec, limits: MemoryLimits, machine: MachineMemory, memory: MemoryEstimate | None
) -> Iterator[RunFault]:
    module = plugins.engine(spec.backend)
    yield from _engine_faults(module, spec.python)
    yield from (((*option.split("."),), message) for option, message in module.faults(spec))
    if memory is not None:
        yield from _memory_faults(memory, spec.options, limits, machine)


def set_up_at_start(entry: ModelEntry) -> Iterator[RunFault]:
    """What is missing here and what `modelyard serve` fetches before it loads the model."""
    settings = entry.settings
    if default_model.is_default(settings.path) and not default_model.is_fetched():
        size = format_size(default_model.DEFAULT_MODEL.size)
        yield ("path",), f"is not on this machine yet: modelyard serve fetches it ({size})."
    elif entry.enabled and missing_hub_model(settings) is not None:
        field = "path" if settings.path is not None else "vllm_model"
        yield (field,), "is not on this machine yet: modelyard serve fetches it from the hub."
    module = plugins.engine(entry.backend)
    if module.prepare is not None and settings.python is None:
        try:
            module.verify()
        except plugins.MissingLibrary:
            yield ("backend",), "its library is not on this machine yet: modelyard serve sets it up."
        except ModelyardError:
            pass  # it is here, and broken


def require_runnable(spec: EngineSpec, limits: MemoryLimits) -> None:
    """Raise what would keep a load from working. Reads files, and may start the self-test of a library."""
    if spec.fault is not None and spec.options is None:
        raise spec.fault
    try:
        memory = estimate_engine(spec, available_memory())
    except ModelyardError:  # the faults say why
        memory = None
    for path, message in _spec_faults(spec, limits, read_memory(), memory):
        where = f"{'.'.join(map(str, path))}: " if path else ""
        raise Unavailable(f"{where}{message}", code="cannot_run")


def unrunnable_models(config: Config, *, set_up: bool = True) -> dict[str, str]:
    """The models that cannot be loaded here, and why. `set_up`: what a start fetches should be here. Those of the
    library are asked when they are read: there may be many."""
    if config.scheduler.endpoint:
        return {}
    machine, available, limits = read_memory(), available_memory(), config.scheduler.memory_limits()
    faults: dict[str, str] = {}
    for name, entry in config.router().catalog.models.items():
        if name in config.library_models:
            continue
        awaited = {} if set_up or entry.backend not in plugins.names("engines") else dict(set_up_at_start(entry))
        found = run_faults(entry, limits, machine, estimate_memory(entry, available).memory)
        if (message := next((message for path, message in found if path not in awaited), None)) is not None:
            faults[name] = message
    return faults


def _engine_faults(module: EnginePlugin, python: str | None) -> Iterator[RunFault]:
    """With another interpreter, that interpreter must be able to run the engine."""
    try:
        if python is None:
            module.verify()
        elif interpreter.interpreter_exists(python):  # else reported by the checks of the configuration
            with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
                thread.submit(asyncio.run, interpreter.check_interpreter(python)).result()
    except ModelyardError as error:
        yield ("backend" if python is None else "python",), error.message


# --- memory -----------------------------------------------------------------------------------------------------------


class _Capacity(Struct, frozen=True):
    """Bytes of a device, and whose they are."""

    bytes: int
    owner: str


def _capacities(
    memory: MemoryEstimate, options: BaseModel, limits: MemoryLimits, machine: MachineMemory
) -> list[_Capacity]:
    """All that the memory must fit in."""
    gpus = {gpu.uuid: gpu.total for gpu in machine.gpus}
    allowed = limits.by_device(AvailableMemory(machine.ram_total, gpus))
    if memory.device in ("", "cpu"):
        found = [_Capacity(machine.ram_total, "this machine has {} of RAM")]
        limit = ("cpu", "scheduler.memory_limit allows {}")
    else:
        splits = any(name in type(options).model_fields for name in _OPTIONS_THAT_SPLIT)
        found = [_Capacity(sum(gpus.values()) + (machine.ram_total if splits else 0), "this machine has {}")]
        limit = ("gpu", "scheduler.gpu_memory_limit allows {}")
    if getattr(options, "overcommit", False):
        found = []
    return [*found, *([_Capacity(allowed[limit[0]], limit[1])] if limit[0] in allowed else [])]


def _memory_faults(
    memory: MemoryEstimate, options: BaseModel, limits: MemoryLimits, machine: MachineMemory
) -> Iterator[RunFault]:
    for capacity in _capacities(memory, options, limits, machine):
        if memory.total > capacity.bytes:
            parts = ", ".join(f"{what} {format_size(size)}" for size, what in memory_parts(memory) if size)
            message = f"needs about {format_size(memory.total)} ({parts}), and "
            message += capacity.owner.format(format_size(capacity.bytes))
            yield (), f"{message}. Use a smaller n_ctx, parallel or KV type, or a smaller model."
            return
