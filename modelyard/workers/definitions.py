"""What a worker may run: the models of its own configuration.

A message names a model; its backend, files, programs and arguments come from the worker's definition of it. With them a
message could run any command. A message brings only what the scheduler decides: the caches, and settings that one load
may override (`live_overrides` of the engine, without its `local_options`, which name files).

A worker that a scheduler or gateway starts for one engine gets its definition as a file when it starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace
from pydantic import TypeAdapter, ValidationError

from modelyard import plugins
from modelyard.core.engine import EngineSpec
from modelyard.core.errors import InvalidRequest, NotFound


class Definitions(Protocol):
    """`find` raises NotFound. Both may read files."""

    def find(self, model: str) -> EngineSpec: ...
    def models(self) -> tuple[str, ...]: ...


class FixedDefinitions:
    def __init__(self, *definitions: EngineSpec) -> None:
        self._definitions = {definition.model: definition for definition in definitions}

    def find(self, model: str) -> EngineSpec:
        if (found := self._definitions.get(model)) is None:
            raise not_defined(model)
        return found

    def models(self) -> tuple[str, ...]:
        return tuple(self._definitions)


def not_defined(model: str) -> NotFound:
    message = f"the configuration of this worker has no model {model!r}: add it there, as in the scheduler's"
    return NotFound(message, code="model_not_defined")


def define(spec: EngineSpec) -> EngineSpec:
    """What a worker keeps of a spec: without what each message brings, and with the options that were set, because the
    worker's engine has its own defaults."""
    options = spec.options.model_dump(mode="json", exclude_unset=True)
    return EngineSpec(spec.model, options, modalities=spec.modalities, backend=spec.backend)


def write_definition(path: Path, definition: EngineSpec) -> None:
    """Readable by the owner only: options may contain keys."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(definition))


def read_definition(path: Path) -> EngineSpec:
    return msgspec.json.decode(path.read_bytes(), type=EngineSpec)


# --- what a message may change ----------------------------------------------------------------------------------------


def _message_fields(backend: str) -> Mapping[str, Any]:
    """Field → type of the options that a message may set."""
    module = plugins.engine(backend)
    allowed = module.Options.model_fields.keys() - module.local_options
    return {name: kind for name, kind in module.live_overrides.items() if name in allowed}


def message_spec(spec: EngineSpec) -> EngineSpec:
    """What a message that opens this engine says of it."""
    fields, options = _message_fields(spec.backend), define(spec).options
    sent = {name: value for name, value in options.items() if name in fields and _fits(value, fields[name])}
    return EngineSpec(spec.model, sent, spec.caches, spec.modalities, identity=spec.identity)


def _fits(value: Any, kind: Any) -> bool:
    """A configuration may set values that a message may not."""
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def engine_spec(definition: EngineSpec, message: EngineSpec) -> EngineSpec:
    """The engine of a definition with the options, caches and modalities of a message."""
    kind = plugins.engine(definition.backend).Options
    changed = definition.options | _checked(definition, message.options)
    try:
        made = kind.model_validate_json(msgspec.json.encode(changed))
    except ValidationError as error:
        raise _unfit(definition, error) from None
    return replace(definition, options=made, caches=message.caches, modalities=message.modalities)


def _unfit(definition: EngineSpec, error: ValidationError, *field: str) -> InvalidRequest:
    first = error.errors()[0]
    where = ".".join(map(str, (*field, *first["loc"])))
    return InvalidRequest(
        f"the options of {definition.model!r} do not fit this worker's engine: {where}: {first['msg']}"
    )


def _checked(definition: EngineSpec, options: Any) -> dict[str, Any]:
    fields = _message_fields(definition.backend)
    try:
        sent = msgspec.convert(options, dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the options of {definition.model!r} cannot be read: {error}") from None
    for name, value in sent.items():
        if name not in fields:
            raise InvalidRequest(
                f"{name} of {definition.model!r} is set in the configuration of the worker, not by a message",
                code="option_not_allowed",
                param=name,
            )
        try:
            TypeAdapter(fields[name]).validate_python(value)
        except ValidationError as error:
            raise _unfit(definition, error, name) from None
    return sent
