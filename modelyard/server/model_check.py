"""What keeps the models of a configuration from running on this machine: engines, programs, files, templates, memory.

A fault of a model that a request can reach is an error; that of one that only an administrator loads is a note, because
a file may be meant for several machines. So is that of a model that only the library has, and in the configuration of a
gateway whose scheduler is elsewhere (`scheduler.endpoint`).
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace
from pydantic import ValidationError

from modelyard.accounts.file import has_created_keys
from modelyard.config.problems import ConfigPath, ConfigProblem, ProblemLevel, format_path, problem_at
from modelyard.config.settings import Config, LoadedConfig, engine_spec
from modelyard.config.sources import with_lines
from modelyard.core.engine import MemoryEstimate
from modelyard.core.errors import ModelyardError
from modelyard.core.units import format_size
from modelyard.gateway.model import Model, effective_capabilities
from modelyard.http.auth import is_loopback
from modelyard.prompt.template_source import builtin, find_template
from modelyard.router.router import ModelEntry
from modelyard.router.settings import ModelSettings
from modelyard.server.can_run import run_faults, set_up_at_start
from modelyard.server.memory_estimate import ModelMemory
from modelyard.server.model_definition import define_model, trial_fault
from modelyard.telemetry.system import MachineMemory

ModelFault = tuple[ConfigPath, str, ProblemLevel]
_OPTIONS_THAT_SPLIT = ("n_gpu_layers", "llama_server_n_gpu_layers")  # such an engine puts the rest into RAM


def check_models(
    loaded: LoadedConfig, estimates: Iterable[ModelMemory], machine: MachineMemory, only: str | None = None
) -> list[ConfigProblem]:
    """The problems of the sources and of all models on this machine, in the order of the files; with `only`, those of
    the sources and of one model."""
    config, memory = loaded.config, {each.model: each.memory for each in estimates}
    used = set() if config.scheduler.endpoint else config.needed_models()  # a scheduler elsewhere loads them
    found = [_graded(problem, used, config) for problem in loaded.problems]
    for entry in config.router().catalog.models.values():
        if only not in (None, entry.name):
            continue
        for path, message, level in _model_faults(config, entry, memory.get(entry.name), machine):
            graded: ProblemLevel = level if entry.name in used else "note"
            found.append(problem_at(loaded.layers, ("models", entry.name, *path), message, graded))
    general = (*_server_faults(config), *_total_faults(config, memory, machine)) if only is None else ()
    found += [problem_at(loaded.layers, *each) for each in general]
    return with_lines(dict.fromkeys(found))


def _graded(problem: ConfigProblem, used: set[str], config: Config) -> ConfigProblem:
    """What is unavailable is an error if requests can reach the model."""
    if problem.level != "unavailable":
        return problem
    idle = [f"{format_path(('models', name))}." for name in config.models if name not in used]
    is_idle = any(problem.path.removeprefix("engine.").startswith(prefix) for prefix in idle)
    return replace(problem, level="note" if is_idle else "error")


def _model_faults(
    config: Config, entry: ModelEntry, memory: MemoryEstimate | None, machine: MachineMemory
) -> Iterator[ModelFault]:
    settings = entry.settings
    try:
        engine_spec(entry)
    except (ModelyardError, ValidationError):
        return  # its engine or its options are reported by the checks of the configuration
    awaited = dict(set_up_at_start(entry))
    yield from ((path, message, "note") for path, message in awaited.items())
    found = run_faults(entry, config.scheduler.memory_limits(), machine, memory)
    faults = [(path, message) for path, message in found if path not in awaited]
    model = define_model(entry) if not awaited and not any(path for path, _ in faults) else None
    faults += _definition_faults(settings, model)
    if model is not None and (unused := _unused_format(settings, model)) is not None:
        yield ("prompt_format",), unused, "note"
    if model is not None and model.text is not None and not model.talks and effective_capabilities(model).generates:
        yield ("chat_template",), _sentence(f"{model.text.renderer.missing}"), "note"
    yield from ((path, _sentence(message), "error") for path, message in dict(reversed(faults)).items())


def _definition_faults(settings: ModelSettings, model: Model | None) -> Iterator[tuple[ConfigPath, str]]:
    """A definition ends at its first fault, so the template is also tried alone. `model` is None if something else that
    the definition needs is missing."""
    if settings.chat_template is not None:
        folder = Path(settings.path).expanduser() if settings.path is not None else None
        try:
            find_template(chat_template=settings.chat_template, folder=folder)
        except ModelyardError as error:
            yield ("chat_template",), error.message
    if model is not None and (fault := model.fault or trial_fault(model)) is not None:
        hint = ". To use prompt_format instead, set force_prompt_format = true"
        message = fault.message + (hint if _is_overruled(fault, settings) else "")
        yield (_field_at_fault(fault, settings),), message


def _is_overruled(fault: ModelyardError, settings: ModelSettings) -> bool:
    """Whether the model's own template, which came before `prompt_format`, is at fault."""
    is_own = settings.chat_template is None and not settings.force_prompt_format
    return settings.prompt_format is not None and is_own and "template" in (fault.code or "")


def _unused_format(settings: ModelSettings, model: Model) -> str | None:
    """A note, because most models have a template of their own."""
    format, text = settings.prompt_format, model.text
    if format is None or text is None or text.renderer.template_text == builtin(format):
        return None
    own = "chat_template is set" if settings.chat_template is not None else "the model has a template of its own"
    return f"{format} is not used: {own}."


def _field_at_fault(fault: ModelyardError, settings: ModelSettings) -> str:
    if fault.param in ModelSettings.model_fields:
        return fault.param
    code = fault.code or ""
    if "template" in code:
        return "chat_template"
    if "tokenizer" in code and settings.tokenizer_path is not None:
        return "tokenizer_path"
    return "path" if settings.path is not None else "backend"


def _sentence(message: str) -> str:
    return message if message.endswith((".", "?")) else f"{message}."


# --- the server -------------------------------------------------------------------------------------------------------


def _server_faults(config: Config) -> Iterator[ModelFault]:
    """What ends a start: an open address without keys, certificates that cannot be used, folders that cannot be
    written."""
    http = config.http
    if not is_loopback(http.host) and not config.keys and not has_created_keys(config.accounts):
        message = (
            f"other machines can reach {http.host}, so the server needs an API key: set MODELYARD_API_KEY, or add "
        )
        create = "create one (modelyard keys create NAME --admin)"
        yield ("http", "host"), f"{message}[[keys]], or {create}, or listen on 127.0.0.1.", "error"
    if http.ssl_certfile is not None and http.ssl_keyfile is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                http.ssl_certfile, http.ssl_keyfile, password=lambda: b""
            )
        except FileNotFoundError:
            pass  # reported by the checks of the configuration
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or error.strerror or str(error)
            message = f"cannot be used together with ssl_keyfile: {reason.lower().replace('_', ' ')}."
            yield ("http", "ssl_certfile"), message, "error"
    written = {("store", "path"): config.store.path, ("log", "debug_dir"): config.log.debug_dir}
    for path, file in written.items():
        if file is not None and (reason := _not_writable(file.expanduser().absolute())):
            yield path, reason, "error"


def _not_writable(file: Path) -> str | None:
    existing = file if file.exists() else next(parent for parent in file.parents if parent.exists())
    if existing != file and not existing.is_dir():
        return f"{existing} is a file, not a folder."
    return None if os.access(existing, os.W_OK) else f"{existing} cannot be written by this user."


# --- memory -----------------------------------------------------------------------------------------------------------


def _total_faults(
    config: Config, memory: dict[str, MemoryEstimate | None], machine: MachineMemory
) -> Iterator[ModelFault]:
    """The models that are loaded at start, together. They take turns if they do not fit."""
    entries = [entry for entry in config.router().catalog.models.values() if entry.enabled]
    sizes = {
        entry.name: estimate.total * config.models[entry.name].replicas
        for entry in entries
        if (estimate := memory.get(entry.name)) is not None and estimate.device in ("", "cpu")
    }
    limit = min(machine.ram_total, config.scheduler.memory_limit or machine.ram_total)
    if len(sizes) > 1 and sum(sizes.values()) > limit >= max(sizes.values()):
        message = f"the models that are loaded at start need about {format_size(sum(sizes.values()))} together, and "
        message += (
            f"{format_size(limit)} can be used: they take turns. Set enabled = false and autoload = true on some."
        )
        yield ("models",), message, "warning"
