"""Changes models, caches and routes in the configuration files of a running server.

change → edits of one file → draft → checked as `modelyard check` does → written with a backup → reloaded

A draft with errors is never written. If the server refuses the new configuration after all, the file gets its old text
back.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from modelyard.config.fields import Section, SectionFields, option_names, section_fields
from modelyard.config.file_editor import (
    FileEdit,
    InsertEntry,
    MoveEntry,
    RemoveValue,
    SetValue,
    changed_meanwhile,
    decode,
    edit_text,
    restore,
    write_with_backup,
)
from modelyard.config.library_models import EMBEDDED_SOURCE, LIBRARY_SOURCE
from modelyard.config.load import COMMAND_LINE, ConfigSources
from modelyard.config.problems import ConfigError, ConfigLayer, ConfigPath, ConfigProblem, format_path
from modelyard.config.secrets import redacted
from modelyard.config.settings import Config, LoadedConfig, infer_backend
from modelyard.config.sources import ENVIRONMENT, ConfigFile
from modelyard.core.errors import Conflict, InvalidRequest, ModelyardError, NotFound
from modelyard.http.admin.context import ConfigChange, ReloadResult
from modelyard.server.admin_service import config_difference
from modelyard.server.memory_estimate import available_memory, estimate_memory
from modelyard.server.model_check import check_models
from modelyard.telemetry.masking import MASK
from modelyard.telemetry.system import read_memory

Json = dict[str, Any]

_ROLES = {
    "--config": "the file of --config",
    "user": "your own file",
    "project": "the file of the project",
    "settings": "the project's settings",
    "local": "the project's local settings",
}
_NEW_FILES = ("--config", "user", "project")  # files that may be created
_RELOAD_WAIT_S, _RELOAD_PAUSE_S = 30.0, 0.1


class EditableFile(Struct, frozen=True, kw_only=True):
    """`content` is None for a file that does not exist yet. `reason` says why it cannot be written."""

    path: Path
    role: str
    content: bytes | None
    reason: str = ""

    @property
    def revision(self) -> str:
        return "" if self.content is None else hashlib.sha256(self.content).hexdigest()[:16]

    def describe(self) -> Json:
        return {
            "path": str(self.path),
            "role": self.role,
            "title": _ROLES[self.role],
            "exists": self.content is not None,
            "writable": not self.reason,
            "reason": self.reason,
            "revision": self.revision,
        }


class ConfigState(Struct, frozen=True):
    """What the files say now. `problems` are their errors, if they have some."""

    loaded: LoadedConfig
    files: list[EditableFile]
    problems: Sequence[ConfigProblem]

    @property
    def config(self) -> Config:
        return self.loaded.config

    def owner(self, path: ConfigPath) -> ConfigLayer | None:
        """The file of the highest priority that has it."""
        names = {str(file.path) for file in self.files}
        return next(
            (layer for layer in reversed(self.loaded.layers) if layer.source in names and layer.has(path)), None
        )

    def file(self, path: str) -> EditableFile:
        found = next((file for file in self.files if str(file.path) == path), None)
        if found is None:
            known = ", ".join(str(file.path) for file in self.files)
            raise NotFound(f"{path} is not one of the files of this server: {known}", param="file")
        return found

    def layer(self, file: EditableFile) -> ConfigLayer:
        found = (layer for layer in self.loaded.layers if layer.source == str(file.path))
        return next(found, ConfigLayer(str(file.path), {}))

    def names(self, section: Section) -> list[str]:
        """With those that have invalid values, which the configuration lacks."""
        found = dict.fromkeys(self.config.models if section == "models" else self.config.caches)
        tables = (layer.data.get(section) for layer in self.loaded.layers)
        return list(found | dict.fromkeys(name for table in tables if isinstance(table, dict) for name in table))

    @property
    def target(self) -> EditableFile:
        """For something new: the file of the highest priority that exists, else the user's own."""
        existing = [file for file in self.files if file.content is not None]
        own = [file for file in self.files if file.role in ("--config", "user")]
        return (existing[-1:] or own or self.files)[0]

    def backend(self, section: Section, name: str, changed: Json | None = None) -> str | None:
        """The engine of a model, or of the model of a cache, with the changes of a form."""
        changed = changed or {}
        if section == "caches":
            cache = self.config.caches.get(name)
            model = self.config.models.get(changed.get("model") or (cache.model if cache else ""))
            return model.backend if model else None
        model = self.config.models.get(name)
        if changed.get("backend"):
            return str(changed["backend"])
        inferred = infer_backend(changed.get("path")) if changed.get("path") else None
        return inferred or (model.backend if model else None)


class Draft(Struct, frozen=True):
    """A change as the text of one file."""

    state: ConfigState
    file: EditableFile
    text: str
    before: str
    entry: ConfigPath  # of the file
    notes: list[str]
    fields: dict[str, str]  # names of fields by their paths in the file

    @property
    def diff(self) -> str:
        name = self.file.path.name
        lines = difflib.unified_diff(self.before.splitlines(), self.text.splitlines(), name, name, lineterm="")
        return "\n".join(lines)


class CheckedDraft(Struct, frozen=True):
    """`is_valid`: it can be written; `can_force`: it can, but a model of it would not run on this machine."""

    draft: Draft
    problems: list[Json]
    effect: ReloadResult | None
    is_valid: bool
    can_force: bool


class ConfigEditor:
    def __init__(
        self, sources: ConfigSources, running: Callable[[], Config], reload: Callable[[], Awaitable[ReloadResult]]
    ) -> None:
        self._sources, self._running, self._reload = sources, running, reload
        self._lock = asyncio.Lock()

    # --- reading ------------------------------------------------------------------------------------------------------

    async def overview(self) -> Json:
        return await asyncio.to_thread(lambda: overview(self._state()))

    async def fields(self, section: Section, name: str, values: Json) -> SectionFields:
        def work() -> SectionFields:
            state = self._state()
            return section_fields(section, state.config, state.backend(section, name, values))

        return await asyncio.to_thread(work)

    def _state(self) -> ConfigState:
        files = [file for each in self._sources.files() if (file := _editable(each)) is not None]
        try:
            return ConfigState(self._sources(), files, ())
        except ConfigError as error:
            if error.rest is None:
                raise InvalidRequest(f"the files have errors: {error.message}", code="config") from None
            return ConfigState(error.rest, files, error.problems)

    # --- changing -----------------------------------------------------------------------------------------------------

    async def preview(self, change: ConfigChange) -> Json:
        checked = await asyncio.to_thread(self._check, change)
        return _describe(checked)

    async def apply(self, change: ConfigChange) -> Json:
        """Write the file and reload. Raises the reason why nothing was changed."""
        async with self._lock:
            checked = await asyncio.to_thread(self._check, change)
            if not (checked.is_valid or (change.force and checked.can_force)):
                errors = [each for each in checked.problems if each["level"] == "error"]
                raise InvalidRequest("; ".join(f"{each['path']}: {each['message']}" for each in errors), code="config")
            draft = checked.draft
            if draft.text == draft.before:
                return {**_describe(checked), "backup": None, "reload": ReloadResult()}
            backup = await asyncio.to_thread(write_with_backup, draft.file.path, draft.text, draft.file.content)
            try:
                done = await self._reload_now()
            except Exception as error:
                kept = await asyncio.to_thread(restore, draft.file.path, draft.text, draft.file.content, backup)
                if not isinstance(error, ModelyardError):
                    raise
                message = f"the server refused the change, and {kept}: {error.message}"
                raise InvalidRequest(message, code="config") from None
            written = await asyncio.to_thread(draft.file.path.read_bytes)
            after = replace(draft.file, content=written)
            return {
                **_describe(checked),
                "revision": after.revision,
                "backup": None if backup is None else str(backup),
                "reload": done,
            }

    async def _reload_now(self) -> ReloadResult:
        """A reload that is already running may have read the old file: then once more."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _RELOAD_WAIT_S
        while True:
            try:
                return await self._reload()
            except Conflict as error:
                if error.code != "reload_running" or loop.time() > deadline:
                    raise
            await asyncio.sleep(_RELOAD_PAUSE_S)

    def _check(self, change: ConfigChange) -> CheckedDraft:
        draft = make_draft(self._state(), change)
        try:
            after = self._sources({draft.file.path: draft.text})
        except ConfigError as error:
            new = _new_problems(draft, error.problems)
            return CheckedDraft(draft, _by_field(draft, new), None, is_valid=False, can_force=False)
        effect = config_difference(self._running(), after.config)
        if after.config.is_embedded and not self._running().is_embedded:
            message = "no model would be left: a server needs one. Add another one first."
            last = ConfigProblem(str(draft.file.path), format_path(draft.entry), message)
            return CheckedDraft(draft, _by_field(draft, [last]), effect, is_valid=False, can_force=False)
        found = list(after.problems) if change.remove else _machine_problems(after, _touched_model(after, change))
        problems = _by_field(draft, _new_problems(draft, found))
        is_valid = not any(each["level"] == "error" for each in problems)
        return CheckedDraft(draft, problems, effect, is_valid=is_valid, can_force=True)


def _describe(checked: CheckedDraft) -> Json:
    draft = checked.draft
    return {
        **draft.file.describe(),
        "file": str(draft.file.path),
        "diff": draft.diff,
        "changed": draft.text != draft.before,
        "problems": checked.problems,
        "valid": checked.is_valid,
        "can_force": checked.can_force,
        "notes": draft.notes,
        "effect": checked.effect,
    }


def _editable(file: ConfigFile) -> EditableFile | None:
    if file.state == "read" or (file.state == "absent" and file.role in _NEW_FILES):
        content = file.path.read_bytes() if file.path.is_file() else None
        return EditableFile(path=file.path, role=file.role, content=content, reason=_not_writable(file.path))
    return None


def _not_writable(file: Path) -> str:
    file = file.resolve()
    if file.exists() and not os.access(file, os.W_OK):
        return "it is read-only for the server"
    folder = next(parent for parent in file.parents if parent.exists())
    return "" if os.access(folder, os.W_OK) else f"the server cannot write into {folder}"


# --- what the files say -----------------------------------------------------------------------------------------------


def overview(state: ConfigState) -> Json:
    """Files, models, caches and routes, each with the file that has it and without secrets."""
    return {
        "files": [file.describe() for file in state.files],
        "target": str(state.target.path),
        "problems": [str(problem) for problem in state.problems],
        "models": [_entry(state, "models", name) for name in state.names("models")],
        "caches": [_entry(state, "caches", name) for name in state.names("caches")],
        "routes": _routes(state),
    }


def _entry(state: ConfigState, section: Section, name: str) -> Json:
    """`values` are those of the file that is edited; `inherited` come from sources below it, `overridden` names the
    source above it that decides."""
    backend, owner = state.backend(section, name), state.owner((section, name))
    layers = [layer for layer in state.loaded.layers if layer.has((section, name))]
    at = layers.index(owner) if owner is not None else len(layers)
    inherited: dict[str, Json] = {}
    for layer in layers[:at]:
        for field, value in flat_values(layer.data[section][name], backend).items():
            inherited[field] = {"value": redacted(_last(field), value), "source": layer.source}
    overridden = {
        field: _decider(layer, (section, name, *field.split(".")))
        for layer in layers[at + 1 :]
        for field in flat_values(layer.data[section][name], backend)
    }
    own = flat_values(owner.data[section][name], backend) if owner is not None else {}
    return {
        "name": name,
        "backend": backend,
        "file": owner.source if owner is not None else None,
        "source": layers[-1].source if layers else "derived",
        "values": {field: redacted(_last(field), value) for field, value in own.items()},
        "inherited": inherited,
        "overridden": overridden,
    }


def _decider(layer: ConfigLayer, path: ConfigPath) -> str:
    return f"{ENVIRONMENT} {layer.describe_path(path)}" if layer.source == ENVIRONMENT else layer.source


def _last(field: str) -> str:
    return field.rpartition(".")[2]


def flat_values(table: Any, backend: str | None) -> Json:
    """The values of a section under the names of the form: `decoding.temperature`, options by their own names."""
    found: Json = {}
    names = option_names(backend)
    for key, value in table.items() if isinstance(table, dict) else ():
        if key == "options" and isinstance(value, dict):
            found |= {names.get(str(option), str(option)): each for option, each in value.items()}
        elif key == "decoding" and isinstance(value, dict):
            found |= {f"decoding.{each}": inner for each, inner in value.items()}
        else:
            found[names.get(str(key), str(key))] = value
    return found


def _routes(state: ConfigState) -> Json:
    owner = state.owner(("routes",))
    source = next((layer.source for layer in reversed(state.loaded.layers) if layer.has(("routes",))), None)
    return {
        "file": owner.source if owner is not None else None,
        "source": source,
        "entries": [route.model_dump(mode="json", exclude_unset=True) for route in state.config.routes],
        "overridden": source in (ENVIRONMENT, COMMAND_LINE),
    }


# --- a change as edits of a file --------------------------------------------------------------------------------------


def make_draft(state: ConfigState, change: ConfigChange) -> Draft:
    file = _file_of(state, change)
    if change.revision is not None and change.revision != file.revision:
        raise changed_meanwhile(file.path)
    if file.reason:
        raise Conflict(f"{file.path} cannot be changed: {file.reason}", code="read_only")
    layer, notes = state.layer(file), list[str]()
    make = _route_edits if change.section == "routes" else _entry_edits
    edits, entry, fields = make(state, layer, change, notes)
    before = decode(file.content) if file.content is not None else ""
    text = edit_text(file.path.suffix.lower(), before, edits)
    return Draft(state, file, text, before, entry, notes, fields)


def _file_of(state: ConfigState, change: ConfigChange) -> EditableFile:
    if change.file:
        return state.file(change.file)
    path: ConfigPath = ("routes",) if change.section == "routes" else (change.section, change.name)
    owner = state.owner(path)
    return state.file(owner.source) if owner is not None else state.target


def _entry_edits(
    state: ConfigState, layer: ConfigLayer, change: ConfigChange, notes: list[str]
) -> tuple[list[FileEdit], ConfigPath, dict[str, str]]:
    section, name = change.section, change.name
    what = f"{section[:-1]} {name!r}"
    if not name.strip() or name != name.strip():
        raise InvalidRequest(f"a {section[:-1]} needs a name without spaces around it", param="name")
    entry = layer.original_path((section, name))
    if change.remove:
        return [_removal(state, layer, change, what, notes)], entry, {}
    known = state.names(section)
    if change.is_new and name in known:
        raise Conflict(f"there is already a {what}", code="exists")
    if not change.is_new and name not in known:
        raise NotFound(f"there is no {what}", param="name")
    if not change.set and not layer.has((section, name)) and change.is_new:
        raise InvalidRequest(f"a new {section[:-1]} needs at least one setting", param="set")
    backend = state.backend(section, name, change.set)
    present = flat_values(layer.data.get(section, {}).get(name), backend)
    edits: list[FileEdit] = list(_built_in(state, layer, section, name, notes))
    fields: dict[str, str] = {}
    for field, value in change.set.items():
        path = _location(layer, (section, name), field, backend)
        fields[format_path(path)] = field
        wanted = _unmasked(value, present.get(field), _last(field), field)
        if wanted is None:
            raise InvalidRequest(f"{field} has no value; unset it instead", param=field)
        edits.append(SetValue(path, wanted))
    for field in change.unset:
        if field not in present:
            raise Conflict(f"{field} of {what} is not set in {layer.source}", param=field)
        edits.append(RemoveValue(_location(layer, (section, name), field, backend)))
    for field in present:
        fields.setdefault(format_path(_location(layer, (section, name), field, backend)), field)
    return edits, entry, fields


def _removal(state: ConfigState, layer: ConfigLayer, change: ConfigChange, what: str, notes: list[str]) -> RemoveValue:
    path = (change.section, change.name)
    if not layer.has(path):
        sources = [each.source for each in state.loaded.layers if each.has(path)]
        if not sources:
            raise NotFound(f"there is no {what}", param="name")
        hint = {
            LIBRARY_SOURCE: "it is a model of the library; remove it there, with its files",
            EMBEDDED_SOURCE: "it is built in and disappears when a file defines a model",
        }
        raise Conflict(f"{what} is not in {layer.source}: {hint.get(sources[-1], f'it comes from {sources[-1]}')}")
    others = [each.source for each in state.loaded.layers if each.has(path) and each is not layer]
    notes += [f"It is also defined by {source}, which stays." for source in others]
    return RemoveValue(layer.original_path(path))


def _built_in(state: ConfigState, layer: ConfigLayer, section: str, name: str, notes: list[str]) -> Iterator[FileEdit]:
    """The complete built-in configuration, before one of its models is changed: a file that names a model replaces all
    of it."""
    embedded = next((each for each in state.loaded.layers if each.source == EMBEDDED_SOURCE), None)
    if embedded is None or section != "models" or not embedded.has((section, name)) or layer.has((section, name)):
        return
    notes.append("The built-in configuration is written, too: a file that defines a model replaces it.")
    for kind in ("models", "caches"):
        for each, table in embedded.data.get(kind, {}).items():
            yield from (SetValue((kind, each, key), value) for key, value in table.items())
    if not layer.has(("default_model",)) and "default_model" in embedded.data:
        yield SetValue(("default_model",), embedded.data["default_model"])
    if not layer.has(("routes",)):
        yield from (
            InsertEntry(("routes", number), route) for number, route in enumerate(embedded.data.get("routes", ()))
        )


def _location(layer: ConfigLayer, entry: ConfigPath, field: str, backend: str | None) -> ConfigPath:
    """The path of a field as the file spells it, or where it goes."""
    parts = tuple(field.split("."))
    names = [alias for alias, name in option_names(backend).items() if name == field] or [field]
    candidates = [parts, *((name,) for name in names), *(("options", name) for name in names)]
    found = next((each for each in candidates if layer.has((*entry, *each))), parts)
    return layer.original_path((*entry, *found))


def _route_edits(
    state: ConfigState, layer: ConfigLayer, change: ConfigChange, notes: list[str]
) -> tuple[list[FileEdit], ConfigPath, dict[str, str]]:
    present, index = state.config.routes, change.index
    edits: list[FileEdit] = []
    root = layer.original_path(("routes",))
    if not layer.has(("routes",)) and present:
        notes.append("The present routes are copied into the file: a list of routes replaces those of other sources.")
        copied = [route.model_dump(mode="json", exclude_unset=True) for route in present]
        edits += [InsertEntry((*root, number), table) for number, table in enumerate(copied)]
    if change.is_new:
        index = len(present) if index is None else index
        if not 0 <= index <= len(present):
            raise NotFound(f"there is no place {index} among {len(present)} routes", param="index")
        edits.append(InsertEntry((*root, index), change.set))
        return edits, (*root, index), {}
    if index is None or not 0 <= index < len(present):
        raise NotFound(f"there is no route {index}; there are {len(present)}", param="index")
    entry = (*root, index)
    if change.remove:
        return [*edits, RemoveValue(entry)], entry, {}
    if change.to is not None:
        if not 0 <= change.to < len(present):
            raise NotFound(f"there is no place {change.to} among {len(present)} routes", param="to")
        edits.append(MoveEntry(entry, change.to))
        entry = (*root, change.to)
    edits += [SetValue((*entry, field), value) for field, value in change.set.items()]
    edits += [RemoveValue((*entry, field)) for field in change.unset]
    return edits, entry, {}


def _unmasked(value: Any, present: Any, name: str, field: str) -> Any:
    """Secrets that the client was not shown come back masked: they stay as they are."""
    if present is not None and value == redacted(name, present):
        return present
    if isinstance(value, dict):
        inner = present if isinstance(present, dict) else {}
        return {key: _unmasked(each, inner.get(key), key, field) for key, each in value.items()}
    if value == MASK and isinstance(present, str):
        return present
    if isinstance(value, str) and MASK in value:
        raise InvalidRequest(f"{field} contains {MASK} in place of a secret; write the secret", param=field)
    return value


# --- problems ---------------------------------------------------------------------------------------------------------


def _touched_model(after: LoadedConfig, change: ConfigChange) -> str | None:
    """The model that runs with the change."""
    if change.section == "models":
        return change.name
    cache = after.config.caches.get(change.name) if change.section == "caches" else None
    return cache.model if cache is not None else None


def _machine_problems(after: LoadedConfig, model: str | None) -> list[ConfigProblem]:
    """Those of the configuration, and what keeps this model from running on this machine."""
    entry = after.config.router().catalog.models.get(model or "")
    if entry is None:
        return list(after.problems)
    estimate = estimate_memory(entry, available_memory())
    return check_models(after, [estimate], read_memory(), only=entry.name)


def _new_problems(draft: Draft, problems: Sequence[ConfigProblem]) -> list[ConfigProblem]:
    """Without those that other parts of the files have anyway."""
    before = {(each.path, each.message) for each in (*draft.state.problems, *draft.state.loaded.problems)}
    own = format_path(draft.entry)
    return [
        each
        for each in problems
        if each.level == "error" or _is_inside(each.path, own) or (each.path, each.message) not in before
    ]


def _is_inside(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith((f"{prefix}.", f"{prefix}["))


def _by_field(draft: Draft, problems: Sequence[ConfigProblem]) -> list[Json]:
    own = format_path(draft.entry)
    return [
        {
            "field": _field_of(draft, each.path, own),
            "path": each.path,
            "message": each.message,
            "level": "error" if each.level == "unavailable" else each.level,
            "line": each.line,
            "source": each.source,
        }
        for each in problems
    ]


def _field_of(draft: Draft, path: str, own: str) -> str:
    """The field of the form; "" for the whole entry or something else."""
    named = [field for place, field in draft.fields.items() if _is_inside(path, place)]
    if named:
        return max(named, key=len)
    rest = path[len(own) :].lstrip(".") if _is_inside(path, own) else ""
    return rest.partition("[")[0]
